"""Combinations of settings that are refused, and settings without effect in a combination: one row each.

The text of a row is a format string of the case `c`. A new axis adds rows here or, if the optimizer matters, in optim/fit.py. The
conditions see a complete plan, so resolution.py computes one even for a config that is then refused. Conflicting batch sizes and
invalid arguments of an optimizer or scheduler have no plan: resolution.py raises their errors.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from slipstream.config.plan import INT4, DataWorld, Plan
from slipstream.world.sizes import MESH_KEYS

if TYPE_CHECKING:
    from slipstream.config.resolution import Values

_OPTIMIZER, _PARAM = "zero_optimization.offload_optimizer", "zero_optimization.offload_param"
_ON_HOST = "the device is a CPU, so states are already in host memory"
_BLOCKS = "activation_checkpointing"
_BOUNDARY = f"{_BLOCKS}.synchronize_checkpoint_boundary"
_CHECK = "slipstream.check_grad_overflow"  # for fp32; DeepSpeed has a key for bf16 only
_CODES = (torch.int8, INT4)
_CURVATURE = ("verbose", "max_iter", "tol", "stability", "gas_boundary_resolution", "layer_name", "layer_num")
_EFFICIENCY = "data_efficiency"
# (inner switch, outer switch): DeepSpeed reads only the inner one
_SWITCHES = [
    (f"{_EFFICIENCY}.{inner}.enabled", f"{_EFFICIENCY}{outer}.enabled")
    for block, parts in {"data_sampling": ("curriculum_learning", "dynamic_batching"), "data_routing": ("random_ltd",)}.items()
    for inner, outer in [*((f"{block}.{part}", f".{block}") for part in parts), *((f"{block}.{part}", "") for part in parts)]
]


class Refusal(NamedTuple):
    when: Callable[[Any], Any]  # the condition on the case
    text: str


def matching(rows: Iterable[Refusal], case: Any) -> Iterator[str]:
    """Yield the texts of the rows whose condition holds."""
    return (row.text.format(c=case) for row in rows if row.when(case))


class Case:
    """A config for the rows of this file: its keys, the resulting plan, and names for parts of both."""

    def __init__(self, values: Values, plan: Plan, world: DataWorld) -> None:
        self.values, self.plan, self.facts = values, plan, values.facts
        self.zero, self.offload, self.precision, self.scale = plan.zero, plan.offload, plan.precision, plan.precision.loss_scale
        self.on_cpu, self.on_cuda = self.facts.device_type == "cpu", self.facts.device_type == "cuda"
        self.half = "fp16" if values["fp16.enabled"] else "bf16" if values["bf16.enabled"] else ""
        self.has_masters = plan.precision.param_dtype.itemsize < plan.precision.master_dtype.itemsize
        self.is_sparse = plan.sparse is not None and plan.sparse["mode"] != "dense"
        self.curriculum = plan.efficiency.get("data_sampling.curriculum_learning")
        self.by_tokens = plan.efficiency.get("data_sampling.dynamic_batching")
        self.drops_tokens = "data_routing.random_ltd" in plan.efficiency
        self.recomputes = plan.activations.way == "recompute"
        self.orders = [path for path in ("eigenvalue", "quantize_training.eigenvalue") if values[f"{path}.enabled"]]
        self.curvatures = [{name: values[f"{path}.{name}"] for name in _CURVATURE} for path in self.orders]
        quantized = ("quantize_training", "compression_training.weight_quantization.shared_parameters")
        self.quantizes = any(values[f"{path}.enabled"] for path in quantized)
        self.compiler_given = values.is_given("compile.backend") or values.is_given("compile.kwargs")
        self.compile_decided = values.is_given("compile.enabled") or values.is_given("compile.disable")
        self.one_host = world.one_host
        self.replicas = world.ranks // plan.mesh.model_size  # number of ranks that have samples of their own
        self.sharing = world.ranks // plan.mesh.pp  # number of ranks that have a replica of a dense parameter
        self.shards = self.zero.shard_size or (plan.mesh.sp * plan.mesh.tp if plan.local_steps.every else self.sharing)
        self.divisors, self.shard_divisors = _divisors(self.sharing), _divisors(self.shards)
        self.sizes = mesh_sizes(values)
        self.whole_blocks = self.offload.block_nbytes >= 4096 and self.offload.block_nbytes % 4096 == 0
        self.param_tier = values.tier("param")  # even if the stage ignores it
        paths = (f"{_BLOCKS}.number_checkpoints", f"{_BLOCKS}.cpu_checkpointing")
        self.recomputing = " and ".join(f"{path} ({str(values[path]).lower()})" for path in paths if values[path])

    @property
    def instead(self) -> str:
        """How to split a model without axes of its own, as the end of a sentence."""
        return "" if self.zero.stage == 3 else " (zero_optimization.stage 3 shards the model, too)"

    @property
    def joined(self) -> int:
        return self.plan.mesh.sp * self.plan.mesh.tp

    @property
    def once_differentiable(self) -> str:
        """The settings that have no second derivative, none in their range (fp16), or that need the weights elsewhere."""
        asked = {
            "fp16.enabled": self.half == "fp16",  # scaled by 2^16 they overflow, and every layer counts as equally sensitive
            "compile.enabled": self.plan.compile,
            "slipstream.fused_layers": self.plan.fused_layers,
            "sequence_parallel_size": self.plan.mesh.sp > 1,
            "zero_optimization.offload_param.device nvme": self.offload.param == "nvme",
        }
        return " and ".join(name for name, is_asked in asked.items() if is_asked)

    @property
    def unmeasured(self) -> str:
        """The settings with which no rank sees a micro-batch's whole gradient, or the step's gradient is no mean."""
        asked = {
            "parts of the model on several ranks": self.plan.mesh.model_size * self.plan.experts.size > 1,
            "slipstream.local_steps": self.plan.local_steps.every,
            "gradient_allreduce_op sum": self.zero.reduce_op == "sum",
            "managed_gradient_accumulation false": not self.plan.batch.managed,
            "data_efficiency.data_sampling.dynamic_batching": self.by_tokens,
        }
        return " and ".join(name for name, is_asked in asked.items() if is_asked)

    @property
    def uneven(self) -> str:
        """The settings that do not build the mean over samples if some ranks have fewer."""
        if self.plan.batch.per_pass % self.replicas == 0:
            return ""
        asked = {
            "slipstream.local_steps": self.plan.local_steps.every,
            "slipstream.noise_scale_every": self.plan.noise_every,
            "gradient_allreduce_op sum": self.zero.reduce_op == "sum",
            "managed_gradient_accumulation false": not self.plan.batch.managed,
            f"{_EFFICIENCY}.data_sampling": self.curriculum or self.by_tokens,
            "a loader of your own (pass training_data to initialize)": not self.facts.has_data,
        }
        return " and ".join(name for name, is_asked in asked.items() if is_asked)

    @property
    def measuring(self) -> str:
        return f"slipstream.{'adaptive_batch' if self.plan.adaptive else 'noise_scale_every'}"

    @property
    def decided_elsewhere(self) -> str:
        """The settings that require one batch size for all steps."""
        asked = {
            "elasticity": self.values["elasticity.enabled"],
            f"{_EFFICIENCY}.data_sampling.curriculum_learning": self.curriculum,
        }
        return " and ".join(name for name, is_asked in asked.items() if is_asked)

    @property
    def bubble(self) -> float:
        """The idle share of a pipeline's step, with equal times of forward and of backward by inputs and by weights: that of
        parallel/schedule.py's `Style`, for at least as many micro-batches as stages."""
        chunks = self.plan.pipeline.chunks
        parts = self.plan.batch.accumulation * {"zero_bubble": 3 * chunks, "v": 6}.get(self.plan.pipeline.schedule, chunks)
        return (self.plan.mesh.pp - 1) / (parts + self.plan.mesh.pp - 1)

    @property
    def enough(self) -> int:
        """The customary number of micro-batches: four per stage, where interleaved stages share the gaps."""
        return -(-4 * self.plan.mesh.pp // self.plan.pipeline.chunks)

    @property
    def idles(self) -> bool:
        """Whether a pipeline has fewer micro-batches, and nothing fills the gaps."""
        return self.plan.batch.accumulation < self.enough and self.plan.pipeline.schedule not in ("zero_bubble", "v")

    @property
    def contradiction(self) -> str:
        """The first axis whose size is stated twice with different values, as text; "" if there is none."""
        differing = (stated for stated in self.sizes.values() if len({size for _, size in stated}) > 1)
        return " and ".join(f"{name} ({size})" for name, size in next(differing, []))

    @property
    def asks_to_save(self) -> str:
        names = ("every_steps", "every_minutes", "memory_every_steps", "on_signal", "resume")
        given = [name for name in names if self.values.is_given(f"slipstream.checkpoint.{name}")]
        return " and ".join(name for name in given if getattr(self.plan.checkpoint, name))

    @property
    def wrong_signals(self) -> str:
        known = {each.name for each in signal.Signals} - {"SIGKILL", "SIGSTOP"}
        return ", ".join(name for name in self.plan.checkpoint.on_signal if name not in known)


def _divisors(ranks: int) -> str:
    return ", ".join(str(size) for size in range(1, ranks + 1) if ranks % size == 0)


def _is_alone(inner: str, outer: str, case: Case) -> bool:
    """Whether a switch is on while its outer switch is explicitly off."""
    return bool(case.values[inner] and not case.values[outer] and case.values.is_given(outer))


def _is_implied(inner: str, outer: str, case: Case) -> bool:
    return bool(case.values[inner] and not case.values.is_given(outer))


def _idle(path: str, why: str, when: Callable[[Any], Any]) -> Refusal:
    """A row for a key that is set, but has no effect in a combination."""
    return Refusal(lambda c: c.values[path] and when(c), f"{path} has no effect here: {why}")


def mesh_sizes(values: Values) -> dict[str, list[tuple[str, int]]]:
    """The sizes that keys or arguments state for each axis of `MeshPlan`, with their names."""
    stated: dict[str, list[tuple[str, int]]] = {}
    for axis, paths in MESH_KEYS.items():
        sizes = {path: values[path] for path in paths if values.is_given(path)}
        sizes = {path: size for path, size in sizes.items() if size > 1 or not path.startswith("tensor_parallel.")}  # as DeepSpeed
        sizes["the model or an argument"] = values.facts.mesh.get(axis)
        stated[axis] = [(name, max(size, 1)) for name, size in sizes.items() if isinstance(size, int)]
    return stated


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        lambda c: c.plan.checkpoint.per_host and c.plan.checkpoint.memory_every_steps and not c.one_host,
        "slipstream.checkpoint.memory_every_steps resumes from host memory or from a disk that all hosts share, but "
        "checkpoint.use_node_local_storage uses a separate disk on each host; drop one of the two",
    ),
    Refusal(
        lambda c: c.plan.quantized and c.plan.mesh.pp > 1,
        "weight_quantization is not supported with pipelines (pp {c.plan.mesh.pp}); use zero_optimization.stage 3 to shard the "
        "model instead",
    ),
    Refusal(
        lambda c: c.plan.checkpoint.per_host and c.plan.checkpoint.asynchronous and not c.one_host,
        "asynchronous checkpoints (checkpoint.writer.decoupled, datastates_ckpt) need one folder for the files of all ranks, but "
        "checkpoint.use_node_local_storage uses one folder per host; drop one of the two",
    ),
    Refusal(
        lambda c: c.plan.trace is not None and (len(c.plan.trace.steps) != 2 or c.plan.trace.steps[0] >= c.plan.trace.steps[1]),
        "slipstream.trace.steps is {c.plan.trace.steps}, but must be two increasing numbers of finished steps, at which the trace "
        "starts and ends; set it to [10, 13], for example",
    ),
    Refusal(
        lambda c: c.contradiction, "{c.contradiction} contradict each other: they set the size of one mesh axis; drop all but one"
    ),
    Refusal(
        lambda c: c.plan.pipeline.reduce == "micro_batch" and c.plan.pipeline.schedule in ("zero_bubble", "v"),
        "slipstream.pipeline.reduce micro_batch does not work with schedule {c.plan.pipeline.schedule}, which computes weight "
        'gradients after the backward; use schedule "1f1b", or reduce "step"',
    ),
    Refusal(
        lambda c: c.offload.optimizer == "nvme" and not c.offload.optimizer_path,
        f"{_OPTIMIZER}.device is nvme; set {_OPTIMIZER}.nvme_path to a directory on the disk",
    ),
    Refusal(
        lambda c: c.offload.param == "nvme" and not c.offload.param_path,
        f"{_PARAM}.device is nvme; set {_PARAM}.nvme_path to a directory on the disk",
    ),
    Refusal(
        lambda c: c.offload.uses_disk and not (c.whole_blocks and 1 <= c.offload.queue_depth <= 4096),
        "for direct I/O, aio.block_size ({c.offload.block_nbytes}) must be a multiple of 4096, and aio.queue_depth "
        "({c.offload.queue_depth}) must be from 1 to 4096; set them so",
    ),
    Refusal(
        lambda c: (c.offload.uses_disk or (c.offload.optimizer == "cpu" and not c.on_cpu)) and c.offload.num_buffers < 2,
        "zero_optimization.offload_optimizer.buffer_count is {c.offload.num_buffers}; set it to 2 or more to overlap I/O with "
        "computation",
    ),
    Refusal(
        lambda c: c.values["fp16.enabled"] and c.values["bf16.enabled"],
        "fp16.enabled and bf16.enabled are both true, but weights have only one dtype; turn one of them off",
    ),
    Refusal(
        lambda c: c.half == "bf16" and not c.facts.supports_bf16,
        "bf16.enabled is true, but this {c.facts.device_type} device does not support bf16; "
        'use {{"fp16": {{"enabled": true}}}}, or "auto" in both',
    ),
    Refusal(
        lambda c: c.half and c.values["data_types.param_dtype"] not in (None, c.half),
        "data_types.param_dtype is {c.values[data_types.param_dtype]}, but {c.half}.enabled is true; drop one of the two",
    ),
    Refusal(
        lambda c: not c.half and c.values["data_types.param_dtype"] == "fp16",
        'data_types.param_dtype is fp16, which needs a loss scale; set {{"fp16": {{"enabled": true}}}} instead',
    ),
    Refusal(
        lambda c: c.precision.stochastic_rounding and c.precision.param_dtype is not torch.bfloat16,
        '"slipstream": {{"stochastic_rounding": true}} needs bf16 weights, which it trains without fp32 master weights; also set '
        '{{"bf16": {{"enabled": true}}}}, or drop it',
    ),
    Refusal(
        lambda c: c.scale is not None and c.scale.static is None and c.scale.initial < c.scale.minimum,
        "fp16.initial_scale_power gives a loss scale of {c.scale.initial:g}, below fp16.min_loss_scale ({c.scale.minimum:g}); "
        "raise the power or lower the minimum",
    ),
    Refusal(
        lambda c: c.zero.shard_size is not None and c.zero.stage != 3,
        "zero_optimization.mics_shard_size ({c.zero.shard_size}) requires zero_optimization.stage 3, but the stage is "
        "{c.zero.stage}; set it to 3 or drop mics_shard_size",
    ),
    Refusal(
        lambda c: c.zero.shard_size is not None and c.sharing % c.zero.shard_size,
        "zero_optimization.mics_shard_size ({c.zero.shard_size}) does not divide the {c.sharing} ranks that share states; use one "
        "of {c.divisors}",
    ),
    Refusal(
        lambda c: c.zero.group_size is not None and c.shards % c.zero.group_size,
        "zero_optimization.zero_hpz_partition_size ({c.zero.group_size}) does not divide the {c.shards} ranks that share states; "
        "use one of {c.shard_divisors}",
    ),
    Refusal(
        lambda c: c.plan.compression and (c.plan.mesh.pp > 1 or c.plan.mesh.tp > 1),
        "compression_training and quantize_training are not supported with pipeline or tensor parallelism (pp {c.plan.mesh.pp}, tp "
        "{c.plan.mesh.tp}); use pp 1 and tp 1{c.instead}, or drop them",
    ),
    Refusal(
        lambda c: c.orders and not c.quantizes,
        "{c.orders[0]}.enabled sets when weights lose bits, but nothing quantizes weights; enable quantize_training or "
        "compression_training.weight_quantization, or drop it",
    ),
    Refusal(
        lambda c: len(c.orders) > 1 and c.curvatures[0] != c.curvatures[1],
        "eigenvalue and quantize_training.eigenvalue are both enabled, but have different settings; drop one of them",
    ),
    Refusal(
        lambda c: c.orders and c.once_differentiable,
        "{c.orders[0]}.enabled needs second derivatives, which {c.once_differentiable} does not support; drop one of the two",
    ),
    Refusal(
        lambda c: c.plan.curriculum and (c.plan.mesh.pp > 1 or c.plan.mesh.sp > 1),
        "curriculum_learning is not supported with pipeline or sequence parallelism (pp {c.plan.mesh.pp}, sp {c.plan.mesh.sp}); "
        "use pp 1 and sp 1{c.instead}, or drop it",
    ),
    *(
        Refusal(partial(_is_alone, inner, outer), f"{inner} is true, but {outer} is false; set both to the same value")
        for inner, outer in _SWITCHES
    ),
    Refusal(
        lambda c: c.drops_tokens and (c.plan.mesh.pp > 1 or c.plan.mesh.sp > 1 or c.plan.tensor.shares_tokens),
        f"{_EFFICIENCY}.data_routing.random_ltd is not supported with pipeline or sequence parallelism (pp {{c.plan.mesh.pp}}, sp "
        "{c.plan.mesh.sp}, slipstream.tensor.sequence_parallel {c.plan.tensor.shares_tokens}); use pp 1 and sp 1 without "
        "sequence_parallel{c.instead}, or drop it",
    ),
    Refusal(
        lambda c: c.drops_tokens and c.is_sparse,
        f"{_EFFICIENCY}.data_routing.random_ltd drops tokens, which shifts the blocks of sparse_attention; drop one of the two",
    ),
    Refusal(
        lambda c: c.curriculum and c.by_tokens,
        f"{_EFFICIENCY}.data_sampling: curriculum_learning and dynamic_batching both choose a batch's samples; drop one of them",
    ),
    Refusal(
        lambda c: c.by_tokens and not c.by_tokens["max_tokens"],
        f"{_EFFICIENCY}.data_sampling.dynamic_batching is enabled without max_tokens; set it to a micro-batch's maximum of tokens",
    ),
    Refusal(
        lambda c: c.plan.fused_layers and c.plan.compile,
        "slipstream.fused_layers and compile.enabled both fuse the layers; drop one of them",
    ),
    Refusal(
        lambda c: c.plan.noise_every and not (c.plan.adaptive or c.plan.monitors or c.plan.own_monitors),
        "slipstream.noise_scale_every measures for monitors, but none is enabled; enable one, such as "
        '{{"slipstream": {{"monitors": {{"report": {{}}}}}}}}, or drop it',
    ),
    Refusal(
        lambda c: c.plan.batch.elastic and c.values["elasticity.enabled"],
        "slipstream.elastic_batch keeps train_batch_size on any number of ranks, but elasticity computes one; drop one of the two",
    ),
    Refusal(
        lambda c: c.plan.batch.elastic and c.uneven,
        "slipstream.elastic_batch: {c.replicas} data-parallel ranks do not divide the {c.plan.batch.per_pass} samples of a "
        "micro-batch, so some ranks get one sample less, which is not supported with {c.uneven}; drop one of the two",
    ),
    Refusal(
        lambda c: c.plan.noise_every and c.unmeasured,
        "{c.measuring} compares the gradients of micro-batches with their mean, which is not supported with {c.unmeasured}; drop "
        "one of the two",
    ),
    Refusal(
        lambda c: c.plan.adaptive and c.decided_elsewhere,
        "slipstream.adaptive_batch changes train_batch_size, but {c.decided_elsewhere} needs a constant one; drop one of the two",
    ),
    Refusal(
        lambda c: c.plan.adaptive and not c.plan.adaptive.least <= c.plan.batch.train_batch_size <= c.plan.adaptive.most,
        "slipstream.adaptive_batch: training begins with train_batch_size ({c.plan.batch.train_batch_size}), which is not between "
        "min_batch_size ({c.plan.adaptive.least}) and max_batch_size ({c.plan.adaptive.most}); set bounds around it",
    ),
    Refusal(
        lambda c: c.plan.pipeline.chunks > 1 and c.plan.pipeline.schedule in ("gpipe", "v"),
        "slipstream.pipeline.chunks ({c.plan.pipeline.chunks}) is for the schedules 1f1b and zero_bubble, but the schedule is "
        "{c.plan.pipeline.schedule}, which has its own number of stages per rank; drop chunks",
    ),
    Refusal(
        lambda c: c.plan.pipeline.partition == "profile" and c.plan.mesh.sp * c.plan.mesh.tp * c.plan.experts.size > 1,
        "pipeline.partition profile measures a whole model in one process, which is not supported with sp {c.plan.mesh.sp}, tp "
        "{c.plan.mesh.tp} and experts split over {c.plan.experts.size} ranks; use parameters or uniform",
    ),
    Refusal(
        lambda c: c.plan.layer_drop and not c.plan.zero.ignore_unused,
        "progressive_layer_drop skips layers, whose parameters then get no gradient, but "
        "zero_optimization.ignore_unused_parameters is false; set it to true",
    ),
    Refusal(
        lambda c: c.is_sparse and c.plan.mesh.sp > 1,
        "sparse_attention is not supported with sequence parallelism (sequence_parallel_size {c.plan.mesh.sp}); use tensor "
        "parallelism instead (sp 1, tp {c.joined}), or drop it",
    ),
    Refusal(
        lambda c: c.is_sparse and c.plan.sparse["different_layout_per_head"] and c.plan.mesh.tp > 1,
        "sparse_attention.different_layout_per_head is not supported with tensor parallelism (tensor_parallel.autotp_size "
        "{c.plan.mesh.tp}); use tp 1{c.instead}, or drop it",
    ),
    Refusal(
        lambda c: c.plan.rollouts and c.plan.mesh.pp > 1,
        "hybrid_engine is not supported with pipelines (pp {c.plan.mesh.pp}); drop it, and pass engine.named_weights() to a server",
    ),
    Refusal(
        lambda c: c.plan.local_steps.every and c.plan.experts.size > 1,
        "slipstream.local_steps is not supported with experts that are split over ranks (expert_parallel.autoep_size "
        "{c.plan.experts.size}); set that to 1, or drop local_steps",
    ),
    Refusal(
        lambda c: c.plan.experts.rest_unused and not c.plan.experts.enabled,
        "slipstream.rest_unused_experts applies to the experts that expert_parallel finds; set expert_parallel.enabled to true",
    ),
    Refusal(
        lambda c: c.plan.local_steps.every and c.plan.experts.rest_unused,
        "slipstream.local_steps is not supported with slipstream.rest_unused_experts: replicas use different experts in their "
        "local steps, and would have to agree in every step; drop one of the two",
    ),
    Refusal(
        lambda c: c.plan.local_steps.every and c.shards % c.joined,
        "with slipstream.local_steps, zero_optimization.mics_shard_size ({c.shards}) is the number of a stage's ranks that train "
        "together, and must be a multiple of {c.joined} (sp {c.plan.mesh.sp} x tp {c.plan.mesh.tp}); use one, or drop it",
    ),
    Refusal(
        lambda c: c.plan.local_steps.every and c.plan.local_steps.overlap >= c.plan.local_steps.every,
        "slipstream.local_steps.overlap ({c.plan.local_steps.overlap}) must be less than every ({c.plan.local_steps.every}), so "
        "that an exchange ends before the next one begins; set a smaller overlap",
    ),
    Refusal(
        lambda c: c.plan.local_steps.every and c.plan.checkpoint.folder,
        "slipstream.checkpoint.folder needs all ranks to communicate in every step, but with slipstream.local_steps they do not; "
        "drop it, and use engine.save_checkpoint() in the script",
    ),
    Refusal(
        lambda c: c.asks_to_save and not c.plan.checkpoint.folder,
        "slipstream.checkpoint sets {c.asks_to_save} without a folder; set slipstream.checkpoint.folder",
    ),
    Refusal(
        lambda c: c.wrong_signals,
        "slipstream.checkpoint.on_signal has {c.wrong_signals}, which a process cannot handle; use signal names such as SIGUSR1",
    ),
    Refusal(
        lambda c: c.values["zero_optimization.zero_quantized_gradients"] and c.precision.comm_dtype is not INT4,
        "zero_optimization.zero_quantized_gradients communicates gradients as 4-bit codes, but communication_data_type is "
        "{c.values[communication_data_type]}; drop one of the two",
    ),
    Refusal(
        lambda c: c.zero.coded_frozen and (c.offload.param == "nvme" or (c.offload.param == "cpu" and not c.on_cpu)),
        "zero_optimization.zero_quantized_nontrainable_weights keeps quantized frozen weights in the device's memory, but "
        "offload_param moves weights to {c.offload.param}; drop one of the two",
    ),
    Refusal(
        lambda c: c.zero.error_beta is not None and c.precision.comm_dtype not in _CODES,
        "zero_optimization.zeropp_loco_param is error feedback for quantized gradients, but gradients are not quantized; also set "
        "zero_optimization.zero_quantized_gradients, or communication_data_type to int8 or int4",
    ),
    Refusal(
        lambda c: c.zero.transport == "shared" and c.on_cuda,
        '"slipstream": {{"transport": "shared"}} is the shared memory of CPU ranks on a host, but these ranks train on GPUs; use '
        '"auto", which selects NCCL',
    ),
    Refusal(
        lambda c: c.zero.transport == "shared" and c.offload.param == "nvme" and c.on_cpu,
        '"slipstream": {{"transport": "shared"}} keeps all weights in memory, but offload_param puts them on disk; use "auto"',
    ),
    Refusal(
        lambda c: c.recomputing and c.values.is_given("slipstream.activations") and not c.recomputes,
        "slipstream.activations is {c.values[slipstream.activations]!r}, but {c.recomputing} enables recomputation; drop one of "
        'the two, or set slipstream.activations to "recompute"',
    ),
)

# For `engine.surgery()`; the case is the engine's `States`.
SURGERY: tuple[Refusal, ...] = (
    Refusal(
        lambda c: c.plan.local_steps.every,
        "engine.surgery() does not work with slipstream.local_steps; change the model before initialize()",
    ),
    Refusal(
        lambda c: c.mesh.pp.size > 1 and (c.plan.pipeline.schedule == "zero_bubble" or getattr(c.model, "is_v", False)),
        "engine.surgery() does not work with schedule {c.plan.pipeline.schedule!r} of {c.model.__class__.__name__}, which delays "
        'weight gradients; use slipstream.pipeline.schedule "1f1b" and a PipelineModule',
    ),
)

NO_EFFECT: tuple[Refusal, ...] = (
    *(
        Refusal(partial(_is_implied, inner, outer), f"{inner} is true and {outer} is not set: it is enabled, as in DeepSpeed")
        for inner, outer in _SWITCHES
    ),
    Refusal(lambda c: c.offload.optimizer == "cpu" and c.on_cpu, f"{_OPTIMIZER} (cpu) has no effect here: {_ON_HOST}"),
    Refusal(lambda c: c.offload.param == "cpu" and c.on_cpu, f"{_PARAM} (cpu) has no effect here: {_ON_HOST}"),
    Refusal(
        lambda c: c.param_tier != c.offload.param,
        f"{_PARAM} ({{c.param_tier}}) has no effect here: at stage {{c.zero.stage}} every rank keeps all weights on its device; "
        "only stage 3 shards them",
    ),
    Refusal(
        lambda c: c.offload.optimizer == "cpu" and not c.on_cpu and c.offload.ratio < 1,
        f"{_OPTIMIZER}.ratio has no effect with device cpu: all optimizer states are offloaded",
    ),
    Refusal(
        lambda c: c.values.asks_to_write_later and c.offload.uses_disk,
        "checkpoint.writer.decoupled (or datastates_ckpt) has no effect with states on nvme: they are saved synchronously, because "
        "the next step overwrites them in place",
    ),
    Refusal(
        lambda c: c.plan.checkpoint.per_host and c.one_host,
        "checkpoint.use_node_local_storage has no effect here: all ranks share one host and its disk",
    ),
    Refusal(
        lambda c: c.zero.coded_frozen and c.zero.stage < 3,
        "zero_optimization.zero_quantized_nontrainable_weights has no effect at stage {c.zero.stage}: only stage 3 shards weights",
    ),
    Refusal(
        lambda c: c.zero.coded_weights and c.zero.stage == 0,
        "zero_optimization.zero_quantized_weights has no effect at stage 0: ranks do not exchange weights",
    ),
    Refusal(
        lambda c: c.zero.coded_weights and 0 < c.zero.stage < 3 and not c.has_masters,
        "zero_optimization.zero_quantized_weights has no effect at stage {c.zero.stage} with weights in "
        "{c.precision.param_dtype} and no separate master weights: it needs bf16 or fp16 weights with fp32 master weights",
    ),
    Refusal(
        lambda c: c.zero.group_size is not None and c.zero.group_size == c.shards,
        "zero_optimization.zero_hpz_partition_size has no effect here: all {c.shards} ranks that share states are one group",
    ),
    Refusal(
        lambda c: c.zero.group_size is not None and c.zero.stage < 3 and c.precision.comm_dtype not in _CODES,
        "zero_optimization.zero_hpz_partition_size has no effect at stage {c.zero.stage} with unquantized gradients: groups apply "
        "to weights, which only stage 3 gathers, and to quantized gradients",
    ),
    Refusal(
        lambda c: c.values.is_given(_CHECK) and c.scale is not None,
        f"{_CHECK} has no effect here: with a loss scale, steps that overflow are always skipped",
    ),
    Refusal(
        lambda c: c.values.is_given(_CHECK) and c.scale is None and c.precision.param_dtype is not torch.float32,
        f"{_CHECK} has no effect here: bf16.check_grad_overflow applies to bf16 weights",
    ),
    Refusal(
        lambda c: c.values["slipstream.activations"] == "offload" and not c.on_cuda,
        "slipstream.activations = offload has no effect here: without a CUDA device, activations are already in host memory",
    ),
    _idle(
        f"{_BLOCKS}.cpu_checkpointing", "without a CUDA device, saved inputs are already in host memory", lambda c: not c.on_cuda
    ),
    _idle(_BOUNDARY, "without a CUDA device, operations are synchronous", lambda c: not c.on_cuda),
    _idle(_BOUNDARY, "no block is recomputed", lambda c: c.on_cuda and not c.recomputes),
    _idle(f"{_BLOCKS}.profile", "no block is recomputed", lambda c: not c.recomputes),
    Refusal(
        lambda c: c.compiler_given and not c.compile_decided,
        "compile.backend and compile.kwargs have no effect here: compile.enabled is not set to true",
    ),
    Refusal(
        lambda c: c.plan.mesh.pp > c.plan.batch.accumulation or (c.idles and c.plan.mesh.pp > 1),
        "gradient_accumulation_steps {c.plan.batch.accumulation} gives a pipeline of {c.plan.mesh.pp} stages few micro-batches to "
        "overlap: its ranks idle in about {c.bubble:.0%} of a step. Take {c.enough} or more, or set slipstream.pipeline.schedule "
        'to "zero_bubble"',
    ),
)

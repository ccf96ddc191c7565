"""The frozen `Plan`: the resolved config that the engine uses, with the source of each value.

Code outside `config/` never sees JSON, `"auto"`, aliases or defaults. A plan is plain data: it can be compared, pickled and sent to
another process. `resolution.py` creates it.

A field names its JSON key. `Values.section` in resolution.py reads the fields that are not computed from several values, and
`plan_values` maps the plan back to keys.

Values of `sources`, by dotted key: "config" (set by the user), "argument" (an override passed with the config), "default" (of
DeepSpeed 0.19), "auto: <rule>" (the user wrote "auto"), "derived: <formula>" (computed from other values).
"""

# ruff: noqa: RUF009 (key and of return a dataclasses.field)

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

if TYPE_CHECKING:
    from slipstream.config.data import ProgressiveLayerDrop
    from slipstream.config.features import Compile, HybridEngine
    from slipstream.config.observing import CommsLogger, FlopsProfiler
    from slipstream.config.schema import LocalSteps, Trace

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Elements: 28 MiB with gradients and weights in 16 bits; large enough for any disk, small compared to a memory budget.
MOST_CHUNK = 1 << 21
INT4: torch.dtype = getattr(torch, "int4")  # noqa: B009 (torch's stubs lack it)
WIRE_DTYPES = DTYPES | {"int8": torch.int8, "int4": INT4}
_NAMES = {dtype: name for name, dtype in WIRE_DTYPES.items()}


def _same(value: Any) -> Any:
    return value


class Json(NamedTuple):
    """The JSON key of a field. `x.*`: one key for each item of a mapping."""

    name: str  # "*": the field is a mapping of block names to blocks
    read: Callable[[Any], Any] = _same  # the key's value -> the field's
    shown: Callable[[Any], Any] = _same  # the field's value -> the key's
    when: Callable[[Any], bool] = lambda section: True  # whether the section of the plan uses the key


def of(*keys: Json) -> Any:
    """A field that is derived from several keys."""
    return field(metadata={"keys": keys})


def key(name: str, **conversions: Callable[[Any], Any]) -> Any:
    """A field that holds the value of a key. conversions: as in `Json`"""
    return of(Json(name, **conversions))


def _leaves(block: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a block by dotted key, without inner blocks that are off."""
    for name, value in block.items():
        if not isinstance(value, Mapping):
            yield path + name, value
        elif value.get("shared_parameters", value).get("enabled", True):
            yield from _leaves(value, f"{path}{name}.")


def block(name: str) -> Any:
    """A field that holds a block of the config as a mapping; None: it is off."""
    return key(name, shown=lambda values: dict(_leaves(values or {})))


def parsed(name: str) -> Any:
    """A field that holds a block of the config, without blocks inside, as the schema has it; None: it is off."""
    return key(f"{name}.*", shown=lambda block: {} if block is None else vars(block))


def _without_secrets(blocks: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the monitors' blocks without secrets, for logs and reports."""
    hidden = ("api_key", "headers")
    return {name: "(hidden)" if value and name.rpartition(".")[2] in hidden else value for name, value in _leaves(blocks)}


def json_keys(section: Any) -> dict[str, tuple[Json, ...]]:
    """Return the keys of each field of a section, which is a dataclass of the plan or an instance of one."""
    return {each.name: each.metadata.get("keys", ()) for each in fields(section)}


@dataclass(frozen=True, slots=True, kw_only=True)
class DataWorld:
    ranks: int  # number of ranks of the engine
    one_host: bool = True  # whether all ranks share a host


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts about the model, the device and other arguments of `initialize` that rules for "auto" use."""

    device_type: str
    supports_bf16: bool
    loader_batch_size: int | None = None  # of a DataLoader passed by the user
    has_data: bool = True  # whether the engine makes the loader
    optimizer_lr: float | None = None  # of an optimizer passed by the user
    brings_schedule: bool = False  # whether the user passes a schedule, so the config's is not built
    mesh: Mapping[str, int] = field(default_factory=dict)  # axis -> size, from a pipeline module, an mpu or mesh_param
    has_tensor_ranks: bool = False  # whether an mpu or a pipeline's topology states the tp axis
    ahead: bool = False  # a dry run: values that the training loop sets may be missing


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan:
    """The sizes of the axes inside one replica of the model. Each may be stated by several keys (`MESH_KEYS`)."""

    pp: int = key("slipstream.mesh.pp")
    sp: int = key("slipstream.mesh.sp")
    tp: int = key("slipstream.mesh.tp")

    @property
    def model_size(self) -> int:
        """The number of ranks that hold one replica of the model."""
        return self.pp * self.sp * self.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    schedule: Literal["1f1b", "gpipe", "zero_bubble", "v"] = key("slipstream.pipeline.schedule")
    chunks: int = key("slipstream.pipeline.chunks")  # stages on each rank
    partition: str = key("pipeline.partition", read=lambda method: "parameters" if method == "best" else method)
    reduce: Literal["step", "micro_batch"] = key("slipstream.pipeline.reduce")
    recompute_interval: int = key("pipeline.activation_checkpoint_interval")  # layers that are recomputed together; 0: the module's
    shares_outputs: bool = key("pipeline.pipe_partitioned")  # each tp rank sends a share of a stage's outputs
    shares_grads: bool = key("pipeline.grad_partitioned")  # the same for the gradients of a stage's inputs


def _unless_auto(value: Any) -> Any:
    return None if value == "auto" else value


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlan:
    """How layers of experts are split over ranks, and what their routers do."""

    enabled: bool = key("expert_parallel.enabled")  # otherwise `size` is 1 and the fields below of this block are None
    size: int = key("expert_parallel.autoep_size")
    rest_unused: bool = key("slipstream.rest_unused_experts")
    preset: str | None = key("expert_parallel.preset_model")
    layer_pattern: str | None = key("expert_parallel.moe_layer_pattern")
    expert_pattern: str | None = key("expert_parallel.expert_pattern")
    # settings of routers; None: the model's own
    top_k: int | None = key("expert_parallel.top_k", read=_unless_auto)
    route_norm: bool | None = key("expert_parallel.route_norm")
    route_scale: float | None = of(
        Json("expert_parallel.route_scale"), Json("expert_parallel.routed_scaling_factor", read=_unless_auto)
    )
    num_expert_groups: int | None = key("expert_parallel.num_expert_groups")
    num_limited_groups: int | None = key("expert_parallel.num_limited_groups")
    score_func: str | None = key("expert_parallel.score_func", read=_unless_auto)
    score_apply: str | None = key("expert_parallel.score_apply", read=_unless_auto)
    expert_activation: str | None = key("expert_parallel.expert_activation")
    balance_rate: float | None = key("expert_parallel.load_balance_coeff")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """How layers are sliced over the tp axis."""

    size: int = of(  # 1: not asked for here
        Json("tensor_parallel.autotp_size", shown=lambda size: size if size > 1 else 0), Json("tensor_parallel.tp.tp_size")
    )
    preset: str | None = key("tensor_parallel.preset_model")
    partition: Mapping[str, Any] | None = key("tensor_parallel.partition_config")  # parallel/cuts.py reads it
    vocab_head: bool = key("tensor_parallel.vocab_parallel_lm_head", read=bool)
    shares_tokens: bool = key("slipstream.tensor.sequence_parallel")
    overlaps: bool = key("tensor_parallel.tp_overlap_comm")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """`train_batch_size` = `micro_batch_size` x `accumulation` x data-parallel ranks; with `elastic`, some ranks get one sample
    less in each micro-batch."""

    train_batch_size: int = key("train_batch_size")
    micro_batch_size: int = key("train_micro_batch_size_per_gpu")
    accumulation: int = key("gradient_accumulation_steps")
    managed: bool = key("managed_gradient_accumulation")  # step() updates at the accumulation boundary; otherwise at every call
    elastic: bool = key("slipstream.elastic_batch")

    @property
    def per_pass(self) -> int:
        """The number of samples in a micro-batch of all ranks."""
        return self.train_batch_size // self.accumulation

    def own(self, index: int, ranks: int) -> int:
        """The number of samples in a micro-batch of rank `index` of `ranks`; samples are distributed round-robin."""
        return -(-(self.per_pass - index) // ranks)

    def weight(self, index: int, ranks: int) -> float:
        """The weight of that rank's mean loss with which the mean over ranks is the mean over samples."""
        return self.own(index, ranks) * ranks / self.per_pass


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroPlan:
    stage: Literal[0, 1, 2, 3] = key("zero_optimization.stage")
    # MiCS: ranks that share one copy of the states; None = all data-parallel ranks
    shard_size: int | None = key("zero_optimization.mics_shard_size", read=lambda size: size if size > 0 else None)
    # ZeRO++: neighboring ranks, which exchange weights and codes of gradients before these cross groups; None = no groups
    group_size: int | None = key("zero_optimization.zero_hpz_partition_size", read=lambda size: size if size > 1 else None)
    transport: Literal["auto", "shared", "gloo"] = key("slipstream.transport")
    sends_rows: bool = key("sparse_gradients")  # send only the nonzero rows of embeddings' gradients
    coded_weights: bool = key("zero_optimization.zero_quantized_weights")  # gather or publish weights in codes
    coded_frozen: bool = key("zero_optimization.zero_quantized_nontrainable_weights")  # store and gather frozen weights in codes
    # Error feedback of gradients in codes: the weight of old errors in the new ones, and steps until they are dropped. None = off
    error_beta: float | None = key("zero_optimization.zeropp_loco_param.err_beta", when=lambda plan: plan.error_beta is not None)
    error_steps: int = key("zero_optimization.zeropp_loco_param.reset_T", when=lambda plan: plan.error_beta is not None)
    reduce_op: Literal["mean", "sum"] = key("gradient_allreduce_op")
    leaf_classes: tuple[str, ...] = key("zero_optimization.leaf_module.classes", read=tuple, shown=list)  # gathered as a whole
    leaf_names: tuple[str, ...] = key("zero_optimization.leaf_module.names", read=tuple, shown=list)
    leaf_name_suffixes: tuple[str, ...] = key("zero_optimization.leaf_module.name_suffixes", read=tuple, shown=list)
    # Parameters without a gradient; otherwise the step raises an error.
    ignore_unused: bool = key("zero_optimization.ignore_unused_parameters")
    compares_weights: bool = key("zero_optimization.enable_sanity_checks")  # each step, those that are replicated


_OPTIMIZER, _PARAM = "zero_optimization.offload_optimizer", "zero_optimization.offload_param"


def _is_offloaded(plan: OffloadPlan) -> bool:
    return plan.optimizer != "none"


def _is_on_disk(plan: OffloadPlan) -> bool:
    return plan.optimizer == "nvme"


def _params_on_disk(plan: OffloadPlan) -> bool:
    return plan.param == "nvme"


def _uses_disk(plan: OffloadPlan) -> bool:
    return plan.uses_disk


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadPlan:
    """Where states are stored. "cpu" is host memory; it has no effect if the device is a CPU."""

    optimizer: Literal["none", "cpu", "nvme"] = key(f"{_OPTIMIZER}.device", when=_is_offloaded)  # masters and moments
    optimizer_path: str | None = key(f"{_OPTIMIZER}.nvme_path", when=_is_on_disk)
    ratio: float = key(f"{_OPTIMIZER}.ratio", when=_is_offloaded)  # fraction of each unit's masters and moments that is offloaded
    num_buffers: int = key(f"{_OPTIMIZER}.buffer_count", when=_is_on_disk)  # chunks in memory at a time
    # Maximum, when the optimizer streams states.
    chunk_numel: int = key("zero_optimization.sub_group_size", read=lambda numel: min(max(numel, 1), MOST_CHUNK), when=_is_on_disk)
    param: Literal["none", "cpu", "nvme"] = key(f"{_PARAM}.device", when=lambda plan: plan.param != "none")  # sharded weights
    param_path: str | None = key(f"{_PARAM}.nvme_path", when=_params_on_disk)
    max_in_cpu: int = key(f"{_PARAM}.max_in_cpu", when=_params_on_disk)  # elements per rank that stay in host memory
    block_nbytes: int = key("aio.block_size", when=_uses_disk)
    queue_depth: int = key("aio.queue_depth", when=_uses_disk)
    threads: int = key("aio.intra_op_parallelism", when=_uses_disk)  # if the kernel does not allow io_uring

    @property
    def uses_disk(self) -> bool:
        return "nvme" in (self.optimizer, self.param)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScalePlan:
    # None = dynamic, by the fields below
    static: float | None = key(
        "fp16.loss_scale", read=lambda scale: scale or None, shown=lambda scale: "dynamic" if scale is None else scale
    )
    initial: float = key("fp16.initial_scale_power", read=lambda power: 2.0**power, shown=math.log2)
    window: int = key("fp16.loss_scale_window")  # steps without overflow before the scale doubles
    hysteresis: int = key("fp16.hysteresis")  # overflows before the scale is halved
    consecutive_hysteresis: bool = key("fp16.consecutive_hysteresis")  # a step without overflow resets the count
    minimum: float = key("fp16.min_loss_scale")


def _is(dtype: torch.dtype) -> Callable[[Any], bool]:
    return lambda value: value is dtype


def _in_bf16(plan: PrecisionPlan) -> bool:
    return plan.param_dtype is torch.bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionPlan:
    param_dtype: torch.dtype = of(
        Json("fp16.enabled", shown=_is(torch.float16)),
        Json("bf16.enabled", shown=_is(torch.bfloat16)),
        Json("data_types.param_dtype"),
    )
    # None = saved buffers follow the weights, others keep their own
    buffer_dtype: torch.dtype | None = key("data_types.buffer_dtype", read=DTYPES.get)
    fp32_buffers: list[str] | None = key("data_types.keep_in_fp32_modules")  # patterns; None = as the model says
    master_dtype: torch.dtype = of(
        Json("fp16.fp16_master_weights_and_grads", shown=_is(torch.float16)),
        Json("bf16.bf16_master_weights_and_grads", shown=_is(torch.bfloat16)),
    )
    state_dtype: torch.dtype = of(  # int8: quantized to 8 bits
        Json("bf16.bf16_optimizer_states", shown=_is(torch.bfloat16)),
        Json("slipstream.optimizer_states", shown=lambda dtype: "int8" if dtype is torch.int8 else "default"),
    )
    stochastic_rounding: bool = key("slipstream.stochastic_rounding")  # for bf16 weights without masters
    # None = the gradient's own at accumulation 1, fp32 above
    grad_accum_dtype: torch.dtype | None = key("data_types.grad_accum_dtype")
    # int8 and int4: codes, sent as bytes. None = the gradient's own
    comm_dtype: torch.dtype | None = of(
        Json("communication_data_type", read=WIRE_DTYPES.get),
        Json("zero_optimization.zero_quantized_gradients", shown=lambda dtype: dtype is INT4),
    )
    autocast_dtype: torch.dtype | None = of(
        Json("torch_autocast.enabled", shown=lambda dtype: dtype is not None),
        Json("torch_autocast.dtype", when=lambda plan: plan.autocast_dtype is not None),
    )
    auto_cast_inputs: bool = key("fp16.auto_cast")
    check_overflow: bool = of(
        Json("bf16.check_grad_overflow", when=_in_bf16),
        Json("slipstream.check_grad_overflow", when=lambda plan: not _in_bf16(plan) and plan.loss_scale is None),
    )
    loss_scale: LossScalePlan | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerPlan:
    type: str = key("optimizer.type")
    params: dict[str, Any] = key("optimizer.params.*")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerPlan:
    type: str = key("scheduler.type")
    params: dict[str, Any] = key("scheduler.params.*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationPlan:
    """How activations of the repeated blocks are stored."""

    way: Literal["keep", "recompute", "offload"] = key("slipstream.activations")
    # Recompute: number of blocks, from the first; None = all.
    num_blocks: int | None = key("activation_checkpointing.number_checkpoints", read=lambda number: number or None)
    inputs_on_host: bool = key("activation_checkpointing.cpu_checkpointing")  # recompute: keep saved inputs in host memory
    # Synchronize with the device before and after each block's forward and recompute.
    synchronize: bool = key("activation_checkpointing.synchronize_checkpoint_boundary")
    profile: bool = key("activation_checkpointing.profile")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPlan:
    tag_validation: Literal["ignore", "warn", "fail"] = key("checkpoint.tag_validation")
    asynchronous: bool = of(Json("checkpoint.writer.decoupled"), Json("datastates_ckpt", shown=lambda on: {} if on else False))
    per_host: bool = key("checkpoint.use_node_local_storage")  # each host has its own directory
    universal: bool = key("checkpoint.load_universal")  # a load without a tag prefers `latest_universal` to `latest`
    keep: int | None = key("slipstream.keep_checkpoints")  # number of newest checkpoints to keep in a directory; None = all
    folder: str | None = key("slipstream.checkpoint.folder")  # of checkpoints that the engine saves by itself; None = none
    every_steps: int = key("slipstream.checkpoint.every_steps")  # 0 = not by steps
    every_minutes: float = key("slipstream.checkpoint.every_minutes")  # 0 = not by time
    on_signal: tuple[str, ...] = key("slipstream.checkpoint.on_signal", read=tuple, shown=list)  # save, and exit with code 85
    resume: bool = key("slipstream.checkpoint.resume")
    memory_every_steps: int = key("slipstream.checkpoint.memory_every_steps")  # 0 = none in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptivePlan:
    """A global batch that follows the gradient noise scale. Sizes are in samples."""

    least: int = key("slipstream.adaptive_batch.min_batch_size")
    most: int = key("slipstream.adaptive_batch.max_batch_size")
    every: int = key("slipstream.adaptive_batch.every")  # steps between changes
    ratio: float = key("slipstream.adaptive_batch.ratio")  # of batch to noise scale
    smoothing: float = key("slipstream.adaptive_batch.smoothing")  # weight of past measurements
    scale_lr: Literal["none", "sqrt", "linear"] = key("slipstream.adaptive_batch.scale_lr")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    mesh: MeshPlan
    pipeline: PipelinePlan
    tensor: TensorPlan
    experts: ExpertPlan
    batch: BatchPlan
    zero: ZeroPlan
    # Replicas that exchange weights every `every` steps; 0: gradients are exchanged in every step.
    local_steps: LocalSteps = key("slipstream.local_steps.*", shown=lambda block: vars(block) if block.every else {"every": 0})
    offload: OffloadPlan
    precision: PrecisionPlan
    optimizer: OptimizerPlan | None
    scheduler: SchedulerPlan | None
    gradient_clipping: float = key("gradient_clipping")  # 0 = off
    activations: ActivationPlan
    compile: Compile | None = parsed("compile")
    layer_drop: ProgressiveLayerDrop | None = parsed("progressive_layer_drop")
    # A pattern of block-sparse attention; attention/transformers.py reads it. Each mode takes some of the keys.
    sparse: Mapping[str, Any] | None = block("sparse_attention.*")
    # The block curriculum_learning; train/curriculum.py reads it.
    curriculum: Mapping[str, Any] | None = block("curriculum_learning.*")
    # Parts of the block data_efficiency that are on, by path; `data`, train/loaders.py and train/random_ltd.py read them.
    efficiency: Mapping[str, Any] = block("data_efficiency.*")
    # The enabled blocks, without their switch; observe/monitors.py reads them.
    monitors: Mapping[str, Mapping[str, Any]] = key(
        "*", shown=lambda blocks: _without_secrets({name: {"enabled": True, **block} for name, block in blocks.items()})
    )
    # The blocks of slipstream.monitors; `custom` maps dotted names of classes to arguments.
    own_monitors: Mapping[str, Mapping[str, Any]] = key(
        "slipstream.monitors.*",
        shown=lambda blocks: _without_secrets({name: list(block) if name == "custom" else block for name, block in blocks.items()}),
    )
    noise_every: int = key("slipstream.noise_scale_every")  # steps between measurements of the gradient noise scale; 0 = none
    adaptive: AdaptivePlan | None
    # The blocks compression_training and quantize_training; `compression` reads them.
    compression: Mapping[str, Any] | None = block("*")
    drop_last: bool = key("dataloader_drop_last")  # the incomplete batch at the end of an epoch
    checkpoint: CheckpointPlan
    # The block weight_quantization, if it names layers; quantized/rules.py reads it.
    quantized: Mapping[str, Any] | None = block("weight_quantization.*")
    fused_layers: bool = key("slipstream.fused_layers")
    products: str = key("slipstream.products")
    broadcast_buffers: bool = key("slipstream.broadcast_buffers")  # broadcast rank 0's before each forward
    steps_per_print: int | None = key("steps_per_print")  # None = never
    wall_clock_breakdown: bool = key("wall_clock_breakdown")
    memory_breakdown: bool = key("memory_breakdown")
    throughput: bool = key("timers.throughput.enabled")  # in progress lines
    rollouts: HybridEngine | None = parsed("hybrid_engine")
    profile: FlopsProfiler | None = parsed("flops_profiler")
    traffic: CommsLogger | None = parsed("comms_logger")
    trace: Trace | None = parsed("slipstream.trace")
    dump_state: bool = key("dump_state")
    log_level: str | None = key("log_level")
    seed: int = key("slipstream.seed")  # for the data loader's shuffle
    timeout_s: float = key("slipstream.timeout_s")  # that a rank waits for others
    poison_released: bool = key("slipstream.poison_released")  # fill released weights with NaN
    idle: Mapping[str, str]  # keys that the user set and that have no effect here -> why; `keys.say_idle` logs them
    notes: tuple[str, ...]  # notes on other keys; `keys.say` logs them
    sources: Mapping[str, str]

    @property
    def accumulates(self) -> bool:
        """Whether a step has several micro-batches, or may have."""
        return self.batch.accumulation > 1 or not self.batch.managed or self.adaptive is not None


def describe(plan: Plan, *, defaults: bool = False) -> str:
    """Format the plan as a table of key, value and source: keys set by the config first, then derived ones.

    defaults: include keys at their defaults
    """
    rows = [(key, _text(value), plan.sources.get(key, "default")) for key, value in plan_values(plan).items()]
    stated = [row for row in rows if row[2] in ("config", "argument")]
    derived = [row for row in rows if row[2] not in ("config", "argument", "default")]
    others = [row for row in rows if row[2] == "default"]
    chosen = [("key", "value", "source"), *stated, *derived, *(others if defaults else ())]
    widths = [max(len(row[column]) for row in chosen) for column in range(2)]
    lines = [f"{key:<{widths[0]}}  {value:<{widths[1]}}  {source}" for key, value, source in chosen]
    rule = "-" * max(map(len, lines))
    hidden = [f"and {len(others)} keys at their defaults, which --all shows"] if others and not defaults else []
    return "\n".join([lines[0], rule, *lines[1:], *hidden, *(f"note: {note}" for note in (*sentences(plan.idle), *plan.notes))])


def sentences(idle: Mapping[str, str]) -> list[str]:
    """Describe the keys without effect, one sentence per reason."""
    keys_by_reason: dict[str, list[str]] = {}
    for key, reason in idle.items():
        keys_by_reason.setdefault(reason, []).append(key)
    return [f"{', '.join(keys)} {_have(keys)} no effect here: {reason}" for reason, keys in keys_by_reason.items()]


def summary(idle: Mapping[str, str]) -> str:
    """Name all keys without effect, without the reasons."""
    return f"{', '.join(idle)} {_have(idle)} no effect here; `slipstream plan CONFIG` gives the reasons"


def _have(keys: Collection[str]) -> str:
    return "has" if len(keys) == 1 else "have"


def plan_values(plan: Plan) -> dict[str, Any]:
    """Return the plan's values by JSON key, in the order of the fields; without those keys of blocks that have no effect."""
    return {name: value for name, value, is_item in _items(plan) if not is_item or name in plan.sources}


def _items(section: Any) -> Iterator[tuple[str, Any, bool]]:
    """(key, value, whether a mapping holds it)."""
    for name, keys in json_keys(section).items():
        value = getattr(section, name)
        for json in keys:
            if not json.when(section):
                continue
            if json.name.endswith("*"):
                yield from ((json.name[:-1] + item, inner, True) for item, inner in json.shown(value).items())
            else:
                yield json.name, json.shown(value), False
        if is_dataclass(value):
            yield from _items(value)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, torch.dtype):
        return _NAMES[value]
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)

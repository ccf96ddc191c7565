"""The frozen `Plan`: the resolved config that the engine uses, with the source of each value.

Code outside `config/` never sees JSON, `"auto"`, aliases or defaults. A plan is plain data: it can be compared, pickled and sent to
another process. `resolution.py` creates it.

Values of `sources`, by dotted key: "config" (set by the user), "argument" (an override passed with the config), "default" (of
DeepSpeed 0.19), "auto: <rule>" (the user wrote "auto"), "derived: <formula>" (computed from other values).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MOST_CHUNK = (
    1 << 21
)  # elements: 28 MiB with gradients and weights in 16 bits; large enough for any disk, small compared to a memory budget
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class DataWorld:
    data_parallel: int  # ranks that a batch is split over
    one_host: bool = True  # whether all ranks share a host


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts about the model, the device and other arguments of `initialize` that rules for "auto" use."""

    device_type: str
    supports_bf16: bool
    loader_batch_size: int | None = None  # of a DataLoader passed by the user
    optimizer_lr: float | None = None  # of an optimizer passed by the user
    brings_schedule: bool = False  # the user passes a schedule, so the config's is not built
    ahead: bool = False  # a dry run: values that the training loop sets may be missing


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """`train_batch_size` = `micro_batch_size` x `accumulation` x data-parallel ranks."""

    train_batch_size: int
    micro_batch_size: int
    accumulation: int
    managed: bool  # step() updates at the accumulation boundary; otherwise at every call


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroPlan:
    stage: Literal[0, 1, 2, 3]
    shard_size: int | None  # MiCS: ranks that share one copy of the states; None = all data-parallel ranks
    transport: Literal["auto", "shared", "gloo"]
    reduce_op: Literal["mean", "sum"]
    ignore_unused: bool  # parameters without a gradient; otherwise the step raises an error


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadPlan:
    """Where states are stored. "cpu" is host memory, which has no effect if the device is a CPU."""

    optimizer: Literal["none", "cpu", "nvme"]  # masters and moments
    optimizer_path: str | None
    ratio: float  # fraction of each unit's masters and moments that is offloaded
    num_buffers: int  # chunks in memory at a time
    chunk_numel: int  # maximum, when the optimizer streams states
    param: Literal["none", "cpu", "nvme"]  # sharded weights
    param_path: str | None
    max_in_cpu: int  # elements per rank that stay in host memory with device nvme
    block_nbytes: int
    queue_depth: int
    threads: int  # if the kernel does not allow io_uring


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScalePlan:
    static: float | None  # None = dynamic, by the fields below
    initial: float
    window: int  # steps without overflow before the scale doubles
    hysteresis: int  # overflows before the scale is halved
    consecutive_hysteresis: bool  # a step without overflow resets the count
    minimum: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionPlan:
    param_dtype: torch.dtype
    buffer_dtype: torch.dtype | None  # None = saved buffers follow the weights, others keep their own
    master_dtype: torch.dtype
    state_dtype: torch.dtype  # int8: quantized to 8 bits
    stochastic_rounding: bool  # of bf16 weights without masters
    grad_accum_dtype: torch.dtype | None  # None = the gradient's own at accumulation 1, fp32 above
    comm_dtype: torch.dtype | None  # None = the gradient's own
    autocast_dtype: torch.dtype | None
    auto_cast_inputs: bool
    check_overflow: bool
    loss_scale: LossScalePlan | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerPlan:
    type: str
    params: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerPlan:
    type: str
    params: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationPlan:
    """How activations of the repeated blocks are stored."""

    way: Literal["keep", "recompute", "offload"]
    num_blocks: int | None  # recompute: number of blocks, from the first; None = all
    inputs_on_host: bool  # recompute: keep saved inputs in host memory
    synchronize: bool  # with the device, before and after each block's forward and recompute
    profile: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilePlan:
    """Arguments of `torch.compile(forward, backend=backend, **kwargs)` for each repeated block."""

    backend: str  # a backend registered with torch, or MODULE.FUNCTION
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlan:
    drop_last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPlan:
    tag_validation: Literal["ignore", "warn", "fail"]
    asynchronous: bool = False
    universal: bool = False  # a load without a tag prefers `latest_universal` to `latest`
    keep: int | None = None  # number of newest checkpoints to keep in a directory; None = all


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugPlan:
    timeout_s: float = 1800.0
    poison_released: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    batch: BatchPlan
    zero: ZeroPlan
    offload: OffloadPlan
    precision: PrecisionPlan
    optimizer: OptimizerPlan | None
    scheduler: SchedulerPlan | None
    gradient_clipping: float  # 0 = off
    activations: ActivationPlan
    compile: CompilePlan | None
    data: DataPlan
    checkpoint: CheckpointPlan
    broadcast_buffers: bool  # broadcast rank 0's before each forward
    steps_per_print: int | None  # None = never
    wall_clock_breakdown: bool
    dump_state: bool
    log_level: str | None
    seed: int  # of the data loader's shuffle
    debug: DebugPlan
    idle: Mapping[str, str]  # keys that the user set and that have no effect here -> why; `keys.say_idle` logs them
    notes: tuple[str, ...]  # on other keys; `keys.say` logs them
    sources: Mapping[str, str]


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
    """Return the plan's values by JSON key, in reading order."""
    batch, zero, precision, offload = plan.batch, plan.zero, plan.precision, plan.offload
    half = {dtype: precision.param_dtype is dtype for dtype in (torch.float16, torch.bfloat16)}
    values: dict[str, Any] = {
        "train_batch_size": batch.train_batch_size,
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.accumulation,
        "managed_gradient_accumulation": batch.managed,
        "zero_optimization.stage": zero.stage,
        "zero_optimization.mics_shard_size": zero.shard_size,
        "zero_optimization.ignore_unused_parameters": zero.ignore_unused,
        "gradient_allreduce_op": zero.reduce_op,
        "communication_data_type": precision.comm_dtype,
        "fp16.enabled": half[torch.float16],
        "bf16.enabled": half[torch.bfloat16],
        "data_types.param_dtype": precision.param_dtype,
        "data_types.buffer_dtype": precision.buffer_dtype,
        "data_types.grad_accum_dtype": precision.grad_accum_dtype,
        "fp16.fp16_master_weights_and_grads": precision.master_dtype is torch.float16,
        "bf16.bf16_master_weights_and_grads": precision.master_dtype is torch.bfloat16,
        "bf16.bf16_optimizer_states": precision.state_dtype is torch.bfloat16,
        "fp16.auto_cast": precision.auto_cast_inputs,
        "torch_autocast.enabled": precision.autocast_dtype is not None,
    }
    if precision.autocast_dtype is not None:
        values["torch_autocast.dtype"] = precision.autocast_dtype
    if half[torch.bfloat16]:
        values["bf16.check_grad_overflow"] = precision.check_overflow
    elif precision.loss_scale is None:
        values["slipstream.check_grad_overflow"] = precision.check_overflow
    if precision.loss_scale is not None:
        scale = precision.loss_scale
        values |= {
            "fp16.loss_scale": "dynamic" if scale.static is None else scale.static,
            "fp16.initial_scale_power": scale.initial,
            "fp16.loss_scale_window": scale.window,
            "fp16.hysteresis": scale.hysteresis,
            "fp16.consecutive_hysteresis": scale.consecutive_hysteresis,
            "fp16.min_loss_scale": scale.minimum,
        }
    if offload.optimizer != "none":
        values["zero_optimization.offload_optimizer.device"] = offload.optimizer
        values["zero_optimization.offload_optimizer.ratio"] = offload.ratio
    if offload.param != "none":
        values["zero_optimization.offload_param.device"] = offload.param
    if offload.optimizer == "nvme":
        values |= {
            "zero_optimization.offload_optimizer.nvme_path": offload.optimizer_path,
            "zero_optimization.offload_optimizer.buffer_count": offload.num_buffers,
            "zero_optimization.sub_group_size": offload.chunk_numel,
        }
    if offload.param == "nvme":
        values |= {
            "zero_optimization.offload_param.nvme_path": offload.param_path,
            "zero_optimization.offload_param.max_in_cpu": offload.max_in_cpu,
        }
    if "nvme" in (offload.optimizer, offload.param):
        values |= {
            "aio.block_size": offload.block_nbytes,
            "aio.queue_depth": offload.queue_depth,
            "aio.intra_op_parallelism": offload.threads,
        }
    if plan.compile is not None:
        values |= {"compile.enabled": True, "compile.backend": plan.compile.backend, "compile.kwargs": plan.compile.kwargs}
    for name, part in (("optimizer", plan.optimizer), ("scheduler", plan.scheduler)):
        if part is not None:
            values[f"{name}.type"] = part.type
            values |= {f"{name}.params.{key}": value for key, value in part.params.items()}
    return values | {
        "gradient_clipping": plan.gradient_clipping,
        "slipstream.activations": plan.activations.way,
        "activation_checkpointing.number_checkpoints": plan.activations.num_blocks,
        "activation_checkpointing.cpu_checkpointing": plan.activations.inputs_on_host,
        "activation_checkpointing.synchronize_checkpoint_boundary": plan.activations.synchronize,
        "activation_checkpointing.profile": plan.activations.profile,
        "dataloader_drop_last": plan.data.drop_last,
        "checkpoint.tag_validation": plan.checkpoint.tag_validation,
        "checkpoint.load_universal": plan.checkpoint.universal,
        "checkpoint.writer.decoupled": plan.checkpoint.asynchronous,
        "slipstream.keep_checkpoints": plan.checkpoint.keep,
        "slipstream.broadcast_buffers": plan.broadcast_buffers,
        "steps_per_print": plan.steps_per_print,
        "wall_clock_breakdown": plan.wall_clock_breakdown,
        "dump_state": plan.dump_state,
        "log_level": plan.log_level,
        "slipstream.optimizer_states": "int8" if precision.state_dtype is torch.int8 else "default",
        "slipstream.stochastic_rounding": precision.stochastic_rounding,
        "slipstream.seed": plan.seed,
        "slipstream.transport": zero.transport,
        "slipstream.timeout_s": plan.debug.timeout_s,
        "slipstream.poison_released": plan.debug.poison_released,
    }


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, torch.dtype):
        return _NAMES[value]
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)

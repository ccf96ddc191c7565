"""Resolve a parsed config into a `Plan`: "auto" and the batch triad are computed, contradictions raise errors.

`resolve` is a pure function, so ranks that pass the same arguments get the same plan or the same error before any collective.

The rules for "auto" are in `AUTO`, and those for arguments of optimizers and schedulers in `AUTO_PARAMS`. A key without a rule gets
its default.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from slipstream.config import keys
from slipstream.config.plan import (
    DTYPES,
    MOST_CHUNK,
    ActivationPlan,
    BatchPlan,
    CheckpointPlan,
    CompilePlan,
    DataPlan,
    DataWorld,
    DebugPlan,
    LossScalePlan,
    ModelFacts,
    OffloadPlan,
    OptimizerPlan,
    Plan,
    PrecisionPlan,
    SchedulerPlan,
    ZeroPlan,
)

if TYPE_CHECKING:
    from slipstream.config.parse import Parsed


class Auto(NamedTuple):
    """A rule for "auto": its description, and the function that computes the value."""

    text: str
    value: Callable[[Parsed, ModelFacts], Any]


def _on(parsed: Parsed, path: str) -> bool:
    return bool(parsed.leaves[path].value) and path not in parsed.autos


AUTO: Mapping[str, Auto] = MappingProxyType(
    {
        "train_batch_size": Auto("follows from the micro batch and the accumulation", lambda parsed, facts: None),
        "gradient_accumulation_steps": Auto("follows from the batch sizes, else 1", lambda parsed, facts: None),
        "train_micro_batch_size_per_gpu": Auto(
            "follows from train_batch_size, else the batch size of the loader given to initialize, else 1",
            lambda parsed, facts: None,
        ),
        "bf16.enabled": Auto(
            "bf16 where the device supports it, unless fp16 is on",
            lambda parsed, facts: facts.supports_bf16 and not _on(parsed, "fp16.enabled"),
        ),
        "fp16.enabled": Auto(
            "fp16 on CUDA devices without bf16, unless bf16 is on",
            lambda parsed, facts: facts.device_type == "cuda" and not facts.supports_bf16 and not _on(parsed, "bf16.enabled"),
        ),
        "gradient_clipping": Auto("1.0", lambda parsed, facts: 1.0),
    }
)

# Values of "auto" for arguments of DeepSpeed's optimizers and schedules: DeepSpeed's defaults. Other arguments are
# not passed, so the optimizer's own default applies.
_ADAM: Mapping[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
AUTO_PARAMS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "adam": _ADAM,
        "adamw": _ADAM,
        "lamb": _ADAM,
        "lion": {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0},
        "adagrad": {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0},
        "sgd": {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0},
        "warmuplr": {"warmup_min_lr": 0.0, "warmup_num_steps": 1000},
        "warmupdecaylr": {"warmup_min_lr": 0.0, "warmup_num_steps": 1000},
        "warmupcosinelr": {"warmup_min_ratio": 0.0, "warmup_num_steps": 1000, "cos_min_ratio": 0.0001},
    }
)
DEFAULT_CLIPPING = "default: DeepSpeed's; gradients with a larger norm are scaled down to it, 0 disables clipping"
_FROM_OPTIMIZER = ("warmup_max_lr", "cycle_max_lr")  # "auto" is the optimizer's learning rate
_FROM_LOOP = ("total_num_steps",)  # "auto" cannot be resolved here
_TUPLES = ("betas", "etas", "step_sizes")
_CHECK = "slipstream.check_grad_overflow"  # for fp32; DeepSpeed has a key for bf16 only


def resolve(raw: Mapping[str, Any], *, world: DataWorld, facts: ModelFacts, overrides: Mapping[str, Any] | None = None) -> Plan:
    """Return the plan of a config dictionary (see `load_config`). `overrides`, by dotted key, take precedence.

    Raises ValueError for unknown keys, invalid values, contradictions and features that are not built yet.
    """
    from slipstream.config.parse import parse  # pydantic is slow to import

    parsed = parse(_overridden(raw, overrides or {}))
    keys.refuse(parsed.leaves.values(), one_host=world.one_host)
    values = _Values(parsed, facts, frozenset(overrides or ()))
    values.take("slipstream.unknown_keys")  # applied by `parse`
    batch, offload = _batch(values, world), _offload(values)
    precision = _precision(values)
    optimizer, clipping = _optimizer(values)
    return Plan(
        batch=batch,
        zero=_zero(values, world),
        offload=offload,
        precision=precision,
        optimizer=optimizer,
        scheduler=_scheduler(values, optimizer),
        gradient_clipping=clipping,
        activations=_activations(values),
        compile=_compile(values),
        data=DataPlan(drop_last=values.take("dataloader_drop_last")),
        checkpoint=_checkpoint(values, offload),
        broadcast_buffers=values.take("slipstream.broadcast_buffers"),
        steps_per_print=values.take("steps_per_print"),
        wall_clock_breakdown=values.take("wall_clock_breakdown"),
        dump_state=values.take("dump_state"),
        log_level=values.take("log_level"),
        seed=values.take("slipstream.seed"),
        debug=DebugPlan(timeout_s=values.take("slipstream.timeout_s"), poison_released=values.take("slipstream.poison_released")),
        idle=keys.without_effect(parsed.leaves.values()),
        notes=(*parsed.notes, *values.notes),
        sources=dict(sorted(values.sources.items())),
    )


def _checkpoint(values: _Values, offload: OffloadPlan) -> CheckpointPlan:
    decoupled = values.take("checkpoint.writer.decoupled")
    on_disk = "nvme" in (offload.optimizer, offload.param)
    if decoupled and on_disk:
        values.notes.append(
            "checkpoint.writer.decoupled has no effect with states on nvme: they are saved synchronously, because the next "
            "step overwrites them in place"
        )
    return CheckpointPlan(
        tag_validation=values.take("checkpoint.tag_validation"),
        asynchronous=decoupled and not on_disk,
        universal=values.take("checkpoint.load_universal"),
        keep=values.take("slipstream.keep_checkpoints"),
    )


def for_inference(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the overrides for an engine without an optimizer, which offloads parameters at every stage.

    Below stage 3 each rank has all weights, which is stage 3 over groups of one rank: weights are stored as `offload_param` says,
    each block's weights are loaded for its forward, and no rank waits for another.
    """
    from slipstream.config.parse import parse

    zero = parse(raw).config.zero_optimization
    offloaded = zero.cpu_offload_param or (zero.offload_param is not None and zero.offload_param.device != "none")
    return {"zero_optimization.stage": 3, "zero_optimization.mics_shard_size": 1} if offloaded and zero.stage < 3 else {}


class _Values:
    """Read a parsed config key by key, resolve "auto" and record the source of each value."""

    def __init__(self, parsed: Parsed, facts: ModelFacts, arguments: frozenset[str]) -> None:
        self.parsed, self.facts, self.arguments = parsed, facts, arguments
        self.sources: dict[str, str] = {}
        self.notes: list[str] = []

    def take(self, path: str) -> Any:
        leaf = self.parsed.leaves[path]
        rule = AUTO.get(path)
        if not self.is_auto(path):
            self.sources[path] = self.origin(path) if leaf.given else "default"
            return leaf.value
        self.sources[path] = "auto: the default" if rule is None else f"auto: {rule.text}"
        return leaf.value if rule is None else rule.value(self.parsed, self.facts)

    def idle(self, block: str, why: str) -> None:
        """Set the source of a disabled block's values to `why`: the plan does not use them."""
        for path, source in self.sources.items():
            if path.startswith(f"{block}.") and path != f"{block}.enabled" and source in ("config", "argument"):
                self.sources[path] = why

    def is_auto(self, path: str) -> bool:
        parts = path.split(".")
        return any(".".join(parts[: i + 1]) in self.parsed.autos for i in range(len(parts)))

    def origin(self, path: str) -> str:
        return "argument" if any(f"{path}.".startswith(f"{name}.") for name in self.arguments) else "config"


def _overridden(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(raw)
    for path, value in overrides.items():
        *parents, name = path.split(".")
        block = result
        for depth, parent in enumerate(parents):
            below = block.get(parent)
            if isinstance(below, bool) and parents[: depth + 1] == ["zero_optimization"]:
                below = {"stage": int(below)}
            block[parent] = dict(below) if isinstance(below, Mapping) else {}
            block = block[parent]
        block[name] = value
    return result


def _batch(values: _Values, world: DataWorld) -> BatchPlan:
    ranks = world.data_parallel
    stated = values.take("data_parallel_size")
    if stated is not None and stated != ranks:
        raise WorldError(
            f"data_parallel_size is {stated}, but the batch is split over {ranks} ranks; drop the key, or start {stated} processes",
            fits=stated,
        )
    train = values.take("train_batch_size")
    micro = values.take("train_micro_batch_size_per_gpu")
    accumulation = values.take("gradient_accumulation_steps")
    if train is None and micro is None and values.is_auto("train_micro_batch_size_per_gpu"):
        micro = values.facts.loader_batch_size or 1
        if values.facts.loader_batch_size is None:
            values.notes.append(
                'train_micro_batch_size_per_gpu is "auto" and nothing determines it, so it became 1; '
                "set train_batch_size or the micro batch size"
            )
    elif train is None and micro is None and values.facts.ahead:
        micro = values.facts.loader_batch_size or 1
        values.notes.append(
            f"no batch size is set: planned with a micro-batch of {micro}; initialize needs train_batch_size or "
            "train_micro_batch_size_per_gpu"
        )
    batch = triad(train, micro, accumulation, ranks)
    for path, given, formula in (
        ("train_batch_size", train, "micro batch x accumulation x data parallel"),
        ("train_micro_batch_size_per_gpu", micro, "train_batch_size / (accumulation x data parallel)"),
        ("gradient_accumulation_steps", accumulation, "train_batch_size / (micro batch x data parallel)"),
    ):
        if given is None:
            values.sources[path] = f"derived: {formula}"
    if accumulation is None and (train is None or micro is None):
        values.sources["gradient_accumulation_steps"] = "default"
    return BatchPlan(
        train_batch_size=batch.train,
        micro_batch_size=batch.micro,
        accumulation=batch.accumulation,
        managed=values.take("managed_gradient_accumulation"),
    )


class Triad(NamedTuple):
    train: int
    micro: int
    accumulation: int


DEEPSPEEDS = "Check batch related parameters: "  # DeepSpeed's message begins with it, and scripts match it


class WorldError(ValueError):
    """Batch sizes that do not fit the number of data-parallel ranks; `fits` is a number of ranks that they fit, if there is one."""

    def __init__(self, message: str, fits: int | None) -> None:
        super().__init__(message)
        self.fits = fits


def triad(train: int | None, micro: int | None, accumulation: int | None, ranks: int) -> Triad:
    """Compute the batch triad from one or more of its members (accumulation alone is not enough).

    Raises ValueError without a size, WorldError if the members disagree or do not divide.
    """
    if train is None:
        if micro is None:
            raise ValueError(
                "neither train_batch_size nor train_micro_batch_size_per_gpu is set; give one of them "
                "(train_batch_size = micro batch x gradient_accumulation_steps x data parallel)"
            )
        accumulation = accumulation or 1
        return Triad(micro * accumulation * ranks, micro, accumulation)
    if micro is None:
        accumulation = accumulation or 1
        _divides(train, "accumulation", accumulation, ranks)
        return Triad(train, train // (accumulation * ranks), accumulation)
    if accumulation is None:
        _divides(train, "micro batch", micro, ranks)
        return Triad(train, micro, train // (micro * ranks))
    if train != micro * accumulation * ranks:
        fits, left = divmod(train, micro * accumulation)
        raise WorldError(
            f"{DEEPSPEEDS}train_batch_size ({train}) != micro batch ({micro}) x accumulation ({accumulation}) "
            f"x data parallel ({ranks}) = {micro * accumulation * ranks}; drop one of the three to have it derived",
            fits=None if left else fits,
        )
    return Triad(train, micro, accumulation)


def _divides(train: int, name: str, factor: int, ranks: int) -> None:
    unit = factor * ranks
    if train % unit:
        below, above = train // unit * unit, (train // unit + 1) * unit
        near = f"{below} or {above}" if below else f"{above}"
        raise WorldError(
            f"{DEEPSPEEDS}train_batch_size ({train}) is not a multiple of {name} ({factor}) "
            f"x data parallel ({ranks}) = {unit}; the nearest multiple is {near}",
            fits=next((fewer for fewer in range(ranks - 1, 0, -1) if train % (factor * fewer) == 0), None),
        )


def _precision(values: _Values) -> PrecisionPlan:
    fp16, bf16 = values.take("fp16.enabled"), values.take("bf16.enabled")
    if fp16 and bf16:
        raise ValueError("fp16.enabled and bf16.enabled are both true, but weights have one dtype; turn one of them off")
    if bf16 and not values.facts.supports_bf16:
        raise ValueError(
            f"bf16.enabled is true, but this {values.facts.device_type} device does not support bf16; "
            'use {"fp16": {"enabled": true}}, or "auto" in both'
        )
    param = torch.float16 if fp16 else torch.bfloat16 if bf16 else torch.float32
    stated = values.take("data_types.param_dtype")
    if stated is None:
        values.sources["data_types.param_dtype"] = "derived: fp16.enabled and bf16.enabled"
    elif (fp16 or bf16) and DTYPES[stated] is not param:
        raise ValueError(
            f"data_types.param_dtype is {stated}, but {'fp16' if fp16 else 'bf16'}.enabled is true; drop one of the two"
        )
    elif stated == "fp16" and not fp16:
        raise ValueError('data_types.param_dtype fp16 needs a loss scale; set {"fp16": {"enabled": true}} instead')
    else:
        param = DTYPES[stated]
    master = torch.float32
    for half, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        if values.take(f"{half}.{half}_master_weights_and_grads") and param is dtype:
            master = dtype
    stochastic = values.take("slipstream.stochastic_rounding")
    if stochastic:
        if param is not torch.bfloat16:
            raise ValueError(
                '"slipstream": {"stochastic_rounding": true} trains bf16 weights without fp32 masters; also set '
                '{"bf16": {"enabled": true}}, or drop it'
            )
        master = torch.bfloat16
    states = torch.bfloat16 if values.take("bf16.bf16_optimizer_states") and param is torch.bfloat16 else torch.float32
    if values.take("slipstream.optimizer_states") == "int8":
        states = torch.int8
    autocast: torch.dtype | None = DTYPES[values.take("torch_autocast.dtype")]
    if not values.take("torch_autocast.enabled"):
        autocast = None
    checks = {torch.bfloat16: values.take("bf16.check_grad_overflow"), torch.float32: values.take(_CHECK)}
    scaled = fp16 or autocast is torch.float16
    if values.parsed.leaves[_CHECK].given and (scaled or param is not torch.float32):
        why = (
            "with a loss scale, steps that overflow are always skipped"
            if scaled
            else "bf16.check_grad_overflow applies to bf16 weights"
        )
        values.notes.append(f"{_CHECK} has no effect here: {why}")
    auto_cast = values.take("fp16.auto_cast")
    for half, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        if param is not dtype:
            values.idle(half, f"derived: the weights are not {half}")
    accum = values.take("data_types.grad_accum_dtype")
    if accum is None and master is not torch.float32 and not stochastic:
        values.sources["data_types.grad_accum_dtype"] = "derived: master_weights_and_grads"
    comm = values.take("communication_data_type")
    buffers = values.take("data_types.buffer_dtype")
    return PrecisionPlan(
        param_dtype=param,
        buffer_dtype=DTYPES[buffers] if buffers else None,
        master_dtype=master,
        state_dtype=states,
        stochastic_rounding=stochastic,
        grad_accum_dtype=DTYPES[accum] if accum else None if stochastic or master is torch.float32 else master,
        comm_dtype=DTYPES[comm] if comm else None,
        autocast_dtype=autocast,
        auto_cast_inputs=auto_cast and fp16,
        check_overflow=scaled or checks[param],
        loss_scale=_loss_scale(values) if scaled else None,
    )


def _loss_scale(values: _Values) -> LossScalePlan:
    static = values.take("fp16.loss_scale")
    plan = LossScalePlan(
        static=static or None,
        initial=2.0 ** values.take("fp16.initial_scale_power"),
        window=values.take("fp16.loss_scale_window"),
        hysteresis=values.take("fp16.hysteresis"),
        consecutive_hysteresis=values.take("fp16.consecutive_hysteresis"),
        minimum=values.take("fp16.min_loss_scale"),
    )
    if plan.static is None and plan.initial < plan.minimum:
        raise ValueError(
            f"fp16.initial_scale_power gives a loss scale of {plan.initial:g}, below fp16.min_loss_scale "
            f"({plan.minimum:g}); raise the power or lower the minimum"
        )
    return plan


def _zero(values: _Values, world: DataWorld) -> ZeroPlan:
    stage, shard = values.take("zero_optimization.stage"), values.take("zero_optimization.mics_shard_size")
    shard = shard if shard > 0 else None
    if shard is not None and stage != 3:
        raise ValueError(
            f"zero_optimization.mics_shard_size ({shard}) requires zero_optimization.stage 3, but the stage is "
            f"{stage}; set it to 3 or drop mics_shard_size"
        )
    if shard is not None and world.data_parallel % shard:
        sizes = [size for size in range(1, world.data_parallel + 1) if world.data_parallel % size == 0]
        raise ValueError(
            f"zero_optimization.mics_shard_size ({shard}) does not divide the {world.data_parallel} "
            f"data-parallel ranks; use one of {', '.join(map(str, sizes))}"
        )
    return ZeroPlan(
        stage=stage,
        shard_size=shard,
        transport=values.take("slipstream.transport"),
        reduce_op=values.take("gradient_allreduce_op"),
        ignore_unused=values.take("zero_optimization.ignore_unused_parameters"),
    )


def _offload(values: _Values) -> OffloadPlan:
    optimizer, optimizer_path = _tier(values, "offload_optimizer", "cpu_offload")
    stage = values.take("zero_optimization.stage")
    param, param_path = _tier(
        values,
        "offload_param",
        "cpu_offload_param",
        f"at stage {stage} every rank keeps all weights on its device; only stage 3 shards them" * (stage < 3),
    )
    on_disk = "nvme" in (optimizer, param)
    block, depth = values.take("aio.block_size"), values.take("aio.queue_depth")
    if on_disk and (block < 4096 or block % 4096 or not 1 <= depth <= 4096):
        raise ValueError(
            f"aio.block_size ({block}) must be a multiple of 4096 (direct I/O), and aio.queue_depth ({depth}) from 1 to 4096"
        )
    buffers, ratio = _taken(values, "offload_optimizer", "buffer_count", 4), _taken(values, "offload_optimizer", "ratio", 1.0)
    to_host = optimizer == "cpu" and values.facts.device_type != "cpu"
    if to_host and ratio < 1:
        values.notes.append(
            "zero_optimization.offload_optimizer.ratio has no effect with device cpu: all optimizer states are offloaded"
        )
    if (on_disk or to_host) and buffers < 2:
        raise ValueError(
            f"zero_optimization.offload_optimizer.buffer_count is {buffers}; set it to 2 or more to overlap I/O with computation"
        )
    return OffloadPlan(
        optimizer=optimizer,
        optimizer_path=optimizer_path,
        ratio=ratio,
        num_buffers=buffers,
        chunk_numel=min(max(values.take("zero_optimization.sub_group_size"), 1), MOST_CHUNK),
        param=param,
        param_path=param_path,
        max_in_cpu=_taken(values, "offload_param", "max_in_cpu", 1_000_000_000),
        block_nbytes=block,
        queue_depth=depth,
        threads=max(values.take("aio.intra_op_parallelism"), 1),
    )


def _taken(values: _Values, block: str, key: str, default: Any) -> Any:
    """Read a key of an offload block, or return `default` if the config has no such block."""
    path = f"zero_optimization.{block}.{key}"
    return values.take(path) if path in values.parsed.leaves else default


def _tier(values: _Values, block: str, older: str, idle: str = "") -> tuple[Any, str | None]:
    """Return the device of an offload block (or of its older boolean form) and the directory for nvme.

    idle: why the block has no effect; "" if it has one
    """
    device, asked_for_cpu = _taken(values, block, "device", "none"), values.take(f"zero_optimization.{older}")
    if device == "none" and asked_for_cpu:
        device = "cpu"
    if device != "none" and idle:
        values.notes.append(f"zero_optimization.{block} ({device}) has no effect here: {idle}")
        values.idle(f"zero_optimization.{block}", "derived: it has no effect at this stage")
        return "none", None
    if device == "cpu" and values.facts.device_type == "cpu":
        values.notes.append(
            f"zero_optimization.{block} (cpu) has no effect here: the device is a CPU, so states are already in host memory"
        )
    path = _taken(values, block, "nvme_path", None)
    if device == "nvme" and not path:
        raise ValueError(
            f"zero_optimization.{block}.device is nvme; set zero_optimization.{block}.nvme_path to a directory on the disk"
        )
    return device, path


def _optimizer(values: _Values) -> tuple[OptimizerPlan | None, float]:
    clipping = float(values.take("gradient_clipping"))
    if values.sources["gradient_clipping"] == "default":
        values.sources["gradient_clipping"] = DEFAULT_CLIPPING
    if values.parsed.config.optimizer is None:
        return None, clipping
    name = values.take("optimizer.type")
    params = _params(values, "optimizer", name)
    norm = params.pop("max_grad_norm", None)
    values.sources.pop("optimizer.params.max_grad_norm", None)
    if norm is not None:
        if isinstance(norm, bool) or not isinstance(norm, (int, float)) or not 0 <= norm < math.inf:
            raise ValueError(f"optimizer.params.max_grad_norm ({norm!r}) must be a number, at least 0 (no clipping)")
        stated = values.parsed.leaves["gradient_clipping"].given and not values.is_auto("gradient_clipping")
        if norm and stated and clipping != norm:  # 0 with gradient_clipping is allowed: DeepSpeed's fused optimizers had it
            raise ValueError(
                f"gradient_clipping ({clipping:g}) and optimizer.params.max_grad_norm ({norm:g}) "
                "disagree, but both set the clipping norm; keep gradient_clipping"
            )
        if not stated:
            clipping = float(norm)
            values.sources["gradient_clipping"] = "derived: optimizer.params.max_grad_norm"
    return OptimizerPlan(type=name, params=params), clipping


def _scheduler(values: _Values, optimizer: OptimizerPlan | None) -> SchedulerPlan | None:
    if values.parsed.config.scheduler is None:
        return None
    name = values.take("scheduler.type")
    params = _params(values, "scheduler", name)
    given = values.parsed.leaves["scheduler.params"].value
    for key in (key for key, value in given.items() if _is_auto(value)):
        path = f"scheduler.params.{key}"
        if key in _FROM_OPTIMIZER:
            params[key] = _learning_rate(optimizer, values.facts)
            values.sources[path] = "auto: the optimizer's learning rate"
            unknown = "the learning rate is not known here; set a number"
        elif key in _FROM_LOOP:
            params[key] = None
            unknown = "only the training loop knows it; set the number of optimizer steps"
        else:
            continue
        if params[key] is None:
            if not (values.facts.ahead or values.facts.brings_schedule):
                raise ValueError(f'{path} is "auto", and {unknown}')
            values.sources[path] = "auto: set by the training loop"
    return SchedulerPlan(type=name, params=params)


def _learning_rate(optimizer: OptimizerPlan | None, facts: ModelFacts) -> float | None:
    if facts.optimizer_lr is not None or optimizer is None:
        return facts.optimizer_lr
    rate = optimizer.params.get("lr", AUTO_PARAMS.get(optimizer.type.lower(), {}).get("lr"))
    if rate is not None and (isinstance(rate, bool) or not isinstance(rate, (int, float))):
        raise ValueError(f"optimizer.params.lr ({rate!r}) must be a number")
    return None if rate is None else float(rate)


def _activations(values: _Values) -> ActivationPlan:
    """`number_checkpoints` or `cpu_checkpointing` of DeepSpeed's block enables activation checkpointing; without them only models
    that call checkpoint() recompute. `slipstream.activations` enables the same or, without those keys, another mode."""
    block = "activation_checkpointing"
    way, stated = values.take("slipstream.activations"), values.parsed.leaves["slipstream.activations"].given
    names = ("number_checkpoints", "cpu_checkpointing", "synchronize_checkpoint_boundary", "profile")
    number, on_host, synchronize, profile = (values.take(f"{block}.{name}") for name in names)
    asking = [f"{block}.{name} ({str(value).lower()})" for name, value in zip(names[:2], (number, on_host), strict=True) if value]
    if asking and stated and way != "recompute":
        raise ValueError(
            f"slipstream.activations is {way!r}, but {' and '.join(asking)} enables recomputation; "
            f'drop one of the two, or set slipstream.activations to "recompute"'
        )
    if asking and not stated:
        way = "recompute"
        values.sources["slipstream.activations"] = f"derived: {block}"
    cuda = values.facts.device_type == "cuda"
    for path, idle, why in (
        (
            "slipstream.activations = offload",
            way == "offload" and not cuda,
            "without a CUDA device activations are already in host memory",
        ),
        (f"{block}.cpu_checkpointing", on_host and not cuda, "without a CUDA device saved inputs are already in host memory"),
        (f"{block}.{names[2]}", synchronize and not cuda, "without a CUDA device operations are synchronous"),
        (f"{block}.{names[2]}", synchronize and cuda and way != "recompute", "no block is recomputed"),
        (f"{block}.profile", profile and way != "recompute", "no block is recomputed"),
    ):
        if idle:
            values.notes.append(f"{path} has no effect here: {why}")
    if way == "offload" and not cuda:
        way, values.sources["slipstream.activations"] = "keep", "derived: there is no CUDA device"
    recomputes = way == "recompute"
    return ActivationPlan(
        way=way,
        num_blocks=number or None,
        inputs_on_host=on_host and cuda,
        synchronize=synchronize and cuda and recomputes,
        profile=profile and recomputes,
    )


def _compile(values: _Values) -> CompilePlan | None:
    """DeepSpeed of 2024 compiled if `enabled` was true, its first versions if `disable` was false; 0.19 has neither key."""
    names = ("enabled", "disable", "backend", "kwargs")
    enabled, disable, backend, kwargs = (values.take(f"compile.{name}") for name in names)
    given = {name for name in names if values.parsed.leaves[f"compile.{name}"].given}
    if not disable and (enabled or ("disable" in given and "enabled" not in given)):
        return CompilePlan(backend=backend, kwargs=kwargs)
    if given and not given & {"enabled", "disable"}:
        values.notes.append("compile.backend and compile.kwargs have no effect here: compile.enabled is not set to true")
    values.idle("compile", "derived: compilation is disabled")
    return None


def _params(values: _Values, block: str, name: str) -> dict[str, Any]:
    """Return the arguments of an optimizer or scheduler as Python values, with "auto" resolved by `AUTO_PARAMS`."""
    rules = AUTO_PARAMS.get(name.lower(), {})
    params: dict[str, Any] = {}
    for key, value in values.parsed.leaves[f"{block}.params"].value.items():
        path = f"{block}.params.{key}"
        if value is None or key.startswith("_"):  # a comment
            continue
        if not _is_auto(value):
            params[key] = _plain(key, value)
            values.sources[path] = values.origin(path)
        elif key in rules:
            params[key] = rules[key]
            values.sources[path] = "auto: DeepSpeed's default"
    return params


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value.lower() == "auto"


def _plain(key: str, value: Any) -> Any:
    """Convert strings that are numbers or booleans, and lists that torch expects as tuples."""
    if isinstance(value, (list, tuple)):
        items = [_plain("", item) for item in value]
        return tuple(items) if key in _TUPLES else items
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    try:
        number = float(value)
    except ValueError:
        return value
    return int(value) if value.strip().lstrip("+-").isdigit() else number

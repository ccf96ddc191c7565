"""Resolve a parsed config into a `Plan`: "auto", the batch triad and values that follow from several keys.

`resolve` is a pure function, so ranks that pass the same arguments get the same plan or the same error before any collective.

The rules for "auto" are in `AUTO`, and those for arguments of optimizers and schedulers in `AUTO_PARAMS`. A key without a rule gets
its default.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from slipstream.config import elastic, keys
from slipstream.config.plan import (
    DTYPES,
    INT4,
    WIRE_DTYPES,
    ActivationPlan,
    AdaptivePlan,
    BatchPlan,
    CheckpointPlan,
    DataWorld,
    ExpertPlan,
    LossScalePlan,
    MeshPlan,
    ModelFacts,
    OffloadPlan,
    OptimizerPlan,
    PipelinePlan,
    Plan,
    PrecisionPlan,
    SchedulerPlan,
    TensorPlan,
    ZeroPlan,
    json_keys,
)
from slipstream.config.refusals import NO_EFFECT, REFUSALS, Case, matching, mesh_sizes
from slipstream.config.trial import laid_over, nested
from slipstream.world.mesh import nearest_sizes

if TYPE_CHECKING:
    from slipstream.config.features import Compile
    from slipstream.config.parse import Parsed

T = TypeVar("T")


class Auto(NamedTuple):
    """A rule for "auto": its description, and the function that computes the value."""

    text: str
    value: Callable[[Parsed, ModelFacts], Any]


def _on(parsed: Parsed, path: str) -> bool:
    return bool(parsed.leaves[path].value) and path not in parsed.autos


AUTO: Mapping[str, Auto] = MappingProxyType(
    {
        "train_batch_size": Auto("derived from micro batch and accumulation", lambda parsed, facts: None),
        "gradient_accumulation_steps": Auto("derived from the batch sizes, else 1", lambda parsed, facts: None),
        "train_micro_batch_size_per_gpu": Auto(
            "derived from train_batch_size, else the batch size of the loader given to initialize, else 1",
            lambda parsed, facts: None,
        ),
        "bf16.enabled": Auto(
            "on if the device supports bf16 and fp16 is off",
            lambda parsed, facts: facts.supports_bf16 and not _on(parsed, "fp16.enabled"),
        ),
        "fp16.enabled": Auto(
            "on for CUDA devices without bf16, if bf16 is off",
            lambda parsed, facts: facts.device_type == "cuda" and not facts.supports_bf16 and not _on(parsed, "bf16.enabled"),
        ),
        "data_types.keep_in_fp32_modules": Auto("the patterns of the model's class", lambda parsed, facts: None),
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


def resolve(raw: Mapping[str, Any], *, world: DataWorld, facts: ModelFacts, overrides: Mapping[str, Any] | None = None) -> Plan:
    """Return the plan of a config dictionary (see `load_config`). `overrides`, by dotted key, take precedence.

    Raises ValueError for unknown keys, invalid values, contradictions and features that are not built yet.
    """
    from slipstream.config.parse import parse  # pydantic is slow to import

    parsed = parse(laid_over(raw, nested(overrides or {})))
    keys.refuse(parsed.leaves.values())
    case = case_of(Values(parsed, facts, frozenset(overrides or ())), world)
    for text in matching(REFUSALS, case):
        raise ValueError(text)
    notes = (*parsed.notes, *case.values.notes, *matching(NO_EFFECT, case))
    return replace(case.plan, notes=notes, sources=dict(sorted(case.values.sources.items())))


def case_of(values: Values, world: DataWorld) -> Case:
    """Compute the plan, even for a config that a row of refusals.py refuses."""
    mesh = _mesh(values)
    batch, offload = _batch(values, world, mesh), _offload(values)
    config = values.parsed.config
    loco = config.zero_optimization.zeropp_loco_param
    optimizer, clipping = _optimizer(values)
    plan = values.section(
        Plan,
        mesh=mesh,
        pipeline=values.section(PipelinePlan),
        tensor=values.section(TensorPlan, size=max(1, values["tensor_parallel.autotp_size"], values["tensor_parallel.tp.tp_size"])),
        experts=_experts(values),
        batch=batch,
        # DeepSpeed enables error feedback by the presence of the block
        zero=values.section(ZeroPlan, error_beta=None if loco is None else loco.err_beta),
        local_steps=config.slipstream.local_steps,
        offload=offload,
        precision=_precision(values),
        optimizer=optimizer,
        scheduler=_scheduler(values, optimizer),
        gradient_clipping=clipping,
        activations=_activations(values),
        compile=_compile(values),
        layer_drop=_if_enabled(config.progressive_layer_drop),
        sparse=_sparse(values),
        compression=_compression(values),
        curriculum=config.curriculum_learning.model_dump() if values["curriculum_learning.enabled"] else None,
        efficiency=_efficiency(values),
        monitors=_monitors(values),
        own_monitors=_own_monitors(values),
        noise_every=_noise_every(values),
        adaptive=_adaptive(values, batch),
        rollouts=_if_enabled(config.hybrid_engine),
        profile=_if_enabled(config.flops_profiler),
        traffic=_if_enabled(config.comms_logger),
        trace=config.slipstream.trace,
        quantized=_quantized(values),
        # With states on disk, the next step would overwrite in place what a background thread still reads.
        checkpoint=values.section(CheckpointPlan, asynchronous=values.asks_to_write_later and not offload.uses_disk),
        idle=keys.without_effect(values.parsed.leaves.values()),
        notes=(),
        sources=values.sources,
    )
    return Case(values, plan, world)


def _if_enabled(block: Any) -> Any:
    return block if block.enabled else None


def _mesh(values: Values) -> MeshPlan:
    sizes = {}
    for axis, stated in mesh_sizes(values).items():
        name, sizes[axis] = max(stated, key=lambda each: each[1], default=("", 1))
        if name not in ("", f"slipstream.mesh.{axis}"):
            values.sources[f"slipstream.mesh.{axis}"] = f"derived: {name}"
    return MeshPlan(**sizes)


def for_inference(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the overrides for an engine without an optimizer, if the config has none: it offloads parameters at every stage.

    Below stage 3 each rank has all weights, which is stage 3 over groups of one rank: weights are stored as `offload_param` says,
    each block's weights are loaded for its forward, and no rank waits for another.
    """
    from slipstream.config.parse import parse

    config = parse(raw).config
    zero = config.zero_optimization
    offloaded = zero.cpu_offload_param or (zero.offload_param is not None and zero.offload_param.device != "none")
    applies = config.optimizer is None and offloaded and zero.stage < 3
    return {"zero_optimization.stage": 3, "zero_optimization.mics_shard_size": 1} if applies else {}


def _efficiency(values: Values) -> dict[str, Any]:
    """The enabled parts of `data_efficiency` by path, with the seed and the loader's options; {} if all are off. Outer switches
    count only if they are off (refusals.py)."""
    block = values.parsed.config.data_efficiency
    sampling, routing = block.data_sampling, block.data_routing
    parts: dict[str, Any] = {
        "data_sampling.curriculum_learning": sampling.curriculum_learning,
        "data_sampling.dynamic_batching": sampling.dynamic_batching,
        "data_routing.random_ltd": routing.random_ltd,
    }
    enabled = {path: part.model_dump() for path, part in parts.items() if part.enabled}
    loader = {"data_sampling.num_epochs": sampling.num_epochs, "data_sampling.num_workers": sampling.num_workers}
    return {"seed": block.seed, **loader, **enabled} if enabled else {}


def _noise_every(values: Values) -> int:
    """The noise scale is measured in each step if the batch adapts to it, unless the config states how often."""
    every: int = values["slipstream.noise_scale_every"]
    if every == 0 and values.parsed.config.slipstream.adaptive_batch is not None:
        values.sources["slipstream.noise_scale_every"] = "derived: slipstream.adaptive_batch"
        return 1
    return every


def _adaptive(values: Values, batch: BatchPlan) -> AdaptivePlan | None:
    if values.parsed.config.slipstream.adaptive_batch is None:
        return None
    bounds: dict[str, int] = {}
    for name, key, factor in (("least", "min_batch_size", 1), ("most", "max_batch_size", 16)):
        path = f"slipstream.adaptive_batch.{key}"
        bounds[name] = values[path] or factor * batch.train_batch_size
        if values[path] is None:
            values.sources[path] = f"derived: train_batch_size x {factor}"
    return values.section(AdaptivePlan, **bounds)


class Values:
    """A parsed config by dotted key, with "auto" resolved. `sources` has the source of each honored key."""

    def __init__(self, parsed: Parsed, facts: ModelFacts, arguments: frozenset[str]) -> None:
        self.parsed, self.facts, self.arguments = parsed, facts, arguments
        self.notes: list[str] = []
        honored = (path for path, leaf in parsed.leaves.items() if keys.table()[leaf.key].fate is keys.Fate.HONORED)
        self.sources = {path: self._source(path) for path in honored}

    def __getitem__(self, path: str) -> Any:
        """The value of a key, or its default if the config does not have the block."""
        if path not in self.parsed.leaves:
            return keys.table()[path].default
        if self.is_auto(path) and path in AUTO:
            return AUTO[path].value(self.parsed, self.facts)
        return self.parsed.leaves[path].value

    def section(self, kind: type[T], **computed: Any) -> T:
        """Create a section of the plan. Fields that are not computed have one key each, and are read from it."""
        read = {name: json for name, json in json_keys(kind).items() if name not in computed}
        return kind(**{name: json.read(self[json.name]) for name, (json,) in read.items()}, **computed)

    @property
    def asks_to_write_later(self) -> bool:
        """Whether checkpoints are asynchronous; DeepSpeed's second engine for them is enabled by its presence, even as `{}`."""
        return bool(self["checkpoint.writer.decoupled"]) or self["datastates_ckpt"] is not False

    def tier(self, states: str) -> Any:
        """The device of `offload_optimizer` or `offload_param`, or of its older boolean form."""
        device = self[f"zero_optimization.offload_{states}.device"]
        older = self["zero_optimization.cpu_offload" if states == "optimizer" else "zero_optimization.cpu_offload_param"]
        return "cpu" if device == "none" and older else device

    def idle(self, block: str, why: str, used: Iterable[str] = ()) -> None:
        """Set the source of a disabled block's values to `why`: the plan does not use them, except `used`."""
        for path in self.sources.keys() - {f"{block}.enabled", *used}:
            if path.startswith(f"{block}.") and self.sources[path] in ("config", "argument"):
                self.sources[path] = why

    def is_given(self, path: str) -> bool:
        """Whether the user set the key to a value."""
        return path in self.parsed.leaves and self.parsed.leaves[path].given

    def is_auto(self, path: str) -> bool:
        if not self.parsed.autos:
            return False
        parts = path.split(".")
        return any(".".join(parts[: i + 1]) in self.parsed.autos for i in range(len(parts)))

    def origin(self, path: str) -> str:
        return "argument" if any(f"{path}.".startswith(f"{name}.") for name in self.arguments) else "config"

    def _source(self, path: str) -> str:
        if self.is_auto(path):
            return f"auto: {AUTO[path].text}" if path in AUTO else "auto: the default"
        return self.origin(path) if self.is_given(path) else "default"


def _experts(values: Values) -> ExpertPlan:
    if not values["expert_parallel.enabled"]:
        off: dict[str, Any] = {field.name: None for field in fields(ExpertPlan)} | {"enabled": False, "size": 1}
        return ExpertPlan(**off | {"rest_unused": values["slipstream.rest_unused_experts"]})
    scale, model_scale = values["expert_parallel.route_scale"], values["expert_parallel.routed_scaling_factor"]
    return values.section(ExpertPlan, route_scale=(None if scale == 1 else scale) if model_scale == "auto" else model_scale)


def _batch(values: Values, world: DataWorld, mesh: MeshPlan) -> BatchPlan:
    ranks, left = divmod(world.ranks, mesh.model_size)
    if left or not ranks:
        raise WorldError(
            f"one replica of the model needs pp ({mesh.pp}) x sp ({mesh.sp}) x tp ({mesh.tp}) = {mesh.model_size} ranks, but "
            f"{world.ranks} ranks are not a multiple of that; start {max(ranks, 1) * mesh.model_size} processes, or use "
            + " x ".join(f"{axis} {size}" for axis, size in nearest_sizes(world.ranks, mesh.pp, mesh.sp, mesh.tp).items()),
            fits=max(ranks, 1) * mesh.model_size,
        )
    stated = values["data_parallel_size"]
    if stated is not None and stated != ranks:
        raise WorldError(
            f"data_parallel_size is {stated}, but the batch is split over {ranks} ranks; drop the key, or start "
            f"{stated * mesh.model_size} processes",
            fits=stated * mesh.model_size,
        )
    if values["elasticity.enabled"]:
        return _elastic_batch(values, world, mesh, ranks)
    train, accumulation = values["train_batch_size"], values["gradient_accumulation_steps"]
    micro = values["train_micro_batch_size_per_gpu"]
    if train is None and micro is None:
        micro = _default_micro_batch(values)
    batch = _split(values, train, micro, accumulation, ranks, mesh)
    for path, given, formula in (
        ("train_batch_size", train, "micro batch x accumulation x data parallel"),
        ("train_micro_batch_size_per_gpu", micro, "train_batch_size / (accumulation x data parallel)"),
        ("gradient_accumulation_steps", accumulation, "train_batch_size / (micro batch x data parallel)"),
    ):
        if given is None:
            values.sources[path] = f"derived: {formula}"
    if accumulation is None and (train is None or micro is None):
        values.sources["gradient_accumulation_steps"] = "default"
    return values.section(BatchPlan, train_batch_size=batch.train, micro_batch_size=batch.micro, accumulation=batch.accumulation)


def _split(values: Values, given: int | None, micro: int | None, accumulation: int | None, ranks: int, mesh: MeshPlan) -> Triad:
    """The triad, with each sample counted once.

    DeepSpeed's data-parallel ranks, by which it divides `train_batch_size`, include those of `tensor_parallel` and `tp_model_init`,
    but not those of an mpu or of a pipeline's topology.
    """
    keys = ("tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size")
    times = 1 if values.facts.has_tensor_ranks else max(1, values.facts.mesh.get("tp", 1), *(values[path] for path in keys))
    if given == (micro or 0) * (accumulation or 0) * ranks:
        times = 1  # all three are set, and agree as they are
    counts = f"train_batch_size ({given}) counts a sample for each of {times} ranks of tensor_parallel"
    if given is not None and given % times:
        raise WorldError(f"{DEEPSPEEDS}{counts}, so it is a multiple of {times}; use {-(-given // times) * times}")
    train = None if given is None else given // times
    try:
        if values["slipstream.elastic_batch"]:
            return elastic_triad(train, micro or values.facts.loader_batch_size, accumulation, ranks)
        batch = triad(given, micro, accumulation, ranks * times)
        return batch._replace(train=batch.train // times)
    except WorldError as error:
        fits = error.fits * mesh.model_size if error.fits and times == 1 else None
        raise WorldError(str(error) if times == 1 else f"{error} ({counts})", fits) from None


def _elastic_batch(values: Values, world: DataWorld, mesh: MeshPlan, ranks: int) -> BatchPlan:
    """The batch sizes from the block `elasticity`, on `ranks` data-parallel ranks."""
    block = values.parsed.config.elasticity
    elastic.check_stated(block, (path for path in elastic.BATCH_KEYS if values.is_given(path)))
    if block.version == 0.2 and block.model_parallel_size != mesh.model_size:
        raise ValueError(
            f"elasticity.model_parallel_size is {block.model_parallel_size}, but one replica of the model has pp ({mesh.pp}) x sp "
            f"({mesh.sp}) x tp ({mesh.tp}) = {mesh.model_size} ranks; set it to {mesh.model_size}"
        )
    elastic.ensure_immutable_elastic_config(block.model_dump())
    batch = elastic.elastic_batch(block, world.ranks)
    elastic.check_count(batch, ranks)
    micro = elastic.largest_micro(block, batch.train, ranks)
    values.sources |= dict.fromkeys(elastic.BATCH_KEYS, "derived: elasticity")
    accumulation = batch.train // (micro * ranks)
    return values.section(BatchPlan, train_batch_size=batch.train, micro_batch_size=micro, accumulation=accumulation)


def _default_micro_batch(values: Values) -> int | None:
    """Return the micro-batch size if the config sets no batch size; None if it must set one."""
    is_auto, loader = values.is_auto("train_micro_batch_size_per_gpu"), values.facts.loader_batch_size
    if not is_auto and not values.facts.ahead:
        return None
    micro = loader or 1
    if not is_auto:
        values.notes.append(
            f"no batch size is set: planned with a micro-batch of {micro}; initialize needs train_batch_size or "
            "train_micro_batch_size_per_gpu"
        )
    elif loader is None:
        values.notes.append(
            'train_micro_batch_size_per_gpu is "auto", but nothing determines it, so it is 1; set train_batch_size or '
            "train_micro_batch_size_per_gpu"
        )
    return micro


class Triad(NamedTuple):
    train: int
    micro: int
    accumulation: int


DEEPSPEEDS = "Check batch related parameters: "  # DeepSpeed's message begins with it, and scripts match it


class WorldError(ValueError):
    """Batch sizes do not fit the number of data-parallel ranks. `fits`: a number of ranks that they fit, if one is known."""

    def __init__(self, message: str, fits: int | None = None) -> None:
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


def elastic_triad(train: int | None, micro: int | None, accumulation: int | None, ranks: int) -> Triad:
    """The triad of a `train_batch_size` that stays the same on any number of ranks.

    micro: the maximum samples of a rank in a micro-batch; it overrides `accumulation`. The rank's actual number may be one less.
    Micro-batches of all ranks have equal sizes, so a rank's share, and with it the weight of its loss, is the same in all of them.
    Raises ValueError without a batch, WorldError if no number of equal micro-batches has a sample for each rank.
    """
    if train is None:
        raise ValueError("slipstream.elastic_batch keeps train_batch_size on any number of ranks, but it is not set; set it")
    counts = [] if accumulation is None else [accumulation]
    if accumulation is None or micro is not None:
        counts += range(1, train // ranks + 1)
    for passes in counts:
        if train % passes == 0 and train // passes >= ranks and (micro is None or train <= passes * micro * ranks):
            return Triad(train, -(-train // (passes * ranks)), passes)
    limit = f"equal micro-batches of at most {micro} samples on each rank"
    stated = " ".join([*map(str, counts), "equal micro-batches"]) if micro is None else limit
    fits = max(passes for passes in range(1, max(train // ranks, 1) + 1) if train % passes == 0)
    remedy = (
        f"set train_micro_batch_size_per_gpu to {-(-train // (fits * ranks))} or more and drop gradient_accumulation_steps"
        if train >= ranks
        else f"use at most {train} ranks"
    )
    raise WorldError(
        f"{DEEPSPEEDS}train_batch_size ({train}) cannot be split into {stated} that give each of {ranks} data-parallel "
        f"ranks a sample; {remedy}",
        fits=None if train >= ranks else train,
    )


def _divides(train: int, name: str, factor: int, ranks: int) -> None:
    unit = factor * ranks
    if train % unit:
        below, above = train // unit * unit, (train // unit + 1) * unit
        near = f"{below} or {above}" if below else f"{above}"
        raise WorldError(
            f"{DEEPSPEEDS}train_batch_size ({train}) is not a multiple of {name} ({factor}) "
            f"x data parallel ({ranks}) = {unit}; use the nearest multiple, {near}, or slipstream.elastic_batch, with which some "
            "ranks get one sample less",
            fits=next((fewer for fewer in range(ranks - 1, 0, -1) if train % (factor * fewer) == 0), None),
        )


def _precision(values: Values) -> PrecisionPlan:
    fp16, param = values["fp16.enabled"], _param_dtype(values)
    autocast = DTYPES[values["torch_autocast.dtype"]] if values["torch_autocast.enabled"] else None
    scaled = fp16 or autocast is torch.float16
    check = "bf16.check_grad_overflow" if param is torch.bfloat16 else "slipstream.check_grad_overflow"
    used = [json.name for jsons in json_keys(LossScalePlan).values() for json in jsons] if scaled else []
    for half in ("fp16", "bf16"):
        if param is not DTYPES[half]:
            values.idle(half, f"derived: the weights are not {half}", used)
    master = _master_dtype(values, param)
    return values.section(
        PrecisionPlan,
        param_dtype=param,
        master_dtype=master,
        state_dtype=_state_dtype(values, param),
        grad_accum_dtype=_accumulation_dtype(values, master),
        autocast_dtype=autocast,
        comm_dtype=_wire_dtype(values),
        auto_cast_inputs=fp16 and values["fp16.auto_cast"],
        check_overflow=scaled or values[check],
        loss_scale=values.section(LossScalePlan) if scaled else None,
    )


def _wire_dtype(values: Values) -> torch.dtype | None:
    stated = WIRE_DTYPES.get(values["communication_data_type"])
    return INT4 if stated is None and values["zero_optimization.zero_quantized_gradients"] else stated


def _param_dtype(values: Values) -> torch.dtype:
    half = "fp16" if values["fp16.enabled"] else "bf16" if values["bf16.enabled"] else None
    param = values["data_types.param_dtype"]
    if param is None:
        values.sources["data_types.param_dtype"] = "derived: fp16.enabled and bf16.enabled"
    return DTYPES[half or param or "fp32"]


def _master_dtype(values: Values, param: torch.dtype) -> torch.dtype:
    if values["slipstream.stochastic_rounding"]:
        return torch.bfloat16
    lean = [half for half in ("fp16", "bf16") if values[f"{half}.{half}_master_weights_and_grads"]]
    return param if param in [DTYPES[half] for half in lean] else torch.float32


def _state_dtype(values: Values, param: torch.dtype) -> torch.dtype:
    if values["slipstream.optimizer_states"] == "int8":
        return torch.int8
    return torch.bfloat16 if values["bf16.bf16_optimizer_states"] and param is torch.bfloat16 else torch.float32


def _accumulation_dtype(values: Values, master: torch.dtype) -> torch.dtype | None:
    dtype = DTYPES.get(values["data_types.grad_accum_dtype"])
    if dtype is not None or master is torch.float32 or values["slipstream.stochastic_rounding"]:
        return dtype
    values.sources["data_types.grad_accum_dtype"] = "derived: master_weights_and_grads"
    return master


def _offload(values: Values) -> OffloadPlan:
    optimizer, param = values.tier("optimizer"), values.tier("param")
    for block, tier, older in (("offload_optimizer", optimizer, "cpu_offload"), ("offload_param", param, "cpu_offload_param")):
        if tier != values[f"zero_optimization.{block}.device"]:
            values.sources[f"zero_optimization.{block}.device"] = f"derived: zero_optimization.{older}"
    if param != "none" and optimizer == "none" and values.facts.device_type == "cuda" and values["zero_optimization.stage"] == 3:
        optimizer = "cpu"  # the host then updates the weights where they are stored
        values.sources["zero_optimization.offload_optimizer.device"] = "derived: zero_optimization.offload_param.device"
    if param == "none" or values["zero_optimization.stage"] == 3:
        return values.section(OffloadPlan, optimizer=optimizer, param=param)
    values.idle("zero_optimization.offload_param", "derived: it has no effect at this stage")
    return values.section(OffloadPlan, optimizer=optimizer, param="none", param_path=None)


def _optimizer(values: Values) -> tuple[OptimizerPlan | None, float]:
    """Return the optimizer and the clipping norm, which may be among the optimizer's arguments."""
    clipping = float(values["gradient_clipping"])
    if values.sources["gradient_clipping"] == "default":
        values.sources["gradient_clipping"] = DEFAULT_CLIPPING
    if values.parsed.config.optimizer is None:
        return None, clipping
    name = values["optimizer.type"]
    params = _params(values, "optimizer", name)
    norm = params.pop("max_grad_norm", None)
    values.sources.pop("optimizer.params.max_grad_norm", None)
    return OptimizerPlan(type=name, params=params), clipping if norm is None else _clipping(values, clipping, norm)


def _clipping(values: Values, clipping: float, norm: Any) -> float:
    if isinstance(norm, bool) or not isinstance(norm, (int, float)) or not 0 <= norm < math.inf:
        raise ValueError(f"optimizer.params.max_grad_norm ({norm!r}) must be a number that is at least 0 (0: no clipping)")
    if not values.is_given("gradient_clipping"):
        values.sources["gradient_clipping"] = "derived: optimizer.params.max_grad_norm"
        return float(norm)
    if norm and clipping != norm:  # 0 with gradient_clipping is allowed: DeepSpeed's fused optimizers had it
        raise ValueError(
            f"gradient_clipping ({clipping:g}) and optimizer.params.max_grad_norm ({norm:g}) both set the clipping norm and "
            "differ; keep only gradient_clipping"
        )
    return clipping


def _scheduler(values: Values, optimizer: OptimizerPlan | None) -> SchedulerPlan | None:
    if values.parsed.config.scheduler is None:
        return None
    name = values["scheduler.type"]
    params = _params(values, "scheduler", name)
    given = values.parsed.leaves["scheduler.params"].value
    for key in (key for key, value in given.items() if _is_auto(value)):
        path = f"scheduler.params.{key}"
        if key in _FROM_OPTIMIZER:
            params[key] = _learning_rate(optimizer, values.facts)
            values.sources[path] = "auto: the optimizer's learning rate"
            unknown = "the optimizer's learning rate is not known here; set a number"
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


def _activations(values: Values) -> ActivationPlan:
    """`number_checkpoints` or `cpu_checkpointing` of DeepSpeed's block enables activation checkpointing; without them only models
    that call checkpoint() recompute. `slipstream.activations` enables the same or, without those keys, another mode."""
    block, cuda = "activation_checkpointing", values.facts.device_type == "cuda"
    way, on_host = values["slipstream.activations"], values[f"{block}.cpu_checkpointing"]
    if (values[f"{block}.number_checkpoints"] or on_host) and not values.is_given("slipstream.activations"):
        way, values.sources["slipstream.activations"] = "recompute", f"derived: {block}"
    if way == "offload" and not cuda:
        way, values.sources["slipstream.activations"] = "keep", "derived: there is no CUDA device"
    recomputes = way == "recompute"
    return values.section(
        ActivationPlan,
        way=way,
        inputs_on_host=on_host and cuda,
        synchronize=values[f"{block}.synchronize_checkpoint_boundary"] and cuda and recomputes,
        profile=values[f"{block}.profile"] and recomputes,
    )


def _compile(values: Values) -> Compile | None:
    """DeepSpeed of 2024 compiled if `enabled` was true, its first versions if `disable` was false; 0.19 has neither key."""
    older = values.is_given("compile.disable") and not values.is_given("compile.enabled")
    if not values["compile.disable"] and (values["compile.enabled"] or older):
        if older:
            values.sources["compile.enabled"] = "derived: compile.disable"
        return values.parsed.config.compile.model_copy(update={"enabled": True})
    values.idle("compile", "derived: compilation is disabled")
    return None


def _monitors(values: Values) -> dict[str, dict[str, Any]]:
    blocks = {name: getattr(values.parsed.config, name).model_dump() for name in ("tensorboard", "wandb", "comet", "csv_monitor")}
    return {name: block for name, block in blocks.items() if block.pop("enabled")}


def _own_monitors(values: Values) -> dict[str, dict[str, Any]]:
    blocks = values.parsed.config.slipstream.monitors.model_dump()
    return {name: block for name, block in blocks.items() if block}


def _compression(values: Values) -> dict[str, Any] | None:
    config = values.parsed.config
    blocks = {name: getattr(config, name).model_dump() for name in ("compression_training", "quantize_training")}
    parts = [part.get("shared_parameters", part) for part in blocks["compression_training"].values()]
    blocks["eigenvalue"] = next(iter(_eigenvalues(values)), None)
    return blocks if any(part["enabled"] for part in (*parts, blocks["quantize_training"])) else None


def _eigenvalues(values: Values) -> list[dict[str, Any]]:
    """The enabled blocks `eigenvalue`, at the top and in quantize_training, without their switch."""
    config = values.parsed.config
    blocks = [each.model_dump() for each in (config.eigenvalue, config.quantize_training.eigenvalue)]
    return [block for block in blocks if block.pop("enabled")]


def _quantized(values: Values) -> dict[str, Any] | None:
    block = values.parsed.config.weight_quantization
    asks = block is not None and block.enabled and (block.quantized_initialization or block.post_init_quant)
    if block is not None and asks:
        return block.model_dump()
    values.idle("weight_quantization", "derived: no layer is named, or the block is off")
    return None


def _sparse(values: Values) -> dict[str, Any] | None:
    if (block := values.parsed.config.sparse_attention) is not None:
        return block.model_dump()
    values.idle("sparse_attention", "derived: attention is dense")
    return None


def _params(values: Values, block: str, name: str) -> dict[str, Any]:
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

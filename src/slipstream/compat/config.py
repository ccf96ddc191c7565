"""`deepspeed.runtime.config` and related modules: read-only configuration objects with DeepSpeed's classes and attributes.

Blocks are pydantic classes created from Slipstream's schema, so keys, types and defaults are defined once. These objects hold the
config's values; `engine.plan` holds the engine's resolved settings.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Annotated, Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, create_model, field_serializer, model_validator

from slipstream.compat.constants import TABLES, ValidationMode
from slipstream.compat.engine import read_config, tolerant
from slipstream.compat.names import CONFIG_ATTRIBUTES
from slipstream.compat.utils import logger
from slipstream.config import features, keys, observing, schema
from slipstream.config.parse import Parsed, parse
from slipstream.config.plan import plan_values
from slipstream.config.resolution import triad
from slipstream.config.values import Block, Names

# -- deepspeed.runtime.config_utils --


class DeepSpeedConfigModel(BaseModel):
    """A block of the JSON. "auto" means unset (unless `strict`); unknown keys raise ValidationError.

    Setting a field whose `json_schema_extra` has `deprecated` logs a warning. `new_param_fn(value)` is then assigned to the field
    `new_param`, unless `set_new_param` is False. Raises ValueError if both are set.
    """

    model_config = ConfigDict(
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def __init__(self, strict: bool = False, **data: Any) -> None:
        auto = () if strict else [key for key, value in data.items() if isinstance(value, str) and value == "auto"]
        super().__init__(**{key: value for key, value in data.items() if key not in auto or key == "replace_method"})
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra
            if isinstance(extra, dict) and extra.get("deprecated") and name in self.model_fields_set:
                self._replace(name, extra)

    def _replace(self, name: str, extra: Mapping[str, Any]) -> None:
        newer: str = extra.get("new_param", "")
        hint = ". ".join(filter(None, (f" use {newer} instead" if newer else "", extra.get("deprecated_msg"))))
        logger.warning("Config parameter %s is deprecated%s", name, hint)
        if not newer or not extra.get("set_new_param", True):
            return
        value = extra.get("new_param_fn", lambda same: same)(getattr(self, name))
        *blocks, last = newer.split(".")
        owner = functools.reduce(getattr, blocks, self)
        if last in owner.model_fields_set:
            raise ValueError(f"{name!r} is the older name of {newer!r}, and both are given; leave it out")
        delattr(self, name)
        setattr(owner, last, value)

    @field_serializer("dtype", check_fields=False)
    def _dtype(self, dtype: Any) -> str:
        return str(dtype)


class DeepSpeedConfigObject:
    """Attributes that print as JSON."""

    def repr(self) -> dict[str, Any]:
        return self.__dict__

    def __repr__(self) -> str:
        return json.dumps(self.__dict__, sort_keys=True, indent=4, default=str)


def get_config_default(config: type[BaseModel], field_name: str) -> Any:
    """Return a field's default. Raises AssertionError if the field does not exist or has no default."""
    field = config.model_fields.get(field_name)
    if field is None or field.is_required():
        raise AssertionError(f"'{field_name}' of {config.__name__} is {'required' if field else 'no field'}, so it has no default")
    return field.get_default(call_default_factory=True)


def get_scalar_param(param_dict: Mapping[str, Any], param_name: str, param_default_value: Any) -> Any:
    return param_dict.get(param_name, param_default_value)


get_list_param = get_dict_param = get_scalar_param


def dict_raise_error_on_duplicate_keys(ordered_pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` for json.load that raises ValueError if a key occurs twice."""
    pairs = list(ordered_pairs)
    twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"Duplicate keys in DeepSpeed config: {twice}")
    return dict(pairs)


# -- the blocks --


def _mirror(name: str, block: type[Block], base: type[DeepSpeedConfigModel] = DeepSpeedConfigModel, **changed: Any) -> Any:
    """Create a class with the block's keys. `stage3_x` in the JSON is the attribute `x`."""
    fields: dict[str, Any] = {}
    for key, field in block.model_fields.items():
        short = key.removeprefix("stage3_")
        kind = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
        alias = key if short != key else None
        default = field.get_default(call_default_factory=True)
        fields[short] = changed.get(short) or (kind, Field(default, alias=alias))
    fields.update({key: field for key, field in changed.items() if key not in fields})
    return create_model(name, __base__=base, __module__=__name__, **fields)


class _Fp16(DeepSpeedConfigModel):
    def initial_dynamic_scale(self) -> float:
        return 2**self.initial_scale_power  # type: ignore[attr-defined]

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        keys = ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale")
        values = {key: getattr(self, key) for key in keys}
        values["initial_scale_power"] = self.initial_dynamic_scale()
        return dict(zip(TABLES["deepspeed.runtime.fp16.loss_scaler"].values(), values.values(), strict=True))


class _OffloadOptimizer(DeepSpeedConfigModel):
    @property
    def pipeline(self) -> bool:
        return bool(self.pipeline_read or self.pipeline_write)  # type: ignore[attr-defined]


class _Zero(DeepSpeedConfigModel):
    @model_validator(mode="after")
    def _overlap(self) -> _Zero:
        values = self.__dict__
        if values["overlap_comm"] is None:
            values["overlap_comm"] = values["stage"] == 3
        return self


class _Monitors(DeepSpeedConfigModel):
    @property
    def enabled(self) -> bool:
        return any(getattr(self, name).enabled for name in type(self).model_fields)


class ZeroStageEnum(int, Enum):
    __module__ = "deepspeed.runtime.zero.config"  # pickles name the class by this module
    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3  # noqa: PIE796 (an alias, as in DeepSpeed)


def _older(newer: str, convert: Callable[[Any], Any]) -> Any:
    extra: Any = {"deprecated": True, "new_param": newer, "new_param_fn": convert}
    return (bool | None, Field(None, json_schema_extra=extra))


DeepSpeedZeroOffloadParamConfig = _mirror("DeepSpeedZeroOffloadParamConfig", schema.OffloadParam)
DeepSpeedZeroOffloadOptimizerConfig = _mirror("DeepSpeedZeroOffloadOptimizerConfig", schema.OffloadOptimizer, _OffloadOptimizer)
_LEAF_CLASSES = TABLES["deepspeed.runtime.zero.leaf_module_config"]["DEFAULT_LEAF_MODULE_CLASSES"]
DeepSpeedZeroLeafModuleConfig = _mirror(
    "DeepSpeedZeroLeafModuleConfig", schema.LeafModule, classes=(Names, Field(default_factory=_LEAF_CLASSES.copy))
)
DeepSpeedZeroConfig = _mirror(
    "DeepSpeedZeroConfig",
    schema.ZeroOptimization,
    _Zero,
    offload_param=(DeepSpeedZeroOffloadParamConfig | None, None),
    offload_optimizer=(DeepSpeedZeroOffloadOptimizerConfig | None, None),
    leaf_module=(DeepSpeedZeroLeafModuleConfig, Field(default_factory=DeepSpeedZeroLeafModuleConfig)),
    cpu_offload=_older("offload_optimizer", lambda on: DeepSpeedZeroOffloadOptimizerConfig(device="cpu") if on else None),
    cpu_offload_param=_older("offload_param", lambda on: DeepSpeedZeroOffloadParamConfig(device="cpu") if on else None),
    stage3_gather_fp16_weights_on_model_save=_older("gather_16bit_weights_on_model_save", bool),
)
DeepSpeedFP16Config = _mirror("DeepSpeedFP16Config", schema.Fp16, _Fp16)
DeepSpeedBF16Config = _mirror("DeepSpeedBF16Config", schema.Bf16)
HybridEngineConfig = _mirror("HybridEngineConfig", features.HybridEngine)
CompileConfig = _mirror("CompileConfig", features.Compile)
CommsLoggerConfig = _mirror("CommsLoggerConfig", observing.CommsLogger)
TensorBoardConfig = _mirror("TensorBoardConfig", observing.Tensorboard)
WandbConfig = _mirror("WandbConfig", observing.Wandb)
CSVConfig = _mirror("CSVConfig", observing.CsvMonitor)
CometConfig = _mirror("CometConfig", observing.Comet)
DeepSpeedThroughputTimerConfig = _mirror("DeepSpeedThroughputTimerConfig", observing.ThroughputTimer)
_MONITORS = {"tensorboard": TensorBoardConfig, "comet": CometConfig, "wandb": WandbConfig, "csv_monitor": CSVConfig}
DeepSpeedMonitorConfig = _mirror(
    "DeepSpeedMonitorConfig", Block, _Monitors, **{key: (kind, Field(default_factory=kind)) for key, kind in _MONITORS.items()}
)


def _section(name: str, block: type[Block], key: str) -> Any:
    """A class for a block that is constructed from the full config."""

    def construct(self: Any, param_dict: Mapping[str, Any]) -> None:
        vars(self).update(block.model_validate(param_dict.get(key) or {}).model_dump())

    return type(name, (DeepSpeedConfigObject,), {"__init__": construct, "__module__": __name__})


DeepSpeedActivationCheckpointingConfig = _section(
    "DeepSpeedActivationCheckpointingConfig", features.ActivationCheckpointing, "activation_checkpointing"
)
DeepSpeedFlopsProfilerConfig = _section("DeepSpeedFlopsProfilerConfig", observing.FlopsProfiler, "flops_profiler")


class DeepSpeedCommsConfig(DeepSpeedConfigObject):
    """`comms_logger` exists only if the config has the block."""

    def __init__(self, ds_config: Mapping[str, Any]) -> None:
        self.comms_logger_enabled = "comms_logger" in ds_config
        if self.comms_logger_enabled:
            self.comms_logger = CommsLoggerConfig(**ds_config["comms_logger"])


class DtypeEnum(Enum):
    """A dtype, constructed from a torch.dtype or any of its names: DtypeEnum("half").value is torch.float16."""

    fp16 = torch.float16
    fp32 = torch.float32
    int8 = torch.int8
    bf16 = torch.bfloat16

    @classmethod
    def _missing_(cls, value: object) -> Any:
        short = {"half": "float16", "float": "float32"}.get(str(value), str(value).removeprefix("torch."))
        return next((member for member in cls if short in (member.name, str(member.value).removeprefix("torch."))), None)


# -- the full config --


class _Read:
    """A parsed config. With an engine, "auto" values and batch sizes are read from the engine's plan."""

    def __init__(self, raw: Mapping[str, Any], engine: Any = None) -> None:
        self.raw, self.engine = raw, engine
        self.parsed: Parsed = parse(tolerant(dict(raw)))

    def value(self, key: str) -> Any:
        """The value of a key, or DeepSpeed's default. A block is an object, or None if DeepSpeed's default is None; "BLOCK{}" is a
        dictionary."""
        if key.endswith("{}"):
            return self.value(key.removesuffix("{}")).model_dump()
        default = keys.table()[key].default if key in keys.table() else None
        if self.engine is not None and (key in self.parsed.autos or key in _BATCH):
            return plan_values(self.engine.plan).get(key, default)
        value: Any = self.parsed.config
        for part in key.split("."):
            if value is None:  # an absent block
                return default
            value = getattr(value, part)
        return value

    def block(self, key: str) -> dict[str, Any]:
        """The block as in the user's config."""
        block = self.raw.get(key)
        return dict(block) if isinstance(block, Mapping) else {}

    def dtype(self, key: str) -> torch.dtype | None:
        value = self.value(key)
        return value if value is None or isinstance(value, torch.dtype) else DtypeEnum(value).value

    def optimizer_name(self) -> str | None:
        name = self.value("optimizer.type")
        return name.lower() if name and name.lower() in TABLES["deepspeed.runtime.config"]["DEEPSPEED_OPTIMIZERS"] else name

    def zero_config(self) -> Any:
        """The zero_optimization block; `true` means stage 1."""
        block = self.raw.get("zero_optimization") or {}
        return DeepSpeedZeroConfig(
            **({"stage": 1} if block is True else {key: value for key, value in block.items() if value is not None})
        )


_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _at(key: str) -> Callable[[_Read], Any]:
    return lambda read: read.value(key)


def _tag_validation(read: _Read) -> str:
    return str(read.value("checkpoint.tag_validation")).upper()


# attribute of DeepSpeedConfig -> the function that reads its value
_ATTRIBUTES: Mapping[str, Callable[[_Read], Any]] = {
    **{name: _at(key) for name, key in CONFIG_ATTRIBUTES.items()},
    "communication_data_type": lambda read: read.dtype("communication_data_type"),
    "seq_parallel_communication_data_type": lambda read: read.dtype("seq_parallel_communication_data_type"),
    "torch_autocast_dtype": lambda read: read.dtype("torch_autocast.dtype") if "dtype" in read.block("torch_autocast") else None,
    "zero_config": _Read.zero_config,
    "zero_enabled": lambda read: read.value("zero_optimization.stage") > 0,
    "float16_config": lambda read: DeepSpeedFP16Config(**read.block("fp16")),
    "bfloat16_config": lambda read: DeepSpeedBF16Config(**(read.block("bf16") or read.block("bfloat16"))),
    "keep_in_fp32_modules": lambda read: "auto" if (names := read.value("data_types.keep_in_fp32_modules")) is None else names,
    "optimizer_name": _Read.optimizer_name,
    "optimizer_params": lambda read: read.block("optimizer").get("params"),
    "scheduler_params": lambda read: read.block("scheduler").get("params"),
    "wall_clock_breakdown": lambda read: read.value("wall_clock_breakdown") or read.value("flops_profiler.enabled"),
    "activation_checkpointing_config": lambda read: DeepSpeedActivationCheckpointingConfig(read.raw),
    "flops_profiler_config": lambda read: DeepSpeedFlopsProfilerConfig(read.raw),
    "comms_config": lambda read: DeepSpeedCommsConfig(read.raw),
    "monitor_config": lambda read: DeepSpeedMonitorConfig(**{key: read.block(key) for key in DeepSpeedMonitorConfig.model_fields}),
    "hybrid_engine": lambda read: HybridEngineConfig(**read.block("hybrid_engine")),
    "timers_config": lambda read: DeepSpeedThroughputTimerConfig(**read.block("timers").get("throughput", {})),
    "checkpoint_tag_validation_enabled": lambda read: _tag_validation(read) != ValidationMode.IGNORE,
    "checkpoint_tag_validation_fail": lambda read: _tag_validation(read) == ValidationMode.FAIL,
}


class BatchSizesError(ValueError, AssertionError):
    """Inconsistent batch sizes. DeepSpeed raises AssertionError, Slipstream ValueError."""


class DeepSpeedConfig:
    """A read-only configuration, from a path, a dictionary or base64 of JSON.

    `mpu` (or the dimension "data_parallel" of `mesh_device`) sets the number of data-parallel ranks; the default is all ranks.
    Missing batch sizes are derived. Raises ValueError if the config is invalid, BatchSizesError if the batch sizes disagree.
    """

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        self._param_dict = read_config(config)
        self._read = _Read(self._param_dict)
        self.mpu, self.global_rank, self.world_size = mpu, *_ranks(self._read, mpu, mesh_device)
        try:
            train, micro, accumulation = (self._read.value(key) for key in _BATCH)
            sizes = triad(train, micro, accumulation, self.world_size)
        except ValueError as error:
            raise BatchSizesError(str(error)) from None
        vars(self).update(zip(_BATCH, sizes, strict=True))

    @classmethod
    def of_engine(cls, engine: Any) -> DeepSpeedConfig:
        config = cls.__new__(cls)
        config._param_dict, config._read = engine.config, _Read(engine.config, engine)
        config.mpu, config.global_rank, config.world_size = None, engine.global_rank, engine.world_size
        return config

    def __getattr__(self, name: str) -> Any:
        if name in _ATTRIBUTES:
            return _ATTRIBUTES[name](self._read)
        raise AttributeError(f"DeepSpeedConfig has no {name!r}; it has {', '.join(sorted(_ATTRIBUTES))}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_ATTRIBUTES})

    def print_user_config(self) -> None:
        logger.info("  json = %s", json.dumps(self._param_dict, sort_keys=True, indent=4, default=str))

    def print(self, name: str) -> None:
        """Log every attribute, then the JSON, at level INFO."""
        logger.info("%s:", name)
        for attribute in sorted({*_ATTRIBUTES, "global_rank", "world_size"}):
            logger.info("  %s %s %s", attribute, "." * (29 - len(attribute)), getattr(self, attribute))
        self.print_user_config()


def _ranks(read: _Read, mpu: Any, mesh_device: Any) -> tuple[int, int]:
    """This rank, and the number of data-parallel ranks."""
    if not dist.is_initialized():
        return 0, 1
    rank, count = dist.get_rank(), dist.get_world_size()
    if hasattr(mpu, "get_data_parallel_world_size"):
        return rank, mpu.get_data_parallel_world_size()
    if mpu is not None:
        return rank, count // mpu.get_sequence_parallel_world_size()
    if mesh_device is not None:
        return rank, dist.get_world_size(mesh_device.get_group(mesh_dim="data_parallel"))
    return rank, count // read.value("sequence_parallel_size")


@functools.cache  # one function object for all aliases of the module
def __getattr__(name: str) -> Any:
    """get_x(param_dict), for each attribute x."""
    if name.startswith("get_") and (read := _ATTRIBUTES.get(name.removeprefix("get_"))):
        return lambda param_dict: read(_Read(param_dict))
    raise AttributeError(f"module {__name__!r} has no {name!r}")

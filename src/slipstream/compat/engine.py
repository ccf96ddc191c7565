"""`deepspeed.initialize`, and the engine that it returns: Slipstream's engine with DeepSpeed's methods."""

from __future__ import annotations

import base64
import dataclasses
import inspect
import json
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

import slipstream
from slipstream.checkpoint.errors import CheckpointError, Ranks
from slipstream.checkpoint.save import agree_on_tag
from slipstream.compat import groups, held, zero
from slipstream.compat.comm import comms_logger, configured
from slipstream.compat.handles import carries_scale, serve_optimizer
from slipstream.compat.moe import experts_of_layers
from slipstream.compat.monitors import MonitorMaster
from slipstream.compat.names import CONFIG_GETTERS, CONFIG_METHODS, MISSING_METHODS
from slipstream.compat.schedules import serve_schedule, with_known_warmup
from slipstream.compat.timers import StepLines, Timer
from slipstream.compat.utils import getter, logger
from slipstream.compat.weights import SCRIPTS, consolidated, write_weights
from slipstream.config import arguments, keys
from slipstream.config.plan import Plan
from slipstream.data.sampler import CurriculumLoader
from slipstream.observe.monitors import Monitors
from slipstream.train import pipeline
from slipstream.train.deepspeed_names import RENAMED
from slipstream.train.engine import Engine
from slipstream.train.initialize import read_together
from slipstream.train.loaders import build_loader
from slipstream.train.random_ltd import RandomLTDScheduler, token_drop_of
from slipstream.train.schedules import ArgumentsAtStep, check_step
from slipstream.train.window import UnusedParameterError
from slipstream.world.join import local_rank
from slipstream.zero.leaves import rows_of

T = TypeVar("T")
DeepSpeedConfigError = ValueError  # Slipstream raises ValueError for every user error

# DeepSpeed's names of states for `offload_states` -> those of `Engine.sleep`
_STATES = {
    "optim_states": "optimizer",
    "hp_params": "optimizer",
    "lp_params": "weights",
    "lp_grads": "gradients",
    "contiguous_grad_buffer": "gradients",
}


def _of(read: Callable[[Plan], T]) -> Callable[[Any], T]:
    """Return a method that reads the plan: DeepSpeed's engine has a method for each config value."""

    return lambda self: read(self.plan)


def _resource(name: str) -> Any:
    """A property: the states' resource of this name, or None."""
    return property(lambda self: self.states.resources.get(name))


class DeepSpeedEngine(Engine):
    """Created by `initialize` below from a Slipstream engine. Attributes that it does not have are read from the model."""

    config: Any  # the user's config as a dict
    client_optimizer: Any  # the caller's
    client_lr_scheduler: Any
    client_mpu: Any
    basic_optimizer: Any  # torch's
    num_experts: list[int]  # of each layer of experts
    has_moe_layers: bool
    lines: StepLines
    coalesces = False  # inside coalesce_grad_reduction()
    lr_kwargs: Mapping[str, Any] = MappingProxyType({})  # of the last step()
    steps_schedule = True  # not inside optimizer.step()
    _gathered: tuple[Callable[[], dict[str, Any] | None], int] = (dict, -1)  # the last consolidated state, and its step

    def _begin(self, config: Any, optimizer: Any, mpu: Any, lr_scheduler: Any) -> None:
        self.config, self.client_optimizer, self.client_mpu, self.client_lr_scheduler = config, optimizer, mpu, lr_scheduler
        self.basic_optimizer = self.optimizer and self.optimizer.optimizer
        self.num_experts = experts_of_layers(self.module)
        self.has_moe_layers = bool(self.num_experts)
        self.lines = StepLines(self)

    @cached_property
    def _config(self) -> Any:
        """The config as a `DeepSpeedConfig`."""
        from slipstream.compat.config import DeepSpeedConfig

        return DeepSpeedConfig.of_engine(self)

    # -- the loop --

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the fp16 loss scale. A loss of the engine's outputs is unchanged: their backward scales it."""
        return loss if carries_scale(loss) else super().scale(loss)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **kwargs: Any) -> Tensor:
        return super().backward(loss, retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas, **kwargs)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """`lr_kwargs`: arguments of the schedule's `step()`, if this step updates the weights. Raises ValueError for others, or if
        some are missing."""
        self.lr_kwargs = lr_kwargs or {}
        if self.lr_kwargs and self.lr_scheduler is not None:
            try:
                inspect.signature(self.lr_scheduler.step).bind(**self.lr_kwargs)
            except TypeError as error:
                kind = type(self.lr_scheduler).__name__
                raise ValueError(f"engine.step(lr_kwargs={dict(self.lr_kwargs)}): {kind}.step(): {error}") from None
        elif self.steps_schedule and self.lr_scheduler is not None and self.at_boundary:
            check_step(self.lr_scheduler, "which engine.step() did not get: pass them as lr_kwargs=, or")
        assert not self.coalesces, "engine.step() inside coalesce_grad_reduction(), which implies no_sync(): step after it"
        before = self.global_steps
        with _asserting(UnusedParameterError):
            super().step()
        if self.global_steps == before:
            self.lines.end_micro_step()

    def _step_schedule(self) -> None:
        if self.lr_kwargs and self.lr_scheduler is not None:
            self.lr_scheduler.step(**self.lr_kwargs)
        elif self.steps_schedule:
            super()._step_schedule()

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        self.set_boundary(is_boundary)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        assert not self.coalesces, "no_sync() inside coalesce_grad_reduction(), which does the same: remove one of them"
        with super().no_sync():
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Reduce the gradients of several backward passes once: in `step()`, or when they are first read after the context.

        Inside, `safe_get_full_grad` returns this rank's sum. Raises AssertionError for `step()`, `no_sync()` or a nested context.
        """
        assert self.states.hooks.sync, "coalesce_grad_reduction() cannot be nested inside no_sync() or another one: use one of them"
        self.coalesces = True
        try:
            with super().no_sync():
                yield
        finally:
            self.coalesces = False

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Set the number of micro-batches, from the next accumulation window on."""
        batch = self.plan.batch
        per_pass = batch.per_pass
        if train_batch_size < per_pass or train_batch_size % per_pass:
            raise ValueError(
                f"set_train_batch_size({train_batch_size}): not a multiple of the {per_pass} samples of a micro-batch of all ranks"
            )
        if self.backwards:
            raise RuntimeError(f"set_train_batch_size() after {self.backwards} backward passes of a window; call it before")
        narrow = {unit.grads.dtype for unit in self.units if unit.grads is not None and unit.grads.dtype.itemsize < 4}
        if train_batch_size > per_pass and narrow and not self.states.recipe.accumulates and self.states.recipe.grads_dtype is None:
            raise ValueError(
                f"set_train_batch_size({train_batch_size}): the engine was created for one micro-batch and would accumulate "
                f"{train_batch_size // per_pass} in {narrow.pop()}; set "
                f'"data_types": {{"grad_accum_dtype": "fp32"}}, or gradient_accumulation_steps above 1, in the config'
            )
        new = dataclasses.replace(batch, train_batch_size=train_batch_size, accumulation=train_batch_size // per_pass)
        self.set_batch(new)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Set the batch size of the caller's loader; the number of micro-batches does not change."""
        batch = self.plan.batch
        if batch.elastic:
            raise ValueError(
                f"set_train_micro_batch_size({micro_batch_size}): slipstream.elastic_batch derives it; drop one of the two"
            )
        total = micro_batch_size * batch.accumulation * self.mesh.batch.size
        new = dataclasses.replace(batch, micro_batch_size=micro_batch_size, train_batch_size=total)
        self.set_batch(new)

    # -- config values --

    zero_optimization = getter("_config.zero_enabled")
    zero_optimization_partition_gradients = _of(lambda plan: plan.zero.stage >= 2)
    zero_optimization_partition_weights = _of(lambda plan: plan.zero.stage == 3)
    zero_cpu_offload = _of(lambda plan: plan.offload.optimizer == "cpu")
    zero_use_cpu_optimizer = _of(lambda plan: plan.offload.optimizer != "none")
    zero_nvme_offload_optimizer = _of(lambda plan: plan.offload.optimizer == "nvme")
    zero_gather_16bit_weights_on_model_save = _of(lambda plan: True)  # state_dict() is complete at every stage
    fp16_enabled = _of(lambda plan: plan.precision.param_dtype is torch.float16)
    bfloat16_enabled = _of(lambda plan: plan.precision.param_dtype is torch.bfloat16)
    zero_overlap_comm = getter("_config.zero_config.overlap_comm")
    dynamic_loss_scale = _of(lambda plan: plan.precision.loss_scale is not None and plan.precision.loss_scale.static is None)
    mics_shard_size = property(_of(lambda plan: plan.zero.shard_size or -1))

    is_compiled = property(lambda self: self.module._compiled_call_impl is not None)
    is_deepcompile_active = _of(lambda plan: False)
    get_data_types = _of(lambda plan: (plan.precision.param_dtype, plan.precision.grad_accum_dtype or plan.precision.param_dtype))

    @property
    def communication_data_type(self) -> torch.dtype:
        """The dtype in which gradients are communicated. The config decides; setting the attribute only logs a warning."""
        return self.plan.precision.comm_dtype or self.plan.precision.param_dtype

    @communication_data_type.setter
    def communication_data_type(self, dtype: torch.dtype) -> None:
        if dtype is not self.communication_data_type and self.mesh.is_first:
            logger.warning('engine.communication_data_type = %s has no effect: set "communication_data_type" in the config', dtype)

    @property
    def gradient_average(self) -> bool:
        """Whether gradients are averaged over ranks instead of summed. Setting it takes effect at the next accumulation window."""
        return self.plan.zero.reduce_op == "mean"

    @gradient_average.setter
    def gradient_average(self, averages: bool) -> None:
        if self.backwards:
            raise RuntimeError(f"gradient_average set after {self.backwards} backward passes of a window; set it before")
        if not averages and (self.plan.adaptive or self.plan.noise_every):
            raise ValueError("gradient_average = False: slipstream.adaptive_batch and noise_scale_every measure means; remove them")
        zero_plan = dataclasses.replace(self.plan.zero, reduce_op="mean" if averages else "sum")
        self.plan = self.window.plan = self.states.plan = dataclasses.replace(self.plan, zero=zero_plan)

    def optimizer_name(self) -> str | None:
        """The class of the caller's optimizer, or the type in the config."""
        own = self.client_optimizer
        return self._config.optimizer_name if own is None else type(own).__name__

    # None without the block in the config; the profiler and the monitors only exist on rank 0
    curriculum_scheduler_legacy = _resource("curriculum")  # its `set_custom_get_difficulty` sets a custom schedule
    flops_profiler = _resource("flops profiler")
    progressive_layer_drop = _resource("layer drop")
    timers = property(attrgetter("lines.timers"))  # None unless `wall_clock_breakdown` is set
    tput_timer = property(attrgetter("lines.speed"))

    @property
    def random_ltd_scheduler(self) -> RandomLTDScheduler:
        """The schedule of the number of tokens that layers compute. Raises ValueError if random-LTD is off."""
        return token_drop_of(self).scheduler

    def set_data_post_process_func(self, post_process_func: Callable[[Any, dict[str, Any]], Any]) -> None:
        """Call a function with each batch of the curriculum's loader and its state: `current_difficulties`, `curriculum_step`."""
        self._curriculum("set_data_post_process_func").post_process = post_process_func

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: Mapping[str, Callable[[int], Any]]) -> None:
        """Set the functions of the step for metrics with schedule_type "custom", by name."""
        self._curriculum("set_custom_curriculum_learning_schedule").set_schedules(schedule_func_dict)

    def _curriculum(self, method: str) -> CurriculumLoader:
        if not isinstance(self.training_dataloader, CurriculumLoader):
            raise ValueError(
                f"engine.{method}(): the engine has no loader with a curriculum: pass training_data= to initialize(), and enable "
                "data_efficiency.data_sampling.curriculum_learning"
            )
        return self.training_dataloader

    def get_wall_clock_timers(self) -> dict[str, Timer]:
        """The timers by name: fwd, bwd, bwd_inner, bwd_allreduce and step, also with _microstep. Each log line resets its own."""
        return self.lines.timers.get_timers()

    @property
    def monitor(self) -> MonitorMaster:
        """Takes the script's `write_events([(tag, value, samples)])`; without an enabled block it writes nothing."""
        monitors = self.states.resources.get("monitors") or Monitors({})
        monitors.__class__ = MonitorMaster  # adds only attributes
        assert isinstance(monitors, MonitorMaster)
        return monitors

    def get_pld_theta(self) -> float | None:
        drop = self.progressive_layer_drop
        return None if drop is None else drop.get_theta()

    def get_batch_info(self) -> tuple[int, int, int]:
        """(train batch size, micro-batch size, micro-batches per step)."""
        batch = self.plan.batch
        return batch.train_batch_size, batch.micro_batch_size, batch.accumulation

    def get_lr(self) -> list[Any]:
        return self._of_groups("lr")

    def get_mom(self) -> list[Any]:
        return self._of_groups("betas" if self.optimizer and "betas" in self.optimizer.param_groups[0] else "momentum")

    def get_type(self) -> list[Any]:
        return self._of_groups("type")

    def _of_groups(self, key: str) -> list[Any]:
        return [group.get(key, 0.0) for group in self.optimizer.param_groups] if self.optimizer is not None else []

    # -- ranks --

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """The names of weights whose gradients are communicated as rows."""
        return set(rows_of(self.module)) if self.plan.zero.sends_rows else set()

    def all_gather_scalar(self, value: Tensor, dp_group: Any) -> list[Tensor]:
        """Every rank's `value`, on this rank's device. Collective."""
        if not dist.is_initialized():
            return [value.detach().clone()]
        every: list[Any] = [None] * dist.get_world_size(dp_group)
        dist.all_gather_object(every, value.detach().cpu(), group=dp_group)
        return [each.to(value.device) for each in every]

    global_rank = property(lambda self: dist.get_rank() if dist.is_initialized() else 0)
    local_rank = property(lambda self: local_rank())
    dp_world_size = property(lambda self: self.mesh.batch.size)
    mp_world_size = property(lambda self: self.mesh.tp.size)
    data_parallel_group = property(lambda self: self.mesh.batch.group)
    mpu = property(attrgetter("client_mpu"))
    get_tensor_parallel_rank = get_model_parallel_rank = getter("mesh.tp.index")
    get_tensor_parallel_world_size = getter("mesh.tp.size")
    get_sequence_parallel_group = getter("mesh.sp.group")
    seq_parallel_group = property(attrgetter("mesh.sp.group"))
    sequence_parallel_size = property(attrgetter("mesh.sp.size"))
    get_sequence_parallel_rank = getter("mesh.sp.index")
    get_sequence_parallel_world_size = getter("mesh.sp.size")

    def autotp_size(self) -> int:
        """The number of tensor-parallel ranks, whoever asked for them; 0 without."""
        return self.mesh.tp.size if self.mesh.tp.size > 1 else 0

    # -- weights and states --

    @contextmanager
    def surgery(self, group: int | Callable[[str, nn.Parameter], int] | None = None) -> Iterator[None]:
        before = zero.parameters_of(self)
        with super().surgery(group):
            yield
            held.materialize(self.module)
        zero.set_attributes(self, before)

    def destroy(self) -> None:
        params = zero.parameters_of(self)
        super().destroy()
        self.basic_optimizer = None
        held.remove_attributes(params)
        zero.unwrap(self.module)

    def save_checkpoint(
        self,
        save_dir: str,
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        contents: Any = "all",
    ) -> bool:
        """`str(tag)` names the folder. With tag_validation "Fail", raises AssertionError if the ranks' tags differ."""
        name = None if tag is None else str(tag)
        if save_dir and self.plan.checkpoint.tag_validation == "fail":
            with self.together("save_checkpoint"), _asserting(CheckpointError):
                agree_on_tag(self.mesh.world.gather(name or ""), "Fail")
        saved = super().save_checkpoint(save_dir, name, client_state, save_latest, exclude_frozen_parameters, contents)
        with self.together("save_checkpoint"):  # every rank finds the scripts
            Ranks(self.mesh.world.group).decide("save_checkpoint", lambda: _write_scripts(save_dir))
        return saved

    def load_checkpoint(
        self,
        load_dir: str,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> Any:
        """Return (the folder, client_state); without a checkpoint, (None, None)."""
        if custom_load_fn is not None:
            raise ValueError(
                "load_checkpoint(custom_load_fn=): parameters load by name; for a subset, use load_module_strict=False"
            )
        self.forget_state()
        name = None if tag is None else str(tag)
        path, state = super().load_checkpoint(
            load_dir, name, load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only
        )
        return path, state if path is not None else None

    def module_state_dict(self, exclude_frozen_parameters: bool = False, **kwargs: Any) -> dict[str, Any]:
        """Return the full state on every rank. Collective."""
        state = self.state_dict(**kwargs)
        frozen = {name for name, param in self.module.named_parameters(remove_duplicate=False) if not param.requires_grad}
        return {name: value for name, value in state.items() if not (exclude_frozen_parameters and name in frozen)}

    def load_module_state_dict(
        self, checkpoint: Mapping[str, Any], strict: bool = True, custom_load_fn: Any = None, fetch_z3_params: bool = False
    ) -> Any:
        """Load a complete state. Collective. Sharded weights are filled at every stage, regardless of `fetch_z3_params`."""
        if custom_load_fn is not None:
            raise ValueError("load_module_state_dict(custom_load_fn=): use engine.load_state_dict with the tensors to load")
        self.forget_state()
        return self.load_state_dict(checkpoint.get("module", checkpoint), strict=strict)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """Return the full state in the weights' dtype on rank 0's CPU; None on other ranks. Collective."""
        state = consolidated(self, exclude_frozen=exclude_frozen_parameters)
        if state is not None and not exclude_frozen_parameters:
            self._gathered = weakref.ref(state), self.global_steps
        return state

    def held_state(self) -> dict[str, Any] | None:
        """Return the full state that was consolidated on this rank, if its caller still holds it and no step, load or write inside
        `GatheredParameters` followed."""
        state, step = self._gathered
        return state() if step == self.global_steps else None

    def forget_state(self) -> None:
        vars(self).pop("_gathered", None)

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the weights in the compute dtype, for `torch.load`, or as safetensors if the name ends in that. Collective."""
        state = consolidated(self, exclude_frozen=exclude_frozen_parameters)
        path = Path(save_dir) / save_filename

        def write() -> None:
            if state is not None:
                write_weights(state, path)

        Ranks(self.mesh.world.group).gather(f"{path} was not written", write)
        return True

    save_fp16_model = save_16bit_model

    def sleep(self, include: Iterable[str] | None = None, device: str = "cpu", path: str | None = None) -> int:
        zero.hide_ranges(self)
        try:
            return super().sleep(include, device, path)
        finally:
            zero.show_ranges(self)

    def wake(self) -> None:
        super().wake()
        zero.show_ranges(self)

    def offload_states(self, include: Any = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False) -> None:
        """`Engine.sleep` with DeepSpeed's names of states. A no-op on a CPU, where states are in host memory anyway."""
        kinds = None if include is None else {_STATES[str(getattr(state, "value", state))] for state in include}
        place = str(getattr(device, "value", device))
        if place != self.device.type:
            self.sleep(kinds, place)

    def reload_states(self, non_blocking: bool = False) -> None:
        self.wake()

    def empty_partition_cache(self) -> None:
        """A no-op: no parameters stay gathered between steps."""

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        if data_sampler is not None:
            raise ValueError("deepspeed_io(data_sampler=): create a torch DataLoader with it instead")
        plan = self.plan if route == "train" else dataclasses.replace(self.plan, efficiency={})
        if batch_size is None and route != "train":
            batch_size = plan.batch.micro_batch_size  # equal on all ranks
        elif batch_size is not None and route == "train" and self.precision.weight != 1.0:
            raise ValueError(
                f"deepspeed_io(batch_size={batch_size}): slipstream.elastic_batch gives ranks unequal batches; leave it out"
            )
        given = {"batch_size": batch_size, "num_workers": num_local_io_workers}
        options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        pin = pin_memory and self.device.type == "cuda"
        return build_loader(plan, dataset, self.mesh, self.device, collate_fn, pin_memory=pin, **options)

    def compile(self, backend: Any = "inductor", compile_kwargs: Mapping[str, Any] | None = None, **others: Any) -> None:
        """`torch.compile` of the model, in place."""
        unsupported = sorted(name for name, value in others.items() if value)
        if unsupported:
            raise ValueError(f"engine.compile({', '.join(unsupported)}=): DeepCompile is not built; drop these arguments")
        self.module.compile(backend=backend, **(compile_kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            if name in MISSING_METHODS:
                raise AttributeError(f"engine.{name} is not built yet: {MISSING_METHODS[name]}") from None
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or not hasattr(module, name):
                raise
            return getattr(module, name)


def _write_scripts(folder: str) -> None:
    for name, text in SCRIPTS.items():
        if not (script := Path(folder, name)).exists():
            script.write_text(text)
            script.chmod(script.stat().st_mode | 0o100)


@contextmanager
def _asserting(kind: type[Exception]) -> Iterator[None]:
    """Convert Slipstream's error to the AssertionError that DeepSpeed raises."""
    try:
        yield
    except kind as error:
        raise AssertionError(str(error)) from None


def _of_config(key: str) -> Callable[[DeepSpeedEngine], Any]:
    return lambda self: self._config._read.value(key)


for _name, _path in RENAMED.items():
    setattr(DeepSpeedEngine, _name, getter(_path))
for _name in CONFIG_METHODS:
    setattr(DeepSpeedEngine, _name, getter(f"_config.{_name}"))
for _name, _key in CONFIG_GETTERS.items():
    setattr(DeepSpeedEngine, _name, _of_config(_key))


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """`slipstream.initialize` with DeepSpeed's arguments; the engine has DeepSpeed's methods.

    config   a path, a dictionary or base64 of JSON. A top-level key "zero_optimization.x" sets x in the block if it is unset there.
             Unknown top-level keys are logged and ignored, as in DeepSpeed. One that resembles a known key raises ValueError.
    """
    given = {name: value for name, value in locals().items() if name not in ("args", "config", "config_params")}
    loaded = read_together(
        lambda: arguments.read_config(config=_decode(config), config_params=_decode(config_params), args=args),
        distributed_port,
        mpu,
        dist_init_required,
    )
    raw = _unfold(loaded.raw)
    used = ({"comms_logger": configured} if configured else {}) | tolerant(with_known_warmup(raw))
    if optimizer is None and "optimizer" not in raw:  # as DeepSpeed, create no schedule; Trainer evaluates this way
        used = {name: value for name, value in used.items() if name != "scheduler"}
        given["lr_scheduler"] = lr_scheduler = None
    if lr_scheduler is not None:
        given["lr_scheduler"] = ArgumentsAtStep(lr_scheduler)
    zero.take_over(model)
    try:
        with held.held_values(model):
            engine, handle, loader, scheduler = slipstream.initialize(config=used, **given)
    except arguments.ConfigError as error:
        raise loaded.refusal(error) from None
    # DeepSpeedEngine only adds methods, so changing the class is enough.
    engine.__class__ = _kind(engine)
    assert isinstance(engine, DeepSpeedEngine)
    engine._begin(raw, optimizer, mpu, lr_scheduler)
    if engine.mesh.is_first:
        keys.say(loaded.notes)
    if lr_scheduler is None and scheduler is not None:
        scheduler.optimizer = handle  # a scheduler of the config refers to the returned optimizer, a caller's to its own
    serve_schedule(scheduler)
    serve_optimizer(handle)
    zero.register_engine(engine)
    if engine.plan.traffic is not None:
        comms_logger.use(engine.plan.traffic.model_dump())
    groups.follow(engine.mesh, engine.module)
    return engine, handle, loader, scheduler


class PipelineEngine(pipeline.PipelineEngine, DeepSpeedEngine):
    """The engine of a pipeline, with DeepSpeed's names."""

    mpu = property(attrgetter("grid"))
    is_pipe_parallel = property(lambda self: self.num_stages > 1)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of each rank in a batch. Programs set it around `eval_batch`. Raises as `set_train_batch_size`."""
        return self.plan.batch.accumulation

    @micro_batches.setter
    def micro_batches(self, count: int) -> None:
        self.set_train_batch_size(count * self.plan.batch.per_pass)


def _kind(engine: Engine) -> type[DeepSpeedEngine]:
    if isinstance(engine, pipeline.PipelineEngine):
        return PipelineEngine
    if "rollouts" not in engine.states.resources:
        return DeepSpeedEngine
    from slipstream.compat.rollout import DeepSpeedHybridEngine  # imports the engines of serving

    return DeepSpeedHybridEngine


def read_config(config: Any, config_params: Any = None, args: Any = None) -> dict[str, Any]:
    """Read a config from a path, a dictionary, base64 of JSON or a script's arguments."""
    return _unfold(arguments.read_config(config=_decode(config), config_params=_decode(config_params), args=args).raw)


def _decode(config: Any) -> Any:
    """Decode a string that is not a path to a file as base64 of JSON."""
    if not isinstance(config, str) or os.path.exists(config) or config.endswith(".json"):
        return config
    try:
        return json.loads(base64.urlsafe_b64decode(config).decode())
    except (ValueError, RecursionError):
        return config  # load_config reports the error of the path


def tolerant(raw: dict[str, Any]) -> dict[str, Any]:
    """Make unknown top-level keys warnings, unless the config sets `unknown_keys`."""
    own = raw.get("slipstream", {})
    return raw | {"slipstream": {"unknown_keys": "warn"} | own} if isinstance(own, dict) else raw


def _unfold(raw: dict[str, Any]) -> dict[str, Any]:
    """Move dotted top-level keys into their blocks. TRL writes such keys, and DeepSpeed ignores them."""
    for name in [name for name in raw if "." in name]:
        value, (*blocks, last) = raw.pop(name), name.split(".")
        inner = raw
        for block in blocks:
            inner = inner.setdefault(block, {})
        inner.setdefault(last, value)
    return raw

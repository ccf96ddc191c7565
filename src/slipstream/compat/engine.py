"""`deepspeed.initialize` and the engine that it returns: Slipstream's, with DeepSpeed's methods and without its own storage."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

import slipstream
from slipstream.checkpoint.errors import CheckpointError, Ranks
from slipstream.checkpoint.save import agree_on_tag
from slipstream.compat import zero
from slipstream.compat.handles import carries_scale, serve_optimizer
from slipstream.compat.names import CONFIG_GETTERS, MISSING_METHODS
from slipstream.compat.schedules import serve_schedule, with_known_warmup
from slipstream.compat.weights import consolidated, write_weights
from slipstream.config import arguments, keys
from slipstream.config.plan import Plan
from slipstream.distributed import local_rank
from slipstream.train.data import distributed_loader
from slipstream.train.engine import Engine
from slipstream.train.step import UnusedParameterError
from slipstream.zero.comm import gather_objects

T = TypeVar("T")
DeepSpeedConfigError = ValueError  # what Slipstream raises for everything that a user can mend

# What DeepSpeed calls the states that `offload_states` moves, and what `Engine.sleep` calls them.
_STATES = {
    "optim_states": "optimizer",
    "hp_params": "optimizer",
    "lp_params": "weights",
    "lp_grads": "gradients",
    "contiguous_grad_buffer": "gradients",
}


def _of(read: Callable[[Plan], T]) -> Callable[[Any], T]:
    """A method that reads the plan: DeepSpeed's config values are methods of its engine."""

    def getter(self: Engine) -> T:
        return read(self.plan)

    return getter


class DeepSpeedEngine(Engine):
    """Made by `initialize` below, from a Slipstream engine. What it does not have, it looks for in the model."""

    config: Any  # as the user gave it, read: a dict
    coalesces = False  # inside coalesce_grad_reduction()

    @cached_property
    def _config(self) -> Any:
        """The config as a `DeepSpeedConfig`."""
        from slipstream.compat.config import DeepSpeedConfig

        return DeepSpeedConfig.of_engine(self)

    # -- the loop --

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the fp16 loss scale, as it is where it comes of the engine's outputs, whose backward scales."""
        return loss if carries_scale(loss) else super().scale(loss)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **kwargs: Any) -> Tensor:
        return super().backward(loss, retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas, **kwargs)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        if lr_kwargs:
            raise ValueError(f"engine.step(lr_kwargs={dict(lr_kwargs)}): schedules step by themselves; set their values before")
        assert not self.coalesces, "engine.step() inside coalesce_grad_reduction(), which is a no_sync() too: step after it"
        with _asserting(UnusedParameterError):
            super().step()

    def is_gradient_accumulation_boundary(self) -> bool:
        return self.at_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        self.set_boundary(is_boundary)

    def was_step_applied(self) -> bool:
        return self.step_applied

    def get_global_grad_norm(self) -> float | None:
        return self.global_grad_norm

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        assert not self.coalesces, "no_sync() inside coalesce_grad_reduction(), which does the same: leave one of them out"
        with super().no_sync():
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """The backward passes of one step: their gradients are reduced once, with `step()` or when they are asked for after it.

        Inside, `safe_get_full_grad` gives what this rank has summed up; `step()`, `no_sync()` and a second context raise
        AssertionError.
        """
        assert self.hooks.sync, "coalesce_grad_reduction() cannot be nested inside no_sync() or another one: use one of them"
        self.coalesces = True
        try:
            with super().no_sync():
                yield
        finally:
            self.coalesces = False

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """From the next window on, by more or fewer micro-batches."""
        batch = self.plan.batch
        each = batch.micro_batch_size * self.world_size
        if train_batch_size < each or train_batch_size % each:
            raise ValueError(
                f"set_train_batch_size({train_batch_size}): a multiple of micro batch ({batch.micro_batch_size}) x data parallel "
                f"({self.world_size}) = {each} is needed"
            )
        if self.hooks.backwards:
            raise RuntimeError(f"set_train_batch_size() after {self.hooks.backwards} backward passes of a window; call it before")
        kept = {unit.grads.dtype for unit in self.units if unit.grads is not None and unit.grads.dtype.itemsize < 4}
        if train_batch_size > each and kept and not self.recipe.accumulates and self.recipe.grads_dtype is None:
            raise ValueError(
                f"set_train_batch_size({train_batch_size}): gradients of {train_batch_size // each} micro-batches would be added "
                f"up in {kept.pop()}, since the engine was made for one; give it "
                f'"data_types": {{"grad_accum_dtype": "fp32"}}, or gradient_accumulation_steps above 1'
            )
        new = dataclasses.replace(batch, train_batch_size=train_batch_size, accumulation=train_batch_size // each)
        self.plan = dataclasses.replace(self.plan, batch=new)
        self.micro_steps = self.global_steps * new.accumulation
        self._divide(None)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """What the caller's loader gives from now on; the number of micro-batches stays."""
        batch = self.plan.batch
        total = micro_batch_size * batch.accumulation * self.world_size
        new = dataclasses.replace(batch, micro_batch_size=micro_batch_size, train_batch_size=total)
        self.plan = dataclasses.replace(self.plan, batch=new)

    # -- what the config says --

    train_batch_size = _of(lambda plan: plan.batch.train_batch_size)
    train_micro_batch_size_per_gpu = _of(lambda plan: plan.batch.micro_batch_size)
    gradient_accumulation_steps = _of(lambda plan: plan.batch.accumulation)
    managed_gradient_accumulation = _of(lambda plan: plan.batch.managed)
    gradient_clipping = _of(lambda plan: plan.gradient_clipping)
    zero_optimization = _of(lambda plan: plan.zero.stage > 0)
    zero_optimization_stage = _of(lambda plan: plan.zero.stage)
    zero_optimization_partition_gradients = _of(lambda plan: plan.zero.stage >= 2)
    zero_optimization_partition_weights = _of(lambda plan: plan.zero.stage == 3)
    zero_cpu_offload = _of(lambda plan: plan.offload.optimizer == "cpu")
    zero_use_cpu_optimizer = _of(lambda plan: plan.offload.optimizer != "none")
    zero_nvme_offload_optimizer = _of(lambda plan: plan.offload.optimizer == "nvme")
    zero_gather_16bit_weights_on_model_save = _of(lambda plan: True)  # state_dict() is complete at every stage
    fp16_enabled = _of(lambda plan: plan.precision.param_dtype is torch.float16)
    bfloat16_enabled = _of(lambda plan: plan.precision.param_dtype is torch.bfloat16)
    fp16_auto_cast = _of(lambda plan: plan.precision.auto_cast_inputs)
    torch_autocast_enabled = _of(lambda plan: plan.precision.autocast_dtype is not None)
    torch_autocast_dtype = _of(lambda plan: plan.precision.autocast_dtype)
    communication_data_type = property(_of(lambda plan: plan.precision.comm_dtype))
    dynamic_loss_scale = _of(lambda plan: plan.precision.loss_scale is not None and plan.precision.loss_scale.static is None)
    optimizer_name = _of(lambda plan: plan.optimizer.type.lower() if plan.optimizer else None)
    optimizer_params = _of(lambda plan: plan.optimizer.params if plan.optimizer else None)
    scheduler_name = _of(lambda plan: plan.scheduler.type if plan.scheduler else None)
    scheduler_params = _of(lambda plan: plan.scheduler.params if plan.scheduler else None)
    steps_per_print = _of(lambda plan: plan.steps_per_print)
    wall_clock_breakdown = _of(lambda plan: plan.wall_clock_breakdown)
    dump_state = _of(lambda plan: plan.dump_state)
    dataloader_drop_last = _of(lambda plan: plan.data.drop_last)
    mics_shard_size = property(_of(lambda plan: plan.zero.shard_size or -1))
    # what a config that asks for it is refused for
    elasticity_enabled = pld_enabled = sparse_gradients_enabled = _of(lambda plan: False)
    eigenvalue_enabled = curriculum_enabled_legacy = random_ltd_enabled = amp_enabled = _of(lambda plan: False)
    checkpoint_tag_validation_enabled = _of(lambda plan: plan.checkpoint.tag_validation != "ignore")
    checkpoint_tag_validation_fail = _of(lambda plan: plan.checkpoint.tag_validation == "fail")

    is_compiled = property(lambda self: self.module._compiled_call_impl is not None)
    is_deepcompile_active = _of(lambda plan: False)
    get_data_types = _of(lambda plan: (plan.precision.param_dtype, plan.precision.grad_accum_dtype or plan.precision.param_dtype))

    def postscale_gradients(self) -> bool:
        return not self._config.prescale_gradients

    def initial_dynamic_scale(self) -> float:
        return float(self._config.float16_config.initial_dynamic_scale())

    def checkpoint_writer_enabled(self) -> bool:
        return bool(self.config.get("checkpoint", {}).get("writer"))

    def is_map_style_dataset(self, obj: Any) -> bool:
        return hasattr(obj, "__getitem__") and hasattr(obj, "__len__")

    def is_iterable_style_dataset(self, obj: Any) -> bool:
        return isinstance(obj, torch.utils.data.IterableDataset)

    def loss_scale(self) -> float:
        return self.precision.loss_scale

    def get_batch_info(self) -> tuple[int, int, int]:
        """Batch size of a step, of a micro-batch, and micro-batches of a step."""
        batch = self.plan.batch
        return batch.train_batch_size, batch.micro_batch_size, batch.accumulation

    def get_lr(self) -> list[Any]:
        return self._of_groups("lr")

    def get_mom(self) -> list[Any]:
        return self._of_groups("betas" if self.optimizer and "betas" in self.optimizer.param_groups[0] else "momentum")

    def get_type(self) -> list[Any]:
        return self._of_groups("type")

    def _of_groups(self, key: str) -> list[Any]:
        return [group.get(key) for group in self.optimizer.param_groups] if self.optimizer is not None else []

    # -- ranks --

    global_rank = property(lambda self: dist.get_rank() if dist.is_initialized() else 0)
    local_rank = property(lambda self: local_rank())
    dp_world_size = property(lambda self: self.world_size)
    mp_world_size = property(lambda self: 1)
    data_parallel_group = property(lambda self: self.mesh.data.group)
    get_tensor_parallel_rank = get_model_parallel_rank = _of(lambda plan: 0)

    def get_data_parallel_rank(self) -> int:
        return self.rank

    def get_sequence_parallel_group(self) -> None:
        return None

    # -- weights and states --

    @contextmanager
    def surgery(self, group: int | Callable[[str, nn.Parameter], int] | None = None) -> Iterator[None]:
        before = zero.parameters_of(self)
        with super().surgery(group):
            yield
            zero.make_whole(self.module)
        zero.mark(self, before)

    def destroy(self) -> None:
        params = zero.parameters_of(self)
        super().destroy()
        zero.unmark(params)

    def save_checkpoint(
        self,
        save_dir: str,
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        contents: Any = "all",
    ) -> bool:
        """`tag` may be a step or a loss: what names the folder is its text. With tag_validation "Fail", tags that differ raise
        AssertionError.
        """
        name = None if tag is None else str(tag)
        if save_dir and self.plan.checkpoint.tag_validation == "fail":
            with self.together("save_checkpoint"), _asserting(CheckpointError):
                agree_on_tag(gather_objects(name or "", self.mesh.data), "Fail")
        return super().save_checkpoint(save_dir, name, client_state, save_latest, exclude_frozen_parameters, contents)

    def load_checkpoint(
        self,
        load_dir: str,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any]]:
        if custom_load_fn is not None:
            raise ValueError("load_checkpoint(custom_load_fn=): parameters load by name; use load_module_strict=False for fewer")
        name = None if tag is None else str(tag)
        return super().load_checkpoint(
            load_dir, name, load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only
        )

    def module_state_dict(self, exclude_frozen_parameters: bool = False, **kwargs: Any) -> dict[str, Any]:
        """The whole state on every rank. Collective."""
        state = self.state_dict(**kwargs)
        frozen = {name for name, param in self.module.named_parameters(remove_duplicate=False) if not param.requires_grad}
        return {name: value for name, value in state.items() if not (exclude_frozen_parameters and name in frozen)}

    def load_module_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True, custom_load_fn: Any = None) -> Any:
        if custom_load_fn is not None:
            raise ValueError("load_module_state_dict(custom_load_fn=): use engine.load_state_dict with the tensors to be loaded")
        return self.load_state_dict(checkpoint.get("module", checkpoint), strict=strict)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """The whole state in the weights' dtype, on the CPU of the first rank; None on others. Collective."""
        return consolidated(self, exclude_frozen=exclude_frozen_parameters)

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """The weights as they are computed with, for `torch.load`, or as safetensors where the name says so. Collective."""
        state = consolidated(self, exclude_frozen=exclude_frozen_parameters)
        path = Path(save_dir) / save_filename

        def write() -> None:
            if state is not None:
                write_weights(state, path)

        Ranks(self.mesh.data.group).gather(f"{path} was not written", write)
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
        """`Engine.sleep`, by DeepSpeed's names of states."""
        kinds = None if include is None else {_STATES[str(getattr(state, "value", state))] for state in include}
        self.sleep(kinds, str(getattr(device, "value", device)))

    def reload_states(self, non_blocking: bool = False) -> None:
        self.wake()

    def empty_partition_cache(self) -> None:
        """Nothing is kept gathered between steps."""

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
            raise ValueError("deepspeed_io(data_sampler=): make a torch DataLoader with it, and iterate over that")
        return distributed_loader(
            dataset,
            batch_size=batch_size or self.plan.batch.micro_batch_size,
            rank=self.rank,
            world_size=self.world_size,
            collate_fn=collate_fn,
            drop_last=self.plan.data.drop_last,
            seed=self.plan.seed,
            num_workers=num_local_io_workers or 0,
            pin_memory=pin_memory and self.device.type == "cuda",
        )

    def compile(self, backend: Any = "inductor", compile_kwargs: Mapping[str, Any] | None = None, **others: Any) -> None:
        """`torch.compile` of the model, in place."""
        given = sorted(name for name, value in others.items() if value)
        if given:
            raise ValueError(f"engine.compile({', '.join(given)}=): DeepCompile is not built; torch.compile runs without it")
        self.module.compile(backend=backend, **(compile_kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in MISSING_METHODS:
                raise AttributeError(f"engine.{name} is not built yet: {MISSING_METHODS[name]}") from None
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or not hasattr(module, name):
                raise
            return getattr(module, name)


@contextmanager
def _asserting(kind: type[Exception]) -> Iterator[None]:
    """An error of Slipstream's as the AssertionError that DeepSpeed raises."""
    try:
        yield
    except kind as error:
        raise AssertionError(str(error)) from None


def _getter(key: str) -> Callable[[DeepSpeedEngine], Any]:
    return lambda self: self._config._read.value(key)


for _name, _key in CONFIG_GETTERS.items():
    setattr(DeepSpeedEngine, _name, _getter(_key))


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
    """`slipstream.initialize`, from what DeepSpeed's callers give; the engine has DeepSpeed's methods.

    config   also as base64 of JSON; "zero_optimization.x" at its top level means x in the block, where that does not say it.
             Unknown top-level keys are ignored, as DeepSpeed does, but logged; those that are near a known key are refused.
    """
    loaded = arguments.read_config(config=_decode(config), config_params=_decode(config_params), args=args)
    raw = _unfold(loaded.raw)
    used = tolerant(with_known_warmup(raw))
    if optimizer is None and "optimizer" not in raw:  # DeepSpeed, too, makes no schedule then; Trainer evaluates this way
        used, lr_scheduler = {name: value for name, value in used.items() if name != "scheduler"}, None
    with zero.held_values(model):
        engine, handle, loader, scheduler = slipstream.initialize(
            model=model,
            optimizer=optimizer,
            model_parameters=model_parameters,
            training_data=training_data,
            lr_scheduler=lr_scheduler,
            distributed_port=distributed_port,
            mpu=mpu,
            dist_init_required=dist_init_required,
            collate_fn=collate_fn,
            config=used,
            mesh_param=mesh_param,
        )
    # The class has methods and no state of its own, so an engine becomes one of it by name only.
    engine.__class__ = DeepSpeedEngine
    assert isinstance(engine, DeepSpeedEngine)
    engine.config = raw
    if engine.rank == 0:
        keys.say(loaded.notes)
    if lr_scheduler is None and scheduler is not None:
        scheduler.optimizer = handle  # the config's own gets the returned one, a caller's the one that it was made of
    serve_schedule(scheduler)
    serve_optimizer(handle)
    zero.adopt(engine)
    return engine, handle, loader, scheduler


def read_config(config: Any, config_params: Any = None, args: Any = None) -> dict[str, Any]:
    """The dictionary that a path, a dictionary, base64 of JSON or the flags of a script stand for."""
    return _unfold(arguments.read_config(config=_decode(config), config_params=_decode(config_params), args=args).raw)


def _decode(config: Any) -> Any:
    """A config as a string that is neither a file nor JSON is base64 of JSON."""
    if not isinstance(config, str) or os.path.exists(config) or config.endswith(".json"):
        return config
    try:
        return json.loads(base64.urlsafe_b64decode(config).decode())
    except (ValueError, RecursionError):
        return config  # load_config says what is wrong with the path


def tolerant(raw: dict[str, Any]) -> dict[str, Any]:
    """The config with unknown top-level keys as warnings, unless it says otherwise."""
    own = raw.get("slipstream", {})
    return raw | {"slipstream": {"unknown_keys": "warn"} | own} if isinstance(own, dict) else raw


def _unfold(raw: dict[str, Any]) -> dict[str, Any]:
    """TRL writes keys of blocks with dots into the top level, where DeepSpeed overlooks them."""
    for name in [name for name in raw if "." in name]:
        value, (*blocks, last) = raw.pop(name), name.split(".")
        inner = raw
        for block in blocks:
            inner = inner.setdefault(block, {})
        inner.setdefault(last, value)
    return raw

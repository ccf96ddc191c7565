"""`deepspeed.zero`: gathered access to parameters (`GatheredParameters`), and the attributes that DeepSpeed's clients read on those
of an engine. Construction inside `zero.Init` is in compat/held.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace, TracebackType
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.utils._pytree import tree_map

from slipstream.compat.held import (
    Init,
    ZeroParamStatus,
    deal,
    hide,
    hold,
    is_held,
    is_zero_param,
    least_over,
    parameter_ids,
    remove_attributes,
    reveal,
    stored,
)
from slipstream.compat.utils import z3_leaf_module
from slipstream.quantized.linear import refuse
from slipstream.quantized.rules import layers_with_rules, quantize_layers, rules_of
from slipstream.train.agreement import refused_together
from slipstream.train.engine import Engine
from slipstream.zero import access
from slipstream.zero.comm import Comm
from slipstream.zero.hooks import Phase
from slipstream.zero.parameter import ReleasedParameter
from slipstream.zero.storage.store import DiskStore
from slipstream.zero.unit import State, Unit

_engines: weakref.WeakKeyDictionary[Engine, None] = weakref.WeakKeyDictionary()  # in the order of their creation, as on each rank


class ZeRORuntimeException(Exception):
    """DeepSpeed's error, for `except`: Slipstream raises ValueError or RuntimeError."""


def apply_to_tensors_only(function: Callable[[Tensor], Any], value: Any, warning_msg_fn: Any = None) -> Any:
    """`function` of each tensor of a tree."""
    return tree_map(lambda leaf: function(leaf) if torch.is_tensor(leaf) else leaf, value)


class GatheredParameters:
    """`with deepspeed.zero.GatheredParameters(params, modifier_rank=0):` gathers parameters, before and after `initialize`.

    With `modifier_rank` (a global rank), that rank's writes are kept on all ranks. Without it parameters are read-only: if a rank
    has changed one, the exit discards the changes and raises RuntimeError on all ranks. Inside `Init`, rank 0's writes are kept.
    Collective. `fwd_module` has no effect: a forward gathers the parameters that it reads.
    """

    def __init__(self, params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True) -> None:
        if isinstance(params, nn.Module):
            params = params.parameters()
        elif isinstance(params, Tensor):
            params = [params]
        chosen = {id(param): param for param in params if param is not None} if enabled else {}
        self.held_params: list[Any] = sorted((param for param in chosen.values() if is_held(param)), key=lambda param: param.ds_id)
        self.engine_params: list[Any] = [
            param for param in chosen.values() if isinstance(param, nn.Parameter) and not is_held(param)
        ]
        self.modifier_rank = modifier_rank
        self._read: list[_GatheredRead] = []
        self._stack = ExitStack()

    def __enter__(self) -> None:
        reveal(self.held_params)
        for param in self.held_params:
            param.ds_status = ZeroParamStatus.AVAILABLE
        if self.modifier_rank is None and not Init.is_open():
            self._read = [_GatheredRead(param, None, 0) for param in self.held_params]
        if chosen := access.units_of(self.engine_params):
            for param in (param for param in self.engine_params if hasattr(param, "ds_status")):
                self._stack.callback(setattr, param, "ds_status", param.ds_status)
                param.ds_status = ZeroParamStatus.AVAILABLE
            self._gather_units(chosen)

    def _gather_units(self, chosen: dict[Unit, list[int]]) -> None:
        if self.modifier_rank is not None:
            for engine in _engines:
                engine.forget_state()
            first = next(iter(chosen))
            if self.modifier_rank not in (ranks := first.comms.data.axis.ranks):
                raise ValueError(f"modifier_rank is {self.modifier_rank}, and {first.names[0]!r} is on the ranks {list(ranks)}")
            rank = ranks.index(self.modifier_rank)
            self._stack.enter_context(access.gathered_units(chosen, rank, write=True))
            return
        chosen = {unit: indices for unit, indices in chosen.items() if not _is_computing(unit)}
        # without parameters that an outer context has gathered
        readable = [(unit, i) for unit, indices in chosen.items() for i in indices if i not in unit.shown.copies]
        self._stack.enter_context(access.gathered_units(chosen, None, write=False))
        self._read += [_GatheredRead(unit.params[i], unit, i) for unit, i in readable]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        changed = _first_changed(self._read) if kind is None else ""
        source = 0 if self.modifier_rank is None and Init.is_open() else self.modifier_rank
        for param in self.held_params:
            if kind is None and source is not None:
                group = param.ds_process_group
                first = dist.get_group_rank(group, source) if group is not None and self.modifier_rank is not None else source
                param.ds_tensor = deal(param, param.data, group, first)
            hide(param)
        self._stack.__exit__(kind, error, traceback)
        if changed:
            raise RuntimeError(
                f"{changed} was changed inside GatheredParameters(modifier_rank=None), and the change is discarded; pass "
                f"modifier_rank=0 to keep what rank 0 writes"
            )


class _GatheredRead:
    """A parameter gathered for reading, with its version when the context begins. unit: None if the parameter is held."""

    def __init__(self, param: Any, unit: Unit | None, i: int) -> None:
        self.param, self.unit, self.i = param, unit, i
        self.version = param._version

    def __str__(self) -> str:
        return f"a parameter of shape {tuple(self.param.shape)}" if self.unit is None else f"parameter {self.unit.names[self.i]!r}"

    def was_changed(self) -> bool:
        """Whether the version or this rank's range differs from the stored one (a write to `.data` does not change the version)."""
        if self.param._version != self.version:
            return True
        before: Tensor | None
        if self.unit is None:
            start, before = stored(self.param)
        else:
            inside, of_param = self.unit.layout.slots[self.i].common(self.unit.span)
            start = of_param.start
            before = self.unit.weights.get(inside.start, inside.stop) if inside.start < inside.stop else None
        if before is None or not before.numel():
            return False
        return _differ(before, self.param.data.reshape(-1)[start : start + before.numel()])


def _differ(before: Tensor, after: Tensor) -> bool:
    """Whether two tensors differ by more than the rounding error of a reverted change, such as merging and unmerging an adapter."""
    if before.shape != after.shape or before.dtype != after.dtype:
        return True
    if not before.is_floating_point():
        return not torch.equal(before, after.to(before.device))
    wide = torch.float64 if before.dtype is torch.float64 else torch.float32  # torch promotes no fp8
    numbers, eps = before.to(wide), torch.finfo(before.dtype).eps
    slack = 4 * eps * float(numbers.nan_to_num(0, 0, 0).abs().max())
    return not bool(torch.isclose(after.to(before.device, wide), numbers, rtol=0, atol=slack, equal_nan=True).all())


def _first_changed(read: Sequence[_GatheredRead]) -> str:
    """Describe the first parameter that any rank has changed; "" if there is none. Collective."""
    by_comm: dict[Comm | None, list[_GatheredRead]] = {}
    for entry in read:
        by_comm.setdefault(None if entry.unit is None else entry.unit.comms.data, []).append(entry)
    for data, group_read in by_comm.items():
        first = next((float(k) for k, entry in enumerate(group_read) if entry.was_changed()), float("inf"))
        if data is not None:
            first = float(data.exchange(torch.tensor([first], dtype=torch.float64)).min())
        else:
            first = least_over(first, group_read[0].param.ds_process_group)
        if first < len(group_read):
            return str(group_read[int(first)])
    return ""


def _is_computing(unit: Unit) -> bool:
    """Whether the unit is gathered for a running forward or backward of its engine. Reading it then needs no copy, and autograd
    functions save the parameter itself, with its `ds_` attributes (TRL's losses)."""
    gathered = unit.placement.weights and unit.state is State.GATHERED
    return gathered and any(engine.states.hooks.phase is not Phase.IDLE for engine in _engines if unit in engine.units)


@contextmanager
def unwrap_model_for_generation(engine: Engine) -> Iterator[nn.Module]:
    """Yield the engine's model with all parameters gathered."""
    with GatheredParameters(engine.module):
        yield engine.module


@contextmanager
def GatherReplacedLayerParams(params: Any, module: nn.Module, enabled: bool = True) -> Iterator[None]:
    """Inside, parameters of sliced layers are whole, to be read; what is written is discarded. Collective."""
    chosen = access.units_of([params] if isinstance(params, nn.Parameter) else params) if enabled else {}
    with access.gathered_units(chosen, None, write=False), ExitStack() as stack:
        for unit, indices in chosen.items():
            for i in indices:
                param, shown = unit.params[i], unit.params[i].data
                stack.callback(setattr, param, "data", shown)  # of an outer `GatheredParameters`, which restores its own
                param.data = access.whole_of(shown, unit, i)
        yield


def set_autotp_mode(training: bool = False) -> None:
    """Has no effect: `initialize` cuts a model for training, `init_inference` for inference."""


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """A no-op: a forward gathers every parameter that it reads, even outside the parameter's module."""


unregister_external_parameter = register_external_parameter


def _init_group_wise_weight_quantization(model: nn.Module, ds_config: Mapping[str, Any]) -> nn.Module:
    """Quantize the layers that a config dict's `weight_quantization` names, in place, for models without an engine (`initialize`
    does it too). Returns the model. Layers sharded by `Init` are gathered one at a time and sharded again, which is collective.
    Raises ValueError as `quantize_by_rules`."""
    from slipstream.config.features import InferenceWeightQuantization  # pydantic is slow to import

    block = InferenceWeightQuantization.model_validate(ds_config["weight_quantization"])
    if not block.enabled or not (rules := rules_of(block.model_dump())):
        return model
    chosen = layers_with_rules(model, rules)
    weights: dict[str, Any] = {f"{name}.weight": model.get_submodule(name).weight for names, _ in chosen for name in names}
    groups = {name: weight.ds_process_group for name, weight in weights.items() if is_held(weight)}
    with refused_together("its model", next(iter(groups.values()))) if groups else nullcontext():
        refuse(model, {model.get_submodule(names[0]): names for names, _ in chosen}, groups.__contains__)
    for names, form in chosen:
        weight = model.get_submodule(names[0]).weight
        group = getattr(weight, "ds_process_group", None)
        with GatheredParameters([weight]):
            packed = quantize_layers(model, names, form)
        if is_held(weight):
            hold(packed, group)
    return model


def register_engine(engine: Any) -> None:
    """Register a new engine and set the `ds_` attributes of its parameters."""
    _engines[engine] = None
    if engine.optimizer is not None:  # OpenRLHF and others call them on the optimizer
        engine.optimizer.offload_states, engine.optimizer.reload_states = engine.offload_states, engine.reload_states
    set_attributes(engine, [])


def traffic_of_engines() -> list[Any]:
    return [
        engine.states.resources["traffic"] for engine in _engines if "states" in vars(engine) and engine.plan.traffic is not None
    ]


def parameters_of(engine: Engine) -> list[nn.Parameter]:
    """The model's parameters; a quantized one counts once, not per inner tensor."""
    return list({id(param): param for unit in engine.units for param in unit.model_params}.values())


def set_attributes(engine: Any, before: Iterable[nn.Parameter]) -> None:
    """Set the `ds_` attributes of the engine's sharded parameters, and remove them from the other parameters of `before`."""
    vars(engine.states.hooks)["engine"] = engine  # the model keeps it: `take_over` must not depend on a rank's garbage collector
    sharded = parameters_of(engine) if engine.plan.zero.stage == 3 else []
    remove_attributes(before, sharded)
    for param in sharded:
        marked: Any = param
        if not hasattr(marked, "ds_id"):
            marked.ds_id, marked.ds_status, marked.ds_active_sub_modules = next(parameter_ids), ZeroParamStatus.NOT_AVAILABLE, set()
        marked.ds_shape, marked.ds_numel, marked.ds_persist = param.shape, param.numel(), False
        marked.partition_numel = partial(_partition_numel, marked)
    if sharded:
        show_ranges(engine)
        for leaf in filter(z3_leaf_module, engine.module.modules()):
            for inner in leaf.parameters():
                vars(inner).setdefault("ds_z3_leaf_module", leaf)
        unwrap(engine.module)
        for module, method, around in _wrappers(engine.module):
            if (own := getattr(module, method, None)) is not None:
                setattr(module, method, partial(around, own))  # deepcopy rebinds a partial, as it does no closure
    if sharded and engine.optimizer is not None:
        engine.optimizer.parameter_offload = ParameterOffload(engine.module)


def _wrappers(model: nn.Module) -> Iterator[tuple[nn.Module, str, Callable[..., Any]]]:
    rows = (("save_pretrained", _save_pretrained), ("_apply", _convert_module), ("to_empty", _refuse_empty))
    yield from ((model, *row) for row in rows)
    yield from ((module, "_save_to_state_dict", _save_values) for module in model.modules())


def unwrap(model: nn.Module) -> None:
    """Remove the wrappers that `set_attributes` has put around the model's methods: a shallow copy of a module shares them."""
    for module, method, around in _wrappers(model):
        wrapper = vars(module).get(method)
        if isinstance(wrapper, partial) and wrapper.func is around:
            delattr(module, method)
            own = wrapper.args[0]
            if getattr(own, "__func__", None) is not getattr(type(module), method, None):  # of the instance
                setattr(module, method, own)


def show_ranges(engine: Engine) -> None:
    """Set `ds_tensor` to a 1D view of the elements that this rank stores; it is empty if they are on disk.

    Quantized parameters (several tensors) and those of a sleeping engine have no `ds_tensor`.
    """
    for unit in (unit for unit in engine.units if unit.state is not State.ASLEEP):
        for i, (param, slot) in enumerate(zip(unit.params, unit.layout.slots, strict=True)):
            if unit.placement.weights and unit.model_params[i] is param:
                inside, _ = slot.common(unit.span)
                own = unit.weights.view(inside.start, inside.stop) if inside.start < inside.stop else None
                marked: Any = param
                marked.ds_tensor = torch.empty(0, dtype=unit.weights.dtype) if own is None else own.detach()
                marked.ds_tensor.ds_numel = inside.stop - inside.start


def hide_ranges(engine: Engine) -> None:
    """Remove every `ds_tensor`, so that none keeps memory alive that the engine frees."""
    for unit in engine.units:
        for param in unit.params:
            vars(param).pop("ds_tensor", None)


def _convert_module(apply: Any, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """`module.cpu()`, `to()` and others, which Lightning calls around each run: an engine's parameters stay where they are,
    buffers and parameters of no engine change. A change of an engine's dtype raises."""
    module: nn.Module = apply.__self__
    dtypes = {param.dtype for param in module.parameters() if is_zero_param(param)}
    if any(function(torch.empty(0, dtype=dtype)).dtype != dtype for dtype in dtypes):
        return cast(nn.Module, apply(function, recurse))
    _convert(module, function, recurse)
    return module


def _convert(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool) -> None:
    for child in module.children() if recurse else ():
        if any(map(is_zero_param, child.parameters())):
            _convert(child, function, recurse)
        else:
            child._apply(function)  # its class may keep some tensors as they are
    others = [param for param in module.parameters(recurse=False) if not is_zero_param(param)]
    grads = [param.grad for param in others if param.grad is not None]
    for tensor in (*others, *grads, *module.buffers(recurse=False)):
        tensor.data = function(tensor.data)


def _refuse_empty(empty: Any, **kwargs: Any) -> nn.Module:
    raise RuntimeError(
        "to_empty() would lose the weights, of which an engine of ZeRO stage 3 stores this rank's shards; call it before "
        "deepspeed.initialize() or after engine.destroy()"
    )


def _partition_numel(param: Any) -> int:
    return int(param.ds_tensor.ds_numel)


def _save_values(save: Callable[..., Any], destination: Any, prefix: str, keep_vars: bool) -> None:
    """A module's part of a `state_dict()`, with released parameters: scripts read names and shapes, and reading values raises. In
    DeepSpeed they are empty tensors."""
    own: dict[str, Any] = {}
    save(own, prefix, True)
    for name, value in own.items():
        stays = keep_vars or not torch.is_tensor(value) or isinstance(value, ReleasedParameter)
        destination[name] = value if stays else value.detach()


def _save_pretrained(save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`save_pretrained`, but a no-op on ranks that pass no state: accelerate passes the full state on rank 0 and, on the others,
    None with `is_main_process=False`. There it would read sharded parameters and write nothing.

    OpenRLHF gathers the state, then has rank 0 save PEFT's adapters without passing it (DeepSpeed writes them empty there): what
    the caller still holds of this step is saved."""
    if len(args) < 2 and kwargs.get("state_dict") is None:
        if not kwargs.get("is_main_process", True):
            return None
        model: Any = getattr(save, "__self__", None)
        state = next((engine.held_state() for engine in _engines if engine.module is model), None)
        if state is not None and any(isinstance(param, ReleasedParameter) for param in model.parameters()):
            kwargs["state_dict"] = state
    return save(*args, **kwargs)


def engine_of(param: nn.Parameter) -> tuple[Any, str]:
    """The DeepSpeedEngine of a parameter, and its name there. Raises ValueError if no engine has it."""
    for unit, indices in access.units_of([param]).items():
        for engine in _engines:
            if unit in engine.units:
                return engine, unit.names[indices[0]]
    raise ValueError(
        f"a parameter of shape {tuple(param.shape)} belongs to no engine of deepspeed.initialize(); pass one of engine.parameters()"
    )


def take_over(model: Any) -> None:
    """Destroy the engines that have a model's parameters: DeepSpeed lets a second engine have them. Lightning tests the model
    that it has trained, TRL trains the one that has computed a reference. Calling such an engine calls the model. Collective."""
    units = access.units_of(model.parameters()) if isinstance(model, nn.Module) else {}
    if any(isinstance(unit.weights, DiskStore) for unit in units):
        return  # destroy would lose them, so initialize refuses the model
    for engine in [each for each in _engines if not units.keys().isdisjoint(each.units)]:
        engine.destroy()
        vars(engine)["forward"] = engine.module.__call__


class ParameterOffload:
    """`optimizer.parameter_offload`, for clients that remove DeepSpeed's hooks before they generate and restore them afterwards.

    It has no hooks to remove: inside `GatheredParameters` the engine's hooks find the parameters gathered.
    """

    def __init__(self, model: nn.Module) -> None:
        self.module = SimpleNamespace(named_parameters=model.named_parameters, ds_external_parameters=lambda: iter(()))
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: Any) -> None:
        """A no-op: there are no hooks to add."""

    _register_hooks_recursively = _register_deepspeed_module

"""`deepspeed.zero`: sharded construction of models (`Init`) and gathered access to parameters (`GatheredParameters`).

A parameter built inside `Init` is *held*: each rank stores one flat range of it (`param.ds_tensor`), and the parameter itself has
its shape, dtype and device over a single NaN. `initialize` moves the ranges into the engine block by block.

[Note: Held, not on meta] Clients of DeepSpeed read a parameter's device, add modules next to it and write values before the engine
exists (`from_pretrained`, PEFT's adapters, resized embeddings). On the meta device these values would be lost.
"""

from __future__ import annotations

import enum
import itertools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from types import SimpleNamespace, TracebackType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.nn.modules.module import register_module_module_registration_hook, register_module_parameter_registration_hook
from torch.utils._pytree import tree_map

from slipstream.compat.utils import z3_leaf_module
from slipstream.ops.rows import RowForm, quantize_rows
from slipstream.quantized import row_forms
from slipstream.quantized.linear import refuse
from slipstream.quantized.rules import layers_with_rules, quantize_layers, rules_of
from slipstream.train.agreement import refused_together
from slipstream.train.engine import Engine
from slipstream.world.join import init_distributed
from slipstream.zero import access
from slipstream.zero.comm import Comm
from slipstream.zero.hooks import Phase
from slipstream.zero.init import asked, forget, supply
from slipstream.zero.parameter import ReleasedParameter
from slipstream.zero.storage.store import DiskStore
from slipstream.zero.unit import State, Unit


class ZeroParamType(enum.Enum):
    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(enum.Enum):
    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


_ids = itertools.count()
_engines: weakref.WeakKeyDictionary[Engine, None] = weakref.WeakKeyDictionary()  # in the order of their creation, as on each rank
_DATA: Any = torch.Tensor.data  # the slot of param.data
_MARKS = frozenset(  # attributes of a parameter in stage 3
    """ds_tensor ds_persist ds_process_group ds_id ds_shape ds_numel ds_status ds_active_sub_modules ds_z3_leaf_module
    partition_numel""".split()  # noqa: SIM905
)
_CONVERSIONS = frozenset({"to", "cpu", "cuda", "float", "double", "half", "bfloat16"})
_COPIES = _CONVERSIONS | {"clone", "detach", "contiguous", "pad"}  # transformers pads a tied head's bias to its size, mostly by 0
_NO_WRITES = frozenset({"requires_grad_", "detach_", "retain_grad", "share_memory_", "rename_", "__get__"})
_TRANSPOSED = tuple(vars(torch._C.TensorBase)[name].__get__ for name in ("T", "mT", "H", "mH"))  # attributes that are views
_FACTS = frozenset(  # functions that do not read the values; `__get__` and `__set__` access attributes
    """__get__ __set__ __hash__ __len__ __reduce_ex__ __repr__ dim element_size get_device is_complex is_contiguous
    is_floating_point ndimension nelement numel register_hook register_post_accumulate_grad_hook requires_grad_ size stride
    type""".split()  # noqa: SIM905
)


# -- flat ranges of a parameter, one per rank of a group --


def _group_rank(group: Any) -> tuple[int, int]:
    return (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)


def _wire(tensor: Tensor, group: Any) -> Tensor:
    """The tensor's bytes on a device that the group's backend can send from."""
    on_cuda = dist.get_backend(group) == "nccl"
    return (tensor.cuda() if on_cuda else tensor).contiguous().view(torch.uint8)


def _chunk(param: nn.Parameter, size: int) -> int:
    return -(-param.numel() // size)


def _deal(param: nn.Parameter, values: Tensor, group: Any, source: int) -> Tensor:
    """Scatter the values of the group's rank `source`; returns this rank's 1D range, zero-padded to equal lengths. Collective."""
    rank, size = _group_rank(group)
    local = torch.zeros(_chunk(param, size), dtype=param.dtype)
    if size == 1:
        return local.copy_(values.detach().reshape(-1))
    pieces: list[Tensor] | None = None
    if rank == source:
        padded = torch.zeros(size * len(local), dtype=param.dtype)
        padded[: param.numel()].copy_(values.detach().reshape(-1))
        pieces = [_wire(piece, group) for piece in padded.chunk(size)]
    received = _wire(local, group)
    dist.scatter(received, pieces, group=group, group_src=source)
    return received.cpu().view(param.dtype)


def _all_gather(param: Any) -> Tensor:
    """All-gather a held parameter into a new CPU tensor of its shape. Collective."""
    group = param.ds_process_group
    _, size = _group_rank(group)
    if size == 1:
        return param.ds_tensor.clone().view(param.ds_shape)
    piece = _wire(param.ds_tensor, group)
    gathered = torch.empty(size * piece.numel(), dtype=torch.uint8, device=piece.device)
    dist.all_gather(list(gathered.chunk(size)), piece, group=group)
    return gathered.cpu().view(param.dtype)[: param.ds_numel].view(param.ds_shape)


class HeldParameter(nn.Parameter):
    """A parameter of which this rank stores one range. In-place writes inside `Init` update all ranges; elsewhere they raise."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target, name = _target(args, kwargs), getattr(func, "__name__", "")
        if isinstance(target, HeldParameter):
            if func == _DATA.__get__:  # inside Init the parameter itself, so that param.data.normal_() in a constructor writes
                with torch._C.DisableTorchFunctionSubclass():
                    return target if Init.is_open() else _standing_for(target, func(target))
            if name in _CONVERSIONS:
                with torch._C.DisableTorchFunctionSubclass():
                    dtype = func(torch.empty((), dtype=target.dtype), *args[1:], **kwargs).dtype
                return _stand_in(target, dtype)
            if func == _DATA.__set__ and isinstance(args[1], _StandIn) and args[1].source is target:
                return _convert(target, args[1].dtype)
            if _is_write(func):
                if not Init.is_open():
                    raise _no_write(target)
                _compute(func, args, kwargs)
                return target
        reads = name not in _FACTS or func in _TRANSPOSED
        if (reads and Init.is_open()) or name == "equal":  # transformers compares what it ties
            return _compute(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return an ordinary parameter with all values; `initialize` shards copies of layers."""
        copy = nn.Parameter(_all_gather(self), requires_grad=self.requires_grad)
        memo[id(self)] = copy
        return copy


class _HeldView(Tensor):
    """A view of a held parameter's gathered values inside `Init`; a write to it updates all ranges."""

    source: tuple[HeldParameter, Tensor]  # the parameter and the gathered values that this tensor views

    @classmethod
    def __torch_function__(cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


def _target(args: Any, kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else kwargs.get("tensor")  # torch.nn.init passes its tensor by keyword


def _compute(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Call `func` on gathered values of held parameters, inside `Init`. A write to one, or to a view of it, updates all ranges.

    Collective: all ranks run the same constructor.
    """
    gathered: dict[int, tuple[HeldParameter, Tensor]] = {}

    def gather_value(value: Any) -> Any:
        if isinstance(value, HeldParameter):
            if id(value) not in gathered:
                gathered[id(value)] = value, _all_gather(value)
            return gathered[id(value)][1]
        if isinstance(value, _HeldView):
            gathered[id(value.source[0])] = value.source
        if isinstance(value, _StandIn):
            return gather_value(value.source).to(value.dtype, copy=True)  # a write to the result is none to the parameter
        return value

    def as_view(value: Any) -> Any:
        if isinstance(value, Tensor) and value.device.type != "meta":
            for param, values in gathered.values():
                if value.untyped_storage().data_ptr() == values.untyped_storage().data_ptr():
                    view = value.as_subclass(_HeldView)
                    view.source = (param, values)
                    return view
        return value

    with torch._C.DisableTorchFunctionSubclass():
        result = tree_map(as_view, func(*tree_map(gather_value, args), **tree_map(gather_value, kwargs)))
    target = _target(args, kwargs)
    if isinstance(target, (HeldParameter, _HeldView)) and _is_write(func):
        param: Any
        param, values = target.source if isinstance(target, _HeldView) else gathered[id(target)]
        param.ds_tensor = _deal(param, values, param.ds_process_group, 0)
    return result


def _is_write(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.startswith("__") and name not in _NO_WRITES
    return in_place or name == "__setitem__" or func == _DATA.__set__


class _StandIn(Tensor):
    """A held parameter's `.data`, or a copy or conversion of it; writes to it raise. Assigned to the same parameter's `.data`, as
    by `module.to(device)`, `module.bfloat16()` and `param.data = param.data.float()`, it keeps the values that the ranks store."""

    source: HeldParameter

    @classmethod
    def __torch_function__(cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target, name = _target(args, kwargs), getattr(func, "__name__", "")
        if isinstance(target, _StandIn) and _is_write(func):
            raise _no_write(target)
        if Init.is_open() and (name not in _FACTS | _COPIES or func in _TRANSPOSED):
            return _compute(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            is_copy = isinstance(target, _StandIn) and name in _COPIES and result.shape == target.shape
            return _standing_for(target.source, result) if is_copy else result


def _standing_for(param: Any, values: Tensor) -> _StandIn:
    stand_in = values.as_subclass(_StandIn)
    stand_in.source = param
    return stand_in


def _stand_in(param: Any, dtype: torch.dtype) -> _StandIn:
    fill = float("nan") if dtype.is_floating_point else 0
    return _standing_for(param, torch.full((), fill, dtype=dtype).expand(param.ds_shape))


def _no_write(target: Tensor) -> RuntimeError:
    return RuntimeError(
        f"a parameter of shape {tuple(target.shape)} was sharded by zero.Init and cannot be written here; write it "
        f"inside `with deepspeed.zero.GatheredParameters(param, modifier_rank=0):`"
    )


def _convert(param: Any, dtype: torch.dtype) -> None:
    """Convert this rank's range to `dtype`. It stays in host memory: the config chooses the engine's device."""
    if dtype is not param.dtype:
        param.ds_tensor = param.ds_tensor.to(dtype)
        param.__class__ = nn.Parameter
        _hide(param, dtype)


def is_held(param: Any) -> bool:
    return isinstance(param, HeldParameter)


class ZeRORuntimeException(Exception):
    """DeepSpeed's error, for `except`: Slipstream raises ValueError or RuntimeError."""


def is_zero_param(parameter: Any) -> bool:
    """Whether a tensor is a parameter of stage 3, or of `Init`."""
    return torch.is_tensor(parameter) and hasattr(parameter, "ds_id")


def apply_to_tensors_only(function: Callable[[Tensor], Any], value: Any, warning_msg_fn: Any = None) -> Any:
    """`function` of each tensor of a tree."""
    return tree_map(lambda leaf: function(leaf) if torch.is_tensor(leaf) else leaf, value)


def _hold(param: Any, group: Any, source: int = 0) -> None:
    """Shard a parameter: store this rank's range of rank `source`'s values. Collective."""
    if param.numel() == 0 or param.is_meta:
        return
    if isinstance(param, _StandIn):  # nn.Parameter(another.float()) inside Init
        param.__class__, param.data = nn.Parameter, _all_gather(param.source).to(param.dtype)  # type: ignore[assignment]
    param.ds_tensor = _deal(param, param.data, group, source)
    param.ds_process_group, param.ds_id = group, next(_ids)
    param.ds_shape, param.ds_numel = param.shape, param.numel()
    param.ds_active_sub_modules, param.ds_persist = set(), False
    _hide(param)


def _hide(param: Any, dtype: torch.dtype | None = None) -> None:
    param.data = _stand_in(param, dtype or param.dtype).as_subclass(Tensor)
    param.ds_status = ZeroParamStatus.NOT_AVAILABLE
    param.__class__ = HeldParameter


class Init:
    """`with deepspeed.zero.Init(...):` shards the parameters of each module as soon as it is complete.

    module            an existing module to shard
    data_parallel_group, mpu   the ranks to shard over; all by default
    dtype             the default dtype inside the context. The config sets the engine's precision
    enabled           False makes the context a no-op

    Buffers are not sharded. The other arguments have no effect: ranges stay in host memory until `initialize` places them as its
    config says. Collective: all ranks build the same model, and rank 0's values are used.
    """

    _open: Init | None = None
    _paused: Init | None = None  # by shutdown_init_context

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Any = None,
    ) -> None:
        self.enabled, self.dtype = enabled, dtype
        self.group = mpu.get_data_parallel_group() if mpu is not None else data_parallel_group
        self._fresh: dict[int, tuple[nn.Module, set[str]]] = {}  # parameters built inside the context, not sharded yet
        self._stack = ExitStack()
        if enabled:
            init_distributed()
            launched = os.environ.get("WORLD_SIZE", "")
            if self.group is None and launched.isdecimal() and int(launched) > 1 == _group_rank(None)[1]:
                raise RuntimeError(
                    f"zero.Init: the launcher started {launched} ranks (WORLD_SIZE), but the process group has 1, so each rank "
                    "would hold the whole model; call deepspeed.init_distributed() first, or pass data_parallel_group="
                )
            for param in module.parameters() if module is not None else ():
                if not is_held(param):
                    _hold(param, self.group)

    @classmethod
    def is_open(cls) -> bool:
        return cls._open is not None

    def __enter__(self) -> Init:
        if self.enabled and not Init.is_open():  # nested contexts: the outer one shards
            Init._open = self
            stack = self._stack
            stack.callback(self._close)
            stack.callback(register_module_module_registration_hook(self._take_child).remove)
            stack.callback(register_module_parameter_registration_hook(self._take_param).remove)
            if self.dtype is not None:
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(self.dtype)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if Init._open is self and kind is None:
            self._hold_fresh([module for module, _ in self._fresh.values()])
        self._stack.close()

    def _close(self) -> None:
        Init._open = Init._paused = None
        self._fresh.clear()

    def _take_param(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if Init._open is self:
            self._fresh.setdefault(id(module), (module, set()))[1].add(name)

    def _take_child(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is not None:
            self._hold_fresh(list(child.modules()))

    def _hold_fresh(self, modules: Iterable[nn.Module]) -> None:
        """Shard by name: `to_empty` replaces the parameters of a module that was built on meta (torch's `skip_init`)."""
        for module in modules:
            _, names = self._fresh.pop(id(module), (module, set()))
            params = [param for name, param in module._parameters.items() if name in names and param is not None]
            if any(param.is_meta for param in params):
                self._fresh[id(module)] = module, names
            for param in params:
                if not is_zero_param(param):
                    _hold(param, self.group)


def shutdown_init_context() -> None:
    """Let what is built from here on have ordinary parameters, until `restore_init_context`. No-op outside `Init`."""
    if Init._open is not None:
        Init._open, Init._paused = None, Init._open


def restore_init_context() -> None:
    if Init._paused is not None:
        Init._open, Init._paused = Init._paused, None


MiCS_Init = Init  # mics_shard_size in the config sets the number of ranks per shard group, at initialize


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
        for param in self.held_params:
            values = _all_gather(param)
            param.__class__ = nn.Parameter
            param.data = values
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
                param.ds_tensor = _deal(param, param.data, group, first)
            _hide(param)
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
        if self.unit is None:
            rank, size = _group_rank(self.param.ds_process_group)
            start = min(rank * _chunk(self.param, size), self.param.ds_numel)
            stored = self.param.ds_tensor[: self.param.ds_numel - start]
        else:
            inside, of_param = self.unit.layout.slots[self.i].common(self.unit.span)
            start = of_param.start
            stored = self.unit.weights.get(inside.start, inside.stop) if inside.start < inside.stop else None
        if stored is None or not stored.numel():
            return False
        return _differ(stored, self.param.data.reshape(-1)[start : start + stored.numel()])


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
        elif dist.is_initialized():
            group = group_read[0].param.ds_process_group
            least = torch.tensor([first], device="cuda" if dist.get_backend(group) == "nccl" else "cpu")
            dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
            first = float(least)
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


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """A no-op: a forward gathers every parameter that it reads, even outside the parameter's module."""


unregister_external_parameter = register_external_parameter


def zero_wrapper_for_fp_tensor_constructor(fn: Any, *args: Any, **kwargs: Any) -> Any:
    """Return `fn`: Slipstream does not wrap torch's constructors. transformers patches this function to exempt `arange`."""
    return fn


# -- from held parameters to an engine --


class _HeldReader:
    """A Reader (zero/materialize.py) of held parameters. It gathers one block at a time and frees the block's ranges afterwards, so
    that no rank stores the model's shards twice."""

    def __init__(self, named: Mapping[str, Any], model: nn.Module) -> None:
        self.named, self.model = named, model
        self._values: dict[str, Tensor] = {}
        self.freed: set[int] = set()  # ids of parameters whose ranges are freed

    def __contains__(self, name: str) -> bool:
        return name in self.named

    @cached_property
    def _forms(self) -> dict[str, RowForm]:
        """The row forms of weights that the config quantizes; held weights are floats."""
        held = {name for name, param in self.named.items() if param.is_floating_point()}
        return {name: form for name, form in row_forms(self.model).items() if name in held}

    def dtype(self, name: str) -> torch.dtype:
        return torch.uint8 if name in self._forms else self.named[name].dtype

    def reads_part(self, name: str, numel: int) -> bool:
        return self._values[name].numel() == numel  # a layer of slices, such as Megatron's, built inside Init

    def fetch(self, names: Sequence[str]) -> None:
        self._values = {name: self._value(name).reshape(-1) for name in names}

    def _value(self, name: str) -> Tensor:
        values, form = _all_gather(self.named[name]), self._forms.get(name)
        return values if form is None else quantize_rows(values, form)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return self._values[name][start:stop]

    def close(self) -> None:
        for name in self._values:
            self.named[name].ds_tensor = None
            self.freed.add(id(self.named[name]))
        self._values = {}


@contextmanager
def held_values(model: nn.Module | None) -> Iterator[None]:
    """A context in which `slipstream.initialize` can read held parameters. If it fails, they are held again."""
    named: dict[str, Any] = {}
    if model is not None:
        named = {name: param for name, param in model.named_parameters(remove_duplicate=False) if is_held(param)}
    if model is None or not named:
        yield
        return
    reader = _HeldReader(named, model)
    if asked(model) is None:
        supply(model, reader)
    for param in named.values():
        param.__class__ = nn.Parameter
    try:
        yield
    except BaseException as error:
        forget(model)
        for param in named.values():
            if id(param) not in reader.freed:
                param.__class__ = HeldParameter
        if reader.freed:
            error.add_note(f"{len(reader.freed)} parameters of the model were already moved to the engine: build the model again")
        raise
    remove_attributes(named.values())


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
            _hold(packed, group)
    return model


def materialize(model: nn.Module) -> None:
    """Turn the model's held parameters into ordinary ones with all values. Collective."""
    for param in [param for param in model.parameters() if is_held(param)]:
        values = _all_gather(param)
        param.__class__ = nn.Parameter
        param.data = values
        remove_attributes([param])


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
    if engine.optimizer is None:  # the model keeps it: whether `take_over` finds it must not depend on a rank's garbage collector
        vars(engine.states.hooks)["engine"] = engine
    sharded = parameters_of(engine) if engine.plan.zero.stage == 3 else []
    remove_attributes(before, sharded)
    for param in sharded:
        marked: Any = param
        if not hasattr(marked, "ds_id"):
            marked.ds_id, marked.ds_status, marked.ds_active_sub_modules = next(_ids), ZeroParamStatus.NOT_AVAILABLE, set()
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
    yield from ((model, "save_pretrained", _save_pretrained), (model, "cpu", _to_cpu))
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


def remove_attributes(params: Iterable[nn.Parameter], keep: Iterable[nn.Parameter] = ()) -> None:
    """Remove the `ds_` attributes of `params`, except of those in `keep`."""
    excluded = set(map(id, keep))
    for param in params:
        for name in _MARKS if id(param) not in excluded else ():
            vars(param).pop(name, None)


def _to_cpu(cpu: Any) -> nn.Module:
    """`module.cpu()`, which Lightning calls after training: an engine's parameters are not moved."""
    module: nn.Module = cpu.__self__
    return module if any(map(is_zero_param, module.parameters())) else cpu()


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
    None with `is_main_process=False`. There it would read sharded parameters and write nothing."""
    if kwargs.get("is_main_process", True) or kwargs.get("state_dict") is not None:
        return save(*args, **kwargs)
    return None


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
    """Destroy the engines without optimizer that have a model's parameters: DeepSpeed lets a second engine have them, and TRL
    trains the model with which it has computed a reference. From then on, calling such an engine calls the model. Collective."""
    units = access.units_of(model.parameters()) if isinstance(model, nn.Module) else {}
    if any(isinstance(unit.weights, DiskStore) for unit in units):
        return  # destroy would lose them, so initialize refuses the model
    for engine in [each for each in _engines if each.optimizer is None and not units.keys().isdisjoint(each.units)]:
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

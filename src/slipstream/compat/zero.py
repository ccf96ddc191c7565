"""`deepspeed.zero`: models built in shards before there is an engine, and parameters shown whole.

A parameter that `Init` has built is *held*: each rank keeps one range of it (`param.ds_tensor`), and what the parameter shows is
its shape, dtype and device over a single NaN. `GatheredParameters` shows it whole; `initialize` takes the ranges, block by block.

[Note: Held, not on meta] DeepSpeed's clients ask a parameter for its device, put new modules beside it and write values before
there is an engine (`from_pretrained`, PEFT's adapters, resized embeddings). On meta such values would be lost; here they stay.
"""

from __future__ import annotations

import enum
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.nn.modules.module import register_module_module_registration_hook, register_module_parameter_registration_hook
from torch.utils._pytree import tree_map

from slipstream.compat.utils import z3_leaf_module
from slipstream.distributed import init_distributed
from slipstream.train.engine import Engine
from slipstream.zero import access
from slipstream.zero.comm import Comm
from slipstream.zero.hooks import Phase
from slipstream.zero.init import asked, forget, supply
from slipstream.zero.layout import overlap
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
_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
_DATA: Any = torch.Tensor.data  # the slot of param.data
_MARKS = ("tensor", "persist", "process_group", "id", "shape", "numel", "status", "active_sub_modules", "z3_leaf_module")
_CONVERSIONS = frozenset({"to", "cpu", "cuda", "float", "double", "half", "bfloat16"})
_NO_WRITES = frozenset({"requires_grad_", "detach_", "retain_grad", "share_memory_", "rename_", "__get__"})
_TRANSPOSED = tuple(vars(torch._C.TensorBase)[name].__get__ for name in ("T", "mT", "H", "mH"))  # attributes that are views
_FACTS = frozenset(  # what is asked of a parameter that needs none of its values; `__get__` and `__set__` are of attributes
    """__get__ __set__ __hash__ __len__ __reduce_ex__ __repr__ dim element_size get_device is_complex is_contiguous
    is_floating_point ndimension nelement numel register_hook register_post_accumulate_grad_hook requires_grad_ size stride
    type""".split()  # noqa: SIM905
)


# -- ranges of a parameter over the ranks of a group --


def _group_rank(group: Any) -> tuple[int, int]:
    return (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)


def _wire(tensor: Tensor, group: Any) -> Tensor:
    """The tensor's bytes where the group's backend can send them from."""
    on_cuda = dist.get_backend(group) == "nccl"
    return (tensor.cuda() if on_cuda else tensor).contiguous().view(torch.uint8)


def _chunk(param: nn.Parameter, size: int) -> int:
    return -(-param.numel() // size)


def _deal(param: nn.Parameter, values: Tensor | None, group: Any, source: int) -> Tensor:
    """This rank's range of the values that rank `source` of the group has, padded to the same length on all. Collective."""
    rank, size = _group_rank(group)
    mine = torch.zeros(_chunk(param, size), dtype=param.dtype)
    if size == 1:
        assert values is not None
        return mine.copy_(values.detach().reshape(-1))
    pieces: list[Tensor] | None = None
    if rank == source:
        assert values is not None
        padded = torch.zeros(size * len(mine), dtype=param.dtype)
        padded[: param.numel()].copy_(values.detach().reshape(-1))
        pieces = [_wire(piece, group) for piece in padded.chunk(size)]
    received = _wire(mine, group)
    dist.scatter(received, pieces, group=group, group_src=source)
    return received.cpu().view(param.dtype)


def _whole(param: Any) -> Tensor:
    """All values of a held parameter, in its shape, memory of this rank's own. Collective."""
    group = param.ds_process_group
    _, size = _group_rank(group)
    if size == 1:
        return param.ds_tensor.clone().view(param.ds_shape)
    mine = _wire(param.ds_tensor, group)
    everything = torch.empty(size * mine.numel(), dtype=torch.uint8, device=mine.device)
    dist.all_gather(list(everything.chunk(size)), mine, group=group)
    return everything.cpu().view(param.dtype)[: param.ds_numel].view(param.ds_shape)


class HeldParameter(nn.Parameter):
    """A parameter of which this rank keeps a range. Writes inside `Init` go to all ranges; anywhere else they are refused."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        # torch.nn.init passes its tensor by keyword
        target, name = (args[0] if args else (kwargs or {}).get("tensor")), getattr(func, "__name__", "")
        if isinstance(target, HeldParameter):
            if func == _DATA.__get__ and Init.is_open():
                return target  # so that param.data.normal_() in a constructor writes
            if name in _CONVERSIONS:
                with torch._C.DisableTorchFunctionSubclass():
                    dtype = func(torch.empty((), dtype=target.dtype), *args[1:], **(kwargs or {})).dtype
                return _stand_in(target, dtype)
            if func == _DATA.__set__ and isinstance(args[1], _StandIn):
                return _convert(target, args[1].dtype)
            if _is_write(func, name):
                return _write(target, func, args, kwargs or {})
        if Init.is_open() and (name not in _FACTS or func in _TRANSPOSED):
            return _compute(func, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """An ordinary parameter with all values; where copies of layers are made, `initialize` shards them."""
        copy = nn.Parameter(_whole(self), requires_grad=self.requires_grad)
        memo[id(self)] = copy
        return copy


class _HeldView(Tensor):
    """A view of a held parameter's whole values, inside `Init`: what is written to it goes to all ranges."""

    held: tuple[HeldParameter, Tensor]  # and its whole values, that this views

    @classmethod
    def __torch_function__(cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        result = _compute(func, args, kwargs or {})
        target, name = (args[0] if args else (kwargs or {}).get("tensor")), getattr(func, "__name__", "")
        if isinstance(target, _HeldView) and _is_write(func, name):
            param: Any = target.held[0]
            param.ds_tensor = _deal(param, target.held[1], param.ds_process_group, 0)
        return result


def _compute(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """A function of held parameters inside `Init`, from their whole values. Collective: all ranks run the same constructor."""
    held: dict[int, tuple[HeldParameter, Tensor]] = {}

    def whole(value: Any) -> Any:
        if isinstance(value, HeldParameter):
            return held.setdefault(id(value), (value, _whole(value)))[1]
        if isinstance(value, _HeldView):
            held[id(value.held[0])] = value.held
        return value

    def mark(value: Any) -> Any:
        if isinstance(value, Tensor) and value.device.type != "meta":
            for param, values in held.values():
                if value.untyped_storage().data_ptr() == values.untyped_storage().data_ptr():
                    view = value.as_subclass(_HeldView)
                    view.held = (param, values)
                    return view
        return value

    with torch._C.DisableTorchFunctionSubclass():
        return tree_map(mark, func(*tree_map(whole, args), **tree_map(whole, kwargs)))


def _is_write(func: Any, name: str) -> bool:
    in_place = name.endswith("_") and not name.startswith("__") and name not in _NO_WRITES
    return in_place or name == "__setitem__" or func == _DATA.__set__


class _StandIn(Tensor):
    """What converting a held parameter gives: `module.to(device)` and `module.bfloat16()` set it as the parameter's data."""


def _stand_in(param: Any, dtype: torch.dtype) -> Tensor:
    fill = float("nan") if dtype.is_floating_point else 0
    return torch.full((), fill, dtype=dtype).expand(param.ds_shape).as_subclass(_StandIn)


def _convert(param: Any, dtype: torch.dtype) -> None:
    """The ranges in another dtype. They stay where they are: on which device the engine has them is the config's to say."""
    if dtype is not param.dtype:
        param.ds_tensor = param.ds_tensor.to(dtype)
        param.__class__ = nn.Parameter
        _hide(param, dtype)


def _write(param: HeldParameter, func: Any, args: Any, kwargs: Mapping[str, Any]) -> HeldParameter:
    if not Init.is_open():
        raise RuntimeError(
            f"a parameter of shape {tuple(param.shape)} is in ranges over the ranks since zero.Init; write it inside "
            f"`with deepspeed.zero.GatheredParameters(param, modifier_rank=0):`"
        )
    whole = {id(each): _whole(each) for each in (*args, *kwargs.values()) if isinstance(each, HeldParameter)}
    with torch._C.DisableTorchFunctionSubclass():
        func(*(whole.get(id(each), each) for each in args), **{key: whole.get(id(each), each) for key, each in kwargs.items()})
    held: Any = param
    held.ds_tensor = _deal(param, whole[id(param)], held.ds_process_group, 0)
    return param


def is_held(param: Any) -> bool:
    return isinstance(param, HeldParameter)


def _hold(param: Any, group: Any, source: int = 0) -> None:
    """Keep this rank's range of what rank `source` has in the parameter. Collective."""
    if param.numel() == 0 or param.is_meta:
        return
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
    """`with deepspeed.zero.Init(...):` parameters built inside are in ranges over the ranks as soon as their module is complete.

    module            one that has been built: the first rank's values are dealt out
    data_parallel_group, mpu   whose ranks share the parameters; all by default
    dtype             the default dtype inside. In which precision the engine computes is the config's to say
    enabled           False does nothing

    Buffers are ordinary ones. The other arguments are accepted and have no effect: ranges are kept in host memory until
    `initialize` puts them where its config says. Collective: all ranks build the same model; the first one's values count.
    """

    _open: Init | None = None

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
        if zero_quantized_weights or zero_quantized_nontrainable_weights:
            raise ValueError("zero.Init(zero_quantized_weights=True): quantized communication (ZeRO++) is not built yet; drop it")
        self.enabled, self.dtype = enabled, dtype
        self.group = mpu.get_data_parallel_group() if mpu is not None else data_parallel_group
        self._fresh: dict[int, nn.Parameter] = {}  # built inside, not held yet
        self._stack = ExitStack()
        if enabled:
            init_distributed()
            for param in module.parameters() if module is not None else ():
                if not is_held(param):
                    _hold(param, self.group)

    @classmethod
    def is_open(cls) -> bool:
        return cls._open is not None

    def __enter__(self) -> Init:
        if self.enabled and not Init.is_open():  # inside another one, that one acts
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
            self._hold_fresh(list(self._fresh.values()))
        self._stack.close()

    def _close(self) -> None:
        Init._open = None
        self._fresh.clear()

    def _take_param(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not is_held(param):
            self._fresh[id(param)] = param

    def _take_child(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is not None:
            self._hold_fresh(list(child.parameters()))

    def _hold_fresh(self, params: Iterable[nn.Parameter]) -> None:
        for param in params:
            if self._fresh.pop(id(param), None) is not None:
                _hold(param, self.group)


MiCS_Init = Init  # over how many ranks a parameter is sharded is the config's mics_shard_size, at initialize


class GatheredParameters:
    """`with deepspeed.zero.GatheredParameters(params, modifier_rank=0):` parameters whole, before and after `initialize`.

    With `modifier_rank` what that rank (of all ranks) writes counts on all. Without it parameters are to be read: the exit raises
    RuntimeError on all ranks where some rank has changed one, and nothing of that is kept. In a constructor inside `Init` what the
    first rank writes counts then, as everywhere in `Init`. Collective. `fwd_module` has no effect: a forward gathers what it reads.
    """

    def __init__(self, params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True) -> None:
        if isinstance(params, nn.Module):
            params = params.parameters()
        elif isinstance(params, Tensor):
            params = [params]
        chosen = {id(param): param for param in params if param is not None} if enabled else {}
        self.held: list[Any] = sorted((param for param in chosen.values() if is_held(param)), key=lambda param: param.ds_id)
        self.ours: list[Any] = [param for param in chosen.values() if isinstance(param, nn.Parameter) and not is_held(param)]
        self.modifier_rank = modifier_rank
        self._read: list[_Read] = []
        self._stack = ExitStack()

    def __enter__(self) -> None:
        for param in self.held:
            values = _whole(param)
            param.__class__ = nn.Parameter
            param.data = values
            param.ds_status = ZeroParamStatus.AVAILABLE
        chosen, shown = access.units_of(self.ours), []
        if chosen:
            rank = self.modifier_rank
            if rank is not None:
                rank = next(iter(chosen)).comms.data.axis.ranks.index(rank)
            self._stack.enter_context(_shown([unit.params[i] for unit, which in chosen.items() for i in which]))
            if rank is None:
                chosen = {unit: which for unit, which in chosen.items() if not _is_computing(unit)}
                shown = [(unit, i) for unit, which in chosen.items() for i in which if i not in unit.lent]
            self._stack.enter_context(access.gathered_units(chosen, rank, write=rank is not None))
        if self.modifier_rank is None:
            self._read = [_Read(param, None, 0) for param in self.held if not Init.is_open()]
            self._read += [_Read(unit.params[i], unit, i) for unit, i in shown]  # not what a context around this one shows

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        changed = _first_changed(self._read) if kind is None else ""
        source = 0 if self.modifier_rank is None and Init.is_open() else self.modifier_rank
        for param in self.held:
            if kind is None and source is not None:
                group = param.ds_process_group
                first = dist.get_group_rank(group, source) if group is not None and self.modifier_rank is not None else source
                param.ds_tensor = _deal(param, param.data, group, first)
            _hide(param)
        self._stack.__exit__(kind, error, traceback)
        if changed:
            raise RuntimeError(
                f"{changed} was changed inside GatheredParameters(modifier_rank=None), so nothing of it was kept: with "
                f"modifier_rank=0, what rank 0 writes is kept on all ranks"
            )


class _Read:
    """A parameter that is shown to be read: as it is when the context begins. unit: None for one that is held."""

    def __init__(self, param: Any, unit: Unit | None, i: int) -> None:
        self.param, self.unit, self.i = param, unit, i
        self.version = param._version

    def __str__(self) -> str:
        return f"a parameter of shape {tuple(self.param.shape)}" if self.unit is None else f"parameter {self.unit.names[self.i]!r}"

    def was_changed(self) -> bool:
        """Written in place, or in this rank's range other than where it rests (a write to `.data` leaves no other trace)."""
        if self.param._version != self.version:
            return True
        if self.unit is None:
            rank, size = _group_rank(self.param.ds_process_group)
            start = min(rank * _chunk(self.param, size), self.param.ds_numel)
            at_rest = self.param.ds_tensor[: self.param.ds_numel - start]
        else:
            slot, base = self.unit.layout.slots[self.i], self.unit.span[0]
            first, last = overlap(slot.span, self.unit.span)
            start, at_rest = first - slot.offset, self.unit.weights.get(first - base, last - base) if last > first else None
        if at_rest is None or not at_rest.numel():
            return False
        return _differ(at_rest, self.param.data.reshape(-1)[start : start + at_rest.numel()])


def _differ(before: Tensor, after: Tensor) -> bool:
    """By more than the rounding of a change that was taken back, such as an adapter that was merged and unmerged."""
    if before.shape != after.shape or before.dtype != after.dtype:
        return True
    if not before.is_floating_point():
        return not torch.equal(before, after.to(before.device))
    wide = torch.promote_types(before.dtype, torch.float32)
    numbers, eps = before.to(wide), torch.finfo(before.dtype).eps
    slack = 4 * eps * float(numbers.abs().max())
    return not bool(torch.isclose(after.to(before.device, wide), numbers, rtol=0, atol=slack, equal_nan=True).all())


def _first_changed(read: Sequence[_Read]) -> str:
    """Which of them some rank has changed, in words; "" for none. Collective."""
    together: dict[Comm | None, list[_Read]] = {}  # by who decides
    for each in read:
        together.setdefault(None if each.unit is None else each.unit.comms.data, []).append(each)
    for data, mine in together.items():
        first = next((float(k) for k, each in enumerate(mine) if each.was_changed()), float("inf"))
        if data is not None:
            first = float(data.exchange(torch.tensor([first], dtype=torch.float64)).min())
        elif dist.is_initialized():
            group = mine[0].param.ds_process_group
            least = torch.tensor([first], device="cuda" if dist.get_backend(group) == "nccl" else "cpu")
            dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
            first = float(least)
        if first < len(mine):
            return str(mine[int(first)])
    return ""


def _is_computing(unit: Unit) -> bool:
    """Whether the unit's parameters are whole for its engine's forward or backward. To read them there needs no copy, and a
    function that saves one has the parameter itself in its backward, marks and all (TRL's losses)."""
    whole = bool(unit.placement.weights) and unit.state is State.GATHERED
    return whole and any(engine.hooks.phase is not Phase.IDLE for engine in _engines if unit in engine.units)


@contextmanager
def _shown(params: Sequence[Any]) -> Iterator[None]:
    marked = [param for param in params if hasattr(param, "ds_status")]
    before = [param.ds_status for param in marked]
    for param in marked:
        param.ds_status = ZeroParamStatus.AVAILABLE
    try:
        yield
    finally:
        for param, status in zip(marked, before, strict=True):
            param.ds_status = status


@contextmanager
def unwrap_model_for_generation(engine: Engine) -> Iterator[nn.Module]:
    """The engine's model with all its parameters whole."""
    with GatheredParameters(engine.module):
        yield engine.module


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """No effect: a parameter that is read in a forward outside its own module is gathered there."""


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """No effect."""


def zero_wrapper_for_fp_tensor_constructor(fn: Any, *args: Any, **kwargs: Any) -> Any:
    """torch's constructors are left alone; transformers exchanges this for the time of an `Init`, to have `arange` left alone."""
    return fn


# -- from held parameters to an engine --


class _Held:
    """A Reader (zero/materialize.py) of held parameters: each block's are gathered before they are read, and their ranges given
    back after that, so that no rank keeps the model's shards twice."""

    def __init__(self, named: Mapping[str, Any]) -> None:
        self.named = named
        self._there: dict[str, Tensor] = {}
        self.spent: set[int] = set()  # parameters whose values are the engine's alone

    def __contains__(self, name: str) -> bool:
        return name in self.named

    def dtype(self, name: str) -> torch.dtype:
        return self.named[name].dtype

    def fetch(self, names: Sequence[str]) -> None:
        self._there = {name: _whole(self.named[name]).reshape(-1) for name in names}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return self._there[name][start:stop]

    def close(self) -> None:
        for name in self._there:
            self.named[name].ds_tensor = None
            self.spent.add(id(self.named[name]))
        self._there = {}


@contextmanager
def held_values(model: nn.Module | None) -> Iterator[None]:
    """Inside, `slipstream.initialize` finds the held parameters' values. Where it fails, they are held again."""
    named: dict[str, Any] = {}
    if model is not None:
        named = {name: param for name, param in model.named_parameters(remove_duplicate=False) if is_held(param)}
    if model is None or not named:
        yield
        return
    reader = _Held(named)
    if asked(model) is None:
        supply(model, reader)
    for param in named.values():
        param.__class__ = nn.Parameter
    try:
        yield
    except BaseException as error:
        forget(model)
        for param in named.values():
            if id(param) not in reader.spent:
                param.__class__ = HeldParameter
        if reader.spent:
            error.add_note(f"{len(reader.spent)} parameters of the model had been given to the engine: build the model again")
        raise
    unmark(named.values())


def make_whole(model: nn.Module) -> None:
    """Parameters that are held, for an engine that is there, are ordinary ones with their values. Collective."""
    for param in [param for param in model.parameters() if is_held(param)]:
        values = _whole(param)
        param.__class__ = nn.Parameter
        param.data = values
        unmark([param])


def adopt(engine: Any) -> None:
    """Know a new engine, and give its parameters their marks."""
    _engines.add(engine)
    if engine.optimizer is not None:  # where OpenRLHF and others look for them
        engine.optimizer.offload_states, engine.optimizer.reload_states = engine.offload_states, engine.reload_states
    mark(engine, [])


def parameters_of(engine: Engine) -> list[nn.Parameter]:
    """As the model has them: a quantized one once, whatever it consists of."""
    return list({id(whole): whole for unit in engine.units for whole in unit.wholes}.values())


def mark(engine: Any, before: Iterable[nn.Parameter]) -> None:
    """Let those of the engine's parameters have the attributes that are in shards; of `before`, which it had, no others."""
    now = parameters_of(engine) if engine.plan.zero.stage == 3 else []
    unmark(before, now)
    for param in now:
        marked: Any = param
        if not hasattr(marked, "ds_id"):
            marked.ds_id, marked.ds_status, marked.ds_active_sub_modules = next(_ids), ZeroParamStatus.NOT_AVAILABLE, set()
        marked.ds_shape, marked.ds_numel, marked.ds_persist = param.shape, param.numel(), False
    if now:
        show_ranges(engine)
        for leaf in filter(z3_leaf_module, engine.module.modules()):
            for held in leaf.parameters():
                vars(held).setdefault("ds_z3_leaf_module", leaf)
        _spare_others(engine.module)
    if now and engine.optimizer is not None:
        engine.optimizer.parameter_offload = ParameterOffload(engine.module)


def show_ranges(engine: Engine) -> None:
    """Let `ds_tensor` be the elements of a parameter that this rank keeps, 1D and in place; empty where they rest on disk.

    A quantized parameter, which is several tensors, has none, nor has one whose weights are away.
    """
    for unit in (unit for unit in engine.units if not unit.asleep):
        for i, (param, slot) in enumerate(zip(unit.params, unit.layout.slots, strict=True)):
            if unit.placement.weights and unit.wholes[i] is param:
                start, stop = overlap(slot.span, unit.span)
                own = unit.weights.view(start - unit.span[0], stop - unit.span[0]) if stop > start else None
                marked: Any = param
                marked.ds_tensor = torch.empty(0, dtype=unit.weights.dtype) if own is None else own.detach()
                marked.ds_tensor.ds_numel = stop - start


def hide_ranges(engine: Engine) -> None:
    """No `ds_tensor` keeps memory that the engine gives back."""
    for unit in engine.units:
        for param in unit.params:
            vars(param).pop("ds_tensor", None)


def unmark(params: Iterable[nn.Parameter], but: Iterable[nn.Parameter] = ()) -> None:
    """They are ordinary ones."""
    kept = set(map(id, but))
    for param in params:
        for name in _MARKS if id(param) not in kept else ():
            vars(param).pop(f"ds_{name}", None)


def _spare_others(module: Any) -> None:
    """accelerate's recipe gives a model's `save_pretrained` the whole state on the first rank, and None with
    `is_main_process=False` on others, which would read parameters that are in shards, and write nothing."""
    save: Any = getattr(module, "save_pretrained", None)
    if save is not None and getattr(save, "func", None) is not _save_some:
        module.save_pretrained = partial(_save_some, save)  # a partial, unlike a closure, is bound to the copy in a copied model


def _save_some(save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("is_main_process", True) or kwargs.get("state_dict") is not None:
        return save(*args, **kwargs)
    return None


def engine_of(param: nn.Parameter) -> tuple[Any, str]:
    """The DeepSpeedEngine that a parameter belongs to, and its name there. Raises ValueError where there is none."""
    for unit, indices in access.units_of([param]).items():
        for engine in _engines:
            if unit in engine.units:
                return engine, unit.names[indices[0]]
    raise ValueError(
        f"a parameter of shape {tuple(param.shape)} belongs to no engine of deepspeed.initialize(); pass one of engine.parameters()"
    )


class ParameterOffload:
    """What clients that take DeepSpeed's hooks off an engine before they generate, and put them on again, hold on to.

    There is nothing to take off: inside `GatheredParameters` the engine's hooks see the whole parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        self.module = _Parameters(model)
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: Any) -> None:
        """Nothing to put on."""

    _register_hooks_recursively = _register_deepspeed_module


class _Parameters:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def named_parameters(self, recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        return self.model.named_parameters(recurse=recurse)

    def ds_external_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(())

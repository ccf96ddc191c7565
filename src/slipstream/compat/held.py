"""`deepspeed.zero.Init`: sharded construction of models.

A parameter built inside `Init` is *held*: each rank stores one flat range of it (`param.ds_tensor`), and the parameter itself has
its shape, dtype and device over a single NaN. `initialize` moves the ranges into the engine block by block.

[Note: Held, not on meta] Clients of DeepSpeed read a parameter's device, add modules next to it and write values before the engine
exists (`from_pretrained`, PEFT's adapters, resized embeddings). On the meta device these values would be lost.
"""

from __future__ import annotations

import enum
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils._pytree import tree_map

from slipstream.ops.rows import RowForm, quantize_rows
from slipstream.quantized import row_forms
from slipstream.world.join import init_distributed
from slipstream.zero.init import sources


class ZeroParamType(enum.Enum):
    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(enum.Enum):
    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


parameter_ids = itertools.count()
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
_OF_LAYERS = frozenset(  # what computes with a layer's weights; NaN would come of it
    """addmm batch_norm bilinear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d embedding embedding_bag
    group_norm instance_norm layer_norm linear matmul __matmul__ mm multi_head_attention_forward rms_norm""".split()  # noqa: SIM905
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


def deal(param: nn.Parameter, values: Tensor, group: Any, source: int) -> Tensor:
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


def reveal(params: Sequence[Any]) -> None:
    """Turn held parameters into ordinary ones with all values, in host memory. Collective. Raises as `refuse_written`."""
    refuse_written(params)
    for param in params:
        values = _joined(param)
        param.__class__, param.data = nn.Parameter, values


def gather(param: Any) -> Tensor:
    """The values of a held parameter in a new CPU tensor of its shape. Collective. Raises as `refuse_written`."""
    refuse_written([param])
    return _joined(param)


def _joined(param: Any) -> Tensor:
    group = param.ds_process_group
    _, size = _group_rank(group)
    if size == 1:
        return param.ds_tensor.clone().view(param.ds_shape)
    piece = _wire(param.ds_tensor, group)
    whole = torch.empty(size * piece.numel(), dtype=torch.uint8, device=piece.device)
    dist.all_gather(list(whole.chunk(size)), piece, group=group)
    return whole.cpu().view(param.dtype)[: param.ds_numel].view(param.ds_shape)


def stored(param: Any) -> tuple[int, Tensor]:
    """The first element of a held parameter that this rank stores, and the values from there on, 1D."""
    rank, size = _group_rank(param.ds_process_group)
    start = min(rank * _chunk(param, size), param.ds_numel)
    return start, param.ds_tensor[: param.ds_numel - start]


def refuse_written(params: Iterable[Any]) -> None:
    """Raise RuntimeError on all ranks if a rank has written a view of a held parameter. Collective over their groups."""
    by_group: dict[Any, list[Any]] = {}
    for param in params:
        by_group.setdefault(param.ds_process_group, []).append(param)
    for group, members in by_group.items():
        first = least_over(next((float(i) for i, param in enumerate(members) if _is_written(param)), math.inf), group)
        if first < len(members):
            shape = tuple(members[int(first)].ds_shape)
            raise RuntimeError(
                f"a parameter of shape {shape} was sharded by zero.Init, and a view of it was written on a rank, which changed "
                "nothing; write it inside `with deepspeed.zero.GatheredParameters(param, modifier_rank=0):`"
            )


def _is_written(param: Any) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        shown = param.detach()[(0,) * param.dim()]
    return shown.is_floating_point() and not math.isnan(shown)  # the one element over which it is expanded


def least_over(value: float, group: Any) -> float:
    """The least value of a process group's ranks. Collective."""
    if _group_rank(group)[1] == 1:
        return value
    least = torch.tensor([value], device="cuda" if dist.get_backend(group) == "nccl" else "cpu")
    dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    return float(least)


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
        _refuse_layers(name, (*args, *kwargs.values()))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return an ordinary parameter with all values; `initialize` shards copies of layers."""
        copy = nn.Parameter(gather(self), requires_grad=self.requires_grad)
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
                gathered[id(value)] = value, gather(value)
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
        param.ds_tensor = deal(param, values, param.ds_process_group, 0)
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


def _own_values(module: nn.Module, name: str, buffer: Tensor | None) -> Any:
    """A buffer that a constructor makes of a held parameter, with values of its own."""
    if isinstance(buffer, _StandIn):
        return gather(buffer.source).to(buffer.dtype)
    return buffer.as_subclass(Tensor) if isinstance(buffer, _HeldView) else buffer


def _no_write(target: Tensor) -> RuntimeError:
    return RuntimeError(
        f"a parameter of shape {tuple(target.shape)} was sharded by zero.Init and cannot be written here; write it "
        f"inside `with deepspeed.zero.GatheredParameters(param, modifier_rank=0):`"
    )


def _refuse_layers(name: str, given: Iterable[Any]) -> None:
    """Raise RuntimeError if a layer's function is called with a held parameter."""
    for param in given if name in _OF_LAYERS else ():
        if isinstance(param, HeldParameter):
            raise RuntimeError(
                f"a layer uses a parameter of shape {tuple(param.shape)} that zero.Init sharded, and no engine gathers it: pass "
                "the model to deepspeed.initialize(), call it within `deepspeed.zero.GatheredParameters(model.parameters())`, or "
                "build it outside of zero.Init"
            )


def _convert(param: Any, dtype: torch.dtype) -> None:
    """Convert this rank's range to `dtype`. It stays in host memory: the config chooses the engine's device."""
    if dtype is not param.dtype:
        param.ds_tensor = param.ds_tensor.to(dtype)
        param.__class__ = nn.Parameter
        hide(param, dtype)


def is_held(param: Any) -> bool:
    return isinstance(param, HeldParameter)


def is_zero_param(parameter: Any) -> bool:
    """Whether a tensor is a parameter of stage 3, or of `Init`."""
    return torch.is_tensor(parameter) and hasattr(parameter, "ds_id")


def hold(param: Any, group: Any, source: int = 0) -> None:
    """Shard a parameter: store this rank's range of rank `source`'s values. Collective."""
    if param.numel() == 0 or param.is_meta:
        return
    if isinstance(param, _StandIn):  # nn.Parameter(another.float()) inside Init
        param.__class__, param.data = nn.Parameter, gather(param.source).to(param.dtype)  # type: ignore[assignment]
    param.ds_tensor = deal(param, param.data, group, source)
    param.ds_process_group, param.ds_id = group, next(parameter_ids)
    param.ds_shape, param.ds_numel = param.shape, param.numel()
    param.ds_active_sub_modules, param.ds_persist = set(), False
    hide(param)


def hide(param: Any, dtype: torch.dtype | None = None) -> None:
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
                    hold(param, self.group)

    @classmethod
    def is_open(cls) -> bool:
        return cls._open is not None

    def __enter__(self) -> Init:
        if self.enabled:
            stack = self._stack
            stack.callback(self._close, Init._open, Init._paused)
            Init._open, Init._paused = self, None
            stack.callback(register_module_module_registration_hook(self._take_child).remove)
            stack.callback(register_module_parameter_registration_hook(self._take_param).remove)
            stack.callback(register_module_buffer_registration_hook(_own_values).remove)
            if self.dtype is not None:
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(self.dtype)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if Init._open is self and kind is None:
            self._hold_all()
        self._stack.close()

    def _close(self, outer: Init | None, paused: Init | None) -> None:
        Init._open, Init._paused = outer, paused
        self._fresh.clear()

    def _take_param(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if Init._open is self:
            self._fresh.setdefault(id(module), (module, set()))[1].add(name)

    def _take_child(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is not None:
            self._hold_fresh(list(child.modules()))

    def _hold_all(self) -> None:
        self._hold_fresh([module for module, _ in self._fresh.values()])

    def _hold_fresh(self, modules: Iterable[nn.Module]) -> None:
        """Shard by name: `to_empty` replaces the parameters of a module that was built on meta (torch's `skip_init`)."""
        for module in modules:
            _, names = self._fresh.pop(id(module), (module, set()))
            params = [param for name, param in module._parameters.items() if name in names and param is not None]
            if any(param.is_meta for param in params):
                self._fresh[id(module)] = module, names
            for param in params:
                if not is_zero_param(param):
                    hold(param, self.group)


def shutdown_init_context() -> None:
    """Shard what `Init` has built, and let what is built from here on have ordinary parameters, until `restore_init_context`. No-op
    outside `Init`."""
    if Init._open is not None:
        Init._open._hold_all()
        Init._open, Init._paused = None, Init._open


def restore_init_context() -> None:
    if Init._paused is not None:
        Init._open, Init._paused = Init._paused, None


MiCS_Init = Init  # mics_shard_size in the config sets the number of ranks per shard group, at initialize


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
        values, form = _joined(self.named[name]), self._forms.get(name)
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
    """A context in which `slipstream.initialize` can read held parameters, also inside `Init`. If it fails, they are held again."""
    is_open = Init.is_open()
    shutdown_init_context()
    try:
        with _readable(model):
            yield
    finally:
        if is_open:
            restore_init_context()


@contextmanager
def _readable(model: nn.Module | None) -> Iterator[None]:
    named: dict[str, Any] = {}
    if model is not None:
        named = {name: param for name, param in model.named_parameters(remove_duplicate=False) if is_held(param)}
    if model is None or not named:
        yield
        return
    refuse_written(named.values())
    reader = _HeldReader(named, model)
    sources.setdefault(model, reader)
    for param in named.values():
        param.__class__ = nn.Parameter
    try:
        yield
    except BaseException as error:
        sources.pop(model, None)
        for param in named.values():
            if id(param) not in reader.freed:
                param.__class__ = HeldParameter
        if reader.freed:
            error.add_note(f"{len(reader.freed)} parameters of the model were already moved to the engine: build the model again")
        raise
    remove_attributes(named.values())


def materialize(model: nn.Module) -> None:
    """Turn the model's held parameters into ordinary ones with all values. Collective."""
    params = [param for param in model.parameters() if is_held(param)]
    reveal(params)
    remove_attributes(params)


def remove_attributes(params: Iterable[nn.Parameter], keep: Iterable[nn.Parameter] = ()) -> None:
    """Remove the `ds_` attributes of `params`, except of those in `keep`."""
    excluded = set(map(id, keep))
    for param in params:
        for name in _MARKS if id(param) not in excluded else ():
            vars(param).pop(name, None)

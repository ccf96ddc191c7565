"""Record the constructors' operations on meta tensors inside `zero.Init`, and replay them when the tensors get memory.

tape      the operations in program order, over views of storages; views store their geometry, so view operations are not recorded
slice     the operations that a storage's values depend on, searched backwards until one overwrites the whole storage
states    the random generator's states before each random operation

[Note: The same numbers] A random operation on meta draws nothing. `Tape.values` draws the numbers that the constructor would have
drawn in memory under the same seed: each random operation of the tape runs once in order on scratch memory, to find the states, and
the operations of a slice run again. The CPU draws, whatever the engine's device. If a reseed or a real draw between two operations
has changed the generator's state, the replay continues from that state.

The tape keeps each storage alive (on meta it has no memory), so that no other storage gets its key.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_buffer_registration_hook, register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

_MARK = "_slipstream_tape"  # attribute of a tensor registered inside `Init`: (its tape, its version when `Init` closed)
_SOURCE = "_slipstream_source"  # attribute of a part of a tensor on meta: the whole tensor
_OVERWRITES = "fill zero copy normal uniform exponential cauchy log_normal geometric bernoulli random"
_OVERWRITING = frozenset(f"aten::{name}_" for name in _OVERWRITES.split())
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_QUESTIONS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)  # their results are not tensors
_FROM_VALUES = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor})


class View(NamedTuple):
    """A tensor on meta, as a view of its storage."""

    key: int  # of the storage
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass(slots=True, kw_only=True)
class Step:
    """One operation. Meta tensors are stored as views, real tensors among the arguments as copies."""

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: Sequence[View]  # results with new storages
    reads: frozenset[int]
    writes: frozenset[int]
    overwrites: frozenset[int]  # storages whose old content is gone
    is_random: bool
    generator: torch.Generator | None = None  # of a random step
    reseeded: Tensor | None = None  # the generator's state, if an operation outside the tape changed it
    state: Tensor | None = None  # the generator's state at replay


@dataclass(slots=True, weakref_slot=True)
class Tape:
    steps: list[Step] = field(default_factory=list)
    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    empty: set[int] = field(default_factory=set)  # storages that were allocated without values
    _writers: dict[int, list[int]] = field(default_factory=dict)  # storage -> the steps that write to it
    _seen: dict[torch.Generator, Tensor] = field(default_factory=dict)  # each generator's state at its last random step
    _has_states: bool = False

    def record(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        inputs, outputs = ([x for x in tree_flatten(y)[0] if isinstance(x, Tensor) and x.is_meta] for y in ((args, kwargs), result))
        for tensor in (*inputs, *outputs):
            self.storages.setdefault(_key(tensor), tensor.untyped_storage())
        of_inputs = {_key(tensor) for tensor in inputs}
        created = [self._view(tensor) for tensor in outputs if _key(tensor) not in of_inputs]
        schema = function._schema
        if "empty" in schema.name:
            self.empty.update(view.key for view in created)
            return
        values = (*args, *(kwargs.get(argument.name) for argument in schema.arguments[len(args) :]))
        targets = [
            self._view(value)
            for argument, value in zip(schema.arguments, values, strict=True)
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor) and value.is_meta
        ]
        if not created and not targets:
            return  # a view, or a query
        overwritten = {view.key for view in targets if schema.name in _OVERWRITING and self._is_whole(view)}
        step = Step(
            function=function,
            args=tree_map_only(Tensor, self._kept, args),
            kwargs=tree_map_only(Tensor, self._kept, dict(kwargs)),
            outputs=created,
            reads=frozenset(of_inputs - overwritten),
            writes=frozenset(view.key for view in (*created, *targets)),
            overwrites=frozenset(overwritten | {view.key for view in created}),
            is_random=torch.Tag.nondeterministic_seeded in function.tags,
        )
        self._add(step, kwargs.get("generator"))

    def record_call(self, function: Any, arguments: Mapping[str, Any], target: Tensor) -> None:
        """Record a call of a function that initializes `target`, one of its arguments, and may draw."""
        self.storages.setdefault(_key(target), target.untyped_storage())
        key = frozenset({_key(target)})
        is_whole = self._is_whole(self._view(target))
        step = Step(
            function=function,
            args=(),
            kwargs=tree_map_only(Tensor, self._kept, dict(arguments)),
            outputs=(),
            reads=frozenset() if is_whole else key,
            writes=key,
            overwrites=key if is_whole else frozenset(),
            is_random=True,
        )
        self._add(step, arguments.get("generator"))

    def _add(self, step: Step, generator: torch.Generator | None) -> None:
        if step.is_random:
            self._has_states = False
            step.generator = generator or torch.default_generator
            now, seen = step.generator.get_state(), self._seen.get(step.generator)
            if seen is None or not now.equal(seen):
                step.reseeded = self._seen[step.generator] = now
        for key in step.writes:
            self._writers.setdefault(key, []).append(len(self.steps))
        self.steps.append(step)

    def writes(self, tensor: Tensor) -> bool:
        return _key(tensor) in self._writers

    def values(self, tensor: Tensor) -> Tensor:
        """Return the values of a tensor on meta, on the CPU. Raises ValueError if they depend on values that are not recorded."""
        if not self._has_states:
            self._find_states()
        return self._view(tensor).of(self._replay({_key(tensor)})[_key(tensor)])

    def _find_states(self) -> None:
        states: dict[torch.Generator, Tensor] = {}
        with torch.random.fork_rng(devices=[]):
            for step in self.steps:
                if step.generator is not None:
                    step.state = step.reseeded if step.reseeded is not None else states[step.generator]
                    storages = self._replay(step.reads)
                    self._run(step, storages)
                    states[step.generator] = torch.get_rng_state()
        self._has_states = True

    def _replay(self, keys: Collection[int]) -> dict[int, torch.UntypedStorage]:
        storages: dict[int, torch.UntypedStorage] = {}
        with torch.random.fork_rng(devices=[]):
            for step in self._slice(keys):
                self._run(step, storages)
        for key in keys:
            if key not in storages and key not in self.empty:
                raise ValueError("depends on a tensor whose values were not recorded")
            storages.setdefault(key, torch.UntypedStorage(self.storages[key].nbytes()))
        return storages

    def _slice(self, keys: Collection[int]) -> list[Step]:
        """The steps, in order, that the values of `keys` depend on. The heap holds the steps to visit, latest first."""
        needed, steps = set(keys), []
        heap = [-i for key in needed for i in self._writers.get(key, ())]
        heapq.heapify(heap)
        last = 1
        while heap:
            if (minus := heapq.heappop(heap)) == last:
                continue
            last, step = minus, self.steps[-minus]
            if needed & step.writes:
                steps.append(step)
                needed -= step.overwrites
                for key in step.reads - needed:
                    for i in self._writers.get(key, ()):
                        if i < -minus:
                            heapq.heappush(heap, -i)
                needed |= step.reads
        return steps[::-1]

    def _run(self, step: Step, storages: dict[int, torch.UntypedStorage]) -> None:
        def real(value: Any) -> Any:
            if isinstance(value, View):
                if value.key not in storages:
                    storages[value.key] = torch.UntypedStorage(self.storages[value.key].nbytes())
                return value.of(storages[value.key])
            if isinstance(value, torch.device):
                return torch.device("cpu")
            return None if isinstance(value, torch.Generator) else value

        if step.state is not None:
            torch.set_rng_state(step.state)
        with torch.no_grad():
            args, kwargs = (tree_map(real, x, is_leaf=lambda y: isinstance(y, View)) for x in (step.args, step.kwargs))
            results = [x for x in tree_flatten(step.function(*args, **kwargs))[0] if isinstance(x, Tensor)]
            for view, result in zip(step.outputs, results, strict=False):
                storages[view.key] = torch.UntypedStorage(self.storages[view.key].nbytes())
                view.of(storages[view.key]).copy_(result)

    def _view(self, tensor: Tensor) -> View:
        return View(_key(tensor), tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def _kept(self, tensor: Tensor) -> View | Tensor:
        return self._view(tensor) if tensor.is_meta else tensor.detach().clone()

    def _is_whole(self, view: View) -> bool:
        numel = torch.Size(view.size).numel()
        return numel * view.dtype.itemsize == self.storages[view.key].nbytes() and 0 not in view.stride


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Record(TorchDispatchMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in _QUESTIONS:  # a constructor branches on values: a replay computes them
            args = tree_map_only(Tensor, lambda tensor: self._tape.values(tensor) if tensor.is_meta else tensor, args)
        result = func(*args, **(kwargs or {}))
        self._tape.record(func, args, kwargs or {}, result)
        return result


class _OnMeta(TorchFunctionMode):
    """Creates tensors on meta like `torch.device("meta")`, under which transformers would skip its initializers.

    Initializers of `torch.nn.init` that read their draws (trunc_normal_, orthogonal_) return early on meta: when one reads
    `tensor.is_meta`, its whole call is recorded as one step.
    """

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == _IS_META and (frame := sys._getframe(1)).f_globals.get("__name__") == "torch.nn.init":
            code = frame.f_code
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            self._tape.record_call(frame.f_globals[code.co_name], {name: frame.f_locals[name] for name in names}, args[0])
        if kwargs.get("device") is not None:
            return func(*args, **kwargs)
        if func in _FROM_VALUES and not any(isinstance(value, Tensor) for value in args[:1]):
            values = func(*args, **kwargs)  # created on the CPU and moved, so that the tape records the values
            return values.to("meta") if values.numel() else values  # transformers reads the default device off torch.tensor([])
        return func(*args, **kwargs | {"device": "meta"} if func in _device_constructors() else kwargs)


@contextmanager
def recorded() -> Iterator[None]:
    """Inside, tensors are on meta and a tape records their operations. Registered parameters and buffers refer to the tape."""
    tape, registered = Tape(), []

    def on_register(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        if tensor is not None and tensor.is_meta:
            registered.append(tensor)

    with ExitStack() as stack:
        stack.callback(register_module_parameter_registration_hook(on_register).remove)
        stack.callback(register_module_buffer_registration_hook(on_register).remove)
        stack.enter_context(_OnMeta(tape))
        stack.enter_context(_Record(tape))
        yield
    for tensor in registered:
        setattr(tensor, _MARK, (tape, tensor._version))


def is_recorded(tensor: Tensor) -> bool:
    """Whether the tensor is on meta and a tape has its values."""
    tape, _ = getattr(tensor, _MARK, (None, 0))
    return tape is not None and tensor.is_meta and tape.writes(getattr(tensor, _SOURCE, tensor))


def keep_source(tensor: Tensor) -> None:
    """Remember a tensor on meta whose values may be recorded, before its `data` becomes a part of it."""
    if tensor.is_meta and not hasattr(tensor, _SOURCE):
        setattr(tensor, _SOURCE, tensor.data)


def values_of(name: str, tensor: Tensor) -> Tensor:
    """Return the values that constructors wrote to a recorded tensor, on the CPU; for a part, the whole's values.

    Raises ValueError if they cannot be replayed.
    """
    tape, version = getattr(tensor, _MARK)
    if tensor._version != version:
        raise ValueError(
            f"{name} was written on meta after `with zero.Init()` had closed, so the write is lost; write it inside, or "
            f"after slipstream.initialize() in `with slipstream.zero.gathered({name})`"
        )
    try:
        values: Tensor = tape.values(getattr(tensor, _SOURCE, tensor))
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name} was initialized inside zero.Init by an operation that cannot be replayed ({error}); build the model without "
            f"zero.Init, or load it from files (slipstream.zero.load)"
        ) from error
    return values


def forget(tensor: Tensor) -> None:
    """Drop the tensor's reference to its tape."""
    vars(tensor).pop(_MARK, None)
    vars(tensor).pop(_SOURCE, None)

"""Wrappers around the calls of a module, which leave its parameters' names unchanged.

`wrap` gives a module a class of its own below its class, whose `__call__` runs the wrappers and finally the module. It replaces
`__call__`, not `forward`, so hooks and recompute see what the innermost call sees. Copies and pickles have the module's own class.

`connect_before` and `connect_behind` connect a block to others, outside of all wrappers, because a wrapper may skip the block or
change its output. Without wrappers the connections are hooks, so that all blocks of a model have one class.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

Around = Callable[..., Any]  # called with the module, its call, and the call's arguments; returns the module's output
_WRAPPERS = "_slipstream_around"  # attribute of a wrapped module
_BEFORE, _BEHIND = "_slipstream_before", "_slipstream_behind"  # attributes: the functions that connect a block
_CLASSES: dict[tuple[type, type], type] = {}


class _Wrapped:
    """The part of a wrapped module's class that precedes its own class."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call: Callable[..., Any] = super().__call__  # type: ignore[misc]
        for around in vars(self)[_WRAPPERS]:
            call = partial(around, self, call)
        for change in vars(self).get(_BEFORE, ()):
            args, kwargs = change(self, args, kwargs) or (args, kwargs)
        output = call(*args, **kwargs)
        for change in vars(self).get(_BEHIND, ()):
            new = change(self, args, output)
            output = output if new is None else new
        return output

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {name: value for name, value in vars(self).items() if name != _WRAPPERS}
        return copyreg._reconstructor, (type(self).__mro__[2], object, None), state  # type: ignore[attr-defined]


def class_before(ours: type, own: type, name: str = "", **attributes: Any) -> type:
    """The class with `ours` before a module's own class, by default under the own class's name; the same class for the same pair.

    Its modules are pickled as this pair, unless `ours` defines pickling.
    """
    if (ours, own) not in _CLASSES:
        names = {"__module__": own.__module__, "__qualname__": name or own.__qualname__, "__doc__": own.__doc__} | attributes
        if not any("__reduce_ex__" in vars(each) for each in ours.__mro__[:-1]):
            names["__reduce_ex__"] = lambda module, protocol: (_made, (ours, own, name), vars(module))
        _CLASSES[ours, own] = type(name or own.__name__, (ours, own), names)
    return _CLASSES[ours, own]


def _made(ours: type, own: type, name: str) -> Any:
    made: Any = class_before(ours, own, name)
    return made.__new__(made)


def wrap(module: nn.Module, around: Around) -> None:
    """Run `around` outside of the module's earlier wrappers."""
    if not isinstance(module, _Wrapped):
        vars(module)[_WRAPPERS] = []
        module.__class__ = class_before(_Wrapped, type(module))
    vars(module)[_WRAPPERS].append(around)


def unwrap(module: nn.Module, around: Around) -> None:
    """Undo `wrap`. Without wrappers the module has its own class again."""
    wrappers = vars(module).get(_WRAPPERS, [])
    if around in wrappers:
        wrappers.remove(around)
    if isinstance(module, _Wrapped) and not wrappers:
        del vars(module)[_WRAPPERS]
        module.__class__ = type(module).__mro__[2]


def connect_before(block: nn.Module, change: Callable[..., Any]) -> None:
    """Change a block's arguments, outside of its wrappers: `change(block, args, kwargs)` returns new ones, or None."""
    vars(block).setdefault(_BEFORE, []).append(change)
    block.register_forward_pre_hook(_unless_wrapped(change), with_kwargs=True)


def connect_behind(block: nn.Module, change: Callable[..., Any]) -> None:
    """Change a block's output, outside of its wrappers: `change(block, args, output)` returns a new one, or None."""
    vars(block).setdefault(_BEHIND, []).append(change)
    block.register_forward_hook(_unless_wrapped(change))


def _unless_wrapped(change: Callable[..., Any]) -> Callable[..., Any]:
    """A hook for a block without wrappers; a wrapped block makes the change itself."""
    return lambda block, *values: None if isinstance(block, _Wrapped) else change(block, *values)


def input_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A block's first argument, or the first tensor of the keyword arguments."""
    return args[0] if args else next((value for value in kwargs.values() if isinstance(value, Tensor)), None)


def first_of(output: Any) -> Any:
    """A module's output, or the first of several."""
    return output[0] if isinstance(output, (tuple, list)) else output


def with_first(output: Any, first: Any) -> Any:
    """The output with its first element replaced."""
    if hasattr(output, "_make"):  # a NamedTuple
        return output._make([first, *output[1:]])
    return type(output)([first, *output[1:]]) if isinstance(output, (tuple, list)) else first

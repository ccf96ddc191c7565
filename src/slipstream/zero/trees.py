"""Trees of tensors: what a module is called with, and what it returns."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from torch import Tensor, nn


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor inside tuples, lists, dicts, dataclasses and mappings, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return `value` with `change` applied to every tensor in its tuples, lists, mappings and dataclasses.

    Other objects that a gradient can flow into (a SimpleNamespace, a distribution) are copied, with their attributes changed.
    All others, such as a cache that was filled under `no_grad`, are returned as they are.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, change) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: map_tensors(getattr(value, field.name), change) for field in dataclasses.fields(value) if field.init}
        return dataclasses.replace(value, **fields)
    if isinstance(value, Mapping):
        changed = {key: map_tensors(item, change) for key, item in value.items()}
        if not isinstance(value, dict):
            return type(value)(changed)  # type: ignore[call-arg]
        result = copy.copy(value)  # not every subclass can be called with a dict (defaultdict)
        result.update(changed)
        return result
    if _carries_gradient(value, set()):
        result = copy.copy(value)
        vars(result).update({name: map_tensors(item, change) for name, item in vars(value).items()})
        return result
    return value


def _carries_gradient(value: Any, seen: set[int]) -> bool:
    """Whether `value` holds a computed tensor that requires a gradient. Parameters and modules are no outputs."""
    if isinstance(value, Tensor):
        return value.requires_grad and not isinstance(value, nn.Parameter)
    if id(value) in seen or isinstance(value, (nn.Module, type, ModuleType)):
        return False
    seen.add(id(value))
    items = value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, Mapping) else ()
    return any(_carries_gradient(item, seen) for item in (*items, *getattr(value, "__dict__", {}).values()))

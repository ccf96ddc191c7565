"""Support for torch.func's transforms (grad, vjp, vmap) in hooks and units. Only this file uses functorch's private functions.

level   of a transform: 1 for the outermost. Inside, a tensor is an ordinary tensor in one wrapper per level. A graph belongs to
        one level, and a hook on a wrapper fires only in the backward of its level

A transform forbids in-place writes to tensors that it did not create, such as gathered weights; `outside` allows them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

P = ParamSpec("P")
T = TypeVar("T")

_functorch: Any = torch._C._functorch
_DERIVATIVES = (_functorch.TransformType.Grad, _functorch.TransformType.Jvp)


def is_active() -> bool:
    """Whether a transform runs. Its backward writes no parameter's `.grad`: torch forbids `loss.backward()` inside."""
    return _functorch.peek_interpreter_stack() is not None


def differentiates() -> bool:
    """Whether one of the running transforms computes derivatives; vmap alone does not."""
    return is_active() and any(level.key() in _DERIVATIVES for level in _functorch.get_interpreter_stack())


def outside(method: Callable[P, T]) -> Callable[P, T]:
    """Decorate a method to run outside the active transforms, on ordinary tensors."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not is_active():
            return method(*args, **kwargs)
        with temporarily_clear_interpreter_stack():
            return method(*args, **kwargs)

    return call


def in_graphs(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (level, tensor) for the tensor and those it wraps, if they require gradients; ordinary tensors have level -1."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if tensor.requires_grad:
            yield _functorch.maybe_get_level(tensor), tensor
        tensor = _functorch.get_unwrapped(tensor)
    if tensor.requires_grad:
        yield -1, tensor

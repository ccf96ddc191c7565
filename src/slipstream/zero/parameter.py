"""What a parameter answers while its weights, or its gradient, are not there.

A parameter is always the same Python object; only its class changes, and only between three classes per unit:

nn.Parameter       weights are in place and any gradient is in `.grad`: an ordinary parameter
ReducedParameter   weights are in place; the gradient has been moved into the unit's buffers, so `.grad` raises
ReleasedParameter  the weights' storage is empty, so everything that would read it raises by name, with the remedy;
                   shape, dtype, device, requires_grad, hashing and hooks stay true

[Note: Class swap] A released storage has 0 bytes: most reads of it would crash the process and `torch.save` would
write nothing. Assigning `p.__class__` costs about 70 ns, keeps identity, and leaves a gathered parameter exactly
`nn.Parameter`, so `torch.compile` sees nothing. Each unit makes its own two subclasses, whose `owner` leads back to it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import torch
import torch.nn as nn


class Owner(Protocol):
    """What a parameter class asks of the unit it belongs to."""

    def param_name(self, param: nn.Parameter) -> str: ...

    def view_of(self, param: nn.Parameter) -> torch.Tensor:
        """The parameter's place in the unit's memory, which may be empty now."""

    def gather_on_demand(self) -> bool:
        """Gather now if that is safe here (inside the engine's forward); False when it is not."""

    def lend_on_demand(self) -> bool:
        """Show private copies, which are plain parameters, if that is safe here (inside a surgery); False when it is not."""


def _getter(name: str) -> Callable[..., Any]:
    return getattr(torch.Tensor, name).__get__


# Reads and writes that need no storage. Everything else is refused while released.
_PROPERTIES = (
    "shape",
    "dtype",
    "device",
    "layout",
    "requires_grad",
    "is_leaf",
    "ndim",
    "nbytes",
    "itemsize",
    "grad_fn",
    "is_cuda",
    "is_cpu",
    "is_meta",
    "is_sparse",
    "is_quantized",
    "is_xpu",
    "is_mps",
    "is_mkldnn",
    "is_nested",
    "is_sparse_csr",
    "is_xla",
    "_version",
    "names",
    "output_nr",
    "retains_grad",
    "is_mtia",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
)
_METHODS = (
    "size",
    "dim",
    "numel",
    "nelement",
    "stride",
    "element_size",
    "is_contiguous",
    "storage_offset",
    "requires_grad_",
    "is_floating_point",
    "is_complex",
    "is_signed",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "__len__",
    "get_device",
    "is_inference",
    "is_conj",
    "is_neg",
)
_METADATA: frozenset[Any] = frozenset(
    [_getter(name) for name in _PROPERTIES if hasattr(torch.Tensor, name)]
    + [getattr(torch.Tensor, name).__set__ for name in ("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")]
    + [getattr(torch.Tensor, name) for name in _METHODS if hasattr(torch.Tensor, name)]
    + [torch.is_floating_point, torch.is_complex, torch.numel]
)


# Of those, what the memory itself decides: the unit's view answers.
_GEOMETRY: frozenset[Any] = frozenset(
    getattr(torch.Tensor, name) for name in ("stride", "is_contiguous", "storage_offset") if hasattr(torch.Tensor, name)
)

_GRAD: Any = torch.Tensor.grad  # the slot itself, under the property that the classes below put over it


def raw_grad(param: nn.Parameter) -> torch.Tensor | None:
    """What autograd has put into `.grad`, whatever the parameter's class says of it."""
    with torch._C.DisableTorchFunctionSubclass():
        grad: torch.Tensor | None = _GRAD.__get__(param)
    return grad


def drop_grad(param: nn.Parameter) -> None:
    """Empty `.grad`, whatever the parameter's class."""
    with torch._C.DisableTorchFunctionSubclass():
        _GRAD.__set__(param, None)


class ReducedParameter(nn.Parameter):
    """A parameter whose gradient lies in its unit's buffers until the optimizer has used it."""

    owner: weakref.ref[Any]

    @property
    def grad(self) -> torch.Tensor | None:
        held = raw_grad(self)
        if held is not None:
            return held
        raise _no_gradient(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None:
            raise _no_gradient(self)
        drop_grad(self)


class ReleasedParameter(nn.Parameter):
    """A parameter whose weights are sharded away."""

    owner: weakref.ref[Any]

    @classmethod
    def __torch_function__(cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _METADATA:
                if func in _GEOMETRY:
                    args = (_unit(args[0]).view_of(args[0]), *args[1:])
                return func(*args, **(kwargs or {}))
        for param in _released(args, kwargs):
            is_here = not isinstance(param, ReleasedParameter)  # it came with another of its unit
            if not (is_here or _unit(param).lend_on_demand() or _unit(param).gather_on_demand()):
                _refuse(param, getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))

    @property
    def grad(self) -> torch.Tensor | None:
        held = raw_grad(self)
        if held is not None or not _unit(self).holds_gradient():
            return held
        raise _no_gradient(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None:
            raise _no_gradient(self)
        drop_grad(self)

    @property
    def data(self) -> torch.Tensor:
        return _plain(self, ".data").data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _plain(self, ".data =").data = value

    # torch hands these two to no __torch_function__

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        return _plain(self, "set_").set_(*args, **kwargs)

    def as_subclass(self, cls: Any) -> Any:
        return _plain(self, "as_subclass").as_subclass(cls)

    def __deepcopy__(self, memo: Any) -> Any:
        return _plain(self, "copy.deepcopy").__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self, "pickling (torch.save)").__reduce_ex__(protocol)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return _plain(self, "__dlpack__").__dlpack__(*args, **kwargs)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return _plain(self, "__array__").__array__(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        name = _unit(self).param_name(self)
        return (
            f"<released parameter {name!r}, shape {tuple(self.shape)}, {self.dtype}; read it inside slipstream.zero.gathered(...)>"
        )

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return repr(self)


def parameter_classes(owner: Owner) -> tuple[type[ReducedParameter], type[ReleasedParameter]]:
    """The two classes of one unit's parameters."""
    ref = weakref.ref(owner)
    return (
        type("ReducedParameter", (ReducedParameter,), {"owner": ref, "__module__": __name__}),
        type("ReleasedParameter", (ReleasedParameter,), {"owner": ref, "__module__": __name__}),
    )


def _unit(param: Any) -> Any:
    unit = type(param).owner()
    if unit is None:
        raise RuntimeError("this parameter's engine is gone without engine.destroy(); its weights went with it")
    return unit


def _released(args: Any, kwargs: Any) -> list[ReleasedParameter]:
    found: list[ReleasedParameter] = []
    stack: list[Any] = [args, kwargs or {}]
    while stack:
        item = stack.pop()
        if isinstance(item, ReleasedParameter):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            stack.extend(item)
        elif isinstance(item, dict):
            stack.extend(item.values())
    return found


def _plain(param: Any, what: str) -> Any:
    """The parameter itself, in a class that has the answer; elsewhere than in a surgery that raises."""
    if not _unit(param).lend_on_demand():
        _refuse(param, what)
    return param


def _refuse(param: Any, what: str) -> NoReturn:
    name = _unit(param).param_name(param)
    raise RuntimeError(
        f"{what} on parameter {name!r}: its weights are sharded over the ranks and not gathered here. "
        f"Read or write it inside `with slipstream.zero.gathered(param):`, or use engine.state_dict()."
    )


def _no_gradient(param: Any) -> RuntimeError:
    name = _unit(param).param_name(param)
    return RuntimeError(
        f"the gradient of parameter {name!r} has been moved to the engine's reduced buffers, so .grad is not here. "
        f'Read it with engine.gradient({name!r}) on all ranks; clip with "gradient_clipping" in the config; '
        f"drop gradients with engine.zero_grad()."
    )

"""Parameter classes for parameters whose weights are released or whose gradients have been reduced.

A parameter is always the same Python object; only its class changes, between three classes per unit:

nn.Parameter       an ordinary parameter: the weights are gathered, and any gradient is in `.grad`
ReducedParameter   the weights are gathered; the gradient is in the unit's buffers, so `.grad` raises
ReleasedParameter  the weights' storage is empty, so every read raises an error with the parameter's name and how to fix it;
                   shape, dtype, device, requires_grad, hashing and hooks keep working

[Note: Class swap] A released storage has 0 bytes: most reads of it would crash the process, and `torch.save` would write
nothing. Assigning `p.__class__` takes about 70 ns, keeps identity, and leaves a gathered parameter exactly `nn.Parameter`,
so `torch.compile` is not affected. Each unit has its own two subclasses, whose `owner` refers to the unit.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.nn as nn

from slipstream.zero.trees import tensors_in

if TYPE_CHECKING:
    from slipstream.zero.unit import Unit


# Reads and writes that need no storage. A released parameter refuses all others.
_PROPERTIES = (
    "shape dtype device layout requires_grad is_leaf ndim nbytes itemsize grad_fn _version names output_nr retains_grad "
    "is_cuda is_cpu is_meta is_sparse is_sparse_csr is_quantized is_nested is_xpu is_mps is_mkldnn is_xla is_mtia "
    "_backward_hooks _post_accumulate_grad_hooks"
)
_METHODS = (
    "size dim numel nelement stride element_size is_contiguous storage_offset requires_grad_ is_floating_point is_complex "
    "is_signed is_inference is_conj is_neg get_device register_hook register_post_accumulate_grad_hook __len__"
)
_METADATA: frozenset[Any] = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in _PROPERTIES.split() if hasattr(torch.Tensor, name)]
    + [getattr(torch.Tensor, name).__set__ for name in ("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")]
    + [getattr(torch.Tensor, name) for name in _METHODS.split() if hasattr(torch.Tensor, name)]
    + [torch.is_floating_point, torch.is_complex, torch.numel]
)


# Geometry depends on the storage that the parameter views now, so the unit's view answers.
_GEOMETRY: frozenset[Any] = frozenset(
    getattr(torch.Tensor, name) for name in ("stride", "is_contiguous", "storage_offset") if hasattr(torch.Tensor, name)
)

_GRAD: Any = torch.Tensor.grad  # torch's descriptor, which the classes below override


def raw_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return the gradient that autograd has put into `.grad`, whatever the parameter's class."""
    with torch._C.DisableTorchFunctionSubclass():
        grad: torch.Tensor | None = _GRAD.__get__(param)
    return grad


def drop_grad(param: nn.Parameter) -> None:
    """Clear `.grad`, whatever the parameter's class."""
    with torch._C.DisableTorchFunctionSubclass():
        _GRAD.__set__(param, None)


def _set_grad(param: nn.Parameter, value: torch.Tensor | None) -> None:
    if value is not None:
        raise _no_gradient(param)
    drop_grad(param)


def _get_grad(param: nn.Parameter) -> torch.Tensor | None:
    grad = raw_grad(param)
    if grad is None and _unit(param).window.holds_gradient:
        raise _no_gradient(param)
    return grad


class ReducedParameter(nn.Parameter):
    """A parameter whose gradient is in its unit's buffers until the optimizer has used it."""

    owner: weakref.ref[Any]
    grad = property(_get_grad, _set_grad)


class ReleasedParameter(nn.Parameter):
    """A parameter whose weights are sharded and not gathered."""

    owner: weakref.ref[Any]
    grad = property(_get_grad, _set_grad)

    @classmethod
    def __torch_function__(cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _METADATA:
                if func in _GEOMETRY:
                    args = (_unit(args[0]).view_of(args[0]), *args[1:])
                return func(*args, **(kwargs or {}))
        for param in tensors_in((args, kwargs)):  # one may be gathered with another one of its unit
            if isinstance(param, ReleasedParameter) and not (_unit(param).copy_on_read() or _unit(param).gather_on_read()):
                _refuse(param, getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))

    @property
    def data(self) -> torch.Tensor:
        return _plain(self, ".data").data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _plain(self, ".data =").data = value

    # torch does not dispatch these two to __torch_function__

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
        shape = tuple(self.shape)
        return f"<released parameter {name!r}, shape {shape}, {self.dtype}; read it inside slipstream.zero.gathered(...)>"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return repr(self)


def parameter_classes(owner: Unit) -> tuple[type[ReducedParameter], type[ReleasedParameter]]:
    """Make the two classes of one unit's parameters."""
    ref = weakref.ref(owner)
    return (
        type("ReducedParameter", (ReducedParameter,), {"owner": ref, "__module__": __name__}),
        type("ReleasedParameter", (ReleasedParameter,), {"owner": ref, "__module__": __name__}),
    )


def _unit(param: Any) -> Any:
    unit = type(param).owner()
    if unit is None:
        raise RuntimeError("this parameter's engine was dropped without engine.destroy(), so its weights are lost; keep the engine")
    return unit


def _plain(param: Any, operation: str) -> Any:
    """Return the parameter as a plain one inside a surgery; raise RuntimeError elsewhere."""
    if not _unit(param).copy_on_read():
        _refuse(param, operation)
    return param


def _refuse(param: Any, operation: str) -> NoReturn:
    name = _unit(param).param_name(param)
    raise RuntimeError(
        f"{operation} on parameter {name!r}: its weights are sharded over the ranks and not gathered here. "
        f"Read or write it inside `with slipstream.zero.gathered(param):`, or use engine.state_dict()."
    )


def _no_gradient(param: Any) -> RuntimeError:
    name = _unit(param).param_name(param)
    return RuntimeError(
        f"the gradient of parameter {name!r} has been moved to the engine's reduced buffers, so .grad is not available. "
        f'Read it with engine.gradient({name!r}) on all ranks; clip with "gradient_clipping" in the config; '
        f"drop gradients with engine.zero_grad()."
    )

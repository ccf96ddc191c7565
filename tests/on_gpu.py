"""The pool's tests on a GPU: SLIPSTREAM_TESTS_ON_GPU=cuda python -m pytest tests/dist, in worker processes that share one device.

Engines then choose CUDA as they do for a user. The tests were written for the CPU; so that they need not ask for a device, tensors
that the *tests* create go to the GPU after they were filled on the CPU, hence with the same numbers, so do modules that they call,
and tensors of both devices that meet in a test's own arithmetic meet there, or where the one that is written lies. Calls from
inside Slipstream are left alone. What cannot hold there (the shared-memory transport, native CPU kernels, bytes of the process)
fails or is deselected by hand: this is a search for defects of the CUDA paths, and not a suite that is expected to be green.
`emulated` in place of `cuda` does without a GPU (`tests/emulation`).
"""

import contextlib
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from tests import emulation

EMULATED = os.environ.get("SLIPSTREAM_TESTS_ON_GPU") == "emulated"
ON_GPU = "cuda" if EMULATED else os.environ.get("SLIPSTREAM_TESTS_ON_GPU", "")  # a device's name, usually "cuda"
_TORCH, _TESTS = str(Path(torch.__file__).parent), str(Path(__file__).parent)


@contextlib.contextmanager
def tensors_of_tests() -> Iterator[None]:
    """A context, of one thread, in which tensors of tests go to the GPU; without ON_GPU, one that does nothing."""
    with contextlib.ExitStack() as within:
        if ON_GPU:
            within.enter_context(_OnGpu())
            within.enter_context(mock.patch.object(nn.Module, "__call__", _moving(nn.Module.__call__)))
            if importlib.util.find_spec("transformers"):
                from transformers import GenerationMixin

                within.enter_context(mock.patch.object(GenerationMixin, "generate", _moving(GenerationMixin.generate)))
        yield
    if EMULATED and (found := emulation.races()):
        raise AssertionError("\n".join(found))


def _of_a_test() -> bool:
    """Whether the innermost caller outside torch is a file of the tests."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name != __file__ and not name.startswith(_TORCH):
            return name.startswith(_TESTS)
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _moving(method: Callable[..., Any]) -> Callable[..., Any]:
    """A call of a module; a test's own, such as the model that it compares with, goes to the GPU first."""

    @functools.wraps(method)
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _of_a_test() and any(type(param) is nn.Parameter and param.device.type == "cpu" for param in module.parameters()):
            module.to(ON_GPU)
        return method(module, *args, **kwargs)

    return call


class _OnGpu(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _of_a_test() or func.__name__ == "__set__":  # of `.data` and `.grad`
            return func(*args, **kwargs)
        if func in _device_constructors():
            if kwargs.get("device") is not None or kwargs.get("out") is not None or kwargs.get("pin_memory"):
                return func(*args, **kwargs)
            needs_grad = kwargs.pop("requires_grad", False)
            made = func(*args, **(kwargs | {"device": "cpu"})).to(ON_GPU)
            return made.requires_grad_() if needs_grad else made
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if len({x.device.type for x in tensors if x.dim()}) == 2:
            written = func.__name__.endswith("_") and isinstance(args[0], Tensor)  # the others go where that one is
            where = args[0].device if written else torch.device(ON_GPU)
            args = tuple(_moved(x, where) for x in args)
            kwargs = {key: _moved(x, where) for key, x in kwargs.items()}
        return func(*args, **kwargs)


def _moved(value: Any, where: torch.device) -> Any:
    return value.to(where) if type(value) is Tensor and value.device.type != where.type else value

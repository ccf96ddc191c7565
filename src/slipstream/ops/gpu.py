"""Which passes of training run as Triton kernels (`ops/triton`): on GPUs, if triton is installed."""

import functools
import importlib
import importlib.util
import logging
from types import ModuleType

from torch import Tensor

from slipstream.ops.cpu import DTYPES

logger = logging.getLogger(__name__)


@functools.cache
def _is_usable() -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        importlib.import_module("slipstream.ops.triton.flat")
    except (ImportError, OSError, AttributeError) as error:  # a triton of another torch, or without its C library
        logger.warning("the installed triton cannot be used (%s); torch's operations compute in place of its kernels", error)
        return False
    return True


def module(name: str) -> ModuleType | None:
    """A module of `ops.triton`; None if triton is not installed, or unusable."""
    return importlib.import_module(f"slipstream.ops.triton.{name}") if _is_usable() else None


def kernels(*arrays: object) -> ModuleType | None:
    """The kernels for flat arrays, if all are None or contiguous GPU tensors in fp32, bf16 or fp16; else None: torch computes."""
    for array in arrays:
        if array is None:
            continue
        if not (isinstance(array, Tensor) and array.is_cuda and array.dtype in DTYPES and array.is_contiguous()):
            return None
    return module("flat")

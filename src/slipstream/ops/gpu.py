"""Which of a training step's passes Triton kernels take (`ops/triton/flat.py`): on GPUs, where triton is installed."""

import functools
import importlib
import importlib.util
import logging
from types import ModuleType

from torch import Tensor

from slipstream.ops.cpu import DTYPES

logger = logging.getLogger(__name__)


@functools.cache
def _flat() -> ModuleType | None:
    if importlib.util.find_spec("triton") is None:
        return None
    try:
        return importlib.import_module("slipstream.ops.triton.flat")
    except (ImportError, OSError, AttributeError) as error:  # a triton of another torch, or without its C library
        logger.warning("the installed triton cannot be used (%s); torch's operations compute the optimizer and reductions", error)
        return None


def kernels(*arrays: object) -> ModuleType | None:
    """The kernels, if all arrays are None or contiguous tensors of a GPU in fp32, bf16 or fp16; else None: torch computes."""
    for array in arrays:
        if array is None:
            continue
        if not (isinstance(array, Tensor) and array.is_cuda and array.dtype in DTYPES and array.is_contiguous()):
            return None
    return _flat()

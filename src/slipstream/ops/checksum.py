"""zlib's CRC-32, with an optional copy in the same pass. Native on processors with carry-less multiplication."""

import ctypes
import functools
import zlib
from collections.abc import Callable

import torch
from torch import Tensor

from slipstream.ops import build


def crc32(source: Tensor, value: int = 0, into: Tensor | None = None) -> int:
    """The CRC-32 of `source`, continued from `value`; copies the bytes to `into`. Both are 1D, uint8, contiguous, on the host."""
    sums = _sums(source, value, into, max(source.numel(), 1))
    return sums[0] if sums else value


def crc32_blocks(source: Tensor, block: int, into: Tensor | None = None) -> list[int]:
    """The CRC-32 of each `block` bytes of `source`; otherwise like `crc32`. One call that releases the GIL."""
    return _sums(source, 0, into, block)


def _sums(source: Tensor, value: int, into: Tensor | None, block: int) -> list[int]:
    for tensor in (source, into):
        if tensor is not None and (tensor.dtype is not torch.uint8 or not tensor.is_cpu or not tensor.is_contiguous()):
            raise ValueError(
                f"crc32: the tensor is {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}; "
                "pass contiguous torch.uint8 on the CPU"
            )
    if into is not None and into.numel() != source.numel():
        raise ValueError(f"crc32: cannot copy {source.numel()} bytes into {into.numel()}; the sizes must be equal")
    nbytes, native = source.numel(), _native()
    if native is not None:
        sums = (ctypes.c_uint32 * -(-nbytes // block))()
        native(sums, value, None if into is None else into.data_ptr(), source.data_ptr(), nbytes, block)
        return list(sums)
    if into is not None:
        into.copy_(source)
    data = memoryview((ctypes.c_char * nbytes).from_address(source.data_ptr())) if nbytes else b""
    return [zlib.crc32(data[at : at + block], 0 if at else value) for at in range(0, nbytes, block)]


@functools.cache
def _native() -> Callable[..., None] | None:
    library = build.load().kernels
    if library is None or not library.slipstream_has_crc32():
        return None
    pointer, long = ctypes.c_void_p, ctypes.c_int64
    return build.function("slipstream_crc32", None, pointer, ctypes.c_uint32, pointer, pointer, long, long)

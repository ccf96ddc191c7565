"""zlib's CRC-32 of bytes, which are copied on the way if asked for. Native where the processor multiplies without carry."""

import ctypes
import functools
import zlib
from collections.abc import Callable

import torch
from torch import Tensor

from slipstream.ops import build


def crc32(source: Tensor, value: int = 0, into: Tensor | None = None) -> int:
    """The checksum of `source`'s bytes continued from `value`; `into` gets them. Both 1D, uint8, contiguous, on the host."""
    sums = _sums(source, value, into, max(source.numel(), 1))
    return sums[0] if sums else value


def crc32_blocks(source: Tensor, block: int, into: Tensor | None = None) -> list[int]:
    """The checksum of each `block` bytes of `source`; otherwise as above. One call without Python's lock for all of them."""
    return _sums(source, 0, into, block)


def _sums(source: Tensor, value: int, into: Tensor | None, block: int) -> list[int]:
    for tensor in (source, into):
        if tensor is not None and (tensor.dtype is not torch.uint8 or not tensor.is_cpu or not tensor.is_contiguous()):
            what = f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
            raise ValueError(f"crc32: {what}; pass contiguous bytes of the host")
    if into is not None and into.numel() != source.numel():
        raise ValueError(f"crc32: {source.numel()} bytes into {into.numel()}")
    nbytes, native = source.numel(), _native()
    if native is not None:
        sums = (ctypes.c_uint32 * -(-nbytes // block))()
        native(sums, value, None if into is None else into.data_ptr(), source.data_ptr(), nbytes, block)
        return list(sums)
    if into is not None:
        into.copy_(source)
    whole = memoryview((ctypes.c_char * nbytes).from_address(source.data_ptr())) if nbytes else b""
    return [zlib.crc32(whole[at : at + block], 0 if at else value) for at in range(0, nbytes, block)]


@functools.cache
def _native() -> Callable[..., None] | None:
    library = build.load().kernels
    if library is None or not library.slipstream_has_crc32():
        return None
    function = library.slipstream_crc32
    function.restype = None
    function.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    return function

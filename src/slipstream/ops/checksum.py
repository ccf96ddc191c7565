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
    for tensor in (source, into):
        if tensor is not None and (tensor.dtype is not torch.uint8 or not tensor.is_cpu or not tensor.is_contiguous()):
            what = f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
            raise ValueError(f"crc32: {what}; pass contiguous bytes of the host")
    if into is not None and into.numel() != source.numel():
        raise ValueError(f"crc32: {source.numel()} bytes into {into.numel()}")
    native = _native()
    if native is not None:
        return native(value, None if into is None else into.data_ptr(), source.data_ptr(), source.numel())
    if into is not None:
        into.copy_(source)
    return zlib.crc32((ctypes.c_char * source.numel()).from_address(source.data_ptr()) if source.numel() else b"", value)


@functools.cache
def _native() -> Callable[..., int] | None:
    library = build.load().kernels
    if library is None or not library.slipstream_has_crc32():
        return None
    function = library.slipstream_crc32
    function.restype, function.argtypes = ctypes.c_uint32, [ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    return function

"""Rounding of a tensor to evenly spaced values, group by group, as fake quantization does in every forward.

A group is a row of the tensor flattened to [groups, -1]. Native kernels in two passes that allocate only the result, and a torch
twin with the same bits. Arithmetic is fp32.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from slipstream.ops import build, cpu

_PIECE = 1 << 16  # elements per work item: they fit a cache, and outweigh the cost of a call


class _Grid(ctypes.Structure):
    """`struct grid` of csrc/quantize.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("w", "out", "ends", "scale", "zero")),
        *((name, ctypes.c_int64) for name in ("group", "piece")),
        *((name, ctypes.c_float) for name in ("low", "high")),
        ("dtype", ctypes.c_int32),
    )


@functools.cache
def _native(name: str = "slipstream_ends") -> Any:
    return build.function(name, None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


def _run(name: str, w: Tensor, groups: int, **values: Any) -> None:
    grid = _Grid(w=w.data_ptr(), group=w.numel() // groups, piece=_PIECE, dtype=cpu.DTYPES[w.dtype], **values)
    function, items = _native(name), groups * _pieces(w, groups)
    least = max(1, cpu.THREAD_NUMEL * items // w.numel())
    cpu.in_threads(
        lambda begin, end: function(ctypes.addressof(grid), begin, end), items, torch.get_num_threads(), least=least, multiple=1
    )


def _pieces(w: Tensor, groups: int) -> int:
    return -(-(w.numel() // groups) // _PIECE)


def _is_native(w: Tensor) -> bool:
    return w.is_cpu and w.dtype in cpu.DTYPES and w.numel() > 0 and _native() is not None


@torch.no_grad()
def group_ends(w: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """The smallest and the largest element of each group, fp32 [groups]; not finite if the group has such an element."""
    if not _is_native(w):
        flat = w.reshape(groups, -1)
        return flat.amin(1).float(), flat.amax(1).float()
    w, ends = w.contiguous(), w.new_empty(groups, _pieces(w, groups), 2, dtype=torch.float32)
    _run("slipstream_ends", w, groups, ends=ends.data_ptr())
    return ends[..., 0].amin(1), ends[..., 1].amax(1)


@torch.no_grad()
def on_grid(w: Tensor, scale: Tensor, zero: Tensor, low: int, high: int) -> Tensor:
    """Each element rounded (ties to even) to zero + k * scale with an integer k from low to high, in w's shape and dtype.

    scale, zero: fp32 [groups]. low and high: magnitudes below 2^22.
    """
    if not _is_native(w):
        flat, by, start = w.reshape(len(scale), -1).float(), scale[:, None], zero[:, None]
        return (torch.round((flat - start) / by).clamp_(low, high) * by + start).view(w.shape).to(w.dtype)
    w, scale, zero = w.contiguous(), scale.contiguous(), zero.contiguous()
    out = torch.empty_like(w)
    pointers = {"out": out.data_ptr(), "scale": scale.data_ptr(), "zero": zero.data_ptr()}
    _run("slipstream_on_grid", w, len(scale), low=low, high=high, **pointers)
    return out

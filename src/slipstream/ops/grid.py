"""Rounding of a tensor to evenly spaced values, group by group, as fake quantization does in every forward.

A group is a row of the tensor flattened to [groups, -1]. Native kernels in two passes that allocate only the result, and a torch
twin with the same bits. Arithmetic is fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.ops import cpu

_PIECE = 1 << 16  # elements per work item: they fit a cache, and outweigh the cost of a call


def _run(which: int, w: Tensor, groups: int, arrays: dict[str, Tensor], **numbers: float) -> None:
    items = groups * _pieces(w, groups)
    least = max(1, cpu.THREAD_NUMEL * items // w.numel())
    cpu.quantize(which, {"w": w, **arrays}, items, least, group=w.numel() // groups, piece=_PIECE, **numbers)


def _pieces(w: Tensor, groups: int) -> int:
    return -(-(w.numel() // groups) // _PIECE)


def _is_native(w: Tensor) -> bool:
    return w.is_cpu and w.dtype in cpu.DTYPES and w.numel() > 0 and cpu._kernels() is not None


@torch.no_grad()
def group_ends(w: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """The smallest and the largest element of each group, fp32 [groups]; not finite if the group has such an element."""
    if not _is_native(w):
        flat = w.reshape(groups, -1)
        return flat.amin(1).float(), flat.amax(1).float()
    w, ends = w.contiguous(), w.new_empty(groups, _pieces(w, groups), 2, dtype=torch.float32)
    _run(cpu.TO_ENDS, w, groups, {"ends": ends})
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
    _run(cpu.TO_GRID, w, len(scale), {"codes": out, "scale": scale, "low": zero}, lowest=low, highest=high)
    return out

"""Fake quantization: the forward rounds a tensor to few bits, and the gradient passes unchanged (straight-through).

A group is a row of the tensor flattened to [groups, -1]; q = 2^bits. The formulas are DeepSpeed's:

symmetric    s = 2 max|w| / q;            Q = clamp(round(w / s + u), -q/2, q/2 - 1) s
asymmetric   s = (max - min) / q, z = round(min / s) s;  Q = clamp(round((w - z) / s + u), 0, q - 1) s + z
2 bits       t = 0.7 mean|w|; a = the mean of those |w| above t;  Q = a where w > t, -a where w < -t, else 0
1 bit        Q = mean|w| sign(w)

u is 0, or uniform in [-1/2, 1/2) with stochastic rounding. `served` uses the grids of Slipstream's inference engine instead: int8
with a scale per row, int4 with a scale and a minimum per group of columns. Loading such weights there loses nothing.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from slipstream import ops
from slipstream.ops.grid import group_ends, on_grid

Kind = Literal["symmetric", "asymmetric", "served"]
SNIP_MOMENTUM = 0.9
SERVED_GROUP = 32  # columns of a group in int4, the engine's default


def fake_quantize(w: Tensor, bits: int, groups: int = 1, kind: Kind = "symmetric", stochastic: bool = False) -> Tensor:
    """w rounded to `bits`, in its shape and dtype. Raises ValueError if groups do not divide it, or for unsupported bits."""
    return through(w, quantized(w.detach(), bits, groups, kind, stochastic))


@torch.library.custom_op("slipstream::fake_quantize", mutates_args=())
def scheduled(w: Tensor, now: Tensor, groups: int, kind: str, stochastic: bool) -> Tensor:
    """`fake_quantize` with bits that a compiled model reads at every step. now: fp32 [2], bits and the exact weight's share."""
    bits, share = now.tolist()
    if not bits:
        return w.clone()
    value = quantized(w, int(bits), groups, kind, stochastic)  # type: ignore[arg-type]
    return share * w + (1 - share) * value if share else value


scheduled.register_fake(lambda w, *_: torch.empty_like(w))
scheduled.register_autograd(lambda _, grad: (grad, None, None, None, None))


def through(w: Tensor, value: Tensor) -> Tensor:
    """`value` in the forward; the gradient goes to w."""
    out: Tensor = _Through.apply(w, value)
    return out


class _Through(torch.autograd.Function):
    """The second tensor, with the gradient of the first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def quantized(w: Tensor, bits: int, groups: int = 1, kind: Kind = "symmetric", stochastic: bool = False) -> Tensor:
    """`fake_quantize` without a gradient."""
    if kind == "served":
        return _served(w, bits)
    if w.numel() % groups:
        raise ValueError(f"{groups} groups do not divide the {w.numel()} elements of a tensor of shape {tuple(w.shape)}")
    if kind != "symmetric" or bits > 2:
        return _rounded(w, bits, groups, kind == "symmetric", stochastic)
    flat = w.reshape(groups, -1).float()
    rounded = flat.abs().mean(1, keepdim=True) * torch.sign(flat) if bits == 1 else _ternary(flat)
    return rounded.reshape(w.shape).to(w.dtype)


def _rounded(w: Tensor, bits: int, groups: int, symmetric: bool, stochastic: bool) -> Tensor:
    scale, zero, low, high = _grid(*group_ends(w, groups), bits, symmetric)
    if not stochastic:
        return on_grid(w, scale, zero, low, high)
    flat, by, start = w.reshape(groups, -1).float(), scale[:, None], zero[:, None]
    steps = (flat - start) / by + torch.rand_like(flat) - 0.5
    return (torch.round(steps).clamp_(low, high) * by + start).reshape(w.shape).to(w.dtype)


def _grid(least: Tensor, most: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor, int, int]:
    """(scale, zero, lowest and highest code) of ranges. A range of a single number has a scale of 1."""
    levels = 2**bits
    scale = 2 * torch.maximum(least.abs(), most.abs()) / levels if symmetric else (most - least) / levels
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    if symmetric:
        return scale, torch.zeros_like(scale), -levels // 2, levels // 2 - 1
    return scale, torch.round(least / scale) * scale, 0, levels - 1


def _ternary(flat: Tensor) -> Tensor:
    size = flat.abs()
    threshold = 0.7 * size.mean(1, keepdim=True)
    above = size > threshold
    height = (size * above).sum(1, keepdim=True) / above.sum(1, keepdim=True).clamp_min(1)
    return height * torch.sign(flat) * above


def _served(w: Tensor, bits: int) -> Tensor:
    codes = served(w, bits)
    return (ops.dequantize_int8 if bits == 8 else ops.dequantize_int4)(*codes).view_as(w).to(w.dtype)


def served(w: Tensor, bits: int) -> tuple[Tensor, ...]:
    """The codes of a matrix w in the inference engine's form: int8 and scale, or uint8, scale and low."""
    if bits not in (8, 4):
        raise ValueError(f'quantization_type "served" has 8 or 4 bits, as the inference engine, not {bits}')
    rows = w.reshape(len(w), -1)
    return ops.quantize_int8(rows) if bits == 8 else ops.quantize_int4(rows, SERVED_GROUP)


def in_kept_range(x: Tensor, ends: Tensor, bits: int, kind: Kind) -> Tensor:
    """x rounded in the range `ends` [2] (min, max), with an unchanged gradient; in x's own range before the first step (ends 0)."""
    now = torch.where(ends.any(), ends, torch.stack(x.detach().aminmax()).to(ends.dtype)).float()
    return x + (on_grid(x.detach(), *_grid(now[:1], now[1:], bits, kind == "symmetric")) - x).detach()


def moved_range(ends: Tensor, seen: Tensor, momentum: float = 0.95) -> Tensor:
    """The range after a step. seen: [2], minus the step's smallest and its largest input; if one is not finite, the range stays."""
    new = torch.stack([-seen[0], seen[1]])
    return torch.where(seen.isfinite().all(), torch.where(ends.any(), ends * momentum + new * (1 - momentum), new), ends)


class TopKBinarizer(torch.autograd.Function):
    """A mask of the largest scores, whose gradient passes to the scores (Sanh et al., arXiv 2005.07683)."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, threshold: float, sigmoid: bool = False) -> Tensor:
        """inputs: scores. threshold: the fraction that is kept, 0 to 1. Returns 1 for kept ones, else 0, in the scores' shape."""
        return top_mask(inputs, threshold).to(inputs.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class ScoredWeight(torch.autograd.Function):
    """The weight times its mask. The backward adds to the scores: score = 0.9 score + |weight x mask x gradient|."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, mask: Tensor, scores: Tensor) -> Tensor:
        ctx.save_for_backward(weight, mask)
        ctx.scores = scores
        return weight * mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        weight, mask = ctx.saved_tensors
        grad = grad * mask
        with torch.no_grad():
            ctx.scores.mul_(SNIP_MOMENTUM).add_((weight * grad).abs())
        return grad, None, None


def top_mask(scores: Tensor, share: float) -> Tensor:
    """True for the largest ceil(share of all) scores, at least one; among equal ones the first."""
    count = max(1, -int(-share * scores.numel() // 1))
    mask = torch.zeros(scores.numel(), dtype=torch.bool, device=scores.device)
    mask[scores.detach().reshape(-1).sort(descending=True, stable=True).indices[:count]] = True
    return mask.view(scores.shape)

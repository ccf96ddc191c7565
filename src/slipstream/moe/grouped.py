"""Linear layers of several experts at once: rows that are sorted by expert, and stacked weights.

No copies, no padding, and an expert without rows costs nothing but its zero gradient. On CPUs, all experts are one call of native
kernels for fp32 and bf16 (ops/grouped.py); on CUDA, of torch's grouped product for bf16. Else, each expert is a product of torch's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.ops import grouped, pages
from slipstream.ops.derivatives import once_differentiable


class RowsError(ValueError):
    """A linear layer of experts is called with other rows than the experts are."""


def grouped_linear(x: Tensor, weight: Tensor, counts: Sequence[int], bias: Tensor | None = None) -> Tensor:
    """rows of expert e times weight[e].T, plus bias[e]. Gradients of an expert without rows are zero.

    x       [rows, in], sorted by expert
    weight  [experts, out, in], with any strides: a weight stored as [experts, in, out] is passed as its transpose
    counts  rows of each expert; they add up to all rows
    bias    [experts, out]

    Under autocast, computes in autocast's dtype like `torch.nn.functional.linear`. Raises RowsError if x has another number of
    rows, and ValueError for shapes that do not fit.
    """
    if x.dim() != 2 or len(x) != sum(counts):
        raise RowsError(f"the experts have {sum(counts)} rows, and a linear layer of theirs is given {tuple(x.shape)}")
    if len(counts) != len(weight) or min(counts, default=0) < 0:
        raise ValueError(f"{len(weight)} experts are given the rows {list(counts)}: each must have one number, of at least 0")
    if x.shape[1] != weight.shape[2]:
        raise ValueError(f"a linear layer of experts with {weight.shape[2]} features is given rows of {x.shape[1]}")
    if is_autocast(x.device):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if bias is not None and (bias.shape, bias.dtype, bias.device) != (weight.shape[:2], x.dtype, x.device):
        actual, wanted = f"{list(bias.shape)} of {bias.dtype}", f"{list(weight.shape[:2])} of {x.dtype}"
        raise ValueError(f"the bias of experts is {actual} on {bias.device}; it must be {wanted} on {x.device}, as their rows")
    out: Tensor = _Grouped.apply(x, weight, bias, tuple(counts))
    return out


def is_autocast(device: torch.device) -> bool:
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)  # meta has none


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """For arithmetic that stays in fp32 inside the caller's autocast."""
    return torch.autocast(device.type, enabled=False) if is_autocast(device) else nullcontext()


def _ranges(counts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(expert, first row, end row) of the experts that have rows."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, start, start + count
        start += count


def _by_torch(x: Tensor, features: int) -> bool:
    """Whether torch's grouped product supports these rows and `features` results: rows must be multiples of 16 bytes."""
    fits = x.is_cuda and x.dtype == torch.bfloat16 and x.shape[1] % 8 == features % 8 == 0
    return fits and len(x) > 0 and hasattr(torch.nn.functional, "grouped_mm")


def _ends(counts: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(counts, device=device).cumsum(0).to(torch.int32)


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, counts: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        return _times(x, weight.transpose(1, 2), counts, bias)

    @staticmethod
    @once_differentiable("a product of several experts")
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        of_x = _times(grad, weight, ctx.counts) if ctx.needs_input_grad[0] else None
        of_weight = _of_weight(grad, x, weight, ctx.counts) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, _of_bias(grad, ctx.counts) if ctx.needs_input_grad[2] else None, None


def _times(x: Tensor, matrices: Tensor, counts: Sequence[int], bias: Tensor | None = None) -> Tensor:
    """Rows of expert e times matrices[e] [in, out], plus bias[e]."""
    if grouped.fits(x, matrices):
        return grouped.grouped_rows(x, matrices, counts, bias)
    if _by_torch(x, matrices.shape[2]):
        product = torch.nn.functional.grouped_mm(x, matrices, offs=_ends(counts, x.device))
        return product if bias is None else product + bias.repeat_interleave(torch.tensor(counts, device=x.device), 0)
    out = x.new_empty(len(x), matrices.shape[2])
    for expert, start, stop in _ranges(counts):
        if bias is None:
            torch.mm(x[start:stop], matrices[expert], out=out[start:stop])
        else:
            torch.addmm(bias[expert], x[start:stop], matrices[expert], out=out[start:stop])
    return out


def _of_weight(grad: Tensor, x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """The weight's gradient [experts, out, in], in the weight's strides."""
    transposed = weight.stride(2) > weight.stride(1)
    if grouped.fits(grad, x):
        return grouped.grouped_outer(x, grad, counts).mT if transposed else grouped.grouped_outer(grad, x, counts)
    out = pages.huge(torch.empty_like(weight))  # keeps the weight's dense strides
    if _by_torch(x, grad.shape[1]):
        return out.copy_(torch.nn.functional.grouped_mm(grad.t(), x, offs=_ends(counts, x.device)))
    for expert, start, stop in _ranges(counts):
        if transposed:
            torch.mm(x[start:stop].t(), grad[start:stop], out=out[expert].t())
        else:
            torch.mm(grad[start:stop].t(), x[start:stop], out=out[expert])
    return _without_rows(out, counts)


def _of_bias(grad: Tensor, counts: Sequence[int]) -> Tensor:
    """The bias's gradient [experts, out]."""
    out = grad.new_empty(len(counts), grad.shape[1])
    for expert, start, stop in _ranges(counts):
        torch.sum(grad[start:stop], 0, out=out[expert])
    return _without_rows(out, counts)


def _without_rows(out: Tensor, counts: Sequence[int]) -> Tensor:
    """Write zeros for the experts without rows."""
    for expert, count in enumerate(counts):
        if not count:
            out[expert].zero_()
    return out


class GroupedLinear(nn.Module):
    """`nn.Linear` of every expert: weight [experts, out, in], bias [experts, out]. It replaces a layer with such parameters. Its
    owner sets the row counts of the experts.

    counts None: for now the parameters are those of one expert, to which all rows belong. share_of_bias: what this rank adds of it
    to the sum of the ranks' slices.
    """

    weight: Tensor
    bias: Tensor | None
    counts: Sequence[int] | None = ()
    share_of_bias = 1.0

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias if self.bias is None or self.share_of_bias == 1 else self.bias * self.share_of_bias
        if self.counts is None:
            return F.linear(x, self.weight, bias)
        return grouped_linear(x, self.weight, self.counts, bias)

    def extra_repr(self) -> str:
        return f"experts={len(self.weight)}, in_features={self.in_features}, out_features={self.out_features}"

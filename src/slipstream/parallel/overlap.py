"""Sums of sliced layers that overlap computing (`tensor_parallel.tp_overlap_comm`), with the same bits.

backward  the sum of a region's input gradients runs while the weight gradients of its column layers are computed
forward   a row layer's product is computed in chunks of rows; the sum of a chunk runs during the next chunk's product

[Note: Order of a backward] Autograd runs the node with the highest sequence number first; numbers grow with the nodes' creation.
The nodes of a region, with their numbers:

    wait      n      x -> x; its backward waits for the sum
    _Weight   n + 1  weight, bias -> token, for each column layer; its backward computes their gradients
    start     n + 2  x -> entered; its backward starts the sum
    _Product         entered, weight, bias, token -> y; its backward computes the gradient of `entered` only

`_set_sequence_nr` gives `_Weight` and `start` these numbers. With other numbers, sums would overlap less and have the same values.
Parameters get their gradients from autograd, so hooks, accumulation and double backward work as in any layer.

[Note: Rows] Matrix libraries compute a row of a product with the same bits for any number of rows, except for very few: MKL takes
another path for two. Chunks have at least `_ROWS`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from slipstream.parallel.exchange import Exchange, dual, enter, even_shares, leave
from slipstream.zero.comm import Pending
from slipstream.zero.hooks import eager

_ROWS = 64
_MOST_CHUNKS = 8


class Region:
    """One entry into column layers that share an input. `sum` is in flight between `start` and `wait`."""

    __slots__ = ("call", "number", "shape", "sum")

    def __init__(self, x: Tensor, exchange: Exchange, dim: int | None, sizes: Sequence[int] | None) -> None:
        sizes = sizes or (None if dim is None else exchange.lengths(x, dim))
        self.call, self.shape, self.number = (exchange, dim, sizes), x.shape, 0
        self.sum: Pending[Tensor] | None = None

    def enter(self, x: Tensor) -> Tensor:
        exchange, dim, sizes = self.call
        return x.view_as(x) if dim is None else exchange.gather(x, dim, sizes)

    def start(self, grad: Tensor) -> Tensor:
        exchange, dim, sizes = self.call
        if torch.is_grad_enabled():  # create_graph
            return leave(grad, exchange, dim, sizes)
        self.sum = exchange.start_sum(grad) if dim is None else exchange.start_reduce_scatter(grad, dim, sizes)
        return grad.new_zeros(()).expand(self.shape)

    def wait(self, grad: Tensor) -> Tensor:
        pending, self.sum = self.sum, None
        return grad if pending is None else pending.wait()


@eager
def enter_region(
    x: Tensor, exchange: Exchange, dim: int | None = None, sizes: Sequence[int] | None = None
) -> tuple[Tensor, Region | None]:
    """`enter`, and the region to pass to `column_product`; None if `x` needs no gradient."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return enter(x, exchange, dim, sizes), None
    region = Region(x, exchange, dim, sizes)
    inside: Any = dual(x, lambda x: x.view_as(x), region.wait)
    entered: Any = dual(inside, region.enter, region.start)
    number = inside.grad_fn._sequence_nr()
    region.number = number + 1
    entered.grad_fn._set_sequence_nr(number + 2)
    return entered, region


@eager
def column_product(x: Tensor, weight: Tensor, bias: Tensor | None, region: Region) -> Tensor:
    """`linear(x, weight, bias)`, whose weight gradients are computed while the region's sum runs."""
    if not (weight.requires_grad or (bias is not None and bias.requires_grad)):
        return linear(x, weight, bias)
    left: list[Tensor] = []  # from the product's backward for the weight's: input and gradient, both 2D
    token = _Weight.apply(weight, bias, left)
    token.grad_fn._set_sequence_nr(region.number)
    y: Tensor = _OverlappedProduct.apply(x, weight, bias, token, left)
    return y


class _Weight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, left: list[Tensor]) -> Tensor:
        ctx.left, ctx.transposed = left, not weight.is_contiguous()
        ctx.set_materialize_grads(False)
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: None) -> Any:
        (x, grad_y), ctx.left[:] = ctx.left, ()
        of_weight = _weight_gradient(x, grad_y, ctx.transposed) if ctx.needs_input_grad[0] else None
        return of_weight, (grad_y.sum(0) if ctx.needs_input_grad[1] else None), None


def _weight_gradient(x: Tensor, grad: Tensor, transposed: bool) -> Tensor:
    """Computed like autograd's backward of `linear`. transposed: the weight is the transpose of a contiguous one."""
    return (x.t() @ grad).t() if transposed else grad.t() @ x


class _OverlappedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, token: Tensor, left: list[Tensor]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.left = left
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.left[:] = x.flatten(0, -2), grad.flatten(0, -2)
        return (grad @ weight if ctx.needs_input_grad[0] else None), None, None, None, None


@eager
def sum_product(
    x: Tensor, weight: Tensor, exchange: Exchange, dim: int | None = None, sizes: Sequence[int] | None = None
) -> Tensor | None:
    """`leave(linear(x, weight), exchange, dim, sizes)` in chunks of the first dimension; None if chunks do not pay off."""
    rows = math.prod(x.shape[:-1])
    most = rows // _ROWS if dim is None else min(len(x), rows // _ROWS)
    if not exchange.chunk_nbytes or x.dim() < 2 or (dim is not None and dim % x.dim() == 0):
        return None
    chunks = min(most, rows * len(weight) * x.element_size() // exchange.chunk_nbytes, _MOST_CHUNKS)
    y: Tensor | None = _SumProduct.apply(x, weight, exchange, dim, sizes, chunks) if chunks > 1 else None
    return y


class _SumProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, exchange: Exchange, dim: int | None, sizes: Sequence[int] | None, chunks: int
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.call, ctx.transposed = (exchange, dim, sizes), not weight.is_contiguous()
        rows = x.flatten(0, -2) if dim is None else x
        started = []
        for part in rows.split(even_shares(len(rows), chunks)):
            y = linear(part, weight)
            started.append(exchange.start_sum(y) if dim is None else exchange.start_reduce_scatter(y, dim, sizes))
        whole = torch.cat([each.wait() for each in started])
        return whole.view(*x.shape[:-1], -1) if dim is None else whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad = enter(grad, *ctx.call)
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = _weight_gradient(x.flatten(0, -2), grad.flatten(0, -2), ctx.transposed)
        return (grad @ weight if ctx.needs_input_grad[0] else None), of_weight, None, None, None, None

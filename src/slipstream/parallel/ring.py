"""Ring attention (arXiv:2310.01889): a rank keeps its queries, while the keys and values of all ranks pass by, one share at a time.

For sequences over more ranks than there are heads, which Ulysses (sequence.py) does not allow. Each step merges the attention to
one share into a running output by its log-sum-exp. The backward passes keys, values and their gradients around once more, and
recomputes the scores. Scores exist only in tiles of queries, so no rank ever holds the scores of a whole share.

A rank's tokens may be several spans of the sequence. Under a causal mask, spans r and 2 P - 1 - r of 2 P give each rank the same
work (Striped Attention, arXiv:2311.09431, distributes tokens for the same purpose).

Shapes: b sequences, h query heads, k key heads, s tokens of one rank, d features per head, P ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.ops.derivatives import once_differentiable
from slipstream.parallel.exchange import Exchange

_TILES = {"cpu": 1 << 18}  # number of scores at a time: 1 MB in fp32 stays in a core's cache
_TILE = 1 << 24  # on other devices

Span = tuple[int, int]  # [start, stop) of tokens


def deal_spans(length: int, size: int, causal: bool) -> list[list[Span]]:
    """The spans of each rank: two that balance a causal mask; one if the sequence length is no multiple of twice the ranks."""
    if not causal or length % (2 * size):
        return [[(rank * length // size, (rank + 1) * length // size)] for rank in range(size)]
    step = length // (2 * size)
    return [[(i * step, (i + 1) * step) for i in (rank, 2 * size - 1 - rank)] for rank in range(size)]


class Mask(NamedTuple):
    """Which tokens a token may attend to."""

    spans: Sequence[Sequence[Span]]  # by rank, in the order of its tokens
    causal: bool = True
    window: int | None = None  # distance from which tokens are too far; None: no limit
    samples: Tensor | None = None  # index of each token's packed sample, [1 or b, P s]
    padding: Tensor | None = None  # False for padding, [b, P s]

    def seen(self, queries: Span, keys: Span) -> Span:
        """The range of `keys` to which any of the queries may attend, as far as positions decide; may be empty."""
        first = keys[0] if self.window is None else max(keys[0], queries[0] - self.window + 1)
        beyond = 0 if self.causal else keys[1] if self.window is None else self.window - 1  # how far ahead a query sees
        return first, max(first, min(keys[1], queries[1] + beyond))

    def tile(self, queries: Span, keys: Span, device: torch.device) -> Tensor | None:
        """The mask of a tile, [1 or b, 1, queries, keys]; None: attend to everything."""
        rows = torch.arange(*queries, device=device)[None, None, :, None]
        columns = torch.arange(*keys, device=device)[None, None, None]
        conditions: list[Tensor] = []
        if self.causal and keys[1] > queries[0] + 1:
            conditions.append(rows >= columns)
        if self.window is not None and max(queries[1] - keys[0], keys[1] - queries[0]) > self.window:
            conditions.append((rows - columns).abs() < self.window)
        if self.samples is not None:
            conditions.append(self.samples[:, None, slice(*queries), None] == self.samples[:, None, None, slice(*keys)])
        if self.padding is not None:
            conditions.append(self.padding.bool()[:, None, None, slice(*keys)])
        return functools.reduce(torch.logical_and, conditions) if conditions else None


def ring_attention(query: Tensor, key: Tensor, value: Tensor, exchange: Exchange, mask: Mask, scale: float | None = None) -> Tensor:
    """Return this rank's tokens' attention to the whole sequence, [b, h, s, d].

    query [b, h, s, d], key and value [b, k, s, d]: this rank's tokens, equally many on each rank; k divides h. scale: of the
    scores, by default 1 / sqrt(d).
    """
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    exchange.agree("attention over shares of {} x {} tokens", query, query.shape[0], query.shape[2])
    out: Tensor = _RingAttention.apply(query, key, value, exchange, mask, scale)
    return out


class _Tile(NamedTuple):
    """The scores of some queries and keys: slices of this rank's tokens and of the visiting ones."""

    queries: slice
    keys: slice
    allowed: Tensor | None


def _tiles(mask: Mask, own: int, visitor: int, heads: int, device: torch.device) -> Iterator[_Tile]:
    """The tiles that rank `own` computes with the keys of rank `visitor`. heads: over all sequences."""
    first = 0
    for start, stop in mask.spans[own]:
        at = 0
        for span in mask.spans[visitor]:
            rows = max(_TILES.get(device.type, _TILE) // (heads * (span[1] - span[0])), 1)
            for begin in range(start, stop, rows):
                part = begin, min(begin + rows, stop)
                keys = mask.seen(part, span)
                if keys[0] < keys[1]:
                    queries = slice(part[0] - start + first, part[1] - start + first)
                    yield _Tile(queries, slice(keys[0] - span[0] + at, keys[1] - span[0] + at), mask.tile(part, keys, device))
            at += span[1] - span[0]
        first += stop - start


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, exchange: Exchange, mask: Mask, scale: float) -> Tensor:
        b, h, _, _ = query.shape
        out = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
        total = torch.full(query.shape[:-1], -torch.inf, device=query.device)  # log of the sum of exponentials so far
        pair = torch.stack([key, value])
        for step in range(exchange.size):
            visitor = (exchange.index - step) % exchange.size
            for tile in _tiles(mask, exchange.index, visitor, b * h, query.device):
                scores = _scores(query, pair[0], tile, scale)
                log_sum = scores.logsumexp(-1)
                before = total[:, :, tile.queries]
                after = torch.logaddexp(before, log_sum)
                base = _finite(after)
                part = _to_heads(scores.sub_(base[..., None]).exp_(), pair[1][:, :, tile.keys])
                out[:, :, tile.queries] *= (before - base).exp_()[..., None]
                out[:, :, tile.queries] += part
                total[:, :, tile.queries] = after
            if step + 1 < exchange.size:
                pair = _pass_on(pair, exchange)
        result = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, total)
        ctx.call = exchange, mask, scale
        return result

    @staticmethod
    @once_differentiable("ring attention")
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, out, total = ctx.saved_tensors
        exchange, mask, scale = ctx.call
        b, h, _, _ = query.shape
        grad_query = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
        pair = torch.stack([key, value])
        grads = torch.zeros(pair.shape, dtype=torch.float32, device=query.device)
        delta = (grad.float() * out.float()).sum(-1)
        for step in range(exchange.size):
            visitor = (exchange.index - step) % exchange.size
            for tile in _tiles(mask, exchange.index, visitor, b * h, query.device):
                keys, values = pair[0][:, :, tile.keys], pair[1][:, :, tile.keys]
                shares = _scores(query, pair[0], tile, scale).sub_(_finite(total[:, :, tile.queries])[..., None]).exp_()
                of_out = grad[:, :, tile.queries].float()
                grads[1][:, :, tile.keys] += _to_keys(shares, of_out, keys.shape[1])
                of_scores = (
                    _to_heads(of_out, values, transposed=True).sub_(delta[:, :, tile.queries, None]).mul_(shares).mul_(scale)
                )
                grad_query[:, :, tile.queries] += _to_heads(of_scores, keys)
                grads[0][:, :, tile.keys] += _to_keys(of_scores, query[:, :, tile.queries].float(), keys.shape[1])
            if exchange.size > 1:
                grads = _pass_on(grads, exchange)
                if step + 1 < exchange.size:
                    pair = _pass_on(pair, exchange)
        return grad_query.to(query.dtype), grads[0].to(key.dtype), grads[1].to(value.dtype), None, None, None


def _finite(log_sum: Tensor) -> Tensor:
    """Replace -inf by zero, for a token without anything to attend to yet: its exponentials are zero in any case."""
    return log_sum.masked_fill(log_sum == -torch.inf, 0.0)


def _scores(query: Tensor, key: Tensor, tile: _Tile, scale: float) -> Tensor:
    """The scores [b, h, queries, keys] in fp32."""
    scores = _to_heads(query[:, :, tile.queries].float(), key[:, :, tile.keys], transposed=True).mul_(scale)
    return scores if tile.allowed is None else scores.masked_fill_(~tile.allowed, -torch.inf)


def _to_heads(rows: Tensor, of_keys: Tensor, transposed: bool = False) -> Tensor:
    """The product of rows [b, h, n, x] with each key head's [b, k, x, y] (or its transpose), in fp32: [b, h, n, y]."""
    b, h, n, _ = rows.shape
    matrix = of_keys.float()
    grouped = rows.reshape(b, matrix.shape[1], -1, rows.shape[-1])
    return (grouped @ (matrix.transpose(-1, -2) if transposed else matrix)).view(b, h, n, -1)


def _to_keys(shares: Tensor, rows: Tensor, key_heads: int) -> Tensor:
    """Sums over queries: shares [b, h, n, x], rows [b, h, n, d] -> [b, k, x, d]."""
    b = shares.shape[0]
    grouped = shares.reshape(b, key_heads, -1, shares.shape[-1])
    return grouped.transpose(-1, -2) @ rows.reshape(b, key_heads, -1, rows.shape[-1])


def _pass_on(tensor: Tensor, exchange: Exchange) -> Tensor:
    """Send to the next rank, receive from the one before."""
    size, rank = exchange.size, exchange.index
    numel = tensor.numel()
    send, receive = [0] * size, [0] * size
    send[(rank + 1) % size] = receive[(rank - 1) % size] = numel
    return exchange.all_to_all(tensor.reshape(-1), send, receive).view(tensor.shape)

"""From tokens to their experts and back: rows sorted by expert, exact counts over the ranks of an `ep` axis, no padding.

row    one token's features on one route
order  the routes sorted by expert: row i of the sorted rows belongs to route order[i]. Within an expert, tokens keep their order

With several ranks on the axis, each has consecutive experts, so sorted rows are in rank order. The rows that a rank receives come
sorted by source rank, and are sorted by expert again. Permutations are gathers in both directions, so results do not depend on
timing. The sum over a token's routes is in fp32, in the order of the routes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.moe.grouped import without_autocast
from slipstream.parallel.exchange import Crossing, Exchange, dual, even_shares, gather_from, scatter_to, swap, without_values
from slipstream.zero.hooks import eager

Compute = Callable[[Tensor, list[int]], Tensor]  # (rows sorted by this rank's experts, row count of each) -> as many rows

Meanwhile = Sequence[Callable[[], object]]


@eager
def run_experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor | None,
    kept: Tensor | None,
    num_experts: int,
    compute: Compute,
    exchange: Exchange | None,
    meanwhile: Meanwhile = (),
    tokens: Exchange | None = None,
) -> Tensor:
    """Send each token to its experts and return the weighted sum of their outputs.

    x            [T, d]
    experts      [T, k], int64, of the whole layer
    weights      [T, k]; None, for k = 1 and without kept: the outputs as they are
    kept         [T, k], bool; dropped routes count as zeros. None: all are kept
    exchange     over the ranks with different experts; None: this rank has all
    meanwhile    computed while rows travel: the first while they go to their experts, the others while they come back
    tokens       over the ranks with the same tokens, of which each sends a share; None: there are no other such ranks

    Collective over the exchange, also for ranks without a token. Raises ValueError for an expert that is not in [0, num_experts).
    """
    if tokens is not None:
        x, experts = scatter_to(x, tokens, 0), scatter_to(experts, tokens, 0)
        weights, kept = (None if each is None else scatter_to(each, tokens, 0) for each in (weights, kept))
    order, counts = sort_routes(experts, kept, num_experts)
    rows = compute_sorted(_spread(x, order, experts.shape[1]), counts, num_experts, compute, exchange, meanwhile)
    out: Tensor = _reorder(rows, _inverse(order), order) if weights is None else _Combine.apply(rows, weights, order)
    return out if tokens is None else gather_from(out, tokens, 0)


def has_dropout(module: nn.Module) -> bool:
    return any("Dropout" in type(each).__name__ for each in module.modules())


def compute_sorted(
    rows: Tensor, counts: list[int], num_experts: int, compute: Compute, exchange: Exchange | None, meanwhile: Meanwhile = ()
) -> Tensor:
    """The experts' outputs for rows sorted by expert, in their order. Collective over the exchange.

    counts: rows of each expert of the whole layer. Other arguments as in `run_experts`.
    """
    going, coming = meanwhile[:1], meanwhile[1:]
    if exchange is None or exchange.size == 1 or without_values(rows):
        if exchange is not None and exchange.size > 1:  # equally many rows on each rank
            counts = even_shares(len(rows), num_experts // exchange.size)
        _run(going)
        rows = compute(rows, counts)
        _run(coming)
        return rows
    own = num_experts // exchange.size
    received = exchange.all_to_all(torch.tensor(counts, device=rows.device), [own] * exchange.size, [own] * exchange.size)
    table = received.view(exchange.size, own).tolist()  # [source][expert]
    send = [sum(counts[rank * own : (rank + 1) * own]) for rank in range(exchange.size)]
    receive = [sum(row) for row in table]
    rows = _cross(rows, exchange, send, receive, going)
    by_expert = _by_expert(table).to(rows.device)
    by_source = _inverse(by_expert)
    rows = compute(_reorder(rows, by_expert, by_source), [sum(column) for column in zip(*table, strict=True)])
    return _cross(_reorder(rows, by_source, by_expert), exchange, receive, send, coming)


def _cross(rows: Tensor, exchange: Exchange, send: list[int], receive: list[int], meanwhile: Meanwhile) -> Tensor:
    if not meanwhile:
        return swap(rows, exchange, send, receive)
    crossing = Crossing(exchange, send, receive)
    token = crossing.depart(rows)
    _run(meanwhile)
    return crossing.arrive(token)


def _run(calls: Meanwhile) -> None:
    for call in calls:
        call()


def sort_routes(experts: Tensor, kept: Tensor | None, num_experts: int) -> tuple[Tensor, list[int]]:
    """The kept routes in the order of their experts, and the number of routes per expert.

    Without values (a dry run on fake tensors or on meta), all routes are kept and the load is even.
    """
    if without_values(experts):
        return torch.arange(experts.numel(), device=experts.device), even_shares(experts.numel(), num_experts)
    flat = experts.reshape(-1)
    if kept is not None:
        flat = flat.masked_fill(~kept.reshape(-1), num_experts)  # sorts after all experts
    counts = torch.bincount(flat, minlength=num_experts + 1).tolist()
    if len(counts) > num_experts + 1:
        raise ValueError(f"a router chose expert {len(counts) - 1} of {num_experts}")
    dropped = counts.pop()
    order = flat.argsort(stable=True)
    return order[: len(flat) - dropped], counts


def _by_expert(table: Sequence[Sequence[int]]) -> Tensor:
    """The permutation from the order (source rank, expert) to the order (expert, source rank)."""
    starts = list(itertools.accumulate((n for row in table for n in row), initial=0))
    own = len(table[0])
    places = [source * own + expert for expert in range(own) for source in range(len(table))]
    return torch.cat([torch.arange(starts[place], starts[place + 1]) for place in places])


def _inverse(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


def _per_route(rows: Tensor, order: Tensor, num_tokens: int, k: int) -> Tensor:
    """[T, k, d]: each route's row; zeros for routes that are not in `order`."""
    if len(order) == num_tokens * k:
        return rows.index_select(0, _inverse(order)).view(num_tokens, k, rows.shape[1])
    full = rows.new_zeros(num_tokens * k, rows.shape[1])
    full[order] = rows
    return full.view(num_tokens, k, rows.shape[1])


def _spread(x: Tensor, order: Tensor, k: int) -> Tensor:
    """The sorted rows of tokens [T, d]. Backward: the sum over each token's routes."""
    tokens, num_tokens = order if k == 1 else order // k, len(x)

    def of_tokens(grad: Tensor) -> Tensor:
        per_route = _per_route(grad, order, num_tokens, k)
        return per_route[:, 0] if k == 1 else per_route.sum(1, dtype=_sums(grad)).to(grad.dtype)

    return dual(x, lambda x: x.index_select(0, tokens), of_tokens)


def _reorder(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """rows[order], for a permutation."""
    return dual(rows, lambda rows: rows.index_select(0, order), lambda grad: grad.index_select(0, inverse))


class _Combine(torch.autograd.Function):
    """The sum of each token's rows times their weights [T, k], in fp32."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, order)
        per_route = _per_route(rows, order, *weights.shape).to(_sums(rows))
        weights = weights.to(per_route.dtype)
        if weights.shape[1] == 1:
            return (per_route[:, 0] * weights).to(rows.dtype)
        with without_autocast(rows.device):
            return torch.bmm(weights[:, None], per_route)[:, 0].to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, weights, order = ctx.saved_tensors
        num_tokens, k = weights.shape
        grads = grad.index_select(0, order if k == 1 else order // k).to(_sums(rows))
        own = weights.reshape(-1).index_select(0, order).to(grads.dtype)
        of_weights = grads.new_zeros(num_tokens * k)
        of_weights[order] = (grads * rows).sum(1)
        return (grads * own[:, None]).to(rows.dtype), of_weights.view(num_tokens, k).to(weights.dtype), None


def _sums(x: Tensor) -> torch.dtype:
    """The dtype in which values of x are summed."""
    return torch.promote_types(x.dtype, torch.float32)

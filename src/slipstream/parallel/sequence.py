"""Sequence parallelism: each rank of an axis holds a share of every sequence.

Ulysses (arXiv:2309.14509): one all-to-all turns shares of the sequence with all heads into the whole sequence with a share of
the heads, attention runs on the whole sequence, and another all-to-all turns the outputs back.

Shapes: b sequences, h query heads, s tokens of one rank, d features per head, P ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.parallel.exchange import Exchange, dual, even_shares, leave, swap
from slipstream.world.mesh import nearest_divisor


class Heads(NamedTuple):
    """The heads of one rank. A key head serves `len(queries) / len(keys)` consecutive query heads."""

    queries: range
    keys: list[int]


def deal_heads(query_heads: int, key_heads: int, size: int, groups: int | None = None) -> list[Heads]:
    """Distribute attention heads over `size` ranks; shares differ by at most one key head.

    With fewer key heads than ranks, shares differ by at most one query head, and each rank that needs a key head gets it.
    groups: the number of key heads before they were repeated; their query heads stay together.
    Raises ValueError if there are fewer query heads than ranks, if the key heads do not divide the query heads, or groups these.
    """
    groups = groups or key_heads
    if groups < 1 or key_heads % groups:
        raise ValueError(f"num_kv_heads {groups} must divide the {key_heads} heads of the key")
    if query_heads % key_heads:
        raise ValueError(
            f"{key_heads} key heads do not divide {query_heads} query heads; repeat keys until they do, as with grouped queries"
        )
    if query_heads < size:
        raise ValueError(
            f"{query_heads} attention heads are fewer than {size} sequence ranks; use sequence_parallel_size "
            f"{nearest_divisor(size, query_heads)}, or ring attention, which unmodified models of transformers then get"
        )
    group = query_heads // key_heads
    unit = query_heads // groups if groups >= size else 1
    dealt, start = [], 0
    for count in even_shares(query_heads // unit, size):
        queries = range(start, start + count * unit)
        keys = [i // group for i in queries]
        distinct = sorted(set(keys))
        uses = {keys.count(key) for key in distinct}
        dealt.append(Heads(queries, distinct if len(uses) == 1 else keys))  # unequal: one key per query
        start = queries.stop
    return dealt


def ulysses_attention(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    exchange: Exchange,
    groups: int | None = None,
) -> Tensor:
    """Return attention over the whole sequence for this rank's tokens, [b, h, s, d].

    query [b, h, s, d], key and value [b, key heads, s, d]: this rank's tokens, equally many on each rank. `attend` is called with
    this rank's heads of the whole sequence, [b, heads, P s, d], and returns the shape of its query. groups: as in `deal_heads`.
    """
    axis = exchange.axis
    if axis.size == 1:
        return attend(query, key, value)
    b, _, s, d = query.shape
    exchange.agree("attention over shares of {} x {} tokens", query, b, s)
    dealt = deal_heads(query.shape[1], key.shape[1], axis.size, groups)
    parts = [
        torch.cat([query[:, h.queries.start : h.queries.stop], key[:, h.keys], value[:, h.keys]], 1).reshape(-1, d) for h in dealt
    ]
    own = dealt[axis.index]
    counts = [len(own.queries), len(own.keys), len(own.keys)]
    send = [len(part) for part in parts]
    rows = swap(torch.cat(parts), exchange, send, [sum(counts) * b * s] * axis.size)
    whole = rows.view(axis.size, b, sum(counts), s, d).permute(1, 2, 0, 3, 4).reshape(b, sum(counts), -1, d)
    out = attend(*whole.split(counts, 1))
    sent = out.unflatten(2, (axis.size, s)).permute(2, 0, 1, 3, 4).reshape(-1, d)
    receive = [len(heads.queries) * b * s for heads in dealt]
    back = swap(sent, exchange, [counts[0] * b * s] * axis.size, receive)
    return torch.cat([part.view(b, -1, s, d) for part in back.split(receive)], 1)


def sequence_mean(total: Tensor, count: Tensor, exchange: Exchange, divisor: Tensor | int | None = None) -> Tensor:
    """Return the mean loss over all tokens of the whole sequence, the same on each rank, in the dtype of `total`.

    total    the sum of this rank's token losses; 0 times the output on a rank without counted tokens, so that it joins the backward
    count    the number of this rank's counted tokens
    divisor  of the sum of all ranks' losses, instead of the number of their counted tokens

    The engine averages gradients over data and sequence ranks, while this mean sums over sequence ranks, so the backward sums the
    gradients of all ranks' equal losses: DeepSpeed's recipe averages these losses, and weighs each by its rank's tokens. Without
    any counted token, the loss is 0.
    """
    sums = exchange.sum(torch.stack([total.detach().double(), count.double()]))  # fp64: bf16 has no exact counts above 256
    tokens = sums[1].clamp(min=1) if divisor is None else divisor
    return dual(total, lambda x: (sums[0] / tokens).to(x), lambda grad: (leave(grad.double(), exchange) / tokens).to(grad))

"""Paged attention: reads keys and values through block tables, for decode and prefill.

Two kernels. `_attend` computes softmax attention of a *tile* (rows of one request) and a kv head over one range of positions
(tiles.py): weighted values, maximum and sum of weights. `_combine` adds the ranges of each row and head in order. For heads wider
than a tile can be (latent attention), each program computes all scores, and a chunk of the values' features.

Lanes: the right-hand columns of a tile: GROUP query heads (padded to a power of two) for each of its rows.
Suffixes: S positions, D features of a head, L lanes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.ops.triton.tiles import LEAST, multiply, num_ranges, range_of, range_start

_POSITIONS = tl.constexpr(64)  # per step: the height of a matrix instruction
_PROGRAMS = 256
_WIDEST, _CHUNK = {2: 256, 4: 128}, 128  # features of a head that one program can hold, by bytes per number; features of a chunk


class Tiles(NamedTuple):
    """The tiles of a batch. Tensors are int32, on the device."""

    row: Tensor  # [tiles], first row
    length: Tensor  # [tiles], number of rows: at most lanes / GROUP; 0: an empty tile
    table: Tensor  # [tiles], index in `tables` of the first block of the tile's request
    tables: Tensor  # [any], block numbers
    lanes: int
    context: int  # upper bound of all keys' positions, exclusive


def padded_group(num_heads: int, num_kv_heads: int) -> int:
    """Lanes per row."""
    return triton.next_power_of_2(num_heads // num_kv_heads)


@triton.jit(do_not_specialize=["num_ranges"])
def _attend(
    q,  # [rows, KV_HEADS * GROUP, DIM]
    keys,  # [blocks, BLOCK_SIZE, KV_HEADS, DIM]
    values,
    positions,  # [rows]
    stops,  # [rows]: the first position that a row does not see
    slopes,  # fp32 [KV_HEADS * GROUP], or None
    tile_row,
    tile_length,
    tile_table,
    tables,
    sums,  # fp32 [rows, KV_HEADS * GROUP, num_ranges, DIM]
    stats,  # fp32 [rows, KV_HEADS * GROUP, num_ranges, 2]: maximum, sum of weights
    num_ranges,
    scale,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LANES: tl.constexpr,
):
    chunks: tl.constexpr = (DIM + BLOCK_DIM - 1) // BLOCK_DIM
    tile, head, chunk = tl.program_id(0), tl.program_id(1) // chunks, tl.program_id(1) % chunks
    row, length = tl.load(tile_row + tile), tl.load(tile_length + tile)
    table = tables + tl.load(tile_table + tile)
    first = tl.load(positions + row)
    stop = tl.load(stops + row + tl.maximum(length - 1, 0))
    if WINDOW > 0:
        stop = tl.minimum(stop, first + length - 1 + WINDOW)
    lane = tl.arange(0, LANES)
    query = lane // PADDED
    active = (query < length) & (lane % PADDED < GROUP)
    query_position = first + query
    query_stop = tl.load(stops + row + query, mask=active, other=0)
    d = tl.arange(0, BLOCK_DIM)
    line = (row + query).to(tl.int64) * (KV_HEADS * GROUP) + head * GROUP + lane % PADDED  # of [rows, heads]
    of_q = q + line[None, :] * DIM + d[:, None]
    q_DL = tl.load(of_q, mask=active[None, :] & (d < DIM)[:, None], other=0.0)
    own = chunk * BLOCK_DIM + d  # of the values' features
    if slopes is not None:
        slope = tl.load(slopes + head * GROUP + lane % PADDED, mask=active, other=0.0)
    begin = 0
    if WINDOW > 0:
        begin = range_of(tl.maximum(first - WINDOW + 1, 0))
    end = tl.where(length > 0, range_of(stop - 1) + 1, 0)
    for part in range(begin + tl.program_id(2), end, tl.num_programs(2)):
        running_max = tl.full((LANES,), LEAST, tl.float32)
        weight = tl.zeros((LANES,), tl.float32)
        sum_DL = tl.zeros((BLOCK_DIM, LANES), tl.float32)
        for start in range(range_start(part), tl.minimum(range_start(part + 1), stop), _POSITIONS):
            position = start + tl.arange(0, _POSITIONS)
            position_mask = position < stop
            block = tl.load(table + position // BLOCK_SIZE, mask=position_mask, other=0)
            at = ((block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE) * KV_HEADS + head) * DIM
            score_SL = tl.zeros((_POSITIONS, LANES), tl.float32)
            for begin_d in range(0, DIM, BLOCK_DIM):
                if chunks > 1:
                    q_DL = tl.load(of_q + begin_d, mask=active[None, :] & (begin_d + d < DIM)[:, None], other=0.0)
                mask = position_mask[:, None] & (begin_d + d < DIM)[None, :]
                k_SD = tl.load(keys + at[:, None] + begin_d + d[None, :], mask=mask, other=0.0)
                score_SL = multiply(k_SD.to(q.dtype.element_ty), q_DL, score_SL)
            score_SL *= scale
            if CAP > 0:
                score_SL = CAP * (2 * tl.sigmoid(score_SL * (2 / CAP)) - 1)  # tanh
            ahead = position[:, None] - query_position[None, :]
            if slopes is not None:
                score_SL += ahead.to(tl.float32) * slope[None, :]
            seen = position[:, None] < query_stop[None, :]
            if WINDOW > 0:
                seen &= (ahead > -WINDOW) & (ahead < WINDOW)
            score_SL = tl.where(seen, score_SL, float("-inf"))
            new_max = tl.maximum(running_max, tl.max(score_SL, 0))
            weight_SL = tl.exp(score_SL - new_max[None, :])
            shrink = tl.exp(running_max - new_max)
            weight = weight * shrink + tl.sum(weight_SL, 0)
            mask = position_mask[:, None] & (own < DIM)[None, :]
            v_SD = tl.load(values + at[:, None] + own[None, :], mask=mask, other=0.0).to(q.dtype.element_ty)
            # 0 times NaN is NaN: only queries that see a non-finite value may get NaN ([Note: Values that are not finite]).
            finite_SD = v_SD - v_SD == 0
            nonfinite_S = tl.min(finite_SD.to(tl.int32), 1) == 0
            v_SD = tl.where(finite_SD, v_SD, 0.0)
            weight_SL = tl.where(seen & nonfinite_S[:, None], float("nan"), weight_SL)
            sum_DL = multiply(tl.trans(v_SD), weight_SL.to(q.dtype.element_ty), sum_DL * shrink[None, :])
            running_max = new_max
        to = line * num_ranges + part
        tl.store(stats + to * 2, running_max, mask=active)
        tl.store(stats + to * 2 + 1, weight, mask=active)
        tl.store(sums + to[None, :] * DIM + own[:, None], sum_DL, mask=active[None, :] & (own < DIM)[:, None])


@triton.jit(do_not_specialize=["num_ranges"])
def _combine(
    sums,
    stats,
    positions,
    stops,
    out,
    num_ranges,
    WINDOW: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    row = tl.program_id(0)
    line = row.to(tl.int64) * HEADS + tl.program_id(1)
    position, stop = tl.load(positions + row), tl.load(stops + row)
    d = tl.arange(0, BLOCK_DIM)
    running_max, weight = tl.full([], LEAST, tl.float32), tl.full([], 0.0, tl.float32)
    total = tl.zeros((BLOCK_DIM,), tl.float32)
    begin = 0
    if WINDOW > 0:
        begin = range_of(tl.maximum(position - WINDOW + 1, 0))
        stop = tl.minimum(stop, position + WINDOW)
    for part in range(begin, range_of(stop - 1) + 1):
        at = line * num_ranges + part
        range_max = tl.load(stats + at * 2)
        new_max = tl.maximum(running_max, range_max)
        shrink, grow = tl.exp(running_max - new_max), tl.exp(range_max - new_max)
        weight = weight * shrink + tl.load(stats + at * 2 + 1) * grow
        total = total * shrink + tl.load(sums + at * DIM + d, mask=d < DIM, other=0.0) * grow
        running_max = new_max
    tl.store(out + line * DIM + d, total / weight, mask=d < DIM)


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    stops: Tensor,
    tiles: Tiles,
    *,
    scale: float,
    cap: float,
    window: int,
    slopes: Tensor | None = None,
) -> Tensor:
    """Attention of q [rows, heads, dim] over cached keys and values [blocks, block_size, kv_heads, dim]. A row sees the keys before
    its stop and, with a window, within that distance of its position. slopes: ALiBi's, one per head.

    Returns [rows, heads * dim] in q's dtype."""
    num_rows, num_heads, dim = q.shape
    block_size, kv_heads = keys.shape[1:3]
    ranges, num_tiles, width = num_ranges(tiles.context), len(tiles.row), max(16, triton.next_power_of_2(dim))
    block_dim = width if width <= _WIDEST[q.itemsize] else _CHUNK
    sums = q.new_empty(num_rows, num_heads, ranges, dim, dtype=torch.float32)
    stats = q.new_empty(num_rows, num_heads, ranges, 2, dtype=torch.float32)
    programs = min(ranges, max(1, _PROGRAMS // (num_tiles * kv_heads)))  # programs that share a tile's ranges
    shape: dict[str, Any] = {"WINDOW": window, "DIM": dim, "enable_fp_fusion": False}
    _attend[(num_tiles, kv_heads * -(-dim // block_dim), programs)](
        q,
        keys,
        values,
        positions,
        stops,
        slopes,
        *tiles[:4],
        sums,
        stats,
        ranges,
        scale,
        CAP=cap,
        KV_HEADS=kv_heads,
        GROUP=num_heads // kv_heads,
        PADDED=padded_group(num_heads, kv_heads),
        BLOCK_DIM=block_dim,
        BLOCK_SIZE=block_size,
        LANES=tiles.lanes,
        num_warps=4,
        num_stages=2 if width * keys.itemsize <= 256 else 1,
        **shape,
    )
    out = torch.empty(num_rows, num_heads * dim, dtype=q.dtype, device=q.device)
    heads = {"HEADS": num_heads, "BLOCK_DIM": width, "num_warps": 1}
    _combine[(num_rows, num_heads)](sums, stats, positions, stops, out, ranges, **heads, **shape)
    return out

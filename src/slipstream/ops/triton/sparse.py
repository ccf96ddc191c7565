"""Block-sparse attention, forward and backward, as `csrc/sparse.c` computes it on CPUs. `ops.block_sparse` calls it.

A program of `_forward` and `_query_grads` handles ROWS neighboring queries of a head, and walks the keys that its tile of the
layout lists in panels of 16, KEYS at a time, whatever the block size. A program of `_key_grads` handles ROWS keys, and walks the
queries of all heads of its group. So every element has one writer, and results are the same in each run. Products are in the
inputs' dtype (fp32 by three products of TF32), sums in fp32; the backward recomputes probabilities from one log-sum-exp per query
(Dao et al., arXiv 2205.14135).

Heads are passed as (array, stride of the batch, of heads, of rows), terms added to scores as (bias, its strides of the batch and of
heads, key_bias, spans), where arrays may be None. A score of -1e30 or less counts as masked, as on CPUs.
Suffixes: Q queries, K keys, D features of a head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.ops.triton.tiles import INTERPRETED, LEAST, kept, multiply

_PANEL = tl.constexpr(16)
_BYTES = 128  # of a head's features: 64 in bf16. Wider heads are processed in parts: few registers spill, shared memory suffices


class Scores(NamedTuple):
    """How scores are computed from products. Arrays are those of `block_sparse_attention`, on the device."""

    bias: Tensor | None  # fp32 [B or 1, H, L, L]
    key_bias: Tensor | None  # fp32 [B, L]
    spans: Tensor | None  # int32 [B, L, 2]
    tiles: Tensor  # int32 [2 * layouts * tiles, 4] from `BlockLayout.on`: of queries, then of keys
    panels: Tensor  # int32
    num_layouts: int
    scale: float
    least: int  # the least 16-bit number that dropout keeps
    seed: int
    causal: bool


@triton.jit
def _product(left, right, total):
    """total + left @ right. "ieee" does not use tensor cores: its kernels spill thousands of registers."""
    if INTERPRETED:  # noqa: SIM108  (a compiled kernel has one of them)
        total = multiply(left, right, total)
    else:
        total = tl.dot(left, right, total, input_precision="tf32x3")
    return total


@triton.jit
def _rows_of(x, batch, head, row, d):
    """Pointers to a head's rows, [rows, features]."""
    return x[0] + batch.to(tl.int64) * x[1] + head.to(tl.int64) * x[2] + row.to(tl.int64)[:, None] * x[3] + d[None, :]


@triton.jit
def _tile_of(tiles, head, start, num_tiles, PER_HEAD: tl.constexpr, TILE: tl.constexpr):
    """Begin and end, in `panels`, of what the rows from `start` on attend to."""
    tile = start // TILE
    if PER_HEAD:
        tile += head * num_tiles
    return tl.load(tiles + 4 * tile + 2), tl.load(tiles + 4 * tile + 3)


@triton.jit
def _listed(panels, begin, end, at, STEP: tl.constexpr):
    """The positions of tokens `at` to `at` + STEP in a tile's list, 0 past its end; and a mask of the valid ones."""
    i = at + tl.arange(0, STEP)
    inside = i < (end - begin) * _PANEL
    panel = tl.load(panels + begin + i // _PANEL, mask=inside, other=0)
    return tl.where(inside, panel * _PANEL + i % _PANEL, 0), inside


@triton.jit
def _scored(score, added, batch, head, query, key, inside, length, CAUSAL: tl.constexpr):
    """The scores with biases, and -inf where a query does not see a key. query, key, inside: broadcast to the scores."""
    if added[0] is not None:
        start = batch.to(tl.int64) * added[1] + head.to(tl.int64) * added[2]
        score += tl.load(added[0] + start + query.to(tl.int64) * length + key)
    if added[3] is not None:
        score += tl.load(added[3] + batch * length + key)
    if added[4] is not None:
        span = added[4] + 2 * (batch * length + query)
        inside = inside & (key >= tl.load(span)) & (key < tl.load(span + 1))
    if CAUSAL:
        inside = inside & (key <= query)
    return tl.where(inside, score, float("-inf"))


@triton.jit
def _kept(seed, batch, head, num_heads, query, key, least):
    row = tl.mul((batch * num_heads + head).to(tl.uint32), 0x9E3779B9, sanitize_overflow=False)
    return kept(seed, tl.add(row, query.to(tl.uint32), sanitize_overflow=False), key, least)


@triton.jit(do_not_specialize=["seed", "least"])
def _forward(
    q, k, v, out, lse, added, tiles, panels, length, seed, least, scale,
    GROUP: tl.constexpr, PER_HEAD: tl.constexpr, CAUSAL: tl.constexpr, DROPS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    start, head, batch = tl.program_id(0) * ROWS, tl.program_id(1), tl.program_id(2)
    query, d = start + tl.arange(0, ROWS), tl.arange(0, BLOCK_DIM)
    d_mask = (d < DIM)[None, :]
    q_QD = tl.load(_rows_of(q, batch, head, query, d), mask=d_mask, other=0.0)
    begin, end = _tile_of(tiles, head, start, length // TILE, PER_HEAD, TILE)
    running_max = tl.full((ROWS,), LEAST, tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    sum_QD = tl.zeros((ROWS, BLOCK_DIM), tl.float32)
    for at in range(0, (end - begin) * _PANEL, KEYS):
        key, inside = _listed(panels, begin, end, at, KEYS)
        k_KD = tl.load(_rows_of(k, batch, head // GROUP, key, d), mask=d_mask, other=0.0)
        score_QK = _product(q_QD, tl.trans(k_KD), tl.zeros((ROWS, KEYS), tl.float32)) * scale
        score_QK = _scored(score_QK, added, batch, head, query[:, None], key[None, :], inside[None, :], length, CAUSAL)
        new_max = tl.maximum(running_max, tl.max(score_QK, 1))
        weight_QK = tl.exp(score_QK - new_max[:, None])
        shrink = tl.exp(running_max - new_max)
        weight = weight * shrink + tl.sum(weight_QK, 1)
        if DROPS:
            weight_QK *= _kept(seed, batch, head, tl.num_programs(1), query[:, None], key[None, :], least)
        v_KD = tl.load(_rows_of(v, batch, head // GROUP, key, d), mask=d_mask, other=0.0)
        sum_QD = _product(weight_QK.to(v_KD.dtype), v_KD, sum_QD * shrink[:, None])
        running_max = new_max
    seen = weight > 0
    line = (batch * tl.num_programs(1) + head).to(tl.int64) * length + query
    tl.store(lse + line, tl.where(seen, running_max + tl.log(tl.where(seen, weight, 1.0)), float("inf")))
    out_QD = sum_QD / tl.where(seen, weight, 1.0)[:, None]
    tl.store(_rows_of(out, batch, head, query, d), out_QD.to(q_QD.dtype), mask=d_mask)


@triton.jit(do_not_specialize=["seed", "least", "first"])
def _query_grads(  # also writes `delta` [B, H, L], the sum of each row of gradients times outputs
    q, k, v, out, grad, dq, lse, delta, bias_grad, grad_batch, first, added, tiles, panels, length, seed, least, scale,
    GROUP: tl.constexpr, PER_HEAD: tl.constexpr, CAUSAL: tl.constexpr, DROPS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    start, head, batch = tl.program_id(0) * ROWS, tl.program_id(1), first + tl.program_id(2)
    query, d = start + tl.arange(0, ROWS), tl.arange(0, BLOCK_DIM)
    d_mask = (d < DIM)[None, :]
    q_QD = tl.load(_rows_of(q, batch, head, query, d), mask=d_mask, other=0.0)
    grad_QD = tl.load(_rows_of(grad, batch, head, query, d), mask=d_mask, other=0.0)
    out_QD = tl.load(_rows_of(out, batch, head, query, d), mask=d_mask, other=0.0)
    line = (batch * tl.num_programs(1) + head).to(tl.int64) * length + query
    lse_Q = tl.load(lse + line)
    delta_Q = tl.sum(grad_QD.to(tl.float32) * out_QD.to(tl.float32), 1)
    tl.store(delta + line, delta_Q)
    begin, end = _tile_of(tiles, head, start, length // TILE, PER_HEAD, TILE)
    sum_QD = tl.zeros((ROWS, BLOCK_DIM), tl.float32)
    for at in range(0, (end - begin) * _PANEL, KEYS):
        key, inside = _listed(panels, begin, end, at, KEYS)
        k_KD = tl.load(_rows_of(k, batch, head // GROUP, key, d), mask=d_mask, other=0.0)
        score_QK = _product(q_QD, tl.trans(k_KD), tl.zeros((ROWS, KEYS), tl.float32)) * scale
        score_QK = _scored(score_QK, added, batch, head, query[:, None], key[None, :], inside[None, :], length, CAUSAL)
        share_QK = tl.exp(score_QK - lse_Q[:, None])
        v_KD = tl.load(_rows_of(v, batch, head // GROUP, key, d), mask=d_mask, other=0.0)
        d_share_QK = _product(grad_QD, tl.trans(v_KD), tl.zeros((ROWS, KEYS), tl.float32))
        if DROPS:
            d_share_QK *= _kept(seed, batch, head, tl.num_programs(1), query[:, None], key[None, :], least)
        d_score_QK = share_QK * (d_share_QK - delta_Q[:, None])
        if bias_grad is not None:  # no other program of this launch has these scores
            to = bias_grad + batch.to(tl.int64) * grad_batch + head.to(tl.int64) * length * length
            to += query.to(tl.int64)[:, None] * length + key[None, :]
            tl.store(to, tl.load(to, mask=inside[None, :], other=0.0) + d_score_QK, mask=inside[None, :])
        sum_QD = _product(d_score_QK.to(k_KD.dtype), k_KD, sum_QD)
    tl.store(_rows_of(dq, batch, head, query, d), (sum_QD * scale).to(q_QD.dtype), mask=d_mask)


@triton.jit(do_not_specialize=["seed", "least"])
def _key_grads(
    q, k, v, grad, dk, dv, lse, delta, added, tiles, panels, length, seed, least, scale,
    GROUP: tl.constexpr, PER_HEAD: tl.constexpr, CAUSAL: tl.constexpr, DROPS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Handles ROWS keys, with KEYS queries at a time: the other kernels' scores, transposed."""
    start, kv_head, batch = tl.program_id(0) * ROWS, tl.program_id(1), tl.program_id(2)
    key, d = start + tl.arange(0, ROWS), tl.arange(0, BLOCK_DIM)
    d_mask = (d < DIM)[None, :]
    k_KD = tl.load(_rows_of(k, batch, kv_head, key, d), mask=d_mask, other=0.0)
    v_KD = tl.load(_rows_of(v, batch, kv_head, key, d), mask=d_mask, other=0.0)
    dk_KD = tl.zeros((ROWS, BLOCK_DIM), tl.float32)
    dv_KD = tl.zeros((ROWS, BLOCK_DIM), tl.float32)
    num_heads = tl.num_programs(1) * GROUP
    for member in range(GROUP):
        head = kv_head * GROUP + member
        begin, end = _tile_of(tiles, head, start, length // TILE, PER_HEAD, TILE)
        for at in range(0, (end - begin) * _PANEL, KEYS):
            query, inside = _listed(panels, begin, end, at, KEYS)
            line = (batch * num_heads + head).to(tl.int64) * length + query
            q_QD = tl.load(_rows_of(q, batch, head, query, d), mask=d_mask, other=0.0)
            score_KQ = _product(k_KD, tl.trans(q_QD), tl.zeros((ROWS, KEYS), tl.float32)) * scale
            score_KQ = _scored(score_KQ, added, batch, head, query[None, :], key[:, None], inside[None, :], length, CAUSAL)
            share_KQ = tl.exp(score_KQ - tl.load(lse + line)[None, :])
            grad_QD = tl.load(_rows_of(grad, batch, head, query, d), mask=d_mask, other=0.0)
            d_share_KQ = _product(v_KD, tl.trans(grad_QD), tl.zeros((ROWS, KEYS), tl.float32))
            if DROPS:
                keep_KQ = _kept(seed, batch, head, num_heads, query[None, :], key[:, None], least)
                d_share_KQ *= keep_KQ
                dv_KD = _product((share_KQ * keep_KQ).to(v_KD.dtype), grad_QD, dv_KD)
            else:
                dv_KD = _product(share_KQ.to(v_KD.dtype), grad_QD, dv_KD)
            d_score_KQ = share_KQ * (d_share_KQ - tl.load(delta + line)[None, :])
            dk_KD = _product(d_score_KQ.to(k_KD.dtype), q_QD, dk_KD)
    tl.store(_rows_of(dk, batch, kv_head, key, d), (dk_KD * scale).to(k_KD.dtype), mask=d_mask)
    tl.store(_rows_of(dv, batch, kv_head, key, d), dv_KD.to(k_KD.dtype), mask=d_mask)


def _heads(x: Tensor) -> tuple[Tensor, int, int, int]:
    assert x.stride(3) == 1, x.stride()
    return x, x.stride(0), x.stride(1), x.stride(2)


def _options(q: Tensor, k: Tensor, s: Scores, *, backward: bool) -> dict[str, int | bool]:
    """A launch's constants, as compiled for Hopper; chosen by the number of spilled registers."""
    block_dim, tiles = max(16, triton.next_power_of_2(q.shape[3])), len(s.tiles) // (2 * s.num_layouts)
    tile, wide = q.shape[2] // tiles, block_dim * q.itemsize // _BYTES
    rows = min(tile, 64 if wide <= 2 or q.itemsize == 2 else 128 // wide)
    return {
        "GROUP": q.shape[1] // k.shape[1],
        "PER_HEAD": s.num_layouts > 1,
        "CAUSAL": s.causal,
        "DROPS": s.least > 0,
        "DIM": q.shape[3],
        "BLOCK_DIM": block_dim,
        "TILE": tile,
        "ROWS": rows,
        "KEYS": 64 if wide <= 2 and (rows == 16 or not backward) else 32,
        "num_warps": (4 if rows == 64 else 2) * (2 if wide > 2 else 1),
        "num_stages": 2 if block_dim <= (64 if backward else 128) and q.itemsize == 2 else 1,
        "enable_fp_fusion": True,
    }


def _batch_stride(x: Tensor | None) -> int:
    return 0 if x is None or len(x) == 1 else x.stride(0)


def _arguments(length: int, s: Scores, tiles: Tensor) -> tuple[Any, ...]:
    """The arguments from `added` to `scale`."""
    added = (s.bias, _batch_stride(s.bias), 0 if s.bias is None else s.bias.stride(1), s.key_bias, s.spans)
    return added, tiles, s.panels, length, s.seed, s.least, s.scale


def forward(q: Tensor, k: Tensor, v: Tensor, s: Scores) -> tuple[Tensor, Tensor]:
    """q: [B, H, L, D]; k, v: [B, KV heads, L, D]; features without gaps. Returns the output, and log-sum-exps fp32 [B, H, L], +inf
    for a query without keys."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    batch, heads, length, _ = q.shape
    options = _options(q, k, s, backward=False)
    with torch.cuda.device_of(q):
        _forward[length // options["ROWS"], heads, batch](
            *map(_heads, (q, k, v, out)), lse, *_arguments(length, s, s.tiles), **options
        )
    return out, lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, s: Scores, bias_grad: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. bias_grad: fp32 [B or 1, H, L, L], to which the bias's gradient is added."""
    dq, dk, dv, delta = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(lse)
    batch, heads, length, _ = q.shape
    options = _options(q, k, s, backward=True)
    tiles, of_keys = length // options["ROWS"], s.tiles[len(s.tiles) // 2 :]
    # Sequences that share a bias add to its gradient in turn.
    turns = batch if bias_grad is not None and len(bias_grad) < batch else 1
    with torch.cuda.device_of(q):
        for first in range(turns):
            _query_grads[tiles, heads, batch // turns](
                *map(_heads, (q, k, v, out, grad, dq)),
                lse,
                delta,
                bias_grad,
                _batch_stride(bias_grad),
                first,
                *_arguments(length, s, s.tiles),
                **options,
            )
        _key_grads[tiles, k.shape[1], batch](
            *map(_heads, (q, k, v, grad, dk, dv)), lse, delta, *_arguments(length, s, of_keys), **options
        )
    return dq, dk, dv

"""Row-wise kernels between the products: norms, rotary embedding, gated activation. Sums are in fp32.

They read products as planes (linear.py) and add the planes while reading.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.ops.triton.tiles import sum_planes


@triton.jit
def _normalized(x, weight, num_features, eps):
    return x * tl.rsqrt(tl.sum(x * x, 0) / num_features + eps) * weight


@triton.jit
def _add_norm(x, planes, post, weight, out, num_features, plane_stride, eps, PLANES: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * num_features
    feature = tl.arange(0, BLOCK)
    mask = feature < num_features
    at = row + feature
    wide = tl.load(x + at, mask=mask, other=0.0)
    if planes is not None:
        added = sum_planes(planes + at, mask, plane_stride, PLANES)
        if post is not None:
            added = _normalized(added, tl.load(post + feature, mask=mask, other=0.0), num_features, eps)
        wide += added
        tl.store(x + at, wide, mask=mask)
    tl.store(out + at, _normalized(wide, tl.load(weight + feature, mask=mask, other=0.0), num_features, eps), mask=mask)


def add_norm(x: Tensor, planes: Tensor | None, post: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x += RMSNorm(planes) with weights `post`, or x += planes; then returns RMSNorm(x) with `weight`, [rows, features] in `dtype`.

    x: fp32 [rows, features], updated in place. Weights: fp32, with the offset that some norms add to them."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    block = triton.next_power_of_2(x.shape[1])
    _add_norm[(len(x),)](
        x,
        planes,
        post,
        weight,
        out,
        x.shape[1],
        0 if planes is None else planes.stride(0),
        eps,
        PLANES=0 if planes is None else len(planes),
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
        enable_fp_fusion=False,
    )
    return out


@triton.jit
def _place(
    planes,  # of q, k and v, concatenated: [planes, rows, (HEADS + 2 * KV_HEADS) * DIM]
    norms,  # fp32 [2, DIM], of q and k; or None
    cosine,  # fp32 [positions, HALF]; None: no rotation
    sine,
    positions,
    slots,  # -1: a row without a request
    q,
    keys,
    values,
    plane_stride,
    eps,
    PLANES: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    mask = i < DIM
    begin = planes + (row * (HEADS + 2 * KV_HEADS) + head) * DIM
    x = sum_planes(begin + i, mask, plane_stride, PLANES)
    if head < HEADS + KV_HEADS:
        if norms is not None:
            norm = norms + (head >= HEADS).to(tl.int32) * DIM
            factor = tl.rsqrt(tl.sum(x * x, 0) / DIM + eps)
            x = x * factor * tl.load(norm + i, mask=mask, other=0.0)
        if cosine is not None:
            other = tl.where(i < HALF, i + HALF, tl.where(i < 2 * HALF, i - HALF, i))
            y = sum_planes(begin + other, mask, plane_stride, PLANES)
            if norms is not None:
                y = y * factor * tl.load(norm + other, mask=mask, other=0.0)
            angle = tl.load(positions + row).to(tl.int64) * HALF + i % HALF
            rotated = i < 2 * HALF
            c, s = tl.load(cosine + angle, mask=rotated, other=1.0), tl.load(sine + angle, mask=rotated, other=0.0)
            x = x * c + tl.where(i < HALF, -y, y) * s
    slot = tl.load(slots + row).to(tl.int64)
    if head < HEADS:
        tl.store(q + (row * HEADS + head) * DIM + i, x, mask=mask)
    elif slot >= 0:
        if head < HEADS + KV_HEADS:
            tl.store(keys + (slot * KV_HEADS + head - HEADS) * DIM + i, x, mask=mask)
        else:
            tl.store(values + (slot * KV_HEADS + head - HEADS - KV_HEADS) * DIM + i, x, mask=mask)


def place(
    planes: Tensor,
    norms: Tensor | None,
    turns: tuple[Tensor, Tensor] | None,
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    num_heads: int,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """Normalize q and k per head, rotate them, and write k and v to `slots` of the cache. Returns q [rows, heads, dim].

    `norms`: fp32 [2, dim], of q and k; `turns`: cosine and sine by position, fp32 [positions, rotary_dim / 2];
    `keys`, `values`: [blocks, block_size, kv_heads, dim]."""
    num_rows, (kv_heads, dim) = planes.shape[1], keys.shape[2:]
    q = torch.empty(num_rows, num_heads, dim, dtype=dtype, device=planes.device)
    cosine, sine = (None, None) if turns is None else turns
    _place[(num_rows, num_heads + 2 * kv_heads)](
        planes,
        norms,
        cosine,
        sine,
        positions,
        slots,
        q,
        keys,
        values,
        planes.stride(0),
        eps,
        PLANES=len(planes),
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        HALF=1 if cosine is None else cosine.shape[1],
        BLOCK=triton.next_power_of_2(dim),
        num_warps=1,
        enable_fp_fusion=False,
    )
    return q


@triton.jit
def _gate(planes, out, size, plane_stride, ACTIVATION: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < size
    x = sum_planes(planes + row * 2 * size + i, mask, plane_stride, PLANES)
    up = sum_planes(planes + row * 2 * size + size + i, mask, plane_stride, PLANES)
    if ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu_tanh":
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # (1 + tanh(z)) / 2 is sigmoid(2 z)
    else:
        x = x * 0.5 * (1 + tl.erf(x * 0.7071067811865476))
    tl.store(out + row * size + i, x * up, mask=mask)


def gate(planes: Tensor, activation: str, dtype: torch.dtype) -> Tensor:
    """activation(first half of each row) * second half: [rows, size] of `dtype`. planes: [planes, rows, 2 * size]."""
    assert activation in ("silu", "gelu_tanh", "gelu"), activation
    num_rows, size = planes.shape[1], planes.shape[2] // 2
    out = torch.empty(num_rows, size, dtype=dtype, device=planes.device)
    _gate[(num_rows, -(-size // 1024))](
        planes,
        out,
        size,
        planes.stride(0),
        ACTIVATION=activation,
        PLANES=len(planes),
        BLOCK=1024,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out

"""Row-wise kernels between the products: norms, rotary embedding, activation of an MLP. Sums are in fp32.

They read products as planes (linear.py) and add the planes while reading.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.ops.fused import ACTIVATIONS
from slipstream.ops.triton.tiles import activated, sum_planes


class Norm(NamedTuple):
    """RMSNorm, or LayerNorm if `centered`."""

    weight: Tensor  # fp32 [features], with the offset that some norms add
    bias: Tensor | None  # fp32 [features]
    eps: float
    centered: bool


class HeadNorms(NamedTuple):
    """The norms of queries and keys."""

    weight: Tensor  # fp32 [heads + kv_heads, dim], of each head
    bias: Tensor | None
    eps: float
    centered: bool
    whole: bool  # over all heads of q together, and all of k; else over each head


@triton.jit
def _moments(x, mask, num_features, eps, CENTERED: tl.constexpr):
    """The number that a norm subtracts from x, and its factor; x is 0 beyond the mask."""
    mean = tl.full([], 0.0, tl.float32)
    if CENTERED:
        mean = tl.sum(x, 0) / num_features
        x = tl.where(mask, x - mean, 0.0)
    return mean, tl.rsqrt(tl.sum(x * x, 0) / num_features + eps)


@triton.jit
def _scaled(x, mean, factor, weight, bias, at, mask):
    x = (x - mean) * factor * tl.load(weight + at, mask=mask, other=0.0)
    if bias is not None:
        x += tl.load(bias + at, mask=mask, other=0.0)
    return x


@triton.jit
def _add_norm(
    x,
    planes,
    post,
    post_bias,
    weight,
    bias,
    out,
    num_features,
    plane_stride,
    eps,
    scale,
    PLANES: tl.constexpr,
    CENTERED: tl.constexpr,
    AFTER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * num_features
    feature = tl.arange(0, BLOCK)
    mask = feature < num_features
    at = row + feature
    wide = tl.load(x + at, mask=mask, other=0.0)
    if planes is not None:
        added = sum_planes(planes + at, mask, plane_stride, PLANES)
        if AFTER:
            added += wide
        if post is not None:
            mean, factor = _moments(added, mask, num_features, eps, CENTERED)
            added = _scaled(added, mean, factor, post, post_bias, feature, mask)
        if AFTER:
            wide = added
        else:
            wide += added * scale
        tl.store(x + at, wide, mask=mask)
    if out is not None:
        if weight is not None:
            mean, factor = _moments(wide, mask, num_features, eps, CENTERED)
            wide = _scaled(wide, mean, factor, weight, bias, feature, mask)
        tl.store(out + at, wide, mask=mask)


def add_norm(
    x: Tensor,
    planes: Tensor | None,
    post: Norm | None,
    norm: Norm | None,
    dtype: torch.dtype | None,
    *,
    scale: float = 1.0,
    after: bool = False,
) -> Tensor:
    """x += scale * post(planes), or x = post(x + planes) if `after`; then returns norm(x), [rows, features] in `dtype` (None: x). A
    norm that is None changes nothing; two norms are of the same kind.

    x: fp32 [rows, features], updated in place."""
    out = None if dtype is None else torch.empty(x.shape, dtype=dtype, device=x.device)
    block, kind = triton.next_power_of_2(x.shape[1]), norm or post
    _add_norm[(len(x),)](
        x,
        planes,
        *((None, None) if post is None else post[:2]),
        *((None, None) if norm is None else norm[:2]),
        out,
        x.shape[1],
        0 if planes is None else planes.stride(0),
        0.0 if kind is None else kind.eps,
        scale,
        PLANES=0 if planes is None else len(planes),
        CENTERED=kind is not None and kind.centered,
        AFTER=after,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
        enable_fp_fusion=False,
    )
    return x if out is None else out


@triton.jit
def _whole_moments(
    planes,  # of q, k and v, concatenated
    out,  # fp32 [rows, 2, 2]: of q and of k, what is subtracted and what is multiplied with
    row_stride,
    plane_stride,
    eps,
    PLANES: tl.constexpr,
    CENTERED: tl.constexpr,
    Q_SIZE: tl.constexpr,
    K_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    size = tl.where(part == 0, Q_SIZE, K_SIZE)
    x = sum_planes(planes + row * row_stride + part * Q_SIZE + i, i < size, plane_stride, PLANES)
    mean, factor = _moments(x, i < size, size, eps, CENTERED)
    tl.store(out + (row * 2 + part) * 2, mean)
    tl.store(out + (row * 2 + part) * 2 + 1, factor)


@triton.jit
def _place(
    planes,  # of q, k and v, concatenated: [planes, rows, (HEADS + 2 * KV_HEADS) * DIM]
    norm,  # fp32 [HEADS + KV_HEADS, DIM], of q and k; or None
    norm_bias,
    moments,  # fp32 [rows, 2, 2] of `_whole_moments`; None: of each head
    cosine,  # fp32 [angles, HALF]; None: no rotation
    sine,
    angles,  # [rows]
    slots,  # -1: a row without a request
    q,
    keys,
    values,
    plane_stride,
    eps,
    PLANES: tl.constexpr,
    CENTERED: tl.constexpr,
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
        if norm is not None:
            if moments is None:
                mean, factor = _moments(x, mask, DIM, eps, CENTERED)
            else:
                at = moments + (row * 2 + (head >= HEADS).to(tl.int32)) * 2
                mean, factor = tl.load(at), tl.load(at + 1)
            x = _scaled(x, mean, factor, norm, norm_bias, head * DIM + i, mask)
        if cosine is not None:
            other = tl.where(i < HALF, i + HALF, tl.where(i < 2 * HALF, i - HALF, i))
            y = sum_planes(begin + other, mask, plane_stride, PLANES)
            if norm is not None:
                y = _scaled(y, mean, factor, norm, norm_bias, head * DIM + other, mask)
            angle = tl.load(angles + row).to(tl.int64) * HALF + i % HALF
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
    norms: HeadNorms | None,
    turns: tuple[Tensor, Tensor] | None,
    angles: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    num_heads: int,
    dtype: torch.dtype,
) -> Tensor:
    """Normalize q and k, rotate them, and write k and v to `slots` of the cache. Returns q [rows, heads, dim].

    `turns`: cosine and sine, fp32 [angles, rotary_dim / 2]; `angles` selects each row's.
    `keys`, `values`: [blocks, block_size, kv_heads, dim]."""
    num_rows, (kv_heads, dim) = planes.shape[1], keys.shape[2:]
    q = torch.empty(num_rows, num_heads, dim, dtype=dtype, device=planes.device)
    cosine, sine = (None, None) if turns is None else turns
    shape = {"PLANES": len(planes), "CENTERED": norms is not None and norms.centered, "enable_fp_fusion": False}
    eps, moments = 0.0 if norms is None else norms.eps, None
    if norms is not None and norms.whole:
        moments = planes.new_empty(num_rows, 2, 2)
        sizes = {"Q_SIZE": num_heads * dim, "K_SIZE": kv_heads * dim, "BLOCK": triton.next_power_of_2(num_heads * dim)}
        _whole_moments[(num_rows, 2)](planes, moments, planes.stride(1), planes.stride(0), eps, num_warps=4, **sizes, **shape)
    _place[(num_rows, num_heads + 2 * kv_heads)](
        planes,
        *((None, None) if norms is None else norms[:2]),
        moments,
        cosine,
        sine,
        angles,
        slots,
        q,
        keys,
        values,
        planes.stride(0),
        eps,
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        HALF=1 if cosine is None else cosine.shape[1],
        BLOCK=triton.next_power_of_2(dim),
        num_warps=1,
        **shape,
    )
    return q


@triton.jit
def _gate(planes, out, size, plane_stride, GATED: tl.constexpr, KIND: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < size
    begin = planes + row * (2 * size if GATED else size) + i
    x = sum_planes(begin, mask, plane_stride, PLANES)
    x, _ = activated(x, KIND)
    if GATED:
        x *= sum_planes(begin + size, mask, plane_stride, PLANES)
    tl.store(out + row * size + i, x, mask=mask)


def gate(planes: Tensor, activation: str, dtype: torch.dtype, *, gated: bool = True) -> Tensor:
    """activation(first half of each row) * second half: [rows, size] in `dtype`. planes: [planes, rows, 2 * size]. For a plain MLP:
    activation(row) of planes [planes, rows, size]."""
    num_rows, size = planes.shape[1], planes.shape[2] // (1 + gated)
    out = torch.empty(num_rows, size, dtype=dtype, device=planes.device)
    _gate[(num_rows, -(-size // 1024))](
        planes,
        out,
        size,
        planes.stride(0),
        GATED=gated,
        KIND=ACTIVATIONS[activation],
        PLANES=len(planes),
        BLOCK=1024,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out

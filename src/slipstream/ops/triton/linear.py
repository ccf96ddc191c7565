"""x @ weight.T for the matrices of a decoder, with few or many rows. See [Note: Batch invariance on CUDA] in `__init__`.

Planes: a result is fp32 [planes, rows, columns]; its sum over planes, in order, is the product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.ops.triton.tiles import multiply

FEW = 128  # up to this many rows fit one tile, so that weights are read once
GROUPS = (32, 64, 128)  # supported int4 group sizes, in features
_COLUMNS = 64  # of a tile for few rows
_PROGRAMS = 256  # enough to saturate a GPU's memory. A constant, because results must not depend on the device's processor count
_SHARED = 96 << 10  # bytes of shared memory for pipelined tiles; every GPU since compute capability 8.0 has them
_LEAST_SLICE = 512  # features: for fewer, launching a program costs more than its work


def num_slices(columns: int, features: int) -> int:
    slices = -(-_PROGRAMS // -(-columns // _COLUMNS))
    return max(1, min(slices, features // _LEAST_SLICE))


@triton.jit
def _decoded(
    weight, scale, low, line, begin, mask, num_features, GROUP: tl.constexpr, COLUMNS: tl.constexpr, FEATURES: tl.constexpr
):
    """An int4 matrix's features from `begin` on, fp32 [COLUMNS, FEATURES]."""
    byte = begin // 2 + tl.arange(0, FEATURES // 2)
    byte_mask = mask[:, None] & (byte < num_features // 2)[None, :]
    pairs = tl.load(weight + line * (num_features // 2) + byte[None, :], mask=byte_mask, other=0)
    codes = tl.interleave(pairs & 15, pairs >> 4).to(tl.float32)
    num: tl.constexpr = FEATURES // GROUP if FEATURES > GROUP else 1  # groups per tile
    group = begin // GROUP + tl.arange(0, num)
    at = line * (num_features // GROUP) + group[None, :]
    group_mask = mask[:, None] & (group < num_features // GROUP)[None, :]
    step = tl.load(scale + at, mask=group_mask, other=0.0)[:, :, None]
    base = tl.load(low + at, mask=group_mask, other=0.0)[:, :, None]
    return tl.reshape(tl.reshape(codes, (COLUMNS, num, FEATURES // num)) * step + base, (COLUMNS, FEATURES))


@triton.jit(do_not_specialize=["num_rows"])
def _linear(
    x,  # [num_rows, heads, num_features], by strides
    weight,  # [heads * num_columns, num_features]; int4: two per byte
    scale,  # int8: fp32 [heads * num_columns]; int4: fp32 [heads * num_columns, num_features / GROUP]; None: not quantized
    low,  # int4: fp32, shaped as scale
    bias,  # fp32 [heads * num_columns] or None
    out,  # fp32 [planes, num_rows, heads, num_columns], by strides
    num_rows,
    num_columns,
    num_features,
    x_row_stride,
    x_head_stride,
    plane_stride,
    row_stride,
    head_stride,
    SLICE: tl.constexpr,  # features
    TOGETHER: tl.constexpr,  # slices per program
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tiles = tl.cdiv(num_columns, COLUMNS)  # of a head
    head = tl.program_id(1) // tiles
    column = tl.program_id(1) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    plane, feature = tl.program_id(2), tl.arange(0, FEATURES)
    row_mask, column_mask = row < num_rows, column < num_columns
    x_FR = x + row.to(tl.int64)[None, :] * x_row_stride + head * x_head_stride + feature[:, None]
    line = (head * num_columns + column).to(tl.int64)[:, None]
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    if bias is not None:  # noqa: SIM102, decided at compile time
        if plane == 0:
            total += tl.load(bias + head * num_columns + column, mask=column_mask, other=0.0)[:, None]
    for part in range(plane * TOGETHER, plane * TOGETHER + TOGETHER):
        sums = tl.zeros((COLUMNS, ROWS), tl.float32)
        for begin in range(part * SLICE, tl.minimum(part * SLICE + SLICE, num_features), FEATURES):
            feature_mask = begin + feature < num_features
            right = tl.load(x_FR + begin, mask=feature_mask[:, None] & row_mask[None, :], other=0.0)
            mask = column_mask[:, None] & feature_mask[None, :]
            if low is None:
                left = tl.load(weight + line * num_features + begin + feature[None, :], mask=mask, other=0.0)
            else:
                left = _decoded(weight, scale, low, line, begin, column_mask, num_features, GROUP, COLUMNS, FEATURES)
            if weight.dtype.element_ty != x.dtype.element_ty:
                left = left.to(tl.float32).to(x.dtype.element_ty)  # the interpreter converts to bf16 only from fp32
            sums = multiply(left, right, sums)
        if scale is not None and low is None:
            sums *= tl.load(scale + head * num_columns + column, mask=column_mask, other=0.0)[:, None]
        total += sums
    at = plane.to(tl.int64) * plane_stride + row.to(tl.int64)[None, :] * row_stride + head * head_stride + column[:, None]
    tl.store(out + at, total, mask=column_mask[:, None] & row_mask[None, :])


def linear(
    x: Tensor, weight: Tensor, scale: Tensor | None, low: Tensor | None, bias: Tensor | None, out: Tensor, slices: int
) -> None:
    """Write x [rows, features] @ weight.T to `out`, fp32 [planes, rows, columns], with `slices` planes or one. For x [rows, heads,
    features], each head is multiplied by its rows of the weight; `out` is [planes, rows, heads, columns of a head].

    `weight` [columns, features] is float; int8 with `scale` [columns]; or uint8 with two 4-bit codes per byte and `scale` and `low`
    [columns, features / group], w = code * scale + low.
    """
    x, out = (x[:, None], out[:, :, None]) if x.dim() == 2 else (x, out)
    num_rows, heads, num_features = x.shape
    planes, columns = out.shape[0], len(weight) // heads
    assert planes in (1, slices) and x.stride(2) == 1 and weight.is_contiguous() and out.stride(3) == 1
    is_fp32 = x.dtype == torch.float32  # arithmetic, not matrix instructions: small tiles
    features = 32 if is_fp32 else 64 if scale is None else 128
    if num_rows <= FEW or is_fp32:
        rows, tile_columns, warps = min(max(16, triton.next_power_of_2(num_rows)), 64 if is_fp32 else FEW), _COLUMNS, 4
    else:
        rows, tile_columns, warps = 128, 128, 8
    stage_nbytes = features * (tile_columns * weight.itemsize + rows * x.itemsize)  # bytes, at most
    stages = max(2, min(6, _SHARED // stage_nbytes))
    # A slice is a whole number of tiles of either size; the last may be shorter or empty.
    slice_features = -(-num_features // slices // 128) * 128
    _linear[(-(-num_rows // rows), heads * -(-columns // tile_columns), planes)](
        x,
        weight,
        scale,
        low,
        bias,
        out,
        num_rows,
        columns,
        num_features,
        *x.stride()[:2],
        *out.stride()[:3],
        SLICE=slice_features,
        TOGETHER=slices // planes,
        GROUP=1 if low is None else num_features // low.shape[1],
        ROWS=rows,
        COLUMNS=tile_columns,
        FEATURES=features,
        num_warps=warps,
        num_stages=stages,
        enable_fp_fusion=False,
    )

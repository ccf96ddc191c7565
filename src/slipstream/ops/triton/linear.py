"""x @ weight.T for the matrices of a decoder, few rows and many. [Note: Batch invariance on CUDA] in `__init__`.

Planes: a result is fp32 [planes, rows, columns] whose sum over planes, in order, is the product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.ops.triton.tiles import multiply

FEW = 128  # rows that one tile holds, so that weights are read once
GROUPS = (32, 64, 128)  # features that may share an int4 matrix's scale
_COLUMNS = 64  # of a tile for few rows
_PROGRAMS = 256  # that keep a GPU's memory busy. Not the device's own number: bits would depend on it
_SHARED = 96 << 10  # bytes of shared memory for tiles under way, within what every GPU since 8.0 has
_LEAST_SLICE = 512  # features: below, starting a program costs more than its work


def num_slices(columns: int, features: int) -> int:
    wanted = -(-_PROGRAMS // -(-columns // _COLUMNS))
    return max(1, min(wanted, features // _LEAST_SLICE))


@triton.jit(do_not_specialize=["num_rows"])
def _linear(
    x,  # [num_rows, num_features]
    weight,  # [num_columns, num_features], int4: two in a byte
    scale,  # int8: fp32 [num_columns]; int4: fp32 [num_columns, num_features / GROUP]; None: plain
    low,  # int4: fp32, as scale
    bias,  # fp32 [num_columns] or None
    out,  # fp32 [planes, num_rows, num_columns], by strides
    num_rows,
    num_columns,
    num_features,
    plane_stride,
    row_stride,
    SLICE: tl.constexpr,  # features
    TOGETHER: tl.constexpr,  # slices that a program computes
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    plane = tl.program_id(2)
    feature = tl.arange(0, FEATURES)
    row_there, column_there = row < num_rows, column < num_columns
    x_FR = x + row.to(tl.int64)[None, :] * num_features + feature[:, None]
    line = column.to(tl.int64)[:, None]
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    if bias is not None:  # noqa: SIM102, known when it is compiled
        if plane == 0:
            total += tl.load(bias + column, mask=column_there, other=0.0)[:, None]
    for part in range(plane * TOGETHER, plane * TOGETHER + TOGETHER):
        sums = tl.zeros((COLUMNS, ROWS), tl.float32)
        for begin in range(part * SLICE, tl.minimum(part * SLICE + SLICE, num_features), FEATURES):
            there = begin + feature < num_features
            right = tl.load(x_FR + begin, mask=there[:, None] & row_there[None, :], other=0.0)
            mask = column_there[:, None] & there[None, :]
            if low is None:
                left = tl.load(weight + line * num_features + begin + feature[None, :], mask=mask, other=0.0)
            else:
                byte = begin // 2 + tl.arange(0, FEATURES // 2)
                pairs = tl.load(
                    weight + line * (num_features // 2) + byte[None, :],
                    mask=column_there[:, None] & (byte < num_features // 2)[None, :],
                    other=0,
                )
                codes = tl.interleave(pairs & 15, pairs >> 4).to(tl.float32)
                num: tl.constexpr = FEATURES // GROUP if FEATURES > GROUP else 1  # groups of a tile
                group = begin // GROUP + tl.arange(0, num)
                at = line * (num_features // GROUP) + group[None, :]
                known = column_there[:, None] & (group < num_features // GROUP)[None, :]
                step = tl.load(scale + at, mask=known, other=0.0)[:, :, None]
                base = tl.load(low + at, mask=known, other=0.0)[:, :, None]
                left = tl.reshape(tl.reshape(codes, (COLUMNS, num, FEATURES // num)) * step + base, (COLUMNS, FEATURES))
            if weight.dtype.element_ty != x.dtype.element_ty:
                left = left.to(tl.float32).to(x.dtype.element_ty)  # the interpreter knows no other way to bf16
            sums = multiply(left, right, sums)
        if scale is not None and low is None:
            sums *= tl.load(scale + column, mask=column_there, other=0.0)[:, None]
        total += sums
    at = plane.to(tl.int64) * plane_stride + row.to(tl.int64)[None, :] * row_stride + column[:, None]
    tl.store(out + at, total, mask=column_there[:, None] & row_there[None, :])


def linear(
    x: Tensor, weight: Tensor, scale: Tensor | None, low: Tensor | None, bias: Tensor | None, out: Tensor, slices: int
) -> None:
    """Writes the product of x [rows, features] into `out`, fp32 [planes, rows, columns], of `slices` planes or of one.

    `weight` [columns, features]: float; int8 with `scale` [columns]; or, with `scale` and `low` [columns, features / group], uint8
    of two 4-bit codes each, w = code * scale + low.
    """
    num_rows, num_features = x.shape
    planes, columns = out.shape[0], len(weight)
    assert planes in (1, slices) and x.is_contiguous() and weight.is_contiguous() and out.stride(2) == 1
    ordinary = x.dtype == torch.float32  # arithmetic, not matrix instructions: small tiles
    features = 32 if ordinary else 64 if scale is None else 128
    if num_rows <= FEW or ordinary:
        rows, wide, warps = min(max(16, triton.next_power_of_2(num_rows)), 64 if ordinary else FEW), _COLUMNS, 4
    else:
        rows, wide, warps = 128, 128, 8
    stage = features * (wide * weight.itemsize + rows * x.itemsize)  # bytes, at most
    stages = max(2, min(6, _SHARED // stage))
    # A slice is whole tiles, of any of these sizes; the last may be shorter, or empty.
    of_slice = -(-num_features // slices // 128) * 128
    _linear[(-(-num_rows // rows), -(-columns // wide), planes)](
        x,
        weight,
        scale,
        low,
        bias,
        out,
        num_rows,
        columns,
        num_features,
        out.stride(0),
        out.stride(1),
        SLICE=of_slice,
        TOGETHER=slices // planes,
        GROUP=1 if low is None else num_features // low.shape[1],
        ROWS=rows,
        COLUMNS=wide,
        FEATURES=features,
        num_warps=warps,
        num_stages=stages,
        enable_fp_fusion=False,
    )

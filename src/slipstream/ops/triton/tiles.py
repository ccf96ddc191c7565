"""Functions shared by the kernels: the product of two tiles, sums of planes, activations, dropout, and ranges of positions.

Ranges: range r contains the positions from `range_start(r)` to `range_start(r + 1)`. The first 16 contain FINEST positions each;
after that, every doubling of the position has 8 ranges. So a long context has few (64 for 131,072 positions) and a short one enough
to occupy the GPU. The numbering is that of floats with a 3-bit mantissa.
"""

import triton
import triton.language as tl

FINEST = tl.constexpr(128)
LEAST = tl.constexpr(-1e30)  # below every score; -inf - -inf would be NaN
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
_GELU_TANH, _GELU, _SILU = (tl.constexpr(kind) for kind in range(3))


@triton.jit
def multiply(left, right, total):
    """total + left @ right, in fp32; fp32 operands without rounding to TF32."""
    if INTERPRETED:
        # The interpreter's own dot treats bf16 as integers, and its order of addition depends on the tiles' shapes.
        total += tl.sum(left.to(tl.float32)[:, :, None] * right.to(tl.float32)[None, :, :], 1)
    else:
        total = tl.dot(left, right, total, input_precision="ieee")
    return total


@triton.jit
def sum_planes(at, mask, plane_stride, PLANES: tl.constexpr):
    """The planes of a product, added in order."""
    total = tl.load(at, mask=mask, other=0.0)
    for plane in tl.static_range(1, PLANES):
        total += tl.load(at + plane * plane_stride, mask=mask, other=0.0)
    return total


@triton.jit
def activated(x, KIND: tl.constexpr):
    """The activation of this number in `ops.fused.ACTIVATIONS`, and its derivative."""
    if KIND == _GELU:
        share = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
        y, slope = x * share, share + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif KIND == _GELU_TANH:  # (1 + tanh(z)) / 2 is sigmoid(2 z)
        share = tl.sigmoid(1.5957691216057308 * x * (1 + 0.044715 * x * x))
        y = x * share
        slope = share + y * (1 - share) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    elif KIND == _SILU:
        share = tl.sigmoid(x)
        y = x * share
        slope = share + y * (1 - share)
    else:
        slope = (x > 0).to(tl.float32)
        y = tl.where(x < 0, 0.0, x)  # keeps NaN
    return y, slope


@triton.jit
def kept(seed, row, column, least):
    """The dropout factor: 0, or 1 / (1 - p), p = least / 65536. `ops.fused.kept` and csrc/vec_drop.h give the same bits.

    seed: int32, by its bits; row, column: integers, broadcast to the result."""
    row, column = row.to(tl.uint32), column.to(tl.uint32)
    x = seed.to(tl.uint32, bitcast=True) ^ tl.mul(row, 0x85EBCA6B, sanitize_overflow=False)
    panel = tl.mul(column // 16, 0xC2B2AE35, sanitize_overflow=False)
    x = tl.mul(tl.add(x ^ (x >> 15), panel, sanitize_overflow=False), 0x27D4EB2F, sanitize_overflow=False)
    lane = tl.mul(column % 16 // 2, 0x9E3779B9, sanitize_overflow=False)
    x = tl.mul(x ^ (x >> 13) ^ lane, 0x7FEB352D, sanitize_overflow=False)
    x = tl.mul(x ^ (x >> 15), 0x846CA68B, sanitize_overflow=False)
    number = (((x ^ (x >> 16)) >> (column % 2 * 16)) & 0xFFFF).to(tl.int32)
    return tl.where(number >= least, 65536.0 / (65536 - least), 0.0)


@triton.jit
def range_of(position):
    step = position // FINEST
    bits = step.to(tl.float32).to(tl.int32, bitcast=True)
    return tl.where(step < 8, step, (bits >> 20) - 1032)  # exponent and 3 bits of mantissa; 8.0 has number 8


@triton.jit
def range_start(number):
    doublings = tl.maximum(number // 8 - 1, 0)
    return ((number - 8 * doublings) << doublings) * FINEST


def num_ranges(context: int) -> int:
    """The number of ranges that `context` positions touch: `range_of` the last one, plus 1."""
    step = max(context - 1, 0) // FINEST.value
    doublings = max(step.bit_length() - 4, 0)
    return (step >> doublings) + 8 * doublings + 1

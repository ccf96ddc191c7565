"""A transformer layer's passes between products, forward and backward, as `csrc/fused.c` computes them on CPUs.

`ops.fused` calls `run` with the arrays and numbers of `struct fused`, except that biases and weights of norms have their own dtypes
and no padding. Rows have `columns` elements without gaps; arithmetic is fp32. Gradients of columns are sums over the rows of a
program, then over programs, whose number depends only on the shape, so results are the same in each run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.ops.triton.tiles import LEAST, activated, kept

_LAYER = tl.constexpr(1)  # kinds of norms; 0: none, 2: RMSNorm
_BLOCK = 1024  # columns of an activation's program
_PROGRAMS = 512  # programs that share the rows of column gradients


@triton.jit
def _get(array, at, mask):
    return tl.load(array + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _put(array, at, values, mask):
    tl.store(array + at, values.to(array.dtype.element_ty), mask=mask)


# -- sum and norm


@triton.jit(do_not_specialize=["seed", "least"])
def _add_norm(
    x, bias, residual, weight, shift, total, out, stats, columns, eps, seed, least,
    ADDS: tl.constexpr, DROPS: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = column < columns
    at = row * columns + column
    a = _get(x, at, mask)
    if ADDS:
        if bias is not None:
            a += _get(bias, column, mask)
        if DROPS:
            a *= kept(seed, row, column, least)
        if residual is not None:
            a += _get(residual, at, mask)
        a = a.to(total.dtype.element_ty).to(tl.float32)
        _put(total, at, a, mask)
    if NORM > 0:
        mean = tl.sum(a, 0) / columns if NORM == _LAYER else 0.0
        a = tl.where(mask, a - mean, 0.0)
        inverse = tl.rsqrt(tl.sum(a * a, 0) / columns + eps)
        tl.store(stats + 2 * row, mean)
        tl.store(stats + 2 * row + 1, inverse)
        a = a * inverse * _get(weight, column, mask)
        if shift is not None:
            a += _get(shift, column, mask)
        _put(out, at, a, mask)


@triton.jit(do_not_specialize=["seed", "least", "num_rows"])
def _add_norm_backward(
    x, grad, sum_grad, dsum, dx, weight, inverse_weight, shift, stats, dweight, dshift, dbias, num_rows, columns, seed, least,
    DROPS: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    mask = column < columns
    sums_weight = tl.zeros((BLOCK,), tl.float32)
    sums_shift = tl.zeros((BLOCK,), tl.float32)
    sums_bias = tl.zeros((BLOCK,), tl.float32)
    if NORM > 0:
        w = _get(weight, column, mask)
    for i in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = tl.full([], 1, tl.int64) * i
        at = row * columns + column
        d = tl.zeros((BLOCK,), tl.float32)
        if NORM > 0:
            g, a = _get(grad, at, mask), _get(x, at, mask)
            inverse = tl.load(stats + 2 * row + 1)
            if inverse_weight is not None:  # x is the norm's output
                if shift is not None:
                    a -= _get(shift, column, mask)
                a *= _get(inverse_weight, column, mask)
            else:
                a = tl.where(mask, (a - tl.load(stats + 2 * row)) * inverse, 0.0)
            d = g * w
            second = tl.sum(d * a, 0) / columns
            if NORM == _LAYER:
                d -= tl.sum(d, 0) / columns
            d = (d - a * second) * inverse
            sums_weight += g * a
            sums_shift += g
        if sum_grad is not None:
            d += _get(sum_grad, at, mask)
        if dsum is not None:
            _put(dsum, at, d, mask)
        if DROPS:
            d *= kept(seed, row, column, least)
        if dx is not None:
            _put(dx, at, d, mask)
        sums_bias += d
    to = tl.program_id(0) * columns + column
    if dweight is not None:
        tl.store(dweight + to, sums_weight, mask=mask)
    if dshift is not None:
        tl.store(dshift + to, sums_shift, mask=mask)
    if dbias is not None:
        tl.store(dbias + to, sums_bias, mask=mask)


# -- activations


@triton.jit
def _activate(x, bias, up, out, columns, KIND: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    at = tl.program_id(0).to(tl.int64) * columns + column
    a = _get(x, at, mask)
    if bias is not None:
        a += _get(bias, column, mask)
    a, _ = activated(a, KIND)
    if up is not None:
        a *= _get(up, at, mask)
    _put(out, at, a, mask)


@triton.jit(do_not_specialize=["num_rows"])
def _activate_backward(x, bias, up, grad, dx, dup, out, dbias, num_rows, columns, KIND: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    sums = tl.zeros((BLOCK,), tl.float32)
    for i in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        at = tl.full([], 1, tl.int64) * i * columns + column
        a, g = _get(x, at, mask), _get(grad, at, mask)
        if bias is not None:
            a += _get(bias, column, mask)
        a, slope = activated(a, KIND)
        if up is not None:
            other = _get(up, at, mask)
            _put(dup, at, g * a, mask)
            g, a = g * other, a * other
        if out is not None:
            _put(out, at, a, mask)
        g *= slope
        _put(dx, at, g, mask)
        sums += g
    if dbias is not None:
        tl.store(dbias + tl.program_id(0) * columns + column, sums, mask=mask)


# -- rotary positions


@triton.jit
def _rotate(
    x, cosine, sine, out, heads, tokens, stride,
    BACK: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """HEADS heads of a token. `stride`: elements from one token of x to the next."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, BLOCK)[None, :]
    source, target = token * stride + head * DIM, (token * heads + head) * DIM
    mask, first = (head < heads) & (i < HALF), (token % tokens) * (2 * HALF) + i
    a, b = _get(x, source + i, mask), _get(x, source + HALF + i, mask)
    cos_a, cos_b = _get(cosine, first, i < HALF), _get(cosine, first + HALF, i < HALF)
    sin_a, sin_b = _get(sine, first, i < HALF), _get(sine, first + HALF, i < HALF)
    if BACK:
        turned_a, turned_b = a * cos_a + b * sin_b, b * cos_b - a * sin_a
    else:
        turned_a, turned_b = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    _put(out, target + i, turned_a, mask)
    _put(out, target + HALF + i, turned_b, mask)
    if DIM > 2 * HALF:
        j = 2 * HALF + tl.arange(0, REST)[None, :]
        rest = (head < heads) & (j < DIM)
        _put(out, target + j, _get(x, source + j, rest), rest)


# -- cross-entropy


@triton.jit
def _row_loss(
    logits, target, ends, losses, columns, row_stride, column_stride, smoothing, SMOOTHS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * row_stride
    running_max = tl.full([], LEAST, tl.float32)
    weight, total = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < columns
        a = tl.load(line + column.to(tl.int64) * column_stride, mask=mask, other=float("-inf")).to(tl.float32)
        new_max = tl.maximum(running_max, tl.max(a, 0))
        weight = weight * tl.exp(running_max - new_max) + tl.exp(a - new_max)
        total += tl.where(mask, a, 0.0)
        running_max = new_max
    end = running_max + tl.log(tl.sum(weight, 0))
    wanted = tl.load(target + row)
    is_class = (wanted >= 0) & (wanted < columns)
    chosen = tl.load(line + wanted * column_stride, mask=is_class, other=0.0).to(tl.float32)
    end = tl.where(is_class, end, float("nan"))
    tl.store(ends + row, end)
    if SMOOTHS:  # 0 times the mean would be NaN where a logit is -inf
        chosen = (1.0 - smoothing) * chosen + smoothing * (tl.sum(total, 0) / columns)
    tl.store(losses + row, end - chosen)


@triton.jit
def _row_grad(
    logits, target, ends, scale, out, columns, row_stride, column_stride, out_row_stride, out_column_stride, smoothing,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask, place = column < columns, column.to(tl.int64)
    a = _get(logits, row * row_stride + place * column_stride, mask)
    share = tl.exp(a - tl.load(ends + row)) - smoothing / columns
    share -= tl.where(place == tl.load(target + row), 1.0 - smoothing, 0.0)
    _put(out, row * out_row_stride + place * out_column_stride, share * tl.load(scale + row), mask)


def row_losses(logits: Tensor, target: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and loss of each row, fp32 [N]; both, and with them the gradient, are NaN if the target is no class.

    logits: [N, V]; target: int64 [N].
    """
    ends, losses = torch.empty((2, len(logits)), dtype=torch.float32, device=logits.device)
    with torch.cuda.device_of(logits):
        _row_loss[(len(logits),)](
            logits,
            target,
            ends,
            losses,
            logits.shape[1],
            *logits.stride(),
            smoothing,
            SMOOTHS=smoothing > 0,
            BLOCK=4 * _BLOCK,
            num_warps=8,
            enable_fp_fusion=True,
        )
    return ends, losses


def row_grads(logits: Tensor, target: Tensor, ends: Tensor, scale: Tensor, smoothing: float) -> Tensor:
    """The gradient of the sum of scale [N] times the losses."""
    out, columns = torch.empty_like(logits), logits.shape[1]
    with torch.cuda.device_of(logits):
        _row_grad[len(logits), -(-columns // (4 * _BLOCK))](
            logits,
            target,
            ends,
            scale,
            out,
            columns,
            *logits.stride(),
            *out.stride(),
            smoothing,
            BLOCK=4 * _BLOCK,
            num_warps=8,
            enable_fp_fusion=True,
        )
    return out


# -- calls of the other passes

_Arrays = Mapping[str, Tensor | None]


def _warps(block: int, elements: int) -> int:
    """The number of warps for `elements` elements of a block per thread, if possible."""
    return min(16, max(1, block // (32 * elements)))


def _sums(wanted: Mapping[str, bool], programs: int, columns: int, device: torch.device) -> dict[str, Tensor]:
    return {
        name: torch.empty(programs, columns, dtype=torch.float32, device=device) for name, is_wanted in wanted.items() if is_wanted
    }


def _run_add_norm(rows: int, a: _Arrays, _: Mapping[str, bool], n: Mapping[str, Any]) -> dict[str, Tensor]:
    block = triton.next_power_of_2(n["columns"])
    _add_norm[(rows,)](
        *(a.get(name) for name in ("x", "bias", "residual", "weight", "shift", "sum", "out", "stats")),
        *(n[name] for name in ("columns", "eps", "seed", "least")),
        ADDS=a["sum"] is not a["x"],
        DROPS=n["least"] > 0,
        NORM=n["kind"],
        BLOCK=block,
        num_warps=_warps(block, 16),
        enable_fp_fusion=True,
    )
    return {}


def _run_add_norm_backward(rows: int, a: _Arrays, wanted: Mapping[str, bool], n: Mapping[str, Any]) -> dict[str, Tensor]:
    block, programs, columns = triton.next_power_of_2(n["columns"]), min(rows, _PROGRAMS), n["columns"]
    x: Any = a["x"]
    sums = _sums(wanted, programs, columns, x.device)
    names = ("x", "grad", "sum_grad", "dsum", "dx", "weight", "inverse_weight", "shift", "stats")
    _add_norm_backward[(programs,)](
        *(a.get(name) for name in names),
        *(sums.get(name) for name in ("dweight", "dshift", "dbias")),
        rows,
        *(n[name] for name in ("columns", "seed", "least")),
        DROPS=n["least"] > 0,
        NORM=n["kind"],
        BLOCK=block,
        num_warps=_warps(block, 8),
        enable_fp_fusion=True,
    )
    return sums


def _run_activate(rows: int, a: _Arrays, _: Mapping[str, bool], n: Mapping[str, Any]) -> dict[str, Tensor]:
    arrays = (a.get(name) for name in ("x", "bias", "residual", "out"))
    _activate[rows, -(-n["columns"] // _BLOCK)](
        *arrays, n["columns"], KIND=n["kind"], BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=True
    )
    return {}


def _run_activate_backward(rows: int, a: _Arrays, wanted: Mapping[str, bool], n: Mapping[str, Any]) -> dict[str, Tensor]:
    x: Any = a["x"]
    programs, columns = min(rows, _PROGRAMS) if any(wanted.values()) else rows, n["columns"]
    sums = _sums(wanted, programs, columns, x.device)
    _activate_backward[programs, -(-columns // _BLOCK)](
        *(a.get(name) for name in ("x", "bias", "residual", "grad", "dx", "dsum", "out")),
        sums.get("dbias"),
        rows,
        columns,
        KIND=n["kind"],
        BLOCK=_BLOCK,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return sums


def _run_rotate(rows: int, a: _Arrays, _: Mapping[str, bool], n: Mapping[str, Any]) -> dict[str, Tensor]:
    heads, dim, half = n["heads"], n["columns"], n["rotated"] // 2
    block = triton.next_power_of_2(max(half, 1))
    at_once = min(triton.next_power_of_2(heads), max(1, _BLOCK // block))
    _rotate[rows, -(-heads // at_once)](
        *(a[name] for name in ("x", "bias", "weight", "out")),
        heads,
        n["tokens"],
        n["stride"],
        BACK=bool(n["kind"]),
        DIM=dim,
        HALF=half,
        HEADS=at_once,
        BLOCK=block,
        REST=triton.next_power_of_2(max(dim - 2 * half, 1)),
        num_warps=4,
        enable_fp_fusion=True,
    )
    return {}


_PASSES: tuple[Callable[..., dict[str, Tensor]], ...] = (
    _run_add_norm,
    _run_add_norm_backward,
    _run_activate,
    _run_activate_backward,
    _run_rotate,
)  # in the order of csrc/fused.c


def run(
    which: int, rows: int, x: Tensor, arrays: _Arrays, wanted: Mapping[str, bool], numbers: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Run a pass over all rows of arrays on x's device. Returns the wanted gradients of columns, fp32 [columns]."""
    if "seed" in numbers:
        seed = numbers["seed"]
        numbers = {**numbers, "seed": seed - (1 << 32 if seed >> 31 else 0)}  # one type for all seeds
    with torch.cuda.device_of(x):
        sums = _PASSES[which](rows, arrays, wanted, numbers)
    return {name: each.sum(0) for name, each in sums.items()}

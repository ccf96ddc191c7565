"""The torch twins of the native kernels: the same results without a compiler, on any device. (Optimizers: `optim_reference.py`.)

Elementwise results are bit-identical to the kernels': each operation here is one IEEE operation there, in the same order. So
operations that torch fuses or reorders are not allowed here (`add(alpha=)`, `addcmul`, `lerp`). Sums of squares agree to fp64
rounding and do not depend on the number of threads: torch splits no reduction of fewer than 32,768 elements, and those here have at
most 16,384 on a CPU.

Glossary: `span` is the current slice of elements, short enough that its temporaries stay in cache.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

BLOCK = 65536  # elements per partial sum of squares, as in csrc/slipstream_ops.h
CPU_CHUNK = 65536  # its temporaries stay in cache, and torch's overhead per call is small compared with its work
CPU_SUM = 16384
DEVICE_CHUNK = 1 << 24  # few large kernels on an accelerator
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # factors of an int4 group's range: outliers are clipped if that lowers the error


class Partial(NamedTuple):
    """The fp64 sum of squares of the elements written, and whether all are finite."""

    sumsq: float | Tensor  # both are 0-dim tensors if reading them would synchronize with the device
    finite: bool | Tensor


def spans(tensor: Tensor) -> Iterator[slice]:
    chunk = CPU_CHUNK if tensor.is_cpu else DEVICE_CHUNK
    for start in range(0, tensor.numel(), chunk):
        yield slice(start, start + chunk)


@torch.no_grad()
def sum_ranks(out: Tensor, sources: Sequence[Tensor], *, alpha: float, accumulate: bool) -> Partial:
    squares: list[Tensor] = []  # one fp64 scalar per span, read together at the end
    for span in spans(out):
        total = sources[0][span].to(torch.float32, copy=True)
        for source in sources[1:]:
            total.add_(source[span])
        total.mul_(alpha)
        if accumulate:
            total.add_(out[span])
        out[span] = total
        square = out[span].double().square_()
        squares += [part.sum() for part in square.split(CPU_SUM)] if out.is_cpu else [square.sum()]
    sumsq = sum_by_block(torch.stack(squares).tolist()) if squares else 0.0
    return Partial(sumsq, math.isfinite(sumsq))


def sum_by_block(squares: list[float]) -> float:
    """The sum of the squares: first within each block, then over the blocks, in order."""
    step = BLOCK // CPU_SUM
    return added([added(squares[start : start + step]) for start in range(0, len(squares), step)])


def added(values: Iterable[float]) -> float:
    """The sum in order. Unlike the builtin `sum`, it does not compensate for rounding (Python 3.12 and newer)."""
    total = 0.0
    for value in values:
        total += value
    return total


def sqrt(x: Tensor) -> Tensor:
    """The correctly rounded root: numpy's on CPU, because torch's math library may be off by one unit in the last place."""
    if not x.is_cpu:
        return x.sqrt()
    with numpy.errstate(invalid="ignore"):
        return torch.from_numpy(numpy.sqrt(x.numpy()))


@torch.no_grad()
def quantize_int8(w: Tensor) -> tuple[Tensor, Tensor]:
    codes, scale = torch.empty_like(w, dtype=torch.int8), torch.empty(len(w), dtype=torch.float32, device=w.device)
    step = _rows_per_span(w)
    for rows, q, scales in zip(w.split(step), codes.split(step), scale.split(step), strict=True):
        wide = rows.float()
        torch.amax(wide.abs(), 1, out=scales).div_(127)
        q[:] = (wide / _at_least_tiny(scales)[:, None]).clamp_(-127, 127).round_()
    return codes, scale


@torch.no_grad()
def dequantize_int8(codes: Tensor, scale: Tensor) -> Tensor:
    return codes.float().mul_(scale[:, None])


@torch.no_grad()
def quantize_int4(w: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    parts = []
    for rows in w.split(_rows_per_span(w)):
        # Groups are columns, so that sums over a group vectorize.
        q, scale, low = _fit_int4(rows.float().view(-1, group).T.contiguous())
        q = q.T.reshape(rows.shape)
        parts.append((q[:, ::2] | (q[:, 1::2] << 4), scale.view(len(rows), -1), low.view(len(rows), -1)))
    codes, scale, low = (torch.cat(part) for part in zip(*parts, strict=True))
    return codes, scale, low


@torch.no_grad()
def dequantize_int4(codes: Tensor, scale: Tensor, low: Tensor) -> Tensor:
    out = scale.new_empty(*codes.shape, 2, dtype=torch.float32)
    step = _rows_per_span(codes)
    for rows, q, scales, lows in zip(*(tensor.split(step) for tensor in (out, codes, scale, low)), strict=True):
        rows[..., 0], rows[..., 1] = q & 15, q >> 4
        rows.view(*scales.shape, -1).mul_(scales[..., None]).add_(lows[..., None])
    return out.flatten(1)


def _rows_per_span(w: Tensor) -> int:
    return max(1, (4 * CPU_CHUNK if w.is_cpu else DEVICE_CHUNK) // max(1, w.shape[1]))


def _fit_int4(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """w [group, groups] -> codes uint8 of the same shape, scale and low [groups]."""
    size = len(w)
    least, most = w.aminmax(dim=0)
    middle, span, mean = (least + most) * 0.5, most - least, _sum(w) / size

    def fit(shrink: float) -> tuple[Tensor, Tensor, Tensor]:
        """(errors, scale, low) of the codes for a part of the range."""
        codes = _nearest_code(w, span * (shrink / 15), middle - span * (shrink / 2))
        # A least-squares fit of w by codes gives their best scale and low; the codes are then recomputed.
        code_mean = _sum(codes) / size
        centered = codes.sub_(code_mean)
        slope = _sum(centered * w) / _sum(centered.square()).clamp_min_(1e-12)
        scale = slope.half().float()  # as stored in files and in the decoder
        low = (mean - scale * code_mean).half().float()
        error = _sum(_nearest_code(w, scale, low).mul_(scale).add_(low).sub_(w).square_())
        return error, scale, low

    best: tuple[Tensor, ...] = fit(SHRINKS[0])
    for candidate in map(fit, SHRINKS[1:]):
        is_better = candidate[0] < best[0]
        best = tuple(torch.where(is_better, new, old) for new, old in zip(candidate, best, strict=True))
    _, scale, low = best
    return _nearest_code(w, scale, low).to(torch.uint8), scale, low


def _nearest_code(w: Tensor, scale: Tensor, low: Tensor) -> Tensor:
    return (w - low).mul_(_at_least_tiny(scale).reciprocal_()).clamp_(0, 15).round_()


def _at_least_tiny(scale: Tensor) -> Tensor:
    return scale.clamp_min(torch.finfo(torch.float32).tiny)


def _sum(x: Tensor) -> Tensor:
    """[elements, groups] -> [groups], added in the kernel's order: even and odd elements separately."""
    sums = torch.zeros_like(x[:2])
    for i in range(0, len(x), 2):
        sums += x[i : i + 2]
    return sums[0] + sums[1]

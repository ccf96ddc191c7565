"""The torch twins of the native kernels: the same results without a compiler, on any device.

Elementwise results equal the kernels' bit for bit: each operation below is one IEEE operation there too, in
the same order. So nothing here may use an op that torch fuses or reorders (`add(alpha=)`, `addcmul`, `lerp`).
Sums of squares agree to fp64 rounding, and are deterministic whatever the number of threads: torch splits no
reduction of fewer than 32,768 elements, and none here has more than 16,384 on a CPU.

Glossary: `span` is the slice of elements in hand, short enough that its temporaries stay in cache.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

BLOCK = 65536  # elements per partial sum of squares, as in csrc/slipstream_ops.h
CPU_CHUNK = 65536  # its temporaries stay in cache, and torch's cost per call is small beside it
CPU_SUM = 16384
DEVICE_CHUNK = 1 << 24  # an accelerator wants few large kernels


class Partial(NamedTuple):
    """What a sum left behind: the fp64 sum of squares of the elements written, and whether all are finite."""

    sumsq: float | Tensor  # a 0-dim tensor of either where reading it would wait for the device
    finite: bool | Tensor


def _spans(tensor: Tensor) -> Iterator[slice]:
    chunk = CPU_CHUNK if tensor.is_cpu else DEVICE_CHUNK
    for start in range(0, tensor.numel(), chunk):
        yield slice(start, start + chunk)


@torch.no_grad()
def sum_ranks(out: Tensor, sources: Sequence[Tensor], *, alpha: float, accumulate: bool) -> Partial:
    squares: list[Tensor] = []  # one fp64 scalar per span, read together at the end
    for span in _spans(out):
        total = sources[0][span].to(torch.float32, copy=True)
        for source in sources[1:]:
            total.add_(source[span])
        total.mul_(alpha)
        if accumulate:
            total.add_(out[span])
        out[span] = total
        square = out[span].double().square_()
        squares += [part.sum() for part in square.split(CPU_SUM)] if out.is_cpu else [square.sum()]
    sumsq = _sum_by_block(torch.stack(squares).tolist()) if squares else 0.0
    return Partial(sumsq, math.isfinite(sumsq))


def _sum_by_block(squares: list[float]) -> float:
    """Add in order, block by block. Not `sum`, which compensates for rounding from Python 3.12 on."""
    total = 0.0
    for start in range(0, len(squares), BLOCK // CPU_SUM):
        block = 0.0
        for value in squares[start : start + BLOCK // CPU_SUM]:
            block += value
        total += block
    return total


@torch.no_grad()
def adamw(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    out: Tensor | None,
    *,
    scale: float,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    decoupled: bool,
    bias_correction: bool,
) -> None:
    """Also takes a master or moments in bf16 or fp16: computed in fp32 a span at a time, rounded once."""
    correction1 = 1.0 - beta1**step if bias_correction else 1.0
    correction2 = 1.0 - beta2**step if bias_correction else 1.0
    root_correction = 1.0 / math.sqrt(correction2)
    step_size = lr / correction1
    for span in _spans(master):
        # For fp32 these are the stored elements themselves.
        p, m, v = master[span].float(), exp_avg[span].float(), exp_avg_sq[span].float()
        g = grad[span].float() * scale
        if decoupled:
            p.mul_(1.0 - lr * weight_decay)
        elif weight_decay != 0.0:
            g.add_(p * weight_decay)
        if 1.0 - beta1 >= 0.5:  # from the gradient, which weighs more: see lerp in csrc/kernels.h
            m.sub_(g).mul_(beta1).add_(g)
        else:
            m.add_((g - m).mul_(1.0 - beta1))
        v.mul_(beta2).add_((g * (1.0 - beta2)).mul_(g))
        denominator = _sqrt(v).mul_(root_correction).add_(eps)
        p.sub_((m * step_size).div_(denominator))
        for stored, value in ((master, p), (exp_avg, m), (exp_avg_sq, v)):
            if stored.dtype is not torch.float32:
                stored[span] = value
        if out is not None:
            out[span] = p


def _sqrt(x: Tensor) -> Tensor:
    """numpy's on CPU: torch's comes from a maths library that may be off by one unit in the last place."""
    if not x.is_cpu:
        return x.sqrt()
    with numpy.errstate(invalid="ignore"):
        return torch.from_numpy(numpy.sqrt(x.numpy()))


@torch.no_grad()
def copy_stream(dst: Tensor, src: Tensor) -> None:
    dst.copy_(src)

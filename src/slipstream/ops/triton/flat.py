"""Flat arrays of a training step in one pass each: the optimizers' rules, and a reduced gradient with its sum of squares.

The torch twins are `ops.optim_reference` and `zero.comm.reduce_into`. The kernels give the same bits: each operation is one IEEE
operation there, in the same order (`enable_fp_fusion=False`, roots and quotients correctly rounded). As torch operations they read
and write some 200 and 50 bytes of memory per element; here AdamW with bf16 weights and gradients takes 28, and a reduction 6 or 8.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.ops import optim_reference
from slipstream.ops.optim_reference import FIRST_STEP, FROM_GRAD, UPDATE_FROM_GRAD, Coefficients, KernelRule

RULES = frozenset({KernelRule.ADAMW, KernelRule.LION, KernelRule.SGD, KernelRule.ADAGRAD})
_ADAMW, _LION, _SGD = (tl.constexpr(int(rule)) for rule in (KernelRule.ADAMW, KernelRule.LION, KernelRule.SGD))
_NESTEROV = optim_reference.NESTEROV  # the kernel has a constant of the original name
_BLOCK = 1024  # elements per program: eight per thread, 16 bytes of bf16
_PROGRAMS = 1024  # maximum for a reduction; constant, because sums must not depend on the device's processor count


@triton.jit
def _lerp(m, g, rate, FROM: tl.constexpr):
    return (m - g) * rate + g if FROM else m + (g - m) * rate  # FROM: start from the gradient, whose weight is larger


@triton.jit
def _step(  # KEEPS: keep is 1; FROM to NESTEROV: the flags of optim_reference
    master, grad, first, second, out, num_elements,
    scale, keep, l2, rate, update_rate, beta1, rest1, beta, rest, correction1, correction2, eps, lr,  # Coefficients
    RULE: tl.constexpr, FROM: tl.constexpr, UPDATE_FROM: tl.constexpr, FIRST: tl.constexpr, NESTEROV: tl.constexpr,
    KEEPS: tl.constexpr, L2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num_elements
    p = tl.load(master + at, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32) * scale
    if L2:
        g = g + p * l2
    if first is not None:
        m = tl.load(first + at, mask=mask, other=0.0).to(tl.float32)
    if second is not None:
        v = tl.load(second + at, mask=mask, other=0.0).to(tl.float32)
    if RULE == _ADAMW:
        if not KEEPS:
            p = p * keep
        m = _lerp(m, g, rate, FROM)
        v = v * beta + (g * rest) * g
        p = p - tl.div_rn(m * lr, tl.sqrt_rn(v) * correction2 + eps)
    elif RULE == _LION:
        u = _lerp(m, g, update_rate, UPDATE_FROM)
        if not KEEPS:
            p = p * keep
        p = p - ((u > 0).to(tl.float32) - (u < 0).to(tl.float32)) * lr
        m = _lerp(m, g, rate, FROM)
    elif RULE == _SGD:
        if first is not None:
            m = g if FIRST else m * beta + g * rest
            g = g + m * beta if NESTEROV else m
        p = p - g * lr
    else:  # Adagrad
        v = v + g * g
        p = p - tl.div_rn(g * lr, tl.sqrt_rn(v) + eps)
    if first is not None:
        tl.store(first + at, m.to(first.dtype.element_ty), mask=mask)
    if second is not None:
        tl.store(second + at, v.to(second.dtype.element_ty), mask=mask)
    p = p.to(master.dtype.element_ty)
    tl.store(master + at, p, mask=mask)
    if out is not None:
        tl.store(out + at, p.to(tl.float32).to(out.dtype.element_ty), mask=mask)


def step(
    rule: KernelRule,
    master: Tensor,
    grad: Tensor,
    first: Tensor | None,
    second: Tensor | None,
    out: Tensor | None,
    c: Coefficients,
    flags: int,
) -> None:
    """`optim_reference.step` for the rules of RULES, states that are tensors, and rounding to nearest."""
    numel = master.numel()
    with torch.cuda.device_of(master):  # a launch goes to the current device, which need not be the tensors'
        _step[(-(-numel // _BLOCK),)](
            *(master, grad, first, second, out, numel),
            *c,
            RULE=int(rule),
            FROM=bool(flags & FROM_GRAD),
            UPDATE_FROM=bool(flags & UPDATE_FROM_GRAD),
            FIRST=bool(flags & FIRST_STEP),
            NESTEROV=bool(flags & _NESTEROV),
            KEEPS=c.keep == 1.0,
            L2=c.l2 != 0.0 and rule is not KernelRule.LION,
            BLOCK=_BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )


@triton.jit
def _reduce(out, source, squares, num_elements, alpha, ACCUMULATE: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float64)
    for block in range(tl.program_id(0), tl.cdiv(num_elements, BLOCK), tl.num_programs(0)):
        at = tl.full([], BLOCK, tl.int64) * block + tl.arange(0, BLOCK)
        mask = at < num_elements
        x = tl.load(source + at, mask=mask, other=0.0).to(tl.float32) * alpha
        if ACCUMULATE:
            x = x + tl.load(out + at, mask=mask, other=0.0).to(tl.float32)
        x = x.to(out.dtype.element_ty)
        tl.store(out + at, x, mask=mask)
        wide = x.to(tl.float32).to(tl.float64)
        total += tl.where(mask, wide * wide, 0.0)
    tl.store(squares + tl.program_id(0), tl.sum(total, 0))


def reduce_into(out: Tensor, source: Tensor, alpha: float, accumulate: bool) -> Tensor:
    """out = alpha * source (+ out), in fp32, rounded once; returns the fp64 sum of out's squares, 0-dim, on the device."""
    numel = out.numel()
    programs = min(_PROGRAMS, -(-numel // _BLOCK))
    squares = torch.empty(programs, dtype=torch.float64, device=out.device)
    with torch.cuda.device_of(out):
        _reduce[(programs,)](
            out, source, squares, numel, alpha, ACCUMULATE=accumulate, BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False
        )
    return squares.sum()

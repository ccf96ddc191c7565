"""Fused optimizers: one pass over gradient, master, states and weights. Native on CPU, the torch twin elsewhere, bit-identical.

Common to all: tensors are 1-D and contiguous. `master` holds the master weights, updated in place. `grad` is multiplied by `scale`
(unscaling and clipping) as it is read. `out` receives the weights in their own dtype; None if the master weights are the weights.
The dtype of each tensor is fp32, bf16 or fp16, independently. All arithmetic is in fp32 and rounded once: to nearest, or
stochastically with `rounding`. A state given as `Blocks` is stored in 8 bits.
"""

import ctypes
import math
import struct
from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict, Unpack

import torch
from torch import Tensor

from slipstream.ops import cpu, gpu, optim_reference
from slipstream.ops.cpu import DTYPES, STREAM_BYTES, THREAD_NUMEL, WIDTHS
from slipstream.ops.optim_reference import (
    CODED,
    EPS_INSIDE,
    FIRST_STEP,
    FROM_GRAD,
    NESTEROV,
    STOCHASTIC,
    STREAM,
    UPDATE_FROM_GRAD,
    Blocks,
    Coefficients,
    KernelRule,
    State,
    Stochastic,
)
from slipstream.ops.reference import BLOCK, added

Arrays = tuple[Tensor, Tensor | None, State, State, Tensor | None]  # master, grad, first and second state, weights

_RECORD = struct.Struct("=15qq2I13fi")  # struct step of csrc/optim.h; first pointer, scales and kind of five arrays
_CODES = 3


def adamw(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor | Blocks,
    exp_avg_sq: Tensor | Blocks,
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
    rounding: Stochastic | None = None,
) -> None:
    """Adam with the formulas of torch.optim.AdamW (`decoupled`) or torch.optim.Adam. `step` counts from 1."""
    _check_step("adamw", step)
    _check_betas("adamw", beta1, beta2)
    correction1, correction2 = _corrections(bias_correction, step, beta1, beta2)
    keep = 1.0 - lr * weight_decay if decoupled else 1.0
    rate, flags = _lerp(beta1, FROM_GRAD)
    root = math.sqrt(correction2)
    root_correction = 1.0 / root
    if not _all_fp32(exp_avg, exp_avg_sq):  # saves a multiplication per element; fp32 keeps torch's order of operations
        lr, eps, root_correction = lr * root, eps * root, 1.0
    c = Coefficients(
        scale=scale,
        keep=keep,
        l2=0.0 if decoupled else weight_decay,
        rate=rate,
        beta1=beta1,
        rest1=1.0 - beta1,
        beta=beta2,
        rest=1.0 - beta2,
        correction2=root_correction,
        eps=eps,
        lr=lr / correction1,
    )
    names = ("master", "grad", "exp_avg", "exp_avg_sq", "out")
    _step("adamw", names, KernelRule.ADAMW, (master, grad, exp_avg, exp_avg_sq, out), c, flags, rounding)


def lion(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor | Blocks,
    out: Tensor | None,
    *,
    scale: float,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    rounding: Stochastic | None = None,
) -> None:
    """Lion with the formulas of slipstream.optim.Lion."""
    _check_betas("lion", beta1, beta2)
    (update_rate, update_flag), (rate, flag) = _lerp(beta1, UPDATE_FROM_GRAD), _lerp(beta2, FROM_GRAD)
    c = Coefficients(scale=scale, keep=1.0 - lr * weight_decay, rate=rate, update_rate=update_rate, lr=lr)
    names = ("master", "grad", "exp_avg", "", "out")
    _step("lion", names, KernelRule.LION, (master, grad, exp_avg, None, out), c, flag | update_flag, rounding)


def sgd(
    master: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | Blocks | None,
    out: Tensor | None,
    *,
    scale: float,
    lr: float,
    momentum: float,
    dampening: float,
    nesterov: bool,
    weight_decay: float,
    first: bool,
    rounding: Stochastic | None = None,
) -> None:
    """SGD with the formulas of torch.optim.SGD. `first`: this step fills the momentum buffer, which is None without momentum."""
    if (momentum_buffer is None) != (momentum == 0.0):
        buffer = "None" if momentum_buffer is None else "a tensor"
        raise ValueError(
            f"sgd: momentum is {momentum} and momentum_buffer is {buffer}; pass a buffer if momentum is not 0, else None"
        )
    c = Coefficients(scale=scale, l2=weight_decay, beta=momentum, rest=1.0 - dampening, lr=lr)
    flags = first * FIRST_STEP | nesterov * NESTEROV
    names = ("master", "grad", "momentum_buffer", "", "out")
    _step("sgd", names, KernelRule.SGD, (master, grad, momentum_buffer, None, out), c, flags, rounding)


def adagrad(
    master: Tensor,
    grad: Tensor,
    square_sum: Tensor,
    out: Tensor | None,
    *,
    scale: float,
    lr: float,
    lr_decay: float,
    eps: float,
    weight_decay: float,
    step: int,
    rounding: Stochastic | None = None,
) -> None:
    """Adagrad with the formulas of torch.optim.Adagrad. `step` counts from 1. No 8-bit state, which would lose small increments."""
    _check_step("adagrad", step)
    c = Coefficients(scale=scale, l2=weight_decay, eps=eps, lr=lr / (1 + (step - 1) * lr_decay))
    names = ("master", "grad", "", "square_sum", "out")
    _step("adagrad", names, KernelRule.ADAGRAD, (master, grad, None, _plain("adagrad", square_sum), out), c, 0, rounding)


class LambOptions(TypedDict):
    """The options of LAMB's passes. `step` counts from 1."""

    beta1: float
    beta2: float
    eps: float
    eps_inside_sqrt: bool
    weight_decay: float
    step: int
    bias_correction: bool
    rounding: NotRequired[Stochastic | None]


def lamb_update(
    master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, scale: float, **options: Unpack[LambOptions]
) -> tuple[float | Tensor, float | Tensor]:
    """The first of LAMB's two passes (arXiv 1904.00962, algorithm 2): updates the moments.

    Returns the fp64 sums of squares of the weights and of the update: floats on CPU, 0-dim tensors on other devices, so that
    nothing synchronizes. They do not depend on the number of threads. Sums over the ranges of a tensor may be added.
    """
    return _lamb("lamb_update", KernelRule.LAMB_UPDATE, (master, grad, exp_avg, exp_avg_sq, None), {"scale": scale}, options)


def lamb_apply(
    master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, out: Tensor | None, *, lr: float | Tensor, **options: Unpack[LambOptions]
) -> None:
    """LAMB's second pass: master -= lr * update. `lr` includes the trust ratio; a tensor stays on its device."""
    _lamb("lamb_apply", KernelRule.LAMB_APPLY, (master, None, exp_avg, exp_avg_sq, out), {"lr": lr}, options)


def _lamb(
    op: str, rule: KernelRule, arrays: Arrays, factors: Mapping[str, Any], options: LambOptions
) -> tuple[float | Tensor, float | Tensor]:
    beta1, beta2, step = options["beta1"], options["beta2"], options["step"]
    _check_step(op, step)
    _check_betas(op, beta1, beta2)
    for state in arrays[2:4]:
        _plain(op, state)
    correction1, correction2 = _corrections(options["bias_correction"], step, beta1, beta2)
    rate, flags = _lerp(beta1, FROM_GRAD)
    c = Coefficients(
        l2=options["weight_decay"],
        rate=rate,
        beta=beta2,
        rest=1.0 - beta2,
        correction1=1.0 / correction1,
        correction2=1.0 / correction2,
        eps=options["eps"],
        **factors,
    )
    names = ("master", "grad", "exp_avg", "exp_avg_sq", "out")
    return _step(op, names, rule, arrays, c, flags | options["eps_inside_sqrt"] * EPS_INSIDE, options.get("rounding"))


def _check_step(op: str, step: int) -> None:
    if step < 1:
        raise ValueError(f"{op}: step ({step}) counts from 1")


def _check_betas(op: str, beta1: float, beta2: float) -> None:
    if not (0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0):
        raise ValueError(f"{op}: betas ({beta1}, {beta2}) must be in [0, 1)")


def _corrections(bias_correction: bool, step: int, beta1: float, beta2: float) -> tuple[float, float]:
    return (1.0 - beta1**step, 1.0 - beta2**step) if bias_correction else (1.0, 1.0)


def _lerp(beta: float, from_grad: int) -> tuple[float, int]:
    """The rate of an interpolation, and the flag to start it from the gradient, set if that has the larger weight."""
    return (beta, from_grad) if beta <= 0.5 else (1.0 - beta, 0)


def _all_fp32(*states: State) -> bool:
    return all(isinstance(state, Tensor) and state.dtype is torch.float32 for state in states)


def _plain(op: str, state: State) -> State:
    if isinstance(state, Blocks):
        raise ValueError(f"{op}: a state is in 8-bit codes; this optimizer has no 8-bit states, pass fp32, bf16 or fp16")
    return state


def _step(
    op: str, names: tuple[str, ...], rule: KernelRule, arrays: Arrays, c: Coefficients, flags: int, rounding: Stochastic | None
) -> tuple[float | Tensor, float | Tensor]:
    """The first state is signed, the second is a sum of squares."""
    master, grad, first, second, out = arrays
    numel, on_cpu, packed = master.numel(), master.is_cpu, _packed(op, names, arrays)
    offset, keys = 0, (0, 0)
    if rounding is not None:
        _check_rounding(op, names, arrays, rounding)
        flags |= STOCHASTIC
        offset, keys = rounding.offset, rounding.keys()
    kernels = cpu._kernels()
    flat = gpu.kernels(*arrays) if not on_cpu and rounding is None else None
    if flat is not None and rule in flat.RULES:
        flat.step(rule, *arrays, c, flags)
        return 0.0, 0.0
    if kernels is None or not on_cpu:
        return optim_reference.step(rule, master, grad, first, second, out, c, flags, rounding)
    if out is not None and out.data_ptr() % 64 == 0 and numel * WIDTHS[packed[-1]] >= STREAM_BYTES:
        flags |= STREAM
    record = _RECORD.pack(*packed, offset, *keys, *c, flags)
    sums = (ctypes.c_double * (2 * -(-numel // BLOCK)))() if rule is KernelRule.LAMB_UPDATE else None
    if numel < 2 * THREAD_NUMEL or (threads := torch.get_num_threads()) == 1:
        kernels.step(rule, record, 0, numel, sums)
    else:
        cpu.in_threads(lambda begin, end: kernels.step(rule, record, begin, end, sums), numel, threads)
    if sums is None:
        return 0.0, 0.0
    return added(sums[::2]), added(sums[1::2])


def _packed(op: str, names: tuple[str, ...], arrays: Arrays) -> list[int]:
    """Pointer, scales and kind of each array, as in _RECORD. Raises ValueError for arrays that do not belong to one range."""
    packed: list[int] = []
    for i, array in enumerate(arrays):
        if array is None:
            packed += (0, 0, 0)
            continue
        if isinstance(array, Blocks):
            _check_blocks(op, names[i], array, torch.int8 if i == 2 else torch.uint8)
            tensor, scales, kind = array.codes, array.scales.data_ptr(), _CODES
        else:
            tensor, scales, kind = array, 0, DTYPES.get(array.dtype, -1)
        if kind < 0 or not cpu.are_flat(arrays[0], tensor) or tensor.is_cpu is not arrays[0].is_cpu:
            raise _refusal(op, names, arrays)
        packed += (tensor.data_ptr(), scales, kind)
    return packed


def _check_blocks(op: str, name: str, blocks: Blocks, dtype: torch.dtype) -> None:
    codes, scales = blocks
    num_scales = -(-codes.numel() // CODED)
    if codes.dtype is not dtype:
        raise ValueError(f"{op}: {name}.codes is {codes.dtype}; it must be {dtype}")
    if scales.dtype is not torch.float32 or tuple(scales.shape) != (num_scales,) or not scales.is_contiguous():
        raise ValueError(
            f"{op}: {name}.scales is {scales.dtype} of shape {tuple(scales.shape)}; {codes.numel()} codes need a contiguous "
            f"torch.float32 of shape ({num_scales},), one for every {CODED}"
        )
    if scales.device != codes.device:
        raise ValueError(f"{op}: {name}.scales is on {scales.device} and the codes are on {codes.device}; move one of them")


def _check_rounding(op: str, names: tuple[str, ...], arrays: tuple[Tensor | Blocks | None, ...], rounding: Stochastic) -> None:
    if rounding.offset % 16 or rounding.offset < 0:
        raise ValueError(f"{op}: rounding.offset ({rounding.offset}) must be a multiple of 16 and not negative")
    for i in (0, 2, 3):
        array = arrays[i]
        if isinstance(array, Tensor) and array.dtype is torch.float16:
            raise ValueError(
                f"{op}: {names[i]} is {array.dtype}, which has no stochastic rounding; use torch.bfloat16 or no `rounding`"
            )


def _refusal(op: str, names: tuple[str, ...], arrays: tuple[Tensor | Blocks | None, ...]) -> ValueError:
    tensors: dict[str, Tensor] = {}
    for name, array in zip(names, arrays, strict=True):
        if isinstance(array, Blocks):
            tensors[f"{name}.codes"] = array.codes
        elif array is not None:
            tensors[name] = array
    return cpu.refusal(op, tensors)

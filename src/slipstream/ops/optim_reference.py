"""The torch twins of the native optimizers (`csrc/optim_body.h`), bit-identical to them.

As in `reference.py`, each operation here is one IEEE operation there, in the same order. A span is converted to fp32, updated and
rounded once; fp32 tensors are updated in place.

Glossary: `p` weights, `g` gradient, `m` the first state (a momentum), `v` the second (a sum of squares), `c` coefficients.
"""

import math
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.ops.reference import CPU_SUM, spans, sqrt, sum_by_block

CODED = 256  # elements per scale, as in csrc/optim.h
FULL = {torch.int8: 127.0, torch.uint8: 255.0}  # the largest code
_LOW = 0xFFFFFFFF


class KernelRule(IntEnum):
    """Numbered as in csrc/optim.h, like the flags below."""

    ADAMW = 0
    LION = 1
    SGD = 2
    ADAGRAD = 3
    LAMB_UPDATE = 4
    LAMB_APPLY = 5


STREAM, STOCHASTIC, FROM_GRAD, UPDATE_FROM_GRAD, FIRST_STEP, NESTEROV, EPS_INSIDE = (1 << i for i in range(7))


class Coefficients(NamedTuple):
    """The factors and addends of a rule, in the order of csrc/optim.h; each is rounded to fp32 once."""

    scale: float = 1.0  # of the gradient
    keep: float = 1.0  # of the weights: 1 - lr * weight_decay if that is decoupled
    l2: float = 0.0  # of the weights, added to the gradient; in LAMB to the update
    rate: float = 0.0  # m := a + rate * (b - a): see lerp in csrc/optim_body.h
    update_rate: float = 0.0  # the same for Lion's update
    beta1: float = 0.0  # m := beta1 * m + rest1 * g if Adam's m is stored as codes
    rest1: float = 0.0
    beta: float = 0.0  # v := beta * v + rest * g * g; SGD's m := beta * m + rest * g
    rest: float = 0.0
    correction1: float = 1.0  # of m, in LAMB
    correction2: float = 1.0  # of v in LAMB; of its root in Adam
    eps: float = 0.0
    lr: float | Tensor = 0.0  # in Adam, includes the correction of m


class Blocks(NamedTuple):
    """A state as 8-bit codes (int8 for a momentum, uint8 for the root of a sum of squares) with one fp32 scale per 256 codes.

    The encoding: [Note: Codes] in csrc/optim_body.h. Zeros have zero codes and scales."""

    codes: Tensor
    scales: Tensor

    @classmethod
    def zeros(cls, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> "Blocks":
        """dtype: int8 for a first state, uint8 for a second."""
        codes = torch.zeros(numel, dtype=dtype, device=device)
        return cls(codes, codes.new_zeros(-(-numel // CODED), dtype=torch.float32))

    def span(self, start: int, stop: int) -> "Blocks":
        """Elements [start, stop), as views. Raises ValueError unless both are multiples of 256; `stop` may also be the end."""
        if start % CODED or (stop % CODED and stop != self.codes.numel()):
            raise ValueError(
                f"elements {start} to {stop} of {self.codes.numel()} cut a block of {CODED} codes that share a scale; "
                f"cut at multiples of {CODED}"
            )
        return Blocks(self.codes[start:stop], self.scales[start // CODED : -(-stop // CODED)])

    def float(self) -> Tensor:
        return _read(self, slice(0, self.codes.numel()))

    @classmethod
    def of(cls, state: Tensor, dtype: torch.dtype) -> "Blocks":
        """Encode a state, rounding to the nearest codes."""
        blocks = cls.zeros(state.numel(), dtype, state.device)
        _encode(blocks, slice(0, state.numel()), state if dtype is torch.int8 else sqrt(state), None)
        return blocks


class Stochastic(NamedTuple):
    """Stochastic rounding of bf16 tensors and codes, unbiased. The random bits are a function of all three fields.

    `offset`: of the first element, a multiple of 16, in any numbering of elements that the caller chooses."""

    seed: int
    step: int
    offset: int

    def keys(self) -> tuple[int, int]:
        """splitmix64 (Steele et al. 2014) of seed and step."""
        mask = (1 << 64) - 1
        x = (self.seed * 0x9E3779B97F4A7C15 + self.step * 0xD1B54A32D192ED03) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        x ^= x >> 31
        return x & _LOW, x >> 32


State = Tensor | Blocks | None


@torch.no_grad()
def step(
    rule: KernelRule,
    master: Tensor,
    grad: Tensor | None,
    first: State,
    second: State,
    out: Tensor | None,
    c: Coefficients,
    flags: int,
    rounding: Stochastic | None,
) -> tuple[float | Tensor, float | Tensor]:
    """Returns LAMB_UPDATE's sums of squares of weights and update: floats on CPU, else 0-dim tensors (no synchronization)."""
    squares: tuple[list[Tensor], list[Tensor]] = ([], [])
    for span in spans(master):
        p = master[span].float()
        if rule is KernelRule.ADAMW:  # a state in codes is decayed as it is decoded
            m, v = _read(first, span, c.beta1), _read(second, span, c.beta)
        else:
            m, v = _read(first, span), _read(second, span)
        g = p if grad is None else grad[span].float() * c.scale
        if c.l2 != 0.0 and rule in (KernelRule.ADAMW, KernelRule.SGD, KernelRule.ADAGRAD):
            g.add_(p * c.l2)
        if rule is KernelRule.ADAMW:
            _adamw(p, g, m, v, c, flags, isinstance(first, Blocks), isinstance(second, Blocks))
        elif rule is KernelRule.LION:
            _lion(p, g, m, c, flags)
        elif rule is KernelRule.SGD:
            _sgd(p, g, m if first is not None else None, c, flags)
        elif rule is KernelRule.ADAGRAD:
            v.add_(g * g)
            p.sub_((g * c.lr).div_(sqrt(v).add_(c.eps)))
        elif rule is KernelRule.LAMB_UPDATE:
            _average(g, m, v, c, flags)
        else:
            p.sub_(_lamb_update(p, m, v, c, flags).mul_(c.lr))
        bits, state_bits = (None, None) if rounding is None else _random_bits(rounding, span.start, len(p), p.device)
        if rule is not KernelRule.LAMB_APPLY:
            m, v = _write(first, span, m, state_bits), _write(second, span, v, state_bits)
        if rule is KernelRule.LAMB_UPDATE:
            for sums, x in zip(squares, (p, _lamb_update(p, m, v, c, flags)), strict=True):
                square = x.double().square_()
                sums += [part.sum() for part in square.split(CPU_SUM)] if x.is_cpu else [square.sum()]
            continue
        p = _write(master, span, p, bits)
        if out is not None:
            out[span] = p
    return _total(squares[0]), _total(squares[1])


def _total(squares: list[Tensor]) -> float | Tensor:
    if squares and not squares[0].is_cpu:
        return torch.stack(squares).sum()
    return sum_by_block(torch.stack(squares).tolist()) if squares else 0.0


def _average(g: Tensor, m: Tensor, v: Tensor, c: Coefficients, flags: int) -> None:
    _lerp_(m, g, c.rate, flags & FROM_GRAD)
    _add_square_(v.mul_(c.beta), g, c)


def _add_square_(v: Tensor, g: Tensor, c: Coefficients) -> None:
    v.add_((g * c.rest).mul_(g))


def _lerp_(m: Tensor, g: Tensor, rate: float, from_grad: int) -> Tensor:
    if from_grad:  # start from the gradient, whose weight is larger
        return m.sub_(g).mul_(rate).add_(g)
    return m.add_((g - m).mul_(rate))


def _adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor, c: Coefficients, flags: int, decayed_m: bool, decayed_v: bool) -> None:
    """decayed: the state is already multiplied by its beta."""
    if c.keep != 1.0:
        p.mul_(c.keep)
    if decayed_m:
        m.add_(g * c.rest1)
    else:
        _lerp_(m, g, c.rate, flags & FROM_GRAD)
    _add_square_(v if decayed_v else v.mul_(c.beta), g, c)
    p.sub_((m * c.lr).div_(sqrt(v).mul_(c.correction2).add_(c.eps)))


def _lion(p: Tensor, g: Tensor, m: Tensor, c: Coefficients, flags: int) -> None:
    u = _lerp_(m.clone(), g, c.update_rate, flags & UPDATE_FROM_GRAD)
    if c.keep != 1.0:
        p.mul_(c.keep)
    p.sub_(((u > 0).float() - (u < 0).float()).mul_(c.lr))
    _lerp_(m, g, c.rate, flags & FROM_GRAD)


def _sgd(p: Tensor, g: Tensor, m: Tensor | None, c: Coefficients, flags: int) -> None:
    if m is not None:
        if flags & FIRST_STEP:
            m.copy_(g)
        else:
            m.mul_(c.beta).add_(g * c.rest)
        g = g.add_(m * c.beta) if flags & NESTEROV else m
    p.sub_(g * c.lr)


def _lamb_update(p: Tensor, m: Tensor, v: Tensor, c: Coefficients, flags: int) -> Tensor:
    corrected = v * c.correction2
    denominator = sqrt(corrected.add_(c.eps)) if flags & EPS_INSIDE else sqrt(corrected).add_(c.eps)
    denominator.clamp_min_(2.0**-126)  # zeros stay zeros even if eps is 0
    return (m * c.correction1).div_(denominator).add_(p * c.l2)


def _read(state: State, span: slice, factor: float = 1.0) -> Tensor:
    """The span in fp32: a view of an fp32 state, else a copy. Decoded values are multiplied by `factor`."""
    if state is None:
        return torch.empty(0)
    if isinstance(state, Tensor):
        return state[span].float()
    x = state.codes[span].float()
    unit = state.scales[span.start // CODED : -(-span.stop // CODED)] / FULL[state.codes.dtype]
    if state.codes.dtype is torch.uint8:
        x, unit = x.square_(), unit.square()
    return x.mul_((unit * factor).repeat_interleave(CODED)[: len(x)])


def _write(state: State, span: slice, x: Tensor, bits: Tensor | None) -> Tensor:
    """Store the span. Returns the values as stored (codes: as passed)."""
    if isinstance(state, Blocks):
        _encode(state, span, x if state.codes.dtype is torch.int8 else sqrt(x), bits)
    elif state is not None and state.dtype is not torch.float32:
        if bits is not None and state.dtype is torch.bfloat16:
            truncated = ((x.view(torch.int32) + bits.int()) & -65536).view(torch.float32)
            x = torch.where(x.isnan(), x, truncated)
        state[span] = x
        return state[span].float()
    return x


def _random_bits(rounding: Stochastic, start: int, numel: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """16 random bits per element, in int64, for weights and for states: see csrc/optim_body.h. int64 products wrap as in C."""
    low, high = rounding.keys()
    first = rounding.offset + start
    groups = torch.arange(first // 16, -(-(first + numel) // 16), device=device)
    x = (groups + _signed(low | high << 32)) * _signed(0x9E3779B97F4A7C15)
    x = (x ^ (x >> 32 & _LOW)) * _signed(0xD6E8FEB86659FD93)
    place = torch.arange(8, device=device) * 0x9E3779B9 & _LOW
    x = ((x >> 32 & _LOW)[:, None] ^ place) * 0x7FEB352D & _LOW
    x = (x ^ (x >> 15)) * 0x846CA68B & _LOW
    x ^= x >> 16
    numbers = torch.stack((x & 0xFFFF, x >> 16), -1)
    own, neighbor = (part.reshape(-1)[first % 16 :][:numel] for part in (numbers, numbers.flip(-1)))
    return own, neighbor


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _encode(state: Blocks, span: slice, x: Tensor, bits: Tensor | None) -> None:
    full = FULL[state.codes.dtype]
    least = -128.0 if state.codes.dtype is torch.int8 else 1.0
    rows = torch.nn.functional.pad(x, (0, -len(x) % CODED)).view(-1, CODED)
    most = rows.abs().view(torch.int32).amax(1).view(torch.float32)  # compared as integers, so that NaN is above infinity
    most = torch.where(most.isfinite(), most, math.nan)
    state.scales[span.start // CODED : span.start // CODED + len(rows)] = most
    tiny = 2.0**-100
    inverse = torch.full_like(most, full).div_(torch.where(most < tiny, tiny, most))
    code = (rows * inverse[:, None]).view(-1)[: len(x)]
    if bits is not None:
        code.add_((bits.float() * 2.0**-16).sub_(0.5 - 2.0**-17))
    code = torch.where(code > least, code, least)
    state.codes[span] = torch.where(code < full, code, full).round_()

"""How the ranks of a family add a unit's gradients. A family's transports include one of these objects, as the plan chooses.

Dense        every rank sends every element in the wire's dtype: exact sums
Coded        8-bit or 4-bit codes with one scale per 256 elements (ops/wire.py), summed in fp32 in rank order
CodedTwice   the same within groups of ranks, then across them
Rounded      every element in a narrower dtype, with error feedback, for sums that are added up over many rounds

wire         the buffer of the transport `comm` that carries gradients: elements, or bytes of codes
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from slipstream.ops import Partial
from slipstream.ops import wire as wire_codes
from slipstream.ops.wire import Feedback, encode, sum_coded
from slipstream.zero.comm import Buffer, Comm, Cuts, Pending, reduce_into
from slipstream.zero.gather import wire_cuts


class Scratch:
    """Memory for gradients before they are encoded, reused by the next unit."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def __call__(self, wire: Buffer, numel: int, dtype: torch.dtype) -> Tensor:
        memory, device = self._memory, wire.tensor.device
        if memory.numel() < numel or memory.dtype is not dtype or memory.device != device:
            self._memory = memory = torch.empty(numel, dtype=dtype, device=device)
        return memory[:numel]


class Reduction(Protocol):
    """Adds the ranks' gradients and leaves each rank its span of the sum."""

    @property
    def comm(self) -> Comm:
        """The transport whose buffers carry gradients."""

    def room(self, wire: Buffer, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory for the gradients that the next `scatter` sends: 1D, `numel` elements, of the wire's dtype or of `dtype`."""

    def scatter(
        self, values: Tensor, wire: Buffer, cuts: Cuts, out: Tensor, feedback: Feedback | None, *, alpha: float, accumulate: bool
    ) -> Pending[Partial]:
        """out (+)= alpha * this rank's span of the sum over ranks. Collective; see `Comm.reduce_scatter`.

        values: this rank's gradients of the whole unit; they are sent through `wire`, which may be their memory. cuts: the spans'
        bounds, in elements. feedback: the quantization error of earlier codes; updated.
        """

    def spread(self, full: Buffer, wire: Buffer, cuts: Cuts, feedback: Feedback | None) -> Pending[Partial | None]:
        """Fill the other ranks' spans of `full`. Returns this rank's new sum of squares if its span has changed. Collective.

        feedback: the quantization error of earlier codes of this rank's spans; updated.
        """


@dataclass(frozen=True, slots=True)
class Dense:
    """The exact sum: every rank sends every element."""

    comm: Comm
    weight: float = 1.0  # factor of the sum: see world/mesh.py, Note: Gradients of copies over tp

    def room(self, wire: Buffer, numel: int, dtype: torch.dtype) -> Tensor:
        return wire.tensor[:numel]

    def scatter(
        self, values: Tensor, wire: Buffer, cuts: Cuts, out: Tensor, feedback: Feedback | None, *, alpha: float, accumulate: bool
    ) -> Pending[Partial]:
        if values.data_ptr() != wire.tensor.data_ptr():
            wire.tensor[: values.numel()].copy_(values)
        return self.comm.reduce_scatter(wire, cuts, out, alpha=alpha * self.weight, accumulate=accumulate)

    def spread(self, full: Buffer, wire: Buffer, cuts: Cuts, feedback: Feedback | None) -> Pending[Partial | None]:
        return self.comm.all_gather(full, cuts).then(lambda _: None)


@dataclass(slots=True)
class Coded:
    """Sums of codes. Replicated gradients get the mean back in 8-bit codes or, with error feedback, in `bits` bits."""

    comm: Comm
    weight: float
    bits: int
    room: Scratch = field(default_factory=Scratch)

    def scatter(
        self, values: Tensor, wire: Buffer, cuts: Cuts, out: Tensor, feedback: Feedback | None, *, alpha: float, accumulate: bool
    ) -> Pending[Partial]:
        coded = wire_cuts(cuts, self.bits)
        encode(values, wire.tensor[: coded[-1]], self.bits, feedback)

        def add(sources: list[Tensor]) -> Partial:
            return sum_coded(out, sources, self.bits, alpha=alpha * self.weight, accumulate=accumulate)

        return self.comm.swap(wire, coded, add, "reduce-scatter")

    def spread(self, full: Buffer, wire: Buffer, cuts: Cuts, feedback: Feedback | None) -> Pending[Partial | None]:
        bits = _MEAN_BITS if feedback is None else self.bits
        coded, index = wire_cuts(cuts, bits), self.comm.index
        self.comm.reusable(wire)
        encode(full.tensor[cuts[index] : cuts[index + 1]], wire.tensor[coded[index] : coded[index + 1]], bits, feedback)

        def decode(_: None) -> Partial | None:
            spans = zip(itertools.pairwise(cuts), itertools.pairwise(coded), strict=True)
            return [sum_coded(full.tensor[slice(*span)], [wire.tensor[slice(*codes)]], bits) for span, codes in spans][index]

        return self.comm.all_gather(wire, coded).then(decode)


@dataclass(slots=True)
class CodedTwice:
    """Sums of codes in two hops: within groups of ranks, then of the groups' sums across groups (ZeRO++, qgZ: arXiv 2306.10209).

    Across groups, a rank sends codes of one sum for its whole group. Each element is rounded twice.
    """

    comm: Comm  # neighbors on dp: a group
    across: Comm  # the ranks with this rank's place in each group
    once: Coded  # over dp: sends means
    room: Scratch = field(default_factory=Scratch)

    @property
    def bits(self) -> int:
        return self.once.bits

    def scatter(
        self, values: Tensor, wire: Buffer, cuts: Cuts, out: Tensor, feedback: Feedback | None, *, alpha: float, accumulate: bool
    ) -> Pending[Partial]:
        size, groups, coded, lost = self.comm.size, self.across.size, wire_cuts(cuts, self.bits), wire_cuts(cuts, 8)
        order = [i for place in range(size) for i in range(place, size * groups, size)]  # spans, by the rank that adds
        bounds = list(itertools.accumulate((coded[i + 1] - coded[i] for i in order), initial=0))
        for i, (start, stop) in zip(order, itertools.pairwise(bounds), strict=True):
            kept = feedback and Feedback(feedback.error[lost[i] : lost[i + 1]], feedback.beta)
            encode(values[cuts[i] : cuts[i + 1]], wire.tensor[start:stop], self.bits, kept)
        own = order[self.comm.index * groups :][:groups]
        shares = list(itertools.accumulate((cuts[i + 1] - cuts[i] for i in own), initial=0))

        def add(sources: list[Tensor]) -> Partial:
            return sum_coded(out, sources, self.bits, alpha=alpha * self.once.weight, accumulate=accumulate)

        def cross(sources: list[Tensor]) -> Pending[Partial]:
            total = out.new_empty(shares[-1], dtype=torch.float32)
            sum_coded(total, sources, self.bits)
            codes = torch.empty(wire_codes.nbytes(shares[-1], self.bits), dtype=torch.uint8, device=out.device)
            encode(total, codes, self.bits)
            return self.across.swap(Buffer(codes), wire_cuts(shares, self.bits), add, "reduce-scatter across groups")

        within = self.comm.swap(wire, bounds[::groups], cross, "reduce-scatter")
        return Pending(lambda: within.wait().wait())

    def spread(self, full: Buffer, wire: Buffer, cuts: Cuts, feedback: Feedback | None) -> Pending[Partial | None]:
        self.comm.reusable(wire)
        return self.once.spread(full, wire, cuts, feedback)


@dataclass(frozen=True, slots=True)
class Rounded:
    """Sums of values that are rounded to the wire's dtype. The rounding error is added to the next values."""

    comm: Comm

    def room(self, wire: Buffer, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=wire.tensor.device)

    def scatter(
        self, values: Tensor, wire: Buffer, cuts: Cuts, out: Tensor, feedback: Feedback | None, *, alpha: float, accumulate: bool
    ) -> Pending[Partial]:
        _round_into(wire.tensor[: cuts[-1]], values, feedback)
        return self.comm.reduce_scatter(wire, cuts, out, alpha=alpha, accumulate=accumulate)

    def spread(self, full: Buffer, wire: Buffer, cuts: Cuts, feedback: Feedback | None) -> Pending[Partial | None]:
        own = slice(cuts[self.comm.index], cuts[self.comm.index + 1])
        self.comm.reusable(wire)
        _round_into(wire.tensor[own], full.tensor[own], feedback)

        def widen(_: None) -> Partial:
            full.tensor[: cuts[-1]].copy_(wire.tensor[: cuts[-1]])
            return reduce_into(full.tensor[own], [full.tensor[own]], 1.0, accumulate=False)

        return self.comm.all_gather(wire, cuts).then(widen)


def _round_into(out: Tensor, values: Tensor, feedback: Feedback | None) -> None:
    if feedback is not None:
        lost = torch.empty_like(values)
        sum_coded(lost, [feedback.error], 8)
        values = values + lost
    out.copy_(values)
    if feedback is not None:
        encode(values - out, feedback.error, 8)


@dataclass(slots=True)
class ErrorFeedback:
    """The quantization errors of a model's gradients, over its steps."""

    kept: Callable[[], Iterable[Feedback]]  # of all units
    steps: int  # steps after which the errors are dropped
    count: int = 0

    def end_step(self, is_applied: bool) -> None:
        self.count += is_applied
        if is_applied and self.count % self.steps == 0:
            for feedback in self.kept():
                feedback.error.zero_()

    def rescale(self, factor: float) -> None:
        """Rescale the errors with the loss scale, by which gradients, and so errors, are multiplied."""
        for feedback in self.kept():
            wire_codes.rescale(feedback.error, factor)


_MEAN_BITS = 8


def wire_numel(numel: int, bits: int | None) -> int:
    """Elements of the wire's buffer for a unit of `numel` elements: bytes, if it carries codes (also of the mean)."""
    return numel if bits is None else wire_codes.nbytes(numel, max(bits, _MEAN_BITS))

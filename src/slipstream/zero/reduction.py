"""How the ranks of a family add a unit's gradients, and gather its weights: values of the family's transports, chosen by the plan.

Dense   every rank sends every element in the wire's dtype: exact sums
Coded   8-bit or 4-bit codes with one scale per 256 elements (ops/wire.py), summed in fp32 in rank order

wire    the buffer that carries gradients: elements, or bytes of codes
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from slipstream.ops import Partial
from slipstream.ops import wire as wire_codes
from slipstream.ops.wire import Feedback, encode, sum_coded
from slipstream.zero.comm import Buffer, Comm, Pending


class Reduction(Protocol):
    """Adds the ranks' gradients and leaves each rank its span of the sum."""

    def room(self, wire: Buffer, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory for the gradients that the next `scatter` sends: 1D, `numel` elements, of the wire's dtype or of `dtype`."""

    def scatter(
        self,
        values: Tensor,
        wire: Buffer,
        cuts: Sequence[int],
        out: Tensor,
        feedback: Feedback | None,
        *,
        alpha: float,
        accumulate: bool,
    ) -> Pending[Partial]:
        """out (+)= alpha * this rank's span of the sum over ranks. Collective; see `Comm.reduce_scatter`.

        values: this rank's gradients of the whole unit; they are sent through `wire`, which may be their memory. cuts: the spans'
        bounds, in elements. feedback: what codes have lost before; updated.
        """

    def spread(self, full: Buffer, wire: Buffer | None, cuts: Sequence[int], feedback: Feedback | None) -> Partial | None:
        """Fill the other ranks' spans of `full`. Returns this rank's new sum of squares if its span has changed. Collective.

        feedback: what codes of this rank's spans have lost before; updated.
        """


@dataclass(frozen=True, slots=True)
class Dense:
    """The exact sum: every rank sends every element."""

    comm: Comm
    weight: float = 1.0  # of the sum: see world/mesh.py, Note: Gradients of copies over tp

    def room(self, wire: Buffer, numel: int, dtype: torch.dtype) -> Tensor:
        return wire.tensor[:numel]

    def scatter(
        self,
        values: Tensor,
        wire: Buffer,
        cuts: Sequence[int],
        out: Tensor,
        feedback: Feedback | None,
        *,
        alpha: float,
        accumulate: bool,
    ) -> Pending[Partial]:
        if values.data_ptr() != wire.tensor.data_ptr():
            wire.tensor[: values.numel()].copy_(values)
        return self.comm.reduce_scatter(wire, cuts, out, alpha=alpha * self.weight, accumulate=accumulate)

    def spread(self, full: Buffer, wire: Buffer | None, cuts: Sequence[int], feedback: Feedback | None) -> Partial | None:
        self.comm.all_gather(full, cuts).wait()
        return None


@dataclass(slots=True)
class Coded:
    """Sums of codes. The mean that replicated gradients get back is in 8-bit codes, or with error feedback in as many bits."""

    comm: Comm
    weight: float
    bits: int
    _scratch: Tensor = field(default_factory=lambda: torch.empty(0))  # gradients before they are encoded

    def room(self, wire: Buffer, numel: int, dtype: torch.dtype) -> Tensor:
        if self._scratch.numel() < numel or self._scratch.dtype is not dtype or self._scratch.device != wire.tensor.device:
            self._scratch = torch.empty(numel, dtype=dtype, device=wire.tensor.device)
        return self._scratch[:numel]

    def scatter(
        self,
        values: Tensor,
        wire: Buffer,
        cuts: Sequence[int],
        out: Tensor,
        feedback: Feedback | None,
        *,
        alpha: float,
        accumulate: bool,
    ) -> Pending[Partial]:
        coded = wire_cuts(cuts, self.bits)
        encode(values, wire.tensor[: coded[-1]], self.bits, feedback)

        def add(sources: list[Tensor]) -> Partial:
            return sum_coded(out, sources, self.bits, alpha=alpha * self.weight, accumulate=accumulate)

        return self.comm.swap(wire, coded, add, "reduce-scatter")

    def spread(self, full: Buffer, wire: Buffer | None, cuts: Sequence[int], feedback: Feedback | None) -> Partial | None:
        assert wire is not None, "coded gradients have a wire"
        bits = _MEAN_BITS if feedback is None else self.bits
        coded, index, own = wire_cuts(cuts, bits), self.comm.axis.index, None
        self.comm.reusable(wire)
        encode(full.tensor[cuts[index] : cuts[index + 1]], wire.tensor[coded[index] : coded[index + 1]], bits, feedback)
        self.comm.all_gather(wire, coded).wait()
        for i in range(self.comm.size):
            span, codes = full.tensor[cuts[i] : cuts[i + 1]], wire.tensor[coded[i] : coded[i + 1]]
            partial = sum_coded(span, [codes], bits)
            own = partial if i == index else own
        return own


@dataclass(slots=True)
class ErrorFeedback:
    """What the codes of a model's gradients have lost, over its steps."""

    kept: Callable[[], Iterable[Feedback]]  # of all units
    steps: int  # until they are dropped
    count: int = 0

    def end_step(self) -> None:
        self.count += 1
        if self.count % self.steps == 0:
            for feedback in self.kept():
                feedback.error.zero_()

    def rescale(self, factor: float) -> None:
        """Follow the loss scale, which gradients and so errors have as a factor."""
        for feedback in self.kept():
            wire_codes.rescale(feedback.error, factor)


class Gather(Protocol):
    """Fills a unit's full weights from the ranks' shards: a transport, or `CodedGather` of one."""

    size: int

    def gather_into(self, full: Tensor, shard: Tensor, cuts: Sequence[int]) -> Pending[None]: ...


@dataclass(slots=True)
class CodedGather:
    """Sends weights as 8-bit codes (ZeRO++, qwZ: arXiv 2306.10209). Every rank computes with the decoded ones, its own too."""

    comm: Comm
    size: int

    def gather_into(self, full: Tensor, shard: Tensor, cuts: Sequence[int]) -> Pending[None]:
        coded, index = wire_cuts(cuts, _WEIGHT_BITS), self.comm.axis.index
        codes = torch.empty(coded[-1], dtype=torch.uint8, device=full.device)
        own = torch.empty(coded[index + 1] - coded[index], dtype=torch.uint8, device=full.device)
        encode(shard, own, _WEIGHT_BITS)
        gathered = self.comm.gather_into(codes, own, coded)

        def finish() -> None:
            gathered.wait()
            sum_coded(full[: cuts[-1]], [codes], _WEIGHT_BITS)

        return Pending(finish)


_MEAN_BITS = 8
_WEIGHT_BITS = 8


def wire_cuts(cuts: Sequence[int], bits: int) -> list[int]:
    """The spans' bounds in bytes of codes. Every bound but the last is a multiple of 256 elements, so no block is cut."""
    return [wire_codes.nbytes(cut, bits) for cut in cuts]


def wire_numel(numel: int, bits: int | None) -> int:
    """Elements of the wire's buffer for a unit of `numel` elements: bytes, if it carries codes (also of the mean)."""
    return numel if bits is None else wire_codes.nbytes(numel, max(bits, _MEAN_BITS))

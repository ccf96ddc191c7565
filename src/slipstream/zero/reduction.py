"""How the ranks of a family add a unit's gradients: a value, so that compressed and sparse reductions are further classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from slipstream.ops import Partial
from slipstream.zero.comm import Buffer, Comm, Pending


class Reduction(Protocol):
    """Adds the ranks' gradients and leaves each rank its span of the sum."""

    def scatter(self, buffer: Buffer, cuts: Sequence[int], out: Tensor, *, alpha: float, accumulate: bool) -> Pending[Partial]:
        """out (+)= alpha * this rank's span of the sum over ranks. Collective; see `Comm.reduce_scatter`.

        buffer: this rank's gradients of the whole unit, in the wire's dtype. cuts: the spans' bounds, in elements.
        """


@dataclass(frozen=True, slots=True)
class Dense:
    """The exact sum: every rank sends every element."""

    comm: Comm
    weight: float = 1.0  # of the sum: see world/mesh.py, Note: Gradients of copies over tp

    def scatter(self, buffer: Buffer, cuts: Sequence[int], out: Tensor, *, alpha: float, accumulate: bool) -> Pending[Partial]:
        return self.comm.reduce_scatter(buffer, cuts, out, alpha=alpha * self.weight, accumulate=accumulate)

"""Parameters cut over an axis, for optimizers that need all of one: LAMB's norms, Muon's matrices, Adafactor's sums.

LAMB adds its two squares over the ranks that have the parts. Other optimizers step the whole: `Joint.join` gathers weights,
gradients and states, each rank computes the same update, and keeps its part. `zero.layout.whole_layout` gives the parts of one
whole to the same place among the shards of each family, so exactly these ranks step it, in the same order. The experts of a stack
are wholes themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.world.mesh import Axis
from slipstream.zero.comm import gather_objects, sum_over
from slipstream.zero.leaves import Part, Ranges, cuts_of_tensors, take
from slipstream.zero.unit import Unit

Squares = tuple[float | Tensor, float | Tensor]


class Joint(NamedTuple):
    """How one dimension of a whole is cut over an axis."""

    part: Part
    axis: Axis
    ranges: Sequence[Ranges]  # of each rank of the axis

    def join(self, value: Tensor) -> Tensor:
        """The whole of which each rank of the axis has the part `value`. Collective over the axis."""
        own = value.movedim(self.part.dim, 0).contiguous()
        lengths = [sum(stop - start for start, stop in ranges) for ranges in self.ranges]
        padded = torch.cat([own, own.new_zeros(max(lengths) - len(own), *own.shape[1:])])
        pieces = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(pieces, padded, group=self.axis.group)
        whole = own.new_empty(self.part.numel, *own.shape[1:])
        for piece, ranges in zip(pieces, self.ranges, strict=True):
            start = 0
            for first, last in ranges:
                whole[first:last] = piece[start : start + last - first]
                start += last - first
        return whole.movedim(0, self.part.dim).contiguous()

    def own(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole."""
        return take(whole, self.part.dim, self.ranges[self.axis.index])


def axes_of(unit: Unit, i: int) -> list[tuple[Part, Axis]]:
    """How parameter i of a unit is cut, without the axis that deals a stack's experts."""
    return [(part, unit.comms.family.parts_of(part.split)) for part in cuts_of_tensors(unit.params[i])]


def cuts_over(unit: Unit, i: int) -> tuple[Joint, ...]:
    """Collective over the ranks that have the parts of parameter i."""
    return tuple(Joint(part, axis, gather_objects(part.ranges_of(axis.index), axis)) for part, axis in axes_of(unit, i))


def summed(squares: Squares, axes: Sequence[Axis]) -> Squares:
    """The sums of two squares over the ranks of each axis, as numbers or tensors like these. Collective."""
    for axis in axes:
        both = torch.stack([torch.as_tensor(each, dtype=torch.float64) for each in squares])
        sum_over(both, axis)
        squares = (both[0], both[1]) if isinstance(squares[0], Tensor) else (float(both[0]), float(both[1]))
    return squares

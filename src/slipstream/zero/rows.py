"""The reduction of gradients in which most rows are zero: those of embeddings. Only nonzero blocks are sent.

block     elements that are sent together, at most a row: its length divides that of rows and the alignment of parameters and spans
segment   the bytes for one rank: a count, the blocks' indices (int32), the blocks in the wire's dtype. A count of -1: all blocks
          follow, without indices, because more than `DENSE` of them are nonzero (a head that is tied to an embedding)

Sums are exact, because adding zeros changes nothing: the result equals that of `Dense`, in rank order, in fp32.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipstream.ops import Partial
from slipstream.ops.wire import Feedback
from slipstream.zero.comm import Buffer, Comm, Cuts, Pending, reduce_into
from slipstream.zero.reduction import Scratch

DENSE = 0.75
_LINE = 64  # segments and their parts start at multiples of this many bytes
_SMALLEST = 16


def block_of(shapes: Sequence[Sequence[int]], align: int) -> int:
    """Elements of a block for parameters of these shapes; 0 if their rows are too short."""
    block = math.gcd(align, *(math.prod(shape[1:]) for shape in shapes))
    return block if block >= _SMALLEST else 0


def wire_nbytes(numel: int, block: int, itemsize: int, ranks: int) -> int:
    """Bytes of the segments of a unit of `numel` elements, if all are nonzero."""
    return numel * itemsize + numel // block * 4 + ranks * 3 * _LINE


def _parts(numel: int, block: int, itemsize: int) -> tuple[int, int]:
    """Where the blocks of a segment start, and where it ends, if it holds all blocks with their indices."""
    start = _LINE + -(-(numel // block * 4) // _LINE) * _LINE
    return start, start + -(-numel * itemsize // _LINE) * _LINE


@dataclass(slots=True)
class Rows:
    """Sends blocks that are not zero."""

    comm: Comm
    weight: float
    block: int
    dtype: torch.dtype  # of values on the wire
    room: Scratch = field(default_factory=Scratch)

    def scatter(
        self, values: Tensor, wire: Buffer, cuts: Cuts, out: Tensor, feedback: Feedback | None, *, alpha: float, accumulate: bool
    ) -> Pending[Partial]:
        segments = self._segments(cuts, self.dtype)
        lengths = [
            self._pack(values[a:b].to(self.dtype), wire.tensor[start:stop])
            for (a, b), (start, stop) in zip(itertools.pairwise(cuts), itertools.pairwise(segments), strict=True)
        ]

        def add(sources: list[Tensor]) -> Partial:
            return self._add(out, sources, alpha * self.weight, accumulate)

        return self.comm.swap_some(wire, segments, lengths, add, "reduce-scatter")

    def spread(self, full: Buffer, wire: Buffer, cuts: Cuts, feedback: Feedback | None) -> Pending[Partial | None]:
        dtype, index = full.tensor.dtype, self.comm.index
        segments = self._segments(cuts, dtype)
        self.comm.reusable(wire)
        own = full.tensor[cuts[index] : cuts[index + 1]]
        length = self._pack(own, wire.tensor[segments[index] : segments[index + 1]])

        def fill(sources: list[Tensor]) -> None:
            for rank, source in enumerate(sources):
                if rank != index:
                    span = full.tensor[cuts[rank] : cuts[rank + 1]]
                    numbers, blocks = self._unpack(source, span.numel(), dtype)
                    span.zero_()
                    span.view(-1, self.block)[numbers] = blocks

        return self.comm.spread_some(wire, segments, length, fill).then(lambda _: None)

    def _segments(self, cuts: Cuts, dtype: torch.dtype) -> list[int]:
        sizes = (_parts(b - a, self.block, dtype.itemsize)[1] for a, b in itertools.pairwise(cuts))
        return list(itertools.accumulate(sizes, initial=0))

    def _pack(self, span: Tensor, segment: Tensor) -> int:
        """Write a segment; returns its length in bytes."""
        blocks = span.view(-1, self.block)
        low, high = blocks.view(torch.int64).aminmax(dim=1)  # on bits: 10 times faster than comparing elements
        numbers = ((low != 0) | (high != 0)).nonzero().view(-1)
        head, start = segment[:8].view(torch.int64), _LINE
        if numbers.numel() > DENSE * len(blocks):
            head.fill_(-1)
        else:
            head.fill_(numbers.numel())
            segment[start : start + 4 * numbers.numel()].view(torch.int32).copy_(numbers)
            start += -(-4 * numbers.numel() // _LINE) * _LINE
            blocks = blocks[numbers]
        stop = start + blocks.numel() * blocks.element_size()
        segment[start:stop].view(span.dtype).copy_(blocks.reshape(-1))
        return stop

    def _unpack(self, segment: Tensor, numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The indices of a segment's blocks, and the blocks."""
        count, start = int(segment[:8].view(torch.int64)), _LINE
        numbers = torch.arange(numel // self.block, device=segment.device)
        if count >= 0:
            numbers = segment[start : start + 4 * count].view(torch.int32).long()
            start += -(-4 * count // _LINE) * _LINE
        stop = start + numbers.numel() * self.block * dtype.itemsize
        return numbers, segment[start:stop].view(dtype).view(-1, self.block)

    def _add(self, out: Tensor, sources: list[Tensor], alpha: float, accumulate: bool) -> Partial:
        parts = [self._unpack(source, out.numel(), self.dtype) for source in sources]
        numbers = torch.cat([numbers for numbers, _ in parts]).unique()
        wide = torch.promote_types(torch.promote_types(self.dtype, out.dtype), torch.float32)
        total = torch.zeros(len(numbers), self.block, dtype=wide, device=out.device)
        for own, blocks in parts:
            total.index_add_(0, torch.searchsorted(numbers, own), blocks.to(wide))
        total *= alpha
        rows = out.view(-1, self.block)
        if accumulate:
            total += rows[numbers]
        else:
            out.zero_()
        rows[numbers] = total.to(out.dtype)
        return reduce_into(out, [out], 1.0, accumulate=False)

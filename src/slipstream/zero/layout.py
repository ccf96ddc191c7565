"""The layout of one unit's flat buffer: the offsets of parameters and the cuts of shards. Pure functions.

Invariants: every parameter starts on a multiple of `ALIGN` elements; every cut is a multiple of `ALIGN`, so no kernel
has a scalar tail; the layout depends on the parameters and the data-parallel size, never on the stage
(see docs/ARCHITECTURE.md, Note: Bit identity).

slot   one parameter's position in the flat buffer
cut    a shard boundary; `cuts` has one more element than there are shards
span   a half-open range `(start, stop)` of the flat buffer
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

ALIGN = 64  # elements: 128 bytes of bf16, one AVX-512 register of fp32 times four

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's position in the flat buffer."""

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "numel", math.prod(self.shape))

    @property
    def span(self) -> Span:
        return self.offset, self.offset + self.numel

    def common(self, span: Span) -> tuple[slice, slice]:
        """The parameter's elements in a span, as a slice of the span and a slice of the flat parameter. Both may be empty."""
        start, stop = overlap(self.span, span)
        return slice(start - span[0], stop - span[0]), slice(start - self.offset, stop - self.offset)


@dataclass(frozen=True, slots=True)
class Layout:
    """Slots in parameter order and the cuts of the finest sharding."""

    slots: tuple[Slot, ...]
    cuts: tuple[int, ...]

    @property
    def numel(self) -> int:
        return self.cuts[-1]

    @property
    def num_shards(self) -> int:
        return len(self.cuts) - 1

    def shards(self, count: int) -> tuple[int, ...]:
        """Cuts of a coarser sharding into `count` parts, each a union of neighboring finest shards."""
        assert self.num_shards % count == 0, f"{self.num_shards} shards do not group into {count}"
        return self.cuts[:: self.num_shards // count]

    def span(self, count: int, index: int) -> Span:
        """The `index`-th of `count` shards."""
        cuts = self.shards(count)
        return cuts[index], cuts[index + 1]


def overlap(a: Span, b: Span) -> Span:
    """The common part of two spans; empty (start == stop) when they do not meet."""
    start = max(a[0], b[0])
    return start, max(start, min(a[1], b[1]))


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def flat_layout(shapes: Sequence[tuple[str, tuple[int, ...]]], num_shards: int, align: int = ALIGN) -> Layout:
    """Lay parameters out one after another, and cut them into `num_shards` equal shards on multiples of `align`."""
    slots, offset = [], 0
    for name, shape in shapes:
        slots.append(Slot(name, tuple(shape), offset))
        offset += round_up(math.prod(shape), align)
    shard = round_up(-(-offset // num_shards), align)
    return Layout(tuple(slots), tuple(shard * i for i in range(num_shards + 1)))


def whole_layout(
    shapes: Sequence[tuple[str, tuple[int, ...]]],
    num_shards: int,
    align: int = ALIGN,
    wholes: Sequence[tuple[int, ...]] | None = None,
) -> Layout:
    """Lay out every parameter inside one shard, for optimizers that use shapes; shards may differ in length.

    Parameters are assigned in descending size, each to the least loaded shard, ties to the lower index, so all ranks agree. wholes:
    the whole shapes, if the parameters are parts; they decide, so that all parts of one whole are in the same shard.
    """
    sizes = [math.prod(shape) for shape in wholes or [shape for _, shape in shapes]]
    load = [0] * num_shards
    owner: dict[int, int] = {}
    for i in sorted(range(len(shapes)), key=lambda i: (-sizes[i], i)):
        owner[i] = min(range(num_shards), key=lambda shard: (load[shard], shard))
        load[owner[i]] += round_up(sizes[i], align)
    lengths, starts = [0] * num_shards, []
    for i, (_, shape) in enumerate(shapes):
        starts.append(lengths[owner[i]])
        lengths[owner[i]] += round_up(math.prod(shape), align)
    cuts = tuple(itertools.accumulate(lengths, initial=0))
    slots = (Slot(name, tuple(shape), cuts[owner[i]] + starts[i]) for i, (name, shape) in enumerate(shapes))
    return Layout(tuple(slots), cuts)

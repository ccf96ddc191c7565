"""A flat range of a tensor, and the boxes it is made of.

A rank owns the row-major elements [start, stop) of a parameter. Storage and resharding use boxes (hyper-rectangles: offsets and
sizes per dim), because a tensor-parallel shard is one. The pure functions here convert between the two:

- a flat range of an N-d tensor is at most 2N-1 boxes (N-1 ragged ones at each end, one whole one between);
- those boxes, in order, are consecutive in memory: cutting a range into boxes moves no bytes;
- a tensor is stored exactly once if its boxes, from any ranks, cover it without overlap (`check_cover`).

Glossary: *box* offsets and sizes inside a tensor; *range* [start, stop) of its row-major elements.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import add, mul, sub
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

Shape = tuple[int, ...]


class Box(NamedTuple):
    """A hyper-rectangle inside a tensor; both tuples have the tensor's number of dims."""

    offsets: Shape
    sizes: Shape

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def overlap(self, other: Box) -> Box | None:
        """The elements that both boxes contain, or None if there are none."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = (min(a + m, b + n) for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True))
        sizes = tuple(end - offset for end, offset in zip(ends, offsets, strict=True))
        return Box(offsets, sizes) if all(size > 0 for size in sizes) else None

    def within(self, outer: Box) -> Box:
        """This box in coordinates of `outer`, which contains it."""
        return Box(tuple(map(sub, self.offsets, outer.offsets)), self.sizes)

    def of(self, tensor: Tensor) -> Tensor:
        """The view of `tensor` that the box contains."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            tensor = tensor.narrow(dim, offset, size)
        return tensor


def whole_box(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The boxes of the row-major range [start, stop) of `shape`, in memory order.

    An empty range has no boxes. But a tensor of zero elements is one empty box, so that it has a record.
    """
    shape = tuple(shape)
    numel = math.prod(shape)
    if not 0 <= start <= stop <= numel:
        raise ValueError(f"range [{start}, {stop}) is outside a tensor of shape {shape} with {numel} elements")
    if stop - start == numel:
        return [whole_box(shape)]
    if start == stop:
        return []
    row = numel // shape[0]
    first_whole, end_whole = -(-start // row), stop // row
    if first_whole > end_whole:  # the range begins and ends inside one row
        return _in_row(shape, end_whole, start, stop)
    parts = []
    if start < first_whole * row:
        parts += _in_row(shape, first_whole - 1, start, first_whole * row)
    if first_whole < end_whole:
        inner = shape[1:]
        parts.append(Box((first_whole,) + (0,) * len(inner), (end_whole - first_whole, *inner)))
    if end_whole * row < stop:
        parts += _in_row(shape, end_whole, end_whole * row, stop)
    return parts


def boxes_in(places: Sequence[Box], start: int, stop: int) -> list[Box]:
    """The boxes of elements [start, stop) of a tensor whose memory fills `places` one after another."""
    result, first = list[Box](), 0
    for outer in places:
        begin, end = max(start - first, 0), min(stop - first, outer.numel)
        for part in boxes(outer.sizes, begin, end) if begin < end or not outer.numel else ():
            result.append(Box(tuple(map(add, outer.offsets, part.offsets)), part.sizes))
        first += outer.numel
    return result


def places_of(ranges: Sequence[Sequence[tuple[int, int]]]) -> tuple[Box, ...]:
    """The boxes that a tensor fills, in memory order; its dimension i holds the indices `ranges[i]` of the whole's dimension i."""
    # outside the last dimension with several ranges, memory order goes one index at a time
    last = max((dim for dim, each in enumerate(ranges) if len(each) > 1), default=0)
    steps = [[(i, i + 1) for a, b in each for i in range(a, b)] if dim < last else list(each) for dim, each in enumerate(ranges)]
    return tuple(Box(tuple(a for a, _ in place), tuple(b - a for a, b in place)) for place in itertools.product(*steps))


def _in_row(shape: Shape, index: int, start: int, stop: int) -> list[Box]:
    base = index * math.prod(shape[1:])
    return [Box((index, *offsets), (1, *sizes)) for offsets, sizes in boxes(shape[1:], start - base, stop - base)]


def flat_range(shape: Shape, box: Box) -> tuple[int, int] | None:
    """The row-major range [start, stop) of a box inside `shape`, or None if the box is not contiguous."""
    start, numel, stride = 0, box.numel, 1
    ragged = False  # whether an inner dim is not fully spanned by the box
    for size, offset, length in zip(reversed(shape), reversed(box.offsets), reversed(box.sizes), strict=True):
        if ragged and length != 1:
            return None
        ragged = ragged or length != size
        start += offset * stride
        stride *= size
    return start, start + numel


def runs(shape: Shape, box: Box, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, int]]:
    """(first element in a tensor of `shape`, number of elements) of each contiguous part of a box, in row-major order.

    start, stop: only these of the box's elements.
    """
    outer = len(shape)  # the dims before this one are iterated over; the others form one run
    while outer and (outer == len(shape) or box.sizes[outer] == shape[outer]):
        outer -= 1
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    origin = sum(map(mul, box.offsets, strides))
    length, position, stop = math.prod(box.sizes[outer:]), start, box.numel if stop is None else stop
    while position < stop:
        index, skip = divmod(position, length)
        first, numel = origin + skip, min(length - skip, stop - position)
        for dim in reversed(range(outer)):
            index, step = divmod(index, box.sizes[dim])
            first += step * strides[dim]
        yield first, numel
        position += numel


def check_cover(name: str, shape: Shape, parts: Sequence[Box]) -> None:
    """Raise ValueError unless `parts` cover every element of a tensor of `shape` exactly once."""
    if len(parts) == 1 and parts[0].sizes == shape and not any(parts[0].offsets) and len(parts[0].offsets) == len(shape):
        return  # the common case: one box that is the whole tensor
    for box in parts:
        inside = len(box.offsets) == len(box.sizes) == len(shape) and all(
            offset >= 0 and length >= 0 and offset + length <= size
            for offset, length, size in zip(box.offsets, box.sizes, shape, strict=True)
        )
        if not inside:
            raise ValueError(f"tensor {name!r} of shape {shape}: {_words(box)} is outside it")
    if not parts:
        raise ValueError(f"tensor {name!r} of shape {shape}: nothing of it is there")
    if math.prod(shape) == 0:
        if len(parts) > 1:
            raise ValueError(f"tensor {name!r} of shape {shape}: {len(parts)} boxes for zero elements")
        return
    _check_disjoint(name, shape, parts)
    covered = sum(box.numel for box in parts)
    if covered != math.prod(shape):
        raise ValueError(f"tensor {name!r} of shape {shape}: only {covered} of {math.prod(shape)} elements are there")


def _check_disjoint(name: str, shape: Shape, parts: Sequence[Box]) -> None:
    ranges = [flat_range(shape, box) for box in parts]
    if all(span is not None for span in ranges):  # the common case: compare neighbors
        ordered = sorted(zip([span for span in ranges if span is not None], parts, strict=True))
        for ((_, stop), box), ((start, _), next_box) in pairwise(ordered):
            if start < stop:
                raise ValueError(f"tensor {name!r} of shape {shape}: {_words(box)} and {_words(next_box)} overlap")
        return
    # Sweep along the dim with the most distinct offsets; only boxes that overlap there are compared.
    dim = max(range(len(shape)), key=lambda d: len({box.offsets[d] for box in parts}))
    active: list[tuple[int, Box]] = []  # (where it ends along dim, box), sorted
    for box in sorted(parts, key=lambda b: b.offsets[dim]):
        while active and active[0][0] <= box.offsets[dim]:
            active.pop(0)
        for _, active_box in active:
            if box.overlap(active_box) is not None:
                raise ValueError(f"tensor {name!r} of shape {shape}: {_words(active_box)} and {_words(box)} overlap")
        insort(active, (box.offsets[dim] + box.sizes[dim], box))


def _words(box: Box) -> str:
    return f"the box at {list(box.offsets)} of sizes {list(box.sizes)}"


class Ranged(Protocol):
    """A tensor that is not in memory, for example on disk: read and written by flat range."""

    @property
    def dtype(self) -> torch.dtype: ...
    def numel(self) -> int: ...
    def get(self, start: int, stop: int) -> Tensor: ...
    def put(self, start: int, values: Tensor) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class FlatSlice:
    """This rank's flat range of one tensor: `data` holds elements [start, start + data.numel()) of `shape`, or of boxes in it.

    `data` is 1-D and contiguous, on any device or on disk. Saving reads it and loading fills it in place. A rank that owns no
    element of a tensor passes an empty `data` (any start within bounds) or omits the name.
    """

    data: Tensor | Ranged  # 1D, this rank's span
    shape: Shape  # of the whole tensor
    start: int  # in elements, row-major
    places: tuple[
        Box, ...
    ] = ()  # the boxes of the whole that the rank's tensor fills, in memory order; start counts in them. (): all of it

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if isinstance(self.data, Tensor) and (self.data.dim() != 1 or not self.data.is_contiguous()):
            raise ValueError(
                f"FlatSlice: data must be 1-D and contiguous, has shape {tuple(self.data.shape)} "
                f"and strides {self.data.stride()}; pass a flat view"
            )
        if len(self.places) == 1 and (span := flat_range(self.shape, self.places[0])) is not None:  # also a range of the whole
            object.__setattr__(self, "start", span[0] + self.start)
            object.__setattr__(self, "places", ())
        numel = sum(box.numel for box in self.places) if self.places else math.prod(self.shape)
        if not 0 <= self.start <= self.stop <= numel:
            raise ValueError(
                f"FlatSlice: range [{self.start}, {self.stop}) is outside a tensor of shape {self.shape} with {numel} elements"
            )

    @property
    def stop(self) -> int:
        return self.start + self.data.numel()

    def boxes(self) -> list[Box]:
        """The boxes of the whole tensor that `data` holds, consecutively."""
        return boxes_in(self.places or (whole_box(self.shape),), self.start, self.stop)


def memory(tensor: Tensor) -> memoryview:
    """A writable view of a contiguous CPU tensor's memory, without numpy. The caller keeps the tensor alive."""
    nbytes = tensor.numel() * tensor.element_size()
    return _view_memory(tensor.data_ptr(), nbytes, _WRITABLE) if nbytes else memoryview(b"")


_WRITABLE = 0x200  # PyBUF_WRITE
_view_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_memory.restype = ctypes.py_object
_view_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)

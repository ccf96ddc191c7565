"""Where a flat state of a unit rests.

A state (weights, gradients, master, a moment) of one unit is one flat array over this rank's span. Where it rests is its
`Store`; what computes with it sees plain tensors:

MemoryStore  memory of the device: the tensor itself
HostStore    memory of the host beside a device, which copies go into and out of (zero/lane.py)
DiskStore    a range of one anonymous file, after `head` elements that stay in memory (a partial offload is a cut in the flat range)
Section      a part of a store, as a checkpoint reads and fills it
Space        a rank's file, handed out in ranges

Ranges start on `PAGE` bytes and are asked for in `GRAIN` elements, so that every transfer is direct (O_DIRECT), whatever the dtype.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.ops.disk import Disk, aligned
from slipstream.zero.lane import Event

PAGE = 4096  # bytes
GRAIN = 4096  # elements: a page of the narrowest dtype


class Store(ABC):
    """One flat state of one unit at rest."""

    numel: int
    dtype: torch.dtype

    @abstractmethod
    def is_away(self, start: int, stop: int) -> bool:
        """Whether some of the elements [start, stop) rest on disk."""

    @abstractmethod
    def view(self, start: int, stop: int) -> Tensor | None:
        """Elements [start, stop) in place once no copy is under way, or None where some of them rest on disk."""

    @abstractmethod
    def settle(self) -> None:
        """See that what computes where the state rests, the device or the host, finds no copy under way."""

    @abstractmethod
    def get(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop): in place, or read into memory of the caller's. Waits; not for the hot path."""

    @abstractmethod
    def put(self, start: int, values: Tensor) -> None:
        """Overwrite from `start` on, casting. Waits; not for the hot path."""

    @property
    @abstractmethod
    def resident_nbytes(self) -> int:
        """Bytes of memory that it takes between steps."""

    @property
    def nbytes(self) -> int:
        """Bytes of the state, wherever."""
        return self.numel * self.dtype.itemsize

    def whole(self) -> Tensor:
        """All of it, as `get`."""
        return self.get(0, self.numel)


class MemoryStore(Store):
    """A tensor, 1D. Copies of a lane that touch it go one after the other: `moving` is the last one."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.numel, self.dtype = tensor, tensor.numel(), tensor.dtype
        self.moving: Event | None = None

    def is_away(self, start: int, stop: int) -> bool:
        return False

    def view(self, start: int, stop: int) -> Tensor:
        self.settle()
        return self.tensor[start:stop]

    def get(self, start: int, stop: int) -> Tensor:
        return self.view(start, stop)

    def put(self, start: int, values: Tensor) -> None:
        self.view(start, start + values.numel()).copy_(values)

    def settle(self) -> None:
        if self.moving is not None:
            self._await(self.moving)
            self.moving = None

    def _await(self, copy: Event) -> None:
        copy.fence()

    @property
    def resident_nbytes(self) -> int:
        return self.tensor.nbytes


class HostStore(MemoryStore):
    """Memory of the host that a device copies into and out of: what computes with it in place is the host."""

    def _await(self, copy: Event) -> None:
        copy.wait()


class DiskStore(Store):
    """A range of the file, or two in turn: new values may then be written beside the present ones. Fresh ranges read as zeros."""

    def __init__(self, disk: Disk, offset: int, numel: int, dtype: torch.dtype, head: int = 0, other: int | None = None) -> None:
        self.disk, self.offset, self.numel, self.dtype = disk, offset, numel, dtype
        self.other = offset if other is None else other  # where what a step writes goes, until `turn`
        self.head = torch.zeros(head, dtype=dtype)

    @property
    def keeps_old(self) -> bool:
        """Whether a step's writes leave the present values as they are."""
        return self.other != self.offset

    def turn(self) -> None:
        """What a step has written is the content from now on. All of what is not in the head has to have been."""
        self.offset, self.other = self.other, self.offset

    def is_away(self, start: int, stop: int) -> bool:
        return stop > self.head.numel()

    def view(self, start: int, stop: int) -> Tensor | None:
        return None if self.is_away(start, stop) else self.head[start:stop]

    def settle(self) -> None:
        pass  # no lane touches a disk

    def part(self, start: int, memory: Tensor) -> tuple[int, Tensor]:
        """What a transfer of elements from `start` (a multiple of GRAIN) takes: where in the file, and the memory."""
        return self.offset + (start - self.head.numel()) * self.dtype.itemsize, memory

    def next_part(self, start: int, memory: Tensor) -> tuple[int, Tensor]:
        """As `part`, of what a step writes."""
        return self.other + (start - self.head.numel()) * self.dtype.itemsize, memory

    def get(self, start: int, stop: int) -> Tensor:
        head = self.head.numel()
        if stop <= head:
            return self.head[start:stop]
        result = torch.empty(stop - start, dtype=self.dtype)
        if start < head:
            result[: head - start].copy_(self.head[start:])
        for first, last, low in self._pieces(max(start, head), stop):
            buffer = self._buffer(first, last)
            self.disk.read([self.part(first, buffer)]).wait()
            taken = buffer.view(self.dtype)[low - first : min(last, stop) - first]
            result[low - start : low - start + taken.numel()].copy_(taken)
        return result

    def put(self, start: int, values: Tensor) -> None:
        head, stop = self.head.numel(), start + values.numel()
        if start < head:
            self.head[start : min(stop, head)].copy_(values[: head - start])
        for first, last, low in self._pieces(max(start, head), stop):
            buffer, high = self._buffer(first, last), min(last, stop)
            if low > first or high < min(last, self.numel):  # what is beside it stays
                self.disk.read([self.part(first, buffer)]).wait()
            buffer.view(self.dtype)[low - first : high - first].copy_(values[low - start : high - start])
            self.disk.write([self.part(first, buffer)]).wait()

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(first, last, low) of bounded transfers: elements [first, last) hold [low, ...), both on grains after the head."""
        head = self.head.numel()
        while start < stop:
            first = head + (start - head) // GRAIN * GRAIN
            last = min(first + _PIECE, head + round_up(stop - head, GRAIN))
            yield first, last, start
            start = last

    def _buffer(self, first: int, last: int) -> Tensor:
        return aligned((last - first) * self.dtype.itemsize)

    @property
    def resident_nbytes(self) -> int:
        return self.head.nbytes


_PIECE = 1 << 21  # elements of one slow-path transfer


@dataclass(frozen=True, slots=True)
class Section:
    """Elements [start, start + length) of a store: what a checkpoint reads and fills of states that rest on disk."""

    store: Store
    start: int
    length: int

    @property
    def dtype(self) -> torch.dtype:
        return self.store.dtype

    def numel(self) -> int:
        return self.length

    def get(self, start: int, stop: int) -> Tensor:
        return self.store.get(self.start + start, self.start + stop)

    def put(self, start: int, values: Tensor) -> None:
        self.store.put(self.start + start, values)


def section(store: Store, start: int, stop: int) -> Tensor | Section:
    """A view where the elements rest in memory, else a section."""
    view = store.view(start, stop)
    return Section(store, start, stop - start) if view is None else view


def read(part: Tensor | Section) -> Tensor:
    """The elements: in place, or from disk in memory of the caller's."""
    return part if isinstance(part, Tensor) else part.get(0, part.length)


def write(part: Tensor | Section, values: Tensor) -> None:
    """Overwrite the elements, casting."""
    if isinstance(part, Tensor):
        part.copy_(values)
    else:
        part.put(0, values)


def copy_store(to: Store, source: Store) -> None:
    """to = source, cast, a bounded piece at a time."""
    for start in range(0, source.numel, _PIECE):
        stop = min(start + _PIECE, source.numel)
        to.put(start, source.get(start, stop))


def fill_zero(store: Store) -> None:
    """store = 0, a bounded piece at a time."""
    for start in range(0, store.numel, _PIECE):
        stop = min(start + _PIECE, store.numel)
        view = store.view(start, stop)
        if view is None:
            store.put(start, torch.zeros(stop - start, dtype=store.dtype))
        else:
            view.zero_()


def range_nbytes(numel: int, itemsize: int) -> int:
    """Bytes of file, or of a ring's buffer, for so many elements."""
    return round_up(numel, GRAIN) * itemsize


def disk_nbytes(numel: int, itemsize: int, head: int = 0) -> int:
    """Bytes of file for a store whose first `head` elements stay in memory."""
    return range_nbytes(numel - min(round_up(head, GRAIN), numel), itemsize)


class Needs(NamedTuple):
    """Bytes of disk, per rank."""

    weights: int = 0
    optim: int = 0  # and gradients
    next_weights: int = 0  # to write new values beside the old ones, where there is room
    next_optim: int = 0


class Space:
    """One rank's files, handed out in ranges. Where more is asked for than they were made for (a unit is unfrozen): another one."""

    def __init__(self, make: Callable[[int], Disk], nbytes: int) -> None:
        self._make = make
        self.disks = [make(nbytes)]
        self._free, self._end = 0, nbytes
        self._used: dict[Disk, int] = {}  # how many stores each holds

    def store(self, numel: int, dtype: torch.dtype, head: int = 0, *, twice: bool = False) -> DiskStore:
        """A fresh store; the first `head` elements, rounded up to grains, stay in memory. twice: new values go beside the old."""
        head, each = min(round_up(head, GRAIN), numel), disk_nbytes(numel, dtype.itemsize, head)
        nbytes = 2 * each if twice else each
        if self._free + nbytes > self._end:
            self.disks.append(self._make(nbytes))
            self._free, self._end = 0, nbytes
        store = DiskStore(self.disks[-1], self._free, numel, dtype, head, self._free + each if twice else None)
        self._free += nbytes
        self._used[store.disk] = self._used.get(store.disk, 0) + 1
        return store

    def drop(self, store: DiskStore) -> None:
        """A store of this space is used no more: its blocks are free, and without stores its file is."""
        if store.disk not in self._used:
            return
        self._used[store.disk] -= 1
        for offset in {store.offset, store.other}:
            store.disk.forget(offset, disk_nbytes(store.numel, store.dtype.itemsize, store.head.numel()))
        if self._used[store.disk] == 0 and store.disk is not self.disks[-1]:
            self.disks.remove(store.disk)
            del self._used[store.disk]
            store.disk.close()

    def extend(self, other: Space) -> None:
        """Hand out the ranges of another, which was made for what is to come."""
        self.disks += other.disks
        self._free, self._end = other._free, other._end

    def close(self) -> None:
        for disk in self.disks:
            disk.close()


class Spaces(NamedTuple):
    """The files of a rank; both may be one."""

    weights: Space | None = None
    optim: Space | None = None
    twice: bool = False  # there is room to write new values beside the old ones


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple

"""Storage of a unit's flat states.

A state (weights, gradients, master, a moment) of one unit is one flat array over this rank's span, kept in a `Store`:

MemoryStore  device memory: the tensor itself
CodedStore   8-bit codes in device memory: frozen weights (zero_quantized_nontrainable_weights)
HostStore    host memory of a device with memory of its own, with copies in and out (zero/storage/lane.py)
DiskStore    a range of an anonymous file, after `head` elements that stay in memory (partial offload is a cut in the flat range)
Section      a part of a store, as a checkpoint reads and fills it
Space        a rank's files, allocated in ranges

Ranges start on pages of 4096 bytes and have a multiple of `GRAIN` elements, so that all transfers are direct (O_DIRECT).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.ops import wire
from slipstream.ops.disk import Disk, aligned
from slipstream.zero.layout import round_up
from slipstream.zero.storage.lane import Event

GRAIN = 4096  # elements: a page of the narrowest dtype


class Store(ABC):
    """The storage of one flat state of one unit. The concrete methods are those of codes in memory."""

    numel: int
    dtype: torch.dtype

    def is_away(self, start: int, stop: int) -> bool:
        """Whether some of the elements [start, stop) are on disk."""
        return False

    def view(self, start: int, stop: int) -> Tensor | None:
        """Return elements [start, stop) in place after `settle`, or None if some of them are on disk or in codes."""
        return None

    def settle(self) -> None:  # noqa: B027
        """Order later computation on the state, by the device or the host that stores it, after any copy in flight."""

    @abstractmethod
    def get(self, start: int, stop: int) -> Tensor:
        """Return elements [start, stop), in place or read from disk into new memory. Waits; not for the hot path."""

    @abstractmethod
    def put(self, start: int, values: Tensor) -> None:
        """Overwrite from `start` on, casting. Waits; not for the hot path."""

    @property
    @abstractmethod
    def resident_nbytes(self) -> int:
        """Bytes of memory that the store uses between steps."""

    @property
    def nbytes(self) -> int:
        """Bytes of the state, in memory or on disk."""
        return self.numel * self.dtype.itemsize

    def whole(self) -> Tensor:
        """Return all elements, as `get`."""
        return self.get(0, self.numel)


class MemoryStore(Store):
    """A tensor, 1D. The lane's copies from and to it run one after the other; `moving` is the last one."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.numel, self.dtype = tensor, tensor.numel(), tensor.dtype
        self.moving: Event | None = None

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


class CodedStore(Store):
    """8-bit codes (ops/wire.py) in whole blocks. Reads decode. A write encodes the blocks whose values it changes."""

    def __init__(self, codes: Tensor, dtype: torch.dtype) -> None:
        self.codes, self.dtype = codes, dtype  # codes: uint8 [blocks * bytes of a block]
        self._records = codes.view(-1, wire.nbytes(wire.WIRE_BLOCK, 8))
        self.numel = len(self._records) * wire.WIRE_BLOCK

    def _decode(self, records: Tensor) -> Tensor:
        values = torch.empty(len(records) * wire.WIRE_BLOCK, dtype=self.dtype, device=records.device)
        wire.sum_coded(values, [records.view(-1)], 8)
        return values

    def get(self, start: int, stop: int) -> Tensor:
        first = start // wire.WIRE_BLOCK
        return self._decode(self._records[first : -(-stop // wire.WIRE_BLOCK)])[start - first * wire.WIRE_BLOCK :][: stop - start]

    def put(self, start: int, values: Tensor) -> None:
        first, stop = start // wire.WIRE_BLOCK, start + values.numel()
        records = self._records[first : -(-stop // wire.WIRE_BLOCK)]
        old = self._decode(records)
        new = old.clone()
        new[start - first * wire.WIRE_BLOCK :][: values.numel()].copy_(values)
        coded = torch.empty_like(records)
        wire.encode(new, coded.view(-1), 8)
        changed = (old != new).view(-1, wire.WIRE_BLOCK).any(1)  # encoding decoded values again may give other codes
        records[changed] = coded[changed]

    @property
    def resident_nbytes(self) -> int:
        return self.codes.nbytes

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes


class HostStore(MemoryStore):
    """Host memory that a device copies from and to. The host computes with it in place, so the host waits for copies."""

    def _await(self, copy: Event) -> None:
        copy.wait()


class DiskStore(Store):
    """A range of a file. New ranges read as zeros."""

    def __init__(self, disk: Disk, offset: int, numel: int, dtype: torch.dtype, head: int = 0) -> None:
        self.disk, self.offset, self.numel, self.dtype = disk, offset, numel, dtype
        self.head = torch.zeros(head, dtype=dtype)

    def is_away(self, start: int, stop: int) -> bool:
        return stop > self.head.numel()

    def view(self, start: int, stop: int) -> Tensor | None:
        return None if self.is_away(start, stop) else self.head[start:stop]

    def part(self, start: int, memory: Tensor) -> tuple[int, Tensor]:
        """The (file offset, memory) of a transfer of elements from `start`, a multiple of GRAIN after the head."""
        return self.offset + (start - self.head.numel()) * self.dtype.itemsize, memory

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
            piece = buffer.view(self.dtype)[low - first : min(last, stop) - first]
            result[low - start : low - start + piece.numel()].copy_(piece)
        return result

    def put(self, start: int, values: Tensor) -> None:
        head, stop = self.head.numel(), start + values.numel()
        if start < head:
            self.head[start : min(stop, head)].copy_(values[: head - start])
        for first, last, low in self._pieces(max(start, head), stop):
            buffer, high = self._buffer(first, last), min(last, stop)
            if low > first or high < min(last, self.numel):  # a partial write: read the other elements first
                self.disk.read([self.part(first, buffer)]).wait()
            buffer.view(self.dtype)[low - first : high - first].copy_(values[low - start : high - start])
            self.disk.write([self.part(first, buffer)]).wait()

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Split [start, stop) into bounded transfers (first, last, low): [first, last) is aligned and the data begins at `low`."""
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


_PIECE = 1 << 21  # elements of one transfer of `get`, `put` and the functions below


def pieces(numel: int) -> Iterator[tuple[int, int]]:
    """The bounds of the pieces in which `numel` elements are processed, to bound temporary memory."""
    return ((start, min(start + _PIECE, numel)) for start in range(0, numel, _PIECE))


@dataclass(frozen=True, slots=True)
class Section:
    """Elements [start, start + length) of a store, for checkpoints of states on disk."""

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
    """Return a view if the elements are in memory, else a section."""
    view = store.view(start, stop)
    return Section(store, start, stop - start) if view is None else view


def read(part: Tensor | Section) -> Tensor:
    """Return the elements, in place or read from disk into new memory."""
    return part if isinstance(part, Tensor) else part.get(0, part.length)


def write(part: Tensor | Section, values: Tensor) -> None:
    """Overwrite the leading elements, casting."""
    if isinstance(part, Tensor):
        part[: values.numel()].copy_(values)
    else:
        part.put(0, values)


def copy_store(to: Store, source: Store) -> None:
    """to = source, cast, a bounded piece at a time."""
    for start, stop in pieces(source.numel):
        to.put(start, source.get(start, stop))


def fill_zero(store: Store) -> None:
    """store = 0, a bounded piece at a time."""
    for start, stop in pieces(store.numel):
        view = store.view(start, stop)
        if view is None:
            store.put(start, torch.zeros(stop - start, dtype=store.dtype))
        else:
            view.zero_()


def range_nbytes(numel: int, itemsize: int) -> int:
    """Bytes of a file range, or of a ring's buffer, for `numel` elements."""
    return round_up(numel, GRAIN) * itemsize


def disk_nbytes(numel: int, itemsize: int, head: int = 0) -> int:
    """Bytes of the file range of a store whose first `head` elements stay in memory."""
    return range_nbytes(numel - min(round_up(head, GRAIN), numel), itemsize)


class Needs(NamedTuple):
    """Bytes of disk, per rank."""

    weights: int = 0
    optim: int = 0  # and gradients


class Space:
    """One rank's files, allocated in ranges. If a range does not fit (after unfreezing a unit), another file is created."""

    def __init__(self, make: Callable[[int], Disk], nbytes: int) -> None:
        self._make = make
        self.disks = [make(nbytes)]
        self._free, self._end = 0, nbytes
        self._used: dict[Disk, int] = {}  # number of stores in each file

    def store(self, numel: int, dtype: torch.dtype, head: int = 0) -> DiskStore:
        """Make a store. The first `head` elements, rounded up to GRAIN, stay in memory."""
        head, nbytes = min(round_up(head, GRAIN), numel), disk_nbytes(numel, dtype.itemsize, head)
        if self._free + nbytes > self._end:
            self.disks.append(self._make(nbytes))
            self._free, self._end = 0, nbytes
        store = DiskStore(self.disks[-1], self._free, numel, dtype, head)
        self._free += nbytes
        self._used[store.disk] = self._used.get(store.disk, 0) + 1
        return store

    def drop(self, store: DiskStore) -> None:
        """Free the disk blocks of a store of this space. Close its file if it holds no other stores."""
        if store.disk not in self._used:
            return
        self._used[store.disk] -= 1
        store.disk.forget(store.offset, disk_nbytes(store.numel, store.dtype.itemsize, store.head.numel()))
        if self._used[store.disk] == 0 and store.disk is not self.disks[-1]:
            self.disks.remove(store.disk)
            del self._used[store.disk]
            store.disk.close()

    def extend(self, other: Space) -> None:
        """Take over the files of another space; the next ranges are allocated from them."""
        self.disks += other.disks
        self._free, self._end = other._free, other._end

    def close(self) -> None:
        for disk in self.disks:
            disk.close()


class Spaces(NamedTuple):
    """The files of a rank; both may be the same space."""

    weights: Space | None = None
    optim: Space | None = None

    def distinct(self) -> set[Space]:
        return {space for space in self if space is not None}

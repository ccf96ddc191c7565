"""Where a flat state of a unit rests, and how states that rest on disk pass through memory.

A state (weights, gradients, master, a moment) of one unit is one flat array over this rank's span. Where it rests is its
`Store`; what computes with it sees plain tensors:

MemoryStore  memory of the device: the tensor itself
HostStore    memory of the host beside a device, which copies go into and out of (zero/lane.py)
DiskStore    a range of one anonymous file, after `head` elements that stay in memory (a partial offload is a cut in the flat range)

chunk        as much of a unit's span as the optimizer takes at a time; chunks never straddle a store's head
Ring         a few aligned host buffers: `stream` reads chunks ahead into them and writes behind out of them, from and to disks
             and, where the optimizer steps on the host, the device
Landing      memory of the device in which a unit's gradients are summed
Pages        host memory whose pages can be given back and filled again at the same address: gathered weights

Disk ranges start on `PAGE` bytes and chunks on `GRAIN` elements, so that every transfer is direct (O_DIRECT), whatever the dtype.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.ops.disk import Disk, DiskError, Transfer, aligned
from slipstream.zero.comm import Comm, Pending
from slipstream.zero.lane import Event, Lane
from slipstream.zero.placement import Tier, Tiers

PAGE = 4096  # bytes
GRAIN = 4096  # elements: a page of the narrowest dtype

Parts = list[tuple[int, Tensor]]  # (byte offset in the file, memory)


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
            last = min(first + _PIECE, head + _up(stop - head, GRAIN))
            yield first, last, start
            start = last

    def _buffer(self, first: int, last: int) -> Tensor:
        return aligned((last - first) * self.dtype.itemsize)

    @property
    def resident_nbytes(self) -> int:
        return self.head.nbytes


_PIECE = 1 << 21  # elements of one slow-path transfer
_GRADIENT_BUFFERS = 2  # one is being filled while the other is written


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
    return _up(numel, GRAIN) * itemsize


def disk_nbytes(numel: int, itemsize: int, head: int = 0) -> int:
    """Bytes of file for a store whose first `head` elements stay in memory."""
    return range_nbytes(numel - min(_up(head, GRAIN), numel), itemsize)


class Needs(NamedTuple):
    """Bytes of disk, per rank."""

    weights: int = 0
    optim: int = 0  # and gradients
    next_weights: int = 0  # to write new values beside the old ones, where there is room
    next_optim: int = 0


class Space:
    """One rank's file, handed out in ranges. Where more is asked for than it was made for (a unit is unfrozen): another file."""

    def __init__(self, make: Callable[[int], Disk], nbytes: int) -> None:
        self._make = make
        self.disks = [make(nbytes)]
        self._free, self._end = 0, nbytes

    def store(self, numel: int, dtype: torch.dtype, head: int = 0, *, twice: bool = False) -> DiskStore:
        """A fresh store; the first `head` elements, rounded up to grains, stay in memory. twice: new values go beside the old."""
        head, each = min(_up(head, GRAIN), numel), disk_nbytes(numel, dtype.itemsize, head)
        nbytes = 2 * each if twice else each
        if self._free + nbytes > self._end:
            self.disks.append(self._make(nbytes))
            self._free, self._end = 0, nbytes
        store = DiskStore(self.disks[-1], self._free, numel, dtype, head, self._free + each if twice else None)
        self._free += nbytes
        return store

    def close(self) -> None:
        for disk in self.disks:
            disk.close()


class Spaces(NamedTuple):
    """The files of a rank; both may be one."""

    weights: Space | None = None
    optim: Space | None = None
    twice: bool = False  # there is room to write new values beside the old ones


# -- streaming --


class Use(NamedTuple):
    """What a chunk needs of one state."""

    store: Store
    read: bool
    write: bool
    lane: Lane | None = None  # what carries it between the device that it rests on and the host, where the optimizer steps

    def passes(self, start: int, stop: int) -> bool:
        """Whether elements [start, stop) pass through a ring."""
        return self.lane is not None or self.store.is_away(start, stop)


@dataclass(slots=True)
class Slot:
    """One buffer of the ring and what still moves in or out of it."""

    memory: Tensor  # uint8, aligned
    moving: list[Transfer | Event] = field(default_factory=list)
    since: Event | None = None  # what copies between it and the device follow

    def settle(self) -> None:
        """Wait until nothing moves. Raises the first DiskError, after everything has ended."""
        errors: list[OSError] = []
        while self.moving:
            try:
                self.moving.pop().wait()
            except OSError as error:
                errors.append(error)
        if errors:
            raise errors[0]


class Ring:
    """Buffers of `nbytes` each, used in turn. Copies between them and the device follow `since`."""

    def __init__(self, count: int, nbytes: int, make: Callable[[int], Tensor] = aligned) -> None:
        self.slots = [Slot(make(nbytes)) for _ in range(count)]
        self.since: Event | None = None
        self._turn = 0

    def next(self) -> Slot:
        """The buffer that was used longest ago, once nothing moves in it any more."""
        slot = self.upcoming
        self._turn = (self._turn + 1) % len(self.slots)
        slot.settle()
        slot.since = self.since
        return slot

    @property
    def upcoming(self) -> Slot:
        return self.slots[self._turn]

    def drain(self) -> None:
        """Wait until nothing moves. Raises the first DiskError, after everything has ended."""
        everything = Slot(self.slots[0].memory, [transfer for slot in self.slots for transfer in slot.moving])
        for slot in self.slots:
            slot.moving = []
        everything.settle()

    @property
    def nbytes(self) -> int:
        return sum(slot.memory.nbytes for slot in self.slots)


@dataclass(slots=True)
class Chunk:
    """Elements [start, stop) of a unit's span, and the states that a step uses of them."""

    start: int
    stop: int
    uses: Mapping[str, Use]
    tensors: dict[str, Tensor] = field(default_factory=dict)  # while it is in memory
    slot: Slot | None = None

    def _moved(self) -> list[tuple[str, Use]]:
        return [(name, use) for name, use in self.uses.items() if use.passes(self.start, self.stop)]

    @property
    def may_be_ahead(self) -> bool:
        """Whether it streams, and what the optimizer keeps of it on disk does so: copies of the rest would fill the memory."""
        uses = self.uses.values()
        stay = (use for use in uses if isinstance(use.store, DiskStore) and use.read and use.write)
        return bool(self._moved()) and all(use.passes(self.start, self.stop) for use in stay)

    def nbytes(self) -> int:
        """Bytes of ring that it takes."""
        return sum(range_nbytes(self.stop - self.start, use.store.dtype.itemsize) for _, use in self._moved())

    def fetch(self, take: Callable[[], Slot]) -> None:
        """Start reading what passes through a slot."""
        if self._moved():
            self.slot = take()
            self.slot.moving = self._move(Disk.read)

    def arrive(self) -> None:
        """Put its states into `tensors`, once they are there: in the slot, and in place."""
        if self.slot is not None:
            self.slot.settle()
            self.tensors = {name: self._in_slot(use, memory) for name, (use, memory) in self._placed().items()}
        for name, use in self.uses.items():
            if name not in self.tensors:
                view = use.store.view(self.start, self.stop)
                assert view is not None, f"{name} rests in memory or passes through the slot"
                self.tensors[name] = view

    def _in_slot(self, use: Use, memory: Tensor) -> Tensor:
        return memory.view(use.store.dtype)[: self.stop - self.start]

    def _placed(self) -> dict[str, tuple[Use, Tensor]]:
        """Where each moved state lies in the slot: whole pages."""
        assert self.slot is not None
        result, at = {}, 0
        for name, use in self._moved():
            nbytes = range_nbytes(self.stop - self.start, use.store.dtype.itemsize)
            result[name] = (use, self.slot.memory[at : at + nbytes])
            at += nbytes
        return result

    def write_back(self) -> list[Transfer]:
        """Start writing what was written to; returns what then moves to disks. What moves to the device, its store knows."""
        moving: list[Transfer | Event] = []
        if self.slot is not None:
            moving = self.slot.moving = self._move(Disk.write)
        self.tensors, self.slot = {}, None
        return [each for each in moving if isinstance(each, Transfer)]

    def _move(self, move: Callable[[Disk, Parts], Transfer]) -> list[Transfer | Event]:
        """Start one transfer per file, and one copy per state on the device."""
        reads = move is Disk.read
        moving: list[Transfer | Event] = []
        parts: dict[Disk, Parts] = {}
        for use, memory in self._placed().values():
            if not (use.read if reads else use.write):
                continue
            if use.lane is not None:
                moving.append(self._carry(use, use.lane, self._in_slot(use, memory), reads))
            else:
                assert isinstance(use.store, DiskStore), "what rests in memory does not move"
                part = use.store.part if reads else use.store.next_part
                parts.setdefault(use.store.disk, []).append(part(self.start, memory))
        return [*moving, *(move(disk, each) for disk, each in parts.items())]

    def _carry(self, use: Use, lane: Lane, here: Tensor, reads: bool) -> Event:
        assert isinstance(use.store, MemoryStore) and self.slot is not None, "a state on the device passes through a slot"
        there = use.store.tensor[self.start : self.stop]
        target, source = (here, there) if reads else (there, here)
        use.store.moving = lane.copy(target, source, (self.slot.since, use.store.moving))
        return use.store.moving


def chunks(numel: int, uses: Mapping[str, Use], most: int) -> list[Chunk]:
    """A span cut into chunks of at most `most` elements; one chunk where nothing of it passes through a ring."""
    if not any(use.passes(0, numel) for use in uses.values()):
        return [Chunk(0, numel, uses)]
    heads = {use.store.head.numel() for use in uses.values() if isinstance(use.store, DiskStore)}
    result, start = [], 0
    for edge in sorted({*(head for head in heads if 0 < head < numel), numel}):
        while start < edge:
            stop = min(start + _up(most, GRAIN), edge)
            result.append(Chunk(start, stop, uses))
            start = stop
    return result


def stream(take: Callable[[bool], Chunk | None], ring: Ring | None) -> Generator[Chunk, None, None]:
    """Each chunk with its states in `tensors`, in order, while the next are being read and the last written.

    take: the next chunk, or None where there is none now. Asked with True, there is nothing else in hand: None ends the stream.
    The caller calls `write_back`. When the stream ends, also by an exception, nothing moves any more.
    """
    ahead: deque[Chunk] = deque()
    room = max(1, len(ring.slots) - 1) if ring else 1  # one is being written
    try:
        while True:
            while len(ahead) < room and (chunk := take(not ahead)) is not None:
                chunk.fetch(ring.next if ring else _no_slot)
                ahead.append(chunk)
            if not ahead:
                return
            chunk = ahead.popleft()
            chunk.arrive()
            yield chunk
    finally:
        if ring is not None:
            ring.drain()


def _no_slot() -> Slot:
    raise AssertionError("a state on disk and no ring to read it into")


# -- an engine's --


class Landing(NamedTuple):
    """Memory of the device in which a unit's gradients are summed."""

    memory: Tensor  # what they are so far, and free to be written, after `ready`
    ready: Callable[[], None]
    rest: Callable[[], None]  # puts the sum to rest


class Homes:
    """Where an engine's states rest, and the memory through which gradients reach the host or the disk.

    [Note: Gradients on the host]
    Their sum over micro-batches is made on the device: what rests on the host is copied back ahead of its unit's reduction, added
    to by the kernel that adds resident gradients, and leaves again. The bus carries both directions at once, the host's cores
    stay with the optimizer, and no bit depends on where gradients rest. Two buffers of the device take turns: one is summed in,
    while the copy out of the other, and then the copy into it, run.
    """

    def __init__(
        self, tiers: Tiers, device: torch.device, spaces: Spaces, lane: Lane | None, *, has_peers: bool = False
    ) -> None:
        self.tiers, self.device, self.spaces, self.lane = tiers, device, spaces, lane
        self.has_peers = has_peers  # other ranks, which would wait for one that raises in mid-step
        self.failure: DiskError | None = None  # the first of a forward or backward, until the engine has told all ranks
        self._gradients: Ring | None = None  # made when the first pass through it
        self._gradient_nbytes = 0  # of the longest unit's share that rests beside the device or on disk
        self._landings: deque[MemoryStore] = deque()
        self._passages: defaultdict[int, list[HostStore]] = defaultdict(list)  # by size; from a disk to the device, not in use
        self._weights_to_keep = tiers.weights_kept
        self.check: Callable[[], None] = _nothing  # raises where what rests is lost; the engine's
        self._writing: dict[int, Slot] = {}  # store -> the slot that it was last written from

    @property
    def _grads_tier(self) -> Tier:
        return self.tiers.grads(on_host=self.lane is None)

    @property
    def apart(self) -> bool:
        """Whether the optimizer steps in another memory than the device's."""
        return self.lane is not None and self.tiers.optim is not Tier.DEVICE

    def lane_from(self, store: Store) -> Lane | None:
        """What carries a state to where the optimizer steps; None where it is there, or on disk."""
        return self.lane if self.apart and type(store) is MemoryStore else None

    def ring(self, count: int, nbytes: int) -> Ring:
        """Buffers for the optimizer's chunks."""
        return Ring(count, nbytes, aligned if self.lane is None else self.lane.memory)

    def now(self) -> Event | None:
        """The end of what the device was given so far; None where it is the host, which is done."""
        return None if self.lane is None else self.lane.now()

    def _make(self, tier: Tier, space: Space | None, numel: int, dtype: torch.dtype, head: int = 0, twice: bool = False) -> Store:
        if tier is Tier.DISK and head < numel:
            assert space is not None, "a plan with a disk tier opens a file"
            return space.store(numel, dtype, head, twice=twice and self.spaces.twice)
        if tier is not Tier.DEVICE and self.lane is not None:
            return HostStore(self.lane.memory(numel * dtype.itemsize).view(dtype))
        return MemoryStore(torch.zeros(numel, dtype=dtype, device=self.device))

    def state(self, numel: int, dtype: torch.dtype) -> Store:
        """A store of zeros for a state that the optimizer keeps."""
        return self._make(self.tiers.optim, self.spaces.optim, numel, dtype, round(numel * self.tiers.kept), twice=True)

    def gradients(self, numel: int, dtype: torch.dtype) -> Store:
        """A store of zeros for reduced gradients."""
        store = self._make(self._grads_tier, self.spaces.optim, numel, dtype)
        if isinstance(store, (DiskStore, HostStore)):
            self._gradient_nbytes = max(self._gradient_nbytes, range_nbytes(numel, dtype.itemsize))
        return store

    def weights(self, numel: int, dtype: torch.dtype, *, trainable: bool) -> Store:
        """A store of zeros for sharded weights; of the first units', as many as are to be kept stay in memory."""
        kept = min(numel, self._weights_to_keep)
        self._weights_to_keep -= kept
        return self._make(self.tiers.weights, self.spaces.weights, numel, dtype, kept, twice=trainable)

    def open(self, store: Store, read: bool) -> Landing:
        """Where to sum a unit's gradients that rest in `store`, beginning with what they are so far (`read`)."""
        if isinstance(store, HostStore):
            return self._open_on_host(store, read)
        view = store.view(0, store.numel)
        return self._open_on_disk(store, read) if view is None else Landing(view, _nothing, _nothing)

    def _open_on_host(self, store: HostStore, read: bool) -> Landing:
        lane, landing = self.lane, self._next_landing(store.nbytes)
        assert lane is not None, "what rests beside a device has a lane to it"
        memory = landing.tensor[: store.nbytes].view(store.dtype)
        if read:
            store.moving = landing.moving = lane.copy(memory, store.tensor, (lane.now(), store.moving, landing.moving))

        def rest() -> None:
            store.moving = landing.moving = lane.copy(store.tensor, memory, (lane.now(), store.moving))

        return Landing(memory, landing.settle, rest)

    def _next_landing(self, nbytes: int) -> MemoryStore:
        """The device's buffer that was used longest ago. A copy of its last content may be under way: only `ready` waits for it."""
        if not self._landings or self._landings[0].numel < nbytes:  # a unit that was unfrozen may be longer than all others
            self.close_landings()
            longest = max(nbytes, self._gradient_nbytes)
            self._landings.extend(MemoryStore(torch.empty(longest, dtype=torch.uint8, device=self.device)) for _ in range(2))
        self._landings.rotate(-1)
        return self._landings[-1]

    def close_landings(self) -> None:
        """Give the buffers back in which gradients are summed."""
        for landing in self._landings:
            if landing.moving is not None:
                landing.moving.wait()
        self._landings.clear()

    def _open_on_disk(self, store: Store, read: bool) -> Landing:
        assert isinstance(store, DiskStore), "what does not rest in memory rests on disk"
        if self._gradients is None or self._gradients.slots[0].memory.numel() < self._gradient_nbytes:  # a unit was unfrozen
            self.settle()
            self._gradients = Ring(_GRADIENT_BUFFERS, self._gradient_nbytes)
        earlier = self._writing.pop(id(store), None)
        for slot in (earlier, self._gradients.upcoming):
            with self._noting():
                if slot is not None:
                    slot.settle()
        slot = self._gradients.next()
        memory = slot.memory[: range_nbytes(store.numel, store.dtype.itemsize)]
        with self._noting(memory.view(store.dtype)):
            if read:
                store.disk.read([store.part(0, memory)]).wait()

        def rest() -> None:
            slot.moving.append(store.disk.write([store.part(0, memory)]))
            self._writing[id(store)] = slot

        return Landing(memory.view(store.dtype)[: store.numel], _nothing, rest)

    def gather(self, store: Store, pages: Pages | None, full: Tensor, dp: Comm, cuts: Sequence[int]) -> Pending[None]:
        """Start moving this rank's weights from where they rest, and gather the others'. One rank moves into `full` itself.

        With a disk the collective is launched by `wait`: ranks whose weights happen to rest in memory must not be ahead of others.
        """
        if self.lane is not None and type(store) is not MemoryStore:
            return self._gather_over(self.lane, store, full, dp, cuts)
        memory, reading = store.view(0, store.numel), None
        if memory is None:
            assert isinstance(store, DiskStore) and pages is not None, "weights on disk are gathered into pages"
            raw = pages.memory if dp.size == 1 else aligned(range_nbytes(store.numel, store.dtype.itemsize))
            memory, reading = _start_reading(store, raw)
        elif self.tiers.weights is not Tier.DISK or dp.size == 1:
            return dp.gather_into(full, memory, cuts)

        def finish() -> None:
            with self._noting(memory):
                if reading is not None:
                    reading.wait()
            if dp.size > 1:
                dp.gather_into(full, memory, cuts).wait()

        return Pending(finish)

    @contextmanager
    def _noting(self, spoiled: Tensor | None = None) -> Iterator[None]:
        """Keep a disk's failure for the engine to tell all ranks; with peers go on until then. What was not read is NaN."""
        try:
            yield
        except DiskError as error:
            self.failure = self.failure or DiskError(*error.args)  # no traceback: its frames would keep the graph alive
            if not self.has_peers:
                raise
            if spoiled is not None:
                spoiled.fill_(float("nan"))

    def _gather_over(self, lane: Lane, store: Store, full: Tensor, dp: Comm, cuts: Sequence[int]) -> Pending[None]:
        """The same to a device with memory of its own, which computes on meanwhile and waits where the weights are needed."""
        shard = full if dp.size == 1 else torch.empty(store.numel, dtype=store.dtype, device=full.device)
        since = lane.now()  # what had this memory before is done with it

        def launch(copy: Event) -> Pending[None]:
            if dp.size == 1:
                return Pending(copy.fence)
            with lane.behind(copy):
                return dp.gather_into(full, shard, cuts)

        if isinstance(store, HostStore):
            store.moving = copy = lane.copy(shard, store.tensor, (since, store.moving))
            return launch(copy) if self.tiers.weights is Tier.HOST else Pending(lambda: launch(copy).wait())
        assert isinstance(store, DiskStore), "weights rest on the device, the host or a disk"
        nbytes = range_nbytes(store.numel, store.dtype.itemsize)
        spare = self._passages[nbytes]
        passage = spare.pop() if spare else HostStore(lane.memory(nbytes))
        memory, reading = _start_reading(store, passage.view(0, nbytes))

        def finish() -> None:
            with self._noting(memory):
                reading.wait()
            passage.moving = copy = lane.copy(shard, memory, (since,))
            spare.append(passage)
            launch(copy).wait()

        return Pending(finish)

    @property
    def on_disk(self) -> bool:
        return self.spaces.weights is not None or self.spaces.optim is not None

    def on_its_way(self, store: Store) -> list[Transfer | Event]:
        """What still moves of gradients that have been put to rest."""
        slot = self._writing.get(id(store))
        return list(slot.moving) if slot is not None else []

    def settle(self) -> None:
        """Wait until all gradients rest. What goes wrong is in `failure`."""
        self._writing.clear()
        try:
            if self._gradients is not None:
                self._gradients.drain()
        except DiskError as error:
            self.failure = self.failure or error

    @property
    def nbytes(self) -> int:
        """Memory through which gradients pass."""
        return _GRADIENT_BUFFERS * self._gradient_nbytes

    def give_back(self) -> int:
        """Let that memory go until the next gradients pass, when all rest; returns its bytes."""
        ring, self._gradients = self._gradients, None
        return ring.nbytes if ring is not None else 0

    def close(self) -> None:
        self.close_landings()
        if self.lane is not None:
            self.lane.close()
        for space in {self.spaces.weights, self.spaces.optim} - {None}:
            assert space is not None
            space.close()


def _start_reading(store: DiskStore, raw: Tensor) -> tuple[Tensor, Transfer]:
    """All of a store in `raw`, once the transfer has ended."""
    memory, kept = raw.view(store.dtype)[: store.numel], store.head.numel()
    memory[:kept].copy_(store.head)
    rest = raw[kept * store.dtype.itemsize :][: range_nbytes(store.numel - kept, store.dtype.itemsize)]
    return memory, store.disk.read([store.part(kept, rest)])


# -- memory that comes and goes --


class Pages:
    """Page-aligned host memory of a fixed address, which `free` gives back to the system. Read after that: zeros."""

    def __init__(self, nbytes: int) -> None:
        self.memory = aligned(_up(nbytes, PAGE))

    def free(self) -> None:
        address, nbytes = ctypes.c_void_p(self.memory.data_ptr()), ctypes.c_size_t(self.memory.numel())
        refused = ctypes.CDLL(None, use_errno=True).madvise(address, nbytes, mmap.MADV_DONTNEED)
        assert refused == 0, os.strerror(ctypes.get_errno())


def _nothing() -> None:
    pass


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple

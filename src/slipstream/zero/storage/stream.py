"""Stream offloaded states through host buffers, so that the optimizer processes a unit's span chunk by chunk.

chunk   the part of a unit's span that the optimizer updates at a time; starts on a `GRAIN` and does not cross a store's head
Use     a chunk's access to one state: the store, whether it is read, whether it is written
Ring    aligned host buffers: `stream` prefetches chunks into them and writes back asynchronously, from and to disks and, if the
        optimizer steps on the host, the device
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from torch import Tensor

from slipstream.ops.disk import Disk, Transfer, aligned
from slipstream.zero.layout import Span, round_up
from slipstream.zero.storage.lane import Event, Lane
from slipstream.zero.storage.store import GRAIN, DiskStore, MemoryStore, Store, range_nbytes

Parts = list[tuple[int, Tensor]]  # (byte offset in the file, memory)


class StateUse(NamedTuple):
    """A chunk's access to one state."""

    store: Store
    read: bool
    write: bool
    lane: Lane | None = None  # copies a device-resident state to and from the host, where the optimizer steps

    def passes(self, start: int, stop: int) -> bool:
        """Whether elements [start, stop) pass through a ring."""
        return self.lane is not None or self.store.is_away(start, stop)


@dataclass(slots=True)
class RingBuffer:
    """One buffer of the ring and its transfers in flight."""

    memory: Tensor  # uint8, aligned
    moving: list[Transfer | Event] = field(default_factory=list)
    since: Event | None = None  # copies between the buffer and the device start after this event

    def settle(self) -> None:
        """Wait for all transfers, then raise the first error."""
        errors: list[OSError] = []
        while self.moving:
            try:
                self.moving.pop().wait()
            except OSError as error:
                errors.append(error)
        if errors:
            raise errors[0]


class Ring:
    """Buffers of `nbytes` each, used round-robin. Copies between them and the device start after `since`."""

    def __init__(self, count: int, nbytes: int, make: Callable[[int], Tensor] = aligned) -> None:
        self.slots = [RingBuffer(make(nbytes)) for _ in range(count)]
        self.since: Event | None = None
        self._turn = 0

    def next(self) -> RingBuffer:
        """Return the least recently used buffer, after its transfers have ended."""
        slot = self.upcoming
        self._turn = (self._turn + 1) % len(self.slots)
        slot.settle()
        slot.since = self.since
        return slot

    @property
    def upcoming(self) -> RingBuffer:
        return self.slots[self._turn]

    def drain(self) -> None:
        """Wait for all transfers, then raise the first error."""
        combined = RingBuffer(self.slots[0].memory, [transfer for slot in self.slots for transfer in slot.moving])
        for slot in self.slots:
            slot.moving = []
        combined.settle()

    @property
    def nbytes(self) -> int:
        return sum(slot.memory.nbytes for slot in self.slots)


@dataclass(slots=True)
class StateChunk:
    """Elements [start, stop) of a unit's span, and the states that a step uses."""

    start: int
    stop: int
    uses: Mapping[str, StateUse]
    tensors: dict[str, Tensor] = field(default_factory=dict)  # the states, while in memory
    slot: RingBuffer | None = None
    moved: list[tuple[str, StateUse]] = field(init=False)  # the uses that pass through a slot

    def __post_init__(self) -> None:
        self.moved = [(name, use) for name, use in self.uses.items() if use.passes(self.start, self.stop)]

    def nbytes(self) -> int:
        """Bytes of a ring's buffer that the chunk needs."""
        return sum(range_nbytes(self.stop - self.start, use.store.dtype.itemsize) for _, use in self.moved)

    def fetch(self, ring: Ring | None) -> None:
        """Start reading the states that pass through a slot."""
        if self.moved:
            self.slot = cast("Ring", ring).next()
            self.slot.moving = self._move(self.slot, Disk.read)

    def arrive(self) -> None:
        """Wait for the reads, and set `tensors` to the states: in the slot, or in place."""
        if self.slot is not None:
            self.slot.settle()
            self.tensors = {name: self._in_slot(use, memory) for name, (use, memory) in self._placed(self.slot).items()}
        for name, use in self.uses.items():
            if name not in self.tensors:
                view = use.store.view(self.start, self.stop)
                assert view is not None, f"{name} is in memory or passes through the slot"
                self.tensors[name] = view

    def _in_slot(self, use: StateUse, memory: Tensor) -> Tensor:
        return memory.view(use.store.dtype)[: self.stop - self.start]

    def _placed(self, slot: RingBuffer) -> dict[str, tuple[StateUse, Tensor]]:
        """The memory of each moved state in the slot, in whole pages."""
        result, at = {}, 0
        for name, use in self.moved:
            nbytes = range_nbytes(self.stop - self.start, use.store.dtype.itemsize)
            result[name] = (use, slot.memory[at : at + nbytes])
            at += nbytes
        return result

    def write_back(self) -> list[Transfer]:
        """Start writing the modified states; returns the transfers to disk. Copies to the device are in their store's `moving`."""
        moving: list[Transfer | Event] = []
        if self.slot is not None:
            moving = self.slot.moving = self._move(self.slot, Disk.write)
        self.tensors, self.slot = {}, None
        return [transfer for transfer in moving if isinstance(transfer, Transfer)]

    def _move(self, slot: RingBuffer, move: Callable[[Disk, Parts], Transfer]) -> list[Transfer | Event]:
        """Start one transfer per file, and one copy per state on the device."""
        reads = move is Disk.read
        moving: list[Transfer | Event] = []
        parts: dict[Disk, Parts] = {}
        for use, memory in self._placed(slot).values():
            if not (use.read if reads else use.write):
                continue
            if use.lane is not None:
                moving.append(self._carry(use, use.lane, self._in_slot(use, memory), slot.since, reads))
            else:
                assert isinstance(use.store, DiskStore), "a state in memory does not move"
                parts.setdefault(use.store.disk, []).append(use.store.part(self.start, memory))
        return [*moving, *(move(disk, of_disk) for disk, of_disk in parts.items())]

    def _carry(self, use: StateUse, lane: Lane, host: Tensor, since: Event | None, reads: bool) -> Event:
        assert isinstance(use.store, MemoryStore), "a state on the device passes through a slot"
        device = use.store.tensor[self.start : self.stop]
        target, source = (host, device) if reads else (device, host)
        use.store.moving = lane.copy(target, source, (since, use.store.moving))
        return use.store.moving


def chunks(numel: int, uses: Mapping[str, StateUse], most: int) -> list[StateChunk]:
    """Cut a span into chunks of at most `most` elements; into one chunk if no state passes through a ring."""
    if not any(use.passes(0, numel) for use in uses.values()):
        return [StateChunk(0, numel, uses)]
    heads = {use.store.head.numel() for use in uses.values() if isinstance(use.store, DiskStore)}
    result, start = [], 0
    for edge in sorted({*(head for head in heads if 0 < head < numel), numel}):
        while start < edge:
            stop = min(start + round_up(most, GRAIN), edge)
            result.append(StateChunk(start, stop, uses))
            start = stop
    return result


def narrowed(whole: Sequence[StateChunk], spans: Sequence[Span]) -> list[StateChunk]:
    """The chunks of a span, in order, restricted to `spans` in whole grains. Chunks that pass through no ring stay whole."""
    result = []
    for chunk in whole:
        start = stop = chunk.start
        for first, last in spans if chunk.moved else [(chunk.start, chunk.stop)]:
            first, last = max(first // GRAIN * GRAIN, chunk.start), min(round_up(last, GRAIN), chunk.stop)
            if first >= last:
                continue
            if first > stop:
                result.append((start, stop, chunk.uses))
                start = first
            stop = max(stop, last)
        result.append((start, stop, chunk.uses))
    return [StateChunk(*each) for each in result if each[0] < each[1]]


def stream(upcoming: Iterator[StateChunk], ring: Ring | None) -> Generator[StateChunk, None, None]:
    """Yield each chunk with its states in `tensors`, in order, while the next are read and the previous one is written.

    The caller calls `write_back`. When the stream ends, also through an exception, all transfers have ended.
    """
    ahead: deque[StateChunk] = deque()
    depth = max(1, len(ring.slots) - 1) if ring else 1  # one slot is being written
    try:
        while True:
            for chunk in itertools.islice(upcoming, depth - len(ahead)):
                chunk.fetch(ring)
                ahead.append(chunk)
            if not ahead:
                return
            chunk = ahead.popleft()
            chunk.arrive()
            yield chunk
    finally:
        if ring is not None:
            ring.drain()

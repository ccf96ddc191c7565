"""The storage tier of each of an engine's states, and the transfers of offloaded weights and gradients in forward and backward.

Homes    makes stores, opens them for a unit's reduction, and gathers weights from them
Landing  device memory in which a unit's gradients are summed
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.ops.disk import DiskError, Transfer, aligned
from slipstream.zero.comm import Pending
from slipstream.zero.gather import Gather
from slipstream.zero.placement import Tier, Tiers
from slipstream.zero.storage.lane import Event, Lane
from slipstream.zero.storage.store import CodedStore, DiskStore, HostStore, MemoryStore, Space, Spaces, Store, range_nbytes
from slipstream.zero.storage.stream import Ring, RingBuffer

_GRADIENT_BUFFERS = 2  # one is filled while the other is written to disk


class Landing(NamedTuple):
    """Device memory in which a unit's gradients are summed."""

    memory: Tensor  # the sum so far; call `ready` before using it
    ready: Callable[[], None]
    write_back: Callable[[], None]  # starts writing the sum back to its store


class Homes:
    """Allocates an engine's states in their tiers, and owns the buffers through which gradients reach the host or the disk.

    [Note: Gradients on the host]
    The device sums gradients over micro-batches: the sum so far is copied from the host ahead of its unit's reduction, the kernel
    for resident gradients adds to it, and it is copied back. The bus carries both directions at once, the host's cores stay free
    for the optimizer, and the bits do not depend on the tier. Two device buffers alternate: while one is summed into, the other is
    copied out and then filled.
    """

    def __init__(self, tiers: Tiers, device: torch.device, spaces: Spaces, lane: Lane | None, *, has_peers: bool = False) -> None:
        self.tiers, self.device, self.spaces, self.lane = tiers, device, spaces, lane
        self.has_peers = has_peers  # whether there are other ranks, which would wait for a rank that raises in mid-step
        self.failure: DiskError | None = None  # the first error of a forward or backward, until the engine raises it on all ranks
        self._gradients: Ring | None = None  # buffers for gradients on disk, allocated on first use
        self._gradient_nbytes = 0  # of the longest gradient shard on the host or on disk
        self._landings: deque[MemoryStore] = deque()
        self._staging: defaultdict[int, list[HostStore]] = defaultdict(list)  # size -> idle staging buffers, disk to device
        self.to_keep = tiers.weights_kept  # further elements of weights to keep in memory
        self.check: Callable[[], None] = _nothing  # set by the engine: raises if stored states are lost
        self._writing: dict[int, RingBuffer] = {}  # id(store) -> the slot of its last write

    @property
    def steps_on_host(self) -> bool:
        """Whether the optimizer steps on the host of a device with memory of its own."""
        return self.lane is not None and self.tiers.optim is not Tier.DEVICE

    def lane_from(self, store: Store) -> Lane | None:
        """The lane that copies a device-resident state to the optimizer on the host; None if no such copy is needed."""
        return self.lane if self.steps_on_host and type(store) is MemoryStore else None

    def ring(self, count: int, nbytes: int) -> Ring:
        """Buffers for the optimizer's chunks."""
        return Ring(count, nbytes, aligned if self.lane is None else self.lane.memory)

    def now(self) -> Event | None:
        """An event after the work queued on the device so far; None if the device is the host."""
        return None if self.lane is None else self.lane.now()

    def _make(self, tier: Tier, space: Space | None, numel: int, dtype: torch.dtype, head: int = 0) -> Store:
        if tier is Tier.DISK and head < numel:
            assert space is not None, "a plan with a disk tier opens a file"
            return space.store(numel, dtype, head)
        if tier is not Tier.DEVICE and self.lane is not None:
            return HostStore(self.lane.memory(numel * dtype.itemsize).view(dtype))
        return MemoryStore(torch.zeros(numel, dtype=dtype, device=self.device))

    def state(self, numel: int, dtype: torch.dtype) -> Store:
        """A store of zeros for an optimizer state."""
        return self._make(self.tiers.optim, self.spaces.optim, numel, dtype, round(numel * self.tiers.kept))

    def gradients(self, numel: int, dtype: torch.dtype) -> Store:
        """A store of zeros for reduced gradients."""
        store = self._make(self.tiers.grads(on_host=self.lane is None), self.spaces.optim, numel, dtype)
        if isinstance(store, (DiskStore, HostStore)):
            self._gradient_nbytes = max(self._gradient_nbytes, range_nbytes(numel, dtype.itemsize))
        return store

    def weights(self, numel: int, dtype: torch.dtype, codes: Tensor | None = None) -> Store:
        """A store of zeros for sharded weights, in `codes` if given. The first `tiers.weights_kept` elements of the engine stay in
        memory."""
        if codes is not None:
            return CodedStore(codes, dtype)
        kept = min(numel, self.to_keep)
        self.to_keep -= kept
        return self._make(self.tiers.weights, self.spaces.weights, numel, dtype, kept)

    def return_kept(self, weights: Store) -> None:
        """Let later stores keep as many elements in memory as the freed store `weights` kept."""
        if self.tiers.weights is Tier.DISK:
            self.to_keep += weights.head.numel() if isinstance(weights, DiskStore) else weights.numel

    def drop(self, store: Store) -> None:
        """Free the disk blocks of a store that is no longer used."""
        self._writing.pop(id(store), None)
        if isinstance(store, DiskStore):
            for space in self.spaces.distinct():
                space.drop(store)

    def extend(self, more: Spaces) -> None:
        """Allocate further stores in the files of `more`."""
        for space, added in {(self.spaces.weights, more.weights), (self.spaces.optim, more.optim)}:  # the two may be one space
            if space is not None and added is not None:
                space.extend(added)

    def open(self, store: Store, read: bool) -> Landing:
        """Return memory in which to sum the gradients of `store`, filled with the sum so far if `read`."""
        if self.lane is not None and isinstance(store, HostStore):
            return self._open_on_host(self.lane, store, read)
        view = store.view(0, store.numel)
        return self._open_on_disk(store, read) if view is None else Landing(view, _nothing, _nothing)

    def _open_on_host(self, lane: Lane, store: HostStore, read: bool) -> Landing:
        landing = self._next_landing(store.nbytes)
        memory = landing.tensor[: store.nbytes].view(store.dtype)
        if read:
            store.moving = landing.moving = lane.copy(memory, store.tensor, (lane.now(), store.moving, landing.moving))

        def write_back() -> None:
            store.moving = landing.moving = lane.copy(store.tensor, memory, (lane.now(), store.moving))

        return Landing(memory, landing.settle, write_back)

    def _next_landing(self, nbytes: int) -> MemoryStore:
        """The least recently used device buffer. Its last content may still be copied out: only `ready` waits for that."""
        if not self._landings or self._landings[0].numel < nbytes:  # an unfrozen unit may be longer than all others
            self.close_landings()
            longest = max(nbytes, self._gradient_nbytes)
            self._landings.extend(MemoryStore(torch.empty(longest, dtype=torch.uint8, device=self.device)) for _ in range(2))
        self._landings.rotate(-1)
        return self._landings[-1]

    def close_landings(self) -> None:
        """Free the device buffers in which gradients are summed."""
        for landing in self._landings:
            if landing.moving is not None:
                landing.moving.wait()
        self._landings.clear()

    def _open_on_disk(self, store: Store, read: bool) -> Landing:
        assert isinstance(store, DiskStore), "a store without a view is on disk"
        if self._gradients is None or self._gradients.slots[0].memory.numel() < self._gradient_nbytes:  # a unit was unfrozen
            self.settle()
            self._gradients = Ring(_GRADIENT_BUFFERS, self._gradient_nbytes)
        earlier = self._writing.pop(id(store), None)
        for slot in (earlier, self._gradients.upcoming):
            with self._recording_failure():
                if slot is not None:
                    slot.settle()
        slot = self._gradients.next()
        memory = slot.memory[: range_nbytes(store.numel, store.dtype.itemsize)]
        with self._recording_failure(memory.view(store.dtype)):
            if read:
                store.disk.read([store.part(0, memory)]).wait()

        def write_back() -> None:
            slot.moving.append(store.disk.write([store.part(0, memory)]))
            self._writing[id(store)] = slot

        return Landing(memory.view(store.dtype)[: store.numel], _nothing, write_back)

    def gather(self, store: Store, pages: Tensor | None, full: Tensor, dp: Gather, cuts: Sequence[int]) -> Pending[None]:
        """Start loading this rank's weights, and all-gather them. A single rank loads into `full` itself.

        With the disk tier, `wait` launches the collective, so ranks whose weights happen to be in memory launch no earlier.
        """
        if isinstance(store, CodedStore):
            return dp.gather_into(full, store.codes, cuts)
        if self.lane is not None and type(store) is not MemoryStore:
            return self._gather_over(self.lane, store, full, dp, cuts)
        memory, reading, is_alone = store.view(0, store.numel), None, len(cuts) == 2
        if memory is None:
            assert isinstance(store, DiskStore) and pages is not None, "weights on disk are gathered into pages"
            raw = pages if is_alone else aligned(range_nbytes(store.numel, store.dtype.itemsize))
            memory, reading = _start_reading(store, raw)
        elif self.tiers.weights is not Tier.DISK or is_alone:
            return dp.gather_into(full, memory, cuts)

        def finish() -> None:
            with self._recording_failure(memory):
                if reading is not None:
                    reading.wait()
            if not is_alone:
                dp.gather_into(full, memory, cuts).wait()

        return Pending(finish)

    @contextmanager
    def _recording_failure(self, spoiled: Tensor | None = None) -> Iterator[None]:
        """Keep a DiskError until the engine raises it on all ranks. With peers, continue until then, with NaN in `spoiled`."""
        try:
            yield
        except DiskError as error:
            self.failure = self.failure or DiskError(*error.args)  # no traceback: its frames would keep the graph alive
            if not self.has_peers:
                raise
            if spoiled is not None:
                spoiled.fill_(float("nan"))

    def _gather_over(self, lane: Lane, store: Store, full: Tensor, dp: Gather, cuts: Sequence[int]) -> Pending[None]:
        """`gather` to a device with memory of its own. Meanwhile the device computes; only uses of the weights wait."""
        is_alone = len(cuts) == 2
        shard = full if is_alone else torch.empty(store.numel, dtype=store.dtype, device=full.device)
        since = lane.now()  # the last use of this memory

        def launch(copy: Event) -> Pending[None]:
            if is_alone:
                return Pending(copy.fence)
            with lane.behind(copy):
                return dp.gather_into(full, shard, cuts)

        if isinstance(store, HostStore):
            store.moving = copy = lane.copy(shard, store.tensor, (since, store.moving))
            return launch(copy) if self.tiers.weights is Tier.HOST else Pending(lambda: launch(copy).wait())
        assert isinstance(store, DiskStore), "weights are on the device, the host or a disk"
        nbytes = range_nbytes(store.numel, store.dtype.itemsize)
        spare = self._staging[nbytes]
        staging = spare.pop() if spare else HostStore(lane.memory(nbytes))
        memory, reading = _start_reading(store, staging.view(0, nbytes))

        def finish() -> None:
            with self._recording_failure(memory):
                reading.wait()
            staging.moving = copy = lane.copy(shard, memory, (since,))
            spare.append(staging)
            launch(copy).wait()

        return Pending(finish)

    @property
    def on_disk(self) -> bool:
        return self.spaces.weights is not None or self.spaces.optim is not None

    def settle(self) -> None:
        """Wait until all gradients are written. An error is kept in `failure`."""
        self._writing.clear()
        try:
            if self._gradients is not None:
                self._gradients.drain()
        except DiskError as error:
            self.failure = self.failure or error

    @property
    def nbytes(self) -> int:
        """Bytes of the gradient buffers."""
        return _GRADIENT_BUFFERS * self._gradient_nbytes

    def free_buffers(self) -> int:
        """Free the gradient buffers until their next use, and return their bytes. All gradients must be written (`settle`)."""
        ring, self._gradients = self._gradients, None
        return ring.nbytes if ring is not None else 0

    def close(self) -> None:
        self.close_landings()
        if self.lane is not None:
            self.lane.close()
        for space in self.spaces.distinct():
            space.close()


def _start_reading(store: DiskStore, raw: Tensor) -> tuple[Tensor, Transfer]:
    """Start reading all of a store into `raw`; returns the elements, valid once the transfer has ended."""
    memory, head = raw.view(store.dtype)[: store.numel], store.head.numel()
    memory[:head].copy_(store.head)
    tail = raw[head * store.dtype.itemsize :][: range_nbytes(store.numel - head, store.dtype.itemsize)]
    return memory, store.disk.read([store.part(head, tail)])


def _nothing() -> None:
    pass

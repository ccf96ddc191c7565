"""The transport for ranks of one host: shared memory, in which gathering moves no bytes.

Each rank maps its own private segment, every other rank's, and one common segment. A segment is a memfd: it has no name, so it
disappears even after kill -9, and the size of /dev/shm does not limit it.

counters   one uint32 per (buffer, kind, rank), each on its own cache line in the common segment. READY counts how often a
           rank has posted a buffer's content, DONE how often it has finished reading the others'. A reader waits for
           counters, never for a collective, so a rank that takes another branch does not delay the others.
fences     no rank overwrites memory that others may still read: a published weight changes only after all ranks have
           entered the step's exchange; a posted gradient buffer only after `reusable`.
"""

from __future__ import annotations

import itertools
import mmap
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream import ops
from slipstream.ops import Partial, pages, words
from slipstream.world.mesh import Axis
from slipstream.world.watch import PeerError, Watch
from slipstream.zero.comm import Buffer, Comm, Cuts, Pending, T, broadcast_from, reduce_into

_PAGE = 4096
_LINE = 64  # bytes between counters
_READY, _DONE = 0, 1
_SPIN_US = 200
_SLICE_MS = 200  # how long a wait sleeps between checks for failed peers
_EXCHANGE_NUMEL = 8192
_UNLIKE = "ranks called different collective methods of the engine at the same time; every rank must call the same ones"


def hosts_agree(axis: Axis) -> bool:
    """Whether all ranks of `axis` can open each other's descriptors. Collective over the axis."""
    if axis.group is None:
        return True
    fd = os.memfd_create("slipstream-probe", os.MFD_CLOEXEC)
    token = os.urandom(16)
    os.write(fd, token)
    readable = True
    for pid, peer_fd, peer_token in axis.gather((os.getpid(), fd, token)):
        try:
            with open(f"/proc/{pid}/fd/{peer_fd}", "rb") as file:
                readable &= file.read() == peer_token
        except OSError:
            readable = False
    agreed = all(axis.gather(readable))
    os.close(fd)
    return agreed


def open_segment(pid: int, peer_fd: int, nbytes: int) -> mmap.mmap:
    """Map another process's segment."""
    fd = os.open(f"/proc/{pid}/fd/{peer_fd}", os.O_RDWR | os.O_CLOEXEC)
    mapping = mmap.mmap(fd, nbytes, mmap.MAP_SHARED)
    os.close(fd)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def free_pages(tensor: Tensor) -> None:
    """Free the pages inside `tensor`, a part of a segment, for all ranks: it then reads as zeros. A no-op for other memory."""
    if not tensor.untyped_storage().resizable():
        pages.free_pages(tensor, is_shared=True)


def _views(mapping: mmap.mmap, requests: Sequence[tuple[int, torch.dtype]], start: int = 0) -> list[Tensor]:
    views, offset = [], start
    for numel, dtype in requests:
        view = torch.frombuffer(mapping, dtype=dtype, count=numel, offset=offset) if numel else torch.empty(0, dtype=dtype)
        views.append(view)
        offset += _pages(numel, dtype)
    return views


def _pages(numel: int, dtype: torch.dtype) -> int:
    return -(-numel * dtype.itemsize // _PAGE) * _PAGE


class SharedComm(Comm):
    """The transport of an axis for which `hosts_agree(axis)` is true. Creating it is collective."""

    def __init__(self, axis: Axis, watch: Watch) -> None:
        super().__init__(axis, torch.device("cpu"))
        self.watch = watch
        self.pids: list[int] = axis.gather(os.getpid())
        self.exchange_buffers = self.allocate([(_EXCHANGE_NUMEL, torch.float64)] * 2)
        self.exchanges = 0

    # -- memory --

    def _segments(self, private_nbytes: int, common_nbytes: int) -> tuple[list[mmap.mmap], mmap.mmap]:
        """Map every rank's private segment and the common one, which rank 0 creates."""
        own = os.memfd_create("slipstream", os.MFD_CLOEXEC)
        os.ftruncate(own, max(private_nbytes, _PAGE))
        common = os.memfd_create("slipstream", os.MFD_CLOEXEC) if self.index == 0 else -1
        if self.index == 0:
            os.ftruncate(common, common_nbytes)
        descriptors = self.axis.gather((own, common))
        privates = [open_segment(pid, fd, max(private_nbytes, _PAGE)) for pid, (fd, _) in zip(self.pids, descriptors, strict=True)]
        shared = open_segment(self.pids[0], descriptors[0][1], common_nbytes)
        dist.barrier(group=self.axis.group)  # all ranks have opened all segments
        os.close(own)
        if self.index == 0:
            os.close(common)
        return privates, shared

    def _allocated(self, peers: Sequence[Sequence[Tensor]], shared: mmap.mmap) -> list[Buffer]:
        """Buffers of these views, of every rank each, with the counters at the start of `shared`."""
        counters = torch.frombuffer(shared, dtype=torch.uint8, count=self._counters_nbytes(peers)).view(len(peers), -1)
        return [Buffer(views[self.index], views, own) for views, own in zip(peers, counters, strict=True)]

    def _counters_nbytes(self, buffers: Sequence[object]) -> int:
        return len(buffers) * 2 * self.size * _LINE

    def allocate(self, requests: Sequence[tuple[int, torch.dtype]]) -> list[Buffer]:
        if not requests:
            return []
        privates, shared = self._segments(sum(_pages(*request) for request in requests), self._counters_nbytes(requests))
        return self._allocated(list(zip(*(_views(mapping, requests) for mapping in privates), strict=True)), shared)

    def allocate_common(self, requests: Sequence[tuple[int, torch.dtype]]) -> list[Buffer] | None:
        if not requests:
            return []
        start = _pages(self._counters_nbytes(requests), torch.uint8)
        _, shared = self._segments(0, start + sum(_pages(*request) for request in requests))
        return self._allocated([[view] * self.size for view in _views(shared, requests, start)], shared)

    # -- counters --

    def _address(self, buffer: Buffer, kind: int, rank: int) -> int:
        assert buffer.counters is not None, "a buffer of another transport"
        return buffer.counters.data_ptr() + (kind * self.size + rank) * _LINE

    def post(self, buffer: Buffer) -> int:
        """Announce new content of this rank's part of `buffer`; returns its number."""
        buffer.posted += 1
        words.store_release_and_wake(self._address(buffer, _READY, self.index), buffer.posted)
        return buffer.posted

    def wait_posted(self, buffer: Buffer, rank: int, posted: int, operation: str) -> None:
        """Wait until the `rank`-th rank of the axis has posted content number `posted`."""
        self._await(buffer, _READY, rank, posted, operation)

    def mark_read(self, buffer: Buffer, posted: int) -> None:
        """Announce that this rank has read content number `posted` of the other ranks."""
        words.store_release_and_wake(self._address(buffer, _DONE, self.index), posted)

    def wait_read(self, buffer: Buffer, rank: int, posted: int, operation: str) -> None:
        """Wait until the `rank`-th rank of the axis has read content number `posted`."""
        self._await(buffer, _DONE, rank, posted, operation)

    def _await(self, buffer: Buffer, kind: int, rank: int, value: int, operation: str) -> None:
        address = self._address(buffer, kind, rank)
        if words.wait_at_least(address, value, _SPIN_US, 0):
            return
        since, peer = time.monotonic(), self.axis.ranks[rank]
        with self.watch.waiting(f"{operation} for rank {peer}"):
            while not words.wait_at_least(address, value, 0, _SLICE_MS):
                if self.watch.is_gone(peer) and not words.wait_at_least(address, value, 0, 0):
                    raise self.watch.lost()
                self.watch.check(since)

    # -- operations --

    def reduce_scatter(self, buffer: Buffer, cuts: Cuts, out: Tensor, *, alpha: float, accumulate: bool) -> Pending[Partial]:
        return self.swap(buffer, cuts, lambda spans: reduce_into(out, spans, alpha, accumulate), "reduce-scatter")

    def swap(self, buffer: Buffer, cuts: Cuts, use: Callable[[list[Tensor]], T], operation: str = "swap") -> Pending[T]:
        return self._used(buffer, cuts, [self.index] * self.size, use, operation)

    def spread_some(self, buffer: Buffer, cuts: Cuts, length: int, use: Callable[[list[Tensor]], T]) -> Pending[T]:
        return self._used(buffer, cuts, range(self.size), use, "all-gather of rows")

    def _used(
        self, buffer: Buffer, cuts: Cuts, spans: Sequence[int], use: Callable[[list[Tensor]], T], operation: str
    ) -> Pending[T]:
        """Post the buffer. Once all ranks have posted theirs, call `use` with one span of each rank's."""
        posted = self.post(buffer)

        def finish() -> T:
            for rank in range(self.size):
                self.wait_posted(buffer, rank, posted, operation)
            result = use([peer[cuts[i] : cuts[i + 1]] for peer, i in zip(buffer.peers, spans, strict=True)])
            self.mark_read(buffer, posted)
            return result

        return Pending(finish)

    def reusable(self, buffer: Buffer) -> None:
        for rank in range(self.size):
            self.wait_read(buffer, rank, buffer.posted, "buffer reuse")

    def all_gather(self, buffer: Buffer, cuts: Cuts) -> Pending[None]:
        def copy(spans: list[Tensor]) -> None:
            for rank, span in enumerate(spans):
                if rank != self.index:
                    ops.copy_stream(buffer.tensor[cuts[rank] : cuts[rank + 1]], span)

        return self._used(buffer, cuts, range(self.size), copy, "all-gather")

    def gather_into(self, full: Tensor, shard: Tensor, cuts: Cuts) -> Pending[None]:
        raise AssertionError("shared memory gathers common buffers in place")

    def gather_rows(self, full: Tensor, own: Buffer, rows: Sequence[Sequence[int]]) -> Pending[None]:
        def copy(peers: list[Tensor]) -> None:
            for rank, peer in enumerate(peers):
                at = 0
                for row in rows:
                    span = full[row[rank] : row[rank + 1]]
                    ops.copy_stream(span, peer[at : at + span.numel()])
                    at += span.numel()

        return self._used(own, (0, own.tensor.numel()), [0] * self.size, copy, "all-gather")

    def publish(self, common: Buffer) -> None:
        self.post(common)

    def await_published(self, common: Buffer) -> None:
        for rank in range(self.size):
            self.wait_posted(common, rank, common.posted, "weights")

    def exchange(self, values: Tensor) -> Tensor:
        return torch.cat([self._exchange(piece) for piece in values.split(_EXCHANGE_NUMEL - 1)], dim=1)

    def _exchange(self, values: Tensor) -> Tensor:
        n = values.numel()
        buffer = self.exchange_buffers[self.exchanges % 2]
        self.exchanges += 1
        buffer.tensor[0] = n
        buffer.tensor[1 : 1 + n].copy_(values)
        posted = self.post(buffer)
        for rank in range(self.size):
            self.wait_posted(buffer, rank, posted, "exchange")
        if any(peer[0] != n for peer in buffer.peers):
            raise PeerError(_UNLIKE)
        return torch.stack([peer[1 : 1 + n] for peer in buffer.peers])

    def broadcast(self, tensor: Tensor) -> None:
        rows = self.exchange(torch.tensor([-1.0 - tensor.nbytes], dtype=torch.float64))  # no method's checksum is negative
        if rows.min() != rows.max():
            raise PeerError(_UNLIKE)
        broadcast_from(tensor, self.axis, 0)

    def close(self) -> None:
        self.exchange_buffers = []


@dataclass(slots=True)
class SharedShard:
    """Gathers the weights of one unit (zero/gather.py) from the shards themselves, which all ranks map."""

    comm: SharedComm
    shard: Buffer = field(init=False)  # allocated with the unit
    exact = True

    def gather_into(self, full: Tensor, shard: Tensor, cuts: Cuts) -> Pending[None]:
        self.comm.await_published(self.shard)
        for span, peer in zip(itertools.pairwise(cuts), self.shard.peers, strict=True):
            ops.copy_stream(full[slice(*span)], peer)
        return Pending(None)

    def changed(self) -> None:
        self.comm.publish(self.shard)

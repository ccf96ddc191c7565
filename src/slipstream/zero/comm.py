"""Collectives on flat buffers over one mesh axis: the interface of all transports.

A `Buffer` is memory that a transport can communicate. Operations are asynchronous: a launch, and a `wait`. Every rank launches
the same operations in the same order. Reductions add in rank order in fp32 and round once, on every transport
(docs/ARCHITECTURE.md, Note: Bit identity).

LocalComm         an axis of one rank
ProcessGroupComm  torch.distributed: gloo on CPU, NCCL on CUDA
SharedComm        ranks of one host over shared memory (zero/shared.py)
"""

from __future__ import annotations

import itertools
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream import ops
from slipstream.ops import Partial, gpu
from slipstream.world.mesh import Axis
from slipstream.world.watch import Ledger, PeerError, Watch

T = TypeVar("T")
U = TypeVar("U")

_SLICE = timedelta(seconds=0.25)  # how long a wait sleeps between checks for failed peers

_POLL_S = 1e-4  # seconds between two questions to the GPU whether an operation has ended
_ROW = 64  # fp64 numbers per rank in one message of `_compare`
_HEAD = 2
_MOST_KNOWN = 1 << 16


Cuts = Sequence[int]  # the start of each rank's span of a buffer, and the end of the last


@dataclass(slots=True)
class Buffer:
    """Memory that a transport can communicate. With shared memory, `peers[r]` is rank r's buffer."""

    tensor: Tensor  # 1D
    peers: Sequence[Tensor] = ()
    counters: Tensor | None = None  # SharedComm's
    posted: int = 0  # how often this rank has posted its content


@dataclass(slots=True)
class Pending(Generic[T]):
    """The second half of an operation; `wait` runs it once and keeps the result."""

    finish: Callable[[], T] | None
    result: T | None = None

    def wait(self) -> T:
        if self.finish is not None:
            self.result, self.finish = self.finish(), None
        return self.result  # type: ignore[return-value]

    def then(self, use: Callable[[T], U]) -> Pending[U]:
        """The operation followed by a function of its result, which is called at once if nothing is left to wait for."""
        return Pending(lambda: use(self.wait())) if self.finish is not None else Pending(None, use(self.wait()))


class Comm(ABC):
    """Collectives on flat buffers over one axis. One caller per rank; the launch order is the same on all ranks.

    Its concrete methods are for transports without shared memory, whose operations have read their buffers when they end.
    """

    exact = True  # see zero/gather.py

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self.axis, self.index, self.size, self.device = axis, axis.index, axis.size, device

    def allocate(self, requests: Sequence[tuple[int, torch.dtype]]) -> list[Buffer]:
        """Allocate this rank's zeroed buffers, one for each (numel, dtype). Collective."""
        return [Buffer(torch.zeros(numel, dtype=dtype, device=self.device)) for numel, dtype in requests]

    def allocate_common(self, requests: Sequence[tuple[int, torch.dtype]]) -> list[Buffer] | None:
        """Allocate zeroed buffers that all ranks map; None if the transport has no shared memory. Collective."""
        return None

    @abstractmethod
    def reduce_scatter(self, buffer: Buffer, cuts: Cuts, out: Tensor, *, alpha: float, accumulate: bool) -> Pending[Partial]:
        """out (+)= alpha * the sum over ranks of this rank's span. `out` may be that span of `buffer` itself.

        The buffer may be written again once `reusable(buffer)` has returned.
        """

    @abstractmethod
    def swap(self, buffer: Buffer, cuts: Cuts, use: Callable[[list[Tensor]], T], operation: str = "swap") -> Pending[T]:
        """Call `use` with this rank's span of every rank's buffer, in rank order; return its result.

        The tensors are valid only inside `use`. The buffer may be written again once `reusable(buffer)` has returned.
        """

    def swap_some(
        self, buffer: Buffer, cuts: Cuts, lengths: Sequence[int], use: Callable[[list[Tensor]], T], operation: str = "swap"
    ) -> Pending[T]:
        """Like `swap` for the first `lengths[i]` elements of each span i; `use` may get more than those."""
        return self.swap(buffer, cuts, use, operation)

    @abstractmethod
    def spread_some(self, buffer: Buffer, cuts: Cuts, length: int, use: Callable[[list[Tensor]], T]) -> Pending[T]:
        """Call `use` with the first elements of each rank's own span, `length` on this rank; it may get more than those."""

    def reusable(self, buffer: Buffer) -> None:  # noqa: B027
        """Wait until every rank has read this rank's last content of `buffer`."""

    @abstractmethod
    def all_gather(self, buffer: Buffer, cuts: Cuts) -> Pending[None]:
        """Fill the spans of the other ranks in `buffer`. This rank's span must be in place."""

    @abstractmethod
    def gather_into(self, full: Tensor, shard: Tensor, cuts: Cuts) -> Pending[None]:
        """Fill `full` from every rank's `shard`. Both may be any memory."""

    def gather_rows(self, full: Tensor, own: Buffer, rows: Sequence[Sequence[int]]) -> Pending[None]:
        """Fill `full` from every rank's `own`, which holds the rank's span of each row, one after another.

        rows: for each row, the bounds of the ranks' spans in `full`. `own` may be written again once `reusable(own)` has returned.
        """
        moving, at = [], 0
        for row in rows:
            shard = own.tensor[at : at + row[self.index + 1] - row[self.index]]
            moving.append(self.gather_into(full[row[0] : row[-1]], shard, [cut - row[0] for cut in row]))
            at += shard.numel()

        def finish() -> None:
            for pending in moving:
                pending.wait()

        return Pending(finish)

    def changed(self) -> None:  # noqa: B027
        """Called when gathered weights have new values. A transport keeps none of them."""

    def publish(self, common: Buffer) -> None:  # noqa: B027
        """Announce that this rank has rewritten its span of a common buffer."""

    def await_published(self, common: Buffer) -> None:  # noqa: B027
        """Wait until every rank has published `common` as often as this rank."""

    @abstractmethod
    def exchange(self, values: Tensor) -> Tensor:
        """Return all ranks' `values` (1D fp64 on CPU, equal length) as rows in rank order. Every rank waits for all."""

    @abstractmethod
    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite `tensor` with the first rank's. Every rank waits for the first."""

    def close(self) -> None:  # noqa: B027
        """Free all memory. Safe to call twice."""


def reduce_into(out: Tensor, sources: Sequence[Tensor], alpha: float, accumulate: bool) -> Partial:
    """Sum `sources` in rank order in fp32 (fp64 for fp64) and round once; returns the sum of squares. All reductions use this."""
    if out.numel() == 0:
        return Partial(0.0, True)
    wide = torch.promote_types(torch.promote_types(sources[0].dtype, out.dtype), torch.float32)
    if out.device.type == "cpu" and wide is torch.float32:
        return ops.sum_ranks(out, sources, alpha=alpha, accumulate=accumulate)
    if len(sources) == 1 and (flat := gpu.kernels(out, sources[0])) is not None:
        square = flat.reduce_into(out, sources[0], alpha, accumulate)
        return Partial(square, torch.isfinite(square))
    total = sources[0].to(wide)
    for source in sources[1:]:
        total = total + source.to(wide)
    total = total * alpha
    out.copy_(total.add_(out.to(wide)) if accumulate else total)
    square = out.double().square().sum()
    return Partial(square, torch.isfinite(square))  # no synchronization: both stay on the device until the verdict


class LocalComm(Comm):
    """An axis of one rank: nothing moves."""

    def allocate_common(self, requests: Sequence[tuple[int, torch.dtype]]) -> list[Buffer] | None:
        return self.allocate(requests)

    def reduce_scatter(self, buffer: Buffer, cuts: Cuts, out: Tensor, *, alpha: float, accumulate: bool) -> Pending[Partial]:
        return Pending(None, reduce_into(out, [buffer.tensor[: cuts[-1]]], alpha, accumulate))

    def swap(self, buffer: Buffer, cuts: Cuts, use: Callable[[list[Tensor]], T], operation: str = "swap") -> Pending[T]:
        return Pending(None, use([buffer.tensor[: cuts[-1]]]))

    def spread_some(self, buffer: Buffer, cuts: Cuts, length: int, use: Callable[[list[Tensor]], T]) -> Pending[T]:
        return self.swap(buffer, cuts, use)

    def all_gather(self, buffer: Buffer, cuts: Cuts) -> Pending[None]:
        return Pending(None)

    def gather_into(self, full: Tensor, shard: Tensor, cuts: Cuts) -> Pending[None]:
        full.copy_(shard)
        return Pending(None)

    def exchange(self, values: Tensor) -> Tensor:
        return values.unsqueeze(0)

    def broadcast(self, tensor: Tensor) -> None:
        pass


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes, which gloo can communicate whatever the dtype."""
    return tensor.view(torch.uint8)


class ProcessGroupComm(Comm):
    """torch.distributed. On gloo, reduce-scatter is an all-to-all and a local sum, because gloo's is an all-reduce inside: it sends
    twice the bytes and adds in another order. On NCCL it is NCCL's.

    [Note: Ranks that lose each other] gloo matches any two all-gathers: silently if their sizes agree, else the process ends.
    So an operation is launched directly only if it has followed the same operations before. Otherwise it is first compared across
    ranks, by an all-reduce, which this class uses for nothing else. A rank that diverges then waits in a comparison that the other
    ranks have not entered: a standstill, which the watch detects. Before an operation whose sizes may differ between ranks
    (all-to-all), callers state what is the same on all ranks (`agree`).

    [Note: gloo for another device] gloo communicates host memory. With several ranks on one GPU, tensors are copied to the host
    before an operation and back after it.
    """

    def __init__(self, axis: Axis, group: dist.ProcessGroup, device: torch.device, watch: Watch) -> None:
        super().__init__(axis, device)
        self.watch, self.group = watch, group
        self.staged = device.type != "cpu" and group._get_backend(device).name() == "gloo"
        self.on_host = device.type == "cpu" or self.staged
        place = f"{axis.name} {axis.ranks}"  # families of the same ranks have groups of their own
        others = sum(ledger.name.partition(" #")[0] == place for ledger in watch.ledgers)
        self.ledger = Ledger(f"{place} #{others + 1}" if others else place, axis.ranks, group, record=watch.record)
        self.course = 0  # checksum of all operations since the last exchange or the beginning of the step
        self.course_step = 0
        self.known: dict[int, int] = {}  # course -> the operation that followed it on all ranks
        self.agreed = ""  # what the operations without a size are for
        watch.ledgers.append(self.ledger)
        _allow(watch.timeout_s, group)

    def _launch(self, operation: str, nbytes: int, sent: int | None = None) -> int:
        """Record an operation in the ledger. Compare it across ranks first, unless it has already followed the same sequence of
        operations since the last exchange or the beginning of the step.

        nbytes: of the whole buffer, equal on all ranks. sent: what leaves this rank; None: the other ranks' part
        """
        detail = f" of {nbytes:,} bytes" if nbytes else self.agreed
        if nbytes:
            self.agreed = ""
        if self.on_host:
            # Blocks of one shape: gathers of different units would match. (A sum may come from different stages of a pipeline.)
            self._agree(operation, detail, self.watch.unit if operation == "all-gather" else "")
        return self.ledger.launch(operation, nbytes, nbytes * (self.size - 1) // self.size if sent is None else sent, detail)

    def agree(self, what: str) -> None:
        """Compare across ranks what all are about to do, unless it has followed before. Raises PeerError. A no-op on NCCL."""
        self.agreed = f" for {what}"
        if self.on_host:
            self._agree(what)

    def _agree(self, operation: str, detail: str = "", unit: str = "") -> None:
        if self.course_step != self.watch.step:
            self.course, self.course_step = 1, self.watch.step  # differs from the value after an exchange
        checksum = zlib.crc32(f"{operation}{detail} {unit}".encode())
        if self.known.get(self.course) != checksum:
            self._compare(-1, checksum, torch.empty(0), f"agreement on {operation}", detail)
            if self.course in self.known or len(self.known) < _MOST_KNOWN:
                self.known[self.course] = checksum
        self.course = zlib.crc32(checksum.to_bytes(4, "little"), self.course)

    def _compare(self, count: int, checksum: int, values: Tensor, operation: str, detail: str = "") -> Tensor:
        """All-gather `values` as rows, by a sum with zeros, which is exact. Raises PeerError if `count` or `checksum` differ."""
        rows = torch.zeros(self.size, _ROW, dtype=torch.float64)
        rows[self.index, 0], rows[self.index, 1] = count, checksum
        rows[self.index, _HEAD : _HEAD + values.numel()] = values
        if not self.on_host:
            rows = rows.to(self.device)
        number = self.ledger.launch(operation, rows.nbytes, 2 * rows.nbytes * (self.size - 1) // self.size, detail)
        self._finish(dist.all_reduce(rows, group=self.group, async_op=True), operation, number, is_read=True)
        rows = rows.cpu()
        if not torch.equal(rows[:, :_HEAD], rows[:1, :_HEAD].expand(self.size, _HEAD)):
            doing: list[Any] = [None] * self.size
            place = f"step {self.watch.step}, {self.watch.phase}, unit {self.watch.unit or '-'}"
            dist.all_gather_object(doing, f"{operation}{detail} ({place})", group=self.group)
            places_of_ranks = "; ".join(f"rank {rank} is in {what}" for rank, what in zip(self.axis.ranks, doing, strict=True))
            raise PeerError(
                "ranks took different branches in the model, had inputs of different sizes, ran different numbers of "
                f"micro-batches, or called different methods of the engine: {places_of_ranks}. Without shared memory, every rank "
                "must run the same modules in the same order and call the same collective methods. A module that runs others by "
                "choice is gathered as a whole, and its choice is free, if zero_optimization.leaf_module in the config names it"
            )
        return rows[:, _HEAD : _HEAD + values.numel()]

    def _finish(self, work: Any, operation: str, number: int, *, is_read: bool = False) -> None:
        """is_read: the host reads the result next. Reading NCCL's would block until it is there, even if a rank is lost."""
        if self.on_host or is_read:
            since = time.monotonic()
            with self.watch.waiting(operation, (self.ledger.name, number), self.ledger.details[number]):
                while not (self._is_done(work) if self.on_host else self._has_landed(work)):
                    self.watch.check(since)
        else:
            work.wait()  # on the stream
        self.ledger.finish(number)

    def _is_done(self, work: Any) -> bool:
        """Whether an operation of gloo ends within a slice."""
        try:
            work.wait(_SLICE)
        except RuntimeError:
            if not work.is_completed():
                return False  # this wait timed out
            self._outcome(work)
        return True

    def _has_landed(self, work: Any) -> bool:
        """Whether an operation of NCCL ends within a slice; if so, the current stream has waited for it."""
        until = time.monotonic() + _SLICE.total_seconds()
        while not work.is_completed():
            if time.monotonic() > until:
                return False
            time.sleep(_POLL_S)
        self._outcome(work)
        return True

    def _running(self, work: Any, operation: str, number: int) -> Pending[None]:
        return Pending(lambda: self._finish(work, operation, number))

    def _outcome(self, work: Any) -> None:
        """Raise the error of a completed operation that failed."""
        try:
            work.wait()
        except RuntimeError as error:
            raise self.watch.lost(error) from error

    def reduce_scatter(self, buffer: Buffer, cuts: Cuts, out: Tensor, *, alpha: float, accumulate: bool) -> Pending[Partial]:
        lengths = {b - a for a, b in itertools.pairwise(cuts)}
        if self.on_host or len(lengths) > 1:
            return self.swap(buffer, cuts, lambda spans: reduce_into(out, spans, alpha, accumulate), "reduce-scatter")
        full = buffer.tensor[: cuts[-1]]
        total = full.new_empty(lengths.pop())
        number = self._launch("reduce-scatter", full.nbytes)
        work: Any = newest("reduce_scatter_single", "reduce_scatter_tensor")(total, full, group=self.group, async_op=True)
        running = self._running(work, "reduce-scatter", number)
        return running.then(lambda _: reduce_into(out, [total], alpha, accumulate))

    def swap(self, buffer: Buffer, cuts: Cuts, use: Callable[[list[Tensor]], T], operation: str = "swap") -> Pending[T]:
        full, numel = buffer.tensor[: cuts[-1]], cuts[self.index + 1] - cuts[self.index]
        received, lengths = full.new_empty(numel * self.size), [b - a for a, b in itertools.pairwise(cuts)]
        moving = self.all_to_all(received, full, [numel] * self.size, lengths, operation, full.nbytes)
        return moving.then(lambda _: use(list(received.view(self.size, numel).unbind(0))))

    def swap_some(
        self, buffer: Buffer, cuts: Cuts, lengths: Sequence[int], use: Callable[[list[Tensor]], T], operation: str = "swap"
    ) -> Pending[T]:
        sent = torch.cat([buffer.tensor[start : start + length] for start, length in zip(cuts, lengths, strict=False)])
        return self._send_some(sent, list(lengths), use, operation)

    def spread_some(self, buffer: Buffer, cuts: Cuts, length: int, use: Callable[[list[Tensor]], T]) -> Pending[T]:
        own = buffer.tensor[cuts[self.index] : cuts[self.index] + length]
        return self._send_some(own.repeat(self.size), [length] * self.size, use, "all-gather of rows")

    def _send_some(self, sent: Tensor, lengths: list[int], use: Callable[[list[Tensor]], T], operation: str) -> Pending[T]:
        """All-to-all of parts of these lengths, after an all-to-all of the lengths, which waits for all ranks."""
        counts = torch.tensor(lengths, device="cpu" if self.on_host else self.device)
        counts_here = torch.empty_like(counts)
        number = self._launch(f"lengths of {operation}", counts.nbytes)
        item = [counts.element_size()] * self.size
        work = dist.all_to_all_single(_bytes(counts_here), _bytes(counts), item, item, group=self.group, async_op=True)
        self._finish(work, operation, number, is_read=True)
        sizes = counts_here.tolist()
        received = torch.empty(sum(sizes), dtype=sent.dtype, device=sent.device)
        return self.all_to_all(received, sent, sizes, lengths).then(lambda _: use(list(received.split(sizes))))

    def all_gather(self, buffer: Buffer, cuts: Cuts) -> Pending[None]:
        start, stop = cuts[self.index], cuts[self.index + 1]
        return self.gather_into(buffer.tensor[: cuts[-1]], buffer.tensor[start:stop].clone(), cuts)

    def gather_into(self, full: Tensor, shard: Tensor, cuts: Cuts) -> Pending[None]:
        lengths = [b - a for a, b in itertools.pairwise(cuts)]
        if len(set(lengths)) > 1:
            sent = shard.repeat(self.size)
            return self.all_to_all(full, sent, lengths, [shard.numel()] * self.size, "all-gather", full.nbytes)
        number, received = self._launch("all-gather", full.nbytes), self._receiver(full)
        gather = newest("all_gather_single", "all_gather_into_tensor")
        work: Any = gather(_bytes(received), _bytes(self._sender(shard)), group=self.group, async_op=True)
        return self._landing(work, "all-gather", number, received, full)

    def all_to_all(
        self, out: Tensor, sent: Tensor, receive: Sequence[int], send: Sequence[int], operation: str = "all-to-all", nbytes: int = 0
    ) -> Pending[None]:
        """Send `send[r]` elements of `sent` to each rank, and fill `out` with `receive[r]` from each, in rank order.

        nbytes: of the whole buffer; 0: sizes may differ between ranks
        """
        item, received = sent.element_size(), self._receiver(out)
        number = self._launch(operation, nbytes, (sum(send) - send[self.index]) * item)
        lengths = [n * item for n in receive], [n * item for n in send]
        work = dist.all_to_all_single(_bytes(received), _bytes(self._sender(sent)), *lengths, group=self.group, async_op=True)
        return self._landing(work, operation, number, received, out)

    def _landing(self, work: Any, operation: str, number: int, received: Tensor, out: Tensor) -> Pending[None]:
        """An operation that receives into `out`, or into host memory that is then copied to `out`."""

        def land(_: None) -> None:
            if received is not out:
                out.copy_(received)

        return self._running(work, operation, number).then(land)

    def _sender(self, tensor: Tensor) -> Tensor:
        """The tensor to send: `tensor` itself, or a copy on the host."""
        return tensor.to("cpu", copy=True) if self.staged else tensor

    def _receiver(self, tensor: Tensor) -> Tensor:
        """The tensor to receive into: `tensor` itself, or host memory of its size."""
        return torch.empty_like(tensor, device="cpu") if self.staged else tensor

    def exchange(self, values: Tensor) -> Tensor:
        pieces = values.split(_ROW - _HEAD)
        rows = torch.cat([self._compare(values.numel(), self.course, piece, "exchange") for piece in pieces], dim=1)
        self.course = 0
        return rows

    def broadcast(self, tensor: Tensor) -> None:
        if not tensor.numel():
            return
        moved = self._sender(tensor)
        number = self._launch("broadcast", tensor.nbytes, tensor.nbytes * (self.index == 0))
        work: Any = dist.broadcast(_bytes(moved), src=self.axis.ranks[0], group=self.group, async_op=True)
        self._landing(work, "broadcast", number, moved, tensor).wait()


def _allow(seconds: float, group: Any) -> None:
    """Make torch's timeout for the group's operations longer than our own."""
    needed = timedelta(seconds=seconds + 60)
    for device in group._device_types:
        if device.type == "cpu" and group._get_backend(device).options._timeout < needed:
            group._get_backend(device)._set_default_timeout(needed)


def broadcast_from(tensor: Tensor, axis: Axis, index: int) -> None:
    """Overwrite `tensor` with that of the `index`-th rank of the axis, through the axis's process group."""
    if tensor.numel():
        dist.broadcast(_bytes(tensor), src=axis.ranks[index], group=axis.group)


def sum_over(tensor: Tensor, axis: Axis) -> None:
    """Overwrite `tensor` with its sum over the ranks of the axis, through the axis's process group."""
    if axis.group is not None and tensor.numel():
        dist.all_reduce(tensor, group=axis.group)


def first_said(value: T | None, axis: Axis) -> tuple[int, T] | None:
    """(rank, value) of the first rank whose `value` (an error's text) is not empty; None if all are empty. Collective."""
    values_of_ranks = zip(axis.ranks, axis.gather(value), strict=True)
    return next(((rank, other) for rank, other in values_of_ranks if other), None)


def newest(name: str, older: str) -> Callable[..., Any]:
    """torch.distributed's function `name`, which exists from torch 2.13, where the older name warns."""
    return getattr(dist, name, None) or getattr(dist, older)

"""Activations between the ranks of one axis: sums, gathers, reduce-scatters and all-to-alls, and their autograd functions.

Every rank of the axis calls the same operations in the same order. Reductions add in rank order in fp32 (fp64 and integers in their
own dtype) and round once, so shared memory and gloo give the same bits on all ranks. NCCL adds in an order of its own, the same on
all ranks, unless rank order is requested. No operation overwrites its arguments. For tensors without values (on meta, in a dry
run), operations return the shapes and move nothing. A started operation returns before its result exists: the caller may compute,
and must leave the argument unchanged, until it waits.

LocalExchange   an axis of one rank
SharedExchange  ranks of one host over shared memory: a message is written once, and read in place
GroupExchange   torch.distributed: gloo and NCCL
"""

from __future__ import annotations

import ctypes
import itertools
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from slipstream.world.mesh import Axis
from slipstream.world.watch import PeerError, Watch
from slipstream.zero.build import connect_axis
from slipstream.zero.comm import Pending, ProcessGroupComm, newest, reduce_into
from slipstream.zero.hooks import eager
from slipstream.zero.shared import SharedComm

PIECE_NBYTES = 4 << 20  # of shared memory per buffer; longer messages are sent in pieces
_CHUNK_NBYTES = 512 << 10  # measured (`slices`, 1 MiB messages): two parts cost nothing over loopback, four cost 6 % of a step
_GATHER_NBYTES = 64 << 10  # up to this size gloo sums gathered copies: one operation instead of two
_OPERATIONS = ("sum", "gather", "reduce-scatter", "all-to-all")
Operation = Callable[[Tensor], Tensor]


def without_values(x: Tensor) -> bool:
    """Whether a tensor has only a shape: on meta, or in a dry run."""
    return x.is_meta or isinstance(x, FakeTensor)


def even_shares(length: int, size: int) -> list[int]:
    """Divide `length` among `size` ranks: shares differ by at most one, longer ones first."""
    return [length // size + (i < length % size) for i in range(size)]


class Exchange(ABC):
    """Collectives on activations over one axis, without autograd.

    `moved` counts the bytes that this rank sends in each operation, by the formulas of a ring (sum, gather, reduce-scatter) or of
    direct sends (all-to-all), whatever the transport does.

    chunk_nbytes  the shortest message whose sum gains by overlapping a product; 0 if none does: in shared memory the ranks' own
                  cores move the bytes, and on a GPU a product in parts may have other bits

    [Note: One in flight] The exchange's next operation first completes the one that was started. So a caller that never waits (a
    second forward of an activation checkpoint may stop early) does no harm, and operations keep the order of their starts.
    """

    chunk_nbytes = 0

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self.axis, self.index, self.size, self.device = axis, axis.index, axis.size, device
        self.moved: Counter[str] = Counter()
        self._in_flight: Pending[Any] = Pending(None)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of `x` over all ranks, which have the same shape."""
        return self.start_sum(x).wait()

    def start_sum(self, x: Tensor) -> Pending[Tensor]:
        if self.size == 1 or without_values(x) or not x.numel():
            return Pending(None, x)
        self._in_flight.wait()
        self.moved["sum"] += 2 * (self.size - 1) * x.nbytes // self.size
        return self._launched(self._sum(x.contiguous().view(-1)), lambda flat: flat.view(x.shape))

    def _launched(self, started: Pending[Tensor], shape: Callable[[Tensor], Tensor]) -> Pending[Tensor]:
        """The operation in flight, followed by a function of its result."""
        self._in_flight = started

        def finish() -> Tensor:
            result = started.wait()
            if self._in_flight is started:
                self._in_flight = Pending(None)  # do not keep the result
            return shape(result)

        return Pending(finish)

    def gather(self, x: Tensor, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
        """The concatenation of all ranks' `x` along `dim`. `sizes`: their lengths; without it, ranks first exchange them."""
        if self.size == 1:
            return x
        self._in_flight.wait()
        dim %= x.dim()
        sizes = sizes or self.lengths(x, dim)
        before, after = x.shape[:dim], x.shape[dim + 1 :]
        numels = [length * math.prod(before) * math.prod(after) for length in sizes]
        self.moved["gather"] += (sum(numels) - x.numel()) * x.element_size()
        if without_values(x) or not sum(numels):
            return x.new_empty(*before, sum(sizes), *after)
        full = self._gather(x.contiguous().view(-1), numels)
        if math.prod(before) == 1:
            return full.view(*before, sum(sizes), *after)
        parts = zip(full.split(numels), sizes, strict=True)
        return torch.cat([part.view(*before, length, *after) for part, length in parts], dim)

    def reduce_scatter(self, x: Tensor, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
        """This rank's share along `dim` of the sum of all ranks' `x`. `sizes`: the lengths of the shares (default: even)."""
        return self.start_reduce_scatter(x, dim, sizes).wait()

    def start_reduce_scatter(self, x: Tensor, dim: int, sizes: Sequence[int] | None = None) -> Pending[Tensor]:
        if self.size == 1:
            return Pending(None, x)
        self._in_flight.wait()
        sizes = sizes or even_shares(x.shape[dim], self.size)
        rows = x.movedim(dim, 0)
        unit = math.prod(rows.shape[1:])
        cuts = [unit * length for length in itertools.accumulate(sizes, initial=0)]
        if cuts[-1] != x.numel():
            raise ValueError(f"reduce_scatter: sizes {list(sizes)} do not add up to dimension {dim} of {tuple(x.shape)}")
        self.moved["reduce-scatter"] += (x.numel() - unit * sizes[self.index]) * x.element_size()
        shape = (sizes[self.index], *rows.shape[1:])
        if without_values(x) or not x.numel():
            return Pending(None, x.new_empty(shape).movedim(0, dim).contiguous())
        started = self._reduce_scatter(rows.contiguous().view(-1), cuts)
        return self._launched(started, lambda flat: flat.view(shape).movedim(0, dim).contiguous())

    def all_to_all(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send the first `send[0]` rows (along dimension 0) to rank 0, and so on; returns `receive[r]` rows of each rank r.

        Raises ValueError if `send` does not add up to the rows, and PeerError if a rank sends another number than `receive` states.
        """
        return self.start_all_to_all(rows, send, receive).wait()

    def start_all_to_all(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending[Tensor]:
        self._in_flight.wait()
        if sum(send) != len(rows):
            raise ValueError(f"all_to_all: send {list(send)} adds up to {sum(send)} rows of {len(rows)}")
        if self.size == 1:
            return Pending(None, rows)
        unit = math.prod(rows.shape[1:])
        self.moved["all-to-all"] += (sum(send) - send[self.index]) * unit * rows.element_size()
        shape = (sum(receive), *rows.shape[1:])
        if without_values(rows) or not unit:
            return Pending(None, rows.new_empty(shape))
        sent = rows.contiguous().view(-1)
        started = self._start_all_to_all(sent, [n * unit for n in send], [n * unit for n in receive])
        return self._launched(started, lambda flat: flat.view(shape))

    def counts(self, send: Sequence[int]) -> list[int]:
        """Exchange numbers before an all-to-all: number r goes to rank r. Returns the number from each rank."""
        if self.size == 1:
            return list(send)
        self._in_flight.wait()
        ones = [1] * self.size
        return self._start_all_to_all(torch.tensor(send, device=self.device), ones, ones).wait().tolist()

    def agree(self, what: str, x: Tensor, *sizes: int) -> None:  # noqa: B027
        """Compare across ranks that all are about to send parts of x for `what`, a format string for the sizes. Only transports
        whose messages do not identify themselves compare, and only what did not follow before. Raises PeerError for a difference.
        (A text formatted by the caller would make the sizes constants of a compiled model.)"""

    def lengths(self, x: Tensor, dim: int) -> list[int]:
        """The lengths of all ranks' `x` along `dim`; on the meta device, all are assumed equal to this rank's."""
        return [x.shape[dim]] * self.size if without_values(x) else self.counts([x.shape[dim]] * self.size)

    def __deepcopy__(self, memo: Any) -> Exchange:
        """The copy, in a model copied for a dry run, exchanges only shapes."""
        return LocalExchange(self.axis, self.device)

    @abstractmethod
    def close(self) -> None:
        """Free all memory. Safe to call twice."""

    # -- for the transport: 1D and contiguous tensors, numbers of elements, at least one element on some rank --

    @abstractmethod
    def _sum(self, flat: Tensor) -> Pending[Tensor]: ...

    @abstractmethod
    def _gather(self, flat: Tensor, numels: Sequence[int]) -> Tensor: ...

    @abstractmethod
    def _reduce_scatter(self, flat: Tensor, cuts: Sequence[int]) -> Pending[Tensor]: ...

    @abstractmethod
    def _start_all_to_all(self, flat: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending[Tensor]: ...


def _add(out: Tensor, sources: Sequence[Tensor]) -> None:
    """out = the sum of sources, added in order and rounded once."""
    if out.is_floating_point() and out.device.type == "cpu":
        reduce_into(out, sources, 1.0, False)
    elif out.is_floating_point():  # without the sum of squares
        total = sources[0].to(torch.promote_types(out.dtype, torch.float32))
        for source in sources[1:]:
            total = total + source
        out.copy_(total)
    else:
        torch.sum(torch.stack(list(sources)), 0, dtype=out.dtype, out=out)


class LocalExchange(Exchange):
    """An axis of one rank: nothing moves."""

    def close(self) -> None:
        pass

    def _sum(self, flat: Tensor) -> Pending[Tensor]:
        raise AssertionError("one rank moves nothing")

    _gather = _reduce_scatter = _start_all_to_all = _sum  # type: ignore[assignment]


class SharedExchange(Exchange):
    """Shared memory: a rank writes its message into its buffer, posts it, waits for all ranks' messages, and reads them.

    [Note: Two buffers in turn] Turn n + 2 overwrites the message of turn n. By then all ranks have read it: a rank posts turn
    n + 1 after it has read turn n, and no rank leaves turn n + 1 before all have posted. So one wait per turn is enough.

    A message starts with int64 words: the operation, the bytes of the message over all turns, and, in a gather or an all-to-all,
    where the bytes for each rank begin, and their number. Ranks take as many turns as the longest message needs.
    """

    def __init__(self, comm: SharedComm) -> None:
        super().__init__(comm.axis, torch.device("cpu"))
        self.comm, self.turn, self.piece = comm, 0, PIECE_NBYTES
        head_nbytes = -(-8 * (2 + 2 * self.size) // 64) * 64
        self.buffers = comm.allocate([(head_nbytes + self.piece, torch.uint8)] * 2)
        words = ctypes.c_int64 * (2 + 2 * self.size)
        self.heads = [[words.from_address(peer.data_ptr()) for peer in buffer.peers] for buffer in self.buffers]
        self.bodies = [[peer[head_nbytes:] for peer in buffer.peers] for buffer in self.buffers]

    def close(self) -> None:
        self.comm.close()
        self.buffers, self.heads, self.bodies = [], [], []

    def _post(self, operation: str, parts: Sequence[Tensor], nbytes: int, spans: Sequence[int] = ()) -> int:
        """Post `parts`, the next piece of a message of `nbytes`. Returns the index of the turn's buffers."""
        turn = self.turn = 1 - self.turn
        heads, body = self.heads[turn], self.bodies[turn][self.index]
        words: list[Any] = [_OPERATIONS.index(operation), nbytes, *spans]
        heads[self.index][: len(words)] = words
        offset = 0
        for part in parts:
            body[offset : (offset := offset + part.nbytes)].view(part.dtype).copy_(part)
        self.comm.post(self.buffers[turn])
        return turn

    def _await_turn(self, operation: str, turn: int, nbytes: int, spans: Sequence[int] = ()) -> None:
        """Wait for all ranks' posts in the turn of this rank's last post."""
        buffer = self.buffers[turn]
        for i in range(1, self.size):
            self.comm.wait_posted(buffer, (self.index + i) % self.size, buffer.posted, operation)
        for rank, head in zip(self.axis.ranks, self.heads[turn], strict=True):
            if head[0] != _OPERATIONS.index(operation) or (not spans and head[1] != nbytes):
                raise PeerError(
                    f"rank {self.axis.ranks[self.index]} is in {operation} of {nbytes} bytes over {self.axis.name}, rank {rank} in "
                    f"{_OPERATIONS[head[0]]} of {head[1]} bytes; every rank must run the same modules on inputs of the same shapes"
                )

    def _in_turns(
        self, operation: str, messages: Sequence[tuple[Sequence[Tensor], int]], add: Callable[[int, int], None], out: Tensor
    ) -> Pending[Tensor]:
        """Post the first message (its parts, and the bytes that all ranks state). Then add each turn, and post the next message.

        add(i, turn): read message i of all ranks from the turn's buffers.
        """
        first = self._post(operation, *messages[0])

        def finish() -> Tensor:
            for i, (parts, nbytes) in enumerate(messages):
                turn = self._post(operation, parts, nbytes) if i else first
                self._await_turn(operation, turn, nbytes)
                add(i, turn)
            return out

        return Pending(finish)

    def _sum(self, flat: Tensor) -> Pending[Tensor]:
        out = torch.empty_like(flat)
        step = self.piece // flat.element_size()
        pieces, totals = flat.split(step), out.split(step)

        def add(i: int, turn: int) -> None:
            sources = [body[: pieces[i].nbytes].view(flat.dtype) for body in self.bodies[turn]]
            sources[self.index] = pieces[i]  # the same values, but in this core's cache
            _add(totals[i], sources)

        return self._in_turns("sum", [([piece], piece.nbytes) for piece in pieces], add, out)

    def _reduce_scatter(self, flat: Tensor, cuts: Sequence[int]) -> Pending[Tensor]:
        shares = [flat[start:stop] for start, stop in itertools.pairwise(cuts)]
        out = torch.empty_like(shares[self.index])
        step = self.piece // (self.size * flat.element_size())
        starts = range(0, max(share.numel() for share in shares), step)
        pieces = [[share[start : start + step] for share in shares] for start in starts]

        def add(i: int, turn: int) -> None:
            own, sources = pieces[i][self.index], []
            for rank, body in enumerate(self.bodies[turn]):
                offset = sum(p.nbytes for j, p in enumerate(pieces[i][: self.index]) if j != rank)
                sources.append(own if rank == self.index else body[offset : offset + own.nbytes].view(flat.dtype))
            if own.numel():
                _add(out[starts[i] : starts[i] + step], sources)

        others = [(each[: self.index] + each[self.index + 1 :], flat.nbytes) for each in pieces]
        return self._in_turns("reduce-scatter", others, add, out)

    def _gather(self, flat: Tensor, numels: Sequence[int]) -> Tensor:
        out = flat.new_empty(sum(numels))
        return self._pass("gather", [flat], [(0, flat.nbytes)] * self.size, out, numels, flat).wait()

    def _start_all_to_all(self, flat: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending[Tensor]:
        out = flat.new_empty(sum(receive))
        parts = list(flat.split(list(send)))
        own, parts[self.index] = parts[self.index], flat[:0]
        starts = itertools.accumulate((part.nbytes for part in parts), initial=0)
        spans = [(start, part.nbytes) for start, part in zip(starts, parts, strict=False)]
        return self._pass("all-to-all", parts, spans, out, receive, own)

    def _pass(
        self,
        operation: str,
        parts: Sequence[Tensor],
        spans: Sequence[tuple[int, int]],
        out: Tensor,
        numels: Sequence[int],
        own: Tensor,
    ) -> Pending[Tensor]:
        """Post the concatenation of `parts`, of which rank r reads span r (start, length in bytes); then fill `out` by rank."""
        outs = out.split(list(numels))
        outs[self.index].copy_(own)
        pieces = [part.view(torch.uint8) for part in parts]
        nbytes, words = sum(map(len, pieces)), list(itertools.chain(*spans))
        first = self._post(operation, _window(pieces, 0, self.piece), nbytes, words)

        def finish() -> Tensor:
            self._read(operation, first, pieces, nbytes, words, [each.view(torch.uint8) for each in outs])
            return out

        return Pending(finish)

    def _read(
        self, operation: str, first: int, pieces: Sequence[Tensor], nbytes: int, words: Sequence[int], targets: Sequence[Tensor]
    ) -> None:
        """Read the messages of all ranks into `targets`, beginning at the turn `first`, and post this rank's remaining pieces."""
        longest, start = 1, 0
        while start < longest:
            turn = first if start == 0 else self._post(operation, _window(pieces, start, start + self.piece), nbytes, words)
            self._await_turn(operation, turn, nbytes, words)
            heads = self.heads[turn]
            longest = max(head[1] for head in heads)
            for rank, (head, body, target) in enumerate(zip(heads, self.bodies[turn], targets, strict=True)):
                if rank == self.index:
                    continue
                first, length = head[2 + 2 * self.index : 4 + 2 * self.index]
                if length != len(target):
                    raise PeerError(
                        f"{operation} over {self.axis.name}: rank {self.axis.ranks[rank]} sends {length} bytes to rank "
                        f"{self.axis.ranks[self.index]}, which expects {len(target)}: ranks have inputs of different sizes, or "
                        "have called the model, or the operation, unequally often"
                    )
                low, high = max(first, start), min(first + length, start + self.piece)
                if low < high:
                    target[low - first : high - first].copy_(body[low - start : high - start])
            start += self.piece


def _window(parts: Sequence[Tensor], start: int, stop: int) -> list[Tensor]:
    """Views of elements [start, stop) of the concatenation of `parts`."""
    ends = itertools.accumulate(map(len, parts))
    cut = [part[max(start - end + len(part), 0) : max(stop - end + len(part), 0)] for part, end in zip(parts, ends, strict=True)]
    return [part for part in cut if len(part)]


class GroupExchange(Exchange):
    """torch.distributed. On gloo, reductions are all-to-alls or gathers and local sums. On NCCL they are NCCL's, or the same as on
    gloo (`in_rank_order`).

    For a long sum over more than two ranks on gloo, only the first half, a reduce-scatter, overlaps the caller's computing.
    """

    def __init__(self, comm: ProcessGroupComm, *, in_rank_order: bool = False) -> None:
        super().__init__(comm.axis, comm.device)
        self.comm, self.group, self.sums_here = comm, comm.group, comm.on_host or in_rank_order
        self.chunk_nbytes = _CHUNK_NBYTES if comm.device.type == "cpu" else 0

    def close(self) -> None:
        self.comm.close()

    @eager
    def agree(self, what: str, x: Tensor, *sizes: int) -> None:
        if not without_values(x):
            self.comm.agree(what.format(*sizes))

    def _sum(self, flat: Tensor) -> Pending[Tensor]:
        if not self.sums_here:
            out = flat.clone()
            return _of_work(dist.all_reduce(out, group=self.group, async_op=True), out)
        if self.size == 2 or flat.nbytes <= _GATHER_NBYTES:
            return self._added(self._start_gather(flat, [flat.numel()] * self.size), flat.numel())
        numels = even_shares(flat.numel(), self.size)
        share = self._reduce_scatter(flat, list(itertools.accumulate(numels, initial=0)))
        return share.then(lambda own: self._gather(own, numels))

    def _reduce_scatter(self, flat: Tensor, cuts: Sequence[int]) -> Pending[Tensor]:
        numels = [stop - start for start, stop in itertools.pairwise(cuts)]
        own = numels[self.index]
        if not self.sums_here and len(set(numels)) == 1:
            out = flat.new_empty(own)
            reduce = newest("reduce_scatter_single", "reduce_scatter_tensor")
            return _of_work(reduce(out, flat, group=self.group, async_op=True), out)
        self.agree("reduce-scatter of {:,} bytes", flat, flat.nbytes)
        return self._added(self._start_all_to_all(flat, numels, [own] * self.size), own)

    def _added(self, moving: Pending[Tensor], numel: int) -> Pending[Tensor]:
        """The sum of the rows in flight from all ranks, of `numel` elements each."""

        def add(received: Tensor) -> Tensor:
            out = received.new_empty(numel)
            if numel:
                _add(out, received.view(self.size, numel).unbind())
            return out

        return moving.then(add)

    def _gather(self, flat: Tensor, numels: Sequence[int]) -> Tensor:
        return self._start_gather(flat, numels).wait()

    def _start_gather(self, flat: Tensor, numels: Sequence[int]) -> Pending[Tensor]:
        out = flat.new_empty(sum(numels))
        return self.comm.gather_into(out, flat, list(itertools.accumulate(numels, initial=0))).then(lambda _: out)

    def _start_all_to_all(self, flat: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending[Tensor]:
        out = flat.new_empty(sum(receive))

        def arrived(_: None) -> Tensor:
            assert flat.numel() == sum(send)  # and `flat` lived until here
            return out

        return self.comm.all_to_all(out, flat, receive, send).then(arrived)


def _of_work(work: Any, out: Tensor) -> Pending[Tensor]:
    """A NCCL operation; waiting for it makes the current stream wait."""
    return Pending(work.wait).then(lambda _: out)


def connect_activations(axis: Axis, device: torch.device, transport: str, watch: Watch, *, in_rank_order: bool = False) -> Exchange:
    """Make the exchange of one axis, with the transport that `connect_axis` chooses. Collective over the axis. `in_rank_order`: sum
    in rank order, also on NCCL."""
    comm = connect_axis(axis, device, transport, watch)
    if isinstance(comm, SharedComm):
        return SharedExchange(comm)
    if isinstance(comm, ProcessGroupComm):
        return GroupExchange(comm, in_rank_order=in_rank_order)
    return LocalExchange(comm.axis, device)


# -- autograd: the backward of each function is the dual operation on the same exchange --


class _Dual(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, operation: Operation, backward: Operation) -> Tensor:
        ctx.of_gradient = backward
        return operation(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.of_gradient(grad), None, None


def dual(x: Tensor, operation: Operation, backward: Operation) -> Tensor:
    """`operation(x)`, whose backward calls `backward` with the gradient."""
    y: Tensor = _Dual.apply(x, operation, backward)
    return y


@eager
def enter(x: Tensor, exchange: Exchange, dim: int | None = None, sizes: Sequence[int] | None = None) -> Tensor:
    """Enter a region in which ranks compute different parts of the output from the whole `x`, so its gradients are partial sums.

    dim None: x is whole on all ranks, and the backward sums. Else x is this rank's share along `dim`: the forward gathers, the
    backward reduce-scatters. sizes: the lengths of the shares (default: even).
    """
    if exchange.size == 1:
        return x
    if dim is None:
        return dual(x, lambda x: x.view_as(x), lambda grad: leave(grad, exchange))
    shares = sizes or exchange.lengths(x, dim)
    return dual(x, lambda x: exchange.gather(x, dim, shares), lambda grad: leave(grad, exchange, dim, shares))


@eager
def leave(x: Tensor, exchange: Exchange, dim: int | None = None, sizes: Sequence[int] | None = None) -> Tensor:
    """Leave such a region: `x` is this rank's partial sum of the output.

    dim None: sum; the backward is the identity. Else reduce-scatter along `dim`; the backward gathers.
    """
    if exchange.size == 1:
        return x
    if dim is None:
        return dual(x, exchange.sum, lambda grad: enter(grad, exchange))
    shares = sizes or even_shares(x.shape[dim], exchange.size)
    return dual(x, lambda x: exchange.reduce_scatter(x, dim, shares), lambda grad: enter(grad, exchange, dim, shares))


@eager
def gather_from(x: Tensor, exchange: Exchange, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """Gather along `dim` a tensor that all ranks then use alike; the backward keeps this rank's share of the gradient."""
    if exchange.size == 1:
        return x
    shares = sizes or exchange.lengths(x, dim)
    return dual(x, lambda x: exchange.gather(x, dim, shares), lambda grad: scatter_to(grad, exchange, dim, shares))


@eager
def scatter_to(x: Tensor, exchange: Exchange, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """Keep this rank's share along `dim` of an `x` that is whole on all ranks; the backward gathers the gradient."""
    if exchange.size == 1:
        return x
    shares = list(sizes or even_shares(x.shape[dim], exchange.size))
    return dual(x, lambda x: x.split(shares, dim)[exchange.index], lambda grad: gather_from(grad, exchange, dim, shares))


@eager
def swap(rows: Tensor, exchange: Exchange, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """All-to-all of rows along dimension 0; the backward is the reverse all-to-all."""
    if exchange.size == 1:
        return rows
    return dual(rows, lambda rows: exchange.all_to_all(rows, send, receive), lambda grad: swap(grad, exchange, receive, send))


class Crossing:
    """An all-to-all of rows that overlaps computing, in both directions: `depart`, anything, `arrive`.

    The backward mirrors it. Autograd runs ready nodes in the reverse order of their forwards: `arrive` sends the gradients, those
    of the computing in between come next, and `depart` waits for the gradients sent to it. Results have the bits of `swap`.
    """

    def __init__(self, exchange: Exchange, send: Sequence[int], receive: Sequence[int]) -> None:
        self.exchange, self.send, self.receive = exchange, send, receive
        self.moving: Pending[Tensor] = Pending(None)

    @eager
    def depart(self, rows: Tensor) -> Tensor:
        """Start the all-to-all. Returns a token for `arrive`, through which the gradient comes back."""
        return dual(rows, lambda rows: self._start(rows, self.send, self.receive), self._finish)

    @eager
    def arrive(self, token: Tensor) -> Tensor:
        """The rows from all ranks for this rank."""
        return dual(token, self._finish, lambda grad: self._start(grad, self.receive, self.send))

    def _start(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        if torch.is_grad_enabled():  # a gradient that needs a gradient itself
            self.moving = Pending(None, swap(rows, self.exchange, send, receive))
        else:
            self.moving = self.exchange.start_all_to_all(rows, send, receive)
        return rows.new_zeros(())

    def _finish(self, _: Tensor) -> Tensor:
        rows, self.moving = self.moving.wait(), Pending(None)
        return rows

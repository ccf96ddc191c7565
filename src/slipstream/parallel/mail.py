"""Mail between the stages of a pipeline: trees of tensors, in order for each key, in any order between keys.

key   (kind, stage): "F" for activations and "B" for their gradients, and the receiving stage
tree  nested tuples, lists and dicts of tensors, None, numbers and strings. Shapes may change from message to message

SharedMail   ranks of one host, over shared memory
GroupMail    torch.distributed; PairMail between GPUs
MailByShares around another mail: a tree that several ranks would all send travels once, and each of them sends a share of it
"""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import pickle
import time
import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.parallel.exchange import Exchange, even_shares
from slipstream.world.mesh import Axis
from slipstream.world.watch import Watch
from slipstream.zero.build import connect_axis
from slipstream.zero.shared import SharedComm, open_segment

logger = logging.getLogger(__name__)

Key = tuple[str, int]
Route = tuple[Key, int, int]  # key, source, target: places on the axis

_SLICE = 0.25  # seconds: how long a wait sleeps between checks for failed peers
_TAGS = 1 << 16  # tags per key, the largest number of tensors in a message
_PAGE = 4096
_WORDS = 8  # int64 words of a slot in shared memory: the segment's number, descriptor and bytes; the header's bytes


class Mail(ABC):
    """Messages along one axis. Sending does not wait for the receiver."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    @abstractmethod
    def send(self, key: Key, to: int, tree: Any) -> None:
        """Send a tree to the `to`-th rank of the axis. Its tensors may be overwritten after `flush`."""

    @abstractmethod
    def receive(self, key: Key, source: int) -> Any:
        """The next tree of `key`. Tensors that required a gradient on the sender are leaves that require one."""

    @abstractmethod
    def flush(self) -> None:
        """Wait until all sent trees have left this rank."""

    @abstractmethod
    def close(self) -> None:
        """Free all memory. Safe to call twice."""


class _Form(NamedTuple):
    """Replaces a tensor of a message in the tree."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


def _mapped(tree: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """The tree with `change` applied to each item of `kind`; torch's tree_map is several times slower, and mail is frequent."""
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, dict):
        return {name: _mapped(item, kind, change) for name, item in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_mapped(item, kind, change) for item in tree)
    return tree


def _pack(tree: Any, tensors: list[Tensor]) -> Any:
    def put(tensor: Tensor) -> _Form:
        tensors.append(tensor.detach().contiguous())
        return _Form(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    return _mapped(tree, Tensor, put)


def _forms(tree: Any) -> list[_Form]:
    forms: list[_Form] = []
    _mapped(tree, _Form, forms.append)
    return forms


def _unpack(tree: Any, tensors: list[Tensor]) -> Any:
    left = iter(tensors)
    return _mapped(tree, _Form, lambda form: next(left).requires_grad_(form.requires_grad))


class GroupMail(Mail):
    """torch.distributed: a header and the tensors of each message, matched by tags."""

    def __init__(self, axis: Axis, device: torch.device, watch: Watch, keys: Sequence[Route]) -> None:
        super().__init__(axis)
        self.device, self.watch, self.group = device, watch, axis.host_group()
        self.tags = {key: 1 + _TAGS * i for i, (key, _, _) in enumerate(sorted(keys))}
        self.last_sent: Future[None] | None = None
        self.sends, self.receives = _Waiter(), _Waiter()
        watch.waiters |= {self.sends, self.receives}

    def send(self, key: Key, to: int, tree: Any) -> None:
        tensors: list[Tensor] = []
        header = torch.frombuffer(bytearray(pickle.dumps(_pack(tree, tensors))), dtype=torch.uint8)
        for i, tensor in enumerate([torch.tensor([header.numel()]), header]):
            self._post(key, to, i, tensor)
        for i, tensor in enumerate(tensors):
            if tensor.numel():
                self._send_tensor(key, to, i, tensor.reshape(-1).view(torch.uint8))

    def _send_tensor(self, key: Key, to: int, i: int, flat: Tensor) -> None:
        self._post(key, to, 2 + i, flat.cpu())

    def _post(self, key: Key, to: int, i: int, flat: Tensor) -> None:
        flat = flat.view(torch.uint8)
        work = self._start(dist.isend, flat, self.axis.ranks[to], group=self.group, tag=self.tags[key] + i)
        self.last_sent = self.sends.put(work, flat)

    def receive(self, key: Key, source: int) -> Any:
        size = self._take(key, source, 0, 1, torch.int64)
        tree = pickle.loads(self._take(key, source, 1, int(size), torch.uint8).numpy().tobytes())
        tensors = [self._receive_tensor(key, source, i, form) for i, form in enumerate(_forms(tree))]
        return _unpack(tree, tensors)

    def _receive_tensor(self, key: Key, source: int, i: int, form: _Form) -> Tensor:
        return self._take(key, source, 2 + i, torch.Size(form.shape).numel(), form.dtype).view(form.shape).to(self.device)

    def _take(self, key: Key, source: int, i: int, numel: int, dtype: torch.dtype) -> Tensor:
        return self._fill(torch.empty(numel, dtype=dtype), key, source, group=self.group, tag=self.tags[key] + i)

    def _fill(self, tensor: Tensor, key: Key, source: int, **matched_by: Any) -> Tensor:
        """Receive into a tensor; on a GPU the stream waits, not this thread."""
        if tensor.numel():
            rank = self.axis.ranks[source]
            work = self._start(dist.irecv, tensor.view(-1).view(torch.uint8), rank, **matched_by)
            if tensor.is_cuda:
                work.wait()
            else:
                self._await(self.receives.put(work, tensor), f"mail from rank {rank} (to stage {key[1]})", rank)
        return tensor

    def _start(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Post a send or a receive. If the other rank has already gone, gloo raises here, not in the wait."""
        try:
            return call(*args, **kwargs)
        except RuntimeError as error:
            raise self.watch.lost(error) from error

    def _await(self, future: Future[None], name: str, rank: int | None = None) -> None:
        """Wait for a waiting thread: a gloo wait that times out closes the connection, so it cannot be cut into slices."""
        since = time.monotonic()
        with self.watch.waiting(name):
            while not wait([future], _SLICE).done:
                if rank is not None and self.watch.is_gone(rank):
                    raise self.watch.lost()
                self.watch.check(since)
        try:
            future.result()
        except RuntimeError as error:
            raise self.watch.lost(error) from error

    def flush(self) -> None:
        if self.last_sent is not None:
            self._await(self.last_sent, "mail to be sent")

    def close(self) -> None:
        self.sends.close()
        self.receives.close()


class PairMail(GroupMail):
    """Between GPUs: headers go through the hosts, tensors over a separate process group for each key.

    [Note: A group for each key] NCCL has no tags and matches the messages of two ranks in order. On one group, two ranks that send
    to each other would each wait until the other receives. A key goes in one direction and is received in the order in which it is
    sent, whatever the schedule. Each group has all ranks of the axis's lines, of which torch connects the pairs that use it: so all
    ranks make equally many groups, by whose count torch names them.
    """

    def __init__(self, axis: Axis, device: torch.device, watch: Watch, keys: Sequence[Route], backend: str = "nccl") -> None:
        super().__init__(axis, device, watch, keys)
        ranks = tuple(sorted(itertools.chain.from_iterable(axis.lines)))
        self.groups = {key: _group_of(key, ranks, backend) for key in self.tags}
        self.on_the_way: list[tuple[Any, Tensor]] = []  # sends in flight, with the memory that they read

    def _send_tensor(self, key: Key, to: int, i: int, flat: Tensor) -> None:
        work = self._start(dist.isend, flat, self.axis.ranks[to], group=self.groups[key])
        self.on_the_way = [*((sent, memory) for sent, memory in self.on_the_way if not sent.is_completed()), (work, flat)]

    def _receive_tensor(self, key: Key, source: int, i: int, form: _Form) -> Tensor:
        tensor = torch.empty(form.shape, dtype=form.dtype, device=self.device)
        return self._fill(tensor, key, source, group=self.groups[key])

    def flush(self) -> None:
        super().flush()
        for work, _ in self.on_the_way:
            work.wait()
        self.on_the_way.clear()


# torch keeps groups until destroy_process_group(), so these live as long, by the world's group
_GROUPS: weakref.WeakKeyDictionary[Any, dict[tuple[Key, tuple[int, ...], str], Any]] = weakref.WeakKeyDictionary()


def _group_of(key: Key, ranks: tuple[int, ...], backend: str) -> Any:
    """The ranks' group for a key. Collective over them."""
    made, place = _GROUPS.setdefault(dist.group.WORLD, {}), (key, ranks, backend)
    if place not in made:
        is_part = len(ranks) < dist.get_world_size()
        made[place] = dist.new_group(list(ranks), backend=backend, use_local_synchronization=is_part)
    return made[place]


class _Waiter:
    """A thread that waits for operations in order, and keeps their memory alive until then."""

    def __init__(self) -> None:
        self.works: SimpleQueue[tuple[Any, Tensor, Future[None]] | None] = SimpleQueue()
        self.thread = Thread(target=self._run, name="slipstream-mail", daemon=True)
        self.thread.start()

    def put(self, work: Any, memory: Tensor) -> Future[None]:
        future = Future[None]()
        self.works.put((work, memory, future))
        return future

    def _run(self) -> None:
        while (item := self.works.get()) is not None:
            work, _, future = item
            try:
                work.wait()
                future.set_result(None)
            except RuntimeError as error:
                future.set_exception(error)

    def close(self, patience: float = _SLICE) -> None:
        """End the thread. If it still waits for a lost rank after `patience` seconds, it ends with the process."""
        self.works.put(None)
        self.thread.join(patience)


class SharedMail(Mail):
    """Shared memory: each message is written once, into a segment of the sender, and copied out by the receiver.

    [Note: Segments that grow] Each key has a ring of slots. A slot's words give the receiver the segment's descriptor and size. The
    sender replaces a segment that is too small once the receiver has read its last message, and the receiver maps the new one.
    """

    def __init__(self, comm: SharedComm, routes: Sequence[Route], slots: int) -> None:
        super().__init__(comm.axis)
        self.comm, self.num_slots = comm, slots
        buffers = iter(comm.allocate([(_WORDS, torch.int64)] * (len(routes) * slots)))
        self.rings = {key: [next(buffers) for _ in range(slots)] for key, _, _ in sorted(routes)}
        self.sent, self.received = dict.fromkeys(self.rings, 0), dict.fromkeys(self.rings, 0)
        self.targets = {key: target for key, source, target in routes if source == self.axis.index}  # of this rank's messages
        self.segments: dict[tuple[Key, int], tuple[int, Tensor]] = {}  # for this rank's messages: (descriptor, memory)
        self.mapped: dict[tuple[Key, int], tuple[int, Tensor]] = {}  # for others' messages: (number of the segment, memory)
        self.heads: dict[Key, tuple[bytes, Any]] = {}  # the last header received, and its tree
        self.made = 0

    def send(self, key: Key, to: int, tree: Any) -> None:
        count, tensors = self.sent[key], list[Tensor]()
        turn, slot = divmod(count, self.num_slots)
        self.sent[key] = count + 1
        buffer = self.rings[key][slot]
        head = pickle.dumps(_pack(tree, tensors))
        self.comm.wait_read(buffer, to, turn, f"mail to be read by rank {self.axis.ranks[to]} (to stage {key[1]})")
        nbytes = _aligned(len(head)) + sum(_aligned(tensor.nbytes) for tensor in tensors)
        memory = self._segment((key, slot), nbytes, buffer.tensor)
        memory[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        offset = _aligned(len(head))
        for tensor in tensors:
            memory[offset : offset + tensor.nbytes].view(tensor.dtype).copy_(tensor.view(-1))
            offset += _aligned(tensor.nbytes)
        buffer.tensor[3] = len(head)
        self.comm.post(buffer)

    def _segment(self, place: tuple[Key, int], nbytes: int, words: Tensor) -> Tensor:
        """The memory of a slot, with room for `nbytes`; `words` announce a new one to the receiver."""
        fd, memory = self.segments.get(place, (None, words.new_empty(0)))
        if memory.numel() < nbytes:
            if fd is not None:
                os.close(fd)
            size = -(-nbytes // _PAGE) * _PAGE
            fd = os.memfd_create("slipstream-mail", os.MFD_CLOEXEC)
            os.ftruncate(fd, size)
            memory = torch.frombuffer(mmap.mmap(fd, size, mmap.MAP_SHARED), dtype=torch.uint8)
            self.segments[place] = fd, memory
            self.made += 1
            words[:3] = torch.tensor([self.made, fd, size])
        return memory

    def receive(self, key: Key, source: int) -> Any:
        turn, slot = divmod(self.received[key], self.num_slots)
        self.received[key] += 1
        buffer = self.rings[key][slot]
        self.comm.wait_posted(buffer, source, turn + 1, f"mail (to stage {key[1]})")
        number, fd, nbytes, length = buffer.peers[source][:4].tolist()
        known, memory = self.mapped.get((key, slot), (0, buffer.tensor))
        if known != number:
            memory = torch.frombuffer(open_segment(self.comm.pids[source], fd, nbytes), dtype=torch.uint8)
            self.mapped[key, slot] = number, memory
        head = memory[:length].numpy().tobytes()
        if self.heads.get(key, (b"", None))[0] != head:
            self.heads[key] = head, pickle.loads(head)
        tree, offset, tensors = self.heads[key][1], _aligned(length), []
        for form in _forms(tree):
            tensor = torch.empty(form.shape, dtype=form.dtype)
            tensor.view(-1).copy_(memory[offset : offset + tensor.nbytes].view(form.dtype))
            tensors.append(tensor)
            offset += _aligned(tensor.nbytes)
        self.comm.mark_read(buffer, turn + 1)
        return _unpack(tree, tensors)

    def flush(self) -> None:
        """Wait until all messages have been read: their segments disappear with this rank."""
        for key, to in self.targets.items():
            for buffer in self.rings[key]:
                self.comm.wait_read(buffer, to, buffer.posted, f"mail to be read by rank {self.axis.ranks[to]} (to stage {key[1]})")

    def close(self) -> None:
        for fd, _ in self.segments.values():
            os.close(fd)
        self.segments.clear()
        self.mapped.clear()
        self.comm.close()


class MailByShares(Mail):
    """Mail of trees that are equal on the ranks of another axis (tp): each rank sends a share of every tensor, and receivers
    gather. So a tree travels between stages once, not once for each of these ranks.

    [Note: Alike] Ranks between the slices of layers (a stage that ends behind a column layer) have different trees, and only the
    trees show it. Even these may be equal at first: gradients of a zero-initialized layer, or outputs before a dropout begins. So
    every message is compared over the axis, by a checksum; after the first difference, all messages of the key are sent whole. A
    message states which it is.
    """

    def __init__(self, inner: Mail, exchange: Exchange, kinds: Sequence[str]) -> None:
        """kinds: of the keys whose messages are shared; others are sent whole. Collective over the axis of `exchange`."""
        super().__init__(inner.axis)
        self.inner, self.exchange, self.kinds = inner, exchange, tuple(kinds)
        self.differing = set[Key]()

    def send(self, key: Key, to: int, tree: Any) -> None:
        if key[0] not in self.kinds:
            self.inner.send(key, to, tree)
            return
        tensors: list[Tensor] = []
        head = pickle.dumps(_pack(tree, tensors))
        if self._is_alike(key, head, tensors):
            parts = (_bytes_of(tensor).split(self._sizes(tensor.nbytes)) for tensor in tensors)
            self.inner.send(key, to, (head, [shares[self.exchange.index] for shares in parts]))
        else:
            self.inner.send(key, to, (None, tree))

    def receive(self, key: Key, source: int) -> Any:
        message = self.inner.receive(key, source)
        if key[0] not in self.kinds:
            return message
        head, content = message
        if head is None:
            return content
        tree, whole = pickle.loads(head), list[Tensor]()
        for form, share in zip(_forms(tree), content, strict=True):
            nbytes = form.dtype.itemsize * torch.Size(form.shape).numel()
            whole.append(self.exchange.gather(share, 0, self._sizes(nbytes)).view(form.dtype).view(form.shape))
        return _unpack(tree, whole)

    def _sizes(self, nbytes: int) -> list[int]:
        return even_shares(nbytes, self.exchange.size)

    def _is_alike(self, key: Key, head: bytes, tensors: Sequence[Tensor]) -> bool:
        if key in self.differing:
            return False
        device = self.exchange.device
        sums = torch.stack([torch.tensor(zlib.crc32(head), device=device), *(_checksum(each).to(device) for each in tensors)])
        every = self.exchange.gather(_bytes_of(_checksum(sums)), 0, [8] * self.exchange.size).view(torch.int64)
        if len(set(every.tolist())) == 1:
            return True
        self.differing.add(key)
        if self.exchange.index == 0:
            logger.warning(
                "what is sent to stage %d differs between the ranks %s, which have slices of the same layers, so it travels "
                "whole; if stages are cut outside of sliced layers, each rank sends a share",
                key[1],
                ", ".join(map(str, self.exchange.axis.ranks)),
            )
        return False

    def flush(self) -> None:
        self.inner.flush()

    def close(self) -> None:
        self.inner.close()


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _checksum(tensor: Tensor) -> Tensor:
    """A checksum of a contiguous tensor's bytes and their positions, on a GPU without a copy to the host."""
    flat = _bytes_of(tensor)
    return sum_of_places(flat) if flat.is_cuda else torch.tensor(zlib.crc32(flat.numpy().data))


def sum_of_places(flat: Tensor) -> Tensor:
    """For bytes: the sum of their words, each times an odd number that depends on its position; it wraps around."""
    aligned = flat.clone() if flat.storage_offset() % 8 else flat
    words = aligned.view(torch.int64) if flat.numel() % 8 == 0 else flat.long()
    places = torch.arange(words.numel(), device=words.device).mul_(0x5851F42D4C957F2D).bitwise_or_(1)
    return torch.sum(words * places)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


def connect_mail(axis: Axis, device: torch.device, transport: str, watch: Watch, routes: Sequence[Route], slots: int) -> Mail:
    """Make the mail of one axis, with the transport that `connect_axis` chooses. Collective over the axis's `lines`."""
    comm = connect_axis(axis, device, transport, watch)
    if isinstance(comm, SharedComm):
        return SharedMail(comm, routes, slots)
    # NCCL refuses two ranks on one device: such ranks communicate by gloo (world/join.py), and so does their mail
    between_gpus = device.type == "cuda" and transport != "gloo" and "nccl" in str(dist.get_backend())
    return (PairMail if between_gpus else GroupMail)(axis, device, watch, routes)

"""Mail between the stages of a pipeline: trees of tensors, in order for each key, whatever the order between keys.

key   (kind, stage): "F" for activations and "B" for their gradients, and the receiving stage
tree  nested tuples, lists and dicts of tensors, None, numbers and strings. Shapes may change from message to message
"""

from __future__ import annotations

import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, wait
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.world.mesh import Axis
from slipstream.world.watch import Watch

Key = tuple[str, int]
Route = tuple[Key, int, int]  # key, source, target: places on the axis

_SLICE = 0.25  # seconds: how long a wait sleeps between checks for failed peers
_TAGS = 64  # of one key


class Mail(ABC):
    """Messages along one axis. Sending does not wait for the receiver."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    @abstractmethod
    def send(self, key: Key, to: int, tree: Any) -> None:
        """Send a tree to the place `to` on the axis. Its tensors may be written again after `flush`."""

    @abstractmethod
    def receive(self, key: Key, source: int) -> Any:
        """The next tree of `key`. Tensors that required a gradient are leaves that require one."""

    @abstractmethod
    def flush(self) -> None:
        """Wait until what was sent has left this rank."""

    @abstractmethod
    def close(self) -> None:
        """Free all memory. Safe to call twice."""


class _Form(NamedTuple):
    """A tensor of a message, in place of it in the tree."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


def _pack(tree: Any, tensors: list[Tensor]) -> Any:
    if isinstance(tree, Tensor):
        tensors.append(tree.detach().contiguous())
        return _Form(tuple(tree.shape), tree.dtype, tree.requires_grad)
    if isinstance(tree, dict):
        return {name: _pack(item, tensors) for name, item in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_pack(item, tensors) for item in tree)
    return tree


def _forms(tree: Any) -> list[_Form]:
    if isinstance(tree, _Form):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return [form for item in items for form in _forms(item)]


def _unpack(tree: Any, tensors: list[Tensor]) -> Any:
    if isinstance(tree, _Form):
        return tensors.pop(0).requires_grad_(tree.requires_grad)
    if isinstance(tree, dict):
        return {name: _unpack(item, tensors) for name, item in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_unpack(item, tensors) for item in tree)
    return tree


class GroupMail(Mail):
    """torch.distributed: a header and the tensors of each message, matched by tags."""

    def __init__(self, axis: Axis, device: torch.device, watch: Watch, keys: Sequence[Route]) -> None:
        super().__init__(axis)
        self.device, self.watch = device, watch
        self.tags = {key: 1 + _TAGS * i for i, (key, _, _) in enumerate(sorted(keys))}
        self.sent: list[tuple[Any, Tensor]] = []
        self.works: SimpleQueue[tuple[Any, Future[None]] | None] = SimpleQueue()
        Thread(target=_wait_for, args=(self.works,), name="slipstream-mail", daemon=True).start()

    def send(self, key: Key, to: int, tree: Any) -> None:
        tensors: list[Tensor] = []
        header = torch.frombuffer(bytearray(pickle.dumps(_pack(tree, tensors))), dtype=torch.uint8)
        size = torch.tensor([header.numel()])
        self.sent = [(work, tensor) for work, tensor in self.sent if not work.is_completed()]
        for i, tensor in enumerate([size, header, *tensors]):
            moved = tensor.reshape(-1).view(torch.uint8).cpu()
            if moved.numel():
                work = dist.isend(moved, self.axis.ranks[to], group=self.axis.group, tag=self.tags[key] + i)
                self.sent.append((work, moved))

    def receive(self, key: Key, source: int) -> Any:
        size = self._take(key, source, 0, 1, torch.int64)
        tree = pickle.loads(bytes(self._take(key, source, 1, int(size), torch.uint8).tolist()))
        tensors = []
        for i, form in enumerate(_forms(tree)):
            tensor = self._take(key, source, 2 + i, torch.Size(form.shape).numel(), form.dtype)
            tensors.append(tensor.view(form.shape).to(self.device))
        return _unpack(tree, tensors)

    def _take(self, key: Key, source: int, i: int, numel: int, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(numel, dtype=dtype)
        if numel:
            rank = self.axis.ranks[source]
            work: Any = dist.irecv(tensor.view(torch.uint8), rank, group=self.axis.group, tag=self.tags[key] + i)
            self._await(work, rank, f"mail from rank {rank} (to stage {key[1]})")
        return tensor

    def _await(self, work: Any, rank: int, name: str) -> None:
        """Wait on the waiting thread: a wait of gloo's that times out closes the connection, so it cannot be cut into slices."""
        since, future = time.monotonic(), Future[None]()
        self.works.put((work, future))
        with self.watch.waiting(name):
            while not wait([future], _SLICE).done:
                if self.watch.is_gone(rank):
                    raise self.watch.lost()
                self.watch.check(since)
        try:
            future.result()
        except RuntimeError as error:
            raise self.watch.lost(error) from error

    def flush(self) -> None:
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()

    def close(self) -> None:
        self.sent.clear()
        self.works.put(None)


def _wait_for(works: SimpleQueue[tuple[Any, Future[None]] | None]) -> None:
    while (item := works.get()) is not None:
        work, future = item
        try:
            work.wait()
            future.set_result(None)
        except RuntimeError as error:
            future.set_exception(error)


def connect_mail(axis: Axis, device: torch.device, transport: str, watch: Watch, keys: Sequence[Route], slots: int) -> Mail:
    """Make the mail of one axis. Collective over the axis."""
    return GroupMail(axis, device, watch, keys)

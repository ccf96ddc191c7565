"""Sleep and wake: free an engine's memory by moving states to the host or to disk, and restore them.

For programs that alternate between training and generation on one device. Every kind of state can be moved, in any ZeRO stage:

optimizer  masters and optimizer states
weights    parameters; accessing one while it is moved away raises an error that names it
gradients  gradient buffers, with their contents in the middle of a window, and transfer buffers

States that are already offloaded stay where they are.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.ops.disk import Disk, DiskError
from slipstream.train.gate import Obstacle
from slipstream.train.states import States
from slipstream.zero.comm import first_said
from slipstream.zero.placement import Tier
from slipstream.zero.shared import free_pages
from slipstream.zero.storage.store import CodedStore, HostStore, MemoryStore, Space, Store, pieces, range_nbytes

KINDS = ("optimizer", "weights", "gradients")


def check(include: Iterable[str] | None, device: str, path: str | None, own: torch.device) -> tuple[str, ...]:
    """Validate the arguments of `Engine.sleep`; returns the kinds of state. Raises ValueError."""
    kinds = KINDS if include is None else tuple(include)
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"sleep(include=): {kind!r} is not a kind of state; use {', '.join(KINDS)}")
    if device not in ("cpu", "disk"):
        raise ValueError(f"sleep(device={device!r}): use 'cpu' or 'disk'")
    if device == "cpu" and own.type == "cpu":
        raise ValueError("sleep(device='cpu'): this engine's states are already in host memory; use device='disk' and path=")
    if device == "disk" and (path is None or not Path(path).is_dir()):
        raise ValueError(f"sleep(device='disk'): path={path!r} is not a folder; pass one on a disk")
    return kinds


class Asleep:
    """Tensors whose memory is free while their contents are elsewhere, and the copies.

    A tensor keeps its identity: its storage is resized to zero and back.
    """

    def __init__(self, kinds: tuple[str, ...], device: torch.device, folder: str | None) -> None:
        self.kinds, self.device, self.folder = kinds, device, folder
        self._space: Space | None = None
        self._gone: list[tuple[Tensor, int, Store | Tensor | None]] = []

    def take(self, tensors: list[tuple[Tensor, bool]]) -> int:
        """Copy the tensors away (each with whether to keep its contents); returns their bytes. `empty` then frees their memory."""
        if self.folder is not None:
            nbytes = sum(range_nbytes(tensor.numel(), tensor.element_size()) for tensor, counts in tensors if counts)
            self._space = Space(partial(Disk, str(self.folder)), max(nbytes, 1))
        for tensor, counts in tensors:
            self._gone.append((tensor, tensor.untyped_storage().nbytes(), self._save(tensor) if counts else None))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return sum(tensor.nbytes for tensor, _, _ in self._gone)

    def empty(self) -> None:
        """Free the memory, once all ranks have saved; each rank frees its own part of shared memory."""
        for tensor, _, _ in self._gone:
            if tensor.untyped_storage().resizable():
                tensor.untyped_storage().resize_(0)
            else:
                free_pages(tensor)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def bring_back(self) -> str:
        """Restore all tensors; returns the first disk error, "" for none. All memory is allocated again either way."""
        error = ""
        for tensor, nbytes, saved in self._gone:
            if tensor.untyped_storage().resizable():
                tensor.untyped_storage().resize_(nbytes)
            if isinstance(saved, Store):
                try:
                    for start, stop in pieces(saved.numel):
                        tensor[start:stop].copy_(saved.get(start, stop))
                except DiskError as failed:
                    error = error or str(failed)
            elif saved is not None:
                tensor.copy_(saved, non_blocking=True)
            else:
                tensor.zero_()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.close()
        return error

    def close(self) -> None:
        if self._space is not None:
            self._space.close()
        self._gone, self._space = [], None

    def _save(self, tensor: Tensor) -> Store | Tensor:
        if self._space is None:
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
        store = self._space.store(tensor.numel(), tensor.dtype)
        for start, stop in pieces(tensor.numel()):
            store.put(start, tensor[start:stop].cpu())
        return store


def put(states: States, kinds: tuple[str, ...], folder: str | None) -> int:
    """Copy states away, agree, free the memory; returns the bytes freed. If one rank lacks space, all raise and nothing is lost."""
    asleep = Asleep(kinds, states.device, folder)
    error, nbytes = "", 0
    try:
        nbytes = asleep.take([(each, counts) for each, counts in memory_of(states, kinds) if folder or not each.is_cpu])
    except (OSError, ValueError, RuntimeError) as failed:
        error = str(failed)
    if failure := first_said(error, states.mesh.world):
        asleep.close()
        rank, why = failure
        raise RuntimeError(f"engine.sleep(): no states were moved, because rank {rank} failed: {why}")
    states.resources["asleep"] = asleep
    states.gate.shut(Obstacle.ASLEEP, f"the engine sleeps ({', '.join(sorted(kinds))} are away); call engine.wake() first")
    if "weights" in kinds:
        for unit in states.units:
            unit.sleep()
    for unit in states.units:
        stays = isinstance(unit.master, HostStore) or (folder is None and states.homes.tiers.optim is not Tier.DEVICE)
        unit.shown.is_locked = "optimizer" in kinds and not stays
    if "gradients" in kinds:
        states.hooks.refusal = "the engine's gradients are away: call engine.wake() first, or compute under torch.no_grad()"
        states.homes.close_landings()
    asleep.empty()
    if states.homes.lane is None:
        states.steps.ring = None
    return nbytes + (states.homes.free_buffers() if "gradients" in kinds else 0)


def wake(states: States) -> None:
    """Undo `put`. If reading from a disk fails, all ranks are awake but broken, and raise DiskError."""
    asleep: Asleep = states.resources["asleep"]
    failure = first_said(asleep.bring_back(), states.mesh.world)  # after it, all ranks' parts of shared memory are back
    states.hooks.refusal = ""
    for unit in states.units:
        unit.shown.is_locked = False
    if "weights" in asleep.kinds:
        for unit in states.units:
            unit.wake_up()
    del states.resources["asleep"]
    states.gate.open(Obstacle.ASLEEP)
    if failure:
        rank, why = failure
        lost = f"rank {rank} could not read its sleeping states back from disk: {why}"
        states.gate.shut(Obstacle.BROKEN, f"{lost}. Repair or replace the disk, and resume from the last checkpoint")
        raise DiskError(errno.EIO, lost)


def memory_of(states: States, kinds: Iterable[str]) -> list[tuple[Tensor, bool]]:
    """This rank's device memory of these kinds of state, each part once: (1D tensor, whether to keep its contents)."""
    tensors: dict[tuple[int, int], tuple[Tensor, bool]] = {}

    def add(tensor: Tensor | None, counts: bool = True) -> None:
        if tensor is not None and tensor.numel() and tensor.device.type == states.device.type:
            flat = tensor.detach().reshape(-1)
            if flat.data_ptr() == tensor.data_ptr():
                tensors.setdefault((flat.data_ptr(), flat.nbytes), (flat, counts))

    for kind in kinds:
        {"optimizer": _optimizer, "weights": _weights, "gradients": _gradients}[kind](states, add)
    return list(tensors.values())


def _optimizer(states: States, add: Any) -> None:
    for unit in states.units:
        if unit.out is not None:
            add(_whole(unit.master))
    for state in states.steps.memory():
        add(state if isinstance(state, Tensor) else _whole(state))
    for store in states.average.stores() if states.average is not None else ():
        add(_whole(store))


def _weights(states: States, add: Any) -> None:
    for unit in states.units:
        if unit.memory.common is not None or not unit.placement.weights:
            start, stop = unit.span if unit.memory.common is not None else (0, unit.layout.numel)
            add(unit.full[start:stop])
        else:
            add(_whole(unit.weights))
        add(unit.memory.kept.tensor if unit.memory.kept else None, False)


def _gradients(states: States, add: Any) -> None:
    for unit in states.units:
        holds = unit.window.has_gradient
        add(unit.memory.local.tensor if unit.memory.local else None, holds)
        add(unit.memory.replica.tensor if unit.memory.replica else None, holds)
        add(_whole(unit.grads) if unit.grads is not None and unit.memory.local is None else None, holds)
    for buffer in states.slots.buffers():
        add(buffer.tensor, False)


def _whole(store: Store) -> Tensor | None:
    if isinstance(store, CodedStore):
        return store.codes
    return store.view(0, store.numel) if isinstance(store, MemoryStore) and not isinstance(store, HostStore) else None

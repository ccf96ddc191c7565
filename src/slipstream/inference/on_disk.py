"""Layers or experts of a native decoder on disk.

Layers are read in order while earlier layers compute: for weights larger than memory. Policy (ZeRO-Inference):
`WeightMemory.nbytes` first covers the embedding, the head and two slots of one layer each. As many layers as fit into the rest stay
in memory, evenly spread, so that the disk also works while they compute. The other layers are *stored*: they lie packed in a file
and pass through the slots, number k through slot k % 2. A forward reads each stored layer once. While its last layer, the head and
the sampler run, the first layers of the next forward are read. So a forward takes at least stored bytes / disk rate, however many
tokens it has: large batches share that time.

Reads of layers are direct and bypass the kernel's page cache. Norms, biases and routers are kept in memory in addition.

Experts: the most recently used ones are in memory, in `nbytes` for all layers together, in slots of one expert each. If a forward
needs an expert that is in no slot, all threads read it into the slot that was used least recently (csrc/expert_store.c). The router
decides first, so no read is in vain. Reads pass through the kernel's page cache: free host memory is a second cache level. Shared
experts and routers stay in memory.

A read copies packed bytes, so tokens are the same as with all weights in memory. Files are unnamed, so they disappear with the
process, however that ends.
"""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.inference.stats import Use
from slipstream.ops.disk import ALIGNMENT, Disk, DiskError, Transfer, aligned, num_free
from slipstream.ops.pages import Pool

SLOTS = 2
LINE = 64
_pointer, _long, _int = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class WeightMemory(NamedTuple):
    """Where a model's weights are kept."""

    nbytes: int | None  # of matrices in memory; None: as few as possible
    folder: str  # for the file that holds the other matrices


def choose(sizes: Sequence[int], others: int, nbytes: int | None) -> list[int]:
    """Choose the layers to store, as few as possible. `sizes`: packed bytes of each layer; `others`: of the embedding and the head.
    Raises ValueError if `nbytes` is too small, with the number that suffices."""
    num, total, slots = len(sizes), sum(sizes), SLOTS * _whole(max(sizes, default=0))
    least = others + min(slots, total)
    limit = least if nbytes is None else nbytes
    if limit < least:
        raise ValueError(
            f"weights_bytes ({limit:,}) is less than the embedding and the head ({others:,} bytes) and two layers need: "
            f"give at least {least:,}; all weights have {others + total:,}"
        )
    for count in range(num):
        stored = _spread(num, count)
        if others + total - sum(sizes[i] for i in stored) + bool(stored) * slots <= limit:
            return stored
    return _spread(num, num)


def _spread(num: int, count: int) -> list[int]:
    """Choose `count` of `num` layers at even distances, among them the last."""
    return [i for i in range(num) if (i + 1) * count // num > i * count // num]


def allocator(memory: Tensor) -> Callable[[int], Tensor]:
    """A function that gives parts of a layer's or expert's memory, uint8, one after the other, at whole lines."""
    begin = 0

    def allocate(nbytes: int) -> Tensor:
        nonlocal begin
        start, begin = begin, begin + nbytes + -nbytes % LINE
        assert start + nbytes <= len(memory), f"more than {len(memory):,} bytes are packed"
        return memory[start : start + nbytes]

    return allocate


class LayerStore:
    """`sizes`: packed bytes of the stored layers, in order. First every layer goes through `packing`, then `start` runs; a forward
    calls `fetch` and `release` for each layer in turn. One thread at a time. Raises ValueError if `folder` lacks space."""

    def __init__(self, sizes: Sequence[int], folder: str) -> None:
        self._sizes = [_whole(size) for size in sizes]
        self._offsets = list(accumulate(self._sizes, initial=0))
        self.nbytes, self.num_layers = self._offsets[-1], len(sizes)  # `nbytes`: bytes that a forward reads
        try:
            self._disk = Disk(folder, self.nbytes)
        except ValueError as error:
            raise ValueError(f"layers cannot be stored: {error} (weights_folder, or TMPDIR)") from error
        self._slots = [aligned(max(self._sizes)) for _ in range(min(SLOTS, self.num_layers))]
        self._moves: list[tuple[int, Transfer] | None] = [None] * SLOTS  # per slot: its layer, and the transfer into or out of it
        self._next = 0  # the layer to read next

    @contextmanager
    def packing(self, number: int) -> Iterator[Tensor]:
        """Yields memory for a layer's tables, which is written to the file at the end. Raises DiskError."""
        self._empty(number % SLOTS)
        yield (memory := self._memory(number))
        self._moves[number % SLOTS] = number, self._disk.write([(self._offsets[number], memory)])

    def start(self) -> None:
        """Wait until all layers are written, then start to read the first ones. Raises DiskError."""
        for slot in range(SLOTS):
            self._empty(slot)
        self._read_ahead()

    def fetch(self, number: int) -> None:
        """Wait until the layer is in its slot. Raises DiskError; the next forward then reads it again."""
        move = self._moves[number % SLOTS]
        if move is None or move[0] != number:  # the last forward was interrupted
            for slot in range(SLOTS):
                with suppress(DiskError):
                    self._empty(slot)
            self._next = number
            self._read_ahead()
        self._wait(number % SLOTS)

    def release(self, number: int) -> None:
        """Free the layer's slot for another layer, once it is computed."""
        self._moves[number % SLOTS] = None
        self._read_ahead()

    def close(self) -> None:
        """Free the file and the memory of the slots. No forward may run afterwards."""
        self._disk.close()
        self._slots.clear()

    def _memory(self, number: int) -> Tensor:
        return self._slots[number % SLOTS][: self._sizes[number]]

    def _wait(self, slot: int) -> None:
        """Wait for the slot's transfer; if it failed, the slot is empty."""
        if (move := self._moves[slot]) is not None:
            try:
                move[1].wait()
            except DiskError:
                self._moves[slot] = None
                raise

    def _empty(self, slot: int) -> None:
        self._wait(slot)
        self._moves[slot] = None

    def _read_ahead(self) -> None:
        """Start to read the next layers into free slots."""
        while self._moves[self._next % SLOTS] is None:
            number = self._next
            self._moves[number % SLOTS] = number, self._disk.read([(self._offsets[number], self._memory(number))])
            self._next = (number + 1) % self.num_layers


def _whole(nbytes: int) -> int:
    return nbytes + -nbytes % ALIGNMENT


class ExpertRecord(ctypes.Structure):
    """`struct expert_store` of csrc/decoder.h."""

    _fields_ = (
        ("slots", _pointer),
        ("expert_bytes", _long),
        *((name, _pointer) for name in ("last_used", "owner", "slot", "loads")),
        *((name, _long) for name in ("clock", "hits", "misses")),
        *((name, _int) for name in ("file", "num_slots", "num_loads", "error")),
    )


class ExpertStore:
    """`num_experts`: of all layers. `least`: the number in the layer that has most. `expert_nbytes`: packed size of the largest."""

    def __init__(self, nbytes: int, *, num_experts: int, least: int, expert_nbytes: int) -> None:
        size = expert_nbytes + -expert_nbytes % LINE
        slots = min(nbytes // size, num_experts)
        if slots < least:
            raise ValueError(
                f"expert_cache_bytes ({nbytes:,}) holds {slots} experts of {size:,} bytes; a batch can need a layer's {least}: "
                f"give at least {least * size:,}"
            )
        self.expert_nbytes, self.num_slots, self.num_experts = size, slots, num_experts
        self._file, path = tempfile.mkstemp(prefix="slipstream-experts-")
        os.unlink(path)
        weakref.finalize(self, os.close, self._file)
        try:
            os.posix_fallocate(self._file, 0, num_experts * size)  # reads are of whole experts, and a full disk fails here
        except OSError as error:
            folder = tempfile.gettempdir()
            room = f" ({num_free(folder):,} bytes are free)" if error.errno == errno.ENOSPC else ""
            raise ValueError(
                f"the experts' {num_experts * size:,} bytes cannot be stored in {folder}: {error.strerror}{room}; make room there, "
                "or set TMPDIR to another folder"
            ) from None
        self._pool = Pool()
        self._tensors = {
            "slots": self._pool.empty(slots * size),
            "last_used": torch.zeros(slots, dtype=torch.int64),
            "owner": torch.full((slots,), -1, dtype=torch.int32),
            "slot": torch.full((num_experts,), -1, dtype=torch.int32),
            "loads": torch.zeros(slots, dtype=torch.int32),
        }
        addresses = {name: tensor.data_ptr() for name, tensor in self._tensors.items()}
        self.record = ExpertRecord(**addresses, expert_bytes=size, file=self._file, num_slots=slots)

    @contextmanager
    def packing(self, expert: int) -> Iterator[Tensor]:
        """As `LayerStore.packing`, in any thread. Raises OSError."""
        yield (memory := torch.empty(self.expert_nbytes, dtype=torch.uint8))
        view, done = memory.numpy().data, 0
        while done < len(view):
            done += os.pwrite(self._file, view[done:], expert * self.expert_nbytes + done)

    def use(self) -> Use:
        return Use(self.record.hits, self.record.misses)

    def check(self) -> None:
        """Raise OSError if a read of the last forward failed."""
        if error := self.record.error:
            self.record.error = 0
            self._tensors["slot"].fill_(-1)  # some slots hold incomplete experts
            self._tensors["owner"].fill_(-1)
            raise OSError(error, f"cannot read experts from the temporary file: {os.strerror(error)}")

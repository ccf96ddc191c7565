"""Layers of a native decoder on disk, read in order while the layers before them compute: weights larger than memory.

Policy (ZeRO-Inference): of `WeightMemory.nbytes`, the embedding, the head and two slots of one layer are taken first. As many
layers as fit in the rest stay in memory, evenly spread, so that the disk also works while they compute. The others are *stored*:
they lie packed in a file and pass through the slots, number k through slot k % 2. A forward reads each of them once, and while its
last layer, the head and the sampler run, the first ones of the next forward are read. So a forward takes at least the stored bytes
over the disk's rate, however many tokens it has: large batches share that. A read is a copy of the packed bytes, so tokens are the
same as with all layers in memory.

Reads are direct: the kernel's page cache keeps nothing. The file has no name: it ends with the process, however that ends. Norms,
biases and routers are in memory besides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from slipstream.ops.disk import ALIGNMENT, Disk, DiskError, Transfer, aligned

SLOTS = 2
LINE = 64


class WeightMemory(NamedTuple):
    """Where a model's weights are."""

    nbytes: int | None  # of matrices in memory; None: as few as work
    folder: str  # of the file of the others


def choose(sizes: Sequence[int], others: int, nbytes: int | None) -> list[int]:
    """The layers to store, as few as possible. `sizes`: packed bytes of each layer; `others`: of the embedding and the head.

    Raises ValueError if `nbytes` are too few, with the number that is enough."""
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
    """So many of `num` layers at even distances; the last one is among them."""
    return [i for i in range(num) if (i + 1) * count // num > i * count // num]


class LayerStore:
    """`sizes`: packed bytes of the stored layers, in order. First each is packed, then comes `start`; a forward calls `fetch` and
    `release` for each in turn. One thread at a time. Raises ValueError if the folder cannot hold them."""

    def __init__(self, sizes: Sequence[int], folder: str) -> None:
        self._sizes = [_whole(size) for size in sizes]
        self._offsets = list(accumulate(self._sizes, initial=0))
        self.nbytes, self.num_layers = self._offsets[-1], len(sizes)  # that a forward reads
        try:
            self._disk = Disk(folder, self.nbytes)
        except ValueError as error:
            raise ValueError(f"layers cannot be stored: {error} (weights_folder, or TMPDIR)") from error
        self._slots = [aligned(max(self._sizes)) for _ in range(min(SLOTS, self.num_layers))]
        self._moves: list[tuple[int, Transfer] | None] = [None] * SLOTS  # the layer in each slot, and how it gets there or out
        self._next = 0  # the layer that is read next

    @contextmanager
    def packing(self, number: int) -> Iterator[Callable[[int], Tensor]]:
        """Gives memory, uint8, for the tables of a layer; they are written to the file afterwards. Raises DiskError."""
        self._empty(number % SLOTS)
        memory, begin = self._memory(number), 0

        def allocate(nbytes: int) -> Tensor:
            nonlocal begin
            start, begin = begin, begin + nbytes + -nbytes % LINE
            assert start + nbytes <= len(memory), f"stored layer {number} has more than {len(memory)} bytes packed"
            return memory[start : start + nbytes]

        yield allocate
        self._moves[number % SLOTS] = number, self._disk.write([(self._offsets[number], memory)])

    def start(self) -> None:
        """Wait until all layers are written, and read the first ones. Raises DiskError."""
        for slot in range(SLOTS):
            self._empty(slot)
        self._read_ahead()

    def fetch(self, number: int) -> None:
        """Wait until the layer is in its slot. Raises DiskError; the next forward then reads anew."""
        move = self._moves[number % SLOTS]
        if move is None or move[0] != number:  # the last forward has not come to its end
            for slot in range(SLOTS):
                with suppress(DiskError):
                    self._empty(slot)
            self._next = number
            self._read_ahead()
        self._wait(number % SLOTS)

    def release(self, number: int) -> None:
        """The layer is computed: its slot is free for another."""
        self._moves[number % SLOTS] = None
        self._read_ahead()

    def close(self) -> None:
        """Free the file, and the memory of the slots. No forward may run afterwards."""
        self._disk.close()
        self._slots.clear()

    def _memory(self, number: int) -> Tensor:
        return self._slots[number % SLOTS][: self._sizes[number]]

    def _wait(self, slot: int) -> None:
        """Wait until the slot's move is done; it is empty if that failed."""
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
        """Begin to read the next layers, as far as their slots are free."""
        while self._moves[self._next % SLOTS] is None:
            number = self._next
            self._moves[number % SLOTS] = number, self._disk.read([(self._offsets[number], self._memory(number))])
            self._next = (number + 1) % self.num_layers


def _whole(nbytes: int) -> int:
    return nbytes + -nbytes % ALIGNMENT

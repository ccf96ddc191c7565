"""Reads boxes of a checkpoint's tensors, in our format or DeepSpeed's, and verifies their checksums.

A load reads twice through one set of open files: first `verify` on every rank, then `fill`, from the page cache, into the tensors
themselves. So a damaged byte leaves all tensors of all ranks unchanged, without extra memory. Only a disk that fails between
the two reads can leave a load half done. Readers of single tensors (`tensor`, `slice`) verify what they read.
"""

from __future__ import annotations

import os
import stat
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.checkpoint.document import Document, Entry, Piece, ZipRecord
from slipstream.checkpoint.errors import CheckpointError
from slipstream.checkpoint.flat_slice import Box, FlatSlice, boxes, memory, runs, whole_box
from slipstream.checkpoint.plan import STAGE, shares_of
from slipstream.ops.checksum import crc32


class BoxReader:
    """The data files of one checkpoint whose `Document` has been validated.

    A file is opened at its first read and keeps that descriptor until `close`, even if another file replaces it.
    """

    def __init__(self, folder: Path, document: Document) -> None:
        self.folder, self.document = folder, document
        self.verified: set[ZipRecord] = set()
        self._handles: dict[str, int] = {}
        self._sorted: dict[str, _Sorted] = {}

    def slice(self, name: str) -> FlatSlice:
        """A whole tensor, left in the files."""
        return FlatSlice(_StoredTensor(self, name), self.document.tensors[name].shape, 0)

    def tensor(self, name: str) -> Tensor:
        """A whole tensor, in memory."""
        entry = self.document.tensors[name]
        return self.read(name, 0, whole_box(entry.shape).numel).view(entry.shape)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Verify and return elements [start, stop) in row-major order, 1D."""
        entry = self.document.tensors[name]
        values = torch.empty(stop - start, dtype=entry.dtype)
        self.verify((name, box) for box in boxes(entry.shape, start, stop))
        self.fill(name, FlatSlice(values, entry.shape, start))
        return values

    def verify(self, named: Iterable[tuple[str, Box]]) -> None:
        """Verify the checksum of every block and zip record that holds a byte of the boxes, each once."""
        size = self.document.block
        blocks: dict[tuple[str, int], tuple[str, Entry, Piece, set[int]]] = {}  # by file and offset in it
        for name, box in named:
            entry = self.document.tensors[name]
            for piece, overlap in self._overlaps(name, box):
                if piece.zip_record is not None:
                    self.verify_record(piece.zip_record)
                if not piece.crc32:
                    continue
                indices = blocks.setdefault((piece.file, piece.at), (name, entry, piece, set()))[3]
                for first, numel in runs(piece.box.sizes, overlap.within(piece.box)):
                    last = first + numel - 1
                    indices.update(range(first * entry.dtype.itemsize // size, last * entry.dtype.itemsize // size + 1))
        buffer = torch.empty(size, dtype=torch.uint8)
        for _, (name, entry, piece, indices) in sorted(blocks.items(), key=lambda item: item[0]):
            for index in sorted(indices):
                start = index * size
                block = buffer[: min(size, entry.nbytes(piece) - start)]
                self._read(piece.file, piece.at + start, memory(block))
                if crc32(block) != piece.crc32[index]:
                    raise CheckpointError(
                        f"{self.folder / piece.file} is damaged: the checksum of tensor {name!r} does not "
                        f"match (bytes [{piece.at + start}, {piece.at + start + block.numel()}))"
                    )

    def verify_record(self, record: ZipRecord) -> None:
        """Compare a record's CRC-32 with the archive's, once; reads all of it. Raises CheckpointError with file and record."""
        if record in self.verified:
            return
        buffer, value = torch.empty(min(STAGE, record.nbytes), dtype=torch.uint8), 0
        for start in range(0, record.nbytes, STAGE):
            part = buffer[: min(STAGE, record.nbytes - start)]
            self._read(record.file, record.at + start, memory(part))
            value = crc32(part, value)
        if value != record.crc32:
            raise CheckpointError(
                f"{self.folder / record.file} is damaged: its zip record {record.name!r} has the checksum {value:08x}, and "
                f"{record.crc32:08x} was saved; copy the file again from where it was written, or load an older checkpoint"
            )
        self.verified.add(record)

    def fill(self, name: str, target: FlatSlice | Tensor) -> None:
        """Fill a tensor in place without verifying what is read; a different dtype is rounded like by `Tensor.copy_`."""
        if isinstance(target, FlatSlice) and not isinstance(target.data, Tensor):
            values = torch.empty(target.data.numel(), dtype=target.data.dtype)
            self.fill(name, replace(target, data=values))
            target.data.put(0, values)
            return
        with torch.no_grad():
            for share in shares_of({name: target}):
                assert isinstance(share.values, Tensor), "other data are filled above"
                self.fill_box(name, share.box, share.values.detach())

    def fill_box(self, name: str, box: Box, target: Tensor) -> None:
        """Fill `target`, which has the sizes of `box`, in place."""
        dtype = self.document.tensors[name].dtype
        for piece, overlap in self._overlaps(name, box):
            source, view = overlap.within(piece.box), overlap.within(box).of(target)
            if view.is_contiguous() and view.device.type == "cpu" and view.dtype is dtype:
                self._copy(piece, source, 0, view)
                continue
            step = STAGE // dtype.itemsize
            for start in range(0, overlap.numel, step):
                values = torch.empty(min(step, overlap.numel - start), dtype=dtype)
                self._copy(piece, source, start, values)
                parts = boxes(overlap.sizes, start, start + values.numel())
                for part, flat in zip(parts, values.split([part.numel for part in parts]), strict=True):
                    part.of(view).copy_(flat.view(part.sizes))

    def _copy(self, piece: Piece, box: Box, start: int, values: Tensor) -> None:
        """Read elements of a box inside a piece, from `start` on, into contiguous `values` of the stored dtype."""
        raw, position, size = memory(values), 0, values.dtype.itemsize
        for first, numel in runs(piece.box.sizes, box, start, start + values.numel()):
            self._read(piece.file, piece.at + first * size, raw[position : position + numel * size])
            position += numel * size

    def _overlaps(self, name: str, box: Box) -> Iterator[tuple[Piece, Box]]:
        """The pieces of a tensor that contain elements of `box`, each with the common box."""
        if name not in self._sorted:
            self._sorted[name] = _Sorted.of(self.document.tensors[name].pieces)
        for piece in self._sorted[name].near(box):
            overlap = piece.box.overlap(box)
            if overlap is not None:
                yield piece, overlap

    def _read(self, name: str, at: int, into: memoryview) -> None:
        """Fill `into` with the bytes of a file from offset `at`. Raises CheckpointError."""
        path = self.folder / name
        try:
            if name not in self._handles:
                self._handles[name] = open_data(path, self.document.files[name])
            while len(into):
                count = os.preadv(self._handles[name], [into], at)
                if count == 0:
                    raise CheckpointError(f"{path} is truncated at byte {at}")
                into, at = into[count:], at + count
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error

    def close(self) -> None:
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()


class _Sorted(NamedTuple):
    """Pieces sorted by first row, so that a rank examines only the pieces near its own rows."""

    pieces: list[Piece]
    starts: list[int]  # first row of each piece
    ends: list[int]  # the end row of this piece and all before it

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> _Sorted:
        ordered = sorted(pieces, key=lambda piece: piece.box.offsets[:1])
        rows = [_rows(piece.box) for piece in ordered]
        return cls(ordered, [start for start, _ in rows], list(accumulate((end for _, end in rows), max)))

    def near(self, box: Box) -> list[Piece]:
        start, end = _rows(box)
        return self.pieces[bisect_right(self.ends, start) : bisect_left(self.starts, end)]


def _rows(box: Box) -> tuple[int, int]:
    return (box.offsets[0], box.offsets[0] + box.sizes[0]) if box.sizes else (0, 1)


class _StoredTensor:
    """One tensor of a checkpoint as the data of a `FlatSlice` (the `Ranged` protocol), read-only."""

    def __init__(self, reader: BoxReader, name: str) -> None:
        self._reader, self._name = reader, name
        entry = reader.document.tensors[name]
        self.dtype, self._numel = entry.dtype, whole_box(entry.shape).numel

    def numel(self) -> int:
        return self._numel

    def get(self, start: int, stop: int) -> Tensor:
        return self._reader.read(self._name, start, stop)

    def put(self, start: int, values: Tensor) -> None:
        raise AssertionError(f"{self._name}: the checkpoint is read-only")


def open_data(path: Path, size: int) -> int:
    """Open a data file. Raises CheckpointError unless it is a regular file of `size` bytes."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # O_NONBLOCK: opening a pipe would wait
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    status = os.fstat(handle)
    if stat.S_ISREG(status.st_mode) and status.st_size == size:
        return handle
    os.close(handle)
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is not a regular file")
    state = "truncated" if status.st_size < size else "not the file that was saved"
    raise CheckpointError(f"{path} is {state}: it has {status.st_size} bytes, {size} were saved")

"""Reads flat ranges of a checkpoint's tensors on demand, without an engine, and verifies each checksum."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from slipstream.checkpoint.document import Document, Entry
from slipstream.checkpoint.errors import CheckpointError
from slipstream.checkpoint.files import Files
from slipstream.checkpoint.flat_slice import FlatSlice, flat_range, memory
from slipstream.ops.checksum import crc32


class Folder:
    """The data files of one checkpoint, in our format or DeepSpeed's."""

    def __init__(self, path: Path, document: Document) -> None:
        self.path, self.document = path, document
        self._files = Files(path, document.files)

    def slice(self, name: str) -> FlatSlice:
        """A whole tensor, left in the files."""
        return FlatSlice(_StoredTensor(self, name), self.document.tensors[name].shape, 0)

    def tensor(self, name: str) -> Tensor:
        """A whole tensor, in memory."""
        entry = self.document.tensors[name]
        return self.read(name, 0, math.prod(entry.shape)).view(entry.shape)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) in row-major order, 1D."""
        entry = self.document.tensors[name]
        values = torch.empty(stop - start, dtype=entry.dtype)
        size, raw = entry.dtype.itemsize, values.view(torch.uint8)
        for i, (first, last) in enumerate(_spans(name, entry)):
            low, high = max(first, start), min(last, stop)
            if low < high:
                part = self._bytes(name, i, (low - first) * size, (high - first) * size)
                raw[(low - start) * size : (high - start) * size] = part
        return values

    def _bytes(self, name: str, index: int, start: int, stop: int) -> Tensor:
        """Bytes [start, stop) of a piece; if it has checksums, the whole blocks around them are read and verified."""
        entry, block = self.document.tensors[name], self.document.block
        piece = entry.pieces[index]
        first, last = start, stop
        if piece.crc32:
            first, last = start // block * block, min(-(-stop // block) * block, entry.nbytes(piece))
        if piece.zip_record is not None:
            self._files.verify(piece.zip_record)
        values = torch.empty(last - first, dtype=torch.uint8)
        self._files.read(piece.file, piece.at + first, memory(values))
        for at in range(0, len(values) if piece.crc32 else 0, block):
            if crc32(values[at : at + block]) != piece.crc32[(first + at) // block]:
                raise CheckpointError(f"{self.path / piece.file} is damaged: the checksum of tensor {name!r} does not match")
        return values[start - first : stop - first]

    def close(self) -> None:
        self._files.close()


class _StoredTensor:
    """One tensor of a folder as the data of a `FlatSlice` (the `Rested` protocol), read-only."""

    def __init__(self, folder: Folder, name: str) -> None:
        self._folder, self._name = folder, name
        entry = folder.document.tensors[name]
        self.dtype, self._numel = entry.dtype, math.prod(entry.shape)

    def numel(self) -> int:
        return self._numel

    def get(self, start: int, stop: int) -> Tensor:
        return self._folder.read(self._name, start, stop)

    def put(self, start: int, values: Tensor) -> None:
        raise AssertionError(f"{self._name}: the checkpoint is read-only")


def _spans(name: str, entry: Entry) -> list[tuple[int, int]]:
    spans = [flat_range(entry.shape, piece.box) for piece in entry.pieces]
    if any(span is None for span in spans):
        raise CheckpointError(f"{name!r} is stored in blocks of rows and columns (tensor parallelism), which are not converted")
    return [span for span in spans if span is not None]

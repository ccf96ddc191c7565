"""Writes this rank's shares of a checkpoint to one file, directly or in two steps: a copy to host memory, then the file.

Each piece is row-major and starts on a cache line; its checksums are computed while its bytes are copied.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.checkpoint.background import Staging
from slipstream.checkpoint.data_file import DataFile
from slipstream.checkpoint.document import BLOCK, Entry, Piece, file_name
from slipstream.checkpoint.plan import STAGE, Share, flattened
from slipstream.ops.checksum import crc32_blocks

_ALIGN = 64  # bytes: each piece starts on a cache line


class Writer:
    """Writes this rank's shares to one file. On rank 0, `collect` fills `entries` and `files` with those of all ranks.

    With `staging`, the shares are only copied there, in the file's layout, and `flush` writes them later. Until then, entries have
    no checksums.
    """

    def __init__(self, folder: Path, rank: int, staging: Staging | None = None) -> None:
        self.folder, self.rank, self.file = folder, rank, file_name(rank)
        self.entries: dict[str, Entry] = {}
        self.files: dict[str, int] = {}
        self._staging, self._staged = staging, torch.empty(0, dtype=torch.uint8)
        self._places: list[_Destination] = []
        self._sums: dict[int, list[int]] = {}  # of staged pieces, by offset in the file

    def write(self, shares: Sequence[Share]) -> dict[str, Entry]:
        """Write or stage the shares; returns their entries, with only this rank's pieces."""
        end = 0
        for share in shares:
            self._places.append(_Destination(end + -end % _ALIGN, share.box.numel * share.values.dtype.itemsize))
            end = self._places[-1].end
        sums = self._write(shares) if self._staging is None else self._stage(shares, self._staging)
        entries: dict[str, Entry] = {}
        for share, place, crcs in zip(shares, self._places, sums, strict=True):
            piece = Piece(box=share.box, file=self.file, at=place.at, crc32=tuple(crcs))
            entry = entries.get(share.name) or Entry(dtype=share.values.dtype, shape=share.shape, pieces=())
            entries[share.name] = replace(entry, pieces=(*entry.pieces, piece))
        return entries

    def collect(self, entries_by_rank: Iterable[Mapping[str, Entry]]) -> None:
        """Join the entries that `write` returned on each rank."""
        pieces: dict[str, list[Piece]] = defaultdict(list)
        for entries in entries_by_rank:
            for name, entry in entries.items():
                self.entries.setdefault(name, entry)
                pieces[name] += entry.pieces
                for piece in entry.pieces:
                    self.files[piece.file] = max(self.files.get(piece.file, 0), piece.at + entry.nbytes(piece))
        self.entries = {name: replace(entry, pieces=tuple(pieces[name])) for name, entry in self.entries.items()}

    def _write(self, shares: Sequence[Share]) -> list[list[int]]:
        if not shares:
            return []
        sums = []
        with DataFile(self.folder / self.file, self._places[-1].end) as file:
            for share, place in zip(shares, self._places, strict=True):
                file.append_until(place.at)
                sums.append([crc for stage in _bytes(share) for crc in file.append(stage)])
        return sums

    def _stage(self, shares: Sequence[Share], staging: Staging) -> list[list[int]]:
        """Copy to host memory, with host tensors' checksums, by as many threads as torch has, because training waits."""
        self._staged, filled = staging.take(self._places[-1].end if shares else 0), 0
        chunks: list[tuple[_Destination, Tensor, int]] = []
        for share, place in zip(shares, self._places, strict=True):
            self._staged[filled : place.at].zero_()
            filled = place.end
            if not isinstance(share.values, Tensor):  # read or decoded one stage at a time
                at = place.at
                for stage in _bytes(share):
                    self._sums.setdefault(place.at, []).extend(crc32_blocks(stage, BLOCK, self._staged[at : at + stage.numel()]))
                    at += stage.numel()
                continue
            source = flattened(share.values).view(torch.uint8)
            if source.is_cpu:
                chunks += [(place, source, start) for start in range(0, place.nbytes, STAGE)]
            else:
                self._staged[place.at : place.end].copy_(source, non_blocking=True)
        self._staged[filled:].zero_()
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            for (place, _, _), sums in zip(chunks, pool.map(self._copy, chunks), strict=True):
                self._sums.setdefault(place.at, []).extend(sums)
        if any(isinstance(share.values, Tensor) and share.values.is_cuda for share in shares):
            torch.cuda.synchronize()
        return [[] for _ in shares]

    def _copy(self, chunk: tuple[_Destination, Tensor, int]) -> list[int]:
        place, source, start = chunk
        part = source[start : start + STAGE]
        return crc32_blocks(part, BLOCK, self._staged[place.at + start : place.at + start + part.numel()])

    def flush(self) -> dict[int, list[int]]:
        """Write the staged pieces; returns their checksums, by offset in the file. Not collective; runs on any thread."""
        if self._places:
            with DataFile(self.folder / self.file, self._places[-1].end) as file:
                file.begin(self._staged)
                for place in self._places:
                    if place.nbytes and place.at not in self._sums:  # copied from a device
                        self._sums[place.at] = crc32_blocks(self._staged[place.at : place.end], BLOCK)
        self._staged = torch.empty(0, dtype=torch.uint8)
        return self._sums


class _Destination(NamedTuple):
    """The bytes of a piece in its file."""

    at: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.at + self.nbytes


def _bytes(share: Share) -> Iterator[Tensor]:
    return (stage.view(torch.uint8) for stage in share.stages(share.values.dtype))

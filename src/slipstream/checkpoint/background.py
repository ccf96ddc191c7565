"""Saves that go on while training does: copied at the call, written behind it.

    the call:   agree, draft, plan, as every save; then each rank copies its pieces to host memory (`Staging`)
    behind it:  each rank writes its file from that copy and, last, its checksums beside it (`rank_00001.crc`);
                rank 0 waits for all of those, then commits. No collective: the ranks' groups belong to training

One save is in flight at a time: `Saving.result` waits for it, and raises what went wrong. A rank that fails takes its file away,
which makes room for saying why (`rank_00001.failed`), and rank 0 discards the draft; where a rank dies, nothing grows any more, and
after `patience_s` rank 0 gives up. A process that ends in order finishes its save first; one that is killed leaves a draft, which
is no checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .document import Entry, Piece
from .errors import CheckpointError, describe

if TYPE_CHECKING:
    from .storage import Writer

PATIENCE_S = 60.0


class Staging:
    """Host memory for one copy of what a rank saves: kept between saves, since fresh pages cost as much as the copy."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes: int) -> Tensor:
        """1D, bytes; whatever was in it."""
        if self._memory.numel() < nbytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # give it back first
            self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned)
        return self._memory[:nbytes]


class Saving:
    """One save behind training, on one rank."""

    def __init__(
        self, path: Path, writer: Writer, commit: Callable[[Writer], None] | None, discard: Callable[[], None], patience_s: float
    ) -> None:
        self.path, self._writer, self._commit, self._discard = path, writer, commit, discard
        self._patience_s = patience_s
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"save {path.name}")
        self._thread.start()

    def result(self) -> None:
        """Wait for it. Raises CheckpointError saying why where it failed, on rank 0 for whichever rank did."""
        self._thread.join()
        if self._failure is not None:
            raise CheckpointError(describe(self._failure)) from self._failure

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:  # told by `result`
            self._failure = error
        finally:
            self._discard()

    def _write(self) -> None:
        folder, rank = self._writer.folder, self._writer.rank
        try:
            sums = self._writer.flush()
        except BaseException as error:
            if self._commit is None:
                (folder / self._writer.file).unlink(missing_ok=True)
                _put(folder / f"{self._writer.file}.failed", f"rank {rank}: {describe(error)}")
            raise
        if self._commit is None:
            if sums:
                _put(folder / f"{self._writer.file}.crc", json.dumps(sums))
            return
        everyone = {self._writer.file: sums} if sums else {}
        for file in self._writer.files:
            if file not in everyone:
                everyone[file] = self._await(folder, file)
        self._writer.entries = {name: _summed(entry, everyone) for name, entry in self._writer.entries.items()}
        self._commit(self._writer)

    def _await(self, folder: Path, file: str) -> dict[int, list[int]]:
        """Another rank's checksums, once they are there."""
        grown, since = -1, time.monotonic()
        while not (folder / f"{file}.crc").exists():
            if (folder / f"{file}.failed").exists():
                raise CheckpointError((folder / f"{file}.failed").read_text("utf-8"))
            size = (folder / file).stat().st_size if (folder / file).exists() else 0
            if size != grown:
                grown, since = size, time.monotonic()
            if time.monotonic() - since > self._patience_s:
                raise CheckpointError(
                    f"{file} has not grown for {self._patience_s:g} s at {size} bytes: its rank has died, or its disk hangs"
                )
            time.sleep(0.005)
        found = {int(at): sums for at, sums in json.loads((folder / f"{file}.crc").read_text("utf-8")).items()}
        (folder / f"{file}.crc").unlink()
        return found


def _summed(entry: Entry, everyone: dict[str, dict[int, list[int]]]) -> Entry:
    def sums(piece: Piece) -> tuple[int, ...]:  # a piece of no bytes begins where the next one does
        return tuple(everyone[piece.file][piece.at]) if math.prod(piece.box.sizes) else ()

    return replace(entry, pieces=tuple(replace(piece, crc32=sums(piece)) for piece in entry.pieces))


def _put(path: Path, text: str) -> None:
    """Whole or not at all, for whoever looks."""
    half = path.with_name(f"{path.name}.half")
    half.write_text(text, "utf-8")
    os.replace(half, path)

"""Saves that go on while training does: copied at the call, written behind it.

    the call:   agree, draft, plan, as every save; then each rank copies its pieces to host memory (`Staging`)
    behind it:  each rank writes its file from that copy and, last, its checksums beside it (`rank_00001.crc`);
                rank 0 waits for all of those, then commits. No collective: the ranks' groups belong to training

One save is in flight at a time: `Saving.result` waits for it, and raises what went wrong. A rank that fails takes its file away,
which makes room for saying why (`rank_00001.failed`), and rank 0 discards the draft; where a rank dies, its file is stamped no more
(data_file.py), and after `patience_s` rank 0 gives up. A failure is logged when it happens, and raised at the next call. A process
that ends in order finishes its save first; one that is killed leaves a draft, which is no checkpoint.
"""

from __future__ import annotations

import ctypes
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream.checkpoint.document import Entry, Piece
from slipstream.checkpoint.errors import CheckpointError, describe
from slipstream.ops.disk import ALIGNMENT, aligned

if TYPE_CHECKING:
    from slipstream.checkpoint.storage import Writer

PATIENCE_S = 60.0
_LOOK_S = 0.02  # between two looks for another rank's checksums: each takes Python's lock from training
_NICE, _LAST = 10, 19
_PAGE = 2 << 20  # a huge page: what is brought in between two looks whether it is enough
_ROOM = 1 << 20

logger = logging.getLogger(__name__)


class Staging:
    """Host memory for one copy of what a rank saves: kept between saves, since fresh pages cost more than the copy.

    Whole pages, as they are written past the page cache.
    """

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._asked = False
        self._filling: threading.Thread | None = None
        self._enough = threading.Event()

    def prepare(self, nbytes: int) -> None:
        """Begin to bring in pages for about `nbytes`, behind training. Pinned memory has no such half way: `take` allocates it."""
        self._asked = True
        if not self._pinned and nbytes and not self._memory.numel():
            room = nbytes + nbytes // 64 + _ROOM  # for values, and gaps between pieces; what is not touched costs nothing
            self._memory = aligned(-(-room // ALIGNMENT) * ALIGNMENT)
            self._filling = threading.Thread(target=self._fill, args=(self._memory[:nbytes],), name="staging")
            self._filling.start()

    @property
    def prepared(self) -> bool:
        """Whether memory is there, or coming."""
        return self._asked or self._memory.numel() > 0

    def _fill(self, memory: Tensor) -> None:
        _step_back(_LAST)
        for start in range(0, memory.numel(), _PAGE):
            if self._enough.is_set() or not threading.main_thread().is_alive():
                break
            part = memory[start : start + _PAGE]
            ctypes.memset(part.data_ptr(), 0, part.numel())  # not zero_(), which would start torch's threads for this one

    def close(self) -> None:
        """Give the memory back."""
        self._settle()
        self._memory, self._asked = torch.empty(0, dtype=torch.uint8), False

    def _settle(self) -> None:
        if self._filling is not None:
            self._enough.set()
            self._filling.join()
            self._filling = None
            self._enough.clear()

    def take(self, nbytes: int) -> Tensor:
        """1D, bytes, rounded up to pages; whatever was in them."""
        self._settle()
        nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if self._memory.numel() < nbytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # give it back first
            self._memory = _pinned(nbytes) if self._pinned else aligned(nbytes)
        return self._memory[:nbytes]


def _pinned(nbytes: int) -> Tensor:
    memory = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, pin_memory=True)
    start = -memory.data_ptr() % ALIGNMENT
    return memory[start : start + nbytes]


class Saving:
    """One save behind training, on one rank. `commit` and `tidy`, which follows it, are rank 0's."""

    def __init__(
        self,
        path: Path,
        writer: Writer,
        commit: Callable[[Writer], None] | None,
        tidy: Callable[[], None],
        discard: Callable[[], None],
        patience_s: float,
    ) -> None:
        self.path, self._writer, self._commit, self._tidy, self._discard = path, writer, commit, tidy, discard
        self._patience_s = patience_s
        self._failure: BaseException | None = None
        self._untidy: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"save {path.name}")
        self._thread.start()

    def result(self) -> None:
        """Wait for it. Raises CheckpointError saying why where it failed, on rank 0 for whichever rank did."""
        self._thread.join()
        if self._failure is not None:
            raise CheckpointError(describe(self._failure)) from self._failure

    def tidied(self) -> None:
        """After `result`: raises where the checkpoint is saved and older ones could not be removed."""
        if self._untidy is not None:
            raise CheckpointError(describe(self._untidy)) from self._untidy

    def _run(self) -> None:
        _step_back(_NICE)
        try:
            self._write()
        except BaseException as error:  # raised by `result`
            self._failure = error
            logger.error("checkpoint %s, written behind training, was not saved: %s", self.path, describe(error))
        finally:
            self._discard()
        if self._failure is None and self._commit is not None:
            try:
                self._tidy()
            except BaseException as error:  # raised by `tidied`
                self._untidy = error
                logger.error("checkpoint %s is saved, but older ones could not be removed: %s", self.path, describe(error))

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
        seen, since = 0, time.monotonic()
        while not (folder / f"{file}.crc").exists():
            if (folder / f"{file}.failed").exists():
                raise CheckpointError((folder / f"{file}.failed").read_text("utf-8"))
            stamp = _stamp(folder / file)
            if stamp != seen:
                seen, since = stamp, time.monotonic()
            if time.monotonic() - since > self._patience_s:
                raise CheckpointError(
                    f"nothing of {file} has been written for {self._patience_s:g} s: its rank has died, or its disk hangs"
                )
            time.sleep(_LOOK_S)
        found = {int(at): sums for at, sums in json.loads((folder / f"{file}.crc").read_text("utf-8")).items()}
        (folder / f"{file}.crc").unlink()
        return found


def _step_back(niceness: int) -> None:
    """Of this thread, and of those that it starts: training comes first."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


def _stamp(path: Path) -> int:
    """When the file was last written, in ns; 0 before it is there. It is opened: a network file system then asks its server."""
    try:
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return 0


def _summed(entry: Entry, everyone: dict[str, dict[int, list[int]]]) -> Entry:
    def sums(piece: Piece) -> tuple[int, ...]:  # a piece of no bytes begins where the next one does
        return tuple(everyone[piece.file][piece.at]) if math.prod(piece.box.sizes) else ()

    return replace(entry, pieces=tuple(replace(piece, crc32=sums(piece)) for piece in entry.pieces))


def _put(path: Path, text: str) -> None:
    """Whole or not at all, for whoever looks."""
    half = path.with_name(f"{path.name}.half")
    half.write_text(text, "utf-8")
    os.replace(half, path)

"""Asynchronous checkpoints: the call copies the state to host memory, a thread writes it to disk.

    in the call:    agree, draft, plan, as in a synchronous save; then each rank copies its pieces to host memory (`Staging`)
    in the thread:  each rank writes its file from that copy, then its checksums (`rank_00001.bin.crc`); rank 0 waits for
                    those of all ranks, then commits. No collectives: the process groups are in use by training

One save is in flight at a time; `AsyncSave.result` waits for it and raises its error. A rank that fails deletes its file, which
frees space for the text of the reason (`rank_00001.bin.failed`), and rank 0 discards the draft. If a rank dies, its file's
modification time stops changing (writer.py) and rank 0 gives up after `patience_s`. A failure is logged when it happens and
raised by the next call. A process that exits normally finishes its save first; a killed one leaves a draft, which no load accepts.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import threading
import time
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
    from slipstream.checkpoint.save import PendingSave

PATIENCE_S = 60.0
_POLL_S = 0.02  # between two checks for another rank's checksums; each check takes the GIL from training
_NICE, _NICEST = 10, 19
_PAGE = 2 << 20  # a huge page: bytes faulted in between two checks whether to stop
_SLACK = 1 << 20

logger = logging.getLogger(__name__)


class Staging:
    """Host memory for one copy of a rank's state, in whole pages for O_DIRECT.

    It is kept between saves, because faulting in new pages costs more than the copy.
    """

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._asked = False
        self._filling: threading.Thread | None = None
        self._enough = threading.Event()

    def prepare(self, nbytes: int) -> None:
        """Start faulting in pages for about `nbytes`, in a thread. Pinned memory cannot be faulted in so: `take` allocates it."""
        self._asked = True
        if not self._pinned and nbytes and not self._memory.numel():
            capacity = nbytes + nbytes // 64 + _SLACK  # for values and gaps between pieces; untouched pages cost nothing
            self._memory = aligned(-(-capacity // ALIGNMENT) * ALIGNMENT)
            self._filling = threading.Thread(target=self._fill, args=(self._memory[:nbytes],), name="staging")
            self._filling.start()

    @property
    def prepared(self) -> bool:
        """Whether memory is allocated or `prepare` has been called."""
        return self._asked or self._memory.numel() > 0

    def _fill(self, memory: Tensor) -> None:
        _lower_priority(_NICEST)
        for start in range(0, memory.numel(), _PAGE):
            if self._enough.is_set() or not threading.main_thread().is_alive():
                break
            part = memory[start : start + _PAGE]
            ctypes.memset(part.data_ptr(), 0, part.numel())  # not zero_(), which would start torch's threads from this thread

    def close(self) -> None:
        self._stop_filling()
        self._memory, self._asked = torch.empty(0, dtype=torch.uint8), False

    def _stop_filling(self) -> None:
        if self._filling is not None:
            self._enough.set()
            self._filling.join()
            self._filling = None
            self._enough.clear()

    def take(self, nbytes: int) -> Tensor:
        """Return `nbytes` of uninitialized memory, rounded up to whole pages (1D, uint8)."""
        self._stop_filling()
        nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if self._memory.numel() < nbytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # frees the old memory before allocating
            self._memory = _pinned(nbytes) if self._pinned else aligned(nbytes)
        return self._memory[:nbytes]


def _pinned(nbytes: int) -> Tensor:
    memory = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, pin_memory=True)
    start = -memory.data_ptr() % ALIGNMENT
    return memory[start : start + nbytes]


class AsyncSave:
    def __init__(self, pending: PendingSave, patience_s: float) -> None:
        self.path, self._pending, self._writer = pending.path, pending, pending.writer
        self._is_first = pending.ranks.index == 0
        self._patience_s = patience_s
        self._failure: BaseException | None = None
        self._untidy: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"save {self.path.name}")
        self._thread.start()

    def result(self) -> None:
        """Wait for the save. Raises CheckpointError if it failed, on rank 0 also for any other rank's failure."""
        self._thread.join()
        if self._failure is not None:
            raise CheckpointError(describe(self._failure)) from self._failure

    def tidied(self) -> None:
        """Raise CheckpointError if the checkpoint is saved but older ones could not be removed. Call it after `result`."""
        if self._untidy is not None:
            raise CheckpointError(describe(self._untidy)) from self._untidy

    def _run(self) -> None:
        _lower_priority(_NICE)
        try:
            self._write()
        except BaseException as error:  # raised by `result`
            self._failure = error
            logger.error("asynchronous checkpoint %s was not saved: %s", self.path, describe(error))
        finally:
            self._pending.discard()
        if self._failure is None and self._is_first:
            try:
                self._pending.tidy()
            except BaseException as error:  # raised by `tidied`
                self._untidy = error
                logger.error("checkpoint %s is saved, but older ones could not be removed: %s", self.path, describe(error))

    def _write(self) -> None:
        folder, rank = self._writer.folder, self._writer.rank
        try:
            sums = self._writer.flush()
        except BaseException as error:
            if not self._is_first:
                with suppress(OSError):  # rank 0 may have given up, and removed the folder
                    (folder / self._writer.file).unlink(missing_ok=True)
                    _put(folder / f"{self._writer.file}.failed", f"rank {rank}: {describe(error)}")
            raise
        if not self._is_first:
            if sums:
                _put(folder / f"{self._writer.file}.crc", json.dumps(sums))
            return
        sums_by_file, document = {self._writer.file: sums} if sums else {}, self._pending.document
        for file in document.files:
            if file not in sums_by_file:
                sums_by_file[file] = self._await(folder, file)
        tensors = {name: _with_sums(entry, sums_by_file) for name, entry in document.tensors.items()}
        self._pending.commit(replace(document, tensors=tensors))

    def _await(self, folder: Path, file: str) -> dict[int, list[int]]:
        """Wait for another rank's checksums and return them."""
        last_stamp, since = 0, time.monotonic()
        while not (folder / f"{file}.crc").exists():
            if (folder / f"{file}.failed").exists():
                raise CheckpointError((folder / f"{file}.failed").read_text("utf-8"))
            stamp = _modified_ns(folder / file)
            if stamp != last_stamp:
                last_stamp, since = stamp, time.monotonic()
            if time.monotonic() - since > self._patience_s:
                raise CheckpointError(
                    f"nothing of {file} has been written for {self._patience_s:g} s: its rank has died, or its disk hangs"
                )
            time.sleep(_POLL_S)
        sums = {int(at): crcs for at, crcs in json.loads((folder / f"{file}.crc").read_text("utf-8")).items()}
        (folder / f"{file}.crc").unlink()
        return sums


def _lower_priority(niceness: int) -> None:
    """Lower the priority of this thread and of the threads that it starts, so that training runs first."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


def _modified_ns(path: Path) -> int:
    """The file's modification time in ns; 0 if it does not exist. Opening it makes a network file system ask its server."""
    try:
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return 0


def _with_sums(entry: Entry, sums_by_file: dict[str, dict[int, list[int]]]) -> Entry:
    def sums(piece: Piece) -> tuple[int, ...]:  # an empty piece has the offset of the next one
        return tuple(sums_by_file[piece.file][piece.at]) if piece.box.numel else ()

    return replace(entry, pieces=tuple(replace(piece, crc32=sums(piece)) for piece in entry.pieces))


def _put(path: Path, text: str) -> None:
    """Write a file atomically."""
    partial = path.with_name(f"{path.name}.half")
    partial.write_text(text, "utf-8")
    os.replace(partial, path)

"""Reads the data files of one checkpoint, and verifies the checksums of zip records, each of which covers a whole record.

Knows neither DCP nor tensor names: storage.py and ranges.py read through it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

import torch

from slipstream.checkpoint.document import BLOCK, ZipRecord
from slipstream.checkpoint.errors import CheckpointError
from slipstream.checkpoint.flat_slice import memory
from slipstream.ops.checksum import crc32

_STAGE = 16 * BLOCK  # bytes of a record in memory at a time


class Files:
    """Opens each file at its first read and keeps that descriptor until `close`, also if another file takes its name."""

    def __init__(self, folder: Path, sizes: Mapping[str, int]) -> None:
        self.folder, self._sizes = folder, sizes
        self._handles: dict[str, int] = {}
        self._verified: set[ZipRecord] = set()

    def read(self, name: str, at: int, into: memoryview) -> None:
        """Fill `into` with the bytes from offset `at`. Raises CheckpointError."""
        path = self.folder / name
        try:
            if name not in self._handles:
                self._handles[name] = open_data(path, self._sizes[name])
            while len(into):
                got = os.preadv(self._handles[name], [into], at)
                if got == 0:
                    raise CheckpointError(f"{path} is truncated at byte {at}")
                into, at = into[got:], at + got
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error

    def verify(self, record: ZipRecord) -> None:
        """Compare a record's CRC-32 with the archive's, once; reads all of it. Raises CheckpointError with file and record."""
        if record in self._verified:
            return
        buffer, value = torch.empty(min(_STAGE, record.nbytes), dtype=torch.uint8), 0
        for start in range(0, record.nbytes, _STAGE):
            part = buffer[: min(_STAGE, record.nbytes - start)]
            self.read(record.file, record.at + start, memory(part))
            value = crc32(part, value)
        if value != record.crc32:
            raise CheckpointError(
                f"{self.folder / record.file} is damaged: its zip record {record.name!r} has the checksum {value:08x}, and "
                f"{record.crc32:08x} was saved; copy the file again from where it was written, or load an older checkpoint"
            )
        self._verified.add(record)

    def close(self) -> None:
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()


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

"""One data file while it is written: past the page cache, several blocks at a time, by the engines of ops/disk.py.

Through the page cache the same bytes take three times as long (1.6 GB: 2.7 s written and synced, 0.7 s in blocks of 4 MiB direct to
a file that is allocated first), and push what training needs out of it. Where the file system refuses O_DIRECT they go through it.

    append      bytes that may lie anywhere: copied to one of a few aligned stages, with their checksums, while others are written
    begin       all bytes at once, of memory that is laid out as the file is

A writer that moves stamps its file (`os.utime`), by which another process sees that it is at work.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from pathlib import Path

import torch
from torch import Tensor

from slipstream.checkpoint.document import BLOCK
from slipstream.checkpoint.errors import ONE_PLACE, CheckpointError
from slipstream.ops.checksum import crc32
from slipstream.ops.disk import ALIGNMENT, Disk, Transfer, aligned

_STAGE, _STAGES = 8 * BLOCK, 4
_STEP = 64 * BLOCK  # bytes of `begin` between two stamps
_ZEROS = torch.zeros(ALIGNMENT, dtype=torch.uint8)


class DataFile:
    """A context, in which all `nbytes` are given; on disk when it is left. Raises CheckpointError, for a full disk at the start."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self._path, self._nbytes, self._at = path, nbytes, 0
        try:
            self._file, self._direct = _create(path)
            self._disk = _allocated(path, self._file, _rounded(max(nbytes, 1)))
        except FileNotFoundError as error:
            raise CheckpointError(f"cannot write {path}: rank 0 made its folder elsewhere; {ONE_PLACE}") from error
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {error.strerror}") from error
        self._stages: list[Tensor] = []
        self._under_way: deque[Transfer] = deque()

    def append(self, data: Tensor) -> list[int]:
        """The next bytes (1D, uint8, on the host); the checksum of each BLOCK of them."""
        assert self._at + data.numel() <= self._nbytes, f"{self._path}: {self._nbytes} bytes were announced"
        sums = []
        for block in data.split(BLOCK) if data.numel() else ():
            value = taken = 0
            while taken < block.numel():
                room = self._room()
                part = block[taken : taken + room.numel()]
                value = crc32(part, value, room[: part.numel()])
                taken += part.numel()
                self._at += part.numel()
                if self._at % _STAGE == 0:
                    self._send(_STAGE)
            sums.append(value)
        return sums

    def append_until(self, at: int) -> None:
        """Zeros, up to the next piece."""
        self.append(_ZEROS[: at - self._at])

    def begin(self, memory: Tensor) -> None:
        """Begin to write the file whole; `memory` is as long, rounded up to whole pages, and stays as it is until the end."""
        for start in range(0, memory.numel(), _STEP):
            self._under_way.append(self._disk.write([(start, memory[start : start + _STEP])]))
        self._at = self._nbytes

    def _room(self) -> Tensor:
        """The rest of the stage that is being filled."""
        index, filled = self._at // _STAGE % _STAGES, self._at % _STAGE
        if index == len(self._stages):
            self._stages.append(aligned(min(_STAGE, _rounded(self._nbytes))))
        return self._stages[index][filled:]

    def _send(self, nbytes: int) -> None:
        """Begin to write the stage that ends here; of all stages, one is free afterwards."""
        start = (self._at - 1) // _STAGE * _STAGE
        self._under_way.append(self._disk.write([(start, self._stages[start // _STAGE % _STAGES][:nbytes])]))
        if len(self._under_way) == _STAGES:
            self._under_way.popleft().wait()

    def _finish(self) -> None:
        assert self._at == self._nbytes, f"{self._at} bytes of {self._path} were given, of {self._nbytes}"
        filled = self._at % _STAGE
        if self._stages and filled:
            room = self._room()
            room[: _rounded(filled) - filled].zero_()
            self._send(_rounded(filled))
        while self._under_way:
            self._under_way.popleft().wait()
            if not self._direct:
                os.fdatasync(self._file)  # a piece at a time: one at the end could take minutes without a stamp
            os.utime(self._file)
        os.ftruncate(self._file, self._nbytes)
        os.fsync(self._file)

    def __enter__(self) -> DataFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        except OSError as error:
            raise CheckpointError(f"cannot write {self._path}: {error.strerror}") from error
        finally:
            self._disk.close()


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _create(path: Path) -> tuple[int, bool]:
    """A descriptor, and whether it goes past the page cache."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o666), False


def _allocated(path: Path, file: int, nbytes: int) -> Disk:
    """The file with room for its bytes: writes that lengthen a file go one after another."""
    try:
        os.posix_fallocate(file, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            os.close(file)
            raise
        os.ftruncate(file, nbytes)
    return Disk(str(path), nbytes, block_nbytes=4 * BLOCK, file=file)

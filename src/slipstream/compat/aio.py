"""DeepNVMe's handle, `AsyncIOBuilder().load().aio_handle()`, and its page-locked tensors, on `slipstream.ops.disk`.

An operation moves a tensor to or from a range of a file, at any offset. Whole blocks of 4096 bytes of the file move by direct I/O,
without a copy if the tensor's memory begins at the same place in a block (`new_cpu_locked_tensor` at offset 0), otherwise through
memory of their own. The file's partial blocks at both ends move through the page cache, before the call returns.
"""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from slipstream.compat.utils import getter
from slipstream.ops.disk import ALIGNMENT, Disk, Transfer, aligned

_LARGEST_BLOCK = 1 << 30  # of a Disk


def _whole(nbytes: int) -> int:
    """Rounded up to whole blocks."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class _Operation(NamedTuple):
    moves: tuple[Disk, Transfer] | None  # None: there is no whole block
    host: Tensor  # 1D uint8
    target: Tensor | None  # gets what is read into memory of its own
    validates: tuple[str, int] | None  # the range's file and offset, to compare with

    def finish(self) -> None:
        if self.moves is not None:
            self.moves[1].wait()
            self.moves[0].close()
        if self.target is not None:
            dtype = self.target.dtype
            host = self.host.clone() if self.host.storage_offset() % dtype.itemsize else self.host
            self.target.copy_(host.view(dtype).view(self.target.shape))
        if self.validates is not None:
            path, offset = self.validates
            with open(path, "rb") as file:
                file.seek(offset)
                if file.read(self.host.numel()) != self.host.numpy().tobytes():
                    raise OSError(errno.EIO, f"{path} at offset {offset} does not have the tensor's {self.host.numel()} bytes")


class pin_handle:
    """Allocates host tensors for direct I/O; all handles of the process know them until they are freed."""

    _locked: ClassVar[dict[int, Tensor]] = {}  # by address; keeps them alive, as in DeepSpeed

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: Tensor) -> Tensor:
        """1D, of the example's dtype; pinned for CUDA if there is a device."""
        dtype = example_tensor.dtype
        if torch.cuda.is_available():
            tensor = torch.empty(num_elem, dtype=dtype, pin_memory=True)
        else:
            nbytes = num_elem * dtype.itemsize
            tensor = aligned(_whole(nbytes))[:nbytes].view(dtype)
        self._locked[tensor.data_ptr()] = tensor
        return tensor

    def free_cpu_locked_tensor(self, tensor: Tensor) -> bool:
        """Whether it was one that `new_cpu_locked_tensor` has returned."""
        return self._locked.pop(tensor.data_ptr(), None) is not None

    def is_pinned(self, buffer: Tensor) -> bool:
        start, stop = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
        known = ((address, address + locked.nbytes) for address, locked in self._locked.items())
        return buffer.is_pinned() or any(first <= start and stop <= last for first, last in known)


class aio_handle(pin_handle):
    """Reads and writes tensors of any device and dtype. Methods return the number of completed operations, or 0 if asynchronous.

    block_size, queue_depth: of requests in flight. intra_op_parallelism: threads, if the kernel does not allow io_uring.
    single_submit, overlap_events: no effect. Raises ValueError if a file is too short, OSError if it cannot be opened, and
    DiskError if a transfer fails.
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        self.block_size, self.queue_depth, self.intra_op_parallelism = block_size, queue_depth, intra_op_parallelism
        self.single_submit, self.overlap_events = single_submit, overlap_events
        self._pending: list[_Operation] = []

    get_block_size, get_queue_depth, get_intra_op_parallelism = map(getter, ("block_size", "queue_depth", "intra_op_parallelism"))
    get_single_submit, get_overlap_events = getter("single_submit"), getter("overlap_events")

    def get_alignment(self) -> int:
        """Ranges of a file on multiples of it move by direct I/O alone."""
        return ALIGNMENT

    def pread(self, buffer: Tensor, filename: str, validate: bool, asynchronous: bool, file_offset: int = 0) -> int:
        """Fill `buffer`. validate: compare it with the file afterwards."""
        self._pending.append(self._read(buffer, filename, validate, file_offset))
        return 0 if asynchronous else self.wait()

    def pwrite(self, buffer: Tensor, filename: str, validate: bool, asynchronous: bool, file_offset: int = 0) -> int:
        """Write `buffer`, which must not change before the end. The file is created if necessary, but not truncated."""
        self._pending.append(self._write(buffer, filename, validate, file_offset))
        return 0 if asynchronous else self.wait()

    def sync_pread(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        return self.pread(buffer, filename, False, False, file_offset)

    def sync_pwrite(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        return self.pwrite(buffer, filename, False, False, file_offset)

    def async_pread(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        return self.pread(buffer, filename, False, True, file_offset)

    def async_pwrite(self, buffer: Tensor, filename: str | int = "", file_offset: int = 0, fd: int | None = None) -> int:
        """fd, or a number as `filename`: the descriptor of an open file, which stays open."""
        given = filename if fd is None else fd
        return self.pwrite(buffer, f"/proc/self/fd/{given}" if isinstance(given, int) else given, False, True, file_offset)

    def read(self, buffer: Tensor, filename: str, validate: bool, file_offset: int = 0) -> int:
        """Like `pread`, apart from the pending operations. Returns 0."""
        self._read(buffer, filename, validate, file_offset).finish()
        return 0

    def write(self, buffer: Tensor, filename: str, validate: bool, file_offset: int = 0) -> int:
        """Like `pwrite`, apart from the pending operations. Returns 0."""
        self._write(buffer, filename, validate, file_offset).finish()
        return 0

    def wait(self) -> int:
        """Wait for all pending operations, and return their number."""
        pending, self._pending = self._pending, []
        with ExitStack() as stack:
            for operation in pending:
                if operation.moves is not None:
                    stack.callback(operation.moves[0].close)
            for operation in pending:
                operation.finish()
        return len(pending)

    def _read(self, buffer: Tensor, path: str, validate: bool, offset: int) -> _Operation:
        size = os.stat(path).st_size
        if offset + buffer.nbytes > size:
            raise ValueError(
                f"a tensor of {buffer.nbytes} bytes at offset {offset} is beyond the end of {path}, which has {size} bytes; pass a "
                "smaller tensor"
            )
        plain = buffer.is_cpu and buffer.is_contiguous() and buffer.data_ptr() % ALIGNMENT == offset % ALIGNMENT
        host = _bytes(buffer) if plain else _memory(buffer.nbytes, offset)
        moves = self._move(host, path, os.O_RDONLY, offset)
        return _Operation(moves, host, None if plain else buffer.detach(), (path, offset) if validate else None)

    def _write(self, buffer: Tensor, path: str, validate: bool, offset: int) -> _Operation:
        host = _bytes(buffer)
        if host.data_ptr() % ALIGNMENT != offset % ALIGNMENT:
            host = _memory(buffer.nbytes, offset).copy_(host)
        moves = self._move(host, path, os.O_WRONLY | os.O_CREAT, offset)
        return _Operation(moves, host, None, (path, offset) if validate else None)

    def _move(self, host: Tensor, path: str, flags: int, offset: int) -> tuple[Disk, Transfer] | None:
        """Move the partial blocks, and start to move the whole ones. The memory begins where `offset` does in a block."""
        nbytes, writes = host.numel(), bool(flags & os.O_WRONLY)
        head = min(-offset % ALIGNMENT, nbytes)
        stop = head + (nbytes - head) // ALIGNMENT * ALIGNMENT
        with os.fdopen(os.open(path, flags, 0o600), "wb" if writes else "rb") as file:
            for first, last in ((0, head), (stop, nbytes)):
                file.seek(offset + first)
                part: Any = host[first:last].numpy()
                file.write(part) if writes else file.readinto(part)  # type: ignore[attr-defined]
        if head == stop:
            return None
        block, threads = min(_whole(self.block_size), _LARGEST_BLOCK), self.intra_op_parallelism
        direct = _open_direct(path, flags)
        disk = Disk(path, offset + nbytes, block_nbytes=block, queue_depth=self.queue_depth, threads=threads, file=direct)
        return disk, (disk.write if writes else disk.read)([(offset + head, host[head:stop])])


def _bytes(tensor: Tensor) -> Tensor:
    """As 1D uint8 on the host; of the tensor's own memory, if it is contiguous there."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def _memory(nbytes: int, offset: int) -> Tensor:
    """1D uint8 [nbytes] that begins where `offset` does in a block."""
    phase = offset % ALIGNMENT
    return aligned(_whole(phase + nbytes))[phase : phase + nbytes]


def _open_direct(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags)  # the file system has no direct I/O


def aio_read(
    buffer: Tensor, filename: str, block_size: int, queue_depth: int, single_submit: bool, overlap_events: bool, validate: bool
) -> int:
    return aio_handle(block_size, queue_depth, single_submit, overlap_events).read(buffer, filename, validate)


def aio_write(
    buffer: Tensor, filename: str, block_size: int, queue_depth: int, single_submit: bool, overlap_events: bool, validate: bool
) -> int:
    return aio_handle(block_size, queue_depth, single_submit, overlap_events).write(buffer, filename, validate)

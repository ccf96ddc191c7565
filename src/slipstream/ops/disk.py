"""One file on a disk, read and written past the page cache, many blocks at a time.

A `Disk` makes its file in a folder, without a name: it is gone when the process is, however that ends. It is allocated in full at
the start, so that a full disk is found then. (Or it is given one, of a checkpoint, that whoever opened it has allocated.) `read`
and `write` take parts, (byte offset in the file, tensor), begin to move them and return a `Transfer`.
Batches run together and end in any order: two that touch the same bytes are for the caller to put one after the other. Each
direction has `queue_depth` blocks in flight, so that neither waits behind the other.

Two engines move blocks: `io_uring` (`csrc/disk.c`, a thread of its own in C, no GIL) and, where the kernel refuses that or no
compiler is, `threads` of preadv and pwritev. Both fill the same record, `_Batch`, whose first word a `Transfer` waits on.

The first pass of writes over a file is half as fast as later ones (ext4: 1.9 against 3.7 GB/s). It is not made beforehand: that
would cost the same pass, and FALLOC_FL_ZERO_RANGE changes nothing (1.9).

Invariants: a tensor under way is kept alive until the kernel is done with it, whoever drops the Transfer. Offsets, addresses and
sizes are multiples of 4096, as O_DIRECT wants them. A forked child has neither engine nor ring: it is told so.
"""

import ctypes
import errno
import logging
import mmap
import os
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from slipstream.ops import build, words

Parts = Sequence[tuple[int, Tensor]]

ALIGNMENT = 4096
_HUGE = 2 << 20
_PUNCH_HOLE = 3  # fallocate(2): FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_SHORT = -1  # _Batch.error of a transfer that the file's end cut short
_IN_MEMORY = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}  # statfs(2); Linux 6.6 accepts O_DIRECT there
_REMEDIES = {
    _SHORT: "the file was cut behind our back",
    errno.EIO: "the disk or its driver failed, see the kernel's log; name a folder on another disk",
    errno.ENOSPC: "the disk is full although the file was allocated (thin provisioning?); free space there",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
}

logger = logging.getLogger(__name__)


class DiskError(OSError):
    """A read or write failed in mid-transfer. What the tensors of a failed read hold is undefined."""


class _Part(ctypes.Structure):
    _fields_ = [("memory", ctypes.c_void_p), ("offset", ctypes.c_int64), ("nbytes", ctypes.c_int64)]


class _Batch(ctypes.Structure):
    """`struct disk_batch` of disk.c, which says what is what."""

    _fields_ = [
        *(("done", ctypes.c_uint32), ("error", ctypes.c_int32)),
        *((name, ctypes.c_int64) for name in ("offset", "asked", "moved")),
        *(("parts", ctypes.POINTER(_Part)), ("num_parts", ctypes.c_int64)),
        *((name, ctypes.c_int32) for name in ("write", "taken")),
        *((name, ctypes.c_int64) for name in ("part", "part_taken", "in_flight")),
        ("next", ctypes.c_void_p),
    ]


class Transfer:
    """A batch of reads or writes under way."""

    def __init__(self, folder: str, parts: Parts, write: bool) -> None:
        array = (_Part * len(parts))(*(_Part(tensor.data_ptr(), offset, tensor.nbytes) for offset, tensor in parts))
        self._batch = _Batch(parts=array, num_parts=len(parts), write=write)  # keeps the array alive
        self._tensors = [tensor for _, tensor in parts]
        self._folder = folder
        self._process = os.getpid()

    def done(self) -> bool:
        _check_process(self._process, self._folder)
        return words.load_acquire(ctypes.addressof(self._batch)) == 1

    def wait(self) -> None:
        """Until all is moved; raises DiskError. The GIL is released, and Ctrl-C raises within 50 ms and leaves it under way."""
        while not self.done():
            words.wait_at_least(ctypes.addressof(self._batch), 1, 0, 60_000)
        self._tensors.clear()
        batch = self._batch
        if batch.error:
            number, what = (errno.EIO, "end of file") if batch.error == _SHORT else (batch.error, os.strerror(batch.error))
            raise DiskError(
                number,
                f"{'write' if batch.write else 'read'} of {batch.asked} bytes at offset {batch.offset} of the file "
                f"in {self._folder} ended after {batch.moved} bytes: {what}; {_REMEDIES.get(batch.error, 'see pwrite(2)')}",
            )


class _Ring:
    """The engine in C."""

    name = "io_uring"

    def __init__(self, file: int, block_nbytes: int, queue_depth: int) -> None:
        library = build.load()
        if library.kernels is None:
            raise OSError(errno.ENOSYS, f"there are no native kernels ({library.reason})")
        native, error = library.kernels, ctypes.c_int()
        native.slipstream_disk_open.restype = ctypes.c_void_p
        native.slipstream_disk_open.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int, ctypes.POINTER(ctypes.c_int))
        handle = native.slipstream_disk_open(file, block_nbytes, queue_depth, error)
        if handle is None:
            raise OSError(error.value, f"the kernel refuses it: {os.strerror(error.value)}")
        self._native, self._handle = native, ctypes.c_void_p(handle)

    def submit(self, batch: _Batch) -> None:
        self._native.slipstream_disk_submit(self._handle, ctypes.byref(batch))

    def close(self) -> None:
        self._native.slipstream_disk_close(self._handle)


class _Threads:
    """The engine in Python. No executor: those take nothing more once the interpreter ends, and a save may be under way then."""

    name = "threads"

    def __init__(self, file: int, block_nbytes: int, threads: int) -> None:
        self._file, self._block_nbytes, self._lock = file, block_nbytes, threading.Lock()
        self._threads: list[threading.Thread] = []
        self._blocks: list[SimpleQueue[tuple[_Batch, int, int, int] | None]] = [SimpleQueue(), SimpleQueue()]  # of reads, of writes
        for name, blocks in zip(("read", "write"), self._blocks, strict=True):
            for _ in range(threads):
                thread = threading.Thread(target=self._run, args=(blocks,), name=f"slipstream-disk-{name}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _run(self, blocks: "SimpleQueue[tuple[_Batch, int, int, int] | None]") -> None:
        while (each := blocks.get()) is not None:
            self._move(*each)

    def submit(self, batch: _Batch) -> None:
        block = self._block_nbytes
        blocks = [
            (part.memory + at, part.offset + at, min(block, part.nbytes - at))
            for part in batch.parts[: batch.num_parts]
            for at in range(0, part.nbytes, block)
        ]
        batch.in_flight = len(blocks) + 1  # one more, for this function: the batch may be empty
        for each in blocks:
            self._blocks[batch.write].put((batch, *each))
        self._end(batch)

    def _move(self, batch: _Batch, memory: int, offset: int, nbytes: int) -> None:
        moved = error = 0
        try:
            while moved < nbytes and not batch.error and not error:
                view = [(ctypes.c_char * (nbytes - moved)).from_address(memory + moved)]
                count = (os.pwritev if batch.write else os.preadv)(self._file, view, offset + moved)
                moved, error = moved + count, 0 if count else _SHORT
        except OSError as failed:
            error = failed.errno or errno.EIO
        with self._lock:
            if error and not batch.error:
                batch.offset, batch.asked, batch.moved, batch.error = offset, nbytes, moved, error
        self._end(batch)

    def _end(self, batch: _Batch) -> None:
        with self._lock:
            batch.in_flight -= 1
            if batch.in_flight == 0:
                words.store_release_and_wake(ctypes.addressof(batch), 1)

    def close(self) -> None:
        for blocks in self._blocks:
            for _ in self._threads:
                blocks.put(None)  # more than enough
        for thread in self._threads:
            thread.join()


class Disk:
    """A file of `nbytes`, rounded up to 4096: an anonymous one in `folder`, or a given one. Any thread may call anything.

    file: the descriptor of a file to take instead, which is closed with the disk; `folder` then names it in messages.
    queue_depth: blocks in flight in each direction, of io_uring; `threads`: threads of each direction, of the other engine.
    ValueError where the folder will not do, says why.
    """

    def __init__(
        self,
        folder: str,
        nbytes: int,
        *,
        block_nbytes: int = 1 << 20,
        queue_depth: int = 8,
        threads: int = 2,
        engine: Literal["auto", "io_uring", "threads"] = "auto",
        file: int | None = None,
    ) -> None:
        if block_nbytes % ALIGNMENT or not ALIGNMENT <= block_nbytes <= 1 << 30:
            raise ValueError(f"block_nbytes ({block_nbytes}) must be a multiple of {ALIGNMENT} of at most 1 GiB")
        if not 1 <= queue_depth <= 4096 or threads < 1 or nbytes < 1:
            raise ValueError(f"queue_depth ({queue_depth}) must be 1 to 4096, threads ({threads}) and nbytes ({nbytes}) at least 1")
        self.folder, self.nbytes = folder, -(-nbytes // ALIGNMENT) * ALIGNMENT
        file = _create(folder, self.nbytes) if file is None else file
        try:
            self._engine = _start(file, block_nbytes, queue_depth, threads, engine)
        except BaseException:
            os.close(file)
            raise
        self.engine = self._engine.name
        self._file, self._lock, self._process = file, threading.Lock(), os.getpid()
        self._under_way: list[Transfer] = []
        self._closing = weakref.finalize(self, _close, self._engine, file, self._process, self._under_way)

    def read(self, parts: Parts) -> Transfer:
        """Begin to fill the tensors (CPU, contiguous) from their offsets in the file."""
        return self._begin(parts, write=False)

    def write(self, parts: Parts) -> Transfer:
        """Begin to write the tensors, which must not change before the transfer is done."""
        return self._begin(parts, write=True)

    def forget(self, offset: int, nbytes: int) -> None:
        """Give the blocks of a range back to the file system, where it can take them: the range reads as zeros."""
        with self._open():
            ctypes.CDLL(None).fallocate(self._file, _PUNCH_HOLE, ctypes.c_long(offset), ctypes.c_long(nbytes))

    def _begin(self, parts: Parts, write: bool) -> Transfer:
        for offset, tensor in parts:
            nbytes = tensor.nbytes
            if not tensor.is_cpu or not tensor.is_contiguous():
                raise ValueError(f"a tensor of shape {tuple(tensor.shape)} on {tensor.device} is not contiguous memory of the host")
            if offset % ALIGNMENT or tensor.data_ptr() % ALIGNMENT or nbytes % ALIGNMENT:
                raise ValueError(
                    f"offset {offset}, address {tensor.data_ptr():#x} and size {nbytes} must be multiples of {ALIGNMENT}: "
                    "take memory from slipstream.ops.disk.aligned and round sizes up"
                )
            if not 0 <= offset <= self.nbytes - nbytes:
                raise ValueError(f"{nbytes} bytes at offset {offset} are not in the file of {self.nbytes} bytes in {self.folder}")
        transfer = Transfer(self.folder, parts, write)
        with self._open():
            self._under_way[:] = [each for each in self._under_way if not each.done()]
            self._under_way.append(transfer)
            self._engine.submit(transfer._batch)
        return transfer

    def close(self) -> None:
        """Wait for what is under way, whose errors remain in their Transfers, and give the space back. Nothing in a fork."""
        if os.getpid() == self._process:
            with self._lock:
                self._closing()

    @contextmanager
    def _open(self) -> Iterator[None]:
        """The lock of an open disk. A fork may have copied it locked, so the process is looked at first."""
        _check_process(self._process, self.folder)
        with self._lock:
            if not self._closing.alive:
                raise ValueError(f"the disk in {self.folder} is closed")
            yield


def aligned(nbytes: int) -> Tensor:
    """uint8 [nbytes] of zeros at the start of a page, of huge pages as far as it fills them; `nbytes` is a multiple of 4096.

    A block in huge pages is one segment for the device, in small ones a segment per page: reads and writes are twice as fast.
    """
    if nbytes % ALIGNMENT:
        raise ValueError(f"nbytes ({nbytes}) must be a multiple of {ALIGNMENT}; round it up")
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    memory = mmap.mmap(-1, nbytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # what is not touched costs nothing
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _HUGE
    if nbytes >= _HUGE:
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE, start, nbytes // _HUGE * _HUGE)  # not what follows: it would be a huge page whole
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=start)


class DiskFacts(NamedTuple):
    engine: str
    free_nbytes: int  # without the file
    read_bytes_per_s: float  # both while reads and writes run together
    write_bytes_per_s: float


def preflight(
    folder: str,
    nbytes: int,
    *,
    block_nbytes: int = 1 << 20,
    queue_depth: int = 8,
    threads: int = 2,
    engine: Literal["auto", "io_uring", "threads"] = "auto",
    probe_nbytes: int = 64 << 20,
) -> DiskFacts:
    """Does a Disk of `nbytes` work in `folder`, and how fast? About 0.3 s. ValueError says what is wrong and what helps."""
    disk = Disk(folder, nbytes, block_nbytes=block_nbytes, queue_depth=queue_depth, threads=threads, engine=engine)
    try:
        free = _free(folder) + disk.nbytes
        probe = min(disk.nbytes, probe_nbytes // ALIGNMENT * ALIGNMENT)
        source, target = (aligned(min(probe, block_nbytes * queue_depth)) for _ in range(2))
        source.random_(generator=torch.Generator())  # a virtual disk may know zeros; the model's own draws are not disturbed
        fill = [(at, source[: probe - at]) for at in range(0, probe, source.numel())]
        disk.write(fill).wait()  # what was never written is read without the disk
        return DiskFacts(disk.engine, free, *rates(disk, 0.2, probe, target, source))
    finally:
        disk.close()


def rates(disk: Disk, seconds: float, span: int, target: Tensor | None, source: Tensor | None) -> tuple[float, float]:
    """Bytes per second of reading into `target` and of writing from `source`, both at once; 0 where None.

    Over the first `span` bytes, which is at least one of each, again and again; writing begins in the middle. Four transfers of
    each are under way all the time, so that the queues never run dry.
    """
    deadline = time.perf_counter() + seconds

    def run(move: Callable[[Parts], Transfer], memory: Tensor, first: int) -> float:
        under_way, moved, began = deque[Transfer](), 0, time.perf_counter()
        chunk, chunks = memory.numel(), span // memory.numel()
        while (more := time.perf_counter() < deadline) or under_way:
            if more:
                under_way.append(move([((first * chunks // 2 + moved // chunk) % chunks * chunk, memory)]))
                moved += chunk
            if not more or len(under_way) == 4:
                under_way.popleft().wait()
        return moved / (time.perf_counter() - began)

    with ThreadPoolExecutor(2) as pool:
        reading = None if target is None else pool.submit(run, disk.read, target, 0)
        writing = None if source is None else pool.submit(run, disk.write, source, 1)
        return reading.result() if reading else 0.0, writing.result() if writing else 0.0


def _create(folder: str, nbytes: int) -> int:
    """The descriptor of an anonymous file of allocated blocks. ValueError, with the remedy."""
    if not os.path.isdir(folder):
        raise ValueError(f"there is no folder {folder!r}; create it, on a disk of this machine")
    flags = os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC
    try:
        try:
            file = os.open(folder, flags | os.O_TMPFILE | os.O_EXCL, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
                raise
            path = os.path.join(folder, f".slipstream-{uuid.uuid4().hex}")  # a kill just here leaves an empty file behind
            file = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
            os.unlink(path)
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise ValueError(f"the file system of {folder} has no O_DIRECT; name a folder on a local disk (ext4, xfs)") from error
        raise ValueError(f"cannot create a file in {folder}: {error.strerror}; name a folder that this user can write") from error
    try:
        if kind := _IN_MEMORY.get(_file_system(file)):
            raise ValueError(f"{folder} is a {kind}, which is memory; name a folder on a disk, or offload to the host ('cpu')")
        free = _free(folder)
        if nbytes > free:
            raise ValueError(f"{folder} has {free} bytes free of the {nbytes} needed; free space there or name another folder")
        try:
            os.posix_fallocate(file, 0, nbytes)
        except OSError as error:
            raise ValueError(
                f"cannot allocate {nbytes} bytes in {folder}, where {free} bytes are free: {error.strerror}; "
                f"{_REMEDIES.get(error.errno or 0, 'free space there or name another folder')}"
            ) from error
    except BaseException:
        os.close(file)
        raise
    return file


def _free(folder: str) -> int:
    facts = os.statvfs(folder)
    return facts.f_bavail * facts.f_frsize


def _file_system(file: int) -> int:
    """statfs(2)'s f_type, its first field, which os.statvfs leaves out."""
    record = (ctypes.c_long * 64)()
    return record[0] & 0xFFFFFFFF if ctypes.CDLL(None).fstatfs(file, record) == 0 else 0


def _start(file: int, block_nbytes: int, queue_depth: int, threads: int, engine: str) -> _Ring | _Threads:
    if engine != "threads":
        try:
            return _Ring(file, block_nbytes, queue_depth)
        except OSError as error:
            if engine == "io_uring":
                raise ValueError(f"no io_uring here: {error.strerror}; take engine='auto' or 'threads'") from error
            logger.info("reading and writing by %d threads each, not by io_uring: %s", threads, error.strerror)
    return _Threads(file, block_nbytes, threads)


def _close(engine: _Ring | _Threads, file: int, process: int, under_way: list[Transfer]) -> None:
    if os.getpid() == process:
        engine.close()
        os.close(file)
    under_way.clear()


def _check_process(process: int, folder: str) -> None:
    if os.getpid() != process:
        raise RuntimeError(f"the disk in {folder} is of process {process}, and this is its fork {os.getpid()}: open another here")

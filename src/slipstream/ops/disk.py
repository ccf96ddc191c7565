"""Asynchronous direct I/O (O_DIRECT) on one file, with many blocks in flight.

A `Disk` creates an anonymous file in a folder, which disappears with the process in any case. The file is fully allocated at the
start, so a full disk fails there. (Or the caller passes an open, allocated file, as checkpoints do.) `read` and `write` take parts,
(byte offset in the file, tensor), start the transfer and return a `Transfer`. Batches run concurrently and complete in any order,
so the caller orders batches that touch the same bytes. Each direction has its own `queue_depth` blocks in flight, so reads and
writes do not wait for each other.

Two engines move blocks: `io_uring` (`csrc/disk.c`, its own thread in C, no GIL) and, if the kernel refuses it or there is no
compiler, `threads` that call preadv and pwritev. Both fill the same record, `_DiskBatch`, on whose first word a `Transfer` waits.

The first pass of writes over a file is half as fast as later ones (ext4: 1.9 against 3.7 GB/s). Writing in advance would cost the
same pass, and FALLOC_FL_ZERO_RANGE does not help (1.9).

Invariants: a tensor in flight is kept alive until the kernel is done with it, even if its Transfer is dropped. Offsets, addresses
and sizes are multiples of 4096, which O_DIRECT requires. A forked child has neither engine nor ring: every call there raises.
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
from contextlib import closing, contextmanager, suppress
from queue import SimpleQueue
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from slipstream.ops import build, words

Parts = Sequence[tuple[int, Tensor]]

ALIGNMENT = 4096
_HUGE = 2 << 20
_PUNCH_HOLE = 3  # fallocate(2): FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_SHORT = -1  # _Batch.error of a transfer that reached the end of the file
_IN_MEMORY = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}  # statfs(2); Linux 6.6 accepts O_DIRECT there
_REMEDIES = {
    _SHORT: "the file was truncated by another process",
    errno.EIO: "the disk or its driver failed, see the kernel's log; use a folder on another disk",
    errno.ENOSPC: "the disk is full although the file was allocated (thin provisioning?); free space there",
    errno.EFBIG: "raise the file size limit (ulimit -f)",
}

logger = logging.getLogger(__name__)


class DiskError(OSError):
    """A read or write failed. The tensors of a failed read have undefined contents."""


class _Part(ctypes.Structure):
    _fields_ = [("memory", ctypes.c_void_p), ("offset", ctypes.c_int64), ("nbytes", ctypes.c_int64)]


class _DiskBatch(ctypes.Structure):
    """`struct disk_batch` of disk.c, which documents the fields."""

    _fields_ = [
        *(("done", ctypes.c_uint32), ("error", ctypes.c_int32)),
        *((name, ctypes.c_int64) for name in ("offset", "asked", "moved")),
        *(("parts", ctypes.POINTER(_Part)), ("num_parts", ctypes.c_int64)),
        *((name, ctypes.c_int32) for name in ("write", "taken")),
        *((name, ctypes.c_int64) for name in ("part", "part_taken", "in_flight")),
        ("next", ctypes.c_void_p),
    ]


class Transfer:
    """A batch of reads or writes in flight."""

    def __init__(self, folder: str, parts: Parts, write: bool) -> None:
        array = (_Part * len(parts))(*(_Part(tensor.data_ptr(), offset, tensor.nbytes) for offset, tensor in parts))
        self._batch = _DiskBatch(parts=array, num_parts=len(parts), write=write)  # keeps the array alive
        self._tensors = [tensor for _, tensor in parts]
        self._folder = folder
        self._process = os.getpid()

    def done(self) -> bool:
        _check_process(self._process, self._folder)
        return words.load_acquire(ctypes.addressof(self._batch)) == 1

    def wait(self) -> None:
        """Wait until the batch is complete, without the GIL. Raises DiskError if it failed.

        Ctrl-C raises within 50 ms and leaves the batch in flight."""
        while not self.done():
            words.wait_at_least(ctypes.addressof(self._batch), 1, 0, 60_000)
        self._tensors.clear()
        batch = self._batch
        if batch.error:
            number, reason = (errno.EIO, "end of file") if batch.error == _SHORT else (batch.error, os.strerror(batch.error))
            raise DiskError(
                number,
                f"{'write' if batch.write else 'read'} of {batch.asked} bytes at offset {batch.offset} of the file "
                f"in {self._folder} ended after {batch.moved} bytes: {reason}; {_REMEDIES.get(batch.error, 'see pwrite(2)')}",
            )


class _Ring:
    """The engine in C."""

    name = "io_uring"

    def __init__(self, file: int, block_nbytes: int, queue_depth: int) -> None:
        library, error = build.load(), ctypes.c_int()
        if library.kernels is None:
            raise OSError(errno.ENOSYS, f"the native kernels are not available ({library.reason})")
        integer, native = ctypes.c_int, library.kernels
        start = build.function("slipstream_disk_open", ctypes.c_void_p, integer, ctypes.c_int64, integer, ctypes.c_void_p)
        handle = start(file, block_nbytes, queue_depth, ctypes.byref(error))
        if handle is None:
            raise OSError(error.value, f"the kernel refuses io_uring: {os.strerror(error.value)}")
        self._native, self._handle = native, ctypes.c_void_p(handle)

    def submit(self, batch: _DiskBatch) -> None:
        self._native.slipstream_disk_submit(self._handle, ctypes.byref(batch))

    def close(self) -> None:
        self._native.slipstream_disk_close(self._handle)


class _Threads:
    """The engine in Python. Not an executor: at interpreter exit those refuse work, and a save may be in flight then."""

    name = "threads"

    def __init__(self, file: int, block_nbytes: int, threads: int) -> None:
        self._file, self._block_nbytes, self._lock = file, block_nbytes, threading.Lock()
        self._threads: list[threading.Thread] = []
        self._blocks = [SimpleQueue[tuple[_DiskBatch, int, int, int] | None]() for _ in range(2)]  # for reads, for writes
        for name, blocks in zip(("read", "write"), self._blocks, strict=True):
            for _ in range(threads):
                thread = threading.Thread(target=self._run, args=(blocks,), name=f"slipstream-disk-{name}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _run(self, blocks: "SimpleQueue[tuple[_DiskBatch, int, int, int] | None]") -> None:
        while (block := blocks.get()) is not None:
            self._move(*block)

    def submit(self, batch: _DiskBatch) -> None:
        most = self._block_nbytes
        blocks = [
            (part.memory + at, part.offset + at, min(most, part.nbytes - at))
            for part in batch.parts[: batch.num_parts]
            for at in range(0, part.nbytes, most)
        ]
        batch.in_flight = len(blocks) + 1  # one more for this function, because the batch may be empty
        for block in blocks:
            self._blocks[batch.write].put((batch, *block))
        self._end(batch)

    def _move(self, batch: _DiskBatch, memory: int, offset: int, nbytes: int) -> None:
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

    def _end(self, batch: _DiskBatch) -> None:
        with self._lock:
            batch.in_flight -= 1
            if batch.in_flight == 0:
                words.store_release_and_wake(ctypes.addressof(batch), 1)

    def close(self) -> None:
        for blocks in self._blocks:
            for _ in self._threads:
                blocks.put(None)
        for thread in self._threads:
            thread.join()


class Disk:
    """A file of `nbytes`, rounded up to a multiple of 4096. All methods are thread-safe.

    folder: where the anonymous file is created. file: a descriptor to use instead, closed with the disk; `folder` then only names
    it in messages. queue_depth: blocks in flight per direction (io_uring). threads: per direction (the other engine).
    Raises ValueError with the reason if the folder cannot be used.
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
            raise ValueError(f"block_nbytes ({block_nbytes}) must be a multiple of {ALIGNMENT} and at most 1 GiB")
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
        """Start filling the tensors (CPU, contiguous) from their offsets in the file."""
        return self._begin(parts, write=False)

    def write(self, parts: Parts) -> Transfer:
        """Start writing the tensors, which must not change before the transfer is done."""
        return self._begin(parts, write=True)

    def forget(self, offset: int, nbytes: int) -> None:
        """Free the blocks of a range, if the file system supports it: the range then reads as zeros."""
        with self._open():
            ctypes.CDLL(None).fallocate(self._file, _PUNCH_HOLE, ctypes.c_long(offset), ctypes.c_long(nbytes))

    def _begin(self, parts: Parts, write: bool) -> Transfer:
        for offset, tensor in parts:
            nbytes = tensor.nbytes
            if not tensor.is_cpu or not tensor.is_contiguous():
                raise ValueError(
                    f"a tensor of shape {tuple(tensor.shape)} on {tensor.device} is not contiguous host memory; "
                    "pass a contiguous CPU tensor"
                )
            if offset % ALIGNMENT or tensor.data_ptr() % ALIGNMENT or nbytes % ALIGNMENT:
                raise ValueError(
                    f"offset {offset}, address {tensor.data_ptr():#x} and size {nbytes} must be multiples of {ALIGNMENT}: "
                    "allocate with slipstream.ops.disk.aligned and round sizes up"
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
        """Wait for transfers in flight, whose errors stay in their Transfers, and free the space. A no-op in a fork."""
        if os.getpid() == self._process:
            with self._lock:
                self._closing()

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Hold the lock of an open disk. Checks the process first, because a fork may have copied the lock while it was held."""
        _check_process(self._process, self.folder)
        with self._lock:
            if not self._closing.alive:
                raise ValueError(f"the disk in {self.folder} is closed")
            yield


def aligned(nbytes: int) -> Tensor:
    """Page-aligned zeros, uint8 [nbytes], on huge pages as far as the size fills them. `nbytes` is a multiple of 4096.

    On huge pages a block is one segment for the device, otherwise one segment per page: huge pages make transfers twice as fast.
    """
    if nbytes % ALIGNMENT:
        raise ValueError(f"nbytes ({nbytes}) must be a multiple of {ALIGNMENT}; round it up")
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    memory = mmap.mmap(-1, nbytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # untouched pages use no memory
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _HUGE
    if nbytes >= _HUGE:
        with suppress(OSError):  # the kernel may lack huge pages
            memory.madvise(mmap.MADV_HUGEPAGE, start, nbytes // _HUGE * _HUGE)  # the tail would take a whole huge page
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=start)


class DiskFacts(NamedTuple):
    engine: str
    free_nbytes: int  # before the file is created
    read_bytes_per_s: float  # both with reads and writes running concurrently
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
    """Check that a Disk of `nbytes` works in `folder`, and measure its rates, in about 0.3 s. Raises ValueError like Disk."""
    tuning: Any = {"block_nbytes": block_nbytes, "queue_depth": queue_depth, "threads": threads, "engine": engine}
    with closing(Disk(folder, nbytes, **tuning)) as disk:
        free = num_free(folder) + disk.nbytes
        probe = min(disk.nbytes, probe_nbytes // ALIGNMENT * ALIGNMENT)
        source, target = _memory(min(probe, block_nbytes * queue_depth))
        _fill(disk, probe, source)
        return DiskFacts(disk.engine, free, *rates(disk, 0.2, probe, target, source))


class DiskRate(NamedTuple):
    """The rates of a disk with `depth` blocks in flight per direction, both directions at once."""

    engine: str
    block_nbytes: int
    depth: int  # io_uring: queue_depth; threads: threads
    read: float  # bytes per second
    write: float


def sweep(folder: str, nbytes: int, blocks: Sequence[int], depths: Sequence[int], seconds: float) -> Iterator[DiskRate]:
    """Measure every block size with every depth for `seconds` in one anonymous file of `nbytes`, except settings with more than
    half of the file in flight. Raises ValueError like Disk, and if no setting is left."""
    if odd := [block for block in blocks if block % ALIGNMENT]:
        raise ValueError(f"a block of {odd[0]} bytes is not a multiple of {ALIGNMENT}; round it up")
    settings = [(block, depth) for block in blocks for depth in depths if 2 * block * depth <= nbytes]
    if not settings:
        raise ValueError(f"{nbytes} bytes are less than twice {min(depths)} x {min(blocks)}, a setting's blocks; use a larger file")
    source, target = _memory(max(block * depth for block, depth in settings))
    with os.fdopen(_create(folder, nbytes), "rb", buffering=0) as file:
        for i, (block, depth) in enumerate(settings):
            own = os.dup(file.fileno())
            with closing(Disk(folder, nbytes, block_nbytes=block, queue_depth=depth, threads=depth, file=own)) as disk:
                if i == 0:
                    _fill(disk, nbytes, source)
                memory = block * depth
                yield DiskRate(disk.engine, block, depth, *rates(disk, seconds, nbytes, target[:memory], source[:memory]))


def _memory(nbytes: int) -> tuple[Tensor, Tensor]:
    """A source of random bytes, because virtual disks may elide zeros, and a target."""
    return aligned(nbytes).random_(generator=torch.Generator()), aligned(nbytes)  # leaves the global generator untouched


def _fill(disk: Disk, nbytes: int, source: Tensor) -> None:
    """Write the first `nbytes`: reads of unwritten blocks do not reach the disk."""
    disk.write([(at, source[: nbytes - at]) for at in range(0, nbytes, source.numel())]).wait()


def rates(disk: Disk, seconds: float, span: int, target: Tensor | None, source: Tensor | None) -> tuple[float, float]:
    """Bytes per second of concurrent reads into `target` and writes from `source`; 0 for a direction whose tensor is None.

    Cycles over the first `span` bytes, at least the size of each tensor; writing starts in the middle. Keeps four transfers per
    direction in flight, so that the queues never drain.
    """
    deadline = time.perf_counter() + seconds

    def run(move: Callable[[Parts], Transfer], memory: Tensor, first: int) -> float:
        in_flight, moved, start = deque[Transfer](), 0, time.perf_counter()
        chunk, chunks = memory.numel(), span // memory.numel()
        while (more := time.perf_counter() < deadline) or in_flight:
            if more:
                in_flight.append(move([((first * chunks // 2 + moved // chunk) % chunks * chunk, memory)]))
                moved += chunk
            if not more or len(in_flight) == 4:
                in_flight.popleft().wait()
        return moved / (time.perf_counter() - start)

    with ThreadPoolExecutor(2) as pool:
        reading = None if target is None else pool.submit(run, disk.read, target, 0)
        writing = None if source is None else pool.submit(run, disk.write, source, 1)
        return reading.result() if reading else 0.0, writing.result() if writing else 0.0


def _create(folder: str, nbytes: int) -> int:
    """Create an anonymous, fully allocated file and return its descriptor. Raises ValueError that says how to fix the problem."""
    if not os.path.isdir(folder):
        raise ValueError(f"there is no folder {folder!r}; create it, on a local disk")
    flags = os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC
    try:
        try:
            file = os.open(folder, flags | os.O_TMPFILE | os.O_EXCL, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
                raise
            path = os.path.join(folder, f".slipstream-{uuid.uuid4().hex}")  # a kill before unlink leaves an empty file
            file = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
            os.unlink(path)
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise ValueError(f"the file system of {folder} has no O_DIRECT; use a folder on a local disk (ext4, xfs)") from error
        raise ValueError(f"cannot create a file in {folder}: {error.strerror}; use a folder that this user can write") from error
    try:
        if kind := _IN_MEMORY.get(_file_system(file)):
            raise ValueError(f"{folder} is a {kind}, which is in memory; use a folder on a disk, or offload to the host ('cpu')")
        free = num_free(folder)
        if nbytes > free:
            raise ValueError(f"{folder} has {free} bytes free of the {nbytes} needed; free space there or use another folder")
        try:
            os.posix_fallocate(file, 0, nbytes)
        except OSError as error:
            raise ValueError(
                f"cannot allocate {nbytes} bytes in {folder}, where {free} bytes are free: {error.strerror}; "
                f"{_REMEDIES.get(error.errno or 0, 'free space there or use another folder')}"
            ) from error
    except BaseException:
        os.close(file)
        raise
    return file


def num_free(folder: str | os.PathLike[str]) -> int:
    """Bytes that this user can still write to the file system."""
    facts = os.statvfs(folder)
    return facts.f_bavail * facts.f_frsize


def _file_system(file: int) -> int:
    """statfs(2)'s f_type, its first field, which os.statvfs omits."""
    record = (ctypes.c_long * 64)()
    return record[0] & 0xFFFFFFFF if ctypes.CDLL(None).fstatfs(file, record) == 0 else 0


def _start(file: int, block_nbytes: int, queue_depth: int, threads: int, engine: str) -> _Ring | _Threads:
    if engine != "threads":
        try:
            return _Ring(file, block_nbytes, queue_depth)
        except OSError as error:
            if engine == "io_uring":
                raise ValueError(f"io_uring is not available: {error.strerror}; use engine='auto' or 'threads'") from error
            logger.info("using %d threads each for reads and writes instead of io_uring: %s", threads, error.strerror)
    return _Threads(file, block_nbytes, threads)


def _close(engine: _Ring | _Threads, file: int, process: int, under_way: list[Transfer]) -> None:
    if os.getpid() == process:
        engine.close()
        os.close(file)
    under_way.clear()


def _check_process(process: int, folder: str) -> None:
    if os.getpid() != process:
        raise RuntimeError(f"the disk in {folder} is of process {process}, not of its fork {os.getpid()}: open another here")

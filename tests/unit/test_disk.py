"""The disk under the tiers: round trips on both engines, errors that stay in their batch, refusals, kills, forks and signals."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import random
import resource
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.launch import cli
from slipstream.launch.bench_disk import choose
from slipstream.ops import build, words
from slipstream.ops.disk import ALIGNMENT as PAGE
from slipstream.ops.disk import Disk, DiskError, DiskRate, Transfer, aligned, preflight

pytestmark = pytest.mark.disk

ENGINES = ("io_uring", "threads")
Open = Callable[..., Disk]


@pytest.fixture(scope="module")
def folder() -> Iterator[str]:
    """An empty folder on a real disk: a temporary folder may be in memory."""
    reasons = []
    for base in (None, Path(__file__).parent):
        with tempfile.TemporaryDirectory(prefix=".test-disk-", dir=base) as path:
            try:
                Disk(path, PAGE).close()
            except ValueError as error:
                reasons.append(str(error))
            else:
                yield path
                return
    pytest.skip("; ".join(reasons))


@pytest.fixture(params=ENGINES)
def start(request: pytest.FixtureRequest, folder: str) -> Iterator[Open]:
    """Opens disks of 2 MiB with small blocks and a short queue, so that a batch is many blocks."""
    disks: list[Disk] = []

    def start(nbytes: int = 2 << 20, block_nbytes: int = 2 * PAGE, queue_depth: int = 3) -> Disk:
        try:
            disks.append(Disk(folder, nbytes, block_nbytes=block_nbytes, queue_depth=queue_depth, engine=request.param))
        except ValueError as error:
            pytest.skip(str(error))
        assert disks[-1].engine == request.param
        return disks[-1]

    yield start
    for disk in disks:
        disk.close()


def noise(pages: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return aligned(pages * PAGE).random_().view(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("seed", range(2))
def test_any_parts_come_back_as_they_were_written(start: Open, seed: int) -> None:
    disk, choose, pages = start(), random.Random(seed), 512
    model = noise(pages)
    disk.write([(0, model)]).wait()
    for _ in range(10):
        cuts = sorted(choose.sample(range(pages + 1), 2 * choose.randint(1, 30)))
        spans = list(zip(cuts[::2], cuts[1::2], strict=True))  # apart from one another
        choose.shuffle(spans)
        reads, writes = spans[::2], spans[1::2]
        dtypes = [choose.choice((torch.uint8, torch.bfloat16, torch.float32, torch.int64)) for _ in spans]
        read = [(a * PAGE, noise(b - a, dtype)) for (a, b), dtype in zip(reads, dtypes, strict=False)]
        written = [(a * PAGE, noise(b - a, dtype)) for (a, b), dtype in zip(writes, dtypes, strict=False)]
        middle = len(written) // 2  # three batches at once; an empty one is done at once
        for transfer in (disk.read(read), disk.write(written[:middle]), disk.write(written[middle:])):
            transfer.wait()
            assert transfer.done()
            transfer.wait()
        for offset, tensor in written:
            model[offset : offset + tensor.nbytes] = tensor.view(torch.uint8)
        for offset, tensor in read:
            assert same(tensor, model[offset : offset + tensor.nbytes])
    values = aligned(pages * PAGE)
    disk.read([(0, values)]).wait()
    assert torch.equal(values, model)


def test_batches_far_beyond_the_queue(start: Open) -> None:
    disk, model, back = start(block_nbytes=PAGE, queue_depth=2), noise(200), aligned(200 * PAGE)
    order = random.Random(0).sample(range(200), 200)
    for transfer in [disk.write([(at * PAGE, model[at * PAGE : (at + 1) * PAGE])]) for at in order]:
        transfer.wait()
    for transfer in [disk.read([(at * PAGE, back[at * PAGE : (at + 1) * PAGE])]) for at in order]:
        transfer.wait()
    assert torch.equal(back, model)


def test_what_is_dropped_under_way_is_kept_alive_and_written(start: Open) -> None:
    disk, model = start(), noise(512)
    last = aligned(PAGE)
    alive, transfer = weakref.ref(last), disk.read([(0, last)])
    del last
    assert alive() is not None
    transfer.wait()
    assert alive() is None
    for at in range(0, model.numel(), 64 * PAGE):
        disk.write([(at, aligned(64 * PAGE).copy_(model[at : at + 64 * PAGE]))])  # neither is kept here
    while not all(pending.done() for pending in disk._under_way):
        time.sleep(1e-3)
    back = aligned(model.numel())
    disk.read([(0, back)]).wait()
    assert torch.equal(back, model)


def test_close_waits_and_refuses_what_comes_later(start: Open) -> None:
    disk, memory = start(), noise(512)
    transfers = [disk.write([(0, memory)]) for _ in range(5)]
    disk.close()
    assert all(transfer.done() for transfer in transfers)
    disk.close()
    with pytest.raises(ValueError, match="closed"):
        disk.read([(0, memory)])


def test_a_failed_write_leaves_other_batches_whole(start: Open) -> None:
    disk, values, back = start(block_nbytes=4 * PAGE), noise(64), aligned(64 * PAGE)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (130 * PAGE, hard))  # in the middle of a block: a short write, then the error
    try:
        before, failing = disk.write([(0, values)]), disk.write([(128 * PAGE, noise(4)), (256 * PAGE, noise(64))])
        after = disk.write([(64 * PAGE, values)])
        for _ in range(2):
            with pytest.raises(DiskError, match=r"write of \d+ bytes at offset \d+ .* ended after \d+ bytes: .*ulimit") as caught:
                failing.wait()
        before.wait()
        after.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG and disk.folder in str(caught.value)
    for at in (0, 64 * PAGE):
        disk.read([(at, back)]).wait()
        assert torch.equal(back, values)


def test_a_short_write_is_told_by_what_it_moved(start: Open) -> None:
    disk = start(block_nbytes=8 * PAGE)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (11 * PAGE, hard))
    try:
        with pytest.raises(DiskError, match=f"write of {8 * PAGE} bytes at offset {8 * PAGE} .* ended after {3 * PAGE} bytes"):
            disk.write([(0, noise(16))]).wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_read_that_the_file_cuts_short(start: Open) -> None:
    disk, back = start(), aligned(64 * PAGE)
    disk.write([(0, noise(512))]).wait()
    os.ftruncate(disk._file, 97 * PAGE)
    failing, other = disk.read([(64 * PAGE, noise(64))]), disk.read([(0, back)])
    with pytest.raises(DiskError, match=r"end of file; the file was truncated"):
        failing.wait()
    other.wait()


def test_a_ring_that_is_taken_away_fails_every_batch(folder: str) -> None:
    try:
        disk = Disk(folder, 64 * PAGE, engine="io_uring")
    except ValueError as error:
        pytest.skip(str(error))
    links = {link: os.path.realpath(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    ring = max(int(link.name) for link, target in links.items() if "io_uring" in target)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, ring)
    os.close(null)
    for _ in range(2):
        with pytest.raises(DiskError):
            disk.write([(0, noise(64))]).wait()
    disk.close()


@pytest.mark.parametrize(
    ("offset", "nbytes", "shift", "words"),
    [
        (100, PAGE, 0, "offset 100"),
        (0, 100, 0, "size 100"),
        (0, PAGE, 512, r"address 0x\w+200"),
        (2 << 20, PAGE, 0, "4096 bytes at offset 2097152 are not in the file of 2097152"),
        (-PAGE, PAGE, 0, "offset -4096"),
    ],
)
def test_misplaced_parts_are_refused(start: Open, offset: int, nbytes: int, shift: int, words: str) -> None:
    disk, memory = start(), aligned(2 * PAGE)
    for begin in (disk.read, disk.write):
        with pytest.raises(ValueError, match=words):
            begin([(0, memory), (offset, memory[shift : shift + nbytes])])
    with pytest.raises(ValueError, match="not contiguous"):
        disk.read([(0, memory.view(2, PAGE).T)])
    with pytest.raises(ValueError, match="multiple of 4096"):
        aligned(100)


@pytest.mark.parametrize("options", [{"block_nbytes": 1000}, {"block_nbytes": 0}, {"queue_depth": 0}, {"threads": 0}])
def test_settings_out_of_range(folder: str, options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Disk(folder, PAGE, **options)


def test_a_folder_that_will_not_do(folder: str) -> None:
    for path, nbytes, reason in [
        (folder + "/none", PAGE, "there is no folder .*none.*create it"),
        ("/proc", PAGE, "cannot create a file in /proc: .*can write"),
        (folder, 1 << 60, rf"has \d+ bytes free of the {1 << 60} needed"),
        (folder, 0, "nbytes"),
    ]:
        for begin in (Disk, preflight):
            with pytest.raises(ValueError, match=reason):
                begin(path, nbytes)


def test_a_folder_in_memory() -> None:
    try:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as path, pytest.raises(ValueError, match=r"tmpfs, .*'cpu'|O_DIRECT"):
            preflight(path, PAGE)
    except FileNotFoundError:
        pytest.skip("/dev/shm is not there")


def test_space_that_cannot_be_allocated(folder: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE, hard))
    try:
        with pytest.raises(ValueError, match=rf"cannot allocate {2 * PAGE} bytes in .*, where \d+ bytes are free: .*ulimit"):
            Disk(folder, 2 * PAGE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_preflight_tells_engine_space_and_rates(start: Open, folder: str) -> None:
    engine: Any = start().engine
    facts = preflight(folder, 3 << 20, engine=engine, probe_nbytes=2 << 20)
    assert facts.engine == engine and facts.free_nbytes > 3 << 20
    assert min(facts.read_bytes_per_s, facts.write_bytes_per_s) > 1e5
    assert os.listdir(folder) == []


def test_a_file_system_without_anonymous_files(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    true_open = os.open

    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return true_open(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    with_name = Disk(folder, PAGE)
    assert os.listdir(folder) == []
    with_name.write([(0, noise(1))]).wait()
    with_name.close()


def test_where_io_uring_is_refused_threads_serve(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "load", lambda: build.Library(None, None, "no C compiler"))
    with pytest.raises(ValueError, match=r"no C compiler.*'threads'"):
        Disk(folder, PAGE, engine="io_uring")
    threads = Disk(folder, PAGE)
    assert threads.engine == "threads"
    threads.close()


def in_a_fork(run: Callable[[], object]) -> int:
    """How a forked child that calls `run` ends: 0, a signal as a negative number, or 1."""
    child = os.fork()
    if child == 0:
        try:
            run()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_is_told_and_does_no_harm(start: Open) -> None:
    disk, memory = start(), noise(512)
    under_way = disk.write([(0, memory)])

    def use() -> None:
        for action in (lambda: disk.read([(0, memory)]), under_way.wait):
            with pytest.raises(RuntimeError, match=f"is of process {os.getppid()}.*open another"):
                action()
        disk.close()

    assert in_a_fork(use) == 0
    under_way.wait()
    disk.read([(0, memory)]).wait()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_nothing_is_left_after_a_kill(start: Open, folder: str) -> None:
    def be_killed() -> None:
        disk = start(16 << 20, block_nbytes=64 * PAGE)
        disk.write([(0, noise(1024))]).wait()
        for at in range(0, 16 << 20, 4 << 20):
            disk.write([(at, noise(1024))])
        os.kill(os.getpid(), signal.SIGKILL)

    start()  # or skip
    assert in_a_fork(be_killed) == -signal.SIGKILL
    assert os.listdir(folder) == []


def never_done() -> Transfer:
    return Transfer("a folder", [(0, aligned(PAGE))], write=False)


def test_waiting_holds_no_lock_of_python() -> None:
    transfer = never_done()
    waiter = threading.Thread(target=transfer.wait)
    waiter.start()
    turns, deadline = 0, time.monotonic() + 0.2
    while time.monotonic() < deadline:
        time.sleep(0)  # with the GIL held it would come back once in 50 ms
        turns += 1
    words.store_release_and_wake(ctypes.addressof(transfer._batch), 1)
    waiter.join()
    assert turns > 100


def test_ctrl_c_ends_the_wait_and_not_the_transfer() -> None:
    transfer = never_done()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background starts with it ignored
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            transfer.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    timer.join()
    assert not transfer.done()


# -- slipstream bench-disk --


def test_the_block_of_a_disk_is_printed_and_nothing_is_left(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench-disk", folder, "--size", "8M", "--block-sizes", "64K,1M", "--depths", "1,4", "--seconds", "0.2", "--json"]
    assert cli.main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    settings = [DiskRate(**setting) for setting in found["settings"]]
    assert [(setting.block_nbytes, setting.depth) for setting in settings] == [
        (64 << 10, 1),
        (64 << 10, 4),
        (1 << 20, 1),
        (1 << 20, 4),
    ]
    assert all(setting.read > 0 and setting.write > 0 for setting in settings) and os.listdir(folder) == []
    chosen = choose(settings)
    depth = "queue_depth" if chosen.engine == "io_uring" else "intra_op_parallelism"
    assert found["aio"] == {"block_size": chosen.block_nbytes, depth: chosen.depth}


def test_the_fastest_setting_with_the_least_in_flight_is_chosen() -> None:
    def setting(block: int, depth: int, read: float, write: float) -> DiskRate:
        return DiskRate("io_uring", block, depth, read, write)

    small, large, lopsided = setting(4, 2, 98, 98), setting(8, 4, 100, 100), setting(4, 1, 900, 40)
    assert choose([lopsided, large, small]) is small
    assert choose([lopsided, large]) is large

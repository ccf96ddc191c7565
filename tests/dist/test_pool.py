"""The pool itself: passing tests, the report of each kind of failure, and isolation of the next test."""

import ctypes
import functools
import mmap
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.pool import STACKS_S, Pool, RankError, distributed, run
from tests.ranks import SpawnRanks

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


# ---- passing tests


@distributed(world_size=(1, 2, 4), transports=("shared", "gloo"))
def test_runs_on_every_rank_with_its_arguments(world_size: int, transport: str) -> None:
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    assert total.item() == world_size * (world_size + 1) // 2
    assert dist.get_world_size() == world_size == int(os.environ["WORLD_SIZE"])
    assert transport in ("shared", "gloo")


@distributed(world_size=2)
@pytest.mark.parametrize("factor", [2, 3])
def test_takes_fixtures_and_parameters(tmp_path: Path, factor: int) -> None:
    (tmp_path / f"rank{dist.get_rank()}").write_text(str(factor))
    dist.barrier()
    assert [path.read_text() for path in sorted(tmp_path.iterdir())] == [str(factor)] * 2


@distributed()
def test_each_test_starts_alike() -> None:
    assert torch.initial_seed() == 0 and torch.get_num_threads() == 1
    with pytest.raises(UserWarning):
        warnings.warn("an error here too", stacklevel=1)


def rank_and(value: torch.Tensor) -> tuple[int, torch.Tensor, int]:
    return dist.get_rank(), value * 2, os.getpid()


def test_results_come_by_rank_from_the_same_processes() -> None:
    first, second = (run(2, rank_and, torch.ones(3)) for _ in range(2))
    assert [rank for rank, _, _ in first] == [0, 1]
    assert all(torch.equal(value, torch.full((3,), 2.0)) for _, value, _ in first)
    assert [pid for _, _, pid in first] == [pid for _, _, pid in second]
    assert len({pid for _, _, pid in first} | {os.getpid()}) == 3


def skip_on_rank_1() -> None:
    if dist.get_rank() == 1:
        pytest.skip("not on this rank")
    dist.barrier()


def test_a_skip_reaches_pytest() -> None:
    with pytest.raises(pytest.skip.Exception, match="not on this rank"):
        run(2, skip_on_rank_1)


# ---- failures


def pids() -> int:
    return os.getpid()


def fail_on_rank_1() -> None:
    print("printed by", dist.get_rank())
    values = [dist.get_rank(), 7]
    if dist.get_rank() == 1:
        assert sum(values) == 9, "the sum is off"
    dist.barrier()


def fail_on_both() -> None:
    time.sleep(0.05 * (1 - dist.get_rank()))
    raise KeyError(f"from {dist.get_rank()}")


def fail_while_the_other_sleeps() -> None:
    if dist.get_rank() == 1:
        raise RuntimeError("boom")
    time.sleep(60)


def test_a_failing_rank_shows_its_own_traceback_and_values() -> None:
    before = run(2, pids)
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        run(2, fail_on_rank_1)
    assert time.monotonic() - start < 10
    story = str(caught.value)
    assert caught.value.first.rank == 1 and caught.value.first.status == "failed"
    assert story.startswith("rank 1 of 2 failed first:\nTraceback")
    assert "AssertionError: the sum is off" in story and "assert 8 == 9" in story
    assert "in fail_on_rank_1" in story and "worker.py" not in story.partition("rank 0")[0]
    assert "rank 0 printed:\nprinted by 0" in story and "rank 1 printed:\nprinted by 1" in story
    assert run(2, pids) == before, "ranks that stopped in good order go on"


def test_the_first_failure_comes_first() -> None:
    with pytest.raises(RankError) as caught:
        run(2, fail_on_both)
    assert caught.value.first.rank == 1
    assert str(caught.value).index("KeyError: 'from 1'") < str(caught.value).index("KeyError: 'from 0'")


def test_other_ranks_are_interrupted() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)RuntimeError: boom.*rank 0 interrupted:.*time\.sleep"):
        run(2, fail_while_the_other_sleeps)
    assert time.monotonic() - start < 10


def test_the_decorator_fails_the_test_with_the_story() -> None:
    failing = distributed(world_size=2)(fail_on_both)
    with pytest.raises(pytest.fail.Exception, match="KeyError: 'from 1'"):
        failing(world_size=2)


# ---- hangs, deaths


def hang() -> None:
    if dist.get_rank() == 0:
        dist.barrier()
    ctypes.CDLL(None).sleep(100)


def die(number: int) -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), number)
    dist.barrier()


def leave_by_exit() -> None:
    os._exit(5)


def start_a_child(note: Path) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    (note / str(dist.get_rank())).write_text(str(child.pid))
    time.sleep(100)


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        stat = Path(f"/proc/{pid}/stat")
        try:
            if stat.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


@linux
def test_a_hang_shows_each_ranks_stack_and_ends() -> None:
    before = run(2, pids)
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        run(2, hang, timeout=6)  # on a loaded machine ranks need seconds to begin
    assert 6 <= time.monotonic() - start < 6 + 4 + 2 * STACKS_S
    story = str(caught.value)
    assert caught.value.first.status == "hung" and story.count("no answer after 6 s") == 2
    assert "in barrier" in story and len(re.findall(r'File ".*test_pool\.py", line \d+ in hang', story)) == 2
    assert all(gone(pid) for pid in before) and not set(before) & set(run(2, pids))


@linux
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_rank_is_named_with_its_signal(number: signal.Signals) -> None:
    before = run(2, pids)
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        run(2, die, int(number))
    assert time.monotonic() - start < 10
    assert caught.value.first.rank == 1 and caught.value.first.status == "died"
    assert f"ended by {number.name}" in str(caught.value)
    assert ("Fatal Python error" in str(caught.value)) == (number == signal.SIGSEGV)
    assert all(gone(pid) for pid in before) and len(run(2, pids)) == 2


def test_an_exit_is_named_with_its_code() -> None:
    with pytest.raises(RankError, match="ended with exit code 5"):
        run(1, leave_by_exit)


@linux
def test_children_of_a_hanging_rank_are_killed_with_it(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="hung first"):
        run(2, start_a_child, tmp_path, timeout=8)  # on a loaded machine a rank needs seconds to begin
    assert all(gone(int((tmp_path / str(rank)).read_text())) for rank in range(2))


# ---- leaks


kept: list[object] = []


def leak_a_mapping() -> None:
    if dist.get_rank() == 1:
        descriptor = os.memfd_create("leak")
        os.ftruncate(descriptor, 4096)
        kept.append(mmap.mmap(descriptor, 4096))
        os.close(descriptor)


def leak_a_descriptor() -> None:
    os.memfd_create("leak")


def leak_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(30,), name="leaked", daemon=True).start()


def leak_a_default() -> None:
    torch.set_default_dtype(torch.float64)


def raise_in_del() -> None:
    class Bad:
        def __del__(self) -> None:
            raise RuntimeError("in del")

    Bad()


def raise_in_a_thread() -> None:
    def body() -> None:
        raise RuntimeError("in a thread")

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()


@linux
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (leak_a_mapping, "rank 1 passed but left behind: shared mappings: 0 before the test, 1 after it"),
        (leak_a_descriptor, "memfd descriptors: 0 before the test, 1 after it"),
        (leak_a_thread, "'leaked'"),
        (leak_a_default, "default dtype: torch.float32 before the test, torch.float64 after it"),
        (raise_in_del, "RuntimeError: in del"),
        (raise_in_a_thread, "RuntimeError: in a thread"),
    ],
)
def test_leaks_fail_the_test(function: Callable[[], None], message: str) -> None:
    with pytest.raises(RankError, match=re.escape(message)):
        run(2, function)
    assert len(run(2, pids)) == 2


# ---- wrong use


def test_wrong_use_is_refused() -> None:
    with pytest.raises(ValueError, match=r"world_size \(9\) is not in 1\.\.8"):
        run(9, pids)
    with pytest.raises(ValueError, match="define it at the top of its module"):
        run(2, lambda: None)
    with pytest.raises(ValueError, match="go together"):
        distributed(transports=("gloo",))(pids)


# ---- costs


def nothing() -> None:
    pass


def repeat(own: Pool, world: int) -> None:
    for _ in range(5):
        own.run(world, nothing, (), {}, 60)


@pytest.mark.slow
@pytest.mark.alone
def test_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds far above the measured costs; -s shows the figures."""
    figures: dict[str, float] = {}

    def timed(name: str, call: Callable[[], object]) -> None:
        start = time.perf_counter()
        call()
        figures[name] = time.perf_counter() - start

    own = Pool()
    try:
        timed("start, then a test at world 2", lambda: own.run(2, nothing, (), {}, 60))
        for world in (2, 4):
            own.run(world, nothing, (), {}, 60)  # its workers exist
            timed(f"5 tests at world {world}", functools.partial(repeat, own, world))
        own.kill()
        timed("workers replaced, then a test at world 2", lambda: own.run(2, nothing, (), {}, 60))
    finally:
        own.close()
    print("\n" + "\n".join(f"{name}: {seconds * 1e3:.0f} ms" for name, seconds in figures.items()))
    assert figures["workers replaced, then a test at world 2"] < 3
    assert figures["5 tests at world 4"] < 5 * 0.5


# ---- ranks as plain processes

SCRIPT = """
import os, subprocess, sys, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"])
if os.environ["RANK"] == "1":
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    print("child", child.pid)
    time.sleep(1000)
sys.exit(int(os.environ["CODE"]))
"""


@linux
def test_spawned_ranks_are_captured_and_killed_with_all_they_started(spawn_ranks: SpawnRanks) -> None:
    ranks = spawn_ranks(SCRIPT, 2, {"CODE": "3"})
    ranks.wait_for(1, "child")
    with pytest.raises(TimeoutError, match=r"ranks \[1\] still run after 0.5 s"):
        ranks.wait(0.5)
    ranks.kill(1)
    assert ranks.wait(5) == [3, -signal.SIGKILL]
    assert ranks.stdout(0) == "rank 0 of 2\n" and ranks.stderr(0) == ""
    child = int(ranks.stdout(1).split()[-1])
    assert ranks.survivors() == [child]
    spawn_ranks.close()
    assert ranks.survivors() == [] and gone(child)


@pytest.mark.slow
@linux
def test_nothing_outlives_a_killed_pytest(spawn_ranks: SpawnRanks) -> None:
    script = (
        "import os, signal, time\nfrom tests.pool import run\nfrom tests.dist.test_pool import pids\n"
        "print('workers', *run(2, pids))\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ranks = spawn_ranks(script, 1)
    assert ranks.wait(120) == [-signal.SIGKILL]
    workers = [int(pid) for pid in ranks.stdout(0).split()[1:]]
    assert len(workers) == 2 and all(gone(pid) for pid in workers)

"""Starting the ranks of one job, each on a core of its own, and listening to them."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from benchmarks import systems
from benchmarks.peers import Peers
from benchmarks.worker import Job

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 1200.0

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1

OnMark = Callable[[int], None]


class RunError(RuntimeError):
    """A contender's process ended without a result; the text ends with what it said."""


@dataclass(slots=True, kw_only=True)
class Seat:
    """Where the ranks sit: what is put in front of each command, what is set for each, what happens to each pid."""

    prefix: Callable[[int], Sequence[str]] = lambda rank: ()
    env: Mapping[str, str] = field(default_factory=dict)
    address: str = "127.0.0.1"
    seated: Callable[[], None] | None = None  # called in the child before it becomes the rank


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What the ranks reported, in rank order, and when the first of them was started."""

    ranks: list[dict[str, Any]]
    spawned: float

    @property
    def losses(self) -> list[float]:
        """Per step, the mean over ranks."""
        return [sum(step) / len(step) for step in zip(*(rank["losses"] for rank in self.ranks), strict=True)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(job: Job, world: int, peers: Peers, *, seat: Seat | None = None, on_mark: OnMark | None = None) -> Outcome:
    """Start `world` ranks of `job`, call `on_mark` whenever all have reached a mark, and return what they report.

    Raises RunError when a rank dies, and leaves no process behind.
    """
    with contextlib.ExitStack() as stack:
        ranks = _start(job, world, peers, seat or Seat(), stack)
        for mark in [mark for mark in job.marks if mark <= job.steps]:
            ranks.reach_mark()
            if on_mark is not None:
                on_mark(mark)
            ranks.go_on()
        return ranks.finish()


class Turn(NamedTuple):
    """A few steps of one contender and, right before them on the same cores, of another; of the slowest rank, means."""

    seconds: float
    cpu_seconds: float
    beside: float


class Beside:
    """A job that stays alive while others come and go, and takes turns with each of them.

    Raises RunError when a rank dies; leaves no process behind, if used as a context.
    """

    def __init__(self, job: Job, world: int, peers: Peers) -> None:
        self._world, self._peers = world, peers
        self._stack = contextlib.ExitStack()
        self._ranks = _start(job, world, peers, Seat(), self._stack)
        self._ranks.reach_mark()
        self.loss = math.nan  # of the first step, the mean over ranks

    def run(self, job: Job) -> tuple[Outcome, list[Turn]]:
        """`job` to its end. Its marks start with 0; between two of them it and the one beside have a turn each."""
        turns = []
        with contextlib.ExitStack() as stack:
            ranks = _start(job, self._world, self._peers, Seat(), stack)
            ranks.reach_mark()
            for _ in job.marks[1:]:
                self._ranks.go_on()
                beside = self._ranks.reach_mark()
                self.loss = statistics.mean(rank["loss"] for rank in beside)
                ranks.go_on()
                own = ranks.reach_mark()
                turns.append(Turn(_slowest(own, "times"), _slowest(own, "cpu_times"), _slowest(beside, "times")))
            ranks.go_on()
            return ranks.finish(), turns

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _slowest(marks: Sequence[dict[str, Any]], times: str) -> float:
    return max(statistics.mean(rank[times]) for rank in marks)


@dataclass(slots=True, kw_only=True)
class _Ranks:
    """The running ranks of one job."""

    ranks: list[_Rank]
    spawned: float

    def reach_mark(self) -> list[dict[str, Any]]:
        return [rank.expect("mark") for rank in self.ranks]

    def go_on(self) -> None:
        for rank in self.ranks:
            rank.go_on()

    def finish(self) -> Outcome:
        results = [rank.expect("losses") for rank in self.ranks]
        self.go_on()
        for rank in self.ranks:
            rank.process.wait(timeout=60)
        return Outcome(ranks=results, spawned=self.spawned)


def _start(job: Job, world: int, peers: Peers, seat: Seat, stack: contextlib.ExitStack) -> _Ranks:
    port, spawned = free_port(), time.time()
    ranks = [stack.enter_context(_rank(job, rank, world, port, peers, seat)) for rank in range(world)]
    return _Ranks(ranks=ranks, spawned=spawned)


@dataclass(slots=True, kw_only=True)
class _Rank:
    process: subprocess.Popen[bytes]
    reader: TextIO
    writer: TextIO
    log: Any
    name: str

    def expect(self, key: str) -> dict[str, Any]:
        """The next message, which has to be about `key`."""
        ready, _, _ = select.select([self.reader], [], [], TIMEOUT)
        line = self.reader.readline() if ready else ""
        if not line:
            self.log.seek(0)
            tail = self.log.read().decode(errors="replace")[-3000:]
            what = f"has said nothing for {TIMEOUT / 60:.0f} minutes" if not ready else f"died ({self._exit()})"
            raise RunError(f"{self.name} {what}:\n{tail}")
        message: dict[str, Any] = json.loads(line)
        assert key in message, f"{self.name} sent {message} where {key!r} was due"
        return message

    def _exit(self) -> str:
        try:
            return f"exit code {self.process.wait(timeout=10)}"
        except subprocess.TimeoutExpired:
            return "it closed its pipe"

    def go_on(self) -> None:
        self.writer.write("\n")
        self.writer.flush()


@contextlib.contextmanager
def _rank(job: Job, rank: int, world: int, port: int, peers: Peers, seat: Seat) -> Iterator[_Rank]:
    python = peers.python if systems.needs_peers(job.system) else sys.executable
    to_parent, from_parent = os.pipe(), os.pipe()
    env = {
        **os.environ,
        **peers.environment(),
        **systems.environment(job.system),
        **seat.env,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": seat.address,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "BENCH_READ": str(from_parent[0]),
        "BENCH_WRITE": str(to_parent[1]),
    }
    cores = sorted(os.sched_getaffinity(0))
    core = cores[rank % len(cores)]
    command = [*seat.prefix(rank), str(python), "-m", "benchmarks.worker", job.to_json()]

    def settle_down() -> None:
        os.sched_setaffinity(0, {core})
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # no rank outlives the benchmark, however that ends
        if seat.seated is not None:
            seat.seated()

    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=(to_parent[1], from_parent[0]),
            start_new_session=True,
            preexec_fn=settle_down,
        )
        os.close(to_parent[1])
        os.close(from_parent[0])
        with os.fdopen(to_parent[0]) as reader, os.fdopen(from_parent[1], "w") as writer:
            try:
                yield _Rank(process=process, reader=reader, writer=writer, log=log, name=f"rank {rank} of {job.system}")
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                with contextlib.suppress(BrokenPipeError):
                    writer.flush()

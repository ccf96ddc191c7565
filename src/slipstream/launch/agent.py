"""The agent of one node: runs torch.distributed.run in this process and reports failures itself.

Started as `python -m slipstream.launch.agent [--report] [--lease] [--quiet] TORCHRUN-OPTIONS...`, or called by `run` for a job on
this host. With `--report` it sends failures to the launching process as marked lines; otherwise it prints the summary. With
`--lease` it stops at the end of stdin, so that a closed ssh connection stops its ranks.

Names of torch used here: `torch.distributed.run.{parse_args, run}`, `ChildFailedError`, `SignalException`, `RendezvousError`, and
`SubprocessContext`, which has the ranks of one attempt: `_start`, `_poll`, `_close`, `_failures`, `envs`, `subprocess_handlers`.

[Note: Deaths of ranks] torchrun polls its ranks, here every `_POLL_S` seconds. If one has failed, it sends SIGTERM to the others
and, after 30 s, SIGKILL. `NodeRanks` makes that `GRACE_S`, also after Ctrl-C: a rank that is blocked in native code, or that
catches SIGTERM, would delay the end. Ranks have 30 s if the agent gets SIGTERM (from a scheduler that preempts the job), or if
hosts of an elastic run join or leave: they may be saving a checkpoint. Ctrl-C in that time leaves them `GRACE_S`, and if the agent
was asked to stop before, none. A rank that left no record died after the last poll that saw it alive, which orders the failures.
"""

from __future__ import annotations

import argparse
import fcntl
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.elastic import multiprocessing
from torch.distributed.elastic.multiprocessing import SignalException, SubprocessContext

from slipstream.launch.failure import Failure, decode, encode, first, render, shell_code, summary_of, with_reason
from slipstream.launch.worker import read_records, read_stack
from slipstream.launch.zygote import spare_ranks
from slipstream.world import brief
from slipstream.world.host import read_pressure

_POLL_S = 0.02  # seconds between polls of the ranks, unless each poll asks the rendezvous's host
_SHARED_MEMORY, _KEPT = Path("/dev/shm"), "slipstream-memory-"
GRACE_S = 2.5  # a rank that raises may need worker.EXIT_S to exit; the sum stays below the documented 5 s


def _quiet_torchrun() -> None:
    """Silence torchrun's logs of every signal and exit, because we report the failure once. LOGLEVEL, its own switch, wins."""
    if "LOGLEVEL" in os.environ:
        return
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.run", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


def _share_cores(num_ranks: int, *, verbose: bool) -> None:
    """Set OMP_NUM_THREADS to each rank's share of the cores, unless the user has set it."""
    if "OMP_NUM_THREADS" in os.environ:
        return
    cores = len(os.sched_getaffinity(0))
    threads = max(1, cores // num_ranks)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if verbose:
        note = f"OMP_NUM_THREADS={threads} for each rank ({cores} cores, {num_ranks} ranks); set it to override"
        print(f"slipstream run: {note}", file=sys.stderr)


def _prepare_restarts(options: argparse.Namespace) -> None:
    if options.nnodes == "1" or not options.max_restarts:
        options.monitor_interval = _POLL_S
    if options.max_restarts:
        # By default the ranks of all attempts share the agent's store, whose keys still name the dead ranks of the previous
        # attempt: process groups then fail to connect, or hang. Without sharing, rank 0 creates a new store for each attempt.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"


@dataclass(slots=True, kw_only=True)
class NodeRun:
    """What the agent knows of the run of its node."""

    folder: Path  # for the records of the ranks
    is_elastic: bool  # hosts may join and leave
    is_over: bool = False  # the launcher has ended
    ranks: NodeRanks | None = None  # of the newest attempt

    def failures(self) -> list[Failure]:
        return [] if self.ranks is None else self.ranks.failures()


class NodeRanks(SubprocessContext):
    """The ranks of this host in one attempt; see [Note: Deaths of ranks]."""

    def __init__(self, run: NodeRun, **options: Any) -> None:
        super().__init__(**options)
        self.run, self.previous, run.ranks = run, run.ranks, self
        self.attempt = int(self.envs[0]["TORCHELASTIC_RESTART_COUNT"])
        self._seen_ns = self._polled_ns = time.time_ns()  # of the last two polls
        self._first: set[int] | None = None  # the local ranks that failed before any was stopped

    def _start(self) -> None:
        if self.previous is not None and self.attempt > self.previous.attempt:
            of, reason = self.envs[0]["TORCHELASTIC_MAX_RESTARTS"], summary_of(first(self.previous.failures()))
            print(f"slipstream run: restart {self.attempt} of {of} after {reason}", file=sys.stderr, flush=True)
        self.previous = None
        super()._start()

    def _poll(self) -> Any:
        self._seen_ns, self._polled_ns = self._polled_ns, time.time_ns()
        return super()._poll()

    def _close(self, death_sig: signal.Signals, timeout: float = 30) -> None:
        if self._first is None:
            self._first = set(self._failures)
        is_asked = isinstance(sys.exception(), SignalException)  # the agent got a signal
        is_hurried = self._failures or death_sig in (signal.SIGINT, signal.SIGKILL) or self.run.is_over
        may_save = self.run.is_elastic or is_asked
        close: Any = super()._close  # declared for whole seconds
        try:
            close(death_sig, timeout if may_save and not is_hurried else GRACE_S)
        except SignalException as another:
            if another.sigval == signal.SIGINT:
                self._close(signal.SIGKILL if is_asked else signal.SIGINT)
            raise

    def send(self, number: int) -> None:
        for handler in self.subprocess_handlers.values():
            with suppress(ProcessLookupError):
                if handler.proc.returncode is None:
                    os.kill(handler.proc.pid, number)

    def failures(self) -> list[Failure]:
        """Combine torchrun's process failures with the records of the ranks."""
        records = {record.rank: record for record in read_records(self.run.folder, self.attempt)}
        found = []
        for local_rank, failure in self._failures.items():
            rank, is_first = int(self.envs[local_rank]["RANK"]), local_rank in (self._first or ())
            if rank in records:
                found.append(replace(records[rank], exit_code=records[rank].exit_code or failure.exitcode))
                continue
            found.append(
                Failure(
                    rank=rank,
                    host=socket.gethostname(),
                    time_ns=self._seen_ns if is_first else time.time_ns(),
                    exit_code=failure.exitcode,
                    stack=read_stack(self.run.folder, self.attempt, rank),
                    stopped=not is_first and failure.exitcode in (-signal.SIGTERM, -signal.SIGKILL),
                )
            )
        return found


@contextmanager
def _started_as(run: NodeRun) -> Iterator[None]:
    """A context in which torchrun's ranks are `NodeRanks`, to which SIGUSR1 is passed on."""

    def pass_on(number: int, frame: object) -> None:
        if run.ranks is not None:
            run.ranks.send(number)

    before = signal.signal(signal.SIGUSR1, pass_on)
    multiprocessing.SubprocessContext = partial(NodeRanks, run)  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        multiprocessing.SubprocessContext = SubprocessContext  # type: ignore[misc]
        signal.signal(signal.SIGUSR1, before)


def run_node(argv: Sequence[str], *, report: bool, lease: bool = False, quiet: bool = False) -> int:
    """Run the ranks of one node until they end. Returns the exit code for the shell."""
    from torch.distributed import DistError
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    options = torchrun.parse_args(list(argv))
    _share_cores(int(options.nproc_per_node), verbose=not quiet and options.node_rank == 0)
    _quiet_torchrun()
    _prepare_restarts(options)
    folder = Path(tempfile.mkdtemp(prefix="slipstream-"))
    run = NodeRun(folder=folder, is_elastic=":" in options.nnodes)
    options.log_dir = str(folder / "torchrun")
    os.environ[brief.RECORDS] = str(folder)
    before = read_pressure()
    try:
        with ExitStack() as stack:
            if options.max_restarts:
                stack.enter_context(_memory_of_host())
                stack.enter_context(spare_ranks())
            stack.enter_context(_started_as(run))
            if lease:
                _stop_with_stdin(run)
            try:
                torchrun.run(options)
                return 0
            except ChildFailedError:
                after = read_pressure()
                failures = [with_reason(failure, before, after) for failure in run.failures()]
        if first(failures).exit_code == brief.AGAIN:
            print(f"slipstream run: {_saved(folder)}", file=sys.stderr, flush=True)
            return brief.AGAIN
        sys.stderr.write("".join(map(encode, failures)) if report else render(failures))
        sys.stderr.flush()
        return shell_code(first(failures).exit_code)
    except (DistError, RendezvousError) as error:
        endpoint = options.rdzv_endpoint or f"{options.master_addr}:{options.master_port}"
        reason = (str(error).splitlines() or [""])[0]
        fix = "--master_addr must be the first node, reachable from all nodes, and --master_port must be free on it"
        print(f"slipstream run: rendezvous at {endpoint} failed: {reason}; {fix}", file=sys.stderr)
        return 1
    except (SignalException, KeyboardInterrupt) as stop:
        number = signal.Signals(getattr(stop, "sigval", signal.SIGINT))
        records = (decode(path.read_text()) for path in folder.glob("attempt*-rank*.json"))
        if any(record.exit_code == brief.AGAIN for record in records if record is not None):
            print(f"slipstream run: {_saved(folder)}", file=sys.stderr, flush=True)
            return brief.AGAIN
        if not lease:
            text = f"stopped by {number.name}, and its ranks have stopped; {brief.last_checkpoint(str(folder))}"
            print(f"slipstream run: {text}", file=sys.stderr, flush=True)
        return 128 + number
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _saved(folder: Path) -> str:
    return f"all ranks have stopped after a signal; {brief.last_checkpoint(str(folder))}; exit code {brief.AGAIN}: start again"


@contextmanager
def _memory_of_host() -> Iterator[None]:
    """A folder in this host's memory for the newest checkpoint. It outlives the ranks that write it, and this agent removes it at
    its end.

    Folders of killed agents are removed, too: their locks are gone.
    """
    if not os.access(_SHARED_MEMORY, os.W_OK):
        yield
        return
    for stale in _SHARED_MEMORY.glob(f"{_KEPT}*"):
        with suppress(OSError):
            os.close(_locked(stale))
            shutil.rmtree(stale, ignore_errors=True)
    folder = tempfile.mkdtemp(prefix=_KEPT, dir=_SHARED_MEMORY)
    lock = _locked(folder)
    os.environ[brief.MEMORY] = folder
    try:
        yield
    finally:
        os.environ.pop(brief.MEMORY, None)
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked(folder: str | Path) -> int:
    """A descriptor that holds a folder's lock. Raises OSError if another process holds it, or another user owns the folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _stop_with_stdin(run: NodeRun) -> None:
    """Detach the ranks from stdin, and stop them when stdin ends."""
    lease = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)

    def wait() -> None:
        while os.read(lease, 4096):
            pass
        run.is_over = True
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="slipstream-lease", daemon=True).start()


def main() -> None:
    argv = sys.argv[1:]
    flags = set()
    while argv and argv[0] in ("--report", "--lease", "--quiet"):
        flags.add(argv.pop(0))
    sys.exit(run_node(argv, report="--report" in flags, lease="--lease" in flags, quiet="--quiet" in flags))


if __name__ == "__main__":
    main()

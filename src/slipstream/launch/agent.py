"""The agent of one node: runs torch.distributed.run in this process and reports failures itself.

Started as `python -m slipstream.launch.agent [--report] [--lease] [--quiet] TORCHRUN-OPTIONS...`, or called by `run` for a job on
this host. With `--report` it sends failures to the launching process as marked lines; otherwise it prints the summary. With
`--lease` it stops at the end of stdin, so that a closed ssh connection stops its ranks.

Names of torch used here: `torch.distributed.run.{parse_args, run}`, `ChildFailedError.failures`, `SignalException`,
`RendezvousError`.

[Note: Deaths of ranks] torchrun polls its ranks ten times a second and waits 30 s after SIGTERM. `RankWatch`'s thread sees each
death immediately (pidfd), so that the order of failures is known. `GRACE_S` after the first failure, or after Ctrl-C, it sends
SIGKILL to the remaining ranks: a rank that is blocked in native code, or that catches SIGTERM, would delay the end. SIGTERM sent to
the agent (by a scheduler that preempts the job) keeps torchrun's longer grace period, since ranks may be saving a checkpoint.
Invariants: it kills only process groups that torchrun created for ranks, and only those of the failed attempt; it reaps no process
(torchrun does). On a kernel without pidfd or /proc/PID/task/PID/children it does nothing.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib
import logging
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from slipstream.launch.failure import Failure, decode, encode, first, render, shell_code, with_reason
from slipstream.launch.worker import note_death, read_records, read_stack
from slipstream.launch.zygote import spare_ranks
from slipstream.world import brief
from slipstream.world.host import read_pressure

_POLL_S = 0.02  # seconds between polls of the ranks in a job of one host; with more, each poll asks the rendezvous's host
_SHARED_MEMORY, _KEPT = Path("/dev/shm"), "slipstream-memory-"
GRACE_S = 2.5  # a rank that raises may need worker.EXIT_S to exit; the sum stays below the documented 5 s
_SCAN_S = 0.25


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
    if options.nnodes == "1":
        options.monitor_interval = _POLL_S
    if options.max_restarts:
        # By default the ranks of all attempts share the agent's store, whose keys still name the dead ranks of the previous
        # attempt: process groups then fail to connect, or hang. Without sharing, rank 0 creates a new store for each attempt.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"


def _collect(failures: dict[int, Any], folder: Path, watch: RankWatch) -> list[Failure]:
    """Combine torchrun's process failures with the records of the ranks and the times of their deaths."""
    attempts = [int(path.name.removeprefix("attempt").partition("-")[0]) for path in folder.glob("attempt*-rank*")]
    attempt = max(attempts, default=0)
    records = {record.rank: record for record in read_records(folder, attempt)}
    collected = []
    for rank, failure in failures.items():
        if rank in records:
            collected.append(replace(records[rank], exit_code=records[rank].exit_code or failure.exitcode))
            continue
        collected.append(
            Failure(
                rank=rank,
                host=socket.gethostname(),
                time_ns=watch.deaths.get(failure.pid, failure.timestamp * 10**9),
                exit_code=failure.exitcode,
                stack=read_stack(folder, attempt, rank),
                stopped=failure.pid in watch.killed or (failure.exitcode == -signal.SIGTERM and len(failures) > 1),
            )
        )
    return collected


def run_node(argv: Sequence[str], *, report: bool, lease: bool = False, quiet: bool = False) -> int:
    """Run the ranks of one node until they end. Returns the exit code for the shell."""
    from torch.distributed import DistError
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    options = torchrun.parse_args(list(argv))
    _share_cores(int(options.nproc_per_node), verbose=not quiet and options.node_rank == 0)
    _quiet_torchrun()
    _prepare_restarts(options)
    folder = Path(tempfile.mkdtemp(prefix="slipstream-"))
    options.log_dir = str(folder / "torchrun")
    os.environ[brief.RECORDS] = str(folder)
    before = read_pressure()
    try:
        restarts = _ready_to_restart() if options.max_restarts else nullcontext()
        with restarts, RankWatch(folder, patient=":" in options.nnodes) as watch, _reporting_reaped_ranks(watch):
            if lease:
                _stop_with_stdin(watch)
            try:
                torchrun.run(options)
                return 0
            except ChildFailedError as error:
                after = read_pressure()
                failures = [with_reason(failure, before, after) for failure in _collect(error.failures, folder, watch)]
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
def _ready_to_restart() -> Iterator[None]:
    with _memory_of_host(), spare_ranks():
        yield


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


@contextmanager
def _reporting_reaped_ranks(watch: RankWatch) -> Iterator[None]:
    """Tell the watch of each failed rank that torchrun reaps: on a loaded machine torchrun does so before the watch reads the exit
    code.

    torchrun makes a ProcessFailure of each of them, before it restarts the ranks.
    """
    api: Any = importlib.import_module("torch.distributed.elastic.multiprocessing.api")
    plain = api.ProcessFailure

    class Reported(plain):  # type: ignore[misc, valid-type]
        def __post_init__(self) -> None:
            super().__post_init__()
            watch.on_reaped(self.pid, self.exitcode)

    api.ProcessFailure = Reported
    try:
        yield
    finally:
        api.ProcessFailure = plain


def _stop_with_stdin(watch: RankWatch) -> None:
    """Detach the ranks from stdin, and stop them when stdin ends."""
    lease = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)

    def wait() -> None:
        while os.read(lease, 4096):
            pass
        watch.stop_soon()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="slipstream-lease", daemon=True).start()


class RankWatch:
    """A context manager around an agent's run, on the main thread. `deaths`: pid -> time_ns. `killed`: the pids that it killed. It
    writes how each rank failed to `folder`, for the ranks of the next attempt, and passes SIGUSR1 on to the ranks. `patient`:
    torchrun also stops ranks when hosts join or leave, when they may be saving a checkpoint."""

    def __init__(self, folder: Path, *, patient: bool = False) -> None:
        self._folder, self._patient = folder, patient
        self.deaths: dict[int, int] = {}
        self.killed: set[int] = set()
        self._children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
        self._reads, self._writes = os.pipe()
        os.set_blocking(self._writes, False)
        self._selector = selectors.DefaultSelector()
        self._watched: dict[int, int] = {}  # pid -> pidfd
        self._doomed: set[int] = set()
        self._deadline: float | None = None
        self._stop_requested = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="slipstream-watch", daemon=True)

    def __enter__(self) -> RankWatch:
        self._old_wakeup = signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
        self._old_handler = signal.signal(signal.SIGUSR1, lambda number, frame: None)  # the thread gets it through the pipe
        if hasattr(os, "pidfd_open") and self._children.exists():
            self._selector.register(self._reads, selectors.EVENT_READ)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        signal.set_wakeup_fd(self._old_wakeup)
        signal.signal(signal.SIGUSR1, self._old_handler)
        self._closed.set()
        os.write(self._writes, b"\0")
        if self._thread.ident is not None:
            self._thread.join()
        for descriptor in (*self._watched.values(), self._reads, self._writes):
            os.close(descriptor)
        self._selector.close()

    def stop_soon(self) -> None:
        """Kill the ranks `GRACE_S` from now, for an agent that is stopped because another node failed."""
        os.write(self._writes, bytes([signal.SIGINT]))

    def on_reaped(self, pid: int, exit_code: int) -> None:
        """Record a failed rank that torchrun has reaped, unless this thread saw it die before (it knows more)."""
        stopped = pid in self.killed or exit_code == -signal.SIGTERM
        note_death(self._folder, pid, time.time_ns(), exit_code, stopped=stopped, overwrite=False)

    def _run(self) -> None:
        while not self._closed.is_set():
            self._adopt()
            for key, _ in self._selector.select(_SCAN_S):
                if key.fd == self._reads:
                    self._on_signals(os.read(self._reads, 64))
                else:
                    self._on_death(key.data)
            if self._deadline is None and not (self._stop_requested or self._patient) and self._watched and _is_stopping_ranks():
                self._set_deadline(GRACE_S)  # the failed rank died before it was adopted, or torchrun reaped it first
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._kill()

    def _adopt(self) -> None:
        """Watch new ranks: child processes that lead their own session."""
        try:
            pids = [int(word) for word in self._children.read_text().split()]
        except OSError:
            return
        for pid in pids:
            if pid in self._watched or pid in self.deaths:
                continue
            try:
                if os.getsid(pid) != pid:
                    continue
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            self._watched[pid] = descriptor
            self._selector.register(descriptor, selectors.EVENT_READ, pid)

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number == signal.SIGINT:
                self._set_deadline(0.0 if self._stop_requested else GRACE_S)  # a second request kills immediately
                self._stop_requested = True
            elif number == signal.SIGUSR1:
                for descriptor in self._watched.values():
                    signal.pidfd_send_signal(descriptor, number)
            elif number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                self._stop_requested = True

    def _on_death(self, pid: int) -> None:
        descriptor = self._watched.pop(pid)
        self._selector.unregister(descriptor)
        self.deaths[pid] = time.time_ns()
        try:
            status = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # torchrun has reaped it already; `_run` notices if torchrun stops the ranks
            status = None
        failed = status is not None and (status.si_code != os.CLD_EXITED or status.si_status != 0)
        if status is not None and failed:
            code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
            stopped = pid in self.killed or (code == -signal.SIGTERM and (self._deadline is not None or _is_stopping_ranks()))
            note_death(self._folder, pid, self.deaths[pid], code, stopped=stopped)
        os.close(descriptor)
        if failed and not self._stop_requested:
            self._set_deadline(GRACE_S)

    def _set_deadline(self, grace: float) -> None:
        deadline = time.monotonic() + grace
        if self._deadline is None:
            self._doomed = set(self._watched)
        if self._deadline is None or deadline < self._deadline:
            self._deadline = deadline

    def _kill(self) -> None:
        self._deadline = None
        for pid in self._doomed & set(self._watched):
            try:
                os.killpg(pid, signal.SIGKILL)
                self.killed.add(pid)
            except ProcessLookupError:
                pass


def _is_stopping_ranks() -> bool:
    """Whether torchrun, on the main thread, is stopping its ranks. Its stack is inspected, since it has no API for that."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_name in ("close", "_close") and "elastic/multiprocessing" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def main() -> None:
    argv = sys.argv[1:]
    flags = set()
    while argv and argv[0] in ("--report", "--lease", "--quiet"):
        flags.add(argv.pop(0))
    sys.exit(run_node(argv, report="--report" in flags, lease="--lease" in flags, quiet="--quiet" in flags))


if __name__ == "__main__":
    main()

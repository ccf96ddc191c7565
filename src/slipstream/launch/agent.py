"""The agent of one node: runs torch.distributed.run in this process and reports failures itself.

Started as `python -m slipstream.launch.agent [--report] [--lease] [--quiet] TORCHRUN-OPTIONS...`, or called by `run` for a job on
this host. With `--report` it sends failures to the launching process as marked lines; otherwise it prints the summary. With
`--lease` it stops at the end of stdin, so that a closed ssh connection stops its ranks.

Names of torch used here: `torch.distributed.run.{parse_args, run}`, `ChildFailedError.failures`, `SignalException`,
`RendezvousError`.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream.launch.failure import Failure, decode, encode, first, render, shell_code, with_reason
from slipstream.launch.watch import RankWatch
from slipstream.launch.worker import read_records, read_stack
from slipstream.launch.zygote import spare_ranks
from slipstream.world import brief
from slipstream.world.host import read_pressure

_POLL_S = 0.02  # seconds between polls of the ranks in a job of one host; with more, each poll asks the rendezvous's host
_SHARED_MEMORY, _KEPT = Path("/dev/shm"), "slipstream-memory-"


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


def main() -> None:
    argv = sys.argv[1:]
    flags = set()
    while argv and argv[0] in ("--report", "--lease", "--quiet"):
        flags.add(argv.pop(0))
    sys.exit(run_node(argv, report="--report" in flags, lease="--lease" in flags, quiet="--quiet" in flags))


if __name__ == "__main__":
    main()

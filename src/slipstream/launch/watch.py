"""Record when the ranks of an agent die, and kill the remaining ranks soon after the first failure.

torchrun polls its ranks ten times a second and waits 30 s after SIGTERM. This module's thread sees each death immediately (pidfd),
so that the order of failures is known. `GRACE_S` after the first failure, or after Ctrl-C, it sends SIGKILL to the remaining ranks:
a rank that is blocked in native code, or that catches SIGTERM, would delay the end. SIGTERM sent to the agent (by a scheduler that
preempts the job) keeps torchrun's longer grace period, since ranks may be saving a checkpoint.

Invariants: it kills only process groups that torchrun created for ranks, and only those of the failed attempt; it reaps no process
(torchrun does). On a kernel without pidfd or /proc/PID/task/PID/children it does nothing.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

from slipstream.launch.worker import note_death

GRACE_S = 2.5  # a rank that raises may need worker.EXIT_S to exit; the sum stays below the documented 5 s
_SCAN_S = 0.25


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

"""Watches the ranks of one agent die, and sees to it that the rest follow in time.

torchrun polls its ranks ten times a second and gives those that are left 30 s after SIGTERM. This thread sees
each death at once (pidfd), so that the order of failures is known, and ends with SIGKILL what is still there
`GRACE_S` after the first failure, or after Ctrl-C: a rank that is blocked in native code, or that catches
SIGTERM, would hold up the others. SIGTERM sent to the agent (a scheduler that preempts) keeps torchrun's own,
longer, grace: ranks may be saving a checkpoint.

Invariants: only process groups that torchrun made for a rank are killed, and only of the attempt that failed;
nobody is reaped here (torchrun does that). On a kernel without pidfd or /proc/PID/task/PID/children it does
nothing.
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

__all__ = ["GRACE_S", "Watch"]

GRACE_S = 2.5  # a raising rank may itself take worker.EXIT_S to end; together below the 5 s that are promised
_SCAN_S = 0.25


class Watch:
    """A context manager around an agent's run, on the main thread. `deaths` maps pid -> time_ns; `killed` are
    pids it ended. How each rank ended is noted in `folder`, for the ranks of the next attempt."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.deaths: dict[int, int] = {}
        self.killed: set[int] = set()
        self._children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
        self._reads, self._writes = os.pipe()
        os.set_blocking(self._writes, False)
        self._selector = selectors.DefaultSelector()
        self._watched: dict[int, int] = {}  # pid -> pidfd
        self._doomed: set[int] = set()
        self._deadline: float | None = None
        self._asked_to_stop = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="slipstream-watch", daemon=True)

    def __enter__(self) -> Watch:
        self._old_wakeup = signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
        if hasattr(os, "pidfd_open") and self._children.exists():
            self._selector.register(self._reads, selectors.EVENT_READ)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        signal.set_wakeup_fd(self._old_wakeup)
        self._closed.set()
        os.write(self._writes, b"\0")
        if self._thread.ident is not None:
            self._thread.join()
        for descriptor in (*self._watched.values(), self._reads, self._writes):
            os.close(descriptor)
        self._selector.close()

    def stop_soon(self) -> None:
        """Give the ranks `GRACE_S` from now; for an agent that was told to stop because of another node."""
        os.write(self._writes, bytes([signal.SIGINT]))

    def _run(self) -> None:
        while not self._closed.is_set():
            self._adopt()
            for key, _ in self._selector.select(_SCAN_S):
                if key.fd == self._reads:
                    self._on_signals(os.read(self._reads, 64))
                else:
                    self._on_death(key.data)
            if self._deadline is None and not self._asked_to_stop and self._watched and _is_stopping_ranks():
                self._begin(GRACE_S)  # the rank that failed was gone before it was adopted, or reaped before it was seen
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._kill()

    def _adopt(self) -> None:
        """Begin to watch ranks that have appeared: children that lead a session of their own."""
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
                if self._asked_to_stop:
                    self._begin(0.0)  # asked twice: at once
                self._begin(GRACE_S)
                self._asked_to_stop = True
            elif number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                self._asked_to_stop = True

    def _on_death(self, pid: int) -> None:
        descriptor = self._watched.pop(pid)
        self._selector.unregister(descriptor)
        self.deaths[pid] = time.time_ns()
        try:
            status = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # torchrun has reaped it already; `_run` sees what it makes of that
            status = None
        failed = status is not None and (status.si_code != os.CLD_EXITED or status.si_status != 0)
        if status is not None and failed:
            code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
            stopped = pid in self.killed or (code == -signal.SIGTERM and (self._deadline is not None or _is_stopping_ranks()))
            note_death(self._folder, pid, self.deaths[pid], code, stopped=stopped)
        os.close(descriptor)
        if failed and not self._asked_to_stop:
            self._begin(GRACE_S)

    def _begin(self, grace: float) -> None:
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
    """Whether torchrun, on the main thread, is in the midst of ending its ranks: seen by its stack, as it tells no one."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_name in ("close", "_close") and "elastic/multiprocessing" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False

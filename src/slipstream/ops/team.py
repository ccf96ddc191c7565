"""Teams of native threads (csrc/threads.h), for kernels that take a team."""

from __future__ import annotations

import ctypes
import os
import weakref

from slipstream.ops import build

MAX_THREADS = 64  # as in csrc/decoder.h
_PROCESS = os.getpid()


def openmp(*names: str) -> list[int] | None:
    """Addresses of functions of the OpenMP library on whose threads torch computes, if it is GNU's; None in a fork, which must not
    use its parent's. Between a model's products these threads wait for its next operation, awake for a while, on the cores that
    other threads would need."""
    loaded = ctypes.CDLL(None)
    if os.getpid() != _PROCESS or not all(hasattr(loaded, name) for name in names):
        return None
    return [ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value or 0 for name in names]


class Team:
    """Native threads that sleep between calls. The first call in a process starts them, because a fork does not copy its parent's.
    Raises ValueError for a number outside 1 to 64."""

    def __init__(self, threads: int) -> None:
        if not 1 <= threads <= MAX_THREADS:
            raise ValueError(f"cannot start {threads} threads; give between 1 and {MAX_THREADS}")
        self.threads = threads
        self._process = self._handle = 0
        self._free: weakref.finalize[..., Team] | None = None

    @property
    def handle(self) -> int:
        """The team for one call at a time. Raises MemoryError if the system has no more threads."""
        if self._process != os.getpid():
            self._start()
        return self._handle

    def close(self) -> None:
        """End the threads. No call may be running."""
        if self._free is not None:
            self._free()
        self._process = 0

    def _start(self) -> None:
        new = build.function("slipstream_team_new", ctypes.c_void_p, ctypes.c_int32)
        if not (handle := new(self.threads)):
            raise MemoryError(f"the system cannot start {self.threads} threads; give fewer (threads, OMP_NUM_THREADS)")
        self._handle, self._process = handle, os.getpid()
        self._free = weakref.finalize(self, _free, handle, self._process)


def _free(handle: int, process: int) -> None:
    """Free a team, but not in a fork, which must not wait for its parent's threads."""
    if os.getpid() == process:
        build.function("slipstream_team_free", None, ctypes.c_void_p)(handle)

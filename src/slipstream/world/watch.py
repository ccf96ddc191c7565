"""Hang detection: each rank's step, phase, unit and current wait, compared across ranks.

The engine and the transports write plain attributes, at no cost. Each wait sleeps in short slices and calls `Watch.check` between
them. A thread per engine (monitor.py) publishes the status in the process group's store once a beat, and reads the other ranks'
statuses only while this rank waits. The waiting ranks then raise PeerError:

gone        a rank's process has ended (peers.py) or has published that it failed: the error names it, within seconds.
standstill  every rank waits, none makes progress, and no operation has been entered by all its ranks, so none can complete.
            All ranks raise, with a table of rank, step, phase, unit. A slow transfer is not a standstill.
busy        some rank does not wait (it evaluates, saves, compiles): a warning names it every 30 seconds, and waits raise
            only after `timeout_s`.

A thread blocked inside one of torch's own collectives (a user's barrier, a checkpoint's) is recognized by its stack and counts as
waiting. It cannot be made to raise, so its process ends with the same message on stderr.

[Note: Who ended well] A rank whose script ends publishes that in the store, from an exit handler. A process that ended without
publishing was killed or crashed. If this rank waits for that process, it raises at once. If it waits for another rank first, it
raises after `patience_s`, so that the error names the first of a chain of failures.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist

from slipstream.world.brief import BriefError
from slipstream.world.mesh import Axis
from slipstream.world.peers import Peers, meet

if TYPE_CHECKING:
    from slipstream.world.monitor import StatusMonitor

_MOST_BEATS = 10.0  # beats by which the monitor's thread may be late
_STORE_PATIENCE = timedelta(seconds=5)  # the store's server may have ended with its process
_SLICE = 0.01  # seconds between two checks of what another process or thread does within moments
_LAST_WORDS = 3.0  # seconds at the script's end for operations with lost ranks to end


class PeerError(BriefError, RuntimeError):
    """A wait for other ranks failed: they will never join it, the timeout has passed, or (PeerLostError) they have ended."""


class PeerLostError(PeerError):
    """Another rank has ended or failed, so this one cannot continue. launch/failure.py knows the name: it is never the cause."""


@dataclass(slots=True)
class Ledger:
    """A process group's operations on this rank, for comparison across ranks. A transport writes it, the watch reads it."""

    name: str
    ranks: tuple[int, ...]
    group: Any
    launched: int = 0
    in_flight: dict[int, str] = field(default_factory=dict)  # number -> operation
    details: dict[int, str] = field(default_factory=dict)  # number -> text for the table of a hang, which may differ between ranks
    record: OperationLog | None = None  # a log that the user requested

    def launch(self, operation: str, nbytes: int = 0, sent: int = 0, detail: str = "") -> int:
        """nbytes: of the whole buffer; sent: the part of it that leaves this rank"""
        self.launched += 1
        self.in_flight[self.launched], self.details[self.launched] = operation, detail
        if self.record is not None:
            self.record.launch(self, self.launched, operation, nbytes, sent)
        return self.launched

    def finish(self, number: int) -> None:
        del self.in_flight[number], self.details[number]
        if self.record is not None:
            self.record.finish(self, number)


class OperationLog(Protocol):
    """Receives a ledger's operations (observe/traffic.py)."""

    def launch(self, ledger: Ledger, number: int, operation: str, nbytes: int, sent: int) -> None: ...

    def finish(self, ledger: Ledger, number: int) -> None: ...


class Waiter(Protocol):
    """A thread that waits for operations with other ranks."""

    def close(self, patience: float) -> None:
        """End the thread, or leave it after `patience` seconds."""


class Watch:
    """One engine's current position on this rank. `waits` counts entries and exits of waits, which shows progress."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.beat_s = 1.0
        self.standstill_s = 6.0  # seconds without progress on any rank
        self.name_busy_s = 30.0
        self.patience_s = 1.25
        self.step = 0
        self.phase = "idle"
        self.unit = ""
        self.wait_for = ""
        self.awaits: tuple[str, int] | None = None
        self.waits = 0
        self.waited_s = 0.0
        self.around: list[Callable[[str], AbstractContextManager[object]]] = []  # with a wait's purpose; entered until it ends
        self.failure: str | None = None  # if set, every wait raises with this text
        self.is_lost = True  # the failure is a lost rank: raise PeerLostError
        self.was_raised = False
        self.ledgers: list[Ledger] = []
        self.record: OperationLog | None = None  # also for future ledgers
        self.waiters: weakref.WeakSet[Waiter] = weakref.WeakSet()
        self.rank = 0
        self.names: Mapping[int, str] = {}  # rank -> its place on the axes, as text
        self.peers = Peers([])
        self.left: set[int] = set()  # ranks whose script ended normally
        self.asked: set[int] = set()  # ranks whose exit status the monitor has looked up since their processes ended
        self._pid = os.getpid()
        self._due = threading.Event()  # makes the monitor's thread check at once
        self.abandoned = False  # makes the monitor's thread end
        self._thread: threading.Thread | None = None
        self._monitor: StatusMonitor | None = None

    # -- called by the training thread --

    @contextmanager
    def waiting(self, operation: str, awaits: tuple[str, int] | None = None, detail: str = "") -> Iterator[None]:
        """Mark this rank as blocked in `operation`."""
        self.wait_for, self.awaits, self.waits = operation + detail, awaits, self.waits + 1
        start = time.perf_counter()
        try:
            with ExitStack() as stack:
                for around in self.around:
                    stack.enter_context(around(operation))
                yield
        finally:
            self.wait_for, self.awaits, self.waits = "", None, self.waits + 1
            self.waited_s += time.perf_counter() - start

    def check(self, since: float) -> None:
        """Raise PeerError if the wait that began at `since` cannot succeed or has timed out. Called between slices of a wait."""
        if self.failure is None:
            now = time.monotonic()
            self.note_lost_peer(now)
            if self.failure is None and now - since > self.timeout_s:
                self.is_lost = False
                self.failure = (
                    f"rank {self.rank} waited {self.timeout_s:.0f} s in {self._place()}; raise "
                    f'"slipstream": {{"timeout_s": ...}} if the other ranks may take longer'
                )
        if self.failure is not None:
            raise self._error()

    def is_gone(self, rank: int) -> bool:
        """Whether the rank's process, on this host, has ended."""
        return rank in self.peers.gone()

    def lost(self, error: BaseException | None = None) -> PeerError:
        """The error to raise if a rank has gone, or a connection broke with `error`. It names the first rank that went."""
        deadline = time.monotonic() + self.patience_s
        while self.failure is None and not self.peers.gone() and time.monotonic() < deadline:
            time.sleep(_SLICE)  # a process closes its connections before it has ended
        began, gone = time.monotonic(), list(self.peers.gone())
        self._due.set()
        while self.failure is None and not self.left and not all(self._is_known(rank, began) for rank in gone or [self.rank]):
            time.sleep(_SLICE)  # the monitor may still have to read the status that the rank published on exit
            gone = list(self.peers.gone())
        gone.sort(key=lambda rank: rank in self.left)
        if self.failure is None:
            self.failure = self.describe_lost(gone[0]) if gone else f"the connection to another rank broke: {error}"
        return self._error()

    @contextmanager
    def guard(self, phase: str) -> Iterator[None]:
        """Mark a phase that calls torch's own collectives. Their errors about a lost rank become a PeerError that names it."""
        before, self.phase = self.phase, phase
        try:
            yield
        except PeerError:
            raise
        except Exception as error:
            if is_lost_rank(error):
                raise self.lost(error) from error
            raise
        finally:
            self.phase = before

    def _error(self) -> PeerError:
        self.was_raised = True
        kind = PeerLostError if self.is_lost else PeerError
        return kind(f"{self.failure}\nrank {self.rank} waited in {self._place()}")

    def _place(self) -> str:
        waits = self.wait_for or "a collective of torch's"
        return f"{waits} (step {self.step}, {self.phase}, unit {self.unit or '-'})"

    def note_lost_peer(self, now: float) -> None:
        """Set `failure` if a peer ended more than `patience_s` ago and its script did not end normally."""
        for rank, when in self.peers.gone().items():
            if self.failure is None and rank not in self.left and now - when > self.patience_s and self._is_known(rank, when):
                self.failure = self.describe_lost(rank)

    def _is_known(self, rank: int, since: float) -> bool:
        """Whether the monitor has looked up how the script of an ended process ended, or can no longer be expected to.

        On a loaded machine the monitor's thread may be late by seconds, and the store may have ended with rank 0.
        """
        beats = _MOST_BEATS if rank in self.peers.gone() and not self.is_gone(0) else 1.5
        return rank in self.asked or time.monotonic() - since > beats * self.beat_s

    def describe_lost(self, rank: int) -> str:
        """The error text for a rank that has ended."""
        place = f"{self.names[rank]}, " if self.names.get(rank) else ""
        subject = f"rank {rank} ({place}pid {self.peers.pid(rank)})"
        if rank in self.left:
            return f"{subject} has ended its script, while other ranks still need it"
        return f"{subject} is gone: its process was killed, crashed, or exited without cleanup"

    # -- the monitor --

    def start(self, axis: Axis) -> None:
        """Start watching the ranks of `axis`. Collective."""
        if axis.size < 2:
            return
        from slipstream.world.monitor import StatusMonitor

        self.rank = axis.ranks[axis.index]
        self.peers = Peers(meet(axis))
        token = [uuid.uuid4().hex]
        dist.broadcast_object_list(token, src=axis.ranks[0], group=axis.group)
        shared: Any = dist.distributed_c10d._get_default_store()
        own = shared.clone()  # a separate connection, which no blocked call holds
        own.set_timeout(_STORE_PATIENCE)
        self._monitor = StatusMonitor(self, dist.distributed_c10d.PrefixStore(f"slipstream-{token[0]}", own), axis)
        self._thread = threading.Thread(target=self._monitor.run, args=(self._due,), name="slipstream-watch", daemon=True)
        self._thread.start()
        atexit.unregister(_leave_all)
        atexit.register(_leave_all)
        living.add(self)

    def stop(self) -> None:
        """Stop watching, when the engine is destroyed."""
        self.abandoned = True
        self._due.set()
        if self._thread is not None and os.getpid() == self._pid:
            self._thread.join(timeout=_STORE_PATIENCE.total_seconds())
        self._thread = self._monitor = None
        self.peers.close()
        self._keep_groups()
        _drop_default_group()
        living.discard(self)

    def abandon(self) -> None:
        """Stop watching after the engine was garbage-collected. May run on any thread, so it takes no lock."""
        self.abandoned = True

    def leave(self) -> None:
        """Publish how the script ended, and make sure that the interpreter can exit."""
        if os.getpid() != self._pid:  # a forked child's exit says nothing about this rank
            return
        monitor, self.abandoned = self._monitor, True
        self._due.set()
        if self._thread is not None:
            self._thread.join(timeout=_STORE_PATIENCE.total_seconds())
        if monitor is not None and not (self._thread and self._thread.is_alive()):
            monitor.say_goodbye(self)
        self._keep_groups()
        self._thread = self._monitor = None
        # A thread whose operation ends while the interpreter is ending would abort the process, so its exit code would be lost. The
        # lost rank's connections close within moments; a rank that hangs never ends the operation.
        until = time.monotonic() + _LAST_WORDS
        for waiter in list(self.waiters):
            waiter.close(max(0.0, until - time.monotonic()))

    def _keep_groups(self) -> None:
        """Leak process groups with operations in flight: their destructor would wait for operations that may never end."""
        for ledger in self.ledgers:
            if ledger.in_flight:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(ledger.group))


def _drop_default_group() -> None:
    """Remove the default process group from the default arguments of torch.distributed.nn.functional.

    torch's dynamo, which the first optimizer imports, imports that module, and `group=group.WORLD` keeps the group that exists then
    alive. Its threads outlive destroy_process_group until the interpreter ends, which may abort the process. None means the same
    group.
    """
    functional = sys.modules.get("torch.distributed.nn.functional")
    for function in vars(functional).values() if functional else ():
        if isinstance(defaults := getattr(function, "__defaults__", None), tuple):
            function.__defaults__ = tuple(None if isinstance(value, dist.ProcessGroup) else value for value in defaults)


living: weakref.WeakSet[Watch] = weakref.WeakSet()


def _leave_all() -> None:
    for watch in list(living):
        watch.leave()


def is_lost_rank(error: BaseException) -> bool:
    """Whether an exception, or one of its causes, is a transport's error for a lost peer."""
    signs = ("connection closed by peer", "connection reset by peer", "broken pipe", "was likely closed", "socket closed")
    cause: BaseException | None = error
    text = ""
    while cause is not None:
        text += f"{cause}\n"
        cause = cause.__cause__ or cause.__context__
    return any(sign in text.lower() for sign in signs)

"""What each rank is doing, for the day it hangs: step, phase, unit, and what it waits for.

The engine and the transports write plain attributes, which costs nothing. Every wait of ours sleeps in short slices and
asks `Watch.check` between them. A thread per engine tells the other ranks through the process group's store, once a
beat, and reads theirs only while this rank waits. What comes of it, always as a PeerError on every rank that waits:

gone        a rank's process has ended (peers.py), or it told on its way out that it failed: it is named, within seconds.
standstill  every rank waits, none has moved, and no operation is one that all its ranks have entered: they wait for what
            can never match. All raise, with a table of rank, step, phase, unit. A slow transfer is not a standstill.
busy        some rank does not wait (it evaluates, saves, compiles): it is named every 30 seconds and nothing is stopped
            before `timeout_s`.

A thread that blocks inside one of torch's own collectives (a barrier of the user's, a checkpoint's) is seen by its stack,
counts as waiting, and cannot be made to raise: its process is ended with the same message on stderr.

[Note: Who ended well] A rank that leaves its script says so in the store, from an exit handler. A process that has ended
without a word was killed or crashed. Where this rank needs it, that is an error at once; where it needs another first,
after `patience_s`, so that of a chain of failures the first is named.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from slipstream.brief import BriefError
from slipstream.mesh import Axis
from slipstream.zero.peers import Peers, meet

if TYPE_CHECKING:
    from slipstream.zero.monitor import Monitor

_STORE_PATIENCE = timedelta(seconds=5)  # the store's server may have gone with its process


class PeerError(BriefError):
    """This rank's wait for others is over: they will never join it, or take too long, or (PeerLostError) have gone."""


class PeerLostError(PeerError):
    """Another rank has ended or failed, so this one cannot go on. Never the cause: launch/failure.py knows the name."""


@dataclass(slots=True)
class Ledger:
    """A process group's operations on this rank, so that ranks can compare: a transport writes, the watch reads."""

    name: str
    ranks: tuple[int, ...]
    group: Any
    launched: int = 0
    in_flight: dict[int, str] = field(default_factory=dict)  # number -> what it is

    def launch(self, what: str) -> int:
        self.launched += 1
        self.in_flight[self.launched] = what
        return self.launched

    def finish(self, number: int) -> None:
        del self.in_flight[number]


class Watch:
    """One engine's whereabouts. `waits` counts entries and exits of waits, so that a standstill can be told from slowness."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.beat_s = 1.0
        self.standstill_s = 6.0  # how long all ranks must have stood still
        self.name_busy_s = 30.0
        self.patience_s = 1.25
        self.step = 0
        self.phase = "idle"
        self.unit = ""
        self.wait_for = ""
        self.awaits: tuple[str, int] | None = None
        self.waits = 0
        self.failure: str | None = None  # why every wait must end
        self.is_lost = True  # it is because a rank has gone
        self.was_raised = False
        self.ledgers: list[Ledger] = []
        self.rank = 0
        self.peers = Peers([])
        self.left: set[int] = set()  # ranks that ended in good order
        self._pid = os.getpid()
        self._stop = threading.Event()
        self.abandoned = False
        self._thread: threading.Thread | None = None
        self._monitor: Monitor | None = None

    # -- the hot side --

    @contextmanager
    def waiting(self, what: str, awaits: tuple[str, int] | None = None) -> Iterator[None]:
        """Mark this rank as blocked in `what`."""
        self.wait_for, self.awaits, self.waits = what, awaits, self.waits + 1
        try:
            yield
        finally:
            self.wait_for, self.awaits, self.waits = "", None, self.waits + 1

    def check(self, since: float) -> None:
        """Called between the slices of our own waits. Raises PeerError once the wait is hopeless or has been too long."""
        if self.failure is None:
            now = time.monotonic()
            for rank, when in self.peers.gone().items():
                if rank not in self.left and now - when > self.patience_s:
                    self.failure = self.obituary(rank)
                    break
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
        """What to raise when a rank that is needed has gone, or (`error`) when a connection broke. Names the first to go."""
        deadline = time.monotonic() + self.patience_s
        while self.failure is None and not self.peers.gone() and time.monotonic() < deadline:
            time.sleep(0.05)  # a process closes its connections before it has ended
        deadline = time.monotonic() + 1.5 * self.beat_s
        while self.failure is None and not self.left and time.monotonic() < deadline:
            time.sleep(0.05)  # until the monitor has read what the rank may have said on its way out
        gone = list(self.peers.gone())
        gone.sort(key=lambda rank: rank in self.left)
        if self.failure is None:
            self.failure = self.obituary(gone[0]) if gone else f"the connection to another rank broke: {error}"
        return self._error()

    @contextmanager
    def guard(self, phase: str) -> Iterator[None]:
        """Mark a phase that calls torch's own collectives, whose errors do not say which rank has gone."""
        before, self.phase = self.phase, phase
        try:
            yield
        except PeerError:
            raise
        except Exception as error:
            if is_lost(error):
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

    def obituary(self, rank: int) -> str:
        who = f"rank {rank} (pid {self.peers.pid(rank)})"
        if rank in self.left:
            return f"{who} has ended its script, while other ranks still need it"
        return f"{who} is gone: its process was killed, crashed, or left without a word"

    # -- the monitor --

    def start(self, axis: Axis) -> None:
        """Watch the ranks of `axis`, which share this engine. Collective."""
        if axis.size < 2:
            return
        from slipstream.zero.monitor import Monitor

        self.rank = axis.ranks[axis.index]
        self.peers = Peers(meet(axis))
        token = [uuid.uuid4().hex]
        dist.broadcast_object_list(token, src=axis.ranks[0], group=axis.group)
        shared: Any = dist.distributed_c10d._get_default_store()
        own = shared.clone()  # a connection that no blocked call holds
        own.set_timeout(_STORE_PATIENCE)
        self._monitor = Monitor(self, dist.distributed_c10d.PrefixStore(f"slipstream-{token[0]}", own), axis)
        self._thread = threading.Thread(target=self._monitor.run, args=(self._stop,), name="slipstream-watch", daemon=True)
        self._thread.start()
        atexit.unregister(_leave_all)
        atexit.register(_leave_all)
        living.add(self)

    def stop(self) -> None:
        """The engine is gone."""
        self._stop.set()
        if self._thread is not None and os.getpid() == self._pid:
            self._thread.join(timeout=_STORE_PATIENCE.total_seconds())
        self._thread = self._monitor = None
        self.peers.close()
        self._keep_groups()
        living.discard(self)

    def abandon(self) -> None:
        """The engine was dropped without a word. Called by the garbage collector, on any thread: takes no lock."""
        self.abandoned = True

    def leave(self) -> None:
        """The interpreter exits: say how, and see that it can."""
        if os.getpid() != self._pid:  # a forked child's exit says nothing about this rank
            return
        monitor = self._monitor
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=_STORE_PATIENCE.total_seconds())
        if monitor is not None and not (self._thread and self._thread.is_alive()):
            monitor.say_goodbye(self)
        self._keep_groups()
        self._thread = self._monitor = None

    def _keep_groups(self) -> None:
        """A process group's destructor waits for its operations: one whose operations can never end must not be destroyed."""
        for ledger in self.ledgers:
            if ledger.in_flight:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(ledger.group))


living: weakref.WeakSet[Watch] = weakref.WeakSet()


def _leave_all() -> None:
    for watch in list(living):
        watch.leave()


def is_lost(error: BaseException) -> bool:
    """Whether an exception, or what caused it, is a transport's word for a peer that has gone."""
    signs = ("connection closed by peer", "connection reset by peer", "broken pipe", "was likely closed", "socket closed")
    cause: BaseException | None = error
    text = ""
    while cause is not None:
        text += f"{cause}\n"
        cause = cause.__cause__ or cause.__context__
    return any(sign in text.lower() for sign in signs)

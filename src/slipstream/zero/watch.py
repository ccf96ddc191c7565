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
import json
import logging
import os
import sys
import threading
import time
import traceback
import uuid
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from types import FrameType
from typing import Any

import torch.distributed as dist

from slipstream.mesh import Axis
from slipstream.zero.peers import Peers, meet

logger = logging.getLogger(__name__)

_STORE_PATIENCE = timedelta(seconds=5)  # the store's server may have gone with its process
_C10D = os.path.join("torch", "distributed", "distributed_c10d.py")


class PeerError(RuntimeError):
    """Another rank died, failed, or will never join the operation that this rank waits in."""


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


@dataclass(slots=True)
class Whereabouts:
    """One rank's last word."""

    step: int
    phase: str
    unit: str
    wait_for: str  # "" while it runs
    moved: str  # differs whenever the rank has moved
    awaits: tuple[str, int] | None  # the ledger and number of the operation that it waits for
    ledgers: dict[str, tuple[int, dict[str, str]]]  # name -> launched, in flight


class Watch:
    """One engine's whereabouts. `waits` counts entries and exits of waits, so that a standstill can be told from slowness."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.beat_s = 1.0
        self.standstill_s = 6.0  # how long all ranks must have stood still
        self.name_busy_s = 30.0
        self.patience_s = 2.0
        self.step = 0
        self.phase = "idle"
        self.unit = ""
        self.wait_for = ""
        self.awaits: tuple[str, int] | None = None
        self.waits = 0
        self.failure: str | None = None  # why every wait must end
        self.ledgers: list[Ledger] = []
        self.rank = 0
        self.peers = Peers([])
        self.left: set[int] = set()  # ranks that ended in good order
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._abandoned = False
        self._thread: threading.Thread | None = None
        self._monitor: _Monitor | None = None

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
                    self.failure = self._obituary(rank)
                    break
            if now - since > self.timeout_s:
                raise PeerError(
                    f"rank {self.rank} waited {self.timeout_s:.0f} s in {self._place()}; raise "
                    f'"slipstream": {{"timeout_s": ...}} if the other ranks may take longer'
                )
        if self.failure is not None:
            raise PeerError(f"{self.failure}\nrank {self.rank} waited in {self._place()}")

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
            self.failure = self._obituary(gone[0]) if gone else f"the connection to another rank broke: {error}"
        return PeerError(f"{self.failure}\nrank {self.rank} waited in {self._place()}")

    @contextmanager
    def guard(self, phase: str) -> Iterator[None]:
        """Mark a phase that calls torch's own collectives, whose errors do not say which rank has gone."""
        before, self.phase = self.phase, phase
        try:
            yield
        except PeerError:
            raise
        except Exception as error:
            if _is_lost(error):
                raise self.lost(error) from error
            raise
        finally:
            self.phase = before

    def _place(self) -> str:
        waits = self.wait_for or "a collective of torch's"
        return f"{waits} (step {self.step}, {self.phase}, unit {self.unit or '-'})"

    def _obituary(self, rank: int) -> str:
        who = f"rank {rank} (pid {self.peers.pid(rank)})"
        if rank in self.left:
            return f"{who} has ended its script, while other ranks still need it"
        return f"{who} is gone: its process was killed, crashed, or left without a word"

    # -- the monitor --

    def start(self, axis: Axis) -> None:
        """Watch the ranks of `axis`, which share this engine. Collective."""
        if axis.size < 2:
            return
        self.rank = axis.ranks[axis.index]
        self.peers = Peers(meet(axis))
        token = [uuid.uuid4().hex]
        dist.broadcast_object_list(token, src=axis.ranks[0], group=axis.group)
        shared = dist.distributed_c10d._get_default_store()
        own = shared.clone() if hasattr(shared, "clone") else shared  # a connection that no blocked call holds
        own.set_timeout(_STORE_PATIENCE)
        self._monitor = _Monitor(self, dist.PrefixStore(f"slipstream-{token[0]}", own), axis)
        self._thread = threading.Thread(target=self._monitor.run, args=(self._stop,), name="slipstream-watch", daemon=True)
        self._thread.start()
        if not _living:
            atexit.register(_leave_all)
        _living.add(self)

    def stop(self) -> None:
        """The engine is gone."""
        self._stop.set()
        if self._thread is not None and os.getpid() == self._pid:
            self._thread.join(timeout=_STORE_PATIENCE.total_seconds())
        self._thread = self._monitor = None
        self.peers.close()
        _living.discard(self)

    def abandon(self) -> None:
        """The engine was dropped without a word. Called by the garbage collector, on any thread: takes no lock."""
        self._abandoned = True

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
        for ledger in self.ledgers:
            if ledger.in_flight:  # its destructor would wait for them
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(ledger.group))
        self._thread = self._monitor = None


_living: weakref.WeakSet[Watch] = weakref.WeakSet()


def _leave_all() -> None:
    for watch in list(_living):
        watch.leave()


class _Monitor:
    """The thread's side of a Watch, which it must not keep alive."""

    def __init__(self, watch: Watch, store: Any, axis: Axis) -> None:
        self.watch, self.store = weakref.ref(watch), store
        self.ranks, self.index, self.group = axis.ranks, axis.index, axis.group
        self.subject = threading.get_ident()  # the thread that trains
        self.seen: dict[int, tuple[str, float]] = {}  # index -> (moved, since when)
        self.named_at = 0.0
        self.verdict: tuple[float, str] | None = None  # when to fail (wall clock, so that all ranks do at once), and why
        self.failed_at: float | None = None

    def run(self, stop: threading.Event) -> None:
        beat_s = 0.0
        while not stop.wait(beat_s):
            watch = self.watch()
            if watch is None or watch._abandoned:
                break
            beat_s = watch.beat_s
            try:
                self._beat(watch)
            except (RuntimeError, ValueError, OSError):  # the store went with the process that held it
                if stop.is_set():
                    return
            self._act(watch)
            del watch

    def _beat(self, watch: Watch) -> None:
        if self._storeless(watch):
            return
        here = self._whereabouts(watch)
        self.store.set(f"at{self.index}", json.dumps(asdict(here)))
        for rank in watch.peers.gone():
            if rank not in watch.left and self.store.check([f"left{rank}"]):
                watch.left.add(rank)
        if not here.wait_for:
            self.seen.clear()
            return
        if self.verdict is None and self.store.check(["failure"]):
            at, text = json.loads(self.store.get("failure"))
            self.verdict = (at, text)
        if self.verdict is None:
            self._look(watch)

    def _act(self, watch: Watch) -> None:
        """Bring a failure about, at its time; and see to a rank that cannot raise because torch holds it."""
        if self.verdict is not None and watch.failure is None:
            left = self.verdict[0] - time.time()
            if 0 < left < 2 * watch.beat_s:
                time.sleep(left)
            if left < 2 * watch.beat_s:
                watch.failure = self.verdict[1]
        blocked = self._blocked() if not watch.wait_for else None
        if blocked is None:
            self.failed_at = None
            return
        now = time.monotonic()
        if watch.failure is None:
            for rank, when in watch.peers.gone().items():
                if rank not in watch.left and now - when > watch.patience_s:
                    watch.failure = watch._obituary(rank)
        if watch.failure is not None:
            self.failed_at = self.failed_at or now
            if now - self.failed_at > watch.patience_s:
                _end_process(watch, blocked)

    @staticmethod
    def _storeless(watch: Watch) -> bool:
        """Rank 0 may have held the store; to ask it then would only fill stderr with torch's warnings."""
        return watch.is_gone(0)

    def say_goodbye(self, watch: Watch) -> None:
        """Tell how this rank leaves its script."""
        if self._storeless(watch):
            return
        error = getattr(sys, "last_value", None)
        try:
            if error is None:
                self.store.set(f"left{watch.rank}", "")
            else:
                text = str(error) if isinstance(error, PeerError) else f"rank {watch.rank} failed: {type(error).__name__}: {error}"
                self.store.compare_set("failure", "", json.dumps((time.time(), text)))
                if watch.rank == 0:  # the store may end with this process
                    time.sleep(1.5 * watch.beat_s)
        except (RuntimeError, ValueError, OSError):
            return

    def _blocked(self) -> FrameType | None:
        """The training thread's frame inside torch's collectives, if it is there."""
        frame = sys._current_frames().get(self.subject)
        return frame if frame is not None and frame.f_code.co_filename.endswith(_C10D) else None

    def _whereabouts(self, watch: Watch) -> Whereabouts:
        wait_for, moved = watch.wait_for, f"{watch.waits}"
        for other in list(_living):
            if other is not watch and other.wait_for and not wait_for:
                wait_for, moved = f"another engine's {other.wait_for}", f"{moved} {other.waits}"
        blocked = self._blocked() if not wait_for else None
        if blocked is not None:
            group = dist.group.WORLD if dist.is_initialized() else self.group
            numbers = {g: g._get_sequence_number_for_group() for g in (group, self.group) if g is not None}
            wait_for = f"torch's {blocked.f_code.co_name}"
            moved = f"{moved} {blocked.f_lasti} {sum(numbers.values())}"
        ledgers = {book.name: (book.launched, {str(n): what for n, what in list(book.in_flight.items())}) for book in watch.ledgers}
        return Whereabouts(watch.step, watch.phase, watch.unit, wait_for, moved, watch.awaits, ledgers)

    def _look(self, watch: Watch) -> None:
        keys = [f"at{index}" for index in range(len(self.ranks))]
        if not self.store.check(keys):
            return
        everyone = [Whereabouts(**json.loads(text)) for text in self.store.multi_get(keys)]
        now = time.monotonic()
        for index, there in enumerate(everyone):
            moved, since = self.seen.get(index, ("", now))
            self.seen[index] = (there.moved, since if moved == there.moved else now)
        still = min(now - since for _, since in self.seen.values())
        waiting = [there for there in everyone if there.wait_for]
        if len(waiting) == len(everyone):
            if still > watch.standstill_s and not self._can_move(watch, everyone):
                text = (
                    "all ranks wait for each other in operations that can never match (they took different numbers of "
                    "forwards, backwards or steps, or called collective methods on some ranks only):\n" + self._table(everyone)
                )
                self.store.compare_set("failure", "", json.dumps((time.time() + 2.5 * watch.beat_s, text)))
                if self.index == 0:
                    logger.error("%s", text)
            return
        waited = now - self.seen[self.index][1]
        first_waiting = next(index for index, there in enumerate(everyone) if there.wait_for or index == self.index)
        if waited > watch.name_busy_s and now - self.named_at > watch.name_busy_s and first_waiting == self.index:
            self.named_at = now
            busy = [rank for rank, there in zip(self.ranks, everyone, strict=True) if not there.wait_for]
            who = f"rank {busy[0]} has" if len(busy) == 1 else f"ranks {busy} have"
            logger.warning("%s been busy for %.0f s while others wait:\n%s", who, waited, self._table(everyone))

    def _can_move(self, watch: Watch, everyone: Sequence[Whereabouts]) -> bool:
        """Whether some wait may still end by itself: all its ranks have entered the same operation."""
        waits = {there.wait_for for there in everyone}
        if len(waits) == 1 and next(iter(waits)).startswith("torch's "):
            return True  # whether they match is not known
        books = {book.name: book for book in watch.ledgers}
        for there in everyone:
            if there.awaits is None:
                continue
            name, number = there.awaits
            if name not in books:
                return True  # another row or column of the mesh: not ours to judge
            members = [other for rank, other in zip(self.ranks, everyone, strict=True) if rank in books[name].ranks]
            entered = [name in other.ledgers and other.ledgers[name][0] >= number for other in members]
            kinds = {other.ledgers[name][1].get(str(number)) for other in members if name in other.ledgers} - {None}
            if all(entered) and len(kinds) == 1:
                return True
        return False

    def _table(self, everyone: Sequence[Whereabouts]) -> str:
        rows = [("rank", "step", "phase", "unit", "waits in")]
        rows += [
            (str(rank), str(there.step), there.phase, there.unit or "-", there.wait_for or "(runs)")
            for rank, there in zip(self.ranks, everyone, strict=True)
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def _is_lost(error: BaseException) -> bool:
    """Whether an exception, or what caused it, is a transport's word for a peer that has gone."""
    signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection was likely closed", "Socket closed")
    cause: BaseException | None = error
    text = ""
    while cause is not None:
        text += f"{cause}\n"
        cause = cause.__cause__ or cause.__context__
    return any(sign.lower() in text.lower() for sign in signs)


def _end_process(watch: Watch, frame: FrameType) -> None:
    stack = "".join(traceback.format_stack(frame))
    text = (
        f"PeerError: {watch.failure}\nrank {watch.rank} is inside torch's {frame.f_code.co_name}, which cannot be made to "
        f"raise, and ends here:\n{stack}"
    )
    os.write(2, text.encode(errors="replace"))
    os._exit(1)

"""The monitor thread of an engine's Watch: publishes this rank's status, and reads the other ranks' while this one waits.

All communication goes through the process group's store, over a separate connection. The thread must not keep the Watch alive,
because an engine may be dropped without `destroy()`. It never raises in the training thread; it only sets `Watch.failure`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

import torch.distributed as dist

from slipstream.world.brief import tell
from slipstream.world.mesh import Axis
from slipstream.world.watch import PeerLostError, Watch, living

logger = logging.getLogger(__name__)

_MOST_MISSES = 3
_STILL = 3  # statuses that a rank publishes without progress before it counts as standing still
_NOTICE = 2.5  # beats between the decision to fail and the failure, so that all ranks can read it
_SLICE = 0.02  # seconds between two checks whether the others have read it
_C10D = os.path.join("torch", "distributed", "distributed_c10d.py")


@dataclass(slots=True)
class RankStatus:
    """One rank's last published status."""

    number: int  # number of statuses published before
    step: int
    phase: str
    unit: str
    wait_for: str  # "" while it runs
    moved: str  # changes whenever the rank makes progress
    awaits: tuple[str, int] | None  # the ledger and number of the operation that it waits for
    ledgers: dict[str, tuple[list[int], int, dict[str, str]]]  # name -> ranks, launched, in flight


@dataclass(slots=True)
class Seen:
    """What one rank's statuses have shown since this rank began to wait. Times are in seconds on this rank's clock.

    [Note: Silent ranks] A stopped process (SIGSTOP, a debugger, a suspended host) publishes nothing, and its last status, perhaps
    "waits", says nothing about it. So a rank stands still only if it keeps publishing. Statuses from before a silence do not count,
    because its monitor may wake before its training does.
    """

    moved: str
    since: float  # when `moved` changed
    number: int  # number of the status in which it changed
    last: int = -1  # number of the last status
    heard: float = 0.0  # when the last status arrived

    def add(self, status: RankStatus, now: float, standstill_s: float) -> None:
        if status.moved != self.moved or (status.number != self.last and self.is_silent(now, standstill_s)):
            self.moved, self.since, self.number = status.moved, now, status.number
        if status.number != self.last:
            self.last, self.heard = status.number, now

    def is_still(self, now: float, standstill_s: float) -> bool:
        return now - self.since > standstill_s and self.last - self.number >= _STILL and not self.is_silent(now, standstill_s)

    def is_silent(self, now: float, standstill_s: float) -> bool:
        return now - self.heard > standstill_s / 2


class StatusMonitor:
    """The monitor thread's state. Refers to the Watch weakly."""

    def __init__(self, watch: Watch, store: Any, axis: Axis) -> None:
        self.watch, self.store = weakref.ref(watch), store
        self.ranks, self.index, self.group = axis.ranks, axis.index, axis.group
        self.subject = threading.get_ident()  # the training thread
        self.names = watch.names
        self.seen: dict[int, Seen] = {}  # rank index -> what its statuses showed
        self.published = 0
        self.named_at = 0.0
        # When to fail (wall clock, so that all ranks fail together), whether a rank was lost, and the error text
        self.verdict: tuple[float, bool, str] | None = None
        self.failed_at: float | None = None
        self.looked_up: set[int] = set()  # ranks that are gone, whose end the store has been asked about
        self.misses = 0  # consecutive failures to reach the store

    def run(self, due: threading.Event) -> None:
        """Check once a beat, and whenever `due` is set."""
        beat_s = 0.0
        while True:
            if due.wait(beat_s):
                due.clear()
            watch = self.watch()
            if watch is None or watch.abandoned:
                break
            beat_s = watch.beat_s
            try:
                self._beat(watch)
                self.misses = 0
            except (RuntimeError, ValueError, OSError):  # the process that served the store has ended
                self.misses += 1
            self._act(watch)
            del watch

    def _beat(self, watch: Watch) -> None:
        if self._storeless(watch):
            return
        status = self._own_status(watch)
        self.store.set(f"at{self.index}", json.dumps(asdict(status)))
        self.published += 1
        gone = list(watch.peers.gone())
        for rank in gone:
            if rank not in watch.left and self.store.check([f"left{rank}"]):
                watch.left.add(rank)
        if self.verdict is None and self.store.check(["failure"]):
            at, is_lost, text = json.loads(self.store.get("failure"))
            self.store.set(f"heard{self.index}", "")
            self.verdict = (min(at, time.time() + _NOTICE * watch.beat_s), is_lost, text)  # another host's clock may be ahead
        self.looked_up.update(gone)
        if not status.wait_for:
            self.seen.clear()
            return
        if self.verdict is None:
            self._look(watch)

    def _act(self, watch: Watch) -> None:
        """Set `watch.failure` at the agreed time. End the process if it cannot raise because it is blocked inside torch."""
        if self.verdict is not None and watch.failure is None:
            left = self.verdict[0] - time.time()
            if 0 < left < 2 * watch.beat_s:
                time.sleep(left)
            if left < 2 * watch.beat_s:
                _, watch.is_lost, watch.failure = self.verdict
                if self.index == 0 and not watch.is_lost:
                    logger.error("%s", watch.failure)
        watch.asked.update(self.looked_up)  # after `failure` is set: `Watch.lost` waits for either
        blocked = self._blocked() if not watch.wait_for else None
        if blocked is None:
            self.failed_at = None
            return
        now = time.monotonic()
        watch.note_lost_peer(now)
        if watch.failure is not None and not watch.was_raised:
            self.failed_at = self.failed_at or now
            if now - self.failed_at > watch.patience_s:
                _end_process(watch, blocked)

    def _storeless(self, watch: Watch) -> bool:
        """Whether the store is lost, perhaps with rank 0. Asking it would only fill stderr with torch's warnings."""
        return self.misses >= _MOST_MISSES or watch.is_gone(0)

    def say_goodbye(self, watch: Watch) -> None:
        """Publish how this rank's script ended."""
        if self._storeless(watch):
            return
        error = getattr(sys, "last_value", None)
        try:
            if error is None:
                self.store.set(f"left{watch.rank}", "")
            else:
                text = f"rank {watch.rank} failed: {type(error).__name__}: {error}"
                if isinstance(error, PeerLostError):  # name the rank that failed first
                    text = str(error).splitlines()[0]
                self.store.compare_set("failure", "", json.dumps((time.time(), True, text)))
                if watch.rank == 0:  # the store may end with this process
                    self._wait_until_heard(watch)
        except (RuntimeError, ValueError, OSError, KeyboardInterrupt):
            return

    def _wait_until_heard(self, watch: Watch) -> None:
        """Keep the store alive until the living ranks have read the failure, at most as long as a waiting rank may take."""
        until, others = time.monotonic() + 1.5 * watch.beat_s, dict(enumerate(self.ranks))
        while time.monotonic() < until:
            gone = watch.peers.gone()
            if all(rank in {watch.rank, *gone} or self.store.check([f"heard{index}"]) for index, rank in others.items()):
                return
            time.sleep(_SLICE)

    def _blocked(self) -> FrameType | None:
        """The training thread's frame inside one of torch's collectives, or None."""
        frame = sys._current_frames().get(self.subject)
        return frame if frame is not None and frame.f_code.co_filename.endswith(_C10D) else None

    def _own_status(self, watch: Watch) -> RankStatus:
        wait_for, moved = watch.wait_for, f"{watch.waits}"
        for other in list(living):
            if other is not watch and other.wait_for and not wait_for:
                wait_for, moved = f"another engine's {other.wait_for}", f"{moved} {other.waits}"
        blocked = self._blocked() if not wait_for else None
        if blocked is not None:
            group = dist.group.WORLD if dist.is_initialized() else self.group
            groups: set[Any] = {group, self.group} - {None}
            numbers = [g._get_sequence_number_for_group() for g in groups]
            wait_for = f"torch's {blocked.f_code.co_name}"
            moved = f"{moved} {blocked.f_lasti} {sum(numbers)}"
        ledgers = {
            ledger.name: (
                list(ledger.ranks),
                ledger.launched,
                {str(n): operation for n, operation in list(ledger.in_flight.items())},
            )
            for ledger in watch.ledgers
        }
        return RankStatus(self.published, watch.step, watch.phase, watch.unit, wait_for, moved, watch.awaits, ledgers)

    def _look(self, watch: Watch) -> None:
        keys = [f"at{index}" for index in range(len(self.ranks))]
        if not self.store.check(keys):
            return
        statuses = [RankStatus(**json.loads(text)) for text in self.store.multi_get(keys)]
        now = time.monotonic()
        for index, status in enumerate(statuses):
            seen = self.seen.setdefault(index, Seen(status.moved, now, status.number))
            seen.add(status, now, watch.standstill_s)
            if seen.is_silent(now, watch.standstill_s):
                status.wait_for, status.awaits = "", None
        if not all(status.wait_for for status in statuses):
            self._warn_of_busy(watch, statuses, now)
            return
        if all(seen.is_still(now, watch.standstill_s) for seen in self.seen.values()) and not self._can_move(statuses):
            text = (
                "all ranks wait for each other in operations that can never match (they had inputs of different sizes, "
                "took different numbers of forwards, backwards or steps, or called collective methods on some ranks only):\n"
                + self._table(statuses)
            )
            self.store.compare_set("failure", "", json.dumps((time.time() + _NOTICE * watch.beat_s, False, text)))

    def _warn_of_busy(self, watch: Watch, statuses: Sequence[RankStatus], now: float) -> None:
        """Warn, on the first waiting rank, of the ranks that keep it waiting."""
        waited = now - self.seen[self.index].since
        first_waiting = next(index for index, status in enumerate(statuses) if status.wait_for or index == self.index)
        if waited > watch.name_busy_s and now - self.named_at > watch.name_busy_s and first_waiting == self.index:
            self.named_at = now
            busy = [rank for rank, status in zip(self.ranks, statuses, strict=True) if not status.wait_for]
            subject = f"rank {busy[0]} has" if len(busy) == 1 else f"ranks {busy} have"
            silent = [index for index, seen in self.seen.items() if seen.is_silent(now, watch.standstill_s)]
            logger.warning("%s been busy for %.0f s while others wait:\n%s", subject, waited, self._table(statuses, silent))

    def _can_move(self, statuses: Sequence[RankStatus]) -> bool:
        """Whether some wait may still end by itself, because all its ranks have entered the same operation."""
        waits = {status.wait_for for status in statuses}
        if len(waits) == 1 and next(iter(waits)).startswith("torch's "):
            return True  # unknown: they may match
        by_rank = dict(zip(self.ranks, statuses, strict=True))
        for status in statuses:
            if status.awaits is None:
                continue
            name, number = status.awaits
            ledgers = [by_rank[rank].ledgers.get(name) for rank in status.ledgers[name][0]]
            entered = [ledger is not None and ledger[1] >= number for ledger in ledgers]
            kinds = {ledger[2].get(str(number)) for ledger in ledgers if ledger is not None} - {None}
            if all(entered) and len(kinds) == 1:
                return True
        return False

    def _table(self, statuses: Sequence[RankStatus], silent: Sequence[int] = ()) -> str:
        rows: list[tuple[str, ...]] = [("rank", "place", "step", "phase", "unit", "waits in")]
        for index, (rank, status) in enumerate(zip(self.ranks, statuses, strict=True)):
            waits = "(gives no sign: stopped?)" if index in silent else status.wait_for or "(runs)"
            rows.append((str(rank), self.names.get(rank, ""), str(status.step), status.phase, status.unit or "-", waits))
        if not self.names:
            rows = [(row[0], *row[2:]) for row in rows]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def _end_process(watch: Watch, frame: FrameType) -> None:
    kind = "PeerLostError" if watch.is_lost else "PeerError"
    text = (
        f"{kind}: {watch.failure}\nrank {watch.rank} is inside torch's {frame.f_code.co_name}, which cannot be made to "
        f"raise, so its process ends here\n"
    )
    message = tell(text, traceback.extract_stack(frame), f"{''.join(traceback.format_stack(frame))}{text}")
    os.write(2, message.encode(errors="replace"))
    os._exit(1)

"""The thread beside an engine's Watch: tells the other ranks where this one is, and looks at theirs while it waits.

Everything goes through the process group's store, over a connection of its own. The thread must not keep the Watch alive,
for an engine may be dropped without a word; it never raises in the thread that trains, it only sets `Watch.failure`.
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

from slipstream.brief import tell
from slipstream.mesh import Axis
from slipstream.zero.watch import PeerLostError, Watch, living

logger = logging.getLogger(__name__)

_MOST_MISSES = 3
_NOTICE = 2.5  # beats from a verdict to its execution, so that all ranks have read it
_C10D = os.path.join("torch", "distributed", "distributed_c10d.py")


@dataclass(slots=True)
class Whereabouts:
    """One rank's last word."""

    step: int
    phase: str
    unit: str
    wait_for: str  # "" while it runs
    moved: str  # differs whenever the rank has moved
    awaits: tuple[str, int] | None  # the ledger and number of the operation that it waits for
    ledgers: dict[str, tuple[list[int], int, dict[str, str]]]  # name -> ranks, launched, in flight


class Monitor:
    """The thread's side of a Watch, which it must not keep alive."""

    def __init__(self, watch: Watch, store: Any, axis: Axis) -> None:
        self.watch, self.store = weakref.ref(watch), store
        self.ranks, self.index, self.group = axis.ranks, axis.index, axis.group
        self.subject = threading.get_ident()  # the thread that trains
        self.seen: dict[int, tuple[str, float]] = {}  # index -> (moved, since when)
        self.named_at = 0.0
        # When to fail (wall clock, so that all ranks do at once), whether because a rank has gone, and why
        self.verdict: tuple[float, bool, str] | None = None
        self.failed_at: float | None = None
        self.misses = 0  # how often in a row the store has not answered

    def run(self, stop: threading.Event) -> None:
        beat_s = 0.0
        while not stop.wait(beat_s):
            watch = self.watch()
            if watch is None or watch.abandoned:
                break
            beat_s = watch.beat_s
            try:
                self._beat(watch)
                self.misses = 0
            except (RuntimeError, ValueError, OSError):  # the store went with the process that held it
                self.misses += 1
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
            at, is_lost, text = json.loads(self.store.get("failure"))
            self.verdict = (min(at, time.time() + _NOTICE * watch.beat_s), is_lost, text)  # another host's clock may be off
        if self.verdict is None:
            self._look(watch)

    def _act(self, watch: Watch) -> None:
        """Bring a failure about, at its time; and see to a rank that cannot raise because torch holds it."""
        if self.verdict is not None and watch.failure is None:
            left = self.verdict[0] - time.time()
            if 0 < left < 2 * watch.beat_s:
                time.sleep(left)
            if left < 2 * watch.beat_s:
                _, watch.is_lost, watch.failure = self.verdict
                if self.index == 0 and not watch.is_lost:
                    logger.error("%s", watch.failure)
        blocked = self._blocked() if not watch.wait_for else None
        if blocked is None:
            self.failed_at = None
            return
        now = time.monotonic()
        if watch.failure is None:
            for rank, when in watch.peers.gone().items():
                if rank not in watch.left and now - when > watch.patience_s:
                    watch.failure = watch.obituary(rank)
        if watch.failure is not None and not watch.was_raised:
            self.failed_at = self.failed_at or now
            if now - self.failed_at > watch.patience_s:
                _end_process(watch, blocked)

    def _storeless(self, watch: Watch) -> bool:
        """Rank 0 may have held the store; to ask one that is gone only fills stderr with torch's warnings."""
        return self.misses >= _MOST_MISSES or watch.is_gone(0)

    def say_goodbye(self, watch: Watch) -> None:
        """Tell how this rank leaves its script."""
        if self._storeless(watch):
            return
        error = getattr(sys, "last_value", None)
        try:
            if error is None:
                self.store.set(f"left{watch.rank}", "")
            else:
                text = f"rank {watch.rank} failed: {type(error).__name__}: {error}"
                if isinstance(error, PeerLostError):  # it names the rank that began it
                    text = str(error).splitlines()[0]
                self.store.compare_set("failure", "", json.dumps((time.time(), True, text)))
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
            book.name: (list(book.ranks), book.launched, {str(n): what for n, what in list(book.in_flight.items())})
            for book in watch.ledgers
        }
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
            if still > watch.standstill_s and not self._can_move(everyone):
                text = (
                    "all ranks wait for each other in operations that can never match (they took different numbers of "
                    "forwards, backwards or steps, or called collective methods on some ranks only):\n" + self._table(everyone)
                )
                self.store.compare_set("failure", "", json.dumps((time.time() + _NOTICE * watch.beat_s, False, text)))
            return
        waited = now - self.seen[self.index][1]
        first_waiting = next(index for index, there in enumerate(everyone) if there.wait_for or index == self.index)
        if waited > watch.name_busy_s and now - self.named_at > watch.name_busy_s and first_waiting == self.index:
            self.named_at = now
            busy = [rank for rank, there in zip(self.ranks, everyone, strict=True) if not there.wait_for]
            who = f"rank {busy[0]} has" if len(busy) == 1 else f"ranks {busy} have"
            logger.warning("%s been busy for %.0f s while others wait:\n%s", who, waited, self._table(everyone))

    def _can_move(self, everyone: Sequence[Whereabouts]) -> bool:
        """Whether some wait may still end by itself: all its ranks have entered the same operation."""
        waits = {there.wait_for for there in everyone}
        if len(waits) == 1 and next(iter(waits)).startswith("torch's "):
            return True  # whether they match is not known
        by_rank = dict(zip(self.ranks, everyone, strict=True))
        for there in everyone:
            if there.awaits is None:
                continue
            name, number = there.awaits
            books = [by_rank[rank].ledgers.get(name) for rank in there.ledgers[name][0]]
            entered = [book is not None and book[1] >= number for book in books]
            kinds = {book[2].get(str(number)) for book in books if book is not None} - {None}
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


def _end_process(watch: Watch, frame: FrameType) -> None:
    kind = "PeerLostError" if watch.is_lost else "PeerError"
    text = (
        f"{kind}: {watch.failure}\nrank {watch.rank} is inside torch's {frame.f_code.co_name}, which cannot be made to "
        f"raise, and ends here\n"
    )
    told = tell(text, traceback.extract_stack(frame), f"{''.join(traceback.format_stack(frame))}{text}")
    os.write(2, told.encode(errors="replace"))
    os._exit(1)

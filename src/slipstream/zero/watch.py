"""What each rank is doing, for the day it hangs: step, phase, unit, and whether it waits for others.

The engine and the comms write plain attributes, which costs nothing. A thread per engine tells the other ranks through
the process group's store, once a second, and reads theirs only while this rank waits. Two things come of it:

standstill  every rank waits and none has moved: they wait for operations that can never match. All raise PeerError with
            a table of rank, step, phase, unit.
busy        some rank does not wait (it evaluates, saves, compiles): it is named every 30 seconds and nothing is stopped
            before `timeout_s`.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

logger = logging.getLogger(__name__)

_BEAT_S = 1.0
_STANDSTILL_S = 6.0  # how long all ranks must have stood still
_NAME_BUSY_S = 30.0


class PeerError(RuntimeError):
    """Another rank died, failed, or will never join the operation that this rank waits in."""


@dataclass(slots=True)
class Whereabouts:
    """One rank's last word."""

    step: int
    phase: str
    unit: str
    wait_for: str  # "" while it runs
    waits: int
    beat: int


class Watch:
    """One engine's whereabouts. `waits` counts entries and exits of waits, so that a standstill can be told from slowness."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.step = 0
        self.phase = "idle"
        self.unit = ""
        self.wait_for = ""
        self.waits = 0
        self.failure: str | None = None  # why every wait must end
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    # -- the hot side --

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Mark this rank as blocked in `what`."""
        self.wait_for, self.waits = what, self.waits + 1
        try:
            yield
        finally:
            self.wait_for, self.waits = "", self.waits + 1

    def check(self, since: float) -> None:
        """Called now and then inside our own waits. Raises PeerError once the wait is hopeless or has been too long."""
        if self.failure is not None:
            raise PeerError(self.failure)
        if time.monotonic() - since > self.timeout_s:
            raise PeerError(
                f"waited {self.timeout_s:.0f} s in {self.wait_for} (step {self.step}, {self.phase}, unit {self.unit or '-'}); "
                f'raise "slipstream": {{"timeout_s": ...}} if the other ranks may take longer'
            )

    # -- the monitor --

    def start(self, ranks: Sequence[int], index: int, serial: int) -> None:
        """Watch the ranks that share this engine; `serial` tells engines of one process apart, alike on all ranks."""
        if len(ranks) < 2:
            return
        store = dist.distributed_c10d._get_default_store()
        own = store.clone() if hasattr(store, "clone") else store  # a connection that no blocked call holds
        monitor = _Monitor(self, dist.PrefixStore(f"slipstream-watch-{serial}", own), ranks, index)
        self._thread = threading.Thread(target=monitor.run, args=(self._stop,), name="slipstream-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """The engine is gone."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
            self._thread = None


class _Monitor:
    """The thread's side of a Watch."""

    def __init__(self, watch: Watch, store: Any, ranks: Sequence[int], index: int) -> None:
        self.watch, self.store, self.ranks, self.index = watch, store, ranks, index
        self.beat = 0
        self.seen: dict[int, tuple[int, float]] = {}  # index -> (waits, since when)
        self.named_at = 0.0

    def run(self, stop: threading.Event) -> None:
        while not stop.wait(_BEAT_S):
            try:
                self._tell()
                if self.watch.wait_for:
                    self._look()
                else:
                    self.seen.clear()
            except (RuntimeError, ValueError, OSError):  # the store went with the process that held it
                return

    def _tell(self) -> None:
        watch = self.watch
        self.beat += 1
        here = Whereabouts(watch.step, watch.phase, watch.unit, watch.wait_for, watch.waits, self.beat)
        self.store.set(str(self.index), json.dumps(asdict(here)))

    def _look(self) -> None:
        keys = [str(index) for index in range(len(self.ranks))]
        if not self.store.check(keys):
            return
        everyone = [Whereabouts(**json.loads(text)) for text in self.store.multi_get(keys)]
        now = time.monotonic()
        for index, there in enumerate(everyone):
            waits, since = self.seen.get(index, (-1, now))
            self.seen[index] = (there.waits, since if waits == there.waits else now)
        still = min(now - since for _, since in self.seen.values())
        if all(there.wait_for for there in everyone) and still > _STANDSTILL_S:
            self.watch.failure = (
                "all ranks wait for each other in operations that can never match (they took different numbers of forwards, "
                "backwards or steps, or called collective methods on some ranks only):\n" + self._table(everyone)
            )
            if self.index == 0:
                logger.error("%s", self.watch.failure)
            return
        waited = now - self.seen[self.index][1]
        busy = [rank for rank, there in zip(self.ranks, everyone, strict=True) if not there.wait_for]
        first_waiting = next(index for index, there in enumerate(everyone) if there.wait_for or index == self.index)
        if busy and waited > _NAME_BUSY_S and now - self.named_at > _NAME_BUSY_S and first_waiting == self.index:
            self.named_at = now
            logger.warning("ranks %s have been busy for %.0f s while others wait:\n%s", busy, waited, self._table(everyone))

    def _table(self, everyone: Sequence[Whereabouts]) -> str:
        rows = [("rank", "step", "phase", "unit", "waits in")]
        rows += [
            (str(rank), str(there.step), there.phase, there.unit or "-", there.wait_for or "(runs)")
            for rank, there in zip(self.ranks, everyone, strict=True)
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)

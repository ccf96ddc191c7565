"""Figures of each step for trackers, files and scrapers: who writes them, when, and what happens if a backend fails.

Only rank 0 writes. Each backend (backends.py) has its own thread, so a slow or hanging backend delays neither steps nor other
backends. If it falls behind, the oldest steps are dropped, and their number is logged at the end. A backend that fails is disabled,
with a warning.

The x axis of every tag is the number of samples so far.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from slipstream.observe.backends import BACKENDS, DEEPSPEED, Figure, Monitor

logger = logging.getLogger(__name__)

MOST_WAITING = 1024  # steps
EVERY_S = 2.0  # seconds; a backend gets all steps since its last write at once: waking it for each step costs more than writing
OPEN_S = 20.0  # seconds for all backends to open before the first step; a slower one opens while steps run
CLOSE_S = 30.0  # seconds to write the rest at the end


def check_packages(blocks: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ValueError for a block whose package is not installed, or whose class does not exist."""
    for name in blocks:
        if name not in BACKENDS:
            _custom(name)
        elif (package := BACKENDS[name].package) and not _has(package):
            backend, key = BACKENDS[name], f"{name}.enabled" if name in DEEPSPEED else f"slipstream.monitors.{name}"
            off = f"set {key} to false" if name in DEEPSPEED else f"remove {key}"
            raise ValueError(
                f"{key} needs the package {package}: pip install {backend.install} (Slipstream's extra {backend.extra}), or {off}"
            )


def _has(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def _custom(name: str) -> Callable[..., Monitor]:
    """The class of a dotted name."""
    module, _, attribute = name.rpartition(".")
    try:
        found: Callable[..., Monitor] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"slipstream.monitors.custom: {name} is not a class that can be imported ({error}); write package.module.Class"
        ) from error
    return found


class _Worker:
    """A backend and its thread. The thread is a daemon, so a hanging backend does not block the exit of the process."""

    def __init__(self, name: str, make: Callable[[], Monitor]) -> None:
        self.name, self.make = name, make
        self.dropped = 0
        self.opened = threading.Event()  # or failed to open
        self.failed = False
        self.backend: Monitor | None = None
        self._waiting: deque[Sequence[Figure]] = deque()
        self._ready = threading.Condition()
        self._ends = False
        self.thread = threading.Thread(target=self._run, name=f"slipstream-monitor-{name}", daemon=True)
        self.thread.start()

    def put(self, events: Sequence[Figure]) -> None:
        with self._ready:
            if len(self._waiting) >= MOST_WAITING:
                self._waiting.popleft()
                self.dropped += 1
            if not self.failed:
                self._waiting.append(events)
                if len(self._waiting) in (1, MOST_WAITING // 2):
                    self._ready.notify()

    def end(self) -> None:
        with self._ready:
            self._ends = True
            self._ready.notify()

    def _next(self) -> list[Figure]:
        """Wait for events and return all of them; at least EVERY_S after the last ones, unless there are many. [] at the end."""
        with self._ready:
            self._ready.wait_for(lambda: self._ends or len(self._waiting) >= MOST_WAITING // 2, timeout=EVERY_S)
            self._ready.wait_for(lambda: self._ends or self._waiting)
            events = [event for batch in self._waiting for event in batch]
            self._waiting.clear()
        return events

    def _run(self) -> None:
        try:
            self.backend = backend = self.make()
            self.opened.set()
            while events := self._next():
                backend.write(events)
            backend.close()
        except Exception as error:
            self.failed = True
            logger.warning("monitors: %s failed and gets no more figures: %s: %s", self.name, type(error).__name__, error)
        self.opened.set()


class Monitors:
    """Passes events to all backends. makers: name -> function that opens the backend, called in its thread."""

    def __init__(self, makers: Mapping[str, Callable[[], Monitor]]) -> None:
        self._workers = [_Worker(name, make) for name, make in makers.items()]
        self._end = weakref.finalize(self, _end, self._workers)  # also at the end of a script that does not close its engine
        began = time.monotonic()
        for worker in self._workers:
            if not worker.opened.wait(max(0.0, began + OPEN_S - time.monotonic())):
                logger.warning("monitors: %s is not open after %g s; training begins without waiting for it", worker.name, OPEN_S)

    @property
    def enabled(self) -> bool:
        return bool(self._workers)

    @property
    def backends(self) -> list[Monitor]:
        """The backends that are open."""
        return [worker.backend for worker in self._workers if worker.backend is not None]

    def write_events(self, events: Sequence[tuple[str, Any, int]]) -> None:
        """Write (tag, value, samples) each. Returns at once, except that it waits for values on a GPU."""
        if self._workers and events:
            batch = [
                Figure(tag, float(value.item() if isinstance(value, Tensor) else value), samples) for tag, value, samples in events
            ]
            for worker in self._workers:
                worker.put(batch)

    def close(self) -> None:
        """Write what is pending, for at most CLOSE_S."""
        self._end()


def _end(workers: Sequence[_Worker]) -> None:
    until = time.monotonic() + CLOSE_S
    for worker in workers:
        worker.end()
    for worker in workers:
        worker.thread.join(max(0.0, until - time.monotonic()))
        if worker.thread.is_alive():
            logger.warning("monitors: %s still hangs after %g s; what is left is not written", worker.name, CLOSE_S)
        if worker.dropped:
            logger.warning("monitors: %s missed %d steps, because it was slower than the steps", worker.name, worker.dropped)


def makers_on_first(blocks: Mapping[str, Mapping[str, Any]]) -> dict[str, Callable[[], Monitor]]:
    """Functions that open the enabled blocks' backends, on rank 0. Raises ValueError for a missing package."""
    chosen = {
        name: {key: value for key, value in block.items() if key != "enabled"} for name, block in blocks.items() if block["enabled"]
    }
    check_packages(chosen)
    return _makers(chosen) if not dist.is_initialized() or dist.get_rank() == 0 else {}


def open_monitors(blocks: Mapping[str, Mapping[str, Any]]) -> Monitors:
    """Open the backends of the enabled blocks, by name or by the dotted name of a class, with the values of their blocks."""
    return Monitors(_makers(blocks))


def _makers(blocks: Mapping[str, Mapping[str, Any]]) -> dict[str, Callable[[], Monitor]]:
    return {name: partial(BACKENDS[name].kind if name in BACKENDS else _custom(name), **values) for name, values in blocks.items()}

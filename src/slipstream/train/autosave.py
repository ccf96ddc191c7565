"""Checkpoints that an engine saves by itself: every so many steps or minutes, and on a signal, before the process ends.

A signal may reach one rank only (a scheduler signals the first process of a job, or one host). Its wish is one more number in the
exchange that every step has anyway, so that all ranks save at the end of the same step. Then all exit with code 85: "start again".
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from types import FrameType
from typing import Any, Protocol

from slipstream import brief
from slipstream.config.plan import CheckpointPlan

logger = logging.getLogger(__name__)
SAVE, STOP = 1.0, 2.0  # wishes of a rank; the largest of all ranks is done


class Preempted(SystemExit):
    """Raised by `engine.step()` on every rank when a signal asked for a checkpoint, and it is saved."""


class Saved(Protocol):
    """What the checkpoints need of an engine."""

    global_steps: int

    def save_checkpoint(self, save_dir: str, tag: str | None = None) -> bool: ...

    def finish_save(self) -> None: ...

    def load_checkpoint(self, load_dir: str, tag: str | None = None) -> Any: ...


class Autosave:
    """The automatic checkpoints of one engine. `is_first`: this is the rank whose clock counts, and which logs."""

    def __init__(self, plan: CheckpointPlan, *, is_first: bool) -> None:
        self.plan, self.is_first = plan, is_first
        self.loaded = False
        self._last = time.monotonic()
        self._signal = 0
        self._handlers: dict[int, Any] = {}
        if plan.folder is not None and threading.current_thread() is threading.main_thread():
            for name in plan.on_signal:
                number = signal.Signals[name]
                self._handlers[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal:  # the second one does not wait
            self.close()
            os.kill(os.getpid(), number)
        self._signal = number

    @property
    def wish(self) -> float:
        """What this rank asks all ranks to do at the end of this step."""
        if self._signal:
            return STOP
        is_due = self.plan.every_minutes and time.monotonic() - self._last >= 60 * self.plan.every_minutes
        return SAVE if is_due and self.is_first else 0.0

    def after_step(self, engine: Saved, wish: float) -> None:
        """Save if a rank wished it or the step is due. Collective. Raises Preempted if a rank got a signal."""
        if (
            engine.global_steps == 1
            and self.is_first
            and not self.loaded
            and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        ):
            logger.warning(
                "this is a restart, and training began at step 0: call engine.load_checkpoint() before the loop, or set "
                'slipstream.checkpoint to {"folder": ..., "every_steps": ...}'
            )
        if self.plan.folder is None:
            return
        if not wish and not (self.plan.every_steps and engine.global_steps % self.plan.every_steps == 0):
            return
        self._last = time.monotonic()
        engine.save_checkpoint(self.plan.folder)
        if wish == STOP:
            engine.finish_save()
            if self.is_first:
                logger.warning("step %d is saved after a signal; exit code %d", engine.global_steps, brief.AGAIN)
            raise Preempted(brief.AGAIN)

    def resume(self, engine: Saved) -> None:
        """Load the newest checkpoint of the folder, if the config asks for it. Collective."""
        if self.plan.folder is not None and self.plan.resume and os.path.isdir(self.plan.folder):
            engine.load_checkpoint(self.plan.folder)

    def close(self) -> None:
        """Give the signals back."""
        while self._handlers:
            number, handler = self._handlers.popitem()
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, handler)

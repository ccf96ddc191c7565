"""An engine's training log: the plan at the start, a line every `steps_per_print` steps, and times."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from slipstream.config import Plan, describe, keys

logger = logging.getLogger("slipstream.train")


def log_plan(plan: Plan) -> None:
    """Log the config keys that have no effect and, with `dump_state`, the whole plan. Called on one rank."""
    package = logging.getLogger("slipstream")
    logs = plan.steps_per_print or plan.wall_clock_breakdown or plan.dump_state or plan.log_level
    if logs and not package.hasHandlers():  # the config asks for logs, and the script has not configured logging
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[%(asctime)s] %(message)s", "%H:%M:%S"))
        package.addHandler(handler)
    if plan.log_level is not None:
        package.setLevel(plan.log_level.upper())
    elif logs and package.level == logging.NOTSET:
        package.setLevel(logging.INFO)
    keys.say_idle(plan.idle)
    keys.say(plan.notes)
    if plan.dump_state:
        logger.info("%s", describe(plan, defaults=True))


class Progress:
    """Times and counts of one engine; logs on rank 0 only."""

    def __init__(self, plan: Plan, *, logs: bool) -> None:
        self.every = plan.steps_per_print if logs else None
        self.times = (plan.wall_clock_breakdown or plan.activations.profile) and logs
        self.seconds: dict[str, float] = {}
        self.since = time.perf_counter()

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        """Add the time spent inside to that of `part` in this window."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start

    def step_done(self, step: int, skipped: int, rates: Sequence[float], norm: float, loss_scale: float, samples: int) -> None:
        """Log at the end of a window. samples: of all ranks in one step."""
        if self.every and step % self.every == 0:
            elapsed, self.since = time.perf_counter() - self.since, time.perf_counter()
            logger.info(
                "step %d, skipped %d, lr %s, gradient norm %.4g, loss scale %g, %.1f samples/s",
                step,
                skipped,
                rates,
                norm,
                loss_scale,
                self.every * samples / elapsed,
            )
        if self.times:
            parts = ", ".join(f"{part} {1e3 * seconds:.2f} ms" for part, seconds in self.seconds.items())
            logger.info("step %d: %s", step, parts)
        self.seconds.clear()

"""An engine's training log: the plan at the start, a line every `steps_per_print` steps, and times."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from slipstream.config import Plan, describe, keys
from slipstream.observe import clock
from slipstream.observe.memory import show_lines
from slipstream.world.mesh import Mesh
from slipstream.world.sizes import SHOWN, layout_table, layout_title, slices_apart

logger = logging.getLogger("slipstream.train")
_MOST_SPANS = 256


def log_plan(plan: Plan) -> None:
    """Log the config keys that have no effect and, with `dump_state`, the whole plan. Called on one rank."""
    package = logging.getLogger("slipstream")
    logs = plan.steps_per_print or plan.wall_clock_breakdown or plan.memory_breakdown or plan.dump_state or plan.log_level
    if plan.log_level is not None:
        package.setLevel(plan.log_level.upper())
    if logs:
        show_lines(package)
    keys.say_idle(plan.idle)
    keys.say(plan.notes)
    if plan.dump_state:
        logger.info("%s", describe(plan, defaults=True))


def log_layout(mesh: Mesh, ranks_of_host: int) -> None:
    """Log the layout of a mesh with several axes on the hosts, unless `slipstream run` has shown it. Called on one rank.

    Warns of slices that span hosts: their all-reduces then cross hosts, several times per layer.
    """
    if not mesh.names:
        return
    is_alone = len(mesh.places) <= ranks_of_host
    host_of = {rank: "this host" if is_alone else f"host {rank // ranks_of_host}" for rank in mesh.places}
    if os.environ.get(SHOWN) == layout_title(mesh.places):
        return
    logger.info("%s", layout_table(mesh.places, host_of))
    if ranks := slices_apart(mesh.places, host_of):
        fits = max(size for size in range(1, mesh.tp.size + 1) if ranks_of_host % size == 0)
        logger.warning(
            "slipstream.mesh.tp %d with %d ranks on a host: the slices of ranks %s are on several hosts, so the sums of each layer "
            "travel between them; use tp %d",
            mesh.tp.size,
            ranks_of_host,
            ", ".join(map(str, ranks)),
            fits,
        )


class Progress:
    """Times and counts of one engine; logs on rank 0 only.

    around  called with the name of each phase as it begins; the returned contexts are entered until it ends
    flops   of this rank per step, once a profile has counted them
    """

    def __init__(self, plan: Plan, device: torch.device, *, logs: bool) -> None:
        self.every = plan.steps_per_print if logs else None
        self.times = (plan.wall_clock_breakdown or plan.activations.profile) and logs
        self.device = device if plan.wall_clock_breakdown or plan.profile is not None else torch.device("cpu")  # that is timed
        self.around: list[Callable[[str], AbstractContextManager[object]]] = []
        self.flops = 0
        self.tells_speed = plan.throughput
        self._seconds: dict[str, float] = {}  # of this window
        self._spans: list[tuple[str, Any, Any]] = []  # the device may not have reached their ends yet
        self.since = self.last = time.perf_counter()
        self.losses: list[float | Tensor] | None = None  # of this rank's micro-batches in this window, for monitors
        self.samples = self.since_line = 0  # of all ranks: in the last step, since the last log line

    def saw(self, loss: Tensor, factor: float) -> None:
        if self.losses is not None:
            at_once = loss.device.type == "cpu" and loss.numel() == 1  # cheapest; on a GPU, `item` would wait
            self.losses.append(factor * (loss.item() if at_once else loss.detach().mean(dtype=torch.float32)))

    def count(self, samples: int) -> None:
        """Count a step of `samples` samples over all ranks."""
        self.samples, self.since_line = samples, self.since_line + samples

    def figures(self) -> dict[str, float]:
        """The mean loss of this rank's window, and the samples per second of all ranks in its step."""
        elapsed, self.last = time.perf_counter() - self.last, time.perf_counter()
        loss = {"train_loss": fmean(map(float, self.losses))} if self.losses else {}
        return loss | {"samples_per_s": self.samples / elapsed}

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        """Add the time spent inside to that of `part` in this window."""
        with ExitStack() as stack:
            for around in self.around:
                stack.enter_context(around(part))
            start = clock.mark(self.device)
            try:
                yield
            finally:
                self._spans.append((part, start, clock.mark(self.device)))
                if len(self._spans) > _MOST_SPANS or self.device.type != "cuda":
                    self._settle()

    @property
    def seconds(self) -> dict[str, float]:
        """The time of each part in this window."""
        self._settle()
        return self._seconds

    def _settle(self) -> None:
        for part, start, stop in self._spans:
            self._seconds[part] = self._seconds.get(part, 0.0) + clock.between(start, stop)
        self._spans.clear()

    def step_done(self, step: int, skipped: int, rates: Sequence[float], norm: float, loss_scale: float) -> None:
        """Log at the end of a window."""
        if self.every and step % self.every == 0:
            elapsed, self.since = time.perf_counter() - self.since, time.perf_counter()
            samples, self.since_line = self.since_line, 0
            speed = f", {samples / elapsed:.1f} samples/s" if self.tells_speed else ""
            speed += f", {self.every * self.flops / elapsed / 1e12:.4g} TFLOPS per rank" if self.tells_speed and self.flops else ""
            line = "step %d, skipped %d, lr %s, gradient norm %.4g, loss scale %g%s"
            logger.info(line, step, skipped, rates, norm, loss_scale, speed)
        if self.times:
            parts = ", ".join(f"{part} {1e3 * seconds:.2f} ms" for part, seconds in self.seconds.items())
            logger.info("step %d: %s", step, parts)
        self._spans.clear()
        self._seconds.clear()
        if self.losses:
            self.losses.clear()

"""When a technique begins, and a weight's bits at a step: closed forms of the step, so that a resumed run continues correctly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Bits:
    """Weights lose a bit `period` steps after `offset`, the next one after 2 periods in all, then 4, 8, ... (MoQ).

    factors: of MoQ's second-order schedule: multiply the time to the next loss, in addition to 2; 1 without such a schedule.
    mixed: how fast the exact weight's share falls from 1 to 0 after a change, per step; 0: weights are quantized at once.
    """

    start: int
    target: int
    period: int = 1
    offset: int = 0
    mixed: float = 0.0

    def losses(self, factors: Sequence[int] = ()) -> list[int]:
        """The steps at which a bit is lost."""
        steps, delay = [], self.period
        for i in range(self.start - self.target):
            steps.append(self.offset + delay)
            delay *= 2 * (factors[i] if factors else 1)
        return steps

    def at(self, step: int, factors: Sequence[int] = ()) -> tuple[int, float] | None:
        """(bits, share of the exact weight) at this step; None before the offset."""
        if step < self.offset:
            return None
        losses = [due for due in self.losses(factors) if due <= step]
        since = step - (losses[-1] if losses else self.offset)
        return self.start - len(losses), max(0.0, 1.0 - self.mixed * since) if self.mixed else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snip:
    """When masks are renewed by learned scores, and the fraction of weights that they keep: share ** (progress to the end).

    rows, columns: of a block that is kept or dropped as one; of_row: of each `columns` neighbors in a row, `rows` go (N:M).
    """

    share: float
    offset: int
    end: int
    stride: int = 1
    rows: int = 4
    columns: int = 1
    of_row: bool = False

    @property
    def pattern(self) -> str:
        return f"{self.rows}{':' if self.of_row else 'x'}{self.columns}"

    def share_at(self, step: int) -> float | None:
        """The fraction that this step's masks keep; None: the masks stay."""
        if not self.offset < step <= self.end or ((step - self.offset) % self.stride and step != self.end):
            return None
        return float(self.share ** ((step - self.offset) / (self.end - self.offset)))


@dataclass(slots=True, eq=False)
class Scheduled:
    """A weight's schedule and its current state."""

    bits: Bits
    now: Tensor = field(default_factory=lambda: torch.zeros(2))  # fp32 [2]: bits, the exact weight's share
    layer: nn.Module | None = None  # checkpoints keep its buffer `period_factors`; None: no factors

    @property
    def factors(self) -> list[int]:
        factors: list[int] = [] if self.layer is None else self.layer.get_buffer("period_factors").tolist()
        return factors

    def tick(self, step: int) -> None:
        self.now.copy_(torch.tensor(self.bits.at(step, self.factors) or (0.0, 0.0)))


class Clock:
    """The number of optimizer steps, which an engine or `compression_scheduler` sets, and values derived from it.

    Layers read `begun` and tensors, so one compiled forward serves every step.
    """

    def __init__(self) -> None:
        self._step = 0
        self.begun: dict[int, bool] = {}  # step -> whether techniques that begin then have begun
        self.scheduled: list[Scheduled] = []
        self.kept: dict[Any, tuple[int, Tensor]] | None = None  # layer -> (version of its weight, rounded); None: keep nothing

    @property
    def step(self) -> int:
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        self.begun = {since: step >= since for since in self.begun}
        for each in self.scheduled:
            each.tick(step)

    def begin_at(self, since: int) -> None:
        self.begun[since] = self._step >= since

    def follow(self, scheduled: Scheduled) -> None:
        scheduled.tick(self._step)
        self.scheduled.append(scheduled)

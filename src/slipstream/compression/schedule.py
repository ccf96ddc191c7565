"""When a technique begins, and how many bits a weight has at a step: closed forms of the step, so that a resumed run goes on."""

from __future__ import annotations

from dataclasses import dataclass


class Clock:
    """The number of optimizer steps, which an engine or `compression_scheduler` sets."""

    step = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bits:
    """Weights lose a bit after `period` steps from `offset` on, the next after 2 periods in all, then 4, 8, ... (MoQ).

    mixed: how much of the exact weight a step takes away after a change, from 1 (all) to 0; 0: weights are quantized at once.
    """

    start: int
    target: int
    period: int = 1
    offset: int = 0
    mixed: float = 0.0

    def at(self, step: int) -> tuple[int, float] | None:
        """(bits, share of the exact weight) at this step; None before the offset."""
        steps = step - self.offset
        if steps < 0:
            return None
        bits, changed, due = self.start, 0, self.period
        while bits > self.target and steps >= due:
            bits, changed, due = bits - 1, due, 2 * due
        return bits, max(0.0, 1.0 - self.mixed * (steps - changed)) if self.mixed else 0.0

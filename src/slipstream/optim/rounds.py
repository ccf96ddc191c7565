"""When a compressing optimizer communicates: what each of its steps sends, as a function of the step's number (from 1).

0/1 Adam (Lu et al. 2022, arXiv 2202.06009) updates its variance in ever fewer steps, and in the end exchanges signs only once
in several steps. 1-bit Adam is the case with a variance step in each of the first `freeze` steps and an interval of 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class Round(Enum):
    DENSE = "dense"  # gradients are reduced, and the variance is updated
    SIGNS = "signs"  # the signs of the progress since the last round are exchanged
    LOCAL = "local"  # nothing is sent: each rank steps its own weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    freeze: int  # the last step that may update the variance
    doubling: int = 0  # variance steps after which the interval between them doubles; 0: never
    local_doubling: int = 1  # steps after `freeze` after which the interval between exchanges doubles
    longest: int = 1  # that interval's maximum; 1: no local steps

    @property
    def first(self) -> int:
        """The number of consecutive variance steps at the beginning of a run."""
        return min(self.doubling or self.freeze, self.freeze)

    def _intervals(self) -> Iterator[tuple[int, int]]:
        """The first variance step of each interval, with the interval."""
        first, interval = 1, 1
        while first <= self.freeze:
            yield first, interval
            last, interval = first + (self.doubling - 1) * interval, 2 * interval
            first = (last // interval + 1) * interval

    def dense(self, done: int) -> int:
        """The number of variance steps among the first `done` steps."""
        done = min(done, self.freeze)
        if not self.doubling:
            return done
        return sum(min(self.doubling, (done - first) // each + 1) for first, each in self._intervals() if first <= done)

    def interval(self, step: int) -> int:
        """The number of steps between exchanges of signs."""
        return min(1 << min(max(step - self.freeze - 1, 0) // self.local_doubling, 30), self.longest)

    def kind(self, step: int) -> Round:
        if self.dense(step) > self.dense(step - 1):
            return Round.DENSE
        return Round.LOCAL if step % self.interval(step) else Round.SIGNS

"""Estimates how long a forward takes, and how many tokens it can compute in a given time, from past forwards.

A forward takes a time by its tokens, for which there is no formula, and beside it a time for each row of logits and for each
position that a token attends to. These two rates are fitted to all forwards that are remembered, by least squares with a slight
preference for 0: while only generations are known, rows and tokens are as many, and their time has to count as that of tokens, or
prompts would be taken for cheap. What remains of each forward's time is remembered by its tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque

import numpy as np

from slipstream.inference.core import ForwardSize, attended

RECENT = 8
REFIT = 8  # forwards after which the rates are fitted anew
_RIDGE = 1e-2  # the preference, relative to the squares of each rate's own column


class Pace:
    """Keeps the last few forwards of each power of two of tokens, and interpolates linearly between these buckets.

    Where a time is the limit, the second longest of a bucket counts: the longest may be an outlier of the system, and the median
    would be exceeded half of the time."""

    def __init__(self) -> None:
        self._recent: dict[int, deque[tuple[float, ForwardSize]]] = {}  # by tokens.bit_length()
        self._rates = (0.0, 0.0)  # seconds of a row, and of a position
        self._new = 0  # forwards since these were fitted
        self._known: list[tuple[int, float]] | None = None  # `_line`, until the next forward

    def add(self, size: ForwardSize, seconds: float) -> None:
        seconds = max(seconds, 1e-6)  # weights of the fit are 1 / seconds
        self._recent.setdefault(size.tokens.bit_length(), deque(maxlen=RECENT)).append((seconds, size))
        self._new += 1
        self._known = None
        if self._new >= REFIT:
            self._new, self._rates = 0, _fitted([one for bucket in self._recent.values() for one in bucket])

    def max_tokens(self, seconds: float, size: ForwardSize, context: int, most: int) -> int:
        """How many tokens, at most `most`, a forward of `seconds` can compute: those of `size`, plus more of a prompt that has
        `context` computed tokens. 0 if no forward is known."""
        line = self._line()
        if not line:
            return 0

        def exceeded(tokens: int) -> bool:
            more = max(0, tokens - size.tokens)
            rest = self._rest(size._replace(positions=size.positions + attended(context, context + more)))
            return _at(line, tokens) + rest > seconds * (1 + 1e-9)

        return max(0, bisect_left(range(1, most + 1), True, key=exceeded))

    def seconds(self, size: ForwardSize) -> float:
        """The usual time of a forward, by the nearest known bucket that does not exceed its tokens; 0 if there is none."""
        known = [bits for bits in self._recent if bits <= size.tokens.bit_length()]
        if not known:
            return 0.0
        times = sorted(self._own(*one) for one in self._recent[max(known)])
        return times[len(times) // 2] + self._rest(size)

    def per_token(self) -> float:
        """Seconds per token at the fastest number of tokens; 0 if no forward is known."""
        buckets = (sorted((self._own(*one), one[1].tokens) for one in bucket) for bucket in self._recent.values())
        usual = (bucket[len(bucket) // 2] for bucket in buckets)
        return min((seconds / tokens for seconds, tokens in usual), default=0.0)

    def _rest(self, size: ForwardSize) -> float:
        """The time for rows and positions."""
        return self._rates[0] * size.rows + self._rates[1] * size.positions

    def _own(self, seconds: float, size: ForwardSize) -> float:
        """The time for tokens."""
        return max(0.0, seconds - self._rest(size))

    def _line(self) -> list[tuple[int, float]]:
        """(tokens, seconds) of each bucket, both ascending."""
        if self._known is not None:
            return self._known
        line: list[tuple[int, float]] = []
        for bits in sorted(self._recent):
            longest, tokens = sorted((self._own(seconds, size), size.tokens) for seconds, size in self._recent[bits])[-2:][0]
            if not line or tokens > line[-1][0]:
                line.append((tokens, max(longest, line[-1][1] if line else 0.0)))
        self._known = line
        return line


def _at(line: list[tuple[int, float]], tokens: int) -> float:
    """Interpolate between two known points; beyond the last, in proportion to it."""
    before = (0, 0.0)
    for point in line:
        if tokens <= point[0]:
            return before[1] + (point[1] - before[1]) * (tokens - before[0]) / (point[0] - before[0])
        before = point
    return before[1] * tokens / before[0]


def _fitted(forwards: list[tuple[float, ForwardSize]]) -> tuple[float, float]:
    """The rates of rows and positions, at least 0. Errors are weighed relative to each forward's time."""
    seconds = np.array([one for one, _ in forwards])
    columns = np.array([(1, *size) for _, size in forwards], dtype=float) / seconds[:, None]
    used = [0, 1, 2, 3]
    while True:
        own = columns[:, used]
        gram = own.T @ own
        weights = np.array([1e-9 if one < 2 else _RIDGE for one in used]) * np.diag(gram) + 1e-30
        found = np.linalg.solve(gram + np.diag(weights), own.sum(0))
        below = [one for one, value in zip(used, found, strict=True) if one >= 2 and value < 0]
        if not below:
            rates = dict(zip(used, found.tolist(), strict=True))
            return rates.get(2, 0.0), rates.get(3, 0.0)
        used = [one for one in used if one not in below]

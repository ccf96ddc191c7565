"""How long forwards take, learned from those that were."""

from __future__ import annotations

from collections import deque

RECENT = 8


class Pace:
    """By the number of tokens: of each power of two the last few forwards, and lines between these.

    Of those few the second longest counts. The longest may be the system's fault, and a time that half of them exceed would be no
    promise."""

    def __init__(self) -> None:
        self._recent: dict[int, deque[tuple[float, int]]] = {}  # by the bits of the number: (seconds, tokens)

    def add(self, tokens: int, seconds: float) -> None:
        self._recent.setdefault(tokens.bit_length(), deque(maxlen=RECENT)).append((seconds, tokens))

    def most(self, seconds: float) -> int:
        """How many tokens a forward of so many seconds computes, or 0 if nothing is known."""
        tokens, took = 0, 0.0  # the largest forward that is known to be short enough
        for bits in sorted(self._recent):
            longest, more = sorted(self._recent[bits])[-2:][0]
            if longest > seconds:
                return tokens + int((more - tokens) * (seconds - took) / (longest - took))
            if more > tokens:
                tokens, took = more, longest
        return int(tokens * seconds / took) if took else 0

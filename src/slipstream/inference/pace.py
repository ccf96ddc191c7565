"""Estimates how many tokens a forward can compute in a given time, and how long one takes, from past forwards."""

from __future__ import annotations

from collections import deque

RECENT = 8


class Pace:
    """Keeps the last few forwards of each power of two of tokens, and interpolates linearly between these buckets.

    The second longest time of a bucket counts: the longest may be an outlier of the system, and the median would be exceeded half
    of the time."""

    def __init__(self) -> None:
        self._recent: dict[int, deque[tuple[float, int]]] = {}  # by tokens.bit_length(): (seconds, tokens)

    def add(self, tokens: int, seconds: float) -> None:
        self._recent.setdefault(tokens.bit_length(), deque(maxlen=RECENT)).append((seconds, tokens))

    def max_tokens(self, seconds: float) -> int:
        """How many tokens a forward of `seconds` computes; 0 if no forward is known."""
        tokens, elapsed = 0, 0.0  # of the largest known forward that is short enough
        for bits in sorted(self._recent):
            longest, more = sorted(self._recent[bits])[-2:][0]
            if longest > seconds:
                return tokens + int((more - tokens) * (seconds - elapsed) / (longest - elapsed))
            if more > tokens:
                tokens, elapsed = more, longest
        return int(tokens * seconds / elapsed) if elapsed else 0

    def seconds(self, tokens: int) -> float:
        """The usual time of a forward of `tokens`, from the nearest known bucket that is not above theirs; 0 if there is none."""
        known = [bits for bits in self._recent if bits <= tokens.bit_length()]
        times = sorted(seconds for seconds, _ in self._recent[max(known)]) if known else [0.0]
        return times[len(times) // 2]

"""Guesses of what comes next, looked up in the request's own tokens (prompt lookup decoding, Saxena 2023).

Text quotes itself: names, code, the document that is being summarized. Where the last n tokens occurred before, what
followed then is guessed to follow now. One forward computes all guesses, and as many as turn out right are kept.
"""

from __future__ import annotations

from collections.abc import Sequence


class Lookup:
    """Where each n-gram of one growing sequence last occurred. A guess costs O(tokens new since the last one)."""

    def __init__(self, max_ngram: int = 3, min_ngram: int = 2) -> None:
        assert 1 <= min_ngram <= max_ngram, f"n-grams of {min_ngram} to {max_ngram} tokens"
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._follows: dict[tuple[int, ...], int] = {}  # n-gram -> the position after its last occurrence
        self._indexed = 0  # n-grams that end before this position are in it

    def guess(self, tokens: Sequence[int], num: int) -> tuple[int, ...]:
        """Up to `num` tokens that followed the longest n-gram at the end of `tokens` when it last occurred before.

        `tokens` is always the same sequence, which only grows. A copy that runs into the end goes on with what it has
        guessed (as in LZ77), so that a loop is guessed in full length."""
        for end in range(self._indexed + 1, len(tokens)):  # without the n-grams at the very end, which would find themselves
            for size in self._sizes:
                if size <= end:
                    self._follows[tuple(tokens[end - size : end])] = end
        self._indexed = max(self._indexed, len(tokens) - 1)
        for size in self._sizes:
            position = self._follows.get(tuple(tokens[-size:])) if size <= len(tokens) else None
            if position is not None:
                known = list(tokens[position : position + num])
                period = len(tokens) - position
                while len(known) < num:
                    known.append(known[-period])
                return tuple(known)
        return ()


def accept(draft: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """The tokens that a forward with guesses yields. `sampled[i]` was drawn given draft[:i], so it counts only if that
    is what came: always row 0's, row i + 1's if row i's token is draft[i]. Each token is therefore drawn from the same
    distribution, by the same random numbers of its position, as it would be without guesses."""
    assert len(sampled) == len(draft) + 1, f"{len(sampled)} sampled tokens for {len(draft)} guesses: one row for each, and one"
    right = 0
    while right < len(draft) and sampled[right] == draft[right]:
        right += 1
    return list(sampled[: right + 1])

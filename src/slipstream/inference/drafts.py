"""Speculative decoding by prompt lookup (Saxena 2023): drafts come from the request's own tokens.

Text repeats itself: names, code, the document to summarize. If the last n tokens occurred before, the tokens that followed then
are the draft. One forward computes the whole draft, and its longest correct prefix is accepted.
"""

from __future__ import annotations

from collections.abc import Sequence


class Lookup:
    """An index of the last occurrence of each n-gram in one growing sequence. A call costs O(tokens added since the last)."""

    def __init__(self, max_ngram: int = 3, min_ngram: int = 2) -> None:
        assert 1 <= min_ngram <= max_ngram, f"n-grams of {min_ngram} to {max_ngram} tokens"
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._follows: dict[tuple[int, ...], int] = {}  # n-gram -> the position after its last occurrence
        self._indexed = 0  # n-grams that end before this position are indexed

    def guess(self, tokens: Sequence[int], num: int) -> tuple[int, ...]:
        """Up to `num` tokens that followed the longest n-gram at the end of `tokens` when it last occurred before.

        `tokens` must be the same sequence in each call, and may only grow. A copy that reaches the end continues with its own
        output (as in LZ77), so that a loop is drafted in full length."""
        for end in range(self._indexed + 1, len(tokens)):  # without the final n-grams, which would match themselves
            for size in self._sizes:
                if size <= end:
                    self._follows[tuple(tokens[end - size : end])] = end
        self._indexed = max(self._indexed, len(tokens) - 1)
        for size in self._sizes:
            position = self._follows.get(tuple(tokens[-size:])) if size <= len(tokens) else None
            if position is not None:
                draft = list(tokens[position : position + num])
                period = len(tokens) - position
                while len(draft) < num:
                    draft.append(draft[-period])
                return tuple(draft)
        return ()


def accept(draft: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """Return the tokens accepted from a forward with a draft. `sampled[i]` was sampled given draft[:i], so it is valid only if
    draft[:i] was sampled: row 0 always is; row i + 1 is if row i sampled draft[i]. So each token has the same distribution, and
    uses the same random numbers of its position, as without a draft."""
    assert len(sampled) == len(draft) + 1, f"{len(sampled)} sampled tokens for {len(draft)} draft tokens; there must be one more"
    right = 0
    while right < len(draft) and sampled[right] == draft[right]:
        right += 1
    return list(sampled[: right + 1])

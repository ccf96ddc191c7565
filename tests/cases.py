"""The combinations that a test runs: all in `make test-all`, and in `make test` enough to cover every pair of values.

Tests in tests/parity check that the stages are bit-identical, so a scenario needs each stage once, and only stage 3, which moves
weights, on both transports.
"""

import itertools
import os
from typing import Any

EVERYTHING = os.environ.get("SLIPSTREAM_TESTS") == "all"
_STAGES = {"shared": (0, 2, 3), "gloo": (1, 3)}


def stages(transport: str, of: tuple[int, ...] = (0, 1, 2, 3)) -> tuple[int, ...]:
    """The stages of `of` that a scenario runs on `transport`."""
    return of if EVERYTHING else tuple(stage for stage in of if stage in _STAGES.get(transport, of))


def pairs(*factors: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Rows with one value per factor that cover each pair of values of two factors.

    Greedy: the next row is the first of those that cover the most uncovered pairs.
    """
    rows = list(itertools.product(*factors))
    if EVERYTHING:
        return rows
    chosen: list[tuple[Any, ...]] = []
    missing = set().union(*map(_met, rows))
    while missing:
        row = max(rows, key=lambda candidate: len(_met(candidate) & missing))
        chosen.append(row)
        missing -= _met(row)
    return chosen


def _met(row: tuple[Any, ...]) -> set[tuple[tuple[int, Any], ...]]:
    return set(itertools.combinations(enumerate(row), 2))

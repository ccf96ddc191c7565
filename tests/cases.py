"""Which combinations a test runs: every one in `make test-all`, and in `make test` enough that any two values meet.

The stages are bit-identical by tests of their own (tests/parity), so a scenario needs each stage once, and only stage 3, whose
weights move, on both transports.
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
    """Rows of one value a factor: each pair of values of two factors stands in some row.

    Greedy: the next row is the first one, of those that meet the most pairs not yet met.
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

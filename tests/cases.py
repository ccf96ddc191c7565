"""The combinations that a test runs: all in `make test-all`, and a part of them in `make test`.

Tests in tests/parity check that the stages are bit-identical, so a scenario runs on one transport (`alternate`) and on the stages
that are its: stage 3, which moves weights, on both, and one other each.
"""

import itertools
import os
import zlib
from collections import defaultdict
from typing import Any

import pytest

from tests.on_gpu import ON_GPU

EVERYTHING = os.environ.get("SLIPSTREAM_TESTS") == "all"
STAGES = (0, 1, 2, 3) if EVERYTHING else (1, 3)  # of scenarios on one transport
_STAGES = {"shared": (2, 3), "gloo": (0, 3)}
_BOTH = "tests/contract/"


def stages(transport: str, of: tuple[int, ...] = (0, 1, 2, 3)) -> tuple[int, ...]:
    """The stages of `of` that a scenario runs on `transport`."""
    return of if EVERYTHING else tuple(stage for stage in of if stage in _STAGES.get(transport, of)) or of[-1:]


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


def alternate(items: list[pytest.Item]) -> None:
    """Mark as slow every second transport of the scenarios that run on both: they take turns, and `make test-all` runs all.

    The first turn follows from the name of a test. Contracts keep both.
    """
    if EVERYTHING or ON_GPU:  # a GPU's run leaves out the scenarios in shared memory itself
        return
    tests: dict[str, dict[tuple[Any, ...], dict[str, pytest.Item]]] = defaultdict(lambda: defaultdict(dict))
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if params.get("transport") in _STAGES and item.get_closest_marker("slow") is None and not item.nodeid.startswith(_BOTH):
            name, _, ids = item.nodeid.partition("[")
            scenario = tuple(word for word in ids.rstrip("]").split("-") if word != params["transport"])
            tests[name][scenario][params["transport"]] = item
    for name, scenarios in tests.items():
        for turn, of_scenario in enumerate(scenarios.values(), zlib.crc32(name.encode())):
            if len(of_scenario) == len(_STAGES):
                of_scenario[tuple(_STAGES)[turn % 2]].add_marker(pytest.mark.slow)

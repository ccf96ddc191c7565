"""The combinations that a test runs: all in `make test-all`, and a part of them in `make test`.

Tests in tests/parity check that the stages are bit-identical, so a scenario runs on one transport (`alternate`) and on the stages
that are its: stage 3, which moves weights, on both, and one other each. Scenarios of one test may take turns on these (`by_turns`).
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
STEPS = 3 if EVERYTHING else 2  # of scenarios against a twin: the second step has an optimizer's states and a known order
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


def by_turns(values: tuple[Any, ...], turn: int) -> tuple[Any, ...]:
    """One of the values: scenarios take turns on them."""
    return values if EVERYTHING else (values[turn % len(values)],)


def every_other(*factors: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Half of the rows with one value per factor, like one color of a chessboard: each value meets half of those of the others."""
    rows = itertools.product(*map(enumerate, factors))
    return [tuple(value for _, value in row) for row in rows if EVERYTHING or sum(i for i, _ in row) % 2 == 0]


def _met(row: tuple[Any, ...]) -> set[tuple[tuple[int, Any], ...]]:
    return set(itertools.combinations(enumerate(row), 2))


def alternate(items: list[pytest.Item]) -> None:
    """Mark as slow every second transport of the scenarios that run on both: they take turns, and `make test-all` runs all.

    The first turn follows from the name of a test. Contracts keep both. So do several scenarios with numbers of ranks.
    """
    if EVERYTHING or ON_GPU:  # a GPU's run leaves out the scenarios in shared memory itself
        return
    for name, scenarios in _scenarios(items, "world_size").items():
        worlds = sorted(set().union(*scenarios.values()))
        for turn, of_scenario in enumerate(scenarios.values(), zlib.crc32(name.encode())):
            for world, together in of_scenario.items():
                if 1 < len(of_scenario) == len(worlds) <= len(scenarios) and world != worlds[turn % len(worlds)]:
                    for item in together:
                        item.add_marker(pytest.mark.slow)
    for name, scenarios in _scenarios(items, "transport").items():
        for turn, of_scenario in enumerate(scenarios.values(), zlib.crc32(name.encode())):
            if of_scenario.keys() == _STAGES.keys():
                for item in of_scenario[tuple(_STAGES)[turn % 2]]:
                    item.add_marker(pytest.mark.slow)


def _scenarios(items: list[pytest.Item], axis: str) -> dict[str, dict[tuple[str, ...], dict[Any, list[pytest.Item]]]]:
    """Of each test that has a parameter `axis`, by the values of the others (of a transport: but for the transport), its items by
    the value of that one."""
    tests: Any = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if axis in params and item.get_closest_marker("slow") is None and not item.nodeid.startswith(_BOTH):
            name, _, ids = item.nodeid.partition("[")
            apart = {params.get("transport"), f"world{params['world_size']}" if axis == "world_size" else None}
            scenario = tuple(word for word in ids.rstrip("]").split("-") if word not in apart)
            tests[name][scenario][params[axis]].append(item)
    return tests

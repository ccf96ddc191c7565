"""What happens when things go wrong: dead ranks, waits that never match, busy ranks, interrupts, forks, exits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.failing import Nursery, Outcome

TRANSPORTS = ("shared", "gloo")


@pytest.fixture(scope="module")
def shared_nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("ranks"))
    yield nursery
    nursery.close()


@pytest.fixture
def nursery(shared_nursery: Nursery) -> Iterator[Nursery]:
    before = set(Path("/dev/shm").iterdir())
    yield shared_nursery
    assert not shared_nursery.survivors()
    assert set(Path("/dev/shm").iterdir()) <= before


def story(outcome: Outcome) -> str:
    return "\n".join(f"rank {i}: {outcome.codes[i]}\n{outcome.records[i]}\n{e}" for i, e in enumerate(outcome.stderr))


# ---- a rank that dies or raises

EDGES = {"gather": 3, "reduce": 3, "settle": 1, "exchange": 3, "publish": 1}


@pytest.mark.parametrize("how", ["kill", "raise"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_goes_stops_the_others_and_is_named(nursery: Nursery, transport: str, how: str) -> None:
    jobs = [(edge, bad) for edge in EDGES for bad in (0, 1)]
    for edge, bad in jobs:
        nursery.start(f"{edge} {bad}", "train", stage=EDGES[edge], transport=transport, edge=edge, bad=bad, how=how)
    outcomes = nursery.end()
    for edge, bad in jobs:
        outcome, other = outcomes[f"{edge} {bad}"], 1 - bad
        assert outcome.codes[bad] == (-9 if how == "kill" else 1), story(outcome)
        assert outcome.codes[other] == 1, story(outcome)
        assert outcome.records[other]["error"] == "PeerError", story(outcome)
        assert f"rank {bad}" in outcome.records[other]["text"].splitlines()[0], story(outcome)
        assert outcome.late(other, bad) < 5, story(outcome)

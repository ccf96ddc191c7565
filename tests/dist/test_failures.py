"""What happens when things go wrong: dead ranks, waits that never match, busy ranks, interrupts, forks, exits.

Ranks are forks of one process (tests/failing.py) and many jobs run at once, so that all of this costs little more than its
longest wait. What is measured is what the ranks themselves noted; a loaded machine only makes the ends later.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream import checkpoint
from tests.dist.test_launch_agents import Launcher, wait_for
from tests.failing import Nursery, Outcome

TRANSPORTS = ("shared", "gloo")


@pytest.fixture(scope="module")
def the_nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("ranks"))
    yield nursery
    nursery.close()


@pytest.fixture
def nursery(the_nursery: Nursery) -> Iterator[Nursery]:
    """Whatever happened, no process and no file in shared memory is left."""
    before = set(Path("/dev/shm").glob("*"))
    yield the_nursery
    deadline = time.monotonic() + 6  # DataLoader's workers look for their parent every 5 s
    while the_nursery.survivors() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not the_nursery.survivors()
    assert not [path for path in set(Path("/dev/shm").glob("*")) - before if "slipstream" in path.name]


def story(outcome: Outcome) -> str:
    parts = zip(outcome.codes, outcome.records, outcome.stderr, strict=True)
    return "\n".join(f"rank {rank}: {code}\n{record}\n{text}" for rank, (code, record, text) in enumerate(parts))


def check_named(outcome: Outcome, bad: int, within: float = 5.0) -> None:
    """All but the bad rank know of it in time."""
    for rank, record in enumerate(outcome.records):
        if rank != bad:
            assert outcome.codes[rank] == 1, story(outcome)
            assert record["error"] == "PeerError", story(outcome)
            assert f"rank {bad}" in record["text"].splitlines()[0], story(outcome)
            assert outcome.late(rank, bad) < within, story(outcome)


# ---- a rank that dies or raises

EDGES = {"gather": 3, "reduce": 3, "settle": 1, "exchange": 3, "publish": 1}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_killed_rank_stops_the_others_at_every_edge(nursery: Nursery, transport: str) -> None:
    jobs = [(edge, bad) for edge in EDGES for bad in (0, 1)]
    for edge, bad in jobs:
        stage = EDGES[edge]
        nursery.start(f"{edge} {bad}", "train", stage=stage, transport=transport, edge=edge, bad=bad, how="kill")
    outcomes = nursery.end()
    for edge, bad in jobs:
        outcome = outcomes[f"{edge} {bad}"]
        assert outcome.codes[bad] == -signal.SIGKILL
        check_named(outcome, bad)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_raises_stops_the_others_with_its_error(nursery: Nursery, transport: str) -> None:
    jobs = {"gather": 0, "reduce": 1, "exchange": 0, "settle": 1}
    for edge, bad in jobs.items():
        nursery.start(edge, "train", stage=EDGES[edge], transport=transport, edge=edge, bad=bad, how="raise")
    nursery.start("exit", "train", stage=3, transport=transport, edge="reduce", bad=1, how="exit")
    outcomes = nursery.end()
    for edge, bad in jobs.items():
        assert outcomes[edge].codes[bad] == 1, story(outcomes[edge])
        check_named(outcomes[edge], bad)
        assert "ValueError: boom" in outcomes[edge].records[1 - bad]["text"], story(outcomes[edge])
    assert outcomes["exit"].codes == [1, 7]
    check_named(outcomes["exit"], 1)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_all_others_name_the_first_to_go(nursery: Nursery, transport: str) -> None:
    for bad in (1, 2):
        nursery.start(str(bad), "train", world=3, stage=3, transport=transport, edge="reduce", bad=bad, how="kill")
    outcomes = nursery.end()
    for bad in (1, 2):
        check_named(outcomes[str(bad)], bad)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_crash_in_a_save_leaves_the_last_checkpoint_whole(nursery: Nursery, transport: str, tmp_path: Path) -> None:
    jobs = [(edge, bad) for edge, bad in (("save", 0), ("save", 1), ("commit", 0))]
    for edge, bad in jobs:
        folder = str(tmp_path / f"{edge}{bad}")
        nursery.start(
            f"{edge} {bad}", "train", stage=3, transport=transport, edge=edge, bad=bad, how="kill", nth=1, save=folder
        )  # fmt: skip
    outcomes = nursery.end()
    for edge, bad in jobs:
        check_named(outcomes[f"{edge} {bad}"], bad)
        folder = tmp_path / f"{edge}{bad}"
        assert checkpoint.latest_tag(folder) == "good"
        assert checkpoint.load_metadata(folder, "good").shared["counters"]["global_steps"] == 1
        left = sorted(path.name for path in folder.iterdir())
        if bad == 1:
            assert left == ["good", "latest"], "rank 0 removes what was begun"


# ---- waits that can never match

MISMATCHES = ("skips a backward", "one more backward", "state_dict alone", "save alone", "destroy alone")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_waits_that_never_match_end_with_a_table(nursery: Nursery, transport: str, tmp_path: Path) -> None:
    for what in MISMATCHES:
        nursery.start(what, "mismatch", stage=3, transport=transport, what=what, folder=str(tmp_path))
    outcomes = nursery.end(90)
    for what, outcome in outcomes.items():
        if what == "state_dict alone" and transport == "shared":
            assert outcome.codes == [0, 0], "it needs nobody"
            continue
        for rank in range(2):
            assert outcome.codes[rank] not in (0, None), f"{what}\n{story(outcome)}"
            assert "PeerError" in outcome.stderr[rank], f"{what}\n{story(outcome)}"
            assert outcome.ended[rank] - outcome.records[rank]["acted"] < 30, f"{what}\n{story(outcome)}"


# ---- ranks that are merely busy


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_busy_rank_is_named_and_not_stopped(nursery: Nursery, transport: str) -> None:
    for by in ("step", "barrier"):
        nursery.start(by, "busy", stage=3, transport=transport, by=by, seconds=5.0, timeout_s=60.0)
    nursery.start("timeout", "busy", stage=1, transport=transport, by="step", seconds=20.0, timeout_s=2.0)
    outcomes = nursery.end()
    for by in ("step", "barrier"):
        outcome = outcomes[by]
        assert outcome.codes == [0, 0], story(outcome)
        assert outcome.records[0]["sum"] == outcome.records[1]["sum"]
        said = outcome.stderr[1]
        assert 2 <= said.count("WARNING rank 0 has been busy for") <= 6, story(outcome)
        assert "rank  step  phase" in said and "(runs)" in said, story(outcome)
    outcome = outcomes["timeout"]
    assert outcome.records[1]["error"] == "PeerError" and "waited 2 s" in outcome.records[1]["text"], story(outcome)
    assert 2 <= outcome.late(1, 1) < 5, story(outcome)


@pytest.mark.parametrize("world", [2, 3])
def test_on_shared_memory_ranks_may_take_their_own_ways(nursery: Nursery, world: int) -> None:
    for stage in (0, 1, 2, 3):
        nursery.start(str(stage), "branches", world=world, stage=stage)
    for outcome in nursery.end().values():
        assert outcome.codes == [0] * world, story(outcome)
        assert len({record["sum"] for record in outcome.records}) == 1


# ---- forks and exits


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_forked_workers_do_not_disturb(nursery: Nursery, transport: str) -> None:
    for how in ("", "kill", "kill worker"):
        nursery.start(how, "with_workers", stage=3, transport=transport, how=how)
    outcomes = nursery.end()
    for how in ("", "kill worker"):
        assert outcomes[how].codes == [0, 0], story(outcomes[how])
        assert outcomes[how].records[0]["sum"] == outcomes[how].records[1]["sum"]
        assert not any(outcomes[how].stderr), story(outcomes[how])
    assert "DataLoader worker" in outcomes["kill worker"].records[1]["worker"]
    check_named(outcomes["kill"], 1)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_interpreter_exits_cleanly_without_destroy(nursery: Nursery, transport: str) -> None:
    hows = ["end", "raise", "exit 3", "drop", *(["slow rank"] if transport == "shared" else [])]
    for how in hows:
        nursery.start(how, "leave", stage=3, transport=transport, how=how)
    nursery.start("alone", "leave", world=1, stage=3, transport=transport, how="end")
    outcomes = nursery.end()
    for how, outcome in outcomes.items():
        code = {"raise": 1, "exit 3": 3}.get(how, 0)
        assert set(outcome.codes) == {code}, story(outcome)
        if how == "raise":
            assert all("KeyError: 'on purpose'" in text and "PeerError" not in text for text in outcome.stderr)
        else:
            assert not any(outcome.stderr), story(outcome)
    for record in outcomes["drop"].records:
        assert not record["alive"] and record["mappings"] == [] and "slipstream-watch" not in record["threads"]

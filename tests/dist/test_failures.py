"""Failures: dead ranks, waits that never match, busy ranks, interrupts, forks, exits; lost processes that serve a model.

Ranks are forks of one process (tests/failing.py) and many jobs run concurrently, so that all tests together take little longer
than the longest wait. Times are those that the ranks noted; a loaded machine only delays the ends.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream import checkpoint
from slipstream.ops import build
from tests import cases
from tests.dist.test_launch_agents import Launcher, launcher, wait_for
from tests.failing import Nursery, Outcome

__all__ = ["launcher"]  # a fixture

TRANSPORTS = ("shared", "gloo")
MEMFD = "/memfd:slipstream"


@pytest.fixture(scope="module")
def the_nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("ranks"))
    yield nursery
    nursery.close()


@pytest.fixture
def nursery(the_nursery: Nursery) -> Iterator[Nursery]:
    """The nursery; checks at the end that no process and no shared memory remains."""
    yield the_nursery
    deadline = time.monotonic() + 6  # DataLoader's workers look for their parent every 5 s
    while the_nursery.survivors() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not the_nursery.survivors()
    assert not [pid for pid in (the_nursery.pid, os.getpid()) if holds_memory(pid)], "the others have ended"


def holds_memory(pid: int | str) -> bool:
    """Whether a process maps or has open one of our segments: memfds, which no folder lists and which exist while in use."""
    links = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(fd))
    return any(MEMFD in text for text in (Path(f"/proc/{pid}/maps").read_text(), *links))


def test_what_is_left_in_shared_memory_is_seen() -> None:
    assert not holds_memory("self")
    fd = os.memfd_create("slipstream", os.MFD_CLOEXEC)
    assert holds_memory("self")
    os.ftruncate(fd, 4096)
    mapping = mmap.mmap(fd, 4096)
    os.close(fd)
    assert holds_memory("self")
    mapping.close()
    assert not holds_memory("self")


def story(outcome: Outcome) -> str:
    parts = zip(outcome.codes, outcome.records, outcome.stderr, strict=True)
    return "\n".join(f"rank {rank}: {code}\n{record}\n{text}" for rank, (code, record, text) in enumerate(parts))


def check_named(outcome: Outcome, bad: int, within: float = 5.0) -> None:
    """Check that all other ranks name the bad rank in time."""
    for rank, record in enumerate(outcome.records):
        if rank != bad:
            assert outcome.codes[rank] == 1, story(outcome)
            assert record["error"] == "PeerLostError", story(outcome)
            assert f"rank {bad}" in record["text"].splitlines()[0], story(outcome)
            assert outcome.late(rank, bad) < within, story(outcome)


# ---- a rank that dies or raises

EDGES = {"gather": 3, "reduce": 3, "settle": 1, "exchange": 3, "publish": 1}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_killed_rank_stops_the_others_at_every_edge(nursery: Nursery, transport: str) -> None:
    jobs = [(edge, bad) for edge, bad, where in cases.pairs(tuple(EDGES), (0, 1), TRANSPORTS) if where == transport]
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
def test_a_lost_stage_is_named(nursery: Nursery, transport: str) -> None:
    """A rank that dies or raises in the middle of a pipeline's batch; the text names its stage."""
    jobs = {"kill": 1, "raise": 0}
    for how, bad in jobs.items():
        nursery.start(how, "pipeline", transport=transport, bad=bad, how=how)
    nursery.start("before it is asked", "pipeline", transport=transport, bad=1, how="kill", pause_s=0.5)
    outcomes = nursery.end()
    for how, bad in jobs.items():
        check_named(outcomes[how], bad)
    check_named(outcomes["before it is asked"], 1)
    assert re.match(r"rank 1 \(stage 1, pid \d+\) is gone", outcomes["kill"].records[0]["text"]), story(outcomes["kill"])


def test_a_lost_peer_prints_a_sentence_and_the_traceback_on_request(nursery: Nursery) -> None:
    jobs = [("shared", ""), ("gloo", ""), ("gloo", "1")]
    for transport, asked in jobs:
        nursery.start(f"{transport}{asked}", "early", stage=3, transport=transport, traceback=asked)
    outcomes = nursery.end()
    for transport, asked in jobs:
        outcome = outcomes[f"{transport}{asked}"]
        assert outcome.codes == [1, 0], story(outcome)
        lines = [line for line in outcome.stderr[0].splitlines() if "TCPStore.cpp" not in line]
        sentence = re.compile(r"\S*PeerLostError: rank 1 \(pid \d+\) has ended its script, while other ranks still need it")
        assert sentence.fullmatch(lines[0]) and re.match("rank 0 waited in .*", lines[1]), story(outcome)
        if asked:
            assert lines[2] == "Traceback (most recent call last):" and lines[-2:] == lines[:2], story(outcome)
        else:
            assert re.search(r"toy.py\", line \d+, in step", lines[2]), story(outcome)
            assert lines[4:] == ["SLIPSTREAM_TRACEBACK=1 shows the whole traceback"], story(outcome)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_all_others_name_the_first_to_go(nursery: Nursery, transport: str) -> None:
    for bad in (1, 2):
        nursery.start(str(bad), "train", world=3, stage=3, transport=transport, edge="reduce", bad=bad, how="kill")
    outcomes = nursery.end()
    for bad in (1, 2):
        check_named(outcomes[str(bad)], bad)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_crash_in_a_save_leaves_the_last_checkpoint_whole(nursery: Nursery, transport: str, tmp_path: Path) -> None:
    jobs = (("save", 0), ("save", 1), ("commit", 0))
    for edge, bad in jobs:
        job: dict[str, Any] = {"stage": 3, "transport": transport, "edge": edge, "bad": bad, "how": "kill", "nth": 1}
        nursery.start(f"{edge} {bad}", "train", save=str(tmp_path / f"{edge}{bad}"), **job)
    outcomes = nursery.end()
    for edge, bad in jobs:
        check_named(outcomes[f"{edge} {bad}"], bad)
        folder = tmp_path / f"{edge}{bad}"
        assert checkpoint.latest_tag(folder) == "good"
        assert checkpoint.load_metadata(folder, "good").shared["counters"]["global_steps"] == 1
        left = sorted(path.name for path in folder.iterdir())
        if bad == 1:
            assert left == ["good", "latest"], "rank 0 removes what was begun"


# ---- waits that never match

MISMATCHES = ("skips a backward", "one more backward", "state_dict alone", "save alone", "destroy alone")


def test_waits_that_never_match_end_with_a_table(nursery: Nursery, tmp_path: Path) -> None:
    for i, what in enumerate(MISMATCHES):
        for transport in TRANSPORTS if cases.EVERYTHING else (TRANSPORTS[i % 2],):
            folder = str(tmp_path / transport)
            nursery.start(f"{what}, {transport}", "mismatch", stage=3, transport=transport, what=what, folder=folder)
    outcomes = nursery.end(90)
    alone = outcomes.pop("state_dict alone, shared")
    assert alone.codes == [0, 0], "on shared memory one rank can read all shards"
    for what, outcome in outcomes.items():
        for rank in range(2):
            told = f"{what}\n{story(outcome)}"
            assert outcome.codes[rank] == 1, told
            assert "PeerError: " in outcome.stderr[rank], told
            assert outcome.ended[rank] - outcome.records[rank]["acted"] < 30, told
        said = outcome.stderr[0].replace("[rank0]: ", "")  # torch's marker
        table = re.search(r"rank  step  phase .*unit .*waits in\n(.*\n.*)\n", said)
        agreed = "different branches in the model" in outcome.stderr[0] or "others called another method" in outcome.stderr[1]
        assert table or agreed, told
        if table:
            assert re.search(r"0 +\d .*\n1 +\d ", table.group(1)), told
            assert "PeerError: all ranks wait for each other" in outcome.stderr[1], told


def test_the_table_has_each_ranks_place_on_its_axis(nursery: Nursery, tmp_path: Path) -> None:
    """As that of a pipeline's stages (`test_a_lost_stage_is_named`)."""
    for axis in ("tp", "sp"):
        nursery.start(axis, "places", folder=str(tmp_path), axis=axis)
    for axis, outcome in nursery.end(60).items():
        assert outcome.codes == [1, 1], story(outcome)
        said = "".join(outcome.stderr)
        assert re.search(rf"rank  place .*\n0 +{axis} 0 .*\n1 +{axis} 1 ", said), story(outcome)


# ---- busy ranks


@pytest.mark.slow
def test_a_busy_rank_is_named_and_not_stopped(nursery: Nursery) -> None:
    for transport in TRANSPORTS:
        for by in ("step", "barrier"):
            name = f"{by}, {transport}"
            nursery.start(name, "busy", stage=3, transport=transport, by=by, seconds=5.0, timeout_s=60.0)
        for rank in (0, 1):
            name = f"timeout beside {rank}, {transport}"
            nursery.start(name, "busy", stage=1, transport=transport, by="step", seconds=6.0, timeout_s=2.0, rank=rank)
    outcomes = nursery.end()
    for transport in TRANSPORTS:
        for by in ("step", "barrier"):
            outcome = outcomes[f"{by}, {transport}"]
            assert outcome.codes == [0, 0], story(outcome)
            assert outcome.records[0]["sum"] == outcome.records[1]["sum"]
            said = outcome.stderr[1]
            assert 1 <= said.count("WARNING rank 0 has been busy for") <= 6, story(outcome)
            assert re.search(r"rank  step  phase .*\n0 .*\(runs\)\n1 ", said), story(outcome)
        for rank in (0, 1):
            outcome, other = outcomes[f"timeout beside {rank}, {transport}"], 1 - rank
            waited, busy = outcome.records[other], outcome.records[rank]
            assert waited["error"] == "PeerError" and "waited 2 s" in waited["text"], story(outcome)
            assert 1.5 <= outcome.late(other, other) < 6, story(outcome)
            assert busy["error"] == "PeerLostError", story(outcome)
            assert f"rank {other} failed: PeerError: rank {other} waited 2 s" in busy["text"], story(outcome)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_on_shared_memory_ranks_may_run_different_branches(nursery: Nursery, world: int) -> None:
    for stage in cases.STAGES:
        nursery.start(str(stage), "branches", world=world, stage=stage)
    for outcome in nursery.end().values():
        assert outcome.codes == [0] * world, story(outcome)
        assert len({record["sum"] for record in outcome.records}) == 1


# ---- forks and exits


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_forked_workers_do_not_affect_the_rank(nursery: Nursery, transport: str) -> None:
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
            # torch's own store may warn if rank 0, its server, is the first to exit
            assert not any(text and "TCPStore.cpp" not in text and "socket.cpp" not in text for text in outcome.stderr), story(
                outcome
            )
    for record in outcomes["drop"].records:
        assert not record["alive"] and record["mappings"] == [] and "slipstream-watch" not in record["threads"]


def test_a_script_whose_last_line_is_a_transfer_ends_well(nursery: Nursery) -> None:
    nursery.start("transfer", "last_transfer", world=4)
    outcome = nursery.end()["transfer"]
    assert outcome.codes == [0] * 4, story(outcome)


# ---- processes that serve a model

NATIVE = pytest.mark.skipif(build.load().kernels is None, reason="no native kernels")


def mixtral(folder: Path) -> str:
    pytest.importorskip("transformers")
    from tests.dist.test_serving_experts import write_mixtral

    return str(write_mixtral(folder))


def tiny(family: str, folder: Path) -> str:
    pytest.importorskip("transformers")
    from tests.inference import twins

    twins.tiny(family, **twins.SIZES).save_pretrained(folder)
    return str(folder)


@NATIVE
def test_a_lost_process_of_a_sliced_model_ends_the_other(nursery: Nursery, tmp_path: Path) -> None:
    nursery.start("it", "serve_ranks", folder=mixtral(tmp_path), bad=1, how="kill", split={"tp_size": 2})
    outcome = nursery.end()["it"]
    assert outcome.codes[0] == 1, outcome
    assert "rank 1" in outcome.records[0]["text"] and "is gone" in outcome.records[0]["text"], outcome
    assert outcome.late(0, 1) < 5.0, outcome


@NATIVE
@pytest.mark.slow
def test_a_lost_process_of_a_model_outside_the_table(nursery: Nursery, tmp_path: Path) -> None:
    folder = tiny("Nemotron", tmp_path)
    nursery.start("it", "serve_ranks", folder=folder, bad=1, how="kill", split={"tp_size": 2}, forward="transformers")
    outcome = nursery.end()["it"]
    assert outcome.codes[0] == 1 and "is gone" in outcome.records[0]["text"], outcome
    assert outcome.late(0, 1) < 10.0, outcome


@pytest.mark.parametrize(
    ("bad", "hosts"), [(1, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 1), (0, 1), (0, 2)))]
)
def test_a_lost_process_of_torchs_forward_ends_the_other(nursery: Nursery, tmp_path: Path, bad: int, hosts: int) -> None:
    """In a sum over shared memory, or over gloo (as if of two hosts): the other process ends, and names it."""
    folder = tiny("Llama", tmp_path)
    options: dict[str, Any] = {"how": "kill", "split": {"tp_size": 2}, "forward": "torch", "nth": 40}
    nursery.start("it", "serve_ranks", folder=folder, bad=bad, hosts=hosts, **options)
    outcome = nursery.end()["it"]
    assert outcome.codes[1 - bad] == 1, outcome
    text = outcome.records[1 - bad]["text"]
    assert f"rank {bad}" in text and "is gone" in text, outcome
    assert outcome.late(1 - bad, bad) < 5.0, outcome


@NATIVE
@pytest.mark.slow
def test_a_lost_process_of_experts_ends_the_others(nursery: Nursery, tmp_path: Path) -> None:
    folder = mixtral(tmp_path)
    jobs = [(0, "kill"), (2, "kill"), (1, "raise"), (1, "kill when idle")]
    for bad, how in jobs:
        nursery.start(f"{how} {bad}", "serve_ranks", world=3, folder=folder, bad=bad, how=how, split={"ep_size": 3})
    outcomes = nursery.end()
    for bad, how in jobs:
        outcome = outcomes[f"{how} {bad}"]
        for rank in {0, 1, 2} - {bad}:
            assert outcome.codes[rank] == 1, outcome
            assert f"rank {bad}" in outcome.records[rank]["text"], outcome
            assert ("boom" if how == "raise" else "is gone") in outcome.records[rank]["text"], outcome
            assert outcome.late(rank, bad) < 5.0, outcome


@NATIVE
@pytest.mark.slow
def test_an_interrupt_ends_all_processes_of_a_served_model(nursery: Nursery, tmp_path: Path) -> None:
    nursery.start("it", "serve_ranks", world=3, folder=mixtral(tmp_path), bad=0, how="interrupt", split={"ep_size": 3})
    outcome = nursery.end()["it"]
    assert outcome.codes == [-signal.SIGINT, 0, 0], outcome
    assert outcome.records[0]["error"] == "KeyboardInterrupt", outcome
    assert all("Traceback" not in text for text in outcome.stderr[1:]), outcome


# ---- under the launcher

TRAINING = """
    import os, sys
    from pathlib import Path
    from tests import toy

    how, rank = sys.argv[1], int(os.environ["RANK"])
    engine = toy.make(toy.seeded(toy.Lm), 3, sys.argv[2])
    for step in range(100_000):
        if step == 5:
            Path(f"{how}{rank}").write_text("5")
            if rank == 1 and how == "raise":
                raise ValueError("the cause")
            if rank == 1 and how == "mismatch":
                engine.save_checkpoint("nowhere")
        toy.step(engine, toy.tokens(rank, step))
"""


@pytest.mark.slow
def test_under_the_launcher_the_cause_is_what_the_user_sees(launcher: Launcher) -> None:
    script = launcher.script(TRAINING)
    started = {
        (how, transport): launcher.start("--nproc", "2", script, how, transport)
        for how, transport in (("raise", "gloo"), ("mismatch", "shared"))
    }
    said = {}
    for key, process in started.items():
        _, said[key] = process.communicate(timeout=100)
    err = said["raise", "gloo"]
    assert started["raise", "gloo"].returncode == 1
    assert "rank 1 on host" in err and "failed first" in err and "ValueError: the cause" in err and "Lost" not in err, err
    err = said["mismatch", "shared"]
    assert started["mismatch", "shared"].returncode == 1
    assert "PeerError: all ranks wait for each other" in err and "rank  step  phase" in err, err
    assert "without a record" not in err
    assert launcher.gone(within=10)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo"])  # on shared memory every wait handles signals (tests/unit/test_words.py)
def test_an_interrupt_ends_everything_without_tracebacks(launcher: Launcher, transport: str) -> None:
    process = launcher.start("--nproc", "2", launcher.script(TRAINING), "interrupt", transport)
    for rank in range(2):
        wait_for(launcher.folder / f"interrupt{rank}")
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    assert launcher.ranks_gone(within=5)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130, err
    assert "Traceback" not in err and "PeerError" not in err, err
    assert time.monotonic() - start < 10
    assert launcher.gone(within=1)

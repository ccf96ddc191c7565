"""The benchmark command around its legs, the protocol of its workers, and the sections of RESULTS.md."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks import __main__ as command
from benchmarks import experts_quality, worker
from benchmarks.experts_quality import Curve
from benchmarks.legs import LEGS, ORDER, Leg, Options
from benchmarks.memory import Slope
from benchmarks.ranks import Ranks
from benchmarks.report import RESULTS, head, sections, write_section
from benchmarks.worker import Failed, Worker

ROOT = Path(__file__).resolve().parents[2]
TARGETS = "tests.unit.echo"
STAMP = re.compile(
    r"^Commit ([0-9a-f]{7,}|unknown)( \+ changes)?, \d{4}-\d\d-\d\d \d\d:\d\d UTC, level (\d)\. .*\d+ cores, .*\d+ GiB;", re.M
)


@pytest.fixture
def one() -> Any:
    with Worker(f"{TARGETS}:echo", {"word": "ab"}, name="one") as started:
        started.ready(60)
        yield started


def test_a_worker_replies_and_may_be_stopped(one: Worker) -> None:
    assert one.call("say") == "ab" and one.call("say", times=2) == "abab"
    one.stop()
    one.ask("say")
    with pytest.raises(Failed, match="no reply within 0 s"):
        one.answer(timeout=0.3)
    one.resume()
    assert one.answer() == "ab"


@pytest.mark.parametrize(
    ("handler", "reason"),
    [("wrong", "ValueError: a handler's reason"), ("leave", "exit code 7; some last words"), ("none", "KeyError")],
)
def test_a_worker_that_fails_says_why(one: Worker, handler: str, reason: str) -> None:
    with pytest.raises(Failed, match="one: ") as error:
        one.call(handler)
    assert reason in error.value.reason and "\n" not in error.value.reason
    assert "libraries print" in str(error.value)


def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="there is no python"):
        Worker(f"{TARGETS}:echo", python=tmp_path / "python")
    with Worker(f"{TARGETS}:broken") as started, pytest.raises(Failed, match="not set up"):
        started.ready(60)


def test_a_closed_worker_is_gone_even_if_it_was_stopped(one: Worker) -> None:
    one.stop()
    one.close()
    assert not Path(f"/proc/{one.pid}").exists()


def test_ranks_reply_in_order_and_a_dead_one_does_not_block() -> None:
    with Ranks(f"{TARGETS}:echo", {}, 2, name="pair") as ranks:
        assert ranks.call("rank") == [["0", "2", 1], ["1", "2", 1]]
        for rank, handler in zip(ranks._workers, ("wait", "leave"), strict=True):
            rank.ask(handler)
        with pytest.raises(Failed, match="pair, rank 1: exit code 7"):
            worker.answers(ranks._workers, 30)


def test_a_command_that_fails_says_why() -> None:
    assert worker.run([sys.executable, "-c", "print(5)"]) == "5\n"
    with pytest.raises(Failed, match="exit code 3; reason"):
        worker.run([sys.executable, "-c", "import sys; print('reason', file=sys.stderr); sys.exit(3)"])


# -- the command --


def test_levels_and_names_choose_legs() -> None:
    for arguments, level in (([], 1), (["--all"], 2)):
        legs, options, out = command.parse(arguments)
        assert legs == [leg for leg in LEGS if leg.level == level] and not options.quick and out == RESULTS
    names = [leg.name for leg in LEGS if leg.level == 1]
    assert list(dict.fromkeys(names)) == ["step", "memory", "wire", "optimizer", "offload", "solo"]
    assert sum(leg.minutes for leg in LEGS if leg.level == 1) <= 25
    assert [leg.section for leg in command.parse(["step", "cuda", "--dtype", "bf16"])[0]] == ["step, moving, bf16", "cuda"]
    assert len(set(ORDER)) == len(ORDER)
    with pytest.raises(SystemExit):
        command.parse(["nothing"])


def test_every_leg_has_its_function_and_a_row_in_the_readme() -> None:
    readme = (ROOT / "benchmarks" / "README.md").read_text()
    for leg in LEGS:
        module, _, function = leg.function.partition(":")
        source = (ROOT / "benchmarks" / f"{module.replace('.', '/')}.py").read_text()
        assert f"def {function}(options: Options" in source, leg.name
        assert f"| `{leg.name}` |" in readme, leg.name


@pytest.mark.parametrize("arguments", [[], ["--quick"], ["--quick", "--out"]])
def test_quick_runs_leave_the_results_alone(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(leg: Leg, options: Options) -> str:
        if leg.name == "memory":
            raise Failed("memory", "a reason")
        return "a figure"

    default, other = tmp_path / "RESULTS.md", tmp_path / "other.md"
    monkeypatch.setattr(command, "RESULTS", default)
    monkeypatch.setattr(command, "prepare", lambda legs, options: None)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    monkeypatch.setattr(Leg, "run", run)
    with pytest.raises(SystemExit, match="failed: memory"):
        command.main(["wire", "memory", "optimizer", *arguments, *([str(other)] if "--out" in arguments else [])])
    assert default.exists() == (not arguments)
    assert other.exists() == ("--out" in arguments)
    written = default if default.exists() else other
    if written.exists():
        assert list(sections(written.read_text())) == ["wire", "optimizer"]
    assert re.search(r"\| memory \| 0\.0 \| [\d.]+ \| failed \|", capsys.readouterr().out)


def test_a_whole_level_writes_its_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leg, "run", lambda leg, options: "a figure")
    path = tmp_path / "RESULTS.md"
    assert command.measure([leg for leg in LEGS if leg.level == 1], Options(), path) == []
    written = sections(path.read_text())
    assert next(iter(written)) == "minutes, level 1" and "| in all | 0.0 |" in written["minutes, level 1"]
    for body in written.values():
        assert STAMP.search(body)


def test_memory_is_judged_by_the_larger_count() -> None:
    assert Slope(8.0, None, 0.0).most == 8.0
    assert Slope(8.0, 8.5, 0.0).most == 8.5
    assert Slope(8.0, 7.5, 0.0).most == 8.0


# -- RESULTS.md --


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)


def test_a_section_names_commit_date_and_machine(tmp_path: Path) -> None:
    assert STAMP.match(head(1))
    path = tmp_path / "results.md"
    for title in ("serve, solo", "step, moving, fp32", "gone"):
        write_section(title, "figures", ORDER, path)
    assert list(sections(path.read_text())) == ["step, moving, fp32", "serve, solo"]


def test_results_are_of_commits_before_this_one() -> None:
    """Sections that were written before each named its level are not judged."""
    stamps = {title: stamp for title, body in sections(RESULTS.read_text()).items() if (stamp := STAMP.search(body))}
    assert {stamp[1] for stamp in stamps.values() if stamp[3] == "1"} <= {
        next((s[1] for s in stamps.values() if s[3] == "1"), "")
    }, "the sections of `make bench` are of several commits"
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("no git history")
    for title, stamp in stamps.items():
        assert git("merge-base", "--is-ancestor", stamp[1], "HEAD").returncode == 0, f"{title}: {stamp[1]} is no ancestor"


def test_a_curve_says_when_it_reaches_a_loss() -> None:
    curve = Curve([0.0, 1.0, 2.0, 3.0], [4.0, 4.0, 1.0, 1.0], 30, 1, [0, 10, 20, 30])  # smoothed: 4, 4, 3, 2
    assert [curve.reaches(loss) for loss in (4.5, 4.0, 3.5, 2.0, 1.9)] == [0.0, 0.0, 1.5, 3.0, float("inf")]
    assert [curve.at(step) for step in (0, 10, 15, 30, 40)] == [4.0, 4.0, 3.5, 2.0, 2.0]


def test_mixtures_have_the_active_parameters_of_the_dense_model() -> None:
    pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'slipstream[examples]'")
    models = {system: experts_quality.build(system, 64) for system in ("dense", "moe", "shared", "pyramid")}
    mlp = sum(param.numel() for param in models["dense"].blocks[0].mlp.parameters())
    for system, experts in {"moe": (8, 8, 8), "shared": (8, 8, 8), "pyramid": (2, 2, 4)}.items():
        for block, num in zip(models[system].blocks, experts, strict=True):
            moe = block.mlp.moe
            each = sum(param.numel() for param in moe.experts.parameters()) // num
            dense = sum(param.numel() for module in (moe.residual, moe.shared) if module for param in module.parameters())
            assert moe.num_experts == num and moe.k * each + dense == mlp

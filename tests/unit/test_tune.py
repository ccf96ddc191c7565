"""`slipstream tune`: which configurations run, when runs stop, what a run tells, and a search that is interrupted and goes on."""

import argparse
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import slipstream
from slipstream.compat import launcher
from slipstream.config.trial import PROGRESS, STOP, SURVEY, TASK, VARIABLE, laid_over, nested
from slipstream.launch import cli, hyper, search, tune
from slipstream.launch.search import Candidate, Outcome, Rules

STAGE, MICRO, STEPS = "zero_optimization.stage", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"

SCRIPT = """
import argparse, os, signal, torch, slipstream
parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int)
args = parser.parse_args()
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
engine, *_ = slipstream.initialize(model=model, config={"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}})
micro = engine.plan.batch.micro_batch_size
if micro == 8:
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    engine.backward(engine(torch.ones(args.rows or micro, 64)).square().mean())
    engine.step()
"""


def candidates(**memory: int) -> list[Candidate]:
    """Three stages of two micro-batch sizes; the planner takes stage 3 for slower."""
    return [
        Candidate(
            changes={STAGE: stage, MICRO: micro, STEPS: 16 // micro},
            micro=micro,
            samples=16,
            seconds=2.0 if stage == 3 else 1.0,
            memory=1 << 30,
            fits=f"stage{stage}" not in memory,
        )
        for stage in (1, 2, 3)
        for micro in (1, 16)
    ]


def measured(candidate: Candidate, seconds: float, outcome: str = "measured") -> Outcome:
    return Outcome(changes=candidate.changes, outcome=outcome, samples=16, seconds=seconds, steps=4)


def test_the_fit_has_the_overhead_of_a_micro_batch() -> None:
    factor, overhead = search.fit([(1.0, 1, 3.5), (1.0, 16, 11.0), (2.0, 4, 8.0)])
    assert factor == pytest.approx(3.0)
    assert overhead == pytest.approx(0.5)
    assert search.fit([(1.0, 1, 2.0), (1.0, 16, 2.0)])[1] == 0  # as many calls at no cost


def test_the_next_run_is_the_fastest_after_the_correction_by_those_before() -> None:
    found, rules = candidates(), Rules(runs=9)
    first = search.next_run(found, [], rules)
    assert isinstance(first, Candidate)
    assert first.changes == {STAGE: 1, MICRO: 16, STEPS: 1}  # equal predictions: the larger micro-batch
    slow_stage = [measured(first, 8.0), measured(found[5], 2.0)]  # stage 1 is slow here, whatever the planner says
    ranked = [each.changes[STAGE] for each, _ in search.order(found, slow_stage, rules)]
    assert ranked.index(3) < ranked.index(1)


def test_the_search_ends_with_a_reason() -> None:
    found = candidates()
    rows = [measured(found[1], 1.0), measured(found[3], 1.0), measured(found[5], 2.1)]
    assert search.next_run(found, rows[:2], Rules(runs=2)) == "2 runs were allowed"
    assert search.next_run(found, rows, Rules(patience=2)) == "2 runs in a row were no faster"
    assert search.next_run(found[1::2], rows[:2], Rules(patience=3)) == "all others are predicted at least 15% slower"
    assert search.next_run(found[:1], [measured(found[0], 1.0)], Rules()) == "every candidate has run"
    grid = Rules(tuner="gridsearch", patience=9)
    assert search.next_run(found, rows[:1], grid) == found[0]


def test_what_does_not_fit_never_runs() -> None:
    found = candidates(stage1=1, stage2=1)
    ordered = search.order(found, [], Rules())
    assert {each.changes[STAGE] for each, _ in ordered} == {3}
    assert "needs 1.00 GiB, above 0.50" in search.why_not_run(found[0], 1.0, None, Rules(), "", 1 << 29).replace(
        "predicted to need", "needs"
    )


def test_a_run_is_stopped_outside_the_better_half() -> None:
    rows = [Outcome(changes={}, outcome="measured", rungs=(1.0, 1.0)), Outcome(changes={}, outcome="stopped", rungs=(3.0,))]
    assert not search.is_slow([9.0], [])
    assert search.is_slow([1.2], rows)
    assert not search.is_slow([1.04], rows)  # noise
    assert search.is_slow([0.9, 1.2], rows)
    assert list(search.rungs(12, Rules())) == [3, 6]
    assert list(search.rungs(60, Rules(metric="loss"))) == [15, 30]


def test_axes_micro_batches_and_a_script_that_feeds_what_it_likes() -> None:
    found = [*candidates(), Candidate(changes={}, micro=4, samples=16)]
    assert [each.changes for each in search.kept(found, ["stage"])] == [{}]
    assert {each.micro for each in search.kept(found, ["stage", "micro"], micros=[16])} == {4, 16}
    assert {each.micro for each in search.kept(found, ["stage", "micro"], largest=1)} == {4, 16}
    assert [each.changes for each in search.kept(found, list(search.AXES), fixed=4)] == [{}]


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("noise\nslipstream run: rank 0 on host a failed first (exit code 1)\n\nValueError: no\n  line\n", "ValueError: no"),
        ("x failed first (exit code -9, SIGKILL)\n  killed by signal 9\n", "out of memory: killed by signal 9"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried\n", "torch.OutOfMemoryError: CUDA out of memory. Tried"),
        ("", "exit code 3"),
    ],
)
def test_the_reason_of_a_failed_run(log: str, reason: str) -> None:
    assert search.reason_of(3, log) == reason


def test_a_config_is_laid_over_another() -> None:
    base = {"train_batch_size": 8, "zero_optimization": {"stage": 3, "reduce_scatter": True}, MICRO: 2}
    over = nested({STAGE: 1, "optimizer.params.lr": 0.1}) | {MICRO: "auto"}
    assert laid_over(base, over) == {
        "train_batch_size": 8,
        "zero_optimization": {"stage": 1, "reduce_scatter": True},
        MICRO: 2,
        "optimizer": {"params": {"lr": 0.1}},
    }
    assert laid_over({"zero_optimization": True}, nested({f"{STAGE[:-5]}offload_optimizer.device": "cpu"})) == {
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    }, "true is stage 1, which the run keeps"


def test_the_scripts_options_follow_the_config() -> None:
    mapped = {MICRO: "--bs", "optimizer.params.lr": "--lr"}
    config = {MICRO: 4, "optimizer": {"params": {"lr": 0.1}}}
    assert tune.with_mappings(["--bs", "1", "x", "--lr=2"], mapped, config) == ["x", "--bs", "4", "--lr", "0.1"]


def options(tmp_path: Path, *words: str) -> argparse.Namespace:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "config.json").write_text(json.dumps({"train_batch_size": 16, MICRO: 4}))
    before = ["tune", str(tmp_path / "config.json"), "--folder", str(tmp_path / "out"), "--script", str(tmp_path / "train.py")]
    parsed = cli.build_parser().parse_args([*before, *words])
    parsed.after = []
    return parsed


def test_the_autotuning_block(tmp_path: Path) -> None:
    block = {
        "enabled": True,
        "fast": False,
        "overwrite": False,
        "results_dir": "there",
        "metric": "latency",
        "start_profile_step": 1,
        "end_profile_step": 7,
        "tuner_type": "random",
        "tuner_num_trials": 5,
        "tuner_early_stopping": 4,
        "max_train_batch_size": 64,
        "min_train_batch_size": 8,
        "max_train_micro_batch_size_per_gpu": 32,
        "min_train_micro_batch_size_per_gpu": 2,
        "num_tuning_micro_batch_sizes": 2,
        "arg_mappings": {f"{MICRO} ": "--rows"},
    }
    settled = options(tmp_path)
    settled.folder = None
    rules = tune.settle(settled, {"autotuning": block})
    assert rules == Rules(runs=5, patience=4, metric="latency", tuner="random")
    assert (settled.folder, settled.warmup, settled.steps, settled.overwrite, settled.max_batch) == ("there", 1, 6, False, 64)
    assert (settled.micro_range, settled.min_batch, settled.num_micro_batches) == ((2, 32), 8, 2)
    assert (settled.axes, settled.mappings) == (list(search.AXES), {MICRO: "--rows"})
    assert tune.settle(options(tmp_path, "--runs", "3"), {"autotuning": block}).runs == 3  # the command line prevails
    assert tune.settle(options(tmp_path), {"autotuning": {"enabled": False}}) == Rules()
    with pytest.raises(ValueError, match=r"end_profile_step \(3\) must be above"):
        tune.settle(options(tmp_path), {"autotuning": {"enabled": True, "end_profile_step": 3}})


def test_deepspeeds_command_is_slipstream_tune() -> None:
    words = launcher.translate("--num_gpus 2 --autotuning run train.py --deepspeed_config=a.json --lr 1".split())  # noqa: SIM905
    launch = "--launch-args=--pass-local-rank --num_gpus 2"
    assert words == ["tune", "a.json", launch, "--train", "--script", "train.py", "--", "--deepspeed_config=a.json", "--lr", "1"]
    cli.build_parser().parse_args(words[: words.index("--")])


def test_a_trial_measures_surveys_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"memory": 1 << 30, "host": 0, "disk": None, "max_batch": 32}
    over = {"train_batch_size": 16, MICRO: 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    (tmp_path / TASK).write_text(json.dumps({"config": over, "warmup": 1, "steps": 3, "survey": wanted}))
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    engine, *_ = slipstream.initialize(model=torch.nn.Linear(8, 1), config={MICRO: 1})
    with pytest.raises(SystemExit) as left:
        for _ in range(100):
            engine.backward(engine(torch.ones(4, 8)).mean())
            engine.step()
    assert left.value.code == 0
    head, *steps = map(json.loads, (tmp_path / PROGRESS).read_text().splitlines())
    assert head == {"samples": 16, "micro": 4, "rows": 4, "ranks": 1}
    assert [step["timed"] for step in steps] == [False, True, True, True]
    assert steps[1]["loss"] < steps[0]["loss"]
    survey = json.loads((tmp_path / SURVEY).read_text())["candidates"]
    assert {(each["micro"], each["samples"]) for each in survey} >= {(1, 16), (16, 16), (32, 32)}
    assert {} in [each["changes"] for each in survey]
    assert all(each["seconds"] > 0 and each["fits"] for each in survey)
    engine.destroy()


def test_a_trial_ends_early_when_the_tuner_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / TASK).write_text(json.dumps({"config": {}, "warmup": 1, "steps": 90}))
    (tmp_path / STOP).touch()
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    config = {MICRO: 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = slipstream.initialize(model=torch.nn.Linear(8, 1), config=config)
    steps = 0
    with pytest.raises(SystemExit):
        while steps < 90:
            engine.backward(engine(torch.ones(1, 8)).mean())
            steps += 1
            engine.step()
    assert steps == 2
    engine.destroy()


def test_a_folder_that_is_no_search_is_left_alone(tmp_path: Path) -> None:
    there = options(tmp_path, "--overwrite")
    there.folder = str(tmp_path)
    rules = tune.settle(there, {})
    with pytest.raises(ValueError, match=r"has no tuning.json of a search: name another --folder"):
        tune.Tuner(there, {}, rules).open()
    assert (tmp_path / "train.py").exists()


def test_a_folder_of_another_search_is_refused_unless_it_may_be_overwritten(tmp_path: Path) -> None:
    given = options(tmp_path)
    rules = tune.settle(given, {})
    tune.Tuner(given, {MICRO: 1}, rules).open()
    tune.Tuner(given, {MICRO: 1}, rules).open()
    with pytest.raises(ValueError, match="has a search with another config: pass --overwrite"):
        tune.Tuner(given, {MICRO: 2}, rules).open()
    other = options(tmp_path, "--metric", "latency")  # whose costs are not those that are known
    with pytest.raises(ValueError, match="has a search with another metric: pass --overwrite"):
        tune.Tuner(other, {MICRO: 1}, tune.settle(other, {})).open()
    longer = options(tmp_path, "--steps", "20")
    tune.Tuner(longer, {MICRO: 1}, tune.settle(longer, {})).open()
    given.overwrite = True
    tune.Tuner(given, {MICRO: 2}, rules).open()


@pytest.mark.slow
def test_a_search_survives_a_killed_run_and_an_interruption(tmp_path: Path) -> None:
    tune.settle(options(tmp_path), {})  # writes the script and its config
    command = [
        sys.executable,
        "-m",
        "slipstream",
        "tune",
        "config.json",
        "--steps",
        "4",
        "--patience",
        "9",
        "--tuner",
        "gridsearch",
    ]
    command += ["--axes", "micro", "--script", "train.py"]

    def start() -> "subprocess.Popen[str]":
        return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    state, first = tmp_path / "tuning" / "tuning.json", start()
    while not (state.exists() and "outcome" in state.read_text()) and first.poll() is None:
        time.sleep(0.05)
    first.send_signal(signal.SIGINT)
    said, _ = first.communicate()
    assert first.returncode == 130
    assert "the same command goes on" in said
    again = start()
    said, _ = again.communicate()
    assert again.returncode == 0, said
    assert "going on from" in said
    rows: list[dict[str, Any]] = json.loads(state.read_text())["table"]
    killed = [row for row in rows if row["changes"].get(MICRO) == 8]
    assert [row["outcome"] for row in killed] == ["failed"]
    assert "SIGKILL" in killed[0]["reason"] or "signal 9" in killed[0]["reason"]
    assert sum(row["outcome"] in ("best", "measured", "stopped") for row in rows) == 4
    best = json.loads((tmp_path / "tuning" / "best.json").read_text())
    assert best["train_batch_size"] == 16
    assert "| best |" in (tmp_path / "tuning" / "tuning.md").read_text()
    fixed = subprocess.run(
        [*command, "--overwrite", "--", "--rows", "3"], cwd=tmp_path, capture_output=True, text=True, env=os.environ
    )
    assert "the script feeds 3 rows" in fixed.stderr


def test_ranges_of_values() -> None:
    assert hyper.range_of("lr=1e-5:1e-2:log") == hyper.Range(hyper.LR, 1e-5, 1e-2, log=True, whole=False)
    assert hyper.range_of("gradient_clipping=1:4:int") == hyper.Range("gradient_clipping", 1, 4, log=False, whole=True)
    for wrong in ("lr", "lr=1", "lr=2:1", "lr=0:1:log", "lr=a:b"):
        with pytest.raises(ValueError, match="is not KEY=LOW:HIGH"):
            hyper.range_of(wrong)


def test_options_of_the_other_search_are_refused(tmp_path: Path) -> None:
    for words, name in (("--search lr=1:2 --metric latency", "metric"), ("--lr-range 1:2 --max-batch 64", "max-batch")):
        with pytest.raises(ValueError, match=f"--{name} has no effect with --search and --lr-range: leave it out"):
            tune.settle(options(tmp_path, *words.split()), {})


def test_a_range_test_of_a_script_whose_loss_is_not_known_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that calls loss.backward() trains as well, and the engine never sees the loss."""
    given = options(tmp_path, "--lr-range", "1e-6:1", "--steps", "2", "--warmup", "0")
    tuner = tune.Tuner(given, {MICRO: 4}, tune.settle(given, {}))
    tuner.open()

    class Ended:
        returncode = 0

        def __init__(self, command: Any, **_: Any) -> None:
            lines = [{"samples": 4, "micro": 4, "rows": 4}, *({"seconds": 1.0, "timed": True, "lr": 1e-3, "memory": 1},) * 2]
            (tuner.folder / "runs" / "0" / PROGRESS).write_text("".join(json.dumps(line) + "\n" for line in lines))

        def poll(self) -> int:
            return 0

    monkeypatch.setattr(subprocess, "Popen", Ended)
    with pytest.raises(ValueError, match=r"learning rates failed: the loss does not go through engine.backward"):
        hyper.search(tuner)


def test_a_range_test_finds_the_steepest_descent_and_the_divergence() -> None:
    rates = [10 ** (-6 + 6 * i / 119) for i in range(120)]
    noise = random.Random(0)
    flat = [4 + noise.gauss(0, 0.1) for _ in rates]
    losses = [each - 3 / (1 + (1e-3 / rate) ** 2) if rate < 0.1 else 100.0 for each, rate in zip(flat, rates, strict=True)]
    found = hyper.read(rates, losses)
    assert found.steepest is not None
    assert 5e-4 < found.steepest < 2e-3
    assert found.diverges is not None
    assert 0.09 < found.diverges < 0.3
    assert found.suggested == found.steepest
    assert hyper.read(rates[:80], losses[:80]).diverges is None
    assert hyper.read(rates, flat) == hyper.Found(None, None)
    assert hyper.read(rates, [*flat[:100], *[math.nan] * 20]) == hyper.Found(None, rates[100])
    with pytest.raises(ValueError, match="choose a wider --lr-range"):
        _ = hyper.Found(None, None).suggested


def test_a_range_test_sets_the_rate_of_each_step_in_all_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / TASK).write_text(json.dumps({"config": {MICRO: 1}, "steps": 5, "rates": [1e-4, 1.0]}))
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    model, seen = torch.nn.Linear(8, 1), list[tuple[float, float]]()
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}]
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 0.5}}
    config = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "scheduler": schedule}
    engine, *_ = slipstream.initialize(model=model, model_parameters=groups, config=config)
    with pytest.raises(SystemExit):
        while True:
            loss = engine(torch.ones(1, 8)).mean()
            seen.append((engine.optimizer.param_groups[0]["lr"], engine.optimizer.param_groups[1]["lr"]))
            engine.backward(loss)
            engine.step()
    assert [first for first, _ in seen] == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1.0])
    lines = [json.loads(line) for line in (tmp_path / PROGRESS).read_text().splitlines()]
    assert [line["lr"] for line in lines[1:]] == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1.0])
    engine.destroy()


class Stub:
    """A tuner whose runs are a parabola over the logarithm of the learning rate."""

    def __init__(self, *searched: str, runs: int) -> None:
        self.options = argparse.Namespace(search=list(searched), lr_range=None)
        self.rules, self.rows = Rules(metric="loss", runs=runs), list[Outcome]()

    def run(self, changes: dict[str, Any]) -> Outcome:
        loss = (math.log10(changes[hyper.LR]) + 3) ** 2
        self.rows.append(Outcome(changes=changes, outcome="measured", samples=1, seconds=1.0, loss=loss))
        return self.rows[-1]


def test_values_are_searched_by_the_loss_and_go_on_from_known_runs() -> None:
    pytest.importorskip("optuna")
    stub: Any = Stub("lr=1e-6:1:log", runs=16)
    assert hyper.search(stub) == "16 runs were allowed"
    best = search.best_of(stub.rows, stub.rules)
    assert best is not None
    assert 1e-4 < best.changes[hyper.LR] < 1e-2
    stub.rules = stub.rules._replace(runs=18)
    hyper.search(stub)
    assert len(stub.rows) == 18


def test_a_search_without_optuna_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    stub: Any = Stub("lr=1e-6:1:log", runs=2)
    with pytest.raises(ValueError, match=r"--search needs the package optuna.*\[tune\]"):
        hyper.search(stub)

"""The serving benchmark's traces, and its account of latency, limits and verdicts; no model runs."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from benchmarks.serving import contenders, gpt2, load, measure, poisson, shared, solo, traces
from benchmarks.serving.contenders import OURS, VLLM, Contender, Fleet, Process
from benchmarks.serving.limits import Rates, Shape
from benchmarks.serving.traces import Ask, Feed, Latency, Outcome
from benchmarks.worker import Failed

LEGS = {"solo": solo, "shared": shared, "poisson": poisson, "load": load}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def outcome(prompts: Sequence[int], arrived: Sequence[float], times: Sequence[Sequence[float]]) -> Outcome:
    return Outcome(prompts=[*prompts], arrived=[*arrived], times=[[*row] for row in times], first=[0] * len(prompts), cpu=0.0)


def test_traces_are_the_same_for_all_and_other_ones_in_each_round() -> None:
    for make in (solo.FIGURES["batch"].trace, solo.FIGURES["mixed"].trace, lambda seed: traces.shared(seed, 4, 100, 8)):
        assert make(0) == make(0)
        assert {ask.prompt for ask in make(0)}.isdisjoint(ask.prompt for ask in make(1))
        assert [len(ask.prompt) for ask in make(0)] == [len(ask.prompt) for ask in make(1)]


def test_no_prompt_begins_like_another_traces() -> None:
    """Or a prefix cache would answer for the second of them. 16 tokens are a block of the cache."""
    all_traces = [figure.trace(turn) for figure in solo.FIGURES.values() for turn in range(3)]
    all_traces += [traces.poisson(turn, 24, rate) for turn in range(3) for rate in poisson.RATES]
    begins = [ask.prompt[:16] for trace in all_traces for ask in trace]
    assert len(set(begins)) == len(begins)


def test_mixed_has_every_length_once() -> None:
    lengths = [len(ask.prompt) for ask in traces.mixed(0, 32, 32, 768, 64)]
    assert (min(lengths), max(lengths), len(set(lengths))) == (32, 768, 32)
    assert lengths != sorted(lengths)


def test_poisson_has_the_means_that_it_names_and_the_same_sizes_at_every_rate() -> None:
    slow, fast = traces.poisson(3, 2000, 1.0), traces.poisson(3, 2000, 4.0)
    assert [(len(ask.prompt), ask.outputs) for ask in slow] == [(len(ask.prompt), ask.outputs) for ask in fast]
    assert slow[-1].at == pytest.approx(4 * fast[-1].at)
    assert slow[-1].at == pytest.approx(2000, rel=0.1)
    lengths, outputs = [len(ask.prompt) for ask in slow], [ask.outputs for ask in slow]
    assert statistics.mean(lengths) == pytest.approx(260, rel=0.03) and statistics.stdev(lengths) == pytest.approx(78, rel=0.1)
    assert statistics.mean(outputs) == pytest.approx(32, rel=0.03) and statistics.stdev(outputs) == pytest.approx(9.6, rel=0.1)


def test_shared_has_nine_tenths_in_common_and_one_that_goes_ahead() -> None:
    trace = traces.shared(0, 5, 640, 16)
    assert len({ask.prompt[:576] for ask in trace}) == 1 and len({ask.prompt[576] for ask in trace}) > 1
    assert [ask.after for ask in trace] == [None, 0, 0, 0, 0]


def test_feed_lets_requests_come_when_they_are_due_and_keeps_the_time() -> None:
    clock = Clock()
    feed = Feed([Ask(prompt=(1, 2), outputs=2), Ask(prompt=(3,), outputs=1, at=5.0), Ask(prompt=(4,), outputs=1, after=0)], clock)
    assert feed.due() == [0] and feed.due() == [] and feed.pause() == 5.0
    clock.now += 1
    feed.take(0, 70)
    clock.now += 2
    feed.take(0, 71)  # it has ended, so the third comes
    assert feed.pause() == 0.0 and feed.due() == [2] and feed.pause() == 2.0
    clock.now += 4
    assert feed.due() == [1] and feed.pause() == math.inf
    feed.take(1, 72)
    assert not feed.over
    feed.take(2, 73)
    assert feed.over
    assert feed.times == [[1.0, 3.0], [7.0], [7.0]] and feed.arrived == [0.0, 5.0, 3.0] and feed.first == [70, 72, 73]
    with pytest.raises(RuntimeError, match="request 1 got more than its 1 tokens"):
        feed.take(1, 74)


def test_rates_of_an_outcome() -> None:
    one = outcome([100, 10], [0.0, 1.0], [[2.0, 2.5, 3.0], [1.5, 4.0]])
    assert one.seconds == 4.0 and one.output_rate == 5 / 4 and one.prompt_rate == 50.0 and one.stream_rate == 2.0
    assert sorted(one.gaps) == [0.5, 0.5, 2.5]
    assert Outcome(**json.loads(json.dumps(dataclasses.asdict(one)))) == one


def test_a_request_counts_only_if_its_first_token_and_every_gap_are_in_time() -> None:
    target = Latency(prompt_rate=100.0, gap=0.5)
    assert target.met(200, 1.0, [3.0, 3.5, 4.0])
    assert not target.met(200, 0.9, [3.0, 3.5, 4.0])  # the prompt took 2.1 s
    assert not target.met(200, 1.0, [3.0, 3.6, 4.0])
    both = outcome([200, 200], [1.0, 1.0], [[3.0, 3.5, 4.0], [3.0, 3.6, 4.0]])
    assert target.good(both) == 1 and target.rate(both) == 1 / 4


@pytest.mark.parametrize(("best", "rate"), [(4000.0, 512.0), (900.0, 225.0)])
def test_the_target_is_fixed_by_the_best_solo_speeds(best: float, rate: float) -> None:
    assert traces.target([best / 2, best], [20.0, 80.0]) == Latency(rate, 0.05)


def test_percentile_is_the_nearest_rank() -> None:
    values = [float(value) for value in range(1, 101)]
    assert traces.percentile(values, 0.95) == 95.0 and traces.percentile([3.0], 0.95) == 3.0
    assert math.isnan(traces.percentile([], 0.95))


def test_overloaded_is_two_bad_rates_in_a_row() -> None:
    target = Latency(1.0, 1.0)
    good, bad = outcome([1], [0.0], [[0.5, 1.0]]), outcome([1], [0.0], [[5.0, 9.0]])
    assert not poisson.overloaded({1.0: [good]}, target)
    assert not poisson.overloaded({1.0: [good], 2.0: [bad]}, target)
    assert poisson.overloaded({1.0: [good], 2.0: [bad], 4.0: [bad]}, target)
    assert poisson.overloaded({1.0: [bad], 2.0: [bad]}, target)


def test_limits_are_those_of_the_design(tmp_path: Path) -> None:
    """SmolLM2-135M at 36 GB/s and 423 GFLOP/s: 134 tok/s (bf16) and 268 (int8) in a single stream, 361 in a batch of 16."""
    config = {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape, rates = Shape.read(tmp_path), Rates(36e9, 423e9, 200e9)
    assert rates.read / shape.weight_bytes("bf16") == pytest.approx(134, rel=0.01)
    assert rates.read / shape.weight_bytes("int8") == pytest.approx(268, rel=0.01)
    assert 1024 / shape.seconds(traces.batch(0, 16, 256, 64), "bf16", rates) == pytest.approx(361, rel=0.05)
    assert 512 * rates.multiply / shape.prompt_flops(512) == pytest.approx(1990, rel=0.1)


def test_a_peer_that_is_not_there_is_a_reason_and_ours_is_the_end(tmp_path: Path) -> None:
    fleet = Fleet({"vllm": tmp_path / "python", "ours": tmp_path / "python"}, tmp_path)
    assert fleet.start(VLLM) is None
    assert "there is no python" in fleet.missing[VLLM.name] and measure.absent(fleet)[0][0] == VLLM.name
    with pytest.raises(Failed, match="ours:bf16: there is no python"):
        fleet.start(OURS)


def test_a_peer_that_fails_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    """A worker of a kind that does not exist: started for real, in this interpreter."""
    contender = Contender(kind="nobody", precision="bf16")
    fleet = Fleet({"nobody": Path(sys.executable)}, tmp_path)
    assert fleet.start(contender) is None and not fleet.running
    assert "KeyError: 'nobody'" in fleet.missing[contender.name]
    with pytest.raises(Failed, match="KeyError"):
        Process(contender, Path(sys.executable), tmp_path)


def test_what_was_not_measured_is_a_row_with_the_reason() -> None:
    assert measure.judged("a", measure.ratios([1.0], None, "vLLM wants AVX-512"), 2.5)[1:] == [
        "-",
        ">= 2.5",
        "not measured: vLLM wants AVX-512",
    ]
    assert measure.judged("a", measure.ratios([6.0, 9.0, 4.0], [2.0, 2.0, 2.0], None), 2.5)[1:] == ["3.00", ">= 2.5", "reached"]
    assert poisson.over([1.0], [0.0]) == [math.inf]


class Pretended:
    """A process that serves everything at fixed speeds, ours at twice the others'; vLLM is not there."""

    def __init__(self, contender: Contender, python: Path, models: Path, before: Path | None) -> None:
        assert before is not None or contender.kind != "before"
        if contender.kind == "vllm":
            raise Failed(contender.name, "it is not installed")
        self.contender = contender
        self.facts = {"threads": 2, "precision": contender.precision, "setting": "", "kernels": "pretended"}
        self.loaded, self.first_token = 1.0, 2.0
        self.speed = 2.0 if contender.kind == "ours" and not contender.extra else 1.0

    def run(self, trace: traces.Trace) -> Outcome:
        step = 0.01 / self.speed
        times = [[ask.at + step * len(ask.prompt) / 10 + step * i for i in range(ask.outputs)] for ask in trace]
        lengths, arrived = [len(ask.prompt) for ask in trace], [ask.at for ask in trace]
        return Outcome(prompts=lengths, arrived=arrived, times=times, first=[ask.prompt[0] for ask in trace], cpu=1.0)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("name", LEGS)
def test_every_leg_judges_and_names_who_is_missing(name: str, quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "Process", Pretended)
    monkeypatch.setattr(load, "served", lambda: (3.0, 3.5))
    monkeypatch.setattr(measure.Run, "measure_limits", lambda self: self.limits.append(Rates(36e9, 1e9, 148e9)))
    shape = Shape(matrices=106_000_000, head=28_000_000, attention_flops=69_120, kv_bytes=23_040)
    pythons = dict.fromkeys(("ours", "vllm", "llama"), tmp_path)
    body = LEGS[name].measure(measure.Run(pythons=pythons, models=tmp_path, shape=shape, quick=quick, rounds=1 if quick else 2))
    assert ("reached" in body or "missed" in body) and "ours:bf16" in body and "nan" not in body
    assert ("it is not installed" in body) == (not quick)
    if name == "solo":
        assert "| single stream, bf16, over llama.cpp | 2.00 | >= 1.3 | reached |" in body
        why = "not in this run" if quick else "it is not installed"
        assert f"| single stream, bf16, over vLLM's best | - | >= 2.5 | not measured: {why} |" in body


@pytest.mark.parametrize("before", [None, Path("elsewhere")])
def test_gpt2_beside_another_checkout(before: Path | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "Process", Pretended)
    monkeypatch.setattr(measure.Run, "measure_limits", lambda self: self.limits.append(Rates(36e9, 1e9, 148e9)))
    pythons = dict.fromkeys(("ours", "before", "vllm"), tmp_path)
    shape = Shape(matrices=85_000_000, head=38_000_000, attention_flops=36_864, kv_bytes=36_864)
    body = gpt2.measure(measure.Run(pythons=pythons, models=tmp_path, shape=shape, quick=False, rounds=1, before=before))
    for precision in ("bf16", "int8"):
        row = f"| single stream, {precision}, over the checkout before | 2.00 | >= 1 | reached |"
        assert (row in body) == (f"before:{precision}" in body) == (before is not None)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_random_blocks_keep_the_scale_of_their_inputs(kind: str) -> None:
    import gguf
    import numpy as np
    from benchmarks.serving.k_quants import blocks

    rows = blocks(kind, (64, 2048), np.random.default_rng(0))
    values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind]) * 2048**0.5
    assert values.shape == (64, 2048) and 0.9 < values.std() < 1.1 and abs(values.mean()) < 0.05

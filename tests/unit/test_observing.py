"""Lines of times, memory and speed, natively and under DeepSpeed's names; traces with names."""

import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import slipstream
from slipstream.compat import comm as compat_comm
from slipstream.compat import engine as compat
from slipstream.compat.timers import SynchronizedWallClockTimer, ThroughputTimer, trim_mean
from tests import toy


def trained(start: Any = slipstream.initialize, steps: int = 3, stage: int = 3, **blocks: Any) -> Any:
    """The engine after steps of two micro-batches."""
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage},
        **blocks,
    }
    config |= {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}}}
    engine, *_ = start(model=toy.seeded(toy.Net), config=config)
    for step in range(steps):
        for which in range(2):
            engine.backward(engine(toy.floats(0, step, which)).square().mean())
            engine.step()
    return engine


def test_memory_breakdown(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        trained(steps=1).destroy()
        assert "memory, " not in caplog.text
        trained(steps=1, memory_breakdown=True).destroy()
    lines = [line for line in caplog.messages if line.startswith("memory, ")]
    assert [line.split(",")[1].strip() for line in lines] == ["forward", "backward", "forward", "backward", "step"]
    for line in lines:
        before, after, peak = map(float, re.findall(r"host ([\d.]+) -> ([\d.]+) MiB.*peak ([\d.]+) MiB; states", line)[0])
        assert 50 < before <= peak and 50 < after <= peak and "rank 0" in line
        assert float(re.findall(r"as predicted, ([\d.]+) MiB", line)[0]) >= 0


def test_timers(caplog: pytest.LogCaptureFixture) -> None:
    for enabled in (True, False):
        with caplog.at_level(logging.INFO):
            caplog.clear()
            trained(steps=2, steps_per_print=1, timers={"throughput": {"enabled": enabled}}).destroy()
        assert ("samples/s" in caplog.text) is enabled and "step 2, skipped 0" in caplog.text


def test_trace(tmp_path: Path) -> None:
    block = {"steps": [1, 3], "folder": str(tmp_path / "trace")}
    engine = trained(steps=4, slipstream={"trace": block})
    assert not engine.progress.around and not engine.module.blocks[0]._forward_hooks.keys() & {None}
    events = json.loads((tmp_path / "trace" / "rank-0.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    for name, count in (("forward", 4), ("backward", 4), ("step", 2)):
        assert names.count(name) == count
    for block_name in ("blocks.0", "blocks.1", "blocks.2"):
        assert names.count(f"forward of {block_name}") == names.count(f"backward of {block_name}") == 4
    engine.destroy()
    with pytest.raises(ValueError, match=r"slipstream\.trace\.steps is \[3, 3\]"):
        trained(slipstream={"trace": {"steps": [3, 3]}})


def test_a_trace_that_the_end_cuts_short_is_written(tmp_path: Path) -> None:
    trained(steps=1, slipstream={"trace": {"steps": [0, 9], "folder": str(tmp_path)}}).destroy()
    assert "backward of blocks.0" in (tmp_path / "rank-0.json").read_text()


# -- DeepSpeed's lines --

_MS = r"\d+\.\d\d"
MICRO = re.compile(
    rf"time \(ms\) \| fwd_microstep: ({_MS}) \| bwd_microstep: ({_MS}) \| bwd_inner_microstep: ({_MS}) "
    rf"\| bwd_allreduce_microstep: ({_MS})( \| step_microstep: ({_MS}))?$"
)
WHOLE = re.compile(
    rf"time \(ms\) \| fwd: ({_MS}) \| bwd: ({_MS}) \| bwd_inner: ({_MS}) \| bwd_allreduce: ({_MS}) \| step: ({_MS})$"
)
SPEED = re.compile(
    r"epoch=0/micro_step=(\d+)/global_step=(\d+), RunningAvgSamplesPerSec=([\d.]+), CurrSamplesPerSec=([\d.]+), "
    r"MemAllocated=[\d.]+GB, MaxMemAllocated=[\d.]+GB$"
)


def test_lines_of_times(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        engine = trained(compat.initialize, steps=4, wall_clock_breakdown=True, steps_per_print=2)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("time")]
    assert [bool(MICRO.match(line)) for line in lines] == [True, True, False] * 4
    assert all(WHOLE.match(line) for line in lines[2::3])
    for start in range(0, 12, 3):
        micro = [MICRO.match(line) for line in lines[start : start + 2]]
        whole = WHOLE.match(lines[start + 2])
        assert whole is not None and all(micro)
        forward = sum(float(found[1]) for found in micro if found is not None)
        assert forward == pytest.approx(float(whole[1]), abs=0.03)
        assert float(whole[2]) == pytest.approx(float(whole[3]) + float(whole[4]), abs=0.03)
    said = [line for line in caplog.messages if line.startswith("step=")]
    assert said == [f"step={step}, skipped=0, lr=[0.001], mom=[(0.9, 0.95)]" for step in (2, 4)]
    speeds = [SPEED.match(line) for line in caplog.messages if line.startswith("epoch=")]
    assert len(speeds) == 1 and speeds[0] is not None and speeds[0].groups()[:2] == ("8", "4"), "the first two steps do not count"
    assert engine.tput_timer.avg_samples_per_sec() > 0 and "step 2:" not in caplog.text
    assert set(engine.get_wall_clock_timers()) == {*_names(""), *_names("_microstep")}
    assert engine.timers("own").elapsed() == 0 and engine.flops_profiler is None
    engine.destroy()


def _names(suffix: str) -> set[str]:
    return {f"{name}{suffix}" for name in ("fwd", "bwd", "bwd_inner", "bwd_allreduce", "step")}


@pytest.mark.alone
def test_times_cover_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    """The parts of a micro-batch of one step sum to its time, within 2 % at a few milliseconds each."""
    import time

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.05)
            return self.linear(x).square().mean()

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "wall_clock_breakdown": True,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    engine, *_ = compat.initialize(model=Slow(), config=config)
    for _ in range(2):
        start = time.perf_counter()
        engine.backward(engine(torch.ones(2, 4)))
        engine.step()
        seconds = time.perf_counter() - start
    engine.destroy()
    line = WHOLE.match(capsys.readouterr().out.splitlines()[-1])
    assert line is not None
    assert sum(float(line[part]) for part in (1, 2, 5)) == pytest.approx(1e3 * seconds, rel=0.02)


def test_lines_of_memory(caplog: pytest.LogCaptureFixture) -> None:
    trained(compat.initialize, steps=1, memory_breakdown=True).destroy()
    told = [line for line in caplog.messages if line.startswith("Engine ")]
    micro = [f"Engine {when} {phase}" for phase in ("forward", "backward") for when in ("before", "after")]
    assert told == [*micro, *micro, "Engine before step", "Engine after step"]
    assert (
        len(re.findall(r"MA [\d.]+ GB         Max_MA [\d.]+ GB         CA [\d.]+ GB         Max_CA [\d.]+ GB", caplog.text)) == 10
    )
    assert len(re.findall(r"CPU Virtual Memory:  used = [\d.]+ GB, percent = [\d.]+%", caplog.text)) == 10


def test_timers_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    timers = SynchronizedWallClockTimer()
    timers("a").start()
    timers("a").stop()
    assert 0 < timers("a").elapsed(reset=False) < 1000 and timers.get_mean(["a", "b"])["a"] == timers("a").mean()
    timers.log(["a", "b"], memory_breakdown=True)
    assert re.match(r"time \(ms\) \| a: \d+\.\d\d \| mem_allocated: [\d.]+ GB", capsys.readouterr().out)
    assert timers("a").elapsed() == 0
    with pytest.raises(AssertionError, match="not started"):
        timers("a").stop()
    assert trim_mean([1.0] * 18 + [100.0, -100.0], 0.1) == 1.0
    told: list[str] = []
    config = SimpleNamespace(enabled=True, synchronized=True)
    speed = ThroughputTimer(config, 8, start_step=1, steps_per_output=2, logging_fn=told.append)
    for _ in range(4):
        speed.start()
        speed.stop(global_step=True)
    assert len(told) == 2 and all(SPEED.match(line) for line in told)
    with pytest.raises(ValueError, match="must be positive"):
        ThroughputTimer(config, 8, steps_per_output=0)


def test_a_log_that_nobody_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    compat_comm.configure(enabled=False)
    assert compat_comm.log_summary() is None and compat_comm.log_summary(return_dict=True)["summary"] == {}
    assert "comms_logger" in caplog.text
    compat_comm.configure(enabled=True, verbose=False)
    try:
        engine = trained(compat.initialize, steps=1)
        assert engine.plan.traffic is not None
        assert compat_comm.log_summary(return_dict=True)["sent_bytes"] == {}, "one rank sends nothing"
        engine.destroy()
    finally:
        compat_comm.configure(enabled=False)

"""The legs `monitors` and `logs`: what monitors add to a step, and one that hangs; what the logs of traffic and of times add.

Monitors: one rank, one thread, one core. Processes differ among themselves by more than monitors take, so steps with and without
them alternate in one process, in an order that is drawn anew each round: `off again` is the noise. What the monitors' own threads
compute, at any time, is read from their clocks and added. Logs: the same on two ranks, of which the slower one counts.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.experts_quality import example
from benchmarks.legs import Options
from benchmarks.ranks import Ranks
from benchmarks.report import percent_over, table, verdict, verdicts
from benchmarks.worker import Worker

if TYPE_CHECKING:
    from benchmarks.worker import Channel

SIZES = {"dim": 192, "layers": 3, "heads": 4, "hidden": 768}
VOCAB, CONTEXT, BATCH = 1024, 128, 2  # about 50 ms a step
MODES = ("off", "off again", "on")
ROUNDS = 500


class Hanging:
    """A backend that never returns."""

    def write(self, events: Sequence[Any]) -> None:
        threading.Event().wait()

    def close(self) -> None:
        pass


def _blocks(monitors: str, folder: Path) -> dict[str, Any]:
    """Those that need no package but what the server's extra has, or the one that hangs."""
    if monitors == "a monitor that hangs":
        return {"slipstream": {"monitors": {"custom": {f"{__name__}.Hanging": {}}}}}
    own = {"report": {"path": str(folder / "report.html")}, "jsonl": {"path": str(folder / "figures.jsonl")}}
    block = {"enabled": True, "output_path": str(folder), "job_name": "run"}
    return {"csv_monitor": block, "slipstream": {"monitors": {**own, "prometheus": {"port": 9400}}}}


def _in_threads() -> float:
    """Seconds of the processor in the monitors' threads."""
    idents = [thread.ident for thread in threading.enumerate() if thread.name.startswith("slipstream-monitor-")]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in idents if ident is not None)


def steps(channel: Channel, monitors: str, folder: str) -> None:
    """A worker's target: its handler makes rounds of a step in each mode, and returns their seconds and those in threads."""
    torch.set_num_threads(1)
    import slipstream

    models = example("model")
    torch.manual_seed(0)
    config = {"train_micro_batch_size_per_gpu": BATCH, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    model = models.LanguageModel(models.ModelConfig(vocab_size=VOCAB, **SIZES))
    engine = slipstream.initialize(model=model, config=config | _blocks(monitors, Path(folder)))[0]
    tokens = torch.randint(VOCAB, (BATCH, CONTEXT))
    after, watched = engine.states.after_step, list(engine.states.after_step)
    draws = random.Random(0)

    def step(mode: str) -> float:
        after[:] = watched if mode == "on" else watched[:-1]
        engine.progress.losses = [] if mode == "on" else None
        begin = time.perf_counter()
        engine.backward(engine(tokens, tokens))
        engine.step()
        return time.perf_counter() - begin

    def run(rounds: int) -> dict[str, Any]:
        seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
        before = _in_threads()
        for _ in range(rounds):
            for mode in draws.sample(MODES, len(MODES)):
                seconds[mode].append(step(mode))
        time.sleep(3)  # until they have written
        return {"seconds": seconds, "threads": (_in_threads() - before) / rounds}

    channel.serve({"run": run})


def run(options: Options) -> str:
    rows, judged = [], []
    rounds = options.num_rounds(ROUNDS)
    with tempfile.TemporaryDirectory() as folder:
        for monitors, target in (("CSV, JSON lines, report, Prometheus", 0.5), ("a monitor that hangs", 1.0)):
            env = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            arguments = {"monitors": monitors, "folder": folder}
            with Worker("benchmarks.monitors:steps", arguments, name=monitors, core=0, env=env) as worker:
                worker.ready()
                worker.call("run", rounds=5)
                told = worker.call("run", rounds=rounds)
            off = told["seconds"]["off"]
            usual = statistics.median(off)
            over = percent_over(told["seconds"])
            threads = 100 * told["threads"] / usual
            rows.append([monitors, f"{1e3 * usual:.1f}", f"{over['off again']:+.2f}", f"{over['on']:+.2f}", f"{threads:.2f}"])
            judged.append(verdict(f"{monitors}: % of a step", over["on"] + threads, target))
        lines = sum(1 for _ in (Path(folder) / "figures.jsonl").open())
        tags = len(list((Path(folder) / "run").iterdir()))
    return "\n\n".join(
        (
            f"A GPT of {SIZES['layers']} blocks of width {SIZES['dim']}, {BATCH * CONTEXT} tokens, fp32, one core; {rounds} rounds "
            f"of a step without monitors, one without them again, and one with them, which writes {tags} tags to each ({lines} "
            "steps arrived). Medians of rounds, in % of a step without monitors; what threads compute for a step is added to the "
            "target.",
            table(["monitors", "ms of a step without", "without again, %", "with, %", "in their threads, %"], rows),
            verdicts(judged),
        )
    )


LOGS = {"comms_logger": 1.0, "wall_clock_breakdown": 0.5}  # targets, in % of a step
LOG_MODES = ("off", "off again", *LOGS)
LOG_ROUNDS = 300


def logged_steps(channel: Channel) -> None:
    """A worker's target, of one rank: its handler makes rounds of a step in each mode, and returns their seconds."""
    torch.set_num_threads(1)
    import slipstream
    from slipstream.observe import traffic

    models = example("model")
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3},
        "slipstream": {"transport": "gloo"},  # with the most operations to log
        "comms_logger": {"enabled": True},
        "wall_clock_breakdown": True,
    }
    model = models.LanguageModel(models.ModelConfig(vocab_size=VOCAB, **SIZES))
    engine = slipstream.initialize(model=model, config=config)[0]
    states, tells = engine.states, engine.progress.times  # of rank 0
    tokens = torch.randint(VOCAB, (BATCH, CONTEXT))
    draws = random.Random(0)
    states.resources.pop("traffic").close()

    def step(mode: str) -> float:
        if mode == "comms_logger":
            traffic.record(engine)
        engine.progress.times = tells and mode == "wall_clock_breakdown"
        begin = time.perf_counter()
        engine.backward(engine(tokens, tokens))
        engine.step()
        seconds = time.perf_counter() - begin
        if mode == "comms_logger":
            states.resources.pop("traffic").close()
        return seconds

    def run(rounds: int) -> dict[str, list[float]]:
        seconds: dict[str, list[float]] = {mode: [] for mode in LOG_MODES}
        for _ in range(rounds):
            for mode in draws.sample(LOG_MODES, len(LOG_MODES)):
                seconds[mode].append(step(mode))
        return seconds

    channel.serve({"run": run})


def run_logs(options: Options) -> str:
    rounds = options.num_rounds(LOG_ROUNDS)
    with Ranks("benchmarks.monitors:logged_steps", {}, 2, name="logs") as ranks:
        ranks.call("run", rounds=5)
        told = ranks.call("run", rounds=rounds)
    slower = {mode: [*map(max, *(each[mode] for each in told))] for mode in LOG_MODES}
    over = percent_over(slower)
    usual = statistics.median(slower["off"])
    return "\n\n".join(
        (
            f"A GPT of {SIZES['layers']} blocks of width {SIZES['dim']}, {BATCH * CONTEXT} tokens a rank, two ranks over gloo at "
            f"stage 3, fp32; {rounds} rounds of a step without logs, one without them again, and one with each. Medians of rounds "
            "of the slower rank, in % of a step without.",
            table(
                ["ms of a step without", "without again, %", *(f"{name}, %" for name in LOGS)],
                [[f"{1e3 * usual:.1f}", f"{over['off again']:+.2f}", *(f"{over[name]:+.2f}" for name in LOGS)]],
            ),
            verdicts([verdict(f"{name}: % of a step", over[name], target) for name, target in LOGS.items()]),
        )
    )

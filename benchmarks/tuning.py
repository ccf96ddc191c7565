"""The leg `tune`: what `slipstream tune` chooses for three small models, over the best of an exhaustive grid, and its time.

The grid and the search are the same command, with `--tuner gridsearch` and without. Its best and the choice then run again, in
turns, since the best of many single runs is partly luck.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.legs import Options
from benchmarks.report import table, verdict, verdicts
from benchmarks.worker import ROOT
from slipstream.config.trial import PROGRESS, TASK, VARIABLE, laid_over, nested, write_json

SCRIPT = "benchmarks.tuning_script"  # a module: benchmarks/profile.py would hide that of Python from a script beside it
ENVIRON = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
MODELS = ("gpt", "mlp", "conv")
RANKS, BATCH, MICROS = 2, 32, "4,8,16"
CONFIG = {
    "train_batch_size": BATCH,
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
}
CHOICE, TIME = 1.05, 0.2  # limits: of the choice over the grid's best, of the search's time over the grid's
WARMUP, STEPS = 2, 20  # of the runs in turns


class Search(NamedTuple):
    seconds: float
    runs: int
    rows: list[dict[str, Any]]  # the table, the best first

    @property
    def best(self) -> dict[str, Any]:
        changes: dict[str, Any] = self.rows[0]["changes"]
        return changes


def search(model: str, folder: Path, *options: str) -> Search:
    """Run the command in a folder."""
    folder.mkdir()
    write_json(folder / "config.json", CONFIG)
    command = [
        sys.executable,
        "-m",
        "slipstream",
        "tune",
        "config.json",
        "--nproc",
        str(RANKS),
        "--micro-batches",
        MICROS,
        *options,
    ]
    began = time.perf_counter()
    command += ["--module", "--script", SCRIPT, "--", "--model", model, "--deepspeed_config", "config.json"]
    done = subprocess.run(command, cwd=folder, env=ENVIRON, check=False, capture_output=True, text=True)
    seconds = time.perf_counter() - began
    if done.returncode:
        raise RuntimeError(f"slipstream tune of {model} failed:\n{done.stderr[-2000:]}")
    state = json.loads((folder / "tuning" / "tuning.json").read_text())
    return Search(seconds, len(state["rows"]), state["table"])


def step_seconds(model: str, changes: dict[str, Any], folder: Path) -> float:
    """The median step of one configuration in a run of its own."""
    folder.mkdir()
    write_json(folder / TASK, {"config": laid_over(CONFIG, nested(changes)), "warmup": WARMUP, "steps": STEPS})
    command = [sys.executable, "-m", "slipstream", "run", "--quiet", "--nproc", str(RANKS), "--module", SCRIPT, "--model", model]
    subprocess.run(command, cwd=folder, env=ENVIRON | {VARIABLE: str(folder)}, check=True, capture_output=True)
    lines = [json.loads(line) for line in (folder / PROGRESS).read_text().splitlines()]
    return median(line["seconds"] for line in lines[1:] if line["timed"])


def _named(changes: dict[str, Any]) -> str:
    return ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in changes.items()) or "as it is"


def run(options: Options) -> str:
    rows, choices, times, total = [], [], [], 0
    models = [model for model in MODELS if not options.only or model.startswith(options.only)]
    with tempfile.TemporaryDirectory() as scratch:
        for model in models[:1] if options.quick else models:
            folder = Path(scratch, model)
            folder.mkdir()
            found = search(model, folder / "search")
            grid = search(model, folder / "grid", "--tuner", "gridsearch", "--runs", "99", "--patience", "99")
            ratio = 1.0
            if found.best != grid.best:
                turns = [
                    [step_seconds(model, each, folder / f"{name}{turn}") for name, each in (("a", found.best), ("b", grid.best))]
                    for turn in range(options.num_rounds(3))
                ]
                ratio = median(ours / best for ours, best in turns)
            choices.append(ratio)
            times.append(found.seconds / grid.seconds)
            total += grid.runs
            slowest = max(row["seconds"] for row in grid.rows if row["seconds"])
            spread = f"{slowest / grid.rows[0]['seconds']:.1f}"
            runs = (f"{found.runs} in {found.seconds:.0f} s", f"{grid.runs} in {grid.seconds:.0f} s")
            rows.append([model, _named(found.best), _named(grid.best), f"{ratio:.3f}", spread, *runs])
    names = ["model", "choice", "best of the grid", "step of the choice over the best's", "slowest over best", "search", "grid"]
    return "\n\n".join(
        (
            f"{RANKS} ranks, {BATCH} samples a step; the grid has all stages, micro-batches of {MICROS}, with and without "
            f"recompute: {total} runs. A choice that is not the grid's best runs against it again, in turns.",
            table(names, rows),
            verdicts(
                [
                    verdict("step of the choice over the grid's best, worst model", max(choices), CHOICE),
                    verdict("time of the search over the grid's, worst model", max(times), TIME),
                ]
            ),
        )
    )

"""The leg `recipes`: validation loss of `examples/pretrain` with fewer bytes per parameter.

The example itself runs, as `make train` runs it but for fewer steps, once for each recipe, with the same seed and data. A run
with another seed shows how much the loss varies by chance.
"""

from __future__ import annotations

import copy
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import worker
from benchmarks.legs import Options
from benchmarks.report import table, verdict, verdicts
from benchmarks.worker import ROOT

EXAMPLE = ROOT / "examples" / "pretrain"
WORLD = 2
STEPS, QUICK_STEPS = 300, 10
MOST = 1.01  # of the loss with fp32 states


class Recipe(NamedTuple):
    name: str
    bytes: int  # per parameter: weights, master and moments
    changes: dict[str, dict[str, Any]] = {}  # of the example's config, by block  # noqa: RUF012
    seed: int = 0


SMALL_MOMENTS, ROUNDED = {"optimizer_states": "int8"}, {"stochastic_rounding": True}
RECIPES = (
    Recipe("fp32 states", 14),
    Recipe("fp32 states, another seed", 14, seed=1),
    Recipe("8-bit moments, fp32 master", 8, {"slipstream": SMALL_MOMENTS}),
    Recipe("bf16 moments, stochastic rounding", 6, {"slipstream": ROUNDED, "bf16": {"bf16_optimizer_states": True}}),
    Recipe("8-bit moments, stochastic rounding", 4, {"slipstream": SMALL_MOMENTS | ROUNDED}),
)


def run(options: Options) -> str:
    steps = QUICK_STEPS if options.quick else STEPS
    losses: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for recipe in RECIPES:
            losses[recipe.name] = train(recipe, steps, Path(folder))
            print(f"  {recipe.name}: {losses[recipe.name]:.3f} nats per token", flush=True)
    exact = losses[RECIPES[0].name]
    rows = [[one.name, str(one.bytes), f"{losses[one.name]:.3f}", f"{losses[one.name] / exact - 1:+.2%}"] for one in RECIPES]
    judged = [
        verdict(f"{one.name}: loss over fp32 states'", losses[one.name] / exact, MOST, digits=4) for one in RECIPES if one.changes
    ]
    return "\n\n".join(
        (
            f"examples/pretrain for {steps} steps (its whole schedule), ZeRO-3, bf16, {WORLD} ranks of one thread; the loss of all "
            "validation text.",
            table(["states", "bytes per parameter", "validation loss, nats per token", "over fp32 states"], rows),
            verdicts(judged),
        )
    )


def train(recipe: Recipe, steps: int, folder: Path) -> float:
    """The validation loss at the end. The first run writes the packed text to `folder`, and the others read it."""
    config = copy.deepcopy(json.loads((EXAMPLE / "ds_config.json").read_text()))
    for block, values in recipe.changes.items():
        config.setdefault(block, {}).update(values)
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    given = {"--config": file, "--steps": steps, "--out": folder, "--seed": recipe.seed, "--new-tokens": 1, "--save-every": steps}
    command = [sys.executable, "-m", "slipstream", "run", "--nproc", str(WORLD), EXAMPLE / "train.py"]
    command += [str(word) for pair in given.items() for word in pair]
    out = worker.run(command, env={"COLUMNS": "132"})
    match = re.search(r"validation loss\s+([\d.]+) nats", out)
    if match is None:
        raise RuntimeError(f"{recipe.name}: the example printed no validation loss:\n{out[-1000:]}")
    return float(match[1])

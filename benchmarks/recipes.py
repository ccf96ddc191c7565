"""The leg `recipes`: what fewer bytes per parameter do to the validation loss of `examples/pretrain`.

The example itself runs, as `make train` runs it but for fewer steps, once for each recipe, with the same seed and data. A run with
another seed tells how much the loss moves by chance.
"""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.ranks import ROOT
from benchmarks.report import host, table, verdict, verdicts

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


def run(*, quick: bool) -> str:
    steps = QUICK_STEPS if quick else STEPS
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
            host(f"{WORLD} ranks of one thread"),
            f"examples/pretrain for {steps} steps (its whole schedule), ZeRO-3, bf16; the loss of all validation text.",
            table(["states", "bytes per parameter", "validation loss, nats per token", "beside fp32 states"], rows),
            verdicts(judged),
        )
    )


def train(recipe: Recipe, steps: int, folder: Path) -> float:
    """The validation loss at the end. The packed text in `folder` is made by the first run and found by the others."""
    config = copy.deepcopy(json.loads((EXAMPLE / "ds_config.json").read_text()))
    for block, values in recipe.changes.items():
        config.setdefault(block, {}).update(values)
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    wanted = {"--config": file, "--steps": steps, "--out": folder, "--seed": recipe.seed, "--new-tokens": 1, "--save-every": steps}
    command = [sys.executable, "-m", "slipstream", "run", "--nproc", str(WORLD), EXAMPLE / "train.py"]
    command += [str(word) for pair in wanted.items() for word in pair]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"COLUMNS": "132"})
    found = re.search(r"validation loss\s+([\d.]+) nats", done.stdout)
    if done.returncode or found is None:
        raise RuntimeError(f"{recipe.name}: the example ended with {done.returncode}:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    return float(found[1])

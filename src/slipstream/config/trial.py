"""A run of a script that `slipstream tune` has started: its config, its length, and the folder for its measurements.

The tuner passes the folder in the environment variable SLIPSTREAM_TRIAL, read only here. All hosts of a run see the folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "SLIPSTREAM_TRIAL"
TASK, PROGRESS, SURVEY, STOP = "trial.json", "progress.jsonl", "survey.json", "stop"  # files in the folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The task of a run."""

    folder: Path
    config: Mapping[str, Any]  # overrides the script's own config
    warmup: int = 0  # steps before those that are timed
    steps: int = 0  # timed steps, after which the script ends. 0: it trains to its own end
    rates: tuple[float, float] | None = None  # learning rates between which the rate grows exponentially over the steps
    survey: Mapping[str, Any] | None = None  # how rank 0 predicts other configurations (train/trial.py); None: no prediction


def current() -> Trial | None:
    """The trial that this process belongs to. Raises ValueError if its folder is gone."""
    name = os.environ.get(VARIABLE)
    if not name:
        return None
    try:
        return Trial(folder=Path(name), **json.loads((Path(name) / TASK).read_text()))
    except OSError as error:
        raise ValueError(f"{VARIABLE}={name}: {error.strerror}: {error.filename}; unset it, or share the folder") from None


def laid_over(base: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """`base` overridden by the values of `config`, block by block. "auto" keeps the base's value."""
    result = dict(base)
    for key, value in config.items():
        below = base.get(key)
        if key == "zero_optimization" and isinstance(below, bool):
            below = {"stage": int(below)}  # as parse.py reads it
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            result[key] = laid_over(below, value)
        elif value != "auto" or key not in base:
            result[key] = value
    return result


def nested(changes: Mapping[str, Any]) -> dict[str, Any]:
    """A nested config from changes with dotted keys."""
    config: dict[str, Any] = {}
    for key, value in changes.items():
        *blocks, name = key.split(".")
        block = config
        for each in blocks:
            block = block.setdefault(each, {})
        block[name] = value
    return config


def write_json(path: Path, value: Any) -> None:
    """Write atomically: a reader sees the old file or the new one."""
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    partial.replace(path)

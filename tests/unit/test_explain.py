"""engine.explain(): the bytes are the formula's, exactly, on one rank."""

from __future__ import annotations

import re

import pytest
import torch.nn as nn

import slipstream
from slipstream.train import explain
from tests import toy
from tests.pool import distributed


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("bf16", "expected"), [(False, 16.0), (True, 16.0)])
def test_total_is_sixteen_bytes_per_parameter(stage: int, bf16: bool, expected: float) -> None:
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(3)])
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    engine, *_ = slipstream.initialize(model=model, config=config)
    text = engine.explain()
    per_parameter = {name.strip(): float(value) for name, value in re.findall(r"^([a-z ]+?)\s+[\d.]+ MiB\s+([\d.]+) B", text, re.M)}
    ring = per_parameter.pop("gradient ring")
    assert per_parameter.pop("total per rank") == pytest.approx(expected + ring, abs=0.02)
    assert sum(per_parameter.values()) == pytest.approx(expected, abs=0.02)
    engine.destroy()


@distributed(world_size=2)
def test_copies_are_all_reduced_on_the_wire() -> None:
    """MiCS with shards of one rank: half the gradients are sent to be added, half come back, as with plain copies."""
    engine = toy.make(toy.seeded(toy.Net), 3, "gloo", zero_optimization={"stage": 3, "mics_shard_size": 1})
    numel = sum(unit.layout.numel for unit in engine.units)
    assert explain.count(engine.units, engine.steps).wire == 2 * numel * 4 // 2
    engine.destroy()

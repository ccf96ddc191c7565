"""engine.explain(): the bytes are the formula's, exactly, on one rank."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn as nn

import slipstream
from slipstream.config import DataWorld, ModelFacts, resolve
from slipstream.optim.rounds import Round
from slipstream.train.planning import explain, predict
from slipstream.train.recipe import mark_kinds
from tests import probe, toy
from tests.pool import distributed


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("bf16", [False, True])
def test_at_rest_is_sixteen_bytes_per_parameter(stage: int, bf16: bool) -> None:
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(3)])
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    engine, *_ = slipstream.initialize(model=model, config=config)
    kib = dict(re.findall(r"^  ([a-z ]+?) +([\d.]+) KiB", engine.explain(), re.M))
    states = sum(float(kib[name]) for name in ("weights", "gradients", "optimizer"))
    assert states == pytest.approx(16 * 3 * 4096 / 1024, abs=0.2)
    ring = float(kib.get("buffers", 0))
    assert ring == pytest.approx(0 if stage < 2 else 2 * 4096 * (2 if bf16 else 4) / 1024, abs=0.1)
    assert float(kib["idle"]) == pytest.approx(states + ring, abs=0.2)
    assert "limited by" not in engine.explain() and "peak" in engine.explain(torch.zeros(1, 64, dtype=model[0].weight.dtype))
    engine.destroy()


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [("AdamW", {"optimizer_states": "int8"}), ("Lion", {"optimizer_states": "int8"}), ("Adagrad", {}), ("SGD", {})],
)
def test_moments_are_the_optimizers(optimizer: str, options: dict[str, str]) -> None:
    named = {"type": optimizer, "params": {"lr": 1e-3}}
    engine = toy.make(toy.seeded(toy.Net), 1, dtype="bf16", optimizer=named, slipstream=options)
    memory = explain.of_states(engine.states)
    moments = sum(line.nbytes for line in memory.rest if line.state == "optimizer" and line.what != "masters")
    assert moments == sum(probe.state_nbytes(engine, unit) for unit in probe.units(engine))
    assert explain.parts_of(engine.module, engine.plan, 1) == list(memory.parts)
    assert explain.setting_of(engine.plan, 1, "cpu") == memory.setting
    engine.destroy()


@distributed(world_size=2)
def test_copies_are_all_reduced_on_the_wire() -> None:
    """MiCS with shards of one rank: half the gradients are sent to be added, half come back, as with plain copies."""
    engine = toy.make(toy.seeded(toy.Net), 3, "gloo", zero_optimization={"stage": 3, "mics_shard_size": 1})
    numel = sum(unit.layout.numel for unit in probe.units(engine))
    assert explain.of_states(engine.states).flow.wire == 2 * numel * 4 // 2
    engine.destroy()


def test_a_plan_counts_signs_and_rows_of_a_model_on_meta() -> None:
    """The linear layer as signs, 66 bytes per 512 elements each way; the embedding, half of it sent each way, as rows of fp32."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(4096, 64), nn.Linear(64, 64, bias=False))
    optimizer = {"type": "ZeroOneAdam", "params": {"lr": 1e-3}}
    raw = {"train_micro_batch_size_per_gpu": 1, "optimizer": optimizer, "slipstream": {"transport": "gloo"}}
    plan = resolve(raw, world=DataWorld(ranks=2), facts=ModelFacts(device_type="cpu", supports_bf16=True))
    mark_kinds(model, plan, *explain.optimizer_of(plan))
    forecast = predict.Forecast.of(explain.parts_of(model, plan, 2), explain.setting_of(plan, 2, "cpu"))
    rows = 4096 * 64 * 4
    assert forecast.flow.wire == rows + 64 * 64 * 4
    assert forecast.later[Round.SIGNS].wire == rows + 64 * 64 // 512 * 66
    assert forecast.later[Round.LOCAL].wire == 0
    assert "Rows are counted as if all have values" in explain.table(forecast)

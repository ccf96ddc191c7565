"""engine.explain() on several ranks: memory and traffic of each stage follow the formulas."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch
import torch.nn as nn

from slipstream.optim.rounds import Round
from slipstream.train.planning import explain, predict
from tests import cases, probe, toy
from tests.dist.test_codes_on_the_wire import sent as sending
from tests.pool import distributed

WHAT = ("weights", "gradients", "masters", "moments")
NUMEL, BLOCKS = 64 * 64, 3  # of a block: divides by 4 ranks without padding


def formula(stage: int, weight_bytes: int, world: int) -> tuple[int, ...]:
    """Bytes per rank of weights, gradients, masters and Adam's two moments; Rajbhandari et al., ZeRO (arXiv 1910.02054)."""
    masters = 4 if weight_bytes == 2 else 0
    per_parameter = ((weight_bytes, 3), (weight_bytes, 2), (masters, 1), (8, 1))  # and the first stage that shards it
    return tuple(NUMEL * BLOCKS * nbytes // (world if stage >= sharded else 1) for nbytes, sharded in per_parameter)


def sent(stage: int, weight_bytes: int, world: int) -> Fraction:
    """A ring sends (N-1)/N of all parameters, twice: reduce-scatter and all-gather; three times if forward also gathers."""
    return Fraction(world - 1, world) * (3 if stage == 3 else 2) * NUMEL * BLOCKS * weight_bytes


def resident(engine: Any) -> tuple[int, ...]:
    """Bytes according to the units' stores."""
    results = [0, 0, 0, 0]
    for unit in probe.units(engine):
        common = unit.memory.common or unit.memory.full
        results[0] += (
            common.tensor.nbytes // (engine.world_size if unit.placement.weights else 1) if common else unit.weights.nbytes
        )
        results[1] += unit.memory.local.tensor.nbytes if unit.memory.local else unit.grads.resident_nbytes
        results[2] += unit.master.resident_nbytes if unit.has_masters else 0
        results[3] += probe.state_nbytes(engine, unit)
    return tuple(results)


@distributed(world_size=(2, 4), transports=("shared", "gloo"))
def test_bytes_follow_the_formulas(world_size: int, transport: str) -> None:
    kinds = {"bf16": 2} if world_size == 4 else {"bf16": 2, "fp32": 4}
    for dtype, weight_bytes in kinds.items():
        for stage in cases.stages(transport):
            model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(BLOCKS)])
            engine = toy.make(model, stage, transport, dtype=dtype)
            case, batch = f"stage {stage}, {dtype}", torch.zeros(2, 64, dtype=probe.units(engine)[0].dtypes.weights)
            results = explain.of_states(engine.states, batch)
            states = tuple(sum(line.nbytes for line in results.rest if line.what == what) for what in WHAT)
            assert states == formula(stage, weight_bytes, world_size) == resident(engine), case
            assert results.flow.wire == (0 if transport == "shared" else sent(stage, weight_bytes, world_size)), case
            assert results.peak is not None
            gathered = sum(line.nbytes for line in results.peak.lines if line.what == "gathered weights")
            assert gathered <= (2 * NUMEL * weight_bytes if stage == 3 and transport == "gloo" else 0), case
            assert explain.parts_of(engine.module, engine.plan, world_size) == list(results.parts), case
            engine.destroy()


@distributed(world_size=(2, 4), transports=("gloo",))
def test_bytes_of_signs_are_those_that_torch_sends(world_size: int, transport: str) -> None:
    """A dense step of 1-bit Adam, then one of signs."""
    for stage in range(4) if world_size == 2 else cases.STAGES:
        model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(BLOCKS)])
        optimizer = {"type": "OneBitAdam", "params": {"freeze_step": 2}}
        engine = toy.make(model, stage, transport, optimizer=optimizer)
        forecast, batch = explain.of_states(engine.states), torch.ones(2, 64)
        assert explain.parts_of(engine.module, engine.plan, world_size) == list(forecast.parts)
        for step in range(4):
            with sending() as counted:
                engine.backward(engine(batch).square().mean())
                engine.step()
            # the third step freezes, and sends moments once more; the verdict and the levels send a few numbers
            moved = forecast.flow if step < 2 else forecast.later[Round.SIGNS]
            if step != 2:
                assert 0 <= sum(counted) - moved.wire < 200 * world_size, (stage, step, counted, moved.wire)
        assert "sent, step of signs" in explain.table(forecast)
        assert f"{explain.size(forecast.later[Round.SIGNS].wire)} per step of signs" in explain.traffic_text(forecast)
        engine.destroy()


@distributed(world_size=2, transports=("gloo",))
def test_bytes_of_local_steps_are_those_that_torch_sends(transport: str) -> None:
    """Two steps on a rank's own, then one with a round."""
    for stage, exchange in ((0, "fp32"), (1, "int8"), (3, "bf16")):
        model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(BLOCKS)])
        block = {"local_steps": {"every": 3, "exchange": exchange}}
        engine = toy.make(model, stage, transport, optimizer={"type": "AdamW", "params": {"lr": 1e-3}}, slipstream=block)
        forecast, batch = explain.of_states(engine.states), torch.ones(2, 64)
        assert explain.parts_of(engine.module, engine.plan, 2) == list(forecast.parts)
        for step in range(6):
            with sending() as counted:
                engine.backward(engine(batch).square().mean())
                engine.step()
            moved = predict.round_nbytes(forecast)
            expected = forecast.flow.wire + (moved if step % 3 == 2 else 0)
            assert 0 <= sum(counted) - expected < 200, (stage, step, counted, expected)
        assert explain.traffic_text(forecast) == f"each rank sends {explain.size(moved)} every 3 steps"
        assert forecast.flow.wire == 0 and "sent, every 3 steps" in explain.table(forecast)
        engine.destroy()

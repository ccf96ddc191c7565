"""Frozen weights stored in codes (zero_quantized_nontrainable_weights): each step is that of a model with the decoded weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slipstream
from slipstream.ops import wire
from slipstream.train.planning import explain
from tests import probe, toy
from tests.dist.test_codes_on_the_wire import coded, sent
from tests.pool import distributed

KEY = {"zero_quantized_nontrainable_weights": True}


def frozen_model(dtype: torch.dtype = torch.float32, *, decoded: bool = False) -> Any:
    model: Any = toy.seeded(toy.Lm)
    for param in model.blocks[:2].parameters():
        param.requires_grad_(False)
        if decoded:
            param.copy_(coded(param.detach().to(dtype).float(), 8))
    return model


@distributed(world_size=(1, 2), transports=("shared", "gloo"))
def test_frozen_weights_in_codes(world_size: int, transport: str) -> None:
    """Training, evaluation and complete state dicts; 8.06 bits per weight at rest."""
    for dtype, rounded in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        states = []
        for decoded, zero in ((True, {}), (False, KEY)):
            engine = toy.make(frozen_model(rounded, decoded=decoded), 3, transport, dtype=dtype, zero_optimization=zero)
            losses = [toy.step(engine, toy.tokens(dist.get_rank(), step)) for step in range(2)]
            with torch.no_grad():
                losses.append(engine.eval()(toy.tokens(dist.get_rank(), 0)))
            states.append({**engine.state_dict(), "losses": torch.stack(losses)})
            for unit in engine.states.units:
                assert unit.dtypes.rests == (bool(zero) and not unit.trainable)
                if unit.dtypes.rests:
                    assert unit.weights.resident_nbytes == wire.nbytes(unit.weights.numel, 8)
            forecast = explain.of_states(engine.states, toy.tokens(0, 0))
            assert explain.parts_of(engine.module, engine.plan, world_size) == list(forecast.parts)
            weights = sum(line.nbytes for line in forecast.rest if line.what == "weights")
            assert weights == sum(unit.weights.resident_nbytes for unit in engine.states.units)
            engine.destroy()
        for name, value in states[0].items():
            assert torch.equal(states[1][name], value), (dtype, name)


@distributed(world_size=2, transports=("shared", "gloo"))
def test_checkpoints_writes_and_thaws(transport: str, tmp_path: Path) -> None:
    """A checkpoint has the decoded values; a write encodes its blocks; inside of a surgery the weights become trainable."""
    engine = toy.make(frozen_model(), 3, transport, zero_optimization=KEY)
    toy.step(engine, toy.tokens(dist.get_rank(), 0))
    engine.save_checkpoint(str(tmp_path))
    again = toy.make(frozen_model(), 3, transport, zero_optimization=KEY)
    plain = toy.make(frozen_model(), 1, transport)
    for other in (again, plain):
        other.load_checkpoint(str(tmp_path))
        for name, value in engine.state_dict().items():
            assert torch.equal(other.state_dict()[name], value), name
        other.destroy()
    before, weight = engine.state_dict(), engine.module.blocks[0].up.weight
    with slipstream.zero.gathered(weight):
        weight.data[0, 0] = 3.0
    after, name = engine.state_dict(), "blocks.0.up.weight"
    expected = before[name].clone()
    expected[0, 0] = 3.0
    torch.testing.assert_close(after[name], expected, rtol=0, atol=3 / 127)
    assert after[name][0, 0] > 2.9 and all(torch.equal(after[each], before[each]) for each in before if each != name)
    weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"'blocks.0.* stored in codes of 8 bits, which cannot be trained: drop"):
        engine(toy.tokens(0, 0))
    weight.requires_grad_(False)
    with engine.surgery():
        for param in engine.module.blocks[0].parameters():
            param.requires_grad_(True)
    for key, value in engine.state_dict().items():
        assert torch.equal(value, after[key]), key
    toy.step(engine, toy.tokens(dist.get_rank(), 1))
    assert not torch.equal(engine.state_dict()[name], after[name])
    engine.destroy()


@distributed(world_size=2, transports=("gloo",))
def test_bytes_of_frozen_weights(transport: str) -> None:
    numel = 256 * 1024
    engine = toy.make(nn.Sequential(nn.Linear(1024, 256, bias=False).requires_grad_(False)), 3, transport, zero_optimization=KEY)
    with sent() as counted, torch.no_grad():
        engine(torch.randn(2, 1024))
    assert counted == [wire.nbytes(numel // 2, 8)]
    engine.destroy()


@distributed(world_size=4, transports=("gloo",))
def test_frozen_weights_in_codes_of_groups(transport: str) -> None:
    results = []
    for zero in (KEY, KEY | {"zero_hpz_partition_size": 2}):
        engine = toy.make(frozen_model(), 3, transport, zero_optimization=zero)
        for step in range(2):
            toy.step(engine, toy.tokens(dist.get_rank(), step))
        assert all((unit.memory.kept is None) == (zero is KEY) for unit in probe.units(engine))
        results.append(int(toy.checksum(engine)))
        engine.destroy()
    assert len(set(results)) == 1

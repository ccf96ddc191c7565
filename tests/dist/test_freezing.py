"""Frozen parameters: frozen from the start, and frozen or unfrozen between steps."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import slipstream
from tests import cases, probe, toy
from tests.pool import distributed

STAGES = cases.STAGES
SGD = {"lr": 0.1, "momentum": 0.9}
Changes = dict[int, list[tuple[str, bool]]]  # step -> modules that become trainable or frozen before it

FREEZE: Changes = {1: [("blocks.1", False), ("inp", False)]}
FREEZE_AND_BACK: Changes = {1: [("blocks.1", False)], 3: [("blocks.1", True)]}
PART_OF_A_UNIT: Changes = {1: [("blocks.0.up", False)], 2: [("blocks.0.up", True)]}
FROM_THE_START: Changes = {0: [("blocks.1", False)], 2: [("blocks.1", True)]}
NAMES = ("FREEZE", "FREEZE_AND_BACK", "PART_OF_A_UNIT", "FROM_THE_START")


def apply(model: Any, changes: list[tuple[str, bool]]) -> None:
    for name, trainable in changes:
        model.get_submodule(name).requires_grad_(trainable)


def plain_torch(changes: Changes) -> dict[str, Tensor]:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = toy.seeded(toy.Net)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    for i in range(5):
        apply(model, changes.get(i, []))
        model(toy.floats(rank, i)).square().mean().backward()
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= world
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


@distributed(world_size=2, transports=("shared", "gloo"))
@pytest.mark.parametrize("name", NAMES)
def test_freezing_between_steps_equals_plain_torch(name: str, transport: str) -> None:
    changes: Changes = globals()[name]
    expected = plain_torch(changes)
    for stage in cases.by_turns(cases.stages(transport), NAMES.index(name) // 2):
        model = toy.seeded(toy.Net)
        everything = list(model.parameters())
        apply(model, changes.get(0, []))
        optimizer = {"type": "SGD", "params": SGD}
        engine, *_ = slipstream.initialize(
            model=model, model_parameters=everything, config=toy.settings(stage, transport, optimizer=optimizer)
        )
        for i in range(5):
            apply(model, changes.get(i, []))
            engine(toy.floats(engine.rank, i)).square().mean().backward()
            engine.step()
        for key, value in engine.state_dict().items():
            torch.testing.assert_close(
                value, expected[key], rtol=0, atol=3e-6, msg=lambda m, s=stage, k=key: f"stage {s}: {k}: {m}"
            )
        engine.destroy()


@distributed(world_size=2)
def test_frozen_units_have_no_gradients_and_no_state() -> None:
    for stage in STAGES:
        model = toy.seeded(toy.Net)
        model.blocks[1].requires_grad_(False)
        engine = toy.make(model, stage)
        frozen = [unit for unit in probe.units(engine) if not unit.trainable]
        assert [unit.names[0] for unit in frozen] == ["blocks.1.norm.weight"]
        assert frozen[0].grads is None and frozen[0].memory.local is None
        engine(toy.floats(engine.rank, 0)).square().mean().backward()
        engine.step()
        assert engine.optimizer_state("blocks.1.norm.weight").keys() == {"master"}
        engine.destroy()


@distributed(world_size=2, transports=("shared", "gloo"))
def test_frozen_fp8_weights_keep_their_codes(transport: str, tmp_path: Path) -> None:
    """Their scales are elsewhere in the model, so a cast would change the numbers that they stand for."""
    codes = torch.arange(64, dtype=torch.uint8).reshape(8, 8)
    for stage in (0, 2, 3):
        for is_loaded in (False, True):
            model = toy.seeded(toy.Net)
            own = codes.clone() if dist.get_rank() == 0 and not is_loaded else torch.zeros_like(codes)
            model.coded = torch.nn.Parameter(own.view(torch.float8_e4m3fn), requires_grad=False)
            engine = toy.make(model, stage, transport, dtype="bf16")
            if is_loaded:
                engine.load_checkpoint(tmp_path, tag=str(stage))
            engine(toy.floats(engine.rank, 0).bfloat16()).square().mean().backward()
            engine.step()
            engine.save_checkpoint(tmp_path, tag=str(stage))
            whole = engine.state_dict()["coded"]
            assert whole.dtype is torch.float8_e4m3fn and torch.equal(whole.view(torch.uint8), codes)
            engine.destroy()

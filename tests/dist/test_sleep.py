"""`engine.sleep()`: memory goes, and training goes on from where it was, bit for bit."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.train import sleep
from tests import toy
from tests.pool import distributed


@distributed(world_size=(1, 2), transports=("shared", "gloo"), timeout=60)
def test_training_goes_on_bit_for_bit(transport: str, tmp_path: Path) -> None:
    """Every stage, a native and a torch optimizer, between steps and in the middle of a window."""
    cases = itertools.product((0, 1, 2, 3), ("AdamW", "Adafactor"))
    for stage, optimizer in cases:
        sums = []
        for naps in (False, True):
            engine = toy.make(
                toy.seeded(lambda: toy.Lm(64)), stage, transport, dtype="bf16", gradient_accumulation_steps=2,
                optimizer={"type": optimizer, "params": {"lr": 1e-2}},
            )  # fmt: skip
            for micro in range(5):
                toy.step(engine, toy.tokens(engine.rank, micro))
                if naps:
                    parts = [tensor for tensor, _ in sleep.memory_of(engine, sleep.KINDS)]
                    assert engine.sleep(device="disk", path=str(tmp_path)) == sum(tensor.nbytes for tensor in parts) > 0
                    storages = [tensor.untyped_storage() for tensor in parts]
                    assert not any(storage.nbytes() for storage in storages if storage.resizable())
                    for call in (partial(engine, toy.tokens(0, 0)), engine.step, engine.state_dict):
                        with pytest.raises(RuntimeError, match=r"call engine.wake\(\) first"):
                            call()
                    engine.wake()
            sums.append(int(toy.checksum(engine)))
            engine.destroy()
        assert sums[0] == sums[1], f"stage {stage}, {optimizer}"


def test_without_optimizer_and_gradients_it_still_computes(tmp_path: Path) -> None:
    engine = toy.make(toy.seeded(toy.Lm), 2)
    expected = toy.step(engine, toy.tokens(0, 0))
    before = engine(toy.tokens(0, 1)).item()
    engine.sleep(["optimizer", "gradients"], "disk", str(tmp_path))
    with torch.no_grad():
        assert engine(toy.tokens(0, 1)).item() == before
    with pytest.raises(RuntimeError, match=r"under torch\.no_grad"):
        engine(toy.tokens(0, 1))
    engine.wake()
    assert toy.step(engine, toy.tokens(0, 0)) < expected
    engine.sleep(["weights"], "disk", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"are away: call engine\.wake\(\) first"):
        torch.add(next(engine.module.parameters()), 1)
    engine.destroy()
    assert all(torch.isfinite(param).all() for param in engine.module.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"include": ["moments"]}, "no kind of state; there are optimizer, weights, gradients"),
        ({}, "in host memory already"),
        ({"device": "disk"}, "path=None is no folder"),
        ({"device": "cuda"}, "'cpu' or to 'disk'"),
    ],
)
def test_refusals(arguments: dict[str, Any], message: str) -> None:
    engine = toy.make(toy.seeded(toy.Lm), 0)
    with pytest.raises(ValueError, match=message):
        engine.sleep(**arguments)
    engine.destroy()

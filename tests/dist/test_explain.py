"""engine.explain() on several ranks: each stage divides its states by the ranks, and sends what the formulas say."""

from __future__ import annotations

from fractions import Fraction

import torch.nn as nn

from slipstream.train import explain
from tests import toy
from tests.pool import distributed

NUMEL, BLOCKS = 64 * 64, 3  # of a block: divides by 4 ranks without padding


def formula(stage: int, weight_bytes: int, world: int) -> tuple[int, ...]:
    """Bytes per rank of weights, gradients, masters and Adam's two moments; Rajbhandari et al., ZeRO (arXiv 1910.02054)."""
    masters = 4 if weight_bytes == 2 else 0
    per_parameter = ((weight_bytes, 3), (weight_bytes, 2), (masters, 1), (8, 1))  # and the stage that shards it
    return tuple(NUMEL * BLOCKS * nbytes // (world if stage >= sharded else 1) for nbytes, sharded in per_parameter)


def sent(stage: int, weight_bytes: int, world: int) -> Fraction:
    """A ring's (N-1)/N of all parameters, twice: reduce-scatter and all-gather; a third time where forward gathers too."""
    return Fraction(world - 1, world) * (3 if stage == 3 else 2) * NUMEL * BLOCKS * weight_bytes


@distributed(world_size=(2, 4), transports=("shared", "gloo"))
def test_bytes_follow_the_formulas(world_size: int, transport: str) -> None:
    kinds = {"bf16": 2} if world_size == 4 else {"bf16": 2, "fp32": 4}
    for dtype, weight_bytes in kinds.items():
        for stage in range(4):
            model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(BLOCKS)])
            engine = toy.make(model, stage, transport, dtype=dtype)
            counted = explain.count(engine.units, engine.steps)
            states = (counted.weights, counted.gradients, counted.masters, counted.states)
            assert states == formula(stage, weight_bytes, world_size), f"stage {stage}, {dtype}"
            wire = 0 if transport == "shared" else sent(stage, weight_bytes, world_size)
            assert counted.wire == wire, f"stage {stage}, {dtype}"
            one_block = NUMEL * weight_bytes if stage == 3 and transport == "gloo" else 0
            assert counted.gathered == one_block, f"stage {stage}, {dtype}"
            engine.destroy()

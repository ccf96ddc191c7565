"""Activation checkpointing and tiled layers on several ranks: bit-identical training in every stage, without extra gathers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.activations.tiled import TiledLinear, fused_linear_cross_entropy
from tests import cases, probe, toy
from tests.cases import EVERYTHING
from tests.dist.test_compile import AFTER, BEFORE, Way, check
from tests.pool import distributed

RECOMPUTE = {"activations": "recompute"}


class Block(toy.Block):
    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


class Lm(toy.Lm):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))


def train(kind: Callable[[], nn.Module], stage: int, transport: str, **ours: Any) -> tuple[list[float], int]:
    engine = toy.make(toy.seeded(kind), stage, transport, gradient_accumulation_steps=2, slipstream=ours)
    torch.manual_seed(engine.rank)
    losses = [float(toy.step(engine, toy.tokens(engine.rank, i))) for i in range(4)]
    weights = int(toy.checksum(engine))
    engine.destroy()
    return losses, weights


@distributed(world_size=2, transports=("shared", "gloo"))
def test_recomputing_trains_the_same_bits(transport: str) -> None:
    for stage in cases.stages(transport):
        assert train(Lm, stage, transport) == train(Lm, stage, transport, **RECOMPUTE), f"stage {stage}"
    assert train(Lm, 3, "gloo", **RECOMPUTE) == train(Lm, 3, "gloo", **RECOMPUTE, poison_released=True)


@distributed(world_size=2)
def test_a_recomputed_block_is_gathered_as_often_as_before() -> None:
    gathers: dict[str, list[str]] = {}
    for way in ("keep", "recompute"):
        engine = toy.make(toy.seeded(Lm), 3, "gloo", slipstream={"activations": way})
        results = gathers.setdefault(way, [])
        for unit in probe.units(engine):

            def gather(unit: Any = unit, own: Callable[[], None] = unit.gather) -> None:
                if unit.is_released:
                    results.append(unit.name)
                own()

            unit.gather = gather
        toy.step(engine, toy.tokens(engine.rank, 0))
        assert all(unit.is_released and not unit.is_direct for unit in probe.units(engine))
        for unit in probe.units(engine):
            del unit.gather
        engine.destroy()
    assert gathers["keep"] == gathers["recompute"] and len(gathers["keep"]) > 6


COMPILED = [("before", "by method"), *([("before", "by forward"), ("after", "by forward")] if EVERYTHING else [])]


@pytest.mark.parametrize(("ways", "name"), COMPILED)
@distributed(world_size=2, timeout=120)
def test_compiled_blocks_are_recomputed(ways: str, name: str) -> None:
    way: Way = (BEFORE if ways == "before" else AFTER)[name]
    check(way, ways == "before", "auto", "aot_eager", stages=(0, 3) if EVERYTHING else (3,), slipstream=RECOMPUTE)


# ---- tiles


class Plain(toy.Lm):
    """A loss over the head's weight, and over a weight that belongs to a block's unit."""

    def loss(self, h: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, weight, bias).flatten(0, 1), target.flatten())

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            h = block(h)
        target = tokens[:, 1:]
        return self.loss(h, self.head.weight, self.head.bias, target) + self.loss(h, self.blocks[1].up.weight, None, target % 32)


class Fused(Plain):
    def loss(self, h: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
        return fused_linear_cross_entropy(h, weight, target, bias, tile=5)


@distributed(world_size=2, transports=("shared", "gloo"))
def test_the_fused_loss_in_every_stage(transport: str) -> None:
    for stage in cases.stages(transport, (0, 2, 3)):
        expected, results = (train(kind, stage, transport)[0] for kind in (Plain, Fused))
        torch.testing.assert_close(results, expected, rtol=1e-5, atol=0)
    for kind, again in ((Plain, True), (Fused, False)):
        engine = toy.make(toy.seeded(kind), 3, transport)
        engine(toy.tokens(engine.rank, 0)).backward()
        assert [unit.is_direct for unit in probe.units(engine) if unit.name == "blocks.1"] == [again], (
            "gathered for the whole backward"
        )
        engine.destroy()


class Tiled(toy.Lm):
    def __init__(self) -> None:
        super().__init__()
        self.head = TiledLinear(16, toy.VOCABULARY, in_splits=2, out_splits=3, init_linear=self.head)


@distributed(world_size=2)
def test_tiles_are_gathered_one_at_a_time() -> None:
    expected, results = (train(kind, 3, "gloo")[0] for kind in (toy.Lm, Tiled))
    torch.testing.assert_close(results, expected, rtol=1e-5, atol=0)
    engine = toy.make(toy.seeded(Tiled), 3, "gloo")
    tiles = [unit for unit in probe.units(engine) if unit.name.startswith("head")]
    assert len(tiles) == 6
    most: list[int] = []
    for tile in engine.module.head.tiles:
        tile.register_forward_pre_hook(lambda *_: most.append(sum(unit.is_gathered for unit in tiles)))
    toy.step(engine, toy.tokens(engine.rank, 0))
    assert most == [1] * 6
    linear = toy.seeded(lambda: nn.Linear(16, toy.VOCABULARY), 5)
    engine.module.head.copy_params_from(linear)
    state = engine.state_dict()
    assert torch.cat([state[f"head.tiles.{i}.weight"] for i in (0, 2, 4)]).equal(linear.weight[:, :8])
    engine.destroy()

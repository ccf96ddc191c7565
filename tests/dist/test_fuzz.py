"""Random timing and branches: the order of events on the ranks does not change the trained weights."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.zero.hooks import Reducer
from tests import cases, probe, toy
from tests.pool import distributed

STAGES = (0, 1, 2, 3)


@contextmanager
def random_sleeps(seed: int) -> Iterator[None]:
    """Sleep up to 5 ms before every third call of an edge, at random and differently on each rank."""
    patch = pytest.MonkeyPatch()
    draw = random.Random(seed * 97 + dist.get_rank())

    def delay(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if draw.random() < 0.3:
                time.sleep(draw.random() * 0.005)
            return original(*args, **kwargs)

        patch.setattr(owner, name, call)

    for name in ("gather", "release", "reduce", "settle", "publish", "add_local"):
        delay(probe.owner_of(name), name)
    delay(Reducer, "drain")
    try:
        yield
    finally:
        patch.undo()


def all_ranks_agree(engine: Any) -> int:
    """The checksum of the weights, which must be equal on all ranks."""
    ours = toy.checksum(engine)
    sums = [torch.zeros((), dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sums, ours)
    assert len({int(each) for each in sums}) == 1, f"the ranks' weights differ: {sums}"
    return int(ours)


def trace(stage: int, transport: str, steps: int) -> list[int]:
    engine = toy.make(toy.seeded(toy.Lm), stage, transport, dtype="bf16", gradient_clipping=0.5, gradient_accumulation_steps=2)
    sums = []
    for i in range(steps):
        for micro in range(2):
            toy.step(engine, toy.tokens(engine.rank, i, micro))
            if micro == 0 and i % 3 == engine.rank % 3:
                with torch.no_grad():
                    engine.module(toy.tokens(0, 0)) if transport == "shared" else None
        sums.append(all_ranks_agree(engine))
    engine.destroy()
    return sums


@distributed(world_size=(2, 4) if cases.EVERYTHING else 2, transports=("shared", "gloo"), timeout=120)
def test_timing_changes_nothing(world_size: int, transport: str, seed: int) -> None:
    for stage in cases.stages(transport):
        expected = trace(stage, transport, 6)
        with random_sleeps(seed):
            assert trace(stage, transport, 6) == expected, f"stage {stage}, seed {seed}"


class Branching(toy.Net):
    """Runs the given blocks in the given order, so that some are skipped, repeated or reordered."""

    def forward(self, x: Tensor, order: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        h = self.inp(x)
        for k in order:
            h = self.blocks[k](h)
        out: Tensor = self.out(h)
        return out


@distributed(world_size=(2, 4) if cases.EVERYTHING else 4)
def test_random_branches_by_rank_on_shared_memory(world_size: int, seed: int) -> None:
    """Against plain torch with the same branches."""
    steps, sgd = 8, {"lr": 0.05}
    orders = random.Random(seed)
    plan = [[tuple(orders.choices(range(3), k=orders.randrange(5))) for _ in range(world_size)] for _ in range(steps)]
    model = toy.seeded(Branching)
    optimizer = torch.optim.SGD(model.parameters(), **sgd)
    for i, row in enumerate(plan):
        for rank, order in enumerate(row):
            (model(toy.floats(rank, i), order).square().mean() / world_size).backward()
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    for stage in STAGES:
        engine = toy.make(toy.seeded(Branching), stage, "shared", optimizer={"type": "SGD", "params": sgd})
        with random_sleeps(seed):
            for i, row in enumerate(plan):
                engine(toy.floats(engine.rank, i), row[engine.rank]).square().mean().backward()
                engine.step()
                all_ranks_agree(engine)
        for name, value in engine.state_dict().items():
            torch.testing.assert_close(
                value, model.state_dict()[name], rtol=0, atol=1e-5, msg=lambda m, s=stage, n=name: f"stage {s}: {n}: {m}"
            )
        engine.destroy()


class Generator(toy.Lm):
    """Returns the next token's logits."""

    def forward(self, tokens: Tensor, generate: bool = False) -> Tensor:
        if not generate:
            return super().forward(tokens)
        h = self.embedding(tokens)
        for block in self.blocks:
            h = block(h)
        logits: Tensor = self.head(h[:, -1])
        return logits


@distributed(world_size=(2, 4) if cases.EVERYTHING else 2)
def test_generation_ends_at_another_token_on_each_rank(world_size: int, seed: int) -> None:
    """Also if one rank generates nothing, and between a forward and its backward."""
    for stage in STAGES:
        engine = toy.make(toy.seeded(Generator), stage, "shared")
        expected = toy.make(toy.seeded(Generator), stage, "shared")
        for i in range(4):
            loss = engine(toy.tokens(engine.rank, i))
            text = toy.tokens(0, i)
            with random_sleeps(seed), torch.no_grad():
                for _ in range((engine.rank * 3 + i) % 7):
                    text = torch.cat([text, engine(text, generate=True).argmax(-1, keepdim=True)], 1)
            loss.backward()
            engine.step()
            toy.step(expected, toy.tokens(engine.rank, i))
            assert all_ranks_agree(engine) == all_ranks_agree(expected), f"stage {stage}, step {i}"
        engine.destroy()
        expected.destroy()

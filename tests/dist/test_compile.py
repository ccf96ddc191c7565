"""torch.compile of blocks and models, before and after `initialize`, in every stage."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.utils import counters

from tests import toy
from tests.pool import distributed

STAGES = (0, 1, 2, 3)


def train(engine: Any) -> list[Tensor]:
    losses = []
    for i in range(3):
        loss = engine(toy.floats(engine.rank, i)).square().mean()
        loss.backward()
        engine.step()
        losses.append(loss.detach())
    return losses


def by_method(model: Any, backend: str) -> None:
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)


def by_forward(model: Any, backend: str) -> None:
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)


def by_wrapper(model: Any, backend: str) -> None:
    for k, block in enumerate(model.blocks):
        model.blocks[k] = torch.compile(block, backend=backend)


def whole(model: Any, backend: str) -> None:
    model.compile(backend=backend)


Way = Callable[[Any, str], None]
BEFORE: dict[str, Way] = {"by method": by_method, "by forward": by_forward, "by wrapper": by_wrapper, "the whole": whole}
AFTER: dict[str, Way] = {"by method": by_method, "by forward": by_forward, "the whole": whole}


def check(way: Way, before: bool, transport: str, backend: str, stages: tuple[int, ...] = STAGES) -> None:
    for stage in stages:
        plain = toy.make(toy.seeded(toy.Net), stage, transport)
        expected = train(plain)
        plain.destroy()
        torch._dynamo.reset()
        counters.clear()
        model = toy.seeded(toy.Net)
        if before:
            way(model, backend)
        engine = toy.make(model, stage, transport)
        if not before:
            way(model, backend)
        torch.testing.assert_close(torch.stack(train(engine)), torch.stack(expected), rtol=1e-4, atol=1e-6)
        with torch.no_grad():
            engine(toy.floats(0, 0))
        frames, breaks = counters["frames"], dict(counters["graph_break"])
        assert frames["ok"] >= 1 and counters["stats"]["unique_graphs"] >= 1, "something was compiled"
        if way is not whole:
            assert not breaks, f"stage {stage}: {breaks}"
            assert counters["stats"]["unique_graphs"] <= 6, "one graph per grad mode, not per block and step"
        engine.destroy()
    torch._dynamo.reset()


@pytest.mark.parametrize("way", BEFORE)
@distributed(world_size=2, transports=("shared", "gloo"), timeout=120)
def test_compiled_before_initialize(way: str, transport: str) -> None:
    check(BEFORE[way], True, transport, "aot_eager")


@pytest.mark.parametrize("way", AFTER)
@distributed(world_size=2, transports=("shared", "gloo"), timeout=120)
def test_compiled_after_initialize(way: str, transport: str) -> None:
    check(AFTER[way], False, transport, "aot_eager")


@distributed(world_size=2, timeout=240)
def test_inductor() -> None:
    import shutil
    import warnings

    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("inductor needs a C++ compiler")
    warnings.simplefilter("ignore")  # inductor's own
    check(by_method, True, "shared", "inductor", (3,))

"""Layers of experts in engines: expert parallelism at every ZeRO stage is one process, whatever ranks route where."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

import slipstream
from slipstream import checkpoint
from slipstream.moe import MoE
from tests import cases, toy
from tests.pool import distributed, run

STEPS, CLIP, EXPERTS = 3, 0.05, 4
KINDS: dict[str, dict[str, Any]] = {
    "top-2, gated": {"k": 2, "expert_size": 24},
    "top-1, sigmoid, shared": {"k": 1, "score": "sigmoid", "expert_size": 24},
    "one by one": {"k": 2},
}


def layer(kind: str, ep: int | None, dim: int = 16) -> MoE:
    expert = None
    if kind == "one by one":
        expert = lambda: nn.Sequential(nn.Linear(dim, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, dim))  # noqa: E731
    shared = nn.Linear(dim, dim) if "shared" in kind else None
    return MoE(dim, expert, EXPERTS, ep_size=ep, shared=shared, **KINDS[kind])


class Block(nn.Module):
    def __init__(self, kind: str, ep: int | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.moe = layer(kind, ep)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, loss, _ = self.moe(self.norm(x))
        return x + out, loss


class Model(nn.Module):
    def __init__(self, kind: str = "top-2, gated", ep: int | None = None) -> None:
        super().__init__()
        self.inp = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block(kind, ep) for _ in range(2))
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, losses = self.inp(x), x.new_zeros(())
        for block in self.blocks:
            h, loss = block(h)
            losses = losses + loss
        return self.out(h).square().mean() + 0.01 * losses


def build(kind: str, ep: int | None = None) -> Model:
    torch.manual_seed(0)
    return Model(kind, ep)


def batch(rank: int, step: int, micro: int = 0) -> Tensor:
    """Tokens that prefer other experts on each rank."""
    return toy.floats(rank, step, micro) + rank


def twin(kind: str, ranks: int, steps: int = STEPS) -> tuple[list[float], list[float], dict[str, Tensor]]:
    model = build(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        loss = sum((model(batch(rank, step)) for rank in range(ranks)), torch.zeros(())) / ranks
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, dict(model.state_dict())


def make(model: nn.Module, stage: int, transport: str = "auto", **blocks: Any) -> Any:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
    return toy.make(model, stage, transport, **({"gradient_clipping": CLIP, "optimizer": optimizer} | blocks))


def train(engine: Any, first: int = 0, steps: int = STEPS) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in range(first, first + steps):
        loss = engine(batch(engine.mesh.batch.index, step))
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / engine.world_size)
        norms.append(engine.global_grad_norm)
    return losses, norms


@distributed(world_size=4, transports=("shared", "gloo"))
@pytest.mark.parametrize("kind", KINDS)
def test_experts_on_several_ranks_train_as_one_process(transport: str, kind: str) -> None:
    losses, norms, weights = twin(kind, 4)
    assert all(norm > CLIP for norm in norms)
    first: Any = None
    for ep in (1, 2, 4):
        bits = []
        for stage in cases.stages(transport):
            engine = make(build(kind, ep), stage, transport)
            result = train(engine)
            assert result == (pytest.approx(losses, abs=1e-5), pytest.approx(norms, rel=1e-4)), (ep, stage)
            bits.append(result)
            for name, value in engine.state_dict().items():
                torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
            engine.destroy()
        assert all(each == bits[0] for each in bits), ep
        first = first or bits[0]

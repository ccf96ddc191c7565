"""Tiny models for distributed tests, their batches, and helpers to make an engine."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slipstream
from slipstream.ops.disk import DiskFacts

VOCABULARY, TOKENS = 48, 8


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Floats to floats: three blocks between two linear layers, which belong to the root unit."""

    def __init__(self, dim: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.inp = nn.Linear(8, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.out = nn.Linear(dim, 8)

    def body(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(h)
        return h

    def forward(self, x: Tensor) -> Any:
        return self.out(self.body(self.inp(x)))


class Lm(nn.Module):
    """A language model without attention: tokens to mean cross-entropy, in fp32."""

    def __init__(self, dim: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(h).float().flatten(0, 1), tokens[:, 1:].flatten())


class Lookahead(torch.optim.Optimizer):
    """A wrapper as users write them: it shares the groups of two optimizers, steps these, and counts its own calls."""

    def __init__(self, params: list[Tensor], every: int = 2) -> None:  # like most, without Optimizer.__init__
        self.inner = [torch.optim.AdamW(params[::2], lr=1e-2), torch.optim.SGD(params[1::2], lr=1e-2, momentum=0.9)]
        self.param_groups = [group for each in self.inner for group in each.param_groups]
        self.state, self.every, self.calls = defaultdict(dict), every, 0
        self.seen: int

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.inner:
            each.step()
        self.calls += 1
        self.seen = getattr(self, "seen", 0) + 1  # as some begin to count in the first step
        for p in [p for group in self.param_groups for p in group["params"] if self.calls % self.every == 0]:
            slow = self.state[p].setdefault("slow", torch.zeros_like(p))
            p.copy_(slow.lerp_(p, 0.5))


def seeded(kind: Callable[[], nn.Module], seed: int = 0) -> Any:
    """A model of `kind`, equal on every call; `Any`, so that tests may use its attributes."""
    torch.manual_seed(seed)
    return kind()


def floats(rank: int, step: int, which: int = 0) -> Tensor:
    """A batch for `Net`."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * rank + 10 * step + which))


def tokens(rank: int, step: int, which: int = 0) -> Tensor:
    """A batch for `Lm`."""
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + which)
    return torch.randint(VOCABULARY, (2, TOKENS), generator=generator)


def settings(stage: int, transport: str = "auto", *, dtype: str = "fp32", **blocks: Any) -> dict[str, Any]:
    """A config with AdamW and defaults, overridden by `blocks` (top-level keys); dictionaries are merged."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,  # DeepSpeed's default is 1.0
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "slipstream": {"transport": transport, "timeout_s": 20},
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    for key, value in blocks.items():
        together = isinstance(value, dict) and key in config and key != "optimizer"
        config[key] = config[key] | value if together else value
    return {key: value for key, value in config.items() if value is not None}


def make(model: nn.Module, stage: int, transport: str = "auto", *, dtype: str = "fp32", **blocks: Any) -> Any:
    """An engine of `model`; `Any`, because tests access its internals. Skips the measurement of disks, 0.2 s each."""
    with mock.patch("slipstream.train.disk_space.preflight", lambda *_, **__: DiskFacts("not tried", 0, 1e9, 1e9)):
        return slipstream.initialize(model=model, config=settings(stage, transport, dtype=dtype, **blocks))[0]


def step(engine: Any, batch: Tensor) -> Tensor:
    """Train an `Lm` for one step; returns the loss."""
    loss: Tensor = engine(batch)
    engine.backward(loss)
    engine.step()
    return loss.detach()


def checksum(engine: Any) -> Tensor:
    """A checksum of the complete weights, which any change of one bit changes. Collective."""
    total = torch.zeros((), dtype=torch.int64)
    for value in engine.state_dict().values():
        raw = value.contiguous().view(-1).view(torch.uint8).long()
        total += (raw * torch.arange(1, 2 * raw.numel() + 1, 2)).sum() + 31 * total
    return total

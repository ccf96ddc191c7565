"""Ulysses attention and the loss over shards of a sequence, against one process."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.parallel.exchange import Exchange, connect_activations
from slipstream.parallel.sequence import deal_heads, sequence_mean, ulysses_attention
from slipstream.world.mesh import build_mesh
from slipstream.world.watch import Watch
from tests import cases, toy
from tests.pool import distributed


@contextmanager
def connected(transport: str) -> Iterator[Exchange]:
    """An exchange over all ranks, outside of an engine."""
    mesh = build_mesh(sp=dist.get_world_size())
    watch = Watch(20.0)
    watch.start(mesh.world)
    exchange = connect_activations(mesh.sp, torch.device("cpu"), transport, watch)
    yield exchange
    exchange.close()
    watch.stop()


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@distributed(world_size=(2, 4), transports=("shared", "gloo"))
def test_ulysses_equals_plain_attention(world_size: int, transport: str) -> None:
    s, d = 4, 8
    with connected(transport) as exchange:
        _compare(exchange, world_size, s, d)


def _compare(exchange: Exchange, world_size: int, s: int, d: int) -> None:
    own = slice(dist.get_rank() * s, (dist.get_rank() + 1) * s)
    for heads, keys in ((8, 8), (8, 2), (8, 1), (4, 2), (4, 1), (3, 3), (3, 1)):
        if heads < world_size:
            continue
        torch.manual_seed(0)
        whole = [torch.randn(2, n, s * world_size, d, requires_grad=True) for n in (heads, keys, keys)]
        slope = torch.randn(2, heads, s * world_size, d)
        expected = attend(*whole)
        wanted = torch.autograd.grad(expected, whole, slope)
        shares = [t.detach()[:, :, own].clone().requires_grad_() for t in whole]
        exchange.moved.clear()
        out = ulysses_attention(attend, *shares, exchange)
        torch.testing.assert_close(out, expected[:, :, own])
        if keys == heads and heads % world_size == 0:
            assert exchange.moved["all-to-all"] == 4 * heads * d * 2 * s * 4 * (world_size - 1) // world_size
        for got, want in zip(torch.autograd.grad(out, shares, slope[:, :, own]), wanted, strict=True):
            torch.testing.assert_close(got, want[:, :, own])


class Attention(nn.Module):
    """Attention over sequences of which each rank may hold a share; tokens' positions are in the data."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 16 + 2 * 8, bias=False), nn.Linear(16, 16)  # a bias of keys has no gradient
        self.exchange: Exchange | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, 4)).transpose(1, 2).split([4, 2, 2], 1)  # [b, heads, s, 4]
        out = attend(q, k, v) if self.exchange is None else ulysses_attention(attend, q, k, v, self.exchange)
        return x + self.out(out.transpose(1, 2).flatten(-2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch(index: int, step: int) -> tuple[Tensor, Tensor]:
    """Two sequences of 12 tokens, most of the labels of the second half ignored."""
    generator = torch.Generator().manual_seed(10 * index + step)
    labels = torch.randint(0, 5, (2, 12), generator=generator)
    labels[:, 7:] = -100
    labels[0] = labels[0] if index == 0 else -100
    return torch.randn(2, 12, 16, generator=generator), labels


@distributed(world_size=4, transports=("shared", "gloo"))
def test_shares_of_sequences_train_as_one_process(transport: str) -> None:
    """sp 2 x dp 2: losses, clipped norms and weights, at each ZeRO stage, with labels that are ignored unevenly."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses, norms = [], []
    for step in range(3):
        optimizer.zero_grad()
        pairs = [batch(index, step) for index in range(2)]
        loss = torch.stack([F.cross_entropy(model(x).flatten(0, 1), y.flatten()) for x, y in pairs]).mean()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        losses.append(loss.item())
    for stage in cases.stages(transport):
        torch.manual_seed(0)
        settings = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
        engine = toy.make(sharded := Model(), stage, transport, gradient_clipping=0.1, optimizer=settings, sequence_parallel_size=2)
        exchange = engine.exchange("sp")
        for layer in sharded.layers:
            layer.exchange = exchange
        for step in range(3):
            x, y = (part.chunk(2, 1)[engine.mesh.sp.index] for part in batch(engine.mesh.batch.index, step))
            total = F.cross_entropy(engine(x).flatten(0, 1), y.flatten(), reduction="sum")
            loss = sequence_mean(total, (y != -100).sum(), exchange)
            engine.backward(loss)
            engine.step()
            mean = loss.detach() / 4
            dist.all_reduce(mean)
            assert mean.item() == pytest.approx(losses[step], rel=1e-5)
            assert engine.global_grad_norm == pytest.approx(norms[step], rel=1e-5), (stage, step)
        for name, value in engine.state_dict().items():
            torch.testing.assert_close(value, model.state_dict()[name], atol=2e-5, rtol=1e-4)
        engine.destroy()


def test_heads_are_dealt_evenly() -> None:
    assert [len(h.queries) for h in deal_heads(14, 7, 4)] == [4, 4, 4, 2]
    with pytest.raises(ValueError, match="fewer than 4 sequence ranks"):
        deal_heads(3, 1, 4)

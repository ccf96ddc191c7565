"""Ulysses attention and the loss over shards of a sequence, against one process."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.parallel import ring
from slipstream.parallel.exchange import Exchange, connect_activations
from slipstream.parallel.sequence import deal_heads, sequence_mean, ulysses_attention
from slipstream.world.mesh import build_mesh
from slipstream.world.watch import PeerError, Watch
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


@distributed(world_size=(2, 3, 4), transports=("shared", "gloo"))
def test_ring_attention_equals_plain_attention(world_size: int, transport: str) -> None:
    """Random shapes and masks, in tiles of a few queries; the bytes are those of the formula."""
    chosen = random.Random(5)
    with connected(transport) as exchange, pytest.MonkeyPatch.context() as patch:
        for seed in range(10):
            patch.setitem(ring._TILES, "cpu", chosen.choice([1, 40, 1 << 22]))
            heads, keys = chosen.choice([(1, 1), (4, 2), (3, 1)])
            length = world_size * chosen.randint(1, 7)
            causal, window = chosen.choice([(True, None), (True, 3), (False, None), (False, 3)])
            flags = {name: chosen.random() < 0.4 for name in ("packed", "padded")}
            _compare_ring(exchange, heads, keys, length, causal, window, seed=seed, **flags)


def _compare_ring(
    exchange: Exchange, heads: int, keys: int, length: int, causal: bool, window: int | None, packed: bool, padded: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    whole = [torch.randn(2, n, length, 8, generator=generator, requires_grad=True) for n in (heads, keys, keys)]
    slope = torch.randn(2, heads, length, 8, generator=generator)
    samples = torch.randint(0, 2, (2, length), generator=generator).cumsum(-1) if packed else None
    padding = torch.rand(2, length, generator=generator) > 0.3 if padded else None
    mask = ring.Mask(ring.deal_spans(length, exchange.size, causal), causal, window, samples, padding)
    at = torch.arange(length)
    allowed = torch.ones(2, 1, length, length, dtype=torch.bool)
    if causal:
        allowed &= at[:, None] >= at
    if window is not None:
        allowed &= (at[:, None] - at).abs() < window
    if samples is not None:
        allowed &= samples[:, None, :, None] == samples[:, None, None]
    if padding is not None:
        allowed &= padding[:, None, None]
    query, key, value = (part.repeat_interleave(heads // part.shape[1], 1) for part in whole)
    scores = (query @ key.transpose(-1, -2) / 8**0.5).masked_fill(~allowed, -1e30)
    expected = (scores.softmax(-1) * allowed) @ value  # a token that may attend to nothing gets zero
    wanted = torch.autograd.grad(expected, whole, slope)

    def own(x: Tensor) -> Tensor:
        return torch.cat([x[:, :, slice(*span)] for span in mask.spans[exchange.index]], 2)

    shares = [own(part.detach()).requires_grad_() for part in whole]
    exchange.moved.clear()
    out = ring.ring_attention(*shares, exchange, mask)
    torch.testing.assert_close(out, own(expected.detach()), atol=2e-5, rtol=1e-5)
    pair = 2 * 2 * keys * length // exchange.size * 8 * 4
    assert exchange.moved["all-to-all"] == (exchange.size - 1) * pair
    for got, want in zip(torch.autograd.grad(out, shares, own(slope)), wanted, strict=True):
        torch.testing.assert_close(got, own(want), atol=5e-5, rtol=1e-4)
    assert exchange.moved["all-to-all"] == (3 * exchange.size - 2) * pair


def test_spans_balance_a_causal_mask() -> None:
    for size in (2, 3, 8):
        spans = ring.deal_spans(48, size, causal=True)
        work = [sum(2 * 48 - (48 - b) - (48 - a) for a, b in each) * 48 // size for each in spans]
        assert len(set(work)) == 1 and sorted(t for each in spans for a, b in each for t in range(a, b)) == list(range(48))
        assert ring.deal_spans(size * 5, size, causal=True)[-1] == [((size - 1) * 5, size * 5)]


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


@distributed(world_size=2)
def test_shares_of_other_lengths_are_named() -> None:
    """gloo would end the process: its messages do not tell their lengths."""
    with connected("gloo") as exchange:
        q = torch.randn(2, 4, 4 + 2 * exchange.index, 8)
        with pytest.raises(PeerError, match=r"rank 0 is in .* shares of 2 x 4 tokens .* rank 1 is in .* shares of 2 x 6 tokens"):
            ulysses_attention(attend, q, q, q, exchange)


@distributed(world_size=2)
def test_counts_of_tokens_are_exact() -> None:
    """bf16 has no 257: each of 514 tokens has its share of the mean."""
    with connected("shared") as exchange:
        total = torch.tensor(514.0, dtype=torch.bfloat16, requires_grad=True)
        mean = sequence_mean(total, torch.tensor(257), exchange)
        mean.backward()
        assert mean.dtype == torch.bfloat16 and torch.equal(total.grad, torch.tensor(2 / 514, dtype=torch.bfloat16))
        mean = sequence_mean(total.detach(), torch.tensor(257), exchange, 1024)
        assert mean.item() == 1.0, "by another number"


def test_heads_are_dealt_evenly() -> None:
    assert [len(h.queries) for h in deal_heads(14, 7, 4)] == [4, 4, 4, 2]
    with pytest.raises(ValueError, match="3 attention heads are fewer than 4 sequence ranks; use sequence_parallel_size 2"):
        deal_heads(3, 1, 4)

"""Ulysses attention and the loss over shards of a sequence, against one process."""

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.parallel.sequence import deal_heads, sequence_mean, ulysses_attention
from slipstream.world.mesh import Axis
from tests import toy
from tests.pool import distributed


class Gloo:
    def __init__(self) -> None:
        size, self.sent = dist.get_world_size(), 0
        self.axis = Axis("sp", dist.group.WORLD, tuple(range(size)), dist.get_rank(), size)

    def all_to_all(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        out = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(out, rows, list(receive), list(send))
        self.sent += (sum(send) - send[self.axis.index]) * rows[0].numel() * rows.element_size()
        return out

    def sum(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@distributed(world_size=(2, 4), transports=("gloo",))
def test_ulysses_equals_plain_attention(world_size: int, transport: str) -> None:
    exchange, s, d = Gloo(), 4, 8
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
        exchange.sent = 0
        out = ulysses_attention(attend, *shares, exchange)
        torch.testing.assert_close(out, expected[:, :, own])
        if keys == heads and heads % world_size == 0:
            assert exchange.sent == 4 * heads * d * 2 * s * 4 * (world_size - 1) // world_size
        for got, want in zip(torch.autograd.grad(out, shares, slope[:, :, own]), wanted, strict=True):
            torch.testing.assert_close(got, want[:, :, own])


@distributed(world_size=2, transports=("gloo",))
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_loss_over_shards_is_that_of_the_whole(world_size: int, transport: str, stage: int) -> None:
    exchange = Gloo()
    torch.manual_seed(0)
    x, target = torch.randn(12, 16), torch.randint(0, 5, (12,))
    target[4:] = -100  # none on rank 1
    model = nn.Linear(16, 5)
    plain = F.cross_entropy(model(x), target)
    grads = torch.autograd.grad(plain, list(model.parameters()))
    norm = torch.stack([g.norm() for g in grads]).norm()
    engine = toy.make(model, stage)
    own = slice(dist.get_rank() * 6, (dist.get_rank() + 1) * 6)
    total = F.cross_entropy(engine(x[own]), target[own], reduction="sum")
    loss = sequence_mean(total, (target[own] != -100).sum(), exchange)
    torch.testing.assert_close(loss, plain.detach())
    engine.backward(loss)
    engine.step()
    assert engine.global_grad_norm == pytest.approx(norm.item(), rel=1e-5)
    engine.destroy()


def test_heads_are_dealt_evenly() -> None:
    assert [len(h.queries) for h in deal_heads(14, 7, 4)] == [4, 4, 4, 2]
    with pytest.raises(ValueError, match="fewer than 4 sequence ranks"):
        deal_heads(3, 1, 4)

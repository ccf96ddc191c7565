"""FLOP by module equal the formulas, forward and backward; a profiled step computes what an unprofiled one does."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from slipstream.observe.flops import Counts, FlopCounter, Work, count

B, S, D = 2, 16, 32


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(B, S, 3, 4, D // 4).permute(2, 0, 3, 1, 4)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, S, D))


class Block(nn.Module):
    """Of a GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(D), Attention()
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x + self.attention(self.norm(x)))


class Blocks(nn.Module):
    """repeats: by activation checkpointing. looks: at numbers, which fake tensors do not have."""

    def __init__(self, repeats: bool | None = None, looks: bool = False) -> None:
        super().__init__()
        self.layers, self.repeats, self.looks = nn.ModuleList(Block() for _ in range(2)), repeats, looks

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2 if self.looks and float(x.sum()) > 0 else x
        for layer in self.layers:
            x = layer(x) if self.repeats is None else checkpoint(layer, x, use_reentrant=self.repeats)
        return x.square().mean()


PRODUCTS, SCORES = 2 * B * S * 12 * D * D, 4 * B * S * S * D  # of a block's forward
BACKWARD = 2 * PRODUCTS + SCORES * 5 // 2  # flash attention computes the scores again


def total(counts: Counts) -> Work:
    work = Work()
    for each in counts.values():
        work.add(each)
    return work


def counted(model: nn.Module, x: Tensor, **options: Any) -> Counts:
    return count(model, (x,), {}, dict(model.named_modules()), **options)


def test_work_by_module_is_that_of_the_formula() -> None:
    model, x = Blocks(), torch.randn(B, S, D, requires_grad=True)
    counts = counted(model, x)
    assert total(counts) == Work(2 * (PRODUCTS + SCORES), 2 * BACKWARD)
    for layer in ("layers.0", "layers.1"):
        assert counts[f"{layer}.attention"] == Work(SCORES, SCORES * 5 // 2)
        assert counts[f"{layer}.mlp.0"] == Work(8 * B * S * D * D, 16 * B * S * D * D)
    counter = FlopCounter(dict(model.named_modules()))
    with counter:
        model(x).backward()
    assert counter.counts == counts, "fake tensors and real ones"
    for param in model.layers[0].parameters():
        param.requires_grad_(False)
    with torch.no_grad():
        assert total(counted(model, x)).backward == 0
    frozen = total(counted(model, x.detach()))
    assert frozen.backward == BACKWARD, "of the second layer alone"


@pytest.mark.parametrize("repeats", [False, True])
def test_recomputation_counts_in_the_backward_of_its_module(repeats: bool) -> None:
    x = torch.randn(B, S, D, requires_grad=True)
    counts = counted(Blocks(repeats), x)
    forward = 2 * (PRODUCTS + SCORES)
    again = forward if repeats else forward - 2 * 8 * B * S * D * D  # nothing needs the output of the last product
    assert total(counts) == Work(forward, 2 * BACKWARD + again, again)
    if not repeats:
        assert counted(Blocks(), x, recomputed=["layers.0", "layers.1"]) == counts

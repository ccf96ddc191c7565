"""What every contender trains: one GPT, one fixed batch per rank. Imports nothing but torch, so that peers can run it.

[Note: bf16 without bf16 instructions]
On a CPU that has none (no AVX-512, no AMX) torch multiplies bf16 matrices with plain loops: 7 times slower than fp32 in the
forward, 40 to 100 times in the gradient of the input (measured on Zen 3). There `Linear` and the attention widen their
operands to fp32 and round the result, which is what the instructions do inside. All contenders run this same code: weights,
activations and gradients stay bf16, and so do the bytes that have to be moved. RESULTS.md says which of the two ran.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

LEARNING_RATE = 3e-4
BETAS = (0.9, 0.95)
EPS = 1e-8
WEIGHT_DECAY = 0.1
CLIPPING = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A GPT's sizes and what a rank feeds it per step."""

    name: str
    width: int
    depth: int
    heads: int
    vocab: int
    batch: int
    length: int

    @property
    def num_params(self) -> int:
        block = 12 * self.width**2 + 13 * self.width
        return self.depth * block + (2 * self.vocab + self.length + 2) * self.width

    def describe(self) -> str:
        return (
            f"GPT, {self.num_params / 1e6:.1f}M parameters (width {self.width}, depth {self.depth}, vocabulary "
            f"{self.vocab:,}, head not tied), {self.batch}x{self.length} tokens per rank"
        )


WORKLOADS = {
    work.name: work
    for work in (
        Workload(name="moving", width=512, depth=12, heads=8, vocab=8192, batch=2, length=128),
        Workload(name="computing", width=512, depth=6, heads=8, vocab=6144, batch=4, length=256),
        Workload(name="tiny", width=128, depth=4, heads=4, vocab=512, batch=2, length=32),
    )
}


@functools.cache
def has_bf16_instructions() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class _WideLinear(torch.autograd.Function):
    """x @ weight.T + bias, with bf16 operands widened to fp32 and the result rounded once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].flatten(0, -2).float()
        return (
            (grad @ weight.float()).to(x.dtype).view(x.shape),
            (grad.T @ x.flatten(0, -2).float()).to(weight.dtype),
            grad.sum(0).to(weight.dtype) if ctx.has_bias else None,
        )


def _autocast(tensor: Tensor) -> Tensor:
    return tensor.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else tensor


class Linear(nn.Linear):
    """See [Note: bf16 without bf16 instructions]."""

    def forward(self, x: Tensor) -> Tensor:
        x, weight = _autocast(x), _autocast(self.weight)
        bias = None if self.bias is None else _autocast(self.bias)
        if x.dtype is torch.bfloat16 and x.is_cpu and not has_bf16_instructions():
            with torch.autocast("cpu", enabled=False):
                y: Tensor = _WideLinear.apply(x, weight, bias)
                return y
        return F.linear(x, weight, bias)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # all BHTD
    if q.dtype is torch.bfloat16 and q.is_cpu and not has_bf16_instructions():
        with torch.autocast("cpu", enabled=False):
            return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True).to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = Linear(width, 3 * width), Linear(width, width)
        self.up, self.down = Linear(width, 4 * width), Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # BTD
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.proj(attention(q, k, v).transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))

    def mlp(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.gelu(self.up(x)))
        return result


class GPT(nn.Module):
    """forward(tokens, targets) -> mean cross entropy in fp32."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.tokens = nn.Embedding(work.vocab, work.width)
        self.positions = nn.Embedding(work.length, work.width)
        self.blocks = nn.ModuleList(Block(work.width, work.heads) for _ in range(work.depth))
        self.norm = nn.LayerNorm(work.width)
        self.head = Linear(work.width, work.vocab, bias=False)
        for name, param in self.named_parameters():
            if param.dim() == 2:
                shrink = math.sqrt(2 * work.depth) if name.endswith(("proj.weight", "down.weight")) else 1.0
                nn.init.normal_(param, std=0.02 / shrink)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # BT, BT
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def build_model(work: Workload) -> GPT:
    """The same weights on every rank and in every contender."""
    torch.manual_seed(0)
    return GPT(work)


def build_batch(work: Workload, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens and next tokens; every step sees the same ones, so that a wrong update shows in the loss at once."""
    generator = torch.Generator().manual_seed(1 + rank)
    tokens = torch.randint(0, work.vocab, (work.batch, work.length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

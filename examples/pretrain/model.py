"""A small Llama-style language model in plain PyTorch. It knows nothing of Slipstream, but for its attention and its experts.

Pre-norm blocks (RMSNorm, rotary attention, SwiGLU) in an `nn.ModuleList`, which is what makes each block a
unit of its own under ZeRO-3. Shape suffixes: B batch, T time, D model width, H heads, K head width, V
vocabulary.

[Note: Arithmetic on CPUs without bf16]
Weights, gradients and communication have the dtype of the configuration (bf16), but a CPU without bf16
instructions multiplies bf16 far slower than fp32: on one Zen 3 core at 9 against 80 GFLOP/s, and this model
trains 12 times slower. There the activations are fp32 and each layer widens its weight as it uses it; in
backward the same cast rounds the gradient to the weight's dtype. `arithmetic_dtype` is where this is decided.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.attention import causal_attention
from slipstream.moe import MoE


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    vocab_size: int = 8192
    dim: int = 384
    layers: int = 3
    heads: int = 6
    hidden: int = 1024
    experts: int = 0  # in place of each MLP; 0: none
    top_k: int = 2  # experts of a token, each with `hidden / top_k` features: as many products as the MLP
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5

    @property
    def residual_std(self) -> float:
        """GPT-2's normal(0.02), smaller where a block writes to the residual stream."""
        return 0.02 / (2 * self.layers) ** 0.5


def arithmetic_dtype(device: torch.device, stored: torch.dtype) -> torch.dtype:
    """What to compute in where weights are `stored` so: the same, or fp32 where a CPU would emulate it."""
    if device.type != "cpu" or stored not in (torch.bfloat16, torch.float16):
        return stored
    # By torch's names: x86 with AVX-512, and Arm.
    native = {torch.bfloat16: ("avx512_bf16", "bf16"), torch.float16: ("avx512_fp16", "fp16_arith")}[stored]
    capabilities = torch.cpu.get_capabilities()
    return stored if any(capabilities.get(flag, False) for flag in native) else torch.float32


class Linear(nn.Linear):
    """A linear layer without bias that computes in its input's dtype; its weights begin as normal(0, std)."""

    def __init__(self, inputs: int, outputs: int, std: float = 0.02) -> None:
        self.std = std
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Embedding(nn.Embedding):
    """Wider than GPT-2's, so that a fast rate moves it as far relative to its size."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.3)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attend = causal_attention  # whoever shares sequences among ranks puts another function here
        self.num_heads, self.head_dim = config.heads, config.dim // config.heads
        self.qkv = Linear(config.dim, 3 * config.dim)
        self.out = Linear(config.dim, config.dim, config.residual_std)

    def forward(self, x_BTD: Tensor, rotation_TK: tuple[Tensor, Tensor]) -> Tensor:
        batch, time, _ = x_BTD.shape
        qkv = self.qkv(x_BTD).view(batch, time, 3, -1, self.head_dim)  # a slice has a share of the heads
        q_BHTK, k_BHTK, v_BHTK = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        q_BHTK, k_BHTK = rotate(q_BHTK, rotation_TK), rotate(k_BHTK, rotation_TK)
        y_BHTK = self.attend(q_BHTK, k_BHTK, v_BHTK)
        return self.out(y_BHTK.transpose(1, 2).reshape(batch, time, -1))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, parts: int = 1) -> None:
        super().__init__()
        self.up = Linear(config.dim, 2 * config.hidden // parts)
        self.down = Linear(config.hidden // parts, config.dim, config.residual_std)

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate, value = self.up(x_BTD).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


class Experts(nn.Module):
    """Experts in place of an MLP. A bias on their choice balances the load, so there is no auxiliary loss."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.moe = MoE(config.dim, lambda: MLP(config, config.top_k), config.experts, k=config.top_k, balance_rate=1e-3)

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTD, _, _ = self.moe(x_BTD)
        return y_BTD


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = Experts(config) if config.experts else MLP(config)

    def forward(self, x_BTD: Tensor, rotation_TK: tuple[Tensor, Tensor]) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotation_TK)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class First(nn.Module):
    """The first layer of a pipeline: the embedding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = Embedding(config.vocab_size, config.dim)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embedding(tokens_BT)
        return x_BTD.to(arithmetic_dtype(x_BTD.device, x_BTD.dtype))


class Middle(Block):
    """A block that makes its own rotations: a stage receives activations only."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.config = config

    def forward(self, x_BTD: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x_BTD, rotation(x_BTD.shape[1], self.config, x_BTD))


class Last(nn.Module):
    """The last layer of a pipeline: the logits in fp32 (B, T, V)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = Linear(config.dim, config.vocab_size)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.head(self.norm(x_BTD)).float()


class LanguageModel(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.dim % (2 * config.heads):
            raise ValueError(f"dim ({config.dim}) must be a multiple of 2 x heads ({config.heads}) for rotary pairs")
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = Linear(config.dim, config.vocab_size)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None, start: int = 0) -> Tensor:
        """Mean cross entropy in nats where targets are given, else the logits in fp32 (B, T, V). start: the first position."""
        x_BTD = self.embedding(tokens_BT)
        x_BTD = x_BTD.to(arithmetic_dtype(x_BTD.device, x_BTD.dtype))
        rotation_TK = rotation(tokens_BT.shape[1], self.config, x_BTD, start)
        for block in self.blocks:
            x_BTD = block(x_BTD, rotation_TK)
        logits_BTV = self.head(self.norm(x_BTD)).float()
        if targets_BT is None:
            return logits_BTV
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def rotation(time: int, config: ModelConfig, like: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
    """Cosine and sine tables (T, K). Made anew in fp32 at each forward: as buffers they would be cast to
    bf16, which cannot tell positions above 256 apart."""
    width = config.dim // config.heads
    frequency = config.rope_base ** (-torch.arange(0, width, 2, device=like.device, dtype=torch.float32) / width)
    angle = torch.outer(torch.arange(start, start + time, device=like.device, dtype=torch.float32), frequency).repeat(1, 2)
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def rotate(x_BHTK: Tensor, rotation_TK: tuple[Tensor, Tensor]) -> Tensor:
    cosine, sine = rotation_TK
    first, second = x_BHTK.chunk(2, dim=-1)
    return x_BHTK * cosine + torch.cat((-second, first), dim=-1) * sine

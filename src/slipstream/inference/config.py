"""The configuration of a Llama-like decoder: model families differ by values here, not by classes.

`models.from_hf` converts a config.json to a `DecoderConfig`; `decoder` (torch), `native` (CPU) and `cuda` (Triton) run it. Models
that it cannot describe run in transformers (`generic`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary positions: pair i of a head (i and i + rotary_dim / 2) is rotated by position * inv_freq[i]."""

    inv_freq: tuple[float, ...]  # radians per position, fp32 values; rotary_dim / 2 of them
    scale: float = 1.0  # factor on cosine and sine (YaRN's attention factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExperts:
    """A mixture of experts: softmax over all, then the top k; each expert is a gated MLP."""

    num: int
    top_k: int
    intermediate_size: int
    normalize: bool  # scale the weights of the top k to sum to 1
    shared_size: int = 0  # Qwen-MoE's shared expert (with its sigmoid gate); 0: none


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The settings that may differ between layers."""

    rope: Rope | None  # None: no rotary embedding
    window: int = 0  # number of last positions that a query attends to, its own included; 0: all
    experts: RoutedExperts | None = None  # None: a dense MLP


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[Layer, ...]
    norm_eps: float
    max_context: int
    activation: str = "silu"  # of the gate: silu | gelu_tanh | gelu
    tied: bool = False  # the output matrix is the embedding
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of q and k before the rotary embedding (Qwen3, Gemma 3)
    qk_norm_whole: bool = False  # over all heads of q together, and of k (OLMoE)
    norm_offset: float = 0.0  # RMSNorm multiplies by offset + weight (Gemma: 1)
    sandwich: bool = False  # norms also after attention and after the MLP, before the residual (Gemma 2 and 3)
    embed_scale: float = 1.0  # on embeddings (Gemma: sqrt(hidden_size), rounded to the weights' dtype)
    attn_scale: float = 0.0  # on q . k; 0: 1 / sqrt(head_dim)
    attn_softcap: float = 0.0  # scores become cap * tanh(score / cap); 0: off
    logit_softcap: float = 0.0
    end_ids: tuple[int, ...] = ()

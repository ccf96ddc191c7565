"""The configuration of a transformer, encoder or decoder: model families differ by values here, not by classes.

`models.from_hf` converts a config.json to a `TransformerConfig`; `decoder` (torch), `native` (CPU) and `cuda` (Triton) run it.
Models that it cannot describe run in transformers (`generic`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

COLUMNS = 16  # products are cut at multiples of this many columns: one panel of csrc/decoder.h
_GROUPS = (32, 64, 128)  # sizes of quantization groups: features that share a scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary positions: features i and i + rotary_dim / 2 of a head are rotated by position * inv_freq[i]."""

    inv_freq: tuple[float, ...]  # radians per position, fp32 values, [rotary_dim / 2]
    scale: float = 1.0  # factor on cosine and sine (YaRN's attention factor)
    long_inv_freq: tuple[float, ...] = ()  # used for all positions of a text of more than `short_context` tokens; (): inv_freq
    short_context: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExperts:
    """A mixture of experts: score all experts, run the top k; each expert is a gated MLP."""

    num: int
    top_k: int
    intermediate_size: int
    normalize: bool  # scale the weights of the top k to sum to 1
    shared_size: int = 0  # inner features of an expert that every token uses; 0: no such expert
    shared_gate: bool = True  # whether a sigmoid gate weighs the shared expert (Qwen-MoE)
    score: str = "softmax"  # softmax over all, or "sigmoid" of each, where a bias per expert changes only the choice (DeepSeek-V3)
    scale: float = 1.0  # factor on the weights
    num_groups: int = 1  # a token uses only experts of its best groups, by best score or by the sum of two sigmoids
    top_groups: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): all heads share one cached vector, from which their keys and
    values are products: `rotary_dim` rotated features, then `rank` others after an RMSNorm. So `num_kv_heads` is 1 and `head_dim`
    is the sum of both. Before attention, a head's query is multiplied by the head's key matrix; after attention, the mixed vector
    is multiplied by its value matrix."""

    rank: int
    q_rank: int  # features from which queries are computed; 0: queries are computed from the hidden state
    rotary_dim: int
    plain_dim: int  # features of a query beside the rotated ones, which come first
    value_dim: int  # features of a head's value
    eps: float = 1e-6  # of both norms


NO_LATENT = Latent(rank=0, q_rank=0, rotary_dim=0, plain_dim=0, value_dim=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The settings that may differ between layers."""

    rope: Rope | None  # None: no rotary embedding
    window: int = 0  # last positions that a query attends to, with its own; in encoders also as many following ones; 0: all
    experts: RoutedExperts | None = None  # None: a dense MLP
    has_input_norm: bool = True  # False: this layer lacks the norm that the model has (ModernBERT's first layer)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """The part of the model that one of several processes computes; by default the whole model. It has 1 / `tp_size` of the heads
    and of each product's columns. Of routed experts it has 1 / `ep_size`, with 1 / `moe_tp_size` of their columns. The columns of a
    shared expert are split over all processes. `tp_size` is 1 or `size`. With `sums`, the last product of attention and MLPs is cut
    by inputs instead, namely those that this process computes; its outputs are then terms to add up (`joined`)."""

    index: int = 0  # neighboring ranks hold parts of the same experts
    ep_size: int = 1
    moe_tp_size: int = 1
    tp_size: int = 1
    sums: bool = False

    @property
    def size(self) -> int:
        return max(self.ep_size * self.moe_tp_size, self.tp_size)

    @property
    def has_head(self) -> bool:
        """Whether this process computes logits, if the model has a head."""
        return self.index == 0 or self.tp_size > 1

    def experts(self, num: int) -> range:
        place = self.index // self.moe_tp_size
        return range(num * place // self.ep_size, num * (place + 1) // self.ep_size)

    def columns(self, num: int) -> slice:
        """This process's columns of a product that has `num`, except products of experts."""
        return self._cut(num, self.index if self.tp_size > 1 else 0, self.tp_size)

    def expert_columns(self, num: int, *, shared: bool = False) -> slice:
        size = self.size if shared else self.moe_tp_size
        return self._cut(num, self.index % size, size)

    def _cut(self, num: int, place: int, size: int) -> slice:
        """Give each process an almost equal part; if inputs are cut, at the boundaries of quantization groups if possible."""
        steps = [step for step in _GROUPS if num % (size * step) == 0 or num >= 16 * size * step] if self.sums else []
        step = max(steps, default=COLUMNS)
        return slice(*(num if end == size else num * end // size // step * step for end in (place, place + 1)))

    def heads(self, num_heads: int, num_kv_heads: int) -> tuple[slice, slice]:
        """This process's query heads, and its key and value heads: whole groups, or a part of one group whose key and value other
        processes hold too. Raises ValueError if neither is possible."""
        size, index, group = self.tp_size, self.index, num_heads // num_kv_heads
        if size == 1:
            return slice(0, num_heads), slice(0, num_kv_heads)
        if size <= num_kv_heads:
            first, last = (num_kv_heads * end // size for end in (index, index + 1))
            return slice(first * group, last * group), slice(first, last)
        if size % num_kv_heads or num_heads % size:
            possible = [*range(2, num_kv_heads + 1), *range(2 * num_kv_heads, num_heads + 1, num_kv_heads)]
            sizes = [str(one) for one in possible if one <= num_kv_heads or num_heads % one == 0]
            have = f"{num_heads} heads with {num_kv_heads} keys and values"
            raise ValueError(f"tp_size is {size}, which does not split {have}; it can be {', '.join(sizes) or 1}")
        per, kv = num_heads // size, index * num_kv_heads // size
        return slice(index * per, (index + 1) * per), slice(kv, kv + 1)

    def of(self, config: TransformerConfig) -> TransformerConfig:
        """Return the configuration with this part. Raises ValueError if a process would have nothing to compute."""
        part = replace(self, moe_tp_size=self.tp_size) if self.ep_size * self.moe_tp_size == 1 else self
        routed = [layer.experts for layer in config.layers if layer.experts is not None]
        shares = [(experts.num, part.ep_size, experts.intermediate_size, part.moe_tp_size) for experts in routed]
        shares += [(1, 1, experts.shared_size, part.size) for experts in routed if experts.shared_size]
        if self.tp_size > 1:
            self.heads(config.num_heads, config.num_kv_heads)
            shares.append((1, 1, min(config.intermediate_size, config.vocab_size), self.tp_size))
        unrouted = not routed and self.ep_size * self.moe_tp_size > 1
        if unrouted or any(num < ep or min(inner, config.hidden_size) < tp * COLUMNS for num, ep, inner, tp in shares):
            what = routed[:1] or ("a model without experts" if unrouted else f"products of {config.hidden_size} features")
            sizes = f"ep_size {self.ep_size} x moe_tp_size {self.moe_tp_size}, tp_size {self.tp_size}"
            raise ValueError(
                f"{sizes} do not split {what}: each process computes {COLUMNS} columns or more of a product; give fewer"
            )
        return replace(config, part=part)


NORMS = ("input_norm", "mlp_norm", "attn_post_norm", "mlp_post_norm")  # a layer's norms: two of inputs, two of outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig:
    family: str = "llama"  # a row of `models.FAMILIES`: determines the names of the weights
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[Layer, ...]
    norm_eps: float
    max_context: int
    activation: str = "silu"  # of the gate, or of a plain MLP: silu | gelu_tanh | gelu | relu
    tied: bool = False  # the output matrix is the embedding
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    # norm of q and k before the rotary embedding: "head": over each head (Qwen3); "own": each head with its own weights (Cohere);
    # "whole": over all heads of q together, and of k (OLMoE)
    qk_norm: str = ""
    qk_norm_bias: bool = False
    norm_offset: float = 0.0  # RMSNorm multiplies by norm_offset + weight (Gemma: 1)
    norm: str = "rms"  # or "layer"
    norm_bias: bool = False
    norms: tuple[str, ...] = NORMS[:2]  # those in use; norms of outputs come before the residual is added (Gemma 2 and 3, OLMo 2)
    # "before": norms of inputs; "after": norms of the sum of output and residual (BERT); "parallel": attention and MLP read the
    # same input (GPT-J), or each its own norm of it (GPT-NeoX)
    residual: str = "before"
    final_norm: bool = True  # before the head
    gated: bool = True  # the MLP is down(activation(gate) * up), else down(activation(up))
    causal: bool = True  # False: an encoder, whose tokens attend to the whole text
    embed_norm: bool = False
    embed_size: int = 0  # size of embeddings and of the head's inputs, if a product maps between it and hidden_size; 0: hidden_size
    embed_bias: bool = False  # of the product after the embedding
    late_positions: bool = False  # learned positions are added after that product (OPT), else before it (ELECTRA)
    num_positions: int = 0  # learned positions in the files; 0: none
    position_offset: int = 0  # the learned position of the first token
    pad_token: int = -1  # learned positions do not count it: a pad has the one before the first (RoBERTa); -1: all count
    num_token_types: int = 0
    alibi: tuple[float, ...] = ()  # slope of each head: its scores fall by this much per position between query and key
    residual_scale: float = 1.0  # factor on what is added to the residual (Granite)
    logit_scale: float = 1.0
    has_head: bool = True
    head_bias: bool = False
    embed_scale: float = 1.0  # factor on embeddings (Gemma: sqrt(hidden_size), rounded to the weights' dtype)
    latent: Latent | None = None
    attn_scale: float = 0.0  # factor on q . k; 0: 1 / sqrt(head_dim)
    attn_softcap: float = 0.0  # scores become cap * tanh(score / cap); 0: off
    logit_softcap: float = 0.0
    end_ids: tuple[int, ...] = ()
    part: ModelPart = ModelPart()  # the part that this process computes

    @property
    def value_dim(self) -> int:
        """Features per head of attention's output, which `out` multiplies."""
        return self.latent.value_dim if self.latent else self.head_dim

    @property
    def short_context(self) -> int:
        """Up to this many tokens, rotary positions do not depend on the length of the text."""
        ropes = [layer.rope for layer in self.layers if layer.rope is not None and layer.rope.long_inv_freq]
        return min([self.max_context, *(rope.short_context for rope in ropes)])

    @property
    def own_heads(self) -> tuple[slice, slice]:
        """This process's query heads, and its key and value heads."""
        return self.part.heads(self.num_heads, self.num_kv_heads)

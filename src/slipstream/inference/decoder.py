"""The transformer in plain torch: the reference for the native forward, and the fallback where no faster forward runs.

Simplicity and correctness come before speed. All tokens of a batch share each matrix product. Attention runs request by request
over a gathered copy of its keys and values. Quantized matrices are dequantized at each use. Norms, attention scores and routing are
computed in fp32 for every compute dtype.

Suffixes: T tokens of the batch, S positions visible to a request, H heads, K kv heads, G = H / K, D head_dim, E hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.inference.config import Latent, Layer, Rope, RoutedExperts, TransformerConfig
from slipstream.inference.core import BatchNumbers, PartRunner
from slipstream.inference.joined import JoinedParts
from slipstream.inference.kv_cache import HeadShape, KVCache
from slipstream.inference.weights import DecoderWeights, LayerWeights, Mlp, put
from slipstream.ops.matrices import Matrix, dequantize, round_activations
from slipstream.parallel.exchange import Exchange


class RowSpan(NamedTuple):
    """One chunk's part of the batch."""

    begin: int  # index in T of its first token
    end: int
    start: int  # position of its first token
    slots: Tensor  # cache slots of the request's positions 0 .. start + tokens, on the device


class Inputs(NamedTuple):
    """`BatchNumbers` as tensors on the device."""

    tokens: Tensor  # [T]
    positions: Tensor  # [T]
    lengths: Tensor  # [T], number of known tokens of the token's request
    slots: Tensor  # [T], cache slot of each token's key and value
    rows: Tensor  # [rows], indices into T of the tokens whose logits are needed
    types: Tensor  # [T], token types; empty: all are 0
    spans: list[RowSpan]


def inputs_of(numbers: BatchNumbers, cache: KVCache) -> Inputs:
    def moved(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=cache.device)

    parts = numbers.spans()
    spans = [RowSpan(one.begin, one.end, one.start, cache.slots(one.blocks, 0, one.stop).to(cache.device)) for one in parts]
    return Inputs(
        tokens=moved(numbers.ids),
        positions=moved([position for one in parts for position in range(one.start, one.stop)]),
        lengths=moved([one.length for one in parts for _ in range(one.begin, one.end)]),
        slots=torch.cat([span.slots[span.start :] for span in spans]),
        rows=moved(numbers.logit_rows),
        types=moved(numbers.types),
        spans=spans,
    )


def learnt(config: TransformerConfig, tokens: Tensor, positions: Tensor) -> Tensor:
    """The learned positions of tokens. If the model skips pad tokens, the batch must consist of whole texts."""
    if config.pad_token < 0:
        return positions + config.position_offset
    pads = (tokens == config.pad_token).long()
    before = pads.cumsum(0) - pads  # pad tokens before each, in the batch
    first = torch.arange(len(tokens), device=tokens.device) - positions  # index of the first token of each token's text
    return torch.where(pads > 0, -1, positions - before + before[first]) + config.position_offset


def head_shapes(config: TransformerConfig) -> list[HeadShape]:
    _, own = config.own_heads
    return [HeadShape(own.stop - own.start, config.head_dim)] * len(config.layers)


class Decoder(PartRunner):
    """Weights and inputs are on the cache's device. `exchange`: as in `JoinedParts`."""

    generate = None  # it does not run several steps per call

    def __init__(
        self,
        config: TransformerConfig,
        weights: DecoderWeights,
        cache: KVCache,
        compute_dtype: torch.dtype,
        exchange: Exchange | None = None,
    ):
        self.config, self.weights, self.cache, self.dtype = config, weights, cache, compute_dtype
        self.num_blocks, self.block_size = cache.num_blocks, cache.block_size
        self.vocab_size, self.max_context = config.vocab_size, config.max_context
        self.short_context = config.short_context
        # Rounded to the compute dtype like transformers: Gemma was trained with sqrt(3072) = 55.5 in bf16.
        self._embed_scale = torch.tensor(config.embed_scale, dtype=compute_dtype).item()
        self._attn_scale = config.attn_scale or config.head_dim**-0.5
        self._parallel = config.residual == "parallel"
        self._joined, (heads, _) = JoinedParts(config, exchange), config.own_heads
        self._slopes = torch.tensor(config.alibi[heads], device=cache.device)[:, None, None] if config.alibi else None
        self._inv_freq = {
            layer.rope: torch.tensor((layer.rope.inv_freq, layer.rope.long_inv_freq or layer.rope.inv_freq), device=cache.device)
            for layer in config.layers
            if layer.rope
        }

    @torch.inference_mode()
    def run(self, numbers: BatchNumbers) -> Tensor:
        self.cache.copy(numbers.pairs)
        inputs, w = inputs_of(numbers, self.cache), self.weights
        x = self._hidden(inputs)
        if not self.config.has_head:
            return self._normed("final_norm", w, x).float()
        x = self._normed("final_norm", w, x[inputs.rows])
        if not self.config.part.has_head:
            return x[:, :0]
        x = x if w.embed_out is None else linear(x, w.embed_out)
        logits = self._joined.logits(linear(x, w.embed if w.head is None else w.head, w.head_bias).float())
        return soft_cap(logits * self.config.logit_scale, self.config.logit_softcap)

    def _hidden(self, inputs: Inputs) -> Tensor:
        c, w = self.config, self.weights
        rope_tables = {rope: self._rope_table(rope, inputs) for rope in self._inv_freq}
        x_TE = self._joined.embedded(w.embed, inputs.tokens).to(self.dtype) * self._embed_scale
        if w.token_types is not None:
            x_TE = x_TE + (w.token_types[inputs.types] if len(inputs.types) else w.token_types[0]).to(self.dtype)
        places = None if w.positions is None else w.positions[learnt(c, inputs.tokens, inputs.positions)].to(self.dtype)
        x_TE = x_TE if places is None or c.late_positions else x_TE + places
        x_TE = self._normed("embed_norm", w, x_TE)
        x_TE = x_TE if w.embed_in is None else linear(x_TE, w.embed_in, w.embed_in_bias)
        x_TE = x_TE + places if places is not None and c.late_positions else x_TE
        for i, (layer, weights) in enumerate(zip(c.layers, w.layers, strict=True)):
            start = x_TE
            x_TE = self._added("attn_post_norm", weights, x_TE, self._attention(i, layer, weights, x_TE, inputs, rope_tables))
            x_TE = self._added("mlp_post_norm", weights, x_TE, self._mlp(layer, weights, start if self._parallel else x_TE))
        return x_TE

    def put(self, role: str, weight: Matrix) -> None:
        """As `core.Runner.put`. Replaces the tensor instead of writing into it, because a live model may share it."""
        if role == "head" and self.weights.head is None:
            return  # tied: `put` replaces the embedding
        put(self.weights, role, weight.clone() if isinstance(weight, Tensor) else weight)

    def _normed(self, role: str, w: DecoderWeights | LayerWeights, x: Tensor) -> Tensor:
        """Apply the norm of a role, if the model has it."""
        own = getattr(w, f"{role}s", None)  # weights per head
        weight, bias = torch.stack(own) if own else getattr(w, role), getattr(w, f"{role}_bias")
        if weight is None:
            return x
        if self.config.norm == "rms":
            return self._norm(x, weight)
        out = F.layer_norm(x.float(), x.shape[-1:], eps=self.config.norm_eps) * weight.float()
        return (out if bias is None else out + bias.float()).to(x.dtype)

    def _added(self, role: str, w: LayerWeights, x: Tensor, out: Tensor) -> Tensor:
        """Add the output of attention or of the MLP to x; `role` names that output's norm."""
        if self.config.residual == "after":
            return self._normed(role, w, x + out)
        return x + self._normed(role, w, out) * self.config.residual_scale

    def _norm(self, x: Tensor, weight: Tensor, eps: float | None = None, mean: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """RMSNorm over the last dimension. `eps` defaults to the model's. `mean`: for a mean over more than the last dimension."""
        wide = x.float()
        squares = wide.square().mean(-1, keepdim=True) if mean is None else mean(wide.square())
        wide = wide * torch.rsqrt(squares + (self.config.norm_eps if eps is None else eps))
        return (wide * (self.config.norm_offset + weight.float())).to(x.dtype)

    def _rope_table(self, rope: Rope, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Cosine and sine [T, 1, rotary_dim / 2]."""
        is_long = (inputs.lengths > self.short_context).long()
        angle = inputs.positions.float()[:, None, None] * self._inv_freq[rope][is_long][:, None]
        return (angle.cos() * rope.scale).to(self.dtype), (angle.sin() * rope.scale).to(self.dtype)

    def _attention(
        self,
        index: int,
        layer: Layer,
        w: LayerWeights,
        x_TE: Tensor,
        inputs: Inputs,
        rope_tables: dict[Rope, tuple[Tensor, Tensor]],
    ) -> Tensor:
        c = self.config
        h_TE = self._normed("input_norm", w, x_TE)
        if c.latent is not None:
            q_THD, k_TKD = self._latents(c.latent, w, h_TE)
            v_TKD = k_TKD.clone()
        else:
            q, k = linear(h_TE, w.q, w.q_bias), linear(h_TE, w.k, w.k_bias)
            if w.q_norm is not None and w.k_norm is not None and c.qk_norm == "whole":
                of_queries, of_keys = (partial(self._joined.mean_of_heads, kind=kind) for kind in range(2))
                q, k = self._norm(q, w.q_norm, mean=of_queries), self._norm(k, w.k_norm, mean=of_keys)
            q_THD, k_TKD = q.unflatten(1, (-1, c.head_dim)), k.unflatten(1, (-1, c.head_dim))
            v_TKD = linear(h_TE, w.v, w.v_bias).unflatten(1, (-1, c.head_dim))
        if c.qk_norm != "whole":
            q_THD, k_TKD = self._normed("q_norm", w, q_THD), self._normed("k_norm", w, k_TKD)
        if layer.rope:
            q_THD, k_TKD = rotate(q_THD, *rope_tables[layer.rope]), rotate(k_TKD, *rope_tables[layer.rope])
        self.cache.write(index, inputs.slots, k_TKD, v_TKD)
        mixed = torch.empty_like(q_THD)
        for span in inputs.spans:
            # The first query's window bounds the keys of all queries.
            first = max(0, span.start + 1 - layer.window) if layer.window else 0
            k_SKD, v_SKD = self.cache.read(index, span.slots[first:])
            num = span.end - span.begin
            mixed[span.begin : span.end] = attend(
                q_THD[span.begin : span.end],
                k_SKD.to(q_THD.dtype),
                v_SKD.to(q_THD.dtype),
                visible(span.start, num, first, layer.window, x_TE.device, causal=c.causal),
                scale=self._attn_scale,
                cap=c.attn_softcap,
                bias=None if self._slopes is None else distances(span.start, num, first, x_TE.device) * self._slopes,
            )
        if c.latent is not None:
            mixed = by_head(mixed[:, :, c.latent.rotary_dim :], w.v)
        return self._joined.added(linear(mixed.flatten(1), w.out, w.out_bias))

    def _latents(self, latent: Latent, w: LayerWeights, h_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries as long as keys, [T, H, D], and the keys, [T, 1, D]."""
        matrix, norm = w.latents
        turned, rest = linear(h_TE, matrix, w.latent_bias).split((latent.rotary_dim, latent.rank), 1)
        key = torch.cat([turned, self._norm(rest, norm, latent.eps)], 1)
        if w.q_latent is not None and w.q_latent_norm is not None:
            h_TE = self._norm(linear(h_TE, w.q_latent, w.q_latent_bias), w.q_latent_norm, latent.eps)
        q_THD = linear(h_TE, w.q).unflatten(1, (-1, latent.plain_dim + latent.rotary_dim))
        turned, plain = q_THD.split((latent.rotary_dim, latent.plain_dim), 2)
        return torch.cat([turned, by_head(plain, w.k)], 2), key[:, None]

    def _mlp(self, layer: Layer, w: LayerWeights, x_TE: Tensor) -> Tensor:
        h_TE = self._normed("input_norm" if self._parallel and w.mlp_norm is None else "mlp_norm", w, x_TE)
        if layer.experts is None:
            return self._joined.added(self._gated(w.dense_mlp, h_TE))
        return self._joined.routed(self._routed(layer.experts, w, h_TE))

    def _gated(self, mlp: Mlp, x: Tensor) -> Tensor:
        if mlp.gate is None:
            return linear(activate(self.config.activation, linear(x, mlp.up, mlp.up_bias)), mlp.down, mlp.down_bias)
        gate = activate(self.config.activation, linear(x, mlp.gate, mlp.gate_bias))
        return linear(gate * linear(x, mlp.up, mlp.up_bias), mlp.down, mlp.down_bias)

    def _routed(self, experts: RoutedExperts, w: LayerWeights, h_TE: Tensor) -> Tensor:
        routes, mine = choose(experts, linear(h_TE, w.routing).float(), w.router_bias), self.config.part.experts(experts.num)
        out_TE = torch.zeros_like(h_TE)
        add_experts(out_TE, h_TE, *routes, mine, lambda i, rows: self._gated(w.experts[i], rows))
        if w.shared is not None:
            out_TE += self._gated(w.shared, h_TE) * (1.0 if w.shared_gate is None else linear(h_TE, w.shared_gate).sigmoid())
        return out_TE


def choose(experts: RoutedExperts, scores_TN: Tensor, bias_N: Tensor | None) -> tuple[Tensor, Tensor]:
    """The top k experts of each token: their weights [T, k] and their indices [T, k]."""
    values = scores_TN.sigmoid() if experts.score == "sigmoid" else scores_TN.softmax(-1)
    choice = values if bias_N is None else values + bias_N
    if experts.num_groups > 1:
        groups = choice.unflatten(-1, (experts.num_groups, -1))
        best = groups.topk(min(2, groups.shape[-1]) if experts.score == "sigmoid" else 1, -1).values.sum(-1)
        closed = torch.ones_like(best, dtype=torch.bool).scatter_(-1, best.topk(experts.top_groups, -1).indices, False)
        choice = groups.masked_fill(closed[..., None], -torch.inf).flatten(-2)
    chosen = choice.topk(experts.top_k, -1).indices
    shares = values.gather(-1, chosen)
    return (shares / shares.sum(-1, keepdim=True) if experts.normalize else shares) * experts.scale, chosen


def add_experts(
    out_TE: Tensor, h_TE: Tensor, shares: Tensor, chosen: Tensor, mine: range, compute: Callable[[int, Tensor], Tensor]
) -> None:
    """Add the outputs of this process's experts, weighted as `choose` says. `compute`: (index in `mine`, inputs) -> outputs."""
    for e in chosen.unique().tolist():
        if e in mine:
            token, place = (chosen == e).nonzero(as_tuple=True)
            out_TE.index_add_(0, token, compute(e - mine.start, h_TE[token]) * shares[token, place, None].to(out_TE.dtype))


def linear(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias. On CPUs, quantized weights meet activations rounded to 8 bits, as in the native forward."""
    if not isinstance(weight, Tensor) and x.is_cpu:
        x = round_activations(x)
    return F.linear(x, dequantize(weight).to(x.dtype), None if bias is None else bias.to(x.dtype))


def by_head(x_THD: Tensor, weight: Matrix) -> Tensor:
    """Multiply each head by its rows of a matrix."""
    rows = dequantize(weight).to(x_THD.dtype).unflatten(0, (x_THD.shape[1], -1))
    if not isinstance(weight, Tensor) and x_THD.is_cpu:
        x_THD = round_activations(x_THD)
    return torch.einsum("thd,hrd->thr", x_THD, rows)


def activate(name: str, x: Tensor) -> Tensor:
    match name:
        case "silu":
            return F.silu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "gelu":
            return F.gelu(x)
        case "relu":
            return F.relu(x)
    raise AssertionError(f"activation {name!r} is not one of from_hf's")


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, D]: rotate the first rotary_dim features in pairs (i, i + rotary_dim / 2)."""
    half = cos.shape[-1]
    a, b, unrotated = x.split((half, half, x.shape[-1] - 2 * half), -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, unrotated), -1)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap) if cap else x


def distances(start: int, num_queries: int, first_key: int, device: torch.device) -> Tensor:
    """[T, S]: each key position first_key .. start + num_queries - 1 minus each query position from `start` on."""
    query = torch.arange(start, start + num_queries, device=device)[:, None]
    return torch.arange(first_key, start + num_queries, device=device) - query


def visible(start: int, num_queries: int, first_key: int, window: int, device: torch.device, *, causal: bool = True) -> Tensor:
    """bool [T, S]: which of these positions each query attends to."""
    ahead = distances(start, num_queries, first_key, device)
    mask = ahead <= 0 if causal else ahead < window if window else torch.ones_like(ahead, dtype=torch.bool)
    return mask & (ahead > -window) if window else mask


def attend(
    q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, mask_TS: Tensor, *, scale: float, cap: float, bias: Tensor | None = None
) -> Tensor:
    """Softmax attention with grouped heads (query head h reads kv head h // G): [T, H, D]. bias: [H, T, S], added to scores.

    [Note: Values that are not finite] A masked position has no effect whatever its value, though 0 * NaN is NaN: the later tokens
    of a request must not affect its earlier positions, whose blocks other requests share as their prefix. A query that attends to
    such a value gets NaN."""
    num_kv_heads = k_SKD.shape[1]
    broken_KS = ~v_SKD.isfinite().all(-1).T
    broken_K1T1 = (mask_TS & broken_KS[:, None]).any(-1)[:, None, :, None]
    v_SKD = v_SKD.nan_to_num(0.0, 0.0, 0.0)
    q_KGTD = q_THD.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
    k_K1SD, v_K1SD = k_SKD.transpose(0, 1)[:, None], v_SKD.transpose(0, 1)[:, None]
    scores = soft_cap((q_KGTD @ k_K1SD.transpose(2, 3)).float() * scale, cap)
    if bias is not None:
        scores = scores + bias.unflatten(0, (num_kv_heads, -1))
    probabilities = scores.masked_fill(~mask_TS, -torch.inf).softmax(-1).to(v_SKD.dtype)
    return (probabilities @ v_K1SD).masked_fill(broken_K1T1, torch.nan).permute(2, 0, 1, 3).flatten(1, 2)

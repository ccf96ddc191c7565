"""Translates Hugging Face's format: config.json -> `DecoderConfig`, weights by name -> `DecoderWeights`.

Pure, and without transformers; it reads what transformers 4 and 5 write. A family is an entry of `_FAMILIES`: the defaults of its
configuration class, for keys that config.json omits. UnsupportedModel is raised for models that `DecoderConfig` cannot describe;
these can still run in transformers (`generic`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.inference.config import DecoderConfig, ExpertsPart, Layer, Rope, RoutedExperts
from slipstream.inference.weights import DecoderWeights, Int4, Int8, LayerWeights, Matrix, Mlp, leaves


class MisfitError(ValueError):
    """The weights are not those of the configuration."""


class UnsupportedModel(ValueError):
    """`DecoderConfig` cannot describe this model; the message says why."""


_COMMON: dict[str, Any] = {
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "use_sliding_window": False,
}
_GEMMA: dict[str, Any] = {
    "head_dim": 256,
    "tie_word_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_QWEN: dict[str, Any] = {"sliding_window": 4096, "max_window_layers": 28}
_QWEN_MOE: dict[str, Any] = {"decoder_sparse_step": 1, "norm_topk_prob": False}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "sliding_window": 4096, "num_key_value_heads": 8},
    "mixtral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
    "qwen2_moe": {
        **_QWEN,
        **_QWEN_MOE,
        "qkv_bias": True,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    "olmoe": {
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "norm_topk_prob": False,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "eos_token_id": 50279,
        "clip_qkv": None,
    },
    "qwen3_moe": {
        **_QWEN,
        **_QWEN_MOE,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "gemma": {**_GEMMA, "max_position_embeddings": 8192},
    "gemma2": {
        **_GEMMA,
        "max_position_embeddings": 8192,
        "num_key_value_heads": 4,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {**_GEMMA, "max_position_embeddings": 131072, "num_key_value_heads": 4, "rope_theta": 1e6},
}
_SIZES = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
_SAME = (*_SIZES, "num_attention_heads", "num_key_value_heads")  # must be equal in all layers; some families have lists here
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
_FULL, _SLIDING = "full_attention", "sliding_attention"
# Name suffixes that occur in only one layout of experts (`_expert_mlps`): one expert at a time with a dense MLP's names (no such
# suffix), transformers 5's stacks, Mixtral's files. The router's name is part of the last.
_EXPERT_LAYOUTS = ("as_dense", "experts.gate_up_proj", ("0.w1.weight", "block_sparse_moe.gate.weight"))


def from_hf(config: Mapping[str, Any]) -> DecoderConfig:
    """Convert a config.json (or `model.config.to_dict()`). Raises UnsupportedModel."""
    family = config.get("model_type")
    if family not in _FAMILIES:
        raise UnsupportedModel(f"model_type {family!r} is not supported by the fast decoder, which has {', '.join(_FAMILIES)}")
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    if missing := [key for key in needed if config.get(key) is None]:
        raise UnsupportedModel(f"the configuration of this {family} model lacks {', '.join(missing)}")
    c: dict[str, Any] = {**_COMMON, **_FAMILIES[family], **config}
    if by_layer := [key for key in _SAME if isinstance(c.get(key), list)]:
        raise UnsupportedModel(f"{', '.join(by_layer)} of this {family} model differ from layer to layer")
    _check_supported(family, c)
    gemma = family.startswith("gemma")
    heads = c["num_attention_heads"]
    head_dim = c.get("head_dim") or c["hidden_size"] // heads
    kinds, windows = _attention_kinds(family, c)
    ropes = _ropes(family, c, head_dim)
    layers = tuple(
        Layer(rope=ropes[kind], window=window, experts=_experts(family, c, i))
        for i, (kind, window) in enumerate(zip(kinds, windows, strict=True))
    )
    bias = bool(c["attention_bias"])
    ends = c.get("eos_token_id")
    return DecoderConfig(
        vocab_size=c["vocab_size"],
        hidden_size=c["hidden_size"],
        intermediate_size=c["intermediate_size"],
        num_heads=heads,
        num_kv_heads=c.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        layers=layers,
        norm_eps=c["rms_norm_eps"],
        max_context=_max_context(c),
        activation=_ACTIVATIONS[_activation(family, c)],
        tied=c["tie_word_embeddings"],
        qkv_bias={"qwen2": True, "qwen2_moe": bool(c.get("qkv_bias"))}.get(family, bias),
        out_bias=bias and family not in ("mistral", "mixtral", "qwen2", "qwen2_moe"),
        mlp_bias=family == "llama" and bool(c["mlp_bias"]),
        qk_norm=family in ("qwen3", "qwen3_moe", "gemma3_text"),
        qk_norm_whole=family == "olmoe",
        norm_offset=1.0 if gemma else 0.0,
        sandwich=family in ("gemma2", "gemma3_text"),
        embed_scale=math.sqrt(c["hidden_size"]) if gemma else 1.0,
        attn_scale=c["query_pre_attn_scalar"] ** -0.5 if family in ("gemma2", "gemma3_text") else 0.0,
        attn_softcap=c.get("attn_logit_softcapping") or 0.0 if family == "gemma2" else 0.0,
        logit_softcap=c.get("final_logit_softcapping") or 0.0,
        end_ids=() if ends is None else tuple(ends) if isinstance(ends, list | tuple) else (ends,),
    )


def _check_supported(family: str, c: Mapping[str, Any]) -> None:
    if c.get("quantization_config"):
        method = c["quantization_config"].get("quant_method", "an unnamed method")
        raise UnsupportedModel(f"weights quantized by {method} are not supported; give the unquantized one with dtype int8 or int4")
    if c.get("use_bidirectional_attention"):
        raise UnsupportedModel(f"this {family} model attends in both directions (use_bidirectional_attention): it cannot generate")
    if c.get("clip_qkv") is not None:
        raise UnsupportedModel(f"clip_qkv is {c['clip_qkv']}: queries and keys are not clamped by the fast decoder")
    if (c.get("head_dim") or 0) % 2:
        raise UnsupportedModel(f"head_dim is {c['head_dim']}; it must be even, because rotary embeddings rotate pairs")
    if _activation(family, c) not in _ACTIVATIONS:
        raise UnsupportedModel(f"activation {_activation(family, c)!r} is none of {', '.join(_ACTIVATIONS)}")
    if c["num_attention_heads"] % (c.get("num_key_value_heads") or c["num_attention_heads"]):
        heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        raise UnsupportedModel(f"num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})")


def _activation(family: str, c: Mapping[str, Any]) -> str:
    if family in ("gemma2", "gemma3_text"):
        return c["hidden_activation"]
    # Gemma's first configurations say "gelu" and mean the tanh approximation, which transformers uses too.
    return "gelu_pytorch_tanh" if family == "gemma" and c["hidden_act"] == "gelu" else c["hidden_act"]


def _attention_kinds(family: str, c: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """Each layer's kind, which selects its rope, and its window."""
    num = c["num_hidden_layers"]
    window = c["sliding_window"] or 0
    if family.startswith("qwen") and not c["use_sliding_window"]:
        window = 0
    if family in ("llama", "gemma", "olmoe"):
        return [_FULL] * num, [0] * num
    if family in ("mistral", "mixtral", "qwen3_moe"):  # one window for all layers, whatever layer_types says
        return [_FULL] * num, [window] * num
    kinds = list(c.get("layer_types") or (_SLIDING if _slides(family, c, i) else _FULL for i in range(num)))
    other = set(kinds) - {_FULL, _SLIDING}
    if len(kinds) != num or other:
        raise UnsupportedModel(f"layer_types ({', '.join(map(str, other or kinds))}) must be {num} of {_FULL} and {_SLIDING}")
    return kinds, [window if kind == _SLIDING else 0 for kind in kinds]


def _slides(family: str, c: Mapping[str, Any], i: int) -> bool:
    """Whether layer i has a window, for configurations that predate `layer_types`."""
    match family:
        case "gemma2":
            return i % 2 == 0
        case "gemma3_text":
            return (i + 1) % c.get("sliding_window_pattern", 6) != 0
        case "qwen2_moe":
            return i % 2 == 0 and i < c["max_window_layers"] and bool(c["use_sliding_window"])
        case _:
            return i >= c["max_window_layers"] and bool(c["use_sliding_window"])


def _experts(family: str, c: Mapping[str, Any], i: int) -> RoutedExperts | None:
    if family in ("mixtral", "olmoe"):
        size, num = c["intermediate_size"], c.get("num_local_experts") or c["num_experts"]
    elif family in ("qwen2_moe", "qwen3_moe"):
        # transformers 5 writes num_local_experts for qwen3_moe where 4 wrote num_experts.
        size, num = c["moe_intermediate_size"], c.get("num_local_experts") or c["num_experts"]
        if i in (c.get("mlp_only_layers") or ()) or num == 0 or (i + 1) % c["decoder_sparse_step"]:
            return None
    else:
        return None
    return RoutedExperts(
        num=num,
        top_k=c["num_experts_per_tok"],
        intermediate_size=size,
        normalize=bool(c["norm_topk_prob"]),
        shared_size=c["shared_expert_intermediate_size"] if family == "qwen2_moe" else 0,
    )


# -- Rotary positions ------------------------------------------------------------------------------------------------------


def _ropes(family: str, c: Mapping[str, Any], head_dim: int) -> dict[str, Rope]:
    """The rope of each kind of layer. transformers 4 has rope_theta and rope_scaling; 5 has rope_parameters, possibly per kind."""
    scaling = c.get("rope_scaling") or c.get("rope_parameters") or {}
    ropes = {}
    for kind in (_FULL, _SLIDING):
        nested = _FULL in scaling or _SLIDING in scaling
        p = dict((scaling.get(kind) or {}) if nested else scaling)
        theta = c["rope_theta"]
        if family == "gemma3_text" and kind == _SLIDING:
            theta = c.get("rope_local_base_freq", 10000.0)
            p = p if nested else {}  # a single rope_scaling applies to the full layers
        p["rope_theta"] = p.get("rope_theta") or theta
        ropes[kind] = rope(p, head_dim, c["max_position_embeddings"], c.get("original_max_position_embeddings"))
    return ropes


def rope(p: Mapping[str, Any], head_dim: int, max_positions: int, original: int | None = None) -> Rope:
    """Compute the frequencies from transformers' rope_parameters, in fp32 like transformers: the result is bit-identical."""
    kind = p.get("rope_type", p.get("type", "default"))
    if p.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(f"partial_rotary_factor {p['partial_rotary_factor']} is not supported for this family")
    original = original or p.get("original_max_position_embeddings") or max_positions
    powers = p["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    match kind:
        case "default" | "dynamic":  # dynamic has an effect only beyond max_position_embeddings, which max_context excludes
            return _new_rope(1.0 / powers)
        case "linear":
            return _new_rope(1.0 / powers / p["factor"])
        case "llama3":
            return _new_rope(_llama3(1.0 / powers, p, original))
        case "yarn":
            factor = p.get("factor") or max_positions / original
            return _new_rope(_yarn(powers, p, head_dim, factor, original), _yarn_scale(p, factor))
        case _:
            raise UnsupportedModel(f"rope_type {kind!r} is not supported; it can be default, linear, dynamic, llama3 or yarn")


def _new_rope(inv_freq: Tensor, scale: float = 1.0) -> Rope:
    return Rope(inv_freq=tuple(inv_freq.tolist()), scale=scale)


def _llama3(inv_freq: Tensor, p: Mapping[str, Any], original: int) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by the factor, short ones kept, and those in between interpolated."""
    low, high, factor = p["low_freq_factor"], p["high_freq_factor"], p["factor"]
    wavelength = 2 * math.pi / inv_freq
    keep = (original / wavelength - low) / (high - low)
    blend = (1 - keep) * inv_freq / factor + keep * inv_freq
    stretched = torch.where(wavelength > original / low, inv_freq / factor, blend)
    return torch.where(wavelength < original / high, inv_freq, stretched)


def _yarn(powers: Tensor, p: Mapping[str, Any], dim: int, factor: float, original: int) -> Tensor:
    """YaRN (arXiv:2309.00071): fast-rotating pairs are kept, slow ones stretched by the factor, with a linear ramp in between."""

    def pair(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(p["rope_theta"]))

    low, high = pair(p.get("beta_fast") or 32), pair(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    keep = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (factor * powers) * (1 - keep) + 1.0 / powers * keep


def _yarn_scale(p: Mapping[str, Any], factor: float) -> float:
    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if p.get("attention_factor") is not None:
        return float(p["attention_factor"])
    one, all_dims = p.get("mscale"), p.get("mscale_all_dim")
    return scale(one) / scale(all_dims) if one and all_dims else scale(1.0)


def _max_context(c: Mapping[str, Any]) -> int:
    """The context limit. Qwen's way to enable YaRN adds it to a config whose max_position_embeddings stays the original one."""
    limit: int = c["max_position_embeddings"]
    p = c.get("rope_scaling") or c.get("rope_parameters") or {}
    if p.get("rope_type", p.get("type")) == "yarn" and p.get("factor") and p.get("original_max_position_embeddings"):
        limit = max(limit, int(p["factor"] * p["original_max_position_embeddings"]))
    return limit


# -- Weights ---------------------------------------------------------------------------------------------------------------


def shape_of(m: Matrix) -> tuple[int, ...]:
    match m:
        case Int8():
            return tuple(m.q.shape)
        case Int4():
            return m.q.shape[0], m.q.shape[1] * 2
        case _:
            return tuple(m.shape)


_ALL, _DENSE = slice(None), "gate_proj up_proj down_proj"
_WHOLE = (_ALL, _ALL)


class _Source(Protocol):
    """Returns weights by name and checks the shape, which the configuration determines."""

    def __contains__(self, name: str) -> bool: ...

    def matrix(self, name: str, *shape: int, rows: slice = _ALL) -> Matrix: ...

    def tensor(self, name: str, *shape: int) -> Tensor: ...


class _Outline:
    """Returns tensors on meta, and records their names."""

    def __init__(self, layout: str | tuple[str, ...]):
        self.layout = layout  # name suffixes of a layout of experts: only names with these are `in` it
        self.named: dict[str, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name.endswith(self.layout)

    def tensor(self, name: str, *shape: int, rows: slice = _ALL) -> Tensor:
        self.named[name] = torch.empty(shape, device="meta")
        return self.named[name][rows]

    matrix = tensor


class _State:
    """Returns the weights of a file or model, matrices after `convert`, and records which names were used."""

    def __init__(self, state: Mapping[str, Matrix], convert: Callable[[str, Matrix], Matrix] | None = None):
        self.state = state
        self.convert = convert or (lambda name, m: m)
        self.used: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self.state

    def matrix(self, name: str, *shape: int, rows: slice = _ALL) -> Matrix:
        m = self._checked(name, shape)
        return self.convert(name, m[rows] if isinstance(m, Tensor) else type(m)(*(part[rows] for part in m)))

    def _checked(self, name: str, shape: tuple[int, ...]) -> Matrix:
        if name not in self.state:
            raise MisfitError(f"the weights lack {name} {list(shape)}")
        m = self.state[name]
        if shape_of(m) != shape:
            raise MisfitError(f"weight {name} is {list(shape_of(m))}; the configuration needs {list(shape)}")
        self.used.add(name)
        return m

    def tensor(self, name: str, *shape: int) -> Tensor:
        m = self._checked(name, shape)
        if not isinstance(m, Tensor):
            raise ValueError(f"weight {name} is quantized; only matrices can be")
        return m


def from_state(
    config: DecoderConfig, state: Mapping[str, Matrix], convert: Callable[[str, Matrix], Matrix] | None = None
) -> DecoderWeights:
    """Assign weights by Hugging Face's names to their roles, without copies. convert(name, matrix) is applied to each matrix.

    Raises MisfitError naming any weight that is missing, unknown or of the wrong shape."""
    source = _State(state, convert)
    weights = _weights(config, source)
    surplus = sorted(name for name in set(state) - source.used if not is_surplus(config, name))
    if surplus:
        more = f" and {len(surplus) - 5} more" if len(surplus) > 5 else ""
        raise MisfitError(f"the model of this configuration does not have these weights: {', '.join(surplus[:5])}{more}")
    return weights


def is_surplus(config: DecoderConfig, name: str) -> bool:
    """Whether a weight may be ignored: a tied head, old checkpoints' rope frequencies (config has them), others' parts."""
    elsewhere = config.part.size > 1 and (name == "lm_head.weight" or ".experts." in name)
    return elsewhere or name.endswith("rotary_emb.inv_freq") or (config.tied and name == "lm_head.weight")


def outline(config: DecoderConfig) -> DecoderWeights:
    """All weights of a decoder as tensors on meta."""
    return _weights(config, _Outline(_EXPERT_LAYOUTS[0]))


def places(config: DecoderConfig) -> dict[str, tuple[tuple[int, ...], list[tuple[str, Tensor]]]]:
    """For each Hugging Face name, in all layouts that `from_state` reads: a weight's shape and the roles that it fills (paths in
    `DecoderWeights`), each with its part of the weight, as a view of a tensor on meta."""
    by_name: dict[str, tuple[tuple[int, ...], list[tuple[str, Tensor]]]] = {}
    for layout in _EXPERT_LAYOUTS if any(layer.experts for layer in config.layers) else _EXPERT_LAYOUTS[:1]:
        source = _Outline(layout)
        weights = _weights(config, source)
        names = {id(tensor): name for name, tensor in source.named.items()}
        roles: dict[str, list[tuple[str, Tensor]]] = {}
        for role, leaf in leaves(weights):
            assert isinstance(leaf, Tensor), "an outline is not quantized"
            base = leaf if leaf._base is None else leaf._base
            roles.setdefault(names[id(base)], []).append((role, leaf))
        by_name |= {name: (tuple(source.named[name].shape), parts) for name, parts in roles.items()}
    if config.tied:
        shape, parts = by_name["model.embed_tokens.weight"]
        parts.append(("head", torch.empty(shape, device="meta")))
    return by_name


def layer_weights(config: DecoderConfig, index: int, state: Mapping[str, Matrix]) -> LayerWeights:
    """One layer's weights, from `state` by the names inside the layer."""
    return _layer(config, config.layers[index], _State(state), "")


def _weights(config: DecoderConfig, source: _Source) -> DecoderWeights:
    hidden = config.hidden_size
    has_head = not config.tied and config.part.index == 0
    return DecoderWeights(
        embed=source.tensor("model.embed_tokens.weight", config.vocab_size, hidden),
        final_norm=source.tensor("model.norm.weight", hidden),
        head=source.matrix("lm_head.weight", config.vocab_size, hidden) if has_head else None,
        layers=[_layer(config, layer, source, f"model.layers.{i}.") for i, layer in enumerate(config.layers)],
    )


def _layer(c: DecoderConfig, layer: Layer, source: _Source, at: str) -> LayerWeights:
    hidden, q_size, kv_size = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    attn = at + "self_attn."
    # With sandwich norms, "post_attention" follows the attention; otherwise it names the norm before the MLP.
    before_mlp = "pre_feedforward_layernorm" if c.sandwich else "post_attention_layernorm"
    weights = LayerWeights(
        input_norm=source.tensor(at + "input_layernorm.weight", hidden),
        mlp_norm=source.tensor(f"{at}{before_mlp}.weight", hidden),
        q=source.matrix(attn + "q_proj.weight", q_size, hidden),
        k=source.matrix(attn + "k_proj.weight", kv_size, hidden),
        v=source.matrix(attn + "v_proj.weight", kv_size, hidden),
        out=source.matrix(attn + "o_proj.weight", hidden, q_size),
    )
    if c.qkv_bias:
        weights.q_bias = source.tensor(attn + "q_proj.bias", q_size)
        weights.k_bias = source.tensor(attn + "k_proj.bias", kv_size)
        weights.v_bias = source.tensor(attn + "v_proj.bias", kv_size)
    if c.out_bias:
        weights.out_bias = source.tensor(attn + "o_proj.bias", hidden)
    if c.qk_norm or c.qk_norm_whole:
        weights.q_norm = source.tensor(attn + "q_norm.weight", q_size if c.qk_norm_whole else c.head_dim)
        weights.k_norm = source.tensor(attn + "k_norm.weight", kv_size if c.qk_norm_whole else c.head_dim)
    if c.sandwich:
        weights.attn_post_norm = source.tensor(at + "post_attention_layernorm.weight", hidden)
        weights.mlp_post_norm = source.tensor(at + "post_feedforward_layernorm.weight", hidden)
    if layer.experts is None:
        weights.mlp = _mlp(source, at + "mlp.", c.intermediate_size, hidden, bias=c.mlp_bias)
        return weights
    moe = at + ("block_sparse_moe." if at + "block_sparse_moe.gate.weight" in source else "mlp.")
    weights.router = source.tensor(moe + "gate.weight", layer.experts.num, hidden)
    weights.experts = _expert_mlps(source, moe + "experts.", layer.experts, hidden, c.part)
    if size := layer.experts.shared_size:
        own = c.part.columns(size, shared=True), c.part.columns(hidden, shared=True)
        weights.shared = _mlp(source, moe + "shared_expert.", size, hidden, own=own)
        weights.shared_gate = source.tensor(moe + "shared_expert_gate.weight", 1, hidden)
    return weights


def _mlp(
    source: _Source, at: str, size: int, hidden: int, *, bias: bool = False, names: str = _DENSE, own: tuple[slice, slice] = _WHOLE
) -> Mlp:
    gate, up, down = names.split()
    mlp = Mlp(
        gate=source.matrix(f"{at}{gate}.weight", size, hidden, rows=own[0]),
        up=source.matrix(f"{at}{up}.weight", size, hidden, rows=own[0]),
        down=source.matrix(f"{at}{down}.weight", hidden, size, rows=own[1]),
    )
    if bias:
        mlp.gate_bias = source.tensor(f"{at}{gate}.bias", size)
        mlp.up_bias = source.tensor(f"{at}{up}.bias", size)
        mlp.down_bias = source.tensor(f"{at}{down}.bias", hidden)
    return mlp


def _expert_mlps(source: _Source, at: str, experts: RoutedExperts, hidden: int, part: ExpertsPart) -> list[Mlp]:
    """Three layouts: transformers 5's stacks (live models), Mixtral's w1 w3 w2, and a dense MLP's names for each expert."""
    size, mine = experts.intermediate_size, part.experts(experts.num)
    own = inner, out = part.columns(size), part.columns(hidden)
    if at + "gate_up_proj" in source:
        gate_up = source.tensor(at + "gate_up_proj", experts.num, 2 * size, hidden)
        down = source.tensor(at + "down_proj", experts.num, hidden, size)
        return [Mlp(gate=gate_up[e, :size][inner], up=gate_up[e, size:][inner], down=down[e, out]) for e in mine]
    names = "w1 w3 w2" if at + "0.w1.weight" in source else _DENSE
    return [_mlp(source, f"{at}{e}.", size, hidden, names=names, own=own) for e in mine]

"""Model families: a row of `FAMILIES` says what a model_type's config.json and weights mean. No other code asks for its name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from slipstream.inference.config import NORMS, Latent, RoutedExperts


class UnsupportedModel(ValueError):
    """`TransformerConfig` cannot describe this model; the message says why."""


FULL, SLIDING = "full_attention", "sliding_attention"
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "relu": "relu",
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), "gelu_tanh"),
}

Keys = Mapping[str, Any]  # keys of config.json, with defaults filled in
Kind = tuple[str | None, int]  # a layer's rope (None: none) and window


# -- What families differ in -----------------------------------------------------------------------------------------------


def _all_full(c: Keys) -> list[Kind]:
    return [(FULL, 0)] * c["num_hidden_layers"]


def _one_window(c: Keys) -> list[Kind]:
    """One window for all layers, whatever layer_types says."""
    return [(FULL, c["sliding_window"] or 0)] * c["num_hidden_layers"]


def _by_type(slides: Callable[[Keys, int], bool], needs_flag: bool = False) -> Callable[[Keys], list[Kind]]:
    """Windows by layer_types. `slides`: whether layer i has a window, for configurations without that key. `needs_flag`: windows
    only take effect with use_sliding_window."""

    def kinds(c: Keys) -> list[Kind]:
        num, window = c["num_hidden_layers"], c["sliding_window"] or 0
        window = 0 if needs_flag and not c["use_sliding_window"] else window
        names = list(c.get("layer_types") or (SLIDING if slides(c, i) else FULL for i in range(num)))
        other = set(names) - {FULL, SLIDING}
        if len(names) != num or other:
            raise UnsupportedModel(f"layer_types ({', '.join(map(str, other or names))}) must be {num} of {FULL} and {SLIDING}")
        return [(name, window if name == SLIDING else 0) for name in names]

    return kinds


def _no_rope(kinds: Callable[[Keys], list[Kind]]) -> Callable[[Keys], list[Kind]]:
    return lambda c: [(None, window) for _, window in kinds(c)]


def _upper(c: Keys, i: int) -> bool:
    return i >= c["max_window_layers"] and bool(c["use_sliding_window"])


def _smollm3(c: Keys) -> list[Kind]:
    interval, num = c["no_rope_layer_interval"], c["num_hidden_layers"]
    turn = c.get("no_rope_layers") or [(i + 1) % interval for i in range(num)]
    kinds = _by_type(lambda c, i: bool(c["use_sliding_window"]) and not turn[i], needs_flag=True)(c)
    return [(kind if turn[i] else None, window) for i, (kind, window) in enumerate(kinds)]


def _exaone4(c: Keys) -> list[Kind]:
    """In a model with windows, the layers without one have no rope."""
    pattern = c["sliding_window_pattern"]
    if isinstance(pattern, str):
        pattern = len(pattern)
    kinds = _by_type(lambda c, i: bool(c["sliding_window"]) and bool(pattern) and (i + 1) % pattern != 0)(c)
    return [(None if kind == FULL and c["sliding_window"] else kind, window) for kind, window in kinds]


def _cohere2(c: Keys) -> list[Kind]:
    """Only the layers with a window have rope."""
    kinds = _by_type(lambda c, i: (i + 1) % (c.get("sliding_window_pattern") or 4) != 0)(c)
    return [(kind if window else None, window) for kind, window in kinds]


def _gpt_neo(c: Keys) -> list[Kind]:
    names = c.get("attention_layers") or [name for names, times in c["attention_types"] for name in names * times]
    return [(None, c["sliding_window"] if name == "local" else 0) for name in names]


def _modernbert(c: Keys) -> list[Kind]:
    """A window reaches equally far in both directions."""
    every = c["global_attn_every_n_layers"]
    both = {**c, "sliding_window": c["local_attention"] // 2 + 1}
    return _by_type(lambda c, i: i % every != 0)(both)


def _dense(c: Keys, i: int) -> RoutedExperts | None:
    return None


def _mixture(size: str) -> Callable[[Keys, int], RoutedExperts | None]:
    """`size`: the key of an expert's inner features. Layers in mlp_only_layers, or skipped by decoder_sparse_step, are dense."""

    def experts(c: Keys, i: int) -> RoutedExperts | None:
        # transformers 5 writes num_local_experts for some families where version 4 wrote num_experts.
        num = c.get("num_local_experts") or c["num_experts"]
        if i in (c.get("mlp_only_layers") or ()) or num == 0 or (i + 1) % c.get("decoder_sparse_step", 1):
            return None
        return RoutedExperts(
            num=num,
            top_k=c["num_experts_per_tok"],
            intermediate_size=c[size],
            normalize=bool(c["norm_topk_prob"]),
            shared_size=c.get("shared_expert_intermediate_size") or 0,
        )

    return experts


def _deepseek(c: Keys, i: int, **more: Any) -> RoutedExperts | None:
    """The first layers are dense."""
    if i < c["first_k_dense_replace"] or not c["n_routed_experts"]:
        return None
    return RoutedExperts(
        num=c["n_routed_experts"],
        top_k=c["num_experts_per_tok"],
        intermediate_size=c["moe_intermediate_size"],
        shared_size=c["moe_intermediate_size"] * (c["n_shared_experts"] or 0),
        shared_gate=False,
        scale=c["routed_scaling_factor"],
        **more,
    )


def _deepseek2(c: Keys, i: int) -> RoutedExperts | None:
    groups = (c["n_group"], c["topk_group"]) if c["topk_method"] == "group_limited_greedy" else (1, 1)
    return _deepseek(c, i, normalize=False, num_groups=groups[0], top_groups=groups[1])


def _deepseek3(c: Keys, i: int) -> RoutedExperts | None:
    groups = {"num_groups": c["n_group"], "top_groups": c["topk_group"]}
    return _deepseek(c, i, normalize=bool(c["norm_topk_prob"]), score="sigmoid", **groups)


def _latent(c: Keys) -> Latent:
    return Latent(
        rank=c["kv_lora_rank"],
        q_rank=c["q_lora_rank"] or 0,
        rotary_dim=c["qk_rope_head_dim"],
        plain_dim=c["qk_nope_head_dim"],
        value_dim=c["v_head_dim"],
    )


def _latent_scale(c: Keys) -> float:
    """YaRN's factor for all features applies to the scores, not only to the rotated features."""
    p = c.get("rope_scaling") or c.get("rope_parameters") or {}
    scale = (c["qk_nope_head_dim"] + c["qk_rope_head_dim"]) ** -0.5
    if p.get("rope_type", p.get("type", "default")) == "default" or not p.get("mscale_all_dim") or p["factor"] <= 1:
        return scale
    return float(scale * (0.1 * p["mscale_all_dim"] * math.log(p["factor"]) + 1.0) ** 2)


def _slopes(c: Keys) -> tuple[float, ...]:
    """ALiBi's slopes (arXiv:2108.12409): a geometric series. If the number of heads is no power of 2, every second slope of the
    series for twice as many heads follows."""
    heads = c["num_attention_heads"]
    power = 1 << heads.bit_length() - 1

    def series(num: int) -> list[float]:
        return [2.0 ** (-8 * (i + 1) / num) for i in range(num)]

    return tuple(series(power) + series(2 * power)[::2][: heads - power])


def _falcon_slopes(c: Keys) -> tuple[float, ...]:
    """Falcon scales scores after it adds ALiBi, and its slopes are bf16."""
    scale = (c["hidden_size"] // c["num_attention_heads"]) ** -0.5
    return tuple((torch.tensor(_slopes(c)).bfloat16().float() * scale).tolist()) if c["alibi"] else ()


def _falcon_norms(c: Keys) -> tuple[str, ...]:
    two = (c["num_ln_in_parallel_attn"] or 2) == 2 if c["new_decoder_architecture"] else not c["parallel_attn"]
    return NORMS[: 1 + two]


def _pairs(text: str) -> dict[str, str]:
    """Parse "a=b c=d"."""
    return dict(pair.split("=") for pair in text.split())


def _flag(key: str) -> Callable[[Keys], bool]:
    return lambda c: bool(c[key])


def _number(key: str) -> Callable[[Keys], Any]:
    return lambda c: c[key]


def _if(key: str, value: str) -> Callable[[Keys], str]:
    return lambda c: value if c[key] else ""


def _resized(key: str) -> Callable[[Keys], int]:
    """The size of embeddings if it differs from a layer's, else 0."""
    return lambda c: size if (size := c.get(key) or 0) != c["hidden_size"] else 0


# -- The table -------------------------------------------------------------------------------------------------------------


def _names(base: str, text: str) -> dict[str, str]:
    """{role: module} from "role=module ...". Modules are below `base`, or at the root with "/"; a layer's are below the layer."""
    outer = ("embed", "embed_in", "embed_out", "final_norm", "head", "layers", "positions", "token_types", "embed_norm")
    return {role: name[1:] if name[0] == "/" else base + name if role in outer else name for role, name in _pairs(text).items()}


_LLAMA_NAMES = _names(
    "model.",
    "embed=embed_tokens layers=layers final_norm=norm head=/lm_head input_norm=input_layernorm mlp_norm=post_attention_layernorm "
    "q=self_attn.q_proj k=self_attn.k_proj v=self_attn.v_proj out=self_attn.o_proj q_norm=self_attn.q_norm k_norm=self_attn.k_norm "
    "gate=mlp.gate_proj up=mlp.up_proj down=mlp.down_proj",
)
# Here "post_attention" names the norm after attention; above, it names the norm before the MLP.
_POST = {"attn_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
_SANDWICH_NAMES = {**_LLAMA_NAMES, **_POST, "mlp_norm": "pre_feedforward_layernorm"}


def _bert_names(base: str) -> dict[str, str]:
    return _names(
        base,
        "embed=embeddings.word_embeddings positions=embeddings.position_embeddings token_types=embeddings.token_type_embeddings "
        "embed_norm=embeddings.LayerNorm embed_in=embeddings_project layers=encoder.layer "
        "q=attention.self.query k=attention.self.key v=attention.self.value "
        "out=attention.output.dense attn_post_norm=attention.output.LayerNorm up=intermediate.dense down=output.dense "
        "mlp_post_norm=output.LayerNorm",
    )


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


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyRow:
    """What the config.json and the weights of one model_type mean."""

    defaults: Keys = field(default_factory=dict)  # defaults of its configuration class, for keys that config.json omits
    keys: Mapping[str, str] = field(default_factory=dict)  # the key that this module reads -> the key in this family's files
    fields: Mapping[str, Any] = field(default_factory=dict)  # fields of `TransformerConfig`: values, or functions of `Keys`
    kinds: Callable[[Keys], list[Kind]] = _all_full
    experts: Callable[[Keys, int], RoutedExperts | None] = _dense
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # the supported values of keys
    names: Mapping[str, str] = field(default_factory=lambda: _LLAMA_NAMES)  # role -> module; qkv, gate_up: rows of one matrix
    # (pattern, replacement) for names in other files: those of a model without a head lack the prefix
    renames: tuple[tuple[str, str], ...] = ((r"^(?=(embed_tokens|layers|norm)\.)", "model."),)
    surplus: str = r"$^"  # pattern of names that are not read
    transposed: bool = False  # layers' matrices are stored as [in, out]
    grouped: bool = False  # qkv stores queries, key and value group by group; else all queries, all keys, all values
    interleaved: bool = False  # rope rotates features (2i, 2i + 1) of a head
    first_norm: int = 0  # index of the first layer that has an input_norm
    has_more_layers: bool = False  # files contain layers after the last, for multi-token prediction, which are not read

    def read(self, config: Keys) -> dict[str, Any]:
        """Translate the configuration's keys and fill in defaults."""
        c: dict[str, Any] = {**_COMMON, **self.defaults, **config}
        return c | {ours: c[theirs] for ours, theirs in self.keys.items() if theirs in c}


_WINDOWED = {"max_position_embeddings": 131072}
_QWEN: dict[str, Any] = {"sliding_window": 4096, "max_window_layers": 28}
_QWEN_MOE: dict[str, Any] = {**_QWEN, "norm_topk_prob": False, "decoder_sparse_step": 1}
_GEMMA: dict[str, Any] = {
    "head_dim": 256,
    "tie_word_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "max_position_embeddings": 8192,
}
_GEMMA_FIELDS: dict[str, Any] = {
    "norm_offset": 1.0,
    "embed_scale": lambda c: math.sqrt(c["hidden_size"]),
    "logit_softcap": lambda c: c.get("final_logit_softcapping") or 0.0,
}
_GEMMA2_FIELDS: dict[str, Any] = {**_GEMMA_FIELDS, "norms": NORMS, "attn_scale": lambda c: c["query_pre_attn_scalar"] ** -0.5}
_LAYER_NORM: dict[str, Any] = {"norm": "layer", "norm_bias": True}
_PLAIN: dict[str, Any] = {**_LAYER_NORM, "gated": False, "qkv_bias": True, "out_bias": True, "mlp_bias": True}
_OWN_HEADS: dict[str, Any] = {**_PLAIN, "num_kv_heads": _number("num_attention_heads")}  # regardless of num_key_value_heads
_LEARNT: dict[str, Any] = {**_OWN_HEADS, "num_positions": _number("max_position_embeddings")}
_ENCODER: dict[str, Any] = {
    **_LEARNT,
    "causal": False,
    "residual": "after",
    "norms": NORMS[2:],
    "final_norm": False,
    "embed_norm": True,
    "num_token_types": _number("type_vocab_size"),
    "has_head": False,
}
_BERT: dict[str, Any] = {
    "hidden_act": "gelu",
    "rms_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "tie_word_embeddings": True,
}
_OLD_NORMS = ((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias"))


def _bert(base: str, *, part: str = "encoder", **more: Any) -> FamilyRow:
    """An encoder whose files may lack the prefix `base`. Its other heads and its pooler are not read."""
    rest = {"defaults": _BERT, "keys": {"rms_norm_eps": "layer_norm_eps"}, "fields": _ENCODER, "names": _bert_names(base)} | more
    return FamilyRow(
        kinds=_no_rope(_all_full),
        only={"is_decoder": (False,)},
        renames=((rf"^(?=(embeddings|embeddings_project|{part}|pooler)\.)", base), *_OLD_NORMS),
        surplus=rf"^(?!{base})|^{base}pooler\.|position_ids$",
        **rest,
    )


_ROBERTA = {
    **_ENCODER,
    "position_offset": lambda c: c["pad_token_id"] + 1,
    "pad_token": lambda c: c["pad_token_id"],
    "max_context": lambda c: c["max_position_embeddings"] - c["pad_token_id"] - 1,
}
_GPT2_KEYS = _pairs(
    "hidden_size=n_embd num_hidden_layers=n_layer num_attention_heads=n_head "
    "max_position_embeddings=n_positions intermediate_size=n_inner hidden_act=activation_function "
    "rms_norm_eps=layer_norm_epsilon"
)
_GPT2: dict[str, Any] = {
    "hidden_act": "gelu_new",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "intermediate_size": None,
}
_BUFFERS = r"attn(\.attention)?\.((masked_)?bias|embed_positions)$|attention\.(masked_)?bias$"
_IN_TRANSFORMER = ((r"^(?=(h|wte|wpe|ln_f|word_embeddings|word_embeddings_layernorm)\.)", "transformer."),)
_GPT_NAMES = "embed=wte layers=h final_norm=ln_f head=/lm_head input_norm=ln_1 "
_ATTENTION = "qkv={0}.query_key_value out={0}.dense up=mlp.dense_h_to_4h down=mlp.dense_4h_to_h input_norm=input_layernorm "
_ATTENTION += "mlp_norm=post_attention_layernorm "
_PHI = {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "partial_rotary_factor": 0.5,
    "hidden_act": "gelu_new",
    "qk_layernorm": False,
}
_COHERE: dict[str, Any] = {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "logit_scale": 0.0625,
    "use_qk_norm": False,
}
_COHERE_FIELDS = {"norm": "layer", "residual": "parallel", "norms": NORMS[:1], "logit_scale": _number("logit_scale")}
_GLM: dict[str, Any] = {
    "head_dim": 128,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1.5625e-07,
    "max_position_embeddings": 131072,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}
_FUSED_MLP = {name: module for name, module in _LLAMA_NAMES.items() if name not in ("gate", "up")} | {"gate_up": "mlp.gate_up_proj"}
_PHI3_NAMES = {name: module for name, module in _FUSED_MLP.items() if name not in ("q", "k", "v")} | {"qkv": "self_attn.qkv_proj"}

_DEEPSEEK: dict[str, Any] = {
    "max_position_embeddings": 4096,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "rope_interleave": True,
    "n_shared_experts": 1,
}
_DEEPSEEK_FIELDS: dict[str, Any] = {
    "head_dim": lambda c: c["kv_lora_rank"] + c["qk_rope_head_dim"],
    "num_kv_heads": 1,
    "latent": _latent,
    "attn_scale": _latent_scale,
}
_DEEPSEEK_NAMES = {name: module for name, module in _LLAMA_NAMES.items() if name not in ("q_norm", "k_norm")} | _pairs(
    "latent=self_attn.kv_a_proj_with_mqa latent_norm=self_attn.kv_a_layernorm k=self_attn.kv_b_proj v=self_attn.kv_b_proj "
    "q_latent=self_attn.q_a_proj q_latent_norm=self_attn.q_a_layernorm of_q_latent=self_attn.q_b_proj"
)

FAMILIES: dict[str, FamilyRow] = {
    "llama": FamilyRow(defaults={"max_position_embeddings": 2048}),
    "mistral": FamilyRow(
        defaults={**_WINDOWED, "sliding_window": 4096, "num_key_value_heads": 8}, fields={"out_bias": False}, kinds=_one_window
    ),
    "mixtral": FamilyRow(
        defaults={
            **_WINDOWED,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
        fields={"out_bias": False},
        kinds=_one_window,
        experts=_mixture("intermediate_size"),
    ),
    "qwen2": FamilyRow(defaults=_QWEN, fields={"qkv_bias": True, "out_bias": False}, kinds=_by_type(_upper, needs_flag=True)),
    "qwen3": FamilyRow(defaults={**_QWEN, "head_dim": 128}, fields={"qk_norm": "head"}, kinds=_by_type(_upper, needs_flag=True)),
    "qwen2_moe": FamilyRow(
        defaults={
            **_QWEN_MOE,
            "qkv_bias": True,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        fields={"qkv_bias": _flag("qkv_bias"), "out_bias": False},
        kinds=_by_type(lambda c, i: i % 2 == 0 and i < c["max_window_layers"] and bool(c["use_sliding_window"]), needs_flag=True),
        experts=_mixture("moe_intermediate_size"),
    ),
    "olmoe": FamilyRow(
        defaults={
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "norm_topk_prob": False,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "eos_token_id": 50279,
        },
        fields={"qk_norm": "whole"},
        experts=_mixture("intermediate_size"),
    ),
    "qwen3_moe": FamilyRow(
        defaults={
            **_QWEN_MOE,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        fields={"qk_norm": "head"},
        kinds=lambda c: _one_window({**c, "sliding_window": c["sliding_window"] if c["use_sliding_window"] else 0}),
        experts=_mixture("moe_intermediate_size"),
    ),
    # Gemma's first configurations say "gelu" and mean the tanh approximation, which transformers uses too.
    "gemma": FamilyRow(
        defaults=_GEMMA, fields={**_GEMMA_FIELDS, "activation": lambda c: (ACTIVATIONS | {"gelu": "gelu_tanh"})[c["hidden_act"]]}
    ),
    "gemma2": FamilyRow(
        defaults={**_GEMMA, "num_key_value_heads": 4, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        keys={"hidden_act": "hidden_activation"},
        fields={**_GEMMA2_FIELDS, "attn_softcap": lambda c: c["attn_logit_softcapping"] or 0.0},
        kinds=_by_type(lambda c, i: i % 2 == 0),
        names=_SANDWICH_NAMES,
    ),
    "gemma3_text": FamilyRow(
        defaults={
            **_GEMMA,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 4,
            "rope_theta": 1e6,
            "rope_local_base_freq": 10000.0,
        },
        keys={"hidden_act": "hidden_activation"},
        fields={**_GEMMA2_FIELDS, "qk_norm": "head"},
        kinds=_by_type(lambda c, i: (i + 1) % c.get("sliding_window_pattern", 6) != 0),
        names=_SANDWICH_NAMES,
    ),
    "deepseek_v2": FamilyRow(
        defaults={
            **_DEEPSEEK,
            "max_position_embeddings": 2048,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 0,
            "topk_method": "greedy",
            "n_group": None,
            "topk_group": None,
        },
        keys={"rotary_dim": "qk_rope_head_dim"},
        fields=_DEEPSEEK_FIELDS,
        experts=_deepseek2,
        only={
            "topk_method": ("greedy", "group_limited_greedy"),
            "scoring_func": ("softmax",),
            "norm_topk_prob": (False, None),
            "moe_layer_freq": (1,),
        },
        names=_DEEPSEEK_NAMES,
        interleaved=True,
    ),
    "deepseek_v3": FamilyRow(
        defaults={
            **_DEEPSEEK,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 3,
            "norm_topk_prob": True,
            "n_group": 8,
            "topk_group": 4,
        },
        keys={"rotary_dim": "qk_rope_head_dim"},
        fields=_DEEPSEEK_FIELDS,
        experts=_deepseek3,
        only={"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",), "moe_layer_freq": (1,), "rope_interleave": (True,)},
        names=_DEEPSEEK_NAMES,
        interleaved=True,
        has_more_layers=True,
    ),
    # -- encoders
    "bert": _bert("bert."),
    "roberta": _bert("roberta.", defaults={**_BERT, "pad_token_id": 1}, fields=_ROBERTA),
    "xlm-roberta": _bert("roberta.", defaults={**_BERT, "pad_token_id": 1}, fields=_ROBERTA),
    "electra": _bert(
        "electra.",
        defaults={**_BERT, "embedding_size": 128},
        fields={**_ENCODER, "embed_size": _resized("embedding_size"), "embed_bias": True},
    ),
    "distilbert": _bert(
        "distilbert.",
        part="transformer",
        keys=_pairs(
            "hidden_size=dim num_hidden_layers=n_layers num_attention_heads=n_heads intermediate_size=hidden_dim "
            "hidden_act=activation"
        ),
        fields={**_ENCODER, "num_token_types": 0},
        names=_names(
            "distilbert.",
            "embed=embeddings.word_embeddings positions=embeddings.position_embeddings embed_norm=embeddings.LayerNorm "
            "layers=transformer.layer q=attention.q_lin k=attention.k_lin v=attention.v_lin out=attention.out_lin "
            "attn_post_norm=sa_layer_norm up=ffn.lin1 down=ffn.lin2 mlp_post_norm=output_layer_norm",
        ),
    ),
    "modernbert": FamilyRow(
        defaults={
            "hidden_act": "gelu",
            "rms_norm_eps": 1e-5,
            "norm_bias": False,
            "max_position_embeddings": 8192,
            "local_attention": 128,
            "global_attn_every_n_layers": 3,
            "rope_theta": 160000.0,
            "rope_local_base_freq": 10000.0,
            "tie_word_embeddings": True,
        },
        keys=_pairs(
            "hidden_act=hidden_activation rms_norm_eps=norm_eps rope_theta=global_rope_theta rope_local_base_freq=local_rope_theta"
        ),
        fields={"norm": "layer", "norm_bias": _flag("norm_bias"), "causal": False, "embed_norm": True, "has_head": False},
        kinds=_modernbert,
        first_norm=1,
        names=_names(
            "model.",
            "embed=embeddings.tok_embeddings embed_norm=embeddings.norm layers=layers final_norm=final_norm input_norm=attn_norm "
            "mlp_norm=mlp_norm qkv=attn.Wqkv out=attn.Wo gate_up=mlp.Wi down=mlp.Wo",
        ),
        renames=((r"^(?=(embeddings|layers|final_norm)\.)", "model."),),
        surplus=r"^(?!model\.)",
    ),
    # -- decoders
    "gpt2": FamilyRow(
        defaults=_GPT2,
        keys=_GPT2_KEYS,
        fields=_LEARNT,
        kinds=_no_rope(_all_full),
        only={"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,)},
        names=_names(
            "transformer.", _GPT_NAMES + "positions=wpe mlp_norm=ln_2 qkv=attn.c_attn out=attn.c_proj up=mlp.c_fc down=mlp.c_proj"
        ),
        renames=_IN_TRANSFORMER,
        surplus=_BUFFERS,
        transposed=True,
    ),
    "gpt_neo": FamilyRow(
        defaults={**_GPT2, "max_position_embeddings": 2048, "window_size": 256, "attention_types": [[["global", "local"], 12]]},
        keys=_pairs(
            "num_hidden_layers=num_layers num_attention_heads=num_heads hidden_act=activation_function "
            "rms_norm_eps=layer_norm_epsilon sliding_window=window_size"
        ),
        fields={**_LEARNT, "qkv_bias": False, "attn_scale": 1.0},
        kinds=_gpt_neo,
        names=_names(
            "transformer.",
            _GPT_NAMES + "positions=wpe mlp_norm=ln_2 q=attn.attention.q_proj k=attn.attention.k_proj v=attn.attention.v_proj "
            "out=attn.attention.out_proj up=mlp.c_fc down=mlp.c_proj",
        ),
        renames=_IN_TRANSFORMER,
        surplus=_BUFFERS,
    ),
    "gptj": FamilyRow(
        defaults={**_GPT2, "max_position_embeddings": 2048, "tie_word_embeddings": False, "rotary_dim": 64},
        keys=_GPT2_KEYS,
        fields={**_OWN_HEADS, "qkv_bias": False, "out_bias": False, "residual": "parallel", "norms": NORMS[:1], "head_bias": True},
        names=_names(
            "transformer.", _GPT_NAMES + "q=attn.q_proj k=attn.k_proj v=attn.v_proj out=attn.out_proj up=mlp.fc_in down=mlp.fc_out"
        ),
        renames=_IN_TRANSFORMER,
        surplus=_BUFFERS,
        interleaved=True,
    ),
    "gpt_neox": FamilyRow(
        defaults={
            "hidden_act": "gelu",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
            "use_parallel_residual": True,
            "attention_bias": True,
            "partial_rotary_factor": 0.25,
        },
        keys={"rms_norm_eps": "layer_norm_eps", "partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"},
        fields={
            **_OWN_HEADS,
            "qkv_bias": _flag("attention_bias"),
            "out_bias": _flag("attention_bias"),
            "residual": lambda c: "parallel" if c["use_parallel_residual"] else "before",
        },
        names=_names(
            "gpt_neox.", "embed=embed_in layers=layers final_norm=final_layer_norm head=/lm_head " + _ATTENTION.format("attention")
        ),
        renames=((r"^embed_out\.", "lm_head."),),
        surplus=_BUFFERS,
        grouped=True,
    ),
    "opt": FamilyRow(
        defaults={
            "hidden_act": "relu",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
            "do_layer_norm_before": True,
        },
        keys={"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
        fields={
            **_OWN_HEADS,
            "num_positions": lambda c: c["max_position_embeddings"] + 2,
            "position_offset": 2,
            "residual": lambda c: "before" if c["do_layer_norm_before"] else "after",
            "norms": lambda c: NORMS[:2] if c["do_layer_norm_before"] else NORMS[2:],
            "final_norm": _flag("do_layer_norm_before"),
            "embed_size": _resized("word_embed_proj_dim"),
            "late_positions": True,
        },
        kinds=_no_rope(_all_full),
        only={"enable_bias": (True,), "layer_norm_elementwise_affine": (True,), "_remove_final_layer_norm": (False,)},
        names=_names(
            "model.decoder.",
            "embed=embed_tokens embed_in=project_in embed_out=project_out positions=embed_positions layers=layers head=/lm_head "
            "final_norm=final_layer_norm input_norm=self_attn_layer_norm mlp_norm=final_layer_norm "
            "attn_post_norm=self_attn_layer_norm mlp_post_norm=final_layer_norm "
            "q=self_attn.q_proj k=self_attn.k_proj v=self_attn.v_proj "
            "out=self_attn.out_proj up=fc1 down=fc2",
        ),
        renames=((r"^(?=decoder\.)", "model."),),
    ),
    "bloom": FamilyRow(
        defaults={**_GPT2, "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 1 << 16},
        keys={"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "rms_norm_eps": "layer_norm_epsilon"},
        fields={**_OWN_HEADS, "embed_norm": True, "alibi": _slopes},
        kinds=_no_rope(_all_full),
        only={"apply_residual_connection_post_layernorm": (False,)},
        names=_names(
            "transformer.",
            "embed=word_embeddings embed_norm=word_embeddings_layernorm layers=h final_norm=ln_f head=/lm_head "
            + _ATTENTION.format("self_attention"),
        ),
        renames=_IN_TRANSFORMER,
        grouped=True,
    ),
    "falcon": FamilyRow(
        defaults={
            "hidden_act": "gelu",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
            "multi_query": True,
            "parallel_attn": True,
            "bias": False,
            "alibi": False,
            "new_decoder_architecture": False,
            "num_ln_in_parallel_attn": None,
            "num_kv_heads": None,
            "intermediate_size": None,
        },
        keys={"rms_norm_eps": "layer_norm_epsilon", "hidden_act": "activation", "intermediate_size": "ffn_hidden_size"},
        fields={
            **_PLAIN,
            **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), _flag("bias")),
            "num_kv_heads": lambda c: (
                c["num_kv_heads"] if c["new_decoder_architecture"] else 1 if c["multi_query"] else c["num_attention_heads"]
            ),
            "residual": lambda c: "parallel" if c["parallel_attn"] or c["new_decoder_architecture"] else "before",
            "norms": _falcon_norms,
            "alibi": _falcon_slopes,
        },
        kinds=lambda c: [(None if c["alibi"] else kind, window) for kind, window in _all_full(c)],
        names=_names(
            "transformer.", "embed=word_embeddings layers=h final_norm=ln_f head=/lm_head " + _ATTENTION.format("self_attention")
        ),
        renames=(*_IN_TRANSFORMER, (r"\.ln_attn\.", ".input_layernorm."), (r"\.ln_mlp\.", ".post_attention_layernorm.")),
        grouped=True,
    ),
    "phi": FamilyRow(
        defaults=_PHI,
        keys={"rms_norm_eps": "layer_norm_eps"},
        fields={
            **_PLAIN,
            "residual": "parallel",
            "norms": NORMS[:1],
            "head_bias": True,
            "qk_norm": _if("qk_layernorm", "head"),
            "qk_norm_bias": _flag("qk_layernorm"),
        },
        names=_LLAMA_NAMES
        | _pairs(
            "final_norm=model.final_layernorm out=self_attn.dense up=mlp.fc1 down=mlp.fc2 q_norm=self_attn.q_layernorm "
            "k_norm=self_attn.k_layernorm"
        ),
    ),
    "phi3": FamilyRow(
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "partial_rotary_factor": 1.0},
        fields={"qkv_bias": False, "out_bias": False},
        kinds=_one_window,
        names=_PHI3_NAMES,
    ),
    "stablelm": FamilyRow(
        defaults={
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "partial_rotary_factor": 0.25,
            "use_qkv_bias": False,
            "use_parallel_residual": False,
            "qk_layernorm": False,
        },
        keys={"rms_norm_eps": "layer_norm_eps"},
        fields={
            **_LAYER_NORM,
            "qkv_bias": _flag("use_qkv_bias"),
            "out_bias": False,
            "residual": lambda c: "parallel" if c["use_parallel_residual"] else "before",
            "norms": lambda c: NORMS[: 1 if c["use_parallel_residual"] else 2],
            "qk_norm": _if("qk_layernorm", "own"),
        },
        names={**_LLAMA_NAMES, "q_norms": "self_attn.q_layernorm.norms", "k_norms": "self_attn.k_layernorm.norms"},
    ),
    "starcoder2": FamilyRow(
        defaults={
            "hidden_act": "gelu_pytorch_tanh",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
            "use_bias": True,
        },
        keys={"rms_norm_eps": "norm_epsilon"},
        fields={**_PLAIN, **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), _flag("use_bias"))},
        kinds=_one_window,
        names={**_LLAMA_NAMES, "up": "mlp.c_fc", "down": "mlp.c_proj"},
    ),
    "olmo2": FamilyRow(
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
        fields={"qk_norm": "whole", "norms": NORMS[2:]},
        names={**_LLAMA_NAMES, **_POST},
    ),
    "cohere": FamilyRow(
        defaults={**_COHERE, "rope_theta": 500000.0},
        keys={"rms_norm_eps": "layer_norm_eps"},
        fields={**_COHERE_FIELDS, "qk_norm": _if("use_qk_norm", "own")},
        interleaved=True,
    ),
    "cohere2": FamilyRow(
        defaults={**_COHERE, "sliding_window": 4096},
        keys={"rms_norm_eps": "layer_norm_eps"},
        fields=_COHERE_FIELDS,
        kinds=_cohere2,
        interleaved=True,
    ),
    "granite": FamilyRow(
        defaults={
            "max_position_embeddings": 2048,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
        fields={
            "embed_scale": _number("embedding_multiplier"),
            "attn_scale": _number("attention_multiplier"),
            "residual_scale": _number("residual_multiplier"),
            "logit_scale": lambda c: 1 / c["logits_scaling"],
        },
    ),
    "smollm3": FamilyRow(
        defaults={"rope_theta": 2e6, "num_key_value_heads": 4, "tie_word_embeddings": True, "no_rope_layer_interval": 4},
        kinds=_smollm3,
    ),
    "glm": FamilyRow(defaults=_GLM, fields={"out_bias": False}, names=_FUSED_MLP, interleaved=True),
    "glm4": FamilyRow(
        defaults=_GLM,
        fields={"out_bias": False, "norms": NORMS},
        names={**_FUSED_MLP, "attn_post_norm": "post_self_attn_layernorm", "mlp_post_norm": "post_mlp_layernorm"},
        interleaved=True,
    ),
    "exaone4": FamilyRow(
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "sliding_window": 4096, "sliding_window_pattern": 4},
        fields={"qk_norm": "head", "norms": NORMS[2:]},
        kinds=_exaone4,
        names={**_LLAMA_NAMES, **_POST},
    ),
    "internlm": FamilyRow(defaults={"max_position_embeddings": 2048, "bias": True}, keys={"attention_bias": "bias"}),
}

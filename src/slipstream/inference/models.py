"""Translates Hugging Face's format: config.json -> `TransformerConfig`, weights by name -> `DecoderWeights`.

Pure, and without transformers; it reads what transformers 4 and 5 write. A family is a row of `FAMILIES`; no code asks for its
name. UnsupportedModel is raised for models that `TransformerConfig` cannot describe, which can still run in transformers
(`generic`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.inference.config import NORMS, ExpertsPart, Layer, Rope, RoutedExperts, TransformerConfig
from slipstream.inference.weights import DecoderWeights, Int4, Int8, LayerWeights, Matrix, Mlp, leaves


class MisfitError(ValueError):
    """The weights are not those of the configuration."""


class UnsupportedModel(ValueError):
    """`TransformerConfig` cannot describe this model; the message says why."""


_FULL, _SLIDING = "full_attention", "sliding_attention"
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "relu": "relu",
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), "gelu_tanh"),
}
_SIZES = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
_SAME = (*_SIZES, "num_attention_heads", "num_key_value_heads")  # must be equal in all layers; some families have lists here

Keys = Mapping[str, Any]  # of config.json, with defaults
Kind = tuple[str | None, int]  # of a layer: which rope (None: none), and its window


# -- What families differ in -----------------------------------------------------------------------------------------------


def _all_full(c: Keys) -> list[Kind]:
    return [(_FULL, 0)] * c["num_hidden_layers"]


def _one_window(c: Keys) -> list[Kind]:
    """One window for all layers, whatever layer_types says."""
    return [(_FULL, c["sliding_window"] or 0)] * c["num_hidden_layers"]


def _by_type(slides: Callable[[Keys, int], bool], needs_flag: bool = False) -> Callable[[Keys], list[Kind]]:
    """Windows by layer_types. slides: whether layer i has one, for configurations that predate the key. needs_flag: windows have an
    effect with use_sliding_window only."""

    def kinds(c: Keys) -> list[Kind]:
        num, window = c["num_hidden_layers"], c["sliding_window"] or 0
        window = 0 if needs_flag and not c["use_sliding_window"] else window
        names = list(c.get("layer_types") or (_SLIDING if slides(c, i) else _FULL for i in range(num)))
        other = set(names) - {_FULL, _SLIDING}
        if len(names) != num or other:
            raise UnsupportedModel(f"layer_types ({', '.join(map(str, other or names))}) must be {num} of {_FULL} and {_SLIDING}")
        return [(name, window if name == _SLIDING else 0) for name in names]

    return kinds


def _no_rope(kinds: Callable[[Keys], list[Kind]]) -> Callable[[Keys], list[Kind]]:
    return lambda c: [(None, window) for _, window in kinds(c)]


def _upper(c: Keys, i: int) -> bool:
    return i >= c["max_window_layers"] and bool(c["use_sliding_window"])


def _smollm3(c: Keys) -> list[Kind]:
    """Some layers have no rope."""
    interval, num = c["no_rope_layer_interval"], c["num_hidden_layers"]
    turn = c.get("no_rope_layers") or [(i + 1) % interval for i in range(num)]
    kinds = _by_type(lambda c, i: bool(c["use_sliding_window"]) and not turn[i], needs_flag=True)(c)
    return [(kind if turn[i] else None, window) for i, (kind, window) in enumerate(kinds)]


def _exaone4(c: Keys) -> list[Kind]:
    """With windows, the layers that have none have no rope either."""
    pattern = c["sliding_window_pattern"]
    if isinstance(pattern, str):
        pattern = len(pattern)
    kinds = _by_type(lambda c, i: bool(c["sliding_window"]) and bool(pattern) and (i + 1) % pattern != 0)(c)
    return [(None if kind == _FULL and c["sliding_window"] else kind, window) for kind, window in kinds]


def _gpt_neo(c: Keys) -> list[Kind]:
    names = c.get("attention_layers") or [name for names, times in c["attention_types"] for name in names * times]
    return [(None, c["sliding_window"] if name == "local" else 0) for name in names]


def _modernbert(c: Keys) -> list[Kind]:
    """A window of as many tokens on both sides."""
    every = c["global_attn_every_n_layers"]
    both = {**c, "sliding_window": c["local_attention"] // 2 + 1}
    return _by_type(lambda c, i: i % every != 0)(both)


def _dense(c: Keys, i: int) -> RoutedExperts | None:
    return None


def _mixture(size: str) -> Callable[[Keys, int], RoutedExperts | None]:
    """size: the key of an expert's inner features. Layers in mlp_only_layers, and those that the step leaves out, are dense."""

    def experts(c: Keys, i: int) -> RoutedExperts | None:
        # transformers 5 writes num_local_experts for some families where 4 wrote num_experts.
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


def _slopes(c: Keys) -> tuple[float, ...]:
    """ALiBi's (arXiv:2108.12409): geometric; for other numbers of heads than powers of 2, every second of twice as many follow."""
    heads = c["num_attention_heads"]
    power = 1 << heads.bit_length() - 1

    def series(num: int) -> list[float]:
        return [2.0 ** (-8 * (i + 1) / num) for i in range(num)]

    return tuple(series(power) + series(2 * power)[::2][: heads - power])


def _falcon_slopes(c: Keys) -> tuple[float, ...]:
    """Its scores are scaled after ALiBi is added, and its slopes are bf16."""
    scale = (c["hidden_size"] // c["num_attention_heads"]) ** -0.5
    return tuple((torch.tensor(_slopes(c)).bfloat16().float() * scale).tolist()) if c["alibi"] else ()


def _falcon_norms(c: Keys) -> tuple[str, ...]:
    two = (c["num_ln_in_parallel_attn"] or 2) == 2 if c["new_decoder_architecture"] else not c["parallel_attn"]
    return NORMS[: 1 + two]


def _flag(key: str) -> Callable[[Keys], bool]:
    return lambda c: bool(c[key])


def _number(key: str) -> Callable[[Keys], Any]:
    return lambda c: c[key]


# -- The table -------------------------------------------------------------------------------------------------------------


def _names(base: str, text: str) -> dict[str, str]:
    """ "role=module ..." below `base`, or at the root with "/": the names of layers' modules are below theirs."""
    pairs = (pair.split("=") for pair in text.split())
    outer = ("embed", "final_norm", "head", "layers", "positions", "token_types", "embed_norm")
    return {role: name[1:] if name[0] == "/" else base + name if role in outer else name for role, name in pairs}


_LLAMA_NAMES = _names(
    "model.",
    "embed=embed_tokens layers=layers final_norm=norm head=/lm_head input_norm=input_layernorm mlp_norm=post_attention_layernorm "
    "q=self_attn.q_proj k=self_attn.k_proj v=self_attn.v_proj out=self_attn.o_proj q_norm=self_attn.q_norm k_norm=self_attn.k_norm "
    "gate=mlp.gate_proj up=mlp.up_proj down=mlp.down_proj",
)
# "post_attention" is the norm after the attention here, and above the one before the MLP.
_POST = {"attn_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
_SANDWICH_NAMES = {**_LLAMA_NAMES, **_POST, "mlp_norm": "pre_feedforward_layernorm"}


def _bert_names(base: str) -> dict[str, str]:
    return _names(
        base,
        "embed=embeddings.word_embeddings positions=embeddings.position_embeddings token_types=embeddings.token_type_embeddings "
        "embed_norm=embeddings.LayerNorm layers=encoder.layer q=attention.self.query k=attention.self.key v=attention.self.value "
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
class Family:
    """What the config.json and the weights of one model_type mean."""

    defaults: Keys = field(default_factory=dict)  # of its configuration class, for keys that config.json omits
    keys: Mapping[str, str] = field(default_factory=dict)  # a key of this file -> the family's
    fields: Mapping[str, Any] = field(default_factory=dict)  # of `TransformerConfig`: values, or functions of `Keys`
    kinds: Callable[[Keys], list[Kind]] = _all_full
    experts: Callable[[Keys, int], RoutedExperts | None] = _dense
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # the supported values of keys
    names: Mapping[str, str] = field(default_factory=lambda: _LLAMA_NAMES)  # role -> module; qkv, gate_up: rows of one matrix
    # (pattern, replacement) of names that other files have: those of a model without a head lack its prefix
    renames: tuple[tuple[str, str], ...] = ((r"^(?=(embed_tokens|layers|norm)\.)", "model."),)
    surplus: str = r"$^"  # a pattern of names that are not read
    transposed: bool = False  # layers' matrices are [in, out]
    grouped: bool = False  # qkv has each group's queries, key and value in turn, else all queries, all keys, all values
    interleaved: bool = False  # rope turns features (2i, 2i + 1) of a head
    first_norm: int = 0  # the first layer that has an input_norm

    def read(self, config: Keys) -> dict[str, Any]:
        """The configuration with this file's keys, and defaults."""
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
_OWN_HEADS: dict[str, Any] = {**_PLAIN, "num_kv_heads": _number("num_attention_heads")}  # whatever num_key_value_heads says
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
_BERT_KEYS, _BERT_ONLY = {"rms_norm_eps": "layer_norm_eps"}, {"is_decoder": (False,)}
_OLD_NORMS = ((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias"))


def _bert(base: str, *, part: str = "encoder", **more: Any) -> Family:
    """An encoder whose files have, or lack, `base`. Its other heads and its pooler are not read."""
    rest = {"defaults": _BERT, "keys": _BERT_KEYS, "fields": _ENCODER, "names": _bert_names(base)} | more
    return Family(
        kinds=_no_rope(_all_full),
        only=_BERT_ONLY,
        renames=((rf"^(?=(embeddings|embeddings_project|{part}|pooler)\.)", base), *_OLD_NORMS),
        surplus=rf"^(?!{base})|^{base}pooler\.|position_ids$",
        **rest,
    )


_ROBERTA = {
    **_ENCODER,
    "position_offset": lambda c: c["pad_token_id"] + 1,
    "max_context": lambda c: c["max_position_embeddings"] - c["pad_token_id"] - 1,
}
_GPT2_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
    "rms_norm_eps": "layer_norm_epsilon",
}
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
_PHI = {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "partial_rotary_factor": 0.5, "hidden_act": "gelu_new"}
_GLM: dict[str, Any] = {
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-07,
    "max_position_embeddings": 131072,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}
_FUSED_MLP = {name: module for name, module in _LLAMA_NAMES.items() if name not in ("gate", "up")} | {"gate_up": "mlp.gate_up_proj"}
_PHI3_NAMES = {name: module for name, module in _FUSED_MLP.items() if name not in ("q", "k", "v")} | {"qkv": "self_attn.qkv_proj"}

FAMILIES: dict[str, Family] = {
    "llama": Family(defaults={"max_position_embeddings": 2048}, fields={"mlp_bias": _flag("mlp_bias")}),
    "mistral": Family(
        defaults={**_WINDOWED, "sliding_window": 4096, "num_key_value_heads": 8}, fields={"out_bias": False}, kinds=_one_window
    ),
    "mixtral": Family(
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
    "qwen2": Family(defaults=_QWEN, fields={"qkv_bias": True, "out_bias": False}, kinds=_by_type(_upper, needs_flag=True)),
    "qwen3": Family(defaults={**_QWEN, "head_dim": 128}, fields={"qk_norm": True}, kinds=_by_type(_upper, needs_flag=True)),
    "qwen2_moe": Family(
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
    "olmoe": Family(
        defaults={
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "norm_topk_prob": False,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "eos_token_id": 50279,
        },
        fields={"qk_norm_whole": True},
        experts=_mixture("intermediate_size"),
    ),
    "qwen3_moe": Family(
        defaults={
            **_QWEN_MOE,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        fields={"qk_norm": True},
        kinds=lambda c: _one_window({**c, "sliding_window": c["sliding_window"] if c["use_sliding_window"] else 0}),
        experts=_mixture("moe_intermediate_size"),
    ),
    # Gemma's first configurations say "gelu" and mean the tanh approximation, which transformers uses too.
    "gemma": Family(
        defaults=_GEMMA, fields={**_GEMMA_FIELDS, "activation": lambda c: (_ACTIVATIONS | {"gelu": "gelu_tanh"})[c["hidden_act"]]}
    ),
    "gemma2": Family(
        defaults={**_GEMMA, "num_key_value_heads": 4, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        keys={"hidden_act": "hidden_activation"},
        fields={**_GEMMA2_FIELDS, "attn_softcap": lambda c: c["attn_logit_softcapping"] or 0.0},
        kinds=_by_type(lambda c, i: i % 2 == 0),
        names=_SANDWICH_NAMES,
    ),
    "gemma3_text": Family(
        defaults={
            **_GEMMA,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 4,
            "rope_theta": 1e6,
            "rope_local_base_freq": 10000.0,
        },
        keys={"hidden_act": "hidden_activation"},
        fields={**_GEMMA2_FIELDS, "qk_norm": True},
        kinds=_by_type(lambda c, i: (i + 1) % c.get("sliding_window_pattern", 6) != 0),
        names=_SANDWICH_NAMES,
    ),
    # -- encoders
    "bert": _bert("bert."),
    "roberta": _bert("roberta.", defaults={**_BERT, "pad_token_id": 1}, fields=_ROBERTA),
    "xlm-roberta": _bert("roberta.", defaults={**_BERT, "pad_token_id": 1}, fields=_ROBERTA),
    "electra": _bert("electra.", defaults={**_BERT, "embedding_size": 128}),
    "distilbert": _bert(
        "distilbert.",
        part="transformer",
        keys={
            "hidden_size": "dim",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "intermediate_size": "hidden_dim",
            "hidden_act": "activation",
        },
        fields={**_ENCODER, "num_token_types": 0},
        names=_names(
            "distilbert.",
            "embed=embeddings.word_embeddings positions=embeddings.position_embeddings embed_norm=embeddings.LayerNorm "
            "layers=transformer.layer q=attention.q_lin k=attention.k_lin v=attention.v_lin out=attention.out_lin "
            "attn_post_norm=sa_layer_norm up=ffn.lin1 down=ffn.lin2 mlp_post_norm=output_layer_norm",
        ),
    ),
    "modernbert": Family(
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
        keys={
            "hidden_act": "hidden_activation",
            "rms_norm_eps": "norm_eps",
            "rope_theta": "global_rope_theta",
            "rope_local_base_freq": "local_rope_theta",
        },
        fields={
            "norm": "layer",
            "norm_bias": _flag("norm_bias"),
            "causal": False,
            "embed_norm": True,
            "has_head": False,
            "mlp_bias": _flag("mlp_bias"),
        },
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
    "gpt2": Family(
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
    "gpt_neo": Family(
        defaults={**_GPT2, "max_position_embeddings": 2048, "window_size": 256, "attention_types": [[["global", "local"], 12]]},
        keys={
            "num_hidden_layers": "num_layers",
            "num_attention_heads": "num_heads",
            "hidden_act": "activation_function",
            "rms_norm_eps": "layer_norm_epsilon",
            "sliding_window": "window_size",
        },
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
    "gptj": Family(
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
    "gpt_neox": Family(
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
    "opt": Family(
        defaults={"hidden_act": "relu", "rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "tie_word_embeddings": True},
        keys={"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
        fields={**_OWN_HEADS, "num_positions": lambda c: c["max_position_embeddings"] + 2, "position_offset": 2},
        kinds=_no_rope(_all_full),
        only={
            "do_layer_norm_before": (True,),
            "enable_bias": (True,),
            "layer_norm_elementwise_affine": (True,),
            "_remove_final_layer_norm": (False,),
        },
        names=_names(
            "model.decoder.",
            "embed=embed_tokens positions=embed_positions layers=layers final_norm=final_layer_norm head=/lm_head "
            "input_norm=self_attn_layer_norm mlp_norm=final_layer_norm q=self_attn.q_proj k=self_attn.k_proj v=self_attn.v_proj "
            "out=self_attn.out_proj up=fc1 down=fc2",
        ),
        renames=((r"^(?=decoder\.)", "model."),),
    ),
    "bloom": Family(
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
    "falcon": Family(
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
    "phi": Family(
        defaults=_PHI,
        keys={"rms_norm_eps": "layer_norm_eps"},
        fields={**_PLAIN, "residual": "parallel", "norms": NORMS[:1], "head_bias": True},
        only={"qk_layernorm": (False,)},
        names={**_LLAMA_NAMES, "final_norm": "model.final_layernorm", "out": "self_attn.dense", "up": "mlp.fc1", "down": "mlp.fc2"},
    ),
    "phi3": Family(
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "partial_rotary_factor": 1.0},
        fields={"qkv_bias": False, "out_bias": False},
        kinds=_one_window,
        names=_PHI3_NAMES,
    ),
    "stablelm": Family(
        defaults={
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "partial_rotary_factor": 0.25,
            "use_qkv_bias": False,
            "use_parallel_residual": False,
        },
        keys={"rms_norm_eps": "layer_norm_eps"},
        fields={
            **_LAYER_NORM,
            "qkv_bias": _flag("use_qkv_bias"),
            "out_bias": False,
            "residual": lambda c: "parallel" if c["use_parallel_residual"] else "before",
            "norms": lambda c: NORMS[: 1 if c["use_parallel_residual"] else 2],
        },
        only={"qk_layernorm": (False,)},
    ),
    "starcoder2": Family(
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
    "olmo2": Family(
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
        fields={"qk_norm_whole": True, "norms": NORMS[2:]},
        names={**_LLAMA_NAMES, **_POST},
    ),
    "cohere": Family(
        defaults={
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "logit_scale": 0.0625,
        },
        keys={"rms_norm_eps": "layer_norm_eps"},
        fields={"norm": "layer", "residual": "parallel", "norms": NORMS[:1], "logit_scale": _number("logit_scale")},
        only={"use_qk_norm": (False,)},
        interleaved=True,
    ),
    "granite": Family(
        defaults={
            "max_position_embeddings": 2048,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
        fields={
            "mlp_bias": _flag("mlp_bias"),
            "embed_scale": _number("embedding_multiplier"),
            "attn_scale": _number("attention_multiplier"),
            "residual_scale": _number("residual_multiplier"),
            "logit_scale": lambda c: 1 / c["logits_scaling"],
        },
    ),
    "smollm3": Family(
        defaults={"rope_theta": 2e6, "num_key_value_heads": 4, "tie_word_embeddings": True, "no_rope_layer_interval": 4},
        fields={"mlp_bias": _flag("mlp_bias")},
        kinds=_smollm3,
    ),
    "glm": Family(defaults={**_GLM, "num_key_value_heads": 2}, fields={"out_bias": False}, names=_FUSED_MLP, interleaved=True),
    "glm4": Family(
        defaults={**_GLM, "num_key_value_heads": 2},
        fields={"out_bias": False, "norms": NORMS},
        names={**_FUSED_MLP, "attn_post_norm": "post_self_attn_layernorm", "mlp_post_norm": "post_mlp_layernorm"},
        interleaved=True,
    ),
    "exaone4": Family(
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "sliding_window": 4096, "sliding_window_pattern": 4},
        fields={"qk_norm": True, "norms": NORMS[2:]},
        kinds=_exaone4,
        names={**_LLAMA_NAMES, **_POST},
    ),
    "internlm": Family(defaults={"max_position_embeddings": 2048, "bias": True}, keys={"attention_bias": "bias"}),
}


def from_hf(config: Mapping[str, Any]) -> TransformerConfig:
    """Convert a config.json (or `model.config.to_dict()`). Raises UnsupportedModel."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise UnsupportedModel(f"model_type {family!r} is not supported by the fast forward, which has {', '.join(FAMILIES)}")
    row = FAMILIES[family]
    c = row.read(config)
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    if missing := [row.keys.get(key, key) for key in needed if c.get(key) is None and key not in row.defaults]:
        raise UnsupportedModel(f"the configuration of this {family} model lacks {', '.join(missing)}")
    if by_layer := [key for key in _SAME if isinstance(c.get(key), list)]:
        raise UnsupportedModel(f"{', '.join(by_layer)} of this {family} model differ from layer to layer")
    _check_supported(family, row, c)
    heads = c["num_attention_heads"]
    bias = bool(c["attention_bias"])
    ends = c.get("eos_token_id")
    values: dict[str, Any] = {
        "family": family,
        "vocab_size": c["vocab_size"],
        "hidden_size": c["hidden_size"],
        "intermediate_size": c.get("intermediate_size") or 4 * c["hidden_size"],
        "num_heads": heads,
        "num_kv_heads": c.get("num_key_value_heads") or heads,
        "head_dim": c.get("head_dim") or c["hidden_size"] // heads,
        "norm_eps": c["rms_norm_eps"],
        "max_context": _max_context(c),
        "activation": _ACTIVATIONS[c["hidden_act"]],
        "tied": c["tie_word_embeddings"],
        "qkv_bias": bias,
        "out_bias": bias,
        "end_ids": () if ends is None else tuple(ends) if isinstance(ends, list | tuple) else (ends,),
    }
    values |= {name: value(c) if callable(value) else value for name, value in row.fields.items()}
    kinds = row.kinds(c)
    ropes = {kind: _rope(row, c, kind, values["head_dim"]) for kind in {kind for kind, _ in kinds} if kind is not None}
    layers = tuple(
        Layer(
            rope=None if kind is None else ropes[kind], window=window, experts=row.experts(c, i), has_input_norm=i >= row.first_norm
        )
        for i, (kind, window) in enumerate(kinds)
    )
    return TransformerConfig(layers=layers, **values)


def _check_supported(family: str, row: Family, c: Keys) -> None:
    if c.get("quantization_config"):
        method = c["quantization_config"].get("quant_method", "an unnamed method")
        raise UnsupportedModel(f"weights quantized by {method} are not supported; give the unquantized one with dtype int8 or int4")
    if c.get("use_bidirectional_attention"):
        raise UnsupportedModel(f"this {family} model attends in both directions (use_bidirectional_attention): it cannot generate")
    if c.get("clip_qkv") is not None:
        raise UnsupportedModel(f"clip_qkv is {c['clip_qkv']}: queries and keys are not clamped by the fast decoder")
    for key, values in row.only.items():
        if c.get(key, values[0]) not in values:
            raise UnsupportedModel(f"{key} is {c[key]!r} in this {family} model; the fast forward has {values[0]!r} only")
    for key in ("embedding_size", "word_embed_proj_dim"):
        if c.get(key, c["hidden_size"]) != c["hidden_size"]:
            raise UnsupportedModel(f"{key} is {c[key]} and hidden_size {c['hidden_size']}: embeddings are not projected")
    if (c.get("head_dim") or 0) % 2:
        raise UnsupportedModel(f"head_dim is {c['head_dim']}; it must be even, because rotary embeddings rotate pairs")
    if c["hidden_act"] not in _ACTIVATIONS:
        raise UnsupportedModel(f"activation {c['hidden_act']!r} is none of {', '.join(_ACTIVATIONS)}")
    if c["num_attention_heads"] % (c.get("num_key_value_heads") or c["num_attention_heads"]):
        heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        raise UnsupportedModel(f"num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})")


# -- Rotary positions ------------------------------------------------------------------------------------------------------


def _rope(row: Family, c: Keys, kind: str, head_dim: int) -> Rope:
    """The rope of a kind of layer. transformers 4 has rope_theta and rope_scaling; 5 has rope_parameters, possibly per kind."""
    scaling = c.get("rope_scaling") or c.get("rope_parameters") or {}
    nested = _FULL in scaling or _SLIDING in scaling
    p = dict((scaling.get(kind) or {}) if nested else scaling)
    theta = c["rope_theta"]
    if kind == _SLIDING and "rope_local_base_freq" in c:
        theta = c["rope_local_base_freq"]
        p = p if nested else {}  # a single rope_scaling applies to the full layers
    p["rope_theta"] = p.get("rope_theta") or theta
    share = p.get("partial_rotary_factor") or c.get("partial_rotary_factor") or 1.0
    if share != 1.0 and "partial_rotary_factor" not in row.defaults:
        raise UnsupportedModel(f"partial_rotary_factor {share} is not supported for this family")
    num = c.get("rotary_dim") or int(head_dim * share)
    return rope(p, num, c["max_position_embeddings"], c.get("original_max_position_embeddings"))


def rope(p: Mapping[str, Any], head_dim: int, max_positions: int, original: int | None = None) -> Rope:
    """Compute the frequencies from transformers' rope_parameters, in fp32 like transformers: the result is bit-identical. head_dim:
    the features that turn."""
    kind = p.get("rope_type", p.get("type", "default"))
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


Pick = Callable[[Tensor], Tensor]  # the part of a stored weight that has a role, as a view where that is possible
# Name suffixes that occur in only one layout of experts (`_expert_mlps`): one expert at a time with a dense MLP's names (no such
# suffix), transformers 5's stacks, Mixtral's files. The router's name is part of the last.
_EXPERT_LAYOUTS = ("as_dense", "experts.gate_up_proj", ("0.w1.weight", "block_sparse_moe.gate.weight"))


def _all(w: Tensor) -> Tensor:
    return w


class _Source(Protocol):
    """Returns weights by name and checks the shape, which the configuration determines."""

    def __contains__(self, name: str) -> bool: ...

    def matrix(self, name: str, *shape: int, pick: Pick = _all) -> Matrix: ...

    def tensor(self, name: str, *shape: int, pick: Pick = _all) -> Tensor: ...


class _Outline:
    """Returns tensors on meta, and records their names."""

    def __init__(self, layout: str | tuple[str, ...]):
        self.layout = layout  # name suffixes of a layout of experts: only names with these are `in` it
        self.named: dict[str, tuple[int, ...]] = {}
        self.found: dict[int, tuple[str, Pick, Tensor]] = {}  # by id of the returned tensor, which is kept

    def __contains__(self, name: str) -> bool:
        return name.endswith(self.layout)

    def tensor(self, name: str, *shape: int, pick: Pick = _all) -> Tensor:
        self.named[name] = shape
        part = pick(torch.empty(shape, device="meta"))
        self.found[id(part)] = name, pick, part
        return part

    matrix = tensor


class _State:
    """Returns the weights of a file or model, matrices after `convert`, and records which names were used."""

    def __init__(
        self, state: Mapping[str, Matrix], row: Family | None = None, convert: Callable[[Matrix], Matrix] | None = None
    ) -> None:
        self.state = state
        self.stored = {name if row is None else canonical(row, name): name for name in state}
        self.convert = convert or (lambda m: m)
        self.used: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self.stored

    def matrix(self, name: str, *shape: int, pick: Pick = _all) -> Matrix:
        m = self._checked(name, shape)
        return self.convert(pick(m) if isinstance(m, Tensor) else type(m)(*map(pick, m)))

    def _checked(self, name: str, shape: tuple[int, ...]) -> Matrix:
        if name not in self.stored:
            raise MisfitError(f"the weights lack {name} {list(shape)}")
        m = self.state[self.stored[name]]
        if shape_of(m) != shape:
            raise MisfitError(f"weight {name} is {list(shape_of(m))}; the configuration needs {list(shape)}")
        self.used.add(name)
        return m

    def tensor(self, name: str, *shape: int, pick: Pick = _all) -> Tensor:
        m = self._checked(name, shape)
        if not isinstance(m, Tensor):
            raise ValueError(f"weight {name} is quantized; only matrices can be")
        return pick(m)


def canonical(row: Family, name: str) -> str:
    """The name in transformers' model of a weight in a file."""
    for pattern, new in row.renames:
        name = re.sub(pattern, new, name)
    return name


def from_state(
    config: TransformerConfig, state: Mapping[str, Matrix], convert: Callable[[Matrix], Matrix] | None = None
) -> DecoderWeights:
    """Assign weights by Hugging Face's names to their roles, without copies where a role is a view. `convert` is applied to each
    matrix of a layer.

    Raises MisfitError naming any weight that is missing, unknown or of the wrong shape."""
    source = _State(state, FAMILIES[config.family], convert)
    weights = _weights(config, source)
    surplus = sorted(name for name in set(source.stored) - source.used if not is_surplus(config, name))
    if surplus:
        more = f" and {len(surplus) - 5} more" if len(surplus) > 5 else ""
        raise MisfitError(f"the model of this configuration does not have these weights: {', '.join(surplus[:5])}{more}")
    return weights


def is_surplus(config: TransformerConfig, name: str) -> bool:
    """Whether a weight may be ignored: a tied head, old checkpoints' rope frequencies (config has them), others' parts."""
    elsewhere = config.part.size > 1 and (name == head_name(config) or ".experts." in name)
    known = name.endswith("rotary_emb.inv_freq") or re.search(FAMILIES[config.family].surplus, name) is not None
    return elsewhere or known or ((config.tied or not config.has_head) and name == head_name(config))


def is_encoder(model_type: Any) -> bool:
    """Whether models of this type only embed."""
    row = FAMILIES.get(model_type)
    return row is not None and row.fields.get("causal") is False


def head_name(config: TransformerConfig) -> str:
    return FAMILIES[config.family].names.get("head", "") + ".weight"


def outline(config: TransformerConfig) -> DecoderWeights:
    """All weights of a model as tensors on meta."""
    return _weights(config, _Outline(_EXPERT_LAYOUTS[0]))


def places(config: TransformerConfig) -> dict[str, tuple[tuple[int, ...], list[tuple[str, Pick]]]]:
    """For each Hugging Face name, in all layouts that `from_state` reads: a weight's shape and the roles that it fills (paths in
    `DecoderWeights`), each with what picks its part."""
    by_name: dict[str, tuple[tuple[int, ...], list[tuple[str, Pick]]]] = {}
    for layout in _EXPERT_LAYOUTS if any(layer.experts for layer in config.layers) else _EXPERT_LAYOUTS[:1]:
        source = _Outline(layout)
        roles: dict[str, list[tuple[str, Pick]]] = {}
        for role, leaf in leaves(_weights(config, source)):
            name, pick, _ = source.found[id(leaf)]
            roles.setdefault(name, []).append((role, pick))
        by_name |= {name: (source.named[name], parts) for name, parts in roles.items()}
    if config.tied and config.has_head:
        by_name[FAMILIES[config.family].names["embed"] + ".weight"][1].append(("head", _all))
    return by_name


def layer_weights(config: TransformerConfig, index: int, state: Mapping[str, Matrix]) -> LayerWeights:
    """One layer's weights, from `state` by the names inside the layer."""
    return _layer(_Reader(config, _State(state)), config.layers[index], "")


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads weights by role."""

    config: TransformerConfig
    source: _Source

    @property
    def row(self) -> Family:
        return FAMILIES[self.config.family]

    def table(self, role: str, *shape: int) -> Tensor:
        return self.source.tensor(f"{self.row.names[role]}.weight", *shape)

    def norm(self, at: str, role: str, present: bool) -> dict[str, Tensor]:
        if not present:
            return {}
        name, size = at + self.row.names[role], self.config.hidden_size
        biases = {f"{role}_bias": self.source.tensor(f"{name}.bias", size)} if self.config.norm_bias else {}
        return {role: self.source.tensor(f"{name}.weight", size), **biases}

    def product(self, at: str, role: str, rows: int, columns: int, bias: bool) -> dict[str, Any]:
        """A matrix [rows, columns] and its bias, which may be rows of a larger one."""
        stored, pick = self._part(role, rows)
        name = at + self.row.names[role if role in self.row.names else "qkv" if role in "qkv" else "gate_up"]
        turned = self.row.transposed
        shape = (columns, stored) if turned else (stored, columns)
        found: dict[str, Any] = {role: self.source.matrix(f"{name}.weight", *shape, pick=(lambda w: pick(w.T)) if turned else pick)}
        if bias:
            found[f"{role}_bias"] = self.source.tensor(f"{name}.bias", stored, pick=pick)
        return found

    def _part(self, role: str, rows: int) -> tuple[int, Pick]:
        """The rows of the stored matrix, and what picks those of a role."""
        c, row = self.config, self.row
        kv, group, dim = c.num_kv_heads, c.num_heads // c.num_kv_heads, c.head_dim
        stored, pick = rows, _all
        if role not in row.names and role in ("gate", "up"):
            stored, pick = 2 * rows, lambda w: w[:rows] if role == "gate" else w[rows:]
        elif role not in row.names:
            stored = kv * (group + 2) * dim
            place = slice(0, group) if role == "q" else slice(group, group + 1) if role == "k" else slice(group + 1, group + 2)
            if row.grouped:
                pick = lambda w: w.unflatten(0, (kv, group + 2, dim))[:, place].flatten(0, 2)  # noqa: E731
            else:
                pick = lambda w: w[place.start * kv * dim : place.stop * kv * dim]  # noqa: E731
        ropes = [layer.rope for layer in c.layers if layer.rope is not None]
        if not row.interleaved or role not in ("q", "k") or not ropes:
            return stored, pick
        num = 2 * len(ropes[0].inv_freq)
        return stored, lambda w: _halves(pick(w), dim, num)


def _halves(w: Tensor, head_dim: int, num: int) -> Tensor:
    """Reorder the first `num` rows of each head from pairs (2i, 2i + 1) to pairs (i, i + num / 2). Scores stay what they are."""
    heads = w.unflatten(0, (-1, head_dim))
    turned = heads[:, :num].unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat([turned, heads[:, num:]], 1).flatten(0, 1)


def _weights(config: TransformerConfig, source: _Source) -> DecoderWeights:
    c, hidden, read = config, config.hidden_size, _Reader(config, source)
    names = read.row.names
    has_head = c.has_head and c.part.index == 0
    return DecoderWeights(
        embed=read.table("embed", c.vocab_size, hidden),
        head=source.tensor(head_name(c), c.vocab_size, hidden) if has_head and not c.tied else None,
        head_bias=source.tensor(f"{names['head']}.bias", c.vocab_size) if has_head and c.head_bias else None,
        positions=read.table("positions", c.num_positions, hidden) if c.num_positions else None,
        token_types=read.table("token_types", c.num_token_types, hidden) if c.num_token_types else None,
        **{"final_norm": None, **read.norm("", "final_norm", c.final_norm), **read.norm("", "embed_norm", c.embed_norm)},
        layers=[_layer(read, layer, f"{names['layers']}.{i}.") for i, layer in enumerate(c.layers)],
    )


def _layer(read: _Reader, layer: Layer, at: str) -> LayerWeights:
    c, source, hidden = read.config, read.source, read.config.hidden_size
    q_size, kv_size, inner = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.intermediate_size
    parts: dict[str, Any] = {}
    for role in c.norms:
        parts |= read.norm(at, role, role != "input_norm" or layer.has_input_norm)
    for role, rows in (("q", q_size), ("k", kv_size), ("v", kv_size)):
        parts |= read.product(at, role, rows, hidden, c.qkv_bias)
    weights = LayerWeights(**parts, **read.product(at, "out", hidden, q_size, c.out_bias))
    if c.qk_norm or c.qk_norm_whole:
        names = read.row.names
        weights.q_norm = source.tensor(f"{at}{names['q_norm']}.weight", q_size if c.qk_norm_whole else c.head_dim)
        weights.k_norm = source.tensor(f"{at}{names['k_norm']}.weight", kv_size if c.qk_norm_whole else c.head_dim)
    if layer.experts is None:
        first = [read.product(at, role, inner, hidden, c.mlp_bias) for role in (["gate"] if c.gated else []) + ["up"]]
        weights.mlp = Mlp(**read.product(at, "down", hidden, inner, c.mlp_bias), **{k: m for one in first for k, m in one.items()})
        return weights
    moe = at + ("block_sparse_moe." if at + "block_sparse_moe.gate.weight" in source else "mlp.")
    weights.router = source.tensor(moe + "gate.weight", layer.experts.num, hidden)
    weights.experts = _expert_mlps(source, moe + "experts.", layer.experts, hidden, c.part)
    if size := layer.experts.shared_size:
        own = c.part.columns(size, shared=True), c.part.columns(hidden, shared=True)
        weights.shared = _expert(source, moe + "shared_expert.", size, hidden, own)
        weights.shared_gate = source.tensor(moe + "shared_expert_gate.weight", 1, hidden)
    return weights


_DENSE = "gate_proj up_proj down_proj"


def _expert(source: _Source, at: str, size: int, hidden: int, own: tuple[slice, slice], names: str = _DENSE) -> Mlp:
    """own: the rows of this process, of gate and up, and of down."""
    gate, up, down = names.split()
    return Mlp(
        gate=source.matrix(f"{at}{gate}.weight", size, hidden, pick=lambda w: w[own[0]]),
        up=source.matrix(f"{at}{up}.weight", size, hidden, pick=lambda w: w[own[0]]),
        down=source.matrix(f"{at}{down}.weight", hidden, size, pick=lambda w: w[own[1]]),
    )


def _expert_mlps(source: _Source, at: str, experts: RoutedExperts, hidden: int, part: ExpertsPart) -> list[Mlp]:
    """Three layouts: transformers 5's stacks (live models), Mixtral's w1 w3 w2, and a dense MLP's names for each expert."""
    size, mine = experts.intermediate_size, part.experts(experts.num)
    own = inner, out = part.columns(size), part.columns(hidden)
    if at + "gate_up_proj" not in source:
        names = "w1 w3 w2" if at + "0.w1.weight" in source else _DENSE
        return [_expert(source, f"{at}{e}.", size, hidden, own, names) for e in mine]

    def stacked(name: str, e: int, rows: slice, cut: slice) -> Tensor:
        shape = (2 * size, hidden) if name == "gate_up_proj" else (hidden, size)
        return source.tensor(at + name, experts.num, *shape, pick=lambda w: w[e, rows][cut])

    return [
        Mlp(
            gate=stacked("gate_up_proj", e, slice(size), inner),
            up=stacked("gate_up_proj", e, slice(size, None), inner),
            down=stacked("down_proj", e, slice(None), out),
        )
        for e in mine
    ]

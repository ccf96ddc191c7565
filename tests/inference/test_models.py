"""Llama-like families against transformers in fp32: every value of their configurations by a tiny random model that needs it."""

from typing import Any

import pytest
import torch
import transformers

from slipstream.inference.families import UnsupportedModel
from slipstream.inference.models import from_hf, from_state
from tests.inference.twins import SIZES, check_against_generate, decoder_of, tiny

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
GEMMA = {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 24}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-biases-tied": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "hidden_act": "gelu"}),
    "llama3-rope": ("Llama", {"rope_parameters": {**LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 16}}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "llama-dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    "llama-yarn": (
        "Llama",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16}},
    ),
    "mistral-window": ("Mistral", {"sliding_window": 8, "head_dim": 32}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32, "attention_bias": True}),
    "gemma": ("Gemma", {"head_dim": 32}),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma3": (
        "Gemma3Text",
        {
            **GEMMA,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4},
            },
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": 8}),
    "qwen2-moe": ("Qwen2Moe", {**MOE, "shared_expert_intermediate_size": 48}),
    "qwen2-moe-sparse": (
        "Qwen2Moe",
        {**MOE, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 2, "norm_topk_prob": True, "qkv_bias": False},
    ),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "olmoe-grouped": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 3, "norm_topk_prob": True, "num_key_value_heads": 4}),
    "qwen3-moe": ("Qwen3Moe", {**MOE, "head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [0]}),
}


def model_of(case: str) -> Any:
    family, changes = CASES[case]
    return tiny(family, **SIZES | changes)


@pytest.mark.parametrize("case", CASES)
def test_greedy_as_transformers(case: str) -> None:
    model = model_of(case)
    check_against_generate(model, decoder_of(model))


def test_configurations_of_transformers_4() -> None:
    """Its keys rope_theta, rope_scaling and rope_local_base_freq, and what it left out, mean what transformers 5 reads."""
    old: list[dict[str, Any]] = [
        {**SIZES, "model_type": "llama", "rope_theta": 5e5, "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 16}},
        {**SIZES, "model_type": "llama", "rope_scaling": {"type": "linear", "factor": 3.0}},
        {**SIZES, "model_type": "gemma3_text", "rope_theta": 1e5, "rope_local_base_freq": 50.0, "sliding_window_pattern": 2},
        {**SIZES, "model_type": "gemma2"},
        {**SIZES, "model_type": "mistral"},
        {**SIZES, "model_type": "mixtral"},
        {**SIZES, "model_type": "qwen3"},
        {**SIZES, "model_type": "qwen2_moe", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        {**SIZES, "model_type": "qwen3_moe"},
        {**SIZES, "model_type": "olmoe"},
    ]
    for config in old:
        new = transformers.AutoConfig.for_model(**config).to_dict()
        assert from_hf(config) == from_hf(new), config["model_type"]


def test_embeddings_of_opt_are_as_wide_as_its_layers_if_nothing_else_is_said() -> None:
    config = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"} | {"model_type": "opt", "ffn_dim": 96}
    assert from_hf(config) == from_hf({**config, "word_embed_proj_dim": None}) == from_hf({**config, "word_embed_proj_dim": 64})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported by the fast forward, which has llama, mistral"),
        ({"model_type": "gemma", "use_bidirectional_attention": True}, "attends in both directions"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope_type 'ntk' is not supported; it can be default, linear"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5 is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "weights quantized by awq are not supported"),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, r"clip_qkv is 8\.0: queries and keys are not clamped"),
        ({"hidden_act": "tanh"}, "activation 'tanh' is none of silu"),
        ({"hidden_size": None, "vocab_size": None}, "lacks vocab_size, hidden_size"),
        ({"model_type": "qwen2", "layer_types": ["full_attention", "chunked"]}, "layer_types .chunked. must be 2 of"),
        (
            {"model_type": "bloom", "apply_residual_connection_post_layernorm": True},
            "apply_residual_connection_post_layernorm is True in this bloom model; the fast forward has False only",
        ),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) is not a multiple of num_key_value_heads \(3\)"),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        from_hf({**SIZES, "model_type": "llama", **changes})


def test_weights_are_refused_by_name() -> None:
    model = model_of("llama")
    config, state = from_hf(model.config.to_dict()), model.state_dict()
    name = "model.layers.1.self_attn.q_proj.weight"
    with pytest.raises(ValueError, match=rf"the weights lack {name} \[64, 64\]"):
        from_state(config, {n: t for n, t in state.items() if n != name})
    with pytest.raises(ValueError, match=rf"weight {name} is \[64, 63\]; the configuration needs \[64, 64\]"):
        from_state(config, {**state, name: torch.zeros(64, 63)})
    with pytest.raises(ValueError, match=r"does not have these weights: model\.layers\.0\.self_attn\.q_proj\.bias"):
        from_state(config, {**state, "model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})
    from_state(config, {**state, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})  # old checkpoints have it

"""Each family's row against transformers in fp32, by a tiny random model: greedy text, logits, the same bits in every batch."""

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.inference.decoder import Decoder, head_shapes
from slipstream.inference.kv_cache import KVCache
from slipstream.inference.load import load
from slipstream.inference.models import MisfitError, from_hf, from_state
from slipstream.inference.native import NativeDecoder
from slipstream.inference.weights import leaves, quantize
from slipstream.ops import build, cpu
from tests.cases import every_other
from tests.inference.test_native import Requests, logits_of, native_of
from tests.inference.twins import PROMPTS, SIZES, VOCAB, check_against_generate, decoder_of, tiny

ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
GPT2 = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, **ENDS}
NEO = {"vocab_size": VOCAB, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64, **ENDS}
BLOOM = {"vocab_size": VOCAB, "hidden_size": 96, "n_layer": 2, "n_head": 6, **ENDS}
FALCON = {name: size for name, size in SIZES.items() if name not in ("intermediate_size", "num_key_value_heads")}
MLA = {
    **SIZES,
    "num_key_value_heads": 4,
    "kv_lora_rank": 40,
    "q_lora_rank": None,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
GROUPS = {"n_group": 4, "topk_group": 2}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 1e4,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
    "beta_fast": 32,
    "beta_slow": 1,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", GPT2),
    "gpt-neo": ("GPTNeo", {**NEO, "attention_types": [[["global", "local"], 1]], "window_size": 8}),
    "gptj": ("GPTJ", {**GPT2, "rotary_dim": 8}),
    "gpt-neox": ("GPTNeoX", SIZES),
    "gpt-neox-sequential": ("GPTNeoX", {**SIZES, "use_parallel_residual": False}),
    "opt": ("OPT", {**SIZES, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "opt-350m": ("OPT", {**SIZES, "ffn_dim": 96, "word_embed_proj_dim": 40, "do_layer_norm_before": False}),
    "opt-wide": ("OPT", {**SIZES, "ffn_dim": 96, "word_embed_proj_dim": 112}),
    "bloom": ("Bloom", BLOOM),
    "falcon": ("Falcon", FALCON),
    "falcon-alibi": ("Falcon", {**FALCON, "alibi": True, "parallel_attn": False, "multi_query": False, "bias": True}),
    "falcon-groups": ("Falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-one-norm": ("Falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    "phi": ("Phi", SIZES),
    "phi-norms": ("Phi", {**SIZES, "qk_layernorm": True}),
    "phi3": ("Phi3", {**SIZES, "sliding_window": 8}),
    "phi3-partial": (
        "Phi3",
        {**SIZES, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "rope_type": "default"}},
    ),
    "stablelm": ("StableLm", {**SIZES, "use_qkv_bias": True}),
    "stablelm-parallel": ("StableLm", {**SIZES, "use_parallel_residual": True}),
    "stablelm-norms": ("StableLm", {**SIZES, "qk_layernorm": True}),
    "starcoder2": ("Starcoder2", {**SIZES, "sliding_window": 8}),
    "olmo2": ("Olmo2", SIZES),
    "cohere": ("Cohere", {**SIZES, "logit_scale": 0.25}),
    "cohere-norms": ("Cohere", {**SIZES, "logit_scale": 0.25, "use_qk_norm": True}),
    "cohere2": ("Cohere2", {**SIZES, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
    "granite": (
        "Granite",
        {**SIZES, "attention_multiplier": 0.3, "residual_multiplier": 0.5, "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    ),
    "smollm3": ("SmolLM3", {**SIZES, "no_rope_layers": [1, 0]}),
    "glm": ("Glm", {**SIZES, "head_dim": 16}),
    "glm4": ("Glm4", {**SIZES, "head_dim": 16}),
    "exaone4": ("Exaone4", {**SIZES, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
    "deepseek-v2": ("DeepseekV2", MLA),
    "deepseek-v2-groups": ("DeepseekV2", {**MLA, **GROUPS, "topk_method": "group_limited_greedy", "q_lora_rank": 24}),
    "deepseek-v3": ("DeepseekV3", {**MLA, **GROUPS, "q_lora_rank": 24, "attention_bias": True}),
    "deepseek-v3-yarn": (
        "DeepseekV3",
        {**MLA, **GROUPS, "rope_parameters": {**YARN, "original_max_position_embeddings": 16}, "norm_topk_prob": False},
    ),
}


def model_of(case: str) -> Any:
    family, sizes = CASES[case]
    model = tiny(family, **sizes)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data.uniform_(-0.5, 0.5)
    return model


native = pytest.mark.skipif(
    build.load().kernels is None and "not built" not in build.load().reason, reason=f"no native kernels: {build.load().reason}"
)


@native
@pytest.mark.parametrize("case", CASES)
def test_greedy_as_transformers(case: str) -> None:
    model = model_of(case)
    runner = native_of(model)
    check_against_generate(model, runner)
    same_bits(runner)
    runner.close()


def same_bits(runner: NativeDecoder) -> None:
    """A prompt's logits alone, in two chunks beside others, and in a batch."""
    alone, chunked = Requests(runner, 1), Requests(runner, 2)
    expected = [alone.run([(alone.request(prompt), 0, len(prompt))])[0] for prompt in PROMPTS]
    requests = [chunked.request(prompt) for prompt in PROMPTS]
    chunked.run([(one, 0, 3) for one in requests])
    for found, one in zip(chunked.run([(one, 3, len(one.tokens)) for one in requests]), expected, strict=True):
        assert found.equal(one)


@pytest.mark.parametrize("case", CASES)
def test_a_folder_says_what_the_model_says(case: str, tmp_path: Path) -> None:
    model = model_of(case)
    model.save_pretrained(tmp_path)
    assert load(tmp_path).config == load(model).config


@pytest.mark.parametrize("dtype", ["stored", "bfloat16", "int8"])
def test_biases_of_routers_keep_their_precision(dtype: str, tmp_path: Path) -> None:
    """As transformers keeps them: 16 bits do not tell them apart."""
    model = model_of("deepseek-v3").to(torch.bfloat16)
    bias = 8 + 0.01 * torch.arange(8)
    model.model.layers[1].mlp.gate.e_score_correction_bias = bias
    model.save_pretrained(tmp_path)
    for source in (model, tmp_path):
        assert dict(leaves(load(source, dtype=dtype).weights))["layers.1.router_bias"].equal(bias)


@pytest.mark.parametrize("case", CASES)
def test_the_torch_twin(case: str) -> None:
    model = model_of(case)
    requests = Requests(decoder_of(model), 1)
    found = requests.run([(requests.request(prompt), 0, len(prompt)) for prompt in PROMPTS])
    for prompt, logits in zip(PROMPTS, found, strict=True):
        with torch.no_grad():
            torch.testing.assert_close(logits, model(torch.tensor([prompt])).logits[0, -1], rtol=2e-4, atol=2e-4)


@native
@pytest.mark.parametrize(
    ("case", "kind"),
    every_other(("deepseek-v2-groups", "opt-350m", "phi-norms", "stablelm-norms", "cohere-norms"), ("bfloat16", "int8", "int4")),
)
def test_every_weight_type(case: str, kind: str) -> None:
    """As the torch twin with the same weights, the same bits in every batch, and with every weight put anew."""
    model = model_of(case)
    config = from_hf(model.config.to_dict())
    weights = from_state(config, model.to(torch.bfloat16).state_dict())
    weights = weights if kind == "bfloat16" else quantize(weights, kind)
    runner = NativeDecoder(config, weights, num_blocks=64, cache_dtype=torch.float32, threads=2)
    same_bits(runner)
    runner.free_memory()
    for role, leaf in (*leaves(weights), *([("head", weights.embed)] if weights.head is None else [])):
        runner.put(role, leaf)
    cache = KVCache(head_shapes(config), num_blocks=64, block_size=16, dtype=torch.float32)
    errors = []
    for token in range(1, 25):
        sides = [Requests(each, 0) for each in (runner, Decoder(config, weights, cache, torch.float32))]
        native, twin = (side.run([(side.request([token]), 0, 1)])[0] for side in sides)
        errors.append(float((native - twin).norm() / twin.norm()))
    assert sorted(errors)[16] < (1e-4 if kind != "bfloat16" or cpu.isa() != "avx512bf16" else 0.02), errors  # but for ties
    runner.close()


def test_layers_of_several_tokens_ahead_are_not_read() -> None:
    model = model_of("deepseek-v3")
    state = model.state_dict() | {"model.layers.2.eh_proj.weight": torch.ones(1), "model.layers.2.mlp.gate.weight": torch.ones(1)}
    assert len(from_state(from_hf(model.config.to_dict()), state).layers) == 2
    with pytest.raises(MisfitError, match=r"does not have these weights: model\.layers\.1\.eh_proj\.weight"):
        from_state(from_hf(model.config.to_dict()), state | {"model.layers.1.eh_proj.weight": torch.ones(1)})


def test_internlm_is_llama_with_biases() -> None:
    """Its code is not in transformers: a Llama's weights under its configuration."""
    model = tiny("Llama", **SIZES, attention_bias=True)
    values = model.config.to_dict()
    del values["attention_bias"]
    config = from_hf({**values, "model_type": "internlm", "bias": True})
    weights = from_state(config, model.state_dict())
    assert config.qkv_bias and config.out_bias and weights.layers[0].out_bias is not None


def test_names_of_older_files() -> None:
    """Without the prefix of the whole model, with buffers of masks, and with other names of the head."""
    gpt2, neox = model_of("gpt2"), model_of("gpt-neox")
    old = {name.removeprefix("transformer."): weight for name, weight in gpt2.state_dict().items() if name != "lm_head.weight"}
    old["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    assert from_state(from_hf(gpt2.config.to_dict()), old).layers[1].mlp is not None
    head = neox.state_dict()["lm_head.weight"]
    renamed = {name.replace("lm_head", "embed_out"): weight for name, weight in neox.state_dict().items()}
    assert from_state(from_hf(neox.config.to_dict()), renamed).head.equal(head)


@native
@pytest.mark.parametrize("case", ["bloom", "cohere-norms", "falcon-groups", "gpt-neo", "opt-350m", "phi"])
def test_instruction_sets_agree(case: str) -> None:
    """AVX-512 adds as AVX2 does, bit for bit; plain C, which fuses no products with sums, within rounding."""
    model, used = model_of(case), cpu.isa()
    config = from_hf(model.config.to_dict())
    weights = from_state(config, model.state_dict())
    try:
        found = {isa: logits_of(isa, config, weights) for isa in ("portable", "avx2", "avx512") if cpu.use_isa(isa)}
    finally:
        assert cpu.use_isa(used)
    for isa, rows in found.items():
        for one, expected in zip(rows, found.get("avx2", found["portable"]), strict=True):
            assert one.equal(expected) if isa != "portable" else float((one - expected).norm() / expected.norm()) < 1e-3

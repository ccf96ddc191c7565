"""Models that this package has no code for, through transformers and the paged cache, against `generate` in fp32."""

from typing import Any

import pytest
import torch

from slipstream.inference.generic import GenericDecoder, cache_shapes, open_model
from slipstream.inference.kv_cache import KVCache
from slipstream.inference.models import UnsupportedModel
from tests.inference.twins import SIZES, VOCAB, check_against_generate, tiny

ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
GPT2 = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, **ENDS}
FALCON = {**SIZES, "num_kv_heads": 2}
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {  # the class, its sizes, whether all requests share a forward
    "gpt2": ("GPT2", GPT2, True),
    "gpt-neox": ("GPTNeoX", SIZES, True),
    "opt": ("OPT", {**SIZES, "ffn_dim": 96, "word_embed_proj_dim": 64}, True),
    "bloom": ("Bloom", {"vocab_size": VOCAB, "hidden_size": 64, "n_layer": 2, "n_head": 4, **ENDS}, False),
    "falcon": ("Falcon", FALCON, False),
    "falcon-alibi": ("Falcon", {**FALCON, "alibi": True, "new_decoder_architecture": False}, False),
    "phi": ("Phi", SIZES, True),
    "phi3-window": ("Phi3", {**SIZES, "sliding_window": 8}, True),
    "stablelm": ("StableLm", SIZES, True),
    "olmo2": ("Olmo2", SIZES, True),
    "cohere": ("Cohere", SIZES, True),
    "granite": ("Granite", {**SIZES, "attention_multiplier": 0.3, "residual_multiplier": 0.5}, True),
    "gemma2": ("Gemma2", {**SIZES, "head_dim": 32, "sliding_window": 8, "attn_logit_softcapping": 2.0}, True),
    "gptj": ("GPTJ", {**GPT2, "rotary_dim": 8}, False),
    "mpt": ("Mpt", {"vocab_size": VOCAB, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 64, **ENDS}, False),
}


def generic(model: Any) -> GenericDecoder:
    return GenericDecoder(model, KVCache(cache_shapes(model), num_blocks=64, block_size=4, dtype=torch.float32))


@pytest.mark.parametrize("case", CASES)
def test_greedy_as_transformers(case: str) -> None:
    family, sizes, fused = CASES[case]
    model = tiny(family, **sizes)
    runner = generic(model)
    assert runner._fused == fused
    check_against_generate(model, runner)


def test_refused_in_one_sentence(tmp_path: Any) -> None:
    mamba = tiny("Mamba", vocab_size=VOCAB, hidden_size=32, state_size=4, num_hidden_layers=1, **ENDS)
    with pytest.raises(UnsupportedModel, match="MambaForCausalLM is no decoder with a cache of keys and values"):
        cache_shapes(mamba)
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(UnsupportedModel, match="transformers cannot open"):
        open_model(tmp_path)

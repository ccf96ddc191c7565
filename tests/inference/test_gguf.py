"""GGUF files of architectures that run by transformers' code, as llama.cpp's converter writes them, and their tokenizers."""

import builtins
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import slipstream
from slipstream.inference.families import UnsupportedModel
from slipstream.inference.gguf_file import open_gguf
from slipstream.world.extras import MissingPackageError
from tests.inference.test_load import write_gguf
from tests.inference.twins import NEW, PROMPTS, SIZES, VOCAB, tiny

TOKENS = ["<end>", "Ġ", *map(chr, range(33, 127)), *map(chr, range(174, 205)), "ab"]
LONGROPE: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 1e4, "attention_factor": 1.2}
LONGROPE |= {"short_factor": [1.5] * 6, "long_factor": [4.0] * 6}
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # the class, its sizes, and what its file says more
    "gpt2": ("GPT2", {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": None}, {}),
    "stablelm": ("StableLm", {**SIZES, "partial_rotary_factor": 0.5, "use_qkv_bias": True}, {"rope.dimension_count": 8}),
    "starcoder2": ("Starcoder2", {**SIZES, "rope_theta": 5e4, "sliding_window": None}, {"rope.freq_base": 5e4}),
    "phi3": (
        "Phi3",
        {
            **SIZES,
            "sliding_window": 8,
            "max_position_embeddings": 128,
            "original_max_position_embeddings": 48,
            "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.75},
        },
        {
            "attention.sliding_window": 8,
            "rope.dimension_count": 12,
            "rope.freq_base": 1e4,
            "rope.scaling.original_context_length": 48,
            "rope.scaling.attn_factor": 1.2,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            **SIZES,
            "head_dim": 32,
            "query_pre_attn_scalar": 16,
            "sliding_window": 8,
            "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": LINEAR},
        },
        {"attention.key_length": 32, "attention.sliding_window": 8, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "gemma2": (
        "Gemma2",
        {**SIZES, "head_dim": 256, "sliding_window": 8, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
        {"attention.key_length": 256, "attention.sliding_window": 8, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    ),
}


def written(path: Path, case: str, changes: dict[str, Any] | None = None) -> Any:
    """The model of which the file is."""
    family, sizes, says = CASES[case]
    model = tiny(family, **sizes | ({"num_hidden_layers": 6} if case == "gemma3" else {}))
    config = model.config
    writer = gguf.GGUFWriter(path, case)
    norm = "layer_norm_rms_epsilon" if hasattr(config, "rms_norm_eps") else "layer_norm_epsilon"
    eps = next(value for name, value in config.to_dict().items() if name.endswith(("norm_eps", "norm_epsilon")))
    values: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": getattr(config, "intermediate_size", 4 * config.hidden_size),
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", config.num_attention_heads),
        f"attention.{norm}": eps,
        **says,
        **(changes or {}),
    }
    for key, value in values.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{case}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] + [1] * (VOCAB - 1))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[case.upper()], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.numpy()
        if case == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            array = array.T
        elif case.startswith("gemma") and "norm" in name:
            array = array + 1
        stored_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored_name is not None, name
        writer.add_tensor(stored_name, np.ascontiguousarray(array))
    if case == "phi3":
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(LONGROPE[f"{length}_factor"], dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.mark.parametrize("case", CASES)
def test_serves_as_the_model_it_was_written_from(case: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    model = written(path, case)
    model.generation_config.eos_token_id = 0
    with slipstream.init_inference(path, dtype="fp32", device="cpu") as engine:
        assert engine.engine.max_context == (48 if case == "phi3" else 64)
        for prompt in PROMPTS:
            expected = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, pad_token_id=0)[0, len(prompt) :]
            completion = engine.generate(prompt, max_new_tokens=NEW)
            assert completion.token_ids == expected.tolist()
        answer = engine.generate("ab a", max_new_tokens=2)
        assert answer.token_ids == engine.generate([TOKENS.index(one) for one in ("ab", "Ġ", "a")], max_new_tokens=2).token_ids
        assert "Ġ" not in answer.text


def test_in_bf16_and_quantized(tmp_path: Path) -> None:
    written(tmp_path / "m.gguf", "gpt2")
    for dtype in (None, "int4"):
        with slipstream.init_inference(tmp_path / "m.gguf", dtype=dtype, device="cpu") as engine:
            assert {one.dtype for one in engine.engine.runner.model.parameters()} == {torch.bfloat16}
            assert len(engine.generate([5, 6, 7], max_new_tokens=3, ignore_eos=True).token_ids) == 3


def test_refused_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"

    def refused(message: str) -> None:
        with pytest.raises(UnsupportedModel, match=message):
            open_gguf(path, torch.float32)

    written(path, "starcoder2", {"rope.scaling.type": "yarn"})
    refused(r"its rope scaling \(yarn\) is not supported for such a file")
    written(path, "starcoder2", {"feed_forward_length": 80})
    refused(r"its model.layers.0.mlp.c_fc.weight is \[96, 64\], Starcoder2ForCausalLM's is \[80, 64\]")
    written(path, "starcoder2", {"block_count": 3})
    refused("it lacks model.layers.2.input_layernorm.bias, .* of Starcoder2ForCausalLM")
    path.write_bytes(path.read_bytes().replace(b"starcoder2", b"starcoder9"))
    refused("m.gguf: GGUF model with architecture starcoder9 is not supported yet")
    real = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", lambda name, *a, **k: real("no_" * (name == "gguf") + name, *a, **k))
    with pytest.raises(
        MissingPackageError, match=r"m\.gguf needs the package no_gguf, which is not installed: pip install '\.\[serve\]'"
    ):
        open_gguf(path, torch.float32)


def test_what_transformers_cannot_make_is_named(tmp_path: Path) -> None:
    """An architecture without heads, and sizes that do not fit: both raise errors of kinds of their own."""
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny("Llama", **SIZES), "llama", {})
    file = path.read_bytes()
    place = file.index(b"llama.attention.head_count") + len(b"llama.attention.head_count") + 4
    for changed in (file.replace(b"llama", b"mamba"), file[:place] + b"\x07\0\0\0" + file[place + 4 :]):
        path.write_bytes(changed)
        with pytest.raises(UnsupportedModel, match="transformers cannot make a causal language model of"):
            open_gguf(path, torch.float32)

"""Upcycling: the mixture computes what the dense model did."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from slipstream.checkpoint import CheckpointError, convert
from slipstream.launch import cli

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "intermediate_size": 48,
    "head_dim": 8,
}


def saved(kind: str, folder: Path, **changes: Any) -> Any:
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**SIZES | changes))
    model.save_pretrained(str(folder))
    return model.eval()


@pytest.mark.parametrize(
    ("kind", "mixture"), [("Llama", "Mixtral"), ("Mistral", "Mixtral"), ("Qwen2", "Qwen2Moe"), ("Qwen3", "Qwen3Moe")]
)
@pytest.mark.parametrize("tied", [False, True])
def test_the_mixture_begins_as_the_dense_model(kind: str, mixture: str, tied: bool, tmp_path: Path) -> None:
    dense = saved(kind, tmp_path / "dense", tie_word_embeddings=tied)
    k = ["--top-k", "3"] if tied else []
    assert cli.main(["convert", str(tmp_path / "dense"), str(tmp_path / "moe"), "--upcycle", "4", *k]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "moe")).eval()
    assert type(model).__name__ == f"{mixture}ForCausalLM"
    ids = torch.arange(20).view(2, 10)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, dense(ids).logits)
    assert model.config.num_experts_per_tok == model.model.layers[0].mlp.gate.top_k == (3 if tied else 2)
    experts = model.model.layers[0].mlp.experts
    assert experts.num_experts == 4 and torch.equal(experts.down_proj[0], experts.down_proj[3])
    router = model.model.layers[1].mlp.gate.weight
    assert 0.01 < router.std() < 0.03


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}),
        ("Qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 28}),
        ("Qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}),
        ("Mistral", {"sliding_window": 4}),
        ("Llama", {"sliding_window": 4}),
    ],
)
def test_the_mixture_attends_as_the_dense_model(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    dense = saved(kind, tmp_path / "dense", initializer_range=0.5, **changes)
    convert(tmp_path / "dense", tmp_path / "moe", "hf", num_experts=2)
    model = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "moe")).eval()
    ids = torch.arange(20).view(2, 10)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, dense(ids).logits, rtol=1e-4, atol=1e-4)


def test_models_without_a_mixture_are_refused(tmp_path: Path) -> None:
    saved("Llama", tmp_path / "biased", attention_bias=True)
    with pytest.raises(CheckpointError, match=r"MixtralForCausalLM has no bias for 'model\.layers\.0\.self_attn"):
        convert(tmp_path / "biased", tmp_path / "x", "hf", num_experts=4)
    saved("Llama", tmp_path / "dense")
    for num_experts, k in ((1, 2), (4, 5), (4, 0)):
        with pytest.raises(CheckpointError, match=f"--upcycle {num_experts}: a token uses {k} experts"):
            convert(tmp_path / "dense", tmp_path / "x", "hf", num_experts=num_experts, top_k=k)
    with pytest.raises(CheckpointError, match=r"top_k \(3\) is of the mixture that num_experts"):
        convert(tmp_path / "dense", tmp_path / "x", "hf", top_k=3)
    with pytest.raises(CheckpointError, match="max_shard_size, num_experts: for Hugging Face folders only; to='slipstream' keeps"):
        convert(tmp_path / "dense", tmp_path / "x", "slipstream", max_shard_size="1GB", num_experts=4)
    saved("Qwen3", tmp_path / "mixed", use_sliding_window=True, sliding_window=4, max_window_layers=1)
    with pytest.raises(CheckpointError, match="1 of 2 layers attend without the window of 4 tokens"):
        convert(tmp_path / "mixed", tmp_path / "x", "hf", num_experts=4)
    config = tmp_path / "dense" / "config.json"
    config.write_text(config.read_text().replace("{", '{"quantization_config": {"quant_method": "fp8"},', 1))
    with pytest.raises(CheckpointError, match="the model is quantized"):
        convert(tmp_path / "dense", tmp_path / "x", "hf", num_experts=4)
    saved("Olmo", tmp_path / "olmo")
    with pytest.raises(
        CheckpointError, match="a model of type 'olmo' has no mixture of experts; use one of llama, mistral, qwen2, qwen3"
    ):
        convert(tmp_path / "olmo", tmp_path / "x", "hf", num_experts=4)
    assert not (tmp_path / "x").exists()

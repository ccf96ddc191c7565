"""Exports of compressed models: transformers loads what was trained, and our engine serves the codes that training ended with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import slipstream
from slipstream import compression
from slipstream.compression.quantize import served as served_codes
from slipstream.inference.load import load
from slipstream.inference.weights import leaves
from slipstream.ops.matrices import Int4, Int8
from tests.unit.test_compression import block, technique

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}
IDS = torch.arange(24).view(2, 12)
ROLES = {"self_attn.q_proj": "q", "self_attn.o_proj": "out", "mlp.gate_proj": "mlp.gate", "mlp.down_proj": "mlp.down"}


def llama(**more: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=False, **more))


def served(bits: int, modules: list[str] | None = None) -> dict[str, Any]:
    shared = {"quantization_type": "served", "quantize_weight_in_forward": True}
    return technique(shared, modules or ["proj", "lm_head"], start_bits=bits, target_bits=bits)


def trained(model: Any, config: dict[str, Any], stage: int = 0, dtype: str = "fp32") -> None:
    """A few steps by an engine, which ends."""
    more = {} if dtype == "fp32" else {dtype: {"enabled": True}}
    settings = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    engine, *_ = slipstream.initialize(model=model, config={**settings, **config, **more, "zero_optimization": {"stage": stage}})
    for _ in range(3):
        engine.backward(engine(input_ids=IDS, labels=IDS).loss)
        engine.step()
    engine.destroy()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("bits", [8, 4])
def test_codes_that_training_ended_with_are_served(bits: int, dtype: str, tmp_path: Path) -> None:
    model, config = llama(), block(weight_quantization=served(bits))
    trained(model, config, 3 if bits == 4 else 1, dtype)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, compression.LinearLayer_Compress)}
    at_last = {name: served_codes(layer.weight.detach(), bits) for name, layer in layers.items()}
    outputs = model.eval()(IDS).logits.detach()
    assert len(at_last) == 15 and compression.export(model, config, tmp_path) is model
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(IDS).logits, outputs, atol=1e-5 if dtype == "fp32" else 3e-2, rtol=1e-5)
    loaded = load(tmp_path, dtype=f"int{bits}")
    found, compared = dict(leaves(loaded.weights)), 0
    for name, codes in at_last.items():
        if name == "lm_head":
            m = found["head"] if bits == 8 else None
        else:
            _, _, layer, *part = name.split(".")
            m = found.get(f"layers.{layer}.{ROLES.get('.'.join(part))}")
        if m is not None:
            assert isinstance(m, Int8 if bits == 8 else Int4)
            assert all(torch.equal(one, other) for one, other in zip(m, codes, strict=True)), name
            compared += 1
    assert compared == (9 if bits == 8 else 8)
    assert (tmp_path / "slipstream_codes.safetensors").exists() == (bits == 4)
    engine = slipstream.init_inference(str(tmp_path), dtype=f"int{bits}")
    assert engine.generate(IDS[:1], max_new_tokens=3).shape == (1, 15)


def test_codes_do_not_follow_from_rounded_weights(tmp_path: Path) -> None:
    """Why they are saved: without the file, other grids of int4 are found in bf16."""
    model, config = llama().bfloat16(), block(weight_quantization=served(4, ["proj"]))
    compression.init_compression(model, config)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 2:
                param.copy_(torch.randn_like(param) ** 3)  # heavy tails: groups that do not use all levels
    codes = served_codes(model.get_submodule("model.layers.0.mlp.up_proj").weight.detach(), 4)
    compression.export(model, config, tmp_path)
    same = load(tmp_path, dtype="int4").weights.layers[0].dense_mlp.up
    assert all(torch.equal(one, other) for one, other in zip(same, codes, strict=True))
    assert isinstance(load(tmp_path, dtype="int8").weights.layers[0].q, Int8)
    assert load(tmp_path, dtype="int4", group_size=16).weights.layers[0].q[1].shape == (64, 4)
    (tmp_path / "slipstream_codes.safetensors").rename(tmp_path / "kept")
    other = load(tmp_path, dtype="int4").weights.layers[0].dense_mlp.up
    assert (other[1] != codes[1]).float().mean() > 0.3
    with torch.no_grad():
        model.get_submodule("model.layers.0.mlp.up_proj").weight.mul_(1.01)
    model.save_pretrained(tmp_path)
    (tmp_path / "kept").rename(tmp_path / "slipstream_codes.safetensors")
    with pytest.raises(ValueError, match=r"has codes of another model.layers.0.mlp.up_proj.weight than the model's"):
        load(tmp_path, dtype="int4")
    assert isinstance(load(tmp_path, dtype="bfloat16").weights.layers[0].q, Tensor)


def pruned(model: Any, **techniques: Any) -> tuple[dict[str, Any], Tensor]:
    """Compressed by a config, and the outputs of the masked model."""
    config = block(**techniques)
    compression.init_compression(model, config)
    return config, model.eval()(IDS).logits.detach()


HEADS = technique({"num_heads": 4}, ["self_attn.o_proj"], [["q_proj", "k_proj", "v_proj"]], dense_ratio=0.5)


def test_heads_and_their_number(tmp_path: Path) -> None:
    model = llama()
    config, masked = pruned(model, head_pruning=HEADS, weight_quantization=served(8))
    codes_of = served_codes(model.get_submodule("model.layers.1.mlp.up_proj").weight.detach(), 8)
    compression.export(model, config, tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (again.config.num_attention_heads, again.config.head_dim, again.config.num_key_value_heads) == (2, 16, 2)
    torch.testing.assert_close(again(IDS).logits, masked, atol=1e-5, rtol=1e-4)
    layer = load(tmp_path, dtype="int8").weights.layers[1]
    assert torch.equal(layer.dense_mlp.up[0], codes_of[0]) and layer.q[0].shape == (32, 64)


def bert() -> Any:
    torch.manual_seed(0)
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))


def test_rows_of_bert_and_their_number(tmp_path: Path) -> None:
    rows = technique({"method": "topk"}, ["intermediate.dense"], [["layer.*[0-9].output.dense"]], dense_ratio=0.25)
    model = bert()
    config, masked = pruned(model, row_pruning=rows)
    compression.export(model, config, tmp_path)
    again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert again.config.intermediate_size == 24 and not (tmp_path / "slipstream_codes.safetensors").exists()
    torch.testing.assert_close(again(IDS).logits, masked, atol=1e-5, rtol=1e-4)


def test_fewer_layers_of_a_teacher(tmp_path: Path) -> None:
    teacher, student = bert(), transformers.BertForMaskedLM(transformers.BertConfig(**SIZES | {"num_hidden_layers": 1}))
    reduction = {"enabled": True, "module_name_prefix": "bert.encoder.layer", "teacher_layer": [1], "other_module_name": ["cls"]}
    config = block(layer_reduction=reduction)
    compression.init_compression(student, config, teacher)
    compression.export(student, config, tmp_path)
    again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert len(again.bert.encoder.layer) == 1
    own = again.bert.encoder.layer[0].output.dense.weight
    assert torch.equal(own, teacher.bert.encoder.layer[1].output.dense.weight)


def test_what_transformers_cannot_say_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    heads = technique({"num_heads": 4}, ["attention.output.dense"], [["self.query", "self.key", "self.value"]], dense_ratio=0.5)
    model = bert()
    config, masked = pruned(model, head_pruning=heads)
    with pytest.raises(ValueError, match=r"BertConfig cannot say .*self.query.weight has shape \(32, 64\), and .* \(64, 64\)"):
        compression.export(model, config, tmp_path)
    torch.testing.assert_close(model(IDS).logits, masked, atol=1e-5, rtol=1e-4)  # cleaned, and of use
    zeros = heads | {"different_groups": {"a": {k: v for k, v in heads["different_groups"]["a"].items() if k != "related_modules"}}}
    model = bert()
    config, masked = pruned(model, head_pruning=zeros)
    compression.export(model, config, tmp_path)
    again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(IDS).logits, masked, atol=1e-5, rtol=1e-4)

    gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=16))
    compression.convert_conv1d_to_linear(gpt, transformers.pytorch_utils.Conv1D)
    with pytest.raises(ValueError, match="GPT2Config cannot say"):
        compression.export(gpt, block(), tmp_path)
    grouped = llama(num_key_value_heads=2)
    config, _ = pruned(grouped, head_pruning=HEADS)
    with pytest.raises(ValueError, match=r"k_proj has 32 outputs, and the heads have 64: several share a key"):
        compression.redundancy_clean(grouped, config)
    with pytest.raises(ValueError, match="saves models of transformers"):
        compression.export(nn.Linear(2, 2), block(), tmp_path)
    model = llama()
    inputs = technique({"range_calibration": "static"}, ["up_proj"], bits=8)
    config, _ = pruned(model, activation_quantization=inputs)
    compression.export(model, config, tmp_path)
    assert "does not round the inputs of 2 layers (model.layers.0.mlp.up_proj)" in caplog.text
    assert "input_range" not in "".join(transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict())

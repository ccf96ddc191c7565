"""Files of other tools, written here by their documented layouts: the values of each matrix, and an engine's answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import slipstream
from slipstream.inference.load import load
from slipstream.inference.weights import leaves
from slipstream.ops.matrices import Int4, Int8, dequantize
from tests.inference.twins import SIZES, tiny

PROMPT = [5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]
Tensors = dict[str, torch.Tensor]


def words(codes: torch.Tensor, dim: int, places: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Pack 8 codes along `dim` into an int32, code j at place places[j]."""
    codes = codes.movedim(dim, -1).long()
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % 8)).unflatten(-1, (-1, 8))
    word = sum(codes[..., j] << 4 * place for j, place in enumerate(places))
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32).movedim(-1, dim).contiguous()


class Quantized:
    """Codes of a random matrix [out, in], a scale and a zero for each row and group."""

    def __init__(self, w: torch.Tensor, group: int, *, symmetric: bool, group_of: torch.Tensor | None = None) -> None:
        out, features = w.shape
        self.group_of = torch.arange(features) // group if group_of is None else group_of
        num = int(self.group_of.max()) + 1
        self.scale = (torch.rand(out, num) * 0.05 + 0.01).half().float()
        self.zero = torch.full((out, num), 8) if symmetric else torch.randint(1, 15, (out, num))
        scale, zero = self.scale[:, self.group_of], self.zero[:, self.group_of]
        self.codes = (w.float() / scale + zero).round().clamp(0, 15).long()
        self.value = (self.codes - zero) * scale


def gptq(name: str, q: Quantized, less: int = 1) -> Tensors:
    parts = {"qweight": words(q.codes.T, 0), "qzeros": words(q.zero.T - less, 1), "scales": q.scale.T.half().contiguous()}
    return {f"{name}.{part}": value for part, value in {**parts, "g_idx": q.group_of.int()}.items()}


def awq(name: str, q: Quantized) -> Tensors:
    places = (0, 4, 1, 5, 2, 6, 3, 7)
    parts = {"qweight": words(q.codes.T, 1, places), "qzeros": words(q.zero.T, 1, places), "scales": q.scale.T.half().contiguous()}
    return {f"{name}.{part}": value for part, value in parts.items()}


def compressed(name: str, q: Quantized) -> Tensors:
    parts = {"packed": words(q.codes, 1), "scale": q.scale.half()}
    parts |= {"shape": torch.tensor(q.codes.shape)}
    if bool((q.zero != 8).any()):
        parts["zero_point"] = words(q.zero, 0)
    if q.group_of.tolist() != sorted(q.group_of.tolist()):
        parts["g_idx"] = q.group_of.int()
    return {f"{name}.weight_{part}": value for part, value in parts.items()}


CT = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
CT_INT4 = CT | {"config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}}}
FORMS: dict[str, tuple[dict[str, Any], Callable[[str, Quantized], Tensors]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4}, gptq),
    "gptq_v2": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}, lambda name, q: gptq(name, q, 0)),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}, awq),
    "compressed-tensors": (CT_INT4, compressed),
}


def written(folder: Path, quantization: dict[str, Any], write: Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]) -> Any:
    """A folder whose layers' matrices `write` has quantized, and the model with their values."""
    model = tiny("Llama", **{**SIZES, "hidden_size": 64, "intermediate_size": 128})
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        parts, value = write(name.removesuffix(".weight"), tensors.pop(name))
        tensors |= parts
        model.get_parameter(name).data.copy_(value)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return model


def matrices(loaded: Any) -> dict[str, Any]:
    """Of layer 1, by role."""
    return {role: m for role, m in leaves(loaded.weights) if role.startswith("layers.1.") and "norm" not in role}


def expected(model: Any) -> dict[str, torch.Tensor]:
    layer = model.model.layers[1]
    named = {"q": layer.self_attn.q_proj, "k": layer.self_attn.k_proj, "v": layer.self_attn.v_proj, "out": layer.self_attn.o_proj}
    named |= {"mlp.gate": layer.mlp.gate_proj, "mlp.up": layer.mlp.up_proj, "mlp.down": layer.mlp.down_proj}
    return {f"layers.1.{role}": module.weight.data for role, module in named.items()}


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("form", FORMS)
def test_codes_are_kept_exactly(form: str, group: int, symmetric: bool, tmp_path: Path) -> None:
    quantization, write = FORMS[form]

    def quantized(name: str, w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        q = Quantized(w, group, symmetric=symmetric)
        return write(name, q), q.value

    model = written(tmp_path, {**quantization, "group_size": group}, quantized)
    loaded = load(tmp_path)
    for role, value in expected(model).items():
        m = matrices(loaded)[role]
        assert isinstance(m, Int4) and m.scale.shape[1] == value.shape[1] // group
        assert dequantize(m).equal(value), role
    wide = load(tmp_path, dtype="float32")
    assert all(matrices(wide)[role].equal(value) for role, value in expected(model).items())
    with slipstream.init_inference(tmp_path, dtype="fp32", device="cpu", threads=1) as engine:
        reference = model.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False)[0, len(PROMPT) :].tolist()
        assert engine.generate(PROMPT, max_new_tokens=8).token_ids == reference
    with slipstream.init_inference(tmp_path, device="cpu", threads=1) as engine:
        assert "4-bit blocks as stored, else fp32 (from " in engine.description
        assert engine.generate(PROMPT, max_new_tokens=1).usage.completion_tokens == 1


@pytest.mark.parametrize("form", ["gptq", "compressed-tensors"])
def test_groups_out_of_order_are_dequantized(form: str, tmp_path: Path) -> None:
    quantization, write = FORMS[form]

    def quantized(name: str, w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        order = (torch.arange(w.shape[1]) // 32)[torch.randperm(w.shape[1], generator=torch.Generator().manual_seed(3))]
        q = Quantized(w, 32, symmetric=False, group_of=order)
        return write(name, q), q.value

    model = written(tmp_path, {**quantization, "desc_act": True}, quantized)
    loaded = load(tmp_path, dtype="float32")
    assert all(matrices(loaded)[role].equal(value) for role, value in expected(model).items())
    assert f"from {quantization['quant_method']}: groups out of order (act-order), dequantized" in load(tmp_path).opening.why


@pytest.mark.parametrize(("form", "indexed"), [("gptq", True), ("gptq", False), ("awq", False), ("compressed-tensors", False)])
@pytest.mark.parametrize("group", [48, 96])
def test_a_last_group_that_is_smaller_is_dequantized(group: int, form: str, indexed: bool, tmp_path: Path) -> None:
    """Also where as many groups of one size would fit: 128 = 96 + 32."""
    quantization, write = FORMS[form]

    def quantized(name: str, w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        q = Quantized(w, group, symmetric=False)
        parts = write(name, q)
        if not indexed:
            parts.pop(f"{name}.g_idx", None)
        return parts, q.value

    model = written(tmp_path, {**quantization, "group_size": group}, quantized)
    loaded = load(tmp_path, dtype="float32")
    assert all(matrices(loaded)[role].equal(value) for role, value in expected(model).items())


UP = "model.layers.1.mlp.up_proj"
DAMAGED: list[tuple[str, str, Callable[[torch.Tensor], torch.Tensor] | None, str]] = [
    ("gptq", "scales", None, rf"the weights lack {UP}.scales, of a quantized matrix"),
    ("awq", "qzeros", None, rf"the weights lack {UP}.qzeros, of a quantized matrix"),
    ("gptq", "scales", lambda t: t[:1], rf"{UP} has \[128, 1\] scales and \[128, 2\] zeros of \[128, 64\] codes, which do not fit"),
    (
        "gptq",
        "qweight",
        lambda t: t.float(),
        f"{UP}: codes of quantized weights are torch.float32 in the file; read are words of int32",
    ),
    ("gptq", "g_idx", lambda t: t + 5, f"{UP} has .* which do not fit"),
    ("gptq", "g_idx", lambda t: t - 1, f"{UP} has .* which do not fit"),
    ("gptq", "g_idx", lambda t: t[:0], f"{UP} has .* which do not fit"),
    ("gptq", "g_idx", lambda t: t * 0, f"{UP} has .* which do not fit"),
    ("gptq", "g_idx", lambda t: t[:, None], f"{UP} has .* which do not fit"),
    ("compressed-tensors", "weight_scale", lambda t: t[:, 0], f"{UP}: the parts of a quantized matrix do not fit"),
    ("compressed-tensors", "weight_shape", lambda t: t[:1], rf"{UP}: weight_shape is \[128\]; it must be the numbers of rows"),
    ("awq", "qweight", lambda t: t[:-1], f"{UP}: the parts of a quantized matrix do not fit"),
]


@pytest.mark.parametrize(("form", "part", "change", "message"), DAMAGED, ids=map(str, range(len(DAMAGED))))
def test_damaged_parts_are_named(
    form: str, part: str, change: Callable[[torch.Tensor], torch.Tensor] | None, message: str, tmp_path: Path
) -> None:
    quantization, write = FORMS[form]

    def quantized(name: str, w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        q = Quantized(w, 32, symmetric=False)
        return write(name, q), q.value

    written(tmp_path, {**quantization, "group_size": 32}, quantized)
    tensors = load_file(tmp_path / "model.safetensors")
    value = tensors.pop(f"{UP}.{part}")
    tensors |= {} if change is None else {f"{UP}.{part}": change(value).contiguous()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("form", ["block", "channel", "tensor"])
def test_fp8_is_read(form: str, tmp_path: Path) -> None:
    def quantized(name: str, w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        out, features = w.shape
        shape = {"block": (-(-out // 48), -(-features // 32)), "channel": (out, 1), "tensor": (1,)}[form]
        scale = torch.rand(shape) * 0.01 + 0.001
        grown = scale.repeat_interleave(48, 0)[:out].repeat_interleave(32, 1) if form == "block" else scale.view(-1, 1)
        codes = (w / grown).to(torch.float8_e4m3fn)
        suffix = "weight_scale_inv" if form == "block" else "weight_scale"
        return {f"{name}.weight": codes, f"{name}.{suffix}": scale, f"{name}.input_scale": torch.ones(1)}, codes.float() * grown

    quantization: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [48, 32]}
    if form != "block":
        quantization = CT | {"format": "float-quantized", "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float"}}}}
    model = written(tmp_path, quantization, quantized)
    loaded = load(tmp_path, dtype="float32")
    assert all(matrices(loaded)[role].equal(value) for role, value in expected(model).items())
    assert load(tmp_path).opening.why == f"from {quantization['quant_method']}: fp8 weights multiplied by their scales"


def test_int8_is_kept(tmp_path: Path) -> None:
    def quantized(name: str, w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        scale = w.abs().amax(1, keepdim=True) / 127
        codes = (w / scale).round().to(torch.int8)
        return {f"{name}.weight": codes, f"{name}.weight_scale": scale}, codes.float() * scale

    groups = {"g": {"weights": {"num_bits": 8, "type": "int"}}}
    model = written(tmp_path, CT | {"format": "int-quantized", "config_groups": groups}, quantized)
    for role, value in expected(model).items():
        m = matrices(load(tmp_path))[role]
        assert isinstance(m, Int8) and dequantize(m).equal(value)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "gptq", "bits": 3}, "quantized by gptq, with bits 3, are not read; read is 4"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
        (CT | {"config_groups": {"g": {"weights": {"num_bits": 3, "type": "int"}}}}, r"num_bits \('int', 3\)"),
        (CT_INT4 | {"transform_config": {"R1": {}}}, "transform_config"),
        ({"quant_method": "bitsandbytes"}, "weights quantized by bitsandbytes, with quant_method"),
        ({"bits": 4}, "weights quantized by None"),
    ],
)
def test_what_is_not_read(quantization: dict[str, Any], message: str, tmp_path: Path) -> None:
    written(tmp_path, quantization, lambda name, w: ({f"{name}.weight": w}, w))
    with pytest.raises(ValueError, match=message):  # transformers, which would ignore or misread the codes, is not asked
        slipstream.init_inference(tmp_path, device="cpu")

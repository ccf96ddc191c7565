"""Loads a model for the decoder: a Hugging Face folder, a GGUF file, a Slipstream checkpoint or a live model -> `LoadedModel`.

Files are memory-mapped, and a weight stored in the requested dtype is not copied. transformers is not needed, and pickle is never
read. A missing, damaged or unsupported file raises ValueError with one sentence. After an UnsupportedModel, the model may still run
in transformers (`generic`).
"""

from __future__ import annotations

import math
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from slipstream.config import huggingface
from slipstream.inference.config import ModelPart, Rope, TransformerConfig
from slipstream.inference.families import FAMILIES, UnsupportedModel
from slipstream.inference.gguf_file import GgufFile, GgufTensor, form_of, is_block, matrix, read_gguf
from slipstream.inference.models import MisfitError, from_hf, from_state, head_name, ids_of, is_encoder, outline, shape_of
from slipstream.inference.precision import FLOATS, QUANTIZED, Opening, choose, parse_dtype
from slipstream.inference.quantized_files import restored
from slipstream.inference.runner import why_not_native
from slipstream.inference.trained import find
from slipstream.inference.weights import DecoderWeights, mapped, quantize
from slipstream.ops.matrices import Int4, Int8, KQuant, Matrix, blank_of, dequantize, to_kind


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    config: TransformerConfig
    weights: DecoderWeights
    dtype: torch.dtype  # of the computation, and of weights that are not quantized; only routers' biases are fp32
    opening: Opening
    gguf: Mapping[str, Any] = field(default_factory=dict)  # a GGUF file's metadata: tokenizer.ggml.*, tokenizer.chat_template


def load(
    source: Any,
    *,
    dtype: str | torch.dtype = "stored",
    group_size: int = 32,
    device: torch.device | str = "cpu",
    part: ModelPart | None = None,
    by_layer: bool = False,
    devices: int = 1,
) -> LoadedModel:
    """Read a model and move its weights to `device`.

    dtype: "float32", "bfloat16" or "float16": a file's quantized blocks are dequantized. "stored": as in the file (GGUF: blocks of
    Q4 and, on CPUs, Q8_0, Q5_K and Q6_K unchanged, the rest in bfloat16). "int8" or "int4": quantized here, computed in bfloat16 (a
    file's 4-bit blocks are kept for "int4" and dequantized for "int8"). "auto": "stored", except for GGUF files of quantized
    blocks, which follow the rule of `precision`. group_size: weights per scale in int4. part: the part of the model to read.
    by_layer: layers of a folder or GGUF file are only read by `DecoderWeights.read_layer`, one at a time. devices: the number of
    separate memories among which `part` divides the model.
    """
    on = torch.device(device)
    cut_to = None if part is None else partial(_cut, part, on)
    opening = Opening(parse_dtype(dtype), group=group_size, cut=cut_to, by_layer=by_layer, devices=devices)
    loaded = _read(source, opening, on)
    kind, has_head = loaded.opening.kind, loaded.config.has_head
    weights = quantize(loaded.weights, kind, group_size, has_head=has_head) if kind in QUANTIZED else loaded.weights

    def place(role: str, m: Matrix) -> Matrix:
        if isinstance(m, Tensor):
            exact = role.endswith("router_bias")  # the choice of experts depends on differences that bf16 cannot represent
            return m if m.is_meta else m.to(device, torch.float32 if exact else loaded.dtype)
        return type(m)(*(part if part.is_meta else part.to(device) for part in m))

    weights = mapped(weights, place)
    if (read := weights.read_layer) is not None:
        weights.read_layer = lambda index: mapped(read(index), place)
    return replace(loaded, weights=weights)


def _cut(part: ModelPart, device: torch.device, config: TransformerConfig) -> TransformerConfig:
    """Apply `part`. Only the native forward computes with whole inputs, which it takes from all processes; others sum terms."""
    return replace(part, sums=why_not_native(config, device) is not None).of(config)


def _read(source: str | Path | Any, opening: Opening, device: torch.device) -> LoadedModel:
    """Read a model in its stored dtype. Matrices of layers that are to be quantized are quantized one by one."""
    path = Path(source) if isinstance(source, str | Path) else None
    if opening.cut is not None and is_config(source):
        raise ValueError("a model without weights is not split: give a folder, a .gguf file, a checkpoint or a live model")
    if path is not None and path.suffix == ".gguf" and path.is_file():
        return _gguf(path, opening, device)
    opening = opening._replace(kind="stored" if opening.kind == "auto" else opening.kind)
    if is_config(source):
        return _blank(source, opening)
    if path is None:
        return _live(source, opening)
    if path.is_dir():
        return _folder(path, opening)
    if path.is_file():
        raise ValueError(f"{path} is not a model: give a Hugging Face folder or a .gguf file (pickled weights are never read)")
    sources = "a Hugging Face folder, a .gguf file, a Slipstream checkpoint or a live model"
    raise ValueError(f"there is no {path}; give {sources} (nothing is downloaded)")


def _build(config: TransformerConfig, state: Mapping[str, Matrix], opening: Opening, stored: torch.dtype) -> LoadedModel:
    kind, group = opening.kind, opening.group
    if opening.cut is not None:
        config = opening.cut(config)
    dtype = torch.bfloat16 if kind in QUANTIZED else FLOATS.get(kind, stored)

    def convert(m: Matrix) -> Matrix:
        return to_kind(m.contiguous(), kind, group) if kind in QUANTIZED and isinstance(m, Tensor) else m

    blank = partial(blank_of, kind=kind, group=group, dtype=dtype) if opening.by_layer else None
    weights = from_state(config, state, convert, blank)
    return LoadedModel(config=config, weights=weights, dtype=dtype, opening=opening)


class _LazyState(UserDict[str, Any]):
    """Weights by name. Each access calls the weight's reader, and the result is not kept."""

    def __getitem__(self, name: str) -> Matrix:
        matrix: Matrix = self.data[name]()
        return matrix


def _live(model: Any, opening: Opening) -> LoadedModel:
    """Load a PreTrainedModel, or any model with `.config.to_dict()` and `.state_dict()`, and share its storage.

    Raises UnsupportedModel for a PreTrainedModel with modules of the caller's own (slipstream.moe.MoE in place of an MLP), so that
    its own code runs it.
    """
    if not hasattr(model, "state_dict") or not hasattr(getattr(model, "config", None), "to_dict"):
        raise ValueError(f"{type(model).__name__} is not a model: give a Hugging Face folder, a .gguf file or a PreTrainedModel")
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if kinds := {type(tensor).__name__ for tensor in state.values() if is_traceable_wrapper_subclass(tensor)}:
        raise UnsupportedModel(f"weights of the {type(model).__name__} are {', '.join(kinds)}, which only torch's operations read")
    generation = getattr(model, "generation_config", None)
    config = _with_ends(from_hf(model.config.to_dict()), getattr(generation, "eos_token_id", None))
    try:
        return _build(config, state, opening, _stored(state))
    except MisfitError as error:
        if not hasattr(model, "_can_set_experts_implementation"):  # not a PreTrainedModel, so transformers cannot run it
            raise
        raise UnsupportedModel(f"the {type(model).__name__} has modules of its own: {error}") from error


def is_config(source: Any) -> bool:
    """Whether `source` is a transformers configuration: a model whose weights come later (`InferenceEngine.update_weights`)."""
    return hasattr(source, "model_type") and hasattr(source, "to_dict") and not isinstance(source, torch.nn.Module)


def _blank(source: Any, opening: Opening) -> LoadedModel:
    """All weights are zeros, expanded from a scalar: they take no memory until they are packed."""
    values = source.to_dict()
    if not (config := from_hf(values)).has_head:
        kind = type(source).__name__
        raise ValueError(f"a {kind} has no weights, and models that embed texts take no new ones; give the model or its folder")
    stored = str(values.get("dtype") or values.get("torch_dtype") or "float32").removeprefix("torch.")
    kind = opening.kind
    dtype = torch.bfloat16 if kind in QUANTIZED else FLOATS.get(kind) or FLOATS.get(stored, torch.float32)
    zero = torch.zeros((), dtype=dtype)
    weights = mapped(outline(config), lambda role, blank: zero.expand(blank.shape))  # type: ignore[union-attr]
    return LoadedModel(config=config, weights=weights, dtype=dtype, opening=opening)


def _stored(state: Mapping[str, Matrix]) -> torch.dtype:
    first = next(iter(state.values()), None)
    return first.dtype if isinstance(first, Tensor) and first.dtype in FLOATS.values() else torch.float32


def _with_ends(config: TransformerConfig, ends: Any) -> TransformerConfig:
    """Add the end tokens of generation_config, which may have more than the configuration (a chat model's end of turn)."""
    return replace(config, end_ids=tuple(dict.fromkeys((*config.end_ids, *ids_of(ends)))))


# -- A folder --------------------------------------------------------------------------------------------------------------


def _folder(path: Path, opening: Opening) -> LoadedModel:
    if (trained := find(path)) is not None:
        state = trained.state()
        return _build(from_hf(trained.config), state, opening, _stored(state))
    if not (path / "config.json").is_file():
        raise ValueError(f"{path} has neither config.json nor metadata.json: it is no Hugging Face folder and no checkpoint")
    huggingface.check_folder(path)  # so that transformers never sees an invalid file
    values = huggingface.read_config(path / "config.json")
    kind = str(next(iter(values.get("architectures") or ()), ""))
    if "Classification" in kind and not is_encoder(values.get("model_type")):
        raise ValueError(
            f"{path} is a {kind}, a classifier over a decoder, which is not served; served are decoders with a language model "
            "head, or with sentence-transformers' modules.json to embed, and classifiers of one label over BERT and its like"
        )
    quantization = values.get("quantization_config") or {}
    config = from_hf({**values, "quantization_config": None})
    if (path / "modules.json").is_file():  # sentence-transformers: a decoder that embeds
        if config.has_head and config.embed_size:
            raise UnsupportedModel(f"texts are not embedded by this {config.family} model, whose outputs have other features")
        config = replace(config, has_head=False)
    config = _with_ends(config, huggingface.read_generation(path / "generation_config.json").get("eos_token_id"))
    if quantization:
        return _quantized(path, config, values, quantization, opening)
    weights = safetensors_of(path, keep=opening.kind not in QUANTIZED and not opening.by_layer)
    stored = _stored(weights)
    if opening.kind == "int4" and (path / huggingface.CODES).is_file():
        weights = _with_codes(path / huggingface.CODES, weights, opening.group, head_name(config))
    return _build(config, weights, opening, stored)


def _with_codes(file: Path, weights: Mapping[str, Matrix], group: int, head: str) -> Mapping[str, Matrix]:
    """Replace weights by the int4 codes with which they were trained (`compression.export`), where groups have this size."""
    with opened(file) as codes:
        names = {key.removesuffix(".q") for key in codes.keys() if key.endswith(".q")} & {*weights} - {head}  # noqa: SIM118
        shapes = {name: [codes.get_slice(f"{name}.{part}").get_shape()[1] for part in ("q", "scale")] for name in names}
    readers: dict[str, Callable[[], Matrix]] = {name: partial(weights.__getitem__, name) for name in weights}
    coded = [name for name, (half, groups) in shapes.items() if groups * group == 2 * half]
    return _LazyState(readers | {name: partial(_coded, file, name, weights) for name in coded})


def _coded(file: Path, name: str, weights: Mapping[str, Matrix]) -> Matrix:
    """A weight's codes. Raises ValueError if they belong to another weight than the folder's."""
    with opened(file) as codes:
        m = Int4(*(codes.get_tensor(f"{name}.{part}") for part in ("q", "scale", "low")))
    weight = weights[name]
    if isinstance(weight, Tensor) and shape_of(m) == tuple(weight.shape):
        values = dequantize(m)
        if torch.allclose(values, weight.float(), rtol=torch.finfo(weight.dtype).eps, atol=1e-6 * float(values.abs().max())):
            return m
    raise ValueError(f"{file} has codes of another {name} than the model's: delete the file, or export the model anew")


def _quantized(
    path: Path, config: TransformerConfig, values: Mapping[str, Any], quantization: Mapping[str, Any], opening: Opening
) -> LoadedModel:
    """Read a folder whose weights another tool has quantized."""
    if FAMILIES[config.family].transposed:
        raise ValueError(f"quantized weights of {config.family} models, which are stored transposed, are not read")
    stored = FLOATS.get(str(values.get("dtype") or values.get("torch_dtype")).removeprefix("torch."), torch.bfloat16)
    dtype = torch.float32 if opening.kind in QUANTIZED else FLOATS.get(opening.kind, stored)
    state: Any = safetensors_of(path, keep=False)
    readers, kind = restored(state, quantization, keep=opening.kind in ("stored", "int4"), dtype=dtype)
    opening = opening._replace(why=f"from {quantization['quant_method']}" + (f": {kind}" if kind else ""))
    return _build(config, _LazyState(readers), opening, stored)


def safetensors_of(path: Path, *, keep: bool) -> Mapping[str, Matrix]:
    """Read model.safetensors, or the shards of its index. Each tensor is a view of its mapped file.

    keep: files stay mapped as long as their tensors exist. Otherwise a file is mapped for each access, which frees the pages of
    tensors that were read before.
    """
    if not (files := huggingface.weight_files(path)):
        pickled = next(path.glob("*.bin"), None)
        hint = f" ({pickled.name} is pickle, which is never read: save it with safe_serialization=True)" if pickled else ""
        raise ValueError(f"{path} has neither {huggingface.SINGLE} nor {huggingface.INDEX}{hint}")
    state: dict[str, Tensor] = {}
    readers: dict[str, Callable[[], Matrix]] = {}
    for file in files:
        if not file.is_file():
            raise ValueError(f"{path} lacks {file.name}, which its index names")
        with opened(file) as tensors:
            for key in tensors.keys():  # noqa: SIM118 (not a mapping)
                readers[key] = partial(_tensor, file, key)
                if keep:
                    state[key] = tensors.get_tensor(key)
    return state if keep else _LazyState(readers)


def _tensor(file: Path, key: str) -> Tensor:
    with opened(file) as one:
        return one.get_tensor(key)


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as file_opened:
            yield file_opened
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is damaged or cut off: {error}") from None


# -- GGUF ------------------------------------------------------------------------------------------------------------------

_GGUF_FAMILIES = ("llama", "qwen2", "qwen3")
_GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _gguf(path: Path, requested: Opening, device: torch.device) -> LoadedModel:
    file = read_gguf(path)
    config = _gguf_config(path, file)
    kind, why = "stored" if requested.kind == "auto" else requested.kind, ""
    all_forms = (KQuant, Int8, Int4) if device.type == "cpu" else (Int4,)  # those with kernels on the device
    sizes = [(math.prod(one.shape), is_block(one), form_of(one, all_forms) is not None) for one in file.tensors.values()]
    if requested.kind == "auto" and any(block for _, block, _ in sizes):
        mostly = sum(size * (2 * kept - 1) for size, block, kept in sizes if block) >= 0
        kind, why = choose(sum(size for size, _, _ in sizes) // requested.devices, mostly, device)
    forms = {"stored": all_forms, "int4": (Int4,)}.get(kind, ())
    whole = kind == "stored" and device.type == "cpu"  # the embedding and the head are kept in blocks, too
    wide = torch.float32 if kind in QUANTIZED else FLOATS.get(kind, torch.bfloat16)
    llama = file.metadata["general.architecture"] == "llama"

    def read(name: str, stored: GgufTensor) -> Matrix:
        inner = name not in ("token_embd.weight", "output.weight")
        m = matrix(path, name, stored, forms=forms if inner or whole else (), dtype=wide)
        part = name.split(".")[-2]
        heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(part) if llama else None
        return m if heads is None else _unpermute(m, heads)

    readers = {_hf_name(name): partial(read, name, stored) for name, stored in file.tensors.items() if name != "rope_freqs.weight"}
    opening = requested._replace(kind=kind, why=why)
    return replace(_build(config, _LazyState(readers), opening, torch.bfloat16), gguf=file.metadata)


def _hf_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight. An unknown name is returned unchanged, and is then surplus."""
    *prefix, part, suffix = name.split(".")
    if part not in _GGUF_NAMES:
        return name
    return f"model.layers.{prefix[1]}.{_GGUF_NAMES[part]}.{suffix}" if len(prefix) == 2 else f"{_GGUF_NAMES[part]}.{suffix}"


def _unpermute(m: Matrix, heads: int) -> Matrix:
    """Reorder the rows of each head: llama.cpp rotates rows (2i, 2i + 1), Hugging Face rows i and i + D / 2."""

    def ordered(part: Tensor) -> Tensor:
        rows = part.view(torch.uint8).numpy().reshape(heads, len(part) // heads // 2, 2, -1)  # bytes, because numpy has no bfloat16
        return torch.from_numpy(rows.transpose(0, 2, 1, 3).reshape(len(part), -1)).view(part.dtype).view(part.shape)

    return ordered(m) if isinstance(m, Tensor) else type(m)(*map(ordered, m))


def _gguf_config(path: Path, file: GgufFile) -> TransformerConfig:
    family = file.metadata.get("general.architecture")
    if family not in _GGUF_FAMILIES:
        raise UnsupportedModel(f"{path} is a {family!r} model; the supported GGUF families are {', '.join(_GGUF_FAMILIES)}")

    def get(key: str, default: Any = None) -> Any:
        return file.metadata.get(f"{family}.{key}", default)

    if get("expert_count"):
        raise UnsupportedModel(f"{path} has {get('expert_count')} experts per layer; mixtures are read from safetensors only")
    if "token_embd.weight" not in file.tensors:
        raise ValueError(f"{path} has no token_embd.weight, so it is not a language model")
    scaling = {"rope_type": get("rope.scaling.type", "none").replace("none", "default")}
    if scaling["rope_type"] != "default":
        scaling["factor"] = get("rope.scaling.factor")
        scaling["original_max_position_embeddings"] = get("rope.scaling.original_context_length")
    end = file.metadata.get("tokenizer.ggml.eos_token_id")
    turn = file.metadata.get("tokenizer.ggml.eot_token_id")
    values = {
        "model_type": family,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": get("attention.head_count"),
        "num_key_value_heads": get("attention.head_count_kv"),
        "head_dim": get("attention.key_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon", 1e-5),
        "max_position_embeddings": get("context_length", 2048),
        "rope_parameters": {**scaling, "rope_theta": get("rope.freq_base", 10000.0)},
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [token for token in (end, turn) if token is not None],
    }
    huggingface.check_config(values, path)
    config = from_hf(values)
    if get("rope.dimension_count", config.head_dim) != config.head_dim:
        raise UnsupportedModel(f"{path} rotates {get('rope.dimension_count')} of the {config.head_dim} features of a head")
    if "rope_freqs.weight" not in file.tensors:
        return config
    # Llama 3's rope scaling is stored as a divisor per frequency.
    factors = dequantize(matrix(path, "rope_freqs.weight", file.tensors["rope_freqs.weight"]))

    def scaled(rope: Rope) -> Rope:
        return replace(rope, inv_freq=tuple((torch.tensor(rope.inv_freq) / factors).tolist()))

    return replace(config, layers=tuple(replace(layer, rope=layer.rope and scaled(layer.rope)) for layer in config.layers))

"""Read and validate the JSON files of a Hugging Face folder. Errors name the key and the invalid value.

The tables have a `FieldRule` for each key that Slipstream reads or that determines memory sizes; other keys are left to
transformers. null is valid only if a rule says so. All errors are ValueErrors of one sentence; only `read_*` do I/O.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

__all__ = [
    "TOKEN",
    "check_config",
    "check_folder",
    "read_config",
    "read_generation",
    "read_index",
    "read_modules",
    "read_object",
    "read_tokenizer_config",
]


class FieldRule(NamedTuple):
    """A constraint on a value: its description and its test."""

    words: str
    holds: Callable[[Any], bool]

    def __or__(self, other: FieldRule) -> FieldRule:
        return FieldRule(f"{self.words} or {other.words}", lambda value: self.holds(value) or other.holds(value))


def _whole(low: int, high: int) -> FieldRule:
    return FieldRule(f"a whole number from {low:,} to {high:,}", lambda value: type(value) is int and low <= value <= high)


def _number(low: float, high: float) -> FieldRule:
    def holds(value: Any) -> bool:
        return type(value) in (int, float) and math.isfinite(value) and low <= value <= high

    return FieldRule(f"a number from {low:g} to {high:g}", holds)


def _list(rule: FieldRule) -> FieldRule:
    return FieldRule(f"a list, each {rule.words}", lambda value: isinstance(value, list) and all(map(rule.holds, value)))


def _object(rule: FieldRule) -> FieldRule:
    return FieldRule(
        f"an object, each value {rule.words}", lambda value: isinstance(value, dict) and all(map(rule.holds, value.values()))
    )


_NULL = FieldRule("null", lambda value: value is None)
_FLAG = FieldRule("true or false", lambda value: isinstance(value, bool))
_TEXT = FieldRule("a text", lambda value: isinstance(value, str))
_TEXTS = _list(_TEXT)
_OBJECT = FieldRule("an object", lambda value: isinstance(value, dict))
_WIDTH = _whole(1, 1 << 20)
_WIDTHS = _WIDTH | _list(_whole(0, 1 << 20))  # some models have one per layer
_HEADS = _whole(1, 1 << 14)
_SOME = _whole(0, 1 << 20)
_POSITIONS = _whole(1, 1 << 27)
_EPS = _number(0, 1)
_SCALE = _number(1e-9, 1e12)
_THETA = _number(1.001, 1e12)
_IDS = _whole(-1, 1 << 31) | _list(_whole(-1, 1 << 31)) | _NULL

_CONFIG: dict[str, FieldRule] = {
    "model_type": _TEXT,
    "architectures": _TEXTS | _NULL,
    **dict.fromkeys(("vocab_size", "max_vocab_size"), _whole(1, 1 << 27)),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "word_embed_proj_dim"), _WIDTH),
    "ffn_dim": _WIDTHS,
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "n_inner"), _WIDTHS | _NULL),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), _whole(1, 10_000)),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), _HEADS | _list(_HEADS)),
    "num_key_value_heads": _HEADS | _list(_HEADS) | _NULL,
    "head_dim": _HEADS | _NULL,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), _POSITIONS),
    "original_max_position_embeddings": _POSITIONS | _NULL,
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"), _EPS),
    **dict.fromkeys(("hidden_act", "activation_function"), _TEXT),
    "hidden_activation": _TEXT | _NULL,
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias", "norm_topk_prob"), _FLAG),
    **dict.fromkeys(("use_sliding_window", "qkv_bias", "use_bidirectional_attention"), _FLAG | _NULL),
    "sliding_window": _SOME | _POSITIONS | _NULL,
    **dict.fromkeys(("sliding_window_pattern", "decoder_sparse_step"), _whole(1, 10_000)),
    "max_window_layers": _whole(0, 10_000),
    "layer_types": _TEXTS | _NULL,
    "mlp_only_layers": _list(_whole(0, 10_000)) | _NULL,
    **dict.fromkeys(("num_experts", "num_local_experts"), _SOME | _NULL),
    "num_experts_per_tok": _whole(1, 1 << 14),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), _SOME | _list(_SOME)),
    **dict.fromkeys(("rope_theta", "rope_local_base_freq"), _THETA),
    "query_pre_attn_scalar": _SCALE,
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), _number(0, 1e9) | _NULL),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), _OBJECT | _NULL),
    **dict.fromkeys(("text_config", "quantization_config"), _OBJECT | _NULL),
    **dict.fromkeys(("dtype", "torch_dtype"), _TEXT | _NULL),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), _IDS),
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop"), _number(0, 1)),
}
_ROPE: dict[str, FieldRule] = {
    **dict.fromkeys(("rope_type", "type"), _TEXT),
    "rope_theta": _THETA | _NULL,
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor"), _SCALE | _NULL),
    "partial_rotary_factor": _number(1e-3, 1) | _NULL,
    "original_max_position_embeddings": _POSITIONS | _NULL,
    **dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"), _number(0, 1e6) | _NULL),
    **dict.fromkeys(("short_factor", "long_factor"), _list(_SCALE) | _NULL),
    "truncate": _FLAG,
    **dict.fromkeys(("full_attention", "sliding_attention"), _OBJECT | _NULL),
}
_NEEDED = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}  # rope type -> required keys
_GENERATION: dict[str, FieldRule] = {
    "eos_token_id": _IDS,
    "do_sample": _FLAG | _NULL,
    "temperature": _number(0, 100) | _NULL,
    "top_k": _whole(0, 1 << 31) | _NULL,
    "top_p": _number(1e-6, 1) | _NULL,
    "min_p": _number(0, 1) | _NULL,
    "repetition_penalty": _number(0.01, 100) | _NULL,
}
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
TOKEN = ("content", *_FLAGS)  # fields of a token in tokenizer_config.json
_TOKEN = FieldRule("an object with a text as content", lambda value: _is_token(value))
_TEMPLATE = FieldRule("an object with texts as name and template", lambda value: _is_template(value))
_TOKENIZER: dict[str, FieldRule] = {
    "chat_template": _TEXT | _list(_TEMPLATE) | _object(_TEXT) | _NULL,
    "added_tokens_decoder": FieldRule("an object of tokens by their numbers", lambda value: _are_tokens(value)),
    **{f"{role}_token": _TEXT | _TOKEN | _NULL for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")},
}
_INDEX: dict[str, FieldRule] = {"weight_map": _object(_TEXT)}


def _is_token(value: Any) -> bool:
    flags = isinstance(value, dict) and all(isinstance(value.get(flag, False), bool) for flag in _FLAGS)
    return flags and isinstance(value.get("content"), str)


def _is_template(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("name", "template"))


def _are_tokens(value: Any) -> bool:
    return isinstance(value, dict) and all(key.isdecimal() and _TOKEN.holds(token) for key, token in value.items())


SPARSE_PATTERN = "slipstream_sparse_attention"  # attribute of the config of a model with block-sparse attention
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CODES = "slipstream_codes.safetensors"  # quantized weights in a model's folder, from compression.export for init_inference


def check_folder(folder: Path) -> None:
    """Validate the files of the folder that exist."""
    for name, read in _FILES.items():
        if (folder / name).is_file():
            read(folder / name)


def read_config(path: Path) -> dict[str, Any]:
    """Read and validate config.json."""
    config = read_object(path)
    check_config(config, path)
    return config


def check_config(config: Mapping[str, Any], where: object) -> None:
    """Validate a model config, its nested configs and its rotary embeddings. `where` starts every error."""
    _check(config, _CONFIG, where)
    for key in ("rope_scaling", "rope_parameters"):
        _check_rope(config.get(key) or {}, f"{where}: {key}")
    if config.get("text_config"):
        check_config(config["text_config"], f"{where}: text_config")


def _check_rope(rope: Mapping[str, Any], where: str) -> None:
    _check(rope, _ROPE, where)
    kind = rope.get("rope_type", rope.get("type"))
    if lacking := [key for key in _NEEDED.get(kind, ()) if rope.get(key) is None]:
        raise ValueError(f"{where} of type {kind!r} lacks {', '.join(lacking)}")
    for key in ("full_attention", "sliding_attention"):
        if rope.get(key):
            _check_rope(rope[key], f"{where}.{key}")


def read_generation(path: Path) -> dict[str, Any]:
    """Read generation_config.json; {} if it does not exist."""
    return _read(path, _GENERATION) if path.is_file() else {}


def read_tokenizer_config(path: Path) -> dict[str, Any]:
    """Read tokenizer_config.json; {} if it does not exist."""
    return _read(path, _TOKENIZER) if path.is_file() else {}


def read_index(path: Path) -> list[str]:
    """Return the names of the files that model.safetensors.index.json lists, all in its folder."""
    index = _read(path, _INDEX)
    if "weight_map" not in index:
        raise ValueError(f"{path} has no weight_map, which maps each weight to its file")
    names = sorted(set(index["weight_map"].values()))
    if elsewhere := [name for name in names if Path(name).name != name]:
        raise ValueError(f"{path}: weight_map names {elsewhere[0]!r}; it must name files in this folder")
    return names


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a folder, as in transformers: model.safetensors, which precedes shards of an older save, else the shards
    in the index. [] if there is neither."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    return [folder / name for name in read_index(folder / INDEX)] if (folder / INDEX).is_file() else []


def _read(path: Path, table: Mapping[str, FieldRule]) -> dict[str, Any]:
    values = read_object(path)
    _check(values, table, path)
    return values


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object without validating its keys."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def read_modules(path: Path) -> dict[str, str]:
    """Read modules.json of sentence-transformers: class -> the folder of its configuration."""
    value = read_json(path)
    modules = value if isinstance(value, list) else [value]
    if not all(isinstance(one, dict) and isinstance(one.get("type"), str) and isinstance(one.get("path"), str) for one in modules):
        raise ValueError(f"{path} is not a list of modules with a type and a path")
    return {one["type"].rpartition(".")[2]: one["path"] for one in modules}


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises ValueError that names the file."""
    try:
        return json.loads(path.read_text("utf-8"))
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply to read") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None


def _check(values: Mapping[str, Any], table: Mapping[str, FieldRule], where: object) -> None:
    for key, value in values.items():
        rule = table.get(key)
        if rule is not None and not rule.holds(value):
            raise ValueError(f"{where}: {key} is {_shown(value)}; it must be {rule.words}")


_FILES: dict[str, Callable[[Path], object]] = {
    "config.json": read_config,
    "generation_config.json": read_generation,
    "tokenizer_config.json": read_tokenizer_config,
    INDEX: read_index,
}


def _shown(value: Any) -> str:
    """Format as JSON, shortened."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

"""Checkpoints of `init_inference(checkpoint=...)`: a list of files, or DeepSpeed's JSON description of one.

Megatron's slices of versions 0, 1.0 and 2.0 are joined, and cut again for a module that is itself a slice (`mpu`). The versions
differ in the rows of `query_key_value`, for np heads in a slice: version 0 has [3, np, hn], 1.0 [np, hn, 3] and 2.0 [np, 3, hn].
Other types are parts of one state by name. Files of torch are read without executing anything in them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from slipstream.checkpoint.box_reader import BoxReader
from slipstream.checkpoint.document import Document, Entry, Piece
from slipstream.checkpoint.errors import CheckpointError
from slipstream.checkpoint.flat_slice import whole_box
from slipstream.checkpoint.pickled import Stored, read
from slipstream.config.huggingface import read_json

_VERSIONS = (0, 1.0, 2.0)
_QKV = re.compile(r"query_key_value\.(weight|bias)$")
_DIMS = (  # Megatron's sliced parameters -> their dimension; all others are whole in every slice
    (
        re.compile(
            r"(word_embeddings|final_linear|lm_head)\.weight$|mlp\.dense_h_to_4h\.(weight|bias)$|query_key_value\.(weight|bias)$"
        ),
        0,
    ),
    (re.compile(r"(attention\.dense|mlp\.dense_4h_to_h)\.weight$"), 1),
)
_GPT2 = (  # Megatron's names -> those of transformers' GPT-2
    (r"^(embedding\.)?word_embeddings\.", "transformer.wte."),
    (r"^(embedding\.)?position_embeddings\.", "transformer.wpe."),
    (r"^(transformer|encoder)\.layers\.", "transformer.h."),
    (r"^(transformer|encoder)\.final_layernorm\.", "transformer.ln_f."),
    (r"\.input_layernorm\.", ".ln_1."),
    (r"\.post_attention_layernorm\.", ".ln_2."),
    (r"\.(self_)?attention\.query_key_value\.", ".attn.c_attn."),
    (r"\.(self_)?attention\.dense\.", ".attn.c_proj."),
    (r"\.mlp\.dense_h_to_4h\.", ".mlp.c_fc."),
    (r"\.mlp\.dense_4h_to_h\.", ".mlp.c_proj."),
)


def _described(checkpoint: Any, base_dir: str) -> tuple[list[Path], float | None]:
    """The files, and Megatron's version of its slices, that a list of files, a dictionary or the path of its JSON describes; None:
    they are no slices. Raises ValueError."""
    folder = Path(base_dir)
    if isinstance(checkpoint, str | os.PathLike):
        folder = folder if base_dir else Path(checkpoint).parent
        checkpoint = read_json(Path(checkpoint))
    if isinstance(checkpoint, list | tuple):
        checkpoint = {"type": "Megatron" if len(checkpoint) > 1 else "whole", "checkpoints": checkpoint}
    if not isinstance(checkpoint, Mapping) or not checkpoint.get("checkpoints"):
        raise ValueError(f'checkpoint is {checkpoint!r:.200}; it needs {{"type": ..., "version": ..., "checkpoints": [files]}}')
    named = checkpoint["checkpoints"]
    if isinstance(named, Mapping):  # DeepSpeed's: {"non_tp": [...], "tp": [...]}
        named = [file for files in named.values() for file in ([files] if isinstance(files, str) else files)]
    if checkpoint.get("type") == "ds_model" and checkpoint.get("tp_size", 1) > 1:
        raise ValueError(f"checkpoint has DeepSpeed's own slices for tp_size {checkpoint['tp_size']}; save it at tp_size 1")
    version = (checkpoint.get("version") or 0) if checkpoint.get("type") == "Megatron" else None
    if version not in (None, *_VERSIONS):
        raise ValueError(f"checkpoint has version {version!r}; Megatron's are {', '.join(map(str, _VERSIONS))}")
    folder = Path(checkpoint.get("base_dir") or folder)
    return [folder / file for file in named], version


def load_checkpoint(model: nn.Module, checkpoint: Any, base_dir: str = "", index: int = 0, size: int = 1) -> None:
    """Load a module's weights; with Megatron, slice `index` of `size`. Raises ValueError or CheckpointError."""
    files, version = _described(checkpoint, base_dir)
    states = [_read(path) for path in files]
    if version is not None:
        state = join(states, version)
        if size > 1:
            state = {name: cut(name, tensor, index, size, version) for name, tensor in state.items()}
        elif getattr(getattr(model, "config", None), "model_type", None) == "gpt2":
            state = _as_gpt2(model.config, state, version)
    else:
        state = {}
        for path, part in zip(files, states, strict=True):
            if again := sorted(part.keys() & state.keys()):
                raise ValueError(f"{path} has {again[0]}, which another file of the checkpoint has")
            state |= part
    _fill(model, state, str(files[0]))


def save_checkpoint(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Save a module so that `checkpoint=folder/ds_inference_config.json` loads it."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    unique = {
        (tensor.data_ptr(), tensor.shape) if tensor.numel() else name: name for name, tensor in reversed(model.state_dict().items())
    }
    save_file({name: model.state_dict()[name].contiguous() for name in unique.values()}, target / "ds_model.safetensors")
    described = {"type": "ds_model", "version": 1.0, "tp_size": 1, "checkpoints": ["ds_model.safetensors"]}
    (target / "ds_inference_config.json").write_text(json.dumps(described, indent=2) + "\n")


def join(states: Sequence[Mapping[str, Tensor]], version: float) -> dict[str, Tensor]:
    """Join Megatron's slices, in order. Raises ValueError for slices of different models."""
    for i, state in enumerate(states):
        if other := sorted(state.keys() ^ states[0].keys()):
            raise ValueError(f"slices 0 and {i} are of different models: only one has {other[0]}")
    return {name: _joined(name, [state[name] for state in states], version) for name in states[0]}


def _joined(name: str, parts: list[Tensor], version: float) -> Tensor:
    dim = _dim(name)
    if any(part.shape != parts[0].shape or part.dtype != parts[0].dtype for part in parts):
        raise ValueError(f"slices are of different models: {name} has shapes {[list(part.shape) for part in parts]}")
    if dim is None:
        if not all(part.equal(parts[0]) for part in parts):
            raise ValueError(f"slices are of different models: {name} is whole in each, and has different values")
        return parts[0]
    if _QKV.search(name) and version == 0:
        return torch.cat([third for thirds in zip(*(part.chunk(3) for part in parts), strict=True) for third in thirds])
    return torch.cat(parts, dim)


def cut(name: str, whole: Tensor, index: int, size: int, version: float) -> Tensor:
    """Slice `index` of `size` of one of Megatron's parameters. Raises ValueError if it is not divisible."""
    dim = _dim(name)
    if dim is None:
        return whole
    thirds = 3 if _QKV.search(name) and version == 0 else 1
    if whole.shape[dim] % (thirds * size):
        raise ValueError(f"{name} of shape {list(whole.shape)} cannot be cut into {size} slices")
    return torch.cat([third.chunk(size, dim)[index] for third in whole.chunk(thirds, dim)], dim).clone()


def _dim(name: str) -> int | None:
    return next((dim for pattern, dim in _DIMS if pattern.search(name)), None)


def _as_gpt2(config: Any, state: Mapping[str, Tensor], version: float) -> dict[str, Tensor]:
    """Convert Megatron's names and layouts to transformers' GPT-2."""
    heads, renamed = config.num_attention_heads, {}
    orders = {0: (3, heads, -1), 1.0: (heads, -1, 3), 2.0: (heads, 3, -1)}
    dims = {0: (0, 1, 2), 1.0: (2, 0, 1), 2.0: (1, 0, 2)}
    for name, tensor in state.items():
        if _QKV.search(name):
            apart = tensor.view(*orders[version], *tensor.shape[1:])
            tensor = apart.permute(*dims[version], *range(3, apart.dim())).reshape(tensor.shape)
        if tensor.dim() == 2 and ".layers." in name:
            tensor = tensor.T.contiguous()
        for pattern, other in _GPT2:
            name = re.sub(pattern, other, name)
        renamed[name] = tensor[: config.vocab_size] if name == "transformer.wte.weight" else tensor  # Megatron pads it
    return renamed


# -- Files -----------------------------------------------------------------------------------------------------------------


def _read(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        return load_file(path)
    content = read(path)
    for key in ("module", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
            break
    found = {name.removeprefix("language_model."): stored for name, stored in _flat(content, "")}
    if not found:
        raise CheckpointError(f"{path} has no tensors")
    entries: dict[str, Entry] = {}
    for name, stored in found.items():
        if stored.at < 0:
            raise CheckpointError(f"{path}: a tensor of shape {list(stored.shape)} is not contiguous; save it contiguous")
        piece = Piece(box=whole_box(stored.shape), file=str(path), at=stored.at, crc32=(), zip_record=stored.record)
        entries[name] = Entry(dtype=stored.dtype, shape=stored.shape, pieces=(piece,))
    with closing(BoxReader(Path(), Document(files={str(path): path.stat().st_size}, tensors=entries))) as reader:
        return {name: reader.tensor(name) for name in entries}


def _flat(content: Any, prefix: str) -> Iterator[tuple[str, Stored]]:
    for name, value in content.items() if isinstance(content, Mapping) else ():
        if isinstance(value, Stored):
            yield f"{prefix}{name}", value
        else:
            yield from _flat(value, f"{prefix}{name}.")


def _fill(model: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Load all of a module's weights, even if they are on the meta device. Raises ValueError for missing or unknown weights."""
    own = dict(model.state_dict(keep_vars=True))
    if not own.keys() & state.keys() and (prefix := getattr(model, "base_model_prefix", "")):
        state = {f"{prefix}.{name}": tensor for name, tensor in state.items()}
    held = {id(own[name]) for name in state.keys() & own.keys()}
    missing = sorted(name for name, tensor in own.items() if name not in state and id(tensor) not in held)
    wrong = sorted(name for name in state.keys() & own.keys() if state[name].shape != own[name].shape)
    for names, words in (
        (missing, "lacks"),
        (sorted(state.keys() - own.keys()), "has, and the module lacks,"),
        (wrong, "has another shape of"),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ValueError(f"{source} {words} {names[0]}{more} of the {type(model).__name__}")
    empty = any(tensor.is_meta for tensor in own.values())
    if empty and any(buffer.is_meta for buffer in model.buffers()):
        fresh = type(model)(model.config)
        for name, module in fresh.named_modules():
            model.get_submodule(name)._buffers.update(module._buffers)
    model.load_state_dict(dict(state), strict=False, assign=empty)
    if hasattr(model, "tie_weights"):
        model.tie_weights()  # type: ignore[operator]

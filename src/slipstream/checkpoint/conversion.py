"""Converts checkpoints between formats without an engine, with at most one tensor in memory at a time.

from  our format, DeepSpeed's, a Hugging Face folder
to    a Hugging Face folder, our format, DeepSpeed's universal format (which needs optimizer state)
"""

from __future__ import annotations

import os
import shutil
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import torch

from slipstream.checkpoint import pretrained
from slipstream.checkpoint.box_reader import BoxReader
from slipstream.checkpoint.directory import LATEST, LATEST_UNIVERSAL, is_deepspeed, locate, read_document, read_latest, sync
from slipstream.checkpoint.document import METADATA, Document, Entry
from slipstream.checkpoint.errors import CheckpointError
from slipstream.checkpoint.load import retry_if_replaced
from slipstream.checkpoint.save import save
from slipstream.checkpoint.upcycle import USED, upcycle
from slipstream.checkpoint.values import decode, encode
from slipstream.checkpoint.weights import files_of, needs_more_than_cast, read_header
from slipstream.config.huggingface import INDEX, SINGLE, read_config

Kind = Literal["hf", "slipstream", "deepspeed"]
_SOURCES = "give the folder of a checkpoint, of several, or of a Hugging Face model"
_LIKE = ("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "*.jinja")


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: Kind,
    *,
    tag: str | None = None,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str | None = None,
    like: str | os.PathLike[str] | None = None,
    num_experts: int | None = None,
    top_k: int | None = None,
    name: str | None = None,
) -> Path:
    """Convert the checkpoint `source` to `target` and return the folder written.

    source: one checkpoint, a directory of checkpoints (`tag` selects one, None the latest), or a Hugging Face folder. dtype: of
    the parameters in a Hugging Face folder; None keeps the stored one. max_shard_size: of its files; None: 5GB. like: a Hugging
    Face folder of the same model, from which configuration and tokenizer are copied. num_experts: write a mixture of this many
    experts, copies of the model's MLP, of which a token uses `top_k` (2). name: of DeepSpeed's folder in `target`; None:
    `TAG_universal`. Raises CheckpointError, with nothing written.
    """
    of_hf = {"dtype": dtype, "max_shard_size": max_shard_size, "like": like, "num_experts": num_experts}
    if to != "hf" and (idle := [name for name, value in of_hf.items() if value is not None]):
        raise CheckpointError(f"{', '.join(idle)}: for Hugging Face folders only; to={to!r} keeps every tensor as it is")
    if top_k is not None and num_experts is None:
        raise CheckpointError(f"top_k ({top_k}) is of the mixture that num_experts (--upcycle) writes; give that, or leave it out")
    cast, shard_nbytes = pretrained.dtype_of(dtype), pretrained.num_bytes("5GB" if max_shard_size is None else max_shard_size)
    used = USED if top_k is None else top_k
    source, target = Path(os.path.abspath(source)), Path(target)

    def work() -> Path:
        path = _find(source, tag)
        with closing(BoxReader(path, _of_hf(path) if _is_hf(path) else read_document(path))) as stored:
            if to == "hf":
                _to_hf(stored, target, cast, shard_nbytes, None if like is None else Path(like), num_experts, used)
                return target
            return _to_slipstream(stored, target) if to == "slipstream" else _to_deepspeed(stored, target, name)

    return retry_if_replaced(source, tag, work)


def _find(source: Path, tag: str | None) -> Path:
    if source.is_file():
        raise CheckpointError(f"{source} is a file; {_SOURCES}")
    tag = tag or read_latest(source)
    if tag is not None:
        return locate(source, tag)
    if _is_hf(source):
        return source
    try:
        return locate(source.parent, source.name)
    except CheckpointError:
        if source.exists():
            raise
        raise CheckpointError(f"{source} does not exist; {_SOURCES}") from None


def _is_hf(folder: Path) -> bool:
    """Whether the folder holds only weights: transformers' Trainer also writes them next to DeepSpeed's checkpoints."""
    if any((folder / name).exists() for name in (METADATA, LATEST, LATEST_UNIVERSAL)) or is_deepspeed(folder):
        return False
    return any((folder / name).is_file() for name in (INDEX, SINGLE))


def _of_hf(folder: Path) -> Document:
    """A Hugging Face folder as a checkpoint of weights without checksums. It does not mark buffers, so all are parameters."""
    files: dict[str, int] = {}
    tensors: dict[str, Entry] = {}
    try:
        for file in files_of(folder):
            files[str(file)] = file.stat().st_size
            for name, entry in read_header(file).items():
                if needs_more_than_cast(entry.dtype):
                    raise ValueError(f"{name!r} is {entry.dtype}, which needs more than a cast")
                if tensors.setdefault(f"model.{name}", entry) is not entry:
                    raise ValueError(f"{name!r} is in two of its files")
        config = folder / "config.json"
        model_config = read_config(config) if config.is_file() else None
        shared, _ = encode({"contents": "weights", "client": {}, "model_config": model_config}, "config.json", "$shared")
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder} is no whole Hugging Face folder: {type(error).__name__}: {error}") from error
    return Document(save_id=folder.name, files=files, tensors=tensors, shared=shared)


def _shared(source: BoxReader) -> dict[str, Any]:
    shared = decode(source.document.shared, source.tensor, f"{source.folder}: shared")
    assert isinstance(shared, dict), "train/saving/entries.py writes a dict, deepspeed.py makes one"
    return shared


def _named(source: BoxReader, kind: str) -> dict[str, str]:
    """Names without the prefix `kind` -> names in the checkpoint."""
    return {name.partition(".")[2]: name for name in source.document.tensors if name.startswith(f"{kind}.")}


def _to_hf(
    source: BoxReader,
    target: Path,
    dtype: torch.dtype | None,
    shard_nbytes: int,
    like: Path | None,
    num_experts: int | None,
    top_k: int,
) -> None:
    tensors = _weights(source, dtype)
    config, texts = _shared(source).get("model_config"), dict[str, str | bytes]()
    if num_experts is not None:
        if like is not None and config is None:
            config = read_config(like / "config.json")
        tensors, config = upcycle(tensors, config or {}, num_experts, top_k)
    if config is not None:
        texts |= pretrained.describe(config, None, dtype or next(iter(tensors.values())).dtype)
    if like is not None:
        copied = sorted(path for pattern in _LIKE for path in like.glob(pattern) if path.is_file())
        own = texts if num_experts is not None else {}
        texts = {**texts, **{path.name: path.read_bytes() for path in copied}, **own}
    pretrained.write(target, tensors, texts=texts, group=None, shard_nbytes=shard_nbytes)


def _weights(source: BoxReader, dtype: torch.dtype | None) -> dict[str, pretrained.Out]:
    """Parameters and buffers by the model's names; floating-point parameters become `dtype`."""
    _check_complete_weights(source)
    tensors = {}
    for kind in ("model", "buffer"):
        for name, key in _named(source, kind).items():
            stored = source.document.tensors[key].dtype
            cast = dtype if kind == "model" and dtype is not None and stored.is_floating_point else stored
            tensors[name] = pretrained.Out(source.slice(key), cast)
    if not tensors:
        raise CheckpointError(f"{source.folder} has no parameters")
    return tensors


def _check_complete_weights(source: BoxReader) -> None:
    """Raise CheckpointError for adapters alone or quantized codes, which loaders of Hugging Face folders cannot combine."""
    if not source.document.world_size and _is_hf(source.folder):
        return
    for name, key in _named(source, "model").items():
        if name.startswith("base_model.model.") or ".base_layer." in name:
            what = f"{name!r} is of a model with PEFT's adapters, which a Hugging Face folder holds merged, or alone"
        elif source.document.tensors[key].dtype in (torch.uint8, torch.int8):
            what = f"{name!r} are codes of a quantized weight, which loaders would take for the weight"
        else:
            continue
        raise CheckpointError(
            f"{source.folder}: {what}: load it into its engine, and engine.save_pretrained() writes the folder "
            f"(only_trainable=True: the adapters)"
        )


def _to_slipstream(source: BoxReader, target: Path) -> Path:
    tensors = {name: source.slice(name) for name in source.document.tensors if not name.startswith("$")}
    return save(target, source.folder.name, tensors=tensors, shared=_shared(source), per_rank={})


def _to_deepspeed(source: BoxReader, target: Path, name: str | None) -> Path:
    """Write the universal format, which DeepSpeed loads at any world and stage with `"checkpoint": {"load_universal": true}`.

    The loss scale is reset, because DeepSpeed stores it as an object of its own class. Parameters without optimizer state (frozen
    ones) are in the module's state, where DeepSpeed writes them; it does not load them, and keeps the model's initial values.
    """
    shared, states = _shared(source), _states(source)
    if shared.get("optimizer") is None:
        raise CheckpointError(
            f"{source.folder} has no optimizer state; write a Hugging Face folder of it, which DeepSpeed loads too"
        )
    tag = name or f"{source.folder.name}_universal"
    draft, result = target / f"{tag}.tmp", target / tag
    if result.exists():
        raise CheckpointError(f"{result} exists already; remove it or choose another directory")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        (draft / "zero").mkdir(parents=True)
        _write_states(source, draft / "zero", shared["optimizer"], states)
        model = _model_file(source, shared, states)
        for file in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):  # stages 1 and 2; stage 3
            torch.save(model, draft / file)
        for path in (draft, *draft.rglob("*")):
            sync(path)
        os.rename(draft, result)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    (target / LATEST_UNIVERSAL).write_text(tag, "utf-8")
    sync(target)
    return result


def _states(source: BoxReader) -> dict[str, dict[str, str]]:
    """Parameter -> stem of DeepSpeed's file -> tensor of the checkpoint."""
    states: dict[str, dict[str, str]] = {}
    for state, key in _named(source, "optim").items():
        kind, _, name = state.partition(".")
        states.setdefault(name, {"fp32": f"model.{name}"})[kind] = key
    return states


def _write_states(source: BoxReader, zero: Path, optimizer: dict[str, Any], states: Mapping[str, Mapping[str, str]]) -> None:
    step: Any = None
    for name, files in states.items():
        if any(part == ".." or Path(part).name != part for part in (name, *files)):  # a path outside the folder
            raise CheckpointError(f"optimizer states {sorted(files)} of a parameter named {name!r}")
        (zero / name).mkdir()
        for kind, key in files.items():
            torch.save({"param": source.tensor(key).float(), "cat_dim": 0}, zero / name / f"{kind}.pt")
        step = optimizer["params"].get(name, {}).get("step")
        if step is not None:
            step = torch.tensor(float(step))
            torch.save(step, zero / name / "step.pt")
    groups = [{**group, "params": []} for group in optimizer["groups"]]
    # Without "clip_grad" and "dynamic_loss_scale", DeepSpeed uses those of its configuration
    common = {"overflow": False, "ds_version": "0.19.8", "param_groups": groups}
    stage_3 = {"state": {0: {"step": step}}, "param_groups": groups}
    torch.save(common | {"optimizer_state_dict": stage_3}, zero / "optimizer_state.pt")


def _model_file(source: BoxReader, shared: dict[str, Any], states: Mapping[str, Any]) -> dict[str, Any]:
    frozen = {name: key for name, key in _named(source, "model").items() if name not in states}
    buffers = _named(source, "buffer")
    shapes = OrderedDict((name, torch.Size(source.document.tensors[f"model.{name}"].shape)) for name in states)
    module = OrderedDict((name, source.tensor(key)) for name, key in (frozen | buffers).items())
    return {
        **shared["client"],
        "module": module,
        "buffer_names": list(buffers),
        "optimizer": None,
        "param_shapes": [shapes],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "lr_scheduler": shared["scheduler"],
        "data_sampler": None,
        "random_ltd": None,
        **shared["counters"],
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": "0.19.8",
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.4},
    }

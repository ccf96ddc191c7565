"""A Hugging Face folder of an engine's model: its own weights, or with PEFT's adapters merged, or the adapters alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream.checkpoint import FlatSlice, pretrained
from slipstream.compression import Numbers, head_of, row_forms
from slipstream.train import adapters, entries, handover
from slipstream.train.persist import agree
from slipstream.zero.comm import gather_objects

if TYPE_CHECKING:
    from slipstream.train.engine import Engine


def save_pretrained(engine: Engine, folder: str, dtype: torch.dtype | None, shard_nbytes: int, only_trainable: bool) -> None:
    """A Hugging Face folder of the masters' values; of weights that `slipstream.quantize` has made bytes, of the numbers that these
    stand for. Collective; each rank writes what it owns. ValueError for weights that other libraries have quantized.

    Of a model with PEFT's adapters: the base with the adapters merged into its weights, or, only_trainable, PEFT's own folder.
    """
    what = {"dtype": dtype, "max_shard_size": shard_nbytes, "only_trainable": only_trainable}
    agree(engine, f"{folder} was not written", what)
    pairs = [pair for unit in engine.units for pair in zip(unit.wholes, unit.params, strict=True)]
    apart = {id(whole) for whole, param in pairs if whole is not param}
    foreign = next((name for name, param in engine.module.named_parameters() if id(param) in apart), "")
    if foreign and not only_trainable:
        raise ValueError(
            f"save_pretrained() would write the codes of {foreign!r}, which bitsandbytes, torchao or the like has quantized, "
            f"without what its loader needs to know of them: only_trainable=True writes the adapters, which belong on the folder "
            f"that the base came from, and save_checkpoint() everything"
        )
    module: Any = engine.module
    where: dict[str, Any] = {"group": engine.mesh.data.group, "shard_nbytes": shard_nbytes}
    adapted = handover.has_adapters(module)
    if adapted and only_trainable:
        _save_adapters(engine, folder, dtype, where)
        return
    base = module.get_base_model() if hasattr(module, "get_base_model") else module
    tensors: dict[str, pretrained.Out] = {}
    buffers = {} if only_trainable else entries.first_buffers(engine)
    if adapted:
        for name, (shape, kept) in handover.announced(engine).items():
            tensors[name] = pretrained.Out(torch.empty(shape, device="meta"), dtype or kept)
        called = handover.adapted_buffers(engine, [name.partition(".")[2] for name in buffers])
        buffers = {f"buffer.{new}": buffers[f"buffer.{old}"] for old, new in called.items()}
        where["stream"] = handover.stream(engine)
    numbers = {} if only_trainable or adapted else _numbers(engine)
    for key, held in (({} if adapted else entries.weights(engine, exclude_frozen=only_trainable)) | buffers).items():
        kind, _, name = key.partition(".")
        wanted = dtype if kind == "model" else None
        if name in numbers:
            tensors[name] = pretrained.Out(numbers[name], wanted or engine.plan.precision.param_dtype)
        else:
            tensors[name] = pretrained.Out(held, wanted or _dtype_of(engine, name, held))
    config = entries.model_config(base)
    texts = {} if config is None else pretrained.describe(config, type(base).__name__, dtype or engine.plan.precision.param_dtype)
    generation = getattr(base, "generation_config", None)
    if generation is not None:
        texts["generation_config.json"] = generation.to_json_string()
    pretrained.write(folder, tensors, texts=texts, **where)


def _save_adapters(engine: Engine, folder: str, dtype: torch.dtype | None, where: Mapping[str, Any]) -> None:
    """Where PEFT has them: the one that is called default in the folder itself, others in folders below it."""
    held = {key.partition(".")[2]: value for key, value in (entries.weights(engine) | entries.first_buffers(engine)).items()}
    buffers = {key.partition(".")[2]: buffer for key, buffer in entries.buffers(engine).items()}
    for adapter in adapters.of(engine, buffers):
        tensors = {
            key: pretrained.Out(held[name], (None if name in buffers else dtype) or _dtype_of(engine, name, held[name]))
            for key, name in adapter.tensors.items()
        }
        path = folder if adapter.name == "default" else os.path.join(folder, adapter.name)
        one_file = {**where, "shard_nbytes": sys.maxsize, "single": adapters.WEIGHTS}
        pretrained.write(path, tensors, texts={adapters.CONFIG: adapter.config}, **one_file)


def _numbers(engine: Engine) -> dict[str, FlatSlice]:
    """Quantized weights by name, of the rows that begin in this rank's bytes. Collective."""
    forms = row_forms(engine.module)
    weights = {key.removeprefix("model."): held for key, held in entries.weights(engine).items()}
    known = {name: held for name, held in weights.items() if name in forms}
    held = {name: each for name, each in known.items() if isinstance(each, FlatSlice)}
    heads = {name: head_of(each.data, each.start, forms[name]) for name, each in held.items()}
    everyone = gather_objects(heads, engine.mesh.data) if heads else []
    found = {}
    for name, each in held.items():
        numbers = Numbers(each.data, each.start, [theirs[name] for theirs in everyone], forms[name])
        found[name] = FlatSlice(numbers, (each.shape[0], forms[name].columns), numbers.start)
    return found


def _dtype_of(engine: Engine, name: str, held: FlatSlice | Tensor) -> torch.dtype:
    """What the model itself keeps: a master may be wider."""
    if isinstance(held, Tensor):
        return held.dtype
    return next(unit.dtypes.weights for unit in engine.units if name in unit.names)

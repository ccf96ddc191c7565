"""Write a Hugging Face folder of an engine's model: its weights, the base with PEFT adapters merged, or the adapters alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from slipstream.checkpoint import FlatSlice, pretrained
from slipstream.checkpoint.plan import dtype_of
from slipstream.quantized import Numbers, head_of, row_forms
from slipstream.train import handover
from slipstream.train.saving import entries
from slipstream.train.saving import peft as adapters
from slipstream.train.saving.save import agree
from slipstream.train.states import States


def save_pretrained(states: States, folder: str, dtype: torch.dtype | None, shard_nbytes: int, only_trainable: bool) -> None:
    """Write the masters' values; weights quantized by `slipstream.quantize` are dequantized. Collective; each rank writes the part
    that it owns, also of slices and pipeline stages. Raises ValueError for weights that other libraries quantized.

    A model with PEFT adapters becomes the base with the adapters merged or, with only_trainable, a PEFT adapter folder.
    """
    model: Any = states.model
    arguments = {"dtype": dtype, "max_shard_size": shard_nbytes, "only_trainable": only_trainable}
    agree(states.mesh.world, f"{folder} was not written", arguments)
    _refuse_foreign(states, only_trainable)
    where: dict[str, Any] = {"group": states.mesh.world.group, "shard_nbytes": shard_nbytes}
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    adapted = handover.has_adapters(model)
    if adapted and only_trainable:
        _save_adapters(states, folder, dtype, where)
        return
    tensors: dict[str, pretrained.Out] = {}
    if adapted:
        buffers = {} if only_trainable else entries.first_buffers(states)
        for announced in handover.announced_by_stages(states):
            for name, (shape, stored_dtype) in announced.items():
                tensors[name] = pretrained.Out(torch.empty(shape, device="meta"), dtype or stored_dtype)
        renamed = handover.adapted_buffers(states, [name.partition(".")[2] for name in buffers])
        own = {new: pretrained.Out(buffers[f"buffer.{old}"], buffers[f"buffer.{old}"].dtype) for old, new in renamed.items()}
        tensors |= _of_all_stages(own, states)
        where["stream"] = handover.stream(states)
    else:
        tensors = _of_all_stages(_own(states, dtype, only_trainable), states)
    config = entries.model_config(base)
    written = dtype or states.plan.precision.param_dtype
    texts = {} if config is None else pretrained.describe(config, getattr(base, "architecture", type(base).__name__), written)
    generation = getattr(base, "generation_config", None)
    if generation is not None:
        texts["generation_config.json"] = generation.to_json_string()
    pretrained.write(folder, tensors, texts=texts, **where)


def _refuse_foreign(states: States, only_trainable: bool) -> None:
    pairs = [pair for unit in states.units for pair in zip(unit.model_params, unit.params, strict=True)]
    apart = {id(whole) for whole, param in pairs if whole is not param}
    foreign = next((name for name, param in states.model.named_parameters() if id(param) in apart), "")
    if foreign and not only_trainable:
        raise ValueError(
            f"save_pretrained() would write the codes of {foreign!r}, which another library (bitsandbytes, torchao) quantized, "
            f"without the metadata that its loader needs: only_trainable=True writes the adapters, to be loaded on top of the "
            f"original base, and save_checkpoint() writes everything"
        )


def _own(states: States, dtype: torch.dtype | None, only_trainable: bool) -> dict[str, pretrained.Out]:
    """The tensors of which this rank holds any part, by name. Collective."""
    tensors = {}
    numbers = {} if only_trainable else _numbers(states)
    buffers = {} if only_trainable else entries.first_buffers(states)
    for key, held in (entries.weights(states, exclude_frozen=only_trainable) | buffers).items():
        kind, _, name = key.partition(".")
        file_dtype = dtype if kind == "model" else None
        if name in numbers:
            tensors[name] = pretrained.Out(numbers[name], file_dtype or states.plan.precision.param_dtype)
        else:
            tensors[name] = pretrained.Out(held, file_dtype or _dtype_of(states, name, held))
    return tensors


def _of_all_stages(tensors: dict[str, pretrained.Out], states: States) -> dict[str, pretrained.Out]:
    """Add the tensors of other pipeline stages, of which this rank holds nothing, in the order of stages. Collective."""
    own = {name: (tuple(out.held.shape), out.dtype, dtype_of(out.held)) for name, out in tensors.items()}
    facts = entries.of_all_stages(own, states.mesh)
    none = {name: FlatSlice(torch.empty(0, dtype=held_dtype), shape, 0) for name, (shape, _, held_dtype) in facts.items()}
    return {name: tensors.get(name, pretrained.Out(none[name], facts[name][1])) for name in facts}


def _save_adapters(states: States, folder: str, dtype: torch.dtype | None, where: Mapping[str, Any]) -> None:
    """Write the adapters in PEFT's layout: the adapter "default" in the folder itself, others in subfolders."""
    held = {key.partition(".")[2]: value for key, value in (entries.weights(states) | entries.first_buffers(states)).items()}
    buffers = {key.partition(".")[2]: buffer for key, buffer in entries.buffers(states).items()}
    for adapter in adapters.of(states, buffers):
        tensors = {
            key: pretrained.Out(held[name], (None if name in buffers else dtype) or _dtype_of(states, name, held[name]))
            for key, name in adapter.tensors.items()
        }
        tensors = _of_all_stages(tensors, states)
        path = folder if adapter.name == "default" else os.path.join(folder, adapter.name)
        one_file = {**where, "shard_nbytes": sys.maxsize, "single": adapters.WEIGHTS}
        pretrained.write(path, tensors, texts={adapters.CONFIG: adapter.config}, **one_file)


def _numbers(states: States) -> dict[str, FlatSlice]:
    """The dequantized weights by name, in the rows that begin within this rank's bytes. Collective."""
    forms = row_forms(states.model)
    weights = {key.removeprefix("model."): value for key, value in entries.weights(states).items()}
    slices = {name: value for name, value in weights.items() if name in forms and isinstance(value, FlatSlice)}
    heads = {name: head_of(each.data, each.start, forms[name]) for name, each in slices.items()}
    by_rank = states.mesh.world.gather(heads) if heads else []
    result = {}
    for name, each in slices.items():
        numbers = Numbers(each.data, each.start, [heads[name] for heads in by_rank], forms[name])
        result[name] = FlatSlice(numbers, (each.shape[0], forms[name].columns), numbers.start)
    return result


def _dtype_of(states: States, name: str, held: FlatSlice | Tensor) -> torch.dtype:
    """The model's own dtype; a master may be wider."""
    if isinstance(held, Tensor):
        return held.dtype
    return next(unit.dtypes.weights for unit in states.units if name in unit.names)

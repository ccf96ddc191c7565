"""Write a Hugging Face folder of an engine's model: its weights, the base with PEFT adapters merged (train/handover.py), or the
adapters alone, in a folder that `PeftModel.from_pretrained` loads.

PEFT itself determines an adapter's parameters and their names in the folder, on stand-ins on meta. The values are written from the
masters.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from slipstream.checkpoint import FlatSlice, pretrained
from slipstream.checkpoint.plan import dtype_of
from slipstream.quantized import Numbers, head_of, row_forms
from slipstream.train import handover
from slipstream.train.saving import entries
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
    for adapter in _peft_adapters(states, buffers):
        tensors = {
            key: pretrained.Out(held[name], (None if name in buffers else dtype) or _dtype_of(states, name, held[name]))
            for key, name in adapter.tensors.items()
        }
        tensors = _of_all_stages(tensors, states)
        path = folder if adapter.name == "default" else os.path.join(folder, adapter.name)
        one_file = {**where, "shard_nbytes": sys.maxsize, "single": WEIGHTS}
        pretrained.write(path, tensors, texts={CONFIG: adapter.config}, **one_file)


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


WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_COMPUTED = (
    "adapter {!r} is saved as values that PEFT computes from its parameters: save it with PEFT, inside "
    "slipstream.zero.gathered(model.parameters())"
)


class PeftAdapter(NamedTuple):
    """The contents of one adapter's folder."""

    name: str
    tensors: dict[str, str]  # name in PEFT's folder -> name in the model; "" if the value is no parameter
    config: str  # the text of adapter_config.json


def _peft_adapters(states: States, buffers: Mapping[str, Any]) -> list[PeftAdapter]:
    """All adapters of the model, with the tensors of this pipeline stage. Collective; all ranks raise ValueError if a folder would
    lack trained parameters or hold other values."""
    module: Any = states.model
    shapes = {
        id(whole): slot.shape for unit in states.units for whole, slot in zip(unit.model_params, unit.layout.slots, strict=True)
    }
    known = {id(whole): name for unit in states.units for whole, name in zip(unit.model_params, unit.names, strict=True)}
    names = {name: known[id(param)] for name, param in module.named_parameters(remove_duplicate=False) if id(param) in known}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    stand_ins = {name: torch.empty(shapes[id(parameters[name])], device="meta") for name in names}
    stand_ins |= {name: torch.empty_like(buffer, device="meta") for name, buffer in buffers.items()}
    meant = {id(value): names.get(name, name) for name, value in stand_ins.items()}
    meant |= {id(buffer): name for name, buffer in buffers.items()}
    with _shown(module, stand_ins):
        configs = getattr(module, "peft_config", {})
        adapters = [_of_one(module, name, config, stand_ins, meant) for name, config in configs.items()]
    own = {adapter.name for adapter in adapters if adapter.tensors}, _refusal(states, adapters)
    present, refusals = zip(*states.mesh.world.gather(own), strict=True)
    absent = [_COMPUTED.format(name) for name in configs if not any(name in names for names in present)]
    if why := next(filter(None, (*refusals, *absent)), ""):
        raise ValueError(why)
    return adapters


def _refusal(states: States, adapters: Sequence[PeftAdapter]) -> str:
    """Why this rank's part of the folders would lack trained parameters or hold other values; "" if it is right."""
    written = {name for adapter in adapters for name in adapter.tensors.values()}
    if computed := [adapter.name for adapter in adapters if "" in adapter.tensors.values()]:
        return _COMPUTED.format(computed[0])
    trained = [name for unit in states.units for name, param in zip(unit.names, unit.params, strict=True) if param.requires_grad]
    lost = [name for name in trained if name not in written]
    if not lost:
        return ""
    return (
        f"{lost[0]!r}{f' and {len(lost) - 1} more' if len(lost) > 1 else ''} are trained but belong to no adapter in "
        f"peft_config, so the folder would lack them: name them in modules_to_save, or use save_checkpoint(contents='adapters')"
    )


@contextmanager
def _shown(model: nn.Module, stand_ins: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Temporarily replace parameters by stand-ins: PEFT reads some modules' `state_dict`, and sharded values cannot be read."""
    modules = list(model.named_modules())
    held = [(module._parameters, name, param, path) for path, module in modules for name, param in module._parameters.items()]
    try:
        for parameters, name, param, path in held:
            if param is not None and (full := f"{path}.{name}" if path else name) in stand_ins:
                parameters[name] = nn.Parameter(stand_ins[full], requires_grad=False)
        yield
    finally:
        for parameters, name, param, _ in held:
            parameters[name] = param


def _of_one(module: Any, name: str, config: Any, stand_ins: dict[str, torch.Tensor], meant: dict[int, str]) -> PeftAdapter:
    from peft import get_peft_model_state_dict

    values: dict[str, Any] = {}
    if not config.is_prompt_learning:
        values = get_peft_model_state_dict(module, state_dict=dict(stand_ins), adapter_name=name)
    # adapters that were injected into a model without a PeftModel wrapper have no prefix
    tensors = {handover.PREFIX + key.removeprefix(handover.PREFIX): meant.get(id(value), "") for key, value in values.items()}
    return PeftAdapter(name, tensors, _config(module, config))


def _config(module: Any, config: Any) -> str:
    """The text of adapter_config.json as PEFT writes it."""
    base: Any = module.get_base_model() if hasattr(module, "get_base_model") else module
    config = copy.deepcopy(config)
    config.inference_mode = True
    config.base_model_name_or_path = config.base_model_name_or_path or getattr(base, "name_or_path", None) or None
    base_class = getattr(base, "base_class", type(base))  # of a pipeline stage: the class of the whole model
    kind = {"base_model_class": base_class.__name__, "parent_library": base_class.__module__}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder, auto_mapping_dict=None if config.task_type else kind)
        text: str = (Path(folder) / CONFIG).read_text("utf-8")
    return json.dumps(json.loads(text), indent=2, sort_keys=True) + "\n"

"""The contents of PEFT adapter folders for an engine's model, which `PeftModel.from_pretrained` loads.

PEFT itself determines an adapter's parameters and their names in the folder, on stand-ins on meta. The values are written from the
masters. (train/handover.py merges adapters into their base.)
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from slipstream.train.handover import PREFIX
from slipstream.train.states import States

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


def of(states: States, buffers: Mapping[str, Any]) -> list[PeftAdapter]:
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
    tensors = {PREFIX + key.removeprefix(PREFIX): meant.get(id(value), "") for key, value in values.items()}
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

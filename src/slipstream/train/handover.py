"""A training engine's weights, unit by unit, for whoever serves them: names and whole tensors as the model has them.

The weights of one unit are whole at a time (over shared memory not even those are copied: ranks read them where they rest).
Adapters of PEFT are merged on the way: their base's name comes with base and adapter added, and they themselves do not; those that
are not a sum with one weight are refused before anything comes. A base that
`slipstream.quantize` made bytes comes as the numbers that those stand for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream.compression import row_forms
from slipstream.ops.rows import RowForm, dequantise_rows
from slipstream.zero import access
from slipstream.zero.unit import State, Unit

if TYPE_CHECKING:
    from slipstream.train.engine import Engine

_PEFT = "base_model.model."  # before every name of a model that PEFT has wrapped
_ADDED = ("lora", "adalora", "loha", "lokr", "vera")  # PEFT's packages where get_delta_weight() is what is added to the weight


def stream(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    """See `Engine.named_weights`."""
    for unit in engine.units:
        for name, param, whole in zip(unit.names, unit.params, unit.wholes, strict=True):
            if whole is not param:
                raise ValueError(
                    f"{name!r} is a part of a weight that another library quantised, which no server takes: quantise the base by "
                    f"slipstream.quantize(), or hand over a model that is not quantised"
                )
    adapted, forms = _adapted(engine), row_forms(engine.module)
    adapters = {id(param) for module in adapted.values() for name, param in module.named_parameters() if "base_layer" not in name}
    with ExitStack() as shown:
        if adapters:
            chosen = {unit: [i for i, param in enumerate(unit.params) if id(param) in adapters] for unit in engine.units}
            with torch.no_grad():  # never over a yield: the mode is the caller's, whose loop may have another one at the end
                shown.enter_context(access.gathered_units({unit: own for unit, own in chosen.items() if own}, None, write=False))
        for unit in engine.units:
            yield from _of_unit(unit, adapters, adapted, forms)


def _of_unit(
    unit: Unit, adapters: set[int], adapted: dict[str, Any], forms: dict[str, RowForm]
) -> Iterator[tuple[str, Tensor]]:
    if all(id(param) in adapters for param in unit.params):
        return
    released = unit.state is State.RELEASED
    with torch.no_grad():
        unit.gather()
    try:
        for name, param, view in zip(unit.names, unit.params, unit.views, strict=True):
            if id(param) not in adapters and ".original_module." not in name:
                with torch.no_grad():
                    weight = dequantise_rows(view, forms[name], torch.float32) if name in forms else view
                    weight = _merged(weight, adapted[name]) if name in adapted else weight
                yield _bare(name), weight
    finally:
        if released:
            unit.release()


def _adapted(engine: Engine) -> dict[str, Any]:
    """PEFT's layers, by the name of the weight that they adapt. Raises ValueError for what `_merged` would not make of it."""
    found: dict[str, Any] = {}
    names = {name for unit in engine.units for name in unit.names}
    uses = Counter(id(param) for _, param in engine.module.named_parameters(remove_duplicate=False))
    for path, module in engine.module.named_modules():
        if hasattr(module, "active_adapters") and hasattr(module, "base_layer"):  # PEFT's, which need not be installed
            name = f"{path}.base_layer.weight"
            found[name] = module
            if why := _unmergeable(module, alone=name in names and uses[id(module.base_layer.weight)] == 1):
                raise ValueError(f"{path!r} is adapted by {why}, which is not merged on the way; merge_and_unload() it first")
    return found


def _unmergeable(layer: Any, alone: bool) -> str:
    """What is not a sum with the base's weight; "" if nothing is. alone: that weight is a parameter, and of no other layer."""
    if layer.merged or layer.disable_adapters:
        return ""
    if not any(each.__module__.startswith(f"peft.tuners.{kind}.") for each in type(layer).__mro__ for kind in _ADDED):
        return f"a layer of {type(layer).__module__}"
    for adapter in layer.active_adapters:
        if getattr(layer, "use_dora", {}).get(adapter):
            return f"adapter {adapter!r} with DoRA"
        if adapter in getattr(layer, "lora_variant", {}):
            return f"adapter {adapter!r} with {type(layer.lora_variant[adapter]).__name__}"
        if getattr(layer, "lora_bias", {}).get(adapter):
            return f"adapter {adapter!r} with lora_bias"
    return "" if alone else f"{type(layer).__name__} on what is no weight of its own (target_parameters, or a tied weight)"


def _merged(weight: Tensor, layer: Any) -> Tensor:
    if layer.merged or layer.disable_adapters:
        return weight
    for adapter in layer.active_adapters:
        weight = weight + layer.get_delta_weight(adapter).to(weight)
    return weight


def _bare(name: str) -> str:
    """As the model that was wrapped calls it."""
    name = name.removeprefix(_PEFT).replace(".base_layer.", ".")
    before, found, after = name.partition(".modules_to_save.")
    return f"{before}.{after.partition('.')[2]}" if found else name

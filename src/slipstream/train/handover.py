"""A training engine's weights, unit by unit, for whoever serves them: names and whole tensors as the model has them.

The weights of one unit are whole at a time (over shared memory not even those are copied: ranks read them where they rest).
Adapters of PEFT are merged on the way: their base's name comes with base and adapter added, and they themselves do not; those that
are not a sum with one weight are refused before anything comes. A module that PEFT trains a copy of comes as that copy. A base that
`slipstream.quantize` made bytes comes as the numbers that those stand for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from slipstream.checkpoint.flat_slice import Shape
from slipstream.compression import row_forms
from slipstream.ops.rows import RowForm, dequantize_rows
from slipstream.zero import access
from slipstream.zero.unit import State, Unit

if TYPE_CHECKING:
    from slipstream.train.engine import Engine

PREFIX = "base_model.model."  # before every name of a model that PEFT has wrapped
_ADDED = ("lora", "adalora", "loha", "lokr", "vera")  # PEFT's packages where get_delta_weight() is what is added to the weight


class _Source(NamedTuple):
    """How parameters become what is handed over."""

    adapted: dict[str, Any]  # PEFT's layers, by the name of the weight that they adapt
    adapters: set[int]  # parameters of those
    unused: set[int]  # parameters of modules, and of copies of them, that the forward does not use
    forms: dict[str, RowForm]

    def kept(self, unit: Unit) -> list[int]:
        return [i for i, param in enumerate(unit.params) if id(param) not in self.adapters | self.unused]


def stream(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    """See `Engine.named_weights`."""
    source = _source(engine)
    with ExitStack() as shown:
        if source.adapters:
            chosen = {unit: [i for i, param in enumerate(unit.params) if id(param) in source.adapters] for unit in engine.units}
            with torch.no_grad():  # never over a yield: the mode is the caller's, whose loop may have another one at the end
                shown.enter_context(access.gathered_units({unit: own for unit, own in chosen.items() if own}, None, write=False))
        for unit in engine.units:
            yield from _of_unit(unit, source)


def announced(engine: Engine) -> dict[str, tuple[Shape, torch.dtype]]:
    """What `stream` gives, before any of it is gathered. Raises what that would."""
    source, found = _source(engine), {}
    for unit in engine.units:
        for i in source.kept(unit):
            form, shape = source.forms.get(unit.names[i]), unit.layout.slots[i].shape
            as_numbers = ((shape[0], form.columns), torch.float32) if form else (shape, unit.dtypes.weights)
            found[bare(unit.names[i])] = as_numbers
    return found


def adapted_buffers(engine: Engine, buffers: Iterable[str]) -> dict[str, str]:
    """The names of those buffers that are the base's -> what the base calls them."""
    own = {f"{name.removesuffix('base_layer.weight')}" for name in _adapted(engine)}
    own |= {prefix for prefix, part in _copies(engine.module) if not part.used}
    is_peft = hasattr(engine.module, "get_base_model")
    return {
        name: bare(name)
        for name in buffers
        if (name.startswith(PREFIX) or not is_peft)
        and not any(name.startswith(prefix) and not name.startswith(f"{prefix}base_layer.") for prefix in own)
    }


def has_adapters(model: nn.Module) -> bool:
    """Whether PEFT has changed the model."""
    return hasattr(model, "get_base_model") or any(_layers(model)) or any(_copies(model))


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        if hasattr(module, "active_adapters") and hasattr(module, "base_layer"):  # PEFT's, which need not be installed
            yield path, module


def _of_unit(unit: Unit, source: _Source) -> Iterator[tuple[str, Tensor]]:
    kept = source.kept(unit)
    if not kept:
        return
    released = unit.state is State.RELEASED
    with torch.no_grad():
        unit.gather()
    try:
        for name, view in ((unit.names[i], unit.views[i]) for i in kept):
            with torch.no_grad():
                weight = dequantize_rows(view, source.forms[name], torch.float32) if name in source.forms else view
                weight = _merged(weight, source.adapted[name]) if name in source.adapted else weight
            yield bare(name), weight
    finally:
        if released:
            unit.release()


def _source(engine: Engine) -> _Source:
    """Raises ValueError for what cannot be handed over."""
    for unit in engine.units:
        for name, param, whole in zip(unit.names, unit.params, unit.wholes, strict=True):
            if whole is not param:
                raise ValueError(
                    f"{name!r} is a part of a weight that another library quantized, which no server takes: quantize the base by "
                    f"slipstream.quantize(), or hand over a model that is not quantized"
                )
    adapted = _adapted(engine)
    adapters = {id(param) for module in adapted.values() for name, param in module.named_parameters() if "base_layer" not in name}
    return _Source(adapted, adapters, _unused(engine.module), row_forms(engine.module))


class _Copy(NamedTuple):
    """A module as it was, or a copy of it that PEFT trains (modules_to_save)."""

    module: nn.Module
    used: bool  # by the forward


def _copies(model: nn.Module) -> Iterator[tuple[str, _Copy]]:
    """By what the names of their parameters begin with."""
    for path, wrapper in model.named_modules():
        copies, original = getattr(wrapper, "modules_to_save", None), getattr(wrapper, "original_module", None)
        if isinstance(copies, nn.ModuleDict) and isinstance(original, nn.Module):
            active: Any = () if getattr(wrapper, "disable_adapters", False) else getattr(wrapper, "active_adapters", ())
            yield f"{path}.original_module.", _Copy(original, not active)
            for name, copy in copies.items():
                yield f"{path}.modules_to_save.{name}.", _Copy(copy, name in active[:1])


def _unused(model: nn.Module) -> set[int]:
    """Raises ValueError for a weight that a module elsewhere shares with one that is not used."""
    copies = list(_copies(model))
    unused = {id(param) for _, copy in copies if not copy.used for param in copy.module.parameters()}
    prefixes = tuple(prefix for prefix, _ in copies)
    for name, param in model.named_parameters(remove_duplicate=False):
        if id(param) in unused and not name.startswith(prefixes):
            raise ValueError(
                f"{name!r} is tied to a module that PEFT trains a copy of (modules_to_save), and is not that copy: the model is "
                f"tied no longer, and no folder or server of it can say so; LoraConfig(ensure_weight_tying=True) keeps them tied"
            )
    return unused


def _adapted(engine: Engine) -> dict[str, Any]:
    """PEFT's layers, by the name of the weight that they adapt. Raises ValueError for what `_merged` would not make of it."""
    found: dict[str, Any] = {}
    for name, config in getattr(engine.module, "peft_config", {}).items():
        if getattr(config, "is_prompt_learning", False):
            raise ValueError(f"adapter {name!r} is a prompt ({config.peft_type}), which no weight can take in")
    names = {name for unit in engine.units for name in unit.names}
    uses = Counter(id(param) for _, param in engine.module.named_parameters(remove_duplicate=False))
    for path, module in _layers(engine.module):
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


def bare(name: str) -> str:
    """As the model that was wrapped calls it."""
    name = name.removeprefix(PREFIX).replace(".base_layer.", ".").replace(".original_module.", ".")
    before, found, after = name.partition(".modules_to_save.")
    return f"{before}.{after.partition('.')[2]}" if found else name

"""Hand-over: stream a training engine's weights to an inference engine, unit by unit, as names and full tensors.

One unit is gathered at a time (over shared memory nothing is copied: ranks read the weights in place). Slices are joined, and each
stage's weights go to the ranks of the other stages. PEFT adapters are merged: under the base weight's name the stream yields the
sum of base and adapter, and it skips the adapters' own weights. Adapters that are not a sum with one weight raise an error before
the stream starts. For a module of which PEFT trains a copy, the stream yields the copy. Weights quantized by `slipstream.quantize`
are dequantized.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from slipstream.checkpoint.flat_slice import Shape
from slipstream.ops.rows import RowForm, dequantize_rows
from slipstream.quantized import row_forms
from slipstream.train.states import States
from slipstream.zero import access
from slipstream.zero.leaves import whole_shape
from slipstream.zero.unit import State, Unit

PREFIX = "base_model.model."  # before every name of a model that PEFT has wrapped
_ADDED = ("lora", "adalora", "loha", "lokr", "vera")  # PEFT's tuners whose get_delta_weight() is added to the weight


class _HandoverSource(NamedTuple):
    """The model's parameters by their role in the stream."""

    adapted: dict[str, Any]  # PEFT's layers, by the name of the weight that they adapt
    adapters: set[int]  # ids of the adapters' parameters
    unused: set[int]  # ids of the parameters of modules and module copies that the forward does not use
    forms: dict[str, RowForm]

    def kept(self, unit: Unit) -> list[int]:
        return [i for i, param in enumerate(unit.params) if id(param) not in self.adapters | self.unused]


def stream(states: States) -> Iterator[tuple[str, Tensor]]:
    """See `Engine.named_weights`."""
    own = _of_stage(states)
    pp = states.mesh.pp
    if pp.size == 1:
        yield from own
        return
    exchange, passed = states.exchange("pp"), set[str]()
    for place, facts in enumerate(announced_by_stages(states)):
        for name, (shape, dtype) in facts.items():
            weight = next(own)[1] if place == pp.index else torch.empty(0, dtype=dtype, device=states.device)
            if name not in passed:  # a tied parameter is in several stages
                passed.add(name)
                sizes = [math.prod(shape) if i == place else 0 for i in range(pp.size)]
                yield name, exchange.gather(weight.reshape(-1), 0, sizes).view(shape)
    for _ in own:
        pass


def _of_stage(states: States) -> Iterator[tuple[str, Tensor]]:
    source = _source(states)
    with ExitStack() as shown:
        if source.adapters:
            chosen = {unit: [i for i, param in enumerate(unit.params) if id(param) in source.adapters] for unit in states.units}
            with torch.no_grad():  # never across a yield, because the caller's grad mode may change between items
                shown.enter_context(access.gathered_units({unit: own for unit, own in chosen.items() if own}, None, write=False))
        for unit in states.units:
            yield from _of_unit(unit, source)


def announced(states: States) -> dict[str, tuple[Shape, torch.dtype]]:
    """The names, shapes and dtypes that this stage's `stream` yields, without gathering. Raises the same errors."""
    source, entries = _source(states), {}
    for unit in states.units:
        for i in source.kept(unit):
            form, shape = source.forms.get(unit.names[i]), whole_shape(unit.params[i], unit.layout.slots[i].shape)
            entries[bare(unit.names[i])] = ((shape[0], form.columns), torch.float32) if form else (shape, unit.dtypes.weights)
    return entries


def announced_by_stages(states: States) -> list[dict[str, tuple[Shape, torch.dtype]]]:
    """`announced` of each stage. Collective over the stages; if one of them cannot be streamed, all raise its ValueError."""
    facts, failure = dict[str, tuple[Shape, torch.dtype]](), ""
    try:
        facts = announced(states)
    except ValueError as error:
        failure = str(error)
    gathered = states.mesh.pp.gather((facts, failure))
    if first := next(filter(None, (why for _, why in gathered)), ""):
        raise ValueError(first)
    return [each for each, _ in gathered]


def adapted_buffers(states: States, buffers: Iterable[str]) -> dict[str, str]:
    """The names of the base model's buffers -> their names in the base model."""
    own = {f"{name.removesuffix('base_layer.weight')}" for name in _adapted(states)}
    own |= {prefix for prefix, _, is_used in _copies(states.model) if not is_used}
    is_peft = hasattr(states.model, "get_base_model")
    return {
        name: bare(name)
        for name in buffers
        if (name.startswith(PREFIX) or not is_peft)
        and not any(name.startswith(prefix) and not name.startswith(f"{prefix}base_layer.") for prefix in own)
    }


def version(states: States) -> tuple[Any, ...]:
    """Equal values mean that `stream` yields the same weights; equal on all ranks. A running update counts when it is done."""
    adapters = [(tuple(layer.active_adapters), layer.disable_adapters, layer.merged) for _, layer in _layers(states.model)]
    return [unit.shown.num_changes for unit in states.units], adapters


def has_adapters(model: nn.Module) -> bool:
    """Whether PEFT has changed the model."""
    return hasattr(model, "get_base_model") or any(_layers(model)) or any(_copies(model))


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        if hasattr(module, "active_adapters") and hasattr(module, "base_layer"):  # PEFT's layers, without importing PEFT
            yield path, module


def _of_unit(unit: Unit, source: _HandoverSource) -> Iterator[tuple[str, Tensor]]:
    kept = source.kept(unit)
    if not kept:
        return
    released = unit.state is State.RELEASED
    with torch.no_grad():
        unit.gather_exactly()
    try:
        for i in kept:
            name, view = unit.names[i], unit.shown.views[i]
            with torch.no_grad():
                weight = dequantize_rows(view, source.forms[name], torch.float32) if name in source.forms else view
                weight = _merged(weight, source.adapted[name]) if name in source.adapted else weight
            yield bare(name), access.whole_of(weight, unit, i)
    finally:
        if released:
            unit.release()


def _source(states: States) -> _HandoverSource:
    """Classify the parameters. Raises ValueError for a model that cannot be streamed."""
    for unit in states.units:
        for name, param, whole in zip(unit.names, unit.params, unit.model_params, strict=True):
            if whole is not param:
                raise ValueError(
                    f"{name!r} is a part of a weight that another library quantized, and such weights cannot be handed over: use "
                    f"slipstream.quantize() for the base, or a model that is not quantized"
                )
    adapted = _adapted(states)
    adapters = {id(param) for module in adapted.values() for name, param in module.named_parameters() if "base_layer" not in name}
    return _HandoverSource(adapted, adapters, _unused(states.model), row_forms(states.model))


def _copies(model: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """The modules of which PEFT trains copies (modules_to_save), and these copies: the prefix of the names of their parameters, the
    module, and whether the forward uses it."""
    for path, wrapper in model.named_modules():
        copies, original = getattr(wrapper, "modules_to_save", None), getattr(wrapper, "original_module", None)
        if isinstance(copies, nn.ModuleDict) and isinstance(original, nn.Module):
            active: Any = () if getattr(wrapper, "disable_adapters", False) else getattr(wrapper, "active_adapters", ())
            yield f"{path}.original_module.", original, not active
            for name, copy in copies.items():
                yield f"{path}.modules_to_save.{name}.", copy, name in active[:1]


def _unused(model: nn.Module) -> set[int]:
    """The ids of unused parameters. Raises ValueError if another module uses one of them, too (a tied weight)."""
    copies = list(_copies(model))
    unused = {id(param) for _, module, is_used in copies if not is_used for param in module.parameters()}
    prefixes = tuple(prefix for prefix, *_ in copies)
    for name, param in model.named_parameters(remove_duplicate=False):
        if id(param) in unused and not name.startswith(prefixes):
            raise ValueError(
                f"{name!r} is tied to a module that PEFT trains a copy of (modules_to_save), so the two weights now differ and "
                f"cannot be exported as tied; LoraConfig(ensure_weight_tying=True) keeps them tied"
            )
    return unused


def _adapted(states: States) -> dict[str, Any]:
    """PEFT's layers, by the name of the weight that they adapt. Raises ValueError for adapters that `_merged` cannot merge."""
    layers: dict[str, Any] = {}
    for name, config in getattr(states.model, "peft_config", {}).items():
        if getattr(config, "is_prompt_learning", False):
            raise ValueError(f"adapter {name!r} is a prompt ({config.peft_type}), which cannot be merged into a weight")
    names = {name for unit in states.units for name in unit.names}
    uses = Counter(id(param) for _, param in states.model.named_parameters(remove_duplicate=False))
    for path, module in _layers(states.model):
        name = f"{path}.base_layer.weight"
        layers[name] = module
        if why := _unmergeable(module, alone=name in names and uses[id(module.base_layer.weight)] == 1):
            raise ValueError(f"{path!r} is adapted by {why}, which cannot be merged on the fly; call merge_and_unload() first")
    return layers


def _unmergeable(layer: Any, alone: bool) -> str:
    """Why an adapter cannot be merged by adding to the base weight; "" if it can. alone: no other layer uses the weight."""
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
    return "" if alone else f"{type(layer).__name__} on a weight that is not its own (target_parameters, or a tied weight)"


def _merged(weight: Tensor, layer: Any) -> Tensor:
    if layer.merged or layer.disable_adapters:
        return weight
    for adapter in layer.active_adapters:
        weight = weight + layer.get_delta_weight(adapter).to(weight)
    return weight


def bare(name: str) -> str:
    """The name that a parameter or buffer has in the model that PEFT wrapped."""
    name = name.removeprefix(PREFIX).replace(".base_layer.", ".").replace(".original_module.", ".")
    before, is_copy, after = name.partition(".modules_to_save.")
    return f"{before}.{after.partition('.')[2]}" if is_copy else name

"""Quantize layers as the config says, before an engine has them: DeepSpeed's `weight_quantization` (ZeRO-Inference).

rule   a text to find in layer names, with bits and the columns that share a scale; "" matches every name, and has lowest priority
layer  an `nn.Linear` or `nn.Embedding`, no subclass. Also the output head, and layers that share a weight, if each has a rule
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from slipstream.ops.rows import RowForm
from slipstream.quantized.linear import QuantizedEmbedding, QuantizedLinear, nothing, packed_rows, refuse

logger = logging.getLogger(__name__)

_KINDS = (nn.Linear, nn.Embedding)
Rules = Mapping[str, Mapping[str, Any]]  # text -> num_bits, group_size


def rules_of(block: Mapping[str, Any]) -> Rules:
    """The rules of a block `weight_quantization`."""
    everywhere = block.get("quantized_initialization")
    return {**(block.get("post_init_quant") or {}), **({"": everywhere} if everywhere else {})}


def layers_with_rules(model: nn.Module, rules: Rules) -> list[tuple[list[str], RowForm]]:
    """The names of layers that share a weight, and its byte format; without layers that are already quantized.

    Raises ValueError if two texts match a layer's name, if layers that share a weight have different rules, or if no layer has a
    rule."""
    holders = _holders(model)
    # In evaluation torch computes these from their children's weights, without calling the children.
    inner = {id(child) for each in model.modules() if isinstance(each, nn.TransformerEncoderLayer) for child in each.modules()}
    chosen, left, used = [], [], set()
    for name, module in model.named_modules():
        if type(module) not in _KINDS or (text := _text_of(name, rules)) is None:
            continue
        used.add(text)
        sharing = holders.pop(id(module.weight), {})
        rule = _rule_of(sharing, rules)
        if sharing and rule is not None and all(_fits(each) and id(each) not in inner for each in sharing.values()):
            columns = module.embedding_dim if isinstance(module, nn.Embedding) else module.in_features
            chosen.append((list(sharing), RowForm(bits=rule["num_bits"], columns=int(columns), block=rule["group_size"])))
        else:
            left += list(sharing)
    done = [name for name, module in model.named_modules() if isinstance(module, QuantizedLinear | QuantizedEmbedding)]
    if not chosen and not done:
        raise ValueError(
            f"weight_quantization: no nn.Linear and no nn.Embedding of {type(model).__name__} has one of {sorted(rules)} in its "
            f"name; give post_init_quant keys that are parts of layers' names"
        )
    _warn([text for text in rules if text not in used and not any(text in name for name in done)], left)
    return chosen


def _holders(model: nn.Module) -> dict[int, dict[str, nn.Module]]:
    """The modules that have a parameter, by its id."""
    holders: dict[int, dict[str, nn.Module]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for param in module._parameters.values():
            if param is not None:
                holders.setdefault(id(param), {})[name] = module
    return holders


def _warn(idle: Sequence[str], left: Sequence[str]) -> None:
    if idle:
        logger.warning("weight_quantization.post_init_quant: no layer's name has %s", ", ".join(map(repr, idle)))
    if left:
        logger.warning("weight_quantization leaves out layers whose weight is also used in another way: %s", ", ".join(left))


def _fits(layer: nn.Module) -> bool:
    return type(layer) in _KINDS and getattr(layer, "max_norm", None) is None


def _rule_of(names: Collection[str], rules: Rules) -> Mapping[str, Any] | None:
    """The rule of layers that share a weight: one that names a layer, before the general one; None if a layer has no rule."""
    texts = {_text_of(name, rules) if name else None for name in names}
    named = sorted(text for text in texts if text)
    if any(rules[text] != rules[named[0]] for text in named):
        raise ValueError(f"weight_quantization.post_init_quant: layers {sorted(names)} share a weight; leave one of {named}")
    return None if None in texts or not texts else rules[named[0] if named else ""]


def quantize_layers(
    model: nn.Module, names: Sequence[str], form: RowForm, dtype: torch.dtype | None = None, *, unread: bool = False
) -> nn.Parameter:
    """Replace layers that share a weight; returns the new shared weight.

    dtype   of embeddings' outputs; None: their own
    unread  the weight is on meta until its values are read"""
    layers: list[Any] = [model.get_submodule(name) for name in names]
    weight = packed_rows(layers[0].weight.to("meta") if unread else layers[0].weight, form)
    replaced: dict[nn.Module, nn.Module] = {}  # a layer with two names stays one layer
    for name, layer in zip(names, layers, strict=True):
        if layer not in replaced:
            is_linear = isinstance(layer, nn.Linear)
            replaced[layer] = QuantizedLinear(layer, form, weight) if is_linear else QuantizedEmbedding(layer, form, weight, dtype)
        model.set_submodule(name, replaced[layer])
    return weight


def quantize_by_rules(model: nn.Module, rules: Rules, dtype: torch.dtype, is_unread: Callable[[str], bool] = nothing) -> None:
    """Replace the layers that have a rule, in place.

    dtype      of embeddings' outputs
    is_unread  whether the value of the named parameter is read later

    Raises ValueError, with nothing changed, for the reasons of `layers_with_rules` and of `quantize`."""
    chosen = layers_with_rules(model, rules)
    refuse(model, {model.get_submodule(names[0]): names for names, _ in chosen}, is_unread)
    for names, form in chosen:
        quantize_layers(model, names, form, dtype, unread=any(is_unread(f"{name}.weight") for name in names))


def _text_of(name: str, rules: Rules) -> str | None:
    matches = [text for text in rules if text and text in name]
    if len(matches) > 1:
        raise ValueError(f"weight_quantization.post_init_quant: the name of layer {name!r} has {matches}; leave one in it")
    return matches[0] if matches else "" if "" in rules else None

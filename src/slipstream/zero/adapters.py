"""Initial values of PEFT adapters that were added to a model on meta, where PEFT's own initialization has no effect.

A PEFT layer lists in `adapter_layer_names` the attributes that hold adapters by name. LoRA adapters are initialized again by the
layer's own initializer. Any other adapter raises an error: some start from the base weights, and the default initializers of their
modules would be wrong for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

import torch.nn as nn


class Adapter(NamedTuple):
    """An adapter that needs initial values."""

    params: list[nn.Parameter]
    reset: Callable[[], None]


def find_adapters(model: nn.Module, fresh: Collection[int]) -> dict[str, list[Adapter]]:
    """The adapters with parameters in `fresh` (ids), by layer name. Raises ValueError for one that only PEFT can initialize."""
    adapters: dict[str, list[Adapter]] = {}
    configs = getattr(model, "peft_config", {})
    for path, layer in model.named_modules():
        for name, params in _adapter_params(layer).items():
            uninitialized = [param for param in params if id(param) in fresh]
            if not uninitialized:
                continue
            config = configs.get(name)
            init: Any = getattr(config, "init_lora_weights", None)
            is_plain = name not in getattr(layer, "lora_variant", {})  # set by DoRA and others
            if not (hasattr(layer, "reset_lora_parameters") and is_plain and (init is True or str(init).lower() == "gaussian")):
                raise ValueError(
                    f"adapter {name!r} of module {path!r} ({type(layer).__name__}) was made on meta, and its initial values are "
                    f"lost; of PEFT's adapters only LoRA (init_lora_weights=True or 'gaussian', no variants) can be initialized "
                    f"again. Add it after initialize, inside `with engine.surgery():`, or to a model that has its weights"
                )
            adapters.setdefault(path, []).append(Adapter(uninitialized, partial(layer.reset_lora_parameters, name, init)))
    return adapters


def _adapter_params(layer: Any) -> dict[str, list[nn.Parameter]]:
    """The parameters of a layer's adapters, by the adapter's name."""
    params: dict[str, list[nn.Parameter]] = {}
    for attribute in getattr(layer, "adapter_layer_names", ()):
        holder = getattr(layer, attribute, None)
        for name, item in holder.items() if isinstance(holder, nn.ModuleDict | nn.ParameterDict) else ():
            if isinstance(item, nn.Module | nn.Parameter):
                params.setdefault(name, []).extend([item] if isinstance(item, nn.Parameter) else item.parameters())
    return params

"""First values of adapters that PEFT has put onto a model on meta: they go to where their layer is, and their values are gone.

A layer of PEFT's knows itself by `adapter_layer_names`: which of its attributes hold adapters by name. LoRA's are given what PEFT
would have given them, by its own initializer. Any other adapter is refused: some start from the base's weights, and none may start
from what its modules would take of themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch.nn as nn


class Adapter(NamedTuple):
    """One that has to be initialized."""

    layer: Any
    name: str
    init: bool | str  # LoraConfig.init_lora_weights
    params: list[nn.Parameter]

    def reset(self) -> None:
        self.layer.reset_lora_parameters(self.name, self.init)


def find_adapters(model: nn.Module, fresh: Collection[int]) -> dict[str, list[Adapter]]:
    """Those that hold parameters of `fresh` (ids), by their layer's name. Raises ValueError for what only PEFT could initialize."""
    found: dict[str, list[Adapter]] = {}
    configs = getattr(model, "peft_config", {})
    for path, layer in model.named_modules():
        for name, params in _held(layer).items():
            lost = [param for param in params if id(param) in fresh]
            if not lost:
                continue
            config = configs.get(name)
            init: Any = getattr(config, "init_lora_weights", None)
            is_plain = name not in getattr(layer, "lora_variant", {})  # of DoRA and others
            if not (hasattr(layer, "reset_lora_parameters") and is_plain and (init is True or str(init).lower() == "gaussian")):
                raise ValueError(
                    f"adapter {name!r} of module {path!r} ({type(layer).__name__}) was made on meta, and its first values are "
                    f"gone; of PEFT's, only LoRA's usual ones (init_lora_weights=True or 'gaussian', without variants) can be made "
                    f"again. Add it after initialize, inside `with engine.surgery():`, or to a model that has its weights"
                )
            found.setdefault(path, []).append(Adapter(layer, name, init, lost))
    return found


def _held(layer: Any) -> dict[str, list[nn.Parameter]]:
    """The parameters of a layer's adapters, by the adapter's name."""
    held: dict[str, list[nn.Parameter]] = {}
    for attribute in getattr(layer, "adapter_layer_names", ()):
        for name, item in _items(getattr(layer, attribute, None)):
            held.setdefault(name, []).extend([item] if isinstance(item, nn.Parameter) else item.parameters())
    return held


def _items(holder: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(holder, nn.ModuleDict | nn.ParameterDict):
        yield from ((name, item) for name, item in holder.items() if isinstance(item, nn.Module | nn.Parameter))

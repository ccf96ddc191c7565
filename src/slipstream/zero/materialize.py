"""From meta to memory: give real, initialised storage to the parameters and buffers of a model built on `meta`.

Parameters stay the same Python objects (`torch.utils.swap_tensors`), so references made before are still right.
"""

from __future__ import annotations

import torch
import torch.nn as nn


def materialize(model: nn.Module, device: torch.device) -> None:
    """Allocate and initialise every module that has something on meta, by its own `reset_parameters` or `_init_weights`.

    Raises ValueError naming the module that can do neither, before anything is changed.
    """
    init = getattr(model, "_init_weights", None)  # transformers
    on_meta = [(name, module) for name, module in model.named_modules() if _on_meta(module)]
    able = [module for _, module in on_meta if init is not None or callable(getattr(module, "reset_parameters", None))]
    initialised = {id(tensor) for module in able for tensor in _on_meta(module).values()}  # also for modules tied to them
    for name, module in on_meta:
        if any(id(tensor) not in initialised for tensor in _on_meta(module).values()):
            raise ValueError(
                f"module {name!r} ({type(module).__name__}) is on meta and has no reset_parameters(); give it one, or build "
                f"the model with real weights"
            )
    for module in able:
        found = _on_meta(module)
        for leaf, tensor in found.items():
            real = torch.empty_like(tensor, device=device)
            if isinstance(tensor, nn.Parameter):
                torch.utils.swap_tensors(tensor, nn.Parameter(real, requires_grad=tensor.requires_grad))
            else:
                setattr(module, leaf, real)
        if found and callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    if init is not None:
        model.apply(init)


def _on_meta(module: nn.Module) -> dict[str, torch.Tensor]:
    """What the module itself holds on meta, by its attribute's name."""
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return {leaf: tensor for leaf, tensor in own if tensor.is_meta}

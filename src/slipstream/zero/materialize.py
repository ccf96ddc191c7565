"""From meta to memory: give real, initialised storage to the parameters and buffers of a model built on `meta`.

Parameters stay the same Python objects (`torch.utils.swap_tensors`), so references made before are still right.
"""

from __future__ import annotations

import torch
import torch.nn as nn


def materialize(model: nn.Module, device: torch.device) -> None:
    """Allocate and initialise every module that has something on meta, by its own `reset_parameters` or `_init_weights`.

    Raises ValueError naming a module that can do neither, before anything is changed, or a tensor that was left without a value.
    """
    init = getattr(model, "_init_weights", None)  # transformers, nanoGPT
    on_meta = [(name, module) for name, module in model.named_modules() if _on_meta(module)]
    able = [module for _, module in on_meta if init is not None or callable(getattr(module, "reset_parameters", None))]
    initialised = {id(tensor) for module in able for tensor in _on_meta(module).values()}  # also for modules tied to them
    for name, module in on_meta:
        if any(id(tensor) not in initialised for tensor in _on_meta(module).values()):
            raise ValueError(
                f"module {name!r} ({type(module).__name__}) is on meta and has no reset_parameters(); give it one, or build "
                f"the model with real weights"
            )
    # A model's own initialiser may reach from a module into its children, so it gets those that hold nothing else, children first.
    whole = [module for _, module in model.named_modules() if all(param.is_meta for param in module.parameters())]
    for module in able:
        found = _on_meta(module)
        for leaf, tensor in found.items():
            real = torch.empty_like(tensor, device=device)
            _mark(real)
            if isinstance(tensor, nn.Parameter):
                torch.utils.swap_tensors(tensor, nn.Parameter(real, requires_grad=tensor.requires_grad))
            else:
                setattr(module, leaf, real)
        if found and callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    if init is not None:
        for module in reversed(whole):
            init(module)
    for name, module in on_meta:
        for leaf, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if _is_marked(tensor):
                raise ValueError(
                    f"{name}.{leaf} was on meta, and neither its module's ({type(module).__name__}) reset_parameters() nor the "
                    f"model's _init_weights() gave it a value; build the model with real weights, or register it there"
                )


def _on_meta(module: nn.Module) -> dict[str, torch.Tensor]:
    """What the module itself holds on meta, by its attribute's name."""
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return {leaf: tensor for leaf, tensor in own if tensor.is_meta}


def _mark(tensor: torch.Tensor) -> None:
    """Fill fresh memory with what no initialiser writes; a bool, which has no such value, with False."""
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        else:
            tensor.fill_(False if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).max)


def _is_marked(tensor: torch.Tensor) -> bool:
    """Whether the tensor still holds the mark somewhere."""
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(torch.isnan(tensor.detach()).any())
    return tensor.dtype is not torch.bool and bool((tensor == torch.iinfo(tensor.dtype).max).any())

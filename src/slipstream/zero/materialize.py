"""From meta to memory: give real, initialised storage to the parameters and buffers of a model built on `meta`.

Parameters stay the same Python objects (`torch.utils.swap_tensors`), so references made before are still right.
"""

from __future__ import annotations

import torch
import torch.nn as nn


def materialize(model: nn.Module, device: torch.device) -> None:
    """Allocate and initialise every module that has something on meta, by its own `reset_parameters` or `_init_weights`.

    Raises ValueError naming the module that can do neither.
    """
    init = getattr(model, "_init_weights", None)  # transformers
    done: set[int] = set()
    for name, module in model.named_modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        if not any(tensor.is_meta for _, tensor in own):
            continue
        reset = getattr(module, "reset_parameters", None)
        if init is None and not callable(reset):
            raise ValueError(
                f"module {name!r} ({type(module).__name__}) is on meta and has no reset_parameters(); give it one, or build "
                f"the model with real weights"
            )
        for leaf, tensor in own:
            if not tensor.is_meta or id(tensor) in done:
                continue
            real = torch.empty_like(tensor, device=device)
            if isinstance(tensor, nn.Parameter):
                torch.utils.swap_tensors(tensor, nn.Parameter(real, requires_grad=tensor.requires_grad))
            else:
                setattr(module, leaf, real)
            done.add(id(tensor))
        if callable(reset):
            reset()
    if init is not None:
        model.apply(init)

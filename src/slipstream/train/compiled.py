"""torch.compile of a model's repeated blocks, as the config's `compile` asks, without touching its code.

A block's `forward` is shadowed on the instance, below what `activation` does, so that hooks and recompute stay outside its graph:
alike blocks share one, and `fullgraph` holds. A model without repeated blocks is compiled as a whole. `remove` undoes it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from slipstream.config.plan import CompilePlan
from slipstream.train.activation import Shadow
from slipstream.zero.wrap import repeated_blocks


class Compiled(Shadow):
    """Runs the block's forward as torch.compile makes it."""

    def __init__(self, block: nn.Module, backend: str | Callable[..., Any], kwargs: dict[str, Any]) -> None:
        super().__init__(block)
        self.compiled = torch.compile(self.own, backend=backend, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self.own if self.removed else self.compiled)(*args, **kwargs)


def apply(plan: CompilePlan | None, model: nn.Module) -> list[Compiled]:
    """Shadow the forwards of the repeated blocks, or of the model where there are none; each of what is returned has a `remove`."""
    if plan is None:
        return []
    modules = dict(model.named_modules())
    return [Compiled(modules[name], backend_of(plan.backend), plan.kwargs) for name in repeated_blocks(model) or [""]]


def check(plan: CompilePlan | None) -> None:
    """Raise ValueError for a backend or arguments that torch.compile refuses. Nothing is compiled."""
    if plan is None:
        return
    backend = backend_of(plan.backend)
    try:
        torch.compile(lambda x: x, backend=backend, **plan.kwargs)
    except (TypeError, RuntimeError, AttributeError) as error:
        raise ValueError(
            f"torch.compile refuses compile.kwargs {plan.kwargs!r}: {str(error).splitlines()[0]}; it takes mode, dynamic, "
            f"fullgraph and options"
        ) from None


def backend_of(name: str) -> str | Callable[..., Any]:
    """A name that torch knows as it is; the function that MODULE.FUNCTION names, as DeepSpeed reads it."""
    from torch._dynamo import list_backends  # takes a while to import

    known = list_backends(exclude_tags=())
    if name in known:
        return name
    module, _, function = name.rpartition(".")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except (ImportError, ValueError, AttributeError):
        raise ValueError(
            f"compile.backend {name!r} is no backend of torch.compile and no MODULE.FUNCTION that can be imported; use one of "
            f"{', '.join(known)}"
        ) from None
    return found

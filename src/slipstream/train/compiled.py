"""torch.compile for a model's repeated blocks, as the config's `compile` says, without changes to the model's code.

The block's `forward` is replaced on the instance, inside the replacement of `activations`, so hooks and recompute stay outside the
graph: identical blocks share one graph, and `fullgraph` works. A model without repeated blocks is compiled as a whole.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from slipstream.activations.blocks import Shadow
from slipstream.config.features import Compile
from slipstream.zero.wrap import repeated_blocks


class Compiled(Shadow):
    """Runs the block's compiled forward."""

    def __init__(self, block: nn.Module, backend: str | Callable[..., Any], kwargs: dict[str, Any]) -> None:
        super().__init__(block)
        self.compiled = torch.compile(self.own, backend=backend, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self.own if self.removed else self.compiled)(*args, **kwargs)


def apply(plan: Compile | None, model: nn.Module) -> list[Compiled]:
    """Compile the repeated blocks, or the model if there are none; each returned object has a `remove`."""
    if plan is None:
        return []
    modules = dict(model.named_modules())
    return [Compiled(modules[name], backend_of(plan.backend), plan.kwargs) for name in repeated_blocks(model) or [""]]


def check(plan: Compile | None) -> None:
    """Raise ValueError for a backend or arguments that torch.compile refuses, without compiling."""
    if plan is None:
        return
    backend = backend_of(plan.backend)
    try:
        torch.compile(lambda x: x, backend=backend, **plan.kwargs)
    except (TypeError, RuntimeError, AttributeError) as error:
        raise ValueError(
            f"torch.compile refuses compile.kwargs {plan.kwargs!r}: {str(error).splitlines()[0]}; it supports mode, dynamic, "
            f"fullgraph and options"
        ) from None


def backend_of(name: str) -> str | Callable[..., Any]:
    """The name of a torch backend, or the imported function for MODULE.FUNCTION, as in DeepSpeed."""
    from torch._dynamo import list_backends  # slow to import

    backends = list_backends(exclude_tags=())
    if name in backends:
        return name
    module, _, function = name.rpartition(".")
    try:
        backend: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except (ImportError, ValueError, AttributeError):
        raise ValueError(
            f"compile.backend {name!r} is neither a backend of torch.compile nor an importable MODULE.FUNCTION; use one of "
            f"{', '.join(backends)}"
        ) from None
    return backend

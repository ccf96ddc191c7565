"""The load of experts: counted in every forward of a training step, and balanced by a bias on the choice of experts.

After each update, a layer with `balance_rate` raises the bias of experts with less than the mean load of all data-parallel ranks by
the rate, and lowers that of the others (arXiv:2408.15664). The bias changes who is chosen, not the weights, so no gradient fights
the language model's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from slipstream.moe.layer import MoE

Sum = Callable[[Tensor], Tensor]  # over the ranks that train the layers; collective


def expert_loads(model: nn.Module) -> dict[str, Tensor]:
    """The routes to each expert in the last training step, by the layer's name: int64, of this rank's tokens.

    During a step, and without an engine, those of all forwards since.
    """
    named = ((name, module) for name, module in model.named_modules() if isinstance(module, MoE))
    return {name: module.load + module.last_load * (not module.load.any()) for name, module in named}


def balancing(model: nn.Module, connect: Callable[[], Sum]) -> Iterator[Callable[[], None]]:
    """The work after each update of a model that has layers of ours. connect: collective, called if a layer is balanced."""
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    if layers:
        total = connect() if any(layer.balance is not None for layer in layers) else None
        yield lambda: end_step(layers, total)


@torch.no_grad()
def end_step(layers: Sequence[MoE], total: Sum | None) -> None:
    """Balance, and begin to count anew. Collective if a layer has a `balance_rate`."""
    moving = [(layer, layer.balance) for layer in layers if layer.balance is not None]
    if moving and total is not None:
        loads = total(torch.cat([layer.load for layer, _ in moving])).split([layer.num_experts for layer, _ in moving])
        for (_, balance), load in zip(moving, loads, strict=True):
            balance.add_((load.sum() - load * len(load)).sign())
    for layer in layers:
        layer.last_load.copy_(layer.load)
        layer.load.zero_()

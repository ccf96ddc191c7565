"""After each step: the balance of experts by a bias on their choice, and the load in the log.

A layer with `balance_rate` raises the bias of experts with less than the mean load of all data-parallel ranks by the rate, and
lowers that of the others (arXiv:2408.15664). The bias changes who is chosen, not the weights, so no gradient fights the language
model's.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from slipstream.moe.layer import MoE
from slipstream.moe.load import Sum, entry, meters, sum_loads

logger = logging.getLogger("slipstream.train")


def balancing(
    model: nn.Module, connect: Callable[[], Sum], due: Callable[[], int | None], *, logs: bool
) -> Iterator[Callable[[bool], None]]:
    """The work after each step of a model that has layers of experts, called with whether the weights were updated.

    connect: collective, called at the first sum. due: the step if the log has an entry for it, the same on all ranks. logs: this
    rank writes it.
    """
    by_name = meters(model)
    balanced = [(module, module.balance) for module in model.modules() if isinstance(module, MoE) and module.balance is not None]
    total = functools.cache(connect)

    @torch.no_grad()
    def end_step(is_applied: bool) -> None:
        if balanced and is_applied:
            balance(balanced, total())
        for meter in by_name.values():
            meter.end_step()
        step = due()
        if step is not None:
            loads = sum_loads({name: meter.since for name, meter in by_name.items()}, total(), by_name)
            for meter in by_name.values():
                meter.since.zero_()
            if logs:
                logger.info("%s", entry(step, loads))

    if by_name:
        yield end_step


def balance(layers: Sequence[tuple[MoE, Tensor]], total: Sum) -> None:
    """Move the biases of layers against the load of the step. Collective."""
    loads = total(torch.cat([layer.meter.now[: layer.num_experts] for layer, _ in layers]))
    for (_, bias), load in zip(layers, loads.split([layer.num_experts for layer, _ in layers]), strict=True):
        bias.add_((load.sum() - load * len(load)).sign().to(bias.dtype))

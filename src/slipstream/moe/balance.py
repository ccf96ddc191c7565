"""After each step: balance the experts by a bias on their selection, and log their load.

A layer with `balance_rate`, or a transformers layer under `expert_parallel.load_balance_coeff`, raises the bias of experts with
less than the mean load over all data-parallel ranks by the rate, and lowers that of the others (arXiv:2408.15664). The bias changes
which experts are selected, not their weights, so no gradient competes with the language model's.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from slipstream.moe.huggingface import ForeignExperts
from slipstream.moe.layer import MoE
from slipstream.moe.listed import ListedExperts
from slipstream.moe.load import LoadMeter, Sum, entry, meters, sum_loads

Move = Callable[[Tensor], object]  # takes signs, int64 [num_experts]: 1 raises an expert's bias by one step

logger = logging.getLogger("slipstream.train")


def balancing(
    model: nn.Module, connect: Callable[[], Sum], due: Callable[[], int | None], *, logs: bool
) -> Iterator[Callable[[bool], None]]:
    """The work after each step for a model with layers of experts; called with whether the weights were updated.

    connect: collective, called at the first sum. due: returns the step if the log has an entry for it, the same on all ranks. logs:
    this rank writes the entry.
    """
    by_name = meters(model)
    balanced = list(_biases(model))
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


def _biases(model: nn.Module) -> Iterator[tuple[LoadMeter, Move]]:
    for module in model.modules():
        if isinstance(module, MoE) and module.balance is not None:
            yield module.meter, module.balance.add_
        elif isinstance(module, ForeignExperts | ListedExperts) and module.bias is not None:
            yield module.meter, module.bias.move


def balance(layers: Sequence[tuple[LoadMeter, Move]], total: Sum) -> None:
    """Move the layers' biases against the step's load. Collective."""
    loads = total(torch.cat([meter.now[: meter.num_experts] for meter, _ in layers]))
    for (_, move), load in zip(layers, loads.split([meter.num_experts for meter, _ in layers]), strict=True):
        move((load.sum() - load * len(load)).sign().to(torch.int64))

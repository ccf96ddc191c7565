"""Resting experts: experts without a route from any rank since the last step (slipstream.rest_unused_experts).

A step leaves their weights, masters and moments unchanged, as torch's optimizers do for a parameter without a gradient, and their
data on the host or on disk do not move. Each layer is known by its meter, whose counts are summed over all ranks: one exchange per
step. Forwards with gradients that a meter does not count (of a module in eval mode, or of experts called from outside their layer)
count as using all experts of their layer.

Gradients that reach an expert without a token (of a penalty on its weights) are not detected, and end with the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from slipstream.moe.listed import ListedExperts, experts_in
from slipstream.moe.load import LoadMeter, Sum, meters
from slipstream.zero.leaves import cuts_of, is_stack


class RestingExperts:
    """`optim.sharded.Rest` for a model's layers of experts. total: sums over the ranks of a stage."""

    def __init__(self, model: nn.Module, total: Sum) -> None:
        self._total = total
        by_name = meters(model)
        self._meters = list(by_name.values())
        self._experts: dict[int, list[tuple[LoadMeter, range]]] = {}  # id of a parameter -> its experts, of one or several layers
        for name, meter in by_name.items():
            for param, experts in _experts_of(model.get_submodule(name)):
                self._experts.setdefault(id(param), []).append((meter, experts))
        self._used: dict[LoadMeter, list[bool]] = {}

    def decide(self) -> None:
        if self._meters:
            counts = torch.cat([meter.now[: meter.num_experts] + meter.is_partial for meter in self._meters])
            parts = self._total(counts).split([meter.num_experts for meter in self._meters])
            self._used = {meter: (part > 0).tolist() for meter, part in zip(self._meters, parts, strict=True)}

    def used(self, param: nn.Parameter) -> Sequence[bool] | None:
        layers = self._experts.get(id(param))
        if layers is None:
            return None
        of_layers = (self._used[meter][experts.start : experts.stop] for meter, experts in layers)
        return [any(each) for each in zip(*of_layers, strict=True)]


def _experts_of(module: nn.Module) -> Iterator[tuple[nn.Parameter, range]]:
    """The parameters of a layer with a meter, each with the experts whose tensors this rank's part of it contains, one after
    another. Parameters of an inner layer with a meter belong to that layer."""
    apart = {id(param) for inner in meters(module) if inner for param in module.get_submodule(inner).parameters()}
    if isinstance(module, ListedExperts):
        for place, expert in enumerate(experts_in(module)):
            yield from ((param, range(place, place + 1)) for param in expert.parameters() if id(param) not in apart)
        return
    for param in module.parameters():
        if is_stack(param) and id(param) not in apart:
            own = next((part.ranges for part in cuts_of(param) if part.split.axis == "ep"), None) or ((0, len(param)),)
            yield param, range(*own[0])

"""The layers of experts of an engine: their load, the bias that balances them, their auxiliary losses, routers that drop tokens,
and experts that an update skips.

Connected at the start, and again after each surgery, which may have added layers.

A layer with `balance_rate`, or a transformers layer under `expert_parallel.load_balance_coeff`, raises the bias of experts with
less than the mean load over all data-parallel ranks by the rate, and lowers that of the others (arXiv:2408.15664). The bias changes
which experts are selected, not their weights, so no gradient competes with the language model's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from slipstream.moe.huggingface import ForeignExperts
from slipstream.moe.layer import MoE
from slipstream.moe.listed import ListedExperts, experts_in
from slipstream.moe.load import LoadMeter, Sum, entry, lost_tokens, meters, sum_loads
from slipstream.train.engine import Engine
from slipstream.zero.leaves import cuts_of, is_stack

Move = Callable[[Tensor], object]  # takes signs, int64 [num_experts]: 1 raises an expert's bias by one step

logger = logging.getLogger("slipstream.train")


def connect_experts(engine: Engine) -> None:
    states, mesh, watch, every = engine.states, engine.mesh, engine.watch, engine.plan.steps_per_print
    window, precision, device = engine.window, engine.precision, engine.device
    logs = mesh.batch.index == mesh.sp.index == mesh.tp.index == 0  # a rank of each pipeline stage
    by_name: dict[str, LoadMeter] = {}
    balanced: list[tuple[LoadMeter, Move]] = []

    def total(counts: Tensor) -> Tensor:
        """Collective from the first call on."""
        return states.exchange(mesh.stage).sum(counts)

    def connect(_: object) -> None:
        for module in states.model.modules():
            if isinstance(module, MoE):
                module.seed.value = lambda: precision.factor * window.share
        by_name.clear()
        by_name.update(meters(states.model))
        balanced[:] = _biases(states.model)
        for meter in by_name.values():
            meter.to(device)
        if states.plan.experts.rest_unused:
            states.steps.rest = RestingExperts(states.model, total)
        states.resources["auxiliary losses"] = losses = ExitStack()
        for meter in by_name.values():
            losses.callback(meter.forget_graph)

    @torch.no_grad()
    def end_step(is_applied: bool) -> None:
        if balanced and is_applied:
            balance(balanced, total)
        for meter in by_name.values():
            meter.end_step()
        if by_name and every and watch.step % every == 0:  # the same on all ranks
            loads = sum_loads({name: meter.since for name, meter in by_name.items()}, total, by_name)
            for meter in by_name.values():
                meter.since.zero_()
            if logs:
                logger.info("%s", entry(watch.step, loads))

    states.wire(connect)
    states.suspects.append(lambda: lost_tokens(by_name))
    states.after_step.append(end_step)


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


class RestingExperts:
    """`optim.sharded.Rest`: experts without a route from any rank since the last step rest (slipstream.rest_unused_experts).

    A step leaves their weights, masters and moments unchanged, as torch's optimizers do for a parameter without a gradient, and
    their data on the host or on disk do not move. Each layer is known by its meter, whose counts are summed over all ranks by
    `total`: one exchange per step. Forwards with gradients that a meter does not count (of a module in eval mode, or of experts
    called from outside their layer) count as using all experts of their layer. Gradients that reach an expert without a token (of a
    penalty on its weights) are not detected, and end with the step.
    """

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

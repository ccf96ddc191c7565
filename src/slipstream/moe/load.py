"""The load of experts: a meter in each layer, which counts in every forward of a training step without waiting for the device.

A meter's vector has num_experts + 4 elements, in fp64: the routes to each expert, before any is dropped; the dropped routes; the
lost tokens; the sum of the forwards' auxiliary losses, and their number.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slipstream.activations.recompute import is_repeating
from slipstream.parallel.exchange import without_values
from slipstream.zero.hooks import eager

Sum = Callable[[Tensor], Tensor]  # sums over the ranks that train the layers; collective
_MOST_LAYERS, _MOST_EXPERTS = 8, 16  # in a log entry


class ExpertLoad(NamedTuple):
    """The load of one layer's experts, over all ranks that train it."""

    routes: tuple[int, ...]  # to each expert, before any is dropped
    dropped: float  # as a share of the routes
    loss: float | None  # the mean auxiliary loss of the layer's forwards; None: the layer computes none, or had no forward
    lost: int = 0  # finite tokens whose weights are not finite: the router's logits are NaN or infinite

    @property
    def peak(self) -> float:
        """The largest load over the mean; 1 without tokens."""
        return max(self.routes) * len(self.routes) / sum(self.routes) if any(self.routes) else 1.0

    def __str__(self) -> str:
        routes = sorted(self.routes)
        shown = " ".join(map(str, self.routes))
        if len(routes) > _MOST_EXPERTS:
            shown = f"{routes[0]} to {routes[-1]}, half of the experts {routes[len(routes) // 4]} to {routes[len(routes) * 3 // 4]}"
        loss = "" if self.loss is None else f", auxiliary loss {self.loss:.4g}"
        lost = f", NaN or infinite logits for {self.lost} tokens" if self.lost else ""
        return f"max over mean {self.peak:.2f}, dropped {self.dropped:.2%}{loss}{lost}, routes {shown}"


class LoadMeter:
    """The vectors of one layer on this rank: of the current training step, of the last one, and of all since the last log entry.

    or_else: what else may have lost tokens, if the router's weights are not visible
    """

    def __init__(self, num_experts: int, or_else: str = "") -> None:
        self.num_experts, self.or_else = num_experts, or_else
        self.now, self.last, self.since = torch.zeros(3, num_experts + 4, dtype=torch.float64)
        self.is_partial = False  # the step has forwards with gradients that were not counted
        self.kept_loss: Tensor | None = None

    def __reduce__(self) -> Any:
        """A copied layer, also in a dry run or a file, has routed nothing."""
        return LoadMeter, (self.num_experts, self.or_else)

    def counts(self, *, training: bool) -> bool:
        """Whether the layer records its current forward."""
        has_gradients = torch.is_grad_enabled()
        if has_gradients and not training:
            self.is_partial = True
        return has_gradients and training

    @eager
    @torch.no_grad()
    def record(
        self, counts: Tensor, tokens: Tensor, weights: Tensor, kept: Tensor | None = None, loss: Tensor | None = None
    ) -> None:
        """Add a forward of this rank's tokens [T, d], unless it belongs to no training step, or repeats another.

        weights, kept: [T, k]; kept None: all. The sum over a token's features shows in one pass whether they are finite.
        """
        if is_repeating() or without_values(counts):
            return
        self.to(counts.device)
        self.now[: self.num_experts] += counts
        if kept is not None:
            self.now[self.num_experts] += counts.sum() - kept.sum()
        is_lost = ~weights.sum(1, dtype=torch.float32).isfinite() & tokens.sum(1, dtype=torch.float32).isfinite()
        self.now[self.num_experts + 1] += is_lost.sum()
        if loss is not None:
            self.now[self.num_experts + 2 :] += torch.stack([loss.double(), torch.ones_like(loss, dtype=torch.float64)])

    def to(self, device: torch.device) -> None:
        if self.now.is_meta:  # the model was built on meta, and now has memory
            self.now, self.last, self.since = torch.zeros(3, self.num_experts + 4, dtype=torch.float64, device=device)
        elif self.now.device != device:
            self.now, self.last, self.since = (each.to(device) for each in (self.now, self.last, self.since))

    def keep(self, loss: Tensor) -> None:
        """Keep a forward's auxiliary loss for readers of the layer (DeepSpeed's `l_aux`).

        [Note: Kept losses] A loss keeps its graph alive, whose leaves keep the engine's shared memory after destroy(). Python's
        collector does not see cycles through a graph. So the first backward through the loss, step or destroy drops the graph.
        """
        self.kept_loss = loss
        if loss.requires_grad:
            meter = weakref.WeakMethod(self.forget_graph)

            def forget(grad: Tensor) -> None:
                if (method := meter()) is not None:
                    method()

            loss.register_hook(forget)

    def forget_graph(self) -> None:
        self.kept_loss = None if self.kept_loss is None else self.kept_loss.detach()

    @property
    def routes(self) -> Tensor:
        """[num_experts], int64: the routes of the current step, or of the last one if the current has none."""
        return (self.now if self.now.any() else self.last)[: self.num_experts].to(torch.int64)

    def end_step(self) -> None:
        self.forget_graph()
        self.last.copy_(self.now)
        self.since += self.now
        self.now.zero_()
        self.is_partial = False

    def load(self, vector: Tensor) -> ExpertLoad:
        *routes, dropped, lost, loss, forwards = vector.tolist()
        mean = loss / forwards if forwards else None
        return ExpertLoad(tuple(map(int, routes)), dropped / max(sum(routes), 1), mean, int(lost))


def meters(model: nn.Module) -> dict[str, LoadMeter]:
    """The meters of all layers of experts, by name."""
    named = ((name, getattr(module, "meter", None)) for name, module in model.named_modules())
    return {name: meter for name, meter in named if isinstance(meter, LoadMeter)}


def lost_tokens(by_name: Mapping[str, LoadMeter]) -> str:
    """The first router whose logits are not finite for finite tokens of this step, as text; "" for none."""
    for name, meter in by_name.items():
        if lost := int(meter.now[meter.num_experts + 1]):
            return f"the router of {name!r} has NaN or infinite logits for {lost} tokens that are finite{meter.or_else}"
    return ""


def expert_loads(model: nn.Module) -> dict[str, Tensor]:
    """The routes to each expert in the last training step, by the layer's name: int64, of this rank's tokens.

    During a step, and without an engine: the routes of all forwards since then.
    """
    return {name: meter.routes for name, meter in meters(model).items()}


def sum_loads(vectors: Mapping[str, Tensor], total: Sum, of: Mapping[str, LoadMeter]) -> dict[str, ExpertLoad]:
    """The loads, from one vector per layer, summed over ranks. Collective: one exchange."""
    sums = total(torch.cat(list(vectors.values()))).split([len(vector) for vector in vectors.values()])
    return {name: of[name].load(vector) for name, vector in zip(vectors, sums, strict=True)}


def entry(step: int, loads: Mapping[str, ExpertLoad]) -> str:
    """A log entry: the worst layer, and the first layers."""
    worst = max(loads, key=lambda name: loads[name].peak)
    total = sum(sum(load.routes) for load in loads.values())
    dropped = sum(load.dropped * sum(load.routes) for load in loads.values()) / max(total, 1)
    losses = [load.loss for load in loads.values() if load.loss is not None]
    head = f"step {step}, {len(loads)} layers of experts: max over mean {loads[worst].peak:.2f} in {worst!r}, dropped {dropped:.2%}"
    if losses:
        head += f", auxiliary loss {sum(losses) / len(losses):.4g}"
    lines = [head, *(f"  {name}: {load}" for name, load in itertools.islice(loads.items(), _MOST_LAYERS))]
    if len(loads) > _MOST_LAYERS:
        lines.append(f"  and {len(loads) - _MOST_LAYERS} others: engine.expert_load()")
    return "\n".join(lines)

"""The accumulation window: which step ends it, what gradients are divided by, and how they are settled at its end.

The verdict of its step: gradient norm, whether it is finite, and the factor that unscales and clips; the same on all ranks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.config.plan import Plan
from slipstream.train.states import States
from slipstream.world.mesh import Axis
from slipstream.zero import access
from slipstream.zero.comm import Pending, first_said
from slipstream.zero.hooks import NUM_BUFFERS
from slipstream.zero.shown import check_writes
from slipstream.zero.unit import Unit

logger = logging.getLogger(__name__)


class AccumulationWindow:
    def __init__(self, plan: Plan, num_ranks: int) -> None:
        self.plan, self.num_ranks = plan, num_ranks
        self.forced: bool | None = None  # whether the next step() ends the window (accelerate); None: count micro-batches
        self.divides: bool | None = None  # whether backward() divides the losses by the accumulation; None: no backward yet
        self._warned = False

    def ends_after(self, micro_steps: int) -> bool:
        """Whether the step after `micro_steps` others ends the window."""
        if self.forced is not None:
            return self.forced
        return not self.plan.batch.managed or (micro_steps + 1) % self.plan.batch.accumulation == 0

    @property
    def averaged_over(self) -> int:
        """The number of micro-batches that gradients are averaged over; 1 if the caller divides the losses."""
        return 1 if self.divides is False or not self.plan.batch.managed else self.plan.batch.accumulation

    def alpha(self) -> float:
        """The factor that turns summed gradients into their mean over ranks and micro-batches."""
        num_ranks = self.num_ranks if self.plan.zero.reduce_op == "mean" else 1
        return 1.0 / (num_ranks * self.averaged_over)

    @property
    def share(self) -> float:
        """The factor of a micro-batch's gradients in its backward: 1 / accumulation if the caller divides the loss, else 1."""
        return 1.0 / self.plan.batch.accumulation if self.divides is False and self.plan.batch.managed else 1.0

    def divide(self, divides: bool) -> None:
        """Raises ValueError if the losses of one window are divided differently."""
        if self.divides not in (None, divides):
            raise ValueError("engine.backward() got scale_wrt_gas=True and False within one accumulation window; use one")
        self.divides = divides

    def check_loop(self, backwards: int, has_gradients: bool, logs: bool) -> None:
        """Warn once about a loop written for another engine, which runs but does not train as its author expects."""
        batch, warning = self.plan.batch, ""
        if not has_gradients:
            warning = (
                "engine.step() without a backward since the last one: gradients are zero, but momentum and weight decay may "
                "still change the weights"
            )
        elif self.forced is None and batch.managed and batch.accumulation > 1 and backwards > batch.accumulation:
            warning = (
                f"{backwards} backward passes in a window of {batch.accumulation} micro-batches: call engine.step() after each "
                f"backward (it updates after the last), or set managed_gradient_accumulation to false and call it once per window"
            )
        if warning and logs and not self._warned:
            logger.warning("%s", warning)
        self._warned = self._warned or bool(warning)


def finish(states: States, alpha: float) -> None:
    """Reduce the remaining gradients and move all gradients to the optimizer's placement. Collective."""
    states.refuse_unknown()
    states.updater.finish()
    for unit in states.units:
        if not unit.placement.weights:
            check_writes(unit)
    hooks = states.hooks
    hooks.end_abandoned()
    hooks.take_set()
    if hooks.landed is not None:
        refuse_unused(states, hooks.landed)
    if states.plan.zero.compares_weights:
        refuse_apart(states)
    if any(unit.placement.grads for unit in states.units if unit.trainable):
        reduce_leftovers(states)
    settle(states, alpha)
    states.settle()


class UnusedParameterError(RuntimeError):
    """A trainable parameter got no gradient, and the config requires one (ignore_unused_parameters: false)."""


def refuse_unused(states: States, landed: AbstractSet[tuple[int, int]]) -> None:
    """Raise UnusedParameterError on all ranks for the first trainable parameter missing in any rank's `landed`. Collective."""
    places = [(unit, i) for unit in states.units if unit.trainable for i, param in enumerate(unit.params) if param.requires_grad]
    unused = next((unit.names[i] for unit, i in places if (unit.index, i) not in landed), "")
    if states.replica.exchange(torch.tensor([float(bool(unused))], dtype=torch.float64)).any():
        rank, name = first_said(unused, states.replica.axis) or (0, "")
        raise UnusedParameterError(
            f"parameter {name!r} got no gradient on rank {rank} since the last step, and "
            f"zero_optimization.ignore_unused_parameters is false: use the parameter in the loss, freeze it, or set the key to true"
        )


def refuse_apart(states: States) -> None:
    """Raise ValueError on all ranks for the first parameter whose replicated weights differ between ranks. Collective."""
    if first := first_said(access.first_apart(states.units), states.replica.axis):
        raise ValueError(
            f"parameter {first[1]!r} has different values on different ranks: it was written on some of them only, or differently "
            "(`p.data` or in place). Write the same on all ranks, or write inside `with slipstream.zero.gathered(param):`"
        )


def reduce_leftovers(states: States) -> None:
    """Reduce gradients that are still in `.grad` on any rank: late ones, and those of `no_sync`. Collective."""
    hooks, stage = states.hooks, states.stage
    rows = stage.exchange(torch.tensor([float(hooks.backwards), *map(float, hooks.leftovers())], dtype=torch.float64))
    check_rounds(rows[:, 0], stage.axis)
    for unit in reversed(states.units):
        if rows[:, 1 + unit.index].any():
            hooks.reducer.launch(unit)
    hooks.reducer.drain()


def check_rounds(backwards: Tensor, axis: Axis) -> None:
    """Raise RuntimeError if ranks ran different numbers of backward passes (`backwards`, in the order of the axis)."""
    if backwards.min() != backwards.max():
        counts = {rank: int(n) for rank, n in zip(axis.ranks, backwards.tolist(), strict=True)}
        raise RuntimeError(
            f"ranks ran different numbers of backward passes before engine.step(): {counts} (rank: passes). Run the same number "
            f"on every rank: a rank that is out of data can run one more with a zero loss, or set dataloader_drop_last"
        )


def settle(states: States, alpha: float) -> None:
    """Move every unit's gradients to the optimizer's placement."""
    slots, trainable = states.slots, [unit for unit in reversed(states.units) if unit.trainable]
    in_flight: list[Pending[None]] = []
    states.steps.forget()
    for unit in trainable:
        if states.steps.keeps_local(unit, alpha):
            continue
        through = unit.memory.local is not None and unit.dtypes.wire != unit.dtypes.grads
        while through and len(in_flight) >= NUM_BUFFERS - 1:  # units of a family without codes may lie between
            in_flight.pop(0).wait()
        in_flight.append(unit.settle(alpha, slots.next(unit) if through else None))
    for pending in in_flight:
        pending.wait()


class Verdict(NamedTuple):
    """The values that all ranks agree on before the optimizer runs."""

    norm: float  # global L2 norm of the mean gradient, unscaled, before clipping
    finite: bool
    scale: float  # the optimizer multiplies gradients with it: unscale and clip in one factor
    save_request: float = 0.0  # the largest `Autosave.save_request` of all ranks
    culprit: str = ""  # the first parameter, in model order, whose gradient is not finite on some rank
    cause: str = ""  # why, if a part of the model knows


def judge(states: States, loss_scale: float, clipping: float, save_request: float = 0.0) -> Verdict:
    """Compute the verdict in one exchange over the ranks that step together. A barrier.

    Each rank adds the squares of its own units in fp64, then every rank adds the sums in rank order: the work per rank does not
    grow with units times ranks, and the result is the same on all ranks and in all ZeRO stages.

    The exchange is the step's fence: no rank passes it before all ranks have finished their backward, so weights in shared memory
    may be overwritten afterwards.
    """
    world, trainable = states.replica, [unit for unit in states.units if unit.trainable]
    own = 0.0
    for square in _squares(trainable):
        own += square
    rows = world.exchange(torch.tensor([float(states.hooks.backwards), own, save_request], dtype=torch.float64))
    check_rounds(rows[:, 0], world.axis)
    total = 0.0
    for square in rows[:, 1].tolist():
        total += square
    finite = math.isfinite(total)
    norm = math.sqrt(total) / loss_scale if finite else float("nan") if math.isnan(total) else math.inf
    clip = 1.0
    if clipping > 0:  # like torch's clip_grad_norm_, also if an overflow is applied: 0 for inf, NaN for NaN
        clip = clipping / (norm + 1e-6)
        clip = 1.0 if clip > 1.0 else clip
    save_request = float(rows[:, 2].max())
    return Verdict(norm, finite, clip / loss_scale, save_request, *(() if finite else _find_culprit(states, trainable)))


def _squares(units: Sequence[Unit]) -> list[float]:
    """Each unit's sum of squares on this rank, with one device synchronization."""
    squares = [unit.window.partial.sumsq for unit in units]
    if any(isinstance(square, Tensor) for square in squares):
        device = units[0].full.device
        return torch.stack([torch.as_tensor(square, dtype=torch.float64, device=device) for square in squares]).tolist()
    return [float(square) for square in squares]


def _find_culprit(states: States, units: Sequence[Unit]) -> tuple[str, str]:
    """`Verdict.culprit` and `cause`, "" for none. Collective, rare."""
    first: tuple[int, int, str] | None = None
    for unit in units:
        if first is not None or math.isfinite(float(unit.window.partial.sumsq)) or unit.grads is None:
            continue
        for i, slot in enumerate(unit.layout.slots):
            inside, _ = slot.common(unit.optim_span)
            if not bool(torch.isfinite(unit.grads.get(inside.start, inside.stop)).all()):
                first = (unit.index, i, unit.names[i])
                break
    causes = [cause for suspect in states.suspects if (cause := suspect())]
    reports: list[tuple[Any, list[str]]] = states.replica.axis.gather((first, causes))
    firsts = [each for each, _ in reports if each is not None]
    return min(firsts)[2] if firsts else "", next((cause for _, each in reports for cause in each), "")

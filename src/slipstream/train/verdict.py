"""The verdict of a step: gradient norm, whether it is finite, and the factor that unscales and clips; the same on all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.train.states import States
from slipstream.train.window import check_rounds
from slipstream.zero.unit import Unit


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

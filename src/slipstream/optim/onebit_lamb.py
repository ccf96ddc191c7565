"""1-bit LAMB (Li et al. 2021, arXiv 2104.06069): LAMB until `freeze_step`, then exchanged signs and frozen norms of updates.

        n = coeff_beta * n + (1 - coeff_beta) / |u|                     until `freeze_step`, u: LAMB's update of a tensor
        w = w - lr * c * (f * p / (1 - beta1^t) + weight_decay * w)     afterwards, with c = clamp(|w| * n, min_coeff, max_coeff)

    p is that of optim/onebit.py. f is the factor of its levels: the square root of the growth of the preconditioned gradients' mean
    squares since the freeze, clamped to [factor_min, factor_max], with a relative change of at most `factor_threshold` per step.
    The paper takes the largest ratio of any element's variances, and reconstructs the new variance from the difference of exchanged
    momenta, in which the signs' error is 1 / (1 - beta1) times larger; levels are measured on the ranks' own gradients. It also
    freezes the whole trust ratio |w| / |u|, although |w| is known in each step.

The paper scales tensors before it exchanges the signs of all of them with one scale. Here 512 elements share a scale, and p has one
order of magnitude, so that scaling would cancel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from slipstream.optim import rules
from slipstream.optim.loop import step_by_rule, step_each
from slipstream.optim.onebit import OneBitOptimizer, OneBitSteps, defaults, rounds_of, step_alone
from slipstream.optim.rounds import Rounds
from slipstream.optim.rules import Rule, Squares
from slipstream.optim.sharded import UpdatePiece
from slipstream.zero.storage.stream import StateChunk
from slipstream.zero.unit import Unit

NORM = "mean_inverse_norm"  # the state n


class OneBitLamb(OneBitOptimizer):
    """LAMB until `freeze_step`, then momentum with the variances and update norms of the steps before. Inside an engine, ranks then
    exchange signs. Groups have the options of `OneBitAdam`'s.

    max_coeff, min_coeff    bounds of a trust ratio
    coeff_beta              of the average of 1 / (the norm of an update)
    factor_max, factor_min  bounds of the factor of a tensor's step, which follows the size of its gradients after `freeze_step`
    factor_threshold        the largest relative change of the factor in a step
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        freeze_step: int = 100_000,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
    ) -> None:
        common = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "bias_correction": bias_correction}
        ratios = {"max_coeff": max_coeff, "min_coeff": min_coeff, "coeff_beta": coeff_beta}
        factors = {"factor_max": factor_max, "factor_min": factor_min, "factor_threshold": factor_threshold}
        if not 0 <= min_coeff <= max_coeff or not 0 <= coeff_beta < 1:
            raise ValueError(
                f"OneBitLamb: must have 0 <= min_coeff ({min_coeff}) <= max_coeff ({max_coeff}), 0 <= coeff_beta ({coeff_beta}) < 1"
            )
        if not 0 < factor_min <= 1 <= factor_max or not 0 < factor_threshold < 1:
            raise ValueError(
                f"OneBitLamb: must have 0 < factor_min ({factor_min}) <= 1 <= factor_max ({factor_max}), and 0 < factor_threshold "
                f"({factor_threshold}) < 1"
            )
        options = defaults("OneBitLamb", common, {"freeze_step": freeze_step})
        super().__init__(params, options | ratios | factors | {"eps_inside_sqrt": False})
        self.coefficients: dict[Any, float | Tensor] = {}  # trust ratios of the last step, by tensor

    @staticmethod
    def rounds(group: Mapping[str, Any]) -> Rounds:
        return Rounds(freeze=group["freeze_step"])

    lamb_freeze_key = OneBitOptimizer.adam_freeze_key

    def get_lamb_coeffs(self) -> list[float]:
        """The trust ratios of the last step, for the tensors (or parts of them) whose states are on this rank."""
        return [float(value) for value in self.coefficients.values()]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        return step_each(self, closure, partial(_step, rounds=rounds_of(self), coefficients=self.coefficients))


def _step(
    state: dict[str, Any],
    param: Tensor,
    grad: Tensor,
    group: dict[str, Any],
    rounds: Rounds,
    coefficients: dict[Any, float | Tensor],
) -> None:
    """Step one parameter on one rank, whose exchange is exact."""
    if not group["non_freeze"] and int(state.get("step", 0)) >= rounds.freeze:
        ratio = coefficients[param] = _ratio(state[NORM], float(param.float().norm()), group)
        step_alone(state, param, grad, group | {"lr": group["lr"] * ratio}, rounds)
        return
    ratios: list[Squares] = []
    step_by_rule(_recording(rules.LAMB, ratios), state, param, grad, group)
    coefficients[param] = ratios[-1][0]
    state[NORM] = _averaged(state.get(NORM, 0.0), ratios[-1], group)


def _recording(rule: Rule, ratios: list[Squares]) -> Rule:
    """The rule, extended to append (trust ratio, square of the weights' norm) of each tensor."""
    return replace(rule, kernel=partial(rules.lamb, record=ratios.append))


def _averaged(before: float, recorded: Squares, group: Mapping[str, Any]) -> float:
    """The average of 1 / |u| after one more step; 0 while a tensor is 0, such as a bias in the first step."""
    ratio, square = map(float, recorded)
    if not square:
        return before
    beta = group["coeff_beta"] if before else 0.0
    return float(beta * before + (1 - beta) * ratio / math.sqrt(square))


def _ratio(inverse: float, norm: float, group: Mapping[str, Any]) -> float:
    return float(min(max(norm * inverse, group["min_coeff"]), group["max_coeff"])) if norm and inverse else 1.0


class OneBitLambSteps(OneBitSteps):
    """Steps by LAMB, then by exchanged signs."""

    def __init__(self, inner: Optimizer, units: Sequence[Unit], rule: Rule, *others: Any, **options: Any) -> None:
        self.ratios: list[Squares] = []  # of the tensors of the last stepped unit
        self.norms: dict[tuple[Unit, int], float] = {}  # (unit, index of a tensor in it) -> n, for this rank's tensors
        super().__init__(inner, units, _recording(rule, self.ratios), *others, **options)
        self.coefficients: dict[Any, float | Tensor] = {}
        cast(OneBitLamb, inner).coefficients = self.coefficients

    def drop(self, unit: Unit) -> None:
        super().drop(unit)
        self.norms = {place: value for place, value in self.norms.items() if place[0] is not unit}
        for place in [place for place in self.coefficients if place[0] is unit]:
            del self.coefficients[place]

    def step(self, unit: Unit, chunk: StateChunk, scale: float) -> None:
        self.ratios.clear()
        super().step(unit, chunk, scale)
        if unit not in self._late:
            stepped = (piece for piece in self.pieces([unit]) if piece.param.requires_grad and piece.stop > piece.start)
            for piece, ratio in zip(stepped, self.ratios, strict=True):
                self.coefficients[unit, piece.i] = ratio[0]
                before = self.norms.get((unit, piece.i), 0.0)
                self.norms[unit, piece.i] = _averaged(before, ratio, self._options[piece.group])

    def group_of(self, piece: UpdatePiece) -> Mapping[str, Any]:
        group = super().group_of(piece)
        norm = float(piece.unit.master.whole()[piece.start : piece.stop].norm())
        ratio = self.coefficients[piece.unit, piece.i] = _ratio(self.norms.get((piece.unit, piece.i), 0.0), norm, group)
        return {**group, "lr": group["lr"] * ratio}

    def scalars(self, piece: UpdatePiece) -> dict[str, Any]:
        return super().scalars(piece) | {NORM: self.norms.get((piece.unit, piece.i), 0.0)}  # 0: none yet

    def load_scalars(self, piece: UpdatePiece, values: dict[str, Any]) -> None:
        super().load_scalars(piece, values)
        self.norms.pop((piece.unit, piece.i), None)
        if value := values.get(NORM):
            self.norms[piece.unit, piece.i] = float(value)

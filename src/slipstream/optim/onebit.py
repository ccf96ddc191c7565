"""1-bit Adam (Tang et al. 2021, arXiv 2102.02888) and 0/1 Adam (Lu et al. 2022, arXiv 2202.06009): momentum as signs.

While the variance is frozen (1-bit Adam: after `freeze_step`; 0/1 Adam: between its variance steps), the update is linear in
the gradients, and ranks exchange signs with error feedback:

        x_i = beta1 * p + (1 - beta1) * g_i / (sqrt(v_hat) + eps) + e_i      rank i's share, with the error of its earlier signs
        p   = signs of (the mean over ranks of the signs of x_i, + e_s)       each rank is the server of an even span
        w   = w - lr * (p / (1 - beta1^t) + weight_decay * w)

The paper compresses m; p is m / (sqrt(v_hat) + eps). While v is frozen both are the same recursion, but the elements of p have one
order of magnitude, and those of m do not: with one scale for many, an element of small variance gets a step many times too long.
An element whose v is 0 (a row never used) is not stepped at all; the paper's update would be +-scale / eps.

A frozen variance is soon wrong, because gradients shrink while a model learns (on a Llama of 4.7M parameters, freezing it
after 90 of 600 steps costs AdamW 6.8 % of its loss, and the signs 1.1 %). So ranks measure by how much: a parameter's level is the
average over steps of the mean square of g_i / (sqrt(v_hat) + eps). Its learning rate is divided by the square root of the level's
growth since the first WINDOW steps. A sample of elements is enough.

[Note: Local steps] After `var_freeze_step` 0/1 Adam exchanges only every H steps. In between, rank i steps its own p_i and weights:

    p_i = beta1 * p_i + (1 - beta1) * g_i / (sqrt(v_hat) + eps)
    k   = 1 - lr * weight_decay;  r = lr / (1 - beta1^t);  u_i = k * u_i + r * p_i;  R = k * R + r;  K = k * K
    w_i = K * w - u_i                                       w: the weights after the last exchange, equal on all ranks

An exchange sends x_i = u_i / R + e_i, a mean of p_i; then p_i = p and w = K * w - R * p on every rank. H = 1 gives the recursion
above. Parameters that are not compressed take AdamW steps of their own, and an exchange averages them.

late    the step's optimizer needs the ranks' own gradients: they stay in `local` until the verdict, which needs their norm, the
        root of the mean over ranks of |g_i|^2
frozen  a unit's data after freezing: the preconditioner and the compensated values of the whole unit on every rank
stale   frozen units whose momentum is in the dense states again, because a variance step is due
apart   units of a local step that are not compressed
"""

from __future__ import annotations

import logging
import math
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from slipstream.ops import Partial, onebit
from slipstream.optim import rules
from slipstream.optim.loop import checked, step_each
from slipstream.optim.native import NativeSteps
from slipstream.optim.rounds import Round, Rounds
from slipstream.optim.sharded import UpdatePiece
from slipstream.zero.comm import Buffer, Comm, Pending, reduce_into, sum_over
from slipstream.zero.leaves import keep_apart, kind_of, mark_rows
from slipstream.zero.storage.store import Section, Store, read, section, write
from slipstream.zero.storage.stream import StateChunk
from slipstream.zero.unit import Unit

log = logging.getLogger(__name__)

WINDOW = 20  # steps after which a parameter's level becomes the reference
SAMPLE = 65536  # elements per parameter whose gradients a step measures
_LEVELS = {"value": "level", "reference": "reference", "last": "last_factor"}  # names of a parameter's levels in its state


class OneBitOptimizer(Optimizer):
    """The base of 1-bit optimizers, with the facts that they report by DeepSpeed's names."""

    script_options = ("exp_avg_mask",)  # group options that are never saved: a script's masks follow its model
    engine_steps: weakref.ReferenceType[OneBitSteps] | None = None  # set by the engine that steps the optimizer

    @staticmethod
    @abstractmethod
    def rounds(group: Mapping[str, Any]) -> Rounds:
        """When ranks communicate, from a group's options."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        return step_each(self, closure, partial(step_alone, rounds=rounds_of(self)))

    @property
    def freeze_step(self) -> int:
        return rounds_of(self).freeze

    @property
    def adam_freeze_key(self) -> bool:
        """Whether the next step uses a frozen variance."""
        alone = max((int(state["step"]) for state in self.state.values() if "step" in state), default=0)
        steps = self._steps
        return (alone if steps is None else steps.done or 0) >= self.freeze_step

    @property
    def worker_errors(self) -> list[Tensor]:
        """The error of this rank's signs, which the next exchange adds: fp32 [elements] of each frozen unit."""
        return [onebit.error(own.y, own.scales, own.inverse) for own in self._frozen.values()]

    @property
    def server_errors(self) -> list[Tensor]:
        """The error of the means' signs: fp32, for each frozen unit the span that this rank serves."""
        return [onebit.error(own.server, own.server_scales, own.inverse[_served(unit)]) for unit, own in self._frozen.items()]

    @property
    def _steps(self) -> OneBitSteps | None:
        return None if self.engine_steps is None else self.engine_steps()

    @property
    def _frozen(self) -> dict[Unit, Frozen]:
        return {} if (steps := self._steps) is None else steps.frozen


class OneBitAdam(OneBitOptimizer):
    """AdamW until `freeze_step`, then momentum with the variance of that step. Inside an engine, ranks then exchange signs.

    A group with `non_freeze: True` stays AdamW, as embeddings do. A group's `exp_avg_mask`, of 0 and 1, in its parameters' shape or
    1-D: elements with 0 are not stepped after `freeze_step` (positions that never have gradients).
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
    ) -> None:
        common = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": bias_correction}
        super().__init__(params, defaults("OneBitAdam", common, {"freeze_step": freeze_step}))

    @staticmethod
    def rounds(group: Mapping[str, Any]) -> Rounds:
        return Rounds(freeze=group["freeze_step"])


class ZeroOneAdam(OneBitOptimizer):
    """AdamW that updates its variance in few steps. Inside an engine, ranks exchange signs in the other steps, later only in some.

    The first `var_update_scaler` steps update the variance, then as many every 2nd step, every 4th, and so on, and none after
    `var_freeze_step`. From then on, signs are exchanged every step, after `local_step_scaler` steps every 2nd, after as many more
    every 4th, and so on up to every `local_step_clipper`-th ([Note: Local steps]). Groups have the options of `OneBitAdam`'s.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        var_freeze_step: int = 100_000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32_678,
        local_step_clipper: int = 16,
    ) -> None:
        common = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "bias_correction": bias_correction}
        counts = {"var_freeze_step": var_freeze_step, "var_update_scaler": var_update_scaler}
        counts |= {"local_step_scaler": local_step_scaler, "local_step_clipper": local_step_clipper}
        super().__init__(params, defaults("ZeroOneAdam", common, counts))

    @staticmethod
    def rounds(group: Mapping[str, Any]) -> Rounds:
        return Rounds(
            freeze=group["var_freeze_step"],
            doubling=group["var_update_scaler"],
            local_doubling=group["local_step_scaler"],
            longest=group["local_step_clipper"],
        )


def defaults(name: str, common: dict[str, Any], counts: dict[str, int]) -> dict[str, Any]:
    """The options of a group. Raises ValueError for invalid values."""
    for key, value in counts.items():
        if int(value) != value or value < 1:
            why = "the variance needs at least one step before it is frozen" if "freeze" in key else "it counts steps, from 1"
            raise ValueError(f"{name}: {key} is {value}; {why}")
    whole = {key: int(value) for key, value in counts.items()}
    return checked(name, common) | whole | {"non_freeze": False, "exp_avg_mask": None}


def all_rounds(optimizer: Optimizer) -> list[Rounds]:
    """When an optimizer with a `late` rule communicates, for each compressed group; without any, for the first group."""
    groups = [group for group in optimizer.param_groups if not group.get("non_freeze")] or optimizer.param_groups[:1]
    return [cast(Any, optimizer).rounds(group) for group in groups]


def rounds_of(optimizer: Optimizer) -> Rounds:
    """The rounds of all groups; optim/fit.py refuses groups with different ones."""
    return all_rounds(optimizer)[0]


def step_alone(state: dict[str, Any], param: Tensor, grad: Tensor, group: dict[str, Any], rounds: Rounds) -> None:
    """Step one parameter on one rank, whose exchange is exact."""
    if not state:
        zeros = torch.zeros_like(param, dtype=torch.float32)
        state.update(step=torch.zeros(()), exp_avg=zeros, exp_avg_sq=zeros.clone())
    beta1, beta2 = group["betas"]
    state["step"] += 1
    count, grad = int(state["step"]), grad.float()
    state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
    frozen = rounds.kind(count) is not Round.DENSE and not group["non_freeze"]
    if not frozen:
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    inverse = preconditioner(state["exp_avg_sq"], group, count if group["non_freeze"] else rounds.dense(count), frozen=frozen)
    rate = group["lr"] / (1 - beta1**count if group["bias_correction"] else 1)
    if frozen:
        levels = Levels.of([group])
        for name in ("value", "reference", "last"):
            setattr(levels, name, state.setdefault(_LEVELS[name], getattr(levels, name)))
        levels.count = count - rounds.dense(count) - 1
        levels.add((grad * inverse).square().mean().double().view(1).cpu(), torch.tensor([beta2], dtype=torch.float64))
        rate *= float(levels.rates())
    param.copy_(param.float() * (1 - group["lr"] * group["weight_decay"]) - state["exp_avg"] * inverse * rate)


def preconditioner(variance: Tensor, group: dict[str, Any], step: int, *, frozen: bool) -> Tensor:
    """1 / (sqrt(v_hat) + eps) of the variance after `step` steps. If it is frozen: 0 where v or the group's mask is 0."""
    corrected = variance / (1 - group["betas"][1] ** step) if group["bias_correction"] else variance
    inverse = 1 / (corrected.sqrt() + group["eps"])
    if frozen:
        inverse = torch.where(variance > 0, inverse, 0.0)
        mask = group["exp_avg_mask"]
        if mask is not None:
            inverse = inverse * mask.to(inverse).expand(inverse.shape)
    return inverse


@dataclass(slots=True)
class Levels:
    """The levels of some parameters, fp64 [parameters]: the mean squares of their preconditioned gradients, averaged over steps."""

    value: Tensor
    reference: Tensor  # after WINDOW steps
    last: Tensor  # the rate factors of the last step
    limits: tuple[Tensor, Tensor, Tensor] | None  # of rate factors: smallest, largest, largest relative change
    count: int = 0

    @classmethod
    def of(cls, groups: Sequence[Mapping[str, Any]]) -> Levels:
        """groups: of each parameter; `factor_min`, `factor_max` and `factor_threshold` limit its rate factors (1-bit LAMB)"""
        zeros = torch.zeros(len(groups), dtype=torch.float64)
        limited, names = bool(groups) and "factor_min" in groups[0], ("factor_min", "factor_max", "factor_threshold")
        limits = [torch.tensor([group[name] for group in groups], dtype=torch.float64) for name in names] if limited else None
        return cls(zeros, zeros.clone(), torch.ones_like(zeros), None if limits is None else (limits[0], limits[1], limits[2]))

    def add(self, now: Tensor, beta: Tensor) -> None:
        """Add a step's mean squares; the first steps are averaged evenly."""
        self.count += 1
        self.value += (now - self.value) * (1 - beta).clamp_min(1 / self.count)
        if self.count <= WINDOW:
            self.reference.copy_(self.value)
        known = (self.value > 0) & (self.reference > 0)
        rates = torch.where(known, self.reference / self.value.where(known, 1.0), 1.0).sqrt()
        if self.limits is not None:
            least, largest, change = self.limits
            rates = rates.clamp(least, largest).clamp(self.last * (1 - change), self.last * (1 + change))
        self.last.copy_(rates)

    def rates(self) -> Tensor:
        return self.last.clone()


@dataclass(slots=True, kw_only=True)
class Frozen:
    """A unit after its variance was frozen. Arrays cover the whole unit, except the server's, which cover this rank's span."""

    inverse: Tensor
    partly: Tensor
    y: Tensor
    scales: Tensor
    wire: Buffer  # records: this rank's, then those of p
    server: Tensor
    server_scales: Tensor
    own: Tensor  # the server's records
    levels: Levels  # of the unit's parameters
    folded: Tensor  # the rate factors that the stored variance includes
    masks: list[tuple[Tensor | None, int]]  # the masks that `inverse` includes

    def tensors(self) -> Iterator[Tensor]:
        yield from (self.inverse, self.partly, self.y, self.scales, self.wire.tensor, self.server, self.server_scales, self.own)


@dataclass(slots=True, kw_only=True)
class Local:
    """A unit between two exchanges ([Note: Local steps]). Arrays cover the whole unit."""

    w: Tensor
    p: Tensor
    u: Tensor
    sums: dict[int, tuple[float, float]] = field(default_factory=dict)  # parameter -> (K, R)


class OneBitSteps(NativeSteps):
    """Steps units by their native rule until they are frozen, then by exchanged signs."""

    def __init__(self, inner: Optimizer, units: Sequence[Unit], *others: Any, **options: Any) -> None:
        # steps taken before the first step of a unit's latest parameter, once known
        self._lags: dict[Unit, int] = {}
        super().__init__(inner, units, *others, **options)  # adds the units
        cast(OneBitOptimizer, inner).engine_steps = weakref.ref(self)
        self.frozen: dict[Unit, Frozen] = {}
        self.done: int | None = None  # steps; None: the ranks have not compared theirs since loading
        self.shares: dict[Unit, float] = {}  # factors from sums of local gradients to this rank's mean gradient
        self._trained: dict[Unit, list[bool]] = {}  # the parameters that had gradients when `_lags` was found
        self.errors: dict[Unit, Store] = {}  # set by `expose` or a load: the means over ranks, in this rank's optimizer span
        self.local: dict[Unit, Local] = {}
        self._round, self._late, self._apart = Round.DENSE, set[Unit](), set[Unit]()  # of this step
        self._stale: set[Unit] = set()

    def groups_loaded(self) -> None:
        super().groups_loaded()
        self.done = None
        for table in (self.frozen, self.local, self._stale, self._lags):
            table.clear()

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "error")

    def overwritten(self, unit: Unit) -> None:
        self.frozen.pop(unit, None)
        self.local.pop(unit, None)

    def states(self, piece: UpdatePiece) -> dict[str, Tensor | Section]:
        errors = self.errors.get(piece.unit)
        own = {} if errors is None else {"error": section(errors, piece.start, piece.stop)}
        return super().states(piece) | own

    def make_states(self, piece: UpdatePiece, dtypes: Mapping[str, torch.dtype]) -> Callable[[], None]:
        before = self.errors.pop(piece.unit, None)
        if "error" in dtypes:
            self.errors[piece.unit] = before or piece.unit.homes.state(piece.unit.master.numel, torch.float32)

        def undo() -> None:
            self.errors.pop(piece.unit, None)
            self.errors.update({} if before is None else {piece.unit: before})

        return undo

    def expose(self, units: Iterable[Unit]) -> None:
        units = list(units)
        self.synchronize(units)
        for unit in units:
            if self.done and rounds_of(self.inner).interval(self.done) > 1 and kind_of(unit.model_params[0]) and unit.trainable:
                for state in self.moments(unit).states.values():
                    _average(state, unit.comms.dp)
            if unit not in self.frozen:
                continue
            frozen, own, dp = self.frozen[unit], slice(*unit.optim_span), unit.comms.dp
            error = onebit.error(frozen.y, frozen.scales, frozen.inverse)
            sum_over(error, dp.axis)
            served, span = torch.zeros_like(error), _served(unit)
            served[span] = onebit.error(frozen.server, frozen.server_scales, frozen.inverse[span])
            sum_over(served, dp.axis)
            error = error / dp.size + served
            self._thaw(unit, frozen.levels.rates())
            self.errors.setdefault(unit, unit.homes.state(unit.master.numel, torch.float32)).put(0, error[own])

    def synchronize(self, units: Iterable[Unit]) -> None:
        """Make the weights equal on all ranks, if these units have stepped locally. Collective."""
        units = list(units)
        pending = [unit for unit in units if unit in self.local]
        self._swap(pending, 1.0)
        for unit in pending:
            self._land(unit, unit.master.whole(), None if unit.out is None else unit.out.whole(), is_exchanged=True)
        if self.done and rounds_of(self.inner).kind(self.done) is Round.LOCAL:
            for unit in units:
                if unit.trainable and kind_of(unit.model_params[0]):
                    self._average_weights(unit)

    def _average_weights(self, unit: Unit) -> None:
        _average(unit.master, unit.comms.dp)
        if unit.out is not None:
            unit.out.put(0, unit.master.whole())

    def _thaw(self, unit: Unit, rates: Tensor) -> None:
        """Write the momentum to the state `exp_avg`, unless it is there, and the rate factors into `exp_avg_sq`."""
        frozen, own = self.frozen[unit], slice(*unit.optim_span)
        if unit not in self._stale:
            p = torch.where(frozen.inverse > 0, onebit.decode(frozen.wire.tensor) / frozen.inverse, 0.0)
            self.moments(unit).states["exp_avg"].put(0, p[own])
        for piece in self.pieces([unit]):  # the variance that corresponds to the steps
            part = self.states(piece)["exp_avg_sq"]
            write(part, read(part) * float(frozen.folded[piece.i] / rates[piece.i]) ** 2)
        frozen.folded = rates

    def add(self, units: Sequence[Unit]) -> None:  # type: ignore[override]
        super().add(units)
        self.done = None
        self._lags.clear()

    def loaded_without_states(self, done: int) -> str:
        name, first = type(self.inner).__name__, rounds_of(self.inner).first
        if done >= first:
            return (
                f"it is of step {done}, and {name} exchanges signs after {first}, for which it needs momentum and variance: "
                f"load_optimizer_states=True loads them; load_module_only=True begins a new run with its weights, of which the "
                f"first {first} steps are dense"
            )
        log.warning("%s: the checkpoint was loaded without optimizer states, so the next %d steps are dense", name, first)
        return ""

    def drop(self, unit: Unit) -> None:
        super().drop(unit)
        for table in (self.frozen, self.errors, self.local, self._lags):
            table.pop(unit, None)

    def memory(self) -> Iterator[Tensor | Store]:
        yield from super().memory()
        for frozen in self.frozen.values():
            yield from frozen.tensors()
        for local in self.local.values():
            yield from (local.w, local.p, local.u)

    def keeps_local(self, unit: Unit, alpha: float) -> bool:
        done, trained = self.done or 0, [param.requires_grad for param in unit.params]
        # exchange unit by unit, because stages may have their units in other orders
        if unit not in self._lags or trained != self._trained[unit]:
            own = max((piece.step for piece in self.pieces()), default=0)  # a rank may own no piece
            least = min((piece.step for piece in self.pieces([unit]) if piece.param.requires_grad), default=math.inf)
            rows = unit.comms.data.exchange(torch.tensor([float(own), float(least)], dtype=torch.float64)).view(-1, 2)
            self.done = done = int(rows[:, 0].max()) if self.done is None else done
            self._lags[unit], self._trained[unit] = done - int(rows[:, 1].min().clamp(max=done)), trained
        rounds, apart = rounds_of(self.inner), bool(kind_of(unit.model_params[0]))
        if self._is_young(unit) or rounds.kind(done + 1) is Round.DENSE or (apart and rounds.interval(done + 1) == 1):
            if unit in self.frozen:
                self._thaw(unit, torch.ones_like(self.frozen[unit].folded))
                self._stale.add(unit)
            return False
        local, ranks = unit.memory.unreduced, unit.comms.dp.size
        unit.window.complete_local(local)
        self.shares[unit] = share = alpha * ranks * unit.comms.family.weight
        squares = reduce_into(local, [local], 1.0, accumulate=False)
        unit.window.reduced(Partial(squares.sumsq * share**2 / ranks, squares.finite))
        (self._apart if apart else self._late).add(unit)
        return True

    def _is_young(self, unit: Unit) -> bool:
        """Whether a unit still trains with dense gradients, because its first step came later than the other units'."""
        return self._lags[unit] > 0 and (self.done or 0) - self._lags[unit] < rounds_of(self.inner).first

    def _updates(self, unit: Unit, done: int) -> int:
        """The number of updates of a unit's variance within its first `done` steps."""
        rounds, lag = rounds_of(self.inner), self._lags.get(unit, 0)
        return done if done <= rounds.first else rounds.first + rounds.dense(done + lag) - rounds.dense(rounds.first + lag)

    def exchange(self, units: Sequence[Unit], scale: float) -> None:
        late, rounds, step = [unit for unit in units if unit in self._late], rounds_of(self.inner), (self.done or 0) + 1
        self._round = rounds.kind(step)
        if late and not self.frozen:
            log.info(
                "%s: from step %d on, gradients are not added before the verdict: their norm, in logs and for clipping, is the "
                "root of the mean over ranks of each rank's own squared norm, which is larger than the norm of their mean",
                type(self.inner).__name__,
                step,
            )
        fresh = {unit: self._freeze(unit) for unit in late if self._must_freeze(unit)}
        if self._round is Round.SIGNS:
            self._measure(late, scale, rounds.interval(step))
        for unit in late:
            if rounds.interval(step) > 1:
                self._step_locally(unit, fresh.get(unit), scale)
            elif unit in fresh:
                for _, index, (start, stop) in self._spans(unit):
                    self.frozen[unit].y[start:stop] += fresh[unit][start:stop] * self.inner.param_groups[index]["betas"][0]
        if self._round is Round.SIGNS:
            self._swap(late, scale)

    def _must_freeze(self, unit: Unit) -> bool:
        if unit not in self.frozen or unit in self._stale:
            return True
        before, now = self.frozen[unit].masks, self._masks(unit)
        return any(old is not new or version != written for (old, version), (new, written) in zip(before, now, strict=True))

    def _masks(self, unit: Unit) -> list[tuple[Tensor | None, int]]:
        """The `exp_avg_mask` of each parameter's group, and how often it was written."""
        masks = [group["exp_avg_mask"] for group in self._groups_of(unit)]
        return [(mask, 0 if mask is None else mask._version) for mask in masks]

    def _swap(self, units: Sequence[Unit], scale: float) -> None:
        swaps = [self._send(unit, self.frozen[unit], scale) for unit in units]
        gathers = [self._return(unit, self.frozen[unit], swap) for unit, swap in zip(units, swaps, strict=True)]
        for gather in gathers:
            gather.wait()

    def begin(self, units: Sequence[Unit]) -> None:
        super().begin(units)
        self.done = (self.done or 0) + 1

    def forget(self) -> None:
        for table in (self._late, self._apart, self.shares):
            table.clear()

    def _freeze(self, unit: Unit) -> Tensor:
        """Freeze the unit, or freeze it again with its current errors; returns p of the whole unit. Collective."""
        before, errors, count = self.frozen.get(unit), self.errors.pop(unit, None), unit.layout.numel // onebit.BLOCK
        if before is not None:
            self._thaw(unit, torch.ones_like(before.folded))
        states, sharded, device, dp = self.moments(unit).states, unit.placement.optim, unit.full.device, unit.comms.dp
        m, v = (unit.unsharded(states[name].whole(), sharded) for name in ("exp_avg", "exp_avg_sq"))
        zeros = partial(torch.zeros, dtype=torch.float32, device=device)
        own, steps = _served(unit), max(self._updates(unit, (self.done or 0) - self._lags.get(unit, 0)), 1)
        inverse, y, server = torch.zeros_like(v), torch.zeros_like(m), zeros(own.stop - own.start)
        for i, slot in enumerate(unit.layout.slots):
            index, span = self.members[unit].groups[i], slice(*slot.span)
            if index is not None:
                group = self.inner.param_groups[index]
                inverse[span] = preconditioner(v[span].view(slot.shape), group, steps, frozen=True).flatten()
        if before is not None:
            ratio = torch.where(before.inverse > 0, inverse / before.inverse, 0.0)
            y = onebit.error(before.y, before.scales, before.inverse) * ratio
            server = onebit.error(before.server, before.server_scales, before.inverse[own]) * ratio[own]
            dp.reusable(before.wire)
            before.wire.tensor.zero_()
        elif unit.comms.data.exchange(torch.tensor([float(errors is not None)], dtype=torch.float64)).any():
            e = zeros(unit.optim_span[1] - unit.optim_span[0]) if errors is None else errors.whole()
            y += unit.unsharded(e, sharded)
        self._stale.discard(unit)
        self.frozen[unit] = Frozen(
            inverse=inverse,
            partly=onebit.partly(inverse),
            y=y,
            scales=zeros(count),
            wire=before.wire if before is not None else dp.allocate([(onebit.nbytes(unit.layout.numel), torch.uint8)])[0],
            server=server,
            server_scales=zeros(server.numel() // onebit.BLOCK),
            own=torch.zeros(onebit.nbytes(server.numel()), dtype=torch.uint8, device=device),
            levels=Levels.of(self._groups_of(unit)) if before is None else before.levels,
            folded=torch.ones(len(unit.params), dtype=torch.float64),
            masks=self._masks(unit),
        )
        return m * inverse

    def _step_locally(self, unit: Unit, p: Tensor | None, scale: float) -> None:
        """Step p, u, R and K locally. p: its start, if it is not the last exchange's."""
        frozen, grads = self.frozen[unit], unit.memory.unreduced
        if unit not in self.local:
            p = torch.where(frozen.inverse > 0, onebit.decode(frozen.wire.tensor), 0.0) if p is None else p
            self.local[unit] = Local(w=unit.master.whole().clone(), p=p, u=torch.zeros_like(p))
        local, last = self.local[unit], self.local[unit].sums
        rates = frozen.levels.rates().tolist()
        for i, index, (start, stop) in self._spans(unit):
            group, span = rules.plain_numbers(self.inner.param_groups[index]), slice(start, stop)
            beta, (keep, rate) = group["betas"][0], _rates(group, (self.done or 0) + 1, rates[i])
            grad = grads[span].float() * frozen.inverse[span]
            local.p[span].mul_(beta).add_(grad, alpha=(1 - beta) * scale * self.shares[unit])
            local.u[span].mul_(keep).add_(local.p[span], alpha=rate)
            kept, sum_of_rates = last.get(i, (1.0, 0.0))
            local.sums[i] = (kept * keep, sum_of_rates * keep + rate)

    def _measure(self, units: Sequence[Unit], scale: float, interval: int) -> None:
        """Average the ranks' mean squares: one small exchange for each family."""
        by_family: dict[Comm, list[Unit]] = {}
        for unit in units:
            by_family.setdefault(unit.comms.data, []).append(unit)
        for comm, members in by_family.items():
            means = [self._mean_squares(unit, scale) for unit in members]
            now = comm.exchange(torch.cat(means)).mean(0).split([len(mean) for mean in means])
            for unit, mean in zip(members, now, strict=True):
                beta = torch.tensor([group["betas"][1] ** interval for group in self._groups_of(unit)], dtype=torch.float64)
                self.frozen[unit].levels.add(mean, beta)

    def _groups_of(self, unit: Unit) -> list[dict[str, Any]]:
        """The group of each parameter; the first group for a parameter without one."""
        return [self.inner.param_groups[index or 0] for index in self.members[unit].groups]

    def _mean_squares(self, unit: Unit, scale: float) -> Tensor:
        """fp64 [parameters]: mean squares of this rank's preconditioned gradients, on another sample in each step."""
        frozen, local = self.frozen[unit], unit.memory.unreduced
        means = torch.zeros(len(unit.params), dtype=torch.float64)
        for i, slot in enumerate(unit.layout.slots):
            if slot.numel and self.members[unit].groups[i] is not None:
                start = slot.offset + SAMPLE * frozen.levels.count % max(slot.numel - SAMPLE + 1, 1)
                span = slice(start, min(start + SAMPLE, slot.offset + slot.numel))
                sample = local[span] * frozen.inverse[span]
                means[i] = torch.dot(sample, sample) / sample.numel()
        return means * (scale * self.shares[unit]) ** 2

    def _send(self, unit: Unit, frozen: Frozen, scale: float) -> Pending[None]:
        local, dp = unit.memory.unreduced, unit.comms.dp
        dp.reusable(frozen.wire)
        for i, index, (start, stop) in self._spans(unit):
            beta, local_steps = self.inner.param_groups[index]["betas"][0], self.local.get(unit)
            span, blocks = slice(start, stop), slice(start // onebit.BLOCK, stop // onebit.BLOCK)
            records = frozen.wire.tensor[onebit.nbytes(start) : onebit.nbytes(stop)]
            inverse, own = frozen.inverse[span], (frozen.partly[blocks], frozen.y[span], frozen.scales[blocks], records)
            if local_steps is None:
                onebit.worker(local[span], inverse, *own, beta=beta, factor=(1 - beta) * scale * self.shares[unit])
            else:
                total = local_steps.sums[i][1]
                onebit.worker(local_steps.u[span], (inverse > 0).float(), *own, beta=0.0, factor=1 / total if total else 0.0)
        shard = _served(unit)
        served, partly = frozen.inverse[shard], frozen.partly[shard.start // onebit.BLOCK : shard.stop // onebit.BLOCK]

        def serve(sources: list[Tensor]) -> None:
            onebit.server(sources, served, partly, frozen.server, frozen.server_scales, frozen.own, alpha=1 / dp.size)

        return dp.swap(frozen.wire, _record_cuts(unit), serve)

    def _return(self, unit: Unit, frozen: Frozen, swap: Pending[None]) -> Pending[None]:
        swap.wait()
        unit.comms.dp.reusable(frozen.wire)
        cuts, index = _record_cuts(unit), unit.comms.dp.index
        frozen.wire.tensor[cuts[index] : cuts[index + 1]] = frozen.own
        return unit.comms.dp.all_gather(frozen.wire, cuts)

    def _spans(self, unit: Unit) -> Iterator[tuple[int, int, tuple[int, int]]]:
        """The unit's trainable parameters: index, group, and span in whole blocks."""
        for i, (slot, group, param) in enumerate(zip(unit.layout.slots, self.members[unit].groups, unit.params, strict=True)):
            if group is not None and param.requires_grad and slot.numel:
                yield i, group, (slot.offset, slot.offset + -(-slot.numel // onebit.BLOCK) * onebit.BLOCK)

    def options_of(self, unit: Unit, index: int, step: int) -> Mapping[str, Any]:
        group, count = self._options[index], self._updates(unit, step)
        if count == step or not group["bias_correction"] or kind_of(unit.model_params[0]):
            return group
        # The variance has had `count` of the `step` updates, but the kernel corrects both moments by one number
        root, first = math.sqrt(1 - group["betas"][1] ** count), 1 - group["betas"][0] ** step
        scaled = {
            "lr": group["lr"] * root / first,
            "eps": group["eps"] * root,
            "weight_decay": group["weight_decay"] * first / root,
        }
        return {**group, **scaled, "bias_correction": False}

    def step(self, unit: Unit, chunk: StateChunk, scale: float) -> None:
        if unit in self._late:
            self._land(unit, chunk.tensors["master"], chunk.tensors.get("out"), is_exchanged=self._round is Round.SIGNS)
            return
        super().step(unit, chunk, scale * self.shares[unit] if unit in self._apart else scale)
        if unit in self._apart and self._round is Round.SIGNS:
            self._average_weights(unit)

    def _land(self, unit: Unit, master: Tensor, out: Tensor | None, *, is_exchanged: bool) -> None:
        """Step masters and weights by what was exchanged or, between exchanges, by this rank's own p."""
        frozen, local, first = self.frozen[unit], self.local.get(unit), unit.optim_span[0]
        rates = frozen.levels.rates().tolist()
        for piece in self.pieces([unit]):
            if not piece.param.requires_grad:
                continue
            start, stop = piece.start, min(-(-piece.stop // onebit.BLOCK) * onebit.BLOCK, master.numel())
            own, w, weights = slice(start + first, stop + first), master[start:stop], None if out is None else out[start:stop]
            keep, rate = _rates(self.group_of(piece), piece.step, rates[piece.i])
            if local is not None:
                keep, rate = local.sums[piece.i]
                w.copy_(local.w[own])
            if is_exchanged:
                records = frozen.wire.tensor[onebit.nbytes(own.start) : onebit.nbytes(own.stop)]
                partly = frozen.partly[own.start // onebit.BLOCK : own.stop // onebit.BLOCK]
                onebit.update(w, records, frozen.inverse[own], partly, weights, keep=keep, rate=rate)
            elif local is not None:
                w.mul_(keep).sub_(local.u[own])
                if weights is not None:
                    weights.copy_(w)
        if is_exchanged:
            self.local.pop(unit, None)

    def group_of(self, piece: UpdatePiece) -> Mapping[str, Any]:
        """A tensor's options in this rank's span, in a step with an exchange."""
        return self._options[piece.group]


def _server_cuts(unit: Unit) -> list[int]:
    """The spans whose signs each rank sums: even ones, although optimizer spans that hold whole parameters are not."""
    blocks, ranks = unit.layout.numel // onebit.BLOCK, unit.comms.dp.size
    return [blocks * i // ranks * onebit.BLOCK for i in range(ranks + 1)]


def _served(unit: Unit) -> slice:
    return slice(*_server_cuts(unit)[unit.comms.dp.index :][:2])


def _record_cuts(unit: Unit) -> list[int]:
    return [onebit.nbytes(cut) for cut in _server_cuts(unit)]


def _rates(group: Mapping[str, Any], step: int, factor: float) -> tuple[float, float]:
    """The factor of the weights in a step, and the factor of p, which is subtracted. factor: of the learning rate."""
    rate = factor * group["lr"] / (1 - group["betas"][0] ** step if group["bias_correction"] else 1)
    return 1 - group["lr"] * group["weight_decay"], rate


def _average(store: Store, comm: Comm) -> None:
    """Replace the values of a store by their mean over ranks. Collective."""
    values = store.whole().float()
    sum_over(values, comm.axis)
    store.put(0, values / comm.size)


def mark_uncompressed(model: torch.nn.Module, optimizer: Optimizer) -> None:
    """Mark parameters whose gradients are never compressed: embeddings, of which a batch uses few rows, and `non_freeze` groups.

    The sign of an unused row is noise, so a whole embedding would move in each step.
    """
    embeddings = mark_rows(model)
    for group in optimizer.param_groups:
        for param in group["params"] if group.get("non_freeze") else ():
            keep_apart(param, "dense")
    if embeddings:
        log.info("the gradients of %s are not compressed: a batch uses few of its rows", " and ".join(embeddings))

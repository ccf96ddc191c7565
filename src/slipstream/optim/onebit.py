"""1-bit Adam (Tang et al. 2021, arXiv 2102.02888): Adam for `freeze_step` steps, then momentum whose signs are exchanged.

After step `freeze_step` the variance is frozen, so the update is linear in the gradients, and ranks exchange signs with error
feedback:

    x_i = beta1 * p + (1 - beta1) * g_i / (sqrt(v_hat) + eps) + e_i      rank i's share, with what its signs have lost before
    p   = signs of (the mean over ranks of the signs of x_i, + e_s)       the server of each span is its owner
    w   = w - lr * (p / (1 - beta1^t) + weight_decay * w)

The paper compresses m; p is m / (sqrt(v_hat) + eps). As v is frozen both are the same recursion, but the elements of p have one
order of magnitude, and those of m do not: with one scale for many, an element of small variance gets a step many times too long.
An element whose v is 0 (a row never used) is not stepped at all; the paper's update would be +-scale / eps.

A variance that stands still is soon wrong, as gradients shrink while a model learns (on a Llama of 4.7M parameters, freezing it
after 90 of 600 steps costs AdamW 6.8 % of its loss, and the signs 1.1 %). So ranks measure by how much: a parameter's level is the
average over steps of the mean square of g_i / (sqrt(v_hat) + eps), and its learning rate is divided by the root of what the level
has become since the first WINDOW steps. A sample of elements is enough.

late    the optimizer of a step needs the ranks' own gradients: they stay in `local` until the verdict, which needs their norm, the
        root of the mean over ranks of |g_i|^2
frozen  what a unit has from then on: the preconditioner and the compensated values of the whole unit on every rank
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from slipstream.ops import Partial, onebit
from slipstream.optim.loop import step_each
from slipstream.optim.native import NativeSteps
from slipstream.optim.sharded import Piece
from slipstream.zero.comm import Buffer, Comm, Pending, reduce_into, sum_over
from slipstream.zero.leaves import keep_apart, kind_of, mark_rows
from slipstream.zero.storage.store import Section, Store, read, section, write
from slipstream.zero.storage.stream import Chunk
from slipstream.zero.unit import Unit

log = logging.getLogger(__name__)

WINDOW = 20  # steps after which a parameter's level is the one that others are compared with
SAMPLE = 65536  # elements of a parameter whose gradients are measured in a step


class OneBitAdam(Optimizer):
    """AdamW until `freeze_step`, then momentum with the variance of that step. Inside an engine, ranks then exchange signs.

    A group with `non_freeze: True` stays AdamW, as embeddings do. `exp_avg_mask` of a group, of 0 and 1, of its parameters' shape
    or 1-D: elements that are 0 are not stepped after `freeze_step` (positions that never have gradients).
    """

    script_options = ("exp_avg_mask",)  # of a group: never saved, because a script's masks follow its model

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
        if lr < 0 or weight_decay < 0 or eps < 0:
            raise ValueError(f"OneBitAdam: lr ({lr}), weight_decay ({weight_decay}), eps ({eps}) must not be negative")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"OneBitAdam: betas {tuple(betas)} must lie in [0, 1)")
        if int(freeze_step) != freeze_step or freeze_step < 1:
            raise ValueError(f"OneBitAdam: freeze_step is {freeze_step}; the variance needs at least one step before it is frozen")
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "freeze_step": int(freeze_step),
            "non_freeze": False,
            "exp_avg_mask": None,
        }
        super().__init__(params, defaults)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        return step_each(self, closure, _step)


def _step(state: dict[str, Any], param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
    """One parameter on one rank, whose exchange is exact."""
    if not state:
        zeros = torch.zeros_like(param, dtype=torch.float32)
        state.update(step=torch.zeros(()), exp_avg=zeros, exp_avg_sq=zeros.clone())
    beta1, beta2 = group["betas"]
    state["step"] += 1
    count, grad = int(state["step"]), grad.float()
    state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
    frozen = count > group["freeze_step"] and not group["non_freeze"]
    if not frozen:
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    inverse = preconditioner(state["exp_avg_sq"], group, min(count, group["freeze_step"]) if frozen else count, frozen=frozen)
    rate = group["lr"] / (1 - beta1**count if group["bias_correction"] else 1)
    if frozen:
        level, reference = (state.setdefault(name, torch.zeros(1, dtype=torch.float64)) for name in ("level", "reference"))
        levels = Levels(level, reference, count - group["freeze_step"] - 1)
        levels.add((grad * inverse).square().mean().double().view(1).cpu(), torch.tensor([beta2], dtype=torch.float64))
        rate *= float(levels.rates())
    param.copy_(param.float() * (1 - group["lr"] * group["weight_decay"]) - state["exp_avg"] * inverse * rate)


def preconditioner(variance: Tensor, group: dict[str, Any], step: int, *, frozen: bool) -> Tensor:
    """1 / (sqrt(v_hat) + eps) of the variance after `step` steps; if it is frozen, 0 where v is 0 or the group's mask is."""
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
    count: int = 0

    @classmethod
    def of(cls, numel: int) -> Levels:
        return cls(torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64))

    def add(self, now: Tensor, beta: Tensor) -> None:
        """Count a step's mean squares; the first steps are averaged evenly."""
        self.count += 1
        self.value += (now - self.value) * (1 - beta).clamp_min(1 / self.count)
        if self.count <= WINDOW:
            self.reference.copy_(self.value)

    def rates(self) -> Tensor:
        """The factors of the learning rates."""
        known = (self.value > 0) & (self.reference > 0)
        return torch.where(known, self.reference / self.value.where(known, 1.0), 1.0).sqrt()


@dataclass(slots=True, kw_only=True)
class Frozen:
    """A unit after its variance was frozen. Arrays of the whole unit, but the server's, which are this rank's span of it."""

    inverse: Tensor
    partly: Tensor
    y: Tensor
    scales: Tensor
    wire: Buffer  # records: this rank's, then those of p
    server: Tensor
    server_scales: Tensor
    own: Tensor  # the server's records
    levels: Levels  # of the unit's parameters
    folded: Tensor  # the rates that the stored variance has

    def tensors(self) -> Iterator[Tensor]:
        yield from (self.inverse, self.partly, self.y, self.scales, self.wire.tensor, self.server, self.server_scales, self.own)


class OneBitSteps(NativeSteps):
    """Steps units by their native rule until they are frozen, then by exchanged signs."""

    def __init__(self, inner: Optimizer, units: Sequence[Unit], *others: Any, **options: Any) -> None:
        super().__init__(inner, units, *others, **options)
        self.frozen: dict[Unit, Frozen] = {}
        self.done: int | None = None  # steps; None: the ranks have not compared theirs since they loaded
        self.share = 1.0  # the factor from the sums of local gradients to this rank's mean gradient
        self.errors: dict[Unit, Store] = {}  # by `expose` or loaded: the means over ranks, in this rank's optimizer span
        self._late: set[Unit] = set()  # of this step

    def groups_loaded(self) -> None:
        super().groups_loaded()
        self.done = None
        self.frozen.clear()

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "error")

    def overwritten(self, unit: Unit) -> None:
        self.frozen.pop(unit, None)

    def states(self, piece: Piece) -> dict[str, Tensor | Section]:
        errors = self.errors.get(piece.unit)
        own = {} if errors is None else {"error": section(errors, piece.start, piece.stop)}
        return super().states(piece) | own

    def make_states(self, piece: Piece, dtypes: Mapping[str, torch.dtype]) -> Callable[[], None]:
        before = self.errors.pop(piece.unit, None)
        if "error" in dtypes:
            self.errors[piece.unit] = before or piece.unit.homes.state(piece.unit.master.numel, torch.float32)

        def undo() -> None:
            self.errors.pop(piece.unit, None)
            self.errors.update({} if before is None else {piece.unit: before})

        return undo

    def expose(self, units: Iterable[Unit]) -> None:
        for unit in units:
            if unit not in self.frozen:
                continue
            frozen, own, dp = self.frozen[unit], slice(*unit.optim_span), unit.comms.dp
            error = onebit.error(frozen.y, frozen.scales, frozen.inverse)
            sum_over(error, dp.axis)
            served = onebit.error(frozen.server, frozen.server_scales, frozen.inverse[slice(*unit.span)])
            error = error / dp.size + unit.unsharded(served, sharded=True)
            p = torch.where(frozen.inverse > 0, onebit.decode(frozen.wire.tensor) / frozen.inverse, 0.0)
            self.moments(unit).states["exp_avg"].put(0, p[own])
            rates = frozen.levels.rates()
            for piece in self.pieces([unit]):  # the variance that the steps are equal to
                part = self.states(piece)["exp_avg_sq"]
                write(part, read(part) * float(frozen.folded[piece.i] / rates[piece.i]) ** 2)
            frozen.folded = rates
            self.errors.setdefault(unit, unit.homes.state(unit.master.numel, torch.float32)).put(0, error[own])

    def add(self, units: Sequence[Unit]) -> None:  # type: ignore[override]
        super().add(units)
        self.done = None

    def drop(self, unit: Unit) -> None:
        super().drop(unit)
        self.frozen.pop(unit, None)
        self.errors.pop(unit, None)

    def memory(self) -> Iterator[Tensor | Store]:
        yield from super().memory()
        for frozen in self.frozen.values():
            yield from frozen.tensors()

    def keeps_local(self, unit: Unit, alpha: float) -> bool:
        if self.done is None:  # a rank may own no piece
            own = max((piece.step for piece in self.pieces()), default=0)
            self.done = int(unit.comms.data.exchange(torch.tensor([float(own)], dtype=torch.float64)).max())
        if self.done < self.inner.param_groups[0]["freeze_step"] or kind_of(unit.model_params[0]):
            return False
        local, ranks = unit.memory.local, unit.comms.dp.size
        assert local is not None, f"unit {unit.name}: 1-bit optimizers keep replicated gradients"
        unit.window.complete_local(local.tensor)
        self.share = alpha * ranks * unit.comms.family.weight
        squares = reduce_into(local.tensor, [local.tensor], 1.0, accumulate=False)
        unit.window.reduced(Partial(squares.sumsq * self.share**2 / ranks, squares.finite))
        self._late.add(unit)
        return True

    def exchange(self, units: Sequence[Unit], scale: float) -> None:
        late = [unit for unit in units if unit in self._late]
        for unit in late:
            if unit not in self.frozen:
                self.frozen[unit] = self._freeze(unit)
        self._measure(late, scale)
        swaps = [self._send(unit, self.frozen[unit], scale) for unit in late]
        gathers = [self._return(unit, self.frozen[unit], swap) for unit, swap in zip(late, swaps, strict=True)]
        for gather in gathers:
            gather.wait()

    def begin(self, units: Sequence[Unit]) -> None:
        super().begin(units)
        self.done = (self.done or 0) + 1

    def forget(self) -> None:
        self._late.clear()

    def _freeze(self, unit: Unit) -> Frozen:
        """Collective: every rank gets the preconditioner and the momentum of the whole unit."""
        states, sharded, device = self.moments(unit).states, unit.placement.optim, unit.full.device
        m, v = (unit.unsharded(states[name].whole(), sharded) for name in ("exp_avg", "exp_avg_sq"))
        errors = self.errors.pop(unit, None)
        inverse, y, count = torch.zeros_like(v), torch.zeros_like(m), unit.layout.numel // onebit.BLOCK
        for i, slot in enumerate(unit.layout.slots):
            index, span = self.members[unit].groups[i], slice(*slot.span)
            if index is None:
                continue
            group = self.inner.param_groups[index]
            inverse[span] = preconditioner(v[span].view(slot.shape), group, self.done or 1, frozen=True).flatten()
            y[span] = m[span] * inverse[span] * group["betas"][0]
        if any_rank(errors is not None, unit.comms.data):
            e = torch.zeros(unit.optim_span[1] - unit.optim_span[0], device=device) if errors is None else errors.whole()
            y += unit.unsharded(e, sharded)
        numel = unit.span[1] - unit.span[0]
        return Frozen(
            inverse=inverse,
            partly=onebit.partly(inverse),
            y=y,
            scales=torch.zeros(count, device=device),
            wire=unit.comms.dp.allocate([(onebit.nbytes(unit.layout.numel), torch.uint8)])[0],
            server=torch.zeros(numel, device=device),
            server_scales=torch.zeros(numel // onebit.BLOCK, device=device),
            own=torch.zeros(onebit.nbytes(numel), dtype=torch.uint8, device=device),
            levels=Levels.of(len(unit.params)),
            folded=torch.ones(len(unit.params), dtype=torch.float64),
        )

    def _measure(self, units: Sequence[Unit], scale: float) -> None:
        """Average the ranks' mean squares: one small exchange for each family."""
        by_family: dict[Comm, list[Unit]] = {}
        for unit in units:
            by_family.setdefault(unit.comms.data, []).append(unit)
        for comm, members in by_family.items():
            means = [self._mean_squares(unit, scale) for unit in members]
            now = comm.exchange(torch.cat(means)).mean(0).split([len(mean) for mean in means])
            for unit, mean in zip(members, now, strict=True):
                groups = [self.inner.param_groups[index or 0] for index in self.members[unit].groups]
                beta = torch.tensor([group["betas"][1] for group in groups], dtype=torch.float64)
                self.frozen[unit].levels.add(mean, beta)

    def _mean_squares(self, unit: Unit, scale: float) -> Tensor:
        """fp64 [parameters], of this rank's preconditioned gradients; another sample in each step."""
        frozen, local = self.frozen[unit], unit.memory.local
        assert local is not None
        means = torch.zeros(len(unit.params), dtype=torch.float64)
        for i, slot in enumerate(unit.layout.slots):
            if slot.numel and self.members[unit].groups[i] is not None:
                start = slot.offset + SAMPLE * frozen.levels.count % max(slot.numel - SAMPLE + 1, 1)
                span = slice(start, min(start + SAMPLE, slot.offset + slot.numel))
                means[i] = (local.tensor[span].float() * frozen.inverse[span]).square().mean()
        return means * (scale * self.share) ** 2

    def _send(self, unit: Unit, frozen: Frozen, scale: float) -> Pending[None]:
        local, dp = unit.memory.local, unit.comms.dp
        assert local is not None
        dp.reusable(frozen.wire)
        for index, (start, stop) in self._spans(unit):
            beta = self.inner.param_groups[index]["betas"][0]
            span, blocks = slice(start, stop), slice(start // onebit.BLOCK, stop // onebit.BLOCK)
            records = frozen.wire.tensor[onebit.nbytes(start) : onebit.nbytes(stop)]
            factor = (1 - beta) * scale * self.share
            arrays = (local.tensor[span], frozen.inverse[span], frozen.y[span], frozen.scales[blocks], records)
            onebit.worker(*arrays, beta=beta, factor=factor)
        inverse = frozen.inverse[slice(*unit.span)]

        def serve(sources: list[Tensor]) -> None:
            onebit.server(sources, inverse, frozen.server, frozen.server_scales, frozen.own, alpha=1 / dp.size)

        return dp.swap(frozen.wire, [onebit.nbytes(cut) for cut in unit.cuts], serve)

    def _return(self, unit: Unit, frozen: Frozen, swap: Pending[None]) -> Pending[None]:
        swap.wait()
        unit.comms.dp.reusable(frozen.wire)
        cuts = [onebit.nbytes(cut) for cut in unit.cuts]
        frozen.wire.tensor[onebit.nbytes(unit.span[0]) : onebit.nbytes(unit.span[1])] = frozen.own
        return unit.comms.dp.all_gather(frozen.wire, cuts)

    def _spans(self, unit: Unit) -> Iterator[tuple[int, tuple[int, int]]]:
        """The spans of the unit's trainable parameters with their groups, whole blocks."""
        for slot, group, param in zip(unit.layout.slots, self.members[unit].groups, unit.params, strict=True):
            if group is not None and param.requires_grad and slot.numel:
                yield group, (slot.offset, slot.offset + -(-slot.numel // onebit.BLOCK) * onebit.BLOCK)

    def step(self, unit: Unit, chunk: Chunk, scale: float) -> None:
        if unit not in self._late:
            super().step(unit, chunk, scale)
            return
        frozen, master, out, first = self.frozen[unit], chunk.tensors["master"], chunk.tensors.get("out"), unit.optim_span[0]
        rates = frozen.levels.rates().tolist()
        for piece in self.pieces([unit]):
            if not piece.param.requires_grad:
                continue
            group, start = self._options[piece.group], piece.start
            stop = min(-(-piece.stop // onebit.BLOCK) * onebit.BLOCK, master.numel())
            own = slice(start + first, stop + first)
            records = frozen.wire.tensor[onebit.nbytes(own.start) : onebit.nbytes(own.stop)]
            partly = frozen.partly[own.start // onebit.BLOCK : own.stop // onebit.BLOCK]
            weights = None if out is None else out[start:stop]
            rate = rates[piece.i] * group["lr"] / (1 - group["betas"][0] ** piece.step if group["bias_correction"] else 1)
            keep = 1 - group["lr"] * group["weight_decay"]
            onebit.update(master[start:stop], records, frozen.inverse[own], partly, weights, keep=keep, rate=rate)


def any_rank(value: bool, comm: Comm) -> bool:
    """Whether `value` is true on a rank. Collective."""
    return bool(comm.exchange(torch.tensor([float(value)], dtype=torch.float64)).any())


def mark_uncompressed(model: torch.nn.Module, optimizer: Optimizer) -> None:
    """Mark parameters whose gradients are never compressed: embeddings, of which a batch uses few rows, and `non_freeze` groups.

    The sign of a row that was not used is noise: a whole embedding would move in each step.
    """
    embeddings = mark_rows(model)
    for group in optimizer.param_groups:
        for param in group["params"] if group.get("non_freeze") else ():
            keep_apart(param, "dense")
    if embeddings:
        log.info("the gradients of %s are not compressed: a batch uses few of its rows", " and ".join(embeddings))

"""Running an optimizer on the shards of units.

The user's (or the JSON's) torch optimizer stays the one place where parameter groups and hyperparameters
live: schedulers change `lr` there. What is stepped are *pieces*: the part of each parameter that lies in this
rank's optimizer span.

FusedAdamW   one native pass over each stretch of neighbouring pieces that share a group and a step count
TorchSteps   any torch optimizer: elementwise ones see 1D pieces, shape-aware ones whole tensors (layout
`whole`)
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from slipstream import ops
from slipstream.zero.layout import overlap
from slipstream.zero.unit import Unit


@dataclass(slots=True)
class Piece:
    """The part of one parameter that this rank's optimizer owns; `start`, `stop` count from the optimizer span's start."""

    name: str
    param: nn.Parameter
    shape: tuple[int, ...]
    offset: int  # of the piece within the flattened parameter
    start: int
    stop: int
    group: int
    step: int = 0


def pieces_of(unit: Unit, group_of: dict[int, int]) -> list[Piece]:
    """This rank's pieces of a unit, in span order, also empty ones of zero-size parameters that lie inside."""
    base = unit.optim_span[0]
    pieces = []
    for name, param, slot in zip(unit.names, unit.params, unit.layout.slots, strict=True):
        start, stop = overlap(slot.span, unit.optim_span)
        if id(param) in group_of and start < stop:
            pieces.append(
                Piece(
                    name,
                    param,
                    slot.shape,
                    start - slot.offset,
                    start - base,
                    stop - base,
                    group_of[id(param)],
                )
            )
    return sorted(pieces, key=lambda piece: piece.start)


class ShardedSteps(ABC):
    """One optimizer over the spans of all units. Abstract; the engine calls `begin`, then `step` per unit, in unit order."""

    def __init__(self, inner: torch.optim.Optimizer, units: Sequence[Unit]) -> None:
        self.inner = inner
        group_of = {id(param): i for i, group in enumerate(inner.param_groups) for param in group["params"]}
        self.pieces = {unit.index: pieces_of(unit, group_of) for unit in units}
        # Some optimizers make state when they are built (Adagrad), and a user's may have stepped: it is sharded here
        self._given = dict(inner.state)
        inner.state.clear()

    def _given_state(self, piece: Piece, flat: bool) -> dict[str, Any]:
        """The piece's part of the state that the optimizer brought along."""
        result: dict[str, Any] = {}
        for name, value in self._given.get(piece.param, {}).items():
            if isinstance(value, Tensor) and tuple(value.shape) == piece.shape and flat and value.dim() > 0:
                result[name] = value.detach().reshape(-1)[piece.offset : piece.offset + piece.stop - piece.start].clone()
            else:
                result[name] = value.detach().clone() if isinstance(value, Tensor) else value
        return result

    @abstractmethod
    def begin(self) -> None:
        """A step of the engine begins."""

    @abstractmethod
    def step(self, unit: Unit, scale: float) -> None:
        """Update the unit's masters, and its weights where they are separate, with `unit.grads` times `scale`."""

    @abstractmethod
    def state_nbytes(self, unit: Unit) -> int:
        """Bytes of optimizer state that this rank keeps for the unit."""

    @abstractmethod
    def states(self, unit: Unit, piece: Piece) -> dict[str, Tensor]:
        """Per-element optimizer state of a piece, 1D views of this rank's memory; made on first use."""

    @abstractmethod
    def scalars(self, unit: Unit, piece: Piece) -> dict[str, Any]:
        """What else the optimizer remembers of the piece's parameter (step counts, whole small tensors)."""

    @abstractmethod
    def make_states(self, unit: Unit, piece: Piece, dtypes: Mapping[str, torch.dtype]) -> Callable[[], None]:
        """Make room for the named per-element states, so that a checkpoint can fill them; returns what undoes it."""

    @abstractmethod
    def load_scalars(self, unit: Unit, piece: Piece, values: dict[str, Any]) -> None:
        """Undo `scalars`."""


class FusedAdamW(ShardedSteps):
    """Adam and AdamW in one native pass: gradients in their own dtype, unscale and clip in the same factor.

    Source: Kingma & Ba (arXiv 1412.6980); Loshchilov & Hutter (arXiv 1711.05101).
    """

    def __init__(
        self, inner: torch.optim.Optimizer, units: Sequence[Unit], *, decoupled: bool, bias_correction: bool,
        state_dtype: torch.dtype,
    ) -> None:  # fmt: skip
        super().__init__(inner, units)
        self.decoupled, self.bias_correction, self.state_dtype = decoupled, bias_correction, state_dtype
        self.moments: dict[int, tuple[Tensor, Tensor]] = {}

    def _moments(self, unit: Unit) -> tuple[Tensor, Tensor]:
        if unit.index not in self.moments:
            first = torch.zeros(unit.master.numel(), dtype=self.state_dtype, device=unit.master.device)
            self.moments[unit.index] = (first, torch.zeros_like(first))
            for piece in self.pieces[unit.index]:
                given = self._given_state(piece, flat=True)
                if given:
                    for name, moment in zip(("exp_avg", "exp_avg_sq"), self.moments[unit.index], strict=True):
                        moment[piece.start : piece.stop].copy_(given[name])
                    piece.step = int(given["step"])
        return self.moments[unit.index]

    def begin(self) -> None:
        """Steps are counted per piece."""

    def step(self, unit: Unit, scale: float) -> None:
        assert unit.grads is not None
        exp_avg, exp_avg_sq = self._moments(unit)
        for start, stop, group, step in _stretches(self.pieces[unit.index]):
            options = self.inner.param_groups[group]
            ops.adamw(
                unit.master[start:stop], unit.grads[start:stop], exp_avg[start:stop], exp_avg_sq[start:stop],
                None if unit.out is None else unit.out[start:stop],
                scale=scale, lr=float(options["lr"]), beta1=options["betas"][0], beta2=options["betas"][1], eps=options["eps"],
                weight_decay=options["weight_decay"], step=step, decoupled=self.decoupled, bias_correction=self.bias_correction,
            )  # fmt: skip
        self.inner._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers ask whether the optimizer stepped first

    def state_nbytes(self, unit: Unit) -> int:
        return 2 * unit.master.numel() * self.state_dtype.itemsize

    def states(self, unit: Unit, piece: Piece) -> dict[str, Tensor]:
        exp_avg, exp_avg_sq = self._moments(unit)
        return {
            "exp_avg": exp_avg[piece.start : piece.stop],
            "exp_avg_sq": exp_avg_sq[piece.start : piece.stop],
        }

    def scalars(self, unit: Unit, piece: Piece) -> dict[str, Any]:
        return {"step": piece.step}

    def make_states(self, unit: Unit, piece: Piece, dtypes: Mapping[str, torch.dtype]) -> Callable[[], None]:
        return lambda: None  # both moments are there, or zero

    def load_scalars(self, unit: Unit, piece: Piece, values: dict[str, Any]) -> None:
        piece.step = int(values["step"])


def _stretches(pieces: Sequence[Piece]) -> Iterator[tuple[int, int, int, int]]:
    """(start, stop, group, step) of maximal runs of trainable neighbours; counts their steps. The zero gap between two
    parameters belongs to the run: its gradient is zero and its weight too, so no update changes it."""
    run: tuple[int, int, int, int] | None = None
    for piece in pieces:
        if not piece.param.requires_grad:
            continue
        piece.step += 1
        if run is not None and (run[2], run[3]) == (piece.group, piece.step) and piece.start - run[1] < 64:
            run = (run[0], piece.stop, piece.group, piece.step)
        else:
            if run is not None:
                yield run
            run = (piece.start, piece.stop, piece.group, piece.step)
    if run is not None:
        yield run


class TorchSteps(ShardedSteps):
    """Any torch optimizer, unit by unit, on copies of the gradient pieces in the master's dtype, as its states are.

    With `state_dtype` bf16, per-element states rest in that and are widened while their unit is stepped.

    Some optimizers count steps in their groups. So the call for each unit sees the groups as they were when the engine's step
    began, and what one call makes of a group that it has parameters of is what remains: groups advance once a step.
    """

    def __init__(self, inner: torch.optim.Optimizer, units: Sequence[Unit], *, whole: bool, state_dtype: torch.dtype) -> None:
        super().__init__(inner, units)
        self.whole, self.state_dtype = whole, state_dtype
        self.stepped: dict[int, list[Tensor]] = {}  # unit index -> one leaf per piece, a view of the master
        inner.register_step_pre_hook(self._refuse_outside)
        self._inside = False
        self._before: list[dict[str, Any]] = []  # each group's values as the engine's step began
        self._after: dict[int, dict[str, Any]] = {}  # of the groups that have advanced since

    def begin(self) -> None:
        self._before = [_values(group) for group in self.inner.param_groups]
        self._after.clear()

    def _refuse_outside(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._inside:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() was called on an optimizer that an engine owns; call engine.step()"
            )

    def _leaves(self, unit: Unit) -> list[Tensor]:
        if unit.index not in self.stepped:
            self.stepped[unit.index] = [
                unit.master[piece.start : piece.stop].view(piece.shape if self.whole else (-1,)).detach()
                for piece in self.pieces[unit.index]
            ]
            for piece, leaf in zip(self.pieces[unit.index], self.stepped[unit.index], strict=True):
                given = self._given_state(piece, flat=not self.whole)
                if given:
                    self.inner.state[leaf] = given
        return self.stepped[unit.index]

    def step(self, unit: Unit, scale: float) -> None:
        assert unit.grads is not None
        groups = self.inner.param_groups
        users = [group["params"] for group in groups]
        for group, values in zip(groups, self._before, strict=True):
            _set_values(group, values)
            group["params"] = []
        leaves = self._leaves(unit)
        for piece, leaf in zip(self.pieces[unit.index], leaves, strict=True):
            if piece.param.requires_grad:
                leaf.grad = unit.grads[piece.start : piece.stop].to(leaf.dtype).mul(scale).view(leaf.shape)
                groups[piece.group]["params"].append(leaf)
        self._cast_states(leaves, None)
        self._inside = True
        try:
            self.inner.step()
        finally:
            self._inside = False
            self._cast_states(leaves, self.state_dtype)
            for i, (group, params) in enumerate(zip(groups, users, strict=True)):
                if group["params"]:
                    self._after[i] = _values(group)
                elif i in self._after:
                    _set_values(group, self._after[i])
                group["params"] = params
            for leaf in leaves:
                leaf.grad = None
        if unit.out is not None:
            unit.out.copy_(unit.master)

    def _cast_states(self, leaves: Sequence[Tensor], dtype: torch.dtype | None) -> None:
        """Per-element states to `dtype`, or (None) to their master's, where they are to be narrower than that."""
        if self.state_dtype is torch.float32:
            return
        for leaf in leaves:
            state = self.inner.state.get(leaf, {})
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim() > 0 and value.shape == leaf.shape:
                    state[name] = value.to(dtype or leaf.dtype)

    def state_nbytes(self, unit: Unit) -> int:
        """What has been made so far: torch optimizers make state in their first step."""
        held = (self.inner.state.get(leaf, {}) for leaf in self._leaves(unit))
        return sum(value.nbytes for state in held for value in state.values() if isinstance(value, Tensor))

    def _leaf(self, unit: Unit, piece: Piece) -> Tensor:
        return self._leaves(unit)[self.pieces[unit.index].index(piece)]

    def _state(self, unit: Unit, piece: Piece) -> dict[str, Any]:
        return self.inner.state.get(self._leaf(unit, piece), {})

    def states(self, unit: Unit, piece: Piece) -> dict[str, Tensor]:
        shape = self._leaf(unit, piece).shape
        return {
            name: value.view(-1)
            for name, value in self._state(unit, piece).items()
            if isinstance(value, Tensor) and value.dim() > 0 and value.shape == shape
        }

    def make_states(self, unit: Unit, piece: Piece, dtypes: Mapping[str, torch.dtype]) -> Callable[[], None]:
        leaf = self._leaf(unit, piece)
        before = self.inner.state.pop(leaf, None)
        if dtypes:
            self.inner.state[leaf] = {name: torch.zeros_like(leaf, dtype=dtype) for name, dtype in dtypes.items()}

        def undo() -> None:
            self.inner.state.pop(leaf, None)
            if before is not None:
                self.inner.state[leaf] = before

        return undo

    def scalars(self, unit: Unit, piece: Piece) -> dict[str, Any]:
        per_element = self.states(unit, piece)
        return {name: value for name, value in self._state(unit, piece).items() if name not in per_element}

    def load_scalars(self, unit: Unit, piece: Piece, values: dict[str, Any]) -> None:
        self.inner.state[self._leaf(unit, piece)].update(values)


_PARAMS = {"params", "param_names"}


def _values(group: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of what a parameter group holds beside parameters."""
    return {name: copy.deepcopy(value) for name, value in group.items() if name not in _PARAMS}


def _set_values(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Undo changes since `values` was taken. Tensors are filled, because schedulers hold them."""
    for name in group.keys() - values.keys() - _PARAMS:
        del group[name]
    for name, value in values.items():
        if isinstance(value, Tensor) and isinstance(group.get(name), Tensor):
            group[name].copy_(value)
        else:
            group[name] = copy.deepcopy(value)

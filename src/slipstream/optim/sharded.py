"""Optimizer steps on the shards of units.

The user's (or the JSON's) torch optimizer remains the only place for parameter groups and hyperparameters: schedulers change `lr`
there. The engine steps *pieces*: the part of each parameter in this rank's optimizer span.

NativeSteps  native kernels, chunk by chunk, on any tier (optim/native.py)
TorchSteps   any torch optimizer, in memory: elementwise ones on 1D pieces, shape-aware ones on whole tensors (layout `whole`)
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from slipstream.optim import rules
from slipstream.zero.layout import overlap
from slipstream.zero.store import Section
from slipstream.zero.stream import Chunk, Ring
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
    """This rank's non-empty pieces of a unit, in span order."""
    base = unit.optim_span[0]
    pieces = []
    for name, param, slot in zip(unit.names, unit.params, unit.layout.slots, strict=True):
        start, stop = overlap(slot.span, unit.optim_span)
        if id(param) in group_of and start < stop:
            pieces.append(Piece(name, param, slot.shape, start - slot.offset, start - base, stop - base, group_of[id(param)]))
    return sorted(pieces, key=lambda piece: piece.start)


class ShardedSteps(ABC):
    """One optimizer over the spans of all units. The engine calls `begin`, then `step` for each chunk, in unit order.

    `begin` copies the options that schedules may change before the last chunk is done.
    """

    ring: Ring | None = None  # the buffers for chunks that are not stored where the optimizer steps
    steps_on_host = False  # steps on the host, while the device computes
    streams = False  # states or weights of some rank are on disk and pass through its ring

    def __init__(self, inner: torch.optim.Optimizer, units: Sequence[Unit]) -> None:
        self.inner = inner
        self.pieces: dict[int, list[Piece]] = {}  # unit index -> this rank's
        self.groups: dict[int, list[int | None]] = {}  # unit index -> the group of each of its parameters, on every rank
        self.unit_tables: list[dict[int, Any]] = [self.pieces, self.groups]  # all dicts whose key is a unit's index
        # Some optimizers make state when they are built (Adagrad), and a user's may have stepped: that state is sharded here
        self._initial: dict[Tensor, dict[str, Any]] = dict(inner.state)
        inner.state.clear()
        self.add(units)

    def add(self, units: Iterable[Unit]) -> None:
        """Also step these units, with fresh states."""
        groups = self.inner.param_groups
        group_of = {id(param): i for i, group in enumerate(groups) for param in group["params"]}
        for unit in units:
            self.pieces[unit.index] = pieces_of(unit, group_of)
            self.groups[unit.index] = [group_of.get(id(param)) for param in unit.params]
            for piece in self.pieces[unit.index] if isinstance(self.inner, torch.optim.Adagrad) else ():
                first = torch.tensor(groups[piece.group]["initial_accumulator_value"], dtype=unit.dtypes.master)
                self._initial.setdefault(piece.param, {"step": torch.tensor(0.0), "sum": first.expand(piece.shape)})

    def adopt_initial_state(self, units: Iterable[Unit]) -> None:
        """Copy the optimizer's initial state to the states of the units, and forget it."""
        for unit in (unit for unit in units if unit.grads is not None):
            for piece in self.pieces[unit.index]:
                if piece.param in self._initial:
                    self.states(unit, piece)
        self._initial.clear()

    def renumber(self, units: Iterable[tuple[int, Unit]]) -> None:
        """Update indices and names after a change of the model. `units`: (previous index, unit); drops entries of all others."""
        pairs = list(units)
        for entries in self.unit_tables:
            moved = {unit.index: entries[before] for before, unit in pairs if before in entries}
            entries.clear()
            entries.update(moved)
        for _, unit in pairs:
            names = {id(param): name for param, name in zip(unit.params, unit.names, strict=True)}
            for piece in self.pieces[unit.index]:
                piece.name = names[id(piece.param)]

    @abstractmethod
    def drop(self, unit: Unit) -> None:
        """Free the memory of the states of a removed unit. `renumber` follows."""

    def _initial_state(self, piece: Piece, flat: bool) -> dict[str, Any]:
        """The piece's part of the optimizer's initial state."""
        result: dict[str, Any] = {}
        for name, value in self._initial.get(piece.param, {}).items():
            if isinstance(value, Tensor) and tuple(value.shape) == piece.shape and flat and value.dim() > 0:
                result[name] = value.detach().reshape(-1)[piece.offset : piece.offset + piece.stop - piece.start].clone()
            else:
                result[name] = value.detach().clone() if isinstance(value, Tensor) else value
        return result

    @abstractmethod
    def unsupported_option(self, groups: Sequence[Mapping[str, Any]]) -> str:
        """The error text for an option of these groups that `step` does not support, or "" if there is none."""

    def groups_loaded(self) -> None:
        """Let the optimizer's class process loaded groups: AdamW sets decoupled decay even in groups that Adam saved."""
        self.inner.__setstate__({"state": self.inner.state, "param_groups": self.inner.param_groups})

    @abstractmethod
    def begin(self, units: Sequence[Unit]) -> None:
        """Start a step of the engine over these units."""

    @abstractmethod
    def chunks(self, unit: Unit) -> Sequence[Chunk]:
        """The unit's span, cut into the chunks that `step` processes."""

    @abstractmethod
    def step(self, unit: Unit, chunk: Chunk, scale: float) -> None:
        """Update the chunk's masters, and its weights if they are separate, with its gradients times `scale`."""

    @abstractmethod
    def state_nbytes(self, unit: Unit) -> int:
        """Bytes of optimizer state that this rank keeps for the unit."""

    @abstractmethod
    def states(self, unit: Unit, piece: Piece) -> dict[str, Tensor | Section]:
        """Per-element optimizer state of a piece, 1D, in its storage; made on first use."""

    @abstractmethod
    def scalars(self, unit: Unit, piece: Piece) -> dict[str, Any]:
        """All other optimizer state of the piece's parameter (step counts, whole small tensors)."""

    @abstractmethod
    def make_states(self, unit: Unit, piece: Piece, dtypes: Mapping[str, torch.dtype]) -> Callable[[], None]:
        """Allocate the named per-element states for a checkpoint to fill. Returns the function that undoes it."""

    @abstractmethod
    def load_scalars(self, unit: Unit, piece: Piece, values: dict[str, Any]) -> None:
        """Set the values that `scalars` returned."""


class TorchSteps(ShardedSteps):
    """Any torch optimizer, unit by unit, on copies of the gradient pieces in the master's dtype, which is also the states' dtype.

    With `state_dtype` bf16, per-element states are stored in bf16 and converted to the master's dtype while their unit steps.

    Some optimizers count steps in their groups. So the call for each unit starts from the groups' values at the beginning of the
    engine's step, and a group keeps the values of a call that stepped some of its parameters: groups advance once per step.
    """

    def __init__(self, inner: torch.optim.Optimizer, units: Sequence[Unit], *, whole: bool, state_dtype: torch.dtype) -> None:
        super().__init__(inner, units)
        self.whole, self.state_dtype = whole, state_dtype
        self.stepped: dict[int, list[Tensor]] = {}  # unit index -> one leaf per piece, a view of the master
        self.unit_tables.append(self.stepped)
        inner.register_step_pre_hook(self._refuse_outside)
        self._stepping = False
        self._before: list[dict[str, Any]] = []  # each group's values at the beginning of the engine's step
        self._after: dict[int, dict[str, Any]] = {}  # of the groups that have advanced since

    def unsupported_option(self, groups: Sequence[Mapping[str, Any]]) -> str:
        return rules.unsupported_option(self.inner, None, groups)

    def begin(self, units: Sequence[Unit]) -> None:
        self._before = [_values(group) for group in self.inner.param_groups]
        self._after.clear()

    def drop(self, unit: Unit) -> None:
        for leaf in self.stepped.pop(unit.index, []):
            self.inner.state.pop(leaf, None)

    def _refuse_outside(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._stepping:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() was called on an optimizer that an engine owns; call engine.step()"
            )

    def _leaves(self, unit: Unit) -> list[Tensor]:
        if unit.index not in self.stepped:
            self.stepped[unit.index] = [
                _in_memory(unit)[piece.start : piece.stop].view(piece.shape if self.whole else (-1,)).detach()
                for piece in self.pieces[unit.index]
            ]
            for piece, leaf in zip(self.pieces[unit.index], self.stepped[unit.index], strict=True):
                if initial := self._initial_state(piece, flat=not self.whole):
                    self.inner.state[leaf] = initial
        return self.stepped[unit.index]

    def chunks(self, unit: Unit) -> Sequence[Chunk]:
        return [Chunk(0, unit.master.numel, {})]

    def step(self, unit: Unit, chunk: Chunk, scale: float) -> None:
        assert unit.grads is not None
        grads = unit.grads.whole()
        groups = self.inner.param_groups
        users_params = [group["params"] for group in groups]
        for group, values in zip(groups, self._before, strict=True):
            _set_values(group, values)
            group["params"] = []
        leaves = self._leaves(unit)
        for piece, leaf in zip(self.pieces[unit.index], leaves, strict=True):
            if piece.param.requires_grad:
                leaf.grad = grads[piece.start : piece.stop].to(leaf).mul(scale).view(leaf.shape)
                groups[piece.group]["params"].append(leaf)
        self._cast_states(leaves, None)
        self._stepping = True
        try:
            self.inner.step()
        finally:
            self._stepping = False
            self._cast_states(leaves, self.state_dtype)
            for i, (group, params) in enumerate(zip(groups, users_params, strict=True)):
                if group["params"]:
                    self._after[i] = _values(group)
                elif i in self._after:
                    _set_values(group, self._after[i])
                group["params"] = params
            for leaf in leaves:
                leaf.grad = None
        if unit.out is not None:
            unit.out.put(0, unit.master.whole())

    def _cast_states(self, leaves: Sequence[Tensor], dtype: torch.dtype | None) -> None:
        """Convert per-element states to `dtype`, or to their master's dtype if None. A no-op if states are kept in fp32."""
        if self.state_dtype is torch.float32:
            return
        for leaf in leaves:
            state = self.inner.state.get(leaf, {})
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim() > 0 and value.shape == leaf.shape:
                    state[name] = value.to(dtype or leaf.dtype)

    def state_nbytes(self, unit: Unit) -> int:
        """Only existing state counts: torch optimizers make it in their first step."""
        states = (self.inner.state.get(leaf, {}) for leaf in self._leaves(unit))
        return sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor))

    def _leaf(self, unit: Unit, piece: Piece) -> Tensor:
        return self._leaves(unit)[self.pieces[unit.index].index(piece)]

    def _state(self, unit: Unit, piece: Piece) -> dict[str, Any]:
        return self.inner.state.get(self._leaf(unit, piece), {})

    def states(self, unit: Unit, piece: Piece) -> dict[str, Tensor | Section]:
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


def _in_memory(unit: Unit) -> Tensor:
    view = unit.master.view(0, unit.master.numel)
    assert view is not None, "train/initialize.py refuses torch optimizers with a disk tier"
    return view


_PARAMS = {"params", "param_names"}


def _values(group: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a parameter group's entries other than its parameters."""
    return {name: copy.deepcopy(value) for name, value in group.items() if name not in _PARAMS}


def _set_values(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Reset the group to `values`. Copies into existing tensors, because schedulers reference them."""
    for name in group.keys() - values.keys() - _PARAMS:
        del group[name]
    for name, value in values.items():
        if isinstance(value, Tensor) and isinstance(group.get(name), Tensor):
            group[name].copy_(value)
        else:
            group[name] = copy.deepcopy(value)

"""Optimizer steps on the shards of units.

The torch optimizer (the user's, or the JSON's) remains the only place for parameter groups and hyperparameters: schedulers change
`lr` there. The engine steps *pieces*: the part of each parameter in this rank's optimizer span.

NativeSteps  native kernels, chunk by chunk, on any tier (optim/native.py)
TorchSteps   any torch optimizer, in memory: elementwise ones on 1D pieces, shape-aware ones on whole tensors (layout `whole`)
"""

from __future__ import annotations

import copy
import itertools
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn as nn
from torch import Tensor

from slipstream.optim.nested import Nested
from slipstream.optim.rules import Rule, unsupported_option
from slipstream.zero.access import Joint, joined, joints
from slipstream.zero.layout import Span
from slipstream.zero.leaves import cuts_of, cuts_of_tensors
from slipstream.zero.storage.store import Section, Store, read
from slipstream.zero.storage.stream import Ring, StateChunk
from slipstream.zero.unit import Unit


@dataclass(slots=True, eq=False)
class UpdatePiece:
    """The part of one parameter that this rank's optimizer owns; `start`, `stop` count from the optimizer span's start."""

    unit: Unit
    i: int  # index of the parameter in its unit
    offset: int  # of the piece within the flattened parameter
    start: int
    stop: int
    group: int
    step: int = 0  # counted by NativeSteps
    leaf: Tensor | None = None  # the view of the master that TorchSteps passes to the optimizer
    cuts: tuple[Joint, ...] | None = None  # cuts over other ranks, which TorchSteps joins for an optimizer that needs wholes

    @property
    def name(self) -> str:
        return self.unit.names[self.i]

    @property
    def param(self) -> nn.Parameter:
        return self.unit.params[self.i]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.unit.layout.slots[self.i].shape


class Membership(NamedTuple):
    """A unit's parameters as members of an optimizer."""

    pieces: list[UpdatePiece]  # this rank's non-empty pieces, in span order
    groups: list[int | None]  # the group of each of the unit's parameters, on every rank


class KnownStates(NamedTuple):
    dtypes: dict[str, torch.dtype]  # of per-element states
    scalars: dict[str, Any]


def membership(unit: Unit, group_of: Mapping[int, int]) -> Membership:
    """The unit's parameters in an optimizer. group_of: id of a parameter -> its group"""
    groups, pieces = [group_of.get(id(param)) for param in unit.params], []
    for i, (group, slot) in enumerate(zip(groups, unit.layout.slots, strict=True)):
        inside, of_param = slot.common(unit.optim_span)
        if group is not None and inside.start < inside.stop:
            pieces.append(UpdatePiece(unit, i, of_param.start, inside.start, inside.stop, group))
    return Membership(sorted(pieces, key=lambda piece: piece.start), groups)


class Rest(Protocol):
    """Which tensors of stacks, and which whole parameters, a step leaves unchanged: weights, masters and states."""

    def decide(self) -> None:
        """Called before each step. Collective over the ranks of a stage."""

    def used(self, param: nn.Parameter) -> Sequence[bool] | None:
        """Whether the step updates each of the equal consecutive parts of this rank's `param`; None: it updates all of it."""


class NoOptimizer(torch.optim.Optimizer):
    """The optimizer of an engine without one: no groups, no state."""

    def __init__(self) -> None:
        # No Optimizer.__init__, which raises for an empty list of parameters.
        self.defaults, self.param_groups, self.state = {}, [], {}  # type: ignore[assignment]


class ShardedSteps(ABC):
    """One optimizer over the spans of all units. The engine calls `begin`, then `step` for each chunk, in unit order.

    `begin` copies the options that schedules may change before the last chunk is done.
    """

    ring: Ring | None = None  # buffers for chunks that are stored elsewhere than where the optimizer steps
    steps_on_host = False  # steps on the host, while the device computes
    streams = False  # states or weights of some rank are on disk and pass through its ring
    rest: Rest | None = None  # what steps leave unchanged; None: nothing

    def __init__(self, inner: torch.optim.Optimizer, units: Sequence[Unit], rule: Rule | None) -> None:
        self.inner, self.rule, self.nested = inner, rule, Nested(inner)
        self.members: dict[Unit, Membership] = {}
        # Some optimizers create state when they are built (Adagrad), and a user's may have stepped: that state is sharded here
        self._initial: dict[Tensor, dict[str, Any]] = self.nested.pop_all()
        self._stepping = False
        self._guards = [each.register_step_pre_hook(_refusal(weakref.ref(self))) for each in self.nested.members]
        self.add(units)

    def close(self) -> None:
        """Give the optimizer back to its owner, without states."""
        for guard in self._guards:
            guard.remove()
        self.nested.pop_all()

    @property
    def has_optimizer(self) -> bool:
        return not isinstance(self.inner, NoOptimizer)

    def add(self, units: Iterable[Unit]) -> None:
        """Also step these units, with fresh states."""
        groups = self.inner.param_groups
        group_of = {id(param): i for i, group in enumerate(groups) for param in group["params"]}
        for unit in units:
            self.members[unit] = membership(unit, group_of)
            for piece in self.members[unit].pieces if isinstance(self.inner, torch.optim.Adagrad) else ():
                first = torch.tensor(groups[piece.group]["initial_accumulator_value"], dtype=unit.dtypes.master)
                self._initial.setdefault(piece.param, {"step": torch.tensor(0.0), "sum": first.expand(piece.shape)})

    def pieces(self, units: Iterable[Unit] | None = None) -> Iterator[UpdatePiece]:
        """This rank's pieces of the units (None: of all), in unit and span order; frozen units have none."""
        trained = (unit for unit in (self.members if units is None else units) if unit.grads is not None)
        return (piece for unit in trained for piece in self.members[unit].pieces)

    def piece(self, unit: Unit, i: int) -> UpdatePiece | None:
        """This rank's piece of the unit's parameter i, if it owns one."""
        return next((piece for piece in self.pieces([unit]) if piece.i == i), None)

    def due(self, piece: UpdatePiece) -> list[Span]:
        """The spans of the optimizer span that a step updates: all of a piece, or its parts that do not rest."""
        if not piece.param.requires_grad:
            return []
        used = None if self.rest is None else self.rest.used(piece.param)
        if used is None:
            return [(piece.start, piece.stop)]
        length, first = math.prod(piece.shape) // len(used), piece.start - piece.offset
        spans, at = [], first
        for is_used, same in itertools.groupby(used):
            start, at = at, at + len(list(same)) * length
            if is_used and max(start, piece.start) < min(at, piece.stop):
                spans.append((max(start, piece.start), min(at, piece.stop)))
        return spans

    def known_states(self, unit: Unit) -> dict[str, KnownStates]:
        """The optimizer state that the unit's parameters have on any rank, by parameter name. Collective."""
        self.expose([unit])
        own = {}
        for piece in self.pieces([unit]):
            dtypes = {state: part.dtype for state, part in self.states(piece).items()}
            own[piece.name] = KnownStates(dtypes, self.scalars(piece))
        known: dict[str, KnownStates] = {}
        for of_rank in unit.comms.dp.axis.gather(own) if unit.placement.optim else [own]:
            known |= of_rank
        if any(part.is_dealt for param in unit.params for part in cuts_of(param)):  # other ranks have all of some parameters
            for axis in unit.comms.family.parts:
                for of_rank in axis.gather(known):
                    known = of_rank | known
        return known

    def whole_states(self, unit: Unit, known: Mapping[str, KnownStates]) -> Iterator[tuple[str, Tensor]]:
        """Yield the per-element states of a unit as (name, flat values of the whole unit), one at a time. Collective."""
        dtypes = {state: dtype for each in known.values() for state, dtype in each.dtypes.items()}
        for state in sorted(dtypes):
            shard = torch.zeros(unit.master.numel, dtype=dtypes[state])
            for piece in self.pieces([unit]):
                if (part := self.states(piece).get(state)) is not None:
                    shard[piece.start : piece.stop].copy_(read(part))
            yield state, unit.unsharded(shard, unit.placement.optim)

    def adopt_initial_state(self) -> None:
        """Copy the optimizer's initial state into the units' states, and drop it."""
        for piece in self.pieces():
            if piece.param in self._initial:
                self.states(piece)
        self._initial.clear()

    @abstractmethod
    def drop(self, unit: Unit) -> None:
        """Forget a removed unit, and free the memory of its states."""

    def _initial_state(self, piece: UpdatePiece, flat: bool) -> dict[str, Any]:
        """The piece's part of the optimizer's initial state."""
        result: dict[str, Any] = {}
        for name, value in self._initial.get(piece.param, {}).items():
            if isinstance(value, Tensor) and tuple(value.shape) == piece.shape and flat and value.dim() > 0:
                result[name] = value.detach().reshape(-1)[piece.offset : piece.offset + piece.stop - piece.start].clone()
            else:
                result[name] = value.detach().clone() if isinstance(value, Tensor) else value
        return result

    def unsupported_option(self, groups: Sequence[Mapping[str, Any]]) -> str:
        """The error text for an option of these groups that `step` does not support, or "" if there is none."""
        return unsupported_option(self.inner, self.rule, groups)

    def groups_loaded(self) -> None:
        """Let the optimizer's class process loaded groups: AdamW sets decoupled decay even in groups that Adam saved."""
        for each in self.nested.members:
            if type(each).__setstate__ is not torch.optim.Optimizer.__setstate__:  # it changes the class's step, once hooks are set
                each.__setstate__({"state": each.state, "param_groups": each.param_groups})

    def loaded_without_states(self, done: int) -> str:
        """The error text if a run cannot continue after `done` steps with weights alone, else "", and the consequence is logged."""
        return ""

    def keeps_local(self, unit: Unit, alpha: float) -> bool:
        """Whether this step does not reduce the unit's gradients, because `exchange` uses the ranks' own; then measures them.

        alpha: the factor that makes the sum over ranks the mean gradient
        """
        return False

    def exchange(self, units: Sequence[Unit], scale: float) -> None:  # noqa: B027 (most optimizers exchange nothing)
        """After the verdict, exchange what the optimizer derives from the kept gradients, times `scale`. Collective."""

    def forget(self) -> None:  # noqa: B027
        """Drop the kept gradients of this step."""

    def expose(self, units: Iterable[Unit]) -> None:  # noqa: B027
        """Make `states` of the units current, if the optimizer keeps them in another form. Collective."""

    def synchronize(self, units: Iterable[Unit]) -> None:  # noqa: B027
        """Make masters and weights equal on all ranks, if the optimizer lets them differ between steps. Collective."""

    def overwritten(self, unit: Unit) -> None:  # noqa: B027
        """Continue from a unit's `states`, which were overwritten from outside on the ranks that own them. Called on all ranks."""

    @property
    def state_names(self) -> tuple[str, ...] | None:
        """The names of per-element states that can be loaded; None: any."""
        return None if self.rule is None else self.rule.states

    @abstractmethod
    def begin(self, units: Sequence[Unit]) -> None:
        """Start a step of the engine over these units."""

    @abstractmethod
    def chunks(self, unit: Unit) -> Sequence[StateChunk]:
        """The unit's span, cut into the chunks that `step` processes."""

    @abstractmethod
    def step(self, unit: Unit, chunk: StateChunk, scale: float) -> None:
        """Update the chunk's masters, and its weights if these are separate, with its gradients times `scale`."""

    @abstractmethod
    def memory(self) -> Iterator[Tensor | Store]:
        """Everything that holds per-element state on this rank, in any storage; only what exists (it is made on first use)."""

    @abstractmethod
    def states(self, piece: UpdatePiece) -> dict[str, Tensor | Section]:
        """A piece's per-element optimizer state, 1D, in its storage; made on first use."""

    @abstractmethod
    def scalars(self, piece: UpdatePiece) -> dict[str, Any]:
        """All other optimizer state of the piece's parameter (step counts, whole small tensors)."""

    @abstractmethod
    def make_states(self, piece: UpdatePiece, dtypes: Mapping[str, torch.dtype]) -> Callable[[], None]:
        """Allocate the named per-element states for a checkpoint to fill. Returns a function that undoes it."""

    @abstractmethod
    def load_scalars(self, piece: UpdatePiece, values: dict[str, Any]) -> None:
        """Set the values that `scalars` returned."""


def _refusal(owner: weakref.ref[ShardedSteps]) -> Callable[..., None]:
    """A hook that refuses steps of an optimizer while `owner` lives and does not step it."""

    def refuse(optimizer: Any, args: Any, kwargs: Any) -> None:
        steps = owner()
        if steps is not None and not steps._stepping:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() was called on an optimizer that an engine owns; call engine.step()"
            )

    return refuse


class TorchSteps(ShardedSteps):
    """Any torch optimizer, unit by unit, on copies of the gradient pieces in the master's dtype, which is also the states' dtype.
    In its groups, and in those of the optimizers inside it, the unit's pieces take the place of the parameters meanwhile.

    With `state_dtype` bf16, per-element states are stored in bf16 and converted to the master's dtype while their unit steps.

    Some optimizers count steps in their groups or attributes. So the call for each unit starts from the values at the beginning of
    the engine's step, and a group keeps the values of a call that stepped some of its parameters: groups advance once per step.
    Attributes do so on every rank, also if all of its parameters rest.

    [Note: Parts of wholes] An optimizer that needs whole tensors (Muon, Adafactor) steps the whole of a parameter that is cut over
    an axis: weights, gradients and states are joined, each rank computes the same update and keeps its part.
    `zero.layout.whole_layout` gives the parts of one whole the same place among the shards of each family, so exactly these
    ranks step it, in the same order. The experts of a stack are wholes themselves. LAMB needs only sums of squares (`summed`).
    """

    def __init__(self, inner: torch.optim.Optimizer, units: Sequence[Unit], *, whole: bool, state_dtype: torch.dtype) -> None:
        super().__init__(inner, units, None)
        self.whole, self.state_dtype = whole, state_dtype
        self.lazy = isinstance(inner, torch.optim.SparseAdam)  # steps only rows with a nonzero gradient
        self._before: list[dict[str, Any]] = []  # each group's values at the beginning of the engine's step
        self._places: dict[int, list[int]] = {}  # id of a parameter -> the groups that have it
        self._after: dict[int, dict[str, Any]] = {}  # values of the groups that have advanced since
        self._counts = (self.nested.counts(),) * 2  # the attributes' values, at the beginning and now

    def begin(self, units: Sequence[Unit]) -> None:
        groups = self.nested.groups()
        self._before, self._places = [_values(group) for group in groups], {}
        for place, group in enumerate(groups):
            for param in group["params"]:
                self._places.setdefault(id(param), []).append(place)
        self._after.clear()
        self.nested.find_counts()
        self._counts = (self.nested.counts(),) * 2

    def drop(self, unit: Unit) -> None:
        for piece in self.members.pop(unit).pieces:
            if piece.leaf is not None:
                self.nested.pop(piece.leaf)

    def _leaf(self, piece: UpdatePiece) -> Tensor:
        if piece.leaf is None:
            view = piece.unit.master.view(piece.start, piece.stop)
            assert view is not None, "train/initialize.py refuses torch optimizers with a disk tier"
            piece.leaf = view.view(piece.shape if self.whole else (-1,)).detach()
            if initial := self._initial_state(piece, flat=not self.whole):
                self.nested.put(piece.leaf, initial)
        return piece.leaf

    def chunks(self, unit: Unit) -> Sequence[StateChunk]:
        return [StateChunk(0, unit.master.numel, {})]

    def step(self, unit: Unit, chunk: StateChunk, scale: float) -> None:
        grads = unit.sums.whole()
        pieces = [piece for piece in self.members[unit].pieces if self.due(piece)]
        leaves = [self._leaf(piece) for piece in pieces]
        self._cast_states(leaves, None)
        stepped: list[Tensor] = []  # the tensors that the optimizer steps: leaves, or the wholes of which they are parts
        for piece, leaf in zip(pieces, leaves, strict=True):
            stepped.append(self._joined(piece, leaf))
            grad = joined(grads[piece.start : piece.stop].to(leaf).mul(scale).view(leaf.shape), self._cuts(piece))
            stepped[-1].grad = grad.to_sparse(1) if self.lazy else grad
        groups = self.nested.groups()
        users_params = [group["params"] for group in groups]
        for group, values in zip(groups, self._before, strict=True):
            _set_values(group, values)
            group["params"] = []
        for piece, tensor in zip(pieces, stepped, strict=True):
            for place in self._places[id(piece.param)]:
                groups[place]["params"].append(tensor)
        self._stepping = True
        self.nested.set_counts(self._counts[0])
        try:
            self.inner.step()
        finally:
            self._stepping = False
            if pieces or self._counts[1] is self._counts[0]:
                self._counts = (self._counts[0], self.nested.counts())
            self.nested.set_counts(self._counts[1])
            for piece, whole in zip(pieces, stepped, strict=True):
                self._keep_part(piece, whole)
            self._cast_states(leaves, self.state_dtype)
            for i, (group, params) in enumerate(zip(groups, users_params, strict=True)):
                if group["params"]:
                    self._after[i] = _values(group)
                elif i in self._after:
                    _set_values(group, self._after[i])
                group["params"] = params
            for leaf in stepped:
                leaf.grad = None
        if unit.out is not None:
            unit.out.put(0, unit.master.whole())

    def _cuts(self, piece: UpdatePiece) -> tuple[Joint, ...]:
        """The first call is collective."""
        if piece.cuts is None:
            piece.cuts = joints(piece.unit, piece.i, cuts_of_tensors(piece.param)) if self.whole else ()
        return piece.cuts

    def _joined(self, piece: UpdatePiece, leaf: Tensor) -> Tensor:
        """The tensor that the optimizer steps for a piece: its leaf, or the whole that contains it, with states. Collective."""
        cuts = self._cuts(piece)
        if not cuts:
            return leaf
        whole = joined(leaf, cuts)
        state = self.nested.pop(leaf)
        self.nested.put(whole, state | {name: joined(value, cuts) for name, value in _per_element(state, leaf).items()})
        return whole

    def _keep_part(self, piece: UpdatePiece, whole: Tensor) -> None:
        """Undo `_joined` after a step."""
        leaf, cuts = self._leaf(piece), self._cuts(piece)
        if whole is leaf:
            return

        def own(value: Tensor) -> Tensor:
            for cut in cuts:
                value = cut.own(value)
            return value

        leaf.copy_(own(whole))
        state = self.nested.pop(whole)
        self.nested.put(leaf, state | {name: own(value) for name, value in _per_element(state, whole).items()})

    def _cast_states(self, leaves: Sequence[Tensor], dtype: torch.dtype | None) -> None:
        """Convert per-element states to `dtype`, or to their master's dtype if None. A no-op if states are kept in fp32."""
        if self.state_dtype is torch.float32:
            return
        for leaf in leaves:
            state = self.nested.state(leaf)
            self.nested.put(
                leaf, state | {name: value.to(dtype or leaf.dtype) for name, value in _per_element(state, leaf).items()}
            )

    def memory(self) -> Iterator[Tensor | Store]:
        states = (state for states in self.nested.states() for state in states.values() if isinstance(state, dict))
        values = (value for state in states for value in state.values())
        return (value for value in values if isinstance(value, Tensor) and value.dim() > 0)

    def _state(self, piece: UpdatePiece) -> dict[str, Any]:
        return self.nested.state(self._leaf(piece))

    def states(self, piece: UpdatePiece) -> dict[str, Tensor | Section]:
        return {name: value.view(-1) for name, value in _per_element(self._state(piece), self._leaf(piece)).items()}

    def make_states(self, piece: UpdatePiece, dtypes: Mapping[str, torch.dtype]) -> Callable[[], None]:
        leaf = self._leaf(piece)
        before = self.nested.state(leaf)
        self.nested.put(leaf, {name: torch.zeros_like(leaf, dtype=dtype) for name, dtype in dtypes.items()})
        return partial(self.nested.put, leaf, before)

    def scalars(self, piece: UpdatePiece) -> dict[str, Any]:
        per_element = self.states(piece)
        return {name: value for name, value in self._state(piece).items() if name not in per_element}

    def load_scalars(self, piece: UpdatePiece, values: dict[str, Any]) -> None:
        self.nested.put(self._leaf(piece), self._state(piece) | values)


def _per_element(state: Mapping[str, Any], like: Tensor) -> dict[str, Tensor]:
    """The states that have the tensor's shape."""
    return {
        name: value for name, value in state.items() if isinstance(value, Tensor) and value.dim() > 0 and value.shape == like.shape
    }


_PARAMS = {"params", "param_names"}


def _values(group: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a parameter group's entries, without its parameters."""
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

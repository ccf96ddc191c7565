"""Carry values and optimizer states from old units to new ones when a surgery rebuilds the model.

Origin        the old unit's parameter that a parameter continues, and the number of elements they share
Carried       reads values from the old masters, as first values of the new units
carry_states  moves optimizer states, one state of one old unit at a time; that state is unsharded on every rank meanwhile
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.optim.sharded import KnownStates, ShardedSteps, UpdatePiece
from slipstream.zero.storage.store import write
from slipstream.zero.unit import Unit


@dataclass(frozen=True, slots=True)
class Origin:
    """The old unit's parameter that a parameter of the model continues."""

    unit: Unit
    i: int
    common: int  # leading elements that both share: fewer than all if the first dimension has changed
    given: Tensor | None  # the parameter's current values, if they may have changed

    @property
    def start(self) -> int:
        return self.unit.layout.slots[self.i].offset


class Carried:
    """A `Reader` (zero/materialize.py) of parameters that the engine already had: reads their masters, one block at a time."""

    def __init__(self, origins: Mapping[str, Origin], aliases: Mapping[str, str]) -> None:
        self.origins, self.aliases = origins, aliases
        self.values: dict[str, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        origin = self.origins.get(self.aliases.get(name, ""))
        return origin is not None and origin.common > 0

    def reads_part(self, name: str, numel: int) -> bool:
        return True

    def dtype(self, name: str) -> torch.dtype:
        origin = self.origins[name]
        master = origin.unit.master.dtype
        return master if origin.given is None else torch.promote_types(master, origin.given.dtype)

    def fetch(self, names: Sequence[str]) -> None:
        wholes: dict[Unit, Tensor] = {}
        for name in names:
            origin = self.origins[name]
            unit = origin.unit
            if unit not in wholes:
                wholes[unit] = unit.unsharded(unit.master.whole(), unit.placement.optim)
            old = wholes[unit][origin.start : origin.start + origin.common]
            self.values[name] = old if origin.given is None else self._merged(origin, origin.given, old, self.dtype(name))

    def _merged(self, origin: Origin, given: Tensor, old: Tensor, dtype: torch.dtype) -> Tensor:
        """The first rank's new values. Values equal to the rounded masters are unchanged and keep the masters' precision."""
        given = given.detach().reshape(-1).contiguous().clone()
        origin.unit.comms.data.broadcast(given)
        new = given.to(device=old.device, dtype=dtype)
        common = new[: origin.common]
        is_old = old.to(origin.unit.dtypes.weights).to(dtype) == common
        common.copy_(torch.where(is_old, old.to(dtype), common))
        return new

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return self.values[name][start:stop]

    def close(self) -> None:
        self.values = {}


def carry_states(steps: ShardedSteps, old: Unit, units: Iterable[Unit], origins: Mapping[str, Origin]) -> None:
    """Move the optimizer states of an old unit's parameters to the new units that hold them. Collective."""
    if old.grads is None:
        return
    known = steps.known_states(old)
    wanted = list(_wanted(steps, old, units, origins, known))
    for piece, origin in wanted:
        dtypes, scalars = known[old.names[origin.i]]
        if dtypes or scalars:
            steps.make_states(piece, dtypes)
            steps.load_scalars(piece, copy.deepcopy(scalars))
    for state, whole in steps.whole_states(old, known):
        for piece, origin in wanted:
            part = steps.states(piece).get(state)
            stop = min(piece.offset + piece.stop - piece.start, origin.common)
            if part is not None and piece.offset < stop:
                write(part, whole[origin.start + piece.offset : origin.start + stop])


def _wanted(
    steps: ShardedSteps, old: Unit, units: Iterable[Unit], origins: Mapping[str, Origin], known: Mapping[str, KnownStates]
) -> Iterator[tuple[UpdatePiece, Origin]]:
    """This rank's pieces that continue the old unit's. Tensor states not per element are dropped if the shape changed."""
    for piece in steps.pieces(units):
        origin = origins.get(piece.name)
        if origin is None or origin.unit is not old or old.names[origin.i] not in known:
            continue
        scalars = known[old.names[origin.i]].scalars.values()
        is_same_shape = old.layout.slots[origin.i].shape == piece.shape
        if is_same_shape or not any(isinstance(value, Tensor) and value.dim() for value in scalars):
            yield piece, origin

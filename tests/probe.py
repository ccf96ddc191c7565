"""The tests' only access to an engine's internals. If the engine changes, this module changes, not the tests.

for unit in probe.units(engine):        # views: `FACTS` defines their attributes
    assert unit.is_released
probe.owner_of("gather")                # the class whose method is the edge, for tests that observe or delay it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from slipstream.optim.native import MomentStore
from slipstream.train.saving import optimizer_state
from slipstream.zero.unit import State, Unit

Fact = Callable[[Any], Any]


def _same(name: str) -> Fact:
    return lambda unit: getattr(unit, name)


FACTS: Mapping[str, Fact] = {
    **{
        name: _same(name)
        for name in ("name", "names", "index", "trainable", "block", "params", "layout", "span", "dtypes", "placement")
    },
    # storage of states: each a Store, with whole(), nbytes, resident_nbytes, numel and dtype; `grads` is None if frozen
    **{name: _same(name) for name in ("weights", "master", "grads")},
    # memory: the flat gathered weights, their bytes, memory shared between ranks, pages that are mapped on demand
    **{name: _same(name) for name in ("full", "memory")},
    "full_nbytes": lambda unit: unit.layout.numel * unit.full.element_size(),
    "pages": lambda unit: unit.memory.pages,
    "is_released": lambda unit: unit.state is State.RELEASED,
    "is_gathered": lambda unit: unit.state is State.GATHERED,
    "is_direct": lambda unit: (
        unit.shown.read_in_graph
    ),  # gathered for the whole backward, because its parameters are used outside of its block
    "is_lent": lambda unit: unit.shown.copies,  # gathered for a surgery
    "is_arriving": lambda unit: unit.pending_gather is not None,  # its weights are being prefetched
    "updating": _same("updating"),  # the optimizer is stepping the unit on another thread
    "has_masters": lambda unit: unit.out is not None,  # in addition to weights of lower precision
    "unsharded": _same("unsharded"),  # (part, is_sharded) -> the flat tensor of all ranks; collective
    "gather": _same("gather"),
    "close": _same("close"),
}


def finish_window(engine: Any) -> None:
    """Reduce this window's gradients, without an update."""
    with torch.no_grad():
        engine._finish_window()


class View:
    """One unit, with the attributes of `FACTS`."""

    __slots__ = ("_unit",)

    def __init__(self, unit: Unit) -> None:
        object.__setattr__(self, "_unit", unit)

    def __getattr__(self, name: str) -> Any:
        if name not in FACTS:
            raise AttributeError(f"tests do not look at a unit's {name!r}: add it to FACTS in tests/probe.py")
        return FACTS[name](self._unit)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._unit, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._unit, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, View) and self._unit is other._unit

    def __hash__(self) -> int:
        return id(self._unit)


def units(engine: Any) -> list[View]:
    return [View(unit) for unit in engine.units]


def owner_of(edge: str) -> type:
    """The class that has the method of an edge: gather, release, reduce, settle, publish, add_local."""
    assert hasattr(Unit, edge)
    return Unit


# -- the optimizer --


def pieces(engine: Any, unit: View) -> Any:
    """The parts of a unit's parameters that this rank's optimizer owns."""
    return engine.states.steps.members[unit._unit].pieces


def moments(engine: Any, unit: View, piece: Any) -> Any:
    """The moments of a piece, by name."""
    return engine.states.steps.states(piece)


def stores(engine: Any, unit: View) -> Any:
    """The stores of a unit's moments, by name."""
    return engine.states.steps.moments(unit._unit).states


def has_moments(engine: Any, unit: View) -> bool:
    return unit._unit in engine.states.steps._moments


def state_nbytes(engine: Any, unit: View) -> int:
    """Bytes of a unit's optimizer states on this rank."""
    states = engine.states.steps.moments(unit._unit).states.values()
    return sum(state.codes.nbytes + state.scales.nbytes if isinstance(state, MomentStore) else state.nbytes for state in states)


def chunks(engine: Any) -> int:
    """The number of chunks in one step."""
    return sum(len(engine.states.steps.chunks(unit)) for unit in engine.units)


def ring(engine: Any) -> Any:
    """The buffers that chunks stream through."""
    return engine.states.steps.ring


def updater(engine: Any) -> Any:
    return engine.states.updater


# -- other parts --


def transport(engine: Any) -> Any:
    """The transport of reductions and agreements over the data ranks."""
    return engine.states.comms.data


def hooks(engine: Any) -> Any:
    return engine.states.hooks


def homes(engine: Any) -> Any:
    """The files and memory in which the engine stores its states."""
    return engine.states.homes


def states(engine: Any) -> dict[str, Tensor]:
    """Masters and moments, whole, of the parameters of this rank's pipeline stages. Collective over each stage."""
    engine.states.updater.finish()  # states on disk are updated while this thread goes on
    results: dict[str, Tensor] = {}
    for unit in engine.units:
        for i, values in optimizer_state.of_parameters(unit, range(len(unit.names)), engine.states.steps).items():
            results |= {f"{kind} of {unit.names[i]}": value for kind, value in values.items()}
    return results

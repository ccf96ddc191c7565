"""An optimizer's unsharded `state_dict` in torch's format, equal to that of the same optimizer over a plain model.

A parameter whose master is wider than its weight has an additional state `master`; torch passes it through. Every rank gets all
states, so the model must fit into one process; `save_checkpoint` has no such limit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.train.saving import entries
from slipstream.train.states import States
from slipstream.zero import access
from slipstream.zero.comm import gather_objects
from slipstream.zero.unit import Unit


def _params(states: States) -> Iterator[tuple[int, Unit, int]]:
    """The optimizer's parameters with their index in torch's state_dict, without frozen ones, which have no state."""
    known = {id(param): (unit, i) for unit in states.units if unit.grads is not None for i, param in enumerate(unit.params)}
    params = (param for group in states.steps.inner.param_groups for param in group["params"])
    for number, param in enumerate(params):
        if id(param) in known:
            yield number, *known[id(param)]


def gather(states: States) -> dict[str, Any]:
    """Gather the complete state_dict. Collective; all ranks return the same."""
    steps = states.steps
    scalars = entries.all_scalars(states)
    by_number: dict[int, dict[str, Any]] = {}
    for number, unit, i in _params(states):
        tensors = access.full_optimizer_state(unit, i, steps)
        master = tensors.pop("master")
        known = scalars.get(unit.names[i], {})
        if known.get("step") == 0 or not (known or tensors):
            continue  # like torch, no state before the first step
        wider = {"master": master} if unit.dtypes.weights is not unit.dtypes.master else {}
        by_number[number] = {name: _as_in_torch(name, value) for name, value in known.items()} | tensors | wider
    groups, count = [], 0
    for group in states.steps.inner.param_groups:
        numbers = list(range(count, count := count + len(group["params"])))
        groups.append({key: value for key, value in group.items() if key != "params"} | {"params": numbers})
    return {"state": by_number, "param_groups": groups}


def _as_in_torch(name: str, value: Any) -> Any:
    return torch.tensor(float(value)) if name == "step" and not isinstance(value, Tensor) else value


def load(states: States, saved: Mapping[str, Any]) -> None:
    """Load a state_dict of `whole`, or of a plain model. Collective; same on all ranks. Raises ValueError, with nothing changed."""
    steps = states.steps
    groups = states.steps.inner.param_groups
    present, loaded = ([len(group["params"]) for group in each] for each in (groups, saved["param_groups"]))
    if present != loaded:
        raise ValueError(f"load_state_dict(): it has groups of {loaded} parameters, and this optimizer has groups of {present}")
    params = list(_params(states))
    for number, unit, i in params:
        for name, value in saved["state"].get(number, {}).items():
            if isinstance(value, Tensor) and value.dim() > 0 and tuple(value.shape) != unit.layout.slots[i].shape:
                raise ValueError(
                    f"load_state_dict(): {name} of {unit.names[i]!r} has shape {tuple(value.shape)}, but the parameter has shape "
                    f"{tuple(unit.layout.slots[i].shape)}"
                )
    if why := steps.unsupported_option(saved["param_groups"]):
        raise ValueError(f"load_state_dict(): {why}")
    _refuse_unknown(states, params, saved["state"])
    for group, values in zip(groups, saved["param_groups"], strict=True):
        group.update({key: value for key, value in values.items() if key != "params"})
    steps.groups_loaded()
    for number, unit, i in params:
        _take_one(states, unit, i, saved["state"].get(number))


def _refuse_unknown(states: States, params: Sequence[tuple[int, Unit, int]], saved: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise ValueError on every rank for states that a native rule does not have; torch optimizers accept any."""
    steps = states.steps
    unknown = []
    for number, unit, i in params:
        tensors = _tensors(saved.get(number, {}), unit.layout.slots[i].shape)
        wanted = {name: value.dtype for name, value in tensors.items() if name != "master"}
        for piece in (piece for piece in steps.pieces[unit.index] if piece.name == unit.names[i]):
            undo = steps.make_states(unit, piece, wanted)
            known = steps.states(unit, piece).keys()
            undo()
            unknown += [(name, piece.name, sorted(known)) for name in wanted.keys() - known]
    for name, param, known in (each for rank in gather_objects(unknown, states.mesh.world) for each in rank):
        raise ValueError(
            f"load_state_dict(): {name!r} of {param!r} is none of {type(steps.inner).__name__}'s states {known}; "
            "remove it, or configure the optimizer that it was saved from"
        )


def _tensors(values: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, Tensor]:
    """The per-element states."""
    return {
        name: value
        for name, value in values.items()
        if name != "step" and isinstance(value, Tensor) and tuple(value.shape) == shape
    }


def _take_one(states: States, unit: Unit, i: int, values: Mapping[str, Any] | None) -> None:
    steps = states.steps
    shape, pieces = unit.layout.slots[i].shape, [piece for piece in steps.pieces[unit.index] if piece.name == unit.names[i]]
    if values is None:  # as before the first step
        for piece in pieces:
            steps.make_states(unit, piece, {})
        known = access.full_optimizer_state(unit, i, steps)
        tensors = {name: torch.zeros_like(value) for name, value in known.items() if name != "master"}
        scalars: dict[str, Any] = {"step": 0} if tensors else {}
    else:
        tensors = _tensors(values, shape)
        scalars = {name: value for name, value in values.items() if name not in tensors}
        for piece in pieces:
            steps.make_states(unit, piece, {name: value.dtype for name, value in tensors.items() if name != "master"})
    for piece in pieces if scalars or values is not None else ():  # even empty: torch's SGD has no scalars
        steps.load_scalars(unit, piece, copy.deepcopy(scalars))  # the optimizer modifies them
    access.set_optimizer_state(unit, i, steps, tensors)

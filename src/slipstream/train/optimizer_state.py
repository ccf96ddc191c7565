"""An optimizer's states whole, in the form that torch gives them: what `state_dict()` of the same optimizer of a plain model has.

Beside torch's own states of a parameter there is `master`, where its master is wider than its weight; torch hands it through. Every
rank gets everything, so this is for models of which one process can hold all; `save_checkpoint` never does.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream.train import entries
from slipstream.zero import access
from slipstream.zero.comm import gather_objects
from slipstream.zero.unit import Unit

if TYPE_CHECKING:
    from slipstream.train.engine import Engine


def _params(engine: Engine) -> Iterator[tuple[int, Unit, int]]:
    """The optimizer's parameters by the number that torch gives them, without frozen ones, which have no state."""
    known = {id(param): (unit, i) for unit in engine.units if unit.grads is not None for i, param in enumerate(unit.params)}
    params = (param for group in engine.optimizer.param_groups for param in group["params"])
    for number, param in enumerate(params):
        if id(param) in known:
            yield number, *known[id(param)]


def whole(engine: Engine) -> dict[str, Any]:
    """Collective; the same on all ranks."""
    steps = engine.steps
    assert steps is not None, "there is an optimizer whose states these are"
    scalars = entries.all_scalars(engine)
    states: dict[int, dict[str, Any]] = {}
    for number, unit, i in _params(engine):
        found = access.full_optimizer_state(unit, i, steps)
        master = found.pop("master")
        known = scalars.get(unit.names[i], {})
        if known.get("step") == 0 or not (known or found):
            continue  # torch has none either before the first step
        wider = {"master": master} if unit.dtypes.weights is not unit.dtypes.master else {}
        states[number] = {name: _as_torch_has_it(name, value) for name, value in known.items()} | found | wider
    groups, count = [], 0
    for group in engine.optimizer.param_groups:
        numbers = list(range(count, count := count + len(group["params"])))
        groups.append({key: value for key, value in group.items() if key != "params"} | {"params": numbers})
    return {"state": states, "param_groups": groups}


def _as_torch_has_it(name: str, value: Any) -> Any:
    return torch.tensor(float(value)) if name == "step" and not isinstance(value, Tensor) else value


def take(engine: Engine, saved: Mapping[str, Any]) -> None:
    """Undo `whole`, also from a plain model's. Collective; the same on all ranks. Raises ValueError, with nothing changed."""
    steps = engine.steps
    assert steps is not None, "there is an optimizer whose states these become"
    groups = engine.optimizer.param_groups
    ours, theirs = ([len(group["params"]) for group in each] for each in (groups, saved["param_groups"]))
    if ours != theirs:
        raise ValueError(f"load_state_dict(): groups of {theirs} parameters, and this optimizer has groups of {ours}")
    params = list(_params(engine))
    for number, unit, i in params:
        for name, value in saved["state"].get(number, {}).items():
            if isinstance(value, Tensor) and value.dim() > 0 and tuple(value.shape) != unit.layout.slots[i].shape:
                raise ValueError(
                    f"load_state_dict(): {name} of {unit.names[i]!r} has shape {tuple(value.shape)}, and the parameter "
                    f"{tuple(unit.layout.slots[i].shape)}"
                )
    if why := steps.not_computed(saved["param_groups"]):
        raise ValueError(f"load_state_dict(): {why}")
    _refuse_unknown(engine, params, saved["state"])
    for group, values in zip(groups, saved["param_groups"], strict=True):
        group.update({key: value for key, value in values.items() if key != "params"})
    steps.groups_loaded()
    for number, unit, i in params:
        _take_one(engine, unit, i, saved["state"].get(number))


def _refuse_unknown(engine: Engine, params: Sequence[tuple[int, Unit, int]], states: Mapping[int, Mapping[str, Any]]) -> None:
    """ValueError, on every rank, where the optimizer keeps no such state (a rule of ours has its own, torch's make any)."""
    steps = engine.steps
    assert steps is not None, "of an engine that has an optimizer"
    unknown = []
    for number, unit, i in params:
        tensors = _tensors(states.get(number, {}), unit.layout.slots[i].shape)
        wanted = {name: value.dtype for name, value in tensors.items() if name != "master"}
        for piece in (piece for piece in steps.pieces[unit.index] if piece.name == unit.names[i]):
            undo = steps.make_states(unit, piece, wanted)
            known = steps.states(unit, piece).keys()
            undo()
            unknown += [(name, piece.name, sorted(known)) for name in wanted.keys() - known]
    for name, param, there in (each for rank in gather_objects(unknown, engine.mesh.data) for each in rank):
        raise ValueError(
            f"load_state_dict(): {name!r} of {param!r} is none of {type(steps.inner).__name__}'s states {there}; "
            "leave it out, or configure the optimizer that it is from"
        )


def _tensors(values: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Per-element states."""
    return {
        name: value
        for name, value in values.items()
        if name != "step" and isinstance(value, Tensor) and tuple(value.shape) == shape
    }


def _take_one(engine: Engine, unit: Unit, i: int, values: Mapping[str, Any] | None) -> None:
    steps = engine.steps
    assert steps is not None, "of an engine that has an optimizer"
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
    for piece in pieces if scalars or values is not None else ():  # also without any: torch's SGD keeps none beside its momentum
        steps.load_scalars(unit, piece, copy.deepcopy(scalars))  # the optimizer counts on in them
    access.set_optimizer_state(unit, i, steps, tensors)

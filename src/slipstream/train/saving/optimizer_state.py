"""Optimizer states, unsharded: of one parameter, and as a `state_dict` equal to that of the same optimizer over a plain model.

A parameter whose master is wider than its weight has an additional state `master`; torch passes it through. Every rank gets all
states, so the model must fit into one process; `save_checkpoint` has no such limit.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.optim.sharded import ShardedSteps
from slipstream.train.saving import entries
from slipstream.train.states import States
from slipstream.zero import access
from slipstream.zero.comm import first_said
from slipstream.zero.leaves import whole_shape
from slipstream.zero.storage.store import Section, write
from slipstream.zero.unit import Unit


def of_parameters(unit: Unit, indices: Sequence[int], steps: ShardedSteps) -> dict[int, dict[str, Tensor]]:
    """Return the master and per-element optimizer states of these parameters, in their shapes. Collective."""
    known, slots = steps.known_states(unit), unit.layout.slots
    result: dict[int, dict[str, Tensor]] = {i: {} for i in indices}

    def keep(name: str, whole: Tensor, having: Iterable[int]) -> None:
        for i in having:
            result[i][name] = whole[slice(*slots[i].span)].view(slots[i].shape).clone()

    keep("master", unit.unsharded(unit.master.whole(), unit.placement.optim).float(), indices)
    for state, whole in steps.whole_states(unit, known):
        keep(state, whole, (i for i in indices if unit.names[i] in known and state in known[unit.names[i]].dtypes))
    return result


def check_names(unit: Unit, i: int, steps: ShardedSteps, names: Iterable[str]) -> None:
    """Raise KeyError on all ranks if parameter i has no state of some name; a frozen one has "master" only. Collective."""
    steps.expose([unit])
    states = _states(unit, i, steps)
    own = None if states is None else sorted(states)
    for known in [each for each in unit.comms.data.axis.gather(own) if each is not None] or [[]]:
        if unknown := sorted(set(names) - {"master", *known}):
            raise KeyError(f"no optimizer state {unknown[0]!r} of {unit.names[i]!r}; there are {['master', *known]}")


def set_parameter(unit: Unit, i: int, steps: ShardedSteps, values: Mapping[str, Tensor]) -> None:
    """Overwrite parameter i's states on the ranks that own them, and the weights if `values` has "master". Collective."""
    steps.expose([unit])
    _write(unit, i, _states(unit, i, steps) or {}, values)
    steps.overwritten(unit)


def _states(unit: Unit, i: int, steps: ShardedSteps) -> dict[str, Tensor | Section] | None:
    """The states of this rank's piece of parameter i; None if it owns none."""
    piece = steps.piece(unit, i)
    return None if piece is None else steps.states(piece)


def _write(unit: Unit, i: int, states: Mapping[str, Tensor | Section], values: Mapping[str, Tensor]) -> None:
    """Write unsharded values into this rank's states of a parameter, and "master" also into the weights."""
    inside, of_param = unit.layout.slots[i].common(unit.optim_span)
    if "master" in values:
        with access.gathered_units({unit: [i]}, None), torch.no_grad():
            unit.params[i].copy_(values["master"])
        unit.master.put(inside.start, values["master"].reshape(-1)[of_param])
    for name in states.keys() & values.keys():
        write(states[name], values[name].reshape(-1)[of_param])


def _params(states: States) -> Iterator[tuple[Unit, int]]:
    """The optimizer's parameters on this rank. Frozen ones have no state and are skipped."""
    known = {id(param): (unit, i) for unit in states.units if unit.grads is not None for i, param in enumerate(unit.params)}
    params = (param for group in states.steps.inner.param_groups for param in group["params"])
    yield from (known[id(param)] for param in params if id(param) in known)


def _names(states: States) -> list[list[str]]:
    """The names of each group's parameters in torch's order, over all pipeline stages in the model's order. Collective."""
    names_by_id = {id(param): name for unit in states.units for param, name in zip(unit.model_params, unit.names, strict=True)}
    own = [[names_by_id.get(id(param), "") for param in group["params"]] for group in states.steps.inner.param_groups]
    if states.mesh.pp.size == 1:
        return own
    by_stage = states.mesh.pp.gather(own)
    if len({len(groups) for groups in by_stage}) > 1:
        numbers = [len(groups) for groups in by_stage]
        raise ValueError(f"optimizer.state_dict(): the pipeline stages have {numbers} parameter groups; give all stages the same")
    module: Any = states.model
    position = getattr(module, "position", lambda name: 0)  # for stages that the user built: in the order of stages
    merged = (dict.fromkeys(itertools.chain.from_iterable(of_stages)) for of_stages in zip(*by_stage, strict=True))
    return [sorted(names, key=position) for names in merged]


def gather(states: States) -> dict[str, Any]:
    """Gather the complete state_dict: whole states of the parameters of all stages. Collective; all ranks return the same."""
    steps, scalars = states.steps, entries.all_scalars(states)
    by_name: dict[str, dict[str, Any]] = {}
    by_unit: dict[Unit, list[int]] = {}
    for unit, i in _params(states):
        by_unit.setdefault(unit, []).append(i)
    parts = ((unit, i, each) for unit, indices in by_unit.items() for i, each in of_parameters(unit, indices, steps).items())
    for unit, i, of_part in parts:
        tensors = {name: access.whole_of(value, unit, i) for name, value in of_part.items()}
        master = tensors.pop("master")
        unit_scalars = scalars.get(unit.names[i], {})
        if unit_scalars.get("step") == 0 or not (unit_scalars or tensors):
            continue  # like torch, no state before the first step
        wider = {"master": master} if unit.dtypes.weights is not unit.dtypes.master else {}
        by_name[unit.names[i]] = {name: _as_in_torch(name, value) for name, value in unit_scalars.items()} | tensors | wider
    names, count = _names(states), 0
    by_name = entries.of_all_stages(by_name, states.mesh)
    groups = []
    for group, own in zip(steps.inner.param_groups, names, strict=True):
        numbers = list(range(count, count := count + len(own)))
        groups.append({key: value for key, value in group.items() if key != "params"} | {"params": numbers})
    numbered = enumerate(itertools.chain.from_iterable(names))
    return {"state": {number: by_name[name] for number, name in numbered if name in by_name}, "param_groups": groups}


def _as_in_torch(name: str, value: Any) -> Any:
    return torch.tensor(float(value)) if name == "step" and not isinstance(value, Tensor) else value


def load(states: States, saved: Mapping[str, Any]) -> None:
    """Load a state_dict made by `gather` on any layout, or by a plain model. Collective; the same on all ranks. Raises ValueError
    on all ranks, with nothing changed."""
    steps, groups, names = states.steps, states.steps.inner.param_groups, _names(states)
    present, loaded = list(map(len, names)), [len(group["params"]) for group in saved["param_groups"]]
    if present != loaded:
        raise ValueError(f"load_state_dict(): it has groups of {loaded} parameters, and this optimizer has groups of {present}")
    numbers = {name: number for number, name in enumerate(itertools.chain.from_iterable(names))}
    params = [(saved["state"].get(numbers[unit.names[i]]), unit, i) for unit, i in _params(states)]
    misfits = (_misfit(steps, values or {}, unit, i) for values, unit, i in params)
    why = next(filter(None, misfits), "") or steps.unsupported_option(saved["param_groups"])
    if first := first_said(why, states.mesh.pp):
        raise ValueError(f"load_state_dict(): {first[1]}")
    for group, values in zip(groups, saved["param_groups"], strict=True):
        group.update({key: value for key, value in values.items() if key != "params"})
    steps.groups_loaded()
    for values, unit, i in params:
        _take_one(steps, unit, i, values)


def _misfit(steps: ShardedSteps, values: Mapping[str, Any], unit: Unit, i: int) -> str:
    """Why the states do not fit parameter i; "" if they do."""
    name, shape = unit.names[i], whole_shape(unit.params[i], unit.layout.slots[i].shape)
    if why := steps.nested.misfit(values):
        return why
    for state, value in values.items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            continue
        # Adafactor's sums over rows and columns
        is_reduced = steps.state_names is None and value.numel() < math.prod(shape) and {*value.shape} <= {1, *shape}
        if tuple(value.shape) != shape and not is_reduced:
            return f"{state} of {name!r} has shape {tuple(value.shape)}, but the parameter has shape {shape}"
    expected = sorted(values if steps.state_names is None else steps.state_names)  # torch optimizers accept any
    for state in _tensors(values, shape).keys() - {"master", *expected}:
        return (
            f"{state!r} of {name!r} is none of {type(steps.inner).__name__}'s states {expected}; remove it, or configure the "
            "optimizer that it was saved from"
        )
    return ""


def _tensors(values: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, Tensor]:
    """The per-element states."""
    return {
        name: value
        for name, value in values.items()
        if name != "step" and isinstance(value, Tensor) and tuple(value.shape) == shape
    }


def _take_one(steps: ShardedSteps, unit: Unit, i: int, values: Mapping[str, Any] | None) -> None:
    shape = whole_shape(unit.params[i], unit.layout.slots[i].shape)
    wholes = _tensors(values or {}, shape)
    piece, tensors = steps.piece(unit, i), {name: access.part_of_whole(value, unit, i) for name, value in wholes.items()}
    states: dict[str, Tensor | Section] = {}
    if piece is not None:
        steps.make_states(piece, {name: value.dtype for name, value in tensors.items() if name != "master"})
        states = steps.states(piece)
        if values is None:  # as before the first step
            for state in states.values():
                write(state, torch.zeros(state.numel()))
        # for a parameter of one element, states of whole tensors are scalars, too
        scalars = {"step": 0} if values is None else {name: values[name] for name in values.keys() - {"master", *states}}
        if states or values is not None:
            steps.load_scalars(piece, copy.deepcopy(scalars))  # the optimizer modifies them
    _write(unit, i, states, tensors)

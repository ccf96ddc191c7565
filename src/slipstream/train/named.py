"""A parameter by its name: whole, even if this rank has only a part of it (tensor slices, experts) or another stage has it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping

from torch import Tensor

from slipstream.train.states import States
from slipstream.zero import access
from slipstream.zero.leaves import whole_shape
from slipstream.zero.unit import Unit


def read(states: States, name: str, values_of: Callable[[Unit, int], Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """What `values_of` returns for this rank's part of a parameter, joined to the whole, on the devices of all ranks.

    Stages may ask for different parameters. Collective over the ranks that have parts of the parameter, and over the stages. Raises
    KeyError if no stage has the name. An error of `values_of` is raised on all stages that ask for that parameter.
    """
    refusal: Exception | None = None
    place, own = _find(states, name), dict[str, Tensor]()
    if place is not None:
        try:
            own = {key: access.whole_of(value, *place).to(states.device) for key, value in values_of(*place).items()}
        except (KeyError, ValueError) as error:
            refusal = error
    if states.mesh.pp.size > 1:
        answers = states.mesh.pp.gather((name, refusal))
        refusal = next((error for wanted, error in answers if error is not None and wanted == name), None)
        if refusal is None and len({wanted for wanted, _ in answers}) == 1:  # all ask for it: a stage that has it sends it
            sent = states.mesh.pp.gather({key: value.cpu() for key, value in own.items()} if place is not None else None)
            found = next((values for values in sent if values is not None), None)
            if place is None and found is not None:
                return {key: value.to(states.device) for key, value in found.items()}
    if refusal is not None:
        raise refusal
    if place is None:
        raise _unknown(states, name)
    return own


def write(
    states: States,
    name: str,
    values: Mapping[str, Tensor],
    put: Callable[[Unit, int, Mapping[str, Tensor]], None],
    check: Callable[[Unit, int], None],
) -> None:
    """Pass this rank's parts of whole values of a parameter to `put`, on the stages that have the parameter.

    All ranks pass equal values: if only some ranks refused them, the others would wait in `check`, which may be collective. Raises
    KeyError like `read`, ValueError if a value has not the whole parameter's shape, and what `check` raises: on all ranks, before
    any of them writes.
    """
    refusal: Exception | None = None
    place = _find(states, name)
    if place is not None:
        unit, i = place
        shape = whole_shape(unit.params[i], unit.layout.slots[i].shape)
        try:
            for key, value in values.items():
                if tuple(value.shape) != shape:
                    raise ValueError(f"the {key} of {name!r} has shape {tuple(value.shape)}, the parameter {shape}")
            check(*place)
        except (KeyError, ValueError) as error:
            refusal = error
    answers = states.mesh.pp.gather((place is not None, refusal))
    if refusal := next((error for _, error in answers if error is not None), None):
        raise refusal
    if not any(has for has, _ in answers):
        raise _unknown(states, name)
    if place is not None:
        put(*place, {key: access.part_of_whole(value, *place) for key, value in values.items()})


def _places(states: States) -> dict[str, tuple[Unit, int]]:
    return {name: (unit, i) for unit in states.units for i, name in enumerate(unit.names)}


def _find(states: States, name: str) -> tuple[Unit, int] | None:
    places = _places(states)
    if name not in places:
        by_param = {id(unit.params[i]): (unit, i) for unit, i in places.values()}
        tied = states.model.named_parameters(remove_duplicate=False)  # further names of tied parameters
        places |= {alias: by_param[id(param)] for alias, param in tied if id(param) in by_param}
    return places.get(name)


def _unknown(states: States, name: str) -> KeyError:
    return KeyError(f"no parameter {name!r}; the nearest are {difflib.get_close_matches(name, list(_places(states)))}")

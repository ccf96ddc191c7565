"""The contents of an engine's checkpoint: tensors by name, in the flat ranges that a rank owns, and values.

Tensors are `model.<parameter>` (the master's values, in the master's dtype), `buffer.<buffer>`, `optim.<state>.<parameter>`,
`ema.<parameter>` (slipstream.ema).
"""

from __future__ import annotations

import fnmatch
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.nn as nn
from torch import Tensor

from slipstream.activations.random_states import tracked
from slipstream.checkpoint import FlatSlice
from slipstream.checkpoint.flat_slice import Box, Shape, places_of
from slipstream.optim.sharded import ShardedSteps, UpdatePiece
from slipstream.train.data import Stateful
from slipstream.train.precision import Precision
from slipstream.train.states import States
from slipstream.world.mesh import Mesh
from slipstream.zero.buffers import first_values
from slipstream.zero.leaves import Ranges, cuts_of
from slipstream.zero.storage.store import Store, copy_store, section
from slipstream.zero.unit import Unit

T = TypeVar("T")
AVERAGE = "ema."
OUTER = "outer."  # momentum of local steps
COUNTERS = ("global_steps", "skipped_steps", "global_samples")


def weights(states: States, exclude_frozen: bool = False) -> dict[str, FlatSlice | Tensor]:
    """The ranges of the masters that this rank owns."""
    return {
        f"model.{name}": part
        for unit in states.units
        for name, param, part in slices(unit, unit.master)
        if param.requires_grad or not exclude_frozen
    }


def slices(unit: Unit, store: Store) -> Iterator[tuple[str, nn.Parameter, FlatSlice]]:
    """The ranges of a unit's parameters in a state that covers this rank's optimizer span."""
    for name, param, slot in zip(unit.names, unit.params, unit.layout.slots, strict=True):
        inside, of_param = slot.common(unit.optim_span)
        shape, places = place_of(unit, param, slot.shape)
        yield name, param, FlatSlice(section(store, inside.start, inside.stop), shape, min(of_param.start, slot.numel), places)


def place_of(unit: Unit, param: nn.Parameter, shape: Shape) -> tuple[Shape, tuple[Box, ...]]:
    """The whole shape of the parameter of which this rank has a part of `shape`, and the boxes that the part fills; (): all."""
    ranges: list[Ranges] = [((0, size),) for size in shape]
    whole = list(shape)
    for part in cuts_of(param):
        whole[part.dim] = part.numel
        ranges[part.dim] = part.ranges_of(unit.comms.family.parts_of(part.split).index)
    if tuple(whole) == shape:
        return shape, ()
    return tuple(whole), places_of(ranges)


class Loop(Protocol):
    """The training loop's values that a checkpoint contains; an engine has them."""

    global_steps: int
    skipped_steps: int
    global_samples: int
    lr_scheduler: Any
    training_dataloader: Any
    precision: Precision


def saved_tensors(states: States, contents: str, *, exclude_frozen: bool) -> dict[str, FlatSlice | Tensor]:
    """The tensors of a checkpoint with these contents. Collective."""
    states.steps.synchronize(states.units)
    if states.recipe.coded_weights:  # decided alike on all ranks, because of its fence: a stage may have no such unit
        coded = [unit for unit in states.units if unit.dtypes.published_bits is not None]
        spread_weights(states, coded)  # so that a run that loads the checkpoint has this run's weights
    tensors = weights(states, exclude_frozen=exclude_frozen or contents == "adapters")
    if contents != "adapters":
        tensors |= first_buffers(states)
    if contents in ("all", "without_optimizer"):
        tensors |= averages(states)
    if contents == "all":
        states.steps.expose(states.units)
        tensors |= optimizer_tensors(states)
        tensors |= outer(states)
    return tensors


def spread_weights(states: States, units: Sequence[Unit] | None = None) -> None:
    """Round changed masters into the weights and publish these (of `units`, or of all) to the other ranks. Collective."""
    states.fence()
    with torch.no_grad():
        pending = []
        for unit in states.units if units is None else units:
            if unit.out is not None:
                copy_store(unit.out, unit.master)
            unit.shown.expire_graphs()
            pending.append(unit.publish())
        for each in pending:
            each.wait()


def of_all_stages(own: dict[str, T], mesh: Mesh) -> dict[str, T]:
    """The entries of all pipeline stages; if several stages have one, the first stage's. Collective over the stages."""
    merged: dict[str, T] = {}
    for of_stage in mesh.pp.gather(own):
        merged |= {name: value for name, value in of_stage.items() if name not in merged}
    return merged


def outer(states: States) -> dict[str, FlatSlice | Tensor]:
    """The ranges of the outer optimizer's momentum that this rank owns, if there is one."""
    return dict(states.outer.tensors()) if states.outer is not None else {}


def kept(states: States) -> dict[str, Stateful]:
    """The states of features that a checkpoint keeps beside tensors, by name."""
    return {name: part for name, part in states.resources.items() if isinstance(part, Stateful)}


def averages(states: States) -> dict[str, FlatSlice | Tensor]:
    """The ranges of the moving averages that this rank owns, if any."""
    return dict(states.average.tensors()) if states.average is not None else {}


def aliases(module: torch.nn.Module) -> dict[str, str]:
    """Further names of tied tensors -> the first name, under which the tensor is saved."""
    params, buffers = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    first: dict[int, str] = {}
    named = [(name, first.setdefault(id(tensor), name)) for name, tensor in (*params, *buffers)]
    return {name: other for name, other in named if name != other}


def buffers(states: States) -> dict[str, Tensor]:
    """The model's persistent buffers, with this rank's values."""
    saved: dict[str, Tensor] = {}
    for prefix, module in states.model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                saved[f"buffer.{prefix}.{name}" if prefix else f"buffer.{name}"] = buffer
    return saved


def first_buffers(states: States) -> dict[str, Tensor]:
    """Copies of the persistent buffers with the values of the first rank of this stage. Collective."""
    own = buffers(states)
    return dict(zip(own, first_values(list(own.values()), states.comms.data), strict=True))


def pieces(states: States, exclude: Sequence[str] = ()) -> Iterator[UpdatePiece]:
    """The pieces of parameters for which this rank's optimizer may hold state, without those that patterns exclude."""
    return (piece for piece in states.steps.pieces(states.units) if not is_excluded(f"model.{piece.name}", exclude))


def optimizer_tensors(states: States) -> dict[str, FlatSlice | Tensor]:
    entries: dict[str, FlatSlice | Tensor] = {}
    for piece in pieces(states):
        shape, places = place_of(piece.unit, piece.param, piece.shape)
        for state, values in states.steps.states(piece).items():
            entries[f"optim.{state}.{piece.name}"] = FlatSlice(values, shape, piece.offset, places)
    return entries


def optimizer_scalars(states: States) -> dict[str, Any] | None:
    """The optimizer's classes, scalars by parameter, groups, and counts if it has any; None without an optimizer. Collective."""
    steps = states.steps
    if not steps.has_optimizer:
        return None
    unsaved = {"params", *getattr(steps.inner, "script_options", ())}
    groups = [{key: value for key, value in group.items() if key not in unsaved} for group in steps.nested.groups()]
    counts: list[dict[str, Any]] = []
    if steps.state_names is None:  # those of the first rank that has trained: a stage of a pipeline may be frozen
        counts = next(filter(any, states.world.axis.gather(steps.nested.changed_counts())), [])
    saved = {"classes": optimizer_classes(steps), "params": all_scalars(states), "groups": groups}
    return saved | ({"counts": counts} if any(counts) else {})


def all_scalars(states: States) -> dict[str, Any]:
    """The optimizer's values that are not per element, of all ranks, by parameter name. Collective."""
    own = {piece.name: states.steps.scalars(piece) for piece in pieces(states)}
    return {name: values for scalars in states.mesh.world.gather(own) for name, values in scalars.items()}


def optimizer_classes(steps: ShardedSteps) -> list[str]:
    """The optimizer's class and its bases: optimizers that share one have the same states (Adam and AdamW)."""
    classes = type(steps.inner).__mro__
    return [cls.__name__ for cls in classes[: classes.index(torch.optim.Optimizer)]]


def state_of(part: Any) -> Any:
    return part.state_dict() if hasattr(part, "state_dict") else None


def model_config(module: torch.nn.Module) -> dict[str, Any] | None:
    """The config.json of a transformers model, with the end-of-sequence tokens of its generation config; None for other models."""
    config: Any = getattr(module, "config", None)
    if not (hasattr(config, "model_type") and hasattr(config, "to_json_string")):
        return None
    ends = getattr(getattr(module, "generation_config", None), "eos_token_id", None)
    return json.loads(config.to_json_string(use_diff=False)) | ({} if ends is None else {"eos_token_id": ends})


def random_state(device: torch.device) -> dict[str, Any]:
    import numpy

    state: dict[str, Any] = {"python": random.getstate(), "numpy": numpy.random.get_state(), "torch": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    if states := tracked.get_states():
        state["tracked"] = states
    return state


def is_excluded(name: str, exclude: Sequence[str]) -> bool:
    """Whether a pattern matches the parameter or buffer of an entry."""
    bare = name.split(".", 2 if name.startswith("optim.") else 1)[-1]
    return any(fnmatch.fnmatchcase(bare, pattern) for pattern in exclude)

"""The contents of an engine's checkpoint: tensors by name, in the flat ranges that a rank owns, and values.

Tensors are `model.<parameter>` (the master's values, in the master's dtype), `buffer.<buffer>`, `optim.<state>.<parameter>`,
`ema.<parameter>` (slipstream.ema).
"""

from __future__ import annotations

import fnmatch
import json
import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn as nn
from torch import Tensor

from slipstream.checkpoint import FlatSlice
from slipstream.optim.sharded import Piece, ShardedSteps
from slipstream.zero.buffers import first_values
from slipstream.zero.comm import gather_objects
from slipstream.zero.store import Store, section
from slipstream.zero.unit import Unit

if TYPE_CHECKING:
    from slipstream.train.engine import Engine


AVERAGE = "ema."
COUNTERS = ("global_steps", "skipped_steps", "global_samples")


def weights(engine: Engine, exclude_frozen: bool = False) -> dict[str, FlatSlice | Tensor]:
    """The ranges of the masters that this rank owns."""
    return {
        f"model.{name}": part
        for unit in engine.units
        for name, param, part in slices(unit, unit.master)
        if param.requires_grad or not exclude_frozen
    }


def slices(unit: Unit, store: Store) -> Iterator[tuple[str, nn.Parameter, FlatSlice]]:
    """The ranges of a unit's parameters in a state that covers this rank's optimizer span."""
    for name, param, slot in zip(unit.names, unit.params, unit.layout.slots, strict=True):
        inside, of_param = slot.common(unit.optim_span)
        yield name, param, FlatSlice(section(store, inside.start, inside.stop), slot.shape, min(of_param.start, slot.numel))


class Average(Protocol):
    """The interface of slipstream.ema.Ema that an engine uses."""

    num_updates: int

    def tensors(self) -> dict[str, FlatSlice]:
        """This rank's ranges of the averages, by their names in a checkpoint."""

    def stores(self) -> Iterable[Store]:
        """The stores of the averages."""

    def restart(self, names: Collection[str]) -> None:
        """Restart the averages of these parameters from their current values."""


def average_of(engine: Engine) -> Average | None:
    return engine.average() if engine.average is not None else None


def averages(engine: Engine) -> dict[str, FlatSlice | Tensor]:
    """The ranges of the moving averages that this rank owns, if any."""
    average = average_of(engine)
    return dict(average.tensors()) if average is not None else {}


def aliases(module: torch.nn.Module) -> dict[str, str]:
    """Further names of tied tensors -> the first name, under which the tensor is saved."""
    params, buffers = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    first: dict[int, str] = {}
    named = [(name, first.setdefault(id(tensor), name)) for name, tensor in (*params, *buffers)]
    return {name: other for name, other in named if name != other}


def buffers(engine: Engine) -> dict[str, Tensor]:
    """The model's persistent buffers, with this rank's values."""
    saved: dict[str, Tensor] = {}
    for prefix, module in engine.module.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                saved[f"buffer.{prefix}.{name}" if prefix else f"buffer.{name}"] = buffer
    return saved


def first_buffers(engine: Engine) -> dict[str, Tensor]:
    """Copies of the persistent buffers with rank 0's values. Collective."""
    own = buffers(engine)
    return dict(zip(own, first_values(list(own.values()), engine.comms.data), strict=True))


def pieces(engine: Engine, exclude: Sequence[str] = ()) -> Iterator[tuple[ShardedSteps, Piece]]:
    """The pieces of parameters that this rank's optimizer may hold state for, except those that patterns exclude."""
    steps = engine.steps
    for piece in steps.pieces(engine.units) if steps is not None else ():
        if steps is not None and not is_excluded(f"model.{piece.name}", exclude):
            yield steps, piece


def optimizer_tensors(engine: Engine) -> dict[str, FlatSlice | Tensor]:
    return {
        f"optim.{state}.{piece.name}": FlatSlice(values, piece.shape, piece.offset)
        for steps, piece in pieces(engine)
        for state, values in steps.states(piece).items()
    }


def optimizer_scalars(engine: Engine) -> dict[str, Any] | None:
    if engine.steps is None:
        return None
    groups = [{key: value for key, value in group.items() if key != "params"} for group in engine.steps.inner.param_groups]
    return {"classes": optimizer_classes(engine.steps), "params": all_scalars(engine), "groups": groups}


def all_scalars(engine: Engine) -> dict[str, Any]:
    """The optimizer's values that are not per element, by the parameter's name, of all ranks. Collective."""
    own = {piece.name: steps.scalars(piece) for steps, piece in pieces(engine)}
    return {name: values for scalars in gather_objects(own, engine.mesh.data) for name, values in scalars.items()}


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
    return state


def is_excluded(name: str, exclude: Sequence[str]) -> bool:
    """Whether a pattern matches the parameter or buffer of an entry."""
    bare = name.split(".", 2 if name.startswith("optim.") else 1)[-1]
    return any(fnmatch.fnmatchcase(bare, pattern) for pattern in exclude)

"""What a checkpoint of an engine holds, and how it comes back at any world size, stage or topology.

Tensors by name: `model.<parameter>` (the master's values, in the master's dtype), `buffer.<buffer>`,
`optim.<state>.<parameter>`. Each rank contributes and takes the flat ranges that it owns (checkpoint/). Values: counters,
loss scale, schedule, data position, the optimizer's scalars, the caller's `client_state`; per rank: random states.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream import checkpoint
from slipstream.checkpoint import CheckpointError, FlatSlice
from slipstream.optim.sharded import Piece, ShardedSteps
from slipstream.zero.comm import gather_objects
from slipstream.zero.layout import overlap
from slipstream.zero.unit import Unit

if TYPE_CHECKING:
    from slipstream.train.engine import Engine

logger = logging.getLogger(__name__)


def save(
    engine: Engine, directory: str, tag: str | None, client_state: Mapping[str, Any] | None, save_latest: bool,
    exclude_frozen: bool,
) -> str:  # fmt: skip
    """Write one checkpoint; returns its folder. Collective; raises the same CheckpointError on every rank."""
    tensors = _weights(engine, exclude_frozen=exclude_frozen) | _buffers(engine) | _optimizer_tensors(engine)
    shared = {
        "counters": {name: getattr(engine, name) for name in _COUNTERS},
        "loss_scale": engine.precision.scaler.state_dict(),
        "scheduler": _state_of(engine.lr_scheduler),
        "data": _state_of(engine.training_dataloader),
        "optimizer": _optimizer_scalars(engine),
        "client": dict(client_state or {}),
    }
    folder = checkpoint.save(
        directory, tag or f"global_step{engine.global_steps}", tensors=tensors, shared=shared,
        per_rank={"random": _random_state(engine.device)}, group=engine.mesh.data.group, save_latest=save_latest,
        tag_validation=engine.plan.checkpoint.tag_validation.capitalize(),  # type: ignore[arg-type]
    )  # fmt: skip
    return str(folder)


def load(
    engine: Engine, directory: str, tag: str | None, *, strict: bool, optimizer: bool, scheduler: bool, module_only: bool
) -> tuple[str | None, dict[str, Any]]:
    """Read a checkpoint into the engine; returns (folder, client_state), or (None, {}) where `latest` is missing.

    Collective. Raises CheckpointError on every rank, with nothing changed, when anything in it is wrong.
    """
    tag = tag or checkpoint.latest_tag(directory, group=engine.mesh.data.group)
    if tag is None:
        logger.warning("no checkpoint was loaded: %s has no file `latest`; give a tag, or start afresh", directory)
        return None, {}
    found = checkpoint.load_metadata(directory, tag, group=engine.mesh.data.group)
    wanted: dict[str, FlatSlice | Tensor] = _weights(engine) | _buffers(engine)
    missing = [name for name in wanted if name not in found.tensors]
    if missing and strict:
        raise CheckpointError(
            f"{found.path} does not hold {missing[:3]}{' and more' if len(missing) > 3 else ''}; it is of another model, or was "
            f"saved without frozen parameters: load with load_module_strict=False"
        )
    wanted = {name: held for name, held in wanted.items() if name in found.tensors}
    optimizer = optimizer and not module_only and engine.steps is not None
    made = _prepare_optimizer(engine, found) if optimizer else []
    if optimizer:
        wanted |= {name: held for name, held in _optimizer_tensors(engine).items() if name in found.tensors}
    try:
        loaded = checkpoint.load(directory, tag, tensors=wanted, group=engine.mesh.data.group, convert=True)
    except BaseException:
        for undo in made:
            undo()
        raise
    _spread_weights(engine)
    engine.zero_grad()
    if not module_only:
        _take_values(engine, loaded, optimizer=optimizer, scheduler=scheduler)
    return str(found.path), loaded.shared["client"]


_COUNTERS = ("global_steps", "skipped_steps", "micro_steps", "global_samples")


def _take_values(engine: Engine, loaded: checkpoint.Loaded, *, optimizer: bool, scheduler: bool) -> None:
    shared = loaded.shared
    for name in _COUNTERS:
        setattr(engine, name, shared["counters"][name])
    engine.precision.scaler.load_state_dict(shared["loss_scale"])
    if optimizer:
        _take_scalars(engine, shared["optimizer"])
    for part, state, wanted in (
        (engine.lr_scheduler, shared["scheduler"], scheduler),
        (engine.training_dataloader, shared["data"], True),
    ):
        if wanted and state is not None and hasattr(part, "load_state_dict"):
            part.load_state_dict(state)
    if loaded.per_rank is not None:
        _restore_random(loaded.per_rank["random"], engine.device)
    else:
        logger.info("random states are those of this run: the checkpoint was saved by another number of ranks")


# -- tensors --


def _weights(engine: Engine, exclude_frozen: bool = False) -> dict[str, FlatSlice | Tensor]:
    entries: dict[str, FlatSlice | Tensor] = {}
    for unit in engine.units:
        held, span = unit.master, unit.optim_span
        for name, param, slot in zip(unit.names, unit.params, unit.layout.slots, strict=True):
            start, stop = overlap(slot.span, span)
            if not (exclude_frozen and not param.requires_grad):
                data = held[start - span[0] : stop - span[0]]
                entries[f"model.{name}"] = FlatSlice(data, slot.shape, min(max(start - slot.offset, 0), slot.numel))
    return entries


def _buffers(engine: Engine) -> dict[str, FlatSlice | Tensor]:
    saved: dict[str, FlatSlice | Tensor] = {}
    for prefix, module in engine.module.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                saved[f"buffer.{prefix}.{name}" if prefix else f"buffer.{name}"] = buffer
    return saved


def _pieces(engine: Engine) -> Iterator[tuple[ShardedSteps, Unit, Piece]]:
    """Everything that this rank's optimizer may hold state of."""
    if engine.steps is not None:
        for unit in engine.units:
            if unit.grads is not None:
                for piece in engine.steps.pieces[unit.index]:
                    yield engine.steps, unit, piece


def _optimizer_tensors(engine: Engine) -> dict[str, FlatSlice | Tensor]:
    entries: dict[str, FlatSlice | Tensor] = {}
    for steps, unit, piece in _pieces(engine):
        for state, values in steps.states(unit, piece).items():
            entries[f"optim.{state}.{piece.name}"] = FlatSlice(values, piece.shape, piece.offset)
    return entries


def _prepare_optimizer(engine: Engine, found: checkpoint.Metadata) -> list[Any]:
    """Make room for the states that the checkpoint holds; returns what undoes it."""
    states: dict[str, dict[str, torch.dtype]] = {}
    for key, info in found.tensors.items():
        kind, _, rest = key.partition(".")
        if kind == "optim":
            state, _, name = rest.partition(".")
            states.setdefault(name, {})[state] = info.dtype
    return [steps.make_states(unit, piece, states.get(piece.name, {})) for steps, unit, piece in _pieces(engine)]


def _spread_weights(engine: Engine) -> None:
    """Masters have changed: round them into the weights and offer those to the other ranks."""
    engine.comms.data.exchange(torch.zeros(1, dtype=torch.float64))
    with torch.no_grad():
        pending = []
        for unit in engine.units:
            if unit.out is not None:
                unit.out.copy_(unit.master)
            pending.append(unit.publish())
        for each in pending:
            each.wait()


# -- values --


def _optimizer_scalars(engine: Engine) -> dict[str, Any] | None:
    if engine.steps is None:
        return None
    mine = {piece.name: steps.scalars(unit, piece) for steps, unit, piece in _pieces(engine)}
    everyone: dict[str, Any] = {}
    for one in gather_objects(mine, engine.mesh.data):
        everyone |= one
    groups = [{key: value for key, value in group.items() if key != "params"} for group in engine.steps.inner.param_groups]
    return {"params": everyone, "groups": groups}


def _take_scalars(engine: Engine, saved: Mapping[str, Any] | None) -> None:
    if saved is None or engine.steps is None:
        return
    groups = engine.steps.inner.param_groups
    if len(groups) == len(saved["groups"]):
        for group, options in zip(groups, saved["groups"], strict=True):
            group.update(options)
    for steps, unit, piece in _pieces(engine):
        if piece.name in saved["params"]:
            steps.load_scalars(unit, piece, saved["params"][piece.name])


def _state_of(part: Any) -> Any:
    return part.state_dict() if hasattr(part, "state_dict") else None


def _random_state(device: torch.device) -> dict[str, Any]:
    import numpy

    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _restore_random(state: Mapping[str, Any], device: torch.device) -> None:
    import numpy

    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)

"""An engine's checkpoints are written, at once or behind training: tensors and values by name (entries.py).

Each rank contributes the flat ranges that it owns (checkpoint/). Values: counters, loss scale, schedule, data position, the
optimizer's scalars, further names of tied weights, the caller's `client_state`, and a transformers model's configuration, which
makes the checkpoint one that can be served; per rank: random states, and the data position where each rank reads its own data.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from slipstream import checkpoint
from slipstream.checkpoint import CheckpointError, FlatSlice
from slipstream.checkpoint.errors import Ranks
from slipstream.train import entries
from slipstream.train.data import StatefulLoader

if TYPE_CHECKING:
    from slipstream.train.engine import Engine

logger = logging.getLogger(__name__)


Contents = Literal["all", "without_optimizer", "weights", "adapters"]


def save(
    engine: Engine,
    directory: str,
    tag: str | None,
    client_state: Mapping[str, Any] | None,
    save_latest: bool,
    exclude_frozen: bool,
    contents: Contents,
) -> None:
    """Write one checkpoint, or copy what it takes to be written behind training. Collective; raises the same CheckpointError on
    every rank, also for the save before this one that was still being written."""
    finish(engine)
    data = engine.mesh.data
    _warn_of_what_is_left_out(engine, directory)
    tag = f"global_step{engine.global_steps}" if tag is None else tag
    what = {"save_latest": save_latest, "exclude_frozen_parameters": exclude_frozen, "contents": contents}
    agree(engine, f"checkpoint {directory}/{tag} was not saved", what)
    tensors = entries.weights(engine, exclude_frozen=exclude_frozen or contents == "adapters")
    if contents != "adapters":
        tensors |= entries.first_buffers(engine)
    if contents in ("all", "without_optimizer"):
        tensors |= entries.averages(engine)
    if contents == "all":
        tensors |= entries.optimizer_tensors(engine)
    average = entries.average_of(engine)
    shared: dict[str, Any] = {}
    per_rank: dict[str, Any] = {}

    def collect() -> None:  # runs code of the user's: what fails on one rank fails on all
        loader = engine.training_dataloader
        together = isinstance(loader, StatefulLoader) and not loader.position_is_own
        position = entries.state_of(loader)
        shared.update(
            counters={name: getattr(engine, name) for name in entries.COUNTERS},
            loss_scale=engine.precision.scaler.state_dict(),
            scheduler=entries.state_of(engine.lr_scheduler),
            data=position if together else None,
            client=dict(client_state or {}),
            model_config=entries.model_config(engine.module),
            contents=contents,
            average={"num_updates": average.num_updates} if average is not None else None,
            aliases=entries.aliases(engine.module),
        )
        per_rank.update(random=entries.random_state(engine.device), data=None if together else position)

    Ranks(data.group).gather(f"checkpoint {directory}/{tag} was not saved", collect)
    shared["optimizer"] = entries.optimizer_scalars(engine) if contents == "all" else None
    plan = engine.plan.checkpoint
    how: dict[str, Any] = {
        "tensors": tensors,
        "shared": shared,
        "per_rank": per_rank,
        "group": data.group,
        "save_latest": save_latest,
        "tag_validation": plan.tag_validation.capitalize(),
        "keep": plan.keep,
    }
    if plan.asynchronous:
        assert engine.staging is not None, "open_staging() makes it where saves are written behind training"
        engine.saving = checkpoint.save_behind(directory, tag, engine.staging, **how)
    else:
        checkpoint.save(directory, tag, **how)


def open_staging(device: torch.device) -> checkpoint.Staging:
    """What saves behind training are written from, empty as yet. Now, not at the first save, comes the import that all need."""
    import slipstream.checkpoint.storage  # noqa: F401

    return checkpoint.Staging(pinned=device.type == "cuda")


def fill_staging(engine: Engine) -> None:
    """After the first update, which has made the optimizer's states: bring in memory for a copy of all, behind training.

    Otherwise the first save stalls for it: a page's first use costs more than its copy.
    """
    assert engine.staging is not None, "only called where there is one"
    kinds = (entries.weights(engine), entries.buffers(engine), entries.optimizer_tensors(engine), entries.averages(engine))
    held = [each for kind in kinds for each in kind.values()]
    data = [each.data if isinstance(each, FlatSlice) else each for each in held]
    whole = sum(each.numel() * each.dtype.itemsize for each in data)
    shared = not all(unit.placement.optim for unit in engine.units)  # then every rank holds all, and saves a part
    engine.staging.prepare(whole // engine.world_size if shared else whole)


def finish(engine: Engine) -> None:
    """Wait for the save that is being written behind training. Collective; raises the same CheckpointError on every rank, once."""
    saving, engine.saving = engine.saving, None
    if saving is not None:
        ranks = Ranks(engine.mesh.data.group)
        ranks.gather(f"checkpoint {saving.path}, written behind training, was not saved", saving.result)
        ranks.decide(f"checkpoint {saving.path} is saved, but older ones could not be removed", saving.tidied)


def agree(engine: Engine, step: str, arguments: Mapping[str, Any]) -> None:
    """Refuse, on every rank, a call whose arguments differ: the ranks would wait for each other in different places."""
    ranks = Ranks(engine.mesh.data.group)
    told = ranks.gather(step, lambda: dict(arguments))

    def compare() -> None:
        for rank, theirs in enumerate(told):
            for name, value in arguments.items():
                if theirs[name] != value:
                    others = f"{theirs[name]!r} on rank {rank}"
                    raise CheckpointError(f"{name} is {value!r} on rank 0 and {others}; give the same on all")

    ranks.decide(step, compare)


def _warn_of_what_is_left_out(engine: Engine, directory: str) -> None:
    if engine.rank != 0:
        return
    if engine.hooks.backwards:
        logger.warning(
            "checkpoint in the middle of an accumulation window: the gradients of its %d backward passes are not saved, and a "
            "run that is resumed begins a new window; save after the engine.step() that updates",
            engine.hooks.backwards,
        )
    ranks = engine.mesh.data.ranks
    if dist.is_initialized() and len(ranks) < dist.get_world_size():
        logger.warning(
            "the checkpoint in %s is of this engine, of ranks %s of %d: engines of other groups (mpu) need directories of their "
            "own, or they overwrite each other's",
            directory,
            list(ranks),
            dist.get_world_size(),
        )

"""Save an engine's checkpoints, synchronously or asynchronously: tensors and values by name (entries.py).

Each rank writes the flat ranges that it owns (checkpoint/). Values: counters, loss scale, schedule, data position, the optimizer's
scalars, further names of tied weights, the caller's `client_state`, and a transformers model's configuration, so that the
checkpoint can be served. Per rank: random states, and the data position if each rank reads its own data.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from slipstream import brief, checkpoint
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
    """Write a checkpoint, or copy the states for an asynchronous one. Collective; raises the same CheckpointError on every rank,
    also for the previous asynchronous save."""
    finish(engine)
    data = engine.mesh.data
    _warn_of_what_is_left_out(engine, directory)
    tag = f"global_step{engine.global_steps}" if tag is None else tag
    failed = f"checkpoint {directory}/{tag} was not saved"
    agree(engine, failed, {"save_latest": save_latest, "exclude_frozen_parameters": exclude_frozen, "contents": contents})
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

    def collect() -> None:  # runs user code: a failure on one rank is raised on all
        loader = engine.training_dataloader
        is_common = isinstance(loader, StatefulLoader) and not loader.position_is_own
        position = entries.state_of(loader)
        shared.update(
            counters={name: getattr(engine, name) for name in entries.COUNTERS},
            loss_scale=engine.precision.scaler.state_dict(),
            scheduler=entries.state_of(engine.lr_scheduler),
            data=position if is_common else None,
            client=dict(client_state or {}),
            model_config=entries.model_config(engine.module),
            contents=contents,
            average={"num_updates": average.num_updates} if average is not None else None,
            aliases=entries.aliases(engine.module),
        )
        per_rank.update(random=entries.random_state(engine.device), data=None if is_common else position)

    Ranks(data.group).gather(failed, collect)
    shared["optimizer"] = entries.optimizer_scalars(engine) if contents == "all" else None
    plan = engine.plan.checkpoint
    options: dict[str, Any] = {
        "tensors": tensors,
        "shared": shared,
        "per_rank": per_rank,
        "group": data.group,
        "save_latest": save_latest,
        "tag_validation": plan.tag_validation.capitalize(),
        "keep": plan.keep,
    }
    if engine.rank == 0:
        brief.note_save(f"{directory}/{tag}")
    if plan.asynchronous:
        assert engine.staging is not None, "initialize() calls open_staging() if saves are asynchronous"
        engine.saving = checkpoint.save_async(directory, tag, engine.staging, **options)
    else:
        checkpoint.save(directory, tag, **options)


def open_staging(device: torch.device) -> checkpoint.Staging:
    """Create the empty staging memory of asynchronous saves. Imports the storage module now, so that the first save need not."""
    import slipstream.checkpoint.storage  # noqa: F401

    return checkpoint.Staging(pinned=device.type == "cuda")


def fill_staging(engine: Engine) -> None:
    """Fault in host memory for a copy of all states, asynchronously, after the first update has created the optimizer's states.

    Otherwise the first save stalls: the first use of a page costs more than its copy.
    """
    assert engine.staging is not None, "called only if saves are asynchronous"
    kinds = (entries.weights(engine), entries.buffers(engine), entries.optimizer_tensors(engine), entries.averages(engine))
    tensors = [each.data if isinstance(each, FlatSlice) else each for kind in kinds for each in kind.values()]
    nbytes = sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors)
    replicated = not all(unit.placement.optim for unit in engine.units)  # then every rank holds all states and saves a part
    engine.staging.prepare(nbytes // engine.world_size if replicated else nbytes)


def finish(engine: Engine) -> None:
    """Wait for the asynchronous save in flight. Collective; raises the same CheckpointError on every rank, once."""
    saving, engine.saving = engine.saving, None
    if saving is not None:
        ranks = Ranks(engine.mesh.data.group)
        ranks.gather(f"asynchronous checkpoint {saving.path} was not saved", saving.result)
        ranks.decide(f"checkpoint {saving.path} is saved, but older ones could not be removed", saving.tidied)


def agree(engine: Engine, step: str, arguments: Mapping[str, Any]) -> None:
    """Raise CheckpointError on every rank if the arguments differ: the ranks would wait for each other in different places."""
    ranks = Ranks(engine.mesh.data.group)
    gathered = ranks.gather(step, lambda: dict(arguments))

    def compare() -> None:
        for rank, other in enumerate(gathered):
            for name, value in arguments.items():
                if other[name] != value:
                    raise CheckpointError(f"{name} is {value!r} on rank 0 and {other[name]!r} on rank {rank}; pass the same on all")

    ranks.decide(step, compare)


def _warn_of_what_is_left_out(engine: Engine, directory: str) -> None:
    if engine.rank != 0:
        return
    if engine.hooks.backwards:
        logger.warning(
            "checkpoint in the middle of an accumulation window: the gradients of its %d backward passes are not saved, and a "
            "resumed run begins a new window; save after the engine.step() that updates",
            engine.hooks.backwards,
        )
    ranks = engine.mesh.data.ranks
    if dist.is_initialized() and len(ranks) < dist.get_world_size():
        logger.warning(
            "the checkpoint in %s covers this engine's ranks only (%s of %d): save engines of other groups (mpu) to other "
            "directories, or they overwrite each other",
            directory,
            list(ranks),
            dist.get_world_size(),
        )

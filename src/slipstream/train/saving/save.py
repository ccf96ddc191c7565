"""Save an engine's checkpoints, synchronously or asynchronously: tensors and values by name (entries.py).

Each rank writes the flat ranges that it owns (checkpoint/). Values: counters, loss scale, schedule, data position, the optimizer's
scalars, further names of tied weights, the caller's `client_state`, and a transformers model's configuration, so that the
checkpoint can be served. Per rank: random states, and the data position if each rank reads its own data.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch.distributed as dist

from slipstream import checkpoint
from slipstream.checkpoint import CheckpointError, FlatSlice, Hosts
from slipstream.checkpoint.errors import Ranks
from slipstream.train.agreement import conflict
from slipstream.train.autosave import Autosave, hosts_of
from slipstream.train.loaders import Loader
from slipstream.train.saving import entries
from slipstream.train.states import States
from slipstream.world import brief
from slipstream.world.mesh import Axis, Mesh

logger = logging.getLogger(__name__)


Contents = Literal["all", "without_optimizer", "weights", "adapters"]


class Saves:
    """The checkpoints that one engine writes. At most one asynchronous save is in flight."""

    def __init__(self, states: States) -> None:
        self.states, self.plan, self.mesh = states, states.plan.checkpoint, states.mesh
        self.auto = Autosave(self.plan, self.mesh)
        self.hosts = _own_directories(self.mesh) if self.plan.per_host else None
        self.staging = checkpoint.Staging(pinned=states.device.type == "cuda")  # host memory of asynchronous saves
        self._in_flight: checkpoint.AsyncSave | None = None

    def save(
        self,
        loop: entries.Loop,
        directory: str,
        tag: str | None,
        client_state: Mapping[str, Any] | None,
        save_latest: bool,
        exclude_frozen: bool,
        contents: Contents,
    ) -> None:
        """Write a checkpoint, or copy the states for an asynchronous one. Collective; raises the same CheckpointError on every
        rank, also for the previous asynchronous save."""
        self.finish()
        self._warn_of_what_is_left_out(directory)
        world, states, in_memory = self.mesh.world, self.states, directory == self.auto.memory
        tag = f"global_step{loop.global_steps}" if tag is None else tag
        failed = f"checkpoint {directory}/{tag} was not saved"
        agree(world, failed, {"save_latest": save_latest, "exclude_frozen_parameters": exclude_frozen, "contents": contents})
        tensors = entries.saved_tensors(states, contents, exclude_frozen=exclude_frozen)
        shared: dict[str, Any] = {}
        per_rank: dict[str, Any] = {}

        def collect() -> None:  # runs user code: a failure on one rank is raised on all
            loader = loop.training_dataloader
            is_common = isinstance(loader, Loader) and not loader.position_is_own
            position, client = entries.state_of(loader), dict(client_state or {})
            shared.update(
                counters={name: getattr(loop, name) for name in entries.COUNTERS},
                loss_scale=loop.precision.scaler.state_dict(),
                scheduler=entries.state_of(loop.lr_scheduler),
                data=position if is_common else None,
                client=client,
                model_config=entries.model_config(states.model),
                contents=contents,
                average=None if states.average is None else {"num_updates": states.average.num_updates},
                kept={name: part.state_dict() for name, part in entries.kept(states).items()},
                aliases=entries.aliases(states.model),
            )
            per_rank.update(random=entries.random_state(states.device), data=None if is_common else position)
            if (self.mesh.tp.index or self.mesh.pp.index) and client:  # the others get rank 0's
                per_rank.update(client=client)

        Ranks(world.group).gather(failed, collect)
        shared["optimizer"] = entries.optimizer_scalars(states) if contents == "all" else None
        options: checkpoint.Content = {
            "tensors": tensors,
            "shared": shared,
            "per_rank": per_rank,
            "group": world.group,
            "mesh": self.mesh.sizes,
            "save_latest": save_latest,
            "tag_validation": cast(Any, self.plan.tag_validation.capitalize()),
            "keep": 1 if in_memory else self.plan.keep,
        }
        if self.mesh.is_first and not in_memory:
            brief.note_save(f"{directory}/{tag}")
        if self.plan.asynchronous and not in_memory:
            self._in_flight = checkpoint.save_async(directory, tag, self.staging, **options)
        else:
            checkpoint.save(directory, tag, hosts=self.auto.hosts if in_memory else self.hosts, **options)

    @contextmanager
    def complete(self, directory: str, tag: str | None) -> Iterator[tuple[str, str | None]]:
        """The directory and tag to load from, once the checkpoint is complete on each host. Collective."""
        if self.hosts is None or directory == self.auto.memory:
            yield directory, tag
            return
        agree(self.mesh.world, f"checkpoint {directory}/{tag or 'latest'} was not loaded", {"tag": tag})
        with checkpoint.completed(directory, tag, self.hosts, universal=self.plan.universal) as place:
            yield place

    def finish(self) -> None:
        """Wait for the asynchronous save in flight. Collective; raises the same CheckpointError on every rank, once."""
        saving, self._in_flight = self._in_flight, None
        if saving is not None:
            ranks = Ranks(self.mesh.world.group)
            ranks.gather(f"asynchronous checkpoint {saving.path} was not saved", saving.result)
            ranks.decide(f"checkpoint {saving.path} is saved, but older ones could not be removed", saving.tidied)

    @property
    def in_flight(self) -> bool:
        return self._in_flight is not None

    def prepare(self) -> None:
        """Fault in host memory for a copy of all states, asynchronously, after the first update has created the optimizer's states.

        Otherwise the first save stalls: the first use of a page costs more than its copy.
        """
        if not self.plan.asynchronous or self.staging.prepared:
            return
        kinds = (entries.weights, entries.buffers, entries.optimizer_tensors, entries.outer, entries.averages)
        held = [part.data if isinstance(part, FlatSlice) else part for kind in kinds for part in kind(self.states).values()]
        nbytes = sum(tensor.numel() * tensor.dtype.itemsize for tensor in held)
        replicated = not all(unit.placement.optim for unit in self.states.units)  # every rank holds all states and saves a part
        self.staging.prepare(nbytes // self.mesh.batch.size if replicated else nbytes)

    def close(self) -> None:
        """Free the host memory and restore the signal handlers."""
        self.auto.close()
        self.staging.close()

    def _warn_of_what_is_left_out(self, directory: str) -> None:
        if not self.mesh.is_first:
            return
        backwards = self.states.hooks.backwards
        if backwards:
            logger.warning(
                "checkpoint in the middle of an accumulation window: the gradients of its %d backward pass(es) are not saved, and "
                "a resumed run begins a new window; save after the engine.step() that updates, or discard them with zero_grad()",
                backwards,
            )
        ranks = self.mesh.world.ranks
        if dist.is_initialized() and len(ranks) < dist.get_world_size():
            logger.warning(
                "the checkpoint in %s covers this engine's ranks only (%s of %d): save engines of other groups (mpu) to other "
                "directories, or they overwrite each other",
                directory,
                list(ranks),
                dist.get_world_size(),
            )


def agree(world: Axis, step: str, arguments: Mapping[str, Any]) -> None:
    """Raise CheckpointError on every rank if the arguments differ: the ranks would wait for each other in different places."""
    ranks = Ranks(world.group)
    gathered = ranks.gather(step, lambda: dict(arguments))

    def compare() -> None:
        if differing := conflict(range(len(gathered)), gathered):
            name, first, usual, rank, other = differing
            raise CheckpointError(f"{name} is {usual!r} on rank {first} and {other!r} on rank {rank}; pass the same on all")

    ranks.decide(step, compare)


def _own_directories(mesh: Mesh) -> Hosts | None:
    """The hosts, if each has its own directory; None for one host. Raises ValueError if that is impossible. Collective."""
    hosts, why = hosts_of(mesh.world, in_memory=False)
    if why:
        raise ValueError(f"checkpoint.use_node_local_storage: {why}; or set it to false, and save to a directory that all share")
    return hosts

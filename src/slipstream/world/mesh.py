"""The data-parallel mesh: which ranks hold replicas and which hold shards.

Axes, outermost first: `dp_replicate` (replicas of the sharded states) and `dp` (shards). Data is split over both.
Later axes (pp, ep, sp, tp) will be added here. Nothing is global: a mesh is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class Axis:
    """One mesh axis of this rank: a process group (None if the axis has one rank) and its global ranks."""

    name: str
    group: ProcessGroup | None
    ranks: tuple[int, ...]
    index: int  # this rank's place on the axis
    size: int


@dataclass(frozen=True, slots=True)
class Mesh:
    """The axes of one engine. `rank` is global; a place on an axis is an `index`."""

    rank: int
    world: Axis  # all ranks of the engine: they agree on verdicts, checkpoints, disk space and errors
    batch: Axis  # the ranks among which a batch is split, in (dp_replicate, dp) order
    dp_replicate: Axis
    dp: Axis

    @property
    def is_first(self) -> bool:
        """Whether this rank logs for the engine."""
        return self.world.index == 0


def _axis(name: str, group: ProcessGroup | None, ranks: list[int], rank: int) -> Axis:
    return Axis(name, group if len(ranks) > 1 else None, tuple(ranks), ranks.index(rank), len(ranks))


def data_mesh(shard_size: int | None = None, group: Any = None) -> Mesh:
    """Build the data mesh over `group` (default: all ranks). `shard_size` (MiCS) shards over so many consecutive ranks only.

    Collective over the whole world if `shard_size` is given, because it creates process groups.
    Raises ValueError if `shard_size` does not divide the data-parallel size.
    """
    if not dist.is_initialized():
        if shard_size not in (None, 1):
            raise ValueError(f"mics_shard_size is {shard_size}, but there is one process; start with `slipstream run`")
        one = _axis("dp", None, [0], 0)
        return Mesh(0, one, one, _axis("dp_replicate", None, [0], 0), one)
    group = group if group is not None else dist.group.WORLD
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank()
    data = _axis("data", group, ranks, rank)
    if shard_size is None or shard_size == len(ranks):
        return Mesh(rank, data, data, _axis("dp_replicate", None, [rank], rank), _axis("dp", group, ranks, rank))
    if len(ranks) % shard_size:
        raise ValueError(f"zero_optimization.mics_shard_size ({shard_size}) does not divide the data-parallel size ({len(ranks)})")
    rows = [ranks[i : i + shard_size] for i in range(0, len(ranks), shard_size)]
    columns = [list(column) for column in zip(*rows, strict=True)]
    shard_group, _ = dist.new_subgroups_by_enumeration(rows)
    replica_group, _ = dist.new_subgroups_by_enumeration(columns)
    row = next(row for row in rows if rank in row)
    column = next(column for column in columns if rank in column)
    return Mesh(rank, data, data, _axis("dp_replicate", replica_group, column, rank), _axis("dp", shard_group, row, rank))

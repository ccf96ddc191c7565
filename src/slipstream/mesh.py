"""The data-parallel mesh: which ranks hold replicas and which hold shards.

Axes, outermost first: `dp_replicate` (replicas of the sharded states) and `dp` (shards). Data is split over both.
Later axes (pp, ep, sp, tp) will be added here. Nothing is global: a mesh is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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
    index: int  # this rank's coordinate
    size: int = field(init=False)  # an attribute, not a property: a step reads it hundreds of times

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", len(self.ranks))


@dataclass(frozen=True, slots=True)
class Mesh:
    """The data axes of one engine."""

    dp_replicate: Axis
    dp: Axis
    data: Axis  # both together, in (dp_replicate, dp) order: the ranks among which a batch is split

    def axis(self, name: str) -> Axis:
        return {"dp_replicate": self.dp_replicate, "dp": self.dp}[name]


def _axis(name: str, group: ProcessGroup | None, ranks: list[int], rank: int) -> Axis:
    return Axis(name, group if len(ranks) > 1 else None, tuple(ranks), ranks.index(rank))


def data_mesh(shard_size: int | None = None, group: Any = None) -> Mesh:
    """Build the data mesh over `group` (default: all ranks). `shard_size` (MiCS) shards over so many consecutive ranks only.

    Collective over the whole world if `shard_size` is given, because it creates process groups.
    Raises ValueError if `shard_size` does not divide the data-parallel size.
    """
    if not dist.is_initialized():
        if shard_size not in (None, 1):
            raise ValueError(f"mics_shard_size is {shard_size}, but there is one process; start with `slipstream run`")
        one = Axis("dp", None, (0,), 0)
        return Mesh(Axis("dp_replicate", None, (0,), 0), one, one)
    group = group if group is not None else dist.group.WORLD
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank()
    data = _axis("data", group, ranks, rank)
    if shard_size is None or shard_size == len(ranks):
        return Mesh(_axis("dp_replicate", None, [rank], rank), _axis("dp", group, ranks, rank), data)
    if len(ranks) % shard_size:
        raise ValueError(f"zero_optimization.mics_shard_size ({shard_size}) does not divide the data-parallel size ({len(ranks)})")
    rows = [ranks[i : i + shard_size] for i in range(0, len(ranks), shard_size)]
    columns = [list(column) for column in zip(*rows, strict=True)]
    shard_group, _ = dist.new_subgroups_by_enumeration(rows)
    replica_group, _ = dist.new_subgroups_by_enumeration(columns)
    row = next(row for row in rows if rank in row)
    column = next(column for column in columns if rank in column)
    return Mesh(_axis("dp_replicate", replica_group, column, rank), _axis("dp", shard_group, row, rank), data)

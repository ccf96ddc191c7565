"""The mesh of one engine: its axes of ranks, and the families of parameters that live on them.

Axes, outermost first: `dp_replicate` (replicas of the sharded states) and `dp` (shards). A batch is split over both. `ep` cuts the
ranks of a batch anew: consecutive ranks hold different parameters, and the ranks with the same index on `ep` share theirs.
Later axes (pp, sp, tp) will be added here. Nothing is global: a mesh is an argument.

split   the axis over which ranks hold different parts of a parameter, and its size
family  the parameters with the same splits: with whom they are reduced, sharded and copied. () is the dense family: every rank has
        the whole parameter
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

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


class Split(NamedTuple):
    """An axis over which the parts of a parameter differ, and its number of ranks."""

    axis: str
    size: int


Differs = tuple[Split, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """The axes of the parameters with the same splits."""

    differs: Differs
    parts: tuple[Axis, ...]  # for each split, the ranks that hold the parts of one whole
    both: Axis  # the ranks that hold the same parameters, in (copies, shards) order
    copies: Axis  # replicas of the shards
    shards: Axis

    def parts_of(self, split: Split) -> Axis:
        return self.parts[self.differs.index(split)]


@dataclass(frozen=True, slots=True)
class Mesh:
    """The axes of one engine. `rank` is global; a place on an axis is an `index`."""

    rank: int
    world: Axis  # all ranks of the engine: they agree on verdicts, checkpoints, disk space and errors
    batch: Axis  # the ranks among which a batch is split, in (dp_replicate, dp) order
    families: Mapping[Differs, Family]

    @property
    def sizes(self) -> dict[str, int]:
        """The axes on which ranks differ by more than their share of states, outermost first: a checkpoint names them."""
        return {"batch": self.batch.size}

    @property
    def dense(self) -> Family:
        return self.families[()]

    @property
    def is_first(self) -> bool:
        """Whether this rank logs for the engine."""
        return self.world.index == 0


def _axis(name: str, group: ProcessGroup | None, ranks: list[int], rank: int) -> Axis:
    return Axis(name, group if len(ranks) > 1 else None, tuple(ranks), ranks.index(rank), len(ranks))


def build_mesh(shard_size: int | None = None, group: Any = None, differs: Iterable[Differs] = ()) -> Mesh:
    """Build the mesh over `group` (default: all ranks). `shard_size` (MiCS) shards over so many consecutive ranks only.

    differs: the splits of the model's parameters, the same on all ranks. Collective over the whole world if there are splits, or
    if `shard_size` is given, because it creates process groups. Raises ValueError if a size does not divide the number of ranks.
    """
    if not dist.is_initialized():
        ranks, rank, group = [0], 0, None
    else:
        group = group if group is not None else dist.group.WORLD
        ranks, rank = dist.get_process_group_ranks(group), dist.get_rank()
    size = len(ranks)
    if shard_size is not None and size % shard_size:
        raise ValueError(
            f"zero_optimization.mics_shard_size ({shard_size}) does not divide the data-parallel size ({size})"
            + ("" if dist.is_initialized() else "; start with `slipstream run`")
        )
    batch, alone = _axis("batch", group, ranks, rank), _axis("dp_replicate", None, [rank], rank)
    if shard_size is None or shard_size == size:
        dense = Family((), (), batch, alone, _axis("dp", group, ranks, rank))
    else:
        rows = [ranks[i : i + shard_size] for i in range(0, size, shard_size)]
        dense = Family((), (), batch, _cut("dp_replicate", _columns(rows), rank), _cut("dp", rows, rank))
    families: dict[Differs, Family] = {(): dense}
    for splits in sorted(set(differs) - {()}):
        [split] = splits  # one axis so far: ep
        if size % split.size:
            raise ValueError(
                f"parameters are split over {split.axis} by {split.size}, which does not divide the data-parallel size ({size})"
            )
        if dense.copies.size > 1:
            raise ValueError(f"zero_optimization.mics_shard_size ({shard_size}) is not built for parameters that are split over ep")
        rows = [ranks[i : i + split.size] for i in range(0, size, split.size)]
        both = _cut(f"dp of {split.axis}", _columns(rows), rank)
        families[splits] = Family(splits, (_cut(split.axis, rows, rank),), both, alone, both)
    return Mesh(rank, batch, batch, families)


def _columns(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*rows, strict=True)]


def _cut(name: str, groups: list[list[int]], rank: int) -> Axis:
    """This rank's axis of those that `groups` cut the ranks into. Collective over the world."""
    group, _ = dist.new_subgroups_by_enumeration(groups) if len(groups[0]) > 1 else (None, None)
    return _axis(name, group, next(ranks for ranks in groups if rank in ranks), rank)

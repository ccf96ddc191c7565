"""The mesh of one engine: its axes of ranks, and the families of parameters that live on them.

Axes, outermost first: `pp` (pipeline stages), `batch` (ranks that split a batch: replicas of the sharded states, then shards), `sp`
(parts of a sequence) and `tp` (parts of layers). `ep` divides the ranks of a stage differently: consecutive ranks hold different
experts. Nothing is global: a mesh is an argument.

split   an axis over which parameters differ, and the number of different parts. If the axis has more ranks than parts, neighbors
        hold the same part
family  the parameters with the same splits, which determine the ranks that reduce, shard and copy them. () is the dense family: all
        ranks of a stage have the whole parameter, and tp ranks compute the same gradients

[Note: Gradients of copies over tp] The ranks of a tp axis get the same data. A parameter without a split has the same gradient on
all of them, so the family's sum is tp times too large: `Family.weight`. A parameter with a split over tp, even into one part, sees
another share of the activations on each rank that holds it: its gradients are partial, and their sum is the gradient.
"""

from __future__ import annotations

import itertools
import math
import pickle
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_SHORT = 1024  # bytes of a pickle that every rank sends in one message
_PATIENCE = timedelta(days=1)  # longer than the watch's
_HOSTED: weakref.WeakKeyDictionary[ProcessGroup, ProcessGroup] = weakref.WeakKeyDictionary()  # group -> the same ranks, by gloo


def gather_objects(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Every rank's `value`, in rank order, pickled. Collective. Short ones take one message over gloo, not two as torch's take."""
    values: list[Any] = [None] * dist.get_world_size(group)
    if dist.get_backend(group) == "gloo":
        own, data = torch.zeros(_SHORT, dtype=torch.uint8, device="cpu"), pickle.dumps(value)
        if len(data) <= _SHORT:
            own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = [torch.empty_like(own) for _ in values]
        dist.all_gather(rows, own, group=group)
        if all(row[0] for row in rows):  # no pickle begins with 0
            return [pickle.loads(row.numpy().tobytes()) for row in rows]
    dist.all_gather_object(values, value, group=group)
    return values


@dataclass(frozen=True, slots=True)
class Axis:
    """One mesh axis of this rank: a process group (None if the axis has one rank) and its global ranks."""

    name: str
    group: ProcessGroup | None
    ranks: tuple[int, ...]
    index: int  # this rank's index on the axis
    size: int
    lines: tuple[tuple[int, ...], ...] = ()  # the ranks of each axis of the mesh in this direction, this one included

    def __deepcopy__(self, memo: Any) -> Axis:
        """The copy, in a model copied for a dry run, has the same ranks."""
        return self

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order, pickled. Collective; for setup and inspection."""
        return [value] if self.group is None else gather_objects(value, self.group)

    def host_group(self) -> ProcessGroup | None:
        """The group, or the same ranks' by gloo if that one communicates no host memory, as NCCL alone. Collective over `lines`.

        torch names a group by a count. So if `lines` have all ranks, all ranks make the groups of all lines in one order. Engines
        of parts of the world make only their own, which torch names by ranks and count.
        """
        if self.group is None or "cpu:" in dist.get_backend_config(self.group):
            return self.group
        if self.group not in _HOSTED:
            is_part = sum(map(len, self.lines)) < dist.get_world_size()
            for ranks in (self.ranks,) if is_part else self.lines:
                made = dist.new_group(list(ranks), timeout=_PATIENCE, backend="gloo", use_local_synchronization=is_part)
                if ranks == self.ranks:
                    _HOSTED[self.group] = made
        return _HOSTED[self.group]


class Split(NamedTuple):
    """An axis over which the parts of a parameter differ, and their number. On `pp`: one part, on the stages `stages`.

    slices  on `ep`: number of tp slices of the experts. The ranks of each slice share out the parts, even of an unsliced parameter
    """

    axis: str
    size: int
    stages: tuple[int, ...] = ()
    slices: int = 1


Differs = tuple[Split, ...]


class Place(NamedTuple):
    """One rank's index on each axis."""

    pp: int
    batch: int
    sp: int
    tp: int


@dataclass(frozen=True, slots=True)
class Family:
    """The axes of the parameters with the same splits."""

    differs: Differs
    parts: tuple[Axis, ...]  # for each split: the ranks that hold the parts of one whole
    both: Axis  # the ranks that hold the same parameters, including replicas that train on their own
    copies: Axis  # replicas of the shards, whose gradients each step adds
    shards: Axis
    apart: Axis  # replicas of the shards that train on their own (train/local_steps.py)
    group: Axis | None = None  # neighboring shards, such as the ranks of a host; None: no groups
    across: Axis | None = None  # the shards with the same place in each group
    weight: float = 1.0  # factor of the gradients' sum over `both`; see [Note: Gradients of copies over tp]

    def parts_of(self, split: Split) -> Axis:
        return self.parts[self.differs.index(split)]


class _Groups:
    """Divisions of an engine's ranks into process groups, each made once. Every rank makes the same ones in the same order."""

    def __init__(self, rank: int, ranks: Sequence[int], group: ProcessGroup | None) -> None:
        self.rank = rank
        self.made: dict[tuple[tuple[int, ...], ...], ProcessGroup | None] = {(tuple(sorted(ranks)),): group}

    def axis(self, name: str, groups: Sequence[Sequence[int]]) -> Axis:
        """This rank's axis among `groups`, which partition the ranks. Collective over the world, unless it exists.

        [Note: One order] torch sorts a group's ranks, and so does an axis. Otherwise, if an mpu's slices are outermost, places
        whose ranks are 0, 2, 1, 3 would send each other's shards over gloo and NCCL, and train on wrong gradients.
        """
        key = tuple(sorted(tuple(sorted(ranks)) for ranks in groups))
        if key not in self.made:
            several = [list(ranks) for ranks in key if len(ranks) > 1]
            self.made[key] = dist.new_subgroups_by_enumeration(several)[0] if several else None
        ranks = next(ranks for ranks in key if self.rank in ranks)
        return Axis(name, self.made[key] if len(ranks) > 1 else None, ranks, ranks.index(self.rank), len(ranks), key)


@dataclass(frozen=True, slots=True)
class Mesh:
    """The axes of one engine. `rank` is global; a position on an axis is an `index`."""

    rank: int
    world: Axis  # all ranks of the engine, which agree on checkpoints, disk space and errors
    replica: Axis  # the ranks that step together and agree on verdicts: all, except with local steps
    pp: Axis
    batch: Axis  # the ranks that split a batch, in (copies, shards) order
    sp: Axis
    tp: Axis
    places: Mapping[int, Place]  # of every rank of the engine, in row-major order
    order: tuple[str, ...]  # row-major axis order of the ranks: tp is innermost, unless an mpu has it outermost
    families: Mapping[Differs, Family]
    shard_size: int | None
    group_size: int | None
    is_apart: bool  # replicas of the shards have gradients and weights of their own (train/local_steps.py)
    groups: _Groups = field(repr=False, compare=False)

    @property
    def sizes(self) -> dict[str, int]:
        """The axes on which ranks differ by more than their share of states, outermost first; checkpoints contain them."""
        sizes = {axis: getattr(self, axis).size for axis in self.order}
        return {axis: size for axis, size in sizes.items() if size > 1 or axis == "batch"}

    @property
    def num_means(self) -> int:
        """The number of ranks over which gradients are averaged: each has its own samples or parts of samples."""
        return self.batch.size * self.sp.size // self.num_apart

    @property
    def stage(self) -> Axis:
        """The ranks of this pipeline stage that step together."""
        return self.dense.shards if self.is_apart else self.dense.both

    @property
    def num_apart(self) -> int:
        """The number of replicas that train on their own; 1 if all ranks step together."""
        return self.world.size // self.replica.size

    @property
    def dense(self) -> Family:
        return self.families[()]

    @property
    def names(self) -> dict[int, str]:
        """The place of each rank as text ("stage 1, tp 0"), on the axes on which ranks differ by more than their data."""
        axes = {"pp": "stage", "sp": "sp", "tp": "tp"}
        shown = [axis for axis in axes if getattr(self, axis).size > 1]
        text = {rank: ", ".join(f"{axes[axis]} {getattr(place, axis)}" for axis in shown) for rank, place in self.places.items()}
        return text if shown else {}

    @property
    def is_first(self) -> bool:
        """Whether this rank logs for the engine."""
        return self.world.index == 0

    def with_families(self, differs: Iterable[Differs]) -> Mesh:
        """The mesh with the families of this rank's parameters. Collective over the world if any rank has splits.

        Raises ValueError if the parts do not fit the mesh.
        """
        own = sorted(set(differs) - {()})
        families = dict(self.families)
        for splits in sorted(set(itertools.chain.from_iterable(self.world.gather(own)))):
            family = self._family(splits)
            if splits in own:
                families[splits] = family
        return replace(self, families=families)

    def _family(self, splits: Differs) -> Family:
        cells = self._cells(splits)
        name = " of " + " x ".join(split.axis for split in splits) if splits else ""
        replicas = self.groups.axis(f"dp{name}" if splits else "batch", list(cells.values()))
        parts, block_of = [], self.blocks
        for i, split in enumerate(splits):
            rows: dict[tuple[int, ...], list[list[int]]] = {}
            for key, ranks in cells.items():
                rows.setdefault((*key[: i + 1], *key[i + 2 :]), []).append(ranks)
            wholes = [column for cells_of in rows.values() for column in _columns(cells_of)]
            if self.is_apart and (cut := [each for each in wholes if len({block_of[rank] for rank in each}) > 1]):
                raise ValueError(
                    f"parameters are split over {split.axis} by {split.size}, on the ranks {cut[0]} of several replicas that "
                    "slipstream.local_steps lets train on their own; drop one of the two"
                )
            parts.append(self.groups.axis(split.axis, wholes))
        is_equal = not any(split.axis == "tp" or (split.axis == "ep" and split.slices == 1) for split in splits)
        weight = 1.0 / self.tp.size if is_equal else 1.0
        return Family(splits, tuple(parts), replicas, *self._copies(splits, list(cells.values())), weight)

    def _cells(self, splits: Differs) -> dict[tuple[int, ...], list[int]]:
        """The ranks that hold the same parameters, by (first stage, index of the part for each split)."""
        cells: dict[tuple[int, ...], list[int]] = {}
        tied = next((split.stages for split in splits if split.axis == "pp"), ())
        for rank, place in self.places.items():
            cells.setdefault((tied[0] if place.pp in tied else place.pp,), []).append(rank)
        order = sorted(range(len(splits)), key=lambda i: splits[i].axis == "ep")  # ep last: its ranks hold the same slices
        for i in order:
            split = splits[i]
            count, axis_size = split.size, self.tp.size
            if split.axis == "tp" and axis_size % count:
                raise ValueError(
                    f"parameters are split into {count} parts over tp, which does not divide its size ({axis_size}); split them "
                    f"into {nearest_divisor(axis_size, count)}, or use slipstream.mesh.tp {count}"
                )
            finer: dict[tuple[int, ...], list[int]] = {}
            for key, ranks in cells.items():
                if split.axis == "ep" and len(ranks) % count:
                    raise ValueError(
                        f"parameters are split over ep by {count}, which does not divide the data-parallel size ({len(ranks)}); "
                        f"use ep {nearest_divisor(len(ranks), count)}"
                    )
                dealt = [0] * axis_size  # number of ranks per slice so far
                for rank in ranks:
                    piece = self.places[rank].tp * split.slices // axis_size
                    part = {"pp": 0, "tp": self.places[rank].tp * count // axis_size, "ep": dealt[piece] % count}[split.axis]
                    dealt[piece] += 1
                    finer.setdefault((*key, part), []).append(rank)
            cells = finer
        back = [0, *(1 + order.index(i) for i in range(len(splits)))]
        return {tuple(key[i] for i in back): ranks for key, ranks in cells.items()}

    def _copies(self, splits: Differs, cells: Sequence[Sequence[int]]) -> tuple[Axis, Axis, Axis, Axis | None, Axis | None]:
        """The axes of a family's copies, shards, replicas apart and groups of shards, in cells of ranks with the same parameters.

        Consecutive ranks of a stage form a block, which shards do not leave. A parameter of several stages has a copy on each.
        """
        on_stages = any(split.axis == "pp" for split in splits)
        rows: list[list[list[list[int]]]] = []  # per cell and block: the ranks of shards
        block_of = self.blocks
        for ranks in cells:
            blocks: dict[int, dict[int, list[int]]] = {}
            for rank in ranks:
                stage = self.places[rank].pp if on_stages else 0
                blocks.setdefault(block_of[rank], {}).setdefault(stage, []).append(rank)
            rows.append([list(of_stages.values()) for of_stages in blocks.values()])
            if len({len(each) for of_stages in rows[-1] for each in of_stages}) > 1:
                split = next(split for split in splits if split.axis != "pp")
                raise ValueError(
                    f"zero_optimization.mics_shard_size ({self.shard_size}) cuts the ranks {list(ranks)}, which hold the same part "
                    f"of parameters split over {split.axis} by {split.size}, into unequal groups; use a multiple of {split.size}"
                )
        whole = [list(itertools.chain.from_iterable(of_blocks)) for of_blocks in rows]
        added = [block for of_blocks in rows for block in of_blocks] if self.is_apart else whole
        copies = self.groups.axis("dp_replicate", [column for each in added for column in _columns(each)])
        shards = [ranks for each in whole for ranks in each]
        apart = [[list(itertools.chain.from_iterable(block)) for block in of_blocks] for of_blocks in rows]
        lines = [column for each in apart for column in _columns(each)] if self.is_apart else [[rank] for rank in self.places]
        return copies, self.groups.axis("dp", shards), self.groups.axis("apart", lines), *self._grouped(shards)

    @property
    def blocks(self) -> dict[int, int]:
        """The block of each rank: `shard_size` consecutive ranks of a stage; without shard_size, one block of all ranks."""
        stages: dict[int, list[int]] = {}
        for rank, place in self.places.items():
            stages.setdefault(place.pp, []).append(rank)
        return {rank: i // (self.shard_size or len(ranks)) for ranks in stages.values() for i, rank in enumerate(ranks)}

    def _replica(self) -> Axis:
        replicas: dict[int, list[int]] = {}
        for rank, block in self.blocks.items():
            replicas.setdefault(block if self.is_apart else 0, []).append(rank)
        return self.groups.axis("replica", list(replicas.values()))

    def _grouped(self, shards: Sequence[Sequence[int]]) -> tuple[Axis | None, Axis | None]:
        """The axes within and across groups of the shards; None unless each row of shards consists of several whole groups."""
        size = self.group_size
        if size is None or any(len(ranks) == size or len(ranks) % size for ranks in shards):
            return None, None
        rows = [[list(ranks[i : i + size]) for i in range(0, len(ranks), size)] for ranks in shards]
        across = [column for row in rows for column in _columns(row)]
        return self.groups.axis("group", [ranks for row in rows for ranks in row]), self.groups.axis("across groups", across)


def place_ranks(ranks: Sequence[int], lengths: Place) -> dict[int, Place]:
    """The place of each rank in a mesh with axes of these lengths; ranks are consecutive, tp innermost."""
    return dict(zip(ranks, itertools.starmap(Place, itertools.product(*map(range, lengths))), strict=True))


def _order_of(places: Mapping[int, Place]) -> tuple[str, ...]:
    """The axes, outermost first, in whose row-major order the ranks ascend. Raises ValueError if there is no such order."""
    for axes in itertools.permutations(Place._fields):
        if sorted(places, key=lambda rank: [getattr(places[rank], axis) for axis in axes]) == sorted(places):
            return axes
    raise ValueError(
        "the mpu does not order its ranks row by row ("
        + ", ".join(f"rank {rank}: data {place.batch} model {place.tp}" for rank, place in sorted(places.items()))
        + "): consecutive ranks must ascend along one of the two, and then along the other"
    )


def nearest_sizes(num_ranks: int, pp: int, sp: int, tp: int) -> dict[str, int]:
    """The axis sizes with which a model fits on `num_ranks` ranks: none larger than given, else the largest, tp first."""
    sizes = itertools.product(range(1, pp + 1), range(1, sp + 1), range(1, tp + 1))
    *_, nearest = max((math.prod(each), each[2], each[0], each) for each in sizes if num_ranks % math.prod(each) == 0)
    return dict(zip(("pp", "sp", "tp"), nearest, strict=True))


def nearest_divisor(number: int, size: int) -> int:
    """The largest divisor of a number that is at most `size`."""
    return max(each for each in range(1, min(number, size) + 1) if number % each == 0)


def build_mesh(
    *,
    pp: int = 1,
    sp: int = 1,
    tp: int = 1,
    shard_size: int | None = None,
    group_size: int | None = None,
    is_apart: bool = False,
    group: Any = None,
    places: Mapping[int, Place] | None = None,
) -> Mesh:
    """Build the mesh over `group` (default: all ranks) with the dense family.

    pp, sp, tp  the sizes of these axes. The ranks of an axis are consecutive, tp innermost; or their places are `places`
    shard_size  (MiCS) shard only over this many consecutive ranks of a stage
    group_size  (ZeRO++) this many consecutive shards are a group
    is_apart    the ranks that share states, over all stages, are a replica that trains on its own

    Collective over the whole world if an axis has several ranks but not all, because it creates process groups. Raises ValueError
    if a size does not divide the number of ranks.
    """
    if not dist.is_initialized():
        ranks, rank, group = [0], 0, None
    else:
        group = group if group is not None else dist.group.WORLD
        ranks, rank = dist.get_process_group_ranks(group), dist.get_rank()
    if len(ranks) % (pp * sp * tp):
        nearest = " x ".join(f"{axis} {size}" for axis, size in nearest_sizes(len(ranks), pp, sp, tp).items())
        raise ValueError(f"pp ({pp}) x sp ({sp}) x tp ({tp}) does not divide the number of ranks ({len(ranks)}); use {nearest}")
    if places is None:
        places = place_ranks(ranks, Place(pp, len(ranks) // (pp * sp * tp), sp, tp))
    _check_shards(len(ranks) // pp, shard_size)
    order = _order_of(places)
    groups = _Groups(rank, list(places), group if len(ranks) > 1 else None)
    axes: dict[str, Axis] = {}
    for i, name in enumerate(Place._fields):
        lines: dict[tuple[int, ...], list[int]] = {}
        for each, place in places.items():
            lines.setdefault((*place[:i], *place[i + 1 :]), []).append(each)
        axes[name] = groups.axis(name, list(lines.values()))
    world = groups.axis("world", [list(places)])
    mesh = Mesh(
        rank,
        world,
        world,
        **axes,
        places=places,
        order=order,
        families={},
        shard_size=shard_size,
        group_size=group_size,
        is_apart=is_apart,
        groups=groups,
    )
    mesh = replace(mesh, replica=mesh._replica())
    return replace(mesh, families={(): mesh._family(())})


def _check_shards(size: int, shard_size: int | None) -> None:
    if shard_size is not None and size % shard_size:
        raise ValueError(
            f"zero_optimization.mics_shard_size ({shard_size}) does not divide the data-parallel size ({size}); "
            + (f"use {nearest_divisor(size, shard_size)}" if dist.is_initialized() else "start with `slipstream run`")
        )


def _columns(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*rows, strict=True)]

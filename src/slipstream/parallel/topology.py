"""DeepSpeed's view of the mesh: coordinates of ranks on named axes, and the groups of a pipeline.

`ProcessTopology` is pure. `PipelineParallelGrid` has process groups: those of the engine's `Mesh` if given, else its own. It is a
Megatron `mpu`: its model-parallel group has the ranks of one replica of the model (pipe x model); Megatron's tensor-parallel
group is called slice-parallel here.
"""

from __future__ import annotations

import itertools
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist


class ProcessTopology:
    """Ranks on a grid with named axes, row-major: neighbors on the last axis have consecutive ranks.

    mapping  coordinates (`ProcessCoord`, a named tuple) -> rank
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes, self.dims = list(axes), list(dims)
        self.ProcessCoord: Any = namedtuple("ProcessCoord", self.axes)  # type: ignore[misc]
        coords = itertools.starmap(self.ProcessCoord, itertools.product(*map(range, self.dims)))
        self.mapping: dict[Any, int] = {coord: rank for rank, coord in enumerate(coords)}

    def get_rank(self, **coord: int) -> int:
        """The rank at a coordinate. Raises ValueError unless all axes are given and the coordinate is in the grid."""
        if len(coord) != len(self.axes):
            raise ValueError(f"get_rank() needs a coordinate for each of the axes {self.axes}, not a slice; use filter_match()")
        key = self.ProcessCoord(**coord)
        if key not in self.mapping:
            raise ValueError(f"{key} is outside of the topology {self.sizes}")
        return self.mapping[key]

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(self.axes, self.dims, strict=True))

    def get_axis_names(self) -> list[str]:
        return self.axes

    def get_rank_repr(
        self, rank: int, omit_axes: Iterable[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """A rank's coordinate as part of a file name: 'model_01'."""
        omitted, coord = set(omit_axes), self.get_coord(rank)
        places = zip(self.axes, coord, strict=True)
        return outer_sep.join(f"{axis}{inner_sep}{place:02d}" for axis, place in places if axis not in omitted)

    def get_dim(self, axis: str) -> int:
        """The number of ranks on an axis; 0 for an unknown axis."""
        return self.sizes.get(axis, 0)

    def get_coord(self, rank: int) -> Any:
        """The coordinate of a rank. Raises ValueError for a rank outside of the grid."""
        for coord, other in self.mapping.items():
            if other == rank:
                return coord
        raise ValueError(f"rank {rank} is outside of the topology {self.sizes}, which has {self.world_size()} ranks")

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """The groups of ranks that differ on `axis` only, in the order of the other axes; none for an unknown axis."""
        if axis not in self.axes:
            return []
        groups: dict[tuple[int, ...], list[int]] = {}
        place = self.axes.index(axis)
        for coord, rank in self.mapping.items():
            groups.setdefault((*coord[:place], *coord[place + 1 :]), []).append(rank)
        return list(groups.values())

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """The ranks with the given coordinates on the given axes."""
        wanted = filter_kwargs.items()
        return [rank for coord, rank in self.mapping.items() if all(getattr(coord, axis) == place for axis, place in wanted)]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        return len(self.mapping)

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """Pipelines of `num_pp` stages, `num_dp` of them. The ranks of one stage are consecutive."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data"], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Pipelines whose stages are sliced over `num_mp` consecutive ranks."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])


def topology_of(mesh: Any) -> ProcessTopology:
    """The mesh under DeepSpeed's names. Sequence ranks are an axis of their own only if there are several."""
    names = {"pp": "pipe", "batch": "data", "sp": "sequence", "tp": "model"}
    sizes = {names[axis]: getattr(mesh, axis).size for axis in mesh.order}
    kept = {name: size for name, size in sizes.items() if size > 1 or name in ("pipe", "data")}
    return ProcessTopology(list(kept), list(kept.values()))


def check_places(topology: ProcessTopology, mesh: Any) -> None:
    """Raise ValueError unless the mesh has each rank at its place in the topology."""
    theirs, own = topology.sizes, topology_of(mesh).sizes
    count = topology.world_size()
    coords = [topology.get_coord(i)._asdict() for i in range(count)] if count == mesh.world.size else []
    places = [(coord.get("pipe", 0), coord.get("data", 0), coord.get("model", 0)) for coord in coords]
    if places != [(at.pp, at.batch * mesh.sp.size + at.sp, at.tp) for _, at in sorted(mesh.places.items())]:
        raise ValueError(
            f"the module's topology has {theirs}, and the engine's ranks are {own}, in this order: build the module with "
            f"num_stages={mesh.pp.size}, or with PipeModelDataParallelTopology(num_pp={mesh.pp.size}, num_mp={mesh.tp.size}, "
            f"num_dp={mesh.batch.size * mesh.sp.size})"
        )


def value_of(name: str) -> Callable[[Any], Any]:
    return lambda self: getattr(self, name)


class PipelineParallelGrid:
    """The place of this rank in a topology, with process groups, under the names of Megatron's and DeepSpeed's `mpu`.

    topology       default: the mesh's; without either, prime factors of the number of ranks go to pipe and data in turn
    process_group  its ranks are the topology's, in order; default: all ranks
    mesh           its process groups are used, and only missing ones are made

    Collective over all ranks, because it makes process groups. Raises ValueError if the topology has another number of ranks.
    """

    def __init__(self, topology: ProcessTopology | None = None, process_group: Any = None, *, mesh: Any = None) -> None:
        self.ranks = _ranks(process_group, mesh)
        self.world_size = len(self.ranks)
        self.global_rank = dist.get_rank() if dist.is_initialized() else 0
        if topology is None:
            topology = topology_of(mesh) if mesh is not None else _balanced(self.world_size)
        self._topo = topology
        if topology.world_size() != self.world_size:
            raise ValueError(f"the topology {topology.sizes} has {topology.world_size()} ranks, and there are {self.world_size}")
        self.data_parallel_size = max(topology.get_dim("data"), 1)
        self.pipe_parallel_size = max(topology.get_dim("pipe"), 1)
        self.model_parallel_size = self.slice_parallel_size = max(topology.get_dim("model"), 1)
        self._own: dict[str, int] = topology.get_coord(self.ranks.index(self.global_rank))._asdict()
        self.stage_id, self.data_parallel_id, self.slice_parallel_id = (
            self._own.get(axis, 0) for axis in ("pipe", "data", "model")
        )
        self.is_first_stage, self.is_last_stage = self.stage_id == 0, self.stage_id == self.pipe_parallel_size - 1
        self._groups = _known_groups(mesh)

        replicas = self._global(topology.get_axis_list("data", i) for i in range(topology.get_dim("data"))) or [self.ranks]
        self.dp_groups, self.pipe_groups, self.model_groups = map(self._lists, ("data", "pipe", "model"))
        self.p2p_groups = self._build_p2p_groups()
        self.ds_model_group, self.ds_model_proc_group = self._join(replicas)
        self.dp_group, self.dp_proc_group = self._join(self.dp_groups)
        self.pp_group, self.pp_proc_group = self._join(self.pipe_groups)
        self.slice_group, self.slice_proc_group = self._join(self.model_groups)
        self.ds_model_rank, self.ds_model_world_size = self.ds_model_group.index(self.global_rank), len(self.ds_model_group)

    def _global(self, groups: Iterable[Sequence[int]]) -> list[list[int]]:
        return [[self.ranks[place] for place in group] for group in groups]

    def _lists(self, axis: str) -> list[list[int]]:
        return self._global(self._topo.get_axis_comm_lists(axis)) or [[rank] for rank in self.ranks]

    def _join(self, groups: Sequence[Sequence[int]]) -> tuple[list[int], Any]:
        """This rank's group among `groups`, which partition the ranks. Every rank makes the same groups, each once."""
        own = next(list(ranks) for ranks in groups if self.global_rank in ranks)
        if dist.is_initialized() and tuple(own) not in self._groups:
            for ranks in groups:
                self._groups[tuple(ranks)] = dist.new_group(list(ranks))
        return own, self._groups.get(tuple(own))

    def _build_p2p_groups(self) -> list[list[int]]:
        """Pairs of every rank and its successor in the pipeline; the last stage's successor is the first."""
        following: dict[int, list[int]] = {}
        for ranks in self.pipe_groups:
            following |= {rank: [rank, ranks[(i + 1) % len(ranks)]] for i, rank in enumerate(ranks)}
        return [following[rank] for rank in self.ranks]

    def stage_to_global(self, stage_id: int, **coord: int) -> int:
        """The rank of a stage with this rank's other coordinates, or the given ones."""
        return self.ranks[self._topo.get_rank(**(self._own | {"pipe": stage_id} | coord))]

    topology = value_of("_topo")
    get_global_rank = value_of("global_rank")
    get_stage_id = value_of("stage_id")
    get_pipe_parallel_rank = value_of("stage_id")
    get_pipe_parallel_world_size = value_of("pipe_parallel_size")
    get_pipe_parallel_group = value_of("pp_proc_group")  # the stages of one pipeline
    get_data_parallel_id = value_of("data_parallel_id")
    get_data_parallel_rank = value_of("data_parallel_id")
    get_data_parallel_world_size = value_of("data_parallel_size")
    get_data_parallel_group = value_of("dp_proc_group")  # the ranks that hold the same parameters
    get_data_parallel_group_ranks = value_of("dp_group")
    get_model_parallel_rank = value_of("ds_model_rank")  # in the group of one replica of the model: all its stages and slices
    get_model_parallel_world_size = value_of("ds_model_world_size")
    get_model_parallel_group = value_of("ds_model_proc_group")
    get_slice_parallel_rank = value_of("slice_parallel_id")  # among the ranks that share each layer of a stage
    get_slice_parallel_world_size = value_of("slice_parallel_size")
    get_slice_parallel_group = value_of("slice_proc_group")
    get_pipeline_model_parallel_rank = get_pipe_parallel_rank
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size
    get_pipeline_model_parallel_group = get_pipe_parallel_group
    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size
    get_tensor_model_parallel_group = get_slice_parallel_group


def _ranks(process_group: Any, mesh: Any) -> list[int]:
    if mesh is not None:
        return list(mesh.world.ranks)
    return dist.get_process_group_ranks(process_group or dist.group.WORLD) if dist.is_initialized() else [0]


def _known_groups(mesh: Any) -> dict[tuple[int, ...], Any]:
    axes = (mesh.world, mesh.pp, mesh.batch, mesh.tp) if mesh is not None else ()
    known: Mapping[tuple[int, ...], Any] = {axis.ranks: axis.group for axis in axes if axis.group is not None}
    if not known and dist.is_initialized():
        known = {tuple(range(dist.get_world_size())): dist.group.WORLD}
    return dict(known)


def _balanced(world_size: int) -> ProcessTopology:
    primes = _prime_factors(world_size)
    num_pp, num_dp = 1, 1
    for i, prime in enumerate(primes):
        num_pp, num_dp = (num_pp * prime, num_dp) if i % 2 == 0 else (num_pp, num_dp * prime)
    return PipeDataParallelTopology(num_pp, num_dp)


def _prime_factors(number: int) -> list[int]:
    if number <= 0:
        raise ValueError(f"only positive numbers have prime factors, not {number}")
    primes, candidate = [], 2
    while number > 1:
        while number % candidate == 0:
            primes.append(candidate)
            number //= candidate
        candidate += 1
    return primes

"""The user's own model parallelism, by Megatron's contract: an object that knows the groups, and marked parameters.

Each rank of the model-parallel group holds another part, along `partition_dim` (default 0), of a parameter with a true
`tensor_model_parallel` or `model_parallel`. All others are copies: each rank of the group computes the same gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from slipstream.world.mesh import Axis, Place, gather_objects
from slipstream.zero.leaves import mark_part, parts_of

_TENSOR = ("tensor_model_parallel", "slice_parallel", "model_parallel")  # the first one that an mpu has counts
_STAGES = ("pipeline_model_parallel", "pipe_parallel")
MARKS = ("tensor_model_parallel", "model_parallel")


class MpuLayout(NamedTuple):
    """The ranks of an engine: its process group (None: all), and the sizes of its axes that an mpu or mesh_param states."""

    group: Any
    sizes: Mapping[str, int]


def layout_of(mpu: Any, mesh_param: Sequence[int] | None = None) -> MpuLayout:
    """The layout of an mpu, or of DeepSpeed's mesh_param. Without model parallelism, each data-parallel group gets an engine.

    Raises ValueError for pipeline stages, and for a mesh_param that is not (data-parallel size, sequence-parallel size).
    """
    if mesh_param is not None:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if mpu is not None or len(mesh_param) != 2 or mesh_param[0] * mesh_param[1] != ranks:
            raise ValueError(
                f"mesh_param {tuple(mesh_param)} must be (data-parallel, sequence-parallel size) of {ranks} ranks, without mpu"
            )
        return MpuLayout(None, {"sp": mesh_param[1]})
    if mpu is None:
        return MpuLayout(None, {})
    if (stages := _ask(mpu, _STAGES, "world_size", 1)) > 1:
        raise ValueError(
            f"mpu has {stages} pipeline stages: an engine does not run a schedule that is not its own. Pass a PipelineModule, or a "
            "model of transformers with slipstream.mesh.pp, and no mpu"
        )
    size, shared = _ask(mpu, _TENSOR, "world_size", 1), _ask(mpu, ("sequence_parallel",), "world_size", 1)
    if shared > 1:
        if size > 1:
            raise ValueError(f"mpu has {shared} sequence and {size} tensor ranks: pass sizes in slipstream.mesh instead of an mpu")
        return MpuLayout(None, {"sp": shared})  # consecutive ranks, as on the mesh
    return MpuLayout(None, {"tp": size}) if size > 1 else MpuLayout(mpu.get_data_parallel_group(), {})


def places_of(mpu: Any) -> Mapping[int, Place] | None:
    """The places of all ranks, in row-major order, by an mpu with slices of layers; None if it has none.

    Collective over the world if the mpu has model-parallel groups. Raises ValueError if the groups do not form a grid.
    """
    if mpu is None or (size := _ask(mpu, _TENSOR, "world_size", 1)) == 1:
        return None
    own = (mpu.get_data_parallel_rank(), _ask(mpu, _TENSOR, "rank", 0), size)
    every = gather_objects(own)
    places = {rank: Place(0, data, 0, tensor) for rank, (data, tensor, _) in enumerate(every)}
    sizes = {each[2] for each in every}
    if (
        len(sizes) > 1
        or len(set(places.values())) < len(every)
        or len({place.batch for place in places.values()}) * size != len(every)
    ):
        raise ValueError(
            f"mpu: the data-parallel and model-parallel ranks of the {len(every)} ranks are no grid: "
            + ", ".join(f"rank {rank}: data {data} model {tensor} of {of}" for rank, (data, tensor, of) in enumerate(every))
        )
    return dict(sorted(places.items(), key=lambda item: item[1]))


def tensor_rank(mpu: Any) -> int:
    """This rank's index among the ranks that hold slices of the same layers."""
    rank: int = _ask(mpu, _TENSOR, "rank", 0)
    return rank


def _has_mark(param: Tensor) -> bool:
    return any(getattr(param, mark, False) for mark in MARKS)


def is_marked(model: nn.Module) -> bool:
    """Whether the user has sliced layers of the model. An mpu without such layers only says which ranks share a replica."""
    return any(map(_has_mark, model.parameters()))


def mark_marked(model: nn.Module, axis: Axis) -> None:
    """Mark the parameters that are parts by Megatron's attributes. Raises ValueError if they do not fit."""
    for name, param in model.named_parameters():
        if _has_mark(param) and not parts_of(param):
            dim = max(getattr(param, "partition_dim", 0), 0)  # -1: not set
            try:
                mark_part(param, "tp", axis.size, dim)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None


def _ask(mpu: Any, kinds: tuple[str, ...], what: str, default: int) -> int:
    """The result of the first getter that the mpu has."""
    getters = (getattr(mpu, f"get_{kind}_{what}", None) for kind in kinds)
    return next((getter() for getter in getters if getter is not None), default)

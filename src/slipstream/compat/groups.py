"""`deepspeed.utils.groups`: the process groups of the engine that `deepspeed.initialize` created last; before that, groups of all
ranks.

An axis of one rank has a group of one rank, so a collective over it does nothing. `ep_size_N` names the expert layers that are
split over N ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist

from slipstream.compat.comm import get_rank, get_world_group, get_world_size
from slipstream.world.mesh import Axis, Mesh, build_mesh

_last: list[Mesh] = []  # no argument of DeepSpeed's functions identifies the engine
_names: list[str] = []  # names of the groups of its expert layers
_alone: dict[int, Any] = {}  # rank -> its group of one rank


def follow(mesh: Mesh, model: Any) -> None:
    """Make this module's functions use a mesh, and the group names of a model's expert layers."""
    _last[:] = [mesh]
    _names[:] = sorted({name for module in model.modules() if (name := getattr(module, "expert_group_name", None))})


def _mesh() -> Mesh:
    return _last[0] if _last else build_mesh()


def _group(axis: Axis) -> Any:
    if axis.group is not None or not dist.is_initialized():
        return axis.group
    if get_world_size() == 1:
        return get_world_group()
    rank = get_rank()
    if rank not in _alone:
        _alone[rank] = dist.new_group([rank], use_local_synchronization=True)
    return _alone[rank]


def _of_data_and_sequences() -> Axis:
    """The ranks over which samples and sequences are split."""
    mesh = _mesh()
    if mesh.sp.size == 1:
        return mesh.batch
    if mesh.tp.size > 1:
        raise ValueError("with tensor parallelism there is no group of the data- and sequence-parallel ranks; use engine.mesh")
    return mesh.dense.both


# -- experts --


class _ExpertGroups(NamedTuple):
    """The ranks that hold different experts, and those that hold the same ones."""

    parts: Axis
    copies: Axis


def _expert_families() -> dict[str, _ExpertGroups]:
    """DeepSpeed's name -> groups of experts. Experts that are not split are on every data-parallel rank."""
    found: dict[str, _ExpertGroups] = {}
    if "ep_size_1" in _names:
        found["ep_size_1"] = _ExpertGroups(Axis("ep", None, (get_rank(),), 0, 1), _of_data_and_sequences())
    families = _mesh().families
    for key in sorted(families, key=len, reverse=True):  # experts that are also sliced yield to others of the same size
        for split in key:
            if split.axis == "ep":
                found[f"ep_size_{split.size}"] = _ExpertGroups(families[key].parts_of(split), families[key].both)
    return found


def _experts(group_name: str) -> _ExpertGroups:
    families = _expert_families()
    if group_name not in families:
        raise AssertionError(f"no layer of experts has the group {group_name!r}; there are: {', '.join(families) or 'none'}")
    return families[group_name]


def _create_expert_and_data_parallel(expert_parallel_size_: int, *_: Any, **__: Any) -> None:
    """A no-op: `initialize` creates the groups. Raises ValueError if the ranks cannot be divided."""
    if get_world_size() % expert_parallel_size_:
        raise ValueError(f"experts cannot be split over {expert_parallel_size_} ranks each: there are {get_world_size()} ranks")


def _get_max_expert_size() -> int:
    """The largest number of ranks over which experts are split."""
    sizes = [each.parts.size for each in _expert_families().values()]
    assert sizes, "the model has no layer of experts"
    return max(sizes)


def _get_max_expert_size_name() -> str:
    return f"ep_size_{_get_max_expert_size()}"


def _get_max_expert_parallel_group() -> Any:
    return _group(_experts(_get_max_expert_size_name()).parts)


def _get_expert_model_parallel_world_size() -> int:
    """The number of slices of each expert."""
    return max((s.size for key in _mesh().families if any(e.axis == "ep" for e in key) for s in key if s.axis == "tp"), default=1)


# -- DeepSpeed's getters: a name's prefix selects the axis, its end the value --

_VALUES: Mapping[str, Callable[[Axis], Any]] = {
    "group": _group,
    "world_size": lambda axis: axis.size,
    "rank": lambda axis: axis.index,
    "group_ranks": lambda axis: list(axis.ranks),
    "src_rank": lambda axis: axis.ranks[0],
}
_AXES: Mapping[str, Callable[..., Axis]] = {
    "_get_data_parallel": lambda: _mesh().batch,
    "get_data_parallel": lambda: _mesh().batch,
    "_get_sequence_parallel": lambda: _mesh().sp,
    "_get_sequence_data_parallel": _of_data_and_sequences,
    "_get_model_parallel": lambda: _mesh().tp,
    "get_model_parallel": lambda: _mesh().tp,
    "get_tensor_model_parallel": lambda: _mesh().tp,
    "_get_expert_parallel": lambda group_name: _experts(group_name).parts,
    "_get_expert_data_parallel": lambda group_name: _experts(group_name).copies,
}


def _value(value: Callable[[Axis], Any], axis: Callable[..., Axis], *args: Any, **kwargs: Any) -> Any:
    return value(axis(*args, **kwargs))


globals().update(
    {f"{prefix}_{end}": partial(_value, value, axis) for prefix, axis in _AXES.items() for end, value in _VALUES.items()}
)


def _get_expert_parallel_group_dict() -> dict[str, Any]:
    return {name: _group(each.parts) for name, each in _expert_families().items()}


def _get_expert_data_parallel_group_dict() -> dict[str, Any]:
    return {name: _group(each.copies) for name, each in _expert_families().items()}


def _get_broadcast_src_rank() -> int:
    """The rank that broadcasts dense weights to the others of its group."""
    return _of_data_and_sequences().ranks[0]


def _get_expert_broadcast_src_rank(group_name: str) -> int:
    """The rank that broadcasts its experts to the ranks with the same ones."""
    return _experts(group_name).copies.ranks[0]

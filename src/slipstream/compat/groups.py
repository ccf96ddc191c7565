"""`deepspeed.utils.groups`: every rank is a data-parallel rank; there are no other axes yet."""

from __future__ import annotations

from typing import Any

from slipstream.compat.comm import get_rank, get_world_group, get_world_size


def _one() -> int:
    return 1


def _zero() -> int:
    return 0


def _get_sequence_parallel_group() -> Any:
    raise ValueError("sequence parallelism is not built yet, so it has no process group; set sequence_parallel_size to 1")


_get_data_parallel_group = get_data_parallel_group = _get_sequence_data_parallel_group = get_world_group
_get_data_parallel_world_size = get_data_parallel_world_size = _get_sequence_data_parallel_world_size = get_world_size
_get_data_parallel_rank = get_data_parallel_rank = _get_sequence_data_parallel_rank = get_rank
_get_model_parallel_world_size = get_model_parallel_world_size = get_tensor_model_parallel_world_size = _one
_get_sequence_parallel_world_size = _one
_get_sequence_parallel_rank = get_model_parallel_rank = get_tensor_model_parallel_rank = _zero

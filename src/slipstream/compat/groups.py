"""`deepspeed.utils.groups`: all ranks share the data; there are no other axes yet."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from slipstream.compat.comm import get_rank, get_world_size


def _get_data_parallel_group() -> Any:
    return dist.group.WORLD


def _get_data_parallel_world_size() -> int:
    return get_world_size()


def _get_data_parallel_rank() -> int:
    return get_rank()


def _get_model_parallel_world_size() -> int:
    return 1


def _get_sequence_parallel_group() -> Any:
    raise ValueError("sequence parallelism is not built yet, so there is no group of it; set sequence_parallel_size to 1")


def _get_sequence_parallel_world_size() -> int:
    return 1


def _get_sequence_parallel_rank() -> int:
    return 0


def _get_sequence_data_parallel_group() -> Any:
    return dist.group.WORLD


def _get_sequence_data_parallel_world_size() -> int:
    return get_world_size()


def _get_sequence_data_parallel_rank() -> int:
    return get_rank()


get_data_parallel_group = _get_data_parallel_group
get_data_parallel_world_size = _get_data_parallel_world_size
get_data_parallel_rank = _get_data_parallel_rank
get_model_parallel_world_size = get_tensor_model_parallel_world_size = _get_model_parallel_world_size
get_model_parallel_rank = get_tensor_model_parallel_rank = _get_sequence_parallel_rank

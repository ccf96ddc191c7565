"""`deepspeed.comm`: DeepSpeed's additions to torch.distributed; other names resolve to torch.distributed."""

from __future__ import annotations

import logging
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.world.join import init_distributed as _init_distributed
from slipstream.world.join import local_rank

get_local_rank = local_rank
logger = logging.getLogger(__name__)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int | None = None,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Call `slipstream.init_distributed`; `dist_backend=None` selects gloo on the CPU."""
    _init_distributed(**locals())  # same names, in another order
    _tell_accelerate()


def is_initialized() -> bool:
    _tell_accelerate()
    return dist.is_initialized()


def _tell_accelerate() -> None:
    """[Note: accelerate on CPUs] Without a GPU, accelerate sets no backend, and each rank runs as if it were the only one, even
    with its DeepSpeed plugin, unless the script names gloo; no setting outside the script helps. PartialState calls this module
    while it is being constructed, so the backend is set here. tests/clients/test_accelerate.py tests the attributes used here."""
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    shared: dict[str, Any] = getattr(state, "_shared_state", {})
    if dist.is_initialized() and "backend" in shared and shared["backend"] is None and "num_processes" not in shared:
        shared["backend"] = dist.get_backend()


is_available, new_group = dist.is_available, dist.new_group
inference_all_reduce, allgather_fn = dist.all_reduce, dist.all_gather_into_tensor


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    return dist.get_process_group_ranks(group)


def reduce_scatter_fn(
    output_tensor: Tensor, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    return dist.reduce_scatter_tensor(output_tensor, tensor, op=op, group=group, async_op=async_op)


def get_rank(group: Any = None) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_world_size(group: Any = None) -> int:
    return dist.get_world_size(group) if dist.is_initialized() else 1


def get_world_group() -> Any:
    return dist.group.WORLD


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def initialize_mesh_device(mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> Any:
    return dist.device_mesh.init_device_mesh(
        "cuda" if torch.cuda.is_available() else "cpu", mesh_shape, mesh_dim_names=mesh_dim_names
    )


def has_all_gather_into_tensor() -> bool:
    return True


has_reduce_scatter_tensor = has_all_gather_into_tensor


configured: dict[str, Any] = {}  # the comms_logger block for engines whose config has none


def configure(deepspeed_config: Any = None, enabled: bool | None = None, **options: Any) -> None:
    """Configure the communication log of engines that are initialized from now on. options: prof_all, prof_ops, verbose, debug."""
    block = deepspeed_config.get("comms_logger", {}) if isinstance(deepspeed_config, dict) else {}
    configured.clear()
    configured.update(block | {name: value for name, value in {"enabled": enabled, **options}.items() if value is not None})


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Write what the engines of this process have sent so far, on rank 0. Collective with `show_straggler`.

    Returns the figures of one engine with `return_dict`. Operations that a script calls itself are not included. If no engine has a
    log, a warning says how to get one.
    """
    from slipstream.compat.zero import traffic_of_engines

    logs = traffic_of_engines()
    if not logs:
        text = '"comms_logger": {"enabled": true}'
        logger.warning("deepspeed.comm.log_summary(): no engine has a log; set %s in its config", text)
    found = [log.log_summary(show_straggler) for log in logs] or [{}]
    return found[-1] if return_dict else None

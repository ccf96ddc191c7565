"""Meeting the other ranks: `init_distributed`, from whatever starter left its marks in the environment."""

from __future__ import annotations

import logging
import os
from datetime import timedelta

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)


def init_distributed(
    dist_backend: str | None = None,
    *,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
    auto_mpi_discovery: bool = True,
    distributed_port: int | None = None,
    verbose: bool = True,
    dist_init_required: bool | None = None,
    config: object = None,
) -> bool:
    """Join the process group if this process was started as one of several; safe to call twice.

    The backend is gloo on CPU, and gloo with NCCL on CUDA; gloo alone where more ranks than CUDA devices share the host,
    because NCCL takes one rank per device. Ranks come from the arguments, or from torchrun, Slurm, MPI or Kubernetes
    variables. Returns whether a group exists afterwards.

    The other keywords are DeepSpeed's: `auto_mpi_discovery=False` believes only torch's own variables (RANK, WORLD_SIZE),
    `distributed_port` is where the ranks meet unless MASTER_PORT is set, `verbose` logs how they met,
    `dist_init_required=False` joins nothing. Without `timeout`, DEEPSPEED_TIMEOUT says it, in minutes. `config` held settings of
    DeepSpeed's logger of collectives; nothing reads it.
    """
    if dist.is_initialized() or dist_init_required is False:
        return dist.is_initialized()
    from slipstream.discover import discover

    port = {} if distributed_port is None else {"MASTER_PORT": str(distributed_port)}
    believed = rank < 0 and (auto_mpi_discovery or "RANK" in os.environ)
    found = discover(port | dict(os.environ)) if believed else None
    if rank < 0 and found is None:
        return False
    os.environ.update(port | dict(os.environ) if found is None else found)
    dist.init_process_group(
        dist_backend or _backend(),
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=timeout or timedelta(minutes=int(os.environ.get("DEEPSPEED_TIMEOUT", "30"))),
    )
    if verbose and dist.get_rank() == 0:
        logger.info("%d ranks have met, by %s", dist.get_world_size(), dist.get_backend())
    return True


def _backend() -> str:
    if not torch.cuda.is_available():
        return "gloo"
    ranks, devices = local_world_size(), torch.cuda.device_count()
    if ranks > devices:
        logger.warning("%d ranks share %d CUDA devices, so they meet through gloo and the host's memory: slow", ranks, devices)
        return "gloo"
    return "cpu:gloo,cuda:nccl"


def local_rank() -> int:
    """This process's number on its host, as its starter says."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """How many ranks share this host, as their starter says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def local_device() -> torch.device:
    """This rank's device: its CUDA device where there is one, else the CPU."""
    if torch.cuda.is_available():
        index = local_rank() % torch.cuda.device_count()
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    return torch.device("cpu")

"""Meeting the other ranks: `init_distributed`, from whatever starter left its marks in the environment."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from typing import Any

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
    device: torch.device | None = None,
    **_: Any,
) -> bool:
    """Join the process group if this process was started as one of several; safe to call twice.

    The backend is gloo on CPU, and gloo with NCCL on CUDA; gloo alone where more ranks than CUDA devices share the host,
    because NCCL takes one rank per device. Ranks come from the arguments, or from torchrun, Slurm, MPI or Kubernetes
    variables. Returns whether a group exists afterwards.
    """
    if dist.is_initialized():
        return True
    from slipstream.discover import discover

    found = discover(os.environ) if rank < 0 else None
    if rank < 0 and found is None:
        return False
    if found is not None:
        os.environ.update(found)
    dist.init_process_group(
        dist_backend or _backend(),
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=timeout or timedelta(minutes=30),
    )
    return True


def _backend() -> str:
    if not torch.cuda.is_available():
        return "gloo"
    ranks, devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if ranks > devices:
        logger.warning("%d ranks share %d CUDA devices, so they meet through gloo and the host's memory: slow", ranks, devices)
        return "gloo"
    return "cpu:gloo,cuda:nccl"


def local_device() -> torch.device:
    """This rank's device: its CUDA device where there is one, else the CPU."""
    if torch.cuda.is_available():
        index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    return torch.device("cpu")

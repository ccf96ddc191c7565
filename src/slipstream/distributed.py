"""Meeting the other ranks: `init_distributed`, from whatever starter left its marks in the environment."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


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

    The backend is gloo on CPU, and gloo with NCCL on CUDA. Ranks come from the arguments, or from torchrun, Slurm, MPI or
    Kubernetes variables. Returns whether a group exists afterwards.
    """
    if dist.is_initialized():
        return True
    from slipstream.discover import discover

    found = discover(os.environ) if rank < 0 else None
    if rank < 0 and found is None:
        return False
    if found is not None:
        os.environ.update(found)
    backend = dist_backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    dist.init_process_group(
        backend, init_method=init_method, rank=rank, world_size=world_size, timeout=timeout or timedelta(minutes=30)
    )
    return True


def local_device() -> torch.device:
    """This rank's device: its CUDA device where there is one, else the CPU."""
    if torch.cuda.is_available():
        index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    return torch.device("cpu")

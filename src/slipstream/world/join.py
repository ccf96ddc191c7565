"""Join the process group: `init_distributed`, from the environment variables of any supported launcher."""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

_LAST_TRANSFERS = 0.02  # seconds; threads that wait for the interpreter's lock get it within microseconds


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
    """Join the process group if this process was started as one of several. Safe to call twice.

    The backend is gloo on CPU, and gloo with NCCL on CUDA; gloo alone if more ranks than CUDA devices share the host, because
    NCCL supports one rank per device. Rank and world size come from the arguments, or from the variables of torchrun, Slurm, MPI
    or Kubernetes. Returns whether a group exists afterwards.

    The other keywords are DeepSpeed's: `auto_mpi_discovery=False` reads only torch's own variables (RANK, WORLD_SIZE),
    `distributed_port` is the rendezvous port unless MASTER_PORT is set, `verbose` logs the result. `dist_init_required=False`
    joins nothing, and raises ValueError without a group if several ranks were started. The default of `timeout` is
    DEEPSPEED_TIMEOUT minutes, or 30. `config` has no effect (in DeepSpeed it configures the logging of collectives).
    """
    atexit.unregister(_let_transfers_end)
    atexit.register(_let_transfers_end)
    if dist.is_initialized():
        return True
    from slipstream.world.discover import discover

    port = {} if distributed_port is None else {"MASTER_PORT": str(distributed_port)}
    from_environment = rank < 0 and (auto_mpi_discovery or "RANK" in os.environ)
    place = discover(port | dict(os.environ)) if from_environment else None
    if dist_init_required is False:
        return _alone(place)
    if rank < 0 and place is None:
        return False
    os.environ.update(port | dict(os.environ) if place is None else place)
    dist.init_process_group(
        dist_backend or _backend(),
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=timeout or timedelta(minutes=int(os.environ.get("DEEPSPEED_TIMEOUT", "30"))),
    )
    if verbose and dist.get_rank() == 0:
        logger.info("process group of %d ranks initialized, backend %s", dist.get_world_size(), dist.get_backend())
    return True


def _alone(place: Mapping[str, str] | None) -> bool:
    if place is not None and (ranks := int(place["WORLD_SIZE"])) > 1:
        raise ValueError(
            f"dist_init_required=False, but there is no process group, so each of the {ranks} ranks would train alone: create the "
            "group first, or drop the argument"
        )
    return False


def _let_transfers_end() -> None:
    """Release the interpreter's lock for a moment, so that gloo's threads drop the tensors of the last transfers.

    A thread of torch's process group needs the lock for that. If the interpreter ends first, the thread ends in the middle of a
    destructor, which aborts the process (SIGABRT instead of the script's exit code).
    """
    if dist.is_initialized():
        time.sleep(_LAST_TRANSFERS)


def _backend() -> str:
    if not torch.cuda.is_available():
        return "gloo"
    ranks, devices = local_world_size(), torch.cuda.device_count()
    if ranks > devices:
        logger.warning("%d ranks share %d CUDA devices, so they communicate slowly, by gloo through host memory", ranks, devices)
        return "gloo"
    return "cpu:gloo,cuda:nccl"


def local_rank() -> int:
    """This process's index on its host, from LOCAL_RANK."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """The number of ranks on this host, from LOCAL_WORLD_SIZE."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def local_device() -> torch.device:
    """This rank's CUDA device, or the CPU if CUDA is unavailable."""
    if torch.cuda.is_available():
        index = local_rank() % torch.cuda.device_count()
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    return torch.device("cpu")

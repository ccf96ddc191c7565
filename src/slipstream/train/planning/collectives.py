"""Measured times of collectives between the ranks of a job: torch's over gloo or NCCL, and those of shared memory.

Sizes are of the whole buffer, in bytes: an all-gather's output, a reduce-scatter's input. *algbw* is size / time, *busbw* is the
bandwidth that each link must have had, as defined by NVIDIA's nccl-tests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from slipstream.world.join import local_device
from slipstream.world.mesh import build_mesh
from slipstream.world.watch import Watch
from slipstream.zero.comm import Buffer, newest
from slipstream.zero.shared import SharedComm, hosts_agree

# busbw / algbw, as a function of the number of ranks
OPERATIONS: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "send_recv": lambda n: 1.0,
}
_MOST = 200  # repetitions


class Rate(NamedTuple):
    """The mean time of one operation on the slowest rank."""

    transport: str
    operation: str
    nbytes: int
    seconds: float
    algbw: float  # bytes per second
    busbw: float


def _of_torch(numel: int, rank: int, world: int, device: torch.device) -> dict[str, Callable[[], Any]]:
    whole, other = torch.zeros(numel, device=device), torch.empty(numel, device=device)
    shard = torch.zeros(numel // world, device=device)

    def send_recv() -> None:
        ways = [dist.P2POp(dist.isend, whole, (rank + 1) % world), dist.P2POp(dist.irecv, other, (rank - 1) % world)]
        for work in dist.batch_isend_irecv(ways):
            work.wait()

    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: newest("all_gather_single", "all_gather_into_tensor")(whole, shard),
        "reduce_scatter": lambda: newest("reduce_scatter_single", "reduce_scatter_tensor")(shard, whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "reduce": lambda: dist.reduce(whole, 0),
        "send_recv": send_recv,
    }


def _of_shared(comm: SharedComm, buffer: Buffer) -> dict[str, Callable[[], Any]]:
    numel = buffer.tensor.numel()
    cuts = [numel // comm.size * i for i in range(comm.size + 1)]
    shard = torch.zeros(numel // comm.size)

    def all_gather() -> None:
        comm.all_gather(buffer, cuts).wait()
        comm.reusable(buffer)

    def reduce_scatter() -> None:
        comm.reduce_scatter(buffer, cuts, shard, alpha=1.0, accumulate=False).wait()
        comm.reusable(buffer)

    return {"all_gather": all_gather, "reduce_scatter": reduce_scatter}


def _timed(operation: Callable[[], Any], seconds: float, device: torch.device) -> float:
    """Seconds per call on the slowest rank. The first call warms up; the second determines how many calls fit into `seconds`."""

    def run(times: int) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(times):
            operation()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        slowest = torch.tensor([(time.perf_counter() - start) / times], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item()

    run(1)
    return run(min(_MOST, max(1, round(seconds / run(1)))))


def measure(sizes: Sequence[int], operations: Sequence[str], seconds: float) -> Iterator[Rate]:
    """Time each operation at each size (bytes; fp32) for about `seconds`. Collective over all ranks; equal on all of them.

    gloo is measured with tensors on the CPU, because it crashes on GPU memory, and then shared memory too, if all ranks are on one
    host.
    """
    device, world, axis = local_device(), dist.get_world_size(), build_mesh().world
    numels = [max(1, nbytes // 4 // world) * world for nbytes in sizes]
    name = "nccl" if device.type == "cuda" and "nccl" in dist.get_backend() else str(dist.get_backend())
    device = device if name == "nccl" else torch.device("cpu")

    def rate(transport: str, operation: str, numel: int, call: Callable[[], Any]) -> Rate:
        took, nbytes = _timed(call, seconds, device), numel * 4
        return Rate(transport, operation, nbytes, took, nbytes / took, nbytes / took * OPERATIONS[operation](world))

    for operation in operations:
        for numel in numels:
            yield rate(name, operation, numel, _of_torch(numel, axis.index, world, device)[operation])
    if device.type == "cpu" and hosts_agree(axis):
        comm = SharedComm(axis, Watch(1800.0))
        buffers = comm.allocate([(numel, torch.float32) for numel in numels])
        for operation in ("all_gather", "reduce_scatter"):
            for numel, buffer in zip(numels, buffers if operation in operations else [], strict=operation in operations):
                yield rate("shared memory", operation, numel, _of_shared(comm, buffer)[operation])
        comm.close()

"""Discover rank, world size and rendezvous address from the environment variables of the launcher. Pure.

Supported, in this order: torchrun and Kubernetes operators (RANK), Open MPI, MVAPICH2, a Slurm step, and PMI (MPICH, Intel
MPI). The first that sets a rank decides, so torchrun inside `srun` counts as torchrun.

If each node starts its own ranks, `node` reads torchrun's PET_* variables (Kubernetes), SkyPilot's, SageMaker's, or those of a
Slurm step with one task per node. Azure ML and SageMaker name the host of rank 0 for MPI.

A Slurm *batch script* also has SLURM_PROCID=0 and SLURM_NTASKS=n although it is a single process. So Slurm's variables count only
in a step, which `srun` starts and marks with SLURM_STEP_ID.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["Node", "discover", "node", "ranks_per_node", "slurm_hosts"]


class _Starter(NamedTuple):
    name: str
    rank: str
    world: str
    local_rank: str
    local_world: str
    job: tuple[str, ...]  # variables that are equal on all ranks of a job, and different between jobs


_SLURM_STEP = ("SLURM_JOB_ID", "SLURM_STEP_ID")


def _mpi(name: str, prefix: str, job: str) -> _Starter:
    return _Starter(name, f"{prefix}_RANK", f"{prefix}_SIZE", f"{prefix}_LOCAL_RANK", f"{prefix}_LOCAL_SIZE", (job,))


_STARTERS = (
    _mpi("Open MPI", "OMPI_COMM_WORLD", "PMIX_NAMESPACE"),
    _mpi("MVAPICH2", "MV2_COMM_WORLD", "PMI_ID"),
    _Starter("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", _SLURM_STEP),
    _Starter("PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ("HYDI_CONTROL_FD",)),
)


def slurm_hosts(text: str) -> list[str]:
    """`node[01-03,07],gpu5` -> [node01, node02, node03, node07, gpu5]."""
    hosts: list[str] = []
    for entry in re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*", text):
        names = [""]
        for literal, ranges in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", entry):
            if literal:
                names = [name + literal for name in names]
                continue
            numbers: list[str] = []
            for part in ranges.split(","):
                low, _, high = part.partition("-")
                numbers += [str(n).zfill(len(low)) for n in range(int(low), int(high or low) + 1)]
            names = [name + number for name in names for number in numbers]
        hosts += names
    return hosts


def _port(env: Mapping[str, str], job: tuple[str, ...]) -> str:
    """A port outside the kernel's ephemeral range, which all ranks of a job derive from the same values."""
    return str(20_000 + zlib.crc32(".".join(env.get(name, "") for name in job).encode()) % 10_000)


def _local_world(text: str, node_id: int) -> str | None:
    """The local world size from a count, or from Slurm's run-length form `4(x2),3` of counts per node."""
    counts: list[str] = []
    for count, _, times in re.findall(r"(\d+)(\(x(\d+)\))?", text):
        counts += [count] * int(times or 1)
    return counts[min(node_id, len(counts) - 1)] if counts else None


def _number(env: Mapping[str, str], name: str, starter: str) -> int:
    if name not in env:
        raise ValueError(f"{starter} set a rank but not {name}; set RANK, WORLD_SIZE, LOCAL_RANK yourself, or use `slipstream run`")
    if not env[name].isdigit():
        raise ValueError(f"{name}={env[name]!r} ({starter}) is not a number")
    return int(env[name])


def _named_master(env: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Address and port of rank 0, as far as the user or a cloud specifies them."""
    if "MASTER_ADDR" in env:
        return env["MASTER_ADDR"], env.get("MASTER_PORT")
    for name in ("AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE"):  # Azure ML: ip:port, or ip
        if name in env:
            address, _, port = env[name].partition(":")
            return address, env.get("MASTER_PORT") or port
    return _sagemaker_hosts(env)[0] if "SM_HOSTS" in env else None, env.get("MASTER_PORT")


def _rendezvous(env: Mapping[str, str], starter: _Starter, single_host: bool) -> dict[str, str]:
    address, port = _named_master(env)
    if address is None and starter.name == "Slurm":
        hosts = slurm_hosts(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "")
        address = hosts[0] if hosts else None
    if address is None and single_host:
        address = "127.0.0.1"
    if address is None:
        raise ValueError(
            f"{starter.name} does not publish rank 0's address: set MASTER_ADDR to the first host's name (mpirun -x "
            "MASTER_ADDR=host1, mpiexec -genv MASTER_ADDR host1), or use `slipstream run --hostfile`"
        )
    return {"MASTER_ADDR": address, "MASTER_PORT": port or _port(env, starter.job)}


def _sagemaker_hosts(env: Mapping[str, str]) -> list[str]:
    try:
        hosts = json.loads(env["SM_HOSTS"])
    except ValueError:
        hosts = None
    if not isinstance(hosts, list) or not hosts or not all(isinstance(host, str) for host in hosts):
        raise ValueError(f"SM_HOSTS={env['SM_HOSTS']!r} (SageMaker) is not a JSON list of hosts; set MASTER_ADDR")
    return sorted(hosts)


def discover(env: Mapping[str, str]) -> dict[str, str] | None:
    """Return torch.distributed's variables: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and, if known, LOCAL_WORLD_SIZE.

    Returns None if no launcher started this process as one of several. If RANK and WORLD_SIZE are set, returns those of the
    variables that are set, unchanged. Raises ValueError if a launcher's variables are incomplete.
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        # torch's own names: a missing variable may be intended (an init_method needs no MASTER_ADDR)
        names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        place = {name: str(_number(env, name, "the environment")) for name in ("RANK", "WORLD_SIZE")}
        return place | {name: env[name] for name in names if name in env}
    for starter in _STARTERS:
        if starter.rank not in env or (starter.name == "Slurm" and "SLURM_STEP_ID" not in env):
            continue
        rank, world = _number(env, starter.rank, starter.name), _number(env, starter.world, starter.name)
        local_world = _local_world(env.get(starter.local_world, ""), int(env.get("SLURM_NODEID", "0")))
        if starter.local_rank not in env and world > 1:
            raise ValueError(f"{starter.name} set {starter.rank} but not {starter.local_rank}; set LOCAL_RANK, RANK and WORLD_SIZE")
        place = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": env.get(starter.local_rank, "0")}
        if local_world is not None:
            place["LOCAL_WORLD_SIZE"] = local_world
        return place | _rendezvous(env, starter, single_host=local_world == str(world) or world == 1)
    return None


class Node(NamedTuple):
    """This node's position among several, each of which starts its own ranks."""

    num_nodes: int
    node_rank: int
    master_addr: str | None
    master_port: int | None


def node(env: Mapping[str, str]) -> Node | None:
    """Return this node's position if a scheduler runs one `slipstream run` per node, else None. Raises ValueError for contradictory
    variables."""
    for place in (_of_torchrun, _of_skypilot, _of_sagemaker, _of_slurm):
        if (position := place(env)) is not None:
            return position
    return None


def _of_torchrun(env: Mapping[str, str]) -> Node | None:
    if "PET_NNODES" not in env or "PET_NODE_RANK" not in env:
        return None
    port = env.get("PET_MASTER_PORT") or env.get("MASTER_PORT")
    return Node(
        num_nodes=_number(env, "PET_NNODES", "the scheduler"),
        node_rank=_number(env, "PET_NODE_RANK", "the scheduler"),
        master_addr=env.get("PET_MASTER_ADDR") or env.get("MASTER_ADDR"),
        master_port=int(port) if port else None,
    )


def _of_skypilot(env: Mapping[str, str]) -> Node | None:
    if "SKYPILOT_NODE_IPS" not in env or "SKYPILOT_NODE_RANK" not in env:
        return None
    rank = _number(env, "SKYPILOT_NODE_RANK", "SkyPilot")
    return _among(env["SKYPILOT_NODE_IPS"].split(), rank, int(_port(env, ("SKYPILOT_TASK_ID",))))


def _of_sagemaker(env: Mapping[str, str]) -> Node | None:
    if "SM_HOSTS" not in env or "SM_CURRENT_HOST" not in env:
        return None
    hosts, own = _sagemaker_hosts(env), env["SM_CURRENT_HOST"]
    if own not in hosts:
        raise ValueError(f"SM_CURRENT_HOST={own!r} is not among SM_HOSTS={env['SM_HOSTS']}; use --node_rank and --master_addr")
    return _among(hosts, hosts.index(own), None)


def _of_slurm(env: Mapping[str, str]) -> Node | None:
    hosts = slurm_hosts(env.get("SLURM_STEP_NODELIST", ""))
    one_task_each = len(hosts) > 1 and env.get("SLURM_STEP_NUM_TASKS", "1") == str(len(hosts)) and env.get("SLURM_LOCALID") == "0"
    if "SLURM_STEP_ID" not in env or "RANK" in env or not one_task_each:
        return None
    return Node(
        num_nodes=len(hosts),
        node_rank=_number(env, "SLURM_NODEID", "Slurm"),
        master_addr=env.get("MASTER_ADDR") or hosts[0],
        master_port=int(env.get("MASTER_PORT") or _port(env, _SLURM_STEP)),
    )


def _among(hosts: list[str], node_rank: int, port: int | None) -> Node | None:
    return Node(len(hosts), node_rank, hosts[0], port) if len(hosts) > 1 else None


def ranks_per_node(env: Mapping[str, str]) -> int | None:
    """The number of ranks per node that a Kubernetes operator asks for (PET_NPROC_PER_NODE); None: one per device."""
    asked = env.get("PET_NPROC_PER_NODE", "auto")
    if asked in ("auto", "gpu"):
        return None
    if not asked.isdecimal() or asked == "0":
        raise ValueError(f"PET_NPROC_PER_NODE={asked!r} is not a number of ranks, auto or gpu; pass --nproc")
    return int(asked)

"""Which cores of a host each rank runs on (`--bind-cores-to-rank`). No torch: a rank binds itself before it loads threads.

A *core* is a tuple of CPU numbers, its hardware threads. Cores are ordered by NUMA node, and a rank gets neighboring cores, so that
it stays on one node if the numbers allow.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

Core = tuple[int, ...]
_SYSTEM = Path("/sys/devices/system")


def parse_list(text: str) -> tuple[int, ...]:
    """`0-3,8` -> (0, 1, 2, 3, 8). Raises ValueError for any other text, and for a CPU that occurs twice."""
    numbers: list[int] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdecimal() or (dash and not (high.isdecimal() and int(low) <= int(high))):
            raise ValueError(f"{text!r} is not a list of cores; write 0-3,8")
        numbers += range(int(low), int(high or low) + 1)
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"{text!r} names a core twice")
    return tuple(numbers)


def cores_of(cpus: Iterable[int], system: Path = _SYSTEM) -> tuple[Core, ...]:
    """The cores that contain these CPUs, ordered by NUMA node. Without the kernel's topology: one node, one thread per core."""
    allowed = set(cpus)
    nodes: dict[int, int] = {}
    for file in system.glob("node/node[0-9]*/cpulist"):
        if text := file.read_text().strip():  # a node that has only memory has no CPU
            nodes |= dict.fromkeys(parse_list(text), int(file.parent.name.removeprefix("node")))
    cores = set()
    for cpu in allowed:
        siblings = system / f"cpu/cpu{cpu}/topology/thread_siblings_list"
        threads = parse_list(siblings.read_text().strip()) if siblings.exists() else (cpu,)
        cores.add(tuple(sorted(allowed.intersection(threads))))
    return tuple(sorted(cores, key=lambda core: (nodes.get(core[0], 0), core)))


def share(cores: Sequence[Core], chosen: str, num_ranks: int, index: int) -> tuple[Core, ...]:
    """The cores of rank `index` of `num_ranks` on this host. `chosen`: "all", or a list of CPUs, each of which then counts as a
    core.

    Raises ValueError if this job may use fewer cores of the host than it has ranks there, or not all that are listed.
    """
    if chosen != "all":
        allowed = {cpu for core in cores for cpu in core}
        listed = parse_list(chosen)
        if missing := [cpu for cpu in listed if cpu not in allowed]:
            raise ValueError(
                f"--bind_core_list {chosen}: this host lets the job use cores "
                f"{','.join(map(str, sorted(allowed)))}, not {missing[0]}; leave it out of the list"
            )
        cores = [(cpu,) for cpu in listed]
    each = len(cores) // num_ranks
    if each == 0:
        raise ValueError(
            f"--bind_cores_to_rank: {num_ranks} ranks and {len(cores)} core(s) on this host; start at most one rank a core "
            "(--nproc), or leave ranks unbound"
        )
    return tuple(cores[index * each : (index + 1) * each])


def bind(chosen: str, num_ranks: int, index: int) -> None:
    """Bind this process to its cores, with one thread per core. Raises ValueError as `share` does."""
    own = share(cores_of(os.sched_getaffinity(0)), chosen, num_ranks, index)
    os.sched_setaffinity(0, [cpu for core in own for cpu in core])
    os.environ["OMP_NUM_THREADS"] = str(len(own))

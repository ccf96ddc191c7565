"""Where our step goes: the floor's and each stage's time by function, from cProfile on rank 0 of two. Writes nothing.

Processor time of the main thread, not wall clock, so that a busy machine hardly matters; a wait that sleeps does not show.
What a native kernel takes is in the function that calls it. The profiler adds a microsecond or so to each Python call, so
the sum is above the step's own time, which is given beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import systems
from benchmarks.peers import Peers
from benchmarks.ranks import run_ranks
from benchmarks.report import table
from benchmarks.step import WORLD, seconds_of
from benchmarks.worker import Job
from benchmarks.workloads import WORKLOADS

SYSTEMS = ("floor", "slipstream:1", "slipstream:2", "slipstream:3")
STEPS = 12
SHOWN_MS = 0.1


def run(workload: str, dtype: str, only: Sequence[str]) -> None:
    work = WORKLOADS[workload]
    print(f"{work.name}, {dtype}: {work.describe()}, {WORLD} ranks; milliseconds per step, rank 0")
    for system in only or SYSTEMS:
        job = Job(system=system, work=work, dtype=dtype, steps=STEPS)
        plain = run_ranks(job, WORLD, Peers(python=None))
        profiled = run_ranks(Job(system=system, work=work, dtype=dtype, steps=STEPS, profile=True), WORLD, Peers(python=None))
        lines = sorted(profiled.ranks[0]["profile"], key=lambda line: -line[2])
        rows = [[name, f"{calls:.0f}", f"{own:.2f}", f"{whole:.2f}"] for name, calls, own, whole in lines if own >= SHOWN_MS]
        print(
            f"\n{systems.label(system)}: {seconds_of(plain) * 1e3:.1f} ms, of them processor "
            f"{seconds_of(plain, 'cpu_times') * 1e3:.1f} ms; profiled {sum(line[2] for line in lines):.1f} ms\n"
        )
        print(table(["function", "calls", "own, ms", "with callees, ms"], rows), flush=True)

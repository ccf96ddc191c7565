"""The leg `restart`: a rank is killed in the middle of a step; when the run trains again, and how many steps it makes anew.

`slipstream run --max-restarts 1` on this host. The losses have to be those of a run in which nobody dies, bit for bit.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.legs import Options
from benchmarks.report import table, verdict, verdicts
from benchmarks.worker import ROOT
from benchmarks.workloads import WORKLOADS

RANKS, STEPS, DIES, EVERY = 2, 24, 16, 6  # the rank ends in step 16; on disk, every sixth step is a checkpoint
ENVIRON = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
SECONDS, LOST = 20.0, 1  # targets


class Run(NamedTuple):
    losses: dict[int, set[str]]  # by step, of both ranks, of every time that it was made
    again: float  # seconds from the death to the end of the first step after it; 0: nobody died
    lost: int  # steps that were made, or begun, and made again
    step: float  # median seconds between the ends of two steps


def measure(workload: str, folder: Path, *, every: int, memory: int, dies: int) -> Run:
    folder.mkdir()
    command = [sys.executable, "-m", "slipstream", "run", "--quiet", "--nproc", str(RANKS), "--max-restarts", "1", "--module"]
    command += ["benchmarks.restart_script", "--folder", str(folder), "--workload", workload, "--steps", str(STEPS)]
    command += ["--every", str(every), "--memory", str(memory), "--dies", str(dies)]
    done = subprocess.run(command, cwd=folder, env=ENVIRON, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the run failed:\n{done.stderr[-2000:]}")
    lines = [[line.split() for line in (folder / f"rank{rank}.txt").read_text().splitlines()] for rank in range(RANKS)]
    losses: dict[int, set[str]] = {}
    for rank, of_rank in enumerate(lines):
        for _, step, loss, _ in (line for line in of_rank if line[0] == "step"):
            losses.setdefault(int(step), set()).add(f"{rank} {loss}")
    ends = [(int(line[1]), float(line[3])) for line in lines[1] if line[0] == "step"]
    pauses = [b - a for (_, a), (_, b) in itertools.pairwise(ends)]
    again, lost = 0.0, 0
    if dies:
        killed = next(float(line[1]) for line in lines[1] if line[0] == "killed")
        first, end = next((step, end) for step, end in ends if end > killed)
        again, lost = end - killed, dies - first + 1
    return Run(losses, again, lost, median(pauses))


def run(options: Options) -> str:
    workload = "tiny" if options.quick else "moving"
    rows: list[list[str]] = []
    runs: dict[str, Run] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, settings in (
            ("nobody dies, no checkpoint", {"every": 0, "memory": 0, "dies": 0}),
            ("nobody dies, memory in each step", {"every": 0, "memory": 1, "dies": 0}),
            (f"disk in each {EVERY}th step", {"every": EVERY, "memory": 0, "dies": DIES}),
            ("and memory in each step", {"every": EVERY, "memory": 1, "dies": DIES}),
        ):
            found = runs[name] = measure(workload, Path(scratch, str(len(rows))), **settings)
            died = [f"{found.again:.1f}", str(found.lost)] if settings["dies"] else ["-", "-"]
            rows.append([name, *died, f"{found.step:.2f}"])
    plain, beside, _, both = runs.values()
    equal = all(found.losses == plain.losses for found in runs.values())
    return "\n\n".join(
        (
            f"{WORKLOADS[workload].describe()}, {RANKS} ranks, fp32, stage 2; rank 1 ends by SIGKILL in the middle of step {DIES} "
            f"of {STEPS}. The step that ran counts as lost. Losses of all runs are {'' if equal else 'NOT '}those of the first, "
            "bit for bit.",
            table(["run", "seconds until a step is complete again", "steps lost", "seconds per step"], rows),
            verdicts(
                [
                    verdict("training again, s", both.again, SECONDS),
                    verdict("steps lost with checkpoints in memory", both.lost, LOST),
                    verdict(
                        "losses that differ from those of a run without a death",
                        len([step for step, losses in both.losses.items() if losses != plain.losses[step]]),
                        0,
                    ),
                ]
            ),
            f"A checkpoint in memory in each step costs {beside.step - plain.step:.2f} s a step here.",
        )
    )

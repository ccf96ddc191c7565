"""The legs `restart`, a rank is killed in the middle of a step: when the run trains again, and how many steps it makes anew; and
`kills`: 200 ranks are killed at any moment, one after the other.

`slipstream run --max-restarts N` on this host. The losses have to be those of a run in which nobody dies, bit for bit.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.legs import Options
from benchmarks.report import table, verdict, verdicts
from benchmarks.worker import ROOT
from benchmarks.workloads import WORKLOADS

RANKS, STEPS, DIES, EVERY = 2, 24, 16, 6  # the rank ends in step 16; on disk, every sixth step is a checkpoint
ENVIRON = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
SECONDS, BEGINS, LOST = 10.0, 2.0, 1  # targets
KILLS, PAUSE = {"disk": 200, "memory": 50}, 1.5  # PAUSE: seconds between two kills on average; some come while ranks start or load
UNTIL_DISK = 5  # steps between checkpoints on disk in the leg `kills`


class Run(NamedTuple):
    losses: dict[int, set[str]]  # by step, of both ranks, of every time that it was made
    begins: float  # seconds from the death to the begin of the first step after it; 0: nobody died
    again: float  # and to its end
    lost: int  # steps that were made, or begun, and made again
    step: float  # median seconds between the ends of two steps


def measure(workload: str, folder: Path, *, every: int, memory: int, dies: int, steps: int = STEPS) -> Run:
    folder.mkdir()
    command = [sys.executable, "-m", "slipstream", "run", "--quiet", "--nproc", str(RANKS), "--max-restarts", "1", "--module"]
    command += ["benchmarks.restart_script", "--folder", str(folder), "--workload", workload, "--steps", str(steps)]
    command += ["--every", str(every), "--memory", str(memory), "--dies", str(dies), "--stop", str(folder / "stop")]
    done = subprocess.run(command, cwd=folder, env=ENVIRON, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the run failed:\n{done.stderr[-2000:]}")
    lines = read(folder)
    losses = losses_of(lines)
    ends = [(int(line[1]), float(line[3])) for line in lines[1] if line[0] == "step"]
    pauses = [b - a for (_, a), (_, b) in itertools.pairwise(ends)]
    begins, again, lost = 0.0, 0.0, 0
    if dies:
        killed = next(float(line[1]) for line in lines[1] if line[0] == "killed")
        first, end = next((step, end) for step, end in ends if end > killed)
        begin = next(float(line[2]) for line in lines[1] if line[0] == "begin" and float(line[2]) > killed)
        begins, again, lost = begin - killed, end - killed, dies - first + 1
    return Run(losses, begins, again, lost, median(pauses))


def read(folder: Path) -> list[list[list[str]]]:
    """The words of the lines of each rank. Of a rank that was killed in the middle of a line, that one is left out."""
    files = [folder / f"rank{rank}.txt" for rank in range(RANKS)]
    texts = [file.read_text() if file.exists() else "" for file in files]
    return [[line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")] for text in texts]


def losses_of(lines: list[list[list[str]]]) -> dict[int, set[str]]:
    losses: dict[int, set[str]] = {}
    for rank, of_rank in enumerate(lines):
        for _, step, loss, _ in (line for line in of_rank if line[0] == "step"):
            losses.setdefault(int(step), set()).add(f"{rank} {loss}")
    return losses


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
            died = [f"{found.begins:.1f}", f"{found.again:.1f}", str(found.lost)] if settings["dies"] else ["-"] * 3
            rows.append([name, *died, f"{found.step:.2f}"])
    plain, beside, _, both = runs.values()
    equal = all(found.losses == plain.losses for found in runs.values())
    return "\n\n".join(
        (
            f"{WORKLOADS[workload].describe()}, {RANKS} ranks, fp32, stage 2; rank 1 ends by SIGKILL in the middle of step {DIES} "
            f"of {STEPS}. The step that ran counts as lost. Losses of all runs are {'' if equal else 'NOT '}those of the first, "
            "bit for bit.",
            table(["run", "seconds until a step begins", "until one is complete", "steps lost", "seconds per step"], rows),
            verdicts(
                [
                    verdict("a step is complete again, s", both.again, SECONDS),
                    verdict("a step begins again, with the reading of the checkpoint in memory, s", both.begins, BEGINS),
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


class Kills(NamedTuple):
    losses: dict[int, set[str]]
    at: dict[str, int]  # what the killed rank did -> how many
    lost: list[int]  # steps that were complete and made again, for each start of each rank
    beyond: int  # starts that went on after a step that had not begun
    minutes: float


def kill_often(folder: Path, *, every: int, memory: int, kills: int, seed: int) -> Kills:
    """Kill a rank `kills` times, at moments that a seed chooses, and let the run end well."""
    folder.mkdir()
    chance, stop = random.Random(seed), folder / "stop"
    command = [sys.executable, "-m", "slipstream", "run", "--quiet", "--nproc", str(RANKS), "--max-restarts", str(kills)]
    command += ["--module", "benchmarks.restart_script", "--folder", str(folder), "--workload", "tiny", "--steps", str(10**9)]
    command += ["--stop", str(stop), "--every", str(every), "--memory", str(memory), "--dies", "0"]
    at, start = {"before its first step": 0, "in a step": 0, "between two": 0}, time.monotonic()
    with open(folder / "stderr", "w") as said:
        run = subprocess.Popen(command, cwd=folder, env=ENVIRON, stderr=said)
        killed: set[int] = set()
        while len(killed) < kills and run.poll() is None:
            time.sleep(chance.expovariate(1 / PAUSE))
            rank = chance.randrange(RANKS)
            pid, doing = _doing(read(folder)[rank], killed)
            if pid is None:  # it has not said its name yet, after the last kill
                continue
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
                at[doing] += 1
        steps = max((int(line[1]) for of_rank in read(folder) for line in of_rank if line[0] == "step"), default=0)
        stop.write_text(str(steps + 2 * UNTIL_DISK))
        if run.wait() or len(killed) < kills:
            raise RuntimeError(f"the run failed after {len(killed)} kills:\n{(folder / 'stderr').read_text()[-2000:]}")
    lines = read(folder)
    resumed = [one for of_rank in lines for one in _resumptions(of_rank)]
    lost = [max(0, complete - first) for complete, _, first in resumed]
    beyond = sum(first > begun for _, begun, first in resumed)
    return Kills(losses_of(lines), at, lost, beyond, (time.monotonic() - start) / 60)


def _doing(lines: list[list[str]], killed: set[int]) -> tuple[int | None, str]:
    """The process of a rank that lives, and what it does, by its last line."""
    pids = [int(line[1]) for line in lines if line[0] == "pid"]
    if not pids or pids[-1] in killed:
        return None, ""
    return pids[-1], {"pid": "before its first step", "begin": "in a step", "step": "between two"}[lines[-1][0]]


def _resumptions(lines: list[list[str]]) -> list[tuple[int, int, int]]:
    """For each start of a rank that began a step, but the first: the last step that was complete, the last that had begun, and that
    after which it goes on."""
    found: list[tuple[int, int, int]] = []
    complete, begun, is_new = 0, 0, False
    for kind, number, *_ in lines:
        if kind == "pid":
            is_new = begun > 0
        elif kind == "step":
            complete = int(number)
        elif kind == "begin":
            if is_new:
                found.append((complete, begun, int(number) - 1))
            begun, is_new = int(number), False
    return found


def run_kills(options: Options) -> str:
    rows: list[list[str]] = []
    runs: dict[str, Kills] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for seed, (name, kills) in enumerate(KILLS.items()):
            how = {"every": UNTIL_DISK, "memory": int(name == "memory"), "kills": 12 if options.quick else kills, "seed": seed}
            found = runs[name] = kill_often(Path(scratch, name), **how)
            at = ", ".join(f"{count} {doing}" for doing, count in found.at.items())
            rows.append(
                [name, str(how["kills"]), at, str(max(found.losses)), f"{sum(found.lost)} (at most {max(found.lost, default=0)})"]
            )
            rows[-1].append(f"{found.minutes:.1f}")
        steps = max(max(found.losses) for found in runs.values())
        plain = measure("tiny", Path(scratch, "plain"), every=0, memory=0, dies=0, steps=steps)
    # A rank that ended right after a checkpoint has not told that step's loss.
    wrong = [step for found in runs.values() for step in found.losses if not found.losses[step] <= plain.losses[step]]
    columns = ["checkpoints", "kills", "what the rank did", "steps of the run", "complete steps made again", "minutes"]
    return "\n\n".join(
        (
            f"{WORKLOADS['tiny'].describe()}, {RANKS} ranks, fp32, stage 2; one of them ends by SIGKILL at a random moment, "
            f"{PAUSE:g} s apart on average. Checkpoints are on disk after each {UNTIL_DISK}th step, and in the second row in "
            "memory after each step.",
            table(columns, rows),
            verdicts(
                [
                    verdict("steps lost by a kill, at most", max(runs["disk"].lost, default=0), UNTIL_DISK),
                    verdict("and with checkpoints in memory", max(runs["memory"].lost, default=0), LOST),
                    verdict("losses that differ from those of a run without a death", len(wrong), 0),
                    verdict("starts that left out a step", sum(found.beyond for found in runs.values()), 0),
                ]
            ),
        )
    )

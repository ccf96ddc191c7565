"""One rank of one contender, in a process of its own: `python -m benchmarks.worker JOB`, with JOB as JSON.

It speaks over two inherited pipes, so that a contender may print what it likes: at each of the job's marks (a number of
finished steps) it writes a line and waits for one back, while the parent reads its counters; at the end it writes the
result.
"""

from __future__ import annotations

import cProfile
import dataclasses
import json
import os
import pstats
import sys
import time
from dataclasses import dataclass
from typing import Any

STARTED = time.time()

import torch  # noqa: E402  # the clock starts before it

from benchmarks.systems import build  # noqa: E402
from benchmarks.workloads import Workload, build_batch, build_model  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a rank is to do. `marks`: after how many steps to stop and wait for the parent. `profile`: the last half."""

    system: str
    work: Workload
    dtype: str
    steps: int
    marks: tuple[int, ...] = ()
    profile: bool = False

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        fields = json.loads(text)
        return cls(**{**fields, "work": Workload(**fields["work"]), "marks": tuple(fields["marks"])})


class Parent:
    """The two pipes to the process that started this one."""

    def __init__(self) -> None:
        self.reader = os.fdopen(int(os.environ["BENCH_READ"]), "r")
        self.writer = os.fdopen(int(os.environ["BENCH_WRITE"]), "w")

    def tell(self, **message: Any) -> None:
        self.writer.write(json.dumps(message) + "\n")
        self.writer.flush()

    def mark(self, steps: int, **since_the_last: Any) -> None:
        self.tell(mark=steps, at=time.time(), **since_the_last)
        self.reader.readline()


def run(job: Job, parent: Parent) -> None:
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    rank = int(os.environ["RANK"])
    tokens, targets = build_batch(job.work, rank)
    model = build_model(job.work)
    num_params = sum(param.numel() for param in model.parameters())
    built = time.time()
    step = build(job.system, model, DTYPES[job.dtype], job.work.batch)
    if 0 in job.marks:
        parent.mark(0)
    losses, times, cpu_times, first = [], [], [], 0.0
    profile = cProfile.Profile(time.thread_time)
    for i in range(job.steps):
        if job.profile and i == job.steps // 2:
            profile.enable()
        start, cpu_start = time.perf_counter(), time.process_time()
        loss = step(tokens, targets)
        times.append(time.perf_counter() - start)
        cpu_times.append(time.process_time() - cpu_start)  # of all threads
        losses.append(float(loss))
        first = first or time.time()
        if i + 1 in job.marks:
            last = max((mark for mark in job.marks if mark <= i), default=0)
            parent.mark(i + 1, times=times[last:], cpu_times=cpu_times[last:], loss=losses[0])
    profile.disable()
    if torch.get_num_threads() != 1:
        raise RuntimeError(f"{job.system} has set {torch.get_num_threads()} threads; every contender is measured with one")
    parent.tell(
        losses=losses,
        times=times,
        params=num_params,
        started=STARTED,
        built=built,
        first_step=first,
        cpu_times=cpu_times,
        profile=_lines(profile, job.steps - job.steps // 2) if job.profile else [],
    )
    parent.reader.readline()  # nobody leaves while another may still read its memory
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # no contender's exit handlers are measured, or waited for


def _lines(profile: cProfile.Profile, steps: int) -> list[tuple[str, float, float, float]]:
    """Per function: name, calls, own milliseconds and milliseconds with callees, per step."""
    lines = []
    for (file, _, name), (_, calls, own, whole, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        where = "/".join(file.split("/")[-2:]) + ":" if "/" in file else ""
        lines.append((where + name, calls / steps, own / steps * 1e3, whole / steps * 1e3))
    return lines


if __name__ == "__main__":
    run(Job.from_json(sys.argv[1]), Parent())

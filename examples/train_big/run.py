"""Train a model whose states are ten times the memory that the kernel lets it have, and show where the bytes were.

    make train-big                                     # a budget of 1 GiB, states in runs/train-big
    make train-big ARGS="--budget 800 --layers 30"     # MiB; a smaller one

A memory cgroup limits the training to the memory of a process that has imported torch, plus the budget; swap is forbidden.
(`ulimit` does not count shared mappings.) It prints the kernel's counters next to the formulas, and draws memory and traffic over
time in memory.png. Then it runs the same script under DistributedDataParallel, in the same limits. It takes 9.4 minutes on two
cores, without the set-up.

The run does not show learning. The model sees four different windows of 128 tokens, at the full learning rate from the first step:
the loss begins at ln(8192) = 9.0 and goes up and down by some tenths (a model of the same width with 20 layers, under plain AdamW:
9.23, 9.27, 9.34, 8.86, 8.52).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cgroup import Group, Unlimited, open_group
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
MIB, GB = 1 << 20, 1e9
PERIOD_S = 0.2
# glibc keeps freed memory for later, up to 190 MiB of it here: a budget wants it back
ENVIRONMENT = {"OMP_NUM_THREADS": str(os.cpu_count()), "MALLOC_ARENA_MAX": "2", "MALLOC_TRIM_THRESHOLD_": "1048576"}
STATE_BYTES = 2 + 2 + 4 + 4 + 4  # per parameter: bf16 weights and gradients, fp32 master and two moments
READ_BYTES = 2 + 2 + 2 + 12  # per parameter and step: weights for forward and backward, gradient, master and moments
WRITE_BYTES = 2 + 2 + 12  # gradient, weights, master and moments


@dataclass(slots=True)
class Sample:
    seconds: float
    memory: int
    read: int
    written: int


@dataclass(slots=True)
class Run:
    """Samples, events and exit status of one training run."""

    samples: list[Sample] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    marks: list[Sample] = field(default_factory=list)  # the counters at each event
    peak: int = 0
    status: int = 0
    tail: str = ""


def main() -> None:
    args, script_args = parse_arguments()
    console = Console(soft_wrap=True, highlight=False)
    args.out.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(HERE.parent / "pretrain"))
    import data

    data.prepare(data.standard_library(), args.out, 8192)  # without the limit: training the tokenizer is not measured
    with open_group() as group:
        if isinstance(group, Unlimited):
            console.print("[yellow]This machine allows no memory cgroup: the run is measured, but not limited.[/yellow]")
        baseline = watch([sys.executable, "-c", "import torch, slipstream.train.initialize, time; time.sleep(1)"], group, None).peak
        limit = baseline + args.budget * MIB
        console.print(f"A process with torch imported takes {baseline / MIB:.0f} MiB; the limit is {args.budget} MiB more.")
        launcher = [sys.executable, "-m", "slipstream", "run", "--nproc", "1"]
        script = [*launcher, str(HERE / "big.py"), "--out", str(args.out), *script_args]
        run = watch(script, group, limit, console)
        if run.status:
            raise SystemExit(f"the training ended with status {run.status}:\n{run.tail}")
        plain = None if args.no_plain else watch([*script, "--plain"], group, limit)
    draw(run, baseline, limit, args.out / "memory.png")
    console.print(table(run, baseline, args.budget))
    if plain is not None:
        steps = sum(event["event"] == "step" for event in plain.events)
        end = "was killed by the kernel" if plain.status in (-9, 137) else f"ended with status {plain.status}"
        console.print(f"The same script under DistributedDataParallel, in the same limits, {end} after {steps} steps.")
    console.print(f"\nWritten: {args.out}/memory.png")


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=int, default=1024, help="MiB above a process with torch imported")
    parser.add_argument("--out", type=Path, default=Path("runs/train-big"), help="folder of the states and results")
    parser.add_argument("--no-plain", action="store_true", help="leave DistributedDataParallel out")
    return parser.parse_known_args()


def watch(command: list[str], group: Group, limit: int | None, console: Console | None = None) -> Run:
    """Run a command in the group, with its counters sampled from outside until it ends."""
    run, start, ended = Run(), time.perf_counter(), threading.Event()
    group.limit(limit)
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=group.enter, env=os.environ | ENVIRONMENT
    )
    traffic = Traffic(process.pid)

    def take_sample() -> Sample:
        return Sample(time.perf_counter() - start, group.usage(), *traffic.read())

    def sample() -> None:
        while not ended.wait(PERIOD_S):
            run.samples.append(take_sample())

    sampler = threading.Thread(target=sample)
    sampler.start()
    assert process.stdout is not None
    for line in process.stdout:
        event = parse_event(line)
        if event is None:
            run.tail = (run.tail + line)[-4000:]
            continue
        run.events.append(event)
        run.marks.append(take_sample())
        if console is not None and event["event"] == "step":
            console.print(f"step {event['step']}: loss {event['loss']:.3f}, {event['seconds']:.1f} s")
        elif console is not None and event["event"] == "ready":
            console.print(f"{event['parameters'] / 1e6:.0f} million parameters, {run.marks[-1].seconds:.0f} s to initialize")
            console.print("So few steps measure memory and traffic; the loss stays near ln(8192) = 9.0, up or down by some tenths.")
    run.status = process.wait()
    ended.set()
    sampler.join()
    run.peak = group.peak() or max((sample.memory for sample in run.samples), default=0)
    return run


def parse_event(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line[line.index("{") :])
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None


class Traffic:
    """Bytes that the block layer read and wrote for a process and its descendants, including those that ended."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.by_pid: dict[int, tuple[int, int]] = {}

    def read(self) -> tuple[int, int]:
        for pid in self._descendants(self.pid):
            try:
                fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
            except (OSError, ValueError):
                continue
            self.by_pid[pid] = (int(fields["read_bytes"]), int(fields["write_bytes"]))
        return sum(read for read, _ in self.by_pid.values()), sum(written for _, written in self.by_pid.values())

    def _descendants(self, pid: int) -> list[int]:
        pids = [pid]
        try:
            for task in Path(f"/proc/{pid}/task").iterdir():
                for child in (task / "children").read_text().split():
                    pids += self._descendants(int(child))
        except OSError:
            pass
        return pids


def table(run: Run, baseline: int, budget: int) -> Table:
    """The kernel's counters next to the formulas."""
    steps = [mark for event, mark in zip(run.events, run.marks, strict=True) if event["event"] in ("ready", "step")]
    numel = next(event["parameters"] for event in run.events if event["event"] == "ready")
    # Moments are streamed during the next step, and the first step reads none: count from the end of the second step
    read, written = ((getattr(steps[-1], name) - getattr(steps[2], name)) / (len(steps) - 3) for name in ("read", "written"))
    result = Table(title=f"{numel / 1e6:.0f} million parameters in {budget} MiB")
    for column in ("", "formula", "measured by the kernel", "ratio"):
        result.add_column(column, justify="left" if not column else "right")
    states = STATE_BYTES * numel
    for name, memory in (("states, over the budget", budget * MIB), ("states, over the peak", run.peak - baseline)):
        result.add_row(name, f"{states / GB:.2f} GB", f"{memory / GB:.2f} GB", f"{states / memory:.1f}")
    for name, per_parameter, measured in (("read a step", READ_BYTES, read), ("written a step", WRITE_BYTES, written)):
        formula = per_parameter * numel
        result.add_row(name, f"{formula / GB:.2f} GB", f"{measured / GB:.2f} GB", f"{measured / formula:.2f}")
    return result


def draw(run: Run, baseline: int, limit: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # The kernel adds the counters of an ended process to its parent: samples after the last event count them twice
    samples = [sample for sample in run.samples if sample.seconds <= run.marks[-1].seconds]
    times = [sample.seconds for sample in samples]
    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(9, 6), layout="constrained")
    above.plot(times, [sample.memory / MIB for sample in samples], label="in use")
    above.axhline(limit / MIB, color="tab:red", label="the kernel's limit")
    above.axhline(baseline / MIB, color="tab:gray", linestyle=":", label="a process with torch imported")
    above.set_ylabel("memory, MiB")
    above.set_ylim(bottom=0)
    above.legend(loc="lower right")
    for name in ("read", "written"):
        totals = [getattr(sample, name) for sample in samples]
        rates = [(b - a) / PERIOD_S / GB for a, b in itertools.pairwise(totals)]
        below.plot(times[1:], rates, label=name)
    for event, mark in zip(run.events, run.marks, strict=True):
        if event["event"] == "step":
            below.axvline(mark.seconds, color="tab:gray", linewidth=0.5)
    below.set_ylabel("disk, GB/s")
    below.set_xlabel("seconds (gray: the end of a step)")
    below.legend(loc="upper right")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()

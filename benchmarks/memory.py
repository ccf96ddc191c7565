"""The leg `memory`: bytes per parameter and rank at the peak of a step, counted by the kernel, beside the formula.

Two models that differ in depth only; the difference of their peaks over the difference of their parameters cancels
whatever does not grow with the model: the interpreter, torch, buffers of one block. Shared memory counts once, over all
ranks; the total is divided by the ranks. Activations of 16 tokens add about 1% of a stage-0 slope.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks import systems
from benchmarks.cgroup import Sampler, meter
from benchmarks.peers import Peers
from benchmarks.ranks import RunError, Seat, run_ranks
from benchmarks.report import machine, table, verdict, verdicts
from benchmarks.worker import Job
from benchmarks.workloads import Workload

SHALLOW = Workload(name="shallow", width=512, depth=4, heads=8, vocab=512, batch=1, length=16)
DEEP = dataclasses.replace(SHALLOW, name="deep", depth=16)
SETTLED, STEPS = 2, 12  # the peak is looked for from the end of step SETTLED to the end of step STEPS
TARGET = 1.10

# Freed blocks go back to the kernel at once, for every contender, so that what is counted is what is alive.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "2"}

# Bytes per parameter and rank of weights, gradients and optimizer state, N ranks (performance.md 2.2)
FORMULA: dict[tuple[str, int], Callable[[int], float]] = {
    ("bf16", 0): lambda n: 16,
    ("bf16", 1): lambda n: 4 + 12 / n,
    ("bf16", 2): lambda n: 2 + 14 / n,
    ("bf16", 3): lambda n: 16 / n,
    ("fp32", 0): lambda n: 16,
    ("fp32", 1): lambda n: 8 + 8 / n,
    ("fp32", 2): lambda n: 4 + 12 / n,
    ("fp32", 3): lambda n: 16 / n,
}


class Slope(NamedTuple):
    """Bytes per parameter and rank, by the samples and by the kernel's high-water mark, and MiB per rank at depth 0.

    Samples miss a peak between two looks; the mark misses nothing, but not every kernel has it. The larger is judged.
    """

    sampled: float
    marked: float | None
    fixed: float

    @property
    def most(self) -> float:
        return max(self.sampled, self.marked or 0.0)


class Peak(NamedTuple):
    sampled: int
    marked: int | None
    params: int


def peak_of(system: str, work: Workload, dtype: str, world: int, peers: Peers) -> tuple[Peak, str]:
    with meter() as gauge:
        sampler = Sampler(gauge)
        marked: list[int | None] = []

        def on_mark(steps: int) -> None:
            if steps == SETTLED:
                sampler.start()
            else:
                sampler.stop()
                marked.append(gauge.peak())

        job = Job(system=system, work=work, dtype=dtype, steps=STEPS, marks=(SETTLED, STEPS))
        run_ranks(job, world, peers, seat=Seat(env=MALLOC, seated=gauge.enter), on_mark=on_mark)
        return Peak(sampler.most, marked[0], work.num_params), gauge.name


def slope_of(system: str, dtype: str, world: int, peers: Peers) -> tuple[Slope, str]:
    (low, name), (high, _) = (peak_of(system, work, dtype, world, peers) for work in (SHALLOW, DEEP))
    params = (high.params - low.params) * world
    sampled = (high.sampled - low.sampled) / params
    marked = None if high.marked is None or low.marked is None else (high.marked - low.marked) / params
    return Slope(sampled, marked, (low.sampled / world - sampled * low.params) / 2**20), name


def run(peers: Peers, *, quick: bool, dtypes: Sequence[str]) -> str:
    worlds = (2,) if quick else (1, 2, 4)
    stages = (3,) if quick else (0, 1, 2, 3)
    text, rows, judged, how = [machine(peers)], [], [], ""
    for dtype in dtypes:
        for world in worlds:
            for stage in stages:
                contenders = [f"slipstream:{stage}"]
                if peers.python and stage and not quick and (dtype == "bf16" or world == 2):
                    contenders += [f"deepspeed:{stage}"] + [f"deepspeed:{stage}:lean"] * (world == 2)
                formula = FORMULA[dtype, stage](world)
                for system in contenders:
                    what = f"{dtype}, {world} rank{'s' * (world > 1)}"
                    try:
                        slope, how = slope_of(system, dtype, world, peers)
                    except RunError as error:
                        print(error)
                        trouble = str(error).strip().splitlines()[-1]
                        rows.append([what, systems.label(system), f"{formula:.2f}", trouble, "", "", ""])
                        continue
                    print(f"  memory {what} {system}: {slope.most:.2f} bytes per parameter", flush=True)
                    over = slope.most / formula
                    marked = "" if slope.marked is None else f"{slope.marked:.2f}"
                    rows.append(
                        [
                            what,
                            systems.label(system),
                            f"{formula:.2f}",
                            f"{slope.sampled:.2f}",
                            marked,
                            f"{over:.2f}",
                            f"{slope.fixed:.0f}",
                        ]
                    )
                    if system.startswith("slipstream"):
                        judged.append((over, f"{what}, stage {stage}"))
    text.append(
        f"Counted with: {how}. Models of {SHALLOW.num_params / 1e6:.1f}M and {DEEP.num_params / 1e6:.1f}M parameters, "
        f"{SHALLOW.batch}x{SHALLOW.length} tokens per rank, AdamW, clipping; bytes per parameter and rank, one run each. "
        f"`lean`: DeepSpeed's bucket, prefetch and live-parameter knobs set to one block."
    )
    head = ["run", "contender", "formula", "sampled", "by high-water mark", "the larger over it", "fixed, MiB per rank"]
    text.append(table(head, rows))
    if judged:
        worst, where = max(judged)
        text.append(verdicts([verdict(f"bytes per parameter over the formula, worst ({where})", worst, TARGET)]))
    return "\n\n".join(text)

"""The leg `memory`: bytes per parameter and rank at the peak of a step, counted by the kernel, over the formula.

Two models that differ in depth only; the difference of their peaks over the difference of their parameters cancels everything
that does not grow with the model: the interpreter, torch, the buffers of one block. Shared memory counts once, over all ranks;
the total is divided by the ranks. The activations of 16 tokens add about 1 % to the slope of stage 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from benchmarks import systems
from benchmarks.cgroup import Sampler, meter
from benchmarks.legs import Options
from benchmarks.peers import Peers, prepare
from benchmarks.ranks import Seat
from benchmarks.report import table, verdict, verdicts
from benchmarks.step import start
from benchmarks.worker import Failed
from benchmarks.workloads import Workload

SHALLOW = Workload(name="shallow", width=512, depth=4, heads=8, vocab=512, batch=1, length=16)
DEEP = dataclasses.replace(SHALLOW, name="deep", depth=12)
SETTLED, STEPS = 2, 4  # the peak is that of STEPS steps after the first SETTLED
TARGET = 1.10

# For every contender, malloc returns freed blocks to the kernel at once, so that only live memory is counted.
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
    """Bytes per parameter and rank, by samples and by the kernel's high-water mark, and MiB per rank at depth 0.

    Samples miss a peak between two of them; the mark misses nothing, but not every kernel has it. The larger is judged.
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
    """And how it was counted."""
    with meter() as gauge:
        sampler = Sampler(gauge)
        with start(system, work, dtype, world, peers, Seat(env=MALLOC, enter=gauge.enter)) as ranks:
            ranks.call("steps", count=SETTLED)
            sampler.start()
            ranks.call("steps", count=STEPS)
            sampled = sampler.stop()
            marked = gauge.peak()
        return Peak(sampled, marked, work.num_params), gauge.name


def slope_of(system: str, dtype: str, world: int, peers: Peers) -> tuple[Slope, str]:
    (low, name), (high, _) = (peak_of(system, work, dtype, world, peers) for work in (SHALLOW, DEEP))
    params = (high.params - low.params) * world
    sampled = (high.sampled - low.sampled) / params
    marked = None if high.marked is None or low.marked is None else (high.marked - low.marked) / params
    return Slope(sampled, marked, (low.sampled / world - sampled * low.params) / 2**20), name


def runs(options: Options, deepspeed: bool) -> list[tuple[str, int, int, str]]:
    """(dtype, ranks, stage, contender): all stages on two ranks, ours on four in one dtype, and DeepSpeed in that dtype."""
    results = []
    for dtype in options.dtypes:
        for stage in (3,) if options.quick else (0, 1, 2, 3):
            results.append((dtype, 2, stage, f"slipstream:{stage}"))
            if deepspeed and stage and dtype == options.dtypes[0] and not options.quick:
                results += [(dtype, 2, stage, f"deepspeed:{stage}")]
                results += [(dtype, 2, stage, f"deepspeed:{stage}:lean")] * (stage == 3)
    if not options.quick:
        results += [(options.dtypes[0], 4, stage, f"slipstream:{stage}") for stage in (1, 2, 3)]
    return results


def run(options: Options) -> str:
    peers = prepare(options.peers)
    rows, judged, how = [], [], ""
    for dtype, world, stage, system in runs(options, peers.python is not None):
        what, formula = f"{dtype}, {world} ranks", FORMULA[dtype, stage](world)
        try:
            slope, how = slope_of(system, dtype, world, peers)
        except OSError as error:
            return f"Not measured: no memory cgroup can be made ({error})."
        except Failed as error:
            print(error)
            rows.append([what, systems.label(system), f"{formula:.2f}", error.reason])
            continue
        print(f"  memory {what} {system}: {slope.most:.2f} bytes per parameter", flush=True)
        over = slope.most / formula
        marked = "" if slope.marked is None else f"{slope.marked:.2f}"
        figures = [f"{formula:.2f}", f"{slope.sampled:.2f}", marked, f"{over:.2f}", f"{slope.fixed:.0f}"]
        rows.append([what, systems.label(system), *figures])
        if system.startswith("slipstream"):
            judged.append((over, f"{what}, stage {stage}"))
    text = [
        f"Counted with: {how}. Models of {SHALLOW.num_params / 1e6:.1f}M and {DEEP.num_params / 1e6:.1f}M parameters, "
        f"{SHALLOW.batch}x{SHALLOW.length} tokens per rank, AdamW, clipping; bytes per parameter and rank, one run each. {peers}; "
        "`lean`: its bucket, prefetch and live-parameter options set to one block."
    ]
    head = ["run", "contender", "formula", "sampled", "by high-water mark", "the larger over it", "fixed, MiB per rank"]
    text.append(table(head, rows))
    if judged:
        worst, where = max(judged)
        text.append(verdicts([verdict(f"bytes per parameter over the formula, worst ({where})", worst, TARGET)]))
    return "\n\n".join(text)

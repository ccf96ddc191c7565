"""The leg `step`: seconds per training step, ours beside the peers and the floor.

A table per workload and dtype. In every round each contender runs once, in fresh processes, in an order that turns
round from one round to the next; a rank's figure is the median of the last half of its steps, a contender's that of its
slowest rank. Before any figure counts, the first five losses have to agree with DDP's, which knows nothing of ours.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks import systems
from benchmarks.peers import Peers
from benchmarks.ranks import Outcome, RunError, run_ranks
from benchmarks.report import Spread, machine, table, verdict, verdicts
from benchmarks.worker import Job
from benchmarks.workloads import WORKLOADS, Workload

WORLD = 2
COMPARED = 5  # losses (as many as there are under --quick)
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}  # of a loss, relative (performance.md 4.1)
DISTURBED = 1.15  # a run is made again when its calibration is this much slower than the best one of the table
REPEATS = 2
AGAIN = "slipstream:1:again"  # stage 1 a second time: the noise

OURS = ("slipstream:1", "slipstream:2", "slipstream:3")
DEEPSPEED = ("deepspeed:1", "deepspeed:2", "deepspeed:3")
CONTENDERS = {
    "moving": (
        "floor", "slipstream:0", *OURS, *(f"{name}:gloo" for name in OURS), *(f"{name}:torch" for name in OURS), AGAIN,
        "ddp", "fsdp2:keep", "fsdp2:reshard", *DEEPSPEED,
    ),
    "computing": ("floor", *OURS, AGAIN, "ddp", "fsdp2:reshard", *DEEPSPEED),
    "tiny": ("floor", *OURS, "ddp"),
}  # fmt: skip
STEPS = {"moving": 12, "computing": 8, "tiny": 6}
QUICK = ("floor", "slipstream:1", "slipstream:3", "ddp", "deepspeed:3")
QUICK_STEPS = 4


@dataclass(slots=True, kw_only=True)
class Series:
    """One contender's rounds."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    trouble: str = ""


def seconds_of(outcome: Outcome, times: str = "times") -> float:
    """The slowest rank's median over the last half of its steps; `times`: wall clock, or "cpu_times" for that of all threads."""
    halves: list[list[float]] = [rank[times][len(rank[times]) // 2 :] for rank in outcome.ranks]
    return max(statistics.median(half) for half in halves)


def measure(
    work: Workload, dtype: str, contenders: Sequence[str], peers: Peers, *, rounds: int, steps: int, careful: bool
) -> tuple[dict[str, Series], int]:
    """Every contender's rounds, and how many runs were made again because the machine was slow."""
    series = {name: Series() for name in contenders}
    best, repeated = float("inf"), 0
    for turn in range(rounds):
        for name in contenders if turn % 2 == 0 else reversed(contenders):
            if series[name].trouble:
                continue
            job = Job(system=name, work=work, dtype=dtype, steps=steps)
            for attempt in range(REPEATS + 1):
                try:
                    outcome = run_ranks(job, WORLD, peers)
                except RunError as error:
                    series[name].trouble = str(error).strip().splitlines()[-1]
                    print(error)
                    break
                speed = max(rank["calibration"] for rank in outcome.ranks)
                best = min(best, speed)
                if not careful or speed <= DISTURBED * best or attempt == REPEATS:
                    series[name].seconds.append(seconds_of(outcome))
                    series[name].cpu_seconds.append(seconds_of(outcome, "cpu_times"))
                    series[name].losses = outcome.losses
                    print(f"  {work.name} {dtype} round {turn + 1} {name}: {seconds_of(outcome):.3f} s", flush=True)
                    break
                repeated += 1
    return series, repeated


def void_where_losses_differ(series: dict[str, Series], dtype: str) -> None:
    """A contender that computes something else is not compared."""
    reference = series["ddp"].losses
    if not reference:
        for one in series.values():
            one.trouble = one.trouble or "void: DDP did not run, and its losses are what the others are held against"
    for name, one in series.items():
        count = 1 if name == "floor" else COMPARED  # the floor does not train
        pairs = list(zip(one.losses[:count], reference[:count], strict=False))
        gap = max((abs(a - b) / max(1.0, abs(b)) for a, b in pairs), default=0.0)
        if gap > TOLERANCE[dtype] and not one.trouble:
            one.trouble = f"void: its losses differ from DDP's by {gap:.1e}"


def ratios(series: dict[str, Series], above: str, below: str) -> Spread | None:
    one, other = series.get(above), series.get(below)
    if one is None or other is None or one.trouble or other.trouble or not one.seconds or not other.seconds:
        return None
    return Spread.of([a / b for a, b in zip(one.seconds, other.seconds, strict=False)])


def show(series: dict[str, Series]) -> str:
    rows = []
    for name, one in series.items():
        over = ratios(series, name, "floor")
        if one.trouble or over is None:
            rows.append([systems.label(name), one.trouble or "not run", "", ""])
        else:
            rows.append([systems.label(name), Spread.of(one.seconds).show(), over.show(2), Spread.of(one.cpu_seconds).show()])
    noise = ratios(series, AGAIN, "slipstream:1")
    text = table(["contender", "step, s", "over the floor", "processor time per rank, s"], rows)
    return text + (f"\n\nNoise, stage 1 against itself: {noise.show(2)}." if noise else "")


def targets(series: dict[str, Series], *, moving: bool) -> list[list[str]]:
    """The rows of the issue's target table that this run can judge."""
    rows: list[list[str]] = []

    def judge(text: str, above: str, below: str, wanted: float, at_least: bool = False) -> None:
        if above not in series or below not in series:
            return
        ratio = ratios(series, above, below)
        if ratio is None:
            rows.append([text, "not measured", f"{'>=' if at_least else '<='} {wanted:g}", ""])
        else:
            rows.append(verdict(text, ratio.median, wanted, at_least=at_least))

    def faster_of(*names: str) -> str:
        there = [name for name in names if name in series and series[name].seconds and not series[name].trouble]
        return min(there, key=lambda name: statistics.median(series[name].seconds), default="")

    for stage in (1, 2, 3):
        ours, deepspeed = f"slipstream:{stage}", f"deepspeed:{stage}"
        judge(f"stage {stage} over the floor", ours, "floor", 1.12 if moving else 1.06)
        if not moving:
            continue
        judge(f"stage {stage}, faster than DeepSpeed", deepspeed, ours, 1.7, True)
        fsdp2 = "fsdp2:reshard" if stage == 3 else faster_of("fsdp2:keep", "fsdp2:reshard")
        judge(f"stage {stage}, faster than {systems.LABELS.get(fsdp2, '')}", fsdp2, ours, 1.4, True)
        judge(f"stage {stage}, gloo, faster than DeepSpeed", deepspeed, f"{ours}:gloo", 1.2, True)
        judge(f"stage {stage}, without native kernels, over the floor", f"{ours}:torch", "floor", 1.4)
    return rows


def run(peers: Peers, *, quick: bool, works: Sequence[str], dtypes: Sequence[str], only: Sequence[str], rounds: int) -> str:
    def wanted(name: str) -> bool:
        chosen = not only or name in ("floor", "ddp") or any(name.startswith(start) for start in only)
        return chosen and (peers.python is not None or not systems.needs_peers(name))

    text = [machine(peers)]
    for work in (WORKLOADS[name] for name in works):
        contenders = [name for name in (QUICK if quick else CONTENDERS[work.name]) if wanted(name)]
        for dtype in dtypes:
            series, repeated = measure(
                work, dtype, contenders, peers, rounds=rounds, steps=QUICK_STEPS if quick else STEPS[work.name], careful=not quick
            )
            void_where_losses_differ(series, dtype)
            text.append(f"### {work.name}, {dtype}: {work.describe()}, {WORLD} ranks, {rounds} rounds")
            text.append(show(series))
            if repeated:
                text.append(f"{repeated} runs were made again: the machine was slow in them.")
            text.append(verdicts(targets(series, moving=work.name == "moving")))
    return "\n\n".join(text)

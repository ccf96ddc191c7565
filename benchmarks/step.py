"""The leg `step`: seconds per training step, ours beside the peers and the floor.

A table per workload and dtype. The floor stays alive and takes turns of two steps with each contender, which runs in fresh
processes on the same cores, so that both see the machine as it is in that second. A turn's figure is the mean of its steps on
the slowest rank; it is held against the floor's turn before it. Two contenders are compared by their ratios to the floor.
Before any figure counts, the first five losses have to agree with DDP's, which knows nothing of ours.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks import systems
from benchmarks.peers import Peers
from benchmarks.ranks import Beside, Outcome, RunError
from benchmarks.report import Spread, machine, table, verdict, verdicts
from benchmarks.worker import Job
from benchmarks.workloads import Workload

WORLD = 2
COMPARED = 5  # losses
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}  # of a loss, relative (performance.md 4.1)
AGAIN = "slipstream:1:again"  # stage 1 a second time: the noise

OURS = ("slipstream:1", "slipstream:2", "slipstream:3")
DEEPSPEED = ("deepspeed:1", "deepspeed:2", "deepspeed:3")
SCATTER = ("deepspeed:1:scatter", "deepspeed:2:scatter")
CONTENDERS = {
    "moving": (
        "slipstream:0",
        *OURS,
        *(f"{name}:gloo" for name in OURS),
        *(f"{name}:torch" for name in OURS),
        AGAIN,
        "ddp",
        "fsdp2:keep",
        "fsdp2:reshard",
        *DEEPSPEED,
        *SCATTER,
    ),
    "computing": ("slipstream:0", *OURS, AGAIN, "ddp", "fsdp2:keep", "fsdp2:reshard", *DEEPSPEED),
    "tiny": (*OURS, "ddp"),
}
TURN = 2  # steps
TURNS = {"moving": 7, "computing": 5, "tiny": 9}  # the first warms up
QUICK = ("slipstream:1", "slipstream:3", "ddp", "deepspeed:3")
QUICK_TURNS = 3


@dataclass(slots=True, kw_only=True)
class Series:
    """One contender's turns, over all rounds, each with the floor's turn beside it."""

    seconds: list[float] = field(default_factory=list)
    floor: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    floor_loss: float = 0.0
    trouble: str = ""

    @property
    def over_floor(self) -> list[float]:
        return [ours / floor for ours, floor in zip(self.seconds, self.floor, strict=True)]


def seconds_of(outcome: Outcome, times: str = "times") -> float:
    """The slowest rank's median over the last half of its steps; `times`: wall clock, or "cpu_times" for that of all threads."""
    halves: list[list[float]] = [rank[times][len(rank[times]) // 2 :] for rank in outcome.ranks]
    return max(statistics.median(half) for half in halves)


def measure(work: Workload, dtype: str, contenders: Sequence[str], peers: Peers, *, rounds: int, turns: int) -> dict[str, Series]:
    """Every contender's turns."""
    series = {name: Series() for name in contenders}
    most = turns * TURN * rounds * len(contenders)
    floor = Job(system="floor", work=work, dtype=dtype, steps=most, marks=tuple(range(0, most + 1, TURN)))
    with Beside(floor, WORLD, peers) as beside:
        for turn in range(rounds):
            for name in contenders if turn % 2 == 0 else reversed(contenders):
                one = series[name]
                if one.trouble:
                    continue
                job = Job(system=name, work=work, dtype=dtype, steps=turns * TURN, marks=floor.marks[: turns + 1])
                try:
                    outcome, figures = beside.run(job)
                except RunError as error:
                    one.trouble = str(error).strip().splitlines()[-1]
                    print(error)
                    continue
                one.seconds += [figure.seconds for figure in figures[1:]]
                one.cpu_seconds += [figure.cpu_seconds for figure in figures[1:]]
                one.floor += [figure.beside for figure in figures[1:]]
                one.losses, one.floor_loss = outcome.losses, beside.loss
                ratio = Spread.of(one.over_floor[1 - turns :]).show(2)
                print(f"  {work.name} {dtype} round {turn + 1} {name}: {one.seconds[-1]:.3f} s, {ratio} floors", flush=True)
    return series


def void_where_losses_differ(series: dict[str, Series], dtype: str) -> None:
    """A contender that computes something else is not compared."""
    reference = series["ddp"].losses
    if not reference:
        for one in series.values():
            one.trouble = one.trouble or "void: DDP did not run, and its losses are what the others are held against"
    for one in series.values():
        if one.trouble:
            continue
        gap = _gap(one.losses[:COMPARED], reference[:COMPARED])
        if gap > TOLERANCE[dtype]:
            one.trouble = f"void: its losses differ from DDP's by {gap:.1e}"
        gap = _gap([one.floor_loss], reference[:1])  # the floor does not train
        if gap > TOLERANCE[dtype]:
            one.trouble = f"void: the floor's loss differs from DDP's by {gap:.1e}"


def _gap(losses: Sequence[float], reference: Sequence[float]) -> float:
    return max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(losses, reference, strict=True))


def ratios(series: dict[str, Series], above: str, below: str) -> Spread | None:
    """`above` over `below`, each by its own floor; `below` may be that floor."""
    one = series.get(above)
    if one is None or one.trouble or not one.seconds:
        return None
    if below == "floor":
        return Spread.of(one.over_floor)
    other = series.get(below)
    if other is None or other.trouble or not other.seconds:
        return None
    return Spread.of([a / b for a, b in zip(one.over_floor, other.over_floor, strict=True)])


def show(series: dict[str, Series]) -> str:
    rows = []
    for name, one in series.items():
        over = ratios(series, name, "floor")
        if over is None:
            rows.append([systems.label(name), one.trouble or "not run", "", "", ""])
        else:
            spreads = [Spread.of(one.seconds).show(), Spread.of(one.floor).show(), over.show(2)]
            rows.append([systems.label(name), *spreads, Spread.of(one.cpu_seconds).show()])
    noise = ratios(series, AGAIN, "slipstream:1")
    text = table(["contender", "step, s", "floor beside it, s", "over the floor", "processor time per rank, s"], rows)
    return text + (f"\n\nNoise, stage 1 against itself: {noise.show(2)}." if noise else "")


def targets(series: dict[str, Series], *, moving: bool) -> list[list[str]]:
    """The rows of the issue's target table that this run can judge."""
    rows: list[list[str]] = []

    def judge(text: str, above: str, below: str, wanted: float, at_least: bool = False) -> None:
        if above not in series or below not in (*series, "floor"):
            return
        ratio = ratios(series, above, below)
        if ratio is None:
            rows.append([text, "not measured", f"{'>=' if at_least else '<='} {wanted:g}", ""])
        else:
            rows.append(verdict(text, ratio.median, wanted, at_least=at_least))

    def faster_of(*names: str) -> str:
        there = [name for name in names if name in series and series[name].seconds and not series[name].trouble]
        return min(there, key=lambda name: statistics.median(series[name].over_floor), default="")

    for stage in (1, 2, 3):
        ours, deepspeed = f"slipstream:{stage}", faster_of(f"deepspeed:{stage}", f"deepspeed:{stage}:scatter")
        judge(f"stage {stage} over the floor", ours, "floor", 1.12 if moving else 1.06)
        if not moving:
            continue
        judge(f"stage {stage}, faster than DeepSpeed", deepspeed, ours, 1.7, True)
        fsdp2 = "fsdp2:reshard" if stage == 3 else faster_of("fsdp2:keep", "fsdp2:reshard")
        judge(f"stage {stage}, faster than {systems.LABELS.get(fsdp2, '')}", fsdp2, ours, 1.4, True)
        judge(f"stage {stage}, gloo, faster than DeepSpeed", deepspeed, f"{ours}:gloo", 1.2, True)
        judge(f"stage {stage}, without native kernels, over the floor", f"{ours}:torch", "floor", 1.4)
    return rows


def run(peers: Peers, work: Workload, dtype: str, *, quick: bool, only: Sequence[str], rounds: int) -> str:
    def wanted(name: str) -> bool:
        chosen = not only or name == "ddp" or any(name.startswith(start) for start in only)
        return chosen and (peers.python is not None or not systems.needs_peers(name))

    head = machine(peers)
    contenders = [name for name in (QUICK if quick else CONTENDERS[work.name]) if wanted(name)]
    turns = QUICK_TURNS if quick else TURNS[work.name]
    series = measure(work, dtype, contenders, peers, rounds=rounds, turns=turns)
    void_where_losses_differ(series, dtype)
    what = f"{work.describe()}, {dtype}, {WORLD} ranks, {rounds} x {turns - 1} turns of {TURN} steps."
    return "\n\n".join([head, what, show(series), verdicts(targets(series, moving=work.name == "moving"))])

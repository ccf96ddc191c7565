"""The legs `step`, `transports` and `computing`: seconds per training step, over the floor.

The floor stays alive and takes turns with each contender, which runs in fresh processes on the same cores, so that both see the
machine as it is in that second. A turn's figure is the mean of its steps on the slowest rank, over the floor's turn before it.
Two contenders are compared by their ratios to the floor. A contender whose first losses are not DDP's is void.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import systems
from benchmarks.legs import Options
from benchmarks.peers import Peers, prepare
from benchmarks.ranks import Ranks, Seat
from benchmarks.report import Spread, table, verdict, verdicts
from benchmarks.worker import ROOT, Failed
from benchmarks.workloads import WORKLOADS, Workload

WORLD = 2
COMPARED = 5  # losses
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}  # of a loss, relative
AGAIN = "slipstream:1:again"  # stage 1 a second time: the noise

OURS = ("slipstream:1", "slipstream:2", "slipstream:3")
FSDP2 = ("fsdp2:keep", "fsdp2:reshard")
DEEPSPEED = ("deepspeed:1", "deepspeed:2", "deepspeed:3")
CONTENDERS = {
    "step": (*OURS, AGAIN, "ddp", *FSDP2, "deepspeed:1:scatter", *DEEPSPEED[1:]),
    "transports": (
        "slipstream:0",
        *OURS,
        *(f"{name}:gloo" for name in OURS),
        *(f"{name}:torch" for name in OURS),
        AGAIN,
        "ddp",
        *DEEPSPEED,
        "deepspeed:1:scatter",
        "deepspeed:2:scatter",
    ),
    "computing": ("slipstream:0", *OURS, AGAIN, "ddp", *FSDP2, *DEEPSPEED),
}
QUICK = ("slipstream:1", "slipstream:3", "ddp", "deepspeed:3")
TURN = 1  # steps
TURNS, QUICK_TURNS = 6, 5  # the first warms up
OVER_FLOOR = {"moving": 1.12, "computing": 1.06}


@dataclass(slots=True, kw_only=True)
class Series:
    """One contender's turns, over all rounds, each with the floor's turn before it."""

    seconds: list[float] = field(default_factory=list)
    floor: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    trouble: str = ""

    @property
    def over_floor(self) -> list[float]:
        return [ours / floor for ours, floor in zip(self.seconds, self.floor, strict=True)]


def start(
    system: str,
    work: Workload,
    dtype: str,
    world: int,
    peers: Peers | None = None,
    seat: Seat | None = None,
    before: Path | None = None,
) -> Ranks:
    """The ranks of a contender, ready to make steps; one that ends in ":before" imports Slipstream from that checkout. Raises
    Failed."""
    path = {"PYTHONPATH": f"{before}/src{os.pathsep}{ROOT}"} if system.endswith(":before") else {}
    venv = peers if peers is not None and systems.needs_peers(system) else None
    return Ranks(
        "benchmarks.systems:train",
        {"system": system, "work": dataclasses.asdict(work), "dtype": dtype},
        world,
        name=system,
        python=venv.python if venv else None,
        env=(venv.env() if venv else {}) | systems.environment(system) | path,
        seat=seat,
    )


def _slowest(turn: Sequence[dict[str, Any]], times: str) -> float:
    return max(statistics.mean(rank[times]) for rank in turn)


def _losses(turn: Sequence[dict[str, Any]]) -> list[float]:
    """Per step, the mean over ranks."""
    return [statistics.mean(step) for step in zip(*(rank["losses"] for rank in turn), strict=True)]


def measure(
    work: Workload, dtype: str, contenders: Sequence[str], peers: Peers, *, rounds: int, turns: int, checkout: Path | None = None
) -> tuple[dict[str, Series], float]:
    """Every contender's turns, and the floor's loss."""
    series = {name: Series() for name in contenders}
    with start("floor", work, dtype, WORLD) as floor:
        (loss,) = _losses(floor.call("steps", count=1))
        for turn in range(rounds):
            for name in contenders if turn % 2 == 0 else reversed(contenders):
                one = series[name]
                if one.trouble:
                    continue
                losses = []
                try:
                    with start(name, work, dtype, WORLD, peers, before=checkout) as ranks:
                        for at in range(turns):
                            before = floor.call("steps", count=TURN)
                            own = ranks.call("steps", count=TURN)
                            losses += _losses(own)
                            if at:
                                one.seconds.append(_slowest(own, "times"))
                                one.cpu_seconds.append(_slowest(own, "cpu_times"))
                                one.floor.append(_slowest(before, "times"))
                except Failed as error:
                    if error.name.startswith("floor"):
                        raise
                    one.trouble = error.reason
                    print(error)
                    continue
                one.losses = losses
                ratio = Spread.of(one.over_floor[1 - turns :]).show(2)
                print(f"  {work.name} {dtype} round {turn + 1} {name}: {one.seconds[-1]:.3f} s, {ratio} floors", flush=True)
    return series, loss


def void_where_losses_differ(series: dict[str, Series], floor_loss: float, dtype: str) -> None:
    """A contender that computes something else is not compared. The floor does not train: only its first loss is."""
    reference = series["ddp"].losses
    for one in series.values():
        if one.trouble:
            continue
        if not reference:
            one.trouble = "void: DDP did not run, and its losses are the reference"
        elif (gap := _gap(one.losses, reference)) > TOLERANCE[dtype]:
            one.trouble = f"void: its losses differ from DDP's by {gap:.1e}"
        elif (gap := _gap([floor_loss], reference[:1])) > TOLERANCE[dtype]:
            one.trouble = f"void: the floor's loss differs from DDP's by {gap:.1e}"


def _gap(losses: Sequence[float], reference: Sequence[float]) -> float:
    pairs = zip(losses[:COMPARED], reference[:COMPARED], strict=True)
    return max(abs(a - b) / max(1.0, abs(b)) for a, b in pairs)


def ratios(series: dict[str, Series], above: str, below: str) -> Spread | None:
    """`above` over `below`, each over its own floor; `below` may be that floor."""
    one, other = series.get(above), series.get(below)
    if one is None or one.trouble or not one.seconds:
        return None
    if below == "floor":
        return Spread.of(one.over_floor)
    if other is None or other.trouble or not other.seconds:
        return None
    return Spread.ratio(one.over_floor, other.over_floor)


def show(series: dict[str, Series]) -> str:
    rows = []
    for name, one in series.items():
        over = ratios(series, name, "floor")
        if over is None:
            rows.append([systems.label(name), one.trouble or "not run"])
        else:
            spreads = [Spread.of(one.seconds).show(), Spread.of(one.floor).show(), over.show(2)]
            rows.append([systems.label(name), *spreads, Spread.of(one.cpu_seconds).show()])
    noise = ratios(series, AGAIN, "slipstream:1")
    text = table(["contender", "step, s", "floor next to it, s", "over the floor", "processor time per rank, s"], rows)
    return text + (f"\n\nNoise, stage 1 against itself: {noise.show(2)}." if noise else "")


def targets(series: dict[str, Series], over_floor: float) -> list[list[str]]:
    """The target rows that this run can judge."""
    rows: list[list[str]] = []

    def judge(text: str, above: str, below: str, wanted: float, at_least: bool = False) -> None:
        if above not in series or below not in (*series, "floor"):
            return
        ratio = ratios(series, above, below)
        if ratio is None:
            rows.append([text, "not measured", f"{'>=' if at_least else '<='} {wanted:g}"])
        else:
            rows.append(verdict(text, ratio.median, wanted, at_least=at_least))

    def faster_of(*names: str) -> str:
        there = [name for name in names if name in series and series[name].seconds and not series[name].trouble]
        return min(there, key=lambda name: statistics.median(series[name].over_floor), default="")

    for stage in (1, 2, 3):
        ours, deepspeed = f"slipstream:{stage}", faster_of(f"deepspeed:{stage}", f"deepspeed:{stage}:scatter")
        fsdp2 = "fsdp2:reshard" if stage == 3 else faster_of(*FSDP2)
        judge(f"stage {stage} over the floor", ours, "floor", over_floor)
        judge(f"stage {stage}, faster than DeepSpeed", deepspeed, ours, 1.7, True)
        judge(f"stage {stage}, faster than {systems.LABELS.get(fsdp2, '')}", fsdp2, ours, 1.4, True)
        judge(f"stage {stage}, over the checkout before", ours, f"{ours}:before", 1.02)
        judge(f"stage {stage}, gloo, faster than DeepSpeed", deepspeed, f"{ours}:gloo", 1.2, True)
        judge(f"stage {stage}, without native kernels, over the floor", f"{ours}:torch", "floor", 1.4)
    return rows


def run(options: Options, *, workload: str, contenders: str, dtype: str) -> str:
    peers, work = prepare(options.peers), WORKLOADS[workload]

    def wanted(name: str) -> bool:
        chosen = not options.only or name == "ddp" or name.startswith(options.only)
        return chosen and (peers.python is not None or not systems.needs_peers(name))

    names = [name for name in (QUICK if options.quick else CONTENDERS[contenders]) if wanted(name)]
    if options.before is not None:
        names += [f"{name}:before" for name in OURS if name in names]
    turns, rounds = QUICK_TURNS if options.quick else TURNS, options.num_rounds(1)
    series, loss = measure(work, dtype, names, peers, rounds=rounds, turns=turns, checkout=options.before)
    void_where_losses_differ(series, loss, dtype)
    what = f"{work.describe()}, {dtype}, {WORLD} ranks, {rounds} x {turns - 1} turns. {peers}; one thread per rank."
    rows = targets(series, OVER_FLOOR[workload])
    return "\n\n".join([what, show(series), verdicts(rows)])

"""What the serving legs share: their options, turns, limits, and tables."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.legs import Options
from benchmarks.report import Spread, table, verdict
from benchmarks.serving import models, traces
from benchmarks.serving.contenders import OURS, Contender, Fleet, Process, chosen
from benchmarks.serving.limits import Rates, Shape
from benchmarks.serving.traces import Outcome, Trace
from benchmarks.worker import Worker

Results = dict[tuple[str, str], list[Outcome]]  # (trace, contender) -> an outcome per round
MODEL = "SmolLM2-135M-Instruct from one bf16 copy; every contender has all cores."


@dataclass(frozen=True, kw_only=True)
class Run:
    """A leg's options, and the limits that it measures."""

    pythons: dict[str, Path]
    models: Path
    shape: Shape
    quick: bool
    rounds: int
    only: Sequence[str] = ()
    before: Path | None = None  # another checkout of Slipstream
    limits: list[Rates] = field(default_factory=list)  # of each round so far

    @classmethod
    def of(cls, options: Options, rounds: int, folder: Path | None = None, shape: Shape | None = None) -> Run:
        """`folder`: by default SmolLM2's. `shape`: by default that of the dense model in it."""
        folder = folder or models.FOLDER
        return cls(
            pythons={
                **dict.fromkeys(("ours", "before"), Path(sys.executable)),
                "vllm": options.serve_peers,
                "llama": options.serve_peers,
            },
            models=folder,
            shape=shape or Shape.read(folder / "hf"),
            quick=options.quick,
            rounds=options.num_rounds(rounds),
            only=options.only,
            before=options.before,
        )

    def chosen(self, contenders: Sequence[Contender]) -> list[Contender]:
        return chosen(contenders, self.only, self.quick)

    def fleet(self) -> Fleet:
        return Fleet(self.pythons, self.models, self.before)

    def measure_limits(self) -> None:
        with Worker("benchmarks.serving.limits:measure") as worker:
            worker.ready()
            self.limits.append(Rates(*worker.call("rates")))

    @property
    def rates(self) -> Rates:
        """Medians."""
        return Rates(*(Spread.of(values).median for values in zip(*self.limits, strict=True)))

    def describe_limits(self) -> str:
        read, bf16, fp32 = (Spread.of([value / 1e9 for value in values]) for values in zip(*self.limits, strict=True))
        return (
            f"Limits, measured in each round: all cores read {read.show(1)} GB/s and multiply {bf16.show(0)} GFLOP/s in bf16, "
            f"{fp32.show(0)} in fp32 (torch; the larger of the two is the limit)."
        )


def judged(figure: str, over: Sequence[float] | str, wanted: float) -> list[str]:
    """A row of the target table: the median of paired ratios, or the reason why there are none."""
    if isinstance(over, str):
        return [figure, "-", f">= {wanted:g}", f"not measured: {over}"]
    return verdict(figure, Spread.of(over).median, wanted, at_least=True)


def ratios(ours: Sequence[float] | None, reference: Sequence[float] | None, why: str | None = None) -> list[float] | str:
    """Round by round."""
    if not ours or not reference:
        return why or "not in this run"
    return [a / b for a, b in zip(ours, reference, strict=True)]


def warm(fleet: Fleet) -> None:
    for process in list(fleet.running.values()):
        for trace in (traces.batch(-1, 2, 64, 4), traces.batch(-2, 1, 512, 1)):
            if process.contender.name in fleet.running:
                fleet.run(process, trace)


def interleaved(
    run: Run,
    fleet: Fleet,
    kinds: Mapping[str, Callable[[int], Trace]],
    joins: Callable[[str, Contender], bool] = lambda kind, contender: True,
) -> Results:
    """Trace by trace, contenders in turns, every other round backwards. `joins`: whether a contender plays a trace."""
    results: Results = {}
    for turn in range(run.rounds):
        run.measure_limits()
        for kind, make in kinds.items():
            trace = make(turn)
            order = [process for process in fleet.running.values() if joins(kind, process.contender)]
            for process in order if turn % 2 == 0 else order[::-1]:
                name = process.contender.name
                outcome = fleet.run(process, trace)
                if outcome is not None:
                    results.setdefault((kind, name), []).append(outcome)
                    print(f"  {kind}, {name}: {outcome.seconds:.2f} s", flush=True)
    return {(kind, name): outcomes for (kind, name), outcomes in results.items() if name in fleet.running}


def first_agreement(results: Results, name: str, ours: str = OURS.name) -> float:
    """The share of a contender's first tokens that are those of ours (by default in bf16): a low one means another model."""
    pairs = [
        pair
        for (kind, one), outcomes in results.items()
        if one == name and (kind, ours) in results
        for a, b in zip(results[kind, ours], outcomes, strict=True)
        for pair in zip(a.first, b.first, strict=True)
    ]
    return sum(first == reference for first, reference in pairs) / max(1, len(pairs))


def contenders_table(processes: Iterable[Process], results: Results, ours: str = OURS.name) -> str:
    """What ran, so that a reader can judge the comparison."""
    rows = []
    for process in processes:
        name, facts = process.contender.name, process.facts
        outcomes = [outcome for (_, one), each in results.items() if one == name for outcome in each]
        busy = sum(outcome.cpu for outcome in outcomes) / sum(outcome.seconds for outcome in outcomes)
        agreement = f"{first_agreement(results, name, ours):.0%}"
        rows.append([name, str(facts["threads"]), facts["precision"], facts["setting"], facts["kernels"], agreement, f"{busy:.1f}"])
    return table(["contender", "threads", "precision", "setting", "what ran", "first tokens as ours", "cores busy"], rows)


def absent(fleet: Fleet) -> list[list[str]]:
    """Rows of the contenders that failed, with the reasons."""
    return [[name, why] for name, why in fleet.missing.items()]

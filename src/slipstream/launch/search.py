"""Which configuration `slipstream tune` runs next, which runs it stops early, and why it drops the others. Pure functions.

The planner predicts every candidate. Its times are lower bounds, and fall below measured times by a factor that is about equal for
similar configurations, so each run corrects the predictions of the candidates most similar to it. A run continues at each rung
(after STEPS, twice as many, ...) only while it is in the better half of all runs there: successive halving without its waits (ASHA,
arXiv:1810.05934).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

FIRST_RUNG = 3  # timed steps
_NOISE = 1.05  # a run that is slower by less than this factor is not stopped
_GAIN = 0.99  # a run is an improvement if it costs less than this share of the best
_ALIKE = 0.02  # predictions that differ by less are equal: larger micro-batches win, then lower stages, which move less data

BATCH = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
AXES: Mapping[str, tuple[str, ...]] = {  # axis of the search -> the keys that it changes
    "micro": BATCH,
    "stage": ("zero_optimization.stage",),
    "offload": tuple(f"zero_optimization.{key}" for key in ("offload_optimizer", "offload_param", "sub_group_size")),
    "activations": ("slipstream.activations",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    changes: Mapping[str, Any]  # of the config, by dotted key
    micro: int  # samples of a micro-batch
    samples: int  # of a step, over all ranks
    stage: int = 0  # of ZeRO
    seconds: float = 0.0  # seconds per step, predicted, a lower bound; 0: not predicted
    memory: int | None = None  # bytes per rank, predicted
    fits: bool = True

    @property
    def key(self) -> str:
        return key_of(self.changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    changes: Mapping[str, Any]
    outcome: str  # measured, stopped (early) or failed
    reason: str = ""
    samples: int = 0
    seconds: float = 0.0  # seconds per step, median of the timed steps; 0: none was timed
    steps: int = 0  # timed
    loss: float | None = None  # mean of rank 0's over the second half of the timed steps
    memory: int | None = None  # peak of rank 0, measured
    rungs: tuple[float, ...] = ()  # cost at each rung that the run has passed
    wall: float = 0.0  # seconds of the whole run

    @property
    def key(self) -> str:
        return key_of(self.changes)


class Rules(NamedTuple):
    """When the search ends, and what is best."""

    runs: int = 8  # at most
    patience: int = 2  # consecutive runs without an improvement
    margin: float = 1.15  # candidates predicted slower than this multiple of the best are not run
    metric: str = "throughput"  # the cost: latency, seconds of a step; loss; throughput and flops, seconds of a sample
    tuner: str = "model_based"  # or gridsearch, random: the order of runs


def key_of(changes: Mapping[str, Any]) -> str:
    return json.dumps(changes, sort_keys=True)


def cost(seconds: float, samples: int, rules: Rules) -> float:
    return seconds if rules.metric == "latency" else seconds / max(samples, 1)


def kept(
    candidates: Iterable[Candidate],
    axes: Sequence[str],
    *,
    micros: Sequence[int] | None = None,
    largest: int | None = None,
    fixed: int | None = None,
) -> list[Candidate]:
    """The candidates that change only what the axes allow, without duplicates.

    micros: allowed sizes of micro-batches; largest: keep only this number of sizes, the largest that fit; fixed: the size that the
    script uses whatever the config says
    """
    allowed = {key for axis in axes for key in AXES[axis]}
    by_key = {each.key: each for each in candidates if allowed.issuperset(each.changes)}
    chosen = [each for each in by_key.values() if micros is None or not each.changes or each.micro in micros]
    if fixed is not None:
        chosen = [each for each in chosen if not set(BATCH) & set(each.changes)]
    if largest is not None:
        sizes = sorted({each.micro for each in chosen if each.fits})[-largest:]
        chosen = [each for each in chosen if not each.changes or each.micro in sizes]
    return chosen


def corrected(candidate: Candidate, candidates: Mapping[str, Candidate], rows: Sequence[Outcome], rules: Rules) -> float:
    """The cost that measurements suggest for a candidate: the fitted value times measured / fitted of the runs most similar to it.

    The fit is factor * predicted + overhead * micro-batches, because the planner counts work but not calls. 0 without a prediction.
    """
    known = [(row, candidates[row.key]) for row in rows if row.seconds and row.key in candidates and candidates[row.key].seconds]
    if not known or not candidate.seconds:
        return cost(candidate.seconds, candidate.samples, rules)
    factor, overhead = fit([(each.seconds, each.samples / each.micro, row.seconds) for row, each in known])

    def fitted(each: Candidate) -> float:
        return factor * each.seconds + overhead * each.samples / each.micro

    def distance(other: Candidate) -> int:
        keys = {*candidate.changes, *other.changes} - set(BATCH)
        differing = sum(candidate.changes.get(key) != other.changes.get(key) for key in keys)
        return differing + (candidate.micro != other.micro)

    nearest = min(distance(each) for _, each in known)
    ratios = [row.seconds / fitted(each) for row, each in known if distance(each) == nearest]
    return cost(fitted(candidate) * median(ratios), candidate.samples, rules)


def fit(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Factor and overhead, at least 0, for points (predicted, number of micro-batches, measured): least relative squares."""
    rows = [(predicted / measured, number / measured) for predicted, number, measured in points]
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    if determinant > 1e-6 * aa * bb:
        factor, overhead = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
        if factor > 0 and overhead > 0:
            return factor, overhead
        if factor <= 0:
            return 0.0, b / bb
    return a / aa, 0.0


def best_of(rows: Iterable[Outcome], rules: Rules) -> Outcome | None:
    """The run with the lowest cost among those measured to their end."""
    measured = [row for row in rows if row.outcome == "measured" and row.seconds]
    return min(measured, key=lambda row: cost_of(row, rules), default=None)


def order(candidates: Sequence[Candidate], rows: Sequence[Outcome], rules: Rules) -> list[tuple[Candidate, float]]:
    """Candidates that fit and have not run, with their corrected costs (0: not predicted), the next one first."""
    tried, known = {row.key for row in rows}, {each.key: each for each in candidates}
    untried = [each for each in candidates if each.fits and each.key not in tried]
    costs = {each.key: corrected(each, known, rows, rules) for each in untried}
    if rules.tuner == "model_based":

        def rank(each: Candidate) -> tuple[float, int, int, int]:
            value = costs[each.key]
            return round(math.log(value) / _ALIKE) if value else 0.0, -each.micro, each.stage, len(each.changes)

        untried.sort(key=rank)
    return [(each, costs[each.key]) for each in untried]


def next_run(candidates: Sequence[Candidate], rows: Sequence[Outcome], rules: Rules) -> Candidate | str:
    """The next candidate to run, or why the search ends."""
    if len(rows) >= rules.runs:
        return f"{len(rows)} runs were allowed"
    best, without = best_of(rows, rules), 0
    for i in range(len(rows), 0, -1):
        before = best_of(rows[: i - 1], rules)
        now = best_of(rows[:i], rules)
        if before is None or now is None or cost_of(now, rules) < cost_of(before, rules) * _GAIN:
            break
        without += 1
    if without >= rules.patience:
        return f"{without} runs in a row were no faster"
    ranked = order(candidates, rows, rules)
    if not ranked:
        return "every candidate has run"
    if rules.tuner == "model_based" and best is not None:
        chances = [each for each, value in ranked if value <= rules.margin * cost_of(best, rules)]
        return chances[0] if chances else f"all others are predicted at least {rules.margin - 1:.0%} slower"
    return ranked[0][0]


def cost_of(row: Outcome, rules: Rules) -> float:
    """The value that the search minimizes."""
    if rules.metric == "loss":
        return math.inf if row.loss is None else row.loss
    return cost(row.seconds, row.samples, rules)


def rungs(steps: int, rules: Rules) -> Iterator[int]:
    """The numbers of timed steps after which a run may be stopped; losses say little before a quarter of the steps."""
    rung = max(FIRST_RUNG, steps // 4) if rules.metric == "loss" else FIRST_RUNG
    while rung < steps:
        yield rung
        rung *= 2


def is_slow(values: Sequence[float], rows: Sequence[Outcome]) -> bool:
    """Whether a run with these costs at its rungs is outside the better half of all runs at the last of its rungs."""
    place = len(values) - 1
    others = sorted(row.rungs[place] for row in rows if len(row.rungs) > place)
    return bool(others) and values[place] > others[(len(others) + 1) // 2 - 1] * _NOISE


def why_not_run(candidate: Candidate, value: float, best: Outcome | None, rules: Rules, ended: str, budget: int) -> str:
    if not candidate.fits and candidate.memory is not None:
        return f"predicted to need {candidate.memory / 2**30:.2f} GiB, above {budget / 2**30:.2f} GiB"
    if best is not None and value > (most := cost_of(best, rules)):
        return f"predicted {value / most:.2f} times as slow as the best"
    return f"not run: {ended}"


_OUT_OF_MEMORY = (
    "out of memory",
    "OutOfMemory",
    "MemoryError",
    "annot allocate memory",
    "not enough memory",
    "SIGKILL",
    "Signal 9",
)


def reason_of(code: int, log: str) -> str:
    """Why a run failed, from its exit code and its output: the launcher's summary, else the last line."""
    _, _, summary = log.rpartition("failed first")
    lines = [line.strip() for line in (summary or log).splitlines() if line.strip()]
    errors = [line for line in lines if line.partition(":")[0].endswith(("Error", "Exception", "Interrupt"))]
    text = (errors or (lines[1:2] if summary else lines[-1:]) or [f"exit code {code}"])[0]
    if any(word in log for word in _OUT_OF_MEMORY) and "out of memory" not in text.lower():
        text = f"out of memory: {text}"
    return f"{text[:240]}{'...' if len(text) > 240 else ''}"

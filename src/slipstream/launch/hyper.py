"""`slipstream tune --search` and `--lr-range`: choose hyperparameters by the loss of short runs.

`--search` asks Optuna's TPE sampler for values and reports the losses to it. A run whose loss is outside the better half at a rung
is stopped. `--lr-range` is one run with an exponentially growing learning rate (Smith, arXiv:1506.01186).
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from statistics import linear_regression, pstdev
from typing import TYPE_CHECKING, Any, NamedTuple

from slipstream.world.extras import needs

if TYPE_CHECKING:
    from slipstream.launch.tune import Tuner

LR = "optimizer.params.lr"
_OF_CONFIGURATIONS = ("axes", "disk", "max_batch", "memory", "metric", "micro_batches", "patience", "tuner")  # options
_DIVERGED = 4.0  # a loss above this multiple of the smallest smoothed loss has diverged
_MEMORY = 0.9  # decay of the smoothed loss
_MOST_FAILED = 3  # failed runs, without a successful one, that end the search
_NARROWEST = 8  # the fewest steps over which a slope is fitted; otherwise a fifth of the test
_STANDS_OUT = 4.0  # standard errors of its slope by which a fall stands out


class Range(NamedTuple):
    """Values of a key of the config."""

    key: str
    low: float
    high: float
    log: bool = False
    whole: bool = False


def range_of(text: str) -> Range:
    """Parse `lr=1e-5:1e-2:log` or `gradient_clipping=0.1:1`; `:int` for whole numbers. Raises ValueError."""
    match = re.fullmatch(r"([\w.]+)=([^:]+):([^:]+?)(:log)?(:int)?", text)
    try:
        if match is None:
            raise ValueError
        low, high = float(match[2]), float(match[3])
        if not low < high or (match[4] and low <= 0):
            raise ValueError
    except ValueError:
        raise ValueError(f"--search {text!r} is not KEY=LOW:HIGH[:log][:int]; write lr=1e-5:1e-2:log") from None
    key, whole = LR if match[1] == "lr" else match[1], bool(match[5])
    return Range(key, int(low) if whole else low, int(high) if whole else high, bool(match[4]), whole)


def check(options: Any) -> None:
    """Raise ValueError for a search that cannot start."""
    if options.search and options.lr_range:
        raise ValueError("--search and --lr-range are two searches; pass one of them")
    idle = [name for name in _OF_CONFIGURATIONS if getattr(options, name) is not None]
    if idle and (options.search or options.lr_range):
        raise ValueError(f"--{idle[0].replace('_', '-')} has no effect with --search and --lr-range: leave it out")
    for text in options.search:
        range_of(text)
    if options.search:
        _optuna()


def _optuna() -> Any:
    with needs("--search", extra="tune"):
        return importlib.import_module("optuna")


def search(tuner: Tuner) -> str:
    """Run the search that the options request; known runs count. Returns why it ended."""
    if tuner.options.lr_range:
        return _range_test(tuner, *tuner.options.lr_range)
    optuna = _optuna()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=len(tuner.rows)))
    kinds = optuna.distributions.FloatDistribution, optuna.distributions.IntDistribution
    ranges = [range_of(text) for text in tuner.options.search]
    distributions = {each.key: kinds[each.whole](each.low, each.high, log=each.log) for each in ranges}
    for row in tuner.rows:
        if row.loss is not None:
            study.add_trial(optuna.trial.create_trial(params=dict(row.changes), distributions=distributions, value=row.loss))
    while len(tuner.rows) < tuner.rules.runs:
        trial = study.ask(distributions)
        row = tuner.run(trial.params)
        study.tell(trial, row.loss, state=None if row.loss is not None else optuna.trial.TrialState.FAIL)
        if len(tuner.rows) == _MOST_FAILED and all(each.outcome == "failed" for each in tuner.rows):
            raise ValueError(f"the first {_MOST_FAILED} runs failed; the last one: {row.reason}")
    return f"{len(tuner.rows)} runs were allowed"


class Found(NamedTuple):
    """Learning rates that a range test suggests; None: no such rate."""

    steepest: float | None  # where the loss falls fastest, among falls that stand out from the noise
    diverges: float | None  # where the loss exceeds four times its smallest value

    @property
    def suggested(self) -> float:
        """The smaller of `steepest` and `diverges` / 10. Raises ValueError without both."""
        known = [*filter(None, [self.steepest, self.diverges and self.diverges / 10])]
        if not known:
            raise ValueError("the loss neither falls nor diverges at any rate: choose a wider --lr-range, or more --steps")
        return min(known)


def read(rates: Sequence[float], losses: Sequence[float]) -> Found:
    """The rates that a test suggests, from the loss of each of its steps."""
    mean, least, end = 0.0, math.inf, len(losses)
    for i, loss in enumerate(losses):
        mean = _MEMORY * mean + (1 - _MEMORY) * loss
        smooth = mean / (1 - _MEMORY ** (i + 1))
        if not smooth <= _DIVERGED * least:  # also if it is NaN
            end = i
            break
        least = min(least, smooth)
    width = max(_NARROWEST, len(losses) // 5)
    slopes = {}
    for start in range(end - width + 1):
        slope, error = _slope([math.log(rate) for rate in rates[start : start + width]], losses[start : start + width])
        if slope < -_STANDS_OUT * error:
            slopes[rates[start + width // 2]] = slope
    steepest = min(slopes, key=lambda rate: slopes[rate], default=None)
    return Found(steepest, rates[end] if end < len(losses) else None)


def _slope(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """The slope of the least-squares line, and its standard error."""
    slope, intercept = linear_regression(x, y)
    squares = sum((b - slope * a - intercept) ** 2 for a, b in zip(x, y, strict=True))
    return slope, math.sqrt(squares / (len(x) - 2)) / (pstdev(x) * math.sqrt(len(x)))


def _range_test(tuner: Tuner, low: float, high: float) -> str:
    """One run over the rates; its row gets the suggested rate. Returns the finding as text."""
    if not tuner.rows:
        row = tuner.run({}, rates=(low, high))
        if row.outcome != "measured":
            raise ValueError(f"the run over learning rates failed: {row.reason}; mend the script, then pass --overwrite")
    steps = [line for line in tuner.lines(0)[1:] if line["timed"]]
    found = read([step["lr"] for step in steps], [step["loss"] for step in steps])
    tuner.rows[0] = replace(tuner.rows[0], changes={LR: found.suggested}, reason="")
    tuner.save()
    falls, far = (f"{rate:.3g}" if rate else "no rate" for rate in found)
    return (
        f"the loss falls fastest at {falls}, and diverges from {far}; the smaller of the first and a tenth of the second is taken"
    )

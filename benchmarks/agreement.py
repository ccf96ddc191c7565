"""The leg `verdict`: Python's time for a step's agreement on norm and clipping, simulated for many ranks and units."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from benchmarks.legs import Options
from benchmarks.report import Spread, table, verdict, verdicts
from slipstream.train.window import judge

SIZES = ((2, 30), (64, 200), (1024, 200))  # ranks, units
MOST_S = 2e-3  # at the largest size


def run(options: Options) -> str:
    """Return the section of RESULTS.md."""
    rows, slowest = [], 0.0
    for ranks, units in SIZES:
        spread = Spread.of([_seconds(ranks, units) for _ in range(options.num_rounds(20))])
        slowest = spread.median
        rows.append([str(ranks), str(units), f"{spread.median * 1e3:.3f}"])
    checks = verdicts([verdict("milliseconds at 1,024 ranks and 200 units", slowest * 1e3, MOST_S * 1e3)])
    return f"{table(['ranks', 'units', 'ms of Python per step'], rows)}\n\n{checks}"


def _seconds(ranks: int, units: int) -> float:
    def exchange(values: Tensor) -> Tensor:
        return values.expand(ranks, -1)

    states: Any = SimpleNamespace(
        units=[
            SimpleNamespace(trainable=True, window=SimpleNamespace(partial=SimpleNamespace(sumsq=0.5 * i))) for i in range(units)
        ],
        hooks=SimpleNamespace(backwards=1),
        replica=SimpleNamespace(exchange=exchange, axis=SimpleNamespace(ranks=tuple(range(ranks)))),
    )
    start = time.perf_counter()
    judge(states, loss_scale=1.0, clipping=1.0)
    return time.perf_counter() - start

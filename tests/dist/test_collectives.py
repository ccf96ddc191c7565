"""Times of collectives, as `slipstream bench-comm` and `ds_bench` print them."""

from __future__ import annotations

import pytest

from slipstream.train.planning.collectives import OPERATIONS, measure
from tests.pool import distributed


@distributed(2)
def test_collectives_are_timed_over_every_transport() -> None:
    rates = list(measure([4096, 16384], tuple(OPERATIONS), 0.002))
    seen = {(rate.transport, rate.operation) for rate in rates}
    names = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_recv")
    assert seen == {("gloo", name) for name in names} | {("shared memory", name) for name in ("all_gather", "reduce_scatter")}
    assert len(rates) == 2 * len(seen) and {rate.nbytes for rate in rates} == {4096, 16384}
    for rate in rates:
        factor = 0.5 if rate.operation in ("all_gather", "reduce_scatter", "all_to_all") else 1.0  # two ranks
        assert rate.algbw == pytest.approx(rate.nbytes / rate.seconds)
        assert rate.busbw == pytest.approx(factor * rate.algbw)

"""When 0/1 Adam communicates: the schedule against a loop that counts, and the paper's savings from it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slipstream.optim import ZeroOneAdam
from slipstream.optim.rounds import Round, Rounds

DEFAULTS = {"var_freeze_step": 100_000, "var_update_scaler": 16, "local_step_scaler": 32_678, "local_step_clipper": 16}


@given(st.integers(1, 300), st.integers(1, 20), st.integers(1, 50), st.sampled_from([1, 2, 6, 16]))
def test_the_schedule_is_that_of_counters(freeze: int, doubling: int, local_doubling: int, longest: int) -> None:
    rounds = Rounds(freeze=freeze, doubling=doubling, local_doubling=local_doubling, longest=longest)
    every, count, total, interval = 1, 0, 0, 1
    for step in range(1, 500):
        expected = Round.SIGNS if step % interval == 0 else Round.LOCAL
        if step <= freeze and step % every == 0:
            expected, count, total = Round.DENSE, count + 1, total + 1
            if count == doubling:
                every, count = 2 * every, 0
        assert (rounds.kind(step), rounds.dense(step)) == (expected, total), step
        if step > freeze and (step - freeze) % local_doubling == 0:
            interval = min(2 * interval, longest)


def totals(rounds: Rounds, steps: int) -> tuple[float, int]:
    """Bits per element and rounds of so many steps; a dense round has gradients in 16 bits, one of signs 1.03, each way."""
    dense = rounds.dense(steps)
    local = sum(step % rounds.interval(step) > 0 for step in range(rounds.freeze + 1, steps + 1))
    signs = steps - dense - local
    return dense * 16 + signs * 66 * 8 / 512, dense + signs


def saved(zero_one: Rounds, steps: int, freeze: int) -> tuple[float, float]:
    """The parts of 1-bit Adam's bits, with `freeze` steps of warm-up, and of Adam's rounds, that 0/1 Adam does without."""
    (bits, rounds), (whole, _) = totals(zero_one, steps), totals(Rounds(freeze=freeze), steps)
    return 1 - bits / whole, 1 - rounds / steps


def test_it_saves_what_the_paper_says() -> None:
    """-87 % of 1-bit Adam's data and -54 % of the rounds: with all defaults of both after 400,000 steps. Short runs save less."""
    bits, rounds = saved(ZeroOneAdam.rounds(DEFAULTS), 400_000, freeze=100_000)
    assert bits > 0.90 and 0.56 < rounds < 0.58
    early = ZeroOneAdam.rounds(DEFAULTS | {"var_freeze_step": 23_000})
    bits, rounds = saved(early, 200_000, freeze=23_000)  # as BERT in the papers
    assert 0.83 < bits < 0.84 and 0.56 < rounds < 0.57

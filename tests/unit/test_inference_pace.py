"""Forwards that take as much of the prompts as a time allows: `Pace`, and `token_interval` of the scheduler."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from slipstream.inference.blocks import BlockPool
from slipstream.inference.core import Request, SamplingParams
from slipstream.inference.pace import RECENT, Pace
from slipstream.inference.scheduler import LEAST_PROMPT, Scheduler, receivers


def test_nothing_is_known_at_first_and_lines_lie_between_what_is() -> None:
    pace = Pace()
    assert pace.max_tokens(1.0) == 0
    pace.add(10, 0.125)
    assert (pace.max_tokens(0.0625), pace.max_tokens(0.125), pace.max_tokens(0.375)) == (5, 10, 30)
    pace.add(110, 0.625)
    assert (pace.max_tokens(0.0625), pace.max_tokens(0.375), pace.max_tokens(1.25)) == (5, 60, 220)


def test_the_second_longest_of_the_last_few_counts() -> None:
    pace = Pace()
    for _ in range(RECENT):
        pace.add(10, 0.1)
    pace.add(10, 5.0)  # the system's doing
    assert pace.max_tokens(0.1) == 10
    pace.add(10, 0.2)
    assert pace.max_tokens(0.1) == 5
    for _ in range(RECENT):
        pace.add(10, 0.05)  # what was is forgotten
    assert pace.max_tokens(0.1) == 20


def longest_wait(seconds: Callable[[int], float], interval: float | None, *, times: int = 60) -> tuple[float, list[int]]:
    """The longest forward while somebody generates and long prompts arrive, after the first ones; and all forwards' tokens."""
    scheduler = Scheduler(
        BlockPool(2000, 16), token_budget=512, max_running=8, max_waiting=64, max_context=2000, token_interval=interval
    )
    generation = Request(id="g", tokens=[1], params=SamplingParams(max_tokens=1900))
    scheduler.add(generation)
    waits, tokens = [0.0], []
    for turn in range(times * 20):
        if turn % 40 == 10:
            scheduler.add(Request(id=str(turn), tokens=[turn, *range(600)], params=SamplingParams(max_tokens=1)))
        batch = scheduler.schedule()
        assert batch is not None
        took = seconds(batch.num_tokens)
        tokens.append(batch.num_tokens)
        if turn > 60 and batch.num_tokens > 1:
            waits.append(took)
        scheduler.commit(batch, {request: [1] for chunk in batch.chunks for request in receivers(chunk)})
        scheduler.pace.add(batch.num_tokens, took)
    assert scheduler.counters.tokens > 600 * 20, "the prompts were computed"
    return max(waits), tokens


@pytest.mark.parametrize("base, per_token", [(0.01, 0.0017), (0.002, 0.0001), (0.0, 0.0005)])
def test_forwards_keep_the_interval_and_use_it(base: float, per_token: float) -> None:
    def seconds(tokens: int) -> float:
        return base + per_token * tokens

    interval = seconds(40)
    longest, tokens = longest_wait(seconds, interval)
    assert longest <= interval * 1.001
    used = [num for num in tokens[60:] if num > 1]
    assert sum(num >= 36 for num in used) > len(used) / 2
    longest, tokens = longest_wait(seconds, None)
    assert max(tokens[60:]) == 512 and longest == seconds(512)


def test_noise_costs_few_intervals() -> None:
    rng = random.Random(0)
    _, tokens = longest_wait(lambda num: (0.01 + 0.0017 * num) * rng.uniform(0.95, 1.05), 0.078)
    used = [num for num in tokens[60:] if num > 1]
    assert 30 <= sorted(used)[len(used) // 2] <= 42


def test_prompts_go_on_where_the_interval_cannot_be_kept_and_have_everything_where_nobody_waits() -> None:
    _, tokens = longest_wait(lambda num: 1.0 * num, 0.01, times=90)
    assert LEAST_PROMPT < max(tokens[60:]) <= 2 + LEAST_PROMPT  # a prompt of which one token is left counts as an answer
    scheduler = Scheduler(BlockPool(100, 16), token_budget=512, max_running=8, max_waiting=64, max_context=900, token_interval=1e-9)
    scheduler.add(Request(id="alone", tokens=list(range(700)), params=SamplingParams(max_tokens=2)))
    batch = scheduler.schedule()
    assert batch is not None and batch.num_tokens == 512


def test_refusals() -> None:
    sizes = {"token_budget": 64, "max_running": 8, "max_waiting": 8, "max_context": 64}
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=f"token_interval is {wrong}; it must be more than 0 seconds"):
            Scheduler(BlockPool(10, 16), token_interval=wrong, **sizes)
    with pytest.raises(ValueError, match="which split=False disables"):
        Scheduler(BlockPool(10, 16), token_interval=0.1, split=False, **sizes)

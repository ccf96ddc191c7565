"""Forwards that take as much of the prompts as a time allows: `Pace`, and `token_interval` of the scheduler."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from slipstream.inference.blocks import BlockPool
from slipstream.inference.core import NO_TARGET, ForwardSize, Request, SamplingParams, Target, attended
from slipstream.inference.pace import RECENT, Pace
from slipstream.inference.scheduler import LATE, LEAST_PROMPT, SHARE, Scheduler, receivers
from tests.inference.blocks import check_blocks

NOTHING = ForwardSize(0)


def test_nothing_is_known_at_first_and_lines_lie_between_what_is() -> None:
    pace = Pace()

    def most(seconds: float, limit: int = 1000) -> int:
        return pace.max_tokens(seconds, NOTHING, 0, limit)

    assert most(1.0) == 0 and pace.per_token() == 0 and pace.seconds(ForwardSize(3)) == 0
    pace.add(ForwardSize(10), 0.125)
    assert (most(0.0625), most(0.125), most(0.375)) == (5, 10, 30)
    pace.add(ForwardSize(110), 0.625)
    assert (most(0.0625), most(0.375), most(1.25), most(1.25, 100)) == (5, 60, 220, 100)
    assert pace.per_token() == 0.625 / 110


def test_the_second_longest_of_the_last_few_counts() -> None:
    pace, ten = Pace(), ForwardSize(10)
    for _ in range(RECENT):
        pace.add(ten, 0.1)
    pace.add(ten, 5.0)  # the system's doing
    assert pace.max_tokens(0.1, NOTHING, 0, 100) == 10
    pace.add(ten, 0.2)
    assert pace.max_tokens(0.1, NOTHING, 0, 100) == 5
    for _ in range(RECENT):
        pace.add(ten, 0.05)  # what was is forgotten
    assert pace.max_tokens(0.1, NOTHING, 0, 100) == 20


@pytest.mark.parametrize("of_row, of_position", [(0.0, 0.0), (3e-4, 0.0), (0.0, 3e-7), (2e-4, 1e-7)])
def test_rows_and_contexts_are_learnt(of_row: float, of_position: float) -> None:
    """Forwards of random answers and prompts, with noise: what is predicted holds, also for contexts longer than any before."""
    rng, pace = random.Random(1), Pace()

    def seconds(size: ForwardSize) -> float:
        return 0.004 + 4e-4 * size.tokens + of_row * size.rows + of_position * size.positions

    def draw(longest: int) -> tuple[ForwardSize, int]:
        rows, context = rng.randint(1, 16), rng.randint(10, longest)
        return ForwardSize(rows, rows, rows * context), rng.randint(0, longest)

    for _ in range(300):
        answers, context = draw(2000)
        prompt = rng.choice((0, rng.randint(8, 200)))
        more = ForwardSize(prompt, prompt > 0, attended(context, context + prompt))
        size = ForwardSize(*map(sum, zip(answers, more, strict=True)))
        pace.add(size, seconds(size) * rng.uniform(0.97, 1.03))
    late, early = 0, 0
    for _ in range(200):
        answers, context = draw(4000)
        tokens = pace.max_tokens(0.06, answers, context, 1000)
        took = seconds(
            answers._replace(tokens=tokens, positions=answers.positions + attended(context, context + tokens - answers.tokens))
        )
        late, early = late + (took > 0.066), early + (took < 0.048)
    assert late <= 5 and early <= 20, (late, early)


def test_where_only_answers_are_known_prompts_are_not_cheap() -> None:
    """Rows and tokens are then as many, and their contexts grow: the time must count as that of tokens."""
    rng, pace = random.Random(2), Pace()
    for turn in range(200):
        rows = rng.randint(1, 8)
        pace.add(ForwardSize(rows, rows, rows * (100 + turn)), (0.004 + 1e-3 * rows) * rng.uniform(0.95, 1.05))
    assert 0 < pace.max_tokens(0.064, ForwardSize(4, 4, 400), 0, 1000) <= 66


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
        took, size = seconds(batch.num_tokens), batch.size
        tokens.append(batch.num_tokens)
        if turn > 60 and batch.num_tokens > 1:
            waits.append(took)
        scheduler.commit(batch, {request: [1] for chunk in batch.chunks for request in receivers(chunk)})
        scheduler.pace.add(size, took)
    assert sum(tokens) > 600 * 20, "the prompts were computed"
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


class Machine:
    """Runs a scheduler on a clock of its own: a forward takes `base` and `per_token`, with noise."""

    def __init__(self, seed: int = 0, *, noise: float = 0.0, **options: object) -> None:
        settings: dict[str, object] = {"token_budget": 256, "max_running": 16, "max_waiting": 4096, "max_context": 2000}
        self.scheduler = Scheduler(BlockPool(4000, 16), **(settings | options))  # type: ignore[arg-type]
        self.rng, self.noise, self.now, self.per_position = random.Random(seed), noise, 0.0, 0.0
        self.times: dict[Request, list[float]] = {}

    def run(self, requests: list[Request], limit: float = 1e9) -> None:
        """Until all have ended; they arrive at their times."""
        coming = sorted(requests, key=lambda one: one.arrival)
        while (coming or self.scheduler.running or self.scheduler.waiting) and self.now < limit:
            while coming and coming[0].arrival <= self.now:
                self.scheduler.add(coming.pop(0))
            batch = self.scheduler.schedule(self.now)
            if batch is None:
                self.now = coming[0].arrival
                continue
            size = batch.size
            took = 0.01 + 0.002 * size.tokens + self.per_position * size.positions
            took *= self.rng.uniform(1 - self.noise, 1 + self.noise)
            self.now += took
            sampled = {request: [1] for chunk in batch.chunks for request in receivers(chunk)}
            for request in sampled:
                self.times.setdefault(request, []).append(self.now)
            self.scheduler.commit(batch, sampled, self.now)
            self.scheduler.pace.add(size, took)

    def met(self, request: Request, target: Target) -> bool:
        times = self.times.get(request, [])
        gaps = [after - before for before, after in pairwise(times)]
        within = target.first_within is None or (bool(times) and times[0] - request.arrival <= target.first_within)
        return within and all(target.wait_within is None or gap <= target.wait_within for gap in gaps)


def asked(number: int, arrival: float, prompt: int, outputs: int, target: Target = NO_TARGET) -> Request:
    tokens = [number % 997, *range(prompt - 1)]
    return Request(id=str(number), tokens=tokens, params=SamplingParams(max_tokens=outputs), arrival=arrival, target=target)


def load(rate: float, target: Target, seed: int = 3, number: int = 150) -> list[Request]:
    rng, at, requests = random.Random(seed), 0.0, []
    for index in range(number):
        at += rng.expovariate(rate)
        requests.append(asked(index, at, rng.randint(100, 400), rng.randint(16, 48), target))
    return requests


@pytest.mark.parametrize("seed", range(3))
def test_a_time_between_tokens_is_kept_and_missed_is_what_the_clock_says(seed: int) -> None:
    target = Target(5.0, 0.08)
    machine = Machine(seed, noise=0.1)
    requests = load(1.0, target, seed)
    machine.run(requests)
    assert all(request.missed == (not machine.met(request, target)) for request in requests)
    assert sum(request.missed for request in requests) <= 15
    plain = Machine(seed, noise=0.1)
    without = load(1.0, Target(), seed)
    plain.run(without)
    assert sum(not plain.met(request, target) for request in without) > 75, "whole budgets for prompts are too long"


@pytest.mark.parametrize("seed", range(3))
def test_above_capacity_those_who_still_can_go_first(seed: int) -> None:
    """At three times the capacity, most would be late if each waited for those before it."""
    target, rate = Target(2.0, 0.2), 5.0
    machine = Machine(seed, noise=0.05)
    requests = load(rate, target, seed)
    machine.run(requests)
    plain = Machine(seed, noise=0.05, token_interval=SHARE * 0.2)
    without = load(rate, Target(), seed)
    plain.run(without)
    met, had = (sum(one.met(request, target) for request in all_) for one, all_ in ((machine, requests), (plain, without)))
    assert met >= 1.5 * had, (met, had)
    assert all(len(machine.times[request]) == request.params.max_tokens for request in requests), "all are answered"


def test_of_prompts_that_cannot_all_be_in_time_the_longest_is_late() -> None:
    machine = Machine()
    machine.run([asked(0, 0.0, 300, 1)])
    lengths = (420, 100, 100, 100)  # 1.2 seconds are about 590 tokens
    requests = [asked(number, machine.now, length, 4, Target(1.2)) for number, length in enumerate(lengths, 1)]
    machine.run(requests)
    assert [one.missed for one in requests] == [True, False, False, False]


def test_a_prompt_is_judged_at_the_rate_that_it_has_beside_those_who_generate() -> None:
    """With the whole machine the long one would be in time; it is not, and does not take the time of one that can be."""
    machine = Machine()
    machine.run([asked(0, 0.0, 300, 40)])
    stream, start = asked(1, machine.now, 20, 80, Target(None, 0.08)), machine.now + 0.1
    long, short = (asked(number, start, length, 4, Target(0.95)) for number, length in ((2, 400), (3, 300)))
    machine.run([stream, long, short])
    assert [one.missed for one in (stream, long, short)] == [False, True, False]


def test_the_earliest_deadline_goes_first_and_no_target_is_one_of_ten_seconds() -> None:
    machine = Machine()
    loose, none, tight = asked(1, 0.0, 1500, 1, Target(60.0)), asked(2, 0.0, 1500, 1), asked(3, 0.0, 1500, 1, Target(5.0))
    machine.run([loose, none, tight])
    first = {one.id: times[0] for one, times in machine.times.items()}
    assert first["3"] < first["1"] and first["3"] < first["2"]
    assert first["1"] < first["2"], "the loose one counts as one of 10 seconds, and came before"


def test_a_request_that_is_late_waits_for_a_bounded_time() -> None:
    """More come without end than can be served in time; it is served before those that come later by LATE steps of priority."""
    target = Target(1.0, 10.0)
    machine = Machine(max_running=1)
    late = asked(0, 0.0, 1900, 4, Target(0.001))
    others = [asked(number, 0.2 * number, 100, 4, target) for number in range(1, 500)]
    machine.run([late, *others])
    begun = machine.times[late][0]
    steps = LATE * machine.scheduler.patience
    assert steps - 1 <= begun <= steps + 20, begun
    assert late.missed and 100 < sum(one.missed for one in others) < 400


def test_a_late_prompt_gives_up_its_place_and_an_answer_that_has_begun_goes_on() -> None:
    machine = Machine(max_running=1)
    late, timely = asked(1, 0.0, 1900, 8, Target(0.001)), asked(9, 1.0, 100, 4, Target(1.0))
    machine.run([late, timely])
    assert not timely.missed and late.missed and machine.scheduler.counters.preemptions == 1
    assert len(machine.times[late]) == 8
    machine = Machine(max_running=1)
    begun, other = asked(2, 0.0, 100, 200, Target(0.001)), asked(9, 1.0, 100, 4, Target(1.0))
    machine.run([begun, other])
    assert begun.missed and other.missed and machine.scheduler.counters.preemptions == 0
    assert max(after - before for before, after in pairwise(machine.times[begun])) < 0.1
    check_blocks(machine.scheduler.pool, [])


def test_an_urgent_prompt_passes_one_that_runs() -> None:
    machine = Machine(max_context=9000)
    long, urgent = asked(1, 0.0, 8000, 1), asked(2, 0.5, 20, 1, Target(1.0))
    machine.run([long, urgent])
    assert not urgent.missed and machine.times[urgent][0] < 1.2 < 15 < machine.times[long][0]


def test_a_target_takes_half_of_the_time_from_other_tenants_at_most() -> None:
    """The streams want more than any forward can give; another key's prompt is computed at half of the full rate at least."""
    seconds = {}
    for wanted in (Target(), Target(None, 0.001), Target(None, 0.021)):
        machine = Machine()
        streams = [replace(asked(number, 0.0, 20, 1500, wanted), tenant="a") for number in range(4)]
        prompt = replace(asked(9, 1.0, 1900, 1), tenant="b")
        machine.run([*streams, prompt], limit=60.0)
        seconds[wanted] = machine.times[prompt][0] - 1.0
    most = 2.3 * seconds[Target()]
    assert max(seconds.values()) <= most, seconds


def test_cached_prompts_and_long_contexts_are_judged_as_they_are() -> None:
    """All but a few tokens of a prompt are cached: it is in time, and beside a stream its context counts."""
    machine = Machine(max_context=9000)
    machine.per_position = 5e-7  # at 4,000 positions as much as the token itself
    machine.run([asked(1, 0.0, 4000, 1), asked(3, 0.0, 20, 100)])
    again = asked(1, machine.now, 4001, 1, Target(0.5))
    machine.run([again])
    assert again.num_cached >= 3984 and not again.missed
    start = machine.now
    stream = asked(7, start, 20, 60, Target(None, 0.1))
    longer = asked(1, start + 0.2, 4600, 1)
    machine.run([stream, longer])
    assert longer.num_cached >= 3984 and not stream.missed


def test_without_splitting_a_target_limits_no_prompt() -> None:
    machine = Machine(split=False, token_budget=2000)
    stream, prompt = asked(1, 0.0, 20, 300, Target(None, 0.02)), asked(2, 1.0, 500, 1)
    machine.run([stream, prompt])
    assert machine.times[prompt][0] < 3.0


def test_a_target_that_is_too_tight_is_no_worse_than_none() -> None:
    """Beside a flood without targets; and its waits are still those that it wants."""
    begun, longest = {}, {}
    for wanted in (Target(), Target(0.001), Target(0.001, 0.1)):
        machine = Machine(max_running=4)
        flood = [asked(number, 0.3 * number, 200, 40) for number in range(1, 120)]
        own = asked(0, 10.0, 60, 40, wanted)
        machine.run([*flood, own])
        begun[wanted], times = machine.times[own][0] - 10.0, machine.times[own]
        longest[wanted] = max(after - before for before, after in pairwise(times))
    assert max(begun.values()) <= begun[Target()] + 1.0, begun
    assert longest[Target(0.001, 0.1)] <= 0.1 < longest[Target(0.001)], longest


def test_a_held_request_has_no_target() -> None:
    machine, own = Machine(), asked(0, 0.0, 60, 40, Target(1.0, 0.1))
    machine.run([own], limit=0.3)
    machine.scheduler.hold(own)
    machine.now += 5.0
    machine.scheduler.resume(own)
    machine.run([])
    assert len(machine.times[own]) == 40 and not own.missed


def test_siblings_have_the_target_of_their_prompt() -> None:
    machine, target = Machine(), Target(1.0, 1.0)
    first, other = asked(0, 0.0, 64, 8, target), asked(0, 0.0, 64, 8, target)
    first.siblings = [other]
    machine.run([first])
    assert not first.missed and not other.missed and len(machine.times[other]) == 8
    first, other = asked(1, 0.0, 64, 8, Target(1e-6)), asked(1, 0.0, 64, 8, Target(1e-6))
    first.siblings = [other]
    machine.run([first])
    assert first.missed and other.missed


def test_refusals() -> None:
    sizes = {"token_budget": 64, "max_running": 8, "max_waiting": 8, "max_context": 64}
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=f"token_interval is {wrong}; it must be more than 0 seconds"):
            Scheduler(BlockPool(10, 16), token_interval=wrong, **sizes)
    with pytest.raises(ValueError, match="which split=False disables"):
        Scheduler(BlockPool(10, 16), token_interval=0.1, split=False, **sizes)

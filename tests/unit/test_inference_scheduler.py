"""The token scheduler against a model that remembers, for each cache position, everything that was before it.

The model's next token is a function of the request's last two tokens, the position and its seed, so whatever is batched,
split, shared, preempted or guessed, each request has to get exactly the tokens that it gets alone.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.inference.blocks import BlockPool
from slipstream.inference.core import Batch, Finish, ForwardSize, QueueFullError, Request, RequestPhase, SamplingParams, Target
from slipstream.inference.drafts import Lookup, accept
from slipstream.inference.scheduler import Scheduler, receivers
from tests.inference.blocks import check_blocks

VOCAB, END = 7, 0


def next_token(before: int, last: int, position: int, seed: int) -> int:
    """Loops, as text that quotes itself, with a surprise at every fifth position."""
    if position % 5 == 0:
        return hash((before, last, position, seed)) % VOCAB
    return 1 + (2 * before + last + seed) % (VOCAB - 1)


class Model:
    """Cache: (block, offset) -> hash of all tokens up to and including the one there."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.cache: dict[tuple[int, int], int] = {}

    def forward(self, batch: Batch) -> dict[Request, list[int]]:
        size = self.pool.block_size
        for source, target in batch.copies:
            for offset in range(size):
                self.cache[target, offset] = self.cache.get((source, offset), 0)
        written: set[tuple[int, int]] = set()
        for chunk in batch.chunks:
            assert 0 <= chunk.start < chunk.stop <= len(chunk.request.tokens)
            assert not chunk.draft or chunk.samples
            tokens = [*chunk.request.tokens[: chunk.stop], *chunk.draft]
            for position, content in enumerate(histories(tokens)):
                place = chunk.request.blocks[position // size], position % size
                if position >= chunk.start:
                    assert place not in written, f"two requests write to {place}"
                    written.add(place)
                    self.cache[place] = content
        sampled = {}
        for chunk in batch.chunks:
            tokens = [*chunk.request.tokens[: chunk.stop], *chunk.draft]
            for position, content in enumerate(histories(tokens)):
                place = chunk.request.blocks[position // size], position % size
                assert self.cache.get(place) == content, f"{chunk.request.id} reads something else at position {position}"
            for request in receivers(chunk):
                rows = [
                    next_token(tokens[stop - 2] if stop > 1 else 0, tokens[stop - 1], stop, request.seed)
                    for stop in range(chunk.stop, chunk.stop + chunk.num_rows)
                ]
                sampled[request] = accept(chunk.draft, rows)
        return sampled

    def generate(self, batch: Batch, most: int) -> tuple[Batch, dict[Request, list[int]]]:
        """Makes the batch's steps up to `most`, or to an end token; returns the batch as it was made."""
        sampled = self.forward(batch)
        made = 1
        while made < min(batch.steps, most) and not any(tokens[-1] == END for tokens in sampled.values()):
            chunks = tuple(chunk._replace(draft=tuple(sampled[chunk.request])) for chunk in batch.chunks)
            sampled, made = self.forward(Batch(chunks, ())), made + 1
        return batch._replace(steps=made), sampled


def histories(tokens: list[int]) -> Iterator[int]:
    before = 0
    for token in tokens:
        before = hash((before, token))
        yield before


def alone(prompt: list[int], seed: int, max_tokens: int, max_context: int) -> tuple[list[int], Finish]:
    tokens = list(prompt)
    while True:
        tokens.append(next_token(tokens[-2] if len(tokens) > 1 else 0, tokens[-1], len(tokens), seed))
        if tokens[-1] == END:
            return tokens, Finish.STOP
        if len(tokens) == max_context or len(tokens) - len(prompt) == max_tokens:
            return tokens, Finish.LENGTH


def make(prompt: list[int], name: str = "r", n: int = 1, **more: Any) -> Request:
    params = more.pop("params", None) or SamplingParams(max_tokens=more.pop("max_tokens", 8))
    more = {"end_ids": frozenset({END}), **more}
    siblings = [Request(id=f"{name}.{i}", tokens=list(prompt), params=params, **{**more, "seed": i}) for i in range(1, n)]
    return Request(id=name, tokens=list(prompt), params=params, siblings=siblings, **more)


def step(scheduler: Scheduler, model: Model) -> tuple[Batch | None, dict[Request, tuple[int, ...]]]:
    batch = scheduler.schedule()
    return batch, scheduler.commit(batch, model.forward(batch)) if batch else {}


def drain(scheduler: Scheduler, model: Model) -> list[Batch]:
    batches = []
    while (batch := step(scheduler, model)[0]) is not None:
        batches.append(batch)
        check_blocks(scheduler.pool, (request.blocks for request in scheduler.running))
        assert len(batches) < 5000, "it does not come to an end"
    assert not scheduler.running and not scheduler.waiting
    return batches


def shapes(batches: list[Batch]) -> list[list[tuple[str, int, int]]]:
    return [[(chunk.request.id, chunk.start, chunk.stop) for chunk in batch.chunks] for batch in batches]


# ---- random traffic


class Arrival(NamedTuple):
    when: int
    prefix: int  # which of the common beginnings, and how much of it
    common: int
    tail: list[int]
    n: int
    priority: int
    tenant: str
    max_tokens: int
    json: bool
    target: Target
    cancel: tuple[int, int, bool] | None  # so many steps after arrival, which sibling, while a forward runs
    hold: tuple[int, int, bool, int] | None  # likewise, and for so many steps


class Traffic(NamedTuple):
    num_blocks: int
    block_size: int
    token_budget: int
    max_running: int
    num_draft: int
    most_steps: int
    made: int  # of several steps, before another thread stops them
    split: bool
    prefix_caching: bool
    arrivals: list[Arrival]


arrivals = st.builds(
    Arrival,
    when=st.integers(0, 25),
    prefix=st.integers(0, 1),
    common=st.integers(0, 24),
    tail=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
    n=st.sampled_from([1, 1, 1, 2, 3, 12]),
    priority=st.integers(-1, 1),
    tenant=st.sampled_from(["", "", "other"]),
    max_tokens=st.integers(1, 20),
    json=st.sampled_from([False, False, False, True]),
    target=st.builds(Target, st.sampled_from([None, None, 0.5, 3.0, 9.0]), st.sampled_from([None, None, 1.5, 4.0])),
    cancel=st.none() | st.tuples(st.integers(0, 12), st.integers(0, 2), st.booleans()),
    hold=st.none() | st.tuples(st.integers(0, 12), st.integers(0, 2), st.booleans(), st.integers(0, 12)),
)
traffic = st.builds(
    Traffic,
    num_blocks=st.integers(10, 24),
    block_size=st.integers(1, 5),
    token_budget=st.integers(1, 24),
    max_running=st.integers(1, 8),
    num_draft=st.sampled_from([0, 0, 2, 4]),
    most_steps=st.sampled_from([1, 3, 8]),
    made=st.integers(1, 8),
    split=st.sampled_from([True, True, True, False]),
    prefix_caching=st.sampled_from([True, True, True, False]),
    arrivals=st.lists(arrivals, min_size=1, max_size=10),
)
PREFIXES = [[1, 2, 3, 4, 5, 6] * 4, [1, 2, 3, 4, 1, 2, 6, 5] * 3]


def play(case: Traffic) -> tuple[Scheduler, list[str]]:
    """Serve the case to its end, checking everything at every step; what was planned, in words."""
    pool = BlockPool(case.num_blocks, case.block_size, case.prefix_caching)
    capacity = case.num_blocks * case.block_size
    budget = case.token_budget if case.split else max(case.token_budget, min(40, capacity))
    scheduler = Scheduler(
        pool,
        token_budget=budget,
        max_running=case.max_running,
        max_waiting=6,
        max_context=40,
        split=case.split,
        num_draft=case.num_draft,
        patience=5,
        most_steps=case.most_steps,
    )
    scheduler.pace.add(ForwardSize(1), 1e-3)
    model, log = Model(pool), []
    families: list[tuple[Arrival, Request]] = []
    streamed: dict[Request, list[int]] = {}
    times: dict[Request, list[float]] = {}
    last = max(arrival.when for arrival in case.arrivals)
    for now in range(3000):
        for arrival in (arrival for arrival in case.arrivals if arrival.when == now):
            request = make(
                PREFIXES[arrival.prefix][: arrival.common] + arrival.tail,
                f"r{len(families)}",
                arrival.n,
                params=SamplingParams(max_tokens=arrival.max_tokens, json_schema="{}" if arrival.json else None),
                priority=arrival.priority,
                tenant=arrival.tenant,
                target=arrival.target,
                arrival=float(now),
            )
            try:
                scheduler.add(request)
                families.append((arrival, request))
            except QueueFullError:
                assert len(scheduler.waiting) + len(scheduler.held) >= 6
            except ValueError:
                assert request.num_prompt + 1 > min(40, capacity)

        def cancel(during: bool, now: int = now) -> None:
            for arrival, request in families:
                if arrival.cancel and arrival.cancel[2] == during and now == arrival.when + arrival.cancel[0]:
                    scheduler.finish([request, *request.siblings][arrival.cancel[1] % arrival.n], Finish.CANCELLED)

        def hold(during: bool, now: int = now) -> None:
            for arrival, request in families:
                after, which, between, steps = arrival.hold or (-1, 0, during, 0)
                one = [request, *request.siblings][which % arrival.n]
                if between == during and now == arrival.when + after:
                    scheduler.hold(one)
                    log.append(f"held {len(scheduler.held)}")
                if between == during and now == arrival.when + after + steps:
                    scheduler.resume(one)

        cancel(during=False)
        hold(during=False)
        generating = [request for request in scheduler.running if len(request.tokens) == request.num_computed + 1]
        published = {*pool._published}
        batch = scheduler.schedule(float(now))
        check_blocks(pool, (request.blocks for request in scheduler.running))
        if batch is None:
            assert not scheduler.running and not scheduler.waiting, "something is to do, and nothing is done"
            if now > last and not scheduler.held:
                break
            hold(during=True)
            continue
        assert scheduler.held.keys().isdisjoint(chunk.request for chunk in batch.chunks)
        log.append(repr([(c.request.id, c.start, c.stop, c.draft) for c in batch.chunks]) + repr((batch.copies, batch.steps)))
        log.extend(["copies"] * len(batch.copies) + ["evictions"] * len(published - pool._published.keys()))
        assert 0 < batch.num_tokens <= budget
        assert len({chunk.request for chunk in batch.chunks}) == len(batch.chunks)
        assert not any(chunk.draft and chunk.request.params.json_schema for chunk in batch.chunks)
        for chunk in batch.chunks:
            most = min(scheduler.max_context, chunk.request.num_prompt + chunk.request.params.max_tokens)
            assert chunk.stop + len(chunk.draft) + batch.steps - 1 < most, "a position that no token can follow"
        planned = [chunk.request for chunk in batch.chunks]
        if case.split:
            stalled = [r for r in generating if r.phase is RequestPhase.RUNNING and r not in planned]
            assert not stalled or len(planned) == budget, "a generation waits although there is budget"
        batch, sampled = model.generate(batch, case.made)
        cancel(during=True)
        hold(during=True)
        check_blocks(pool, (request.blocks for request in scheduler.running))
        for request, tokens in scheduler.commit(batch, sampled, now + 1.0).items():
            assert tokens
            times.setdefault(request, [request.arrival]).append(now + 1.0)
            streamed.setdefault(request, []).extend(tokens)
        check_blocks(pool, (request.blocks for request in scheduler.running))
        assert len(scheduler.running) <= case.max_running
        assert scheduler.running == sorted(scheduler.running, key=scheduler._rank)
        assert scheduler.waiting == sorted(scheduler.waiting, key=scheduler._rank)
        assert not any(request.num_computed for request in scheduler.waiting)
        for request in [*scheduler.running, *scheduler.waiting, *scheduler.held]:
            assert (request.phase is RequestPhase.RUNNING) == bool(request.blocks) == (request in scheduler.running)
    else:
        raise AssertionError("it does not come to an end")

    assert pool.num_free == case.num_blocks and not scheduler._entries and not scheduler._targeted
    check_blocks(pool, [])
    for _, first in families:
        for request in (first, *first.siblings):
            prompt = request.tokens[: request.num_prompt]
            tokens, finish = alone(prompt, request.seed, request.params.max_tokens, scheduler.max_context)
            assert request.phase is RequestPhase.FINISHED and streamed.get(request, []) == request.tokens[request.num_prompt :]
            if request.finish is Finish.CANCELLED:
                assert request.tokens == tokens[: len(request.tokens)]
            else:
                assert (request.tokens, request.finish) == (tokens, finish)
                assert request.missed == late(times[request], request.target)
    log.extend(["hits"] * sum(bool(request.num_cached) for _, request in families))
    log.append("missed" if any(request.missed for _, request in families) else "met")
    return scheduler, log


def late(times: list[float], target: Target) -> bool:
    """`times`: of its arrival and of its tokens."""
    first, *others = (after - before for before, after in pairwise(times))
    limits = [(first, target.first_within), *((wait, target.wait_within) for wait in others)]
    return any(limit is not None and wait > limit for wait, limit in limits)


def test_random_traffic() -> None:
    """And over all of it, everything that can happen has happened."""
    happened: Counter[str] = Counter()

    @given(traffic)
    def run(case: Traffic) -> None:
        scheduler, log = play(case)
        forwards = sum(line.startswith("[") for line in log)
        happened.update(dataclasses.asdict(scheduler.counters), further_steps=scheduler.counters.forwards - forwards)
        happened.update({word: log.count(word) for word in ("evictions", "copies", "hits")})
        happened.update(log[-1:], held="held 1" in log)

    run()
    assert all(happened.values()), happened
    assert happened["accepted_tokens"] < happened["draft_tokens"]


@settings(max_examples=10)
@given(traffic)
def test_the_same_again(case: Traffic) -> None:
    assert play(case)[1] == play(case)[1]


# ---- single decisions


def test_splitfuse_fills_the_budget_exactly() -> None:
    pool = BlockPool(100, 4)
    scheduler = Scheduler(pool, token_budget=10, max_running=8, max_waiting=8, max_context=64)
    model = Model(pool)
    scheduler.add(make([1, 2, 3], "a", max_tokens=4, end_ids=frozenset()))
    scheduler.add(make(list(range(100, 112)), "b", max_tokens=2, end_ids=frozenset()))
    scheduler.add(make([6, 6, 6, 6], "c", max_tokens=2, end_ids=frozenset()))
    assert shapes(drain(scheduler, model)) == [
        [("a", 0, 3), ("b", 0, 7)],
        [("a", 3, 4), ("b", 7, 12), ("c", 0, 4)],
        [("a", 4, 5), ("b", 12, 13), ("c", 4, 5)],
        [("a", 5, 6)],
    ]


def test_those_of_one_adapter_follow_each_other() -> None:
    """Prompts and generations: an adapter has a salt of its own, and its matrices are read once for rows side by side."""
    scheduler = Scheduler(pool := BlockPool(100, 4), token_budget=40, max_running=8, max_waiting=8, max_context=64)
    for number in range(6):
        scheduler.add(make([1, 2, number], str(number), max_tokens=4, end_ids=frozenset(), salt=("red", "", "blue")[number % 3]))
    batches = drain(scheduler, Model(pool))
    assert [[name for name, *_ in batch] for batch in shapes(batches)] == [["1", "4", "2", "5", "0", "3"]] * 4


def test_without_splitting_prompts_are_whole_and_first() -> None:
    pool = BlockPool(100, 4)
    scheduler = Scheduler(pool, token_budget=16, max_running=8, max_waiting=8, max_context=16, split=False)
    model = Model(pool)
    scheduler.add(make([1, 2, 3], "a", max_tokens=3, end_ids=frozenset()))
    first = step(scheduler, model)[0]
    assert first is not None
    scheduler.add(make(list(range(100, 112)), "b", max_tokens=2, end_ids=frozenset()))
    scheduler.add(make([6] * 5, "c", max_tokens=1))
    assert shapes([first, *drain(scheduler, model)]) == [
        [("a", 0, 3)],
        [("b", 0, 12)],
        [("c", 0, 5)],
        [("a", 3, 4), ("b", 12, 13)],
        [("a", 4, 5)],
    ]
    with pytest.raises(ValueError, match=r"token_budget \(16\) must be at least the context of 17"):
        Scheduler(pool, token_budget=16, max_running=8, max_waiting=8, max_context=17, split=False)


def test_refusals() -> None:
    pool = BlockPool(4, 4)
    scheduler = Scheduler(pool, token_budget=10, max_running=2, max_waiting=1, max_context=100)
    with pytest.raises(ValueError, match="the prompt has 16 tokens, but prompt and output together may have 16"):
        scheduler.add(make([1] * 16))
    with pytest.raises(ValueError, match="the prompt is empty"):
        scheduler.add(make([]))
    scheduler.add(make([1] * 15))
    with pytest.raises(QueueFullError, match="1 requests wait, and max_waiting is 1"):
        scheduler.add(make([1]))
    with pytest.raises(ValueError, match="max_running is 0"):
        Scheduler(pool, token_budget=10, max_running=0, max_waiting=1, max_context=100)
    drain(scheduler, Model(pool))
    assert pool.num_free == 4


@pytest.mark.parametrize(
    ("seconds", "interval", "steps"), [(0.0, None, 1), (0.001, None, 16), (0.006, None, 4), (0.03, None, 1), (0.001, 0.0055, 5)]
)
def test_steps_are_as_many_as_a_reader_does_not_notice(seconds: float, interval: float | None, steps: int) -> None:
    assert _steps([{}], seconds, token_interval=interval) == steps


def test_several_steps_need_plain_rows_and_an_empty_queue() -> None:
    assert _steps([{}, {"max_tokens": 9}]) == 7
    assert _steps([{}], most_steps=1) == _steps([{}], num_draft=2) == 1
    assert _steps([{}, {}], max_running=1) == 1, "one waits"
    assert _steps([{}], max_context=20) == 20 - 8, "six tokens of a prompt, and two"
    for other in ({"logprobs": 0}, {"min_tokens": 9}, {"presence_penalty": 0.5}, {"logit_bias": {1: 2.0}}, {"json_schema": "{}"}):
        assert _steps([{}, other]) == 1
    assert _steps([{"min_tokens": 2}]) == 16
    assert _steps([{}, {}], num_blocks=6) == 5, "one block is common, two are taken, and three are not enough for four"


def _steps(params: list[dict[str, Any]], seconds: float = 1e-3, *, num_blocks: int = 64, **options: Any) -> int:
    """Of the batch after two that compute all prompts of 6 tokens, and then a token of each request."""
    pool = BlockPool(num_blocks, 4)
    options = {"token_budget": 32, "max_running": 4, "max_waiting": 4, "max_context": 64, "most_steps": 16} | options
    scheduler, model = Scheduler(pool, **options), Model(pool)
    for number, one in enumerate(params):
        of = SamplingParams(**{"max_tokens": 40} | one)
        scheduler.add(make([1, 2, 3, 4, 5, number], f"r{number}", params=of, end_ids=frozenset()))
    for _ in range(2):
        step(scheduler, model)
    for tokens in (1, 2) if seconds else ():
        scheduler.pace.add(ForwardSize(tokens), seconds)
    batch = scheduler.schedule()
    assert batch is not None
    return batch.steps


def test_siblings_share_the_prompt_and_part_at_its_last_block() -> None:
    pool = BlockPool(20, 4)
    scheduler = Scheduler(pool, token_budget=32, max_running=4, max_waiting=4, max_context=64)
    request = make([1, 2, 3, 4, 5, 6], n=3, end_ids=frozenset(), max_tokens=5)
    scheduler.add(request)
    _, outputs = step(scheduler, Model(pool))
    family = [request, *request.siblings]
    assert [*outputs] == family and len({r.tokens[-1] for r in family}) == 3
    assert all(r.blocks == request.blocks for r in family) and pool.num_free == 18
    batch = scheduler.schedule()
    assert batch is not None and len(batch.copies) == 2 and len({r.blocks[1] for r in family}) == 3
    assert len({r.blocks[0] for r in family}) == 1


def test_siblings_beyond_max_running_wait_with_their_first_token() -> None:
    """They neither wait for an empty engine nor keep others from running, and say what they would say alone."""
    pool = BlockPool(40, 4)
    scheduler = Scheduler(pool, token_budget=32, max_running=3, max_waiting=4, max_context=64)
    model = Model(pool)
    scheduler.add(other := make([7, 8], "other", max_tokens=12))
    request = make([1, 2, 3, 4, 5, 6], n=7, end_ids=frozenset(), max_tokens=5)
    scheduler.add(request)
    _, outputs = step(scheduler, model)
    family = [request, *request.siblings]
    assert [*outputs] == [other, *family], "all have their first token"
    assert scheduler.running == [other, request, request.siblings[0]] and scheduler.waiting == request.siblings[1:]
    drain(scheduler, model)
    assert all(one.tokens == alone([1, 2, 3, 4, 5, 6], one.seed, 5, 64)[0] for one in family)
    assert not scheduler.counters.preemptions


def test_tenants_have_fair_shares() -> None:
    """One that floods the queue and one that comes later are served alike from then on; who was away does not catch up."""
    scheduler = Scheduler(BlockPool(100, 4), token_budget=32, max_running=2, max_waiting=30, max_context=64)
    model = Model(scheduler.pool)
    flood = [make([1, 2, i], f"a{i}", tenant="a", max_tokens=6, end_ids=frozenset()) for i in range(30)]
    for request in flood:
        scheduler.add(request)
    with pytest.raises(QueueFullError, match="30 requests wait"):
        scheduler.add(make([1], tenant="a"))
    for _ in range(30):
        step(scheduler, model)
    few = [make([3, 4, i], f"b{i}", tenant="b", max_tokens=6, end_ids=frozenset()) for i in range(5)]
    for request in few:
        scheduler.add(request)
    served = sum(one.finish is not None for one in flood)
    while few[-1].finish is None:
        step(scheduler, model)
    more = sum(one.finish is not None for one in flood) - served
    assert 4 <= more <= 7, more
    urgent = make([9], "urgent", tenant="a", priority=-1)
    scheduler.add(urgent)
    assert scheduler._head() is urgent


def test_what_a_tenant_has_had_alone_counts_no_more() -> None:
    """Of two that come when nobody has requests, neither waits for what the other one has had before."""
    scheduler = Scheduler(BlockPool(100, 4), token_budget=32, max_running=1, max_waiting=30, max_context=64)
    model = Model(scheduler.pool)
    for i in range(20):
        scheduler.add(make([1, 2, i], f"b{i}", tenant="b", max_tokens=6, end_ids=frozenset()))
    drain(scheduler, model)
    flood = [make([1, 2, i], f"a{i}", tenant="a", max_tokens=6, end_ids=frozenset()) for i in range(10)]
    for request in flood:
        scheduler.add(request)
    step(scheduler, model)
    scheduler.add(back := make([3, 4], "back", tenant="b", max_tokens=6, end_ids=frozenset()))
    while back.finish is None:
        step(scheduler, model)
    assert sum(one.finish is not None for one in flood) <= 1


def test_a_tenant_that_has_had_much_elsewhere_waits_until_others_have_had_as_much() -> None:
    scheduler = Scheduler(BlockPool(100, 4), token_budget=32, max_running=1, max_waiting=30, max_context=64)
    model = Model(scheduler.pool)
    flood = [make([1, 2, i], f"a{i}", tenant="a", max_tokens=6, end_ids=frozenset()) for i in range(30)]
    for request in flood:
        scheduler.add(request)
    step(scheduler, model)
    scheduler.add(ahead := make([3, 4], "ahead", tenant="b", max_tokens=6, end_ids=frozenset(), elsewhere=100))
    while ahead.finish is None:
        step(scheduler, model)
    assert sum(one.finish is not None for one in flood) == -(-100 // (4 + 2 * 5))  # 4 by its prompt, and 5 more answers


@pytest.mark.parametrize("num_blocks", [100, 16])
def test_nobody_waits_for_another_tenants_answers(num_blocks: int) -> None:
    """With all places taken, or nearly all blocks, by a flood, another's first token comes with the next forward."""
    scheduler = Scheduler(BlockPool(num_blocks, 4), token_budget=32, max_running=4, max_waiting=30, max_context=64)
    model = Model(scheduler.pool)
    for i in range(20):
        scheduler.add(make([1, 2, 3, i], f"a{i}", tenant="a", max_tokens=12, end_ids=frozenset()))
    for _ in range(6):
        step(scheduler, model)
    others = [make([3, 4, 5, 6, i], f"b{i}", tenant="b", max_tokens=12, end_ids=frozenset()) for i in range(4)]
    for request in others:
        scheduler.add(request)
    batch, _ = step(scheduler, model)
    assert batch is not None
    assert [one.num_generated for one in others] == [1, 0, 0, 0]
    assert {c.request.tenant for c in batch.chunks if c.stop - c.start > 1} == {"b"}, "a forward with others' prompts takes longer"
    step(scheduler, model)
    assert Counter(one.tenant for one in scheduler.running) == {"a": 2, "b": 2}
    before = scheduler.counters.preemptions
    drain(scheduler, model)
    assert before == 2 and scheduler.counters.preemptions <= before + 2, "the two do not preempt each other in turn"


def test_a_cancelled_prompt_takes_its_siblings_along() -> None:
    pool = BlockPool(20, 4)
    scheduler = Scheduler(pool, token_budget=4, max_running=4, max_waiting=4, max_context=64)
    request = make([1, 2, 3, 4, 5, 6], n=3)
    scheduler.add(request)
    scheduler.finish(request.siblings[0], Finish.CANCELLED)
    step(scheduler, Model(pool))
    scheduler.finish(request, Finish.CANCELLED)
    scheduler.finish(request, Finish.CANCELLED)
    assert [r.finish for r in (request, *request.siblings)] == [Finish.CANCELLED] * 3
    assert scheduler.schedule() is None and pool.num_free == 20


def test_who_writes_to_a_copied_block_begins_again_when_a_forward_failed() -> None:
    """To copy again would be wrong: here the block that was copied has become another request's in the same plan."""
    pool = BlockPool(4, 4)
    scheduler = Scheduler(pool, token_budget=32, max_running=4, max_waiting=4, max_context=16)
    model = Model(pool)
    first, other = make([1, 2, 3, 4, 5, 6], "a", n=2, end_ids=frozenset()), make([1, 1, 1, 1], "c", end_ids=frozenset())
    scheduler.add(first)
    scheduler.add(other)
    step(scheduler, model)
    batch = scheduler.schedule()  # the first's sibling gives way, so that the other has a block
    assert batch is not None and [chunk.request for chunk in batch.chunks] == [first, other]
    assert len(batch.copies) == 1 and batch.copies[0][0] in other.blocks
    model.forward(batch)
    again = Batch(scheduler.retryable_chunks(batch), ())
    assert [chunk.request for chunk in again.chunks] == [other] and first in scheduler.waiting
    scheduler.commit(again, model.forward(again))
    drain(scheduler, model)  # where the model sees whether each request reads its own
    assert [request.num_generated for request in (first, *first.siblings, other)] == [8, 8, 8]


def test_preempted_goes_on_where_it_was() -> None:
    """Two that cannot both end: the less important gives way, and finds its blocks again in the cache if they are left."""
    pool = BlockPool(9, 4)
    scheduler = Scheduler(pool, token_budget=32, max_running=4, max_waiting=4, max_context=36)
    requests = [make([i] * 10, f"r{i}", end_ids=frozenset(), max_tokens=12, arrival=-float(i)) for i in (1, 2)]
    for request in requests:
        scheduler.add(request)
    batches = drain(scheduler, Model(pool))
    spans = [(chunk.start, chunk.stop) for batch in batches for chunk in batch.chunks if chunk.request is requests[0]]
    again = [start for (_, before), (start, _) in pairwise(spans) if start != before]
    assert scheduler.counters.preemptions == 1 and len(again) == 1 and again[0] > 0
    assert [r.num_generated for r in requests] == [12, 12]
    assert [r.num_cached for r in requests] == [0, 0], "what it found of its own is no hit of the prompt"
    assert max(chunk.num_tokens for batch in batches[1:] for chunk in batch.chunks if chunk.request is requests[1]) == 1
    assert max(chunk.num_tokens for batch in batches[1:] for chunk in batch.chunks if chunk.request is requests[0]) > 1


def test_a_failed_forward_loses_only_its_own_requests() -> None:
    pool = BlockPool(20, 4)
    scheduler = Scheduler(pool, token_budget=8, max_running=1, max_waiting=4, max_context=64)
    failed, survivor = make([1] * 5, "lost"), make([1] * 5, "kept")
    scheduler.add(failed)
    scheduler.add(survivor)
    batch = scheduler.schedule()
    assert batch is not None
    for chunk in batch.chunks:
        scheduler.finish(chunk.request, Finish.ERROR)
    drain(scheduler, Model(pool))
    assert failed.finish is Finish.ERROR and survivor.finish in (Finish.STOP, Finish.LENGTH) and survivor.num_cached == 0


def finishes_while_others_come(patient: Request, scheduler: Scheduler, other: dict[str, Any], limit: int) -> bool:
    """Whether `patient` ends while, at every second, as many others arrive as the queue takes."""
    model = Model(scheduler.pool)
    scheduler.add(patient)
    for now in range(limit):
        for index in range(4):
            if len(scheduler.waiting) < scheduler.max_waiting:
                scheduler.add(make([1 + now % 6, index] * 3, f"{now}.{index}", arrival=float(now), **other))
        step(scheduler, model)
        if patient.phase is RequestPhase.FINISHED:
            return True
    return False


@pytest.mark.parametrize("split", [True, False])
def test_the_unimportant_gets_in(split: bool) -> None:
    sizes = {"token_budget": 40, "max_running": 4, "max_waiting": 8, "max_context": 40, "split": split}
    for patience, served in ((10.0, True), (1e9, False)):
        scheduler = Scheduler(BlockPool(10, 4), **sizes, patience=patience)  # type: ignore[arg-type]
        patient = make([5] * 30, "patient", priority=5)
        assert finishes_while_others_come(patient, scheduler, {"priority": 0, "max_tokens": 3}, 300) is served


def test_the_large_is_not_overtaken_by_the_small() -> None:
    scheduler = Scheduler(BlockPool(10, 4), token_budget=8, max_running=8, max_waiting=16, max_context=40)
    for index in range(8):
        scheduler.add(make([index] * 3, f"first {index}", max_tokens=10, arrival=-1.0))
    assert finishes_while_others_come(make([5] * 37, "large"), scheduler, {"max_tokens": 10}, 200)


def test_guesses_only_with_what_is_left() -> None:
    pool = BlockPool(50, 4)
    scheduler = Scheduler(pool, token_budget=6, max_running=4, max_waiting=4, max_context=64, num_draft=4)
    model = Model(pool)
    scheduler.add(make([1, 2, 3, 4] * 2, "a", end_ids=frozenset(), max_tokens=30))
    for _ in range(2):
        step(scheduler, model)
    request = scheduler.running[0]
    request.tokens[-1] = 1  # as if it quoted the prompt
    batch = scheduler.schedule()
    assert batch is not None and batch.chunks[0].draft == (2, 3, 4, 1)
    scheduler.add(make([6] * 3, "b"))
    batch = scheduler.schedule()
    assert batch is not None and [chunk.num_tokens for chunk in batch.chunks] == [3, 3] and len(batch.chunks[0].draft) == 2


# ---- drafts


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 3), st.integers(0, 2), st.integers(0, 6), st.integers(0, 40))
def test_lookup(tokens: list[int], min_ngram: int, more: int, num: int, earlier: int) -> None:
    """As by searching from the end, whether the index was built at once or step by step."""

    def search() -> tuple[int, ...]:
        for size in range(min_ngram + more, min_ngram - 1, -1):
            for end in range(len(tokens) - 1, size - 1, -1):
                if tokens[end - size : end] == tokens[-size:]:
                    text = list(tokens)
                    for offset in range(num):
                        text.append(text[end + offset])
                    return tuple(text[len(tokens) :])
        return ()

    lookup = Lookup(min_ngram + more, min_ngram)
    lookup.guess(tokens[:earlier], num)
    assert lookup.guess(tokens, num) == search() == Lookup(min_ngram + more, min_ngram).guess(tokens, num)


def test_lookup_is_quick_on_long_sequences() -> None:
    lookup, tokens = Lookup(), list(range(20_000))
    lookup.guess(tokens, 4)
    begin = time.perf_counter()
    for token in range(1000):
        tokens.append(token)
        lookup.guess(tokens, 4)
    assert time.perf_counter() - begin < 0.5, "a guess rescans the sequence"


@pytest.mark.parametrize(
    "draft, sampled, accepted",
    [((), [5], [5]), ((1, 2), [1, 2, 3], [1, 2, 3]), ((1, 2), [1, 9, 3], [1, 9]), ((1, 2), [9, 2, 3], [9])],
)
def test_accept(draft: tuple[int, ...], sampled: list[int], accepted: list[int]) -> None:
    assert accept(draft, sampled) == accepted
    with pytest.raises(AssertionError, match="there must be one more"):
        accept(draft, [*sampled, 0])

"""Several steps of a batch at once: the answers are those of one step after the other."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.inference.core import Batch, Finish, Generate, SamplingParams
from slipstream.inference.engine import Engine
from slipstream.inference.sampler import Draws, LogitsRow, Sampler
from slipstream.ops import build
from tests.inference.blocks import check_engine
from tests.unit.test_inference_engine import PROMPTS, Answer, HashRunner, ask, byte_tokenizer, running, wait

pytestmark = pytest.mark.skipif(build.load().kernels is None, reason="only kernels draw tokens between steps")


class Stepping(HashRunner):
    """Makes the steps of a batch by its `forward`, one after the other."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._sampler = Sampler(self.vocab_size)
        self.steps: list[tuple[int, int]] = []  # of each batch of several: planned, made
        self.between: Callable[[int], None] = lambda made: None  # two steps

    @property
    def generate(self) -> Generate | None:  # type: ignore[override]
        return self._generate

    def _generate(self, batch: Batch, draws: Draws, stop: ctypes.c_int32) -> list[list[int]]:
        made: list[list[int]] = []
        copies = batch.copies
        while len(made) < batch.steps and not (made and (stop.value or self._ended(batch, made[-1]))):
            drawn = list(zip(*made, strict=True)) if made else [()] * len(batch.chunks)
            chunks = [chunk._replace(draft=draft) for chunk, draft in zip(batch.chunks, drawn, strict=True)]
            logits = self.forward(Batch(tuple(chunks), copies))[len(made) :: len(made) + 1]
            rows = [LogitsRow(chunk.request, chunk.draft) for chunk in chunks]
            made.append(self._sampler.tokens(logits.contiguous().numpy(), rows))
            copies = ()
            self.between(len(made))
        self.steps.append((batch.steps, len(made)))
        return made

    @staticmethod
    def _ended(batch: Batch, tokens: list[int]) -> bool:
        return any(token < 0 or token in chunk.request.end_ids for chunk, token in zip(batch.chunks, tokens, strict=True))


def told(answer: Answer, index: int = 0) -> tuple[Any, ...]:
    """All that a client sees, however it is cut."""
    outputs = answer.outputs[index]
    assert all(output.token_ids for output in outputs[:-1]), "an output without tokens"
    usage = outputs[-1].usage
    assert usage is not None
    return answer.text(index), answer.ids(index), outputs[-1].finish, usage._replace(cached_tokens=0)


def stepwise(runner: HashRunner, *asked: tuple[str, SamplingParams], n: int = 1) -> tuple[Engine, list[Answer]]:
    """An engine whose batches the test makes."""
    engine = Engine(runner, byte_tokenizer(), token_budget=64, max_running=16)
    return engine, [ask(engine, prompt, params, n=n) for prompt, params in asked]


KINDS = [
    SamplingParams(temperature=0, max_tokens=23),
    SamplingParams(temperature=0, max_tokens=4),
    SamplingParams(temperature=1.5, seed=3, max_tokens=30, top_p=0.9),
    SamplingParams(temperature=1.0, seed=4, max_tokens=17, top_k=5, min_p=0.01),
    SamplingParams(temperature=2.0, seed=5, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=6, max_tokens=40, stop_token_ids=(ord("e"), ord("q"))),
    SamplingParams(temperature=0.7, seed=7, max_tokens=40, stop=("a", "zz"), min_tokens=3),
    SamplingParams(temperature=0, max_tokens=20, repetition_penalty=1.2),
    SamplingParams(temperature=0, max_tokens=20, logprobs=2),
    SamplingParams(temperature=0, max_tokens=300, ignore_eos=True),  # to the end of the context
]


@given(
    kinds=st.lists(st.integers(0, len(KINDS) - 1), min_size=1, max_size=4),
    num_blocks=st.integers(52, 120),
    block_size=st.sampled_from([1, 4, 16]),
    n=st.integers(1, 3),
)
def test_the_answers_are_those_of_single_steps(kinds: list[int], num_blocks: int, block_size: int, n: int) -> None:
    """Rows that end at different lengths, by different means, with too few blocks for all their steps at times."""
    answers = []
    runner = Stepping(num_blocks * 4 // block_size, block_size)
    for one in (HashRunner(num_blocks * 4 // block_size, block_size), runner):
        engine, asked = stepwise(one, *((PROMPTS[index], KINDS[kind]) for index, kind in enumerate(kinds)), n=n)
        while engine.step():
            pass
        check_engine(engine)
        assert engine.stats().blocks_used == 0
        answers.append([told(answer, index) for answer in asked for index in range(n)])
    assert answers[0] == answers[1]
    for planned, made in runner.steps:
        assert 1 <= made <= planned


LONG = SamplingParams(temperature=1.0, seed=2, max_tokens=100, ignore_eos=True)


def until_several(engine: Engine, runner: Stepping) -> None:
    while not any(made > 1 for _, made in runner.steps):
        assert engine.step()


def test_tokens_come_in_one_output_per_batch_in_order() -> None:
    runner = Stepping()
    engine, (answer,) = stepwise(runner, ("x", LONG))
    until_several(engine, runner)
    assert len(answer.outputs[0][-1].token_ids) == runner.steps[-1][1] > 1
    assert engine.stats().forwards == len(answer.ids()), "each step counts as a forward"
    while engine.step():
        pass
    with running(HashRunner()) as other:
        assert told(wait(ask(other, "x", LONG))) == told(answer)


def test_an_arrival_ends_the_steps() -> None:
    runner = Stepping()
    engine, (first,) = stepwise(runner, ("x", LONG))
    until_several(engine, runner)
    second: list[Answer] = []

    def arrive(made: int) -> None:
        if made == 2 and not second:
            second.append(ask(engine, "y", LONG))

    runner.between = arrive
    while not second:
        assert engine.step()
    assert runner.steps[-1][0] > 2 and runner.steps[-1][1] == 2
    before = len(first.ids())
    assert engine.step() and second[0].ids() and len(first.ids()) == before + 1, "the next forward has its prompt"
    while engine.step():
        pass
    with running(HashRunner()) as other:
        assert [told(wait(ask(other, prompt, LONG))) for prompt in "xy"] == [told(first), told(second[0])]


def test_a_cancel_ends_the_steps() -> None:
    runner = Stepping()
    engine, (first,) = stepwise(runner, ("x", LONG))
    second = Answer()
    handle = engine.submit("y", LONG, sink=second)
    until_several(engine, runner)
    runner.between = lambda made: engine.cancel(handle) if made == 3 else None
    while second.last().finish is None:
        assert engine.step()
    assert runner.steps[-2][1] == 3 or runner.steps[-1][1] == 3
    assert second.last().finish is Finish.CANCELLED
    runner.between = lambda made: None
    while engine.step():
        pass
    check_engine(engine)
    with running(HashRunner()) as other:
        alone = [told(wait(ask(other, prompt, LONG))) for prompt in "xy"]
    assert told(first) == alone[0] and alone[1][1][: len(second.ids())] == second.ids()


def test_a_row_that_cannot_be_drawn_ends_alone() -> None:
    """At the same token as by single steps."""

    class Broken(Stepping):
        def logits(self, history: list[int], num_generated: int) -> torch.Tensor:
            broken = history[0] == ord("y") and num_generated >= 13
            return super().logits(history, num_generated) * (float("nan") if broken else 1.0)

    several, single = Broken(), Broken()
    outcomes = []
    for runner in (several, single):
        engine, asked = stepwise(runner, ("x", LONG), ("y", LONG))
        if runner is single:
            engine._scheduler.most_steps = 1
        while engine.step():
            pass
        outcomes.append([told(answer) for answer in asked])
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1][2] is Finish.ERROR and len(outcomes[0][1][1]) == 13
    assert any(made > 1 for _, made in several.steps) and not single.steps

"""Several steps in one call of the native decoder: tokens, keys and values are those of one call for each."""

from __future__ import annotations

import ctypes
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.inference import adapters
from slipstream.inference.core import Batch, Chunk, Request, SamplingParams
from slipstream.inference.engine import Engine
from slipstream.inference.native import NativeDecoder
from slipstream.inference.sampler import LogitsRow, Sampler
from tests.cases import every_other
from tests.inference.blocks import check_engine
from tests.inference.test_adapters import llama, projections, write
from tests.inference.test_native import FAMILIES, LONG, pytestmark, weights_of
from tests.unit.test_inference_engine import Answer

__all__ = ["pytestmark"]

PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=1.5, seed=2, top_p=0.9),
    SamplingParams(temperature=0.8, seed=3, top_k=20, min_p=0.01),
]


class Side:
    """A decoder whose cache has the prompts of requests, in blocks for all their tokens."""

    def __init__(self, config: Any, weights: Any, lengths: list[int], threads: int, num_tokens: int, adapter: Any = None) -> None:
        self.runner = NativeDecoder(config, weights, num_blocks=96, cache_dtype=torch.bfloat16, threads=threads)
        self.sampler, rng, self.requests = Sampler(config.vocab_size), random.Random(0), list[Request]()
        free = rng.sample(range(96), 96)
        for index, length in enumerate(lengths):
            tokens = [rng.randrange(config.vocab_size) for _ in range(length)]
            request = Request(
                id="", tokens=tokens, params=PARAMS[index % len(PARAMS)], seed=index, adapter=[None, adapter][index % 2]
            )
            request.blocks = [free.pop() for _ in range(-(-(length + num_tokens) // 16))]
            self.requests.append(request)
        self.runner.forward(Batch(tuple(Chunk(one, 0, len(one.tokens) - 1) for one in self.requests if len(one.tokens) > 1), ()))

    def chunks(self) -> tuple[Chunk, ...]:
        return tuple(Chunk(one, len(one.tokens) - 1, len(one.tokens)) for one in self.requests)

    def single(self) -> list[int]:
        logits = self.runner.forward(Batch(self.chunks(), ()))
        return self._append(self.sampler.tokens(logits, [LogitsRow(one) for one in self.requests]))

    def several(self, steps: int, stop: int = 0) -> list[list[int]]:
        generate = self.runner.generate
        assert generate is not None
        made = generate(Batch(self.chunks(), (), steps), self.sampler.draws(self.requests, steps), ctypes.c_int32(stop))
        return [self._append(tokens) for tokens in made]

    def _append(self, tokens: list[int]) -> list[int]:
        for request, token in zip(self.requests, tokens, strict=True):
            request.tokens.append(token)
        return tokens


def check(one: Side, other: Side, plan: tuple[int, ...]) -> None:
    for steps in plan:
        assert other.several(steps) == [one.single() for _ in range(steps)]
    for a, b in ((one.runner.keys, other.runner.keys), (one.runner.values, other.runner.values)):
        assert a.view(torch.int16).equal(b.view(torch.int16)), "keys or values differ"
    one.runner.close()
    other.runner.close()


@pytest.mark.parametrize(("kind", "family"), every_other(("float32", "bfloat16", "int8", "int4"), tuple(FAMILIES)))
def test_as_single_steps(kind: str, family: str) -> None:
    """Over the ends of blocks, on 1 and 3 threads, greedy and drawn."""
    config, weights = weights_of(kind, family, **FAMILIES[family])
    lengths = [1, 14, 15, 16, 17, 40, 33]
    one, other = (Side(config, weights, lengths, threads, 40) for threads in (1, 3))
    check(one, other, (1, 2, 7, 16))


@pytest.mark.parametrize("case", LONG)
def test_over_the_ends_of_ranges(case: str) -> None:
    """The ranges that are items of their own change from step to step."""
    family, sizes = LONG[case]
    config, weights = weights_of("bfloat16", family, max_position_embeddings=1024, **sizes)
    for lengths in ([250], [508], [300, 5], [762, 250]):
        check(Side(config, weights, lengths, 2, 20), Side(config, weights, lengths, 3, 20), (3, 16))


def test_with_adapters(tmp_path: Path) -> None:
    config, weights = weights_of("bfloat16")
    model = llama(hidden_size=96, num_attention_heads=6, head_dim=16, vocab_size=113, intermediate_size=161)
    write(tmp_path, model, projections(), rank=5)
    opened = adapters.opener(config, torch.bfloat16)("a", tmp_path)
    check(*(Side(config, weights, [5, 9, 20], threads, 20, opened) for threads in (1, 2)), (8, 3))


def test_an_end_or_a_stop_ends_the_steps() -> None:
    config, weights = weights_of("bfloat16")
    one, other = (Side(config, weights, [4, 9], 2, 40) for _ in range(2))
    tokens = [one.single() for _ in range(8)]
    assert other.several(4, stop=1) == tokens[:1], "one step is always made"
    other.requests[1].end_ids = frozenset({1 << 20, tokens[5][1]})
    last = next(step for step in range(1, 8) if tokens[step][1] == tokens[5][1])
    assert other.several(7) == tokens[1 : last + 1], "the end token is the last"


def test_a_token_that_cannot_be_drawn_ends_the_steps() -> None:
    config, weights = weights_of("float32")
    side = Side(config, weights, [4, 9], 2, 40)
    assert side.several(1)[0][0] >= 0
    block = side.requests[1].blocks[0]
    side.runner.values[:, block] = float("nan")
    broken = side.runner.generate(  # type: ignore[misc]
        Batch(side.chunks(), (), 5), side.sampler.draws(side.requests, 5), ctypes.c_int32(0)
    )
    assert len(broken) == 1 and broken[0][0] >= 0 and broken[0][1] == -1


def test_blocks_are_copied_before_the_first_step() -> None:
    config, weights = weights_of("float32")
    one, other = (Side(config, weights, [9], 2, 20) for _ in range(2))
    tokens = [one.single() for _ in range(6)]
    request, spare = other.requests[0], next(block for block in range(96) if block not in other.requests[0].blocks)
    source, request.blocks[0] = request.blocks[0], spare
    generate = other.runner.generate
    assert generate is not None
    made = generate(Batch(other.chunks(), ((source, spare),), 6), other.sampler.draws(other.requests, 6), ctypes.c_int32(0))
    assert made == tokens


def test_the_engine_answers_alike_with_steps_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that come and go; a cancel while steps run is obeyed within one."""
    config, weights = weights_of("bfloat16", max_position_embeddings=128)
    answers, counts = [], []
    for several in (False, True):
        if not several:
            monkeypatch.setattr(NativeDecoder, "generate", None)
        runner = NativeDecoder(config, weights, num_blocks=64, cache_dtype=torch.bfloat16, threads=2)
        engine = Engine(runner, None, token_budget=64, max_running=8, end_ids=[7])
        asked, calls = [], []
        if several:
            generate = runner._generate
            runner._generate = lambda batch, *rest: calls.append(batch.steps) or generate(batch, *rest)  # type: ignore
        engine.start()
        for index in range(12):
            params = SamplingParams(
                temperature=index % 3 * 0.7, seed=index, max_tokens=5 + 13 * index % 90, ignore_eos=index % 4 == 0
            )
            asked.append(Answer())
            engine.submit([index + 1, 5, 9][: 1 + index % 3], params, sink=asked[-1])
            if index % 3 == 2:
                assert asked[-1].over.wait(60)
        assert all(answer.over.wait(60) for answer in asked)
        cancelled = Answer()
        handle = engine.submit([3, 4], SamplingParams(temperature=1.0, seed=1, max_tokens=100, ignore_eos=True), sink=cancelled)
        assert cancelled.started.wait(60)
        engine.cancel(handle)
        assert cancelled.over.wait(60)
        engine.close()
        check_engine(engine)
        answers.append([(one.ids(), one.last().finish) for one in asked])
        counts.append(calls)
        runner.close()
        monkeypatch.undo()
    assert answers[0] == answers[1]
    assert not counts[0] and max(counts[1]) > 1


def test_a_flag_that_is_set_while_steps_run_ends_them() -> None:
    """Another thread runs meanwhile: the call has released the interpreter."""
    config, weights = weights_of("float32", max_position_embeddings=1024, num_hidden_layers=8)
    side = Side(config, weights, [9] * 4, 1, 230)
    stop = ctypes.c_int32(0)
    timer = threading.Thread(target=lambda: (time.sleep(0.002), setattr(stop, "value", 1)))
    generate = side.runner.generate
    assert generate is not None
    draws = side.sampler.draws(side.requests, 220)
    timer.start()
    made = generate(Batch(side.chunks(), (), 220), draws, stop)
    timer.join()
    assert 1 <= len(made) < 220
    assert np.array(made).shape == (len(made), 4)

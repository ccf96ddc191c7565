"""The engine's loop and the ways into it, over a runner whose next token is a hash of what its cache holds."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.inference.core import Batch, Chunk, Finish, ForwardSize, Generate, QueueFullError, SamplingParams
from slipstream.inference.engine import ClosedError, Engine
from slipstream.inference.generate import Delta, GenerationError, InferenceEngine, _as_list, _sampling
from slipstream.inference.initialize import _options, init_inference
from slipstream.inference.sequence import Handle, Output
from slipstream.inference.text import BYTE_OF, Tokenizer
from slipstream.launch import talk
from slipstream.launch.cli import build_parser, main
from slipstream.launch.talk import _api_keys, _print_in_order, chat
from tests.inference.blocks import check_engine

END = 256  # after the 256 bytes
GREEDY = SamplingParams(temperature=0, max_tokens=12)


def byte_tokenizer() -> Tokenizer:
    """Token b is byte b."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=dict(BYTE_OF), merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend, special={"eos_token": "<end>"}, end_ids=[END], templates={"default": "{{ messages[-1].content }}:"})


class HashRunner:
    """Its cache holds tokens; the logits after position p depend on all that the blocks of 0..p hold, and nothing else."""

    vocab_size = END + 1
    generate: Generate | None = None

    def __init__(self, num_blocks: int = 64, block_size: int = 4, max_context: int = 200, says: str = "") -> None:
        self.num_blocks, self.block_size, self.max_context = num_blocks, block_size, max_context
        self.short_context = max_context
        self.cache = [[-1] * block_size for _ in range(num_blocks)]
        self.says = [*says.encode(), END] if says else []  # what every answer is, instead
        self.before: Callable[[Batch], None] = lambda batch: None  # each forward
        self.sizes: list[int] = []  # chunks of each forward

    def forward(self, batch: Batch) -> torch.Tensor:
        self.before(batch)
        self.sizes.append(len(batch.chunks))
        for source, target in batch.copies:
            self.cache[target] = list(self.cache[source])
        rows = []
        for request, start, stop, draft in batch.chunks:
            for position, token in enumerate([*request.tokens[start:stop], *draft], start):
                self.cache[request.blocks[position // self.block_size]][position % self.block_size] = token
            end = stop + len(draft)
            for position in range(end - Chunk(request, start, stop, draft).num_rows, end):
                rows.append(self.logits(self.cached(request.blocks, position + 1), position + 1 - request.num_prompt))
        return torch.stack(rows) if rows else torch.empty(0, self.vocab_size)

    def cached(self, blocks: list[int], length: int) -> list[int]:
        return [self.cache[blocks[p // self.block_size]][p % self.block_size] for p in range(length)]

    def logits(self, history: list[int], num_generated: int) -> torch.Tensor:
        assert -1 not in history, "a position was never computed"
        digest = hashlib.blake2b(repr(history).encode(), digest_size=8).digest()
        logits = torch.full((self.vocab_size,), -20.0)
        for rank, byte in enumerate(digest):
            logits[ord("a") + byte % 26] = rank / 2
        if digest[0] < 8:
            logits[END] = 9.0
        if self.says:
            logits[self.says[num_generated]] = 99.0
        return logits


class Answer:
    """A sink that keeps what it is told."""

    def __init__(self, n: int = 1) -> None:
        self.outputs: list[list[Output]] = [[] for _ in range(n)]
        self.left = n
        self.over = threading.Event()
        self.started = threading.Event()

    def __call__(self, output: Output) -> None:
        outputs = self.outputs[output.index]
        assert not outputs or outputs[-1].finish is None, "nothing comes after the end"
        assert (output.finish is None) == (output.usage is None)
        outputs.append(output)
        self.started.set()
        self.left -= output.finish is not None
        if not self.left:
            self.over.set()

    def text(self, index: int = 0) -> str:
        return "".join(output.text for output in self.outputs[index])

    def ids(self, index: int = 0) -> list[int]:
        return [token for output in self.outputs[index] for token in output.token_ids]

    def last(self, index: int = 0) -> Output:
        return self.outputs[index][-1]


@contextmanager
def running(runner: HashRunner | None = None, **options: Any) -> Iterator[Engine]:
    engine = Engine(runner or HashRunner(), byte_tokenizer(), **{"token_budget": 16, "max_running": 16, **options})
    engine.start()
    try:
        yield engine
    finally:
        engine.close()
        check_engine(engine)
        assert engine.stats().blocks_used == 0


def ask(engine: Engine, prompt: str, params: SamplingParams = GREEDY, **more: Any) -> Answer:
    answer = Answer(more.get("n", 1))
    engine.submit(prompt, params, sink=answer, **more)
    return answer


def wait(answer: Answer) -> Answer:
    assert answer.over.wait(60), "no answer"
    return answer


def idle(engine: Engine) -> None:
    """Wait until nothing is left to do."""
    until = time.monotonic() + 10
    while (stats := engine.stats()).running + stats.waiting:
        assert time.monotonic() < until, f"{stats.running} run and {stats.waiting} wait"
        time.sleep(0.001)


PROMPTS = [f"{'the same beginning ' * (i % 3)}prompt {i}" for i in range(12)]


@pytest.mark.parametrize("options", [{}, {"num_draft": 3}, {"prefix_caching": False}, {"max_running": 3}])
def test_together_is_as_alone(options: dict[str, Any]) -> None:
    """Greedy and seeded, with prompts split, prefixes shared, and blocks for only some of them at once (preemption)."""
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=20, repetition_penalty=1.1) for i in range(12)]
    alone = []
    with running() as engine:
        alone = [wait(ask(engine, prompt, one)).ids() for prompt, one in zip(PROMPTS, params, strict=True)]
    with running(HashRunner(num_blocks=40), **options) as engine:
        together = [ask(engine, prompt, one) for prompt, one in zip(PROMPTS, params, strict=True)]
        assert [wait(answer).ids() for answer in together] == alone
        stats = engine.stats()
        assert stats.generated_tokens == sum(map(len, alone))
        assert stats.finished[Finish.STOP] + stats.finished[Finish.LENGTH] == 12
        assert stats.cached_tokens > 0 or options == {"prefix_caching": False}


def test_n_answers_have_seeds_of_their_own() -> None:
    params = SamplingParams(temperature=2.0, seed=5, max_tokens=15)
    with running() as engine:
        answer = wait(ask(engine, PROMPTS[2], params, n=3))
        texts = [answer.text(index) for index in range(3)]
        assert len(set(texts)) == 3
        for index in range(3):
            alone = wait(ask(engine, PROMPTS[2], SamplingParams(temperature=2.0, seed=5 + index, max_tokens=15)))
            assert alone.text() == texts[index]
        assert answer.last(2).usage.prompt_tokens == len(PROMPTS[2])  # type: ignore[union-attr]


def test_a_setting_is_refused_by_the_name_that_it_was_given() -> None:
    for name, alias in (("max_tokens", "max_new_tokens"), ("n", "num_return_sequences")):
        for word in (name, alias):
            with pytest.raises(ValueError, match=f"^{word} is 0; it must be "):
                _sampling(None, 1, {word: 0})
    with pytest.raises(ValueError, match=r"^min_new_tokens is 300; it must be between 0 and max_tokens"):
        _sampling(None, 1, {"min_new_tokens": 300})


def test_a_budget_of_reasoning_is_for_what_follows_the_prompt() -> None:
    """The prompt's end says whether it is reasoning; marks within it, as in a file that a user shows, say nothing."""
    runner, tokenizer, spent = HashRunner(), byte_tokenizer(), SamplingParams(temperature=0, thinking_token_budget=0)
    tokenizer.backend.add_special_tokens(["<think>", "</think>", "<tool_call>"])
    engine = Engine(runner, tokenizer)
    with pytest.raises(ValueError, match=r"has <think> and </think>, or \[THINK\] and \[/THINK\], each one token"):
        engine.submit("a", spent, sink=Answer())
    tokenizer.templates["default"] = "{{ messages }}</think>"
    with pytest.raises(ValueError, match="needs marks of reasoning that are of the model's tokens, 0 to 256"):
        engine.submit("a", spent, sink=Answer())
    assert tokenizer.thought_marks == (END + 1, END + 2, END + 3), "a call ends reasoning, too"
    runner.vocab_size = END + 3
    with running(runner) as engine:
        engine.tokenizer = tokenizer
        for prompt, begun in (("a<think>", True), ("a<think>\n\n", True), ("<think>a", False), ("<think></think>\n", False)):
            first = wait(ask(engine, prompt, spent)).ids()[0]
            assert (first == END + 2) is begun, prompt


def test_settings_are_taken_in_the_forms_that_callers_have() -> None:
    plain = {"max_tokens": 8, "seed": 3, "top_k": 20, "logit_bias": {98: 1.5}, "stop": ("ab",), "stop_token_ids": (99,)}
    forms = {name: numpy.int64(value) for name, value in plain.items() if isinstance(value, int)}  # type: ignore[call-overload]
    forms |= {"logit_bias": {numpy.int64(98): numpy.float32(1.5)}, "stop": "ab", "stop_token_ids": numpy.int64(99)}
    assert SamplingParams(**forms) == SamplingParams(**plain)  # type: ignore[arg-type]
    assert SamplingParams(json_schema={"type": "object"}).json_schema == '{"type": "object"}'  # type: ignore[arg-type]
    with InferenceEngine(Engine(HashRunner(), byte_tokenizer()), "hashes") as served:
        assert served.generate("x", **forms).token_ids == served.generate("x", **plain).token_ids


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("logit_bias", bias) for bias in ({"97": 1.0}, {97: "a"}, [1])),
        *(("stop", stop) for stop in (["a", 5], b"ab", 5)),
        *(("stop_token_ids", ids) for ids in ([1.5], "5")),
        *((name, 5) for name in ("json_schema", "grammar")),
        ("seed", 1.0),
        ("temperature", "1"),
    ],
)
def test_a_setting_of_another_form_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name} is .*; it must be "):
        SamplingParams(**{name: value})


def test_the_wait_for_a_reader_is_no_time_of_a_forward() -> None:
    with running(token_interval=10.0) as engine:
        engine.submit("x", SamplingParams(max_tokens=20, ignore_eos=True), sink=lambda output: time.sleep(0.02))
        idle(engine)
        assert engine.stats().generated_tokens == 20 and engine._scheduler.pace.seconds(ForwardSize(1)) < 0.01


def test_the_text_includes_what_it_is_asked_to_include() -> None:
    with running(HashRunner(says="hello")) as engine:
        for fields, text in (
            ({"stop_token_ids": ord("o")}, "hell"),
            ({"stop_token_ids": ord("o"), "include_stop_str_in_output": True}, "hello"),
            ({"include_stop_str_in_output": True}, "hello"),
            ({"skip_special_tokens": False}, "hello"),
            ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "hello<end>"),
            ({"skip_special_tokens": False, "ignore_eos": True, "max_tokens": 6}, "hello<end>"),
        ):
            answer = wait(ask(engine, "x", SamplingParams(**{"temperature": 0, "max_tokens": 6, **fields})))
            assert answer.text() == text, fields


def test_no_seed_means_another_text_each_time() -> None:
    with running() as engine:
        texts = {wait(ask(engine, "x", SamplingParams(temperature=2.0, max_tokens=20))).text() for _ in range(4)}
        assert len(texts) > 1


@pytest.mark.parametrize(
    ("stop", "text"),
    [("world", "hello "), ("lo w", "hel"), ("worldwide", "hello world, smörgås"), ("ö", "hello world, sm"), (", s", "hello world")],
)
def test_stop_strings_across_tokens(stop: str, text: str) -> None:
    with running(HashRunner(says="hello world, smörgås")) as engine:
        answer = wait(ask(engine, "x", SamplingParams(temperature=0, max_tokens=50, stop=(stop,))))
        assert answer.text() == text
        assert answer.last().finish is Finish.STOP
        assert all(stop not in output.text for output in answer.outputs[0])
        kept = SamplingParams(temperature=0, max_tokens=50, stop=(stop,), include_stop_str_in_output=True)
        assert wait(ask(engine, "x", kept)).text() == text + (stop if text + stop in "hello world, smörgås" else "")


def test_usage_ends_and_logprobs() -> None:
    with running(HashRunner(says="hello")) as engine:
        answer = wait(ask(engine, "12345678", SamplingParams(temperature=0, logprobs=2)))
        assert answer.text() == "hello" and answer.ids() == [*b"hello", END]
        assert answer.last().usage == (8, 0, 6)
        logprobs = [one for output in answer.outputs[0] for one in output.logprobs]
        assert [one.token_id for one in logprobs] == answer.ids()
        assert logprobs[0].top[0] == (ord("h"), logprobs[0].logprob)
        again = wait(ask(engine, "12345678", SamplingParams(temperature=0, max_tokens=2)))
        assert again.text() == "he" and again.last().finish is Finish.LENGTH
        assert again.last().usage == (8, 4, 2) and not again.last().logprobs
        # Neither min_tokens nor a stop string before them ends it.
        late = wait(ask(engine, "1", SamplingParams(temperature=0, min_tokens=4, max_tokens=5, stop=("el",))))
        assert late.text() == "hello" and late.last().finish is Finish.LENGTH
        stats = engine.stats()
        assert stats.prompt_tokens == 17 and stats.cached_tokens == 4 and stats.generated_tokens == 13
        assert stats.time_to_first_token.count == 3 and stats.between_tokens.count == 10
        assert (stats.queue.count, stats.prefill.count, stats.decode.count, stats.whole.count) == (3, 3, 3, 3)
        assert stats.queue.sum + stats.prefill.sum == pytest.approx(stats.time_to_first_token.sum)
        assert stats.time_to_first_token.sum + stats.decode.sum == pytest.approx(stats.whole.sum)
        assert stats.tokens_per_second > 0 and stats.kv_usage == 0


@pytest.mark.parametrize(
    ("prompt", "params", "more", "words"),
    [
        ("", GREEDY, {}, "empty"),
        ("x" * 200, GREEDY, {}, "200 tokens"),
        ([1, 999], GREEDY, {}, "token 999"),
        ("x", GREEDY, {"n": 0}, "n is 0"),
        ("x", SamplingParams(logit_bias={999: 1.0}), {}, "999"),
    ],
)
def test_what_can_never_be_served_is_refused(prompt: Any, params: SamplingParams, more: dict[str, Any], words: str) -> None:
    with running() as engine, pytest.raises(ValueError, match=words):
        engine.submit(prompt, params, sink=Answer(), **more)


@pytest.mark.parametrize("n", [1, 3])
def test_cancelled_midway_gives_its_blocks_back(n: int) -> None:
    with running(HashRunner(says="z" * 190)) as engine:
        other = ask(engine, "other", SamplingParams(temperature=0, max_tokens=150))
        answer = Answer(n)
        handle = engine.submit("x", SamplingParams(max_tokens=150, temperature=0), sink=answer, n=n)
        assert answer.started.wait(60)
        engine.cancel(handle)
        assert wait(answer).last().finish is Finish.CANCELLED
        engine.cancel(handle)  # again: nothing
        assert wait(other).text() == "z" * 150
        assert engine.stats().finished == {Finish.CANCELLED: n, Finish.LENGTH: 1}
        assert engine.stats().blocks_used == 0


def test_what_is_held_stands_still_and_says_the_same() -> None:
    """Others have its place and its blocks; new weights wait for nobody's reader."""
    long = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    runner, steps = HashRunner(num_blocks=50), threading.Semaphore(10_000)
    runner.before = lambda batch: steps.acquire(timeout=30)  # type: ignore[assignment, return-value]
    with running(runner, max_running=1) as engine:
        expected = [wait(ask(engine, prompt, long, n=n)).ids(n - 1) for prompt, n in (("x", 2), ("other", 1))]
        while steps._value > 3:
            steps.acquire()
        answer = Answer(2)
        handle = engine.submit("x", long, sink=answer, n=2)
        while steps._value:
            time.sleep(0.001)
        engine.hold(handle, True)
        steps.release(10_000)
        until = time.monotonic() + 10
        while (engine.stats().running, engine.stats().waiting) != (0, 2):
            assert time.monotonic() < until
        num = len(answer.ids())
        assert wait(ask(engine, "other", long)).ids() == expected[1] and len(answer.ids()) == num < 150
        check_engine(engine)
        with engine.paused(otherwise=""):
            assert answer.over.is_set()
            engine.hold(handle, True)  # it has ended
        assert answer.ids(1) == expected[0]


@pytest.mark.parametrize("num_blocks", [64, 14])
def test_an_engine_that_computes_nothing_any_more_is_dead(num_blocks: int) -> None:
    """Those of the batch that fails are told so, those that wait, and those that come later; also if they have all blocks."""
    runner, begun, go = HashRunner(num_blocks), threading.Event(), threading.Event()

    def fail(batch: Batch) -> None:
        if go.is_set():
            raise RuntimeError("device lost")
        begun.set()
        assert go.wait(30)

    with running(runner, token_budget=64, max_running=4) as engine:
        wait(ask(engine, "fine"))
        runner.before = fail
        answers = [ask(engine, "first")]
        assert begun.wait(30)
        answers += [ask(engine, "x" * 40, n=2) for _ in range(4)]
        go.set()
        why = "the engine is dead: no part of a forward can be computed any more, nor a single token alone: RuntimeError"
        for answer in answers:
            assert {outputs[-1].error for outputs in wait(answer).outputs} == {f"{why}: device lost"}
        assert not engine.healthy and not engine.stats().healthy
        with pytest.raises(ClosedError, match=why):
            engine.submit("x", GREEDY, sink=Answer())


@pytest.mark.parametrize("ever", [False, True])
def test_requests_that_fail_alone_in_a_row_end_nobody_else(ever: bool) -> None:
    """`ever`: whether anything was computed before them."""
    runner = HashRunner()

    def fail(batch: Batch) -> None:
        if any("fatal" in bytes(chunk.request.tokens).decode() for chunk in batch.chunks):
            raise RuntimeError("out of memory")

    runner.before = fail
    with running(max_running=1) as engine:
        expected = wait(ask(engine, "fine")).ids()
    with running(runner, max_running=1) as engine:
        first = [ask(engine, "fine")] * ever
        fatal = [ask(engine, "fatal") for _ in range(9)]
        bystanders = [*first, *(ask(engine, "fine") for _ in range(9))]
        assert {wait(answer).last().error for answer in fatal} == {"the forward failed: RuntimeError: out of memory"}
        assert all(wait(answer).ids() == expected for answer in bystanders)
        assert engine.healthy


def test_a_failure_that_does_not_come_again_ends_nobody() -> None:
    runner, failures = HashRunner(), iter([True, False, True])
    with running(runner) as engine:
        expected = wait(ask(engine, "x")).text()

        def fail(batch: Batch) -> None:
            if next(failures, False):
                raise RuntimeError("out of memory")

        runner.before = fail
        assert wait(ask(engine, "x")).text() == expected


def test_a_device_that_is_lost_between_parts_is_no_request_s_fault() -> None:
    """Half of a forward that was too large has been computed; then nothing is."""
    runner = HashRunner()

    def fail(batch: Batch) -> None:
        if len(batch.chunks) > 2 or runner.sizes:
            raise RuntimeError("device lost")

    runner.before = fail
    engine = Engine(runner, byte_tokenizer(), token_budget=64, max_running=4)
    answers = [ask(engine, f"request {number}") for number in range(4)]
    while engine.step() and engine.healthy:
        assert runner.sizes == [2]
    for answer in answers:
        assert str(answer.last().error).startswith("the engine is dead: no part of a forward can be computed any more")


class Failing(HashRunner):
    """Fails on one request from some token of it on, and on more than `most` tokens at once; when it has written, or before."""

    def __init__(self, num_blocks: int, most: int, fatal: str, after: int, writes: bool) -> None:
        super().__init__(num_blocks)
        self.most, self.fatal, self.after, self.writes = most, fatal, after, writes

    def forward(self, batch: Batch) -> torch.Tensor:
        fatal = any(chunk.request.id == self.fatal and chunk.request.num_generated >= self.after for chunk in batch.chunks)
        fails = fatal or batch.num_tokens > self.most
        logits = super().forward(batch) if self.writes or not fails else None
        if logits is None or fails:
            raise MemoryError(f"{batch.num_tokens} tokens")
        return logits


def family(number: int, n: int) -> tuple[str, SamplingParams]:
    return PROMPTS[number], SamplingParams(temperature=n - 1, seed=number, max_tokens=8)


@cache
def alone(number: int, n: int) -> list[list[int]]:
    prompt, params = family(number, n)
    with running() as engine:
        answer = wait(ask(engine, prompt, params, n=n))
    return [answer.ids(index) for index in range(n)]


@given(
    sizes=st.lists(st.sampled_from([1, 1, 2, 3]), min_size=2, max_size=8),
    num_blocks=st.integers(18, 64),
    num_draft=st.sampled_from([0, 3]),
    most=st.integers(1, 24),
    fatal=st.tuples(st.integers(0, 7), st.integers(0, 2)),
    after=st.integers(0, 6),
    writes=st.booleans(),
)
def test_a_forward_that_fails_ends_only_requests_that_fail_alone(
    sizes: list[int], num_blocks: int, num_draft: int, most: int, fatal: tuple[int, int], after: int, writes: bool
) -> None:
    runner = Failing(num_blocks, most, "request-{}.{}".format(*fatal), after, writes)
    engine = Engine(runner, byte_tokenizer(), token_budget=24, max_running=16, num_draft=num_draft)
    answers = []
    for number, n in enumerate(sizes):
        prompt, params = family(number, n)
        answers.append(ask(engine, prompt, params, n=n))
    while engine.step():
        check_engine(engine)
    assert engine.healthy and engine.stats().blocks_used == 0
    for number, (n, answer) in enumerate(zip(sizes, answers, strict=True)):
        for index in range(n):
            actual, expected = answer.ids(index), alone(number, n)[index]
            if answer.last(index).finish is Finish.ERROR:
                first = fatal == (number, 0) and after == 0  # then nobody computes its siblings' prompt
                assert first or fatal == (number, index), "another one's failure"
                assert actual == expected[: len(actual)]
            else:
                assert actual == expected
                # A sibling's first token is drawn from the first's rows, and guesses may jump over the fatal one.
                assert fatal != (number, index) or num_draft or len(actual) <= max(after, index > 0), "it should have failed"


def test_an_error_of_one_request_is_its_own(caplog: pytest.LogCaptureFixture) -> None:
    """Its logits, its constraint, its sink."""
    runner = HashRunner()
    plain = runner.logits
    runner.logits = lambda history, num: plain(history, num) * (float("nan") if history[0] == ord("N") else 1)  # type: ignore[method-assign]

    class Broken:
        def __init__(self, params: SamplingParams) -> None:
            self.schema = params.json_schema

        def mask(self) -> None:
            if self.schema == "no mask":
                raise ValueError(self.schema)

        def accept(self, token: int) -> None:
            raise ValueError("not in the grammar")

    def angry(output: Output) -> None:
        raise RuntimeError("event loop is closed")

    with running(runner) as engine:
        engine._constraint = Broken  # type: ignore[assignment,method-assign]
        engine.submit("angry", GREEDY, sink=angry)
        wrong = ask(engine, "Nan", n=2)
        schema = ask(engine, "schema", SamplingParams(temperature=0, json_schema="{}"))
        masked = ask(engine, "masked", SamplingParams(temperature=0, json_schema="no mask"))
        right = ask(engine, "right")
        assert wait(masked).last().error == "ValueError: no mask"
        assert "not finite" in str(wait(wrong).last(1).error)
        assert wait(schema).last().error == "ValueError: not in the grammar"
        assert wait(right).last().error is None and wait(right).text() == wait(ask(engine, "right")).text()
        assert "the sink of request-0 failed" in caplog.text


def test_a_full_queue_refuses() -> None:
    runner, gate = HashRunner(), threading.Event()
    runner.before = lambda batch: gate.wait(60) and None
    with running(runner, max_waiting=2, max_running=1) as engine:
        answers = [ask(engine, "first")]
        while engine.stats().running == 0:
            time.sleep(0.001)
        answers += [ask(engine, "second"), ask(engine, "third")]
        assert engine.stats().waiting == 2
        with pytest.raises(QueueFullError, match="max_waiting is 2"):
            ask(engine, "fourth")
        gate.set()
        assert all(wait(answer).last().error is None for answer in answers)


def test_nothing_is_made_of_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is too long or comes to a full queue costs no schema and no n copies."""
    engine = Engine(HashRunner(), byte_tokenizer(), token_budget=16, max_running=8, max_waiting=1)
    monkeypatch.setattr(engine, "_constraint", lambda params: pytest.fail("the schema was compiled"))
    params = SamplingParams(stop=("ab" * 500,), json_schema="{}")
    with pytest.raises(ValueError, match="shorten it"):
        engine.submit("x" * 500, params, sink=Answer(), n=9)
    engine.submit("x", SamplingParams(stop=params.stop), sink=Answer(), n=8)
    with pytest.raises(QueueFullError):
        engine.submit("x", params, sink=Answer())


def test_closed() -> None:
    with running(HashRunner(says="z" * 190)) as engine:
        answer = ask(engine, "x", SamplingParams(temperature=0, max_tokens=190))
        engine.close()
        assert answer.last().finish is Finish.CANCELLED
        with pytest.raises(ClosedError, match="is closed"):
            ask(engine, "late")


def test_many_threads() -> None:
    with running(max_running=8) as engine:
        expected = {prompt: wait(ask(engine, prompt)).text() for prompt in PROMPTS}
        wrong: list[str] = []

        def client(number: int) -> None:
            for round in range(6):
                prompt = PROMPTS[(number * 5 + round) % 12]
                answer = Answer()
                handle: Handle = engine.submit(prompt, GREEDY, sink=answer, priority=round % 2)
                if (number + round) % 4 == 0:
                    engine.cancel(handle)
                    wait(answer)
                elif wait(answer).text() != expected[prompt]:
                    wrong.append(prompt)

        threads = [threading.Thread(target=client, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not wrong and not any(thread.is_alive() for thread in threads)
        assert sum(engine.stats().finished.values()) == 12 + 16 * 6


def test_idle_takes_no_time() -> None:
    with running() as engine:
        wait(ask(engine, "x"))
        forwards, before = engine.stats().forwards, time.process_time()
        time.sleep(0.3)
        assert time.process_time() - before < 0.1 and engine.stats().forwards == forwards


# ---- Python


@contextmanager
def opened(runner: HashRunner | None = None, **options: Any) -> Iterator[InferenceEngine]:
    with InferenceEngine(Engine(runner or HashRunner(), byte_tokenizer(), **options), "hashes") as engine:
        yield engine
        idle(engine.engine)
        assert engine.engine.stats().blocks_used == 0


def test_targets_of_generate() -> None:
    """Of every form; the answers are those without one."""

    async def streamed(engine: InferenceEngine, **target: Any) -> str:
        return "".join([delta.text async for delta in engine.agenerate("a prompt", max_new_tokens=4, **target)])

    with opened() as engine:
        expected = engine.generate("a prompt", max_new_tokens=4).text
        for target, counts in (({"first_within": 900.0, "wait_within": 900.0}, (4, 0)), ({"first_within": 1e-9}, (0, 4))):
            before = engine.engine.stats()
            assert engine.generate("a prompt", max_new_tokens=4, **target).text == expected
            assert "".join(delta.text for delta in engine.generate("a prompt", stream=True, max_new_tokens=4, **target)) == expected
            assert asyncio.run(streamed(engine, **target)) == expected
            engine.generate(torch.tensor([list(b"a prompt")]), max_new_tokens=4, **target)
            after = engine.engine.stats()
            assert (after.targets_met - before.targets_met, after.targets_missed - before.targets_missed) == counts
        with pytest.raises(ValueError, match="first_within is 0; it must be a number of seconds"):
            engine.generate("a prompt", first_within=0)


def test_forms_of_generate() -> None:
    with opened(max_waiting=3) as engine:
        one = engine.generate("prompt 1", max_new_tokens=9)
        assert str(one) == one.text and one.usage.completion_tokens == len(one.token_ids) <= 9
        assert engine.generate(list(b"prompt 1"), max_new_tokens=9).text == one.text
        # More than the queue takes; in their order.
        many = engine(PROMPTS, max_new_tokens=9)
        assert [engine.generate(prompt, max_new_tokens=9).text for prompt in PROMPTS] == [answer.text for answer in many]
        assert len(engine.generate("x", n=2, seed=1)) == 2 and len(engine.generate(["x", "y"], n=2, seed=1)) == 4
        deltas = list(engine.generate(PROMPTS[:3], stream=True, max_new_tokens=9))
        for number in range(3):
            assert "".join(delta.text for delta in deltas if delta.prompt == number) == many[number].text
        assert [delta.finish_reason for delta in deltas].count(None) == len(deltas) - 3
        params = SamplingParams(temperature=0, max_tokens=9)
        assert engine.generate("prompt 1", params).text == one.text
        for ids in (numpy.frombuffer(b"prompt 1", numpy.uint8), [numpy.int64(token) for token in b"prompt 1"]):
            assert engine.generate(ids, params).text == one.text
        assert [completion.text for completion in engine.generate(numpy.array([list(b"ab"), list(b"cd")]), params)] == [
            engine.generate(text, params).text for text in ("ab", "cd")
        ]
        assert repr(engine) == "<InferenceEngine hashes>"
        chat = engine.chat_prompt([{"role": "user", "content": "x"}])
        assert engine.generate(chat, params).text == engine.generate("x:", params).text


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([{"role": "user", "content": "hi"}], r"prompts\[0\] is {'role': .*engine.chat_prompt\(messages\)"),
        (["a", None], r"prompts\[1\] is None; give a text or a list of token ids"),
        ([1, "a"], r"prompts is \[1, 'a'\]; give"),
        (numpy.array([0.5]), r"prompts\[0\] is .*0.5.*; give"),
        (5, "prompts is 5; give"),
        (b"abc", "prompts is b'abc'; give"),
    ],
)
def test_what_is_no_prompt(prompts: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        _as_list(prompts)


def test_what_is_no_conversation() -> None:
    with opened() as engine:
        for messages in ("hi", {"role": "user", "content": "hi"}, ["hi"], 0x6869):
            with pytest.raises(TypeError, match=r"messages is .*(hi|26729).*; give a list of messages"):
                engine.chat_prompt(messages)  # type: ignore[arg-type]


def test_tensors_as_in_transformers() -> None:
    with opened(HashRunner(says="hello")) as engine:
        ids = torch.tensor([[0, *b"abc"], [*b"wxyz"]])
        mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
        ids_out = engine.generate(ids, attention_mask=mask, max_new_tokens=20)
        assert ids_out.tolist() == [[0, *b"abc", *b"hello", END], [*b"wxyz", *b"hello", END]]
        assert engine.generate(input_ids=ids[1], max_new_tokens=2, do_sample=False, num_beams=1).tolist() == [*b"wxyzhe"]
        assert engine.generate(ids[:0]).shape == (0, 4)


def test_left_midway() -> None:
    """An iterator that is closed, a consumer that is interrupted."""
    with opened(HashRunner(says="z" * 190)) as engine:
        deltas = engine.generate("x", stream=True, max_new_tokens=180)
        assert next(deltas).text == "z"
        deltas.close()
        with pytest.raises(KeyboardInterrupt):
            for _ in engine.generate(["x", "y"], stream=True, max_new_tokens=180):
                raise KeyboardInterrupt
        engine.generate("nobody reads it", stream=True, max_new_tokens=180).close()
        idle(engine.engine)
        assert engine.engine.stats().finished == {Finish.CANCELLED: 4}


def test_async() -> None:
    async def gather() -> list[str]:
        async def one(prompt: str) -> str:
            return "".join([delta.text async for delta in engine.agenerate(prompt, max_new_tokens=9)])

        return await asyncio.gather(*map(one, PROMPTS))

    with opened(max_waiting=2) as engine:
        assert asyncio.run(gather()) == [answer.text for answer in engine.generate(PROMPTS, max_new_tokens=9)]


def test_async_leaves_the_loop_to_others() -> None:
    """Tokens and schemas are made in other threads, and what is left meanwhile is cancelled when it has been submitted."""
    deltas: list[Delta] = []

    async def one(engine: InferenceEngine) -> None:
        async for delta in engine.agenerate(["x", "y"], max_new_tokens=180):
            deltas.append(delta)

    async def leave(engine: InferenceEngine) -> None:
        task = asyncio.create_task(one(engine))
        while not threads:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.set()

    runner = HashRunner(says="z" * 190)
    runner.before = lambda batch: time.sleep(0.01)  # no answer ends before it is cancelled
    with opened(runner) as engine:
        threads, gate, encode, submit = set[threading.Thread](), threading.Event(), engine.engine.encode, engine.engine.submit

        def gated(*prompt: Any, **more: Any) -> Handle:
            threads.add(threading.current_thread())
            gate.wait(60)
            return submit(*prompt, **more)

        def tracked(prompt: Any) -> list[int]:
            assert threading.current_thread() is not threading.main_thread()
            return encode(prompt)

        engine.engine.submit, engine.engine.encode = gated, tracked  # type: ignore[method-assign]
        asyncio.run(leave(engine))
        idle(engine.engine)
        assert threading.main_thread() not in threads and not deltas
        assert engine.engine.stats().finished == {Finish.CANCELLED: 2}


def test_errors_come_out() -> None:
    runner = HashRunner()
    with opened(runner) as engine:
        with pytest.raises(ValueError, match="empty"):
            engine.generate(["fine", ""])
        with pytest.raises(ValueError, match="empty"):
            engine.generate(["fine", ""], stream=True)
        runner.before = lambda batch: 1 / (ord("x") not in batch.chunks[0].request.tokens)  # type: ignore[assignment, return-value]
        with pytest.raises(GenerationError, match="prompt 0: the forward failed: ZeroDivisionError"):
            engine.generate("x")


def test_settings_of_sampling() -> None:
    assert _sampling(None, 1, {}) == (SamplingParams(temperature=0.0), 1)
    assert _sampling(None, 1, {"top_p": 0.9})[0].temperature == 1.0
    assert _sampling(None, 1, {"temperature": 0.7, "do_sample": False})[0].temperature == 0.0
    params, n = _sampling(None, 1, {"max_new_tokens": 3, "num_return_sequences": 2, "stop": "x", "json_schema": {"type": "object"}})
    assert (params.max_tokens, n, params.stop, params.json_schema) == (3, 2, ("x",), '{"type": "object"}')
    for wrong, words in (({"max_tokns": 3}, "did you mean max_tokens"), ({"stream_": 1}, "no option 'stream_'")):
        with pytest.raises(TypeError, match=words):
            _sampling(None, 1, wrong)
    with pytest.raises(ValueError, match="num_beams=4 is not served: there is no beam search"):
        _sampling(None, 1, {"num_beams": 4})
    with pytest.raises(ValueError, match=r"stream=False is not served: agenerate\(\) is always a stream"):
        _sampling(None, 1, {"stream": False})
    with pytest.raises(TypeError, match=r"params is .*; give SamplingParams"):
        _sampling({"top_k": 3}, 1, {})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"n is 1\.5; it must be a whole number of 1 or more"):
        _sampling(None, 1.5, {})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not both: top_k"):
        _sampling(SamplingParams(), 1, {"top_k": 3})


def test_deepspeed_s_arguments(tmp_path: Any) -> None:
    names = dict.fromkeys(("dtype", "max_context", "tp_size"))
    arguments = {"mp_size": 1, "replace_with_kernel_inject": True, "max_out_tokens": 77}
    assert _options(names, arguments) == {"max_context": 77, "tp_size": 1}
    for word, value, why in (
        ("mpu", object(), "the ranks are those of the job"),
        ("checkpoint", {"type": "BLOOM"}, "the model's folder"),
        ("zero", {"stage": 3}, "keeps layers on disk"),
        ("quant", {"enabled": True}, "int8"),
    ):
        with pytest.raises(ValueError, match=f"{word}=.* is not served: .*{why}"):
            _options(names, {word: value})
    with pytest.raises(TypeError, match="no option 'dtyp'; did you mean dtype"):
        init_inference("x", dtyp="int8")
    with pytest.raises(ValueError, match="dtype is given twice"):
        init_inference("x", {"dtype": "int4"}, dtype="int8")


def test_what_has_no_effect_is_said_once_for_each_reason(caplog: pytest.LogCaptureFixture) -> None:
    config = {"enable_cuda_graph": True, "return_tuple": False, "injection_policy": {"x": "y"}}
    with pytest.raises(ValueError, match="there is no"):
        init_inference("/no/such/model", config, replace_with_kernel_inject=True, use_triton=True)
    assert [record.getMessage().partition(" no effect")[0] for record in caplog.records] == [
        "init_inference: enable_cuda_graph, replace_with_kernel_inject, use_triton have",
        "init_inference: injection_policy has",
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_cache_bytes": "64 mice"}, "'64 mice' is not a size; write 512M or 2G"),
        ({"kv_cache_bytes": 1.5}, "kv_cache_bytes is 1.5; it must be a whole number of 1 or more"),
        ({"threads": 1.5}, "threads is 1.5; it must be a whole number from 1 to 64"),
        ({"threads": 65}, "threads is 65; it must be a whole number from 1 to 64"),
        ({"max_context": "1024"}, "max_context is '1024'; it must be a whole number of 1 or more"),
        ({"max_running": 0}, "max_running is 0; it must be a whole number of 1 or more"),
        ({"config": {"max_running": True}}, "max_running is True; it must be a whole number of 1 or more"),
        ({"num_draft": -1}, "num_draft is -1; it must be a whole number of 0 or more"),
        ({"token_interval": "0.05"}, "token_interval is '0.05'; it must be a number of seconds"),
        ({"prefix_caching": "no"}, "prefix_caching is 'no'; it must be True or False"),
        ({"tokenizer": 7}, "tokenizer is 7; it must be the folder"),
        ({"tokenizer": "/nope"}, "tokenizer is '/nope', but there is no such folder"),
        ({"device": "tpu"}, 'device is \'tpu\'; give "cpu", "cuda", or "cuda:1"'),
        ({"device": "mps"}, "device is 'mps'; give"),
        ({"device": torch.device("meta")}, "device is 'meta'; give"),
        ({"device": "cpu:3"}, "device is 'cpu:3'; give"),
    ],
)
def test_options_that_no_model_could_have(options: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        init_inference("smollm2", **options)


# ---- the command line


def test_command_line() -> None:
    options = build_parser().parse_args(["generate", "smollm2", "--max-tokens", "5", "--kv-cache-bytes", "1.5G", "a", "b"])
    assert (options.model, options.prompts, options.max_tokens, options.kv_cache_bytes) == ("smollm2", ["a", "b"], 5, 3 << 29)
    options = build_parser().parse_args(["serve", "smollm2", "--port", "81", "--api-key", "a", "--api_key", "b", "--dtype", "int8"])
    assert (options.port, options.api_key, options.dtype, options.max_context) == (81, ["a", "b"], "int8", None)


def test_keys_of_the_server(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\nc\n\n d \n")
    options = build_parser().parse_args(["serve", "smollm2", "--api-key", "a", "--api-key-file", str(file)])
    assert _api_keys(options, {"SLIPSTREAM_API_KEYS": "b, e,"}) == ["a", "b", "e", "c", "d"]
    assert _api_keys(build_parser().parse_args(["serve", "smollm2"]), {}) == []
    with pytest.raises(ValueError, match="SLIPSTREAM_API_KEYS contains no key; add one, or leave it out"):
        _api_keys(options, {"SLIPSTREAM_API_KEYS": ""})
    file.write_text("\n")
    for path, words in ((file, "contains no key"), (tmp_path / "none", "No such file")):
        options.api_key_file = path
        with pytest.raises(ValueError, match=f"^--api-key-file .*{words}"):
            _api_keys(options, {})


def test_a_dead_engine_is_an_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    server = pytest.importorskip("slipstream.inference.server")

    def die(engine: Any, **options: Any) -> None:
        raise server.DeadEngineError("the engine of m is dead")

    monkeypatch.setattr(server, "serve", die)
    monkeypatch.setattr(talk, "_engine", lambda options: opened())
    assert main(["serve", "smollm2"]) == 1
    assert capsys.readouterr().err == "slipstream serve: the engine of m is dead\n"


def test_a_conversation_in_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What fails leaves it as it was, what is too long for the context goes first, an answer that was cut is marked."""
    tokenizer = byte_tokenizer()
    tokenizer.templates["default"] = "{% for message in messages %}{{ message.content }}|{% endfor %}"
    runner = HashRunner(says="z" * 190, max_context=80)
    runner.before = lambda batch: 1 / (b"fails" not in bytes(batch.chunks[0].request.tokens))  # type: ignore[assignment, return-value]
    lines = iter(["/help", "/nope", "a" * 30, "fails", "b" * 30, "c" * 100, "/new", "/usr/bin", EOFError])

    def read_line(_: str) -> str:
        line = next(lines)
        if line is EOFError:
            raise EOFError
        return line

    prompts: list[str] = []
    with InferenceEngine(Engine(runner, tokenizer), "hashes") as engine:
        generate = engine.generate
        engine.generate = lambda ids, **more: prompts.append(tokenizer.decode(ids)) or generate(ids, **more)  # type: ignore[method-assign, func-returns-value]
        monkeypatch.setattr("slipstream.launch.talk._engine", lambda options: engine)
        monkeypatch.setattr("builtins.input", read_line)
        assert chat(build_parser().parse_args(["chat", "smollm2", "--system", "S", "--max-tokens", "8"])) == 0
    first = f"S|{'a' * 30}|"
    assert prompts == [first, f"{first}{'z' * 8}|fails|", f"S|{'b' * 30}|", f"S|{'c' * 100}|", "S|/usr/bin|"]
    output = capsys.readouterr()
    assert output.out.split() == ["zzzzzzzz"] * 3
    notes = [line.partition(":")[0] for line in output.err.splitlines() if "failed" not in line or "slipstream" in line]
    cut = "(truncated after 8 tokens"
    sampled = "sampling with temperature 0.7"
    expected = [sampled, "Ctrl-C stops an answer", "Ctrl-C stops an answer", "unknown command /nope", cut, "slipstream chat"]
    assert [note.partition(",")[0] for note in notes] == [
        *expected,
        "(the context of 80 tokens is full",
        cut,
        "(the context of 80 tokens is full",
        "slipstream chat",
        cut,
    ]


def test_answers_are_printed_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    ends = [Delta("B", (1, 2), 1, finish_reason="stop"), Delta("A", (1,), 0, finish_reason="stop")]
    deltas = [Delta("b", (1,), 1), Delta("a", (1,), 0), *ends]
    assert _print_in_order(deltas, 2) == 5
    assert capsys.readouterr().out == "aA\nbB\n"


class FewTokens(HashRunner):
    """Three tokens, so that what came before is often guessed to come again, and often wrongly."""

    def forward(self, batch: Batch) -> torch.Tensor:
        logits = super().forward(batch)
        logits[:, :97] = logits[:, 100:] = -1e4
        return logits


class Poisoned(FewTokens):
    """Behind a guess that does not come true, its logits are no numbers."""

    poisoned = 0

    def forward(self, batch: Batch) -> torch.Tensor:
        logits, row = super().forward(batch), 0
        for chunk in batch.chunks:
            for num, guess in enumerate(chunk.draft[: chunk.num_rows]):
                if int(logits[row + num].argmax()) != guess:
                    logits[row + num + 1 : row + chunk.num_rows] = float("nan")
                    self.poisoned += 1
                    break
            row += chunk.num_rows
        return logits


def test_a_wrong_guess_ends_no_request() -> None:
    prompt, params = "again and again and again and again and", SamplingParams(max_tokens=40, temperature=0)
    with running(FewTokens()) as engine:
        expected = wait(ask(engine, prompt, params)).ids()
    runner = Poisoned()
    with running(runner, num_draft=4) as engine:
        assert wait(ask(engine, prompt, params)).ids() == expected
    assert runner.poisoned

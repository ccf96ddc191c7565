"""The HTTP server over the real engine, whose model is a hash: hundreds of clients, some of which leave, a forward that fails, an
engine that dies. Each client gets what it would get alone, or is told; no block is lost.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import processors

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")

from slipstream.inference.constrain import Constraint  # noqa: E402
from slipstream.inference.core import Batch, Finish, Request, SamplingParams  # noqa: E402
from slipstream.inference.engine import Engine  # noqa: E402
from slipstream.inference.sequence import Handle  # noqa: E402
from slipstream.inference.server import Router  # noqa: E402
from slipstream.inference.server import generation as generation_module  # noqa: E402
from slipstream.inference.server.generation import Compiling, Mailbox, Unread, Work  # noqa: E402
from slipstream.inference.server.generation import running as generation  # noqa: E402
from tests.inference.blocks import check_engine  # noqa: E402
from tests.inference.test_replicas import Shared  # noqa: E402
from tests.inference.test_server import USER, call, opening, serving, until  # noqa: E402
from tests.unit.test_inference_engine import HashRunner, ask, byte_tokenizer, running, wait  # noqa: E402

LENGTH = 12


@contextmanager
def served(
    before: Callable[[Batch], None] = lambda batch: None,
    server: dict[str, Any] | None = None,
    runner: HashRunner | None = None,
    **options: Any,
) -> Iterator[tuple[Engine, str]]:
    runner = runner or HashRunner(num_blocks=96)
    runner.before = before
    engine = Engine(runner, byte_tokenizer(), **{"token_budget": 64, "max_running": 32, "num_draft": 2, **options})
    engine.start()
    try:
        with serving(engine, **(server or {})) as address:  # type: ignore[arg-type]
            yield engine, address
            until(lambda: engine.stats().running + engine.stats().waiting == 0)
    finally:
        engine.close()
        check_engine(engine)
        assert engine.stats().blocks_used == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_grammar": "start: none"}, "guided_grammar"),
        ({"guided_grammar": "root ::= none"}, "guided_grammar"),
        ({"grammar": 'start ::= "a"'}, "grammar"),
        ({"guided_json": {"type": "string", "pattern": "("}}, "guided_json"),
        ({"structured_outputs": {"json": {"type": "nothing"}}}, "structured_outputs.json"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}},
            "response_format",
        ),
    ],
    ids=str,
)
def test_what_cannot_constrain_is_refused_by_the_field_that_was_sent(fields: dict[str, Any], param: str) -> None:
    pytest.importorskip("llguidance")
    with served() as (_, address):
        for path, prompt in (("chat/completions", {"messages": [USER]}), ("completions", {"prompt": "x"})):
            reply = call(address, "POST", f"/v1/{path}", json.dumps({"model": "model", **prompt, **fields}))
            assert (reply.status, reply.error["param"]) == (400, param), reply.body
            assert reply.error["message"].startswith(f"{param} "), reply.error["message"]
        if param == "response_format":
            text = {"format": {"type": "json_schema", **fields["response_format"]["json_schema"]}}
            reply = call(address, "POST", "/v1/responses", json.dumps({"model": "model", "input": "x", "text": text}))
            assert (reply.status, reply.error["param"]) == (400, "text.format"), reply.body


def test_fields_of_vllm_that_forbid_and_cut() -> None:
    with served() as (engine, address):

        def answer(prompt: str | list[int] = "hello", **fields: Any) -> Any:
            more = {"prompt": prompt, "max_tokens": 9, "temperature": 0, "return_token_ids": True, **fields}
            return json.loads(call(address, "POST", "/v1/completions", json.dumps(more)).body)

        [choice] = answer(allowed_token_ids=[*b"abc"])["choices"]
        first = choice["text"]
        assert len(first) == 9 and set(first) <= set("abc")
        tokenizer = engine.tokenizer
        assert tokenizer is not None
        tokenizer.backend.add_special_tokens(["<beyond>"])  # the logits; the model never writes it
        bad = [first[:3], first[3], "<beyond>", "a<beyond>"]
        choices = answer(["hello"] * 3, allowed_token_ids=[*b"abc"], bad_words=bad)["choices"]
        assert tokenizer.spell.cache_info().misses == 1 and len(choices) == 3, "the words of a request are spelled once"
        for text in (choice["text"] for choice in choices):
            assert text.startswith(first[:2]) and not {first[:3], first[3]} & {text[:3], *text}
        for prompt in ("hello", [*b"hello"]):
            for cut, side, kept in ((2, "left", "lo"), (2, "right", "he"), (5, "left", "hello"), (-1, "left", "hello")):
                asked = {"truncate_prompt_tokens": cut, "truncation_side": side}
                assert answer(prompt, **asked)["choices"][0]["prompt_token_ids"] == [*kept.encode()]
        [choice] = answer("x" * 500, truncate_prompt_tokens=-1)["choices"]
        assert choice["prompt_token_ids"] == [*b"x"] * (engine.max_context - 9)
        special = processors.TemplateProcessing(single="<end> $A", special_tokens=[("<end>", HashRunner.vocab_size - 1)])
        engine.tokenizer.backend.post_processor = special
        for add, first in ((None, 256), (True, 256), (False, ord("h"))):
            assert answer(add_special_tokens=add)["choices"][0]["prompt_token_ids"][0] == first
        assert "thinking_token_budget needs a model whose" in answer(thinking_token_budget=3)["error"]["message"]


def test_what_ended_an_answer_is_named() -> None:
    """By vLLM's `stop_reason`, and by Anthropic's stop_sequence."""
    with served(runner=HashRunner(says="hello world")) as (_, address):
        for fields, reason in (
            ({}, None),
            ({"stop": ["x", "lo"]}, "lo"),
            ({"stop_token_ids": [ord("w")]}, 119),
            ({"max_tokens": 3}, None),
        ):
            for path, prompt in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": [USER]})):
                reply = call(address, "POST", f"/v1/{path}", json.dumps({"temperature": 0, "max_tokens": 30, **prompt, **fields}))
                assert json.loads(reply.body)["choices"][0]["stop_reason"] == reason, reply.body
                asked = {"temperature": 0, "max_tokens": 30, **prompt, **fields, "stream": True}
                events = call(address, "POST", f"/v1/{path}", json.dumps(asked)).body.decode().split("\n\n")
                assert json.loads(events[-3].removeprefix("data: "))["choices"][0]["stop_reason"] == reason
        for stops, ended in ((["x", "lo"], ("stop_sequence", "lo")), (["x"], ("end_turn", None))):
            body = {"temperature": 0, "max_tokens": 30, "messages": [USER], "stop_sequences": stops}
            message = json.loads(call(address, "POST", "/v1/messages", json.dumps(body)).body)
            assert (message["stop_reason"], message["stop_sequence"]) == ended


def fields_of(number: int) -> dict[str, Any]:
    prompt = f"{'the same beginning ' * (number % 3)}client {number}"
    return {"prompt": prompt, "max_tokens": LENGTH, "temperature": 0.9 * (number % 2), "seed": number}


def alone(numbers: range) -> list[str]:
    with running(max_running=1) as engine:
        return [wait(ask(engine, fields.pop("prompt"), SamplingParams(**fields))).text() for fields in map(fields_of, numbers)]


def together(address: str, numbers: range, leaves: Callable[[int], bool] = lambda number: False) -> list[tuple[str, str | None]]:
    """Each one's text, and the error that ended it or "left"."""

    async def one(ai: Any, number: int) -> tuple[str, str | None]:
        ask = {"model": "model", **fields_of(number)}
        text = ""
        try:
            if number % 3 == 0:
                return (await ai.completions.create(**ask)).choices[0].text, None
            async with await ai.completions.create(**ask, stream=True) as stream:
                async for chunk in stream:
                    text += chunk.choices[0].text
                    if leaves(number):
                        return text, "left"
        except openai.APIError as error:
            return text, str(error)
        return text, None

    async def all_of_them() -> list[tuple[str, str | None]]:
        async with openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as ai:
            return await asyncio.gather(*(one(ai, number) for number in numbers))

    return asyncio.run(all_of_them())


@pytest.mark.slow
def test_hundreds_of_clients() -> None:
    numbers = range(300)
    expected = alone(numbers)
    with served() as (engine, address):
        for number, (text, end) in enumerate(together(address, numbers, leaves=lambda number: number % 5 == 1)):
            assert text == expected[number] if end is None else end == "left" and expected[number].startswith(text), number
        stats = engine.stats()
    assert stats.preemptions and stats.cached_tokens
    assert sum(stats.finished.values()) == len(numbers)


def test_what_has_ended_leaves_nothing() -> None:
    """Whole answers, streams, clients that left, refusals: no object of theirs, no block (`served` looks), and each is counted."""

    def live() -> Counter[str]:
        gc.collect()
        return Counter(kind.__name__ for kind in map(type, gc.get_objects()) if kind in (Request, Handle, Mailbox, Constraint))

    before, some = live(), {"model": "model", "prompt": "hi", "max_tokens": 9}
    asks: list[dict[str, Any]] = [
        {"n": 3, "logprobs": 2},
        {"stream": True, "stop": ["x"]},
        {"guided_regex": "[a-f]{3}"},
        {"prompt": ["a", "b"], "echo": True},
        {"max_tokens": 10**6},
        {"guided_regex": "("},
    ]
    with served() as (engine, address):
        for ask in asks * 3:
            call(address, "POST", "/v1/completions", json.dumps(some | ask))
        body = json.dumps(some | {"max_tokens": 150, "ignore_eos": True, "n": 2, "stream": True}).encode()
        with closing(opening(address, f"Content-Length: {len(body)}", body)) as raw:
            assert raw.recv(10)
        until(lambda: sum(engine.stats().finished.values()) == 3 * (3 + 1 + 1 + 2) + 2)
        stats = engine.stats()
        assert sum(stats.whole.counts) == sum(stats.output_lengths.counts) == sum(stats.finished.values())
        until(lambda: live() == before)


def test_a_loop_that_is_closed_leaves_nothing_running(caplog: pytest.LogCaptureFixture) -> None:
    """A server that is gone without a word cannot cancel: the engine finds out as it tells the next token."""
    loop = asyncio.new_event_loop()
    params = SamplingParams(max_tokens=150, ignore_eos=True)

    async def begin() -> Any:
        async def receive() -> Any:
            await asyncio.Event().wait()

        work, box = Work(prompts=[b"x"], params=params, n=2, priority=0, salt=""), Mailbox(Unread(1), 2)
        run = generation(engine, work, receive, Compiling(1), box, time.perf_counter())  # type: ignore[arg-type]
        async for _ in await run.__aenter__():
            return run

    with served(lambda batch: time.sleep(0.01)) as (engine, address):
        run = loop.run_until_complete(begin())
        loop.close()
        until(lambda: engine.stats().running == 0)
        assert engine.stats().finished == {Finish.CANCELLED: 2} and engine.stats().generated_tokens < 200
        assert "the sink of request-0 failed" in caplog.text
        assert together(address, range(3)) == [(text, None) for text in alone(range(3))]
        del run


def test_a_client_that_reads_late_gets_its_whole_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it did not read was not made; others were served meanwhile. So in a process of the server, and behind a router."""
    monkeypatch.setattr(generation_module, "SLICE", 2000)
    ask = {"model": "model", "prompt": "x", "max_tokens": 150, "ignore_eos": True, "n": 2, "seed": 1, "logprobs": 20}
    ask["stream"] = True

    def text(events: bytes) -> str:
        data = [line[6:] for line in events.replace(b"\r\n", b"\n").split(b"\n") if line.startswith(b"data: {")]
        choices = [choice for one in data for choice in json.loads(one)["choices"]]
        return "".join(choice["text"] for index in range(2) for choice in choices if choice["index"] == index)

    # No engine is so fast that it makes all of it while the event loop is behind.
    with (
        served(lambda batch: time.sleep(0.01)) as (engine, address),
        closing(Router([Shared(engine)], byte_tokenizer()).open()) as router,
    ):
        whole = text(call(address, "POST", "/v1/completions", json.dumps(ask)).body)
        assert len(whole) > 250, "but for end tokens"
        with serving(router) as other:  # type: ignore[arg-type]
            for one in (address, other):
                host, port = one.split(":")
                with socket.socket() as raw:
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                    raw.connect((host, int(port)))
                    body = json.dumps(ask).encode()
                    head = f"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                    made = engine.stats().generated_tokens
                    raw.sendall(head.encode() + body)
                    until(lambda: (engine.stats().running, engine.stats().waiting) == (0, 2))
                    assert engine.stats().generated_tokens - made < 300
                    assert together(one, range(3)) == [(text, None) for text in alone(range(3))]
                    # Held for a moment only, it may have gone on: had it ended, it would never be held again.
                    until(lambda: (engine.stats().running, engine.stats().waiting) == (0, 2))
                    assert text(b"".join(iter(lambda: raw.recv(1 << 16), b""))) == whole


def test_a_request_whose_forward_fails_ends_alone() -> None:
    def fail(batch: Batch) -> None:
        if any(b"client 20" in bytes(chunk.request.tokens) for chunk in batch.chunks):
            raise RuntimeError("out of memory")

    numbers = range(60)
    expected = alone(numbers)
    with served(fail, max_running=4) as (_, address):
        answers = together(address, numbers)
        assert call(address, "GET", "/health").status == 200
    for number, (text, error) in enumerate(answers):
        if number == 20:
            assert "the forward failed: RuntimeError: out of memory" in str(error)
        else:
            assert (text, error) == (expected[number], None), number


NUMBERS = [
    *(0, 1, -1, 2, 128, 2**31, 2**63 - 1, 2**63, 2**64 + 1, -(2**63), 10**40, -(10**400)),
    *(1e-45, 1e-40, 5e-324, -1e-45, 0.01, 0.5, 1.5, 100, 1e38, 3.5e38, 1.7e308, -1.7e308),
    *(math.nan, math.inf, -math.inf, True, "1", [1], {"1": 1}),
]
FIELDS = [
    *("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    *("top_k", "n", "max_tokens", "min_tokens", "seed", "priority", "logprobs", "top_logprobs", "stop_token_ids"),
    *("first_within", "wait_within"),
]


def test_no_number_is_a_500() -> None:
    """Every number of a request at its edges and beyond, one at a time, against the sampler itself."""
    with served(max_running=128, token_budget=256) as (engine, address):
        for name in FIELDS:
            path, ask = "/v1/completions", {"model": "model", "max_tokens": 2, "seed": 1, "prompt": "hostile"}
            if name == "top_logprobs":
                path, ask = "/v1/chat/completions", {"model": "model", "logprobs": True, "messages": [USER]}
            for number in NUMBERS:
                value = {"104": number} if name == "logit_bias" else [number] if name == "stop_token_ids" else number
                reply = call(address, "POST", path, json.dumps(ask | {name: value}))
                assert reply.status in (200, 400), (name, number, reply.body)
        finished = engine.stats().finished
        assert {*finished} <= {Finish.STOP, Finish.LENGTH} and sum(finished.values()) > 300


def test_targets_are_counted() -> None:
    """Those that no machine meets, and those that any meets; the text is the same."""
    with served() as (_, address):
        ask = {"model": "model", "max_tokens": 8, "seed": 1, "prompt": "hello", "n": 2}
        targets = ({}, {"first_within": 1e-9}, {"first_within": 900, "wait_within": 900}, {"wait_within": 1e-9})
        texts = [json.loads(call(address, "POST", "/v1/completions", json.dumps(ask | one)).body)["choices"] for one in targets]
        assert texts == [texts[0]] * 4
        metrics = call(address, "GET", "/metrics").body.decode().splitlines()
        assert "slipstream_targets_met_total 2" in metrics and "slipstream_targets_missed_total 4" in metrics


def test_an_adapter_that_is_unloaded_meanwhile_is_not_answered_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """After its name was checked, and before the request is submitted."""
    adapter = SimpleNamespace(key="a")
    with served(open_adapter=lambda name, folder: adapter, adapters={"a": "folder"}) as (engine, address):
        tokenizer: Any = engine.tokenizer
        encode = tokenizer.encode

        def unloads(*given: Any, **more: Any) -> Any:
            engine.unload_adapter("a")
            return encode(*given, **more)

        monkeypatch.setattr(tokenizer, "encode", unloads)
        reply = call(address, "POST", "/v1/completions", json.dumps({"model": "a", "prompt": "hello", "max_tokens": 2}))
        assert reply.status == 400 and "there is no adapter 'a'" in reply.error["message"]


def test_an_engine_that_dies_tells_everybody() -> None:
    forwards: list[Batch] = []

    def die(batch: Batch) -> None:
        forwards.append(batch)
        if len(forwards) == 40:
            raise SystemExit("killed")

    numbers = range(60)
    expected = alone(numbers)
    with served(die, max_running=4) as (_, address):
        answers = together(address, numbers)
        assert json.loads(call(address, "GET", "/health").body) == {"status": "failed"}
        late = call(address, "POST", "/v1/completions", json.dumps({"model": "model", "prompt": "x"}))
        assert (late.status, late.error["code"]) == (503, "unavailable")
    for number, (text, error) in enumerate(answers):
        assert text == expected[number] if error is None else expected[number].startswith(text), number
    errors = [error for _, error in answers if error is not None]
    assert 0 < len(errors) < len(numbers) and all("SystemExit: killed" in error for error in errors)

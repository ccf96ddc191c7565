"""The HTTP server over a fake engine: the real openai client, raw sockets, many clients, hostile ones, and SIGTERM."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import http.server
import json
import os
import re
import resource
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.inference.fake_engine import FakeEngine, FakeTokenizer, Logprob, Output

pytest.importorskip("fastapi")
uvicorn = pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")

from openai.types import completion_create_params as openai_completion  # noqa: E402
from openai.types.chat import completion_create_params as openai_chat  # noqa: E402
from pydantic import BaseModel  # noqa: E402

import slipstream  # noqa: E402
from slipstream.inference import tls  # noqa: E402
from slipstream.inference.server import DeadEngineError, check, create_app, generation, serve  # noqa: E402
from slipstream.inference.server.answers import CompletionFormat, join  # noqa: E402
from slipstream.inference.server.chat import ChatRequest  # noqa: E402
from slipstream.inference.server.completions import CompletionRequest  # noqa: E402
from slipstream.inference.server.requests import LABELS  # noqa: E402
from slipstream.inference.server.run import Listening, guarded  # noqa: E402
from slipstream.launch.talk import _bound  # noqa: E402

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}
OTHER = {"type": "function", "function": {"name": "say", "parameters": {"type": "object", "properties": {"b": {"type": "string"}}}}}
STRICT = {"type": "function", "function": {**OTHER["function"], "strict": True}}  # type: ignore[dict-item]


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        error = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert "Traceback" not in error["message"]
        return error


@contextmanager
def serving(engine: FakeEngine, http: Any = "auto", **options: Any) -> Iterator[str]:
    app = create_app(engine, **options)
    config = uvicorn.Config(app, http=http, port=0, lifespan="off", ws="none", log_config=None, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    listening = Listening(socket.create_server(("127.0.0.1", 0)), sys.maxsize, plain=True)
    host, port = listening.getsockname()
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield f"{host}:{port}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def address(engine: FakeEngine) -> Iterator[str]:
    with serving(engine) as address:
        yield address


def client(address: str, **options: Any) -> Any:
    return openai.OpenAI(base_url=f"http://{address}/v1", **{"api_key": "none", "max_retries": 0, **options})


@pytest.fixture(scope="module")
def ai(address: str) -> Iterator[Any]:
    with client(address) as ai:
        yield ai


def call(address: str, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Reply:
    connection = http.client.HTTPConnection(address, timeout=60)
    fields = {"Content-Type": "application/json"} if headers is None else headers
    try:
        connection.request(method, path, body, fields)
        reply = connection.getresponse()
        return Reply(reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read())
    finally:
        connection.close()


def post(address: str, path: str = CHAT, headers: dict[str, str] | None = None, **fields: Any) -> Reply:
    body: dict[str, Any] = {"model": "fake/model", "max_tokens": 50}
    body |= {"prompt": "hi"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hi"}]}
    return call(address, "POST", path, json.dumps(body | fields), headers)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "not within 30 s"
        time.sleep(0.005)


# ---- OpenAI's client


def test_completions(ai: Any) -> None:
    ask = {"model": "fake/model", "prompt": ["one two", "three"], "max_tokens": 50, "n": 2, "seed": 5}
    completion = ai.completions.create(**ask)
    assert [choice.text for choice in completion.choices] == [
        *(f"{'one two ' * 3}{i} seed 5" for i in (0, 1)),
        *(f"{'three ' * 6}{i} seed 5" for i in (0, 1)),
    ]
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    assert completion.usage.prompt_tokens == len("one two") + len("three")
    assert completion.usage.completion_tokens == 4 * 8
    assert completion.usage.prompt_tokens_details.cached_tokens == 3 + 3
    texts, ends, usages = [""] * 4, [None] * 4, []
    for chunk in ai.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        usages.append(chunk.usage)
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in completion.choices]
    assert ends == ["stop"] * 4
    assert [usage for usage in usages if usage] == [completion.usage]
    assert ai.completions.create(model="fake/model", prompt=[104, 105], max_tokens=2).choices[0].finish_reason == "length"
    assert len(ai.completions.create(model="fake/model", prompt=[[104], [105]]).choices) == 2


def test_chat(ai: Any) -> None:
    parts = [{"type": "text", "text": "say"}, {"type": "text", "text": "unicode"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    completion = ai.chat.completions.create(model="fake/model", messages=messages, n=2)
    assert {choice.message.content for choice in completion.choices} == {"naïve \u2028🦜\r\n\u0085end"}
    assert completion.choices[1].finish_reason == "stop"
    assert completion.usage.prompt_tokens == len("<system>be brief<user>say\nunicode")
    texts, roles = ["", ""], []
    for chunk in ai.chat.completions.create(model="fake/model", messages=messages, n=2, stream=True):
        assert chunk.usage is None
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles += [choice.delta.role] if choice.delta.role else []
    assert texts == [choice.message.content for choice in completion.choices]
    assert roles == ["assistant"] * 2
    answer = completion.choices[0].message.model_dump()  # goes back as it came, with its nulls
    ai.chat.completions.create(model="fake/model", messages=[*messages, answer, {"role": "user", "content": "more"}])


def test_logprobs(ai: Any) -> None:
    entries = ai.completions.create(model="fake/model", prompt="one", logprobs=2).choices[0].logprobs
    assert entries.tokens[:2] == ["B", "C"]
    assert entries.token_logprobs[:2] == [-9999.0, -0.5]
    assert entries.top_logprobs[1] == {"a": -1.0, "b": -2.0, "C": -0.5}
    assert entries.text_offset[:3] == [0, 1, 2]
    ask = {"model": "fake/model", "messages": [{"role": "user", "content": "one"}], "logprobs": True, "top_logprobs": 1}
    full = ai.chat.completions.create(**ask).choices[0].logprobs.content
    assert (full[1].token, full[1].bytes, full[1].logprob, full[1].top_logprobs[0].token) == ("C", [67], -0.5, "a")
    chunks = [choice for chunk in ai.chat.completions.create(**ask, stream=True) for choice in chunk.choices]
    assert [entry for choice in chunks if choice.logprobs for entry in choice.logprobs.content] == full


def test_tokens_in_logprobs_are_told_apart() -> None:
    """Half characters by their bytes; of tokens with the same text, the likeliest is kept. Offsets are of the text."""
    tokenizer = FakeTokenizer()
    tokenizer.token_bytes = lambda token: {300: b"A"}.get(token) or bytes([token])  # type: ignore[method-assign]
    request = CompletionRequest(prompt="")
    form = CompletionFormat(request, "fake/model", tokenizer, logprobs=True, prompts=[[]])
    chosen = [(300, -3.0), (0xE2, -1.0), (0x82, -1.0), (0xAC, -1.0), (66, -1.0)]  # another A, the three bytes of an euro sign, B
    entries = [Logprob(token, value, ((65, -0.5), (0xE2, -1.0), (0x82, -2.0))) for token, value in chosen]
    pieces = [form.pieces(join(0, [Output(0, "", logprobs=(entry,))]))[0]["logprobs"] for entry in entries]
    joined = {name: [value for piece in pieces for value in piece[name]] for name in pieces[0]}
    assert joined["tokens"] == ["A", r"bytes:\xe2", r"bytes:\x82", r"bytes:\xac", "B"]
    assert joined["token_logprobs"] == [-3.0, -1.0, -1.0, -1.0, -1.0]
    others = {"A": -0.5, r"bytes:\xe2": -1.0, r"bytes:\x82": -2.0}
    assert joined["top_logprobs"] == [others, others, others, others | {r"bytes:\xac": -1.0}, others | {"B": -1.0}]
    assert joined["text_offset"] == [0, 1, 1, 1, 2]
    formatter = CompletionFormat(request, "fake/model", tokenizer, logprobs=True, prompts=[[]])
    assert formatter.choice(join(0, [Output(0, "", logprobs=tuple(entries))]))["logprobs"] == joined


def test_parameters_reach_the_engine(ai: Any, engine: FakeEngine) -> None:
    more = {"stop_token_ids": [7], "priority": -2, "include_stop_str_in_output": True, "skip_special_tokens": False}
    more |= {"allowed_token_ids": [5, 6], "bad_words": ["no"], "thinking_token_budget": 8}
    ai.chat.completions.create(
        model="fake/model",
        messages=[{"role": "user", "content": "one"}],
        max_completion_tokens=9,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=1,
        frequency_penalty=-1,
        stop="x",
        seed=-3,
        user="me",
        logit_bias={"5": -100},
        extra_body={"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True} | more,
    )
    params, n, priority = engine.submitted[-1]
    assert (params.max_tokens, params.temperature, params.top_p, params.seed, n, priority) == (9, 0.5, 0.9, -3, 1, -2)
    assert (params.presence_penalty, params.frequency_penalty, params.stop, params.logit_bias) == (1, -1, ("x",), {5: -100})
    assert (params.top_k, params.min_p, params.repetition_penalty, params.min_tokens) == (4, 0.1, 1.1, 2)
    assert (params.ignore_eos, params.stop_token_ids, params.logprobs, params.json_schema) == (True, (7,), None, None)
    assert (params.include_stop_str_in_output, params.skip_special_tokens) == (True, False)
    assert (params.allowed_token_ids, params.bad_words, params.thinking_token_budget) == ((5, 6), ("no",), 8)
    ai.chat.completions.create(model="fake/model", messages=[{"role": "user", "content": "one"}])
    assert engine.submitted[-1][0].max_tokens == engine.max_context - len("<user>one")


def test_json_and_tools(ai: Any, engine: FakeEngine) -> None:
    def ask(**fields: Any) -> Any:
        body = {"model": "fake/model", "messages": [{"role": "user", "content": "one"}], **fields}
        full = ai.chat.completions.create(**body).choices[0]
        text, arguments, name = "", "", ""
        for chunk in ai.chat.completions.create(**body, stream=True):
            choice = chunk.choices[0]
            text += choice.delta.content or ""
            for part in choice.delta.tool_calls or ():
                name, arguments = name + (part.function.name or ""), arguments + part.function.arguments
        assert (choice.finish_reason, text) == (full.finish_reason, full.message.content or "")
        for tool in full.message.tool_calls or ():
            assert (tool.type, tool.function.name) == ("function", name)
            assert json.loads(tool.function.arguments) == json.loads(arguments)
        return full

    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    assert json.loads(ask(response_format=form).message.content) == {"a": 7}
    assert json.loads(ask(response_format={"type": "json_object", "schema": schema}).message.content) == {"a": 7}
    assert ask(response_format={"type": "json_object"}).message.content == "{}"
    assert json.loads(engine.submitted[-1][0].json_schema or "") == {"type": "object"}
    named = ask(tools=[TOOL, OTHER], tool_choice={"type": "function", "function": {"name": "add"}})
    assert (named.finish_reason, named.message.content) == ("stop", None)
    assert named.message.tool_calls[0].function.name == "add"
    required = ask(tools=[TOOL, OTHER], tool_choice="required")
    assert (required.finish_reason, required.message.tool_calls[0].function.name) == ("tool_calls", "say")
    assert required.message.tool_calls[0].function.arguments == '{"b": "said"}'
    cut = ask(tools=[TOOL, STRICT], tool_choice="required", max_tokens=5)  # of which function, it does not say
    assert (cut.finish_reason, cut.message.content, cut.message.tool_calls) == ("length", '{"nam', None)
    assert "add" in ask(tools=[TOOL]).message.content  # the template was told
    wish = [{"role": "user", "content": "use a tool"}]
    free = ask(tools=[TOOL, OTHER], messages=wish)
    assert (free.finish_reason, free.message.content) == ("tool_calls", "Sure.")
    assert free.message.tool_calls[0].function.arguments == '{"a": 7}'
    result = {"role": "tool", "tool_call_id": free.message.tool_calls[0].id, "content": "7"}
    assert ask(tools=[TOOL], messages=[*wish, free.message.model_dump(), result], tool_choice="none").finish_reason == "stop"
    unknown = ask(tools=[OTHER], messages=wish)
    assert (unknown.finish_reason, unknown.message.tool_calls) == ("stop", None)
    assert unknown.message.content.endswith("</tool_call>")
    assert "add" not in ask(tools=[TOOL], tool_choice="none").message.content
    assert ask(tools=[STRICT], tool_choice="none", response_format={"type": "json_object"}).message.content == "{}"


def test_tools_that_the_template_never_reads(address: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.tokenizer, "supports_tools", False)
    for choice in ({}, {"tool_choice": "auto"}):
        reply = post(address, tools=[TOOL], **choice)
        assert (reply.status, reply.error["param"]) == (400, "tools")
        assert 'set tool_choice to "required"' in reply.error["message"]
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        [answer] = json.loads(post(address, tools=[TOOL], tool_choice=choice).body)["choices"]
        assert answer["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 7}'}
    assert post(address, tools=[TOOL], tool_choice="none").status == post(address, tools=[]).status == 200


def test_errors_of_the_client(address: str, ai: Any) -> None:
    assert [model.id for model in ai.models.list()] == ["fake/model"]
    assert ai.models.retrieve("fake/model").id == "fake/model"
    with pytest.raises(openai.NotFoundError, match="'other' does not exist") as caught:
        ai.completions.create(model="other", prompt="one")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert post(address, model="").status == 404
    with pytest.raises(openai.BadRequestError, match="temperature is 101") as caught:
        ai.completions.create(model="fake/model", prompt="one", temperature=101)
    assert (caught.value.type, caught.value.param) == ("invalid_request_error", "temperature")
    with pytest.raises(openai.RateLimitError, match="queue is full") as caught:
        ai.completions.create(model="fake/model", prompt="full", stream=True)
    assert caught.value.response.headers["retry-after"] == "1"
    with pytest.raises(openai.InternalServerError, match="engine is closed"):
        ai.completions.create(model="fake/model", prompt="gone")
    with pytest.raises(openai.InternalServerError, match="met a NaN"):
        ai.completions.create(model="fake/model", prompt="explode")
    with pytest.raises(openai.APIError, match="met a NaN"):
        list(ai.completions.create(model="fake/model", prompt="explode", stream=True))


# ---- Refusals


@pytest.fixture(scope="module")
def strict(engine: FakeEngine) -> Iterator[str]:
    with serving(engine, strict_fields=True) as address:
        yield address


@pytest.mark.parametrize(
    ("path", "field", "neutral", "refused"),
    [
        (COMPLETIONS, "suffix", "", "end"),
        (CHAT, "audio", None, "x"),
        (CHAT, "web_search_options", None, {}),
        (CHAT, "functions", [], [{}]),
        (CHAT, "function_call", "none", "auto"),
        (CHAT, "modalities", ["text"], ["text", "audio"]),
        (CHAT, "chat_template", None, "{{ messages }}"),
        *((path, "use_beam_search", False, True) for path in (COMPLETIONS, CHAT)),
    ],
)
def test_what_is_not_served_is_named(address: str, path: str, field: str, neutral: Any, refused: Any) -> None:
    reply = post(address, path, **{field: refused})
    assert (reply.status, reply.error["param"], reply.error["code"]) == (400, field, "unsupported_parameter")
    assert field in reply.error["message"]
    for value in (neutral, None):
        assert post(address, path, **{field: value}).status == 200


@pytest.mark.parametrize(
    ("path", "field", "neutral", "label"),
    [
        *((CHAT, name, None, "x") for name in ("prediction", "prompt_cache_key", "safety_identifier")),
        (CHAT, "prompt_cache_options", None, {"mode": "explicit"}),
        (CHAT, "metadata", {}, {"a": "b"}),
        (CHAT, "store", False, True),
        (CHAT, "reasoning_effort", None, "high"),
        (CHAT, "documents", None, [{"text": "x"}]),
        (CHAT, "service_tier", "auto", "flex"),
        (CHAT, "verbosity", "medium", "low"),
        *((path, "cache_prompt", ..., {}) for path in (COMPLETIONS, CHAT)),
    ],
)
def test_what_has_no_effect_is_named(
    address: str, strict: str, path: str, field: str, neutral: Any, label: Any, caplog: pytest.LogCaptureFixture
) -> None:
    reply = post(address, path, **{field: label})
    assert (reply.status, reply.headers["x-slipstream-ignored"]) == (200, field)
    refused = post(strict, path, **{field: label})
    assert (refused.status, refused.error["param"]) == (400, field)
    assert refused.error["code"] == ("unknown_parameter" if neutral is ... else "unsupported_parameter")
    for value in () if neutral is ... else (neutral, None):
        reply = post(strict, path, **{field: value})
        assert reply.status == 200 and "x-slipstream-ignored" not in reply.headers


def test_fields_without_effect_are_in_the_log_once(engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    with serving(engine) as address:
        for stream in (False, True, False):
            reply = post(address, stream=stream, **{"x\ny": 1}, messages=[{"role": "user", "content": [part], "id": 7}])
            assert reply.headers["x-slipstream-ignored"] == r"messages.content.cache_control, messages.id, x\ny"
    assert caplog.messages == [r"fields of requests that have no effect here: messages.content.cache_control, messages.id, x\ny"]


@pytest.mark.parametrize(
    ("model", "params"),
    [(CompletionRequest, openai_completion.CompletionCreateParamsBase), (ChatRequest, openai_chat.CompletionCreateParamsBase)],
)
def test_every_field_of_openais_is_known(model: type[BaseModel], params: Any) -> None:
    """When this fails, OpenAI has new fields: serve each, refuse it, or add it to LABELS (server/requests, SERVING.md)."""
    missing = set(params.__annotations__) - set(model.model_fields) - set(LABELS)
    assert not missing, f"openai {openai.__version__} has {sorted(missing)}"


USER = {"role": "user", "content": "hi"}
TEXT = {"type": "text", "text": "hi"}
PICTURE = {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [USER, PICTURE]}, "messages.1.content.0.type", "only text .*image_url"),
        ({"messages": [USER | {"content": [{"type": "text"}]}]}, "messages.0.content.0.text", "content.0.text: Field required"),
        ({"messages": [USER | {"content": [TEXT, {"text": "x"}]}]}, "messages.0.content.1.type", "Field required"),
        ({"messages": [USER | {"content": [TEXT, TEXT | {"text": None}]}]}, "messages.0.content.1.text", "valid string"),
        ({"messages": [USER | {"content": [TEXT, "x"]}]}, "messages.0.content.1", "object|dictionary"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "developer"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "needs content"),
        ({"messages": [USER | {"audio": {"id": "f"}}]}, "messages.0.audio", "not supported"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages", "the template refuses"),
        ({"max_tokens": -2}, "max_tokens", "-1"),
        ({"max_tokens": "5"}, "max_tokens", "integer"),
        ({"max_tokens": 5000}, "max_tokens", "context is 4096 tokens; the prompt has 8 and max_tokens is 5000"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages", "prompt is longer|prompt has 5006"),
        ({"temperature": -1}, "temperature", "between 0 and 100"),
        ({"temperature": True}, "temperature", "number"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"n": 1000}, "n", "128"),
        ({"seed": 2**70}, "seed", ""),
        ({"stop": [1]}, "stop", "list of at most 16 strings"),
        ({"stop": ""}, "stop", "no empty"),
        ({"stop": ["x", "y" * 1025]}, "stop", "1,024 characters"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty", "is 1e-40; it must be between 0.01 and 100"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "1,024 token ids"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "not supported"),
        ({"bad_words": ["x" * 257]}, "bad_words", "of at most 256 characters"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "at least one token"),
        ({"truncate_prompt_tokens": 4090}, "truncate_prompt_tokens", "is 4090; it must be -1, or 1 to 4046, .* for 50 more"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 4096}, "max_tokens", "is 4096, which leaves none for the prompt"),
        ({"min_tokens": 60}, "min_tokens", "more than max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream: true"),
        ({"response_format": {"type": "grammar"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "needs the field json_schema"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "mul"}}}, "tool_choice", "names 'mul'"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "only tools of type function"),
        ({"tools": [TOOL, TOOL]}, "tools", "same name"),
        ({"tools": [TOOL], "tool_choice": "required", "guided_regex": "a"}, "guided_regex", "mutually exclusive"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "keep one"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type", "only tools of type function"),
        ({"continue_final_message": True}, "continue_final_message", "last message of the assistant"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "field of its own"),
        ({"max_completion_tokens": 3}, "max_completion_tokens", "differ"),
        ({"model": 1}, "model", "string"),
    ],
)
def test_bad_values_are_explained(address: str, fields: dict[str, Any], param: str, says: str) -> None:
    error = (reply := post(address, **fields)).error
    assert (reply.status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert re.search(says, error["message"]), error["message"]


@pytest.mark.parametrize(
    "prompt", [[], [[]], "", ["a", 1], [1, "a"], [True], [-1], [2**40], [300], {"a": 1}, [[1], ["a"]], 1.5, ["ok", ""]], ids=str
)
def test_bad_prompts(address: str, prompt: Any) -> None:
    assert post(address, COMPLETIONS, prompt=prompt).error["type"] == "invalid_request_error"


def test_other_errors_have_the_same_form(address: str) -> None:
    valid = json.dumps({"model": "fake/model", "prompt": "hi"}).encode()
    json_type = {"Content-Type": "application/json"}
    rows: list[tuple[int, str, str, Any, dict[str, str] | None]] = [
        (404, "GET", "/v1/nothing", None, None),
        (404, "GET", "/v1/models/nothing%ff%00", None, None),
        (405, "GET", COMPLETIONS, None, None),
        (405, "POST", "/health", None, None),
        (415, "POST", COMPLETIONS, valid, {"Content-Type": "text/plain"}),
        (415, "POST", COMPLETIONS, valid, {}),
        (413, "POST", COMPLETIONS, b" " * (5 << 20), json_type),
        (413, "POST", COMPLETIONS, iter([b" " * (1 << 20)] * 6), json_type),  # chunked: nothing says its size before
        (200, "POST", COMPLETIONS, iter([valid[:7], valid[7:]]), {"Content-Type": "Application/JSON; charset=utf-8"}),
    ]
    for status, method, path, body, headers in rows:
        reply = call(address, method, path, body, headers)
        assert reply.status == status, (method, path)
        if status != 200:
            assert reply.error["type"] == "invalid_request_error"
    assert "POST" in call(address, "GET", COMPLETIONS).headers["allow"]
    assert call(address, "POST", COMPLETIONS, b"[]", json_type).error["message"].startswith("the body: ")


def test_a_slash_at_the_end_of_a_path_changes_nothing(address: str, engine: FakeEngine) -> None:
    """A redirect would lead the clients of a proxy to an address that is the server's own."""
    bodies: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": [USER]}),
        (COMPLETIONS, {"prompt": "hi"}),
        (COMPLETIONS, {"n": 0}),
    ]
    for path, more in bodies:
        body = json.dumps({"model": "fake/model", "seed": 1, **more})
        plain, slashed = (call(address, "POST", path + end, body) for end in ("", "/"))
        one, other = ({**json.loads(reply.body), "id": 0, "created": 0} for reply in (plain, slashed))
        assert (slashed.status, other) == (plain.status, one)
    for path in ("/health", "/v1/models", "/v1/models/fake/model", "/"):
        assert call(address, "GET", path + "/").body == call(address, "GET", path).body
    assert 'path="other",status="307"' not in call(address, "GET", "/metrics/").body.decode()
    with serving(engine, api_keys=["key"]) as guarded_address:
        assert call(guarded_address, "GET", "/health/").status == 200
        assert post(guarded_address, COMPLETIONS + "/").status == 401


HOSTILE = [
    *(b"", b"null", b"[]", b'"', b"{", b"\xff\xfe", b"\x00", b"nan", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 100_000),
    *(b'{"model": "\\ud800"}', b'{"model": "fake/model", "prompt": "\\ud800"}', '{"model": "fake/model"}'.encode("utf-16")),
    b'{"model": "fake/model", "prompt": "hi", "temperature": NaN}',
    b'{"model": "fake/model", "prompt": "hi", "temperature": 1e999}',
    b'{"model": "fake/model", "prompt": "hi", "seed": ' + b"9" * 5000 + b"}",
    b'{"model": {"$ref": "#"}, "prompt": {"__class__": 1}}',
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_hostile_bodies(address: str, path: str) -> None:
    for body in HOSTILE:
        reply = call(address, "POST", path, body)
        assert (reply.status, reply.error["type"]) == (400, "invalid_request_error"), body[:80]
        assert len(reply.body) < 1000
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"a": float("inf")}}}
    assert post(address, response_format=schema).status == 400
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "[" * 100_000}}]
    assert post(address, messages=[USER, {"role": "assistant", "tool_calls": calls}]).status == 200
    fields = {"prompt": "hi"} if path == COMPLETIONS else {"messages": [USER]}
    body = json.dumps({"model": "fake/model", **fields}).encode()
    assert call(address, "POST", path, b"\xef\xbb\xbf" + body).status == 200, "as PowerShell writes UTF-8"


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=6
)
NAMES = sorted({*CompletionRequest.model_fields, *ChatRequest.model_fields})


@given(path=st.sampled_from([COMPLETIONS, CHAT]), fields=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3))
def test_random_fields(address: str, path: str, fields: dict[str, Any]) -> None:
    reply = post(address, path, **{"max_tokens": 3, **fields})
    assert reply.status in (200, 400, 404), reply
    if reply.status != 200:
        assert reply.error["type"] == "invalid_request_error"


# ---- Clients that come, wait and go


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_cancelled(address: str, engine: FakeEngine, stream: bool) -> None:
    before = len(engine.cancelled)
    body = json.dumps({"model": "fake/model", "prompt": ["forever", "forever 2"], "max_tokens": 4000, "stream": stream}).encode()
    with socket.create_connection(address.split(":")) as raw:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        raw.sendall(head.encode() + b"\r\n\r\n" + body)
        until(lambda: len(engine.running) == 2)
        if stream:
            assert raw.recv(15) == b"HTTP/1.1 200 OK"
    until(lambda: len(engine.cancelled) == before + 2)
    assert not engine.running
    abandoned = rb"slipstream_http_abandoned_total [1-9]"
    until(lambda: re.search(abandoned, call(address, "GET", "/metrics").body) is not None)


def unreading(address: str, prompt: str) -> socket.socket:
    """A client that has asked for a stream, and for which its kernel keeps 64 KiB: by itself that would grow, to 32 MiB at most."""
    body = json.dumps({"model": "fake/model", "prompt": prompt, "max_tokens": 4000, "stream": True}).encode()
    return opening(address, f"Content-Type: application/json\r\nConnection: close\r\nContent-Length: {len(body)}", body, 64 << 10)


def rest(raw: socket.socket) -> bytes:
    return b"".join(iter(lambda: raw.recv(1 << 20), b""))


def steady(value: Callable[[], Any]) -> bool:
    """A request is held also while the event loop is behind, and goes on when the loop has sent what waited for it."""
    before = value()
    time.sleep(0.3)
    return bool(value() == before)


def test_what_a_client_does_not_read_is_not_made() -> None:
    """Nobody else notices; it goes on when it reads again, and ends when it leaves."""
    engine = FakeEngine()

    def made() -> list[int]:
        return [handle.num_sent[0] for handle in engine.running if handle.endless]

    with serving(engine) as address:
        clients = [unreading(address, "forever loud") for _ in range(8)]
        until(lambda: len(engine.held) == 8 and steady(made))
        before = made()
        gaps, last = [], time.perf_counter()
        for _ in range(50):
            assert post(address, COMPLETIONS).status == 200
            gaps.append(-last + (last := time.perf_counter()))
        assert max(gaps) < 1 and made() == before
        most = generation.MAX_AHEAD + (8 << 20) / 50_000
        assert sum(before) < most, "what the kernel keeps, and little more, and what the loop is behind"
        for raw in clients:
            num = raw.recv(1 << 20, socket.MSG_WAITALL).count(b"data: ")
            while num < 2 * max(before):
                num += raw.recv(1 << 20).count(b"data: ")
        for raw in clients:
            raw.close()
        until(lambda: active(address) == 0)
    assert not engine.running


def test_a_client_that_never_reads_is_ended() -> None:
    engine = FakeEngine()
    with serving(engine, read_timeout_s=0.5) as address:
        raw = unreading(address, "forever loud")
        until(lambda: len(engine.cancelled) == 1)
        *whole, end = rest(raw).split(b"data: ")
        error = json.loads(end.partition(b"\r\n")[0])["error"]
        assert (
            error["code"] == "client_too_slow" and "read nothing of the response for 0.5 s" in error["message"] and len(whole) > 2
        )
        raw.close()
        until(lambda: active(address) == 0)


@given(st.lists(st.integers(0, 3 * generation.SLICE), max_size=12))
def test_pieces_of_a_stream_are_whole_events(sizes: list[int]) -> None:
    events = [b"data: " + b"x" * size + b"\n\n" for size in sizes]
    pieces = generation._pieces(b"".join(events))
    assert b"".join(pieces) == b"".join(events) and len(pieces) <= max(1, len(events))
    for piece in pieces if events else ():
        assert piece.endswith(b"\n\n") and (len(piece) <= generation.SLICE or piece.count(b"\n\n") == 1)


def test_an_engine_waits_for_the_event_loop() -> None:
    async def ahead() -> tuple[int, int]:
        box = generation.Mailbox(generation.Unread(1), 1)
        thread = threading.Thread(target=lambda: [box.post(0, Output(0, "a")) for _ in range(3 * generation.MAX_AHEAD)])
        thread.start()
        time.sleep(0.3)  # the loop is busy
        most = len(box.unread._posted)
        num = 0
        while num < 3 * generation.MAX_AHEAD:
            num += len(await box.take())
        thread.join()
        return most, len(box.unread._posted)

    assert asyncio.run(ahead()) == (generation.MAX_AHEAD, 0)


def opening(address: str, head: str, body: bytes = b"", kept: int | None = None) -> socket.socket:
    """`kept`: bytes that the client's kernel keeps; has to be set before the connection is made."""
    raw = socket.socket()
    raw.settimeout(10)
    if kept is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, kept)
    host, port = address.split(":")
    raw.connect((host, int(port)))
    start = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{head}\r\n\r\n"
    raw.sendall(start.encode() + body)  # at once: what a server closes without having read resets the connection
    return raw


def active(address: str, key: str = "") -> int:
    metrics = call(address, "GET", "/metrics", headers={"Authorization": f"Bearer {key}"}).body
    return int(re.search(rb"slipstream_http_requests_active (\d+)", metrics)[1])  # type: ignore[index]


def test_bodies_that_drip_or_never_come(engine: FakeEngine) -> None:
    submitted = len(engine.submitted)
    with serving(engine, body_timeout_s=0.3) as address:
        silent = [opening(address, "Content-Length: 100", b"{"[:number]) for number in (0, 1)] + [
            opening(address, "Transfer-Encoding: chunked", b"1\r\n{\r\n")
        ]
        drip = opening(address, "Content-Length: 100000")
        with pytest.raises(OSError):  # it is closed, however often it sends a little
            for _ in range(200):
                drip.sendall(b" ")
                time.sleep(0.01)
        assert post(address).status == 200
        for raw in silent:
            with raw:
                reply = raw.makefile("rb").read()  # to the end: the server closes
            assert reply.startswith(b"HTTP/1.1 408") and b"did not arrive within 0.3 s" in reply
        drip.close()
        gone = opening(address, "Content-Length: 100", b"{")
        until(lambda: active(address) == 1)
        gone.close()
        until(lambda: active(address) == 0)
    assert len(engine.submitted) == submitted + 1


def closed(raw: socket.socket) -> bool:
    """The server closes it, without a word. Waits for it."""
    with raw:
        try:
            return raw.recv(1) == b""
        except ConnectionResetError:
            return True


def test_connections_without_a_request_end(engine: FakeEngine) -> None:
    """They say nothing, or half a header, or that after an answer; who waits for an answer may take longer."""
    guard = guarded(max_connections=100, header_timeout_s=0.3)
    with serving(engine, http=guard) as address:
        place = address.split(":")
        slow = threading.Thread(target=lambda: replies.append(post(address, COMPLETIONS, prompt="forever", stream=True)))
        replies: list[Reply] = []
        slow.start()
        silent, half, again = (socket.create_connection(place, timeout=10) for _ in range(3))
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-")
        again.sendall(b"HEAD /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert again.recv(1000).startswith(b"HTTP/1.1 200")
        again.sendall(b"GET ")
        for _ in range(5):
            half.sendall(b"a")
            time.sleep(0.02)
        assert all(map(closed, (silent, half, again)))
        assert slow.is_alive() and len(engine.running) == 1
        engine.cancel(engine.running[0])
        slow.join()
        assert replies[0].status == 200


@pytest.mark.parametrize(
    "offer", ["Upgrade\r\nUpgrade: websocket", "Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk"]
)
def test_who_offers_another_protocol_is_answered_in_http(engine: FakeEngine, offer: str, caplog: pytest.LogCaptureFixture) -> None:
    """And what the server is written in is no matter of its log."""
    body = json.dumps({"model": "fake/model", "prompt": "hi", "max_tokens": 2}).encode()
    with serving(engine, http=guarded(max_connections=100, header_timeout_s=10)) as address:
        with opening(address, f"Connection: {offer}\r\nContent-Length: {len(body)}", body) as raw:
            assert raw.recv(1000).startswith(b"HTTP/1.1 200 OK")
    assert "pgrade" not in caplog.text and "WebSocket" not in caplog.text


def test_a_last_answer_may_be_read_slowly_but_not_never() -> None:
    kind: Any = guarded(max_connections=1, header_timeout_s=1)
    for unread, looks in (([5000, 4000, 0], 3), ([5000, 5000], 2), ([0], 1)):
        protocol, timers, aborted = kind.__new__(kind), [], []
        protocol.loop = SimpleNamespace(call_later=lambda seconds, look, timers=timers: timers.append(look))
        sizes, protocol.cycle = iter(unread), SimpleNamespace(response_complete=True)
        protocol.transport = SimpleNamespace(
            get_write_buffer_size=partial(next, sizes), is_closing=lambda: False, abort=partial(aborted.append, True)
        )
        protocol._start_timer()
        for look in timers:
            look()
        assert (len(timers), aborted) == (looks, [True])


def test_only_so_many_connections(engine: FakeEngine) -> None:
    with serving(engine, http=guarded(max_connections=2, header_timeout_s=60)) as address:
        place = address.split(":")
        connections = [socket.create_connection(place, timeout=10) for _ in range(2)]
        with socket.create_connection(place, timeout=10) as raw:
            reply = raw.makefile("rb").read()
        assert reply.startswith(b"HTTP/1.1 503") and json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["type"] == "server_error"
        for raw in connections:
            raw.close()
        until(lambda: call(address, "GET", "/health").status == 200)


@pytest.mark.parametrize(
    ("head", "body"),
    [
        *(("Transfer-Encoding: chunked", body) for body in (b"zz\r\n{}\r\n", b"-1\r\n{}\r\n", b"1\r\n{}\r\n0\r\n\r\n")),
        ("Transfer-Encoding: chunked", b"f" * 30 + b"\r\n{}\r\n"),
        ("Transfer-Encoding: gzip, chunked", b"0\r\n\r\n"),
        ("Content-Length: 2\r\nContent-Length: 3", b"{}}"),
        ("Content-Length: -2", b"{}"),
        ("Content-Length: 2x", b"{}"),
    ],
)
def test_bodies_that_are_no_http(address: str, engine: FakeEngine, head: str, body: bytes) -> None:
    before = len(engine.submitted)
    with opening(address, head, body) as raw:
        status, *_ = raw.makefile("rb").read().split(b"\r\n")
    assert re.match(rb"HTTP/1.1 (400|501)", status), status
    until(lambda: active(address) == 0)
    assert len(engine.submitted) == before
    assert post(address).status == 200


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("Content-Length: 5000000\r\nExpect: 100-continue", b"413"),  # by curl; without a body, which it has not been told to send
        ("Content-Length: 99999999999", b"413"),
        ("Content-Length: 2\r\nContent-Encoding: gzip", b"415"),
    ],
)
def test_bodies_that_are_refused_by_their_headers(address: str, head: str, status: bytes) -> None:
    with opening(address, head) as raw:
        reply = raw.recv(1000)
    assert reply.startswith(b"HTTP/1.1 " + status)
    assert status != b"413" or b"\r\nconnection: close\r\n" in reply.lower()


def test_two_hundred_clients_some_of_which_vanish(address: str, engine: FakeEngine) -> None:
    async def one(ai: Any, number: int) -> str | None:
        ask = {"model": "fake/model", "prompt": f"client {number}", "max_tokens": 50, "seed": number}
        if number % 3 == 0:
            return (await ai.completions.create(**ask)).choices[0].text
        if number % 7 == 0:  # leaves in the middle
            async with await ai.completions.create(**ask | {"prompt": f"forever {number}"}, stream=True) as stream:
                async for _ in stream:
                    return None
        return "".join([chunk.choices[0].text async for chunk in await ai.completions.create(**ask, stream=True)])

    async def all_of_them() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as ai:
            return await asyncio.gather(*(one(ai, number) for number in range(200)))

    for number, text in enumerate(asyncio.run(all_of_them())):
        assert text in (None, f"client {number} " * 3 + f"0 seed {number}")
        assert text is not None or (number % 7 == 0 and number % 3)
    until(lambda: not engine.running)


SLOW = {"type": "json_schema", "json_schema": {"name": "it", "schema": {"type": "object", "title": "slow"}}}


def test_schemas_that_compile_for_long_stop_nobody_else(engine: FakeEngine) -> None:
    """More of them than the server has threads: one is being compiled, the others wait for their turn."""
    replies: list[Reply] = []
    with serving(engine, schema_timeout_s=60) as address:
        engine.compiled.clear()
        asking = [threading.Thread(target=lambda: replies.append(post(address, response_format=SLOW))) for _ in range(40)]
        try:
            for thread in asking:
                thread.start()
            until(lambda: active(address) == 40)
            assert post(address).status == post(address, COMPLETIONS).status == 200
            assert not replies
        finally:
            engine.compiled.set()
            for thread in asking:
                thread.join()
        assert [reply.status for reply in replies] == [200] * 40
    assert not engine.running


def test_schemas_are_compiled_for_keys_in_turn(engine: FakeEngine) -> None:
    def ask(key: str, tokens: int) -> None:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        assert post(address, headers=headers, response_format=SLOW, max_tokens=tokens).status == 200

    before = len(engine.submitted)
    with serving(engine, schema_timeout_s=60, api_keys=["many", "one"]) as address, ThreadPoolExecutor(6) as clients:
        engine.compiled.clear()
        try:
            waiting = [clients.submit(ask, "many", 20) for _ in range(5)]
            until(lambda: active(address, "many") == 5)
            time.sleep(0.2)  # until they are parsed, too
            waiting.append(clients.submit(ask, "one", 7))
            until(lambda: active(address, "many") == 6)
            time.sleep(0.2)
        finally:
            engine.compiled.set()
        for one in waiting:
            one.result()
    assert [params.max_tokens for params, *_ in engine.submitted[before:]] == [20, 7, 20, 20, 20, 20]
    assert min(engine.waited[before + 2 :]) > 0.4, "time to the first token counts from the arrival, not from the turn to compile"


def test_schemas_wait_neither_for_the_compiler_nor_for_their_turn_for_ever(engine: FakeEngine) -> None:
    with serving(engine, schema_timeout_s=0.2) as address:
        engine.compiled.clear()
        try:
            compiling, waiting = post(address, response_format=SLOW), post(address, response_format=SLOW)
        finally:
            engine.compiled.set()
        assert (compiling.status, compiling.error["code"]) == (400, "schema_too_complex")
        assert (waiting.status, waiting.error["code"]) == (503, "busy")
        until(lambda: not engine.running)
        assert post(address, response_format=SLOW).status == 200


def test_time_limit(engine: FakeEngine) -> None:
    with serving(engine, request_timeout_s=0.1) as address:
        reply = post(address, COMPLETIONS, prompt="forever")
        assert (reply.status, reply.error["code"]) == (504, "timeout")
        reply = post(address, COMPLETIONS, prompt="forever", stream=True)
        assert reply.status == 200
        assert b"did not finish within 0.1 s" in reply.body.split(b"\n\n")[-2]
    assert not engine.running


def test_api_keys_and_token_limit(engine: FakeEngine) -> None:
    for keys in ("secret", ("a", "")):
        with pytest.raises(ValueError, match="none of them empty"):
            create_app(engine, api_keys=keys)
    with serving(engine, api_keys=("right", "other"), max_output_tokens=60) as address:
        assert call(address, "GET", "/").status == call(address, "GET", "/health").status == 200
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nothing"):
            assert call(address, "GET", path).error["code"] == "invalid_api_key"
        for header in ("Bearer wrong", "Basic right", "right", "Bearer", "Bearer right2", "Bearer r\xefght"):
            reply = post(address, headers={"Authorization": header})
            assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
        with client(address, api_key="other") as ai:
            ask = {"model": "fake/model", "messages": [USER]}
            ai.chat.completions.create(**ask)
            assert engine.submitted[-1][0].max_tokens == 60
            with pytest.raises(openai.BadRequestError, match="at most 60"):
                ai.chat.completions.create(**ask, max_tokens=61)


def test_targets_reach_the_engine_and_are_numbers_of_seconds(engine: FakeEngine, address: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    asks: dict[str, dict[str, Any]] = {
        CHAT: {"messages": messages},
        COMPLETIONS: {"prompt": "hi"},
        "/v1/responses": {"input": "hi"},
    }
    for path, ask in asks.items():
        body = {"model": "fake/model", **ask}
        for target in ({}, {"first_within": 0.5}, {"wait_within": 0.04}, {"first_within": 2, "wait_within": 1e-3}):
            reply = call(address, "POST", path, json.dumps(body | target))
            assert (reply.status, engine.targets[-1]) == (200, (target.get("first_within"), target.get("wait_within")))
            assert "x-slipstream-ignored" not in reply.headers
        for name in ("first_within", "wait_within"):
            for wrong in (0, -1, "soon", [1], {}):
                reply = call(address, "POST", path, json.dumps(body | {name: wrong}))
                assert (reply.status, json.loads(reply.body)["error"]["param"]) == (400, name), (path, wrong)


def test_an_adapter_that_loads_for_long_stops_nobody_and_a_refused_one_is_not_loaded(tmp_path: Path) -> None:
    engine, go, loaded = FakeEngine(), threading.Event(), list[str]()

    def load(name: str, folder: Path, *, replace: bool) -> None:
        go.wait(30)
        loaded.append(name)

    engine.load_adapter = load  # type: ignore[method-assign, assignment]
    body = {"lora_path": "."}
    with serving(engine, lora_root=str(tmp_path), strict_fields=True) as address, ThreadPoolExecutor(4) as clients:
        path = "/v1/load_lora_adapter"
        loads = [clients.submit(call, address, "POST", path, json.dumps({**body, "lora_name": name})) for name in "abc"]
        until(lambda: active(address) == 3)
        refused = call(address, "POST", path, json.dumps({**body, "lora_name": "refused", "unknown": 1}))
        assert (refused.status, refused.error["param"]) == (400, "unknown")
        assert post(address).status == 200 and not loaded
        go.set()
        assert [json.loads(load.result().body)["id"] for load in loads] == ["a", "b", "c"]
    assert sorted(loaded) == ["a", "b", "c"]


def test_priority_is_for_keys_that_may(engine: FakeEngine) -> None:
    with serving(engine, api_keys=["low"], priority_keys=["high"]) as address:
        for key, priority in (("high", -5), ("low", 0)):
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
            reply = post(address, headers=headers, priority=-5)
            assert (reply.status, engine.submitted[-1][2]) == (200, priority)
            assert reply.headers.get("x-slipstream-ignored") == (None if priority else "priority")
        assert post(address).status == 401


def test_request_ids_and_origins(engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "slipstream.access")
    with serving(engine, api_keys=["key"], cors_origins=["http://here"]) as address:
        reply = call(
            address, "GET", "/v1/models", headers={"X-Request-Id": "run-1", "Authorization": "Bearer key", "Origin": "http://here"}
        )
        assert (reply.headers["x-request-id"], reply.headers["access-control-allow-origin"]) == ("run-1", "http://here")
        other = call(address, "GET", "/a%0Ab", headers={"X-Request-Id": "a b", "Origin": "http://there"})
        assert re.fullmatch("[0-9a-f]{32}", other.headers["x-request-id"]) and "access-control-allow-origin" not in other.headers
        asked = {
            "Origin": "http://here",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization",
        }
        assert call(address, "OPTIONS", CHAT, headers=asked).status == 200
    first, second = (record.getMessage() for record in caplog.records if record.name == "slipstream.access")
    assert re.fullmatch(r"run-1 GET '/v1/models' 200 0\.\d{3} s key [0-9a-f]{8}", first)
    assert re.fullmatch(r"[0-9a-f]{32} GET '/a\\nb' 401 0\.\d{3} s key -", second)


def test_health_and_metrics(address: str, engine: FakeEngine) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    assert call(address, "HEAD", "/health").status == 200
    engine.healthy = False
    assert call(address, "GET", "/health").status == 503
    engine.healthy = True
    assert json.loads(call(address, "GET", "/load").body) == {"server_load": 0}
    assert json.loads(call(address, "GET", "/version").body) == {"version": slipstream.__version__}
    reply = call(address, "GET", "/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    text = reply.body.decode()
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    assert families["slipstream_time_to_first_token_seconds"].type == "histogram"
    assert families["slipstream_prompt_tokens"].type == "counter"
    for line in (
        "slipstream_kv_usage_ratio 0.25",
        "slipstream_tokens_per_second 12.5",
        'slipstream_finished_total{reason="stop"} 3',
        'slipstream_time_to_first_token_seconds_bucket{le="1.0"} 3',
        'slipstream_time_to_first_token_seconds_bucket{le="+Inf"} 4',
        "slipstream_time_between_tokens_seconds_count 4",
        "slipstream_request_output_tokens_count 4",
        'slipstream_http_requests_total{path="/health",status="503"} 1',
    ):
        assert line in text.splitlines()


def test_what_nobody_expected_is_an_error_without_details(
    address: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine, "stats", lambda: 1 / 0)
    reply = call(address, "GET", "/metrics")
    assert (reply.status, reply.error["type"]) == (500, "server_error")
    assert b"ZeroDivisionError" not in reply.body
    assert "ZeroDivisionError" in caplog.text


DRAINING = "draining: waiting at most 60 s for {}; signal again to stop now\n"


@contextmanager
def serving_process(max_files: int | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(["src", ".", os.environ.get("PYTHONPATH", "")])}
    limit = [] if max_files is None else ["bash", "-c", f'ulimit -n {max_files}; exec "$@"', "bash"]
    command = [*limit, sys.executable, "-m", "tests.inference.fake_engine"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            yield process, re.search(r"http://([\d.]+:\d+)", process.stdout.readline())[1]  # type: ignore[index]
        finally:
            process.kill()


def test_a_process_survives_a_burst_of_connections_and_drains_on_sigterm() -> None:
    """The event loop accepts all that wait in one go; without a file left, it would log each failure, and accept nobody for 1 s.
    A server that drains finishes its streams, and refuses new requests."""
    with serving_process(max_files=80) as (process, address):
        place = ("127.0.0.1", int(address.split(":")[1]))
        process.send_signal(signal.SIGSTOP)
        burst = [socket.create_connection(place, timeout=10) for _ in range(300)]
        process.send_signal(signal.SIGCONT)
        burst[0].sendall(b"HEAD /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert burst[0].recv(1000).startswith(b"HTTP/1.1 200"), "it came first"
        replies = [raw.makefile("rb").read() for raw in burst[-50:]]
        assert all(reply.startswith(b"HTTP/1.1 503") and b"retry-after: 5" in reply for reply in replies)
        for raw in burst:
            raw.close()
        until(lambda: call(address, "GET", "/health").status == 200)
        assert post(address).status == 200
        with client(address) as ai:
            stream = iter(ai.completions.create(model="fake/model", prompt="a b", stream=True, max_tokens=50))
            text = next(stream).choices[0].text
            process.send_signal(signal.SIGTERM)
            until(lambda: b"draining" in call(address, "GET", "/health").body)
            reply = post(address)
            assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (503, "draining", "5")
            text += "".join(chunk.choices[0].text for chunk in stream)
        assert text == "a b a b a b 0 seed None"
        assert process.communicate(timeout=30)[1] == DRAINING.format("1 request")
        assert process.returncode == 0


def test_an_idle_process_ends_on_sigterm_without_a_word() -> None:
    with serving_process() as (process, _):
        process.send_signal(signal.SIGTERM)
        assert (process.communicate(timeout=30)[1], process.returncode) == ("", 0)


def test_too_few_files_for_a_server() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (50, limits[1]))
        with pytest.raises(ValueError, match="the limit of open files is 50, and a server needs at least 64: ulimit -n 4160"):
            check([], None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.slow
def test_a_second_signal_answers_everybody_at_once() -> None:
    """Also who waits for a whole answer, or has not sent all of the question."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    with serving_process() as (process, address), ThreadPoolExecutor(2) as clients:
        future = clients.submit(post, address, COMPLETIONS, prompt="forever")
        stream = clients.submit(post, address, COMPLETIONS, prompt="forever", stream=True)
        host, port = address.split(":")
        with socket.create_connection((host, int(port)), timeout=30) as half:
            half.sendall(head)
            until(lambda: b"requests_active 3" in call(address, "GET", "/metrics").body)
            until(lambda: b"generated_tokens_total 0" not in call(address, "GET", "/metrics").body)
            process.send_signal(signal.SIGTERM)
            until(lambda: b"draining" in call(address, "GET", "/health").body)
            process.send_signal(signal.SIGINT)
            answer = b"".join(iter(partial(half.recv, 65536), b""))
        assert answer.startswith(b"HTTP/1.1 503 ") and b"the server is shutting down" in answer
        reply = future.result()
        assert (reply.status, reply.error["message"]) == (503, "the server is shutting down")
        *_, last, end = stream.result().body.split(b"\n\n")
        assert b'"the server is shutting down"' in last and end == b""
        log = process.communicate(timeout=30)[1]
        assert re.fullmatch(re.escape(DRAINING.format("3 requests")) + r"aborted 3 requests after 0(\.\d)? s\n", log), log
        assert process.returncode == 0


def test_nobody_takes_the_port_while_a_model_is_loaded() -> None:
    with ExitStack() as stack:
        (listener,) = _bound("127.0.0.1", 0, stack)
        with pytest.raises(OSError, match="in use"), socket.create_server(listener.getsockname()):
            pass
        with pytest.raises(ConnectionRefusedError), socket.create_connection(listener.getsockname()):
            pass
        listener.listen()
        with socket.create_connection(listener.getsockname(), timeout=5):
            pass


def test_the_end_of_a_drain_answers_everybody(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(2) as threads:
        address = "{}:{}".format(*listener.getsockname())
        ended = threads.submit(serve, engine, sockets=[listener], drain_timeout_s=0.3)
        future = threads.submit(post, address, COMPLETIONS, prompt="forever")
        until(lambda: bool(engine.running))
        engine.healthy = False  # and yet it says more
        reply = future.result()
        assert (reply.status, reply.error["message"]) == (503, "the server is shutting down")
        assert isinstance(ended.exception(5), DeadEngineError)
    assert re.fullmatch(r"aborted 1 request after 0\.[3-9] s", caplog.messages[-1])
    assert not engine.running


def test_a_dead_engine_ends_its_server() -> None:
    """When everybody has been told. Who supervises the process can start another, which no 503 would bring about."""
    engine, ends = FakeEngine(), list[str]()
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]

    def run() -> None:
        try:
            serve(engine, sockets=[listener])
        except DeadEngineError as error:
            ends.append(str(error))

    server = threading.Thread(target=run)
    server.start()

    def up() -> bool:
        with suppress(OSError):
            return call(f"127.0.0.1:{port}", "GET", "/health").status == 200
        return False

    until(up)
    with client(f"127.0.0.1:{port}") as ai:
        stream = iter(ai.completions.create(model="fake/model", prompt="forever", stream=True))
        assert next(stream).choices[0].text.startswith("more ")
        with pytest.raises(openai.InternalServerError, match="the device is lost"):
            ai.completions.create(model="fake/model", prompt="kill")
        with pytest.raises(openai.APIError, match="the device is lost"):
            list(stream)
        server.join(10)
    assert ends == ["the engine of fake/model failed permanently; see the log, and restart the process"]


# Made for this test: openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 36500 -subj /CN=localhost
CERTIFICATE = """-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgTAnRemtAtb+W+2FF
+EYaUqefjFuDJ0o3a0/GfpRm1duhRANCAAQMjEng2tFke50T1upPEbffd4v56g1S
aE75BHvdmvLJ/4SIlGCZEEw3PRWEs+F8m2cUk3TwDk+R9IHaJTULOHvP
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBkDCCATagAwIBAgIUVt8sF+6BAYYu+7QLVTvOuGdlfjIwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyNjA3NDA1MVoYDzIxMjYxMTAy
MDc0MDUxWjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAAQMjEng2tFke50T1upPEbffd4v56g1SaE75BHvdmvLJ/4SIlGCZEEw3
PRWEs+F8m2cUk3TwDk+R9IHaJTULOHvPo2QwYjAdBgNVHQ4EFgQUlQ+oaryg6Yrc
IQE8wRW07fiFizIwHwYDVR0jBBgwFoAUlQ+oaryg6YrcIQE8wRW07fiFizIwDwYD
VR0TAQH/BAUwAwEB/zAPBgNVHREECDAGhwR/AAABMAoGCCqGSM49BAMCA0gAMEUC
IA2/E5Bh7mw6V0b4ycpn7eC9fl3ErWDL17dWHQYo6m4mAiEAwxfDs6kSZJO6qbVE
t/NYuLJJ2syjRV1gSIDy7bl+kFQ=
-----END CERTIFICATE-----
"""


RENEWED = """-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgxbBcP5XmA4Qw+ZI+
RV2wnZ2Svjefh0gR9BR013DeOV+hRANCAAQU3qI6Ar0A+kRieYZ/WZNbAIotsuuo
+3j3Q7r+V1n28nYcCkqB4KSgLDP3NHSeJwjmyv/ZjsLFK8FgqYgdThmb
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBjTCCATKgAwIBAgIUXpnnJ+0Hx30Ieiw7VFjFzezpMRYwCgYIKoZIzj0EAwIw
EjEQMA4GA1UEAwwHcmVuZXdlZDAgFw0yNjExMjkxMjU0MzdaGA8yMTI2MTEwNTEy
NTQzN1owEjEQMA4GA1UEAwwHcmVuZXdlZDBZMBMGByqGSM49AgEGCCqGSM49AwEH
A0IABBTeojoCvQD6RGJ5hn9Zk1sAii2y66j7ePdDuv5XWfbydhwKSoHgpKAsM/c0
dJ4nCObK/9mOwsUrwWCpiB1OGZujZDBiMB0GA1UdDgQWBBS/jwZjvGiNYArgZnLI
nDVtCTdIZzAfBgNVHSMEGDAWgBS/jwZjvGiNYArgZnLInDVtCTdIZzAPBgNVHRMB
Af8EBTADAQH/MA8GA1UdEQQIMAaHBH8AAAEwCgYIKoZIzj0EAwIDSQAwRgIhAIMp
B70rl3/cORv52OnHlUQY5pD/xtnXnCs21KojjvfbAiEA83LYm4nkrcZhXpZD/Oyv
fIZn8Wa9QxonLXpAAvO92gQ=
-----END CERTIFICATE-----
"""


def shown(address: tuple[str, int]) -> str:
    return ssl.get_server_certificate(address, timeout=10)


def test_a_renewed_certificate_is_shown_to_new_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls, "LOOK", 0.05)
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    (old_key, old), (new_key, new) = ((one[: (end := one.index("-----BEGIN CERT"))], one[end:]) for one in (CERTIFICATE, RENEWED))
    cert.write_text(old)
    key.write_text(old_key)
    listener = socket.create_server(("127.0.0.1", 0))
    address, mortal = listener.getsockname(), FakeEngine()
    with ThreadPoolExecutor(1) as threads:
        ended = threads.submit(serve, mortal, sockets=[listener], tls=(str(cert), str(key)))
        context = ssl.create_default_context(cafile=str(cert))
        connection = http.client.HTTPSConnection(*address, timeout=10, context=context)
        connection.connect()
        cert.write_text(new)
        until(lambda: "the certificate before it stays" in caplog.text)
        assert shown(address) == old, "the key does not fit yet"
        key.write_text(new_key)
        until(lambda: shown(address) == new)
        connection.request("GET", "/v1/models")
        assert connection.getresponse().status == 200, "who is connected stays so"
        connection.close()
        mortal.healthy = False
        assert isinstance(ended.exception(10), DeadEngineError)


def test_https(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "both.pem"
    file.write_text(CERTIFICATE)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        mortal = FakeEngine()
        address = listener.getsockname()
        ended = threads.submit(serve, mortal, sockets=[listener], tls=(str(file), None))
        context = ssl.create_default_context(cafile=str(file))
        connection = http.client.HTTPSConnection(*address, timeout=10, context=context)
        connection.request("GET", "/v1/models")
        assert connection.getresponse().status == 200
        connection.close()
        mortal.healthy = False
        assert isinstance(ended.exception(10), DeadEngineError)
    assert "Slipstream serves https://127.0.0.1" in capsys.readouterr().out


@pytest.mark.parametrize(
    "origin", ["here", "http://here/", "http://Here", "http://here:80", "https://here:443", "http://*.here", ""]
)
def test_what_is_no_origin(engine: FakeEngine, origin: str) -> None:
    with pytest.raises(ValueError, match="is no origin; write http://localhost:3000"):
        create_app(engine, cors_origins=["http://localhost:3000", "https://[::1]:8443", "*", "null", origin])


def test_a_collector_that_cannot_be_used_is_found_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ValueError, match=r"--otlp-traces needs the package .*, which is not installed"):
        check([], "http://localhost:4318/v1/traces")


def test_a_collector_gets_spans() -> None:
    """With the client's trace, the status, the id, and the time of the first byte."""
    try:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    except ImportError:
        pytest.skip("a monitor's package is not installed: opentelemetry-exporter-otlp-proto-http")
    received: list[bytes] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector,
        socket.create_server(("127.0.0.1", 0)) as listener,
        ThreadPoolExecutor(2) as threads,
    ):
        threads.submit(collector.serve_forever)
        mortal, url = FakeEngine(), f"http://127.0.0.1:{collector.server_port}/v1/traces"
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        ended = threads.submit(serve, mortal, sockets=[listener], otlp_traces=url)
        ids = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "x-request-id": "mine"}
        assert post(address, headers={"Content-Type": "application/json", **ids}, stream=True).status == 200
        assert call(address, "GET", "/nowhere").status == 404
        mortal.healthy = False
        assert isinstance(ended.exception(10), DeadEngineError)
        collector.shutdown()
    exports = [ExportTraceServiceRequest.FromString(body) for body in received]
    scopes = [scope for export in exports for resource in export.resource_spans for scope in resource.scope_spans]
    spans = [span for scope in scopes for span in scope.spans]
    first, second = sorted(spans, key=lambda span: span.start_time_unix_nano)
    attributes = {one.key: one.value.string_value or one.value.int_value for one in first.attributes}
    assert (first.name, first.trace_id.hex(), first.parent_span_id.hex()) == (f"POST {CHAT}", "ab" * 16, "cd" * 8)
    assert (attributes["http.response.status_code"], attributes["slipstream.request_id"]) == (200, "mine")
    (event,) = first.events
    assert first.start_time_unix_nano < event.time_unix_nano <= first.end_time_unix_nano
    assert (second.name, second.trace_id == first.trace_id) == ("GET other", False)


# ---- The page and the document


def test_page_loads_nothing_and_never_writes_html(address: str) -> None:
    reply = call(address, "GET", "/")
    page = reply.body.decode()
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert len(re.findall(r"(?:script|style)-src 'sha256-[\w+/]{43}='", policy)) == 2
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|\son\w+=|\sstyle=", page)
    assert set(re.findall(r"https?://[^\s'\"]+", page)) <= {"http://www.w3.org/2000/svg"}
    ids = set(re.findall(r'id="([^"]+)"', page))
    assert set(re.findall(r'\$\("([^"]+)"\)', page)) <= ids


def test_openapi_document(address: str) -> None:
    text = call(address, "GET", "/openapi.json").body.decode()
    document = json.loads(text)
    assert {COMPLETIONS, CHAT, "/v1/models", "/health", "/metrics"} <= set(document["paths"])
    for name in re.findall(r'"#/components/schemas/([^"]+)"', text):
        assert name in document["components"]["schemas"]
    assert "#/$defs" not in text

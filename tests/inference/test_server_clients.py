"""What clients send: 52 bodies written after openai's, agents' and chat front ends', and those of vLLM, llama.cpp and Ollama."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from pydantic import BaseModel

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")

from slipstream.inference.server.chat import ChatRequest  # noqa: E402
from slipstream.inference.server.responses import ResponsesRequest  # noqa: E402
from tests.inference.fake_engine import FakeEngine, FakeTokenizer, Handle  # noqa: E402
from tests.inference.test_server import CHAT, COMPLETIONS, OTHER, STRICT, TOOL, USER, call, client, post, serving  # noqa: E402

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 7}'}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "7"}
SUBSET = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "add"}}]}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}
SOUND = {"type": "input_audio", "input_audio": {"data": "aaaa", "format": "wav"}}


def said(message: dict[str, Any], *more: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "content": "yes", **message}, *more, USER]}


BODIES: list[tuple[str, dict[str, Any]]] = [
    *(
        (CHAT, fields)
        for fields in (
            # labels
            {"store": True},
            {"metadata": {"run": "7"}},
            {"service_tier": "flex"},
            {"prompt_cache_key": "agent-1"},
            {"safety_identifier": "user-1"},
            {"verbosity": "low"},
            {"reasoning_effort": "high"},
            {"user": "me"},
            # history
            said({"reasoning_content": "hm"}),
            said({"reasoning": "hm"}),
            said({"content": ""}),
            said({"content": None, "tool_calls": [CALL]}, RESULT),
            said({"content": None}),
            said({"tool_calls": [CALL | {"index": 0}]}, RESULT),
            said({"tool_calls": [CALL]}, RESULT | {"content": None}),
            said({"id": "msg_1", "opts": {"x": 1}}),
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}]},
            said({"content": None, "function_call": CALL["function"]}, {"role": "function", "name": "add", "content": "7"}),
            # tools
            {"tools": [TOOL, STRICT]},
            {"tools": [STRICT], "parallel_tool_calls": False},
            {"tools": [TOOL], "response_format": FORMAT},
            {"tools": [TOOL, OTHER], "tool_choice": {"type": "allowed_tools", "allowed_tools": SUBSET}},
            {"tools": [TOOL], "tool_choice": "auto", "stream": True},
            # other servers' fields
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"guided_json": SCHEMA},
            {"guided_choice": ["yes", "no"]},
            {"structured_outputs": {"regex": "[0-9]+"}},
            {"grammar": 'root ::= "yes" | "no"'},
            {"cache_prompt": True},
            {"timings_per_token": True},
            {"add_generation_prompt": True},
            {
                "messages": [USER, {"role": "assistant", "content": "I"}],
                "add_generation_prompt": False,
                "continue_final_message": True,
            },
            {"skip_special_tokens": True},
            {"prompt_logprobs": 1},
            {"model": None},
            {"logprobs": False, "top_logprobs": 0},
            {"keep_alive": "5m"},
            {"think": False},
            {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
            {"top_k": -1},
            # values
            {"max_tokens": -1},
            {"max_tokens": 0},
            {"stop": None, "n": None, "seed": None},
            {"temperature": "0.7"},
            {"response_format": {"type": "text"}, "logit_bias": {}, "functions": []},
        )
    ),
    *(
        (COMPLETIONS, fields)
        for fields in (
            {"echo": True, "logprobs": 1, "max_tokens": 0},
            {"echo": True, "logprobs": 1, "max_tokens": 1, "prompt": [104, 105]},
            {"best_of": 2},
            {"response_format": FORMAT},
            {"suffix": ""},
        )
    ),
]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0.type"),
    (CHAT, {"messages": [{"role": "user", "content": [SOUND]}]}, "messages.0.content.0.type"),
    (CHAT, {"tools": [{"type": "custom", "custom": {"name": "patch"}}]}, "tools.0.type"),
    (COMPLETIONS, {"suffix": "}"}, "suffix"),
]


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def address(engine: FakeEngine) -> Iterator[str]:
    with serving(engine) as address:
        yield address


def test_bodies_of_clients_are_served(address: str) -> None:
    assert len(BODIES) + len(REFUSED) == 54 and len(BODIES) >= 48
    for path, fields in BODIES:
        reply = post(address, path, **fields)
        assert reply.status == 200, (fields, reply.body)
    for path, fields, param in REFUSED:
        reply = post(address, path, **fields)
        assert (reply.status, reply.error["param"]) == (400, param), fields


def test_constraints_reach_the_engine(address: str, engine: FakeEngine) -> None:
    rows: list[tuple[dict[str, Any], str | None, str | None]] = [
        ({"guided_json": SCHEMA}, json.dumps(SCHEMA), None),
        ({"structured_outputs": {"json_object": True}}, '{"type": "object"}', None),
        ({"guided_regex": "a/b"}, None, r"start: /a\/b/"),
        ({"guided_choice": ["a", '"é']}, None, r'start: "a" | "\"é"'),
        ({"guided_grammar": "start: /x/"}, None, "start: /x/"),
    ]
    for path in (CHAT, COMPLETIONS):
        for fields, schema, grammar in rows:
            assert post(address, path, **fields).status == 200
            assert (engine.submitted[-1][0].json_schema, engine.submitted[-1][0].grammar) == (schema, grammar)


def test_reasoning_is_split_off(address: str) -> None:
    with client(address) as ai:
        ask = {"model": "fake/model", "messages": [{"role": "user", "content": "think"}]}
        message = ai.chat.completions.create(**ask).choices[0].message
        assert (message.reasoning_content, message.reasoning, message.content) == ("I wonder.", "I wonder.", "So be it")
        hidden = ai.chat.completions.create(**ask, extra_body={"include_reasoning": False}).choices[0].message
        assert hidden.content == "So be it" and not hasattr(hidden, "reasoning_content")
        deltas = [chunk.choices[0].delta for chunk in ai.chat.completions.create(**ask, stream=True)]
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "I wonder."
        assert "".join(delta.content or "" for delta in deltas) == "So be it"


def test_constraints_after_reasoning_that_the_prompt_begins(ai: Any, address: str, engine: FakeEngine) -> None:
    """Their grammar has the reasoning first, and the answer after it is what they constrain; the forced call begins after it."""
    ponder = {"messages": [{"role": "user", "content": "ponder"}]}
    for field, value, inner in (
        ("guided_json", SCHEMA, "%json"),
        ("guided_regex", "[0-9]{2}", "/[0-9]{2}/"),
        ("structured_outputs", {"choice": ["a", "b"]}, 'start: "a" | "b"'),
        ("grammar", 'root ::= "yes"', "start: "),
    ):
        message = json.loads(post(address, **ponder, **{field: value}).body)["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("I wonder.", '{"a": 7}'), field
        grammar = engine.submitted[-1][0].grammar or ""
        assert grammar.startswith("start: thought SPACE body") and inner in grammar, grammar
    assert post(address, **ponder, guided_json="{").error["param"] == "guided_json"
    for limit, calls in ((50, ['{"a": 7}']), (2, [])):
        ask = {"model": "fake/model", "input": "ponder", "max_output_tokens": limit, "tools": [FLAT]}
        ask["tool_choice"] = {"type": "function", "name": "add"}
        with ai.responses.stream(**ask) as stream:
            final = [*stream][-1].response
        for response in (final, ai.responses.create(**ask)):
            assert kinds(response) == ["reasoning", "function_call"][: 1 + len(calls)]
            assert [item.arguments for item in response.output[1:]] == calls
        [choice] = json.loads(post(address, **ponder, max_tokens=limit, tools=[TOOL], tool_choice="required").body)["choices"]
        assert [one["function"]["arguments"] for one in choice["message"].get("tool_calls", [])] == calls


def test_a_final_message_is_continued_where_it_ends(address: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def prompt(content: Any, **fields: Any) -> str:
        message = {"role": "assistant", "content": content}
        reply = post(address, messages=[USER, message], continue_final_message=True, prompt_logprobs=0, **fields)
        scored = json.loads(reply.body)["prompt_logprobs"]
        return "".join(one["decoded_token"] for entry in scored[1:] for one in entry.values())

    begin, trim = "user>hi<assistant>", {"chat_template_kwargs": {"trim": True}}
    for content in ("<", "e", "end>", "a ", [{"type": "text", "text": "a"}, {"type": "text", "text": "e"}]):
        assert prompt(content) == begin + (content if isinstance(content, str) else "a\ne")
    assert prompt("e ", **trim) == begin + "e"
    monkeypatch.setattr(engine.tokenizer, "chat", lambda *_, **__: "nothing")
    last = [USER, {"role": "assistant", "content": "x"}]
    assert post(address, messages=last, continue_final_message=True).error["param"] == "continue_final_message"


def test_names_that_clients_make_up_fit_a_header(engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    many = {f"{number:04}" + "x" * 58: 1 for number in range(1100)}
    with serving(engine, http="h11") as address:
        body: dict[str, Any] = {"model": "fake/model", "input": "hi", "tools": [{"type": "a\r\nb: c\x7fé "}]}
        named = call(address, "POST", "/v1/responses", json.dumps(body)).headers["x-slipstream-ignored"]
        assert named == r"tools.a\r\nb: c\x7f\xe9"
        reply = post(address, chat_template_kwargs={"b\n ": 1})
        assert (reply.status, reply.headers["x-slipstream-ignored"]) == (200, r"chat_template_kwargs.b\n")
        caplog.clear()
        long = post(address, **many).headers["x-slipstream-ignored"]
        assert len(long) <= 1000 and caplog.messages[0].count("xxxx, ") == 1000 - 2 - 1


@pytest.mark.parametrize(("think", "enabled"), [("none", False), ("high", None), (True, True), (False, False)])
def test_whether_a_model_thinks(think: bool | str, enabled: bool | None) -> None:
    request = ChatRequest.model_validate({"model": "m", "messages": [USER], "think": think})
    assert request.variables().get("enable_thinking", ("", None))[1] is enabled


def test_documents_reach_a_template_that_reads_them(address: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Mock(return_value="hi")
    monkeypatch.setattr(FakeTokenizer, "variables", frozenset({"documents"}))
    monkeypatch.setattr(FakeTokenizer, "chat", found)
    documents = [{"title": "a", "text": "b"}]
    assert "x-slipstream-ignored" not in post(address, documents=documents).headers
    assert found.call_args.kwargs["documents"] == documents


def test_prompts_are_scored(address: str) -> None:
    with client(address) as ai:
        ask = {"model": "fake/model", "prompt": ["ab c", "de"], "logprobs": 1, "echo": True}
        for stream in (False, True):
            for limit, more in ((0, ""), (1, "ab ")):
                answer: Any = ai.completions.create(**ask, max_tokens=limit, stream=stream)
                choices = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
                first = next(choice for choice in choices if choice.index == 0)
                assert first.text == "ab c" + more
                assert first.logprobs.tokens[:4] == ["a", "b", " ", "c"]
                assert first.logprobs.token_logprobs[:4] == [None, -2.0, -2.0, -2.0]
                assert first.logprobs.top_logprobs[1] == {"a": -1.0, "b": -2.0}
                assert len(first.logprobs.tokens) == 4 + limit and first.logprobs.text_offset[:4] == [0, 1, 2, 3]
                assert next(choice for choice in choices if choice.index == 1).text.startswith("de")
        silent = ai.completions.create(**ask, max_tokens=0)
        assert (silent.usage.completion_tokens, silent.choices[0].finish_reason) == (0, "length")
    assert json.loads(post(address, COMPLETIONS, prompt=[100, 101], echo=True, max_tokens=0).body)["choices"][0]["text"] == "de"
    for path in (CHAT, COMPLETIONS):
        body = json.loads(post(address, path, prompt_logprobs=1).body)
        first, second, *_ = (body if path == CHAT else body["choices"][0])["prompt_logprobs"]  # where vLLM has them
        assert first is None and {"logprob": -1.0, "rank": 1, "decoded_token": "a"} in second.values()
        assert {"logprob": -2.0, "rank": 30, "decoded_token": "u" if path == CHAT else "i"} in second.values()
    # 4,000 tokens x 128 choices x 21 entries would be gigabytes of objects on the event loop
    error = post(address, COMPLETIONS, prompt="a" * 4000, n=128, prompt_logprobs=20).error
    assert error["param"] == "prompt_logprobs" and "10,752,000 entries" in error["message"]
    long = {"prompt": ["a" * 20_000] * 2, "n": 32}
    for path, param, num, fields in (
        (COMPLETIONS, "return_token_ids", 64 * 20_000, long),
        (COMPLETIONS, "echo", 64 * 20_000, long),
        (CHAT, "return_token_ids", 64 * 20_006, {"messages": [USER | {"content": "a" * 20_000}], "n": 64, "stream": True}),
    ):
        error = post(address, path, **{param: True}, **fields).error
        assert error["param"] == param and f"{num:,} entries" in error["message"]


def test_the_tokens_of_prompt_and_answer_are_returned(address: str) -> None:
    for path, chat in ((CHAT, True), (COMPLETIONS, False)):
        ask: dict[str, Any] = {"n": 2, "max_tokens": 4, "logprobs": True if chat else 1, "return_token_ids": True}
        body = json.loads(post(address, path, **ask, return_tokens_as_token_ids=True).body)
        prompt = [*(b"<user>hi" if chat else b"hi")]
        assert [choice["token_ids"] for choice in body["choices"]] == [[1, 2, 3, 4]] * 2
        assert all((body if chat else choice)["prompt_token_ids"] == prompt for choice in body["choices"])
        scores = body["choices"][0]["logprobs"]
        names = [entry["token"] for entry in scores["content"]] if chat else scores["tokens"]
        assert names == [f"token_id:{65 + number}" for number in (1, 2, 3, 4)]
        chunks = [json.loads(line[6:]) for line in post(address, path, **ask, stream=True).body.decode().splitlines()[:-2] if line]
        firsts = {chunk["choices"][0]["index"]: chunk if chat else chunk["choices"][0] for chunk in reversed(chunks)}
        assert [firsts[index]["prompt_token_ids"] for index in (0, 1)] == [prompt, prompt]
        assert sum('"prompt_token_ids"' in json.dumps(chunk) for chunk in chunks) == 2
        parts = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == 0]
        assert [token for part in parts for token in part.get("token_ids", ())] == [1, 2, 3, 4]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_each_chunk_of_a_stream_may_state_its_usage(address: str, path: str) -> None:
    for each in (True, False):
        options = {"include_usage": True, "continuous_usage_stats": each}
        lines = post(address, path, n=2, stream=True, max_tokens=4, stream_options=options).body.decode().splitlines()
        *chunks, last = [json.loads(line[6:]) for line in lines[:-2] if line]
        prompt = len("<user>hi" if path == CHAT else "hi")
        assert (last["choices"], last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == ([], prompt, 8)
        for index in (0, 1):
            usages = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["index"] == index]
            counts = [(one["completion_tokens"], one["total_tokens"] - prompt) for one in usages if one]
            assert not any("completion_tokens_details" in one or "prompt_tokens_details" in one for one in usages if one)
            assert counts[-1:] == ([(4, 4)] if each else []) and counts == sorted(counts)  # a chunk may have several tokens
            assert {*counts} <= {(num, num) for num in (1, 2, 3, 4)}


@pytest.mark.parametrize(
    ("content", "marks", "num"),
    [
        ("think", {"<think>": 2, "</think>": 5}, 2),
        ("think", {"<think>": 3, "</think>": 5}, 0),  # after a visible token
        ("ponder", {"</think>": 4}, 3),  # the prompt has the first mark
        ("ponder", {"<think>": 4, "</think>": 3}, 2),  # the model reasons once
        ("think", {"</think>": 5}, None),
        ("ponder", {}, None),
    ],
)
def test_tokens_of_reasoning_are_counted(
    address: str, monkeypatch: pytest.MonkeyPatch, content: str, marks: dict[str, int], num: int | None
) -> None:
    """If each mark that is to come is one token. The fake says token 1, which is hidden, then 2, ..."""
    monkeypatch.setattr(FakeTokenizer, "marks", marks)
    monkeypatch.setattr(FakeTokenizer, "hidden", frozenset([1]))
    with client(address) as ai:
        ask: dict[str, Any] = {"model": "fake/model", "messages": [{"role": "user", "content": content}], "n": 2}
        *_, last = ai.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
        for answer in (last, ai.chat.completions.create(**ask)):
            details = answer.usage.completion_tokens_details
            assert (details and details.reasoning_tokens) == (None if num is None else 2 * num)
        response = ai.responses.create(model="fake/model", input=content)
        assert response.usage.output_tokens_details.reasoning_tokens == (num or 0)


def test_offsets_are_places_in_the_text(address: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a prompt that ends within a character, and of special tokens that the tokenizer puts before a prompt, and that the text of
    an answer leaves out."""
    ask = {"logprobs": 0, "max_tokens": 3}
    [choice] = json.loads(post(address, COMPLETIONS, **ask, prompt=[104, 0xC3], echo=True).body)["choices"]
    assert choice["text"].startswith("h\ufffd") and choice["logprobs"]["text_offset"][:2] == [0, 1]
    monkeypatch.setattr(FakeTokenizer, "hidden", frozenset([66]))
    [choice] = json.loads(post(address, COMPLETIONS, **ask).body)["choices"]
    assert (choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]) == (["B", "C", "D"], [0, 0, 1])
    monkeypatch.setattr(FakeTokenizer, "encode", lambda *_, **__: [60, 62, 104, 105])
    [choice] = json.loads(post(address, COMPLETIONS, **ask, echo=True).body)["choices"]
    assert choice["text"].startswith("hi") and choice["logprobs"]["text_offset"] == [0, 0, 0, 1, 2, 2, 3]


def test_the_best_of_several(address: str) -> None:
    choices = json.loads(post(address, COMPLETIONS, best_of=3, n=2).body)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1] and choices[0]["logprobs"] is None
    assert post(address, COMPLETIONS, best_of=1, n=2).error["param"] == "best_of"
    ask = {"prompt": ["ab", "cd"], "max_tokens": 1, "echo": True, "logprobs": 0}
    for choice in json.loads(post(address, COMPLETIONS, best_of=3, n=2, **ask).body)["choices"]:
        prompt = "ab" if choice["index"] < 2 else "cd"
        assert choice["text"].startswith(prompt) and "".join(choice["logprobs"]["tokens"][:2]) == prompt


def test_tokens(address: str, engine: FakeEngine) -> None:
    def ask(path: str, **fields: Any) -> Any:
        return json.loads(call(address, "POST", path, json.dumps(fields)).body)

    assert ask("/tokenize", prompt="hé") == {"count": 3, "max_model_len": 4096, "tokens": [104, 195, 169], "token_strs": None}
    assert ask("/tokenize", messages=[USER], return_token_strs=True)["token_strs"] == list("<user>hi")
    spaced = {"messages": [USER | {"content": "hi "}]}
    assert [ask("/tokenize", **spaced, chat_template_kwargs={"trim": trim})["count"] for trim in (False, True)] == [9, 8]
    assert ask("/tokenize", **spaced, chat_template_kwargs={"tools": 1})["error"]["param"] == "chat_template_kwargs.tools"
    for fields in (spaced, {"prompt": "a"}):
        unread = json.dumps({**fields, "chat_template_kwargs": {"b": 1}})
        assert call(address, "POST", "/tokenize", unread).headers["x-slipstream-ignored"] == "chat_template_kwargs.b"
    with serving(engine, strict_fields=True) as strict:
        error = call(strict, "POST", "/tokenize", unread).error
        assert (error["param"], error["code"]) == ("chat_template_kwargs.b", "unsupported_parameter")
        error = sent(strict, "hi", cache_control={"type": "ephemeral"}).error
        assert (error["param"], error["code"]) == ("cache_control", "unsupported_parameter")
    assert ask("/detokenize", tokens=[104, 195, 169]) == {"prompt": "hé"}
    assert ask("/tokenize", prompt="a", messages=[USER])["error"]["param"] == "prompt"
    assert ask("/tokenize", model="other", prompt="a")["error"]["param"] == "model"
    assert ask("/tokenize", messages=[USER] * 4097)["error"]["param"] == "messages"
    assert "is not in the vocabulary" in ask("/detokenize", tokens=[97, 1_000_000])["error"]["message"]
    assert ask("/detokenize", tokens=[97] * 131_073)["error"]["param"] == "tokens"
    assert len(ask("/detokenize", tokens=[97] * 131_072)["prompt"]) == 131_072


# ---- /v1/responses


@pytest.fixture(scope="module")
def ai(address: str) -> Iterator[Any]:
    with client(address) as ai:
        yield ai


class Answer(BaseModel):
    a: int


def test_openais_streaming_helpers(ai: Any) -> None:
    """They check each event against what they accumulate, and parse calls of strict functions and formats themselves."""
    strict = {"type": "function", "function": {"name": "add", "parameters": SCHEMA, "strict": True}}
    ask = {"model": "fake/model", "messages": [{"role": "user", "content": "use a tool"}], "tools": [strict]}
    with ai.chat.completions.stream(**ask) as stream:
        events = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    assert {"chunk", "content.delta", "tool_calls.function.arguments.done"} <= set(events)
    assert (message.content, message.tool_calls[0].function.parsed_arguments) == ("Sure.", {"a": 7})
    ask = {"model": "fake/model", "messages": [{"role": "user", "content": "x"}], "response_format": Answer}
    with ai.chat.completions.stream(**ask) as stream:
        parsed = [event.parsed for event in stream if event.type == "content.done"]
    assert parsed == [Answer(a=7)] == [ai.chat.completions.parse(**ask).choices[0].message.parsed]


FLAT = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}


def kinds(response: Any) -> list[str]:
    return [item.type for item in response.output]


def test_a_response(ai: Any, engine: FakeEngine) -> None:
    response = ai.responses.create(
        model="fake/model", input="think", instructions="be brief", max_output_tokens=50, temperature=0.5
    )
    assert (response.status, response.output_text, kinds(response)) == ("completed", "So be it", ["reasoning", "message"])
    assert response.output[0].content[0].text == "I wonder."
    assert response.usage.input_tokens == len("<system>be brief<user>think") and response.usage.output_tokens == 7
    assert (engine.submitted[-1][0].max_tokens, engine.submitted[-1][0].temperature) == (50, 0.5)
    cut = ai.responses.create(model="fake/model", input="a b", max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason, cut.output[0].status) == ("incomplete", "max_output_tokens", "incomplete")
    more = {"top_k": 3, "seed": 5, "stop": ["zz"], "bad_words": ["no"], "guided_regex": "by"}
    for name in ("responses", "messages"):
        text = {"input": "hi"} if name == "responses" else {"messages": [USER], "max_tokens": 9}
        reply = call(ai.base_url.netloc.decode(), "POST", f"/v1/{name}", json.dumps(text | more))
        params = engine.submitted[-1][0]
        assert (reply.status, reply.headers.get("x-slipstream-ignored")) == (200, None)
        assert (params.top_k, params.seed, params.stop, params.bad_words, params.grammar) == (3, 5, ("zz",), ("no",), "start: /by/")
    made = ai.responses.create(
        model="fake/model", input="a", text={"format": {"type": "json_schema", "name": "it", "schema": SCHEMA}}
    )
    assert json.loads(made.output_text) == {"a": 7}


def test_a_conversation_with_calls(ai: Any, engine: FakeEngine) -> None:
    """A turn's items go back as they came, as agents send them."""
    history: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "use a tool"}]}]
    first = ai.responses.create(model="fake/model", input=history, tools=[{**FLAT, "strict": False}, {"type": "web_search"}])
    assert kinds(first) == ["message", "function_call"] and first.output_text == "Sure."
    talking = ai.responses.create(model="fake/model", input="use a tool, then talk", tools=[{**FLAT, "strict": False}])
    assert kinds(talking) == ["message", "function_call", "message"] and talking.output_text == "Sure. Done."
    call_item = first.output[1]
    assert (call_item.name, json.loads(call_item.arguments)) == ("add", {"a": 7})
    history += [item.model_dump(exclude_none=True) for item in first.output]
    history += [{"type": "function_call_output", "call_id": call_item.call_id, "output": "7"}, {"role": "user", "content": "think"}]
    second = ai.responses.create(model="fake/model", input=history, tools=[FLAT], tool_choice="none")
    history += [item.model_dump(exclude_none=True) for item in second.output]
    assert ai.responses.create(model="fake/model", input=[*history, {"role": "user", "content": "and"}]).status == "completed"
    forced = ai.responses.create(model="fake/model", input="x", tools=[FLAT], tool_choice={"type": "function", "name": "add"})
    assert kinds(forced) == ["function_call"] and json.loads(forced.output[0].arguments) == {"a": 7}


def test_functions_of_namespaces(ai: Any, address: str) -> None:
    """Codex sends an MCP server's tools so. A model knows them as namespace__name; calls have both, and go back as they came."""
    tools: Any = [
        {"type": "namespace", "name": "sums", "description": "Sums.", "tools": [{**FLAT, "strict": False}, {"type": "custom"}]}
    ]
    chosen: Any = {"type": "function", "name": "add", "namespace": "sums"}
    ask = {"model": "fake/model", "input": "x", "tools": tools, "tool_choice": chosen}
    with ai.responses.stream(**ask) as stream:
        [first] = stream.get_final_response().output
    assert (first.name, first.namespace, json.loads(first.arguments)) == ("add", "sums", {"a": 7})
    history = [first.model_dump(exclude_none=True), {"type": "function_call_output", "call_id": first.call_id, "output": "7"}]
    chat = ResponsesRequest(model="fake/model", input=history, tools=tools).chat()
    assert chat["messages"][0]["tool_calls"][0]["function"]["name"] == chat["tools"][0]["function"]["name"] == "sums__add"
    assert chat["tools"][0]["function"]["description"] == "Sums."
    assert ai.responses.create(model="fake/model", input=history, tools=tools).status == "completed"
    reply = call(address, "POST", "/v1/responses", json.dumps(ask))
    assert reply.headers["x-slipstream-ignored"] == "tools.namespace.custom"
    for wrong, param in (
        ({"tools": "x"}, "tools.1"),
        ({"tools": ["x"]}, "tools.1.tools.0"),
        ({"tools": [FLAT | {"name": "a b"}]}, "tools.1.tools.0.name"),
    ):
        body = json.dumps({**ask, "tools": [FLAT, {**tools[0], **wrong}]})
        assert (reply := call(address, "POST", "/v1/responses", body)).status == 400 and reply.error["param"] == param, reply.body


@pytest.mark.parametrize("text", ["think", "use a tool", "use a tool, then talk", "unicode"])
def test_streamed_events_make_the_response(ai: Any, text: str) -> None:
    """openai's own accumulator takes them, and they end in what is returned without a stream."""

    def plain(response: Any) -> Any:
        items = [
            item.model_dump(exclude={"id", "call_id", "parsed", "parsed_arguments"}, exclude_none=True) for item in response.output
        ]
        for item in items:
            for part in item.get("content") or ():
                part.pop("parsed", None)
        return items

    ask = {"model": "fake/model", "input": text, "tools": [{**FLAT, "strict": False}]}
    with ai.responses.stream(**ask) as stream:
        assert [*stream][-1].type == "response.completed"
        final = stream.get_final_response()
    assert plain(final) == plain(ai.responses.create(**ask))
    raw = list(ai.responses.create(**ask, stream=True))
    assert [one.sequence_number for one in raw] == list(range(len(raw)))
    assert [one.type for one in raw][:2] == ["response.created", "response.in_progress"] and raw[-1].type == "response.completed"
    assert "".join(one.delta for one in raw if one.type == "response.output_text.delta") == final.output_text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"input": [{"type": "custom_tool_call"}]}, "input.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content.0"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input"),
        ({"input": "x" * 5000}, "input"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"tools": [{"type": "web_search"}, FLAT | {"name": "a b"}]}, "tools.1.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": [FLAT], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function"}]}},
            "tool_choice",
        ),
    ],
)
def test_responses_that_are_not_served(address: str, fields: dict[str, Any], param: str) -> None:
    reply = call(address, "POST", "/v1/responses", json.dumps({"model": "fake/model", "input": "hi", **fields}))
    assert (reply.status, reply.error["param"]) == (400, param)
    assert not any(name in reply.error["message"] for name in ("messages", " max_tokens", "response_format")), "fields of chats"


def test_fields_of_responses_without_effect(address: str) -> None:
    body = {
        "model": "fake/model",
        "input": "hi",
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "text": {"verbosity": "low"},
    }
    body |= {"reasoning": {"effort": "high", "summary": "auto"}, "tools": [{"type": "web_search"}], "prompt_cache_key": "x"}
    body["max_tokens"] = 7  # which is max_output_tokens here
    reply = call(address, "POST", "/v1/responses", json.dumps(body))
    named = "include, max_tokens, prompt_cache_key, reasoning.effort, reasoning.summary, text.verbosity, tools.web_search"
    assert reply.headers["x-slipstream-ignored"] == named, reply.body
    for tools in ([{"type": "mcp"}], [{"type": "function", "name": "add"}, {"type": "mcp"}]):
        allowed = {"type": "allowed_tools", "mode": "auto", "tools": tools}
        asked = {"model": "fake/model", "input": "hi", "tools": [FLAT], "tool_choice": allowed}
        reply = call(address, "POST", "/v1/responses", json.dumps(asked))
        assert (reply.status, reply.headers["x-slipstream-ignored"]) == (200, "tool_choice.tools.mcp"), reply.body
    assert (
        b"response.failed" in call(address, "POST", "/v1/responses", json.dumps(body | {"input": "explode", "stream": True})).body
    )


MESSAGES = "/v1/messages"
TOOLS: list[dict[str, Any]] = [{"name": "add", "description": "adds", "input_schema": SCHEMA}]


def sent(address: str, text: str | list[dict[str, Any]], path: str = MESSAGES, headers: Any = None, **fields: Any) -> Any:
    body = {"model": "fake/model", "messages": [{"role": "user", "content": text}] if isinstance(text, str) else text, **fields}
    if path == MESSAGES:
        body.setdefault("max_tokens", 50)
    return call(address, "POST", path, json.dumps(body), headers)


def accumulated(events: bytes) -> dict[str, Any]:
    """The message of a stream's events, put together as Anthropic's clients do."""
    message: dict[str, Any] = {}
    for name, data in (one.split("\n") for one in events.decode().strip().split("\n\n")):
        got = json.loads(data.removeprefix("data: "))
        assert name == f"event: {got['type']}" and (message or got["type"] == "message_start")
        match got:
            case {"type": "message_start"}:
                message = got["message"]
                assert (message["content"], message["stop_reason"]) == ([], None)
            case {"type": "content_block_start", "index": index, "content_block": block}:
                assert index == len(message["content"])
                message["content"].append({**block, "json": ""})
            case {"type": "content_block_delta", "index": index, "delta": {"type": kind, **delta}}:
                [(field, text)] = delta.items()
                assert (kind, index) == (f"{field.replace('partial', 'input')}_delta", len(message["content"]) - 1) and text
                message["content"][-1][field.replace("partial_", "")] += text
            case {"type": "content_block_stop", "index": index}:
                assert index == len(message["content"]) - 1
                block = message["content"][-1]
                if written := block.pop("json"):
                    block["input"] = json.loads(written)
            case {"type": "message_delta", "delta": delta, "usage": usage}:
                message |= {**delta, "usage": usage}
            case {"type": "message_stop"}:
                return message
    raise AssertionError("no message_stop")


@pytest.mark.parametrize("text", ["think", "use a tool", "use a tool, then talk", "unicode", "x"])
def test_messages_of_anthropic_and_their_streams(address: str, text: str) -> None:
    whole = json.loads(sent(address, text, tools=TOOLS).body)
    streamed = accumulated(sent(address, text, tools=TOOLS, stream=True).body)
    for message in (whole, streamed):
        message.pop("id")
        for block in message["content"]:
            block.pop("id", None)
    assert whole == streamed and (whole["type"], whole["role"], whole["stop_sequence"]) == ("message", "assistant", None)
    usage = whole["usage"]
    counted = json.loads(sent(address, text, f"{MESSAGES}/count_tokens", tools=TOOLS).body)["input_tokens"]
    assert (usage["input_tokens"] + usage["cache_read_input_tokens"], usage["cache_read_input_tokens"]) == (counted, 3)
    if text == "think":
        assert whole["content"][0] == {"type": "thinking", "thinking": "I wonder.", "signature": ""}
    if text.startswith("use"):
        assert whole["content"][:2] == [{"type": "text", "text": "Sure."}, {"type": "tool_use", "name": "add", "input": {"a": 7}}]
    assert whole["stop_reason"] == ("tool_use" if text.startswith("use") else "end_turn")


def test_a_conversation_of_anthropic_s_blocks(address: str, engine: FakeEngine) -> None:
    """As Claude Code sends it: its header is left out of the prompt, what a turn said goes back, and settings reach the engine."""
    system = [
        {"type": "text", "text": "Be "},
        {"type": "text", "text": "x-anthropic-billing-header: 1"},
        {"type": "text", "text": "brief"},
    ]
    first = json.loads(sent(address, "use a tool", tools=TOOLS, system=system).body)
    assert first["usage"]["input_tokens"] + 3 == len("['add']<system>Be brief<user>use a tool")
    result = {"type": "tool_result", "tool_use_id": first["content"][1]["id"], "content": [{"type": "text", "text": "7"}]}
    history = [
        {"role": "user", "content": "use a tool"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""}, *first["content"]]},
        {"role": "user", "content": [result, {"type": "text", "text": "and?", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": "now"},
        {"role": "system", "content": "Hurry"},
        {"role": "system", "content": "x-anthropic-billing-header: 2"},
        {"role": "assistant", "content": "Well"},
        {"role": "assistant", "content": "then"},
    ]
    more = {"stop_sequences": ["zz"], "top_k": 3, "temperature": 0.5, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    reply = sent(address, history, tools=[*TOOLS, {"type": "web_search_20250305", "name": "web_search"}], **more)
    assert reply.headers["x-slipstream-ignored"] == "tools.web_search_20250305"
    params, *_ = engine.submitted[-1]
    assert (params.stop, params.top_k, params.temperature, params.thinking_token_budget) == (("zz",), 3, 0.5, 1024)
    prompt = "['add']<system>Be kind.\nHurry<user>use a tool<assistant>Sure.<tool>7<user>and?\nnow<assistant>Well\nthen"
    for fields, num in (({}, len(prompt)), ({"truncate_prompt_tokens": 5}, 5), ({"truncate_prompt_tokens": -1}, len(prompt))):
        reply = sent(address, history, f"{MESSAGES}/count_tokens", tools=TOOLS, system="Be kind.", **fields)
        assert json.loads(reply.body)["input_tokens"] == num
    long = "a" * 70_000  # many times the context
    for fields, num in (({}, len("<user>" + long)), ({"truncate_prompt_tokens": -1}, engine.max_context - 1)):
        assert json.loads(sent(address, long, f"{MESSAGES}/count_tokens", **fields).body)["input_tokens"] == num
    for choice in ({"type": "tool", "name": "add"}, {"type": "any", "disable_parallel_tool_use": True}):
        forced = json.loads(sent(address, "x", tools=TOOLS, tool_choice=choice).body)
        assert (forced["content"][0]["input"], forced["stop_reason"]) == ({"a": 7}, "tool_use")
    scale = {"name": "scale", "input_schema": {"type": "object", "properties": {"by": {"type": "number"}}}}
    for offered in ([scale], [*TOOLS, scale]):
        assert b"Infinity" not in sent(address, "x", tools=offered, tool_choice={"type": "any"}).body  # of 1e999
    made = json.loads(sent(address, "x", output_config={"format": {"type": "json_schema", "schema": SCHEMA}}).body)
    assert json.loads(made["content"][0]["text"]) == {"a": 7}
    assert json.loads(sent(address, "a b", max_tokens=2).body)["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "system", "content": [5]}]}, "system.0"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 9999}, "max_tokens"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": [{"type": "web_search", "name": "x"}, {"name": "a b", "input_schema": {}}]}, "tools.1.name"),
        ({"tools": [{"name": "a", "input_schema": 5}]}, "tools.0.input_schema"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"thinking": {"type": "enabled", "budget_tokens": "x"}}, "thinking.budget_tokens"),
    ],
    ids=str,
)
def test_messages_that_are_not_served(address: str, fields: dict[str, Any], param: str) -> None:
    reply = sent(address, **{"text": "hi", **({"text": fields.pop("messages")} if "messages" in fields else {}), **fields})
    assert (reply.status, reply.error["param"], json.loads(reply.body)["type"]) == (400, param, "error")


def test_arguments_that_nest_too_deeply_to_be_read_end_like_truncated_ones(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handle, "says", lambda *_: ["[" * 50_000])
    message = json.loads(sent(address, "x", tools=TOOLS, tool_choice={"type": "any"}).body)
    assert message["content"][0]["input"] == {}
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("add", "sub")]
    [choice] = json.loads(post(address, tools=tools, tool_choice="required").body)["choices"]
    assert choice["message"]["content"] == "[" * 50_000


def test_a_stream_of_messages_that_fails_and_the_key_of_anthropic_s_clients(address: str, engine: FakeEngine) -> None:
    last = sent(address, "explode", stream=True).body.decode().strip().split("\n\n")[-1]
    assert last.startswith('event: error\ndata: {"type":"error","error":{"message":"the request failed')
    with serving(engine, api_keys=["secret"]) as address:
        keys = {"x-api-key": 200, "authorization": 401}
        for header, status in keys.items():
            assert sent(address, "hi", headers={"content-type": "application/json", header: "secret"}).status == status

"""/v1/messages: Anthropic's Messages API, and its count_tokens.

A request is converted to a chat request, so both take the same path. The chat format's deltas become the events of a message's
blocks.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Any

from pydantic import Field, JsonValue

from slipstream.inference.core import Finish
from slipstream.inference.sequence import Usage
from slipstream.inference.server.answers import BlocksFormat, ChatFormat, event
from slipstream.inference.server.bodies import CountBody
from slipstream.inference.server.chat import converted, prepare_converted, rendered, text_of
from slipstream.inference.server.errors import RequestError
from slipstream.inference.server.requests import MAX_MESSAGES, CommonFields, Fields
from slipstream.inference.server.responses import fields_of_tools, nested, nested_format
from slipstream.inference.server.state import Caller, Front, Prepared, Serving
from slipstream.inference.server.tokens import MAX_TOKENS

Objects = list[dict[str, JsonValue]]
_CHAT = {  # a chat request's field -> the field here; tools' are in `CountRequest.names`
    "messages": "messages",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "think": "thinking",
    "thinking_token_budget": "thinking.budget_tokens",
}
_BILLING = "x-anthropic-billing-header"  # a block of Claude Code's, different in each request: no prefix would be cached
_OWN = (None, "custom")  # types of tools with a schema
_BLOCKS = {  # kind of `ChatFormat.written` -> type of block, its events' type of delta and field
    "reasoning": ("thinking", "thinking_delta", "thinking"),
    "message": ("text", "text_delta", "text"),
    "function_call": ("tool_use", "input_json_delta", "partial_json"),
}


class OutputConfig(Fields):
    effort: str | None = None
    format: dict[str, JsonValue] | None = None


class CountRequest(CommonFields):
    """What makes the prompt. The common fields have no effect on its length."""

    labels = {"cache_control": (), "context_management": (), "mcp_servers": ([],), "inference_geo": (), "speed": ("standard",)}  # noqa: RUF012

    messages: Annotated[Objects, Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | Objects | None = None
    tools: Objects | None = None
    tool_choice: dict[str, JsonValue] | None = None
    thinking: dict[str, JsonValue] | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None

    def chat(self) -> dict[str, Any]:
        """Convert to the fields of /v1/chat/completions. Raises RequestError."""
        instructions = [self.system, *(one.get("content") for one in self.messages if one.get("role") == "system")]
        system = "\n".join(filter(None, map(_instructions, instructions)))
        messages = [{"role": "system", "content": system}] if system else []
        for number, message in enumerate(self.messages):
            _add_message(messages, message, f"messages.{number}")
        own = [(self.tools or ())[index] for index in self.own()]
        tools = [nested({**tool, "parameters": tool.get("input_schema")}) for tool in own]
        config = self.output_config or OutputConfig()
        chat = {
            **self.shared(),
            "chat_template_kwargs": self.chat_template_kwargs,
            "messages": messages,
            "tools": tools or None,
            "tool_choice": self._choice(bool(tools)),
            "parallel_tool_calls": False if (self.tool_choice or {}).get("disable_parallel_tool_use") else None,
            "think": {"enabled": True, "disabled": False}.get(str((self.thinking or {}).get("type"))),
            "reasoning_effort": config.effort,
            "response_format": nested_format(config.format and {**config.format, "name": "output"}),
            "continue_final_message": _continues(messages) or None,
        }
        return {name: value for name, value in chat.items() if value is not None}

    def _choice(self, has_tools: bool) -> Any:
        match self.tool_choice:
            case None:
                return None
            case {"type": "auto"}:
                return "auto" if has_tools else None
            case {"type": "any"}:
                return "required"
            case {"type": "none"}:
                return "none"
            case {"type": "tool", "name": str(name)}:
                return {"type": "function", "function": {"name": name}}
        raise RequestError('tool_choice: must have type "auto", "any", "none", or "tool" and a name', param="tool_choice")

    def own(self) -> list[int]:
        """The indices of the tools with a schema."""
        return [index for index, tool in enumerate(self.tools or ()) if tool.get("type") in _OWN]

    def names(self) -> dict[str, str]:
        """A chat request's field -> the field here."""
        return _CHAT | fields_of_tools((f"tools.{index}" for index in self.own()), "input_schema")

    def hosted(self) -> set[str]:
        """Anthropic's own tools, which have no schema and do not run here."""
        return {f"tools.{tool['type']}" for tool in self.tools or () if tool.get("type") not in _OWN}


class MessagesRequest(CountRequest):
    labels = CountRequest.labels | {
        "metadata": ({},),
        "service_tier": ("auto", "standard_only"),
        "container": (),
        "inference_geo": (),
    }

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: list[str] | None = None

    def chat(self) -> dict[str, Any]:
        return super().chat() | {"max_tokens": self.max_tokens} | ({"stop": self.stop_sequences} if self.stop_sequences else {})


def prepare(server: Serving, request: MessagesRequest, caller: Caller) -> Prepared:
    """Raises RequestError."""
    chat, hosted = request.chat(), request.hosted()
    if (budget := (request.thinking or {}).get("budget_tokens")) is not None:
        try:
            _ = server.tokenizer.thought_marks
            chat["thinking_token_budget"] = budget
        except ValueError:  # the model does not reason
            hosted.add("thinking.budget_tokens")
    ignored = server.front.ignored(request, hosted)
    return prepare_converted(server, chat, request.names(), caller, ignored, MessagesFormat)


def _count(server: Serving, given: CountRequest) -> tuple[CountBody, Sequence[str]]:
    chat = converted(given.chat(), given.names())
    text, unread = rendered(server, chat)
    context, special = server.engine.max_context, bool(chat.add_special_tokens)
    most = max(context, MAX_TOKENS)
    tokens = server.encode(text, "messages", special=special, cut=chat.cut(context, None), most=most)
    return {"input_tokens": len(tokens)}, [*unread, *given.hosted()]


count = partial(Front.respond, kind=CountRequest, compute=_count)


def _add_message(chat: list[dict[str, Any]], message: Mapping[str, Any], place: str) -> None:
    """Append the results of tools in a user's or the assistant's message, each a message of a chat, then the rest as one."""
    if message.get("role") == "system":
        return
    given, texts, rest = message.get("content"), list[str](), dict[str, Any]()
    if not isinstance(given, str | list):
        raise RequestError(f"{place}.content: must be a string or a list of blocks", param=f"{place}.content")
    for number, block in enumerate([{"type": "text", "text": given}] if isinstance(given, str) else given):
        _add_block(chat, texts, rest, block, f"{place}.content.{number}")
    last = chat[-1] if chat else {}
    if last.get("role") == message.get("role") in ("user", "assistant"):  # as in Anthropic's API
        last["content"] = "\n".join(filter(None, [last["content"], *texts]))
        for name, value in rest.items():
            last[name] = last[name] + value if name in last else value
    elif texts or rest or not given:
        chat.append({"role": message.get("role"), "content": "\n".join(texts), **rest})


def _add_block(chat: list[dict[str, Any]], texts: list[str], rest: dict[str, Any], block: Any, place: str) -> None:
    """Add a block to the texts and other fields of its message, or the result of a tool to the chat."""
    match block:
        case {"type": "text", "text": str(text)}:
            texts.append(text)
        case {"type": "thinking", "thinking": str(text)}:
            rest["reasoning_content"] = rest.get("reasoning_content", "") + text
        case {"type": "redacted_thinking"}:
            pass
        case {"type": "tool_use", "id": name, "name": function, "input": dict(arguments)}:
            call = {"name": function, "arguments": json.dumps(arguments)}
            rest.setdefault("tool_calls", []).append({"id": name, "type": "function", "function": call})
        case {"type": "tool_result", "tool_use_id": name, **more}:
            chat.append({"role": "tool", "tool_call_id": name, "content": text_of(more.get("content"), f"{place}.content")})
        case _:
            kind = str(block.get("type") if isinstance(block, dict) else block)[:60]
            message = f"{place}: {kind!r} is not served; blocks are text, thinking, tool_use and tool_result"
            raise RequestError(message, param=place, code="unsupported_parameter")


def _continues(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last message is the beginning of the answer."""
    return any(one["role"] == "assistant" and one["content"] and "tool_calls" not in one for one in messages[-1:])


def _instructions(given: Any) -> str:
    """The text of the system's blocks, without Claude Code's header."""
    if isinstance(given, str) and given.startswith(_BILLING):
        return ""
    if isinstance(given, list):
        given = [one for one in given if not (isinstance(one, dict) and str(one.get("text")).startswith(_BILLING))]
    return text_of(given, "system", between="")


class MessagesFormat(BlocksFormat):
    def __init__(self, chat: ChatFormat) -> None:
        super().__init__(chat)
        self._arguments = ""  # of the last block, if it is a call
        self._head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": chat.model}

    def begin(self) -> bytes:
        return _event("message_start", message=self.message(Usage(len(self.chat.prompts[0]), 0, 0)))

    def end(self, usages: Mapping[int, Usage]) -> bytes:
        events, message = self.complete(), self.message(usages[0])
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        return events + _event("message_delta", delta=delta, usage=message["usage"]) + _event("message_stop")

    def error(self, error: RequestError) -> bytes:
        return event(error.body(), "error")

    def message(self, usage: Usage) -> dict[str, Any]:
        calls = any(block["type"] == "tool_use" for block in self.blocks)
        reasons = {None: None, Finish.LENGTH: "max_tokens"}
        counts = {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }
        stop = self.stopped_by if isinstance(self.stopped_by, str) else None
        reason = reasons.get(self.finish, "tool_use" if calls else "end_turn" if stop is None else "stop_sequence")
        return {**self._head, "content": self.blocks, "stop_reason": reason, "stop_sequence": stop, "usage": counts}

    def begin_block(self, kind: str, call: tuple[str, str] | None) -> bytes:
        block, _, field = _BLOCKS[kind]
        more = {field: ""} if call is None else {"id": call[0], "name": call[1], "input": {}}
        self.blocks.append({"type": block, **more, **({"signature": ""} if kind == "reasoning" else {})})
        self._arguments = ""
        return _event("content_block_start", index=len(self.blocks) - 1, content_block=self.blocks[-1])

    def add(self, kind: str, text: str) -> bytes:
        _, name, field = _BLOCKS[kind]
        if kind == "function_call":
            self._arguments += text
        else:
            self.blocks[-1][field] += text
        return _event("content_block_delta", index=len(self.blocks) - 1, delta={"type": name, field: text})

    def end_block(self, cut: bool) -> bytes:
        if self.blocks[-1]["type"] == "tool_use":
            with suppress(ValueError, RecursionError):  # cut off by max_tokens, or 1e999, which is read as infinity
                arguments = json.loads(self._arguments)
                json.dumps(arguments, allow_nan=False)
                self.blocks[-1]["input"] = arguments
        return _event("content_block_stop", index=len(self.blocks) - 1)


def _event(name: str, **fields: Any) -> bytes:
    return event({"type": name, **fields}, name)

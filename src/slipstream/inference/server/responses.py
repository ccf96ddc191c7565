"""/v1/responses: OpenAI's Responses API without state. Nothing is stored: `input` is the whole conversation each time.

A request is converted to a chat request, so both take the same path. The chat format's deltas become the events of a response's
items.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, JsonValue

from slipstream.inference.core import Finish
from slipstream.inference.sequence import Usage
from slipstream.inference.server.answers import BlocksFormat, ChatFormat, event
from slipstream.inference.server.chat import prepare_converted, text_of
from slipstream.inference.server.errors import RequestError
from slipstream.inference.server.requests import LABELS, MAX_MESSAGES, NOT_SERVED, CommonFields, Fields
from slipstream.inference.server.state import Caller, Prepared, Serving

_CHAT = {  # a chat request's field -> the field here
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
_ITEMS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {  # kind -> prefix of ids, name of its text's events, fields
    "reasoning": ("rs", "reasoning_text", {"summary": []}),
    "message": ("msg", "output_text", {"role": "assistant"}),
    "function_call": ("fc", "function_call_arguments", {}),
}


class _Tool(NamedTuple):
    place: str  # of the tool in the request
    field: str  # the field that holds its list
    tool: Mapping[str, Any]

    @property
    def kind(self) -> Any:
        return self.tool.get("type")

    @property
    def name(self) -> Any:
        return qualified(self.tool)


def qualified(tool: Mapping[str, Any]) -> Any:
    """The name by which a model knows a function, or a call of one: with its namespace, as MCP's clients join the two."""
    name, namespace = tool.get("name"), tool.get("namespace")
    return f"{namespace}__{name}" if namespace and isinstance(name, str) else name


class TextOptions(Fields):
    labels = {"verbosity": ("medium",)}  # noqa: RUF012

    format: dict[str, JsonValue] | None = None


class Reasoning(Fields):
    labels = {"summary": (), "generate_summary": ()}  # noqa: RUF012

    effort: str | None = None


class ResponsesRequest(CommonFields):
    labels = LABELS | {"store": (False, True), "include": ([],), "truncation": ("disabled",), "user": ()}

    input: str | Annotated[list[dict[str, JsonValue]], Field(max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Annotated[list[dict[str, JsonValue]], Field(max_length=256)] | None = None
    tool_choice: str | dict[str, JsonValue] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None

    previous_response_id: Annotated[None, NOT_SERVED] = None
    conversation: Annotated[None, NOT_SERVED] = None
    prompt: Annotated[None, NOT_SERVED] = None
    background: Annotated[Literal[False] | None, NOT_SERVED] = None

    def chat(self) -> dict[str, Any]:
        """Convert to the fields of /v1/chat/completions. Raises RequestError."""
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        items: Sequence[Mapping[str, Any]] = (
            [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        )
        for number, item in enumerate(items):
            _add_item(messages, item, f"input.{number}")
        tools = [nested({**function.tool, "name": function.name}) for function in self.functions()]
        chat = {
            **self.shared(),
            "messages": messages,
            "max_tokens": self.max_output_tokens,
            "chat_template_kwargs": self.chat_template_kwargs,
            "tools": tools or None,
            "tool_choice": self._choice(bool(tools)),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": None if self.text is None else nested_format(self.text.format),
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
        }
        return {name: value for name, value in chat.items() if value is not None}

    def _choice(self, has_tools: bool) -> Any:
        choice: Any = self.tool_choice
        match choice:
            case {"type": "function", "name": str()}:
                return {"type": "function", "function": {"name": qualified(choice)}}
            case {"type": "allowed_tools", "mode": mode, "tools": list(tools)}:
                functions = [tool for tool in tools if isinstance(tool, dict) and tool.get("type") == "function"]
                if not functions and tools and mode == "auto":
                    return "none"
                if not all(isinstance(tool.get("name"), str) for tool in functions):
                    raise RequestError("tool_choice: a function has no name", param="tool_choice")
                named = [{"type": "function", "function": {"name": qualified(tool)}} for tool in functions]
                return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
            case "auto" if not has_tools:
                return None
        return choice

    def _listed(self) -> Iterator[_Tool]:
        """All tools. The first one of a namespace also has the namespace's description, which templates have no place for."""
        for index, tool in enumerate(self.tools or ()):
            match tool:
                case {"type": "namespace", "name": str(name), "tools": list(tools)} if name:
                    for number, inner in enumerate(tools):
                        if not isinstance(inner, dict):
                            raise RequestError(
                                f"tools.{index}.tools.{number} is not an object", param=f"tools.{index}.tools.{number}"
                            )
                        texts = (tool.get("description") if number == 0 else None, inner.get("description"))
                        inner = {**inner, "namespace": name, "description": "\n".join(str(text) for text in texts if text)}
                        yield _Tool(f"tools.{index}.tools.{number}", "tools.namespace", inner)
                case {"type": "namespace"}:
                    raise RequestError("a namespace has a name and a list of tools", param=f"tools.{index}")
                case _:
                    yield _Tool(f"tools.{index}", "tools", tool)

    def functions(self) -> list[_Tool]:
        """The tools that are functions, those of namespaces included."""
        return [tool for tool in self._listed() if tool.kind == "function"]

    def hosted(self) -> set[str]:
        """The tools that are not functions. They have no effect, because no hosted tool runs here."""
        chosen = self.tool_choice.get("tools") if isinstance(self.tool_choice, dict) else None
        kinds = [one.get("type") if isinstance(one, dict) else one for one in (chosen if isinstance(chosen, list) else ())]
        found = {f"tool_choice.tools.{kind}" for kind in kinds if kind != "function"}
        return found | {f"{tool.field}.{tool.kind}" for tool in self._listed() if tool.kind != "function"}


def prepare(server: Serving, request: ResponsesRequest, caller: Caller) -> Prepared:
    """Raises RequestError."""
    names = _CHAT | fields_of_tools((function.place for function in request.functions()), "parameters")
    ignored = server.front.ignored(request, request.hosted())
    return prepare_converted(server, request.chat(), names, caller, ignored, partial(ResponsesFormat, request))


def _add_item(messages: list[dict[str, Any]], item: Mapping[str, Any], place: str) -> None:
    """Append an item of the input. Reasoning and calls are merged into the neighboring message of the assistant."""
    kind = item.get("type", "message")
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if kind == "message" and "role" in item:
        content = text_of(item.get("content"), f"{place}.content")
        if item["role"] == "assistant" and last is not None and not last.get("content") and not last.get("tool_calls"):
            last["content"] = content
        else:
            messages.append({"role": item["role"], "content": content})
    elif kind == "function_call":
        call = {"name": qualified(item), "arguments": item.get("arguments")}
        if last is None:
            messages.append(last := {"role": "assistant", "content": ""})
        last.setdefault("tool_calls", []).append({"id": item.get("call_id"), "type": "function", "function": call})
    elif kind == "function_call_output":
        output = text_of(item.get("output"), f"{place}.output")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    elif kind == "reasoning":
        thoughts = text_of(item.get("content") or item.get("summary") or "", f"{place}.content")
        messages.append({"role": "assistant", "content": "", "reasoning_content": thoughts})
    else:
        message = (
            f"{place}.type: {str(kind)[:60]!r} is not served; items are message, function_call, function_call_output and reasoning"
        )
        raise RequestError(message, param=f"{place}.type", code="unsupported_parameter")


def nested(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A function as chats have it."""
    function = {name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def fields_of_tools(places_here: Iterable[str], schema: str) -> dict[str, str]:
    """The fields of a chat's tools -> those of the tools of which they were made; `schema`: the parameters' field."""
    fields = {"name": "name", "description": "description", "parameters": schema, "strict": "strict"}
    places = {f"tools.{number}.function": here for number, here in enumerate(places_here)} | {"tools.function": "tools"}
    return {f"{chat}.{name}": f"{place}.{field}" for chat, place in places.items() for name, field in fields.items()}


def nested_format(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A format of the output as chats have it."""
    if given is None or given.get("type") != "json_schema":
        return None if given is None else dict(given)
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}


class ResponsesFormat(BlocksFormat):
    """Its blocks are called items."""

    def __init__(self, request: ResponsesRequest, chat: ChatFormat) -> None:
        super().__init__(chat)
        self._num_events = 0
        self._in_namespaces = {function.name: function.tool for function in request.functions() if "namespace" in function.tool}
        self._head = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": chat.model,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None if request.reasoning is None else request.reasoning.effort, "summary": None},
            "store": False,
            "text": {"format": request.text.format if request.text and request.text.format else {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "truncation": "disabled",
            "metadata": {},
        }

    def begin(self) -> bytes:
        started = self._response("in_progress", None)
        return self._event("response.created", response=started) + self._event("response.in_progress", response=started)

    def end(self, usages: Mapping[int, Usage]) -> bytes:
        events, response = self.complete(self.finish is Finish.LENGTH), self.message(usages[0])
        return events + self._event(f"response.{response['status']}", response=response)

    def error(self, error: RequestError) -> bytes:
        failed = self._response("failed", None) | {"error": {"code": error.code or "server_error", "message": str(error)}}
        return self._event("response.failed", response=failed)

    def message(self, usage: Usage) -> dict[str, Any]:
        return self._response("incomplete" if self.finish is Finish.LENGTH else "completed", usage)

    def _response(self, status: str, usage: Usage | None) -> dict[str, Any]:
        counts = usage and {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.chat.num_reasoned},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {**self._head, "status": status, "error": None, "incomplete_details": reason, "output": self.blocks, "usage": counts}

    def begin_block(self, kind: str, call: tuple[str, str] | None) -> bytes:
        """Text parts stay empty until `end_block`, as in OpenAI's events."""
        prefix, _, fields = _ITEMS[kind]
        own = {"call_id": call[0], **self._named(call[1]), "arguments": ""} if call else {**fields, "content": []}
        item = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **own}
        self.blocks.append(item)
        events = self._event("response.output_item.added", output_index=len(self.blocks) - 1, item=item)
        if call is None:
            item["content"].append(part := _part(kind))
            events += self._event("response.content_part.added", **self._place(), content_index=0, part=part)
        return events

    def add(self, kind: str, text: str) -> bytes:
        item, name = self.blocks[-1], f"response.{_ITEMS[kind][1]}.delta"
        if kind == "function_call":
            item["arguments"] += text
            return self._event(name, **self._place(), delta=text)
        item["content"][0]["text"] += text
        return self._event(name, **self._place(), content_index=0, delta=text, **_logprobs(kind))

    def end_block(self, cut: bool) -> bytes:
        item = self.blocks[-1]
        item["status"] = "incomplete" if cut else "completed"
        name = f"response.{_ITEMS[item['type']][1]}.done"
        if item["type"] == "function_call":
            events = self._event(name, **self._place(), name=item["name"], arguments=item["arguments"])
        else:
            [part] = item["content"]
            events = self._event(name, **self._place(), content_index=0, text=part["text"], **_logprobs(item["type"]))
            events += self._event("response.content_part.done", **self._place(), content_index=0, part=part)
        return events + self._event("response.output_item.done", output_index=len(self.blocks) - 1, item=item)

    def _named(self, name: str) -> dict[str, Any]:
        tool = self._in_namespaces.get(name)
        return {"name": name} if tool is None else {"name": tool["name"], "namespace": tool["namespace"]}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.blocks[-1]["id"], "output_index": len(self.blocks) - 1}

    def _event(self, name: str, /, **fields: Any) -> bytes:
        self._num_events += 1
        return event({"type": name, "sequence_number": self._num_events - 1, **fields}, name)


def _part(kind: str) -> dict[str, Any]:
    text = {"type": _ITEMS[kind][1], "text": ""}
    return text if kind == "reasoning" else {**text, "annotations": [], **_logprobs(kind)}


def _logprobs(kind: str) -> dict[str, Any]:
    return {"logprobs": []} if kind == "message" else {}

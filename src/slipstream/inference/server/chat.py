"""/v1/chat/completions."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, ValidationError, model_validator

from slipstream.inference.server.answers import ChatFormat, Format, Thinking
from slipstream.inference.server.calls import form_of
from slipstream.inference.server.errors import RequestError
from slipstream.inference.server.grammar import Constraint, Lark, dumps, structured
from slipstream.inference.server.requests import (
    MAX_MESSAGES,
    NOT_SERVED,
    Empty,
    Fields,
    Never,
    SampledFields,
    explained,
    refused,
    wrong,
)
from slipstream.inference.server.state import MAX_IDS, Caller, Prepared, Serving, check_entries
from slipstream.inference.text import Tokenizer, reasoning_marks


class TextPart(Fields):
    type: Annotated[Literal["text"], explained("not_served", "only text parts are supported, not image_url, input_audio or file")]
    text: str


class FunctionCall(Fields):
    name: str
    arguments: str | dict[str, JsonValue]


class ToolCall(Fields):
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None  # only in parts of a stream
    function: FunctionCall


class Message(Fields):
    """Other fields are passed to the chat template."""

    labels = {"annotations": ([],), "refusal": ()}  # noqa: RUF012 # of our own responses, which clients send back

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: FunctionCall | None = None  # OpenAI's form before tool_calls
    audio: Never = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and self.role in ("system", "developer", "user"):
            raise wrong("content", f"a message of role {self.role} needs content")
        if (self.tool_calls or self.function_call) and self.role != "assistant":
            raise wrong("tool_calls", "only messages of role assistant may have tool_calls")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message in the form that chat templates expect, with their names of roles and fields, without unset fields."""
        message = self.model_dump(exclude_none=True, exclude={"function_call"})
        if self.function_call is not None:
            message["tool_calls"] = [{"type": "function", "function": self.function_call.model_dump()}]
        if self.reasoning is not None:
            message.setdefault("reasoning_content", self.reasoning)
        return message | {"role": _ROLES.get(self.role, self.role), "content": message.get("content", "")}


_ROLES = {"developer": "system", "function": "tool"}


class Function(Fields):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None  # no effect: a forced call always follows its schema


class Tool(Fields):
    type: Annotated[Literal["function"], explained("not_served", "only tools of type function are supported")]
    function: Function


class NamedTool(Fields):
    type: Literal["function"]
    function: Function  # of which only the name counts


class AllowedTools(Fields):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1)]


class ToolSubset(Fields):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class ChatRequest(SampledFields):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=-1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedTool | ToolSubset | None,
        explained(
            "tool_choice", 'must be "none", "auto", "required", {"type": "function", "function": {"name": ...}} or allowed_tools'
        ),
    ] = None
    parallel_tool_calls: bool | None = None  # a forced choice always makes one call

    reasoning_effort: str | None = None  # this and the next are variables of the chat template
    think: bool | str | None = None  # Ollama's enable_thinking
    include_reasoning: bool | None = None
    documents: list[dict[str, JsonValue]] | None = None  # a variable of the template, for retrieved texts
    chat_template_kwargs: dict[str, JsonValue] | None = None
    chat_template: Never = None  # clients choose no template, which is a program
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    audio: Never = None
    function_call: Annotated[Literal["none"] | None, NOT_SERVED] = None
    functions: Annotated[Empty | None, NOT_SERVED] = None
    modalities: Annotated[list[Literal["text"]] | None, NOT_SERVED] = None
    web_search_options: Never = None

    @model_validator(mode="after")
    def _is_consistent(self) -> ChatRequest:
        if (self.max_tokens or 0) > 0 and (self.max_completion_tokens or 0) > 0 and self.max_tokens != self.max_completion_tokens:
            raise wrong("max_completion_tokens", "max_tokens and max_completion_tokens differ; set one of them")
        if self.top_logprobs and not self.logprobs:
            raise wrong("top_logprobs", "top_logprobs needs logprobs: true")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise wrong("tools", "two tools have the same name")
        if unknown := sorted(set(self._chosen()).difference(names)):
            raise wrong("tool_choice", f"tool_choice names {unknown[0]!r:.100}, which is not in tools")
        if self.tool_choice == "required" and not names:
            raise wrong("tool_choice", 'tool_choice "required" needs tools')
        self._check_format()
        last = self.messages[-1]
        if self.continue_final_message and (self.add_generation_prompt or last.role != "assistant" or not last.content):
            raise wrong(
                "continue_final_message", "continue_final_message needs a last message of the assistant and no other prompt"
            )
        return self

    def _check_format(self) -> None:
        for field in self.structured():
            if self.forced():
                raise wrong(field, f"a forced tool call and {field} are mutually exclusive")
            if self.offered() and field != "response_format":
                raise wrong(field, f"{field} and tools both decide the form of the output; keep one")

    def offered(self) -> list[Tool]:
        """The tools in the prompt; none if tool_choice is "none", so that the model calls none."""
        chosen = self._chosen() if isinstance(self.tool_choice, ToolSubset) else None
        tools = [] if self.tool_choice == "none" else self.tools or []
        return [tool for tool in tools if chosen is None or tool.function.name in chosen]

    def forced(self) -> list[Function]:
        """The functions of which the output must call one; empty if no call is forced."""
        choice = self.tool_choice
        functions = [tool.function for tool in self.offered()]
        if isinstance(choice, NamedTool):
            return [function for function in functions if function.name == choice.function.name]
        required = choice == "required" or (isinstance(choice, ToolSubset) and choice.allowed_tools.mode == "required")
        return functions if required else []

    def forced_schema(self) -> Any:
        """The JSON schema of a forced call: of the function's arguments, or of {"name", "arguments"} for several functions."""
        forced = [(function.name, function.parameters or {"type": "object"}) for function in self.forced()]
        if len(forced) < 2:
            return forced[0][1] if forced else None
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": _moved(parameters, f"#/anyOf/{index}/properties/arguments")},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for index, (name, parameters) in enumerate(forced)
        ]
        return {"anyOf": calls}

    def variables(self) -> dict[str, tuple[str, Any]]:
        """Variables of the chat template that fields of the request set: name -> (field, value)."""
        fields = self.chat_template_kwargs or {}
        given: dict[str, tuple[str, Any]] = {name: (f"chat_template_kwargs.{name}", value) for name, value in fields.items()}
        if self.documents is not None:
            given["documents"] = ("documents", self.documents)
        effort = self.think if isinstance(self.think, str) else self.reasoning_effort
        if effort is not None:
            given["reasoning_effort"] = ("think" if effort is self.think else "reasoning_effort", effort)
        if effort == "none" or isinstance(self.think, bool):
            given["enable_thinking"] = ("reasoning_effort" if self.think is None else "think", self.think is True)
        return given

    def _chosen(self) -> list[str]:
        """The functions that tool_choice names."""
        match self.tool_choice:
            case NamedTool(function=function):
                return [function.name]
            case ToolSubset(allowed_tools=allowed):
                return [tool.function.name for tool in allowed.tools]
        return []


def _moved(schema: Any, to: str) -> Any:
    """Rewrite a JSON schema that is embedded in another one at `to`, so that its local references start there."""
    match schema:
        case {"$ref": str(target), **others} if target.startswith("#"):
            return {"$ref": to + target[1:], **{key: _moved(value, to) for key, value in others.items()}}
        case dict():
            return {key: _moved(value, to) for key, value in schema.items()}
        case list():
            return [_moved(value, to) for value in schema]
        case _:
            return schema


def prepare(server: Serving, request: ChatRequest, caller: Caller) -> Prepared:
    """Raises RequestError."""
    server.check_number(1, request.n or 1)
    text, unread = rendered(server, request)
    requested = next((limit for limit in (request.max_completion_tokens, request.max_tokens) if limit and limit > 0), None)
    cut, special = request.cut(server.engine.max_context, requested), bool(request.add_special_tokens)
    prompt = server.encode(text, "messages", special=special, cut=cut)
    if request.return_token_ids and request.stream:
        check_entries(len(prompt) * (request.n or 1), "return_token_ids", MAX_IDS)
    thinking = _thinking(server.tokenizer, text)
    constraints, free = _constraints(server, request, thinking)
    params = request.sampling(
        server.max_tokens([prompt], requested, server.engine.max_context, "messages"),
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        prompt_logprobs=request.prompt_logprobs,
        defaults=server.engine.sampling,
        **constraints,
    )
    form = ChatFormat(
        request,
        request.model or server.engine.model_name,
        server.tokenizer,
        width=request.n or 1,
        logprobs=bool(request.logprobs),
        prompts=[prompt],
        forced=[function.name for function in request.forced()],
        named=isinstance(request.tool_choice, NamedTool),
        allowed={} if request.forced() else {tool.function.name: tool.function.parameters for tool in request.offered()},
        max_calls=1 if request.parallel_tool_calls is False else None,
        calls=form_of(server.tokenizer.template),
        thinking=thinking,
        shows_thoughts=request.include_reasoning is not False,
    )
    more = [*unread, *(["tools.function.strict"] if free else [])]
    constraint = _constraining(request)
    return server.prepared(request, [prompt], params, form, caller, n=request.n or 1, constraint=constraint, ignored=more)


def converted(fields: Mapping[str, Any], names: Mapping[str, str]) -> ChatRequest:
    """A chat request of the fields that another API's request was converted to. `names`: that API's names of fields. Raises
    RequestError."""
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise _renamed(refused(error), names) from None


def prepare_converted(
    server: Serving,
    fields: Mapping[str, Any],
    names: Mapping[str, str],
    caller: Caller,
    ignored: Sequence[str],
    form: Callable[[ChatFormat], Format],
) -> Prepared:
    """As `prepare`, of what `converted` takes. `ignored`: the fields without effect of the other API. Raises RequestError."""
    try:
        prepared = prepare(server, converted(fields, names), caller)
    except RequestError as error:
        raise _renamed(error, names) from None
    assert isinstance(prepared.form, ChatFormat)
    work = replace(prepared.work, constraint=names.get(prepared.work.constraint, prepared.work.constraint))
    all_ignored = sorted({*ignored, *(names.get(name, name) for name in prepared.ignored)})
    return Prepared(prepared.request, work, form(prepared.form), all_ignored)


def _renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """Replace the chat request's field in an error by the other API's."""
    for name, field in names.items():
        if error.param is not None and (error.param == name or error.param.startswith(name + ".")):
            error.args = (str(error).replace(error.param, field, 1),)
            error.param = field  # the chat's messages have other indices
    return error


def text_of(content: Any, place: str, between: str = "\n") -> str:
    """The text of a string, or of parts that have a text."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    for number, part in enumerate(parts):
        if not isinstance(part, dict) or not isinstance(part.get("text", part.get("refusal")), str):
            raise RequestError(
                f"{place}.{number}: only parts with a text are served, not images or files", param=f"{place}.{number}"
            )
    return between.join(part.get("text", part.get("refusal")) for part in parts)


def rendered(server: Serving, request: ChatRequest) -> tuple[str, list[str]]:
    """The prompt, and the fields whose variable the template does not read."""
    messages = [message.for_template() for message in request.messages]
    mark = f"{uuid.uuid4().hex} "  # where the final message ends
    if request.continue_final_message:
        messages[-1]["content"] = _marked(messages[-1]["content"], mark)
    starts = not request.continue_final_message and request.add_generation_prompt is not False
    text, unread = templated(server, messages, request.offered(), starts, request.variables())
    if request.continue_final_message:
        text, found, after = text.rpartition(mark[:-1])
        if not found:
            message = "continue_final_message: the chat template leaves out or changes the last message's content"
            raise RequestError(message, param="continue_final_message")
        text = text if after.startswith(" ") else text.rstrip()  # as the template strips the content
    if request.offered() and not request.forced() and not server.tokenizer.supports_tools:
        message = f'the chat template of {server.engine.model_name} ignores tools, so tool_choice "auto" would never call one; '
        message += 'set tool_choice to "required" or to a function, which forces a call with the function\'s schema'
        raise RequestError(message, param="tools", code="unsupported_parameter")
    return text, unread


def templated(
    server: Serving, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], starts: bool, more: Mapping[str, tuple[str, Any]]
) -> tuple[str, list[str]]:
    """The text of a chat, and the fields whose variable the template does not read. `starts`: including the beginning of an answer;
    `more`: as `ChatRequest.variables`. Raises RequestError."""
    if wrong_ones := more.keys() & {"messages", "tools", "add_generation_prompt"}:
        field = f"chat_template_kwargs.{min(wrong_ones)}"
        raise RequestError(f"{field}: it has a field of its own", param=field)
    variables = {name: value for name, (_, value) in more.items() if name in server.tokenizer.variables}
    read = {more[name][0] for name in variables}  # reasoning_effort none sets two of which one is enough
    dumped = [tool.model_dump(exclude_none=True) for tool in tools] or None
    try:
        text = server.tokenizer.chat(messages, tools=dumped, add_generation_prompt=starts, **variables)
    except (ValueError, RecursionError) as error:
        raise RequestError(str(error), param="messages") from None
    return text, sorted({field for field, _ in more.values()} - read)


def _marked(content: Any, mark: str) -> Any:
    """A message's content with `mark` at its end."""
    return content + mark if isinstance(content, str) else [*content[:-1], {**content[-1], "text": content[-1]["text"] + mark}]


def _thinking(tokenizer: Tokenizer, prompt: str) -> Thinking | None:
    """The marks around reasoning in the model's output, if its chat template has any. `begun`: the prompt opens it."""
    marks = reasoning_marks(tokenizer.template)
    return None if marks is None else Thinking(marks, prompt.rstrip().endswith(marks[0]))


def _constraints(server: Serving, request: ChatRequest, thinking: Thinking | None) -> tuple[Constraint, bool]:
    """The constraints on the output, and whether a strict function is not enforced because its form of calls has no grammar."""
    field, tools = _constraining(request), [] if request.forced() else [tool.function for tool in request.offered()]
    if not tools:
        call = request.forced_schema()
        bare = structured(request.structured()) if call is None else {"json_schema": dumps(call, field)}
        begun = thinking is not None and thinking.begun  # the output begins within the model's reasoning
        return _grammar(server, field, thinking, **bare) if begun and bare else bare, False
    schema, form = request.format_schema(), form_of(server.tokenizer.template)
    strict = any(function.strict for function in tools)
    if schema is not None and not form.begin:
        raise RequestError("response_format beside tools is not served in this model's form of calls", param="response_format")
    if schema is not None or (form.begin and strict):
        schemas = [(one.name, one.parameters if one.strict and one.parameters else {"type": "object"}) for one in tools]
        return _grammar(server, field, thinking, schema=schema, tools=schemas, form=form), False
    return {}, strict


def _constraining(request: ChatRequest) -> str:
    """The field from which the constraints on the output come, if there are any."""
    return next(iter(request.structured()), "tools")


def _grammar(server: Serving, field: str, thinking: Thinking | None, json_schema: str | None = None, **answer: Any) -> Constraint:
    """The constraint on an answer after reasoning, or with calls. `answer`: of `Lark.answer`; `json_schema`: its schema as text."""
    marks, begun = thinking or (None, False)
    try:
        if json_schema is not None:
            answer["schema"] = json.loads(json_schema)
        return {"grammar": Lark(server.tokenizer.marks).answer(thoughts=marks, begun=begun, **answer)}
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{field}: a JSON schema or grammar cannot be served: {error}", param=field) from None

"""The supported subset of OpenAI's requests and responses.

An unsupported field of OpenAI's is declared with its no-op values only; any other value raises an error that names the field, and
so does an unknown field. Nothing is ignored. Requests are parsed strictly: "1" is not a number. Responses are typed dicts: one is
built per token, and a pydantic model would cost ten times as much.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, WrapValidator, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from slipstream.inference.core import MAX_STOP, SamplingParams

MAX_SEQUENCES = 128  # per request: prompts x n
MAX_MESSAGES = 4096  # per chat
MAX_SALT = 256  # characters


class RequestError(Exception):
    """An error response in OpenAI's format."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}

    def body(self) -> ErrorBody:
        kind = "server_error" if self.status >= 500 else "rate_limit_error" if self.status == 429 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    error: ErrorDetail


# --- Requests


def _error(kind: str, message: str) -> WrapValidator:
    """Replace pydantic's errors, one per member of a union, by one message."""

    def validate(value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError(kind, message) from None

    return WrapValidator(validate)


def _documented(**limits: float) -> Any:
    """Add limits to the OpenAPI document only; `SamplingParams` checks them, with better messages."""
    return Field(json_schema_extra=limits)  # type: ignore[arg-type]


NOT_SERVED = _error("not_served", "this OpenAI field is not supported; leave it out")
Never = Annotated[None, NOT_SERVED]
Off = Annotated[Literal[False] | None, NOT_SERVED]
Empty = Annotated[list[Any], Field(max_length=0)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
StopString = Annotated[str, Field(max_length=MAX_STOP)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, hide_input_in_errors=True)


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: Off = None


class Sampled(Strict):
    """The fields that completions and chats share: OpenAI's, then vLLM's."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SEQUENCES)] | None = None
    temperature: Annotated[float | None, _documented(minimum=0, maximum=100)] = None
    top_p: Annotated[float | None, _documented(exclusiveMinimum=0, maximum=1)] = None
    presence_penalty: Annotated[float | None, _documented(minimum=-2, maximum=2)] = None
    frequency_penalty: Annotated[float | None, _documented(minimum=-2, maximum=2)] = None
    logit_bias: Annotated[
        Annotated[
            dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)
        ]
        | None,
        _error("logit_bias", "must map at most 1,024 token ids, as strings, to numbers from -100 to 100"),
    ] = None
    stop: Annotated[
        StopString | Annotated[list[StopString], Field(max_length=16)] | None,
        _error("stop", f"must be a string or a list of at most 16 strings, of at most {MAX_STOP:,} characters each"),
    ] = None
    seed: Int64 | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None  # a label for the provider's records; no effect on the output, as in OpenAI's API

    top_k: Annotated[int | None, _documented(minimum=0)] = None
    min_p: Annotated[float | None, _documented(minimum=0, maximum=1)] = None
    repetition_penalty: Annotated[float | None, _documented(minimum=0.01, maximum=100)] = None
    min_tokens: Annotated[int | None, _documented(minimum=0)] = None
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    priority: Annotated[int, Field(ge=-10, le=10)] | None = None  # each step is worth 10 s of waiting: no starvation
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT)] | None = None  # requests with the same salt share prefixes

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> Sampled:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self

    def sampling(
        self, *, max_tokens: int, logprobs: int | None, json_schema: str | None, defaults: Mapping[str, Any] | None = None
    ) -> SamplingParams:
        """Convert to sampling parameters; `defaults` replaces fields that the request leaves out. Raises RequestError."""
        names = (
            *("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed"),
            *("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos"),
        )
        fields = dict(defaults or {}) | {name: value for name in names if (value := getattr(self, name)) is not None}
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        if self.min_tokens is not None and self.min_tokens > max_tokens:
            raise RequestError(f"min_tokens ({self.min_tokens}) is more than max_tokens ({max_tokens})", param="min_tokens")
        try:
            return SamplingParams(
                max_tokens=max_tokens,
                logit_bias={int(token): bias for token, bias in (self.logit_bias or {}).items()},
                stop=tuple(stop),
                stop_token_ids=tuple(self.stop_token_ids or ()),
                logprobs=logprobs,
                json_schema=json_schema,
                **fields,
            )
        except ValueError as error:  # the message begins with the field's name
            param = str(error).split()[0]
            raise RequestError(str(error), param=param if param in type(self).model_fields else None) from None


class CompletionRequest(Sampled):
    prompt: Annotated[
        str
        | Annotated[list[str], Field(min_length=1, fail_fast=True)]
        | Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]], Field(min_length=1, fail_fast=True)],
        _error("prompt", "must be a non-empty string, list of strings, list of token ids, or list of lists of token ids"),
    ]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    best_of: Annotated[Literal[1] | None, NOT_SERVED] = None
    echo: Off = None
    suffix: Annotated[Literal[""] | None, NOT_SERVED] = None

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, each a text or a list of token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


class TextPart(Strict):
    type: Annotated[Literal["text"], _error("not_served", "only text parts are supported, not image_url, input_audio or file")]
    text: str


class FunctionCall(Strict):
    name: str
    arguments: str


class ToolCall(Strict):
    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(min_length=1)] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    # Fields of our own responses, which clients send back.
    refusal: Never = None
    audio: Never = None
    function_call: Never = None
    annotations: Annotated[Empty | None, NOT_SERVED] = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError(f"a message of role {self.role} needs content")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only messages of role assistant may have tool_calls")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: role developer becomes system, and unset fields are left out."""
        message = self.model_dump(exclude_none=True)
        return message | {"role": "system" if self.role == "developer" else self.role, "content": message.get("content", "")}


class Function(Strict):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None  # a forced call always follows its schema; true is an error if no call is forced


class Tool(Strict):
    type: Annotated[Literal["function"], _error("not_served", "only tools of type function are supported")]
    function: Function


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


class JsonSchema(Strict):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: dict[str, JsonValue] = Field(alias="schema")
    strict: bool | None = None  # the output always follows the schema


class ResponseFormat(Strict):
    type: Annotated[Literal["text", "json_object", "json_schema"], _error("type", "must be text, json_object or json_schema")]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("type json_schema needs the field json_schema, and other types must not have it")
        return self


class ChatRequest(Sampled):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedTool | None,
        _error("tool_choice", 'must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}'),
    ] = None
    parallel_tool_calls: bool | None = None  # a forced choice always makes one call

    audio: Never = None
    function_call: Annotated[Literal["none"] | None, NOT_SERVED] = None
    functions: Annotated[Empty | None, NOT_SERVED] = None
    metadata: Annotated[Annotated[dict[str, str], Field(max_length=0)] | None, NOT_SERVED] = None
    modalities: Annotated[list[Literal["text"]] | None, NOT_SERVED] = None
    moderation: Never = None
    prediction: Never = None
    prompt_cache_key: Never = None
    prompt_cache_options: Never = None
    prompt_cache_retention: Never = None
    reasoning_effort: Annotated[Literal["none"] | None, NOT_SERVED] = None
    safety_identifier: Never = None
    service_tier: Annotated[Literal["auto", "default"] | None, NOT_SERVED] = None
    store: Off = None
    verbosity: Annotated[Literal["medium"] | None, NOT_SERVED] = None
    web_search_options: Never = None

    @model_validator(mode="after")
    def _is_consistent(self) -> ChatRequest:
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ; set one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("two tools have the same name")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError("tool_choice names a function that is not in tools")
        if self.tool_choice == "required" and not names:
            raise ValueError('tool_choice "required" needs tools')
        formatted = self.response_format is not None and self.response_format.type != "text"
        if formatted and self.forced():
            raise ValueError("a forced tool call and response_format are mutually exclusive")
        if self.offered() and not self.forced():
            if formatted:
                raise ValueError(
                    'tools with tool_choice "auto" and response_format are mutually exclusive: output of a JSON schema cannot be a '
                    'call; leave one out, or set tool_choice to "none" or "required"'
                )
            if strict := [tool.function.name for tool in self.offered() if tool.function.strict]:
                raise ValueError(
                    f'function.strict of {strict[0]} is not supported with tool_choice "auto": only a forced call follows its '
                    'schema; leave strict out, or set tool_choice to "required" or a function'
                )
        return self

    def offered(self) -> list[Tool]:
        """The tools in the prompt: none if tool_choice is none, so that the model calls none."""
        return [] if self.tool_choice == "none" else self.tools or []

    def forced(self) -> list[Function]:
        """The functions of which the output must call one; empty if no call is forced."""
        functions = [tool.function for tool in self.tools or ()]
        if isinstance(self.tool_choice, NamedTool):
            return [function for function in functions if function.name == self.tool_choice.function.name]
        return functions if self.tool_choice == "required" else []

    def output_schema(self) -> str | None:
        """The JSON schema of the output: of a forced function's arguments, or of {"name", "arguments"} for several functions.

        None if the output is free text. Raises RequestError.
        """
        schema: Any
        forced = [(function.name, function.parameters or {"type": "object"}) for function in self.forced()]
        if len(forced) == 1:
            schema = forced[0][1]
        elif forced:
            schema = {
                "anyOf": [
                    {
                        "type": "object",
                        "properties": {
                            "name": {"const": name},
                            "arguments": _moved(parameters, f"#/anyOf/{index}/properties/arguments"),
                        },
                        "required": ["name", "arguments"],
                        "additionalProperties": False,
                    }
                    for index, (name, parameters) in enumerate(forced)
                ]
            }
        elif self.response_format is None or self.response_format.type == "text":
            return None
        elif self.response_format.json_schema is None:
            schema = {"type": "object"}
        else:
            schema = self.response_format.json_schema.schema_
        try:
            return json.dumps(schema, allow_nan=False)
        except ValueError:
            raise RequestError("the JSON schema contains a non-finite number") from None


_CODES = {  # pydantic's error type -> OpenAI's code
    "not_served": "unsupported_parameter",
    "extra_forbidden": "unknown_parameter",
    "missing": "missing_required_parameter",
}
RequestT = TypeVar("RequestT", bound=Sampled)


def _moved(schema: Any, to: str) -> Any:
    """Rewrite a JSON schema that becomes a part of another one: its local references start at `to`."""
    match schema:
        case {"$ref": str(target), **others} if target.startswith("#"):
            return {"$ref": to + target[1:], **{key: _moved(value, to) for key, value in others.items()}}
        case dict():
            return {key: _moved(value, to) for key, value in schema.items()}
        case list():
            return [_moved(value, to) for value in schema]
        case _:
            return schema


def parse(kind: type[RequestT], body: bytes) -> RequestT:
    """Parse a body. Raises RequestError, which names the invalid field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        # An unsupported field is reported first: other errors may follow from it.
        first = min(error.errors(include_url=False, include_context=False), key=lambda e: e["type"] != "not_served")
        if first["type"] == "json_invalid":
            raise RequestError(f"the body is not valid JSON: {first['msg']}", code="invalid_json") from None
        unknown = first["type"] == "extra_forbidden"
        # Within a union, pydantic's path also has the names of types.
        path = [str(part) for part in first["loc"][: -1 if unknown else None] if part != "str" and "[" not in str(part)]
        path += [str(first["loc"][-1])[:100]] if unknown else []
        message = "unknown field" if unknown else first["msg"].removeprefix("Value error, ")
        param = ".".join(path) or None
        raise RequestError(f"{param}: {message}" if param else message, param=param, code=_CODES.get(first["type"])) from None


# --- Answers


class TokenCounts(TypedDict):
    cached_tokens: int


class UsageBody(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: TokenCounts


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class CompletionBody(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[UsageBody | None]


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[ChatLogprob]


class FunctionCallBody(TypedDict):
    name: NotRequired[str]
    arguments: str


class ToolCallBody(TypedDict):
    index: NotRequired[int]
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionCallBody


class AnswerMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ToolCallBody]]


class ChatChoice(TypedDict):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatBody(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody


class HealthBody(TypedDict):
    status: Literal["ok", "draining", "failed"]


class ModelBody(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    sampling: dict[str, float]  # defaults of chats


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelBody]

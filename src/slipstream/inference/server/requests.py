"""The common fields of completion and chat requests, and the parsing of bodies.

A field has its effect, or is rejected by name, or has no effect. Fields without effect are OpenAI's labels (`LABELS`) and unknown
fields; the header x-slipstream-ignored and the log name them, and --strict-fields rejects them. Values are parsed strictly: "1" is
not a number, except where clients send that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError, WrapValidator, model_validator
from pydantic_core import PydanticCustomError

from slipstream.inference.core import LONGEST, MAX_STOP, SamplingParams
from slipstream.inference.server.errors import RequestError

MAX_SEQUENCES = 128  # per request: prompts x n
MAX_MESSAGES = 4096  # per chat
MAX_SALT = 256  # characters
MAX_WORD = 256  # characters of a bad word
MAX_NAMED = 60  # characters of a field's name in a response

# OpenAI's fields without effect here -> values that request nothing.
LABELS: dict[str, tuple[Any, ...]] = {
    "metadata": ({},),
    "moderation": (),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "verbosity": ("medium",),
}


def explained(kind: str, message: str) -> WrapValidator:
    """Replace pydantic's errors, one per member of a union, by one message."""

    def validate(value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError(kind, message) from None

    return WrapValidator(validate)


def documented(**limits: float) -> Any:
    """Add limits to the OpenAPI document only; `SamplingParams` checks them, with better messages."""
    return Field(json_schema_extra=limits)  # type: ignore[arg-type]


def wrong(param: str, message: str) -> PydanticCustomError:
    """The error of a validator of several fields; `param` is the field to change."""
    return PydanticCustomError("wrong", message, {"param": param})


NOT_SERVED = explained("not_served", "this field is not supported; leave it out")
Never = Annotated[None, NOT_SERVED]
Empty = Annotated[list[Any], Field(max_length=0)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Seconds = Annotated[float, Field(gt=0, le=LONGEST)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Number = Annotated[
    float | Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?$", max_length=20)],
    AfterValidator(float),
    explained("number", "must be a number"),
]
StopString = Annotated[str, Field(max_length=MAX_STOP)]


class Fields(BaseModel):
    """An object in a request. Unknown fields are kept, for `ignored` and for chat templates."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, allow_inf_nan=False, hide_input_in_errors=True)

    labels: ClassVar[Mapping[str, tuple[Any, ...]]] = {}  # fields without effect -> values that request nothing

    def ignored(self, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], bool]]:
        """Yield the paths of all fields that have no effect, without list indices, and whether each is a label, thus known."""
        for name in self.model_fields_set:
            value = getattr(self, name, None)
            if name in self.labels:
                if value is not None and value not in self.labels[name]:
                    yield (*place, name), True
            elif name not in type(self).model_fields:
                yield (*place, name), False
            if isinstance(value, Fields):
                yield from value.ignored((*place, name))
            elif isinstance(value, list) and value and isinstance(value[0], Fields):
                for part in value:
                    yield from part.ignored((*place, name))


class StreamOptions(Fields):
    labels = {"include_obfuscation": (False,)}

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # with include_usage: each chunk states its choice's usage until now


Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=1024)]


class StructuredOutputs(Fields):
    json_: dict[str, JsonValue] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    structural_tag: Never = None


class JsonSchema(Fields):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: dict[str, JsonValue] = Field(alias="schema")
    strict: bool | None = None  # no effect: the output always follows the schema


class ResponseFormat(Fields):
    type: Annotated[Literal["text", "json_object", "json_schema"], explained("type", "must be text, json_object or json_schema")]
    json_schema: JsonSchema | None = None
    schema_: dict[str, JsonValue] | None = Field(None, alias="schema")  # of json_object, as in llama.cpp and instructor

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise wrong("json_schema", "type json_schema needs the field json_schema, and other types must not have it")
        if self.schema_ is not None and self.type != "json_object":
            raise wrong("schema", "is of type json_object; type json_schema has it in json_schema")
        return self


class CommonFields(Fields):
    """The fields of all APIs that generate: OpenAI's, then vLLM's and our own, then constraints, the last of them llama.cpp's."""

    model: str | None = None  # None: the server's only model
    temperature: Annotated[Number | None, documented(minimum=0, maximum=100)] = None
    top_p: Annotated[Number | None, documented(exclusiveMinimum=0, maximum=1)] = None
    presence_penalty: Annotated[float | None, documented(minimum=-2, maximum=2)] = None
    frequency_penalty: Annotated[float | None, documented(minimum=-2, maximum=2)] = None
    logit_bias: Annotated[
        Annotated[
            dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)
        ]
        | None,
        explained("logit_bias", "must map at most 1,024 token ids, as strings, to numbers from -100 to 100"),
    ] = None
    stop: Annotated[
        StopString | Annotated[list[StopString], Field(max_length=16)] | None,
        explained("stop", f"must be a string or a list of at most 16 strings, of at most {MAX_STOP:,} characters each"),
    ] = None
    seed: Int64 | None = None
    stream: bool | None = None

    top_k: Annotated[int | None, documented(minimum=-1)] = None
    min_p: Annotated[float | None, documented(minimum=0, maximum=1)] = None
    repetition_penalty: Annotated[float | None, documented(minimum=0.01, maximum=100)] = None
    min_tokens: Annotated[int | None, documented(minimum=0)] = None
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: Annotated[
        Annotated[list[Annotated[str, Field(max_length=MAX_WORD)]], Field(max_length=1024)] | None,
        explained("bad_words", f"must be a list of at most 1,024 texts, of at most {MAX_WORD} characters each"),
    ] = None
    thinking_token_budget: Annotated[int, Field(ge=-1)] | None = None  # -1: no limit
    add_special_tokens: bool | None = None  # those that begin every text; by default of a completion's prompt only
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None  # -1: as many as leave room for the answer
    truncation_side: Literal["left", "right"] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    first_within: Seconds | None = None  # the request's target: seconds to its first token; the next: between tokens
    wait_within: Seconds | None = None
    priority: Annotated[int, Field(ge=-10, le=10)] | None = None  # each step is worth 10 s of waiting: no starvation
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT)] | None = None  # requests with the same salt share prefixes

    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, JsonValue] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    grammar: str | None = None

    def shared(self) -> dict[str, Any]:
        """The given ones, for another API's request."""
        return {name: value for name in CommonFields.model_fields if (value := getattr(self, name)) is not None}


class SampledFields(CommonFields):
    """The fields that completions and chats share."""

    labels = LABELS

    max_tokens: Annotated[int, Field(ge=-1)] | None = None  # -1: no limit; 0: no limit in chats, no tokens in completions
    n: Annotated[int, Field(ge=1, le=MAX_SEQUENCES)] | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None  # a label for the provider's records; no effect on the output, as in OpenAI's API
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    use_beam_search: Annotated[Literal[False] | None, NOT_SERVED] = None

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> SampledFields:
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options", "stream_options needs stream: true")
        if len(self.structured()) > 1:
            first, second, *_ = self.structured()
            raise wrong(second, f"{first} and {second} both constrain the output; keep one")
        return self

    def structured(self) -> dict[str, tuple[str, Any]]:
        """Fields that constrain the output: name -> (kind of constraint: json, regex, choice or grammar; value)."""
        kinds = {f"guided_{kind}": (kind, getattr(self, f"guided_{kind}")) for kind in ("json", "regex", "choice", "grammar")}
        kinds |= {"grammar": ("grammar", self.grammar), "response_format": ("json", self.format_schema())}
        if (given := self.structured_outputs) is not None:
            for kind in ("json", "regex", "choice", "grammar"):
                kinds[f"structured_outputs.{kind}"] = (kind, getattr(given, "json_" if kind == "json" else kind))
            kinds["structured_outputs.json_object"] = ("json", {"type": "object"} if given.json_object else None)
        return {name: (kind, value) for name, (kind, value) in kinds.items() if value is not None}

    def cut(self, context: int, max_tokens: int | None) -> tuple[int, str] | None:
        """How many tokens of each prompt to keep, and the side from which the others are cut; None: all. Raises RequestError."""
        kept, room = self.truncate_prompt_tokens, context - max(1, max_tokens or 1)
        if kept is None:
            return None
        if room < 1:
            message = f"the model's context is {context} tokens and max_tokens is {max_tokens}, which leaves none for the prompt"
            raise RequestError(message, param="max_tokens", code="context_length_exceeded")
        if not (kept == -1 or 1 <= kept <= room):
            message = (
                f"truncate_prompt_tokens is {kept}; it must be -1, or 1 to {room}, which leaves room for {context - room} more"
            )
            raise RequestError(message, param="truncate_prompt_tokens")
        return (room if kept == -1 else kept), self.truncation_side or "left"

    def format_schema(self) -> Any:
        """The JSON schema of the response format; None for text."""
        if self.response_format is None or self.response_format.type == "text":
            return None
        given = self.response_format.json_schema or self.response_format
        return {"type": "object"} if given.schema_ is None else given.schema_

    def sampling(self, max_tokens: int, *, defaults: Mapping[str, Any] | None = None, **others: Any) -> SamplingParams:
        """Convert to sampling parameters; `defaults` replace fields that the request leaves out. `others`: those that it has in
        other forms (log-probabilities and constraints). Raises RequestError."""
        fields = dict(defaults or {}) | {name: value for name in _SAMPLED if (value := getattr(self, name)) is not None}
        fields["top_k"] = max(0, fields.get("top_k", 0))  # vLLM's -1: all
        fields["thinking_token_budget"] = None if self.thinking_token_budget == -1 else self.thinking_token_budget
        fields["logit_bias"] = {int(token): bias for token, bias in (self.logit_bias or {}).items()}
        if self.min_tokens is not None and self.min_tokens > max_tokens:
            raise RequestError(f"min_tokens ({self.min_tokens}) is more than max_tokens ({max_tokens})", param="min_tokens")
        try:
            return SamplingParams(max_tokens=max_tokens, **others, **fields)
        except ValueError as error:  # the message begins with the field's name
            param = str(error).split()[0]
            raise RequestError(str(error), param=param if param in type(self).model_fields else None) from None


_SAMPLED = (SamplingParams.__dataclass_fields__.keys() & CommonFields.model_fields.keys()) - {"grammar"}  # which have one meaning
_CODES = {  # pydantic's error type -> OpenAI's code
    "not_served": "unsupported_parameter",
    "missing": "missing_required_parameter",
}
RequestT = TypeVar("RequestT", bound=Fields)


def parse(kind: type[RequestT], body: bytes) -> RequestT:
    """Parse a body. Raises RequestError, which names the invalid field."""
    if "messages" in kind.model_fields and body.count(b'"role"') > MAX_MESSAGES:  # checked before parsing, which is expensive
        raise RequestError(f"messages: a chat may have at most {MAX_MESSAGES:,} messages", param="messages")
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise refused(error) from None


def refused(error: ValidationError) -> RequestError:
    # Report an unsupported field first, because other errors may follow from it. Of a union's members, report the best match.
    errors = error.errors(include_url=False)
    of_first = (e for e in errors if e["loc"][:1] == errors[0]["loc"][:1])
    first = next((e for e in errors if e["type"] == "not_served"), max(of_first, key=lambda e: len(e["loc"])))
    if first["type"] == "json_invalid":
        return RequestError(f"the body is not valid JSON: {first['msg']}", code="invalid_json")
    # Within a union, pydantic's path also has the names of types.
    path = [str(part) for part in first["loc"] if part not in ("str", "float", "int") and "[" not in str(part)]
    param = ".".join([*path, *([first["ctx"]["param"]] if first["type"] == "wrong" else [])])
    message = first["msg"].removeprefix("Value error, ")
    message = message if param and message.startswith(param) else f"{param or 'the body'}: {message}"
    return RequestError(message, param=param or None, code=_CODES.get(first["type"]))


def shown(name: str) -> str:
    """A field's name, which a client may have made up, escaped for a header or the log."""
    return name.encode("unicode_escape").decode()[:MAX_NAMED]

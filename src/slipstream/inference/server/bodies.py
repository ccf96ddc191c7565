"""The types of response bodies, as typed dicts: one is built per token, and a pydantic model would cost ten times as much."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict


class TokenCounts(TypedDict):
    cached_tokens: int


class ReasoningCounts(TypedDict):
    reasoning_tokens: int


class UsageBody(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[TokenCounts]  # these two not in `continuous_usage_stats`
    completion_tokens_details: NotRequired[ReasoningCounts]  # of a model that reasons


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]  # None: the first token of an echoed prompt
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(TypedDict):
    logprob: float
    rank: int  # 1: the likeliest of all tokens
    decoded_token: str


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: NotRequired[str | int | None]  # vLLM's: the stop string or one of stop_token_ids; at the end
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None]]


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
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]  # the same, by vLLM's newer name


class ChatChoice(TypedDict):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]


class ChatBody(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_token_ids: NotRequired[list[int]]  # here and not in the choices, as in vLLM; likewise:
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None]]


class HealthBody(TypedDict):
    status: Literal["ok", "starting", "draining", "failed"]  # starting: no replica is ready
    replicas: NotRequired[list[str]]  # `ReplicaState` of each engine, if engines have processes of their own
    engines: NotRequired[dict[str, str]]  # the same for engines on other hosts, by address
    models: NotRequired[dict[str, str]]  # name -> value of `ModelStatus`, if there are several models


class LoadBody(TypedDict):
    server_load: int  # requests that generate or are queued


class ModelStatus(TypedDict):
    """As in llama.cpp's router."""

    value: Literal["unloaded", "loading", "loaded", "unloading"]
    error: NotRequired[str]  # why the last load failed


class ModelBody(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: NotRequired[str]  # this, and the next, only of a loaded model: its name, also of an adapter's model
    max_model_len: NotRequired[int]
    sampling: NotRequired[dict[str, float]]  # defaults for chats, known once it is loaded
    parent: NotRequired[str]  # of an adapter: its model
    status: NotRequired[ModelStatus]  # if the server has several models


class DeletedBody(TypedDict):
    id: str
    object: Literal["model"]
    deleted: bool


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelBody]


class ResponsesBody(TypedDict):
    """The fields of a response that clients read; the others repeat the request."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete"]
    output: list[dict[str, Any]]
    usage: dict[str, Any]


class MessageBody(TypedDict):
    """Anthropic's."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: dict[str, int]


class CountBody(TypedDict):
    input_tokens: int


class TokensBody(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class VersionBody(TypedDict):
    version: str


class TextBody(TypedDict):
    prompt: str


class InputUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class OneEmbedding(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsBody(TypedDict):
    object: Literal["list"]
    model: str
    data: list[OneEmbedding]
    usage: InputUsage


class Document(TypedDict):
    text: str


class OneRank(TypedDict):
    index: int
    relevance_score: float
    document: NotRequired[Document]


class RerankBody(TypedDict):
    id: str
    model: str
    results: list[OneRank]
    usage: InputUsage


class OneScore(TypedDict):
    object: Literal["score"]
    index: int
    score: float


class ScoreBody(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[OneScore]
    usage: InputUsage

"""Turn a request's body into work for the engine: parse it, render the chat template and tokenize, outside the event loop.

[Note: Requests do not stall streams] No request may stall the streams of other clients. Sizes are therefore checked before any
processing: bytes of a body and of all bodies, messages of a chat, characters of a text. Expensive work that holds the GIL (parsing,
templates) runs in a few threads, and one long body at a time, so that the event loop and the engine's thread compete with a few
threads at most; tokenization releases the GIL. The exception is one call of the JSON parser, which holds the GIL for up to 0.03 s
per MB.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from slipstream.inference.server.answers import ChatFormat, CompletionFormat, Format
from slipstream.inference.server.backend import ServedEngine, ServedTokenizer
from slipstream.inference.server.generation import Work
from slipstream.inference.server.protocol import (
    MAX_MESSAGES,
    MAX_SEQUENCES,
    ChatRequest,
    CompletionRequest,
    NamedTool,
    RequestError,
    Sampled,
    parse,
)
from slipstream.inference.text import TooLongError

SHORT = 64 << 10  # bytes; a body up to this size is always accepted
THREADS = 2  # for short bodies
BODIES = 16  # bodies of maximum size that may be in flight

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on one request."""

    max_body_bytes: int
    max_output_tokens: int | None  # None: the context
    request_timeout_s: float  # to generate the response
    body_timeout_s: float  # to receive the body
    schema_timeout_s: float  # to compile a JSON schema


class Prepared(NamedTuple):
    request: Sampled
    work: Work
    form: Format


class Body:
    """A body that is being received. If it exceeds a limit, it is rejected and its bytes are dropped."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._parts: list[bytes] = []
        self.size = 0  # bytes received
        self.nbytes = 0  # of the stored parts
        self.refused: RequestError | None = None

    def add(self, part: bytes) -> None:
        self.size += len(part)
        if self.refused is None and self.size > self._bodies.max_bytes:
            message = f"the body is larger than {self._bodies.max_bytes} bytes"
            self.refused = RequestError(message, status=413, code="body_too_large")
        elif self.refused is None and self.size > SHORT and self._bodies.nbytes + len(part) > self._bodies.limit:
            message = f"the server is preparing {self._bodies.nbytes} bytes of other requests; try again later"
            self.refused = RequestError(message, status=503, code="busy", retry_after=1)
        if self.refused is None:
            self._parts.append(part)
            self._hold(self.nbytes + len(part))
        else:
            self._parts.clear()
            self._hold(0)

    def parts(self) -> list[bytes]:
        """Hand over the parts to the caller. Raises RequestError if the body was rejected."""
        if self.refused is not None:
            raise self.refused
        parts, self._parts = self._parts, []
        return parts

    def _hold(self, size: int) -> None:
        self._bodies.nbytes += size - self.nbytes
        self.nbytes = size


class Bodies:
    """All bodies in flight, from their first byte until they are prepared. Only the event loop accesses it."""

    def __init__(self, max_body_bytes: int) -> None:
        self.max_bytes = max_body_bytes
        self.limit = BODIES * max(max_body_bytes, SHORT)
        self.nbytes = 0  # of all stored bodies
        self._short = ThreadPoolExecutor(THREADS, "slipstream-prepare")
        self._long = ThreadPoolExecutor(1, "slipstream-prepare-long")

    @contextmanager
    def arriving(self) -> Iterator[Body]:
        body = Body(self)
        try:
            yield body
        finally:
            body._hold(0)

    async def prepare(self, make: Callable[[bytes, str], Result], body: Body, salt: str) -> Result:
        """Run `make(body, salt)` in a worker thread."""
        parts = body.parts()

        def run() -> Result:
            joined = b"".join(parts)
            parts.clear()
            return make(joined, salt)

        return await asyncio.get_running_loop().run_in_executor(self._long if body.size > SHORT else self._short, run)


class Desk:
    """Parses and tokenizes bodies into work for one engine."""

    def __init__(self, engine: ServedEngine, tokenizer: ServedTokenizer, max_output_tokens: int | None) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.max_output_tokens = max_output_tokens

    def completion(self, body: bytes, salt: str) -> Prepared:
        """Raises RequestError, as `chat` does."""
        request = parse(CompletionRequest, body)
        self.check_model(request.model)
        self._check_number(len(request.prompts()), request.n or 1)
        prompts = [self._encode(prompt) if isinstance(prompt, str) else prompt for prompt in request.prompts()]
        if not all(prompts):
            raise RequestError("a prompt has no tokens", param="prompt")
        limit = self._max_tokens(prompts, request.max_tokens, 16)  # OpenAI's default
        params = request.sampling(max_tokens=limit, logprobs=request.logprobs, json_schema=None)
        form = CompletionFormat(request.model, self.tokenizer, logprobs=request.logprobs is not None)
        return Prepared(request, _work(request, prompts, params, salt), form)

    def chat(self, body: bytes, salt: str) -> Prepared:
        if body.count(b'"role"') > MAX_MESSAGES:  # checked before the expensive parsing
            raise RequestError(f"messages: a chat may have at most {MAX_MESSAGES:,} messages", param="messages")
        request = parse(ChatRequest, body)
        self.check_model(request.model)
        self._check_number(1, request.n or 1)
        prompt = self._encode(self._render(request), special=False)
        limit = self._max_tokens([prompt], request.max_completion_tokens or request.max_tokens, self.engine.max_context)
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        schema = request.output_schema()
        params = request.sampling(max_tokens=limit, logprobs=logprobs, json_schema=schema, defaults=self.engine.sampling)
        form = ChatFormat(
            request.model,
            self.tokenizer,
            logprobs=logprobs is not None,
            forced=[function.name for function in request.forced()],
            named=isinstance(request.tool_choice, NamedTool),
            allowed=() if schema else tuple(tool.function.name for tool in request.offered()),
            max_calls=1 if request.parallel_tool_calls is False else None,
        )
        return Prepared(request, _work(request, [prompt], params, salt), form)

    def check_model(self, name: str) -> None:
        if name != self.engine.model_name:
            message = f"the model {name[:200]!r} does not exist; this server serves {self.engine.model_name!r}"
            raise RequestError(message, status=404, param="model", code="model_not_found")

    def _render(self, request: ChatRequest) -> str:
        messages = [message.for_template() for message in request.messages]
        tools = [tool.model_dump(exclude_none=True) for tool in request.offered()] or None
        try:
            text = self.tokenizer.chat(messages, tools=tools)
        except (ValueError, RecursionError) as error:
            raise RequestError(str(error), param="messages") from None
        if tools and not request.forced() and not self.tokenizer.supports_tools:
            message = f'the chat template of {self.engine.model_name} ignores tools, so tool_choice "auto" would never call one; '
            message += 'set tool_choice to "required" or to a function, which forces a call with the function\'s schema'
            raise RequestError(message, param="tools", code="unsupported_parameter")
        return text

    def _encode(self, text: str, *, special: bool = True) -> list[int]:
        context = self.engine.max_context
        try:
            return self.tokenizer.encode(text, special=special, max_tokens=context)
        except TooLongError:
            message = f"the model's context is {context} tokens and the prompt is longer; shorten it"
            raise RequestError(message, code="context_length_exceeded") from None

    def _max_tokens(self, prompts: Sequence[Sequence[int]], requested: int | None, default: int) -> int:
        longest = max(map(len, prompts))
        free = self.engine.max_context - longest
        if free < 1 or (requested or 1) > free:
            message = f"the model's context is {self.engine.max_context} tokens; the prompt has {longest}"
            message += f" and max_tokens is {requested}" if requested else ", which leaves none for the output; shorten it"
            raise RequestError(message, param="max_tokens" if free >= 1 else None, code="context_length_exceeded")
        limit = self.max_output_tokens or free
        if requested is not None and requested > limit:
            raise RequestError(f"max_tokens is {requested}; this server generates at most {limit} per request", param="max_tokens")
        return requested or min(default, limit, free)

    def _check_number(self, prompts: int, n: int) -> None:
        if prompts * n > MAX_SEQUENCES:
            raise RequestError(f"{prompts} prompts x n ({n}) is more than {MAX_SEQUENCES} sequences", param="n")


def _work(request: Sampled, prompts: Sequence[Sequence[int]], params: Any, salt: str) -> Work:
    """The salt of the prefix cache combines the client's `salt` with the request's cache_salt."""
    salt = f"{salt}:{request.cache_salt or ''}"
    return Work(prompts=prompts, params=params, n=request.n or 1, priority=request.priority or 0, salt=salt)

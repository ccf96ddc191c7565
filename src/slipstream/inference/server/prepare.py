"""From a request's body to the engine's work: parsed, its chat template rendered, its texts encoded; beside the event loop.

[Note: Nobody stalls anybody] What a client sends must not stop another one's stream, whatever it is. So its size is looked at
before anything is made of it: bytes of a body and of all bodies, messages of a chat, characters of a text. What is dear and holds
the interpreter's lock (parsing, templates) runs in few threads, long bodies one after another, so that the event loop and the
engine's thread wait for a few others at most; encoding runs without the lock. What is left is one call of the JSON parser, which
holds the lock for up to 0.03 s for each MB.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from slipstream.inference.server.answers import ChatFormat, CompletionFormat, Format
from slipstream.inference.server.backend import Engine, Tokenizer
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

SHORT = 64 << 10  # bytes of a body that is always taken
THREADS = 2  # that prepare short bodies
BODIES = 16  # full bodies that may be in flight

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a request may ask and take."""

    max_body_bytes: int
    max_output_tokens: int | None  # None: the context
    request_timeout_s: float  # of an answer
    body_timeout_s: float  # of a body's arrival
    schema_timeout_s: float  # of a JSON schema's compilation


class Prepared(NamedTuple):
    ask: Sampled
    work: Work
    form: Format


class Body:
    """One that arrives. Parts beyond what may be held are dropped."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._parts: list[bytes] = []
        self.size = 0  # bytes that have come
        self.held = 0  # of these, that are kept
        self.refused: RequestError | None = None

    def add(self, part: bytes) -> None:
        self.size += len(part)
        if self.refused is None and self.size > self._bodies.most:
            message = f"the body is larger than {self._bodies.most} bytes"
            self.refused = RequestError(message, status=413, code="body_too_large")
        elif self.refused is None and self.size > SHORT and self._bodies.held + len(part) > self._bodies.limit:
            message = f"other requests have sent {self._bodies.held} bytes that are not prepared yet; try again later"
            self.refused = RequestError(message, status=503, code="busy", retry_after=1)
        if self.refused is None:
            self._parts.append(part)
            self._hold(self.held + len(part))
        else:
            self._parts.clear()
            self._hold(0)

    def parts(self) -> list[bytes]:
        """All of it, which is given away. Raises RequestError."""
        if self.refused is not None:
            raise self.refused
        parts, self._parts = self._parts, []
        return parts

    def _hold(self, size: int) -> None:
        self._bodies.held += size - self.held
        self.held = size


class Bodies:
    """Those that are in flight: from their first byte until they are prepared. Touched by the event loop alone."""

    def __init__(self, max_body_bytes: int) -> None:
        self.most = max_body_bytes
        self.limit = BODIES * max(max_body_bytes, SHORT)
        self.held = 0  # bytes
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
        """`make(body, salt)`, in a thread."""
        parts = body.parts()

        def made() -> Result:
            whole = b"".join(parts)
            parts.clear()
            return make(whole, salt)

        return await asyncio.get_running_loop().run_in_executor(self._long if body.size > SHORT else self._short, made)


class Desk:
    """Makes work of bodies, for one engine."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, max_output_tokens: int | None) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.max_output_tokens = max_output_tokens

    def completion(self, body: bytes, salt: str) -> Prepared:
        """Raises RequestError, as `chat` does."""
        ask = parse(CompletionRequest, body)
        self.check_model(ask.model)
        self._check_number(len(ask.prompts()), ask.n or 1)
        prompts = [self._encoded(prompt) if isinstance(prompt, str) else prompt for prompt in ask.prompts()]
        if not all(prompts):
            raise RequestError("a prompt has no tokens", param="prompt")
        limit = self._max_tokens(prompts, ask.max_tokens, 16)  # OpenAI's default
        params = ask.sampling(max_tokens=limit, logprobs=ask.logprobs, json_schema=None)
        form = CompletionFormat(ask.model, self.tokenizer, logprobs=ask.logprobs is not None)
        return Prepared(ask, _work(ask, prompts, params, salt), form)

    def chat(self, body: bytes, salt: str) -> Prepared:
        if body.count(b'"role"') > MAX_MESSAGES:  # before they are parsed, which is dear
            raise RequestError(f"messages: a chat may have {MAX_MESSAGES:,} messages at most", param="messages")
        ask = parse(ChatRequest, body)
        self.check_model(ask.model)
        self._check_number(1, ask.n or 1)
        prompt = self._encoded(self._conversation(ask), special=False)
        limit = self._max_tokens([prompt], ask.max_completion_tokens or ask.max_tokens, self.engine.max_context)
        logprobs = (ask.top_logprobs or 0) if ask.logprobs else None
        schema = ask.output_schema()
        params = ask.sampling(max_tokens=limit, logprobs=logprobs, json_schema=schema, usual=self.engine.sampling)
        form = ChatFormat(
            ask.model,
            self.tokenizer,
            logprobs=logprobs is not None,
            functions=[function.name for function in ask.forced()],
            named=isinstance(ask.tool_choice, NamedTool),
            free=() if schema else tuple(tool.function.name for tool in ask.told()),
            most=1 if ask.parallel_tool_calls is False else None,
        )
        return Prepared(ask, _work(ask, [prompt], params, salt), form)

    def check_model(self, name: str) -> None:
        if name != self.engine.model_name:
            message = f"the model {name[:200]!r} does not exist; this server has {self.engine.model_name!r}"
            raise RequestError(message, status=404, param="model", code="model_not_found")

    def _conversation(self, ask: ChatRequest) -> str:
        messages = [message.for_template() for message in ask.messages]
        tools = [tool.model_dump(exclude_none=True) for tool in ask.told()] or None
        try:
            text = self.tokenizer.chat(messages, tools=tools)
        except (ValueError, RecursionError) as error:
            raise RequestError(str(error), param="messages") from None
        if tools and not ask.forced() and not self.tokenizer.tells_tools:
            name = self.engine.model_name
            message = f"the chat template of {name} does not tell the model of tools, so that it would call none"
            message += '; force a call by a tool_choice of "required" or of a function: it has the function\'s schema all the same'
            raise RequestError(message, param="tools", code="unsupported_parameter")
        return text

    def _encoded(self, text: str, *, special: bool = True) -> list[int]:
        most = self.engine.max_context
        try:
            return self.tokenizer.encode(text, special=special, most=most)
        except TooLongError:
            message = f"the model's context is {most} tokens; the prompt has many more, which leaves no room for an answer"
            raise RequestError(message, code="context_length_exceeded") from None

    def _max_tokens(self, prompts: Sequence[Sequence[int]], asked: int | None, default: int) -> int:
        longest = max(map(len, prompts))
        room = self.engine.max_context - longest
        if room < 1 or (asked or 1) > room:
            message = f"the model's context is {self.engine.max_context} tokens; the prompt has {longest}"
            message += f" and max_tokens is {asked}" if asked else ", which leaves no room for an answer"
            raise RequestError(message, param="max_tokens" if room >= 1 else None, code="context_length_exceeded")
        limit = self.max_output_tokens or room
        if asked is not None and asked > limit:
            raise RequestError(f"max_tokens is {asked}; this server generates at most {limit} per request", param="max_tokens")
        return asked or min(default, limit, room)

    def _check_number(self, prompts: int, n: int) -> None:
        if prompts * n > MAX_SEQUENCES:
            raise RequestError(f"{prompts} prompts times n = {n} is more than {MAX_SEQUENCES}", param="n")


def _work(ask: Sampled, prompts: Sequence[Sequence[int]], params: Any, salt: str) -> Work:
    """`salt`: the client's; with what the request adds to it."""
    return Work(prompts=prompts, params=params, n=ask.n or 1, priority=ask.priority or 0, salt=f"{salt}:{ask.cache_salt or ''}")

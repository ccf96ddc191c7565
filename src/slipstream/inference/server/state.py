"""State that the routes of one server share (models, limits, counters), and the path from a body to a response."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from starlette.requests import Request
from starlette.responses import Response

from slipstream.inference.core import SamplingParams, Target
from slipstream.inference.engine import ClosedError, FailedError
from slipstream.inference.server.answers import Format
from slipstream.inference.server.bodies import HealthBody, ModelBody
from slipstream.inference.server.errors import RequestError
from slipstream.inference.server.gate import JSON
from slipstream.inference.server.generation import Answer, Compiling, Deadlines, Unread, Work
from slipstream.inference.server.metrics import ModelFigures, Traffic
from slipstream.inference.server.prepare import Bodies, Body, Result
from slipstream.inference.server.requests import MAX_SEQUENCES, Fields, RequestT, SampledFields, parse, shown
from slipstream.inference.server.router import Served
from slipstream.inference.text import Tokenizer, TooLongError

logger = logging.getLogger(__name__)

MAX_HEADER = 1000  # characters of the field names in a response's header
MAX_ENTRIES = 200_000  # about the prompts' tokens, in one response; 8,192 tokens with 20 alternatives each are 172,032
MAX_IDS = 1_000_000  # of the prompts' tokens, in one response; about 7 MB
MAX_LOGGED = 1000  # fields without effect that are logged, each once


def check_entries(num: int, param: str, most: int = MAX_ENTRIES) -> None:
    """Raise RequestError if `param` adds too many entries about the prompts' tokens to a response, which has them per choice."""
    if num > most:
        message = f"{param}: the response would have {num:,} entries about the prompts' tokens, at most {most:,} are served"
        remedy = "send shorter or fewer prompts, or a lower n or number of logprobs, or leave out echo or return_token_ids"
        raise RequestError(f"{message}; {remedy}", param=param)


class Caller(NamedTuple):
    tenant: str  # a digest of the API key; "" without keys
    salt: str  # for the prefix cache
    prioritizes: bool  # whether `priority` has an effect


class Prepared(NamedTuple):
    request: SampledFields
    work: Work
    form: Format
    ignored: Sequence[str]  # fields without effect


class Choice(Protocol):
    """The models of a server."""

    async def pick(self, front: Front, request: Request, body: Body) -> Serving:
        """The model of a request whose body has arrived. Raises RequestError."""
        ...

    def listed(self) -> list[ModelBody]:
        """The models and their adapters."""
        ...

    def health(self) -> HealthBody: ...

    async def figures(self) -> Sequence[ModelFigures]: ...


@dataclass(frozen=True, kw_only=True)
class Front:
    """State that the routes of one server share."""

    models: Choice
    max_output_tokens: int | None  # per sequence; None: the context
    request_timeout_s: float  # time to generate the response
    body_timeout_s: float  # time to receive the body
    traffic: Traffic
    deadlines: Deadlines
    unread: Unread
    compiling: Compiling
    bodies: Bodies
    share_prefixes: bool
    strict_fields: bool  # fields without effect are rejected
    lora_root: Path | None = None  # folder of adapters that clients may load; None: they may not
    logged: set[str] = field(default_factory=set)  # fields without effect that were logged

    def serving(self, engine: Served) -> Serving:
        """Raises ValueError if the engine has no tokenizer."""
        if engine.tokenizer is None:
            raise ValueError(f"{engine.model_name} has no tokenizer, which the server needs; add --tokenizer FOLDER")
        return Serving(engine=engine, tokenizer=engine.tokenizer, front=self)

    async def answer(
        self, request: Request, kind: type[RequestT], prepare: Callable[[Serving, RequestT, Caller], Prepared]
    ) -> Response:
        """Receive the body, prepare it outside the event loop, and return the response that runs it."""
        tenant, prioritizes = request.state.tenant, request.state.prioritizes
        caller = Caller(tenant, "" if self.share_prefixes else tenant, prioritizes)

        def make(server: Serving, body: bytes) -> tuple[Served, Prepared]:
            return server.engine, prepare(server, server.parsed(kind, body), caller)

        engine, prepared = await self.receive(request, make)
        return Answer(self, engine, prepared, request.state.arrived)

    async def respond(
        self, request: Request, kind: type[RequestT], compute: Callable[[Serving, RequestT], tuple[Any, Sequence[str]]]
    ) -> Response:
        """Receive the body and respond with what `compute` returns, beside known fields without effect. Raises as `ignored`."""

        def make(server: Serving, body: bytes) -> tuple[Response, list[str]]:
            given = server.parsed(kind, body)
            result, unread = compute(server, given)
            return JSON(result), self.ignored(given, unread)

        response, ignored = await self.receive(request, make)
        response.raw_headers += self.headers(ignored)
        return response

    async def compute(
        self, request: Request, prepare: Callable[[Serving, bytes], tuple[RequestT, Callable[[], Response]]]
    ) -> Response:
        """Receive the body. `prepare` turns it into the request and a function that makes the response. That function may take long
        and runs in a thread that no body needs. Raises RequestError as `ignored` does, and if the engine fails."""
        async with self.received(request, prepare) as (given, make):
            ignored = self.ignored(given)
            try:
                async with self.in_time():
                    response = await self.bodies.compute(make, request.state.tenant)
            except (FailedError, ClosedError) as error:
                raise RequestError.of(error) from None
        response.raw_headers += self.headers(ignored)
        return response

    def in_time(self) -> AbstractAsyncContextManager[None]:
        """A context that raises RequestError after the time limit of a response."""
        late = f"the request did not finish within {self.request_timeout_s:g} s"
        return self.deadlines.within(self.request_timeout_s, RequestError(late, status=504, code="timeout"))

    def adapter_root(self) -> Path:
        """The folder of adapters that clients may load. Raises RequestError if they may not."""
        if self.lora_root is None:
            raise RequestError("adapters are loaded at run time only if the server was started with --lora-root FOLDER", status=403)
        return self.lora_root

    async def receive(self, request: Request, make: Callable[[Serving, bytes], Result]) -> Result:
        """As `received`, but the body no longer counts as in flight."""
        async with self.received(request, make) as result:
            return result

    @asynccontextmanager
    async def received(self, request: Request, make: Callable[[Serving, bytes], Result]) -> AsyncIterator[Result]:
        """Receive the body and yield `make(its model, body)`, made in a worker thread. The body is in flight until then. Raises
        RequestError."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise RequestError(f"content-type is {kind[:100]!r}; it must be application/json", status=415)
        if (coding := request.headers.get("content-encoding", "").strip().lower()) not in ("", "identity"):
            raise RequestError(f"content-encoding is {coding[:100]!r}; send the body as it is", status=415)
        late = RequestError(f"the body did not arrive within {self.body_timeout_s:g} s", status=408)
        late.headers["Connection"] = "close"  # else the client could send the remaining bytes forever
        with self.bodies.arriving() as body:
            async with self.deadlines.within(self.body_timeout_s, late):
                await self._read(request, body)
            request.state.arrived = time.perf_counter()
            yield await self.bodies.prepare(partial(make, await self.models.pick(self, request, body)), body)

    async def _read(self, request: Request, body: Body) -> None:
        # Rejected bodies are drained up to this size, because many clients read no response before they have sent everything. A
        # client that waits for 100-continue has sent nothing.
        drained = (1 if "100-continue" in request.headers.get("expect", "").lower() else 8) * self.bodies.max_bytes
        if (announced := request.headers.get("content-length", "")).isdecimal() and int(announced) > drained:
            raise body.too_large()
        async for part in request.stream():
            body.add(part)
            if body.size > drained:
                break

    def ignored(self, request: Fields, more: Iterable[str] = ()) -> list[str]:
        """The fields without effect; `more` are known ones. With `strict_fields`, raises RequestError if there are any."""
        known = {".".join(place): is_label for place, is_label in request.ignored()}
        names = sorted({*more, *known})
        if self.strict_fields and names:
            label = known.get(names[0], True)
            message = f"{shown(names[0])}: " + ("this field is not supported; leave it out" if label else "unknown field")
            raise RequestError(message, param=shown(names[0]), code="unsupported_parameter" if label else "unknown_parameter")
        return names

    def headers(self, ignored: Sequence[str]) -> list[tuple[bytes, bytes]]:
        """The response header that names the fields without effect; each is also logged once."""
        names = [shown(name) for name in ignored]
        if new := [name for name in names if name not in self.logged][: MAX_LOGGED - len(self.logged)]:
            self.logged.update(new)
            logger.warning("fields of requests that have no effect here: %s", ", ".join(new))
        return [(b"x-slipstream-ignored", ", ".join(names)[:MAX_HEADER].strip().encode())] if names else []


@dataclass(frozen=True, kw_only=True)
class Serving:
    """One model of a server, for one request."""

    engine: Served
    tokenizer: Tokenizer
    front: Front

    def prepared(
        self,
        request: SampledFields,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        form: Format,
        caller: Caller,
        *,
        n: int,
        constraint: str,
        ignored: Sequence[str] = (),
    ) -> Prepared:
        """`constraint`: the field that constrains the output, if any. Raises RequestError as `Front.ignored` does."""
        names = self.front.ignored(request, ignored)
        if params.prompt_logprobs is not None:
            check_entries(sum(map(len, prompts)) * n * (1 + params.prompt_logprobs), "prompt_logprobs")
        names += ["priority"] if request.priority and not caller.prioritizes else []
        work = Work(
            prompts=prompts,
            params=params,
            n=n,
            priority=(request.priority or 0) if caller.prioritizes else 0,
            target=Target(request.first_within, request.wait_within),
            salt=f"{caller.salt}:{request.cache_salt or ''}",
            tenant=caller.tenant,
            # Kept even if the adapter was unloaded since the check: the model alone must not answer in its name.
            adapter="" if request.model in (None, self.engine.model_name) else request.model,
            constraint=constraint,
            whole=not request.stream,
        )
        return Prepared(request, work, form, names)

    def parsed(self, kind: type[RequestT], body: bytes) -> RequestT:
        """Parse the request. Raises RequestError, also for another model's name."""
        given: Any = parse(kind, body)
        served = (self.engine.model_name, *self.engine.adapters)
        if "model" in kind.model_fields and given.model is not None and given.model not in served:
            raise not_found(given.model, served)
        return given

    def check_number(self, prompts: int, n: int) -> None:
        if prompts * n > MAX_SEQUENCES:
            raise RequestError(f"{prompts} prompts x n ({n}) is more than {MAX_SEQUENCES} sequences", param="n")

    def encode(
        self,
        text: str | list[int],
        param: str,
        *,
        special: bool = True,
        cut: tuple[int, str] | None = None,
        most: int | None = None,
    ) -> list[int]:
        """The tokens of a text, or tokens as they are, without those that `cut` cuts off (`SampledFields.cut`). `param`: the field
        that holds the text. Raises RequestError if the text is longer than the context, or has many more tokens than `most`."""
        kept, side = cut or (None, "")
        if not isinstance(text, str):
            return text[-kept:] if kept is not None and side == "left" else text[:kept]
        if kept is not None:
            return self.tokenizer.cut(text, kept, side, special=special)
        context = self.engine.max_context
        try:
            return self.tokenizer.encode(text, special=special, max_tokens=most or context)
        except TooLongError:
            if most is not None:
                raise RequestError(f"the text has more than {most:,} tokens; send it in parts", param=param) from None
            message = f"the model's context is {context} tokens and the prompt is longer; shorten it"
            raise RequestError(message, param=param, code="context_length_exceeded") from None

    def max_tokens(self, prompts: Sequence[Sequence[int]], requested: int | None, default: int, param: str) -> int:
        """The output's limit: `requested`, or at most `default`. Raises RequestError."""
        longest, limit = max(map(len, prompts)), self.front.max_output_tokens
        free = self.engine.max_context - longest
        if free < 1 or (requested or 1) > free:
            message = f"the model's context is {self.engine.max_context} tokens; the prompt has {longest}"
            message += f" and max_tokens is {requested}" if requested else ", which leaves none for the output; shorten it"
            raise RequestError(message, param="max_tokens" if free >= 1 else param, code="context_length_exceeded")
        if requested is not None and requested > (limit or free):
            raise RequestError(f"max_tokens is {requested}; this server generates at most {limit} per request", param="max_tokens")
        return max(1, requested) if requested is not None else min(default, limit or free, free)


def not_found(name: str, served: Iterable[str]) -> RequestError:
    message = f"the model {name[:200]!r} does not exist; this server serves {', '.join(map(repr, served))}"[:1000]
    return RequestError(message, status=404, param="model", code="model_not_found")


def body_of(engine: Served, created: int) -> ModelBody:
    """`created`: when serving began."""
    return {
        "id": engine.model_name,
        "object": "model",
        "created": created,
        "owned_by": "slipstream",
        "root": engine.model_name,
        "max_model_len": engine.max_context,
        "sampling": dict(engine.sampling),
    }


def adapter_of(model: ModelBody, name: str) -> ModelBody:
    return {**model, "id": name, "parent": model["id"]}

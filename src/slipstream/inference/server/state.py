"""What the routes of one server share: the engine, the limits, the counters; and the way from a body to an answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from slipstream.inference.core import SamplingParams
from slipstream.inference.server.answers import Format
from slipstream.inference.server.bodies import ModelBody
from slipstream.inference.server.errors import RequestError
from slipstream.inference.server.generation import Answer, Compiling, Deadlines, Work
from slipstream.inference.server.metrics import Traffic
from slipstream.inference.server.prepare import Bodies, Body, Result
from slipstream.inference.server.requests import LABELS, MAX_SEQUENCES, SampledFields, shown, without_effect
from slipstream.inference.server.router import Served
from slipstream.inference.text import Tokenizer, TooLongError

logger = logging.getLogger(__name__)

MAX_HEADER = 1000  # characters of the names of fields in a response's header
MAX_SCORES = 200_000  # entries of one response; 8,192 tokens with 20 alternatives each are 172,032
MAX_LOGGED = 1000  # fields without effect that are logged, each once


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on one request."""

    max_body_bytes: int
    max_output_tokens: int | None  # None: the context
    request_timeout_s: float  # to generate the response
    body_timeout_s: float  # to receive the body
    schema_timeout_s: float  # to compile a JSON schema


def check_scores(num: int) -> None:
    """Raise RequestError for too many log-probabilities of prompts: each is an object of the response, repeated for each choice."""
    if num > MAX_SCORES:
        message = f"the log-probabilities of the prompts' tokens are {num:,} entries, at most {MAX_SCORES:,} are served"
        raise RequestError(
            f"{message}; send shorter or fewer prompts, a lower prompt_logprobs (logprobs with echo), or n=1",
            param="prompt_logprobs",
        )


class Caller(NamedTuple):
    """Who sent a request."""

    tenant: str  # a digest of the API key; "" without keys
    salt: str  # of the prefix cache
    prioritizes: bool  # `priority` has an effect


class Prepared(NamedTuple):
    request: SampledFields
    work: Work
    form: Format
    ignored: Sequence[str]  # fields without effect


@dataclass(frozen=True, kw_only=True)
class Serving:
    engine: Served
    tokenizer: Tokenizer
    limits: Limits
    traffic: Traffic
    deadlines: Deadlines
    compiling: Compiling
    bodies: Bodies
    model: ModelBody
    share_prefixes: bool
    strict_fields: bool  # fields without effect are refused
    lora_root: Path | None = None  # of the adapters that clients may load; None: they may not
    logged: set[str] = field(default_factory=set)  # fields without effect that are in the log

    async def answer(self, request: Request, prepare: Callable[[Serving, bytes, Caller], Prepared]) -> Response:
        """Receive the body, prepare it outside the event loop, and return the response that runs it."""
        tenant, prioritizes = request.state.tenant, request.state.prioritizes
        caller = Caller(tenant, "" if self.share_prefixes else tenant, prioritizes)
        prepared = await self.receive(request, lambda body: prepare(self, body, caller))
        options = prepared.request.stream_options
        return Answer(
            self.engine,
            prepared.work,
            prepared.form,
            traffic=self.traffic,
            compiling=self.compiling,
            deadlines=self.deadlines,
            stream=bool(prepared.request.stream),
            include_usage=options is not None and bool(options.include_usage),
            timeout_s=self.limits.request_timeout_s,
            headers=self.headers(prepared.ignored),
        )

    async def receive(self, request: Request, make: Callable[[bytes], Result]) -> Result:
        """Receive the body and return `make(body)`, which runs in a worker thread. Raises RequestError."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise RequestError(f"content-type is {kind[:100]!r}; it must be application/json", status=415)
        late = RequestError(f"the body did not arrive within {self.limits.body_timeout_s:g} s", status=408)
        late.headers["Connection"] = "close"  # else the client could send the remaining bytes forever
        with self.bodies.arriving() as body:
            async with self.deadlines.within(self.limits.body_timeout_s, late):
                await self._read(request, body)
            return await self.bodies.prepare(make, body)

    async def _read(self, request: Request, body: Body) -> None:
        async for part in request.stream():
            body.add(part)
            if body.size > 8 * self.limits.max_body_bytes:
                break  # rejected bodies are drained up to this size: many clients read no response before they have sent all

    def prepared(
        self,
        request: SampledFields,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        form: Format,
        caller: Caller,
        *,
        n: int,
        ignored: Sequence[str] = (),
    ) -> Prepared:
        """Raises RequestError as `refuse` does."""
        names = sorted({*ignored, *without_effect(request)})
        self.refuse(names, without_effect(request))
        if params.prompt_logprobs is not None:
            check_scores(sum(map(len, prompts)) * n * (1 + params.prompt_logprobs))
        names += ["priority"] if request.priority and not caller.prioritizes else []
        work = Work(
            prompts=prompts,
            params=params,
            n=n,
            priority=(request.priority or 0) if caller.prioritizes else 0,
            salt=f"{caller.salt}:{request.cache_salt or ''}",
            tenant=caller.tenant,
            adapter=request.model if request.model in self.engine.adapters else "",
        )
        return Prepared(request, work, form, names)

    def refuse(self, names: Sequence[str], unknown: Sequence[str]) -> None:
        """With `strict_fields`, raise RequestError for a field without effect, unknown if it is in `unknown` and no label."""
        if self.strict_fields and names:
            label = names[0] not in unknown or names[0] in LABELS
            message = f"{shown(names[0])}: " + ("this OpenAI field is not supported; leave it out" if label else "unknown field")
            raise RequestError(message, param=shown(names[0]), code="unsupported_parameter" if label else "unknown_parameter")

    def headers(self, ignored: Sequence[str]) -> list[tuple[bytes, bytes]]:
        """Name the fields without effect: in the response's header, and each once in the log."""
        names = [shown(name) for name in ignored]
        if new := [name for name in names if name not in self.logged][: MAX_LOGGED - len(self.logged)]:
            self.logged.update(new)
            logger.warning("fields of requests that have no effect here: %s", ", ".join(new))
        return [(b"x-slipstream-ignored", ", ".join(names)[:MAX_HEADER].strip().encode())] if names else []

    def respond(self, response: Response, ignored: Sequence[str]) -> Response:
        """Of a request whose fields without effect are all unknown ones or labels. Raises RequestError as `refuse` does."""
        self.refuse(ignored, ignored)
        response.raw_headers += self.headers(ignored)
        return response

    def check_model(self, name: str) -> None:
        served = (self.engine.model_name, *self.engine.adapters)
        if name not in served:
            message = f"the model {name[:200]!r} does not exist; this server serves {', '.join(map(repr, served))}"[:1000]
            raise RequestError(message, status=404, param="model", code="model_not_found")

    def described(self, name: str) -> ModelBody:
        """The model, or its adapter of that name."""
        return self.model if name == self.engine.model_name else {**self.model, "id": name, "parent": self.engine.model_name}

    def check_number(self, prompts: int, n: int) -> None:
        if prompts * n > MAX_SEQUENCES:
            raise RequestError(f"{prompts} prompts x n ({n}) is more than {MAX_SEQUENCES} sequences", param="n")

    def encode(self, text: str, param: str, *, special: bool = True) -> list[int]:
        """`param`: the field that the text is of. Raises RequestError if it is longer than the context."""
        context = self.engine.max_context
        try:
            return self.tokenizer.encode(text, special=special, max_tokens=context)
        except TooLongError:
            message = f"the model's context is {context} tokens and the prompt is longer; shorten it"
            raise RequestError(message, param=param, code="context_length_exceeded") from None

    def max_tokens(self, prompts: Sequence[Sequence[int]], requested: int | None, default: int, param: str) -> int:
        """Of the output: `requested`, or at most `default`. Raises RequestError."""
        longest, limit = max(map(len, prompts)), self.limits.max_output_tokens
        free = self.engine.max_context - longest
        if free < 1 or (requested or 1) > free:
            message = f"the model's context is {self.engine.max_context} tokens; the prompt has {longest}"
            message += f" and max_tokens is {requested}" if requested else ", which leaves none for the output; shorten it"
            raise RequestError(message, param="max_tokens" if free >= 1 else param, code="context_length_exceeded")
        if requested is not None and requested > (limit or free):
            raise RequestError(f"max_tokens is {requested}; this server generates at most {limit} per request", param="max_tokens")
        return max(1, requested) if requested is not None else min(default, limit or free, free)

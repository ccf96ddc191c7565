"""The HTTP application: OpenAI's API over one engine, /health, /metrics and the chat page.

A request's way: `gate` (keys, draining) -> its route here, which reads and parses the body (`protocol`) and makes tokens of it ->
`generation`, which runs it and writes the answer in one of the two formats of `answers`.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import time
from collections.abc import Sequence
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from slipstream.inference.server.answers import ChatFormat, CompletionFormat, Format
from slipstream.inference.server.backend import Engine
from slipstream.inference.server.gate import JSON, Gate, refusal
from slipstream.inference.server.generation import Answer, Compiling, Deadlines, Work
from slipstream.inference.server.metrics import CONTENT_TYPE, Traffic, render
from slipstream.inference.server.protocol import (
    MAX_SEQUENCES,
    ChatBody,
    ChatRequest,
    CompletionBody,
    CompletionRequest,
    ErrorBody,
    HealthBody,
    ModelBody,
    ModelList,
    NamedTool,
    RequestError,
    Sampled,
    parse,
)

_ASKED: tuple[type[Sampled], ...] = (CompletionRequest, ChatRequest)
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text}
    for status, text in {
        400: "Bad request",
        401: "No valid API key",
        404: "No such model",
        408: "The body did not arrive in time",
        413: "Body too large",
        415: "Not JSON",
        429: "The queue is full",
        500: "The generation failed",
        503: "Shutting down",
        504: "Not done within the time limit",
    }.items()
}


def create_app(
    engine: Engine,
    *,
    api_keys: Sequence[str] = (),
    max_body_bytes: int = 4 << 20,
    max_output_tokens: int | None = None,
    request_timeout_s: float = 600.0,
    body_timeout_s: float = 30.0,
    schema_timeout_s: float = 10.0,
) -> FastAPI:
    """`app.state.traffic.draining = True` makes it refuse new generations, `app.state.deadlines.stop()` ends those that run with an
    error. `max_output_tokens` bounds a request's max_tokens,
    `request_timeout_s` how long its answer may take, `body_timeout_s` its body to arrive and `schema_timeout_s` its JSON schema
    to be compiled."""
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise ValueError(f"{engine.model_name} has no tokenizer, and what a server gets and gives is text: add --tokenizer FOLDER")
    if isinstance(api_keys, str) or not all(api_keys):
        raise ValueError("api_keys has to be a sequence of keys, none of them empty")
    traffic = Traffic()
    compiling = Compiling(schema_timeout_s)
    deadlines = Deadlines()
    created = int(time.time())
    page, policy = _page()
    # No /docs: FastAPI's pages load their code from elsewhere.
    app = FastAPI(title="Slipstream", docs_url=None, redoc_url=None, responses={status: _ERRORS[status] for status in (401, 500)})
    app.state.traffic, app.state.deadlines = traffic, deadlines
    app.add_middleware(Gate, api_keys=tuple(api_keys), traffic=traffic)

    def model() -> ModelBody:
        return {
            "id": engine.model_name,
            "object": "model",
            "created": created,
            "owned_by": "slipstream",
            "max_model_len": engine.max_context,
            "sampling": dict(engine.sampling),
        }

    def check_model(name: str) -> None:
        if name != engine.model_name:
            message = f"the model {name[:200]!r} does not exist; this server has {engine.model_name!r}"
            raise RequestError(message, status=404, param="model", code="model_not_found")

    def max_tokens(prompts: Sequence[Sequence[int]], asked: int | None, default: int) -> int:
        longest = max(map(len, prompts))
        room = engine.max_context - longest
        if room < 1 or (asked or 1) > room:
            message = f"the model's context is {engine.max_context} tokens; the prompt has {longest}"
            message += f" and max_tokens is {asked}" if asked else ", which leaves no room for an answer"
            raise RequestError(message, param="max_tokens" if room >= 1 else None, code="context_length_exceeded")
        limit = max_output_tokens or room
        if asked is not None and asked > limit:
            raise RequestError(f"max_tokens is {asked}; this server generates at most {limit} per request", param="max_tokens")
        return asked or min(default, limit, room)

    def check_number(prompts: int, n: int) -> None:
        if prompts * n > MAX_SEQUENCES:
            raise RequestError(f"{prompts} prompts times n = {n} is more than {MAX_SEQUENCES}", param="n")

    async def read(request: Request) -> bytes:
        late = RequestError(f"the body did not arrive within {body_timeout_s:g} s", status=408)
        late.headers["Connection"] = "close"  # else the rest could drip in for ever
        async with deadlines.within(body_timeout_s, late):
            return await _read(request, max_body_bytes)

    def answer(ask: Sampled, work: Work, form: Format) -> Response:
        usage = ask.stream_options is not None and bool(ask.stream_options.include_usage)
        return Answer(
            engine,
            work,
            form,
            traffic=traffic,
            compiling=compiling,
            deadlines=deadlines,
            stream=bool(ask.stream),
            include_usage=usage,
            timeout_s=request_timeout_s,
        )

    @app.post("/v1/completions", responses=_answers(CompletionBody), openapi_extra=_body("CompletionRequest"))
    async def completions(request: Request) -> Response:
        ask = await asyncio.to_thread(parse, CompletionRequest, await read(request))
        check_model(ask.model)
        check_number(len(ask.prompts()), ask.n or 1)
        prompts = [
            await asyncio.to_thread(tokenizer.encode, prompt) if isinstance(prompt, str) else prompt for prompt in ask.prompts()
        ]
        if not all(prompts):
            raise RequestError("a prompt has no tokens", param="prompt")
        limit = max_tokens(prompts, ask.max_tokens, 16)  # OpenAI's default
        params = ask.sampling(max_tokens=limit, logprobs=ask.logprobs, json_schema=None)
        work = Work(prompts=prompts, params=params, n=ask.n or 1, priority=ask.priority or 0)
        return answer(ask, work, CompletionFormat(ask.model, tokenizer, logprobs=ask.logprobs is not None))

    @app.post("/v1/chat/completions", responses=_answers(ChatBody), openapi_extra=_body("ChatRequest"))
    async def chat(request: Request) -> Response:
        ask = await asyncio.to_thread(parse, ChatRequest, await read(request))
        check_model(ask.model)
        check_number(1, ask.n or 1)
        messages = [message.for_template() for message in ask.messages]
        tools = [tool.model_dump(exclude_none=True) for tool in ask.told()] or None
        try:
            text = await asyncio.to_thread(tokenizer.chat, messages, tools=tools)
        except (ValueError, RecursionError) as error:
            raise RequestError(str(error), param="messages") from None
        if tools and not ask.forced() and not tokenizer.tells_tools:
            message = f"the chat template of {engine.model_name} does not tell the model of tools, so that it would call none"
            message += '; force a call by a tool_choice of "required" or of a function: it has the function\'s schema all the same'
            raise RequestError(message, param="tools", code="unsupported_parameter")
        prompt = await asyncio.to_thread(tokenizer.encode, text, special=False)
        limit = max_tokens([prompt], ask.max_completion_tokens or ask.max_tokens, engine.max_context)
        logprobs = (ask.top_logprobs or 0) if ask.logprobs else None
        params = ask.sampling(max_tokens=limit, logprobs=logprobs, json_schema=ask.output_schema(), usual=engine.sampling)
        free = () if ask.output_schema() else tuple(tool.function.name for tool in ask.told())
        form = ChatFormat(
            ask.model,
            tokenizer,
            logprobs=logprobs is not None,
            functions=[function.name for function in ask.forced()],
            named=isinstance(ask.tool_choice, NamedTool),
            free=free,
            most=1 if ask.parallel_tool_calls is False else None,
        )
        return answer(ask, Work(prompts=[prompt], params=params, n=ask.n or 1, priority=ask.priority or 0), form)

    @app.get("/v1/models", responses={200: {"model": ModelList}})
    async def models() -> Response:
        return JSON({"object": "list", "data": [model()]})

    # The name is not a parameter of the function: FastAPI would document its own form of error for it, which nothing here has.
    @app.get(
        "/v1/models/{name:path}",
        responses={200: {"model": ModelBody}, 404: _ERRORS[404]},
        openapi_extra={"parameters": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]},
    )
    async def one_model(request: Request) -> Response:
        check_model(request.path_params["name"])
        return JSON(model())

    @app.head("/health", include_in_schema=False)
    @app.get(
        "/health",
        responses={200: {"model": HealthBody}, 503: {"model": HealthBody, "description": "Draining or failed"}},
        openapi_extra={"security": []},
    )
    async def health() -> Response:
        status = "draining" if traffic.draining else "ok" if engine.healthy else "failed"
        return JSON({"status": status}, status_code=200 if status == "ok" else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return PlainTextResponse(render(engine.stats(), traffic), media_type=CONTENT_TYPE)

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def chat_page() -> Response:
        headers = {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
        return HTMLResponse(page, headers=headers)

    @app.exception_handler(RequestError)
    async def request_error(request: Request, error: RequestError) -> Response:
        return refusal(error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        """No such path, or a method that it does not have."""
        said = RequestError(f"{request.method} {request.url.path[:200]}: {error.detail}", status=error.status_code)
        said.headers |= error.headers or {}
        return refusal(said)

    @app.exception_handler(ClientDisconnect)
    async def left(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # nobody reads it; nginx's number for it, in the counts

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = get_openapi(title=app.title, version="1", routes=app.routes)
            asked = models_json_schema([(kind, "validation") for kind in _ASKED], ref_template="#/components/schemas/{model}")[1]
            app.openapi_schema["components"]["schemas"] |= asked["$defs"]
            if api_keys:
                app.openapi_schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
                app.openapi_schema["security"] = [{"key": []}]
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign] # FastAPI's documented way
    return app


def _answers(whole: type) -> dict[int | str, dict[str, Any]]:
    data = {"type": "string", "description": 'A chunk as JSON, {"error": ...}, or [DONE].'}
    # Where stream is true. A schema is of each event, as what reads OpenAPI 3.1 takes it.
    events = {"schema": {"type": "object", "properties": {"data": data}, "required": ["data"]}}
    return {200: {"model": whole, "content": {"text/event-stream": events}}, **_ERRORS}


def _body(name: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


async def _read(request: Request, limit: int) -> bytes:
    """The body. Raises RequestError."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError(f"content-type is {kind[:100]!r}; it has to be application/json", status=415)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size <= limit:
            parts.append(part)
        elif size > 8 * limit:
            break  # a little more than the limit is read and dropped: many clients read no answer before they have sent all
    if size > limit:
        raise RequestError(f"the body is larger than {limit} bytes", status=413, code="body_too_large")
    return b"".join(parts)


def _page() -> tuple[str, str]:
    """The chat page and its policy: of scripts and styles, only those in the page itself, known by their hashes."""
    page = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")

    def hashes(tag: str) -> str:
        blocks = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()}'" for block in blocks)

    policy = (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page, policy

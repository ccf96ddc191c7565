"""The HTTP application: OpenAI's API over one engine, /health, /metrics and the chat page.

A request passes through: `gate` (API keys, draining) -> its route here, which reads the body -> `prepare`, which parses it
(`protocol`) and tokenizes it in a worker thread -> `generation`, which runs it and writes the response in a format of `answers`.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from slipstream.inference.server.backend import ServedEngine
from slipstream.inference.server.gate import JSON, AdmissionGate, refusal
from slipstream.inference.server.generation import Answer, Compiling, Deadlines
from slipstream.inference.server.metrics import CONTENT_TYPE, Traffic, render
from slipstream.inference.server.prepare import Bodies, Body, Desk, Limits, Prepared
from slipstream.inference.server.protocol import (
    ChatBody,
    ChatRequest,
    CompletionBody,
    CompletionRequest,
    ErrorBody,
    HealthBody,
    ModelBody,
    ModelList,
    RequestError,
    Sampled,
)

_REQUESTS: tuple[type[Sampled], ...] = (CompletionRequest, ChatRequest)
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text}
    for status, text in {
        400: "Bad request",
        401: "Missing or invalid API key",
        404: "No such model",
        408: "The body did not arrive in time",
        413: "Body too large",
        415: "Content type is not application/json",
        429: "The queue is full",
        500: "Generation failed",
        503: "Shutting down or overloaded",
        504: "Request timed out",
    }.items()
}


def create_app(
    engine: ServedEngine,
    *,
    api_keys: Sequence[str] = (),
    share_prefixes: bool = False,
    max_body_bytes: int = 4 << 20,
    max_output_tokens: int | None = None,
    request_timeout_s: float = 600.0,
    body_timeout_s: float = 30.0,
    schema_timeout_s: float = 10.0,
) -> FastAPI:
    """Return the ASGI application over `engine`.

    `app.state.traffic.draining = True` rejects new generations; `app.state.deadlines.stop()` ends the running ones with an error.
    `share_prefixes` shares the prefix cache between API keys. `max_output_tokens` limits max_tokens. The timeouts limit
    generation (`request_timeout_s`), receiving the body (`body_timeout_s`) and compiling a JSON schema (`schema_timeout_s`).
    Raises ValueError if `api_keys` is not a sequence of non-empty keys, or if the engine has no tokenizer.
    """
    if isinstance(api_keys, str) or not all(api_keys):
        raise ValueError("api_keys must be a sequence of keys, none of them empty")
    limits = Limits(
        max_body_bytes=max_body_bytes,
        max_output_tokens=max_output_tokens,
        request_timeout_s=request_timeout_s,
        body_timeout_s=body_timeout_s,
        schema_timeout_s=schema_timeout_s,
    )
    routes = HttpRoutes(engine, limits, share_prefixes)
    # No /docs: FastAPI's pages load scripts from a CDN.
    app = FastAPI(title="Slipstream", docs_url=None, redoc_url=None, responses={status: _ERRORS[status] for status in (401, 500)})
    app.state.traffic, app.state.deadlines = routes.traffic, routes.deadlines
    app.add_middleware(AdmissionGate, api_keys=tuple(api_keys), traffic=routes.traffic)
    routes.add_to(app)
    _add_errors(app)
    app.openapi = partial(_document, app, bool(api_keys))  # type: ignore[method-assign] # FastAPI's documented way
    return app


class HttpRoutes:
    """The handlers of all paths, over one engine."""

    def __init__(self, engine: ServedEngine, limits: Limits, share_prefixes: bool) -> None:
        if engine.tokenizer is None:
            raise ValueError(f"{engine.model_name} has no tokenizer, which the server needs; add --tokenizer FOLDER")
        self.engine = engine
        self.limits = limits
        self.share_prefixes = share_prefixes
        self.traffic = Traffic()
        self.deadlines = Deadlines()
        self.compiling = Compiling(limits.schema_timeout_s)
        self.bodies = Bodies(limits.max_body_bytes)
        self.desk = Desk(engine, engine.tokenizer, limits.max_output_tokens)
        self.page, self.policy = _page()
        self.model: ModelBody = {
            "id": engine.model_name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "slipstream",
            "max_model_len": engine.max_context,
            "sampling": dict(engine.sampling),
        }

    def add_to(self, app: FastAPI) -> None:
        hidden: dict[str, Any] = {"include_in_schema": False}
        name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        health: dict[int | str, Any] = {200: {"model": HealthBody}, 503: {"model": HealthBody, "description": "Draining or failed"}}
        app.post("/v1/completions", responses=_responses(CompletionBody), openapi_extra=_body("CompletionRequest"))(
            self.completions
        )
        app.post("/v1/chat/completions", responses=_responses(ChatBody), openapi_extra=_body("ChatRequest"))(self.chat)
        app.get("/v1/models", responses={200: {"model": ModelList}})(self.models)
        # The name is not a parameter of the handler: FastAPI would document its own error format for it, which is not used here.
        one_model: dict[int | str, Any] = {200: {"model": ModelBody}, 404: _ERRORS[404]}
        app.get("/v1/models/{name:path}", responses=one_model, openapi_extra={"parameters": [name]})(self.one_model)
        app.get("/health", responses=health, openapi_extra={"security": []})(self.health)
        app.head("/health", **hidden)(self.health)
        app.get("/metrics", response_class=PlainTextResponse)(self.metrics)
        app.get("/", **hidden)(self.chat_page)
        app.head("/", **hidden)(self.chat_page)

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, self.desk.completion)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, self.desk.chat)

    async def models(self) -> Response:
        return JSON({"object": "list", "data": [self.model]})

    async def one_model(self, request: Request) -> Response:
        self.desk.check_model(request.path_params["name"])
        return JSON(self.model)

    async def health(self) -> Response:
        status = "draining" if self.traffic.draining else "ok" if self.engine.healthy else "failed"
        return JSON({"status": status}, status_code=200 if status == "ok" else 503)

    async def metrics(self) -> Response:
        return PlainTextResponse(render(self.engine.stats(), self.traffic), media_type=CONTENT_TYPE)

    async def chat_page(self) -> Response:
        headers = {"Content-Security-Policy": self.policy, "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
        return HTMLResponse(self.page, headers=headers)

    async def _answer(self, request: Request, make: Callable[[bytes, str], Prepared]) -> Response:
        salt = "" if self.share_prefixes else request.state.tenant
        with self.bodies.arriving() as body:
            await self._read(request, body)
            parsed, work, form = await self.bodies.prepare(make, body, salt)
        return Answer(
            self.engine,
            work,
            form,
            traffic=self.traffic,
            compiling=self.compiling,
            deadlines=self.deadlines,
            stream=bool(parsed.stream),
            include_usage=parsed.stream_options is not None and bool(parsed.stream_options.include_usage),
            timeout_s=self.limits.request_timeout_s,
        )

    async def _read(self, request: Request, body: Body) -> None:
        """Receive the body. Raises RequestError if it is not JSON or times out."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise RequestError(f"content-type is {kind[:100]!r}; it must be application/json", status=415)
        late = RequestError(f"the body did not arrive within {self.limits.body_timeout_s:g} s", status=408)
        late.headers["Connection"] = "close"  # else the client could send the remaining bytes forever
        async with self.deadlines.within(self.limits.body_timeout_s, late):
            async for part in request.stream():
                body.add(part)
                if body.size > 8 * self.limits.max_body_bytes:
                    break  # rejected bodies are drained up to this size: many clients read no response before they have sent all


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestError)
    async def request_error(request: Request, error: RequestError) -> Response:
        return refusal(error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        """An unknown path, or a method that the path does not have."""
        converted = RequestError(f"{request.method} {request.url.path[:200]}: {error.detail}", status=error.status_code)
        converted.headers |= error.headers or {}
        return refusal(converted)

    @app.exception_handler(ClientDisconnect)
    async def disconnected(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # never sent; nginx's status for a closed connection, for the metrics


def _document(app: FastAPI, needs_key: bool) -> dict[str, Any]:
    """The OpenAPI document."""
    if app.openapi_schema is None:
        app.openapi_schema = get_openapi(title=app.title, version="1", routes=app.routes)
        requests = models_json_schema([(kind, "validation") for kind in _REQUESTS], ref_template="#/components/schemas/{model}")[1]
        app.openapi_schema["components"]["schemas"] |= requests["$defs"]
        if needs_key:
            app.openapi_schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            app.openapi_schema["security"] = [{"key": []}]
    return app.openapi_schema


def _responses(body: type) -> dict[int | str, dict[str, Any]]:
    data = {"type": "string", "description": 'A chunk as JSON, {"error": ...}, or [DONE].'}
    # The response if stream is true. The schema describes one event, as OpenAPI 3.1 readers expect.
    events = {"schema": {"type": "object", "properties": {"data": data}, "required": ["data"]}}
    return {200: {"model": body, "content": {"text/event-stream": events}}, **_ERRORS}


def _body(name: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _page() -> tuple[str, str]:
    """The chat page and its Content-Security-Policy, which allows only the page's own script and style, by their hashes."""
    page = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")

    def hashes(tag: str) -> str:
        blocks = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()}'" for block in blocks)

    policy = (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page, policy

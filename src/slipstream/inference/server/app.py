"""The HTTP application: OpenAI's API over one engine or several models, /tokenize, /health, /metrics and the chat page.

The path of a request: `gate` (API keys, draining) -> its route, a function over the `Front` (`state`), which reads the body,
chooses the model, parses the body (`requests`) and tokenizes it in a worker thread -> `generation`, which runs it and writes the
response in a format of `answers`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse, Response

from slipstream.inference.server import adapters, chat, completions, embeddings, messages, responses, status, tokens
from slipstream.inference.server.bodies import (
    ChatBody,
    CompletionBody,
    CountBody,
    DeletedBody,
    EmbeddingsBody,
    HealthBody,
    LoadBody,
    MessageBody,
    ModelBody,
    ModelList,
    RerankBody,
    ResponsesBody,
    ScoreBody,
    TextBody,
    TokensBody,
    VersionBody,
)
from slipstream.inference.server.errors import ErrorBody, RequestError
from slipstream.inference.server.gate import AdmissionGate, check_origins, refusal
from slipstream.inference.server.generation import Compiling, Deadlines, Unread
from slipstream.inference.server.metrics import Traffic
from slipstream.inference.server.models import Models
from slipstream.inference.server.prepare import Bodies
from slipstream.inference.server.requests import Fields
from slipstream.inference.server.router import Served
from slipstream.inference.server.state import Front, Prepared
from slipstream.inference.wire import BEAT, SILENCE

Route = Callable[[Front, Request], Awaitable[Response]]
# Routes with a body: path, function, request and response type. A generation is prepared (`Front.answer`).
_ANSWERED: tuple[tuple[str, Callable[..., Prepared], type[Fields], Any], ...] = (
    ("/v1/completions", completions.prepare, completions.CompletionRequest, CompletionBody),
    ("/v1/chat/completions", chat.prepare, chat.ChatRequest, ChatBody),
    ("/v1/responses", responses.prepare, responses.ResponsesRequest, ResponsesBody),
    ("/v1/messages", messages.prepare, messages.MessagesRequest, MessageBody),
)
_POSTED: tuple[tuple[str, Route, type[Fields], Any], ...] = (
    *((path, partial(Front.answer, kind=kind, prepare=prepare), kind, body) for path, prepare, kind, body in _ANSWERED),
    ("/v1/messages/count_tokens", messages.count, messages.CountRequest, CountBody),
    ("/v1/embeddings", embeddings.embeddings, embeddings.EmbeddingRequest, EmbeddingsBody),
    *((path, embeddings.rerank, embeddings.RerankRequest, RerankBody) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
    *((path, embeddings.score, embeddings.ScoreRequest, ScoreBody) for path in ("/v1/score", "/score")),
    ("/v1/load_lora_adapter", adapters.load, adapters.LoadAdapterRequest, ModelBody),
    ("/v1/unload_lora_adapter", adapters.unload, adapters.UnloadAdapterRequest, DeletedBody),
    ("/tokenize", tokens.tokenize, tokens.TokenizeRequest, TokensBody),
    ("/detokenize", tokens.detokenize, tokens.DetokenizeRequest, TextBody),
)
_CORS: dict[str, Any] = {
    "allow_methods": ("GET", "POST"),
    "allow_headers": ("*",),
    "expose_headers": ("x-request-id", "x-slipstream-ignored"),
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorBody, "description": text}
    for code, text in {
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
    engine: Served | Models,
    *,
    api_keys: Sequence[str] = (),
    priority_keys: Sequence[str] = (),
    cors_origins: Sequence[str] = (),
    share_prefixes: bool = False,
    strict_fields: bool = False,
    lora_root: str | None = None,
    max_body_bytes: int = 4 << 20,
    max_output_tokens: int | None = None,
    request_timeout_s: float = 600.0,
    body_timeout_s: float = 30.0,
    schema_timeout_s: float = 1.5 * BEAT * SILENCE,  # a stopped engine is lost before, and another one compiles it
    read_timeout_s: float = 30.0,
) -> FastAPI:
    """Return the ASGI application over `engine`.

    `app.state.traffic.draining = True` rejects new generations; `app.state.deadlines.stop()` ends the running ones with an error.
    Only requests with one of `priority_keys` may set `priority`; with other keys it has no effect. Pages of `cors_origins` ("*":
    all) may send requests. `share_prefixes` shares the prefix cache between API keys. `strict_fields` rejects fields without
    effect. Clients may load adapters below `lora_root` (None: they may not). `max_output_tokens` limits max_tokens. The timeouts
    limit generation (`request_timeout_s`), receiving the body (`body_timeout_s`), compiling a JSON schema (`schema_timeout_s`) and
    the time in which a client reads 64 KiB (`read_timeout_s`). Raises ValueError if keys are not a sequence of non-empty strings,
    if an origin is invalid, or if the engine has no tokenizer.
    """
    for name, keys in (("api_keys", api_keys), ("priority_keys", priority_keys)):
        if isinstance(keys, str) or not all(keys):
            raise ValueError(f"{name} must be a sequence of keys, none of them empty")
    check_origins(cors_origins)
    front = Front(
        models=engine if isinstance(engine, Models) else status.OnlyModel(engine, int(time.time())),
        max_output_tokens=max_output_tokens,
        request_timeout_s=request_timeout_s,
        body_timeout_s=body_timeout_s,
        traffic=Traffic(),
        deadlines=Deadlines(),
        unread=Unread(read_timeout_s),
        compiling=Compiling(schema_timeout_s),
        bodies=Bodies(max_body_bytes),
        share_prefixes=share_prefixes,
        strict_fields=strict_fields,
        lora_root=None if lora_root is None else Path(lora_root).resolve(),
    )
    if not isinstance(engine, Models):
        front.serving(engine)  # checks the engine
    # No /docs: FastAPI's pages load scripts from a CDN.
    described: dict[int | str, Any] = {code: _ERRORS[code] for code in (401, 500)}
    app = FastAPI(title="Slipstream", docs_url=None, redoc_url=None, redirect_slashes=False, responses=described)
    app.state.traffic, app.state.deadlines = front.traffic, front.deadlines
    app.state.paths = _add_routes(app, front)
    app.add_middleware(AdmissionGate, paths=app.state.paths, api_keys=api_keys, priority_keys=priority_keys, traffic=front.traffic)
    if cors_origins:  # outside the gate, because a browser's preflight request carries no key
        app.add_middleware(CORSMiddleware, allow_origins=cors_origins, **_CORS)
    _add_errors(app)
    app.openapi = partial(_document, app, bool(api_keys or priority_keys))  # type: ignore[method-assign] # FastAPI's documented way
    return app


def _add_routes(app: FastAPI, front: Front) -> set[str]:
    """Returns their paths."""
    paths = set[str]()

    def add(method: str, path: str, route: Route, **documented: Any) -> None:
        async def handle(request: Request) -> Response:
            return await route(front, request)

        app.add_api_route(path, handle, methods=[method], **documented)
        paths.add(path)

    for path, route, request, response in _POSTED:
        streams = "stream" in request.model_fields
        add("POST", path, route, responses=_responses(response, streams), openapi_extra=_body(request.__name__))
    add("GET", "/v1/models", status.models, responses={200: {"model": ModelList}})
    # The name is not a parameter of the handler: FastAPI would document its own error format for it, which is not used here.
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    one_model: dict[int | str, Any] = {200: {"model": ModelBody}, 404: _ERRORS[404]}
    add("GET", "/v1/models/{name:path}", status.one_model, responses=one_model, openapi_extra={"parameters": [name]})
    unready: dict[str, Any] = {"model": HealthBody, "description": "Starting, draining or failed"}
    add("GET", "/health", status.health, responses={200: {"model": HealthBody}, 503: unready}, openapi_extra={"security": []})
    add("HEAD", "/health", status.health, include_in_schema=False)
    add("GET", "/load", status.load, responses={200: {"model": LoadBody}})
    add("GET", "/version", status.version, responses={200: {"model": VersionBody}})
    add("GET", "/metrics", status.metrics, response_class=PlainTextResponse)
    for method in ("GET", "HEAD"):
        add(method, "/", status.chat_page, include_in_schema=False)
    return paths


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
    if app.openapi_schema is None:
        app.openapi_schema = get_openapi(title=app.title, version="1", routes=app.routes)
        requests = models_json_schema(
            [(kind, "validation") for _, _, kind, _ in _POSTED], ref_template="#/components/schemas/{model}"
        )[1]
        app.openapi_schema["components"]["schemas"] |= requests["$defs"]
        if needs_key:
            app.openapi_schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            app.openapi_schema["security"] = [{"key": []}]
    return app.openapi_schema


def _responses(body: Any, streams: bool) -> dict[int | str, dict[str, Any]]:
    if not streams:
        return {200: {"model": body}, **_ERRORS}
    data = {"type": "string", "description": 'A chunk as JSON, {"error": ...}, or [DONE].'}
    # The response if stream is true. The schema describes one event, as OpenAPI 3.1 readers expect.
    events = {"schema": {"type": "object", "properties": {"data": data}, "required": ["data"]}}
    return {200: {"model": body, "content": {"text/event-stream": events}}, **_ERRORS}


def _body(name: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}

"""Spans of requests for OpenTelemetry: the extra `otlp`, used with `slipstream serve --otlp-traces`."""

from __future__ import annotations

import importlib
import re
from typing import Any

from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send

from slipstream.world.extras import needs


def check_collector(endpoint: str) -> None:
    """Raise ValueError unless spans can be sent to such a URL. A running collector is not required, because that may change."""
    if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", endpoint):
        raise ValueError(f"--otlp-traces is {endpoint!r}; it must be a URL such as http://localhost:4318/v1/traces")
    _exporters()


def _exporters() -> Any:
    """OpenTelemetry's module of exporters over HTTP. Raises MissingPackageError."""
    with needs("--otlp-traces", extra="otlp"):
        importlib.import_module("opentelemetry.sdk.trace.export")
        return importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")


class Traces:
    """ASGI middleware: a span per HTTP request, within the client's (`traceparent`) if it sent one.

    It has OpenTelemetry's attributes of an HTTP server, `slipstream.request_id`, and an event `first byte` for the response's body,
    which is the first token of a stream. Spans are sent to the collector in the background."""

    def __init__(self, app: FastAPI, endpoint: str) -> None:
        """`endpoint`: the URL of a collector's traces over HTTP, such as http://localhost:4318/v1/traces."""
        exporter = _exporters()
        sdk, export = (importlib.import_module(f"opentelemetry.sdk.trace{part}") for part in ("", ".export"))
        resources = importlib.import_module("opentelemetry.sdk.resources")
        self.trace: Any = importlib.import_module("opentelemetry.trace")
        self.propagate: Any = importlib.import_module("opentelemetry.propagate")
        self.app, self.paths = app, app.state.paths
        resource = resources.Resource.create({"service.name": "slipstream"})
        self.provider: Any = sdk.TracerProvider(resource=resource, shutdown_on_exit=False)
        self.provider.add_span_processor(export.BatchSpanProcessor(exporter.OTLPSpanExporter(endpoint=endpoint)))
        self.tracer: Any = self.provider.get_tracer("slipstream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        path = scope["path"] if scope["path"] in self.paths else "other"
        attributes = {"http.request.method": scope["method"], "http.route": path, "url.path": scope["path"]}
        with self.tracer.start_as_current_span(
            f"{scope['method']} {path}",
            context=self.propagate.extract(headers),
            kind=self.trace.SpanKind.SERVER,
            attributes=attributes,
        ) as span:
            has_body = False

            async def traced(message: Message) -> None:
                nonlocal has_body
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    span.set_attribute("slipstream.request_id", _request_id(message))
                    if message["status"] >= 500:
                        span.set_status(self.trace.StatusCode.ERROR)
                elif not has_body and message.get("body"):
                    has_body = True
                    span.add_event("first byte")
                await send(message)

            await self.app(scope, receive, traced)

    def close(self) -> None:
        self.provider.shutdown()


def _request_id(message: Message) -> str:
    return str(dict(message["headers"]).get(b"x-request-id", b"").decode("latin-1"))  # a CORS preflight has none

"""The middleware of every HTTP request: API keys, draining, metrics, unexpected exceptions; and the error response."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.inference.server.errors import RequestError
from slipstream.inference.server.metrics import Traffic

logger = logging.getLogger(__name__)

_OPEN = ("/", "/health")  # need no key: the page asks the user for one, and load balancers have none
_COUNTED = (
    "/",
    "/health",
    "/metrics",
    "/v1/models",
    "/v1/completions",
    "/v1/chat/completions",
    "/tokenize",
    "/detokenize",
)  # all others share one label


class JSON(Response):
    """Escapes all non-ASCII characters: some clients treat U+2028 in a stream as the end of a line."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode()


def refusal(error: RequestError) -> Response:
    return JSON(error.body(), status_code=error.status, headers=error.headers)


class AdmissionGate:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, *, api_keys: Sequence[str], traffic: Traffic) -> None:
        self.app = app
        self.keys = {key.encode(): hashlib.sha256(key.encode()).hexdigest() for key in api_keys}
        self.traffic = traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in _COUNTED else "other"

        started = False

        async def counted(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self.traffic.answers[path, message["status"]] += 1
                message["headers"] = [*message.get("headers", ()), (b"x-content-type-options", b"nosniff")]
            await send(message)

        generates = scope["method"] == "POST" and scope["path"].startswith("/v1/")
        self.traffic.active += generates
        try:
            await (self._refused(scope, generates) or self.app)(scope, receive, counted)
        except Exception:
            if started:
                raise  # uvicorn logs it and closes the connection; the status has been sent
            logger.exception("%s %s", scope["method"], path)
            await refusal(RequestError("internal error; see the server's log", status=500))(scope, receive, counted)
        finally:
            self.traffic.active -= generates

    def _refused(self, scope: Scope, generates: bool) -> Response | None:
        tenant = self._tenant(Headers(scope=scope).get("authorization", "")) if self.keys else ""
        scope.setdefault("state", {}).update(tenant=tenant, prioritizes=True)
        if tenant is None and scope["path"] not in _OPEN:
            error = RequestError("missing or invalid API key; send Authorization: Bearer KEY", status=401, code="invalid_api_key")
            error.headers["WWW-Authenticate"] = "Bearer"
            return refusal(error)
        if self.traffic.draining and generates:
            return refusal(RequestError("the server is shutting down", status=503, code="draining", retry_after=5))
        return None

    def _tenant(self, header: str) -> str | None:
        """The tenant of an Authorization header: a digest of its key, or None if the key is invalid."""
        scheme, _, sent = header.partition(" ")
        # Compare all keys, each in constant time: the duration must reveal nothing about them.
        pairs = self.keys.items()
        tenants = [tenant for key, tenant in pairs if hmac.compare_digest(sent.strip().encode("latin-1", "replace"), key)]
        return tenants[0] if tenants and scheme.lower() == "bearer" else None

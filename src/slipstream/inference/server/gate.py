"""The middleware of every HTTP request: its id, API keys, draining, metrics, access log, unexpected exceptions, error responses."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import time
import uuid
from collections.abc import Container, Sequence
from contextlib import ExitStack

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.inference.server.errors import RequestError
from slipstream.inference.server.metrics import Traffic

logger = logging.getLogger(__name__)
access = logging.getLogger("slipstream.access")  # one line per response, if INFO is enabled

_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)  # a client's id of this form is kept
# In a browser's form: without a path, and without the scheme's default port.
_ORIGIN = re.compile(r"\*|null|(?!http://.*:80$|https://.*:443$)[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")
_OPEN = ("/", "/health")  # no key needed: the page asks the user for one, and load balancers have none
_WORK = ("/v1/", "/v2/", "/rerank", "/score")  # prefixes of paths whose requests use the model


def check_origins(origins: Sequence[str]) -> None:
    """Raise ValueError for text that no browser would send as a page's origin."""
    for origin in [origins] if isinstance(origins, str) else origins:
        if not _ORIGIN.fullmatch(origin):
            raise ValueError(f"{origin!r} is no origin; write http://localhost:3000 (lower case, without a path), or *")


class JSON(Response):
    """Escapes all non-ASCII characters, because some clients treat U+2028 in a stream as a line break."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode()


def refusal(error: RequestError) -> Response:
    return JSON(error.body(), status_code=error.status, headers=error.headers)


class AdmissionGate:
    """ASGI middleware."""

    def __init__(
        self, app: ASGIApp, *, paths: Container[str], api_keys: Sequence[str], priority_keys: Sequence[str], traffic: Traffic
    ) -> None:
        """`paths`: those of the routes; all others share a label in the metrics. `priority_keys`: keys whose requests may set
        `priority`. Without any keys, all requests may."""
        self.app, self.paths = app, paths
        self.keys = {key.encode(): hashlib.sha256(key.encode()).hexdigest() for key in (*api_keys, *priority_keys)}
        self.prioritizing = {self.keys[key.encode()] for key in priority_keys} if self.keys else {""}
        self.traffic = traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        # Served, not redirected: a proxy's clients would be sent to an address that only the proxy knows.
        root = scope.get("root_path", "")  # of a mounted app: below it, "/" is the page
        scope = {**scope, "path": scope["path"].rstrip("/") if scope["path"].rstrip("/") != root else f"{root}/"}
        path = scope["path"] if scope["path"] in self.paths else "other"
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        status, start = 0, time.perf_counter()

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self.traffic.answers[path, status] += 1
                more = (b"x-content-type-options", b"nosniff"), (b"x-request-id", request_id.encode())
                message["headers"] = [*message.get("headers", ()), *more]
            await send(message)

        generates = scope["method"] == "POST" and scope["path"].startswith(_WORK)
        self.traffic.active += generates
        state = scope.setdefault("state", {})
        try:
            with ExitStack() as state["held"]:
                await (self._refused(scope, generates) or self.app)(scope, receive, counted)
        except Exception:
            if status:
                raise  # uvicorn logs it and closes the connection; the status is sent already
            logger.exception("%s %s (request %s)", scope["method"], path, request_id)
            await refusal(RequestError("internal error; see the server's log", status=500))(scope, receive, counted)
        finally:
            self.traffic.active -= generates
            seconds, tenant = time.perf_counter() - start, state["tenant"] or ""
            # Log the path as a literal, because it may hold line breaks, and the key by the beginning of its digest.
            model = f" model {state['model']}" if "model" in state else ""  # only with several models
            line = "%s %s %r %d %.3f s key %s%s"
            access.info(line, request_id, scope["method"], scope["path"][:200], status, seconds, tenant[:8] or "-", model)

    def _refused(self, scope: Scope, generates: bool) -> Response | None:
        tenant = self._tenant(Headers(scope=scope)) if self.keys else ""
        scope["state"].update(tenant=tenant, prioritizes=tenant in self.prioritizing)
        if tenant is None and scope["path"] not in _OPEN:
            error = RequestError("missing or invalid API key; send Authorization: Bearer KEY", status=401, code="invalid_api_key")
            error.headers["WWW-Authenticate"] = "Bearer"
            return refusal(error)
        if self.traffic.draining and generates:
            return refusal(RequestError("the server is shutting down", status=503, code="draining", retry_after=5))
        return None

    def _tenant(self, headers: Headers) -> str | None:
        """The tenant of a request's key, sent as OpenAI's or Anthropic's clients do: the key's digest, or None if it is invalid."""
        scheme, _, sent = headers.get("authorization", f"bearer {headers.get('x-api-key', '')}").partition(" ")
        # Compare all keys, each in constant time: the duration must reveal nothing about them.
        pairs = self.keys.items()
        tenants = [tenant for key, tenant in pairs if hmac.compare_digest(sent.strip().encode("latin-1", "replace"), key)]
        return tenants[0] if tenants and scheme.lower() == "bearer" else None

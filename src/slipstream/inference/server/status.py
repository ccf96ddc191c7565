"""The routes without a body: models, health, load, metrics and the chat page."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from functools import cache
from importlib import resources

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from slipstream.inference.server.bodies import HealthBody
from slipstream.inference.server.gate import JSON
from slipstream.inference.server.metrics import CONTENT_TYPE, Replica, render
from slipstream.inference.server.router import Router
from slipstream.inference.server.state import Serving
from slipstream.inference.stats import total


async def models(server: Serving, request: Request) -> Response:
    return JSON(
        {"object": "list", "data": [server.described(name) for name in (server.engine.model_name, *server.engine.adapters)]}
    )


async def one_model(server: Serving, request: Request) -> Response:
    server.check_model(request.path_params["name"])
    return JSON(server.described(request.path_params["name"]))


async def health(server: Serving, request: Request) -> Response:
    states = [one.state.value for one in server.engine.engines] if isinstance(server.engine, Router) else []
    body: HealthBody = {"status": "ok" if not states or "ready" in states else "starting"}
    if not server.engine.healthy:
        body["status"] = "failed"
    if server.traffic.draining:
        body["status"] = "draining"
    if states:
        body["replicas"] = states
    return JSON(body, status_code=200 if body["status"] == "ok" else 503)


async def load(server: Serving, request: Request) -> Response:
    return JSON({"server_load": server.traffic.active})


async def metrics(server: Serving, request: Request) -> Response:
    engine = server.engine
    if not isinstance(engine, Router):
        return PlainTextResponse(render(engine.stats(), server.traffic), media_type=CONTENT_TYPE)
    each = await asyncio.to_thread(engine.each)
    replicas = [Replica(one.state.value == "ready", one.starts, stats) for one, stats in zip(engine.engines, each, strict=True)]
    return PlainTextResponse(render(total(each), server.traffic, replicas), media_type=CONTENT_TYPE)


async def chat_page(server: Serving, request: Request) -> Response:
    page, policy = _page()
    headers = {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
    return HTMLResponse(page, headers=headers)


@cache
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

"""The routes without a body: models, health, load, metrics and the chat page."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import sys
from dataclasses import dataclass
from functools import cache
from importlib import resources

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from slipstream.inference.server.bodies import HealthBody, ModelBody
from slipstream.inference.server.gate import JSON
from slipstream.inference.server.metrics import CONTENT_TYPE, ModelFigures, Replica, render
from slipstream.inference.server.prepare import Body
from slipstream.inference.server.router import Router, Served
from slipstream.inference.server.state import Front, Serving, adapter_of, body_of, not_found
from slipstream.inference.stats import total


@dataclass(frozen=True, slots=True)
class OnlyModel:
    """The `Choice` of a server with one model, which is loaded before the server starts."""

    engine: Served
    created: int

    async def pick(self, front: Front, request: Request, body: Body) -> Serving:
        return front.serving(self.engine)

    def listed(self) -> list[ModelBody]:
        model = body_of(self.engine, self.created)
        return [model, *(adapter_of(model, name) for name in self.engine.adapters)]

    def health(self) -> HealthBody:
        body: HealthBody = {"status": "ok"}
        if isinstance(self.engine, Router):
            if not self.engine.ready:
                body["status"] = "starting"
            if states := [one.state.value for one in self.engine.engines if not one.address]:
                body["replicas"] = states
            if engines := {one.address: one.state.value for one in self.engine.engines if one.address}:
                body["engines"] = engines
        if not self.engine.healthy:
            body["status"] = "failed"
        return body

    async def figures(self) -> list[ModelFigures]:
        if not isinstance(self.engine, Router):
            return [ModelFigures("", self.engine.stats())]
        replicas = await asyncio.to_thread(replicas_of, self.engine)
        return [ModelFigures("", total([one.stats for one in replicas if one.stats is not None]), replicas)]


def replicas_of(router: Router) -> list[Replica]:
    """Waits for the engines' figures."""
    each = enumerate(zip(router.engines, router.each(), strict=True))
    return [Replica(one.address or str(index), one.state.value == "ready", one.starts, stats) for index, (one, stats) in each]


async def models(front: Front, request: Request) -> Response:
    return JSON({"object": "list", "data": front.models.listed()})


async def one_model(front: Front, request: Request) -> Response:
    name, models = request.path_params["name"], {model["id"]: model for model in front.models.listed()}
    if name not in models:
        raise not_found(name, models)
    return JSON(models[name])


async def health(front: Front, request: Request) -> Response:
    body = front.models.health()
    if front.traffic.draining:
        body["status"] = "draining"
    return JSON(body, status_code=200 if body["status"] == "ok" else 503)


async def load(front: Front, request: Request) -> Response:
    return JSON({"server_load": front.traffic.active})


async def version(front: Front, request: Request) -> Response:
    return JSON({"version": sys.modules["slipstream"].__version__})


async def metrics(front: Front, request: Request) -> Response:
    return PlainTextResponse(render(await front.models.figures(), front.traffic), media_type=CONTENT_TYPE)


async def chat_page(front: Front, request: Request) -> Response:
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

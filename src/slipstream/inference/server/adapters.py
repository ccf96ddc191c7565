"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them: the folders of a root that the operator names."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from slipstream.inference.server.bodies import DeletedBody
from slipstream.inference.server.errors import RequestError
from slipstream.inference.server.gate import JSON
from slipstream.inference.server.requests import Fields, parse, without_effect
from slipstream.inference.server.state import Front, Serving, adapter_of, body_of

Name = Annotated[str, Field(min_length=1, max_length=256)]


class LoadAdapterRequest(Fields):
    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool | None = None  # replaces a loaded one of that name


class UnloadAdapterRequest(Fields):
    lora_name: Name


async def load(front: Front, request: Request) -> Response:
    root = _root(front)

    def make(server: Serving, body: bytes) -> tuple[Response, list[str]]:
        given = parse(LoadAdapterRequest, body)
        folder = (root / given.lora_path).resolve()
        if not folder.is_relative_to(root):
            raise RequestError("lora_path must be a folder below the server's --lora-root", param="lora_path")
        try:
            server.engine.load_adapter(given.lora_name, folder, replace=bool(given.load_inplace))
        except ValueError as error:
            raise RequestError(
                str(error), param="lora_name" if repr(given.lora_name)[:100] in str(error) else "lora_path"
            ) from None
        return JSON(adapter_of(body_of(server.engine, int(time.time())), given.lora_name)), without_effect(given)

    return await front.respond(request, make)


async def unload(front: Front, request: Request) -> Response:
    _root(front)

    def make(server: Serving, body: bytes) -> tuple[Response, list[str]]:
        given = parse(UnloadAdapterRequest, body)
        try:
            server.engine.unload_adapter(given.lora_name)
        except ValueError as error:
            raise RequestError(str(error), status=404, param="lora_name", code="model_not_found") from None
        answer: DeletedBody = {"id": given.lora_name, "object": "model", "deleted": True}
        return JSON(answer), without_effect(given)

    return await front.respond(request, make)


def _root(front: Front) -> Path:
    if front.lora_root is None:
        raise RequestError("adapters are loaded at run time only if the server was started with --lora-root FOLDER", status=403)
    return front.lora_root

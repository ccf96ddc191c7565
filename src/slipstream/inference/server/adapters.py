"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM, for folders below a root that the operator names."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from slipstream.inference.server.bodies import DeletedBody, ModelBody
from slipstream.inference.server.errors import RequestError
from slipstream.inference.server.gate import JSON
from slipstream.inference.server.requests import Fields, RequestT
from slipstream.inference.server.state import Front, Serving, adapter_of, body_of

Name = Annotated[str, Field(min_length=1, max_length=256)]


class LoadAdapterRequest(Fields):
    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool | None = None  # replaces a loaded adapter of that name


class UnloadAdapterRequest(Fields):
    lora_name: Name


def _load(server: Serving, given: LoadAdapterRequest) -> ModelBody:
    root = server.front.adapter_root()
    try:
        folder = (root / given.lora_path).resolve()
        folder.exists()
    except (OSError, ValueError) as error:  # not a possible path: a name that is too long, or with a null byte
        raise RequestError(f"lora_path: {error}", param="lora_path") from None
    if not folder.is_relative_to(root):
        raise RequestError("lora_path must be a folder below the server's --lora-root", param="lora_path")
    try:
        server.engine.load_adapter(given.lora_name, folder, replace=bool(given.load_inplace))
    except ValueError as error:
        param = "lora_name" if repr(given.lora_name)[:100] in str(error) else "lora_path"
        raise RequestError(str(error), param=param) from None
    return adapter_of(body_of(server.engine, int(time.time())), given.lora_name)


def _unload(server: Serving, given: UnloadAdapterRequest) -> DeletedBody:
    try:
        server.engine.unload_adapter(given.lora_name)
    except ValueError as error:
        raise RequestError(str(error), status=404, param="lora_name", code="model_not_found") from None
    return {"id": given.lora_name, "object": "model", "deleted": True}


async def _changed(kind: type[RequestT], change: Callable[[Serving, RequestT], Any], front: Front, request: Request) -> Response:
    """Return what `change` returns; rejected unless the operator allows changes."""
    front.adapter_root()

    def prepare(server: Serving, body: bytes) -> tuple[RequestT, Callable[[], Response]]:
        given = server.parsed(kind, body)
        return given, lambda: JSON(change(server, given))

    return await front.compute(request, prepare)


load = partial(_changed, LoadAdapterRequest, _load)
unload = partial(_changed, UnloadAdapterRequest, _unload)

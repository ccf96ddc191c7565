"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them: the folders of a root that the operator names."""

from __future__ import annotations

import time
from typing import Annotated

from pydantic import Field

from slipstream.inference.server.bodies import DeletedBody, ModelBody
from slipstream.inference.server.errors import RequestError
from slipstream.inference.server.requests import Fields
from slipstream.inference.server.state import Serving, adapter_of, body_of

Name = Annotated[str, Field(min_length=1, max_length=256)]


class LoadAdapterRequest(Fields):
    changes_adapters = True

    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool | None = None  # replaces a loaded one of that name


class UnloadAdapterRequest(Fields):
    changes_adapters = True

    lora_name: Name


def load(server: Serving, given: LoadAdapterRequest) -> ModelBody:
    root = server.front.adapter_root()
    try:
        folder = (root / given.lora_path).resolve()
        folder.exists()
    except (OSError, ValueError) as error:  # no path of this system: a name that is too long, or with a null byte
        raise RequestError(f"lora_path: {error}", param="lora_path") from None
    if not folder.is_relative_to(root):
        raise RequestError("lora_path must be a folder below the server's --lora-root", param="lora_path")
    try:
        server.engine.load_adapter(given.lora_name, folder, replace=bool(given.load_inplace))
    except ValueError as error:
        param = "lora_name" if repr(given.lora_name)[:100] in str(error) else "lora_path"
        raise RequestError(str(error), param=param) from None
    return adapter_of(body_of(server.engine, int(time.time())), given.lora_name)


def unload(server: Serving, given: UnloadAdapterRequest) -> DeletedBody:
    try:
        server.engine.unload_adapter(given.lora_name)
    except ValueError as error:
        raise RequestError(str(error), status=404, param="lora_name", code="model_not_found") from None
    return {"id": given.lora_name, "object": "model", "deleted": True}

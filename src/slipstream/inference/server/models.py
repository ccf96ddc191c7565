"""Several models behind one address: each is loaded at its first request, and unloaded when another one needs the memory.

[Note: Room for models] A model with running requests stays loaded. If a request waits for room, the least recently used idle model
is unloaded. If none is idle, the least recently used model gets no further requests until the running ones have ended; its new
requests wait behind the first one, so that no model keeps another one out. Models get room in the order of their first waiting
requests.

Only the event loop changes this state; models are opened and closed in threads.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from slipstream.inference.engine import ClosedError
from slipstream.inference.server.bodies import HealthBody, ModelBody
from slipstream.inference.server.errors import RequestError
from slipstream.inference.server.generation import left
from slipstream.inference.server.metrics import Loading, ModelFigures
from slipstream.inference.server.prepare import Body
from slipstream.inference.server.requests import refused
from slipstream.inference.server.router import Router
from slipstream.inference.server.sources import Source, Spare
from slipstream.inference.server.state import Front, Serving, adapter_of, body_of, not_found
from slipstream.inference.server.status import replicas_of
from slipstream.inference.source import file_bytes
from slipstream.inference.stats import Stats, settled, total

logger = logging.getLogger(__name__)

RETRY = 30.0  # seconds after a failed load in which requests get its error, because each load may unload other models


class Residence(Enum):
    UNLOADED = "unloaded"
    LOADING = "loading"  # or its engine's process restarts
    LOADED = "loaded"
    UNLOADING = "unloading"


class Queued(NamedTuple):
    number: int  # order of arrival, over all models
    let_in: asyncio.Future[Router]


@dataclass(eq=False, kw_only=True)
class HostedModel:
    """A model that can be loaded."""

    name: str
    adapters: Sequence[str]  # adapters that are loaded with it
    make: Callable[[], Router]  # creates its engines, not yet opened
    nbytes: int  # bytes of memory: estimated; after its first load, as its processes report
    state: Residence = Residence.UNLOADED
    users: int = 0  # requests that use it, from before they are parsed to the end of the response
    used: int = 0  # number of the last request that used it
    waiting: deque[Queued] = field(default_factory=deque)
    loads: int = 0
    failures: int = 0
    why: str = ""  # error of the last load; "" if it succeeded
    until: float = 0.0  # time.monotonic before which it is not loaded again
    past: Stats | None = None  # totals of all engines that were closed
    router: Router | None = None
    task: asyncio.Task[None] | None = None  # loads or unloads it
    closed: bool = False  # the server is closed

    @classmethod
    def local(
        cls,
        name: str,
        model: str,
        options: Mapping[str, Any],
        cores: Sequence[Sequence[int]],
        spare: Spare,
        others: Sequence[Source] = (),
    ) -> HostedModel:
        """As `Router.local`."""
        make = partial(Router.local, model, options, cores, spare, name, others)
        nbytes = file_bytes(model) if cores else 0
        return cls(name=name, adapters=tuple(options.get("adapters", ())), make=make, nbytes=nbytes)

    def open(self) -> Router:
        """Start its engines, or wait for an engine that restarts."""
        if self.router is not None:
            return self.router.wait()
        self.router = router = self.make()
        if self.closed:  # `close` came before the router existed
            raise ClosedError("the server is shutting down")
        router.open().prepare()
        return router

    def close(self) -> None:
        if (router := self.router) is not None:
            own = [engine for engine in router.engines if engine.starts and not engine.address]  # others live on, and count
            parts = [*(settled(engine.stats()) for engine in own), *([] if self.past is None else [self.past])]
            self.past = total(parts) if parts else None
            router.close()


class Models:
    """Several models in the place of one engine. `max_loaded`: models loaded at the same time; `max_bytes`: their memory."""

    def __init__(self, models: Sequence[HostedModel], *, max_loaded: int | None, max_bytes: int | None) -> None:
        """Raises ValueError if two models or adapters have the same name."""
        self.max_loaded, self.max_bytes = max_loaded or len(models), max_bytes or math.inf
        self.healthy, self.sampling = True, dict[str, float]()  # each model has its own
        self.model_name = ", ".join(model.name for model in models)
        names = Counter(name for model in models for name in (model.name, *model.adapters))
        if twice := [name for name, number in names.items() if number > 1]:
            raise ValueError(f"two models or adapters have the name {twice[0]!r}; give one another name: NAME=MODEL")
        self._models, self._named = models, {name: model for model in models for name in (model.name, *model.adapters)}
        self._arrivals, self._uses = itertools.count(), itertools.count(1)
        self._draining: HostedModel | None = None  # gets no further requests, so that it can be unloaded
        self._threads = ThreadPoolExecutor(len(models), "slipstream-models")
        self._created = int(time.time())

    def prepare(self) -> None: ...

    def close(self) -> None:
        """End all engines, including those that are starting. The event loop has ended."""
        self.healthy = False
        for model in self._models:
            model.closed = True
        with ThreadPoolExecutor(len(self._models)) as threads:
            list(threads.map(Router.close, [model.router for model in self._models if model.router is not None]))
        self._threads.shutdown(cancel_futures=True)

    # ---- as the routes' `Choice`

    async def pick(self, front: Front, request: Request, body: Body) -> Serving:
        """Load the model that the body names; it stays loaded until the response has ended."""
        name = await front.bodies.prepare(_model_of, body)
        if (model := self._named.get(name)) is None:
            raise not_found(name, self._named)
        request.state.model = model.name
        limit = front.request_timeout_s
        late = RequestError(f"the model {model.name!r} was not loaded within {limit:g} s", status=504, code="timeout")
        async with front.deadlines.within(limit, late):
            router = await self._acquire(model, request.receive)
            request.state.held.callback(self._release, model)
        return front.serving(router)

    def listed(self) -> list[ModelBody]:
        bodies = list[ModelBody]()
        for model in self._models:
            body: ModelBody = {"id": model.name, "object": "model", "created": self._created, "owned_by": "slipstream"}
            if model.state is Residence.LOADED and model.router is not None:
                body = body_of(model.router, self._created)
            body["status"] = {"value": model.state.value}
            if model.why:
                body["status"]["error"] = model.why
            bodies += [body, *(adapter_of(body, name) for name in model.adapters)]
        return bodies

    def health(self) -> HealthBody:
        return {"status": "ok", "models": {model.name: model.state.value for model in self._models}}

    async def figures(self) -> list[ModelFigures]:
        return await asyncio.gather(*map(self._figures, self._models))

    async def _figures(self, model: HostedModel) -> ModelFigures:
        loaded = model.state is Residence.LOADED
        loading = Loading(loaded, model.loads, model.failures, len(model.waiting), model.nbytes if loaded else 0)
        past, replicas = model.past, []
        if loaded and model.router is not None:
            replicas = await asyncio.to_thread(replicas_of, model.router)
        parts = [one for one in (*(replica.stats for replica in replicas), past) if one is not None]
        return ModelFigures(model.name, total(parts) if parts else None, replicas, loading)

    # ---- who has a model

    async def _acquire(self, model: HostedModel, receive: Receive) -> Router:
        """Wait until the model is loaded and accepts requests. Raises RequestError if it cannot be loaded, ClientDisconnect."""
        if model.state is Residence.LOADED and model.router is not None and not model.router.healthy:
            self._fail(model, model.router.why, RETRY)
        if model.why and model.until > time.monotonic():
            raise _failed(model)
        if model.state is Residence.LOADED and model.router is not None and not model.router.ready:
            self._begin(model)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Router] = loop.create_future()
        model.waiting.append(waiting := Queued(next(self._arrivals), future))
        watcher = loop.create_task(left(receive, partial(_leave, future)))
        self._make_room()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._release(model)  # the request was let in meanwhile
            raise
        finally:
            watcher.cancel()
            if waiting in model.waiting:
                model.waiting.remove(waiting)
                self._make_room()

    def _release(self, model: HostedModel) -> None:
        model.users -= 1
        model.used = next(self._uses)
        self._make_room()

    def _let_in(self, model: HostedModel, router: Router) -> None:
        while model.waiting:
            waiting = model.waiting.popleft()
            if not waiting.let_in.done():
                waiting.let_in.set_result(router)
                model.users += 1
                model.used = next(self._uses)

    # ---- which models are loaded

    def _make_room(self) -> None:
        """Load the first waiting models that fit, unload one for the next, and let in the requests of all others."""
        while (first := self._first()) is not None and self._fits(first):
            self._begin(first)
        loaded = [model for model in self._models if model.state is Residence.LOADED]
        crowded = first is not None or sum(map(_taken, self._models)) > self.max_bytes
        if not crowded:
            self._draining = None
        elif loaded and not any(model.state is Residence.UNLOADING for model in self._models):
            victim = min(loaded, key=lambda model: (model.users > 0, model is not self._draining, model.used))
            self._draining = victim if victim.users else None
            if not victim.users:
                logger.warning("%s: unloading, to make room%s", victim.name, f" for {first.name}" if first else "")
                self._unload(victim)
        for model in loaded:
            if model.state is Residence.LOADED and model is not self._draining and model.router is not None:
                self._let_in(model, model.router)

    def _first(self) -> HostedModel | None:
        """The unloaded model that requests have waited for longest."""
        wanted = [model for model in self._models if model.waiting and model.state is Residence.UNLOADED]
        return min(wanted, key=lambda model: model.waiting[0].number, default=None)

    def _fits(self, model: HostedModel) -> bool:
        resident = [other for other in self._models if other.state is not Residence.UNLOADED]
        nbytes = model.nbytes + sum(map(_taken, self._models))
        return not resident or (len(resident) < self.max_loaded and nbytes <= self.max_bytes)

    def _begin(self, model: HostedModel) -> None:
        model.state = Residence.LOADING
        model.task = asyncio.get_running_loop().create_task(self._load(model))

    async def _load(self, model: HostedModel) -> None:
        start, is_restart = time.monotonic(), model.router is not None
        logger.warning("%s: %s", model.name, "waiting for its engine, which starts again" if is_restart else "loading")
        try:
            router = await asyncio.get_running_loop().run_in_executor(self._threads, model.open)
        except Exception as error:  # any error is the response to the waiting requests, and does not affect other models
            self._fail(model, str(error) or type(error).__name__, RETRY)
            return
        if (nbytes := router.nbytes) > self.max_bytes:
            why = f"it takes {_mib(nbytes)}, and --max-loaded-bytes allows {_mib(self.max_bytes)} for all models that are loaded; "
            self._fail(model, f"{why}raise that, or lower the model's --kv-cache-bytes, --max-context or --dtype", math.inf)
            return
        model.loads += not is_restart
        model.state, model.why, model.nbytes = Residence.LOADED, "", nbytes
        logger.warning("%s; ready in %.1f s, %s", router.description, time.monotonic() - start, _mib(nbytes))
        self._let_in(model, router)
        self._make_room()

    def _fail(self, model: HostedModel, why: str, retry: float) -> None:
        """A load, or a restart of an engine, has failed: free what the model holds, and reject its waiting requests."""
        model.failures += 1
        model.why, model.until = why, time.monotonic() + retry
        logger.error("%s cannot be loaded: %s", model.name, why)
        while model.waiting:
            if not (future := model.waiting.popleft().let_in).done():
                future.set_exception(_failed(model))
        self._unload(model)

    def _unload(self, model: HostedModel) -> None:
        model.state = Residence.UNLOADING
        model.task = asyncio.get_running_loop().create_task(self._close(model))

    async def _close(self, model: HostedModel) -> None:
        await asyncio.get_running_loop().run_in_executor(self._threads, model.close)
        model.state, model.router = Residence.UNLOADED, None
        self._make_room()


class _NamesModel(BaseModel):
    """The field that selects a model. Other fields of the body are not parsed into objects."""

    model: str | None = None


def _model_of(body: bytes) -> str:
    try:
        name = _NamesModel.model_validate_json(body).model
    except ValidationError as error:
        raise refused(error) from None
    if name is None:
        raise RequestError("model is missing: this server has several; GET /v1/models lists them", param="model")
    return name


def _leave(future: asyncio.Future[Router]) -> None:
    """Stop waiting because the client has disconnected."""
    if not future.done():
        future.set_exception(ClientDisconnect())


def _failed(model: HostedModel) -> RequestError:
    message = f"the model {model.name!r} cannot be loaded: {model.why}"
    rest = None if model.until == math.inf else math.ceil(model.until - time.monotonic())
    return RequestError(message, status=503, code="model_load_failed", retry_after=rest)


def _taken(model: HostedModel) -> int:
    return 0 if model.state is Residence.UNLOADED else model.nbytes


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"

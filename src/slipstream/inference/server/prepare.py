"""Request bodies that are being received, and the threads that turn them into work for the engine.

[Note: Requests do not stall streams] No request may stall the streams of other clients. So sizes are checked before any processing:
bytes of a body and of all bodies, messages of a chat, characters of a text. Expensive work that holds the GIL (parsing, templates)
runs in a few threads, one long body at a time, so that the event loop and the engine's thread compete with few threads.
Tokenization releases the GIL. Requests that then wait for an adapter, or for a model's vectors, have other threads, many of them,
because texts of several requests share forwards. The exception is one call of the JSON parser, which holds the GIL for up to 0.03 s
per MB.
"""

from __future__ import annotations

import asyncio
import codecs
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from slipstream.inference.server.errors import RequestError

SHORT = 64 << 10  # bytes; a body up to this size is always accepted
THREADS = 2  # for short bodies
VECTORS = 32  # requests of a tenant that wait at the same time for vectors or adapters, each in a thread
TENANTS = 8  # tenants that may wait in this way
BODIES = 16  # bodies of maximum size that may be in flight

Result = TypeVar("Result")


class Body:
    """A body that is being received. If it exceeds a limit, it is rejected and its bytes are dropped."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._parts: list[bytes] = []
        self.size = 0  # bytes received
        self.nbytes = 0  # bytes of the stored parts
        self.refused: RequestError | None = None

    def add(self, part: bytes) -> None:
        self.size += len(part)
        if self.refused is None and self.size > self._bodies.max_bytes:
            self.refused = self.too_large()
        elif self.refused is None and self.size > SHORT and self._bodies.nbytes + len(part) > self._bodies.limit:
            message = f"the server is preparing {self._bodies.nbytes} bytes of other requests; try again later"
            self.refused = RequestError(message, status=503, code="busy", retry_after=1)
        if self.refused is None:
            self._parts.append(part)
            self._hold(self.nbytes + len(part))
        else:
            self._parts.clear()
            self._hold(0)

    def too_large(self) -> RequestError:
        error = RequestError(f"the body is larger than {self._bodies.max_bytes} bytes", status=413, code="body_too_large")
        error.headers["Connection"] = "close"  # the rest of the body may remain unread
        return error

    def whole(self) -> bytes:
        """Return all that has arrived. Raises RequestError if the body was rejected."""
        if self.refused is not None:
            raise self.refused
        # PowerShell's begin with one; a second call copies nothing
        self._parts = [b"".join(self._parts).removeprefix(codecs.BOM_UTF8)]
        return self._parts[0]

    def _hold(self, size: int) -> None:
        self._bodies.nbytes += size - self.nbytes
        self.nbytes = size


class Bodies:
    """All bodies in flight, from their first byte until they are prepared. Only the event loop changes them."""

    def __init__(self, max_body_bytes: int) -> None:
        self.max_bytes = max_body_bytes
        self.limit = BODIES * max(max_body_bytes, SHORT)
        self.nbytes = 0  # of all stored bodies
        self._short = ThreadPoolExecutor(THREADS, "slipstream-prepare")
        self._long = ThreadPoolExecutor(1, "slipstream-prepare-long")
        self._vectors = ThreadPoolExecutor(TENANTS * VECTORS, "slipstream-vectors")
        self._turns = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(VECTORS))

    @contextmanager
    def arriving(self) -> Iterator[Body]:
        body = Body(self)
        try:
            yield body
        finally:
            body._hold(0)

    async def prepare(self, make: Callable[[bytes], Result], body: Body) -> Result:
        """Run `make(body)` in a worker thread."""
        if body.refused is not None:
            raise body.refused
        threads = self._long if body.size > SHORT else self._short
        return await asyncio.get_running_loop().run_in_executor(threads, lambda: make(body.whole()))

    async def compute(self, make: Callable[[], Result], tenant: str) -> Result:
        """Run `make()`, which may take long, in a thread that no body needs, and to its end. Further calls of a tenant that runs
        VECTORS wait."""
        await (turn := self._turns[tenant]).acquire()
        running = asyncio.get_running_loop().run_in_executor(self._vectors, make)
        running.add_done_callback(lambda _: turn.release())
        return await asyncio.shield(running)

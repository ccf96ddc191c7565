"""`serve`: the application under uvicorn, until a signal or until its engine is dead. The first signal drains; a second one, or
the end of the drain's time, answers what still runs with an error."""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import socket
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from slipstream.inference.server.app import create_app
from slipstream.inference.server.backend import Engine
from slipstream.inference.server.gate import refusal
from slipstream.inference.server.generation import Deadlines
from slipstream.inference.server.metrics import Traffic
from slipstream.inference.server.protocol import RequestError

logger = logging.getLogger(__name__)

HEADER_TIMEOUT = 30.0  # seconds from a connection, or its last answer, to the end of the next request's header
MAX_CONNECTIONS = 4096
READING_TIME = 2.0  # seconds, at the server's end, for clients to read what is left of their answers
OTHER_FILES = 64  # that a process has open beside connections
SWITCH_INTERVAL = (
    0.001  # seconds that a thread which prepares requests may let the streams' threads wait, each time; Python's is 0.005
)


class DeadEngineError(RuntimeError):
    """The engine will never answer again; only a new process will."""


class _Server(uvicorn.Server):
    """Listens on while it drains, so that new requests are told to come back instead of finding nobody."""

    def __init__(
        self, config: uvicorn.Config, engine: Engine, traffic: Traffic, deadlines: Deadlines, drain_timeout_s: float
    ) -> None:
        super().__init__(config)
        self.engine = engine
        self.traffic = traffic
        self.deadlines = deadlines
        self.drain_timeout_s = drain_timeout_s
        self.drain_began: float | None = None
        self.at_once = False

    async def startup(self, sockets: list[Any] | None = None) -> None:
        await super().startup(sockets)
        for server in self.servers:
            for listener in server.sockets:
                host, port = listener.getsockname()[:2]
                host = f"[{host}]" if ":" in host else host
                sys.stdout.write(f"Slipstream serves http://{host}:{port} (page: /, API: /v1)\n")
        sys.stdout.flush()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called in a signal handler or between two ticks: only sets flags."""
        self.at_once = self.traffic.draining
        self.traffic.draining = True

    async def on_tick(self, counter: int) -> bool:
        if self.traffic.draining or not self.engine.healthy:
            active, now = self.traffic.active, time.monotonic()
            answers = "1 answer" if active == 1 else f"{active} answers"
            if self.drain_began is None:
                self.drain_began = now
                if active and self.traffic.draining:
                    logger.warning("draining: %s running, at most %g s; again to stop at once", answers, self.drain_timeout_s)
            waited = now - self.drain_began
            if active and (self.at_once or waited >= self.drain_timeout_s):
                self.deadlines.stop()
                logger.warning("%s cut off after %g s", answers, round(waited, 1))
                active = 0
            self.should_exit = not active
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn cancels, with a traceback, what has not ended soon; who does not read is cut off before that."""
        asyncio.get_running_loop().call_later(READING_TIME, self._abort)
        await super().shutdown(sockets)

    def _abort(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def guarded(*, max_connections: int, header_timeout_s: float) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol, which waits for ever for a request's header and for its answer to be read, with limits."""
    error = refusal(RequestError(f"{max_connections} connections are open, and no more are taken", status=503, retry_after=5))
    full = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\n"
    full += b"".join(b"%b: %b\r\n" % header for header in error.raw_headers) + b"\r\n" + bytes(error.body)

    class Guarded(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._begin()
            if len(self.connections) > max_connections:
                transport.write(full)
                transport.close()

        def on_response_complete(self) -> None:
            self._timer.cancel()
            self._begin()
            super().on_response_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._timer.cancel()
            super().connection_lost(exc)

        def _begin(self, unread: float = math.inf) -> None:
            self._unread = unread  # bytes of what was said, when the time began
            self._timer = self.loop.call_later(header_timeout_s, self._look)

        def _look(self) -> None:
            unread = self.transport.get_write_buffer_size()
            if self.cycle is not None and not self.cycle.response_complete and not self.transport.is_closing():
                self._begin()  # a request is being answered, which has limits of its own
            elif 0 < unread < self._unread:
                self._begin(unread)  # the client still reads the last answer
            else:
                self.transport.abort()  # to close it would wait for the client to read

    return Guarded


def serve(
    engine: Engine,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    sockets: Sequence[socket.socket] | None = None,
    api_keys: Sequence[str] = (),
    share_prefixes: bool = False,
    max_body_bytes: int = 4 << 20,
    max_output_tokens: int | None = None,
    request_timeout_s: float = 600.0,
    drain_timeout_s: float = 60.0,
) -> None:
    """Returns when drained after SIGTERM or SIGINT; the engine is left to its owner. Port 0: a free one, which is printed.
    `sockets` are bound ones, to listen on in place of host and port.

    Raises DeadEngineError when the engine is dead and everybody who waited for it has been told."""
    engine.prepare()
    sys.setswitchinterval(SWITCH_INTERVAL)
    app = create_app(
        engine,
        api_keys=api_keys,
        share_prefixes=share_prefixes,
        max_body_bytes=max_body_bytes,
        max_output_tokens=max_output_tokens,
        request_timeout_s=request_timeout_s,
    )
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = MAX_CONNECTIONS if files == resource.RLIM_INFINITY else max(files - OTHER_FILES, 1)
    config = uvicorn.Config(
        app,
        http=guarded(max_connections=min(MAX_CONNECTIONS, room), header_timeout_s=HEADER_TIMEOUT),
        host=host,
        port=port,
        lifespan="off",
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=int(HEADER_TIMEOUT),
        timeout_graceful_shutdown=math.ceil(READING_TIME) + 1,
    )
    server = _Server(config, engine, app.state.traffic, app.state.deadlines, drain_timeout_s)
    server.run(None if sockets is None else list(sockets))
    if not engine.healthy:
        raise DeadEngineError(f"the engine of {engine.model_name} is dead; the log says why, and a new process is needed")

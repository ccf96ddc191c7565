"""`serve`: run the application under uvicorn until a signal arrives or the engine dies. The first signal drains: running requests
finish. A second signal, or the drain timeout, ends them with an error."""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import socket
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from slipstream.inference.server.app import create_app
from slipstream.inference.server.errors import RequestError
from slipstream.inference.server.gate import access, check_origins, refusal
from slipstream.inference.server.generation import Deadlines
from slipstream.inference.server.metrics import Traffic
from slipstream.inference.server.models import Models
from slipstream.inference.server.router import Served
from slipstream.inference.server.traces import Traces, check_collector
from slipstream.inference.tls import Certificate
from slipstream.inference.wire import keep_little

logger = logging.getLogger(__name__)

HEADER_TIMEOUT = 30.0  # seconds from a connection's start, or its last response, to the end of the next request's header
MAX_CONNECTIONS = 4096
READING_TIME = 2.0  # seconds at shutdown for clients to read the end of their responses
OTHER_FILES = 64  # file descriptors not used for connections
KEPT_FILES = 16  # some of these, not even used for connections that are being rejected or are in a TLS handshake
SUBMITTING = 64  # threads
SWITCH_INTERVAL = 0.001  # seconds (Python's default: 0.005) for which a preparing thread may keep the GIL from streaming threads


class DeadEngineError(RuntimeError):
    """The engine has failed permanently; a new process is needed."""


class _Server(uvicorn.Server):
    """Keeps listening while it drains, so that new requests get a 503 with Retry-After instead of a refused connection."""

    def __init__(
        self, config: uvicorn.Config, engine: Served | Models, traffic: Traffic, deadlines: Deadlines, drain_timeout_s: float
    ) -> None:
        super().__init__(config)
        self.scheme = "https" if config.is_ssl else "http"
        self.engine = engine
        self.traffic = traffic
        self.deadlines = deadlines
        self.drain_timeout_s = drain_timeout_s
        self.certificate: Certificate | None = None
        self.drain_start: float | None = None
        self.stop_now = False

    async def startup(self, sockets: list[Any] | None = None) -> None:
        # Requests that wait for one engine to accept them must leave threads for requests to others.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(SUBMITTING, "slipstream-submit"))
        await super().startup(sockets)
        for server in self.servers:
            for listener in server.sockets:
                host, port = listener.getsockname()[:2]
                host = f"[{host}]" if ":" in host else host
                sys.stdout.write(f"Slipstream serves {self.scheme}://{host}:{port} (page: /, API: /v1)\n")
        sys.stdout.flush()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called in a signal handler or between two ticks: only sets flags."""
        self.stop_now = self.traffic.draining
        self.traffic.draining = True

    async def on_tick(self, counter: int) -> bool:
        if self.certificate is not None:
            self.certificate.look()
        if self.traffic.draining or not self.engine.healthy:
            active, now = self.traffic.active, time.monotonic()
            requests = "1 request" if active == 1 else f"{active} requests"
            if self.drain_start is None:
                self.drain_start = now
                if active and self.traffic.draining:
                    limit = self.drain_timeout_s
                    logger.warning("draining: waiting at most %g s for %s; signal again to stop now", limit, requests)
            waited = now - self.drain_start
            if active and (self.stop_now or waited >= self.drain_timeout_s):
                self.deadlines.stop()
                logger.warning("aborted %s after %g s", requests, round(waited, 1))
                active = 0
            self.should_exit = not active
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Abort connections whose client does not read, before uvicorn cancels their tasks with a traceback."""
        asyncio.get_running_loop().call_later(READING_TIME, self._abort)
        await super().shutdown(sockets)

    def _abort(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def guarded(*, max_connections: int, header_timeout_s: float) -> type[asyncio.Protocol]:
    """Return uvicorn's HTTP protocol with limits on connections and on the time to send a header or read a response."""
    full = _full(f"too many connections ({max_connections} are open)")

    class Guarded(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._start_timer()
            if len(self.connections) > max_connections:
                transport.write(full)
                transport.close()

        def on_response_complete(self) -> None:
            self._timer.cancel()
            self._start_timer()
            super().on_response_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._timer.cancel()
            super().connection_lost(exc)

        def _unsupported_upgrade_warning(self) -> None:
            """Log nothing: clients that offer h2c (Java's) or request a WebSocket are answered by HTTP/1.1."""

        def _start_timer(self, unread: float = math.inf) -> None:
            self._unread = unread  # bytes of the last response that the client had not read when the timer started
            self._timer = self.loop.call_later(header_timeout_s, self._look)

        def _look(self) -> None:
            unread = self.transport.get_write_buffer_size()
            if self.cycle is not None and not self.cycle.response_complete and not self.transport.is_closing():
                self._start_timer()  # a request is running; it has its own time limits
            elif 0 < unread < self._unread:
                self._start_timer(unread)  # the client is still reading the last response
            else:
                self.transport.abort()  # close() would wait for the client to read

    return Guarded


def _full(why: str) -> bytes:
    error = refusal(RequestError(why, status=503, retry_after=5))
    head = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\n"
    return head + b"".join(b"%b: %b\r\n" % header for header in error.raw_headers) + b"\r\n" + bytes(error.body)


class Listening(socket.socket):
    """Closes connections at once if too many files are open. The event loop accepts all waiting connections in one go, before
    `guarded` counts any. Without a free file descriptor it would log each failure and accept none for a second."""

    def __init__(self, bound: socket.socket, max_files: int, plain: bool) -> None:
        """Takes over the descriptor of `bound`. `plain`: without TLS, so that clients get a 503."""
        super().__init__(fileno=bound.detach())
        keep_little(self)
        self.max_files = max_files
        self.refusal = _full("the server has too many open files") if plain else b""

    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        if connection.fileno() < self.max_files:  # it is the lowest free number
            return connection, address
        with connection, suppress(OSError):
            connection.setblocking(False)
            connection.send(self.refusal)
            connection.shutdown(socket.SHUT_WR)
        raise BlockingIOError  # the loop does other work before it accepts another


def max_files() -> int:
    """How many files this process may open. Raises ValueError if they are too few for a server."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return sys.maxsize
    if files < OTHER_FILES:
        enough = OTHER_FILES + MAX_CONNECTIONS
        raise ValueError(f"the limit of open files is {files}, and a server needs at least {OTHER_FILES}: ulimit -n {enough}")
    return files


def check(cors_origins: Sequence[str], otlp_traces: str | None) -> None:
    """Raise ValueError, before a model is loaded, for options and system limits that `serve` would reject."""
    try:
        check_origins(cors_origins)
    except ValueError as error:
        raise ValueError(f"--cors-origin: {error}") from None
    if otlp_traces is not None:
        check_collector(otlp_traces)
    max_files()


def serve(
    engine: Served | Models,
    *,
    sockets: Sequence[socket.socket],
    drain_timeout_s: float = 60.0,
    tls: tuple[str, str | None] | None = None,
    access_log: bool = False,
    otlp_traces: str | None = None,
    **options: Any,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return; the caller closes the engine. `sockets` are bound, and their
    descriptors are taken over. `tls`: the files of a certificate and its key (None: in the same file). `access_log` writes a line
    per response to stderr. `otlp_traces`: URL of a collector of spans. `options`: arguments of `create_app`. Raises
    DeadEngineError, after all clients have received an error, if the engine dies."""
    engine.prepare()
    sys.setswitchinterval(SWITCH_INTERVAL)
    app = create_app(engine, **options)
    if access_log:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        access.addHandler(handler)
        access.setLevel(logging.INFO)
        access.propagate = False
    traces = None if otlp_traces is None else Traces(app, otlp_traces)
    files = max_files()
    config = uvicorn.Config(
        traces or app,
        http=guarded(max_connections=min(MAX_CONNECTIONS, max(files - OTHER_FILES, 1)), header_timeout_s=HEADER_TIMEOUT),
        loop="asyncio",  # uvloop, if installed, would accept without `Listening`
        lifespan="off",
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        ssl_certfile=None if tls is None else tls[0],
        ssl_keyfile=None if tls is None else tls[1],
        timeout_keep_alive=int(HEADER_TIMEOUT),
        timeout_graceful_shutdown=math.ceil(READING_TIME) + 1,
    )
    server = _Server(config, engine, app.state.traffic, app.state.deadlines, drain_timeout_s)
    config.load()
    if tls is not None and config.ssl is not None:
        server.certificate = Certificate(config.ssl, *tls)
    server.run([Listening(one, files - KEPT_FILES, plain=tls is None) for one in sockets])
    if traces is not None:
        traces.close()
    if not engine.healthy:
        raise DeadEngineError(f"the engine of {engine.model_name} failed permanently; see the log, and restart the process")

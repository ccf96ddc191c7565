"""`serve`: the application under uvicorn, until a signal. The first one drains, a second one stops at once."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

import uvicorn

from slipstream.inference.server.app import create_app
from slipstream.inference.server.backend import Engine
from slipstream.inference.server.metrics import Traffic


class _Server(uvicorn.Server):
    """Listens on while it drains, so that new requests are told to come back instead of finding nobody."""

    def __init__(self, config: uvicorn.Config, traffic: Traffic, drain_timeout_s: float) -> None:
        super().__init__(config)
        self.traffic = traffic
        self.drain_timeout_s = drain_timeout_s
        self.drain_until: float | None = None

    async def startup(self, sockets: list[Any] | None = None) -> None:
        await super().startup(sockets)
        for server in self.servers:
            for socket in server.sockets:
                host, port = socket.getsockname()[:2]
                host = f"[{host}]" if ":" in host else host
                sys.stdout.write(f"Slipstream serves http://{host}:{port} (page: /, API: /v1)\n")
        sys.stdout.flush()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called in a signal handler or between two ticks: only sets flags."""
        if self.traffic.draining:
            self.should_exit = self.force_exit = True
        self.traffic.draining = True

    async def on_tick(self, counter: int) -> bool:
        if self.traffic.draining:
            self.drain_until = self.drain_until or time.monotonic() + self.drain_timeout_s
            if self.traffic.active == 0 or time.monotonic() > self.drain_until:
                self.should_exit = True
        return await super().on_tick(counter)


def serve(
    engine: Engine,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_keys: Sequence[str] = (),
    max_body_bytes: int = 4 << 20,
    max_output_tokens: int | None = None,
    request_timeout_s: float = 600.0,
    drain_timeout_s: float = 60.0,
) -> None:
    """Returns when drained after SIGTERM or SIGINT; the engine is left to its owner. Port 0: a free one, which is printed."""
    app = create_app(
        engine,
        api_keys=api_keys,
        max_body_bytes=max_body_bytes,
        max_output_tokens=max_output_tokens,
        request_timeout_s=request_timeout_s,
    )
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        lifespan="off",
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=2,  # for what is left after draining
    )
    _Server(config, app.state.traffic, drain_timeout_s).run()

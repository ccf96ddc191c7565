"""An engine on another host (`listener`), which others start and end: this connects to it, and again when it is lost."""

from __future__ import annotations

import math
import socket
from contextlib import suppress
from dataclasses import dataclass

from slipstream.inference.handshake import enter
from slipstream.inference.server.process import Connected
from slipstream.inference.wire import BEAT, Link

PATIENCE = 3.0  # seconds to connect
PAUSE = 1.0  # seconds at most between two tries


@dataclass(kw_only=True)
class EngineAddress:
    """A `router.Source`. One thread calls it."""

    address: str  # HOST:PORT, [IPV6]:PORT
    secret: bytes
    beat: float = BEAT
    attempts = math.inf  # it comes and goes as its host does
    max_pause = PAUSE

    def __post_init__(self) -> None:
        self._connection: socket.socket | None = None
        self._stopped = False

    @property
    def name(self) -> str:
        return f"engine {self.address}"

    def open(self) -> Connected:
        """Raises ValueError if it has another secret, OSError if it cannot be reached."""
        host, _, port = self.address.rpartition(":")
        try:
            self._connection = socket.create_connection((host.strip("[]"), int(port)), PATIENCE)
            if self._stopped:
                self._cut()
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            enter(self._connection, self.secret)
        except OSError as error:
            self._cut()
            raise OSError(f"{self.name}: {error.strerror or error}") from None
        except ValueError as error:
            self._cut()
            raise ValueError(f"{self.name}: {error}") from None
        link = Link(self._connection, self.beat)
        kind, *rest = next(link.messages, ("ended",))
        if kind != "ready":
            link.close()
            raise OSError(f"{self.name}: it has closed the connection")
        return Connected(link, rest[0])

    def stop(self) -> None:
        """Make `open` raise, from another thread."""
        self._stopped = True
        self._cut()

    def end(self) -> str:
        return "cannot be reached any more"

    def _cut(self) -> None:
        if self._connection is not None:
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()

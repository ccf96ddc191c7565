"""An engine on another host (`listener`), started and ended there: this connects to it, and reconnects when it is lost."""

from __future__ import annotations

import math
import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass

from slipstream.inference.handshake import enter
from slipstream.inference.server.process import Connected
from slipstream.inference.tls import Connection, Encrypted
from slipstream.inference.wire import BEAT, Link

PATIENCE = 3.0  # seconds to connect
PAUSE = 1.0  # the most seconds between two tries


@dataclass(kw_only=True)
class EngineAddress:
    """A `router.Source`. One thread calls it."""

    address: str  # HOST:PORT, [IPV6]:PORT
    secret: bytes
    tls: ssl.SSLContext | None = None  # `tls.server_context`; None: not encrypted
    beat: float = BEAT
    attempts = math.inf  # it comes and goes with its host
    max_pause = PAUSE

    def __post_init__(self) -> None:
        self._connection: socket.socket | None = None
        self._stopped = False

    @property
    def name(self) -> str:
        return f"engine {self.address}"

    def open(self) -> Connected:
        """Raises ValueError for another secret or an untrusted certificate, OSError if the engine cannot be reached."""
        try:
            connection = self._connect()
        except ssl.SSLCertVerificationError as error:
            self._cut()
            raise ValueError(f"{self.name}: its certificate is not accepted (--engine-tls-ca): {error.verify_message}") from None
        except OSError as error:
            self._cut()
            raise OSError(f"{self.name}: {error.strerror or error}") from None
        except ValueError as error:
            self._cut()
            raise ValueError(f"{self.name}: {error}") from None
        link = Link(connection, self.beat)
        kind, *rest = next(link.messages, ("ended",))
        if kind != "ready":
            link.close()
            raise OSError(f"{self.name}: it has closed the connection")
        return Connected(link, rest[0])

    def _connect(self) -> Connection:
        host, _, port = self.address.rpartition(":")
        host = host.strip("[]")
        self._connection = plain = socket.create_connection((host, int(port)), PATIENCE)
        if self._stopped:
            self._cut()
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            connection = plain if self.tls is None else Encrypted(plain, self.tls, host)
        except ssl.SSLCertVerificationError:
            raise
        except ssl.SSLError as error:
            plain_end = error.reason == "WRONG_VERSION_NUMBER"
            hint = ": start the engine with --tls-cert, or leave --engine-tls-ca out" if plain_end else ""
            raise OSError(f"{error.reason}{hint}") from None
        try:
            enter(connection, self.secret)
        except TimeoutError:
            hint = "; an engine with --tls-cert needs --engine-tls-ca here" if self.tls is None else ""
            raise OSError(f"it says nothing (timed out){hint}") from None
        return connection

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

"""An engine that servers on other hosts reach over TCP (`slipstream engine`), in `wire`'s messages after a `handshake`.

Each connection has its own `replica.Session`: several servers may share the engine, and a lost server does not affect the others.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from slipstream.inference import wire
from slipstream.inference.embedding import EmbeddingEngine
from slipstream.inference.engine import Engine
from slipstream.inference.generate import InferenceEngine
from slipstream.inference.handshake import admit
from slipstream.inference.replica import Session, facts_of
from slipstream.inference.source import weights_digest
from slipstream.inference.tls import Certificate, Connection, Encrypted

logger = logging.getLogger(__name__)

LOOK = 0.1  # seconds between checks of the engine's health and of signals
UNPROVEN = 64  # the most connections at a time that have not yet proven that they know the secret


class Listener:
    """Signal handlers may call `drain` and `stop`; only the thread that runs it may call the rest."""

    def __init__(
        self, engine: Engine | EmbeddingEngine, facts: Mapping[str, Any], secret: bytes, tls: Certificate | None = None
    ) -> None:
        """`facts`: from `replica.facts_of`. `tls`: from `tls.engine_context`; None: connections are not encrypted."""
        self.engine, self.facts, self.secret, self.tls = engine, facts, secret, tls
        self._proving = threading.Semaphore(UNPROVEN)
        self._sessions: set[Session] = set()  # each session's thread adds and removes its own
        self._draining = self._stopped = False

    @classmethod
    def of(cls, opened: InferenceEngine, model: str, secret: bytes, tls: Certificate | None = None) -> Listener:
        """A listener for the engine that was opened from the folder or file `model`."""
        opened.engine.prepare()
        facts = facts_of(opened.engine, opened.description, opened.dtype, weights_digest(model))
        return cls(opened.engine, facts, secret, tls)

    def drain(self) -> None:
        """Accept no further requests: servers send them to other engines. `run` returns when the running ones have ended."""
        self._draining = True

    def stop(self) -> None:
        """Make `run` return now; unfinished requests are cancelled."""
        self._draining = self._stopped = True

    def run(self, sockets: Sequence[socket.socket], drain_timeout_s: float) -> None:
        """Serve connections to the bound sockets, which this closes, until `drain` or the engine's end."""
        self._listen(sockets)
        if self.engine.healthy:
            self._finish(time.monotonic() + drain_timeout_s)
        for session in list(self._sessions):
            session.link.close()

    def _listen(self, sockets: Sequence[socket.socket]) -> None:
        with selectors.DefaultSelector() as selector:
            for listening in sockets:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier engine may linger
                listening.listen()
                listening.setblocking(False)
                selector.register(listening, selectors.EVENT_READ)
            while self.engine.healthy and not self._draining:
                if self.tls is not None:
                    self.tls.look()
                for key, _ in selector.select(LOOK):
                    self._accept(key.fileobj)  # type: ignore[arg-type] # the sockets
            for listening in sockets:
                listening.close()

    def _finish(self, end: float) -> None:
        """Close each connection once it has no unfinished request, but wait no longer than `end` (time.monotonic)."""
        for session in list(self._sessions):
            session.link.send("leave", 0)
        while self.engine.healthy and not self._stopped and time.monotonic() < end and self._sessions:
            for session in list(self._sessions):
                if session.idle:
                    session.link.close()  # after everything queued is sent
            time.sleep(LOOK)
        if unfinished := sum(not session.idle for session in list(self._sessions)):
            logger.warning("%d servers have unfinished requests, which end with this engine", unfinished)

    def _accept(self, listening: socket.socket) -> None:
        with suppress(OSError):  # it may have closed already
            connection, address = listening.accept()
            if self._proving.acquire(blocking=False):
                threading.Thread(target=self._meet, args=(connection, address[0]), daemon=True).start()
            else:
                connection.close()

    def _meet(self, accepted: socket.socket, host: str) -> None:
        """Runs in a thread: serve the connection until it ends, if the other end knows the secret."""
        connection: Connection = accepted
        try:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wire.keep_little(accepted)
            connection = accepted if self.tls is None else Encrypted(accepted, self.tls.context)
            known = admit(connection, self.secret)
        except OSError:
            known = None  # a port scanner, a health check, or a server that does not trust our certificate
        finally:
            self._proving.release()
        if not known:
            if known is not None:
                logger.warning("a server on %s has another secret, and is refused", host)
            connection.close()
            return
        link = wire.Link(connection, wire.BEAT)
        session = Session(self.engine, link)
        link.send("ready", self.facts)
        self._sessions.add(session)
        logger.warning("a server on %s has connected", host)
        try:
            session.run()
        finally:
            self._sessions.discard(session)
            link.close()
            logger.warning("the connection of a server on %s has ended", host)

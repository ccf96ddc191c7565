"""An engine that servers on other hosts reach over TCP (`slipstream engine`), in `wire`'s messages after a `handshake`.

Each connection is a `replica.Session` of its own: several servers may share the engine, and one that is gone leaves the others be.
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

LOOK = 0.1  # seconds between looks at the engine's health and at signals
UNPROVEN = 64  # connections at the same time that have not shown that they know the secret


class Listener:
    """`drain` and `stop` may be called by signal handlers, all else by the thread that runs it."""

    def __init__(
        self, engine: Engine | EmbeddingEngine, facts: Mapping[str, Any], secret: bytes, tls: Certificate | None = None
    ) -> None:
        """`facts`: `replica.facts_of`; `tls`: of `tls.engine_context`, or None for plain connections."""
        self.engine, self.facts, self.secret, self.tls = engine, facts, secret, tls
        self._proving = threading.Semaphore(UNPROVEN)
        self._sessions: set[Session] = set()  # each thread adds and removes its own
        self._draining = self._stopped = False

    @classmethod
    def of(cls, opened: InferenceEngine, model: str, secret: bytes, tls: Certificate | None = None) -> Listener:
        """Of the engine that was opened from the folder or file `model`."""
        opened.engine.prepare()
        facts = facts_of(opened.engine, opened.description, opened.dtype, weights_digest(model))
        return cls(opened.engine, facts, secret, tls)

    def drain(self) -> None:
        """Take no further requests: servers send them to other engines. `run` returns when those that run have ended."""
        self._draining = True

    def stop(self) -> None:
        """Make `run` return now; what is unfinished is cancelled."""
        self._draining = self._stopped = True

    def run(self, sockets: Sequence[socket.socket], drain_timeout_s: float) -> None:
        """Serve those that connect to the bound sockets, which this closes, until `drain` or the engine's end."""
        self._listen(sockets)
        if self.engine.healthy:
            self._finish(time.monotonic() + drain_timeout_s)
        for session in list(self._sessions):
            session.link.close()

    def _listen(self, sockets: Sequence[socket.socket]) -> None:
        with selectors.DefaultSelector() as selector:
            for listening in sockets:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an engine before may linger
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
        """Close each connection that has no unfinished request any more, until `end` (time.monotonic)."""
        for session in list(self._sessions):
            session.link.send("leave", 0)
        while self.engine.healthy and not self._stopped and time.monotonic() < end and self._sessions:
            for session in list(self._sessions):
                if session.idle:
                    session.link.close()  # after what it has sent
            time.sleep(LOOK)
        if unfinished := sum(not session.idle for session in list(self._sessions)):
            logger.warning("%d servers have unfinished requests, which end with this engine", unfinished)

    def _accept(self, listening: socket.socket) -> None:
        with suppress(OSError):  # it has gone again
            connection, address = listening.accept()
            if self._proving.acquire(blocking=False):
                threading.Thread(target=self._meet, args=(connection, address[0]), daemon=True).start()
            else:
                connection.close()

    def _meet(self, accepted: socket.socket, host: str) -> None:
        """A thread: serve the connection, if it knows the secret, until it ends."""
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

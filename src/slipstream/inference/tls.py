"""TLS 1.3 over the connection of a server to an engine on another host, below `handshake` and `wire`.

The engine shows a certificate, which the server verifies, its host included; who the server is, the secret of `handshake` says.

[Note: Two threads] One thread of a `wire.Link` receives while another sends, which OpenSSL's objects do not allow. So `Encrypted`
moves the bytes itself, and OpenSSL only sees them, under a lock that nobody holds while he waits for the network.
"""

from __future__ import annotations

import io
import logging
import os
import socket
import ssl
import threading
import time
from contextlib import suppress
from typing import TypeAlias

logger = logging.getLogger(__name__)

TIME = 5.0  # seconds for the TLS handshake
LOOK = 1.0  # seconds between two looks at the files of a certificate
PART = 1 << 16  # bytes that are received at once
FLUSH = 1 << 18  # bytes that are encrypted at once


def engine_context(cert: str | os.PathLike[str], key: str | os.PathLike[str] | None) -> ssl.SSLContext:
    """Of the files of a certificate and its key (None: in the same file), in PEM. Raises OSError for others."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(cert, key)
    return context


def server_context(authorities: str | os.PathLike[str]) -> ssl.SSLContext:
    """Trusts the certificates that those in the file have signed, and these themselves. Raises OSError for another file."""
    context = ssl.create_default_context(cafile=authorities)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.hostname_checks_common_name = False  # only subjectAltName says whose it is
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # a certificate in the file is trusted, whoever has signed it
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # Python 3.13's default; authorities made by hand lack its extensions
    return context


class Certificate:
    """The files of a certificate and its key, which a context shows. When they change, new connections get the new one."""

    def __init__(self, context: ssl.SSLContext, cert: str | os.PathLike[str], key: str | os.PathLike[str] | None) -> None:
        """The context has loaded them."""
        self.context, self._files = context, (cert, key)
        self._seen = self._tried = self._stamp()
        self._next = 0.0  # when to look again, by time.monotonic

    def look(self) -> None:
        """Load them again if they have changed before the last look: by then they are complete. Call it often, from one thread."""
        if (now := time.monotonic()) < self._next:
            return
        self._next = now + LOOK
        before, self._seen = self._seen, self._stamp()
        if self._seen in (self._tried, None) or self._seen != before:
            return
        self._tried = self._seen
        cert, key = self._files
        try:
            # First into another one: a key of another certificate would leave this one without a key. Nobody can be asked for a
            # password.
            for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self.context):
                context.load_cert_chain(cert, key, password=lambda: "")
        except OSError as error:
            logger.warning("--tls-cert %s has changed: %s; the certificate before it stays", cert, error.strerror or error)
        else:
            logger.warning("--tls-cert %s has changed, and is shown to new connections", cert)

    def _stamp(self) -> tuple[tuple[int, ...], ...] | None:
        """None: a file is being replaced."""
        try:
            found = [os.stat(file) for file in self._files if file is not None]
        except OSError:
            return None
        return tuple((one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in found)


class Encrypted:
    """What `handshake` and `wire` use of a socket, over one that is connected. One thread may send while another one receives."""

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, host: str | None = None) -> None:
        """`host`: of the engine, for the server's end. Raises OSError if the other end speaks no TLS or takes longer than TIME, and
        ssl.SSLCertVerificationError for a certificate that is not trusted, or of another host."""
        self._connection = connection
        self._received, self._unsent = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._unsent, server_side=host is None, server_hostname=host)
        self._turn = threading.Lock()  # of the three above
        self._sending = threading.Lock()  # so that records leave in order
        deadline = time.monotonic() + TIME
        connection.settimeout(TIME)
        while not self._shaken():
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError(f"the TLS handshake takes longer than {TIME:g} s")
            connection.settimeout(left)
            if not (part := connection.recv(PART)):
                raise ConnectionError("the other end has closed the connection")
            self._received.write(part)

    def _shaken(self) -> bool:
        """Go on with the handshake; whether it is complete."""
        try:
            self._tls.do_handshake()
            done = True
        except ssl.SSLWantReadError:
            done = False
        except ssl.SSLError:
            with suppress(OSError):  # the other end may be gone
                self._connection.sendall(self._unsent.read())  # what is wrong
            raise
        self._connection.sendall(self._unsent.read())
        return done

    def settimeout(self, seconds: float | None) -> None:
        self._connection.settimeout(seconds)

    def sendall(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        with self._sending:
            while rest:
                with self._turn:
                    while rest and self._unsent.pending < FLUSH:
                        rest = rest[self._tls.write(rest) :]  # a record
                    records = self._unsent.read()
                self._connection.sendall(records)

    def recv(self, num: int) -> bytes:
        """At most so many bytes; none at the end. What OpenSSL answers by itself (to an update of keys) leaves with the next
        `sendall`, so that receiving never waits for the other end to receive."""
        while True:
            with self._turn:
                try:
                    return self._tls.read(num)
                except ssl.SSLWantReadError:
                    pass
                except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                    return b""
            part = self._connection.recv(PART)
            with self._turn:
                self._received.write(part) if part else self._received.write_eof()

    def makefile(self, mode: str) -> io.BufferedReader:
        """It keeps the descriptor, as a socket's does: `close` while another thread receives must not free its number."""
        return io.BufferedReader(_Decrypted(self, self._connection.makefile("rb", 0)), PART)

    def shutdown(self, how: int) -> None:
        self._connection.shutdown(how)

    def close(self) -> None:
        self._connection.close()


class _Decrypted(io.RawIOBase):
    def __init__(self, connection: Encrypted, held: io.RawIOBase) -> None:
        self._connection, self._held = connection, held

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override] # what BufferedReader gives
        part = self._connection.recv(len(buffer))
        buffer[: len(part)] = part
        return len(part)

    def close(self) -> None:
        self._held.close()
        super().close()


Connection: TypeAlias = socket.socket | Encrypted

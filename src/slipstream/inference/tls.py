"""TLS 1.3 for connections from a server to an engine on another host, below `handshake` and `wire`.

The engine shows a certificate, and the server verifies it, including the host name. The server proves its identity by the secret of
`handshake`.

[Note: Two threads] One thread of a `wire.Link` receives while another sends, which OpenSSL's objects do not support. So `Encrypted`
moves the bytes itself. OpenSSL only sees them under a lock, which no thread holds while it waits for the network.
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
LOOK = 1.0  # seconds between two checks of a certificate's files
PART = 1 << 16  # bytes that are received at once
FLUSH = 1 << 18  # bytes that are encrypted at once


def engine_context(cert: str | os.PathLike[str], key: str | os.PathLike[str] | None) -> ssl.SSLContext:
    """Load a certificate and its key (None: in the same file), in PEM. Raises OSError for other files."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(cert, key)
    return context


def server_context(authorities: str | os.PathLike[str]) -> ssl.SSLContext:
    """Trust the certificates in the file, and those that they have signed. Raises OSError for another file."""
    context = ssl.create_default_context(cafile=authorities)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.hostname_checks_common_name = False  # only subjectAltName is checked
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # a certificate in the file is trusted, whoever signed it
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # Python 3.13's default; hand-made authorities lack the required extensions
    return context


class Certificate:
    """The files of a certificate and its key, for a context. When the files change, new connections get the new certificate."""

    def __init__(self, context: ssl.SSLContext, cert: str | os.PathLike[str], key: str | os.PathLike[str] | None) -> None:
        """The context has loaded the files."""
        self.context, self._files = context, (cert, key)
        self._seen = self._tried = self._stamp()
        self._next = 0.0  # time.monotonic of the next check

    def look(self) -> None:
        """Reload the files if they changed before the previous check: by now they are complete. Call it often, from one thread."""
        if (now := time.monotonic()) < self._next:
            return
        self._next = now + LOOK
        before, self._seen = self._seen, self._stamp()
        if self._seen in (self._tried, None) or self._seen != before:
            return
        self._tried = self._seen
        cert, key = self._files
        try:
            # First into a separate context: a mismatched key would leave this one without a key. Nobody can enter a password.
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
    """The part of a socket that `handshake` and `wire` use, over a connected one. One thread may send while another receives."""

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, host: str | None = None) -> None:
        """`host`: the engine's, given only on the server's end. Raises OSError if the other end speaks no TLS or takes longer than
        TIME, and ssl.SSLCertVerificationError for a certificate that is not trusted or belongs to another host."""
        self._connection = connection
        self._received, self._unsent = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._unsent, server_side=host is None, server_hostname=host)
        self._turn = threading.Lock()  # guards the three above
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
        """Continue the handshake; return whether it is complete."""
        try:
            self._tls.do_handshake()
            done = True
        except ssl.SSLWantReadError:
            done = False
        except ssl.SSLError:
            with suppress(OSError):  # the other end may be gone
                self._connection.sendall(self._unsent.read())  # tells the other end what is wrong
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
        """At most `num` bytes; empty at the end. OpenSSL's own replies (to a key update) are sent with the next `sendall`, so that
        receiving never waits for the other end to receive."""
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
        """It keeps the descriptor open, as a socket's file does: `close` while another thread receives must not free the number."""
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

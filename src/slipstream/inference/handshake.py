"""Each end of a connection between hosts proves that it knows the shared secret, before either end parses anything.

    engine -> server    GREETING, a nonce of 32 bytes
    server -> engine    a nonce of 32 bytes, HMAC(secret, "server", both nonces)
    engine -> server    HMAC(secret, "engine", both nonces), or 32 zeros: refused

All lengths are fixed. The messages that follow (`wire`) are neither encrypted nor authenticated: TLS (`tls`), the network or a
tunnel has to protect them.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time

from slipstream.inference.tls import Connection

GREETING = b"slipstream engine 1\n"
SIZE = 32  # bytes of a nonce, and of an HMAC with SHA-256
TIME = 5.0  # seconds for the whole handshake
_REFUSED = bytes(SIZE)


def admit(connection: Connection, secret: bytes) -> bool:
    """The engine's end. Returns whether the other end knows the secret; raises OSError if it does not answer."""
    deadline, own_nonce = time.monotonic() + TIME, secrets.token_bytes(SIZE)
    connection.settimeout(TIME)
    connection.sendall(GREETING + own_nonce)
    other_nonce, proof = _receive(connection, SIZE, deadline), _receive(connection, SIZE, deadline)
    known = hmac.compare_digest(proof, _proof(secret, b"server", own_nonce, other_nonce))
    connection.sendall(_proof(secret, b"engine", own_nonce, other_nonce) if known else _REFUSED)
    return known


def enter(connection: Connection, secret: bytes) -> None:
    """The server's end. Raises ValueError if the secrets differ, OSError if the other end is no engine or does not answer."""
    deadline, own_nonce = time.monotonic() + TIME, secrets.token_bytes(SIZE)
    if _receive(connection, len(GREETING), deadline) != GREETING:
        raise OSError("what listens there is no engine of this version")
    other_nonce = _receive(connection, SIZE, deadline)
    connection.sendall(own_nonce + _proof(secret, b"server", other_nonce, own_nonce))
    if not hmac.compare_digest(_receive(connection, SIZE, deadline), _proof(secret, b"engine", other_nonce, own_nonce)):
        raise ValueError("the engine has another secret; give both the same --engine-secret-file or SLIPSTREAM_ENGINE_SECRET")


def _proof(secret: bytes, role: bytes, engines: bytes, servers: bytes) -> bytes:
    return hmac.digest(secret, role + engines + servers, hashlib.sha256)


def _receive(connection: Connection, num: int, deadline: float) -> bytes:
    received = b""
    while len(received) < num:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        if not (part := connection.recv(num - len(received))):
            raise ConnectionError("the other end has closed the connection")
        received += part
    return received

"""Transfers weights from a training to a serving process on one machine: messages over a unix socket, data in shared memory.

    handover.send(engine.named_weights(), to="weights.sock" if engine.rank == 0 else None)     # trainer, on every rank
    with handover.Receiver(inference_engine, "weights.sock"):                                  # server, once

The shared memory holds one tensor at a time: the receiver consumes it before the trainer gathers the next. No file is written, and
nothing received is executed: a message is a name, a dtype and a shape. Only processes of the same user can connect.

The memory is a memfd that is sealed against shrinking. The receiver refuses any other memory: reading a mapping of a truncated file
would end the process with SIGBUS.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import mmap
import os
import socket
import stat
import struct
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["HandoverError", "Receiver", "send"]

logger = logging.getLogger(__name__)

_HELLO = b"slipstream-weights-1"
_LENGTH = struct.Struct("<I")
_MAX_MESSAGE = 1 << 16  # bytes
_HELLO_S = 10.0  # seconds to wait for the first message, which a sender sends at once
_DTYPES = {str(each): each for each in (torch.float32, torch.bfloat16, torch.float16)}


class HandoverError(RuntimeError):
    """The weights did not arrive, or the receiver refused them."""


class Server(Protocol):
    """An engine whose weights can be updated, such as `InferenceEngine`."""

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None: ...


def send(tensors: Iterable[tuple[str, Tensor]], to: str | os.PathLike[str] | None, timeout_s: float = 600.0) -> None:
    """Send all of `tensors` to the receiver at `to`; return when the receiver serves them.

    to: None on ranks that only take part in gathering. timeout_s: the limit for the receiver to finish its running requests, and
    for each tensor. Raises HandoverError, but only after it has iterated to the end, because the other ranks gather with this one.
    """
    remaining = iter(tensors)
    try:
        if to is not None:
            _send(remaining, Path(to), timeout_s)
    except (OSError, HandoverError) as error:
        reason = "no receiver listens there: " if isinstance(error, (FileNotFoundError, ConnectionRefusedError)) else ""
        raise HandoverError(f"weights for {os.fspath(to or '')}: {reason}{error}") from error
    finally:
        for _ in remaining:
            pass


def _send(tensors: Iterator[tuple[str, Tensor]], to: Path, timeout_s: float) -> None:
    memory = os.memfd_create("slipstream-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with socket.socket(socket.AF_UNIX) as connection, _SharedMemory(memory) as shared:
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        connection.settimeout(timeout_s)
        connection.connect(os.fspath(to))
        socket.send_fds(connection, [_HELLO], [shared.descriptor])
        for name, tensor in tensors:
            if str(tensor.dtype) not in _DTYPES:
                raise HandoverError(f"{name!r} is {tensor.dtype}; weights are handed over as {', '.join(_DTYPES)}")
            shared.grow(tensor.nbytes)
            shared.view(tensor.dtype, tensor.shape).copy_(tensor)
            _send_message(connection, {"name": name, "dtype": str(tensor.dtype), "shape": list(tensor.shape)})
            _check_reply(connection)
        _send_message(connection, {})
        _check_reply(connection)


class Receiver:
    """Listens at `path` in its own thread, and passes received weights to `server.update_weights`.

    timeout_s: the limit per tensor, after which the receiver drops the sender and accepts the next. It must not be below the
    senders' timeout: if each rank sends to its own server, all ranks wait in a gather for the one whose server still finishes its
    requests.
    """

    def __init__(self, server: Server, path: str | os.PathLike[str], timeout_s: float = 600.0) -> None:
        self.server, self.path, self.timeout_s = server, Path(path), timeout_s
        self._sender: socket.socket | None = None  # the current or last connection
        self._closed = False
        self._socket = _listening(self.path)
        self._inode = self.path.lstat().st_ino
        self._thread = threading.Thread(target=self._run, name="slipstream-handover", daemon=True)
        self._thread.start()

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop receiving, even in the middle of an update. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for each in (self._socket, self._sender):
            if each is not None:
                with contextlib.suppress(OSError):  # already disconnected
                    each.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        with contextlib.suppress(FileNotFoundError):
            if self.path.lstat().st_ino == self._inode:  # not another server's; while ours is open, its inode is not reused
                self.path.unlink()
        self._socket.close()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            with connection:
                self._sender = connection
                if self._closed:  # read after writing _sender; close() writes _closed before it reads _sender
                    return
                self._receive(connection)

    def _receive(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(min(self.timeout_s, _HELLO_S))
            hello, descriptors, _, _ = socket.recv_fds(connection, len(_HELLO), 1)
            connection.settimeout(self.timeout_s)
            if not hello and not descriptors:  # another server only checked whether this one listens (`_listening`)
                return
            if not descriptors:
                raise HandoverError("the sender's first message has no descriptor of shared memory")
            with _SharedMemory(descriptors[0]) as shared:
                if hello != _HELLO:
                    raise HandoverError(f"the sender speaks another protocol: {hello!r}, not {_HELLO!r}")
                _check_seal(shared.descriptor)
                self.server.update_weights(_received(connection, shared))
            _send_message(connection, {"taken": True})
        except Exception as error:  # any error goes to the sender, and the receiver keeps listening
            logger.exception("weights that came to %s were not taken", self.path)
            with contextlib.suppress(OSError):
                _send_message(connection, {"error": f"{type(error).__name__}: {error}"[: _MAX_MESSAGE // 8]})


def _listening(path: Path) -> socket.socket:
    """Open a socket at `path` with mode 0600. Raises ValueError if that fails, or if another file or a running server is there."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ValueError(f"weights cannot come to {path}: a file that is no socket is there; name another path")
        if _answers(path):
            raise ValueError(f"weights cannot come to {path}: another server takes them there; name another path, or stop that one")
        path.unlink()  # left by a killed server
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.socket(socket.AF_UNIX))
        try:
            listening.bind(os.fspath(path))
        except OSError as error:
            raise ValueError(f"weights cannot come to {path}: {error.strerror or error}; name another path") from None
        path.chmod(0o600)  # connections are refused until listen(); umask is no way, because it applies to all threads
        listening.listen(1)
        stack.pop_all()
    return listening


def _answers(path: Path) -> bool:
    """Whether a server listens at `path`."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # busy, or another user's
            return True
        return True


def _check_seal(descriptor: int) -> None:
    """Raise HandoverError if the sender could truncate the memory while it is read."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:  # not a memfd: files and devices have no seals
        seals = 0
    if not seals & fcntl.F_SEAL_SHRINK:
        raise HandoverError("the sender's memory is not a memfd with F_SEAL_SHRINK, so it could shrink while it is read")


def _received(connection: socket.socket, shared: _SharedMemory) -> Iterator[tuple[str, Tensor]]:
    while message := _receive_message(connection):
        name, dtype, shape = _parse(message)
        nbytes, size = math.prod(shape) * dtype.itemsize, os.fstat(shared.descriptor).st_size
        if nbytes > size:
            raise HandoverError(f"{name!r} of {dtype} {shape} has {nbytes:,} bytes; the sender's memory has {size:,}")
        shared.grow(nbytes)
        yield name, shared.view(dtype, shape)
        _send_message(connection, {"taken": True})


def _parse(message: dict[str, Any]) -> tuple[str, torch.dtype, list[int]]:
    name, dtype, shape = message.get("name"), _DTYPES.get(str(message.get("dtype"))), message.get("shape")
    sizes = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    if isinstance(name, str) and dtype is not None and shape is not None and sizes:
        return name, dtype, shape
    raise HandoverError(f"the sender announced {message!r:.200}; it must be a name, one of {', '.join(_DTYPES)}, and a shape")


class _SharedMemory:
    """Memory that both processes map."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory = torch.empty(0, dtype=torch.uint8)

    def grow(self, nbytes: int) -> None:
        if nbytes > len(self._memory):
            if os.fstat(self.descriptor).st_size < nbytes:
                os.ftruncate(self.descriptor, nbytes)
            self._memory = torch.frombuffer(mmap.mmap(self.descriptor, nbytes), dtype=torch.uint8)

    def view(self, dtype: torch.dtype, shape: Iterable[int]) -> Tensor:
        """Raises RuntimeError if the memory is smaller."""
        shape = torch.Size(shape)
        return self._memory[: shape.numel() * dtype.itemsize].view(dtype).view(shape)

    def __enter__(self) -> _SharedMemory:
        return self

    def __exit__(self, *error: object) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        os.close(self.descriptor)


def _send_message(connection: socket.socket, message: dict[str, Any]) -> None:
    text = json.dumps(message).encode()
    with contextlib.suppress(BrokenPipeError):  # the receiver's last message is read next
        connection.sendall(_LENGTH.pack(len(text)) + text)


def _receive_message(connection: socket.socket) -> dict[str, Any]:
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    if length > _MAX_MESSAGE:
        raise HandoverError(f"a message of {length:,} bytes; none has more than {_MAX_MESSAGE:,}")
    try:
        message = json.loads(_read(connection, length))
    except (ValueError, RecursionError) as error:
        raise HandoverError(f"a message is not JSON: {error}") from None
    if not isinstance(message, dict):
        raise HandoverError(f"a message is {message!r:.100}; it must be a JSON object")
    return message


def _read(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        try:
            more = connection.recv(length - len(data))
        except TimeoutError:
            raise HandoverError(f"the other process has said nothing for {connection.gettimeout()} s") from None
        if not more:
            raise HandoverError("the other process has gone before the last weight")
        data += more
    return data


def _check_reply(connection: socket.socket) -> None:
    if error := _receive_message(connection).get("error"):
        raise HandoverError(f"they were not taken: {error}")

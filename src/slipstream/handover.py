"""Weights from a process that trains to one that serves, on one machine: a unix socket for words, shared memory for numbers.

    handover.send(engine.named_weights(), to="weights.sock" if engine.rank == 0 else None)     # trainer, on every rank
    with handover.Receiver(inference_engine, "weights.sock"):                                  # server, once

One tensor at a time is in the shared memory: the receiver has put it to use before the next is asked of the trainer. No file is
written, and nothing that arrives is executed: a message is a name, a dtype and a shape. Only the same user's processes can connect.

The memory is a memfd sealed against shrinking, and the receiver takes no other: reading a mapping whose file was cut short would
end the process with SIGBUS.
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
_MOST = 1 << 16  # bytes of a message
_HELLO_S = 10.0  # seconds; a sender says it at once
_DTYPES = {str(each): each for each in (torch.float32, torch.bfloat16, torch.float16)}


class HandoverError(RuntimeError):
    """The weights did not arrive, or were not taken."""


class Server(Protocol):
    """What takes weights, as `InferenceEngine` does."""

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None: ...


def send(tensors: Iterable[tuple[str, Tensor]], to: str | os.PathLike[str] | None, timeout_s: float = 600.0) -> None:
    """Hand all of `tensors` to the receiver that listens at `to`; returns when it serves them.

    to: None on ranks that send nothing but take part in gathering. timeout_s: for the receiver to finish what it runs, and for each
    tensor. Raises HandoverError, after the iterator's end: other ranks count on this one.
    """
    left = iter(tensors)
    try:
        if to is not None:
            _send(left, Path(to), timeout_s)
    except (OSError, HandoverError) as error:
        nobody = "no receiver listens there: " if isinstance(error, (FileNotFoundError, ConnectionRefusedError)) else ""
        raise HandoverError(f"weights for {os.fspath(to or '')}: {nobody}{error}") from error
    finally:
        for _ in left:
            pass


def _send(tensors: Iterator[tuple[str, Tensor]], to: Path, timeout_s: float) -> None:
    memory = os.memfd_create("slipstream-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with socket.socket(socket.AF_UNIX) as connection, _Room(memory) as room:
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        connection.settimeout(timeout_s)
        connection.connect(os.fspath(to))
        socket.send_fds(connection, [_HELLO], [room.descriptor])
        for name, tensor in tensors:
            if str(tensor.dtype) not in _DTYPES:
                raise HandoverError(f"{name!r} is {tensor.dtype}; weights are handed over as {', '.join(_DTYPES)}")
            room.grow(tensor.nbytes)
            room.view(tensor.dtype, tensor.shape).copy_(tensor)
            _tell(connection, {"name": name, "dtype": str(tensor.dtype), "shape": list(tensor.shape)})
            _answer(connection)
        _tell(connection, {})
        _answer(connection)


class Receiver:
    """Listens at `path`, in a thread of its own, and gives what comes to `server.update_weights`.

    timeout_s: for each tensor; a sender that says nothing for so long is given up, and the next one served. Not below what senders
    have: where ranks send to a server each, all wait in their gathering for the one whose server still finishes what runs.
    """

    def __init__(self, server: Server, path: str | os.PathLike[str], timeout_s: float = 600.0) -> None:
        self.server, self.path, self.timeout_s = server, Path(path), timeout_s
        self._sender: socket.socket | None = None  # the last one
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
        """Take nothing more, of what is arriving neither. May be called twice."""
        if self._closed:
            return
        self._closed = True
        for each in (self._socket, self._sender):
            if each is not None:
                with contextlib.suppress(OSError):  # it has gone by itself
                    each.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        with contextlib.suppress(FileNotFoundError):
            if self.path.lstat().st_ino == self._inode:  # and not the next server's; while ours is open, none gets its number
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
                if self._closed:  # asked after that is written, which close() reads after it writes this
                    return
                self._take(connection)

    def _take(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(min(self.timeout_s, _HELLO_S))
            hello, descriptors, _, _ = socket.recv_fds(connection, len(_HELLO), 1)
            connection.settimeout(self.timeout_s)
            if not hello and not descriptors:  # another server asked whether there is one (`_listening`)
                return
            if not descriptors:
                raise HandoverError("the sender's first message has no descriptor of shared memory")
            with _Room(descriptors[0]) as room:
                if hello != _HELLO:
                    raise HandoverError(f"the sender speaks another protocol: {hello!r}, not {_HELLO!r}")
                _check_seal(room.descriptor)
                self.server.update_weights(_received(connection, room))
            _tell(connection, {"taken": True})
        except Exception as error:  # whatever it is, the sender must hear of it, and the next one may do better
            logger.exception("weights that came to %s were not taken", self.path)
            with contextlib.suppress(OSError):
                _tell(connection, {"error": f"{type(error).__name__}: {error}"[: _MOST // 8]})


def _listening(path: Path) -> socket.socket:
    """A socket at `path` for this user alone. Raises ValueError where something else is, or a server that lives."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ValueError(f"weights cannot come to {path}: there is something that is no socket; name another path")
        if _answers(path):
            raise ValueError(f"weights cannot come to {path}: another server takes them there; name another path, or stop that one")
        path.unlink()  # a server's that was killed
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.socket(socket.AF_UNIX))
        listening.bind(os.fspath(path))
        path.chmod(0o600)  # in time: before listen() every connection is refused (and a umask would be all threads')
        listening.listen(1)
        stack.pop_all()
    return listening


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(1.0)
        try:
            asking.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # it is busy, or another user's
            return True
        return True


def _check_seal(descriptor: int) -> None:
    """Refuse memory that the sender could cut short while it is read here."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:  # no memfd: files and devices have no seals
        seals = 0
    if not seals & fcntl.F_SEAL_SHRINK:
        raise HandoverError("the sender's memory is not a memfd with F_SEAL_SHRINK, so it could shrink while it is read")


def _received(connection: socket.socket, room: _Room) -> Iterator[tuple[str, Tensor]]:
    while message := _hear(connection):
        name, dtype, shape = _announced(message)
        nbytes, size = math.prod(shape) * dtype.itemsize, os.fstat(room.descriptor).st_size
        if nbytes > size:
            raise HandoverError(f"{name!r} of {dtype} {shape} has {nbytes:,} bytes; the sender's memory has {size:,}")
        room.grow(nbytes)
        yield name, room.view(dtype, shape)
        _tell(connection, {"taken": True})


def _announced(message: dict[str, Any]) -> tuple[str, torch.dtype, list[int]]:
    name, dtype, shape = message.get("name"), _DTYPES.get(str(message.get("dtype"))), message.get("shape")
    sizes = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    if isinstance(name, str) and dtype is not None and shape is not None and sizes:
        return name, dtype, shape
    raise HandoverError(f"the sender announced {message!r:.200}; it has to be a name, one of {', '.join(_DTYPES)}, and a shape")


class _Room:
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
        """Raises RuntimeError where the memory is smaller."""
        shape = torch.Size(shape)
        return self._memory[: shape.numel() * dtype.itemsize].view(dtype).view(shape)

    def __enter__(self) -> _Room:
        return self

    def __exit__(self, *error: object) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        os.close(self.descriptor)


def _tell(connection: socket.socket, message: dict[str, Any]) -> None:
    text = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(text)) + text)


def _hear(connection: socket.socket) -> dict[str, Any]:
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    if length > _MOST:
        raise HandoverError(f"a message of {length:,} bytes; none has more than {_MOST:,}")
    try:
        message = json.loads(_read(connection, length))
    except (ValueError, RecursionError) as error:
        raise HandoverError(f"a message is not JSON: {error}") from None
    if not isinstance(message, dict):
        raise HandoverError(f"a message is {message!r:.100}; it has to be a JSON object")
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


def _answer(connection: socket.socket) -> None:
    if error := _hear(connection).get("error"):
        raise HandoverError(f"they were not taken: {error}")

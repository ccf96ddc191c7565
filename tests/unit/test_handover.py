"""A receiver of weights and senders that do not keep to the protocol: the server stays, and the next sender is served."""

import contextlib
import fcntl
import json
import os
import re
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import handover

WEIGHT = {"name": "w", "dtype": "torch.float32", "shape": [4, 4]}


class Recorder:
    """A server that reads what comes."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            self.sums[name] = float(tensor.float().sum())


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[Recorder, Path]]:
    recorder, path = Recorder(), tmp_path / "weights.sock"
    with handover.Receiver(recorder, path):
        yield recorder, path


@contextlib.contextmanager
def memory(nbytes: int, seals: int = fcntl.F_SEAL_SHRINK) -> Iterator[int]:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        yield descriptor
    finally:
        os.close(descriptor)


def answer(path: Path, descriptors: list[int], message: Any, hello: bytes = b"slipstream-weights-1") -> str:
    """What the receiver says to a sender of one message: an error, or nothing."""
    text = message if isinstance(message, bytes) else json.dumps(message).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        connection.connect(os.fspath(path))
        socket.send_fds(connection, [hello], descriptors)
        with contextlib.suppress(BrokenPipeError):  # refused before that
            connection.sendall(struct.pack("<I", len(text)) + text)
        (length,) = struct.unpack("<I", connection.recv(4, socket.MSG_WAITALL))
        return str(json.loads(connection.recv(length, socket.MSG_WAITALL)).get("error", ""))


def test_memory_that_could_shrink_is_refused(server: tuple[Recorder, Path], tmp_path: Path) -> None:
    """A sender that truncates it after its announcement would end the server with SIGBUS."""
    recorder, path = server
    with memory(64, seals=0) as unsealed:
        assert "is not a memfd with F_SEAL_SHRINK" in answer(path, [unsealed], WEIGHT)
    with memory(64, seals=fcntl.F_SEAL_GROW) as growing:
        assert "is not a memfd with F_SEAL_SHRINK" in answer(path, [growing], WEIGHT)
    with open(tmp_path / "file", "w+b") as file:
        file.truncate(64)
        assert "is not a memfd with F_SEAL_SHRINK" in answer(path, [file.fileno()], WEIGHT)
    assert not recorder.sums
    with memory(64) as sealed:
        with pytest.raises(PermissionError):
            os.ftruncate(sealed, 0)
        assert answer(path, [sealed], WEIGHT) == ""
    assert recorder.sums == {"w": 0.0}


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({**WEIGHT, "shape": [4, 5]}, r"'w' of torch.float32 \[4, 5\] has 80 bytes; the sender's memory has 64"),
        ({**WEIGHT, "shape": [10**30]}, "the sender's memory has 64"),
        ({**WEIGHT, "shape": [-4, -4]}, "the sender announced .* it must be a name, one of torch.float32"),
        ({**WEIGHT, "shape": None}, "the sender announced"),
        ({**WEIGHT, "shape": [True, 2.0]}, "the sender announced"),
        ({**WEIGHT, "dtype": ["torch.float32"]}, "the sender announced"),
        ({**WEIGHT, "dtype": "torch.int64"}, "the sender announced"),
        ({**WEIGHT, "name": 3}, "the sender announced"),
        ([WEIGHT], "a message is .*; it must be a JSON object"),
        (b"{", "a message is not JSON"),
        (b"[" * 60_000, "a message is not JSON"),
    ],
)
def test_an_announcement_that_is_wrong_is_refused(server: tuple[Recorder, Path], message: Any, error: str) -> None:
    recorder, path = server
    with memory(64) as descriptor:
        reply = answer(path, [descriptor], message)
    assert re.search(error, reply), reply
    assert not recorder.sums
    handover.send([("w", torch.ones(2, 3))], to=path)
    assert recorder.sums == {"w": 6.0}


def test_a_first_message_that_is_wrong_is_refused(server: tuple[Recorder, Path]) -> None:
    recorder, path = server
    with memory(64) as descriptor:
        assert "no descriptor of shared memory" in answer(path, [], WEIGHT)
        assert "speaks another protocol" in answer(path, [descriptor], WEIGHT, hello=b"slipstream-weights-9")
    assert not recorder.sums


def test_a_sender_that_was_dropped_is_told_why(tmp_path: Path) -> None:
    def late() -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.ones(2)
        time.sleep(0.5)
        yield "b", torch.ones(2)
        yield "c", torch.ones(2)

    with (
        handover.Receiver(Recorder(), tmp_path / "weights.sock", timeout_s=0.1),
        pytest.raises(handover.HandoverError, match=r"were not taken: .* has said nothing for 0\.1 s"),
    ):
        handover.send(late(), to=tmp_path / "weights.sock")

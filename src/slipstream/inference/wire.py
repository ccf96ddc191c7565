"""Messages between the HTTP server's process and an engine's (`replica`): JSON in frames over a stream socket.

A frame is its length in 4 bytes, little-endian, and a JSON array of messages. A message is an array that begins with its kind.
`open` and `refused` are only used with an engine that the server starts, `leave` by an engine that was started elsewhere and now
ends. A zygote's messages are in `replica`:

    to the engine                                from the engine
    open, model, options, replicas, cores        ready, facts   or   refused, why
    submit, number, prompt, params, fields       done, number, value   or   failed, number, kind, why
    call, number, name, arguments                done, number, value   or   failed, number, kind, why
    cancel, number                               output, number, output
    hold, number, held                           leave, 0

Numbers are written as Python's repr, so floats arrive with identical bits.
"""

from __future__ import annotations

import hashlib
import json
import logging
import select
import socket
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from typing import Any

from slipstream.inference.core import Finish, QueueFullError, Request, SamplingParams
from slipstream.inference.engine import ClosedError, FailedError
from slipstream.inference.sequence import Logprob, Output, Usage, nbytes_of
from slipstream.inference.stats import Histogram, Stats
from slipstream.inference.tls import Connection

logger = logging.getLogger(__name__)

MAX_FRAME = 1 << 30  # bytes; a longer frame is not of this protocol
FLUSH = 2.0  # seconds for the other end to read pending messages at the end
BEAT = 2.0  # seconds without a message after which an end sends an empty frame
SILENCE = 5  # beats without a message after which the other end, or the network, is taken for lost
SLICE = 64 << 10  # bytes that the other end must read in that time, and that the kernel buffers
MAX_AHEAD = 1 << 20  # bytes, approximately, of unread outputs beyond which a link is full
MAX_BATCH = 256  # messages per frame
_ERRORS: Mapping[str, type[Exception]] = {"value": ValueError, "full": QueueFullError, "failed": FailedError, "closed": ClosedError}


class Link:
    """One end of a connection. `send` returns at once, from any thread; one thread reads `messages`.

    The first `send` starts a writer thread. Each of its frames has all messages sent since the frame before: a step of the engine
    is one frame. Unread messages are kept, so a sender of outputs must stop generating while the link is `full`."""

    def __init__(self, connection: Connection, beat: float | None = None) -> None:
        """`beat`: of `live`, between hosts."""
        self.connection = connection
        self._beat: float | None = None
        self._begins = False  # starts the heartbeat while the writer waits without one
        connection.settimeout(None)
        self.messages = self._read()  # ends when the other end closes the connection
        self._unsent: list[Sequence[Any]] = []
        self._ahead = 0  # bytes, approximately, of outputs in it and in the frame being written
        self._waiting: list[Callable[[], object]] = []  # called when there is room
        self._closed = False
        self._changed = threading.Condition()
        self._writer = threading.Thread(target=self._write, name="slipstream-wire", daemon=True)
        if beat is not None:
            self.live(beat)

    def live(self, beat: float = BEAT) -> None:
        """From now on write an empty frame after `beat` seconds without a message. End the connection if the other end, which must
        do the same, is silent for SILENCE beats: it has stopped, or cannot be reached."""
        self.connection.settimeout(beat * SILENCE)
        with self._changed:
            self._beat, self._begins = beat, True
            if self._writer.ident is None:
                self._writer.start()
            self._changed.notify()

    def send(self, *message: Any) -> None:
        """The writer packs an `Output`, so that this costs the engine's thread nothing."""
        with self._changed:
            if self._closed:
                return
            self._unsent.append(message)
            self._ahead += _nbytes(message)
            if self._writer.ident is None:
                self._writer.start()
            self._changed.notify()

    @property
    def full(self) -> bool:
        """Whether the other end reads outputs more slowly than they are sent."""
        return self._ahead > MAX_AHEAD

    def when_room(self, call: Callable[[], object]) -> None:
        """Call `call`, now or from another thread, once half of a full link's limit is free; never if the connection ends."""
        with self._changed:
            self._waiting.append(call)
        self._took(0)

    def close(self) -> None:
        """Write pending messages, then end the connection. The other end may be gone."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._writer.ident is not None:
            self._writer.join(FLUSH)
        with suppress(OSError):  # the other end was first
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()
        with suppress(ValueError):  # another thread reads, and ends it
            self.messages.close()

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unsent or self._closed or self._begins, self._beat)
                self._begins = False
                batch, self._unsent = self._unsent[:MAX_BATCH], self._unsent[MAX_BATCH:]
                if not batch and self._closed:
                    return
            try:
                frame = memoryview(frame_of(batch))
                for start in range(0, len(frame), SLICE):  # the timeout applies to each slice
                    self.connection.sendall(frame[start : start + SLICE])
            except OSError:  # the connection is lost, or the other end reads nothing
                self._lose()
                return
            self._took(sum(map(_nbytes, batch)))

    def _took(self, nbytes: int) -> None:
        calls: list[Callable[[], object]] = []
        with self._changed:
            self._ahead -= nbytes
            if self._ahead <= MAX_AHEAD // 2:
                calls, self._waiting = self._waiting, []
        for call in calls:
            call()

    def _lose(self) -> None:
        """End the connection and drop pending messages: the reader ends."""
        with self._changed:
            self._closed, self._unsent, self._ahead = True, [], 0
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _read(self) -> Generator[list[Any]]:
        with self.connection.makefile("rb") as stream:
            try:
                while len(head := stream.read(4)) == 4:
                    if (length := int.from_bytes(head, "little")) > MAX_FRAME or len(frame := stream.read(length)) < length:
                        return
                    yield from json.loads(frame)
            except (OSError, ValueError):  # lost, closed here, or not of this protocol
                return


def keep_little(connection: socket.socket) -> None:
    """Let the kernel buffer SLICE unread bytes, besides those in flight, instead of 4 MB: so nothing is generated that may never be
    read. Connections inherit this from a listening socket."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, SLICE)


def is_readable(descriptor: int, seconds: float) -> bool:
    """Whether the descriptor is readable within `seconds`. A server's descriptors can be too large for `select`."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def frame_of(batch: Sequence[Sequence[Any]]) -> bytes:
    frame = json.dumps(batch, separators=(",", ":"), default=_plain).encode()
    return len(frame).to_bytes(4, "little") + frame


def _nbytes(message: Sequence[Any]) -> int:
    return nbytes_of(message[-1]) if isinstance(message[-1], Output) else 0


def _plain(value: Any) -> Any:
    """An output as the list of its fields."""
    if isinstance(value, Finish):
        return value.value
    if not isinstance(value, Output):
        raise TypeError(f"a {type(value).__name__} is no part of a message")
    return [getattr(value, one.name) for one in fields(Output)]


def output_of(packed: Sequence[Any]) -> Output:
    index, text, tokens, logprobs, finish, usage, error, scored, stopped = packed
    return Output(
        index,
        text,
        tuple(tokens),
        tuple(_logprob(*one) for one in logprobs),
        finish and Finish(finish),
        usage and Usage(*usage),
        error,
        None if scored is None else tuple(one and _logprob(*one) for one in scored),
        stopped,
    )


def _logprob(token: int, value: float, top: Sequence[Sequence[Any]], rank: int) -> Logprob:
    return Logprob(token, value, [(other, likely) for other, likely in top], rank)


def packed_params(params: SamplingParams) -> dict[str, Any]:
    """The fields that differ from their defaults, for SamplingParams. JSON keys are strings, so biases are pairs."""
    changed = {one.name: getattr(params, one.name) for one in fields(params)}
    changed = {name: value for name, value in changed.items() if value != getattr(_DEFAULTS, name)}
    return changed | ({"logit_bias": list(params.logit_bias.items())} if params.logit_bias else {})


_DEFAULTS = SamplingParams()
_FIELDS = ",".join([*(one.name for kind in (SamplingParams, Request, Output, Stats) for one in fields(kind)), *_ERRORS])
# For both ends: the package's version (which no room may import), and a digest of the names in the messages.
VERSION = f"{sys.modules['slipstream'].__version__} (messages {hashlib.sha256(_FIELDS.encode()).hexdigest()[:8]})"


def packed_stats(stats: Stats) -> dict[str, Any]:
    return asdict(stats) | {"finished": {finish.value: count for finish, count in stats.finished.items()}}


def stats_of(packed: Mapping[str, Any]) -> Stats:
    histograms = {one.name: packed[one.name] for one in fields(Stats) if one.type == "Histogram"}
    found = {name: Histogram(tuple(one["bounds"]), one["counts"], one["sum"]) for name, one in histograms.items()}
    return Stats(**{**packed, **found, "finished": {Finish(name): count for name, count in packed["finished"].items()}})


def packed_error(error: Exception) -> tuple[str, str]:
    """The error's kind and text. The text of an error that nobody expected is only for the log."""
    if (kind := next((name for name, one in _ERRORS.items() if isinstance(error, one)), None)) is not None:
        return kind, str(error)
    logger.error("a request failed", exc_info=error)
    return "failed", "internal error; see the engine's log"


def error_of(kind: str, why: str) -> Exception:
    return _ERRORS[kind](why)

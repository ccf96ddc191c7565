"""Messages between the HTTP server's process and an engine's (`replica`): JSON in frames over a stream socket.

A frame is its length in 4 bytes, little-endian, and a JSON array of messages. A message is an array that begins with its kind
(`open` and `refused` are of an engine that the server starts, `leave` of one that others have started and now end; a zygote's are
in `replica`):

    to the engine                                from the engine
    open, model, options, replicas, cores        ready, facts   or   refused, why
    submit, number, prompt, params, fields       done, number, value   or   failed, number, kind, why
    call, number, name, arguments                done, number, value   or   failed, number, kind, why
    cancel, number                               output, number, output
    hold, number, held                           leave, 0

Numbers are in JSON as Python's repr, so floats arrive as the bits that were sent.
"""

from __future__ import annotations

import hashlib
import json
import select
import socket
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from typing import Any

from slipstream.inference.core import Finish, QueueFullError, Request, SamplingParams
from slipstream.inference.engine import ClosedError, Logprob, Output, Usage, nbytes_of
from slipstream.inference.stats import Histogram, Stats
from slipstream.inference.tls import Connection

MAX_FRAME = 1 << 30  # bytes; a longer one is not of this protocol
FLUSH = 2.0  # seconds for the other end to take what was sent before the end
BEAT = 2.0  # seconds after which an end with nothing to say says so
SILENCE = 5  # beats after which the other end, or the way to it, is taken for lost
SLICE = 64 << 10  # bytes that the other end has to take in that time, and that the kernel keeps for it
MAX_AHEAD = 1 << 20  # bytes of memory, about, of outputs that the other end has not taken; with more, a link is full
MAX_BATCH = 256  # messages of a frame
_ERRORS: Mapping[str, type[Exception]] = {"value": ValueError, "full": QueueFullError, "closed": ClosedError}


class Link:
    """One end of a connection. `send` returns at once, from any thread; one thread reads `messages`.

    A thread of its own, which the first `send` starts, writes what was sent since its last frame as the next one: a step of the
    engine is one frame. What the other end does not take is kept, so who sends outputs without being asked stops making them
    while the link is `full`."""

    def __init__(self, connection: Connection, beat: float | None = None) -> None:
        """`beat`: of `live`, between hosts."""
        self.connection = connection
        self._beat: float | None = None
        self._begins = False  # to beat, while the writer waits without one
        connection.settimeout(None)
        self.messages = self._read()  # until the other end closes the connection
        self._unsent: list[Sequence[Any]] = []
        self._ahead = 0  # bytes, about, of the outputs in it and in the frame that is being written
        self._waiting: list[Callable[[], object]] = []  # for room
        self._closed = False
        self._changed = threading.Condition()
        self._writer = threading.Thread(target=self._write, name="slipstream-wire", daemon=True)
        if beat is not None:
            self.live(beat)

    def live(self, beat: float = BEAT) -> None:
        """From now on write an empty frame when there was nothing for `beat` seconds, and end the connection if the other end,
        which must do so too, is silent for SILENCE times as long: it has stopped, or cannot be reached."""
        self.connection.settimeout(beat * SILENCE)
        with self._changed:
            self._beat, self._begins = beat, True
            if self._writer.ident is None:
                self._writer.start()
            self._changed.notify()

    def send(self, *message: Any) -> None:
        """An `Output` is packed by the writer, so that it costs the engine's thread nothing."""
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
        """The other end takes outputs more slowly than they are sent."""
        return self._ahead > MAX_AHEAD

    def when_room(self, call: Callable[[], object]) -> None:
        """Call it, now or from another thread, once half of what makes a link full is taken. Not if the connection ends."""
        with self._changed:
            self._waiting.append(call)
        self._took(0)

    def close(self) -> None:
        """Write what was sent, and end the connection. The other end may be gone."""
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
                for start in range(0, len(frame), SLICE):  # the timeout is each one's
                    self.connection.sendall(frame[start : start + SLICE])
            except OSError:  # it is lost, or takes nothing
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
        """End the connection, with what is unsent: its reader ends."""
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
            except (OSError, ValueError):  # it is lost, closed here, or not of this protocol
                return


def keep_little(connection: socket.socket) -> None:
    """Let the kernel keep SLICE bytes, beside those on the way, that the other end does not read, and not 4 MB: nothing is made for
    it that it may never read. Of a listening socket, it holds for all that it accepts."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, SLICE)


def is_readable(descriptor: int, seconds: float) -> bool:
    """Within so many seconds. Any descriptor will do: those of a server with many clients are too large for `select`."""
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
    index, text, tokens, logprobs, finish, usage, error, scored = packed
    return Output(
        index,
        text,
        tuple(tokens),
        tuple(_logprob(*one) for one in logprobs),
        finish and Finish(finish),
        usage and Usage(*usage),
        error,
        None if scored is None else tuple(one and _logprob(*one) for one in scored),
    )


def _logprob(token: int, value: float, top: Sequence[Sequence[Any]]) -> Logprob:
    return Logprob(token, value, [(other, likely) for other, likely in top])


def packed_params(params: SamplingParams) -> dict[str, Any]:
    """The fields that are not at their default, for SamplingParams. JSON has texts as keys only, so the biases are pairs."""
    changed = {one.name: getattr(params, one.name) for one in fields(params)}
    changed = {name: value for name, value in changed.items() if value != getattr(_DEFAULTS, name)}
    return changed | ({"logit_bias": list(params.logit_bias.items())} if params.logit_bias else {})


_DEFAULTS = SamplingParams()
_FIELDS = ",".join(one.name for kind in (SamplingParams, Request, Output, Stats) for one in fields(kind))
# Of both ends: the package's (which no room may import), and what messages carry, which differs between two commits of it.
VERSION = f"{sys.modules['slipstream'].__version__} (messages {hashlib.sha256(_FIELDS.encode()).hexdigest()[:8]})"


def packed_stats(stats: Stats) -> dict[str, Any]:
    return asdict(stats) | {"finished": {finish.value: count for finish, count in stats.finished.items()}}


def stats_of(packed: Mapping[str, Any]) -> Stats:
    histograms = {one.name: packed[one.name] for one in fields(Stats) if one.type == "Histogram"}
    found = {name: Histogram(tuple(one["bounds"]), one["counts"], one["sum"]) for name, one in histograms.items()}
    return Stats(**{**packed, **found, "finished": {Finish(name): count for name, count in packed["finished"].items()}})


def packed_error(error: Exception) -> tuple[str, str]:
    """Its kind and its text."""
    kind = next((name for name, one in _ERRORS.items() if isinstance(error, one)), "closed")
    return kind, str(error) if kind in _ERRORS and isinstance(error, _ERRORS[kind]) else f"{type(error).__name__}: {error}"


def error_of(kind: str, why: str) -> Exception:
    return _ERRORS[kind](why)

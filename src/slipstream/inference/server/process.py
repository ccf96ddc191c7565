"""The process of one replica: its start, what it says on stderr, its end.

An engine's process imports torch for longer than it opens a small model, so a `Spare` has done that for the next start."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

from slipstream.inference.wire import Link

TAIL = 20  # lines of stderr that are kept for the error
PATIENCE = 5.0  # seconds for a process to end by itself
ATTEMPTS = 3  # starts in a row that may fail before the server ends
MAX_PAUSE = 10.0  # seconds between two starts
SPARE = "spare engine"


class ReplicaError(RuntimeError):
    """An engine's process ended before its engine was ready."""


class Connected(NamedTuple):
    link: Link
    facts: Mapping[str, Any]  # `replica.facts_of`


class Blank:
    """A started process that is not told yet which model to open."""

    def __init__(self) -> None:
        self.name = SPARE
        self.tail = deque[str](maxlen=TAIL)
        ours, theirs = socket.socketpair()
        said, says = os.pipe()
        with theirs, os.fdopen(says, "wb") as output:
            command = [sys.executable, "-m", "slipstream.inference.replica", str(theirs.fileno())]
            # A group of its own: the terminal's Ctrl-C is the server's, which lets running requests finish.
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=output, stderr=output, process_group=0)
        self.forwarding = threading.Thread(target=self._forward, args=(os.fdopen(said, errors="replace"),), daemon=True)
        self.forwarding.start()
        self.link = Link(ours)

    def end(self) -> str:
        """Wait until the process has ended, kill it if that takes long, and return how it ended. Its link is closed."""
        try:
            status = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        return f"exited with status {status}" if status >= 0 else f"was ended by {signal.Signals(-status).name}"

    def _forward(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self.tail.append(line)
                sys.stderr.write(f"{self.name}: {line}")
                sys.stderr.flush()


class Spare:
    """One process for the next start of any engine. Every thread may call it."""

    def __init__(self) -> None:
        self._blank: Blank | None = None
        self._closed = False
        self._lock = threading.Lock()

    def take(self) -> Blank:
        """The spare process, if it lives; else a new one."""
        with self._lock:
            blank, self._blank = self._blank, None
        if blank is not None and blank.process.poll() is None:
            return blank
        if blank is not None:
            blank.link.close()
        return Blank()

    def fill(self) -> None:
        with self._lock:
            if self._blank is None and not self._closed:
                self._blank = Blank()

    def __enter__(self) -> Spare:
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._closed, blank, self._blank = True, self._blank, None
        if blank is not None:
            blank.link.close()
            blank.process.kill()
            blank.process.wait()


@dataclass(kw_only=True)
class EngineProcess:
    """A `router.Source`: starts the process of one engine, again after each end. One thread calls it."""

    address = ""
    attempts = ATTEMPTS
    max_pause = MAX_PAUSE
    name: str
    model: str
    options: Mapping[str, Any]  # of `init_inference`
    replicas: int  # that share this machine's memory
    cores: Sequence[int]  # that it runs on; none: all
    spare: Spare  # of the server

    def __post_init__(self) -> None:
        self._blank: Blank | None = None
        self._stopped = False

    def open(self) -> Connected:
        """Start it and wait until its engine is ready. Raises ValueError for options that the engine refuses, ReplicaError with
        the end of its stderr if it ends."""
        self._blank = blank = self.spare.take()
        blank.name = self.name
        if self._stopped:
            blank.process.kill()
        blank.link.send("open", self.model, self.options, self.replicas, self.cores)
        kind, *rest = next(blank.link.messages, ("ended",))
        if kind == "ready":
            self.spare.fill()  # now that it does not delay this one
            return Connected(blank.link, rest[0])
        blank.link.close()
        ending = blank.end()
        blank.forwarding.join(1)
        if kind == "refused":
            raise ValueError(rest[0])
        raise ReplicaError(f"{self.name} {ending} before its engine was ready; its last lines:\n{''.join(blank.tail).rstrip()}")

    @property
    def pid(self) -> int | None:
        return None if self._blank is None else self._blank.process.pid

    def stop(self) -> None:
        """Make `open` raise, from another thread."""
        self._stopped = True
        if self._blank is not None:
            self._blank.process.kill()

    def end(self) -> str:
        """Wait until the process has ended, kill it if that takes long, and return how it ended. Its link is closed."""
        return "was never started" if self._blank is None else self._blank.end()

"""The process of one replica: its start, what it says on stderr, its end."""

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


class ReplicaError(RuntimeError):
    """An engine's process ended before its engine was ready."""


class Connected(NamedTuple):
    link: Link
    facts: Mapping[str, Any]  # `replica.facts_of`


@dataclass(kw_only=True)
class EngineProcess:
    """Starts the process of one engine, again after each end. One thread calls it."""

    name: str
    model: str
    options: Mapping[str, Any]  # of `init_inference`
    replicas: int  # that share this machine's memory
    cores: Sequence[int]  # that it runs on; none: all

    def __post_init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._tail = deque[str](maxlen=TAIL)

    def open(self) -> Connected:
        """Start it and wait until its engine is ready. Raises ValueError for options that the engine refuses, ReplicaError with
        the end of its stderr if it ends."""
        ours, theirs = socket.socketpair()
        said, says = os.pipe()
        with theirs, os.fdopen(says, "wb") as output:
            command = [sys.executable, "-m", "slipstream.inference.replica", str(theirs.fileno())]
            environment = dict(os.environ)
            if threads := self.options.get("threads") or len(self.cores):
                environment["OMP_NUM_THREADS"] = str(threads)
            # A group of its own: the terminal's Ctrl-C is the server's, which lets running requests finish.
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=environment, stdout=output, stderr=output, process_group=0
            )
        forwarding = threading.Thread(target=self._forward, args=(os.fdopen(said, errors="replace"),), daemon=True)
        forwarding.start()
        link = Link(ours)
        link.send("open", self.model, self.options, self.replicas, self.cores)
        kind, *rest = next(link.messages, ("ended",))
        if kind == "ready":
            return Connected(link, rest[0])
        link.close()
        ending = self.end()
        forwarding.join(1)
        if kind == "refused":
            raise ValueError(rest[0])
        raise ReplicaError(f"{self.name} {ending} before its engine was ready; its last lines:\n{''.join(self._tail).rstrip()}")

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def stop(self) -> None:
        """Make `open` raise, from another thread."""
        if self._process is not None:
            self._process.kill()

    def end(self) -> str:
        """Wait until the process has ended, kill it if that takes long, and return how it ended. Its link is closed."""
        if self._process is None:
            return "was never started"
        try:
            status = self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        return f"exited with status {status}" if status >= 0 else f"was ended by {signal.Signals(-status).name}"

    def _forward(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._tail.append(line)
                sys.stderr.write(f"{self.name}: {line}")
                sys.stderr.flush()

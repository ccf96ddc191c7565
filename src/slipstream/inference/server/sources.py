"""Where a server's engines are: each in a process of this host, or on another host.

The process of a replica: its start, its stderr, its end. On CPUs replicas are forks of a `Zygote`, which has loaded the model.
Importing torch takes a process longer than opening a small model, so a `Spare` has imported it in advance for the next process that
loads a model.

An engine on another host (`listener`) is started and ended there: `EngineAddress` connects to it, and again when it is lost.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import IO, Any, NamedTuple, TypeAlias

from slipstream.inference.handshake import enter
from slipstream.inference.tls import Connection, Encrypted
from slipstream.inference.wire import BEAT, Link, frame_of, is_readable

TAIL = 20  # lines of stderr kept for the error message
PATIENCE = 5.0  # seconds for a process to exit by itself
ATTEMPTS = 3  # consecutive starts that may fail before the server exits
MAX_PAUSE = 10.0  # the most seconds between two starts
SPARE = "spare engine"
CONNECT = 3.0  # seconds to connect to another host
PAUSE = 1.0  # the most seconds between two tries
BUSY = 0.5  # seconds for a zygote to report how a fork ended
_PR_SET_CHILD_SUBREAPER = 36


class ReplicaError(RuntimeError):
    """An engine's process ended before its engine was ready."""


class Connected(NamedTuple):
    link: Link
    facts: Mapping[str, Any]  # `replica.facts_of`


def _ends(parent: ExitStack, child: ExitStack) -> tuple[socket.socket, IO[str], list[int]]:
    """Create our ends of a new process's link and stderr, and the descriptors of its own ends."""
    link, child_link = socket.socketpair()
    parent.enter_context(link), child.enter_context(child_link)
    stderr_read, stderr_write = os.pipe()
    child.callback(os.close, stderr_write)
    return link, parent.enter_context(os.fdopen(stderr_read, errors="replace")), [child_link.fileno(), stderr_write]


class _Process:
    """A process that runs an engine, or will: its link, and its stderr, which is forwarded with its name."""

    def __init__(self, name: str, pid: int, connection: socket.socket, stderr: IO[str]) -> None:
        """`stderr`: the read end of its stderr."""
        self._using = threading.Lock()
        self._descriptor: int | None = os.pidfd_open(pid)  # None: closed, and the number may be reused
        self.name, self.pid, self.tail, self.connection = name, pid, deque[str](maxlen=TAIL), connection
        self.link = Link(connection)
        self.forwarding = threading.Thread(target=self._forward, args=(stderr,), daemon=True)
        self.forwarding.start()

    def kill(self) -> None:
        with self._using, suppress(OSError):  # it has ended
            if self._descriptor is not None:
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def has_ended(self, seconds: float = 0.0) -> bool:
        """Whether the process ends within this time."""
        descriptor = self._descriptor  # another thread may close it
        return descriptor is None or is_readable(descriptor, seconds)

    def _status(self) -> int | None:
        """The exit status of the ended process; negative: a signal's number; None: unknown."""
        raise NotImplementedError

    def end(self) -> str:
        """Close its link, which makes it exit; kill it if that takes long. Returns how it ended."""
        self.link.close()
        if not self.has_ended(PATIENCE):
            self.kill()
            self.has_ended(PATIENCE)
        with self._using:
            descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
        if descriptor is None or (status := self._status()) is None:
            return "ended"
        return f"exited with status {status}" if status >= 0 else f"was ended by {signal.Signals(-status).name}"

    def failed(self) -> ReplicaError:
        """The error of a process that ended before its engine was ready, with the end of its stderr."""
        ending = self.end()
        self.forwarding.join(1)
        return ReplicaError(f"{self.name} {ending} before its engine was ready; its last lines:\n{''.join(self.tail).rstrip()}")

    def _forward(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self.tail.append(line)
                with suppress(OSError):  # a full disk; there may be room for the next line
                    sys.stderr.write(f"{self.name}: {line}")
                    sys.stderr.flush()


class Blank(_Process):
    """A started process that has not yet been told which model to open."""

    def __init__(self) -> None:
        with ExitStack() as parent, ExitStack() as child:
            link, stderr, (link_fd, stderr_fd) = _ends(parent, child)
            command = [sys.executable, "-m", "slipstream.inference.replica", str(link_fd)]
            # Its own process group: the terminal's Ctrl-C is for the server, which lets running requests finish.
            self._process = subprocess.Popen(command, pass_fds=[link_fd], stdout=stderr_fd, stderr=stderr_fd, process_group=0)
            super().__init__(SPARE, self._process.pid, link, stderr)
            parent.pop_all()

    def _status(self) -> int | None:
        return self._process.poll()


class Fork(_Process):
    """A replica that a zygote has forked."""

    def __init__(self, zygote: Zygote, blank: Blank, name: str, pid: int, connection: socket.socket, stderr: IO[str]) -> None:
        self.zygote, self.blank = zygote, blank
        super().__init__(name, pid, connection, stderr)

    def _status(self) -> int | None:
        return self.zygote.status(self.blank, self.pid)


class Zygote:
    """The process that loads a model once for all its replicas on CPUs, which are its forks (`replica`, [Note: Zygote]). If it
    ends, another one replaces it. Any thread may call it."""

    def __init__(
        self, name: str, model: str, options: Mapping[str, Any], replicas: int, cores: Sequence[int], spare: Spare
    ) -> None:
        """`cores`: as many as each replica has. The other arguments are those of `EngineProcess`."""
        # If the zygote ends before its forks, they become children of this process, which reaps them, and not of a container's
        # first process, which may never do so.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.name, self.spare = f"{name} zygote", spare
        self._order = ("load", model, options, replicas, cores)
        self._blank: Blank | None = None
        self._closed = False
        self._lock = threading.Lock()

    def fork(self, name: str, cores: Sequence[int]) -> Fork:
        """Fork a replica. Raises ValueError for options that the engine rejects, ReplicaError if the model cannot be loaded."""
        with self._lock, ExitStack() as parent, ExitStack() as child:
            blank = self._loaded()
            link, stderr, descriptors = _ends(parent, child)
            kind, pid = self._ask(blank, "fork", cores, descriptors)
            if kind == "forked":
                fork = Fork(self, blank, name, pid, link, stderr)
                parent.pop_all()
                return fork
            raise blank.failed()

    def status(self, blank: Blank, pid: int) -> int | None:
        """The exit status of an ended fork of `blank`; None: unknown."""
        reply = Future[list[Any]]()

        def ask() -> None:
            with self._lock:
                reply.set_result(self._ask(blank, "ended", pid))

        if blank is self._blank:
            threading.Thread(target=ask, daemon=True).start()
            with suppress(TimeoutError):  # it is stopped, or another zygote loads the model
                kind, status = reply.result(BUSY)
                if kind == "status":
                    return status
        blank.has_ended(BUSY)  # until then its forks are not children of this process
        with suppress(ChildProcessError):
            ended, status = os.waitpid(pid, os.WNOHANG)
            return os.waitstatus_to_exitcode(status) if ended else None
        return None

    def close(self) -> None:
        """End the zygote, so that `fork` raises. Its forks live on."""
        self._closed = True
        if (blank := self._blank) is not None:
            blank.kill()
        with self._lock:
            if self._blank is not None:
                self._blank.end()
                self._blank = None

    def _ask(self, blank: Blank, kind: str, argument: Any, descriptors: Sequence[int] = ()) -> list[Any]:
        """Send a request and return the reply, ["ended", None] if the zygote has ended."""
        with suppress(OSError):
            socket.send_fds(blank.connection, [frame_of([[kind, argument]])], descriptors)
            return next(blank.link.messages, ["ended", None])
        return ["ended", None]

    def _loaded(self) -> Blank:
        if self._blank is not None and not self._blank.has_ended():
            return self._blank
        if self._blank is not None:
            self._blank.end()
        self._blank = blank = self.spare.take()
        blank.name = self.name
        if self._closed:
            blank.kill()
        blank.link.send(*self._order)
        kind, *rest = next(blank.link.messages, ("ended",))
        if kind == "loaded":
            self.spare.fill()  # no longer delays this one
            return blank
        self._blank = None
        failure = blank.failed()
        raise ValueError(rest[0]) if kind == "refused" else failure


class Spare:
    """One process for the next start of any engine. Any thread may call it."""

    def __init__(self) -> None:
        self._blank: Blank | None = None
        self._closed = False
        self._lock = threading.Lock()

    def take(self) -> Blank:
        """Return the spare process if it lives, else a new one."""
        with self._lock:
            blank, self._blank = self._blank, None
        if blank is not None and not blank.has_ended():
            return blank
        if blank is not None:
            blank.end()
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
            blank.kill()
            blank.end()


@dataclass(kw_only=True)
class EngineProcess:
    """Starts the process of one engine, again after each end. One thread calls it."""

    address = ""  # of an engine on another host
    attempts = ATTEMPTS
    max_pause = MAX_PAUSE
    name: str
    model: str
    options: Mapping[str, Any]  # arguments of `init_inference`
    replicas: int  # number of replicas that share this machine's memory
    cores: Sequence[int]  # cores that it runs on; empty: all
    spare: Spare  # the server's
    zygote: Zygote | None = None  # the model's; None: the process loads the model itself

    def __post_init__(self) -> None:
        self._process: _Process | None = None
        self._stopped = False

    def open(self) -> Connected:
        """Start the process and wait until its engine is ready. Raises ValueError for options that the engine rejects, ReplicaError
        with the end of its stderr if it ends."""
        self._process = process = self._start() if self.zygote is None else self.zygote.fork(self.name, self.cores)
        if self._stopped:
            process.kill()
        kind, *rest = next(process.link.messages, ("ended",))
        if kind == "ready":
            process.link.live()  # a stopped process is treated like a killed one
            if self.zygote is None:
                self.spare.fill()  # no longer delays this one
            return Connected(process.link, rest[0])
        failure = process.failed()
        raise ValueError(rest[0]) if kind == "refused" else failure

    def _start(self) -> _Process:
        blank = self.spare.take()
        blank.name = self.name
        blank.link.send("open", self.model, self.options, self.replicas, self.cores)
        return blank

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def stop(self) -> None:
        """Make `open` raise, from another thread. The engine is not opened again."""
        self._stopped = True
        if self._process is not None:
            self._process.kill()
        if self.zygote is not None:
            self.zygote.close()

    def end(self) -> str:
        """Free what `open` took, once its link is closed. Returns how the engine ended."""
        return "was never started" if self._process is None else self._process.end()


@dataclass(kw_only=True)
class EngineAddress:
    """An engine on another host. One thread calls it."""

    address: str  # HOST:PORT, [IPV6]:PORT
    secret: bytes
    tls: ssl.SSLContext | None = None  # `tls.server_context`; None: not encrypted
    beat: float = BEAT
    attempts = math.inf  # it comes and goes with its host
    max_pause = PAUSE

    def __post_init__(self) -> None:
        self._connection: socket.socket | None = None
        self._stopped = False

    @property
    def name(self) -> str:
        return f"engine {self.address}"

    def open(self) -> Connected:
        """Raises ValueError for another secret or an untrusted certificate, OSError if the engine cannot be reached."""
        try:
            connection = self._connect()
        except (OSError, ValueError) as error:
            self._cut()
            if isinstance(error, ssl.SSLCertVerificationError):
                error = ValueError(f"its certificate is not accepted (--engine-tls-ca): {error.verify_message}")
            if isinstance(error, OSError):
                raise OSError(f"{self.name}: {error.strerror or error}") from None
            raise ValueError(f"{self.name}: {error}") from None
        link = Link(connection, self.beat)
        kind, *rest = next(link.messages, ("ended",))
        if kind != "ready":
            link.close()
            raise OSError(f"{self.name}: it has closed the connection")
        return Connected(link, rest[0])

    def _connect(self) -> Connection:
        host, _, port = self.address.rpartition(":")
        host = host.strip("[]")
        self._connection = plain = socket.create_connection((host, int(port)), CONNECT)
        if self._stopped:
            self._cut()
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            connection = plain if self.tls is None else Encrypted(plain, self.tls, host)
        except ssl.SSLCertVerificationError:
            raise
        except ssl.SSLError as error:
            plain_end = error.reason == "WRONG_VERSION_NUMBER"
            hint = ": start the engine with --tls-cert, or leave --engine-tls-ca out" if plain_end else ""
            raise OSError(f"{error.reason}{hint}") from None
        try:
            enter(connection, self.secret)
        except TimeoutError:
            hint = "; an engine with --tls-cert needs --engine-tls-ca here" if self.tls is None else ""
            raise OSError(f"it says nothing (timed out){hint}") from None
        return connection

    def stop(self) -> None:
        """Make `open` raise, from another thread."""
        self._stopped = True
        self._cut()

    def end(self) -> str:
        return "cannot be reached any more"

    def _cut(self) -> None:
        if self._connection is not None:
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()


Source: TypeAlias = EngineProcess | EngineAddress  # the origin of an engine

"""Ranks that start in milliseconds: for a run that may restart, the agent keeps a process that has imported what ranks import.

[Note: Zygote of ranks] The first ranks are ordinary processes. Meanwhile the zygote imports torch, this package, and the installed
packages that the script imports; the user's own modules are not run before a rank runs them. A rank of a later attempt is forked
from the zygote through an intermediate process that exits at once. The kernel then makes the rank a child of the agent, which is
the nearest "subreaper" at that moment, so that torchrun sees an ordinary child. The rank waits until the agent has it.

    to the zygote                      from it
                                       ready
    arguments, environment             pid (None: no fork)
    begin

A fork must not differ from a process that has run the script from its first line. So there is no fork in any of these cases:
- the script changes its environment anywhere, or does more than import and define before it imports Slipstream;
- an import has started a native thread (OpenMP: the fork would wait for it forever), opened a file or a device, made a temporary
  folder, changed sys.path, or read a variable that differs for the rank (LOCAL_RANK);
- ranks are bound to cores, because libraries count cores when they are loaded;
- the attempt follows one whose forks failed at once. If anything fails here, the rank starts as an ordinary process.
"""

from __future__ import annotations

import ast
import ctypes
import gc
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from slipstream.launch import worker
from slipstream.launch.imports import Walk

_WORKER = "slipstream.launch.worker"
_ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_PATIENCE = 5.0  # seconds for a fork
_AT_ONCE = 10.0  # seconds: if a fork fails within this time, being a fork may be the reason
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/accel", "/dev/dxg", "/dev/dri")
_OURS = (
    "slipstream.config.parse",
    "slipstream.train.autosave",
    "slipstream.train.initialize",
    "slipstream.train.saving.load",
    "slipstream.train.saving.save",
    "slipstream.world.monitor",
    "torch._dynamo",  # the first torch optimizer imports it
)
_SHARED = {"TORCHINDUCTOR_CACHE_DIR"}  # folders of temporary files that all processes of a user share


class Rank:
    """A rank that the zygote has forked, with the part of `subprocess.Popen` that torchrun uses. It is a child of this process."""

    def __init__(self, pid: int) -> None:
        """Raises ChildProcessError if it is not a child of this process."""
        self.pid, self.began = pid, time.monotonic()
        self.returncode: int | None = None
        self.failed_at_once = False
        self._note(*os.waitpid(pid, os.WNOHANG))

    def _note(self, ended: int, status: int) -> None:
        if ended:
            self.returncode = os.waitstatus_to_exitcode(status)
            was_sent = self.returncode in (-signal.SIGTERM, -signal.SIGKILL)  # sent to stop it, as after another rank's failure
            self.failed_at_once = self.returncode != 0 and not was_sent and time.monotonic() - self.began < _AT_ONCE

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                self._note(*os.waitpid(self.pid, os.WNOHANG))
            except ChildProcessError:  # a signal handler raised between the system call and `_note`
                self.returncode = 1
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Raises subprocess.TimeoutExpired after `timeout` seconds."""
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(_WORKER, timeout)
            time.sleep(0.01)
        return code


@contextmanager
def spare_ranks() -> Iterator[None]:
    """A context in which torchrun's ranks that run a Python script start as forks of a zygote, once it is ready."""
    handler: Any = importlib.import_module("torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler")
    plain, zygote = handler.Popen, _Zygote()

    def start(args: Sequence[str], env: Mapping[str, str], **options: Any) -> Any:
        rank = None
        if _WORKER in args and options["stdout"] is options["stderr"] is None and sys.platform == "linux":
            rank = zygote.fork(args, env)
        return plain(args=args, env=env, **options) if rank is None else rank

    handler.Popen = start
    try:
        yield
    finally:
        handler.Popen = plain
        zygote.close()


class _Zygote:
    """The agent's side."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._is_ready = False
        self._forks: list[Rank] = []  # of the attempts since the last ordinary one
        self._ordinary = ""  # the last attempt that started ordinary processes

    def fork(self, args: Sequence[str], env: Mapping[str, str]) -> Rank | None:
        """None: start an ordinary process. The zygote may be ready the next time."""
        own = worker.parse(arguments := list(args[args.index(_WORKER) + 1 :]))
        if own.is_executable or own.cores is not None:
            return None
        if any(rank.failed_at_once for rank in self._forks):
            self._forks, self._ordinary = [], env.get(_ATTEMPT, "")
        rank = None
        try:
            if self._process is None or self._process.poll() is not None:
                if self._process is None or self._process.returncode != 0:  # 0: it would not be usable the next time either
                    self.close()
                    self._open(args)
            elif env.get(_ATTEMPT, "") != self._ordinary:
                rank = self._ask(arguments, env)
        except (OSError, EOFError):
            self.close()
            return None
        self._forks += [rank] if rank is not None else []
        return rank

    def _open(self, args: Sequence[str]) -> None:
        connection, child_end = Pipe()
        before, after = args[: args.index(_WORKER)], args[args.index(_WORKER) + 1 :]
        with child_end:
            command = [*before, __name__, str(child_end.fileno()), *after]
            # Its own group, because Ctrl-C is for the agent.
            self._process = subprocess.Popen(command, pass_fds=[child_end.fileno()], process_group=0)
        self._connection, self._is_ready = connection, False

    def _ask(self, arguments: list[str], env: Mapping[str, str]) -> Rank | None:
        """Raises OSError or EOFError if the zygote fails."""
        if (connection := self._connection) is None:
            return None
        if not self._is_ready and not connection.poll():  # it is still importing
            return None
        self._is_ready = self._is_ready or connection.recv() == "ready"
        prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int()
        prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            connection.send((arguments, dict(env)))
            if not connection.poll(_PATIENCE):
                raise TimeoutError
            if (pid := connection.recv()) is None:
                return None
            rank = Rank(pid)
            connection.send("begin")
            return rank
        finally:
            prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)  # orphans of the ranks are not ours

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._connection = self._process = None


# -- the zygote's side --


class _Noted(dict[Any, Any]):
    """The variables of os.environ, which records the ones that are read."""

    def __init__(self, values: Mapping[Any, Any]) -> None:
        super().__init__(values)
        self.read: set[Any] = set()

    def __getitem__(self, key: Any) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.read.add(key)
        return super().__contains__(key)


class _Imports:
    """The zygote's imports, and their effect on the environment and sys.path."""

    def __init__(self, found: list[ast.stmt]) -> None:
        before, path, opened = dict(os.environ), list(sys.path), _descriptors()
        environ: Any = os.environ
        plain, environ._data = environ._data, (noted := _Noted(environ._data))
        with _silence():
            for node in found:
                with suppress(Exception, SystemExit):  # it fails in the rank, too
                    exec(ast.unparse(node), {"__name__": __name__})
            for name in _OURS:
                importlib.import_module(name)
        plain.clear()
        plain.update(noted)
        environ._data = plain
        self.read = {environ.decodekey(key): before.get(environ.decodekey(key)) for key in noted.read}
        self.changed = {key: value for key, value in os.environ.items() if before.get(key) != value}
        self.removed = before.keys() - os.environ.keys()
        own = [key for key, value in self.changed.items() if value.startswith(tempfile.gettempdir()) and key not in _SHARED]
        self.is_fit = sys.path == path and not own and _descriptors() == opened and _is_fit()

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """The environment that the imports would have left, had they run in `env`."""
        return {key: value for key, value in env.items() if key not in self.removed} | self.changed

    def fit(self, env: Mapping[str, str]) -> bool:
        """Whether imports in this environment would have read the same values."""
        return all(env.get(key) == value for key, value in self.read.items())


def _descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@contextmanager
def _silence() -> Iterator[None]:
    """Discard what imports print: each ordinary rank prints it itself."""
    streams = [os.dup(1), os.dup(2)]
    null = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(null, number)
    os.close(null)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number, copy in zip((1, 2), streams, strict=True):
            os.dup2(copy, number)
            os.close(copy)


def _is_fit() -> bool:
    """Whether a fork has all that this process has: no device is open, and no thread runs except BLAS's, which end before it."""
    if not (pid := os.fork()):
        os._exit(0)
    os.waitpid(pid, 0)
    opened = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            opened.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return len(os.listdir("/proc/self/task")) == 1 and not any(target.startswith(_DEVICES) for target in opened)


def _fork() -> tuple[int, int]:
    """(pid of a rank, pipe on which a byte lets it begin). In the rank, which leads a new session: (0, the pipe's other end)."""
    pid_read, pid_write = os.pipe()
    begin_read, begin_write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads of numpy's BLAS, which end before
        if between := os.fork():
            os.close(pid_write)
            os.close(begin_read)
            os.waitpid(between, 0)
            with os.fdopen(pid_read) as pipe:
                return int(pipe.read()), begin_write
        if os.fork():
            os._exit(0)
    os.close(pid_read)
    os.close(begin_write)
    os.setsid()
    os.write(pid_write, str(os.getpid()).encode())
    os.close(pid_write)
    return 0, begin_read


def _serve(connection: Connection, imports: _Imports) -> tuple[list[str], dict[str, str], int]:
    """In a rank, returns its arguments, its environment and the pipe that lets it begin. In the zygote, raises EOFError or OSError
    at the agent's end."""
    while True:
        arguments, env = connection.recv()
        if not imports.fit(env):
            connection.send(None)
            continue
        pid, pipe = _fork()
        if not pid:
            return arguments, imports.environment(env), pipe
        try:
            connection.send(pid)
            connection.recv()
            os.write(pipe, b"1")
        finally:
            os.close(pipe)


def _become_rank(env: Mapping[str, str], begins: int) -> None:
    if not os.read(begins, 1):  # the zygote or the agent has ended, or the agent no longer wants this rank
        os._exit(0)
    os.close(begins)
    os.environ.clear()
    os.environ.update(env)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # as in a new process; otherwise all ranks would draw the same numbers


def main() -> None:
    descriptor, *own = sys.argv[1:]
    connection = Connection(int(descriptor))
    os.set_inheritable(connection.fileno(), False)
    order = None
    with suppress(Exception):  # ranks start without it, and the user need not know
        if (source := worker.source_of(own)) is None or sys.flags.safe_path:
            return
        before = sys.path[0]
        if not worker.parse(own).module:
            sys.path[0] = str(source[1])
        if not (walk := Walk(*source)).is_fit or not (imports := _Imports(walk.found)).is_fit:
            return
        sys.path[0] = before
        gc.collect()
        gc.freeze()  # a collection would write to every object, and so copy its page
        connection.send("ready")
        order = _serve(connection, imports)
    if order is not None:
        connection.close()
        arguments, env, begins = order
        _become_rank(env, begins)
        worker.main(arguments)


if __name__ == "__main__":
    main()

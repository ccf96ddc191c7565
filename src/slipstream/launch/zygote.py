"""Ranks that start in milliseconds: of a run that may restart, the agent keeps a process that has imported what ranks import.

[Note: Zygote of ranks] The first ranks are ordinary processes. Beside them the zygote imports torch, this package, and what the
script imports of installed packages; the user's own modules stay unread until a rank runs them. It starts no thread and no device,
and leaves if an import did. A rank of a later attempt is a fork of it, by way of a process between that ends at once: the kernel
then gives the rank to the agent, which is the nearest "subreaper" for that moment, so that for torchrun and `watch` it is a child
like any other. Whatever fails here ends in an ordinary start.

    to the zygote                      from it
                                       ready
    arguments, environment             pid
"""

from __future__ import annotations

import ast
import ctypes
import gc
import importlib
import importlib.machinery
import importlib.util
import json
import os
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

__all__ = ["spare_ranks"]

_WORKER = "slipstream.launch.worker"
_PR_SET_CHILD_SUBREAPER = 36
_PATIENCE = 5.0  # seconds for a fork
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/accel")
_OURS = (
    "slipstream.config.parse",
    "slipstream.train.autosave",
    "slipstream.train.initialize",
    "slipstream.train.saving.load",
    "slipstream.train.saving.save",
    "slipstream.world.monitor",
    "torch._dynamo",  # the first optimizer of torch's imports it
)
_MOST_FILES = 200  # of the user, that are read for their imports


class Rank:
    """A rank that the zygote has forked: what torchrun asks of a `subprocess.Popen`. It is a child of this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
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
    """Until it is left, torchrun's ranks that run a Python script start as forks of a zygote, once there is one."""
    handler: Any = importlib.import_module("torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler")
    plain, zygote = handler.Popen, _Zygote()

    def start(args: Sequence[str], env: Mapping[str, str], **options: Any) -> Any:
        rank = None
        if _WORKER in args and "--exec" not in args and options["stdout"] is options["stderr"] is None:
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
        self._connection: socket.socket | None = None
        self._is_ready = False

    def fork(self, args: Sequence[str], env: Mapping[str, str]) -> Rank | None:
        """None: an ordinary process has to do. The zygote may be there the next time."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._open(args)
            return None
        try:
            return self._ask(args[args.index(_WORKER) + 1 :], env)
        except (OSError, EOFError, ValueError):
            self.close()
            return None

    def _open(self, args: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        before, after = args[: args.index(_WORKER)], args[args.index(_WORKER) + 1 :]
        with theirs:
            command = [*before, __name__, str(theirs.fileno()), *after]
            # Its own group: Ctrl-C is the agent's. Not its own session: the agent's watch would take it for a rank.
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], process_group=0)
        self._connection, self._is_ready = ours, False

    def _ask(self, arguments: Sequence[str], env: Mapping[str, str]) -> Rank | None:
        """Raises OSError, EOFError or ValueError if the zygote fails."""
        if (connection := self._connection) is None:
            return None
        connection.settimeout(0 if not self._is_ready else _PATIENCE)
        if not self._is_ready:
            try:
                self._is_ready = _receive(connection) == "ready"
            except BlockingIOError:  # it still imports
                return None
            connection.settimeout(_PATIENCE)
        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            _send(connection, [list(arguments), dict(env)])
            return Rank(int(_receive(connection)))
        finally:
            prctl(_PR_SET_CHILD_SUBREAPER, 0)  # orphans of the ranks are not ours

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._connection = self._process = None


def _send(connection: socket.socket, message: Any) -> None:
    data = json.dumps(message).encode()
    connection.sendall(len(data).to_bytes(4, "little") + data)


def _receive(connection: socket.socket) -> Any:
    """Raises EOFError if the other side has gone."""

    def read(count: int) -> bytes:
        data = b""
        while len(data) < count:
            if not (part := connection.recv(count - len(data))):
                raise EOFError
            data += part
        return data

    return json.loads(read(int.from_bytes(read(4), "little")))


# -- the zygote's side --


def _imports(script: Path) -> Iterator[ast.stmt]:
    """The statements outside functions with which a script, and the user's modules that it imports, import installed packages."""
    installed = tuple({sysconfig.get_path(kind) for kind in ("purelib", "platlib")})
    files, seen = [script], set[Path]()
    while files and len(seen) < _MOST_FILES:
        if (file := files.pop()) in seen:
            continue
        seen.add(file)
        try:
            statements = ast.parse(file.read_bytes()).body
        except (OSError, SyntaxError, ValueError):
            continue
        for node, names in (found for statement in statements for found in _modules(statement, file)):
            root = Path()
            if not names[0].is_absolute():
                if (spec := _find(package := names[0].parts[0])) is None or spec.origin is None:
                    continue
                if spec.origin.startswith(installed) or package == "slipstream":
                    yield node
                    continue
                if not spec.has_location or spec.origin.startswith(sysconfig.get_path("stdlib")):
                    continue
                root = Path(spec.origin).parents[spec.submodule_search_locations is not None]
            files += [file for name in names for file in (root / f"{name}.py", root / name / "__init__.py")]


def _modules(statement: ast.stmt, file: Path) -> Iterator[tuple[ast.stmt, list[Path]]]:
    """Of a statement in `file`, for each package: a statement that imports from it alone, and the modules that this may import, as
    paths: relative ones, or of a relative import absolute ones."""
    match statement:
        case ast.Import(names=names):
            for alias in names:
                yield ast.Import([alias]), [Path(*alias.name.split("."))]
        case ast.ImportFrom(module=module, names=names, level=level):
            parent = (file.parents[level - 1] if level else Path()).joinpath(*(module or "").split("."))
            yield statement, [parent, *(parent / alias.name for alias in names if alias.name != "*")]


def _find(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def _preload(script: Path | None) -> None:
    """Import what ranks import. An import that fails is left to the ranks."""
    for name in _OURS:
        importlib.import_module(name)
    for node in () if script is None else _imports(script):
        with suppress(Exception, SystemExit):
            exec(ast.unparse(node), {"__name__": __name__})


@contextmanager
def _silence() -> Iterator[None]:
    """What imports print comes from each rank that starts by itself."""
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
        for number, stream in zip((1, 2), streams, strict=True):
            os.dup2(stream, number)
            os.close(stream)


def _is_fit() -> bool:
    """Whether a fork has all that this process has: no thread of Python's runs, no device is open."""
    opened = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            opened.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return threading.active_count() == 1 and not any(target.startswith(_DEVICES) for target in opened)


def _fork() -> tuple[int, int]:
    """The pid of a rank, and a pipe to which a byte lets it begin; in the rank, which leads a session then, 0 and the other end."""
    told, tell = os.pipe()
    begins, begin = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12's, of the threads of numpy's BLAS: it ends them before
        if between := os.fork():
            os.close(tell)
            os.close(begins)
            os.waitpid(between, 0)
            with os.fdopen(told) as pipe:
                return int(pipe.read()), begin
        if os.fork():
            os._exit(0)
    os.close(told)
    os.close(begin)
    os.setsid()
    os.write(tell, str(os.getpid()).encode())
    os.close(tell)
    return 0, begins


def _serve(connection: socket.socket) -> tuple[list[str], dict[str, str], int] | None:
    """In a rank, its arguments, its environment and the pipe that lets it begin. In the zygote None, when the agent has ended."""
    with suppress(EOFError, OSError):
        while True:
            arguments, env = _receive(connection)
            pid, pipe = _fork()
            if not pid:
                return arguments, env, pipe
            _send(connection, pid)
            os.write(pipe, b"1")
            os.close(pipe)
    return None


def _become_rank(env: Mapping[str, str], begins: int) -> None:
    if not os.read(begins, 1):  # the zygote has ended, and the agent may have started another rank
        os._exit(1)
    os.close(begins)
    os.environ.clear()
    os.environ.update(env)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # as in a new process; otherwise all ranks would draw the same numbers


def main() -> None:
    from slipstream.launch import worker

    descriptor, *own = sys.argv[1:]
    before = sys.path[0]
    connection = socket.socket(fileno=int(descriptor))
    connection.set_inheritable(False)
    script = None
    if (source := worker.source_of(own)) is not None:
        script, sys.path[0] = source[0], str(source[1])
    with _silence():
        _preload(script)
    sys.path[0] = before
    if not _is_fit():
        return
    gc.collect()
    gc.freeze()  # a collection would write to every object, and so copy its page
    _send(connection, "ready")
    if (order := _serve(connection)) is not None:
        connection.close()
        arguments, env, begins = order
        _become_rank(env, begins)
        worker.main(arguments)


if __name__ == "__main__":
    main()

"""Ranks that start in milliseconds: of a run that may restart, the agent keeps a process that has imported what ranks import.

[Note: Zygote of ranks] The first ranks are ordinary processes. Beside them the zygote imports torch, this package, and what the
script imports of installed packages; the user's own modules stay unread until a rank runs them. A rank of a later attempt is a fork
of it, by way of a process between that ends at once: the kernel then gives the rank to the agent, which is the nearest "subreaper"
for that moment, so that for torchrun and `watch` it is a child like any other. It waits until the agent has it.

    to the zygote                      from it
                                       ready
    arguments, environment             pid (None: no fork)
    begin

A fork must not differ from a process that has run the script from its first line. So there is none if the script changes its
environment anywhere, or does more than import and define before it imports Slipstream; if an import has started a native thread
(OpenMP: the fork would wait for it forever), opened a file or a device, made a temporary folder or changed sys.path, or has read a
variable that is another for the rank (LOCAL_RANK); if ranks are bound to cores, since libraries count these when they are loaded;
and in the attempt after one whose forks failed at once. Whatever fails here ends in an ordinary start.
"""

from __future__ import annotations

import ast
import ctypes
import gc
import importlib
import importlib.machinery
import importlib.util
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from slipstream.launch import worker

__all__ = ["spare_ranks"]

_WORKER = "slipstream.launch.worker"
_ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_PATIENCE = 5.0  # seconds for a fork
_AT_ONCE = 10.0  # seconds
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/accel", "/dev/dxg", "/dev/dri")
_OURS = (
    "slipstream.config.parse",
    "slipstream.train.autosave",
    "slipstream.train.initialize",
    "slipstream.train.saving.load",
    "slipstream.train.saving.save",
    "slipstream.world.monitor",
    "torch._dynamo",  # the first optimizer of torch's imports it
)
_SHARED = {"TORCHINDUCTOR_CACHE_DIR"}  # folders of temporary files that all processes of a user share, and not one of each
_PACKAGES = {"site-packages", "dist-packages"}
_MAKERS = {"getLogger", "Path", "TypeVar", "ParamSpec", "namedtuple", "NamedTuple", "partial", "field", "compile", "get", "Lock"}
_MAKERS |= {"int", "float", "str", "bool", "tuple", "list", "dict", "set", "frozenset", "range", "len", "max", "min", "device"}


class Rank:
    """A rank that the zygote has forked: what torchrun asks of a `subprocess.Popen`. It is a child of this process."""

    def __init__(self, pid: int) -> None:
        """Raises ChildProcessError if it is no child of this process."""
        self.pid, self.began = pid, time.monotonic()
        self.returncode: int | None = None
        self.failed_at_once = False
        self._note(*os.waitpid(pid, os.WNOHANG))

    def _note(self, ended: int, status: int) -> None:
        if ended:
            self.returncode = os.waitstatus_to_exitcode(status)
            was_sent = self.returncode in (-signal.SIGTERM, -signal.SIGKILL)  # to end it, as after another rank's failure
            self.failed_at_once = self.returncode != 0 and not was_sent and time.monotonic() - self.began < _AT_ONCE

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                self._note(*os.waitpid(self.pid, os.WNOHANG))
            except ChildProcessError:  # a signal's handler raised between the system call and the note
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
    """Until it is left, torchrun's ranks that run a Python script start as forks of a zygote, once there is one."""
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
        self._connection: socket.socket | None = None
        self._is_ready = False
        self._forks: list[Rank] = []  # of the attempts since the last that was ordinary
        self._ordinary = ""  # the attempt that is

    def fork(self, args: Sequence[str], env: Mapping[str, str]) -> Rank | None:
        """None: an ordinary process has to do. The zygote may be there the next time."""
        own = worker.parse(arguments := list(args[args.index(_WORKER) + 1 :]))
        if own.is_executable or own.cores is not None:
            return None
        if any(rank.failed_at_once for rank in self._forks):
            self._forks, self._ordinary = [], env.get(_ATTEMPT, "")
        rank = None
        try:
            if self._process is None or self._process.poll() is not None:
                if self._process is None or self._process.returncode != 0:  # 0: it would not be fit the next time either
                    self.close()
                    self._open(args)
            elif env.get(_ATTEMPT, "") != self._ordinary:
                rank = self._ask(arguments, env)
        except (OSError, EOFError, ValueError):
            self.close()
            return None
        self._forks += [rank] if rank is not None else []
        return rank

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
        prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int()
        prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            _send(connection, [list(arguments), dict(env)])
            if (pid := _receive(connection)) is None:
                return None
            rank = Rank(pid)
            _send(connection, "begin")
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


class _Walk:
    """The statements with which a script imports installed packages, in the order in which they run, also by way of the user's own
    modules: as far as nothing else runs."""

    def __init__(self, script: Path, folder: Path) -> None:
        """folder: where modules are looked for first."""
        self.found: list[ast.stmt] = []
        self.changes_environment = False
        self._seen: set[Path] = set()
        packages = [place / "__init__.py" for place in reversed(script.relative_to(folder).parents[:-1])]  # of a script with -m
        self.is_whole = all(self._read(file) for file in (*(folder / place for place in packages), script))

    @property
    def is_fit(self) -> bool:
        """Whether ranks may begin with all of these and Slipstream imported."""
        modules = {name.parts[0] for node in self.found for _, names in _modules(node, Path("/")) for name in names}
        return not self.changes_environment and (self.is_whole or bool(modules & {"slipstream", "deepspeed"}))

    def _read(self, file: Path) -> bool:
        """Whether all of the file but its main part only imports and defines."""
        if file in self._seen:
            return True
        self._seen.add(file)
        try:
            statements = ast.parse(file.read_bytes()).body
        except (OSError, SyntaxError, ValueError, RecursionError):
            return not file.exists()
        self.changes_environment |= any(map(_changes_environment, itertools.chain.from_iterable(map(ast.walk, statements))))
        for statement in statements:
            match statement:
                case ast.Import() | ast.ImportFrom():
                    if not all(self._follow(node, names) for node, names in _modules(statement, file)):
                        return False
                case ast.Expr(value=ast.Constant()) | ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    pass
                case ast.Assign(targets=[ast.Name()]) | ast.AnnAssign(target=ast.Name()) if _only_makes(statement):
                    pass
                case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                    pass
                case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
                    pass
                case _:
                    return False
        return True

    def _follow(self, node: ast.stmt, names: list[Path]) -> bool:
        if names[0].is_absolute():
            return all(map(self._read_module, names))
        spec = _find(package := names[0].parts[0])
        places = [] if spec is None else [Path(place) for place in (spec.origin, *(spec.submodule_search_locations or ())) if place]
        if spec is None or package == "slipstream" or any(_PACKAGES & {*place.parts} for place in places):
            self.found.append(node)  # what there is not fails here as in the rank
            return True
        if not spec.submodule_search_locations and (not spec.has_location or _is_of_python(places[0])):
            return True
        if spec.submodule_search_locations:
            if any(map(_is_of_python, places)):
                return True
            folders = [Path(place).parent for place in spec.submodule_search_locations]
        else:
            folders = [places[0].parent]
        chain = [part for name in names for part in (*reversed(name.parents[:-1]), name)]  # a package runs before its modules
        return all(self._read_module(folder / part) for folder in folders for part in chain)

    def _read_module(self, place: Path) -> bool:
        return all(map(self._read, (place.with_name(f"{place.name}.py"), place / "__init__.py")))


def _is_of_python(place: Path) -> bool:
    return str(place).startswith(sysconfig.get_path("stdlib"))


def _modules(statement: ast.stmt, file: Path) -> Iterator[tuple[ast.stmt, list[Path]]]:
    """Of a statement in `file`, for each package: a statement that imports from it alone, and the modules that this may import, as
    paths: relative ones, or of a relative import absolute ones."""
    match statement:
        case ast.Import(names=names):
            for alias in names:
                yield ast.Import([alias]), [Path(*alias.name.split("."))]
        case ast.ImportFrom(module=module, names=names, level=level) if level <= len(file.parents):
            root = file.parents[level - 1] if level else Path()
            parent = root.joinpath(*(module or "").split("."))
            between = [place for place in reversed(parent.parents) if level and place.is_relative_to(root) and place != root]
            yield statement, [*between, parent, *(parent / alias.name for alias in names if alias.name != "*")]


def _only_makes(statement: ast.stmt) -> bool:
    """Whether a statement calls nothing, or what is known to make a value and no more."""
    functions = [node.func for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return all(getattr(each, "attr", getattr(each, "id", "")) in _MAKERS for each in functions)


def _changes_environment(node: ast.AST) -> bool:
    """Whether a part of a statement sets or deletes variables, or may."""
    match node:
        case ast.Subscript(value=ast.Attribute(attr="environ") | ast.Name(id="environ"), ctx=ast.Store() | ast.Del()):
            return True
        case ast.AugAssign(target=ast.Attribute(attr="environ") | ast.Name(id="environ")):
            return True
        case ast.Call(func=ast.Attribute(attr=name, value=ast.Attribute(attr="environ") | ast.Name(id="environ"))):
            return name not in ("get", "copy", "items", "keys", "values")
        case ast.Call(func=ast.Attribute(attr="putenv" | "unsetenv" | "load_dotenv") | ast.Name(id="load_dotenv")):
            return True
    return False


def _find(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


class _Noted(dict[Any, Any]):
    """The variables of os.environ, which notes those that are read."""

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
    """What the zygote imports, and what became of the environment and sys.path by that."""

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
        """What imports in this environment would have made of it."""
        return {key: value for key, value in env.items() if key not in self.removed} | self.changed

    def fit(self, env: Mapping[str, str]) -> bool:
        """Whether imports in this environment would have read the same."""
        return all(env.get(key) == value for key, value in self.read.items())


def _descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


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
        for number, copy in zip((1, 2), streams, strict=True):
            os.dup2(copy, number)
            os.close(copy)


def _is_fit() -> bool:
    """Whether a fork has all that this process has: no device is open, and no thread runs but those of BLAS, which end before."""
    if not (pid := os.fork()):
        os._exit(0)
    os.waitpid(pid, 0)
    opened = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            opened.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return len(os.listdir("/proc/self/task")) == 1 and not any(target.startswith(_DEVICES) for target in opened)


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


def _serve(connection: socket.socket, imports: _Imports) -> tuple[list[str], dict[str, str], int]:
    """In a rank, its arguments, its environment and the pipe that lets it begin. In the zygote, raises EOFError or OSError when the
    agent has ended."""
    while True:
        arguments, env = _receive(connection)
        if not imports.fit(env):
            _send(connection, None)
            continue
        pid, pipe = _fork()
        if not pid:
            return arguments, imports.environment(env), pipe
        try:
            _send(connection, pid)
            _receive(connection)
            os.write(pipe, b"1")
        finally:
            os.close(pipe)


def _become_rank(env: Mapping[str, str], begins: int) -> None:
    if not os.read(begins, 1):  # the zygote or the agent has ended, or the agent has given this rank up
        os._exit(0)
    os.close(begins)
    os.environ.clear()
    os.environ.update(env)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # as in a new process; otherwise all ranks would draw the same numbers


def main() -> None:
    descriptor, *own = sys.argv[1:]
    connection = socket.socket(fileno=int(descriptor))
    connection.set_inheritable(False)
    order = None
    with suppress(Exception):  # ranks start without it, and it has nothing to tell the user
        if (source := worker.source_of(own)) is None or sys.flags.safe_path:
            return
        before = sys.path[0]
        if not worker.parse(own).module:
            sys.path[0] = str(source[1])
        if not (walk := _Walk(*source)).is_fit or not (imports := _Imports(walk.found)).is_fit:
            return
        sys.path[0] = before
        gc.collect()
        gc.freeze()  # a collection would write to every object, and so copy its page
        _send(connection, "ready")
        order = _serve(connection, imports)
    if order is not None:
        connection.close()
        arguments, env, begins = order
        _become_rank(env, begins)
        worker.main(arguments)


if __name__ == "__main__":
    main()

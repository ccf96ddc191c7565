"""The pool's processes: the template that forks workers, and a worker's loop over jobs.

The template is one subprocess with torch and pytest imported, with a single thread and nothing started. Each worker is a fork of
it, so starting or replacing one takes milliseconds, not an import of torch.

A job is one rank's part of one test. The worker answers with a `Report`, waits until every rank has reported (destroying its group
earlier would reset the connections of ranks inside a collective), then cleans up and sends the list of leaks. Invariants:

- every test has its own process group, over its own store prefix, which does not outlive the test;
- warnings are errors, by pytest's own filters, and so are exceptions in `__del__` and in threads;
- the seeds and the environment are the same at the start of every test.

`faulthandler` writes all stacks to stderr on `DUMP`; `INTERRUPT` raises `Interrupted` in a running test.
"""

import contextlib
import faulthandler
import functools
import gc
import importlib.machinery
import importlib.util
import os
import pickle
import random
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _pytest.config import apply_warning_filters

from tests.budget import spent_here
from tests.jobs import DUMP, FORK, INTERRUPT, READY, REQUEST, WAIT, Job, Report, Status
from tests.on_gpu import tensors_of_tests
from tests.rewriting import compiled

# Imported once for all workers, because most tests import them: together nine processor seconds.
# Hypothesis warns if it is first imported after a plugin's objects were frozen: it then cannot see their referrers.
PRELOADED = (
    "torch._dynamo",
    "slipstream.train.initialize",
    "slipstream.config.parse",
    "slipstream.compat.engine",
    "transformers.modeling_utils",
    "hypothesis",
    "tests.probe",
    "tests.toy",
)
ROOT = Path(__file__).parents[1]
SETTLE_S = 1.0  # limit for threads and mappings to disappear after a test


class Interrupted(BaseException):
    """Raised in a rank if the test has already failed on another."""


# ---- the template


def serve(fd: int) -> None:
    """Fork a worker for each request on the socket `fd`, until its other end closes."""
    faulthandler.enable()
    _die_with_parent()
    os.chdir(ROOT)  # pytest's current folder may be deleted with its test
    gc.disable()
    for name in PRELOADED:
        with contextlib.suppress(ModuleNotFoundError):  # of transformers, where it is not installed
            importlib.import_module(name)
    importlib.import_module("slipstream.ops.matmul").use(True)  # as the first engine does: also for what runs before it
    assert threading.active_count() == 1, f"a fork keeps one thread, but the template's imports started {threading.enumerate()}"
    gc.collect()
    gc.freeze()
    gc.enable()
    requests = socket.socket(fileno=fd)
    requests.sendall(READY)
    while True:
        data, fds, _, _ = socket.recv_fds(requests, REQUEST.size, 2)
        if not data:
            os._exit(0)  # nothing to clean up, and shutting torch down takes time
        verb, pid = REQUEST.unpack(data)
        if verb == WAIT:
            requests.sendall(REQUEST.pack(WAIT, _exit_code(pid)))
            continue
        pid = os.fork()
        if pid == 0:
            requests.close()
            connection, output = fds
            os.setsid()
            _die_with_parent()
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            _work(Connection(connection))
            os._exit(0)
        for fd in fds:
            os.close(fd)
        requests.sendall(REQUEST.pack(FORK, pid))


def _exit_code(pid: int) -> int:
    """Wait for a worker that has closed its connection; kill it after a second."""
    deadline = time.monotonic() + 1.0
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.002)


def _die_with_parent() -> None:
    """Ask Linux for SIGKILL when the parent dies, so that no process outlives pytest, however that ends."""
    if sys.platform == "linux":
        import ctypes

        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


# ---- a worker


def _work(connection: Connection) -> None:
    faulthandler.register(DUMP, all_threads=True)
    signal.signal(INTERRUPT, _interrupt)
    while True:
        try:
            job: Job = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        environ = dict(os.environ)
        loud = _Loud()
        with warnings.catch_warnings(), loud:
            apply_warning_filters(job.filters, [])
            report, before = _run(job)
            connection.send_bytes(pickle.dumps(report))
            connection.recv_bytes()
            leaks = _clean_up(before)
        os.environ.clear()
        os.environ.update(environ)
        connection.send_bytes(pickle.dumps(leaks + loud.errors))


def _run(job: Job) -> tuple[Report, dict[str, Any]]:
    value, text, before = b"", "", None
    status: Status = "passed"
    start_s = spent_here()
    try:
        function = _load(job)
        args, kwargs = pickle.loads(job.arguments)
        _join(job)
        before = _ambient()
        with _interruptible(), tensors_of_tests():
            value = pickle.dumps(function(*args, **kwargs))
    except pytest.skip.Exception as skip:
        status, text = "skipped", str(skip)
    except BaseException as error:
        status = "interrupted" if isinstance(error, Interrupted) else "failed"
        _server.cache_clear()  # an answer may still be on its way
        text = "".join(traceback.format_exception(error.with_traceback(_test_frames(error))))
    report = Report(job.rank, status, text.rstrip(), value, time.monotonic(), spent_here() - start_s)
    return report, before or _ambient()


def _join(job: Job) -> None:
    random.seed(0)
    torch.manual_seed(0)
    os.environ.update(RANK=str(job.rank), WORLD_SIZE=str(job.world_size))
    os.environ.update(LOCAL_RANK=str(job.rank), LOCAL_WORLD_SIZE=str(job.world_size))
    patience = timedelta(seconds=job.timeout + 30)  # longer than the pool's, because the pool shows stacks
    server = _server(job.port)
    server.set_timeout(patience)
    store = dist.PrefixStore(job.prefix, server)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.world_size, timeout=patience)


@functools.cache
def _server(port: int) -> Any:
    """The worker's one connection to the pool's store: of some 40 new ones, one took 5 s."""
    return dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]


_running = False  # this process runs a test and may be interrupted


class _interruptible:
    def __enter__(self) -> None:
        global _running
        _running = True

    def __exit__(self, *_: object) -> None:
        global _running
        _running = False


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    if _running:
        raise Interrupted("another rank failed first")


def _test_frames(error: BaseException) -> Any:
    """The traceback from the test's own frame on, or all of it if the worker itself failed."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames if frames is not None else error.__traceback__


# ---- leaks


class _Loud:
    """Collects exceptions that Python only prints: those in `__del__` and in threads."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def __enter__(self) -> None:
        self._hooks = sys.unraisablehook, threading.excepthook
        sys.unraisablehook = lambda u: self._note(f"{u.err_msg or 'ignored in'} {u.object!r}", u.exc_value)
        threading.excepthook = lambda t: self._note(f"thread {t.thread and t.thread.name}", t.exc_value)

    def __exit__(self, *_: object) -> None:
        sys.unraisablehook, threading.excepthook = self._hooks

    def _note(self, where: str, error: BaseException | None) -> None:
        self.errors.append(f"{where}: " + "".join(traceback.format_exception(error)).rstrip())


def _ambient() -> dict[str, Any]:
    """Process state that a test must not change."""
    facts: dict[str, Any] = {
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch threads": torch.get_num_threads(),
        "Python threads": sorted(t.name for t in threading.enumerate()),
    }
    if sys.platform == "linux":
        maps = Path("/proc/self/maps").read_text().splitlines()
        facts["shared mappings"] = sum("/memfd:" in line or "/dev/shm/" in line for line in maps)
        descriptors = Path("/proc/self/fd").iterdir()
        facts["memfd descriptors"] = sum("/memfd:" in _link(entry) for entry in descriptors)
    return facts


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:  # the descriptor of the listing itself
        return ""


def _clean_up(before: dict[str, Any]) -> list[str]:
    """Destroy the test's groups, collect its garbage and return the leaks."""
    if dist.is_initialized():
        dist.destroy_process_group()
    deadline = time.monotonic() + SETTLE_S
    while True:
        gc.collect()
        after = _ambient()
        leaks = [f"{fact}: {before[fact]} before the test, {after[fact]} after it" for fact in after if after[fact] != before[fact]]
        if not leaks or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    gc.freeze()  # limits the next collection to the next test's objects
    return leaks


# ---- loading the test


class _Rewriting(importlib.machinery.SourceFileLoader):
    """Imports a test module as pytest does, so that a failed assert shows its values."""

    def get_code(self, fullname: str) -> CodeType:
        return compiled(Path(self.get_filename(fullname)))


def _load(job: Job) -> Callable[..., object]:
    os.chdir(ROOT)  # the folder of the test before is deleted with it
    if sys.path != job.path:
        sys.path[:] = job.path
    module = sys.modules.get(job.module) or _import(job.module, job.file)
    results: Any = module
    for name in job.qualname.split("."):
        results = getattr(results, name)
    body: Callable[..., object] = getattr(results, "body", results)  # the function that `distributed` wraps
    return body


def _import(name: str, file: str) -> ModuleType:
    if "." in name:
        importlib.import_module(name.rpartition(".")[0])
    spec = importlib.util.spec_from_file_location(name, file, loader=_Rewriting(name, file))
    assert spec is not None and spec.loader is not None, f"no import of {name} from {file}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module

"""Distributed tests as ordinary functions, run by a pool of worker processes that is started once.

    @distributed(world_size=(2, 4), transports=("shared", "gloo"))
    def test_x(world_size: int, transport: str) -> None:    # on every rank, in its own gloo group
        assert dist.get_world_size() == world_size

    def test_y() -> None:
        ranks = run(2, some_module_level_function, 1, key="a")    # the return values, by rank

Arguments (parameters, fixtures such as `tmp_path`) and return values are pickled; workers import the function by its module and
qualified name. Seeds are fixed, and warnings are errors (filter them inside the body: marks stay in pytest's process).

A failure shows the traceback of the rank that failed first, then the state of each other rank, then the output of all ranks.
The pool interrupts the other ranks and kills those that do not react (blocked in native code). After `timeout` seconds it kills all
ranks. The report has the Python stacks of killed ranks. A test that passes but leaks something (a shared mapping, a descriptor, a
thread, a changed default) fails. The next test replaces killed workers. `worker.py` describes the processes.

To measure the overhead: `python -m pytest tests/dist/test_pool.py -k costs -s`.
"""

import contextlib
import functools
import inspect
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

import pytest

from tests.budget import add_workers
from tests.jobs import DUMP, FORK, INTERRUPT, READY, REQUEST, WAIT, Job, Report
from tests.on_gpu import ON_GPU

MAX_WORLD = 8
GRACE_S = 0.3  # after the first failure, for the other ranks to report their own failures
PATIENCE_S = 2.0  # after the interrupt, for the other ranks to react
STACKS_S = 5.0  # for a rank to write its stacks; on a loaded machine it runs seldom
CLEAN_UP_S = 15.0
START_S = 120.0
OUTPUT_TAIL = 8000  # characters of each rank's output in a failure
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class RankError(Exception):
    """Some rank did not pass. `first`: the report of the rank that failed first; the message describes all ranks."""

    def __init__(self, first: Report, story: str) -> None:
        super().__init__(story)
        self.first = first


def single_threaded(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of test processes: one CPU thread each, the loopback interface, no variables of a rank."""
    clean = {key: value for key, value in environ.items() if key not in RANK_VARIABLES}
    loopback = "lo" if sys.platform == "linux" else "lo0"
    return clean | {
        "CUDA_VISIBLE_DEVICES": ON_GPU and environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # the other way to look for a GPU starts CUDA, which no fork survives
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "GLOO_SOCKET_IFNAME": loopback,
    }


class _Worker:
    """One forked process: its connection, and the file with its stdout and stderr."""

    def __init__(self, template: "_Template") -> None:
        self.connection, reference = Pipe()
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the worker)
        self._output_end: int | None = None  # end of the test's output; stacks follow
        self._template = template
        self._exit_code: int | None = None
        self.pid = template.fork(reference, self._output)
        reference.close()

    def begin(self, job: Job) -> None:
        os.ftruncate(self._output.fileno(), 0)
        os.lseek(self._output.fileno(), 0, os.SEEK_SET)  # the worker shares this position
        self.connection.send_bytes(pickle.dumps(job))

    def printed(self) -> str:
        return self._read(0, self._output_end if self._output_end is not None else self._size())

    def stacks(self) -> str:
        """Every thread's Python stack, even of a blocked process. The process must be killed afterwards."""
        self._output_end = start = seen = self._size()
        _signal(self.pid, DUMP)
        deadline = time.monotonic() + STACKS_S
        # Until a stack is there, which other output may precede, and nothing more is written.
        while time.monotonic() < deadline:
            size = self._size()
            if size == seen and "most recent call first" in self._read(start, size):
                break
            seen = size
            time.sleep(0.2)
        return self._read(start, self._size()) or "(no stack: the process does not answer)"

    def exit_code(self) -> int:
        """The exit code of a process that has ended or closed its connection; one that still runs is killed."""
        if self._exit_code is None:
            self._exit_code = self._template.exit_code(self.pid)
        return self._exit_code

    def close(self) -> None:
        self.connection.close()
        self._output.close()

    def _size(self) -> int:
        return os.fstat(self._output.fileno()).st_size

    def _read(self, start: int, stop: int) -> str:
        return os.pread(self._output.fileno(), stop - start, start).decode(errors="replace").strip()


class _Template:
    """The process that workers are forked from."""

    def __init__(self) -> None:
        ours, reference = socket.socketpair()
        program = "import sys; sys.path.insert(0, sys.argv[1]); from tests.worker import serve; serve(int(sys.argv[2]))"
        root = str(Path(__file__).resolve().parents[1])
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-c", program, root, str(reference.fileno())],
            pass_fds=[reference.fileno()],
            env=single_threaded(os.environ),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # only pytest handles Ctrl-C
        )
        reference.close()
        ours.settimeout(START_S)
        self._requests = ours
        self._ready = False

    def _answer(self, size: int) -> bytes:
        data = self._requests.recv(size, socket.MSG_WAITALL)
        if len(data) != size:
            raise RuntimeError(f"the workers' template process ended with exit code {self._process.wait()}")
        return data

    def _ask(self, verb: int, pid: int, fds: list[int]) -> int:
        if not self._ready:
            self._answer(len(READY))
            self._ready = True
        socket.send_fds(self._requests, [REQUEST.pack(verb, pid)], fds)
        answer: int = REQUEST.unpack(self._answer(REQUEST.size))[1]
        return answer

    def fork(self, connection: Connection, output: IO[bytes]) -> int:
        return self._ask(FORK, 0, [connection.fileno(), output.fileno()])

    def exit_code(self, pid: int) -> int:
        return self._ask(WAIT, pid, [])

    def close(self) -> None:
        self._requests.close()
        self._process.wait(10)


class Pool:
    def __init__(self) -> None:
        self.filters = ["error"]  # warnings, in the form of pytest's ini file
        self._template: _Template | None = None
        self._store: Any = None  # torch.distributed.TCPStore
        self._workers: list[_Worker] = []
        self._tests = 0

    def run(
        self, world_size: int, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float
    ) -> list[Any]:
        if not 1 <= world_size <= MAX_WORLD:
            raise ValueError(f"world_size ({world_size}) is not in 1..{MAX_WORLD}, the size of the pool")
        if "<" in function.__qualname__:
            raise ValueError(f"{function.__qualname__} travels by name: define it at the top of its module")
        arguments = pickle.dumps((args, kwargs))
        self._start(world_size)
        self._tests += 1
        this = _Round(self._workers[:world_size], timeout)
        try:
            return this.results(
                Job(
                    rank=0,
                    world_size=world_size,
                    port=self._store.port,
                    prefix=f"test{self._tests}",
                    timeout=timeout,
                    path=list(sys.path),
                    filters=self.filters,
                    module=function.__module__,
                    file=inspect.getfile(function),
                    qualname=function.__qualname__,
                    arguments=arguments,
                )
            )
        finally:  # also on Ctrl-C
            if not this.clean:
                self.kill()

    def kill(self) -> None:
        """Kill every worker and its process group; the next test starts new ones."""
        workers, self._workers = self._workers, []
        for worker in workers:
            _signal_group(worker.pid, signal.SIGKILL)
        for worker in workers:
            worker.exit_code()
            worker.close()

    def close(self) -> None:
        self.kill()
        if self._template is not None:
            self._template.close()
            self._template = self._store = None

    def _start(self, world_size: int) -> None:
        if self._template is None:
            self._template = _Template()
            from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's import, in parallel

            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        if any(worker.connection.poll() for worker in self._workers):  # end of file: a worker died while idle
            self.kill()
        while len(self._workers) < world_size:
            self._workers.append(_Worker(self._template))


class _Round:
    """One test on its workers: collects reports, and stops the other ranks after the first failure."""

    def __init__(self, workers: list[_Worker], timeout: float) -> None:
        self._workers = workers
        self._timeout = timeout
        self._reports: dict[int, Report] = {}
        self._released: set[int] = set()
        self.clean = False  # whether the workers can run another test

    def results(self, job: Job) -> list[Any]:
        for rank, worker in enumerate(self._workers):
            worker.begin(job._replace(rank=rank))
        self._collect()
        add_workers(sum(report.cpu_s for report in self._reports.values()))
        leaks = self._clean_up()
        self.clean = not leaks
        first = next((report for report in self._by_time() if report.status != "passed"), None)
        if first is not None and first.status == "skipped":
            pytest.skip(first.text)
        if first is not None:
            raise RankError(first, self._story(first))
        if leaks:
            story = "\n".join(f"rank {rank} passed but left behind: {text}" for rank, text in leaks)
            rank, text = leaks[0]
            raise RankError(Report(rank, "failed", text, b"", time.monotonic()), story)
        return [pickle.loads(self._reports[rank].value) for rank in range(len(self._workers))]

    def _by_time(self) -> list[Report]:
        return sorted(self._reports.values(), key=lambda report: report.when)

    def _pending(self) -> dict[Connection, int]:
        return {w.connection: rank for rank, w in enumerate(self._workers) if rank not in self._reports}

    def _collect(self) -> None:
        """Collect a report from every rank. Phases: running; grace, for further failures; interrupted."""
        deadline, phase = time.monotonic() + self._timeout, "running"
        while pending := self._pending():
            ready = wait(list(pending), max(deadline - time.monotonic(), 0.0))
            for connection in ready:
                self._receive(pending[connection], phase)  # type: ignore[index]
            if phase == "running" and any(report.status != "passed" for report in self._reports.values()):
                deadline, phase = time.monotonic() + GRACE_S, "grace"
            elif not ready and phase == "grace":
                for rank in pending.values():
                    _signal(self._workers[rank].pid, INTERRUPT)
                deadline, phase = time.monotonic() + PATIENCE_S, "interrupted"
            elif not ready:
                late = f"no answer after {self._timeout:g} s" if phase == "running" else "not to be interrupted"
                for rank in pending.values():
                    text = f"{late}; its stacks:\n{self._workers[rank].stacks()}"
                    self._reports[rank] = Report(rank, "hung", text, b"", time.monotonic())
            if phase == "interrupted":
                for rank in self._reports:  # closing their groups ends the collectives of the others
                    self._release(rank)
        for rank in self._reports:
            self._release(rank)

    def _receive(self, rank: int, phase: str) -> None:
        try:
            self._reports[rank] = pickle.loads(self._workers[rank].connection.recv_bytes())
        except (EOFError, ConnectionError):
            # A death is the cause of the others' failures, even if they report first.
            when = time.monotonic() if phase == "interrupted" else 0.0
            code = self._workers[rank].exit_code()
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            self._reports[rank] = Report(rank, "died", f"the process was ended {how}", b"", when)

    def _release(self, rank: int) -> None:
        if rank not in self._released and self._reports[rank].status not in ("died", "hung"):
            self._workers[rank].connection.send_bytes(b"clean up")
        self._released.add(rank)

    def _clean_up(self) -> list[tuple[int, str]]:
        """The leaks that each rank reports."""
        leaks: list[tuple[int, str]] = []
        deadline = time.monotonic() + CLEAN_UP_S
        for rank, worker in enumerate(self._workers):
            if self._reports[rank].status in ("died", "hung"):
                leaks.append((rank, "a dead process"))
            elif not worker.connection.poll(max(deadline - time.monotonic(), 0.0)):
                leaks.append((rank, f"a clean-up that hangs; its stacks:\n{worker.stacks()}"))
            else:
                try:
                    leaks += [(rank, text) for text in pickle.loads(worker.connection.recv_bytes())]
                except (EOFError, ConnectionError):
                    leaks.append((rank, "a process that died in its clean-up"))
        return leaks

    def _story(self, first: Report) -> str:
        world = len(self._workers)
        lines = [f"rank {first.rank} of {world} {first.status} first:", first.text]
        lines += [f"\nrank {r.rank} {r.status}" + (f":\n{r.text}" if r.text else "") for r in self._by_time() if r is not first]
        for rank, worker in enumerate(self._workers):
            if printed := worker.printed()[-OUTPUT_TAIL:]:
                lines.append(f"\nrank {rank} printed:\n{printed}")
        return "\n".join(lines)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _signal_group(pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:  # not yet a session leader, or ended
        _signal(pid, number)


pool = Pool()


def run(world_size: int, function: Callable[..., Any], /, *args: Any, timeout: float = 60.0, **kwargs: Any) -> list[Any]:
    """Call `function(*args, **kwargs)` on `world_size` ranks and return the results by rank. Raises RankError."""
    __tracebackhide__ = True
    return pool.run(world_size, function, args, kwargs, timeout)


def distributed(
    world_size: int | tuple[int, ...] = 2, *, transports: tuple[str, ...] = (), timeout: float = 60.0
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a test run on every rank of each world size, once per transport.

    The function has a parameter `transport` if `transports` is given, and may have `world_size`.
    """
    worlds = (world_size,) if isinstance(world_size, int) else world_size

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        signature = inspect.signature(body)
        takes_world = "world_size" in signature.parameters
        if bool(transports) != ("transport" in signature.parameters):
            raise ValueError(f"{body.__name__}: transports={transports} and a parameter `transport` go together")

        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            __tracebackhide__ = True
            world = arguments["world_size"] if takes_world else arguments.pop("world_size")
            try:
                pool.run(world, body, (), arguments, timeout)
            except RankError as error:
                pytest.fail(str(error), pytrace=False)

        parameters = list(signature.parameters.values())
        if not takes_world:
            parameters.append(inspect.Parameter("world_size", inspect.Parameter.KEYWORD_ONLY))
        test.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        test.body = body  # type: ignore[attr-defined]
        if transports:
            test = pytest.mark.parametrize("transport", transports)(test)
        each_world = pytest.mark.parametrize("world_size", worlds, ids=lambda n: f"world{n}")
        marked: Callable[..., None] = each_world(test)
        return marked

    return decorate

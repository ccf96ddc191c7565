"""The protocol between a benchmark and the processes that it measures.

The parent starts `python -m benchmarks.worker MODULE:FUNCTION ARGUMENTS` with ARGUMENTS in JSON. The child calls
FUNCTION(channel, **ARGUMENTS), which sets itself up and ends in `channel.serve(handlers)`. A request is a line of JSON on the
child's stdin, `[handler, arguments]`; a reply is a line on a duplicate of its stdout, `{"value": ...}` or `{"error": ...}`, and
the first reply says that the child is set up. Everything that libraries print goes to the child's log, with stderr. The end of
stdin ends the child. Standard library only: the interpreters of the peers import this module, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 1200.0  # seconds for a reply
_LOG_CHARS = 3000  # of a dead worker's log, in the error
_PR_SET_PDEATHSIG = 1


class Failed(RuntimeError):
    """A process that ended, raised, or did not reply in time. The text has the end of its log; `reason` is one line of a table."""

    def __init__(self, name: str, reason: str, log: str = "") -> None:
        super().__init__(f"{name}: {reason}" + (f"\n{log[-_LOG_CHARS:]}" if log else ""))
        self.name, self.reason = name, " ".join(reason.split())[:300]


# -- the child --


class Channel:
    """The child's end. Made before anything else is imported, so that nothing is printed into the replies."""

    def __init__(self) -> None:
        self._replies = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def serve(self, handlers: Mapping[str, Callable[..., Any]]) -> NoReturn:
        """Report that the worker is set up, then reply to requests until the parent leaves."""
        self.reply()
        while True:
            name, arguments = self.receive()
            self.reply(handlers[name](**arguments))

    def receive(self) -> tuple[str, dict[str, Any]]:
        """The next request: a handler's name and its arguments."""
        line = sys.stdin.readline()
        if not line:
            os._exit(0)  # no contender's exit handlers are measured or waited for
        name, arguments = json.loads(line)
        return name, arguments

    def reply(self, value: Any = None) -> None:
        self._replies.write(json.dumps({"value": value}) + "\n")

    def fail(self, reason: str) -> NoReturn:
        self._replies.write(json.dumps({"error": reason}) + "\n")
        sys.stderr.flush()
        os._exit(1)


def main() -> None:
    channel = Channel()
    module, _, function = sys.argv[1].partition(":")
    try:
        getattr(importlib.import_module(module), function)(channel, **json.loads(sys.argv[2]))
    except Exception as error:
        traceback.print_exc()
        channel.fail(f"{type(error).__name__}: {str(error).strip() or 'no message'}")


# -- the parent --


def child_setup(core: int | None = None, enter: Callable[[], None] | None = None) -> Callable[[], None]:
    """Runs between fork and exec: the kernel kills the child with its parent, however the parent ends."""
    libc = ctypes.CDLL(None)

    def setup() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if core is not None:
            os.sched_setaffinity(0, {core})
        if enter is not None:
            enter()

    return setup


def _kill(process: subprocess.Popen[str]) -> None:
    """The process and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Worker:
    """A child. As a context, it leaves no process behind. The constructor does not wait: call `ready` before the first request."""

    def __init__(
        self,
        target: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        name: str = "",
        python: Path | None = None,
        env: Mapping[str, str] | None = None,
        core: int | None = None,
        prefix: Sequence[str] = (),
        enter: Callable[[], None] | None = None,
    ) -> None:
        """Start `python` (default: this interpreter) on `target`, MODULE:FUNCTION, with `prefix` before its command line.

        `env` is added to the environment, `core` is the one to run on (default: all), and `enter` runs in the child before exec.
        Raises Failed if there is no such interpreter.
        """
        self.name = name or target
        python = python or Path(sys.executable)
        if not python.exists():
            raise Failed(self.name, f"there is no {python.name} at {python.parent} (`make bench` builds it)")
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the worker
        self._process = subprocess.Popen(
            [*prefix, str(python), "-m", "benchmarks.worker", target, json.dumps(arguments or {})],
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
            preexec_fn=child_setup(core, enter),
        )
        assert self._process.stdin is not None and self._process.stdout is not None, "both are pipes"
        self._requests, self._replies = self._process.stdin, self._process.stdout

    @property
    def pid(self) -> int:
        return self._process.pid

    def ready(self, timeout: float = TIMEOUT) -> None:
        """Wait until the child is set up."""
        self.answer(timeout)

    def call(self, handler: str, *, timeout: float = TIMEOUT, **arguments: Any) -> Any:
        """The handler's value. Raises Failed, after which only `close` is left to call."""
        self.ask(handler, **arguments)
        return self.answer(timeout)

    def ask(self, handler: str, **arguments: Any) -> None:
        try:
            self._requests.write(json.dumps([handler, arguments]) + "\n")
            self._requests.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def answer(self, timeout: float = TIMEOUT) -> Any:
        return answers([self], timeout)[0]

    def stop(self) -> None:
        """Suspend the child (SIGSTOP) while another one is measured: an idle contender may spin."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill the child and its children; stopped ones, too."""
        _kill(self._process)
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        self._replies.close()
        self._log.close()

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            os.killpg(self.pid, number)

    def _read(self) -> Any:
        line = self._replies.readline()
        if not line:
            raise self._ended()
        reply = json.loads(line)
        if "error" in reply:
            raise Failed(self.name, reply["error"], self._logged())
        return reply["value"]

    def _logged(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace").strip()

    def _ended(self) -> Failed:
        try:
            code: object = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            code = "none: it closed its pipe"
        log = self._logged()
        return Failed(self.name, f"exit code {code}; {log.splitlines()[-1] if log else 'nothing on stderr'}", log)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def answers(workers: Sequence[Worker], timeout: float = TIMEOUT) -> list[Any]:
    """The next reply of each. Raises Failed as soon as one fails, even if the others wait for it."""
    pending = {worker._replies: worker for worker in workers}
    values: dict[Worker, Any] = {}
    deadline = time.monotonic() + timeout
    while pending:
        ready, _, _ = select.select(list(pending), [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            late = next(iter(pending.values()))
            raise Failed(late.name, f"no reply within {timeout:.0f} s", late._logged())
        for stream in ready:
            worker = pending.pop(stream)
            values[worker] = worker._read()
    return [values[worker] for worker in workers]


def run(command: Sequence[object], *, env: Mapping[str, str] | None = None, timeout: float | None = None) -> str:
    """stdout of a command of another kind. It is killed, with its children, if the benchmark is interrupted. Raises Failed."""
    words = [str(word) for word in command]
    with subprocess.Popen(
        words,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=child_setup(),
    ) as process:
        try:
            out, log = process.communicate(timeout=timeout)
        except BaseException:
            _kill(process)
            raise
    if process.returncode:
        log = log.strip() or out.strip()
        last = log.splitlines()[-1] if log else "no output"
        raise Failed(" ".join(words[:4]), f"exit code {process.returncode}; {last}", log)
    return out


if __name__ == "__main__":
    main()

"""Runs the commands of a job that reaches beyond this process: all start together, and all end when one has
failed.

Their stdout is ours. Their stderr passes through us, which takes the failure records out of it, so that the
first failing rank of all nodes is told once, at the end. Each command leads a session of its own: Ctrl-C
reaches it through us.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import IO

from slipstream.launch.commands import Command
from slipstream.launch.failure import Extract, Failure, first, render, shell_code

__all__ = ["run_commands"]

_POLL_S = 0.05
_WORD_S = 0.5  # after the first end, time for the records of the others to arrive
_GRACE_S = 4.0  # from the request to stop to SIGKILL; agents end their ranks within watch.GRACE_S


class _Stopped(Exception):
    def __init__(self, number: int) -> None:
        self.number = number


class _Running:
    """One command that was started, and the thread that reads its stderr."""

    def __init__(self, command: Command) -> None:
        self.name, self.lease = command.name, command.lease
        self.extract = Extract()
        self.process = subprocess.Popen(
            command.argv,
            env={**os.environ, **command.env},
            stdin=subprocess.PIPE if command.lease else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        assert self.process.stderr is not None, "stderr was asked for as a pipe"
        self._reader = threading.Thread(target=self._pass_on, args=(self.process.stderr,), daemon=True)
        self._reader.start()

    def _pass_on(self, stream: IO[bytes]) -> None:
        while data := os.read(stream.fileno(), 65536):
            _write(self.extract.feed(data))
        _write(self.extract.rest())

    def ask_to_stop(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()  # the lease ends: the agent at the far end stops its ranks
        else:
            self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)

    def finish(self) -> None:
        self.process.wait()
        self._reader.join(timeout=1.0)


def _write(data: bytes) -> None:
    if data:
        sys.stderr.buffer.write(data)
        sys.stderr.buffer.flush()


def _wait(running: Sequence[_Running], seconds: float) -> None:
    """Until all have ended, at most `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(one.process.poll() is None for one in running):
        time.sleep(_POLL_S)


def _stop(running: Sequence[_Running]) -> None:
    for one in running:
        one.ask_to_stop()
    _wait(running, _GRACE_S)
    for one in running:
        one.kill()
        one.finish()


def _on_signal(number: int, frame: FrameType | None) -> None:
    raise _Stopped(number)


def _tell(failures: Sequence[Failure], failed: Sequence[_Running]) -> int:
    """The summary and the exit code, from the records if there are any, else from how the commands ended."""
    if failures:
        sys.stderr.write(render(failures))
        return shell_code(first(failures).exit_code)
    for one in failed:
        code = one.process.returncode
        hint = f"; try `ssh -o BatchMode=yes {one.name} true`" if one.lease and code == 255 else ""
        print(f"slipstream run: {one.name} ended with exit code {code}{hint}", file=sys.stderr)
    return shell_code(failed[0].process.returncode)


def run_commands(commands: Sequence[Command]) -> int:
    """Start all, wait, stop the rest when one fails. Returns the exit code for the shell."""
    running: list[_Running] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, _on_signal) for number in numbers}
    try:
        for command in commands:
            running.append(_Running(command))
        failed: list[_Running] = []
        while not failed and any(one.process.poll() is None for one in running):
            time.sleep(_POLL_S)
            failed = [one for one in running if one.process.poll()]
        failed = [one for one in running if one.process.poll()]
        if not failed:
            return 0
        _wait(running, _WORD_S)
        _stop(running)
        return _tell([failure for one in running for failure in one.extract.failures], failed)
    except FileNotFoundError as error:
        _stop(running)
        raise ValueError(f"{error.filename} is not installed on this host; choose another --launcher") from None
    except _Stopped as stop:
        _stop(running)
        return 128 + stop.number
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

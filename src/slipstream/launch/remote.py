"""Run the commands of a job on several hosts: start all together, and stop all when one fails.

The commands inherit our stdout. We forward their stderr without the failure records in it, and print one summary of the first
failing rank of all nodes at the end. Each command leads its own session, so that Ctrl-C reaches it only through us.
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
from slipstream.world import brief

_POLL_S = 0.05
_RECORDS_S = 0.5  # seconds after the first failure for the records of other commands to arrive
_GRACE_S = 4.0  # seconds from the request to stop until SIGKILL; agents stop their ranks within agent.GRACE_S


class _Stopped(Exception):
    def __init__(self, number: int) -> None:
        self.number = number


class _Running:
    """A running command, and the thread that forwards its stderr."""

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
        assert self.process.stderr is not None, "stderr is a pipe"
        self._reader = threading.Thread(target=self._forward, args=(self.process.stderr,), daemon=True)
        self._reader.start()

    def _forward(self, stream: IO[bytes]) -> None:
        while data := os.read(stream.fileno(), 65536):
            _write(self.extract.feed(data))
        _write(self.extract.flush())

    def request_stop(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()  # ends the lease: the remote agent stops its ranks
        else:
            self.send(signal.SIGTERM)

    def send(self, number: signal.Signals) -> None:
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
    """Wait until all commands have ended, at most `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(command.process.poll() is None for command in running):
        time.sleep(_POLL_S)


def _stop(running: Sequence[_Running]) -> None:
    for command in running:
        command.request_stop()
    _wait(running, _GRACE_S)
    for command in running:
        command.send(signal.SIGKILL)
        command.finish()


def _on_signal(number: int, frame: FrameType | None) -> None:
    raise _Stopped(number)


def _report(failures: Sequence[Failure], failed: Sequence[_Running]) -> int:
    """Print the summary of the failure records, or else of the commands' exit codes. Returns the exit code for the shell."""
    if (first(failures).exit_code if failures else failed[0].process.returncode) == brief.AGAIN:
        print(
            f"slipstream run: all ranks have saved and stopped after a signal; exit code {brief.AGAIN}: start again",
            file=sys.stderr,
        )
        return brief.AGAIN
    if failures:
        sys.stderr.write(render(failures))
        return shell_code(first(failures).exit_code)
    for command in failed:
        code = command.process.returncode
        hint = f"; try `ssh -o BatchMode=yes {command.name} true`" if command.lease and code == 255 else ""
        print(f"slipstream run: {command.name} failed with exit code {code}{hint}", file=sys.stderr)
    return shell_code(failed[0].process.returncode)


def run_commands(commands: Sequence[Command], spare: int = 0) -> int:
    """Start all commands and wait for them; if more than `spare` fail, stop the others. Returns the exit code for the shell."""
    running: list[_Running] = []
    handlers = {number: signal.signal(number, _on_signal) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        for command in commands:
            running.append(_Running(command))
        while True:
            codes = [command.process.poll() for command in running]
            if None not in codes or sum(map(bool, codes)) > spare:
                break
            time.sleep(_POLL_S)
        failed = [command for command in running if command.process.poll()]
        if len(failed) <= spare:
            return 0
        _wait(running, _RECORDS_S)
        _stop(running)
        return _report([failure for command in running for failure in command.extract.failures], failed)
    except FileNotFoundError as error:
        _stop(running)
        raise ValueError(f"{error.filename} is not installed on this host; install it or choose another --launcher") from None
    except _Stopped as stop:
        for number in handlers:
            signal.signal(number, signal.SIG_IGN)  # stopping takes seconds, in which a second Ctrl-C is likely
        _stop(running)
        name = signal.Signals(stop.number).name
        print(f"slipstream run: stopped by {name}, and the ranks on all hosts have stopped", file=sys.stderr, flush=True)
        return 128 + stop.number
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)

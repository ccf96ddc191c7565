"""Ranks as plain processes, for tests that crash them: as `torchrun` starts them, but without its agent.

    ranks = spawn_ranks(SCRIPT, 2, {"KILL_AT": "publish"})    # the fixture
    ranks.kill(1)
    assert ranks.wait(timeout=5) == [1, -signal.SIGKILL]       # exit codes by rank
    assert "rank 1" in ranks.stderr(0) and not ranks.survivors()

Each rank has its own session and its own files for stdout and stderr. A token in the environment marks every process that a rank
starts, even if it detaches: `survivors` finds them, the fixture kills them.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from tests.pool import single_threaded
from tests.ports import free_port

TOKEN = "SLIPSTREAM_TEST_RANKS"


class Ranks:
    """The processes of one script."""

    def __init__(self, folder: Path, script: str, nproc: int, env: Mapping[str, str]) -> None:
        self._folder = folder
        self._token = uuid.uuid4().hex
        file = folder / "script.py"
        file.write_text(script)
        shared = single_threaded(os.environ) | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "PYTHONFAULTHANDLER": "1",
            "PYTHONUNBUFFERED": "1",
            "WORLD_SIZE": str(nproc),
            "LOCAL_WORLD_SIZE": str(nproc),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            TOKEN: self._token,
        }
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank in range(nproc):
            with self._file(rank, "stdout").open("wb") as out, self._file(rank, "stderr").open("wb") as err:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, str(file)],
                        env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | dict(env),
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=err,
                        start_new_session=True,
                    )
                )

    def wait(self, timeout: float = 60.0) -> list[int]:
        """Wait for all ranks and return their exit codes. Raises TimeoutError with the output of the ranks that still run."""
        deadline = time.monotonic() + timeout
        while alive := [rank for rank, process in enumerate(self.processes) if process.poll() is None]:
            if time.monotonic() > deadline:
                printed = "\n".join(f"rank {rank}:\n{self.stdout(rank)}{self.stderr(rank)}" for rank in alive)
                raise TimeoutError(f"ranks {alive} still run after {timeout:g} s\n{printed}")
            time.sleep(0.01)
        return [process.returncode for process in self.processes]

    def wait_for(self, rank: int, text: str, timeout: float = 60.0) -> None:
        """Wait until the rank has printed `text` to stdout."""
        deadline = time.monotonic() + timeout
        while text not in self.stdout(rank):
            ended = self.processes[rank].poll()
            if ended is not None and text not in self.stdout(rank):
                raise AssertionError(f"rank {rank} ended ({ended}) before {text!r}:\n{self.stderr(rank)}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {rank}: no {text!r} in {timeout:g} s:\n{self.stderr(rank)}")
            time.sleep(0.005)

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        self.processes[rank].send_signal(number)

    def stdout(self, rank: int) -> str:
        return self._file(rank, "stdout").read_text(errors="replace")

    def stderr(self, rank: int) -> str:
        return self._file(rank, "stderr").read_text(errors="replace")

    def survivors(self) -> list[int]:
        """The running ranks and processes that ranks started."""
        mark = f"{TOKEN}={self._token}".encode()
        results = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    results.append(int(entry.name))
            except OSError:  # the process has ended or belongs to another user
                continue
        return sorted(results)

    def close(self) -> None:
        """Kill every rank and all processes that it started."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait(10)
        while survivors := self.survivors():
            for pid in survivors:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def _file(self, rank: int, name: str) -> Path:
        return self._folder / f"rank{rank}.{name}"


class SpawnRanks:
    """The fixture's value: starts `Ranks`, and kills them all at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[Ranks] = []

    def __call__(self, script: str, nproc: int, env: Mapping[str, str] | None = None) -> Ranks:
        folder = self._folder / f"ranks{len(self._started)}"
        folder.mkdir()
        self._started.append(Ranks(folder, script, nproc, env or {}))
        return self._started[-1]

    def close(self) -> None:
        for ranks in self._started:
            ranks.close()

"""Memory of a set of processes, counted by the kernel: what is private to each, and what they share once.

Three ways, the best that is allowed: a fresh memory cgroup of version 1 or 2 (anonymous + shared memory, no page cache),
else the sum of the processes' proportional set sizes (smaps_rollup), which counts file pages of libraries too.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_PERIOD = 1 / 20


class Meter(ABC):
    """Counts the memory of the processes that called `enter` in themselves, and of their children."""

    name: str

    @abstractmethod
    def enter(self) -> None:
        """Called in a child before it becomes a rank."""

    @abstractmethod
    def read(self) -> int:
        """Bytes now."""

    def reset_peak(self) -> None:  # noqa: B027  # most have none
        """Start the kernel's own high-water mark again, where there is one."""

    def peak(self) -> int | None:
        """The kernel's high-water mark since, without page cache."""
        return None

    def close(self) -> None:  # noqa: B027
        """Remove what was made."""


class CgroupV1(Meter):
    name = "memory cgroup (v1), rss + shmem"

    def __init__(self) -> None:
        self.path = _ROOT / "memory" / f"slipstream-bench-{os.getpid()}"
        self.path.mkdir()

    def enter(self) -> None:
        (self.path / "cgroup.procs").write_text("0")

    def _stat(self) -> dict[str, int]:
        lines = (line.split() for line in (self.path / "memory.stat").read_text().splitlines())
        return {name: int(value) for name, value in lines}

    def read(self) -> int:
        stat = self._stat()
        return stat["total_rss"] + stat["total_shmem"]

    def reset_peak(self) -> None:
        (self.path / "memory.max_usage_in_bytes").write_text("0")

    def peak(self) -> int | None:
        stat = self._stat()
        page_cache = stat["total_cache"] - stat["total_shmem"]
        return int((self.path / "memory.max_usage_in_bytes").read_text()) - page_cache

    def close(self) -> None:
        _remove(self.path)


class CgroupV2(Meter):
    name = "memory cgroup (v2), anon + shmem"

    def __init__(self) -> None:
        self.path = _ROOT / f"slipstream-bench-{os.getpid()}"
        self.path.mkdir()
        try:
            self.read()
        except OSError:
            self.path.rmdir()
            raise

    def enter(self) -> None:
        (self.path / "cgroup.procs").write_text("0")

    def _stat(self) -> dict[str, int]:
        lines = (line.split() for line in (self.path / "memory.stat").read_text().splitlines())
        return {name: int(value) for name, value in lines}

    def read(self) -> int:
        stat = self._stat()
        return stat["anon"] + stat["shmem"]

    def reset_peak(self) -> None:
        with contextlib.suppress(OSError):  # from Linux 6.12
            (self.path / "memory.peak").write_text("reset")

    def close(self) -> None:
        _remove(self.path)


class Proportional(Meter):
    name = "sum of proportional set sizes (no writable memory cgroup)"

    def __init__(self) -> None:
        self.mark = f"slipstream-bench-{os.getpid()}"

    def enter(self) -> None:
        os.environ["BENCH_METER"] = self.mark

    def read(self) -> int:
        total = 0
        for process in _children(os.getpid()):
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
                    if line.startswith("Pss:"):
                        total += int(line.split()[1]) * 1024
        return total


def _children(pid: int) -> list[int]:
    """All descendants."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *_children(child)]
    return found


def _remove(path: Path) -> None:
    for _ in range(100):  # the last process leaves a moment after it was reaped
        try:
            path.rmdir()
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"{path} is still in use")


@contextlib.contextmanager
def meter() -> Iterator[Meter]:
    """The best meter that this machine allows."""
    made: Meter | None = None
    for kind in (CgroupV1, CgroupV2):
        try:
            made = kind()
            break
        except OSError:
            continue
    made = made or Proportional()
    try:
        yield made
    finally:
        made.close()


class Sampler:
    """The most that `meter` shows in 20 looks a second between `start` and `stop`."""

    def __init__(self, meter: Meter) -> None:
        self.meter, self.most, self.looks = meter, 0, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._over.wait(_PERIOD):
            self.most = max(self.most, self.meter.read())
            self.looks += 1

    def start(self) -> None:
        self.meter.reset_peak()
        self._thread.start()

    def stop(self) -> int:
        self._over.set()
        self._thread.join()
        return self.most

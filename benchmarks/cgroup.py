"""Memory of a set of processes, counted by the kernel: a fresh memory cgroup of version 1 or 2 (anonymous and shared memory,
without page cache), in which shared memory counts once.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_PERIOD = 1 / 20


class Cgroup:
    """Counts the memory of the processes that called `enter`, and of their children."""

    name: str
    parts: tuple[str, ...]  # lines of memory.stat
    parent = _ROOT

    def __init__(self, suffix: str = "") -> None:
        self.path = self.parent / f"slipstream-bench-{os.getpid()}{suffix}"
        self.path.mkdir()
        try:
            self.read()
        except (OSError, KeyError):
            self.path.rmdir()
            raise

    def enter(self) -> None:
        """Called in a child, between fork and exec."""
        (self.path / "cgroup.procs").write_text("0")

    def stat(self) -> dict[str, int]:
        lines = (line.split() for line in (self.path / "memory.stat").read_text().splitlines())
        return {name: int(value) for name, value in lines}

    def read(self) -> int:
        """Bytes now."""
        stat = self.stat()
        return sum(stat[part] for part in self.parts)

    def reset_peak(self) -> None:
        """Reset the kernel's high-water mark, if it has one."""

    def peak(self) -> int | None:
        """The kernel's high-water mark since, without page cache."""
        return None

    def close(self) -> None:
        for _ in range(100):  # the last process leaves a moment after it was reaped
            try:
                self.path.rmdir()
                return
            except OSError:
                time.sleep(0.05)
        raise RuntimeError(f"{self.path} is still in use")


class CgroupV1(Cgroup):
    name, parts, parent = "memory cgroup (v1), rss + shmem", ("total_rss", "total_shmem"), _ROOT / "memory"

    def reset_peak(self) -> None:
        (self.path / "memory.max_usage_in_bytes").write_text("0")

    def peak(self) -> int | None:
        stat = self.stat()
        page_cache = stat["total_cache"] - stat["total_shmem"]
        return int((self.path / "memory.max_usage_in_bytes").read_text()) - page_cache


class CgroupV2(Cgroup):
    name, parts = "memory cgroup (v2), anon + shmem", ("anon", "shmem")


@contextlib.contextmanager
def meter(suffix: str = "") -> Iterator[Cgroup]:
    """A new memory cgroup; several at once need suffixes. Raises OSError if this machine or user cannot make one."""
    try:
        made: Cgroup = CgroupV1(suffix)
    except OSError:
        made = CgroupV2(suffix)
    try:
        yield made
    finally:
        made.close()


class Sampler:
    """The maximum of 20 samples a second between `start` and `stop`."""

    def __init__(self, meter: Cgroup) -> None:
        self.meter, self.most = meter, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._over.wait(_PERIOD):
            self.most = max(self.most, self.meter.read())

    def start(self) -> None:
        self.meter.reset_peak()
        self._thread.start()

    def stop(self) -> int:
        self._over.set()
        self._thread.join()
        return self.most

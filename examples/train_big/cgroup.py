"""A memory cgroup that limits a command's memory, shared mappings included, and forbids swap."""

from __future__ import annotations

import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_NAME = f"slipstream-train-big-{os.getpid()}"


class Group(ABC):
    @abstractmethod
    def enter(self) -> None:
        """Called in a child before it becomes the command."""

    @abstractmethod
    def limit(self, nbytes: int | None) -> None:
        """Limit the group to `nbytes` (None: no limit) and reset the peak."""

    @abstractmethod
    def usage(self) -> int:
        """Current bytes, without page cache."""

    @abstractmethod
    def peak(self) -> int | None:
        """Peak bytes since `limit`: the kernel's counter if it can be reset, else the largest `usage`; None if unknown."""

    def close(self) -> None:  # noqa: B027
        """Remove the cgroup."""


class _V1(Group):
    def __init__(self) -> None:
        self.path = _ROOT / "memory" / _NAME
        self.path.mkdir()

    def enter(self) -> None:
        (self.path / "cgroup.procs").write_text("0")

    def limit(self, nbytes: int | None) -> None:
        with contextlib.suppress(OSError):
            (self.path / "memory.swappiness").write_text("0")
        (self.path / "memory.limit_in_bytes").write_text(str(-1 if nbytes is None else nbytes))
        (self.path / "memory.max_usage_in_bytes").write_text("0")

    def usage(self) -> int:
        stat = dict(line.split() for line in (self.path / "memory.stat").read_text().splitlines())
        return int(stat["total_rss"]) + int(stat["total_shmem"])

    def peak(self) -> int | None:
        stat = dict(line.split() for line in (self.path / "memory.stat").read_text().splitlines())
        page_cache = int(stat["total_cache"]) - int(stat["total_shmem"])
        return int((self.path / "memory.max_usage_in_bytes").read_text()) - page_cache

    def close(self) -> None:
        _remove(self.path)


class _V2(Group):
    def __init__(self) -> None:
        self.path = _ROOT / _NAME
        self.path.mkdir()
        self._peak = 0
        if not (self.path / "memory.max").exists():
            self.path.rmdir()
            raise OSError("the memory controller is not delegated here")

    def enter(self) -> None:
        (self.path / "cgroup.procs").write_text("0")

    def limit(self, nbytes: int | None) -> None:
        self._peak = 0
        with contextlib.suppress(OSError):
            (self.path / "memory.swap.max").write_text("0")
        (self.path / "memory.max").write_text("max" if nbytes is None else str(nbytes))

    def usage(self) -> int:
        stat = dict(line.split() for line in (self.path / "memory.stat").read_text().splitlines())
        nbytes = int(stat["anon"]) + int(stat["shmem"])
        self._peak = max(self._peak, nbytes)
        return nbytes

    def peak(self) -> int | None:
        return self._peak or None

    def close(self) -> None:
        _remove(self.path)


class Unlimited(Group):
    """No limit, and the memory in use on the machine: the fallback if no cgroup can be created."""

    def enter(self) -> None:
        pass

    def limit(self, nbytes: int | None) -> None:
        self._before, self._peak = _in_use(), 0

    def usage(self) -> int:
        nbytes = max(_in_use() - self._before, 0)
        self._peak = max(self._peak, nbytes)
        return nbytes

    def peak(self) -> int | None:
        return self._peak or None


def _in_use() -> int:
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return (int(fields["MemTotal"].split()[0]) - int(fields["MemAvailable"].split()[0])) * 1024


@contextlib.contextmanager
def open_group() -> Iterator[Group]:
    """Create a cgroup of version 1 or 2, or the fallback, and remove it afterwards."""
    group: Group | None = None
    for kind in (_V1, _V2):
        try:
            group = kind()
            break
        except OSError:
            continue
    group = group or Unlimited()
    try:
        yield group
    finally:
        group.close()


def _remove(path: Path) -> None:
    for _ in range(100):  # the kernel removes the last process a moment after it is reaped
        with contextlib.suppress(OSError):
            path.rmdir()
            return
        time.sleep(0.05)

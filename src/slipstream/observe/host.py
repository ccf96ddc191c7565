"""Facts about this host: cores, memory, limits, kill counts of the out-of-memory killer.

Parsers are pure and tested on text; `read_pressure` and similar functions only open files. A missing file (another kernel, a
container that hides it) gives None, never an error: these facts are for reports, not for decisions.
"""

from __future__ import annotations

import os
import re
import shutil
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
PAGE = os.sysconf("SC_PAGE_SIZE")
_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as the largest multiple of a page below 2^63


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """Memory limits and kill counts at one moment; the difference of two shows what the kernel killed in between."""

    cgroup_kills: int | None  # processes that the OOM killer ended in this control group
    host_kills: int | None  # the same over the whole host
    limit: int | None  # bytes this control group may use; None = no limit
    shm: tuple[int, int, int] | None  # bytes of /dev/shm: all, used, free


def counter(text: str, name: str) -> int | None:
    """The value of `name N` in a file with one counter per line (memory.events, memory.oom_control, /proc/vmstat)."""
    match = re.search(rf"^{re.escape(name)} (\d+)$", text, re.MULTILINE)
    return int(match[1]) if match else None


def cgroup_directories(text: str, root: Path = _CGROUP) -> list[Path]:
    """Directories that may hold this process's memory files, most specific first, from the text of /proc/self/cgroup.

    Inside a container the path named there often does not exist, and the files are at the root of the mount.
    """
    directories: list[Path] = []
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        mount = root if not controllers else root / "memory"
        if controllers and "memory" not in controllers.split(","):
            continue
        here = mount / path.lstrip("/")
        directories += [here, *(parent for parent in here.parents if parent == mount or mount in parent.parents)]
    return directories


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _texts(directories: Sequence[Path], names: Sequence[str]) -> list[str]:
    """The contents of those files that exist."""
    return [text for directory in directories for name in names if (text := _read(directory / name))]


def read_pressure() -> Pressure:
    directories = cgroup_directories(_read(Path("/proc/self/cgroup")) or "")
    vmstat = _read(Path("/proc/vmstat"))
    kills = [counter(text, "oom_kill") for text in _texts(directories, ("memory.events", "memory.oom_control"))]
    limits = [text.strip() for text in _texts(directories, ("memory.max", "memory.limit_in_bytes"))]
    return Pressure(
        cgroup_kills=next((number for number in kills if number is not None), None),
        host_kills=counter(vmstat, "oom_kill") if vmstat else None,
        limit=min((int(text) for text in limits if text.isdigit() and int(text) < _UNLIMITED), default=None),
        shm=shutil.disk_usage("/dev/shm") if os.path.exists("/dev/shm") else None,
    )


def memory_total() -> int | None:
    """Bytes of RAM, or the control group's limit if that is smaller."""
    match = re.search(r"^MemTotal:\s+(\d+) kB", _read(Path("/proc/meminfo")) or "", re.MULTILINE)
    limit = read_pressure().limit
    sizes = [size for size in (int(match[1]) * 1024 if match else None, limit) if size is not None]
    return min(sizes, default=None)


class Resident:
    """This process's memory. Its file stays open: to open it in each step would be 0.2 % of one of 50 ms."""

    def __init__(self) -> None:
        self._file = os.open("/proc/self/statm", os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    def nbytes(self) -> int:
        return int(os.pread(self._file, 100, 0).split()[1]) * PAGE


def cpu_flags() -> frozenset[str]:
    match = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", _read(Path("/proc/cpuinfo")) or "", re.MULTILINE)
    return frozenset(match[1].split()) if match else frozenset()

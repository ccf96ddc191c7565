"""Facts about this host: cores, memory, limits, and how many processes the out-of-memory killer has ended.

Parsers are pure and tested on text; `read_pressure` and similar functions only open files. A missing file (another kernel, a
container that hides it) gives None, never an error.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_CGROUP, _PROC = Path("/sys/fs/cgroup"), Path("/proc")
PAGE = os.sysconf("SC_PAGE_SIZE")
_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as the largest multiple of a page below 2^63


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """Memory limits and kill counts at one moment. The difference of two shows what the kernel killed in between."""

    cgroup_kills: int | None  # processes that the OOM killer ended in this control group
    host_kills: int | None  # the same over the whole host
    limit: int | None  # bytes that the control group and its parents allow; None = no limit
    shm: tuple[int, int, int] | None  # bytes of /dev/shm: all, used, free


def counter(text: str, name: str) -> int | None:
    """The value of `name N` in a file with one counter per line (memory.events, memory.oom_control, /proc/vmstat)."""
    match = re.search(rf"^{re.escape(name)} (\d+)$", text, re.MULTILINE)
    return int(match[1]) if match else None


def cgroup_directories(text: str, root: Path) -> list[Path]:
    """Directories under `root` that may hold this process's memory files, most specific first, from the text of /proc/self/cgroup.

    Inside a container the path named there often does not exist; then the files are at the root of the mount.
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
    """The contents of the existing files."""
    return [text for directory in directories for name in names if (text := _read(directory / name))]


def _limits() -> dict[Path, int]:
    """Control group directory -> bytes that this process may use, for those with a limit."""
    limits = {}
    for directory in cgroup_directories(_read(_PROC / "self/cgroup") or "0::/", _CGROUP):
        for text in _texts([directory], ("memory.max", "memory.limit_in_bytes")):
            if text.strip().isdigit() and int(text) < _UNLIMITED:
                limits[directory] = int(text)
    return limits


def _used(directory: Path) -> int:
    """Bytes that a control group and its children use, without reclaimable page cache."""
    used, stat = _texts([directory], ("memory.current", "memory.usage_in_bytes")), _read(directory / "memory.stat") or ""
    cached = [each for name in ("total_inactive_file", "inactive_file") if (each := counter(stat, name)) is not None]
    return int(used[0]) - next(iter(cached), 0) if used else 0


def read_pressure() -> Pressure:
    directories = cgroup_directories(_read(_PROC / "self/cgroup") or "0::/", _CGROUP)
    vmstat = _read(_PROC / "vmstat")
    kills = [counter(text, "oom_kill") for text in _texts(directories, ("memory.events", "memory.oom_control"))]
    return Pressure(
        cgroup_kills=next((number for number in kills if number is not None), None),
        host_kills=counter(vmstat, "oom_kill") if vmstat else None,
        limit=min(_limits().values(), default=None),
        shm=shutil.disk_usage("/dev/shm") if os.path.exists("/dev/shm") else None,
    )


def _of_host(name: str) -> list[int]:
    """The bytes on a line of /proc/meminfo; empty if the line is missing."""
    match = re.search(rf"^{name}:\s+(\d+) kB", _read(_PROC / "meminfo") or "", re.MULTILINE)
    return [int(match[1]) * 1024] if match else []


def memory_total() -> int | None:
    """Bytes of RAM, or the smallest limit of the control groups if that is smaller."""
    return min([*_of_host("MemTotal"), *_limits().values()], default=None)


def available_memory() -> int:
    """Bytes that are left within the host's memory and all control group limits. Reclaimable page cache counts as left."""
    return min(_of_host("MemAvailable") + [limit - _used(directory) for directory, limit in _limits().items()])


def resident_nbytes() -> int:
    """Bytes of this process in RAM."""
    return int((_PROC / "self/statm").read_text().split()[1]) * PAGE


@functools.cache
def processor() -> Mapping[str, str]:
    """Linux's description of the first core, by Linux's names: "vendor_id", "model name", "flags" (on ARM: "Features")."""
    first, *_ = (_read(Path("/proc/cpuinfo")) or "").split("\n\n")
    return dict(re.findall(r"^(\S[^:\n]*?)\s*: *(.*)$", first, re.MULTILINE))


def is_intel() -> bool:
    """Whether the processor is Intel's or unknown.

    [Note: Pairs of bf16] Intel's cores add two fp32 products per cycle and lane, but start a dot product of two bf16 pairs every
    second cycle: half the rate (an Emerald Rapids core: 156 and 84 GFLOP/s). There bf16 is multiplied in fp32, except by AMX.
    """
    return processor().get("vendor_id", "GenuineIntel") == "GenuineIntel"

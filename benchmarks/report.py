"""RESULTS.md: a section for each leg, with its commit, date and machine. A run replaces the sections that it measured."""

from __future__ import annotations

import os
import platform
import re
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.worker import ROOT
from benchmarks.workloads import has_bf16_instructions

RESULTS = ROOT / "benchmarks" / "RESULTS.md"

_HEAD = """# Results

`make bench` and `make bench-all` (`python -m benchmarks`) write this file; nobody edits it. Each section names its commit, date and
machine. Contenders run in fresh processes: in training one thread per rank and a core for each rank, in serving (`serve`) all cores
each. Times are interleaved with the other contenders' and repeated: a median with (min-max). Counts of bytes (`memory`, `wire`) are
of one run. Method: `benchmarks/README.md`.
"""


class Spread(NamedTuple):
    """Median, minimum and maximum."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    @classmethod
    def ratio(cls, above: Iterable[float], below: Iterable[float]) -> Spread:
        """Of paired values: round by round."""
        return cls.of([a / b for a, b in zip(above, below, strict=True)])

    def show(self, digits: int = 3) -> str:
        if self.low == self.high:
            return f"{self.median:.{digits}f}"
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A row that is too short, such as a contender's name and why it failed, is filled up."""
    full = [[*row, *[""] * (len(head) - len(row))] for row in (head, ["---"] * len(head), *rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in full)


def verdict(figure: str, reached: float, target: float, *, at_least: bool = False, digits: int = 2) -> list[str]:
    """A row of a target table."""
    good = reached >= target if at_least else reached <= target
    sign = ">=" if at_least else "<="
    return [figure, f"{reached:.{digits}f}", f"{sign} {target:g}", "reached" if good else "**missed**"]


def percent_over(seconds: Mapping[str, Sequence[float]], usual: str = "off") -> dict[str, float]:
    """By mode: the median over rounds of what a step takes longer than the `usual` one of its round, in % of the usual median."""
    base = seconds[usual]
    return {
        mode: 100 * statistics.median(a - b for a, b in zip(times, base, strict=True)) / statistics.median(base)
        for mode, times in seconds.items()
    }


def verdicts(rows: Sequence[Sequence[str]]) -> str:
    return table(["target", "measured", "wanted", ""], rows) if rows else "This run can judge no target."


def head(level: int) -> str:
    """The first paragraph of a section: commit, date, machine. `tests/unit/test_benchmarks.py` reads it."""
    with open("/proc/cpuinfo") as file:
        text = file.read()
    models = set(re.findall(r"model name\s*: (.*)", text)) or {platform.machine()}
    family = re.search(r"cpu family\s*: (\d+)\nmodel\s*: (\d+)", text)
    flags = [name for name in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16") if re.search(rf"\b{name}\b", text)]
    with open("/proc/meminfo") as file:
        memory = int(file.readline().split()[1]) / 2**20
    kind = f" (family {family[1]}, model {family[2]})" if family else ""
    bf16 = "multiplied natively" if has_bf16_instructions() else "widened to fp32 for each multiplication"
    return (
        f"Commit {commit()}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, level {level}. {', '.join(sorted(models))}{kind}, "
        f"{len(os.sched_getaffinity(0))} cores, {', '.join(flags) or 'no AVX2'}, {memory:.0f} GiB; Linux "
        f"{platform.release()}, Python {platform.python_version()}, torch {torch.__version__}; "
        f"bf16 {bf16}; load before the leg {os.getloadavg()[0]:.1f}."
    )


def commit() -> str:
    """The short hash, and whether code differs from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "src", "benchmarks/*.py")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + (" + changes" if changed else "")


def sections(text: str) -> dict[str, str]:
    """The sections of a RESULTS.md, by title."""
    parts = re.split(r"(?m)^(?=## )", text)[1:]
    return {part.split("\n", 1)[0][3:].strip(): part.rstrip() + "\n" for part in parts}


def write_section(title: str, body: str, order: Sequence[str], path: Path = RESULTS) -> None:
    """Put `body` in place of the section `title` and keep the others, in the order of `order`; titles that it lacks go."""
    present = sections(path.read_text()) if path.exists() else {}
    present[title] = f"## {title}\n\n{body.strip()}\n"
    path.write_text("\n".join([_HEAD, *(present[each] for each in order if each in present)]))

"""RESULTS.md: sections (a leg, or a table of `step`), each with its date and machine. What was not rerun keeps its own."""

from __future__ import annotations

import os
import platform
import re
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.peers import Peers
from benchmarks.ranks import ROOT
from benchmarks.workloads import has_bf16_instructions

RESULTS = ROOT / "benchmarks" / "RESULTS.md"
# of `make bench`
LEGS = (
    "step",
    "memory",
    "wire",
    "start",
    "activations",
    "optimizer",
    "kernels",
    "recipes",
    "plan",
    "quality",
    "disk",
    "offload",
    "save",
    "clients",
    "pretrained",
)
SECTIONS = (*LEGS, "serve")

_HEAD = """# Results

Written by `make bench` (`python -m benchmarks`) and `make bench-serve` (`python -m benchmarks.serve`), never by hand; each section
says when and on which machine. Contenders run in fresh processes; in training one thread per rank, each rank pinned to a core, in
serving (`serve`) all cores each. What is a time (`step`, `start`, `serve`) is interleaved with the
other contenders and repeated, and given as a median with (min-max); what is counted in bytes (`memory`, `wire`) is run once.
How: `benchmarks/README.md`.
"""


class Spread(NamedTuple):
    """Median, least and most of some rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def show(self, digits: int = 3) -> str:
        if self.low == self.high:
            return f"{self.median:.{digits}f}"
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines)


def verdict(figure: str, reached: float, target: float, *, at_least: bool = False, digits: int = 2) -> list[str]:
    """A row of a target table."""
    good = reached >= target if at_least else reached <= target
    sign = ">=" if at_least else "<="
    return [figure, f"{reached:.{digits}f}", f"{sign} {target:g}", "reached" if good else "**missed**"]


def verdicts(rows: Sequence[Sequence[str]]) -> str:
    return table(["target", "measured", "wanted", ""], rows) if rows else "No target can be judged from this run."


def machine(peers: Peers) -> str:
    """`host`, and who trains there."""
    who = f"deepspeed {peers.deepspeed}" if peers.python else f"without DeepSpeed: {peers.missing}"
    return host(f"{who}; one thread per rank")


def host(who: str) -> str:
    """What a reader needs to know of where this ran, in one paragraph."""
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
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, commit {_commit()}. {', '.join(sorted(models))}{kind}, "
        f"{len(os.sched_getaffinity(0))} cores, {', '.join(flags) or 'no AVX2'}, {memory:.0f} GiB; Linux "
        f"{platform.release()}, Python {platform.python_version()}, torch {torch.__version__}, {who}; "
        f"bf16 {bf16}; load before the leg {os.getloadavg()[0]:.1f}."
    )


def _commit() -> str:
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "src", "benchmarks/*.py")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + (" with changes" if changed else "")


def sections(text: str) -> dict[str, str]:
    """The legs' sections of an existing RESULTS.md."""
    found: dict[str, str] = {}
    for part in re.split(r"(?m)^(?=## )", text)[1:]:
        found[part.split("\n", 1)[0][3:].strip()] = part.rstrip() + "\n"
    return found


def write_section(name: str, body: str, path: Path = RESULTS) -> None:
    """Put `body` in place of the section `name` and leave the others as they are; sections are in the order of `SECTIONS`."""
    found = sections(path.read_text()) if path.exists() else {}
    found[name] = f"## {name}\n\n{body.strip()}\n"
    order = sorted(found, key=lambda each: SECTIONS.index(each.split(",")[0]))
    path.write_text("\n".join([_HEAD, *(found[each] for each in order)]))

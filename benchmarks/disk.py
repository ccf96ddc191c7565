"""The leg `disk`: what lies under the disk tier, beside fio with the same block size, queue depth and kind of access, in turns.

The floor is the device: what fio moves is what this machine gives in this minute. Each round is fio with its memory in huge
pages as ours is, fio as it comes (in small pages), ours on each engine, and fio in huge pages again; ours is told as a share of the
two around it, and the one over the other is the noise. Every byte of the files was written before; fio's is our io_uring engine's.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from typing import NamedTuple

from torch import Tensor

from benchmarks.ranks import ROOT
from benchmarks.report import Spread, host, table, verdict, verdicts
from slipstream.ops.disk import Disk, aligned, rates

FOLDER = ROOT / "runs"
SPAN = 1 << 30
SECONDS = 0.7  # of one measurement
BLOCKS = (1 << 20, 8 << 20)
DEPTHS = (8, 32)
KINDS = {"read": (True, False), "write": (False, True), "both": (True, True)}
CONTENDERS = ("io_uring", "io_uring, registered", "threads")
TARGET = 0.95


class Measured(NamedTuple):
    read: float  # bytes per second
    write: float
    processor: float  # seconds per 10^9 bytes; in the kernel mostly

    @property
    def total(self) -> float:
        return self.read + self.write


def fio(file: int, block: int, depth: int, kind: str, *, huge: bool = True) -> Measured:
    """What fio moves; reading and writing at once are two jobs, each with the queue depth."""
    env = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if huge else None  # transparent ones, from glibc 2.35 on
    command = ["fio", "--output-format=json", f"--filename=/proc/{os.getpid()}/fd/{file}", f"--size={SPAN // 2}", "--direct=1"]
    command += [
        "--ioengine=io_uring",
        f"--bs={block}",
        f"--iodepth={depth}",
        "--time_based",
        f"--runtime={round(SECONDS * 1000)}ms",
    ]
    for name, offset, wanted in zip(("read", "write"), (0, SPAN // 2), KINDS[kind], strict=True):
        command += [f"--name={name}", f"--rw={name}", f"--offset={offset}"] if wanted else []
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")
    jobs = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    read, write = (sum(job[name]["bw_bytes"] for job in jobs) for name in ("read", "write"))
    busy = sum((job["usr_cpu"] + job["sys_cpu"]) / 100 for job in jobs)
    return Measured(read, write, busy / (read + write) * 1e9)


def ours(disk: Disk, memory: tuple[Tensor, Tensor], kind: str) -> Measured:
    reads, writes = KINDS[kind]
    before = resource.getrusage(resource.RUSAGE_SELF)
    read, write = rates(disk, SECONDS, SPAN, memory[0] if reads else None, memory[1] if writes else None)
    after = resource.getrusage(resource.RUSAGE_SELF)
    busy = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return Measured(read, write, busy / SECONDS / (read + write) * 1e9)


def one_round(disks: dict[str, Disk], memory: tuple[Tensor, Tensor], block: int, depth: int, kind: str) -> list[Measured]:
    """fio, fio in small pages, the contenders, fio."""
    file = disks["io_uring"]._file
    found = [fio(file, block, depth, kind), fio(file, block, depth, kind, huge=False)]
    for name in CONTENDERS:
        disk = disks[name.split(",")[0]]
        if not disk.register(memory if "registered" in name else ()) and "registered" in name:
            print("  buffers cannot be registered: RLIMIT_MEMLOCK (ulimit -l) is too low")
        found.append(ours(disk, memory, kind))
    return [*found, fio(file, block, depth, kind)]


def measure(block: int, depth: int, rounds: int) -> dict[str, list[list[Measured]]]:
    """By kind, the rounds."""
    memory = aligned(block * depth), aligned(block * depth).random_()  # as much as fio has
    disks = {name: Disk(str(FOLDER), SPAN, block_nbytes=block, queue_depth=depth, engine=name) for name in ("io_uring", "threads")}
    try:
        for disk in disks.values():
            for at in range(0, SPAN, memory[1].numel()):
                disk.write([(at, memory[1][: SPAN - at])])
        found: dict[str, list[list[Measured]]] = {kind: [] for kind in KINDS}
        for _ in range(rounds):
            for kind, measured in found.items():
                measured.append(one_round(disks, memory, block, depth, kind))
                rate = ", ".join(f"{each.total / 1e9:.2f}" for each in measured[-1])
                print(f"  disk {block >> 20} MiB x {depth}, {kind}: {rate} GB/s", flush=True)
        return found
    finally:
        for disk in disks.values():
            disk.close()


def run(*, quick: bool) -> str:
    if shutil.which("fio") is None:
        sys.exit("the leg disk measures beside fio, which is not on the PATH: apt-get install fio")
    FOLDER.mkdir(exist_ok=True)
    rows, judged, noise = [], [], []
    for block in BLOCKS[: 1 if quick else None]:
        for depth in DEPTHS[: 1 if quick else None]:
            for kind, measured in measure(block, depth, 1 if quick else 3).items():
                columns = list(zip(*measured, strict=True))
                beside = [(first.total + last.total) / 2 for first, last in zip(columns[0], columns[-1], strict=True)]
                noise += [last.total / first.total for first, last in zip(columns[0], columns[-1], strict=True)]
                shares = [Spread.of([each.total / most for each, most in zip(c, beside, strict=True)]) for c in columns[1:-1]]
                busy = [Spread.of([each.processor for each in column]).median for column in columns[:-1]]
                access = f"{kind}, {block >> 20} MiB x {depth}"
                floor = Spread.of([each / 1e9 for each in beside]).show(2)
                rows.append([access, floor, *(each.show(2) for each in shares), " / ".join(f"{each:.2f}" for each in busy)])
                judged.append(verdict(f"{access}: io_uring over fio", shares[1].median, TARGET, at_least=True))
    others = ("fio, small pages", *CONTENDERS)
    head = ["access, block x depth", "fio, GB/s", *(f"{name}, of fio" for name in others), "processor s per GB, all five"]
    text = (
        f"Sums of reading and writing; O_DIRECT, a file of {SPAN >> 20} MiB, {SECONDS} s each, a queue of the given depth in each "
        f"direction, 2 threads each for the engine `threads`. fio against itself: {Spread.of(noise).show(2)}."
    )
    return "\n\n".join((host("fio with io_uring"), text, table(head, rows), verdicts(judged)))

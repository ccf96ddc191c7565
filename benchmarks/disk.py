"""The leg `disk`: the disk layer and fio with the same block size, queue depth and kind of access, in turns.

The floor is the device as fio finds it in that minute. Each round is fio with its memory in huge pages as ours is, fio in small
pages, its default, ours on each engine, and fio in huge pages again; ours is a share of the mean of the two around it, and the
one over the other is the noise. Every byte of the files has been written before; fio uses our io_uring engine's file.

Concurrent reads and writes are judged by the time until as many bytes have been read as written: a shared device favors one
direction at the other's cost, and an optimizer's step waits for the slower one.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import time
from typing import NamedTuple

from torch import Tensor

from benchmarks import worker
from benchmarks.legs import Options
from benchmarks.report import Spread, table, verdict, verdicts
from benchmarks.worker import ROOT
from slipstream.ops.disk import Disk, aligned

FOLDER = ROOT / "runs"
SPAN = 768 << 20  # the file; as much is read, written, or both
BLOCKS = (1 << 20, 8 << 20)
DEPTHS = (8, 32)
KINDS = {"read": (True, False), "write": (False, True), "both": (True, True)}
CONTENDERS = ("io_uring", "threads")
TARGET = 0.95


class Measured(NamedTuple):
    rate: float  # 10^9 bytes per second, of both directions together
    processor: float  # seconds per 10^9 bytes; in the kernel mostly


def fio(file: int, block: int, depth: int, kind: str, *, huge: bool = True) -> Measured:
    """Reading and writing at once are two jobs, each with the queue depth."""
    command = ["fio", "--output-format=json", f"--filename=/proc/{os.getpid()}/fd/{file}", f"--io_size={SPAN}", "--direct=1"]
    command += ["--ioengine=io_uring", f"--bs={block}", f"--iodepth={depth}"]
    env = {}
    if huge:  # transparent ones, from glibc 2.35 on; --mem=shmhuge needs reserved pages
        command += [f"--iomem_align={2 << 20}"]
        env["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    for name, offset, wanted in zip(("read", "write"), (0, SPAN // 2), KINDS[kind], strict=True):
        command += [f"--name={name}", f"--rw={name}", f"--offset={offset}", f"--size={SPAN - offset}"] if wanted else []
    out = worker.run(command, env=env)
    jobs = json.loads(out[out.index("{") :])["jobs"]
    if (moved := sum(job[name]["io_bytes"] for job in jobs for name in ("read", "write"))) != SPAN * len(jobs):
        raise RuntimeError(f"{' '.join(command)} moved {moved} bytes, not {SPAN * len(jobs)}")
    busy = sum((job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3 for job in jobs)
    return Measured(moved / 1e6 / max(job["job_runtime"] for job in jobs), busy / moved * 1e9)


def ours(disk: Disk, memory: tuple[Tensor, Tensor], kind: str) -> Measured:
    chunk = memory[0].numel()
    starts = [range(0, SPAN, chunk), (*range(SPAN // 2, SPAN, chunk), *range(0, SPAN // 2, chunk))]
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    under_way = [
        move([(at, each) for at in order])
        for move, each, order, wanted in zip((disk.read, disk.write), memory, starts, KINDS[kind], strict=True)
        if wanted
    ]
    for transfer in under_way:
        transfer.wait()
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    busy, moved = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, SPAN * len(under_way)
    return Measured(moved / seconds / 1e9, busy / moved * 1e9)


def one_round(disks: dict[str, Disk], memory: tuple[Tensor, Tensor], block: int, depth: int, kind: str) -> list[Measured]:
    """fio, fio in small pages, the contenders, fio."""
    file = disks["io_uring"]._file
    results = [fio(file, block, depth, kind), fio(file, block, depth, kind, huge=False)]
    for name in CONTENDERS:
        results.append(ours(disks[name], memory, kind))
    return [*results, fio(file, block, depth, kind)]


def measure(block: int, depth: int, rounds: int) -> dict[str, list[list[Measured]]]:
    """By kind, the rounds."""
    size = min(block * depth, SPAN // 6)  # as much as fio has, and it divides half the span
    memory = aligned(size), aligned(size).random_()
    disks = {name: Disk(str(FOLDER), SPAN, block_nbytes=block, queue_depth=depth, engine=name) for name in ("io_uring", "threads")}
    try:
        for disk in disks.values():
            ours(disk, memory, "write")  # a first pass is slower
        results: dict[str, list[list[Measured]]] = {kind: [] for kind in KINDS}
        for _ in range(rounds):
            for kind, measured in results.items():
                measured.append(one_round(disks, memory, block, depth, kind))
                rate = ", ".join(f"{each.rate:.2f}" for each in measured[-1])
                print(f"  disk {block >> 20} MiB x {depth}, {kind}: {rate} GB/s", flush=True)
        return results
    finally:
        for disk in disks.values():
            disk.close()


def run(options: Options) -> str:
    quick = options.quick
    if shutil.which("fio") is None:
        raise RuntimeError("the leg `disk` needs fio: apt-get install fio")
    FOLDER.mkdir(exist_ok=True)
    rows, judged, noise = [], [], []
    for block in BLOCKS[: 1 if quick else None]:
        for depth in DEPTHS[: 1 if quick else None]:
            for kind, measured in measure(block, depth, options.num_rounds(3)).items():
                columns = list(zip(*measured, strict=True))
                around = [(first.rate + last.rate) / 2 for first, last in zip(columns[0], columns[-1], strict=True)]
                noise += [last.rate / first.rate for first, last in zip(columns[0], columns[-1], strict=True)]
                shares = [Spread.of([each.rate / most for each, most in zip(c, around, strict=True)]) for c in columns[1:-1]]
                busy = [Spread.of([each.processor for each in column]).median for column in columns[:-1]]
                access = f"{kind}, {block >> 20} MiB x {depth}"
                floor = Spread.of(around).show(2)
                rows.append([access, floor, *(each.show(2) for each in shares), " / ".join(f"{each:.2f}" for each in busy)])
                judged.append(verdict(f"{access}: io_uring over fio", shares[1].median, TARGET, at_least=True))
    others = ("fio, small pages", *CONTENDERS)
    head = ["access, block x depth", "fio, GB/s", *(f"{name}, of fio" for name in others), "processor s per GB, all four"]
    text = (
        f"O_DIRECT, a file of {SPAN >> 20} MiB read, written, or both until both are done (the rate is of their sum), a queue of "
        "the given depth in each direction, 2 threads each for the engine `threads`. fio against itself: "
        f"{Spread.of(noise).show(2)}."
    )
    return "\n\n".join((text, table(head, rows), verdicts(judged)))

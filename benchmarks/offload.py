"""The leg `offload`: a step with states on disk, over the floor that compute and the disk leave it, over a resident step, and
beside DeepSpeed's.

The floor is the larger of two times: forward and backward by plain torch, and the step's bytes at the rate of reads and writes that
run together through the same disk layer (which leg `disk` holds against fio), measured in the same minute. Each contender is a
process of its own; they are alive together and take turns of some steps. Disk traffic is direct, so that no page cache serves it,
and the peak is the kernel's own mark of the process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.peers import Peers
from benchmarks.ranks import ROOT, free_port
from benchmarks.report import Spread, host, table, verdict, verdicts
from benchmarks.workloads import Workload, build_batch, build_model
from slipstream.ops.disk import Disk, aligned, rates

GPT = Workload(name="offload", width=1024, depth=14, heads=16, vocab=12288, batch=1, length=128)
SMALL = Workload(name="offload", width=512, depth=6, heads=8, vocab=4096, batch=1, length=128)
TIMED = 2  # steps in a row
BUDGET = 1.5e9  # bytes beyond a process with torch imported
_PROBE = 256 << 20
CLIPPING = 100.0  # a norm that gradients never reach: the verdict comes after their norm all the same
_COMPARED = 3  # losses: one batch again and again soon tells apart what rounds differently
_LOSS_GAP = 1e-2  # relative, bf16 (performance.md 4.1)


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    system: str
    zero: dict[str, Any]
    optimizer_on_disk: bool = False
    weights_on_disk: bool = False
    ahead: bool = False  # updates begin in the backward

    def disk_bytes(self, micros: int) -> int:
        """Per parameter and step, read and written. Gradients are bf16, or fp32 where micro-batches add up."""
        moved = 24 if self.optimizer_on_disk else 0  # master and two moments, there and back
        if self.weights_on_disk:
            gradient = 2 if micros == 1 else 4
            moved += 2 * 2 * micros + 2 + gradient * 2 * micros  # weights for each pass, new ones; gradients added to, and stepped
        return moved


RESIDENT, OPTIMIZER, EVERYTHING = "resident", "optimizer on disk", "everything on disk"
AHEAD = "optimizer on disk, updates ahead"
THEIRS = "DeepSpeed, "


def contenders(folder: str, micros: int, *, deepspeed: bool) -> list[Contender]:
    disk = {"device": "nvme", "nvme_path": folder}
    everything = {"stage": 3, "offload_optimizer": disk, "offload_param": disk | {"max_in_cpu": 0}}
    found = [
        Contender(RESIDENT, "slipstream", {"stage": 3}),
        Contender(OPTIMIZER, "slipstream", {"stage": 3, "offload_optimizer": disk}, optimizer_on_disk=True),
        Contender(AHEAD, "slipstream", {"stage": 3, "offload_optimizer": disk}, optimizer_on_disk=True, ahead=True),
        Contender(EVERYTHING, "slipstream", everything, optimizer_on_disk=True, weights_on_disk=True),
    ]
    if deepspeed and micros == 1:
        ahead = {"pin_memory": False, "buffer_count": 16, "pipeline_read": True, "pipeline_write": True}
        theirs = {"stage": 3, "sub_group_size": 1 << 24, "offload_optimizer": disk | ahead}
        weights = disk | {"pin_memory": False, "buffer_count": 5, "buffer_size": 1 << 25}
        found += [
            Contender(THEIRS + OPTIMIZER, "deepspeed", theirs, optimizer_on_disk=True),
            Contender(THEIRS + EVERYTHING, "deepspeed", theirs | {"offload_param": weights}, True, True),
        ]
    return found


class Running:
    """A contender's process."""

    def __init__(self, contender: Contender, work: Workload, micros: int, peers: Peers, weights: str) -> None:
        self.contender = contender
        python = peers.python if contender.system == "deepspeed" else sys.executable
        zero, sizes = json.dumps(contender.zero), json.dumps(dataclasses.asdict(work))
        arguments = [contender.system, str(micros), str(CLIPPING), str(int(contender.ahead)), zero, sizes, weights]
        ranks = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        env = os.environ | {name: str(value) for name, value in ranks.items()} | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        if contender.system == "deepspeed":
            env |= peers.environment() | {"DS_ACCELERATOR": "cpu"}
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # as long as the process
        self.process = subprocess.Popen(
            [str(python), "-m", "benchmarks.offload_contender", *arguments],
            cwd=ROOT,
            env=env,
            text=True,
            bufsize=1,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
        )
        self._expect()

    def _expect(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@"):
                return line[1:]
        self.log.seek(0)
        last = (self.log.read().strip().splitlines() or ["no word"])[-1]
        raise RuntimeError(f"{self.contender.name}: {last}")

    def steps(self, count: int) -> tuple[float, list[float]]:
        """Seconds of one, and the losses."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{count}\n")
        answer = json.loads(self._expect())
        return answer["seconds"] / count, answer["losses"]

    def peak(self) -> int:
        """Bytes at most so far."""
        return high_water_mark(Path(f"/proc/{self.process.pid}/status").read_text())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


@dataclass(slots=True)
class Series:
    seconds: list[float] = field(default_factory=list)
    floors: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak: int = 0
    trouble: str = ""


def plain(work: Workload, batch: Any) -> Callable[[], float]:
    """Seconds of a forward and backward, in bf16, by torch alone."""
    model = build_model(work).bfloat16()

    def run() -> float:
        start = time.perf_counter()
        model(*batch).backward()
        taken = time.perf_counter() - start
        model.zero_grad()
        return taken

    return run


def disk_rates(folder: str) -> tuple[float, float]:
    """(read, written) bytes per second, together."""
    disk = Disk(folder, _PROBE)
    source, target = aligned(8 << 20), aligned(8 << 20)
    source.random_(generator=torch.Generator().manual_seed(0))
    for at in range(0, _PROBE, source.numel()):
        disk.write([(at, source)]).wait()
    found = rates(disk, 1.0, _PROBE, target, source)
    disk.close()
    return found


@contextlib.contextmanager
def started(
    found: list[Contender], work: Workload, micros: int, peers: Peers, series: dict[str, Series], weights: str
) -> Iterator[list[Running]]:
    """The processes of those that start."""
    with contextlib.ExitStack() as stack:
        running = []
        for each in found:
            try:
                running.append(Running(each, work, micros, peers, weights))
                stack.callback(running[-1].close)
            except RuntimeError as error:
                series[each.name].trouble = str(error)
                print(error, flush=True)
        yield running


def measure(work: Workload, micros: int, peers: Peers, folder: str, rounds: int) -> tuple[dict[str, Series], list[float]]:
    """Every contender's turns, and the disk's rates."""
    found = contenders(folder, micros, deepspeed=peers.python is not None)
    series = {each.name: Series() for each in found}
    compute, speeds = plain(work, build_batch(work, 0)), []
    compute()
    with started(found, work, micros, peers, series, folder) as running:
        disk_rates(folder)  # a first look, while the last contender settles down
        compute()
        for turn in range(rounds):
            read_rate, write_rate = disk_rates(folder)
            speeds.append(read_rate + write_rate)
            alone = micros * compute()
            for one in running if turn % 2 == 0 else reversed(running):
                mine = series[one.contender.name]
                if mine.trouble:
                    continue
                try:
                    seconds, losses = one.steps(TIMED)
                except RuntimeError as error:
                    mine.trouble = str(error)
                    print(error, flush=True)
                    continue
                mine.seconds.append(seconds)
                mine.losses += losses
                moved = one.contender.disk_bytes(micros) * work.num_params
                mine.floors.append(max(alone, moved / (read_rate + write_rate)))
                mine.peak = one.peak()
                print(f"  {micros} x {one.contender.name}: {seconds:.2f} s, floor {mine.floors[-1]:.2f} s", flush=True)
    reference = series[RESIDENT].losses
    for each in found:
        mine = series[each.name]
        gap = max((abs(a - b) / b for a, b in zip(mine.losses[:_COMPARED], reference, strict=False)), default=0.0)
        if not mine.trouble and gap > _LOSS_GAP:
            mine.trouble = f"void: its losses differ from the resident run's by {gap:.1e}"
    return series, speeds


def over(above: list[float], below: list[float]) -> Spread:
    return Spread.of([a / b for a, b in zip(above, below, strict=True)])


def torch_alone() -> int:
    """Bytes that a process with torch imported takes."""
    code = "import torch; print(open('/proc/self/status').read())"
    return high_water_mark(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def high_water_mark(status: str) -> int:
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def run(peers: Peers, *, quick: bool) -> str:
    work, rounds = (SMALL, 1) if quick else (GPT, 2)
    rows, judged, speeds = [], [], []
    base = torch_alone()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        save_file(build_model(work).state_dict(), Path(folder) / "model.safetensors")
        for micros in (1, 8):
            series, seen = measure(work, micros, peers, folder, rounds if micros == 1 else 1)
            speeds += seen
            for name, mine in series.items():
                if mine.trouble or not mine.seconds:
                    rows.append([name, str(micros), mine.trouble, "", "", "", ""])
                    continue
                rows.append(
                    [
                        name,
                        str(micros),
                        Spread.of(mine.seconds).show(),
                        Spread.of(mine.floors).show(),
                        over(mine.seconds, mine.floors).show(),
                        over(mine.seconds, series[RESIDENT].seconds).show(),
                        f"{(mine.peak - base) / 1e9:.2f}",
                    ]
                )
            judged += targets(series, micros, base)
    return "\n\n".join(
        (
            host(f"{torch.get_num_threads()} threads; " + (f"deepspeed {peers.deepspeed}" if peers.python else peers.missing)),
            f"A step of a {work.describe()}, bf16, one rank, with clipping; ours reads its first weights unit by unit, DeepSpeed's "
            f"model is built in fp32 ({work.num_params * 4 / 1e9:.2f} GB), which is in its peak. Disk: "
            f"{Spread.of([speed / 1e9 for speed in speeds]).show()} GB/s read and written together.",
            table(
                ["states", "micro-batches", "step, s", "floor, s", "over the floor", "over resident", "peak above torch, GB"], rows
            ),
            verdicts(judged),
        )
    )


def targets(series: dict[str, Series], micros: int, base: int) -> list[list[str]]:
    """The rows of the issue's target table that this run can judge."""
    rows = []
    good = {name: mine for name, mine in series.items() if mine.seconds and not mine.trouble}
    for name in (OPTIMIZER, AHEAD, EVERYTHING):
        if name not in good:
            continue
        mine, what = good[name], f"{name}, {micros} micro-batch{'es' if micros > 1 else ''}"
        rows.append(verdict(f"{what}: over the floor", over(mine.seconds, mine.floors).median, 1.25))
        if micros == 1:
            rows.append(verdict(f"{what}: peak over 1.5 GB", (mine.peak - base) / BUDGET, 1.0))
        if THEIRS + name in good:
            ratio = over(good[THEIRS + name].seconds, mine.seconds).median
            rows.append(verdict(f"{what}: faster than DeepSpeed's", ratio, 1.5, at_least=True))
        if micros == 8 and RESIDENT in good:
            rows.append(verdict(f"{what}: over resident", over(mine.seconds, good[RESIDENT].seconds).median, 1.10))
    return rows

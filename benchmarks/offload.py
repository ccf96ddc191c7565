"""The legs `offload` and `accumulation`: a step with states on disk, over the floor of compute and disk, over a resident step,
and DeepSpeed's.

The floor is the larger of two times: forward and backward by plain torch, and the step's bytes at the rate of concurrent reads
and writes through the same disk layer (which the leg `disk` compares with fio), measured in the same minute. The contenders are
alive together and take turns of some steps. Disk traffic is direct, so that the page cache serves none of it, and the peak is the
kernel's own mark of the process.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks import worker
from benchmarks.legs import Options
from benchmarks.peers import Peers, prepare
from benchmarks.ranks import free_port, rank_env
from benchmarks.report import Spread, table, verdict, verdicts
from benchmarks.worker import ROOT, Failed, Worker
from benchmarks.workloads import Workload, build_batch, build_model
from slipstream.ops.disk import Disk, aligned, rates

FOLDER = ROOT / "runs"
GPT = Workload(name="offload", width=1024, depth=14, heads=16, vocab=12288, batch=1, length=128)
SMALL = Workload(name="offload", width=512, depth=6, heads=8, vocab=4096, batch=1, length=128)
TIMED = 2  # steps in a row
BUDGET = 1.5e9  # bytes beyond a process with torch imported
_PROBE = 256 << 20
_COMPARED = 3  # losses: on one batch, rounding soon makes later ones differ
_LOSS_GAP = 1e-2  # relative, bf16


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    system: str
    zero: dict[str, Any]
    optimizer_on_disk: bool = False
    weights_on_disk: bool = False

    def disk_bytes(self, micros: int) -> int:
        """Per parameter and step, read and written. Gradients are bf16, or fp32 if micro-batches accumulate."""
        moved = 24 if self.optimizer_on_disk else 0  # master and two moments, there and back
        if self.weights_on_disk:
            gradient = 2 if micros == 1 else 4
            moved += 2 * 2 * micros + 2 + gradient * 2 * micros  # weights for each pass, new ones; gradients added to, and stepped
        return moved


RESIDENT, OPTIMIZER, EVERYTHING = "resident", "optimizer on disk", "everything on disk"
THEIRS = "DeepSpeed, "


def contenders(folder: str, *, deepspeed: bool) -> list[Contender]:
    disk = {"device": "nvme", "nvme_path": folder}
    everything = {"stage": 3, "offload_optimizer": disk, "offload_param": disk | {"max_in_cpu": 0}}
    results = [
        Contender(RESIDENT, "slipstream", {"stage": 3}),
        Contender(OPTIMIZER, "slipstream", {"stage": 3, "offload_optimizer": disk}, optimizer_on_disk=True),
        Contender(EVERYTHING, "slipstream", everything, optimizer_on_disk=True, weights_on_disk=True),
    ]
    if deepspeed:
        ahead = {"pin_memory": False, "buffer_count": 16, "pipeline_read": True, "pipeline_write": True}
        settings = {"stage": 3, "sub_group_size": 1 << 24, "offload_optimizer": disk | ahead}
        results.append(Contender(THEIRS + OPTIMIZER, "deepspeed", settings, optimizer_on_disk=True))
    return results


def launch(contender: Contender, work: Workload, micros: int, peers: Peers, weights: str) -> Worker:
    is_peer = contender.system == "deepspeed"
    arguments = {
        "system": contender.system,
        "work": dataclasses.asdict(work),
        "micros": micros,
        "zero": contender.zero,
        "weights": weights,
    }
    env = rank_env(0, 1, free_port()) | {"OMP_NUM_THREADS": str(torch.get_num_threads())} | (peers.env() if is_peer else {})
    python = peers.python if is_peer else None
    return Worker("benchmarks.offload_contender:train", arguments, name=contender.name, python=python, env=env)


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

    def seconds() -> float:
        start = time.perf_counter()
        model(*batch).backward()
        took = time.perf_counter() - start
        model.zero_grad()
        return took

    return seconds


def disk_rates(folder: str) -> tuple[float, float]:
    """(read, written) bytes per second, of both at once."""
    disk = Disk(folder, _PROBE)
    source, target = aligned(8 << 20), aligned(8 << 20)
    source.random_(generator=torch.Generator().manual_seed(0))
    for at in range(0, _PROBE, source.numel()):
        disk.write([(at, source)]).wait()
    results = rates(disk, 1.0, _PROBE, target, source)
    disk.close()
    return results


def measure(
    work: Workload, micros: int, peers: Peers, folder: str, rounds: int, usual: bool
) -> tuple[dict[str, Series], list[float]]:
    """Every contender's turns, and the disk's rates. `usual`: without DeepSpeed."""
    results = contenders(folder, deepspeed=peers.python is not None and not usual)
    series = {each.name: Series() for each in results}
    compute, speeds = plain(work, build_batch(work, 0)), []
    compute()
    with ExitStack() as stack:
        running: dict[str, Worker] = {}
        for each in results:
            try:
                one = stack.enter_context(launch(each, work, micros, peers, folder))
                one.ready()
                running[each.name] = one
            except Failed as error:
                series[each.name].trouble = error.reason
                print(error, flush=True)
        disk_rates(folder)  # not counted: the last contender may still be busy
        compute()
        for turn in range(rounds):
            read_rate, write_rate = disk_rates(folder)
            speeds.append(read_rate + write_rate)
            alone = micros * compute()
            for each in results if turn % 2 == 0 else reversed(results):
                record = series[each.name]
                if record.trouble:
                    continue
                try:
                    reply = running[each.name].call("steps", count=TIMED if micros == 1 else 1)
                except Failed as error:
                    record.trouble = error.reason
                    print(error, flush=True)
                    continue
                record.seconds.append(reply["seconds"])
                record.losses += reply["losses"]
                moved = each.disk_bytes(micros) * work.num_params
                record.floors.append(max(alone, moved / (read_rate + write_rate)))
                record.peak = high_water_mark(Path(f"/proc/{running[each.name].pid}/status").read_text())
                print(f"  {micros} x {each.name}: {record.seconds[-1]:.2f} s, floor {record.floors[-1]:.2f} s", flush=True)
    reference = series[RESIDENT].losses
    for record in series.values():
        gap = max((abs(a - b) / b for a, b in zip(record.losses[:_COMPARED], reference, strict=False)), default=0.0)
        if not record.trouble and gap > _LOSS_GAP:
            record.trouble = f"void: its losses differ from the resident run's by {gap:.1e}"
    return series, speeds


def torch_alone() -> int:
    """Bytes of a process that has imported torch."""
    return high_water_mark(worker.run([sys.executable, "-c", "import torch; print(open('/proc/self/status').read())"]))


def high_water_mark(status: str) -> int:
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def run(options: Options, *, micros: int, rounds: int) -> str:
    peers, work = prepare(options.peers), SMALL if options.quick else GPT
    rows, base = [], torch_alone()
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        save_file(build_model(work).state_dict(), Path(folder) / "model.safetensors")
        series, speeds = measure(work, micros, peers, folder, options.num_rounds(rounds), usual=micros > 1)
    resident = series[RESIDENT].seconds
    for name, record in series.items():
        if record.trouble or not record.seconds:
            rows.append([name, record.trouble])
            continue
        times = [Spread.of(record.seconds), Spread.of(record.floors), Spread.ratio(record.seconds, record.floors)]
        over = Spread.ratio(record.seconds, resident).show() if len(resident) == len(record.seconds) else ""
        rows.append([name, *(each.show() for each in times), over, f"{(record.peak - base) / 1e9:.2f}"])
    who = f"{torch.get_num_threads()} threads; {peers}" if micros == 1 else f"{torch.get_num_threads()} threads"
    return "\n\n".join(
        (
            f"A step of {micros} micro-batch{'es' if micros > 1 else ''} of a {work.describe()}, bf16, one rank, with clipping. "
            f"Ours reads its first weights unit by unit; DeepSpeed's model is built in fp32 ({work.num_params * 4 / 1e9:.2f} GB), "
            f"which is in its peak. Disk: {Spread.of([speed / 1e9 for speed in speeds]).show()} GB/s, read and written. {who}.",
            table(["states", "step, s", "floor, s", "over the floor", "over resident", "peak above torch, GB"], rows),
            verdicts(targets(series, micros, base)),
        )
    )


def targets(series: dict[str, Series], micros: int, base: int) -> list[list[str]]:
    """The target rows that this run can judge."""
    rows = []
    good = {name: record for name, record in series.items() if record.seconds and not record.trouble}
    for name in (OPTIMIZER, EVERYTHING):
        if name not in good:
            continue
        record, what = good[name], f"{name}, {micros} micro-batch{'es' if micros > 1 else ''}"
        rows.append(verdict(f"{what}: over the floor", Spread.ratio(record.seconds, record.floors).median, 1.25))
        if micros == 1:
            rows.append(verdict(f"{what}: peak over 1.5 GB", (record.peak - base) / BUDGET, 1.0))
        if THEIRS + name in good:
            ratio = Spread.ratio(good[THEIRS + name].seconds, record.seconds).median
            rows.append(verdict(f"{what}: faster than DeepSpeed's", ratio, 1.5, at_least=True))
        if micros > 1 and RESIDENT in good:
            rows.append(verdict(f"{what}: over resident", Spread.ratio(record.seconds, good[RESIDENT].seconds).median, 1.10))
    return rows

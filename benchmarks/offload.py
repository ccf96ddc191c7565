"""The leg `offload`: a step with states on disk, over the floor that compute and the disk leave it, and over a resident step.

The floor is the larger of two times: forward and backward by plain torch, and the step's bytes at the rate of reads and writes that
run together through the same disk layer (which leg `disk` holds against fio), measured in the same minute. A step is timed in the
middle of several of one contender, because its optimizer streams beside the next forward; contenders take turns.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import slipstream
from benchmarks.report import Spread, host, table, verdict, verdicts
from benchmarks.workloads import BETAS, CLIPPING, EPS, LEARNING_RATE, WEIGHT_DECAY, Workload, build_batch, build_model
from slipstream.ops.disk import Disk, aligned, rates

GPT = Workload(name="offload", width=1024, depth=14, heads=16, vocab=12288, batch=1, length=128)
SMALL = Workload(name="offload", width=512, depth=6, heads=8, vocab=4096, batch=1, length=128)
TIMED = 2  # steps in a row
_PROBE = 256 << 20


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    zero: dict[str, Any]
    optimizer_on_disk: bool = False
    weights_on_disk: bool = False

    def disk_bytes(self, micros: int) -> int:
        """Per parameter and step, read and written. Gradients are bf16, or fp32 where micro-batches add up."""
        moved = 24 if self.optimizer_on_disk else 0  # master and two moments, there and back
        if self.weights_on_disk:
            gradient = 2 if micros == 1 else 4
            moved += 2 * 2 * micros + 2 + gradient * 2 * micros  # weights for each pass, new ones; gradients added to, and stepped
        return moved


def contenders(folder: str) -> list[Contender]:
    disk = {"device": "nvme", "nvme_path": folder}
    everything = {"stage": 3, "offload_optimizer": disk, "offload_param": disk | {"max_in_cpu": 0}}
    return [
        Contender("resident", {"stage": 3}),
        Contender("optimizer on disk", {"stage": 3, "offload_optimizer": disk}, optimizer_on_disk=True),
        Contender("everything on disk", everything, optimizer_on_disk=True, weights_on_disk=True),
    ]


def engine_of(work: Workload, contender: Contender, micros: int) -> Any:
    params = {"lr": LEARNING_RATE, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
    config = {
        "train_micro_batch_size_per_gpu": work.batch, "gradient_accumulation_steps": micros, "gradient_clipping": CLIPPING,
        "bf16": {"enabled": True}, "zero_optimization": contender.zero, "optimizer": {"type": "AdamW", "params": params},
    }  # fmt: skip
    return slipstream.initialize(model=build_model(work), config=config)[0]


def seconds_of(engine: Any, batch: Any, micros: int) -> float:
    """Of one step, in the middle of several."""

    def step() -> None:
        for _ in range(micros):
            engine.backward(engine(*batch))
            engine.step()

    step()
    start = time.perf_counter()
    for _ in range(TIMED):
        step()
    taken = (time.perf_counter() - start) / TIMED
    engine.updater.finish()
    return taken


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


def run(*, quick: bool) -> str:
    work, rounds = (SMALL, 1) if quick else (GPT, 2)
    batch = build_batch(work, 0)
    rows, judged = [], []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        for micros in (1, 8):
            names = contenders(folder)
            engines = {contender.name: engine_of(work, contender, micros) for contender in names}
            compute, took, floors = plain(work, batch), {each.name: [] for each in names}, {each.name: [] for each in names}
            compute()
            speeds = []
            for _ in range(rounds):
                read_rate, write_rate = disk_rates(folder)
                speeds.append(read_rate + write_rate)
                alone = micros * compute()
                for each in names:
                    took[each.name].append(seconds_of(engines[each.name], batch, micros))
                    moved = each.disk_bytes(micros) * work.num_params
                    floors[each.name].append(max(alone, moved / (read_rate + write_rate)))
            for each in names:
                over = Spread.of([a / b for a, b in zip(took[each.name], floors[each.name], strict=True)])
                beside = Spread.of([a / b for a, b in zip(took[each.name], took["resident"], strict=True)])
                rows.append([
                    each.name, str(micros), Spread.of(took[each.name]).show(), Spread.of(floors[each.name]).show(), over.show(),
                    beside.show(),
                ])  # fmt: skip
                if each.name == "optimizer on disk":
                    judged.append(verdict(f"optimizer on disk, {micros} micro-batches: over the floor", over.median, 1.25))
                    if micros == 8:
                        judged.append(verdict("optimizer on disk, 8 micro-batches: over resident", beside.median, 1.10))
            for engine in engines.values():
                engine.destroy()
    return "\n\n".join(
        (
            host(f"{torch.get_num_threads()} threads"),
            f"A step of a {work.describe()}, bf16, one rank, clipping at {CLIPPING}. Disk: "
            f"{Spread.of([speed / 1e9 for speed in speeds]).show()} GB/s read and written together.",
            table(["states", "micro-batches", "step, s", "floor, s", "over the floor", "over resident"], rows),
            verdicts(judged),
        )
    )

"""A contender of the leg `save`, in the interpreter of Slipstream or of DeepSpeed: torch.save, or an engine that saves."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from benchmarks.worker import Channel

STEPS = 5  # before a save, and after it


def engine_of(kind: str, width: int, depth: int) -> Any:
    """Master weights and two moments in fp32. The engine that trains during saves has fp32 weights: bf16 is slow on most hosts."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": kind != "asynchronous"},
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    if kind == "deepspeed":
        import deepspeed

        return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    import slipstream

    if kind == "asynchronous":
        config["checkpoint"] = {"writer": {"decoupled": True}}
    return slipstream.initialize(model=model, config=config)[0]


def step(engine: Any, x: torch.Tensor) -> float:
    """Seconds."""
    start = time.perf_counter()
    engine.backward(engine(x).float().square().mean())
    engine.step()
    return time.perf_counter() - start


def sync(folder: Path) -> int:
    """Write all files through to the disk. Returns their bytes."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    return sum(path.stat().st_size for path in paths)


def save(kind: str, held: Any, folder: Path) -> dict[str, float]:
    """Seconds until the call returns, and until all is on disk; for ours both are the same."""
    start = time.perf_counter()
    if kind == "torch":
        folder.mkdir()
        torch.save(held, folder / "state.pt")
    else:
        held.save_checkpoint(str(folder))
    called = time.perf_counter() - start
    nbytes = sync(folder)
    return {"call": called, "disk": time.perf_counter() - start, "nbytes": nbytes}


def asynchronous(engine: Any, folder: Path, x: torch.Tensor, nbytes: int) -> dict[str, float]:
    """The time that an asynchronous save takes from training, and its floor: a bare copy of as many bytes while training waits, and
    their way to the disk from memory that is allocated already, while training goes on."""
    from slipstream.ops.disk import ALIGNMENT, Disk, aligned

    def steps() -> list[float]:
        return [step(engine, x) for _ in range(STEPS)]

    def until(done: Callable[[], bool]) -> list[float]:
        during = []
        while not done():
            during.append(step(engine, x))
        return during

    before = steps()
    start, clock = time.perf_counter(), time.time()
    engine.save_checkpoint(str(folder))
    called = time.perf_counter() - start
    during = until((folder / "latest").exists)
    on_disk = (folder / "latest").stat().st_ctime - clock  # its last rename
    engine.finish_save()
    after = steps()
    usual = statistics.median(before + after)
    taken = called + sum(during) - usual * len(during)

    nbytes = nbytes // 8 // ALIGNMENT * ALIGNMENT  # an eighth at a time
    source, target = (aligned(nbytes).fill_(1) for _ in range(2))
    start = time.perf_counter()
    for _ in range(8):
        target.copy_(source)
    copy = time.perf_counter() - start
    os.sync()
    disk = Disk(str(folder), 8 * nbytes, block_nbytes=4 << 20)
    try:
        during = until(disk.write([(at * nbytes, source) for at in range(8)]).done)
    finally:
        disk.close()
    written = sum(during) - statistics.median(after + steps()) * len(during)
    return {"call": called, "disk": on_disk, "taken": taken, "step": usual, "copy": copy, "written": written}


def pretrained(engine: Any, folder: Path) -> dict[str, float]:
    """Host memory of save_pretrained beyond what the process had, as the kernel counts it, and a unit's in fp32."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    engine.save_pretrained(str(folder), dtype="bf16")
    units = [sum(param.numel() for param in layer.parameters()) for layer in engine.module]
    return {"peak": _status("VmHWM") - before, "unit": 4 * max(units)}


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def hold(channel: Channel, kind: str, folder: str, width: int, depth: int) -> None:
    """`kind`: slipstream, asynchronous, torch or deepspeed."""
    target = Path(folder)
    if kind == "torch":
        held: Any = {f"{i}": torch.randn(width * width + width) for i in range(3 * depth)}
    else:
        held = engine_of(kind, width, depth)
        x = torch.randn(1, width).to(torch.float32 if kind == "asynchronous" else torch.bfloat16)
        step(held, x)

    def in_new_folder(measure: Callable[[], dict[str, float]]) -> dict[str, float]:
        shutil.rmtree(target, ignore_errors=True)
        os.sync()
        measured = measure()
        shutil.rmtree(target, ignore_errors=True)
        return measured

    def one() -> dict[str, float]:
        if kind == "asynchronous":
            return asynchronous(held, target, x, 12 * (width * width + width) * depth)
        return save(kind, held, target)

    channel.serve({"save": lambda: in_new_folder(one), "pretrained": lambda: in_new_folder(lambda: pretrained(held, target))})

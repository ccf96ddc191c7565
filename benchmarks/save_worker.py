"""One contender of the leg `save`: a line in, something saved or trained, a line of JSON out. DeepSpeed's runs in its environment.

python save_worker.py slipstream|behind|torch|deepspeed FOLDER WIDTH DEPTH
"""

import json
import os
import shutil
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

STEPS = 5  # without a save, before one and after it


def engine_of(kind: str, width: int, depth: int) -> Any:
    """Master weights and two moments in fp32. Where training goes on it is in fp32 altogether: bf16 would be slow on most hosts."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": kind != "behind"},
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    if kind == "deepspeed":
        import deepspeed

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    import slipstream

    if kind == "behind":
        config["checkpoint"] = {"writer": {"decoupled": True}}
    return slipstream.initialize(model=model, config=config)[0]


def step(engine: Any, x: torch.Tensor) -> float:
    """Seconds of it."""
    start = time.perf_counter()
    engine.backward(engine(x).float().square().mean())
    engine.step()
    return time.perf_counter() - start


def sync(folder: Path) -> int:
    """Put the files on disk, all of them, and say how many bytes they have."""
    nbytes = 0
    for path in (path for path in folder.rglob("*") if path.is_file()):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        nbytes += path.stat().st_size
    return nbytes


def save(kind: str, held: Any, folder: Path) -> dict[str, float]:
    """Seconds until the call returns, and until all is on disk: for ours that is the same (the sync behind it finds nothing)."""
    start = time.perf_counter()
    if kind == "torch":
        folder.mkdir()
        torch.save(held, folder / "state.pt")
    else:
        held.save_checkpoint(str(folder))
    called = time.perf_counter() - start
    nbytes = sync(folder)
    return {"call": called, "disk": time.perf_counter() - start, "nbytes": nbytes}


def behind(engine: Any, folder: Path, x: torch.Tensor, nbytes: int) -> dict[str, float]:
    """What a save takes from the training that goes on meanwhile, beside what it cannot do without: a bare copy of as many bytes
    while training waits, and their way to the disk from memory that is there, while training goes on."""
    from slipstream.ops.disk import ALIGNMENT, Disk, aligned

    def steps() -> list[float]:
        return [step(engine, x) for _ in range(STEPS)]

    def until(ended: Callable[[], bool]) -> list[float]:
        during = []
        while not ended():
            during.append(step(engine, x))
        return during

    before = steps()
    start, clock = time.perf_counter(), time.time()
    engine.save_checkpoint(str(folder))
    called = time.perf_counter() - start
    during = until((folder / "latest").exists)
    whole = (folder / "latest").stat().st_ctime - clock  # its last rename
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
    return {"call": called, "disk": whole, "taken": taken, "step": usual, "copy": copy, "written": written}


def pretrained(engine: Any, folder: Path) -> dict[str, float]:
    """Memory of the host that save_pretrained takes beyond what is there, as the kernel counts it, and a unit's in fp32."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status("VmRSS")
    engine.save_pretrained(str(folder), dtype="bf16")
    units = [sum(param.numel() for param in layer.parameters()) for layer in engine.module]
    return {"peak": _status("VmHWM") - before, "unit": 4 * max(units)}


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    kind, folder, width, depth = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    if kind == "torch":
        held: Any = {f"{i}": torch.randn(width * width + width) for i in range(3 * depth)}
    else:
        held = engine_of(kind, width, depth)
        x = torch.randn(1, width).to(torch.float32 if kind == "behind" else torch.bfloat16)
        step(held, x)
    print("@{}", flush=True)
    for line in sys.stdin:
        shutil.rmtree(folder, ignore_errors=True)
        os.sync()
        if line.strip() == "pretrained":
            found = pretrained(held, folder)
        elif kind == "behind":
            found = behind(held, folder, x, 12 * (width * width + width) * depth)
        else:
            found = save(kind, held, folder)
        shutil.rmtree(folder, ignore_errors=True)
        print("@" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

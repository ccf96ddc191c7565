"""One contender of the leg `save`: a line in, something saved or trained, a line of JSON out. DeepSpeed's runs in its environment.

    python save_worker.py slipstream|behind|torch|deepspeed FOLDER WIDTH DEPTH
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn


def engine_of(kind: str, width: int, depth: int) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 16, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }  # fmt: skip
    if kind == "deepspeed":
        import deepspeed

        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29655"}
        return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    import slipstream

    if kind == "behind":
        config["checkpoint"] = {"writer": {"decoupled": True}}
    return slipstream.initialize(model=model, config=config)[0]


def step(engine: Any, x: torch.Tensor) -> None:
    engine.backward(engine(x).float().square().mean())
    engine.step()


def on_disk(folder: Path) -> int:
    """Bytes of the files, all of which are on disk when this returns."""
    nbytes = 0
    for path in (path for path in folder.rglob("*") if path.is_file()):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        nbytes += path.stat().st_size
    return nbytes


def save(kind: str, held: Any, folder: Path) -> dict[str, float]:
    """Seconds until the call returns, and until all is on disk."""
    shutil.rmtree(folder, ignore_errors=True)
    os.sync()
    start = time.perf_counter()
    if kind == "torch":
        folder.mkdir()
        torch.save(held, folder / "state.pt")
    else:
        held.save_checkpoint(str(folder))
    called = time.perf_counter() - start
    nbytes = on_disk(folder)
    return {"call": called, "disk": time.perf_counter() - start, "nbytes": nbytes}


def behind(engine: Any, folder: Path, x: torch.Tensor) -> dict[str, float]:
    """What a save takes from the training that goes on meanwhile."""
    shutil.rmtree(folder, ignore_errors=True)
    os.sync()
    alone = []
    for _ in range(7):
        start = time.perf_counter()
        step(engine, x)
        alone.append(time.perf_counter() - start)
    usual = sorted(alone)[3]
    start = time.perf_counter()
    engine.save_checkpoint(str(folder))
    called = time.perf_counter() - start
    steps = 0
    while not (folder / "latest").exists():
        step(engine, x)
        steps += 1
    whole = time.perf_counter() - start
    engine.finish_save()
    memory = torch.empty(1 << 28, dtype=torch.uint8).random_(0, 2)
    other = torch.zeros_like(memory)
    start = time.perf_counter()
    other.copy_(memory)
    copy = (time.perf_counter() - start) / memory.numel()
    return {"call": called, "disk": whole, "taken": whole - steps * usual, "steps": steps, "step": usual, "copy_s_per_byte": copy}


def main() -> None:
    kind, folder, width, depth = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    x = torch.randn(16, width).bfloat16()
    if kind == "torch":
        held: Any = {f"{i}": torch.randn(width * width + width) for i in range(3 * depth)}
    else:
        held = engine_of(kind, width, depth)
        step(held, x)
    print("@{}", flush=True)
    for line in sys.stdin:
        if line.strip() != "save":
            break
        found = behind(held, folder, x) if kind == "behind" else save(kind, held, folder)
        shutil.rmtree(folder, ignore_errors=True)
        print("@" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

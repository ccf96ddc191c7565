"""The script that the leg `restart` starts: a GPT on two ranks, of which rank 1 ends itself by SIGKILL, once.

Each rank appends lines to a file of its own: "step", its number, its loss and when it was complete; "killed" and when.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path
from typing import IO

import slipstream
from benchmarks.workloads import WORKLOADS, build_batch, build_model


def tell(file: IO[str], *words: object) -> None:
    print(*words, time.time(), file=file, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--folder", "--workload"):
        parser.add_argument(name, required=True)
    for name in ("--steps", "--every", "--memory", "--dies"):  # dies: the step in the middle of which rank 1 ends; 0: none
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args()
    work, rank = WORKLOADS[options.workload], int(os.environ["RANK"])
    checkpoint = {"folder": f"{options.folder}/disk", "every_steps": options.every, "memory_every_steps": options.memory}
    config = {
        "train_micro_batch_size_per_gpu": work.batch,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "slipstream": {"checkpoint": checkpoint},
    }
    engine, *_ = slipstream.initialize(model=build_model(work), config=config)
    tokens, targets = build_batch(work, rank)
    is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    with open(Path(options.folder, f"rank{rank}.txt"), "a") as file:
        while engine.global_steps < options.steps:
            loss = engine(tokens.roll(engine.global_steps, 1), targets)
            engine.backward(loss)
            if is_first and rank == 1 and engine.global_steps + 1 == options.dies:
                tell(file, "killed")
                os.kill(os.getpid(), signal.SIGKILL)
            engine.step()
            tell(file, "step", engine.global_steps, loss.item().hex())


if __name__ == "__main__":
    main()

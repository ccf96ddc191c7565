"""The script that the legs `restart` and `kills` start: a GPT on ranks, of which rank 1 may end itself by SIGKILL, once.

Each rank appends lines to a file of its own: "pid" and its process, "begin" and the step, "step", its number, its loss and when it
was complete; "killed" and when. It ends after `--steps`, or at the step that the file "stop" of the folder names.
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
    parser.add_argument("--stop", type=Path, required=True)  # a file that names the last step, once it is there
    for name in ("--steps", "--every", "--memory", "--dies"):  # dies: the step in the middle of which rank 1 ends; 0: none
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args()
    work, rank = WORKLOADS[options.workload], int(os.environ["RANK"])
    checkpoint = {"folder": f"{options.folder}/disk", "every_steps": options.every, "memory_every_steps": options.memory}
    config = {
        "train_micro_batch_size_per_gpu": work.batch,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "slipstream": {"checkpoint": checkpoint, "keep_checkpoints": 2},
    }
    file = open(Path(options.folder, f"rank{rank}.txt"), "a")  # noqa: SIM115 (open until exit)
    tell(file, "pid", os.getpid())
    engine, *_ = slipstream.initialize(model=build_model(work), config=config)
    tokens, targets = build_batch(work, rank)
    is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    while engine.global_steps < (int(options.stop.read_text()) if options.stop.exists() else options.steps):
        tell(file, "begin", engine.global_steps + 1)
        loss = engine(tokens.roll(engine.global_steps, 1), targets)
        engine.backward(loss)
        if is_first and rank == 1 and engine.global_steps + 1 == options.dies:
            tell(file, "killed")
            os.kill(os.getpid(), signal.SIGKILL)
        engine.step()
        tell(file, "step", engine.global_steps, loss.item().hex())


if __name__ == "__main__":
    main()

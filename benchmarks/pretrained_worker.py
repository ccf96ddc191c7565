"""One rank of the leg `pretrained`: says what comes next, waits for a line, does it, says that it is done. transformers' own calls.

python pretrained_worker.py FOLDER     FOLDER/source and FOLDER/small are models; RANK and the like are in the environment
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers
from transformers.integrations import HfDeepSpeedConfig

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
}


def phase(name: str, do: Callable[[], Any]) -> Any:
    gc.collect()
    print(json.dumps({"begins": name}), flush=True)
    sys.stdin.readline()
    made = do()
    gc.collect()
    print(json.dumps({"ends": name}), flush=True)
    sys.stdin.readline()
    return made


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    alive = HfDeepSpeedConfig(CONFIG)  # by which from_pretrained knows of stage 3, for as long as this lives

    def load(name: str) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(folder / name)

    def initialize(model: Any) -> Any:
        return deepspeed.initialize(model=model, config=CONFIG)[0]

    def step(engine: Any) -> None:
        ids = torch.arange(8)[None]
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()

    small = initialize(load("small"))  # what the first use of everything takes is nobody's shards
    step(small)
    small.save_pretrained(str(folder / "small-out"))
    small.destroy()
    del small
    model = phase("from_pretrained", lambda: load("source"))
    engine = phase("initialize", lambda: initialize(model))
    step(engine)
    phase("save_pretrained", lambda: engine.save_pretrained(str(folder / "out")))
    del alive
    dist.barrier()
    os._exit(0)  # nothing to be tidied up


if __name__ == "__main__":
    main()

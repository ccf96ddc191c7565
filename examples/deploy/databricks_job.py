"""Databricks or any Spark 3.4 and newer: a notebook's cell that trains on the cluster's GPUs, or on this host's cores.

TorchDistributor starts torch.distributed.run in Spark's tasks, which sets what slipstream.initialize reads. DBFS and Unity volumes
(/Volumes/...) are shared: put checkpoints there.
"""

from __future__ import annotations

import sys

import torch
import torch.nn as nn


def train(folder: str, steps: int) -> float:
    """Runs on each rank. Imports are inside, since Spark pickles the function."""
    import slipstream

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3},
        "slipstream": {"checkpoint": {"folder": folder, "every_steps": 50}},
    }
    engine, *_ = slipstream.initialize(model=model, model_parameters=model.parameters(), config=config)
    last = float("nan")  # of a run that had ended
    while engine.global_steps < steps:
        x = torch.randn(8, 16, device=engine.device)
        loss = (engine(x).squeeze(-1) - x.sum(1)).square().mean()
        engine.backward(loss)
        engine.step()
        last = loss.item()
    engine.destroy()  # no rank leaves while others still talk to it
    return last


def main(folder: str, num_processes: int = 2, steps: int = 100) -> None:
    from pyspark.ml.torch.distributor import TorchDistributor
    from pyspark.sql import SparkSession

    SparkSession.builder.getOrCreate()  # a notebook has one
    use_gpu = torch.cuda.is_available()
    distributor = TorchDistributor(num_processes=num_processes, local_mode=not use_gpu, use_gpu=use_gpu)
    print("last loss", distributor.run(train, folder, steps))


if __name__ == "__main__":
    main(sys.argv[1])

"""Ray Train: `slipstream.initialize` in the workers of a `TorchTrainer` (pip install "ray[train]").

    from slipstream.integrations.ray import report, trainer

    def train(options):
        engine, *_ = slipstream.initialize(model=model, model_parameters=model.parameters(), config=config)
        while engine.global_steps < options["steps"]:
            ...
            report(engine, {"loss": loss.item()})

    result = trainer(train, {"steps": 100}, num_workers=2, storage="/shared/runs").fit()

Ray starts the workers and joins their process group, which `initialize` finds. If a worker dies, Ray restarts all workers, and an
engine whose config has `"slipstream": {"checkpoint": {"folder": ..., "every_steps": ...}}` resumes from its newest checkpoint. The
folder and `storage` are on a file system that all hosts share.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

try:
    from ray import train as ray_train
    from ray.train.torch import TorchConfig, TorchTrainer
except ImportError as error:
    raise ImportError(f'slipstream.integrations.ray needs Ray Train ({error}): pip install "ray[train]"') from error

__all__ = ["report", "trainer"]


def trainer(
    train: Callable[[dict[str, Any]], Any],
    options: Mapping[str, Any] | None = None,
    *,
    num_workers: int,
    storage: str,
    name: str | None = None,
    use_gpu: bool = False,
    cores: float = 1,
    max_failures: int = 3,
) -> TorchTrainer:
    """A TorchTrainer of `num_workers` ranks that each call `train(options)`, with `cores` CPUs, and a GPU if `use_gpu`.

    max_failures: how often all workers are restarted. Raises ValueError for fewer than one worker.
    """
    if num_workers < 1:
        raise ValueError(f"num_workers ({num_workers}) must be at least 1: each worker is a rank")
    resources = {"CPU": cores, **({"GPU": 1} if use_gpu else {})}
    return TorchTrainer(
        train,
        train_loop_config=dict(options or {}),
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if use_gpu else "gloo"),
        scaling_config=ray_train.ScalingConfig(num_workers=num_workers, use_gpu=use_gpu, resources_per_worker=resources),
        run_config=ray_train.RunConfig(
            name=name,
            storage_path=storage,
            failure_config=ray_train.FailureConfig(max_failures=max_failures),
            checkpoint_config=ray_train.CheckpointConfig(num_to_keep=2),  # each `report` makes one
        ),
    )


def report(engine: Any, metrics: Mapping[str, Any]) -> None:
    """Report rank 0's metrics, and the engine's step, to Ray. All workers call it, because Ray waits for each.

    Ray keeps metrics only with checkpoints, and would copy every byte of one; so it gets a file that names the engine's.
    """
    values = {"step": engine.global_steps, **metrics}
    if ray_train.get_context().get_world_rank() != 0:
        ray_train.report(values)
        return
    with tempfile.TemporaryDirectory() as folder:
        saved = {"folder": engine.plan.checkpoint.folder, "step": engine.global_steps}
        Path(folder, "slipstream.json").write_text(json.dumps(saved))
        ray_train.report(values, checkpoint=ray_train.Checkpoint.from_directory(folder))

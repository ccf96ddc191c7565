"""The loader of a plan: shuffled epochs, a curriculum over metrics of the samples, or micro-batches filled by tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from slipstream.config.plan import Plan
from slipstream.data.batching import Microbatches, VariableBatchSizeLR, batch_by_seqlens, lengths_of
from slipstream.data.sampler import CurriculumLoader
from slipstream.train.data import StatefulLoader
from slipstream.world.mesh import Mesh
from slipstream.zero.trees import tensors_in

Loader = StatefulLoader | CurriculumLoader
_BY_TOKENS = "data_sampling.dynamic_batching"
_KEY = f"data_efficiency.{_BY_TOKENS}"


def build_loader(
    plan: Plan, dataset: Any, mesh: Mesh, device: torch.device, collate_fn: Any = None, shuffle: bool = True, **options: Any
) -> Loader:
    """The loader of this rank. shuffle: whether to shuffle if the plan sets no order. options: `batch_size`, `drop_last`,
    `num_workers` and `seed` in place of the plan's, and `workers`. Raises ValueError if the dataset does not fit the plan."""
    efficiency = plan.efficiency
    curriculum = efficiency.get("data_sampling.curriculum_learning")
    if _BY_TOKENS in efficiency and not curriculum and not isinstance(dataset, Microbatches):
        dataset = batches_by_tokens(plan, dataset, collate_fn)
    by_tokens = isinstance(dataset, Microbatches)
    common = {
        "batch_size": plan.batch.own(mesh.batch.index, mesh.batch.size),
        "rank": mesh.batch.index,
        "world_size": mesh.batch.size,
        "collate_fn": dataset.collate if by_tokens else collate_fn,
        "drop_last": plan.drop_last,
        "seed": efficiency.get("seed", plan.seed),
        "num_workers": efficiency.get("data_sampling.num_workers", 0),
        "pin_memory": device.type == "cuda",
        **options,
    }
    if common["pin_memory"] and not common["num_workers"]:
        common |= {"collate_fn": partial(_pinned, common["collate_fn"] or default_collate), "pin_memory": False}
    if curriculum:
        metrics, samples = curriculum["curriculum_metrics"], plan.batch.train_batch_size
        num_epochs = efficiency["data_sampling.num_epochs"]
        return CurriculumLoader(dataset, metrics=metrics, step_samples=samples, num_epochs=num_epochs, **common)
    if by_tokens:
        return StatefulLoader(dataset, **common, shuffle=False)
    window = None if "batch_size" in options else plan.batch.per_pass
    return StatefulLoader(dataset, **common | {"seed": options.get("seed", plan.seed)}, shuffle=shuffle, window=window)


def _pinned(collate: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    """The batch in pinned memory, unless some of it is on the device: DataLoader's own `pin_memory` refuses that."""
    batch = collate(samples)
    return batch if any(tensor.is_cuda for tensor in tensors_in(batch)) else pin_memory(batch)


def batches_by_tokens(
    plan: Plan, dataset: Any, collate_fn: Any, lengths: Any = None, filter_ids: Any = None, pad: Any = None
) -> Microbatches:
    """The micro-batches of the plan's `dynamic_batching`. lengths: tokens of each sample; None: those in metrics_path. filter_ids:
    the samples to use; None: all. pad: see `Microbatches`, for pipelines. Raises ValueError without lengths, or if it is off."""
    config = plan.efficiency.get(_BY_TOKENS)
    if config is None:
        raise ValueError(f"{_KEY} is off: set its enabled, and those of data_sampling and data_efficiency")
    lengths = lengths_of(config["metrics_path"], len(dataset)) if lengths is None else lengths
    if lengths is None:
        raise ValueError(
            f"{_KEY}: metrics_path ({config['metrics_path']!r}) has no seqlen/seqlen_sample_to_metric.bin and .idx; write "
            'them with slipstream.data.DataAnalyzer(metric_names=["seqlen"], ...), or pass dataset_seqlens= to '
            "get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed"
        )
    same = plan.mesh.pp > 1
    if same and pad is None:
        raise ValueError(
            f"{_KEY}: a pipeline's micro-batches need one shape: pass sample_padding_fn=, called with sample and length"
        )
    names = ("max_tokens", "min_batch_size", "max_batch_size", "sequence_picking_order", "verbose")
    batches = batch_by_seqlens(
        lengths,
        sequence_ids_per_mb=filter_ids,
        effective_batch_size=plan.batch.train_batch_size,
        required_microbatches_of_same_size=same,
        seed=plan.efficiency["seed"],
        **{name: config[name] for name in names},
    )
    return Microbatches(dataset, batches, collate_fn, pad if same else None)


def scaled_schedule(plan: Plan, loader: Any, scheduler: Any, optimizer: Any) -> Any:
    """A schedule that scales learning rates with the number of samples in a batch, if the loader fills batches by tokens or the
    batch size adapts; else `scheduler`."""
    config, samples = plan.efficiency.get(_BY_TOKENS), plan.batch.train_batch_size
    if plan.adaptive is not None and plan.adaptive.scale_lr != "none" and optimizer is not None:
        return VariableBatchSizeLR(scheduler, samples, [samples], None, plan.adaptive.scale_lr, optimizer=optimizer)
    if config is None or optimizer is None or loader is None:
        return scheduler
    sizes = loader.dataset.batches.batch_sizes
    method, verbose = config["lr_scaling_method"], config["verbose"]
    return VariableBatchSizeLR(scheduler, samples, sizes, loader, method, verbose=verbose, optimizer=optimizer)


def get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(
    dataset: Any,
    engine: Any,
    dataset_seqlens: Any = None,
    dataset_filter_ids: Any = None,
    dataloader_collate_fn: Callable[[list[Any]], Any] | None = None,
    sample_padding_fn: Callable[[Any, int], Any] | None = None,
    batch_seqlens_fn: Callable[[Any], Any] | None = None,
) -> tuple[Loader, Any, dict[str, Any]]:
    """The loader and schedule of the engine's `dynamic_batching`, and the arguments of `deepspeed_io` that make the same loader.

    dataset_seqlens     tokens of each sample; None: those in metrics_path, or those that `batch_seqlens_fn` returns for batches of
                        samples, which are written there first
    dataset_filter_ids  the samples to use; None: all
    sample_padding_fn   called with a sample and a length, for pipelines, whose micro-batches have one length

    Collective if lengths are written. Raises ValueError as `batches_by_tokens`.
    """
    plan = engine.plan
    path = plan.efficiency.get(_BY_TOKENS, {}).get("metrics_path")
    if dataset_seqlens is None and batch_seqlens_fn is not None and path and lengths_of(path, len(dataset)) is None:
        from slipstream.data.analyze import SINGLE, DistributedDataAnalyzer

        DistributedDataAnalyzer(
            dataset,
            engine.world_size,
            worker_id=engine.mesh.world.index,
            batch_size=1024,
            metric_names=["seqlen"],
            metric_functions=[batch_seqlens_fn],
            metric_types=[SINGLE],
            save_path=path,
            collate_fn=dataloader_collate_fn,
        ).run_map_reduce()
    batches = batches_by_tokens(plan, dataset, dataloader_collate_fn, dataset_seqlens, dataset_filter_ids, sample_padding_fn)
    loader = build_loader(plan, batches, engine.mesh, engine.device)
    scheduler = scaled_schedule(plan, loader, engine.lr_scheduler, engine.optimizer)
    return loader, scheduler, {"dataset": batches, "batch_size": loader.batch_size, "num_local_io_workers": loader.num_workers}

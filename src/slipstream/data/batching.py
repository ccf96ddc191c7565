"""Micro-batches filled by tokens, and learning rates that follow the number of samples (DeepSpeed's `dynamic_batching`).

A batch, which one step of all ranks consumes, is `effective_batch_size` micro-batches of at most `max_tokens` tokens each. Its
learning rate is the schedule's times samples / effective_batch_size ("linear"), the square root of that ("sqrt"), or 1 ("none").
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from slipstream.data.indexed import MMapIndexedDataset

logger = logging.getLogger(__name__)

_KEY = "data_efficiency.data_sampling.dynamic_batching"
_SCALES: Mapping[str, Callable[[float], float]] = {"linear": lambda ratio: ratio, "sqrt": math.sqrt, "none": lambda ratio: 1.0}


class Batches(NamedTuple):
    """Micro-batches, each with its batch's number. For each batch: the samples, and the length of the longest sample."""

    microbatch_ids: list[tuple[int, list[int]]]
    batch_sizes: list[int]
    batch_max_seqlens: list[int]


def batch_by_seqlens(
    seqlens: Sequence[int] | NDArray[Any],
    max_tokens: int,
    sequence_ids_per_mb: Sequence[int] | None = None,
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    sequence_picking_order: str = "dataloader",
    effective_batch_size: int = 1,
    required_microbatches_of_same_size: bool = False,
    verbose: bool = False,
    seed: int | None = None,
) -> Batches:
    """Fill micro-batches with samples in order, as many as fit.

    sequence_ids_per_mb     the samples to use; None: all
    min_, max_batch_size    samples of a micro-batch. At the first one that cannot have min_batch_size, the rest is dropped
    sequence_picking_order  "dataloader": the given order; "random": shuffled by `seed`; "seqlen": shortest first
    required_microbatches_of_same_size  a batch's micro-batches have equally many samples, distributed in turn (pipelines)

    Samples longer than `max_tokens`, and final micro-batches that do not fill a batch, are dropped. Raises ValueError if not even
    one batch remains.
    """
    if sequence_picking_order not in ("dataloader", "random", "seqlen"):
        raise ValueError(f"{_KEY}.sequence_picking_order ({sequence_picking_order!r}) must be dataloader, random or seqlen")
    ids = range(len(seqlens)) if sequence_ids_per_mb is None else sequence_ids_per_mb
    metrics = [(int(seqlens[i]), int(i)) for i in ids]
    if sequence_picking_order == "random":
        random.Random(seed).shuffle(metrics)
    elif sequence_picking_order == "seqlen":
        metrics.sort()
    fitting = [metric for metric in metrics if metric[0] <= max_tokens]
    if len(fitting) < len(metrics):
        logger.warning("%s: %d of %d samples are longer than max_tokens (%d) and are left out", _KEY, len(metrics) - len(fitting),
                       len(metrics), max_tokens)  # fmt: skip
    most = max_batch_size or len(fitting)
    groups = _filled(fitting, max_tokens, min_batch_size, most, effective_batch_size if required_microbatches_of_same_size else 1)
    count = len(groups) // effective_batch_size
    if not count:
        raise ValueError(
            f"{_KEY}: {len(fitting)} samples fill {len(groups)} micro-batches of {max_tokens} tokens, and a batch needs "
            f"{effective_batch_size} (train_batch_size): use more samples, smaller max_tokens or a smaller batch"
        )
    batches = [groups[i * effective_batch_size : (i + 1) * effective_batch_size] for i in range(count)]
    for i, batch in enumerate(batches if verbose else ()):
        logger.info("batch %d: samples %s and tokens %s of its micro-batches", i, [*map(len, batch)],
                    [sum(length for length, _ in group) for group in batch])  # fmt: skip
    return Batches(
        [(i, [sample for _, sample in group]) for i, batch in enumerate(batches) for group in batch],
        [sum(map(len, batch)) for batch in batches],
        [max(length for group in batch for length, _ in group) for batch in batches],
    )


def _filled(metrics: list[tuple[int, int]], max_tokens: int, least: int, most: int, together: int) -> list[list[tuple[int, int]]]:
    """Micro-batches, `together` of them at a time with equally many samples, distributed in turn."""
    groups: list[list[tuple[int, int]]] = []
    at = 0
    while at < len(metrics):
        tokens, rounds = [0] * together, 0
        while at + (rounds + 1) * together <= len(metrics) and rounds < most:
            new = [metrics[at + rounds * together + i][0] for i in range(together)]
            if any(held + more > max_tokens for held, more in zip(tokens, new, strict=True)):
                break
            tokens, rounds = [held + more for held, more in zip(tokens, new, strict=True)], rounds + 1
        if rounds < max(least, 1):
            break
        stop = at + rounds * together
        groups += [metrics[at + i : stop : together] for i in range(together)]
        at = stop
    return groups


def scale_lr(base_batch_size: int, batch_size: int, base_lr: float = 1, method: str | None = "linear") -> float:
    """The learning rate for another number of samples. Raises ValueError for an unknown method."""
    name = "none" if method is None else method.lower()
    if name not in _SCALES:
        raise ValueError(f"{_KEY}.lr_scaling_method ({method!r}) must be one of {', '.join(_SCALES)}")
    return base_lr * _SCALES[name](batch_size / base_batch_size)


@dataclass(eq=False)
class Microbatches(Dataset[tuple[int, list[int]]]):
    """Micro-batches as the samples of a loader, which must not shuffle them; `collate` makes a batch from some of them.

    pad: pads a sample to the longest one of its batch; then all ranks' micro-batches have the same length
    """

    dataset: Any
    batches: Batches
    collate_fn: Callable[[list[Any]], Any] | None = None
    pad: Callable[[Any, int], Any] | None = None

    def __len__(self) -> int:
        return len(self.batches.microbatch_ids)

    def __getitem__(self, index: int) -> tuple[int, list[int]]:
        return self.batches.microbatch_ids[index]

    def collate(self, microbatches: list[tuple[int, list[int]]]) -> Any:
        longest = self.batches.batch_max_seqlens
        samples = [
            self.dataset[sample] if self.pad is None else self.pad(self.dataset[sample], longest[batch])
            for batch, ids in microbatches
            for sample in ids
        ]
        return (self.collate_fn or default_collate)(samples)


def lengths_of(metrics_path: str | None, count: int) -> NDArray[np.int64] | None:
    """The lengths that `DataAnalyzer` wrote as metric `seqlen`; None without a file. Raises ValueError for another number."""
    path = f"{metrics_path}/seqlen/seqlen_sample_to_metric"
    if metrics_path is None or not MMapIndexedDataset.exists(path):
        return None
    lengths = MMapIndexedDataset(os.fspath(path)).flat().astype(np.int64)
    if len(lengths) != count:
        raise ValueError(f"{path} has lengths of {len(lengths)} samples, and the dataset has {count}: delete it, and analyze anew")
    return lengths


_COLLECTS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def required_arguments(scheduler: Any) -> list[str]:
    """The names of the required arguments of `step()`: none, or ["increment"] of one that counts samples, like Megatron's."""
    parameters = inspect.signature(scheduler.step).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in _COLLECTS]


class VariableBatchSizeLR:
    """A schedule whose learning rates are another schedule's, scaled to the next batch.

    lr_scheduler: the other schedule, or None for the optimizer's rates. batch_sizes: samples of each batch of the loader, in order.
    """

    def __init__(
        self,
        lr_scheduler: Any,
        base_batch_size: int,
        batch_sizes: Sequence[int],
        dataloader: Any = None,
        lr_scaling_method: str | None = "linear",
        last_epoch: int = 0,
        verbose: bool = False,
        optimizer: Any = None,
    ) -> None:
        scale_lr(1, 1, 1, lr_scaling_method)  # raises for an unknown method
        self.optimizer = optimizer if lr_scheduler is None else lr_scheduler.optimizer
        self.base_lrs: list[float]
        self.base_lr_scheduler: Any
        if isinstance(lr_scheduler, VariableBatchSizeLR):  # replace it
            self._set(lr_scheduler.base_lrs)
            lr_scheduler = lr_scheduler.base_lr_scheduler
        self.base_lr_scheduler = lr_scheduler
        self.base_batch_size, self.batch_sizes, self.dataloader = base_batch_size, list(batch_sizes), dataloader
        self.lr_scaling_method, self.last_epoch, self.verbose = lr_scaling_method, last_epoch, verbose
        self.base_lrs = self.get_lr()  # unscaled
        self._scale()

    def step(self, epoch: int | None = None) -> None:
        """Advance by one batch, or go to the loader's batch `epoch` and the other schedule's step `epoch`."""
        self._set(self.base_lrs)
        if self.base_lr_scheduler is not None:
            given = self._samples() if required_arguments(self.base_lr_scheduler) else epoch
            self.base_lr_scheduler.step(*([] if given is None else [given]))
        self.base_lrs = self.get_lr()
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        self._scale()

    def resize(self, samples: int) -> None:
        """From now on, scale the rates for batches of this many samples."""
        self.batch_sizes = [samples]
        self._scale()

    def _samples(self) -> int:
        return self.batch_sizes[self.last_epoch % len(self.batch_sizes)]

    def _scale(self) -> None:
        size = self._samples()
        self._set([scale_lr(self.base_batch_size, size, rate, self.lr_scaling_method) for rate in self.base_lrs])
        if self.verbose:
            logger.info("batch %d has %d samples; rates %s", self.last_epoch, size, self.get_lr())

    def _set(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def get_lr(self) -> list[float]:
        """The rates that the optimizer has."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    get_last_lr = get_lr

    def state_dict(self) -> dict[str, Any]:
        base = None if self.base_lr_scheduler is None else self.base_lr_scheduler.state_dict()
        return {"base_lr_scheduler": base, "base_lrs": list(self.base_lrs), "last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the position; the batches stay those of this schedule's loader."""
        if self.base_lr_scheduler is not None:
            self.base_lr_scheduler.load_state_dict(state_dict["base_lr_scheduler"])
        self.base_lrs, self.last_epoch = list(state_dict["base_lrs"]), state_dict["last_epoch"]
        self._scale()


def lr_scheduler_for_variable_batch_size(
    base_batch_size: int,
    batch_sizes: Sequence[int],
    dataloader: Any,
    lr_scheduler_or_optimizer: Any,
    lr_scaling_method: str | None = "linear",
    verbose: bool = False,
) -> VariableBatchSizeLR:
    """A schedule over another schedule, or over an optimizer's constant rates. Raises ValueError for anything else."""
    other = lr_scheduler_or_optimizer
    if not hasattr(other, "param_groups") and not hasattr(other, "optimizer"):
        raise ValueError(f"lr_scheduler_or_optimizer= must be a schedule or an optimizer, not a {type(other).__name__}")
    is_schedule = not hasattr(other, "param_groups")
    schedule = other if is_schedule else None
    options: Any = {"verbose": verbose, "optimizer": None if is_schedule else other}
    return VariableBatchSizeLR(schedule, base_batch_size, batch_sizes, dataloader, lr_scaling_method, **options)

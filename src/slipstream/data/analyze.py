"""Measures every sample of a dataset once, before training, and writes indexed datasets that a curriculum reads.

A metric of type "single_value_per_sample" writes, in SAVE_PATH/NAME/ with the prefix NAME_,

    sample_to_metric                   the value of each sample, in the order of the dataset
    index_to_metric                    the occurring values, ascending
    index_to_sample                    row i: the samples with value i
    index_to_sample_percentile_merged  the same in about 100 rows

and one of type "accumulate_value_over_samples" writes metric_value, a sum. Dtypes are the narrowest that fit. The files have
DeepSpeed's names and bytes. `DataAnalyzer` exchanges results through files in NAME/worker{w}_thread{t}/, which other machines may
write; `DistributedDataAnalyzer` sends them to the first rank. `num_threads` processes of each worker compute metrics.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data import DataLoader, default_collate

from slipstream.data.indexed import MMapIndexedDataset, code, find_fit_int_dtype, write_rows
from slipstream.world.join import init_distributed

logger = logging.getLogger(__name__)

SINGLE, SUM = "single_value_per_sample", "accumulate_value_over_samples"
_VALUES, _SAMPLES, _SUM = "sample_to_metric", "sample_index", "metric_value"


def split_index(start_idx: int, end_idx: int, num_partitions: int) -> list[tuple[int, int]]:
    """The bounds of parts of nearly equal length."""
    bounds = np.linspace(start_idx, end_idx, dtype=int, num=num_partitions + 1).tolist()
    return list(itertools.pairwise(bounds))


def split_dataset(dataset: Any, num_workers: int, worker_id: int, num_threads: int) -> tuple[list[Any], list[Any]]:
    """The bounds of each worker's samples, and those of each process of one worker."""
    workers = split_index(0, len(dataset), num_workers)
    return workers, split_index(*workers[worker_id], num_threads)


class _Named(NamedTuple):
    name: str
    function: Callable[[Any], Any]
    kind: str
    dtype: Any  # numpy's or torch's; None: any with a code

    def of(self, data: Any, count: int) -> NDArray[Any]:
        """The metric's values for a batch of `count` samples. Raises ValueError for values of another type or number."""
        values = self.function(data)
        if not isinstance(values, (torch.Tensor, np.ndarray)):
            raise ValueError(f"metric {self.name}: its function must return a tensor or an array, not a {type(values).__name__}")
        array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else values
        if code(array.dtype) != code(array.dtype if self.dtype is None else self.dtype):
            raise ValueError(f"metric {self.name}: its function returns {array.dtype}, and metric_dtypes says {self.dtype}")
        if self.kind == SINGLE and (array.size != count or len(array) != count):
            raise ValueError(f"metric {self.name}: shape {array.shape} has not one value for each of {count} samples")
        return array


class _Measured(NamedTuple):
    """A batch's metrics."""

    first: int  # index of its first sample
    data: Any  # the batch itself, for custom functions
    samples: NDArray[np.int64]
    values: list[NDArray[Any]]


class _Measuring:
    """Collates and measures a batch, in the process that read its samples."""

    def __init__(self, metrics: Sequence[_Named], collate: Any, sample_indices: Any, keeps_data: bool) -> None:
        self.metrics, self.collate, self.sample_indices = metrics, collate or default_collate, sample_indices
        self.keeps_data = keeps_data

    def __call__(self, indexed: list[tuple[int, Any]]) -> _Measured:
        positions = [position for position, _ in indexed]
        data = self.collate([sample for _, sample in indexed])
        if self.keeps_data:
            return _Measured(positions[0], data, np.array(positions), [])
        if isinstance(data, Mapping) and "index" in data:  # Megatron's datasets include it
            positions = [int(row[0]) for row in data["index"]]
        elif self.sample_indices is not None:
            positions = [int(self.sample_indices[position]) for position in positions]
        return _Measured(0, None, np.array(positions, np.int64), [metric.of(data, len(indexed)) for metric in self.metrics])


class _Indexed(torch.utils.data.Dataset[tuple[int, Any]]):
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self.dataset[index]


def _measure(
    dataset: Any, bounds: tuple[int, int], batch_size: int, processes: int | None, measuring: _Measuring
) -> Iterator[_Measured]:
    """The metrics of samples bounds[0] to bounds[1], batch by batch, in order."""
    first, stop = bounds
    batches = [list(range(start, min(start + batch_size, stop))) for start in range(first, stop, batch_size)]
    workers = min(processes or 0, len(batches))
    loader = DataLoader(_Indexed(dataset), batch_sampler=batches, collate_fn=measuring, num_workers=workers if workers > 1 else 0)
    return iter(loader)


class _Results:
    """The results of some samples: each metric's values, or its sum."""

    def __init__(self, metrics: Sequence[_Named], measured: Iterable[_Measured]) -> None:
        self.samples: list[NDArray[np.int64]] = []
        self.values: list[list[NDArray[Any]]] = [[] for _ in metrics]
        self.sums: list[Any] = [None] * len(metrics)
        for batch in measured:
            self.samples.append(batch.samples)
            for i, (metric, values) in enumerate(zip(metrics, batch.values, strict=True)):
                if metric.kind == SINGLE:
                    self.values[i].append(values.reshape(-1))
                else:
                    self.sums[i] = np.atleast_1d(values).astype(np.int64) + (0 if self.sums[i] is None else self.sums[i])


class DataAnalyzer:
    """DeepSpeed's class; see the module. dataset: map-style. num_workers: machines, or processes that the user starts, each with
    its `worker_id`; worker 0 merges. num_threads: processes of this worker. specific_threads: only these shares of its samples.
    sample_indices: the samples' numbers in another order of the dataset. The functions `custom_map_init`, `custom_map_update` and
    `custom_map_finalize` together replace the measuring, `custom_reduce` the merging.

    Raises ValueError for lists of different lengths, unknown types, and values that do not fit.
    """

    def __init__(
        self,
        dataset: Any,
        num_workers: int = 1,
        worker_id: int = 0,
        num_threads: int = 1,
        num_threads_reduce: int = 1,
        specific_threads: Sequence[int] = (),
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Callable[[Any], Any]] = (),
        metric_types: Sequence[str] = (),
        metric_dtypes: Sequence[Any] = (),
        save_path: str | os.PathLike[str] = "./",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        custom_map_init: Callable[..., Any] | None = None,
        custom_map_update: Callable[..., Any] | None = None,
        custom_map_finalize: Callable[..., Any] | None = None,
        custom_reduce: Callable[..., Any] | None = None,
        sample_indices: Any = None,
    ) -> None:
        self.dataset, self.num_workers, self.worker_id, self.num_threads = dataset, num_workers, worker_id, num_threads
        self.num_threads_reduce, self.batch_size, self.save_path = num_threads_reduce, batch_size, os.fspath(save_path)
        self.threads = list(specific_threads) or list(range(num_threads))
        self.metrics = _metrics(metric_names, metric_functions, metric_types, metric_dtypes)
        self.metric_dtypes = list(metric_dtypes)
        custom: tuple[Any, Any, Any] = (custom_map_init, custom_map_update, custom_map_finalize)
        if any(custom) and not all(custom):
            raise ValueError(
                "DataAnalyzer: custom_map_init, custom_map_update and custom_map_finalize replace the measuring together"
            )
        self.custom, self.custom_reduce = custom, custom_reduce
        self.measuring = _Measuring(self.metrics, collate_fn, sample_indices, any(custom))

    def run_map(self) -> None:
        """Measure this worker's samples, and write the results."""
        _, shares = split_dataset(self.dataset, self.num_workers, self.worker_id, self.num_threads)
        for thread in self.threads:
            measured = _measure(self.dataset, shares[thread], self.batch_size, self.num_threads, self.measuring)
            if self.custom[0] is not None:
                self._run_custom(thread, measured)
                continue
            results = _Results(self.metrics, measured)
            for metric, values, total in zip(self.metrics, results.values, results.sums, strict=True):
                prefix = self._prefix(metric, self.worker_id, thread)
                os.makedirs(os.path.dirname(prefix), exist_ok=True)
                if metric.kind == SINGLE:
                    write_rows(prefix + _VALUES, metric.dtype, _column(values))
                    write_rows(prefix + _SAMPLES, np.int64, _column(results.samples))
                elif total is not None:
                    write_rows(prefix + _SUM, metric.dtype, [total.reshape(-1)])
            logger.info("analysis: worker %d has measured samples %d to %d", self.worker_id, *shares[thread])

    def _run_custom(self, thread: int, measured: Iterator[_Measured]) -> None:
        begin, update, finalize = self.custom
        names, kinds = [metric.name for metric in self.metrics], [metric.kind for metric in self.metrics]
        results = begin(thread, names, kinds, self.metric_dtypes, self.save_path, self.worker_id)
        for batch in measured:
            functions = [metric.function for metric in self.metrics]
            update(batch.data, kinds, self.metric_dtypes, functions, results, batch.first)
        finalize(kinds, self.metric_dtypes, results)

    def run_reduce(self) -> None:
        """Merge what all workers have written. Raises ValueError if samples are missing."""
        if self.custom_reduce is not None:
            names, kinds = [metric.name for metric in self.metrics], [metric.kind for metric in self.metrics]
            counts = (self.num_workers, self.num_threads, self.num_threads_reduce)
            self.custom_reduce(self.dataset, names, kinds, self.save_path, *counts)
            return
        for metric in self.metrics:
            folder = f"{self.save_path}/{metric.name}/{metric.name}_"
            parts = [
                self._prefix(metric, worker, thread) for worker in range(self.num_workers) for thread in range(self.num_threads)
            ]
            if metric.kind == SUM:
                sums = [
                    MMapIndexedDataset(part + _SUM)[0].astype(np.int64) for part in parts if MMapIndexedDataset.exists(part + _SUM)
                ]
                _write_sum(folder, np.sum(sums, 0))
                continue
            values = [MMapIndexedDataset(part + _VALUES).flat() for part in parts]
            samples = [MMapIndexedDataset(part + _SAMPLES).flat() for part in parts]
            count = sum(map(len, values))
            if count != len(self.dataset):
                raise ValueError(
                    f"metric {metric.name}: {count} of {len(self.dataset)} samples are measured; run_map of all workers first"
                )
            chunks = [sum(map(len, values[start:stop])) for start, stop in split_index(0, len(parts), self.num_threads_reduce)]
            _write_index(folder, np.concatenate(values), np.concatenate(samples), chunks)

    def run_map_reduce(self, comm_group: Any = None) -> None:
        """`run_map`, and on worker 0 also `run_reduce`, after all ranks' map. Collective over the group, if given."""
        self.run_map()
        _wait(comm_group)
        if self.worker_id == 0:
            self.run_reduce()
        _wait(comm_group)

    def _prefix(self, metric: _Named, worker: int, thread: int) -> str:
        return f"{self.save_path}/{metric.name}/worker{worker}_thread{thread}/{metric.name}_"


class DistributedDataAnalyzer:
    """`DataAnalyzer` without intermediate files: each rank of a process group measures a share, and the first rank writes. A
    value's samples are in ascending order. comm_group: the ranks; None: all, with the caller's num_workers and `worker_id`."""

    def __init__(
        self,
        dataset: Any,
        num_workers: int = 1,
        num_threads: int = 1,
        worker_id: int = 0,
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Callable[[Any], Any]] = (),
        metric_types: Sequence[str] = (),
        save_path: str | os.PathLike[str] = "./",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        device: Any = None,
        comm_group: Any = None,
        sample_indices: Any = None,
    ) -> None:
        init_distributed()
        self.dataset, self.num_threads, self.batch_size, self.save_path = dataset, num_threads, batch_size, os.fspath(save_path)
        self.comm_group = comm_group
        own = (num_workers, worker_id) if comm_group is None else (dist.get_world_size(comm_group), dist.get_rank(comm_group))
        self.num_workers, self.worker_id = own
        self.metrics = _metrics(metric_names, metric_functions, metric_types, [None] * len(metric_names))
        self.measuring = _Measuring(self.metrics, collate_fn, sample_indices, False)

    def run_map_reduce(self) -> None:
        """Measure and write. Collective."""
        share = split_index(0, len(self.dataset), self.num_workers)[self.worker_id]
        results = _Results(self.metrics, _measure(self.dataset, share, self.batch_size, self.num_threads, self.measuring))
        gathered: list[Any] = [None] * self.num_workers if self.worker_id == 0 else []
        if self.num_workers > 1:
            first = 0 if self.comm_group is None else dist.get_global_rank(self.comm_group, 0)
            dist.gather_object(results, gathered or None, first, self.comm_group)
        elif gathered:
            gathered = [results]
        for i, metric in enumerate(self.metrics if gathered else ()):
            folder = f"{self.save_path}/{metric.name}/{metric.name}_"
            os.makedirs(os.path.dirname(folder), exist_ok=True)
            if metric.kind == SUM:
                _write_sum(folder, np.sum([each.sums[i] for each in gathered if each.sums[i] is not None], 0))
                continue
            values, samples = (
                np.concatenate(list(parts) or [np.empty(0, np.int64)])
                for parts in ((v for each in gathered for v in each.values[i]), (s for each in gathered for s in each.samples))
            )
            _write_index(folder, values, samples, None)
        _wait(self.comm_group)


def _metrics(names: Sequence[str], functions: Sequence[Any], kinds: Sequence[str], dtypes: Sequence[Any]) -> list[_Named]:
    if not len(names) == len(functions) == len(kinds) == len(dtypes):
        raise ValueError(
            f"DataAnalyzer: {len(names)} metric_names, {len(functions)} metric_functions, {len(kinds)} metric_types and "
            f"{len(dtypes)} metric_dtypes: give one of each for every metric"
        )
    if unknown := [kind for kind in kinds if kind not in (SINGLE, SUM)]:
        raise ValueError(f"DataAnalyzer: metric_types {unknown} are not {SINGLE} or {SUM}")
    return [_Named(*each) for each in zip(names, functions, kinds, dtypes, strict=True)]


def _column(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate(parts)[:, None] if parts else np.empty((0, 1), np.int64)


def _write_sum(folder: str, total: NDArray[Any]) -> None:
    total = np.atleast_1d(total).reshape(-1)
    write_rows(folder + _SUM, find_fit_int_dtype(int(total.min()), int(total.max())), [total])


def _write_index(folder: str, values: NDArray[Any], samples: NDArray[Any], chunks: Sequence[int] | None) -> None:
    """Write the four files of a metric. chunks: the sample counts that DeepSpeed's processes merge, which become documents of the
    index file, followed by an empty one; None: one document, and each value's samples ascend."""
    Path(folder).parent.mkdir(parents=True, exist_ok=True)
    if not values.size:
        raise ValueError(f"{folder}: the dataset is empty")
    kind = find_fit_int_dtype(int(values.min()), int(values.max()))
    most = len(samples) - 1 if chunks is not None else int(samples.max())
    sample_kind = find_fit_int_dtype(0, most)
    order = np.argsort(values, kind="stable") if chunks is not None else np.lexsort((samples, values))
    ordered = samples[order].astype(sample_kind)
    distinct, firsts = np.unique(values[order], return_index=True)
    rows = np.split(ordered, firsts[1:])

    def documents(whole: Any, lengths: Sequence[int]) -> list[Any]:
        bounds = np.cumsum([0, *lengths]).tolist()
        return [whole] if chunks is None else [*(whole[a:b] for a, b in itertools.pairwise(bounds)), whole[:0]]

    groups = [stop - start for start, stop in split_index(0, len(rows), len(chunks or [0]))]
    write_rows(folder + _VALUES, kind, *documents(values[:, None], chunks or ()))
    write_rows(folder + "index_to_sample", sample_kind, *documents(rows, groups))
    write_rows(folder + "index_to_metric", kind, *documents(distinct[:, None], groups))
    merged = np.split(ordered, firsts[:: max(1, len(rows) // 100)][1:])
    write_rows(folder + "index_to_sample_percentile_merged", sample_kind, merged)


def _wait(group: Any) -> None:
    if dist.is_initialized():
        dist.barrier(group)

"""Curriculum learning over metrics of the samples: each step draws from the samples that are easy enough for it.

[Note: Sweeps] A sweep is one permutation of all samples, a function of the seed and the sweep's number. Draws walk through it and
skip samples above the step's difficulty; at its end the next sweep begins. So no sample comes twice in a sweep, samples that become
eligible later join at once, and without a curriculum a sweep is an epoch. The state is the position of the walk, one integer
(sweep x samples + place in it), and the number of drawn samples, which determines the step. No file is written, and the number of
ranks does not matter: sample i of the walk goes to rank i % ranks.

With several metrics, a sample must be easy enough by all of them. "value": at most the difficulty. "percentile": among the first
difficulty / max_difficulty of the samples, ordered by the metric. A metric of clustering_type "single_cluster" selects nothing; its
difficulty is passed to `post_process`, which for example cuts sequences.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, default_collate

from slipstream.data.indexed import MMapIndexedDataset
from slipstream.data.schedules import CurriculumScheduler

_KEYS = "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics"


class OtherDataError(ValueError):
    """A saved position does not fit the loader's data. The loader keeps its current position."""


def generator_of(*numbers: int) -> torch.Generator:
    """A generator whose seed is a hash of the numbers.

    It seeds a DataLoader's workers. Otherwise a DataLoader draws from torch's global random state, so a resumed run, which opens
    its epoch a second time, would see other random numbers than the first run.
    """
    digest = hashlib.blake2b(" ".join(map(str, numbers)).encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big"))


class _Metric:
    """One metric: its schedule, and each sample's level, which may be at most `limit(difficulty)`."""

    def __init__(self, name: str, config: Mapping[str, Any], count: int) -> None:
        self.name = f"{_KEYS}.{name}"
        self.schedule = CurriculumScheduler(config, self.name)
        by_value = config["difficulty_type"] == "value"
        self.share = None if by_value else self.schedule.most  # the difficulty at which all samples are eligible
        self.level: NDArray[Any] | None = None
        if config["clustering_type"] != "single_cluster":
            self.level = self._levels(config, count, by_value)

    def _levels(self, config: Mapping[str, Any], count: int, by_value: bool) -> NDArray[Any]:
        index = self._read(config, "index_to_sample_path")
        samples = index.flat().astype(np.int64)
        if samples.size != count or not np.array_equal(np.sort(samples), np.arange(count)):
            raise ValueError(
                f"{self.name}.index_to_sample_path ({config['index_to_sample_path']}) names {samples.size} samples, and there are "
                f"{count}, each once: analyze this dataset anew (slipstream.data.DataAnalyzer)"
            )
        ordered: NDArray[Any] = np.arange(count)
        if by_value:
            values = self._read(config, "index_to_metric_path").flat()
            if values.size != len(index):
                raise ValueError(
                    f"{self.name}: {values.size} values in index_to_metric_path, {len(index)} rows in index_to_sample_path"
                )
            ordered = np.repeat(values, index.sizes)
        levels = np.empty_like(ordered)
        levels[samples] = ordered
        return levels

    def _read(self, config: Mapping[str, Any], key: str) -> MMapIndexedDataset:
        if config[key] is None:
            raise ValueError(
                f"{self.name}: clustering_type {config['clustering_type']!r} needs {key}, a file of DataAnalyzer without .idx"
            )
        return MMapIndexedDataset(config[key])

    def limit(self, difficulty: Any) -> Any:
        """The highest level that is eligible."""
        if self.share is None or self.level is None:
            return difficulty
        return len(self.level) - 1 if difficulty >= self.share else int(len(self.level) // self.share * difficulty) - 1


@dataclass(slots=True)
class CurriculumPlace:
    """Where the next draw begins."""

    position: int = 0  # [Note: Sweeps]
    consumed: int = 0  # samples drawn


class CurriculumOrder:
    """Which samples are drawn: a pure function of the place. metrics: the config's blocks, complete; empty: all samples.

    Raises ValueError.
    """

    def __init__(self, metrics: Mapping[str, Mapping[str, Any]], count: int, seed: int, step_samples: int) -> None:
        self.metrics = {name: _Metric(name, config, count) for name, config in metrics.items()}
        self.count, self.seed, self.step_samples = count, seed, step_samples
        self._order: tuple[Any, NDArray[np.int64]] = (None, np.empty(0, np.int64))  # (sweep, its permutation)
        self._eligible: tuple[Any, NDArray[np.int64]] = (None, np.empty(0, np.int64))

    def step(self, consumed: int) -> int:
        """The step, counted from 1, that draws next."""
        return consumed // self.step_samples + 1

    def set_schedules(self, functions: Mapping[str, Callable[[int], Any]]) -> None:
        """See `CurriculumLoader.set_schedules`."""
        for name, function in functions.items():
            if name not in self.metrics or self.metrics[name].schedule.kind != "custom":
                raise ValueError(f"{_KEYS} has no metric {name!r} of schedule_type 'custom', only {sorted(self.metrics)}")
            self.metrics[name].schedule.set_custom_get_difficulty(function)

    def difficulties(self, step: int) -> dict[str, Any]:
        return {name: metric.schedule.get_difficulty(step) for name, metric in self.metrics.items()}

    def draw(self, place: CurriculumPlace, number: int) -> tuple[NDArray[np.int64], CurriculumPlace]:
        """The next samples, all of one step, and the place after them. Raises ValueError if no sample is easy enough."""
        sweep, at = divmod(place.position, self.count)
        limits = tuple(self.metrics[name].limit(value) for name, value in self.difficulties(self.step(place.consumed)).items())
        drawn: list[NDArray[np.int64]] = []
        left = number
        while True:
            order, places = self._walk(sweep, limits)
            chosen = places[(begin := int(np.searchsorted(places, at))) : begin + left]
            drawn.append(order[chosen])
            left -= chosen.size
            if not left:
                return np.concatenate(drawn), CurriculumPlace(sweep * self.count + int(chosen[-1]) + 1, place.consumed + number)
            if not places.size:
                raise ValueError(self._none(self.step(place.consumed), limits))
            sweep, at = sweep + 1, 0

    def _walk(self, sweep: int, limits: tuple[Any, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """A sweep's permutation, and the places in it with eligible samples, ascending."""
        seed = self.seed + sweep
        if self._order[0] != seed:
            self._order = (seed, torch.randperm(self.count, generator=torch.Generator().manual_seed(seed)).numpy())
        order = self._order[1]
        if self._eligible[0] != (seed, limits):
            mask = np.ones(self.count, bool)
            for metric, limit in zip(self.metrics.values(), limits, strict=True):
                if metric.level is not None:
                    mask &= metric.level <= limit
            self._eligible = ((seed, limits), np.flatnonzero(mask[order]))
        return order, self._eligible[1]

    def state_of(self, place: CurriculumPlace) -> dict[str, int]:
        """The place for a checkpoint, the same for any number of ranks."""
        return {"position": place.position, "consumed_samples": place.consumed, "seed": self.seed, "length": self.count}

    def place_of(self, state: Mapping[str, Any]) -> CurriculumPlace:
        """The saved place; adopts its seed. Raises OtherDataError, with no change."""
        keys = ("position", "consumed_samples", "seed", "length")
        if any(not isinstance(state.get(key), int) for key in keys) or state["length"] != self.count:
            raise OtherDataError(
                f"saved data position: {dict(state)} is not one of a curriculum over this dataset's {self.count} samples"
            )
        self.seed = state["seed"]
        return CurriculumPlace(state["position"], state["consumed_samples"])

    def _none(self, step: int, limits: tuple[Any, ...]) -> str:
        reasons = [
            f"{name} at most {self.difficulties(step)[name]} (the easiest sample has {metric.level.min()})"
            if metric.share is None
            else f"{name} in the first {limit + 1} samples"
            for (name, metric), limit in zip(self.metrics.items(), limits, strict=True)
            if metric.level is not None
        ]
        return f"{_KEYS}: no sample of {self.count} is eligible in step {step}: {' and '.join(reasons)}; raise min_difficulty"


@dataclass(eq=False)
class CurriculumLoader:
    """The loader of one rank. `batch_size` counts the samples of this rank's micro-batch, `step_samples` all ranks' in a step.

    An iteration continues from the current place until all ranks have drawn `num_epochs` times the dataset's number of samples. The
    last batch is full. `state_dict` and `load_state_dict` do not depend on the number of ranks. Raises ValueError for bad metrics.
    """

    dataset: Any
    _: KW_ONLY
    metrics: Mapping[str, Mapping[str, Any]]
    step_samples: int
    num_epochs: int
    batch_size: int
    rank: int
    world_size: int
    collate_fn: Callable[[list[Any]], Any] | None
    drop_last: bool
    seed: int
    num_workers: int = 0
    pin_memory: bool = False
    workers: Mapping[str, Any] = field(default_factory=dict)  # further options of torch's DataLoader

    def __post_init__(self) -> None:
        if not (hasattr(self.dataset, "__getitem__") and hasattr(self.dataset, "__len__")) or not len(self.dataset):
            raise ValueError(
                f"{_KEYS}: a curriculum draws samples by number, and {type(self.dataset).__name__} has no samples, or no "
                "__getitem__ and __len__"
            )
        if not self.metrics:
            raise ValueError(f"{_KEYS} is empty: name a metric, or set curriculum_learning.enabled to false")
        self.order = CurriculumOrder(self.metrics, len(self.dataset), self.seed, self.step_samples)
        # Called with each batch and the state of its draw, like DeepSpeed's set_data_post_process_func
        self.post_process: Callable[[Any, dict[str, Any]], Any] | None = None
        self.position_is_own = False
        self._place = CurriculumPlace()
        self._loads = 0

    @property
    def global_batch_size(self) -> int:
        """Samples in one micro-batch of all ranks."""
        return self.batch_size * self.world_size

    @property
    def epoch(self) -> int:
        """The number of the sweep."""
        return self._place.position // len(self.dataset)

    def _left(self, place: CurriculumPlace) -> int:
        """Batches until the end."""
        samples = max(0, len(self.dataset) * self.num_epochs - place.consumed)
        return samples // self.global_batch_size if self.drop_last else -(-samples // self.global_batch_size)

    def __len__(self) -> int:
        return self._left(CurriculumPlace())

    def __iter__(self) -> Iterator[Any]:
        loads, states = -1, deque[CurriculumPlace]()
        batches: Iterator[Any] = iter(())
        while True:
            if loads != self._loads:  # a position was loaded meanwhile
                loads, states = self._loads, deque[CurriculumPlace]()
                batches = self._batches(states)
            try:
                batch = next(batches)
            except StopIteration:
                return
            before, self._place = self._place, states.popleft()
            yield batch if self.post_process is None else self.post_process(batch, self._told(before))

    def _batches(self, states: deque[CurriculumPlace]) -> Iterator[Any]:
        def windows(place: CurriculumPlace) -> Iterator[list[int]]:
            for _ in range(self._left(place)):
                drawn, place = self.order.draw(place, self.global_batch_size)
                states.append(place)
                yield drawn[self.rank :: self.world_size].tolist()

        return iter(
            DataLoader(
                self.dataset,
                batch_sampler=windows(self._place),
                collate_fn=self.collate_fn or default_collate,
                num_workers=self.num_workers,
                pin_memory=self.pin_memory,
                generator=generator_of(self.seed, self._place.position, self._place.consumed, self.rank),
                **self.workers,
            )
        )

    def set_schedules(self, functions: Mapping[str, Callable[[int], Any]]) -> None:
        """Give metrics of schedule_type "custom" their function of the step, by name. Raises ValueError for any other metric."""
        self.order.set_schedules(functions)

    def _told(self, place: CurriculumPlace) -> dict[str, Any]:
        step = self.order.step(place.consumed)
        return {"consumed_samples": place.consumed, "curriculum_step": step, "current_difficulties": self.order.difficulties(step)}

    def state_dict(self) -> dict[str, Any]:
        """The place of the next draw, the same on all ranks."""
        return self.order.state_of(self._place)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to a saved place and adopt its seed. Raises OtherDataError, with no change."""
        self._place = self.order.place_of(state)
        self.seed = self.order.seed
        self._loads += 1

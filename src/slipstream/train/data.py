"""The training data of one rank: a distributed loader with a position that can be saved and restored.

`StatefulLoader` shuffles a map-style dataset anew each epoch, distributes the samples round-robin and counts the samples consumed
by all ranks. So a checkpoint resumes at the next batch without reading the previous ones, also at another world size or batch size.
Every rank gets the same number of batches of the same sizes.

[Note: Dealing] An epoch is one permutation, the same on all ranks (seed + epoch, as in torch's DistributedSampler). Its sample i
goes to rank i % world, so a global batch is a contiguous window of the permutation, and the position within the epoch is one
integer: samples consumed by all ranks together. Without `drop_last` the end is padded with the epoch's first samples, fewer than
one per rank; with it the last incomplete global batch is dropped.

[Note: Uneven ranks] If the number of ranks does not divide a global batch (`window`), some ranks have one sample less than others
in each. The end of an epoch is then padded to a whole window, so that a rank has the same share in every window.

[Note: Iterable datasets] An `IterableDataset`, or any other iterable, must yield the same stream in every process. Each rank reads
all of it, in windows of a global batch, and keeps its own samples as above. Two or more workers would each read all of it, so they
raise an error. A dataset with the attribute `already_sharded = True` yields only this rank's (and worker's) samples and must itself
yield equal numbers of batches. To resume, the loader uses the dataset's `state_dict` and `load_state_dict` if it has them and runs
in this process; otherwise it reads and drops the samples before the position. The loader calls a dataset's `set_epoch`, if any.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from slipstream.data.sampler import OtherDataError, generator_of

Collate = Callable[[list[Any]], Any]


@runtime_checkable
class Stateful(Protocol):
    """An object whose position a checkpoint can hold."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> None: ...


@runtime_checkable
class SetsEpoch(Protocol):
    """A sampler or dataset that the loader reshuffles."""

    def set_epoch(self, epoch: int, /) -> None: ...


@dataclass(slots=True)
class Position:
    """A position of one iteration: all ranks together have consumed `samples` of `epoch`."""

    epoch: int = 0
    samples: int = 0


@dataclass(eq=False)
class StatefulLoader:
    """The loader of one rank. `batch_size` counts the samples of this rank's micro-batch, `window` those of all ranks (None: equal
    shares). Each `iter()` is one epoch, shuffled by its number unless `shuffle` is false. Raises ValueError if the dataset cannot
    be distributed.

    After `load_state_dict` the next `iter()` yields the rest of the saved epoch, and a running iteration continues from there.
    An epoch that was left early is not resumed: the next `iter()` starts a new one.
    """

    dataset: Any
    _: KW_ONLY
    batch_size: int
    rank: int
    world_size: int
    collate_fn: Collate | None  # None: torch's default
    drop_last: bool
    seed: int
    num_workers: int = 0
    pin_memory: bool = False
    shuffle: bool = True
    window: int | None = None
    workers: Mapping[str, Any] = field(default_factory=dict)  # further options of torch's DataLoader

    def __post_init__(self) -> None:
        dataset, size, world = self.dataset, self.batch_size, self.world_size
        if size < 1 or not 0 <= self.rank < world:
            raise ValueError(f"training data: needs batch_size ({size}) >= 1 and 0 <= rank ({self.rank}) < world_size ({world})")
        self.iterable = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
        if self.iterable:
            _check_iterable(dataset, self.num_workers, self.workers)
            if self.position_is_own and self.global_batch_size % world:
                raise ValueError(
                    f"training data: {world} ranks do not divide a global batch of {self.global_batch_size} samples "
                    "(slipstream.elastic_batch), and shards of an already_sharded dataset would end at different times; let the "
                    "loader shard it"
                )
        else:
            _check_indexable(dataset, size, world, self.global_batch_size if self.drop_last else 1, self.drop_last)
        self.collate_fn = self.collate_fn or default_collate
        self._position = Position()  # of the newest iteration, which advances it
        self._resume = False  # the next iter() starts at _position
        self._loads = 0
        self._kept: DataLoader[Any] | None = None  # keeps its workers alive

    @property
    def epoch(self) -> int:
        return self._position.epoch

    @property
    def position_is_own(self) -> bool:
        """Whether the position differs between ranks, because the dataset yields only this rank's samples."""
        return self.iterable and _is_sharded(self.dataset)

    @property
    def global_batch_size(self) -> int:
        """Samples in one micro-batch of all ranks."""
        return self.window or self.batch_size * self.world_size

    @property
    def padding(self) -> int:
        """The samples of an epoch's last batch are padded to a multiple of this number ([Note: Uneven ranks])."""
        window = self.global_batch_size
        return window if window % self.world_size else self.world_size

    def __len__(self) -> int:
        """Batches of an epoch on this rank. Raises TypeError for an iterable without a length."""
        samples = len(self.dataset)
        window = self.batch_size if self.position_is_own else self.global_batch_size
        return samples // window if self.drop_last else -(-samples // window)

    def __iter__(self) -> Iterator[Any]:
        resumed = self._resume
        if not resumed:
            left_early = self._position.samples > 0
            self._position = Position(epoch=self._position.epoch + left_early)
        return _Epoch(self, resumed=resumed)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch as integers, the same on all ranks, and the dataset's own state."""
        epoch, samples = self._position.epoch, self._position.samples
        if not self.iterable:
            if samples + (self.global_batch_size if self.drop_last else 1) > len(self.dataset):
                epoch, samples = epoch + 1, 0
            return {"epoch": epoch, "samples": samples, "seed": self.seed, "length": len(self.dataset)}
        state: dict[str, Any] = {"epoch": epoch, "samples": samples, "seed": self.seed}
        if self._dataset_keeps_position():
            state["dataset"] = self.dataset.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to a saved position and adopt its seed; batch size and world size may differ. Raises OtherDataError, unchanged."""
        epoch, samples, seed = (_natural(state, key) for key in ("epoch", "samples", "seed"))
        length = None if self.iterable else len(self.dataset)
        if state.get("length") != length:
            saved, present = ("no length" if n is None else f"{n} samples" for n in (state.get("length"), length))
            raise OtherDataError(f"saved data position: its dataset has {saved} and this dataset has {present}")
        if self._dataset_keeps_position():
            if "dataset" not in state:
                raise OtherDataError(f"saved data position: it has no state of the dataset, only {sorted(state)}")
            if isinstance(self.dataset, SetsEpoch):
                self.dataset.set_epoch(epoch)
            self.dataset.load_state_dict(state["dataset"])
        self.seed = seed
        self._position = Position(epoch, samples)
        self._resume = True
        self._loads += 1

    def _dataset_keeps_position(self) -> bool:
        return self.iterable and self.num_workers == 0 and isinstance(self.dataset, Stateful)

    def _batches(self, position: Position, *, resumed: bool) -> Iterator[Any]:
        """The batches from `position` to the end of its epoch."""
        options: dict[str, Any] = {
            "collate_fn": self.collate_fn,
            "num_workers": self.num_workers,
            "pin_memory": self.pin_memory,
            "generator": generator_of(self.seed, position.epoch, position.samples, self.rank),
            **self.workers,
        }
        if not self.iterable:
            batches = _RankBatches(self._indices(position), self.batch_size)
            if (loader := self._kept) is None:
                loader = DataLoader(self.dataset, batch_sampler=batches, **options)
                self._kept = loader if loader.persistent_workers else None
            else:
                loader.batch_sampler.indices = batches.indices  # type: ignore[union-attr]
            return iter(loader)
        positioned = resumed and self._dataset_keeps_position()
        if isinstance(self.dataset, SetsEpoch) and not positioned:
            self.dataset.set_epoch(position.epoch)
        skip = 0 if positioned else position.samples
        if not _is_sharded(self.dataset):
            options["worker_init_fn"] = partial(_start_worker, options.get("worker_init_fn"))
            return iter(DataLoader(_RankStream(self, skip), batch_size=None, **options))
        own = DataLoader(self.dataset, batch_size=self.batch_size, drop_last=self.drop_last, **options)
        return itertools.islice(own, skip // self.global_batch_size, None)

    def _indices(self, position: Position) -> Tensor:
        """This rank's samples of the epoch from `position` on ([Note: Dealing])."""
        start, count = position.samples, len(self.dataset)
        left = max(0, count - start)
        unit = self.global_batch_size if self.drop_last else self.padding
        stop = start + (left // unit if self.drop_last else -(-left // unit)) * unit
        order = torch.arange(count)
        if self.shuffle:
            order = torch.randperm(count, generator=torch.Generator().manual_seed(self.seed + position.epoch))
        dealt = torch.arange(start, stop)
        own = dealt[(dealt - start) % self.global_batch_size % self.world_size == self.rank]
        return order[own % count]


class RepeatingLoader:
    """An endless iterator over any loader: when an epoch ends, the next one starts.

    It reshuffles a loader whose `sampler` has `set_epoch` (torch's DistributedSampler). Its state is the loader's.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.epoch = 0  # epochs that ended in this iterator
        self._batches: Iterator[Any] | None = None

    def __iter__(self) -> RepeatingLoader:
        return self

    def __len__(self) -> int:
        """Batches of one epoch."""
        return len(self.loader)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        for _ in range(2):  # the remainder of an epoch may be empty, a full epoch may not
            if self._batches is None:
                self._batches = iter(self.loader)
            try:
                return next(self._batches)
            except StopIteration:
                self._batches = None
                self.epoch += 1
                sampler = getattr(self.loader, "sampler", None)
                if isinstance(sampler, SetsEpoch):
                    sampler.set_epoch(self.epoch)
        raise ValueError(
            f"RepeatingLoader: the {type(self.loader).__name__} yields no batch; pass a loader that can be iterated more than "
            f"once, not a generator"
        )

    def state_dict(self) -> dict[str, Any]:
        return self._stateful().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._stateful().load_state_dict(state)
        self._batches = None

    def _stateful(self) -> Stateful:
        if not isinstance(self.loader, Stateful):
            raise TypeError(f"RepeatingLoader: a {type(self.loader).__name__} has no state_dict and load_state_dict")
        return self.loader


class _Epoch:
    """One iteration over a StatefulLoader; if a position is loaded meanwhile, it continues there."""

    def __init__(self, loader: StatefulLoader, *, resumed: bool) -> None:
        self.loader = loader
        self._open(resumed=resumed)

    def _open(self, *, resumed: bool) -> None:
        self.loads = self.loader._loads
        self.position = self.loader._position
        self.batches = self.loader._batches(self.position, resumed=resumed)
        self.loader._resume = False

    def __iter__(self) -> _Epoch:
        return self

    def __next__(self) -> Any:
        if self.loads != self.loader._loads:
            self._open(resumed=True)
        position = self.position
        try:
            batch = next(self.batches)
        except StopIteration:
            self.batches = iter(())
            if position.samples > 0:
                position.epoch, position.samples = position.epoch + 1, 0
            raise
        position.samples += self.loader.global_batch_size
        return batch


@dataclass(slots=True)
class _RankBatches:
    """A lazy batch sampler: lists of at most `batch_size` of `indices`."""

    indices: Tensor  # int64 1-D
    batch_size: int

    def __len__(self) -> int:
        return -(-self.indices.numel() // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        return (part.tolist() for part in self.indices.split(self.batch_size) if part.numel() > 0)


class _RankStream(IterableDataset[list[Any]]):
    """This rank's batches, lists of samples, from a stream that every rank reads."""

    def __init__(self, loader: StatefulLoader, skip: int) -> None:
        self.dataset = loader.dataset
        self.window, self.padding, self.drop_last = loader.global_batch_size, loader.padding, loader.drop_last
        self.rank, self.world_size = loader.rank, loader.world_size
        self.skip = skip

    def __iter__(self) -> Iterator[list[Any]]:
        stream = itertools.islice(iter(self.dataset), self.skip, None)
        while window := list(itertools.islice(stream, self.window)):
            if len(window) < self.window and self.drop_last:
                return
            stop = -(-len(window) // self.padding) * self.padding
            yield [window[i % len(window)] for i in range(self.rank, stop, self.world_size)]


def _start_worker(init: Callable[[int], Any] | None, worker: int) -> None:
    """Make `get_worker_info().dataset` the user's dataset instead of the stream around it."""
    info: Any = get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.dataset)  # torch forbids `info.dataset =`
    if init is not None:
        init(worker)


def _check_iterable(dataset: Any, num_workers: int, workers: Mapping[str, Any]) -> None:
    kind = type(dataset).__name__
    if workers.get("persistent_workers"):
        raise ValueError(
            f"training data: persistent_workers would keep the first epoch of the iterable {kind}; drop it, and each epoch starts "
            "workers anew"
        )
    if not hasattr(dataset, "__iter__"):
        raise ValueError(f"training data: {kind} has neither __getitem__ nor __iter__")
    if num_workers > 1 and not _is_sharded(dataset):
        raise ValueError(
            f"training data: with num_workers={num_workers} each worker would read all of the iterable {kind}: use at most 1, "
            f"or shard it by rank and worker yourself and set already_sharded = True"
        )


def _check_indexable(dataset: Any, batch_size: int, world_size: int, fewest: int, drop_last: bool) -> None:
    if not hasattr(dataset, "__len__"):
        kind = type(dataset).__name__
        raise ValueError(f"training data: {kind} has __getitem__ but no __len__; add it, or use an IterableDataset")
    if len(dataset) < fewest:
        raise ValueError(
            f"training data: {len(dataset)} samples are too few for a batch of {batch_size} on each of {world_size} ranks "
            f"(drop_last={drop_last})"
        )


def _is_sharded(dataset: Any) -> bool:
    return getattr(dataset, "already_sharded", False) is True


def _natural(state: Mapping[str, Any], key: str) -> int:
    value = state.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"saved data position: {key} is {value!r}; it must be an integer >= 0")
    return value

"""The loader by its properties: each sample once an epoch, equal ranks, exact resumption."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from slipstream.train.data import RepeatingLoader, StatefulLoader


class Numbers(Dataset[int]):
    """Sample i is i; remembers what was read."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


class Stream(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length
        self.read: list[int] = []

    def __iter__(self) -> Iterator[int]:
        for i in range(self.length):
            self.read.append(i)
            yield i


class StatefulStream(Stream):
    """Keeps its own position, as Hugging Face's streaming datasets do."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.at, self.start, self.epoch = 0, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        start, self.start = self.start, 0
        for i in range(start, self.length):
            self.at = i + 1
            self.read.append(i)
            yield i + 1000 * self.epoch

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["at"]


class OwnShard(Stream):
    already_sharded = True


def loader(dataset: Any, batch: int = 2, rank: int = 0, world: int = 1, drop_last: bool = False, **options: Any) -> StatefulLoader:
    options = {"collate_fn": list, "seed": 7, **options}
    return StatefulLoader(dataset, batch_size=batch, rank=rank, world_size=world, drop_last=drop_last, **options)


def ranks(dataset_of: type[Any], n: int, batch: int, world: int, drop_last: bool) -> list[StatefulLoader]:
    return [loader(dataset_of(n), batch, rank, world, drop_last) for rank in range(world)]


sizes = {"n": st.integers(1, 60), "batch": st.integers(1, 7), "world": st.integers(1, 5), "drop_last": st.booleans()}


@given(kind=st.sampled_from([Numbers, Stream]), **sizes)
def test_each_sample_once_an_epoch(kind: type[Any], n: int, batch: int, world: int, drop_last: bool) -> None:
    assume(not drop_last or n >= batch * world)
    loaders = ranks(kind, n, batch, world, drop_last)
    orders = []
    for epoch in range(2):
        assert {one.epoch for one in loaders} == {epoch}
        batches = [list(one) for one in loaders]
        shapes = [[len(b) for b in rank] for rank in batches]
        assert shapes == [shapes[0]] * world  # equal batches on every rank
        if kind is Numbers:
            assert len(shapes[0]) == len(loaders[0])
        counts = Counter(i for rank in batches for b in rank for i in b)
        if drop_last:
            assert set(counts.values()) == {1}
            assert len(counts) == n // (batch * world) * batch * world
        else:
            assert set(counts) == set(range(n))
            assert sum(counts.values()) - n < world  # padding
        orders.append([i for step in zip(*batches, strict=True) for b in step for i in b])
    if kind is Numbers and n > 20:
        assert orders[0] != orders[1]  # reshuffled


@given(kind=st.sampled_from([Numbers, Stream, StatefulStream]), stop=st.integers(0, 80), **sizes)
def test_resume_is_exact(kind: type[Any], stop: int, n: int, batch: int, world: int, drop_last: bool) -> None:
    """Stopped anywhere, also at the end of an epoch: the rest is what an unbroken run would see."""
    assume(not drop_last or n >= batch * world)
    for rank in {0, world - 1}:
        unbroken = RepeatingLoader(loader(kind(n), batch, rank, world, drop_last))
        expected = [next(unbroken) for _ in range(stop + 10)]
        first = RepeatingLoader(loader(kind(n), batch, rank, world, drop_last))
        for _ in range(stop):
            next(first)
        state = json.loads(json.dumps(first.state_dict()))
        second = RepeatingLoader(loader(kind(n), batch, rank, world, drop_last, seed=99))
        second.load_state_dict(state)
        assert [next(second) for _ in range(10)] == expected[stop:]


@given(
    n=st.integers(1, 60),
    before=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    after=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    steps=st.integers(0, 20),
)
def test_resume_at_another_size(n: int, before: tuple[int, int], after: tuple[int, int], steps: int) -> None:
    """At another batch size and world, the rest of the epoch is what has not been seen."""
    (batch, world), (new_batch, new_world) = before, after
    assume(steps < -(-n // (batch * world)))
    first: list[int] = []
    states = []
    for part in ranks(Numbers, n, batch, world, False):
        iterator = iter(part)
        first += [i for _ in range(steps) for i in next(iterator)]
        states.append(part.state_dict())
    assert states == [states[0]] * world
    remaining: list[int] = []
    lengths = set()
    for part in ranks(Numbers, n, new_batch, new_world, False):
        part.load_state_dict(states[0])
        batches = list(part)
        lengths.add(tuple(len(b) for b in batches))
        remaining += [i for b in batches for i in b]
        assert part.epoch == 1
    assert len(lengths) == 1
    assert set(first) | set(remaining) == set(range(n))
    assert len(first) + len(remaining) - n < new_world


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 7, 12])
def test_order_is_that_of_torch(world: int, n: int) -> None:
    for rank in range(world):
        batches = loader(Numbers(n), 1, rank, world, seed=3)
        sampler: DistributedSampler[int] = DistributedSampler(Numbers(n), world, rank, shuffle=True, seed=3)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            assert [b[0] for b in batches] == list(sampler)


def test_resume_reads_no_skipped_sample() -> None:
    first = loader(Numbers(20), 2, 1, 2)
    iterator = iter(first)
    for _ in range(3):
        next(iterator)
    dataset = Numbers(20)
    resumed = loader(dataset, 2, 1, 2)
    resumed.load_state_dict(first.state_dict())
    remaining = list(resumed)
    assert len(remaining) == 2
    assert dataset.read == [i for b in remaining for i in b]
    stream = StatefulStream(10)
    resumed = loader(stream, 2)
    resumed.load_state_dict({"epoch": 0, "samples": 4, "seed": 7, "dataset": {"at": 4}})
    assert list(resumed) == [[4, 5], [6, 7], [8, 9]]
    assert stream.read == [4, 5, 6, 7, 8, 9]


def test_iteration_leaves_the_random_state_alone() -> None:
    """Else a resumed run, which opens its epoch anew, would draw other dropout masks."""
    for dataset in (Numbers(6), Stream(6), OwnShard(6)):
        state = torch.get_rng_state()
        assert len(list(loader(dataset))) == 3
        assert torch.equal(state, torch.get_rng_state())


def test_an_epoch_left_early_is_not_taken_up_again() -> None:
    batches = loader(Numbers(30), 2)
    first = next(iter(batches))
    assert batches.epoch == 0
    second = list(batches)
    assert len(second) == 15
    assert second[0] != first
    assert batches.epoch == 2  # the next one


def test_loading_moves_an_iteration_under_way() -> None:
    """What engine.load_checkpoint does to a loader that the script already wraps."""
    batches = loader(Numbers(12), 2)
    wrapped = RepeatingLoader(batches)
    early = batches.state_dict()
    first = [next(wrapped) for _ in range(8)]
    batches.load_state_dict(early)
    assert [next(wrapped) for _ in range(8)] == first


def test_states_say_the_next_epoch_at_an_epochs_end() -> None:
    batches = loader(Numbers(7), 2, 0, 1, drop_last=True)
    iterator = iter(batches)
    for _ in range(3):
        next(iterator)
    assert batches.state_dict() == {"epoch": 1, "samples": 0, "seed": 7, "length": 7}


@pytest.mark.parametrize("kind", [Numbers, Stream, StatefulStream, OwnShard])
def test_workers_change_nothing(kind: type[Any]) -> None:
    dataset = kind(9)
    expected = list(loader(dataset, 2, 1, 2))
    workers = loader(dataset, 2, 1, 2, num_workers=1)
    assert list(workers) == expected
    second = loader(dataset, 2, 1, 2, num_workers=1)
    second.load_state_dict({"epoch": 0, "samples": 4, "seed": 7} | ({"length": 9} if kind is Numbers else {}))
    assert list(second) == expected[1:]


class PerWorker(Stream):
    first = 0

    def __iter__(self) -> Iterator[int]:
        yield from (self.first + i for i in range(self.length))


def start_at_100(worker: int) -> None:
    dataset = get_worker_info().dataset  # type: ignore[union-attr]
    assert isinstance(dataset, PerWorker), type(dataset)
    dataset.first = 100


def test_a_worker_that_starts_gets_the_users_dataset() -> None:
    batches = loader(PerWorker(4), 2, 1, 2, num_workers=1, workers={"worker_init_fn": start_at_100})
    assert list(batches) == [[101, 103]]


def test_streams_of_their_own_shard() -> None:
    batches = loader(OwnShard(5), 2, 1, 3)
    assert list(batches) == [[0, 1], [2, 3], [4]]
    assert list(loader(OwnShard(5), 2, 1, 3, drop_last=True)) == [[0, 1], [2, 3]]
    iterator = iter(batches)
    next(iterator)
    resumed = loader(OwnShard(5), 2, 1, 3)
    resumed.load_state_dict(batches.state_dict())
    assert list(resumed) == [[2, 3], [4]]


def test_streams_are_told_the_epoch() -> None:
    batches = loader(StatefulStream(2), 2)
    assert [list(batches), list(batches)] == [[[0, 1]], [[1000, 1001]]]


def test_tensors_are_stacked_by_default() -> None:
    (batch,) = loader([{"x": torch.ones(3), "y": 1}] * 4, 4, collate_fn=None)
    assert batch["x"].shape == (4, 3)
    assert batch["y"].tolist() == [1] * 4


def test_plain_iterables() -> None:
    assert list(loader(iter([1, 2, 3]), 2)) == [[1, 2], [3]]
    with pytest.raises(ValueError, match="yields no batch"):
        repeating = RepeatingLoader(loader(iter([1, 2]), 2))
        for _ in range(2):
            next(repeating)


def test_lengths() -> None:
    assert len(loader(Numbers(7), 2, 0, 2)) == 2
    assert len(loader(Numbers(7), 2, 0, 2, drop_last=True)) == 1
    with pytest.raises(TypeError):
        len(loader(Stream(7)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: loader(Numbers(4), 0), "batch_size"),
        (lambda: loader(Numbers(4), 1, 2, 2), "rank"),
        (lambda: loader(Numbers(0)), "0 samples are too few for a batch"),
        (lambda: loader(Numbers(3), 2, 0, 2, drop_last=True), "3 samples are too few for a batch of 2 on each of 2"),
        (lambda: loader(Stream(4), num_workers=2), "already_sharded"),
        (lambda: loader(4), "neither __getitem__ nor __iter__"),
    ],
    ids=range(6),
)
def test_refusals(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "epoch is None"),
        ({"epoch": 0, "samples": -1, "seed": 0, "length": 8}, "samples is -1"),
        ({"epoch": 0, "samples": 0, "seed": True, "length": 8}, "seed is True"),
        ({"epoch": 0, "samples": 0, "seed": 0, "length": 9}, "has 9 samples and this dataset has 8"),
        ({"epoch": 0, "samples": 0, "seed": 0}, "has no length and this dataset has 8"),
    ],
    ids=range(5),
)
def test_bad_states_change_nothing(state: dict[str, Any], message: str) -> None:
    batches = loader(Numbers(8), 2)
    next(iter(batches))
    before = batches.state_dict()
    with pytest.raises(ValueError, match=message):
        batches.load_state_dict(state)
    assert batches.state_dict() == before


def test_stateful_streams_need_their_state() -> None:
    with pytest.raises(ValueError, match="it has no state of the dataset"):
        loader(StatefulStream(4)).load_state_dict({"epoch": 0, "samples": 0, "seed": 0})


def test_repeating_loader_reshuffles_torchs_loaders() -> None:
    sampler: DistributedSampler[int] = DistributedSampler(Numbers(40), 1, 0, shuffle=True)
    repeating = RepeatingLoader(DataLoader(Numbers(40), batch_size=40, sampler=sampler))
    first, second = next(repeating), next(repeating)
    assert sorted(first.tolist()) == sorted(second.tolist())
    assert first.tolist() != second.tolist()
    assert len(repeating) == 1
    with pytest.raises(TypeError, match="has no state_dict"):
        repeating.state_dict()

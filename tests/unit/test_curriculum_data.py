"""A curriculum over metrics of the samples, and micro-batches filled by tokens: orders by brute force, resumption, keys."""

import itertools
import json
import logging
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import slipstream
from slipstream.compat import engine as compat
from slipstream.data.batching import VariableBatchSizeLR, batch_by_seqlens, lr_scheduler_for_variable_batch_size, scale_lr
from slipstream.data.indexed import write_rows
from slipstream.data.sampler import CurriculumLoader
from slipstream.train.loaders import get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed
from tests.unit.test_data import Numbers, Stream


def metric(folder: Path, values: list[int], name: str = "rarity", **more: Any) -> dict[str, Any]:
    """The block of a metric whose files have these values of samples 0, 1, ..."""
    distinct = sorted(set(values))
    write_rows(f"{folder}/{name}_index_to_metric", np.int64, [np.array([value]) for value in distinct])
    samples = [np.flatnonzero(np.array(values) == value) for value in distinct]
    write_rows(f"{folder}/{name}_index_to_sample", np.int64, samples)
    return {
        "index_to_sample_path": f"{folder}/{name}_index_to_sample",
        "index_to_metric_path": f"{folder}/{name}_index_to_metric",
        "difficulty_type": "value",
        "clustering_type": "schedule_based",
        "min_difficulty": 2,
        "max_difficulty": 10,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 8, "difficulty_step": 1},
        **more,
    }


def loader(metrics: dict[str, Any], count: int, world: int = 1, rank: int = 0, micro: int = 2, **more: Any) -> CurriculumLoader:
    options = {"step_samples": 8, "num_epochs": 5, "drop_last": False, "seed": 3, "collate_fn": list, **more}
    return CurriculumLoader(Numbers(count), metrics=metrics, batch_size=micro, rank=rank, world_size=world, **options)


def windows(loaders: list[CurriculumLoader]) -> Iterator[list[int]]:
    """The samples of all ranks, micro-batch by micro-batch, in the order of the walk."""
    for parts in zip(*loaders, strict=True):
        yield [part[i] for i in range(len(parts[0])) for part in parts]


VALUES = [i * 5 % 11 for i in range(44)]


def test_samples_are_easy_enough(tmp_path: Path) -> None:
    one = loader({"rarity": metric(tmp_path, VALUES)}, 44)
    drawn = [sample for batch in one for sample in batch]
    assert len(drawn) == 5 * 44 and len(one) == 110
    for at in range(0, len(drawn), 8):
        limit = min(10, 2 + (at // 8 + 1))
        assert max(VALUES[sample] for sample in drawn[at : at + 8]) <= limit
    assert max(VALUES[sample] for sample in drawn[16:24]) > 3  # samples join as soon as they may
    late = drawn[-44 * 3 :]
    assert max(Counter(late).values()) <= 4 and set(late) == set(range(44))  # epochs, once all samples are eligible


def test_a_sweep_has_a_sample_once(tmp_path: Path) -> None:
    one = loader({"rarity": metric(tmp_path, VALUES)}, 44, micro=1)
    sweeps: dict[int, list[int]] = {}
    for batch in one:
        sweep = (one.state_dict()["position"] - 1) // 44
        sweeps.setdefault(sweep, []).extend(batch)
    assert list(sweeps) == list(range(len(sweeps))) and len(sweeps) > 5
    assert all(len(set(samples)) == len(samples) for samples in sweeps.values())
    assert {len(samples) for samples in list(sweeps.values())[-3:-1]} == {44}


@settings(max_examples=30)
@given(stop=st.integers(0, 12), first=st.sampled_from([(1, 8), (2, 4), (4, 1)]), then=st.sampled_from([(1, 2), (2, 2), (4, 2)]))
def test_resumed_on_other_ranks(tmp_path_factory: Any, stop: int, first: tuple[int, int], then: tuple[int, int]) -> None:
    """Another number of ranks and another micro-batch: the samples of each step are the same, in the same order."""
    assume(stop * first[0] * first[1] % (then[0] * then[1]) == 0)  # else micro-batches would lie across the ends of steps
    folder = tmp_path_factory.mktemp("data")
    metrics = {"rarity": metric(folder, VALUES), "size": metric(folder, VALUES[::-1], "size", min_difficulty=9)}

    def all_ranks(sizes: tuple[int, int], state: Any = None) -> list[CurriculumLoader]:
        loaders = [loader(metrics, 44, sizes[0], rank, sizes[1]) for rank in range(sizes[0])]
        for one in loaders if state is not None else ():
            one.load_state_dict(state)
        return loaders

    unbroken = [sample for window in windows(all_ranks((1, 1))) for sample in window]
    before = all_ranks(first)
    drawn: list[int] = []
    running = windows(before)
    for _ in range(stop):
        drawn += next(running)
    states = [json.loads(json.dumps(one.state_dict())) for one in before]
    assert states == [states[0]] * len(states)
    drawn += [sample for window in windows(all_ranks(then, states[0])) for sample in window]
    assert drawn[:220] == unbroken
    assert len(drawn) - 220 < first[0] * first[1] + then[0] * then[1]


def test_several_metrics_and_percentiles(tmp_path: Path) -> None:
    other = [i % 4 for i in range(44)]
    percent = metric(tmp_path, VALUES, difficulty_type="percentile", min_difficulty=25, max_difficulty=100)
    percent["schedule_config"] = {"total_curriculum_step": 100, "difficulty_step": 25}
    small = metric(
        tmp_path,
        other,
        "small",
        min_difficulty=1,
        max_difficulty=1,
        schedule_config={"total_curriculum_step": 1, "difficulty_step": 1},
    )
    one = loader({"rarity": percent, "small": small, "told": {**small, "clustering_type": "single_cluster"}}, 44, micro=8)
    easiest = set(np.argsort(VALUES, kind="stable")[: 44 // 100 * 25].tolist())
    assert easiest == set()  # 44 samples are fewer than one for a percentile, as in DeepSpeed
    with pytest.raises(
        ValueError, match="no sample of 44 is eligible in step 1: rarity in the first 0 samples and small at most 1"
    ):
        next(iter(one))
    percent |= {"min_difficulty": 2, "max_difficulty": 4, "schedule_config": {"total_curriculum_step": 100, "difficulty_step": 2}}
    one = loader({"rarity": percent, "small": small}, 44, micro=8)
    easiest = set(np.argsort(VALUES, kind="stable")[:22].tolist())
    assert set(next(iter(one))) <= easiest & {i for i in range(44) if other[i] <= 1}


def test_schedules_of_metrics(tmp_path: Path) -> None:
    def steps(**more: Any) -> list[Any]:
        one = loader({"rarity": metric(tmp_path, VALUES, **more)}, 44, micro=8)
        return [one.order.difficulties(step)["rarity"] for step in range(1, 9)]

    root = {"total_curriculum_step": 8, "difficulty_step": 2, "root_degree": 2}
    assert steps() == [3, 4, 5, 6, 7, 8, 9, 10]
    assert steps(min_difficulty=6, max_difficulty=7) == [6] * 7 + [7]
    expected = [max(2, math.floor((i / 8) ** 0.5 * 8 + 2) // 2 * 2) for i in range(1, 9)]
    assert steps(schedule_type="fixed_root", schedule_config=root) == expected
    discrete = {"difficulty": [2, 5, 10], "max_step": [3, 5]}
    assert steps(schedule_type="fixed_discrete", schedule_config=discrete) == [2, 2, 2, 5, 5, 10, 10, 10]


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"index_to_sample_path": None}, "rarity: clustering_type 'schedule_based' needs index_to_sample_path"),
        ({"index_to_metric_path": "/nowhere/x"}, "there is no file /nowhere/x.idx"),
        ({"schedule_config": {}}, "curriculum_metrics.rarity: schedule_type 'fixed_linear' needs schedule_config.total"),
        ({"min_difficulty": 11}, r"rarity: min_difficulty \(11\) is above"),
    ],
)
def test_bad_metrics(tmp_path: Path, more: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        loader({"rarity": metric(tmp_path, VALUES, **more)}, 44)


def test_data_without_the_metrics(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="names 44 samples, and there are 45"):
        loader({"rarity": metric(tmp_path, VALUES)}, 45)
    with pytest.raises(ValueError, match="curriculum_metrics is empty"):
        loader({}, 44)
    with pytest.raises(ValueError, match="Stream has no samples, or no __getitem__"):
        options: Any = {"step_samples": 1, "num_epochs": 1, "batch_size": 1, "rank": 0, "world_size": 1, "collate_fn": None}
        CurriculumLoader(Stream(44), metrics={"x": {}}, drop_last=False, seed=0, **options)
    one = loader({"rarity": metric(tmp_path, [value + 7 for value in VALUES])}, 44)
    with pytest.raises(ValueError, match=r"rarity at most 3 \(the easiest sample has 7\); raise min_difficulty"):
        next(iter(one))
    state = one.state_dict()
    for bad in ({**state, "length": 4}, {"epoch": 1, "samples": 2, "seed": 0, "length": 44}):
        with pytest.raises(ValueError, match="is not one of a curriculum over this dataset's 44 samples"):
            one.load_state_dict(bad)
    assert one.state_dict() == state


def test_a_loaded_place_moves_a_running_iteration(tmp_path: Path) -> None:
    one = loader({"rarity": metric(tmp_path, VALUES)}, 44)
    running = iter(one)
    next(running)
    state = one.state_dict()
    rest = [next(running) for _ in range(5)]
    one.load_state_dict(state)
    assert [next(running) for _ in range(5)] == rest
    again = loader({"rarity": metric(tmp_path, VALUES)}, 44, num_workers=2)
    again.load_state_dict(state)
    assert list(itertools.islice(again, 5)) == rest
    assert again.state_dict() == {**state, "consumed_samples": 12, "position": again.state_dict()["position"]}


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.seen = nn.Embedding(50, 4), list[Any]()

    def forward(self, ids: Tensor) -> Tensor:
        self.seen.append(ids.tolist())
        return self.table(ids).square().mean()


def config(**efficiency: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "data_efficiency": {"enabled": True, "seed": 5, **efficiency},
    }


def sampled(metrics: dict[str, Any], **more: Any) -> dict[str, Any]:
    return config(data_sampling={"enabled": True, "curriculum_learning": {"enabled": True, "curriculum_metrics": metrics}, **more})


def run(engine: Any, batches: Iterator[Any], steps: int) -> list[Any]:
    for _ in range(2 * steps):
        engine.backward(engine(next(batches)))
        engine.step()
    seen = [sample for batch in engine.module.seen for sample in batch]
    engine.module.seen.clear()
    return seen


def test_the_loader_follows_the_config(tmp_path: Path) -> None:
    """Each key of the block, by its effect on the loader; and a checkpoint."""
    block = metric(tmp_path, VALUES)
    engine, _, data, _ = compat.initialize(
        model=Words(), config=sampled({"rarity": block}, num_epochs=2), training_data=Numbers(44)
    )
    assert isinstance(data, CurriculumLoader) and len(data) == 22
    batches = iter(data)
    assert max(VALUES[sample] for sample in run(engine, batches, 1)) <= 3
    engine.save_checkpoint(str(tmp_path))
    expected = run(engine, batches, 3)
    engine.load_checkpoint(str(tmp_path))
    assert run(engine, iter(data), 3) == expected
    assert engine.curriculum_learning_enabled() and engine.data_sampling_enabled() and engine.data_efficiency_enabled()

    def drawn(raw: dict[str, Any], steps: int = 3) -> list[Any]:
        other, _, loaded, _ = compat.initialize(model=Words(), config=raw, training_data=Numbers(44))
        try:
            return run(other, iter(loaded), steps)
        finally:
            other.destroy()

    base = sampled({"rarity": block})
    usual = drawn(base)
    assert drawn({**base, "data_efficiency": base["data_efficiency"] | {"seed": 6}}) != usual
    assert max(VALUES[i] for i in drawn(sampled({"rarity": block | {"clustering_type": "single_cluster"}}))) == 10
    percent = block | {"difficulty_type": "percentile", "min_difficulty": 5, "index_to_metric_path": None}
    assert (
        max(VALUES[i] for i in drawn(sampled({"rarity": percent}), 1))
        == VALUES[np.argsort(VALUES, kind="stable")[44 // 10 * 5 - 1]]
    )
    with_workers = sampled({"rarity": block}, num_workers=1)
    assert drawn(with_workers, 1) == usual[:8]
    plain = config(data_sampling={"enabled": False})
    assert sorted(drawn(plain, 5)) != sorted(drawn(base, 5)) and len(set(drawn(plain, 5))) == 40  # an epoch of all samples
    other, *_ = compat.initialize(model=Words(), config=with_workers)
    assert other.deepspeed_io(Numbers(44)).num_workers == 1
    assert not isinstance(other.deepspeed_io(Numbers(44), route="eval"), CurriculumLoader)
    other.destroy()
    engine.destroy()


def test_functions_of_the_user(tmp_path: Path) -> None:
    block = metric(tmp_path, VALUES, schedule_type="custom", schedule_config={})
    engine, _, data, _ = compat.initialize(model=Words(), config=sampled({"rarity": block}), training_data=Numbers(44))
    with pytest.raises(ValueError, match="rarity: schedule_type 'custom' needs"):
        next(iter(data))
    with pytest.raises(ValueError, match="has no metric 'length' of schedule_type 'custom', only"):
        engine.set_custom_curriculum_learning_schedule({"length": lambda step: step})
    engine.set_custom_curriculum_learning_schedule({"rarity": lambda step: 1 if step < 3 else 10})
    told = []
    engine.set_data_post_process_func(lambda batch, state: told.append(state) or batch)
    seen = run(engine, iter(data), 3)
    assert max(VALUES[i] for i in seen[:16]) == 1 and max(VALUES[i] for i in seen[16:]) > 1
    assert [(state["curriculum_step"], state["current_difficulties"]["rarity"]) for state in told] == [
        *((step, limit) for step, limit in ((1, 1), (2, 1), (3, 10)) for _ in range(2))
    ]
    engine.destroy()
    engine, *_ = compat.initialize(model=Words(), config=config())
    with pytest.raises(ValueError, match="has no loader with a curriculum"):
        engine.set_data_post_process_func(lambda batch, state: batch)
    engine.destroy()


# Micro-batches by tokens


def brute_force(lengths: list[int], most: int, least: int, top: int | None, together: int) -> list[list[int]]:
    """The largest multiple of `together` samples that deals into valid micro-batches, again and again."""
    groups: list[list[int]] = []
    at = 0
    while at < len(lengths):
        best = at
        for stop in range(at + together, len(lengths) + 1, together):
            parts = [lengths[at + i : stop : together] for i in range(together)]
            if all(least <= len(part) <= (top or 999) and sum(part) <= most for part in parts):
                best = stop
        if best == at:
            break
        groups += [list(range(at + i, best, together)) for i in range(together)]
        at = best
    return groups


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=40),
    least=st.integers(1, 3),
    top=st.sampled_from([None, 3, 5]),
    batch=st.integers(1, 3),
    same=st.booleans(),
)
def test_micro_batches_are_filled(lengths: list[int], least: int, top: int | None, batch: int, same: bool) -> None:
    groups = brute_force(lengths, 15, least, top, batch if same else 1)
    count = len(groups) // batch
    if not count:
        with pytest.raises(ValueError, match=r"samples fill .* micro-batches of 15 tokens, and a batch needs"):
            batch_by_seqlens(lengths, 15, None, least, top, "dataloader", batch, same)
        return
    ids, sizes, longest = batch_by_seqlens(lengths, 15, None, least, top, "dataloader", batch, same)
    assert [samples for _, samples in ids] == groups[: count * batch]
    assert [number for number, _ in ids] == [i // batch for i in range(count * batch)]
    parts = [list(itertools.chain(*groups[i * batch : (i + 1) * batch])) for i in range(count)]
    assert sizes == list(map(len, parts)) and longest == [max(lengths[i] for i in part) for part in parts]


def test_orders_and_filters(caplog: pytest.LogCaptureFixture) -> None:
    lengths = [5, 1, 30, 2, 4, 3]
    with caplog.at_level(logging.WARNING, "slipstream"):
        ids, *_ = batch_by_seqlens(lengths, 6, sequence_picking_order="seqlen")
    assert [samples for _, samples in ids] == [[1, 3, 5], [4], [0]]
    assert "1 of 6 samples are longer than max_tokens (6)" in caplog.text
    ids, *_ = batch_by_seqlens(lengths, 6, sequence_ids_per_mb=[0, 1, 3])
    assert [samples for _, samples in ids] == [[0, 1], [3]]
    shuffled = [batch_by_seqlens(list(range(1, 30)), 40, sequence_picking_order="random", seed=seed) for seed in (1, 1, 2)]
    assert shuffled[0] == shuffled[1] != shuffled[2]
    with pytest.raises(ValueError, match=r"sequence_picking_order \('longest'\)"):
        batch_by_seqlens(lengths, 6, sequence_picking_order="longest")


def test_rates_follow_the_samples() -> None:
    assert [scale_lr(4, 16, 0.1, method) for method in ("linear", "sqrt", None)] == pytest.approx([0.4, 0.2, 0.1])
    with pytest.raises(ValueError, match=r"lr_scaling_method \('cube'\)"):
        scale_lr(4, 16, 0.1, "cube")
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # it multiplies the rate that it finds
    schedule = lr_scheduler_for_variable_batch_size(4, [4, 8, 2], None, decay)
    rates = []
    for _ in range(5):
        rates += schedule.get_lr()
        optimizer.step()
        schedule.step()
    assert rates == [0.5**i * size / 4 for i, size in enumerate([4, 8, 2, 4, 8])]
    state = json.loads(json.dumps(schedule.state_dict()))
    later = schedule.get_lr()
    schedule.step()
    schedule.load_state_dict(state)
    assert schedule.get_lr() == later
    constant = lr_scheduler_for_variable_batch_size(4, [4, 8], None, torch.optim.SGD([weight], lr=1.0))
    constant.step()
    assert constant.get_lr() == [2.0]
    with pytest.raises(ValueError, match="must be a schedule or an optimizer, not a int"):
        lr_scheduler_for_variable_batch_size(4, [4], None, 3)


class Sentences(torch.utils.data.Dataset[list[int]]):
    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> list[int]:
        return [1 + index % 49] * (1 + index * 3 % 7)


LENGTHS = [1 + i * 3 % 7 for i in range(160)]


def padded(sentences: list[list[int]]) -> Tensor:
    return nn.utils.rnn.pad_sequence([torch.tensor(each) for each in sentences], batch_first=True)


def by_tokens(folder: Path, **more: Any) -> dict[str, Any]:
    block = {"enabled": True, "metrics_path": str(folder), "max_tokens": 12, **more}
    raw = config(data_sampling={"enabled": True, "dynamic_batching": block})
    return raw | {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2}


def test_batches_by_tokens_by_config(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each key by its effect, from files of an analysis; two micro-batches are one item of the loader."""
    made: Any = {"training_data": Sentences(), "collate_fn": padded}
    with pytest.raises(ValueError, match="has no seqlen/seqlen_sample_to_metric"):
        slipstream.initialize(model=Words(), config=by_tokens(tmp_path), **made)
    slipstream.data.DataAnalyzer(
        Sentences(),
        metric_names=["seqlen"],
        metric_functions=[lambda batch: torch.tensor(list(map(len, batch)))],
        metric_types=["single_value_per_sample"],
        metric_dtypes=[torch.int64],
        save_path=tmp_path,
        collate_fn=list,
    ).run_map_reduce()

    def sizes(**more: Any) -> tuple[list[int], list[float]]:
        engine, _, data, schedule = slipstream.initialize(model=Words(), config=by_tokens(tmp_path, **more), **made)
        try:
            batches, rates = iter(data), []
            for _ in range(3):
                rates += schedule.get_lr()
                for _ in range(2):
                    engine.backward(engine(next(batches)))
                    engine.step()
            return [len(batch) for batch in engine.module.seen], rates
        finally:
            engine.destroy()

    expected = [len(ids) for _, ids in batch_by_seqlens(LENGTHS, 12, effective_batch_size=4).microbatch_ids]
    items = [a + b for a, b in zip(expected[::2], expected[1::2], strict=True)]
    usual, rates = sizes()
    assert usual == items[:6] and rates == pytest.approx([0.5 * (a + b) / 4 for a, b in zip(usual[::2], usual[1::2], strict=True)])
    assert sizes(lr_scaling_method="none")[1] == [0.5] * 3
    assert sizes(lr_scaling_method="sqrt")[1] == pytest.approx([0.5 * math.sqrt(rate / 0.5) for rate in rates])
    assert max(sizes(max_batch_size=1)[0]) == 2
    assert sum(sizes(max_tokens=24)[0]) > sum(usual)
    assert sizes(sequence_picking_order="seqlen")[0] > usual and sizes(sequence_picking_order="random")[0] != usual
    with pytest.raises(ValueError, match="fill 0 micro-batches"):
        sizes(min_batch_size=20)
    with caplog.at_level(logging.INFO, "slipstream"):
        sizes(verbose=True)
    assert "batch 0: samples" in caplog.text and "rates [" in caplog.text
    with pytest.raises(ValueError, match="lengths of 160 samples, and the dataset has 44"):
        slipstream.initialize(model=Words(), config=by_tokens(tmp_path), training_data=Numbers(44))


class Counting:
    """Counts samples, as Megatron's schedule."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.samples = optimizer, 0

    def step(self, increment: int) -> None:
        self.samples += increment
        self.optimizer.param_groups[0]["lr"] = self.samples


def test_a_schedule_over_one_that_counts_samples() -> None:
    counting = Counting(torch.optim.SGD([torch.zeros(1)], 1.0))
    schedule = VariableBatchSizeLR(counting, 4, [2, 6])
    assert schedule.get_lr() == [0.5]
    schedule.step()
    assert counting.samples == 2 and schedule.get_lr() == [2 * 6 / 4]
    schedule.step()
    assert counting.samples == 8 and schedule.get_lr() == [8 * 2 / 4]


def test_a_schedule_over_one_with_arguments_of_its_own() -> None:
    """As the engine does: only a required argument is a number of samples."""
    calls: list[tuple[Any, ...]] = []
    counting = Counting(torch.optim.SGD([torch.zeros(1)], 1.0))
    counting.step = lambda epoch=None, increment=1: calls.append((epoch, increment))  # type: ignore[method-assign, assignment, misc]
    VariableBatchSizeLR(counting, 4, [2, 6]).step()
    assert calls == [(None, 1)]


def test_the_call_of_deepspeed(tmp_path: Path) -> None:
    raw = by_tokens(tmp_path / "none") | {
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5, "warmup_num_steps": 2}}
    }
    engine, *_ = compat.initialize(model=Words(), config=raw)
    make = get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed
    with pytest.raises(ValueError, match="pass dataset_seqlens="):
        make(Sentences(), engine)
    lengths: Any = {"batch_seqlens_fn": lambda batch: (batch > 0).sum(1)}
    written, *_ = make(Sentences(), engine, dataloader_collate_fn=padded, **lengths)
    data, schedule, options = make(Sentences(), engine, dataset_seqlens=LENGTHS, dataloader_collate_fn=padded)
    assert isinstance(schedule, VariableBatchSizeLR)
    assert len(written) == len(data)
    same = engine.deepspeed_io(**options)
    assert [batch.tolist() for batch in same] == [batch.tolist() for batch in data]
    engine.training_dataloader, engine.lr_scheduler = same, schedule
    batches = iter(same)
    for step in range(2):
        for _ in range(2):
            engine.backward(engine(next(batches)))
            engine.step()
        warm = [0.0, 0.5 * math.log(2) / math.log(2)][step]
        assert schedule.get_lr() == pytest.approx([warm * schedule.batch_sizes[step + 1] / 4])
    engine.save_checkpoint(str(tmp_path))
    rest = [batch.tolist() for batch in batches]
    engine.load_checkpoint(str(tmp_path))
    assert [batch.tolist() for batch in same] == rest
    engine.destroy()
    engine, *_ = compat.initialize(model=Words(), config=config())
    with pytest.raises(ValueError, match="dynamic_batching is off"):
        make(Sentences(), engine, dataset_seqlens=LENGTHS)
    engine.destroy()

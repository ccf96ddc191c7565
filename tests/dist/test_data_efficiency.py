"""Analyses by ranks, and a curriculum whose checkpoint loads on other ranks."""

import itertools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import slipstream
from slipstream.data import DataAnalyzer, DistributedDataAnalyzer
from tests.pool import distributed, run
from tests.unit.test_curriculum_data import VALUES, Sentences, Words, by_tokens, metric, padded, sampled
from tests.unit.test_data import Numbers
from tests.unit.test_indexed_data import Numbers as Values
from tests.unit.test_indexed_data import check, metrics


@distributed(world_size=2)
def test_ranks_measure_their_share(world_size: int, tmp_path: Path) -> None:
    options = metrics(num_workers=world_size, worker_id=dist.get_rank(), batch_size=10, save_path=tmp_path)
    del options["metric_dtypes"]
    data = Values(103)
    DistributedDataAnalyzer(data, **options).run_map_reduce()
    if dist.get_rank() == 0:
        check(tmp_path, data.values)


def steps(folder: Path, first: int, count: int) -> list[list[int]]:
    """Train some steps of 8 samples on this rank; returns the samples of each step."""
    raw: dict[str, Any] = sampled({"rarity": metric(folder / str(dist.get_rank()), VALUES)})
    del raw["train_micro_batch_size_per_gpu"]
    engine, _, data, _ = slipstream.initialize(model=Words(), config=raw, training_data=Numbers(44))
    if first:
        engine.load_checkpoint(str(folder))
    drawn = []
    for _, batch in zip(range(count), data, strict=False):
        engine.backward(engine(batch))
        engine.step()
        drawn.append(batch.tolist())
    engine.save_checkpoint(str(folder))
    engine.destroy()
    return drawn


def test_a_checkpoint_on_other_ranks(tmp_path: Path) -> None:
    """1, 2 and 4 ranks in turn draw the samples that one rank draws."""
    for rank in range(4):
        (tmp_path / str(rank)).mkdir()
    whole = [sorted(step) for step in run(1, steps, tmp_path, 0, 6)[0]]
    parts: list[list[int]] = []
    for first, ranks in ((0, 1), (2, 2), (4, 4)):
        of_ranks = run(ranks, steps, tmp_path, first, 2)
        parts += [sorted(itertools.chain(*step)) for step in zip(*of_ranks, strict=True)]
    assert parts == whole
    assert torch.tensor(whole).shape == (6, 8)


def token_steps(folder: Path, first: int, count: int) -> list[list[list[int]]]:
    """Train some steps of 8 micro-batches by tokens; returns this rank's samples of each step."""
    raw = by_tokens(folder) | {"train_batch_size": 8}
    engine, _, data, _ = slipstream.initialize(model=Words(), config=raw, training_data=Sentences(), collate_fn=padded)
    if first:
        engine.load_checkpoint(str(folder))
    drawn, batches = [], iter(data)
    for _ in range(count):
        samples: list[list[int]] = []
        for _ in range(engine.plan.batch.accumulation):
            batch = next(batches)
            engine.backward(engine(batch))
            engine.step()
            samples += [[word for word in row if word] for row in batch.tolist()]
        drawn.append(samples)
    engine.save_checkpoint(str(folder))
    engine.destroy()
    return drawn


def test_batches_by_tokens_go_on_on_other_ranks(tmp_path: Path) -> None:
    """1, 2 and 4 ranks in turn train on the samples of one rank, step by step."""
    DataAnalyzer(
        Sentences(),
        metric_names=["seqlen"],
        metric_functions=[lambda batch: torch.tensor(list(map(len, batch)))],
        metric_types=["single_value_per_sample"],
        metric_dtypes=[torch.int64],
        save_path=tmp_path,
        collate_fn=list,
    ).run_map_reduce()
    whole = [sorted(step) for step in run(1, token_steps, tmp_path, 0, 4)[0]]
    parts: list[list[list[int]]] = []
    for first, count, ranks in ((0, 2, 1), (2, 1, 2), (3, 1, 4)):
        of_ranks = run(ranks, token_steps, tmp_path, first, count)
        parts += [sorted(itertools.chain(*step)) for step in zip(*of_ranks, strict=True)]
    assert parts == whole and len({len(step) for step in whole}) > 1

"""Analyses by ranks, and a curriculum whose checkpoint loads on other ranks."""

import itertools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import slipstream
from slipstream.data import DistributedDataAnalyzer
from tests.pool import distributed, run
from tests.unit.test_curriculum_data import VALUES, Words, metric, sampled
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

"""The batch that follows the gradient noise scale: its sizes, the rates, the order of samples, and runs that are resumed."""

from __future__ import annotations

import itertools
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

import slipstream
from tests.pool import distributed

SPREAD, SIZE = 3.0, 0.5  # of the gradients: the noise scale is their squared quotient, 36 samples


class Given(nn.Module):
    """Its gradient is the mean of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2000))

    def forward(self, samples: Tensor) -> Tensor:
        return (samples @ self.weight).mean()


class Samples(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 2000

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return SIZE + SPREAD * torch.randn(2000, generator=torch.Generator().manual_seed(i)), i


def make(micro: int, accumulation: int = 2, **block: Any) -> Any:
    """(engine, loader)"""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_type": "linear", "warmup_max_lr": 0.1}},
        "slipstream": {"adaptive_batch": {"max_batch_size": 512, "every": 2, **block}},
    }
    engine, _, loader, _ = slipstream.initialize(model=Given(), config=config, training_data=Samples())
    return engine, loader


def train(engine: Any, loader: Any, until: int) -> list[tuple[int, float, list[int]]]:
    """Of each step: samples over all ranks, the rate it was made with, and this rank's samples in order."""
    steps: list[tuple[int, float, list[int]]] = []
    ids: list[int] = []
    for x, numbers in loader:
        ids += numbers.tolist()
        rate, size, before = engine.optimizer.param_groups[0]["lr"], engine.plan.batch.train_batch_size, engine.global_samples
        engine.backward(engine(x))
        engine.step()
        if engine.step_applied:
            assert engine.global_samples - before == size
            steps.append((size, rate, ids))
            ids = []
        if engine.global_steps == until:
            break
    return steps


def scheduled(step: int) -> float:
    """The rate of the schedule in a step, without the batch."""
    return 0.1 * min(max(step - 1, 0) / 5, 1)


def test_the_batch_follows_the_noise_scale(caplog: pytest.LogCaptureFixture) -> None:
    for scaling, factor in (("sqrt", math.sqrt), ("linear", float), ("none", lambda ratio: 1.0)):
        engine, loader = make(4, scale_lr=scaling, ratio=1.5)
        with caplog.at_level(logging.INFO, "slipstream"):
            steps = train(engine, loader, 30)
        sizes = [size for size, _, _ in steps]
        assert sizes[:3] == [8, 8, 16], "every second step, by a factor of 2 at most"
        assert all(a == b or (i % 2 and b <= 2 * a) for i, (a, b) in enumerate(itertools.pairwise(sizes)))
        assert all(size % 4 == 0 and abs(size - 1.5 * 36) < 12 for size in sizes[-5:]), sizes
        for i, (size, rate, ids) in enumerate(steps):
            assert len(ids) == size
            assert rate == pytest.approx(scheduled(i) * factor(size / 8)), (scaling, i)
        assert "so train_batch_size 8 becomes 16 (4 micro-batches on each rank)" in caplog.text
        engine.destroy()
        caplog.clear()


def test_the_batch_keeps_within_bounds() -> None:
    engine, loader = make(4, accumulation=8, min_batch_size=22, max_batch_size=32, ratio=0.1, scale_lr="none")
    assert {size for size, _, _ in train(engine, loader, 20)[-10:]} == {24}, "the smallest whole number of micro-batches"
    engine, loader = make(4, accumulation=2, max_batch_size=27, ratio=100)
    assert {size for size, _, _ in train(engine, loader, 20)[-10:]} == {24}, "the largest"


@distributed(world_size=2)
def test_a_resumed_run_has_the_same_batches(tmp_path: Path) -> None:
    engine, loader = make(2)
    batches = iter(loader)
    first = train(engine, batches, 11)
    engine.save_checkpoint(str(tmp_path))
    rest = train(engine, batches, 20)
    assert len({size for size, _, _ in first + rest}) > 2
    every = [(first + rest)[i][2] for i in range(20)]
    order = torch.randperm(2000, generator=torch.Generator().manual_seed(0)).tolist()[dist.get_rank() :: 2]
    assert sum(every, []) == order[: sum(map(len, every))], "the samples are those of the loader, in its order"  # noqa: RUF017
    weights = engine.state_dict()["weight"]
    engine.destroy()

    engine, loader = make(2)
    engine.load_checkpoint(str(tmp_path))
    assert train(engine, loader, 20) == rest
    assert torch.equal(engine.state_dict()["weight"], weights)
    engine.destroy()

    engine, _ = make(6)  # as on three times as many ranks
    engine.load_checkpoint(str(tmp_path))
    assert abs(engine.plan.batch.train_batch_size - rest[0][0]) <= 6
    assert engine.micro_steps % engine.plan.batch.accumulation == 0
    engine.destroy()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"slipstream": {"adaptive_batch": {"max_batch_size": 8, "min_batch_size": 1}}}, "a step of min_batch_size has one micro"),
        ({"slipstream": {"adaptive_batch": {"max_batch_size": 3}}}, r"begins with train_batch_size \(4\), which is not between"),
        ({"gradient_allreduce_op": "sum"}, "adaptive_batch compares .* not supported with gradient_allreduce_op sum"),
        (
            {
                "train_micro_batch_size_per_gpu": None,
                "gradient_accumulation_steps": None,
                "elasticity": {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [2]},
            },
            "changes train_batch_size, but elasticity needs a constant one; drop one of the two",
        ),
        ({"optimizer": {"type": "OneBitAdam"}}, "which OneBitAdam does not compute"),
    ],
)
def test_what_cannot_adapt_is_refused(change: dict[str, Any], reason: str) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "slipstream": {"adaptive_batch": {"max_batch_size": 64}},
        "optimizer": {"type": "SGD"},
    }
    with pytest.raises(ValueError, match=reason):
        slipstream.initialize(model=Given(), config=config | change)


def test_a_loop_that_ends_its_steps_itself_is_refused() -> None:
    engine, loader = make(2)
    engine.set_boundary(True)
    engine.backward(engine(next(iter(loader))[0]))
    with pytest.raises(ValueError, match="the training loop says itself where a step ends"):
        engine.step()
    engine.destroy()

"""The gradient noise scale: what monitors get is what the spread of gradients is."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import slipstream
from slipstream.observe.monitors import Figure
from tests import toy
from tests.pool import distributed


class Recorder:
    made: ClassVar[list[Recorder]] = []

    def __init__(self) -> None:
        self.seen: list[Figure] = []
        self.made.append(self)

    def write(self, events: Sequence[Figure]) -> None:
        self.seen += events

    def close(self) -> None:
        pass


def measured(every: int) -> dict[str, Any]:
    return {"noise_scale_every": every, "monitors": {"custom": {f"{__name__}.Recorder": {}}}}


def told(engine: Any) -> dict[int, float]:
    """The noise scale by samples, on rank 0."""
    engine.destroy()
    return {event.samples: event.value for event in Recorder.made.pop().seen if event.tag == "Train/Samples/noise_scale"}


def expected(world: int, micros: int) -> float:
    """From the gradients of plain torch: of micro-batches of two samples, and of their mean."""
    model = toy.seeded(toy.Lm)
    gradients = []
    for rank, micro in itertools.product(range(world), range(micros)):
        grads: tuple[Tensor, ...] = torch.autograd.grad(model(toy.tokens(rank, 0, micro)), list(model.parameters()))
        gradients.append(torch.cat([grad.flatten().double() for grad in grads]))
    few, many = 2, 2 * world * micros
    small = torch.stack([gradient.square().sum() for gradient in gradients]).mean()
    big = torch.stack(gradients).mean(0).square().sum()
    return float((small - big) / (1 / few - 1 / many) / ((many * big - few * small) / (many - few)))


class Hiding(toy.Lm):
    """Its output is an object in which no library looks for tensors."""

    class Output:
        __slots__ = ("loss",)

    def forward(self, tokens: Tensor) -> Any:
        output = self.Output()
        output.loss = super().forward(tokens)
        return output


@distributed(world_size=2)
def test_ranks_and_micro_batches_are_compared_with_their_mean() -> None:
    rank = dist.get_rank()
    for stage, micros, dtype, loop in (
        (0, 1, "fp32", "loss.backward"),
        (2, 3, "fp32", "divided losses"),
        (3, 2, "fp32", "engine.backward"),
        (1, 2, "fp16", "loss.backward"),
        (2, 2, "fp32", "hidden outputs"),
    ):
        engine = toy.make(
            toy.seeded(Hiding if loop == "hidden outputs" else toy.Lm),
            stage,
            dtype=dtype,
            gradient_accumulation_steps=micros,
            gradient_clipping=0.1,
            slipstream=measured(1),
        )
        for micro in range(micros):
            loss = engine(toy.tokens(rank, 0, micro))
            if loop in ("loss.backward", "hidden outputs"):
                (loss.loss if loop == "hidden outputs" else loss).backward()
            else:
                divides = loop == "divided losses"
                engine.backward(loss / micros if divides else loss, scale_wrt_gas=not divides)
            engine.step()
        if rank:
            engine.destroy()
        else:
            rel = 1e-3 if dtype == "fp32" else 0.05
            assert told(engine) == {4 * micros: pytest.approx(expected(2, micros), rel=rel)}, (stage, dtype)


class Given(nn.Module):
    """Its gradient is the mean of the samples."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, samples: Tensor) -> Tensor:
        return (samples @ self.weight).mean()


def test_the_noise_scale_of_a_known_spread() -> None:
    dim, spread, size = 2000, 3.0, 0.5
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8, "slipstream": measured(3)}
    engine = slipstream.initialize(model=Given(dim), config=config | {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}})[0]
    generator = torch.Generator().manual_seed(0)
    for _ in range(8 * 36):
        engine.backward(engine(size + spread * torch.randn(4, dim, generator=generator)))
        engine.step()
    found = told(engine)
    assert list(found) == [32 * step for step in range(3, 37, 3)]
    assert found[32 * 36] == pytest.approx(spread**2 / size**2, rel=0.1), "tr(S) / |G|^2"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, "a step has one micro-batch: use more ranks, or gradient_accumulation_steps of 2"),
        ({"slipstream": {"noise_scale_every": 1}}, "measures for monitors, but none is enabled; enable one"),
        ({"gradient_accumulation_steps": 2, "managed_gradient_accumulation": False}, "managed_gradient_accumulation false"),
        ({"gradient_accumulation_steps": 2, "gradient_allreduce_op": "sum"}, "gradient_allreduce_op sum"),
        ({"gradient_accumulation_steps": 2, "optimizer": {"type": "OneBitAdam"}}, "which OneBitAdam does not compute"),
    ],
)
def test_what_cannot_be_measured_is_refused(change: dict[str, Any], reason: str) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "slipstream": measured(1), "optimizer": {"type": "SGD"}}
    with pytest.raises(ValueError, match=reason):
        slipstream.initialize(model=Given(3), config=config | change)

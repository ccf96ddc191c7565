"""Buffers that training changes: local to each rank during training; rank 0's are used if one set is needed."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from slipstream.world.watch import PeerError
from tests import cases, toy
from tests.pool import distributed, run


class Normed(nn.Module):
    """A batch norm between linear layers, and two non-persistent buffers, one an expanded row; forward returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.norm, self.out = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)
        self.register_buffer("mask", torch.ones(1, 16, dtype=torch.bool).expand(4, 16), persistent=False)
        self.register_buffer("calls", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return F.softplus(self.out(self.norm(self.inp(x)) * self.mask)).mean()


def trained(stage: int, transport: str, steps: int = 3, **blocks: Any) -> Any:
    engine = toy.make(toy.seeded(Normed), stage, transport, **blocks)
    for i in range(steps):
        toy.step(engine, toy.floats(engine.rank, i))
    return engine


def buffers(engine: Any) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in engine.module.named_buffers()}


def evaluation(engine: Any) -> float:
    engine.eval()
    with torch.no_grad():
        return float(engine(toy.floats(0, 99)))


def same(results: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return all(torch.equal(results[name], value) for name, value in expected.items())


def save(folder: Path, stage: int, transport: str) -> tuple[dict[str, Tensor], float]:
    """Check that every save has rank 0's buffers and changes no rank's own. Returns rank 0's, with its evaluation."""
    engine = trained(stage, transport, checkpoint={"writer": {"decoupled": stage == 0}})
    own = buffers(engine)
    everyone = engine.mesh.world.gather(own)
    assert not torch.equal(everyone[0]["norm.running_mean"], everyone[1]["norm.running_mean"])
    first = {name: value for name, value in everyone[0].items() if name.startswith("norm.")}
    assert same(engine.state_dict(), first)
    engine.save_checkpoint(str(folder))
    engine.finish_save()
    engine.save_pretrained(str(folder / "pretrained"))
    assert same(load_file(folder / "pretrained" / "model.safetensors"), first)
    assert same(buffers(engine), own)
    result = first, evaluation(engine)
    engine.destroy()
    return result


def load(folder: Path, stage: int) -> tuple[dict[str, Tensor], float]:
    engine = trained(stage, "auto", steps=1)
    engine.load_checkpoint(str(folder))
    result = buffers(engine), evaluation(engine)
    engine.destroy()
    return result


@pytest.mark.parametrize(("world", "stage", "transport"), cases.pairs((3, 2), (0, 3), ("shared", "gloo")))
def test_saved_buffers_are_the_first_rank_s(world: int, stage: int, transport: str, tmp_path: Path) -> None:
    expected, loss = run(world, save, tmp_path, stage, transport)[0]
    for results, there in run(5 - world, load, tmp_path, 3 - stage):
        assert same(results, expected) and there == loss


def different() -> Any:
    """A model whose buffers start with values that differ by rank."""
    model = toy.seeded(Normed)
    model.norm.running_mean.fill_(float(torch.distributed.get_rank()))
    return model


@distributed(world_size=2, transports=("shared", "gloo"))
def test_slipstream_broadcast_buffers(transport: str) -> None:
    """With the key every rank evaluates and continues with rank 0's buffers; training and saved files stay the same."""
    losses, saved = {}, {}
    for on in (False, True):
        engine = toy.make(different(), 3, transport, slipstream={"broadcast_buffers": on})
        assert not engine.module.norm.running_mean.any(), "the first rank's count from the beginning"
        steps = [toy.step(engine, toy.floats(engine.rank, i)).item() for i in range(2)]
        with engine.no_sync():
            engine(toy.floats(engine.rank, 2))
        evaluated = engine.mesh.world.gather(evaluation(engine))
        assert (evaluated[0] == evaluated[1]) is on
        losses[on], saved[on] = steps, engine.state_dict()
        engine.destroy()
    assert losses[False] == losses[True] and same(saved[False], saved[True])


@distributed(world_size=2, transports=("shared", "gloo"))
def test_two_forwards_before_a_backward_with_broadcast_buffers(transport: str) -> None:
    """The next forward's broadcast does not break a graph that saved a running statistic."""
    engine = toy.make(toy.seeded(Normed), 0, transport, slipstream={"broadcast_buffers": True})
    engine.module.norm.eval()
    loss = engine(toy.floats(engine.rank, 0)) + engine(toy.floats(engine.rank, 1))
    engine.backward(loss)
    engine.step()
    engine.destroy()


@distributed(world_size=2, transports=("shared", "gloo"))
def test_a_broadcast_that_a_rank_does_not_join(transport: str) -> None:
    engine = toy.make(toy.seeded(Normed), 0, transport, slipstream={"broadcast_buffers": True})
    engine.watch.beat_s = engine.watch.standstill_s = 0.2
    with pytest.raises(PeerError):
        if engine.rank == 1:
            engine(toy.floats(1, 0))
        else:
            engine.save_checkpoint("never")
    engine.watch.stop()

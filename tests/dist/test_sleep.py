"""`engine.sleep()` frees memory, and training resumes bit for bit."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import slipstream
from slipstream.ops.disk import DiskError
from slipstream.train import sleep
from tests import probe, toy
from tests.pool import distributed

pytestmark = pytest.mark.disk


@distributed(world_size=2, transports=("shared", "gloo"), timeout=60)
def test_training_goes_on_bit_for_bit(transport: str, tmp_path: Path) -> None:
    """In every stage, with a native and a torch optimizer, between steps and in the middle of a window."""
    awake: dict[tuple[int, str], int] = {}  # stages 0 and 1, and 2 and 3, are the same bits ([Note: Bit identity])
    for stage, optimizer in ((0, "AdamW"), (1, "AdamW"), (2, "AdamW"), (3, "AdamW"), (1, "Adafactor"), (3, "Adafactor")):
        for naps in (False, True):
            if not naps and (stage // 2, optimizer) in awake:
                continue
            engine = toy.make(
                toy.seeded(lambda: toy.Lm(64)),
                stage,
                transport,
                dtype="bf16",
                gradient_accumulation_steps=2,
                optimizer={"type": optimizer, "params": {"lr": 1e-2}},
            )
            for micro in range(3):
                toy.step(engine, toy.tokens(engine.rank, micro))
                if naps:
                    parts = [tensor for tensor, _ in sleep.memory_of(engine.states, sleep.KINDS)]
                    assert engine.sleep(device="disk", path=str(tmp_path)) == sum(tensor.nbytes for tensor in parts) > 0
                    storages = [tensor.untyped_storage() for tensor in parts]
                    assert not any(storage.nbytes() for storage in storages if storage.resizable())
                    for call in (partial(engine, toy.tokens(0, 0)), engine.step, engine.state_dict):
                        with pytest.raises(RuntimeError, match=r"call engine.wake\(\) first"):
                            call()
                    engine.wake()
            results = int(toy.checksum(engine))
            assert awake.setdefault((stage // 2, optimizer), results) == results, f"stage {stage}, {optimizer}"
            engine.destroy()


@distributed(world_size=2, transports=("shared", "gloo"))
def test_after_a_backward_that_raised(transport: str, tmp_path: Path) -> None:
    """The reductions that it left in flight end before their memory is freed."""

    def fail(_: torch.Tensor) -> None:
        raise ZeroDivisionError

    for stage in (2, 3):
        sums = []
        for fails in (False, True):
            engine = toy.make(toy.seeded(toy.Lm), stage, transport)
            if fails:
                handle = engine.module.blocks[0].norm.weight.register_hook(fail)
                with pytest.raises(ZeroDivisionError):
                    engine.backward(engine(toy.tokens(engine.rank, 1)))
                handle.remove()
                engine.sleep(["optimizer", "gradients"], "disk", str(tmp_path))
                with torch.no_grad():
                    engine(toy.tokens(engine.rank, 1))
                engine.wake()
                engine.zero_grad()
            toy.step(engine, toy.tokens(engine.rank, 0))
            sums.append(int(toy.checksum(engine)))
            engine.destroy()
        assert sums[0] == sums[1]


def test_without_optimizer_and_gradients_it_still_computes(tmp_path: Path) -> None:
    engine = toy.make(toy.seeded(toy.Lm), 2)
    expected = toy.step(engine, toy.tokens(0, 0))
    before = engine(toy.tokens(0, 1)).item()
    engine.sleep(["optimizer", "gradients"], "disk", str(tmp_path))
    with torch.no_grad():
        assert engine(toy.tokens(0, 1)).item() == before
    with pytest.raises(RuntimeError, match=r"under torch\.no_grad"):
        engine(toy.tokens(0, 1))
    engine.wake()
    assert toy.step(engine, toy.tokens(0, 0)) < expected
    engine.sleep(["weights"], "disk", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"are away: call engine\.wake\(\) first"):
        torch.add(next(engine.module.parameters()), 1)
    engine.destroy()
    assert all(torch.isfinite(param).all() for param in engine.module.parameters())


@distributed(world_size=(1, 2), timeout=60)
def test_weights_are_not_written_without_their_masters(tmp_path: Path) -> None:
    """Reads work; writes raise an error that says to wake the engine, and write nothing."""
    for stage in (1, 3):
        engine = toy.make(toy.seeded(toy.Lm), stage, dtype="bf16")
        toy.step(engine, toy.tokens(engine.rank, 0))
        engine.sleep(["optimizer"], "disk", str(tmp_path))
        whole, before = engine.state_dict(), int(toy.checksum(engine))
        with pytest.raises(RuntimeError, match=r"masters are away: call engine\.wake\(\) first"):
            engine.load_state_dict({name: value + 1 for name, value in whole.items()})
        with pytest.raises(RuntimeError, match="masters are away"), slipstream.zero.gathered(engine.module.head.weight):
            engine.module.head.weight.data.zero_()
        if stage == 1:
            with torch.no_grad():
                engine.module.head.weight.mul_(1)
            with pytest.raises(RuntimeError, match="masters are away"):
                engine(toy.tokens(0, 0))
        engine.wake()
        assert int(toy.checksum(engine)) == before
        toy.step(engine, toy.tokens(engine.rank, 0))
        engine.destroy()


@distributed(world_size=2)
def test_a_sleeping_engine_does_not_affect_another(tmp_path: Path) -> None:
    """gathered() of two engines' parameters raises if one sleeps, and the other continues to train unaffected."""
    engines = [toy.make(toy.seeded(toy.Lm), 3) for _ in range(3)]
    *pair, sleeper = engines
    sleeper.sleep(["weights"], "disk", str(tmp_path))
    both = [*pair[0].module.parameters(), *sleeper.module.parameters()]
    with pytest.raises(RuntimeError, match="are away"), slipstream.zero.gathered(both):
        pytest.fail("it is refused before anything runs inside")
    for i in range(2):
        losses = [toy.step(engine, toy.tokens(engine.rank, i)) for engine in pair]
        assert losses[0].equal(losses[1])
    for engine in engines:
        engine.destroy()


def test_states_in_host_memory_are_not_copied_there() -> None:
    """Like the optimizer of a GPU's engine if it is offloaded to the host."""
    engine = toy.make(toy.seeded(toy.Lm), 2, dtype="bf16")
    toy.step(engine, toy.tokens(0, 0))
    before = int(toy.checksum(engine))
    assert sleep.put(engine.states, sleep.KINDS, None) == 0
    engine.wake()
    assert int(toy.checksum(engine)) == before
    engine.destroy()


def test_the_gradient_buffers_are_freed_too(tmp_path: Path) -> None:
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    engine = toy.make(
        toy.seeded(toy.Lm),
        3,
        dtype="bf16",
        gradient_accumulation_steps=2,
        zero_optimization={"offload_optimizer": disk, "offload_param": disk | {"max_in_cpu": 0}},
    )
    toy.step(engine, toy.tokens(0, 0))
    parts = sum(tensor.nbytes for tensor, _ in sleep.memory_of(engine.states, ["gradients"]))
    assert engine.sleep(["gradients"], "disk", str(tmp_path)) == parts + probe.homes(engine).nbytes > parts
    engine.wake()
    toy.step(engine, toy.tokens(0, 1))
    engine.destroy()


@distributed(world_size=2, timeout=60)
def test_a_disk_that_fails_on_wake(tmp_path: Path) -> None:
    """All ranks wake and raise; the engine is broken, but can be destroyed."""
    engine = toy.make(toy.seeded(toy.Lm), 1, dtype="bf16")
    engine.sleep(None, "disk", str(tmp_path))
    if engine.rank == 1:
        _, _, (_, file, *_), _ = engine.states.resources["asleep"]._space.disks[0]._closing.peek()
        os.ftruncate(file, 0)
    with pytest.raises(DiskError, match="rank 1 could not read its sleeping states back"):
        engine.wake()
    with pytest.raises(RuntimeError, match="resume from the last checkpoint"):
        engine.step()
    engine.destroy()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"include": ["moments"]}, "is not a kind of state; use optimizer, weights, gradients"),
        ({}, "already in host memory"),
        ({"device": "disk"}, "path=None is not a folder"),
        ({"device": "cuda"}, "use 'cpu' or 'disk'"),
    ],
)
def test_refusals(arguments: dict[str, Any], message: str) -> None:
    engine = toy.make(toy.seeded(toy.Lm), 0)
    with pytest.raises(ValueError, match=message):
        engine.sleep(**arguments)
    engine.destroy()

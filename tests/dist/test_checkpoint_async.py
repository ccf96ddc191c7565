"""Asynchronous and partial checkpoints."""

import errno
import importlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slipstream.checkpoint import CheckpointError, FlatSlice, Staging, latest_tag, load, save_async
from slipstream.checkpoint.directory import committed_tags
from slipstream.checkpoint.writer import Writer
from slipstream.train.gate import Obstacle
from tests import toy
from tests.dist.test_checkpoint_engine import Noisy
from tests.pool import distributed

save_module: Any = importlib.import_module("slipstream.checkpoint.save")  # in the package, this name is the function
BEHIND = {"writer": {"decoupled": True}}


def engine_of(stage: int, transport: str = "auto", **blocks: Any) -> Any:
    return toy.make(toy.seeded(Noisy), stage, transport, dtype="bf16", checkpoint=BEHIND, **blocks)


@contextmanager
def writing(before: Any) -> Iterator[None]:
    """Run `before()` before every asynchronous write."""
    real = Writer.flush

    def flush(self: Writer) -> Any:
        before()
        return real(self)

    Writer.flush = flush  # type: ignore[method-assign]
    try:
        yield
    finally:
        Writer.flush = real  # type: ignore[method-assign]


@distributed(world_size=2, transports=("shared", "gloo"))
def test_what_is_written_is_the_moment_of_the_call(transport: str, tmp_path: Path) -> None:
    for stage in (0, 3):
        folder, gate = tmp_path / str(stage), threading.Event()
        engine = engine_of(stage, transport)
        toy.step(engine, toy.tokens(dist.get_rank(), 0))
        expected = engine.state_dict()
        with writing(gate.wait):
            engine.save_checkpoint(str(folder), client_state={"nothing": torch.zeros(0), "after": torch.ones(3)})
            for i in range(2):  # training continues, and there is no checkpoint yet
                toy.step(engine, toy.tokens(dist.get_rank(), i))
            assert latest_tag(folder) is None
            threading.Timer(0.05, gate.set).start()
            engine.save_checkpoint(str(folder), tag="next")  # waits for the previous save
            assert "global_step1" in committed_tags(folder)
            engine.finish_save()
        assert latest_tag(folder) == "next" and not [name for name in os.listdir(folder) if "tmp" in name]
        assert sorted(os.listdir(folder / "next")) == ["metadata.json", "rank_00000.bin", "rank_00001.bin"]
        _, client = engine.load_checkpoint(str(folder), "global_step1")
        assert client["nothing"].numel() == 0 and client["after"].equal(torch.ones(3))
        state = engine.state_dict()
        assert all(state[name].equal(value) for name, value in expected.items())
        engine.destroy()


@distributed(world_size=2)
def test_a_failure_raises_at_the_next_call_on_every_rank(tmp_path: Path) -> None:
    engine, folder = engine_of(3), str(tmp_path)
    engine.save_checkpoint(folder, tag="good")
    engine.finish_save()

    def full() -> None:
        if engine.rank == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with writing(full):
        engine.save_checkpoint(folder, tag="bad")
        toy.step(engine, toy.tokens(engine.rank, 0))
        with pytest.raises(
            CheckpointError, match=r"asynchronous checkpoint .*bad was not saved: .*rank 1: No space left on device"
        ):
            engine.save_checkpoint(folder, tag="other")
    assert latest_tag(tmp_path) == "good" and sorted(os.listdir(folder)) == ["good", "latest"]
    engine.save_checkpoint(folder, tag="again")  # told once
    engine.finish_save()
    with writing(full):
        engine.save_checkpoint(folder, tag="last")
        with pytest.raises(CheckpointError, match="No space left"):
            engine.destroy()
    assert Obstacle.DESTROYED in engine.gate and latest_tag(tmp_path) == "again"


@pytest.mark.disk
@distributed(world_size=2)
def test_a_save_completes_while_the_engine_sleeps(tmp_path: Path) -> None:
    """It completes, and its failure is raised, while the engine sleeps, and also in destroy()."""
    engine, gate = engine_of(2), threading.Event()

    def full() -> None:
        gate.wait()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with writing(gate.wait):
        engine.save_checkpoint(str(tmp_path), tag="one")
        engine.sleep(device="disk", path=str(tmp_path))
        gate.set()
        engine.finish_save()
    assert latest_tag(tmp_path) == "one"
    engine.wake()
    gate.clear()
    with writing(full):
        engine.save_checkpoint(str(tmp_path), tag="two")
        engine.sleep(device="disk", path=str(tmp_path))
        gate.set()
        with pytest.raises(CheckpointError, match="No space left"):
            engine.destroy()
    assert Obstacle.DESTROYED in engine.gate and latest_tag(tmp_path) == "one"


@distributed(world_size=2)
def test_a_save_does_not_wait_for_a_rank_that_stopped_writing(tmp_path: Path) -> None:
    rank, gate = dist.get_rank(), threading.Event()
    part = FlatSlice(torch.full((4,), float(rank)), (8,), 4 * rank)
    what = {"tensors": {"w": part}, "shared": {}, "per_rank": {}, "group": dist.group.WORLD}
    with writing(lambda: rank == 1 and gate.wait()):
        saving = save_async(tmp_path, "t", Staging(pinned=False), patience_s=0.2, **what)
        if rank == 0:
            with pytest.raises(CheckpointError, match=r"nothing of rank_00001.bin has been written for 0.2 s: its rank has died"):
                saving.result()
            assert os.listdir(tmp_path) == []
        dist.barrier()
        gate.set()
        if rank == 1:
            with pytest.raises(CheckpointError):
                saving.result()
    save_async(tmp_path, "t", Staging(pinned=False), **what).result()
    dist.barrier()
    whole = torch.zeros(8)
    load(tmp_path, "t", tensors={"w": whole})
    assert whole.tolist() == [0] * 4 + [1] * 4


@pytest.mark.parametrize("unknown", ["hosts", "kept"])
def test_keywords_that_an_asynchronous_save_does_not_have_are_refused(unknown: str, tmp_path: Path) -> None:
    what: dict[str, Any] = {"tensors": {"w": torch.zeros(8)}, "shared": {}, "per_rank": {}, unknown: None}
    with pytest.raises(TypeError, match=unknown):
        save_async(tmp_path, "t", Staging(pinned=False), **what)
    assert os.listdir(tmp_path) == []


@distributed(world_size=2)
def test_a_rank_that_is_slow_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is visible for each part on disk, although the file has its full size from the start."""
    rank = dist.get_rank()
    part = FlatSlice(torch.full((4,), float(rank)), (8,), 4 * rank)
    real = os.fsync

    def slow(file: int) -> None:  # like an incremental sync
        for _ in range(6 if rank == 1 else 0):
            time.sleep(0.1)
            os.utime(file)
        real(file)

    monkeypatch.setattr(os, "fsync", slow)
    what = {"tensors": {"w": part}, "shared": {}, "per_rank": {}, "group": dist.group.WORLD}
    save_async(tmp_path, "t", Staging(pinned=False), patience_s=0.4, **what).result()
    dist.barrier()
    assert latest_tag(tmp_path) == "t"


@distributed(world_size=2)
def test_a_failed_removal_does_not_undo_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy.make(toy.seeded(Noisy), 1, checkpoint=BEHIND, slipstream={"keep_checkpoints": 1})
    engine.save_checkpoint(str(tmp_path), tag="a")
    engine.finish_save()

    def refuse(*_: Any) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(save_module, "retain", refuse)
    engine.save_checkpoint(str(tmp_path), tag="b")
    with pytest.raises(CheckpointError, match=r"b is saved, but older ones could not be removed: rank 0 of 2: Permission denied"):
        engine.finish_save()
    monkeypatch.undo()
    assert latest_tag(tmp_path) == "b"
    engine.finish_save()  # told once
    engine.destroy()


@distributed(world_size=2)
def test_ranks_with_different_requests_raise(tmp_path: Path) -> None:
    engine, folder = toy.make(toy.seeded(Noisy), 2), str(tmp_path)
    with pytest.raises(CheckpointError, match=r"contents is 'all' on rank 0 and 'weights' on rank 1; pass the same on all"):
        engine.save_checkpoint(folder, contents="all" if engine.rank == 0 else "weights")
    engine.save_checkpoint(folder)
    with pytest.raises(CheckpointError, match=r"exclude is \[\] on rank 0 and \['head.\*'\] on rank 1"):
        engine.load_checkpoint(folder, exclude=["head.*"] * engine.rank)
    with pytest.raises(CheckpointError, match=r"tag is None on rank 0 and 'global_step0' on rank 1"):
        engine.load_checkpoint(folder, tag="global_step0" if engine.rank else None)
    with pytest.raises(CheckpointError, match=r"dtype is torch.float32 on rank 0 and None on rank 1"):
        engine.save_pretrained(f"{folder}/hf", dtype=None if engine.rank else "fp32")
    engine.load_checkpoint(folder)
    engine.destroy()


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.bin"))


@distributed(world_size=2)
def test_parts_of_a_checkpoint(tmp_path: Path) -> None:
    """A partial checkpoint is small, and loads into an engine that has the other parts."""
    engine, folder = toy.make(toy.seeded(Noisy), 3), str(tmp_path)
    toy.step(engine, toy.tokens(engine.rank, 0))
    for contents in ("all", "without_optimizer", "weights", "adapters"):
        engine.save_checkpoint(folder, tag=contents, contents=contents)
    expected, steps = engine.state_dict(), engine.global_steps
    trained = sum(param.numel() for param in engine.module.parameters() if param.requires_grad)
    frozen = sum(param.numel() for param in engine.module.parameters() if not param.requires_grad)
    assert size(tmp_path / "all") > 4 * (3 * trained + frozen)
    for contents, floats in (("without_optimizer", trained + frozen), ("weights", trained + frozen), ("adapters", trained)):
        assert 4 * floats <= size(tmp_path / contents) < 4 * floats + 16_000  # including random states
    for contents in ("without_optimizer", "weights", "adapters"):
        toy.step(engine, toy.tokens(engine.rank, 1))
        if contents == "without_optimizer":
            with pytest.raises(CheckpointError, match="load_optimizer_states=False"):
                engine.load_checkpoint(folder, contents)
        engine.load_checkpoint(folder, contents, load_optimizer_states=False)
        state = engine.state_dict()
        assert all(state[name].equal(value) for name, value in expected.items() if contents != "adapters" or name != "calls")
        assert (engine.global_steps == steps) is (contents == "without_optimizer")
    with pytest.raises(ValueError, match="all, without_optimizer, weights or adapters"):
        engine.save_checkpoint(folder, contents="some")
    engine.destroy()


class Wider(Noisy):
    """The same model with another head and one more layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(16, toy.VOCABULARY + 2)
        self.extra = torch.nn.Linear(16, 16)


@distributed(world_size=2)
def test_a_changed_model_loads_matching_parameters(tmp_path: Path) -> None:
    engine, folder = toy.make(toy.seeded(Noisy), 2), str(tmp_path)
    toy.step(engine, toy.tokens(engine.rank, 0))
    engine.save_checkpoint(folder)
    moments = engine.optimizer_state("blocks.0.up.weight")
    engine.destroy()
    engine = toy.make(toy.seeded(Wider), 3)
    for i in range(2):
        toy.step(engine, toy.tokens(engine.rank, i))
    head, own = engine.state_dict()["head.bias"], engine.optimizer_state("head.bias")
    with pytest.raises(
        CheckpointError, match=r"'head.bias' has shape \(48,\) in the checkpoint and \(50,\) in the model; exclude="
    ):
        engine.load_checkpoint(folder)
    with pytest.raises(CheckpointError, match=r"does not hold \['model.extra.weight', 'model.extra.bias'\]"):
        engine.load_checkpoint(folder, exclude=["head.*"])
    engine.load_checkpoint(folder, exclude=["head.*", "extra.*"])
    state, results = engine.state_dict(), engine.optimizer_state("blocks.0.up.weight")
    assert all(results[name].equal(value) for name, value in moments.items()) and state["head.bias"].equal(head)
    assert engine.global_steps == 1
    assert all(engine.optimizer_state("head.bias")[name].equal(value) for name, value in own.items())
    for piece in engine.states.steps.pieces():
        if piece.param.requires_grad:
            assert piece.step == (2 if piece.name.startswith(("head.", "extra.")) else 1), piece.name
    toy.step(engine, toy.tokens(engine.rank, 1))
    engine.destroy()

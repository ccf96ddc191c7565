"""Checkpoints of engines: another world and stage, going on bit for bit, and failures that change nothing."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

import slipstream
from slipstream.checkpoint import CheckpointError
from tests import toy
from tests.pool import distributed, run

OPTIMIZERS = ("AdamW", "Muon", "Adafactor", "Adagrad", "SGD")


class Numbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> Tensor:
        return toy.tokens(i, 0)[0]


class Noisy(toy.Lm):
    """Draws from every generator that a checkpoint keeps, has a buffer that changes, ties and freezes."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight
        self.blocks[1].requires_grad_(False)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        noise = random.random() + numpy.random.rand() + torch.rand(()).item()
        return super().forward(tokens) * (1 + 0.1 * noise)


def build(stage: int, transport: str = "auto", optimizer: str = "AdamW", dtype: str = "bf16") -> Any:
    return slipstream.initialize(
        model=toy.seeded(Noisy),
        training_data=Numbers(),
        config=toy.settings(
            stage, transport, dtype=dtype, gradient_clipping=1.0, gradient_accumulation_steps=2,
            optimizer={"type": optimizer, "params": {"lr": 1e-2}},
            scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 20}},
        ),
    )[0]  # fmt: skip


def go(engine: Any, micro_steps: int) -> list[float]:
    """The losses; epochs of six micro-batches a rank at world 2, over which calls go on."""
    if not hasattr(engine, "stream"):
        engine.stream = slipstream.RepeatingLoader(engine.training_dataloader)
    return [toy.step(engine, next(engine.stream)).item() for _ in range(micro_steps)]


def snapshot(engine: Any) -> dict[str, Any]:
    """Everything that a checkpoint brings back, whole."""
    states: dict[str, Any] = {f"model.{name}": value for name, value in engine.state_dict().items()}
    for name, _ in engine.module.named_parameters():
        found = engine.optimizer_state(name)
        states |= {f"{name}.{key}": value for key, value in found.items()}
    states |= {name: getattr(engine, name) for name in ("global_steps", "skipped_steps", "micro_steps")}
    return states | {"scale": engine.precision.loss_scale, "lr": engine.lr_scheduler.state_dict()}


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        equal = found[name].equal(value) if isinstance(value, Tensor) else found[name] == value
        assert equal, f"{name}: {found[name]} is not {value}"


def save_somewhere(folder: Path, optimizer: str, stage: int) -> dict[str, Any]:
    engine = build(stage, optimizer=optimizer)
    go(engine, 4)
    engine.save_checkpoint(str(folder), client_state={"epoch": 3})
    state = snapshot(engine)
    engine.destroy()
    return state


def load_elsewhere(folder: Path, optimizer: str, stage: int, transport: str) -> dict[str, Any]:
    engine = build(stage, transport, optimizer)
    path, client = engine.load_checkpoint(str(folder))
    assert path == str(folder / "global_step2") and client == {"epoch": 3}
    state = snapshot(engine)
    go(engine, 2)
    assert engine.global_steps == 3
    engine.destroy()
    return state


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_saved_at_world_4_stage_3_loads_at_world_2_stage_1(optimizer: str, tmp_path: Path) -> None:
    expected = run(4, save_somewhere, tmp_path, optimizer, 3)[0]
    for world, stage, transport in ((2, 1, "shared"), (1, 0, "auto"), (4, 2, "gloo")):
        for found in run(world, load_elsewhere, tmp_path, optimizer, stage, transport):
            same(found, expected)


def test_saved_at_world_1_loads_at_world_4(tmp_path: Path) -> None:
    expected = run(1, save_somewhere, tmp_path, "AdamW", 0)[0]
    same(run(4, load_elsewhere, tmp_path, "AdamW", 3, "gloo")[3], expected)


@distributed(world_size=2, transports=("shared", "gloo"))
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_goes_on_bit_for_bit(dtype: str, transport: str, tmp_path: Path) -> None:
    """Model, optimizer, schedule, loss scale, random states and data position, in the middle of an epoch."""
    for stage in (0, 1, 2, 3):
        folder = str(tmp_path / str(stage))
        engine = build(stage, transport, dtype=dtype)
        go(engine, 8)
        engine.save_checkpoint(folder)
        losses = go(engine, 6)
        expected = snapshot(engine)
        engine.destroy()
        random.seed(5)
        numpy.random.seed(5)
        torch.manual_seed(5)
        engine = build(stage, transport, dtype=dtype)
        assert engine.load_checkpoint(folder)[0] is not None
        assert go(engine, 6) == losses, f"stage {stage}"
        same(snapshot(engine), expected)
        engine.destroy()


# ---- failures


def truncated(folder: Path) -> None:
    largest = max((file for file in folder.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    with largest.open("r+b") as file:
        file.truncate(largest.stat().st_size // 2)


def without_data(folder: Path) -> None:
    max((file for file in folder.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size).unlink()


def garbage(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file() and file.suffix in (".json", ""):
            file.write_bytes(b"\x80\x05garbage")


HARMS: dict[str, Callable[[Path], None]] = {"truncated": truncated, "without data": without_data, "garbage": garbage}


@distributed(world_size=2)
@pytest.mark.parametrize("harm", HARMS)
def test_a_bad_checkpoint_is_refused_and_changes_nothing(harm: str, tmp_path: Path) -> None:
    for stage in (1, 3):
        folder = tmp_path / str(stage)
        engine = build(stage)
        go(engine, 2)
        engine.save_checkpoint(str(folder), tag="bad")
        dist.barrier()
        if engine.rank == 0:
            HARMS[harm](folder / "bad")
        dist.barrier()
        go(engine, 2)
        before = snapshot(engine)
        with pytest.raises(CheckpointError):
            engine.load_checkpoint(str(folder), tag="bad")
        same(snapshot(engine), before)
        go(engine, 2)
        engine.destroy()


@distributed(world_size=2)
def test_another_models_checkpoint_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    small = toy.make(toy.seeded(toy.Net), 1)
    small.save_checkpoint(str(tmp_path))
    small.destroy()
    for stage in (0, 3):
        for kind, message in ((toy.Lm, "does not hold"), (lambda: toy.Net(dim=32), r"shape|\(16, 8\)")):
            engine = toy.make(toy.seeded(kind), stage)
            before = toy.checksum(engine)
            with pytest.raises(CheckpointError, match=message):
                engine.load_checkpoint(str(tmp_path))
            assert toy.checksum(engine) == before and engine.global_steps == 0
            engine.destroy()


@distributed(world_size=2)
def test_a_missing_checkpoint(tmp_path: Path) -> None:
    engine = build(3)
    assert engine.load_checkpoint(str(tmp_path)) == (None, {})
    with pytest.raises(CheckpointError, match="nowhere"):
        engine.load_checkpoint(str(tmp_path), tag="nowhere")
    engine.destroy()


@distributed(world_size=2)
def test_only_what_is_asked_for_is_loaded(tmp_path: Path) -> None:
    engine = build(2)
    go(engine, 4)
    engine.save_checkpoint(str(tmp_path))
    saved = snapshot(engine)
    engine.destroy()
    engine = build(3)
    engine.load_checkpoint(str(tmp_path), load_module_only=True)
    found = snapshot(engine)
    assert found["model.embedding.weight"].equal(saved["model.embedding.weight"])
    assert found["global_steps"] == 0 and found["embedding.weight.exp_avg"].eq(0).all()
    engine.load_checkpoint(str(tmp_path), load_optimizer_states=False)
    found = snapshot(engine)
    assert found["global_steps"] == 2 and found["embedding.weight.exp_avg"].eq(0).all()
    engine.destroy()

"""The honored keys of the JSON whose effect needs several ranks: one test per key, as in `tests/unit`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.checkpoint import CheckpointError
from slipstream.train.window import UnusedParameterError
from slipstream.world.watch import PeerError
from slipstream.zero import build
from slipstream.zero.shared import SharedComm
from tests import cases, probe, toy
from tests.pool import distributed
from tests.unit.test_honored_keys import Dot, sgd


def resting(unit: Any) -> int:
    """Elements of a unit's weights in this rank's memory between steps."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in (unit.full, unit.weights.whole())
    }
    return sum(storages.values()) // unit.full.element_size()


def held(engine: Any) -> dict[str, int]:
    """Elements of each state in this rank's memory between steps."""
    units = probe.units(engine)
    return {
        "weights": sum(resting(unit) for unit in units),
        "gradients": sum((unit.memory.local.tensor if unit.memory.local else unit.grads.whole()).numel() for unit in units),
        "states": sum(probe.moments(engine, unit, p)["exp_avg"].numel() for unit in units for p in probe.pieces(engine, unit)),
    }


def shares(engine: Any) -> dict[str, float]:
    """The number of copies of each state over all ranks, with no state in shared memory."""
    totals = torch.tensor(list(held(engine).values()), dtype=torch.float64)
    dist.all_reduce(totals)
    padded, numel = sum(unit.layout.numel for unit in probe.units(engine)), sum(p.numel() for p in engine.module.parameters())
    copies = totals / torch.tensor([padded, padded, numel])
    return dict(zip(("weights", "gradients", "states"), copies.tolist(), strict=True))


@distributed(world_size=2)
def test_zero_optimization_stage() -> None:
    """Each stage shards one more state: two ranks have one copy of it instead of two. Training is the same."""
    sums = set()
    for stage, copies in enumerate(((2, 2, 2), (2, 2, 1), (2, 1, 1), (1, 1, 1))):
        engine = toy.make(toy.seeded(toy.Lm), stage, "gloo")
        for i in range(2):
            toy.step(engine, toy.tokens(engine.rank, i))
        assert tuple(shares(engine).values()) == copies, f"stage {stage}"
        sums.add(int(toy.checksum(engine)))
        engine.destroy()
    assert len(sums) == 1


@distributed(world_size=2)
def test_zero_optimization_mics_shard_size() -> None:
    """Groups of one rank each hold all states; without the key the two ranks shard them."""
    sums = set()
    for size, copies in ((-1, 1.0), (1, 2.0), (2, 1.0)):
        engine = toy.make(toy.seeded(toy.Lm), 3, "gloo", zero_optimization={"mics_shard_size": size})
        for i in range(2):
            toy.step(engine, toy.tokens(engine.rank, i))
        assert set(shares(engine).values()) == {copies}, f"mics_shard_size {size}"
        checksums: list[Any] = [None, None]
        dist.all_gather_object(checksums, toy.checksum(engine))
        assert checksums[0] == checksums[1]
        sums.add(int(checksums[0]))
        engine.destroy()
    assert len(sums) == 1
    wide = toy.make(toy.seeded(toy.Lm), 3, dtype="bf16", communication_data_type="fp32", zero_optimization={"mics_shard_size": 1})
    assert all(unit.grads.dtype is torch.float32 for unit in probe.units(wide)), "what copies exchange"
    toy.step(wide, toy.tokens(wide.rank, 0))
    wide.destroy()


@distributed(world_size=2, transports=("shared", "gloo"))
def test_communication_data_type(transport: str) -> None:
    """1 + 2**-9 needs more bits than bf16 has: each rank's gradient is rounded before it is sent."""
    for stage in cases.stages(transport):
        for dtype, expected in ((None, 1 + 2.0**-9), ("fp32", 1 + 2.0**-9), ("bf16", 1.0)):
            engine = sgd(Dot(1), stage=stage, communication_data_type=dtype, slipstream={"transport": transport})
            toy.step(engine, torch.full((1,), 1 + 2.0**-9))
            assert engine.global_grad_norm == expected, f"stage {stage}, {dtype}"
            engine.destroy()


@distributed(world_size=2)
def test_gradient_allreduce_op() -> None:
    for stage in (0, 1, 2, 3):
        for op, expected in (("mean", 1.5), ("sum", 3.0)):
            engine = sgd(Dot(1), stage=stage, gradient_allreduce_op=op)
            toy.step(engine, torch.full((1,), 1.0 + engine.rank))
            assert engine.global_grad_norm == expected, f"stage {stage}, {op}"
            assert engine.state_dict()["weight"].item() == 1 - expected
            engine.destroy()


class Branching(toy.Net):
    def forward(self, x: torch.Tensor, skip: int = -1) -> torch.Tensor:
        h = self.inp(x)
        for k, block in enumerate(self.blocks):
            h = h if k == skip else block(h)
        out: torch.Tensor = self.out(h)
        return out


@distributed(world_size=2, transports=("shared", "gloo"))
def test_ignore_unused_parameters(transport: str) -> None:
    """If one rank does not use a block, all ranks raise before any update; the engine can continue."""
    for stage in cases.stages(transport):
        for ignore in (True, False):
            zero = {"stage": stage, "ignore_unused_parameters": ignore}
            engine = toy.make(toy.seeded(Branching), stage, transport, zero_optimization=zero, gradient_accumulation_steps=2)
            engine.module.out.bias.requires_grad_(False)  # frozen parameters may be unused
            before = toy.checksum(engine)
            skips = engine.rank == 1 or (stage == 3 and transport == "gloo")  # if ranks run the same branch
            for i in range(2):
                engine.backward(engine(toy.floats(engine.rank, i), skip=1 if skips else -1).square().mean())
                if i == 1 and not ignore:
                    with pytest.raises(UnusedParameterError, match=r"'blocks.1.norm.weight' got no gradient .*rank.*ignore_unused"):
                        engine.step()
                    engine.zero_grad()
                    assert toy.checksum(engine) == before
                else:
                    engine.step()
            for i in range(2):  # together they use all
                engine.backward(engine(toy.floats(engine.rank, i), skip=i).square().mean())
                engine.step()
            assert toy.checksum(engine) != before
            engine.destroy()


@distributed(world_size=2)
def test_enable_sanity_checks() -> None:
    """Ranks that write different values, unseen by version counters, all get an error; after equal values, the engine continues."""
    for stage in (0, 1, 2):
        engine = toy.make(toy.seeded(toy.Lm), stage, zero_optimization={"enable_sanity_checks": True})
        toy.step(engine, toy.tokens(engine.rank, 0))
        bias = engine.module.blocks[1].up.bias.data
        before = bias.clone()
        bias[3] += float(engine.rank)
        with pytest.raises(ValueError, match=r"'blocks.1.up.bias' has different values on different ranks"):
            toy.step(engine, toy.tokens(engine.rank, 1))
        bias.copy_(before)
        engine.step()
        assert engine.global_steps == 2
        engine.destroy()


@contextmanager
def log() -> Iterator[list[str]]:
    """Capture the package's log."""
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler, package = Keep(), logging.getLogger("slipstream")
    package.addHandler(handler)
    try:
        yield messages
    finally:
        package.removeHandler(handler)


@distributed(world_size=2)
def test_checkpoint_tag_validation(tmp_path: Path) -> None:
    """Each rank passes another tag."""
    for how, warns in (("Ignore", False), ("Warn", True), ("Fail", False)):
        engine = toy.make(toy.seeded(toy.Net), 1, checkpoint={"tag_validation": how})
        folder = tmp_path / how
        with log() as messages:
            if how == "Fail":
                with pytest.raises(CheckpointError, match="tags differ"):
                    engine.save_checkpoint(str(folder), tag=f"rank{engine.rank}")
            else:
                engine.save_checkpoint(str(folder), tag=f"rank{engine.rank}")
        said = any("tags differ" in message for message in messages)
        assert said is (warns and engine.rank == 0)
        dist.barrier()
        assert (folder / "rank0").exists() is (how != "Fail") and not (folder / "rank1").exists()
        engine.destroy()


@distributed(world_size=1)
def test_checkpoint_load_universal(tmp_path: Path) -> None:
    """The key selects which of two files names the tag of a load without a tag; if only one exists, it is used."""
    engine = toy.make(toy.seeded(toy.Net), 1)
    for tag in ("a", "b"):
        engine.save_checkpoint(str(tmp_path), tag=tag)
    engine.destroy()
    for universal in (True, False):
        engine = toy.make(toy.seeded(toy.Net), 1, checkpoint={"load_universal": universal})
        (tmp_path / "latest_universal").write_text("a")
        (tmp_path / "latest").write_text("b\n")
        assert engine.load_checkpoint(str(tmp_path))[0] == str(tmp_path / ("a" if universal else "b"))
        (tmp_path / ("latest_universal" if universal else "latest")).unlink()
        assert engine.load_checkpoint(str(tmp_path))[0] == str(tmp_path / ("b" if universal else "a"))
        engine.destroy()


@distributed(world_size=2)
def test_checkpoint_writer_decoupled(tmp_path: Path) -> None:
    """The checkpoint does not exist yet when the call returns, and exists after waiting for it."""
    for behind in (False, True):
        engine = toy.make(toy.seeded(toy.Net), 1, checkpoint={"writer": {"decoupled": behind}})
        engine.save_checkpoint(str(tmp_path / str(behind)))
        assert engine.saves.in_flight is behind
        engine.finish_save()
        assert not engine.saves.in_flight and (tmp_path / str(behind) / "latest").read_text() == "global_step0\n"
        engine.destroy()


@distributed(world_size=2)
def test_slipstream_keep_checkpoints(tmp_path: Path) -> None:
    for behind in (False, True):
        folder = tmp_path / str(behind)
        engine = toy.make(toy.seeded(toy.Net), 1, slipstream={"keep_checkpoints": 2}, checkpoint={"writer": {"decoupled": behind}})
        for tag in ("a", "b", "c"):
            engine.save_checkpoint(str(folder), tag=tag)
        engine.finish_save()
        assert sorted(path.name for path in folder.iterdir()) == ["b", "c", "latest"]
        engine.destroy()


@distributed(world_size=2)
def test_slipstream_transport() -> None:
    """Shared memory moves nothing through the process group; "auto" uses it if the ranks can, "shared" requires it."""
    for transport, shared in (("auto", True), ("shared", True), ("gloo", False)):
        engine = toy.make(toy.seeded(toy.Lm), 3, transport)
        toy.step(engine, toy.tokens(engine.rank, 0))
        operations = sum(book.launched for book in engine.watch.ledgers)
        assert isinstance(probe.transport(engine), SharedComm) is shared
        assert (operations == 0) is shared, f"{transport}: {operations} operations"
        engine.destroy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "hosts_agree", lambda axis: False)  # like on two hosts
        engine = toy.make(toy.seeded(toy.Lm), 3, "auto")
        assert not isinstance(probe.transport(engine), SharedComm)
        engine.destroy()
        with pytest.raises(ValueError, match="cannot map each other's memory"):
            toy.make(toy.seeded(toy.Lm), 3, "shared")
    for thread in threading.enumerate():
        if thread.name == "slipstream-watch":  # of the refused engine; it ends at its next beat
            thread.join(10)


@distributed(world_size=2, transports=("shared", "gloo"))
def test_slipstream_timeout_s(tmp_path: Path, transport: str) -> None:
    """Rank 1 is busy until rank 0 gives up, which is after two seconds instead of the default half hour."""
    engine = sgd(Dot(), stage=2, slipstream={"transport": transport, "timeout_s": 2})
    gave_up = tmp_path / "rank 0 gave up"
    engine.backward(engine(torch.ones(2)))
    if engine.rank == 0:
        start = time.monotonic()
        with pytest.raises(PeerError, match=r"rank 0 waited 2 s in .*\(step 0, step"):
            engine.step()
        assert 2 <= time.monotonic() - start < 15
        gave_up.touch()
    else:
        deadline = time.monotonic() + 30
        while not gave_up.exists():
            assert time.monotonic() < deadline, "rank 0 waits for ever"
            time.sleep(0.02)
    if transport == "gloo":  # a group is unusable after a time-out
        engine.watch.stop()
        return
    if engine.rank == 1:
        probe.transport(engine).exchange(torch.zeros(2, dtype=torch.float64))  # rank 0 waited for this
    engine.destroy()


def losses(poison: bool) -> tuple[list[float], Tensor]:
    """Losses of three steps at stage 3, and a released block's weights as seen by a forward hook that kept them."""
    engine = toy.make(toy.seeded(toy.Lm), 3, "gloo", slipstream={"transport": "gloo", "poison_released": poison})
    kept: list[Tensor] = []
    block = engine.module.blocks[0]
    block.register_forward_pre_hook(lambda module, args: kept.append(module.up.weight.detach()))
    results = [toy.step(engine, toy.tokens(engine.rank, i)).item() for i in range(3)]
    released = kept[-1].clone() if poison else torch.empty(0)  # without poison it has no memory
    engine.destroy()
    return results, released


@distributed(world_size=2)
def test_poison_does_not_change_training() -> None:
    """`slipstream.poison_released` between ranks; the key's own test is in `tests/unit`."""
    poisoned, released = losses(True)
    assert bool(released.isnan().all())
    assert poisoned == losses(False)[0]

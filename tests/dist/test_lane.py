"""GPU offload paths, simulated on a CPU: each copy happens as late as possible, so a missing wait gives wrong numbers.

`Late` replaces the CUDA streams (`CudaLane`): the engine assumes that its device has its own memory and takes all paths of a GPU on
CPU tensors. A CPU cannot test `now`: that a copy is ordered after earlier computation.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.ops.disk import ALIGNMENT, aligned
from slipstream.zero import build
from slipstream.zero.storage.lane import Event, Lane
from slipstream.zero.storage.store import DiskStore, HostStore, MemoryStore
from tests import probe, toy
from tests.cases import EVERYTHING, pairs
from tests.pool import distributed

pytestmark = pytest.mark.disk


class Late(Lane):
    """Copies at a wait only. A fence makes copies visible to the device; only a wait makes them visible to the host."""

    def __init__(self) -> None:
        self.pinned: dict[int, Tensor] = {}
        self.waits = 0
        self.lock = threading.RLock()

    def memory(self, nbytes: int) -> Tensor:
        memory = aligned(-(-nbytes // ALIGNMENT) * ALIGNMENT)[:nbytes]
        self.pinned[memory.untyped_storage()._cdata] = memory
        return memory

    def now(self) -> Event:
        return Past()

    def copy(self, target: Tensor, source: Tensor, after: Sequence[Event | None]) -> Event:
        assert target.dtype == source.dtype
        sides = [tensor.untyped_storage()._cdata in self.pinned for tensor in (target, source)]
        assert sorted(sides) == [False, True], "one side is the host's"
        return Copy(self, target, source, [event for event in after if isinstance(event, Copy)], to_host=sides[0])

    def behind(self, copy: Event) -> AbstractContextManager[None]:
        copy.fence()
        return nullcontext()

    def close(self) -> None:
        self.pinned.clear()


class Past(Event):
    def wait(self) -> None:
        pass

    def fence(self) -> None:
        pass


class Copy(Event):
    def __init__(self, lane: Late, target: Tensor, source: Tensor, after: list[Copy], to_host: bool) -> None:
        self.lane, self.target, self.source, self.after, self.to_host = lane, target, source, after, to_host
        self.taken: Tensor | None = None
        self.over = False
        if all(copy.over for copy in after):
            target.view(torch.uint8).fill_(255)  # in flight: NaN

    def wait(self) -> None:
        self.lane.waits += not self.over
        self._end()

    def fence(self) -> None:
        self._end() if not self.to_host else self._take()

    def _take(self) -> None:
        with self.lane.lock:
            if self.taken is None:
                for copy in self.after:
                    copy._end()
                self.taken = self.source.clone()

    def _end(self) -> None:
        self._take()
        with self.lane.lock:
            if not self.over:
                assert self.taken is not None
                self.target.copy_(self.taken)
                self.over = True


def make(
    lane: Lane | None, stage: int, weights: str = "none", optim: str = "none", folder: Path | None = None, **blocks: Any
) -> Any:
    """An engine that computes on a simulated device, or on the host if None."""
    path = str(folder)
    zero: dict[str, Any] = {
        "sub_group_size": 4096,
        "offload_optimizer": {"device": optim, "nvme_path": path, "buffer_count": 3},
        "offload_param": {"device": weights, "nvme_path": path, "max_in_cpu": 0},
    }
    net = toy.seeded(lambda: toy.Lm(48, 2))  # blocks of 14,208 weights: several chunks
    with nullcontext() if lane is None else patch.object(build, "lane_of", lambda _: lane):
        return toy.make(net, stage, zero_optimization=zero, gradient_clipping=0.5, **blocks)


def train(engine: Any, micros: int, steps: int = 3) -> list[Any]:
    results: list[Any] = []
    for i in range(steps):
        for micro in range(micros):
            results.append(float(toy.step(engine, toy.tokens(engine.rank, i, micro))))
        results.append(engine.global_grad_norm)
    return [*results, int(toy.checksum(engine))]


CASES = [  # stage, tier of the weights, tier of the optimizer's states
    *((stage, "none", "cpu") for stage in range(4)),
    (3, "cpu", "cpu"),
    (3, "cpu", "none"),
    (0, "none", "nvme"),
    (2, "none", "nvme"),
    (3, "nvme", "nvme"),
]
KINDS = {"none": MemoryStore, "cpu": HostStore, "nvme": DiskStore}


DTYPES = ("fp32", "bf16", "fp16") if EVERYTHING else ("bf16", "fp16")


@pytest.mark.parametrize("dtype", DTYPES)
@distributed(world_size=(1, 2) if EVERYTHING else 2, timeout=120)
def test_offloaded_states_are_bit_identical(dtype: str, tmp_path: Path) -> None:
    expected: dict[tuple[int, int, str], list[Any]] = {}
    for (stage, weights, optim), micros in (row[:2] for row in pairs(tuple(CASES), (1, 2), DTYPES) if row[2] == dtype):
        transport = "gloo" if dist.get_world_size() > 1 and stage == 3 else "auto"
        blocks: dict[str, Any] = {"dtype": dtype, "gradient_accumulation_steps": micros, "slipstream": {"transport": transport}}
        if (stage, micros, transport) not in expected:
            engine = make(None, stage, **blocks)
            expected[stage, micros, transport] = train(engine, micros)
            engine.destroy()
        engine = make(Late(), stage, weights, optim, tmp_path, **blocks)
        results = train(engine, micros)
        unit = probe.units(engine)[0]
        assert (
            type(unit.weights) is KINDS[weights] and type(probe.stores(engine, probe.units(engine)[0])["exp_avg"]) is KINDS[optim]
        )
        assert type(unit.grads) is (HostStore if stage >= 2 and optim != "none" else MemoryStore)
        engine.destroy()
        assert results == expected[stage, micros, transport], f"stage {stage}, weights {weights}, optimizer {optim}, {micros}"


def test_a_missing_wait_would_show() -> None:
    """The assumption of the test above."""
    for stage, what in ((2, HostStore), (2, MemoryStore), (3, MemoryStore)):
        results = []
        for forgets in (False, True):
            engine = make(Late(), stage, "none", "cpu", dtype="bf16")
            with patch.object(what, "_await", (lambda *_: None) if forgets else what._await):
                results.append(train(engine, 1, steps=2))
            engine.destroy()
        assert results[0] != results[1], f"stage {stage}: {what.__name__}"


def test_forward_and_backward_wait_for_no_copy() -> None:
    """The launching thread continues: only the device waits."""
    for stage, weights in ((2, "none"), (3, "none"), (3, "cpu")):
        lane = Late()
        engine = make(lane, stage, weights, "cpu", dtype="bf16", gradient_accumulation_steps=3)
        for step in range(2):
            probe.updater(engine).finish()
            lane.waits = 0
            for micro in range(3):
                engine.backward(engine(toy.tokens(0, step, micro)))
                assert lane.waits == 0, f"stage {stage}, micro-batch {micro}"
                engine.step()
            assert probe.updater(engine).is_done == (stage < 3), "sharded weights are updated beside the next forward"
        engine.destroy()


def test_other_features_wait_for_the_lane(tmp_path: Path) -> None:
    """Checkpoints, gradients by name and sleep wait for pending copies, at any time."""
    for stage, weights in ((0, "none"), (2, "none"), (3, "none"), (3, "cpu")):
        results = []
        for lane in (None, Late()):
            blocks: dict[str, Any] = {"dtype": "bf16", "gradient_accumulation_steps": 2, "slipstream": {"transport": "gloo"}}
            engine = make(lane, stage, weights, "cpu", **blocks)
            toy.step(engine, toy.tokens(0, 0))
            name = "blocks.0.up.weight"
            engine.set_gradient(name, engine.gradient(name) * 2)
            engine.sleep(device="disk", path=str(tmp_path))
            engine.wake()
            toy.step(engine, toy.tokens(0, 1))
            engine.save_checkpoint(str(tmp_path / "saved"))
            trained = train(engine, 2, steps=1)
            engine.load_checkpoint(str(tmp_path / "saved"))
            assert train(engine, 2, steps=1) == trained
            results.append(trained)
            engine.destroy()
        assert results[0] == results[1], f"stage {stage}, weights {weights}"

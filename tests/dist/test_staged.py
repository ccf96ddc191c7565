"""gloo for other devices stages transfers in host memory. The path can be forced on CPU."""

from typing import Any

import torch

from slipstream.zero.comm import ProcessGroupComm
from tests import probe, toy
from tests.cases import every_other
from tests.pool import distributed


def weights(stage: int, staged: bool, **blocks: Any) -> dict[str, torch.Tensor]:
    engine = toy.make(toy.seeded(toy.Lm), stage, "gloo", **blocks)
    comm = probe.transport(engine)
    assert isinstance(comm, ProcessGroupComm) and not comm.staged
    comm.staged = staged
    for i in range(3):
        toy.step(engine, toy.tokens(engine.rank, i))
    results: dict[str, torch.Tensor] = engine.state_dict()
    engine.destroy()
    return results


@distributed(world_size=2)
def test_staging_changes_no_bit() -> None:
    for stage, kind in every_other((0, 1, 2, 3), ("AdamW", "Muon")):  # equal shards, and whole tensors: shards of unequal length
        optimizer = {"type": kind, "params": {"lr": 1e-2}}
        plain, staged = (weights(stage, flag, optimizer=optimizer) for flag in (False, True))
        for name, value in staged.items():
            assert torch.equal(value, plain[name]), f"stage {stage}, {kind}: {name}"

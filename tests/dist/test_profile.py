"""The flops profiler under every placement of states: FLOP are those of the model, and steps keep their bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from slipstream.observe.flops import FlopSum, count
from slipstream.observe.profile import FlopsProfiler
from slipstream.parallel.layers import LayerSpec
from slipstream.parallel.module import PipelineModule
from tests import cases, toy
from tests.pool import distributed


def work_of(model: nn.Module, *args: Any) -> FlopSum:
    """Of one call on one rank without an engine."""
    work = FlopSum()
    for each in count(model, args, {}, dict(model.named_modules())).values():
        work.add(each)
    return work


def losses(stage: int, transport: str, **blocks: Any) -> list[float]:
    engine = toy.make(toy.seeded(toy.Lm), stage, transport, **blocks)
    found = [toy.step(engine, toy.tokens(engine.rank, step)).item() for step in range(3)]
    engine.destroy()
    return found


@distributed(world_size=2, transports=("shared", "gloo"))
def test_every_stage(transport: str, tmp_path: Path) -> None:
    model = toy.seeded(toy.Lm)
    expected, params = work_of(model, toy.tokens(0, 0)), sum(param.numel() for param in model.parameters())
    for stage in cases.stages(transport):
        file = tmp_path / f"{stage}.txt"
        block = {"enabled": True, "output_file": str(file)}
        assert losses(stage, transport, flops_profiler=block) == losses(stage, transport)
        dist.barrier()
        if dist.get_rank() == 0:
            profile = json.loads(Path(f"{file}.json").read_text())
            assert (profile["forward_flops"], profile["backward_flops"]) == (expected.forward, expected.backward), stage
            assert profile["params"] == params and profile["seconds"]["step"] > 0


@pytest.mark.disk
@distributed(world_size=2, transports=("gloo",))
def test_offload_and_recomputation(transport: str, tmp_path: Path) -> None:
    expected = work_of(toy.seeded(toy.Lm), toy.tokens(0, 0))
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    zero["offload_param"] = {"device": "nvme", "nvme_path": str(tmp_path)}
    file = tmp_path / "profile.txt"
    blocks = {"slipstream": {"activations": "recompute"}, "flops_profiler": {"enabled": True, "output_file": str(file)}}
    losses(3, transport, zero_optimization=zero, **blocks)
    if dist.get_rank() == 0:
        profile = json.loads(Path(f"{file}.json").read_text())
        assert profile["forward_flops"] == expected.forward
        assert profile["backward_flops"] - profile["recomputed_flops"] == expected.backward and profile["recomputed_flops"] > 0


@distributed(world_size=2, transports=("shared", "gloo"))
def test_stages_of_a_pipeline_sum_to_the_model(transport: str) -> None:
    specs = [LayerSpec(nn.Linear, 8, 16), *(LayerSpec(nn.Linear, 16, 16) for _ in range(4)), LayerSpec(nn.Linear, 16, 8)]
    whole = nn.Sequential(*(spec.build() for spec in specs))
    expected = work_of(whole, torch.ones(4, 8))
    module = PipelineModule(specs, num_stages=2, loss_fn=mse_loss)
    engine = toy.make(module, 1, transport, gradient_accumulation_steps=4)
    batches = [(toy.floats(0, 0, i), toy.floats(0, 0, 9 + i)) for i in range(4)]
    profiler = FlopsProfiler(engine.module, engine)
    profiler.start_profile()
    engine.train_batch(iter(batches))
    profiler.stop_profile()
    top = profiler.rows()[0]
    totals = torch.tensor([top.work.forward, top.work.backward, top.params])
    dist.all_reduce(totals)
    assert profiler.per == 4 and top.seconds > 0
    assert totals.tolist() == [expected.forward, expected.backward, sum(param.numel() for param in whole.parameters())]
    engine.destroy()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from slipstream.moe import MoE

        self.moe = MoE(
            16, nn.Sequential(nn.Linear(16, 32, bias=False), nn.ReLU(), nn.Linear(32, 16, bias=False)), num_experts=4, k=2
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.moe(x)[0].square().mean()


@distributed(world_size=2, transports=("shared",))
def test_experts_on_several_ranks(transport: str) -> None:
    """With an even load each rank computes as many rows as it has."""
    blocks = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
    engine = toy.make(toy.seeded(Experts), 1, transport, **blocks)
    for step in range(2):  # the first forward looks at what an expert returns
        if step == 1:
            profiler = FlopsProfiler(engine.module, engine)
            profiler.start_profile()
        engine.backward(engine(torch.randn(2, 8, 16)))
        engine.step()
    profiler.stop_profile()
    experts = 2 * 16 * 2 * 2 * 16 * 32  # two products of each of two experts for 16 tokens
    gate, sums = 2 * 16 * 16 * 4, 2 * 16 * 2 * 16  # of routes by their weights
    assert profiler.get_total_flops() == experts + gate + sums
    assert profiler.get_total_backward_flops() == experts * 3 // 2 + gate, "the tokens need no gradient"
    engine.destroy()

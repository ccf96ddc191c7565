"""Quantization in training on several ranks: the same bits at every stage."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slipstream
from slipstream import compression
from slipstream.compression.layers import LinearLayer_Compress
from tests import cases, toy
from tests.pool import distributed
from tests.unit.test_compression import MOQ, Curved, curved, hessian_shares, losses_of, snipped

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "compression_training": {
        "weight_quantization": {
            "shared_parameters": {"enabled": True, "quantize_groups": 2},
            "different_groups": {
                "a": {"params": {"start_bits": 6, "target_bits": 4, "quantization_period": 1}, "modules": ["0", "2"]}
            },
        }
    },
}


@distributed(world_size=2, transports=("shared", "gloo"))
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_quantized_training_has_the_same_bits_at_every_stage(half: torch.dtype, transport: str) -> None:
    config = CONFIG if half is torch.bfloat16 else CONFIG | {"bf16": {}, "fp16": {"enabled": True, "initial_scale_power": 8}}
    runs = []
    for stage in range(4):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        engine, *_ = slipstream.initialize(
            model=model, config=config | {"zero_optimization": {"stage": stage}, "slipstream": {"transport": transport}}
        )
        losses = []
        for step in range(4):
            x = torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).to(half)
            loss = engine(x).float().square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        if stage == 0:
            assert not torch.equal(engine.module[0].compressed()["weight"], engine.module[0].weight)
        runs.append((losses, engine.state_dict()))
        engine.destroy()
    for losses, state in runs[1:]:
        assert losses == runs[0][0]
        assert all(torch.equal(value, runs[0][1][name]) for name, value in state.items())


def test_layers_that_were_made_compressed_follow_the_steps() -> None:
    """Without `init_compression`, in an engine and in a plain loop: static ranges move, and techniques begin."""
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    seen = torch.stack(x.aminmax())
    for with_engine in (True, False):
        layer = LinearLayer_Compress(8, 8)
        layer.enable_activation_quantization(8, "symmetric", "static")
        layer.enable_sparse_pruning(0.5, offset=2)
        model = nn.Sequential(layer)
        if with_engine:
            config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.0}}}
            engine, *_ = slipstream.initialize(model=model, config=config)
        else:
            scheduler = compression.compression_scheduler(model)
        for scale in (1, 2):
            assert not layer.is_on("sparse")
            if with_engine:
                engine.backward(engine(scale * x).square().mean())
                engine.step()
            else:
                model(scale * x)
                scheduler.step()
        torch.testing.assert_close(layer.input_range, (0.95 + 0.1) * seen)
        assert layer.is_on("sparse")
        if with_engine:
            engine.destroy()


@distributed(world_size=2)
def test_static_ranges_follow_the_steps_of_all_ranks() -> None:
    """Whatever is recomputed, however many micro-batches: one range on every rank, of all inputs of a step."""
    technique = {
        "shared_parameters": {"enabled": True, "schedule_offset": 0, "range_calibration": "static"},
        "different_groups": {"a": {"params": {"bits": 8}, "modules": ["inner"]}},
    }

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(self.inner(x))

    def inputs(step: int, micro: int, rank: int) -> torch.Tensor:
        return torch.randn(2, 8, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))

    for stage, way, device in ((1, "keep", "cpu"), (3, "recompute", "meta")):
        torch.manual_seed(0)
        with torch.device(device):
            model = nn.Sequential(Block(), Block())
        engine, *_ = slipstream.initialize(
            model=model,
            config={
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 2,
                "optimizer": {"type": "SGD", "params": {"lr": 1e-2}},
                "zero_optimization": {"stage": stage},
                "compression_training": {"activation_quantization": technique},
                "slipstream": {"activations": way},
            },
        )
        expected = None
        for step in range(3):
            for micro in range(2):
                engine.backward(engine(inputs(step, micro, dist.get_rank())).square().mean())
                engine.step()
            seen = torch.stack([inputs(step, micro, rank) for micro in range(2) for rank in range(2)])
            ends = torch.stack(seen.aminmax())
            expected = ends if expected is None else 0.95 * expected + 0.05 * ends
            torch.testing.assert_close(engine.module[0].inner.input_range, expected)
        every: list[Any] = [None, None]
        dist.all_gather_object(every, [block.inner.input_range for block in engine.module])
        assert all(torch.equal(*pair) for pair in zip(*every, strict=True))
        engine.destroy()


@distributed(world_size=2)
def test_slices_of_compressed_layers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"not supported with pipeline or tensor parallelism \(pp 1, tp 2\)"):
        slipstream.initialize(model=nn.Linear(4, 4), config=CONFIG | {"tensor_parallel": {"autotp_size": 2}})


@distributed(world_size=2, transports=("shared", "gloo"))
def test_eigenvalues_are_of_the_mean_loss_on_every_rank(transport: str) -> None:
    ordered = MOQ | {"eigenvalue": {"enabled": True, "layer_name": "layers", "tol": 1e-4}}
    both = torch.randn(10, 4, generator=torch.Generator().manual_seed(22))
    both[:5] *= 3  # the first rank alone would find others
    own = both[5 * dist.get_rank() :][:5]
    expected = [1 + math.floor(4 * share) for share in hessian_shares(Curved(), both)]
    assert expected != [1 + math.floor(4 * share) for share in hessian_shares(Curved(), both[:5])]
    for stage in cases.stages(transport):
        more = {"zero_optimization": {"stage": stage}, "slipstream": {"transport": transport}}
        engine = curved(ordered, 2, own, **more)
        assert losses_of(engine) == [[2, 4 * factor] for factor in expected]
        engine.destroy()


@distributed(world_size=2)
def test_a_one_bit_optimizer_tells_what_its_signs_lost() -> None:
    config = toy.settings(1, optimizer={"type": "OneBitAdam", "params": {"lr": 1e-2, "freeze_step": 1}})
    engine, *_ = slipstream.initialize(model=toy.seeded(toy.Lm), config=config)
    inner = engine.optimizer.optimizer
    assert inner.worker_errors == [] == inner.server_errors
    for number in range(3):
        engine.backward(engine(toy.tokens(dist.get_rank(), number)))
        engine.step()
    workers, servers = inner.worker_errors, inner.server_errors
    assert workers and all(each.any() for each in (*workers, *servers)) and len(workers) == len(servers)
    sizes: list[Any] = [None, None]
    dist.all_gather_object(sizes, [each.numel() for each in servers])
    assert [sum(pair) for pair in zip(*sizes, strict=True)] == [each.numel() for each in workers]
    engine.destroy()


@distributed(world_size=2)
def test_scores_of_all_ranks_prune_alike_at_every_stage() -> None:
    masks = []
    for stage in range(4):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        options = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
        engine, *_ = slipstream.initialize(model=model, config=options | snipped(["0"]) | {"zero_optimization": {"stage": stage}})
        for step in range(6):
            engine.backward(
                engine(torch.randn(2, 8, generator=torch.Generator().manual_seed(9 * step + dist.get_rank()))).square().mean()
            )
            engine.step()
        masks.append(engine.module[0].get_buffer("sparse_mask").clone())
        every: list[Any] = [None, None]
        dist.all_gather_object(every, masks[-1])
        assert torch.equal(*every) and torch.equal(masks[-1], masks[0]) and masks[-1].float().mean() == 0.25
        engine.destroy()

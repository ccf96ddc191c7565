"""Quantization in training on several ranks: the same bits at every stage."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slipstream
from tests.pool import distributed
from tests.unit.test_compression import MOQ, Curved, curved, hessian_shares, losses_of

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
def test_quantized_training_has_the_same_bits_at_every_stage(transport: str) -> None:
    runs = []
    for stage in range(4):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        engine, *_ = slipstream.initialize(
            model=model, config=CONFIG | {"zero_optimization": {"stage": stage}, "slipstream": {"transport": transport}}
        )
        losses = []
        for step in range(4):
            x = torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).bfloat16()
            loss = engine(x).float().square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        runs.append((losses, engine.state_dict()))
        engine.destroy()
    for losses, state in runs[1:]:
        assert losses == runs[0][0]
        assert all(torch.equal(value, runs[0][1][name]) for name, value in state.items())


@distributed(world_size=2)
def test_slices_of_compressed_layers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"not built with pipelines and slices \(pp 1, tp 2\)"):
        slipstream.initialize(model=nn.Linear(4, 4), config=CONFIG | {"tensor_parallel": {"autotp_size": 2}})


@distributed(world_size=2, transports=("shared", "gloo"))
def test_eigenvalues_are_of_the_mean_loss_on_every_rank(transport: str) -> None:
    ordered = MOQ | {"eigenvalue": {"enabled": True, "layer_name": "layers", "tol": 1e-4}}
    both = torch.randn(10, 4, generator=torch.Generator().manual_seed(22))
    both[:5] *= 3  # the first rank alone would find others
    own = both[5 * dist.get_rank() :][:5]
    expected = [1 + math.floor(4 * share) for share in hessian_shares(Curved(), both)]
    assert expected != [1 + math.floor(4 * share) for share in hessian_shares(Curved(), both[:5])]
    for stage in range(4):
        more = {"zero_optimization": {"stage": stage}, "slipstream": {"transport": transport}}
        engine = curved(ordered, 2, own, **more)
        assert losses_of(engine) == [[2, 4 * factor] for factor in expected]
        engine.destroy()

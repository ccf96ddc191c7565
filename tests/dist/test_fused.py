"""Fused layers in engines: DeepSpeed's layer at every stage, and models of transformers in slices and pipelines."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import slipstream
from slipstream.fused import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer
from slipstream.fused.transformers import Fused
from tests.dist.test_sparse_attention import built, engine_of, train, twin
from tests.pool import distributed
from tests.unit.test_fused import options

DENSE: dict[str, Any] = {"sparse_attention": {"mode": "dense"}}


class Encoder(nn.Module):
    def __init__(self, **more: Any) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 32)
        self.layers = nn.ModuleList(DeepSpeedTransformerLayer(DeepSpeedTransformerConfig(**options(**more))) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x, padding = self.enter(x), torch.zeros(len(x), 1, 1, x.shape[1])
        padding[:, ..., 10:] = -1e4
        for layer in self.layers:
            x = layer(x, padding)
        return x.square().mean() + x[..., 0].mean()


def encoder(**more: Any) -> Encoder:
    torch.manual_seed(0)
    return Encoder(**more)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(2, 13, 8, generator=torch.Generator().manual_seed(10 * step + rank))


@distributed(world_size=2)
@pytest.mark.parametrize("pre", [True, False])
def test_the_layer_of_deepspeed_at_every_stage(pre: bool) -> None:
    more = {"pre_layer_norm": pre, "normalize_invertible": not pre, "gelu_checkpoint": pre}
    model, expected = encoder(**more), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        losses = [model(batch(step, rank)) for rank in range(2)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        expected.append(losses[dist.get_rank()].item())
    for stage, way in ((1, "keep"), (2, "keep"), (3, "recompute")):
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": stage},
            "slipstream": {"activations": way},
        }
        engine, *_ = slipstream.initialize(model=encoder(**more), config=config)
        found = []
        for step in range(3):
            found.append(engine(batch(step, dist.get_rank())))
            engine.backward(found[-1])
            engine.step()
        assert [loss.item() for loss in found] == pytest.approx(expected, rel=1e-4)
        for name, value in engine.state_dict().items():
            torch.testing.assert_close(value, model.state_dict()[name], atol=1e-5, rtol=1e-4)
        engine.destroy()


LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"mesh": {"pp": 2}}),
    ("llama", {"mesh": {"tp": 2}, "activations": "recompute"}),
    ("llama", {"mesh": {"tp": 2}, "tensor": {"sequence_parallel": True}}),
    ("bert", {"mesh": {"tp": 2}}),
]


@distributed(world_size=2)
def test_fused_layers_in_slices_and_pipelines() -> None:
    """Losses of the model as it was, trained by one process."""
    losses = {kind: twin(kind, 1, None)[0] for kind in ("llama", "bert")}
    for kind, own in LAYOUTS:
        engine = engine_of(built(kind), 1, own | {"fused_layers": True}, **DENSE)
        assert any(isinstance(module, Fused) for module in engine.module.modules())
        assert train(engine, 0) == pytest.approx(losses[kind], rel=1e-4), (kind, own)
        engine.destroy()

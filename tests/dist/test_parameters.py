"""Other uses of parameters in scripts: averages, penalties, parametrizations; in every stage and tier."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream import zero
from tests import cases, toy
from tests.pool import distributed

pytestmark = pytest.mark.disk

STAGES = cases.STAGES
ON_DISK = {"offload_param": {"device": "nvme", "max_in_cpu": 0}, "offload_optimizer": {"device": "nvme"}}


def plans(folder: Path) -> list[tuple[int, dict[str, Any]]]:
    """Every stage in memory, and stage 3 on disk."""
    disk = {name: block | {"nvme_path": str(folder)} for name, block in ON_DISK.items()}
    return [*((stage, {}) for stage in STAGES), (3, {"zero_optimization": disk})]


@distributed(world_size=2, transports=("shared", "gloo"))
def test_an_average_is_kept_and_swapped_in(transport: str, tmp_path: Path) -> None:
    """By name, one parameter at a time, and with torch's AveragedModel."""
    for stage, blocks in plans(tmp_path) if transport == "shared" else ((3, {}),):
        auto = "auto" if blocks else transport
        model = toy.seeded(toy.Lm)
        engine = toy.make(model, stage, auto, **blocks)
        with zero.gathered(model):
            averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
        ema = {name: value.clone() for name, value in engine.state_dict().items()}
        for i in range(2):
            toy.step(engine, toy.tokens(engine.rank, i))
            for name, param in model.named_parameters():
                with zero.gathered(param), torch.no_grad():
                    ema[name].lerp_(param, 0.5) if i else ema[name].copy_(param)
            with zero.gathered(model):
                averaged.update_parameters(model)
        for name, param in averaged.module.named_parameters():
            torch.testing.assert_close(param.detach(), ema[name])
        ours = engine.state_dict()
        with zero.gathered(model), torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(ema[name])
        for name, value in engine.state_dict().items():
            assert value.equal(ema[name]), (stage, name)
        engine.load_state_dict(ours)
        assert engine.state_dict()["head.weight"].equal(ours["head.weight"])
        assert toy.step(engine, toy.tokens(engine.rank, 2)).isfinite()
        engine.destroy()


def penalty(params: Any) -> Tensor:
    total: Tensor = sum(param.float().norm() for param in params)
    return total


@distributed(world_size=2, transports=("shared", "gloo"))
def test_norms_of_weights_in_the_loss(transport: str) -> None:
    """Inside `gathered`, with the backward inside or after it; gradients equal plain torch's."""
    twin = toy.seeded(toy.Lm)
    (sum(twin(toy.tokens(rank, 0)) / 2 for rank in range(2)) + 0.1 * penalty(twin.parameters())).backward()
    for stage in cases.stages(transport):
        for way in ("plain", "inside", "after"):
            model = toy.seeded(toy.Lm)
            engine = toy.make(model, stage, transport)
            loss = engine(toy.tokens(engine.rank, 0))
            if way == "plain" and stage == 3:
                with pytest.raises(RuntimeError, match=r"float.*slipstream.zero.gathered\(param\)"):
                    penalty(model.parameters())
                loss.backward()
            elif way == "plain":
                (loss + 0.1 * penalty(model.parameters())).backward()
            elif way == "inside":
                with zero.gathered(model):
                    (loss + 0.1 * penalty(model.parameters())).backward()
            else:
                with zero.gathered(model):
                    loss = loss + 0.1 * penalty(model.parameters())
                loss.backward()
            for name, param in twin.named_parameters() if (way, stage) != ("plain", 3) else ():
                where = f"{stage} {way} {name}"
                torch.testing.assert_close(engine.gradient(name), param.grad, msg=lambda m, w=where: f"{w}: {m}")
            engine.step()
            engine.destroy()


class WithPenalty(toy.Lm):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + 0.1 * penalty(self.parameters())


@distributed(world_size=2)
def test_norms_of_weights_in_the_model_and_weight_norm() -> None:
    def normed() -> nn.Module:
        model = WithPenalty()
        for block in model.blocks:
            nn.utils.parametrizations.weight_norm(block.up)
        return model

    twin = toy.seeded(normed)
    (sum(twin(toy.tokens(rank, 0)) / 2 for rank in range(2))).backward()
    for stage in STAGES:
        engine = toy.make(toy.seeded(normed), stage)
        engine(toy.tokens(engine.rank, 0)).backward()
        for name, param in twin.named_parameters():
            torch.testing.assert_close(engine.gradient(name), param.grad)
        engine.step()
        assert list(engine.state_dict()) == list(twin.state_dict())
        engine.destroy()


@distributed(world_size=2)
def test_a_write_between_a_penalty_and_its_backward_is_refused() -> None:
    model = toy.seeded(toy.Lm)
    engine = toy.make(model, 3)
    with zero.gathered(model.head):
        loss = penalty(model.head.parameters())
        with torch.no_grad():
            model.head.weight.add_(1)
    with pytest.raises(RuntimeError, match="written in place after a loss was computed from it"):
        loss.backward()
    engine.destroy()


@distributed(world_size=2)
def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    """Through gathering, state_dict, both kinds of saving, and destroy (LF#10813: ZeRO-1 and 2 broke aliases)."""
    from safetensors import safe_open

    class Tied(toy.Lm):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(16, toy.VOCABULARY, bias=False)
            self.head.weight = self.embedding.weight

    for number, (stage, blocks) in enumerate(plans(tmp_path)):
        folder = str(tmp_path / f"saved{number}")
        model = toy.seeded(Tied)
        engine = toy.make(model, stage, **blocks)
        toy.step(engine, toy.tokens(engine.rank, 0))
        with zero.gathered(model):
            assert model.head.weight is model.embedding.weight
            assert copy.deepcopy(model).head.weight.equal(model.embedding.weight)
        state = engine.state_dict()
        assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
        engine.save_pretrained(folder)
        file = next(Path(folder).glob("*.safetensors"))
        with safe_open(file, "pt") as saved:
            assert "embedding.weight" in saved.keys() and "head.weight" not in saved.keys()  # noqa: SIM118 (no mapping)
        engine.save_checkpoint(f"{folder}-checkpoint")
        engine.load_checkpoint(f"{folder}-checkpoint")
        assert engine.state_dict()["head.weight"].equal(state["embedding.weight"])
        engine.destroy()
        assert model.head.weight is model.embedding.weight


@distributed(world_size=2, transports=("shared", "gloo"))
def test_gathered_inside_itself_shows_the_same_values(transport: str) -> None:
    for stage in cases.stages(transport):
        engine = toy.make(toy.seeded(toy.Lm), stage, transport)
        weight, bias = engine.module.head.weight, engine.module.head.bias
        with zero.gathered(weight), torch.no_grad():
            weight.fill_(1.0)
            with zero.gathered([weight, bias], modifier_rank=1):
                assert weight.eq(1).all()
                weight.add_(engine.rank)
                bias.fill_(3.0 + engine.rank)
            assert weight.eq(2).all(), stage
        state = engine.state_dict()
        assert state["head.weight"].eq(2).all() and state["head.bias"].eq(4).all()
        engine.destroy()

"""DeepSpeed's names for compression, and the data, of single modules: against formulas, and what the config's blocks do."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream.data.sampler import CurriculumOrder, CurriculumPlace
from slipstream.optim import OneBitLamb
from slipstream.train.random_ltd import RandomLTDScheduler
from tests import toy
from tests.unit.test_compat import deepspeed, make, step  # noqa: F401 (fixtures)
from tests.unit.test_curriculum_data import VALUES, metric

pytestmark = pytest.mark.usefixtures("deepspeed")


def load(module: str) -> Any:
    return importlib.import_module(f"deepspeed.{module}")


def test_modules_by_their_paths_and_layers_by_their_classes() -> None:
    helper, net, x = load("compression.helper"), nn.ModuleDict({"a": nn.Sequential(nn.Tanh(), nn.Tanh())}), torch.randn(2, 8)
    helper.recursive_setattr(net, "a.1", nn.Identity())
    assert isinstance(helper.recursive_getattr(net, "a.1"), nn.Identity)
    layer = load("compression.basic_layer").LinearLayer_Compress(8, 4, bias=False)
    assert torch.equal(layer(x), x @ layer.weight.t())
    with pytest.raises(AttributeError, match=r"QuantAct is not built yet: .*compression_training"):
        load("compression.basic_layer").QuantAct  # noqa: B018


def sampler(metrics: dict[str, Any], rank: int, world: int, micro: int, **more: Any) -> Any:
    curriculum = {"enabled": bool(metrics), "curriculum_metrics": metrics}
    config = {"seed": 3, "data_sampling": {"num_epochs": 2, "curriculum_learning": curriculum}}
    return load("runtime.data_pipeline.data_sampling.data_sampler").DeepSpeedDataSampler(
        config, len(VALUES), micro, rank, world, None, 8 // (micro * world), rank, **more
    )


def test_a_sampler_of_samples_that_are_easy_enough(tmp_path: Path) -> None:
    metrics = {"rarity": metric(tmp_path, VALUES)}
    two = [sampler(metrics, rank, 2, 2) for rank in range(2)]
    drawn = [a + b for a, b in zip(*two, strict=True)]
    assert len(two[0]) == 2 * 44 == 4 * len(drawn) and [*map(len, drawn)] == [4] * 22
    flat = [sample for batch in drawn for sample in batch]
    for at in range(0, len(flat), 8):
        assert max(VALUES[sample] for sample in flat[at : at + 8]) <= min(10, 2 + at // 8 + 1)
    one, half = sampler(metrics, 0, 1, 4), sampler(metrics, 0, 1, 4)
    for _, batch in zip(range(5), half, strict=False):
        assert len(batch) == 4
    assert half.consumed_samples == 16 and half.curriculum_step == 3 and half.current_difficulties == {"rarity": 5}
    resumed = [sampler(metrics, rank, 2, 2) for rank in range(2)]
    for each in resumed:
        each.load_state_dict(half.state_dict())
    assert [a + b for a, b in zip(*resumed, strict=True)] == [*one][4:]
    with pytest.raises(ValueError, match="no metric 'rarity' of schedule_type 'custom'"):
        one.set_custom_curriculum_learning_schedule({"rarity": lambda step: 3})
    with pytest.raises(ValueError, match="over this dataset's 44 samples"):
        one.load_state_dict({"length": 3})
    with pytest.raises(ValueError, match="rank 2 of 2"):
        sampler(metrics, 2, 2, 2)


def test_a_sampler_without_a_curriculum_draws_all() -> None:
    batches = [*sampler({}, 0, 1, 8, drop_last=False)]
    first, last = [sample for batch in batches[:5] for sample in batch], batches[-1]
    assert len(set(first)) == 40 and len(last) == 8 and sum(map(len, batches)) == 88
    order, place = CurriculumOrder({}, 44, 3, 8), CurriculumPlace()
    assert batches[0] == order.draw(place, 8)[0].tolist()


class Mixing(nn.Module):
    """A layer whose output tells which tokens it has seen: each is increased by one; the mask is kept for the test."""

    seen: Any = None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, None]:
        self.seen = x.shape[1], mask
        return x + 1, None


def test_a_layer_of_a_script_drops_tokens() -> None:
    drop = load("runtime.data_pipeline.data_routing.basic_layer").RandomLayerTokenDrop(Mixing())
    x, mask = torch.zeros(2, 12, 4), torch.arange(144.0).view(1, 1, 12, 12).expand(2, -1, -1, -1)
    assert torch.equal(drop(x, mask=mask)[0], x + 1)  # before init_config
    schedule = {"min_value": 4, "max_value": 12, "schedule_type": "fixed_linear"}
    steps = {"schedule_config": {"require_steps": 4, "seq_per_step": 4}}
    config = {"total_layer_num": 2, "random_ltd_layer_num": 1, "random_ltd_layer_id": [1], "model_mask_name": "mask"}
    config |= {"random_ltd_schedule": schedule | steps, "hidden_state_order": "batch_seq_dim", "model_type": "decoder"}
    scheduler = RandomLTDScheduler(config)
    drop.init_config(config, scheduler, 1)
    outputs = [drop(x, mask=mask)[0] for _ in range(2)]
    for out in outputs:
        assert torch.equal(out.sum((1, 2)), torch.full((2,), 16.0)) and set(out.unique().tolist()) == {0.0, 1.0}
    assert not torch.equal(*outputs)
    length, seen = drop.random_ltd_layer.seen
    kept = outputs[1][0, :, 0].nonzero().view(-1)
    assert length == 4 and torch.equal(seen[0, 0], mask[0, 0][kept][:, kept])
    scheduler.update_seq(4)
    assert torch.equal(drop(x, mask=mask)[0], x + 1)
    scheduler.set_current_seq(4)
    assert torch.equal(drop.eval()(x, mask=mask)[0], x + 1)
    assert [*drop.state_dict()] == [*Mixing().state_dict()]


def test_an_engine_tells_its_compression(deepspeed: Any) -> None:  # noqa: F811
    curved = {"enabled": False, "max_iter": 7, "layer_name": "blocks"}
    engine = make(deepspeed, 1, eigenvalue=curved)
    assert (engine.eigenvalue_max_iter(), engine.eigenvalue_layer_name(), engine.eigenvalue_tol()) == (7, "blocks", 1e-2)
    assert not engine.eigenvalue_enabled()
    engine.destroy()


@pytest.mark.parametrize("kind", ["OneBitAdam", "ZeroOneAdam", "OneBitLamb"])
def test_a_one_bit_optimizer_tells_its_phase(deepspeed: Any, kind: str) -> None:  # noqa: F811
    freeze = {"var_freeze_step": 2, "local_step_clipper": 1} if kind == "ZeroOneAdam" else {"freeze_step": 2}
    engine = make(deepspeed, 1, optimizer={"type": kind, "params": {"lr": 1e-3, **freeze}})
    inner, key = engine.optimizer.optimizer, "lamb_freeze_key" if kind == "OneBitLamb" else "adam_freeze_key"
    found = []
    for number in range(3):
        found.append((getattr(inner, key), getattr(engine.optimizer, key), bool(inner.worker_errors)))
        step(engine, number)
    assert [pair[:2] for pair in found] == [(False, False), (False, False), (True, True)] and engine.optimizer.freeze_step == 2
    assert hasattr(engine.optimizer, "get_lamb_coeffs") == (kind == "OneBitLamb")
    if kind == "OneBitLamb":
        ratios = engine.optimizer.get_lamb_coeffs()
        assert len(ratios) == len([*engine.module.parameters()]) and all(0.01 <= ratio <= 10 for ratio in ratios)
    engine.destroy()


def test_trust_ratios_without_an_engine() -> None:
    model = toy.seeded(toy.Lm)
    optimizer = OneBitLamb(model.parameters(), lr=1e-2, weight_decay=0.0, freeze_step=5)
    model(toy.tokens(0, 0)).backward()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    ratios = optimizer.get_lamb_coeffs()
    assert not optimizer.lamb_freeze_key and optimizer.worker_errors == [] == optimizer.server_errors
    for ratio, old, p in zip(ratios, before, model.parameters(), strict=True):
        if old.any():  # the first update of Adam is the sign of the gradient, times the ratio
            assert (p - old).abs().max().item() == pytest.approx(1e-2 * ratio, rel=1e-3)

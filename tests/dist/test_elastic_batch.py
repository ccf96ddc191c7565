"""`slipstream.elastic_batch`: one global batch on any number of ranks, also where they do not divide it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import slipstream
from slipstream import LayerSpec, PipelineModule
from slipstream.config import DataWorld, ModelFacts, Plan, resolve
from slipstream.config.resolution import WorldError
from tests import cases
from tests.pool import distributed, run

STEPS = 6
FACTS = ModelFacts(device_type="cpu", supports_bf16=True)


def plan_of(ranks: int, facts: ModelFacts = FACTS, **config: Any) -> Plan:
    own = config.pop("slipstream", {})
    return resolve({**config, "slipstream": {"elastic_batch": True, **own}}, world=DataWorld(ranks=ranks), facts=facts)


@given(train=st.integers(1, 400), micro=st.one_of(st.none(), st.integers(1, 40)), ranks=st.integers(1, 12))
def test_elastic_batch(train: int, micro: int | None, ranks: int) -> None:
    sizes = {"train_batch_size": train} | ({} if micro is None else {"train_micro_batch_size_per_gpu": micro})
    fitting = [passes for passes in range(1, train + 1) if train % passes == 0 and train // passes >= ranks]
    if micro is not None:
        fitting = [passes for passes in fitting if train // passes <= micro * ranks]
    if not fitting:
        with pytest.raises(
            WorldError, match=r"cannot be split into equal micro-batches .*that give each of .* a sample"
        ) as refusal:
            plan_of(ranks, **sizes)
        if train >= ranks:  # the remedy is one
            least = int(str(refusal.value).split("_per_gpu to ")[1].split()[0])
            plan_of(ranks, train_batch_size=train, train_micro_batch_size_per_gpu=least)
        return
    batch = plan_of(ranks, **sizes).batch
    own = [batch.own(index, ranks) for index in range(ranks)]
    assert batch.train_batch_size == train == batch.accumulation * sum(own) and batch.accumulation == fitting[0]
    assert batch.micro_batch_size == max(own) <= (micro or train) and max(own) - min(own) <= 1 and min(own) >= 1
    assert sum(batch.weight(index, ranks) for index in range(ranks)) == pytest.approx(ranks)


def test_stated_sizes() -> None:
    stated = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    assert plan_of(4, **stated).batch.accumulation == 3, "as it stands, where it fits"
    assert plan_of(3, **stated).batch.accumulation == 4 and plan_of(5, **stated).batch.accumulation == 3
    assert plan_of(8, **stated).batch.accumulation == 3, "one sample a rank"
    loaded = ModelFacts(device_type="cpu", supports_bf16=True, loader_batch_size=8)
    batch = plan_of(3, facts=loaded, train_batch_size=256, train_micro_batch_size_per_gpu="auto").batch
    assert (batch.micro_batch_size, batch.accumulation) == (6, 16), "a DataLoader's batch is the most of a rank"
    assert plan_of(5, train_batch_size=24, gradient_accumulation_steps=2).batch.per_pass == 12
    with pytest.raises(
        WorldError, match=r"\(24\) cannot be split into 5 equal micro-batches that give each of 5 data-parallel ranks"
    ):
        plan_of(5, train_batch_size=24, gradient_accumulation_steps=5)
    with pytest.raises(
        WorldError, match=r"into equal micro-batches that give each of 4 data-parallel ranks a sample; use at most 3 ranks"
    ):
        plan_of(4, train_batch_size=3)
    with pytest.raises(ValueError, match="keeps train_batch_size on any number of ranks, but it is not set; set it"):
        plan_of(2, train_micro_batch_size_per_gpu=2)
    with pytest.raises(WorldError, match=r"use the nearest multiple, 3 or 6, or slipstream.elastic_batch"):
        resolve({"train_batch_size": 4}, world=DataWorld(ranks=3), facts=FACTS)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"slipstream": {"local_steps": {"every": 4}}}, "3 data-parallel ranks do not divide the 8 samples .*local_steps"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op sum"),
        ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation false"),
        ({"elasticity": {"enabled": True, "max_train_batch_size": 6, "micro_batch_sizes": [1]}}, "but elasticity computes one"),
        ({"facts": ModelFacts(device_type="cpu", supports_bf16=True, has_data=False)}, "pass training_data to initialize"),
    ],
)
def test_what_is_refused(change: dict[str, Any], reason: str) -> None:
    changed = ({} if "elasticity" in change else {"train_batch_size": 8}) | change
    with pytest.raises(ValueError, match=reason):
        plan_of(3, **changed)
    if "elasticity" not in change:
        assert plan_of(2, **changed).batch.per_pass == 8, "where ranks divide it, nothing is in the way"


# -- training --


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(64, 8, generator=generator), torch.randn(64, 4, generator=generator))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(samples())


def layers() -> list[LayerSpec]:
    return [LayerSpec(nn.Linear, 8, 16), LayerSpec(nn.Tanh), LayerSpec(nn.Linear, 16, 16), LayerSpec(nn.Linear, 16, 4)]


def module(**kwargs: Any) -> PipelineModule:
    return PipelineModule(layers(), loss_fn=mse_loss, seed_layers=True, **kwargs)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = module(num_stages=1, stages=(0,))

    def forward(self, x: Tensor) -> Any:
        return self.stages.chunk(0)(x)


def config(train: int, micro: int, stage: int, **blocks: Any) -> dict[str, Any]:
    own = {"elastic_batch": True, "seed": 3, **blocks.pop("slipstream", {})}
    return {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": micro,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "gradient_clipping": 0.3,
        "zero_optimization": {"stage": stage},
        "slipstream": own,
        **blocks,
    }


def twin(train: int, shuffled: bool = True) -> tuple[list[float], list[float]]:
    """Losses and norms of plain torch on the loader's order, an epoch's end left out."""
    model, data = Plain(), samples()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    losses, norms = [], []
    order = torch.randperm(64, generator=torch.Generator().manual_seed(3)) if shuffled else torch.arange(64)
    for step in range(STEPS):
        x, y = (torch.stack(part) for part in zip(*(data[int(i)] for i in order[step * train : (step + 1) * train]), strict=True))
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def mean(losses: list[float], weight: float) -> float:
    """Over ranks, of this rank's micro-batches."""
    total = torch.tensor(sum(losses) / len(losses) * weight, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def train(engine: Any, loader: Any, steps: int = STEPS) -> tuple[list[float], list[float]]:
    losses, norms, window = list[float](), list[float](), list[float]()
    for x, y in loader:
        loss = mse_loss(engine(x), y)
        window.append(loss.item())
        engine.backward(loss)
        engine.step()
        if engine.micro_steps % engine.plan.batch.accumulation == 0:
            losses.append(mean(window, engine.plan.batch.weight(dist.get_rank(), dist.get_world_size())))
            norms.append(engine.global_grad_norm)
            window = []
        if engine.global_steps == steps:
            break
    return losses, norms


@distributed(world_size=3)
def test_uneven_ranks_train_as_one_process() -> None:
    """A batch of 8 on 3 ranks, in one pass (3, 3, 2) and in two (2, 1, 1): losses and norms of plain torch on the same samples."""
    expected = twin(8)
    for stage, micro, loaded in (
        ((1, 3, True), (3, 2, False))
        if not cases.EVERYTHING
        else [(stage, micro, loaded) for stage in range(4) for micro in (2, 3) for loaded in (True, False)]
    ):
        data: Any = DataLoader(samples(), batch_size=8, shuffle=True) if loaded else samples()
        engine, _, loader, _ = slipstream.initialize(model=Plain(), config=config(8, micro, stage), training_data=data)
        assert engine.plan.batch.accumulation == (1 if micro == 3 else 2)
        losses, norms = train(engine, loader)
        assert losses == pytest.approx(expected[0], rel=1e-5) and norms == pytest.approx(expected[1], rel=1e-5), (stage, micro)
        engine.destroy()


@distributed(world_size=3)
def test_other_loops_and_scales() -> None:
    """A stream instead of a map; fp16's loss scale; a backward that the engine does not run."""
    expected = twin(8, shuffled=False)
    engine, _, loader, _ = slipstream.initialize(model=Plain(), config=config(8, 3, 2), training_data=Stream())
    losses: list[float] = []
    for x, y in loader:
        loss = mse_loss(engine(x), y)
        losses.append(mean([loss.item()], engine.plan.batch.weight(dist.get_rank(), 3)))
        loss.backward()
        engine.step()
        if engine.global_steps == STEPS:
            break
    assert losses == pytest.approx(expected[0], rel=1e-5)
    engine.destroy()

    halves = config(8, 3, 2, fp16={"enabled": True, "loss_scale": 128, "auto_cast": True})
    engine, _, loader, _ = slipstream.initialize(model=Plain(), config=halves, training_data=Stream())
    assert train(engine, loader)[0] == pytest.approx(expected[0], rel=0.01)
    engine.destroy()


@distributed(world_size=3)
def test_losses_beside_the_outputs() -> None:
    """Of a submodule's outputs, and of gradients: by `engine.scale` as in one process; a step without a weighed loss is refused."""
    rank = dist.get_rank()

    def losses(model: Any, module: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = x.requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return mse_loss(module.chunk(0)(x), y), slope.square().sum(1).mean()

    data, first = samples(), torch.arange(8)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(3))[:8]
    x, y = (torch.stack(part) for part in zip(*(data[int(i)] for i in order[first]), strict=True))
    plain = Plain()
    of_module, penalty = losses(plain, plain.stages, x, y)
    (of_module + penalty).backward()
    expected = float(nn.utils.clip_grad_norm_(plain.parameters(), 1e9))
    engine, _, loader, _ = slipstream.initialize(model=Plain(), config=config(8, 3, 1), training_data=data)
    x, y = next(iter(loader))
    assert len(x) == (3, 3, 2)[rank]
    engine.backward(sum(engine.scale(loss) for loss in losses(engine, engine.module.stages, x, y)))
    engine.step()
    assert engine.global_grad_norm == pytest.approx(expected, rel=1e-5)
    engine.backward(mse_loss(engine.module.stages.chunk(0)(x), y))
    with pytest.raises(RuntimeError, match=r"elastic_batch: samples of this rank count .*engine.scale\(loss\)"):
        engine.step()
    engine.destroy()


@distributed(world_size=3)
def test_shards_are_refused() -> None:
    class Shard(Stream):
        already_sharded = True

    with pytest.raises(ValueError, match=r"3 ranks do not divide a global batch of 8 samples .* let the loader shard it"):
        slipstream.initialize(model=Plain(), config=config(8, 3, 1), training_data=Shard())


@distributed(world_size=4)
def test_a_pipeline_of_uneven_replicas() -> None:
    """Two stages on two replicas with 3 and 2 samples in each of two micro-batches: the loss of all samples on each rank."""
    losses, norms = twin(10)
    raw = config(10, 3, 1, slipstream={"mesh": {"pp": 2}})
    engine, _, loader, _ = slipstream.initialize(model=module(num_stages=2), config=raw, training_data=samples())
    assert (engine.plan.batch.accumulation, engine.plan.batch.micro_batch_size) == (2, 3)
    batches = iter(loader)
    for step in range(STEPS):
        assert float(engine.train_batch(batches)) == pytest.approx(losses[step], rel=1e-5)
        assert engine.global_grad_norm == pytest.approx(norms[step], rel=1e-5)
    engine.destroy()


def part(folder: str, steps: int, resume: bool) -> list[float]:
    engine, _, loader, _ = slipstream.initialize(model=Plain(), config=config(8, 3, 2), training_data=samples())
    if resume:
        engine.load_checkpoint(folder)
    losses, _ = train(engine, loader, steps)
    engine.save_checkpoint(folder)
    engine.destroy()
    return losses


def test_a_run_on_two_three_and_one_ranks(tmp_path: Path) -> None:
    """Ranks come and go between steps; batches, their order and the losses stay."""
    parts: list[Callable[[], list[float]]] = [
        lambda: run(2, part, str(tmp_path), 2, False)[0],
        lambda: run(3, part, str(tmp_path), 4, True)[0],
        lambda: run(1, part, str(tmp_path), 6, True)[0],
    ]
    assert [loss for one in parts for loss in one()] == pytest.approx(twin(8)[0], rel=1e-5)

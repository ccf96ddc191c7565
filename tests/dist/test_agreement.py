"""If ranks start with different configs, models, optimizers or versions, every rank raises the same error."""

import json
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import slipstream
from slipstream.compat import engine as compat
from slipstream.parallel import ColumnParallelLinear, RowParallelLinear
from slipstream.parallel.module import PipelineModule
from tests import toy
from tests.pool import distributed


def refused(odd: int, **blocks: Any) -> str:
    """The error of `initialize` if one rank has other blocks in its config."""
    return told(lambda rank: toy.make(toy.seeded(toy.Net), 1, **(blocks if rank == odd else {})))


def curriculum(least: int) -> dict[str, Any]:
    metric = {"min_difficulty": least, "max_difficulty": 9, "schedule_config": {"total_curriculum_step": 9, "difficulty_step": 1}}
    return {"data_sampling": {"curriculum_learning": {"enabled": True, "curriculum_metrics": {"a": metric}}}}


def told(make: Callable[[int], Any]) -> str:
    rank = dist.get_rank()
    with pytest.raises(ValueError, match="the ranks of this engine differ: ") as raised:
        make(rank)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, str(raised.value))
    assert len(set(everyone)) == 1
    return re.fullmatch(r"the ranks of this engine differ: (.*)\. Use the same config.* on every rank", everyone[0])[1]


@distributed(world_size=3)
def test_a_config_that_differs() -> None:
    """The error names the minority, even if rank 0 is in it."""
    assert refused(1, gradient_clipping=0.5) == "rank 1 has gradient_clipping 0.5 where rank 0 has 0.0"
    assert refused(0, slipstream={"seed": 3}) == "rank 0 has slipstream.seed 3 where rank 1 has 0"
    rate = {"type": "AdamW", "params": {"lr": 1e-2 + 1e-9}}
    assert refused(2, optimizer=rate).startswith("rank 2 has optimizer.params.lr 0.010000001 where rank 0 has 0.01")
    batch = refused(1, train_micro_batch_size_per_gpu=4)
    assert "train_batch_size 12 where rank 0 has 6; rank 1 has train_micro_batch_size_per_gpu 4 where rank 0 has 2" in batch
    assert "bf16.enabled True where rank 0 has False" in refused(1, bf16={"enabled": True})
    assert "zero_optimization.mics_shard_size 1 where" in refused(1, zero_optimization={"stage": 3, "mics_shard_size": 1})
    assert "rank 1 refuses its config (unknown config key zero" in refused(1, zero=1)
    easier = told(lambda rank: toy.make(toy.seeded(toy.Net), 1, data_efficiency=curriculum(1 + rank // 2)))
    assert easier.endswith("curriculum_learning.curriculum_metrics.a.min_difficulty 2 where rank 0 has 1")
    scattered = told(lambda rank: toy.make(toy.seeded(toy.Net), rank))
    assert "rank 1 has zero_optimization.stage 1 where rank 0 has 0; rank 2 has zero_optimization.stage 2 where" in scattered


@distributed(world_size=2)
def test_a_config_that_one_rank_cannot_use(tmp_path: Path) -> None:
    good, bad, missing = (tmp_path / name for name in ("good.json", "bad.json", "missing.json"))
    if dist.get_rank() == 0:
        good.write_text(json.dumps(toy.settings(1)))
        bad.write_text(json.dumps(toy.settings(1, zero_optimization={"stage": 4})))
    dist.barrier()

    def make(odd: Path, start: Any = slipstream.initialize) -> Any:
        return lambda rank: start(model=toy.seeded(toy.Net), config=str(odd if rank == 1 else good))

    for start in (slipstream.initialize, compat.initialize):
        assert told(make(missing, start)).startswith(f"rank 1 refuses its config (no config file at {str(missing)!r}")
    stage = "config key zero_optimization.stage must be 0, 1, 2 or 3, got 4"
    assert told(make(bad)) == f"rank 1 refuses its config ({bad}: {stage})"
    # without an optimizer in the config, it is parsed earlier
    assert "rank 1 refuses its config (config key zero_opt" in told(
        lambda rank: slipstream.initialize(
            model=toy.seeded(toy.Net), config={"train_batch_size": 2, "zero_optimization": {"stage": 3 + rank}}
        )
    )


@distributed(world_size=2)
def test_an_optimizer_that_one_rank_refuses() -> None:
    def make(rank: int) -> None:
        model: Any = nn.ModuleDict({"q_proj": nn.Linear(8, 8, bias=False)})
        model.config = types.SimpleNamespace(num_attention_heads=2, hidden_size=8)
        params = {"params": list(model.parameters()), **({"use_muon": True} if rank else {})}
        optimizer = {"type": "Muon", "params": {"lr": 0.1, "per_head_muon": True}}
        slipstream.initialize(model=model, model_parameters=[params], config=toy.settings(1, optimizer=optimizer))

    refusal = "rank 1 refuses its optimizer (optimizer.params.per_head_muon divides the groups that initialize makes, and one of"
    assert told(make).startswith(refusal)


@distributed(world_size=2)
def test_weights_that_one_rank_cannot_quantize() -> None:
    """Not the config: what a change of the model needs of its values is there on one rank only."""

    def make(rank: int) -> None:
        model = toy.seeded(toy.Net)
        if rank == 1:
            next(each for each in model.modules() if isinstance(each, nn.Linear)).weight.data[0, 0] = float("inf")
        toy.make(model, 3, optimizer=None, weight_quantization={"quantized_initialization": {"num_bits": 8, "group_size": 8}})

    assert re.fullmatch(r"rank 1 refuses its model \(layer '.*' has non-finite weights; leave it out .*\)", told(make))


@distributed(world_size=2)
def test_data_that_differ() -> None:
    """A rank of fewer samples would end earlier, and the others would wait for it."""
    data = [torch.randn(8) for _ in range(8)]

    def make(samples: int) -> None:
        slipstream.initialize(model=toy.seeded(toy.Net), config=toy.settings(1), training_data=data[:samples])

    assert told(lambda rank: make(8 - 2 * rank)) == "rank 1 has training_data of 6 samples where rank 0 has 8 samples"

    def by_seed(rank: int) -> None:
        loader: Any = DataLoader(data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(rank))  # type: ignore[arg-type]
        slipstream.initialize(model=toy.seeded(toy.Net), config=toy.settings(1), training_data=loader)

    assert told(by_seed) == "rank 1 has training_data's seed 1 where rank 0 has 0"

    def other_rates(rank: int) -> None:
        model = toy.seeded(toy.Net)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * (1 + rank))
        config = toy.settings(1, optimizer=None)
        slipstream.initialize(model=model, optimizer=optimizer, config=config, training_data=None if rank else data)

    assert told(other_rates) == "rank 1 has optimizer group 0 lr 0.002 where rank 0 has 0.001"
    engine, *_ = slipstream.initialize(
        model=toy.seeded(toy.Net), config=toy.settings(1), training_data=data if dist.get_rank() == 0 else None
    )
    engine.destroy()  # the script may send the batches
    assert told(lambda rank: make(8 - 8 * rank)).startswith("rank 1 refuses its samples (training data: 0 samples are too few")


class Mpu:
    """One replica on all ranks, which have slices of its layers or shares of its sequences."""

    def __init__(self, kind: str) -> None:
        self.alone, _ = dist.new_subgroups(1)
        for what, value in {"rank": dist.get_rank(), "world_size": dist.get_world_size()}.items():
            setattr(self, f"get_{kind}_{what}", lambda value=value: value)

    def get_data_parallel_group(self) -> Any:
        return self.alone

    def get_data_parallel_rank(self) -> int:
        return 0


@distributed(world_size=2)
@pytest.mark.parametrize("by", ["tensor_model_parallel", "sequence_parallel", "mesh_param"])
def test_a_config_that_one_rank_of_a_replica_cannot_use(by: str, tmp_path: Path) -> None:
    """The ranks of the engine agree, not only those that have the same place in a replica."""
    shared: dict[str, Any] = {"mesh_param": (1, 2)} if by == "mesh_param" else {"mpu": Mpu(by)}
    missing, bad = str(tmp_path / "missing.json"), toy.settings(1, zero_optimization={"stage": 4})

    def make(odd: Any, start: Any = slipstream.initialize) -> Any:
        return lambda rank: start(model=toy.seeded(toy.Net), config=odd if rank == 1 else toy.settings(1), **shared)

    for start in (slipstream.initialize, compat.initialize):
        assert told(make(missing, start)).startswith(f"rank 1 refuses its config (no config file at {missing!r}")
    assert told(make(bad)) == "rank 1 refuses its config (config key zero_optimization.stage must be 0, 1, 2 or 3, got 4)"


class Tailed(nn.Module):
    """One layer, to which `change` may be applied."""

    def __init__(self, change: Callable[[nn.Module], Any] | None) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        if change is not None:
            change(self)


def drop_bias(model: Any) -> None:
    model.layer.bias = None


def reorder(model: Any) -> None:
    model.layer._parameters = dict(reversed(model.layer._parameters.items()))


@distributed(world_size=2)
def test_a_model_that_differs() -> None:
    def of(change: Callable[[Any], Any]) -> str:
        return told(lambda rank: toy.make(Tailed(change if rank else None), 3))

    assert of(drop_bias) == "rank 1 lacks parameter 'layer.bias', (8,) float32 on rank 0"
    assert "rank 1 has parameter 'layer.weight' (8, 8) float64 where rank 0 has (8, 8) float32" in of(nn.Module.double)
    assert of(lambda model: model.layer.bias.requires_grad_(False)) == (
        "rank 1 has parameter 'layer.bias' (8,) float32 frozen where rank 0 has (8,) float32"
    )
    extra = of(lambda model: model.register_buffer("mean", torch.zeros(3)))
    assert extra == "rank 1 has buffer 'mean' (3,) float32, which rank 0 lacks"
    assert of(reorder) == "their parameters or buffers are in a different order"
    assert of(rename).endswith("; and 1 more")


@distributed(world_size=2)
@pytest.mark.parametrize("axis", ["sp", "tp"])
def test_a_model_or_an_optimizer_that_differs_within_a_replica(axis: str) -> None:
    """Ranks of one replica are given the same model, which is cut later."""
    own = {"mesh": {axis: 2}}
    text = told(lambda rank: toy.make(Tailed(drop_bias if rank else None), 1, slipstream=own))
    assert text == "rank 1 lacks parameter 'layer.bias', (8,) float32 on rank 0"
    wider = told(lambda rank: toy.make(Sliced(8 + 2 * rank), 1, slipstream=own))
    assert wider == "rank 1 has parameter 'up.weight' (10, 8) float32 where rank 0 has (8, 8) float32"

    def make(rank: int) -> Any:
        model = Sliced(8)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * (1 + rank))
        return slipstream.initialize(model=model, optimizer=optimizer, config=toy.settings(1, optimizer=None, slipstream=own))

    assert told(make) == "rank 1 has optimizer group 0 lr 0.002 where rank 0 has 0.001"


@distributed(world_size=4)
def test_a_stage_that_differs() -> None:
    """Stages have other layers than each other; a layer that one rank of a stage has otherwise is named on the ranks of all."""

    def make(rank: int) -> Any:
        layers = [nn.Linear(8, 8), nn.Linear(8, 8, bias=rank != 3)]
        module = PipelineModule(layers, num_stages=2, partition_method="uniform", loss_fn=nn.functional.mse_loss)
        return toy.make(module, 1, slipstream={"mesh": {"pp": 2}})

    assert told(make) == "rank 3 lacks parameter '1.bias', (8,) float32 on rank 2"


class Sliced(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(8, hidden, bias=False)
        self.down = RowParallelLinear(8, 8, bias=False)


def rename(model: Any) -> None:
    model.stack = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    del model.layer


@distributed(world_size=2)
def test_an_optimizer_or_a_version_that_differs() -> None:
    def with_groups(rank: int) -> Any:
        model = toy.seeded(toy.Net)
        params, rest = list(model.parameters())[: 1 + rank], list(model.parameters())[1 + rank :]
        optimizer = torch.optim.AdamW([{"params": params}, {"params": rest, "lr": 1e-3 * (1 + rank)}], lr=1e-2)
        return slipstream.initialize(model=model, optimizer=optimizer, config=toy.settings(1, optimizer=None))

    groups = told(with_groups)
    assert "rank 1 has optimizer group 1 lr 0.002 where rank 0 has 0.001" in groups
    assert "rank 1 has optimizer group of 'inp.bias' 0 where rank 0 has 1" in groups
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(slipstream, "__version__", "0.0.7")
        assert "rank 1 has slipstream's version 0.0.7 where" in told(lambda rank: toy.make(toy.seeded(toy.Net), 1))


@pytest.mark.disk
@distributed(world_size=2)
def test_settings_that_may_differ_by_rank(tmp_path: Path) -> None:
    """Disk paths and I/O settings, prints, time-outs, torch's seed, initial values: rank 0's weights are used."""
    rank = dist.get_rank()
    folder = tmp_path / str(rank)
    folder.mkdir()
    engine = toy.make(
        toy.seeded(toy.Net, seed=rank),
        1,
        zero_optimization={"offload_optimizer": {"device": "nvme", "nvme_path": str(folder)}},
        aio={"queue_depth": 8 + rank},
        steps_per_print=1 + rank,
        slipstream={"timeout_s": 20 + rank},
    )
    engine.destroy()

"""From `initialize` to `destroy`: arguments, several engines in one process, and no leaks."""

import argparse
import copy
import gc
import io
import json
import os
import pickle
import unittest.mock
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

import slipstream
from tests import cases, toy
from tests.pool import distributed

STAGES = cases.STAGES


def resident() -> int:
    """Resident bytes, including shared ones."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:")


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc")
@distributed(world_size=2, transports=("shared", "gloo"), timeout=120)
def test_50_cycles_stay_at_flat_memory(transport: str) -> None:
    def cycle(i: int) -> None:
        engine = toy.make(toy.Lm(dim=64), i % 4, transport, dtype="bf16")
        toy.step(engine, toy.tokens(engine.rank, i))
        engine.destroy()

    def measure() -> tuple[int, int, int, int]:
        gc.collect()
        return resident(), mappings(), descriptors(), len(gc.get_objects())

    for i in range(10):
        cycle(i)
    before = measure()
    for i in range(40):
        cycle(i)
    after = measure()
    one_engine = sum(p.numel() for p in toy.Lm(dim=64).parameters()) * 16
    assert after[0] - before[0] < 8 * one_engine, f"{(after[0] - before[0]) / 40 / one_engine:.2f} engines a cycle stay"
    assert (after[1], after[2]) == (0, before[2]) and after[3] - before[3] < 400


@distributed(world_size=2, transports=("shared", "gloo"))
def test_destroy_gives_ordinary_parameters_back(transport: str) -> None:
    for stage in cases.stages(transport):
        model = toy.seeded(toy.Lm)
        ids = [id(p) for p in model.parameters()]
        engine = toy.make(model, stage, transport)
        toy.step(engine, toy.tokens(engine.rank, 0))
        trained = engine.state_dict()
        engine.destroy()
        engine.destroy()
        assert [id(p) for p in model.parameters()] == ids
        for name, p in model.named_parameters():
            assert type(p) is nn.Parameter and p.grad is None and p.detach().equal(trained[name])
        copy.deepcopy(model)(toy.tokens(0, 0)).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        again = toy.make(model, stage, transport)
        toy.step(again, toy.tokens(again.rank, 0))
        again.destroy()


FEATURES: tuple[tuple[int, dict[str, Any]], ...] = (
    (3, {"checkpoint": {"writer": {"decoupled": True}}}),
    (1, {"zero_optimization": {"zero_quantized_gradients": True, "zeropp_loco_param": {}}, "fp16": {"enabled": True}}),
    (2, {"progressive_layer_drop": {"enabled": True}, "wall_clock_breakdown": True}),
    (0, {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 1}}}),
)


@distributed(world_size=1)
def test_a_destroyed_engine_is_freed_at_once() -> None:
    """Python's collector of cycles may be off, and does not know how much memory waits for it."""
    gc.disable()
    try:
        for stage, blocks in FEATURES:
            engine = toy.make(toy.seeded(toy.Lm), stage, **blocks)
            for i in range(2):
                toy.step(engine, toy.tokens(0, i))
            parts = {name: weakref.ref(getattr(engine, name)) for name in ("module", "states", "optimizer")}
            parts["weight"] = weakref.ref(engine.module.head.weight)
            engine.destroy()
            del engine
            assert not [name for name, part in parts.items() if part() is not None], blocks
    finally:
        gc.enable()


@distributed(world_size=2, transports=("shared", "gloo"))
def test_engines_are_independent(transport: str) -> None:
    """A teacher without optimizer and two students of different stages, trained alternately, equal separate runs."""

    def student(stage: int, other: Any, teacher: Any) -> tuple[int, Any]:
        engine = toy.make(toy.seeded(toy.Net), stage, transport)
        for i in range(3):
            x = toy.floats(engine.rank, i)
            with torch.no_grad():
                target = teacher(x)
            (engine(x) - target).square().mean().backward()
            if other is not None:
                other(x).square().mean().backward()
                other.step()
            engine.step()
        return int(toy.checksum(engine)), engine

    teacher = toy.make(toy.seeded(toy.Net, 9), 3, transport, optimizer=None)
    alone, first = student(3, None, teacher)
    together, second = student(3, first, teacher)
    assert alone == together and int(toy.checksum(first)) != alone
    first.destroy()
    toy.checksum(second)
    for engine in (second, teacher):
        engine.destroy()


@distributed(world_size=2)
def test_an_engine_without_optimizer_says_so() -> None:
    engine = toy.make(toy.seeded(toy.Net), 3, optimizer=None)
    engine(toy.floats(engine.rank, 0))
    with pytest.raises(RuntimeError, match="needs an optimizer"):
        engine.step()
    engine.destroy()


# ---- sources of models and optimizers


@distributed(world_size=2, transports=("shared", "gloo"))
def test_a_model_on_meta(transport: str) -> None:
    for stage in cases.stages(transport):
        with torch.device("meta"):
            model = toy.Lm()
            model.head.weight = model.embedding.weight
        references = dict(model.named_parameters())
        engine = toy.make(model, stage, transport)
        assert all(p is references[name] for name, p in model.named_parameters())
        losses = [toy.step(engine, toy.tokens(engine.rank, 0)).item() for _ in range(5)]
        assert losses[-1] < losses[0] < 10
        state = engine.state_dict()
        assert state["blocks.0.norm.weight"].mean() > 0.5 and not any(v.is_meta for v in state.values())
        engine.destroy()


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 3))


@distributed(world_size=1)
def test_meta_without_initialization_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), Bare())
    with pytest.raises(ValueError, match=r"module '1' \(Bare\) is on meta and has no reset_parameters"):
        toy.make(model, 3)


@distributed(world_size=1)
def test_meta_shared_with_a_module_that_can_initialize_it() -> None:
    with torch.device("meta"):
        bare, linear = Bare(), nn.Linear(3, 3)
        linear.weight = bare.weight
        model = nn.Sequential(bare, linear)
    engine = toy.make(model, 3)
    assert bare.weight is linear.weight and 0 < engine.state_dict()["0.weight"].abs().max() < 1
    engine.destroy()


class Partial(nn.Module):
    """A model whose own initializer handles linear layers only, like nanoGPT's."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), last

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


@distributed(world_size=1)
def test_meta_with_an_initializer_of_the_models_own() -> None:
    with torch.device("meta"):
        model = Partial(Bare())
    with pytest.raises(ValueError, match=r"last.weight was on meta, and neither .*Bare.* gave it a value"):
        toy.make(model, 3)
    loaded = nn.Linear(3, 3)
    before = loaded.weight.detach().clone()
    with torch.device("meta"):
        model = Partial(nn.Identity())
    model.last = loaded
    engine = toy.make(model, 3)
    state = engine.state_dict()
    assert state["first.weight"].eq(0.5).all() and state["last.weight"].equal(before)
    engine.destroy()


@distributed(world_size=2)
def test_the_arguments_of_an_older_script(tmp_path: Path) -> None:
    """`--deepspeed --deepspeed_config PATH`, parsed and passed to initialize(args=); one step."""
    path = tmp_path / f"config{dist.get_rank()}.json"
    path.write_text(json.dumps(toy.settings(2)))
    parser = slipstream.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    model = toy.seeded(toy.Lm)
    engine, optimizer, _, _ = slipstream.initialize(args=args, model=model, model_parameters=model.parameters())
    assert engine.plan.zero.stage == 2 and engine.plan.batch.train_batch_size == 4
    losses = [toy.step(engine, toy.tokens(engine.rank, 0)).item() for _ in range(3)]
    assert losses[-1] < losses[0] and optimizer.param_groups[0]["lr"] == 1e-2
    engine.destroy()
    with pytest.raises(ValueError, match="two configs: initialize"):
        slipstream.initialize(args=argparse.Namespace(deepspeed_config=str(path)), model=model, config=toy.settings(1))


@distributed(world_size=1)
def test_a_model_has_one_engine_at_a_time() -> None:
    model = toy.seeded(toy.Net)
    engine = toy.make(model, 0)
    with pytest.raises(ValueError, match=r"'inp.weight' already belongs to an engine; call that engine's destroy\(\)"):
        toy.make(model, 3)
    engine.destroy()
    toy.make(model, 3).destroy()
    with pytest.raises(ValueError, match=r"optimizer='adam': a name goes into the config"):
        slipstream.initialize(model=model, optimizer="adam", config=toy.settings(0))


class Mpu:
    """The mpu of a run whose ranks 0, 1 and 2, 3 are data-parallel pairs."""

    def __init__(self) -> None:
        self.group, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])

    def get_data_parallel_group(self) -> Any:
        return self.group


@distributed(world_size=4, transports=("shared", "gloo"))
def test_mpus_group_shares_the_states(transport: str) -> None:
    mpu = Mpu()
    for stage in cases.stages(transport):
        model = toy.seeded(toy.Lm, dist.get_rank() // 2)
        engine, *_ = slipstream.initialize(model=model, config=toy.settings(stage, transport), mpu=mpu)
        assert engine.world_size == 2 and engine.rank == dist.get_rank() and engine.mesh.batch.index == dist.get_rank() % 2
        toy.step(engine, toy.tokens(engine.rank, 0))
        sums = [torch.zeros((), dtype=torch.int64) for _ in range(4)]
        dist.all_gather(sums, toy.checksum(engine))
        assert sums[0] == sums[1] != sums[2] == sums[3]
        engine.destroy()


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0, "lr": 0.05},
        {"params": [p for n, p in named if n.endswith("weight")], "weight_decay": 0.5},
    ]


Source = Callable[[nn.Module], dict[str, Any]]
SOURCES: dict[str, Source] = {
    "groups for the config's": lambda model: {"model_parameters": grouped(model)},
    "an object": lambda model: {"optimizer": torch.optim.AdamW(grouped(model), lr=1e-2)},
    "a callable": lambda model: {
        "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-2),
        "model_parameters": grouped(model),
    },
}


@distributed(world_size=2)
@pytest.mark.parametrize("source", SOURCES)
def test_groups_have_their_own_rate_and_decay(source: str) -> None:
    twin = toy.seeded(toy.Net)
    optimizer = torch.optim.AdamW(grouped(twin), lr=1e-2)
    for i in range(3):
        sum(twin(toy.floats(rank, i)).square().mean() / 2 for rank in range(2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected: dict[str, Tensor] = dict(twin.state_dict())
    for stage in STAGES:
        model = toy.seeded(toy.Net)
        given = SOURCES[source](model)
        config = toy.settings(stage, **({"optimizer": None} if "optimizer" in given else {}))
        engine, handle, _, _ = slipstream.initialize(model=model, config=config, **given)
        assert [len(group["params"]) for group in handle.param_groups] == [11, 11]
        for i in range(3):
            engine(toy.floats(engine.rank, i)).square().mean().backward()
            engine.step()
        for name, value in engine.state_dict().items():
            torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=2e-4, msg=lambda m, n=name, s=stage: f"{s} {n}: {m}")
        engine.destroy()


@distributed(world_size=2)
def test_an_optimizer_that_has_stepped_brings_its_state() -> None:
    def warm() -> tuple[Any, torch.optim.Optimizer]:
        model = toy.seeded(toy.Net)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for i in range(2):
            model(toy.floats(0, i)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    model, optimizer = warm()
    sum(model(toy.floats(rank, 5)).square().mean() / 2 for rank in range(2)).backward()
    optimizer.step()
    for stage in STAGES:
        other, brought = warm()
        engine, *_ = slipstream.initialize(model=other, optimizer=brought, config=toy.settings(stage, optimizer=None))
        engine(toy.floats(engine.rank, 5)).square().mean().backward()
        engine.step()
        for name, value in engine.state_dict().items():
            torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-4, atol=1e-5)
        engine.destroy()


class Averaging(torch.optim.SGD):
    """Evaluates with other weights than it trains, like schedule-free optimizers."""

    def train(self) -> None:
        pass

    def eval(self) -> None:
        pass


@distributed(world_size=2)
def test_unshardable_optimizers_are_refused_by_name() -> None:
    model, stranger = toy.seeded(toy.Net), nn.Parameter(torch.zeros(3))
    for optimizer, message in (
        (torch.optim.LBFGS(model.parameters()), "LBFGS.*closure"),
        (Averaging(model.parameters()), r"Averaging has train\(\) and eval\(\).*would swap nothing"),
        (torch.optim.SGD([stranger], lr=0.1), r"group 0 holds a parameter of shape \(3,\) that is not the model's"),
        (lambda params: "no optimizer", "returned a str"),
    ):
        with pytest.raises(ValueError, match=message):
            slipstream.initialize(model=model, optimizer=optimizer, config=toy.settings(3, optimizer=None))


class Counting(torch.optim.SGD):
    """Counts steps in its groups, like Apex's FusedAdam and schedule-free optimizers; the rate decreases with the count."""

    elementwise = True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if group["params"]:
                group["count"] = group.get("count", 0) + 1
                group["clock"] += 1
                group["lr"] = 0.1 / group["count"] + 0.01 * float(group["clock"])
        super().step()


def counting(model: nn.Module) -> Counting:
    """Two groups, one with parameters of the first unit only."""
    named = list(model.named_parameters())
    groups = [{"params": [p for n, p in named if ("inp" in n) is first], "clock": torch.zeros(())} for first in (True, False)]
    return Counting(groups, lr=0.1)


@distributed(world_size=1)
def test_groups_advance_once_a_step() -> None:
    twin = toy.seeded(toy.Net)
    plain = counting(twin)
    model = toy.seeded(toy.Net)
    engine, handle, *_ = slipstream.initialize(model=model, optimizer=counting(model), config=toy.settings(2, optimizer=None))
    clocks = [group["clock"] for group in handle.param_groups]
    for i in range(3):
        for each in (twin, engine):
            each(toy.floats(0, i)).square().mean().backward()
        plain.step()
        plain.zero_grad()
        engine.step()
    assert [group["count"] for group in handle.param_groups] == [3, 3] == [int(clock) for clock in clocks]
    for name, value in engine.state_dict().items():
        torch.testing.assert_close(value, twin.state_dict()[name])
    engine.destroy()


@distributed(world_size=2)
def test_a_refusal_leaves_the_model_unchanged() -> None:
    """Also errors that appear only when the optimizer, the scheduler and the loader are made."""
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    model = toy.seeded(toy.Net)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    typo = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_step": 3}}}
    uncorrected = {"optimizer": {"type": "Adam", "params": {"bias_correction": False}}}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        (typo, {}, "did you mean 'warmup_num_steps'"),
        ({}, {"training_data": []}, "0 samples are too few for a batch"),
        ({}, {"training_data": DataLoader(range(8), batch_size=3)}, "a DataLoader with batch size 3 and sampler SequentialSampler"),  # type: ignore[arg-type]
        ({}, {"lr_scheduler": plateau}, r"a ReduceLROnPlateau, whose step\(\) needs metrics.*scheduler.step\(metric\)"),
        ({"optimizer": None}, {"optimizer": optimizer, "lr_scheduler": plateau(optimizer)}, "whose step"),
        ({}, {"lr_scheduler": 3}, r"is a int, which has no step\(\)"),
        ({}, {"lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}, r"is a StepLR of another optimizer \(SGD\)"),
        ({"optimizer": None, "scheduler": {"type": "WarmupLR"}}, {}, r"the config's scheduler \(WarmupLR\) has no optimizer"),
        ({"optimizer": {"type": "MuAdam"}}, {}, "scales learning rates by the model's base shapes"),
        (uncorrected, {"model": toy.seeded(toy.Net).double()}, "bias_correction=false.*float64"),
    ]
    for blocks, arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            slipstream.initialize(**({"model": model, "config": toy.settings(3, **blocks)} | arguments))
        for name, value in model.state_dict().items():
            assert type(model.get_parameter(name)) is nn.Parameter and value.equal(before[name]), message
    with torch.device("meta"):
        model = toy.Net()
    with pytest.raises(ValueError, match="unknown config key"):
        toy.make(model, 3, stag=3)
    assert all(param.is_meta for param in model.parameters()), "not even allocated"


@distributed(world_size=1)
def test_pickling_a_wired_model_says_what_to_save() -> None:
    engine = toy.make(toy.Lm(), 1, "shared")
    for wired in (engine, engine.module):
        with pytest.raises((pickle.PicklingError, AttributeError), match=r"engine\.state_dict\(\), or call engine\.save"):
            torch.save(wired, io.BytesIO())
    toy.step(engine, toy.tokens(engine.rank, 0))
    engine.destroy()
    torch.save(engine.module, io.BytesIO())


@distributed(world_size=1)
def test_auto_asks_the_arguments_of_initialize() -> None:
    model = toy.seeded(toy.Net)
    config = toy.settings(1, optimizer=None, train_micro_batch_size_per_gpu="auto") | {
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}
    }
    loader = DataLoader(torch.randn(10, 8), batch_size=4, drop_last=True, collate_fn=lambda rows: torch.stack(rows) + 100)  # type: ignore[arg-type]
    engine, _, batches, scheduler = slipstream.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.25), training_data=loader, config=config
    )
    assert engine.plan.batch.micro_batch_size == 4 and [tuple(batch.shape) for batch in batches] == [(4, 8)] * 2
    assert all(bool((batch > 50).all()) for batch in batches) and scheduler.warmup_max_lr == 0.25
    engine.destroy()


class Told(Dataset[Tensor]):
    """Samples of their number, what the worker was told, and its process."""

    told = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> Tensor:
        return torch.tensor([i, Told.told, os.getpid()])


def tell(worker: int) -> None:
    Told.told = 7 + worker


@distributed(world_size=1)
def test_a_dataloader_keeps_its_order_and_its_workers() -> None:
    def epochs(**options: Any) -> list[Tensor]:
        """The samples of two epochs, [8, 3] each."""
        data = DataLoader(Told(), batch_size=2, **options)
        engine, _, loader, _ = slipstream.initialize(model=toy.Net(), config=toy.settings(0), training_data=data)
        samples = [torch.cat(list(loader)) for _ in range(2)]
        engine.destroy()
        return samples

    in_order = epochs(num_workers=2, worker_init_fn=tell, persistent_workers=True, timeout=20, prefetch_factor=3)
    assert all(torch.equal(samples[:, 0], torch.arange(8)) for samples in in_order)
    assert in_order[0][:, 1].tolist() == [7, 7, 8, 8] * 2
    assert torch.equal(in_order[0][:, 2], in_order[1][:, 2]), "the same processes"
    once, again, other = (
        [samples[:, 0].tolist() for samples in epochs(shuffle=True, generator=torch.Generator().manual_seed(seed))]
        for seed in (5, 5, 6)
    )
    assert once == again != other and once[0] != once[1] and sorted(once[0]) == list(range(8))
    sampler: Any = RandomSampler(Told(), num_samples=4)
    with pytest.raises(ValueError, match="sampler RandomSampler that draws with replacement or another number of samples"):
        epochs(sampler=sampler)


@distributed(world_size=1)
def test_distributed_port_is_passed_on() -> None:
    with unittest.mock.patch("slipstream.train.initialize.init_distributed") as join:
        for given in ({}, {"distributed_port": 29511}):
            slipstream.initialize(model=toy.Net(), config=toy.settings(0), **given)[0].destroy()  # type: ignore[arg-type]
            assert join.call_args.kwargs["distributed_port"] == given.get("distributed_port")


# ---- schedules


@distributed(world_size=2)
def test_schedules_tick_on_applied_steps() -> None:
    """Given by name and as a callable; the engine reports the rate."""
    named = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear", "warmup_max_lr": 0.4}}}
    for stage in (0, 3):
        engine = toy.make(toy.seeded(toy.Lm), stage, gradient_accumulation_steps=2, **named)
        rates = []
        for micro in range(8):
            toy.step(engine, toy.tokens(engine.rank, 0, micro))
            rates.append(engine.optimizer.param_groups[0]["lr"])
        assert rates[0::2][1:] == rates[1::2][:-1], "nothing moves inside a window"
        assert rates[-1] > rates[1] >= 0 and engine.lr_scheduler.get_last_lr() == [rates[-1]]
        engine.destroy()
        model = toy.seeded(toy.Lm)
        engine, _, _, scheduler = slipstream.initialize(
            model=model,
            config=toy.settings(stage, optimizer={"type": "SGD", "params": {"lr": 1.0}}),
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0),
        )
        toy.step(engine, toy.tokens(engine.rank, 0))
        before = toy.checksum(engine)
        assert scheduler.get_last_lr() == [0.0]
        toy.step(engine, toy.tokens(engine.rank, 0))
        assert toy.checksum(engine) == before, "a rate of zero is used"
        engine.destroy()

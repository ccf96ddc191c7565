"""Changing the model between steps with `engine.surgery()`, in every stage, tier and dtype."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import slipstream
from tests import cases, probe, toy
from tests.pool import distributed

pytestmark = pytest.mark.disk

STAGES = cases.STAGES
TIERS = {
    "memory": {},
    "disk": {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
    "all on disk": {
        "zero_optimization": {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme", "max_in_cpu": 0}}
    },
    "half on disk": {"zero_optimization": {"offload_optimizer": {"device": "nvme", "ratio": 0.5}, "sub_group_size": 4096}},
    "8 bits": {"slipstream": {"optimizer_states": "int8"}},
    "copies": {"zero_optimization": {"mics_shard_size": 1}},
}


def make(model: nn.Module, stage: int, folder: Path | None = None, tier: str = "memory", **more: Any) -> Any:
    blocks = copy.deepcopy(TIERS[tier])
    for block in blocks.get("zero_optimization", {}).values():
        if isinstance(block, dict):
            block["nvme_path"] = str(folder)
    for key, value in blocks.items():
        more[key] = value | more.get(key, {})
    return toy.make(model, stage, **more)


def step(engine: Any, i: int) -> Tensor:
    return toy.step(engine, toy.tokens(engine.rank, i))


def everything(engine: Any) -> dict[str, dict[str, Tensor]]:
    """Weights, masters and optimizer states of each parameter."""
    weights = engine.state_dict()
    names = [name for unit in probe.units(engine) for name in unit.names]
    return {name: {"weight": weights[name], **engine.optimizer_state(name)} for name in names}


def equal(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> bool:
    return ours.keys() == reference.keys() and all(ours[key].equal(reference[key]) for key in ours)


class Lora(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.up(self.down(x))
        return y


def adapt(model: Any) -> None:
    model.requires_grad_(False)
    for block in model.blocks:
        block.up = Lora(block.up)


# ---- unchanged parts


def rebuild_every_unit(engine: Any) -> None:
    """Add an unused parameter to each block and to the root, so that all layouts change."""
    torch.manual_seed(7)
    with engine.surgery():
        for module in (engine.module, *engine.module.blocks):
            module.more = nn.Parameter(torch.randn(33))


OVER = {"fp32": "shared", "bf16": "gloo", "fp16": "shared"}


@distributed(world_size=(1, 2))
@pytest.mark.parametrize("dtype", OVER)
def test_unchanged_parts_continue_bit_for_bit(dtype: str, world_size: int) -> None:
    for stage in cases.by_turns(STAGES if world_size > 1 else (0, 3), list(OVER).index(dtype)):
        results = []
        for operated in (False, True):
            engine = toy.make(toy.seeded(toy.Lm), stage, OVER[dtype] if world_size > 1 else "auto", dtype=dtype)
            losses = [step(engine, i) for i in range(2)]
            if operated:
                rebuild_every_unit(engine)
            losses += [step(engine, i) for i in range(2, 4)]
            results.append((losses, everything(engine)))
            assert engine.global_steps == 4
            engine.destroy()
        (losses, before), (others, after) = results
        assert torch.stack(losses).equal(torch.stack(others)), stage
        assert after.keys() - before.keys() == {"more", *(f"blocks.{i}.more" for i in range(3))}
        for name in before:
            assert equal(before[name], after[name]), (stage, name)


@distributed(world_size=2)
@pytest.mark.parametrize("tier", ["all on disk", "half on disk", "8 bits", "copies", pytest.param("disk", marks=pytest.mark.slow)])
def test_unchanged_parts_continue_in_every_tier(tier: str, tmp_path: Path) -> None:
    results = []
    for operated in (False, True):
        engine = make(toy.seeded(toy.Lm), 3, tmp_path, tier, dtype="bf16")
        losses = [step(engine, i) for i in range(2)]
        if operated:
            rebuild_every_unit(engine)
        losses += [step(engine, i) for i in range(2, 4)]
        results.append((losses, everything(engine)))
        engine.destroy()
    (losses, before), (others, after) = results
    assert torch.stack(losses).equal(torch.stack(others))
    for name in before:
        assert equal(before[name], after[name]), name


@distributed(world_size=2)
def test_units_that_did_not_change_are_not_touched() -> None:
    for stage in STAGES:
        engine = toy.make(toy.seeded(toy.Lm), stage)
        step(engine, 0)
        units = {unit.names[0]: unit for unit in probe.units(engine)}
        with engine.surgery():
            del engine.module.blocks[1]
        assert [unit.name for unit in probe.units(engine)] == ["<root>", "blocks.0", "blocks.1"]
        assert probe.units(engine)[::2] == [units["embedding.weight"], units["blocks.2.norm.weight"]]
        assert engine.optimizer_state("blocks.1.up.weight").keys() == {"master", "exp_avg", "exp_avg_sq"}
        step(engine, 1)
        engine.destroy()


# ---- added and removed parts


@distributed(world_size=2, transports=("shared", "gloo"))
def test_lora_is_added_after_initialize(transport: str) -> None:
    """Against an engine of the adapted model: equal losses and weights, and no states for the base."""
    for stage in cases.stages(transport):
        losses = []
        for late in (True, False):
            model = toy.seeded(toy.Lm)
            if not late:
                adapt(model)
            engine = toy.make(model, stage, transport, dtype="bf16")
            torch.manual_seed(0)
            if late:
                toy.seeded(toy.Lm)  # the same draws
                with engine.surgery():
                    adapt(model)
            frozen = [unit for unit in probe.units(engine) if unit.grads is None]
            assert len(frozen) == 4 and all(unit.memory.local is None for unit in frozen)
            assert engine.optimizer_state("blocks.0.up.base.weight").keys() == {"master"}
            losses.append([step(engine, i) for i in range(3)])
            base = engine.state_dict()["blocks.1.up.base.weight"]
            assert base.equal(toy.seeded(toy.Lm).blocks[1].up.weight.bfloat16())
            engine.destroy()
        assert torch.tensor(losses[0]).equal(torch.tensor(losses[1])), stage


@distributed(world_size=2)
def test_removed_parts_are_ordinary_modules() -> None:
    for stage in STAGES:
        engine = toy.make(toy.seeded(toy.Lm), stage)
        step(engine, 0)
        expected = engine.state_dict()
        block = engine.module.blocks[2]
        with engine.surgery():
            del engine.module.blocks[2]
        for name, value in block.state_dict().items():
            assert value.equal(expected[f"blocks.2.{name}"]), name
        assert type(block.up.weight) is nn.Parameter
        assert not any("blocks.2" in name for unit in probe.units(engine) for name in unit.names)
        held = {id(param) for group in engine.optimizer.param_groups for param in group["params"]}
        assert held == {id(param) for param in engine.module.parameters()}
        step(engine, 1)
        with engine.surgery():
            engine.module.blocks.append(block)  # it keeps its own class
        assert engine.state_dict()["blocks.2.up.weight"].equal(expected["blocks.2.up.weight"])
        assert not engine.optimizer_state("blocks.2.up.weight")["exp_avg"].any(), "with fresh states"
        step(engine, 2)
        engine.destroy()


class Tied(toy.Lm):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, toy.VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight


@distributed(world_size=2, transports=("shared", "gloo"))
def test_a_resized_embedding_keeps_the_moments_of_its_rows(transport: str) -> None:
    for stage in cases.stages(transport):
        for size in (60, 40):
            engine = toy.make(toy.seeded(Tied), stage, transport, dtype="bf16")
            loss = step(engine, 0)  # kept: its graph holds the old shape
            before = everything(engine)["embedding.weight"]
            model, weight = engine.module, engine.module.embedding.weight
            with engine.surgery():
                rows = torch.full((size, 16), float(engine.rank))
                rows[:48] = weight.data[:size]
                weight.data = rows.to(weight.dtype)
                model.embedding.num_embeddings = model.head.out_features = size
            assert model.head.weight is weight and model.embedding.weight is weight and weight.shape == (size, 16)
            after = everything(engine)["embedding.weight"]
            rows_kept = min(size, 48)
            for key, value in before.items():
                assert after[key][:rows_kept].equal(value[:rows_kept]), (stage, key)
                assert not after[key][48:].any(), "the first rank's zeros"
            toy.step(engine, toy.tokens(engine.rank, 1) % 40)
            assert loss.isfinite() and everything(engine)["embedding.weight"]["weight"][48:].any() == (size > 48)
            engine.destroy()


@distributed(world_size=2)
def test_a_parameter_that_was_replaced_by_itself_continues() -> None:
    """`new.data[:n] = old.data[:n]` in a new module, as transformers resizes a head. Other values make it another parameter."""
    for stage in STAGES:
        engine = toy.make(toy.seeded(toy.Lm), stage)
        step(engine, 0)
        before = everything(engine)
        old = engine.module.head
        with engine.surgery():
            engine.module.head = nn.Linear(16, 52)
            with torch.no_grad():
                engine.module.head.weight[:48] = old.weight
        after = everything(engine)
        assert after["head.weight"]["exp_avg"][:48].equal(before["head.weight"]["exp_avg"])
        assert not after["head.bias"]["exp_avg"].any()
        assert after["embedding.weight"]["exp_avg_sq"].equal(before["embedding.weight"]["exp_avg_sq"])
        step(engine, 1)
        engine.destroy()


@distributed(world_size=2)
def test_values_are_the_first_ranks() -> None:
    for stage in STAGES:
        engine = toy.make(toy.seeded(toy.Lm), stage, dtype="bf16")
        step(engine, 0)
        masters = engine.optimizer_state("head.weight")["master"]
        torch.manual_seed(engine.rank)
        with engine.surgery(), torch.no_grad():
            engine.module.extra = nn.Linear(3, 3)
            engine.module.head.weight[0].fill_(engine.rank)  # a unit that is rebuilt
            engine.module.blocks[1].up.bias.fill_(0.5 + engine.rank)  # and one that is kept
        state = engine.state_dict()
        for value in (state["extra.weight"], state["blocks.1.up.bias"]):
            reference = [torch.empty_like(value) for _ in range(2)]
            dist.all_gather(reference, value)
            assert reference[0].equal(reference[1])
        assert state["blocks.1.up.bias"].eq(0.5).all() and state["head.weight"][0].eq(0).all()
        results = engine.optimizer_state("head.weight")["master"]
        assert results[0].eq(0).all() and results[1:].equal(masters[1:]), "masters keep their precision where nothing was written"
        step(engine, 1)
        engine.destroy()


@distributed(world_size=2, transports=("shared", "gloo"))
def test_one_rank_may_read_if_that_moves_nothing(transport: str) -> None:
    """Over shared memory rank 0 alone may read values that all ranks then replace; over gloo all ranks must read."""
    engine = make(toy.seeded(toy.Lm), 3, transport=transport)
    step(engine, 0)
    with engine.surgery():
        if transport == "gloo" or engine.rank == 0:
            assert engine.module.head.weight.norm() > 0
        engine.module.head = nn.Linear(engine.module.head.in_features, engine.module.head.out_features)
    step(engine, 1)
    if transport == "shared":
        with pytest.raises(ValueError, match=r"changed the model differently.* on meta"), engine.surgery():
            with torch.device("meta" if engine.rank else "cpu"):
                engine.module.head = nn.Linear(engine.module.head.in_features, engine.module.head.out_features)
    engine.destroy()


@distributed(world_size=2)
def test_weight_norm_and_a_new_root_are_adopted() -> None:
    """A parametrized module, and a wrapper around the whole model."""

    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *args: Any) -> Any:
            return self.inner(*args)

    for stage in STAGES:
        engine = toy.make(toy.seeded(toy.Lm), stage)
        step(engine, 0)
        with torch.no_grad():
            expected = engine(toy.tokens(0, 1))
        before = engine.optimizer_state("blocks.2.up.weight")["exp_avg"]
        with engine.surgery():
            nn.utils.parametrizations.weight_norm(engine.module.head)
            engine.module = Wrapper(engine.module)
        with torch.no_grad():
            torch.testing.assert_close(engine(toy.tokens(0, 1)), expected)
        assert engine.optimizer_state("inner.blocks.2.up.weight")["exp_avg"].equal(before)
        assert "inner.head.parametrizations.weight.original1" in engine.state_dict()
        step(engine, 1)
        engine.destroy()


# ---- the optimizer, the schedule, checkpoints


@distributed(world_size=2)
def test_groups_and_schedule_continue() -> None:
    for stage in (0, 3):
        model = toy.seeded(toy.Lm)
        decay = [{"params": list(model.blocks.parameters())}, {"params": [*model.embedding.parameters(), *model.head.parameters()]}]
        inner = torch.optim.AdamW(decay, lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
        settings = toy.settings(stage, optimizer=None)
        engine, optimizer, *_ = slipstream.initialize(model=model, optimizer=inner, lr_scheduler=schedule, config=settings)
        groups = optimizer.param_groups
        step(engine, 0)
        with engine.surgery(group=lambda name, param: int(param.ndim < 2)):
            model.blocks[0].extra = nn.Linear(4, 4)
        assert optimizer.param_groups is inner.param_groups and all(a is b for a, b in zip(groups, inner.param_groups, strict=True))
        assert model.blocks[0].extra.weight in set(groups[0]["params"]) and model.blocks[0].extra.bias in set(groups[1]["params"])
        step(engine, 1)
        assert groups[0]["lr"] == pytest.approx(2.5e-3)
        with pytest.raises(
            ValueError, match=r"puts 'blocks.0.extra.more' into parameter group 2, but the optimizer has groups 0 to 1"
        ):
            with engine.surgery(group=2):
                model.blocks[0].extra.more = nn.Parameter(torch.zeros(3))
        with engine.surgery(group=1):
            pass
        assert model.blocks[0].extra.more in set(groups[1]["params"])
        step(engine, 2)
        engine.destroy()


SCHEDULES: dict[str, dict[str, Any]] = {
    "none": {},
    "warmup": {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 6}}},
    "torch": {"scheduler": {"type": "StepLR", "params": {"step_size": 2, "gamma": 0.5}}},
}


def adapters_of(model: Any) -> list[nn.Parameter]:
    return [param for block in model.blocks for param in (block.up.down.weight, block.up.up.weight)]


@distributed(world_size=2)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_added_group_equals_one_given_to_initialize(schedule: str, tmp_path: Path) -> None:
    """Adapters with their own learning rate and decay: as if the adapted model and both groups were given to initialize. The
    checkpoint of one run resumes in the other, at another stage."""
    own = {"lr": 3e-2, "weight_decay": 0.0}
    for stage in STAGES:
        losses, engines, rates = [], [], []
        for late in (True, False):
            model, settings = toy.seeded(toy.Lm), toy.settings(stage if late else 3 - stage, dtype="bf16")
            settings |= copy.deepcopy(SCHEDULES[schedule])
            settings["optimizer"]["params"]["weight_decay"] = 0.1
            old = list(model.parameters())
            if late:
                engine, optimizer, _, _ = slipstream.initialize(model=model, config=settings)
                toy.seeded(toy.Lm)  # the same draws
                with engine.surgery():
                    adapt(model)
                    model.head.requires_grad_(True)
                    optimizer.add_param_group({"params": adapters_of(model), **own})
            else:
                adapt(model)
                model.head.requires_grad_(True)
                settings.pop("optimizer")
                scheduler_of = settings.pop("scheduler", None)
                inner = torch.optim.AdamW([{"params": old}, {"params": adapters_of(model), **own}], lr=1e-2, weight_decay=0.1)
                if schedule == "warmup":
                    scheduler_of["params"]["warmup_max_lr"] = [1e-2, 3e-2]
                given = {} if scheduler_of is None else {"scheduler": scheduler_of}
                engine, optimizer, _, _ = slipstream.initialize(model=model, optimizer=inner, config=settings | given)
            assert [len(group["params"]) for group in optimizer.param_groups] == [len(old), 6]
            results = []
            for i in range(3):
                rates.append([group["lr"] for group in optimizer.param_groups])
                assert rates[-1][1] == pytest.approx(3 * rates[-1][0])
                results.append(step(engine, i))
            losses.append(torch.stack(results))
            engines.append(engine)
        assert losses[0].equal(losses[1]), stage
        assert rates[:3] == [pytest.approx(each) for each in rates[3:]]
        saved, other = engines
        saved.save_checkpoint(str(tmp_path / f"{stage}"))
        step(other, 7)
        other.load_checkpoint(str(tmp_path / f"{stage}"))
        assert step(other, 3).equal(step(saved, 3))
        whole, reference = saved.optimizer.state_dict(), other.optimizer.state_dict()
        assert [group["params"] for group in whole["param_groups"]] == [group["params"] for group in reference["param_groups"]]
        assert (
            all(equal(state, reference["state"][number]) for number, state in whole["state"].items()) and len(whole["state"]) == 8
        )
        saved.optimizer.load_state_dict(reference)
        for engine in engines:
            engine.destroy()


@distributed(world_size=2)
def test_a_parameter_may_change_its_group() -> None:
    """A parameter that was in another group keeps its moments; one that was in none gets fresh ones."""
    for stage in STAGES:
        model = toy.seeded(toy.Lm)
        inner = torch.optim.AdamW([p for p in model.parameters() if p is not model.head.bias], lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1 / (step + 1))
        engine, optimizer, *_ = slipstream.initialize(
            model=model, optimizer=inner, lr_scheduler=schedule, config=toy.settings(stage, optimizer=None)
        )
        for i in range(2):
            step(engine, i)
        before, bias = everything(engine), engine.state_dict()["head.bias"]
        moved = model.blocks[1].up.weight
        with engine.surgery():
            params = optimizer.param_groups[0]["params"]
            params[:] = [param for param in params if param is not moved]
            optimizer.add_param_group({"params": [moved, model.head.bias], "lr": 0.0})
        assert optimizer.param_groups[1]["initial_lr"] == 0.0
        assert equal(everything(engine)["blocks.1.up.weight"], before["blocks.1.up.weight"])
        step(engine, 2)
        after = everything(engine)
        assert after["blocks.1.up.weight"]["master"].equal(before["blocks.1.up.weight"]["master"]), "its rate is 0"
        assert not after["blocks.1.up.weight"]["exp_avg"].equal(before["blocks.1.up.weight"]["exp_avg"])
        assert after["head.bias"]["exp_avg"].any() and engine.state_dict()["head.bias"].equal(bias)
        assert not after["blocks.1.down.weight"]["master"].equal(before["blocks.1.down.weight"]["master"])
        engine.destroy()


@distributed(world_size=2)
def test_a_group_is_added_with_its_surgery_or_not_at_all() -> None:
    for stage in (0, 3):
        model = toy.seeded(toy.Lm)
        engine, optimizer, *_ = slipstream.initialize(model=model, config=toy.settings(stage, **SCHEDULES["torch"]))
        schedule, groups = engine.lr_scheduler, optimizer.param_groups
        before = copy.deepcopy({key: value for key, value in vars(schedule).items() if key != "optimizer"})
        with pytest.raises(RuntimeError, match=r"belongs inside `with engine.surgery\(\):`"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})

        def attempt(words: str, kind: type[Exception] = ValueError, **group: Any) -> None:
            with pytest.raises(kind, match=words), engine.surgery():
                model.extra = nn.Parameter(torch.zeros(2))
                optimizer.add_param_group({"params": [model.extra], "lr": 0.5})
                optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))], **group})
                if kind is KeyError:
                    raise KeyError("half-way")
            assert len(groups) == 1
            assert {key: value for key, value in vars(schedule).items() if key != "optimizer"} == before
            with engine.surgery():
                del model.extra

        attempt(r"parameter group 2 was given a parameter of shape \(3,\) that is not the model's")
        attempt("half-way", KeyError)
        attempt("rank 1 has parameter group 2 .*'lr': 1.* where rank 0 has .*'lr': 0", lr=engine.rank)
        attempt("has amsgrad = True, and this engine steps AdamW without it", amsgrad=True)
        with engine.surgery():
            with pytest.raises(ValueError, match="more than one parameter group"):
                optimizer.add_param_group({"params": [model.head.weight]})
            engine.lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=9)
            model.extra = nn.Parameter(torch.zeros(2))
            with pytest.raises(ValueError, match=r"a OneCycleLR cannot be extended.*Set engine.lr_scheduler = None"):
                optimizer.add_param_group({"params": [model.extra]})
            engine.lr_scheduler = None
            optimizer.add_param_group({"params": [model.extra]})
            engine.lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-2, 2e-2], total_steps=9)
        for i in range(2):
            step(engine, i)
        assert [group["max_lr"] for group in groups] == [1e-2, 2e-2]
        with engine.surgery(group=2):  # an empty group, filled by the rule
            model.more = nn.Parameter(torch.zeros(2))
            engine.lr_scheduler = None
            optimizer.add_param_group({"params": []})
        assert groups[2]["params"] == [model.more]
        engine.destroy()


@distributed(world_size=2)
@pytest.mark.parametrize("name", ["RMSprop", "Adagrad", "Muon", "Adafactor"] if cases.EVERYTHING else ["Muon"])
def test_other_optimizers_continue(name: str) -> None:
    for stage in (0, 3):
        results = []
        for operated in (False, True):
            model = toy.seeded(toy.Lm)
            config = toy.settings(stage)
            given: Any = None
            if name in ("Muon", "Adagrad"):
                config["optimizer"] = {"type": name, "params": {"lr": 1e-2}}
            else:
                given = getattr(torch.optim, name)(model.parameters(), lr=1e-2)
                del config["optimizer"]
            engine, *_ = slipstream.initialize(model=model, optimizer=given, config=config)
            for i in range(2):
                step(engine, i)
            if operated:
                with engine.surgery():
                    for module in (model, *model.blocks):
                        module.more = nn.Parameter(torch.ones(4, 4))
            for i in range(2, 4):
                step(engine, i)
            results.append(everything(engine))
            engine.destroy()
        for key in results[0]:
            assert equal(results[0][key], results[1][key]), (stage, key)


@distributed(world_size=2)
def test_checkpoints_of_a_changed_model_load(tmp_path: Path) -> None:
    for stage in STAGES:
        engine = toy.make(toy.seeded(toy.Lm), stage, dtype="bf16")
        step(engine, 0)
        with engine.surgery():
            adapt(engine.module)
        step(engine, 1)
        engine.save_checkpoint(str(tmp_path / str(stage)))
        expected = everything(engine)
        other_model = toy.seeded(toy.Lm, 3)
        adapt(other_model)
        other = toy.make(other_model, 3 - stage, dtype="bf16")
        other.load_checkpoint(str(tmp_path / str(stage)))
        results = everything(other)
        assert all(equal(results[name], expected[name]) for name in expected), stage
        assert step(other, 2).isfinite()
        engine.destroy()
        other.destroy()


# ---- refusals


@distributed(world_size=2)
def test_surgery_is_refused_in_the_middle_of_a_window() -> None:
    for stage in (0, 3):
        engine = toy.make(toy.seeded(toy.Lm), stage, gradient_accumulation_steps=2)
        loss = engine(toy.tokens(engine.rank, 0))
        with pytest.raises(RuntimeError, match="between a forward and its backward"), engine.surgery():
            pass
        assert engine.operation is None
        loss.backward()
        engine.step()
        with pytest.raises(RuntimeError, match=r"after 1 backward passes of a window .*call it between engine.step\(\) and"):
            with engine.surgery():
                pass
        engine(toy.tokens(engine.rank, 1)).backward()
        engine.step()
        with engine.surgery():
            with pytest.raises(RuntimeError, match=r"is in surgery: leave `with engine.surgery\(\):`"):
                engine(toy.tokens(engine.rank, 1))
            with pytest.raises(RuntimeError, match="in surgery"):
                engine.save_checkpoint("nowhere")
        engine.destroy()


@distributed(world_size=2)
def test_ranks_that_differ_raise() -> None:
    for stage, transport in ((0, "shared"), (3, "gloo")):
        engine = toy.make(toy.seeded(toy.Lm), stage, transport)
        told = r"ranks changed the model differently: rank 1 has parameter 'extra' \(3,\) .* where rank 0 has \(2,\)"
        with pytest.raises(ValueError, match=told), engine.surgery():
            engine.module.extra = nn.Parameter(torch.zeros(2 + engine.rank))
        with pytest.raises(RuntimeError, match=r"a surgery|engine.surgery\(\) that failed .*enter another"):
            engine(toy.tokens(engine.rank, 0))
        with engine.surgery():
            engine.module.extra = nn.Parameter(torch.zeros(2))
        step(engine, 0)
        engine.destroy()


@distributed(world_size=2)
def test_a_write_before_an_exception_leaves_no_rank_alone() -> None:
    """If every rank holds the weights, one rank's in-place write stays; the next surgery uses rank 0's values on all ranks."""
    engine = toy.make(toy.seeded(toy.Lm), 0)
    with pytest.raises(KeyError, match="half-way") if engine.rank else pytest.raises(RuntimeError, match="rank 1 raised"):
        with engine.surgery(), torch.no_grad():
            if engine.rank == 1:
                raise KeyError("half-way")
            engine.module.head.weight.zero_()
    with pytest.raises(RuntimeError, match=r"engine.surgery\(\) that failed .*enter another"):
        engine(toy.tokens(engine.rank, 0))
    with engine.surgery():
        pass
    assert not engine.module.head.weight.any()
    step(engine, 0)
    for group in (lambda name, param: engine.rank, lambda name, param: 1 // engine.rank):
        with pytest.raises((ValueError, ZeroDivisionError), match=r"rank . gives|division|parameter group 1"):
            with engine.surgery(group=group):
                engine.module.extra = nn.Parameter(torch.zeros(2))
        with engine.surgery():
            del engine.module.extra
    engine.destroy()


@distributed(world_size=2)
def test_an_exception_inside_changes_nothing() -> None:
    for stage, transport in ((1, "shared"), (3, "shared"), (3, "gloo")):
        engine = toy.make(toy.seeded(toy.Lm), stage, transport)
        step(engine, 0)
        before = everything(engine)
        with pytest.raises(KeyError, match="half-way"), engine.surgery(), torch.no_grad():
            if stage == 3:
                engine.module.head.weight.zero_()
            engine.module.head.bias.data = torch.ones(48)
            raise KeyError("half-way")
        after = everything(engine)
        assert all(equal(before[name], after[name]) for name in before)
        step(engine, 1)
        with pytest.raises(KeyError, match="half-way") if engine.rank else pytest.raises(RuntimeError, match="rank 1 raised"):
            with engine.surgery():
                if engine.rank == 1:
                    raise KeyError("half-way")
        step(engine, 2)
        with pytest.raises(KeyError, match="too late"), engine.surgery():
            del engine.module.blocks[0]
            raise KeyError("too late")
        with pytest.raises(RuntimeError, match=r"failed .KeyError: 'too late'.*an empty one accepts the model as it is"):
            step(engine, 3)
        with engine.surgery():
            pass
        step(engine, 3)
        engine.destroy()


# ---- libraries that change models


def llama(tied: bool) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config)


def llama_step(engine: Any, i: int) -> None:
    tokens = toy.tokens(engine.rank, i)
    engine(input_ids=tokens, labels=tokens).loss.backward()
    engine.step()


@distributed(world_size=2, timeout=120)
def test_resize_token_embeddings_knows_nothing_of_an_engine() -> None:
    for stage in (0, 3):
        for tied in (True, False):
            model = llama(tied)
            engine = toy.make(model, stage)
            llama_step(engine, 0)
            before = everything(engine)
            with engine.surgery():
                model.resize_token_embeddings(64)
            after = everything(engine)
            assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
            for name in before:
                for key, value in before[name].items():
                    assert after[name][key][: len(value)].equal(value), (stage, tied, name, key)
            state = engine.state_dict()
            assert (state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()) is tied
            llama_step(engine, 1)
            engine.destroy()


@distributed(world_size=2, timeout=120)
def test_get_peft_model_knows_nothing_of_an_engine() -> None:
    peft = pytest.importorskip("peft")
    for stage in (0, 3):
        engine = toy.make(llama(True), stage)
        llama_step(engine, 0)
        with engine.surgery(), warnings.catch_warnings(action="ignore"):  # PEFT uses deprecated names of transformers
            engine.module = peft.get_peft_model(engine.module, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
            assert not any(unit.is_lent for unit in probe.units(engine)), "no sharded weight was needed"
        trained = {name for unit in probe.units(engine) if unit.trainable for name in unit.names}
        assert len(trained) == 8 and all("lora" in name for name in trained)
        base = engine.state_dict()["base_model.model.model.layers.0.mlp.up_proj.weight"]
        llama_step(engine, 1)
        after = engine.state_dict()
        assert after["base_model.model.model.layers.0.mlp.up_proj.weight"].equal(base)
        assert after["base_model.model.model.layers.1.self_attn.q_proj.lora_B.default.weight"].any()
        engine.destroy()

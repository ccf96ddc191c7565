"""Complete parameters, gradients and optimizer state by name, in every stage; and the errors of invalid accesses."""

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slipstream
from slipstream import zero
from slipstream.checkpoint import CheckpointError, latest_tag
from slipstream.zero.leaves import mark_part
from tests import cases, toy
from tests.pool import distributed


class Everything(toy.Net):
    """Tied and frozen parameters, persistent and other buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.blocks[1].requires_grad_(False)
        self.inp.bias.requires_grad_(False)
        self.register_buffer("seen", torch.arange(3.0))
        self.register_buffer("derived", torch.ones(2), persistent=False)


def train(engine: Any, steps: int = 1) -> None:
    for i in range(steps):
        engine(toy.floats(engine.rank, i)).square().mean().backward()
        engine.step()


# ---- zero.gathered


@distributed(world_size=2, transports=("shared", "gloo"))
def test_gathered_reads_and_writes(transport: str) -> None:
    for stage in cases.stages(transport):
        for dtype in ("fp32", "bf16"):
            model = toy.seeded(toy.Lm)
            original = model.head.weight.detach().clone()
            engine = toy.make(model, stage, transport, dtype=dtype)
            weight = model.head.weight
            with zero.gathered(weight):
                torch.testing.assert_close(weight.detach(), original.to(weight.dtype), rtol=0, atol=0)
            assert engine.optimizer_state("head.weight")["master"].equal(original), "reading rounds no master"
            with zero.gathered([weight, model.blocks[1].up.bias]), torch.no_grad():
                weight.fill_(0.5)
                model.blocks[1].up.bias[3] = 7.0
            assert model.head.weight is weight
            state = engine.state_dict()
            assert state["head.weight"].eq(0.5).all() and state["blocks.1.up.bias"][3] == 7
            assert engine.optimizer_state("head.weight")["master"].eq(0.5).all()
            toy.step(engine, toy.tokens(engine.rank, 0))
            moved = (engine.state_dict()["head.weight"].float() - 0.5).abs().max()
            assert 0 < moved < 0.02, "the step starts from what was written"
            engine.destroy()


@distributed(world_size=2, transports=("shared", "gloo"))
def test_gathered_takes_one_ranks_values(transport: str) -> None:
    for stage in cases.stages(transport):
        model = toy.seeded(toy.Lm)
        engine = toy.make(model, stage, transport)
        with zero.gathered(model.head, modifier_rank=1), torch.no_grad():
            if engine.rank == 1:
                model.head.bias.fill_(3.0)
        assert engine.state_dict()["head.bias"].eq(3).all()
        engine.destroy()


@distributed(world_size=2, transports=("shared", "gloo"))
def test_different_writes_in_gathered_are_refused_by_name(transport: str) -> None:
    """Also if only one rank writes, to elements that another one owns."""
    for stage in cases.stages(transport):
        model = toy.seeded(toy.Lm)
        engine = toy.make(model, stage, transport)
        before = toy.checksum(engine)
        said = r"different values to 'head.weight' and 1 more inside.*modifier_rank=0"
        with pytest.raises(ValueError, match=said), zero.gathered(model), torch.no_grad():
            torch.manual_seed(engine.rank)
            model.blocks[0].up.bias.fill_(1.0)
            model.head.weight.normal_()
            model.head.bias.data = torch.randn(48)
        with pytest.raises(ValueError, match=r"different values to 'head.bias' inside"), zero.gathered(model.head.bias):
            model.head.bias.data[0] += engine.rank
        for write in (
            lambda weight: weight.zero_() if engine.rank else None,
            lambda weight: weight.copy_(weight[[1, 0, *range(2, len(weight))]]) if engine.rank else None,  # the same words
            lambda weight: weight[0, 1].fill_(engine.rank + 1.0),  # the upper half of a word
        ):
            with pytest.raises(ValueError, match="different values"), zero.gathered(model.head.weight), torch.no_grad():
                write(model.head.weight)
        assert toy.checksum(engine) == before
        toy.step(engine, toy.tokens(engine.rank, 0))
        engine.destroy()


@distributed(world_size=2, transports=("shared", "gloo"))
def test_gathered_refuses_a_rank_that_is_not_there(transport: str) -> None:
    for stage in cases.stages(transport, (0, 3)):
        engine, twin = (toy.make(toy.seeded(toy.Lm), stage, transport) for _ in range(2))
        for rank in (2, -1):
            with pytest.raises(ValueError, match=rf"modifier_rank is {rank}, but the data-parallel ranks are 0\.\.1"):
                zero.gathered(engine.module, modifier_rank=rank).__enter__()
        for each in (engine, twin):
            toy.step(each, toy.tokens(engine.rank, 0))
        assert int(toy.checksum(engine)) == int(toy.checksum(twin)), "the parameters are the engine's"
        for each in (engine, twin):
            each.destroy()


@distributed(world_size=2, transports=("gloo",))
def test_gathered_writes_nothing_that_was_not_changed(transport: str) -> None:
    """Weights that codes have brought up to date differ from their masters, which keep what the codes lost."""
    engine = toy.make(toy.seeded(toy.Lm), 1, transport, dtype="bf16", zero_optimization={"zero_quantized_weights": True})
    toy.step(engine, toy.tokens(engine.rank, 0))
    before = engine.optimizer_state("head.weight")["master"]
    with zero.gathered(engine.module), torch.no_grad():
        engine.module.head.bias[0] = 2.0
    assert engine.optimizer_state("head.weight")["master"].equal(before)
    assert engine.optimizer_state("head.bias")["master"][0] == 2
    engine.destroy()


@distributed(world_size=2, transports=("shared", "gloo"))
def test_an_exception_in_gathered_writes_nothing(transport: str) -> None:
    for stage in cases.stages(transport):
        model = toy.seeded(toy.Lm)
        engine = toy.make(model, stage, transport)
        before = toy.checksum(engine)
        with pytest.raises(KeyError, match="half-way"), zero.gathered(model), torch.no_grad():
            model.head.weight.zero_()
            raise KeyError("half-way")
        assert toy.checksum(engine) == before
        toy.step(engine, toy.tokens(engine.rank, 0))
        engine.destroy()


@distributed(world_size=2, transports=("shared", "gloo"))
def test_thousands_of_parameters_are_gathered_at_once(transport: str) -> None:
    model = nn.ParameterList(torch.zeros(1) for _ in range(5000))
    engine = toy.make(model, 3, transport)
    with zero.gathered(model), torch.no_grad():
        model[4999].fill_(1.0)
    assert engine.state_dict()["4999"] == 1
    engine.destroy()


@distributed(world_size=2)
def test_one_ranks_values_stay_in_its_family() -> None:
    """Each rank has another expert, so its values are nobody else's, also inside a surgery."""
    for around in (lambda engine: nullcontext(), lambda engine: engine.surgery()):
        model: Any = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in ("dense", "expert")})
        mark_part(model["expert"].weight, "ep", 2)
        engine = toy.make(model, 3)
        with around(engine), zero.gathered(model, modifier_rank=0), torch.no_grad():
            for layer in model.values():
                layer.weight.fill_(1.0 + engine.rank)
        with zero.gathered(model):
            assert model["dense"].weight.eq(1).all() and model["expert"].weight.eq(1 + engine.rank).all()
        engine.destroy()


@distributed(world_size=2)
def test_gathered_ignores_ordinary_parameters() -> None:
    linear = nn.Linear(2, 2)
    with zero.gathered(linear), torch.no_grad():
        linear.weight.fill_(1.0)
    assert linear.weight.eq(1).all()


@distributed(world_size=2)
def test_a_parameter_without_elements_is_gathered() -> None:
    for stage in (0, 3):
        model = toy.seeded(toy.Net)
        model.nothing = nn.Parameter(torch.empty(0, 3))
        engine = toy.make(model, stage)
        with zero.gathered(engine.module), torch.no_grad():
            model.out.bias.add_(model.nothing.numel() + 1.0)
        assert engine.state_dict()["out.bias"].equal(toy.seeded(toy.Net).out.bias + 1.0)
        engine.destroy()


@distributed(world_size=2)
def test_a_view_that_is_assigned_in_gathered_is_stored() -> None:
    for stage in (1, 3):
        for around in (lambda engine: zero.gathered(engine.module), lambda engine: engine.surgery()):
            engine = toy.make(toy.seeded(lambda: nn.Linear(8, 8)), stage)
            weight = engine.module.weight
            before = engine.state_dict()["weight"]
            with around(engine):
                weight.data = weight.data.t()
            assert engine.state_dict()["weight"].equal(before.t()) and not before.equal(before.t())
            engine.destroy()


@distributed(world_size=2)
def test_gathered_refuses_another_shape() -> None:
    for stage in (0, 3):
        model = toy.seeded(toy.Lm)
        engine = toy.make(model, stage)
        with pytest.raises(ValueError, match=r"'head.bias' was given shape \(3,\).*it is \(48,\)"), zero.gathered(model.head.bias):
            model.head.bias.data = torch.zeros(3)
        toy.step(engine, toy.tokens(engine.rank, 0))
        engine.destroy()


# ---- state_dict


@distributed(world_size=2, transports=("shared", "gloo"))
def test_state_dict_is_the_models_own(transport: str) -> None:
    for stage in cases.stages(transport):
        expected = toy.seeded(Everything).state_dict()
        engine = toy.make(toy.seeded(Everything), stage, transport)
        state = engine.state_dict()
        assert list(state) == list(expected) and "seen" in state and "derived" not in state
        for name, value in state.items():
            assert value.equal(expected[name]), name
        assert state["blocks.2.up.weight"].data_ptr() == state["blocks.0.up.weight"].data_ptr(), "still tied"
        state["inp.weight"].zero_()
        assert engine.state_dict()["inp.weight"].equal(expected["inp.weight"]), "the caller's own memory"
        engine.destroy()


@distributed(world_size=2, transports=("shared", "gloo"))
def test_load_state_dict_in_every_stage(transport: str) -> None:
    wanted = {name: value + 1 for name, value in toy.seeded(Everything, 5).state_dict().items()}
    wanted["blocks.2.up.weight"] = wanted["blocks.0.up.weight"]
    for stage in cases.stages(transport):
        engine = toy.make(toy.seeded(Everything), stage, transport)
        engine.load_state_dict(wanted)
        for name, value in engine.state_dict().items():
            assert value.equal(wanted[name]), (stage, name)
        assert engine.optimizer_state("inp.weight")["master"].equal(wanted["inp.weight"])
        with pytest.raises(RuntimeError, match="Missing key"):
            engine.load_state_dict({})
        with pytest.raises(ValueError, match="assign"):
            engine.load_state_dict(wanted, assign=True)
        engine.destroy()


# ---- gradients and optimizer state


@distributed(world_size=2, transports=("shared", "gloo"))
def test_gradients_by_name(transport: str) -> None:
    twin = toy.seeded(toy.Lm)
    sum(twin(toy.tokens(rank, 0)) / 2 for rank in range(2)).backward()
    for stage in cases.stages(transport):
        for dtype, tolerance in (("fp32", 1e-6), ("fp16", 1e-2)):
            engine = toy.make(toy.seeded(toy.Lm), stage, transport, dtype=dtype)
            engine(toy.tokens(engine.rank, 0)).backward()
            for name, param in twin.named_parameters():
                results = engine.gradient(name)
                assert results.dtype is torch.float32 and param.grad is not None
                torch.testing.assert_close(results, param.grad, rtol=10 * tolerance, atol=tolerance)
            engine.destroy()


@distributed(world_size=2, transports=("shared", "gloo"))
def test_gradients_can_be_written(transport: str) -> None:
    """The norm and the optimizer see the values that were set, also in the middle of a window."""
    new = torch.arange(128.0).view(16, 8) / 64
    for stage in cases.stages(transport):
        weights = []
        for way in ("set", "computed"):
            engine = toy.make(
                toy.seeded(toy.Net),
                stage,
                transport,
                gradient_accumulation_steps=2,
                optimizer={"type": "SGD", "params": {"lr": 0.5}},
            )
            weight = engine.module.inp.weight
            for micro in range(2):
                loss = engine(toy.floats(engine.rank, 0, micro)).square().mean()
                engine.backward(loss)
                if way == "set" and micro == 0:
                    before = engine.gradient("inp.weight")
                    engine.set_gradient("inp.weight", new)
                    assert engine.gradient("inp.weight").equal(new), stage
                elif way == "set":
                    engine.set_gradient("inp.weight", engine.gradient("inp.weight") - new + before)
                engine.step()
            weights.append((engine.state_dict(), engine.global_grad_norm))
            assert weight.requires_grad
            engine.destroy()
        assert weights[0][1] == pytest.approx(weights[1][1], rel=1e-5), stage
        for name, value in weights[0][0].items():
            torch.testing.assert_close(value, weights[1][0][name], rtol=1e-5, atol=1e-6)


@distributed(world_size=2, transports=("shared", "gloo"))
def test_the_engine_runs_inside_gathered(transport: str) -> None:
    for stage in cases.stages(transport):
        engine = toy.make(toy.seeded(toy.Net), stage, transport)
        x = toy.floats(engine.rank, 0)
        with torch.no_grad():
            expected = engine(x)
            with zero.gathered(engine.module.parameters()):
                assert engine(x).equal(expected)
                assert engine.module.out.weight.sum().isfinite()
                assert engine(x).equal(expected)
            with zero.gathered(engine.module.inp.weight):
                engine.module.inp.weight.mul_(2.0)
                changed = engine(x)
            assert not changed.equal(expected) and engine(x).equal(changed), stage
        train(engine)
        engine.destroy()


@distributed(world_size=2)
def test_a_write_right_after_the_step_is_this_ranks_own() -> None:
    """No rank copies a published span while the user of its owner already writes it."""
    for stage in (0, 1, 2):
        engine = toy.make(toy.seeded(lambda: toy.Net(dim=256)), stage)
        for _ in range(10):
            train(engine)
            with torch.no_grad():
                for param in engine.module.parameters():
                    param.mul_(0.5)
        sums: list[Any] = [None] * 2
        dist.all_gather_object(sums, [param.double().sum().item() for param in engine.module.parameters()])
        assert sums[0] == sums[1], stage
        engine.destroy()


@distributed(world_size=2, transports=("shared", "gloo"))
def test_optimizer_state_by_name(transport: str) -> None:
    model = toy.seeded(toy.Net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    sum(model(toy.floats(rank, 0)).square().mean() / 2 for rank in range(2)).backward()
    optimizer.step()
    for stage in cases.stages(transport):
        engine = toy.make(toy.seeded(toy.Net), stage, transport)
        train(engine)
        for name, param in model.named_parameters():
            results = engine.optimizer_state(name)
            assert results.keys() == {"master", "exp_avg", "exp_avg_sq"}
            torch.testing.assert_close(results["master"], param.detach(), rtol=1e-4, atol=1e-4)
            for key in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(results[key], optimizer.state[param][key], rtol=1e-4, atol=1e-7)
        new = {key: torch.full((8,), 0.25 * k) for k, key in enumerate(("master", "exp_avg", "exp_avg_sq"))}
        engine.set_optimizer_state("out.bias", new)
        for key, value in engine.optimizer_state("out.bias").items():
            assert value.equal(new[key]), (stage, key)
        assert engine.state_dict()["out.bias"].equal(new["master"])
        with pytest.raises(KeyError, match=r"no parameter 'out.bia'.*out.bias"):
            engine.optimizer_state("out.bia")
        with pytest.raises(KeyError, match=r"no optimizer state 'exp_av' of 'out.bias'.*exp_avg_sq"):
            engine.set_optimizer_state("out.bias", {"exp_av": torch.zeros(8), "master": torch.zeros(8)})
        assert engine.state_dict()["out.bias"].equal(new["master"])
        with pytest.raises(ValueError, match=r"exp_avg of 'out.bias' has shape \(3,\)"):
            engine.set_optimizer_state("out.bias", {"exp_avg": torch.zeros(3)})
        engine.destroy()


@distributed(world_size=2, transports=("shared", "gloo"))
def test_grad_is_never_a_silent_none(transport: str) -> None:
    """Else `clip_grad_norm_` over Nones would return 0 and clip nothing."""
    for stage in cases.stages(transport):
        model = toy.seeded(toy.Net)
        engine = toy.make(model, stage, transport)
        engine(toy.floats(engine.rank, 0)).square().mean().backward()
        with pytest.raises(RuntimeError, match=r"gradient of parameter 'inp.weight'.*engine.gradient"):
            _ = model.inp.weight.grad
        with pytest.raises(RuntimeError, match="gradient_clipping"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        engine.step()
        assert model.inp.weight.grad is None
        engine.destroy()


# ---- writes from outside


@distributed(world_size=2, transports=("shared", "gloo"))
def test_new_memory_is_refused_by_name(transport: str) -> None:
    for stage in cases.stages(transport, (0, 1, 2)):
        for spoil, name in (("half", "inp.weight"), ("data", "out.bias"), ("transposed", "inp.weight")):
            model = toy.seeded(lambda: toy.Net(dim=8))
            engine = toy.make(model, stage, transport)
            if spoil == "half":
                model.half()
            elif spoil == "data":
                model.out.bias.data = torch.zeros(8)
            else:
                model.inp.weight.data = model.inp.weight.data.t()
            with pytest.raises(RuntimeError, match=f"'{name}' no longer lives in the engine's memory"):
                engine(toy.floats(engine.rank, 0))
            with pytest.raises(RuntimeError, match="no longer lives"):
                engine.step()
            engine.destroy()


@distributed(world_size=2, transports=("shared", "gloo"))
def test_new_memory_is_refused_at_once_where_released(transport: str) -> None:
    model = toy.seeded(toy.Net)
    engine = toy.make(model, 3, transport)
    for spoil in (model.half, lambda: setattr(model.out.bias, "data", torch.zeros(8)), lambda: model.out.bias.detach().zero_()):
        with pytest.raises(RuntimeError, match=r"parameter '.*': its weights are sharded"):
            spoil()
    train(engine)
    engine.destroy()


@distributed(world_size=2, transports=("shared", "gloo"))
def test_writes_in_place_reach_the_masters(transport: str) -> None:
    for stage in cases.stages(transport, (0, 1, 2)):
        for dtype in ("fp32", "bf16"):
            model = toy.seeded(toy.Lm)
            engine = toy.make(model, stage, transport, dtype=dtype)
            with torch.no_grad():
                model.head.bias.fill_(2.0)
            toy.step(engine, toy.tokens(engine.rank, 0))
            before = engine.optimizer_state("head.bias")["master"]
            assert (before - 2).abs().max() < 0.02
            with torch.no_grad():
                model.head.bias[0] = 3.0
                engine(toy.tokens(engine.rank, 1))
            after = engine.optimizer_state("head.bias")["master"]
            assert after[0] == 3 and torch.equal(after[1:], before[1:])  # the others keep their precision
            engine.destroy()


@distributed(world_size=2)
def test_writes_in_place_reach_the_masters_after_a_read() -> None:
    for stage in (0, 1, 2):
        engine = toy.make(toy.seeded(toy.Lm), stage, dtype="bf16")
        average = slipstream.ema.Ema(engine)
        for i, read in enumerate((engine.state_dict, lambda: zero.gathered(engine.module), average.applied)):
            with torch.no_grad():
                engine.module.head.bias.fill_(2.0 + i)
            with read() if i else nullcontext(read()):
                pass
            toy.step(engine, toy.tokens(engine.rank, 0))
            assert (engine.optimizer_state("head.bias")["master"] - 2 - i).abs().max() < 0.02, (stage, i)
        engine.destroy()


def test_a_parameter_is_found_without_a_look_at_all_others() -> None:
    class Counted(list[Any]):
        def __iter__(self) -> Any:
            looks.append(len(self))
            return super().__iter__()

    model, looks = nn.Sequential(*(nn.Linear(2, 2) for _ in range(40))), list[int]()
    engine = toy.make(model, 3)
    for unit in engine.units:
        unit.model_params = Counted(unit.model_params)
    for param in model.parameters():
        with zero.gathered(param):
            pass
    assert len(looks) <= len(engine.units)
    engine.destroy()


# ---- graphs from before a step


@distributed(world_size=2, transports=("shared", "gloo"))
def test_a_graph_from_before_the_step_is_refused(transport: str) -> None:
    for stage in cases.stages(transport):
        engine = toy.make(toy.seeded(toy.Net), stage, transport)
        stale = engine(toy.floats(engine.rank, 0)).square().mean()
        train(engine)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation"):
            stale.backward()
        engine.destroy()


# ---- the optimizer that initialize returns


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
@distributed(world_size=2)
def test_an_engine_gives_a_users_optimizer_back(kind: Any) -> None:
    """Meanwhile only the engine steps it: its own step would train nothing, for its parameters have no gradients."""
    model = toy.seeded(toy.Lm)
    optimizer = kind(model.parameters(), lr=1e-2)
    for _ in range(2):
        engine, *_ = slipstream.initialize(model=model, optimizer=optimizer, config=toy.settings(2, optimizer=None))
        with pytest.raises(RuntimeError, match=r"owns; call engine\.step\(\)"):
            optimizer.step()
        toy.step(engine, toy.tokens(engine.rank, 0))
        engine.destroy()
    before = model.head.bias.detach().clone()
    model(toy.tokens(0, 0)).backward()
    optimizer.step()
    assert not model.head.bias.equal(before) and optimizer.state[model.head.bias]["step"] == 1


@distributed(world_size=2)
def test_the_optimizer_is_stepped_by_the_engine_only() -> None:
    engine = toy.make(toy.seeded(toy.Net), 2)
    for call in (engine.optimizer.step, lambda: engine.optimizer.add_param_group({})):
        with pytest.raises(RuntimeError, match=r"engine|initialize"):
            call()
    engine.destroy()
    with pytest.raises(RuntimeError, match="destroyed"):
        engine(torch.zeros(1, 8))
    with pytest.raises(RuntimeError, match="destroyed"):
        engine.step()


@distributed(world_size=2, transports=("shared", "gloo"))
def test_a_deep_copy_is_a_plain_model(transport: str) -> None:
    """For averages of the weights: a copy made while gathered computes and trains without affecting the engine."""
    for stage in cases.stages(transport):
        engine = toy.make(toy.seeded(toy.Lm), stage, transport)
        toy.step(engine, toy.tokens(engine.rank, 0))
        alone = toy.make(toy.seeded(toy.Lm), stage, transport)
        for i in range(2):
            toy.step(alone, toy.tokens(engine.rank, i))
        twin = toy.checksum(alone)
        alone.destroy()
        with zero.gathered(list(engine.module.parameters())):
            copied = copy.deepcopy(engine.module)
        before, batch = engine.state_dict(), toy.tokens(engine.rank, 1)
        loss = engine(batch)
        loss_of_copy = copied(batch)
        assert loss_of_copy.equal(loss)
        loss_of_copy.backward()
        torch.optim.SGD(copied.parameters(), lr=0.1).step()
        assert all(type(p) is nn.Parameter and p.grad is not None for p in copied.parameters())
        assert all(value.equal(before[name]) for name, value in engine.state_dict().items())
        loss.backward()  # a forward of the copy in between does not affect the engine's
        engine.step()
        assert int(toy.checksum(engine)) == int(twin)
        engine.destroy()


@distributed(world_size=2)
def test_an_optimizers_state_dict_is_torchs(tmp_path: Path) -> None:
    """It is complete in every stage. A plain optimizer can continue from it, and another engine from a plain optimizer's."""
    rank = dist.get_rank()
    adamw: dict[str, Any] = {"type": "AdamW", "params": {"lr": 1e-2}}
    rmsprop, muon = {"type": "RMSprop", "params": {"lr": 1e-3}}, {"type": "Muon", "params": {"lr": 1e-2}}
    sgd = {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}  # torch's keeps no step count in addition to its momentum
    for stage, kind, dtype in ((3, adamw, "fp32"), (1, rmsprop, "fp32"), (2, adamw, "bf16"), (2, sgd, "fp32"), (1, muon, "bf16")):
        engine = toy.make(toy.seeded(toy.Lm), stage, dtype=dtype, optimizer=kind)
        assert engine.optimizer.state_dict()["state"] == {}
        toy.step(engine, toy.tokens(rank, 0))
        saved, weights = engine.optimizer.state_dict(), engine.state_dict()
        torch.save(saved, file := tmp_path / f"{stage}{rank}")
        read = torch.load(file, weights_only=True)
        copied = copy.deepcopy(read)  # a plain optimizer continues in the same tensors
        plain = toy.seeded(toy.Lm)
        if dtype == "fp32":
            plain.load_state_dict(weights)
            optimizer = getattr(torch.optim, kind["type"])(plain.parameters(), **kind["params"])
            optimizer.load_state_dict(copied)
            plains = copy.deepcopy(optimizer.state_dict())
            for other in range(2):
                (plain(toy.tokens(other, 1)) / 2).backward()
            optimizer.step()
        toy.step(engine, toy.tokens(rank, 1))
        expected = engine.state_dict()
        for name, value in plain.state_dict().items() if dtype == "fp32" else ():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
        for source in (read, plains) if dtype == "fp32" else (read,):
            again = toy.make(toy.seeded(toy.Lm, seed=1), 3 - stage, dtype=dtype, optimizer=kind)
            again.load_state_dict(weights)
            again.optimizer.load_state_dict(source)
            toy.step(again, toy.tokens(rank, 1))
            assert all(value.equal(expected[name]) for name, value in again.state_dict().items())
            again.destroy()
        fewer = {**read, "param_groups": [{**read["param_groups"][0], "params": [0]}]}
        with pytest.raises(ValueError, match=r"groups of \[1\] parameters"):
            engine.optimizer.load_state_dict(fewer)
        if kind["type"] == "AdamW":  # the rule has two states and lacks amsgrad's third
            steps = engine.optimizer.state_dict()
            more = copy.deepcopy(read) | {"param_groups": [read["param_groups"][0] | {"lr": 0.5}]}
            more["state"][0]["max_exp_avg_sq"] = torch.ones_like(more["state"][0]["exp_avg_sq"])
            with pytest.raises(ValueError, match=r"'max_exp_avg_sq' of '.*' is none of AdamW's states \['exp_avg', 'exp_avg_sq'\]"):
                engine.optimizer.load_state_dict(more)
            after = engine.optimizer.state_dict()
            assert after["param_groups"] == steps["param_groups"]
            assert all(value.equal(after["state"][0][name]) for name, value in steps["state"][0].items())
        engine.destroy()


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [("AdamW", "amsgrad", True), ("AdamW", "maximize", True), ("SGD", "momentum", 0.9), ("Adagrad", "maximize", True)],
)
def test_an_option_that_kernels_do_not_compute_is_refused_by_name(kind: str, option: str, value: Any) -> None:
    """If assigned, the next step raises until it is reset; if loaded, loading raises and changes nothing."""
    engine, twin = (toy.make(toy.seeded(toy.Lm), 3, optimizer={"type": kind, "params": {"lr": 1e-2}}) for _ in range(2))
    for each in (engine, twin):
        toy.step(each, toy.tokens(engine.rank, 0))
    group, saved = engine.optimizer.param_groups[0], engine.optimizer.state_dict()
    said = rf"parameter group 0 has {option} = {value}, and this engine steps {kind} without it: set it where the optimizer"
    before = group[option]
    foreign = saved | {"param_groups": [saved["param_groups"][0] | {option: value, "lr": 0.5}]}
    with pytest.raises(ValueError, match=said):
        engine.optimizer.load_state_dict(foreign)
    assert (group["lr"], group[option]) == (1e-2, before)
    group[option] = value
    engine.backward(engine(toy.tokens(engine.rank, 1)))
    with pytest.raises(ValueError, match=said):
        engine.step()
    assert engine.global_steps == 1
    group[option] = before
    engine.step()
    toy.step(twin, toy.tokens(engine.rank, 1))
    assert engine.global_steps == 2 and int(toy.checksum(engine)) == int(toy.checksum(twin))
    for each in (engine, twin):
        each.destroy()


@distributed(world_size=2)
def test_a_checkpoint_with_an_option_that_kernels_do_not_compute_is_refused(tmp_path: Path) -> None:
    made, native = (
        toy.make(toy.seeded(toy.Lm), 2, optimizer={"type": "AdamW", "params": {"lr": 1e-2, "amsgrad": amsgrad}})
        for amsgrad in (True, False)
    )
    toy.step(made, toy.tokens(made.rank, 0))
    made.save_checkpoint(str(tmp_path))
    before = int(toy.checksum(native))
    with pytest.raises(CheckpointError, match=r"group 0 has amsgrad = True.*load_optimizer_states=False skips it"):
        native.load_checkpoint(str(tmp_path))
    assert native.optimizer.param_groups[0]["amsgrad"] is False and int(toy.checksum(native)) == before
    native.load_checkpoint(str(tmp_path), load_optimizer_states=False)
    assert int(toy.checksum(native)) == int(toy.checksum(made)) != before
    for each in (made, native):
        each.destroy()


@distributed(world_size=2)
def test_groups_are_loaded_as_torch_loads_them() -> None:
    """Options unknown to the class stay in the group; AdamW sets decoupled decay even in groups that Adam saved."""
    model, plain = toy.seeded(toy.Lm), toy.seeded(toy.Lm)
    foreign = torch.optim.Adam(plain.parameters(), lr=0.03, weight_decay=0.1)
    saved = foreign.state_dict()
    saved["param_groups"][0]["color"] = "green"
    plainly = torch.optim.AdamW(plain.parameters(), lr=0.5)
    plainly.load_state_dict(copy.deepcopy(saved))
    engine = toy.make(model, 3, optimizer={"type": "AdamW", "params": {"lr": 0.5}})
    engine.optimizer.load_state_dict(saved)
    ours, reference = engine.optimizer.param_groups[0], plainly.param_groups[0]
    assert reference["decoupled_weight_decay"] and reference["color"] == "green"
    assert {name: ours[name] for name in reference if name != "params"} == {
        name: reference[name] for name in reference if name != "params"
    }
    toy.step(engine, toy.tokens(engine.rank, 0))
    for other in range(2):
        (plain(toy.tokens(other, 0)) / 2).backward()
    plainly.step()
    for name, value in engine.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=0, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
    engine.destroy()


@distributed(world_size=2)
def test_groups_differ_in_what_adam_does() -> None:
    """Each parameter moves as in an engine whose groups all have its options: decoupled decay or not, bias correction or not."""
    kinds = [{"decoupled_weight_decay": False}, {"decoupled_weight_decay": True}, {"bias_correction": False}]
    ends = []
    for mixed in (*kinds, None):
        model = toy.seeded(toy.Lm)
        parts = [[each for i, each in enumerate(model.parameters()) if i % 3 == which] for which in range(3)]
        optimizer = torch.optim.Adam([{"params": part} for part in parts], lr=1e-2, weight_decay=0.1)
        for group, kind in zip(optimizer.param_groups, kinds if mixed is None else [mixed] * 3, strict=True):
            group.update(kind)
        engine, *_ = slipstream.initialize(model=model, optimizer=optimizer, config=toy.settings(3, optimizer=None))
        toy.step(engine, toy.tokens(engine.rank, 0))
        ends.append(engine.state_dict())
        engine.destroy()
    assert all(ends[i % 3][name].equal(value) for i, (name, value) in enumerate(ends[3].items()))
    for name in ("embedding.weight", "blocks.0.up.weight"):
        assert len({tuple(end[name].flatten().tolist()) for end in ends[:3]}) == 3, name


# ---- user errors


@distributed(world_size=2)
def test_mistakes_raise_by_name(tmp_path: Path) -> None:
    tied = toy.seeded(toy.Lm)
    tied.other = torch.nn.Linear(1, 1, bias=False)
    tied.other.weight = tied.head.weight
    engine = toy.make(tied, 3)
    toy.step(engine, toy.tokens(engine.rank, 0))
    names = [name for name, param in tied.named_parameters(remove_duplicate=False) if param is tied.head.weight]
    first, second = (engine.optimizer_state(name)["master"] for name in names)
    assert len(names) == 2 and first.equal(second)
    with pytest.raises(KeyError, match=r"no parameter 'hed.weight'; the nearest are \['head.weight'"):
        engine.gradient("hed.weight")
    with pytest.raises(TypeError, match=r"'head.weight'; for a name: model\.get_parameter\('head.weight'\)"):
        slipstream.zero.gathered(["head.weight"]).__enter__()
    with pytest.raises(TypeError, match=r"needs the loss as a tensor computed by the model, not 1\.5"):
        engine.backward(1.5)
    engine.save_checkpoint(str(tmp_path), tag="one")
    with pytest.raises(CheckpointError, match=r"is a checkpoint itself: name the folder around it, and tag='one'"):
        engine.load_checkpoint(str(tmp_path / "one"))
    with pytest.raises(CheckpointError, match=r"'nohead\.\*' matches no parameter or buffer"):
        engine.load_checkpoint(str(tmp_path), exclude=["nohead.*"])
    tied.late = torch.nn.Linear(2, 2)
    for call in (lambda: toy.step(engine, toy.tokens(0, 1)), lambda: engine.save_checkpoint(str(tmp_path))):
        with pytest.raises(ValueError, match=r"'late\.weight' was added to the model after initialize\(\).*engine\.surgery"):
            call()
    del tied.late
    engine.destroy()
    for call in (lambda: engine.save_checkpoint(str(tmp_path)), lambda: engine.save_pretrained(str(tmp_path))):
        with pytest.raises(RuntimeError, match="this engine was destroyed"):
            call()
    assert latest_tag(tmp_path) == "one"

"""Calls that return or take whole states, on slices, stages and experts: the bits of one process, on every rank."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import slipstream
from slipstream.train.ema import Ema
from tests import probe
from tests.cases import EVERYTHING
from tests.dist.test_pipeline import Group
from tests.dist.test_pipeline import module as pipeline_of
from tests.dist.test_tensor import batch, build, settings
from tests.pool import distributed

pytest.importorskip("transformers")
EP = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
# by number of ranks: (kind of model, ZeRO stage, blocks of the config)
LAYOUTS: dict[int, list[tuple[str, int, dict[str, Any]]]] = {
    2: [
        ("qwen2", 1, {"slipstream": {"mesh": {"tp": 2}}}),
        ("gpt2", 3, {"slipstream": {"mesh": {"tp": 2}}}),
        ("qwen2", 1, {"slipstream": {"mesh": {"pp": 2}}}),
        ("gpt2", 3, {"slipstream": {"mesh": {"pp": 2}}}),
        ("mixtral", 2, EP),
    ],
    4: [("qwen2", 3, {"slipstream": {"mesh": {"tp": 2}}}), ("gpt2", 1, {"slipstream": {"mesh": {"pp": 2, "tp": 2}}})],
}


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    """Embeddings, which a stage may lack, other matrices, and vectors."""
    groups: dict[str, list[nn.Parameter]] = {"embed": [], "matrix": [], "vector": []}
    for name, param in model.named_parameters():
        groups["embed" if "embed" in name or "wte" in name else "matrix" if param.dim() > 1 else "vector"].append(param)
    decays = {"embed": 0.0, "matrix": 0.1, "vector": 0.05}
    return [{"params": params, "weight_decay": decays[kind]} for kind, params in groups.items()]


def make(kind: str, stage: int, blocks: dict[str, Any], *, alone: bool = False, model: Any = None) -> Any:
    model = build(kind) if model is None else model
    config = settings(stage, bf16={"enabled": True}, **({} if alone else blocks))
    return slipstream.initialize(model=model, model_parameters=grouped(model), config=config, mpu=Group(1) if alone else None)[0]


def step(engine: Any, i: int) -> None:
    micro = batch(i, engine.mesh.batch.index)
    if engine.mesh.pp.size > 1:
        engine.train_batch(iter([micro]))
        return
    engine.backward(engine(**micro, use_cache=False).loss)
    engine.step()


def assert_equal(one: Any, other: Any, path: str = "") -> None:
    assert type(one) is type(other), path
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other), path
    elif isinstance(one, dict):
        assert list(one) == list(other) if "state" in path.split(".") else one.keys() == other.keys(), path
        for key in one:
            assert_equal(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), path
        for i, (first, second) in enumerate(zip(one, other, strict=True)):
            assert_equal(first, second, f"{path}.{i}")
    else:
        assert one == other, path


def whole_states(kind: str, stage: int, blocks: dict[str, Any], folder: Path) -> None:
    alone = make(kind, 0, {}, alone=True)
    average = Ema(alone, 0.9)
    for i in range(2):
        step(alone, i)
        average.update()
    name = f"{kind}{stage}"
    alone.save_checkpoint(folder / f"rank{dist.get_rank()}", tag=name)
    want, mean = alone.optimizer.state_dict(), average.state_dict()
    assert len(want["state"]) == sum(1 for _ in alone.module.parameters()) and {"exp_avg", "master"} <= want["state"][0].keys()
    gradients = gradients_of(alone, [name for name, _ in alone.module.named_parameters()])
    alone.destroy()
    dist.barrier()

    engine = make(kind, stage, blocks)
    average = Ema(engine, 0.9)
    fresh = engine.optimizer.state_dict()
    assert fresh["state"] == {}
    engine.load_checkpoint(folder / "rank0", tag=name)
    assert_equal(engine.optimizer.state_dict(), want, name)
    assert_equal(average.state_dict(), mean, name)
    weights = engine.state_dict()
    by_name(engine, want, list(gradients))
    step(engine, 2)
    trained = probe.states(engine)
    engine.optimizer.load_state_dict(want)  # with the masters
    average.load_state_dict(mean)
    assert_equal(engine.optimizer.state_dict(), want, name)
    assert_equal(average.state_dict(), mean, name)
    assert_equal(engine.state_dict(), weights, name)
    step(engine, 2)
    assert_equal(probe.states(engine), trained, name)  # a step from them is the same
    if engine.mesh.pp.size == 1:
        engine.load_checkpoint(folder / "rank0", tag=name)
        for key, gradient in gradients_of(engine, list(gradients)).items():
            torch.testing.assert_close(gradient, gradients[key], rtol=0.05, atol=0.05 * float(gradients[key].abs().max()))
    refusals(engine, want, average, mean)
    engine.destroy()


def gradients_of(engine: Any, names: list[str]) -> dict[str, Tensor]:
    engine.backward(engine(**batch(2, 0), use_cache=False).loss)
    return {name: engine.gradient(name) for name in names}


def by_name(engine: Any, want: dict[str, Any], names: list[str]) -> None:
    """One parameter's states are whole on every rank, whichever has them, and are set from whole ones."""
    known: dict[str, dict[str, Tensor]] = {name: engine.optimizer_state(name) for name in names}
    wanted = sorted(
        (float(state["master"].double().sum()), float(state["exp_avg"].double().sum())) for state in want["state"].values()
    )
    found = [(float(state["master"].double().sum()), float(state["exp_avg"].double().sum())) for state in known.values()]
    assert sorted(found) == wanted
    for name in names[:: max(1, len(names) // 4)]:
        engine.set_optimizer_state(name, {"exp_avg": known[name]["exp_avg"] * 2})
        assert torch.equal(engine.optimizer_state(name)["exp_avg"], known[name]["exp_avg"] * 2)
        engine.set_optimizer_state(name, known[name])
    assert_equal(engine.optimizer.state_dict(), want)
    with pytest.raises(ValueError, match=r"the exp_avg of .* has shape"):
        engine.set_optimizer_state(names[0], {"exp_avg": known[names[0]]["exp_avg"][:1]})
    for method in (engine.optimizer_state, engine.gradient):
        with pytest.raises(KeyError, match="no parameter 'nothing'; the nearest are"):
            method("nothing")


def refusals(engine: Any, state: dict[str, Any], average: Ema, mean: dict[str, Any]) -> None:
    """Every rank raises, whichever has the parameter."""
    number = max(state["state"])
    values = state["state"][number]
    short = {**state, "state": {**state["state"], number: {**values, "exp_avg": values["exp_avg"][:1]}}}
    for part, text in ((short, r"exp_avg of '.*' has shape .*, but the parameter has shape"),):
        with pytest.raises(ValueError, match=text):
            engine.optimizer.load_state_dict(part)
    groups = [*state["param_groups"][:-1], {**state["param_groups"][-1], "params": [0]}]
    with pytest.raises(ValueError, match="this optimizer has groups of"):
        engine.optimizer.load_state_dict({**state, "param_groups": groups})
    name = next(reversed(mean["average"]))
    with pytest.raises(ValueError, match=f"only this engine has an average of '{name}'"):
        average.load_state_dict({**mean, "average": {key: value for key, value in mean["average"].items() if key != name}})


@distributed(world_size=2)
@pytest.mark.parametrize("i", range(len(LAYOUTS[2])) if EVERYTHING else (0, 3, 4))  # each axis, model and stage
def test_states_of_two_ranks(i: int, tmp_path: Path) -> None:
    whole_states(*LAYOUTS[2][i], tmp_path)


@pytest.mark.slow
@distributed(world_size=4)
@pytest.mark.parametrize("i", range(len(LAYOUTS[4])))
def test_states_of_four_ranks(i: int, tmp_path: Path) -> None:
    whole_states(*LAYOUTS[4][i], tmp_path)


@distributed(world_size=2)
def test_states_of_a_pipeline_module() -> None:
    """Layers by their numbers, what they share first: as one process numbers them."""
    config = settings(1, gradient_accumulation_steps=2)
    alone = slipstream.initialize(model=pipeline_of(num_stages=1, stages=(0,)), config=config, mpu=Group(1))[0]
    names = [name for name, _ in alone.module.named_parameters()]
    alone.destroy()
    engine = slipstream.initialize(model=pipeline_of(num_stages=2, num_chunks=2), config=config)[0]
    state = engine.optimizer.state_dict()
    from slipstream.train.saving import optimizer_state

    assert optimizer_state._names(engine.states) == [names]
    assert state["param_groups"][0]["params"] == list(range(len(names)))
    engine.destroy()


@distributed(world_size=2)
def test_a_norm_that_is_registered_before_the_layers() -> None:
    """OPT's last norm is on the last stage, and its parameters come before those of the first stage's layers."""
    alone = make("opt", 0, {}, alone=True)
    state = alone.optimizer.state_dict()
    shapes = [[tuple(param.shape) for param in group["params"]] for group in alone.optimizer.param_groups]
    names = [name for name, _ in alone.module.named_parameters()]
    alone.destroy()
    engine = make("opt", 1, {"slipstream": {"mesh": {"pp": 2}}})
    assert_equal(engine.optimizer.state_dict(), state)
    assert len(shapes) == 3 and sorted(names, key=engine.module.position) == names
    assert engine.module.position(f"{names[5]}.base_layer.weight") == 5
    engine.destroy()


def adapted(kind: str) -> nn.Module:
    import peft

    targets = {"gpt2": ["c_attn", "c_proj"], "mixtral": ["q_proj", "o_proj"]}.get(
        kind, ["q_proj", "o_proj", "down_proj", "up_proj"]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft calls what transformers renamed
        config = peft.LoraConfig(r=4, target_modules=targets, fan_in_fan_out=kind == "gpt2", task_type="CAUSAL_LM")
        model: nn.Module = peft.get_peft_model(build(kind), config)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.normal_(generator=torch.Generator().manual_seed(len(name)))
    return model


def save_adapters(ranks: int, folder: Path) -> None:
    from safetensors.torch import load_file

    for kind, stage, blocks in LAYOUTS[ranks]:
        alone = make(kind, 0, {}, alone=True, model=adapted(kind))
        step(alone, 0)
        name = f"{kind}{stage}"
        own = folder / f"rank{dist.get_rank()}"
        alone.save_checkpoint(own, tag=name, contents="adapters")
        alone.save_pretrained(str(own / name), only_trainable=True)
        alone.destroy()
        dist.barrier()
        engine = make(kind, stage, blocks, model=adapted(kind))
        engine.load_checkpoint(folder / "rank0", tag=name)
        engine.save_pretrained(str(folder / name), only_trainable=True)
        want = load_file(folder / "rank0" / name / "adapter_model.safetensors")
        assert len(want) >= 8 and any(value.abs().sum() for value in want.values())
        assert_equal(load_file(folder / name / "adapter_model.safetensors"), want, name)
        files = [json.loads((each / "adapter_config.json").read_text()) for each in (folder / name, folder / "rank0" / name)]
        assert files[0] == files[1]
        if dist.get_rank() == 1:
            next(param for param in engine.module.parameters() if not param.requires_grad).requires_grad_(True)
        with pytest.raises(ValueError, match=r"are trained but belong to no adapter"):  # on all ranks
            engine.save_pretrained(str(folder / "none"), only_trainable=True)
        engine.destroy()


@distributed(world_size=2)
def test_adapters_alone_of_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed: make test-clients does")
    save_adapters(2, tmp_path)


@distributed(world_size=4)
def test_adapters_alone_of_four_ranks(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed: make test-clients does")
    save_adapters(4, tmp_path)

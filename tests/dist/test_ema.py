"""Sharded moving averages: bit-identical to plain torch's over complete weights, in every stage and tier."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import slipstream
from slipstream.train.ema import Ema
from tests import cases, toy
from tests.pool import distributed, run

DECAY = 0.75
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"dtype": "bf16"},
    "bf16 masters": {"dtype": "bf16", "slipstream": {"stochastic_rounding": True}},
}


def small() -> torch.nn.Module:
    return toy.Lm(dim=8, depth=2)


def masters(engine: Any) -> dict[str, Tensor]:
    """The complete master weights, in fp32."""
    return {name: engine.optimizer_state(name)["master"].clone() for name, _ in engine.module.named_parameters()}


def follow(engine: Any, average: Ema, plain: dict[str, Tensor], steps: range, decay: float = DECAY) -> None:
    """Train, and average `plain` in plain torch."""
    for i in steps:
        toy.step(engine, toy.tokens(engine.rank, i))
        assert average.update()
        for name, master in masters(engine).items():
            plain[name] += (master - plain[name]) * (1 - decay)


def assert_same(average: Ema, plain: dict[str, Tensor]) -> None:
    ours = average.state_dict()["average"]
    assert ours.keys() == plain.keys()
    for name, value in plain.items():
        assert value.equal(ours[name]), name


def assert_averages_stand_in(engine: Any, plain: dict[str, Tensor], model: torch.nn.Module) -> None:
    """Check that inside `applied` the engine computes as a plain model with the averages."""
    dtype = next(engine.module.parameters()).dtype
    model.load_state_dict(plain)
    state = engine.state_dict()
    with torch.no_grad():
        assert engine(toy.tokens(0, 99)).equal(model.to(dtype)(toy.tokens(0, 99)))
    for name, value in model.state_dict().items():
        assert value.equal(state[name]), name


AVERAGED = [("fp32", "shared"), ("bf16", "gloo"), *([("fp32", "gloo"), ("bf16 masters", "shared")] if cases.EVERYTHING else [])]


@pytest.mark.parametrize("precision, over", AVERAGED)
@distributed(world_size=2)
def test_averages_are_plain_torch_s(precision: str, over: str) -> None:
    """Reading them does not affect training."""
    sums = {}
    for stage in cases.stages(over):
        for looks in (True, False) if stage == 3 else (True,):
            engine = toy.make(toy.seeded(small), stage, over, **PRECISIONS[precision])
            average, plain = Ema(engine, DECAY), masters(engine)
            follow(engine, average, plain, range(2))
            assert_same(average, plain)
            if looks:
                before = toy.checksum(engine)
                with average.applied():
                    assert_averages_stand_in(engine, plain, small())
                assert toy.checksum(engine) == before
            follow(engine, average, plain, range(2, 3))
            assert_same(average, plain)
            sums[stage, looks] = int(toy.checksum(engine))
            engine.destroy()
    assert len(set(sums.values())) == 1


@pytest.mark.disk
@distributed(world_size=2)
def test_averages_are_stored_with_the_states(tmp_path: Path) -> None:
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    everything = {"offload_optimizer": disk, "offload_param": disk | {"max_in_cpu": 0}}
    for dtype, tiers in (("fp32", everything), ("bf16", {"offload_optimizer": disk})):
        engine = toy.make(toy.seeded(small), 3, dtype=dtype, zero_optimization=tiers)
        average, plain = Ema(engine, DECAY), masters(engine)
        assert all(store.is_away(0, store.numel) for store in average.stores() if store.numel)
        follow(engine, average, plain, range(2))
        before = toy.checksum(engine)
        with average.applied():
            assert_averages_stand_in(engine, plain, small())
        assert toy.checksum(engine) == before
        assert_same(average, plain)
        engine.destroy()


def saved(folder: str, stage: int) -> None:
    engine = toy.make(toy.seeded(toy.Lm), stage)
    average = Ema(engine, DECAY)
    follow(engine, average, masters(engine), range(3))
    engine.save_checkpoint(folder, client_state={"average": {n: v.tolist() for n, v in average.state_dict()["average"].items()}})
    engine.destroy()


def resumed(folder: str, stage: int) -> None:
    engine = toy.make(toy.seeded(toy.Lm, 1), stage)
    average = Ema(engine, DECAY)
    _, client = engine.load_checkpoint(folder)
    plain = {name: torch.tensor(value) for name, value in client["average"].items()}
    assert average.num_updates == 3
    assert_same(average, plain)
    follow(engine, average, plain, range(3, 5))
    assert_same(average, plain)
    engine.destroy()


def test_averages_come_back_at_another_stage_and_size(tmp_path: Path) -> None:
    run(2, saved, str(tmp_path), 3)
    run(1, resumed, str(tmp_path), 0)
    run(3, resumed, str(tmp_path), 2)


def test_a_checkpoint_without_averages_or_an_engine_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(str(tmp_path / "with"), 3)
    engine = toy.make(toy.seeded(toy.Lm, 1), 1)
    engine.load_checkpoint(str(tmp_path / "with"))
    assert "create slipstream.ema.Ema(engine) before load_checkpoint()" in caplog.text
    average = Ema(engine, DECAY)
    engine.save_checkpoint(str(tmp_path / "weights"), contents="weights")
    follow(engine, average, masters(engine), range(2))
    engine.load_checkpoint(str(tmp_path / "weights"))
    assert "moving averages were not loaded and restart from the loaded weights" in caplog.text
    assert_same(average, masters(engine))
    assert average.num_updates == 0
    engine.destroy()


def test_state_dict_comes_back() -> None:
    engine = toy.make(toy.seeded(toy.Lm), 3)
    average, plain = Ema(engine, DECAY), masters(engine)
    follow(engine, average, plain, range(2))
    state = average.state_dict()
    engine.destroy()
    engine = toy.make(toy.seeded(toy.Lm, 1), 1)
    average = Ema(engine, DECAY)
    average.load_state_dict(state)
    assert average.num_updates == 2
    assert_same(average, plain)
    short = {"num_updates": 0, "average": dict(list(state["average"].items())[1:])}
    with pytest.raises(ValueError, match=r"only this engine has an average of 'embedding\.weight'"):
        average.load_state_dict(short)
    wide = {"num_updates": 0, "average": state["average"] | {"head.bias": torch.zeros(3)}}
    with pytest.raises(ValueError, match=r"'head\.bias' has shape \(3,\) in the state, and \(48,\) here"):
        average.load_state_dict(wide)
    assert_same(average, plain)
    average.load_state_dict(short, strict=False)
    assert average.num_updates == 0
    engine.destroy()


def test_decay_warms_up() -> None:
    engine = toy.make(toy.seeded(toy.Lm), 0)
    average, plain = Ema(engine, 0.15, warmup=True), masters(engine)
    for i, decay in enumerate((1 / 10, 0.15, 0.15)):  # (1 + n) / (10 + n) is already 0.18 in the second step
        follow(engine, average, plain, range(i, i + 1), decay)
    assert_same(average, plain)
    engine.destroy()


def test_only_applied_steps_count() -> None:
    engine = toy.make(toy.seeded(toy.Lm), 1, gradient_accumulation_steps=2)
    average = Ema(engine)
    counted = []
    for i in range(4):
        toy.step(engine, toy.tokens(0, i))
        counted.append(average.update())
    assert counted == [False, True, False, True] and average.num_updates == 2
    engine.destroy()


def test_frozen_parameters_have_none_until_they_train() -> None:
    model = toy.seeded(toy.Lm)
    model.blocks[1].requires_grad_(False)
    engine = toy.make(model, 3)
    average, plain = Ema(engine, DECAY), masters(engine)
    toy.step(engine, toy.tokens(0, 0))
    average.update()
    assert not any(name.startswith("blocks.1.") for name in average.state_dict()["average"])
    model.blocks[1].requires_grad_(True)
    toy.step(engine, toy.tokens(0, 1))
    average.update()
    plain = {name: value for name, value in masters(engine).items() if name.startswith("blocks.1.")}
    ours = average.state_dict()["average"]
    assert plain and all(value.equal(ours[name]) for name, value in plain.items())
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
def test_what_would_mix_weights_and_averages_is_refused(stage: int, tmp_path: Path) -> None:
    engine = toy.make(toy.seeded(toy.Lm), stage)
    average = Ema(engine, DECAY)
    follow(engine, average, masters(engine), range(1))
    before = toy.checksum(engine)
    with pytest.raises(ZeroDivisionError), average.applied():
        for refused in (
            engine.step,
            average.update,
            average.state_dict,
            lambda: engine.save_checkpoint(str(tmp_path)),
            lambda: engine(toy.tokens(0, 0)),
        ):
            with pytest.raises(RuntimeError, match="weights are averages"):
                refused()
        engine.save_pretrained(str(tmp_path))
        raise ZeroDivisionError
    assert toy.checksum(engine) == before
    toy.step(engine, toy.tokens(0, 1))
    assert toy.checksum(engine) != before
    from safetensors.torch import load_file

    written = load_file(tmp_path / "model.safetensors")
    assert all(value.equal(written[name]) for name, value in average.state_dict()["average"].items())
    engine.destroy()


def test_arguments_and_surgery() -> None:
    engine = toy.make(toy.seeded(toy.Lm), 3)
    for decay in (1.0, -0.1):
        with pytest.raises(ValueError, match="decay must be >= 0 and < 1"):
            Ema(engine, decay)
    average = slipstream.ema.Ema(engine, DECAY)
    with pytest.raises(ValueError, match="has one already"):
        Ema(engine)
    follow(engine, average, masters(engine), range(2))
    state = average.state_dict()
    with engine.surgery():
        engine.module.blocks[1].up = torch.nn.Linear(16, 32, bias=False)
    toy.step(engine, toy.tokens(0, 3))
    with pytest.raises(RuntimeError, match=r"engine\.surgery\(\) has changed.*load_state_dict\(state, strict=False\)"):
        average.update()
    del average
    average = Ema(engine, DECAY)
    average.load_state_dict(state, strict=False)
    assert average.state_dict()["average"]["head.weight"].equal(state["average"]["head.weight"])
    engine.destroy()
    with pytest.raises(RuntimeError, match="destroyed"):
        average.update()
    alone = toy.make(toy.Lm(), 0, optimizer=None)
    with pytest.raises(ValueError, match="no optimizer"):
        Ema(alone)
    alone.destroy()


@pytest.mark.disk
def test_averages_sleep_with_the_optimizer(tmp_path: Path) -> None:
    sizes = []
    for has in (False, True):
        engine = toy.make(toy.seeded(toy.Lm), 1)
        average = Ema(engine, DECAY) if has else None
        toy.step(engine, toy.tokens(0, 0))
        if average is not None:
            average.update()
            state = average.state_dict()["average"]
        sizes.append(engine.sleep(["optimizer"], device="disk", path=str(tmp_path)))
        if average is not None:
            with pytest.raises(RuntimeError, match="sleeps"):
                average.update()
        engine.wake()
        if average is not None:
            assert_same(average, state)
        engine.destroy()
    assert sizes[1] - sizes[0] >= 4 * sum(value.numel() for value in state.values())


def test_nothing_is_said_without_averages(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        engine = toy.make(toy.seeded(toy.Lm), 1)
        engine.save_checkpoint(str(tmp_path))
        engine.load_checkpoint(str(tmp_path))
        engine.destroy()
    assert "average" not in caplog.text

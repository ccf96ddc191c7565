"""Schedules against numbers worked out from the formulas, and against torch's twins where there is one."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.train.schedules import VALID, add_group, build_scheduler


def optimizer(*lrs: float, cls: type[torch.optim.Optimizer] = torch.optim.AdamW) -> torch.optim.Optimizer:
    return cls([{"params": [torch.zeros(1)], "lr": lr} for lr in lrs or (1e-3,)])  # type: ignore[call-arg]


def rates(name: str, params: dict[str, Any], steps: int) -> list[float]:
    target = optimizer()
    schedule = build_scheduler(name, params, target)
    result = []
    for _ in range(steps):
        result.append(target.param_groups[0]["lr"])
        schedule.step()
    return result


ONE_CYCLE = {
    "cycle_min_lr": 1e-3,
    "cycle_max_lr": 1e-2,
    "cycle_first_step_size": 4,
    "cycle_second_step_size": 3,
    "decay_lr_rate": 0.5,
    "decay_step_size": 2,
    "decay_mom_rate": 0.01,
}
# The rate before the first step(), then after each of ten.
GOLDEN: list[tuple[str, dict[str, Any], list[float]]] = [
    (
        "LRRangeTest",
        {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 4, "lr_range_test_step_rate": 2.0},
        [1e-3, 1.5e-3, 2e-3, 2.5e-3, 3e-3, 3.5e-3, 4e-3, 4.5e-3, 5e-3, 5.5e-3, 6e-3],
    ),
    (
        "LRRangeTest",
        {
            "lr_range_test_min_lr": 1e-3,
            "lr_range_test_step_size": 4,
            "lr_range_test_step_rate": 2.0,
            "lr_range_test_staircase": True,
        },
        [1e-3, 1e-3, 1e-3, 1e-3, 3e-3, 3e-3, 3e-3, 3e-3, 5e-3, 5e-3, 5e-3],
    ),
    (
        "OneCycle",
        ONE_CYCLE,  # up in 4, down in 3, then 1e-3 / (1 + 0.5 k / 2)
        [1e-3, 3.25e-3, 5.5e-3, 7.75e-3, 1e-2, 7e-3, 4e-3, 1e-3, 8e-4, 1e-3 / 1.5, 1e-3 / 1.75],
    ),
    (
        "OneCycle",
        {**ONE_CYCLE, "cycle_first_stair_count": 2, "decay_lr_rate": 0.0},  # stairs of half the amplitude
        [1e-3, 1e-3, 5.5e-3, 5.5e-3, 1e-2, 5.5e-3, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3],
    ),
    (
        "WarmupLR",
        {"warmup_max_lr": 1e-3, "warmup_num_steps": 5},  # log(i + 1) / log(5)
        [0, 0, 4.30676558e-4, 6.82606194e-4, 8.61353116e-4, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3],
    ),
    (
        "WarmupLR",
        {"warmup_min_lr": 1e-4, "warmup_max_lr": 1e-3, "warmup_num_steps": 5, "warmup_type": "linear"},
        [1e-4, 1e-4, 2.8e-4, 4.6e-4, 6.4e-4, 8.2e-4, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3],
    ),
    (
        "WarmupDecayLR",
        {"total_num_steps": 9, "warmup_max_lr": 1e-3, "warmup_num_steps": 4},
        [0, 0, 5e-4, 7.9248125e-4, 1e-3, 1e-3, 8e-4, 6e-4, 4e-4, 2e-4, 0],
    ),
    (
        "WarmupCosineLR",
        {"total_num_steps": 9, "warmup_num_steps": 4, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.05},
        [*(0, 1e-4, 5.5e-4, 8.13233125e-4, 1e-3), *(9.09283072e-4, 6.71783072e-4, 3.78216928e-4, 1.40716928e-4, 5e-5, 5e-5)],
    ),
]


@pytest.mark.parametrize(("name", "params", "expected"), GOLDEN)
def test_rates(name: str, params: dict[str, Any], expected: list[float]) -> None:
    assert rates(name, params, len(expected)) == pytest.approx(expected, rel=1e-8, abs=1e-15)


def test_one_cycle_momentum() -> None:
    target = optimizer()
    schedule = build_scheduler("OneCycle", ONE_CYCLE, target)
    betas = []
    for _ in range(10):
        betas.append(target.param_groups[0]["betas"])
        schedule.step()
    assert [beta2 for _, beta2 in betas] == [0.99] * 10
    expected = [0.8, 0.875, 0.85, 0.825, 0.8, 0.9 - 0.2 / 3, 0.9 - 0.1 / 3, 0.9, 0.9045, 0.909]
    assert [beta1 for beta1, _ in betas] == pytest.approx(expected)


def test_one_cycle_leaves_momentum_alone(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    target = optimizer()
    build_scheduler("OneCycle", {**ONE_CYCLE, "cycle_momentum": False}, target).step()
    assert target.param_groups[0]["betas"] == (0.9, 0.999)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        build_scheduler("OneCycle", ONE_CYCLE, optimizer(cls=torch.optim.SGD)).step()
        build_scheduler("OneCycle", ONE_CYCLE, optimizer()).step()
    assert ["no parameter group has betas" in r.message for r in caplog.records] == [True, False]
    assert "sets beta2 to 0.99" in caplog.text
    caplog.clear()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    build_scheduler("OneCycle", ONE_CYCLE, optimizer()).step()
    assert not caplog.records, "the first rank says it for all"


def test_linear_warmup_equals_torch() -> None:
    """WarmupLR's rate at iteration i is LinearLR's after i steps."""
    twin = optimizer()
    torch_schedule = torch.optim.lr_scheduler.LinearLR(twin, start_factor=0.1, total_iters=7)
    params = {"warmup_min_lr": 1e-4, "warmup_num_steps": 7, "warmup_type": "linear"}
    for rate in rates("WarmupLR", params, 12)[1:]:
        assert rate == pytest.approx(twin.param_groups[0]["lr"])
        twin.step()
        torch_schedule.step()


def test_values_per_group() -> None:
    target = optimizer(1e-3, 2e-3)
    schedule = build_scheduler("WarmupLR", {"warmup_max_lr": [1e-2, 3e-2], "warmup_num_steps": 4}, target)
    schedule.step(10)
    assert [group["lr"] for group in target.param_groups] == [1e-2, 3e-2] == schedule.get_last_lr()
    target = optimizer(1e-3, 2e-3)
    build_scheduler("WarmupLR", {"warmup_num_steps": 4}, target).step(10)  # the optimizer's own rates
    assert [group["lr"] for group in target.param_groups] == [1e-3, 2e-3]
    with pytest.raises(ValueError, match="cycle_max_lr has 1 values for 2 parameter groups"):
        build_scheduler("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": [1.0]}, target)
    assert [group["lr"] for group in target.param_groups] == [1e-3, 2e-3]


def test_rate_tensors_keep_their_identity() -> None:
    rate = torch.tensor(1e-3)
    target = torch.optim.AdamW([torch.zeros(1)], lr=rate)
    schedule = build_scheduler("WarmupCosineLR", {"total_num_steps": 9, "warmup_num_steps": 4}, target)
    schedule.step(4)
    assert target.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(schedule.get_last_lr()[0])


@given(case=st.sampled_from(GOLDEN), before=st.integers(0, 12), after=st.integers(0, 4))
def test_resume(case: tuple[str, dict[str, Any], list[float]], before: int, after: int) -> None:
    """Saved anywhere, loaded into a fresh one: the same values at once and later."""
    name, params, _ = case
    first, second = optimizer(), optimizer()
    schedule, resumed = build_scheduler(name, params, first), build_scheduler(name, params, second)
    for _ in range(before):
        schedule.step()
    resumed.load_state_dict(schedule.state_dict())
    for _ in range(after + 1):
        assert resumed.get_last_lr() == schedule.get_last_lr() == resumed.get_lr()
        for key in ("lr", "betas"):
            assert first.param_groups[0][key] == second.param_groups[0][key]
        schedule.step()
        resumed.step()


@given(
    total=st.integers(0, 60),
    warmup=st.integers(0, 60),
    kind=st.sampled_from(["log", "linear"]),
    name=st.sampled_from(["WarmupDecayLR", "WarmupCosineLR"]),
)
def test_warmup_rises_then_falls_within_bounds(total: int, warmup: int, kind: str, name: str) -> None:
    params = {"total_num_steps": total, "warmup_num_steps": float(warmup), "warmup_type": kind}
    series = rates(name, params, 80)
    peak = max(2, warmup)  # the first rate is that before any step
    assert all(0 <= rate <= 1e-3 * (1 + 1e-12) for rate in series)
    assert series[: peak + 1] == sorted(series[: peak + 1])
    assert series[peak + 1 :] == sorted(series[peak + 1 :], reverse=True)


def test_torch_schedulers_by_name() -> None:
    target = optimizer()
    schedule = build_scheduler("cosineannealinglr", {"T_max": 10}, target)
    assert isinstance(schedule, torch.optim.lr_scheduler.CosineAnnealingLR)
    cycle = build_scheduler("OneCycleLR", {"max_lr": 0.1, "total_steps": 10}, optimizer())
    assert isinstance(cycle, torch.optim.lr_scheduler.OneCycleLR)


def test_names() -> None:
    assert VALID == ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
    for name in VALID:
        cases: dict[str, dict[str, Any]] = {
            "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_momentum": False},
            "WarmupDecayLR": {"total_num_steps": 2000},
            "WarmupCosineLR": {"total_num_steps": 2000},
        }
        assert type(build_scheduler(name, cases.get(name, {}), optimizer())).__name__ == name


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("WarmupL", {}, "did you mean 'WarmupLR'"),
        ("LambdaLR", {}, "needs a function"),
        ("ReduceLROnPlateau", {}, r"needs a metric at each step: .*call scheduler.step\(metric\) where you evaluate$"),
        ("WarmupLR", {"warmup_max_l": 1}, "unknown 'warmup_max_l', did you mean 'warmup_max_lr'"),
        ("WarmupDecayLR", {}, "total_num_steps must be given"),
        ("WarmupLR", {"warmup_type": "linaer"}, "did you mean 'linear'"),
        ("WarmupLR", {"warmup_num_steps": 2.5}, "must be an integer >= 0"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "must be an integer >= 1"),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 0}, "needs cycle_first"),
        ("StepLR", {"step_size": 1, "gama": 0.1}, "did you mean 'gamma'"),
    ],
)
def test_refusals(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_scheduler(name, params, optimizer())


@pytest.mark.parametrize("state", [{}, {"last_batch_iteration": "1"}, {"last_batch_iteration": -2}])
def test_foreign_state_changes_nothing(state: dict[str, Any]) -> None:
    schedule = build_scheduler("WarmupLR", {}, optimizer())
    schedule.step(7)
    with pytest.raises(ValueError, match="another scheduler's"):
        schedule.load_state_dict(state)
    assert schedule.state_dict() == {"last_batch_iteration": 7}


def test_needs_parameter_groups() -> None:
    with pytest.raises(ValueError, match="not a object"):
        build_scheduler("WarmupLR", {}, object())


RATED: dict[str, Any] = {
    "WarmupLR": lambda inner: build_scheduler("WarmupLR", {"warmup_num_steps": 5}, inner),
    "WarmupCosineLR": lambda inner: build_scheduler("WarmupCosineLR", {"warmup_num_steps": 3, "total_num_steps": 9}, inner),
    **{
        name: lambda inner, name=name, params=params: build_scheduler(name, params, inner)
        for name, params in {
            "StepLR": {"step_size": 3, "gamma": 0.5},
            "MultiStepLR": {"milestones": [2, 6]},
            "ExponentialLR": {"gamma": 0.9},
            "ConstantLR": {"factor": 0.1, "total_iters": 6},
            "LinearLR": {"start_factor": 0.1, "total_iters": 6},
            "PolynomialLR": {"total_iters": 12},
            "CosineAnnealingLR": {"T_max": 6},
            "CosineAnnealingWarmRestarts": {"T_0": 3},
        }.items()
    },
    "LambdaLR": lambda inner: torch.optim.lr_scheduler.LambdaLR(inner, lambda step: step / 5),
    "MultiplicativeLR": lambda inner: torch.optim.lr_scheduler.MultiplicativeLR(inner, lambda step: 0.8),
    "SequentialLR": lambda inner: torch.optim.lr_scheduler.SequentialLR(
        inner, [torch.optim.lr_scheduler.LinearLR(inner, 0.1, total_iters=3), torch.optim.lr_scheduler.StepLR(inner, 2)], [4]
    ),
    "ChainedScheduler": lambda inner: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.LinearLR(inner, 0.5, total_iters=3), torch.optim.lr_scheduler.ExponentialLR(inner, 0.9)]
    ),
}


@pytest.mark.parametrize("name", RATED)
@pytest.mark.parametrize("after", [0, 1, 5])
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of an optimizer that has not stepped
def test_a_group_that_is_added_follows_as_one_that_was_there(name: str, after: int) -> None:
    """Also after the scheduler's state has been saved and loaded; undone, the scheduler is what it was."""
    twin = torch.optim.SGD([{"params": [torch.zeros(1)], "lr": 0.5}, {"params": [torch.zeros(1)], "lr": 2.0}])
    inner = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    expected, scheduler = RATED[name](twin), RATED[name](inner)
    for i in range(12):
        if i == after:
            before = scheduler.state_dict()
            inner.add_param_group({"params": [torch.zeros(1)], "lr": 2.0})
            add_group(scheduler, 2.0)()
            assert scheduler.state_dict() == before
            inner.param_groups[1]["lr"] = 2.0
            add_group(scheduler, 2.0)
        if i == after + 2:
            scheduler.load_state_dict(scheduler.state_dict())
        rates = [group["lr"] for group in inner.param_groups]
        assert rates == pytest.approx([group["lr"] for group in twin.param_groups][: len(rates)]), i
        assert scheduler.get_last_lr() == pytest.approx(rates), i
        expected.step()
        scheduler.step()


def test_values_of_a_group_that_is_added() -> None:
    """Rates in proportion to the first group's, momenta as they are; a rate that was not given is the first group's."""
    for name, params, rates in (
        ("LRRangeTest", {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 1}, [[0.2, 0.8, 0.2], [0.3, 1.2, 0.3]]),
        (
            "WarmupDecayLR",
            {"warmup_max_lr": 0.1, "warmup_num_steps": 2, "total_num_steps": 4, "warmup_type": "linear"},
            [[0.0, 0.0, 0.0], [0.05, 0.2, 0.05]],
        ),
        (
            "OneCycle",
            {"cycle_min_lr": 0.02, "cycle_max_lr": 0.1, "cycle_first_step_size": 2},
            [[0.06, 0.24, 0.06], [0.1, 0.4, 0.1]],
        ),
    ):
        inner = torch.optim.AdamW([torch.zeros(1)], lr=0.1, betas=(0.9, 0.99))
        scheduler = build_scheduler(name, params, inner)
        for rate in (0.4, None):
            inner.add_param_group({"params": [torch.zeros(1)]})
            add_group(scheduler, rate)
        for expected in rates:
            inner._opt_called = True  # type: ignore[attr-defined]
            scheduler.step()
            assert [group["lr"] for group in inner.param_groups] == pytest.approx(expected), name
            assert len({group["betas"] for group in inner.param_groups}) == 1
    inner = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    cyclic = torch.optim.lr_scheduler.CyclicLR(inner, 0.1, 0.2, cycle_momentum=False)
    inner.add_param_group({"params": [torch.zeros(1)]})
    with pytest.raises(ValueError, match="a CyclicLR cannot be extended by another group"):
        add_group(cyclic, None)

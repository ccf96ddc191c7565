"""The plan: the batch triad, "auto", precision, optimizer and schedule, and where each value came from."""

from __future__ import annotations

import dataclasses
import math
import pickle
import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config import DataWorld, ModelFacts, Plan, describe, for_inference, resolve
from slipstream.config import plan as plans
from slipstream.config.keys import Fate, of_fate
from slipstream.config.plan import json_keys, plan_values, sentences
from slipstream.config.resolution import AUTO, WorldError, triad
from slipstream.optim import resolve_optimizer
from slipstream.parallel.schedule import simulate
from slipstream.train import compiled
from slipstream.train.recipe import rehearse
from slipstream.train.schedules import build_scheduler
from slipstream.zero.wrap import LEAF_RULES
from tests.unit.test_config_schema import ACCELERATE

# The plan has these blocks whole: test_compression.py, test_monitors.py, test_curriculum.py, test_curriculum_data.py,
# test_random_ltd.py, test_elasticity.py and test_weight_quantization.py have their keys.
WHOLE = (
    "compression_training.",
    "weight_quantization.",
    "quantize_training.",
    "eigenvalue.",
    "tensorboard.",
    "wandb.",
    "comet.",
    "csv_monitor.",
    "slipstream.monitors.",
    "curriculum_learning.",
    "data_efficiency.",
    "elasticity.",
)
HONORED = {name: key for name, key in of_fate(Fate.HONORED).items() if not name.startswith(WHOLE)}
FACTS = ModelFacts(device_type="cpu", supports_bf16=True)
V100 = dataclasses.replace(FACTS, device_type="cuda", supports_bf16=False)


def plan_of(raw: dict[str, Any], ranks: int = 2, facts: ModelFacts = FACTS, **overrides: Any) -> Plan:
    if not {"train_batch_size", "train_micro_batch_size_per_gpu"} & set(raw):
        raw = {"train_micro_batch_size_per_gpu": 1} | raw
    return resolve(raw, world=DataWorld(ranks=ranks), facts=facts, overrides=overrides)


def adam(**params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "Adam", "params": params}}


# The batch triad


sizes = st.integers(1, 64)


@given(micro=sizes, accumulation=sizes, ranks=sizes, keys=st.sampled_from(["tma", "tm", "ta", "ma", "t", "m"]))
def test_any_part_of_the_triad_gives_a_consistent_whole(micro: int, accumulation: int, ranks: int, keys: str) -> None:
    train = micro * accumulation * ranks
    batch = triad(train if "t" in keys else None, micro if "m" in keys else None, accumulation if "a" in keys else None, ranks)
    assert batch.train == batch.micro * batch.accumulation * ranks
    if len(keys) > 1:
        assert batch == (train, micro, accumulation)
    elif keys == "t":
        assert batch == (train, micro * accumulation, 1)
    else:
        assert batch == (micro * ranks, micro, 1)


@given(train=sizes, micro=st.none() | sizes, accumulation=st.none() | sizes, ranks=sizes)
def test_a_triad_is_whole_or_refused(train: int, micro: int | None, accumulation: int | None, ranks: int) -> None:
    try:
        batch = triad(train, micro, accumulation, ranks)
    except ValueError as error:
        assert train % ((micro or 1) * (accumulation or 1) * ranks) or (micro and accumulation)
        assert f"train_batch_size ({train})" in str(error)
        assert f"({ranks})" in str(error)
    else:
        assert batch.train == train == batch.micro * batch.accumulation * ranks
        assert micro in (None, batch.micro) and accumulation in (None, batch.accumulation)


def test_train_batch_size() -> None:
    for train in (8, 16):
        plan = plan_of({"train_batch_size": train, "train_micro_batch_size_per_gpu": 2})
        assert (plan.batch.train_batch_size, plan.batch.accumulation) == (train, train // 4)
    assert plan.sources["gradient_accumulation_steps"].startswith("derived: train_batch_size /")
    # as in DeepSpeed, each of the two ranks that share a sample counts it
    shared = {"train_micro_batch_size_per_gpu": 2, "tensor_parallel": {"autotp_size": 2}}
    for sizes in (
        {"train_batch_size": 16},
        {"train_batch_size": 16, "gradient_accumulation_steps": 2},
        {"gradient_accumulation_steps": 2},
    ):
        plan = plan_of(shared | sizes, ranks=4)
        assert (plan.batch.train_batch_size, plan.batch.accumulation) == (8, 2)
    assert plan_of(shared | {"train_batch_size": 8, "gradient_accumulation_steps": 2}, ranks=4).batch == plan.batch
    assert plan_of(shared | {"train_batch_size": 16, "slipstream": {"elastic_batch": True}}, ranks=4).batch.train_batch_size == 8
    for stated, accumulation in ((False, 2), (True, 4)):  # the sizes of tp_model_init, and of an mpu
        facts = dataclasses.replace(FACTS, mesh={"tp": 2}, has_tensor_ranks=stated)
        plan = plan_of({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2}, ranks=4, facts=facts)
        assert plan.batch.accumulation == accumulation
    with pytest.raises(WorldError, match=r"\(12\) is not a multiple .* = 8; use .* 8 or 16,.* for each of 2 ranks"):
        plan_of(shared | {"train_batch_size": 12}, ranks=4)
    with pytest.raises(WorldError, match=r"\(7\) counts a sample for each of 2 ranks.*; use 8$"):
        plan_of(shared | {"train_batch_size": 7}, ranks=4)


def test_train_micro_batch_size_per_gpu() -> None:
    for micro in (2, 4):
        plan = plan_of({"train_micro_batch_size_per_gpu": micro}, ranks=3)
        assert (plan.batch.micro_batch_size, plan.batch.train_batch_size) == (micro, micro * 3)
    assert plan.sources["train_batch_size"].startswith("derived")


def test_gradient_accumulation_steps() -> None:
    for steps in (1, 4):
        plan = plan_of({"train_batch_size": 8, "gradient_accumulation_steps": steps})
        assert (plan.batch.accumulation, plan.batch.micro_batch_size) == (steps, 4 // steps)


def test_triad_errors_teach() -> None:
    three = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    with pytest.raises(
        ValueError, match=r"^Check batch .* \(32\) != micro batch \(4\) x accumulation \(2\) x data parallel \(3\) = 24"
    ):
        plan_of(three, ranks=3)
    with pytest.raises(ValueError, match=r"not a multiple of micro batch \(4\) x data parallel \(3\) = 12; .* 24 or 36"):
        plan_of({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}, ranks=3)
    with pytest.raises(ValueError, match=r"use the nearest multiple, 4, or slipstream.elastic_batch"):
        plan_of({"train_batch_size": 2}, ranks=4)
    with pytest.raises(ValueError, match="give one of them"):
        resolve({"gradient_accumulation_steps": 2}, world=DataWorld(ranks=2), facts=FACTS)


def test_data_parallel_size() -> None:
    assert plan_of({"data_parallel_size": 2}).batch.train_batch_size == 2
    with pytest.raises(ValueError, match="data_parallel_size is 4, but the batch is split over 2 ranks"):
        plan_of({"data_parallel_size": 4})


# "auto"


def test_auto_batch_sizes() -> None:
    auto = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    plan = plan_of(auto, facts=dataclasses.replace(FACTS, loader_batch_size=6))
    assert plan.batch.micro_batch_size == 6 and plan.batch.train_batch_size == 12 and plan.notes == ()
    plan = plan_of(auto)
    assert plan.batch.micro_batch_size == 1
    assert "nothing determines it" in plan.notes[0]
    assert plan_of(auto | {"train_batch_size": 8}).batch.micro_batch_size == 4


@pytest.mark.parametrize(
    ("raw", "facts", "dtype"),
    [
        ({"bf16": {"enabled": "auto"}}, FACTS, torch.bfloat16),
        ({"bf16": {"enabled": "auto"}}, V100, torch.float32),
        ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, FACTS, torch.bfloat16),
        ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, V100, torch.float16),
        ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": True}}, FACTS, torch.float16),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": "auto"}}, FACTS, torch.bfloat16),
        ({"bf16": "auto"}, FACTS, torch.bfloat16),
        ({}, FACTS, torch.float32),
    ],
)
def test_auto_precision(raw: dict[str, Any], facts: ModelFacts, dtype: torch.dtype) -> None:
    assert plan_of(raw, facts=facts).precision.param_dtype is dtype


def test_auto_of_everything_else() -> None:
    raw = adam(lr="auto", betas="auto", eps="auto", weight_decay="auto", foreach="auto")
    raw |= {"gradient_clipping": "auto", "zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto"}}
    raw |= {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto"}}}
    plan = plan_of(raw)
    assert plan.optimizer is not None and plan.scheduler is not None
    assert plan.optimizer.params == {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    assert plan.scheduler.params == {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-3}
    assert plan.gradient_clipping == 1.0
    assert plan.zero.stage == 0
    assert plan.sources["gradient_clipping"] == f"auto: {AUTO['gradient_clipping'].text}"
    assert plan.sources["scheduler.params.warmup_max_lr"] == "auto: the optimizer's learning rate"


def test_auto_that_only_the_loop_knows() -> None:
    raw = adam(lr=1e-4) | {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}}
    with pytest.raises(ValueError, match=r"scheduler\.params\.total_num_steps is \"auto\".*optimizer steps"):
        plan_of(raw)


def test_auto_learning_rate_of_a_client_optimizer() -> None:
    raw = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}}
    plan = plan_of(raw, facts=dataclasses.replace(FACTS, optimizer_lr=0.25))
    assert plan.scheduler is not None and plan.scheduler.params["warmup_max_lr"] == 0.25
    with pytest.raises(ValueError, match="learning rate is not known here"):
        plan_of(raw)


# Precision


def test_precision_dtypes() -> None:
    fp32 = plan_of({}).precision
    assert (fp32.param_dtype, fp32.master_dtype, fp32.state_dtype) == (torch.float32,) * 3
    assert fp32.loss_scale is None and fp32.check_overflow and fp32.autocast_dtype is None
    bf16 = plan_of({"bf16": {"enabled": True}}).precision
    assert (bf16.param_dtype, bf16.master_dtype, bf16.check_overflow) == (torch.bfloat16, torch.float32, True)
    assert bf16.loss_scale is None and bf16.grad_accum_dtype is None
    lean = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True, "check_overflow": 0}
    small = plan_of({"bf16": lean}).precision
    assert (small.master_dtype, small.state_dtype, small.grad_accum_dtype) == (torch.bfloat16,) * 3
    assert not small.check_overflow
    unchecked: dict[str, Any] = {"slipstream": {"check_grad_overflow": False}}
    assert not plan_of(unchecked).precision.check_overflow
    for half, why in (("fp16", "always skipped"), ("bf16", "bf16.check_grad_overflow applies")):
        plan = plan_of(unchecked | {half: {"enabled": True}})
        assert plan.precision.check_overflow and any(why in note for note in plan.notes)
    half = plan_of({"fp16": {"enabled": True, "auto_cast": True, "fp16_master_weights_and_grads": True}}).precision
    assert (half.param_dtype, half.master_dtype, half.auto_cast_inputs) == (torch.float16, torch.float16, True)
    assert half.state_dtype is torch.float32


def test_dtypes_of_gradients_and_wire() -> None:
    raw = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp16"}
    precision = plan_of(raw).precision
    assert (precision.grad_accum_dtype, precision.comm_dtype) == (torch.float32, torch.float16)
    assert plan_of({"communication_data_type": "none"}).precision.comm_dtype is None


def test_param_dtype() -> None:
    assert plan_of({"data_types": {"param_dtype": "bf16"}}).precision.param_dtype is torch.bfloat16
    with pytest.raises(ValueError, match=r"param_dtype is fp32, but bf16\.enabled is true"):
        plan_of({"bf16": {"enabled": True}, "data_types": {"param_dtype": "fp32"}})
    with pytest.raises(ValueError, match="needs a loss scale"):
        plan_of({"data_types": {"param_dtype": "fp16"}})


def test_autocast() -> None:
    plan = plan_of({"torch_autocast": {"enabled": True}})
    assert plan.precision.autocast_dtype is torch.bfloat16 and plan.precision.loss_scale is None
    plan = plan_of({"torch_autocast": {"enabled": True, "dtype": "torch.float16"}})
    assert plan.precision.autocast_dtype is torch.float16
    assert plan.precision.loss_scale is not None and plan.precision.check_overflow


def test_loss_scale() -> None:
    dynamic = plan_of({"fp16": {"enabled": True}}).precision.loss_scale
    assert dynamic is not None
    assert (dynamic.static, dynamic.initial, dynamic.window) == (None, 2.0**16, 1000)
    assert (dynamic.hysteresis, dynamic.consecutive_hysteresis, dynamic.minimum) == (2, False, 1.0)
    block = {
        "enabled": True,
        "loss_scale": 128,
        "initial_scale_power": 8,
        "loss_scale_window": 5,
        "hysteresis": 3,
        "consecutive_hysteresis": True,
        "min_loss_scale": 0.5,
    }
    static = plan_of({"fp16": block}).precision.loss_scale
    assert static is not None
    assert dataclasses.astuple(static) == (128.0, 256.0, 5, 3, True, 0.5)
    assert plan_values(plan_of({"fp16": block}))["fp16.initial_scale_power"] == 8
    with pytest.raises(ValueError, match=r"below fp16\.min_loss_scale"):
        plan_of({"fp16": {"enabled": True, "initial_scale_power": 1, "min_loss_scale": 4}})


def test_two_precisions_are_refused() -> None:
    with pytest.raises(ValueError, match="both true"):
        plan_of({"fp16": {"enabled": True}, "bf16": {"enabled": True}})
    with pytest.raises(ValueError, match="this cuda device does not support bf16"):
        plan_of({"bf16": {"enabled": True}}, facts=V100)


# ZeRO


def test_zero() -> None:
    plan = plan_of({"zero_optimization": {"stage": 3, "mics_shard_size": 2}, "gradient_allreduce_op": "SUM"}, ranks=4)
    assert (plan.zero.stage, plan.zero.shard_size, plan.zero.reduce_op) == (3, 2, "sum")
    assert plan_of({"zero_optimization": True}).zero.stage == 1
    assert plan_of({"zero_optimization": {"stage": 3, "mics_shard_size": -1}}).zero.shard_size is None


def test_groups_are_checked(caplog: pytest.LogCaptureFixture) -> None:
    groups = {"stage": 3, "zero_hpz_partition_size": 2}
    assert plan_of({"zero_optimization": groups}, ranks=4).zero.group_size == 2
    with pytest.raises(
        ValueError, match=r"zero_hpz_partition_size \(2\) does not divide the 3 ranks that share states; use one of 1, 3"
    ):
        plan_of({"zero_optimization": groups}, ranks=3)


def test_mics_is_checked() -> None:
    with pytest.raises(ValueError, match="does not divide the 4 ranks that share states; use one of 1, 2, 4"):
        plan_of({"zero_optimization": {"stage": 3, "mics_shard_size": 3}}, ranks=4)
    with pytest.raises(ValueError, match="but the stage is 1"):
        plan_of({"zero_optimization": {"stage": 1, "mics_shard_size": 2}}, ranks=4)


def test_gradients_of_deferred_weights_are_not_reduced_after_each_micro_batch() -> None:
    for schedule, refused in (("1f1b", False), ("gpipe", False), ("zero_bubble", True), ("v", True)):
        blocks = {"mesh": {"pp": 2}, "pipeline": {"schedule": schedule, "reduce": "micro_batch"}}
        with pytest.raises(ValueError, match=f"does not work with schedule {schedule}") if refused else nullcontext():
            plan_of({"slipstream": blocks})


def few_micro_batches(**pipeline: Any) -> str:
    """The note on a pipeline of four stages and four micro-batches; "" if there is none."""
    plan = plan_of({"gradient_accumulation_steps": 4, "slipstream": {"mesh": {"pp": 4}, "pipeline": pipeline}}, ranks=4)
    return next((note for note in plan.notes if "few micro-batches" in note), "")


def test_a_pipeline_that_idles_is_told_by_how_much() -> None:
    for pipeline, style, chunks in (({}, "1f1b", 1), ({"schedule": "gpipe"}, "gpipe", 1), ({"chunks": 2}, "interleaved", 2)):
        idle = simulate(4, 4, style, chunks).idle
        assert f"idle in about {idle:.0%} of a step. Take {16 // chunks} or more" in few_micro_batches(**pipeline), style
    for filled in ({"schedule": "v"}, {"schedule": "zero_bubble"}, {"chunks": 4}):
        assert not few_micro_batches(**filled)


# Optimizer and schedule


def test_optimizer_type() -> None:
    classes = set()
    for name in ("Adam", "sgd", "Adagrad", "LAMB"):
        plan = plan_of({"optimizer": {"type": name}})
        assert plan.optimizer is not None
        classes.add(resolve_optimizer(plan.optimizer.type, plan.optimizer.params).cls.__name__.lower())
    assert classes == {"adamw", "sgd", "adagrad", "lamb"}
    assert plan_of({}).optimizer is None


def test_optimizer_params() -> None:
    for rate in (1e-3, "1e-4"):
        plan = plan_of(adam(lr=rate, betas=[0.8, "0.99"], torch_adam="true", eps=None))
        assert plan.optimizer is not None
        assert plan.optimizer.params == {"lr": float(rate), "betas": (0.8, 0.99), "torch_adam": True}
        resolved = resolve_optimizer(plan.optimizer.type, plan.optimizer.params)
        assert resolved.kwargs["lr"] == float(rate)
    assert plan.sources["optimizer.params.lr"] == "config"


@pytest.mark.parametrize("norm", [[1], "abc", -1, float("nan"), True])
def test_max_grad_norm_is_a_number(norm: Any) -> None:
    with pytest.raises(ValueError, match=r"optimizer.params.max_grad_norm \(.*\) must be a number"):
        plan_of(adam(max_grad_norm=norm) | {"gradient_clipping": 0.3})


def test_max_grad_norm_is_gradient_clipping() -> None:
    plan = plan_of(adam(max_grad_norm=0.3))
    assert plan.gradient_clipping == 0.3
    assert plan.optimizer is not None and "max_grad_norm" not in plan.optimizer.params
    assert plan.sources["gradient_clipping"] == "derived: optimizer.params.max_grad_norm"
    assert plan_of(adam(max_grad_norm=0.3) | {"gradient_clipping": 0.3}).gradient_clipping == 0.3
    assert plan_of(adam(max_grad_norm=0.3) | {"gradient_clipping": "auto"}).gradient_clipping == 0.3
    assert plan_of(adam(max_grad_norm="auto")).gradient_clipping == 1.0
    assert plan_of(adam(max_grad_norm=0)).gradient_clipping == 0.0
    assert plan_of(adam(max_grad_norm=0) | {"gradient_clipping": 0.7}).gradient_clipping == 0.7
    with pytest.raises(ValueError, match=r"gradient_clipping \(1\) and optimizer\.params\.max_grad_norm \(0\.3\)"):
        plan_of(adam(max_grad_norm=0.3) | {"gradient_clipping": 1.0})


def test_scheduler_type() -> None:
    rates = []
    for name, params in (
        ("WarmupLR", {"warmup_num_steps": 10}),
        ("WarmupDecayLR", {"warmup_num_steps": 10, "total_num_steps": 12}),
    ):
        plan = plan_of({"scheduler": {"type": name, "params": params}})
        rates.append(last_rate(plan, steps=14))
    assert rates[0] != rates[1]


def test_scheduler_params() -> None:
    rates = [
        last_rate(plan_of({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": rate}}}), steps=1100)
        for rate in ("1e-2", 2e-2)
    ]
    assert rates == [1e-2, 2e-2]


def last_rate(plan: Plan, steps: int) -> float:
    assert plan.scheduler is not None
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    schedule = build_scheduler(plan.scheduler.type, plan.scheduler.params, optimizer)
    for _ in range(steps):
        optimizer.step()
        schedule.step()
    return float(optimizer.param_groups[0]["lr"])


# The rest


def test_deepspeeds_defaults() -> None:
    plan = plan_of({})
    assert plan.gradient_clipping == 1.0
    assert plan.batch.managed and plan.zero.stage == 0 and plan.zero.reduce_op == "mean"
    assert plan.steps_per_print is None and not plan.wall_clock_breakdown and not plan.drop_last
    assert plan.checkpoint.tag_validation == "warn" and plan.timeout_s == 1800.0


def test_small_values_reach_the_plan() -> None:
    plan = plan_of(
        {
            "steps_per_print": 10.0,
            "wall_clock_breakdown": True,
            "dump_state": True,
            "log_level": "DEBUG",
            "dataloader_drop_last": True,
            "managed_gradient_accumulation": False,
            "gradient_clipping": 0,
            "checkpoint": {"tag_validation": "Fail"},
            "slipstream": {"transport": "gloo", "timeout_s": "60", "poison_released": True, "seed": 7},
        }
    )
    assert plan.steps_per_print == 10 and plan.wall_clock_breakdown and plan.dump_state
    assert plan.log_level == "debug" and plan.drop_last and not plan.batch.managed
    assert plan.gradient_clipping == 0.0 and plan.checkpoint.tag_validation == "fail"
    assert plan.zero.transport == "gloo" and plan.timeout_s == 60.0 and plan.poison_released
    assert plan.seed == 7


def test_an_engine_without_an_optimizer_offloads_at_every_stage() -> None:
    raw = {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}
    for none in ({}, {"optimizer": None}, {"optimizer": {"type": None}}):
        assert for_inference(raw | none)["zero_optimization.stage"] == 3
    assert for_inference(raw | {"optimizer": {"type": "Adam"}}) == for_inference({}) == {}


def test_overrides_win_and_say_so() -> None:
    raw = {"train_batch_size": 8, "zero_optimization": True, "bf16": {"enabled": True}}
    plan = plan_of(raw, **{"zero_optimization.stage": 3, "slipstream.transport": "gloo", "train_batch_size": 16})
    assert (plan.zero.stage, plan.zero.transport, plan.batch.train_batch_size) == (3, "gloo", 16)
    assert plan.sources["zero_optimization.stage"] == plan.sources["train_batch_size"] == "argument"
    assert plan.sources["bf16.enabled"] == "config"
    assert raw["zero_optimization"] is True
    assert plan_of(raw, **{"zero_optimization.overlap_comm": False}).zero.stage == 1


def test_a_plan_is_plain_data() -> None:
    plan = plan_of(ACCELERATE)
    assert pickle.loads(pickle.dumps(plan)) == plan == plan_of(ACCELERATE)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.gradient_clipping = 0.0  # type: ignore[misc]


def test_a_plan_of_what_accelerate_hands_over() -> None:
    plan = plan_of(ACCELERATE)
    assert plan.batch == type(plan.batch)(train_batch_size=16, micro_batch_size=8, accumulation=1, managed=True, elastic=False)
    assert plan.zero.stage == 3 and plan.steps_per_print is None
    assert plan.precision.param_dtype is torch.bfloat16 and not plan.precision.auto_cast_inputs
    assert plan.optimizer is not None and plan.optimizer.params == {"lr": 1e-3, "weight_decay": 0.0}


CUDA = dataclasses.replace(FACTS, device_type="cuda")


def activations(block: dict[str, Any], choice: str | None = None, facts: ModelFacts = CUDA) -> Plan:
    return plan_of({"activation_checkpointing": block} | ({"slipstream": {"activations": choice}} if choice else {}), facts=facts)


def test_activations_follow_either_block() -> None:
    for block, choice, way, on_host in (
        ({}, None, "keep", False),
        ({"cpu_checkpointing": False, "number_checkpoints": None}, None, "keep", False),
        ({"number_checkpoints": 2}, None, "recompute", False),
        ({"cpu_checkpointing": True}, None, "recompute", True),
        ({}, "recompute", "recompute", False),
        ({"cpu_checkpointing": True}, "recompute", "recompute", True),
        ({}, "offload", "offload", False),
        ({"number_checkpoints": 2}, "auto", "recompute", False),
    ):
        plan = activations(block, choice)
        assert (plan.activations.way, plan.activations.inputs_on_host) == (way, on_host) and plan.notes == ()
    assert activations({"number_checkpoints": 2}).sources["slipstream.activations"] == "derived: activation_checkpointing"


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_on_a_gpu_the_optimizer_steps_where_weights_are_offloaded(device: str) -> None:
    zero = {"stage": 3, "offload_param": {"device": device, "nvme_path": "/disk"}}
    offload = [plan_of({"zero_optimization": zero}, facts=facts).offload for facts in (FACTS, CUDA)]
    assert [(each.param, each.optimizer) for each in offload] == [(device, "none"), (device, "cpu")]


@pytest.mark.parametrize("choice", ["keep", "offload"])
def test_activations_that_contradict_each_other(choice: str) -> None:
    with pytest.raises(ValueError, match=rf"activations is '{choice}', but .*_checkpoints \(2\) and .*cpu_checkpointing \(true\)"):
        activations({"number_checkpoints": 2, "cpu_checkpointing": True}, choice)


def test_activations_where_the_device_is_the_host() -> None:
    plan = activations({"cpu_checkpointing": True}, facts=FACTS)
    assert plan.activations.way == "recompute" and not plan.activations.inputs_on_host
    (note,) = plan.notes
    assert note.startswith("activation_checkpointing.cpu_checkpointing has no effect")
    plan = activations({}, "offload", facts=FACTS)
    assert plan.activations.way == "keep" and len(plan.notes) == 1
    assert len(activations({"profile": True, "synchronize_checkpoint_boundary": True}).notes) == 2, "nothing is recomputed"


def test_chunks_are_told_as_they_are() -> None:
    for size, logged in ((10**9, 1 << 21), (4096, 4096)):
        block = {"stage": 1, "sub_group_size": size, "offload_optimizer": {"device": "nvme", "nvme_path": "/disk"}}
        assert plan_values(plan_of({"zero_optimization": block}))["zero_optimization.sub_group_size"] == logged


FULL = {
    "train_batch_size": 8,
    "fp16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/disk"},
        "offload_param": {"device": "nvme", "nvme_path": "/disk"},
        "zero_quantized_gradients": True,
        "zeropp_loco_param": {"err_beta": 0.5},
    },
    "sparse_attention": {"mode": "fixed"},
    "progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.01},
    "flops_profiler": {"enabled": True},
    "comms_logger": {"enabled": True},
    "slipstream": {"local_steps": {"every": 8}, "trace": {"steps": [1, 2]}},
}
ADAPTIVE = {"train_batch_size": 8, "slipstream": {"adaptive_batch": {}}}  # not with local steps


TRAINED = {key for key in HONORED if not key.startswith("autotuning.")}  # the others are read by `slipstream tune` alone

# Honored keys without a field of their own in the plan.
CHECKED = {"data_parallel_size", "sequence_parallel_size", "pipeline.stages", "slipstream.unknown_keys"}
OLDER = {"zero_optimization.cpu_offload", "zero_optimization.cpu_offload_param", "compile.disable"}
# Blocks that the plan has as they are.
BLOCKS = ("comms_logger", "compile", "flops_profiler", "hybrid_engine", "progressive_layer_drop", "sparse_attention")
BLOCKS += ("slipstream.local_steps", "slipstream.trace")


def test_every_honored_key_is_in_the_plan() -> None:
    sections = [Plan, *(kind for kind in vars(plans).values() if isinstance(kind, type) and kind.__name__.endswith("Plan"))]
    names = {json.name.removesuffix(".*") for section in sections for keys in json_keys(section).values() for json in keys}
    names -= {"*", "curriculum_learning", "data_efficiency", "slipstream.monitors", "weight_quantization"}  # blocks as they are
    assert names >= {*BLOCKS}
    names = {key for key in TRAINED - OLDER for block in BLOCKS if key.startswith(f"{block}.")} | names - {*BLOCKS}
    assert names | CHECKED | OLDER == TRAINED and not names & (CHECKED | OLDER)


def test_describe_shows_the_blocks_of_enabled_features() -> None:
    sections = {each.name for each in dataclasses.fields(Plan) if "Plan" in str(each.type)}
    without = {name for name, keys in json_keys(Plan).items() if not keys} - sections
    assert without == {"idle", "notes", "sources"}  # a new field is shown, too
    schedule = {"total_curriculum_step": 10, "difficulty_step": 8}
    quantized = {"shared_parameters": {"enabled": True}, "different_groups": {"a": {"params": {"start_bits": 8, "target_bits": 4}}}}
    raw = {
        "curriculum_learning": {"enabled": True, "min_difficulty": 8, "max_difficulty": 64, "schedule_config": schedule},
        "csv_monitor": {"enabled": True, "output_path": "x"},
        "wandb": {"enabled": False, "team": "t"},
        "compression_training": {"weight_quantization": quantized, "row_pruning": {"shared_parameters": {"method": "topk"}}},
    }
    shown = {words[0]: words[1] for line in describe(plan_of(raw)).splitlines() if len(words := line.split()) > 1}
    assert shown["curriculum_learning.schedule_config.total_curriculum_step"] == "10"
    assert (
        shown["curriculum_learning.enabled"] == shown["csv_monitor.enabled"] == "true" and shown["csv_monitor.output_path"] == "x"
    )
    assert shown["compression_training.weight_quantization.different_groups.a.params.target_bits"] == "4"
    assert not any("row_pruning" in name or "wandb" in name for name in shown)


@pytest.mark.parametrize(
    ("raw", "key", "value", "source"),
    [
        ({"pipeline": {"stages": 2}}, "slipstream.mesh.pp", "2", "derived: pipeline.stages"),
        ({"sequence_parallel_size": 2}, "slipstream.mesh.sp", "2", "derived: sequence_parallel_size"),
        ({"tensor_parallel": {"autotp_size": 2}}, "slipstream.mesh.tp", "2", "derived: tensor_parallel.autotp_size"),
        ({"slipstream": {"mesh": {"tp": 2}}}, "slipstream.mesh.tp", "2", "config"),
        (
            {"zero_optimization": {"stage": 2, "cpu_offload": True}},
            "zero_optimization.offload_optimizer.device",
            "cpu",
            "derived: zero_optimization.cpu_offload",
        ),
        ({"compile": {"disable": False}}, "compile.enabled", "true", "derived: compile.disable"),
        (
            {"data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": True}, "num_workers": 2}}},
            "data_efficiency.data_sampling.num_workers",
            "2",
            "config",
        ),
        (
            {"data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": True, "curriculum_metrics": {"a": {}}}}}},
            "data_efficiency.data_sampling.curriculum_learning.enabled",
            "true",
            "config",
        ),
    ],
)
def test_describe_shows_what_is_set_in_another_form(raw: dict[str, Any], key: str, value: str, source: str) -> None:
    rows = [line.split(maxsplit=2) for line in describe(plan_of(raw)).splitlines()]
    assert [key, value, source] in rows


def test_every_honored_key_has_a_source() -> None:
    assert {*plan_of(FULL).sources, *plan_of(ADAPTIVE).sources} >= set(HONORED)


@pytest.mark.parametrize("raw", [FULL, ACCELERATE, {"bf16": {"enabled": True}}], ids=["full", "accelerate", "bf16"])
def test_describe_shows_every_value_with_its_source(raw: dict[str, Any]) -> None:
    plan = plan_of(raw)
    lines = describe(plan, defaults=True).splitlines()
    assert lines[0].split() == ["key", "value", "source"]
    for key in plan_values(plan):
        assert key in plan.sources, key
        (line,) = [line for line in lines if line.split()[0] == key]
        assert line.endswith(plan.sources[key])
    notes = [f"note: {note}" for note in (*sentences(plan.idle), *plan.notes)]
    assert [line for line in lines if line.startswith("note: ")] == notes


def test_describe_begins_with_what_the_config_sets() -> None:
    plan = plan_of({"steps_per_print": 10, "zero_optimization": {"stage": 2}, "train_batch_size": 8})
    rows = [line.split()[0] for line in describe(plan).splitlines()[2:]]
    assert rows[:3] == ["train_batch_size", "zero_optimization.stage", "steps_per_print"]
    assert "gradient_clipping" in rows and len(rows) < 10, "what has an effect without being set, and not all defaults"
    everything = describe(plan, defaults=True).splitlines()
    hidden = len(everything) - 2 - len(rows[:-1])
    assert f"and {hidden} keys at their defaults" in describe(plan)


def test_the_default_of_clipping_is_told() -> None:
    assert re.search(r"^gradient_clipping +1 +default: DeepSpeed's; .* 0 disables clipping$", describe(plan_of({})), re.MULTILINE)
    assert plan_of({"gradient_clipping": 1.0}).sources["gradient_clipping"] == "config"


def test_values_that_a_dtype_switches_off_say_so() -> None:
    plan = plan_of({"fp16": {"enabled": False, "auto_cast": True}, "bf16": {"enabled": True}})
    assert plan.sources["fp16.auto_cast"] == "derived: the weights are not fp16"
    assert plan.sources["fp16.enabled"] == "config"


def test_the_plan_prints_numbers_as_people_write_them() -> None:
    text = describe(plan_of(adam(lr=1e-4) | {"steps_per_print": math.inf}))
    assert "0.0001" in text and "train_batch_size" in text


# What other configurations ask for


def test_compile_disable() -> None:
    """DeepSpeed's older form is on by `disable` alone; `enabled` decides where it is given; nothing is on by itself."""
    on = {"backend": "eager", "kwargs": {"dynamic": True}}
    for block in ({"enabled": True}, {"disable": False}, {"enabled": True, "disable": False}):
        plan = plan_of({"compile": on | block})
        assert plan.compile is not None and (plan.compile.backend, plan.compile.kwargs) == ("eager", {"dynamic": True})
    for block in ({"enabled": False}, {"disable": True}, {"enabled": True, "disable": True}, {"enabled": False, "disable": False}):
        plan = plan_of({"compile": on | block})
        assert plan.compile is None and plan.notes == ()
    (note,) = plan_of({"compile": on}).notes
    assert "compile.enabled is not set" in note
    assert plan_of({}).compile is None


def test_compile_is_checked_before_anything_runs() -> None:
    def check(**block: Any) -> None:
        compiled.check(plan_of({"compile": {"enabled": True, **block}}).compile)

    check(backend="eager", kwargs={"fullgraph": True})
    with pytest.raises(
        ValueError, match=r"compile\.backend 'no_such' is neither a backend of torch\.compile .* use one of .*inductor"
    ):
        check(backend="no_such")
    with pytest.raises(ValueError, match=r"compile\.kwargs \{'speed': 1\}.* it supports mode, dynamic, fullgraph and options"):
        check(backend="eager", kwargs={"speed": 1})


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("block", [{"offload_param": {"device": "nvme"}}, {"cpu_offload_param": True}], ids=["nvme", "older"])
def test_offload_param_below_stage_3_has_no_effect_and_is_said(stage: int, block: dict[str, Any]) -> None:
    plan = plan_of({"zero_optimization": {"stage": stage, **block}})
    (note,) = plan.notes
    assert "offload_param" in note and f"no effect here: at stage {stage} every rank keeps all weights on its device" in note
    assert dataclasses.replace(plan, notes=(), sources={}) == dataclasses.replace(
        plan_of({"zero_optimization": {"stage": stage}}), notes=(), sources={}
    )


AHEAD = dataclasses.replace(FACTS, ahead=True)


def test_what_the_loop_fills_in_does_not_stop_a_plan() -> None:
    for params, path in (
        ({"total_num_steps": "auto", "warmup_max_lr": 1e-3}, "scheduler.params.total_num_steps"),
        ({"total_num_steps": 9, "warmup_max_lr": "auto"}, "scheduler.params.warmup_max_lr"),
    ):
        raw: dict[str, Any] = {"train_batch_size": 8, "scheduler": {"type": "WarmupDecayLR", "params": params}}
        if "lr" not in path:
            raw |= adam(lr=1e-3)
        plan = plan_of(raw, facts=AHEAD)
        assert re.search(rf"^{path} +- +auto: set by the training loop$", describe(plan), re.MULTILINE)
        rehearse(plan)
        with pytest.raises(ValueError, match=r'is "auto", and .*; set (a|the) number'):
            plan_of(raw)
        plan_of(raw, facts=dataclasses.replace(FACTS, brings_schedule=True))
        raw["scheduler"]["params"]["warmup_steps"] = 1
        with pytest.raises(ValueError, match=r"unknown 'warmup_steps'"):
            rehearse(plan_of(raw, facts=AHEAD))


def test_a_plan_without_batch_sizes_takes_one() -> None:
    world = DataWorld(ranks=2)
    plan = resolve({}, world=world, facts=AHEAD)
    assert plan.batch.micro_batch_size == 1 and plan.batch.train_batch_size == 2
    assert "no batch size is set: planned with a micro-batch of 1; initialize needs" in plan.notes[0]
    assert resolve({}, world=world, facts=dataclasses.replace(AHEAD, loader_batch_size=4)).batch.micro_batch_size == 4
    with pytest.raises(ValueError, match="give one of them"):
        resolve({}, world=world, facts=FACTS)


def test_comments_among_the_arguments_of_an_optimizer() -> None:
    plan = plan_of(adam(lr=1e-3, _comment="small"))
    assert plan.optimizer is not None and plan.optimizer.params == {"lr": 1e-3}


# Random configs: a plan that holds together, or a ValueError that says why

flags = st.booleans()
dtypes = st.sampled_from(["fp32", "fp16", "bf16", "torch.float16", "half"])
names = st.sampled_from(
    ["Adam", "AdamW", "SGD", "Lion", "Lamb", "Muon", "Adagrad", "Adafactor", "RMSprop", "OneBitAdam", "OneBitLamb", "ZeroOneAdam"]
)
schedules = st.sampled_from(["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest", "StepLR"])
rates = st.floats(0, 1) | st.sampled_from(["1e-3", "auto"])
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "train_batch_size": st.sampled_from([12, 24, 48]),
    "train_micro_batch_size_per_gpu": st.sampled_from([1, 2.0, "2"]),
    "gradient_accumulation_steps": st.sampled_from([1, 2]),
    "managed_gradient_accumulation": flags,
    "data_parallel_size": st.sampled_from([2, 4]),
    "optimizer.type": names,
    "optimizer.params": st.fixed_dictionaries(
        {}, optional={"lr": rates, "weight_decay": rates, "betas": st.just([0.9, "0.95"]), "max_grad_norm": st.floats(0, 2)}
    ),
    "scheduler.type": schedules,
    "scheduler.params": st.fixed_dictionaries(
        {}, optional={"warmup_max_lr": rates, "warmup_num_steps": rates | st.integers(1, 9), "total_num_steps": st.integers(1, 99)}
    ),
    "gradient_clipping": st.floats(0, 10) | st.just("1"),
    "communication_data_type": dtypes | st.sampled_from([None, "int8", "INT4"]),
    "sparse_gradients": flags,
    "gradient_allreduce_op": st.sampled_from(["mean", "sum", "SUM"]),
    "fp16.enabled": flags,
    "fp16.auto_cast": flags,
    "fp16.loss_scale": st.sampled_from([0, 1, 128, 0.5]),
    "fp16.initial_scale_power": st.integers(0, 64),
    "fp16.loss_scale_window": st.integers(1, 2000),
    "fp16.hysteresis": st.integers(1, 4),
    "fp16.consecutive_hysteresis": flags,
    "fp16.min_loss_scale": st.sampled_from([1, 2.0, 2**20]),
    "fp16.fp16_master_weights_and_grads": flags,
    "bf16.enabled": flags,
    "bf16.check_grad_overflow": flags,
    "bf16.bf16_master_weights_and_grads": flags,
    "bf16.bf16_optimizer_states": flags,
    "torch_autocast.enabled": flags,
    "torch_autocast.dtype": dtypes,
    "data_types.grad_accum_dtype": dtypes,
    "data_types.param_dtype": dtypes,
    "data_types.buffer_dtype": dtypes,
    "data_types.keep_in_fp32_modules": st.sampled_from(["auto", [], ["e_score*"]]),
    "zero_optimization.ignore_unused_parameters": st.booleans(),
    "zero_optimization.enable_sanity_checks": st.booleans(),
    **{f"zero_optimization.leaf_module.{rule}": st.sampled_from(["Router", []]) for rule in LEAF_RULES},
    "zero_optimization.stage": st.integers(0, 3),
    "zero_optimization.zero_quantized_weights": flags,
    "zero_optimization.zero_quantized_nontrainable_weights": flags,
    "zero_optimization.zero_quantized_gradients": flags,
    "zero_optimization.zeropp_loco_param.err_beta": st.floats(0, 1),
    "zero_optimization.zeropp_loco_param.reset_T": st.sampled_from([0, 1, 1024]),
    "slipstream.local_steps.every": st.sampled_from([0, 1, 64]),
    "slipstream.local_steps.outer_lr": st.sampled_from([0, 0.7]),
    "slipstream.local_steps.outer_momentum": st.floats(0, 1),
    "slipstream.local_steps.exchange": st.sampled_from(["fp32", "bf16", "int8", "int4", "int2"]),
    "slipstream.local_steps.overlap": st.integers(0, 2),
    "zero_optimization.mics_shard_size": st.sampled_from([-1, 1, 2, 3]),
    "zero_optimization.zero_hpz_partition_size": st.sampled_from([0, 1, 2, 3]),
    "zero_optimization.offload_optimizer.device": st.sampled_from(["none", "cpu", "NVMe"]),
    "zero_optimization.offload_optimizer.nvme_path": st.sampled_from(["/disk", None]),
    "zero_optimization.offload_optimizer.ratio": st.floats(0, 1),
    "zero_optimization.offload_optimizer.buffer_count": st.integers(0, 5),
    "zero_optimization.offload_param.device": st.sampled_from(["none", "cpu", "nvme"]),
    "zero_optimization.offload_param.nvme_path": st.sampled_from(["/disk", None]),
    "zero_optimization.offload_param.max_in_cpu": st.sampled_from([0, 1e9]),
    "zero_optimization.sub_group_size": st.sampled_from([1, 1e9]),
    "zero_optimization.cpu_offload": flags,
    "zero_optimization.cpu_offload_param": flags,
    "aio.block_size": st.sampled_from([1 << 20, 1000]),
    "aio.queue_depth": st.integers(0, 32),
    "aio.intra_op_parallelism": st.integers(1, 4),
    "steps_per_print": st.sampled_from([0, 10, math.inf, "inf"]),
    "wall_clock_breakdown": flags,
    "memory_breakdown": flags,
    "timers.throughput.enabled": flags,
    "slipstream.trace.steps": st.sampled_from([[2, 4], [4, 4], [1]]),
    "slipstream.trace.folder": st.just("trace"),
    "flops_profiler.enabled": flags,
    "flops_profiler.profile_step": st.integers(0, 9),
    "flops_profiler.module_depth": st.integers(-1, 3),
    "flops_profiler.top_modules": st.integers(0, 3),
    "flops_profiler.detailed": flags,
    "flops_profiler.output_file": st.none() | st.just("profile"),
    "comms_logger.enabled": flags,
    "comms_logger.prof_all": flags,
    "comms_logger.prof_ops": st.sampled_from([[], ["all_reduce"]]),
    "comms_logger.verbose": flags,
    "dump_state": flags,
    "log_level": st.sampled_from(["info", "ERROR", None]),
    "dataloader_drop_last": flags,
    "checkpoint.tag_validation": st.sampled_from(["Warn", "ignore", "Fail"]),
    "activation_checkpointing.number_checkpoints": st.integers(0, 9) | st.none(),
    "activation_checkpointing.cpu_checkpointing": flags,
    "activation_checkpointing.synchronize_checkpoint_boundary": flags,
    "activation_checkpointing.profile": flags,
    "progressive_layer_drop.enabled": flags,
    "progressive_layer_drop.theta": st.floats(0, 1),
    "progressive_layer_drop.gamma": st.sampled_from([1e-3, 1]),
    "sparse_attention.mode": st.sampled_from(["Fixed", "variable", "bigbird", "bslongformer", "dense"]),
    "sparse_attention.block": st.sampled_from([16, 64]),
    "sparse_attention.different_layout_per_head": flags,
    "sparse_attention.num_local_blocks": st.integers(1, 9),
    "sparse_attention.num_global_blocks": st.integers(0, 3),
    "sparse_attention.attention": st.sampled_from(["unidirectional", "Bidirectional"]),
    "sparse_attention.horizontal_global_attention": flags,
    "sparse_attention.num_different_global_patterns": st.integers(1, 4),
    "sparse_attention.num_random_blocks": st.integers(0, 3),
    "sparse_attention.local_window_blocks": st.just([1, 2]),
    "sparse_attention.global_block_indices": st.just([0, 3]),
    "sparse_attention.global_block_end_indices": st.none() | st.just([1, 5]),
    "sparse_attention.num_sliding_window_blocks": st.integers(1, 5),
    "compile.enabled": flags,
    "compile.disable": flags,
    "compile.backend": st.sampled_from(["eager", "inductor"]),
    "compile.kwargs": st.just({"dynamic": False}),
    "slipstream.unknown_keys": st.sampled_from(["error", "Warn"]),
    "slipstream.pipeline.schedule": st.sampled_from(["1f1b", "gpipe", "Zero_Bubble"]),
    "slipstream.pipeline.chunks": st.integers(1, 3),
    "pipeline.partition": st.sampled_from(["parameters", "Uniform", "type:Block", "profile"]),
    "slipstream.pipeline.reduce": st.sampled_from(["step", "Micro_Batch"]),
    "pipeline.stages": st.sampled_from(["auto", 1, 2]),
    "pipeline.activation_checkpoint_interval": st.integers(0, 3),
    "pipeline.pipe_partitioned": st.booleans(),
    "pipeline.grad_partitioned": st.booleans(),
    "slipstream.mesh.pp": st.sampled_from([1, 2]),
    "slipstream.mesh.sp": st.sampled_from([1, 2]),
    "slipstream.mesh.tp": st.sampled_from([1, 2]),
    "sequence_parallel_size": st.sampled_from([1, 2]),
    "tensor_parallel.autotp_size": st.sampled_from([0, 1, 2]),
    "tensor_parallel.tp.tp_size": st.sampled_from([1, 2]),
    "tensor_parallel.tp_overlap_comm": flags,
    "tensor_parallel.preset_model": st.sampled_from(["llama", None]),
    "tensor_parallel.partition_config": st.just({"layer_specs": [{"patterns": ["a"]}]}),
    "tensor_parallel.vocab_parallel_lm_head": flags | st.none(),
    "slipstream.tensor.sequence_parallel": flags,
    "expert_parallel.enabled": flags,
    "expert_parallel.autoep_size": st.sampled_from([1, 2]),
    "expert_parallel.preset_model": st.sampled_from(["mixtral", None]),
    "expert_parallel.top_k": st.sampled_from(["auto", 1, 2]),
    "expert_parallel.route_norm": flags | st.none(),
    "expert_parallel.route_scale": st.sampled_from([1.0, 2.5]),
    "expert_parallel.routed_scaling_factor": st.sampled_from(["auto", 2.5]),
    "expert_parallel.num_expert_groups": st.sampled_from([2, 4]) | st.none(),
    "expert_parallel.num_limited_groups": st.sampled_from([1, 2]) | st.none(),
    "expert_parallel.score_func": st.sampled_from(["auto", "softmax", "sigmoid"]),
    "expert_parallel.score_apply": st.sampled_from(["auto", "post"]),
    "expert_parallel.expert_activation": st.just("silu") | st.none(),
    "expert_parallel.moe_layer_pattern": st.just("mlp") | st.none(),
    "expert_parallel.expert_pattern": st.just("experts") | st.none(),
    "slipstream.rest_unused_experts": flags,
    "expert_parallel.load_balance_coeff": st.just(1e-3) | st.none(),
    "slipstream.activations": st.sampled_from(["keep", "recompute", "Offload"]),
    "slipstream.seed": st.integers(0, 2**63),
    "slipstream.optimizer_states": st.sampled_from(["default", "INT8"]),
    "slipstream.stochastic_rounding": flags,
    "slipstream.check_grad_overflow": flags,
    "slipstream.keep_checkpoints": st.integers(1, 9) | st.none(),
    "slipstream.checkpoint.folder": st.none() | st.just("ck"),
    "slipstream.checkpoint.every_steps": st.integers(0, 9),
    "slipstream.checkpoint.every_minutes": st.floats(0, 9),
    "slipstream.checkpoint.on_signal": st.sampled_from([[], "SIGTERM", ["SIGUSR1", "SIGKILL"]]),
    "slipstream.checkpoint.resume": flags,
    "slipstream.checkpoint.memory_every_steps": st.integers(0, 2),
    "slipstream.broadcast_buffers": flags,
    "slipstream.fused_layers": flags,
    "slipstream.products": st.sampled_from(["fastest", "torch"]),
    "slipstream.noise_scale_every": st.integers(0, 9),
    "slipstream.elastic_batch": flags,
    "slipstream.adaptive_batch.max_batch_size": st.none() | st.integers(1, 99),
    "slipstream.adaptive_batch.min_batch_size": st.none() | st.integers(1, 9),
    "slipstream.adaptive_batch.every": st.integers(1, 9),
    "slipstream.adaptive_batch.ratio": st.floats(0.1, 9),
    "slipstream.adaptive_batch.smoothing": st.floats(0, 1),
    "slipstream.adaptive_batch.scale_lr": st.sampled_from(["none", "Sqrt", "linear"]),
    "hybrid_engine.enabled": flags,
    "hybrid_engine.max_out_tokens": st.integers(1, 999),
    "hybrid_engine.release_inference_cache": flags,
    "checkpoint.load_universal": flags,
    "checkpoint.use_node_local_storage": flags,
    "checkpoint.writer.decoupled": flags,
    "datastates_ckpt": st.sampled_from([False, {}, {"host_cache_size": 16}]),
    "slipstream.transport": st.sampled_from(["auto", "shared", "gloo"]),
    "slipstream.timeout_s": st.floats(1e-3, 1e6) | st.just(math.inf),
    "slipstream.poison_released": flags,
}
NOISE = st.recursive(
    st.none() | flags | st.integers() | st.floats() | st.text(max_size=4) | st.just("auto"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
FREE = {"optimizer.params", "scheduler.params"}  # theirs to check who take them: an optimizer, a schedule


def test_random_configs_draw_every_honored_key() -> None:
    assert set(VALUES) == TRAINED


@given(data=st.data(), ranks=st.sampled_from([1, 2, 4]), noise=st.sampled_from([False, False, False, True]))
def test_a_random_config_is_a_plan_or_a_reason(data: st.DataObject, ranks: int, noise: bool) -> None:
    chosen = data.draw(st.lists(st.sampled_from(sorted(VALUES)), unique=True, max_size=8))
    chosen += [data.draw(st.sampled_from(["train_batch_size", "train_micro_batch_size_per_gpu"]))]
    chosen += [f"{path.split('.')[0]}.type" for path in FREE if path in chosen]
    wrong = data.draw(st.sampled_from([path for path in chosen if path not in FREE])) if noise else None
    raw: dict[str, Any] = {}
    for path in dict.fromkeys(chosen):
        *blocks, name = path.split(".")
        below = raw
        for block in blocks:
            below = below.setdefault(block, {})
        auto = not path.endswith((".type", ".params")) and data.draw(st.integers(0, 7)) == 5
        below[name] = "auto" if auto else data.draw(NOISE if path == wrong else VALUES[path])
    before = repr(raw)
    facts = data.draw(st.sampled_from([FACTS, V100]))
    try:
        plan = resolve(raw, world=DataWorld(ranks=ranks), facts=facts)
    except ValueError as error:
        assert len(str(error)) > 20, error
        return
    finally:
        assert repr(raw) == before, "the user's dictionary is theirs"
    batch, precision = plan.batch, plan.precision
    assert batch.train_batch_size * plan.mesh.model_size == batch.micro_batch_size * batch.accumulation * ranks
    assert min(batch.micro_batch_size, batch.accumulation) >= 1
    for name, value in (("train_batch_size", batch.train_batch_size), ("gradient_accumulation_steps", batch.accumulation)):
        if raw.get(name, "auto") not in ("auto", None) and name != wrong:
            assert value == int(raw[name])
    assert (precision.loss_scale is None) == (torch.float16 not in (precision.param_dtype, precision.autocast_dtype))
    assert plan.zero.shard_size is None or (ranks % plan.zero.shard_size == 0 and plan.zero.stage == 3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.seed = 1  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert "auto" not in [value for key, value in plan_values(plan).items() if key != "slipstream.transport"]
    assert describe(plan, defaults=True)

"""Pairs over the axes of settings: each row of the tables refuses some pair with its text, and a pair without a row is accepted."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations, product
from typing import Any
from unittest import mock

import pytest
import torch

from slipstream.config import DataWorld, ModelFacts, Plan, resolve
from slipstream.config.parse import parse
from slipstream.config.refusals import NO_EFFECT, REFUSALS, Case, matching
from slipstream.config.resolution import Values, case_of
from slipstream.optim import fit, resolve_optimizer, rule_of
from slipstream.optim.rules import Rule
from slipstream.train.recipe import rehearse
from slipstream.zero.leaves import mark_part, mark_stack
from tests import cases

Config = dict[str, Any]  # by dotted key
DEVICES = {
    "a CPU": ModelFacts(device_type="cpu", supports_bf16=True),
    "CUDA": ModelFacts(device_type="cuda", supports_bf16=True),
    "CUDA without bf16": ModelFacts(device_type="cuda", supports_bf16=False),
}
WORLD = DataWorld(ranks=16)
ELASTICITY = {"elasticity.enabled": True, "elasticity.max_train_batch_size": 64, "elasticity.micro_batch_sizes": [1]}
ELASTICITY |= {"slipstream.elastic_batch": True}  # not with each other setting: it needs an order of its own
PER_HOST = {"checkpoint.use_node_local_storage": True}


def disk(states: str, **others: Any) -> Config:
    block = {"device": "nvme", "nvme_path": tempfile.gettempdir(), **others}
    return {f"zero_optimization.offload_{states}.{key}": value for key, value in block.items()}


def efficient(**parts: str) -> Config:
    """A part of data_efficiency, with the switches around it."""
    (block, part), *_ = parts.items()
    return {f"data_efficiency.{name}enabled": True for name in ("", f"{block}.", f"{block}.{part}.")}


def half(name: str, **others: Any) -> Config:
    return {f"{name}.{key}": value for key, value in {"enabled": True, **others}.items()}


# Axes of the plan. A value is a config by dotted key; "device" chooses the facts, "hosts" the world.
PLANS: Mapping[str, tuple[Config, ...]] = {
    "device": tuple({"device": device} for device in DEVICES),
    "mesh": (
        {},
        {"slipstream.mesh.pp": 2, "slipstream.mesh.tp": 2},
        {"slipstream.mesh.tp": 2, "slipstream.tensor.sequence_parallel": True},
        {"slipstream.mesh.sp": 2, "sequence_parallel_size": 4},
        *({f"slipstream.mesh.{axis}": 2} for axis in ("pp", "sp", "tp")),
        {"expert_parallel.enabled": True, "expert_parallel.autoep_size": 8},
        {"expert_parallel.enabled": True, "expert_parallel.autoep_size": 2, "slipstream.mesh.sp": 2},
        {"pipeline.stages": 2, "slipstream.pipeline.schedule": "zero_bubble", "slipstream.pipeline.reduce": "micro_batch"},
        {"pipeline.stages": 2, "slipstream.mesh.tp": 2, "pipeline.partition": "profile"},
        {"pipeline.stages": 2, "slipstream.pipeline.schedule": "gpipe", "slipstream.pipeline.chunks": 2},
    ),
    "weights": (
        {},
        half("fp16"),
        half("bf16"),
        half("fp16", loss_scale=128),
        half("fp16", initial_scale_power=2, min_loss_scale=8),
        half("bf16", bf16_master_weights_and_grads=True, bf16_optimizer_states=True),
    ),
    "another dtype": (
        {},
        half("bf16"),
        *({"data_types.param_dtype": dtype} for dtype in ("fp32", "fp16", "bf16")),
        half("torch_autocast", dtype="fp16"),
        {"slipstream.check_grad_overflow": False},
    ),
    "rounding": ({}, {"slipstream.stochastic_rounding": True}),
    "states": ({}, {"slipstream.optimizer_states": "int8"}),
    "stage": tuple({"zero_optimization.stage": stage} for stage in range(4)),
    "groups": (
        {},
        {"zero_optimization.mics_shard_size": 2},
        {"zero_optimization.mics_shard_size": 3},
        {"zero_optimization.mics_shard_size": 8},
        {"zero_optimization.mics_shard_size": 16},
        {"zero_optimization.zero_hpz_partition_size": 2},
        {"zero_optimization.zero_hpz_partition_size": 3},
        {"zero_optimization.zero_hpz_partition_size": 16},
    ),
    "optimizer states": (
        {},
        {"zero_optimization.cpu_offload": True},
        {"zero_optimization.offload_optimizer.device": "cpu", "zero_optimization.offload_optimizer.ratio": 0.5},
        {"zero_optimization.offload_optimizer.device": "cpu", "zero_optimization.offload_optimizer.buffer_count": 1},
        disk("optimizer"),
        disk("optimizer", nvme_path=None),
        disk("optimizer", ratio=0.5),
    ),
    "weights' home": (
        {},
        {"zero_optimization.offload_param.device": "cpu"},
        disk("param"),
        disk("param", max_in_cpu=0),
        disk("param", nvme_path=None),
    ),
    "disk": ({}, {"aio.block_size": 1000}, {"aio.block_size": 0}, {"aio.queue_depth": 0}),
    "wire": (
        {},
        {"communication_data_type": "int8", "zero_optimization.zeropp_loco_param.err_beta": 0.5},
        {"zero_optimization.zero_quantized_gradients": True, "communication_data_type": "fp16"},
        {"zero_optimization.zero_quantized_nontrainable_weights": True},
        {"zero_optimization.zero_quantized_weights": True, "zero_optimization.zeropp_loco_param.err_beta": 0.5},
    ),
    "rows": ({}, {"sparse_gradients": True}),
    "saves": (
        {},
        {"slipstream.checkpoint.folder": "ck"},
        {"slipstream.checkpoint.every_steps": 1},
        {"slipstream.checkpoint.on_signal": "SIGKILL"},
    ),
    "replicas": ({}, {"slipstream.local_steps.every": 4}),
    "compression": ({}, {"quantize_training.enabled": True}),
    "curvature": (
        {},
        {"eigenvalue.enabled": True},
        {"eigenvalue.enabled": True, "quantize_training.eigenvalue.enabled": True, "eigenvalue.max_iter": 9},
    ),
    "curriculum": ({}, {"curriculum_learning.enabled": True}),
    "data efficiency": (
        {},
        {"data_efficiency.data_routing.random_ltd.enabled": True},
        {"data_efficiency.data_sampling.curriculum_learning.enabled": True},
        {"data_efficiency.data_sampling.dynamic_batching.enabled": True},
        *(
            {"data_efficiency.enabled": False, f"data_efficiency.{block}.enabled": False, f"data_efficiency.{block}.{part}": True}
            for block, part in (
                ("data_routing", "random_ltd.enabled"),
                ("data_sampling", "curriculum_learning.enabled"),
                ("data_sampling", "dynamic_batching.enabled"),
            )
        ),
        efficient(data_routing="random_ltd"),
        efficient(data_sampling="dynamic_batching"),
        efficient(data_sampling="curriculum_learning"),
        efficient(data_sampling="curriculum_learning") | {"data_efficiency.data_sampling.dynamic_batching.enabled": True},
    ),
    "dropping": ({}, {"progressive_layer_drop.enabled": True}),
    "unused": ({}, {"zero_optimization.ignore_unused_parameters": False}),
    "attention": ({}, {"sparse_attention.mode": "fixed"}, {"sparse_attention.different_layout_per_head": True}),
    "transport": tuple({"slipstream.transport": transport} for transport in ("auto", "shared", "gloo")),
    "activations": ({}, *({"slipstream.activations": way} for way in ("keep", "recompute", "offload"))),
    "recomputed": (
        {},
        {"activation_checkpointing.number_checkpoints": 2},
        {"activation_checkpointing.cpu_checkpointing": True},
        {"activation_checkpointing.synchronize_checkpoint_boundary": True, "activation_checkpointing.profile": True},
    ),
    "checkpoints": ({}, {"checkpoint.writer.decoupled": True}),
    "compile": ({}, {"compile.backend": "eager"}, {"compile.enabled": True}),
    "rollouts": ({}, {"hybrid_engine.enabled": True}),
    "fused": ({}, {"slipstream.fused_layers": True}),
    "trace": ({}, {"slipstream.trace.steps": [3, 2]}),
    "noise": (
        {},
        {"slipstream.noise_scale_every": 9},
        {"slipstream.noise_scale_every": 9, "slipstream.monitors.jsonl": {}},
        {"slipstream.noise_scale_every": 9, "slipstream.monitors.jsonl": {}, "gradient_allreduce_op": "sum"},
        {"slipstream.adaptive_batch.max_batch_size": 64, **efficient(data_sampling="curriculum_learning")},
        {"slipstream.adaptive_batch.max_batch_size": 15},
        {"slipstream.adaptive_batch.max_batch_size": 64},
    ),
}
# Axes for the tables of refusals alone: tests/dist/test_pairs.py, which trains with rows of the others, draws none of these.
REFUSED: Mapping[str, tuple[Config, ...]] = {
    "kept in memory": ({}, {"slipstream.checkpoint.folder": "ck", "slipstream.checkpoint.memory_every_steps": 1}),
    "rounds": (
        {},
        {"slipstream.local_steps.every": 4, "slipstream.local_steps.overlap": 4},
        {"slipstream.local_steps.every": 4, "zero_optimization.mics_shard_size": 1},
    ),
    "elastic": (
        {},
        {"slipstream.elastic_batch": True, "train_batch_size": 40},
        {"slipstream.elastic_batch": True, "train_batch_size": 64},
    ),
    "rest": (
        {},
        {"slipstream.rest_unused_experts": True},
        {"slipstream.rest_unused_experts": True, "expert_parallel.enabled": True},
    ),
    "hosts": ({}, {"hosts": 2, **PER_HOST}, PER_HOST),
    "quantized": ({}, {"weight_quantization.quantized_initialization.num_bits": 8}),
}
OPTIMIZERS: Mapping[str, tuple[Config, ...]] = {
    "optimizer": (
        {"optimizer.type": "ZeroOneAdam"},
        {"optimizer.type": "OneBitLamb"},
        *({"optimizer.type": name} for name in ("AdamW", "Lion", "SGD", "Adagrad", "LAMB", "RMSprop", "Adafactor", "OneBitAdam")),
        {"optimizer.type": "AdamW", "optimizer.params": {"amsgrad": True}},
        {"optimizer.type": "OneBitAdam", "optimizer.params": {"freeze_step": 7}},
        {"optimizer.type": "LAMB", **disk("optimizer")},
    ),
    "noise": ({}, {"slipstream.noise_scale_every": 9, "slipstream.monitors.jsonl": {}}),
    "rounding": ({}, half("bf16") | {"slipstream.stochastic_rounding": True}),
    "checks": ({}, {"zero_optimization.enable_sanity_checks": True}),
    **{
        axis: PLANS[axis]
        for axis in ("mesh", "stage", "wire", "replicas", "weights", "states", "groups", "optimizer states", "weights' home")
    },
}
STAGE_3 = {"zero_optimization.stage": 3}


def pairs(axes: Mapping[str, tuple[Config, ...]]) -> Iterator[Config]:
    """Every value of each axis with every value of each other."""
    for one, other in combinations(axes.values(), 2):
        yield from (first | second for first, second in product(one, other))


def nested(config: Config) -> dict[str, Any]:
    raw: dict[str, Any] = {} if "train_batch_size" in config else {"train_micro_batch_size_per_gpu": 1}
    for path, value in config.items():
        *blocks, last = path.split(".")
        inner = raw
        for block in blocks:
            inner = inner.setdefault(block, {})
        inner[last] = value
    return raw


def world_of(config: Config) -> DataWorld:
    return replace(WORLD, one_host=config.get("hosts", 1) == 1)


def case(config: Config) -> tuple[dict[str, Any], ModelFacts, Case]:
    facts = DEVICES[config.get("device", "a CPU")]
    raw = nested({path: value for path, value in config.items() if path not in ("device", "hosts")})
    return raw, facts, case_of(Values(parse(raw), facts, frozenset()), world_of(config))


def test_pairs_of_settings() -> None:
    """At stage 3 unless the pair says otherwise: the stage of most combinations that depend on one. Every third is resolved.

    `make test` takes every eighth pair; that each row is met needs all of them.
    """
    met = set()
    for number, pair in enumerate([*pairs({**PLANS, **REFUSED}), ELASTICITY][:: 1 if cases.EVERYTHING else 8]):
        raw, facts, settings = case(STAGE_3 | pair)
        met |= {row.text for row in (*REFUSALS, *NO_EFFECT) if row.when(settings)}
        refused = list(matching(REFUSALS, settings))
        assert not refused or any(word in refused[0] for word in ("set ", "drop", "use ", "turn", "raise", "must be")), refused[0]
        if number % 3:
            continue
        if not refused:
            assert set(resolve(raw, world=world_of(pair), facts=facts).notes) == set(matching(NO_EFFECT, settings)), pair
            continue
        with pytest.raises(ValueError) as error:
            resolve(raw, world=world_of(pair), facts=facts)
        assert str(error.value) == refused[0], pair
    assert not cases.EVERYTHING or {row.text for row in (*REFUSALS, *NO_EFFECT)} == met


def on_mesh(ranks: int, axes: dict[str, int], **zero: int) -> Plan:
    config = {f"slipstream.mesh.{axis}": size for axis, size in axes.items() if axis != "ep"} | STAGE_3
    if "ep" in axes:
        config |= {"expert_parallel.enabled": True, "expert_parallel.autoep_size": axes["ep"]}
    config |= {f"zero_optimization.{key}": value for key, value in zero.items()}
    return resolve(nested(config), world=DataWorld(ranks=ranks), facts=DEVICES["a CPU"])


def test_states_are_shared_by_all_ranks_of_a_stage() -> None:
    """A dense parameter's shards are on the ranks of sp and tp, too, so these count in the sizes of groups."""
    assert not any("no effect" in note for note in on_mesh(8, {"tp": 2}, zero_hpz_partition_size=4).notes)
    assert any("all 8 ranks" in note for note in on_mesh(8, {"sp": 2}, zero_hpz_partition_size=8).notes)
    assert on_mesh(8, {"sp": 2}, mics_shard_size=8).zero.shard_size == 8
    with pytest.raises(ValueError, match=r"mics_shard_size \(8\) does not divide the 4 ranks that share states"):
        on_mesh(8, {"pp": 2}, mics_shard_size=8)
    with pytest.raises(ValueError, match=r"hpz_partition_size \(4\) does not divide the 2 ranks that share states"):
        on_mesh(8, {}, mics_shard_size=2, zero_hpz_partition_size=4)


@pytest.mark.parametrize(
    ("ranks", "axes", "nearest"),
    [
        (6, {"pp": 2, "tp": 2}, {"pp": 1, "sp": 1, "tp": 2}),  # a host's links are the faster ones
        (8, {"pp": 2, "tp": 3}, {"pp": 2, "sp": 1, "tp": 2}),
        (12, {"pp": 4, "sp": 2, "tp": 4}, {"pp": 3, "sp": 1, "tp": 4}),
        (5, {"sp": 2}, {"pp": 1, "sp": 1, "tp": 1}),
    ],
)
def test_sizes_that_do_not_fit_name_the_nearest_that_do(ranks: int, axes: dict[str, int], nearest: dict[str, int]) -> None:
    named = " x ".join(f"{axis} {size}" for axis, size in nearest.items())
    with pytest.raises(ValueError, match=rf"{ranks} ranks are not a multiple of that; start \d+ processes, or use {named}$"):
        on_mesh(ranks, axes)
    assert on_mesh(ranks, nearest).mesh.tp == nearest["tp"]


@pytest.mark.parametrize(
    ("feature", "axes", "instead"),
    [
        ({"quantize_training.enabled": True}, {"pp": 2, "tp": 2}, {"pp": 1, "tp": 1}),
        ({"curriculum_learning.enabled": True}, {"pp": 2, "sp": 2, "tp": 2}, {"pp": 1, "sp": 1, "tp": 2}),
        (efficient(data_routing="random_ltd"), {"sp": 2, "tp": 2}, {"pp": 1, "sp": 1, "tp": 2}),
        ({"sparse_attention.mode": "fixed"}, {"sp": 2, "tp": 2}, {"sp": 1, "tp": 4}),
        ({"sparse_attention.different_layout_per_head": True}, {"tp": 2}, {"tp": 1}),
    ],
)
def test_a_feature_without_an_axis_names_a_layout(feature: Config, axes: dict[str, int], instead: dict[str, int]) -> None:
    def on(sizes: dict[str, int]) -> list[str]:
        return list(matching(REFUSALS, case(feature | {f"slipstream.mesh.{axis}": size for axis, size in sizes.items()})[2]))

    (text,) = on(axes)
    changed = {axis: size for axis, size in instead.items() if size != axes.get(axis, 1)}
    assert all(f"{axis} {size}" in text for axis, size in changed.items()), text
    assert "stage 3 shards" in text or "sp 1, tp 4" in text
    assert not on(instead)


@pytest.mark.parametrize("device", DEVICES)
def test_no_row_holds_without_settings(device: str) -> None:
    assert not list(matching((*REFUSALS, *NO_EFFECT), case({"device": device})[2]))


def built(config: Config) -> tuple[Plan, torch.optim.Optimizer, Rule | None]:
    plan = resolve(nested({"optimizer.type": "AdamW"} | STAGE_3 | config), world=WORLD, facts=DEVICES["a CPU"])
    assert plan.optimizer is not None
    named = resolve_optimizer(plan.optimizer.type, plan.optimizer.params)
    stack, part = (torch.nn.Parameter(torch.zeros(4, 4)) for _ in range(2))
    mark_stack(stack)
    if plan.mesh.tp > 1:
        mark_part(part, "tp", plan.mesh.tp, dim=1)
    # a number of steps in the config is the first group's alone
    optimizer = named.build(
        [{"params": [stack]}, {"params": [part], **({"freeze_step": 9} if "freeze_step" in named.kwargs else {})}]
    )
    return plan, optimizer, rule_of(optimizer) if named.native else None


def test_pairs_with_an_optimizer() -> None:
    met = set()
    for pair in list(pairs({**OPTIMIZERS, "rest": REFUSED["rest"]}))[:: 1 if cases.EVERYTHING else 6]:
        if list(matching(REFUSALS, case(STAGE_3 | pair)[2])):
            continue
        plan, optimizer, rule = built(pair)
        fitted = fit.OptimizerCase(plan, optimizer, rule)
        met |= {row.text for row in fit.REFUSALS if row.when(fitted)}
        refused = list(matching(fit.REFUSALS, fitted))
        if not refused:
            fit.refuse(plan, optimizer, rule)
            continue
        with pytest.raises(ValueError) as error:
            fit.refuse(plan, optimizer, rule)
        assert str(error.value) == refused[0], pair
    assert not cases.EVERYTHING or {row.text for row in fit.REFUSALS} == met


def test_an_optimizer_has_its_rule_on_every_device() -> None:
    """`rest_unused_experts`, which needs one, recommends LAMB."""
    optimizer = resolve_optimizer("Lamb", {}).build([torch.nn.Parameter(torch.zeros(4))])
    with mock.patch.dict(optimizer.param_groups[0], {"params": [mock.Mock(is_cuda=True)]}):
        assert rule_of(optimizer) is not None


@pytest.mark.parametrize("name", ["AdamW", "Lion", "SGD"])
def test_an_elementwise_native_optimizer_supports_every_home_and_form(name: str) -> None:
    """Independent of the table: what README promises is accepted."""
    homes = [
        disk("optimizer", ratio=0.5) | disk("param"),
        disk("optimizer") | half("bf16"),
        {"slipstream.optimizer_states": "int8"},
    ]
    for home in homes:
        fit.refuse(*built({"optimizer.type": name} | home))


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (disk("optimizer") | {"optimizer.type": "RMSprop"}, "offload_optimizer to disk needs a native kernel, and RMSprop"),
        (disk("param") | {"optimizer.type": "RMSprop"}, r"needs a native kernel for torch.float32 weights"),
        (disk("optimizer", ratio=0.5) | {"optimizer.type": "LAMB"}, "Lamb computes norms of whole parameters"),
        ({"slipstream.optimizer_states": "int8", "optimizer.type": "LAMB"}, "supports AdamW, Adam, Lion and SGD, not Lamb"),
        (half("bf16") | {"slipstream.stochastic_rounding": True, "optimizer.type": "RMSprop"}, "needs an optimizer with a native"),
    ],
)
def test_what_an_optimizer_does_not_support(config: Config, text: str) -> None:
    plan, optimizer, rule = built(config)
    with pytest.raises(ValueError, match=text):
        fit.refuse(plan, optimizer, rule)
    with pytest.raises(ValueError, match=text):  # `slipstream plan` says so in advance
        rehearse(plan)

"""Every key has a fate, every refusal teaches, and every honored key names a test that exists."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from slipstream.config import DataWorld, ModelFacts, describe, resolve, schema
from slipstream.config.keys import Counts, Fate, Key, counts, of_fate, say_idle, table
from slipstream.config.values import Block
from tests.unit.test_config_schema import nest

TESTS = Path(__file__).resolve().parents[1]
WORLD = DataWorld(ranks=2)
FACTS = ModelFacts(device_type="cpu", supports_bf16=True)
HONORED, NO_EFFECT, REFUSED = map(of_fate, Fate)
SWITCHES = {name: key for name, key in REFUSED.items() if key.off is not None}


def resolved(raw: dict[str, Any], world: DataWorld = WORLD) -> Any:
    return resolve({"train_batch_size": 8} | raw, world=world, facts=FACTS)


def enumerate_schema(block: type[Block], prefix: str = "") -> list[str]:
    """Every leaf of the schema, walked here on its own so that the table cannot miss what `parse` misses."""
    names = []
    for name, field in block.model_fields.items():
        below = schema.child(field.annotation)
        if below is None:
            names.append(prefix + name)
        else:
            names += enumerate_schema(below.block, f"{prefix}{name}.{'*.' if below.many else ''}")
    return names


def test_every_key_has_a_fate() -> None:
    assert list(table()) == enumerate_schema(schema.Config)
    assert not [key.name for key in table().values() if (key.fate is Fate.REFUSED) != (key.feature is not None)]


def test_a_key_without_a_fate_is_told() -> None:
    class Forgotten(Block):
        size: int = 3

    with pytest.raises(AssertionError, match=r"config key block\.size has no fate: annotate it by honored, no_effect or switch"):
        list(schema.walk(Forgotten, "block."))


def test_a_feature_has_a_switch() -> None:
    """Otherwise nothing would refuse a config that asks for it."""
    assert {key.feature for key in REFUSED.values()} == {key.feature for key in SWITCHES.values()}


def test_the_defaults_ask_for_nothing() -> None:
    assert resolved({}).notes == ()


def test_counts_add_up() -> None:
    total = counts()
    assert isinstance(total, Counts)
    assert sum(total) == len(table())
    assert total.honored == len(HONORED)
    assert total.no_effect == len(NO_EFFECT)


def test_every_fate_says_why() -> None:
    for key in table().values():
        if key.fate is Fate.HONORED:
            assert key.meaning.endswith("."), key.name
        elif key.fate is Fate.NO_EFFECT:
            assert key.reason, key.name
        else:
            assert key.feature is not None and key.feature.what and key.feature.remedy, key.name


def test_every_honored_key_names_a_test_that_exists() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
    defined = set(re.findall(r"^\s*def (test_\w+)\(", source, re.MULTILINE))
    missing = {name: key.proofs for name, key in HONORED.items() if defined.isdisjoint(key.proofs)}
    assert not missing, f"{len(missing)} honored keys without proof: {missing}"


def asking(switch: Key) -> Any:
    """A value of a switch that asks for its feature."""
    special = {
        "zero_optimization.offload_optimizer.device": "cpu",
        "zero_optimization.offload_param.device": "nvme",
        "zero_optimization.zenflow.topk_ratio": 0.2,
        "zero_optimization.zeropp_loco_param.err_beta": 0.5,
        "data_types.buffer_dtype": "bf16",
        "data_types.keep_in_fp32_modules": ["lm_head"],
        "weight_quantization.enabled": True,
        "weight_quantization.quantized_initialization": {"num_bits": 4},
        "weight_quantization.post_init_quant": {"fc": {"num_bits": 4}},
    }
    return special.get(switch.name, not switch.default if isinstance(switch.default, bool) else 2)


@pytest.mark.parametrize("switch", SWITCHES.values(), ids=SWITCHES)
def test_a_feature_that_is_not_built_is_refused(switch: Key) -> None:
    with pytest.raises(ValueError) as error:
        resolved(nest(switch.name, asking(switch)), DataWorld(ranks=2, one_host=False))
    text, feature = str(error.value), switch.feature
    assert feature is not None
    assert switch.name in text and feature.what in text and feature.remedy in text and "not built yet" in text


@pytest.mark.parametrize("switch", [name for name, key in SWITCHES.items() if key.off])
def test_a_feature_that_is_off_parses(switch: str) -> None:
    raw = nest(switch, table()[switch].default)
    if "weight_quantization" in raw:  # on by being there
        raw["weight_quantization"]["enabled"] = False
    assert resolved(raw).notes == ()


def test_a_block_that_asks_by_being_there() -> None:
    with pytest.raises(ValueError, match="ZenFlow"):
        resolved({"zero_optimization": {"stage": 2, "zenflow": {}}})
    with pytest.raises(ValueError, match=r"weight_quantization\.enabled = True asks for weight quantization"):
        resolved({"weight_quantization": {"num_bits": 4}})
    with pytest.raises(ValueError, match="DataStates"):
        resolved({"datastates_ckpt": {}})


def test_node_local_storage_has_no_effect_on_one_host() -> None:
    raw = {"checkpoint": {"use_node_local_storage": True}}
    assert resolved(raw).idle == {"checkpoint.use_node_local_storage": "all ranks share one host and its disk"}
    with pytest.raises(ValueError, match="checkpoints on node-local disks"):
        resolved(raw, DataWorld(ranks=2, one_host=False))


def test_settings_of_a_feature_that_is_off_are_quiet() -> None:
    raw = {"flops_profiler": {"enabled": False, "profile_step": 5}, "elasticity": {"max_gpus": 4}}
    assert not resolved(raw).idle and resolved(raw).notes == ()


def test_all_refusals_come_at_once() -> None:
    with pytest.raises(ValueError) as error:
        resolved({"amp": {"enabled": True}, "graph_harvesting": True})
    assert "amp.enabled" in str(error.value) and "graph_harvesting" in str(error.value)


def other(default: Any) -> Any:
    if isinstance(default, bool):
        return not default
    if isinstance(default, (int, float)):
        return 3
    return ["Linear"] if isinstance(default, list) else "O1"


@pytest.mark.parametrize("key", sorted(NO_EFFECT))
def test_a_key_without_effect_is_said_when_it_is_set(key: str) -> None:
    special: dict[str, Any] = {
        "zero_optimization.overlap_comm": False,
        "torch_autocast.lower_precision_safe_modules": ["torch.nn.Linear"],
        "checkpoint.writer.type": "python",
        "checkpoint.writer.data_parallel": "replica",
        "seq_parallel_communication_data_type": "bf16",
        "compression_training.sparse_pruning.shared_parameters.schedule_offset_end": 5,
        "vocabulary_size": 50257,
        **{f"autotuning.model_info.{name}": 3 for name in ("num_params", "hidden_size", "num_layers")},
        "data_efficiency.data_routing.random_ltd.global_batch_size": 8,
        "data_efficiency.data_routing.random_ltd.micro_batch_size": 2,
        "data_efficiency.data_routing.random_ltd.model_type": "encoder",
        "expert_parallel.has_shared_experts": True,
        "zero_optimization.offload_optimizer.cpuadam_cores_perc": 0.5,
    }
    raw = nest(key, special.get(key, other(table()[key].default)))
    if key.startswith("optimizer."):
        raw["optimizer"]["type"] = "Adam"
    plan = resolved(raw)
    assert plan.idle == {key.replace("*", "g1"): NO_EFFECT[key].reason} and plan.notes == ()


def test_a_key_without_effect_at_its_default_is_quiet() -> None:
    raw = {"zero_optimization": {"stage": 2, "contiguous_gradients": True, "reduce_bucket_size": 5e8}}
    assert not resolved(raw).idle and resolved(raw).notes == ()


def test_one_warning_names_all_keys_without_effect(caplog: pytest.LogCaptureFixture) -> None:
    names = "zero_optimization.reduce_bucket_size, zero_optimization.allgather_bucket_size"
    raw = {"zero_optimization": {"reduce_bucket_size": 1e6, "allgather_bucket_size": 1e6}, "zero_allow_untested_optimizer": True}
    plan = resolved(raw)
    with caplog.at_level(logging.DEBUG, logger="slipstream"):
        say_idle(plan.idle)
    warning, *details = caplog.records
    assert (warning.levelno, {each.levelno for each in details}) == (logging.WARNING, {logging.DEBUG})
    assert f"{names} have no effect here; `slipstream plan CONFIG`" in warning.getMessage().replace(
        "zero_allow_untested_optimizer, ", ""
    )
    assert all(f"note: {each.getMessage().removeprefix('config: ')}" in describe(plan) for each in details) and len(details) == 2

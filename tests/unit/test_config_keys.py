"""Every key has a fate, every refusal teaches, and every honored key has a test that exists."""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest

from slipstream.config import DataWorld, ModelFacts, describe, resolve, schema
from slipstream.config import plan as plans
from slipstream.config.keys import Fate, Key, of_fate, say_idle, table
from slipstream.config.parse import parse
from slipstream.config.values import Block
from tests.unit.test_config_schema import nest

TESTS = Path(__file__).resolve().parents[1]
WORLD = DataWorld(ranks=2)
FACTS = ModelFacts(device_type="cpu", supports_bf16=True)
HONORED, NO_EFFECT, REFUSED = map(of_fate, Fate)
SWITCHES = {name: key for name, key in REFUSED.items() if key.off is not None}
_ROUTER = (
    "route_norm route_scale score_apply num_expert_groups num_limited_groups score_func top_k "
    "routed_scaling_factor expert_activation"
)
_SNIPPED = "schedule_offset_end schedule_offset_stride block_pattern"
# The test of honored keys, or of all in a block (with a dot at its end), if its name does not follow from the key's
PROOFS = {
    key: test
    for test, keys in {
        "test_codes_on_the_wire": "communication_data_type zero_optimization.zero_quantized_weights "
        "zero_optimization.zero_quantized_gradients",
        "test_rows_of_embeddings": "sparse_gradients",
        "test_offload_param_device": "zero_optimization.offload_param.nvme_path",
        "test_offload_optimizer_device": "zero_optimization.offload_optimizer.nvme_path",
        "test_cpu_offload": "zero_optimization.cpu_offload_param",
        "test_groups_of_ranks": "zero_optimization.zero_hpz_partition_size",
        "test_frozen_weights_in_codes": "zero_optimization.zero_quantized_nontrainable_weights",
        "test_error_feedback": "zero_optimization.zeropp_loco_param.",
        "test_ranks_may_run_different_experts_of_a_list": "zero_optimization.leaf_module.",
        "test_aio": "aio.",
        "test_an_unmodified_model": "tensor_parallel.autotp_size tensor_parallel.tp.",
        "test_a_partition_config": "tensor_parallel.preset_model tensor_parallel.partition_config",
        "test_overlapped_sums_have_the_same_bits": "tensor_parallel.tp_overlap_comm",
        "test_a_loss_over_shares_of_the_vocabulary": "tensor_parallel.vocab_parallel_lm_head",
        "test_an_unmodified_model_of_experts": "expert_parallel.enabled expert_parallel.autoep_size",
        "test_experts_that_stay_whole_are_named": "expert_parallel.moe_layer_pattern expert_parallel.expert_pattern",
        "test_a_preset_must_be_that_of_the_model": "expert_parallel.preset_model",
        "test_router_settings_of_the_config": " ".join(f"expert_parallel.{name}" for name in _ROUTER.split()),
        "test_the_config_balances_the_experts_of_an_unmodified_model": "expert_parallel.load_balance_coeff",
        "test_the_disk_moves_the_states_of_used_experts": "slipstream.rest_unused_experts",
        "test_parts_of_a_sequence": "sequence_parallel_size slipstream.mesh.sp",
        "test_the_stages_of_the_config": "pipeline.stages",
        "test_the_partition_of_the_config": "pipeline.partition",
        "test_recomputed_layers": "pipeline.activation_checkpoint_interval",
        "test_what_slices_have_alike_travels_once": "pipeline.pipe_partitioned pipeline.grad_partitioned",
        "test_limits_of_rollouts": "hybrid_engine.max_out_tokens",
        "test_memory_between_rollouts": "hybrid_engine.release_inference_cache",
        "test_compile": "compile.enabled compile.backend compile.kwargs",
        "test_a_block_that_asks_by_being_there": "datastates_ckpt",
        "test_directories_of_each_host": "checkpoint.use_node_local_storage",
        "test_layers_are_quantized_by_rules": "weight_quantization.",
        "test_timers": "timers.",
        "test_the_autotuning_block": "autotuning.",
        "test_flops_profiler": "flops_profiler.",
        "test_each_mode_of_the_json": "sparse_attention.",
        "test_the_loader_follows_the_config": "data_efficiency.",
        "test_schedules_of_metrics": " ".join(
            f"data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.*.{name}"
            for name in ("min_difficulty", "max_difficulty", "schedule_type", "schedule_config.")
        ),
        "test_batches_by_tokens_by_config": "data_efficiency.data_sampling.dynamic_batching.",
        "test_layers_compute_a_part_of_the_tokens": "data_efficiency.data_routing.",
        "test_sequence_first": "data_efficiency.data_routing.random_ltd.hidden_state_order",
        "test_the_number_of_tokens": "data_efficiency.data_routing.random_ltd.random_ltd_schedule.",
        "test_sequences_grow": "curriculum_learning.",
        "test_difficulties_are_those_of_the_formulas": "curriculum_learning.schedule_type curriculum_learning.schedule_config.",
        "test_blocks_are_dropped": "progressive_layer_drop.enabled",
        "test_the_schedule": "progressive_layer_drop.theta progressive_layer_drop.gamma",
        "test_sensitive_layers_keep_their_bits": "eigenvalue. quantize_training.eigenvalue.",
        "test_a_student_takes_layers": "compression_training.layer_reduction.",
        "test_bits_fall_with_the_steps": "compression_training.weight_quantization. quantize_training.fp16_mixed_quantize.",
        "test_inputs_are_quantized": "compression_training.activation_quantization.",
        "test_masked_and_cleaned": "compression_training.",
        "test_weights_are_pruned_by_scores_of_training": " ".join(
            f"compression_training.sparse_pruning.shared_parameters.{name}" for name in _SNIPPED.split()
        ),
        "test_the_older_block_is_weight_quantization": "quantize_training.",
        "test_files_have_the_figures_of_each_step": "tensorboard. csv_monitor.",
        "test_services_get_the_figures": "wandb. comet.",
        "test_comms_logger": "comms_logger.",
        "test_elasticity": "elasticity.",
        "test_a_parameter_on_two_stages": "slipstream.mesh.pp",
        "test_layers_in_parts": "slipstream.mesh.tp",
        "test_local_steps": "slipstream.local_steps.",
        "test_rounds_beside_steps": "slipstream.local_steps.overlap",
        "test_the_schedule_of_the_config": "slipstream.pipeline.schedule",
        "test_chunks_of_a_decoder": "slipstream.pipeline.chunks",
        "test_gradients_reduced_after_each_micro_batch": "slipstream.pipeline.reduce",
        "test_shares_of_the_tokens": "slipstream.tensor.",
        "test_the_config_fuses_layers": "slipstream.fused_layers",
        "test_the_config_chooses_the_products": "slipstream.products",
        "test_checkpoints_by_itself": "slipstream.checkpoint.",
        "test_checkpoints_in_memory": "slipstream.checkpoint.memory_every_steps",
        "test_mlflow_gets_the_figures": "slipstream.monitors.mlflow.",
        "test_trackio_gets_the_figures": "slipstream.monitors.trackio.",
        "test_prometheus_scrapes_the_figures": "slipstream.monitors.prometheus.",
        "test_a_collector_gets_the_figures": "slipstream.monitors.otlp.",
        "test_lines_have_the_figures": "slipstream.monitors.jsonl.",
        "test_a_report_has_the_run": "slipstream.monitors.report.",
        "test_a_class_of_the_script": "slipstream.monitors.custom",
        "test_the_noise_scale_of_a_known_spread": "slipstream.noise_scale_every slipstream.adaptive_batch.smoothing",
        "test_the_batch_follows_the_noise_scale": "slipstream.adaptive_batch.",
        "test_elastic_batch": "slipstream.elastic_batch",
        "test_trace": "slipstream.trace.",
    }.items()
    for key in keys.split()
}


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


def test_every_fate_says_why() -> None:
    for key in table().values():
        if key.fate is Fate.HONORED:
            assert key.meaning.endswith("."), key.name
        elif key.fate is Fate.NO_EFFECT:
            assert key.reason, key.name
        else:
            assert key.feature is not None and key.feature.what and key.feature.remedy, key.name


def test_a_zero_or_minus_one_that_stands_for_another_value_is_named() -> None:
    """Where the plan has something else than what the config says, the key's meaning tells so."""
    sections = [kind for kind in vars(plans).values() if is_dataclass(kind)]
    found = {}
    for json in (json for section in sections for jsons in plans.json_keys(section).values() for json in jsons):
        for value in (0, -1) if json.name in HONORED else ():
            with suppress(ValueError):  # refused
                given = parse(nest(json.name, value)).leaves[json.name].value
                if not isinstance(given, bool) and json.shown(json.read(given)) != value:
                    found[json.name, value] = HONORED[json.name].meaning
    assert ("zero_optimization.mics_shard_size", -1) in found and ("steps_per_print", 0) in found
    assert not {key for key, meaning in found.items() if not re.search(rf"(?<![\w.-]){key[1]}(?![\w.])", meaning)}


def proofs(name: str) -> list[str]:
    """The names that the test of an honored key can have: that of `PROOFS`, or test_<key>, or without the key's outer blocks."""
    rows = [key for key in PROOFS if name == key or (key.endswith(".") and name.startswith(key))]
    parts = name.split(".")
    return [PROOFS[max(rows, key=len)]] if rows else [f"test_{'_'.join(parts[i:])}" for i in range(len(parts))]


def test_every_honored_key_has_a_test_that_exists() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
    defined = set(re.findall(r"^\s*def (test_\w+)\(", source, re.MULTILINE))
    missing = {name: proofs(name) for name in HONORED if defined.isdisjoint(proofs(name))}
    assert not missing, f"{len(missing)} honored keys without proof: {missing}"
    idle = [key for key in PROOFS if not any(name.startswith(key) for name in HONORED)]
    assert not idle, f"rows of PROOFS without an honored key: {idle}"


def asking(switch: Key) -> Any:
    """A value of a switch that asks for its feature."""
    special = {
        "zero_optimization.offload_optimizer.device": "cpu",
        "zero_optimization.offload_param.device": "nvme",
        "zero_optimization.zeropp_loco_param.err_beta": 0.5,
        "data_types.buffer_dtype": "bf16",
    }
    return special.get(switch.name, not switch.default if isinstance(switch.default, bool) else 2)


@pytest.mark.parametrize("switch", SWITCHES.values(), ids=SWITCHES)
def test_a_feature_that_is_not_built_is_refused(switch: Key) -> None:
    with pytest.raises(ValueError) as error:
        resolved(nest(switch.name, asking(switch)))
    text, feature = str(error.value), switch.feature
    assert feature is not None
    assert switch.name in text and feature.what in text and feature.remedy in text and "not built yet" in text


@pytest.mark.parametrize("switch", [name for name, key in SWITCHES.items() if key.off])
def test_a_feature_that_is_off_parses(switch: str) -> None:
    assert resolved(nest(switch, table()[switch].default)).notes == ()


def test_a_block_that_asks_by_being_there() -> None:
    assert not resolved({}).checkpoint.asynchronous
    assert resolved({"datastates_ckpt": {}}).checkpoint.asynchronous


def test_node_local_storage_has_no_effect_on_one_host() -> None:
    raw = {"checkpoint": {"use_node_local_storage": True}}
    why = "checkpoint.use_node_local_storage has no effect here: all ranks share one host and its disk"
    assert resolved(raw).notes == (why,)
    several = DataWorld(ranks=2, one_host=False)
    assert resolved(raw, several).notes == ()
    with pytest.raises(ValueError, match=r"asynchronous checkpoints .* drop one of the two"):
        resolved({"checkpoint": {"use_node_local_storage": True, "writer": {"decoupled": True}}}, several)


def test_settings_of_a_feature_that_is_off_are_quiet() -> None:
    raw = {"flops_profiler": {"enabled": False, "profile_step": 5}, "elasticity": {"max_gpus": 4}}
    assert not resolved(raw).idle and resolved(raw).notes == ()


def test_all_refusals_come_at_once() -> None:
    with pytest.raises(ValueError) as error:
        resolved({"amp": {"enabled": True}, "nebula": {"enabled": True}})
    assert "amp.enabled" in str(error.value) and "nebula.enabled" in str(error.value)


def other(default: Any) -> Any:
    if isinstance(default, bool):
        return not default
    if isinstance(default, (int, float)):
        return 3
    return ["Linear"] if isinstance(default, list) else "O1"


def test_a_key_without_effect_is_said_when_it_is_set() -> None:
    special: dict[str, Any] = {
        "zero_optimization.overlap_comm": False,
        "torch_autocast.lower_precision_safe_modules": ["torch.nn.Linear"],
        "checkpoint.writer.type": "python",
        "checkpoint.writer.data_parallel": "replica",
        "seq_parallel_communication_data_type": "bf16",
        "compression_training.sparse_pruning.shared_parameters.schedule_offset_end": 5,
        "vocabulary_size": 50257,
        "compile.passes": ["z1"],
        **{f"zero_optimization.zenflow.{name}": 0.3 for name in ("topk_ratio", "auto_ratio", "pt_reserved_cores_perc")},
        "zero_optimization.zenflow.steps_per_epoch": 9,
        **{f"autotuning.model_info.{name}": 3 for name in ("num_params", "hidden_size", "num_layers")},
        "data_efficiency.data_routing.random_ltd.global_batch_size": 8,
        "data_efficiency.data_routing.random_ltd.micro_batch_size": 2,
        "data_efficiency.data_routing.random_ltd.model_type": "encoder",
        "expert_parallel.has_shared_experts": True,
        "zero_optimization.offload_optimizer.cpuadam_cores_perc": 0.5,
    }
    wrong = {}
    for key, found in NO_EFFECT.items():
        raw = nest(key, special.get(key, other(table()[key].default)))
        if key.startswith("optimizer."):
            raw["optimizer"]["type"] = "Adam"
        try:
            plan = resolved(raw)
        except ValueError as error:
            wrong[key] = str(error)
        else:
            if (plan.idle, plan.notes) != ({key.replace("*", "g1"): found.reason}, ()):
                wrong[key] = f"without effect: {plan.idle}, notes: {plan.notes}"
    assert not wrong


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

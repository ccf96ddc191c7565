"""The class of every JSON key: honored, without effect, or refused.

- HONORED: the value changes what Slipstream does; `proof` names the test that shows it.
- NO_EFFECT: the key is valid but has nothing to control here. One warning names all that the user set.
- REFUSED: the key belongs to a feature that is not built yet. A value that enables the feature raises an error, because
  training silently without it would be worse; a value that leaves it off is accepted.

A key is listed by name in `HONORED` or `NO_EFFECT`, or belongs to a `Feature` by name or by block. A name takes precedence over
a block, so moving a key to another class changes one line. A test checks that every schema key has exactly one class and that
every name here is in the schema.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from slipstream.config.plan import sentences, summary
from slipstream.config.text import shown

if TYPE_CHECKING:
    from slipstream.config.parse import Leaf

logger = logging.getLogger(__name__)


class Fate(enum.Enum):
    HONORED = "honored"
    NO_EFFECT = "no effect"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Feature:
    """A DeepSpeed feature that is not built yet: the keys that enable it and those that configure it."""

    what: str
    remedy: str
    switches: tuple[str, ...]  # keys; a value of any of them outside `off` enables the feature
    off: tuple[Any, ...] = (False, None)
    blocks: tuple[str, ...] = ()  # blocks whose other keys belong to the feature
    moot_on_one_host: str = ""  # why it is not needed if all ranks share a host; it is then logged, not refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    name: str
    fate: Fate
    proof: str = ""  # HONORED: a test function below tests/
    reason: str = ""  # NO_EFFECT and REFUSED
    remedy: str = ""  # REFUSED


class Counts(NamedTuple):
    honored: int
    no_effect: int
    refused: int


HONORED: Mapping[str, str] = {
    "train_batch_size": "test_train_batch_size",
    "train_micro_batch_size_per_gpu": "test_train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps": "test_gradient_accumulation_steps",
    "managed_gradient_accumulation": "test_managed_gradient_accumulation",
    "data_parallel_size": "test_data_parallel_size_is_checked",
    "optimizer.type": "test_optimizer_type",
    "optimizer.params": "test_optimizer_params",
    "scheduler.type": "test_scheduler_type",
    "scheduler.params": "test_scheduler_params",
    "gradient_clipping": "test_gradient_clipping",
    "communication_data_type": "test_communication_data_type",
    "gradient_allreduce_op": "test_gradient_allreduce_op",
    "fp16.enabled": "test_fp16_enabled",
    "fp16.auto_cast": "test_fp16_auto_cast",
    "fp16.loss_scale": "test_fp16_loss_scale",
    "fp16.initial_scale_power": "test_fp16_initial_scale_power",
    "fp16.loss_scale_window": "test_fp16_loss_scale_window",
    "fp16.hysteresis": "test_fp16_hysteresis",
    "fp16.consecutive_hysteresis": "test_fp16_consecutive_hysteresis",
    "fp16.min_loss_scale": "test_fp16_min_loss_scale",
    "fp16.fp16_master_weights_and_grads": "test_fp16_master_weights_and_grads",
    "bf16.enabled": "test_bf16_enabled",
    "bf16.check_grad_overflow": "test_bf16_check_grad_overflow",
    "bf16.bf16_master_weights_and_grads": "test_bf16_master_weights_and_grads",
    "bf16.bf16_optimizer_states": "test_bf16_optimizer_states",
    "torch_autocast.enabled": "test_torch_autocast_enabled",
    "torch_autocast.dtype": "test_torch_autocast_dtype",
    "data_types.grad_accum_dtype": "test_data_types_grad_accum_dtype",
    "data_types.param_dtype": "test_data_types_param_dtype",
    "data_types.buffer_dtype": "test_data_types_buffer_dtype",
    "zero_optimization.stage": "test_zero_optimization_stage",
    "zero_optimization.mics_shard_size": "test_zero_optimization_mics_shard_size",
    "zero_optimization.ignore_unused_parameters": "test_ignore_unused_parameters",
    "zero_optimization.offload_optimizer.device": "test_offload_optimizer_device",
    "zero_optimization.offload_optimizer.nvme_path": "test_offload_optimizer_device",
    "zero_optimization.offload_optimizer.ratio": "test_offload_optimizer_ratio",
    "zero_optimization.offload_optimizer.buffer_count": "test_offload_optimizer_buffer_count",
    "zero_optimization.offload_param.device": "test_offload_param_device",
    "zero_optimization.offload_param.nvme_path": "test_offload_param_device",
    "zero_optimization.offload_param.max_in_cpu": "test_offload_param_max_in_cpu",
    "zero_optimization.sub_group_size": "test_sub_group_size",
    "zero_optimization.cpu_offload": "test_cpu_offload",
    "zero_optimization.cpu_offload_param": "test_cpu_offload",
    "aio.block_size": "test_aio",
    "aio.queue_depth": "test_aio",
    "aio.intra_op_parallelism": "test_aio",
    "steps_per_print": "test_steps_per_print",
    "wall_clock_breakdown": "test_wall_clock_breakdown",
    "dump_state": "test_dump_state",
    "log_level": "test_log_level",
    "dataloader_drop_last": "test_dataloader_drop_last",
    "checkpoint.tag_validation": "test_checkpoint_tag_validation",
    "checkpoint.load_universal": "test_checkpoint_load_universal",
    "checkpoint.writer.decoupled": "test_checkpoint_writer_decoupled",
    "activation_checkpointing.number_checkpoints": "test_number_checkpoints",
    "activation_checkpointing.cpu_checkpointing": "test_cpu_checkpointing",
    "activation_checkpointing.synchronize_checkpoint_boundary": "test_synchronize_checkpoint_boundary",
    "activation_checkpointing.profile": "test_profile",
    "compile.enabled": "test_blocks_are_compiled_as_the_config_says",
    "compile.disable": "test_compile_disable",
    "compile.backend": "test_blocks_are_compiled_as_the_config_says",
    "compile.kwargs": "test_blocks_are_compiled_as_the_config_says",
    "slipstream.unknown_keys": "test_unknown_keys_that_are_left_out",
    "slipstream.activations": "test_slipstream_activations",
    "slipstream.keep_checkpoints": "test_slipstream_keep_checkpoints",
    "slipstream.broadcast_buffers": "test_slipstream_broadcast_buffers",
    "slipstream.seed": "test_slipstream_seed",
    "slipstream.optimizer_states": "test_slipstream_optimizer_states",
    "slipstream.stochastic_rounding": "test_slipstream_stochastic_rounding",
    "slipstream.check_grad_overflow": "test_slipstream_check_grad_overflow",
    "slipstream.transport": "test_slipstream_transport",
    "slipstream.timeout_s": "test_slipstream_timeout_s",
    "slipstream.poison_released": "test_slipstream_poison_released",
}

_UNITS = "parameters are communicated in whole units (one per repeated block), not in buckets of this size"
_WHOLE = "each unit is gathered as a whole, so its modules already behave as leaf modules"
_TRANSPORT = "the transport chooses the collective; reductions have a fixed order and send each byte once"
_PINNED = "host buffers for GPU copies are always pinned"
_STREAMED = "the optimizer always prefetches chunks and writes them back asynchronously"
_DIRECT = "weights are read directly into the memory that the forward uses, one unit ahead"
_SUBMITTED = "I/O requests are always submitted as soon as the queue has a free slot and reaped as they complete"
_WRITER = "each rank writes its shards to its own file with direct I/O and without pickle"
_UNSCALED = "bf16 has the exponent range of fp32 and needs no loss scale"
_ROUNDING = "gradients are summed in fp32 and divided once at the end"

NO_EFFECT: Mapping[str, str] = {
    "zero_allow_untested_optimizer": "every optimizer is allowed at every stage",
    "zero_force_ds_cpu_optimizer": "every optimizer can run on the CPU",
    "optimizer.legacy_fusion": "each optimizer has one implementation",
    "prescale_gradients": _ROUNDING,
    "gradient_predivide_factor": _ROUNDING,
    "seq_parallel_communication_data_type": "sequence parallelism is not built yet",
    "disable_allgather": "DeepSpeed does not read it either",
    "allgather_size": _UNITS,
    "fp16.fused_mode": "there is one mixed-precision path",
    "fp16.opt_level": "it is an option of NVIDIA Apex; fp16 weights always have fp32 masters here",
    "bf16.loss_scale": _UNSCALED,
    "bf16.loss_scale_window": _UNSCALED,
    "bf16.initial_scale_power": _UNSCALED,
    "bf16.hysteresis": _UNSCALED,
    "bf16.min_loss_scale": _UNSCALED,
    "bf16.immediate_grad_update": "gradients are always reduced as soon as they are complete",
    "torch_autocast.lower_precision_safe_modules": "torch.autocast selects dtypes per operation, not per module",
    "zero_optimization.mics_hierarchical_params_gather": "units are gathered within the sharding group only",
    "zero_optimization.contiguous_gradients": "gradients are always contiguous",
    "zero_optimization.reduce_scatter": _TRANSPORT,
    "zero_optimization.use_multi_rank_bucket_allreduce": _TRANSPORT,
    "zero_optimization.allgather_partitions": _TRANSPORT,
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": _TRANSPORT,
    "zero_optimization.stage3_allgather_sequential": _TRANSPORT,
    "zero_optimization.reduce_bucket_size": _UNITS,
    "zero_optimization.allgather_bucket_size": _UNITS,
    "zero_optimization.stage3_prefetch_bucket_size": _UNITS,
    "zero_optimization.stage3_param_persistence_threshold": _UNITS,
    "zero_optimization.stage3_model_persistence_threshold": _UNITS,
    "zero_optimization.stage3_max_live_parameters": _UNITS,
    "zero_optimization.stage3_max_reuse_distance": _UNITS,
    "zero_optimization.stage3_module_granularity_threshold": _UNITS,
    "zero_optimization.leaf_module.classes": _WHOLE,
    "zero_optimization.leaf_module.names": _WHOLE,
    "zero_optimization.leaf_module.name_suffixes": _WHOLE,
    "zero_optimization.overlap_comm": "communication always overlaps with computation if the device has streams",
    "zero_optimization.compute_grad_norm": "the norm is computed during the reduction, without an extra pass",
    "zero_optimization.load_from_fp32_weights": "checkpoints contain the master weights, which are always loaded",
    "zero_optimization.elastic_checkpoint": "every checkpoint loads at any world size",
    "zero_optimization.pipeline_loading_checkpoint": "each rank reads only its shard of a checkpoint",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "engine.state_dict() is always complete",
    "zero_optimization.legacy_stage1": "each stage has one implementation",
    "zero_optimization.round_robin_gradients": "every unit is already sharded evenly over all ranks",
    "zero_optimization.parameter_alignment": "parameters are always aligned to 128 bytes",
    "zero_optimization.memory_efficient_linear": "torch.nn.functional.linear is not patched",
    "zero_optimization.override_module_apply": "torch.nn.Module is not patched",
    "zero_optimization.log_trace_cache_warnings": "there is no trace cache",
    "zero_optimization.enable_sanity_checks": "the checks are always enabled",
    "zero_optimization.save_muon_momentum_buffer_in_memory": "Muon's states always stay in memory",
    "zero_optimization.cpu_offload_use_pin_memory": _PINNED,
    "zero_optimization.grad_hooks": "gradients are always reduced from hooks",
    "zero_optimization.offload_optimizer.pin_memory": _PINNED,
    "zero_optimization.offload_optimizer.pipeline_read": _STREAMED,
    "zero_optimization.offload_optimizer.pipeline_write": _STREAMED,
    "zero_optimization.offload_optimizer.fast_init": "new files read as zeros, so they need no initialization",
    "zero_optimization.offload_optimizer.super_offload": "in stage 3 the optimizer step overlaps the next forward",
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": "the optimizer step uses all threads of the process",
    "zero_optimization.offload_param.pin_memory": _PINNED,
    "zero_optimization.offload_param.buffer_count": _DIRECT,
    "zero_optimization.offload_param.buffer_size": _DIRECT,
    "aio.single_submit": _SUBMITTED,
    "aio.overlap_events": _SUBMITTED,
    "disable_python_gc": "Slipstream does not change Python's garbage collector; call gc.disable() in the script",
    "memory_breakdown": "engine.explain() reports the bytes of every state",
    "timers.throughput.enabled": "steps_per_print and wall_clock_breakdown enable timing",
    "timers.throughput.synchronized": "timers read the clock only where the step synchronizes anyway",
    "activation_checkpointing.contiguous_memory_optimization": "saved inputs are the block's own input tensors, not "
    "copies in a buffer; PYTORCH_ALLOC_CONF=expandable_segments:True reduces fragmentation of CUDA memory",
    "activation_checkpointing.partition_activations": "there are no tensor-parallel ranks to partition activations over",
    "checkpoint.parallel_write.pipeline_stage": _WRITER,
    "checkpoint.checkpoint_serialization": _WRITER,
    "checkpoint.writer.type": _WRITER,
    "checkpoint.writer.io_buffer_size": _WRITER,
    "checkpoint.writer.io_buffer_double": _WRITER,
    "checkpoint.writer.io_multiplier": _WRITER,
    "checkpoint.writer.show_statistics": _WRITER,
    "checkpoint.writer.data_parallel": _WRITER,
    "vocabulary_size": "DeepSpeed uses it only to print an alignment hint",
}

_TECHNIQUES = "weight_quantization activation_quantization sparse_pruning row_pruning head_pruning channel_pruning"
_COMPRESSION = ("layer_reduction.enabled", *(f"{name}.shared_parameters.enabled" for name in _TECHNIQUES.split()))


def _block(what: str, remedy: str, *blocks: str) -> Feature:
    """A feature that `enabled` of its block switches on."""
    return Feature(what, remedy, tuple(f"{block}.enabled" for block in blocks), blocks=blocks)


FEATURES: tuple[Feature, ...] = (
    Feature("GPUDirect Storage", "set aio.use_gds to false; transfers go through pinned host memory", ("aio.use_gds",)),
    Feature(
        "ZenFlow",
        "drop the block zero_optimization.zenflow",
        ("zero_optimization.zenflow.topk_ratio",),
        off=(),
        blocks=("zero_optimization.zenflow",),
    ),
    Feature(
        "quantized ZeRO communication (ZeRO++)",
        "drop the key; a 16-bit communication_data_type halves gradient traffic",
        (
            "zero_optimization.zero_quantized_weights",
            "zero_optimization.zero_quantized_nontrainable_weights",
            "zero_optimization.zero_quantized_gradients",
        ),
    ),
    Feature(
        "quantized ZeRO communication with error feedback (LoCo)",
        "drop the block zero_optimization.zeropp_loco_param",
        ("zero_optimization.zeropp_loco_param.err_beta",),
        off=(),
        blocks=("zero_optimization.zeropp_loco_param",),
    ),
    Feature(
        "a secondary partition of the parameters (hpZ)",
        "drop the key; zero_optimization.mics_shard_size limits all-gathers to a group of ranks",
        ("zero_optimization.zero_hpz_partition_size",),
        off=(0, 1),
    ),
    _block("NVIDIA Apex AMP", 'use "bf16", "fp16" or "torch_autocast" with "enabled": true', "amp"),
    _block("MS-AMP", 'use "bf16", "fp16" or "torch_autocast" with "enabled": true', "msamp"),
    Feature(
        "a list of buffers that stay in fp32",
        "drop the key; data_types.buffer_dtype sets the dtype of all buffers",
        ("data_types.keep_in_fp32_modules",),
        off=(None, []),
    ),
    Feature("sparse gradients of embeddings", "drop the key; dense reduction produces the same values", ("sparse_gradients",)),
    Feature(
        "tensor parallelism",
        "set the size to 0 or 1; zero_optimization.stage 3 shards the weights as well",
        ("tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size"),
        off=(0, 1),
        blocks=("tensor_parallel",),
    ),
    Feature(
        "expert parallelism",
        "drop the key; experts are trained as ordinary parameters at every ZeRO stage",
        ("expert_parallel.enabled", "use_data_before_expert_parallelism"),
        blocks=("expert_parallel",),
    ),
    Feature("sequence parallelism", "set sequence_parallel_size to 1", ("sequence_parallel_size",), off=(1,)),
    Feature(
        "pipeline parallelism",
        'set pipeline.stages to 1 or "auto"; zero_optimization.stage 3 shards the layers as well',
        ("pipeline.stages",),
        off=("auto", 1, "1"),
        blocks=("pipeline",),
    ),
    _block(
        "the hybrid engine for RLHF",
        "set hybrid_engine.enabled to false; generation under torch.no_grad() works at every stage",
        "hybrid_engine",
    ),
    Feature(
        "weight quantization for inference",
        "drop the block weight_quantization, or set its enabled to false",
        ("weight_quantization.enabled", "weight_quantization.quantized_initialization", "weight_quantization.post_init_quant"),
        off=(False, {}),
        blocks=("weight_quantization",),
    ),
    Feature(
        "DeepCompile",
        'set compile.deepcompile to false; {"compile": {"enabled": true}} is torch.compile of each block',
        ("compile.deepcompile",),
        blocks=("compile",),
    ),
    Feature("graph harvesting", 'drop the key; torch.compile(mode="reduce-overhead") captures CUDA graphs', ("graph_harvesting",)),
    Feature(
        "block-sparse attention",
        'drop the block or set its mode to "dense"; FlexAttention of torch supports block masks',
        ("sparse_attention.mode",),
        off=("dense",),
        blocks=("sparse_attention",),
    ),
    _block("the flops profiler", "set it to false; torch.utils.flop_counter counts a forward and backward", "flops_profiler"),
    Feature(
        "data efficiency (curriculum sampling, random-LTD)",
        "set data_efficiency.enabled to false",
        ("data_efficiency.enabled", "data_efficiency.data_sampling.enabled", "data_efficiency.data_routing.enabled"),
        blocks=("data_efficiency",),
    ),
    _block(
        "curriculum learning",
        "set curriculum_learning.enabled to false and cut the sequences in the data loader",
        "curriculum_learning",
    ),
    _block("progressive layer dropping", "set progressive_layer_drop.enabled to false", "progressive_layer_drop"),
    _block("eigenvalue estimation", "set eigenvalue.enabled to false", "eigenvalue", "quantize_training.eigenvalue"),
    Feature(
        "compression (quantization-aware training, pruning, layer reduction)",
        "set the technique's enabled to false",
        (*(f"compression_training.{switch}" for switch in _COMPRESSION), "quantize_training.enabled"),
        blocks=("compression_training", "quantize_training"),
    ),
    _block(
        "monitoring by TensorBoard, Weights & Biases, Comet or CSV",
        "set it to false and log the loss and engine.global_grad_norm from the script",
        *("tensorboard", "wandb", "comet", "csv_monitor"),
    ),
    _block("the communication log", "set it to false; engine.explain() reports the bytes communicated per step", "comms_logger"),
    _block("elastic batch sizes", "set elasticity.enabled to false and restart; checkpoints load at any world size", "elasticity"),
    Feature(
        "checkpoints on node-local disks",
        "set it to false and save to a shared directory",
        ("checkpoint.use_node_local_storage",),
        moot_on_one_host="all ranks share one host and its disk",
    ),
    _block("Nebula checkpoints", "set nebula.enabled to false; checkpoints are already atomic and sharded", "nebula"),
    Feature("DataStates checkpoints", "drop the key; checkpoints are already atomic and sharded", ("datastates_ckpt",)),
    _block("autotuning", "set autotuning.enabled to false; `slipstream plan` estimates memory in advance", "autotuning"),
)


@cache
def table() -> Mapping[str, Key]:
    """Map every schema key (generic dotted name) to its `Key`. Raises KeyError if a key has no class."""
    from slipstream.config.parse import schema_keys

    return MappingProxyType({name: _classify(name) for name in schema_keys()})


def counts() -> Counts:
    fates = [key.fate for key in table().values()]
    return Counts(*(fates.count(fate) for fate in (Fate.HONORED, Fate.NO_EFFECT, Fate.REFUSED)))


def refuse(leaves: Iterable[Leaf], *, one_host: bool) -> None:
    """Raise one ValueError that names every enabled feature that is not built yet."""
    refusals = []
    for leaf in leaves:
        feature = _asked(leaf)
        if feature is not None and not (feature.moot_on_one_host and one_host):
            asked = f"{leaf.path} = {shown(leaf.value)} asks for {feature.what}"
            refusals.append(f"{asked}, which is not built yet; {feature.remedy}")
    if refusals:
        head = "" if len(refusals) == 1 else "the config asks for features that are not built yet:\n- "
        raise ValueError(head + "\n- ".join(refusals))


def without_effect(leaves: Iterable[Leaf]) -> dict[str, str]:
    """Return the keys that the user set without effect, with the reasons. The config must have passed `refuse`."""
    idle = {}
    for leaf in leaves:
        if not leaf.given or leaf.value == leaf.default:
            continue
        key, feature = table()[leaf.key], _asked(leaf)
        if key.fate is Fate.NO_EFFECT:
            idle[leaf.path] = key.reason
        elif feature is not None:
            idle[leaf.path] = feature.moot_on_one_host
    return idle


def _asked(leaf: Leaf) -> Feature | None:
    """Return the feature that a value enables, or None."""
    feature = _switched_by(leaf.key)
    return None if feature is None or leaf.value in feature.off else feature


def say(notes: Iterable[str]) -> None:
    """Log the notes of a plan. `initialize` calls it once, on rank 0."""
    for note in notes:
        logger.warning("config: %s", note)


def say_idle(idle: Mapping[str, str]) -> None:
    """Log the names of the keys without effect in one line, and the reasons for debugging."""
    if idle:
        logger.warning("config: %s", summary(idle))
    for sentence in sentences(idle):
        logger.debug("config: %s", sentence)


def _classify(name: str) -> Key:
    assert not (name in HONORED and name in NO_EFFECT), f"{name} has two classes"
    if name in HONORED:
        return Key(name=name, fate=Fate.HONORED, proof=HONORED[name])
    if name in NO_EFFECT:
        return Key(name=name, fate=Fate.NO_EFFECT, reason=NO_EFFECT[name])
    feature = _switched_by(name) or _set_up_by(name)
    if feature is None:
        raise KeyError(f"config key {name} has no class in keys.py")
    return Key(name=name, fate=Fate.REFUSED, reason=f"{feature.what} is not built yet", remedy=feature.remedy)


def _switched_by(name: str) -> Feature | None:
    if name in HONORED or name in NO_EFFECT:
        return None
    return next((feature for feature in FEATURES if name in feature.switches), None)


def _set_up_by(name: str) -> Feature | None:
    return next((f for f in FEATURES if any(name.startswith(f"{block}.") for block in f.blocks)), None)

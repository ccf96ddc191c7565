"""DeepSpeed's constants, module by module: `TABLES[module][name]` is the value.

A constant names a key of the JSON; NAME_DEFAULT is the key's default. A constant exists even if its feature is not built:
docs/DEEPSPEED_KEYS.md lists what Slipstream does with each key.

[Note: Notation] Each line of the texts below is a prefix (`-` for none) and its entries. `key` defines PREFIX + KEY = "key";
`NAME:key` sets the constant's name; `=value`, JSON without spaces, also defines NAME_DEFAULT.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import timedelta
from enum import StrEnum
from typing import Any


def _read(text: str) -> dict[str, Any]:
    """Parse a text of constants ([Note: Notation])."""
    values: dict[str, Any] = {}
    for line in text.strip().splitlines():
        prefix, *entries = line.split()
        for entry in entries:
            left, has_default, default = entry.partition("=")
            explicit, _, key = left.rpartition(":")
            name = explicit or (key if prefix == "-" else prefix + key).upper()
            values[name] = key
            if has_default:
                values[f"{name}_DEFAULT"] = json.loads(default)
    return values


class ValidationMode:
    WARN = "WARN"
    IGNORE = "IGNORE"
    FAIL = "FAIL"


OffloadDeviceEnum = StrEnum("OffloadDeviceEnum", ["none", "cpu", "nvme"])
# What `engine.offload_states(include=)` accepts
OffloadStateTypeEnum = StrEnum(
    "OffloadStateTypeEnum", ["optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer"]
)

_RUNTIME = _read("""
ROUTE_ train eval predict encode
- train_batch_size=null optimizer type scheduler max_grad_norm zero_allow_untested_optimizer=false steps_per_print=null
- zero_force_ds_cpu_optimizer=true train_micro_batch_size_per_gpu=null gradient_accumulation_steps=null OPTIMIZER_PARAMS:params
- managed_gradient_accumulation=true legacy_fusion=false SCHEDULER_PARAMS:params BFLOAT16:bf16 BFLOAT16_OLD:bfloat16 fp16
- check_overflow torch_autocast gradient_clipping=1.0 communication_data_type=null data_types checkpoint
- seq_parallel_communication_data_type="fp32" prescale_gradients=false gradient_predivide_factor=1.0 gradient_allreduce_op="mean"
- disable_allgather=false dump_state=false disable_python_gc=false vocabulary_size=null wall_clock_breakdown=false
- memory_breakdown=false grad_accum_dtype=null param_dtype=null buffer_dtype=null keep_in_fp32_modules="auto"
- dataloader_drop_last=false PIPE_REPLICATED:ds_pipe_replicated data_parallel_group global_rank log_level=null
- USE_DATA_BEFORE_EXPERT_PARALLEL:use_data_before_expert_parallelism=false LOAD_UNIVERSAL_CHECKPOINT:load_universal=false
- USE_NODE_LOCAL_STORAGE_CHECKPOINT:use_node_local_storage=false DDP_BFLOAT16:ddp_bf16
GRADIENT_ALLREDUCE_OP_ mean sum
BFLOAT16_ enabled=false immediate_grad_update=true
- BFLOAT16_MASTER_WEIGHTS_AND_GRADS:bf16_master_weights_and_grads=false BFLOAT16_OPTIMIZER_STATES:bf16_optimizer_states=false
FP16_ enabled=false auto_cast=false loss_scale=0 initial_scale_power=16 loss_scale_window=1000 hysteresis=2 min_loss_scale=1
FP16_ consecutive_hysteresis=false FP16_MASTER_WEIGHTS_AND_GRADS:fp16_master_weights_and_grads=false
TORCH_AUTOCAST_ enabled=false dtype lower_precision_safe_modules
CHECKPOINT_ tag_validation="WARN" parallel_write CHECKPOINT_PARALLEL_WRITE_PIPELINE_STAGE:pipeline_stage=false
""")
_RUNTIME |= {
    "OPTIMIZER_TYPE_DEFAULT": None,
    "SCHEDULER_TYPE_DEFAULT": None,
    "BFLOAT16_CHECK_OVERFLOW_DEFAULT": False,
    "GRADIENT_ALLREDUCE_OP_SUPPORTED": ("mean", "sum"),
    "CHECKPOINT_TAG_VALIDATION_MODES": ["WARN", "IGNORE", "FAIL"],
    "ValidationMode": ValidationMode,
}

_DATA_PIPELINE = _read("""
DATA_EFFICIENCY_ DATA_EFFICIENCY:data_efficiency enabled=false seed=1234
DATA_SAMPLING_ DATA_SAMPLING:data_sampling enabled=false num_epochs=1000 num_workers=0 pin_memory=false
CURRICULUM_LEARNING_ CURRICULUM_LEARNING:curriculum_learning enabled=false clustering_type difficulty_type min_difficulty
CURRICULUM_LEARNING_ max_difficulty schedule_type schedule_config current_difficulty batch consumed_samples current_difficulties
CURRICULUM_LEARNING_ data_cluster_paths data_cluster_current_position np_rng_state CURRICULUM_LEARNING_STEP:curriculum_step
CURRICULUM_LEARNING_ CURRICULUM_LEARNING_CLUSTER_PATH:data_cluster_path CURRICULUM_LEARNING_METRICS:curriculum_metrics
CURRICULUM_LEARNING_ CURRICULUM_LEARNING_SAMPLE_PATH:index_to_sample_path CURRICULUM_LEARNING_METRIC_PATH:index_to_metric_path
CURRICULUM_LEARNING_ CURRICULUM_LEARNING_SINGLE_CLUSTER:single_cluster CURRICULUM_LEARNING_CLUSTER_PREFIX:cluster
CURRICULUM_LEARNING_ CURRICULUM_LEARNING_VALUE_BASED:value CURRICULUM_LEARNING_PERCENTILE_BASED:percentile
CURRICULUM_LEARNING_SCHEDULE_ difficulty max_step CURRICULUM_LEARNING_SCHEDULE_TOTAL_STEP:total_curriculum_step difficulty_step
CURRICULUM_LEARNING_SCHEDULE_ root_degree fixed_discrete fixed_root fixed_linear custom
DYNAMIC_BATCHING_ DYNAMIC_BATCHING:dynamic_batching enabled=false metrics_path lr_scaling_method="linear" min_batch_size=1
DYNAMIC_BATCHING_ max_batch_size=null sequence_picking_order="dataloader" max_tokens verbose
DATA_ROUTING_ DATA_ROUTING:data_routing enabled=false
RANDOM_LTD_ RANDOM_LTD:random_ltd enabled=false model_mask_name model_type micro_batch_size global_batch_size attention_mask
RANDOM_LTD_ RANDOM_LTD_SAMPLE_INDEX:sample_idx hidden_state_order RANDOM_LTD_LAYER_NUM:random_ltd_layer_num total_layer_num
RANDOM_LTD_ RANDOM_LTD_LAYER_ID:random_ltd_layer_id consumed_layer_tokens RANDOM_LTD_SCHEDULER:random_ltd_schedule max_value
RANDOM_LTD_ min_value RANDOM_LTD_CURRENT_VALUE:current_value schedule_config RANDOM_LTD_INCREASE_STEP:seq_per_step
RANDOM_LTD_ RANDOM_LTD_REQUIRE_STEP:require_steps RANDOM_LTD_SCHEDULER_TYPE:schedule_type RANDOM_LTD_CURR_STEP:current_steps
RANDOM_LTD_ layer_token_lr_schedule RANDOM_LTD_LAYER_TOKEN_LR_ENABLED:enabled=false total_layer_tokens warmup_type
RANDOM_LTD_ warmup_layer_tokens
""")

_OPTIMIZERS = _read("""
- ADAGRAD_OPTIMIZER:adagrad ADAM_OPTIMIZER:adam ADAMW_OPTIMIZER:adamw LAMB_OPTIMIZER:lamb ONEBIT_ADAM_OPTIMIZER:onebitadam
- ONEBIT_LAMB_OPTIMIZER:onebitlamb ZERO_ONE_ADAM_OPTIMIZER:zerooneadam MUADAM_OPTIMIZER:muadam MUADAMW_OPTIMIZER:muadamw
- MUSGD_OPTIMIZER:musgd LION_OPTIMIZER:lion MUON_OPTIMIZER:muon
""")
_CONFIG = _read("- EXPERT_PARALLEL:expert_parallel TORCH_ADAM_PARAM:torch_adam adam_w_mode=true")
_CONFIG |= {**_OPTIMIZERS, "DEEPSPEED_OPTIMIZERS": list(_OPTIMIZERS.values()), "TENSOR_CORE_ALIGN_SIZE": 8}

_SCHEDULES = _read("""
- lr_schedule LR_RANGE_TEST:LRRangeTest ONE_CYCLE:OneCycle WARMUP_LR:WarmupLR WARMUP_DECAY_LR:WarmupDecayLR
- WARMUP_COSINE_LR:WarmupCosineLR edge_value mid_value decay_step_size decay_lr_rate decay_mom_rate cos_min_ratio total_num_steps
LR_RANGE_TEST_ LR_RANGE_TEST_MIN_LR:lr_range_test_min_lr LR_RANGE_TEST_STEP_RATE:lr_range_test_step_rate
LR_RANGE_TEST_ LR_RANGE_TEST_STEP_SIZE:lr_range_test_step_size LR_RANGE_TEST_STAIRCASE:lr_range_test_staircase
- cycle_first_step_size cycle_first_stair_count cycle_second_step_size cycle_second_stair_count cycle_min_lr cycle_max_lr
- cycle_min_mom cycle_max_mom warmup_min_lr warmup_max_lr warmup_num_steps warmup_type warmup_min_ratio WARMUP_LOG_RATE:log
- WARMUP_LINEAR_RATE:linear
""")
_SCHEDULES["VALID_LR_SCHEDULES"] = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]

_SCALER = _read("- INITIAL_LOSS_SCALE:init_scale scale_window delayed_shift consecutive_hysteresis MIN_LOSS_SCALE:min_scale")

_ACTIVATIONS = _read("""
ACT_CHKPT_ ACT_CHKPT:activation_checkpointing partition_activations=false number_checkpoints=null cpu_checkpointing=false
ACT_CHKPT_ contiguous_memory_optimization=false synchronize_checkpoint_boundary=false profile=false
""")
_ACTIVATIONS["ACT_CHKPT_DEFAULT"] = {
    key: _ACTIVATIONS[f"{name}_DEFAULT"] for name, key in _ACTIVATIONS.items() if f"{name}_DEFAULT" in _ACTIVATIONS
}
_AIO = _read("""
AIO_ AIO:aio block_size=1048576 queue_depth=8 intra_op_parallelism=1 single_submit=false overlap_events=true use_gds=false
""")
_FLOPS = _read("""
FLOPS_PROFILER_ FLOPS_PROFILER:flops_profiler enabled=false recompute_fwd_factor=0.0 profile_step=1 module_depth=-1 top_modules=1
FLOPS_PROFILER_ detailed=true output_file=null
""")
_COMMS = _read("""
COMMS_LOGGER_ COMMS_LOGGER:comms_logger enabled=false verbose=false prof_all=true debug=false prof_ops=[]
- NCCL_BACKEND:nccl CCL_BACKEND:ccl MPI_BACKEND:mpi GLOO_BACKEND:gloo SCCL_BACKEND:sccl HCCL_BACKEND:hccl
- DEFAULT_AML_MASTER_PORT:54965 DEFAULT_AML_NCCL_SOCKET_IFNAME:^docker0,lo
""")

_CHECKPOINT = _read("""
- optimizer_state_dict fp32_groups fp32_flat_groups base_optimizer_state base_optimizer_state_step param_groups group_paddings
- single_partition_of_fp32_groups param_alignment_paddings partition_count zero_stage clip_grad FP32_WEIGHT_KEY:fp32 loss_scaler
- param param_shapes buffer_names frozen_param_shapes frozen_param_fragments MODEL_FILE_PREFIX:mp_rank_ LAYER_FILE_PREFIX:layer_
- ZERO_FILE_PREFIX:zero_pp_rank_ OPTIM_FILE_SUFFIX:_optim_states.pt MODEL_FILE_SUFFIX:_model_states.pt ds_version cat_dim
- BF16_ZERO_FILE_PREFIX:bf16_zero_pp_rank_ FP16_ZERO_FILE_PREFIX:fp16_zero_pp_rank_ universal_checkpoint_info vocab_tensor
- CHECKPOINT_PARALLEL_DIMS:checkpoint_parallel_dimensions CHECKPOINT_PP_DEGREE:pp_degree CHECKPOINT_TP_DEGREE:tp_degree
- UNIVERSAL_CHECKPOINT_VERSION_KEY:universal_checkpoint_version padded_vocab_size original_vocab_size param_slice_mappings
- param_n_sub_params sub_param_shape vocabulary_parameter_patterns pipeline_replicated_parameter_patterns sub_params_shape
- parameter_to_average_patterns parameter_with_row_parallelism_patterns tp_replicated_parameter_patterns sub_param_shard_widths
- parameter_with_2_sub_params_cat_dim_0 parameter_with_sub_params
""")
_CHECKPOINT["UNIVERSAL_CHECKPOINT_VERSION_VALUE"] = 0.4

_SAVING = _read("""
CHECKPOINT_ writer CHECKPOINT_WRITER_TYPE:type io_buffer_size=67108864 io_buffer_double=true io_multiplier=1 data_parallel=null
CHECKPOINT_ CHECKPOINT_WRITER_DECOUPLED:decoupled=false CHECKPOINT_IO_STATISTICS:show_statistics=false
""")

_GENERAL = _read("- INFERENCE_GENERIC_MODE:generic INFERENCE_SPECIALIZED_MODE:specialized")
_GENERAL |= {
    "TORCH_DISTRIBUTED_DEFAULT_PORT": 29500,
    "default_pg_timeout": timedelta(minutes=int(os.environ.get("DEEPSPEED_TIMEOUT", "10"))),
    "CROSS_RANK": "CROSS_RANK",
    "CROSS_SIZE": "CROSS_SIZE",
    "LOCAL_RANK": "LOCAL_RANK",
}

_EXPERT_BLOCKS = (
    "mixtral.modeling_mixtral.Mixtral",
    "qwen2_moe.modeling_qwen2_moe.Qwen2Moe",
    "qwen3_moe.modeling_qwen3_moe.Qwen3Moe",
)

TABLES: Mapping[str, Mapping[str, Any]] = {
    "deepspeed": {"TORCH_DISTRIBUTED_DEFAULT_PORT": 29500, "MUON_OPTIMIZER": "muon"},
    "deepspeed.constants": _GENERAL,
    "deepspeed.runtime.constants": _RUNTIME,
    "deepspeed.runtime.config": {**_RUNTIME, **_DATA_PIPELINE, **_CONFIG},
    "deepspeed.runtime.engine": {name: _CONFIG[name] for name in (*_OPTIMIZERS, "DEEPSPEED_OPTIMIZERS", "TORCH_ADAM_PARAM")},
    "deepspeed.runtime.data_pipeline.constants": _DATA_PIPELINE,
    "deepspeed.runtime.model_checkpointing.constants": _SAVING,
    "deepspeed.runtime.lr_schedules": _SCHEDULES,
    "deepspeed.runtime.fp16.loss_scaler": _SCALER,
    "deepspeed.runtime.zero.config": {
        "ZERO_OPTIMIZATION": "zero_optimization",
        "OffloadDeviceEnum": OffloadDeviceEnum,
        "OffloadStateTypeEnum": OffloadStateTypeEnum,
    },
    "deepspeed.runtime.zero.leaf_module_config": {
        "DEFAULT_LEAF_MODULE_CLASSES": [f"transformers.models.{name}SparseMoeBlock" for name in _EXPERT_BLOCKS],
        "DEFAULT_LEAF_MODULE_NAMES": [],
        "DEFAULT_LEAF_MODULE_NAME_SUFFIXES": [],
    },
    "deepspeed.runtime.precision_config": {"FP16": "fp16", "BFLOAT16": "bf16", "BFLOAT16_OLD": "bfloat16", **_SCALER},
    "deepspeed.runtime.activation_checkpointing.config": _ACTIVATIONS,
    "deepspeed.runtime.swap_tensor.constants": _AIO,
    "deepspeed.profiling.constants": _FLOPS,
    "deepspeed.comm.constants": _COMMS,
    "deepspeed.checkpoint.constants": _CHECKPOINT,
}

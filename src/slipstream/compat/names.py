"""Tables of DeepSpeed 0.19.8's names: where each is implemented, and what is missing and why.

docs/DEEPSPEED_KEYS.md contains these tables; a test compares them and imports every name. docs/COMING_FROM_DEEPSPEED.md has what
behaves differently.
"""

from __future__ import annotations

from collections.abc import Mapping

_PATTERNS = (
    "BSLongformerSparsityConfig BigBirdSparsityConfig DenseSparsityConfig FixedSparsityConfig LocalSlidingWindowSparsityConfig "
    "SparsityConfig VariableSparsityConfig"
)

_ELASTIC_ERRORS = "ElasticityConfigError ElasticityError ElasticityIncompatibleWorldSize"

_RAGGED = "DeepSpeedTPConfig InferenceEngineV2 RaggedInferenceEngineConfig build_hf_engine"
_ROLLOUTS = "RolloutBatch RolloutEngine RolloutRequest SamplingConfig"
_DISTILLATION = "JSDLossOutput ResponseTokenBatch generalized_jsd_loss"
_STATE_MANAGER = "AllocationMode DSStateManagerConfig MemoryConfig"

# module of DeepSpeed -> {module of Slipstream: names in it}
SERVED: Mapping[str, Mapping[str, str]] = {
    "deepspeed": {
        "slipstream.parallel.module": "PipelineModule",
        "slipstream.compat.engine": "DeepSpeedConfigError DeepSpeedEngine PipelineEngine initialize",
        "slipstream.compat.comm": "init_distributed",
        "slipstream.compat.accelerator": "get_accelerator",
        "slipstream.compat.config": "DeepSpeedConfig",
        "slipstream.compat.handles": "DeepSpeedOptimizer",
        "slipstream.compat.utils": "OnDevice log_dist logger",
        "slipstream.compat.versions": "git_branch git_hash",
        "slipstream.compat.inference": "InferenceEngine init_inference",
        "slipstream.compat.rollout": "DeepSpeedHybridEngine",
        "slipstream": "add_config_arguments",
        "slipstream.parallel.slicing": "tp_model_init",
        "slipstream.fused": "DeepSpeedTransformerConfig DeepSpeedTransformerLayer replace_transformer_layer",
    },
    "deepspeed.inference.engine": {"slipstream.compat.inference": "InferenceEngine"},
    "deepspeed.inference.quantization.quantization": {"slipstream.compat.zero": "_init_group_wise_weight_quantization"},
    "deepspeed.inference.config": {"slipstream.compat.inference": "DeepSpeedInferenceConfig"},
    "deepspeed.ops.transformer": {"slipstream.fused": "DeepSpeedTransformerConfig DeepSpeedTransformerLayer"},
    "deepspeed.ops.transformer.transformer": {"slipstream.fused": "DeepSpeedTransformerConfig DeepSpeedTransformerLayer"},
    "deepspeed.module_inject": {"slipstream.fused": "replace_transformer_layer"},
    "deepspeed.runtime": {"slipstream.compat.handles": "DeepSpeedOptimizer ZeROOptimizer"},
    "deepspeed.runtime.hybrid_engine": {"slipstream.compat.rollout": "DeepSpeedHybridEngine"},
    "deepspeed.runtime.rollout": {
        "slipstream.compat.rollout": f"HybridEngineRollout {_DISTILLATION} {_ROLLOUTS} RolloutConfig build_rollout"
    },
    "deepspeed.runtime.rollout.base": {"slipstream.compat.rollout": _ROLLOUTS},
    "deepspeed.runtime.rollout.hybrid_engine_rollout": {
        "slipstream.compat.rollout": "HybridEngineRollout HybridEngineRolloutConfig"
    },
    "deepspeed.runtime.rollout.distillation": {"slipstream.compat.rollout": _DISTILLATION},
    "deepspeed.runtime.base_optimizer": {"slipstream.compat.handles": "DeepSpeedOptimizer ZeROOptimizer"},
    "deepspeed.runtime.config": {
        "slipstream.compat.engine": "DeepSpeedConfigError",
        "slipstream.compat.config": "DeepSpeedConfig DeepSpeedConfigModel DtypeEnum HybridEngineConfig",
    },
    "deepspeed.runtime.sequence_parallel.ulysses_sp": {
        "slipstream.compat.sequence": "TiledFusedLogitsLoss TiledMLP UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter "
        "sequence_tiled_compute"
    },
    "deepspeed.ops.sparse_attention": {
        "slipstream.attention": "BertSparseSelfAttention MatMul Softmax SparseAttentionUtils SparseSelfAttention " + _PATTERNS
    },
    "deepspeed.ops.sparse_attention.sparsity_config": {"slipstream.attention": _PATTERNS},
    "deepspeed.ops.sparse_attention.sparse_self_attention": {"slipstream.attention": "SparseSelfAttention"},
    "deepspeed.ops.sparse_attention.bert_sparse_self_attention": {"slipstream.attention": "BertSparseSelfAttention"},
    "deepspeed.ops.sparse_attention.sparse_attention_utils": {"slipstream.attention": "SparseAttentionUtils"},
    "deepspeed.ops.sparse_attention.matmul": {"slipstream.attention": "MatMul"},
    "deepspeed.ops.sparse_attention.softmax": {"slipstream.attention": "Softmax"},
    "deepspeed.elasticity": {
        "slipstream.config.elastic": "compute_elastic_config elasticity_enabled ensure_immutable_elastic_config " + _ELASTIC_ERRORS
    },
    "deepspeed.elasticity.elasticity": {
        "slipstream.config.elastic": "compute_elastic_config elasticity_enabled ensure_immutable_elastic_config"
    },
    "deepspeed.elasticity.config": {"slipstream.config.elastic": _ELASTIC_ERRORS},
    "deepspeed.inference": {"slipstream.compat.ragged": _RAGGED},
    "deepspeed.inference.v2": {"slipstream.compat.ragged": _RAGGED},
    "deepspeed.inference.v2.engine_v2": {"slipstream.compat.ragged": "InferenceEngineV2"},
    "deepspeed.inference.v2.engine_factory": {"slipstream.compat.ragged": "build_hf_engine"},
    "deepspeed.inference.v2.config_v2": {
        "slipstream.compat.ragged": "DeepSpeedTPConfig QuantizationConfig RaggedInferenceEngineConfig"
    },
    "deepspeed.inference.v2.scheduling_utils": {"slipstream.compat.ragged": "SchedulingError SchedulingResult"},
    "deepspeed.inference.v2.ragged": {"slipstream.compat.ragged": _STATE_MANAGER},
    "deepspeed.inference.v2.ragged.manager_configs": {"slipstream.compat.ragged": _STATE_MANAGER},
    "deepspeed.compression": {"slipstream.compression": "init_compression redundancy_clean"},
    "deepspeed.compression.compress": {"slipstream.compression": "init_compression redundancy_clean student_initialization"},
    "deepspeed.compression.helper": {
        "slipstream.compression": "convert_conv1d_to_linear",
        "slipstream.compat.compression": "fix_compression is_module_compressible module_replacement recursive_getattr "
        "recursive_setattr",
    },
    "deepspeed.compression.scheduler": {"slipstream.compression": "compression_scheduler"},
    "deepspeed.compression.utils": {
        "slipstream.compression": "AsymQuantizer BinaryQuantizer SymQuantizer TernaryQuantizer TopKBinarizer"
    },
    "deepspeed.compression.basic_layer": {
        "slipstream.compression": "BNLayer_Compress Conv2dLayer_Compress Embedding_Compress LinearLayer_Compress QuantAct",
        "slipstream.compat.compression": "ColumnParallelLinear_Compress RowParallelLinear_Compress",
    },
    "deepspeed.runtime.quantize": {"slipstream.compat.compression": "Quantizer"},
    "deepspeed.runtime.data_pipeline.curriculum_scheduler": {"slipstream.data": "CurriculumScheduler"},
    "deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset": {
        "slipstream.data.indexed": "MMapIndexedDataset MMapIndexedDatasetBuilder code data_file_path dataset_exists "
        "index_file_path make_builder make_dataset"
    },
    "deepspeed.runtime.data_pipeline.data_sampling.utils": {
        "slipstream.data.indexed": "close_mmap_dataset_builder create_mmap_dataset_builder find_fit_int_dtype",
        "slipstream.data.analyze": "split_dataset split_index",
    },
    "deepspeed.runtime.data_pipeline.data_sampling.data_analyzer": {"slipstream.data": "DataAnalyzer DistributedDataAnalyzer"},
    "deepspeed.runtime.data_pipeline.data_sampling.data_sampler": {"slipstream.compat.data_sampler": "DeepSpeedDataSampler"},
    "deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr": {
        "slipstream.data.batching": "VariableBatchSizeLR batch_by_seqlens lr_scheduler_for_variable_batch_size scale_lr",
        "slipstream.train.loaders": "get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed",
    },
    "deepspeed.runtime.data_pipeline.data_routing.helper": {
        "slipstream.train.random_ltd": "convert_to_random_ltd remove_random_ltd_state_dict save_without_random_ltd"
    },
    "deepspeed.runtime.data_pipeline.data_routing.basic_layer": {"slipstream.train.random_ltd": "RandomLayerTokenDrop"},
    "deepspeed.runtime.data_pipeline.data_routing.scheduler": {"slipstream.train.random_ltd": "RandomLTDScheduler"},
    "deepspeed.runtime.eigenvalue": {"slipstream.compression.eigenvalue": "Eigenvalue"},
    "deepspeed.runtime.progressive_layer_drop": {"slipstream.train.layer_drop": "ProgressiveLayerDrop"},
    "deepspeed.sequence.layer": {"slipstream.compat.sequence": "DistributedAttention _SeqAllToAll"},
    "deepspeed.runtime.config_utils": {
        "slipstream.compat.config": "DeepSpeedConfigModel DeepSpeedConfigObject "
        "dict_raise_error_on_duplicate_keys get_config_default get_dict_param get_list_param get_scalar_param"
    },
    "deepspeed.runtime.precision_config": {
        "slipstream.compat.config": "DeepSpeedBF16Config DeepSpeedFP16Config get_bfloat16_config get_float16_config"
    },
    "deepspeed.runtime.zero.config": {
        "slipstream.compat.config": "DeepSpeedZeroConfig DeepSpeedZeroLeafModuleConfig DeepSpeedZeroOffloadOptimizerConfig "
        "DeepSpeedZeroOffloadParamConfig ZeroStageEnum get_zero_config",
        "slipstream.compat.enums": "OffloadDeviceEnum",
    },
    "deepspeed.runtime.zero.leaf_module_config": {"slipstream.compat.config": "DeepSpeedZeroLeafModuleConfig"},
    "deepspeed.runtime.swap_tensor.aio_config": {"slipstream.compat.config": "get_aio_config"},
    "deepspeed.runtime.activation_checkpointing.config": {"slipstream.compat.config": "DeepSpeedActivationCheckpointingConfig"},
    "deepspeed.profiling.flops_profiler": {"slipstream.observe.profile": "FlopsProfiler get_model_profile number_to_string"},
    "deepspeed.utils.timer": {"slipstream.compat.timers": "SynchronizedWallClockTimer ThroughputTimer trim_mean"},
    "deepspeed.profiling.config": {"slipstream.compat.config": "DeepSpeedFlopsProfilerConfig"},
    "deepspeed.comm.config": {"slipstream.compat.config": "CommsLoggerConfig DeepSpeedCommsConfig"},
    "deepspeed.compile.config": {"slipstream.compat.config": "CompileConfig"},
    "deepspeed.monitor.config": {
        "slipstream.compat.config": "CSVConfig CometConfig DeepSpeedMonitorConfig TensorBoardConfig WandbConfig get_monitor_config"
    },
    "deepspeed.monitor.monitor": {"slipstream.observe.monitors": "MonitorMaster"},
    "deepspeed.monitor.tensorboard": {"slipstream.compat.monitors": "TensorBoardMonitor"},
    "deepspeed.monitor.wandb": {"slipstream.compat.monitors": "WandbMonitor"},
    "deepspeed.monitor.csv_monitor": {"slipstream.compat.monitors": "csvMonitor"},
    "deepspeed.monitor.comet": {"slipstream.compat.monitors": "CometMonitor"},
    "deepspeed.utils.config": {"slipstream.compat.config": "DeepSpeedThroughputTimerConfig get_timers_config"},
    "deepspeed.runtime.engine": {
        "slipstream.compat.engine": "DeepSpeedEngine",
        "slipstream.compat.sparse": "split_half_float_double_sparse",
    },
    "deepspeed.runtime.sparse_tensor": {"slipstream.compat.sparse": "SparseTensor"},
    "deepspeed.runtime.comm.coalesced_collectives": {
        "slipstream.compat.collectives": "all_to_all_quant_reduce reduce_scatter_coalesced"
    },
    "deepspeed.runtime.zero": {
        "slipstream.compat.zero": "GatheredParameters Init MiCS_Init ZeroParamStatus ZeroParamType register_external_parameter "
        "unregister_external_parameter unwrap_model_for_generation",
        "slipstream.compat.estimates": "estimate_zero3_model_states_mem_needs_all_cold "
        "estimate_zero3_model_states_mem_needs_all_live",
        "slipstream.activations.tiled": "TiledLinear",
    },
    "deepspeed.runtime.zero.partition_parameters": {
        "slipstream.compat.zero": "GatheredParameters Init ZeroParamStatus ZeroParamType is_zero_param register_external_parameter "
        "restore_init_context shutdown_init_context zero_wrapper_for_fp_tensor_constructor"
    },
    "deepspeed.runtime.zero.utils": {"slipstream.compat.zero": "ZeRORuntimeException apply_to_tensors_only is_zero_param"},
    "deepspeed.runtime.zero.offload_config": {
        "slipstream.compat.enums": "OffloadDeviceEnum OffloadStateTypeEnum",
        "slipstream.compat.config": "DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig",
    },
    "deepspeed.runtime.zero.stage_1_and_2": {
        "slipstream.compat.handles": "DeepSpeedZeroOptimizer",
        "slipstream.compat.estimates": "estimate_zero2_model_states_mem_needs_all_cold "
        "estimate_zero2_model_states_mem_needs_all_live model_to_params",
    },
    "deepspeed.runtime.zero.stage3": {
        "slipstream.compat.estimates": "estimate_zero3_model_states_mem_needs_all_cold "
        "estimate_zero3_model_states_mem_needs_all_live model_to_params",
        "slipstream.compat.handles": "DeepSpeedZeroOptimizer_Stage3",
        "slipstream.compat.zero": "unwrap_model_for_generation",
    },
    "deepspeed.runtime.bf16_optimizer": {"slipstream.compat.handles": "BF16_Optimizer"},
    "deepspeed.runtime.fp16.fused_optimizer": {"slipstream.compat.handles": "FP16_Optimizer"},
    "deepspeed.runtime.fp16.unfused_optimizer": {"slipstream.compat.handles": "FP16_UnfusedOptimizer"},
    "deepspeed.runtime.lr_schedules": {
        "slipstream.compat.schedules": "LRRangeTest OneCycle WarmupCosineLR WarmupDecayLR WarmupLR add_tuning_arguments "
        "get_config_from_args parse_arguments"
    },
    "deepspeed.runtime.dataloader": {"slipstream.compat.handles": "DeepSpeedDataLoader", "slipstream": "RepeatingLoader"},
    "deepspeed.runtime.fp16.loss_scaler": {"slipstream.compat.pickled": "DynamicLossScaler LossScaler LossScalerBase"},
    "deepspeed.runtime.pipe.schedule": {
        "slipstream.compat.pipe_schedules": "BackwardPass BufferOpInstruction CommitP2P DataParallelSchedule DualPipeVSchedule "
        "ForwardPass InferenceSchedule LoadMicroBatch OptimizerStep PipeInstruction PipeSchedule RecvActivation RecvGrad "
        "ReduceGrads ReduceTiedGrads SendActivation SendGrad TrainSchedule"
    },
    "deepspeed.runtime.utils": {
        "slipstream.compat.utils": "copy_to_device move_to_device see_memory_usage set_random_seed",
        "slipstream.compat.runtime_utils": "call_to_str clip_grad_norm_ clip_tensors_by_global_norm empty_cache get_global_norm "
        "get_global_norm_of_tensors get_ma_status get_tensor_bytes get_weight_norm has_inf_or_nan is_invalid_grad_norm "
        "is_model_parallel_parameter mask_nan_or_inf_with_val_inplace maybe_loss_for_backward noop_context",
        "slipstream.parallel.layers": "partition_balanced partition_uniform prefix_sum_inc",
    },
    "deepspeed.runtime.activation_checkpointing.checkpointing": {
        "slipstream.compat.checkpointing": "CudaRNGStatesTracker checkpoint configure get_cuda_rng_tracker is_configured "
        "model_parallel_cuda_manual_seed model_parallel_reconfigure_tp_seed non_reentrant_checkpoint reset"
    },
    "deepspeed.comm": {
        "slipstream.compat.comm": "allgather_fn configure get_all_ranks_from_group get_global_rank get_local_rank get_rank "
        "get_world_group get_world_size has_all_gather_into_tensor has_reduce_scatter_tensor inference_all_reduce init_distributed "
        "initialize_mesh_device is_available is_initialized log_summary new_group reduce_scatter_fn"
    },
    "deepspeed.utils": {
        "slipstream.compat.pickled": "fragment_address",
        "slipstream.compat.utils": "OnDevice get_z3_leaf_modules instrument_w_nvtx log_dist logger see_memory_usage "
        "set_log_level_from_string "
        "set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix unset_z3_leaf_modules "
        "z3_leaf_module z3_leaf_parameter",
        "slipstream.compat.fragments": "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state "
        "safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state safe_set_full_fp32_param safe_set_full_grad "
        "safe_set_full_optimizer_state safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state "
        "safe_update_full_grad_vectorized",
        "slipstream": "RepeatingLoader",
    },
    "deepspeed.utils.torch": {
        "slipstream.compat.versions": "is_functorch_transforming jit_script_compat register_grad_hook required_torch_version"
    },
    "deepspeed.git_version_info": {
        "slipstream.compat.versions": "accelerator_name git_branch git_hash installed_ops torch_info version"
    },
    "deepspeed.utils.nvtx": {"slipstream.compat.utils": "instrument_w_nvtx"},
    "deepspeed.utils.logging": {"slipstream.compat.utils": "log_dist logger set_log_level_from_string"},
    "deepspeed.moe.layer": {"slipstream.compat.moe": "MoE"},
    "deepspeed.moe.sharded_moe": {"slipstream.compat.moe": "MOELayer TopKGate"},
    "deepspeed.moe.utils": {
        "slipstream.compat.moe": "configure_moe_param_groups has_moe_layers is_moe_param is_moe_param_group "
        "split_params_grads_into_shared_and_expert_params split_params_into_different_moe_groups_for_optimizer "
        "split_params_into_shared_and_expert_params"
    },
    "deepspeed.utils.groups": {
        "slipstream.compat.groups": "_create_expert_and_data_parallel _get_broadcast_src_rank _get_data_parallel_group "
        "_get_data_parallel_rank "
        "_get_data_parallel_world_size _get_expert_broadcast_src_rank _get_expert_parallel_src_rank "
        "_get_expert_data_parallel_group _get_expert_data_parallel_group_dict _get_expert_data_parallel_group_ranks "
        "_get_expert_data_parallel_rank _get_expert_data_parallel_world_size _get_expert_model_parallel_world_size "
        "_get_expert_parallel_group _get_expert_parallel_group_dict _get_expert_parallel_group_ranks _get_expert_parallel_rank "
        "_get_expert_parallel_world_size _get_max_expert_parallel_group _get_max_expert_size _get_max_expert_size_name "
        "_get_model_parallel_group _get_model_parallel_world_size _get_sequence_data_parallel_group "
        "_get_sequence_data_parallel_rank _get_sequence_data_parallel_world_size _get_sequence_parallel_group "
        "_get_sequence_parallel_rank _get_sequence_parallel_world_size get_data_parallel_group get_data_parallel_rank "
        "get_data_parallel_world_size get_model_parallel_group get_model_parallel_rank get_model_parallel_world_size "
        "get_tensor_model_parallel_group get_tensor_model_parallel_rank get_tensor_model_parallel_world_size"
    },
    "deepspeed.utils.zero_to_fp32": {
        "slipstream.compat.weights": "convert_zero_checkpoint_to_fp32_state_dict get_fp32_state_dict_from_zero_checkpoint "
        "load_state_dict_from_zero_checkpoint"
    },
    "deepspeed.checkpoint.utils": {"slipstream.compat.weights": "clone_tensors_for_torch_save"},
    "deepspeed.ops.adam": {"slipstream.compat.optimizers": "DeepSpeedCPUAdam FusedAdam"},
    "deepspeed.ops.adagrad": {"slipstream.compat.optimizers": "DeepSpeedCPUAdagrad"},
    "deepspeed.ops.lion": {"slipstream.compat.optimizers": "DeepSpeedCPULion FusedLion"},
    "deepspeed.ops.lamb": {"slipstream.compat.optimizers": "FusedLamb"},
    "deepspeed.runtime.fp16.onebit.adam": {"slipstream.compat.optimizers": "OnebitAdam"},
    "deepspeed.runtime.fp16.onebit.zoadam": {"slipstream.compat.optimizers": "ZeroOneAdam"},
    "deepspeed.runtime.fp16.onebit.lamb": {"slipstream.compat.optimizers": "OnebitLamb"},
    "deepspeed.runtime.fp16.onebit": {"slipstream.compat.optimizers": "OnebitAdam OnebitLamb ZeroOneAdam"},
    "deepspeed.ops": {"slipstream.compat.op_builders": "__compatible_ops__"},
    "deepspeed.ops.op_builder": {
        "slipstream.compat.op_builders": "ALL_OPS AsyncIOBuilder CCLCommBuilder CPUAdagradBuilder CPUAdamBuilder CPULionBuilder "
        "CUDAOpBuilder DeepCompileBuilder EvoformerAttnBuilder FPQuantizerBuilder FusedAdamBuilder FusedLambBuilder "
        "FusedLionBuilder GDSBuilder InferenceBuilder InferenceCoreBuilder InferenceCutlassBuilder NotImplementedBuilder OpBuilder "
        "PinMemoryBuilder QuantizerBuilder RaggedOpsBuilder RaggedUtilsBuilder RandomLTDBuilder ShareMemCommBuilder "
        "SparseAttnBuilder SpatialInferenceBuilder StochasticTransformerBuilder TransformerBuilder UtilsBuilder"
    },
    "deepspeed.accelerator": {
        "slipstream.compat.accelerator": "DeepSpeedAccelerator get_accelerator is_current_accelerator_supported set_accelerator"
    },
    "deepspeed.pipe": {
        "slipstream.parallel.module": "DualPipeVModule PipelineModule",
        "slipstream.parallel.layers": "LayerSpec TiedLayerSpec",
    },
    "deepspeed.runtime.pipe": {
        "slipstream.parallel.module": "PipelineModule",
        "slipstream.parallel.layers": "LayerSpec TiedLayerSpec",
        "slipstream.parallel.topology": "ProcessTopology",
    },
    "deepspeed.runtime.pipe.module": {
        "slipstream.parallel.module": "PipelineError PipelineModule",
        "slipstream.parallel.layers": "LayerSpec TiedLayerSpec",
        "slipstream.parallel.topology": "PipeDataParallelTopology PipelineParallelGrid",
    },
    "deepspeed.runtime.pipe.engine": {"slipstream.compat.engine": "PipelineEngine"},
    "deepspeed.runtime.pipe.dualpipev": {"slipstream.parallel.module": "DualPipeVModule PipelineModule"},
    "deepspeed.runtime.pipe.topology": {
        "slipstream.parallel.topology": "PipeDataParallelTopology PipeModelDataParallelTopology PipelineParallelGrid "
        "ProcessTopology _prime_factors"
    },
    "deepspeed.launcher.runner": {"slipstream.compat.launcher": "DEEPSPEED_ENVIRONMENT_NAME main"},
    "deepspeed.env_report": {"slipstream.compat.launcher": "report"},
    "deepspeed.checkpoint.ds_to_universal": {"slipstream.compat.universal": "main parse_arguments"},
}

# module that `python -m` can run -> its function
RUN: Mapping[str, str] = {
    "deepspeed.env_report": "slipstream.compat.launcher:report",
    "deepspeed.launcher.runner": "slipstream.compat.launcher:main",
    "deepspeed.utils.zero_to_fp32": "slipstream.compat.launcher:zero_to_fp32",
    "deepspeed.checkpoint.ds_to_universal": "slipstream.compat.universal:main",
}

# another path of a module -> its key in SERVED
ALIASES: Mapping[str, str] = {
    "deepspeed.zero": "deepspeed.runtime.zero",
    "deepspeed.checkpointing": "deepspeed.runtime.activation_checkpointing.checkpointing",
    "deepspeed.comm.comm": "deepspeed.comm",
    "deepspeed.profiling.flops_profiler.profiler": "deepspeed.profiling.flops_profiler",
    "deepspeed.ops.adam.cpu_adam": "deepspeed.ops.adam",
    "deepspeed.ops.adam.fused_adam": "deepspeed.ops.adam",
    "deepspeed.ops.lamb.fused_lamb": "deepspeed.ops.lamb",
    "deepspeed.ops.lion.cpu_lion": "deepspeed.ops.lion",
    "deepspeed.ops.adagrad.cpu_adagrad": "deepspeed.ops.adagrad",
    "deepspeed.accelerator.abstract_accelerator": "deepspeed.accelerator",
    "deepspeed.accelerator.real_accelerator": "deepspeed.accelerator",
    "deepspeed.ops.op_builder.all_ops": "deepspeed.ops.op_builder",
    "deepspeed.ops.op_builder.builder": "deepspeed.ops.op_builder",
    "deepspeed.ops.op_builder.cpu": "deepspeed.ops.op_builder",
    "deepspeed.utils.tensor_fragment": "deepspeed.utils",
    "deepspeed.utils.z3_leaf_module": "deepspeed.utils",
    "deepspeed.utils.init_on_device": "deepspeed.utils",
    "deepspeed.runtime.zero.tiling": "deepspeed.runtime.zero",
    "deepspeed.runtime.zero.mics": "deepspeed.runtime.zero",
}

# module -> the module that has its other names
BEYOND: Mapping[str, str] = {"deepspeed.comm": "torch.distributed"}

_EXPERTS = "the inside of DeepSpeed's layer; slipstream.moe has ours"
_PIPELINE = "the inside of DeepSpeed's pipeline; engine.schedule holds the order of this engine's steps"
_LOOP = "a full accumulation window in one call, which DeepSpeed has for pipelines only; loop over engine(batch)"
_SEQUENCE = "the inside of DeepSpeed's sequence parallelism; docs/PARALLELISM.md has what is served"
_ONE_BIT = "the inside of DeepSpeed's 1-bit optimizers; the engine exchanges signs itself"
_SERVING = "the inside of DeepSpeed's serving engines; init_inference, build_hf_engine and `slipstream serve` serve models"
_FLATTENED = "DeepSpeed's flattened weights; build_hf_engine opens the model's own folder"
_BUILDERS = "DeepSpeed's op builders; Slipstream's kernels are built when it is installed"
_ELASTIC = "the inside of DeepSpeed's elasticity; `slipstream run --elastic MIN:MAX` is the agent"
_MICS = "the MiCS classes; set zero_optimization.mics_shard_size in the config, which does the same at stage 3"
_SCALER = "loss scaler classes; the engine scales losses, and optimizer.loss_scale_config has the settings"
_INSIDE = "DeepSpeed's internals (flat groups, experts, hooks); engine.explain() and engine.units show Slipstream's"
_TRANSFORMER = "the inference kernels of DeepSpeed; init_inference has its own"
_HYBRID = "the inside of DeepSpeed's hybrid engine; engine.generate is served"
_ROLLOUT = "a rollout by another server; slipstream.handover.send hands it the weights"
_INJECTION = "kernel injection; init_inference(replace_with_kernel_inject=True) chooses the kernels"
_TUNING = "autotuning runs outside the script: `deepspeed --autotuning`, or `slipstream tune`"

# module of DeepSpeed -> {name, or * for all others: the missing feature, and an alternative}
MISSING: Mapping[str, Mapping[str, str]] = {
    "deepspeed.runtime.zero": {
        "TiledLinearReturnBias": "a tiled linear layer that returns its bias; TiledLinear adds it",
        "MiCS_Optimizer": _MICS,
        "MiCS_Offload": _MICS,
    },
    "deepspeed.runtime.zero.stage_1_and_2": {"*": _INSIDE},
    "deepspeed.runtime.zero.stage3": {"*": _INSIDE},
    "deepspeed.runtime.zero.mics_utils": {"*": _MICS},
    "deepspeed.runtime.fp16.loss_scaler": {"*": _SCALER},
    "deepspeed.runtime.config": {"*": "the inside of DeepSpeed's config; DeepSpeedConfig has its values as attributes"},
    "deepspeed.runtime.utils": {"*": _INSIDE},
    "deepspeed.runtime.sequence_parallel.ulysses_sp": {"*": _SEQUENCE},
    "deepspeed.sequence": {"*": _SEQUENCE},
    "deepspeed.runtime.fp16.onebit": {"*": _ONE_BIT},
    "deepspeed.runtime.comm": {"*": "a transport of DeepSpeed's 1-bit optimizers; the engine exchanges signs itself"},
    "deepspeed.runtime.lr_schedules": {"*": "the inside of DeepSpeed's schedules; the config's scheduler sets the rate"},
    "deepspeed.runtime.weight_quantizer": {"*": "quantization of Megatron's files; slipstream.quantize packs a model's layers"},
    "deepspeed.runtime.pipe": {"*": _PIPELINE},
    "deepspeed.runtime.data_pipeline": {
        "*": "the inside of DeepSpeed's data efficiency; the config's data_efficiency works, and slipstream.data has its parts"
    },
    "deepspeed.runtime.hybrid_engine": {"*": _HYBRID},
    "deepspeed.runtime.rollout": {"*": _ROLLOUT},
    "deepspeed.pipe": {"*": _PIPELINE},
    "deepspeed.moe": {"*": _EXPERTS},
    "deepspeed.utils.groups": {"initialize": "has no effect in DeepSpeed either: pass ep_size to deepspeed.moe.layer.MoE"},
    "deepspeed.ops.transformer": {"*": _TRANSFORMER},
    "deepspeed.ops.op_builder": {"*": _BUILDERS},
    "deepspeed.ops.aio": {"*": "the asynchronous file handle; offload_optimizer and offload_param use the disk"},
    "deepspeed.inference": {"build_engine_from_ds_checkpoint": _FLATTENED, "*": _SERVING},
    "deepspeed.inference.v2": {"build_engine_from_ds_checkpoint": _FLATTENED},
    "deepspeed.inference.v2.engine_factory": {"build_engine_from_ds_checkpoint": _FLATTENED},
    "deepspeed.module_inject": {"*": _INJECTION},
    "deepspeed.elasticity": {"*": _ELASTIC},
    "deepspeed.utils.zero_to_fp32": {
        "*": "a reader of DeepSpeed's files; get_fp32_state_dict_from_zero_checkpoint reads both kinds"
    },
    "deepspeed.linear": {"*": "DeepSpeed's quantized LoRA layers; use PEFT"},
    "deepspeed.autotuning": {"*": _TUNING},
}

# A config value, or DeepSpeed's default -> key: names of both methods of the engine and attributes of DeepSpeedConfig
# (CONFIG_VALUES), of attributes, and of methods (CONFIG_GETTERS)
_ZERO = """reduce_scatter overlap_comm offload_optimizer offload_param sub_group_size reduce_bucket_size allgather_bucket_size
compute_grad_norm contiguous_gradients load_from_fp32_weights elastic_checkpoint legacy_stage1 ignore_unused_parameters
save_muon_momentum_buffer_in_memory allgather_partitions round_robin_gradients parameter_alignment log_trace_cache_warnings"""
_STAGE_3 = """max_live_parameters max_reuse_distance prefetch_bucket_size module_granularity_threshold param_persistence_threshold
model_persistence_threshold allgather_sequential"""
_ZERO_PP = "zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients"
_FLOPS = "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file"
_CURVED = "verbose max_iter tol stability gas_boundary_resolution layer_name layer_num"
_TOP = "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer memory_breakdown gradient_predivide_factor log_level"
CONFIG_VALUES: Mapping[str, str] = {
    **{name: name for name in _TOP.split()},
    "torch_autocast_lower_precision_safe_modules": "torch_autocast.lower_precision_safe_modules",
    "optimizer_legacy_fusion": "optimizer.legacy_fusion",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "use_node_local_storage": "checkpoint.use_node_local_storage",
    "data_efficiency_enabled": "data_efficiency.enabled",
    "tensor_parallel_config": "tensor_parallel",
}
_SAME = """train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation steps_per_print
dump_state disable_python_gc disable_allgather prescale_gradients gradient_allreduce_op gradient_clipping dataloader_drop_last"""
CONFIG_ATTRIBUTES: Mapping[str, str] = {
    **CONFIG_VALUES,
    **{name: name for name in _SAME.split()},
    **{name: f"data_types.{name}" for name in ("grad_accum_dtype", "param_dtype", "buffer_dtype")},
    **{f"{block}_config": block for block in ("compile", "expert_parallel", "autotuning", "checkpoint", "weight_quantization")},
    "zero_optimization_stage": "zero_optimization.stage",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "scheduler_name": "scheduler.type",
    "checkpoint_parallel_write_pipeline": "checkpoint.parallel_write.pipeline_stage",
    "use_data_before_expert_parallel_": "use_data_before_expert_parallelism",
}
CONFIG_GETTERS: Mapping[str, str] = {
    **CONFIG_VALUES,
    **{f"zero_{name}": f"zero_optimization.{name}" for name in _ZERO.split()},
    **{f"zero_{name}": f"zero_optimization.stage3_{name}" for name in _STAGE_3.split()},
    **{name: f"zero_optimization.{name}" for name in _ZERO_PP.split()},
    **{f"flops_profiler_{name}": f"flops_profiler.{name}" for name in _FLOPS.split()},
    **{f"eigenvalue_{name}": f"eigenvalue.{name}" for name in _CURVED.split()},
    "zero_multi_rank_bucket_allreduce": "zero_optimization.use_multi_rank_bucket_allreduce",
    "zero_partial_offload": "zero_optimization.offload_optimizer.ratio",
    "super_offload": "zero_optimization.offload_optimizer.super_offload",
    "cpuadam_cores_perc": "zero_optimization.offload_optimizer.cpuadam_cores_perc",
    "is_sanity_checks_enabled": "zero_optimization.enable_sanity_checks",
    "zenflow_config": "zero_optimization.zenflow",
    "fp16_master_weights_and_gradients": "fp16.fp16_master_weights_and_grads",
    "bf16_master_weights_and_gradients": "bf16.bf16_master_weights_and_grads",
    "bf16_optimizer_states": "bf16.bf16_optimizer_states",
    "aio_config": "aio",
    "checkpoint_serialization_enabled": "checkpoint.checkpoint_serialization",
    "autotuning_enabled": "autotuning.enabled",
    "data_efficiency_config": "data_efficiency",
    "data_sampling_enabled": "data_efficiency.data_sampling.enabled",
    "data_sampling_config": "data_efficiency.data_sampling",
    "curriculum_learning_enabled": "data_efficiency.data_sampling.curriculum_learning.enabled",
    "curriculum_learning_config": "data_efficiency.data_sampling.curriculum_learning",
    "random_ltd_config": "data_efficiency.data_routing.random_ltd",
    "autotp_size": "tensor_parallel.autotp_size",
    "is_deepcompile_enabled": "compile.deepcompile",
}

_REDUCED = "the engine reduces gradients during backward and step"
_COMPILE = "DeepCompile; engine.compile() is torch.compile"


def _rows(names: str, why: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), why)


# method of DeepSpeed's engine -> the missing feature, and an alternative
MISSING_METHODS: Mapping[str, str] = {
    "train_batch": f"{_LOOP}, engine.backward(loss) and engine.step()",
    "eval_batch": f"{_LOOP} under torch.no_grad()",
    "quantizer": "an object beside the weights' own schedule; deepspeed.runtime.quantize.Quantizer steps parameters of a script",
    **_rows("allreduce_gradients allreduce_bucket allreduce_and_copy allreduce_no_retain buffered_allreduce_fallback", _REDUCED),
    "clip_fp32_gradients": "step() clips gradients to gradient_clipping",
    **_rows(
        "register_compile_pass get_compile_time get_deepcompile_backend get_deepspeed_compile_backend get_autosp_backend "
        "get_autotp_backend compile_zero_optimization_stage compile_autosp compile_autotp uses_parallelization_pass_only",
        _COMPILE,
    ),
    "print_forward_breakdown": "the time inside of DeepSpeed's layers; flops_profiler has that of each module",
    **_rows(
        "autotuning_metric autotuning_metric_path autotuning_model_info_path autotuning_profile_model_info "
        "autotuning_start_profile_step autotuning_end_profile_step",
        _TUNING,
    ),
    "load_moe_state_dict": _EXPERTS,
    "is_first_weights_partition_group": "DeepSpeed's process groups; engine.mesh has the data axes",
    "dynamic_loss_scale_args": "the scaler's arguments as a dictionary; engine.plan.precision.loss_scale has them",
    "swap_tensor_config": "the object behind offload_param; engine.plan.offload has the devices of offloaded states",
    "get_optimizer_configuration": "DeepSpeed's choice of an optimizer class; use type(engine.optimizer) or optimizer_name()",
    "collect_python_gc": "control of Python's garbage collector; call gc.collect()",
}

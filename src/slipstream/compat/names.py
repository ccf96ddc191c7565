"""Tables of DeepSpeed 0.19.8's names: where each is implemented, and what is missing and why.

docs/DEEPSPEED_KEYS.md contains these tables; a test compares them and imports every name. docs/COMING_FROM_DEEPSPEED.md describes
differences in behavior.

[Note: Rows] A text has one row per line; a line that begins with spaces continues the row. Modules of DeepSpeed are written without
"deepspeed.", except the package itself; modules of Slipstream likewise. "-" stands for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

# Rows: a module of DeepSpeed, the module of Slipstream that has its names ("-": the package), and the names
_SERVED = """
deepspeed parallel.module: DualPipeVModule PipelineModule
deepspeed compat.engine: DeepSpeedConfigError DeepSpeedEngine PipelineEngine initialize
deepspeed compat.comm: init_distributed
deepspeed compat.accelerator: get_accelerator
deepspeed compat.config: DeepSpeedConfig
deepspeed compat.handles: DeepSpeedOptimizer
deepspeed compat.utils: OnDevice log_dist logger
deepspeed compat.versions: git_branch git_hash
deepspeed compat.inference: DeepSpeedInferenceConfig InferenceEngine init_inference
deepspeed compat.rollout: DeepSpeedHybridEngine
deepspeed -: add_config_arguments
deepspeed parallel.slicing: tp_model_init
deepspeed fused: DeepSpeedTransformerConfig DeepSpeedTransformerLayer replace_transformer_layer
inference.engine compat.inference: InferenceEngine
inference.quantization.quantization compat.zero: _init_group_wise_weight_quantization
inference.config compat.inference: DeepSpeedInferenceConfig
inference.config compat.config: DtypeEnum
ops.transformer fused: DeepSpeedTransformerConfig DeepSpeedTransformerLayer
module_inject fused: replace_transformer_layer
module_inject.layers compat.zero: GatherReplacedLayerParams set_autotp_mode
runtime compat.handles: DeepSpeedOptimizer ZeROOptimizer
runtime.hybrid_engine compat.rollout: DeepSpeedHybridEngine
runtime.rollout compat.rollout: HybridEngineRollout JSDLossOutput ResponseTokenBatch generalized_jsd_loss RolloutBatch RolloutEngine
    RolloutRequest SamplingConfig RolloutConfig build_rollout HybridEngineRolloutConfig
runtime.config compat.engine: DeepSpeedConfigError
runtime.config compat.config: DeepSpeedConfig DeepSpeedConfigModel DtypeEnum HybridEngineConfig
runtime.sequence_parallel.ulysses_sp compat.sequence: TiledFusedLogitsLoss TiledMLP UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter
    sequence_tiled_compute
ops.sparse_attention attention: BertSparseSelfAttention MatMul Softmax SparseAttentionUtils SparseSelfAttention
    BSLongformerSparsityConfig BigBirdSparsityConfig DenseSparsityConfig FixedSparsityConfig LocalSlidingWindowSparsityConfig
    SparsityConfig VariableSparsityConfig
elasticity config.elastic: compute_elastic_config elasticity_enabled ensure_immutable_elastic_config ElasticityConfigError
    ElasticityError ElasticityIncompatibleWorldSize
inference compat.ragged: DeepSpeedTPConfig InferenceEngineV2 RaggedInferenceEngineConfig build_hf_engine
inference.v2 compat.ragged: DeepSpeedTPConfig InferenceEngineV2 RaggedInferenceEngineConfig build_hf_engine QuantizationConfig
    SchedulingError SchedulingResult AllocationMode DSStateManagerConfig MemoryConfig
compression compression: init_compression redundancy_clean student_initialization
compression.helper compression: convert_conv1d_to_linear
compression.helper compat.utils: recursive_getattr recursive_setattr
compression.scheduler compression: compression_scheduler
compression.basic_layer compression: BNLayer_Compress Conv2dLayer_Compress Embedding_Compress LinearLayer_Compress
utils.module_utils compat.utils: recursive_getattr recursive_setattr
runtime.data_pipeline.curriculum_scheduler data: CurriculumScheduler
runtime.data_pipeline.data_sampling.indexed_dataset data.indexed: MMapIndexedDataset MMapIndexedDatasetBuilder code data_file_path
    dataset_exists index_file_path make_builder make_dataset
runtime.data_pipeline.data_sampling.utils data.indexed: close_mmap_dataset_builder create_mmap_dataset_builder find_fit_int_dtype
runtime.data_pipeline.data_sampling.utils data.analyze: split_dataset split_index
runtime.data_pipeline.data_sampling.data_analyzer data: DataAnalyzer DistributedDataAnalyzer
runtime.data_pipeline.data_sampling.data_sampler compat.data_sampler: DeepSpeedDataSampler
runtime.data_pipeline.data_sampling.variable_batch_size_and_lr data.batching: VariableBatchSizeLR batch_by_seqlens
    lr_scheduler_for_variable_batch_size scale_lr
runtime.data_pipeline.data_sampling.variable_batch_size_and_lr train.loaders:
    get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed
runtime.data_pipeline.data_routing.helper train.random_ltd: convert_to_random_ltd remove_random_ltd_state_dict
    save_without_random_ltd
runtime.data_pipeline.data_routing.basic_layer train.random_ltd: RandomLayerTokenDrop
runtime.data_pipeline.data_routing.scheduler train.random_ltd: RandomLTDScheduler
runtime.eigenvalue compression.eigenvalue: Eigenvalue
runtime.progressive_layer_drop train.layer_drop: ProgressiveLayerDrop
sequence.layer compat.sequence: DistributedAttention _SeqAllToAll
sequence.fpdt_layer compat.sequence: FPDT_Attention FPDT_FFN FPDT_InputConstruct
runtime.config_utils compat.config: DeepSpeedConfigModel DeepSpeedConfigObject dict_raise_error_on_duplicate_keys get_config_default
    get_dict_param get_list_param get_scalar_param
runtime.precision_config compat.config: DeepSpeedBF16Config DeepSpeedFP16Config get_bfloat16_config get_float16_config
runtime.zero.config compat.config: DeepSpeedZeroConfig DeepSpeedZeroLeafModuleConfig DeepSpeedZeroOffloadOptimizerConfig
    DeepSpeedZeroOffloadParamConfig ZeroStageEnum get_zero_config
runtime.zero.leaf_module_config compat.config: DeepSpeedZeroLeafModuleConfig
runtime.swap_tensor.aio_config compat.config: get_aio_config
runtime.activation_checkpointing.config compat.config: DeepSpeedActivationCheckpointingConfig
profiling.flops_profiler observe.profile: FlopsProfiler get_model_profile number_to_string
utils.timer compat.timers: SynchronizedWallClockTimer ThroughputTimer trim_mean
profiling.config compat.config: DeepSpeedFlopsProfilerConfig
comm.config compat.config: CommsLoggerConfig DeepSpeedCommsConfig
compile.config compat.config: CompileConfig
monitor.config compat.config: CSVConfig CometConfig DeepSpeedMonitorConfig TensorBoardConfig WandbConfig get_monitor_config
monitor.monitor compat.monitors: CometMonitor MonitorMaster TensorBoardMonitor WandbMonitor csvMonitor
utils.config compat.config: DeepSpeedThroughputTimerConfig get_timers_config
runtime.engine compat.engine: DeepSpeedEngine
runtime.zero compat.held: Init MiCS_Init ZeroParamStatus ZeroParamType is_zero_param restore_init_context shutdown_init_context
    zero_wrapper_for_fp_tensor_constructor
runtime.zero compat.zero: GatheredParameters register_external_parameter unregister_external_parameter unwrap_model_for_generation
    ZeRORuntimeException apply_to_tensors_only
runtime.zero compat.estimates: estimate_zero3_model_states_mem_needs_all_cold estimate_zero3_model_states_mem_needs_all_live
runtime.zero activations.tiled: TiledLinear
runtime.zero.stage_1_and_2 compat.handles: DeepSpeedZeroOptimizer
runtime.zero.stage_1_and_2 compat.estimates: estimate_zero2_model_states_mem_needs_all_cold
    estimate_zero2_model_states_mem_needs_all_live model_to_params
runtime.zero.stage3 compat.estimates: estimate_zero3_model_states_mem_needs_all_cold estimate_zero3_model_states_mem_needs_all_live
    model_to_params
runtime.zero.stage3 compat.handles: DeepSpeedZeroOptimizer_Stage3
runtime.zero.stage3 compat.zero: unwrap_model_for_generation
runtime.bf16_optimizer compat.handles: BF16_Optimizer
runtime.fp16.fused_optimizer compat.handles: FP16_Optimizer
runtime.fp16.unfused_optimizer compat.handles: FP16_UnfusedOptimizer
runtime.lr_schedules compat.schedules: LRRangeTest OneCycle WarmupCosineLR WarmupDecayLR WarmupLR
runtime.dataloader compat.handles: DeepSpeedDataLoader
runtime.dataloader -: RepeatingLoader
runtime.fp16.loss_scaler compat.pickled: DynamicLossScaler LossScaler LossScalerBase
runtime.pipe.schedule compat.pipe_schedules: BackwardPass BufferOpInstruction DataParallelSchedule ForwardPass InferenceSchedule
    LoadMicroBatch OptimizerStep PipeInstruction PipeSchedule RecvActivation RecvGrad ReduceGrads ReduceTiedGrads SendActivation
    SendGrad TrainSchedule
runtime.utils compat.utils: copy_to_device move_to_device see_memory_usage set_random_seed
runtime.utils compat.runtime_utils: call_to_str clip_grad_norm_ clip_tensors_by_global_norm empty_cache get_global_norm
    get_global_norm_of_tensors get_ma_status get_tensor_bytes get_weight_norm has_inf_or_nan is_invalid_grad_norm
    is_model_parallel_parameter mask_nan_or_inf_with_val_inplace maybe_loss_for_backward noop_context
runtime.utils parallel.layers: partition_balanced partition_uniform prefix_sum_inc
runtime.activation_checkpointing.checkpointing compat.checkpointing: CudaRNGStatesTracker checkpoint configure get_cuda_rng_tracker
    is_configured model_parallel_cuda_manual_seed model_parallel_reconfigure_tp_seed non_reentrant_checkpoint reset
    _CUDA_RNG_STATE_TRACKER _MODEL_PARALLEL_RNG_TRACKER_NAME _set_cuda_rng_state
comm compat.comm: P2POp TorchBackend all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_reduce
    all_reduce_coalesced all_to_all all_to_all_single allgather_fn barrier batch_isend_irecv broadcast broadcast_object_list
    comms_logger configure gather get_all_ranks_from_group get_comm_operation_count get_global_rank get_local_rank
    get_logged_comm_ops get_rank get_world_group get_world_size has_all_gather_into_tensor has_all_reduce_coalesced
    has_coalescing_manager has_comm_data has_reduce_scatter_tensor inference_all_reduce init_distributed initialize_mesh_device
    irecv is_available is_initialized isend log_summary monitored_barrier new_group recv reduce reduce_scatter reduce_scatter_fn
    reduce_scatter_tensor reset_log scatter send
utils compat.pickled: fragment_address
utils compat.utils: OnDevice get_current_level get_log_level_from_string get_z3_leaf_modules instrument_w_nvtx log_dist
    log_dist_once log_levels logger see_memory_usage set_log_level_from_string set_z3_leaf_module set_z3_leaf_modules
    set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix should_log_le unset_z3_leaf_modules warning_once z3_leaf_module
    z3_leaf_parameter
utils compat.fragments: safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_get_local_fp32_param
    safe_get_local_grad safe_get_local_optimizer_state safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state
    safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state safe_update_full_grad_vectorized
utils -: RepeatingLoader
utils.torch compat.versions: is_functorch_transforming jit_script_compat register_grad_hook required_torch_version
git_version_info compat.versions: accelerator_name git_branch git_hash installed_ops torch_info version
moe.layer compat.moe: MoE
moe.sharded_moe compat.moe: MOELayer TopKGate
moe.utils compat.moe: configure_moe_param_groups has_moe_layers is_moe_param is_moe_param_group
    split_params_grads_into_shared_and_expert_params split_params_into_different_moe_groups_for_optimizer
    split_params_into_shared_and_expert_params
utils.groups compat.groups: _create_expert_and_data_parallel _get_broadcast_src_rank _get_data_parallel_group
    _get_data_parallel_rank _get_data_parallel_world_size _get_expert_broadcast_src_rank _get_expert_parallel_src_rank
    _get_expert_data_parallel_group _get_expert_data_parallel_group_dict _get_expert_data_parallel_group_ranks
    _get_expert_data_parallel_rank _get_expert_data_parallel_world_size _get_expert_model_parallel_world_size
    _get_expert_parallel_group _get_expert_parallel_group_dict _get_expert_parallel_group_ranks _get_expert_parallel_rank
    _get_expert_parallel_world_size _get_max_expert_parallel_group _get_max_expert_size _get_max_expert_size_name
    _get_model_parallel_group _get_model_parallel_world_size _get_sequence_data_parallel_group _get_sequence_data_parallel_rank
    _get_sequence_data_parallel_world_size _get_sequence_parallel_group _get_sequence_parallel_rank
    _get_sequence_parallel_world_size get_data_parallel_group get_data_parallel_rank get_data_parallel_world_size
    get_model_parallel_group get_model_parallel_rank get_model_parallel_world_size get_tensor_model_parallel_group
    get_tensor_model_parallel_rank get_tensor_model_parallel_src_rank get_tensor_model_parallel_world_size
utils.zero_to_fp32 compat.weights: convert_zero_checkpoint_to_fp32_state_dict convert_zero_checkpoint_to_state_dict
    get_fp32_state_dict_from_zero_checkpoint get_model_state_file get_optim_files load_state_dict_from_zero_checkpoint
checkpoint.utils compat.weights: clone_tensors_for_torch_save
ops.adam compat.optimizers: DeepSpeedCPUAdam FusedAdam
ops.adagrad compat.optimizers: DeepSpeedCPUAdagrad
ops.lion compat.optimizers: DeepSpeedCPULion FusedLion
ops.lamb compat.optimizers: FusedLamb
runtime.fp16.onebit compat.optimizers: OnebitAdam ZeroOneAdam OnebitLamb
ops compat.op_builders: __compatible_ops__
ops.op_builder compat.op_builders: ALL_OPS AsyncIOBuilder CCLCommBuilder CPUAdagradBuilder CPUAdamBuilder CPULionBuilder
    CUDAOpBuilder DeepCompileBuilder EvoformerAttnBuilder FPQuantizerBuilder FusedAdamBuilder FusedLambBuilder FusedLionBuilder
    GDSBuilder InferenceBuilder InferenceCoreBuilder InferenceCutlassBuilder NotImplementedBuilder OpBuilder PinMemoryBuilder
    QuantizerBuilder RaggedOpsBuilder RaggedUtilsBuilder RandomLTDBuilder ShareMemCommBuilder SparseAttnBuilder
    SpatialInferenceBuilder StochasticTransformerBuilder TransformerBuilder UtilsBuilder
ops.aio compat.op_builders: AsyncIOBuilder
ops.gds compat.op_builders: GDSBuilder
accelerator compat.accelerator: DeepSpeedAccelerator get_accelerator is_current_accelerator_supported set_accelerator
runtime.pipe parallel.module: DualPipeVModule PipelineModule PipelineError
runtime.pipe parallel.layers: LayerSpec TiedLayerSpec
runtime.pipe parallel.topology: ProcessTopology PipeDataParallelTopology PipelineParallelGrid PipeModelDataParallelTopology
    _prime_factors
runtime.pipe.engine compat.engine: DeepSpeedEngine PipelineEngine
launcher.runner compat.launcher: DEEPSPEED_ENVIRONMENT_NAME DLTS_HOSTFILE fetch_hostfile main parse_inclusion_exclusion
env_report compat.launcher: report
checkpoint.ds_to_universal compat.universal: main parse_arguments
"""

# Rows: a module of the table above, and its other paths
_ALIASES = """
runtime.zero: zero runtime.zero.tiling runtime.zero.mics runtime.zero.partition_parameters runtime.zero.utils
runtime.activation_checkpointing.checkpointing: checkpointing
checkpoint.constants: checkpoint
comm: comm.comm comm.reduce_op dist
profiling.flops_profiler: profiling.flops_profiler.profiler
ops.adam: ops.adam.cpu_adam ops.adam.fused_adam
ops.lamb: ops.lamb.fused_lamb
ops.lion: ops.lion.cpu_lion ops.lion.fused_lion
ops.adagrad: ops.adagrad.cpu_adagrad
accelerator: accelerator.abstract_accelerator accelerator.real_accelerator
ops.op_builder: ops.op_builder.all_ops ops.op_builder.builder ops.op_builder.cpu
utils: utils.tensor_fragment utils.z3_leaf_module utils.init_on_device utils.logging utils.nvtx
compression: compression.compress
elasticity: elasticity.config elasticity.elasticity
inference.v2: inference.v2.config_v2 inference.v2.engine_factory inference.v2.engine_v2 inference.v2.ragged
    inference.v2.ragged.manager_configs inference.v2.scheduling_utils
monitor.monitor: monitor.comet monitor.csv_monitor monitor.tensorboard monitor.wandb
ops.sparse_attention: ops.sparse_attention.bert_sparse_self_attention ops.sparse_attention.matmul ops.sparse_attention.softmax
    ops.sparse_attention.sparse_attention_utils ops.sparse_attention.sparse_self_attention ops.sparse_attention.sparsity_config
ops.transformer: ops.transformer.transformer
runtime.pipe: pipe runtime.pipe.dualpipev runtime.pipe.module runtime.pipe.topology
runtime: runtime.base_optimizer
runtime.fp16.onebit: runtime.fp16.onebit.adam runtime.fp16.onebit.lamb runtime.fp16.onebit.zoadam
launcher.runner: launcher.launch
runtime.rollout: runtime.rollout.base runtime.rollout.hybrid_engine_rollout runtime.rollout.opsd
runtime.zero.config: runtime.zero.offload_config
utils.zero_to_fp32: utils.zero_to_torch
"""

# What is missing. Rows: all other names of a module, MODULE/NAME, or METHOD() of the engine; the reason, and an alternative
_MISSING = """
runtime.zero/TiledLinearReturnBias: a tiled linear layer that returns its bias; TiledLinear adds it
runtime.zero/MiCS_Optimizer runtime.zero/MiCS_Offload runtime.zero.mics_utils: DeepSpeed's MiCS classes;
    zero_optimization.mics_shard_size in the config does the same at stage 3
runtime.zero.stage_1_and_2 runtime.zero.stage3 runtime.utils: DeepSpeed's internals (flat groups, experts, hooks); engine.explain()
    and engine.units show Slipstream's
runtime.fp16.loss_scaler: loss scaler classes; the engine scales losses, and optimizer.loss_scale_config has the settings
runtime.config: internals of DeepSpeed's config; DeepSpeedConfig has its values as attributes
runtime.sequence_parallel.ulysses_sp runtime.sequence_parallel sequence: internals of DeepSpeed's sequence parallelism;
    docs/PARALLELISM.md lists what is supported
sequence/vocab_parallel_cross_entropy sequence/VocabParallelCrossEntropyLoss sequence/VocabParallelCausalLMLoss
    sequence/configure_vocab_parallel_loss sequence.cross_entropy: losses of logits that ranks share by vocabulary;
    tensor_parallel.vocab_parallel_lm_head in the config computes the model's own loss so
runtime.chunked_cross_entropy: a loss without fp32 copies of the logits; slipstream.ops.fused.cross_entropy is one
runtime.fp16.onebit: internals of DeepSpeed's 1-bit optimizers; the engine exchanges signs itself
runtime.sparse_tensor runtime.engine/split_half_float_double_sparse sparse_allreduce() sparse_allreduce_bucket()
    sparse_allreduce_no_retain() sparse_all_gather(): DeepSpeed's reduction of sparse gradients; with "sparse_gradients": true in
    the config, the engine sends only the nonzero rows of embeddings' gradients
runtime.comm.coalesced_collectives: DeepSpeed's gradient reductions; with communication_data_type int4 the engine sends its
    gradients in codes, and torch.distributed.reduce_scatter_tensor reduces a script's own
runtime.comm: communication backends of DeepSpeed's 1-bit optimizers; the engine exchanges signs itself
runtime.lr_schedules: internals of DeepSpeed's schedules; the config's scheduler sets the learning rate
runtime.weight_quantizer: quantization of Megatron's checkpoints; slipstream.quantize quantizes a model's layers
runtime.pipe.schedule/DualPipeVSchedule runtime.pipe.schedule/CommitP2P: instructions of DeepSpeed's DualPipeV; a DualPipeVModule,
    or slipstream.pipeline.schedule "v", trains in this order
runtime.pipe: internals of DeepSpeed's pipeline; engine.schedule has the order of this engine's actions
runtime.data_pipeline: internals of DeepSpeed's data efficiency; the config's data_efficiency works, and slipstream.data has its
    parts
runtime.hybrid_engine: internals of DeepSpeed's hybrid engine; engine.generate() generates
runtime.rollout: rollouts by an external server; slipstream.handover.send sends it the weights
moe load_moe_state_dict(): internals of DeepSpeed's MoE layer; slipstream.moe has Slipstream's
utils.groups/initialize: a function without effect, in DeepSpeed too; pass ep_size to deepspeed.moe.layer.MoE
ops.transformer: DeepSpeed's inference kernels; init_inference uses Slipstream's
ops.op_builder: DeepSpeed's op builders; Slipstream's kernels are built when it is installed
io: DeepSpeed's FastPersist writers; AsyncIOBuilder().load().aio_handle() writes tensors by direct I/O
nvme: DeepSpeed's measurements of disks; use `slipstream bench-disk`, or ds_nvme_tune
inference/build_engine_from_ds_checkpoint inference.v2/build_engine_from_ds_checkpoint: DeepSpeed's flattened weights;
    build_hf_engine loads a Hugging Face folder
inference: internals of DeepSpeed's serving engines; init_inference, build_hf_engine and `slipstream serve` serve models
module_inject.layers module_inject.auto_tp module_inject.autotp_config module_inject.auto_ep module_inject.auto_ep_layer
    module_inject.auto_ep_config runtime.tensor_parallel: DeepSpeed's AutoTP and AutoEP; the config's tensor_parallel and
    expert_parallel split unmodified models
module_inject: DeepSpeed's kernel injection; init_inference(replace_with_kernel_inject=True) uses Slipstream's kernels
elasticity: internals of DeepSpeed's elastic agent; use `slipstream run --elastic MIN:MAX`
checkpoint.constants/DeepSpeedCheckpoint checkpoint.deepspeed_checkpoint utils.zero_to_fp32: internals of DeepSpeed's checkpoint
    reader; get_fp32_state_dict_from_zero_checkpoint reads both formats
runtime.domino: Domino's Megatron layers; tensor_parallel.tp_overlap_comm in the config overlaps the sums of unmodified models
compile.passes: AutoSP and other passes of DeepCompile; sequence_parallel_size in the config splits sequences of unmodified models
linear: DeepSpeed's quantized LoRA layers; use PEFT
autotuning autotuning_metric() autotuning_metric_path() autotuning_model_info_path() autotuning_profile_model_info()
    autotuning_start_profile_step() autotuning_end_profile_step(): autotuning runs outside the script: `deepspeed --autotuning`, or
    `slipstream tune`
train_batch() eval_batch(): a full accumulation window in one call, which DeepSpeed has for pipelines only; loop over engine(batch),
    with engine.backward(loss) and engine.step() to train, under torch.no_grad() to evaluate
runtime.quantize quantizer() compression: internals of DeepSpeed's compression; compression_training in the config, or
    init_compression(model, config), quantizes and prunes the modules that it names
compression.basic_layer/ColumnParallelLinear_Compress compression.basic_layer/RowParallelLinear_Compress: compression of layers that
    an mpu has sliced; compress whole layers, and shard them with zero_optimization.stage 3
allreduce_gradients() allreduce_bucket() allreduce_and_copy() allreduce_no_retain() buffered_allreduce_fallback(): the engine
    reduces gradients during backward and step
clip_fp32_gradients(): step() clips gradients to gradient_clipping
register_compile_pass() get_compile_time() get_deepcompile_backend() get_deepspeed_compile_backend() get_autosp_backend()
    get_autotp_backend() compile_zero_optimization_stage() compile_autosp() compile_autotp() uses_parallelization_pass_only():
    DeepCompile; engine.compile() calls torch.compile
print_forward_breakdown(): times inside DeepSpeed's layers; flops_profiler has the time of each module
is_first_weights_partition_group(): DeepSpeed's process groups; engine.mesh has the data axes
dynamic_loss_scale_args(): the loss scaler's arguments as a dictionary; engine.plan.precision.loss_scale has them
swap_tensor_config(): DeepSpeed's object for offload_param; engine.plan.offload has the devices of offloaded states
get_optimizer_configuration(): DeepSpeed's choice of an optimizer class; use type(engine.optimizer.optimizer) or optimizer_name()
collect_python_gc(): control of Python's garbage collector; call gc.collect()
"""

# Names of the config's values, or of DeepSpeed's defaults. Rows: the owner (A: attributes of DeepSpeedConfig; M: methods of the
# engine), the prefixes of names and of keys, and the common ends; NAME=KEY if they differ, and BLOCK{} for a block as a dictionary
_VALUES = """
AM - - zero_allow_untested_optimizer zero_force_ds_cpu_optimizer memory_breakdown gradient_predivide_factor log_level
    optimizer_legacy_fusion=optimizer.legacy_fusion tensor_parallel_config=tensor_parallel
    data_efficiency_enabled=data_efficiency.enabled
AM - checkpoint. load_universal_checkpoint=load_universal use_node_local_storage
A - - train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation steps_per_print
    dump_state disable_python_gc disable_allgather prescale_gradients gradient_allreduce_op gradient_clipping dataloader_drop_last
    compile_config=compile expert_parallel_config=expert_parallel autotuning_config=autotuning checkpoint_config=checkpoint{}
    weight_quantization_config=weight_quantization zero_optimization_stage=zero_optimization.stage scheduler_name=scheduler.type
    torch_autocast_enabled=torch_autocast.enabled use_data_before_expert_parallel_=use_data_before_expert_parallelism
    torch_autocast_lower_precision_safe_modules=torch_autocast.lower_precision_safe_modules
    checkpoint_parallel_write_pipeline=checkpoint.parallel_write.pipeline_stage
A - data_types. grad_accum_dtype param_dtype buffer_dtype
M zero_ zero_optimization. reduce_scatter offload_optimizer offload_param sub_group_size reduce_bucket_size
    allgather_bucket_size compute_grad_norm contiguous_gradients load_from_fp32_weights elastic_checkpoint legacy_stage1
    ignore_unused_parameters save_muon_momentum_buffer_in_memory allgather_partitions round_robin_gradients parameter_alignment
    log_trace_cache_warnings multi_rank_bucket_allreduce=use_multi_rank_bucket_allreduce partial_offload=offload_optimizer.ratio
M zero_ zero_optimization.stage3_ max_live_parameters max_reuse_distance prefetch_bucket_size module_granularity_threshold
    param_persistence_threshold model_persistence_threshold allgather_sequential
M - zero_optimization. zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients
    is_sanity_checks_enabled=enable_sanity_checks zenflow_config=zenflow
M - zero_optimization.offload_optimizer. super_offload cpuadam_cores_perc
M flops_profiler_ flops_profiler. enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file
M eigenvalue_ eigenvalue. verbose max_iter tol stability gas_boundary_resolution layer_name layer_num
M fp16_ fp16.fp16_ master_weights_and_gradients=master_weights_and_grads
M bf16_ bf16.bf16_ master_weights_and_gradients=master_weights_and_grads optimizer_states
M - data_efficiency. data_sampling_enabled=data_sampling.enabled data_sampling_config=data_sampling{}
    curriculum_learning_enabled=data_sampling.curriculum_learning.enabled random_ltd_config=data_routing.random_ltd{}
    curriculum_learning_config=data_sampling.curriculum_learning{}
M - - sparse_gradients_enabled=sparse_gradients pld_enabled=progressive_layer_drop.enabled eigenvalue_enabled=eigenvalue.enabled
    curriculum_enabled_legacy=curriculum_learning.enabled amp_enabled=amp.enabled elasticity_enabled=elasticity.enabled
    random_ltd_enabled=data_efficiency.data_routing.random_ltd.enabled
AM - - aio_config=aio{} data_efficiency_config=data_efficiency{}
A - - pipeline=pipeline{}
M - - checkpoint_serialization_enabled=checkpoint.checkpoint_serialization autotuning_enabled=autotuning.enabled
    is_deepcompile_enabled=compile.deepcompile
"""


def _rows(text: str) -> list[list[str]]:
    """For each row, the words before the first colon and the text after it; without a colon, the words ([Note: Rows])."""
    rows = (row.partition(": ") for row in text.strip().replace("\n    ", " ").splitlines())
    return [[*before.split(), *([after] if colon else [])] for before, colon, after in rows]


def _whole(module: str) -> str:
    return module if module == "deepspeed" else f"deepspeed.{module}"


def _named(kind: str) -> dict[str, str]:
    """name -> key, of the values of a kind."""
    named: dict[str, str] = {}
    for kinds, before, block, *entries in _rows(_VALUES):
        for name, same, key in (entry.partition("=") for entry in entries if kind in kinds):
            named[f"{before}{name}".removeprefix("-")] = f"{block}{key if same else name}".removeprefix("-")
    return named


# module of DeepSpeed -> {module of Slipstream: names in it}
SERVED: dict[str, dict[str, str]] = {}
for _module, _home, _names in _rows(_SERVED):
    SERVED.setdefault(_whole(_module), {})["slipstream" if _home == "-" else f"slipstream.{_home}"] = _names

# another path of a module -> its key in SERVED
ALIASES = {_whole(alias): _whole(module) for module, aliases in _rows(_ALIASES) for alias in aliases.split()}

# module of DeepSpeed -> {name, or * for all others: the missing feature, and an alternative}
MISSING: dict[str, dict[str, str]] = {}
MISSING_METHODS: dict[str, str] = {}  # of the engine
for *_places, _why in _rows(_MISSING):
    for _place in _places:
        _module, _, _name = _place.partition("/")
        if _module.endswith("()"):
            MISSING_METHODS[_module.removesuffix("()")] = _why
        else:
            MISSING.setdefault(_whole(_module), {})[_name or "*"] = _why

CONFIG_ATTRIBUTES, CONFIG_GETTERS = _named("A"), _named("M")  # attribute of DeepSpeedConfig -> key; method of the engine -> key
# methods of the engine that return the attribute of DeepSpeedConfig
CONFIG_METHODS = """optimizer_params scheduler_name scheduler_params torch_autocast_enabled checkpoint_tag_validation_enabled
checkpoint_tag_validation_fail""".split()  # noqa: SIM905

# module that `python -m` can run -> its function
RUN: Mapping[str, str] = {
    "deepspeed.env_report": "slipstream.compat.launcher:report",
    "deepspeed.launcher.launch": "slipstream.compat.launcher:main",
    "deepspeed.launcher.runner": "slipstream.compat.launcher:main",
    "deepspeed.utils.zero_to_fp32": "slipstream.compat.launcher:zero_to_fp32",
    "deepspeed.utils.zero_to_torch": "slipstream.compat.launcher:zero_to_torch",
    "deepspeed.checkpoint.ds_to_universal": "slipstream.compat.universal:main",
}

# module -> the module that provides its other names
BEYOND: Mapping[str, str] = {"deepspeed.comm": "slipstream.compat.comm"}

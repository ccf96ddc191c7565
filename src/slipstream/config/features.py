"""Blocks of DeepSpeed's JSON that configure one feature each: parallelism, data, monitoring, tuning.

The rules are those of `schema.py`, which has the core and the root: DeepSpeed's names and defaults, one field per key.
"""

# ruff: noqa: RUF012 (pydantic copies a mutable default for every instance)

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from slipstream.config.keys import Feature
from slipstream.config.values import (
    MIB,
    Block,
    Count,
    Fraction,
    Int,
    Names,
    Number,
    Positive,
    Real,
    Seed,
    Size,
    Word,
    honored,
    no_effect,
    switch,
)

# Parallelism


_BY_MESH = "the mesh decides which ranks slice a layer; initialize(mpu=) brings groups of your own"


class TensorParallelSize(Block):
    tp_size: Count = honored(1, "Ranks that share each layer; the same as `slipstream.mesh.tp`.", "test_an_unmodified_model")
    tp_grain_size: Count = no_effect(1, "heads are never cut, and other features are shared as evenly as possible")
    mpu: Any = no_effect(None, _BY_MESH)
    tp_group: Any = no_effect(None, _BY_MESH)


class TensorParallel(Block):
    autotp_size: Size = honored(0, "Ranks that share each layer; the same as `slipstream.mesh.tp`.", "test_an_unmodified_model")
    tp: TensorParallelSize = TensorParallelSize()
    dtype: str | None = no_effect("fp16", "fp16 and bf16 decide the dtype")
    preset_model: str | None = honored(
        None, "Plan of a known model: llama, qwen2, bloom, gpt2, opt, ...", "test_a_partition_config"
    )
    tp_overlap_comm: bool = honored(
        False,
        "Sum input gradients while weight gradients are computed and, over a network, a row layer's output in chunks during its "
        "product. The same bits; gains if the network, not the processor, moves the bytes.",
        "test_overlapped_sums_have_the_same_bits",
    )
    vocab_parallel_lm_head: bool | None = honored(
        None,
        "Compute the loss from logits of which each rank has a share of the vocabulary.",
        "test_a_loss_over_shares_of_the_vocabulary",
    )
    vocab_parallel_ce_backend: str = no_effect("torch", "the loss over shares of the vocabulary is Slipstream's own")
    injection_policy_tuple: Any = no_effect(None, "partition_config names the layers to cut")
    partition_config: dict[str, Any] | None = honored(
        None,
        "Which layers are cut, and how: `layer_specs`, `use_default_specs`, `lm_head_patterns`, `strict_mode`.",
        "test_a_partition_config",
    )
    keep_module_on_host: bool = no_effect(False, "the model is cut where its parameters are")
    replace_with_kernel_inject: bool = no_effect(False, "modules are not replaced")


_BY_MODEL = "a model's experts are found by their class, and computed by grouped products"
_BY_EXCHANGE = "the transport of the ranks decides how tokens travel; counts are exact, without a buffer of a fixed size"


_ROUTERS = "the model's own."
_FIXED = "Must be what the model does: another value is refused."


class ExpertParallel(Block):
    enabled: bool = honored(
        False, "Split the experts of each layer over `autoep_size` ranks.", "test_an_unmodified_model_of_experts"
    )
    autoep_size: Count = honored(
        1,
        "Ranks that have different experts of a layer, unless the layer's own `ep_size` says.",
        "test_an_unmodified_model_of_experts",
    )
    expert_tensor_parallel_size: Count = no_effect(1, "tensor_parallel.autotp_size slices experts, too")
    validate_folding_routing: bool = no_effect(False, "the numbers of rows are compared in every exchange")
    async_split_plan: bool = no_effect(False, _BY_EXCHANGE)
    preset_model: str | None = no_effect(None, _BY_MODEL)
    moe_layer_pattern: str | None = honored(
        None,
        "Regular expression of the names of layers whose experts are split. One whose experts cannot be split is refused; null: it "
        "is named in a warning.",
        "test_experts_that_stay_whole_are_named",
    )
    expert_pattern: str | None = honored(
        None,
        'With `moe_layer_pattern`: of the name of the experts in such a layer; null: "experts".',
        "test_experts_that_stay_whole_are_named",
    )
    router_pattern: str | None = no_effect(None, _BY_MODEL)
    use_grouped_mm: bool = no_effect(True, _BY_MODEL)
    disable_triton_grouped_mm: bool = no_effect(False, _BY_MODEL)
    route_norm: bool | None = honored(
        None, f"Whether a token's weights add up to 1; null: {_ROUTERS}", "test_router_settings_of_the_config"
    )
    route_scale: Real = honored(1.0, f"Factor of the weights; 1: {_ROUTERS}", "test_router_settings_of_the_config")
    score_apply: Literal["auto", "pre", "post"] = honored(
        "auto", f"Where weights apply: to outputs (post). {_FIXED}", "test_router_settings_of_the_config"
    )
    combine_impl: str = no_effect("auto", _BY_MODEL)
    row_weighting_impl: str = no_effect("auto", _BY_MODEL)
    gate_up_impl: str = no_effect("separate", _BY_MODEL)
    comm_backend: str = no_effect("comm", _BY_EXCHANGE)
    comm_num_sm: Size = no_effect(12, _BY_EXCHANGE)
    comm_qp_margin: Size = no_effect(4, _BY_EXCHANGE)
    comm_max_tokens_per_rank: Size = no_effect(0, _BY_EXCHANGE)
    num_expert_groups: Count | None = honored(None, f"Groups of experts; null: {_ROUTERS}", "test_router_settings_of_the_config")
    num_limited_groups: Count | None = honored(
        None, f"Groups that a token uses; null: {_ROUTERS}", "test_router_settings_of_the_config"
    )
    score_func: Literal["auto", "softmax", "sigmoid"] = honored(
        "auto", f"The router's scores. {_FIXED}", "test_router_settings_of_the_config"
    )
    top_k: Count | Literal["auto"] = honored("auto", f"Experts of a token; auto: {_ROUTERS}", "test_router_settings_of_the_config")
    load_balance_coeff: Positive | None = honored(
        None,
        "Step by which a bias on the choice of experts moves against their load after each update; the router must have the bias "
        "(DeepSeek-V3 and its like, `slipstream.moe.MoE`). null: biases rest.",
        "test_the_config_balances_the_experts_of_an_unmodified_model",
    )
    routed_scaling_factor: Positive | Literal["auto"] = honored(
        "auto", "As `route_scale`, before it.", "test_router_settings_of_the_config"
    )
    expert_w1: str | None = no_effect(None, _BY_MODEL)
    expert_w2: str | None = no_effect(None, _BY_MODEL)
    expert_w3: str | None = no_effect(None, _BY_MODEL)
    num_experts_attr: str | None = no_effect(None, _BY_MODEL)
    top_k_attr: str | None = no_effect(None, _BY_MODEL)
    has_shared_experts: bool | None = no_effect(None, _BY_MODEL)
    shared_experts_pattern: str | None = no_effect(None, _BY_MODEL)
    shared_experts_gate_pattern: str | None = no_effect(None, _BY_MODEL)
    expert_activation: str | None = honored(None, f"The experts' activation. {_FIXED}", "test_router_settings_of_the_config")


class Pipeline(Block):
    stages: Count | Word[Literal["auto"]] = honored(
        "auto", "Pipeline stages; the same as `slipstream.mesh.pp`.", "test_the_stages_of_the_config"
    )
    partition: str = honored(
        "best",
        "How a decoder's blocks are divided into stages: `parameters` (also `best`), `uniform`, `type:REGEX` of their classes, or "
        "`profile`, which measures them. A PipelineModule divides its own layers, as in DeepSpeed.",
        "test_the_partition_of_the_config",
    )
    seed_layers: bool = no_effect(False, "PipelineModule(seed_layers=) decides, as in DeepSpeed")
    activation_checkpoint_interval: Size = honored(
        0,
        "Layers of a PipelineModule that are recomputed together; 0: the module's own. In a decoder, each block is recomputed.",
        "test_recomputed_layers",
    )
    pipe_partitioned: bool = no_effect(True, "activations travel whole; tensor-parallel ranks send to their own peers")
    grad_partitioned: bool = no_effect(True, "activations travel whole; tensor-parallel ranks send to their own peers")
    use_reentrant: bool = no_effect(True, "recomputed layers do not need a reentrant backward")


# Engine features


class HybridEngine(Block):
    feature = Feature(
        "the hybrid engine for RLHF", "set hybrid_engine.enabled to false; generation under torch.no_grad() works at every stage"
    )
    enabled: bool = switch()
    max_out_tokens: Count = 512
    inference_tp_size: Count = 1
    release_inference_cache: bool = False
    pin_parameters: bool = True
    tp_gather_partition_size: Count = 8
    enable_cuda_graph: bool = False


class InferenceWeightQuantization(Block):
    feature = Feature("weight quantization for inference", "drop the block weight_quantization, or set its enabled to false")
    enabled: bool = switch(True, off=(False, {}))
    num_bits: Count = 8
    q_type: str = "symmetric"
    q_groups: Count = 1
    quantized_initialization: dict[str, Any] = switch({}, off=(False, {}))
    post_init_quant: dict[str, Any] = switch({}, off=(False, {}))


class Compile(Block):
    feature = Feature(
        "DeepCompile", 'set compile.deepcompile to false; {"compile": {"enabled": true}} is torch.compile of each block'
    )
    enabled: bool = honored(False, "Apply `torch.compile` to each repeated block, or to the model if it has none.", "test_compile")
    disable: bool = honored(False, "True: do not compile, even if `enabled` is true.")
    backend: str = honored("inductor", "Backend of `torch.compile`, by name or as `module.attribute`.", "test_compile")
    kwargs: dict[str, Any] = honored(
        {}, "Other arguments of `torch.compile` (`mode`, `fullgraph`, `dynamic`, ...).", "test_compile"
    )
    deepcompile: bool = switch()
    autoep_non_moe: bool = False
    free_activation: bool = False
    free_activation_threshold: Size = 10 * MIB
    offload_activation: bool = False
    offload_activation_pin_memory: bool = True
    offload_opt_states: bool = False
    double_buffer: bool = True
    symmetric_memory: bool = False
    debug_log: bool = False
    offload_parameters: bool = False
    sync_before_reduce: bool = False
    sync_after_reduce: bool = False
    sync_before_allgather: bool = False
    sync_after_allgather: bool = False
    keep_int_input_tensors: bool = True
    keep_all_input_tensors: bool = False
    passes: list[Literal["z1", "z3", "autosp", "autotp"]] | None = None


class ActivationCheckpointing(Block):
    partition_activations: bool = no_effect(
        False, "tensor_parallel ranks keep a share of what is saved with `slipstream.tensor.sequence_parallel`"
    )
    cpu_checkpointing: bool = honored(False, "Keep the saved inputs of recomputed blocks in host memory.")
    contiguous_memory_optimization: bool = no_effect(
        False,
        "saved inputs are the block's own input tensors, not copies in a buffer; "
        "PYTORCH_ALLOC_CONF=expandable_segments:True reduces fragmentation of CUDA memory",
    )
    number_checkpoints: Size | None = honored(None, "Recompute this many of the repeated blocks, from the first; not set: all.")
    synchronize_checkpoint_boundary: bool = honored(False, "Synchronize the device before and after each recomputed block.")
    profile: bool = honored(False, "Log the time of recomputation, in seconds.")


_PATTERN = "test_each_mode_of_the_json"


class SparseAttention(Block):
    """Which blocks of attention's scores are computed. Each mode reads its own keys (`slipstream.attention.layouts`)."""

    mode: Word[Literal["dense", "fixed", "variable", "bigbird", "bslongformer"]] = honored(
        "fixed", 'The pattern of blocks; "dense": all of them, as without this block.', _PATTERN
    )
    block: Count = honored(16, "Tokens of a block, a multiple of 16.", _PATTERN)
    different_layout_per_head: bool = honored(False, "Each head has a layout of its own.", _PATTERN)
    num_local_blocks: Count = honored(4, "Blocks of a window, in mode fixed.", _PATTERN)
    num_global_blocks: Size = honored(1, "Global blocks: of each window (fixed), or at the beginning (bigbird).", _PATTERN)
    attention: Word[Literal["unidirectional", "bidirectional"]] = honored(
        "bidirectional", "unidirectional: no block of later keys. Decoders are causal inside blocks, too.", _PATTERN
    )
    horizontal_global_attention: bool = honored(False, "Global blocks attend to all (fixed, variable).", _PATTERN)
    num_different_global_patterns: Count = honored(1, "Global blocks that heads take in turn (fixed).", _PATTERN)
    num_random_blocks: Size = honored(0, "Random blocks of each row (variable, bigbird).", _PATTERN)
    local_window_blocks: list[Count] = honored([4], "Lengths of windows in blocks, the last one repeated (variable).", _PATTERN)
    global_block_indices: list[Size] = honored([0], "First blocks of global spans (variable, bslongformer).", _PATTERN)
    global_block_end_indices: list[Size] | None = honored(
        None, "Ends of global spans, exclusive; not set: spans of one block (variable, bslongformer).", _PATTERN
    )
    num_sliding_window_blocks: Count = honored(3, "Blocks of the sliding window (bigbird, bslongformer).", _PATTERN)


_PROFILER = "test_flops_profiler"


class FlopsProfiler(Block):
    enabled: bool = honored(False, "Profile one step: parameters, MACs, FLOP and latency of each module.", _PROFILER)
    profile_step: Size = honored(1, "Steps before the one that is profiled.", _PROFILER)
    module_depth: Int = honored(-1, "Depth to which top modules are listed; -1: all.", _PROFILER)
    top_modules: Size = honored(1, "Number of top modules at each depth.", _PROFILER)
    detailed: bool = honored(True, "Print the tree of all modules.", _PROFILER)
    output_file: str | None = honored(
        None, "File for the profile, beside which FILE.json and FILE.svg are written; not set: standard output.", _PROFILER
    )
    recompute_fwd_factor: Real = no_effect(0.0, "the backward is counted as it is, with what it computes again")


# Data


_LENGTHS, _SCHEDULE = "test_sequences_grow", "test_difficulties_are_those_of_the_formulas"


class LengthSchedule(Block):
    total_curriculum_step: Count | None = honored(None, "Steps until max_difficulty (fixed_linear, fixed_root).", _SCHEDULE)
    difficulty_step: Count | None = honored(None, "Lengths are multiples of it (fixed_linear, fixed_root).", _SCHEDULE)
    root_degree: Positive | None = honored(None, "Degree of the root (fixed_root).", _SCHEDULE)
    difficulty: list[Count] | None = honored(None, "Lengths, in order (fixed_discrete).", _SCHEDULE)
    max_step: list[Count] | None = honored(None, "The last step of each length but the last one (fixed_discrete).", _SCHEDULE)


class Curriculum(Block):
    """The older, top-level block, whose difficulty is the sequence length."""

    enabled: bool = honored(False, "Train on the first tokens of each sequence, more of them as training goes on.", _LENGTHS)
    curriculum_type: Word[Literal["seqlen"]] = honored("seqlen", "What becomes more difficult: the sequences' length.", _LENGTHS)
    min_difficulty: Count = honored(1, "Tokens at the beginning.", _LENGTHS)
    max_difficulty: Count | None = honored(None, "Tokens at last.", _LENGTHS)
    schedule_type: str = honored("fixed_linear", "fixed_linear, fixed_root, fixed_discrete, or custom: a function.", _SCHEDULE)
    schedule_config: LengthSchedule = LengthSchedule()


_DRAWN, _RAMP, _BY_TOKENS = "test_the_loader_follows_the_config", "test_schedules_of_metrics", "test_batches_by_tokens_by_config"
_ROUTED, _TOKENS = "test_layers_compute_a_part_of_the_tokens", "test_the_number_of_tokens"


class CurriculumSchedule(Block):
    total_curriculum_step: Count | None = honored(None, "Steps until max_difficulty (fixed_linear, fixed_root).", _RAMP)
    difficulty_step: Count | None = honored(None, "Difficulties are multiples of it (fixed_linear, fixed_root).", _RAMP)
    root_degree: Positive | None = honored(None, "Degree of the root (fixed_root).", _RAMP)
    difficulty: list[Number] | None = honored(None, "Difficulties, in order (fixed_discrete).", _RAMP)
    max_step: list[Count] | None = honored(None, "The last step of each difficulty but the last one (fixed_discrete).", _RAMP)


class CurriculumMetric(Block):
    index_to_sample_path: str | None = honored(None, "The samples of each value, a file of `DataAnalyzer` without .idx.", _DRAWN)
    index_to_metric_path: str | None = honored(None, "The values, likewise (difficulty_type value).", _DRAWN)
    difficulty_type: Word[Literal["value", "percentile"]] = honored(
        "value", "value: samples of at most the difficulty; percentile: the first difficulty / max_difficulty of them.", _DRAWN
    )
    clustering_type: Word[Literal["single_cluster", "schedule_based"]] = honored(
        "single_cluster", "single_cluster: the metric selects no samples, its difficulty is only told to a function.", _DRAWN
    )
    min_difficulty: Number = honored(1, "The difficulty at the beginning.", _RAMP)
    max_difficulty: Number | None = honored(None, "The difficulty at last.", _RAMP)
    schedule_type: str = honored("fixed_root", "fixed_linear, fixed_root, fixed_discrete, or custom: a function.", _RAMP)
    schedule_config: CurriculumSchedule = CurriculumSchedule()


class DataCurriculum(Block):
    enabled: bool = honored(False, "Draw samples that are easy enough for the step.", _DRAWN)
    data_cluster_path: str | None = no_effect(None, "the order of samples is a function of seed and step; no files are written")
    curriculum_metrics: dict[str, CurriculumMetric] = {}


class DynamicBatching(Block):
    enabled: bool = honored(False, "Fill micro-batches by tokens, with learning rates scaled by the number of samples.", _BY_TOKENS)
    metrics_path: str | None = honored(None, "Folder of `DataAnalyzer`, with lengths of samples as metric `seqlen`.", _BY_TOKENS)
    lr_scaling_method: Word[Literal["linear", "sqrt", "none"]] = honored(
        "linear", "The rate's factor: samples of the batch over train_batch_size, its square root, or 1.", _BY_TOKENS
    )
    min_batch_size: Count = honored(1, "The fewest samples of a micro-batch.", _BY_TOKENS)
    max_batch_size: Count | None = honored(None, "The most samples of a micro-batch.", _BY_TOKENS)
    sequence_picking_order: Word[Literal["dataloader", "random", "seqlen"]] = honored(
        "dataloader", "The order in which samples fill micro-batches: the dataset's, shuffled once, or by length.", _BY_TOKENS
    )
    max_tokens: Count | None = honored(None, "The most tokens of a micro-batch; longer samples are left out.", _BY_TOKENS)
    verbose: bool = honored(False, "Log the batches and the learning rates.", _BY_TOKENS)


class DataSampling(Block):
    enabled: bool = honored(False, "Allow the blocks in it.", _DRAWN)
    num_epochs: Count = honored(1000, "Samples of one iteration of the loader, in sizes of the dataset.", _DRAWN)
    num_workers: Size = honored(0, "Processes that read samples.", _DRAWN)
    pin_memory: bool = no_effect(False, "batches are pinned if the device is a GPU")
    curriculum_learning: DataCurriculum = DataCurriculum()
    dynamic_batching: DynamicBatching = DynamicBatching()


class LtdScheduleConfig(Block):
    require_steps: Count | None = honored(None, "Steps until max_value.", _TOKENS)
    seq_per_step: Count | None = honored(None, "Numbers of tokens are multiples of it.", _TOKENS)


class LtdSchedule(Block):
    min_value: Count | None = honored(None, "Tokens that a layer computes at the beginning.", _TOKENS)
    max_value: Count | None = honored(None, "Tokens at last: all.", _TOKENS)
    schedule_type: Word[Literal["fixed_linear"]] = honored("fixed_linear", "How the number grows by the step.", _TOKENS)
    schedule_config: LtdScheduleConfig = LtdScheduleConfig()


class LayerTokenLr(Block):
    feature = Feature("a learning rate by tokens of layers, which DeepSpeed has not either", "use a schedule of steps")
    enabled: bool = switch()
    total_layer_tokens: Size | None = None
    warmup_type: str | None = None
    warmup_layer_tokens: Size | None = None


_ENGINES = "the engine knows its batch sizes"


class RandomLtd(Block):
    enabled: bool = honored(False, "Let layers compute a random part of the tokens in training (random-LTD).", _ROUTED)
    total_layer_num: Count | None = honored(None, "Layers of the model.", _ROUTED)
    random_ltd_layer_num: Count | None = honored(None, "Layers that drop tokens; the number of `random_ltd_layer_id`.", _ROUTED)
    random_ltd_layer_id: list[Size] = honored([], "Which layers drop tokens, from 0.", _ROUTED)
    model_mask_name: str | None = honored(None, "A mask argument that each call of a layer must have.", _ROUTED)
    model_type: Word[Literal["encoder", "decoder"]] = no_effect(
        "decoder", "tokens keep their order, and masks follow them in encoders and decoders"
    )
    hidden_state_order: Word[Literal["batch_seq_dim", "seq_batch_dim"]] = honored(
        "batch_seq_dim", "The order of dimensions of hidden states.", "test_sequence_first"
    )
    global_batch_size: Size | None = no_effect(None, _ENGINES)
    micro_batch_size: Size | None = no_effect(None, _ENGINES)
    random_ltd_schedule: LtdSchedule = LtdSchedule()
    layer_token_lr_schedule: LayerTokenLr = LayerTokenLr()


class DataRouting(Block):
    enabled: bool = honored(False, "Allow `random_ltd`.", _ROUTED)
    random_ltd: RandomLtd = RandomLtd()


class DataEfficiency(Block):
    enabled: bool = honored(False, "Allow the blocks in it.", _DRAWN)
    seed: Seed = honored(1234, "Seed of the order of samples and of dropped tokens.", _DRAWN)
    data_sampling: DataSampling = DataSampling()
    data_routing: DataRouting = DataRouting()


class ProgressiveLayerDrop(Block):
    enabled: bool = honored(False, "Skip residual blocks in training, more of them as it goes on.", "test_blocks_are_dropped")
    theta: Fraction = honored(1.0, "Probability of keeping the deepest block at last; 1 keeps all.", "test_the_schedule")
    gamma: Positive = honored(0.001, "Rate per step at which theta falls from 1.", "test_the_schedule")


# Compression


_CURVED = "test_sensitive_layers_keep_their_bits"


class Eigenvalue(Block):
    """MoQ's second-order schedule, at the top or in quantize_training."""

    enabled: bool = honored(False, "Layers with a large eigenvalue of the loss's Hessian lose bits later.", _CURVED)
    verbose: bool = honored(False, "Log each eigenvalue.", _CURVED)
    max_iter: Count = honored(100, "Most products with the Hessian a block.", _CURVED)
    tol: Real = honored(1e-2, "Stop when the eigenvalue changes by less than this share of itself.", _CURVED)
    stability: Real = honored(1e-6, "Added to norms that vectors are divided by.", _CURVED)
    gas_boundary_resolution: Count = honored(1, "Measure at multiples of so many steps only.", _CURVED)
    layer_name: str = honored("bert.encoder.layer", "Path of the list of blocks in the model.", _CURVED)
    layer_num: Size = honored(0, "Blocks of the list that are measured; 0: all.", _CURVED)


_WEIGHTS, _INPUTS, _PRUNED = "test_bits_fall_with_the_steps", "test_inputs_are_quantized", "test_masked_and_cleaned"
_OLDER, _TAUGHT = "test_the_older_block_is_weight_quantization", "test_a_student_takes_layers"
_PATTERNS = 'Patterns that are searched in the names of layers; "*": all.'
_ONLY_SNIP = "only the method snip_momentum reads it, which is not built"
_KERNEL = "there is one implementation"
_QUIET = "the schedule is a function of the step"


class MixedQuantize(Block):
    enabled: bool = honored(False, "After a change of bits, go to the rounded weights little by little, in every dtype.", _WEIGHTS)
    quantize_change_ratio: Real = honored(0.001, "The exact weights' share that each step takes away.", _WEIGHTS)


class QuantizeAlgo(Block):
    q_type: str = honored("symmetric", "As `quantization_type`.", _OLDER)
    rounding: str = honored("nearest", "nearest or stochastic.", _OLDER)


class QuantizeBits(Block):
    start_bits: Count = honored(16, "Bits at the schedule's offset.", _OLDER)
    target_bits: Count = honored(8, "Bits at last.", _OLDER)


class QuantizeSchedule(Block):
    quantize_period: Count = honored(1000, "As `quantization_period`.", _OLDER)
    schedule_offset: Size = honored(1000, "The step at which quantization begins.", _OLDER)


class QuantizeTraining(Block):
    """The older block of MoQ, before `compression_training`: weight quantization of every layer."""

    enabled: bool = honored(False, "Quantize weights in training (MoQ).", _OLDER)
    quantize_verbose: bool = no_effect(False, _QUIET)
    quantizer_kernel: bool = no_effect(False, _KERNEL)
    quantize_groups: Count = honored(1, "Groups of a weight, each with a scale.", _OLDER)
    quantize_weight_in_forward: bool = honored(False, "Begin with the target bits.", _OLDER)
    quantize_algo: QuantizeAlgo = QuantizeAlgo()
    quantize_bits: QuantizeBits = QuantizeBits()
    quantize_schedule: QuantizeSchedule = QuantizeSchedule()
    fp16_mixed_quantize: MixedQuantize = MixedQuantize()
    eigenvalue: Eigenvalue = Eigenvalue()


class LayerReduction(Block):
    enabled: bool = honored(False, "The model takes layers of a teacher, which `init_compression` gets.", _TAUGHT)
    keep_number_layer: Count | None = honored(None, "Layers of the student; must be as many as teacher_layer.", _TAUGHT)
    module_name_prefix: str = honored("", "The list of layers, in both models.", _TAUGHT)
    teacher_layer: list[Size] = honored([], "The teacher's layers, in order.", _TAUGHT)
    other_module_name: Names = honored([], "Other modules that are copied.", _TAUGHT)


class WeightQuantizationShared(Block):
    enabled: bool = honored(False, "Compute with rounded weights; gradients go to the exact ones.", _WEIGHTS)
    quantizer_kernel: bool = no_effect(False, _KERNEL)
    schedule_offset: Size = honored(0, "The step at which it begins.", _WEIGHTS)
    quantize_groups: Count = honored(1, "Groups of a weight, each with a scale.", _WEIGHTS)
    quantize_verbose: bool = no_effect(False, _QUIET)
    quantization_type: str = honored(
        "symmetric", "symmetric, asymmetric, or served: the grids of Slipstream's inference engine (8 or 4 bits).", _WEIGHTS
    )
    rounding: str = honored("nearest", "nearest or stochastic.", _WEIGHTS)
    quantize_weight_in_forward: bool = honored(False, "Begin with the target bits.", _WEIGHTS)
    fp16_mixed_quantize: MixedQuantize = MixedQuantize()


class WeightQuantizationParams(Block):
    start_bits: Count = honored(8, "Bits at the schedule's offset.", _WEIGHTS)
    target_bits: Count = honored(8, "Bits at last, 1 to 16.", _WEIGHTS)
    quantization_period: Count = honored(1, "Steps until the first bit is lost; the next ones after 2, 4, 8 ... periods.", _WEIGHTS)


class WeightQuantizationGroup(Block):
    params: WeightQuantizationParams = WeightQuantizationParams()
    modules: Names = honored(["*"], _PATTERNS, _WEIGHTS)
    related_modules: Any = no_effect(None, "quantization changes no other layer")


class WeightQuantization(Block):
    shared_parameters: WeightQuantizationShared = WeightQuantizationShared()
    different_groups: dict[str, WeightQuantizationGroup] = {}


class ActivationQuantizationShared(Block):
    enabled: bool = honored(False, "Round the inputs of layers.", _INPUTS)
    schedule_offset: Size = honored(1000, "The step at which it begins.", _INPUTS)
    quantization_type: str = honored("symmetric", "symmetric or asymmetric.", _INPUTS)
    range_calibration: str = honored("dynamic", "dynamic: a range for each token; static: moving averages of the ends.", _INPUTS)


class ActivationQuantizationParams(Block):
    bits: Count = honored(8, "Bits, 1 to 16.", _INPUTS)


class ActivationQuantizationGroup(Block):
    params: ActivationQuantizationParams = ActivationQuantizationParams()
    modules: Names = honored(["*"], _PATTERNS, _INPUTS)
    related_modules: Any = no_effect(None, "quantization changes no other layer")


class ActivationQuantization(Block):
    shared_parameters: ActivationQuantizationShared = ActivationQuantizationShared()
    different_groups: dict[str, ActivationQuantizationGroup] = {}


class SparsePruningShared(Block):
    enabled: bool = honored(False, "Mask single weights.", _PRUNED)
    method: str = honored("l1", "l1: the largest weights of the beginning; topk: learned scores.", _PRUNED)
    schedule_offset: Size = honored(1000, "The step at which it begins.", _PRUNED)
    schedule_offset_end: Size | None = no_effect(None, _ONLY_SNIP)
    schedule_offset_stride: Size = no_effect(1, _ONLY_SNIP)
    block_pattern: str = no_effect("4x1", _ONLY_SNIP)
    dense_ratio: Fraction = honored(0.1, "Share that is kept, where different_groups does not say.", _PRUNED)
    excluded_modules: Names = honored([], "Patterns of layers that are not pruned.", _PRUNED)


class PruningShared(Block):
    enabled: bool = honored(False, "Mask outputs of layers (rows), or filters of convolutions (channels).", _PRUNED)
    method: str = honored("l1", "l1: the largest of the beginning; topk: learned scores.", _PRUNED)
    schedule_offset: Size = honored(1000, "The step at which it begins.", _PRUNED)


class HeadPruningShared(Block):
    enabled: bool = honored(False, "Mask heads: inputs of an attention's output projection, by learned scores.", _PRUNED)
    method: str = honored("topk", "topk: learned scores.", _PRUNED)
    schedule_offset: Size = honored(1000, "The step at which it begins.", _PRUNED)
    num_heads: Count | None = honored(None, "Heads of the attention.", _PRUNED)


class PruningParams(Block):
    dense_ratio: Fraction = honored(0.5, "Share that is kept.", _PRUNED)


class PruningGroup(Block):
    params: PruningParams = PruningParams()
    modules: Names = honored(["*"], _PATTERNS, _PRUNED)
    related_modules: list[Any] | None = honored(
        None, "For each pattern, patterns of the layers that lose inputs with it (heads: outputs).", _PRUNED
    )


class SparsePruning(Block):
    shared_parameters: SparsePruningShared = SparsePruningShared()
    different_groups: dict[str, PruningGroup] = {}


class Pruning(Block):
    shared_parameters: PruningShared = PruningShared()
    different_groups: dict[str, PruningGroup] = {}


class HeadPruning(Block):
    shared_parameters: HeadPruningShared = HeadPruningShared()
    different_groups: dict[str, PruningGroup] = {}


class CompressionTraining(Block):
    layer_reduction: LayerReduction = LayerReduction()
    weight_quantization: WeightQuantization = WeightQuantization()
    activation_quantization: ActivationQuantization = ActivationQuantization()
    sparse_pruning: SparsePruning = SparsePruning()
    row_pruning: Pruning = Pruning()
    head_pruning: HeadPruning = HeadPruning()
    channel_pruning: Pruning = Pruning()


# Monitoring, checkpoints, tuning

_WRITER = "each rank writes its shards to its own file with direct I/O and without pickle"


_FILES, _SERVICES = "test_files_have_the_figures_of_each_step", "test_services_get_the_figures"


class Tensorboard(Block):
    enabled: bool = honored(False, "Rank 0 writes the figures of each step there.", _FILES)
    output_path: str = honored("", "Folder of the job's folder.", _FILES)
    job_name: str = honored("DeepSpeedJobName", "Name of the job's folder.", _FILES)


class Wandb(Block):
    enabled: bool = honored(False, "Rank 0 sends the figures of each step to Weights & Biases.", _SERVICES)
    group: str | None = honored(None, "Group of the run.", _SERVICES)
    team: str | None = honored(None, "Entity of the run.", _SERVICES)
    project: str = honored("deepspeed", "Project of the run.", _SERVICES)


class CsvMonitor(Tensorboard):
    pass


class Comet(Block):
    enabled: bool = honored(False, "Rank 0 sends the figures of each step to Comet.", _SERVICES)
    samples_log_interval: Count = honored(100, "Samples between two values of a tag.", _SERVICES)
    project: str | None = honored(None, "Project of the experiment.", _SERVICES)
    workspace: str | None = honored(None, "Workspace of the experiment.", _SERVICES)
    api_key: str | None = honored(None, "Key of the service.", _SERVICES)
    experiment_name: str | None = honored(None, "Name of the experiment.", _SERVICES)
    experiment_key: str | None = honored(None, "Key of an experiment to go on with.", _SERVICES)
    online: bool | None = honored(None, "false: write to disk, to be uploaded later.", _SERVICES)
    mode: str | None = honored(None, "get, create or get_or_create the experiment.", _SERVICES)


_CUSTOM = "test_a_class_of_the_script"
_MLFLOW, _TRACKIO, _OTLP = "test_mlflow_gets_the_figures", "test_trackio_gets_the_figures", "test_a_collector_gets_the_figures"
_SCRAPED, _PAGE = "test_prometheus_scrapes_the_figures", "test_a_report_has_the_run"


class Mlflow(Block):
    tracking_uri: str | None = honored(None, "Server, database or folder of MLflow; not set: MLflow's own default.", _MLFLOW)
    experiment: str | None = honored(None, "Name of the experiment.", _MLFLOW)
    run_name: str | None = honored(None, "Name of the run.", _MLFLOW)
    run_id: str | None = honored(None, "A run of the script to log to, which is left open.", _MLFLOW)


class Trackio(Block):
    project: str = honored("slipstream", "Project of the run.", _TRACKIO)
    name: str | None = honored(None, "Name of the run.", _TRACKIO)
    group: str | None = honored(None, "Group of the run.", _TRACKIO)
    space_id: str | None = honored(None, "A Space of Hugging Face; not set: on this machine only.", _TRACKIO)


class Prometheus(Block):
    port: Annotated[Count, Field(le=65535)] = honored(9400, "Port of rank 0 at which the newest figures are scraped.", _SCRAPED)
    host: str = honored("127.0.0.1", "Address to listen at; 0.0.0.0: all of the machine.", _SCRAPED)


class Otlp(Block):
    endpoint: str | None = honored(None, "URL of a collector (http://HOST:4318/v1/metrics); not set: OpenTelemetry's.", _OTLP)
    headers: dict[str, str] = honored({}, "HTTP headers, as for authorization.", _OTLP)
    interval_s: Positive = honored(10.0, "Seconds between two exports of the newest figures.", _OTLP)
    service_name: str = honored("slipstream", "service.name of the figures.", _OTLP)


class JsonLines(Block):
    path: str = honored("figures.jsonl", "File to which each step adds a line.", "test_lines_have_the_figures")


class ReportPage(Block):
    path: str = honored("report.html", "HTML file with the curves of the run, its settings and environment.", _PAGE)
    title: str = honored("Training", "Title of the page.", _PAGE)


class OwnMonitors(Block):
    """`slipstream.monitors`: a block that is there is on, with its defaults if it is {}."""

    mlflow: Mlflow | None = None
    trackio: Trackio | None = None
    prometheus: Prometheus | None = None
    otlp: Otlp | None = None
    jsonl: JsonLines | None = None
    report: ReportPage | None = None
    custom: dict[str, dict[str, Any]] = honored(
        {}, "Classes with `write(events)` and `close()` by dotted name, and the arguments that make them.", _CUSTOM
    )


_TRAFFIC = "test_comms_logger"


class CommsLogger(Block):
    enabled: bool = honored(False, "Record the operations between ranks: bytes, times and waits.", _TRAFFIC)
    prof_all: bool = honored(True, "Record all operations; false: those of `prof_ops`.", _TRAFFIC)
    prof_ops: Names = honored([], "Operations to record, by DeepSpeed's names.", _TRAFFIC)
    verbose: bool = honored(False, "Log each operation.", _TRAFFIC)
    debug: bool = no_effect(False, "with `verbose`, each line names the unit whose states move")


class ThroughputTimer(Block):
    enabled: bool = honored(True, "Progress lines have samples per second.", "test_timers")
    synchronized: bool = no_effect(True, "timers read the clock only where the step synchronizes anyway")


class Timers(Block):
    throughput: ThroughputTimer = ThroughputTimer()


_ELASTIC = "test_elasticity"


class Elasticity(Block):
    """Batch sizes for many numbers of ranks (config/elastic.py)."""

    enabled: bool = honored(False, "Compute the batch sizes such that many numbers of ranks keep the same global batch.", _ELASTIC)
    max_train_batch_size: Count = honored(2000, "Largest global batch, in samples; to be set.", _ELASTIC)
    micro_batch_sizes: list[Count] = honored([2, 4, 6], "Micro-batch sizes to choose from, in samples; to be set.", _ELASTIC)
    min_gpus: Count = honored(1, "Fewest ranks.", _ELASTIC)
    max_gpus: Count = honored(10000, "Most ranks.", _ELASTIC)
    min_time: Size = no_effect(0, "how long to wait between changes of the number of ranks is the scheduler's choice")
    prefer_larger_batch: bool = honored(True, "Of batches that fit equally many numbers of ranks, take the largest.", _ELASTIC)
    version: Real = honored(0.2, "0.1 counts ranks; 0.2 whole nodes, and it has a batch for every number of ranks.", _ELASTIC)
    ignore_non_elastic_batch_info: bool = honored(False, "Ignore batch sizes in the config; false: refuse them.", _ELASTIC)
    num_gpus_per_node: Count = honored(1, "Version 0.2: ranks of a node.", _ELASTIC)
    model_parallel_size: Count = honored(1, "Version 0.2: ranks of one replica of the model, as the mesh has it.", _ELASTIC)


class ParallelWrite(Block):
    pipeline_stage: bool = no_effect(False, _WRITER)


class CheckpointWriter(Block):
    type: str = no_effect("fast", _WRITER)
    decoupled: bool = honored(False, "Asynchronous checkpoints: `save_checkpoint` returns after copying, and a thread writes.")
    io_buffer_size: Size = no_effect(64 * MIB, _WRITER)
    io_buffer_double: bool = no_effect(True, _WRITER)
    io_multiplier: Count = no_effect(1, _WRITER)
    show_statistics: bool = no_effect(False, _WRITER)
    data_parallel: str | None = no_effect(None, _WRITER)


class Checkpoint(Block):
    tag_validation: Word[Literal["ignore", "warn", "fail"]] = honored(
        "warn", "Action if ranks pass different tags to `save_checkpoint`: `ignore`, `warn` or `fail`."
    )
    load_universal: bool = honored(False, "A load without a tag prefers `latest_universal` to `latest`.")
    use_node_local_storage: bool = switch(
        False,
        Feature(
            "checkpoints on node-local disks",
            "set it to false and save to a shared directory",
            moot_on_one_host="all ranks share one host and its disk",
        ),
    )
    parallel_write: ParallelWrite = ParallelWrite()
    checkpoint_serialization: bool = no_effect(True, _WRITER)
    writer: CheckpointWriter = CheckpointWriter()


class Nebula(Block):
    feature = Feature("Nebula checkpoints", "set nebula.enabled to false; checkpoints are already atomic and sharded")
    enabled: bool = switch()
    persistent_storage_path: str | None = None
    persistent_time_interval: Size = 100
    num_of_version_in_retention: Size = 2
    enable_nebula_load: bool = True
    load_path: str | None = None


_TUNED = "test_the_autotuning_block"
_OWN_MODEL = "the first run sees the model itself"


class ModelInfo(Block):
    profile: bool = no_effect(False, _OWN_MODEL)
    num_params: Size | None = no_effect(None, _OWN_MODEL)
    hidden_size: Size | None = no_effect(None, _OWN_MODEL)
    num_layers: Size | None = no_effect(None, _OWN_MODEL)


class Autotuning(Block):
    """Read by `slipstream tune` and `deepspeed --autotuning`; training ignores it."""

    enabled: bool = honored(False, "`slipstream tune` takes its settings from this block; training ignores it.", _TUNED)
    results_dir: str = honored("autotuning_results", "Folder of the runs, the table and the best config.", _TUNED)
    exps_dir: str = no_effect("autotuning_exps", "the config of each run lies in its folder, results_dir/runs/N")
    overwrite: bool = honored(True, "Begin again; false: go on from results_dir.", _TUNED)
    metric: Word[Literal["latency", "throughput", "flops"]] = honored(
        "throughput", "`latency`: seconds of a step; `throughput` and `flops`, which order alike: samples per second.", _TUNED
    )
    metric_path: str | None = no_effect(None, "the figures of each run lie in results_dir/runs/N/progress.jsonl")
    start_profile_step: Size = honored(3, "Steps of a run before those that are timed.", _TUNED)
    end_profile_step: Size = honored(5, "The last step of a run.", _TUNED)
    fast: bool = honored(True, "Vary micro-batch and stage only; false: offload and activations as well.", _TUNED)
    max_train_batch_size: Count | None = honored(None, "Largest global batch to try; null: the config's only.", _TUNED)
    min_train_batch_size: Count = honored(1, "Smallest global batch to try.", _TUNED)
    max_train_micro_batch_size_per_gpu: Count = honored(1024, "Largest micro-batch to try.", _TUNED)
    min_train_micro_batch_size_per_gpu: Count = honored(1, "Smallest micro-batch to try.", _TUNED)
    num_tuning_micro_batch_sizes: Count = honored(3, "How many sizes of micro-batches to try: the largest that fit.", _TUNED)
    mp_size: Count = no_effect(1, "the model parallelism of the script and of slipstream.mesh is seen in the first run")
    tuner_type: Word[Literal["gridsearch", "random", "model_based"]] = honored(
        "gridsearch", "Order of the runs: as listed, random, or by predicted time, corrected by each run.", _TUNED
    )
    tuner_early_stopping: Count = honored(5, "Runs in a row without an improvement that end the search.", _TUNED)
    tuner_num_trials: Count = honored(50, "Most runs.", _TUNED)
    arg_mappings: dict[str, Any] | None = honored(None, "Keys of the config -> options of the script that follow them.", _TUNED)
    model_info: ModelInfo | None = None
    model_info_path: str | None = no_effect(None, _OWN_MODEL)

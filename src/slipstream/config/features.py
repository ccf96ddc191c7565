"""Blocks of DeepSpeed's JSON that configure one feature each: parallelism, engine features, elasticity, checkpoints, tuning.

The rules are those of `schema.py`, which has the core and the root: DeepSpeed's names and defaults, one field per key.
"""

# ruff: noqa: RUF012 (pydantic copies a mutable default for every instance)

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from slipstream.config.keys import Feature
from slipstream.config.values import MIB, Bits, Block, Count, Even, Positive, Real, Size, Word, honored, no_effect, switch

# Parallelism


_BY_MESH = "the mesh decides which ranks slice a layer; initialize(mpu=) brings groups of your own"


class TensorParallelSize(Block):
    tp_size: Count = honored(1, "Ranks that share each layer; the same as `slipstream.mesh.tp`.")
    tp_grain_size: Count = no_effect(1, "heads are never cut, and other features are shared as evenly as possible")
    mpu: Any = no_effect(None, _BY_MESH)
    tp_group: Any = no_effect(None, _BY_MESH)


class TensorParallel(Block):
    autotp_size: Size = honored(0, "Ranks that share each layer; the same as `slipstream.mesh.tp`, which decides if it is 0 or 1.")
    tp: TensorParallelSize = TensorParallelSize()
    dtype: str | None = no_effect("fp16", "fp16 and bf16 decide the dtype")
    preset_model: str | None = honored(None, "Plan of a known model: llama, qwen2, bloom, gpt2, opt, ...")
    tp_overlap_comm: bool = honored(
        False,
        "Sum input gradients while weight gradients are computed and, over a network, a row layer's output in chunks during its "
        "product. The same bits; gains if the network, not the processor, moves the bytes.",
    )
    vocab_parallel_lm_head: bool | None = honored(
        None, "Compute the loss from logits of which each rank has a share of the vocabulary."
    )
    vocab_parallel_ce_backend: str = no_effect("torch", "the loss over shares of the vocabulary is Slipstream's own")
    injection_policy_tuple: Any = no_effect(None, "partition_config names the layers to cut")
    partition_config: dict[str, Any] | None = honored(
        None, "Which layers are cut, and how: `layer_specs`, `use_default_specs`, `lm_head_patterns`, `strict_mode`."
    )
    keep_module_on_host: bool = no_effect(False, "the model is cut where its parameters are")
    replace_with_kernel_inject: bool = no_effect(False, "modules are not replaced")


_BY_MODEL = "a model's experts are found by their class or by the name of their list, and its own router decides"
_BY_COUNTS = "experts of a stack are computed by grouped products, those of a list by their own code"
_BY_EXCHANGE = "the transport of the ranks decides how tokens travel; counts are exact, without a buffer of a fixed size"


_ROUTERS = "the model's own."
_FIXED = "Must be what the model does: another value is refused."


class ExpertParallel(Block):
    enabled: bool = honored(False, "Split the experts of each layer over `autoep_size` ranks, and set their routers.")
    autoep_size: Count = honored(1, "Ranks that have different experts of a layer, unless the layer's own `ep_size` says.")
    expert_tensor_parallel_size: Count = no_effect(1, "tensor_parallel.autotp_size slices experts, too")
    validate_folding_routing: bool = no_effect(False, "the numbers of rows are compared in every exchange")
    async_split_plan: bool = no_effect(False, _BY_EXCHANGE)
    preset_model: Literal["mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3", "minimax_m3"] | None = honored(
        None,
        "Must be what the model is: by its type, or for a model of your own by the names of its layers (`layers.N.mlp.experts`, or "
        "what `moe_layer_pattern` says).",
    )
    moe_layer_pattern: str | None = honored(
        None,
        "Regular expression of the names of layers whose lists of experts are split. One whose experts cannot be split is refused; "
        "null: layers of all lists that are named so, and one that cannot be split is named in a warning.",
    )
    expert_pattern: str | None = honored(
        None, 'With `moe_layer_pattern`: of the name of the experts in such a layer; null: "experts".'
    )
    router_pattern: str | None = no_effect(None, _BY_MODEL)
    use_grouped_mm: bool = no_effect(True, _BY_COUNTS)
    disable_triton_grouped_mm: bool = no_effect(False, _BY_COUNTS)
    route_norm: bool | None = honored(None, f"Whether a token's weights add up to 1; null: {_ROUTERS}")
    route_scale: Real = honored(1.0, f"Factor of the weights; 1: {_ROUTERS}")
    score_apply: Literal["auto", "pre", "post"] = honored("auto", f"Where weights apply: to outputs (post). {_FIXED}")
    combine_impl: str = no_effect("auto", _BY_COUNTS)
    row_weighting_impl: str = no_effect("auto", _BY_COUNTS)
    gate_up_impl: str = no_effect("separate", _BY_COUNTS)
    comm_backend: str = no_effect("comm", _BY_EXCHANGE)
    comm_num_sm: Size = no_effect(12, _BY_EXCHANGE)
    comm_qp_margin: Size = no_effect(4, _BY_EXCHANGE)
    comm_max_tokens_per_rank: Size = no_effect(0, _BY_EXCHANGE)
    num_expert_groups: Count | None = honored(None, f"Groups of experts; null: {_ROUTERS}")
    num_limited_groups: Count | None = honored(None, f"Groups that a token uses; null: {_ROUTERS}")
    score_func: Literal["auto", "softmax", "sigmoid"] = honored("auto", f"The router's scores. {_FIXED}")
    top_k: Count | Literal["auto"] = honored("auto", f"Experts of a token; auto: {_ROUTERS}")
    load_balance_coeff: Positive | None = honored(
        None,
        "Step by which a bias on the choice of experts moves against their load after each update; the router must have the bias "
        "(DeepSeek-V3 and its like, `slipstream.moe.MoE`). null: biases rest.",
    )
    routed_scaling_factor: Positive | Literal["auto"] = honored("auto", "As `route_scale`, before it.")
    expert_w1: str | None = no_effect(None, _BY_MODEL)
    expert_w2: str | None = no_effect(None, _BY_MODEL)
    expert_w3: str | None = no_effect(None, _BY_MODEL)
    num_experts_attr: str | None = no_effect(None, _BY_MODEL)
    top_k_attr: str | None = no_effect(None, _BY_MODEL)
    has_shared_experts: bool | None = no_effect(None, _BY_MODEL)
    shared_experts_pattern: str | None = no_effect(None, _BY_MODEL)
    shared_experts_gate_pattern: str | None = no_effect(None, _BY_MODEL)
    expert_activation: str | None = honored(None, f"The experts' activation. {_FIXED}")


class Pipeline(Block):
    stages: Count | Word[Literal["auto"]] = honored("auto", "Pipeline stages; the same as `slipstream.mesh.pp`.")
    partition: str = honored(
        "best",
        "How a decoder's blocks are divided into stages: `parameters` (also `best`), `uniform`, `type:REGEX` of their classes, or "
        "`profile`, which measures them. A PipelineModule divides its own layers, as in DeepSpeed.",
    )
    seed_layers: bool = no_effect(False, "PipelineModule(seed_layers=) decides, as in DeepSpeed")
    activation_checkpoint_interval: Size = honored(
        0, "Layers of a PipelineModule that are recomputed together; 0: the module's own. In a decoder, each block is recomputed."
    )
    pipe_partitioned: bool = honored(
        True,
        "Of the activations between stages, which tensor-parallel ranks have alike, each sends a share over the network, and the "
        "next stage gathers them.",
    )
    grad_partitioned: bool = honored(True, "The same of these activations' gradients.")
    use_reentrant: bool = no_effect(True, "recomputed layers do not need a reentrant backward")


# Engine features


class HybridEngine(Block):
    enabled: bool = honored(
        False, "`engine.generate` and `engine.module.generate` answer with the current weights, by the engine of serving."
    )
    max_out_tokens: Count = honored(512, "Tokens of a prompt and its answer together; the model's context if that is less.")
    inference_tp_size: Count = no_effect(1, "each rank answers its own prompts, with a whole copy of the weights")
    release_inference_cache: bool = honored(
        False, "Free the memory of generation, its copy of the weights included, after each call; the next call is collective."
    )
    pin_parameters: bool = no_effect(True, "weights are gathered one unit at a time, when they have changed")
    tp_gather_partition_size: Count = no_effect(8, "weights are gathered one unit at a time, when they have changed")
    enable_cuda_graph: bool = no_effect(False, "serving captures CUDA graphs where its kernels run")


_IN_ROWS = "codes are symmetric around 0, in groups of a row's columns, so that each rank quantizes and reads rows of its own"


class GroupQuantization(Block):
    num_bits: Bits = honored(8, "Bits of a weight: 4 (NF4) or 8 (integers).")
    group_size: Even = honored(64, "Columns of a row that share a scale.")
    group_dim: Size = no_effect(1, _IN_ROWS)
    symmetric: bool = no_effect(False, _IN_ROWS)


_BY_LAYER = "each entry of post_init_quant, and quantized_initialization, has its own num_bits and group_size"


class InferenceWeightQuantization(Block):
    enabled: bool = honored(True, "Quantize the layers that the block names, and freeze their weights (ZeRO-Inference).")
    num_bits: Count = no_effect(8, _BY_LAYER)
    q_type: str = no_effect("symmetric", _BY_LAYER)
    q_groups: Count = no_effect(1, _BY_LAYER)
    quantized_initialization: Annotated[GroupQuantization | None, BeforeValidator(lambda value: value or None)] = None
    post_init_quant: Annotated[dict[str, GroupQuantization], BeforeValidator(lambda value: value or {})] = {}


_OFFLOAD = Feature(
    "DeepCompile's own offload",
    "set it to false; zero_optimization.offload_optimizer, offload_param and activation_checkpointing.cpu_checkpointing serve "
    "compiled models, too",
)
_COMPILED = "the engine schedules gathers, reductions and offload of compiled models as of others"


class Compile(Block):
    enabled: bool = honored(False, "Apply `torch.compile` to each repeated block, or to the model if it has none.")
    disable: bool = honored(False, "True: do not compile, even if `enabled` is true.")
    backend: str = honored("inductor", "Backend of `torch.compile`, by name or as `module.attribute`.")
    kwargs: dict[str, Any] = honored({}, "Other arguments of `torch.compile` (`mode`, `fullgraph`, `dynamic`, ...).")
    deepcompile: bool = no_effect(False, _COMPILED)
    autoep_non_moe: bool = no_effect(False, _COMPILED)
    free_activation: bool = no_effect(False, _COMPILED)
    free_activation_threshold: Size = no_effect(10 * MIB, _COMPILED)
    offload_activation: bool = switch(False, _OFFLOAD)
    offload_activation_pin_memory: bool = no_effect(True, _COMPILED)
    offload_opt_states: bool = switch(False, _OFFLOAD)
    double_buffer: bool = no_effect(True, _COMPILED)
    symmetric_memory: bool = no_effect(False, _COMPILED)
    debug_log: bool = no_effect(False, _COMPILED)
    offload_parameters: bool = switch(False, _OFFLOAD)
    sync_before_reduce: bool = no_effect(False, _COMPILED)
    sync_after_reduce: bool = no_effect(False, _COMPILED)
    sync_before_allgather: bool = no_effect(False, _COMPILED)
    sync_after_allgather: bool = no_effect(False, _COMPILED)
    keep_int_input_tensors: bool = no_effect(True, _COMPILED)
    keep_all_input_tensors: bool = no_effect(False, _COMPILED)
    passes: list[Literal["z1", "z3", "autosp", "autotp"]] | None = no_effect(
        None, "sequence_parallel_size and tensor_parallel.autotp_size share sequences and layers, in compiled models, too"
    )


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
    number_checkpoints: Size | None = honored(
        None, "Recompute this many of the repeated blocks, from the first; 0, not set: all, if another key asks for recomputation."
    )
    synchronize_checkpoint_boundary: bool = honored(False, "Synchronize the device before and after each recomputed block.")
    profile: bool = honored(False, "Log the time of recomputation, in seconds.")


class SparseAttention(Block):
    """Which blocks of attention's scores are computed. Each mode reads its own keys (`slipstream.attention.layouts`)."""

    mode: Word[Literal["dense", "fixed", "variable", "bigbird", "bslongformer"]] = honored(
        "fixed", 'The pattern of blocks; "dense": all of them, as without this block.'
    )
    block: Count = honored(16, "Tokens of a block, a multiple of 16.")
    different_layout_per_head: bool = honored(False, "Each head has a layout of its own.")
    num_local_blocks: Count = honored(4, "Blocks of a window, in mode fixed.")
    num_global_blocks: Size = honored(1, "Global blocks: of each window (fixed), or at the beginning (bigbird).")
    attention: Word[Literal["unidirectional", "bidirectional"]] = honored(
        "bidirectional", "unidirectional: no block of later keys. Decoders are causal inside blocks, too."
    )
    horizontal_global_attention: bool = honored(False, "Global blocks attend to all (fixed, variable).")
    num_different_global_patterns: Count = honored(1, "Global blocks that heads take in turn (fixed).")
    num_random_blocks: Size = honored(0, "Random blocks of each row (variable, bigbird).")
    local_window_blocks: list[Count] = honored([4], "Lengths of windows in blocks, the last one repeated (variable).")
    global_block_indices: list[Size] = honored([0], "First blocks of global spans (variable, bslongformer).")
    global_block_end_indices: list[Size] | None = honored(
        None, "Ends of global spans, exclusive; not set: spans of one block (variable, bslongformer)."
    )
    num_sliding_window_blocks: Count = honored(3, "Blocks of the sliding window (bigbird, bslongformer).")


# Elasticity, checkpoints, tuning

_WRITER = "each rank writes its shards to its own file with direct I/O and without pickle"


class Elasticity(Block):
    """Batch sizes for many numbers of ranks (config/elastic.py)."""

    enabled: bool = honored(False, "Compute the batch sizes such that many numbers of ranks keep the same global batch.")
    max_train_batch_size: Count = honored(2000, "Largest global batch, in samples; to be set.")
    micro_batch_sizes: list[Count] = honored([2, 4, 6], "Micro-batch sizes to choose from, in samples; to be set.")
    min_gpus: Count = honored(1, "Fewest ranks.")
    max_gpus: Count = honored(10000, "Most ranks.")
    min_time: Size = no_effect(0, "how long to wait between changes of the number of ranks is the scheduler's choice")
    prefer_larger_batch: bool = honored(True, "Of batches that fit equally many numbers of ranks, take the largest.")
    version: Real = honored(0.2, "0.1 counts ranks; 0.2 whole nodes, and it has a batch for every number of ranks.")
    ignore_non_elastic_batch_info: bool = honored(False, "Ignore batch sizes in the config; false: refuse them.")
    num_gpus_per_node: Count = honored(1, "Version 0.2: ranks of a node.")
    model_parallel_size: Count = honored(1, "Version 0.2: ranks of one replica of the model, as the mesh has it.")


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
    use_node_local_storage: bool = honored(
        False, "The directory is another one on each host, on its own disk: it gets the files of the host's ranks."
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


_OWN_MODEL = "the first run sees the model itself"


class ModelInfo(Block):
    profile: bool = no_effect(False, _OWN_MODEL)
    num_params: Size | None = no_effect(None, _OWN_MODEL)
    hidden_size: Size | None = no_effect(None, _OWN_MODEL)
    num_layers: Size | None = no_effect(None, _OWN_MODEL)


class Autotuning(Block):
    """Read by `slipstream tune` and `deepspeed --autotuning`; training ignores it."""

    enabled: bool = honored(False, "`slipstream tune` takes its settings from this block; training ignores it.")
    results_dir: str = honored("autotuning_results", "Folder of the runs, the table and the best config.")
    exps_dir: str = no_effect("autotuning_exps", "the config of each run lies in its folder, results_dir/runs/N")
    overwrite: bool = honored(True, "Begin again; false: go on from results_dir.")
    metric: Word[Literal["latency", "throughput", "flops"]] = honored(
        "throughput", "`latency`: seconds of a step; `throughput` and `flops`, which order alike: samples per second."
    )
    metric_path: str | None = no_effect(None, "the figures of each run lie in results_dir/runs/N/progress.jsonl")
    start_profile_step: Size = honored(3, "Steps of a run before those that are timed.")
    end_profile_step: Size = honored(5, "The last step of a run.")
    fast: bool = honored(True, "Vary micro-batch and stage only; false: offload and activations as well.")
    max_train_batch_size: Count | None = honored(None, "Largest global batch to try; null: the config's only.")
    min_train_batch_size: Count = honored(1, "Smallest global batch to try.")
    max_train_micro_batch_size_per_gpu: Count = honored(1024, "Largest micro-batch to try.")
    min_train_micro_batch_size_per_gpu: Count = honored(1, "Smallest micro-batch to try.")
    num_tuning_micro_batch_sizes: Count = honored(3, "How many sizes of micro-batches to try: the largest that fit.")
    mp_size: Count = no_effect(1, "the model parallelism of the script and of slipstream.mesh is seen in the first run")
    tuner_type: Word[Literal["gridsearch", "random", "model_based"]] = honored(
        "gridsearch", "Order of the runs: as listed, random, or by predicted time, corrected by each run."
    )
    tuner_early_stopping: Count = honored(5, "Runs in a row without an improvement that end the search.")
    tuner_num_trials: Count = honored(50, "Most runs.")
    arg_mappings: dict[str, Any] | None = honored(None, "Keys of the config -> options of the script that follow them.")
    model_info: ModelInfo | None = None
    model_info_path: str | None = no_effect(None, _OWN_MODEL)

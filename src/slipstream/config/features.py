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


_BY_MESH = "the mesh decides which ranks share a layer; pass groups of your own by initialize(mpu=)"


class TensorParallelSize(Block):
    tp_size: Count = honored(1, "Ranks that share each layer; the same as `slipstream.mesh.tp`.")
    tp_grain_size: Count = no_effect(1, "heads are never split, and other features are divided as evenly as possible")
    mpu: Any = no_effect(None, _BY_MESH)
    tp_group: Any = no_effect(None, _BY_MESH)


class TensorParallel(Block):
    autotp_size: Size = honored(
        0, "Ranks that share each layer; the same as `slipstream.mesh.tp`, which decides if this is 0 or 1."
    )
    tp: TensorParallelSize = TensorParallelSize()
    dtype: str | None = no_effect("fp16", "fp16 and bf16 decide the dtype")
    preset_model: str | None = honored(None, "Tensor-parallel plan of a known model: llama, qwen2, bloom, gpt2, opt, ...")
    tp_overlap_comm: bool = honored(
        False,
        "Overlap the all-reduce of input gradients with the computation of weight gradients and, over a network, the all-reduce of "
        "a row layer's output, in chunks, with its matrix product. Bit-identical; faster if the network hardware, not the CPU, "
        "moves the bytes.",
    )
    vocab_parallel_lm_head: bool | None = honored(
        None, "Shard the logits over the vocabulary: each rank computes the loss from its share."
    )
    vocab_parallel_ce_backend: str = no_effect("torch", "the vocabulary-parallel loss is Slipstream's own")
    injection_policy_tuple: Any = no_effect(None, "partition_config names the layers to split")
    partition_config: dict[str, Any] | None = honored(
        None, "Which layers are split, and how: `layer_specs`, `use_default_specs`, `lm_head_patterns`, `strict_mode`."
    )
    keep_module_on_host: bool = no_effect(False, "the model is split on the device that holds its parameters")
    replace_with_kernel_inject: bool = no_effect(False, "modules are not replaced")


_BY_MODEL = "experts are found by their class or by the name of their list, and the model's own router routes tokens"
_BY_COUNTS = "stacked experts are computed by grouped matrix products, those of a list by their own code"
_BY_EXCHANGE = "the transport between ranks decides how tokens are sent; counts are exact, without a buffer of fixed size"


_ROUTERS = "the model's own value."
_FIXED = "Must be what the model does: another value is refused."


class ExpertParallel(Block):
    enabled: bool = honored(False, "Split the experts of each layer over `autoep_size` ranks, and configure their routers.")
    autoep_size: Count = honored(1, "Ranks over which a layer's experts are split, unless the layer has its own `ep_size`.")
    expert_tensor_parallel_size: Count = no_effect(1, "tensor_parallel.autotp_size splits experts, too")
    validate_folding_routing: bool = no_effect(False, "every exchange compares the numbers of rows")
    async_split_plan: bool = no_effect(False, _BY_EXCHANGE)
    preset_model: Literal["mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3", "minimax_m3"] | None = honored(
        None,
        "Must match the model: its type or, for your own model, the names of its layers (`layers.N.mlp.experts`, or those that "
        "`moe_layer_pattern` matches).",
    )
    moe_layer_pattern: str | None = honored(
        None,
        "Regular expression for the names of layers whose lists of experts are split; a matching layer whose experts cannot be "
        "split is refused. null: all layers with a list named `experts`; a warning names those that cannot be split.",
    )
    expert_pattern: str | None = honored(
        None, "With `moe_layer_pattern`: regular expression for the name of the list of experts in such a layer; null: `experts`."
    )
    router_pattern: str | None = no_effect(None, _BY_MODEL)
    use_grouped_mm: bool = no_effect(True, _BY_COUNTS)
    disable_triton_grouped_mm: bool = no_effect(False, _BY_COUNTS)
    route_norm: bool | None = honored(None, f"Whether a token's routing weights are normalized to a sum of 1; null: {_ROUTERS}")
    route_scale: Real = honored(1.0, f"Factor of the routing weights; 1: {_ROUTERS}")
    score_apply: Literal["auto", "pre", "post"] = honored(
        "auto", f"Whether routing weights multiply the experts' inputs (`pre`) or outputs (`post`). {_FIXED}"
    )
    combine_impl: str = no_effect("auto", _BY_COUNTS)
    row_weighting_impl: str = no_effect("auto", _BY_COUNTS)
    gate_up_impl: str = no_effect("separate", _BY_COUNTS)
    comm_backend: str = no_effect("comm", _BY_EXCHANGE)
    comm_num_sm: Size = no_effect(12, _BY_EXCHANGE)
    comm_qp_margin: Size = no_effect(4, _BY_EXCHANGE)
    comm_max_tokens_per_rank: Size = no_effect(0, _BY_EXCHANGE)
    num_expert_groups: Count | None = honored(None, f"Number of groups of experts; null: {_ROUTERS}")
    num_limited_groups: Count | None = honored(None, f"Number of groups that a token may use; null: {_ROUTERS}")
    score_func: Literal["auto", "softmax", "sigmoid"] = honored("auto", f"The router's score function. {_FIXED}")
    top_k: Count | Literal["auto"] = honored("auto", f"Experts per token; auto: {_ROUTERS}")
    load_balance_coeff: Positive | None = honored(
        None,
        "After each update, lower the selection bias of overloaded experts by this step, and raise that of underloaded ones. The "
        "router must have such a bias (DeepSeek-V3 and similar models, `slipstream.moe.MoE`). null: biases do not change.",
    )
    routed_scaling_factor: Positive | Literal["auto"] = honored(
        "auto", "The same as `route_scale`, over which it takes precedence; auto: `route_scale` decides."
    )
    expert_w1: str | None = no_effect(None, _BY_MODEL)
    expert_w2: str | None = no_effect(None, _BY_MODEL)
    expert_w3: str | None = no_effect(None, _BY_MODEL)
    num_experts_attr: str | None = no_effect(None, _BY_MODEL)
    top_k_attr: str | None = no_effect(None, _BY_MODEL)
    has_shared_experts: bool | None = no_effect(None, _BY_MODEL)
    shared_experts_pattern: str | None = no_effect(None, _BY_MODEL)
    shared_experts_gate_pattern: str | None = no_effect(None, _BY_MODEL)
    expert_activation: str | None = honored(None, f"`swiglu`, `geglu_tanh`, `swiglu_clamped`, `swiglu_oai`. {_FIXED}")


class Pipeline(Block):
    stages: Count | Word[Literal["auto"]] = honored("auto", "Pipeline stages; the same as `slipstream.mesh.pp`.")
    partition: str = honored(
        "best",
        "What to balance over a decoder's stages: `parameters` (also `best`), the number of blocks (`uniform`), the number of "
        "blocks whose class matches (`type:REGEX`), or measured times (`profile`). A PipelineModule divides its own layers, as in "
        "DeepSpeed.",
    )
    seed_layers: bool = no_effect(False, "PipelineModule(seed_layers=) decides, as in DeepSpeed")
    activation_checkpoint_interval: Size = honored(
        0,
        "Layers of a PipelineModule that are recomputed together; 0: the module's own value. In a decoder, a value above 0 "
        "recomputes each block.",
    )
    pipe_partitioned: bool = honored(
        True,
        "Over a network, each tensor-parallel rank sends only a share of the activations between stages, which are equal on all of "
        "them; the next stage gathers the shares.",
    )
    grad_partitioned: bool = honored(True, "The same as `pipe_partitioned`, for the gradients of these activations.")
    use_reentrant: bool = no_effect(True, "recomputed layers do not need a reentrant backward")


# Engine features


class HybridEngine(Block):
    enabled: bool = honored(
        False, "`engine.generate` and `engine.module.generate` generate with the current weights, by the serving engine."
    )
    max_out_tokens: Count = honored(512, "Maximum tokens of a prompt and its answer together; at most the model's context.")
    inference_tp_size: Count = no_effect(1, "each rank answers its own prompts, with a whole copy of the weights")
    release_inference_cache: bool = honored(
        False, "After each call, free the memory of generation, including its copy of the weights; the next call is collective."
    )
    pin_parameters: bool = no_effect(True, "weights are gathered one unit at a time, and only when they have changed")
    tp_gather_partition_size: Count = no_effect(8, "weights are gathered one unit at a time, and only when they have changed")
    enable_cuda_graph: bool = no_effect(False, "serving captures CUDA graphs wherever its kernels run")


_IN_ROWS = "quantization is symmetric around 0, in groups of a row's columns, so that each rank quantizes and reads its own rows"


class GroupQuantization(Block):
    num_bits: Bits = honored(8, "Bits of a weight: 4 (NF4) or 8 (integers).")
    group_size: Even = honored(64, "Consecutive columns of a row that share a scale.")
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
_COMPILED = "the engine schedules gathers, reductions and offload of compiled models as for other models"


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
        None, "sequence_parallel_size and tensor_parallel.autotp_size also apply to compiled models"
    )


class ActivationCheckpointing(Block):
    partition_activations: bool = no_effect(
        False, "with `slipstream.tensor.sequence_parallel`, each tensor-parallel rank keeps only a share of what is saved"
    )
    cpu_checkpointing: bool = honored(False, "Keep the saved inputs of recomputed blocks in host memory.")
    contiguous_memory_optimization: bool = no_effect(
        False,
        "saved inputs are the block's own input tensors, not copies in a buffer; "
        "PYTORCH_ALLOC_CONF=expandable_segments:True reduces fragmentation of CUDA memory",
    )
    number_checkpoints: Size | None = honored(
        None, "Recompute only the first n repeated blocks; 0, not set: all, if another key enables recomputation."
    )
    synchronize_checkpoint_boundary: bool = honored(False, "Synchronize the device before and after each recomputed block.")
    profile: bool = honored(False, "Log the time of recomputation, in seconds.")


class SparseAttention(Block):
    """Which blocks of the attention scores are computed. Each mode reads its own keys (`slipstream.attention.layouts`)."""

    mode: Word[Literal["dense", "fixed", "variable", "bigbird", "bslongformer"]] = honored(
        "fixed", "The pattern of blocks; `dense`: all blocks, as without this config block."
    )
    block: Count = honored(16, "Tokens per block, a multiple of 16.")
    different_layout_per_head: bool = honored(False, "Each head has its own layout.")
    num_local_blocks: Count = honored(4, "Blocks per window (fixed).")
    num_global_blocks: Size = honored(1, "Global blocks: in each window (fixed), or at the beginning (bigbird).")
    attention: Word[Literal["unidirectional", "bidirectional"]] = honored(
        "bidirectional", "`unidirectional`: no blocks of later keys. Decoders are causal also inside blocks."
    )
    horizontal_global_attention: bool = honored(False, "Global blocks attend to all blocks (fixed, variable).")
    num_different_global_patterns: Count = honored(1, "Number of patterns of global blocks, which heads take in turn (fixed).")
    num_random_blocks: Size = honored(0, "Random blocks per row (variable, bigbird).")
    local_window_blocks: list[Count] = honored([4], "Lengths of the windows in blocks; the last one repeats (variable).")
    global_block_indices: list[Size] = honored([0], "First blocks of global spans (variable, bslongformer).")
    global_block_end_indices: list[Size] | None = honored(
        None, "Ends of global spans, exclusive; not set: spans of one block (variable, bslongformer)."
    )
    num_sliding_window_blocks: Count = honored(3, "Blocks of the sliding window (bigbird, bslongformer).")


# Elasticity, checkpoints, tuning

_WRITER = "each rank writes its shards to its own file with direct I/O and without pickle"


class Elasticity(Block):
    """Batch sizes for many numbers of ranks (config/elastic.py)."""

    enabled: bool = honored(False, "Choose batch sizes so that the global batch is the same on many numbers of ranks.")
    max_train_batch_size: Count = honored(2000, "Maximum global batch, in samples; required.")
    micro_batch_sizes: list[Count] = honored([2, 4, 6], "Micro-batch sizes to choose from, in samples; required.")
    min_gpus: Count = honored(1, "Minimum number of ranks.")
    max_gpus: Count = honored(10000, "Maximum number of ranks.")
    min_time: Size = no_effect(0, "the scheduler decides how long to wait between changes of the number of ranks")
    prefer_larger_batch: bool = honored(True, "Among batches that fit equally many numbers of ranks, take the largest.")
    version: Real = honored(0.2, "0.1 counts ranks; 0.2 counts whole nodes, and has a batch for every number of ranks.")
    ignore_non_elastic_batch_info: bool = honored(False, "Ignore the batch sizes of the config; false: refuse them.")
    num_gpus_per_node: Count = honored(1, "Ranks per node (version 0.2).")
    model_parallel_size: Count = honored(1, "Ranks of one replica of the model; must equal those of the mesh (version 0.2).")


class ParallelWrite(Block):
    pipeline_stage: bool = no_effect(False, _WRITER)


class CheckpointWriter(Block):
    type: str = no_effect("fast", _WRITER)
    decoupled: bool = honored(
        False, "Asynchronous checkpoints: `save_checkpoint` returns after copying; a background thread writes."
    )
    io_buffer_size: Size = no_effect(64 * MIB, _WRITER)
    io_buffer_double: bool = no_effect(True, _WRITER)
    io_multiplier: Count = no_effect(1, _WRITER)
    show_statistics: bool = no_effect(False, _WRITER)
    data_parallel: str | None = no_effect(None, _WRITER)


class Checkpoint(Block):
    tag_validation: Word[Literal["ignore", "warn", "fail"]] = honored(
        "warn", "What to do if ranks pass different tags to `save_checkpoint`."
    )
    load_universal: bool = honored(False, "`load_checkpoint` without a tag prefers the file `latest_universal` to `latest`.")
    use_node_local_storage: bool = honored(
        False, "Each host has the checkpoint directory on its own disk, with the files of its own ranks."
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


_OWN_MODEL = "the first run reads these facts from the model itself"


class ModelInfo(Block):
    profile: bool = no_effect(False, _OWN_MODEL)
    num_params: Size | None = no_effect(None, _OWN_MODEL)
    hidden_size: Size | None = no_effect(None, _OWN_MODEL)
    num_layers: Size | None = no_effect(None, _OWN_MODEL)


class Autotuning(Block):
    """Read by `slipstream tune` and `deepspeed --autotuning`; training ignores it."""

    enabled: bool = honored(False, "`slipstream tune` takes its settings from this block; training ignores it.")
    results_dir: str = honored("autotuning_results", "Folder for the runs, the table and the best config.")
    exps_dir: str = no_effect("autotuning_exps", "the config of each run is in its folder, results_dir/runs/N")
    overwrite: bool = honored(True, "Start over; false: resume from results_dir.")
    metric: Word[Literal["latency", "throughput", "flops"]] = honored(
        "throughput", "`latency`: seconds per step; `throughput` and `flops`, which give the same order: samples per second."
    )
    metric_path: str | None = no_effect(None, "the metrics of each run are in results_dir/runs/N/progress.jsonl")
    start_profile_step: Size = honored(3, "Warm-up steps of a run, before the timed ones.")
    end_profile_step: Size = honored(5, "Last step of a run.")
    fast: bool = honored(True, "Vary only micro-batch and stage; false: also offload and activation checkpointing.")
    max_train_batch_size: Count | None = honored(None, "Largest global batch to try; null: only the config's.")
    min_train_batch_size: Count = honored(1, "Smallest global batch to try.")
    max_train_micro_batch_size_per_gpu: Count = honored(1024, "Largest micro-batch to try.")
    min_train_micro_batch_size_per_gpu: Count = honored(1, "Smallest micro-batch to try.")
    num_tuning_micro_batch_sizes: Count = honored(3, "Number of micro-batch sizes to try: the largest that fit.")
    mp_size: Count = no_effect(1, "the first run shows the model parallelism of the script and of slipstream.mesh")
    tuner_type: Word[Literal["gridsearch", "random", "model_based"]] = honored(
        "gridsearch", "Order of the runs: as listed, random, or by predicted time, which each run corrects."
    )
    tuner_early_stopping: Count = honored(5, "End the search after this many runs in a row without an improvement.")
    tuner_num_trials: Count = honored(50, "Maximum number of runs.")
    arg_mappings: dict[str, Any] | None = honored(None, "Config keys, and the script's command-line options that set them.")
    model_info: ModelInfo | None = None
    model_info_path: str | None = no_effect(None, _OWN_MODEL)

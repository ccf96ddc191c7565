"""DeepSpeed's JSON as pydantic models: names, types, defaults and ranges.

One class per block and one field per key, with the names and defaults of DeepSpeed 0.19. Keys that 0.19.8 has removed (sparse
attention, elasticity, MoQ, ...) stay, so that old files parse. Slipstream's own options are in the block `slipstream`.

A field states the fate of its key (see keys.py): `honored` with its meaning, `no_effect` with the reason, or `switch` if it enables
a feature that is not built yet. A field without a fate configures the `feature` of its block. A new key is one line here, and one
in plan.py if the plan carries it.

Invariants: no field accepts `"auto"` or `null` (`parse.py` removes both first, so the default means "not set"); every class forbids
unknown keys; `import slipstream` does not import this file or pydantic.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BeforeValidator, ConfigDict, Field

from slipstream.config import compression, data, features, observing
from slipstream.config.keys import Fate, Feature, Key
from slipstream.config.values import (
    MIB,
    Block,
    Count,
    Device,
    Dtype,
    DtypeOrNone,
    Fraction,
    Int,
    Interval,
    Names,
    Positive,
    Real,
    Scale,
    Seed,
    Size,
    Stage,
    WireDtype,
    Word,
    honored,
    no_effect,
    numeric,
    switch,
)

# Why keys have no effect

_UNITS = "parameters are communicated in whole units (one per repeated block), not in buckets of this size"
_TRANSPORT = "the transport chooses the collective; reductions have a fixed order and send each byte once"
_PINNED = "host buffers for GPU copies are always pinned"
_STREAMED = "the optimizer always prefetches chunks and writes them back asynchronously"
_DIRECT = "weights are prefetched one unit ahead, directly into the memory that the forward uses"
_SUBMITTED = "I/O requests are always submitted as soon as the queue has a free slot and reaped as they complete"
_NONE_LATE = "every step updates every weight, none is delayed, and the host's update overlaps with transfers"
_UNSCALED = "bf16 has the exponent range of fp32 and needs no loss scale"
_ROUNDING = "gradients are summed in fp32 and divided once at the end"

# Features that are not built yet

_AMP = 'use "bf16", "fp16" or "torch_autocast" with "enabled": true'

# Optimizer, schedule, precision


class Optimizer(Block):
    type: str = honored(
        ..., "AdamW, Adam, SGD, Lion, Adagrad, Lamb, Muon, or a class of `torch.optim`; `initialize(optimizer=)` takes precedence."
    )
    params: dict[str, Any] = honored({}, "Arguments of the optimizer (`lr`, `betas`, `eps`, `weight_decay`, ...).")
    legacy_fusion: bool = no_effect(False, "each optimizer has one implementation")
    adam_w_mode: Any = no_effect(
        None, "as DeepSpeed does, Slipstream reads it in params only; Adam decouples weight decay by default"
    )


class Scheduler(Block):
    type: str = honored(..., "LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR or WarmupCosineLR; stepped after each applied update.")
    params: dict[str, Any] = honored({}, "Arguments of the scheduler, as in DeepSpeed.")


class Fp16(Block):
    enabled: bool = honored(False, "Train with fp16 weights and gradients, fp32 master weights and a loss scale.")
    auto_cast: bool = honored(False, "Cast floating-point inputs of the model to fp16.")
    loss_scale: Annotated[Scale, Field(ge=0)] = honored(0.0, "Static loss scale; 0: dynamic.")
    initial_scale_power: Annotated[Real, Field(ge=0, le=64)] = honored(16.0, "Initial dynamic loss scale, as a power of 2.")
    loss_scale_window: Count = honored(1000, "Steps without overflow before the dynamic loss scale doubles.")
    hysteresis: Count = honored(2, "Overflows before the dynamic loss scale is halved.")
    consecutive_hysteresis: bool = honored(False, "Each step without overflow restores the full count of `hysteresis`.")
    min_loss_scale: Annotated[Scale, Field(gt=0)] = honored(1.0, "Minimum dynamic loss scale.")
    fp16_master_weights_and_grads: bool = honored(False, "Keep master weights in fp16 as well.")
    fused_mode: bool = no_effect(True, "there is one mixed-precision path")
    opt_level: Any = no_effect(None, "it is an option of NVIDIA Apex; fp16 weights always have fp32 master weights here")


class Bf16(Block):
    enabled: bool = honored(False, "Train with bf16 weights and gradients and fp32 master weights.")
    immediate_grad_update: bool = no_effect(False, "gradients are always reduced as soon as they are complete")
    check_grad_overflow: bool = honored(True, "Skip steps whose gradients are not finite.")
    bf16_master_weights_and_grads: bool = honored(False, "Keep master weights in bf16 as well.")
    bf16_optimizer_states: bool = honored(False, "Keep the optimizer's moments in bf16.")
    auto_cast: Any = no_effect(None, "it is a key of fp16; with bf16, inputs are not cast")
    loss_scale: Any = no_effect(None, _UNSCALED)
    loss_scale_window: Any = no_effect(None, _UNSCALED)
    initial_scale_power: Any = no_effect(None, _UNSCALED)
    hysteresis: Any = no_effect(None, _UNSCALED)
    min_loss_scale: Any = no_effect(None, _UNSCALED)


class Amp(Block):
    """NVIDIA Apex: every key except `enabled` is an argument of `apex.amp.initialize`."""

    feature = Feature("NVIDIA Apex AMP", _AMP)
    model_config = ConfigDict(extra="allow")
    enabled: bool = switch()


class MsAmp(Block):
    feature = Feature("MS-AMP", _AMP)
    enabled: bool = switch()
    opt_level: str | None = None
    use_te: bool = False


class TorchAutocast(Block):
    enabled: bool = honored(False, "Run the forward under `torch.autocast`, with fp32 weights.")
    dtype: Dtype = honored("bf16", "Dtype of `torch.autocast`.")
    lower_precision_safe_modules: Names | None = no_effect(None, "torch.autocast selects dtypes per operation, not per module")


class DataTypes(Block):
    grad_accum_dtype: DtypeOrNone = honored(
        None, "Dtype of accumulated gradients; not set: the gradients' own dtype without accumulation, else fp32."
    )
    param_dtype: DtypeOrNone = honored(None, "Dtype of the weights if neither fp16 nor bf16 is enabled.")
    buffer_dtype: DtypeOrNone = honored(None, "Dtype of all buffers.")
    keep_in_fp32_modules: Names | None = honored(
        None,
        "Name patterns of buffers that stay fp32 under bf16 and fp16; auto, or not set: the patterns of the transformers model.",
    )


# ZeRO and offload


class OffloadParam(Block):
    device: Device = honored("none", "Where sharded weights are stored at stage 3.")
    nvme_path: str | None = honored(None, "Directory for the files if device is nvme.")
    buffer_count: Size = no_effect(5, _DIRECT)
    buffer_size: Size = no_effect(100_000_000, _DIRECT)
    max_in_cpu: Size = honored(1_000_000_000, "Elements per rank that stay in host memory if device is nvme.")
    pin_memory: bool = no_effect(True, _PINNED)


class OffloadOptimizer(Block):
    device: Device = honored("none", "Where master weights and moments are stored.")
    nvme_path: str | None = honored(None, "Directory for the files if device is nvme.")
    buffer_count: Size = honored(4, "Chunks in memory at a time if device is nvme.")
    pin_memory: bool = no_effect(True, _PINNED)
    pipeline_read: bool = no_effect(False, _STREAMED)
    pipeline_write: bool = no_effect(False, _STREAMED)
    fast_init: bool = no_effect(False, "new files read as zeros, so they need no initialization")
    ratio: Fraction = honored(1.0, "Fraction of master weights and moments that is offloaded.")
    super_offload: bool = no_effect(False, "in stage 3 the optimizer step overlaps the next forward")
    cpuadam_cores_perc: Fraction = no_effect(0.8, "the optimizer step uses all threads of the process")


class ZenFlow(Block):
    topk_ratio: Annotated[Real, Field(gt=0, lt=1)] = no_effect(0.1, _NONE_LATE)
    select_strategy: str = no_effect("auto", _NONE_LATE)
    select_interval: Int | str = no_effect("auto", _NONE_LATE)
    update_interval: Int | str = no_effect("auto", _NONE_LATE)
    overlap_step: bool = no_effect(False, _NONE_LATE)
    offload: bool = no_effect(False, _NONE_LATE)
    auto_ratio: Fraction = no_effect(0.99, _NONE_LATE)
    full_warm_up_rounds: Size = no_effect(0, _NONE_LATE)
    pt_reserved_cores_perc: Fraction = no_effect(0.5, _NONE_LATE)
    steps_per_epoch: Size | None = no_effect(None, _NONE_LATE)


class LeafModule(Block):
    classes: Names = honored(
        [],
        "Classes (`Router`, `my.models.Router`) of modules to gather as a whole, so that ranks may run different modules in them.",
    )
    names: Names = honored([], "As `classes`, by names in `model.named_modules()`.")
    name_suffixes: Names = honored([], "As `names`, by ends of names.")


class Loco(Block):
    """Error feedback of quantized gradients (arXiv 2407.04480)."""

    err_beta: Annotated[Real, Field(ge=0, lt=1)] = honored(
        0.8, "Error feedback of quantized gradients: decay of the moving average of the errors."
    )
    reset_T: Count = honored(1024, "Steps between resets of the errors to 0.")


class ZeroOptimization(Block):
    stage: Stage = honored(0, "Sharded over data-parallel ranks: 0 nothing, 1 optimizer states, 2 also gradients, 3 also weights.")
    mics_shard_size: Annotated[Int, Field(ge=-1)] = honored(-1, "Ranks per sharding group (MiCS, HSDP); -1, 0: all ranks.")
    mics_hierarchical_params_gather: bool = no_effect(False, "units are gathered within the sharding group only")
    contiguous_gradients: bool = no_effect(True, "gradients are always contiguous")
    reduce_scatter: bool = no_effect(True, _TRANSPORT)
    reduce_bucket_size: Size = no_effect(500_000_000, _UNITS)
    use_multi_rank_bucket_allreduce: bool = no_effect(True, _TRANSPORT)
    allgather_partitions: bool = no_effect(True, _TRANSPORT)
    allgather_bucket_size: Size = no_effect(500_000_000, _UNITS)
    overlap_comm: bool | None = no_effect(None, "communication always overlaps with computation if the device has streams")
    compute_grad_norm: bool = no_effect(True, "the norm is computed during the reduction, without an extra pass")
    load_from_fp32_weights: bool = no_effect(True, "checkpoints contain the master weights, which are always loaded")
    elastic_checkpoint: bool = no_effect(False, "every checkpoint loads at any world size")
    offload_param: OffloadParam | None = None
    offload_optimizer: OffloadOptimizer | None = None
    zenflow: ZenFlow | None = None
    sub_group_size: Size = honored(
        1_000_000_000, "Maximum chunk size, in elements, when the optimizer streams offloaded states: up to 2^21; 0: the smallest."
    )
    cpu_offload: bool = honored(False, "Older spelling of `offload_optimizer.device: cpu`.")
    cpu_offload_param: bool = honored(False, "Older spelling of `offload_param.device: cpu`.")
    cpu_offload_use_pin_memory: bool = no_effect(False, _PINNED)
    stage3_prefetch_bucket_size: Size = no_effect(50_000_000, _UNITS)
    stage3_param_persistence_threshold: Size = no_effect(100_000, _UNITS)
    stage3_model_persistence_threshold: Size = no_effect(sys.maxsize, _UNITS)
    stage3_max_live_parameters: Size = no_effect(1_000_000_000, _UNITS)
    stage3_max_reuse_distance: Size = no_effect(1_000_000_000, _UNITS)
    stage3_gather_16bit_weights_on_model_save: bool = no_effect(False, "engine.state_dict() is always complete")
    stage3_module_granularity_threshold: Size = no_effect(0, _UNITS)
    stage3_use_all_reduce_for_fetch_params: bool = no_effect(False, _TRANSPORT)
    stage3_allgather_sequential: bool = no_effect(False, _TRANSPORT)
    ignore_unused_parameters: bool = honored(True, "Treat a missing gradient as zero; false: raise an error.")
    legacy_stage1: bool = no_effect(False, "each stage has one implementation")
    round_robin_gradients: bool = no_effect(False, "every unit is already sharded evenly over all ranks")
    parameter_alignment: bool = no_effect(False, "parameters are always aligned to 128 bytes")
    zero_hpz_partition_size: Size = honored(
        1,
        "Ranks per secondary group (hpZ): weights (stage 3) and quantized gradients (every stage) cross groups only once a step; "
        "0, 1: no groups.",
    )
    zero_quantized_weights: bool = honored(
        False,
        "Stage 3: gather weights as 8-bit codes; stages 1 and 2: send the change of each update as 8-bit codes, if weights are "
        "bf16 or fp16 with fp32 master weights. No effect over shared memory.",
    )
    zero_quantized_nontrainable_weights: bool = honored(False, "Stage 3: store and gather frozen weights as 8-bit codes.")
    zero_quantized_gradients: bool = honored(
        False, "Communicate gradients as 4-bit codes, at every stage; the same as `communication_data_type` int4."
    )
    zeropp_loco_param: Loco | None = None
    memory_efficient_linear: bool = no_effect(True, "torch.nn.functional.linear is not patched")
    pipeline_loading_checkpoint: bool = no_effect(False, "each rank reads only its shard of a checkpoint")
    override_module_apply: bool = no_effect(True, "torch.nn.Module is not patched")
    log_trace_cache_warnings: bool = no_effect(False, "there is no trace cache")
    enable_sanity_checks: bool = honored(
        False,
        "Stages 0 to 2: at each step, read all weights and raise an error if ranks have different ones. DeepSpeed's checks are "
        "always enabled.",
    )
    save_muon_momentum_buffer_in_memory: bool = no_effect(False, "Muon's states always stay in memory")
    grad_hooks: bool = no_effect(True, "gradients are always reduced from hooks")
    leaf_module: LeafModule = LeafModule()


class Aio(Block):
    block_size: Size = honored(MIB, "Bytes per disk transfer.")
    queue_depth: Size = honored(8, "Maximum number of transfers in flight.")
    intra_op_parallelism: Count = honored(1, "I/O threads if the kernel does not allow io_uring.")
    single_submit: bool = no_effect(False, _SUBMITTED)
    overlap_events: bool = no_effect(True, _SUBMITTED)
    use_gds: bool = no_effect(False, "transfers between the disk and a GPU go through pinned host memory")


class MeshSizes(Block):
    """Sizes of the axes of ranks that hold one replica of the model."""

    pp: Count = honored(1, "Pipeline stages.")
    sp: Count = honored(1, "Ranks that share the sequence of one sample.")
    tp: Count = honored(1, "Ranks that share each layer (tensor parallelism).")


class TensorOptions(Block):
    sequence_parallel: bool = honored(
        False, "Outside of the tensor-parallel layers, each tp rank holds a share of the tokens (Megatron's sequence parallelism)."
    )


class PipelineOptions(Block):
    schedule: Word[Literal["1f1b", "gpipe", "zero_bubble", "v"]] = honored(
        "1f1b",
        "Order of forwards and backwards: `gpipe`; `1f1b`; `zero_bubble`, in which weight gradients fill the gaps; `v`, which also "
        "places a decoder's stages out to the last rank and back (DualPipeV).",
    )
    chunks: Count = honored(1, "Stages of a decoder per rank (interleaved): rank r has stages r, r + pp, and so on.")
    reduce: Word[Literal["step", "micro_batch"]] = honored(
        "step",
        "When to reduce gradients: once per `step`, or after each `micro_batch`, which sends more but keeps no unsharded gradients "
        "at stages 2 and 3.",
    )


class LocalSteps(Block):
    """Replicas that exchange weights every few hundred steps instead of gradients in every step (DiLoCo, arXiv 2311.08105)."""

    every: Size = honored(
        0, "Steps that each replica trains on its own before replicas exchange the changes of their weights; 0: no local steps."
    )
    outer_lr: Annotated[Real, Field(gt=0)] = honored(0.7, "The outer optimizer's learning rate.")
    outer_momentum: Annotated[Real, Field(ge=0, lt=1)] = honored(0.9, "The outer optimizer's Nesterov momentum.")
    exchange: Word[Literal["fp32", "bf16", "int8", "int4"]] = honored(
        "fp32", "Dtype of the exchange; `int8`, `int4`: quantized, with error feedback."
    )
    overlap: Size = honored(
        0, "Steps that run while an exchange is in flight, fewer than `every`; 0: training waits for the exchange."
    )


class AutomaticCheckpoints(Block):
    """Checkpoints that the engine saves and loads automatically (train/autosave.py)."""

    folder: str | None = honored(None, "Directory of the checkpoints that the engine saves automatically.")
    every_steps: Size = honored(0, "Steps between automatic checkpoints; 0: not by steps.")
    every_minutes: Annotated[Real, Field(ge=0)] = honored(0.0, "Minutes between automatic checkpoints; 0: not by time.")
    on_signal: Names = honored(
        ["SIGTERM", "SIGUSR1"],
        "If any rank gets one of these signals, all ranks save at the end of the step and exit with code 85.",
    )
    resume: bool = honored(True, "`initialize` loads the newest checkpoint of the directory, if there is one.")
    memory_every_steps: Size = honored(
        0, "Steps between checkpoints in host memory, for restarts by `slipstream run --max-restarts` or `--elastic`; 0: none."
    )


class AdaptiveBatch(Block):
    """A global batch that follows the gradient noise scale (train/noise.py). The block's presence enables it."""

    min_batch_size: Count | None = honored(
        None, "Minimum global batch, in samples; not set: `train_batch_size`, with which training starts."
    )
    max_batch_size: Count | None = honored(None, "Maximum global batch, in samples; not set: 16 times `train_batch_size`.")
    every: Count = honored(10, "Steps between changes of the batch; a change at most doubles or halves it.")
    ratio: Positive = honored(1.0, "Target batch divided by the noise scale.")
    smoothing: Annotated[Real, Field(ge=0, lt=1)] = honored(0.9, "Weight of past measurements in the noise scale.")
    scale_lr: Word[Literal["none", "sqrt", "linear"]] = honored(
        "sqrt",
        "Factor of the learning rate: 1 (`none`), the square root of batch / `train_batch_size`, or that quotient (`linear`).",
    )


class Trace(Block):
    """Traces of torch.profiler (observe/trace.py)."""

    steps: list[Size] = honored([10, 13], "Number of finished steps at which the trace starts, and at which it ends.")
    folder: str = honored("trace", "Directory of the traces, one file per rank.")


class Slipstream(Block):
    """Slipstream's own options."""

    transport: Word[Literal["auto", "shared", "gloo"]] = honored(
        "auto", "Transport between CPU ranks of a host: `shared` (memory) or `gloo`; auto: shared memory if possible."
    )
    timeout_s: Annotated[float, BeforeValidator(numeric), Field(gt=0)] = honored(
        1800.0, "Seconds that a rank waits for others before it raises PeerError; infinity: no limit."
    )
    poison_released: bool = honored(False, "For debugging: fill released weights with NaN.")
    optimizer_states: Word[Literal["default", "int8"]] = honored("default", "Keep the moments in their default dtype or in 8 bits.")
    stochastic_rounding: bool = honored(False, "Update bf16 weights by stochastic rounding, without master weights.")
    rest_unused_experts: bool = honored(
        False,
        "With `expert_parallel.enabled`: do not update weights and optimizer states of experts that got no token on any rank, nor "
        "read or write them if they are offloaded; false: moments and weight decay still change them.",
    )
    check_grad_overflow: bool = honored(True, "In fp32, skip steps whose gradients are not finite.")
    seed: Seed = honored(0, "Seed of the data loader's shuffle and of layer dropping.")
    mesh: MeshSizes = MeshSizes()
    local_steps: LocalSteps = LocalSteps()
    pipeline: PipelineOptions = PipelineOptions()
    tensor: TensorOptions = TensorOptions()
    unknown_keys: Word[Literal["error", "warn"]] = honored(
        "error", "`warn`: ignore unknown top-level keys with a warning, unless they resemble a known key."
    )
    activations: Word[Literal["keep", "recompute", "offload"]] = honored(
        "keep", "What happens to the activations of repeated blocks: keep them, recompute them, or offload them to the host."
    )
    keep_checkpoints: Count | None = honored(None, "Number of newest checkpoints to keep in a directory; not set: all.")
    fused_layers: bool = honored(
        False, "Fuse the operations between matrix products in layers of the BERT and Llama families (transformers)."
    )
    products: Word[Literal["fastest", "torch"]] = honored(
        "fastest",
        "Matrix products on CPUs, for the whole process. `fastest`: fp32 by oneDNN if torch's matrix library does not use the "
        "processor's widest vectors, bf16 and fp16 in fp32 if torch's own products are slower; `torch`: as torch computes them.",
    )
    checkpoint: AutomaticCheckpoints = AutomaticCheckpoints()
    monitors: observing.OwnMonitors = observing.OwnMonitors()
    noise_scale_every: Size = honored(
        0,
        "Steps between measurements of the gradient noise scale (in samples), a metric of monitors; 0: none, or with "
        "`adaptive_batch` every step.",
    )
    adaptive_batch: AdaptiveBatch | None = None
    elastic_batch: bool = honored(
        False,
        "Keep `train_batch_size` on any number of ranks. The micro-batch size is a rank's maximum, accumulation is derived, some "
        "ranks may get one sample less, and gradients are averaged over samples.",
    )
    trace: Trace | None = None
    broadcast_buffers: bool = honored(False, "Broadcast rank 0's buffers before each forward, as in DistributedDataParallel.")


class Config(Block):
    train_batch_size: Count | None = honored(
        None,
        "Samples per optimizer step over all ranks: micro-batch x accumulation x data-parallel ranks. With `tensor_parallel`, each "
        "sample counts once for each rank that shares it, as in DeepSpeed, unless all three keys are set and agree without this.",
    )
    train_micro_batch_size_per_gpu: Count | None = honored(
        None, "Samples per forward on one rank; the batch size of the loader of `training_data`."
    )
    gradient_accumulation_steps: Count | None = honored(None, "Micro-batches per optimizer step. Losses are divided by it.")
    managed_gradient_accumulation: bool = honored(
        True, "`engine.step()` updates the weights only after the last micro-batch; false: every call updates them."
    )
    optimizer: Optimizer | None = None
    scheduler: Scheduler | None = None
    zero_allow_untested_optimizer: bool = no_effect(False, "every optimizer is allowed at every stage")
    zero_force_ds_cpu_optimizer: bool = no_effect(True, "every optimizer can run on the CPU")
    communication_data_type: WireDtype = honored(
        None,
        "Dtype of gradients on the wire; `int8`, `int4`: codes with a scale per 256 elements; not set: the gradients' own dtype.",
    )
    seq_parallel_communication_data_type: DtypeOrNone = no_effect(
        "fp32", "activations travel in their own dtype, and sums are rounded once"
    )
    prescale_gradients: bool = no_effect(False, _ROUNDING)
    gradient_predivide_factor: Positive = no_effect(1.0, _ROUNDING)
    gradient_allreduce_op: Word[Literal["mean", "sum"]] = honored(
        "mean", "Whether gradients are averaged (`mean`) or summed (`sum`) over ranks."
    )
    sparse_gradients: bool = honored(False, "Send only the nonzero rows of embedding gradients; the result is the same.")
    disable_allgather: bool = no_effect(False, "DeepSpeed does not read it either")
    allgather_size: Size = no_effect(500_000_000, _UNITS)
    gradient_clipping: Annotated[Real, Field(ge=0)] = honored(
        1.0, "Maximum global L2 norm of the gradients; gradients above it are scaled down. 0: no clipping."
    )
    fp16: Fp16 = Fp16()
    bf16: Bf16 = Bf16()
    amp: Amp = Amp()
    msamp: MsAmp = MsAmp()
    torch_autocast: TorchAutocast = TorchAutocast()
    data_types: DataTypes = DataTypes()
    zero_optimization: ZeroOptimization = ZeroOptimization()
    aio: Aio = Aio()
    tensor_parallel: features.TensorParallel = features.TensorParallel()
    expert_parallel: features.ExpertParallel = features.ExpertParallel()
    use_data_before_expert_parallelism: bool = no_effect(False, "neighboring ranks hold different experts; results are the same")
    sequence_parallel_size: Count = honored(1, "Ranks that share the sequence of one sample; the same as `slipstream.mesh.sp`.")
    data_parallel_size: Count | None = honored(
        None, "Expected number of data-parallel ranks; `initialize` raises an error if it differs."
    )
    pipeline: features.Pipeline = features.Pipeline()
    hybrid_engine: features.HybridEngine = features.HybridEngine()
    weight_quantization: features.InferenceWeightQuantization | None = None
    compile: features.Compile = features.Compile()
    graph_harvesting: bool = no_effect(
        False, 'the optimizer is already one pass over flat states; compile.kwargs {"mode": "reduce-overhead"} captures CUDA graphs'
    )
    disable_python_gc: bool = no_effect(
        False, "Slipstream does not change Python's garbage collector; call gc.disable() in the script"
    )
    steps_per_print: Interval = honored(None, "Steps between progress lines in the log; 0, infinity or not set: none.")
    wall_clock_breakdown: bool = honored(False, "Log the time of forward, backward and step, in seconds.")
    memory_breakdown: bool = honored(False, "Log the memory of each rank before and after forward, backward and step.")
    dump_state: bool = honored(False, "Log the resolved plan at startup.")
    log_level: Word[Literal["debug", "info", "warning", "error", "critical"] | None] = honored(
        None, "Log level of the logger `slipstream`."
    )
    timers: observing.Timers = observing.Timers()
    autotuning: features.Autotuning = features.Autotuning()
    flops_profiler: observing.FlopsProfiler = observing.FlopsProfiler()
    activation_checkpointing: features.ActivationCheckpointing = features.ActivationCheckpointing()
    sparse_attention: features.SparseAttention | None = None
    data_efficiency: data.DataEfficiency = data.DataEfficiency()
    curriculum_learning: data.Curriculum = data.Curriculum()
    progressive_layer_drop: data.ProgressiveLayerDrop = data.ProgressiveLayerDrop()
    eigenvalue: compression.Eigenvalue = compression.Eigenvalue()
    compression_training: compression.CompressionTraining = compression.CompressionTraining()
    quantize_training: compression.QuantizeTraining = compression.QuantizeTraining()
    tensorboard: observing.Tensorboard = observing.Tensorboard()
    wandb: observing.Wandb = observing.Wandb()
    comet: observing.Comet = observing.Comet()
    csv_monitor: observing.CsvMonitor = observing.CsvMonitor()
    comms_logger: observing.CommsLogger = observing.CommsLogger()
    elasticity: features.Elasticity = features.Elasticity()
    checkpoint: features.Checkpoint = features.Checkpoint()
    nebula: features.Nebula = features.Nebula()
    datastates_ckpt: bool | dict[str, Any] = honored(
        False, "Write checkpoints asynchronously; the same as `checkpoint.writer.decoupled`."
    )
    dataloader_drop_last: bool = honored(False, "Drop the last incomplete batch of an epoch.")
    vocabulary_size: Size | None = no_effect(None, "DeepSpeed uses it only to print an alignment hint")
    slipstream: Slipstream = Slipstream()


class Child(NamedTuple):
    """The block below a field: a single one, or (`many`) a list of blocks or a mapping from names to blocks."""

    block: type[Block]
    many: bool


def _child(annotation: Any) -> Child | None:
    if isinstance(annotation, type) and issubclass(annotation, Block):
        return Child(annotation, many=False)
    many = get_origin(annotation) in (dict, list)
    below = [inner for inner in map(child, get_args(annotation)) if inner is not None]
    return Child(below[0].block, many=many or below[0].many) if below else None


child: Callable[[Any], Child | None] = cache(_child)


def walk(block: type[Block] = Config, prefix: str = "", feature: Feature | None = None, owner: str = "") -> Iterator[Key]:
    """Yield every key below a block. A field without a fate belongs to the nearest enclosing block with a feature."""
    if block.feature is not None:
        feature, owner = block.feature, prefix.rstrip(".")
    for name, field in block.model_fields.items():
        below = child(field.annotation)
        if below is not None:
            yield from walk(below.block, f"{prefix}{name}.{'*.' * below.many}", feature, owner)
            continue
        key = field.json_schema_extra["key"] if isinstance(field.json_schema_extra, dict) else Key()
        assert isinstance(key, Key)
        default = None if field.is_required() else field.get_default()
        key = replace(key, name=prefix + name, annotation=field.annotation, default=default)
        if key.fate is Fate.REFUSED and key.feature is None:
            key = replace(key, feature=feature, block=owner)
            assert feature is not None, f"config key {key.name} has no fate: annotate it by honored, no_effect or switch"
        yield key

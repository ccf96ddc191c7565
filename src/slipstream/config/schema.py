"""DeepSpeed's JSON as pydantic models: names, types, defaults and ranges.

One class per block and one field per key, with DeepSpeed's names; defaults are those of DeepSpeed 0.19. Keys that 0.19.8 has
removed (sparse attention, elasticity, MoQ, ...) stay, so that old files parse; `keys.py` classifies every key. Slipstream's own
options are in the block `slipstream`.

Invariants: no field accepts `"auto"` or `null` (`parse.py` removes both first, so the default means "not set"); every class forbids
unknown keys; `import slipstream` does not import this file or pydantic.
"""

# ruff: noqa: RUF012 (pydantic copies a mutable default for every instance)

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BeforeValidator, ConfigDict, Field

from slipstream.config.features import (
    ActivationCheckpointing,
    Autotuning,
    Checkpoint,
    Comet,
    CommsLogger,
    Compile,
    CompressionTraining,
    CsvMonitor,
    Curriculum,
    DataEfficiency,
    Eigenvalue,
    Elasticity,
    ExpertParallel,
    FlopsProfiler,
    HybridEngine,
    InferenceWeightQuantization,
    Nebula,
    Pipeline,
    ProgressiveLayerDrop,
    QuantizeTraining,
    SparseAttention,
    Tensorboard,
    TensorParallel,
    Timers,
    Wandb,
)
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
    lower,
    numeric,
)

# Optimizer, schedule, precision


class Optimizer(Block):
    type: str
    params: dict[str, Any] = {}
    legacy_fusion: bool = False


class Scheduler(Block):
    type: str
    params: dict[str, Any] = {}


class Fp16(Block):
    enabled: bool = False
    auto_cast: bool = False
    loss_scale: Annotated[Scale, Field(ge=0)] = 0.0
    initial_scale_power: Annotated[Real, Field(ge=0, le=64)] = 16.0
    loss_scale_window: Count = 1000
    hysteresis: Count = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: Annotated[Scale, Field(gt=0)] = 1.0
    fp16_master_weights_and_grads: bool = False
    fused_mode: bool = True
    opt_level: Any = None


class Bf16(Block):
    enabled: bool = False
    immediate_grad_update: bool = False
    check_grad_overflow: bool = True
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False
    loss_scale: Any = None
    loss_scale_window: Any = None
    initial_scale_power: Any = None
    hysteresis: Any = None
    min_loss_scale: Any = None


class Amp(Block):
    """NVIDIA Apex: every key but `enabled` is an argument of `apex.amp.initialize`."""

    model_config = ConfigDict(extra="allow")
    enabled: bool = False


class MsAmp(Block):
    enabled: bool = False
    opt_level: str | None = None
    use_te: bool = False


class TorchAutocast(Block):
    enabled: bool = False
    dtype: Dtype = "bf16"
    lower_precision_safe_modules: Names | None = None


class DataTypes(Block):
    grad_accum_dtype: DtypeOrNone = None
    param_dtype: DtypeOrNone = None
    buffer_dtype: DtypeOrNone = None
    keep_in_fp32_modules: Names | None = None


# ZeRO and offload


class OffloadParam(Block):
    device: Device = "none"
    nvme_path: str | None = None
    buffer_count: Size = 5
    buffer_size: Size = 100_000_000
    max_in_cpu: Size = 1_000_000_000
    pin_memory: bool = True


class OffloadOptimizer(Block):
    device: Device = "none"
    nvme_path: str | None = None
    buffer_count: Size = 4
    pin_memory: bool = True
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = False
    ratio: Fraction = 1.0
    super_offload: bool = False
    cpuadam_cores_perc: Fraction = 0.8


class ZenFlow(Block):
    topk_ratio: Annotated[Real, Field(gt=0, lt=1)] = 0.1
    select_strategy: str = "auto"
    select_interval: Int | str = "auto"
    update_interval: Int | str = "auto"
    overlap_step: bool = False
    offload: bool = False
    auto_ratio: Fraction = 0.99
    full_warm_up_rounds: Size = 0
    pt_reserved_cores_perc: Fraction = 0.5
    steps_per_epoch: Size | None = None


class LeafModule(Block):
    classes: Names = []
    names: Names = []
    name_suffixes: Names = []


class Loco(Block):
    err_beta: Real = 0.8
    reset_T: Size = 1024


class ZeroOptimization(Block):
    stage: Stage = 0
    mics_shard_size: Annotated[Int, Field(ge=-1)] = -1
    mics_hierarchical_params_gather: bool = False
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    reduce_bucket_size: Size = 500_000_000
    use_multi_rank_bucket_allreduce: bool = True
    allgather_partitions: bool = True
    allgather_bucket_size: Size = 500_000_000
    overlap_comm: bool | None = None
    compute_grad_norm: bool = True
    load_from_fp32_weights: bool = True
    elastic_checkpoint: bool = False
    offload_param: OffloadParam | None = None
    offload_optimizer: OffloadOptimizer | None = None
    zenflow: ZenFlow | None = None
    sub_group_size: Size = 1_000_000_000
    cpu_offload: bool = False
    cpu_offload_param: bool = False
    cpu_offload_use_pin_memory: bool = False
    stage3_prefetch_bucket_size: Size = 50_000_000
    stage3_param_persistence_threshold: Size = 100_000
    stage3_model_persistence_threshold: Size = sys.maxsize
    stage3_max_live_parameters: Size = 1_000_000_000
    stage3_max_reuse_distance: Size = 1_000_000_000
    stage3_gather_16bit_weights_on_model_save: bool = False
    stage3_module_granularity_threshold: Size = 0
    stage3_use_all_reduce_for_fetch_params: bool = False
    stage3_allgather_sequential: bool = False
    ignore_unused_parameters: bool = True
    legacy_stage1: bool = False
    round_robin_gradients: bool = False
    parameter_alignment: bool = False
    zero_hpz_partition_size: Size = 1
    zero_quantized_weights: bool = False
    zero_quantized_nontrainable_weights: bool = False
    zero_quantized_gradients: bool = False
    zeropp_loco_param: Loco | None = None
    memory_efficient_linear: bool = True
    pipeline_loading_checkpoint: bool = False
    override_module_apply: bool = True
    log_trace_cache_warnings: bool = False
    enable_sanity_checks: bool = False
    save_muon_momentum_buffer_in_memory: bool = False
    grad_hooks: bool = True
    leaf_module: LeafModule = LeafModule()


class Aio(Block):
    block_size: Size = MIB
    queue_depth: Size = 8
    intra_op_parallelism: Size = 1
    single_submit: bool = False
    overlap_events: bool = True
    use_gds: bool = False


class Slipstream(Block):
    """Slipstream's own options."""

    transport: Annotated[Literal["auto", "shared", "gloo"], BeforeValidator(lower)] = "auto"
    timeout_s: Annotated[float, BeforeValidator(numeric), Field(gt=0)] = 1800.0  # infinity: never
    poison_released: bool = False
    optimizer_states: Annotated[Literal["default", "int8"], BeforeValidator(lower)] = "default"
    stochastic_rounding: bool = False
    check_grad_overflow: bool = True
    seed: Seed = 0
    unknown_keys: Annotated[Literal["error", "warn"], BeforeValidator(lower)] = "error"
    activations: Annotated[Literal["keep", "recompute", "offload"], BeforeValidator(lower)] = "keep"
    keep_checkpoints: Count | None = None
    broadcast_buffers: bool = False


class Config(Block):
    train_batch_size: Count | None = None
    train_micro_batch_size_per_gpu: Count | None = None
    gradient_accumulation_steps: Count | None = None
    managed_gradient_accumulation: bool = True
    optimizer: Optimizer | None = None
    scheduler: Scheduler | None = None
    zero_allow_untested_optimizer: bool = False
    zero_force_ds_cpu_optimizer: bool = True
    communication_data_type: DtypeOrNone = None
    seq_parallel_communication_data_type: DtypeOrNone = "fp32"
    prescale_gradients: bool = False
    gradient_predivide_factor: Positive = 1.0
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], BeforeValidator(lower)] = "mean"
    sparse_gradients: bool = False
    disable_allgather: bool = False
    allgather_size: Size = 500_000_000
    gradient_clipping: Annotated[Real, Field(ge=0)] = 1.0
    fp16: Fp16 = Fp16()
    bf16: Bf16 = Bf16()
    amp: Amp = Amp()
    msamp: MsAmp = MsAmp()
    torch_autocast: TorchAutocast = TorchAutocast()
    data_types: DataTypes = DataTypes()
    zero_optimization: ZeroOptimization = ZeroOptimization()
    aio: Aio = Aio()
    tensor_parallel: TensorParallel = TensorParallel()
    expert_parallel: ExpertParallel = ExpertParallel()
    use_data_before_expert_parallelism: bool = False
    sequence_parallel_size: Count = 1
    data_parallel_size: Count | None = None
    pipeline: Pipeline = Pipeline()
    hybrid_engine: HybridEngine = HybridEngine()
    weight_quantization: InferenceWeightQuantization | None = None
    compile: Compile = Compile()
    graph_harvesting: bool = False
    disable_python_gc: bool = False
    steps_per_print: Interval = None
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    dump_state: bool = False
    log_level: Annotated[Literal["debug", "info", "warning", "error", "critical"] | None, BeforeValidator(lower)] = None
    timers: Timers = Timers()
    autotuning: Autotuning = Autotuning()
    flops_profiler: FlopsProfiler = FlopsProfiler()
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()
    sparse_attention: SparseAttention | None = None
    data_efficiency: DataEfficiency = DataEfficiency()
    curriculum_learning: Curriculum = Curriculum()
    progressive_layer_drop: ProgressiveLayerDrop = ProgressiveLayerDrop()
    eigenvalue: Eigenvalue = Eigenvalue()
    compression_training: CompressionTraining = CompressionTraining()
    quantize_training: QuantizeTraining = QuantizeTraining()
    tensorboard: Tensorboard = Tensorboard()
    wandb: Wandb = Wandb()
    comet: Comet = Comet()
    csv_monitor: CsvMonitor = CsvMonitor()
    comms_logger: CommsLogger = CommsLogger()
    elasticity: Elasticity = Elasticity()
    checkpoint: Checkpoint = Checkpoint()
    nebula: Nebula = Nebula()
    datastates_ckpt: bool | dict[str, Any] = False
    dataloader_drop_last: bool = False
    vocabulary_size: Size | None = None
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

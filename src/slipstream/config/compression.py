"""Blocks of DeepSpeed's JSON for compression in training: MoQ, quantization, pruning, reuse of a teacher's layers.

The rules are those of `schema.py`.
"""

# ruff: noqa: RUF012 (pydantic copies a mutable default for every instance)

from __future__ import annotations

from typing import Any

from slipstream.config.values import Block, Count, Fraction, Names, Real, Size, honored, no_effect


class Eigenvalue(Block):
    """MoQ's second-order schedule, at the top or in quantize_training."""

    enabled: bool = honored(False, "Layers with a large eigenvalue of the loss's Hessian lose bits later.")
    verbose: bool = honored(False, "Log each eigenvalue.")
    max_iter: Count = honored(100, "Maximum number of Hessian-vector products per block.")
    tol: Real = honored(1e-2, "Stop when the relative change of the eigenvalue is below this.")
    stability: Real = honored(1e-6, "Added to the norms by which vectors are divided.")
    gas_boundary_resolution: Count = honored(1, "Measure only at multiples of this number of steps.")
    layer_name: str = honored("bert.encoder.layer", "Path of the list of blocks in the model.")
    layer_num: Size = honored(0, "Number of blocks of the list that are measured; 0: all.")


_PATTERNS = "Patterns that are searched in the names of layers; `*`: all layers."
_KERNEL = "there is one implementation"
_QUIET = "the number of bits depends only on the step"


class MixedQuantize(Block):
    enabled: bool = honored(False, "After a change of bits, move gradually from exact to rounded weights, in every dtype.")
    quantize_change_ratio: Real = honored(0.001, "Decrease of the exact weights' share per step.")


class QuantizeAlgo(Block):
    q_type: str = honored("symmetric", "The same as `quantization_type`.")
    rounding: str = honored("nearest", "nearest or stochastic.")


class QuantizeBits(Block):
    start_bits: Count = honored(16, "Bits at the step `schedule_offset`.")
    target_bits: Count = honored(8, "Bits at the end of the schedule.")


class QuantizeSchedule(Block):
    quantize_period: Count = honored(1000, "The same as `quantization_period`.")
    schedule_offset: Size = honored(1000, "Step at which quantization begins.")


class QuantizeTraining(Block):
    """The older block of MoQ, before `compression_training`: weight quantization of every layer."""

    enabled: bool = honored(False, "Quantize weights in training (MoQ).")
    quantize_verbose: bool = no_effect(False, _QUIET)
    quantizer_kernel: bool = no_effect(False, _KERNEL)
    quantize_groups: Count = honored(1, "Groups per weight, each with its own scale.")
    quantize_weight_in_forward: bool = honored(False, "Start with the target bits.")
    quantize_algo: QuantizeAlgo = QuantizeAlgo()
    quantize_bits: QuantizeBits = QuantizeBits()
    quantize_schedule: QuantizeSchedule = QuantizeSchedule()
    fp16_mixed_quantize: MixedQuantize = MixedQuantize()
    eigenvalue: Eigenvalue = Eigenvalue()


class LayerReduction(Block):
    enabled: bool = honored(False, "Initialize the model with layers of the teacher that `init_compression` gets.")
    keep_number_layer: Count | None = honored(None, "Number of the student's layers; must be the length of `teacher_layer`.")
    module_name_prefix: str = honored("", "Path of the list of layers, in both models.")
    teacher_layer: list[Size] = honored([], "Indices of the teacher's layers, in order.")
    other_module_name: Names = honored([], "Other modules to copy.")


class WeightQuantizationShared(Block):
    enabled: bool = honored(False, "Compute with rounded weights; gradients go to the exact weights.")
    quantizer_kernel: bool = no_effect(False, _KERNEL)
    schedule_offset: Size = honored(0, "Step at which it begins.")
    quantize_groups: Count = honored(1, "Groups per weight, each with its own scale.")
    quantize_verbose: bool = no_effect(False, _QUIET)
    quantization_type: str = honored(
        "symmetric", "symmetric, asymmetric, or served: the grids of Slipstream's inference engine (8 or 4 bits)."
    )
    rounding: str = honored("nearest", "nearest or stochastic.")
    quantize_weight_in_forward: bool = honored(False, "Start with the target bits.")
    fp16_mixed_quantize: MixedQuantize = MixedQuantize()


class WeightQuantizationParams(Block):
    start_bits: Count = honored(8, "Bits at the step `schedule_offset`.")
    target_bits: Count = honored(8, "Bits at the end of the schedule, 1 to 16.")
    quantization_period: Count = honored(
        1, "Steps after `schedule_offset` until the first bit is lost; further bits are lost after 2, 4, 8 ... periods."
    )


class WeightQuantizationGroup(Block):
    params: WeightQuantizationParams = WeightQuantizationParams()
    modules: Names = honored(["*"], _PATTERNS)
    related_modules: Any = no_effect(None, "quantization changes no other layer")


class WeightQuantization(Block):
    shared_parameters: WeightQuantizationShared = WeightQuantizationShared()
    different_groups: dict[str, WeightQuantizationGroup] = {}


class ActivationQuantizationShared(Block):
    enabled: bool = honored(False, "Round the inputs of layers.")
    schedule_offset: Size = honored(1000, "Step at which it begins.")
    quantization_type: str = honored("symmetric", "symmetric or asymmetric.")
    range_calibration: str = honored(
        "dynamic", "`dynamic`: a range per token; `static`: moving averages of the minimum and maximum."
    )


class ActivationQuantizationParams(Block):
    bits: Count = honored(8, "Bits, 1 to 16.")


class ActivationQuantizationGroup(Block):
    params: ActivationQuantizationParams = ActivationQuantizationParams()
    modules: Names = honored(["*"], _PATTERNS)
    related_modules: Any = no_effect(None, "quantization changes no other layer")


class ActivationQuantization(Block):
    shared_parameters: ActivationQuantizationShared = ActivationQuantizationShared()
    different_groups: dict[str, ActivationQuantizationGroup] = {}


class SparsePruningShared(Block):
    enabled: bool = honored(False, "Mask single weights.")
    method: str = honored(
        "l1",
        "What is kept: `l1`: the weights that are largest at the start; `topk`: the best learned scores; `snip_momentum`: the "
        "largest moving averages of the magnitude of weight x gradient.",
    )
    schedule_offset: Size = honored(1000, "Step at which it begins.")
    schedule_offset_end: Size | None = honored(None, "Step at which `dense_ratio` is reached (snip_momentum).")
    schedule_offset_stride: Size = honored(1, "Steps between two updates of the masks (snip_momentum).")
    block_pattern: str = honored(
        "4x1",
        "`NxM`: prune blocks of N outputs and M inputs; `N:M`: prune N of M neighbors, whatever `dense_ratio` is (snip_momentum).",
    )
    dense_ratio: Fraction = honored(0.1, "Share of weights that is kept, unless a group of `different_groups` sets its own.")
    excluded_modules: Names = honored([], "Name patterns of layers that are not pruned.")


class PruningShared(Block):
    enabled: bool = honored(False, "Mask outputs of layers (rows), or filters of convolutions (channels).")
    method: str = honored("l1", "What is kept: `l1`: what is largest at the start; `topk`: the best learned scores.")
    schedule_offset: Size = honored(1000, "Step at which it begins.")


class HeadPruningShared(Block):
    enabled: bool = honored(False, "Mask heads: inputs of an attention's output projection, by learned scores.")
    method: str = honored("topk", "topk: learned scores.")
    schedule_offset: Size = honored(1000, "Step at which it begins.")
    num_heads: Count | None = honored(None, "Number of attention heads.")


class PruningParams(Block):
    dense_ratio: Fraction = honored(0.5, "Share that is kept.")


class PruningGroup(Block):
    params: PruningParams = PruningParams()
    modules: Names = honored(["*"], _PATTERNS)
    related_modules: list[Any] | None = honored(
        None, "For each pattern of `modules`, the patterns of layers that lose the corresponding inputs (head_pruning: outputs)."
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

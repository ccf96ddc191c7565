"""Blocks of DeepSpeed's JSON for compression in training: MoQ, quantization, pruning, layers of a teacher.

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
    max_iter: Count = honored(100, "Most products with the Hessian a block.")
    tol: Real = honored(1e-2, "Stop when the eigenvalue changes by less than this share of itself.")
    stability: Real = honored(1e-6, "Added to norms that vectors are divided by.")
    gas_boundary_resolution: Count = honored(1, "Measure at multiples of so many steps only.")
    layer_name: str = honored("bert.encoder.layer", "Path of the list of blocks in the model.")
    layer_num: Size = honored(0, "Blocks of the list that are measured; 0: all.")


_PATTERNS = 'Patterns that are searched in the names of layers; "*": all.'
_KERNEL = "there is one implementation"
_QUIET = "the schedule is a function of the step"


class MixedQuantize(Block):
    enabled: bool = honored(False, "After a change of bits, go to the rounded weights little by little, in every dtype.")
    quantize_change_ratio: Real = honored(0.001, "The exact weights' share that each step takes away.")


class QuantizeAlgo(Block):
    q_type: str = honored("symmetric", "As `quantization_type`.")
    rounding: str = honored("nearest", "nearest or stochastic.")


class QuantizeBits(Block):
    start_bits: Count = honored(16, "Bits at the schedule's offset.")
    target_bits: Count = honored(8, "Bits at last.")


class QuantizeSchedule(Block):
    quantize_period: Count = honored(1000, "As `quantization_period`.")
    schedule_offset: Size = honored(1000, "The step at which quantization begins.")


class QuantizeTraining(Block):
    """The older block of MoQ, before `compression_training`: weight quantization of every layer."""

    enabled: bool = honored(False, "Quantize weights in training (MoQ).")
    quantize_verbose: bool = no_effect(False, _QUIET)
    quantizer_kernel: bool = no_effect(False, _KERNEL)
    quantize_groups: Count = honored(1, "Groups of a weight, each with a scale.")
    quantize_weight_in_forward: bool = honored(False, "Begin with the target bits.")
    quantize_algo: QuantizeAlgo = QuantizeAlgo()
    quantize_bits: QuantizeBits = QuantizeBits()
    quantize_schedule: QuantizeSchedule = QuantizeSchedule()
    fp16_mixed_quantize: MixedQuantize = MixedQuantize()
    eigenvalue: Eigenvalue = Eigenvalue()


class LayerReduction(Block):
    enabled: bool = honored(False, "The model takes layers of a teacher, which `init_compression` gets.")
    keep_number_layer: Count | None = honored(None, "Layers of the student; must be as many as teacher_layer.")
    module_name_prefix: str = honored("", "The list of layers, in both models.")
    teacher_layer: list[Size] = honored([], "The teacher's layers, in order.")
    other_module_name: Names = honored([], "Other modules that are copied.")


class WeightQuantizationShared(Block):
    enabled: bool = honored(False, "Compute with rounded weights; gradients go to the exact ones.")
    quantizer_kernel: bool = no_effect(False, _KERNEL)
    schedule_offset: Size = honored(0, "The step at which it begins.")
    quantize_groups: Count = honored(1, "Groups of a weight, each with a scale.")
    quantize_verbose: bool = no_effect(False, _QUIET)
    quantization_type: str = honored(
        "symmetric", "symmetric, asymmetric, or served: the grids of Slipstream's inference engine (8 or 4 bits)."
    )
    rounding: str = honored("nearest", "nearest or stochastic.")
    quantize_weight_in_forward: bool = honored(False, "Begin with the target bits.")
    fp16_mixed_quantize: MixedQuantize = MixedQuantize()


class WeightQuantizationParams(Block):
    start_bits: Count = honored(8, "Bits at the schedule's offset.")
    target_bits: Count = honored(8, "Bits at last, 1 to 16.")
    quantization_period: Count = honored(1, "Steps until the first bit is lost; the next ones after 2, 4, 8 ... periods.")


class WeightQuantizationGroup(Block):
    params: WeightQuantizationParams = WeightQuantizationParams()
    modules: Names = honored(["*"], _PATTERNS)
    related_modules: Any = no_effect(None, "quantization changes no other layer")


class WeightQuantization(Block):
    shared_parameters: WeightQuantizationShared = WeightQuantizationShared()
    different_groups: dict[str, WeightQuantizationGroup] = {}


class ActivationQuantizationShared(Block):
    enabled: bool = honored(False, "Round the inputs of layers.")
    schedule_offset: Size = honored(1000, "The step at which it begins.")
    quantization_type: str = honored("symmetric", "symmetric or asymmetric.")
    range_calibration: str = honored("dynamic", "dynamic: a range for each token; static: moving averages of the ends.")


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
        "l1", "l1: the largest weights of the beginning; topk: learned scores; snip_momentum: means of |weight x gradient|."
    )
    schedule_offset: Size = honored(1000, "The step at which it begins.")
    schedule_offset_end: Size | None = honored(None, "The step at which dense_ratio is reached (snip_momentum).")
    schedule_offset_stride: Size = honored(1, "Steps between two choices of what is kept (snip_momentum).")
    block_pattern: str = honored(
        "4x1", "NxM: blocks of N outputs and M inputs; N:M: N of M neighbors go, whatever dense_ratio says (snip_momentum)."
    )
    dense_ratio: Fraction = honored(0.1, "Share that is kept, where different_groups does not say.")
    excluded_modules: Names = honored([], "Patterns of layers that are not pruned.")


class PruningShared(Block):
    enabled: bool = honored(False, "Mask outputs of layers (rows), or filters of convolutions (channels).")
    method: str = honored("l1", "l1: the largest of the beginning; topk: learned scores.")
    schedule_offset: Size = honored(1000, "The step at which it begins.")


class HeadPruningShared(Block):
    enabled: bool = honored(False, "Mask heads: inputs of an attention's output projection, by learned scores.")
    method: str = honored("topk", "topk: learned scores.")
    schedule_offset: Size = honored(1000, "The step at which it begins.")
    num_heads: Count | None = honored(None, "Heads of the attention.")


class PruningParams(Block):
    dense_ratio: Fraction = honored(0.5, "Share that is kept.")


class PruningGroup(Block):
    params: PruningParams = PruningParams()
    modules: Names = honored(["*"], _PATTERNS)
    related_modules: list[Any] | None = honored(
        None, "For each pattern, patterns of the layers that lose inputs with it (heads: outputs)."
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

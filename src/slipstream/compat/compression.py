"""`deepspeed.compression.helper`: attributes by their paths; and what an engine says of its weights' quantization."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from slipstream.compression.compress import read_block


def recursive_getattr(model: Any, module_name: str) -> Any:
    """The attribute at a path such as "encoder.layer.0"."""
    return operator.attrgetter(module_name)(model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Set the attribute at a path."""
    parent, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, name, module)


def quantize_training(blocks: Mapping[str, Any]) -> tuple[Any, ...]:
    """DeepSpeed's nine values of weight quantization: quantize_weight_in_forward, enabled, quantize_groups, fp16_mixed_quantize,
    quantize_change_ratio, quantization_type, rounding, quantize_verbose, quantizer_kernel."""
    shared = read_block(blocks).weight_quantization.shared_parameters
    first = (shared.quantize_weight_in_forward, shared.enabled, shared.quantize_groups)
    mixed = (shared.fp16_mixed_quantize.enabled, shared.fp16_mixed_quantize.quantize_change_ratio)
    return (*first, *mixed, shared.quantization_type, shared.rounding, shared.quantize_verbose, shared.quantizer_kernel)

"""Quantized weights: of layers for inference, and frozen ones below trained adapters."""

from slipstream.quantized.linear import Numbers, QuantizedEmbedding, QuantizedLinear, head_of, quantize, row_forms
from slipstream.quantized.packed import PackedLinear, PackedMatrix

__all__ = ["Numbers", "PackedLinear", "PackedMatrix", "QuantizedEmbedding", "QuantizedLinear", "head_of", "quantize", "row_forms"]

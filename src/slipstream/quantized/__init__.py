"""Quantized weights: of layers for inference, and frozen ones below trained adapters."""

from slipstream.quantized.linear import QuantizedEmbedding, QuantizedLinear, quantize, row_forms
from slipstream.quantized.numbers import Numbers, head_of
from slipstream.quantized.packed import PackedLinear, PackedMatrix

__all__ = ["Numbers", "PackedLinear", "PackedMatrix", "QuantizedEmbedding", "QuantizedLinear", "head_of", "quantize", "row_forms"]

"""Quantized weights."""

from slipstream.compression.numbers import Head, Numbers, head_of
from slipstream.compression.quantized import QuantizedLinear, quantize, row_forms

__all__ = ["Head", "Numbers", "QuantizedLinear", "head_of", "quantize", "row_forms"]

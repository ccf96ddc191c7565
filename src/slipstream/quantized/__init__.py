"""Quantized weights."""

from slipstream.quantized.linear import QuantizedLinear, quantize, row_forms
from slipstream.quantized.numbers import Head, Numbers, head_of

__all__ = ["Head", "Numbers", "QuantizedLinear", "head_of", "quantize", "row_forms"]

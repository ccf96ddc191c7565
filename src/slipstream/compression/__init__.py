"""Models whose weights take less room."""

from slipstream.compression.quantized import QuantizedLinear, quantize, row_forms

__all__ = ["QuantizedLinear", "quantize", "row_forms"]

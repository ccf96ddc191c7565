"""Smaller models: quantization during training, pruning, reuse of a teacher's layers (DeepSpeed's compression toolkit)."""

from slipstream.compression.compress import (
    compression_scheduler,
    convert_conv1d_to_linear,
    init_compression,
    kd_loss,
    redundancy_clean,
    student_initialization,
)
from slipstream.compression.export import export
from slipstream.compression.layers import BNLayer_Compress, Conv2dLayer_Compress, Embedding_Compress, LinearLayer_Compress
from slipstream.compression.quantize import TopKBinarizer, fake_quantize

__all__ = [
    "BNLayer_Compress",
    "Conv2dLayer_Compress",
    "Embedding_Compress",
    "LinearLayer_Compress",
    "TopKBinarizer",
    "compression_scheduler",
    "convert_conv1d_to_linear",
    "export",
    "fake_quantize",
    "init_compression",
    "kd_loss",
    "redundancy_clean",
    "student_initialization",
]

"""Transformer layers whose steps between products are one pass over memory each."""

from slipstream.fused.layer import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer
from slipstream.fused.transformers import fuse_layers, replace_transformer_layer

__all__ = ["DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer", "fuse_layers", "replace_transformer_layer"]

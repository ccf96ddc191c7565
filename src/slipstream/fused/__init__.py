"""Transformer layers in which each step between products is one pass over memory."""

from slipstream.fused.layer import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer
from slipstream.fused.transformers import fuse_layers, replace_transformer_layer

__all__ = ["DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer", "fuse_layers", "replace_transformer_layer"]

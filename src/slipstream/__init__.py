"""Slipstream: train and serve large PyTorch models. The whole public surface.

Importing starts nothing: no CUDA, no process group, no compilation, no output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream import activations, parallel, zero
    from slipstream.config.arguments import add_config_arguments
    from slipstream.inference import InferenceEngine, SamplingParams, handover, init_inference, pipeline
    from slipstream.parallel.layers import LayerSpec, TiedLayerSpec
    from slipstream.parallel.module import DualPipeVModule, PipelineModule
    from slipstream.quantized import quantize
    from slipstream.train import ema
    from slipstream.train.data import RepeatingLoader
    from slipstream.train.engine import Engine
    from slipstream.train.initialize import initialize
    from slipstream.world.join import init_distributed

__version__ = "0.1.0"

__all__ = [
    "DualPipeVModule",
    "Engine",
    "InferenceEngine",
    "LayerSpec",
    "PipelineModule",
    "RepeatingLoader",
    "SamplingParams",
    "TiedLayerSpec",
    "__version__",
    "activations",
    "add_config_arguments",
    "ema",
    "handover",
    "init_distributed",
    "init_inference",
    "initialize",
    "parallel",
    "pipeline",
    "quantize",
    "zero",
]

_HOMES = {
    "DualPipeVModule": "slipstream.parallel.module",
    "Engine": "slipstream.train.engine",
    "InferenceEngine": "slipstream.inference",
    "LayerSpec": "slipstream.parallel.layers",
    "PipelineModule": "slipstream.parallel.module",
    "RepeatingLoader": "slipstream.train.data",
    "SamplingParams": "slipstream.inference",
    "TiedLayerSpec": "slipstream.parallel.layers",
    "add_config_arguments": "slipstream.config.arguments",
    "init_distributed": "slipstream.world.join",
    "init_inference": "slipstream.inference",
    "initialize": "slipstream.train.initialize",
    "pipeline": "slipstream.inference",
    "quantize": "slipstream.quantized",
}
_MODULES = {
    "activations": "slipstream.activations",
    "ema": "slipstream.train.ema",
    "handover": "slipstream.inference.handover",
    "parallel": "slipstream.parallel",
    "zero": "slipstream.zero",
}


def __dir__() -> list[str]:
    """The public names, imported or not."""
    return __all__


def __getattr__(name: str) -> Any:
    import importlib

    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _HOMES:
        raise AttributeError(
            f"module 'slipstream' has no attribute {name!r} (DeepSpeed's names are in the package deepspeed that "
            "`pip install ./compat/deepspeed` brings; docs/DEEPSPEED_KEYS.md has them all)"
        )
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value

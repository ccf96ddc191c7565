"""Serving: from a request's text to its tokens. Read `core` first, then `engine`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.inference.api import Completion, Delta, GenerationError, InferenceEngine, init_inference, pipeline
    from slipstream.inference.core import QueueFullError, SamplingParams

__all__ = [
    "Completion",
    "Delta",
    "GenerationError",
    "InferenceEngine",
    "QueueFullError",
    "SamplingParams",
    "init_inference",
    "pipeline",
]


def __getattr__(name: str) -> Any:
    """Imported when asked for: `core` and the scheduler are used without torch."""
    import importlib

    if name not in __all__:
        raise AttributeError(f"module 'slipstream.inference' has no attribute {name!r}")
    home = "core" if name in ("QueueFullError", "SamplingParams") else "api"
    return getattr(importlib.import_module(f"slipstream.inference.{home}"), name)

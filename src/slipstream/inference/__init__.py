"""Serving: continuous batching with a paged KV cache. Read `core` first, then `engine`."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.inference.core import QueueFullError, SamplingParams
    from slipstream.inference.generate import Completion, Delta, GenerationError, InferenceEngine
    from slipstream.inference.initialize import init_inference, pipeline
    from slipstream.inference.listener import Listener
    from slipstream.inference.replica import settle
    from slipstream.inference.served import ServedForward, token_logprobs

_HOMES = {
    **dict.fromkeys(("Completion", "Delta", "GenerationError", "InferenceEngine"), "generate"),
    **dict.fromkeys(("QueueFullError", "SamplingParams"), "core"),
    **dict.fromkeys(("init_inference", "pipeline"), "initialize"),
    "Listener": "listener",
    "settle": "replica",
    **dict.fromkeys(("ServedForward", "token_logprobs"), "served"),
}

__all__ = [
    "Completion",
    "Delta",
    "GenerationError",
    "InferenceEngine",
    "Listener",
    "QueueFullError",
    "SamplingParams",
    "ServedForward",
    "init_inference",
    "num_bytes",
    "pipeline",
    "settle",
    "token_logprobs",
]


def num_bytes(size: str) -> int:
    """Parse a size such as 512M, 1.5G or 4096 into bytes. Raises ValueError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMGT]?)(?:i?B)?", size, re.IGNORECASE)
    number = int(Fraction(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " ")) if match else 0
    if number == 0:
        raise ValueError(f"{size!r} is not a size; write 512M or 2G")
    return number


def __getattr__(name: str) -> Any:
    """Import a public name on first use: `core` and the scheduler need no torch."""
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'slipstream.inference' has no attribute {name!r}")
    return getattr(importlib.import_module(f"slipstream.inference.{_HOMES[name]}"), name)

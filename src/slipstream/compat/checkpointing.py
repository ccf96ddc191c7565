"""`deepspeed.checkpointing`: activation checkpointing by explicit calls. docs/ACTIVATIONS.md describes the config's settings."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from slipstream.activations.recompute import checkpoint as _checkpoint
from slipstream.config import load_config

logger = logging.getLogger(__name__)
_configured = False


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)`; backward recomputes its activations."""
    return _checkpoint(function, *args)


non_reentrant_checkpoint = checkpoint


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Record that it was called, for `is_configured`. Raises ValueError for settings that `checkpoint` does not have.

    The engine reads the config's activation_checkpointing block itself.
    """
    global _configured
    block = {} if deepspeed_config is None else load_config(config=deepspeed_config).get("activation_checkpointing") or {}
    unsupported = {
        "checkpoint_in_cpu": (checkpoint_in_cpu, "cpu_checkpointing"),
        "profile": (profile, "profile"),
        "synchronize": (synchronize, "synchronize_checkpoint_boundary"),
    }
    for name, (value, key) in unsupported.items():
        if value:
            raise ValueError(
                f"checkpointing.configure({name}=True): checkpoint() has no settings; drop the calls of it and set "
                f"activation_checkpointing.{key} in the config"
                + (", or use slipstream.activations.checkpoint(..., host=)" if name == "checkpoint_in_cpu" else "")
            )
    if block.get("partition_activations") if partition_activations is None else partition_activations:
        logger.info(
            "checkpointing.configure(partition_activations=) has no effect: each tp rank keeps a share of saved activations with "
            '"slipstream": {"tensor": {"sequence_parallel": true}}'
        )
    if contiguous_checkpointing or num_checkpoints:
        logger.info(
            "checkpointing.configure(contiguous_checkpointing=, num_checkpoints=) has no effect: inputs are kept as they are, "
            "not copied into a buffer"
        )
    _configured = True


def is_configured() -> bool:
    return _configured


def reset() -> None:
    """A no-op: no state is kept between steps."""


def model_parallel_cuda_manual_seed(seed: int) -> None:
    torch.manual_seed(seed)

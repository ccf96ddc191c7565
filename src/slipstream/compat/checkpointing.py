"""`deepspeed.checkpointing`: calls that recompute activations. Its settings are the engine's config's (docs/ACTIVATIONS.md)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from slipstream.checkpointing import checkpoint as _checkpoint
from slipstream.config import load_config

logger = logging.getLogger(__name__)
_configured = False


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, whose activations are computed again in the backward."""
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
    """Only says that it was called: each call of `checkpoint` stands for itself. Raises for what a call would need.

    What the config has of it is the engine's, which acts on it, or refuses it.
    """
    global _configured
    block = {} if deepspeed_config is None else load_config(config=deepspeed_config).get("activation_checkpointing") or {}
    if block.get("partition_activations") if partition_activations is None else partition_activations:
        raise ValueError("checkpointing.configure(partition_activations=True) needs tensor parallelism, which is not built yet")
    given = {
        "checkpoint_in_cpu": (checkpoint_in_cpu, "cpu_checkpointing"),
        "profile": (profile, "profile"),
        "synchronize": (synchronize, "synchronize_checkpoint_boundary"),
    }
    for name, (value, key) in given.items():
        if value:
            raise ValueError(
                f"checkpointing.configure({name}=True): a call knows of no settings; drop the calls of checkpoint() and set "
                f"activation_checkpointing.{key} in the config"
                + (", or use slipstream.checkpointing.checkpoint(..., host=)" if name == "checkpoint_in_cpu" else "")
            )
    if contiguous_checkpointing or num_checkpoints:
        logger.info(
            "checkpointing.configure(contiguous_checkpointing=, num_checkpoints=) has no effect: a kept input is the tensor that "
            "the call was given, never a copy in a buffer"
        )
    _configured = True


def is_configured() -> bool:
    return _configured


def reset() -> None:
    """Nothing is kept from one step to the next."""


def model_parallel_cuda_manual_seed(seed: int) -> None:
    torch.manual_seed(seed)

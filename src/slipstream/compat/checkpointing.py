"""`deepspeed.checkpointing`: calls that recompute activations. Its settings are the engine's config's (docs/ACTIVATIONS.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from slipstream.checkpointing import checkpoint as _checkpoint

_configured = False


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, whose activations are computed again in the backward."""
    return _checkpoint(function, *args)


non_reentrant_checkpoint = checkpoint


def configure(
    mpu_: Any = None, deepspeed_config: Any = None, partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None, num_checkpoints: int | None = None, checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None, profile: bool | None = None,
) -> None:  # fmt: skip
    """Only says that it was called: each call of `checkpoint` stands for itself. Raises for what a call would need."""
    global _configured
    if partition_activations:
        raise ValueError("checkpointing.configure(partition_activations=True) needs tensor parallelism, which is not built yet")
    if checkpoint_in_cpu:
        raise ValueError(
            "checkpointing.configure(checkpoint_in_cpu=True): a call knows of no settings; drop the calls of checkpoint() and set "
            "activation_checkpointing.cpu_checkpointing in the config, or use slipstream.checkpointing.checkpoint(..., host=)"
        )
    _configured = True


def is_configured() -> bool:
    return _configured


def reset() -> None:
    """Nothing is kept from one step to the next."""


def model_parallel_cuda_manual_seed(seed: int) -> None:
    torch.manual_seed(seed)

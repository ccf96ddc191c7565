"""`deepspeed.checkpointing`: explicit calls for activation checkpointing. docs/ACTIVATIONS.md describes the config's settings."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from slipstream.activations.random_states import MODEL_PARALLEL, RandomStates, seed_device, tracked
from slipstream.activations.recompute import checkpoint
from slipstream.compat.accelerator import get_accelerator
from slipstream.config import load_config
from slipstream.parallel.mpu import tensor_rank

logger = logging.getLogger(__name__)
_configured = False
_mpu: Any = None


non_reentrant_checkpoint = checkpoint
CudaRNGStatesTracker = RandomStates
_CUDA_RNG_STATE_TRACKER, _MODEL_PARALLEL_RNG_TRACKER_NAME = tracked, MODEL_PARALLEL  # GPT-NeoX reads these names


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
    """Record the mpu, and the call itself for `is_configured`. Raises ValueError for settings that `checkpoint` lacks.

    The engine reads the config's activation_checkpointing block itself.
    """
    global _configured, _mpu
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
    _configured, _mpu = True, mpu_


def is_configured() -> bool:
    return _configured


def reset() -> None:
    """A no-op: no state is kept between steps."""


def _set_cuda_rng_state(new_state: Tensor, device: Any = -1) -> None:
    get_accelerator().set_rng_state(new_state)


def get_cuda_rng_tracker() -> RandomStates:
    """The random states that `fork()` draws from, including the CPU's if the rank has no GPU."""
    return tracked


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed torch's own state with `seed`, and the state for sliced layers with a different seed on each rank.

    The rank is taken from the mpu that was passed to `configure`; 0 without one.
    """
    tracked.reset()
    torch.manual_seed(seed)
    tracked.add(MODEL_PARALLEL, _sliced_seed(seed))


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seed the state for sliced layers again."""
    with tracked.fork():
        seed_device(_sliced_seed(seed))


def _sliced_seed(seed: int) -> int:
    return seed + 2718 + (0 if _mpu is None else tensor_rank(_mpu))  # Megatron's offset, for identical draws

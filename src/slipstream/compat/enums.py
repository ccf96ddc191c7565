"""The enums of `deepspeed.runtime.zero.offload_config`."""

from __future__ import annotations

import enum


class OffloadDeviceEnum(enum.StrEnum):
    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(enum.StrEnum):
    """The states that `engine.offload_states(include=)` accepts."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"

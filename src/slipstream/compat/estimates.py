"""DeepSpeed's estimates of memory before training, as tables on standard output.

They describe Slipstream's engine, in bf16 with Adam (train/planning/predict.py): exact bytes of weights, gradients, optimizer
states and buffers, without activations. `slipstream plan` predicts activations, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from slipstream.config import DataWorld, resolve
from slipstream.launch.plan import facts
from slipstream.train.planning import explain, predict
from slipstream.zero.placement import Tier

_NONE, _CPU = "none", "cpu"


def _live(stage: int, homes: list[tuple[str, str]]) -> Callable[..., None]:
    def estimate(model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5) -> None:
        """Print the memory of a model. `additional_buffer_factor` has no effect: buffers are counted."""
        _show(model, stage, homes, num_gpus_per_node, num_nodes)

    return estimate


estimate_zero2_model_states_mem_needs_all_live = _live(2, [(_NONE, _CPU), (_NONE, _NONE)])
estimate_zero3_model_states_mem_needs_all_live = _live(3, [(_CPU, _CPU), (_NONE, _CPU), (_NONE, _NONE)])


def estimate_zero2_model_states_mem_needs_all_cold(total_params: float, *args: Any, **kwargs: Any) -> None:
    """As `..._all_live`, for a model of `total_params` parameters."""
    estimate_zero2_model_states_mem_needs_all_live(_sized(total_params, total_params), *args, **kwargs)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: float, largest_layer_params: float, *args: Any, **kwargs: Any
) -> None:
    """As `..._all_live`, for a model of `total_params` parameters in layers of at most `largest_layer_params`."""
    estimate_zero3_model_states_mem_needs_all_live(_sized(total_params, largest_layer_params), *args, **kwargs)


def model_to_params(model: nn.Module) -> tuple[int, int]:
    """The numbers of parameters of the model, and of the module that directly owns the most."""
    own = [sum(param.numel() for param in module.parameters(recurse=False)) for module in model.modules()]
    return sum(param.numel() for param in model.parameters()), max(own)


def _sized(total: float, largest: float) -> nn.Module:
    total = int(total)
    largest = int(largest) or total or 1
    sizes = [largest] * (total // largest) + [total % largest] * bool(total % largest)
    return nn.ModuleList(nn.ParameterList([torch.empty(size, device="meta")]) for size in sizes)


def _show(model: nn.Module, stage: int, homes: list[tuple[str, str]], devices: int, nodes: int) -> None:
    total, largest = model_to_params(model)
    lines = [
        "Estimated memory needed for params, optim states and gradients for a:",
        f"HW: Setup with {nodes} node{'s' * (nodes > 1)}, {devices} GPU{'s' * (devices > 1)} per node.",
        f"SW: Model with {total // 10**6}M total params, {largest // 10**6}M largest layer params.",
        "  per CPU  |  per GPU |   Options",
    ]
    for weights, states in homes:
        host, device = _bytes(model, stage, weights, states, devices, nodes)
        options = [f"offload_param={weights:<4}"] * (stage == 3) + [f"offload_optimizer={states:<4}"]
        lines.append(f" {host / 2**30:7.2f}GB | {device / 2**30:6.2f}GB | {', '.join(options).rstrip()}")
    sys.stdout.write("\n".join([*lines, ""]))


def _bytes(model: nn.Module, stage: int, weights: str, states: str, devices: int, nodes: int) -> tuple[int, int]:
    """Bytes of a host, and peak bytes of a device."""
    zero: dict[str, Any] = {"stage": stage, "offload_param": {"device": weights}, "offload_optimizer": {"device": states}}
    if stage < 3:
        del zero["offload_param"]
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero}
    world = devices * nodes
    plan = resolve(config, world=DataWorld(ranks=world), facts=facts("cuda"))
    parts = explain.parts_of(model, plan, world)
    peak = predict.peak(predict.Forecast.of(parts, explain.setting_of(plan, world, "cuda")), predict.stated(parts, 0))
    return peak.total(Tier.HOST) * devices, peak.total(Tier.DEVICE)

"""MoQ's second-order schedule: layers to which the loss is more sensitive keep their bits for longer.

In a window at whose end weights lose a bit, `engine.backward` measures the largest eigenvalue of each block's Hessian, for the loss
of the window's last micro-batch over all ranks. A weight's next reduction is delayed by the factor 1 + floor(4 lambda), where
lambda is the eigenvalue divided by the largest one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from slipstream.compression.eigenvalue import Eigenvalue, Mean
from slipstream.compression.layers import Compressed
from slipstream.train.engine import Engine
from slipstream.zero.hooks import Hooks

logger = logging.getLogger(__name__)


def mean_over(engine: Engine) -> Mean:
    """A function that averages tensors over the ranks that compute the same model on other data, or parts of it. Collective."""
    states, ranks = engine.states, engine.mesh.stage

    def mean(parts: list[Tensor]) -> list[Tensor]:
        if ranks.size == 1:
            return parts
        total = states.exchange(ranks).sum(torch.cat([part.reshape(-1) for part in parts])) / ranks.size
        return [each.view_as(part) for each, part in zip(total.split([p.numel() for p in parts]), parts, strict=True)]

    return mean


def most_over(engine: Engine) -> Callable[[Tensor], Tensor]:
    """A function that takes the elementwise maximum of a tensor over the same ranks. Collective."""
    states, ranks = engine.states, engine.mesh.stage

    def most(x: Tensor) -> Tensor:
        return x if ranks.size == 1 else states.exchange(ranks).gather(x[None], 0, [1] * ranks.size).amax(0)

    return most


class SecondOrder:
    """The blocks whose eigenvalues are measured, and the layers in them that lose bits. Raises ValueError if there are none."""

    def __init__(self, model: nn.Module, eigenvalue: Eigenvalue) -> None:
        self.eigenvalue = eigenvalue
        self.blocks = eigenvalue.get_layers(model)
        layers = [[layer for layer in block.modules() if isinstance(layer, Compressed)] for block in self.blocks]
        self.layers = [[layer for layer in each if layer.follow_factors()] for each in layers]
        if not any(self.layers):
            raise ValueError(
                f"eigenvalue.enabled orders the bits that weights lose, and in {eigenvalue.layer_name!r} none loses any: set "
                "start_bits above target_bits, without quantize_weight_in_forward, in layers of these blocks"
            )
        self.measured = -1  # the step of the last measurement

    def is_due(self, engine: Engine) -> bool:
        """Whether the next micro-batch's backward measures, because weights lose a bit at the end of its window."""
        after = engine.global_steps + 1
        if not engine.at_boundary or after % self.eigenvalue.gas_boundary_resolution:
            return False
        return any(layer.loses_at(after) for layers in self.layers for layer in layers)

    def connect(self, engine: Engine) -> None:
        states, model = engine.states, engine.module
        math_kernels = ExitStack()  # selects attention kernels that have second derivatives

        def begin(module: nn.Module, *_: Any) -> None:
            if module.training and torch.is_grad_enabled() and self.is_due(engine):
                math_kernels.enter_context(sdpa_kernel([SDPBackend.MATH]))

        def wire(hooks: Hooks) -> None:
            end = model.register_forward_hook(lambda *_: math_kernels.close(), always_call=True)
            hooks.handles += [model.register_forward_pre_hook(begin), end]

        states.wire(wire)
        states.before_backward.append(lambda loss: self.measure(engine, loss))

        def warn(_: bool) -> None:
            step = engine.global_steps
            if any(layer.loses_at(step) for layers in self.layers for layer in layers):
                resolution = self.eigenvalue.gas_boundary_resolution
                if self.measured != step and not step % resolution and engine.mesh.is_first:
                    logger.warning(
                        "eigenvalue: step %d had no engine.backward(loss), which measures; bits go on as without it", step
                    )

        states.after_step.append(warn)

    def measure(self, engine: Engine, loss: Tensor) -> None:
        """Set the factors of the layers that lose a bit at the end of this window. Collective."""
        if not self.is_due(engine):
            return
        after = engine.global_steps + 1
        mean = mean_over(engine)
        with sdpa_kernel([SDPBackend.MATH]):
            shares = self.eigenvalue.shares(loss, self.blocks, mean)
        for share, layers in zip(shares, self.layers, strict=True):
            for layer in layers:
                layer.stretch(after, 1 + math.floor(4 * share))
        if self.eigenvalue.verbose and engine.mesh.is_first:
            logger.warning("eigenvalue: step %d, over the largest: %s", after, ", ".join(f"{share:.3f}" for share in shares))
        self.measured = after

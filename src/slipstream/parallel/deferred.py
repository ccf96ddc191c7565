"""Linear layers whose weight gradients wait: a backward computes the gradient of their inputs only, and `Deferred.run` the rest.

Sources: Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241). Cutting autograd's graph instead would need the weights and
their `.grad` in place, which ZeRO-3 and ZeRO-1 do not leave there.

[Note: Bits] The products are those of autograd's backward of `F.linear`, in its order, so waiting changes no bit of a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

Take = Callable[[nn.Parameter, Tensor], None]


class Deferred:
    """The weight gradients of a model's linear layers that wait, in the order of their backwards."""

    def __init__(self, model: nn.Module) -> None:
        self.waiting: list[tuple[nn.Linear, Tensor, Tensor]] = []  # layer, its input and the gradient of its output, 2D
        self.collects = False  # whether layers that run now defer
        for module in model.modules():
            if type(module) is nn.Linear:
                vars(module)["forward"] = self._forward(module)  # found before the class's

    def _forward(self, layer: nn.Linear) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            trains = layer.weight.requires_grad or (layer.bias is not None and layer.bias.requires_grad)
            if self.collects and trains and torch.is_grad_enabled() and not torch.is_autocast_enabled(x.device.type):
                anchor = x if x.requires_grad else torch.zeros((), requires_grad=True, device=x.device)
                return _Linear.apply(x, anchor, layer, self.waiting)
            return linear(x, layer.weight, layer.bias)

        return forward

    def pop(self) -> list[tuple[nn.Linear, Tensor, Tensor]]:
        """What has waited since the last call."""
        waiting = list(self.waiting)
        self.waiting.clear()
        return waiting

    @staticmethod
    @torch.no_grad()
    def run(waiting: list[tuple[nn.Linear, Tensor, Tensor]], take: Take) -> None:
        """Compute the gradients of weights and biases, and pass each to `take`."""
        for layer, x, grad in waiting:
            if layer.weight.requires_grad:
                take(cast(nn.Parameter, layer.weight), grad.t() @ x)
            if layer.bias is not None and layer.bias.requires_grad:
                take(layer.bias, grad.sum(0))


class _Linear(torch.autograd.Function):
    """`F.linear` without its parameters: torch would call a parameter's hook for a gradient of None, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, layer: nn.Linear, waiting: list[Any]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer, ctx.waiting = layer, waiting
        return linear(x, layer.weight, layer.bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        (x,) = ctx.saved_tensors
        ctx.waiting.append((ctx.layer, x.detach().flatten(0, -2), grad.flatten(0, -2)))
        return (grad @ ctx.layer.weight if ctx.needs_input_grad[0] else None), None, None, None

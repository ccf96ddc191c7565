"""Linear layers with deferred weight gradients: a backward computes only the gradient of their inputs, `Deferred.run` the rest.

Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241). Cutting autograd's graph instead would need the weights and
their `.grad` in place, but ZeRO-3 and ZeRO-1 move these away.

[Note: Bits] The products are those of autograd's backward of `F.linear`, in its order, so deferring changes no bit of a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from slipstream.parallel.tensor import Column, Row

Take = Callable[[nn.Parameter, Tensor], None]


class Waiting(NamedTuple):
    """The product that computes a linear layer's weight gradient: its input and the gradient of its output, both 2D."""

    layer: nn.Linear
    bias: Tensor | None  # the bias that the layer has added
    x: Tensor
    grad: Tensor


class Deferred:
    """The deferred weight gradients of a model's linear layers, in the order of their backwards."""

    def __init__(self, model: nn.Module) -> None:
        self.waiting: list[Waiting] = []
        self.collects = False  # whether layers currently defer
        self.replaced: list[tuple[nn.Module, str, Callable[..., Tensor]]] = []  # attributes that shadow the class's
        for each in model.modules():
            if type(each) is nn.Linear:
                self.replaced.append((each, "forward", self._forward(each)))
            elif isinstance(each, (Column, Row)) and nn.Linear in type(each).__bases__:
                self.replaced.append((each, "product", self._product(each)))
        for layer, name, function in self.replaced:
            vars(layer)[name] = function

    def close(self) -> None:
        """Restore the layers' own computation. Safe to call twice."""
        for layer, name, function in self.replaced:
            if vars(layer).get(name) is function:
                del vars(layer)[name]
        self.replaced.clear()

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Inside, layers defer. Products that are left at the end, after an error, are dropped."""
        self.collects = True
        try:
            yield
        finally:
            self.collects = False
            self.waiting.clear()

    def _forward(self, layer: nn.Linear) -> Callable[[Tensor], Tensor]:
        product = self._product(layer)
        return lambda x: product(x, layer.bias)

    def _product(self, layer: Any) -> Callable[[Tensor, Tensor | None], Tensor]:
        def product(x: Tensor, bias: Tensor | None) -> Tensor:
            trains = layer.weight.requires_grad or (bias is not None and bias.requires_grad)
            if self.collects and trains and torch.is_grad_enabled() and not torch.is_autocast_enabled(x.device.type):
                anchor = x if x.requires_grad else torch.zeros((), requires_grad=True, device=x.device)
                return _Linear.apply(x, anchor, layer, bias is not None, self.waiting)
            return linear(x, layer.weight, bias)

        return product

    def pop(self) -> list[Waiting]:
        """The products deferred since the last call."""
        waiting = list(self.waiting)
        self.waiting.clear()
        return waiting

    @staticmethod
    @torch.no_grad()
    def run(waiting: list[Waiting], take: Take) -> None:
        """Compute the gradients of weights and biases, and pass each to `take`."""
        for layer, bias, x, grad in waiting:
            if layer.weight.requires_grad:
                take(cast(nn.Parameter, layer.weight), grad.t() @ x)
            if bias is not None and bias.requires_grad:
                take(cast(nn.Parameter, bias), grad.sum(0))


class _Linear(torch.autograd.Function):
    """`F.linear` with the parameters hidden: torch would call a parameter's hook even for a gradient of None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, layer: nn.Linear, has_bias: bool, waiting: list[Waiting]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer, ctx.bias, ctx.waiting = layer, layer.bias if has_bias else None, waiting
        return linear(x, layer.weight, ctx.bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        (x,) = ctx.saved_tensors
        ctx.waiting.append(Waiting(ctx.layer, ctx.bias, x.detach().flatten(0, -2), grad.flatten(0, -2)))
        return (grad @ ctx.layer.weight if ctx.needs_input_grad[0] else None), None, None, None, None

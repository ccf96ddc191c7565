"""Functions whose gradients have no gradients themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Backward = Callable[..., Any]


def once_differentiable(what: str) -> Callable[[Backward], Backward]:
    """Decorate the backward of `what`, an `autograd.Function`, to raise RuntimeError under `create_graph=True`.

    torch's decorator of this name returns constants if the incoming gradient is one, like that of a sum, and raises no error on
    other paths to `torch.autograd.grad`'s inputs: a penalty on gradients would be ignored, in whole or in part.
    """

    def decorate(backward: Backward) -> Backward:
        def run(ctx: Any, *grads: Any) -> Any:
            if torch.is_grad_enabled():
                raise RuntimeError(
                    f"{what} has no second derivative, which create_graph=True asks for: compute this part with torch's operations"
                )
            return backward(ctx, *grads)

        return run

    return decorate

"""Functions whose gradients have none themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Backward = Callable[..., Any]


def once_differentiable(what: str) -> Callable[[Backward], Backward]:
    """Decorate the backward of `what`, an `autograd.Function`: it raises RuntimeError under `create_graph=True`.

    torch's decorator of this name returns constants if the gradient that comes in is one, as that of a sum is, and no error is on
    the way from others to `torch.autograd.grad`'s inputs: a penalty on gradients would be ignored, in whole or in part.
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

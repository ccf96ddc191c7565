"""The step loop that Lion, LAMB and Muon share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer


@torch.no_grad()
def step_each(
    optimizer: Optimizer, closure: Callable[[], float] | None, update: Callable[[Tensor, Tensor, dict[str, Any]], None]
) -> float | None:
    """Evaluate `closure`, then call update(param, grad, group) for each parameter with a gradient. Returns the closure's loss."""
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                if param.grad.is_sparse:
                    raise ValueError(
                        f"{type(optimizer).__name__}: the gradient of a parameter of shape {tuple(param.shape)} is sparse"
                    )
                update(param, param.grad, group)
    return loss

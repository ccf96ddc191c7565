"""LAMB (You et al. 2019, arXiv 1904.00962, algorithm 2): Adam with one trust ratio per tensor.

Shape-aware: the ratio uses the norms of a whole tensor, so tensors must not be cut. States are fp32.

    update = m_hat / (sqrt(v_hat) + eps) + weight_decay * param
    ratio  = clamp(|param| / |update|, min_coeff, max_coeff), or 1 if one of the norms is zero
    param  = param - lr * ratio * update

[Note: Bias correction] This implementation corrects m and v before it computes the norm, as the paper does. DeepSpeed's kernel
computes the norm of the uncorrected update and corrects the learning rate instead, which makes its first steps smaller by a factor
of sqrt(1 - beta2^t) / (1 - beta1^t): 0.32 at step 1 with the default betas, tending to 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from slipstream.optim.loop import step_each


class Lamb(Optimizer):
    """LAMB with DeepSpeed's arguments: `max_coeff` and `min_coeff` bound the trust ratio."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        if lr < 0 or weight_decay < 0 or eps < 0:
            raise ValueError(f"Lamb: lr ({lr}), weight_decay ({weight_decay}), eps ({eps}) must not be negative")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"Lamb: betas {tuple(betas)} must lie in [0, 1)")
        if not 0 <= min_coeff <= max_coeff:
            raise ValueError(f"Lamb: must have 0 <= min_coeff ({min_coeff}) <= max_coeff ({max_coeff})")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": tuple(betas),
            "eps": eps,
            "eps_inside_sqrt": eps_inside_sqrt,
            "weight_decay": weight_decay,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, defaults)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        return step_each(self, closure, self._update)

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(param, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(param, dtype=torch.float32)
        exp_avg: Tensor = state["exp_avg"]
        exp_avg_sq: Tensor = state["exp_avg_sq"]
        state["step"] += 1
        grad = grad.to(exp_avg.dtype)
        beta1, beta2 = group["betas"]
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)

        step = state["step"].item() if group["bias_correction"] else float("inf")  # beta ** inf = 0: no correction
        denom = exp_avg_sq / (1 - beta2**step)
        denom = denom.add_(group["eps"]).sqrt_() if group["eps_inside_sqrt"] else denom.sqrt_().add_(group["eps"])
        update = torch.div(exp_avg, denom, out=denom).div_(1 - beta1**step)
        update.add_(param, alpha=group["weight_decay"])

        ratio = trust_ratio(param, update, group["min_coeff"], group["max_coeff"])
        param.sub_(update.mul_(ratio * group["lr"]))


def trust_ratio(param: Tensor, update: Tensor, minimum: float, maximum: float) -> Tensor:
    """|param| / |update|, clamped to [minimum, maximum]; 1 if either norm is zero. A 0-dim tensor: no synchronization."""
    param_norm = torch.linalg.vector_norm(param, dtype=torch.float32)
    update_norm = torch.linalg.vector_norm(update, dtype=torch.float32)
    ratio = (param_norm / update_norm).clamp(minimum, maximum)
    return torch.where((param_norm > 0) & (update_norm > 0), ratio, 1.0)

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
from functools import partial

from torch.optim.optimizer import Optimizer, ParamsT

from slipstream.optim.loop import checked, step_by_rule, step_each
from slipstream.optim.rules import LAMB


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
        options = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "eps_inside_sqrt": eps_inside_sqrt}
        options |= {"weight_decay": weight_decay, "max_coeff": max_coeff, "min_coeff": min_coeff}
        super().__init__(params, checked("Lamb", options))

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        return step_each(self, closure, partial(step_by_rule, LAMB))

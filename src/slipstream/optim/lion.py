"""Lion (Chen et al. 2023, arXiv 2302.06675, algorithm 2): the sign of an interpolated momentum.

Elementwise: an element's update depends on its own weight, gradient and momentum only, so the optimizer may run on any range of a
flat buffer. One fp32 state per element.

    update  = sign(beta1 * exp_avg + (1 - beta1) * grad)
    param   = param * (1 - lr * weight_decay) - lr * update
    exp_avg = beta2 * exp_avg + (1 - beta2) * grad
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

from torch.optim.optimizer import Optimizer, ParamsT

from slipstream.optim.loop import checked, step_by_rule, step_each
from slipstream.optim.rules import LION


class Lion(Optimizer):
    """Lion with DeepSpeed's arguments and defaults. A good learning rate is 3 to 10 times smaller than AdamW's."""

    elementwise: ClassVar[bool] = True

    def __init__(
        self, params: ParamsT, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, checked("Lion", {"lr": lr, "betas": betas, "weight_decay": weight_decay}))

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        return step_each(self, closure, partial(step_by_rule, LION))

"""Lion and LAMB, and code shared with Muon and the 1-bit optimizers: a loop over parameters, and a rule's update of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from slipstream.optim.rules import LAMB, LION, Rule, plain_numbers
from slipstream.zero.leaves import is_stack

Update = Callable[[dict[str, Any], Tensor, Tensor, dict[str, Any]], None]


def checked(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a group. Raises ValueError for negative rates, and for invalid betas and bounds of trust ratios."""
    rates = {key: options[key] for key in ("lr", "weight_decay", "eps") if key in options}
    if any(rate < 0 for rate in rates.values()):
        raise ValueError(f"{name}: {', '.join(f'{key} ({rate})' for key, rate in rates.items())} must not be negative")
    if not all(0 <= beta < 1 for beta in options["betas"]):
        raise ValueError(f"{name}: betas {tuple(options['betas'])} must lie in [0, 1)")
    least, most = (options.get(key, 0) for key in ("min_coeff", "max_coeff"))
    if not 0 <= least <= most:
        raise ValueError(f"{name}: must have 0 <= min_coeff ({least}) <= max_coeff ({most})")
    return options | {"betas": tuple(options["betas"])}


@torch.no_grad()
def step_each(optimizer: Optimizer, closure: Callable[[], float] | None, update: Update) -> float | None:
    """Evaluate `closure`, then call update(state, param, grad, group) for each parameter that has a gradient and elements.

    Returns the closure's loss. Raises ValueError for a sparse gradient, before any parameter changes.
    """
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    for i, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param.grad is not None and param.grad.is_sparse:
                raise ValueError(
                    f"{type(optimizer).__name__} steps every row, and a parameter of shape {tuple(param.shape)} in group {i} has a "
                    f"sparse gradient: drop sparse=True of its embedding, step it with torch.optim.SparseAdam, or train with "
                    f"slipstream.initialize(), whose engine gives every optimizer dense gradients"
                )
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None and param.numel() > 0:
                update(optimizer.state[param], param, param.grad, group)
    return loss


def step_by_rule(rule: Rule, state: dict[str, Any], param: Tensor, grad: Tensor, group: Mapping[str, Any]) -> None:
    """Step one parameter, with its optimizer state. The state is fp32, and is created in the first step.

    Raises ValueError unless weights and gradients are fp32, bf16 or fp16.
    """
    if not state:
        state.update((name, torch.zeros(param.shape, dtype=torch.float32, device=param.device)) for name in rule.states)
        state.update({"step": torch.zeros((), dtype=torch.float32)} if rule.counts else {})
    state.update((name, state[name].contiguous()) for name in rule.states)
    if rule.counts:
        state["step"] += 1
    master = param.detach().contiguous().view(-1)
    arrays = [master, grad.contiguous().view(-1), *(state[name].view(-1) for name in rule.states)]
    length = param.numel() // len(param) if rule.is_whole and is_stack(param) else param.numel()
    for tensors in zip(*(array.split(length) for array in arrays), strict=True):
        rule.apply(plain_numbers(group), int(state.get("step", 0)), (*tensors, None), 1.0, None)
    if master.data_ptr() != param.data_ptr():
        param.copy_(master.view(param.shape))
    torch.autograd.graph.increment_version(param)  # a kernel's write does not, and a backward must see that saved weights changed


class Lion(Optimizer):
    """Lion (Chen et al. 2023, arXiv 2302.06675, algorithm 2), the sign of an interpolated momentum, with DeepSpeed's arguments and
    defaults. A good learning rate is 3 to 10 times smaller than AdamW's. One fp32 state per element.

        update  = sign(beta1 * exp_avg + (1 - beta1) * grad)
        param   = param * (1 - lr * weight_decay) - lr * update
        exp_avg = beta2 * exp_avg + (1 - beta2) * grad
    """

    elementwise: ClassVar[bool] = True

    def __init__(
        self, params: ParamsT, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, checked("Lion", {"lr": lr, "betas": betas, "weight_decay": weight_decay}))

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        return step_each(self, closure, partial(step_by_rule, LION))


class Lamb(Optimizer):
    """LAMB (You et al. 2019, arXiv 1904.00962, algorithm 2), Adam with one trust ratio per tensor, with DeepSpeed's arguments.
    States are fp32.

        update = m_hat / (sqrt(v_hat) + eps) + weight_decay * param
        ratio  = clamp(|param| / |update|, min_coeff, max_coeff), or 1 if one of the norms is zero
        param  = param - lr * ratio * update

    Shape-aware: the ratio uses the norms of a whole tensor, so tensors must not be cut.

    [Note: Bias correction] This implementation corrects m and v before it computes the norm, as the paper does. DeepSpeed's kernel
    computes the norm of the uncorrected update and corrects the learning rate instead, which makes its first steps smaller by a
    factor of sqrt(1 - beta2^t) / (1 - beta1^t): 0.32 at step 1 with the default betas, tending to 1.
    """

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

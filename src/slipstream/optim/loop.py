"""The steps of Lion, LAMB and Muon: a loop over parameters, and a rule's update of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from slipstream.optim.rules import Arrays, Rule, plain_numbers
from slipstream.zero.leaves import is_stack

Update = Callable[[dict[str, Any], Tensor, Tensor, dict[str, Any]], None]


def checked(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a group. Raises ValueError for rates below 0, and for betas and bounds of trust ratios that cannot be."""
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
    """Step one parameter with an optimizer's state of it. The state is fp32, and made in the first step.

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
    for tensor, gradient, *states in zip(*(array.split(length) for array in arrays), strict=True):
        rule.apply(plain_numbers(group), int(state.get("step", 0)), Arrays(tensor, gradient, states, None), 1.0, None)
    if master.data_ptr() != param.data_ptr():
        param.copy_(master.view(param.shape))
    torch.autograd.graph.increment_version(param)  # a kernel's write does not: a backward has to see that saved weights changed

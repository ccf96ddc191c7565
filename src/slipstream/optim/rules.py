"""The optimizers that have kernels of their own (ops/optim.py): which states they keep, and one call on a run of elements.

A rule knows nothing of where its states rest. `rule_of` says whether a torch optimizer is one of these, with options that the
kernels know; any other runs as torch wrote it (optim/sharded.py, TorchSteps).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from slipstream import ops
from slipstream.ops import Blocks, Stochastic
from slipstream.optim.lamb import Lamb as TorchLamb
from slipstream.optim.lion import Lion as TorchLion

State = Tensor | Blocks


class Rule(ABC):
    """One optimizer's arithmetic. `states` are named as torch names them; of `signed` ones the codes in 8 bits are int8.

    What a group says is read at each step, but for `chosen`: by these options the rule was chosen, and no group may change them.
    """

    states: tuple[str, ...]
    signed: tuple[bool, ...]
    may_be_blocks = True  # whether there are kernels for states in 8 bits
    chosen: Mapping[str, bool] = {"amsgrad": False, "maximize": False}
    is_whole = False  # whether it takes norms of parameters, so that none is cut: not by ranks, and not by chunks

    @abstractmethod
    def apply(
        self,
        options: Mapping[str, Any],
        step: int,
        master: Tensor,
        grad: Tensor,
        states: Sequence[State],
        out: Tensor | None,
        scale: float,
        rounding: Stochastic | None,
    ) -> None:
        """Update `master` and `states` in place with `grad` times `scale`, and write the new weights to `out`. All 1D."""


class AdamW(Rule):
    """Adam and AdamW. Source: Kingma & Ba (arXiv 1412.6980); Loshchilov & Hutter (arXiv 1711.05101)."""

    states = ("exp_avg", "exp_avg_sq")
    signed = (True, False)

    def __init__(self, *, decoupled: bool) -> None:
        self.decoupled = decoupled  # of groups that do not say it

    def apply(
        self,
        options: Mapping[str, Any],
        step: int,
        master: Tensor,
        grad: Tensor,
        states: Sequence[State],
        out: Tensor | None,
        scale: float,
        rounding: Stochastic | None,
    ) -> None:
        beta1, beta2 = options["betas"]
        ops.adamw(
            master,
            grad,
            states[0],
            states[1],
            out,
            scale=scale,
            lr=options["lr"],
            beta1=beta1,
            beta2=beta2,
            eps=options["eps"],
            weight_decay=options["weight_decay"],
            step=step,
            decoupled=options.get("decoupled_weight_decay", self.decoupled),
            bias_correction=options.get("bias_correction", True),
            rounding=rounding,
        )


class Lion(Rule):
    """Source: Chen et al. (arXiv 2302.06675), as slipstream.optim.Lion."""

    states = ("exp_avg",)
    signed = (True,)

    def apply(
        self,
        options: Mapping[str, Any],
        step: int,
        master: Tensor,
        grad: Tensor,
        states: Sequence[State],
        out: Tensor | None,
        scale: float,
        rounding: Stochastic | None,
    ) -> None:
        beta1, beta2 = options["betas"]
        ops.lion(
            master,
            grad,
            states[0],
            out,
            scale=scale,
            lr=options["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=options["weight_decay"],
            rounding=rounding,
        )


class Adagrad(Rule):
    """As torch.optim.Adagrad. Its sum only grows: 8 bits would lose what is added."""

    states = ("sum",)
    signed = (False,)
    may_be_blocks = False

    def apply(
        self,
        options: Mapping[str, Any],
        step: int,
        master: Tensor,
        grad: Tensor,
        states: Sequence[State],
        out: Tensor | None,
        scale: float,
        rounding: Stochastic | None,
    ) -> None:
        assert isinstance(states[0], Tensor)
        ops.adagrad(
            master,
            grad,
            states[0],
            out,
            scale=scale,
            lr=options["lr"],
            lr_decay=options["lr_decay"],
            eps=options["eps"],
            weight_decay=options["weight_decay"],
            step=step,
            rounding=rounding,
        )


class SGD(Rule):
    """As torch.optim.SGD."""

    def __init__(self, *, momentum: bool) -> None:
        self.states = ("momentum_buffer",) if momentum else ()
        self.signed = (True,) if momentum else ()
        self.chosen = {**Rule.chosen, "momentum": momentum}

    def apply(
        self,
        options: Mapping[str, Any],
        step: int,
        master: Tensor,
        grad: Tensor,
        states: Sequence[State],
        out: Tensor | None,
        scale: float,
        rounding: Stochastic | None,
    ) -> None:
        ops.sgd(
            master,
            grad,
            states[0] if states else None,
            out,
            scale=scale,
            lr=options["lr"],
            momentum=options["momentum"],
            dampening=options["dampening"],
            nesterov=options["nesterov"],
            weight_decay=options["weight_decay"],
            first=step == 1,
            rounding=rounding,
        )


class Lamb(Rule):
    """As slipstream.optim.Lamb."""

    states = ("exp_avg", "exp_avg_sq")
    signed = (True, False)
    may_be_blocks = False
    is_whole = True

    def apply(
        self,
        options: Mapping[str, Any],
        step: int,
        master: Tensor,
        grad: Tensor,
        states: Sequence[State],
        out: Tensor | None,
        scale: float,
        rounding: Stochastic | None,
    ) -> None:
        exp_avg, exp_avg_sq = states
        assert isinstance(exp_avg, Tensor) and isinstance(exp_avg_sq, Tensor)
        beta1, beta2 = options["betas"]
        common = {name: options[name] for name in ("eps", "eps_inside_sqrt", "weight_decay", "bias_correction")}
        common |= {"beta1": beta1, "beta2": beta2, "step": step, "rounding": rounding}
        weights, update = (math.sqrt(float(s)) for s in ops.lamb_update(master, grad, exp_avg, exp_avg_sq, scale=scale, **common))
        ratio = min(max(weights / update, options["min_coeff"]), options["max_coeff"]) if weights and update else 1.0
        ops.lamb_apply(master, exp_avg, exp_avg_sq, out, lr=options["lr"] * ratio, **common)


_BEYOND = ("amsgrad", "maximize", "capturable", "differentiable")  # options that no kernel knows


def rule_of(optimizer: Optimizer) -> Rule | None:
    """The rule that computes what this optimizer does, or None."""
    groups = optimizer.param_groups
    if any(group.get(option) for group in groups for option in _BEYOND):
        return None
    kind, options = type(optimizer), groups[0]
    if kind in (torch.optim.AdamW, torch.optim.Adam):
        return AdamW(decoupled=kind is torch.optim.AdamW)
    if kind is TorchLion:
        return Lion()
    if kind is TorchLamb and not any(param.is_cuda for group in groups for param in group["params"]):  # norms are read on the host
        return Lamb()
    if kind is torch.optim.Adagrad:
        return Adagrad()
    if kind is torch.optim.SGD and len({bool(group["momentum"]) for group in groups}) == 1:
        return SGD(momentum=bool(options["momentum"]))
    return None


def not_computed(optimizer: Optimizer, rule: Rule | None, groups: Sequence[Mapping[str, Any]]) -> str:
    """What a group asks for that was not chosen for the optimizer at `initialize`, and the remedy; "" where there is nothing."""
    chosen = rule.chosen if rule is not None else {}
    if rule is None and type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        chosen = {"bias_correction": True}  # which torch's own does not know
    for i, group in enumerate(groups):
        for option, value in chosen.items():
            if bool(group.get(option, value)) != value:
                return (
                    f"parameter group {i} has {option} = {group[option]!r}, and this engine steps {type(optimizer).__name__} "
                    f"{'with' if value else 'without'} it: set it where the optimizer is made, before initialize(), or set it back"
                )
    return ""

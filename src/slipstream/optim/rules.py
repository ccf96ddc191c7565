"""The optimizers with native kernels (ops/optim.py): their states, and their update of a run of elements.

A rule does not know where its states are stored. `rule_of` returns the rule for a torch optimizer whose class and options the
kernels support; any other runs torch's own step (optim/sharded.py, TorchSteps).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from slipstream import ops
from slipstream.ops import Blocks, Stochastic
from slipstream.optim.lamb import Lamb as TorchLamb
from slipstream.optim.lion import Lion as TorchLion

State = Tensor | Blocks


class Arrays(NamedTuple):
    """A run of elements. All tensors are 1D."""

    master: Tensor
    grad: Tensor
    states: Sequence[State]
    out: Tensor | None  # the weights, if separate from the master


class Rule(ABC):
    """One optimizer's arithmetic. `states` have torch's names; 8-bit codes of `signed` ones are int8, else uint8.

    A group's options are read at every step, except those in `chosen`: they selected the rule, so no group may change them.
    """

    states: tuple[str, ...]
    signed: tuple[bool, ...]
    may_be_blocks = True  # whether the kernels support 8-bit states
    chosen: Mapping[str, bool] = {"amsgrad": False, "maximize": False}
    is_whole = False  # whether it needs norms of whole parameters, so that neither ranks nor chunks may cut one

    @abstractmethod
    def apply(self, options: Mapping[str, Any], step: int, run: Arrays, scale: float, rounding: Stochastic | None) -> None:
        """Update `master` and `states` in place with `grad` times `scale`, and write the new weights to `out`."""


class AdamW(Rule):
    """Adam and AdamW. Source: Kingma & Ba (arXiv 1412.6980); Loshchilov & Hutter (arXiv 1711.05101)."""

    states = ("exp_avg", "exp_avg_sq")
    signed = (True, False)

    def __init__(self, *, decoupled: bool) -> None:
        self.decoupled = decoupled  # default for groups without the option

    def apply(self, options: Mapping[str, Any], step: int, run: Arrays, scale: float, rounding: Stochastic | None) -> None:
        beta1, beta2 = options["betas"]
        ops.adamw(
            run.master,
            run.grad,
            run.states[0],
            run.states[1],
            run.out,
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
    """slipstream.optim.Lion. Source: Chen et al. (arXiv 2302.06675)."""

    states = ("exp_avg",)
    signed = (True,)

    def apply(self, options: Mapping[str, Any], step: int, run: Arrays, scale: float, rounding: Stochastic | None) -> None:
        beta1, beta2 = options["betas"]
        ops.lion(
            run.master,
            run.grad,
            run.states[0],
            run.out,
            scale=scale,
            lr=options["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=options["weight_decay"],
            rounding=rounding,
        )


class Adagrad(Rule):
    """torch.optim.Adagrad. Its sum only grows: 8 bits would lose small increments."""

    states = ("sum",)
    signed = (False,)
    may_be_blocks = False

    def apply(self, options: Mapping[str, Any], step: int, run: Arrays, scale: float, rounding: Stochastic | None) -> None:
        assert isinstance(run.states[0], Tensor)
        ops.adagrad(
            run.master,
            run.grad,
            run.states[0],
            run.out,
            scale=scale,
            lr=options["lr"],
            lr_decay=options["lr_decay"],
            eps=options["eps"],
            weight_decay=options["weight_decay"],
            step=step,
            rounding=rounding,
        )


class SGD(Rule):
    """torch.optim.SGD."""

    def __init__(self, *, momentum: bool) -> None:
        self.states = ("momentum_buffer",) if momentum else ()
        self.signed = (True,) if momentum else ()
        self.chosen = {**Rule.chosen, "momentum": momentum}

    def apply(self, options: Mapping[str, Any], step: int, run: Arrays, scale: float, rounding: Stochastic | None) -> None:
        ops.sgd(
            run.master,
            run.grad,
            run.states[0] if run.states else None,
            run.out,
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
    """slipstream.optim.Lamb."""

    states = ("exp_avg", "exp_avg_sq")
    signed = (True, False)
    may_be_blocks = False
    is_whole = True

    def apply(self, options: Mapping[str, Any], step: int, run: Arrays, scale: float, rounding: Stochastic | None) -> None:
        master, grad, (exp_avg, exp_avg_sq), out = run
        assert isinstance(exp_avg, Tensor) and isinstance(exp_avg_sq, Tensor)
        beta1, beta2 = options["betas"]
        common = {name: options[name] for name in ("eps", "eps_inside_sqrt", "weight_decay", "bias_correction")}
        common |= {"beta1": beta1, "beta2": beta2, "step": step, "rounding": rounding}
        weights, update = (math.sqrt(float(s)) for s in ops.lamb_update(master, grad, exp_avg, exp_avg_sq, scale=scale, **common))
        ratio = min(max(weights / update, options["min_coeff"]), options["max_coeff"]) if weights and update else 1.0
        ops.lamb_apply(master, exp_avg, exp_avg_sq, out, lr=options["lr"] * ratio, **common)


UNSUPPORTED = ("amsgrad", "maximize", "capturable", "differentiable")  # options without a kernel


def rule_of(optimizer: Optimizer) -> Rule | None:
    """The rule that is equivalent to this optimizer, or None."""
    groups = optimizer.param_groups
    if any(group.get(option) for group in groups for option in UNSUPPORTED):
        return None
    kind, options = type(optimizer), groups[0]
    if kind in (torch.optim.AdamW, torch.optim.Adam):
        return AdamW(decoupled=kind is torch.optim.AdamW)
    if kind is TorchLion:
        return Lion()
    if kind is TorchLamb and not any(param.is_cuda for group in groups for param in group["params"]):  # reading norms synchronizes
        return Lamb()
    if kind is torch.optim.Adagrad:
        return Adagrad()
    if kind is torch.optim.SGD and len({bool(group["momentum"]) for group in groups}) == 1:
        return SGD(momentum=bool(options["momentum"]))
    return None


def unsupported_option(optimizer: Optimizer, rule: Rule | None, groups: Sequence[Mapping[str, Any]]) -> str:
    """The error text for a group option that differs from the one chosen at `initialize`, or "" if there is none."""
    chosen = rule.chosen if rule is not None else {}
    if rule is None and type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        chosen = {"bias_correction": True}  # torch's own step ignores it
    for i, group in enumerate(groups):
        for option, value in chosen.items():
            if bool(group.get(option, value)) != value:
                return (
                    f"parameter group {i} has {option} = {group[option]!r}, and this engine steps {type(optimizer).__name__} "
                    f"{'with' if value else 'without'} it: set it where the optimizer is made, before initialize(), or set it back"
                )
    return ""

"""The optimizers with native kernels (ops/optim.py): their states, and the update of a run of elements.

A rule does not know where its states are stored. optim/native.py applies it to shards on any tier, optim/loop.py to parameters of
our own torch optimizers. `rule_of` (optim/resolve.py) returns the rule for a torch optimizer whose class and options the kernels
support; any other optimizer runs torch's own step (optim/sharded.py, TorchSteps).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from slipstream import ops
from slipstream.ops import Blocks, Stochastic
from slipstream.world.mesh import Axis
from slipstream.zero.comm import sum_over

Squares = tuple[float | Tensor, float | Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One optimizer's arithmetic. `states` have torch's names. 8-bit codes of `signed` states are int8, of others uint8.

    A group's options are read at every step, except those in `chosen`: they selected the rule, so no group may change them.
    """

    kernel: Callable[..., None]  # (master, grad, *states, out, *, scale, rounding, **options), and `step` if it `counts`
    counts: bool = True  # whether the update depends on the step number
    options: tuple[str, ...]  # group options that the kernel takes; "betas" become beta1 and beta2
    defaults: Mapping[str, Any] = field(default_factory=dict)  # defaults of further options, which a group may lack
    states: tuple[str, ...]
    signed: tuple[bool, ...]
    may_be_blocks: bool = True  # whether the kernels support 8-bit states
    chosen: Mapping[str, bool] = field(default_factory=lambda: {"amsgrad": False, "maximize": False})
    late: bool = False  # whether it exchanges values made from the ranks' own gradients, which stay in place until the step
    is_whole: bool = False  # whether it needs norms of whole parameters, so that neither ranks nor chunks may cut one

    def apply(
        self,
        options: Mapping[str, Any],
        step: int,
        arrays: Sequence[Tensor | Blocks | None],
        scale: float,
        rounding: Stochastic | None,
        axes: Sequence[Axis] = (),
    ) -> None:
        """Update a run of elements by its gradients times `scale`.

        arrays: master, grad, states, and the weights to write, or None if these are the master; 1D
        axes: over which this tensor is a part, if the rule needs norms of wholes
        """
        values = {name: options[name] for name in self.options}
        values |= {name: options.get(name, value) for name, value in self.defaults.items()}
        if "betas" in values:
            values["beta1"], values["beta2"] = values.pop("betas")
        if self.counts:
            values["step"] = step
        if self.is_whole:
            values["axes"] = axes
        self.kernel(*arrays, scale=scale, rounding=rounding, **values)


def adamw(*, decoupled: bool) -> Rule:
    """Adam and AdamW. Source: Kingma & Ba (arXiv 1412.6980); Loshchilov & Hutter (arXiv 1711.05101)."""
    return Rule(
        kernel=_adamw,
        options=("lr", "betas", "eps", "weight_decay"),
        defaults={"decoupled_weight_decay": decoupled, "bias_correction": True},
        states=("exp_avg", "exp_avg_sq"),
        signed=(True, False),
    )


def sgd(*, momentum: bool) -> Rule:
    """torch.optim.SGD."""
    return Rule(
        kernel=_sgd,
        options=("lr", "momentum", "dampening", "nesterov", "weight_decay"),
        states=("momentum_buffer",) if momentum else (),
        signed=(True,) if momentum else (),
        chosen={"amsgrad": False, "maximize": False, "momentum": momentum},
    )


def _adamw(*arrays: Any, decoupled_weight_decay: bool, **options: Any) -> None:
    ops.adamw(*arrays, decoupled=decoupled_weight_decay, **options)


def _sgd(master: Tensor, grad: Tensor, *others: Any, step: int, **options: Any) -> None:
    momentum, out = others if len(others) == 2 else (None, *others)
    ops.sgd(master, grad, momentum, out, first=step == 1, **options)


def lamb(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    out: Tensor | None,
    *,
    scale: float,
    lr: float,
    min_coeff: float,
    max_coeff: float,
    axes: Sequence[Axis] = (),
    record: Callable[[Squares], None] | None = None,
    **options: Any,
) -> None:
    """Both passes over one tensor. record: gets its trust ratio and the square of its weights' norm. Collective over `axes`."""
    squares = summed(ops.lamb_update(master, grad, exp_avg, exp_avg_sq, scale=scale, **options), axes)
    ratio = trust_ratio(*squares, min_coeff, max_coeff)
    ops.lamb_apply(master, exp_avg, exp_avg_sq, out, lr=lr * ratio, **options)
    if record is not None:
        record((ratio, squares[0]))


def summed(squares: Squares, axes: Sequence[Axis]) -> Squares:
    """The two squares, summed over the ranks of each axis, as numbers or tensors like the inputs. Collective."""
    for axis in axes:
        sums = torch.stack([torch.as_tensor(each, dtype=torch.float64) for each in squares])
        sum_over(sums, axis)
        squares = (sums[0], sums[1]) if isinstance(squares[0], Tensor) else (float(sums[0]), float(sums[1]))
    return squares


def trust_ratio(weights: float | Tensor, update: float | Tensor, minimum: float, maximum: float) -> float | Tensor:
    """|weights| / |update| from two sums of squares, clamped to [minimum, maximum]; 1 if one is 0. Tensors stay on their device."""
    if isinstance(weights, Tensor) and isinstance(update, Tensor):
        ratio = (weights.sqrt() / update.sqrt()).clamp(minimum, maximum)
        return torch.where((weights != 0) & (update != 0), ratio, 1.0)
    return min(max(math.sqrt(weights) / math.sqrt(update), minimum), maximum) if weights and update else 1.0


# slipstream.optim.Lion. Source: Chen et al. (arXiv 2302.06675)
LION = Rule(kernel=ops.lion, counts=False, options=("lr", "betas", "weight_decay"), states=("exp_avg",), signed=(True,))
# torch.optim.Adagrad. Its sum only grows, so 8 bits would lose small increments
ADAGRAD = Rule(
    kernel=ops.adagrad, options=("lr", "lr_decay", "eps", "weight_decay"), states=("sum",), signed=(False,), may_be_blocks=False
)
# slipstream.optim.Lamb
LAMB = Rule(
    kernel=lamb,
    options=("lr", "betas", "eps", "eps_inside_sqrt", "weight_decay", "bias_correction", "min_coeff", "max_coeff"),
    states=("exp_avg", "exp_avg_sq"),
    signed=(True, False),
    may_be_blocks=False,
    is_whole=True,
)


def plain_numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's options, with one-element tensors as numbers."""
    given = ((name, value) for name, value in group.items() if name != "params")
    return {name: float(value) if isinstance(value, Tensor) and value.numel() == 1 else value for name, value in given}


UNSUPPORTED = ("amsgrad", "maximize", "capturable", "differentiable")  # options without a kernel


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

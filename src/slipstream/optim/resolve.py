"""Resolve `optimizer.type` and `optimizer.params` of the JSON to a class and its keyword arguments.

Names are case-insensitive: DeepSpeed's optimizers first, then every optimizer of `torch.optim`; there is no whitelist. An optimizer
that cannot work raises an error with the reason. Unknown names and arguments raise an error that suggests the nearest known one.
`is_elementwise` decides whether an optimizer may run on ranges of a flat buffer.
"""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer

from slipstream.optim import rules
from slipstream.optim.loop import Lamb, Lion
from slipstream.optim.muon import Muon
from slipstream.optim.onebit import OneBitAdam, ZeroOneAdam
from slipstream.optim.onebit_lamb import OneBitLamb

log = logging.getLogger(__name__)

_OURS: dict[str, type[Optimizer]] = {cls.__name__.lower(): cls for cls in (Lamb, Lion, Muon, OneBitAdam, OneBitLamb, ZeroOneAdam)}

_MUP = "scales learning rates by the model's base shapes: build it with the mup package and pass it as optimizer="
_REFUSED: dict[str, str] = {
    "lbfgs": "needs a closure that evaluates the model inside step(), and all gradients in one place",
    "muadam": _MUP,
    "muadamw": _MUP,
    "musgd": _MUP,
}

# [Note: Elementwise] An optimizer is elementwise if cutting a parameter into pieces, each with its own state, changes nothing: each
# element's update depends on that element's weight, gradient and state, and on scalars that are a function of the step count alone
# (`step`; `mu_product` of NAdam; `eta` and `mu` of ASGD). This list follows torch 2.13's source; a test that cuts parameters checks
# it. Adafactor (row and column sums, RMS of the update), Muon and Lamb are not elementwise. Membership is by exact type: a subclass
# may override step().
_ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.Adamax,
        torch.optim.AdamW,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)


class Resolved(NamedTuple):
    """`cls(groups, **kwargs)` is the optimizer.

    `group_options` are added to each of its parameter groups afterwards: hyperparameters of the native kernel that torch's class
    lacks (`bias_correction`). `native`: the configuration permits a native kernel, if the class has one (optim/rules.py).
    `per_head`: the groups are those of `muon_groups` with `attention_heads`.
    """

    cls: type[Optimizer]
    kwargs: dict[str, Any]
    group_options: dict[str, Any]
    native: bool
    per_head: bool = False

    def build(self, groups: Any) -> Optimizer:
        """Make the optimizer. Raises ValueError with the arguments if the class rejects their values."""
        try:
            optimizer = self.cls(groups, **self.kwargs)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.cls.__name__} refuses optimizer.params {self.kwargs}: {error}") from error
        for group in optimizer.param_groups:
            group.update(self.group_options)
        return optimizer


def optimizer_class(name: str) -> tuple[type[Optimizer], dict[str, Any]]:
    """The class of a name, and DeepSpeed's defaults that differ from the class's own.

    "Adam" is AdamW, as in DeepSpeed (`resolve_optimizer` reads `adam_w_mode`). Neither has weight decay by default.
    """
    key = name.lower()
    if key in _REFUSED:
        raise ValueError(f"optimizer.type {name!r} {_REFUSED[key]}")
    if key in ("adam", "adamw"):
        return torch.optim.AdamW, {"weight_decay": 0.0}
    if key in _OURS:
        return _OURS[key], {}
    classes = _torch_optimizers()
    if key in classes:
        return classes[key], {}
    class_names = {cls.__name__ for cls in (*_OURS.values(), *classes.values())}
    raise ValueError(
        f"optimizer.type {name!r} is not known{nearest(name, class_names)}; use one of {sorted(class_names)},"
        f" or pass an optimizer, or a callable that makes one, as optimizer="
    )


def resolve_optimizer(name: str, params: Mapping[str, Any]) -> Resolved:
    """Class and arguments for `optimizer.type` and `optimizer.params`, which may include DeepSpeed's extra keys."""
    cls, defaults = optimizer_class(name)
    kwargs = {**defaults, **params}
    options: dict[str, Any] = {}
    adam = cls is torch.optim.AdamW
    per_head = cls is Muon and bool(kwargs.pop("per_head_muon", False))
    if adam or cls is Muon:
        kwargs.pop("torch_adam", None)  # the native kernel computes what torch's class does, also for an optimizer object
    if adam:
        if not kwargs.pop("adam_w_mode", True) and name.lower() == "adam":
            cls = torch.optim.Adam
        if not kwargs.pop("bias_correction", True):
            options["bias_correction"] = False
    _drop_extras(name, cls, kwargs)
    for key in ("betas", "etas", "step_sizes", "eps"):  # JSON has no tuples
        if isinstance(kwargs.get(key), list):
            kwargs[key] = tuple(kwargs[key])
    check_arguments(cls, kwargs, f"optimizer.params of {name}")
    _check_kinds(cls, kwargs, f"optimizer.params of {name}")
    native = not any(kwargs.get(key) for key in rules.UNSUPPORTED)
    if options and not native:
        raise ValueError(
            f"optimizer.params of {name}: only the native kernel supports bias_correction=false, and it does not support"
            f" {', '.join(rules.UNSUPPORTED)}; remove those"
        )
    return Resolved(cls, kwargs, options, native, per_head)


def is_elementwise(optimizer: type[Optimizer] | Optimizer) -> bool:
    """Whether the optimizer may run on ranges of a flat buffer ([Note: Elementwise]).

    True for the elementwise ones of `torch.optim` and for a class or object with the attribute `elementwise = True`. Set it on
    your own optimizer if it qualifies: it saves memory and balances the load. Any other optimizer runs on whole tensors, each owned
    by one rank, which is always correct.
    """
    declared = getattr(optimizer, "elementwise", None)
    if declared is not None:
        return declared is True
    return (optimizer if isinstance(optimizer, type) else type(optimizer)) in _ELEMENTWISE


def rule_of(optimizer: Optimizer) -> rules.Rule | None:
    """The rule that is equivalent to this optimizer, or None. Membership is by exact type, as above."""
    groups = optimizer.param_groups
    if any(group.get(option) for group in groups for option in rules.UNSUPPORTED):
        return None
    kind = type(optimizer)
    if kind in (torch.optim.AdamW, torch.optim.Adam):
        return rules.adamw(decoupled=kind is torch.optim.AdamW)
    if kind in (OneBitAdam, ZeroOneAdam):
        return replace(rules.adamw(decoupled=True), late=True, may_be_blocks=False)
    if kind is OneBitLamb:
        return replace(rules.LAMB, late=True)
    if kind is Lion:
        return rules.LION
    if kind is Lamb:
        return rules.LAMB
    if kind is torch.optim.Adagrad:
        return rules.ADAGRAD
    if kind is torch.optim.SGD and len({bool(group["momentum"]) for group in groups}) == 1:
        return rules.sgd(momentum=bool(groups[0]["momentum"]))
    return None


def refuse_unshardable(optimizer: Optimizer) -> None:
    """Raise ValueError for optimizers that cannot run on shards: two of `torch.optim`, and those that swap evaluation weights.

    Also for our own optimizers over float64 parameters, which they would refuse in their step.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(f"optimizer {type(optimizer).__name__} {_REFUSED['lbfgs']}")
    params = (param for group in optimizer.param_groups for param in group["params"])
    if isinstance(optimizer, (Lion, Lamb, Muon)) and any(param.dtype is torch.float64 for param in params):
        raise ValueError(f"{type(optimizer).__name__} does not support float64 parameters; make the model float32, or use AdamW")
    if all(callable(getattr(optimizer, name, None)) for name in ("train", "eval")):
        raise ValueError(
            f"optimizer {type(optimizer).__name__} has train() and eval(), which swap the model's weights using per-parameter "
            f"state (schedule-free); here the state belongs to shards, so they would swap nothing: use AdamW and a schedule"
        )


def check_arguments(function: Callable[..., Any], kwargs: Mapping[str, Any], source: str) -> None:
    """Raise ValueError unless `function(subject, **kwargs)` can be called; for an unknown name it suggests the nearest."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    names = {parameter.name for parameter in parameters}
    for key in kwargs:
        if key not in names:
            raise ValueError(f"{source}: unknown {key!r}{nearest(key, names)}; known: {sorted(names)}")
    required = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    missing = [key for key in required if key not in kwargs]
    if missing:
        raise ValueError(f"{source}: {', '.join(missing)} must be given")


def _check_kinds(cls: type[Optimizer], kwargs: Mapping[str, Any], source: str) -> None:
    """Raise ValueError if an argument whose default is a number, or a tuple of numbers, has a value of another kind."""
    for key, parameter in inspect.signature(cls).parameters.items():
        value, default = kwargs.get(key), parameter.default
        if (
            isinstance(default, tuple)
            and value is not None
            and not (isinstance(value, tuple) and len(value) == len(default) and all(map(_is_number, value)))
        ):
            raise ValueError(f"{source}: {key} must be {len(default)} numbers, like {list(default)}, not {value!r}")
        if _is_number(default) and value is not None and not _is_number(value):
            raise ValueError(f"{source}: {key} must be a number, like {default:g}, not {value!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, Tensor)) and not isinstance(value, bool)


def nearest(name: str, known: Iterable[str]) -> str:
    """', did you mean X?', or "" if no known name is near."""
    lowered = {candidate.lower(): candidate for candidate in sorted(known)}
    matches = difflib.get_close_matches(name.lower(), lowered, n=1)
    return f", did you mean {lowered[matches[0]]!r}?" if matches else ""


class _Extra(NamedTuple):
    neutral: tuple[Any, ...]  # values without effect
    otherwise: str  # the error for any other value


# Arguments of DeepSpeed's optimizers that torch's and ours lack.
_EXTRAS: dict[str, _Extra] = {
    "max_grad_norm": _Extra((None, 0), "clips gradients: set gradient_clipping instead"),
    "fp32_optimizer_states": _Extra((None, True), "asks for half-precision states: set bf16.bf16_optimizer_states"),
    "eps_inside_sqrt": _Extra((None, False), "is not a variant of this optimizer; Lamb has it"),
    "set_grad_none": _Extra((None, True, False), ""),
    "amsgrad": _Extra((None, False), "is not a variant of this optimizer; Adam and AdamW have it"),
    "cuda_aware": _Extra((None, True, False), ""),
    "comm_backend_name": _Extra((None, "nccl", "mpi", "hccl", "compressed", "gloo"), "is unknown; the engine's transport is used"),
    "deepspeed": _Extra((None,), "is the engine, which needs no reference"),
    "per_head_muon": _Extra((None, False), "is an option of Muon"),
}


@cache
def say_no_effect(options: str) -> None:
    """Log each text once, on the first rank; as a warning, because without a logging config only warnings are shown."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        log.warning("%s has no effect: the engine chooses it", options)


def _drop_extras(name: str, cls: type[Optimizer], kwargs: dict[str, Any]) -> None:
    accepted = inspect.signature(cls).parameters
    dropped = []
    for key in [key for key in kwargs if key in _EXTRAS and key not in accepted]:
        value, extra = kwargs.pop(key), _EXTRAS[key]
        if value not in extra.neutral:
            raise ValueError(f"optimizer.params.{key} = {value!r} of {name} {extra.otherwise}")
        dropped.append(f"{key} = {value!r}")
    if dropped:
        say_no_effect(f"optimizer.params.{', '.join(dropped)} of {name}")


def _torch_optimizers() -> dict[str, type[Optimizer]]:
    named = ((name, getattr(torch.optim, name)) for name in torch.optim.__all__)
    return {
        name.lower(): cls
        for name, cls in named
        if isinstance(cls, type) and issubclass(cls, Optimizer) and cls is not Optimizer and name.lower() not in _REFUSED
    }

"""From `optimizer.type` and `optimizer.params` of the JSON to a class and its keyword arguments.

Names are matched without regard to case: DeepSpeed's own first, then every optimizer of `torch.optim`; there
is no whitelist. What cannot work is refused by name with the reason. Unknown names and parameters raise,
naming the nearest known one. `is_elementwise` says which optimizers may run on ranges of a flat buffer.
"""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from slipstream.optim.lamb import Lamb
from slipstream.optim.lion import Lion
from slipstream.optim.muon import Muon

log = logging.getLogger(__name__)

_OURS: dict[str, type[Optimizer]] = {"lamb": Lamb, "lion": Lion, "muon": Muon}

_ONE_BIT = "is not built yet (compressed communication); use Adam or Lamb until then"
_MUP = "scales rates by the model's base shapes: build it with the mup package and pass it as optimizer="
_REFUSED: dict[str, str] = {
    "lbfgs": "needs a closure that evaluates the model inside step(), and all gradients in one place",
    "sparseadam": "needs sparse gradients; gradients are dense here. Adam does the same on dense ones",
    "onebitadam": _ONE_BIT,
    "onebitlamb": _ONE_BIT,
    "zerooneadam": _ONE_BIT,
    "muadam": _MUP,
    "muadamw": _MUP,
    "musgd": _MUP,
}

# [Note: Elementwise] An optimizer is elementwise when cutting a parameter into pieces, each with its own
# state, changes nothing: each element's update depends on that element's weight, gradient and state, and on
# scalars that are a function of the step count alone (`step`; `mu_product` of NAdam; `eta` and `mu` of ASGD).
# Read in torch 2.13's source, and held by a test that cuts. Adafactor (row and column sums, RMS of the
# update), Muon and Lamb are not. Membership is by exact type: a subclass may have overridden step().
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

    `group_options` go into each of its parameter groups afterwards: hyperparameters that torch's class does
    not know but the native kernel does (`bias_correction`). `native`: the configuration leaves it to kernels of
    our own, where the class has any (optim/rules.py).
    """

    cls: type[Optimizer]
    kwargs: dict[str, Any]
    group_options: dict[str, Any]
    native: bool

    def build(self, groups: Any) -> Optimizer:
        """Raises ValueError with the arguments where the class refuses their values."""
        try:
            made = self.cls(groups, **self.kwargs)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.cls.__name__} refuses optimizer.params {self.kwargs}: {error}") from error
        for group in made.param_groups:
            group.update(self.group_options)
        return made


def optimizer_class(name: str) -> tuple[type[Optimizer], dict[str, Any]]:
    """The class behind a name, and those of DeepSpeed's defaults that are not the class's own.

    "Adam" is AdamW, as in DeepSpeed (`resolve_optimizer` reads `adam_w_mode`), and neither decays by default.
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
    known = {cls.__name__ for cls in (*_OURS.values(), *classes.values())}
    raise ValueError(
        f"optimizer.type {name!r} is not known{nearest(name, known)}; it may be any of {sorted(known)},"
        f" or pass an optimizer, or a callable that makes one, as optimizer="
    )


def resolve_optimizer(name: str, params: Mapping[str, Any]) -> Resolved:
    """Class and arguments for `optimizer.type` and `optimizer.params`, DeepSpeed's extra keys included."""
    cls, defaults = optimizer_class(name)
    kwargs = {**defaults, **params}
    options: dict[str, Any] = {}
    adam = cls is torch.optim.AdamW
    torch_adam = bool(kwargs.pop("torch_adam", False)) if adam or cls is Muon else False
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
    native = not torch_adam and not any(kwargs.get(key) for key in _NOT_NATIVE)
    if options and not native:
        raise ValueError(
            f"optimizer.params of {name}: bias_correction=false is the native kernel's, which has no"
            f" torch_adam, {', '.join(_NOT_NATIVE)}; drop those"
        )
    return Resolved(cls, kwargs, options, native)


def is_elementwise(optimizer: type[Optimizer] | Optimizer) -> bool:
    """Whether the optimizer may run on ranges of a flat buffer ([Note: Elementwise]).

    True for the elementwise ones of `torch.optim` and for a class, or an object, with the attribute
    `elementwise = True`. Set it on your own optimizer if it qualifies: it saves memory and balances the load.
    Any other runs on whole tensors, each owned by one rank, which is always right.
    """
    declared = getattr(optimizer, "elementwise", None)
    if declared is not None:
        return declared is True
    return (optimizer if isinstance(optimizer, type) else type(optimizer)) in _ELEMENTWISE


_NOT_NATIVE = ("amsgrad", "maximize", "capturable", "differentiable")


def refuse_unshardable(optimizer: Optimizer) -> None:
    """Raises ValueError for optimizers that cannot run on shards: of `torch.optim`, and those with weights for evaluation."""
    for cls in (torch.optim.LBFGS, torch.optim.SparseAdam):
        if isinstance(optimizer, cls):
            raise ValueError(f"optimizer {type(optimizer).__name__} {_REFUSED[cls.__name__.lower()]}")
    if all(callable(getattr(optimizer, name, None)) for name in ("train", "eval")):
        raise ValueError(
            f"optimizer {type(optimizer).__name__} has train() and eval(), which exchange the weights by what it keeps for each "
            f"of the model's parameters (schedule-free); here it keeps that for shards, and they would exchange nothing: use AdamW "
            f"and a schedule"
        )


def check_arguments(function: Callable[..., Any], kwargs: Mapping[str, Any], what: str) -> None:
    """Raises unless `function(subject, **kwargs)` can be called: unknown names bring the nearest."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    names = {parameter.name for parameter in parameters}
    for key in kwargs:
        if key not in names:
            raise ValueError(f"{what}: unknown {key!r}{nearest(key, names)}; known: {sorted(names)}")
    required = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    missing = [key for key in required if key not in kwargs]
    if missing:
        raise ValueError(f"{what}: {', '.join(missing)} must be given")


def _check_kinds(cls: type[Optimizer], kwargs: Mapping[str, Any], what: str) -> None:
    """Raises where a number, or so many of them, is wanted by the default's example, and something else is given."""
    for key, parameter in inspect.signature(cls).parameters.items():
        value, default = kwargs.get(key), parameter.default
        if (
            isinstance(default, tuple)
            and value is not None
            and not (isinstance(value, tuple) and len(value) == len(default) and all(map(_is_number, value)))
        ):
            raise ValueError(f"{what}: {key} is {len(default)} numbers, as {list(default)}, not {value!r}")
        if _is_number(default) and value is not None and not _is_number(value):
            raise ValueError(f"{what}: {key} is a number, as {default:g}, not {value!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, Tensor)) and not isinstance(value, bool)


def nearest(name: str, known: Iterable[str]) -> str:
    """', did you mean X?', or nothing where no known name is near."""
    lowered = {candidate.lower(): candidate for candidate in sorted(known)}
    matches = difflib.get_close_matches(name.lower(), lowered, n=1)
    return f", did you mean {lowered[matches[0]]!r}?" if matches else ""


class _Extra(NamedTuple):
    neutral: tuple[Any, ...]  # values that change nothing
    otherwise: str


# Keys of DeepSpeed's optimizers that torch's and ours do not take.
_EXTRAS: dict[str, _Extra] = {
    "max_grad_norm": _Extra((None, 0), "clips: set gradient_clipping instead"),
    "fp32_optimizer_states": _Extra((None, True), "asks for half-precision states: set bf16.bf16_optimizer_states"),
    "set_grad_none": _Extra((None, True, False), ""),
    "amsgrad": _Extra((None, False), "is not a variant of this optimizer; Adam and AdamW have it"),
    "per_head_muon": _Extra((None, False), "(one orthogonalization per attention head) is not built yet"),
}


def _drop_extras(name: str, cls: type[Optimizer], kwargs: dict[str, Any]) -> None:
    taken = inspect.signature(cls).parameters
    for key in [key for key in kwargs if key in _EXTRAS and key not in taken]:
        value, extra = kwargs.pop(key), _EXTRAS[key]
        if value not in extra.neutral:
            raise ValueError(f"optimizer.params.{key} = {value!r} of {name} {extra.otherwise}")
        log.info("optimizer.params.%s = %r of %s has no effect here", key, value, name)


def _torch_optimizers() -> dict[str, type[Optimizer]]:
    named = ((name, getattr(torch.optim, name)) for name in torch.optim.__all__)
    return {
        name.lower(): cls
        for name, cls in named
        if isinstance(cls, type) and issubclass(cls, Optimizer) and cls is not Optimizer and name.lower() not in _REFUSED
    }

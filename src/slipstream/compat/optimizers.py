"""DeepSpeed's optimizer classes. Calling one creates an optimizer of torch or Slipstream from DeepSpeed's arguments.

`isinstance(x, DeepSpeedCPUAdam)` is true for torch's Adam and AdamW, and so on. Parameter groups are not copied: accelerate passes
the groups of another optimizer, whose scheduler continues to set their learning rates.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from slipstream import optim
from slipstream.optim.resolve import say_no_effect

# argument -> default of all classes; some classes have others.
_DEFAULTS: Mapping[str, Any] = {
    "deepspeed": None,
    "lr": 1e-3,
    "freeze_step": 100_000,
    "bias_correction": True,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "eps_inside_sqrt": False,
    "weight_decay": 0.0,
    "max_grad_norm": 0.0,
    "max_coeff": 10.0,
    "min_coeff": 0.01,
    "var_freeze_step": 100_000,
    "var_update_scaler": 16,
    "local_step_scaler": 32_678,
    "local_step_clipper": 16,
    "amsgrad": False,
    "adamw_mode": True,
    "adam_w_mode": True,
    "fp32_optimizer_states": True,
    "set_grad_none": True,
    "cuda_aware": False,
    "comm_backend_name": "nccl",
    "coeff_beta": 0.9,
    "factor_max": 4.0,
    "factor_min": 0.5,
    "factor_threshold": 0.1,
}
_NO_EFFECT = {"deepspeed", "set_grad_none", "cuda_aware", "comm_backend_name"}  # the engine's transport is used


class _Refused(NamedTuple):
    """An error for values other than the defaults."""

    arguments: tuple[str, ...]
    text: str
    error: type[Exception] = ValueError


_NARROW = _Refused(("fp32_optimizer_states",), "fp32_optimizer_states=False: set bf16.bf16_optimizer_states in the config instead")
_CLIPPED = _Refused(
    ("max_grad_norm", "amsgrad"), "{name}(max_grad_norm=, amsgrad=): set gradient_clipping in the config; LAMB has no AMSGrad"
)
_ONE_BIT = (
    _Refused(("amsgrad",), "{name} does not support the AMSGrad variant.", RuntimeError),
    _Refused(
        ("max_grad_norm", "eps_inside_sqrt"),
        "{name}(max_grad_norm=, eps_inside_sqrt=): set gradient_clipping in the config; eps is outside",
    ),
)


class _Row(NamedTuple):
    make: Callable[..., torch.optim.Optimizer]
    arguments: str  # DeepSpeed's, in order; the first are the parameters
    text: str  # docstring of the class
    refused: tuple[_Refused, ...] = ()
    defaults: Mapping[str, Any] = {}

    @property
    def kinds(self) -> Any:
        """The classes of the optimizers that it stands for."""
        return (torch.optim.Adam, torch.optim.AdamW) if self.make is _adam else self.make


class _Stand(type):
    """A class whose instances are the optimizers of its row's classes."""

    row: _Row
    __signature__: inspect.Signature

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.row.kinds)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        bound = cls.__signature__.bind(*args, **kwargs)
        bound.apply_defaults()
        params, *given = bound.arguments.items()
        values, defaults = dict(given), {**_DEFAULTS, **cls.row.defaults}
        for refused in cls.row.refused:
            if any(bool(values.pop(name)) != bool(defaults[name]) for name in refused.arguments):
                raise refused.error(refused.text.format(name=cls.__name__))
        if "cuda_aware" in values and (values["cuda_aware"], values["comm_backend_name"]) != (False, "nccl"):
            both = f"cuda_aware = {values['cuda_aware']}, comm_backend_name = {values['comm_backend_name']!r}"
            say_no_effect(f"{both} of {cls.__name__}")
        return cls.row.make(params[1], **{name: value for name, value in values.items() if name not in _NO_EFFECT})


def _adam(params: Any, bias_correction: bool, **arguments: Any) -> torch.optim.Optimizer:
    decoupled = arguments.pop("adamw_mode", True) and arguments.pop("adam_w_mode", True)
    optimizer = (torch.optim.AdamW if decoupled else torch.optim.Adam)(params, **arguments)
    for group in optimizer.param_groups:
        group["decoupled_weight_decay"] = decoupled  # groups of another optimizer may have the opposite value
        if not bias_correction:
            group["bias_correction"] = False
    return optimizer


def _stand(name: str, row: _Row) -> Any:
    first, *names = row.arguments.split()
    defaults = {**_DEFAULTS, **row.defaults}
    both = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(first, both), *(inspect.Parameter(each, both, default=defaults[each]) for each in names)]
    signature = inspect.Signature(parameters)
    return _Stand(name, (), {"__doc__": row.text, "__module__": __name__, "row": row, "__signature__": signature})


_TAIL = "amsgrad cuda_aware comm_backend_name"
_COMMON = "bias_correction betas eps eps_inside_sqrt weight_decay max_grad_norm"
_IDLE = "`deepspeed`, `cuda_aware` and `comm_backend_name` have no effect: the engine's transport is used."
_ROWS = {
    "DeepSpeedCPUAdam": _Row(
        _adam,
        "model_params lr bias_correction betas eps weight_decay amsgrad adamw_mode fp32_optimizer_states",
        "AdamW, or Adam if `adamw_mode=False`. It runs on the device on which the engine keeps the states.",
        (_NARROW,),
    ),
    "FusedAdam": _Row(
        _adam,
        "params lr bias_correction betas eps adam_w_mode weight_decay amsgrad set_grad_none",
        "AdamW, or Adam if `adam_w_mode=False`.",
    ),
    "DeepSpeedCPUAdagrad": _Row(
        torch.optim.Adagrad,
        "model_params lr eps weight_decay amsgrad fp32_optimizer_states",
        "torch's Adagrad.",
        (_NARROW, _Refused(("amsgrad",), "{name}(amsgrad=True): Adagrad has no AMSGrad variant; drop the argument")),
        {"lr": 1e-2, "eps": 1e-10},
    ),
    "DeepSpeedCPULion": _Row(
        optim.Lion, "model_params lr betas weight_decay fp32_optimizer_states", "Slipstream's Lion.", (_NARROW,)
    ),
    "FusedLion": _Row(optim.Lion, "params lr betas weight_decay set_grad_none", "Slipstream's Lion."),
    "OnebitAdam": _Row(
        optim.OneBitAdam, f"params deepspeed lr freeze_step {_COMMON} {_TAIL}", f"Slipstream's 1-bit Adam. {_IDLE}", _ONE_BIT
    ),
    "ZeroOneAdam": _Row(
        optim.ZeroOneAdam,
        f"params deepspeed lr {_COMMON} var_freeze_step var_update_scaler local_step_scaler local_step_clipper {_TAIL}",
        f"Slipstream's 0/1 Adam. {_IDLE}",
        _ONE_BIT,
    ),
    "OnebitLamb": _Row(
        optim.OneBitLamb,
        f"params deepspeed lr freeze_step {_COMMON} max_coeff min_coeff {_TAIL} coeff_beta factor_max factor_min factor_threshold",
        f"Slipstream's 1-bit LAMB. {_IDLE}",
        _ONE_BIT,
    ),
    "FusedLamb": _Row(optim.Lamb, f"params lr {_COMMON} max_coeff min_coeff amsgrad", "Slipstream's LAMB.", (_CLIPPED,)),
}
globals().update({name: _stand(name, row) for name, row in _ROWS.items()})

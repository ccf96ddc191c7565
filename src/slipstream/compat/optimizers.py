"""DeepSpeed's optimizer classes: constructors of torch's and Slipstream's optimizers with DeepSpeed's arguments.

`__new__` returns an optimizer class that Slipstream has a kernel for. `isinstance(x, DeepSpeedCPUAdam)` is therefore true for
torch's Adam and AdamW. Parameter groups are not copied: accelerate passes the groups of another optimizer, whose scheduler
continues to set their learning rates.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from slipstream import optim
from slipstream.optim import Lamb, Lion, OneBitAdam

log = logging.getLogger(__name__)


class _IsAdam(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, (torch.optim.Adam, torch.optim.AdamW))


class _IsOneBitAdam(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, OneBitAdam)


class _IsZeroOneAdam(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, optim.ZeroOneAdam)


class _IsOneBitLamb(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, optim.OneBitLamb)


class DeepSpeedCPUAdam(metaclass=_IsAdam):
    """AdamW, or Adam if `adamw_mode=False`. It runs on the device on which the engine keeps the states."""

    def __new__(
        cls,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> Any:
        _refuse_narrow_states(fp32_optimizer_states)
        values = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        return _adam(model_params, adamw_mode, bias_correction, **values)


class FusedAdam(metaclass=_IsAdam):
    """AdamW, or Adam if `adam_w_mode=False`."""

    def __new__(
        cls,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> Any:
        values = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        return _adam(params, adam_w_mode, bias_correction, **values)


def _refuse_narrow_states(fp32_optimizer_states: bool) -> None:
    if not fp32_optimizer_states:
        raise ValueError("fp32_optimizer_states=False: set bf16.bf16_optimizer_states in the config instead")


def _adam(params: Any, decoupled: bool, bias_correction: bool, **arguments: Any) -> torch.optim.Optimizer:
    optimizer = (torch.optim.AdamW if decoupled else torch.optim.Adam)(params, **arguments)
    for group in optimizer.param_groups:
        group["decoupled_weight_decay"] = decoupled  # groups of another optimizer may have the opposite value
        if not bias_correction:
            group["bias_correction"] = False
    return optimizer


class DeepSpeedCPUAdagrad:
    """torch's Adagrad."""

    def __new__(
        cls,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> Any:
        _refuse_narrow_states(fp32_optimizer_states)
        if amsgrad:
            raise ValueError("DeepSpeedCPUAdagrad(amsgrad=True): Adagrad has no AMSGrad variant; drop the argument")
        return torch.optim.Adagrad(model_params, lr=lr, eps=eps, weight_decay=weight_decay)


class DeepSpeedCPULion:
    """Slipstream's Lion."""

    def __new__(
        cls,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> Any:
        _refuse_narrow_states(fp32_optimizer_states)
        return Lion(model_params, lr=lr, betas=betas, weight_decay=weight_decay)


class FusedLion:
    """Slipstream's Lion."""

    def __new__(
        cls,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> Any:
        return Lion(params, lr=lr, betas=betas, weight_decay=weight_decay)


class OnebitAdam(metaclass=_IsOneBitAdam):
    """Slipstream's 1-bit Adam. `deepspeed`, `cuda_aware` and `comm_backend_name` have no effect: the engine's transport is used."""

    def __new__(
        cls,
        params: Any,
        deepspeed: Any = None,
        lr: float = 1e-3,
        freeze_step: int = 100_000,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
    ) -> Any:
        _refuse_variants(cls.__name__, amsgrad, max_grad_norm, eps_inside_sqrt)
        values: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "bias_correction": bias_correction}
        return OneBitAdam(params, weight_decay=weight_decay, freeze_step=freeze_step, **values)


class ZeroOneAdam(metaclass=_IsZeroOneAdam):
    """Slipstream's 0/1 Adam. `deepspeed`, `cuda_aware` and `comm_backend_name` have no effect, as for `OnebitAdam`."""

    def __new__(
        cls,
        params: Any,
        deepspeed: Any = None,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        var_freeze_step: int = 100_000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32_678,
        local_step_clipper: int = 16,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
    ) -> Any:
        _refuse_variants(cls.__name__, amsgrad, max_grad_norm, eps_inside_sqrt)
        variance = {"var_freeze_step": var_freeze_step, "var_update_scaler": var_update_scaler}
        local = {"local_step_scaler": local_step_scaler, "local_step_clipper": local_step_clipper}
        return optim.ZeroOneAdam(params, lr, betas, eps, weight_decay, bias_correction, **variance, **local)


class OnebitLamb(metaclass=_IsOneBitLamb):
    """Slipstream's 1-bit LAMB. `deepspeed`, `cuda_aware` and `comm_backend_name` have no effect, as for `OnebitAdam`."""

    def __new__(
        cls,
        params: Any,
        deepspeed: Any = None,
        lr: float = 1e-3,
        freeze_step: int = 100_000,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
    ) -> Any:
        _refuse_variants(cls.__name__, amsgrad, max_grad_norm, eps_inside_sqrt)
        ratios = {"max_coeff": max_coeff, "min_coeff": min_coeff, "coeff_beta": coeff_beta}
        factors = {"factor_max": factor_max, "factor_min": factor_min, "factor_threshold": factor_threshold}
        return optim.OneBitLamb(params, lr, betas, eps, weight_decay, bias_correction, freeze_step, **ratios, **factors)


def _refuse_variants(name: str, amsgrad: bool, max_grad_norm: float, eps_inside_sqrt: bool) -> None:
    if amsgrad:
        raise RuntimeError(f"{name} does not support the AMSGrad variant.")
    if max_grad_norm or eps_inside_sqrt:
        raise ValueError(f"{name}(max_grad_norm=, eps_inside_sqrt=): set gradient_clipping in the config; eps is outside")
    log.info("%s: cuda_aware and comm_backend_name have no effect, because the engine's transport is used", name)


class FusedLamb:
    """Slipstream's LAMB."""

    def __new__(
        cls,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> Any:
        if max_grad_norm or amsgrad:
            raise ValueError("FusedLamb(max_grad_norm=, amsgrad=): set gradient_clipping in the config; LAMB has no AMSGrad")
        return Lamb(
            params,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            eps_inside_sqrt=eps_inside_sqrt,
            weight_decay=weight_decay,
            max_coeff=max_coeff,
            min_coeff=min_coeff,
        )

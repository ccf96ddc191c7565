"""`deepspeed.utils.safe_get_*` and `safe_set_*`: read and write the states of a parameter.

All are collective, even those for a rank's own shard (unlike DeepSpeed's): call them on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from slipstream.compat.zero import engine_of
from slipstream.zero import access
from slipstream.zero.unit import Unit


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor:
    """Return the full master weight."""
    engine, name = engine_of(param)
    return engine.optimizer_state(name)["master"]


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    engine, name = engine_of(param)
    engine.set_optimizer_state(name, {"master": value})


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return a full optimizer state, or None before the first step and for frozen parameters."""
    engine, name = engine_of(param)
    return engine.optimizer_state(name).get(optim_state_key)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    engine, name = engine_of(param)
    engine.set_optimizer_state(name, {optim_state_key: value})


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """Return the mean gradient over ranks so far, unscaled, in fp32; None for frozen parameters and before the first backward.

    Inside `engine.coalesce_grad_reduction()` it is not collective and returns this rank's accumulated gradient for its own part of
    the parameter, in the dtype of accumulation (in fp16 training fp32, without the loss scale).
    """
    engine, name = engine_of(param)
    if engine.coalesces:
        return _unreduced(engine, param)
    return engine.gradient(name) if param.requires_grad and engine.backwards else None


def _unreduced(engine: Any, param: nn.Parameter) -> Tensor | None:
    unit, i = _place(param)
    grad, local, slot = unit.window.unreduced(i), unit.memory.local, unit.layout.slots[i]
    if local is not None and unit.window.is_in_local(i):
        grad = local.tensor[slice(*slot.span)].view(slot.shape)
    divisor = engine.window.averaged_over * engine.precision.loss_scale
    return grad if grad is None else grad.clone() if divisor == 1 else grad.float() / divisor  # too small for fp16


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace the gradient. Raises RuntimeError inside `engine.coalesce_grad_reduction()`, where it is not reduced yet."""
    engine, name = engine_of(param)
    if engine.coalesces:
        raise RuntimeError(f"the gradient of {name!r} is not reduced inside coalesce_grad_reduction(); set it behind that block")
    engine.set_gradient(name, value)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replace each gradient by `update_func(gradient, param)`, which may modify and return its argument."""
    for param in param_list:
        grad = safe_get_full_grad(param)
        if grad is not None:
            safe_set_full_grad(param, update_func(grad, param))


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    gradient = safe_get_full_grad(param)
    if gradient is not None and engine_of(param)[0].coalesces:
        return gradient.reshape(-1)[_range(*_place(param))]
    return _local(param, gradient)


def _getting(whole: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """Return a function that reduces `whole`'s result to the elements that this rank updates, 1D."""
    return lambda param, *key, **named: _local(param, whole(param, *key, **named))


def _setting(whole: Callable[..., None]) -> Callable[..., None]:
    """Return a function that passes to `whole` the values of all ranks, joined."""
    return lambda param, value, *key, **named: whole(param, _joined(param, value), *key, **named)


safe_get_local_fp32_param = _getting(safe_get_full_fp32_param)
safe_get_local_optimizer_state = _getting(safe_get_full_optimizer_state)
safe_set_local_fp32_param = _setting(safe_set_full_fp32_param)
safe_set_local_optimizer_state = _setting(safe_set_full_optimizer_state)
safe_set_local_grad = _setting(safe_set_full_grad)


def _local(param: nn.Parameter, whole: Tensor | None) -> Any:
    unit, i = _place(param)
    return None if whole is None else access.part_of_whole(whole, unit, i).reshape(-1)[_range(unit, i)]


def _joined(param: nn.Parameter, value: Tensor) -> Tensor:
    """Join the elements that ranks own to the full parameter. Collective."""
    unit, i = _place(param)
    slot = unit.layout.slots[i]
    values = torch.zeros(slot.numel, dtype=torch.float32)
    for start, part in unit.comms.data.axis.gather((_range(unit, i).start, value.reshape(-1).float().cpu())):
        values[start : start + part.numel()] = part
    return access.whole_of(values.view(slot.shape), unit, i)


def _place(param: nn.Parameter) -> tuple[Unit, int]:
    ((unit, (i,)),) = access.units_of([param]).items()
    return unit, i


def _range(unit: Unit, i: int) -> slice:
    """The elements of the flat parameter that this rank's optimizer owns."""
    return unit.layout.slots[i].common(unit.optim_span)[1]

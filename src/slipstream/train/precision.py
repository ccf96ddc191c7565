"""Loss scaling: fp16 gradients are small, so they are multiplied on the way in and divided on the way out.

The scale is applied at the model's outputs, in fp32, and undone at its inputs, so plain `loss.backward()`, losses computed
outside the model, several losses and two engines in one graph are right (docs/ARCHITECTURE.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from slipstream.config.plan import LossScalePlan, PrecisionPlan


class LossScaler:
    """Dynamic loss scaling: halve on overflow after `hysteresis` of them, double after `window` clean steps."""

    def __init__(self, plan: LossScalePlan | None) -> None:
        self.plan = plan
        self.dynamic = plan is not None and plan.static is None
        self.scale = 1.0 if plan is None else (plan.static or plan.initial)
        self.clean_steps = 0
        self.patience = plan.hysteresis if plan else 1

    def update(self, finite: bool) -> None:
        """Take one step's verdict. Raises OverflowError when the scale cannot go lower."""
        if not self.dynamic:
            return
        assert self.plan is not None
        if finite:
            self.clean_steps += 1
            if self.plan.consecutive_hysteresis:
                self.patience = self.plan.hysteresis
            if self.clean_steps % self.plan.window == 0:
                self.scale *= 2.0
                self.patience = self.plan.hysteresis
            return
        self.clean_steps = 0
        if self.patience > 1:
            self.patience -= 1
            return
        if self.scale <= self.plan.minimum:
            raise OverflowError(
                f"gradients are still not finite at the lowest loss scale ({self.plan.minimum}). The values themselves are too "
                f'large for fp16: use bf16 ({{"bf16": {{"enabled": true}}}}), lower the learning rate, or look for a division '
                f"or log of zero in the named parameter's module. The last checkpoint is untouched."
            )
        self.scale = max(self.scale / 2.0, self.plan.minimum)

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "clean_steps": self.clean_steps, "patience": self.patience}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.dynamic:
            self.scale = float(state["scale"])
            self.clean_steps, self.patience = int(state["clean_steps"]), int(state["patience"])


class _Scale(torch.autograd.Function):
    """Identity forward; backward multiplies the gradient by `factor()` in fp32."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: Callable[[], float]) -> Tensor:
        ctx.factor, ctx.dtype = factor, tensor.dtype
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (grad.float() * ctx.factor()).to(ctx.dtype), None


class Precision:
    """How one engine computes: dtypes, loss scale, autocast."""

    def __init__(self, plan: PrecisionPlan, device: torch.device) -> None:
        self.plan, self.device = plan, device
        self.scaler = LossScaler(plan.loss_scale)
        self.scales = plan.loss_scale is not None

    @property
    def loss_scale(self) -> float:
        return self.scaler.scale

    def inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """What the model gets: floats cast where asked, and the loss scale undone for gradients that flow out here."""
        if not self.scales:
            return args, kwargs
        return map_tensors(args, self._input), map_tensors(kwargs, self._input)

    def _input(self, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            if tensor.requires_grad and torch.is_grad_enabled():
                tensor = _Scale.apply(tensor, lambda: 1.0 / self.scaler.scale)
            if self.plan.auto_cast_inputs:
                tensor = tensor.to(self.plan.param_dtype)
        return tensor

    def outputs(self, output: Any) -> Any:
        """What the caller gets: fp16 becomes fp32, and gradients that come in here are scaled."""
        if not self.scales:
            return output
        return map_tensors(output, self._output)

    def _output(self, tensor: Tensor) -> Tensor:
        if tensor.dtype is torch.float16:
            tensor = tensor.float()
        return _Scale.apply(tensor, lambda: self.scaler.scale) if tensor.requires_grad else tensor

    def autocast(self) -> Any:
        """The context the forward runs in."""
        dtype = self.plan.autocast_dtype
        return torch.autocast(self.device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with every tensor in its tuples, lists, dicts and dataclasses replaced; other objects are kept as they are."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, change) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: map_tensors(getattr(value, field.name), change) for field in dataclasses.fields(value) if field.init}
        return dataclasses.replace(value, **fields)
    if isinstance(value, Mapping):
        changed = {key: map_tensors(item, change) for key, item in value.items()}
        return changed if type(value) is dict else type(value)(changed)  # type: ignore[call-arg]
    return value

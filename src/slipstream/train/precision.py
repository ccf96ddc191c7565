"""Precision of an engine: dtypes, autocast and fp16 loss scaling.

The scale is applied to gradients at the model's outputs, in fp32, and undone at its inputs, so plain `loss.backward()`, losses
computed outside the model, several losses and two engines in one graph are correct.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from slipstream.config.plan import LossScalePlan, PrecisionPlan
from slipstream.zero import transforms
from slipstream.zero.buffers import BufferRule
from slipstream.zero.trees import map_tensors, tensors_in

_MIXED = re.compile(
    r"(same|mixed|weight) dtype|scalar type (of )?(Float|BFloat16|Half)|Input type|BFloat16|\bHalf\b"
)  # torch's error texts
MAX_SKIPPED = 50  # consecutive steps with a scale that cannot fall; a dynamic scale falls from 2**32 to 1 in fewer


class LossScaler:
    """Dynamic loss scaling: halve after `hysteresis` overflows, double after `window` clean steps that follow a clean step.

    Overflows that a lower scale cannot prevent stop the run: one at the lowest dynamic scale, or `MAX_SKIPPED` in a row if the
    scale is static or absent.
    """

    def __init__(self, plan: LossScalePlan | None) -> None:
        self.plan = plan
        self._moves = plan if plan is not None and plan.static is None else None  # set if the scale is dynamic
        self.dynamic = self._moves is not None
        self.scale = 1.0 if plan is None else (plan.static or plan.initial)
        self.clean_steps = 0
        self.patience = plan.hysteresis if plan else 1
        self.skipped = 0  # consecutive steps
        self.changed: list[Callable[[float], None]] = []  # called with the new scale over the old one

    def update(self, applied: bool, culprit: str = "", cause: str = "") -> None:
        """Update the scale after a step. Raises OverflowError, naming `culprit` and `cause`, if skipping more would not help."""
        self.skipped = 0 if applied else self.skipped + 1
        if (plan := self._moves) is None:
            if self.skipped >= MAX_SKIPPED:
                lower = "" if self.plan is None else f", lower fp16.loss_scale ({self.scale:g}), set it to 0 (dynamic) or use bf16"
                raise OverflowError(
                    f"gradients were not finite in {self.skipped} steps in a row, and each was skipped: waiting does not help"
                    f"{lower}. {cause and f'In the last one, {cause}. '}Check the data, and divisions or logs of zero in the "
                    f"module of {culprit!r}, or lower the learning rate. The last checkpoint is intact."
                )
            return
        if applied:
            doubles = self.clean_steps > 0 and self.clean_steps % plan.window == 0
            self.clean_steps += 1
            if doubles or plan.consecutive_hysteresis:
                self.patience = plan.hysteresis
            if doubles:
                self.set(self.scale * 2.0)
            return
        self.clean_steps = 0
        if self.patience > 1:
            self.patience -= 1
            return
        if self.scale <= plan.minimum:
            raise OverflowError(
                f"gradients are still not finite at the lowest loss scale ({plan.minimum}). The values themselves are too "
                f'large for fp16: use bf16 ({{"bf16": {{"enabled": true}}}}), lower the learning rate, or look for a division '
                f"or log of zero in the module of {culprit!r}{cause and f': {cause}'}. The last checkpoint is intact."
            )
        self.set(max(self.scale / 2.0, plan.minimum))

    def set(self, scale: float) -> None:
        factor, self.scale = scale / self.scale, scale
        for call in self.changed:
            call(factor)

    def explain(self, before: float) -> str:
        """The text of how the last overflow changed the scale from `before`; "" without a scale."""
        if self.plan is None:
            return ""
        if not self.dynamic:
            return f"; loss scale stays {self.scale:g} (fp16.loss_scale is static)"
        if self.scale != before:
            return f"; loss scale {before:g} -> {self.scale:g}"
        return f"; loss scale stays {before:g} (fp16.hysteresis: it falls after {self.patience} more)"

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "clean_steps": self.clean_steps, "patience": self.patience}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.dynamic:
            self.scale = float(state["scale"])
            self.clean_steps, self.patience = int(state["clean_steps"]), int(state["patience"])


class _Scale(torch.autograd.Function):
    """Identity forward; backward multiplies the gradient by `factor()` in fp32."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Callable[[], float]], output: Tensor) -> None:
        ctx.dtype, ctx.factor = inputs[0].dtype, inputs[1]

    @staticmethod
    def forward(tensor: Tensor, factor: Callable[[], float]) -> Tensor:
        return tensor.view_as(tensor) if tensor.dim() else tensor.clone()  # a loss may be multiplied in place (Trainer)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (grad.float() * ctx.factor()).to(ctx.dtype), None


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype is torch.float16 else tensor


def buffer_rule(plan: PrecisionPlan) -> BufferRule:
    weights = None if plan.param_dtype is torch.float32 else plan.param_dtype
    return BufferRule(weights=weights, stated=plan.buffer_dtype, in_fp32=plan.fp32_buffers)


class Precision:
    """Casts and scales one engine's inputs, outputs and gradients, as its plan says.

    in_stages: the model runs in stages, between which values keep their dtype and gradients their scale. The engine itself calls
    `enter` on the first stage's inputs, and `leave` on the last one's outputs.
    weight: of this rank's losses in the mean over ranks; 1 if all ranks have the same number of samples.
    """

    def __init__(self, plan: PrecisionPlan, device: torch.device, *, in_stages: bool = False, weight: float = 1.0) -> None:
        self.plan, self.device, self.in_stages, self.weight = plan, device, in_stages, weight
        self.scaler = LossScaler(plan.loss_scale)
        self.scales = plan.loss_scale is not None or weight != 1.0
        self.weighed = False  # whether a gradient entered through an output since the last step

    @property
    def loss_scale(self) -> float:
        return self.scaler.scale

    @property
    def factor(self) -> float:
        """The factor by which a loss's gradient is multiplied."""
        return self.scaler.scale * self.weight

    def inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The model's arguments: floats are cast if configured, and gradients that leave here are divided by the loss scale."""
        return (args, kwargs) if self.in_stages else (self.enter(args), self.enter(kwargs))

    def enter(self, value: Any) -> Any:
        return map_tensors(value, self._input) if self.scales else value

    def _input(self, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            if self._is_scaled(tensor) and torch.is_grad_enabled():
                tensor = _Scale.apply(tensor, lambda: 1.0 / self.factor)
            if self.plan.auto_cast_inputs:
                tensor = tensor.to(self.plan.param_dtype)
        return tensor

    def outputs(self, output: Any) -> Any:
        """The model's outputs: fp16 becomes fp32, and gradients that enter here are multiplied by the loss scale."""
        return output if self.in_stages else self.leave(output)

    def leave(self, value: Any) -> Any:
        return map_tensors(value, self._output) if self.scales else value

    def widen(self, value: Any) -> Any:
        """fp16 values that a loss compares with outputs become fp32, like these: CUDA's mse_loss of both dtypes has no backward."""
        return map_tensors(value, _widened) if self.scales else value

    def _output(self, tensor: Tensor) -> Tensor:
        tensor = _widened(tensor)
        return _Scale.apply(tensor, self.incoming) if self._is_scaled(tensor) else tensor

    def incoming(self) -> float:
        """The factor of a gradient that enters the model."""
        self.weighed = True
        return self.factor

    def end_step(self) -> None:
        """Raise RuntimeError if this rank's samples have another weight than others', but no loss was weighted."""
        weighed, self.weighed = self.weighed, False
        if self.weight != 1.0 and not (weighed or self.in_stages):
            raise RuntimeError(
                f"slipstream.elastic_batch: samples of this rank count {self.weight:g} times, by the engine's outputs, and none "
                "took part in this step's backward passes: compute the loss from engine(...), or pass it through engine.scale(loss)"
            )

    @staticmethod
    def _is_scaled(tensor: Tensor) -> bool:
        """False inside torch.func's derivatives: these return gradients to the caller, of any value that the caller chooses."""
        return not transforms.differentiates() and any(transforms.in_graphs(tensor))

    def hint(self, error: Exception, inputs: Any) -> None:
        """Add a note with the fix to an error of the model's forward, if the error is about mismatched dtypes."""
        dtype = self.plan.param_dtype
        if dtype is torch.float32 or not _MIXED.search(str(error)):
            return
        others = {str(tensor.dtype) for tensor in tensors_in(inputs) if tensor.is_floating_point() and tensor.dtype is not dtype}
        cause = f"was given {', '.join(sorted(others))}" if others else "computed another dtype internally"
        fixes = {
            torch.float16: '{"fp16": {"auto_cast": true}}',
            torch.bfloat16: '{"torch_autocast": {"enabled": true}} instead of bf16',
        }
        error.add_note(f"slipstream: the model's weights are {dtype} and it {cause}: cast with .to({dtype}), or set {fixes[dtype]}")

    def autocast(self) -> Any:
        """The context manager for the forward."""
        dtype = self.plan.autocast_dtype
        return torch.autocast(self.device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)

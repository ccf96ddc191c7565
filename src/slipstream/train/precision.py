"""Loss scaling: fp16 gradients are small, so they are multiplied on the way in and divided on the way out.

The scale is applied at the model's outputs, in fp32, and undone at its inputs, so plain `loss.backward()`, losses computed
outside the model, several losses and two engines in one graph are right (docs/ARCHITECTURE.md).
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.config.plan import LossScalePlan, PrecisionPlan
from slipstream.zero import transforms
from slipstream.zero.hooks import tensors_in

_MIXED = re.compile(
    r"(same|mixed|weight) dtype|scalar type (of )?(Float|BFloat16|Half)|Input type|BFloat16|\bHalf\b"
)  # torch's words
MAX_SKIPPED = 50  # of a scale that cannot fall: a dynamic one gets from 2**32 to 1 in fewer


class LossScaler:
    """Dynamic loss scaling: halve on overflow after `hysteresis` of them, double after `window` clean steps.

    Overflows that no lower scale can cure stop the run: one at the lowest dynamic scale, or `MAX_SKIPPED` in a row where the
    scale is static or there is none.
    """

    def __init__(self, plan: LossScalePlan | None) -> None:
        self.plan = plan
        self.dynamic = plan is not None and plan.static is None
        self.scale = 1.0 if plan is None else (plan.static or plan.initial)
        self.clean_steps = 0
        self.patience = plan.hysteresis if plan else 1
        self.skipped = 0  # in a row

    def update(self, applied: bool, culprit: str = "") -> None:
        """Take one step's verdict. Raises OverflowError, naming `culprit`, when skipping more steps would not help."""
        self.skipped = 0 if applied else self.skipped + 1
        if not self.dynamic:
            if self.skipped >= MAX_SKIPPED:
                lower = "" if self.plan is None else f", lower fp16.loss_scale ({self.scale:g}), set it to 0 (dynamic) or use bf16"
                raise OverflowError(
                    f"gradients were not finite in {self.skipped} steps in a row, and each was skipped: waiting does not help"
                    f"{lower}. Look at the data and at divisions or logs of zero in the module of {culprit!r}, or lower the "
                    f"learning rate. The last checkpoint is untouched."
                )
            return
        assert self.plan is not None
        if applied:
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
                f"or log of zero in the module of {culprit!r}. The last checkpoint is untouched."
            )
        self.scale = max(self.scale / 2.0, self.plan.minimum)

    def explain(self, before: float) -> str:
        """What the last overflow made of a scale that was `before`; "" where there is none."""
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
            if self._is_scaled(tensor) and torch.is_grad_enabled():
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
        return _Scale.apply(tensor, lambda: self.scaler.scale) if self._is_scaled(tensor) else tensor

    @staticmethod
    def _is_scaled(tensor: Tensor) -> bool:
        """Inside torch.func's derivatives nothing is: they give gradients to the caller, of whatever the caller asks for."""
        return not transforms.differentiates() and any(transforms.in_graphs(tensor))

    def hint(self, error: Exception, inputs: Any) -> None:
        """Add to an error of the model's forward what to do, where it is about dtypes that do not go together."""
        dtype = self.plan.param_dtype
        if dtype is torch.float32 or not _MIXED.search(str(error)):
            return
        others = {str(tensor.dtype) for tensor in tensors_in(inputs) if tensor.is_floating_point() and tensor.dtype is not dtype}
        given = f"was given {', '.join(sorted(others))}" if others else "has computed another dtype on its way"
        remedies = {
            torch.float16: '{"fp16": {"auto_cast": true}}',
            torch.bfloat16: '{"torch_autocast": {"enabled": true}} in place of bf16',
        }
        error.add_note(
            f"slipstream: the model's weights are {dtype} and it {given}: cast with .to({dtype}), or set {remedies[dtype]}"
        )

    def autocast(self) -> Any:
        """The context the forward runs in."""
        dtype = self.plan.autocast_dtype
        return torch.autocast(self.device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with every tensor in its tuples, lists, mappings and dataclasses replaced.

    Of other objects, those that a gradient can flow into (a SimpleNamespace, a distribution) are copied, with their attributes
    replaced; the rest, such as a cache that was filled under `no_grad`, are kept as they are.
    """
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
        if not isinstance(value, dict):
            return type(value)(changed)  # type: ignore[call-arg]
        result = copy.copy(value)  # not every subclass can be called with a dict (defaultdict)
        result.update(changed)
        return result
    if _carries_gradient(value, set()):
        result = copy.copy(value)
        vars(result).update({name: map_tensors(item, change) for name, item in vars(value).items()})
        return result
    return value


def _carries_gradient(value: Any, seen: set[int]) -> bool:
    """Whether something computed that `value` holds requires a gradient. What knows the model only, is no output of it."""
    if isinstance(value, Tensor):
        return value.requires_grad and not isinstance(value, nn.Parameter)
    if id(value) in seen or isinstance(value, (nn.Module, type, ModuleType)):
        return False
    seen.add(id(value))
    items = value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, Mapping) else ()
    return any(_carries_gradient(item, seen) for item in (*items, *getattr(value, "__dict__", {}).values()))

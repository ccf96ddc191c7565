"""The optimizer that `deepspeed.initialize` returns (Slipstream's handle with DeepSpeed's attributes) and classes for `isinstance`.

In DeepSpeed the class of the optimizer depends on the stage and precision. These classes only implement that check; they cannot be
instantiated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from slipstream.compat.runtime_utils import maybe_loss_for_backward
from slipstream.config.plan import Plan
from slipstream.data.sampler import CurriculumLoader
from slipstream.train.data import StatefulLoader
from slipstream.train.handle import OptimizerHandle
from slipstream.train.precision import _Scale
from slipstream.zero.shown import refresh_masters


class LossScaleConfig:
    """The current loss scaling; only `cur_scale` can be set. Values that only a dynamic scale has are None for a static one."""

    def __init__(self, handle: DeepSpeedOptimizerHandle) -> None:
        precision = handle.engine.precision
        scaler = precision.scaler
        moves = scaler.plan if scaler.dynamic else None
        self._handle, self._scaler, self.use_grad_scaling = handle, scaler, precision.scales
        self.dynamic = self.dynamic_loss_scale = scaler.dynamic
        self.scale_factor, self.scale_window, self.min_loss_scale = moves and 2.0, moves and moves.window, moves and moves.minimum

    cur_iter = property(attrgetter("_handle.cur_iter"))
    last_overflow_iter = property(lambda self: self.cur_iter - self._scaler.clean_steps - 1 if self.dynamic else None)

    @property
    def cur_scale(self) -> float:
        return self._handle.cur_scale

    @cur_scale.setter
    def cur_scale(self, scale: float) -> None:
        self._handle.cur_scale = scale

    loss_scale = cur_scale


class DeepSpeedOptimizerHandle(OptimizerHandle):
    engine: Any  # a DeepSpeedEngine
    custom_loss_scaler = False  # the engine scales the loss itself
    external_loss_scale = torch_autocast_gradscaler = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """`engine.step()`, except that the schedule does not advance. Fabric calls it. Raises ValueError for a closure."""
        if closure is not None:
            raise ValueError("optimizer.step(closure=): the loss is computed before; call the closure, then step() without one")
        self.engine.steps_schedule = False
        try:
            self.engine.step()
        finally:
            self.engine.steps_schedule = True

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def needs_scaler(self) -> bool:
        """Whether the loss scale is dynamic. If so, DeepSpeed's callers pass `engine.scale(loss)` to their own backward."""
        return self.dynamic_loss_scale

    def scale_if_loss(self, value: Any) -> Any:
        return self.engine.scale(value) if maybe_loss_for_backward(value) else value

    dp_process_group = property(attrgetter("engine.data_parallel_group"))
    dynamic_loss_scale = property(attrgetter("engine.precision.scaler.dynamic"))
    cur_iter = property(attrgetter("engine.global_steps"))
    _global_grad_norm = property(attrgetter("engine.global_grad_norm"))
    clip_grad = property(attrgetter("engine.plan.gradient_clipping"))
    dtype = property(attrgetter("engine.plan.precision.param_dtype"))  # of the weights in the forward
    is_gradient_accumulation_boundary = property(attrgetter("engine.at_boundary"))

    @property
    def cur_scale(self) -> float:
        """The loss scale. Set it on all ranks; it takes effect at the next window, and a dynamic scale continues from it."""
        return self.loss_scale

    @cur_scale.setter
    def cur_scale(self, scale: float) -> None:
        if self.engine.plan.precision.loss_scale is None or not 0 < scale < math.inf:
            raise ValueError(f"optimizer.cur_scale = {scale}: fp16's scale is a number above 0; other precisions have none")
        if self.engine.backwards:
            raise RuntimeError(f"optimizer.cur_scale set after {self.engine.backwards} backward passes of a window; set it before")
        self.engine.precision.scaler.set(float(scale))

    loss_scale_config = loss_scaler = property(LossScaleConfig)

    def refresh_fp32_params(self) -> None:
        """Copy weights written through `param.data` into the masters. Not needed after in-place writes to `param`."""
        with self.engine.together("optimizer.refresh_fp32_params"):
            for unit in self.engine.units:
                for i in () if unit.placement.weights else range(len(unit.params)):
                    refresh_masters(unit, i)

    def get_lr(self) -> Any:
        return self.param_groups[0]["lr"]

    def set_lr(self, lr: float) -> None:
        for group in self.param_groups:
            group["lr"] = lr


_ONE_BIT = "adam_freeze_key lamb_freeze_key freeze_step worker_errors server_errors get_lamb_coeffs"
for _name in _ONE_BIT.split():  # only for optimizers that have them
    setattr(DeepSpeedOptimizerHandle, _name, property(attrgetter(f"optimizer.{_name}")))


def serve_optimizer(handle: Any) -> None:
    """Add DeepSpeed's attributes to a new engine's handle by changing its class, which has no state of its own."""
    if type(handle) is OptimizerHandle:
        handle.__class__ = DeepSpeedOptimizerHandle


def carries_scale(loss: Tensor) -> bool:
    """Whether the loss's graph contains an engine's outputs, which apply the loss scale in the backward."""
    open_nodes: list[Any] = [loss.grad_fn]
    seen = set()
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, _Scale._backward_cls):
            return True
        seen.add(node)
        open_nodes.extend(below for below, _ in node.next_functions)
    return False


class _Asks(type):
    """`isinstance(object, cls)` is true if `cls.stands_for(object)` is, and for instances of subclasses."""

    def __instancecheck__(cls, instance: Any) -> bool:
        stands_for: Callable[[Any], bool] = vars(cls).get("stands_for", lambda instance: False)
        return stands_for(instance) or super().__instancecheck__(instance)


class DeepSpeedOptimizer(metaclass=_Asks):
    """The type of every engine's optimizer, and a base class for optimizers of scripts."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if "stands_for" in vars(cls):
            raise TypeError(f"{cls.__name__} is there for isinstance; deepspeed.initialize() makes an engine's optimizer")
        return super().__new__(cls)

    @staticmethod
    def stands_for(instance: Any) -> bool:
        return isinstance(instance, OptimizerHandle)


def _type(name: str, base: type, is_of: Callable[[Plan], bool]) -> Any:
    def stands_for(instance: Any) -> bool:
        return isinstance(instance, OptimizerHandle) and is_of(instance.engine.plan)

    return _Asks(name, (base,), {"stands_for": staticmethod(stands_for), "__module__": __name__})


def _is_bf16(plan: Plan) -> bool:
    """Whether DeepSpeed uses BF16_Optimizer: at stage 1 with fp32 accumulation and no offload, or at stage 0 in a pipeline."""
    sums = plan.zero.stage == 1 and plan.precision.grad_accum_dtype is torch.float32 and plan.offload.optimizer == "none"
    return plan.precision.param_dtype is torch.bfloat16 and (sums or (plan.zero.stage == 0 and plan.mesh.pp > 1))


def _is_half(plan: Plan) -> bool:
    half = plan.precision.param_dtype in (torch.float16, torch.bfloat16)
    return plan.zero.stage == 0 and half and not _is_bf16(plan)


ZeROOptimizer = _type("ZeROOptimizer", DeepSpeedOptimizer, lambda plan: plan.zero.stage > 0 or _is_bf16(plan))
DeepSpeedZeroOptimizer = _type(
    "DeepSpeedZeroOptimizer", ZeROOptimizer, lambda plan: plan.zero.stage in (1, 2) and not _is_bf16(plan)
)
DeepSpeedZeroOptimizer_Stage3 = _type("DeepSpeedZeroOptimizer_Stage3", ZeROOptimizer, lambda plan: plan.zero.stage == 3)
BF16_Optimizer = _type("BF16_Optimizer", ZeROOptimizer, _is_bf16)
FP16_Optimizer = _type("FP16_Optimizer", DeepSpeedOptimizer, _is_half)
FP16_UnfusedOptimizer = _type("FP16_UnfusedOptimizer", DeepSpeedOptimizer, _is_half)


class DeepSpeedDataLoader(metaclass=_Asks):
    """The type of an engine's loader, for `isinstance`."""

    @staticmethod
    def stands_for(instance: Any) -> bool:
        return isinstance(instance, StatefulLoader | CurriculumLoader)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("engine.deepspeed_io(dataset) makes a loader, and so does deepspeed.initialize(training_data=dataset)")

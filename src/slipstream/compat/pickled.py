"""Classes named in DeepSpeed's pickles, for `torch.load` and for scripts that pass them to `torch.serialization.add_safe_globals`.

A pickle names a class by its module, so `__module__` is DeepSpeed's. An engine's own loss scale is in `engine.precision.scaler`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


class LossScaler:
    """A static loss scale."""

    dynamic = False

    def __init__(self, scale: float = 1.0) -> None:
        self.cur_scale = scale

    @property
    def loss_scale(self) -> float:
        return self.cur_scale

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss * self.cur_scale

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        self.scale_loss(loss).backward(retain_graph=retain_graph)

    def update_scale(self, overflow: bool) -> None:
        """A no-op: the scale is static."""


class DynamicLossScaler(LossScaler):
    """A loss scale that is halved after `delayed_shift` overflowing steps, and doubled after `scale_window` steps without overflow.

    consecutive_hysteresis  a step without overflow restores all of `delayed_shift`; otherwise only a doubling does `update_scale`
    raises OverflowError at `min_scale`, unless `raise_error_at_min_scale` is false.
    """

    dynamic = True
    scale_factor = 2.0

    def __init__(
        self,
        init_scale: float = 2.0**32,
        scale_window: int = 1000,
        min_scale: float = 1.0,
        delayed_shift: int = 1,
        consecutive_hysteresis: bool = False,
        raise_error_at_min_scale: bool = True,
        dtype: Any = None,
    ) -> None:
        super().__init__(init_scale)
        self.scale_window, self.min_scale, self.raise_error_at_min_scale = scale_window, min_scale, raise_error_at_min_scale
        self.delayed_shift = self.cur_hysteresis = delayed_shift
        self.consecutive_hysteresis = consecutive_hysteresis
        self.cur_iter, self.last_overflow_iter = 0, -1

    def update_scale(self, overflow: bool) -> None:
        if overflow:
            self.last_overflow_iter = self.cur_iter
            if self.cur_hysteresis > 1:
                self.cur_hysteresis -= 1
            elif self.cur_scale == self.min_scale and self.raise_error_at_min_scale:
                raise OverflowError(f"gradients are not finite at the lowest loss scale, {self.min_scale:g}")
            else:
                self.cur_scale = max(self.cur_scale / self.scale_factor, self.min_scale)
        else:
            clean = self.cur_iter - self.last_overflow_iter - 1
            doubles = clean > 0 and clean % self.scale_window == 0
            if doubles or self.consecutive_hysteresis:
                self.cur_hysteresis = self.delayed_shift
            self.cur_scale *= self.scale_factor if doubles else 1
        self.cur_iter += 1


@dataclass
class fragment_address:
    """The range of a parameter in a flat buffer."""

    numel: int
    start: int


LossScalerBase = LossScaler
LossScaler.__module__ = DynamicLossScaler.__module__ = "deepspeed.runtime.fp16.loss_scaler"
fragment_address.__module__ = "deepspeed.utils.tensor_fragment"

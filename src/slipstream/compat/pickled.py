"""Classes named in DeepSpeed's pickles, for `torch.load` and for scripts that pass them to `torch.serialization.add_safe_globals`.

A pickle names a class by its module, so `__module__` is DeepSpeed's. An engine's own loss scale is in `engine.precision.scaler`.
"""

from __future__ import annotations

from dataclasses import dataclass


class LossScaler:
    """A saved loss scale: a pickle sets its attributes. It scales nothing, which the engine does."""

    dynamic = False

    def __init__(self, scale: float = 1.0) -> None:
        self.cur_scale = scale

    @property
    def loss_scale(self) -> float:
        return self.cur_scale


class DynamicLossScaler(LossScaler):
    """A saved loss scale that overflows have lowered, with the counts of its steps."""

    dynamic = True


@dataclass
class fragment_address:
    """The range of a parameter in a flat buffer."""

    numel: int
    start: int


LossScalerBase = LossScaler
LossScaler.__module__ = DynamicLossScaler.__module__ = "deepspeed.runtime.fp16.loss_scaler"
fragment_address.__module__ = "deepspeed.utils.tensor_fragment"

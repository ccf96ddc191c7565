"""A global batch that follows the gradient noise scale, and learning rates that follow the batch.

A batch of the size of the gradient noise scale reaches a loss in twice the least number of steps and twice the least number of
samples (McCandlish et al., arXiv:1812.06162, section 2.3). Every few steps, the number of micro-batches per step is set so that the
batch is as close as possible to `ratio` times the noise scale. It stays within bounds and changes at most by a factor of two. If
noise hides the gradient (the estimate of its square is not positive), the noise scale counts as infinite.

All ranks decide from numbers that are equal on all of them (noise.py), so they decide the same. Micro-batches keep their size, and
samples their order: a step consumes more or fewer micro-batches.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from slipstream.config.plan import AdaptivePlan, Plan
from slipstream.data.batching import VariableBatchSizeLR
from slipstream.train.noise import Noise

if TYPE_CHECKING:
    from slipstream.train.engine import Engine

logger = logging.getLogger(__name__)


def adapt_batch(model: nn.Module, plan: Plan) -> Callable[[Engine], None] | None:
    """The `Change` (changes.py) that lets the batch follow the noise scale; None if the plan does not ask for it."""
    settings = plan.adaptive
    return None if settings is None else lambda engine: AdaptiveBatch(engine, settings).connect()


class AdaptiveBatch:
    """Adapts the batch of one engine. Checkpoints contain the batch size and the measurements behind it."""

    def __init__(self, engine: Engine, plan: AdaptivePlan) -> None:
        self.engine, self.plan = engine, plan
        self.noise: Noise = engine.states.resources.pop("noise scale")

    def connect(self) -> None:
        self.engine.states.resources["adaptive batch"] = self
        self.engine.states.after_step.append(self._end)

    def _end(self, _: bool) -> None:
        if self.engine.window.forced is not None:
            raise ValueError(
                "slipstream.adaptive_batch counts the micro-batches of a step, and the training loop says itself where a step ends "
                "(engine.set_boundary, as Accelerate and transformers' Trainer do): drop one of the two"
            )
        if self.engine.global_steps % self.plan.every or not self.noise.measured:
            return
        scale = self.noise.scale
        before = self.engine.plan.batch
        per_pass = before.train_batch_size // before.accumulation
        wanted = math.inf if scale is None else self.plan.ratio * scale / per_pass
        self._resize(round(min(max(wanted, before.accumulation / 2), 2 * before.accumulation)))
        now = self.engine.plan.batch
        if now.accumulation != before.accumulation and self.engine.mesh.is_first:
            logger.info(
                "step %d: the noise scale is %s, so train_batch_size %d becomes %d (%d micro-batches on each rank), lr %s",
                self.engine.global_steps,
                "beyond measure" if scale is None else f"{scale:.4g} samples",
                before.train_batch_size,
                now.train_batch_size,
                now.accumulation,
                [float(group["lr"]) for group in self.engine.optimizer.param_groups],
            )
        self.engine.log({"Train/Samples/train_batch_size": now.train_batch_size})

    def _resize(self, accumulation: int) -> None:
        """Set the micro-batches per step, within the bounds, from the next step on."""
        batch = self.engine.plan.batch
        per_pass = batch.train_batch_size // batch.accumulation
        accumulation = min(max(accumulation, -(-self.plan.least // per_pass)), max(self.plan.most // per_pass, 1))
        if accumulation != batch.accumulation:
            self.engine.set_batch(replace(batch, train_batch_size=accumulation * per_pass, accumulation=accumulation))
        schedule = self.engine.lr_scheduler
        if self.plan.scale_lr != "none" and isinstance(schedule, VariableBatchSizeLR):  # the script may have replaced the schedule
            schedule.resize(accumulation * per_pass)

    def close(self) -> None:
        self.noise.close()

    def state_dict(self) -> dict[str, Any]:
        return {"train_batch_size": self.engine.plan.batch.train_batch_size, **self.noise.means}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the saved batch; on another number of ranks, the nearest possible one."""
        self.noise.means = {name: state[name] for name in self.noise.means}
        batch = self.engine.plan.batch
        self._resize(round(state["train_batch_size"] * batch.accumulation / batch.train_batch_size))

"""The gradient noise scale, for monitors and for a global batch that follows it.

Below it, more samples per step save steps in proportion; far above it, they save few.

With G the gradient and S the covariance of single samples' gradients, it is tr(S) / |G|^2, in samples (McCandlish et al.,
arXiv:1812.06162, equation 2.8). A mean over B samples has E|g|^2 = |G|^2 + tr(S) / B, so squared norms at two batch sizes give both
terms (appendix A.1): the norm of a micro-batch's gradient, before ranks and micro-batches are summed, and the norm of the step's.

A batch of the size of the noise scale reaches a loss in twice the least number of steps and twice the least number of samples
(section 2.3). Every few steps, the number of micro-batches per step is set so that the batch is as close as possible to `ratio`
times the noise scale, and learning rates follow the batch. The batch stays within bounds and changes at most by a factor of two. If
noise hides the gradient (the estimate of its square is not positive), the noise scale counts as infinite. All ranks decide from
numbers that are equal on all of them, so they decide the same. Micro-batches keep their size, and samples their order: a step
consumes more or fewer micro-batches.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from slipstream.config.plan import AdaptivePlan, Plan
from slipstream.data.batching import VariableBatchSizeLR
from slipstream.train.engine import Engine
from slipstream.zero.hooks import Phase

logger = logging.getLogger(__name__)

DECAY = 0.9  # of the running means: a single measurement says little


def follow_noise(model: nn.Module, plan: Plan) -> Callable[[Engine], None] | None:
    """The `Change` (changes.py) that measures in the plan's steps, on all ranks, and lets the batch follow if the plan asks for it.
    Raises ValueError for steps of one micro-batch."""
    if not plan.noise_every:
        return None
    adaptive, batch = plan.adaptive, plan.batch
    fewest = max(adaptive.least, batch.train_batch_size // batch.accumulation) if adaptive else batch.train_batch_size
    if fewest <= batch.micro_batch_size:
        key, step = ("adaptive_batch", "a step of min_batch_size") if adaptive else ("noise_scale_every", "a step")
        raise ValueError(
            f"slipstream.{key} compares the gradients of micro-batches with their mean, and {step} has one micro-batch: use more "
            "ranks, or gradient_accumulation_steps of 2 or more with smaller micro-batches"
        )

    def connect(engine: Engine) -> None:
        noise = Noise(engine, plan.noise_every, adaptive.smoothing if adaptive else DECAY)
        if adaptive is not None:
            AdaptiveBatch(engine, adaptive, noise)

    return connect


class Noise:
    """Measures with hooks on the parameters, which exist only during the windows that are measured."""

    def __init__(self, engine: Engine, every: int, decay: float) -> None:
        self.engine, self.every, self.decay = engine, every, decay
        self.handles: list[RemovableHandle] = []
        self.squares: list[Tensor] = []  # squared norm of each parameter's gradient in each backward
        self.passes = set[int]()  # the numbers of these backwards
        self.factor = 1.0  # by which gradients in a backward are scaled
        self.means = {"spread": 0.0, "square": 0.0}  # running means of tr(S) and |G|^2
        engine.states.resources["noise scale"] = self
        engine.states.before_forward(lambda *_: self._begin())
        engine.states.after_step.append(self._end)

    def _begin(self) -> None:
        if (self.engine.global_steps + 1) % self.every == 0 and torch.is_grad_enabled() and not self.handles:
            params = [param for unit in self.engine.units for param in unit.model_params if param.requires_grad]
            self.handles = [param.register_hook(self._add) for param in params]

    def _add(self, grad: Tensor) -> None:
        values = grad.detach().coalesce().values() if grad.is_sparse else grad.detach()
        self.squares.append(torch.linalg.vector_norm(values.float()).square())
        hooks = self.engine.states.hooks
        # This hook may fire before the backward is counted, if the outputs hide their tensors, so that none of them is hooked.
        self.passes.add(hooks.passes + (hooks.phase is Phase.IDLE))
        self.factor = self.engine.window.share * self.engine.precision.loss_scale

    def _end(self, _: bool) -> None:
        backwards, squares = len(self.passes), self.squares
        self.close()
        if self.engine.global_steps % self.every:
            return
        batch, norm = self.engine.plan.batch, self.engine.global_grad_norm or 0.0
        own = torch.stack(squares).double().sum().item() / (backwards * self.factor**2) if squares else 0.0
        own = own if backwards == batch.accumulation else math.nan  # a rank without a batch takes part, with NaN: no measurement
        small = self.engine.states.world.exchange(torch.tensor([own], dtype=torch.float64)).mean().item()
        if math.isfinite(small) and math.isfinite(norm):
            self._measured(batch.micro_batch_size, small, batch.train_batch_size, norm**2)

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles, self.squares, self.passes = [], [], set()

    def _measured(self, few: int, small: float, many: int, big: float) -> None:
        """Add a measurement: `small` and `big` are the squared norms of mean gradients of `few` and `many` samples."""
        spread, square = (small - big) / (1 / few - 1 / many), (many * big - few * small) / (many - few)
        for name, value in (("spread", spread), ("square", square)):
            self.means[name] = self.decay * self.means[name] + (1 - self.decay) * value
        if (scale := self.scale) is not None:
            self.engine.log({"Train/Samples/noise_scale": scale})

    @property
    def measured(self) -> bool:
        """Whether there has been a measurement."""
        return self.means["square"] != 0

    @property
    def scale(self) -> float | None:
        """The noise scale, in samples; None where noise hides the gradient, or before the first measurement."""
        return self.means["spread"] / self.means["square"] if self.means["square"] > 0 else None


class AdaptiveBatch:
    """Adapts the batch of one engine. Checkpoints contain the batch size and the measurements behind it."""

    def __init__(self, engine: Engine, plan: AdaptivePlan, noise: Noise) -> None:
        self.engine, self.plan, self.noise = engine, plan, noise
        engine.states.resources["adaptive batch"] = self
        engine.states.after_step.append(self._end)

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
        """A no-op: the engine closes the noise, a resource of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"train_batch_size": self.engine.plan.batch.train_batch_size, **self.noise.means}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the saved batch; on another number of ranks, the nearest possible one."""
        self.noise.means = {name: state[name] for name in self.noise.means}
        batch = self.engine.plan.batch
        self._resize(round(state["train_batch_size"] * batch.accumulation / batch.train_batch_size))

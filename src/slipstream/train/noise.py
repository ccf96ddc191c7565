"""The gradient noise scale, for monitors: below it, more samples in a step save steps in proportion; far above it, they save few.

With G the gradient and S the covariance of single samples' gradients, it is tr(S) / |G|^2, in samples (McCandlish et al.,
arXiv:1812.06162, equation 2.8). A mean over B samples has E|g|^2 = |G|^2 + tr(S) / B, so the squared norms at two sizes give both
(appendix A.1): those of micro-batches, before ranks and micro-batches are added, and that of the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from slipstream.config.plan import Plan
from slipstream.zero.hooks import Phase

if TYPE_CHECKING:
    from slipstream.train.engine import Engine

DECAY = 0.9  # of the two means over measurements: a single one says little


def measure_noise(model: nn.Module, plan: Plan) -> Callable[[Engine], None] | None:
    """The change that measures in the steps that the plan says, on all ranks. Raises ValueError for steps of one micro-batch."""
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
    return lambda engine: Noise(engine, plan.noise_every, adaptive.smoothing if adaptive else DECAY).connect()


class Noise:
    """Hooks on parameters during the windows that are measured; in others there is none."""

    def __init__(self, engine: Engine, every: int, decay: float) -> None:
        self.engine, self.every, self.decay = engine, every, decay
        self.handles: list[RemovableHandle] = []
        self.squares: list[Tensor] = []  # of the gradient of each parameter in each backward
        self.passes = set[int]()  # these backwards
        self.factor = 1.0  # of the gradients in a backward
        self.means = {"spread": 0.0, "square": 0.0}  # tr(S) and |G|^2, over measurements

    def connect(self) -> None:
        states = self.engine.states
        states.resources["noise scale"] = self
        states.before_forward(lambda *_: self._begin())
        states.after_step.append(self._end)

    def _begin(self) -> None:
        if (self.engine.global_steps + 1) % self.every == 0 and torch.is_grad_enabled() and not self.handles:
            params = [param for unit in self.engine.units for param in unit.model_params if param.requires_grad]
            self.handles = [param.register_hook(self._add) for param in params]

    def _add(self, grad: Tensor) -> None:
        values = grad.detach().coalesce().values() if grad.is_sparse else grad.detach()
        self.squares.append(torch.linalg.vector_norm(values.float()).square())
        hooks = self.engine.states.hooks
        # It may be the first hook that fires, before the backward is counted: of outputs that hide their tensors, none is hooked.
        self.passes.add(hooks.passes + (hooks.phase is Phase.IDLE))
        self.factor = self.engine.window.share * self.engine.precision.loss_scale

    def _end(self, _: bool) -> None:
        backwards, squares = len(self.passes), self.squares
        self.close()
        if self.engine.global_steps % self.every:
            return
        batch, norm = self.engine.plan.batch, self.engine.global_grad_norm or 0.0
        own = torch.stack(squares).double().sum().item() / (backwards * self.factor**2) if squares else 0.0
        own = own if backwards == batch.accumulation else math.nan  # a rank without a batch takes part, and nothing is measured
        small = self.engine.states.world.exchange(torch.tensor([own], dtype=torch.float64)).mean().item()
        if math.isfinite(small) and math.isfinite(norm):
            self._measured(batch.micro_batch_size, small, batch.train_batch_size, norm**2)

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles, self.squares, self.passes = [], [], set()

    def _measured(self, few: int, small: float, many: int, big: float) -> None:
        """Take in the squared norms of the mean gradients of `few` and of `many` samples."""
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

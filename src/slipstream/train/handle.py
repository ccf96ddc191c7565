"""The optimizer that `initialize` returns: the user's own groups and hyperparameters, stepped by the engine only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from slipstream.train.engine import Engine


class OptimizerHandle(torch.optim.Optimizer):
    """Looks like the torch optimizer it stands for. Schedulers change `param_groups` here and it takes effect."""

    def __init__(self, engine: Engine, inner: torch.optim.Optimizer) -> None:
        # Not Optimizer.__init__: the groups are the inner optimizer's, not copies.
        self.engine, self.optimizer = engine, inner
        self.defaults = inner.defaults
        self._opt_called = True  # the engine steps before it ticks a schedule
        self._optimizer_step_pre_hooks: Any = {}
        self._optimizer_step_post_hooks: Any = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def overflow(self) -> bool:
        """Whether the last boundary's step was skipped because gradients were not finite."""
        return self.engine.overflow

    @property
    def loss_scale(self) -> float:
        return self.engine.precision.loss_scale

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise RuntimeError("call engine.step(): it reduces, clips and publishes around the optimizer")

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.engine.zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise RuntimeError("parameters are laid out at initialize(); pass all groups, also frozen ones, to it")

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("optimizer state is sharded: use engine.save_checkpoint(dir), or engine.optimizer_state(name)")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise RuntimeError("optimizer state is sharded: use engine.load_checkpoint(dir), or engine.set_optimizer_state(name, ...)")

    def __repr__(self) -> str:
        return f"OptimizerHandle({self.optimizer!r})"

"""The optimizer that `initialize` returns: the user's own groups and hyperparameters, stepped by the engine only."""

from __future__ import annotations

from typing import Any

import torch

from slipstream.train.engine import Engine
from slipstream.train.saving import optimizer_state


class OptimizerHandle(torch.optim.Optimizer):
    """A view of the wrapped torch optimizer: it shares its `param_groups`, so changes by schedulers take effect."""

    def __init__(self, engine: Engine, inner: torch.optim.Optimizer) -> None:
        # No Optimizer.__init__, which would copy the groups.
        self.engine, self.optimizer = engine, inner
        self.defaults = inner.defaults
        self._opt_called = inner._opt_called = True  # type: ignore[attr-defined]  # silences schedulers that expect step() first
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
        """Whether the last window's update was skipped because gradients were not finite."""
        return self.engine.overflow

    @property
    def loss_scale(self) -> float:
        return self.engine.precision.loss_scale

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise RuntimeError("optimizer.step() is not supported: call engine.step(), which also reduces, clips and publishes")

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # so do those whose `optimizer` becomes this one

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.engine.zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group like torch, inside `with engine.surgery():`, on all ranks. The schedule is extended by the group."""
        operation = self.engine.operation
        if operation is None:
            raise RuntimeError(
                "optimizer.add_param_group() belongs inside `with engine.surgery():`, which allocates gradients and states; call "
                "it there, on all ranks"
            )
        operation.add_group(param_group, self.engine.lr_scheduler)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole model's state in torch's format on every rank. Collective. `save_checkpoint` needs no such copy."""
        with self.engine.together("optimizer.state_dict"):
            return optimizer_state.gather(self.engine.states)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this optimizer, or of a plain torch one over the same model. Collective; same on all ranks."""
        with self.engine.together("optimizer.load_state_dict"):
            optimizer_state.load(self.engine.states, state_dict)

    def __repr__(self) -> str:
        return f"OptimizerHandle({self.optimizer!r})"

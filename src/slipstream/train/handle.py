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
        self._opt_called = inner._opt_called = True  # type: ignore[attr-defined]  # the engine steps before a schedule ticks
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
        """As torch's, inside `with engine.surgery():`, on all ranks; the schedule takes the group in."""
        operation = self.engine.operation
        if operation is None:
            raise RuntimeError(
                "optimizer.add_param_group() belongs inside `with engine.surgery():`, where parameters get their gradients and "
                "states; call it there, on all ranks"
            )
        operation.add_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Everything, in torch's own form, on every rank. Collective. `engine.save_checkpoint` needs no such copy."""
        from slipstream.train import optimizer_state

        with self.engine.together("optimizer.state_dict"):
            return optimizer_state.whole(self.engine)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Of this optimizer, or of a plain torch one over the same parameters. Collective; the same on all ranks."""
        from slipstream.train import optimizer_state

        with self.engine.together("optimizer.load_state_dict"):
            optimizer_state.take(self.engine, state_dict)

    def __repr__(self) -> str:
        return f"OptimizerHandle({self.optimizer!r})"

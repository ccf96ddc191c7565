"""Training: the engine, its step, precision, schedules and data."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.config.plan import Plan


def rehearse(plan: Plan) -> None:
    """Raise ValueError for what `initialize` would refuse of the plan's optimizer and scheduler."""
    from slipstream.train import initialize

    initialize.rehearse(plan)

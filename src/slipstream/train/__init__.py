"""Training: the engine, its step, precision, schedules and data.

For the command line: `rehearse`, and the modules `explain`, `propose`, `predict`, `dry_run` and `calibrate` (docs/PLANNING.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.config.plan import Plan


def rehearse(plan: Plan) -> None:
    """Raise ValueError if `initialize` would refuse the plan's optimizer or scheduler."""
    from slipstream.train import recipe

    recipe.rehearse(plan)

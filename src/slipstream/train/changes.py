"""What the config changes in the model itself, before its layers are cut and its states are built: a row for each feature.

A change replaces classes of modules in place, so that the names of parameters, and with them checkpoints, stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from torch import nn

from slipstream.attention.transformers import apply_pattern
from slipstream.config.plan import Plan
from slipstream.train.layer_drop import drop_layers

if TYPE_CHECKING:
    from slipstream.train.engine import Engine

# Changes the model as the plan says, or raises ValueError before it has changed anything. Returns what connects it to the engine:
# hooks by step (`states.after_step`), counters that checkpoints keep. None: nothing to connect.
Change = Callable[[nn.Module, Plan], "Callable[[Engine], None] | None"]


def _sparse_attention(model: nn.Module, plan: Plan) -> None:
    if plan.sparse is not None:
        apply_pattern(model, asdict(plan.sparse))


CHANGES: tuple[Change, ...] = (_sparse_attention, drop_layers)


def change_model(model: nn.Module, plan: Plan) -> Callable[[Engine], None]:
    """Apply every change. Returns what connects them to the engine once it is built."""
    connections = [connect for change in CHANGES if (connect := change(model, plan)) is not None]

    def connect_all(engine: Engine) -> None:
        for connect in connections:
            connect(engine)

    return connect_all

"""The layers of experts of an engine: their load, the bias that balances them, their auxiliary losses, routers that drop tokens,
and experts that an update skips.

Connected at the start, and again after each surgery, which may have added layers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from slipstream.moe.balance import balancing
from slipstream.moe.layer import MoE
from slipstream.moe.load import LoadMeter, lost_tokens, meters
from slipstream.moe.rest import RestingExperts

if TYPE_CHECKING:
    from slipstream.train.engine import Engine


def connect_experts(engine: Engine) -> None:
    states, mesh, watch, every = engine.states, engine.mesh, engine.watch, engine.plan.steps_per_print
    window, precision, device = engine.window, engine.precision, engine.device
    logs = mesh.batch.index == mesh.sp.index == mesh.tp.index == 0  # a rank of each pipeline stage
    by_name: dict[str, LoadMeter] = {}
    ends: list[Callable[[bool], None]] = []

    def due() -> int | None:
        return watch.step if every and watch.step % every == 0 else None

    def connect(_: object = None) -> None:
        for module in states.model.modules():
            if isinstance(module, MoE):
                module.seed.value = lambda: precision.factor * window.share
        by_name.clear()
        by_name.update(meters(states.model))
        for meter in by_name.values():
            meter.to(device)
        if states.plan.experts.rest_unused:
            states.steps.rest = RestingExperts(states.model, lambda: states.exchange(mesh.stage).sum)
        states.resources["auxiliary losses"] = losses = ExitStack()
        for meter in by_name.values():
            losses.callback(meter.forget_graph)
        ends[:] = balancing(states.model, lambda: states.exchange(mesh.stage).sum, due, logs=logs)

    def end_step(is_applied: bool) -> None:
        for end in ends:
            end(is_applied)

    connect()
    states.on_hooks.append(connect)
    states.suspects.append(lambda: lost_tokens(by_name))
    states.after_step.append(end_step)

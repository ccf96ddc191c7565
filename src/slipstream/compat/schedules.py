"""`deepspeed.runtime.lr_schedules`: Slipstream's schedules (DeepSpeed's formulas) with DeepSpeed's attributes.

The attributes are read-only. `serve_schedule` adds them to a schedule created from the JSON.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from slipstream.train import schedules

logger = logging.getLogger("slipstream")

_WARMUPS = ("log", "linear")


def _known_warmup(warmup_type: Any) -> str:
    if warmup_type in _WARMUPS:
        return str(warmup_type)
    logger.warning("warmup_type %r is none of %s; the rate warms up by the logarithm, as in DeepSpeed", warmup_type, _WARMUPS)
    return "log"


def with_known_warmup(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with an unknown `warmup_type` replaced by "log", with a warning."""
    block: Any = config.get("scheduler")
    params = block.get("params") if isinstance(block, Mapping) else None
    if not isinstance(params, Mapping) or params.get("warmup_type", "auto") in (*_WARMUPS, "auto", None):
        return config
    return {**config, "scheduler": {**block, "params": {**params, "warmup_type": _known_warmup(params["warmup_type"])}}}


def _per_group(name: str) -> Callable[[Any], list[float]]:
    return lambda self: self._of_groups(name)


def _momenta(name: str) -> Callable[[Any], list[tuple[float, float]]]:
    return lambda self: [(value, self.BETA2) for value in _per_group(name)(self)]


def _with_attributes(kind: Any, attributes: Mapping[str, Callable[[Any], Any]], **methods: Any) -> Any:
    """Create a subclass of a schedule, with the same name, and properties with DeepSpeed's names."""

    @functools.wraps(kind.__init__)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(kind.__init__).bind(self, *args, **kwargs)
        if "warmup_type" in bound.arguments:
            bound.arguments["warmup_type"] = _known_warmup(bound.arguments["warmup_type"])
        kind.__init__(*bound.args, **bound.kwargs)

    properties = {name: property(read) for name, read in attributes.items()}
    return type(kind.__name__, (kind,), {"__init__": construct, "__doc__": kind.__doc__, **properties, **methods})


def _get_mom(self: Any) -> list[tuple[float, float]] | None:
    """Return the betas of each parameter group at `last_batch_iteration`, or None if the momentum is not cycled.

    Before the first `step()` they are the cycle's first, as in DeepSpeed, and the groups have `min_moms`.
    """
    if self.cycle_momentum and self.last_batch_iteration < 0:
        return list(self.max_moms)
    return [new["betas"] for new in self._values() if "betas" in new] if self.cycle_momentum else None


_WARMUP: Mapping[str, Callable[[Any], Any]] = {
    "min_lrs": _per_group("warmup_min_lr"),
    "max_lrs": _per_group("warmup_max_lr"),
    "delta_lrs": lambda self: [high - low for low, high in zip(self.min_lrs, self.max_lrs, strict=True)],
}
_CYCLE: Mapping[str, Callable[[Any], Any]] = {
    "min_lrs": _per_group("cycle_min_lr"),
    "max_lrs": _per_group("cycle_max_lr"),
    "min_moms": _momenta("cycle_min_mom"),
    "max_moms": _momenta("cycle_max_mom"),
    "first_step_size": lambda self: self._halves[0][0],
    "first_stair_count": lambda self: self._halves[0][1],
    "second_step_size": lambda self: self._halves[1][0],
    "second_stair_count": lambda self: self._halves[1][1],
    "step_ratio": lambda self: self.first_step_size / self.total_size,
    "skip_lr_decay": lambda self: math.isclose(self.decay_step_size, 0) or math.isclose(self.decay_lr_rate, 0),
    "skip_mom_decay": lambda self: math.isclose(self.decay_step_size, 0) or math.isclose(self.decay_mom_rate, 0),
}
_RANGE = {name: operator.attrgetter(f"lr_range_test_{name}") for name in ("min_lr", "step_size", "step_rate", "staircase")}


LRRangeTest = _with_attributes(schedules.LRRangeTest, _RANGE)
OneCycle = _with_attributes(schedules.OneCycle, _CYCLE, get_mom=_get_mom)
WarmupLR = _with_attributes(schedules.WarmupLR, _WARMUP)
WarmupDecayLR = _with_attributes(schedules.WarmupDecayLR, _WARMUP)
WarmupCosineLR = _with_attributes(
    schedules.WarmupCosineLR,
    {"org_lrs": lambda self: list(self.base_lrs)},
    get_lr_ratio=lambda self: self.height(self.last_batch_iteration),  # multiple of the optimizer's own rate
)
_SERVED = {kind.__base__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)}


def serve_schedule(scheduler: Any) -> None:
    """Change the class of a schedule created from the JSON to the one in this module, which has no additional state."""
    if type(scheduler) in _SERVED:
        scheduler.__class__ = _SERVED[type(scheduler)]

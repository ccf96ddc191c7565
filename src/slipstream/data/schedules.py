"""Difficulties as functions of the step, with DeepSpeed's names and roundings:

fixed_linear    min + (max - min) step / total, rounded down to a multiple of `difficulty_step`,
                but not below the first one from `min` on
fixed_root      min + (max - min) (step / total)^(1 / root_degree), the same
fixed_discrete  difficulty[i] up to step max_step[i], the last one after all of them
custom          a function of the step
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_NEEDED = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
    "custom": (),
}


def fixed_root(step: int, least: Any, most: Any, total: int, unit: int, degree: float = 1.0) -> Any:
    """From `least` to `most` in `total` steps by a root of the step: multiples of `unit`, none of them below `least`."""
    value = math.floor((float(step) / total) ** (1.0 / degree) * (most - least) + least)
    return min(max(value - value % unit, -(-least // unit) * unit), most)


def fixed_discrete(step: int, values: Sequence[Any], last_steps: Sequence[int]) -> Any:
    """values[i] up to and including step last_steps[i], which has one entry less."""
    return next((value for last, value in zip(last_steps, values, strict=False) if step <= last), values[-1])


class CurriculumScheduler:
    """DeepSpeed's class: the difficulty at a step. config: the block, with `schedule_config`. Raises ValueError."""

    def __init__(self, config: Mapping[str, Any], name: str = "curriculum learning") -> None:
        kind = config.get("schedule_type")
        if kind not in _NEEDED:
            raise ValueError(f"{name}: schedule_type ({kind!r}) must be one of {', '.join(map(repr, _NEEDED))}")
        self.config = dict(config.get("schedule_config") or {})
        missing = [field for field in ("min_difficulty", "max_difficulty") if config.get(field) is None]
        missing += [f"schedule_config.{field}" for field in _NEEDED[kind] if self.config.get(field) is None]
        if missing:
            raise ValueError(f"{name}: schedule_type {kind!r} needs {' and '.join(missing)}")
        if kind == "fixed_discrete" and len(self.config["difficulty"]) != len(self.config["max_step"]) + 1:
            raise ValueError(
                f"{name}: difficulty ({self.config['difficulty']}) must have one entry more than max_step "
                f"({self.config['max_step']}): the last one is for all steps after"
            )
        self.name, self.kind, self.least, self.most = name, kind, config["min_difficulty"], config["max_difficulty"]
        if self.least > self.most:
            raise ValueError(f"{name}: min_difficulty ({self.least}) is above max_difficulty ({self.most})")
        self.current = self.least
        self.custom: Callable[[int], Any] | None = None

    def get_difficulty(self, global_steps: int) -> Any:
        """The difficulty at this step, counted from 1."""
        if self.kind == "custom":
            if self.custom is None:
                raise ValueError(f"{self.name}: schedule_type 'custom' needs set_custom_get_difficulty(function of the step)")
            return self.custom(global_steps)
        if self.kind == "fixed_discrete":
            return fixed_discrete(global_steps, self.config["difficulty"], self.config["max_step"])
        total, unit = self.config["total_curriculum_step"], self.config["difficulty_step"]
        degree = self.config["root_degree"] if self.kind == "fixed_root" else 1.0
        return fixed_root(global_steps, self.least, self.most, total, unit, degree)

    def update_difficulty(self, global_steps: int) -> Any:
        """Set the difficulty of this step, unless the highest one has been reached. Returns it."""
        if self.current < self.most:
            self.current = self.get_difficulty(global_steps)
        return self.current

    def get_current_difficulty(self) -> Any:
        return self.current

    def set_current_difficulty(self, difficulty: Any) -> None:
        self.current = difficulty

    def set_custom_get_difficulty(self, schedule_function: Callable[[int], Any]) -> None:
        """Set the function of schedule_type 'custom'."""
        self.custom = schedule_function

    def get_state(self) -> dict[str, Any]:
        return {"current_difficulty": self.current, "schedule_type": self.kind}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.current = state["current_difficulty"]

    def close(self) -> None:
        """A no-op: an engine closes the objects that it holds."""

"""Curriculum learning by sequence length (Li et al. 2021, arXiv 2108.06084): short sequences first, longer ones step by step.

The difficulty is a closed form of the step, so a resumed run goes on where it was:

fixed_linear    min + (max - min) step / total, rounded down to a multiple of `difficulty_step`
fixed_root      min + (max - min) (step / total)^(1 / root_degree), the same
fixed_discrete  difficulty[i] up to step max_step[i], the last one after all of them
custom          a function of the step
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from slipstream.config.plan import Plan
from slipstream.zero.hooks import Hooks

if TYPE_CHECKING:
    from slipstream.train.engine import Engine

_KEYWORD = "curriculum_seqlen"
_NEEDED = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
    "custom": (),
}


class CurriculumScheduler:
    """DeepSpeed's class: the difficulty at a step. config: the block, with `schedule_config`. Raises ValueError."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        kind = config.get("schedule_type")
        if kind not in _NEEDED:
            raise ValueError(f"curriculum learning: schedule_type ({kind!r}) must be one of {', '.join(map(repr, _NEEDED))}")
        self.config = dict(config.get("schedule_config") or {})
        missing = [name for name in ("min_difficulty", "max_difficulty") if config.get(name) is None]
        missing += [f"schedule_config.{name}" for name in _NEEDED[kind] if self.config.get(name) is None]
        if missing:
            raise ValueError(f"curriculum learning: schedule_type {kind!r} needs {' and '.join(missing)}")
        if kind == "fixed_discrete" and len(self.config["difficulty"]) != len(self.config["max_step"]) + 1:
            raise ValueError(
                f"curriculum learning: difficulty ({self.config['difficulty']}) must have one entry more than max_step "
                f"({self.config['max_step']}): the last one is for all steps after"
            )
        self.kind, self.least, self.most = kind, config["min_difficulty"], config["max_difficulty"]
        if self.least > self.most:
            raise ValueError(f"curriculum learning: min_difficulty ({self.least}) is above max_difficulty ({self.most})")
        self.current = self.least
        self.custom: Callable[[int], Any] | None = None

    def get_difficulty(self, global_steps: int) -> Any:
        """Of this step, counted from 1."""
        if self.kind == "custom":
            if self.custom is None:
                raise ValueError(
                    "curriculum learning: schedule_type 'custom' needs set_custom_get_difficulty(function of the step)"
                )
            return self.custom(global_steps)
        if self.kind == "fixed_discrete":
            reached = zip(self.config["max_step"], self.config["difficulty"], strict=False)
            return next((difficulty for step, difficulty in reached if global_steps <= step), self.config["difficulty"][-1])
        degree = self.config["root_degree"] if self.kind == "fixed_root" else 1
        share = (global_steps / self.config["total_curriculum_step"]) ** (1.0 / degree)
        difficulty = int(share * (self.most - self.least) + self.least)
        return min(difficulty - difficulty % self.config["difficulty_step"], self.most)

    def update_difficulty(self, global_steps: int) -> Any:
        """Take the difficulty of this step, unless the highest one has been reached. Returns it."""
        if self.current < self.most:
            self.current = self.get_difficulty(global_steps)
        return self.current

    def get_current_difficulty(self) -> Any:
        return self.current

    def set_current_difficulty(self, difficulty: Any) -> None:
        self.current = difficulty

    def set_custom_get_difficulty(self, schedule_function: Callable[[int], Any]) -> None:
        """Take the function of schedule_type 'custom'."""
        self.custom = schedule_function

    def get_state(self) -> dict[str, Any]:
        return {"current_difficulty": self.current, "schedule_type": self.kind}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.current = state["current_difficulty"]

    def close(self) -> None:
        """An engine closes what it holds."""


def shorten_sequences(model: nn.Module, plan: Plan) -> Callable[[Engine], None] | None:
    """Let training see the first tokens of each sequence only, as many as the config's `curriculum_learning` says.

    A forward with an argument `curriculum_seqlen` (or, outside of transformers, any keywords) gets the number; of any other one the
    token tensors [batch, tokens] are cut. Raises ValueError for a bad schedule.
    """
    if plan.curriculum is None:
        return None
    scheduler = CurriculumScheduler(plan.curriculum)
    parameters = inspect.signature(model.forward).parameters.values()
    is_open = any(param.kind is param.VAR_KEYWORD for param in parameters) and not hasattr(model, "config")
    takes_number = is_open or any(param.name == _KEYWORD for param in parameters)

    def connect(engine: Engine) -> None:
        engine.states[0].resources["curriculum"] = scheduler

        def shorten(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            if not module.training:
                return None
            if scheduler.current >= scheduler.most:  # a loaded checkpoint may be of an earlier step
                scheduler.current = scheduler.least
            length = scheduler.update_difficulty(engine.global_steps + 1)
            return (args, kwargs | {_KEYWORD: length}) if takes_number else cut(args, kwargs, int(length))

        def wire(hooks: Hooks) -> None:
            hooks.handles.append(model.register_forward_pre_hook(shorten, with_kwargs=True))

        wire(engine.states[0].hooks)
        engine.states[0].on_hooks.append(wire)

    return connect


def cut(args: tuple[Any, ...], kwargs: Mapping[str, Any], length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The first `length` tokens of every token tensor: [batch, tokens] as the first tensor of whole numbers; masks of any dtype.

    Raises ValueError if there is none.
    """
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    tokens = next((tensor for tensor in tensors if tensor.dim() == 2 and not tensor.is_floating_point()), None)
    if tokens is None:
        raise ValueError(
            f"curriculum_learning cuts tensors of tokens [batch, tokens], and the forward gets none; let it take {_KEYWORD}= and "
            "cut its inputs itself"
        )
    whole = tokens.shape[1]

    def shorter(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() < 2 or length >= whole:
            return value
        if value.dim() == 4 and value.shape[-2:] == (whole, whole):  # a mask of queries and keys
            return value[..., :length, :length]
        is_of_tokens = value.shape[1] == whole and (
            value.dim() == 2 or value.dtype in (torch.float32, torch.bfloat16, torch.float16)
        )
        return value[:, :length] if is_of_tokens else value

    return tuple(map(shorter, args)), {name: shorter(value) for name, value in kwargs.items()}

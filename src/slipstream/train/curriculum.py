"""Curriculum learning by sequence length (Li et al. 2021, arXiv 2108.06084): short sequences first, longer ones step by step.

The length is a function of the step (`slipstream.data.schedules`), so a resumed run continues at the right length.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.config.plan import Plan
from slipstream.data.schedules import CurriculumScheduler
from slipstream.train.engine import Engine

_KEYWORD = "curriculum_seqlen"


def shorten_sequences(model: nn.Module, plan: Plan) -> Callable[[Engine], None] | None:
    """Shorten every training sequence to its first tokens, as many as the config's `curriculum_learning` says for the step.

    A forward that takes an argument `curriculum_seqlen` (or, outside transformers, any keyword) gets the length. For any other
    forward, the token tensors [batch, tokens] are cut. Raises ValueError for a bad schedule.
    """
    if plan.curriculum is None:
        return None
    scheduler = CurriculumScheduler(plan.curriculum)
    parameters = inspect.signature(model.forward).parameters.values()
    is_open = any(param.kind is param.VAR_KEYWORD for param in parameters) and not hasattr(model, "config")
    takes_number = is_open or any(param.name == _KEYWORD for param in parameters)

    def connect(engine: Engine) -> None:
        engine.states.resources["curriculum"] = scheduler

        def shorten(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            if not module.training:
                return None
            if scheduler.current >= scheduler.most:  # a loaded checkpoint may have an earlier step
                scheduler.current = scheduler.least
            length = scheduler.update_difficulty(engine.global_steps + 1)
            return (args, kwargs | {_KEYWORD: length}) if takes_number else cut(args, kwargs, int(length))

        engine.states.before_forward(shorten, with_kwargs=True)

    return connect


def cut(args: tuple[Any, ...], kwargs: Mapping[str, Any], length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with the first `length` tokens of every token tensor. Token tensors have the shape [batch, tokens] of the first
    integer tensor, or are masks of any dtype. Raises ValueError if there is no integer tensor.
    """
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    tokens = next((tensor for tensor in tensors if tensor.dim() == 2 and not tensor.is_floating_point()), None)
    if tokens is None:
        raise ValueError(
            f"curriculum_learning cuts tensors of tokens [batch, tokens], and the forward gets none; let it take {_KEYWORD}= and "
            "cut its inputs itself"
        )
    num_tokens = tokens.shape[1]

    def shorter(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() < 2 or length >= num_tokens:
            return value
        if value.dim() == 4 and value.shape[-2:] == (num_tokens, num_tokens):  # an attention mask
            return value[..., :length, :length]
        is_of_tokens = value.shape[1] == num_tokens and (
            value.dim() == 2 or value.dtype in (torch.float32, torch.bfloat16, torch.float16)
        )
        return value[:, :length] if is_of_tokens else value

    return tuple(map(shorter, args)), {name: shorter(value) for name, value in kwargs.items()}

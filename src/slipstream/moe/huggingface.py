"""The experts of unmodified transformers models: stacked weights that compute as ours do, and can be split over ranks.

transformers (5.x) marks a class of experts by `use_experts_implementation`, which gives each instance its layout: `has_gate` (one
weight for gate and up), `has_bias`, `is_transposed` ([experts, in, out]), and `_apply_gate`. A router of the model calls it with
tokens [T, d], experts [T, k] and weights [T, k].
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.moe.dispatch import Meanwhile, run_experts
from slipstream.moe.grouped import grouped_linear
from slipstream.moe.load import LoadMeter
from slipstream.moe.routers import RouterBias
from slipstream.parallel.around import class_before
from slipstream.parallel.exchange import Exchange, without_values
from slipstream.zero.leaves import mark_stack, parts_of

_LAYOUT = ("num_experts", "has_gate", "has_bias", "is_transposed", "_apply_gate", "down_proj")


def is_foreign(module: nn.Module) -> bool:
    """Whether this is a transformers module of experts, in a layout that `adopt` supports."""
    return all(hasattr(module, name) for name in _LAYOUT) and not getattr(module, "has_post_expert_norm", False)


def adopt(module: Any) -> None:
    """Make transformers' module of experts compute by sorted rows and grouped products."""
    if not isinstance(module, ForeignExperts):
        vars(module).update(exchange=None, tokens=None, meter=LoadMeter(module.num_experts), ahead=None, bias=None)
        for param in module.parameters():
            if len(param) == module.num_experts:  # not an adapter's
                mark_stack(param)
        module.__class__ = class_before(ForeignExperts, type(module))


def run_shared_ahead(experts: Any, layer: nn.Module) -> None:
    """Make a layer's shared expert compute while rows travel, if the layer calls it after its experts and it is not sliced."""
    shared: Any = getattr(layer, "shared_experts", None) or getattr(layer, "shared_expert", None)
    if not (isinstance(experts, ForeignExperts) and isinstance(shared, nn.Module)):
        return
    if not any(parts_of(param) for param in shared.parameters()):  # slices need the shape of the layer's call
        experts.ahead = Ahead(shared)
        vars(shared).update(ahead=experts.ahead)
        shared.__class__ = class_before(ForeignShared, type(shared))


class Ahead:
    """A shared expert that its layer calls after the experts, with their tokens: it computes while the experts' rows travel.

    Its first call after the experts, with the same values, shows that the layer is of this kind (DeepSeek's, GLM's). From then on
    the experts run it ahead, and its call returns the output. A layer that calls it before its experts (Qwen's) is left unchanged.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.follows = self.runs = False
        # Of the experts' last call. Without the weak reference, a later tensor at a freed tensor's address would count as the same:
        # Qwen's shared expert, called before the experts of the next forward, would then run twice and keep its graph.
        self.inputs: tuple[tuple[int, int, int], weakref.ref[Tensor]] | None = None
        self.output: Tensor | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled model has no state of forwards."""
        return Ahead, (self.module,)

    def __deepcopy__(self, memo: Any) -> None:
        """The copy, in a model copied for a dry run, sends nothing."""
        return None

    def enter(self, x: Tensor, *, travels: bool) -> list[Callable[[], None]]:
        """The computations for the time in which the rows of the experts' tokens x travel."""
        if self.output is not None:  # the layer did not fetch it
            self.follows, self.output = False, None
        self.inputs = _identity(x), weakref.ref(x if x._base is None else x._base)

        def compute() -> None:
            self.runs = True
            try:
                self.output = self.module(x)
            finally:
                self.runs = False

        return [compute] if self.follows and travels else []

    def leave(self, x: Tensor) -> Tensor | None:
        """The output for x, if it has been computed."""
        if self.runs:
            return None
        inputs, self.inputs = self.inputs, None
        is_same_input = inputs is not None and inputs[1]() is not None and inputs[0] == _identity(x)
        output, self.output = self.output, None
        self.follows = is_same_input
        return None if output is None or not is_same_input else output.view(x.shape)


def _identity(x: Tensor) -> tuple[int, int, int]:
    return x.data_ptr(), x.numel(), x._version


class ForeignShared(nn.Module):
    """Precedes the class of a shared expert."""

    ahead: Ahead | None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output = None
        if self.ahead is not None and not (args or kwargs or torch.compiler.is_compiling() or without_values(x)):
            output = self.ahead.leave(x)
        result: Tensor = super().forward(x, *args, **kwargs) if output is None else output
        return result


class ForeignExperts(nn.Module):
    """Precedes transformers' class: its parameters, our forward."""

    num_experts: int
    exchange: Exchange | None
    tokens: Exchange | None
    meter: LoadMeter
    ahead: Ahead | None
    bias: RouterBias | None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if self.meter.counts(training=self.training) and not without_values(top_k_index):
            counts = torch.bincount(top_k_index.reshape(-1), minlength=self.num_experts)[: self.num_experts]
            self.meter.record(counts, hidden_states, top_k_weights)
        meanwhile: Meanwhile = ()
        if self.ahead is not None and not (torch.compiler.is_compiling() or without_values(hidden_states)):
            travels = self.exchange is not None and self.exchange.size > 1 and self.tokens is None
            meanwhile = self.ahead.enter(hidden_states, travels=travels)
        routes = (hidden_states, top_k_index, top_k_weights, None, self.num_experts)
        return run_experts(*routes, self.compute, self.exchange, meanwhile, self.tokens)

    def compute(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        module: Any = self
        first = "gate_up_proj" if module.has_gate else "up_proj"
        hidden = self._linear(first, rows, counts)
        hidden = module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden)
        return self._linear("down_proj", hidden, counts)

    def _linear(self, name: str, rows: Tensor, counts: Sequence[int]) -> Tensor:
        module: Any = self
        weight: Tensor = getattr(self, name)
        bias = getattr(self, f"{name}_bias") if module.has_bias else None
        return grouped_linear(rows, weight.transpose(1, 2) if module.is_transposed else weight, counts, bias)

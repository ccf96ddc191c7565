"""The experts of unmodified transformers models: stacked weights that compute as ours do, and can be split over ranks.

transformers (5.x) marks a class of experts by `use_experts_implementation`, which gives an instance its layout: `has_gate` (one
weight for gate and up), `has_bias`, `is_transposed` ([experts, in, out]), and `_apply_gate`. A router of the model calls it with
tokens [T, d], experts [T, k] and weights [T, k].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from slipstream.moe.dispatch import run_experts
from slipstream.moe.grouped import grouped_linear
from slipstream.parallel.exchange import Exchange, gather_from, scatter_to
from slipstream.zero.leaves import mark_stack

_LAYOUT = ("num_experts", "has_gate", "has_bias", "is_transposed", "_apply_gate", "down_proj")


def is_foreign(module: nn.Module) -> bool:
    """Whether this is transformers' module of experts, of a layout that `adopt` knows."""
    return all(hasattr(module, name) for name in _LAYOUT) and not getattr(module, "has_post_expert_norm", False)


def adopt(module: Any) -> None:
    """Let transformers' module of experts compute by sorted rows and grouped products."""
    if not isinstance(module, ForeignExperts):
        vars(module).update(exchange=None, tokens=None)
        for param in module.parameters():
            mark_stack(param)
        module.__class__ = type(type(module).__name__, (ForeignExperts, type(module)), {})


class ForeignExperts(nn.Module):
    """Before the class of transformers: its parameters, our forward."""

    num_experts: int
    exchange: Exchange | None
    tokens: Exchange | None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        x, experts, weights = hidden_states, top_k_index, top_k_weights
        if self.tokens is not None:
            x, experts, weights = (scatter_to(each, self.tokens, 0) for each in (x, experts, weights))
        out = run_experts(x, experts, weights, None, self.num_experts, self.compute, self.exchange)
        return out if self.tokens is None else gather_from(out, self.tokens, 0)

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

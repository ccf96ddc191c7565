"""transformers' loss of a causal language model, whose head gives each rank a share of the vocabulary."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from slipstream.parallel.tensor import Slices, vocab_parallel_cross_entropy


def calls_loss_function(model: nn.Module) -> bool:
    """Whether a forward of the model's class calls transformers' `self.loss_function`, which can be replaced."""
    forwards = (inspect.unwrap(vars(each)["forward"]) for each in type(model).__mro__ if "forward" in vars(each))
    return any("loss_function" in getattr(getattr(forward, "__code__", None), "co_names", ()) for forward in forwards)


class ShiftedLoss:
    """transformers' loss of a causal model, from logits of this rank's share of the vocabulary."""

    def __init__(self, slices: Slices) -> None:
        self.slices = slices

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None = None,
        vocab_size: int | None = None,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if shift_labels is None:
            if labels is None:
                raise ValueError("the loss needs labels or shift_labels, and both are None; pass one of them")
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        losses = vocab_parallel_cross_entropy(logits, shift_labels, self.slices.exchange, ignore_index=ignore_index)
        count = (shift_labels != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
        return losses.sum() / count

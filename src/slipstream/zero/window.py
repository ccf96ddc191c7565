"""The gradients of one unit in the current accumulation window, until the optimizer has used them.

Autograd writes a gradient into its parameter's `.grad`. From there it moves to the unit's buffers: into the unreduced gradients of
the whole unit (replicated gradients), or through a reduction into this rank's shard. The unit owns the buffers; `Window` knows
which gradients they contain. Only `Window` changes its attributes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn as nn
from torch import Tensor

from slipstream.ops import Partial
from slipstream.zero.layout import Layout, Span
from slipstream.zero.parameter import drop_grad, raw_grad
from slipstream.zero.storage.homes import Homes, Landing
from slipstream.zero.storage.store import Store

ZERO = Partial(0.0, True)


class UnitWindow:
    """Which gradients of a unit have moved out of `.grad` since the last step, and a record of their changes."""

    def __init__(self, params: Sequence[nn.Parameter], layout: Layout) -> None:
        self.params, self.slots, self._gaps = params, layout.slots, gaps(layout)
        self.has_gradient = False  # some gradient has been moved out of `.grad`
        self.partial = ZERO  # sum of squares of this rank's finest shard, after the last reduction
        self._sums: dict[int, Tensor] = {}  # no_sync: this rank's gradient sums, if `.grad` is too narrow for them
        self._in_local: set[int] = set()  # parameters whose gradient is in the buffer of unreduced gradients
        self._landing: Landing | None = None  # opened ahead for the next reduction

    @property
    def holds_gradient(self) -> bool:
        """Whether `.grad` lacks some of the gradients."""
        return self.has_gradient or bool(self._sums)

    def forget(self) -> None:
        """Drop everything accumulated since the last step."""
        for param in self.params:
            drop_grad(param)
        self._in_local.clear()
        self._sums.clear()
        self.has_gradient = False

    # -- replicated gradients: `local` holds the unreduced gradients of the whole unit --

    def is_in_local(self, i: int) -> bool:
        """Whether parameter i's gradient of this window is in `local`, whose content is stale otherwise."""
        return i in self._in_local

    def add(self, i: int, grad: Tensor, local: Tensor | None, dtype: torch.dtype) -> None:
        """Add a gradient of parameter i to `local`, or, without `local`, to this rank's sum in `dtype`."""
        if local is not None:
            slot = self.slots[i]
            view = local[slot.offset : slot.offset + slot.numel].view(slot.shape)
            if i in self._in_local:
                view.add_(grad)
            else:
                view.copy_(grad)
                self._in_local.add(i)
            self.has_gradient = True
        elif i in self._sums:
            self._sums[i].add_(grad)
        else:
            self._sums[i] = grad.to(dtype, copy=True)

    def overwrite_local(self, local: Tensor, i: int, values: Tensor) -> None:
        """Replace parameter i's gradient in `local` by `values`, flat."""
        local[slice(*self.slots[i].span)].copy_(values)
        self._in_local.add(i)
        self.has_gradient = True

    def complete_local(self, local: Tensor) -> None:
        """Before the reduction, zero what this window has not written in `local`: codes of infinity leave NaN also in the gaps."""
        for i, slot in enumerate(self.slots):
            if i not in self._in_local:
                local[slot.offset : slot.offset + slot.numel].zero_()
        for start, stop in self._gaps:
            local[start:stop].zero_()
        self._in_local.clear()

    # -- sharded gradients --

    def keep_unreduced(self, i: int, dtype: torch.dtype) -> None:
        """no_sync: add parameter i's gradient to this rank's sum in `dtype`."""
        grad = self.params[i].grad
        if grad is None or grad.dtype == dtype:
            return  # autograd accumulates into `.grad`
        self.add(i, grad, None, dtype)
        self.params[i].grad = None

    def unreduced(self, i: int) -> Tensor | None:
        """This rank's gradient of parameter i that has not been reduced yet, or None."""
        grad, kept = raw_grad(self.params[i]), self._sums.get(i)
        return grad if kept is None else kept if grad is None else kept + grad

    @property
    def has_unreduced(self) -> bool:
        """Whether this rank has gradients that have not been reduced yet."""
        return bool(self._sums) or any(raw_grad(param) is not None for param in self.params)

    def pack(self, flat: Tensor) -> None:
        """Move the unreduced gradients, or zeros, into `flat`, the buffer of their reduction: on a GPU in one launch."""
        views: list[Tensor] = []
        grads: list[Tensor] = []
        for i, (param, slot) in enumerate(zip(self.params, self.slots, strict=True)):
            view = flat[slot.offset : slot.offset + slot.numel].view(slot.shape)
            grad = self.unreduced(i)
            if grad is None:
                view.zero_()
            else:
                views.append(view)
                grads.append(grad)
                drop_grad(param)
        if views:
            torch._foreach_copy_(views, grads)
        self._sums.clear()
        for start, stop in self._gaps:
            flat[start:stop].zero_()

    def open_ahead(self, homes: Homes, grads: Store) -> None:
        """Start copying the gradient sum to the device for the next `open`."""
        if self.has_gradient and self._landing is None:
            self._landing = homes.open(grads, read=True)

    def open(self, homes: Homes, grads: Store) -> tuple[Landing, bool]:
        """The memory of the sum for a reduction that is launched now, and whether the reduction adds to its content."""
        accumulates, self.has_gradient = self.has_gradient, True
        landing, self._landing = self._landing or homes.open(grads, read=accumulates), None
        landing.ready()
        return landing, accumulates

    def close(self) -> None:
        """Drop the memory that `open_ahead` opened and no reduction has used."""
        self._landing = None

    # -- the reduced gradients --

    def reduced(self, partial: Partial) -> None:
        """Record the sum of squares of the reduced gradients."""
        self.partial = partial

    def overwritten(self, partial: Partial) -> None:
        """Record that the reduced gradients have been replaced from outside."""
        self.partial = partial
        self.has_gradient = True


def gaps(layout: Layout) -> list[Span]:
    """Spans of the flat buffer that belong to no parameter."""
    result, at = [], 0
    for slot in sorted(layout.slots, key=lambda slot: (slot.offset, slot.numel)):
        if slot.offset > at:
            result.append((at, slot.offset))
        at = max(at, slot.offset + slot.numel)
    return result + ([(at, layout.numel)] if at < layout.numel else [])

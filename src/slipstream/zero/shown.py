"""What the parameters of one unit show: their class, the memory that they view, and what reading a released one does.

Class and memory change together (zero/parameter.py, Note: Class swap). A parameter views the unit's full weights, or a placeholder
while these are released, or a private copy: `copies` are the parameters that `gathered(...)` or a surgery has pointed elsewhere;
gather and release leave them alone. Only `Shown` changes the class and data of parameters in a unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn as nn
from torch import Tensor

from slipstream.zero.layout import Layout, Slot
from slipstream.zero.materialize import move_in
from slipstream.zero.parameter import parameter_classes
from slipstream.zero.storage.store import MemoryStore

if TYPE_CHECKING:
    from slipstream.zero.unit import Unit


class Shown:
    """What a unit's parameters show. Their class is `plain` (their original class), reduced or released."""

    def __init__(self, unit: Unit, params: Sequence[nn.Parameter], full: Tensor, layout: Layout) -> None:
        self.params, self.full = params, full
        self._plain = [type(param) for param in params]
        self._reduced, self._released = parameter_classes(unit)
        self._current: type[nn.Parameter] = nn.Parameter  # stands for `plain`
        self.views = [full[slot.offset : slot.offset + slot.numel].view(slot.shape) for slot in layout.slots]
        # each parameter's offset and size in bytes and its strides; None if it has no elements
        self._places = [
            (slot.offset * full.element_size(), view.stride()) if slot.numel else None
            for slot, view in zip(layout.slots, self.views, strict=True)
        ]
        for param, view in zip(params, self.views, strict=True):
            move_in(param, view)
        # Released parameters are views of this one element: a read that bypasses __torch_function__ (torch.tensor(p)) returns NaN,
        # whereas a read of an empty storage would crash the process.
        filler = torch.full((), float("nan") if full.dtype.is_floating_point else 0, dtype=full.dtype, device=full.device)
        self._placeholders = [filler.expand(slot.shape) for slot in layout.slots]
        self._versions = [param._version for param in params]
        self.copies: frozenset[int] = frozenset()  # parameters that view private copies
        # What a read of a released parameter does instead of raising. Set from outside
        self.reads_gather = False  # inside the engine's forward or backward: gather the unit until its end
        self.show_copy: Callable[[Unit], None] | None = None  # inside a surgery: shows a private copy of the unit
        self.pinned = False  # gathered by a read: stays gathered until the end of this forward or backward
        self.read_in_graph = False  # a graph since the last step uses it outside its block, so every backward first gathers it
        self.num_changes = 0  # how often the unit's weights have changed
        self.is_locked = False  # writes raise, because the masters are asleep

    # -- classes and memory --

    def _set_class(self, cls: type[nn.Parameter]) -> None:
        self._current = cls
        for i in range(len(self.params)):
            if i not in self.copies:
                self.params[i].__class__ = self._plain[i] if cls is nn.Parameter else cls

    def _point_at(self, views: Sequence[Tensor]) -> None:
        """Set the parameters' data. Their classes must be plain."""
        for i, (param, view) in enumerate(zip(self.params, views, strict=True)):
            if i not in self.copies:
                param.data = view

    def show_plain(self) -> None:
        self._set_class(nn.Parameter)

    def show_full(self) -> None:
        """Show the full weights, after they were released."""
        self._set_class(nn.Parameter)
        self._point_at(self.views)

    def show_reduced(self) -> None:
        """Make `.grad` raise, because the gradients have moved to the unit's buffers."""
        self._set_class(self._reduced)

    def show_released(self, *, placeholders: bool) -> None:
        """Make reads raise or gather. With `placeholders`, the memory of the full weights can be freed afterwards."""
        if placeholders:
            self._set_class(nn.Parameter)
            self._point_at(self._placeholders)
        self._set_class(self._released)
        self.pinned = False

    def make_plain(self, i: int) -> None:
        """Give parameter i its original class, whatever the other parameters show."""
        self.params[i].__class__ = self._plain[i]

    def put_on_meta(self, i: int) -> None:
        """Move parameter i to the meta device. Its class must be plain."""
        param = self.params[i]
        try:
            move_in(param, torch.empty(param.shape, dtype=self.full.dtype, device="meta"))
        except RuntimeError:  # torch refuses to swap a tensor that a graph or weak reference holds: make its reads raise
            param.__class__ = self._released

    # -- private copies --

    def show_copies(self, values: Mapping[int, Tensor]) -> None:
        """Point parameters, by index, at these private values."""
        self.copies |= frozenset(values)
        for i, value in values.items():
            self.make_plain(i)
            self.params[i].data = value

    def end_copies(self, indices: Iterable[int]) -> None:
        """Undo `show_copies`. The full weights must already be up to date."""
        self.copies -= frozenset(indices)
        for i in indices:
            self.make_plain(i)
            self.params[i].data = self.views[i]
            self.accept_write(i)
            if self._current is not nn.Parameter:
                self.params[i].__class__ = self._current

    # -- writes from outside --

    def changes(self) -> Iterator[tuple[int, bool]]:
        """Yield each parameter that was written in place since the last `accept_write`, or that has other memory than the full
        weights, and whether it has; none while they are released."""
        if self._current is self._released:
            return
        base = self.full.data_ptr()
        for i, (param, place) in enumerate(zip(self.params, self._places, strict=True)):
            if i not in self.copies:
                is_moved = place is not None and (param.data_ptr() - base, param.stride()) != place
                if is_moved or param._version != self._versions[i]:
                    yield i, is_moved

    def is_written(self, i: int) -> bool:
        return self.params[i]._version != self._versions[i]

    def accept_write(self, i: int) -> None:
        """Record that the engine knows the current values of parameter i."""
        self._versions[i] = self.params[i]._version

    def close(self) -> None:
        """Drop the references to the full weights, whose memory is freed."""
        self.full, self.views = torch.empty(0), []

    def expire_graphs(self) -> None:
        """Make the backward of every existing graph raise, because the weights are about to change."""
        torch.autograd.graph.increment_version(self.params)
        self._versions = [version + 1 for version in self._versions]


def check_writes(unit: Unit) -> None:
    """Check that parameters still view the full weights, and copy the user's in-place writes into the masters.

    Raises RuntimeError if a parameter has other memory, or was written in place although its weights are sharded.
    """
    for i, is_moved in unit.shown.changes():
        if is_moved:
            raise RuntimeError(
                f"parameter {unit.names[i]!r} no longer lives in the engine's memory (model.to/half/cuda or `p.data = ...` after "
                f"initialize). Convert the model before initialize, or set precision in the config; write values inside `with "
                f"slipstream.zero.gathered(param):`"
            )
        if unit.placement.weights:
            raise RuntimeError(
                f"parameter {unit.names[i]!r} was written in place outside `slipstream.zero.gathered(...)`; its weights are "
                f"sharded, so the write cannot reach the ranks that own them. Write inside `with "
                f"slipstream.zero.gathered(param):`"
            )
        refresh_masters(unit, i)
        unit.shown.accept_write(i)


def refuse_writes(unit: Unit) -> None:
    """Raise RuntimeError if the masters are asleep, because writing weights must update them."""
    if unit.shown.is_locked and unit.out is not None and isinstance(unit.master, MemoryStore):
        raise RuntimeError(
            f"the weights of {unit.names[0]!r} and its neighbors cannot be written, because the engine sleeps and their "
            f"masters are away: call engine.wake() first (engine.state_dict() reads weights meanwhile)"
        )


def refresh_masters(unit: Unit, i: int) -> None:
    """Copy parameter i of replicated weights into the masters."""
    refuse_writes(unit)
    slot = unit.layout.slots[i]
    write_masters(unit, slot, unit.full[slice(*slot.span)])


def write_masters(unit: Unit, slot: Slot, values: Tensor) -> None:
    """Write a parameter's values into the masters. Elements whose rounded value has not changed keep their precision."""
    if unit.out is None:
        return
    inside, of_param = slot.common(unit.optim_span)
    master = unit.master.get(inside.start, inside.stop)
    new = values[of_param].to(master.device)
    changed = master.to(new.dtype) != new
    unit.master.put(inside.start, torch.where(changed, new.to(master.dtype), master))

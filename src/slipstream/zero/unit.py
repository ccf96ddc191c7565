"""A unit: parameters that are gathered together, the buffers of their three states, and the four edges that move the data.

full       the unsharded weights of the unit, 1D; every parameter is a view of it. Replicated weights: always allocated.
           Sharded weights: one mapping shared by all ranks of the host, or memory that is freed while the unit is released
weights    this rank's shard of the weights: a view of `full`, or a separate store if `full` can be freed
owned      the weights in the optimizer's span: `weights` if the two spans are the same
master     the weights in the optimizer's span in its dtype: the same store as `owned` if the dtypes agree
local      this rank's unreduced gradients of the whole unit, 1D (gradients are replicated)
grads      this rank's shard of the gradients: the sum over ranks once `settle` has run

`weights`, `owned`, `master` and `grads` are stores (zero/storage/store.py): tensors in memory, or ranges of a file.

Invariants: a parameter is always the same Python object; the layout alone decides the geometry, independent of the stage; gaps
between parameters are zero in every buffer. Edges are methods, and zero/hooks.py decides when to call them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol

import torch
import torch.nn as nn
from torch import Tensor

from slipstream.ops import Partial
from slipstream.ops.pages import free_pages
from slipstream.world.mesh import Family
from slipstream.zero.comm import Buffer, Comm, Pending, broadcast_from
from slipstream.zero.gather import Gather, gather_coded
from slipstream.zero.layout import Layout, Span
from slipstream.zero.leaves import Leaf
from slipstream.zero.memory import Memory, place
from slipstream.zero.placement import Placement, Tier
from slipstream.zero.reduction import Coded, CodedTwice, Dense, Reduction
from slipstream.zero.rows import Rows
from slipstream.zero.shown import Shown, check_writes
from slipstream.zero.storage.homes import Homes
from slipstream.zero.storage.store import HostStore, Store, fill_zero
from slipstream.zero.transforms import outside
from slipstream.zero.window import ZERO, UnitWindow

_preserve_version: Any = getattr(torch.autograd, "_unsafe_preserve_version_counter")  # noqa: B009 (torch does not export it)


class State(Enum):
    """Whether a unit's weights can be read."""

    RELEASED = "released"
    GATHERED = "gathered"
    ASLEEP = "asleep"  # the weights have been moved away (train/sleep.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comms:
    """The transports of one family of parameters."""

    family: Family
    dp: Comm  # shards
    dp_replicate: Comm  # replicas of the shards
    data: Comm  # both
    weights: Gather  # gathers sharded weights over dp; a unit may have a Gather of its own
    coded: Coded | CodedTwice | None = None  # sums gradients in codes
    group: Comm | None = None  # neighbors on dp, which exchange weights and codes before these cross groups
    across: Comm | None = None  # the ranks on dp with the same place in each group

    def reduction(self, dtypes: Dtypes) -> Reduction:
        """How the gradients of a unit with these dtypes are added."""
        if self.coded is not None and dtypes.wire_bits is not None:
            return self.coded
        weight = self.family.weight
        return Rows(self.dp, weight, dtypes.row, dtypes.row_dtype) if dtypes.row else Dense(self.dp, weight)

    def all(self) -> Iterator[Comm]:
        """All transports, the widest first."""
        return (comm for comm in (self.data, self.dp_replicate, self.dp, self.group, self.across) if comm is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtypes:
    """The dtypes in which a unit stores and communicates its states."""

    weights: torch.dtype
    master: torch.dtype
    wire: torch.dtype  # gradients as they are communicated: uint8 for codes
    grads: torch.dtype  # gradients that are stored, reduced or not
    wire_bits: int | None = None  # bits of a code on the wire; None: elements are sent
    gathered_bits: int | None = None  # bits of a code of gathered weights; None: elements are gathered
    published_bits: int | None = None  # bits of a code of an update's change to replicated weights; None: weights are published
    rests: bool = False  # whether sharded weights are stored as those codes
    row: int = 0  # length of the blocks of which only nonzero ones are sent; 0: all elements are sent
    row_dtype: torch.dtype = torch.float32  # of those blocks


class Updating(Protocol):
    """An optimizer update of a unit that runs on another thread."""

    def done(self) -> bool: ...

    def wait(self) -> None: ...


class Unit:
    """The parameters of one flat buffer. See the module's glossary."""

    def __init__(
        self,
        name: str,
        index: int,
        block: nn.Module | None,
        leaves: Sequence[Leaf],
        layout: Layout,
        placement: Placement,
        dtypes: Dtypes,
        comms: Comms,
        memory: Memory,
        homes: Homes,
    ) -> None:
        self.name, self.index = name, index
        self.block = block  # the module whose forward gathers it; None for the root's units
        self.layout, self.placement, self.dtypes, self.comms = layout, placement, dtypes, comms
        self.params = [leaf.tensor for leaf in leaves]
        self.model_params = [leaf.whole for leaf in leaves]  # the model's parameters that `params` are, or are leaves of
        self.exact = leaves[0].exact  # never trained or cast: quantized codes, their scales, integers
        self.memory, self.homes = memory, homes
        self.cuts = layout.shards(comms.dp.size)
        self.span: Span = layout.span(comms.dp.size, comms.dp.index)
        self.reduction = comms.reduction(dtypes)
        self.state = State.GATHERED
        self.pending_gather: Pending[None] | None = None  # the gather in flight
        self.updating: Updating | None = None  # the optimizer update in flight
        self.window = UnitWindow(self.params, layout)
        self.full, self.weights, self.owned, self.master = place(self)
        self.shown = Shown(self, self.params, self.full, self.layout)
        self.grads: Store | None = None  # until start_training

    @property
    def trainable(self) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            return self.grads is not None and any(param.requires_grad for param in self.params)

    @property
    def sums(self) -> Store:
        """`grads` of a unit that trains."""
        if self.grads is None:
            raise RuntimeError(f"unit {self.name} is frozen and has no gradients")
        return self.grads

    @property
    def out(self) -> Store | None:
        """The store into which the optimizer writes new weights; None when the weights are their own master."""
        return None if self.dtypes.master == self.dtypes.weights else self.owned

    @property
    def names(self) -> list[str]:
        return [slot.name for slot in self.layout.slots]

    @property
    def optim_span(self) -> Span:
        return self.span if self.placement.optim else (0, self.layout.numel)

    # -- reads of released parameters (called by zero/parameter.py) --

    def param_name(self, param: nn.Parameter) -> str:
        return next((name for name, p in zip(self.names, self.params, strict=True) if p is param), "?")

    def view_of(self, param: nn.Parameter) -> Tensor:
        """The parameter's view of the unit's memory, which may be empty."""
        return next(view for view, p in zip(self.shown.views, self.params, strict=True) if p is param)

    def _refuse_asleep(self) -> None:
        if self.state is State.ASLEEP:
            raise RuntimeError(f"the weights of {self.names[0]!r} and its neighbors are away: call engine.wake() first")

    def gather_on_read(self) -> bool:
        """Gather if that is safe here (inside the engine's forward or backward); returns whether it was."""
        self._refuse_asleep()
        if not self.shown.reads_gather:
            return False
        self.shown.pinned = True
        self.shown.read_in_graph |= torch.is_grad_enabled()
        self.gather()
        return True

    def copy_on_read(self) -> bool:
        """Make the parameters plain views of a private copy if that is safe here (inside a surgery); returns whether it was."""
        if self.shown.show_copy is not None:
            self.shown.show_copy(self)
        return self.shown.show_copy is not None

    def show_weights(self) -> None:
        """Restore the plain parameter classes before a forward."""
        if self.state is State.GATHERED:
            self.shown.show_plain()

    def hide_gradients(self) -> None:
        """Make `.grad` raise, because the gradients have moved to the unit's buffers."""
        if self.state is State.GATHERED and self.window.holds_gradient:
            self.shown.show_reduced()

    # -- edge: gather (weights shard -> full weights), and release --

    def await_update(self) -> None:
        """Wait for the optimizer update in flight. Raises the error with which it failed."""
        if self.updating is not None:
            self.updating.wait()
            self.updating = None
            self.owned.settle()

    @outside
    def prefetch(self) -> None:
        """Start the gather, if it moves bytes. Advisory: `gather` and `release` are correct with and without it."""
        if self.state is not State.RELEASED or self.pending_gather is not None or self.memory.common:
            return
        if self.updating is not None:
            if not self._fetches or self.comms.dp.size > 1 or not self.updating.done():
                return  # all ranks must launch a collective at the same point, however far their updates are
            self.await_update()
        self.pending_gather = self._start_gather()

    @property
    def _fetches(self) -> bool:
        """Whether gathering reads the disk, on this rank or on others. Such a gather launches its collective in `wait`."""
        is_disk = self.homes.tiers.weights is Tier.DISK
        return is_disk and (self.comms.dp.size > 1 or self.weights.is_away(0, self.weights.numel))

    def _start_gather(self) -> Pending[None]:
        if self.memory.pages is None:
            self.full.untyped_storage().resize_(self.layout.numel * self.full.element_size())
        with _preserve_version(self.full):
            return self.homes.gather(self.weights, self.memory.pages, self.full, self.comms.weights, self.cuts)

    @outside
    def gather(self) -> None:
        """Make the weights readable. A no-op if they are."""
        if self.state is State.GATHERED:
            return
        self._refuse_asleep()
        self.await_update()
        if self.memory.common:
            self.comms.dp.await_published(self.memory.common)
            self.shown.show_plain()
        else:
            if self.pending_gather is None:
                self.pending_gather = self._start_gather()
            with _preserve_version(self.full):
                self.pending_gather.wait()
            self.pending_gather = None
            self.shown.show_full()
        self.state = State.GATHERED

    @outside
    def gather_exactly(self) -> None:
        """Make the weights readable with the shards' exact values, even if gathers send codes. Collective."""
        self.gather()
        if not self.comms.weights.exact and self.placement.weights and not self.memory.common:
            with _preserve_version(self.full):
                self.homes.gather(self.weights, self.memory.pages, self.full, self.comms.dp, self.cuts).wait()

    @outside
    def release(self) -> None:
        """Free the full weights if they are sharded. A no-op if the unit is released."""
        if self.pending_gather is not None:  # prefetched but not used
            self.gather()
        if not self.placement.weights or self.state is not State.GATHERED:
            return
        check_writes(self)
        if self.memory.poison:
            with _preserve_version(self.full):
                self.full.fill_(float("nan") if self.full.is_floating_point() else 0)
        is_freed = not (self.memory.poison or self.memory.common)
        self.shown.show_released(placeholders=is_freed)
        if is_freed and self.memory.pages is not None:
            free_pages(self.memory.pages)
        elif is_freed:
            self.full.untyped_storage().resize_(0)
        self.state = State.RELEASED

    def sleep(self) -> None:
        """Make reads of the parameters raise until `wake_up`, also if the weights are replicated."""
        self.release()
        check_writes(self)
        if self.state is State.GATHERED:
            self.shown.show_released(placeholders=True)
        self.comms.weights.changed()  # drops kept weights
        self.state = State.ASLEEP

    def wake_up(self) -> None:
        self.state = State.RELEASED
        if not self.placement.weights:
            self.shown.show_full()
            self.state = State.GATHERED
            self.hide_gradients()

    # -- edge: reduce (full gradients -> grads shard) --

    def add_local(self, i: int, grad: Tensor) -> None:
        """Replicated gradients: add parameter i's `.grad` to the unreduced gradients, and clear it."""
        self.add_gradient(i, grad)
        self.params[i].grad = None

    def add_gradient(self, i: int, grad: Tensor) -> None:
        """Add a gradient of parameter i that autograd has not written into `.grad`."""
        self.window.add(i, grad, None if self.memory.local is None else self.memory.local.tensor, self.dtypes.grads)

    def reduce(self, buffer: Buffer, alpha: float) -> Pending[None]:
        """Sharded gradients: reduce-scatter the unreduced gradients (or zeros) through `buffer` and add the sum to `grads`."""
        grads = self.sums
        self.await_update()  # if no forward has gathered the unit, the optimizer may still read the last gradients
        self.reduction.comm.reusable(buffer)
        flat = self.reduction.room(buffer, self.layout.numel, self.dtypes.grads)
        self.window.pack(flat)
        (landing, accumulate), kept = self.window.open(self.homes, grads), self.memory.feedback
        pending = self.reduction.scatter(flat, buffer, self.cuts, landing.memory, kept, alpha=alpha, accumulate=accumulate)

        def keep(partial: Partial) -> None:
            self.window.reduced(partial)
            landing.write_back()

        return pending.then(keep)

    def expect_reduce(self) -> None:
        """Start copying the gradient sum to the device, because this unit is reduced next. Advisory."""
        if isinstance(self.grads, HostStore) and self.updating is None:
            self.window.open_ahead(self.homes, self.grads)

    # -- edge: settle (grads shard -> optimizer shard) --

    def settle(self, alpha: float, wire: Buffer | None) -> Pending[None]:
        """Finish this window's reduction: make `grads` and `partial` final for the optimizer and the norm.

        `wire` carries replicated gradients if these are not communicated as they are stored.
        """
        grads = self.sums
        scattered: Pending[Partial] | None = None
        local = self.memory.local
        if local is not None:
            self.window.complete_local(local.tensor)
            if wire is not None:
                self.reduction.comm.reusable(wire)
            out, kept = local.tensor[slice(*self.span)], self.memory.feedback
            scattered = self.reduction.scatter(local.tensor, wire or local, self.cuts, out, kept, alpha=alpha, accumulate=False)
        elif not self.window.has_gradient:
            fill_zero(grads)
            self.window.reduced(ZERO)

        def finish() -> None:
            if scattered is not None:
                self.window.reduced(scattered.wait())
            if (replica := self.memory.replica) is not None:
                self._add_copies(self.comms.dp_replicate, replica)
            if local is not None and not self.placement.optim:
                partial = self.reduction.spread(local, wire or local, self.cuts, self.memory.served).wait()
                self.window.reduced(partial or self.window.partial)

        return Pending(finish)

    def _add_copies(self, comm: Comm, buffer: Buffer) -> None:
        """Add the shards' gradients over their replicas, through `buffer` (the gradients' store if gradients are sharded)."""
        local = self.memory.local
        if local is not None:
            buffer.tensor.copy_(local.tensor[slice(*self.span)])
        cuts = _even_cuts(buffer.tensor.numel(), comm.size)
        own, copies = buffer.tensor[cuts[comm.index] : cuts[comm.index + 1]], Dense(comm)
        self.window.reduced(copies.scatter(buffer.tensor, buffer, cuts, own, None, alpha=1.0, accumulate=False).wait())
        copies.spread(buffer, buffer, cuts, None).wait()
        if local is not None:
            local.tensor[slice(*self.span)].copy_(buffer.tensor)

    # -- edge: publish (optimizer shard -> weights shard) --

    def publish(self) -> Pending[None]:
        """Send this rank's new weights to the other ranks, after any copy of them to the device."""
        self.shown.num_changes += 1
        self.comms.weights.changed()
        if not self.placement.weights:  # for sharded weights, `gather` waits
            self.owned.settle()
        if self.memory.common:
            self.comms.dp.publish(self.memory.common)
        elif self.placement.optim and (full := self.memory.full) is not None:  # replicated weights
            dp = self.comms.dp
            return dp.all_gather(full, self.cuts).then(lambda _: dp.reusable(full))  # the user may write the weights after the step
        return Pending(None)

    def begin_update(self) -> None:
        """Called before the optimizer writes new weights."""
        if self.dtypes.published_bits is not None:
            self.memory.before = self.full[slice(*self.span)].clone()

    def publish_update(self) -> Pending[None]:
        """`publish` after an update.

        [Note: Differences in codes] With `published_bits`, ranks send codes of what has changed, and add the decoded changes to
        their weights. The masters keep the quantization error, so the next codes send it. Ranks have equal weights, which differ
        from the rounded masters by at most half a code.
        """
        bits, full = self.dtypes.published_bits, self.memory.full
        if bits is None or full is None:
            return self.publish()
        self.shown.num_changes += 1
        self.owned.settle()
        own, before, self.memory.before = full.tensor[slice(*self.span)], self.memory.before, None
        changes = torch.zeros_like(own, dtype=torch.float32)
        if before is not None:  # else the update has failed
            torch.sub(own.float(), before, out=changes)
            own.copy_(before)
        return gather_coded(self.comms.dp, full.tensor, changes, self.cuts, bits, accumulate=True)

    def forget_gradients(self) -> None:
        """Drop everything accumulated since the last step."""
        self.window.forget()
        self.shown.read_in_graph = False
        self.show_weights()

    def rename(self, index: int, name: str, block: nn.Module | None, leaves: Sequence[Leaf]) -> None:
        """Change the unit's place in the model. Its tensors stay."""
        self.index, self.name, self.block = index, name, block
        self.model_params = [leaf.whole for leaf in leaves]
        slots = zip(self.layout.slots, leaves, strict=True)
        self.layout = replace(self.layout, slots=tuple(replace(slot, name=leaf.name) for slot, leaf in slots))

    def unsharded_weights(self) -> Tensor:
        """Return the unsharded weights, flat, even if the parameters currently show other values. Collective."""
        return self.full.clone() if not self.placement.weights else self.unsharded(self.weights.whole(), sharded=True)

    def unsharded(self, shard: Tensor, sharded: bool) -> Tensor:
        """Return a per-element state of the whole unit, flat: every rank's `shard` if it is `sharded`, else a copy. Collective."""
        if not sharded:
            return shard.clone()
        full = torch.zeros(self.layout.numel, dtype=shard.dtype, device=self.homes.device)
        full[slice(*self.span)] = shard.to(full.device)
        for index, (start, stop) in enumerate(itertools.pairwise(self.cuts)):
            if self.comms.dp.size > 1:
                broadcast_from(full[start:stop], self.comms.dp.axis, index)
        return full.to(shard.device)


def _even_cuts(numel: int, parts: int) -> list[int]:
    step = -(-numel // (64 * parts)) * 64
    return [min(i * step, numel) for i in range(parts + 1)]

"""The memory of a unit: what is allocated for it, its first values, and its end.

The glossary is in zero/unit.py. zero/build.py allocates the communication buffers of all units at once.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream.ops.disk import DiskError, aligned
from slipstream.ops.wire import Feedback
from slipstream.zero.comm import Buffer
from slipstream.zero.materialize import InitialValues
from slipstream.zero.parameter import drop_grad
from slipstream.zero.shared import free_pages
from slipstream.zero.storage.store import DiskStore, MemoryStore, Store, copy_store, pieces, range_nbytes

if TYPE_CHECKING:
    from slipstream.zero.unit import Dtypes, Unit


@dataclass(slots=True, kw_only=True)
class Memory:
    """A unit's memory. The communication buffers are allocated for all units at once (zero/build.py)."""

    full: Buffer | None = None  # replicated weights
    common: Buffer | None = None  # sharded weights in one mapping shared by the ranks
    codes: Buffer | None = None  # this rank's shard of the weights, if they are stored in codes
    kept: Buffer | None = None  # other groups' weights that the gather keeps
    local: Buffer | None = None  # unreduced gradients
    replica: Buffer | None = None  # this rank's gradient shard, if the shards are replicated
    pages: Tensor | None = None  # uint8, the memory of gathered weights, if its pages are freed on release
    feedback: Feedback | None = None  # quantization error of the gradients' codes
    served: Feedback | None = None  # quantization error of this rank's span of the mean (gradients are replicated)
    before: Tensor | None = None  # while an update is published in codes: this rank's span of the old weights
    poison: bool = False  # debugging: fill released weights with NaN instead of freeing them

    @property
    def unreduced(self) -> Tensor:
        """`local`, which code for replicated gradients needs, such as 1-bit optimizers."""
        if self.local is None:
            raise RuntimeError("the gradients of a unit are sharded or frozen, so no rank has all of its own")
        return self.local.tensor


def place(unit: Unit) -> tuple[Tensor, Store, Store, Store]:
    """Allocate `full`, `weights`, `owned` and `master` of a unit; the last is `owned` if the weights are their own masters."""
    layout, memory, homes, dtype = unit.layout, unit.memory, unit.homes, unit.dtypes.weights
    start, stop = unit.span
    shard: Store | None = None
    if unit.placement.weights and not memory.common:
        shard = homes.weights(stop - start, dtype, None if memory.codes is None else memory.codes.tensor)
    buffer = memory.common or memory.full
    if isinstance(shard, DiskStore) and homes.lane is None:
        memory.pages = aligned(range_nbytes(layout.numel, dtype.itemsize))
    if buffer is not None:
        full = buffer.tensor
    elif memory.pages is not None:
        full = memory.pages.view(dtype)[: layout.numel]
    else:
        full = torch.empty(layout.numel, dtype=dtype, device=homes.device)
    weights = shard or MemoryStore(full[start:stop])
    owned = weights if unit.placement.optim else MemoryStore(full)
    first, last = unit.optim_span
    return full, weights, owned, owned if unit.dtypes.master == dtype else homes.state(last - first, unit.dtypes.master)


def fill(unit: Unit, values: InitialValues) -> None:
    """Store the initial values, one bounded piece at a time. Masters start from the unrounded values."""
    weights = unit.weights if unit.placement.weights else MemoryStore(unit.full)
    first, last = unit.span if unit.placement.weights else (0, unit.layout.numel)
    own = unit.optim_span
    for a, b in itertools.pairwise(sorted({first, *own, last})):
        for start, stop in pieces(b - a):
            piece = values.get(a + start, a + stop)
            weights.put(a + start - first, piece)
            if unit.out is not None and own[0] <= a < own[1]:
                unit.master.put(a + start - own[0], piece)
    for i in range(len(unit.params)):
        unit.shown.accept_write(i)


def start_training(unit: Unit, dtypes: Dtypes) -> None:
    """Allocate gradients and, if the weights are not their own masters, masters. The caller has extended `unit.memory`."""
    unit.dtypes, unit.reduction = dtypes, unit.comms.reduction(dtypes)
    local, replica = unit.memory.local, unit.memory.replica
    if local is not None:
        unit.grads = MemoryStore(local.tensor[slice(*unit.optim_span)])
    elif replica is not None:
        unit.grads = MemoryStore(replica.tensor)
    else:
        unit.grads = unit.homes.gradients(unit.span[1] - unit.span[0], dtypes.grads)
    if dtypes.master != dtypes.weights and unit.master.dtype != dtypes.master:
        unit.master = unit.homes.state(unit.master.numel, dtypes.master)
        copy_store(unit.master, unit.owned)


def close(unit: Unit, *, on_disk: bool = False) -> None:
    """Turn the parameters into ordinary ones with memory of their own; on meta with `on_disk` (some rank's weights are on disk).

    The unit is unusable afterwards.
    """
    with suppress(DiskError):  # from a read whose result is discarded
        if not on_disk or unit.pending_gather is not None:
            unit.gather_exactly()
    unit.await_update()
    for i, (param, view) in enumerate(zip(unit.params, unit.shown.views, strict=True)):
        unit.shown.make_plain(i)
        drop_grad(param)
        if not on_disk:
            param.data = view.clone()
        else:
            unit.shown.put_on_meta(i)
    _forget(unit)


def free(unit: Unit) -> None:
    """Free the unit's memory while the engine lives. Collective; the parameters have other memory already."""
    memory = unit.memory
    for buffer in (memory.full, memory.local, memory.replica, memory.codes, memory.kept):
        if buffer is not None:
            free_pages(buffer.tensor)
    if memory.common is not None:
        free_pages(unit.full[slice(*unit.span)])  # each rank frees its own span, which no other rank reads any more
    for store in {id(store): store for store in (unit.weights, unit.owned, unit.master, unit.grads)}.values():
        if store is not None:
            unit.homes.drop(store)
    if unit.placement.weights:
        unit.homes.return_kept(unit.weights)
    _forget(unit)


def _forget(unit: Unit) -> None:
    unit.memory = Memory()
    unit.full = torch.empty(0)
    unit.weights = unit.owned = unit.master = MemoryStore(unit.full)
    unit.grads = None
    unit.shown.close()
    unit.window.close()

"""Read and write unsharded parameters and gradients: `with zero.gathered(params): ...`."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from slipstream.world.mesh import Axis
from slipstream.zero.comm import Comm, broadcast_from, reduce_into, sum_over
from slipstream.zero.layout import ALIGN, Slot, round_up
from slipstream.zero.leaves import Part, Ranges, cuts_of, take
from slipstream.zero.shown import check_writes, refuse_writes, write_masters
from slipstream.zero.storage.store import MemoryStore, fill_zero
from slipstream.zero.unit import State, Unit

# Every live unit of the process, in order of registration, which is the same on all ranks: a parameter does not know its unit
_living: weakref.WeakKeyDictionary[Unit, None] = weakref.WeakKeyDictionary()
# id of a parameter -> where it is: number of the unit, index in it, unit. Made by `units_of` after units have changed
_places: dict[int, list[tuple[int, int, weakref.ref[Unit]]]] = {}


def register(units: Iterable[Unit]) -> None:
    """Make the units' parameters known to `units_of`. Called again after a unit's parameters were replaced."""
    _living.update(dict.fromkeys(units))
    _places.clear()


def forget(units: Iterable[Unit]) -> None:
    for unit in units:
        _living.pop(unit, None)
    _places.clear()


def units_of(params: Iterable[nn.Parameter]) -> dict[Unit, list[int]]:
    """The units of these parameters and the parameters' indices in them, in unit order. Parameters of no unit are left out."""
    if not _places:
        places: dict[int, list[tuple[int, int, weakref.ref[Unit]]]] = {}
        for number, unit in enumerate(list(_living)):
            for i, param in enumerate(unit.model_params):
                places.setdefault(id(param), []).append((number, i, weakref.ref(unit)))
        _places.update(places)  # at once: autograd's thread may look, too
    found: dict[Unit, list[int]] = {}
    of_params = (place for key in {id(param) for param in params} for place in _places.get(key, ()))
    for _, i, ref in sorted(of_params, key=operator.itemgetter(0, 1)):
        if (owner := ref()) is not None:
            found.setdefault(owner, []).append(i)
    return found


def full_values(unit: Unit) -> Tensor:
    """Return a copy of the unit's unsharded weights, flat. Collective over the shards."""
    if unit.state is State.GATHERED:
        return unit.unsharded_weights() if not unit.comms.weights.exact else unit.full.clone()
    unit.gather_exactly()
    values = unit.full.clone()
    unit.release()
    return values


class Joint(NamedTuple):
    """How one dimension of a whole parameter is cut over an axis."""

    part: Part
    axis: Axis
    ranges: Sequence[Ranges]  # of each rank of the axis

    def join(self, value: Tensor) -> Tensor:
        """Return the whole tensor, of which each rank of the axis passes its part `value`. Collective over the axis."""
        own = value.detach().movedim(self.part.dim, 0).contiguous()
        lengths = [sum(stop - start for start, stop in ranges) for ranges in self.ranges]
        padded = torch.cat([own, own.new_zeros(max(lengths) - len(own), *own.shape[1:])])
        if padded.is_cuda and "nccl" not in dist.get_backend(self.axis.group):
            padded = padded.cpu()  # gloo cannot gather GPU memory
        pieces = [torch.empty_like(padded) for _ in lengths]
        if padded.numel():
            dist.all_gather([piece.view(torch.uint8) for piece in pieces], padded.view(torch.uint8), group=self.axis.group)
        whole = own.new_empty(self.part.numel, *own.shape[1:])
        for piece, ranges in zip(pieces, self.ranges, strict=True):
            start = 0
            for first, last in ranges:
                whole[first:last] = piece[start : start + last - first]
                start += last - first
        return whole.movedim(0, self.part.dim).contiguous()

    def own(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole."""
        return take(whole, self.part.dim, self.ranges[self.axis.index])


def joints(unit: Unit, i: int, parts: Iterable[Part]) -> tuple[Joint, ...]:
    """How parameter i is cut into these parts. Collective over the ranks that have them."""
    axes = ((part, unit.comms.family.parts_of(part.split)) for part in parts)
    return tuple(Joint(part, axis, axis.gather(part.ranges_of(axis.index))) for part, axis in axes)


def joined(value: Tensor, cuts: Iterable[Joint]) -> Tensor:
    """The whole of which `value` is this rank's part. Collective."""
    for cut in cuts:
        value = cut.join(value)
    return value


def whole_of(value: Tensor, unit: Unit, i: int) -> Tensor:
    """The whole of which `value`, shaped like parameter i, is this rank's part. Collective over the ranks that have parts."""
    return joined(value.to(unit.homes.device), joints(unit, i, cuts_of(unit.params[i]))).to(value.device)


def part_of_whole(whole: Tensor, unit: Unit, i: int) -> Tensor:
    """This rank's part of a whole tensor that is cut like parameter i."""
    for part in cuts_of(unit.params[i]):
        whole = take(whole, part.dim, part.ranges_of(unit.comms.family.parts_of(part.split).index))
    return whole


def full_gradient(unit: Unit, i: int, alpha: float) -> Tensor:
    """Return parameter i's summed gradient times `alpha`, fp32, in its shape. Collective."""
    slot = unit.layout.slots[i]
    part = slice(slot.offset, slot.offset + slot.numel)
    if unit.memory.local is not None:  # not reduced yet
        total = unit.full.new_zeros(slot.numel, dtype=torch.float32)
        if unit.window.is_in_local(i):
            total += unit.memory.local.tensor[part]
        sum_over(total, unit.comms.data.axis)
        return total.mul_(alpha * unit.comms.family.weight).view(slot.shape)
    if unit.grads is None or not unit.window.has_gradient:
        return unit.full.new_zeros(slot.shape, dtype=torch.float32)
    total = unit.unsharded(unit.grads.whole().float(), unit.placement.grads)[part].to(unit.full.device)
    sum_over(total, unit.comms.dp_replicate.axis)
    return total.view(slot.shape)


def check_has_gradient(unit: Unit, i: int) -> None:
    """Raise ValueError if parameter i is frozen."""
    if unit.grads is None or not unit.params[i].requires_grad:
        raise ValueError(f"parameter {unit.names[i]!r} is frozen and has no gradient; set requires_grad before the forward")


def set_gradient(unit: Unit, i: int, value: Tensor, alpha: float) -> None:
    """Set parameter i's summed gradient times `alpha` to `value`, fp32. One rank, or the first replica, stores all of it."""
    assert unit.grads is not None, "check_has_gradient comes first"
    slot = unit.layout.slots[i]
    if unit.memory.local is not None:
        whole = value.reshape(-1) / (alpha * unit.comms.family.weight) if unit.comms.data.index == 0 else torch.zeros(slot.numel)
        unit.window.overwrite_local(unit.memory.local.tensor, i, whole)
    else:
        if not unit.window.has_gradient:
            fill_zero(unit.grads)
        inside, of_param = slot.common(unit.span)
        shard = value.reshape(-1)[of_param]
        unit.grads.put(inside.start, shard if unit.comms.dp_replicate.index == 0 else torch.zeros_like(shard))
        grads = unit.grads.whole()
        unit.window.overwritten(reduce_into(grads, [grads], 1.0, accumulate=False))
    unit.hide_gradients()


def show_copy(unit: Unit, indices: Iterable[int]) -> Tensor:
    """Point some parameters at a private copy of the unit's unsharded weights, and return it, flat. Collective over the shards."""
    copy = full_values(unit)
    slots = unit.layout.slots
    unit.shown.show_copies({i: copy[slice(*slots[i].span)].view(slots[i].shape) for i in indices})
    return copy


@contextmanager
def gathered_units(chosen: dict[Unit, list[int]], modifier_rank: int | None, write: bool = True) -> Iterator[None]:
    """Point the chosen parameters at private unsharded copies, and write what was changed back to every shard at the end.

    With `modifier_rank` None, all ranks must write the same values: else the end raises ValueError on all ranks that have one of
    the parameters, and writes nothing. Otherwise the copy of that data-parallel rank is used. If all ranks raise inside, nothing is
    written. If only some raise, the others wait for them at the end until the watch stops them. The engine's forward may run
    inside, and uses the copies.
    Raises ValueError for a rank that does not exist, and an error if the engine's disk has failed, or if masters are asleep and
    `write` is set.
    """
    for homes in {id(unit.homes): unit.homes for unit in chosen}.values():
        homes.check()
    for unit in chosen if write else ():
        refuse_writes(unit)
        size = unit.comms.data.size
        if modifier_rank is not None and not 0 <= modifier_rank < size and size > 1:
            raise ValueError(f"modifier_rank is {modifier_rank}, but the data-parallel ranks are 0..{size - 1}")
    for unit in chosen:
        unit.copy_on_read()
    # copies of a surgery: the surgery writes them back
    shown = [(unit, i) for unit, indices in chosen.items() for i in indices if i in unit.shown.copies]
    chosen = {unit: [i for i in indices if i not in unit.shown.copies] for unit, indices in chosen.items()}
    chosen = {unit: indices for unit, indices in chosen.items() if indices}
    copies: dict[Unit, Tensor] = {}
    try:
        for unit, indices in chosen.items():
            check_writes(unit)
            copies[unit] = show_copy(unit, indices)
        with _keeping_for_backward() if copies and torch.is_grad_enabled() else nullcontext():
            yield
        if write:
            for unit, copy in copies.items():
                copy_assigned(unit, chosen[unit], copy)
                if modifier_rank is not None:
                    use_values_of(modifier_rank, unit, copy)
            if modifier_rank is not None:
                for unit, i in shown:
                    unit.params[i].data = value = unit.params[i].data.contiguous()
                    use_values_of(modifier_rank, unit, value.view(-1))
            for unit, indices in _changed(chosen, copies, compares=modifier_rank is None).items():
                write_back(unit, indices, copies[unit])
    finally:
        for unit in copies:
            unit.shown.end_copies(chosen[unit])


@contextmanager
def shown_as(values: Mapping[Unit, Mapping[int, Tensor]]) -> Iterator[None]:
    """Inside, parameters have these unsharded values on this rank. Nothing is written back; not collective."""
    values = {unit: {i: value for i, value in of_unit.items() if i not in unit.shown.copies} for unit, of_unit in values.items()}
    for unit, of_unit in values.items():
        check_writes(unit)
        unit.shown.show_copies(of_unit)
    try:
        yield
    finally:
        for unit, of_unit in values.items():
            unit.shown.end_copies(of_unit)


@contextmanager
def _keeping_for_backward() -> Iterator[None]:
    """Let a graph built inside (a penalty on weights) save the copies: in its backward the parameters are sharded."""

    def pack(saved: Tensor) -> tuple[Tensor, int]:
        return saved.detach(), saved._version  # detach: the parameter itself views other memory by then

    def unpack(packed: tuple[Tensor, int]) -> Tensor:
        tensor, version = packed
        if tensor._version != version:
            raise RuntimeError(
                "a parameter or value was written in place after a loss was computed from it inside slipstream.zero.gathered(...), "
                "and the loss's backward needs the old value: call backward before the write, or write to a copy"
            )
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def is_assigned(value: Tensor, view: Tensor) -> bool:
    """Whether a parameter's data is not the view that it was given, but for example its transpose."""
    return (value.data_ptr(), value.shape, value.stride()) != (view.data_ptr(), view.shape, view.stride())


def copy_assigned(unit: Unit, indices: Iterable[int], copy: Tensor) -> None:
    """Copy values that were set with `p.data = ...`, not in place, into `copy`. Raises ValueError if a shape has changed."""
    for i in indices:
        slot, new = unit.layout.slots[i], unit.params[i].data
        view = copy[slot.offset : slot.offset + slot.numel].view(slot.shape)
        if is_assigned(new, view):
            if new.shape != view.shape:
                raise ValueError(
                    f"parameter {unit.names[i]!r} was given shape {tuple(new.shape)} inside gathered(), it is "
                    f"{tuple(view.shape)}; to resize, change the model inside `with engine.surgery():`"
                )
            view.copy_(new.clone())  # it may be another view of the same memory


def use_values_of(rank: int, unit: Unit, values: Tensor) -> None:
    """Overwrite `values` of a unit with those of a data-parallel rank. Collective."""
    if unit.comms.data.size > 1:
        broadcast_from(values, unit.comms.data.axis, rank)


def _equals(unit: Unit) -> Comm:
    """The ranks with equal weights: with local steps, replicas differ."""
    return unit.comms.dp if unit.comms.family.apart.size > 1 else unit.comms.data


def _changed(chosen: Mapping[Unit, Sequence[int]], copies: Mapping[Unit, Tensor], compares: bool) -> dict[Unit, list[int]]:
    """The chosen parameters that some rank has changed in its copies. Collective.

    compares: raise ValueError if ranks changed a parameter differently, on all ranks that have one of the chosen ones
    """
    result: dict[Unit, list[int]] = {}
    apart: list[str] = []
    for unit, indices in chosen.items():
        own = [number for i in indices for number in _change(unit, i, copies[unit], compares)]
        comm = _equals(unit)
        rows = comm.exchange(torch.tensor(own, dtype=torch.float64)).view(comm.size, len(indices), 3)
        changed, differs = rows[:, :, 0].any(0).tolist(), (rows[:, :, 1:] != rows[0, :, 1:]).any(2).any(0).tolist()
        result[unit] = [i for i, is_changed in zip(indices, changed, strict=True) if is_changed]
        # copies of sharded weights were equal on all ranks; replicated ones may have differed before, by each rank's own steps
        written = [unit.placement.weights or is_changed for is_changed in changed]
        apart += [unit.names[i] for i, is_apart in zip(indices, map(operator.and_, written, differs), strict=True) if is_apart]
    refused = bool(apart)
    # a refusal spreads from experts' ranks to the ranks that share dense parameters with these, which would wait otherwise
    for comm in sorted({id(comm): comm for comm in map(_equals, chosen)}.values(), key=lambda comm: comm.size):
        refused = bool(comm.exchange(torch.tensor([float(refused)], dtype=torch.float64)).any())
    if refused:
        where = f"{apart[0]!r}{f' and {len(apart) - 1} more' if apart[1:] else ''}" if apart else "parameters that others have"
        raise ValueError(
            f"ranks have written different values to {where} inside gathered(), and nothing is stored: write the same on all ranks "
            "(seed them alike), or pass modifier_rank=0 to use those of rank 0"
        )
    return {unit: indices for unit, indices in result.items() if indices}


def _change(unit: Unit, i: int, copy: Tensor, sums: bool) -> tuple[float, float, float]:
    """Whether parameter i has changed in `copy`, as far as this rank knows (its own span, if weights are sharded); with `sums`,
    also the halves of a checksum of all values."""
    slot = unit.layout.slots[i]
    inside, of_param = slot.common(unit.span if unit.placement.weights else (0, unit.layout.numel))
    old = (unit.weights if unit.placement.weights else MemoryStore(unit.full)).get(inside.start, inside.stop).to(copy.device)
    is_changed = not torch.equal(copy[slice(*slot.span)][of_param].view(torch.uint8), old.view(torch.uint8))
    return float(is_changed), *(_checksum(slot, copy) if sums else (0.0, 0.0))


def _checksum(slot: Slot, values: Tensor) -> tuple[float, float]:
    """The halves of a checksum of a parameter's values in those of its unit.

    Each word is multiplied by an odd number that depends on its position, so changed bits or swapped words do not cancel out.
    """
    words = values[slot.offset : slot.offset + round_up(slot.numel, ALIGN)].view(torch.int64)
    checksum = int((torch.arange(1, 2 * len(words) + 1, 2, device=words.device).mul_(words)).sum())
    return float(checksum & 0xFFFFFFFF), float(checksum >> 32)  # exact in float64


def first_apart(units: Iterable[Unit]) -> str:
    """The name of the first parameter whose replicated weights differ between ranks; "" if there is none. Collective."""
    apart: list[str] = []
    for unit in units:
        if not unit.placement.weights:
            own = [half for slot in unit.layout.slots for half in _checksum(slot, unit.full)]
            rows = _equals(unit).exchange(torch.tensor(own, dtype=torch.float64))
            apart += [unit.names[k // 2] for k in (rows != rows[0]).any(0).nonzero().flatten().tolist()]
    return next(iter(apart), "")


def write_back(unit: Unit, indices: Iterable[int], values: Tensor) -> None:
    """Store the values of some parameters, which are equal on all ranks, in the shards and masters. Collective."""
    _equals(unit).exchange(torch.zeros(1, dtype=torch.float64))  # barrier: no rank still reads the old values
    with torch.no_grad():
        for i in indices:
            slot = unit.layout.slots[i]
            new = values[slice(*slot.span)]
            write_masters(unit, slot, new)
            if not unit.placement.weights:
                unit.full[slice(*slot.span)].copy_(new)
            else:
                inside, of_param = slot.common(unit.span)
                unit.weights.put(inside.start, new[of_param])
    if unit.placement.weights:
        unit.publish()
    else:
        unit.shown.num_changes += 1

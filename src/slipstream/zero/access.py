"""Reading and writing whole parameters by hand: `with zero.gathered(params): ...`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from slipstream.zero.comm import broadcast_from, gather_objects, reduce_into
from slipstream.zero.layout import overlap
from slipstream.zero.store import fill_zero, read, write
from slipstream.zero.unit import State, Unit

# Every living unit of the process, for the one question that a parameter cannot answer: which unit is it in?
_living: weakref.WeakSet[Unit] = weakref.WeakSet()


def register(units: Iterable[Unit]) -> None:
    """Make the units' parameters known to `units_of`."""
    _living.update(units)


def forget(units: Iterable[Unit]) -> None:
    """Their parameters are ordinary ones again."""
    for unit in units:
        _living.discard(unit)


def units_of(params: Iterable[nn.Parameter]) -> dict[Unit, list[int]]:
    """Which parameters of which units are meant, in unit order; parameters of no unit are left out."""
    wanted = {id(param) for param in params}
    units = sorted(_living, key=lambda unit: unit.serial)
    found = {unit: [i for i, whole in enumerate(unit.wholes) if id(whole) in wanted] for unit in units}
    return {unit: indices for unit, indices in found.items() if indices}


def full_values(unit: Unit) -> Tensor:
    """The unit's whole weights as one flat tensor of this rank's own. Collective over the shards."""
    if unit.state is State.GATHERED:
        return unit.full.clone()
    unit.gather()
    values = unit.full.clone()
    unit.release()
    return values


def full_gradient(unit: Unit, i: int, alpha: float) -> Tensor:
    """Parameter i's summed gradient times `alpha`, fp32, in its shape. Collective."""
    slot = unit.layout.slots[i]
    part = slice(slot.offset, slot.offset + slot.numel)
    if unit.memory.local is not None:  # not reduced yet
        local = unit.memory.local.tensor[part].float().cpu() if i in unit.filled else torch.zeros(slot.numel)
        pieces = gather_objects(local, unit.comms.data.axis)
        return torch.stack(pieces).sum(0).mul_(alpha).view(slot.shape).to(unit.full.device)
    if unit.grads is None or not unit.has_gradient:
        return torch.zeros(slot.shape, device=unit.full.device)
    full = unit.whole(unit.grads.whole().float(), bool(unit.placement.grads))[part].to(unit.full.device)
    if unit.comms.dp_replicate.size > 1:
        full = torch.stack([each.to(full.device) for each in gather_objects(full, unit.comms.dp_replicate.axis)]).sum(0)
    return full.view(slot.shape)


def set_gradient(unit: Unit, i: int, value: Tensor, alpha: float) -> None:
    """Replace parameter i's summed gradient times `alpha` by `value`, fp32. The first copy of the shards holds all of it."""
    slot = unit.layout.slots[i]
    if unit.grads is None or not unit.params[i].requires_grad:
        raise ValueError(f"parameter {unit.names[i]!r} is frozen: it has no gradient; set requires_grad before the forward")
    if tuple(value.shape) != slot.shape:
        raise ValueError(f"the gradient of {unit.names[i]!r} has shape {tuple(value.shape)}, the parameter {slot.shape}")
    if unit.memory.local is not None:
        whole = value.reshape(-1) / alpha if unit.comms.data.rank == 0 else torch.zeros(slot.numel)
        unit.memory.local.tensor[slice(*slot.span)].copy_(whole)
        unit.filled.add(i)
    else:
        if not unit.has_gradient:
            fill_zero(unit.grads)
        start, stop = overlap(slot.span, unit.span)
        mine = value.reshape(-1)[start - slot.offset : stop - slot.offset]
        unit.grads.put(start - unit.span[0], mine if unit.comms.dp_replicate.rank == 0 else torch.zeros_like(mine))
        grads = unit.grads.whole()
        unit.partial = reduce_into(grads, [grads], 1.0, accumulate=False)
    unit.has_gradient = True
    unit.revision += 1
    unit.hide_gradients()


def full_optimizer_state(unit: Unit, i: int, steps: Any) -> dict[str, Tensor]:
    """Parameter i's master and per-element optimizer states, in its shape. Collective."""
    slot = unit.layout.slots[i]
    part = slice(slot.offset, slot.offset + slot.numel)
    sharded = bool(unit.placement.optim)
    result = {"master": unit.whole(unit.master.whole(), sharded)[part].view(slot.shape).float()}
    owned = steps.pieces[unit.index] if steps and unit.grads is not None else []  # frozen units have none, nor get any here
    pieces = [piece for piece in owned if piece.name == unit.names[i]]
    mine = [(piece.offset, name, read(value)) for piece in pieces for name, value in steps.states(unit, piece).items()]
    everyone = gather_objects(mine, unit.comms.dp.axis) if sharded else [mine]
    for offset, name, value in (item for rank in everyone for item in rank):
        whole = result.setdefault(name, torch.zeros(slot.shape, dtype=value.dtype))
        whole.view(-1)[offset : offset + value.numel()].copy_(value)
    return result


def set_optimizer_state(unit: Unit, i: int, steps: Any, values: Mapping[str, Tensor]) -> None:
    """Overwrite parameter i's states on the ranks that own them, and the weights when "master" is among them."""
    slot = unit.layout.slots[i]
    for name, value in values.items():
        if tuple(value.shape) != slot.shape:
            raise ValueError(f"{name} of {unit.names[i]!r} has shape {tuple(value.shape)}, the parameter {slot.shape}")
    owned = steps.pieces[unit.index] if steps and unit.grads is not None else []
    owned = [piece for piece in owned if piece.name == unit.names[i]]
    known = [sorted(steps.states(unit, piece)) for piece in owned]
    for states in [state for rank in gather_objects(known, unit.comms.data.axis) for state in rank]:
        if unknown := sorted(values.keys() - {"master", *states}):  # on all ranks, before anything is written
            raise KeyError(f"no optimizer state {unknown[0]!r} of {unit.names[i]!r}; there are {['master', *states]}")
    if "master" in values:
        with gathered_units({unit: [i]}, None), torch.no_grad():
            unit.params[i].copy_(values["master"])
        start, stop = overlap(slot.span, unit.optim_span)
        base = unit.optim_span[0]
        unit.master.put(start - base, values["master"].reshape(-1)[start - slot.offset : stop - slot.offset])
    for piece in owned:
        for name, state in steps.states(unit, piece).items():
            if name in values:
                write(state, values[name].reshape(-1)[piece.offset : piece.offset + piece.stop - piece.start])


def lend(unit: Unit, indices: Iterable[int]) -> Tensor:
    """Show private whole copies of some parameters; returns the unit's, flat. Collective over the shards."""
    copy = full_values(unit)
    unit.lent |= frozenset(indices)
    for i in indices:
        param, slot = unit.params[i], unit.layout.slots[i]
        unit.dress(i, nn.Parameter)
        param.data = copy[slot.offset : slot.offset + slot.numel].view(slot.shape)
    return copy


def take_back(unit: Unit, indices: Iterable[int], copy: Tensor, modifier_rank: int | None, *, write: bool) -> None:
    """The parameters are the unit's again. write: with what is in `copy`, on all ranks, or on `modifier_rank`. Collective then."""
    unit.lent -= frozenset(indices)
    if write:
        _write_back(unit, indices, copy, modifier_rank)
    else:
        _restore(unit, indices)
    for i in indices:
        unit.dress(i, unit.shown)


@contextmanager
def gathered_units(chosen: dict[Unit, list[int]], modifier_rank: int | None, write: bool = True) -> Iterator[None]:
    """Show private whole copies of the chosen parameters, and write changes back to every shard at the end.

    With `modifier_rank` None every rank writes the spans it owns from its own copy, so all ranks must write the same;
    otherwise that data rank's copy counts. An exception that every rank raises inside writes nothing; where only some raise it, the
    others wait for them at the end, until the watch stops them. The engine's forward may run inside, and sees the copies.
    Nothing is shown of an engine whose disk has failed, nor written while masters are away.
    """
    for homes in {id(unit.homes): unit.homes for unit in chosen}.values():
        homes.check()
    if write:
        for unit in chosen:
            unit.refuse_writes()
    data = next((unit.comms.data for unit in chosen), None)
    for unit in chosen:
        unit.lend_on_demand()
    shown = [unit.params[i] for unit, indices in chosen.items() for i in indices if i in unit.lent]  # by who writes them back
    chosen = {unit: [i for i in indices if i not in unit.lent] for unit, indices in chosen.items()}
    chosen = {unit: indices for unit, indices in chosen.items() if indices}
    copies: dict[Unit, Tensor] = {}
    written = False
    try:
        for unit, indices in chosen.items():
            copies[unit] = lend(unit, indices)
        with _keeping_for_backward() if copies and torch.is_grad_enabled() else nullcontext():
            yield
        if write:
            for unit, indices in chosen.items():
                adopt(unit, indices, copies[unit])
            if data is not None and data.size > 1 and modifier_rank is not None:
                for param in shown:
                    param.data = param.data.contiguous()
                    broadcast_from(param.data.view(-1), data.axis, modifier_rank)
        written = write
    finally:
        for unit, copy in copies.items():
            take_back(unit, chosen[unit], copy, modifier_rank, write=written)


@contextmanager
def shown_as(values: Mapping[Unit, Mapping[int, Tensor]]) -> Iterator[None]:
    """Parameters read as these whole values, which nothing writes back. Of this rank alone: not collective."""
    values = {unit: {i: value for i, value in its.items() if i not in unit.lent} for unit, its in values.items()}
    for unit, its in values.items():
        unit.lent |= frozenset(its)
        for i, value in its.items():
            unit.dress(i, nn.Parameter)
            unit.params[i].data = value
    try:
        yield
    finally:
        for unit, its in values.items():
            unit.lent -= frozenset(its)
            _restore(unit, its)
            for i in its:
                unit.dress(i, unit.shown)


@contextmanager
def _keeping_for_backward() -> Iterator[None]:
    """A graph that is made inside (a penalty on weights) keeps the copies that it saw: by its backward they are shown no more."""

    def keep(saved: Tensor) -> tuple[Tensor, int]:
        return saved.detach(), saved._version  # the memory, not the parameter, which has other memory then

    def give(kept: tuple[Tensor, int]) -> Tensor:
        if kept[0]._version != kept[1]:
            raise RuntimeError(
                "a parameter or value was written in place after a loss was computed from it inside slipstream.zero.gathered(...), "
                "and the loss's backward needs what it was: call backward before, or write a copy"
            )
        return kept[0]

    with torch.autograd.graph.saved_tensors_hooks(keep, give):
        yield


def adopt(unit: Unit, indices: Iterable[int], copy: Tensor) -> None:
    """Take over what was given with `p.data = ...` instead of written in place."""
    for i in indices:
        slot, new = unit.layout.slots[i], unit.params[i].data
        view = copy[slot.offset : slot.offset + slot.numel].view(slot.shape)
        if new.data_ptr() != view.data_ptr():
            if new.shape != view.shape:
                raise ValueError(
                    f"parameter {unit.names[i]!r} was given shape {tuple(new.shape)} inside gathered(), it is "
                    f"{tuple(view.shape)}; to resize, change the model inside `with engine.surgery():`"
                )
            view.copy_(new)


def _restore(unit: Unit, indices: Iterable[int]) -> None:
    for i in indices:
        unit.dress(i, nn.Parameter)
        unit.params[i].data = unit.views[i]
        unit.accept_version(i)


def _write_back(unit: Unit, indices: Iterable[int], values: Tensor, modifier_rank: int | None) -> None:
    data = unit.comms.data
    if modifier_rank is not None and data.size > 1:
        broadcast_from(values, data.axis, modifier_rank)
    data.exchange(torch.zeros(1, dtype=torch.float64))  # no rank reads the old values any more
    with torch.no_grad():
        for i in indices:
            slot = unit.layout.slots[i]
            span = (slot.offset, slot.offset + slot.numel)
            _write_masters(unit, span, values)
            if not unit.placement.weights:
                unit.full[slice(*span)].copy_(values[slice(*span)])
            else:
                start, stop = overlap(span, unit.span)
                unit.weights.put(start - unit.span[0], values[start:stop])
    _restore(unit, indices)
    if unit.memory.common:
        unit.comms.dp.publish(unit.memory.common)


def _write_masters(unit: Unit, span: tuple[int, int], values: Tensor) -> None:
    """Masters keep their precision where the value has not changed."""
    unit.revision += 1  # an update that was made ahead started from the old ones
    if unit.out is None:
        return
    start, stop = overlap(span, unit.optim_span)
    base = unit.optim_span[0]
    master, new = unit.master.get(start - base, stop - base), values[start:stop]
    new = new.to(master.device)
    changed = master.to(new.dtype) != new
    unit.master.put(start - base, torch.where(changed, new.to(master.dtype), master))

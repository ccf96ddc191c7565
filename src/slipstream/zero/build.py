"""From a model to its units: group, lay out, allocate everything at once, move the parameters in.

Collective: every rank calls `build_units` with the same model and plan. Nothing is allocated before all of it has been
laid out, so that a refusal costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn as nn

from slipstream.mesh import Axis, Mesh
from slipstream.zero import access
from slipstream.zero.comm import Buffer, Comm, LocalComm, ProcessGroupComm
from slipstream.zero.hooks import Slots
from slipstream.zero.lane import lane_of
from slipstream.zero.layout import Layout, flat_layout, whole_layout
from slipstream.zero.materialize import FirstValues
from slipstream.zero.placement import Placement, Tier, Tiers
from slipstream.zero.shared import SharedComm, hosts_agree
from slipstream.zero.store import Homes, Needs, Spaces, disk_nbytes
from slipstream.zero.unit import Comms, Dtypes, Memory, Unit
from slipstream.zero.watch import Watch
from slipstream.zero.wrap import Group, wrap

_NUM_SLOTS = 2  # one gradient buffer fills while the other is being summed


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What `build_units` needs to know of the plan."""

    placement: Placement
    weights_dtype: torch.dtype | None  # None: parameters keep their own
    master_dtype: torch.dtype
    grads_dtype: torch.dtype | None  # None: the gradient's own where it is written once, fp32 where it accumulates
    wire_dtype: torch.dtype | None  # None: the gradient's own
    accumulates: bool  # more than one micro-batch a step, or an unknown number
    whole: bool  # the optimizer looks at shapes
    poison: bool  # debugging: released weights read as NaN, so they have memory of their own
    align: int  # elements that parameters and shards start on a multiple of
    tiers: Tiers
    state_itemsizes: tuple[int, ...]  # of the states that a native optimizer keeps per element


def connect(mesh: Mesh, device: torch.device, transport: str, watch: Watch) -> Comms:
    """One transport per axis. `transport`: "auto" and "shared" use shared memory where all ranks share a host.

    Raises ValueError when "shared" is asked for and impossible.
    """

    def comm(axis: Axis) -> Comm:
        if axis.size == 1:
            return LocalComm(axis, device)
        if device.type == "cpu" and transport != "gloo":
            if hosts_agree(axis):
                return SharedComm(axis, watch)
            if transport == "shared":
                raise ValueError(
                    f'"slipstream": {{"transport": "shared"}} but the ranks {axis.ranks} cannot map each other\'s memory '
                    f'(another host, container or user); use "auto"'
                )
        return ProcessGroupComm(axis, device, watch)

    dp = comm(mesh.dp)
    replicate = comm(mesh.dp_replicate)
    return Comms(dp=dp, dp_replicate=replicate, data=dp if mesh.dp.ranks == mesh.data.ranks else comm(mesh.data))


def _dtypes(group: Group, recipe: Recipe, comms: Comms) -> Dtypes:
    weights = (recipe.weights_dtype or group.dtype) if group.dtype.is_floating_point else group.dtype
    if not group.trainable:
        return Dtypes(weights=weights, master=weights, local=weights, wire=weights, grads=weights)
    return _trainable_dtypes(weights, recipe, comms)


def _trainable_dtypes(weights: torch.dtype, recipe: Recipe, comms: Comms) -> Dtypes:
    kept = recipe.grads_dtype or (torch.promote_types(weights, torch.float32) if recipe.accumulates else weights)
    if comms.dp_replicate.size > 1 and recipe.wire_dtype is not None:  # copies exchange what is kept
        kept = torch.promote_types(kept, recipe.wire_dtype)
    wire = recipe.wire_dtype or (kept if not recipe.placement.grads else weights)
    # fp32 and wider weights are their own master
    master = weights if weights.itemsize >= recipe.master_dtype.itemsize else recipe.master_dtype
    return Dtypes(weights=weights, master=master, local=kept, wire=wire, grads=kept)


def _layout(group: Group, model: nn.Module, recipe: Recipe, num_shards: int) -> Layout:
    params = dict(model.named_parameters())
    shapes = [(name, tuple(params[name].shape)) for name in group.param_names]
    return (whole_layout if recipe.whole else flat_layout)(shapes, num_shards, recipe.align)


def build_units(
    model: nn.Module, recipe: Recipe, comms: Comms, device: torch.device, open_space: Callable[[Needs], Spaces],
    values: FirstValues,
) -> tuple[list[Unit], Slots, Homes]:  # fmt: skip
    """Move every parameter of `model` into units; returns them in layout order, the gradient ring, and where states rest.

    `open_space` makes the files for what rests on disk, before anything else is allocated; `values` gives each block's parameters
    their first values just before its units are built.
    """
    groups = wrap(model)
    place = recipe.placement
    layouts = [_layout(group, model, recipe, comms.data.size) for group in groups]
    dtypes = [_dtypes(group, recipe, comms) for group in groups]
    memories = [Memory(full=None, common=None, local=None, replica=None) for _ in groups]

    def give(name: str, comm: Comm, which: list[int], size: Callable[[int], tuple[int, torch.dtype]], common: bool = False) -> None:
        requests = [size(i) for i in which]
        buffers = comm.allocate_common(requests) if common else comm.allocate(requests)
        for i, buffer in zip(which, buffers or [], strict=False):
            setattr(memories[i], name, buffer)

    everything = list(range(len(groups)))
    trainable = [i for i in everything if groups[i].trainable]
    homes = _homes(layouts, dtypes, trainable, recipe, comms, device, open_space)
    in_place = recipe.tiers.weights is Tier.DEVICE or (recipe.tiers.weights is Tier.HOST and homes.lane is None)
    if place.weights and not recipe.poison and in_place:
        give("common", comms.dp, everything, lambda i: (layouts[i].numel, dtypes[i].weights), common=True)
    elif not place.weights:
        give("full", comms.dp, everything, lambda i: (layouts[i].numel, dtypes[i].weights))
    if not place.grads:
        give("local", comms.dp, trainable, lambda i: (layouts[i].numel, dtypes[i].local))
    elif comms.dp_replicate.size > 1:
        cuts = [layout.shards(comms.dp.size) for layout in layouts]
        give(
            "replica", comms.dp_replicate, trainable,
            lambda i: (cuts[i][comms.dp.rank + 1] - cuts[i][comms.dp.rank], dtypes[i].grads),
        )  # fmt: skip
    slots = _slots([layouts[i] for i in trainable], [dtypes[i] for i in trainable], place, comms.dp)
    params, modules = dict(model.named_parameters()), dict(model.named_modules())

    def build_block(block: str, which: Sequence[int]) -> list[Unit]:
        """In a function of its own: its values are gone before the next block's are made."""
        units = []
        for i, first in zip(which, values.of_block(block, [(groups[i], layouts[i]) for i in which], comms.data), strict=True):
            unit = Unit(
                groups[i].name, i, modules[block] if block else None, [(name, params[name]) for name in groups[i].param_names],
                layouts[i], place, dtypes[i], comms, memories[i], homes, first,
            )  # fmt: skip
            unit.poison = recipe.poison
            if groups[i].trainable:
                unit.start_training(dtypes[i])
            unit.release()  # nothing was put into what is gathered
            units.append(unit)
        values.rest()
        return units

    blocks: dict[str, list[int]] = {"": []}  # the root's turn is the first, also where it has no parameters
    for i, group in enumerate(groups):
        blocks.setdefault(group.module_name, []).append(i)
    values.begin(blocks)
    units = [unit for block, which in blocks.items() for unit in build_block(block, which)]
    values.finish()
    comms.data.exchange(torch.zeros(1, dtype=torch.float64))  # common weights are written before anyone reads them
    access.register(units)
    return units, slots, homes


def _homes(
    layouts: Sequence[Layout], dtypes: Sequence[Dtypes], trainable: Sequence[int], recipe: Recipe, comms: Comms,
    device: torch.device, open_space: Callable[[Needs], Spaces],
) -> Homes:  # fmt: skip
    tiers, place, lane = recipe.tiers, recipe.placement, lane_of(device)
    grads_tier = tiers.grads(on_host=lane is None)
    weights = optim = next_weights = next_optim = 0
    to_keep = tiers.weights_kept
    for i, (layout, of_unit) in enumerate(zip(layouts, dtypes, strict=True)):
        cuts = layout.shards(comms.dp.size)
        span = cuts[comms.dp.rank + 1] - cuts[comms.dp.rank]
        if tiers.weights is Tier.DISK:
            kept = min(span, to_keep)
            to_keep -= kept
            nbytes = disk_nbytes(span, of_unit.weights.itemsize, kept)
            weights, next_weights = weights + nbytes, next_weights + (nbytes if i in trainable else 0)
        if i not in trainable:
            continue
        if place.grads and grads_tier is Tier.DISK and comms.dp_replicate.size == 1:
            optim += disk_nbytes(span, of_unit.grads.itemsize)
        if tiers.optim is Tier.DISK:
            numel = span if place.optim else layout.numel
            own = [of_unit.master.itemsize] if of_unit.master != of_unit.weights else []
            nbytes = sum(disk_nbytes(numel, item, round(numel * tiers.kept)) for item in [*own, *recipe.state_itemsizes])
            optim, next_optim = optim + nbytes, next_optim + nbytes
    ahead = tiers.ahead and bool(place.weights) and comms.dp_replicate.size == 1
    needs = Needs(weights, optim, next_weights, next_optim) if ahead else Needs(weights, optim)
    spaces = open_space(needs) if Tier.DISK in (tiers.weights, tiers.optim) else Spaces()  # on all ranks or on none
    return Homes(tiers, device, spaces, lane, has_peers=comms.data.size > 1)


def unfreeze(unit: Unit, recipe: Recipe, slots: Slots) -> None:
    """Give a unit whose parameters were all frozen what training needs. Collective; all ranks unfreeze alike."""
    comms, layout = unit.comms, unit.layout
    dtypes = _trainable_dtypes(unit.dtypes.weights, recipe, comms)
    if not recipe.placement.grads:
        unit.memory.local = comms.dp.allocate([(layout.numel, dtypes.local)])[0]
    elif comms.dp_replicate.size > 1:
        unit.memory.replica = comms.dp_replicate.allocate([(unit.span[1] - unit.span[0], dtypes.grads)])[0]
    unit.start_training(dtypes)
    if recipe.placement.grads or dtypes.wire != dtypes.local:
        slots.ensure(dtypes.wire, layout.numel, lambda: comms.dp.allocate([(layout.numel, dtypes.wire)] * _NUM_SLOTS))


def _slots(layouts: Sequence[Layout], dtypes: Sequence[Dtypes], place: Placement, comm: Comm) -> Slots:
    longest: dict[torch.dtype, int] = {}
    for layout, of_unit in zip(layouts, dtypes, strict=True):
        if place.grads or of_unit.wire != of_unit.local:
            longest[of_unit.wire] = max(longest.get(of_unit.wire, 0), layout.numel)
    rings: dict[torch.dtype, list[Buffer]] = {}
    for dtype, numel in longest.items():
        rings[dtype] = comm.allocate([(numel, dtype)] * _NUM_SLOTS)
    return Slots(rings)

"""From a model to its units: group, lay out, allocate everything at once, move the parameters in.

Collective: every rank calls `build_units` with the same model and plan. All layouts are made before anything is allocated, so
an error leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn as nn

from slipstream.ops import wire
from slipstream.ops.wire import Feedback
from slipstream.world.mesh import Axis, Differs, Mesh
from slipstream.world.watch import Watch
from slipstream.zero import access, rows
from slipstream.zero.comm import Buffer, Comm, LocalComm, ProcessGroupComm
from slipstream.zero.gather import CodedGather, Gather, GroupGather, kept_by
from slipstream.zero.hooks import RingKey, Slots
from slipstream.zero.layout import Layout, flat_layout, whole_layout
from slipstream.zero.leaves import Leaf, cuts_of, kind_of, named_leaves, open_up, whole_shape
from slipstream.zero.materialize import FirstValues
from slipstream.zero.memory import Memory, fill, start_training
from slipstream.zero.placement import Placement, Tier, Tiers
from slipstream.zero.reduction import Coded, CodedTwice, wire_numel
from slipstream.zero.rows import block_of
from slipstream.zero.shared import SharedComm, SharedShard, hosts_agree
from slipstream.zero.storage.homes import Homes
from slipstream.zero.storage.lane import lane_of
from slipstream.zero.storage.store import Needs, Spaces, disk_nbytes
from slipstream.zero.unit import Comms, Dtypes, Unit
from slipstream.zero.wrap import Group, wrap


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The part of the plan that `build_units` uses."""

    placement: Placement
    weights_dtype: torch.dtype | None  # None: parameters keep their own
    master_dtype: torch.dtype
    grads_dtype: torch.dtype | None  # None: the gradient's own; fp32 if it accumulates
    wire_dtype: torch.dtype | None  # None: the gradient's own
    accumulates: bool  # more than one micro-batch per step, or an unknown number
    whole: bool  # the optimizer needs whole parameters, because it uses their shapes
    poison: bool  # debugging: released weights read as NaN, so they are not shared between ranks
    align: int  # parameters and shards start on multiples of this many elements
    tiers: Tiers
    state_itemsizes: tuple[int, ...]  # of a native optimizer's per-element states
    coded_weights: bool = False  # weights are gathered, or published, in codes
    coded_frozen: bool = False  # sharded frozen weights are stored and sent in codes
    feedback: float | None = None  # of gradients in codes: the weight of old errors in the new ones; None: no error feedback


def connect_axis(axis: Axis, device: torch.device, transport: str, watch: Watch) -> Comm:
    """Make the transport of one axis. `transport`: "auto" and "shared" use shared memory if all ranks of the axis share a host.

    Collective over the axis. Raises ValueError if `transport` is "shared" and shared memory is impossible.
    """
    if axis.group is None:  # one rank
        return LocalComm(axis, device)
    if device.type == "cpu" and transport != "gloo":
        if hosts_agree(axis):
            return SharedComm(axis, watch)
        if transport == "shared":
            raise ValueError(
                f'"slipstream": {{"transport": "shared"}} but the ranks {axis.ranks} cannot map each other\'s memory '
                f'(another host, container or user); use "auto"'
            )
    return ProcessGroupComm(axis, axis.group, device, watch)


def connect(
    mesh: Mesh, device: torch.device, transport: str, watch: Watch, *, gradient_bits: int | None = None
) -> tuple[Comm, Comm, dict[Differs, Comms]]:
    """Make the transports of all ranks, of the ranks that step together, and of each family. Collective over each axis, in the same
    order on all of its ranks.

    gradient_bits: communicate gradients in codes of this many bits. Groups (ZeRO++) have transports unless the shards share memory.

    Raises ValueError as `connect_axis` does.
    """

    def comm(axis: Axis) -> Comm:
        return connect_axis(axis, device, transport, watch)

    families: dict[Differs, Comms] = {}
    for key, family in sorted(mesh.families.items()):
        dp = comm(family.shards)
        replicate = comm(family.copies)
        data = dp if family.shards.ranks == family.both.ranks else comm(family.both)
        group = across = None
        coded: Coded | CodedTwice | None = None
        far = family.across
        if family.group is not None and far is not None and far.group is not None and isinstance(dp, ProcessGroupComm):
            group, across = comm(family.group), ProcessGroupComm(far, far.group, device, watch)
        if gradient_bits and dp.size > 1:
            coded = Coded(dp, family.weight, gradient_bits)
            coded = CodedTwice(group, across, coded) if group is not None and across is not None else coded
        families[key] = Comms(
            family=family, dp=dp, dp_replicate=replicate, data=data, weights=dp, coded=coded, group=group, across=across
        )
    by_ranks = {each.axis.ranks: each for each in (families[()].dp, families[()].data)}
    world = by_ranks.setdefault(mesh.world.ranks, by_ranks.get(mesh.world.ranks) or comm(mesh.world))
    return world, by_ranks.get(mesh.replica.ranks) or comm(mesh.replica), families


def _dtypes(group: Group, recipe: Recipe, comms: Comms, shapes: Sequence[Sequence[int]]) -> Dtypes:
    weights = group.dtype if group.exact else recipe.weights_dtype or group.dtype
    fits = recipe.placement.weights and not group.exact and weights.is_floating_point and weights.itemsize <= 4
    coded = fits and recipe.coded_weights and comms.dp.size > 1
    if group.trainable:
        return replace(_trainable_dtypes(weights, recipe, comms, group.kind, shapes), gathered_bits=8 if coded else None)
    rests = fits and recipe.coded_frozen
    bits = 8 if rests or coded else None
    return Dtypes(weights=weights, master=weights, wire=weights, grads=weights, gathered_bits=bits, rests=rests)


def _trainable_dtypes(weights: torch.dtype, recipe: Recipe, comms: Comms, kind: str, shapes: Sequence[Sequence[int]]) -> Dtypes:
    grads = recipe.grads_dtype or (torch.promote_types(weights, torch.float32) if recipe.accumulates else weights)
    if comms.dp_replicate.size > 1 and recipe.wire_dtype is not None:  # replicas all-reduce the stored gradients
        grads = torch.promote_types(grads, recipe.wire_dtype)
    wire = recipe.wire_dtype or (grads if not recipe.placement.grads else weights)
    # fp32 and wider weights are their own master
    master = weights if weights.itemsize >= recipe.master_dtype.itemsize else recipe.master_dtype
    row = block_of(shapes, recipe.align) if kind == "rows" and comms.dp.size > 1 else 0
    bits = None if row else _bits(comms, grads)
    sent = torch.uint8 if row or bits is not None else wire
    dtypes = Dtypes(weights=weights, master=master, wire=sent, grads=grads, wire_bits=bits, row=row, row_dtype=wire)
    return replace(dtypes, published_bits=8 if master != weights and _publishes_codes(recipe, comms) else None)


def _publishes_codes(recipe: Recipe, comms: Comms) -> bool:
    sends = comms.dp.size > 1 and not isinstance(comms.dp, SharedComm)
    return recipe.coded_weights and sends and recipe.placement.optim and not recipe.placement.weights


def _bits(comms: Comms, grads: torch.dtype) -> int | None:
    """The bits of a gradient's code, or None if the family does not send codes. Raises ValueError for float64."""
    if comms.coded is not None and grads.itemsize > 4:
        raise ValueError(
            f"gradients are communicated in codes of {comms.coded.bits} bits, which hold fp32, bf16 or fp16, but a parameter's are "
            f"{grads}: make the model float32, or drop communication_data_type and zero_quantized_gradients"
        )
    return None if comms.coded is None else comms.coded.bits


def _layout(group: Group, leaves: Mapping[str, Leaf], recipe: Recipe, num_shards: int) -> Layout:
    shapes = [(name, tuple(leaves[name].tensor.shape)) for name in group.param_names]
    if not recipe.whole:
        return flat_layout(shapes, num_shards, recipe.align)
    wholes = [whole_shape(leaves[name].whole, shape) if cuts_of(leaves[name].whole) else shape for name, shape in shapes]
    return whole_layout(shapes, num_shards, recipe.align, wholes)


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """The plan of a unit that is not built yet."""

    group: Group
    layout: Layout
    dtypes: Dtypes
    comms: Comms


def plan_units(groups: Sequence[Group], model: nn.Module, recipe: Recipe, families: Mapping[Differs, Comms]) -> list[UnitPlan]:
    """Lay out every group. Allocates nothing."""
    leaves = {leaf.name: leaf for leaf in named_leaves(model)}

    def plan(group: Group, comms: Comms) -> UnitPlan:
        layout = _layout(group, leaves, recipe, comms.data.size)
        dtypes = _dtypes(group, recipe, comms, [slot.shape for slot in layout.slots])
        return UnitPlan(group, layout, dtypes, replace(comms, weights=_gather(comms, recipe, dtypes)))

    return [plan(group, families[group.differs]) for group in groups]


def _gather(comms: Comms, recipe: Recipe, dtypes: Dtypes) -> Gather:
    """How the weights of a unit are gathered."""
    gather: Gather = comms.dp
    if recipe.placement.weights and comms.group is not None and comms.across is not None:
        gather = GroupGather(comms.group, comms.across)
    elif dtypes.rests and isinstance(comms.dp, SharedComm):
        gather = SharedShard(comms.dp)
    return gather if dtypes.gathered_bits is None else CodedGather(gather, exact=dtypes.rests)


def build_units(
    model: nn.Module,
    recipe: Recipe,
    world: Comm,
    families: Mapping[Differs, Comms],
    device: torch.device,
    open_space: Callable[[Needs], Spaces],
    values: FirstValues,
) -> tuple[list[Unit], Slots, Homes]:
    """Move every parameter of `model` into units; returns the units in layout order, the gradient rings and the state allocator.

    `open_space` makes the files of the disk tier before anything else is allocated; `values` initializes each block's parameters
    just before its units are built.
    """
    open_up(model)
    plans, tiers, lane = plan_units(wrap(model), model, recipe, families), recipe.tiers, lane_of(device)
    needs = disk_needs(plans, recipe, tiers.weights_kept, on_host=lane is None)
    spaces = open_space(needs) if Tier.DISK in (tiers.weights, tiers.optim) else Spaces()  # on all ranks or on none
    homes = Homes(tiers, device, spaces, lane, has_peers=families[()].data.size > 1)
    memories = allocate(recipe, homes, plans)
    slots = Slots(longest_on_wire([(plan.comms, plan.layout, plan.dtypes) for plan in plans if plan.group.trainable], recipe))
    blocks: dict[str, list[int]] = {"": []}  # the root comes first, even if it has no parameters
    for i, plan in enumerate(plans):
        blocks.setdefault(plan.group.module_name, []).append(i)
    values.begin(blocks)
    units = []
    for block, indices in blocks.items():
        units += build_block(recipe, homes, values, block, [(i, plans[i], memories[i]) for i in indices])
    values.finish()
    world.exchange(torch.zeros(1, dtype=torch.float64))  # barrier: all ranks have written the common weights
    access.register(units)
    return units, slots, homes


def allocate(recipe: Recipe, homes: Homes, plans: Sequence[UnitPlan]) -> list[Memory]:
    """Allocate the communication buffers of all units, family by family. Collective."""
    memories = [Memory(poison=recipe.poison) for _ in plans]
    by_family: dict[Differs, list[int]] = {}
    for i, plan in enumerate(plans):
        by_family.setdefault(plan.group.differs, []).append(i)
    for _, indices in sorted(by_family.items()):
        _allocate(recipe, plans[indices[0]].comms, indices, plans, memories, homes)
    return memories


def _allocate(
    recipe: Recipe, comms: Comms, indices: list[int], plans: Sequence[UnitPlan], memories: Sequence[Memory], homes: Homes
) -> None:
    """Allocate the buffers of the units with these indices, which are of one family."""
    place = recipe.placement

    def assign(name: str, chosen: list[int], buffers: list[Buffer] | None) -> None:
        for i, buffer in zip(chosen, buffers or [], strict=False):
            setattr(memories[i], name, buffer)

    in_place = recipe.tiers.weights is Tier.DEVICE or (recipe.tiers.weights is Tier.HOST and homes.lane is None)
    weights = [(plans[i].layout.numel, plans[i].dtypes.weights) for i in indices]
    _allocate_codes(comms, [i for i in indices if plans[i].dtypes.rests], plans, memories)
    if place.weights and not recipe.poison and in_place:
        plain = [i for i in indices if not plans[i].dtypes.rests]
        assign("common", plain, comms.dp.allocate_common([weights[indices.index(i)] for i in plain]))
    elif not place.weights:
        assign("full", indices, comms.dp.allocate(weights))
    if place.weights and comms.group is not None:
        _allocate_kept(comms.group, indices, plans, memories)
    trainable = [(memories[i], plans[i].layout, plans[i].dtypes) for i in indices if plans[i].group.trainable]
    _allocate_gradients(recipe, comms, trainable, homes.device)


def _allocate_gradients(recipe: Recipe, comms: Comms, units: Sequence[tuple[Memory, Layout, Dtypes]], device: torch.device) -> None:
    """Allocate the buffers of trainable units of one family. Collective."""

    def zeros(numel: int) -> Feedback:
        return Feedback(torch.zeros(wire.nbytes(numel, 8), dtype=torch.uint8, device=device), recipe.feedback or 0.0)

    spans = [stop - start for start, stop in (layout.span(comms.dp.size, comms.dp.index) for _, layout, _ in units)]
    if not recipe.placement.grads:
        buffers = comms.dp.allocate([(layout.numel, dtypes.grads) for _, layout, dtypes in units])
        for (memory, _, _), buffer in zip(units, buffers, strict=True):
            memory.local = buffer
    if comms.dp_replicate.size > 1:
        buffers = comms.dp_replicate.allocate([(span, dtypes.grads) for (_, _, dtypes), span in zip(units, spans, strict=True)])
        for (memory, _, _), buffer in zip(units, buffers, strict=True):
            memory.replica = buffer
    for (memory, layout, dtypes), span in zip(units, spans, strict=True):
        if recipe.feedback is not None and dtypes.wire_bits is not None:
            memory.feedback = zeros(layout.numel)
            memory.served = None if recipe.placement.optim else zeros(span)


def _allocate_codes(comms: Comms, indices: list[int], plans: Sequence[UnitPlan], memories: Sequence[Memory]) -> None:
    spans = [plans[i].layout.span(comms.dp.size, comms.dp.index) for i in indices]
    buffers = comms.dp.allocate([(wire.nbytes(stop - start, 8), torch.uint8) for start, stop in spans])
    for i, buffer in zip(indices, buffers, strict=True):
        memories[i].codes, gather = buffer, plans[i].comms.weights
        if isinstance(gather, CodedGather) and isinstance(gather.over, SharedShard):
            gather.over.shard = buffer


def _allocate_kept(group: Comm, indices: list[int], plans: Sequence[UnitPlan], memories: Sequence[Memory]) -> None:
    chosen = [plans[i] for i in indices]
    kept = [kept_by(plan.comms.weights, plan.layout.shards(plan.comms.dp.size), plan.dtypes.weights) for plan in chosen]
    buffers = group.allocate([(numel, dtype) for _, numel, dtype in kept])
    for i, (gather, _, _), buffer in zip(indices, kept, buffers, strict=True):
        gather.kept = memories[i].kept = buffer


def build_block(
    recipe: Recipe, homes: Homes, values: FirstValues, block: str, parts: Sequence[tuple[int, UnitPlan, Memory]]
) -> list[Unit]:
    """Build the units of one block from (index, plan, memory) each, and free their initial values. Collective."""
    plans = [plan for _, plan, _ in parts]
    firsts = values.of_block(block, [(plan.group, plan.layout, plan.comms.data) for plan in plans])
    units = []
    for (i, plan, memory), first in zip(parts, firsts, strict=True):
        group, module = plan.group, values.modules[block] if block else None
        leaves = [values.leaves[name] for name in group.param_names]
        unit = Unit(group.name, i, module, leaves, plan.layout, recipe.placement, plan.dtypes, plan.comms, memory, homes)
        fill(unit, first)
        if group.trainable:
            start_training(unit, plan.dtypes)
        unit.release()  # the initial values are in the shards, not in the gathered memory
        units.append(unit)
    values.close_reader()
    return units


def disk_needs(plans: Sequence[UnitPlan], recipe: Recipe, to_keep: int, *, on_host: bool) -> Needs:
    """Bytes of this rank's files for these units. to_keep: number of weight elements that stay in memory."""
    tiers, place = recipe.tiers, recipe.placement
    grads_tier = tiers.grads(on_host=on_host)
    weights = optim = 0
    for plan in plans:
        dtypes, comms = plan.dtypes, plan.comms
        start, stop = plan.layout.span(comms.dp.size, comms.dp.index)
        shard = stop - start
        if tiers.weights is Tier.DISK:
            kept = min(shard, to_keep)
            to_keep -= kept
            weights += disk_nbytes(shard, dtypes.weights.itemsize, kept)
        if not plan.group.trainable:
            continue
        if place.grads and grads_tier is Tier.DISK and comms.dp_replicate.size == 1:
            optim += disk_nbytes(shard, dtypes.grads.itemsize)
        if tiers.optim is Tier.DISK:
            numel = shard if place.optim else plan.layout.numel
            master = [dtypes.master.itemsize] if dtypes.master != dtypes.weights else []
            optim += sum(disk_nbytes(numel, item, round(numel * tiers.kept)) for item in [*master, *recipe.state_itemsizes])
    return Needs(weights, optim)


def unfreeze(unit: Unit, recipe: Recipe, slots: Slots) -> None:
    """Allocate gradients and masters for a unit whose parameters were all frozen. Collective."""
    comms, layout = unit.comms, unit.layout
    if unit.dtypes.rests:
        raise ValueError(
            f"{unit.names[0]!r} and its neighbors were frozen and are stored in codes of 8 bits, which cannot be trained: drop "
            "zero_optimization.zero_quantized_nontrainable_weights, or set requires_grad inside `with engine.surgery():`"
        )
    kind, shapes = kind_of(unit.model_params[0]), [slot.shape for slot in layout.slots]
    dtypes = _trainable_dtypes(unit.dtypes.weights, recipe, comms, kind, shapes)
    _allocate_gradients(recipe, comms, [(unit.memory, layout, dtypes)], unit.homes.device)
    start_training(unit, dtypes)
    if uses_ring(recipe, dtypes):
        slots.ensure((comms.reduction(dtypes).comm, dtypes.wire), numel_on_wire(layout.numel, dtypes, comms.dp.size))


def uses_ring(recipe: Recipe, dtypes: Dtypes) -> bool:
    """Whether gradients of a trainable unit pass through a ring of buffers."""
    return recipe.placement.grads or dtypes.wire != dtypes.grads


def numel_on_wire(numel: int, dtypes: Dtypes, ranks: int) -> int:
    """Elements of a buffer that carries the gradients of a unit of `numel` elements between `ranks` ranks."""
    if dtypes.row:
        itemsize = max(dtypes.row_dtype.itemsize, dtypes.grads.itemsize)  # replicated gradients get the sums back through it
        return rows.wire_nbytes(numel, dtypes.row, itemsize, ranks)
    return wire_numel(numel, dtypes.wire_bits)


def longest_on_wire(parts: Iterable[tuple[Comms, Layout, Dtypes]], recipe: Recipe) -> dict[RingKey, int]:
    """For each transport and dtype whose gradients pass through a ring: the number of elements of the largest trainable unit."""
    longest: dict[RingKey, int] = {}
    for comms, layout, dtypes in parts:
        if uses_ring(recipe, dtypes):
            key = comms.reduction(dtypes).comm, dtypes.wire
            longest[key] = max(longest.get(key, 0), numel_on_wire(layout.numel, dtypes, comms.dp.size))
    return longest

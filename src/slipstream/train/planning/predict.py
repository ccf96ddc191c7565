"""Predict a configuration's needs before it runs: peak memory, traffic per step, step time and its bottleneck.

Bytes are per rank. `explain.py` provides the parts (of an engine, or of a model on meta). `count` allocates their states without
memory, with the code that allocates an engine's. `train/planning/dry_run.py` measures a micro-batch's activations and compute.

part     a unit (zero/unit.py): parameters that are gathered together
stored   a part's states in stores without memory, and the chunks in which the optimizer updates them
moment   a period of a micro-batch in which one block computes
flow     bytes over each link: between ranks, to and from the host (CUDA), from and to the disk
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from slipstream.config.plan import Plan
from slipstream.ops import onebit
from slipstream.ops import wire as wire_codes
from slipstream.optim.native import Form, cut
from slipstream.optim.rounds import Round, Rounds
from slipstream.train.updater import IN_FLIGHT
from slipstream.world.mesh import Differs
from slipstream.zero.build import Recipe, numel_on_wire, uses_ring
from slipstream.zero.hooks import NUM_BUFFERS
from slipstream.zero.placement import Tier
from slipstream.zero.storage.homes import Homes
from slipstream.zero.storage.lane import Lane
from slipstream.zero.storage.store import (
    CodedStore,
    DiskStore,
    HostStore,
    MemoryStore,
    Space,
    Spaces,
    Store,
    disk_nbytes,
    range_nbytes,
)
from slipstream.zero.storage.stream import StateChunk, StateUse
from slipstream.zero.unit import Dtypes

META = torch.device("meta")


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedPart:
    """A unit's sizes and dtypes."""

    name: str
    block: str  # the module that gathers it; "": the root, which stays gathered during the whole pass
    trainable: bool
    numel: int
    span: int  # this rank's share
    ranks: int  # number of ranks that share one copy of the states
    copies: int  # number of copies of the states (MiCS)
    dtypes: Dtypes
    differs: Differs  # its family
    kind: str = ""  # of zero.leaves.keep_apart: optimizers that exchange signs reduce its gradients as they are

    @property
    def has_master(self) -> bool:
        return self.dtypes.master != self.dtypes.weights

    @property
    def weights_nbytes(self) -> int:
        """Bytes of the gathered weights."""
        return self.numel * self.dtypes.weights.itemsize

    @property
    def wire_nbytes(self) -> int:
        """Bytes of a buffer for the gradients that are reduced."""
        return numel_on_wire(self.numel, self.dtypes, self.ranks) * self.dtypes.wire.itemsize

    def sent_nbytes(self, numel: int) -> int:
        """Bytes sent for `numel` gradients; rows (sparse embeddings) count as if all had values."""
        bits, dtype = self.dtypes.wire_bits, self.dtypes.row_dtype if self.dtypes.row else self.dtypes.wire
        return numel * dtype.itemsize if bits is None else wire_codes.nbytes(numel, bits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The training setup of the parts."""

    plan: Plan
    recipe: Recipe
    on_host: bool  # the device is the host: one memory
    shared: bool  # shared memory between ranks: nothing is sent, and sharded weights are one mapping
    num_moments: int
    streams: bool  # the optimizer has a native kernel, which works on chunks
    replicas: int = 1  # number of replicas that step on their own (train/local_steps.py)
    rounds: Rounds | None = None  # set if the optimizer exchanges signs

    @property
    def host(self) -> Tier:
        return Tier.DEVICE if self.on_host else Tier.HOST

    def owned(self, part: PredictedPart) -> int:
        """Elements that this rank's optimizer updates."""
        return part.span if self.recipe.placement.optim else part.numel

    def sends(self, part: PredictedPart) -> bool:
        return part.ranks > 1 and not self.shared

    def num_groups(self, part: PredictedPart) -> int:
        """The number of groups of ranks that each hold a part's states (ZeRO++)."""
        size = self.plan.zero.group_size or part.ranks
        return part.ranks // size if self.sends(part) and part.ranks % size == 0 else 1

    def gathered_nbytes(self, part: PredictedPart, numel: int) -> int:
        """Bytes of `numel` weights in the form in which they are gathered."""
        bits = part.dtypes.gathered_bits
        return numel * part.dtypes.weights.itemsize if bits is None else wire_codes.nbytes(numel, bits)

    def kept_nbytes(self, part: PredictedPart) -> int:
        """Bytes of other groups' weights that a rank keeps (hpZ)."""
        groups = self.num_groups(part)
        return self.gathered_nbytes(part, part.numel * groups // part.ranks) if groups > 1 and self.recipe.placement.weights else 0


class Moment(NamedTuple):
    """Peak bytes of live tensors while one block computes, for one micro-batch."""

    phase: str  # "forward" or "backward"
    block: str  # "": the root's own modules
    activations: int  # saved for backward, temporaries, and the gradient in progress
    with_grads: int  # the same plus `.grad` of parts whose gradients are incomplete


class ComputeWork(NamedTuple):
    """The compute of one phase of one micro-batch."""

    flops: int
    nbytes: int  # read and written by all operations except matrix products


class Profile(NamedTuple):
    """One micro-batch of a model, by `dry_run`."""

    moments: tuple[Moment, ...]  # in time order
    forward: ComputeWork
    backward: ComputeWork
    dtype: str  # of most matrix products, by torch's name; relative speeds differ by 100 times between processors


def stated(parts: Sequence[PredictedPart], activations: int) -> Profile:
    """The profile of a model without a dry run: the user states the bytes of activations per micro-batch; compute is unknown."""
    own = {part.name: part.weights_nbytes if part.trainable else 0 for part in parts}
    root = sum(own[part.name] for part in parts if not part.block)
    moments = [
        Moment("backward", part.block, activations, activations + root + (own[part.name] if part.block else 0)) for part in parts
    ]
    return Profile(tuple(moments), ComputeWork(0, 0), ComputeWork(0, 0), "float32")


# -- where states are stored --


class CountingLane(Lane):
    """Allocates host memory that is never used."""

    def memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=META)

    now: Any = None  # a forecast copies nothing
    copy: Any = None
    behind: Any = None
    close: Any = None


class PredictedStates(NamedTuple):
    """A part's states in stores without memory."""

    part: PredictedPart
    weights: Store
    grads: Store | None  # None: the part is frozen
    optim: Mapping[str, Store]  # masters, if the weights are not their own, and moments
    chunks: Sequence[StateChunk]  # of the optimizer

    @property
    def states(self) -> Iterator[tuple[str, str, Store]]:
        """Yield (kind of state, name, store)."""
        yield "weights", "weights", self.weights
        if self.grads is not None:
            yield "gradients", "gradients", self.grads
        for name, store in self.optim.items():
            yield "optimizer", "masters" if name == "master" else "moments", store

    @property
    def uses(self) -> Iterator[tuple[StateChunk, StateUse]]:
        """Each chunk with each state that a step uses."""
        return ((chunk, use) for chunk in self.chunks for use in chunk.uses.values())


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The prediction for a run: all parts' states, in the stores that an engine would make, and what follows from them.

    `peak` and `times` are None if the activations are not known, `times` also without rates.
    """

    setting: Setting
    states: Sequence[PredictedStates]
    homes: Homes
    profile: Profile | None = None
    rates: Rates | None = None

    @classmethod
    def of(
        cls, parts: Sequence[PredictedPart], setting: Setting, profile: Profile | None = None, rates: Rates | None = None
    ) -> Forecast:
        """Allocate the states of the parts as an engine does, on meta and in files that do not exist."""
        space = Space(_no_file, 1 << 62)
        homes = Homes(setting.recipe.tiers, META, Spaces(space, space), None if setting.on_host else CountingLane())
        with META:  # the resident heads of states on disk
            states = [_store(part, setting, homes) for part in parts]
        return cls(setting=setting, states=states, homes=homes, profile=profile, rates=rates)

    @property
    def parts(self) -> list[PredictedPart]:
        return [stored.part for stored in self.states]

    @property
    def trained(self) -> list[PredictedPart]:
        return [part for part in self.parts if part.trainable]

    @cached_property
    def rest(self) -> tuple[Line, ...]:
        """Memory that is used at any time."""
        setting = self.setting
        totals: Counter[tuple[str, str, Tier]] = Counter()
        rings: dict[tuple[Differs, torch.dtype], int] = {}
        for stored in self.states:
            part = stored.part
            for state, what, store in stored.states:
                totals[state, what, Tier.DISK] += _on_disk(store)
                totals[state, what, Tier.DEVICE if type(store) in (MemoryStore, CodedStore) else setting.host] += (
                    store.resident_nbytes
                )
            totals["weights", "kept of other groups", Tier.DEVICE] += setting.kept_nbytes(part)
            if part.trainable and uses_ring(setting.recipe, part.dtypes):
                key = part.differs, part.dtypes.wire  # one ring each, with buffers for the longest part
                rings[key] = max(rings.get(key, 0), part.wire_nbytes)
        if Form(dtype=setting.plan.precision.state_dtype).coded:
            scales = sum(-(-setting.owned(part) // 256) * 4 for part in self.trained)
            tier = Tier.DEVICE if setting.recipe.tiers.optim is Tier.DEVICE else setting.host
            totals["optimizer", "scales of 8-bit moments", tier] = setting.num_moments * scales
        chunk = max((chunk.nbytes() for stored in self.states for chunk in stored.chunks), default=0) if setting.streams else 0
        to_disk = setting.recipe.tiers.grads(on_host=setting.on_host) is Tier.DISK
        totals["buffers", "ring of gradients to other ranks", Tier.DEVICE] = NUM_BUFFERS * sum(rings.values())
        totals["buffers", "ring of the optimizer's chunks", setting.host] = setting.plan.offload.num_buffers * chunk
        totals["buffers", f"ring of gradients to the {'disk' if to_disk else 'host'}", Tier.DEVICE] = self.homes.nbytes
        return tuple(Line(*key, nbytes) for key, nbytes in totals.items() if nbytes)

    @cached_property
    def peak(self) -> Peak | None:
        return None if self.profile is None else peak(self, self.profile)

    @property
    def flow(self) -> Flow:
        """Traffic of one step; of a dense step, if the optimizer exchanges signs in other steps."""
        return self.flow_of(Round.DENSE)

    def flow_of(self, kind: Round) -> Flow:
        return traffic(self, kind).step(self.setting.plan.batch.accumulation)

    @property
    def later(self) -> dict[Round, Flow]:
        """Traffic of the other kinds of steps that the optimizer takes."""
        rounds = self.setting.rounds
        kinds = () if rounds is None else (Round.SIGNS, Round.LOCAL) if rounds.longest > 1 else (Round.SIGNS,)
        return {kind: self.flow_of(kind) for kind in kinds}

    @cached_property
    def times(self) -> Times | None:
        return None if self.profile is None or self.rates is None else times(self, self.profile, self.rates)


def _no_file(nbytes: int) -> Any:
    return None


def _store(part: PredictedPart, setting: Setting, homes: Homes) -> PredictedStates:
    """Allocate one part's states, as zero/unit.py and optim/native.py do."""
    place, dtypes, owned, plan = setting.recipe.placement, part.dtypes, setting.owned(part), setting.plan

    def memory(numel: int, dtype: torch.dtype) -> Store:
        return MemoryStore(torch.empty(numel, dtype=dtype, device=META))

    codes = torch.empty(wire_codes.nbytes(part.span, 8), dtype=torch.uint8, device=META) if dtypes.rests else None
    sharded = homes.weights(part.span, dtypes.weights, codes) if place.weights else None
    weights = sharded or memory(part.numel, dtypes.weights)
    if not part.trainable:
        return PredictedStates(part, weights, None, {}, ())
    if place.grads and part.copies == 1:
        grads = homes.gradients(part.span, dtypes.grads)
    else:
        grads = memory(part.span if place.grads else part.numel, dtypes.grads)
    moments = {f"moment {i}": homes.state(owned, plan.precision.state_dtype) for i in range(setting.num_moments)}
    masters = {"master": homes.state(owned, dtypes.master)} if part.has_master else {}
    own = sharded or memory(owned, dtypes.weights)
    most = owned if setting.recipe.whole else plan.offload.chunk_numel
    chunks = cut(homes, moments, masters.get("master", own), grads, own if masters else None, most)
    return PredictedStates(part, weights, grads, {**masters, **moments}, chunks)


def _on_disk(store: Store) -> int:
    return disk_nbytes(store.numel, store.dtype.itemsize, store.head.numel()) if isinstance(store, DiskStore) else 0


def _on_host(store: Store) -> int:
    """Bytes in host memory, if the device has a memory of its own."""
    return store.nbytes if isinstance(store, HostStore) else 0


# -- memory --


class Line(NamedTuple):
    """Bytes of one kind of memory."""

    state: str  # weights, gradients, optimizer, activations, buffers
    what: str
    tier: Tier
    nbytes: int


class Peak(NamedTuple):
    """The moment of a step with the highest memory use."""

    lines: tuple[Line, ...]
    when: str

    def total(self, *tiers: Tier) -> int:
        return sum(line.nbytes for line in self.lines if line.tier in tiers)

    @property
    def memory(self) -> int:
        """Bytes on device and host together: the memory of a process if the device is the host."""
        return self.total(Tier.DEVICE, Tier.HOST)


def peak(forecast: Forecast, profile: Profile) -> Peak:
    """Peak memory of a step: the permanent memory, and the maximum over forward, backward, settle and update."""
    moments = [*_computing(forecast, profile), *_stepping(forecast)]
    lines, when = max(moments, key=lambda moment: sum(line.nbytes for line in moment[0]))
    return Peak((*forecast.rest, *(line for line in lines if line.nbytes)), when)


def _computing(forecast: Forecast, profile: Profile) -> Iterator[tuple[list[Line], str]]:
    setting, trained = forecast.setting, forecast.trained
    sharded = setting.recipe.placement.grads
    # without shared memory, a reduce-scatter of a part receives every rank's share of it
    received = max((part.wire_nbytes for part in trained if sharded and setting.sends(part)), default=0)
    for i, moment in enumerate(profile.moments):
        gradients = moment.with_grads - moment.activations if sharded else 0
        lines = [
            Line("activations", "activations and temporaries", Tier.DEVICE, moment.activations),
            Line("gradients", "of units that are in backward", Tier.DEVICE, gradients),
            Line("buffers", "gathered weights", Tier.DEVICE, _gathered(forecast, profile.moments[i:])),
        ]
        if moment.phase == "backward":
            lines.append(Line("buffers", "received gradients", Tier.DEVICE, received))
        yield lines, f"{moment.phase} of {moment.block or 'the root'}"


def _gathered(forecast: Forecast, moments: Sequence[Moment]) -> int:
    """Bytes of gathered weights: the root's, those of the block that computes, and those of the next one, prefetched."""
    setting, phase, block = forecast.setting, moments[0].phase, moments[0].block
    is_resident = setting.recipe.tiers.weights in (Tier.DEVICE, Tier.HOST if setting.on_host else Tier.DEVICE)
    is_common = setting.shared and not setting.recipe.poison and is_resident  # all ranks read the shards in shared memory
    if not setting.recipe.placement.weights:
        return 0
    following = next((each.block for each in moments[1:] if each.block not in ("", block) and each.phase == phase), "")
    nbytes = 0
    for part in forecast.parts:
        if is_common and not part.dtypes.rests:
            continue
        if part.block in {"", block, following}:
            nbytes += part.weights_nbytes
        if part.block == following and part.ranks > 1 and not is_resident:
            nbytes += part.span * part.dtypes.weights.itemsize  # this rank's share is read into a buffer
    return nbytes


def _stepping(forecast: Forecast) -> Iterator[tuple[list[Line], str]]:
    """Between the last backward and the next forward."""
    setting, trained = forecast.setting, forecast.trained
    place, sending = setting.recipe.placement, [part for part in trained if setting.sends(part)]
    if sending and not place.grads:  # gloo's two threads fill a part each while a third is summed
        received = sum(sorted(part.wire_nbytes for part in sending)[-3:])
        yield [Line("buffers", "received gradients", Tier.DEVICE, received)], "settle"
    if sending and place.optim and not place.weights:
        plain, coded = ([part for part in sending if (part.dtypes.published_bits is None) is exact] for exact in (True, False))
        sent = sum(part.span * part.dtypes.weights.itemsize for part in plain)
        codes = sorted(wire_codes.nbytes(part.numel, part.dtypes.published_bits or 0) for part in coded)
        sent += sum(codes[-1 - IN_FLIGHT :])  # received for whole parts
        yield [Line("buffers", "weights being sent", Tier.DEVICE, sent)], "publish"
    temporary = 0
    if not setting.streams:  # a torch optimizer gets a part's gradients in the masters' dtype and needs as much for temporaries
        temporary = 2 * max((setting.owned(part) * part.dtypes.master.itemsize for part in trained), default=0)
    yield [Line("buffers", "optimizer's temporaries", Tier.DEVICE, temporary)], "update"


# -- traffic --


class Flow(NamedTuple):
    """Bytes over each link."""

    wire: int = 0  # sent to other ranks
    to_host: int = 0  # from the device, if it is not the host
    to_device: int = 0
    disk_read: int = 0
    disk_written: int = 0

    def plus(self, other: Flow, times: int = 1) -> Flow:
        return Flow(*(a + b * times for a, b in zip(self, other, strict=True)))


class Flows(NamedTuple):
    forward: Flow = Flow()  # of each micro-batch
    backward: Flow = Flow()  # of each micro-batch
    again: Flow = Flow()  # of each micro-batch but the first: accumulated gradients return to be added to
    update: Flow = Flow()  # once a step

    def step(self, accumulation: int) -> Flow:
        micro = self.forward.plus(self.backward)
        return self.update.plus(micro, accumulation).plus(self.again, accumulation - 1)


def traffic(forecast: Forecast, kind: Round = Round.DENSE) -> Flows:
    """Exact bytes over each link: a part's weights move twice a micro-batch, its gradients once, its states once a step.

    Rows count as if all had values. kind: the kind of step, if the optimizer exchanges signs.
    """
    flows = [_flows(stored, forecast, kind) for stored in forecast.states]
    return Flows(*(functools.reduce(Flow.plus, phase, Flow()) for phase in zip(Flows(), *flows, strict=True)))


def round_nbytes(forecast: Forecast) -> int:
    """Bytes that a rank sends in a round of local steps: the differences of its span, and its part of their mean."""
    setting, total = forecast.setting, 0
    exchange = setting.plan.local_steps.exchange
    bits, itemsize = {"int8": 8, "int4": 4}.get(exchange), {"bf16": 2}.get(exchange, 4)
    for part in (stored.part for stored in forecast.states if stored.grads is not None):
        own = -(-part.span // (setting.replicas * wire_codes.WIRE_BLOCK)) * wire_codes.WIRE_BLOCK
        total += 2 * (setting.replicas - 1) * (own * itemsize if bits is None else wire_codes.nbytes(own, bits))
    return 0 if setting.shared else total


def _flows(stored: PredictedStates, forecast: Forecast, kind: Round) -> Flows:
    part, weights, setting = stored.part, stored.weights, forecast.setting
    place, sent, gather, crossing = setting.recipe.placement, _ring(part.numel, part.ranks, setting), Flow(), 0
    groups = setting.num_groups(part)
    within, across = part.numel - part.numel * groups // part.ranks, part.numel * (groups - 1) // part.ranks
    if place.weights:
        moved = sent if groups == 1 else within
        gather = Flow(wire=setting.gathered_nbytes(part, moved), to_device=_on_host(weights), disk_read=_on_disk(weights))
        crossing = setting.gathered_nbytes(part, across)
    if stored.grads is None:
        return Flows(gather, gather)
    update = _update(stored, forecast).plus(Flow(wire=crossing))
    if kind is Round.LOCAL or (kind is Round.SIGNS and not part.kind):
        signs = 0 if kind is Round.LOCAL else 2 * _ring(onebit.nbytes(part.numel), part.ranks, setting)  # there and back
        return Flows(gather, gather, Flow(), update.plus(Flow(wire=signs)))
    wire = part.sent_nbytes(sent if groups == 1 or part.dtypes.wire_bits is None else within + across)
    if place.grads:
        away, on_disk = _on_host(stored.grads), _on_disk(stored.grads)
        backward = gather.plus(Flow(wire=wire, to_host=away, disk_written=on_disk))
        return Flows(gather, backward, Flow(to_device=away, disk_read=on_disk), update)
    # replicated gradients are reduced once a step; if the optimizer is replicated, too, all ranks receive the sums
    back = sent * part.dtypes.grads.itemsize
    if part.dtypes.wire_bits is not None:
        back = wire_codes.nbytes(sent, 8 if setting.recipe.feedback is None else part.dtypes.wire_bits)
    wire_nbytes = wire if place.optim else wire + back
    return Flows(gather, gather, Flow(), update.plus(Flow(wire=wire_nbytes)))


def _update(stored: PredictedStates, forecast: Forecast) -> Flow:
    """Traffic once a step, except of gradients that are reduced then."""
    part, setting = stored.part, forecast.setting
    place = setting.recipe.placement
    flow = Flow(wire=2 * _ring(part.span, part.copies, setting) * part.dtypes.grads.itemsize)
    if place.optim and not place.weights:  # publish
        moved, bits = _ring(part.numel, part.ranks, setting), part.dtypes.published_bits
        flow = flow.plus(Flow(wire=moved * part.dtypes.weights.itemsize if bits is None else wire_codes.nbytes(moved, bits)))
    for chunk, use in stored.uses:
        numel, itemsize = chunk.stop - chunk.start, use.store.dtype.itemsize
        if use.store.is_away(chunk.start, chunk.stop):
            nbytes = range_nbytes(numel, itemsize)
            flow = flow.plus(Flow(disk_read=nbytes * use.read, disk_written=nbytes * use.write))
        elif use.lane is not None:
            flow = flow.plus(Flow(to_host=numel * itemsize * use.read, to_device=numel * itemsize * use.write))
    return flow


def _ring(numel: int, size: int, setting: Setting) -> int:
    """The number of elements that a rank sends in a ring of `size` ranks."""
    return 0 if setting.shared else numel * (size - 1) // size


# -- time --


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """A rank's share of each resource, per second. The rate of an unused link may be any number above 0."""

    flops: float
    memory: float  # bytes read and written
    wire: float = 1.0
    host: float = 1.0  # between device and host, each way
    disk_read: float = 1.0
    disk_write: float = 1.0


class Cost(NamedTuple):
    """The use of one resource in a step."""

    resource: str
    amount: float  # FLOP for compute, else bytes
    seconds: float


class Times(NamedTuple):
    costs: tuple[Cost, ...]
    seconds: float  # of the step, overlapped as the engine overlaps it

    @property
    def limit(self) -> str:
        """The bottleneck: the resource that is busy longest."""
        return max(self.costs, key=lambda cost: cost.seconds).resource


def times(forecast: Forecast, profile: Profile, rates: Rates) -> Times:
    """Predict the time of a step and the busy time of each resource.

    Disk and host links overlap compute, and reads overlap writes. Collectives do not overlap (gloo's use the CPU). If weights are
    sharded and states stream from disk or are on the host, the update also overlaps the next forward (train/updater.py: Updater).
    If both run on the CPU, only the update's waiting time is hidden.
    """
    setting, flows = forecast.setting, traffic(forecast)
    k = setting.plan.batch.accumulation
    step, updated = flows.step(k), _update_nbytes(forecast)
    compute = {
        "forward": profile.forward.flops / rates.flops + profile.forward.nbytes / rates.memory,
        "backward": profile.backward.flops / rates.flops + profile.backward.nbytes / rates.memory,
    }

    def moved(flow: Flow) -> float:
        """Seconds of the slowest link that overlaps compute."""
        return max(
            flow.to_host / rates.host,
            flow.to_device / rates.host,
            flow.disk_read / rates.disk_read,
            flow.disk_written / rates.disk_write,
        )

    forward = max(compute["forward"], moved(flows.forward)) + flows.forward.wire / rates.wire
    backward = max(compute["backward"], moved(flows.backward)) + flows.backward.wire / rates.wire
    later = max(compute["backward"], moved(flows.backward.plus(flows.again))) + flows.backward.wire / rates.wire
    update = max(updated / rates.memory, moved(flows.update)) + flows.update.wire / rates.wire
    streams = setting.recipe.placement.weights and (
        flows.update.disk_read or flows.update.disk_written or forecast.homes.steps_on_host
    )
    hidden = min(forward, update - (updated / rates.memory if setting.on_host else 0.0)) if streams else 0.0
    flops = k * (profile.forward.flops + profile.backward.flops)
    costs = (
        Cost("compute", flops, k * (compute["forward"] + compute["backward"])),
        Cost("memory (optimizer)", updated, updated / rates.memory),
        Cost("wire", step.wire, step.wire / rates.wire),
        Cost("device to host", step.to_host, step.to_host / rates.host),
        Cost("host to device", step.to_device, step.to_device / rates.host),
        Cost("disk read", step.disk_read, step.disk_read / rates.disk_read),
        Cost("disk write", step.disk_written, step.disk_written / rates.disk_write),
    )
    used = tuple(cost for cost in costs if cost.amount or cost.resource == "compute")
    return Times(used, k * forward + backward + (k - 1) * later + update - hidden)


def _update_nbytes(forecast: Forecast) -> int:
    """Bytes that the optimizer reads and writes: gradients in, masters and moments in and out, weights out."""
    uses = (each for stored in forecast.states for each in stored.uses)
    return sum((chunk.stop - chunk.start) * use.store.dtype.itemsize * (use.read + use.write) for chunk, use in uses)

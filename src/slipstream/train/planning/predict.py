"""Predict a configuration's needs before it runs: peak memory, traffic per step, step time and its bottleneck.

Pure functions of plain numbers; bytes are per rank. `explain.py` provides the sizes (of an engine, or of a model on meta),
`train/planning/dry_run.py` measures a micro-batch's activations and compute.

part     a unit (zero/unit.py): parameters that are gathered together
state    one flat array of a part: its weights, gradients, master, or a moment of the optimizer
moment   a period of a micro-batch in which one block computes
flow     bytes over each link: between ranks, to and from the host (CUDA), from and to the disk
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from slipstream.zero.placement import Placement, Tier, Tiers
from slipstream.zero.storage.store import disk_nbytes, range_nbytes

_GRADIENT_BUFFERS = (
    2  # of each ring of gradients: one fills while the other is summed (zero/build.py) or written (zero/storage/homes.py)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A unit's sizes: numbers of elements, and bytes per element."""

    name: str
    block: str  # the module that gathers it; "": the root, which stays gathered during the whole pass
    trainable: bool
    numel: int
    span: int  # this rank's share
    weights: int
    master: int  # equal to `weights` if the weights are their own masters
    local: int  # gradients before the reduction; they persist if gradients are replicated
    wire: int  # gradients on the wire
    grads: int  # gradients after the reduction
    casts: bool  # whether the wire's dtype differs from the local one

    @property
    def has_master(self) -> bool:
        return self.master != self.weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The training setup of the parts."""

    placement: Placement
    tiers: Tiers
    on_host: bool  # the device is the host: one memory
    ranks: int  # that share one copy of the states
    copies: int  # of the states (MiCS)
    shared: bool  # shared memory between ranks: nothing is sent, and sharded weights are one mapping
    poison: bool  # debugging: gathered weights have their own memory even with shared memory
    moments: tuple[int, ...]  # bytes per element of each optimizer state
    coded: bool  # moments are 8-bit codes, with a scale per 256 values in memory
    streams: bool  # the optimizer has a native kernel, which works on chunks
    chunk_numel: int
    num_buffers: int
    accumulation: int

    @property
    def common(self) -> bool:
        """All ranks compute from the sharded weights in shared memory, so gathering moves nothing."""
        return self.shared and not self.poison and self.tier(self.tiers.weights) is Tier.DEVICE

    @property
    def steps_on_host(self) -> bool:
        """The optimizer steps on the host while the model is on a GPU."""
        return not self.on_host and self.tiers.optim is not Tier.DEVICE

    def tier(self, tier: Tier) -> Tier:
        return Tier.DEVICE if tier is Tier.HOST and self.on_host else tier


class Moment(NamedTuple):
    """Peak bytes of live tensors while one block computes, for one micro-batch."""

    phase: str  # "forward" or "backward"
    block: str  # "": the root's own modules
    activations: int  # saved for backward, temporaries, and the gradient in progress
    with_grads: int  # the same plus `.grad` of parts whose gradients are incomplete


class Work(NamedTuple):
    """The compute of one phase of one micro-batch."""

    flops: int
    nbytes: int  # read and written by all operations except matrix products


class Profile(NamedTuple):
    """One micro-batch of a model, by `dry_run`."""

    moments: tuple[Moment, ...]  # in time order
    forward: Work
    backward: Work
    dtype: str  # torch's name of the dtype of most matrix products; its speed differs between processors by up to 100 times


def stated(parts: Sequence[Part], activations: int) -> Profile:
    """The profile of a model that cannot be dry-run, from the user's bytes of activations per micro-batch; compute is unknown."""
    own = {part.name: part.numel * part.weights if part.trainable else 0 for part in parts}
    root = sum(own[part.name] for part in parts if not part.block)
    moments = [
        Moment("backward", part.block, activations, activations + root + (own[part.name] if part.block else 0)) for part in parts
    ]
    return Profile(tuple(moments), Work(0, 0), Work(0, 0), "float32")


# -- where states are stored --


class State(NamedTuple):
    """One stored flat array of `numel` elements. If the tier is the disk, the first `head` elements stay in memory."""

    numel: int
    itemsize: int
    tier: Tier
    head: int = 0

    @property
    def resident(self) -> int:
        return (self.head if self.tier is Tier.DISK else self.numel) * self.itemsize

    @property
    def on_disk(self) -> int:
        return disk_nbytes(self.numel, self.itemsize, self.head) if self.tier is Tier.DISK else 0

    def is_away(self, stop: int) -> bool:
        """Whether some of the elements up to `stop` are on disk."""
        return self.tier is Tier.DISK and stop > self.head


def states_of(parts: Sequence[Part], setting: Setting) -> list[dict[str, State]]:
    """Each part's states by name: weights, grads, master (if weights are not their own masters), moments."""
    place, tiers, result, to_keep = setting.placement, setting.tiers, [], setting.tiers.weights_kept

    def state(tier: Tier, numel: int, itemsize: int, kept: int = 0) -> State:
        tier = setting.tier(tier)
        if tier is Tier.DISK and kept < numel:
            return State(numel, itemsize, tier, head=min(range_nbytes(kept, 1), numel))  # in grains, as zero/storage/stream.py cuts
        return State(numel, itemsize, setting.tier(Tier.HOST) if tier is Tier.DISK else tier)

    for part in parts:
        states: dict[str, State] = {}
        if place.weights:
            kept = min(part.span, to_keep)
            to_keep -= kept
            states["weights"] = state(tiers.weights, part.span, part.weights, kept)
        else:
            states["weights"] = state(Tier.DEVICE, part.numel, part.weights)
        if part.trainable:
            in_memory = not place.grads or setting.copies > 1
            numel, itemsize = (part.span, part.grads) if place.grads else (part.numel, part.local)
            states["grads"] = state(Tier.DEVICE if in_memory else tiers.grads(on_host=setting.on_host), numel, itemsize)
            owned = part.span if place.optim else part.numel
            optimizer = {"master": part.master} if part.has_master else {}
            optimizer |= {f"moment {i}": itemsize for i, itemsize in enumerate(setting.moments)}
            for name, itemsize in optimizer.items():
                states[name] = state(tiers.optim, owned, itemsize, round(owned * tiers.kept))
        result.append(states)
    return result


class Use(NamedTuple):
    """A state of a chunk, and whether the optimizer reads and writes it."""

    state: State
    reads: bool
    writes: bool


class Chunk(NamedTuple):
    """The elements that the optimizer updates at a time: bytes buffered in memory, read from disk and written to disk."""

    buffer: int
    read: int
    written: int


def chunks_of(part: Part, states: Mapping[str, State], setting: Setting) -> Iterator[Chunk]:
    """The chunks of a part, cut like stream.py: also at each head; none if every state is where the optimizer steps."""
    owned = part.span if setting.placement.optim else part.numel
    # the optimizer writes its share of replicated weights in place
    weights = states["weights"] if setting.placement.weights else State(owned, part.weights, Tier.DEVICE)
    uses = [Use(states["grads"], True, False), Use(weights, not part.has_master, True)]
    uses += [Use(state, True, True) for name, state in states.items() if name not in ("weights", "grads")]
    over = [use.state for use in uses if setting.steps_on_host and use.state.tier is Tier.DEVICE]  # copied to the host and back
    away = [use.state for use in uses if use.state.is_away(owned)]
    start = 0
    for edge in sorted({owned, *(state.head for state in away if state.head)}) if away or over else []:
        while start < edge:
            stop = min(start + range_nbytes(setting.chunk_numel, 1), edge)
            moved = [(use, range_nbytes(stop - start, use.state.itemsize)) for use in uses if use.state.is_away(stop)]
            yield Chunk(
                buffer=sum(nbytes for _, nbytes in moved) + sum(range_nbytes(stop - start, state.itemsize) for state in over),
                read=sum(nbytes for use, nbytes in moved if use.reads),
                written=sum(nbytes for use, nbytes in moved if use.writes),
            )
            start = stop


# -- memory --


class Line(NamedTuple):
    """Bytes of one kind of memory."""

    state: str  # weights, gradients, optimizer, activations, buffers
    what: str
    tier: Tier
    nbytes: int


class Peak(NamedTuple):
    """The moment of a step that needs most memory."""

    lines: tuple[Line, ...]
    when: str

    def total(self, *tiers: Tier) -> int:
        return sum(line.nbytes for line in self.lines if line.tier in tiers)

    @property
    def memory(self) -> int:
        """Device and host together: the memory of a process if the device is the host."""
        return self.total(Tier.DEVICE, Tier.HOST)


def idle_memory(parts: Sequence[Part], setting: Setting) -> tuple[Line, ...]:
    """The memory that is allocated all the time."""
    totals: Counter[tuple[str, str, Tier]] = Counter()

    def add(state: str, what: str, tier: Tier, nbytes: int) -> None:
        totals[state, what, tier] += nbytes

    groups = {"weights": ("weights", "weights"), "grads": ("gradients", "gradients"), "master": ("optimizer", "masters")}
    rings: dict[int, int] = {}
    chunk = disk_gradient = landing = 0
    host = Tier.DEVICE if setting.on_host else Tier.HOST
    for part, states in zip(parts, states_of(parts, setting), strict=True):
        for name, state in states.items():
            kind, what = groups.get(name, ("optimizer", "moments"))
            add(kind, what, Tier.DISK, state.on_disk)
            add(kind, what, host if state.tier is Tier.DISK else state.tier, state.resident)
        if part.trainable:
            if setting.coded:
                owned = part.span if setting.placement.optim else part.numel
                resident = Tier.DEVICE if setting.tiers.optim is Tier.DEVICE else host
                add("optimizer", "scales of 8-bit moments", resident, len(setting.moments) * -(-owned // 256) * 4)
            if setting.placement.grads or part.casts:  # one ring per dtype on the wire, with buffers for the longest part
                rings[part.wire] = max(rings.get(part.wire, 0), part.numel * part.wire)
            if setting.streams:
                chunk = max([chunk, *(each.buffer for each in chunks_of(part, states, setting))])
            disk_gradient = max(disk_gradient, states["grads"].on_disk)
            if states["grads"].tier is Tier.HOST:
                landing = max(landing, range_nbytes(part.span, part.grads))
    add("buffers", "ring of gradients to other ranks", Tier.DEVICE, _GRADIENT_BUFFERS * sum(rings.values()))
    add("buffers", "ring of the optimizer's chunks", host, setting.num_buffers * chunk)
    add("buffers", "ring of gradients to the disk", host, _GRADIENT_BUFFERS * disk_gradient)
    add("buffers", "ring of gradients to the host", Tier.DEVICE, _GRADIENT_BUFFERS * landing)
    return tuple(Line(*key, nbytes) for key, nbytes in totals.items() if nbytes)


def peak(parts: Sequence[Part], setting: Setting, profile: Profile) -> Peak:
    """Peak memory of a step: the permanent memory, and the maximum over forward, backward, settle and update."""
    moments = [*_computing(parts, setting, profile), *_stepping(parts, setting)]
    lines, when = max(moments, key=lambda moment: sum(line.nbytes for line in moment[0]))
    return Peak((*idle_memory(parts, setting), *(line for line in lines if line.nbytes)), when)


def _computing(parts: Sequence[Part], setting: Setting, profile: Profile) -> Iterator[tuple[list[Line], str]]:
    sharded = setting.placement.grads != ()
    # without shared memory, a reduce-scatter of a part receives every rank's share of it
    received = max((part.numel * part.wire for part in parts if part.trainable), default=0) if _sends(setting) and sharded else 0
    for i, moment in enumerate(profile.moments):
        gradients = moment.with_grads - moment.activations if sharded else 0
        lines = [
            Line("activations", "activations and temporaries", Tier.DEVICE, moment.activations),
            Line("gradients", "of units that are in backward", Tier.DEVICE, gradients),
            Line("buffers", "gathered weights", Tier.DEVICE, _gathered(parts, setting, profile.moments[i:])),
        ]
        if moment.phase == "backward":
            lines.append(Line("buffers", "received gradients", Tier.DEVICE, received))
        yield lines, f"{moment.phase} of {moment.block or 'the root'}"


def _gathered(parts: Sequence[Part], setting: Setting, moments: Sequence[Moment]) -> int:
    """Bytes of gathered weights: the root's, those of the block that computes, and those of the next one, prefetched."""
    if not setting.placement.weights or setting.common:
        return 0
    phase, block = moments[0].phase, moments[0].block
    following = next((each.block for each in moments[1:] if each.block not in ("", block) and each.phase == phase), "")
    nbytes = sum(part.numel * part.weights for part in parts if part.block in {"", block, following})
    if setting.tier(setting.tiers.weights) is not Tier.DEVICE and setting.ranks > 1:  # this rank's share is read into a buffer
        nbytes += sum(part.span * part.weights for part in parts if part.block == following)
    return nbytes


def _stepping(parts: Sequence[Part], setting: Setting) -> Iterator[tuple[list[Line], str]]:
    """Between the last backward and the next forward."""
    place, trainable = setting.placement, [part for part in parts if part.trainable]
    if _sends(setting) and not place.grads:  # all exchanges are in flight: gloo's two threads fill a part each; a third is summed
        received = sum(sorted(part.numel * part.wire for part in trainable)[-3:])
        yield [Line("buffers", "received gradients", Tier.DEVICE, received)], "settle"
    if _sends(setting) and place.optim and not place.weights:
        sent = sum(part.span * part.weights for part in trainable)
        yield [Line("buffers", "weights being sent", Tier.DEVICE, sent)], "publish"
    temporary = 0
    if not setting.streams:  # a torch optimizer gets a part's gradients in the masters' dtype and needs as much for temporaries
        temporary = 2 * max(((part.span if place.optim else part.numel) * part.master for part in trainable), default=0)
    yield [Line("buffers", "optimizer's temporaries", Tier.DEVICE, temporary)], "update"


def _sends(setting: Setting) -> bool:
    return setting.ranks > 1 and not setting.shared


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
    """Traffic by phase."""

    forward: Flow  # of each micro-batch
    backward: Flow  # of each micro-batch
    again: Flow  # of each micro-batch but the first: accumulated gradients return to be added to
    update: Flow  # once a step

    def step(self, accumulation: int) -> Flow:
        micro = self.forward.plus(self.backward)
        return self.update.plus(micro, accumulation).plus(self.again, accumulation - 1)


def traffic(parts: Sequence[Part], setting: Setting) -> Flows:
    """Exact bytes over each link: a part's weights move twice a micro-batch, its gradients once, its states once a step."""
    place, forward, backward, again, update = setting.placement, Flow(), Flow(), Flow(), Flow()

    def ring(numel: int, size: int) -> int:
        """Elements that a rank sends in a ring of `size` ranks."""
        return 0 if setting.shared else numel * (size - 1) // size

    for part, states in zip(parts, states_of(parts, setting), strict=True):
        sent, weights = ring(part.numel, setting.ranks), states["weights"]
        if place.weights:
            from_host = part.span * part.weights if weights.tier is Tier.HOST else 0
            gather = Flow(wire=sent * part.weights, to_device=from_host, disk_read=weights.on_disk)
            forward = forward.plus(gather)
            backward = backward.plus(gather)
        if not part.trainable:
            continue
        grads = states["grads"]
        on_host = part.span * part.grads if grads.tier is Tier.HOST else 0
        if place.grads:
            backward = backward.plus(Flow(wire=sent * part.wire, to_host=on_host, disk_written=grads.on_disk))
            again = again.plus(Flow(to_device=on_host, disk_read=grads.on_disk))
        else:  # replicated gradients are reduced once a step; if the optimizer is replicated, too, all ranks get the sums
            update = update.plus(Flow(wire=sent * (part.wire if place.optim else part.wire + part.local)))
        if place.optim and not place.weights:
            update = update.plus(Flow(wire=sent * part.weights))  # publish
        if setting.copies > 1:
            update = update.plus(Flow(wire=2 * ring(part.span, setting.copies) * part.grads))
        if not setting.on_host and setting.tiers.optim is not Tier.DEVICE:
            owned = part.span if place.optim else part.numel
            back = 0 if weights.tier is not Tier.DEVICE else owned * part.weights
            update = update.plus(Flow(to_host=owned * part.local if grads.tier is Tier.DEVICE else 0, to_device=back))
        for chunk in chunks_of(part, states, setting):
            update = update.plus(Flow(disk_read=chunk.read, disk_written=chunk.written))
    return Flows(forward, backward, again, update)


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


def times(parts: Sequence[Part], setting: Setting, profile: Profile, rates: Rates) -> Times:
    """Predict the time of a step and the busy time of each resource.

    Disk and host links overlap compute, and reads overlap writes; collectives do not overlap (gloo's use the CPU). If weights are
    sharded and states stream from disk or are on the host, the update also overlaps the next forward (train/window.py:
    Updater). If both run on the CPU, only the update's waiting time is hidden.
    """
    flows, k = traffic(parts, setting), setting.accumulation
    step = flows.step(k)
    updated = _update_nbytes(parts, setting)
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
    streams = setting.placement.weights and (flows.update.disk_read or flows.update.disk_written or setting.steps_on_host)
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


def _update_nbytes(parts: Sequence[Part], setting: Setting) -> int:
    """Bytes that the optimizer reads and writes: gradients in, masters and moments in and out, weights out."""
    total = 0
    for part in parts:
        if part.trainable:
            owned = part.span if setting.placement.optim else part.numel
            out = part.weights if part.has_master else 0
            total += owned * (part.grads + 2 * part.master + 2 * sum(setting.moments) + out)
    return total

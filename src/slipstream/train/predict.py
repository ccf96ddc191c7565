"""What a configuration takes, before anything runs: memory at its peak, traffic per step, and what limits the step.

Pure functions of plain numbers. Bytes are one rank's. Who knows the numbers is `train/explain.py` (of an engine, or of a model on
meta); what a micro-batch keeps alive and computes is measured by `train/dry_run.py`.

part     a unit (zero/unit.py): parameters that are gathered together
state    one flat array of a part: its weights, gradients, master, or a moment of the optimizer
moment   a stretch of a micro-batch in which the same block computes
flow     what moves over each link: between ranks, to and from the host (CUDA), from and to the disk
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from slipstream.zero.placement import Placement, Tier, Tiers
from slipstream.zero.store import disk_nbytes, range_nbytes

_GRADIENT_BUFFERS = 2  # of each ring of gradients: one fills while the other is summed (zero/build.py) or written (zero/homes.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A unit's sizes: elements, and bytes per element of what is kept of each."""

    name: str
    block: str  # the module that gathers it; "": the root, which is gathered as long as anything runs
    trainable: bool
    numel: int
    span: int  # this rank's share
    weights: int
    master: int  # the weights' size where they are their own masters
    local: int  # gradients before they are summed over ranks, kept where gradients are replicated
    wire: int  # gradients between ranks
    grads: int  # gradients after
    casts: bool  # the wire's dtype is not the local one

    @property
    def has_master(self) -> bool:
        return self.master != self.weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How the parts are trained."""

    placement: Placement
    tiers: Tiers
    on_host: bool  # the device is the host: one memory
    ranks: int  # that share one copy of the states
    copies: int  # of the states (MiCS)
    shared: bool  # ranks read each other's memory: nothing is sent, and sharded weights are one mapping
    poison: bool  # debugging: gathered weights have memory of their own all the same
    moments: tuple[int, ...]  # bytes per element of each state that the optimizer keeps
    coded: bool  # in 8 bits, with a scale for every 256 of them that stays in memory
    streams: bool  # the optimizer has a native kernel, which takes chunks
    chunk_numel: int
    num_buffers: int
    accumulation: int

    @property
    def common(self) -> bool:
        """Sharded weights lie where every rank computes with them, so gathering moves nothing."""
        return self.shared and not self.poison and self.tier(self.tiers.weights) is Tier.DEVICE

    @property
    def ahead(self) -> bool:
        """Updates begin in the backward (train/step.py), if nothing is clipped and the disk has room."""
        return self.tiers.ahead and self.streams and not self.coded and self.copies == 1 and self.placement.weights != ()

    @property
    def apart(self) -> bool:
        """The optimizer steps on the host, beside a device."""
        return not self.on_host and self.tiers.optim is not Tier.DEVICE

    def tier(self, tier: Tier) -> Tier:
        return Tier.DEVICE if tier is Tier.HOST and self.on_host else tier


class Moment(NamedTuple):
    """The most that is alive at once while one block computes, of one micro-batch."""

    phase: str  # "forward" or "backward"
    block: str  # "": the root's own modules
    activations: int  # what backward needs, temporaries, and the gradient that is about to land
    with_grads: int  # that, and `.grad` of parts that have not all their gradients yet


class Work(NamedTuple):
    """What a phase of one micro-batch computes."""

    flops: int
    nbytes: int  # read and written by everything but products


class Profile(NamedTuple):
    """One micro-batch of a model, by `dry_run`."""

    moments: tuple[Moment, ...]  # in time order
    forward: Work
    backward: Work
    dtype: str  # torch's name of what most products are computed in: processors differ in it by a factor of a hundred


def stated(parts: Sequence[Part], activations: int) -> Profile:
    """The profile of a model that cannot run without numbers: what a micro-batch keeps is stated, what it computes is not known."""
    own = {part.name: part.numel * part.weights if part.trainable else 0 for part in parts}
    root = sum(own[part.name] for part in parts if not part.block)
    moments = [
        Moment("backward", part.block, activations, activations + root + (own[part.name] if part.block else 0)) for part in parts
    ]
    return Profile(tuple(moments), Work(0, 0), Work(0, 0), "float32")


# -- where states rest --


class State(NamedTuple):
    """One flat array at rest: `numel` elements, of which the first `head` stay in memory where the tier is the disk."""

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
        """Whether elements up to `stop` are not all in memory."""
        return self.tier is Tier.DISK and stop > self.head


def states_of(parts: Sequence[Part], setting: Setting) -> list[dict[str, State]]:
    """Each part's states by name: weights, grads, master (where weights are no masters), moments."""
    place, tiers, found, to_keep = setting.placement, setting.tiers, [], setting.tiers.weights_kept

    def state(tier: Tier, numel: int, itemsize: int, kept: int = 0) -> State:
        tier = setting.tier(tier)
        if tier is Tier.DISK and kept < numel:
            return State(numel, itemsize, tier, head=min(range_nbytes(kept, 1), numel))  # whole grains, as zero/stream.py cuts
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
        found.append(states)
    return found


class Use(NamedTuple):
    """What the optimizer does with a state of a chunk."""

    state: State
    reads: bool
    writes: bool


class Chunk(NamedTuple):
    """As much of a part as the optimizer takes at a time: bytes that pass through memory for it, and from and to a disk."""

    buffer: int
    read: int
    written: int


def chunks_of(part: Part, states: Mapping[str, State], setting: Setting) -> Iterator[Chunk]:
    """The chunks of a part, cut as zero/stream.py cuts them: nowhere if everything is where the optimizer steps, else also at
    each head."""
    owned = part.span if setting.placement.optim else part.numel
    # where weights are replicated the optimizer writes its part of them in place
    weights = states["weights"] if setting.placement.weights else State(owned, part.weights, Tier.DEVICE)
    uses = [Use(states["grads"], True, False), Use(weights, not part.has_master, True)]
    uses += [Use(state, True, True) for name, state in states.items() if name not in ("weights", "grads")]
    over = [use.state for use in uses if setting.apart and use.state.tier is Tier.DEVICE]  # to the host and back
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
    """Bytes of one kind."""

    state: str  # weights, gradients, optimizer, activations, buffers
    what: str
    tier: Tier
    nbytes: int


class Peak(NamedTuple):
    """The worst moment of a step."""

    lines: tuple[Line, ...]
    when: str

    def total(self, *tiers: Tier) -> int:
        return sum(line.nbytes for line in self.lines if line.tier in tiers)

    @property
    def memory(self) -> int:
        """Device and host together: what a process takes where the device is the host."""
        return self.total(Tier.DEVICE, Tier.HOST)


def at_rest(parts: Sequence[Part], setting: Setting) -> tuple[Line, ...]:
    """What is there all the time."""
    found: dict[tuple[str, str, Tier], int] = {}

    def add(state: str, what: str, tier: Tier, nbytes: int) -> None:
        found[state, what, tier] = found.get((state, what, tier), 0) + nbytes

    groups = {"weights": ("weights", "weights"), "grads": ("gradients", "gradients"), "master": ("optimizer", "masters")}
    rings: dict[int, int] = {}
    chunk = disk_gradient = landing = 0
    host = Tier.DEVICE if setting.on_host else Tier.HOST
    for part, states in zip(parts, states_of(parts, setting), strict=True):
        for name, state in states.items():
            kind, what = groups.get(name, ("optimizer", "moments"))
            twice = setting.ahead and part.trainable and name != "grads"
            add(kind, what, Tier.DISK, state.on_disk * (2 if twice else 1))
            add(kind, what, host if state.tier is Tier.DISK else state.tier, state.resident)
        if part.trainable:
            if setting.coded:
                owned = part.span if setting.placement.optim else part.numel
                resident = Tier.DEVICE if setting.tiers.optim is Tier.DEVICE else host
                add("optimizer", "scales of 8-bit moments", resident, len(setting.moments) * -(-owned // 256) * 4)
            if setting.placement.grads or part.casts:  # one ring for each dtype on the wire, each buffer long enough for any part
                rings[part.wire] = max(rings.get(part.wire, 0), part.numel * part.wire)
            if setting.streams:
                chunk = max([chunk, *(each.buffer for each in chunks_of(part, states, setting))])
            disk_gradient = max(disk_gradient, states["grads"].on_disk)
            if states["grads"].tier is Tier.HOST:
                landing = max(landing, range_nbytes(part.span, part.grads))
    add("buffers", "ring of gradients on their way to other ranks", Tier.DEVICE, _GRADIENT_BUFFERS * sum(rings.values()))
    add("buffers", "ring of the optimizer's chunks", host, setting.num_buffers * chunk)
    add("buffers", "ring of gradients on their way to the disk", host, _GRADIENT_BUFFERS * disk_gradient)
    add("buffers", "ring of gradients on their way to the host", Tier.DEVICE, _GRADIENT_BUFFERS * landing)
    return tuple(Line(*key, nbytes) for key, nbytes in found.items() if nbytes)


def peak(parts: Sequence[Part], setting: Setting, profile: Profile) -> Peak:
    """The most that is in memory during a step: what rests, and the worst of forward, backward, settle and update."""
    rest = at_rest(parts, setting)
    moments = [*_computing(parts, setting, profile), *_stepping(parts, setting)]
    lines, when = max(moments, key=lambda moment: sum(line.nbytes for line in moment[0]))
    return Peak((*rest, *(line for line in lines if line.nbytes)), when)


def _computing(parts: Sequence[Part], setting: Setting, profile: Profile) -> Iterator[tuple[list[Line], str]]:
    sharded = setting.placement.grads != ()
    # a reduce-scatter without shared memory receives every rank's share of the part that is being reduced
    received = max((part.numel * part.wire for part in parts if part.trainable), default=0) if _sends(setting) and sharded else 0
    for i, moment in enumerate(profile.moments):
        lines = [
            Line("activations", "activations and temporaries", Tier.DEVICE, moment.activations),
            Line(
                "gradients", "of units that are in backward", Tier.DEVICE, moment.with_grads - moment.activations if sharded else 0
            ),
            Line("buffers", "gathered weights", Tier.DEVICE, _gathered(parts, setting, profile.moments[i:])),
            Line("buffers", "received gradients", Tier.DEVICE, received if moment.phase == "backward" else 0),
            Line(
                "buffers",
                "new weights, until the step",
                Tier.DEVICE,
                _new_weights(parts, setting) if moment.phase == "backward" else 0,
            ),
        ]
        yield lines, f"{moment.phase} of {moment.block or 'the root'}"


def _new_weights(parts: Sequence[Part], setting: Setting) -> int:
    """What updates ahead keep in memory, at the end of the backward: of parts whose weights rest there and whose states do not."""
    if not setting.ahead:
        return 0
    each = zip(parts, states_of(parts, setting), strict=True)
    return sum(states["weights"].resident for part, states in each if part.trainable)


def _gathered(parts: Sequence[Part], setting: Setting, coming: Sequence[Moment]) -> int:
    """Whole weights beyond those at rest: the root's, the block's that computes, and the next one's, which are on their way."""
    if not setting.placement.weights or setting.common:
        return 0
    now = coming[0]
    following = next(
        (moment.block for moment in coming[1:] if moment.block not in ("", now.block) and moment.phase == now.phase), ""
    )
    blocks = {"", now.block, following}
    whole = sum(part.numel * part.weights for part in parts if part.block in blocks)
    if setting.tier(setting.tiers.weights) is not Tier.DEVICE and setting.ranks > 1:  # this rank's share arrives beside them
        whole += sum(part.span * part.weights for part in parts if part.block == following)
    return whole


def _stepping(parts: Sequence[Part], setting: Setting) -> Iterator[tuple[list[Line], str]]:
    """Between the last backward and the next forward."""
    place, trainable = setting.placement, [part for part in parts if part.trainable]
    if _sends(setting) and not place.grads:  # all exchanges are under way: gloo's two threads fill a part each, and one is summed
        received = sum(sorted(part.numel * part.wire for part in trainable)[-3:])
        yield [Line("buffers", "received gradients", Tier.DEVICE, received)], "settle"
    if _sends(setting) and place.optim and not place.weights:
        sent = sum(part.span * part.weights for part in trainable)
        yield [Line("buffers", "weights being sent", Tier.DEVICE, sent)], "publish"
    temporary = 0
    if not setting.streams:  # torch optimizers get a part's gradients in the masters' dtype, and take as much for themselves
        temporary = 2 * max(((part.span if place.optim else part.numel) * part.master for part in trainable), default=0)
    yield [Line("buffers", "optimizer's temporaries", Tier.DEVICE, temporary)], "update"


def _sends(setting: Setting) -> bool:
    return setting.ranks > 1 and not setting.shared


# -- traffic --


class Flow(NamedTuple):
    """Bytes over each link."""

    wire: int = 0  # sent to other ranks
    to_host: int = 0  # from the device, where it is not the host
    to_device: int = 0
    disk_read: int = 0
    disk_written: int = 0

    def plus(self, other: Flow, times: int = 1) -> Flow:
        return Flow(*(a + b * times for a, b in zip(self, other, strict=True)))


class Flows(NamedTuple):
    """What moves when."""

    forward: Flow  # of each micro-batch
    backward: Flow  # of each micro-batch
    again: Flow  # of each micro-batch but the first: gradients so far come back to be added to
    update: Flow  # once a step

    def step(self, accumulation: int) -> Flow:
        micro = self.forward.plus(self.backward)
        return self.update.plus(micro, accumulation).plus(self.again, accumulation - 1)


def traffic(parts: Sequence[Part], setting: Setting) -> Flows:
    """What moves over each link, exactly: every part's weights twice a micro-batch, its gradients once, its states once a step."""
    place, forward, backward, again, update = setting.placement, Flow(), Flow(), Flow(), Flow()

    def away(numel: int, among: int) -> int:
        """Elements that a rank sends in a ring of so many."""
        return 0 if setting.shared else numel * (among - 1) // among

    for part, states in zip(parts, states_of(parts, setting), strict=True):
        sent, weights = away(part.numel, setting.ranks), states["weights"]
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
        else:  # replicated gradients are summed once a step; where the optimizer is replicated too, the sums go to everybody
            update = update.plus(Flow(wire=sent * (part.wire if place.optim else part.wire + part.local)))
        if place.optim and not place.weights:
            update = update.plus(Flow(wire=sent * part.weights))  # publish
        if setting.copies > 1:
            replicas = away(part.span, setting.copies) * part.grads
            update = update.plus(Flow(wire=2 * replicas))
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
    """What a rank gets of each resource, per second. A link that is not used may be anything above 0."""

    flops: float
    memory: float  # bytes read and written
    wire: float = 1.0
    host: float = 1.0  # between device and host, each way
    disk_read: float = 1.0
    disk_write: float = 1.0


class Cost(NamedTuple):
    """What one resource is asked for in a step."""

    resource: str
    amount: float  # FLOP for compute, else bytes
    seconds: float


class Times(NamedTuple):
    costs: tuple[Cost, ...]
    seconds: float  # of the step, overlapped as the engine overlaps it

    @property
    def limit(self) -> str:
        """The resource that is busy longest."""
        return max(self.costs, key=lambda cost: cost.seconds).resource


def times(parts: Sequence[Part], setting: Setting, profile: Profile, rates: Rates) -> Times:
    """How long a step takes, and each resource of it.

    Disk and host links run beside compute, reads beside writes; collectives do not hide (gloo's take the processor). Where weights
    are sharded and states stream or rest beside the device, the update also runs beside the next forward, and ahead beside the last
    backward (train/step.py: Updater): where both are the processor's work, only what the update waits for is hidden.
    """
    flows, k = traffic(parts, setting), setting.accumulation
    step = flows.step(k)
    updated = _update_nbytes(parts, setting)
    compute = {
        "forward": profile.forward.flops / rates.flops + profile.forward.nbytes / rates.memory,
        "backward": profile.backward.flops / rates.flops + profile.backward.nbytes / rates.memory,
    }

    def moved(flow: Flow) -> float:
        """Seconds of the slowest link beside compute."""
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
    streams = setting.placement.weights and (flows.update.disk_read or flows.update.disk_written or setting.apart)
    beside = forward + (later if k > 1 else backward) if setting.ahead else forward
    hidden = min(beside, update - (updated / rates.memory if setting.on_host else 0.0)) if streams else 0.0
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
    """Memory that the optimizer reads and writes: gradients in, masters and moments in and out, weights out."""
    total = 0
    for part in parts:
        if part.trainable:
            owned = part.span if setting.placement.optim else part.numel
            out = part.weights if part.has_master else 0
            total += owned * (part.grads + 2 * part.master + 2 * sum(setting.moments) + out)
    return total

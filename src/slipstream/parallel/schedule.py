"""Pipeline schedules as data, from one simulation of a step. Pure: no torch, no processes.

rank    an index on the pipeline axis, 0..p-1
stage   consecutive layers; p v stages in the order of the model
chunk   a stage by its number on its rank, 0..v-1: `schedule.stage_of(rank, chunk)`
action  one computation of a chunk on a micro-batch: F forward; B backward; or in two parts, I the gradient of the input and,
        later, W the gradients of the weights

An executor of one rank:

    for action in schedule.actions[rank]:
        message = schedule.receives(rank, action)  # None: the input comes from the batch or the loss. W receives nothing
        ...compute; message.source == rank: the message is in memory...
        message = schedule.sends(rank, action)     # None: nothing to send

Senders may wait for a free buffer: for each (kind, stage) of messages, one more buffer than there are stages is enough. Every style
runs the backwards (B or W) of a chunk in ascending micro-batch order, so gradients accumulate to the same bits in every style.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple


class Kind(StrEnum):
    """What an action computes, or what a message carries: FORWARD activations, BACKWARD gradients."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"


class Style(StrEnum):
    """The orders of actions. With equal costs F = I = W of a chunk, m micro-batches and p ranks of v chunks, the idle share is

    GPIPE        (p-1)/(m+p-1); every rank keeps m activations
    ONE_F_ONE_B  (p-1)/(m+p-1); rank r keeps min(m, p-r) activations (Narayanan et al. 2019)
    INTERLEAVED  (p-1)/(v m+p-1); at most p + (p-1)/v activations if p divides m, else more (Narayanan et al. 2021)
    ZERO_BUBBLE  (p-1)/(3 v m+p-1) if p divides m or v is 1; at most p activations (Qi et al. 2023, ZB-H1)
    V            (p-1)/(6 m+p-1); at most p activations. Rank r has stages r and 2p-1-r (Qi et al. 2024, ZB-V)

    for m >= p micro-batches. One activation is what all chunks of a rank keep of a micro-batch.
    """

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZERO_BUBBLE = "zero_bubble"
    V = "v"


def style_of(schedule: str, chunks: int) -> Style:
    """The style of the config's schedule: 1f1b with several stages on each rank is interleaved."""
    return Style.INTERLEAVED if schedule == Style.ONE_F_ONE_B and chunks > 1 else Style(schedule)


_CHUNKS = {
    Style.GPIPE: (1, 1),
    Style.ONE_F_ONE_B: (1, 1),
    Style.INTERLEAVED: (2, None),
    Style.ZERO_BUBBLE: (1, None),
    Style.V: (2, 2),
}
_KEEPS = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.INPUT: 0, Kind.WEIGHT: -1}  # change in the number of kept activations
_SPLIT = (Style.ZERO_BUBBLE, Style.V)  # these have I and W instead of B

# When a rank runs a W before its next F or I: (if it fits into this share of the wait, if more W than the rank's number are left).
# Also if it may not keep another activation. The best rule depends on the costs, so each rule is simulated
_WEIGHT_RULES = ((1.0, False), (0.75, False), (0.5, False), (0.25, False), (0.0, False), (1.0, True))


class Action(NamedTuple):
    """One computation: `kind` of the rank's chunk number `chunk`, on micro-batch `micro`."""

    kind: Kind
    chunk: int
    micro: int

    def __str__(self) -> str:
        return f"{self.kind}{self.chunk}.{self.micro}"


class StageMessage(NamedTuple):
    """The input of `stage` (FORWARD), or the gradient of its output (BACKWARD), for one micro-batch."""

    kind: Kind
    stage: int
    micro: int
    source: int
    target: int


class Costs(NamedTuple):
    """Seconds of one micro-batch on one stage."""

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0


class Span(NamedTuple):
    """An action in time, simulated or measured; seconds."""

    rank: int
    action: Action
    start: float
    stop: float


@dataclass(frozen=True)
class Schedule:
    """The order of each rank's actions, and the simulated step."""

    style: Style
    num_ranks: int
    num_micro: int
    num_chunks: int
    spans: tuple[tuple[Span, ...], ...]  # per rank, in order

    @cached_property
    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """The actions per rank, in order."""
        return tuple(tuple(span.action for span in row) for row in self.spans)

    @cached_property
    def makespan(self) -> float:
        """Seconds from the first action to the end of the last."""
        return max(row[-1].stop for row in self.spans)

    @cached_property
    def idle(self) -> float:
        """The fraction of all ranks' time spent waiting."""
        busy = math.fsum(span.stop - span.start for row in self.spans for span in row)
        return 1 - busy / (self.num_ranks * self.makespan)

    @cached_property
    def never_waits(self) -> bool:
        """Whether the rank that ends last computes without a gap from its first action on: then no such order is faster."""
        last = max(self.spans, key=lambda row: row[-1].stop)
        waits = last[-1].stop - last[0].start - math.fsum(span.stop - span.start for span in last)
        return waits <= 1e-9 * self.makespan

    @cached_property
    def peaks(self) -> tuple[float, ...]:
        """Each rank's maximum of kept activations, in activations of all of its chunks. One is kept from F until B or W."""
        return tuple(_peak(row) / self.num_chunks for row in self.actions)

    def stage_of(self, rank: int, chunk: int) -> int:
        return stage_of(self.num_ranks, self.style, rank, chunk)

    def rank_of(self, stage: int) -> int:
        return rank_of(self.num_ranks, self.style, stage)

    def receives(self, rank: int, action: Action) -> StageMessage | None:
        """The message that an action waits for. Its source is `rank` itself between two stages of one rank."""
        stage = self.stage_of(rank, action.chunk)
        return self._message(Kind.FORWARD if action.kind == Kind.FORWARD else Kind.BACKWARD, stage, action)

    def sends(self, rank: int, action: Action) -> StageMessage | None:
        """The message that carries an action's result; None if there is none."""
        stage = self.stage_of(rank, action.chunk)
        if action.kind == Kind.FORWARD:
            return self._message(Kind.FORWARD, stage + 1, action)
        return self._message(Kind.BACKWARD, stage - 1, action)

    def _message(self, kind: Kind, stage: int, action: Action) -> StageMessage | None:
        source = stage - 1 if kind == Kind.FORWARD else stage + 1
        last = self.num_ranks * self.num_chunks - 1
        if action.kind == Kind.WEIGHT or not (0 <= source <= last and 0 <= stage <= last):
            return None
        return StageMessage(kind, stage, action.micro, self.rank_of(source), self.rank_of(stage))


def stage_of(num_ranks: int, style: Style | str, rank: int, chunk: int) -> int:
    """The stage that is chunk number `chunk` of a rank."""
    return chunk * num_ranks + (num_ranks - 1 - rank if style == Style.V and chunk % 2 else rank)


def stages_of(num_ranks: int, style: Style | str, rank: int, num_chunks: int) -> tuple[int, ...]:
    return tuple(stage_of(num_ranks, style, rank, chunk) for chunk in range(num_chunks))


def rank_of(num_ranks: int, style: Style | str, stage: int) -> int:
    """The rank of a stage."""
    chunk, place = divmod(stage, num_ranks)
    return num_ranks - 1 - place if style == Style.V and chunk % 2 else place


def simulate(
    num_ranks: int,
    num_micro: int,
    style: Style | str = Style.ONE_F_ONE_B,
    chunks: int | None = None,
    costs: Costs | Sequence[Costs] = Costs(),  # noqa: B008
    hop: float = 0.0,
    *,
    forward_only: bool = False,
) -> Schedule:
    """Return the schedule of one step, and when each action runs.

    chunks        stages on each rank; by default 2 for the styles "interleaved" and "v", else 1
    costs         of every stage, or of each stage in the order of the model
    hop           seconds of a message between two ranks
    forward_only  evaluation: forwards in the order of the style, as early as possible

    All ranks have to pass the same arguments, costs included, because the order depends on them. Raises ValueError for an unknown
    style or numbers that do not fit.
    """
    style, v = _checked(num_ranks, num_micro, style, chunks)
    per_stage = [costs] * (num_ranks * v) if isinstance(costs, Costs) else [Costs(*each) for each in costs]
    if len(per_stage) != num_ranks * v or min(hop, *map(min, per_stage)) < 0:
        raise ValueError(
            f"costs={costs}, hop={hop}: pass no negative seconds, and one `Costs`, or one for each of the {num_ranks * v} stages "
            f"({num_ranks} ranks x {v} chunks)"
        )
    orders = [_order(rank, num_ranks, num_micro, style, v, forward_only) for rank in range(num_ranks)]
    least = 1e-9 * max(map(max, per_stage)) or 1e-9  # each action takes time, so that sorting by stop time respects dependencies
    seconds = [{kind: max(least, value) for kind, value in _seconds(each).items()} for each in per_stage]
    splits = style in _SPLIT and not forward_only
    schedules = []
    for rule in _WEIGHT_RULES if splits else _WEIGHT_RULES[:1]:
        schedules.append(Schedule(style, num_ranks, num_micro, v, _TimedStep(orders, style, v, seconds, hop, *rule).run()))
        if schedules[-1].never_waits:
            break
    return min(schedules, key=lambda schedule: schedule.makespan)


def _seconds(costs: Costs) -> dict[Kind, float]:
    forward, inputs, weights = costs
    return {Kind.FORWARD: forward, Kind.BACKWARD: inputs + weights, Kind.INPUT: inputs, Kind.WEIGHT: weights}


def _checked(num_ranks: int, num_micro: int, style: Style | str, chunks: int | None) -> tuple[Style, int]:
    if style not in list(Style):
        raise ValueError(f"pipeline schedule {style!r} is none of {', '.join(Style)}")
    least, most = _CHUNKS[Style(style)]
    v = least if chunks is None else chunks
    if v < least or (most and v > most):
        other = "1f1b or zero_bubble" if v == 1 else "interleaved or zero_bubble"
        nearest = f"{least if v < least else most}" + (f", or use {other}" if v >= 1 else "")
        raise ValueError(f"pipeline schedule {style} with {v} stages on each rank: set the stages on each rank to {nearest}")
    for name, value in (("ranks", num_ranks), ("micro-batches", num_micro)):
        if value < 1:
            raise ValueError(
                f"a pipeline of {num_ranks} ranks with {num_micro} micro-batches: set the number of {name} to at least 1"
            )
    return Style(style), v


def _order(rank: int, p: int, m: int, style: Style, v: int, forward_only: bool) -> list[Action]:
    """A rank's forwards and backwards, in order, without W: `_TimedStep` puts these into gaps.

    Two styles are built for m rounded up, and the additional micro-batches' actions, on which no others depend, are removed.
    """
    if style == Style.V:
        order = _v_order(rank, p, max(m, 2 * p - 1), forward_only)
    elif style == Style.ZERO_BUBBLE:
        order = _loop_order(rank, p, -(-m // p) * p, style, v, forward_only)
    else:
        order = _loop_order(rank, p, m, style, v, forward_only)
    return [action for action in order if action.micro < m]


def _loop_order(rank: int, p: int, m: int, style: Style, v: int, forward_only: bool) -> list[Action]:
    """Groups of p or more micro-batches pass through the chunks: warm-up forwards, then forwards and backwards alternate."""
    back = Kind.INPUT if style in _SPLIT else Kind.BACKWARD
    count = max(1, m // p)
    bounds = [m // count * i + min(i, m % count) for i in range(count + 1)]
    groups = [range(start, stop) for start, stop in pairwise(bounds)]
    forwards = [Action(Kind.FORWARD, c, k) for group in groups for c in range(v) for k in group]
    backwards = [Action(back, v - 1 - c, k) for group in groups for c in range(v) for k in group]
    if forward_only:
        return forwards
    ahead = (p - 1 - rank) * (2 if style == Style.INTERLEAVED else 1) + (v - 1) * len(groups[0])
    warm_up = m * v if style == Style.GPIPE else min(m * v, ahead)
    turns = [action for pair in zip(forwards[warm_up:], backwards, strict=False) for action in pair]
    return forwards[:warm_up] + turns + backwards[m * v - warm_up :]


def _v_order(rank: int, p: int, m: int, forward_only: bool) -> list[Action]:
    """ZB-V of Qi et al. 2024 (Pipeline Parallelism with Controllable Memory), for m >= 2p-1. Lower case: the first chunk.

    The steady state alternates: a forward and a backward of the first chunk, then of the second.
    """
    if forward_only:
        warm_up = 2 * (p - rank) - 1
        kinds = "f" * warm_up + "Ff" * (m - warm_up) + "F" * warm_up
    else:
        left = m - (2 * p - 1 - rank)  # forwards of the first chunk after the warm-up
        kinds = "f" * (2 * (p - rank) - 1) + "Ff" * rank + "FI" * (p - rank)
        kinds += "fiFI" * left + "iFI" * (m - p - left) + "iI" * rank + "i" * (p - rank)
    done = dict.fromkeys("fFiI", 0)
    order = []
    for kind in kinds:
        order.append(Action(Kind(kind.upper()), int(kind.isupper()), done[kind]))
        done[kind] += 1
    return order


class _TimedStep:
    """A simulated step: each rank's order, and the weight gradients (W) that run between its actions."""

    def __init__(
        self,
        orders: Sequence[Sequence[Action]],
        style: Style,
        v: int,
        seconds: Sequence[Mapping[Kind, float]],
        hop: float,
        share: float,
        follows: bool,
    ) -> None:
        self.orders, self.style, self.seconds, self.hop = orders, style, seconds, hop
        self.share, self.follows = share, follows
        self.num_ranks, self.most_kept = len(orders), len(orders) * v
        self.stops: dict[tuple[bool, int, int], float] = {}  # (is forward, stage, micro) of F, B and I -> end time
        self.rows: list[list[Span]] = [[] for _ in orders]
        self.free = [0.0] * self.num_ranks
        self.kept = [0] * self.num_ranks  # kept activations of chunks, per rank
        self.weights: list[deque[Action]] = [deque() for _ in orders]  # not run yet, oldest first

    def run(self) -> tuple[tuple[Span, ...], ...]:
        """Advance each rank until its next input is unknown, repeatedly, until all ranks are done."""
        left = [iter(order) for order in self.orders]
        current = [next(actions, None) for actions in left]
        progress = True
        while progress:
            progress = False
            for rank in range(self.num_ranks):
                while (action := current[rank]) is not None and (ready := self._ready(rank, action)) is not None:
                    self._fill(rank, action, ready)
                    self._add(rank, action, ready)
                    current[rank], progress = next(left[rank], None), True
        assert not any(current), f"the orders of {self.style} wait for each other: {current}"
        for rank, weights in enumerate(self.weights):
            while weights:
                self._add(rank, weights.popleft(), 0.0)
        return tuple(map(tuple, self.rows))

    def _stage(self, rank: int, action: Action) -> int:
        return stage_of(self.num_ranks, self.style, rank, action.chunk)

    def _ready(self, rank: int, action: Action) -> float | None:
        """When the inputs of an F, B or I are available; None if that is not known yet."""
        is_forward, stage = action.kind == Kind.FORWARD, self._stage(rank, action)
        own = 0.0 if is_forward else self.stops.get((True, stage, action.micro))
        other = stage - 1 if is_forward else stage + 1
        if own is None or not 0 <= other < len(self.seconds):
            return own
        stop = self.stops.get((is_forward, other, action.micro))
        return None if stop is None else max(own, stop + self.hop * (rank_of(self.num_ranks, self.style, other) != rank))

    def _fill(self, rank: int, action: Action, ready: float) -> None:
        """Run the weight gradients that come before an action that could start at `ready`."""
        weights = self.weights[rank]
        while weights:
            seconds = self.seconds[self._stage(rank, weights[0])][Kind.WEIGHT]
            is_full = action.kind == Kind.FORWARD and self.kept[rank] >= self.most_kept
            fits = self.free[rank] + self.share * seconds <= ready + 1e-6 * seconds
            if not (is_full or fits or (self.follows and len(weights) > rank)):
                return
            self._add(rank, weights.popleft(), 0.0)

    def _add(self, rank: int, action: Action, ready: float) -> None:
        stage, start = self._stage(rank, action), max(ready, self.free[rank])
        self.free[rank] = stop = start + self.seconds[stage][action.kind]
        self.rows[rank].append(Span(rank, action, start, stop))
        self.kept[rank] += _KEEPS[action.kind]
        if action.kind == Kind.INPUT:
            self.weights[rank].append(Action(Kind.WEIGHT, action.chunk, action.micro))
        if action.kind != Kind.WEIGHT:
            self.stops[action.kind == Kind.FORWARD, stage, action.micro] = stop


def _peak(actions: Iterable[Action]) -> int:
    return max(accumulate(_KEEPS[action.kind] for action in actions))

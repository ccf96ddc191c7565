"""The end of an accumulation window: settle, norm, verdict, update, publish. All ranks make the same decisions.

verdict  gradient norm, whether it is finite, and the factor that unscales and clips
ahead    an update before the verdict, speculating that nothing will be clipped

`judge` is the fence of the step: no rank passes its exchange before all have finished their backward, so weights in shared memory
may then be overwritten.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.ops.disk import DiskError, Transfer
from slipstream.optim.sharded import ShardedSteps
from slipstream.zero.comm import Pending, gather_objects
from slipstream.zero.hooks import Hooks, Slots
from slipstream.zero.lane import Event
from slipstream.zero.layout import overlap
from slipstream.zero.store import DiskStore, Store
from slipstream.zero.stream import Chunk, stream
from slipstream.zero.unit import Comms, Unit


class Verdict(NamedTuple):
    """The values that all ranks agree on before the optimizer runs."""

    norm: float  # global L2 norm of the mean gradient, unscaled, before clipping
    finite: bool
    scale: float  # the optimizer multiplies gradients with it: unscale and clip in one factor
    culprit: str = ""  # the first parameter, in model order, whose gradient is not finite on some rank


class UnusedParameterError(RuntimeError):
    """A trainable parameter got no gradient, and the config requires one (ignore_unused_parameters: false)."""


def refuse_unused(units: Sequence[Unit], landed: AbstractSet[tuple[int, int]], comms: Comms) -> None:
    """Raise UnusedParameterError on all ranks for the first trainable parameter missing in any rank's `landed`. Collective."""
    places = [(unit, i) for unit in units if unit.trainable for i, param in enumerate(unit.params) if param.requires_grad]
    unused = next((float(k) for k, (unit, i) in enumerate(places) if (unit.index, i) not in landed), math.inf)
    firsts = comms.data.exchange(torch.tensor([unused], dtype=torch.float64))[:, 0].tolist()
    first = min(firsts)
    if first < math.inf:
        unit, i = places[int(first)]
        rank = comms.data.axis.ranks[firsts.index(first)]
        raise UnusedParameterError(
            f"parameter {unit.names[i]!r} got no gradient on rank {rank} since the last step, and "
            f"zero_optimization.ignore_unused_parameters is false: use the parameter in the loss, freeze it, or set the key to true"
        )


def reduce_leftovers(units: Sequence[Unit], hooks: Hooks, comms: Comms) -> None:
    """Reduce gradients that are still in `.grad` on any rank (late ones, and those of no_sync). Collective."""
    rows = comms.data.exchange(torch.tensor([float(hooks.backwards), *map(float, hooks.leftovers())], dtype=torch.float64))
    _check_rounds(rows[:, 0], comms)
    for unit in reversed(units):
        if rows[:, 1 + unit.index].any():
            hooks.reducer.launch(unit)
    hooks.reducer.drain()


def _check_rounds(backwards: Tensor, comms: Comms) -> None:
    if backwards.min() != backwards.max():
        counts = {rank: int(n) for rank, n in zip(comms.data.axis.ranks, backwards.tolist(), strict=True)}
        raise RuntimeError(
            f"ranks ran different numbers of backward passes before engine.step(): {counts} (rank: passes). Run the same number "
            f"on every rank: a rank that is out of data can run one more with a zero loss, or set dataloader_drop_last"
        )


def settle(units: Sequence[Unit], alpha: float, slots: Slots) -> None:
    """Move every unit's gradients to the optimizer's placement."""
    trainable = [unit for unit in reversed(units) if unit.trainable]
    in_flight: list[Pending[None]] = []
    for unit in trainable:
        through = unit.memory.local is not None and unit.dtypes.wire != unit.dtypes.local
        if through and len(in_flight) >= len(slots) - 1:
            in_flight.pop(0).wait()
        in_flight.append(unit.settle(alpha, slots.next(unit.dtypes.wire) if through else None))
    for pending in in_flight:
        pending.wait()


def judge(units: Sequence[Unit], comms: Comms, backwards: int, loss_scale: float, clipping: float) -> Verdict:
    """Compute the verdict in one exchange: the squares of every (unit, rank) in fp64, added in that order. A barrier."""
    trainable = [unit for unit in units if unit.trainable]
    values = [float(backwards), *_squares(trainable)]
    rows = comms.data.exchange(torch.tensor(values, dtype=torch.float64))
    _check_rounds(rows[:, 0], comms)
    total = 0.0
    for column in rows[:, 1:].T.tolist():
        for square in column:
            total += square
    finite = math.isfinite(total)
    norm = math.sqrt(total) / loss_scale if finite else float("nan") if math.isnan(total) else math.inf
    clip = 1.0
    if clipping > 0:  # as torch.nn.utils.clip_grad_norm_, also for a step that is applied anyway: 0 for inf, NaN for NaN
        clip = clipping / (norm + 1e-6)
        clip = 1.0 if clip > 1.0 else clip
    return Verdict(norm, finite, clip / loss_scale, "" if finite else _find_culprit(trainable, comms))


def _squares(units: Sequence[Unit]) -> list[float]:
    """Each unit's sum of squares on this rank, with one device synchronization."""
    squares = [unit.window.partial.sumsq for unit in units]
    if any(isinstance(square, Tensor) for square in squares):
        device = units[0].full.device
        return torch.stack([torch.as_tensor(square, dtype=torch.float64, device=device) for square in squares]).tolist()
    return [float(square) for square in squares]


def _find_culprit(units: Sequence[Unit], comms: Comms) -> str:
    """The first parameter, in model order, whose gradient is not finite on some rank; "" for none. Collective, rare."""
    first: tuple[int, int, str] | None = None
    for unit in units:
        if first is not None or math.isfinite(float(unit.window.partial.sumsq)) or unit.grads is None:
            continue
        base = unit.optim_span[0]
        for i, slot in enumerate(unit.layout.slots):
            start, stop = overlap(slot.span, unit.optim_span)
            if not bool(torch.isfinite(unit.grads.get(start - base, stop - base)).all()):
                first = (unit.index, i, unit.names[i])
                break
    candidates: list[tuple[int, int, str]] = [each for each in gather_objects(first, comms.data.axis) if each is not None]
    return min(candidates)[2] if candidates else ""


class Ahead:
    """The state of an update ahead: chunks that are queued, chunks that are done, and new values that are not current yet.

    Two threads write it: the caller's, which enqueues units, and the update thread.
    """

    def __init__(self, scale: float, inputs: object) -> None:
        self.scale, self.inputs = scale, inputs
        self.revisions: dict[int, int] = {}  # of the enqueued units
        self.done: dict[int, set[int]] = {}  # unit index -> start offsets of the chunks that were stepped
        self.kept: dict[int, list[tuple[Store, int, Tensor]]] = {}  # new values of states in memory: store, offset, values
        self.running: Future[None] | None = None
        self.in_hand: deque[Unit] = deque()  # the unit of each chunk that was taken and not yet stepped
        self._waiting: deque[tuple[Unit, Chunk, list[Transfer | Event]]] = deque()
        self._runs = False  # whether a job takes chunks
        self._lock = threading.Lock()

    def put(self, unit: Unit, chunks: Sequence[Chunk]) -> bool:
        """Enqueue a unit's chunks. Returns whether the caller must start a job: a job ends as soon as the queue is empty."""
        assert unit.grads is not None
        moving = unit.homes.writes_in_flight(unit.grads)
        with self._lock:
            self.revisions[unit.index] = unit.window.revision
            self._waiting.extend((unit, chunk, moving) for chunk in chunks)
            begins, self._runs = not self._runs, True
            return begins

    def close(self) -> None:
        """Drop the queued chunks; no further chunk starts."""
        with self._lock:
            self._waiting.clear()

    def take(self, is_idle: bool) -> Chunk | None:
        """The next chunk for zero/stream.py's `stream`. If the queue is empty and `is_idle`, the job ends."""
        with self._lock:
            if not self._waiting:
                self._runs = not is_idle
                return None
            unit, chunk, moving = self._waiting.popleft()
        for transfer in moving:
            transfer.wait()
        self.in_hand.append(unit)
        return chunk

    def keep(self, unit: Unit, chunk: Chunk) -> None:
        """Let the chunk write to copies of the states in memory, so that the current values stay as they are."""
        for name, use in chunk.uses.items():
            view = use.store.view(chunk.start, chunk.stop)
            if use.write and view is not None:
                chunk.tensors[name] = view.clone() if use.read else torch.empty_like(view)
                self.kept.setdefault(unit.index, []).append((use.store, chunk.start, chunk.tensors[name]))


class _Updating(NamedTuple):
    """zero/unit.py's `Updating`: a unit's update is being computed, then its weights move to their store."""

    computed: Future[list[Transfer]]
    note: Callable[[Exception], None]

    def done(self) -> bool:
        return self.computed.done() and all(transfer.done() for transfer in self.computed.result())

    def wait(self) -> None:
        for transfer in self.computed.result():
            try:
                transfer.wait()
            except DiskError as error:
                self.note(error)


class Updater:
    """Runs the optimizer over units and publishes each unit as soon as it is done.

    If weights are sharded and the optimizer does not step on the compute device (states stream through memory, or it steps on the
    host while the model is on a GPU), the update runs on its own thread, in forward order, and overlaps the next forward:
    gathering a unit waits only for that unit's update (`Unit.await_update`). With a GPU and replicated weights, units are updated
    in the order in which their gradients arrive.

    On that thread a unit can be updated ahead, during the backward: `offer`. The new values are written next to the current ones,
    in memory and on disk. After `start` they become current if all their inputs are unchanged; otherwise they are computed again.
    So results are bit-identical to a step after the verdict. Only a step that clipped nothing enables it for the next one.

    A failure of that thread or of a disk is not raised in mid-step, because other ranks would wait for this one forever: the
    remaining units are published as they are, and `failure` keeps the exception until the engine has reported it to all ranks.
    """

    def __init__(self, units: Sequence[Unit], steps: ShardedSteps) -> None:
        self.units, self.steps = units, steps
        self.failure: Exception | None = None
        self.expected: float | None = None  # the scale that the next `start` will probably get; None: update nothing ahead
        self.num_ahead = 0  # chunks of the last update that were stepped ahead
        self._ahead: Ahead | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None

    def _trainable(self) -> list[Unit]:
        return [unit for unit in self.units if unit.trainable]

    def _submit(self, function: Callable[..., None], *args: object) -> Future[None]:
        self._pool = self._pool or ThreadPoolExecutor(1, "slipstream-update")  # one: jobs run in order
        return self._pool.submit(function, *args)

    # -- before the verdict --

    def offer(self, unit: Unit) -> None:
        """Update a unit ahead, if that can be undone. Its gradients are reduced, probably for the last time before `start`."""
        if self.expected is None or self.steps.ring is None or self.steps.steps_on_host or not unit.placement.weights:
            return
        if self.steps.unsupported_option(self.steps.inner.param_groups):
            return  # `Engine.step` raises it
        chunks = [chunk for chunk in self.steps.chunks(unit) if chunk.may_be_ahead]
        if not chunks or not all(store.keeps_old for store in _written_to_disk(chunks)):
            return
        if self._ahead is not None and unit.index in self._ahead.revisions:  # a second backward in this micro-batch
            self.drop()
        if self._ahead is None:
            self.finish()  # `prepare` would change the inputs of a running step
            self._ahead = Ahead(self.expected, self.steps.prepare(self._trainable()))
        if self._ahead.put(unit, chunks):
            self._ahead.running = self._submit(self._run_ahead, self._ahead)

    def _run_ahead(self, ahead: Ahead) -> None:
        try:
            with torch.no_grad():
                for chunk in stream(ahead.take, self.steps.ring):
                    unit = ahead.in_hand.popleft()
                    ahead.keep(unit, chunk)
                    self.steps.step(unit, chunk, ahead.scale)
                    chunk.write_back()
                    ahead.done.setdefault(unit.index, set()).add(chunk.start)
        except Exception as error:
            self._note(error)

    def drop(self) -> None:
        """Discard updates ahead and wait for their transfers. Always safe to call."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.running is not None:
            ahead.close()
            ahead.running.result()

    # -- after the verdict --

    def start(self, scale: float) -> None:
        """Update all trainable units; returns once the update is done, or runs on the update thread."""
        ahead, self._ahead = self._ahead, None
        trainable = self._trainable()
        if ahead is not None:
            ahead.close()
            if ahead.scale != scale or ahead.inputs != self.steps.prepare(trainable):
                ahead.revisions.clear()
            ahead.revisions = {unit.index: 0 for unit in trainable if ahead.revisions.get(unit.index) == unit.window.revision}
        self.steps.begin(trainable)
        for unit in trainable:
            unit.shown.expire_graphs()
        if not (self.steps.streams or self.steps.steps_on_host) or not all(unit.placement.weights for unit in trainable):
            self._run(trainable[::-1] if self.steps.steps_on_host else trainable, scale, {}, None)
            return
        done: dict[int, Future[list[Transfer]]] = {unit.index: Future() for unit in trainable}
        for unit in trainable:
            unit.updating = _Updating(done[unit.index], self._note)
        self._running = self._submit(self._run, trainable, scale, done, ahead)

    def _note(self, failure: Exception) -> None:
        self.failure = self.failure or failure

    def _run(
        self, trainable: Sequence[Unit], scale: float, done: Mapping[int, Future[list[Transfer]]], ahead: Ahead | None
    ) -> None:
        published: list[Pending[None]] = []
        remaining = deque(trainable)

        def finish(moving: list[Transfer]) -> None:
            unit = remaining.popleft()
            try:
                published.append(unit.publish())
            finally:
                if done:
                    done[unit.index].set_result(moving)

        try:
            with torch.no_grad():
                self._stream(trainable, scale, ahead, finish)
        except Exception as error:
            if not (done or isinstance(error, DiskError)):
                raise
            self._note(error)
        finally:
            while remaining:
                finish([])
        for pending in published:
            pending.wait()

    def _stream(self, units: Sequence[Unit], scale: float, ahead: Ahead | None, finish: Callable[[list[Transfer]], None]) -> None:
        """Step the chunks that were not stepped ahead. A unit's new values become current once all its chunks are stepped."""
        done: dict[int, set[int]] = {}
        if ahead is not None and ahead.running is not None:
            ahead.running.result()  # has ended before this job: jobs run in order
            done = {index: starts for index, starts in ahead.done.items() if index in ahead.revisions}
        self.num_ahead = sum(map(len, done.values()))
        left = [[chunk for chunk in self.steps.chunks(unit) if chunk.start not in done.get(unit.index, ())] for unit in units]
        upcoming = (chunk for chunks in left for chunk in chunks)
        stepping = stream(lambda _: next(upcoming, None), self.steps.ring)
        try:
            for unit, chunks in zip(units, left, strict=True):
                moving: list[Transfer] = []
                for chunk in itertools.islice(stepping, len(chunks)):
                    self.steps.step(unit, chunk, scale)
                    moving += chunk.write_back()
                for store, start, values in ahead.kept.pop(unit.index, []) if ahead is not None and unit.index in done else []:
                    store.put(start, values)
                for store in _written_to_disk(self.steps.chunks(unit)):
                    store.turn()
                finish(moving)
        finally:
            stepping.close()

    @property
    def is_done(self) -> bool:
        """Whether no update runs on the update thread."""
        return self._running is None

    def finish(self) -> None:
        """Wait until all units are updated and stored."""
        running, self._running = self._running, None
        if running is not None:
            running.result()
        for unit in self.units:
            unit.await_update()

    def close(self) -> None:
        """End the update thread. Safe to call twice."""
        try:
            self.drop()
            self.finish()
        finally:
            if self._pool is not None:
                self._pool.shutdown()
                self._pool = None


def _written_to_disk(chunks: Sequence[Chunk]) -> list[DiskStore]:
    stores = {id(use.store): use.store for chunk in chunks for use in chunk.uses.values() if use.write}
    return [store for store in stores.values() if isinstance(store, DiskStore)]

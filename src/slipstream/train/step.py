"""The end of an accumulation window: settle, norm, verdict, update, publish. All ranks make the same decisions.

verdict  gradient norm, whether it is finite, and the factor that unscales and clips

`judge` is the fence of the step: no rank passes its exchange before all have finished their backward, so weights in shared memory
may then be overwritten.
"""

from __future__ import annotations

import itertools
import math
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
from slipstream.zero.stream import stream
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
    squares = [unit.partial.sumsq for unit in units]
    if any(isinstance(square, Tensor) for square in squares):
        device = units[0].full.device
        return torch.stack([torch.as_tensor(square, dtype=torch.float64, device=device) for square in squares]).tolist()
    return [float(square) for square in squares]


def _find_culprit(units: Sequence[Unit], comms: Comms) -> str:
    """The first parameter, in model order, whose gradient is not finite on some rank; "" for none. Collective, rare."""
    first: tuple[int, int, str] | None = None
    for unit in units:
        if first is not None or math.isfinite(float(unit.partial.sumsq)) or unit.grads is None:
            continue
        for i, slot in enumerate(unit.layout.slots):
            inside, _ = slot.common(unit.optim_span)
            if not bool(torch.isfinite(unit.grads.get(inside.start, inside.stop)).all()):
                first = (unit.index, i, unit.names[i])
                break
    candidates: list[tuple[int, int, str]] = [each for each in gather_objects(first, comms.data.axis) if each is not None]
    return min(candidates)[2] if candidates else ""


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

    A failure of that thread or of a disk is not raised in mid-step, because other ranks would wait for this one forever: the
    remaining units are published as they are, and `failure` keeps the exception until the engine has reported it to all ranks.
    """

    def __init__(self, units: Sequence[Unit], steps: ShardedSteps) -> None:
        self.units, self.steps = units, steps
        self.failure: Exception | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None

    def start(self, scale: float) -> None:
        """Update all trainable units; returns once the update is done, or runs on the update thread."""
        trainable = [unit for unit in self.units if unit.trainable]
        self.steps.begin(trainable)
        for unit in trainable:
            unit.expire_graphs()
        if not (self.steps.streams or self.steps.steps_on_host) or not all(unit.placement.weights for unit in trainable):
            self._run(trainable[::-1] if self.steps.steps_on_host else trainable, scale, {})
            return
        done: dict[int, Future[list[Transfer]]] = {unit.index: Future() for unit in trainable}
        for unit in trainable:
            unit.updating = _Updating(done[unit.index], self._note)
        self._pool = self._pool or ThreadPoolExecutor(1, "slipstream-update")  # one: updates run in order
        self._running = self._pool.submit(self._run, trainable, scale, done)

    def _note(self, failure: Exception) -> None:
        self.failure = self.failure or failure

    def _run(self, trainable: Sequence[Unit], scale: float, done: Mapping[int, Future[list[Transfer]]]) -> None:
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
                self._stream(trainable, scale, finish)
        except Exception as error:
            if not (done or isinstance(error, DiskError)):
                raise
            self._note(error)
        finally:
            while remaining:
                finish([])
        for pending in published:
            pending.wait()

    def _stream(self, units: Sequence[Unit], scale: float, finish: Callable[[list[Transfer]], None]) -> None:
        stepping = stream((chunk for unit in units for chunk in self.steps.chunks(unit)), self.steps.ring)
        try:
            for unit in units:
                moving: list[Transfer] = []
                for chunk in itertools.islice(stepping, len(self.steps.chunks(unit))):
                    self.steps.step(unit, chunk, scale)
                    moving += chunk.write_back()
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
            self.finish()
        finally:
            if self._pool is not None:
                self._pool.shutdown()
                self._pool = None

"""The end of a window: settle, norm, verdict, update, publish. The same decisions on every rank.

`judge` is the fence of the step: its exchange lets no rank go on before all have finished their backward, which
is what allows weights in shared memory to be overwritten.
"""

from __future__ import annotations

import functools
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.ops.disk import DiskError, Transfer
from slipstream.optim.sharded import ShardedSteps
from slipstream.zero.comm import Pending, gather_objects
from slipstream.zero.hooks import Hooks, Slots
from slipstream.zero.layout import overlap
from slipstream.zero.store import stream
from slipstream.zero.unit import Comms, Unit

logger = logging.getLogger(__name__)


class Verdict(NamedTuple):
    """What all ranks agree on before the optimizer runs."""

    norm: float  # global L2 norm of the mean gradient, unscaled, before clipping
    finite: bool
    scale: float  # what the optimizer multiplies gradients with: unscale and clip in one factor


def reduce_leftovers(units: Sequence[Unit], hooks: Hooks, comms: Comms) -> None:
    """Reduce gradients that are still in `.grad` on any rank (late ones, and those of no_sync). Collective."""
    mine = hooks.leftovers()
    rows = comms.data.exchange(torch.tensor([float(hooks.backwards), *map(float, mine)], dtype=torch.float64))
    _check_rounds(rows[:, 0], comms)
    for unit in reversed(units):
        if rows[:, 1 + unit.index].any():
            hooks.reducer.launch(unit)
    hooks.reducer.drain()


def _check_rounds(backwards: Tensor, comms: Comms) -> None:
    if backwards.min() != backwards.max():
        counts = {rank: int(n) for rank, n in zip(comms.data.axis.ranks, backwards.tolist(), strict=True)}
        raise RuntimeError(
            f"ranks ran different numbers of backward passes before engine.step(): {counts} (rank: passes). Every rank must run "
            f"as many; a rank that is out of data can run one more with a loss of zero, or use dataloader_drop_last"
        )


def settle(units: Sequence[Unit], alpha: float, slots: Slots) -> None:
    """Bring every unit's gradients to the optimizer's placement."""
    trainable = [unit for unit in reversed(units) if unit.trainable]
    in_flight: list[Pending[None]] = []
    for unit in trainable:
        through = unit.memory.local is not None and unit.dtypes.wire != unit.dtypes.local
        if through and len(in_flight) >= len(slots) - 1:
            in_flight.pop(0).wait()
        in_flight.append(unit.settle(alpha, slots.next(unit.dtypes.wire) if through else None))
    for pending in in_flight:
        pending.wait()


def judge(units: Sequence[Unit], comms: Comms, backwards: int, loss_scale: float, clipping: float, skip_overflow: bool) -> Verdict:
    """One exchange: the squares of every (unit, rank) in fp64, added in that order. Collective; every rank waits for all."""
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
    if not finite:
        _name_culprit(trainable, comms, skip_overflow)
    clip = 1.0
    if clipping > 0:  # as torch.nn.utils.clip_grad_norm_, also where the step is taken all the same: 0 for inf, NaN for NaN
        clip = clipping / (norm + 1e-6)
        clip = 1.0 if clip > 1.0 else clip
    return Verdict(norm, finite, clip / loss_scale)


def _squares(units: Sequence[Unit]) -> list[float]:
    """Each unit's sum of squares on this rank; waits for the device once."""
    squares = [unit.partial.sumsq for unit in units]
    if any(isinstance(square, Tensor) for square in squares):
        device = units[0].full.device
        return torch.stack([torch.as_tensor(square, dtype=torch.float64, device=device) for square in squares]).tolist()
    return [float(square) for square in squares]


def _name_culprit(units: Sequence[Unit], comms: Comms, skipped: bool) -> None:
    """Log the first parameter, in model order, whose gradient is not finite on any rank. Collective, rare."""
    found: tuple[int, int, str] | None = None
    for unit in units:
        if found is not None or math.isfinite(float(unit.partial.sumsq)) or unit.grads is None:
            continue
        base = unit.optim_span[0]
        for i, slot in enumerate(unit.layout.slots):
            start, stop = overlap(slot.span, unit.optim_span)
            if not bool(torch.isfinite(unit.grads.get(start - base, stop - base)).all()):
                found = (unit.index, i, unit.names[i])
                break
    everyone = [item for item in gather_objects(found, comms.data.axis) if item is not None]
    if everyone and comms.data.rank == 0:
        what = "step skipped" if skipped else "step taken all the same"
        logger.warning("gradient of %r is not finite (the first such parameter); %s", min(everyone)[2], what)


class Updater:
    """Runs the optimizer over units and publishes each as soon as it is done.

    Where weights are sharded and the optimizer steps apart from what computes (states stream through memory, or it steps on the
    host beside a device) it does so on a thread of its own, in forward order, so that the next forward begins meanwhile: a unit
    that is gathered waits for its own update only (`Unit.await_update`). Beside a device but with replicated weights, units go in
    the order in which their gradients arrive.

    A disk that fails is not raised in mid-step, where other ranks would wait for this one for ever: the rest is published as it
    is, and `failure` says why until the engine has told all ranks.
    """

    def __init__(self, units: Sequence[Unit], steps: ShardedSteps) -> None:
        self.units, self.steps = units, steps
        self.failure: DiskError | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None

    def start(self, scale: float) -> None:
        """Update all trainable units; returns when that is done, or has begun."""
        trainable = [unit for unit in self.units if unit.trainable]
        self.steps.begin(trainable)
        for unit in trainable:
            unit.expire_graphs()
        beside = self.steps.ring is not None or self.steps.apart
        if not beside or not all(unit.placement.weights for unit in trainable):
            self._run(trainable[::-1] if self.steps.apart else trainable, scale, {})
            return
        done: dict[int, Future[list[Transfer]]] = {unit.index: Future() for unit in trainable}
        for unit in trainable:
            unit.updating = Pending(functools.partial(self._await, done[unit.index]))
        self._pool = self._pool or ThreadPoolExecutor(1, "slipstream-update")
        self._running = self._pool.submit(self._run, trainable, scale, done)

    def _await(self, done: Future[list[Transfer]]) -> None:
        """A unit's update has been computed and its weights have arrived where they rest."""
        for transfer in done.result():
            try:
                transfer.wait()
            except DiskError as error:
                self.failure = self.failure or error

    def _run(self, trainable: Sequence[Unit], scale: float, done: Mapping[int, Future[list[Transfer]]]) -> None:
        published: list[Pending[None]] = []
        remaining = deque(trainable)

        def finish(unit: Unit, moving: list[Transfer]) -> None:
            published.append(unit.publish())
            if done:
                done[unit.index].set_result(moving)

        try:
            with torch.no_grad():
                self._stream(remaining, scale, finish)
        except DiskError as error:
            self.failure = self.failure or error
        finally:
            for unit in remaining:
                finish(unit, [])
        for pending in published:
            pending.wait()

    def _stream(self, remaining: deque[Unit], scale: float, finish: Callable[[Unit, list[Transfer]], None]) -> None:
        work = [(unit, chunk) for unit in remaining for chunk in self.steps.chunks(unit)]
        moving: list[Transfer] = []
        for (unit, chunk), _ in zip(work, stream([chunk for _, chunk in work], self.steps.ring), strict=True):
            self.steps.step(unit, chunk, scale)
            moving += chunk.write_back()
            if chunk.stop == unit.master.numel:
                finish(remaining.popleft(), moving)
                moving = []

    @property
    def is_done(self) -> bool:
        """Whether nothing runs on beside the caller."""
        return self._running is None

    def finish(self) -> None:
        """Wait until everything is updated and at rest."""
        if self._running is not None:
            self._running.result()
            self._running = None
        for unit in self.units:
            unit.await_update()

    def close(self) -> None:
        """Always safe to call twice."""
        self.finish()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

"""The optimizer's update of all units, and the publication of their new weights."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch

from slipstream.ops.disk import DiskError, Transfer
from slipstream.optim.sharded import ShardedSteps
from slipstream.zero.comm import Pending
from slipstream.zero.storage.stream import stream
from slipstream.zero.unit import Unit

IN_FLIGHT = 2  # units whose codes are in flight while the next unit is updated


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

    A failure of that thread or of a disk is not raised in mid-step, because other ranks would wait for this one forever. The
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
        self.steps.exchange(trainable, scale)
        if self.steps.rest is not None:
            self.steps.rest.decide()
        self.steps.begin(trainable)
        for unit in trainable:
            unit.shown.expire_graphs()
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
        published = deque[Pending[None]]()
        remaining = deque(trainable)

        def finish(moving: list[Transfer]) -> None:
            unit = remaining.popleft()
            try:
                published.append(unit.publish_update())
                if unit.dtypes.published_bits is not None and len(published) > IN_FLIGHT:  # each holds codes of a whole unit
                    published.popleft().wait()
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
                unit.begin_update()
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

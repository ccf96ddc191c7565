"""Checkpoints that an engine saves by itself: every few steps or minutes, and on a signal, before the process ends.

With `memory_every_steps` the newest checkpoint is also kept in host memory, in a folder of the launcher's agent, which outlives the
ranks. Restarted ranks resume from it unless a checkpoint on disk is newer. On one host it is an ordinary checkpoint. With several
hosts, each holds the files of its own ranks and of the preceding host, so that one host may be lost (checkpoint/hosts.py).

A signal may reach one rank only (a scheduler signals the first process of a job, or one host). The rank's request is one more
number in the exchange that every step makes, so all ranks save at the end of the same step. Then all exit with code 85: "start
again". Other engines of the process that listen to the same signal are saved at that moment, too.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import threading
import time
import weakref
import zlib
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import torch.distributed as dist

from slipstream import checkpoint
from slipstream.checkpoint import CheckpointError, Hosts, complete_newest
from slipstream.config.plan import CheckpointPlan
from slipstream.train.gate import Gate
from slipstream.world import brief
from slipstream.world.join import local_rank, local_world_size
from slipstream.world.mesh import Axis, Mesh

logger = logging.getLogger(__name__)
SAVE, STOP = 1.0, 2.0  # requests of a rank; the maximum over ranks is executed
_newest: dict[str, Autosave] = {}  # absolute folder -> the one of this process whose engine began training last
_resumed: weakref.WeakSet[Autosave] = weakref.WeakSet()  # those of this process that have loaded a checkpoint of their folder


class Preempted(SystemExit):
    """Raised by `engine.step()` on every rank after a signal has asked for a checkpoint and the checkpoint is saved."""


class Saved(Protocol):
    """The methods of an engine that automatic checkpoints call."""

    global_steps: int
    gate: Gate

    def save_checkpoint(self, save_dir: str, tag: str | None = None) -> bool: ...

    def finish_save(self) -> None: ...

    def load_checkpoint(self, load_dir: str, tag: str | None = None) -> Any: ...


class Autosave:
    """The automatic checkpoints of one engine. `is_first`: this rank's clock decides what is due, and this rank logs.

    memory: the folder of the checkpoints in memory; None: there are none
    """

    def __init__(self, plan: CheckpointPlan, mesh: Mesh) -> None:
        self.plan, self.is_first, self._group, self._world = plan, mesh.is_first, mesh.world.group, mesh.world
        self.place = os.path.abspath(plan.folder or "")
        self.loaded = False
        self.hosts: Hosts | None = None  # if there are several, each with a folder in memory
        self.memory = self._find_memory(mesh.world) if plan.memory_every_steps else None
        self._last = time.monotonic()
        self.signal = 0
        self.engine: Callable[[], Saved | None] = lambda: None  # set by the engine; returns it while it lives
        self.has_stepped = False  # an engine that never steps (a reference model) saves nothing
        self._handlers: list[_Handler] = []
        if plan.folder is not None and threading.current_thread() is threading.main_thread():
            self._handlers = [_Handler.join(self, signal.Signals[name]) for name in plan.on_signal]

    def _find_memory(self, world: Axis) -> str | None:
        """The folder in memory of this host for the engine's folder on disk. Collective over the world."""
        folder = os.environ.get(brief.MEMORY)
        folders = world.gather(folder)
        self.hosts, why = hosts_of(world, in_memory=True)
        if None in folders:
            why = "only `slipstream run` with --max-restarts or --elastic has a place"
        if why and self.is_first:
            logger.warning("slipstream.checkpoint.memory_every_steps has no effect here: %s", why)
        return None if why or folder is None else os.path.join(folder, f"{zlib.crc32(str(self.plan.folder).encode()):08x}")

    @property
    def save_request(self) -> float:
        """What this rank asks all ranks to do at the end of this step."""
        if self.signal:
            return STOP
        is_due = self.plan.every_minutes and time.monotonic() - self._last >= 60 * self.plan.every_minutes
        return SAVE if is_due and self.is_first else 0.0

    def after_step(self, engine: Saved, save_request: float) -> None:
        """Save if a rank requested it or the step is due. Collective. Raises Preempted if a rank got a signal."""
        self._warn_of_restart(engine)
        if self.plan.folder is None:
            return
        if not self.has_stepped:
            self.has_stepped, _newest[self.place] = True, self
            self._warn_of_shared_weights()
        to_disk = save_request or _is_due(engine.global_steps, self.plan.every_steps)
        in_memory = self.memory if not to_disk and _is_due(engine.global_steps, self.plan.memory_every_steps) else None
        if not to_disk and in_memory is None:
            return
        if save_request != STOP:  # after a signal, work is saved in any case
            self._check_alone(self.plan.folder)
        if in_memory is not None:
            self._save_in_memory(engine, in_memory)
            return
        self._last = time.monotonic()
        engine.save_checkpoint(self.plan.folder)
        if save_request == STOP:
            engine.finish_save()
            self._save_others()
            if self.is_first:
                logger.warning("step %d is saved after a signal; exit code %d", engine.global_steps, brief.AGAIN)
            for handler in self._handlers:
                handler.pass_on(self.signal)
            raise Preempted(brief.AGAIN)

    def _warn_of_restart(self, engine: Saved) -> None:
        is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        if is_restart and engine.global_steps == 1 and self.is_first and not self.loaded:
            logger.warning(
                "this is a restart, and training began at step 0: call engine.load_checkpoint() before the loop, or set "
                'slipstream.checkpoint to {"folder": ..., "every_steps": ...}'
            )

    def _warn_of_shared_weights(self) -> None:
        if self.is_first and self._shares_weights():
            gc.collect()  # an engine that a notebook's cell has replaced lives until then
            if self._shares_weights():
                logger.warning(
                    "another engine of this process has resumed from slipstream.checkpoint.folder %r, too: if it is a reference "
                    'that is not trained, give it "resume": false, or it starts with the trained weights',
                    self.plan.folder,
                )

    def _shares_weights(self) -> bool:
        others = _resumed - {self} if self in _resumed else ()
        return any(other.place == self.place and other.engine() is not None for other in others)

    def _check_alone(self, folder: str) -> None:
        """Raises ValueError if a newer engine of this process trains with the folder."""
        if _newest.get(self.place, self) is not self:
            raise ValueError(
                f"two engines of this process save to slipstream.checkpoint.folder {folder!r}, and each would overwrite "
                f"the other's checkpoints and resume from them: give each a folder of its own, or end one with its destroy()"
            )

    def _save_others(self) -> None:
        """Save the other engines of this process, the newest of each folder. Collective over this engine's ranks."""
        listed = [each for handler in self._handlers for each in handler.engines]
        last = {each.plan.folder: i for i, each in enumerate(listed)}  # an abandoned engine must not overwrite its successor's
        alive = {i: engine for i in last.values() if (engine := self._savable(listed[i])) is not None}
        for i in sorted(set.intersection(*self._world.gather(set(alive)))):  # engines may be garbage-collected on some ranks only
            try:
                alive[i].save_checkpoint(listed[i].plan.folder or "")
                alive[i].finish_save()
            except CheckpointError as error:
                logger.warning("step %d of another engine is not saved: %s", alive[i].global_steps, error)

    def _savable(self, other: Autosave) -> Saved | None:
        """The engine of another folder, if this one's ranks can save it."""
        engine = other.engine() if other.has_stepped else None
        if engine is None or other.plan.folder == self.plan.folder or not set(other._world.ranks) <= set(self._world.ranks):
            return None
        try:
            engine.gate.check("save_checkpoint")
        except RuntimeError as error:
            logger.warning("step %d of another engine is not saved: %s", engine.global_steps, error)
            return None
        return engine

    def _save_in_memory(self, engine: Saved, folder: str) -> None:
        """Save in memory. Collective. Never ends training: if memory does not suffice, saving in memory stops."""
        try:
            engine.save_checkpoint(folder)
        except CheckpointError as error:
            self.memory = None
            if self.is_first:
                logger.warning("no more checkpoints in memory: %s", error)

    def resume(self, engine: Saved) -> None:
        """Load the newest checkpoint of the folder or in memory, if the config asks for it. Collective."""
        if self.plan.folder is None or not self.plan.resume:
            return
        is_in_memory = self.memory is not None and self._resume_from_memory(engine, self.memory, self.plan.folder)
        if not is_in_memory and any(self._world.gather(os.path.isdir(self.place))):  # a new host may lack the folder
            engine.load_checkpoint(self.plan.folder)
        if self.loaded:
            _resumed.add(self)

    def _resume_from_memory(self, engine: Saved, memory: str, disk: str) -> bool:
        on_disk = _steps_in(disk, self._group)
        try:
            if self.hosts is not None and not complete_newest(memory, self.hosts, on_disk):
                return False
            if _steps_in(memory, self._group) <= on_disk:
                return False
            engine.load_checkpoint(memory)
        except CheckpointError as error:
            if self.is_first:
                logger.warning("the checkpoint in memory is left out: %s", error)
            return False
        return True

    def close(self) -> None:
        """Give the folder and the signals back."""
        if _newest.get(self.place) is self:
            del _newest[self.place]
        _resumed.discard(self)
        while self._handlers:
            self._handlers.pop().leave(self)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


class _Handler:
    """The signal handler while engines of this process listen to a signal. When the last engine leaves, the old handler returns.

    before: the old handler. A user's function is called when everything is saved. It takes a second signal at once, and any signal
    while no engine listens (a script's own handler may call this one, and outlive the engines).
    """

    def __init__(self, number: int) -> None:
        self.number, self.engines = number, list[Autosave]()
        self.before: Any = signal.signal(number, self) or signal.SIG_DFL  # None: installed by a C library, not by Python

    @staticmethod
    def join(engine: Autosave, number: int) -> _Handler:
        installed = signal.getsignal(number)
        handler = installed if isinstance(installed, _Handler) else _Handler(number)
        handler.engines.append(engine)
        return handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        listening = [each for each in self.engines if each.engine() is not None]
        if listening and not any(each.signal for each in listening):
            for each in listening:
                each.signal = number
            return
        for each in list(self.engines):
            each.close()
        if callable(self.before):
            self.before(number, frame)
        elif self.before is signal.SIG_DFL and frame is not None:  # no frame: `pass_on` calls, before the exit with AGAIN
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def pass_on(self, number: int) -> None:
        if number == self.number and callable(self.before) and self.before is not signal.default_int_handler:
            with contextlib.suppress(SystemExit):  # the exit code is AGAIN: the job is not finished
                self.before(number, None)

    def leave(self, engine: Autosave) -> None:
        self.engines.remove(engine)
        installed: Any = signal.getsignal(self.number)
        if not self.engines and installed is self:
            signal.signal(self.number, self.before)


def hosts_of(world: Axis, *, in_memory: bool) -> tuple[Hosts | None, str]:
    """Several hosts with separate directories; or None, with the reason if that is impossible, "" for one host. Collective."""
    own = local_world_size()
    sizes, places = zip(*world.gather((own, local_rank())), strict=True)
    if len(set(sizes)) > 1 or world.size % own or list(places) != [i % own for i in range(world.size)]:
        return None, f"each host must have as many ranks as the others, consecutive ones; these have {', '.join(map(str, sizes))}"
    group = None if own == world.size else world.host_group()
    return (None if group is None else Hosts(group, world.index, world.size, own, in_memory)), ""


def _steps_in(directory: str, group: dist.ProcessGroup | None) -> int:
    """The number of steps before a directory's latest checkpoint; -1 if there is no readable one. Collective."""
    try:
        tag = checkpoint.latest_tag(directory, group=group)
        counters = {} if tag is None else checkpoint.load_metadata(directory, tag, group=group).shared.get("counters", {})
    except CheckpointError:
        return -1
    return int(counters.get("global_steps", -1))

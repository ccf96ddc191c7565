"""The sharded states of one model, and the objects that work on them.

The stages of a pipeline that a rank has are one model. Saving, loading, sleep, surgery, hand-over and forecasts take `States`, not
the engine.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from slipstream.config.plan import Plan
from slipstream.ops.disk import DiskError
from slipstream.ops.wire import Feedback
from slipstream.optim.sharded import ShardedSteps
from slipstream.parallel.exchange import Exchange, connect_activations
from slipstream.train.gate import Gate, Obstacle
from slipstream.train.updater import Updater
from slipstream.world.mesh import Axis, Differs, Mesh
from slipstream.world.watch import Watch
from slipstream.zero.build import Recipe
from slipstream.zero.comm import Comm, first_said
from slipstream.zero.hooks import Hooks, Slots
from slipstream.zero.storage.homes import Homes
from slipstream.zero.storage.store import Needs, Spaces
from slipstream.zero.unit import Comms, Unit


@dataclass(slots=True, weakref_slot=True, kw_only=True, eq=False)
class States:
    """The units of a model, with their transports, buffers, storage, hooks and optimizer. Built by `initialize`."""

    model: nn.Module
    plan: Plan
    mesh: Mesh
    world: Comm  # all ranks of the engine, for agreements
    replica: Comm  # the ranks that step together: all, except with local steps
    families: Mapping[Differs, Comms]
    device: torch.device
    units: list[Unit]
    slots: Slots  # buffers of gradients on the wire
    homes: Homes
    recipe: Recipe
    open_space: Callable[[Needs], Spaces]  # opens further files for states on disk
    steps: ShardedSteps
    watch: Watch
    updater: Updater = field(init=False)
    gate: Gate = field(default_factory=Gate)
    hooks: Hooks = field(init=False)  # installed by the engine, and again after each surgery
    known: frozenset[int] = frozenset()  # ids of the model's parameters
    # By name: mail, exchanges of activations. Closed with the engine. Checkpoints keep those that have a state.
    resources: dict[str, Any] = field(default_factory=dict)
    before_backward: list[Callable[[Tensor], None]] = field(default_factory=list)  # called with the loss of `engine.backward`
    after_step: list[Callable[[bool], None]] = field(default_factory=list)  # called with whether the step updated the weights
    suspects: list[Callable[[], str]] = field(default_factory=list)  # return what may have made gradients nonfinite, or ""
    on_hooks: list[Callable[[Hooks], object]] = field(default_factory=list)  # called with new hooks after each surgery
    average_ref: Callable[[], Any] = lambda: None  # of the slipstream.ema.Ema of these states; the user owns it

    def __post_init__(self) -> None:
        self.updater = Updater(self.units, self.steps)

    @property
    def average(self) -> Any:
        """The slipstream.ema.Ema of these states, or None."""
        return self.average_ref()

    @property
    def outer(self) -> Any:
        """The LocalSteps (train/local_steps.py) of these states, or None."""
        return self.resources.get("local steps")

    def hook(self, hooks: Hooks) -> None:
        """Take new hooks between the current model and the current units."""
        self.hooks = hooks
        for call in self.on_hooks:
            call(hooks)
        self.known = frozenset(id(param) for param in self.model.parameters())

    def wire(self, call: Callable[[Hooks], object]) -> None:
        """Call with the present hooks, and again with new ones after each surgery."""
        call(self.hooks)
        self.on_hooks.append(call)

    def before_forward(self, hook: Callable[..., Any], **options: Any) -> None:
        """Call `hook` before each forward of the model. options: of `register_forward_pre_hook`"""
        self.wire(lambda hooks: hooks.handles.append(self.model.register_forward_pre_hook(hook, **options)))

    def refuse_unknown(self) -> None:
        """Raise ValueError if the model has a parameter that is in no unit, and so would be neither trained nor saved."""
        for name, param in self.model.named_parameters():
            if id(param) not in self.known:
                raise ValueError(
                    f"parameter {name!r} was added to the model after initialize(), so it would be neither trained nor saved: "
                    "change the model inside `with engine.surgery():`"
                )

    def feedback(self) -> list[Feedback]:
        """The error feedback of the units whose gradients are communicated in codes."""
        feedbacks = [feedback for unit in self.units for feedback in (unit.memory.feedback, unit.memory.served)]
        return [feedback for feedback in feedbacks if feedback is not None]

    def release(self) -> None:
        """Release the weights that are still gathered."""
        for unit in self.units:
            unit.release()

    def settle(self) -> None:
        """Wait for the update and for disk transfers. Collective if states are on disk: all ranks then raise the same error."""
        self.updater.finish()
        failure: Exception | None = self.updater.failure
        if not self.homes.on_disk:
            if failure is not None:
                raise RuntimeError(self._lost(f"the optimizer of rank {self.mesh.rank}", str(failure))) from failure
            return
        self.homes.settle()
        failure = failure or self.homes.failure
        own = (isinstance(failure, DiskError), f"{type(failure).__name__}: {failure}") if failure else None
        if first := first_said(own, self.mesh.replica):
            rank, (is_disk, why) = first
            reason = self._lost(f"the {'disk' if is_disk else 'optimizer'} of rank {rank}", why)
            raise (DiskError(errno.EIO, reason) if is_disk else RuntimeError(reason)) from failure

    def _lost(self, part: str, why: str) -> str:
        fix = "repair or replace the disk, then resume" if part.startswith("the disk") else "resume"
        lost = f"{part} failed in step {self.watch.step}: {why}. The states of this engine are lost"
        reason = f"{lost}: {fix} from the last checkpoint"
        self.gate.shut(Obstacle.BROKEN, reason)
        return reason

    def check_disk(self) -> None:
        """Check disk transfers before weights are read or written by name. Collective if states are on disk."""
        self.gate.check("gathered")
        if self.homes.on_disk:
            self.fence()  # if only some ranks are here, the watch reports it
            self.settle()

    def fence(self) -> None:
        """Wait until all ranks of the engine have called this."""
        self.world.exchange(torch.zeros(1, dtype=torch.float64))

    def exchange(self, axis: str | Axis) -> Exchange:
        """The collectives on activations over an axis, of the mesh or of a family. The first call is collective over the axis."""
        axis = getattr(self.mesh, axis) if isinstance(axis, str) else axis
        name = f"exchange over {axis.name} of ranks {axis.ranks}"
        if name not in self.resources:
            self.resources[name] = connect_activations(axis, self.device, self.plan.zero.transport, self.watch)
        resource: Exchange = self.resources[name]
        return resource

    def disconnect(self) -> None:
        """Drop what refers back to these states, so that they are freed with their last reference, not by the cyclic collector."""
        for each in (self.resources, self.before_backward, self.after_step, self.suspects, self.on_hooks):
            each.clear()
        del self.hooks

    @property
    def comms(self) -> Comms:
        """The transports of the dense family."""
        return self.families[()]

    @property
    def stage(self) -> Comm:
        """The ranks of this pipeline stage that step together."""
        return self.comms.dp if self.mesh.is_apart else self.comms.data

    def transports(self) -> Iterable[Comm]:
        """Each transport once, the widest first."""
        comms = [comm for family in self.families.values() for comm in family.all()]
        return {id(comm): comm for comm in (*comms, self.replica, self.world)}.values()

"""The main path: forward, backward, step. Everything here reads like the loop it serves.

    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)      # or loss.backward()
        engine.step()

An engine owns its units, transports, optimizer and counters; two engines in one process share nothing.
"""

from __future__ import annotations

import errno
import logging
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from torch import Tensor

from slipstream.config.plan import Plan
from slipstream.mesh import Mesh
from slipstream.ops.disk import DiskError
from slipstream.optim.sharded import ShardedSteps
from slipstream.train import activation, compiled
from slipstream.train import step as window
from slipstream.train.gate import LETS_THROUGH, Block, Gate
from slipstream.train.precision import Precision
from slipstream.train.progress import Progress
from slipstream.zero import access
from slipstream.zero.buffers import spread_first
from slipstream.zero.build import Recipe, unfreeze
from slipstream.zero.comm import gather_objects
from slipstream.zero.homes import Homes
from slipstream.zero.hooks import Hooks, Phase, Reducer, Slots
from slipstream.zero.leaves import identity
from slipstream.zero.store import DiskStore, Needs, Spaces
from slipstream.zero.unit import Comms, Unit
from slipstream.zero.watch import PeerError, Watch

if TYPE_CHECKING:
    from slipstream.checkpoint import Saving, Staging
    from slipstream.train import entries
    from slipstream.train.persist import Contents
    from slipstream.train.sleep import Asleep
    from slipstream.train.surgery import Surgery

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Parts:
    """What `initialize` builds and an engine is made of."""

    model: nn.Module
    plan: Plan
    mesh: Mesh
    comms: Comms
    units: list[Unit]
    slots: Slots
    homes: Homes
    recipe: Recipe
    open_space: Callable[[Needs], Spaces]
    precision: Precision
    steps: ShardedSteps | None  # None: an engine without optimizer
    watch: Watch
    staging: Staging | None
    device: torch.device


def _weak(method: Callable[..., None]) -> Callable[..., None]:
    """The method for as long as its object lives, and nothing after that."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        alive = reference()
        if alive is not None:
            alive(*args)

    return call


def _folder(argument: str, given: object) -> str:
    """Raises ValueError where a folder was computed and is none: "" is the current one, and str(None) is a name."""
    if given is None or not str(given):
        raise ValueError(f"engine.{argument} is {given!r}: give the path of a folder")
    return str(given)


class Engine(nn.Module):
    """A model, its sharded states and its optimizer. Made by `slipstream.initialize`; called as the model is.

    module               the model that was given
    optimizer            what `initialize` returned: parameter groups and `state_dict`; None without an optimizer
    lr_scheduler         what `initialize` returned, stepped by `step()`
    training_dataloader  what `initialize` returned
    rank, world_size     this rank among the data-parallel ranks, and how many they are
    device               of this rank
    global_steps         windows of micro-batches that have ended, skipped ones included
    skipped_steps        those whose gradients were not finite, so that nothing was updated
    nonfinite_steps      windows of this engine with such gradients, applied or not
    micro_steps          calls of `step()`
    global_samples       samples of all ranks so far
    global_grad_norm     2-norm of the last window's mean gradient before clipping; None before the first
    step_applied         whether the last `step()` updated the weights
    overflow             whether the last window's gradients were not finite
    plan                 the resolved configuration, frozen
    precision            dtypes and `loss_scale`
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.module = parts.model
        self.plan, self.mesh, self.comms, self.device = parts.plan, parts.mesh, parts.comms, parts.device
        self.units, self.slots, self.steps = parts.units, parts.slots, parts.steps
        self.homes, self.recipe, self.open_space = parts.homes, parts.recipe, parts.open_space
        self.homes.check = _weak(self._check_disk)  # the model's hooks do not keep the engine
        self.updater = window.Updater(parts.units, parts.steps) if parts.steps is not None else None
        self.asleep: Asleep | None = None  # what is away
        self.average: weakref.ref[entries.Average] | None = None  # its slipstream.ema.Ema, which the user holds
        self.saving: Saving | None = None  # a checkpoint that is being written
        self.staging: Staging | None = parts.staging  # host memory that it is written from
        self.gate = Gate()
        self.operation: Surgery | None = None  # the surgery that is open
        self.precision, self.watch = parts.precision, parts.watch
        self.optimizer: Any = None  # what initialize returned; set by it
        self.lr_scheduler: Any = None
        self.training_dataloader: Any = None
        self.rank, self.world_size = parts.mesh.data.index, parts.mesh.data.size
        self.global_steps = self.skipped_steps = self.micro_steps = self.global_samples = 0
        self.global_grad_norm: float | None = None
        self.progress = Progress(parts.plan, self.rank)
        self.step_applied = False  # by the last step()
        self.overflow = False  # at the last boundary
        self.nonfinite_steps = 0
        self._scaled_by_accumulation: bool | None = None
        self._odd_window = ""  # what this loop was warned of
        self._boundary: bool | None = None  # set by hand (accelerate); None: count micro-batches
        weakref.finalize(self, parts.watch.abandon).atexit = False
        self.wire()

    def wire(self) -> None:
        """Hook the model to the units, as both are now."""
        self._known = {id(param) for param in self.module.parameters()}
        recipe, slots, reducer = self.recipe, self.slots, Reducer(self.units, self.slots)
        reducer.alpha, reducer.on_reduced = self.alpha, _weak(self._update_ahead)
        self.hooks = Hooks(
            self.module,
            self.units,
            reducer,
            self.watch,
            self.precision.inputs,
            self.precision.outputs,
            unfreeze=lambda unit: unfreeze(unit, recipe, slots),
        )
        self.hooks.landed = None if self.plan.zero.ignore_unused else set()
        self.hooks.handles += compiled.apply(self.plan.compile, self.module)
        self.hooks.handles += activation.apply(
            self.plan.activations, self.module, [unit.full for unit in self.units], self.progress.timing, speaks=self.rank == 0
        )

    # -- the loop --

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model: its arguments, its outputs. Weights are gathered and released on the way; fp16 outputs come in fp32."""
        self.gate.check("forward")
        if self.plan.broadcast_buffers and self.hooks.sync:
            spread_first(list(self.module.buffers()), self.comms.data)
        with self.progress.timing("forward"), self.precision.autocast():
            try:
                return self.module(*args, **kwargs)
            except (RuntimeError, ValueError) as error:
                self.precision.hint(error, (args, kwargs))
                raise

    def backward(self, loss: Tensor, *, scale_wrt_gas: bool = True, retain_graph: bool = False, **kwargs: Any) -> Tensor:
        """`loss.backward()`, returning the loss divided by the accumulation steps, as scripts log it.

        loss: a scalar, of this rank's micro-batch. `scale_wrt_gas=False` says that the caller has divided it already. Other
        keywords go to `Tensor.backward` (`gradient=` for a loss that is not a scalar). Raises TypeError for what is no tensor.
        """
        if not isinstance(loss, Tensor):
            raise TypeError(f"engine.backward() takes the loss, a tensor that was computed by the model, not {loss!r}")
        accumulation = self.plan.batch.accumulation if self.plan.batch.managed else 1
        self._divide(scale_wrt_gas)
        with self.progress.timing("backward"):
            loss.backward(retain_graph=retain_graph, **kwargs)
        return loss.detach() / accumulation if scale_wrt_gas else loss.detach()

    def step(self) -> None:
        """On the last micro-batch of a window: reduce, clip, update, step the schedule. Else count it. Collective.

        Gradients that are not finite skip the update on every rank alike, where fp16 or `bf16.check_grad_overflow` looks for them.
        Raises RuntimeError without an optimizer, ValueError for a parameter that has come into the model outside `surgery()`.
        """
        self.gate.check("step")
        boundary = self.at_boundary
        if boundary and self.steps is not None and (why := self.steps.not_computed(self.steps.inner.param_groups)):
            raise ValueError(f"engine.step(): {why}")
        self.micro_steps += 1
        self.step_applied = False
        if not boundary:
            return
        if self.updater is None:
            raise RuntimeError("engine.step() on an engine without optimizer; give one to initialize() or in the config")
        self.watch.phase, self.watch.step = "step", self.global_steps
        with self.progress.timing("step"), torch.no_grad():
            verdict = self._finish_window()
            for unit in self.units:
                unit.release()  # what a forward outside the engine's, or a graph of a graph, has left readable
            if verdict.finite or not self.precision.plan.check_overflow:
                self.updater.start(verdict.scale)
                self.step_applied = True
            else:
                self.updater.drop()
        self._count(verdict)
        if self.updater.is_done:
            self._settle_disk()
        if self.staging is not None and self.step_applied and not self.staging.prepared:
            self._fill_staging()
        self.progress.step_done(self)
        self.watch.phase = "idle"

    def _fill_staging(self) -> None:
        from slipstream.train import persist

        persist.fill_staging(self)

    def _warn_of_odd_window(self) -> None:
        """Once: a loop that was written for another engine trains, but not as its author thinks."""
        backwards, batch = self.hooks.backwards, self.plan.batch
        if backwards == 0:
            self._odd_window = "engine.step() without a backward since the last one: gradients are zero, but weights may still move"
        elif batch.managed and batch.accumulation > 1 and backwards > batch.accumulation:
            self._odd_window = (
                f"{backwards} backward passes in a window of {batch.accumulation} micro-batches: call engine.step() after each of "
                f"them (it updates after the last), or set managed_gradient_accumulation to false and call it yourself at the end"
            )
        if self._odd_window and self.rank == 0:
            logger.warning("%s", self._odd_window)

    def _refuse_unknown(self) -> None:
        """ValueError for a parameter that has come into the model: nothing would train or save it."""
        if any(id(param) not in self._known for param in self.module.parameters()):
            name = next(name for name, param in self.module.named_parameters() if id(param) not in self._known)
            raise ValueError(
                f"parameter {name!r} has come into the model since initialize(), so it would be neither trained nor saved: change "
                "the model in `with engine.surgery():`"
            )

    def _finish_window(self) -> window.Verdict:
        self._refuse_unknown()
        if not self._odd_window:
            self._warn_of_odd_window()
        if self.updater is not None:
            self.updater.finish()
        for unit in self.units:
            if not unit.placement.weights:
                unit.check_writes()
        if self.hooks.phase is Phase.BACKWARD:
            self.hooks.abandon_backward()
        if self.hooks.landed is not None:
            window.refuse_unused(self.units, self.hooks.landed, self.comms)
        if any(unit.placement.grads for unit in self.units if unit.trainable):
            window.reduce_leftovers(self.units, self.hooks, self.comms)
        window.settle(self.units, self.alpha, self.slots)
        self._settle_disk()
        return window.judge(self.units, self.comms, self.hooks.backwards, self.precision.loss_scale, self.plan.gradient_clipping)

    def _settle_disk(self) -> None:
        """Wait for the update, and for what moves to and from the disk. With a disk collective: all ranks raise the same error."""
        failure: Exception | None = None
        if self.updater is not None:
            self.updater.finish()
            failure = self.updater.failure
        if not self.homes.on_disk:
            if failure is not None:
                raise RuntimeError(self._lost(f"the optimizer of rank {self.rank}", str(failure))) from failure
            return
        self.homes.settle()
        failure = failure or self.homes.failure
        mine = (isinstance(failure, DiskError), f"{type(failure).__name__}: {failure}") if failure else None
        everyone = zip(self.mesh.data.ranks, gather_objects(mine, self.mesh.data), strict=True)
        failed = [(rank, *theirs) for rank, theirs in everyone if theirs is not None]
        if failed:
            rank, is_disk, why = failed[0]
            reason = self._lost(f"the {'disk' if is_disk else 'optimizer'} of rank {rank}", why)
            raise (DiskError(errno.EIO, reason) if is_disk else RuntimeError(reason)) from failure

    def _lost(self, what: str, why: str) -> str:
        remedy = "mend or change the disk, and go" if what.startswith("the disk") else "go"
        lost = f"{what} failed in step {self.global_steps}: {why}. The states of this engine are lost"
        reason = f"{lost}: {remedy} on from the last checkpoint"
        self.gate.shut(Block.BROKEN, reason)
        return reason

    def _check_disk(self) -> None:
        """Before weights are read or written by name. Collective where there is a disk."""
        self.gate.check("gathered")
        if self.homes.on_disk:
            self.comms.data.exchange(torch.zeros(1, dtype=torch.float64))  # the watch tells a rank that is alone here
            self._settle_disk()

    def _update_ahead(self, unit: Unit) -> None:
        """A unit's gradients are reduced: in the last backward of a window, its update may begin."""
        if self.updater is not None and self.at_boundary and (self.plan.batch.managed or self._boundary):
            self.updater.offer(unit)

    def _count(self, verdict: window.Verdict) -> None:
        assert self.updater is not None
        clipped = verdict.scale != 1.0 / self.precision.loss_scale
        self.global_grad_norm = verdict.norm
        self.global_steps += 1
        self.watch.step = self.global_steps
        self.global_samples += self.plan.batch.train_batch_size
        for unit in self.units:
            unit.forget_gradients()
        self.hooks.step_done()
        self._scaled_by_accumulation = None
        self._divide(None)
        self.overflow = not self.step_applied
        if self.step_applied:
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        else:
            self.skipped_steps += 1
        self._take_overflow(verdict)
        self.updater.expected = None if clipped or self.overflow else 1.0 / self.precision.loss_scale

    def _take_overflow(self, verdict: window.Verdict) -> None:
        """Adjust the loss scale; warn of gradients that are not finite: at each skipped step, at taken ones ever more rarely."""
        before = self.precision.loss_scale
        self.precision.scaler.update(self.step_applied, verdict.culprit)
        if verdict.finite:
            return
        self.nonfinite_steps += 1
        count, is_applied = self.nonfinite_steps, self.step_applied
        if self.rank == 0 and not (is_applied and count & (count - 1)):
            logger.warning(
                "step %d: the gradient of %r is not finite (the first such parameter); step %s (%d so far)%s",
                self.global_steps,
                verdict.culprit,
                "taken all the same" if is_applied else "skipped",
                count,
                self.precision.scaler.explain(before),
            )

    # -- windows of micro-batches --

    @property
    def at_boundary(self) -> bool:
        """Whether the next `step()` ends its window and applies the update; the rest only count a micro-batch."""
        if self._boundary is not None:
            return self._boundary
        return not self.plan.batch.managed or (self.micro_steps + 1) % self.plan.batch.accumulation == 0

    @property
    def averaged_over(self) -> int:
        """Over how many micro-batches summed gradients are averaged: 1 where the caller divides the losses."""
        divided = self._scaled_by_accumulation is False or not self.plan.batch.managed
        return 1 if divided else self.plan.batch.accumulation

    @property
    def alpha(self) -> float:
        """What summed gradients are multiplied with: the mean over ranks and micro-batches."""
        mean = self.world_size if self.plan.zero.reduce_op == "mean" else 1
        return 1.0 / (mean * self.averaged_over)

    def _divide(self, scale: bool | None) -> None:
        if self._scaled_by_accumulation not in (None, scale) and scale is not None:
            raise ValueError("engine.backward() got scale_wrt_gas=True and False within one accumulation window; use one")
        self._scaled_by_accumulation = scale
        self.hooks.reducer.alpha = self.alpha

    def set_boundary(self, is_boundary: bool | None) -> None:
        """Say by hand whether the next `step()` applies the update; None goes back to counting."""
        self._boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside keep their gradients on this rank; the next one outside, or `step()`, reduces them."""
        before, self.hooks.sync = self.hooks.sync, False
        try:
            yield
        finally:
            self.hooks.sync = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients accumulated since the last step."""
        for unit in self.units:
            unit.forget_gradients()
        self.hooks.forget_backwards()

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the fp16 loss scale: for losses of parameters that do not pass through the engine's outputs."""
        return loss.float() * self.precision.loss_scale

    # -- states by name --

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The model's complete `state_dict`, whatever is sharded, in tensors of the caller's own; buffers are the first rank's.
        Collective.

        So every rank holds the whole model, twice while it is made; `save_checkpoint` never does.
        """
        from slipstream.train import entries

        with access.gathered_units(self._all_params(), None, write=False):
            state = self.module.state_dict(*args, **kwargs)
        copies: dict[tuple[Any, ...], Any] = {}
        if Block.DESTROYED not in self.gate:
            firsts = entries.first_buffers(self)
            copies = {identity(buffer): firsts[name] for name, buffer in entries.buffers(self).items()}
        for name, value in state.items():
            if isinstance(value, Tensor):
                key = identity(value)
                if key not in copies:
                    copies[key] = value.detach().clone()
                state[name] = copies[key]
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a complete `state_dict` into the shards and masters. Collective; the same values on all ranks.

        Raises RuntimeError for names or shapes that do not fit, as `torch.nn.Module.load_state_dict` does.
        """
        if assign:
            raise ValueError("load_state_dict(assign=True) would replace the engine's parameters; use assign=False")
        with access.gathered_units(self._all_params(), None):
            return self.module.load_state_dict(state_dict, strict=strict)

    def gradient(self, name: str) -> Tensor:
        """The mean gradient so far of parameter `name`: in its shape, unscaled, in fp32. Collective.

        Raises KeyError for a name that no parameter has.
        """
        unit, i = self._find(name)
        with self.together("gradient"), torch.no_grad():
            if unit.placement.grads:
                window.reduce_leftovers(self.units, self.hooks, self.comms)
            return access.full_gradient(unit, i, self.alpha) / self.precision.loss_scale

    def set_gradient(self, name: str, value: Tensor) -> None:
        """Replace the mean gradient so far of parameter `name`, unscaled. Collective; the same value on all ranks.

        Raises ValueError where shapes differ or the parameter is frozen.
        """
        unit, i = self._find(name)
        with self.together("set_gradient"), torch.no_grad():
            if unit.placement.grads:
                window.reduce_leftovers(self.units, self.hooks, self.comms)
            access.set_gradient(unit, i, value.float() * self.precision.loss_scale, self.alpha)

    def optimizer_state(self, name: str) -> dict[str, Tensor]:
        """The optimizer's states of parameter `name`, each in its shape, by name ("exp_avg", ...), with "master". Collective.

        Raises KeyError for a name that no parameter has.
        """
        unit, i = self._find(name)
        with self.together("optimizer_state"):
            return access.full_optimizer_state(unit, i, self.steps)

    def set_optimizer_state(self, name: str, values: Mapping[str, Tensor]) -> None:
        """Overwrite optimizer states of parameter `name`; "master" also sets the weight. The same values on all ranks."""
        unit, i = self._find(name)
        with self.together("set_optimizer_state"):
            access.set_optimizer_state(unit, i, self.steps, values)

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        contents: Contents = "all",
    ) -> bool:
        """Write everything needed to go on, atomically; any world size and stage can load it. Collective.

        contents: "all"; "without_optimizer", whose states are most of the bytes; "weights", with buffers; "adapters", what is
        trainable. With `checkpoint.writer.decoupled` it is copied now and written while training goes on; the next save, load,
        `finish_save` or `destroy` waits for that, and raises what went wrong.
        """
        from slipstream.train import persist

        if contents not in ("all", "without_optimizer", "weights", "adapters"):
            raise ValueError(f"contents {contents!r}: it is all, without_optimizer, weights or adapters")
        folder = _folder("save_checkpoint(save_dir=)", save_dir)
        with self.together("save_checkpoint"):
            self._refuse_unknown()
            persist.save(self, folder, tag, client_state, save_latest, exclude_frozen_parameters, contents)
        return True

    def finish_save(self) -> None:
        """Wait until the last checkpoint is on disk. Collective. Raises CheckpointError where it could not be written."""
        from slipstream.train import persist

        with self.together("finish_save"):
            persist.finish(self)

    def save_pretrained(
        self,
        save_directory: str,
        dtype: torch.dtype | str | None = None,
        max_shard_size: int | str = "5GB",
        only_trainable: bool = False,
    ) -> None:
        """Write a Hugging Face folder: sharded safetensors, and config.json where the model has one. Collective.

        dtype: of parameters; None: the model's own. Each rank writes its own shards where they belong, so nothing is gathered.
        only_trainable: without what is frozen, and without buffers. Of a model with PEFT's adapters the folder is one of the base,
        the adapters merged into it, as `named_weights` gives them; with only_trainable it is PEFT's own, of the adapters.
        """
        from slipstream.checkpoint.pretrained import dtype_of, num_bytes
        from slipstream.train import folder

        wanted, nbytes = dtype_of(dtype), num_bytes(max_shard_size)
        place = _folder("save_pretrained(save_directory=)", save_directory)
        with self.together("save_pretrained"):
            self._refuse_unknown()
            folder.save_pretrained(self, place, wanted, nbytes, only_trainable)

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        exclude: Sequence[str] = (),
    ) -> tuple[str | None, dict[str, Any]]:
        """Go on from a checkpoint, ours or DeepSpeed's: (its folder, client_state), or (None, {}) without one.

        load_module_strict=False takes the names that both have. exclude: patterns ("head.*") of parameters and buffers that stay
        as they are, with their optimizer states: for a model that has changed. A failed load changes nothing.
        """
        from slipstream.train import restore

        folder = _folder("load_checkpoint(load_dir=)", load_dir)
        with self.together("load_checkpoint"):
            return restore.load(
                self,
                folder,
                tag,
                strict=load_module_strict,
                optimizer=load_optimizer_states,
                scheduler=load_lr_scheduler_states,
                module_only=load_module_only,
                exclude=exclude,
            )

    @contextmanager
    def together(self, method: str) -> Iterator[None]:
        """All ranks call a collective method, or all raise PeerError; nothing of it starts before."""
        with self.watch.guard(method):
            self.gate.check(method)
            rows = self.comms.data.exchange(torch.tensor([float(zlib.crc32(method.encode()))], dtype=torch.float64))
            if rows.min() != rows.max():
                raise PeerError(f"this rank called engine.{method}() while others called another method; it is for all ranks")
            if self.updater is not None:
                self.updater.drop()
            self._settle_before(method)
            yield

    def _settle_before(self, method: str) -> None:
        """As `_settle_disk`, but a failure keeps no engine from what needs none of its states."""
        if Block.BROKEN in self.gate:
            return
        try:
            self._settle_disk()
        except (DiskError, RuntimeError) as failure:
            if Block.BROKEN not in self.gate or Block.BROKEN not in LETS_THROUGH.get(method, ()):
                raise
            logger.error("%s: %s", method, failure)

    def _find(self, name: str) -> tuple[Unit, int]:
        places = {known: (unit, i) for unit in self.units for i, known in enumerate(unit.names)}
        if name not in places:
            by_param = {id(param): (unit, i) for unit in self.units for i, param in enumerate(unit.params)}
            tied = self.module.named_parameters(remove_duplicate=False)  # other names of parameters that have several
            places |= {other: by_param[id(param)] for other, param in tied if id(param) in by_param}
        if name in places:
            return places[name]
        import difflib

        names = list(places)
        raise KeyError(f"no parameter {name!r}; the nearest are {difflib.get_close_matches(name, names)}")

    def _all_params(self) -> dict[Unit, list[int]]:
        return {unit: list(range(len(unit.params))) for unit in self.units}

    def explain(self, *args: Any, **kwargs: Any) -> str:
        """Bytes per rank of each state and over each link, as a table; with a batch, as `forward` takes it, the peak of a step."""
        from slipstream.train import explain

        return explain.table(explain.of_engine(self, *args, **kwargs))

    # -- the model itself --

    @contextmanager
    def surgery(self, group: int | Callable[[str, nn.Parameter], int] | None = None) -> Iterator[None]:
        """Between steps, change the model inside: add, replace, remove, resize, tie, freeze and unfreeze. Collective.

            with engine.surgery():
                model.resize_token_embeddings(1000)
                engine.module = peft.get_peft_model(model, lora)

        All ranks make the same changes; values of what is new count from the first. Sharded parameters are whole and writable where
        they are touched, unit by unit. Afterwards what has stayed keeps its weights, masters, moments and step counts, under its
        new name; what is new and trainable gets fresh states in the optimizer's parameter group `group`, an index or a
        function of name and parameter (None: the first; with Muon the first of its kind), but for what
        `engine.optimizer.add_param_group({"params": [...], "lr": ...})` inside has put into another. See docs/PARAMETERS.md.

        Raises RuntimeError in the middle of a window, ValueError where ranks made different changes. After an exception inside,
        the engine goes on where the model is as it was, else it asks for another surgery.
        """
        from slipstream.train.surgery import Surgery

        with self.together("surgery"):
            operation = Surgery(self, group)
            operation.begin()
        try:
            yield
        except BaseException as error:
            operation.give_up(error)
            raise
        with self.watch.guard("surgery"), torch.no_grad():
            operation.finish()

    # -- handing over --

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The model's weights by name, whole, unit by unit: `inference_engine.update_weights(engine.named_weights())`. Collective:
        every rank iterates to the end. A tensor is there until the next is asked for; adapters of PEFT come merged.
        """
        from slipstream.train import handover

        with self.together("named_weights"):
            yield from handover.stream(self)

    # -- life --

    def sleep(self, include: Iterable[str] | None = None, device: str = "cpu", path: str | None = None) -> int:
        """Give the memory of some kinds of state back until `wake()`; returns this rank's bytes. Collective.

        include: of "optimizer", "weights" and "gradients"; None: all. device: "cpu", host memory (where the engine is on a GPU),
        or "disk", a file without a name in the folder `path`. Without weights nothing runs; without the rest, `no_grad` does.
        """
        from slipstream.train import sleep

        kinds = sleep.check(include, device, path, self.device)
        with self.together("sleep"), torch.no_grad():
            return sleep.put(self, kinds, path if device == "disk" else None)

    def wake(self) -> None:
        """Everything is as it was before `sleep`. Collective; does nothing where the engine is awake."""
        from slipstream.train import sleep

        if self.asleep is not None:
            with self.together("wake"), torch.no_grad():
                sleep.wake(self)

    def destroy(self) -> None:
        """Give everything back: the model's parameters become ordinary whole ones again, the rest is freed. Collective.

        Parameters whose weights rest on disk (offload_param) are not brought into memory, which they may not fit: they are on meta
        afterwards. Save them before.
        """
        if Block.DESTROYED in self.gate:
            return
        try:
            if self.saving is not None:
                self.finish_save()
        finally:
            self._give_back()

    def _give_back(self) -> None:
        self.gate.shut(Block.DESTROYED, "this engine was destroyed; call slipstream.initialize() for a new one")
        on_disk = sum(len(unit.params) for unit in self.units if isinstance(unit.weights, DiskStore))
        if on_disk and self.rank == 0:
            logger.info(
                "destroy: the weights of %d parameters rested on disk and go with the engine, so these are on meta now; to keep "
                "them, call save_checkpoint() or state_dict() before destroy()",
                on_disk,
            )
        with ExitStack() as closing:  # each of these, whatever the others raise: a rank may have gone
            closing.callback(self._forget)
            closing.callback(self.homes.close)
            closing.callback(self.watch.stop)
            for comm in (self.comms.data, self.comms.dp_replicate, self.comms.dp):
                closing.callback(comm.close)
            if self.updater is not None:
                closing.callback(self.updater.close)
            self._hand_back()

    def _hand_back(self) -> None:
        """The parameters become the model's own again. A disk that fails here is logged: nothing more is wanted of it."""
        try:
            self.wake()
        except DiskError as error:
            logger.error("destroy: states that slept did not come back: %s", error)
        with self.together("destroy"):
            self.hooks.remove()
            rest = torch.tensor([float(isinstance(unit.weights, DiskStore)) for unit in self.units], dtype=torch.float64)
            on_disk = self.comms.data.exchange(rest).any(0).tolist()  # a rank without a share of a unit goes along
            for unit, its in zip(self.units, on_disk, strict=True):
                unit.close(on_disk=its)
            access.forget(self.units)
            self.comms.data.exchange(torch.zeros(1, dtype=torch.float64))

    def _forget(self) -> None:
        if self.staging is not None:
            self.staging.close()
        self.units, self.steps, self.updater, self.staging = [], None, None, None
        self.slots = Slots({})
        self.optimizer = self.lr_scheduler = self.training_dataloader = None

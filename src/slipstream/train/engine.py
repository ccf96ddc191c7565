"""The training engine, the main path: forward, backward, step.

    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)      # or loss.backward()
        engine.step()

An engine owns its units, transports, optimizer and counters. Two engines in one process share nothing.
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
from slipstream.train import activation, compiled, optimizer_state
from slipstream.train import step as window
from slipstream.train.gate import IGNORED_BLOCKS, Block, Gate
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
    from slipstream.checkpoint import AsyncSave, Staging
    from slipstream.train import entries
    from slipstream.train.persist import Contents
    from slipstream.train.sleep import Asleep
    from slipstream.train.surgery import Surgery

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Parts:
    """The components of an engine, built by `initialize`."""

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


def _weak(method: Callable[[], None]) -> Callable[[], None]:
    """A callback that does not keep the method's object alive; a no-op once the object is gone."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        bound = reference()
        if bound is not None:
            bound()

    return call


def _folder(argument: str, path: object) -> str:
    """Raises ValueError for None and "": as strings they would name the folder "None" and the current folder."""
    if path is None or not str(path):
        raise ValueError(f"engine.{argument} is {path!r}: pass the path of a folder")
    return str(path)


class Engine(nn.Module):
    """A model, its sharded states and its optimizer. Created by `slipstream.initialize`; call it like the model.

    module               the model that was passed to `initialize`
    optimizer            what `initialize` returned: parameter groups and `state_dict`; None without an optimizer
    lr_scheduler         what `initialize` returned, stepped by `step()`
    training_dataloader  what `initialize` returned
    rank, world_size     this rank's data-parallel index, and the number of data-parallel ranks
    device               of this rank
    global_steps         completed accumulation windows, including skipped ones
    skipped_steps        windows without an update, because gradients were not finite
    nonfinite_steps      windows of this engine with gradients that were not finite, applied or skipped
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
        self.homes.check = _weak(self._check_disk)  # the model's hooks must not keep the engine alive
        self.updater = window.Updater(parts.units, parts.steps) if parts.steps is not None else None
        self.asleep: Asleep | None = None  # the states that sleep() moved away
        self.average: weakref.ref[entries.Average] | None = None  # the slipstream.ema.Ema of this engine; the user owns it
        self.saving: AsyncSave | None = None  # the asynchronous checkpoint in flight
        self.staging: Staging | None = parts.staging  # host memory that asynchronous checkpoints are written from
        self.gate = Gate()
        self.operation: Surgery | None = None  # the open surgery
        self.precision, self.watch = parts.precision, parts.watch
        self.optimizer: Any = None  # set by initialize, as the next two
        self.lr_scheduler: Any = None
        self.training_dataloader: Any = None
        self.rank, self.world_size = parts.mesh.data.index, parts.mesh.data.size
        self.global_steps = self.skipped_steps = self.micro_steps = self.global_samples = 0
        self.global_grad_norm: float | None = None
        self.progress = Progress(parts.plan, self.rank)
        self.step_applied = False
        self.overflow = False
        self.nonfinite_steps = 0
        self._scaled_by_accumulation: bool | None = None
        self._odd_window = ""  # the warning that was logged about this training loop
        self._boundary: bool | None = None  # set_boundary() (accelerate); None: count micro-batches
        weakref.finalize(self, parts.watch.abandon).atexit = False
        self.wire()

    def wire(self) -> None:
        """Install hooks between the current model and the current units."""
        self._known = {id(param) for param in self.module.parameters()}
        recipe, slots, reducer = self.recipe, self.slots, Reducer(self.units, self.slots)
        reducer.alpha = self.alpha
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
        """Run the model with its own arguments and return its outputs; fp16 outputs become fp32."""
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
        """Run `loss.backward()`; return the detached loss divided by the number of accumulation steps, for logging.

        loss: the scalar loss of this rank's micro-batch. `scale_wrt_gas=False`: the caller has already divided it. Other keywords
        go to `Tensor.backward` (`gradient=` for a loss that is not a scalar). Raises TypeError if the loss is not a tensor.
        """
        if not isinstance(loss, Tensor):
            raise TypeError(f"engine.backward() needs the loss as a tensor computed by the model, not {loss!r}")
        accumulation = self.plan.batch.accumulation if self.plan.batch.managed else 1
        self._divide(scale_wrt_gas)
        with self.progress.timing("backward"):
            loss.backward(retain_graph=retain_graph, **kwargs)
        return loss.detach() / accumulation if scale_wrt_gas else loss.detach()

    def step(self) -> None:
        """Reduce, clip, update and step the schedule at the end of an accumulation window; otherwise only count. Collective.

        With fp16 or `bf16.check_grad_overflow`, all ranks skip the update if a gradient on any rank is not finite.
        Raises RuntimeError without an optimizer, ValueError if a parameter was added to the model outside `surgery()`.
        """
        self.gate.check("step")
        boundary = self.at_boundary
        if boundary and self.steps is not None and (why := self.steps.unsupported_option(self.steps.inner.param_groups)):
            raise ValueError(f"engine.step(): {why}")
        self.micro_steps += 1
        self.step_applied = False
        if not boundary:
            return
        if self.updater is None:
            raise RuntimeError("engine.step() needs an optimizer: pass optimizer= to initialize() or set one in the config")
        self.watch.phase, self.watch.step = "step", self.global_steps
        with self.progress.timing("step"), torch.no_grad():
            verdict = self._finish_window()
            for unit in self.units:
                unit.release()  # a forward outside the engine, or a double backward, can leave weights gathered
            if verdict.finite or not self.precision.plan.check_overflow:
                self.updater.start(verdict.scale)
                self.step_applied = True
        self._count(verdict)
        if self.updater.is_done:
            self._settle_disk()
        if self.staging is not None and self.step_applied and not self.staging.prepared:
            from slipstream.train import persist

            persist.fill_staging(self)
        self.progress.step_done(self)
        self.watch.phase = "idle"

    def _warn_of_odd_window(self) -> None:
        """Warn once about a loop written for another engine: it runs, but trains differently than its author expects."""
        backwards, batch = self.hooks.backwards, self.plan.batch
        if backwards == 0:
            self._odd_window = (
                "engine.step() without a backward since the last one: gradients are zero, but momentum and weight decay may "
                "still change the weights"
            )
        elif batch.managed and batch.accumulation > 1 and backwards > batch.accumulation:
            self._odd_window = (
                f"{backwards} backward passes in a window of {batch.accumulation} micro-batches: call engine.step() after each "
                f"backward (it updates after the last), or set managed_gradient_accumulation to false and call it once per window"
            )
        if self._odd_window and self.rank == 0:
            logger.warning("%s", self._odd_window)

    def _refuse_unknown(self) -> None:
        """Raise ValueError if the model has a parameter that the engine does not know, and so would neither train nor save."""
        for name, param in self.module.named_parameters():
            if id(param) not in self._known:
                raise ValueError(
                    f"parameter {name!r} was added to the model after initialize(), so it would be neither trained nor saved: "
                    "change the model inside `with engine.surgery():`"
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
        """Wait for the update and for disk transfers. Collective if states are on disk: all ranks then raise the same error."""
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
        own = (isinstance(failure, DiskError), f"{type(failure).__name__}: {failure}") if failure else None
        for rank, report in zip(self.mesh.data.ranks, gather_objects(own, self.mesh.data), strict=True):
            if report is not None:
                is_disk, why = report
                reason = self._lost(f"the {'disk' if is_disk else 'optimizer'} of rank {rank}", why)
                raise (DiskError(errno.EIO, reason) if is_disk else RuntimeError(reason)) from failure

    def _lost(self, part: str, why: str) -> str:
        fix = "repair or replace the disk, then resume" if part.startswith("the disk") else "resume"
        lost = f"{part} failed in step {self.global_steps}: {why}. The states of this engine are lost"
        reason = f"{lost}: {fix} from the last checkpoint"
        self.gate.shut(Block.BROKEN, reason)
        return reason

    def _check_disk(self) -> None:
        """Called before weights are read or written by name. Collective if states are on disk."""
        self.gate.check("gathered")
        if self.homes.on_disk:
            self.comms.data.exchange(torch.zeros(1, dtype=torch.float64))  # the watch reports a rank that is alone here
            self._settle_disk()

    def _count(self, verdict: window.Verdict) -> None:
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

    def _take_overflow(self, verdict: window.Verdict) -> None:
        """Adjust the loss scale and warn of gradients that are not finite: at each skipped step, at applied ones when the count
        is a power of two."""
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
                "applied anyway" if is_applied else "skipped",
                count,
                self.precision.scaler.explain(before),
            )

    # -- accumulation windows --

    @property
    def at_boundary(self) -> bool:
        """Whether the next `step()` ends its window and applies the update; other steps only count a micro-batch."""
        if self._boundary is not None:
            return self._boundary
        return not self.plan.batch.managed or (self.micro_steps + 1) % self.plan.batch.accumulation == 0

    @property
    def averaged_over(self) -> int:
        """The number of micro-batches that gradients are averaged over; 1 if the caller divides the losses."""
        divided = self._scaled_by_accumulation is False or not self.plan.batch.managed
        return 1 if divided else self.plan.batch.accumulation

    @property
    def alpha(self) -> float:
        """The factor that turns summed gradients into their mean over ranks and micro-batches."""
        mean = self.world_size if self.plan.zero.reduce_op == "mean" else 1
        return 1.0 / (mean * self.averaged_over)

    def _divide(self, scale: bool | None) -> None:
        if self._scaled_by_accumulation not in (None, scale) and scale is not None:
            raise ValueError("engine.backward() got scale_wrt_gas=True and False within one accumulation window; use one")
        self._scaled_by_accumulation = scale
        self.hooks.reducer.alpha = self.alpha

    def set_boundary(self, is_boundary: bool | None) -> None:
        """Set whether the next `step()` applies the update; None returns to counting micro-batches."""
        self._boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients of backward passes inside on this rank; the next backward outside, or `step()`, reduces them."""
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
        """Return the loss times the fp16 loss scale: for a loss of parameters that does not depend on the engine's outputs."""
        return loss.float() * self.precision.loss_scale

    # -- states by name --

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the model's complete, unsharded `state_dict` in copies; buffers have rank 0's values. Collective.

        Every rank holds the whole model, twice during the call; `save_checkpoint` never gathers it.
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
        """Load a complete `state_dict` into the shards and masters. Collective; all ranks pass the same values.

        Raises RuntimeError if names or shapes do not match, like `torch.nn.Module.load_state_dict`.
        """
        if assign:
            raise ValueError("load_state_dict(assign=True) would replace the engine's parameters; use assign=False")
        with access.gathered_units(self._all_params(), None):
            return self.module.load_state_dict(state_dict, strict=strict)

    def gradient(self, name: str) -> Tensor:
        """Return the mean gradient so far of parameter `name`, full shape, unscaled, in fp32. Collective.

        Raises KeyError if no parameter has that name.
        """
        unit, i = self._find(name)
        with self.together("gradient"), torch.no_grad():
            if unit.placement.grads:
                window.reduce_leftovers(self.units, self.hooks, self.comms)
            return access.full_gradient(unit, i, self.alpha) / self.precision.loss_scale

    def set_gradient(self, name: str, value: Tensor) -> None:
        """Replace the mean gradient so far of parameter `name`; `value` is unscaled. Collective; all ranks pass the same value.

        Raises ValueError if the shapes differ or the parameter is frozen.
        """
        unit, i = self._find(name)
        with self.together("set_gradient"), torch.no_grad():
            if unit.placement.grads:
                window.reduce_leftovers(self.units, self.hooks, self.comms)
            access.set_gradient(unit, i, value.float() * self.precision.loss_scale, self.alpha)

    def optimizer_state(self, name: str) -> dict[str, Tensor]:
        """Return the optimizer states of parameter `name`, unsharded, by name ("exp_avg", ...), and its "master". Collective.

        Raises KeyError if no parameter has that name.
        """
        unit, i = self._find(name)
        with self.together("optimizer_state"):
            return optimizer_state.of_parameter(unit, i, self.steps)

    def set_optimizer_state(self, name: str, values: Mapping[str, Tensor]) -> None:
        """Overwrite optimizer states of parameter `name`; "master" also sets the weight. Collective; same values on all ranks."""
        unit, i = self._find(name)
        with self.together("set_optimizer_state"):
            optimizer_state.set_parameter(unit, i, self.steps, values)

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        contents: Contents = "all",
    ) -> bool:
        """Write a checkpoint atomically; any world size and ZeRO stage can load it. Collective.

        contents: "all"; "without_optimizer", whose states are most of the bytes; "weights", with buffers; "adapters", the
        trainable parameters only. With `checkpoint.writer.decoupled` the checkpoint is asynchronous: states are copied now and
        written while training continues. The next save, load, `finish_save` or `destroy` waits for it and raises its error.
        """
        from slipstream.train import persist

        if contents not in ("all", "without_optimizer", "weights", "adapters"):
            raise ValueError(f"save_checkpoint(contents={contents!r}): use all, without_optimizer, weights or adapters")
        folder = _folder("save_checkpoint(save_dir=)", save_dir)
        with self.together("save_checkpoint"):
            self._refuse_unknown()
            persist.save(self, folder, tag, client_state, save_latest, exclude_frozen_parameters, contents)
        return True

    def finish_save(self) -> None:
        """Wait until the last checkpoint is on disk. Collective. Raises CheckpointError if it could not be written."""
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
        """Write a Hugging Face folder: sharded safetensors, and config.json if the model has a configuration. Collective.

        dtype: of parameters; None: the model's own. Each rank writes its own shards into the files; nothing is gathered.
        only_trainable: without frozen parameters and buffers. For a model with PEFT adapters the folder holds the base model with
        the adapters merged, as in `named_weights`; with only_trainable it is a PEFT adapter folder.
        """
        from slipstream.checkpoint.pretrained import dtype_of, num_bytes
        from slipstream.train import folder

        file_dtype, nbytes = dtype_of(dtype), num_bytes(max_shard_size)
        path = _folder("save_pretrained(save_directory=)", save_directory)
        with self.together("save_pretrained"):
            self._refuse_unknown()
            folder.save_pretrained(self, path, file_dtype, nbytes, only_trainable)

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
        """Load a Slipstream or DeepSpeed checkpoint. Collective. Returns (its folder, client_state); without one, (None, {}).

        load_module_strict=False loads the names that model and checkpoint share. exclude: patterns ("head.*") of parameters and
        buffers that keep their current values and optimizer states, for a model that has changed. A failed load changes nothing.
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
        """Guard a collective method: it starts once all ranks have called it; otherwise all raise PeerError."""
        with self.watch.guard(method):
            self.gate.check(method)
            rows = self.comms.data.exchange(torch.tensor([float(zlib.crc32(method.encode()))], dtype=torch.float64))
            if rows.min() != rows.max():
                raise PeerError(f"this rank called engine.{method}() while other ranks called another method; call it on all ranks")
            self._settle_before(method)
            yield

    def _settle_before(self, method: str) -> None:
        """`_settle_disk`, but a failure is only logged if `method` needs none of the lost states."""
        if Block.BROKEN in self.gate:
            return
        try:
            self._settle_disk()
        except (DiskError, RuntimeError) as failure:
            if Block.BROKEN not in self.gate or Block.BROKEN not in IGNORED_BLOCKS.get(method, ()):
                raise
            logger.error("%s: %s", method, failure)

    def _find(self, name: str) -> tuple[Unit, int]:
        places = {known: (unit, i) for unit in self.units for i, known in enumerate(unit.names)}
        if name not in places:
            by_param = {id(param): (unit, i) for unit in self.units for i, param in enumerate(unit.params)}
            tied = self.module.named_parameters(remove_duplicate=False)  # further names of tied parameters
            places |= {alias: by_param[id(param)] for alias, param in tied if id(param) in by_param}
        if name in places:
            return places[name]
        import difflib

        raise KeyError(f"no parameter {name!r}; the nearest are {difflib.get_close_matches(name, list(places))}")

    def _all_params(self) -> dict[Unit, list[int]]:
        return {unit: list(range(len(unit.params))) for unit in self.units}

    def explain(self, *args: Any, **kwargs: Any) -> str:
        """Return a table of bytes per rank: memory by state, traffic by link; given a batch (arguments of `forward`), the peak."""
        from slipstream.train import explain

        return explain.table(explain.of_engine(self, *args, **kwargs))

    # -- changing the model --

    @contextmanager
    def surgery(self, group: int | Callable[[str, nn.Parameter], int] | None = None) -> Iterator[None]:
        """Change the model between steps: add, replace, remove, resize, tie, freeze or unfreeze parameters. Collective.

            with engine.surgery():
                model.resize_token_embeddings(1000)
                engine.module = peft.get_peft_model(model, lora)

        All ranks make the same changes; new parameters take rank 0's values. A sharded parameter is gathered, with its unit, when
        it is accessed, and is writable. Parameters that stay keep their weights, masters, moments and step counts, under their new
        names. New trainable parameters get fresh states in the optimizer's parameter group `group`, an index or a function of
        name and parameter (None: the first; with Muon the first of its kind), unless
        `engine.optimizer.add_param_group({"params": [...], "lr": ...})` inside put them into another. See docs/PARAMETERS.md.

        Raises RuntimeError in the middle of an accumulation window, ValueError if ranks made different changes. After an exception
        inside, the engine continues if the model is unchanged; otherwise it needs another surgery first.
        """
        from slipstream.train.surgery import Surgery

        with self.together("surgery"):
            operation = Surgery(self, group)
            operation.begin()
        try:
            yield
        except BaseException as error:
            operation.abort(error)
            raise
        with self.watch.guard("surgery"), torch.no_grad():
            operation.finish()

    # -- hand-over to an inference engine --

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's full weights by name, unit by unit: `inference_engine.update_weights(engine.named_weights())`.

        Collective: every rank iterates to the end. A tensor is valid until the next one is requested. PEFT adapters are merged.
        """
        from slipstream.train import handover

        with self.together("named_weights"):
            yield from handover.stream(self)

    # -- lifecycle --

    def sleep(self, include: Iterable[str] | None = None, device: str = "cpu", path: str | None = None) -> int:
        """Free the memory of some kinds of state until `wake()`; returns the bytes freed on this rank. Collective.

        include: any of "optimizer", "weights" and "gradients"; None: all. device: "cpu", host memory (if the engine is on a GPU),
        or "disk", an unnamed file in the folder `path`. Without weights nothing runs; without the other states, forwards under
        `torch.no_grad()` do.
        """
        from slipstream.train import sleep

        kinds = sleep.check(include, device, path, self.device)
        with self.together("sleep"), torch.no_grad():
            return sleep.put(self, kinds, path if device == "disk" else None)

    def wake(self) -> None:
        """Restore the states that `sleep` moved away. Collective; a no-op if the engine is awake."""
        from slipstream.train import sleep

        if self.asleep is not None:
            with self.together("wake"), torch.no_grad():
                sleep.wake(self)

    def destroy(self) -> None:
        """Free the engine's resources; the model's parameters become ordinary, unsharded parameters again. Collective.

        Weights on disk (offload_param) are not loaded, as they may not fit into memory: their parameters are on meta afterwards.
        Save them before.
        """
        if Block.DESTROYED in self.gate:
            return
        try:
            if self.saving is not None:
                self.finish_save()
        finally:
            self._tear_down()

    def _tear_down(self) -> None:
        self.gate.shut(Block.DESTROYED, "this engine was destroyed; call slipstream.initialize() for a new one")
        on_disk = sum(len(unit.params) for unit in self.units if isinstance(unit.weights, DiskStore))
        if on_disk and self.rank == 0:
            logger.info(
                "destroy: the weights of %d parameters were on disk and are deleted with the engine; these parameters are on meta "
                "now. To keep their values, call save_checkpoint() or state_dict() before destroy()",
                on_disk,
            )
        with ExitStack() as closing:  # run every callback even if one raises: another rank may be gone
            closing.callback(self._forget)
            closing.callback(self.homes.close)
            closing.callback(self.watch.stop)
            for comm in (self.comms.data, self.comms.dp_replicate, self.comms.dp):
                closing.callback(comm.close)
            if self.updater is not None:
                closing.callback(self.updater.close)
            self._return_parameters()

    def _return_parameters(self) -> None:
        """Turn the parameters into the model's own again. A disk failure is only logged: the disk is no longer needed."""
        try:
            self.wake()
        except DiskError as error:
            logger.error("destroy: sleeping states could not be restored: %s", error)
        with self.together("destroy"):
            self.hooks.remove()
            own = torch.tensor([float(isinstance(unit.weights, DiskStore)) for unit in self.units], dtype=torch.float64)
            anywhere = self.comms.data.exchange(own).any(0).tolist()  # a rank without a share of a unit participates
            for unit, on_disk in zip(self.units, anywhere, strict=True):
                unit.close(on_disk=on_disk)
            access.forget(self.units)
            self.comms.data.exchange(torch.zeros(1, dtype=torch.float64))

    def _forget(self) -> None:
        if self.staging is not None:
            self.staging.close()
        self.units, self.steps, self.updater, self.staging = [], None, None, None
        self.slots = Slots({})
        self.optimizer = self.lr_scheduler = self.training_dataloader = None

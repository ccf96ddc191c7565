"""The training engine, the main path: forward, backward, step.

    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)      # or loss.backward()
        engine.step()

An engine owns its units, transports, optimizer and counters. Two engines in one process share nothing.
"""

from __future__ import annotations

import logging
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from slipstream.activations import blocks
from slipstream.checkpoint.pretrained import dtype_of, num_bytes
from slipstream.config.plan import BatchPlan
from slipstream.moe.load import ExpertLoad, meters, sum_loads
from slipstream.ops.disk import DiskError
from slipstream.parallel.exchange import Exchange
from slipstream.train import compiled, handover, named, sleep, window
from slipstream.train.deepspeed_names import explain_missing
from slipstream.train.gate import IGNORED_BLOCKS, Obstacle
from slipstream.train.planning import explain
from slipstream.train.precision import Precision
from slipstream.train.progress import Progress
from slipstream.train.saving import entries, hugging_face, optimizer_state
from slipstream.train.saving.load import Wanted, load
from slipstream.train.saving.save import Contents, Saves
from slipstream.train.schedules import advance
from slipstream.train.states import States
from slipstream.train.surgery import Surgery
from slipstream.train.window import AccumulationWindow, Verdict, judge
from slipstream.world.watch import PeerError
from slipstream.zero import access, memory
from slipstream.zero.buffers import spread_first
from slipstream.zero.build import unfreeze
from slipstream.zero.hooks import Hooks, Reducer
from slipstream.zero.leaves import cuts_of, identity
from slipstream.zero.storage.store import DiskStore
from slipstream.zero.unit import Unit

logger = logging.getLogger(__name__)


def _weak(method: Callable[[], None]) -> Callable[[], None]:
    """A callback that does not keep the method's object alive, and does nothing once the object is gone."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        bound = reference()
        if bound is not None:
            bound()

    return call


def _folder(argument: str, path: object) -> str:
    """Raise ValueError for None and "", which as strings would name the folder "None" and the current folder."""
    if path is None or not str(path):
        raise ValueError(f"engine.{argument} is {path!r}: pass the path of a folder")
    return str(path)


class Engine(nn.Module):
    """A model, its sharded states and its optimizer. Created by `slipstream.initialize`; call it like the model.

    module               the model that was passed to `initialize`
    optimizer            what `initialize` returned: parameter groups and `state_dict`; None without an optimizer
    lr_scheduler         what `initialize` returned, stepped by `step()`
    training_dataloader  what `initialize` returned
    rank, world_size     this process's global rank, and the number of ranks of this engine
    mesh                 the axes of ranks
    states               the sharded states of the model, until `destroy`
    device               of this rank
    global_steps         completed accumulation windows, including skipped ones
    skipped_steps        windows without an update, because gradients were not finite
    nonfinite_steps      windows of this engine with gradients that were not finite, applied or skipped
    micro_steps          calls of `step()`
    global_samples       samples of all ranks so far
    global_grad_norm     2-norm of the last window's mean gradient before clipping; None before the first
    step_applied         whether the last `step()` updated the weights
    overflow             whether the last window was skipped, because gradients were not finite
    plan                 the resolved configuration, frozen
    precision            dtypes and `loss_scale`
    """

    def __init__(self, states: States, precision: Precision) -> None:
        super().__init__()
        self.module, self.states = states.model, states
        self.plan, self.mesh, self.device = states.plan, states.mesh, states.device
        self.watch, self.gate, self.precision = states.watch, states.gate, precision
        states.homes.check = _weak(states.check_disk)  # the model's hooks must not keep the states alive
        self.saves = Saves(states)
        self.saves.auto.engine = weakref.ref(self)
        self.operation: Surgery | None = None  # the open surgery
        self.optimizer: Any = None  # `initialize` sets this and the next two
        self.lr_scheduler: Any = None
        self.training_dataloader: Any = None
        self.rank, self.world_size = self.mesh.rank, self.mesh.world.size
        self.global_steps = self.skipped_steps = self.micro_steps = self.global_samples = 0
        self.global_grad_norm: float | None = None
        self.progress = Progress(self.plan, self.device, logs=self.mesh.is_first)
        self.window = AccumulationWindow(self.plan, self.mesh.num_means)
        self.step_applied = False
        self.overflow = False
        self.nonfinite_steps = 0
        weakref.finalize(self, self.watch.abandon).atexit = False
        self.wire()

    @property
    def units(self) -> list[Unit]:
        """The units of the model, in forward order; none after `destroy`."""
        return list(self.states.units) if "states" in vars(self) else []

    def wire(self) -> None:
        """Install hooks between the current model and the current units."""
        states, speaks = self.states, self.mesh.is_first
        hooks = Hooks(
            states.model,
            states.units,
            Reducer(states.units, states.slots, self.window.alpha),
            self.watch,
            self.precision.inputs,
            self.precision.outputs,
            unfreeze=partial(unfreeze, recipe=states.recipe, slots=states.slots),
        )
        hooks.landed = None if self.plan.zero.ignore_unused else set()
        hooks.handles += compiled.apply(self.plan.compile, states.model)
        fulls = [unit.full for unit in states.units]
        hooks.handles += blocks.apply(self.plan.activations, states.model, fulls, self.progress.timing, speaks=speaks)
        states.hook(hooks)

    # -- the loop --

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model with its own arguments and return its outputs; fp16 outputs become fp32."""
        self.gate.check("forward")
        if self.plan.broadcast_buffers and self.states.hooks.sync:
            spread_first(list(self.states.model.buffers()), self.states.stage)
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
        self.window.divide(scale_wrt_gas)
        self.progress.saw(loss, 1 if scale_wrt_gas else accumulation)
        with self.progress.timing("backward"):
            for call in self.states.before_backward:
                call(loss)
            loss.backward(retain_graph=retain_graph, **kwargs)
        return loss.detach() / accumulation if scale_wrt_gas else loss.detach()

    def step(self) -> None:
        """Reduce, clip, update and step the schedule at the end of an accumulation window; otherwise only count. Collective.

        With fp16 or `bf16.check_grad_overflow`, all ranks skip the update if a gradient on any rank is not finite.
        Raises RuntimeError without an optimizer, ValueError if a parameter was added to the model outside `surgery()`.
        """
        self.gate.check("step")
        is_boundary, states, steps = self.at_boundary, self.states, self.states.steps
        if is_boundary and (why := steps.unsupported_option(steps.inner.param_groups)):
            raise ValueError(f"engine.step(): {why}")
        self.micro_steps += 1
        self.step_applied = False
        if not is_boundary:
            return
        if not steps.has_optimizer:
            raise RuntimeError("engine.step() needs an optimizer: pass optimizer= to initialize() or set one in the config")
        self.watch.phase, self.watch.step = "step", self.global_steps
        with self.progress.timing("step"), torch.no_grad():
            verdict = self._finish_window()
            states.release()  # a forward outside the engine, or a double backward, can leave weights gathered
            if verdict.finite or not self.precision.plan.check_overflow:
                states.updater.start(verdict.scale)
                self.step_applied = True
        self._count(verdict)
        if states.updater.is_done:
            states.settle()
        for end_step in states.after_step:
            end_step(self.step_applied)
        if self.step_applied:
            self.saves.prepare()
        rates = [group["lr"] for group in self.optimizer.param_groups] if self.optimizer else []
        self.progress.step_done(self.global_steps, self.skipped_steps, rates, verdict.norm, self.precision.loss_scale)
        self.watch.phase = "idle"
        self.saves.auto.after_step(self, verdict.save_request)

    def _finish_window(self) -> Verdict:
        hooks = self.states.hooks
        has_gradients = hooks.has_gradients()
        self.window.check_loop(hooks.backwards, has_gradients, logs=self.mesh.is_first)
        if has_gradients:
            self.precision.end_step()
        window.finish(self.states, self.window.alpha())
        return judge(self.states, self.precision.loss_scale, self.plan.gradient_clipping, self.saves.auto.save_request)

    def _count(self, verdict: Verdict) -> None:
        self.global_grad_norm = verdict.norm
        self.global_steps += 1
        self.watch.step = self.global_steps
        self.global_samples += self.plan.batch.train_batch_size
        self.progress.count(self.plan.batch.train_batch_size)
        for unit in self.units:
            unit.forget_gradients()
        self.states.hooks.step_done()
        self.window.divides = None
        self.overflow = not self.step_applied
        if self.step_applied:
            self._step_schedule()
        else:
            self.skipped_steps += 1
        self._take_overflow(verdict)

    def _step_schedule(self) -> None:
        if self.lr_scheduler is not None:
            advance(self.lr_scheduler, self.plan.batch.train_batch_size)

    def _take_overflow(self, verdict: Verdict) -> None:
        """Adjust the loss scale, and warn of nonfinite gradients: at every skipped step, and at applied steps when their count is a
        power of two."""
        before = self.precision.loss_scale
        self.precision.scaler.update(self.step_applied, verdict.culprit, verdict.cause)
        if verdict.finite:
            return
        self.nonfinite_steps += 1
        count, is_applied = self.nonfinite_steps, self.step_applied
        if self.mesh.is_first and not (is_applied and count & (count - 1)):
            logger.warning(
                "step %d: the gradient of %r is not finite (the first such parameter)%s; step %s (%d so far)%s",
                self.global_steps,
                verdict.culprit,
                verdict.cause and f": {verdict.cause}",
                "applied anyway" if is_applied else "skipped",
                count,
                self.precision.scaler.explain(before),
            )

    # -- accumulation windows --

    @property
    def at_boundary(self) -> bool:
        """Whether the next `step()` ends its window and applies the update; other steps only count a micro-batch."""
        return self.window.ends_after(self.micro_steps)

    def set_batch(self, batch: BatchPlan) -> None:
        """Change the batch sizes from the next accumulation window on."""
        if batch.accumulation != self.plan.batch.accumulation:
            self.micro_steps = self.global_steps * batch.accumulation
        self.plan = self.window.plan = self.states.plan = replace(self.plan, batch=batch)
        self.window.divides = None

    def set_boundary(self, is_boundary: bool | None) -> None:
        """Set whether the next `step()` applies the update; None returns to counting micro-batches."""
        self.window.forced = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients of backward passes inside on this rank; the next backward outside, or `step()`, reduces them."""
        hooks = self.states.hooks
        before, hooks.sync = hooks.sync, False
        try:
            yield
        finally:
            hooks.sync = before

    @property
    def backwards(self) -> int:
        """The number of backward passes in the current window."""
        return self.states.hooks.backwards

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients accumulated since the last step."""
        for unit in self.units:
            unit.forget_gradients()
        self.states.hooks.forget_backwards()
        self.window.divides = None

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss scaled like the engine's outputs (fp16, `elastic_batch`). For a loss that does not depend on those
        outputs, such as a loss of parameters or of a submodule's outputs."""
        return loss.float() * self.precision.incoming()

    # -- states by name --

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the model's complete, unsharded `state_dict` in copies; buffers have rank 0's values. Collective.

        Every rank holds the whole model, twice during the call; `save_checkpoint` never gathers it.
        """
        with access.gathered_units(self._all_params(), None, write=False):
            state = self.module.state_dict(*args, **kwargs)
        copies = self._joined_parts(state)
        if Obstacle.DESTROYED not in self.gate:
            firsts = entries.first_buffers(self.states)
            copies |= {identity(buffer): firsts[name] for name, buffer in entries.buffers(self.states).items()}
        for name, value in state.items():
            if isinstance(value, Tensor):
                key = identity(value)
                if key not in copies:
                    copies[key] = value.detach().clone()
                state[name] = copies[key]
        return state

    def _joined_parts(self, state: Mapping[str, Any]) -> dict[tuple[Any, ...], Any]:
        """The whole parameters of which this rank has a part, keyed by the identity of the part. Collective."""
        joined: dict[tuple[Any, ...], Any] = {}
        for unit in self.units:
            for i, (name, param) in enumerate(zip(unit.names, unit.params, strict=True)):
                if cuts_of(param) and isinstance(value := state.get(name), Tensor):
                    joined[identity(value)] = access.whole_of(value.detach(), unit, i)
        return joined

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a complete `state_dict` into the shards and masters. Collective; all ranks pass the same values.

        Raises RuntimeError if names or shapes do not match, like `torch.nn.Module.load_state_dict`.
        """
        if assign:
            raise ValueError("load_state_dict(assign=True) would replace the engine's parameters; use assign=False")
        own = dict(state_dict)
        places = {id(param): (unit, i) for unit in self.units for i, param in enumerate(unit.params)}
        for name, param in self.module.named_parameters(remove_duplicate=False):  # a tied weight by each of its names
            if name in own and id(param) in places:
                own[name] = access.part_of_whole(own[name], *places[id(param)])
        with access.gathered_units(self._all_params(), None):
            result = self.module.load_state_dict(own, strict=strict)
        if self.states.outer is not None:
            self.states.outer.restart(())
        return result

    def gradient(self, name: str) -> Tensor:
        """Return the mean gradient so far of parameter `name`, whole (full shape), unscaled, in fp32. Collective.

        Raises KeyError if no parameter has that name.
        """
        with self.together("gradient"), torch.no_grad():
            return named.read(self.states, name, self._gradient)["gradient"]

    def _gradient(self, unit: Unit, i: int) -> dict[str, Tensor]:
        if unit.placement.grads:
            window.reduce_leftovers(self.states)
        return {"gradient": access.full_gradient(unit, i, self.window.alpha()) / self.precision.loss_scale}

    def set_gradient(self, name: str, value: Tensor) -> None:
        """Replace the mean gradient so far of parameter `name`; `value` is whole and unscaled. Collective; all ranks pass the same.

        Raises KeyError if no parameter has that name, ValueError if the shapes differ or the parameter is frozen.
        """
        with self.together("set_gradient"), torch.no_grad():
            named.write(
                self.states,
                name,
                {"gradient": value.float() * self.precision.loss_scale},
                self._set_gradient,
                access.check_has_gradient,
            )

    def _set_gradient(self, unit: Unit, i: int, values: Mapping[str, Tensor]) -> None:
        if unit.placement.grads:
            window.reduce_leftovers(self.states)
        access.set_gradient(unit, i, values["gradient"], self.window.alpha())

    def optimizer_state(self, name: str) -> dict[str, Tensor]:
        """Return parameter `name`'s optimizer states by name ("exp_avg", ...), and its "master", whole, on `device`. Collective.

        Raises KeyError if no parameter has that name.
        """
        with self.together("optimizer_state"):
            of = optimizer_state.of_parameters
            return named.read(self.states, name, lambda unit, i: of(unit, [i], self.states.steps)[i])

    def set_optimizer_state(self, name: str, values: Mapping[str, Tensor]) -> None:
        """Overwrite optimizer states of parameter `name`; "master" also sets the weight. Collective; all ranks pass the same.

        Raises KeyError if there is no such parameter or state, and ValueError for a wrong shape.
        """
        put, check, steps = optimizer_state.set_parameter, optimizer_state.check_names, self.states.steps
        with self.together("set_optimizer_state"):
            named.write(
                self.states,
                name,
                values,
                lambda unit, i, parts: put(unit, i, steps, parts),
                lambda unit, i: check(unit, i, steps, values.keys()),
            )

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
        if contents not in ("all", "without_optimizer", "weights", "adapters"):
            raise ValueError(f"save_checkpoint(contents={contents!r}): use all, without_optimizer, weights or adapters")
        folder = _folder("save_checkpoint(save_dir=)", save_dir)
        with self.together("save_checkpoint"):
            self.states.refuse_unknown()
            self.saves.save(self, folder, tag, client_state, save_latest, exclude_frozen_parameters, contents)
        return True

    def finish_save(self) -> None:
        """Wait until the last checkpoint is on disk. Collective. Raises CheckpointError if it could not be written."""
        with self.together("finish_save"):
            self.saves.finish()

    def save_pretrained(
        self,
        save_directory: str,
        dtype: torch.dtype | str | None = None,
        max_shard_size: int | str = "5GB",
        only_trainable: bool = False,
    ) -> None:
        """Write a Hugging Face folder: sharded safetensors, and config.json if the model has a configuration. Collective.

        dtype: of parameters; None: the model's own. Each rank writes its own shards into the files, from any layout; nothing is
        gathered.
        only_trainable: without frozen parameters and buffers. For a model with PEFT adapters the folder holds the base model with
        the adapters merged, as in `named_weights`; with only_trainable it is a PEFT adapter folder.
        """
        file_dtype, nbytes = dtype_of(dtype), num_bytes(max_shard_size)
        path = _folder("save_pretrained(save_directory=)", save_directory)
        with self.together("save_pretrained"):
            self.states.refuse_unknown()
            hugging_face.save_pretrained(self.states, path, file_dtype, nbytes, only_trainable)

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
        folder = _folder("load_checkpoint(load_dir=)", load_dir)
        with self.together("load_checkpoint"):
            self.saves.finish()
            choices = (load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only)
            with self.saves.complete(folder, tag) as (place, loaded_tag):
                path, client_state = load(self.states, self, place, loaded_tag, Wanted(*choices, list(exclude)))
            if path is not None and place != folder:
                path = f"{folder}/{loaded_tag}"
            self.saves.auto.loaded |= path is not None
            if path is not None:  # a new window of the current plan, whatever the saved accumulation was
                self.zero_grad()
                self.micro_steps = self.global_steps * (self.plan.batch.accumulation if self.plan.batch.managed else 1)
            return path, client_state

    @contextmanager
    def together(self, method: str) -> Iterator[None]:
        """Guard a collective method: it starts once all ranks have called it; otherwise all raise PeerError."""
        with self.watch.guard(method):
            self.gate.check(method)
            rows = self.states.world.exchange(torch.tensor([float(zlib.crc32(method.encode()))], dtype=torch.float64))
            if rows.min() != rows.max():
                raise PeerError(f"this rank called engine.{method}() while other ranks called another method; call it on all ranks")
            self.states.hooks.end_abandoned()
            self._settle_before(method)
            if self.states.outer is not None:
                self.states.outer.before(method)
            yield

    def _settle_before(self, method: str) -> None:
        """Wait for updates and disk transfers; a failure is only logged if `method` needs none of the lost states."""
        if Obstacle.BROKEN in self.gate:
            return
        try:
            self.states.settle()
        except (DiskError, RuntimeError) as failure:
            if Obstacle.BROKEN not in self.gate or Obstacle.BROKEN not in IGNORED_BLOCKS.get(method, ()):
                raise
            logger.error("%s: %s", method, failure)

    def __getattr__(self, name: str) -> Any:
        if name == "states":  # `destroy` deletes them
            self.gate.check("states")
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name.startswith("_"):  # a protocol of Python or a library, which asks for what may be missing
                raise
            raise AttributeError(f"{error}: {explain_missing(name)}", name=name, obj=self) from None

    def _all_params(self) -> dict[Unit, list[int]]:
        return {unit: list(range(len(unit.params))) for unit in self.units}

    def explain(self, *args: Any, **kwargs: Any) -> str:
        """Return a table of bytes per rank: memory by state, traffic by link; given a batch (arguments of `forward`), the peak."""
        return explain.table(explain.of_states(self.states, *args, **kwargs))

    def expert_load(self) -> dict[str, ExpertLoad]:
        """Return the load of the experts in the last step, over all ranks, by the name of their layer: the number of routes to each
        expert, the share of dropped routes, and the mean auxiliary loss. Collective. In a pipeline: the layers of this stage."""
        by_name = meters(self.module)
        with self.together("expert_load"):
            total = self.states.exchange(self.mesh.dense.both).sum
            return sum_loads({name: meter.last for name, meter in by_name.items()}, total, by_name) if by_name else {}

    def log(self, figures: Mapping[str, float | Tensor]) -> None:
        """Pass the script's figures, by tag, to the monitors of the config, at `global_samples`. Only rank 0 has monitors;
        elsewhere this does nothing. A one-element tensor is read, which waits for the device."""
        self.gate.check("log")
        if (monitors := self.states.resources.get("monitors")) is not None:
            monitors.write_events([(tag, value, self.global_samples) for tag, value in figures.items()])

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
        with self.together("surgery"):
            operation = Surgery(self.states, group, self.wire)
            operation.begin()
            self.operation = operation
        try:
            yield
        except BaseException as error:
            operation, self.operation = self.operation, None
            self.states.model = self.module
            operation.abort(error)
            raise
        with self.watch.guard("surgery"), torch.no_grad():
            operation, self.operation = self.operation, None
            self.states.model = self.module  # the user may have wrapped it
            operation.finish()

    # -- hand-over to an inference engine --

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's full weights by name, unit by unit: `inference_engine.update_weights(engine.named_weights())`.

        Collective: every rank iterates to the end. A tensor is valid until the next one is requested. PEFT adapters are merged.
        """
        with self.together("named_weights"):
            yield from handover.stream(self.states)

    def exchange(self, axis: str) -> Exchange:
        """The collectives on activations between the ranks of an axis, "sp" or "tp", for layers that compute in parts
        (slipstream.parallel). The first call is collective over the axis. Raises ValueError for another axis."""
        if axis not in ("sp", "tp"):
            raise ValueError(f"engine.exchange({axis!r}): use 'sp' or 'tp'")
        return self.states.exchange(axis)

    # -- lifecycle --

    def sleep(self, include: Iterable[str] | None = None, device: str = "cpu", path: str | None = None) -> int:
        """Free the memory of some kinds of state until `wake()`; returns the bytes freed on this rank. Collective.

        include: any of "optimizer", "weights" and "gradients"; None: all. device: "cpu", host memory (if the engine is on a GPU),
        or "disk", an unnamed file in the folder `path`. Without weights nothing runs; without the other states, forwards under
        `torch.no_grad()` do.
        """
        kinds = sleep.check(include, device, path, self.device)
        with self.together("sleep"), torch.no_grad():
            return sleep.put(self.states, kinds, path if device == "disk" else None)

    def wake(self) -> None:
        """Restore the states that `sleep` moved away. Collective; a no-op if the engine is awake."""
        if Obstacle.ASLEEP in self.gate:
            with self.together("wake"), torch.no_grad():
                sleep.wake(self.states)

    def destroy(self) -> None:
        """Free the engine's resources; the model's parameters become ordinary, unsharded parameters again. Collective.

        Weights on disk (offload_param) are not loaded, as they may not fit into memory: their parameters are on meta afterwards.
        Save them before.
        """
        if Obstacle.DESTROYED in self.gate:
            return
        try:
            if self.saves.in_flight:
                self.finish_save()
        finally:
            self._tear_down()

    def _tear_down(self) -> None:
        self.gate.shut(Obstacle.DESTROYED, "this engine was destroyed; call slipstream.initialize() for a new one")
        on_disk = sum(len(unit.params) for unit in self.units if isinstance(unit.weights, DiskStore))
        if on_disk and self.mesh.is_first:
            logger.info(
                "destroy: the weights of %d parameters were on disk and are deleted with the engine; these parameters are on meta "
                "now. To keep their values, call save_checkpoint() or state_dict() before destroy()",
                on_disk,
            )
        with ExitStack() as closing:  # run every callback even if one raises: another rank may be gone
            closing.callback(self._forget)
            closing.callback(self.states.homes.close)
            closing.callback(self.watch.stop)
            for comm in (*self.states.transports(), *self.states.resources.values()):
                closing.callback(comm.close)
            closing.callback(self.states.steps.close)
            closing.callback(self.states.updater.close)
            self._return_parameters()

    def _return_parameters(self) -> None:
        """Turn the parameters into the model's own again. A disk failure is only logged: the disk is no longer needed."""
        try:
            self.wake()
        except DiskError as error:
            logger.error("destroy: sleeping states could not be restored: %s", error)
        states = self.states
        with self.together("destroy"):
            states.hooks.remove()
            own = torch.tensor([float(isinstance(unit.weights, DiskStore)) for unit in states.units], dtype=torch.float64)
            anywhere = states.comms.data.exchange(own).any(0).tolist()  # a rank without a share of a unit takes part, too
            for unit, on_disk in zip(states.units, anywhere, strict=True):
                memory.close(unit, on_disk=on_disk)
            access.forget(states.units)
            states.fence()

    def _forget(self) -> None:
        self.saves.close()
        self.states.disconnect()
        del self.states
        self.optimizer = self.lr_scheduler = self.training_dataloader = None

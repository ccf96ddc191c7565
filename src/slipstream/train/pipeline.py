"""The engine of a pipeline: `train_batch` walks one rank's schedule (parallel/schedule.py) over its chunks.

    engine, _, _, _ = slipstream.initialize(model=PipelineModule(layers, num_stages=2, loss_fn=loss_fn), config=config)
    loss = engine.train_batch(data_iter)

A chunk is one call of the engine's model, so hooks, units, the verdict and the optimizer are those of any engine. Activations and
their gradients travel by mail (parallel/mail.py), each stage's in micro-batch order.

[Note: One reduction] Until a rank's last backward of a step, gradients stay on the rank (`no_sync`). That backward reduces them,
unit by unit. So the sums do not depend on the schedule, nor the traffic on the number of micro-batches. At stages 2 and 3 this
costs the memory of whole gradients; `slipstream.pipeline.reduce` "micro_batch" reduces in each backward instead.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from slipstream.config.plan import BatchPlan, PipelinePlan
from slipstream.observe.memory import MemoryReading
from slipstream.parallel.deferred import Deferred
from slipstream.parallel.drawing import draw_svg, draw_text
from slipstream.parallel.huggingface import PipelinedDecoder
from slipstream.parallel.mail import Mail, MailByShares, SharedMail, connect_mail
from slipstream.parallel.module import PipelineError, PipelineModule
from slipstream.parallel.schedule import Action, Kind, Schedule, Span, StageMessage, Style, rank_of, simulate, stages_of, style_of
from slipstream.parallel.topology import PipelineParallelGrid, topology_of
from slipstream.train.data import RepeatingLoader
from slipstream.train.engine import Engine
from slipstream.train.precision import Precision
from slipstream.train.states import States
from slipstream.world.mesh import Differs, Mesh
from slipstream.world.watch import PeerError
from slipstream.zero.leaves import differs_of, keep_apart, kind_of, mark_tied
from slipstream.zero.trees import map_tensors, tensors_in

logger = logging.getLogger(__name__)

_ONLY = "Only train_batch() is accessible in pipeline mode."  # DeepSpeed's text
_REDUCTIONS = ("avg", None)


class ActionRun(NamedTuple):
    """One micro-batch in one stage, between its forward and its backward."""

    inputs: Any
    outputs: Any


Kept = dict[StageMessage, Any]  # messages between two stages of this rank


class PipelineEngine(Engine):
    """An engine whose model is a `PipelineModule` or a decoder cut into stages.

    micro_batches      micro-batches of each rank in a step: gradient_accumulation_steps
    num_stages         ranks along the pipeline
    stage_id           this rank's place on it
    schedule           of this engine's steps, simulated with equal costs
    grid               the topology's groups, as an mpu
    agg_train_loss     the loss that `train_batch` returned last
    total_loss         on ranks with the last stage, the sum of the losses of the last batch's micro-batches; else None
    """

    module: Any
    schedule: Schedule

    def __init__(self, states: States, precision: Precision, mail: Mail) -> None:
        super().__init__(states, precision)
        self.mail = mail
        self.grid: PipelineParallelGrid = vars(self.module).get("_grid") or PipelineParallelGrid(mesh=self.mesh)
        self.agg_train_loss: Tensor | None = None
        self.total_loss: Tensor | None = None
        self._iterator: Iterator[Any] | None = None
        self._batch_fn: Callable[[Any], Any] | None = None
        self._losses: list[Tensor] = []  # of the last batch's micro-batches, on ranks with the last stage
        self._additional: dict[str, Tensor] | None = None  # means of the losses that are only reported
        self._reported: list[Mapping[str, Any]] = []  # those losses of each micro-batch, on ranks with the last stage
        self._is_last_backward = False
        self._began = 0.0  # when the running action began to compute: after its mail had come
        self._spans: list[tuple[Action, float, float]] = []  # the actions of the last step: start, end
        self._plan_schedule()
        # weight gradients that are computed later
        self._deferred = Deferred(self.module) if self.schedule.style in (Style.ZERO_BUBBLE, Style.V) else None
        if self._deferred is not None:
            states.resources["weight gradients"] = self._deferred
        self._places = {id(param): (unit, i) for unit in self.units for i, param in enumerate(unit.params)}
        states.after_step.append(self._end_step)  # before monitors, which get the loss
        self.set_boundary(True)

    def wire(self) -> None:
        self.module.refresh()
        super().wire()

    def _plan_schedule(self) -> None:
        """Make the schedule; called again if the number of micro-batches changes."""
        style = _style_of(self.module, self.plan.pipeline)
        self.schedule = simulate(self.mesh.pp.size, self.plan.batch.accumulation, style, len(self.module.stages))

    # -- training --

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train on one batch; returns the mean loss over micro-batches and data-parallel ranks, the same on all ranks. Collective.

        data_iter: yields micro-batches (inputs, labels) to the ranks with the first and the last stage; other ranks do not read it.
        Default: the iterator that `set_dataiterator` set, or `training_data` without end.

        Raises RuntimeError if gradients are disabled.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("train_batch() requires gradients enabled. Use eval_batch() instead.")
        self.gate.check("step")
        self.module.train()
        if data_iter is not None:
            self._iterator = data_iter
        batches = self._read(self.micro_batches)
        self.window.divide(True)
        try:
            with nullcontext() if self._deferred is None else self._deferred.collecting():
                self._losses = self._run(batches)
        finally:
            self._is_last_backward = False
        self.states.hooks.backwards = self.micro_batches  # of the whole model: a backward per micro-batch, not per stage
        self.micro_steps += self.micro_batches - 1
        self._has_ended = False
        Engine.step(self)
        if not self._has_ended:  # after `set_boundary(False)` this batch updates nothing
            self._end_step(False)
        return cast("Tensor", self.agg_train_loss)

    def _end_step(self, _: bool) -> None:
        """Average the losses of the batch that the step ends. Collective."""
        self._has_ended = True
        self.agg_train_loss = self._mean(self._losses, self.micro_batches, self.precision.weight)
        self.progress.saw(self.agg_train_loss, 1)

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Evaluate one batch without gradients; returns the mean loss as `train_batch` does. Collective.

        return_logits      return (loss, outputs of the last micro-batch); outputs are None on ranks without the last stage
        compute_loss       False: return the last stage's outputs, None on other ranks
        reduce_output      "avg": the mean over micro-batches; None: a list with one loss each, on ranks with the last stage
        bcast_loss         False: only ranks with the last stage get the loss, others None
        num_micro_batches  default: gradient_accumulation_steps
        """
        if reduce_output not in _REDUCTIONS:
            raise ValueError(f"eval_batch(reduce_output={reduce_output!r}): use 'avg' or None")
        count = self.micro_batches if num_micro_batches is None else num_micro_batches
        if count < 1:
            raise ValueError(f"eval_batch(num_micro_batches={count}) needs at least one")
        self.gate.check("forward")
        was_training, iterator = self.module.training, self._iterator
        self.module.eval()
        self._iterator = data_iter
        try:
            with torch.no_grad():
                losses, outputs = self._evaluate(count, compute_loss)
        finally:
            self._iterator = iterator
            self.module.train(was_training)
        values = losses if compute_loss else outputs
        result: Any = values or None
        if reduce_output is not None and compute_loss:
            mean = self._mean(losses, count)
            result = mean if bcast_loss or losses else None
        elif reduce_output is not None and values:
            result = torch.stack(values).mean(0)
        return (result, outputs[-1] if outputs else None) if return_logits else result

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Set the iterator that `train_batch` reads by default."""
        self._iterator = iterator

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Set the loader that `train_batch` reads by default, repeatedly."""
        self.training_dataloader, self._iterator = loader, RepeatingLoader(loader)

    def set_batch_fn(self, function: Callable[[Any], Any]) -> None:
        """Apply a function to every item read from an iterator."""
        self._batch_fn = function

    def set_batch(self, batch: BatchPlan) -> None:
        super().set_batch(batch)
        self._plan_schedule()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise PipelineError(_ONLY)

    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        raise PipelineError(_ONLY)

    def step(self, *args: Any, **kwargs: Any) -> None:
        raise PipelineError(_ONLY)

    def draw(self, form: str = "text", width: int = 100) -> str:
        """Return a picture of the last `train_batch` as it ran: "text" of `width` columns, or "svg". Collective.

        Times are of the hosts' clocks; on a GPU they are launch times. Raises ValueError before the first step.
        """
        if form not in ("text", "svg"):
            raise ValueError(f"draw(form={form!r}): use 'text' or 'svg'")
        with self.together("draw"):
            rows = self.mesh.world.gather(self._spans)
        here = {rank: place for place, rank in enumerate(self.mesh.pp.ranks)}
        spans = [
            Span(here[rank], action, start, stop)
            for rank, row in zip(self.mesh.world.ranks, rows, strict=True)
            for action, start, stop in (row if rank in here else ())
        ]
        if not spans:
            raise ValueError("draw() shows the last train_batch(), and none has run")
        title = f"{self.schedule.style}, {self.schedule.num_ranks} ranks, {self.schedule.num_micro} micro-batches, measured"
        return draw_svg(spans, title) if form == "svg" else draw_text(spans, width, title)

    # -- facts --

    @property
    def micro_batches(self) -> int:
        return self.plan.batch.accumulation

    @property
    def micro_batch_size(self) -> int:
        return self.plan.batch.micro_batch_size

    @property
    def num_stages(self) -> int:
        return self.mesh.pp.size

    @property
    def stage_id(self) -> int:
        return self.mesh.pp.index

    def is_first_stage(self) -> bool:
        return 0 in self.module.stages

    def is_last_stage(self) -> bool:
        return self.module.num_stages - 1 in self.module.stages

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the running backward is this rank's last of the step."""
        return self._is_last_backward

    def get_pipeline_parallel_rank(self) -> int:
        return self.mesh.pp.index

    def mem_status(self, msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
        """Log the current and peak memory of this rank's device; on the CPU, of the process.

        print_rank: log on this rank only; -1: on all. reset_max: reset the peak of a CUDA device.
        """
        if print_rank not in (-1, self.rank):
            return
        now = MemoryReading.of(self.device)
        if reset_max and self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        sizes = (now.allocated / 2**20, now.peak / 2**20)
        logger.info("%s: rank %d, stage %d: %.1f MiB, at most %.1f MiB", msg, self.rank, self.stage_id, *sizes)

    def reset_activation_shape(self) -> None:
        """A no-op: shapes may change between micro-batches."""

    def set_has_attention_mask(self, value: bool) -> None:
        """A no-op: masks are sent like other tensors. Raises TypeError unless the value is a bool."""
        if not isinstance(value, bool):
            raise TypeError(f"set_has_attention_mask({value!r}) takes a bool")

    def get_additional_losses(self) -> dict[str, Tensor] | None:
        """The means over the last batch of the module's `get_additional_losses`, the same on all ranks."""
        return self._additional

    # -- data --

    def _read(self, count: int) -> list[Any]:
        """The micro-batches of one batch; a list of None on a rank that needs none.

        Ranks agree first, because ranks without data of their own would wait for the others' mail. Collective over the ranks that
        step together. Raises StopIteration on every rank if one rank's iterator has ended, and PeerError if another rank could not
        read.
        """
        items, error = [None] * count, None
        try:
            if self.module.reads_everywhere or self.is_first_stage() or self.is_last_stage():
                items = self._own_items(count)
        except Exception as failure:
            error = failure
        replica = self.states.replica
        rows = replica.exchange(torch.tensor([-1.0 if error is not None else len(items)], dtype=torch.float64))
        if error is not None:
            raise error
        fewest, place = rows.flatten().min(0)
        rank = replica.axis.ranks[int(place)]
        if int(fewest) < 0:
            raise PeerError(f"rank {rank} could not read its batch; its own message says why")
        if int(fewest) < count:
            raise StopIteration(f"the iterator of rank {rank} ended after {int(fewest)} of the {count} micro-batches of a batch")
        return items

    def _own_items(self, count: int) -> list[Any]:
        if self._iterator is None:
            loader = self.training_dataloader
            if loader is None:
                raise ValueError("train_batch() has no data: pass data_iter, or training_data to initialize()")
            self._iterator = RepeatingLoader(loader)
        items = list(itertools.islice(self._iterator, count))
        if self._batch_fn is not None:
            items = [self._batch_fn(item) for item in items]
        return [map_tensors(item, lambda tensor: tensor.to(self.device)) for item in items]

    # -- a training step --

    def _run(self, batches: list[Any]) -> list[Tensor]:
        """Run all actions of a step; returns the losses of the micro-batches on ranks with the last stage, else an empty list."""
        actions = self.schedule.actions[self.stage_id]
        runs: dict[tuple[int, int], ActionRun] = {}
        kept: Kept = {}
        losses: list[Tensor] = []
        weights: dict[tuple[int, int], Any] = {}  # to be computed later, by (chunk, micro-batch)
        last = max(i for i, action in enumerate(actions) if action.kind in (Kind.BACKWARD, Kind.INPUT))
        self._spans = []
        for i, action in enumerate(actions):
            place = action.chunk, action.micro
            self.states.hooks.at_micro_batch(action.micro)
            self._began = time.time()
            if action.kind is Kind.FORWARD:
                runs[place] = self._run_forward(action, batches[action.micro], kept, losses)
                if self._deferred is not None:
                    self._deferred.pop()  # left by derivatives that the forward takes itself
            elif action.kind is Kind.WEIGHT:
                Deferred.run(weights.pop(place), self._take)
            else:
                self._is_last_backward = i == last
                self.module.recall(batches[action.micro])
                self._run_backward(action, runs.pop(place), kept)
                if self._deferred is not None:
                    weights[place] = self._deferred.pop()
            self._spans.append((action, self._began, time.time()))
        self.mail.flush()
        return losses

    def _take(self, param: nn.Parameter, grad: Tensor) -> None:
        unit, i = self._places[id(param)]
        self.states.hooks.add(unit, i, grad)

    def _first_inputs(self, batch: Any) -> Any:
        return self.precision.enter(self.module.inputs(batch))

    def _run_forward(self, action: Action, batch: Any, kept: Kept, losses: list[Tensor]) -> ActionRun:
        received, sent = self.schedule.receives(self.stage_id, action), self.schedule.sends(self.stage_id, action)
        inputs = self._first_inputs(batch) if received is None else self._receive(received, kept)
        self._announce(action)
        outputs = Engine.forward(self, inputs, batch, chunk=action.chunk)
        if sent is None:
            outputs = self._loss(outputs, batch)
            losses.append(outputs.detach())
        else:
            self._send(sent, outputs, kept)
        return ActionRun(inputs, outputs)

    def _run_backward(self, action: Action, run: ActionRun, kept: Kept) -> None:
        received, sent = self.schedule.receives(self.stage_id, action), self.schedule.sends(self.stage_id, action)
        roots = [tensor for tensor in tensors_in(run.outputs) if tensor.requires_grad]
        grads: Sequence[Tensor | None] = [None] * len(roots)
        if received is not None:
            grads = self._receive(received, kept)
            pairs = [(root, grad) for root, grad in zip(roots, grads, strict=True) if grad is not None]
            roots, grads = [root for root, _ in pairs], [grad for _, grad in pairs]
        self._announce(action)
        per_micro_batch = self.plan.pipeline.reduce == "micro_batch"
        # deferred weight gradients are reduced at the end of the step, as leftovers
        reduces = (self._is_last_backward or per_micro_batch) and self._deferred is None
        with self.progress.timing("backward"), nullcontext() if reduces else self.no_sync():
            torch.autograd.backward(roots, grads)
        if sent is not None:
            inputs = [tensor for tensor in tensors_in(run.inputs) if tensor.requires_grad]
            self._send(sent, [tensor.grad for tensor in inputs], kept)

    def _loss(self, outputs: Any, batch: Any) -> Tensor:
        """The loss of a micro-batch; keeps the module's additional ones. Raises ValueError unless it is a tensor, in training of
        one element."""
        loss = self.module.loss(self.precision.leave(outputs), self.precision.widen(batch))
        if not isinstance(loss, Tensor) or (loss.numel() != 1 and torch.is_grad_enabled()):
            raise ValueError(
                f"the loss of a micro-batch must be a scalar tensor, not {_describe(loss)}: pass a loss_fn= that returns one; the "
                "module's get_additional_losses() reports others"
            )
        if self._has_reports:
            self._reported.append(self.module.get_additional_losses() or {})
        return loss

    @property
    def _has_reports(self) -> bool:
        """Whether the user's class reports losses of its own. The same on all ranks."""
        own = getattr(type(self.module), "get_additional_losses", None)
        return own is not None and own is not PipelineModule.get_additional_losses

    def _announce(self, action: Action) -> None:
        self._began = time.time()
        self.watch.unit = f"{action.kind} of stage {self.module.stages[action.chunk]}, micro-batch {action.micro}"

    def _send(self, message: StageMessage, tree: Any, kept: Kept) -> None:
        if message.target == self.stage_id:
            kept[message] = tree
        else:
            self.mail.send(message[:2], message.target, tree)

    def _receive(self, message: StageMessage, kept: Kept) -> Any:
        if message.source != self.stage_id:
            return self.mail.receive(message[:2], message.source)
        tree = kept.pop(message)
        if message.kind is Kind.BACKWARD:
            return tree
        return map_tensors(tree, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad))

    def _mean(self, losses: Sequence[Tensor], count: int, weight: float = 1.0) -> Tensor:
        """The mean over micro-batches and the ranks that step together, in fp32; also of the additional losses. Collective.

        weight: of this rank's losses in the mean
        """
        replica, mesh = self.states.replica, self.mesh
        self.total_loss = torch.stack(list(losses)).sum() if losses else None
        if self._has_reports:
            reported, self._reported = self._reported, []
            every = replica.axis.gather([{name: weight * float(loss) for name, loss in each.items()} for each in reported])
            sums: dict[str, float] = {}
            for name, value in (item for of_rank in every for each in of_rank for item in each.items()):
                sums[name] = sums.get(name, 0.0) + value
            over = count * mesh.num_means * mesh.tp.size
            self._additional = {name: torch.tensor(value / over, device=self.device) for name, value in sums.items()} or None
        total = weight * float(torch.stack([loss.double() for loss in losses]).sum()) if losses else 0.0
        rows = replica.exchange(torch.tensor([total], dtype=torch.float64))
        return torch.tensor(float(rows.sum()) / (count * mesh.num_means * mesh.tp.size), device=self.device)

    # -- evaluation --

    def _evaluate(self, count: int, compute_loss: bool) -> tuple[list[Tensor], list[Any]]:
        """The losses of the micro-batches, and the last stage's outputs: with losses, of the last micro-batch only."""
        batches, kept = self._read(count), dict[StageMessage, Any]()
        schedule = simulate(self.schedule.num_ranks, count, self.schedule.style, len(self.module.stages), forward_only=True)
        outputs: list[Any] = []
        losses: list[Tensor] = []
        for action in schedule.actions[self.stage_id]:
            received, sent = schedule.receives(self.stage_id, action), schedule.sends(self.stage_id, action)
            batch = batches[action.micro]
            x = self._first_inputs(batch) if received is None else self._receive(received, kept)
            self._announce(action)
            out = Engine.forward(self, x, batch, chunk=action.chunk)
            if sent is not None:
                self._send(sent, out, kept)
                continue
            outputs = [out] if compute_loss else [*outputs, out]
            if compute_loss:
                losses.append(self._loss(out, batch).detach())
        self.mail.flush()
        return losses, outputs


def prepare(module: Any, plan: PipelinePlan, mesh: Mesh) -> None:
    """Fit a pipeline module to its place in the mesh, before units are built. Raises ValueError if it was built for another place.

    A module that was given no topology gets the mesh's.
    """
    style, num_chunks = _style_of(module, plan), len(module.stages)
    if plan.chunks not in (1, num_chunks) or (plan.schedule == "v" and not module.is_v):
        raise ValueError(
            f"slipstream.pipeline has chunks {plan.chunks} and schedule {plan.schedule}, and {type(module).__name__} has "
            f"{num_chunks} stages on each rank: build it with num_chunks={plan.chunks}, for v as a DualPipeVModule, or drop "
            "the keys"
        )
    stages = stages_of(mesh.pp.size, style, mesh.pp.index, num_chunks)
    if module.stages != stages:
        raise ValueError(
            f"rank {mesh.rank} is place {mesh.pp.index} of {mesh.pp.size} on the pipeline and needs the stages {list(stages)}, but "
            f"its module has {list(module.stages)}: build it with num_stages={mesh.pp.size}"
        )
    if isinstance(module, PipelineModule):
        if plan.recompute_interval:
            module.set_checkpoint_interval(plan.recompute_interval)
        is_alone = module.topology().world_size() != mesh.world.size  # built for one stage by itself
        if not is_alone and not module.has_own_topology:
            module._topo = topology_of(mesh)
        if not is_alone:
            module._grid = PipelineParallelGrid(module.topology(), mesh=mesh)
    for tied in module.tied:
        ranks = sorted({rank_of(mesh.pp.size, style, stage) for stage, _ in tied.places})
        for stage, name in tied.places if len(ranks) > 1 else ():
            if stage in module.stages:
                mark_tied(module.get_parameter(name), ranks)


def agree_on_kinds(model: nn.Module, mesh: Mesh) -> None:
    """Make all stages that share a parameter communicate its gradient in one way: it may be an embedding here and a head there.

    Collective over the pipeline, after each stage has marked its own parameters (`keep_apart`).
    """
    shared = _shared_params(model)
    own = [(key, kind) for key, param in shared if (kind := kind_of(param))]
    kinds = dict(sorted(itertools.chain.from_iterable(mesh.pp.gather(own)), reverse=True))  # dense before rows
    for key, param in shared:
        if key in kinds:
            keep_apart(param, kinds[key])


def _shared_params(model: Any) -> list[tuple[str, nn.Parameter]]:
    """The parameters that other stages have, too, each with a key that is the same on all of them.

    In stages that the user built (`mark_tied`), names may differ: they are matched in order of registration, like their units.
    """
    if isinstance(model, PipelineModule | PipelinedDecoder):
        return [
            (tied.key, model.get_parameter(name)) for tied in model.tied for stage, name in tied.places if stage in model.stages
        ]
    counts, shared = Counter[Differs](), list[tuple[str, nn.Parameter]]()
    for param in model.parameters():
        differs = differs_of(param)
        if any(split.axis == "pp" for split in differs):
            shared.append((f"{differs} {counts[differs]}", param))
            counts[differs] += 1
    return shared


def kept(params: Iterable[Any], module: nn.Module, whole: nn.Module) -> list[Any]:
    """The given parameters, named parameters or groups without those of other stages; groups may become empty."""
    elsewhere = {id(param) for param in whole.parameters()} - {id(param) for param in module.parameters()}

    def stays(item: Any) -> bool:
        return id(item[1] if isinstance(item, tuple) else item) not in elsewhere

    items = list(params)
    if not all(isinstance(item, dict) for item in items):
        return [item for item in items if stays(item)] or [{"params": []}] * bool(items)
    return [group | {"params": [each for each in group["params"] if stays(each)]} for group in items]


def pipeline_engine(states: States, precision: Precision, transport: str) -> PipelineEngine:
    """The engine of a pipeline module. Collective."""
    module: Any = states.model
    size, num_chunks = states.mesh.pp.size, len(module.stages)
    style = _style_of(module, states.plan.pipeline)
    routes = []
    for stage in range(size * num_chunks - 1):
        one, other = rank_of(size, style, stage), rank_of(size, style, stage + 1)
        if one != other:
            routes += [((Kind.FORWARD, stage + 1), one, other), ((Kind.BACKWARD, stage), other, one)]
    slots = size * num_chunks + 1  # no rank is further ahead of its neighbor
    mail = connect_mail(states.mesh.pp, states.device, transport, states.watch, routes, slots)
    if kinds := _shared_kinds(states, mail):
        mail = MailByShares(mail, states.exchange("tp"), kinds)
    states.resources["mail"] = mail
    return PipelineEngine(states, precision, mail)


def _shared_kinds(states: States, mail: Mail) -> list[Kind]:
    """The kinds of messages of which tp ranks send shares; none in shared memory. Collective over tp."""
    plan, tp = states.plan.pipeline, states.mesh.tp
    if any(tp.gather(isinstance(mail, SharedMail))) or tp.size == 1:
        return []
    return [kind for kind, is_shared in ((Kind.FORWARD, plan.shares_outputs), (Kind.BACKWARD, plan.shares_grads)) if is_shared]


def _style_of(module: Any, plan: PipelinePlan) -> Style:
    return Style.V if module.is_v else style_of(plan.schedule, len(module.stages))


def _describe(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__

"""Module and autograd hooks that call a unit's edges. All ordering is decided here, with explicit states.

[Note: When things happen]
forward   the root's pre-hook starts the engine's forward. A block's pre-hook gathers its units and its post-hook releases
          them. In between, access to a released parameter gathers it on demand until the end of the forward, and every
          later backward starts by gathering it (`Shown.read_in_graph`).
backward  the first hook that fires starts it and queues the callback that ends it. The gradient of a block's output
          gathers the block's units. A unit is complete when all its parameters' gradients have landed, when the
          gradient of the block's input has (unused parameters), or at the end. Complete units are reduced in reverse
          layout order: a unit that is early waits, and one without gradients joins with zeros at the end.
recompute inside backward runs forward hooks again, or only some of them: they gather and never release. Gradient hooks
          are not counted, because a reentrant checkpoint may fire one twice. A gradient that lands after the reduction of
          its unit stays in `.grad` and is reduced in an extra round before the step (`leftovers`).
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from inspect import ismethod
from typing import Any, TypeVar

import torch
import torch.nn as nn
from torch import Tensor

from slipstream.world.watch import Watch
from slipstream.zero import transforms
from slipstream.zero.comm import Buffer, Comm, Pending
from slipstream.zero.leaves import trainable_error
from slipstream.zero.parameter import raw_grad
from slipstream.zero.shown import check_writes
from slipstream.zero.trees import tensors_in
from slipstream.zero.unit import Unit

F = TypeVar("F", bound=Callable[..., Any])
_compiler: Any = torch._C._dynamo.eval_frame
_NEVER = _compiler._FrameExecStrategy(_compiler._FrameAction.SKIP, _compiler._FrameAction.SKIP)
NUM_BUFFERS = 2  # per ring: one is filled while the other is reduced


class Phase(Enum):
    """The current phase of the engine's model."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"


RingKey = tuple[Comm, torch.dtype]


class Slots:
    """Rings of communication buffers for gradients, one per transport and dtype. Each buffer is large enough for any of its units.

    The constructor and `ensure` allocate: collective, in the same order on all ranks. numels: elements of each ring's buffers.
    """

    def __init__(self, numels: Mapping[RingKey, int]) -> None:
        self._rings: dict[RingKey, deque[Buffer]] = {}
        for key, numel in numels.items():
            self.ensure(key, numel)

    def next(self, unit: Unit) -> Buffer:
        ring = self._rings[unit.reduction.comm, unit.dtypes.wire]
        ring.rotate(-1)
        return ring[-1]

    def buffers(self) -> Iterator[Buffer]:
        return (buffer for ring in self._rings.values() for buffer in ring)

    @property
    def numels(self) -> dict[RingKey, int]:
        """Elements of each ring's buffers."""
        return {key: ring[0].tensor.numel() for key, ring in self._rings.items()}

    def ensure(self, key: RingKey, numel: int) -> None:
        """Replace the ring of this transport and dtype if its buffers hold fewer than `numel` elements. Collective."""
        comm, dtype = key
        ring = self._rings.get(key)
        if ring is None or ring[0].tensor.numel() < numel:
            self._rings[key] = deque(comm.allocate([(numel, dtype)] * NUM_BUFFERS))


class Reducer:
    """Launches `unit.reduce` in a fixed order per backward: each unit as soon as it and all units before it are complete.

    alpha: returns the current factor of reduced gradients
    """

    def __init__(self, units: Sequence[Unit], slots: Slots, alpha: Callable[[], float]) -> None:
        self.units, self.slots, self.alpha = units, slots, alpha
        self.order: list[Unit] = []
        self.missing: dict[int, set[int]] = {}  # unit index -> parameters whose gradient has not landed
        self.expected: dict[int, int] = {}  # unit index -> number of parameters that require gradients
        self.complete: set[int] = set()
        self.launched = 0
        self.in_flight: deque[Pending[None]] = deque()

    def begin(self, units: Sequence[Unit]) -> None:
        """Start a backward in which gradients of `units` may land."""
        self.order = [unit for unit in reversed(units) if unit.trainable and unit.placement.grads]
        with torch._C.DisableTorchFunctionSubclass():
            self.missing = {  # a part without elements belongs to another rank's expert
                unit.index: {i for i, param in enumerate(unit.params) if param.requires_grad and param.numel()}
                for unit in self.order
            }
        self.expected = {index: len(params) for index, params in self.missing.items()}
        self.complete.clear()
        self.launched = 0

    def landed(self, unit: Unit, i: int) -> bool:
        """Record that parameter i's gradient is in `.grad`. Returns whether this completes the unit."""
        missing = self.missing[unit.index]
        missing.discard(i)
        return not missing and unit.index not in self.complete

    def any_landed(self, unit: Unit) -> bool:
        """Whether some of the unit's gradients have landed. If none has, the block may be called again in this backward."""
        return unit.index in self.missing and len(self.missing[unit.index]) < self.expected[unit.index]

    def finish(self, unit: Unit) -> None:
        """Mark the unit as complete, and launch all units whose turn it is."""
        if unit.index in self.missing and unit.index not in self.complete:
            self.complete.add(unit.index)
            while self.launched < len(self.order) and self.order[self.launched].index in self.complete:
                self.launch(self.order[self.launched])
                self.launched += 1
                if self.launched < len(self.order):
                    self.order[self.launched].expect_reduce()

    def launch(self, unit: Unit) -> None:
        """Start reducing one unit. Every rank calls this for the same units in the same order."""
        while len(self.in_flight) >= NUM_BUFFERS - 1:
            self.in_flight.popleft().wait()
        self.in_flight.append(unit.reduce(self.slots.next(unit), self.alpha()))

    def flush(self) -> None:
        """At the end of the backward, reduce the units that are incomplete and wait for all."""
        for unit in self.order:
            self.finish(unit)
        self.drain()

    def drain(self) -> None:
        """Wait for all reductions in flight."""
        while self.in_flight:
            self.in_flight.popleft().wait()
        for unit in self.order:
            unit.window.close()  # left by an abandoned backward


class Dropped:
    """Blocks that some forwards skip, the same on all ranks. Their units are not prefetched, and not reduced without gradients.

    A backward skips the units that no forward has called since all earlier forwards had their backward. With several forwards
    before their backwards, it is unknown which backward begins. A gradient that lands in spite of that is reduced before the step.
    """

    def __init__(self, units: Sequence[Unit], blocks: Sequence[nn.Module], draw: Callable[[], frozenset[nn.Module]]) -> None:
        self.draw = draw
        self.droppable = {unit.index: unit.block for unit in units if unit.block is not None and unit.block in set(blocks)}
        self.now: frozenset[int] = frozenset()  # units that the current forward skips
        self.called: set[int] = set()
        self.open_forwards = 0  # forwards whose backward has not ended

    def begin_forward(self, training: bool) -> None:
        blocks = self.draw() if training else frozenset[nn.Module]()
        self.now = frozenset(index for index, block in self.droppable.items() if block in blocks)
        if torch.is_grad_enabled():
            self.open_forwards += 1
            self.called |= self.droppable.keys() - self.now

    def reduced(self, units: Sequence[Unit]) -> list[Unit]:
        """The units that may get gradients in the coming backward."""
        return [unit for unit in units if unit.index not in self.droppable or unit.index in self.called]

    def end_backward(self, left: int = 0) -> None:
        self.open_forwards = max(0, self.open_forwards - 1) if left else 0
        if not self.open_forwards:
            self.called.clear()

    def follower(self, units: Sequence[Unit], here: Unit, step: int) -> list[Unit]:
        """The units of the next block that is called, in forward (step 1) or backward (-1) order."""
        at = here.index + step
        while 0 <= at < len(units) and (units[at].index in self.now or units[at].block in (None, here.block)):
            at += step
        return [unit for unit in units if unit.block is units[at].block] if 0 <= at < len(units) else []


class Hooks:
    """Connects one model to its units. `remove` undoes it."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        reducer: Reducer,
        watch: Watch,
        on_inputs: Callable[[Any, Any], tuple[Any, Any]],
        on_outputs: Callable[[Any], Any],
        unfreeze: Callable[[Unit], None],
    ) -> None:
        self.model, self.units, self.reducer, self.watch = model, units, reducer, watch
        self.on_inputs, self.on_outputs, self.unfreeze = on_inputs, on_outputs, unfreeze
        self.phase = Phase.IDLE
        self.sync = True  # False inside no_sync()
        self.refusal = ""  # if set, the error text for any differentiation
        self.lands = True  # whether the current backward writes `.grad`: False for autograd.grad and torch.func's transforms
        self.passes = 0  # backwards so far, of any kind
        self.keep = False  # create_graph: weights stay gathered until the step
        self.backwards = 0  # since the last step
        self.landed: set[tuple[int, int]] | None = None  # (unit index, parameter) with a gradient; None: not recorded
        self.graph: weakref.ref[Any] | None = None  # alive as long as the last forward's graph, until its backward
        # (phase, n, unit of the n-th gather) -> the units gathered next, the last time. A wrong prefetch costs a gather, never a
        # result. The key has n because the root is gathered first and last: by unit alone, it would prefetch the first block twice.
        self.follows: dict[tuple[Phase, int, int], tuple[Unit, ...]] = {}
        self.last: tuple[Phase, int, int] | None = None
        self.active: dict[int, int] = {}  # unit index -> number of calls that need it inside their backward
        self.drops: Dropped | None = None
        self.handles: list[Any] = []
        self.root_units = [unit for unit in units if unit.block is None]
        self.own = frozenset(id(param) for unit in units for param in unit.params)
        self._wire()

    # -- wiring --

    def _wire(self) -> None:
        add = self.handles.append
        add(self.model.register_forward_pre_hook(eager(self._root_pre), with_kwargs=True, prepend=True))
        add(self.model.register_forward_hook(eager(self._root_post), with_kwargs=True, always_call=True))
        trainable = [unit for unit in self.units if unit.full.is_floating_point() and not unit.exact]
        self.frozen = [(unit, i) for unit in trainable for i in range(len(unit.params))]
        exact = {id(param): param for unit in self.units if unit.exact for param in unit.model_params}
        # integers cannot require gradients
        self.fixed = [param for param in exact.values() if param.is_floating_point() or param.is_complex()]
        self._hook_gradients()
        if not any(unit.placement.weights for unit in self.units):
            return
        self.users = self._users()
        for module in self.users:
            add(module.register_forward_pre_hook(eager(self._block_pre), with_kwargs=True, prepend=True))
            add(module.register_forward_hook(eager(self._block_post), with_kwargs=True, always_call=True))

    def _hook_gradients(self) -> None:
        """Hook parameters that require gradients now and did not before; torch accepts hooks only on those."""
        frozen = []
        for unit, i in self.frozen:
            if not unit.params[i].requires_grad:
                frozen.append((unit, i))
                continue
            if unit.grads is None:
                self.unfreeze(unit)
            self.handles.append(_grad_hook(unit.params[i], self, unit, i))
        self.frozen = frozen

    def _refuse_fixed(self) -> None:
        """Raise ValueError if a quantized or complex parameter now requires a gradient."""
        with torch._C.DisableTorchFunctionSubclass():
            trained = next((whole for whole in self.fixed if whole.requires_grad), None)
        if trained is not None:
            name = next(name for name, param in self.model.named_parameters() if param is trained)
            raise ValueError(trainable_error(name, trained))

    def _users(self) -> dict[nn.Module, list[Unit]]:
        """Map gathering modules to units. A block gathers the units of all its parameters, shared ones included. Any other
        module gathers the units of its direct parameters, for calls that bypass the root (T5's encoder in generate)."""
        units_of: dict[int, list[Unit]] = {}  # several if codes and scales of a parameter are in different units
        for unit in self.units:
            for param in unit.model_params:
                units_of.setdefault(id(param), []).append(unit)

        def units_in(module: nn.Module, recurse: bool) -> list[Unit]:
            return list(dict.fromkeys(unit for p in module.parameters(recurse) for unit in units_of.get(id(p), ())))

        blocks = {unit.block for unit in self.units if unit.block is not None}
        users = {block: units_in(block, recurse=True) for block in blocks}
        inside = {id(module) for block in blocks for module in block.modules()}
        for module in self.model.modules():
            if module is not self.model and id(module) not in inside and (units := units_in(module, recurse=False)):
                users[module] = units
        return users

    def droppable(self, blocks: Sequence[nn.Module], draw: Callable[[], frozenset[nn.Module]]) -> None:
        """Let forwards skip blocks: `draw`, called when a forward begins, returns the blocks that it skips."""
        self.drops = Dropped(self.units, blocks, draw)

    def at_micro_batch(self, number: int) -> None:
        """Assign following forwards and recomputations to this micro-batch of the step: a schedule reorders them."""
        self.backwards = number
        if self.drops is not None and self.model.training:
            self.drops.draw()

    def remove(self) -> None:
        for handle in reversed(self.handles):  # last in, first out: a handle may restore an attribute that an earlier one replaced
            handle.remove()
        self.handles.clear()
        self.drops = None  # it refers to these hooks

    # -- forward --

    # copy.deepcopy of a model copies its hooks: they ignore modules that are not this engine's

    def _root_pre(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if module is not self.model:
            return None
        if torch.is_grad_enabled():
            self._refuse_gradients()
            self._refuse_fixed()
        self.end_abandoned()
        if self.phase is Phase.BACKWARD:  # the whole model is being recomputed
            return None
        self.phase = self.watch_phase(Phase.FORWARD)
        if self.drops is not None:
            self.drops.begin_forward(module.training)
        if self.frozen and torch.is_grad_enabled():
            self._hook_gradients()
        for unit in self.units:
            check_writes(unit)
            unit.show_weights()
            unit.shown.reads_gather = True
        for unit in self.root_units:
            unit.gather()
        return self.on_inputs(args, kwargs)

    def _root_post(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if module is not self.model or self.phase is not Phase.FORWARD or self.watch.failure is not None:
            return None
        self.phase = self.watch_phase(Phase.IDLE)
        for unit in self.units:
            unit.shown.reads_gather = False
            if not self.keep:
                unit.release()
        if output is None:
            return None
        output = self.on_outputs(output)
        if torch.is_grad_enabled():
            hook = self._on_output_grad  # one bound method, kept alive only by the graph
            self.graph = weakref.ref(hook)
            for _, tensor in _in_graphs(output):
                tensor.register_hook(hook)
        return output

    def _block_pre(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if module in self.users:
            self._gather(self.users[module])

    def _gather(self, units: Sequence[Unit]) -> None:
        """Gather `units`, and prefetch the units that followed them last time."""
        for unit in units:
            self.watch.unit = unit.name
            unit.gather()
        if self.drops is not None:
            for follower in self.drops.follower(self.units, units[0], -1 if self.phase is Phase.BACKWARD else 1) if units else ():
                follower.prefetch()
            return
        place = self.last[1] + 1 if self.last is not None and self.phase is not Phase.IDLE else 0
        here = (self.phase, place, units[0].index if units else -1)
        for follower in self.follows.get(here, ()):
            follower.prefetch()
        if self.last is not None:
            self.follows[self.last] = tuple(units)
        self.last = here

    def _block_post(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if module not in self.users or self.watch.failure is not None:  # a PeerError is being raised
            return
        units, grad = self.users[module], torch.is_grad_enabled()
        if grad and output is not None:
            self._expect_backward(module, units, (args, kwargs), output)
        if self.phase is Phase.BACKWARD or self.keep:
            return
        for unit in units:
            if unit.block is None and (self.phase is Phase.FORWARD or grad):
                continue  # root units stay until the end of the forward; outside a forward, until the backward
            if not unit.shown.pinned:
                unit.release()

    def _expect_backward(self, module: nn.Module, units: Sequence[Unit], inputs: Any, output: Any) -> None:
        """Hook the gradients at the start and the end of this call's backward."""
        own = [unit for unit in units if unit.block is module]
        calls: dict[int, _Call] = {}  # by graph level (zero/transforms.py)
        for level, tensor in _in_graphs(output):
            call = calls.setdefault(level, _Call(units, own))
            tensor.register_hook(partial(self._on_block_grad, call))
        for level, tensor in _in_graphs(inputs):
            if tensor.grad_fn is not None and level in calls:  # the first input's gradient marks the end
                tensor.register_hook(partial(self._on_input_grad, calls.pop(level)))

    # -- backward --

    def _refuse_gradients(self) -> None:
        if self.refusal:
            raise RuntimeError(self.refusal)

    def _enter_backward(self) -> None:
        self._refuse_gradients()
        if self.phase is Phase.IDLE:
            self.phase = self.watch_phase(Phase.BACKWARD)
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            self.passes += 1
            self.lands = not transforms.is_active() and _writes_gradients(self.own)
            units = self.units if self.drops is None else self.drops.reduced(self.units)
            self.reducer.begin(units if self.lands else ())
            self.active.clear()
            for unit in self.units:
                unit.shown.reads_gather = True
                unit.show_weights()
                if unit.shown.read_in_graph:  # no hook fires before autograd reads it
                    unit.shown.pinned = True
                    unit.gather()
        if torch.is_grad_enabled():  # create_graph: the backward of this backward reads the weights again
            self.keep = True

    def _on_output_grad(self, grad: Tensor) -> None:
        self._enter_backward()
        for unit in self.root_units:
            unit.gather()

    def _on_block_grad(self, call: _Call, grad: Tensor) -> None:
        self._enter_backward()
        if call.entered != self.passes:
            call.entered = self.passes
            for unit in call.units:
                self.active[unit.index] = self.active.get(unit.index, 0) + 1
        self._gather(call.units)

    def _on_input_grad(self, call: _Call, grad: Tensor) -> None:
        """At the end of a block's backward, complete its units: gradients that have not landed are those of unused parameters.

        Skip units that another call needs whose backward has begun: the hook of that call's output, this call's input, runs first.
        """
        if call.entered != self.passes or self.phase is not Phase.BACKWARD:
            return
        call.entered = 0
        for unit in call.units:
            self.active[unit.index] -= 1
        for unit in call.own:
            if self.active[unit.index] == 0:
                self._complete(unit, reduce=self.reducer.any_landed(unit))

    def _on_grad(self, unit: Unit, i: int) -> None:
        self._enter_backward()
        if self.landed is not None:
            self.landed.add((unit.index, i))
        self._take_gradient(unit, i)

    @torch.no_grad()  # with create_graph, moving gradients is not part of the new graph
    def _take_gradient(self, unit: Unit, i: int) -> None:
        grad = raw_grad(unit.params[i])
        if grad is not None and grad.layout is not torch.strided:  # from an embedding with sparse=True
            unit.params[i].grad = grad = grad.to_dense()
        if grad is not None and unit.memory.local is not None:
            unit.add_local(i, grad)
        elif not self.sync:
            unit.window.keep_unreduced(i, unit.dtypes.grads)
        elif unit.index in self.reducer.missing and self.reducer.landed(unit, i):
            self._complete(unit)

    def _complete(self, unit: Unit, reduce: bool = True) -> None:
        if not self.keep and not unit.shown.pinned and unit.block is not None:
            unit.release()
        if reduce and self.sync and unit.trainable and unit.placement.grads:
            with torch.no_grad():
                self.reducer.finish(unit)

    def _end_backward(self) -> None:
        if self.sync:
            self.watch.unit = "end of backward"
            with torch.no_grad():
                self.reducer.flush()
        self.backwards += self.lands
        if self.drops is not None and self.lands:
            self.drops.end_backward(left=1)
        self._close_backward()

    def _close_backward(self) -> None:
        self.graph = None
        for unit in self.units:
            unit.shown.reads_gather = False
            if not self.keep:
                unit.release()
            unit.hide_gradients()
        self.phase = self.watch_phase(Phase.IDLE)

    def end_abandoned(self) -> None:
        """If a backward has failed, finish the reductions that it left in flight, so that the engine is usable again."""
        if self.phase is Phase.BACKWARD and not _in_backward():
            self.reducer.drain()
            self._close_backward()

    def under_way(self) -> str:
        """Describe the forward or backward that has not ended; "" between steps."""
        self.end_abandoned()
        if self.phase is not Phase.IDLE:
            return f"inside a {self.phase.value}"
        if self.backwards:
            return f"after {self.backwards} backward passes of a window that no engine.step() has ended"
        if self.graph is not None and self.graph() is not None:
            gc.collect()
        if self.graph is not None and self.graph() is not None:
            return "between a forward and its backward (or outputs are kept: delete them, or compute them under torch.no_grad())"
        return ""

    # -- called by the step --

    def add(self, unit: Unit, i: int, grad: Tensor) -> None:
        """Add a gradient that was computed outside a backward; it is reduced with the leftovers."""
        if self.landed is not None:
            self.landed.add((unit.index, i))
        unit.add_gradient(i, grad)

    def take_set(self) -> None:
        """Add the gradients that the script has set in `.grad` to the unreduced ones of whole units; others are leftovers."""
        for unit in self.units:
            if unit.memory.local is not None:
                for i, param in enumerate(unit.params):
                    if raw_grad(param) is not None:
                        self._take_gradient(unit, i)

    def has_gradients(self) -> bool:
        """Whether a backward has written gradients since the last step, or the script has set a `.grad`."""
        return self.backwards > 0 or any(unit.trainable and unit.window.has_unreduced for unit in self.units)

    def leftovers(self) -> list[bool]:
        """Per unit, whether gradients are unreduced: late ones, and those of no_sync()."""
        return [unit.placement.grads and unit.trainable and unit.window.has_unreduced for unit in self.units]

    def step_done(self) -> None:
        """End the accumulation window."""
        if self.keep:
            self.keep = False
            for unit in self.units:
                unit.release()
        self.forget_backwards()

    def forget_backwards(self) -> None:
        """Reset the record of backwards, after their gradients were used or dropped."""
        self.backwards = 0
        if self.drops is not None:
            self.drops.end_backward()
        if self.landed is not None:
            self.landed.clear()

    def watch_phase(self, phase: Phase) -> Phase:
        self.watch.phase, self.watch.unit = phase.value, ""
        self.last = None
        return phase


@dataclass(slots=True, eq=False)
class _Call:
    """One call of a block in a forward: the units that it needs and owns, and the pass in which its backward runs (0: none yet)."""

    units: Sequence[Unit]
    own: Sequence[Unit]
    entered: int = 0


_UNPICKLED = (
    "(a hook of slipstream.initialize: a wired model and its engine cannot be pickled; save engine.state_dict(), or call "
    "engine.save_checkpoint(folder) or engine.save_pretrained(folder))"
)
_UNTRACED = (
    "hooks, exchanges and native kernels of slipstream run between compiled graphs: use torch.compile without fullgraph=True, and "
    "torch.export before slipstream.quantize or slipstream.initialize"
)


def eager(function: F) -> F:
    """Keep torch.compile out of a function: hooks, so that a compiled block's graph contains only the block, and exchanges.

    Does what torch.compiler.disable does, without its import: the mark ends the graph that calls the function; the strategy keeps
    its frame, and all frames that it calls, from being compiled.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    marked: Any = run
    if ismethod(function):  # a hook
        marked.__qualname__ = _UNPICKLED  # pickle shows a function's name when it cannot write it
    marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, _UNTRACED
    _compiler.set_code_exec_strategy(marked.__code__, _NEVER)
    return marked


def _grad_hook(param: nn.Parameter, hooks: Hooks, unit: Unit, i: int) -> Any:
    """Hook one parameter's gradient, with a weak reference to `hooks`: C++ keeps it, unseen by the garbage collector."""
    ref, index = weakref.ref(hooks), unit.index

    def landed(_: Tensor) -> None:
        alive = ref()
        if alive is not None:
            alive._on_grad(alive.units[index], i)

    return param.register_post_accumulate_grad_hook(landed)


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _writes_gradients(params: Collection[int]) -> bool:
    """Whether the backward that calls a tensor's hook writes the `.grad` of parameters (by id). `torch.autograd.grad` returns
    gradients to its caller instead, and `backward(inputs=...)` may leave the parameters out. True if the graph has none of them."""
    nodes: list[Any] = [torch._C._current_autograd_node()]
    seen, is_read = set[Any](), False
    while nodes:
        if (node := nodes.pop()) is None or node in seen:
            continue
        seen.add(node)
        nodes += [below for below, _ in node.next_functions]
        if id(getattr(node, "variable", None)) in params:
            is_read = True
            with suppress(RuntimeError):  # autograd.grad for this parameter
                if torch._C._will_engine_execute_node(node):
                    return True
    return not is_read


def _in_graphs(value: Any) -> Iterator[tuple[int, Tensor]]:
    """Every tensor inside `value` that requires a gradient, and the level of its graph (zero/transforms.py)."""
    for tensor in tensors_in(value):
        yield from transforms.in_graphs(tensor)

"""Progressive layer dropping (Zhang and He 2020, arXiv 2010.13369): training skips residual blocks, ever more of them.

Block l of the L in its stack is kept with probability p = 1 - (l / L)(1 - theta(t)), where theta(t) =
(1 - theta) exp(-gamma t) + theta at step t. A kept block's change is divided by p: x + (f(x) - x) / p. In evaluation all
blocks run, unscaled.

[Note: The same blocks on every rank]
The draw is a hash of (seed, step, backwards of the step so far, block); in a pipeline, of the schedule's micro-batch. So ranks
agree without communication, a resumed run draws what the interrupted one would have drawn, and a forward without a backward, which
one rank may run alone, changes no later draw.
A dropped block is not called, so nothing is gathered for it. Nothing is reduced for it either (`zero.hooks.Dropped`).

[Note: Further outputs] Some blocks return more than hidden states: T5's first block computes the position bias for all blocks, and
the others return the one that they were given. A dropped block returns what it was given, too. A block whose parameters are a
proper superset of another block's in its stack may compute such an output, so it is never dropped.
"""

from __future__ import annotations

import inspect
import logging
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from slipstream.config.plan import Plan
from slipstream.parallel.around import first_of, input_of, unwrap, with_first, wrap
from slipstream.train.engine import Engine
from slipstream.zero.hooks import Hooks
from slipstream.zero.wrap import repeated_blocks

logger = logging.getLogger(__name__)

_KEYWORDS = ("progressive_layer_drop", "pld_theta")


class ProgressiveLayerDrop:
    """The schedule of theta, with DeepSpeed's methods. theta: its limit, 0 to 1. gamma: the rate per step."""

    def __init__(self, theta: float = 0.5, gamma: float = 0.001) -> None:
        self.theta, self.gamma, self.current_theta = theta, gamma, 1.0

    def get_state(self) -> dict[str, Any]:
        """The keywords for a forward that drops layers itself."""
        return {"progressive_layer_drop": True, "pld_theta": self.get_theta()}

    def get_theta(self) -> float:
        return self.current_theta

    def update_state(self, global_step: int) -> None:
        """Set theta to that of this step."""
        self.current_theta = float((1.0 - self.theta) * numpy.exp(-self.gamma * global_step) + self.theta)


class LayerDrop(ProgressiveLayerDrop):
    """The schedule, and the draws of one model's blocks."""

    def __init__(self, theta: float, gamma: float, seed: int) -> None:
        super().__init__(theta, gamma)
        self.seed = seed
        self.dropped: frozenset[nn.Module] = frozenset()
        self.blocks: dict[nn.Module, tuple[int, float]] = {}  # block -> (number in the model, l / L in its stack)
        self.checked: set[type] = set()  # classes of blocks
        self.kinds: dict[type, _MoreOutputs] = {}  # class of blocks -> its further outputs
        # further outputs that blocks which may be dropped have computed in this forward, with a name for the error
        self.made: list[tuple[weakref.ref[Tensor], str]] = []

    def keep_probability(self, block: nn.Module) -> float:
        return 1.0 - self.blocks[block][1] * (1.0 - self.current_theta)

    def draw(self, step: int, backwards: int) -> frozenset[nn.Module]:
        """Draw for the coming forward; returns the blocks that it drops."""
        self.update_state(step)
        self.made.clear()
        self.dropped = frozenset(
            block
            for block, (number, _) in self.blocks.items()
            if _uniform(self.seed, step, backwards, number) >= self.keep_probability(block)
        )
        return self.dropped

    def take(self, model: nn.Module, params: Mapping[str, frozenset[str]]) -> None:
        """Let this model's repeated blocks be dropped. In a pipeline, the model has only its stage's blocks.

        params: block -> the names of its parameters, for the blocks of all stages, in order
        """
        stacks: dict[str, list[str]] = {}
        for name in params:
            stacks.setdefault(name.rpartition(".")[0], []).append(name)
        modules, never_dropped = dict(model.named_modules()), list[str]()
        for number, name in enumerate(params, 1):
            stack = stacks[name.rpartition(".")[0]]
            computes_more = any(params[name] > params[other] for other in stack)
            if computes_more:
                never_dropped.append(name)
            if (block := modules.get(name)) is not None:
                self.blocks[block] = number, 0.0 if computes_more else (stack.index(name) + 1) / len(stack)
                wrap(block, self.call)
        if never_dropped:
            logger.warning(
                "progressive_layer_drop never drops %s: they have parameters that other blocks of their stack lack, by which they "
                "may make what later blocks take",
                ", ".join(never_dropped),
            )

    def call(self, block: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Wraps the calls of a block."""
        if not block.training:
            return run(*args, **kwargs)
        x = input_of(args, kwargs)
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        if block in self.dropped:
            return self._like_output(type(block), x, given, partial(run, *args, **kwargs))
        further = [value for value in given.values() if isinstance(value, Tensor) and value is not x]
        checks = type(block) not in self.checked and isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled()
        x, args, kwargs = _viewed(x, args, kwargs) if checks else (x, args, kwargs)
        output = run(*args, **kwargs)
        changed = first_of(output)
        if not isinstance(x, Tensor) or not isinstance(changed, Tensor) or changed.shape != x.shape:
            raise TypeError(_NO_RESIDUAL.format(type(block).__name__))
        if checks:
            self.checked.add(type(block))
            _check_residual(type(block), x, changed)
        # a block that is never dropped computes further outputs for others, so it does not show what the others return
        computed = self._others(type(block)).see(output, given) if self.blocks[block][1] else []
        self._check_others(further, computed, type(block).__name__)
        probability = self.keep_probability(block)
        if probability == 1.0:
            return output
        return with_first(output, torch.lerp(x.to(changed.dtype), changed, 1.0 / probability))

    def _others(self, kind: type) -> _MoreOutputs:
        return self.kinds.setdefault(kind, _MoreOutputs())

    def _check_others(self, given: Sequence[Tensor], made: Sequence[tuple[int, Tensor]], kind: str) -> None:
        """Raise TypeError if a block's inputs beside the first include an output of a droppable block. made: this block's."""
        if name := next((name for other, name in self.made if any(other() is value for value in given)), ""):
            raise TypeError(_NEEDED.format(name))
        self.made += [(weakref.ref(value), f"{kind}'s output {i}") for i, value in made]

    def _like_output(self, kind: type, x: Any, given: dict[Any, Any], run: Callable[[], Any]) -> Any:
        """A dropped block's output: its input, and the further outputs that it was given, None for others."""
        if kind not in self.kinds:  # first forward of a resumed run: run it once, without side effects
            with torch.no_grad(), torch.random.fork_rng():
                self._others(kind).see(run(), given)
        others = self.kinds[kind]
        if others.container is None:
            return x
        return others.container([x, *(given.get(others.passed.get(i)) for i in range(1, others.count + 1))])

    def close(self) -> None:
        """Give the blocks their own classes again."""
        for block in self.blocks:
            unwrap(block, self.call)
        self.blocks = {}


def _uniform(*numbers: int) -> float:
    """A pseudo-random number in [0, 1), determined by integers."""
    digest = blake2b(",".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2.0**64


def _viewed(x: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """The input as a view, whose autograd node is the goal of `_reaches`, and the arguments with the view in its place."""
    view = x.view_as(x)
    return view, tuple(view if arg is x else arg for arg in args), {name: view if arg is x else arg for name, arg in kwargs.items()}


class _MoreOutputs:
    """The outputs that blocks of a class return beside the first."""

    def __init__(self) -> None:
        self.container: type | None = None  # tuple or list
        self.count = 0
        self.passed: dict[int, Any] = {}  # output index -> the argument that it is, by position or name

    def see(self, output: Any, given: dict[Any, Any]) -> list[tuple[int, Tensor]]:
        """Record a block's outputs; returns those that the block computed itself, with their index."""
        if not isinstance(output, (tuple, list)):
            return []
        self.container, self.count = type(output), len(output) - 1
        tensors = [(i, value) for i, value in enumerate(output) if i and isinstance(value, Tensor)]
        keys = {i: next((key for key, argument in given.items() if argument is value), None) for i, value in tensors}
        self.passed |= {i: key for i, key in keys.items() if key is not None}
        return [(i, value) for i, value in tensors if keys[i] is None]


def _params_of(block: nn.Module) -> frozenset[str]:
    return frozenset(name for name, _ in block.named_parameters())


_NEEDED = (
    "progressive_layer_drop: later blocks are given what others make ({}), so that none can be left out; let the model drop layers "
    "itself (its forward takes pld_theta=), or drop the block of the config"
)
_NO_RESIDUAL = (
    "progressive_layer_drop: {} is no residual block: its first input and output must be tensors of one shape, and the output a "
    "sum with the input. Let the model drop layers itself (its forward takes pld_theta=), or drop the block of the config"
)
# autograd's names of steps that pass a block's input unchanged but for its shape, dtype and device
_PASSING = re.compile(
    r"(Add|View|UnsafeView|ReshapeAlias|Transpose|Permute|T|ToCopy|Clone|Alias|Squeeze|Unsqueeze|Slice)Backward\d"
)
_NORM = re.compile(r"(NativeLayerNorm|FusedRmsNorm|NativeGroupNorm|Mul|Rsqrt|Div)Backward\d")


def _check_residual(kind: Any, x: Tensor, output: Tensor) -> None:
    """Check, once per class, how the input reaches the output. Raises TypeError unless it is added on the way."""
    if _reaches(output.grad_fn, x.grad_fn, lambda name: _PASSING.fullmatch(name)):
        return
    if not _reaches(output.grad_fn, x.grad_fn, lambda name: _PASSING.fullmatch(name) or _NORM.fullmatch(name)):
        raise TypeError(_NO_RESIDUAL.format(kind.__name__))
    logger.warning(
        "progressive_layer_drop: %s normalizes after its sums (post-LN), so that a dropped block leaves out a norm, too; the "
        "schedule is meant for norms before the sublayers (pre-LN)",
        kind.__name__,
    )


def _reaches(output: Any, goal: Any, passes: Callable[[str], Any]) -> bool:
    """Whether a path of nodes that pass, with at least one sum, leads from the output's autograd node back to the input's.

    Steps written in Python hide what they do (recompute, fused layers) and pass.
    """
    waiting, seen = [(output, False)], set()
    while waiting:
        node, has_sum = waiting.pop()
        if node is goal and has_sum:
            return True
        if node is None or node is goal or (node, has_sum) in seen:
            continue
        seen.add((node, has_sum))
        hidden = isinstance(node, torch.autograd.function.BackwardCFunction)
        if hidden or passes(node.name()):
            is_sum = hidden or node.name().startswith("AddBackward")
            waiting += [(following, has_sum or is_sum) for following, _ in node.next_functions]
    return False


def drop_layers(model: nn.Module, plan: Plan) -> Callable[[Engine], None] | None:
    """Prepare the model as the config's `progressive_layer_drop` says. Raises TypeError for a model without residual blocks."""
    if plan.layer_drop is None:
        return None
    drop, staged = LayerDrop(plan.layer_drop.theta, plan.layer_drop.gamma, plan.seed), plan.mesh.pp > 1
    parameters = inspect.signature(model.forward).parameters.values()
    takes = any(param.name in _KEYWORDS for param in parameters)
    takes |= any(param.kind is param.VAR_KEYWORD for param in parameters) and not hasattr(model, "config")
    names = [] if takes or staged else _droppable(model, repeated_blocks(model))
    if not staged and not takes:
        _check_any(model, names)
        drop.take(model, {name: _params_of(model.get_submodule(name)) for name in names})

    def connect(engine: Engine) -> None:
        states = engine.states
        states.resources["layer drop"] = drop
        if staged:
            drop.take(model, _blocks_of_all_stages(model, engine))

        def wire(hooks: Hooks) -> None:
            if drop.blocks:
                hooks.droppable(list(drop.blocks), lambda: drop.draw(engine.global_steps, hooks.backwards))
            elif takes and not staged:
                hooks.handles.append(model.register_forward_pre_hook(_with_keywords(drop, engine), with_kwargs=True))

        states.wire(wire)
        states.after_step.append(lambda _: drop.update_state(engine.global_steps))

    return connect


def _check_any(model: nn.Module, names: Sequence[str]) -> None:
    if not names:
        raise TypeError(
            f"progressive_layer_drop: {type(model).__name__} has no repeated residual blocks, and its forward takes no keywords"
            f" {' and '.join(_KEYWORDS)}; let it take them and drop layers itself, or drop the block of the config"
        )


def _droppable(model: nn.Module, names: Sequence[str]) -> list[str]:
    """The names of modules that contain layers: a list of plain layers is no stack of residual blocks."""
    return [name for name in names if any(True for _ in model.get_submodule(name).children())]


def _blocks_of_all_stages(model: nn.Module, engine: Engine) -> dict[str, frozenset[str]]:
    """The repeated blocks of the whole pipeline, in order, with their parameters; a stage may have only one block. Collective."""
    numbered = [name for name, _ in model.named_modules() if name.rpartition(".")[2].isdigit()]
    outer = [name for name in numbered if not any(name.startswith(f"{other}.") for other in numbered)]
    blocks = {name: model.get_submodule(name) for name in _droppable(model, outer)}
    own = {name: (type(block).__qualname__, _params_of(block)) for name, block in blocks.items()}
    blocks_of_all = {name: entry for stage in engine.mesh.pp.gather(own) for name, entry in stage.items()}
    kinds = [(name.rpartition(".")[0], kind) for name, (kind, _) in blocks_of_all.items()]
    names = [name for name, (kind, _) in blocks_of_all.items() if kinds.count((name.rpartition(".")[0], kind)) > 1]
    _check_any(model, names)
    names.sort(key=lambda name: [int(part) if part.isdigit() else -1 for part in name.split(".")])
    return {name: blocks_of_all[name][1] for name in names}


def _with_keywords(drop: LayerDrop, engine: Engine) -> Callable[..., Any]:
    def add(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        drop.update_state(engine.global_steps)
        return (args, kwargs | drop.get_state()) if module.training else None

    return add

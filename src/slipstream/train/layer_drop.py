"""Progressive layer dropping (Zhang and He 2020, arXiv 2010.13369): training skips residual blocks, more of them as it goes on.

Block l of L is kept with probability p = 1 - (l / L)(1 - theta(t)), where theta(t) = (1 - theta) exp(-gamma t) + theta at step t.
A kept block's change is divided by p: x + (f(x) - x) / p. In evaluation all blocks run, unscaled.

[Note: The same blocks on every rank]
The draw is a hash of (seed, step, backwards of the step so far, block): ranks agree without communication, a resumed run draws
what the interrupted one would have drawn, and a forward without a backward, which one rank may run alone, changes no later draw.
A dropped block is not called: nothing is gathered for it. Nothing is reduced for it either (`zero.hooks.Dropped`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor, nn

from slipstream.config.plan import Plan
from slipstream.train.around import Around, first_of, unwrap, with_first, wrap
from slipstream.zero.hooks import Hooks
from slipstream.zero.wrap import repeated_blocks

if TYPE_CHECKING:
    from slipstream.train.engine import Engine

_KEYWORDS = ("progressive_layer_drop", "pld_theta")


class ProgressiveLayerDrop:
    """The schedule of theta, with DeepSpeed's methods. theta: its limit, 0 to 1. gamma: the rate per step."""

    def __init__(self, theta: float = 0.5, gamma: float = 0.001) -> None:
        self.theta, self.gamma, self.current_theta = theta, gamma, 1.0

    def get_state(self) -> dict[str, Any]:
        """The keywords of a forward that drops layers itself."""
        return {"progressive_layer_drop": True, "pld_theta": self.get_theta()}

    def get_theta(self) -> float:
        return self.current_theta

    def update_state(self, global_step: int) -> None:
        """Take the theta of this step."""
        self.current_theta = float((1.0 - self.theta) * numpy.exp(-self.gamma * global_step) + self.theta)


class LayerDrop(ProgressiveLayerDrop):
    """The schedule, and the draws of one model's blocks."""

    def __init__(self, theta: float, gamma: float, seed: int) -> None:
        super().__init__(theta, gamma)
        self.seed, self.count = seed, 0  # number of blocks
        self.dropped: frozenset[nn.Module] = frozenset()
        self.blocks: list[nn.Module] = []
        self.wrappers: list[tuple[nn.Module, Around]] = []
        # What blocks of a class return beside their first output: None, or a container's type and number
        self.kinds: dict[type, tuple[type, int] | None] = {}

    def keep_probability(self, block: int) -> float:
        """Of block 1 to `count`."""
        return 1.0 - block / self.count * (1.0 - self.current_theta)

    def draw(self, step: int, backwards: int) -> frozenset[nn.Module]:
        """Draw for the forward that begins; returns the blocks that it drops."""
        self.update_state(step)
        self.dropped = frozenset(
            block for i, block in enumerate(self.blocks, 1) if _uniform(self.seed, step, backwards, i) >= self.keep_probability(i)
        )
        return self.dropped

    def around(self, number: int) -> Around:
        """What runs around the calls of block `number`, 1 to `count`."""

        def call(block: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not block.training:
                return run(*args, **kwargs)
            x = args[0] if args else next((value for value in kwargs.values() if isinstance(value, Tensor)), None)
            if block in self.dropped:
                return self._like_output(type(block), x, partial(run, *args, **kwargs))
            output = run(*args, **kwargs)
            changed = first_of(output)
            if not isinstance(x, Tensor) or not isinstance(changed, Tensor) or changed.shape != x.shape:
                raise TypeError(
                    f"progressive_layer_drop: {type(block).__name__} is no residual block: its first input and output must be "
                    "tensors of one shape. Let the model drop layers itself (its forward takes pld_theta=), or drop the "
                    "block of the config"
                )
            self.kinds[type(block)] = _kind(output)
            probability = self.keep_probability(number)
            if probability == 1.0:
                return output
            return with_first(output, torch.lerp(x.to(changed.dtype), changed, 1.0 / probability))

        return call

    def _like_output(self, kind: type, x: Any, run: Callable[[], Any]) -> Any:
        """A dropped block's output: its input, in a tuple with None if its class returns tuples."""
        if kind not in self.kinds:  # the first forward of a resumed run: look, without a trace
            with torch.no_grad(), torch.random.fork_rng():
                self.kinds[kind] = _kind(run())
        others = self.kinds[kind]
        return x if others is None else others[0]([x, *[None] * others[1]])

    def wrap(self) -> None:
        """Let the blocks leave themselves out."""
        self.wrappers = [(block, self.around(number)) for number, block in enumerate(self.blocks, 1)]
        for block, around in self.wrappers:
            wrap(block, around)

    def close(self) -> None:
        """Give the blocks their own classes again."""
        for block, around in self.wrappers:
            unwrap(block, around)
        self.blocks, self.wrappers = [], []


def _uniform(*numbers: int) -> float:
    """A number in [0, 1) that looks random, of whole numbers."""
    digest = blake2b(",".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2.0**64


def _kind(output: Any) -> tuple[type, int] | None:
    return (type(output), len(output) - 1) if isinstance(output, (tuple, list)) else None


def drop_layers(model: nn.Module, plan: Plan) -> Callable[[Engine], None] | None:
    """Prepare the model as the config's `progressive_layer_drop` says. Raises TypeError for a model without residual blocks."""
    if plan.layer_drop is None:
        return None
    drop = LayerDrop(plan.layer_drop.theta, plan.layer_drop.gamma, plan.seed)
    parameters = inspect.signature(model.forward).parameters.values()
    is_own = any(param.name in _KEYWORDS for param in parameters)
    is_open = any(param.kind is param.VAR_KEYWORD for param in parameters) and not hasattr(model, "config")
    names = [] if is_own or is_open else _droppable(model)
    if not names and not is_own and not is_open:
        raise TypeError(
            f"progressive_layer_drop: {type(model).__name__} has no repeated residual blocks, and its forward takes no keywords"
            f" {' and '.join(_KEYWORDS)}; let it take them and drop layers itself, or drop the block of the config"
        )
    drop.blocks = [model.get_submodule(name) for name in names]
    drop.count = len(names)
    drop.wrap()

    def connect(engine: Engine) -> None:
        states = engine.single
        states.resources["layer drop"] = drop

        def wire(hooks: Hooks) -> None:
            if drop.blocks:
                hooks.droppable(drop.blocks, lambda: drop.draw(engine.global_steps, hooks.backwards))
            else:
                hooks.handles.append(model.register_forward_pre_hook(_with_keywords(drop, engine), with_kwargs=True))

        wire(states.hooks)
        states.on_hooks.append(wire)
        states.after_step.append(lambda _: drop.update_state(engine.global_steps))

    return connect


def _droppable(model: nn.Module) -> list[str]:
    """The repeated blocks that have layers inside: a list of plain layers is no stack of residual blocks."""
    return [name for name in repeated_blocks(model) if any(True for _ in model.get_submodule(name).children())]


def _with_keywords(drop: LayerDrop, engine: Engine) -> Callable[..., Any]:
    def add(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        drop.update_state(engine.global_steps)
        return (args, kwargs | drop.get_state()) if module.training else None

    return add

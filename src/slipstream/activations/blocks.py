"""Activation checkpointing and activation offload for a model's repeated blocks, without changes to the model's code.

A block's `forward` is replaced on the instance, so it runs inside the block's hooks, which gather the weights before and release
them after. In the backward, the gradient of the block's outputs gathers the weights before the first saved tensor is needed. Hooks
do not fire again during recompute. `remove` restores the `forward`; copies and pickles of the model have the original one.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from slipstream.activations.recompute import HostMemory, checkpoint, inside_checkpoint
from slipstream.config.plan import ActivationPlan
from slipstream.zero.wrap import repeated_blocks

logger = logging.getLogger(__name__)

T = TypeVar("T")
_NO_BLOCKS = (
    ": repeated blocks are children of one ModuleList or Sequential that share a class. For other modules, call "
    "slipstream.activations.checkpoint in their forward"
)
Timing = Callable[[str], AbstractContextManager[object]]


def apply(
    plan: ActivationPlan, model: nn.Module, resident: Iterable[Tensor], timing: Timing, *, speaks: bool = True
) -> list[Shadow]:
    """Replace the forwards of the blocks that the plan selects; each returned object has a `remove`.

    resident  tensors that stay on the device: the units' weights
    speaks    whether this rank logs
    """
    if plan.way == "keep":
        return []
    names = repeated_blocks(model)
    chosen = names[: plan.num_blocks]
    if speaks:
        level, hint = (logging.INFO, "") if names else (logging.WARNING, _NO_BLOCKS)
        logger.log(level, "activations: %s for %d of %d repeated blocks%s", plan.way, len(chosen), len(names), hint)
    part = partial(_boundary, timing if plan.profile else nullcontext, plan.synchronize)
    unsaid = iter([speaks])

    def warn(name: str) -> None:
        if next(unsaid, False):
            logger.warning(
                "the model checkpoints block %s itself, so the config's activation checkpointing skips such blocks", name
            )

    modules = dict(model.named_modules())
    host = HostMemory([*resident, *model.buffers()]) if plan.way == "offload" or plan.inputs_on_host else None
    if plan.way == "offload" and host is not None:
        return [Offloaded(modules[name], host) for name in chosen]
    return [Recomputed(modules[name], name, host, part, warn) for name in chosen]


class Shadow:
    """Replaces a block's own `forward` on the instance until it is removed."""

    def __init__(self, block: nn.Module) -> None:
        self.block, self.own = block, block.forward
        self.__wrapped__ = self.own  # for inspect.signature
        self.before = block.__dict__.get("forward")
        self.removed = False
        block.__dict__["forward"] = self

    def remove(self) -> None:
        self.removed = True
        if self.block.__dict__.get("forward") is not self:  # another replacement wraps it: from now on, only pass calls through
            return
        if self.before is None:
            del self.block.__dict__["forward"]
        else:
            self.block.__dict__["forward"] = self.before

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.own,)


def _itself(value: T) -> T:
    return value


class Recomputed(Shadow):
    """Activation checkpointing: keeps the block's inputs and recomputes the block in the backward."""

    def __init__(self, block: nn.Module, name: str, host: HostMemory | None, part: Timing, warn: Callable[[str], None]) -> None:
        super().__init__(block)
        self.name, self.host, self.part, self.warn = name, host, part, warn
        self.flagged = [module for module in block.modules() if hasattr(module, "gradient_checkpointing")]  # transformers' flag

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.removed or not torch.is_grad_enabled():
            return self.own(*args, **kwargs)
        if torch.compiler.is_compiling():  # the compiled graph recomputes
            return checkpoint(self.own, *args, **kwargs)
        if inside_checkpoint() or any(module.gradient_checkpointing and module.training for module in self.flagged):
            self.warn(self.name)
            return self.own(*args, **kwargs)
        runs = itertools.count()

        def run(*args: Any, **kwargs: Any) -> Any:
            if next(runs) == 0:
                return self.own(*args, **kwargs)
            with self.part("recompute"), _unchanged(_statistics(self.block)):
                return self.own(*args, **kwargs)

        with self.part("checkpointed forward"):
            given = {name: False if name == "use_cache" else _without_cache(value) for name, value in kwargs.items()}
            return checkpoint(run, *map(_without_cache, args), host=self.host, **given)


class Offloaded(Shadow):
    """Activation offload: keeps the tensors that the block saves for backward in host memory."""

    def __init__(self, block: nn.Module, host: HostMemory) -> None:
        super().__init__(block)
        self.host = host

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.removed or not torch.is_grad_enabled() or inside_checkpoint():
            return self.own(*args, **kwargs)
        with self.host.saving():
            return self.own(*args, **kwargs)


@contextmanager
def _boundary(timing: Timing, synchronize: bool, name: str) -> Iterator[None]:
    """Times, and optionally synchronizes, a checkpointed forward or a recompute."""
    if synchronize:
        torch.cuda.synchronize()
    with timing(name):
        try:
            yield
        finally:  # torch ends a recompute with an exception once it has all saved tensors
            if synchronize:
                torch.cuda.synchronize()


def _statistics(block: nn.Module) -> list[Tensor]:
    """Running statistics, which a recompute must not update a second time for the same batch."""
    norms = (module for module in block.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training)
    return [buffer for norm in norms for buffer in norm.buffers(recurse=False)]


@contextmanager
def _unchanged(buffers: list[Tensor]) -> Iterator[None]:
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)


def _without_cache(value: Any) -> Any:
    """None for a transformers KV cache, to which a recompute would append again; transformers' own checkpointing drops it, too."""
    cache = getattr(sys.modules.get("transformers.cache_utils"), "Cache", None)
    return None if cache is not None and isinstance(value, cache) else value

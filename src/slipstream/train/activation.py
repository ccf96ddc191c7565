"""What the repeated blocks of a model keep for their backward, as the plan says, without touching its code.

A block's `forward` is shadowed on the instance, and so runs inside the block's hooks: its weights are gathered before and
released after, as always; in the backward, the gradient of its outputs gathers them before the first saved tensor is asked
for. Hooks do not fire again when a block is computed again. `remove` undoes it; copies and pickles of the model are without.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from slipstream.checkpointing import HostMemory, checkpoint, inside_checkpoint
from slipstream.config.plan import ActivationPlan
from slipstream.zero.wrap import repeated_blocks

logger = logging.getLogger(__name__)

T = TypeVar("T")
Timing = Callable[[str], AbstractContextManager[None]]


def apply(
    plan: ActivationPlan, model: nn.Module, resident: Iterable[Tensor], timing: Timing, *, speaks: bool = True
) -> list[Shadow]:
    """Shadow the forwards of the blocks that the plan means; each of what is returned has a `remove`.

    resident  what stays on the device: the units' weights
    speaks    whether this rank logs
    """
    if plan.way == "keep":
        return []
    names = repeated_blocks(model)
    chosen = names[: plan.num_blocks]
    if speaks:
        logger.log(
            logging.INFO if names else logging.WARNING,
            "activations: %s for %d of %d repeated blocks%s",
            plan.way,
            len(chosen),
            len(names),
            ""
            if names
            else "; those are children of one ModuleList or Sequential that share a class. For other modules, "
            "call slipstream.checkpointing.checkpoint in their forward",
        )
    host = HostMemory([*resident, *model.buffers()]) if plan.way == "offload" or plan.inputs_on_host else None
    part = _Boundary(timing if plan.profile else _untimed, plan.synchronize)
    say = _Once(speaks)
    modules = dict(model.named_modules())
    if plan.way == "recompute":
        return [Recomputed(modules[name], name, host, part, say) for name in chosen]
    assert host is not None
    return [Offloaded(modules[name], host) for name in chosen]


class Shadow:
    """Stands before a block's own `forward` until it is removed."""

    def __init__(self, block: nn.Module) -> None:
        self.block, self.own = block, block.forward
        self.__wrapped__ = self.own  # for inspect.signature
        self.before = block.__dict__.get("forward")
        self.removed = False
        block.__dict__["forward"] = self

    def remove(self) -> None:
        self.removed = True
        if self.block.__dict__.get("forward") is not self:  # shadowed in its turn: from now on it only passes through
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
    """Keeps the block's inputs and runs it again in the backward."""

    def __init__(self, block: nn.Module, name: str, host: HostMemory | None, part: _Boundary, say: _Once) -> None:
        super().__init__(block)
        self.name, self.host, self.part, self.say = name, host, part, say
        self.flagged = [module for module in block.modules() if hasattr(module, "gradient_checkpointing")]  # transformers' flag

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.removed or not torch.is_grad_enabled():
            return self.own(*args, **kwargs)
        if torch.compiler.is_compiling():  # the compiled graph computes again, by itself
            return checkpoint(self.own, *args, **kwargs)
        if inside_checkpoint() or any(module.gradient_checkpointing and module.training for module in self.flagged):
            self.say(
                "the model checkpoints block %s itself: activation checkpointing by config leaves such blocks to it", self.name
            )
            return self.own(*args, **kwargs)
        times = itertools.count()

        def run(*args: Any, **kwargs: Any) -> Any:
            if next(times) == 0:
                return self.own(*args, **kwargs)
            with self.part("recompute"), _unchanged(_statistics(self.block)):
                return self.own(*args, **kwargs)

        with self.part("checkpointed forward"):
            return checkpoint(run, *map(_without_cache, args), host=self.host, **_without_caches(kwargs))


class Offloaded(Shadow):
    """Lets what the block saves wait in host memory."""

    def __init__(self, block: nn.Module, host: HostMemory) -> None:
        super().__init__(block)
        self.host = host

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.removed or not torch.is_grad_enabled() or inside_checkpoint():
            return self.own(*args, **kwargs)
        with self.host.saving():
            return self.own(*args, **kwargs)


class _Boundary:
    """Around every checkpointed forward and every recompute."""

    def __init__(self, timing: Timing, synchronize: bool) -> None:
        self.timing = timing
        self.synchronize = torch.cuda.synchronize if synchronize else _nothing

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.synchronize()
        with self.timing(name):
            try:
                yield
            finally:  # torch ends a recompute by an exception, once it has what it needs
                self.synchronize()


def _nothing() -> None:
    pass


def _untimed(part: str) -> AbstractContextManager[None]:
    return nullcontext()


class _Once:
    def __init__(self, speaks: bool) -> None:
        self.speaks = speaks

    def __call__(self, text: str, *values: Any) -> None:
        if self.speaks:
            logger.warning(text, *values)
        self.speaks = False


def _statistics(block: nn.Module) -> list[Tensor]:
    """Running statistics, which a second forward of the same batch must not move a second time."""
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
    """None for a KV cache of transformers, to which a second forward would append a second time; its own checkpointing
    drops it as well."""
    cache = getattr(sys.modules.get("transformers.cache_utils"), "Cache", None)
    return None if cache is not None and isinstance(value, cache) else value


def _without_caches(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: False if name == "use_cache" else _without_cache(value) for name, value in kwargs.items()}

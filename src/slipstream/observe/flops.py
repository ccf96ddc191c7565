"""The FLOP of each module of a model, forward and backward, by formulas for matrix products, convolutions and attention.

A forward operation belongs to the innermost running module. A backward operation belongs to the module that was running when its
autograd node was created. A product has two FLOP per multiply-accumulate (MAC); other operations count as 0.

[Note: Whose backward] Autograd nodes have increasing numbers (torch's sequence numbers), so the numbers at which modules begin and
end tell which module owns a node. Nothing is added to the graph; checkpoints and shared modules are counted correctly.
"""

from __future__ import annotations

import bisect
import copy
import logging
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(slots=True)
class FlopSum:
    forward: int = 0
    backward: int = 0  # including recomputation
    recomputed: int = 0  # part of `backward`: forwards repeated by activation checkpointing

    def add(self, other: FlopSum, times: int = 1) -> None:
        self.forward += times * other.forward
        self.backward += times * other.backward
        self.recomputed += times * other.recomputed


Counts = dict[str, FlopSum]  # module -> its own work, without that of submodules


class FlopCounter(TorchDispatchMode):
    """Counts operations inside, by module. Operations outside the model's modules, such as a loss after it, do not count."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        from slipstream.train.planning import dry_run  # torch's fake tensors are slow to import

        self.formulas = dry_run.formulas()
        self.counts: Counts = {}
        self._running: list[str] = []
        self._since: list[int] = [-1]  # the numbers of first nodes ...
        self._owners: list[str | None] = [""]  # ... of these modules; parallel/overlap.py gives some nodes low numbers
        self._handles: list[Any] = []
        for name, module in modules.items():
            self._handles += [
                module.register_forward_pre_hook(lambda *_, name=name: self.enter(name)),
                module.register_forward_hook(lambda *_, name=name: self._leave(name), always_call=True),
            ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def enter(self, name: str) -> None:
        """Called when a module begins."""
        self._running.append(name)
        self._mark()

    def _leave(self, name: str) -> None:
        while self._running and self._running.pop() != name:  # a recomputation may stop early, with an exception
            pass
        self._mark()

    def _mark(self) -> None:
        self._since.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self._owners.append(self._running[-1] if self._running else None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = self.formulas.get(func.overloadpacket)
        if formula is None:
            return out
        node = torch._C._current_autograd_node()
        recomputing = node is not None and torch.is_grad_enabled()
        name: str | None
        if self._running and (node is None or recomputing):
            name = self._running[-1]
        else:
            name = None if node is None else self._owners[bisect.bisect_right(self._since, node._sequence_nr()) - 1]
        if name is None:
            return out
        flops = formula(*args, **(kwargs or {}), out_val=out)
        self.counts.setdefault(name, FlopSum()).add(FlopSum(flops) if node is None else FlopSum(0, flops, recomputing * flops))
        return out


def count(model: nn.Module, args: Any, kwargs: Any, names: Iterable[str], recomputed: Iterable[str] = ()) -> Counts:
    """The work of one call of the model and, if gradients are enabled, of its backward, on fake tensors, which have shapes but no
    values.

    names: the modules that count; work of others counts for their parent. recomputed: modules whose forward the backward repeats.
    Raises what the model raises if it reads values.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    from slipstream.train.planning import dry_run

    state, noise = random.getstate(), logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, noise.disabled = noise.disabled, True  # the caller reports it
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            ghost = dry_run.without_memory(model)
            modules = dict(ghost.named_modules())
            dry_run.recompute_blocks(ghost, recomputed)
            inputs, keywords = _faked(args), _faked(kwargs)
            counter = FlopCounter({name: modules[name] for name in names})
            with counter:
                output = ghost(*inputs, **keywords)
                if torch.is_grad_enabled() and (roots := _roots(output)):
                    torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    finally:
        random.setstate(state)
        noise.disabled = was_disabled
    return counter.counts


def _roots(output: Any) -> list[Tensor]:
    from slipstream.train.planning import dry_run

    try:
        return dry_run.roots_of(output)
    except ValueError:  # no parameter requires a gradient
        return []


def _faked(value: Any) -> Any:
    """A copy of a tree, including attributes of objects, in which tensors have no memory."""
    from slipstream.train.planning import dry_run

    memo: dict[int, Any] = {}
    for tensor in dry_run.tensors_in(value):
        memo[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", requires_grad=tensor.requires_grad)
    return copy.deepcopy(value, memo)

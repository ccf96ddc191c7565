"""`EvenRoutes`: routes with values in a dry run, so that layers whose code reads them run, with an even load of the experts.

A layer that calls the modules of a list (as transformers 4 wrote them, or with code of its own) reads which experts its tokens
chose: `nonzero`, `where`, masks, loops over values. Tensors of a dry run have no values. So what chooses from the scores of all
experts (`topk`, `argmax`, ...) gives indices with values here: token after token, expert after expert. What is computed of these
alone has values, too; beside tensors without values, a mask becomes the places that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.overrides import TorchFunctionMode

from slipstream.zero.trees import map_tensors, tensors_in
from slipstream.zero.wrap import expert_lists

_CHOOSE: frozenset[Callable[..., Any]] = frozenset(
    getattr(place, name) for place in (torch, Tensor) for name in ("topk", "argmax", "max", "sort", "argsort", "multinomial")
)
_AT = frozenset((Tensor.__getitem__, Tensor.__setitem__))


def even_routes(model: nn.Module) -> AbstractContextManager[Any]:
    """For the forward and the backward of a model on tensors without values. Nothing changes without lists of experts."""
    lists = [list(model.get_submodule(name).children()) for name in expert_lists(model)]
    sizes = {sum(any(True for _ in module.parameters()) for module in modules) for modules in lists}
    return EvenRoutes(sizes) if sizes else nullcontext()


class EvenRoutes(TorchFunctionMode):
    """sizes: numbers of experts, by which scores are known."""

    def __init__(self, sizes: set[int]) -> None:
        super().__init__()
        self.sizes = sizes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = list(tensors_in((args, kwargs)))
        if tensors and not any(isinstance(each, FakeTensor) for each in tensors):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func in _AT:
            args = (args[0], _index(args[1]), *args[2:])
        out = func(*args, **kwargs)
        scores = tensors[0] if func in _CHOOSE else None
        if scores is None or not scores.is_floating_point() or not scores.dim() or scores.shape[-1] not in self.sizes:
            return out
        num = scores.shape[-1]
        return map_tensors(out, lambda each: each if each.is_floating_point() else _even(each, num))


def _even(chosen: Tensor, num: int) -> Tensor:
    with unset_fake_temporarily():
        return torch.arange(chosen.numel()).remainder(num).view(chosen.shape)


def _index(index: Any) -> Any:
    """An index whose masks and numbers are tensors with values, without these: their shapes are those of the result."""
    if not isinstance(index, tuple):
        index = (index,)
    return tuple(each for part in index for each in _parts(part))


def _parts(part: Any) -> Iterator[Any]:
    if not isinstance(part, Tensor) or isinstance(part, FakeTensor):
        yield part
    elif part.dtype is torch.bool:
        with unset_fake_temporarily():
            yield from part.nonzero().unbind(1)
    elif not part.dim():
        with unset_fake_temporarily():
            yield int(part)
    else:
        yield part

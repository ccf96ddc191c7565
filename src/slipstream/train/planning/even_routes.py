"""`EvenRoutes`: lets layers that read their routes run in a dry run, with an even load of the experts.

Layers that call the modules of a list (transformers 4, or custom code) read which experts their tokens chose: `nonzero`, `where`,
masks, loops over values. Tensors of a dry run have no values. So operations that choose from the scores of all experts (`topk`,
`argmax`, ...) return indices with values here, which assign the experts in turn. Results that depend only on these indices have
values, too. Where a mask with values indexes a tensor without values, it is replaced by the positions that it selects.
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
    """The context for the forward and backward of a model on fake tensors. A no-op for models without lists of experts."""
    lists = [list(model.get_submodule(name).children()) for name in expert_lists(model)]
    sizes = {sum(any(True for _ in module.parameters()) for module in modules) for modules in lists}
    return EvenRoutes(sizes) if sizes else nullcontext()


class EvenRoutes(TorchFunctionMode):
    """sizes: numbers of experts; a float tensor whose last dimension has such a size is taken for scores."""

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
    """The index with real masks and scalars replaced by positions and numbers, because the shape of the result depends on them."""
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

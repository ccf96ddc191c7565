"""Sharded training states: placements, units, transports. The public names are `Init`, `load` and `gathered`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn

from slipstream.zero.init import Init, load

__all__ = ["Init", "gathered", "load"]


@contextmanager
def gathered(params: nn.Module | nn.Parameter | Iterable[nn.Parameter], *, modifier_rank: int | None = None) -> Iterator[None]:
    """Gather parameters for reading and writing; writes are stored in every shard and master at the end. Collective.

        with slipstream.zero.gathered(model.head.weight):
            model.head.weight.normal_()

    Works in every stage. Parameters of no engine are left as they are. With `modifier_rank` None all ranks must write the
    same values, else the end raises ValueError; otherwise the values of that data-parallel rank are used. An exception inside
    writes nothing.
    """
    from slipstream.zero import access

    chosen: list[Any]
    if isinstance(params, nn.Module):
        chosen = list(params.parameters())
    else:
        chosen = [params] if isinstance(params, (nn.Parameter, str, bytes)) else list(params)
    for item in chosen:
        if not isinstance(item, torch.Tensor):
            hint = f"; for a name: model.get_parameter({item!r})" if isinstance(item, str) else ""
            raise TypeError(f"gathered() takes parameters or a module, and was given {item!r}{hint}")
    with access.gathered_units(access.units_of(chosen), modifier_rank):
        yield

"""Sharded training states: placements, units, transports. `Init`, `load` and `gathered` are the public part."""

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
    """Show parameters whole and writable; what is written goes back to every shard and master. Collective.

        with slipstream.zero.gathered(model.head.weight):
            model.head.weight.normal_()

    Works in every stage. Parameters of no engine are left as they are. With `modifier_rank` None all ranks must write the
    same values; otherwise that data-parallel rank's count. An exception inside writes nothing.
    """
    from slipstream.zero import access

    chosen: list[Any]
    if isinstance(params, nn.Module):
        chosen = list(params.parameters())
    elif isinstance(params, nn.Parameter):
        chosen = [params]
    else:
        chosen = [params] if isinstance(params, (str, bytes)) else list(params)  # type: ignore[unreachable]
    for one in chosen:
        if not isinstance(one, torch.Tensor):
            known = f"; for a name: model.get_parameter({one!r})" if isinstance(one, str) else ""
            raise TypeError(f"gathered() takes parameters or a module, and was given {one!r}{known}")
    with access.gathered_units(access.units_of(chosen), modifier_rank):
        yield

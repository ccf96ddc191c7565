"""Check that ranks which compute one batch together get the same batch, and draw the same random numbers."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from slipstream.parallel.exchange import Exchange

INPUTS = "inputs of its first forward"


def check_alike(exchange: Exchange, have: str, facts: Mapping[str, int]) -> None:
    """Compare numbers over the ranks of an axis. Collective. Raises ValueError on all of them if one differs.

    With inputs that differ, training would be wrong without an error, because each rank computes a part of each sum.

    have: what the ranks share of the model or batch; facts: name -> number
    """
    ranks = exchange.axis.ranks
    rows = exchange.gather(torch.tensor([list(facts.values())], device=exchange.device), 0, [1] * exchange.size).tolist()
    for what, first, *others in zip(facts, *rows, strict=True):
        for rank, other in zip(ranks[1:], others, strict=True):
            if other != first:
                raise ValueError(
                    f"ranks {ranks[0]} and {rank} have {have} ({exchange.axis.name}), and the {what} differ ({first} and {other}): "
                    "give both the same seed and batches, by the loader of initialize(training_data=), or a sampler with "
                    "num_replicas=engine.mesh.batch.size, rank=engine.mesh.batch.index"
                )


def checksum(tensors: Any) -> int:
    """A checksum of the values of all tensors in a tree."""
    crc = 0
    for value in pytree.tree_leaves(tensors):
        if isinstance(value, Tensor):
            crc = zlib.crc32(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), crc)
    return crc


def check_first_inputs(model: nn.Module, exchange: Exchange, draws: bool) -> None:
    """Compare the inputs of the next forward, once, over the ranks that slice the layers. draws: compare random states, too."""

    def compare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        handle.remove()
        if hasattr(module, "num_stages"):  # in a pipeline, floats come from the previous stage
            args, kwargs = pytree.tree_map_only(Tensor, lambda x: None if x.is_floating_point() else x, (args, kwargs))
        facts = {INPUTS: checksum((args, kwargs)), "state of its random generator": checksum(torch.get_rng_state()) if draws else 0}
        check_alike(exchange, "slices of the same layers", facts)

    handle = model.register_forward_pre_hook(compare, with_kwargs=True, prepend=True)

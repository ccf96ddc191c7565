"""Whether ranks that compute one batch together are given the same one, and draw the same random numbers: at the first forward."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from slipstream.parallel.exchange import Exchange


def check_first_inputs(model: nn.Module, exchange: Exchange, have: str, draws: bool = False, unless: str = "") -> None:
    """Compare the inputs of the next forward over the ranks of an axis, once.

    Other inputs than a neighbor's would train a model that is none, without an error: each rank computes a part of each sum.

    have: what of the model or batch the ranks have; draws: compare their random states, too; unless: a keyword argument with which
    inputs may differ
    """

    def compare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        handle.remove()
        if kwargs.get(unless) is not None:
            return
        axis, crc = exchange.axis, 0
        for value in pytree.tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and not (value.is_floating_point() and hasattr(module, "num_stages")):
                crc = zlib.crc32(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), crc)
        drawn = zlib.crc32(torch.get_rng_state().numpy().tobytes()) if draws else 0
        rows = exchange.gather(torch.tensor([[crc, drawn]], device=exchange.device), 0).tolist()
        for what, column in (("inputs of its first forward", 0), ("state of its random generator", 1)):
            for rank, row in zip(axis.ranks, rows, strict=True):
                if row[column] != rows[0][column]:
                    raise ValueError(
                        f"ranks {axis.ranks[0]} and {rank} have {have} ({axis.name}), and the {what} differ: give both "
                        "the same seed and batches, by the loader of initialize(training_data=), or a sampler with "
                        "num_replicas=engine.mesh.batch.size, rank=engine.mesh.batch.index"
                    )

    handle = model.register_forward_pre_hook(compare, with_kwargs=True, prepend=True)

"""A model's buffers (running statistics, masks) on several ranks: the first rank's values are saved and distributed.

Each rank updates its buffers from its own batches, and nothing reduces them. DDP and DeepSpeed keep the first rank's, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from slipstream.zero.comm import Comm


def first_values(tensors: Sequence[Tensor], comm: Comm) -> list[Tensor]:
    """Copies of `tensors` with the first rank's values, in one broadcast. Non-dense tensors keep each rank's own. Collective."""
    copies = [tensor.detach().clone() for tensor in tensors]
    dense = [i for i, copy in enumerate(copies) if _is_dense(copy)] if comm.size > 1 else []
    if not dense:
        return copies
    for i in dense:
        copies[i] = copies[i].contiguous()
    raw = [copies[i].view(-1).view(torch.uint8) for i in dense]
    flat = torch.cat([part.to(raw[0].device) for part in raw])
    comm.broadcast(flat)
    for part, received in zip(raw, flat.split([part.numel() for part in raw]), strict=True):
        part.copy_(received)
    return copies


def spread_first(buffers: Sequence[Tensor], comm: Comm) -> None:
    """Overwrite the dense buffers with the first rank's. Collective.

    Writes through `.data`, as batch norm does, so that a graph that has saved a buffer does not count it as modified.
    """
    for buffer, value in zip(buffers, first_values(buffers, comm), strict=True):
        if comm.index != 0 and _is_dense(buffer):
            once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in buffer.stride())  # expanded: shared memory
            buffer.data[once].copy_(value[once])


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not is_traceable_wrapper_subclass(cast(Any, tensor))

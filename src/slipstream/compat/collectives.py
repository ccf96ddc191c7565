"""`deepspeed.runtime.comm`: DeepSpeed's reductions of tensors, for code that calls them. The engine's are in zero/reduction.py."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.ops import wire

_BITS = 4


def _swap(rows: Tensor, group: Any) -> Tensor:
    """Row i goes to rank i; returns the rows that all ranks have for this one."""
    received = torch.empty_like(rows)
    if dist.get_world_size(group) == 1:
        return rows
    dist.all_to_all_single(received.view(torch.uint8), rows.contiguous().view(torch.uint8), group=group)
    return received


def _spans(tensor: Tensor, size: int, align: int = 1) -> Tensor:
    """[ranks, the longest span]: the flat tensor, padded with zeros."""
    longest = -(-math.ceil(tensor.numel() / size) // align) * align
    return torch.nn.functional.pad(tensor.detach().reshape(-1), (0, longest * size - tensor.numel())).view(size, longest)


def _own(spans: Tensor, numel: int, index: int) -> slice:
    """This rank's part of its span that is no padding."""
    return slice(0, min(max(numel - index * spans.shape[1], 0), spans.shape[1]))


@torch.no_grad()
def reduce_scatter_coalesced(tensors: Sequence[Tensor], group: Any = None) -> list[Tensor]:
    """This rank's span of the mean over ranks of each tensor, flat; the last spans may be shorter, or empty. Collective.

    Added in rank order, in fp32 for narrower dtypes. DeepSpeed divides the given tensors, too; here they stay.
    """
    size, index, means = dist.get_world_size(group), dist.get_rank(group), []
    for tensor in tensors:
        spans = _spans(tensor, size)
        mean = _swap(spans, group).to(torch.promote_types(tensor.dtype, torch.float32)).sum(0) / size
        means.append(mean.to(tensor.dtype)[_own(spans, tensor.numel(), index)])
    return means


@torch.no_grad()
def all_to_all_quant_reduce(tensors: Sequence[Tensor], groups: Mapping[str, Any]) -> list[Tensor]:
    """As `reduce_scatter_coalesced` over all ranks, of matrices in codes of 4 bits (ZeRO++, qgZ). Collective.

    As in DeepSpeed, vectors, and tensors whose elements twice the number of ranks does not divide, are not coded. Every tensor is
    rounded once: groups, between which DeepSpeed rounds again, are not used. Scales are of 256 elements.
    """
    size, index, means = dist.get_world_size(), dist.get_rank(), []
    for tensor in tensors:
        if tensor.dim() == 1 or tensor.numel() % (2 * size):
            means += reduce_scatter_coalesced([tensor])
            continue
        spans = _spans(tensor, size)
        codes = torch.empty(size, wire.nbytes(spans.shape[1], _BITS), dtype=torch.uint8, device=tensor.device)
        for span, row in zip(spans, codes, strict=True):
            wire.encode(span, row, _BITS)
        mean = torch.empty(spans.shape[1], device=tensor.device)
        wire.sum_coded(mean, list(_swap(codes, None)), _BITS, alpha=1 / size)
        means.append(mean.to(tensor.dtype)[_own(spans, tensor.numel(), index)])
    return means

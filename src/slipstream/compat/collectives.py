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


class CompressedBackend:
    """The exchange of signs of DeepSpeed's 1-bit optimizers, over torch's process groups; one scale for a rank's whole buffer."""

    def __init__(self, mpu: Any = None) -> None:
        self.group = None if mpu is None else mpu.get_data_parallel_group()
        self.size, self.rank = dist.get_world_size(self.group), dist.get_rank(self.group)

    @torch.no_grad()
    def compressed_allreduce(self, buffer_m: Tensor, worker_error: Tensor, server_error: Tensor, local_rank: int = 0) -> Tensor:
        """Replace `buffer_m` by signs of the mean over ranks of its signs, with both errors' feedback; returns it. Collective.

        worker_error: as many elements as `buffer_m`, or more, a multiple of 8 x ranks. server_error: of one rank's span of these.

        Raises ValueError for errors of other sizes.
        """
        size, numel, padded = self.size, buffer_m.numel(), worker_error.numel()
        if padded < numel or padded % (8 * size) or server_error.numel() * size != padded:
            raise ValueError(
                f"compressed_allreduce: a buffer of {numel} elements on {size} ranks needs a worker_error of a multiple of "
                f"{8 * size} elements, not {padded}, and a server_error of an equal share of these, not {server_error.numel()}"
            )
        y = torch.nn.functional.pad(buffer_m.reshape(-1).float(), (0, padded - numel)) + worker_error.view(-1)
        bits, scale = _compress(y, worker_error)
        rows = torch.cat([bits.view(size, -1), scale.view(1, 1).view(torch.uint8).expand(size, 4)], 1)
        served = torch.stack([_decompress(row) for row in _swap(rows, self.group)]).mean(0) + server_error.view(-1)
        bits, scale = _compress(served, server_error)
        whole = _swap(torch.cat([bits, scale.view(1).view(torch.uint8)]).expand(size, -1), self.group)
        values = torch.cat([_decompress(row) for row in whole])
        return buffer_m.copy_(values[:numel].view(buffer_m.shape))


def _compress(y: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """The signs of y in bytes, and their scale; `error` becomes what they lose."""
    scale, positive = y.norm() / math.sqrt(y.numel()), y >= 0
    error.view(-1).copy_(y - torch.where(positive, scale, -scale))
    bits = (positive.view(-1, 8).to(torch.uint8) << torch.arange(8, dtype=torch.uint8, device=y.device)).sum(1, dtype=torch.uint8)
    return bits, scale


def _decompress(row: Tensor) -> Tensor:
    bits, scale = row[:-4], row[-4:].clone().view(torch.float32)
    signs = (bits[:, None] >> torch.arange(8, dtype=torch.uint8, device=row.device)) & 1
    return (signs.flatten().float() * 2 - 1) * scale

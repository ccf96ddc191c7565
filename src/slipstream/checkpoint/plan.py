"""The plan of a save: which rank writes which box of which tensor.

    own_shares    every rank lists the boxes that it has -> rank 0 checks them and names a writer for each -> each rank's own
    shares_of     the boxes of one rank's tensors, also for a load

Boxes are in coordinates of the whole tensor. Flat ranges and DTensor shards are converted to boxes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.checkpoint.errors import CheckpointError, Ranks
from slipstream.checkpoint.flat_slice import Box, FlatSlice, Ranged, Shape, check_cover, whole_box
from slipstream.checkpoint.values import check_dense

STAGE = 1 << 24  # bytes of values copied to the host or converted at a time


class Share(NamedTuple):
    """One box of a tensor of `shape`, and this rank's values of it."""

    name: str
    shape: Shape
    box: Box
    values: Tensor | Ranged  # a tensor of the box's sizes, or elements [first, first + box.numel)
    first: int = 0

    def stages(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield the values on the host as `dtype`, row-major and 1D, at most STAGE bytes at a time."""
        step = STAGE // max(self.values.dtype.itemsize, dtype.itemsize)
        flat = flattened(self.values) if isinstance(self.values, Tensor) else self.values
        for start in range(0, self.box.numel, step):
            stop = min(start + step, self.box.numel)
            stage = flat[start:stop] if isinstance(flat, Tensor) else flat.get(self.first + start, self.first + stop)
            yield stage.to(dtype).cpu()


def dtype_of(tensor: FlatSlice | Tensor) -> torch.dtype:
    return tensor.data.dtype if isinstance(tensor, FlatSlice) else tensor.dtype


def check_entry(name: str, tensor: FlatSlice | Tensor) -> None:
    """Raise CheckpointError unless `tensor` can be saved or filled under `name`."""
    if not isinstance(name, str) or not name or name.startswith("$"):
        raise CheckpointError(f"a tensor named {name!r}; a name is a string that does not begin with '$'")
    if not isinstance(tensor, FlatSlice | Tensor):
        raise CheckpointError(f"tensor {name!r} is a {type(tensor).__name__}; pass a FlatSlice or a Tensor")
    data = tensor.data if isinstance(tensor, FlatSlice) else tensor
    if isinstance(data, Tensor):
        check_dense(repr(name), data)


def flattened(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def shares_of(tensors: Mapping[str, FlatSlice | Tensor]) -> Iterator[Share]:
    """The boxes that this rank has of each tensor: those of a slice, a DTensor's shard, or a whole tensor."""
    dtensor: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())  # imported if a DTensor exists
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        if isinstance(tensor, FlatSlice):
            first, data = 0, tensor.data
            for box in tensor.boxes():
                values = data[first : first + box.numel].view(box.sizes) if isinstance(data, Tensor) else data
                yield Share(name, shape, box, values, first)
                first += box.numel
        elif not isinstance(tensor, dtensor):
            yield Share(name, shape, whole_box(shape), tensor)
        elif tensor.device_mesh.get_coordinate() is not None:  # else this rank is not in its mesh
            from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

            sizes, offsets = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)
            yield Share(name, shape, Box(tuple(offsets), tuple(sizes)), tensor.to_local())


class Extent(NamedTuple):
    """The part of a tensor that one rank has."""

    dtype: torch.dtype
    shape: Shape
    boxes: list[Box]


def own_shares(ranks: Ranks, step: str, tensors: Mapping[str, FlatSlice | Tensor]) -> list[Share]:
    """The shares that this rank writes. Collective. Raises CheckpointError unless the ranks together hold every element exactly
    once; equal boxes are allowed, and one rank writes each."""
    shares: list[Share] = []

    def extents() -> dict[str, Extent]:
        shares.extend(shares_of(tensors))
        result = {name: Extent(dtype_of(tensor), tuple(tensor.shape), []) for name, tensor in tensors.items()}
        for share in shares:
            result[share.name].boxes.append(share.box)
        return result

    extents_by_rank = ranks.gather(step, extents)
    writers = ranks.decide(step, lambda: choose_writers(extents_by_rank))
    return [share for share in shares if writers.get((share.name, share.box), ranks.index) == ranks.index]


def choose_writers(extents_by_rank: Sequence[Mapping[str, Extent]]) -> dict[tuple[str, Box], int]:
    """The writer of each box that several ranks hold: the one with the least data so far; among equals, the lowest rank."""
    kinds: dict[str, tuple[torch.dtype, Shape]] = {}
    holders: dict[tuple[str, Box], list[int]] = {}
    for rank, extents in enumerate(extents_by_rank):
        for name, (dtype, shape, boxes) in extents.items():
            kind = kinds.setdefault(name, (dtype, shape))
            if kind != (dtype, shape):
                raise CheckpointError(
                    f"tensor {name!r} is {dtype} of shape {shape} on rank {rank} and {kind[0]} of shape {kind[1]} on a lower one"
                )
            for box in boxes:
                holders.setdefault((name, box), []).append(rank)
    boxes_by_name: dict[str, list[Box]] = {name: [] for name in kinds}
    writers: dict[tuple[str, Box], int] = {}
    nbytes = [0] * len(extents_by_rank)
    for (name, box), ranks in holders.items():
        boxes_by_name[name].append(box)
        writer = min(ranks, key=nbytes.__getitem__)
        dtype, shape = kinds[name]
        nbytes[writer] += math.prod(shape) * dtype.itemsize or 1  # of the whole tensor: files stay as in earlier versions
        if len(ranks) > 1:
            writers[name, box] = writer
    for name, parts in boxes_by_name.items():
        check_cover(name, kinds[name][1], parts)
    return writers

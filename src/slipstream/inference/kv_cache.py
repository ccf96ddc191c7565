"""The paged KV cache in torch: the memory behind `Request.blocks`.

Per layer `keys[l]` and `values[l]`: [num_blocks, block_size, kv_heads, head_dim] (values: value_dim if it differs), contiguous, one
dtype. Position p of a request is in its block p // block_size at offset p % block_size. A *slot* is the index of that place over
all blocks.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor


class HeadShape(NamedTuple):
    """Shape of a token's keys and values in one layer."""

    num_kv_heads: int
    head_dim: int
    value_dim: int = 0  # if values have another size than keys (MLA: keys are rotated features and latents)


class KVCache:
    def __init__(
        self,
        shapes: Sequence[HeadShape],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = torch.device(device)

        def blocks(heads: int, dim: int) -> Tensor:
            shape = (num_blocks, block_size, heads, dim)
            # Zeros, not empty: masked attention multiplies unused slots by 0, and 0 * NaN is NaN.
            if self.device.type == "cpu":
                return untouched_zeros(shape, dtype)
            return torch.zeros(shape, dtype=dtype, device=device)

        self.keys = [blocks(heads, dim) for heads, dim, _ in shapes]
        self.values = [blocks(heads, value_dim or dim) for heads, dim, value_dim in shapes]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (from, to) in every layer. No block may be both a source and a target."""
        if not pairs:
            return
        old, new = torch.tensor(pairs, device=self.device).T
        for layer in (*self.keys, *self.values):
            layer[new] = layer[old]

    def slots(self, blocks: Sequence[int], start: int, stop: int) -> Tensor:
        """Slots [stop - start] of positions [start, stop), on the CPU: callers move the slots of all requests at once."""
        positions = torch.arange(start, stop)
        return torch.tensor(blocks, dtype=torch.int64)[positions // self.block_size] * self.block_size + positions % self.block_size

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys, values [tokens, kv_heads, head_dim] to slots [tokens]."""
        self.keys[layer].flatten(0, 1)[slots] = keys.to(self.dtype)
        self.values[layer].flatten(0, 1)[slots] = values.to(self.dtype)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return a gathered copy of keys and values [tokens, kv_heads, head_dim] of slots [tokens]."""
        return self.keys[layer].flatten(0, 1)[slots], self.values[layer].flatten(0, 1)[slots]

    def is_finite(self, slots: Tensor) -> bool:
        """Whether all keys and values of slots [tokens] are finite."""
        return all(bool(layer.flatten(0, 1)[slots].isfinite().all()) for layer in (*self.keys, *self.values))


def bytes_per_block(shapes: Sequence[HeadShape], block_size: int, dtype: torch.dtype) -> int:
    return sum(heads * (dim + (value_dim or dim)) for heads, dim, value_dim in shapes) * block_size * dtype.itemsize


_mappings = weakref.WeakSet[mmap.mmap]()  # of `untouched_zeros`


def untouched_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU that cost neither time nor memory until they are written; torch.zeros writes them (0.8 s per GiB).

    The pages are private: a parent does not see what its fork writes. They are small: a short text's blocks lie far apart."""
    numel = math.prod(shape)
    mapping = mmap.mmap(-1, max(numel, 1) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_NOHUGEPAGE)
    _mappings.add(mapping)
    return torch.frombuffer(mapping, dtype=dtype)[:numel].view(*shape)


def reserved_nbytes() -> int:
    """Bytes of all `untouched_zeros` of this process, written or not."""
    return sum(map(len, _mappings))

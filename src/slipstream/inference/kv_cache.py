"""Keys and values of all requests, in blocks: the memory that `Request.blocks` number.

Per layer `keys[l]` and `values[l]`: [num_blocks, block_size, kv_heads, head_dim], contiguous, one dtype. Position p of a
request lies in its block p // block_size, at p % block_size; a *slot* is that place counted over all blocks.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class HeadShape(NamedTuple):
    """One layer's."""

    num_kv_heads: int
    head_dim: int


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

        def blocks(shape: HeadShape) -> Tensor:
            # Zeros, not empty: a masked score times a NaN of an unused slot would be NaN.
            if self.device.type == "cpu":
                return untouched_zeros((num_blocks, block_size, *shape), dtype)
            return torch.zeros(num_blocks, block_size, *shape, dtype=dtype, device=device)

        self.keys = [blocks(shape) for shape in shapes]
        self.values = [blocks(shape) for shape in shapes]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks (from, to) in every layer; no block is both copied from and to."""
        if not pairs:
            return
        old, new = torch.tensor(pairs, device=self.device).T
        for layer in (*self.keys, *self.values):
            layer[new] = layer[old]

    def slots(self, blocks: Sequence[int], start: int, stop: int) -> Tensor:
        """Slots [stop - start] of positions [start, stop), on the CPU: the caller joins and moves them at once."""
        positions = torch.arange(start, stop)
        return torch.tensor(blocks, dtype=torch.int64)[positions // self.block_size] * self.block_size + positions % self.block_size

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """keys, values [tokens, kv_heads, head_dim] into slots [tokens]."""
        self.keys[layer].flatten(0, 1)[slots] = keys.to(self.dtype)
        self.values[layer].flatten(0, 1)[slots] = values.to(self.dtype)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [tokens, kv_heads, head_dim] of slots [tokens]; a gathered copy."""
        return self.keys[layer].flatten(0, 1)[slots], self.values[layer].flatten(0, 1)[slots]

    def is_finite(self, slots: Tensor) -> bool:
        """Whether all keys and values of slots [tokens] are numbers."""
        return all(bool(layer.flatten(0, 1)[slots].isfinite().all()) for layer in (*self.keys, *self.values))


def bytes_per_block(shapes: Sequence[HeadShape], block_size: int, dtype: torch.dtype) -> int:
    """Keys and values of all layers."""
    return 2 * sum(heads * head_dim for heads, head_dim in shapes) * block_size * dtype.itemsize


def untouched_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU that cost neither time nor memory before they are written: torch.zeros writes them all (0.8 s a GiB)."""
    numel = math.prod(shape)
    return torch.frombuffer(mmap.mmap(-1, max(numel, 1) * dtype.itemsize), dtype=dtype)[:numel].view(*shape)


def give_pages_back(tensor: Tensor, *, shared: bool) -> None:
    """The whole pages of a CPU tensor, private or mapped as shared (`untouched_zeros`); they read as zeros then."""
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    advice = mmap.MADV_REMOVE if shared else mmap.MADV_DONTNEED
    if start < stop:
        refused = ctypes.CDLL(None, use_errno=True).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), advice)
        assert refused == 0, f"madvise: errno {ctypes.get_errno()}"

"""Tensors whose memory is free while their contents are in another memory: the states that an engine's sleep moved away.

A tensor keeps its identity: its storage is resized to zero and back.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from slipstream.ops.disk import Disk, DiskError
from slipstream.zero.shared import free_pages
from slipstream.zero.storage.store import Space, Store, pieces, range_nbytes


class Asleep:
    """The states that an engine's sleep moved away, and their copies."""

    def __init__(self, kinds: Iterable[str], device: torch.device, folder: Path | None) -> None:
        self.kinds = frozenset(kinds)
        self.device, self.folder = device, folder
        self._space: Space | None = None
        self._gone: list[tuple[Tensor, int, Store | Tensor | None]] = []

    def take(self, tensors: list[tuple[Tensor, bool]]) -> int:
        """Copy the tensors away (each with whether to keep its contents); returns their bytes. `empty` then frees their memory."""
        if self.folder is not None:
            nbytes = sum(range_nbytes(tensor.numel(), tensor.element_size()) for tensor, counts in tensors if counts)
            self._space = Space(partial(Disk, str(self.folder)), max(nbytes, 1))
        for tensor, counts in tensors:
            self._gone.append((tensor, tensor.untyped_storage().nbytes(), self._save(tensor) if counts else None))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return sum(tensor.nbytes for tensor, _, _ in self._gone)

    def empty(self) -> None:
        """Free the memory, once all ranks have saved; each rank frees its own part of shared memory."""
        for tensor, _, _ in self._gone:
            if tensor.untyped_storage().resizable():
                tensor.untyped_storage().resize_(0)
            else:
                free_pages(tensor)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def bring_back(self) -> str:
        """Restore all tensors; returns the first disk error, "" for none. All memory is allocated again either way."""
        error = ""
        for tensor, nbytes, saved in self._gone:
            if tensor.untyped_storage().resizable():
                tensor.untyped_storage().resize_(nbytes)
            if isinstance(saved, Store):
                try:
                    for start, stop in pieces(saved.numel):
                        tensor[start:stop].copy_(saved.get(start, stop))
                except DiskError as failed:
                    error = error or str(failed)
            elif saved is not None:
                tensor.copy_(saved, non_blocking=True)
            else:
                tensor.zero_()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.close()
        return error

    def close(self) -> None:
        if self._space is not None:
            self._space.close()
        self._gone, self._space = [], None

    def _save(self, tensor: Tensor) -> Store | Tensor:
        if self._space is None:
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
        store = self._space.store(tensor.numel(), tensor.dtype)
        for start, stop in pieces(tensor.numel()):
            store.put(start, tensor[start:stop].cpu())
        return store

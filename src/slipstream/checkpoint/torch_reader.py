"""Lets `torch.distributed.checkpoint.load` read our checkpoints and DeepSpeed's. Imports that package (0.6-2 s): import it late."""

from __future__ import annotations

import os
from collections.abc import Iterator
from operator import add
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from slipstream.checkpoint.box_reader import BoxReader
from slipstream.checkpoint.flat_slice import Box


class TorchReader(StorageReader):
    """Each rank verifies in `prepare_local_plan`, which torch completes on all ranks before any of them fills a tensor."""

    def __init__(self, reader: BoxReader) -> None:
        self._reader = reader

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    properties=TensorProperties(dtype=entry.dtype),
                    size=torch.Size(entry.shape),
                    chunks=[ChunkStorageMetadata(*map(torch.Size, piece.box)) for piece in entry.pieces],
                )
                for name, entry in self._reader.document.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        self._reader.verify((name, box) for _, name, box in _boxes(plan))
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with torch.no_grad():
            for item, name, box in _boxes(plan):
                target = planner.resolve_tensor(item).detach()
                self._reader.fill_box(name, box, target)
                planner.commit_tensor(item, target)
        self._reader.close()
        result: Future[None] = Future()
        result.set_result(None)
        return result

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # torch never selects it from a path


def _boxes(plan: LoadPlan) -> Iterator[tuple[ReadItem, str, Box]]:
    for item in plan.items:
        offsets = map(add, item.storage_index.offset or (), item.storage_offsets)
        yield item, item.storage_index.fqn, Box(tuple(offsets), tuple(item.lengths))

"""Our format as a backend of `torch.distributed.checkpoint` (DCP): a planner and a storage class for each direction.

DCP provides, as public API, the plan (which box comes from where), deduplication of replicas, resharding of any box into any
other (DTensors too), and an interface for other tools: `Reader` serves a plain
`torch.distributed.checkpoint.load(state, storage_reader=Reader(...))`. Its file format is not used, because it pickles metadata
and byte items: here metadata is a `Document`, and only tensors become items.

A load reads twice through one set of open files. `prepare_local_plan`, which DCP completes on every rank before any rank
continues, verifies the checksum of each block that this rank needs; `read_data` then reads into the tensors themselves, from the
page cache. A damaged byte therefore leaves all tensors of all ranks unchanged, without extra memory. Only a disk that fails
between the two reads can leave a load half done.

This module imports DCP (0.6-2 s), so it is itself imported inside functions only.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from slipstream.checkpoint.background import Staging
from slipstream.checkpoint.data_file import DataFile
from slipstream.checkpoint.document import BLOCK, Document, Entry, Piece, file_name
from slipstream.checkpoint.errors import CheckpointError
from slipstream.checkpoint.files import Files
from slipstream.checkpoint.flat_slice import Box, FlatSlice, Part, Shape, check_cover, flat_range, memory
from slipstream.ops.checksum import crc32, crc32_blocks

_ALIGN = 64  # bytes: each piece starts on a cache line
_STAGE = 16 * BLOCK  # bytes of a bounce buffer on the host, for tensors that a file is not read into directly


class FlatSavePlanner(DefaultSavePlanner):
    """DCP's planner with support for `FlatSlice`; raises CheckpointError for a state that could not be loaded."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._views: dict[tuple[str, Shape], Tensor | Part] = {}

    def create_local_plan(self) -> SavePlan:
        items: list[WriteItem] = []
        for name, held in self.state_dict.items():
            if isinstance(held, FlatSlice):
                items += self._items(name, held)
            else:
                items += create_default_local_save_plan({name: held}, self.is_coordinator).items
        self.plan = SavePlan(items)
        return self.plan

    def _items(self, name: str, held: FlatSlice) -> Iterator[WriteItem]:
        for box, view in held.pieces():
            self._views[name, box.offsets] = view
            data = TensorWriteData(_chunk(box), TensorProperties(dtype=view.dtype), torch.Size(held.shape))
            index = MetadataIndex(name, torch.Size(box.offsets))
            yield WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        kinds: dict[str, tuple[torch.dtype, Shape]] = {}
        parts: dict[str, set[Box]] = defaultdict(set)
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                assert item.tensor_data is not None, f"{item.index.fqn}: only tensors become items"
                data, name = item.tensor_data, item.index.fqn
                kind = (data.properties.dtype, tuple(data.size))
                if kinds.setdefault(name, kind) != kind:
                    raise CheckpointError(
                        f"tensor {name!r} is {kind[0]} of shape {kind[1]} on rank {rank} and "
                        f"{kinds[name][0]} of shape {kinds[name][1]} on a lower one"
                    )
                parts[name].add(_box(data.chunk))
        for name, boxes in parts.items():
            check_cover(name, kinds[name][1], list(boxes))
        return super().create_global_plan(all_plans)

    def lookup_object(self, index: MetadataIndex) -> Any:
        view = self._views.get((index.fqn, tuple(index.offset or ())))
        return super().lookup_object(index) if view is None else view


class FlatLoadPlanner(DefaultLoadPlanner):
    """DCP's planner with support for `FlatSlice`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._views: dict[tuple[str, Shape], Tensor | Part] = {}

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None, "set_up_planner must be called first"
        items: list[ReadItem] = []
        for name, held in self.state_dict.items():
            if isinstance(held, FlatSlice):
                stored = self.metadata.state_dict_metadata[name]
                assert isinstance(stored, TensorStorageMetadata), f"{name}: only tensors are items"
                pieces = list(held.pieces())
                self._views.update(((name, box.offsets), view) for box, view in pieces)
                items += create_read_items_for_chunk_list(name, stored, [_chunk(box) for box, _ in pieces])
            else:
                items += create_default_local_load_plan({name: held}, self.metadata).items
        return LoadPlan([item for item in items if math.prod(item.lengths)])

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        view = self._views.get((index.fqn, tuple(index.offset or ())))
        assert not isinstance(view, Part), f"{index.fqn} is stored on disk: it is filled through part()"
        return super().lookup_tensor(index) if view is None else view

    def part(self, item: ReadItem) -> Part | None:
        """The item's destination if it is not in memory."""
        view = self._views.get((item.dest_index.fqn, tuple(item.dest_index.offset or ())))
        return view if isinstance(view, Part) else None


class Writer(StorageWriter):
    """Writes this rank's pieces to one file; on rank 0, `finish` fills `entries` and `files` with those of all ranks.

    With `staging`, the pieces are only copied there, in the file's layout, and `flush` writes them later; until then entries have
    no checksums.
    """

    def __init__(self, folder: Path, rank: int, staging: Staging | None = None) -> None:
        self.folder, self.rank, self.file = folder, rank, file_name(rank)
        self.entries: dict[str, Entry] = {}
        self.files: dict[str, int] = {}
        self._staging, self._staged = staging, torch.empty(0, dtype=torch.uint8)
        self._places: list[_Place] = []
        self._sums: dict[int, list[int]] = {}  # of staged pieces, by offset in the file

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        views, end = [], 0
        for item in plan.items:
            view = planner.resolve_data(item)
            assert isinstance(view, Tensor | Part), "only tensors become items"
            self._places.append(_Place(end + -end % _ALIGN, view.numel() * view.dtype.itemsize))
            end = self._places[-1].end
            views.append(view)
        sums = self._write(views) if self._staging is None else self._stage(views, self._staging)
        results = []
        for item, place, crcs in zip(plan.items, self._places, sums, strict=True):
            assert item.tensor_data is not None, "only tensors become items"
            piece = Piece(box=_box(item.tensor_data.chunk), file=self.file, at=place.at, crc32=tuple(crcs))
            results.append(WriteResult(index=item.index, size_in_bytes=place.nbytes, storage_data=piece))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write(self, views: Sequence[Tensor | Part]) -> list[list[int]]:
        if not views:
            return []
        sums = []
        with DataFile(self.folder / self.file, self._places[-1].end) as file:
            for view, place in zip(views, self._places, strict=True):
                file.append_until(place.at)
                sums.append([each for part in _host_bytes(view) for each in file.append(part)])
        return sums

    def _stage(self, views: Sequence[Tensor | Part], staging: Staging) -> list[list[int]]:
        """Copy to host memory, with the checksums of host tensors on the way, by as many threads as torch has: training waits."""
        self._staged, filled = staging.take(self._places[-1].end if views else 0), 0
        chunks: list[tuple[_Place, Tensor, int]] = []
        for view, place in zip(views, self._places, strict=True):
            self._staged[filled : place.at].zero_()
            filled = place.end
            if isinstance(view, Part):  # read or decoded one stage at a time
                at = place.at
                for part in _host_bytes(view):
                    self._sums.setdefault(place.at, []).extend(crc32_blocks(part, BLOCK, self._staged[at : at + part.numel()]))
                    at += part.numel()
                continue
            source = _flat(view).view(torch.uint8)
            if source.is_cpu:
                chunks += [(place, source, start) for start in range(0, place.nbytes, _STAGE)]
            else:
                self._staged[place.at : place.end].copy_(source, non_blocking=True)
        self._staged[filled:].zero_()
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            for (place, _, _), sums in zip(chunks, pool.map(self._copy, chunks), strict=True):
                self._sums.setdefault(place.at, []).extend(sums)
        if any(isinstance(view, Tensor) and view.is_cuda for view in views):
            torch.cuda.synchronize()
        return [[] for _ in views]

    def _copy(self, chunk: tuple[_Place, Tensor, int]) -> list[int]:
        place, source, start = chunk
        part = source[start : start + _STAGE]
        return crc32_blocks(part, BLOCK, self._staged[place.at + start : place.at + start + part.numel()])

    def flush(self) -> dict[int, list[int]]:
        """Write the staged pieces; returns each one's checksums, by offset in the file. Not collective; runs on any thread."""
        if self._places:
            with DataFile(self.folder / self.file, self._places[-1].end) as file:
                file.begin(self._staged)
                for place in self._places:
                    if place.nbytes and place.at not in self._sums:  # copied from a device
                        self._sums[place.at] = crc32_blocks(self._staged[place.at : place.end], BLOCK)
        self._staged = torch.empty(0, dtype=torch.uint8)
        return self._sums

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pieces: dict[str, list[Piece]] = defaultdict(list)
        for result in itertools.chain.from_iterable(results):
            piece = result.storage_data
            pieces[result.index.fqn].append(piece)
            self.files[piece.file] = max(self.files.get(piece.file, 0), piece.at + result.size_in_bytes)
        for name, stored in metadata.state_dict_metadata.items():
            assert isinstance(stored, TensorStorageMetadata), f"{name}: only tensors are items"
            dtype, shape = stored.properties.dtype, tuple(stored.size)
            self.entries[name] = Entry(dtype=dtype, shape=shape, pieces=tuple(pieces[name]))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # DCP never selects it from a path


class _Place(NamedTuple):
    """The bytes of a piece in its file."""

    at: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.at + self.nbytes


class Reader(StorageReader):
    """Reads the tensors of one folder whose `Document` has been validated.

    records_verified: the ranks have already verified the zip records of DeepSpeed's files (load.py).
    """

    def __init__(self, folder: Path, document: Document, *, records_verified: bool = False) -> None:
        self._folder, self._document, self._verify_records = folder, document, not records_verified
        self._pieces = {
            (name, piece.box.offsets): (entry, piece) for name, entry in document.tensors.items() for piece in entry.pieces
        }
        self._files = Files(folder, document.files)  # open from the first pass to the end of the second

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    properties=TensorProperties(dtype=entry.dtype),
                    size=torch.Size(entry.shape),
                    chunks=[_chunk(piece.box) for piece in entry.pieces],
                )
                for name, entry in self._document.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        self._verify(plan.items)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with torch.no_grad():
            for item in plan.items:
                part = planner.part(item) if isinstance(planner, FlatLoadPlanner) else None
                if part is not None:
                    self._fill_part(part, item)
                    continue
                target = planner.resolve_tensor(item).detach()
                self._fill(target, item)
                planner.commit_tensor(item, target)
        self.close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def close(self) -> None:
        self._files.close()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False

    def _verify(self, items: Sequence[ReadItem]) -> None:
        """Verify the checksum of every block and zip record that holds a byte of `items`, each once."""
        block = self._document.block
        needed: dict[tuple[str, Shape], set[int]] = defaultdict(set)
        for item in items:
            entry, piece = self._find(item.storage_index)
            if piece.zip_record is not None and self._verify_records:
                self._files.verify(piece.zip_record)
            for first, nbytes in _runs(entry, piece, item) if piece.crc32 else ():
                needed[item.storage_index.fqn, piece.box.offsets].update(range(first // block, (first + nbytes - 1) // block + 1))
        buffer = torch.empty(block, dtype=torch.uint8)
        for key in sorted(needed, key=lambda key: (self._pieces[key][1].file, self._pieces[key][1].at)):
            entry, piece = self._pieces[key]
            for index in sorted(needed[key]):
                start = index * block
                part = buffer[: min(block, entry.nbytes(piece) - start)]
                self._files.read(piece.file, piece.at + start, memory(part))
                if crc32(part) != piece.crc32[index]:
                    raise CheckpointError(
                        f"{self._folder / piece.file} is damaged: the checksum of tensor {key[0]!r} does not "
                        f"match (bytes [{piece.at + start}, {piece.at + start + part.numel()}))"
                    )

    def _fill(self, target: Tensor, item: ReadItem) -> None:
        entry, piece = self._find(item.storage_index)
        runs = _runs(entry, piece, item)
        if target.is_contiguous() and target.device.type == "cpu" and target.dtype is entry.dtype:
            raw, position = memory(target), 0
            for first, nbytes in runs:
                self._files.read(piece.file, piece.at + first, raw[position : position + nbytes])
                position += nbytes
            return
        size = entry.dtype.itemsize
        if not target.is_contiguous():
            whole = torch.empty(tuple(item.lengths), dtype=entry.dtype)
            self._fill(whole, item)
            target.copy_(whole)
            return
        flat, stage, position = target.view(-1), torch.empty(_STAGE // size, dtype=entry.dtype), 0
        for first, nbytes in runs:
            for at in range(first, first + nbytes, stage.numel() * size):
                part = stage[: min(first + nbytes - at, stage.numel() * size) // size]
                self._files.read(piece.file, piece.at + at, memory(part))
                flat[position : position + part.numel()].copy_(part)
                position += part.numel()

    def _fill_part(self, part: Part, item: ReadItem) -> None:
        """Fill a destination on disk: in place if the item is one flat range of it, else by read-modify-write."""
        span = flat_range(part.sizes, Box(tuple(item.dest_offsets), tuple(item.lengths)))
        if span is None:
            whole = part.get(0, part.numel()).view(part.sizes)
            self._fill(narrow_tensor_by_index(whole, item.dest_offsets, item.lengths), item)
            part.put(0, whole.view(-1))
            return
        start, stop = span
        values = torch.empty(stop - start, dtype=part.dtype)
        self._fill(values.view(tuple(item.lengths)), item)
        part.put(start, values)

    def _find(self, index: MetadataIndex) -> tuple[Entry, Piece]:
        return self._pieces[index.fqn, tuple(index.offset or ())]


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def _box(chunk: ChunkStorageMetadata) -> Box:
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def _runs(entry: Entry, piece: Piece, item: ReadItem) -> Iterator[tuple[int, int]]:
    """(first byte in the piece, number of bytes) of each contiguous run of a sub-box."""
    sizes, offsets, lengths = piece.box.sizes, item.storage_offsets, item.lengths
    strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    outer = len(sizes)  # the loop below iterates over the dims before this one; the others form one run
    while outer and (outer == len(sizes) or lengths[outer] == sizes[outer]):
        outer -= 1
    size = entry.dtype.itemsize
    start = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    nbytes = math.prod(lengths[outer:]) * size
    for steps in itertools.product(*(range(length) for length in lengths[:outer])):
        yield ((start + sum(step * stride for step, stride in zip(steps, strides, strict=False))) * size, nbytes)


def _host_bytes(tensor: Tensor | Part) -> Iterator[Tensor]:
    """Yield the bytes of a tensor, row-major, in stages of whole blocks, copied from a device or a disk if needed."""
    step = _STAGE // tensor.dtype.itemsize
    if isinstance(tensor, Part):
        for start in range(0, tensor.numel(), step):
            yield tensor.get(start, min(start + step, tensor.numel())).view(torch.uint8)
        return
    flat = _flat(tensor)
    for part in flat.split(step) if flat.numel() else ():
        yield part.cpu().view(torch.uint8)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)

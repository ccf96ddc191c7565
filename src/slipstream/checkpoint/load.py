"""Load: every rank validates everything before the first byte of any tensor changes.

    check metadata.json -> same checkpoint on all ranks -> names, shapes, dtypes, file sizes -> the caller accepts the values
    -> checksums of every needed block -> all ranks agree -> read bytes into the tensors in place

Any world size can load a checkpoint of any other: each rank reads the bytes of its own ranges. A failed load raises on every rank
and changes nothing, without extra memory (see box_reader.py).
"""

from __future__ import annotations

import difflib
import heapq
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.checkpoint.box_reader import BoxReader, open_data
from slipstream.checkpoint.directory import is_checkpoint, is_deepspeed, locate, read_document, read_latest, state_of
from slipstream.checkpoint.document import Document, Entry, ZipRecord, counterpart, one_axis
from slipstream.checkpoint.errors import CheckpointError, Ranks
from slipstream.checkpoint.flat_slice import FlatSlice
from slipstream.checkpoint.plan import check_entry, dtype_of, shares_of
from slipstream.checkpoint.values import decode

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TRIES = 5


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """The content of a checkpoint, known without reading tensors."""

    path: Path
    shared: dict[str, Any]  # its tensors and arrays are stand-ins on meta: shape and dtype only
    document: Document = field(repr=False)

    @property
    def world_size(self) -> int:
        """The number of ranks that saved; 0 for files of other programs."""
        return self.document.world_size

    @cached_property
    def tensors(self) -> dict[str, Entry]:
        """The tensors with names of their own; the others belong to values."""
        return {name: entry for name, entry in self.document.tensors.items() if not name.startswith("$")}


class Loaded(NamedTuple):
    shared: dict[str, Any]
    per_rank: dict[str, Any] | None  # None if ranks of another mesh saved it
    nearest: dict[str, Any]  # values of the rank that this one continues; empty if the checkpoint has none
    copy: int  # this rank's index among the ranks that continue it


def latest_tag(directory: str | os.PathLike[str], *, group: dist.ProcessGroup | None = None, universal: bool = False) -> str | None:
    """The tag in `latest`, else in `latest_universal` (with `universal`: in the other order), as rank 0 of `group` reads it; None
    if neither exists."""
    return Ranks(group).decide("no checkpoint was loaded", lambda: _latest(Path(directory), universal))


def _latest(path: Path, universal: bool) -> str | None:
    tag = read_latest(path, universal)
    if tag is None and is_checkpoint(path):
        raise CheckpointError(f"{path} is a checkpoint itself: name the folder around it, and tag={path.resolve().name!r}")
    return tag


def retry_if_replaced(
    directory: str | os.PathLike[str], tag: str | None, work: Callable[[], T], *, group: dist.ProcessGroup | None = None
) -> T:
    """Return `work()`, and retry it if it fails while another process replaces checkpoint `tag` (None: the latest).

    Collective, like `work`. Raises the error of `work` if nothing was replaced, and CheckpointError after _TRIES calls.
    """
    ranks, parent = Ranks(group), Path(directory)
    for _ in range(_TRIES):
        before = state_of(parent, tag) if ranks.index == 0 else None
        try:
            return work()
        except CheckpointError as error:
            if group is not None and not error.on_all_ranks:  # the other ranks did not fail here
                raise
            if not ranks.first(ranks.index == 0 and state_of(parent, tag) != before):
                raise
            logger.info("%s was replaced while it was read; reading it again", parent if tag is None else parent / tag)
            last = error
    raise CheckpointError(
        f"{last} (it was replaced each of {_TRIES} times while it was read: load it when its writer has ended)"
    ) from last


def load_metadata(directory: str | os.PathLike[str], tag: str, *, group: dist.ProcessGroup | None = None) -> Metadata:
    """Read the metadata of checkpoint `tag`. Collective over `group`; if it fails on one rank, every rank raises CheckpointError.

    Every rank reads our metadata.json, which shows that all see the same file. DeepSpeed's metadata are one pickle per rank that
    saved, so only rank 0 reads them.
    """
    return retry_if_replaced(directory, tag, lambda: _load_metadata(directory, tag, group), group=group)


def _load_metadata(directory: str | os.PathLike[str], tag: str, group: dist.ProcessGroup | None) -> Metadata:
    ranks, parent = Ranks(group), Path(directory)
    result: list[Metadata] = []
    step = ranks.first(f"checkpoint {parent / str(tag)} was not loaded")
    deepspeed = ranks.decide(step, lambda: read_document(path) if is_deepspeed(path := locate(parent, tag)) else None)

    def read() -> str:
        path = locate(parent, tag)
        document = read_document(path) if deepspeed is None else deepspeed
        shared = _values(document.shared, _stand_ins(document, "$shared/", "meta"), f"{path}: shared")
        result.append(Metadata(path=path, shared=shared, document=document))
        return document.save_id

    save_ids = ranks.gather(step, read)
    ranks.decide(step, lambda: _check_same(save_ids))
    return result[0]


def _check_same(save_ids: list[str]) -> None:
    if len(set(save_ids)) > 1:
        rank = next(rank for rank, save_id in enumerate(save_ids) if save_id != save_ids[0])
        raise CheckpointError(f"ranks 0 and {rank} see different checkpoints there; was it just replaced?")


def load(
    directory: str | os.PathLike[str],
    tag: str,
    *,
    tensors: Mapping[str, FlatSlice | Tensor],
    group: dist.ProcessGroup | None = None,
    mesh: Mapping[str, int] | None = None,
    convert: bool = False,
    accept: Callable[[Loaded], None] | None = None,
    metadata: Metadata | None = None,
) -> Loaded:
    """Fill `tensors` in place from checkpoint `tag` and return its values. Collective over `group`.

    Every requested name must exist with its shape; other tensors of the checkpoint are not read. Dtypes must be equal unless
    `convert`, which rounds like `Tensor.copy_`. `accept` gets the values before any tensor is filled; if it raises on one rank,
    the load fails on all. metadata: the result of `load_metadata` for the same checkpoint, on every rank. Without it, a checkpoint
    that another process replaces meanwhile is read again, and `accept` is called again. Raises CheckpointError on every rank if
    any rank finds an error, with nothing changed.
    """
    if metadata is not None:
        return _load(metadata, tensors, group, mesh, convert, accept)

    def work() -> Loaded:
        return _load(_load_metadata(directory, tag, group), tensors, group, mesh, convert, accept)

    return retry_if_replaced(directory, tag, work, group=group)


def _load(
    metadata: Metadata,
    tensors: Mapping[str, FlatSlice | Tensor],
    group: dist.ProcessGroup | None,
    mesh: Mapping[str, int] | None,
    convert: bool,
    accept: Callable[[Loaded], None] | None,
) -> Loaded:
    ranks = Ranks(group)
    path, document = metadata.path, metadata.document
    step = ranks.first(f"checkpoint {path} was not loaded")

    def prepare() -> str:
        for name, tensor in tensors.items():
            check_entry(name, tensor)
            _check_target(name, tensor, document, convert)
        return document.save_id

    save_ids = ranks.gather(step, prepare)
    ranks.decide(step, lambda: _check_complete(path, document, save_ids))

    current = one_axis(ranks.size) if mesh is None else mesh
    is_same_mesh, counterpart_place = dict(document.mesh) == dict(current), counterpart(document.mesh, current, ranks.index)
    shared = _stand_ins(document, "$shared/", "cpu")
    own = _stand_ins(document, f"$rank/{counterpart_place.rank}/", "cpu")
    with closing(BoxReader(path, document)) as files:
        _verify_records(ranks, step, files, [*shared, *tensors])
        _read(ranks, step, files, {**shared, **own})
        files.close()  # opened again for the tensors; if the checkpoint is replaced by then, the load fails and is retried
        values = _values(document.shared, shared, f"{path}: shared")
        skeleton = document.per_rank[counterpart_place.rank] if document.per_rank else {}
        nearest = _values(skeleton, own, f"{path}: per_rank[{counterpart_place.rank}]")
        loaded = Loaded(values, nearest if is_same_mesh else None, nearest, counterpart_place.copy)
        if accept is not None:
            ranks.gather(step, lambda: accept(loaded))
        _read(ranks, step, files, tensors)
    for tensor in tensors.values():
        data = tensor.data if isinstance(tensor, FlatSlice) else tensor
        if isinstance(data, Tensor):
            torch.autograd.graph.increment_version(data)
    return loaded


def _check_target(name: str, tensor: FlatSlice | Tensor, document: Document, convert: bool) -> None:
    entry = document.tensors.get(name)
    if entry is None:
        names = [stored for stored in document.tensors if not stored.startswith("$")]
        near = difflib.get_close_matches(name, names, 1)
        raise CheckpointError(
            f"it has no tensor {name!r}; "
            + (f"the nearest of its {len(names)} names is {near[0]!r}" if near else f"it has {len(names)} others")
        )
    if tuple(tensor.shape) != entry.shape:
        raise CheckpointError(f"tensor {name!r} has shape {entry.shape} in the checkpoint and {tuple(tensor.shape)} in the model")
    if (dtype := dtype_of(tensor)) is not entry.dtype and not convert:
        raise CheckpointError(
            f"tensor {name!r} is {entry.dtype} in the checkpoint and {dtype} in the model; pass convert=True to round it"
        )


def _check_complete(path: Path, document: Document, save_ids: list[str]) -> None:
    """The checks that rank 0 does for all: ranks see the same checkpoint, files have their sizes, values are well formed."""
    _check_same(save_ids)
    for name, size in document.files.items():
        os.close(open_data(path / name, size))
    stand_ins: dict[str, dict[str, Tensor]] = defaultdict(dict)  # by owner of the values, in one pass over all names
    for name, tensor in _stand_ins(document, "$", "meta").items():
        stand_ins[name.rpartition("/")[0]][name] = tensor
    _values(document.shared, stand_ins["$shared"], f"{path}: shared")
    for rank, skeleton in enumerate(document.per_rank):
        _values(skeleton, stand_ins[f"$rank/{rank}"], f"{path}: per_rank[{rank}]")


def _verify_records(ranks: Ranks, step: str, files: BoxReader, names: Iterable[str]) -> None:
    """Verify each zip record of DeepSpeed's files that any rank needs on one rank, because a checksum covers a whole record."""
    if files.document.world_size:  # our format has a checksum per block; the reader verifies those that it reads
        return
    pieces = (piece for name in names for piece in files.document.tensors[name].pieces)
    needed = {piece.zip_record for piece in pieces if piece.zip_record is not None}
    needed_by_rank = ranks.gather(step, lambda: needed)

    def divide() -> list[list[ZipRecord]]:
        shares: list[list[ZipRecord]] = [[] for _ in range(ranks.size)]
        loads = [(0, rank) for rank in range(ranks.size)]
        for record in sorted(set().union(*needed_by_rank), key=lambda each: (-each.nbytes, each)):
            nbytes, rank = heapq.heappop(loads)
            shares[rank].append(record)
            heapq.heappush(loads, (nbytes + record.nbytes, rank))
        return shares

    share = ranks.decide(step, divide)[ranks.index]

    def verify() -> None:
        for record in sorted(share, key=lambda each: (each.file, each.at)):
            files.verify_record(record)

    ranks.gather(step, verify)
    files.verified |= needed


def _read(ranks: Ranks, step: str, files: BoxReader, tensors: Mapping[str, FlatSlice | Tensor]) -> None:
    """Verify on all ranks, then fill."""

    def fill() -> None:
        for name, tensor in tensors.items():
            files.fill(name, tensor)

    ranks.gather(step, lambda: files.verify((share.name, share.box) for share in shares_of(tensors)))
    ranks.gather(step, fill)


def _stand_ins(document: Document, prefix: str, device: str) -> dict[str, Tensor]:
    """Empty tensors for the values under `prefix`. Their size is bounded by the bytes on disk (directory.py)."""
    return {
        name: torch.empty(entry.shape, dtype=entry.dtype, device=device)
        for name, entry in document.tensors.items()
        if name.startswith(prefix)
    }


def _values(skeleton: Any, tensors: Mapping[str, Tensor], path: str) -> dict[str, Any]:
    values = decode(skeleton, tensors.__getitem__, path)
    if type(values) is not dict or not all(type(key) is str for key in values):
        raise CheckpointError(f"the stored value of {path} is damaged or hostile: it is not a dict with string keys")
    return values

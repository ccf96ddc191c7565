"""Load: everything is validated on every rank before the first byte of any tensor changes.

    metadata.json checked -> one checkpoint on all ranks -> names, shapes, dtypes, file sizes -> the caller accepts the
    values -> checksums of every block that is needed -> all ranks agree -> bytes read into the tensors in place

Any world size may load what any other saved: each rank reads the bytes of its own ranges. What a load refuses
is refused on every rank alike, with nothing changed (storage.py says why that costs no memory).
"""

from __future__ import annotations

import difflib
import heapq
import logging
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.checkpoint.directory import is_checkpoint, is_deepspeed, locate, read_document, read_latest, state_of
from slipstream.checkpoint.document import Document, ZipRecord
from slipstream.checkpoint.errors import CheckpointError, Ranks, describe
from slipstream.checkpoint.files import Files, open_data
from slipstream.checkpoint.flat_slice import FlatSlice, Shape
from slipstream.checkpoint.save import check_entry
from slipstream.checkpoint.values import decode

if TYPE_CHECKING:
    from slipstream.checkpoint.storage import Reader


logger = logging.getLogger(__name__)

T = TypeVar("T")

_TRIES = 5


class TensorInfo(NamedTuple):
    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """What a checkpoint holds, known without reading a tensor."""

    path: Path
    save_id: str
    world_size: int  # that saved it
    tensors: Mapping[str, TensorInfo]
    shared: dict[str, Any]  # its tensors and arrays are stand-ins on the meta device: shape and dtype only
    document: Document = field(repr=False)


class Loaded(NamedTuple):
    shared: dict[str, Any]
    per_rank: dict[str, Any] | None  # None where another number of ranks saved


def latest_tag(directory: str | os.PathLike[str], *, group: dist.ProcessGroup | None = None, universal: bool = False) -> str | None:
    """The tag that `latest` names as rank 0 of `group` sees it, or `latest_universal`, which with `universal` goes before; None
    where the directory has neither."""
    return Ranks(group).decide("no checkpoint was loaded", lambda: _latest(Path(directory), universal))


def _latest(path: Path, universal: bool) -> str | None:
    tag = read_latest(path, universal)
    if tag is None and is_checkpoint(path):
        raise CheckpointError(f"{path} is a checkpoint itself: name the folder around it, and tag={path.resolve().name!r}")
    return tag


def undisturbed(
    directory: str | os.PathLike[str], tag: str | None, work: Callable[[], T], *, group: dist.ProcessGroup | None = None
) -> T:
    """What `work` makes of checkpoint `tag` (None: of the last), called again where it fails while another process replaces that.

    Collective, as `work` is. Raises what `work` raises where nothing was replaced, and CheckpointError after _TRIES calls.
    """
    ranks, parent = Ranks(group), Path(directory)
    for _ in range(_TRIES):
        before = state_of(parent, tag) if ranks.rank == 0 else None
        try:
            return work()
        except CheckpointError as error:
            if group is not None and not error.on_all_ranks:  # the others are elsewhere
                raise
            if not ranks.first(ranks.rank == 0 and state_of(parent, tag) != before):
                raise
            logger.info("%s was replaced while it was read, and is read again", parent if tag is None else parent / tag)
            last = error
    raise CheckpointError(
        f"{last} (it was replaced each of {_TRIES} times while it was read: load it when its writer has ended)"
    ) from last


def load_metadata(directory: str | os.PathLike[str], tag: str, *, group: dist.ProcessGroup | None = None) -> Metadata:
    """What checkpoint `tag` holds, by its metadata.json. With a group, what fails on one rank fails on all.

    Each rank reads ours, which shows that all see it. DeepSpeed's are as many pickles as it had ranks: rank 0 reads them, for all.
    """
    return undisturbed(directory, tag, lambda: _load_metadata(directory, tag, group), group=group)


def _load_metadata(directory: str | os.PathLike[str], tag: str, group: dist.ProcessGroup | None) -> Metadata:
    ranks, parent = Ranks(group), Path(directory)
    found: list[Metadata] = []
    step = ranks.first(f"checkpoint {parent / str(tag)} was not loaded")
    theirs = ranks.decide(step, lambda: _theirs(locate(parent, tag)))

    def understand() -> str:
        path = locate(parent, tag)
        found.append(_metadata(path, read_document(path) if theirs is None else theirs))
        return found[0].save_id

    save_ids = ranks.gather(step, understand)
    ranks.decide(step, lambda: _check_same(save_ids))
    return found[0]


def _check_same(save_ids: list[str]) -> None:
    if len(set(save_ids)) > 1:
        other = next(rank for rank, save_id in enumerate(save_ids) if save_id != save_ids[0])
        raise CheckpointError(f"ranks 0 and {other} see different checkpoints there; was it just replaced?")


def _theirs(path: Path) -> Document | None:
    return read_document(path) if is_deepspeed(path) else None


def _metadata(path: Path, document: Document) -> Metadata:
    return Metadata(
        path=path,
        save_id=document.save_id,
        world_size=document.world_size,
        tensors={
            name: TensorInfo(entry.shape, entry.dtype) for name, entry in document.tensors.items() if not name.startswith("$")
        },
        shared=_values(document.shared, _stand_ins(document, "$shared/", "meta"), f"{path}: shared"),
        document=document,
    )


def load(
    directory: str | os.PathLike[str],
    tag: str,
    *,
    tensors: Mapping[str, FlatSlice | Tensor],
    group: dist.ProcessGroup | None = None,
    convert: bool = False,
    accept: Callable[[Loaded], None] | None = None,
    metadata: Metadata | None = None,
) -> Loaded:
    """Fill `tensors` in place from checkpoint `tag` and give its values. Every rank of `group` calls it.

    A name that is asked for must be there with its shape; what is there and not asked for is not read. Dtypes
    must be equal unless `convert`, which rounds as `Tensor.copy_` does. `accept` sees the values before any tensor is
    filled; what it raises on one rank refuses the load on all. Raises CheckpointError on every rank, with nothing changed,
    where any rank finds anything wrong. metadata: of the same checkpoint, where every rank has read it already. Without it, a
    checkpoint that another process replaces meanwhile is read again, and `accept` called again.
    """
    if metadata is not None:
        return _load(metadata, tensors, group, convert, accept)

    def work() -> Loaded:
        return _load(_load_metadata(directory, tag, group), tensors, group, convert, accept)

    return undisturbed(directory, tag, work, group=group)


def _load(
    metadata: Metadata,
    tensors: Mapping[str, FlatSlice | Tensor],
    group: dist.ProcessGroup | None,
    convert: bool,
    accept: Callable[[Loaded], None] | None,
) -> Loaded:
    ranks = Ranks(group)
    path, found = metadata.path, metadata.document
    step = ranks.first(f"checkpoint {path} was not loaded")

    def prepare() -> str:
        for name, held in tensors.items():
            check_entry(name, held)
            _check_target(name, held, found, convert)
        return found.save_id

    save_ids = ranks.gather(step, prepare)
    ranks.decide(step, lambda: _check_whole(path, found, save_ids))

    shared = _stand_ins(found, "$shared/", "cpu")
    own = _stand_ins(found, f"$rank/{ranks.rank}/", "cpu") if found.world_size == ranks.size else {}
    _verify_records(ranks, step, path, found, [*shared, *tensors])
    _read(ranks, step, path, found, {**shared, **own})
    values = _values(found.shared, shared, f"{path}: shared")
    mine = None
    if found.world_size == ranks.size:
        mine = _values(found.per_rank[ranks.rank], own, f"{path}: per_rank[{ranks.rank}]")
    loaded = Loaded(values, mine)
    if accept is not None:
        ranks.gather(step, lambda: accept(loaded))
    _read(ranks, step, path, found, dict(tensors))
    for held in tensors.values():
        data = held.data if isinstance(held, FlatSlice) else held
        if isinstance(data, Tensor):
            torch.autograd.graph.increment_version(data)
    return loaded


def reader(directory: str | os.PathLike[str], tag: str) -> Reader:
    """A reader for `torch.distributed.checkpoint.load(state, storage_reader=...)`: tensors by their names."""
    from slipstream.checkpoint.storage import Reader

    path = locate(Path(directory), tag)
    return Reader(path, read_document(path))


def _check_target(name: str, held: FlatSlice | Tensor, document: Document, convert: bool) -> None:
    entry = document.tensors.get(name)
    if entry is None:
        names = [known for known in document.tensors if not known.startswith("$")]
        near = difflib.get_close_matches(name, names, 1)
        raise CheckpointError(
            f"it has no tensor {name!r}; "
            + (f"the nearest of its {len(names)} names is {near[0]!r}" if near else f"it has {len(names)} others")
        )
    if tuple(held.shape) != entry.shape:
        raise CheckpointError(f"tensor {name!r} has shape {entry.shape} in it and {tuple(held.shape)} here")
    dtype = held.data.dtype if isinstance(held, FlatSlice) else held.dtype
    if dtype is not entry.dtype and not convert:
        raise CheckpointError(f"tensor {name!r} is {entry.dtype} in it and {dtype} here; pass convert=True to have it rounded")


def _check_whole(path: Path, document: Document, save_ids: list[str]) -> None:
    """What one rank checks for all: one and the same checkpoint, files whole, values well formed."""
    _check_same(save_ids)
    for name, size in document.files.items():
        os.close(open_data(path / name, size))
    stand_ins: dict[str, dict[str, Tensor]] = defaultdict(dict)  # by whose values they are of, in one pass over all names
    for name, tensor in _stand_ins(document, "$", "meta").items():
        stand_ins[name.rpartition("/")[0]][name] = tensor
    _values(document.shared, stand_ins["$shared"], f"{path}: shared")
    for rank, skeleton in enumerate(document.per_rank):
        _values(skeleton, stand_ins[f"$rank/{rank}"], f"{path}: per_rank[{rank}]")


def _verify_records(ranks: Ranks, step: str, path: Path, document: Document, names: Iterable[str]) -> None:
    """Each zip record of DeepSpeed's files that any rank needs, on one rank: a sum takes all of a record, a rank a part of it."""
    if document.world_size:  # ours has a checksum for each block, and verifies those that it reads
        return
    needed = {piece.zip_record for name in names for piece in document.tensors[name].pieces}
    told = ranks.gather(step, lambda: needed)

    def divide() -> list[list[ZipRecord]]:
        shares: list[list[ZipRecord]] = [[] for _ in range(ranks.size)]
        loads = [(0, rank) for rank in range(ranks.size)]
        for record in sorted((each for each in set().union(*told) if each is not None), key=lambda each: (-each.nbytes, each)):
            nbytes, rank = heapq.heappop(loads)
            shares[rank].append(record)
            heapq.heappush(loads, (nbytes + record.nbytes, rank))
        return shares

    mine = ranks.decide(step, divide)[ranks.rank]
    files = Files(path, document.files)

    def verify() -> None:
        for record in sorted(mine, key=lambda each: (each.file, each.at)):
            files.verify(record)

    try:
        ranks.gather(step, verify)
    finally:
        files.close()


def _read(ranks: Ranks, step: str, path: Path, document: Document, state: dict[str, Any]) -> None:
    """Fill the tensors of `state` through DCP; see storage.py for its two passes."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

    from slipstream.checkpoint.storage import FlatLoadPlanner, Reader

    named = {name: document.tensors[name] for name in state}  # DCP makes objects for each, wanted or not
    storage = Reader(path, replace(document, tensors=named), records_verified=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # group=None says so
            dcp_load(
                state, storage_reader=storage, planner=FlatLoadPlanner(), process_group=ranks.group, no_dist=ranks.group is None
            )
    except CheckpointException as error:
        causes = {rank: cause for rank, (cause, _) in error.failures.items()}
    else:
        return
    finally:
        storage.close()
    raise ranks.failure(step, {rank: describe(e) for rank, e in causes.items()}, causes.get(ranks.rank))


def _stand_ins(document: Document, prefix: str, device: str) -> dict[str, Tensor]:
    """Empty tensors for the values under `prefix`. Bounded: a document's bytes are inside its files, and on disk (directory.py)."""
    return {
        name: torch.empty(entry.shape, dtype=entry.dtype, device=device)
        for name, entry in document.tensors.items()
        if name.startswith(prefix)
    }


def _values(skeleton: Any, tensors: Mapping[str, Tensor], path: str) -> dict[str, Any]:
    values = decode(skeleton, tensors.__getitem__, path)
    if type(values) is not dict or not all(type(key) is str for key in values):
        raise CheckpointError(f"the stored value of {path} is damaged or hostile: it is no dict of names")
    return values

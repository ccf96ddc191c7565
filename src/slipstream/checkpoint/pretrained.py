"""A Hugging Face folder: sharded safetensors, an index, config.json. Written in place by all ranks, a few megabytes at a time.

Where every byte goes follows from names, shapes and dtypes alone (`shards`), so rank 0 makes the files with their headers, and then
each rank writes the ranges that it owns where they belong: nothing is gathered, and nobody holds more than `_STAGE` bytes beside
what it has anyway. What several ranks have is written by one of them, in turn. What is made on the way
(merged adapters) comes as a stream of whole tensors that every rank goes through, and is written likewise.

A folder that is new appears whole. In one that was there, where the draft is a folder inside (renames stay on its file system, and
nothing is asked of the folder around it), everything changes over in one rename, of the index, or of the only file:
shards that it names are put beside the old ones first, under names that those do not have, and the old ones go last. What else is
in the folder stays.

Where config.json differs, two names have to change at once: the draft, with what else is in the folder, changes places with it.
Where that cannot be (`_swap`), config.json is renamed just before, and a crash between the two leaves it with the old weights.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.checkpoint.directory import exchange, lock_folder, sweep_drafts, sync_folder, unlock, write_synced
from slipstream.checkpoint.errors import ONE_PLACE, CheckpointError, Ranks
from slipstream.checkpoint.flat_slice import FlatSlice, Shape, memory
from slipstream.checkpoint.weights import INDEX, SINGLE, WORDS

_STAGE = 1 << 24  # bytes
SHARD_NBYTES = 5_000_000_000  # a file of a folder; transformers' own


class Out(NamedTuple):
    """What is written under a name, and as which dtype. A tensor on meta is a shape: its values come in `write`'s stream."""

    held: FlatSlice | Tensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.held.shape) * self.dtype.itemsize


class Place(NamedTuple):
    """Where a tensor lies: in which file, from which byte on."""

    file: str
    at: int


def dtype_of(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """bf16, fp16 and fp32 by their names here and torch's. Raises ValueError."""
    known = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    known |= {str(each): each for each in known.values()} | {str(each).removeprefix("torch."): each for each in known.values()}
    if dtype is not None and str(dtype) not in known:
        raise ValueError(f"dtype {dtype!r}: weights are written in bf16, fp16 or fp32")
    return None if dtype is None else known[str(dtype)]


def num_bytes(size: int | str) -> int:
    """Of 5GB or 200MB, as transformers has it (powers of ten), or a number. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)B?", str(size), re.IGNORECASE)
    number = int(float(found[1]) * 1000 ** " KMGT".index(found[2].upper() or " ")) if found else 0
    if number <= 0:
        raise ValueError(f"max_shard_size {size!r} is not a size; write 5GB or 200MB")
    return number


def describe(config: Mapping[str, Any], architecture: str | None, dtype: torch.dtype) -> dict[str, str]:
    """config.json, by which transformers finds the class and the dtype."""
    named = {"dtype": str(dtype).removeprefix("torch.")} | ({} if architecture is None else {"architectures": [architecture]})
    return {"config.json": json.dumps({**config, **named}, indent=2, sort_keys=True) + "\n"}


def split(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names by file: one ends before the tensor that would bring it above `limit` bytes."""
    files: list[list[str]] = [[]]
    filled = 0
    for name, nbytes in sizes.items():
        if files[-1] and filled + nbytes > limit:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += nbytes
    return files


def numbered(stem: str, suffix: str, index: int, count: int) -> str:
    return f"{stem}.{suffix}" if count == 1 else f"{stem}-{index + 1:05d}-of-{count:05d}.{suffix}"


def index_of(files: Mapping[str, str], nbytes: int) -> str:
    """The index by which a reader finds each tensor's file."""
    return json.dumps({"metadata": {"total_size": nbytes}, "weight_map": dict(files)}, indent=2, sort_keys=True) + "\n"


def shards(
    sizes: Mapping[str, tuple[str, Shape, int]], limit: int, stem: str = "model", single: str = SINGLE
) -> tuple[dict[str, bytes], dict[str, Place]]:
    """The headers of the files that tensors of (safetensors' dtype, shape, bytes) fill, and each one's place. Pure.

    Inside a file wide dtypes come first: all are aligned.
    """
    files = split({name: nbytes for name, (_, _, nbytes) in sizes.items()}, limit)
    headers, places = {}, {}
    for i, names in enumerate(files):
        file = numbered(stem, "safetensors", i, len(files)) if len(files) > 1 else single
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name in sorted(names, key=lambda name: -_ITEMSIZES[sizes[name][0]]):
            word, shape, nbytes = sizes[name]
            header[name] = {"dtype": word, "shape": shape, "data_offsets": [at, at + nbytes]}
            places[name] = Place(file, at)
            at += nbytes
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        headers[file] = len(raw).to_bytes(8, "little") + raw
        places |= {name: Place(file, places[name].at + len(headers[file])) for name in names}
    return headers, places


def write(
    folder: str | os.PathLike[str],
    tensors: Mapping[str, Out],
    *,
    texts: Mapping[str, str | bytes],
    group: dist.ProcessGroup | None = None,
    shard_nbytes: int = SHARD_NBYTES,
    stream: Iterable[tuple[str, Tensor]] = (),
    single: str = SINGLE,
) -> None:
    """Write the folder. Collective; every rank names the same tensors. Raises the same CheckpointError on every rank.

    texts: further files and what is in them (config.json). stream: the values of tensors on meta, the same on every rank, each good
    until the next is asked for; gone through to its end also where a write fails, since making it may be collective. single: the
    file, where one is enough.
    """
    ranks, target = Ranks(group), Path(os.path.abspath(folder))
    step = ranks.first(f"{target} was not written")
    headers: dict[str, bytes] = {}
    places: dict[str, Place] = {}

    def plan() -> None:
        unknown = sorted({str(out.dtype) for out in tensors.values() if out.dtype not in WORDS})
        if unknown:
            raise CheckpointError(f"safetensors files have no {', '.join(unknown)}")
        sizes = {name: (WORDS[out.dtype], tuple(out.held.shape), out.nbytes) for name, out in tensors.items()}
        found = shards(sizes, shard_nbytes, stem, single)
        headers.update(found[0])
        places.update(found[1])

    mark = ranks.first(secrets.token_hex(8))
    stem, draft = ranks.decide(step, lambda: (_stem(target, mark), _draft(target, mark)))
    ranks.gather(step, plan)
    lock: int | None = None

    def begin() -> None:
        nonlocal lock
        draft.mkdir(parents=True)
        lock = lock_folder(draft)  # it goes with the process, and then the draft may be swept
        _begin(draft, headers, places, tensors)

    try:
        ranks.decide(step, begin)
        mine = _mine(ranks, step, tensors)
        ranks.gather(step, lambda: _fill(draft, places, tensors, mine, stream))
        ranks.decide(step, lambda: _finish(draft, target, texts, places, tensors, single))
    finally:
        if ranks.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
            unlock(lock)


def _begin(draft: Path, headers: Mapping[str, bytes], places: Mapping[str, Place], tensors: Mapping[str, Out]) -> None:
    ends = {file: len(header) for file, header in headers.items()}
    for name, place in places.items():
        ends[place.file] = max(ends[place.file], place.at + tensors[name].nbytes)
    for file, header in headers.items():
        with open(draft / file, "wb") as opened:
            opened.write(header)
            opened.truncate(ends[file])


def _mine(ranks: Ranks, step: str, tensors: Mapping[str, Out]) -> list[str]:
    """The tensors whose range this rank writes: of ranks that have the same range, one by turns. Refuses what nobody has."""
    ranges = {name: _range(out.held) for name, out in tensors.items()}
    everyone: list[dict[str, tuple[int, int]]] = [ranges] * ranks.size
    if ranks.group is not None:
        dist.all_gather_object(everyone, ranges, group=ranks.group)

    def choose() -> list[str]:
        chosen = []
        for i, (name, out) in enumerate(tensors.items()):
            have: dict[tuple[int, int], list[int]] = {}
            for rank, theirs in enumerate(everyone):
                if name not in theirs:
                    raise CheckpointError(f"rank {rank} has no {name!r}")
                have.setdefault(theirs[name], []).append(rank)
            parts = sorted(span for span in have if span[0] < span[1])
            if sum(stop - start for start, stop in parts) != math.prod(out.held.shape):
                raise CheckpointError(f"{name!r} of shape {tuple(out.held.shape)} is there as {parts} only")
            owners = have[ranges[name]]
            if owners[i % len(owners)] == ranks.rank:
                chosen.append(name)
        return chosen

    found: list[str] = []
    ranks.gather(step, lambda: found.extend(choose()))
    return found


def _range(held: FlatSlice | Tensor) -> tuple[int, int]:
    if isinstance(held, Tensor):
        return 0, held.numel()
    return (held.start, held.stop) if held.start < held.stop else (0, 0)


def _fill(
    draft: Path, places: Mapping[str, Place], tensors: Mapping[str, Out], mine: Sequence[str], stream: Iterable[tuple[str, Tensor]]
) -> None:
    handles: dict[str, int] = {}
    awaited = {name for name, out in tensors.items() if isinstance(out.held, Tensor) and out.held.is_meta}
    coming = iter(stream)

    def put(name: str, out: Out) -> None:
        place = places[name]
        if place.file not in handles:
            handles[place.file] = os.open(draft / place.file, os.O_WRONLY)
        at = place.at + _range(out.held)[0] * out.dtype.itemsize
        for part in _parts(out):
            raw = memory(part)
            while len(raw):
                done = os.pwrite(handles[place.file], raw, at)
                raw, at = raw[done:], at + done

    try:
        for name in mine:
            if name not in awaited:
                put(name, tensors[name])
        for name, value in coming:
            assert value.shape == tensors[name].held.shape, f"{name} was announced with shape {tuple(tensors[name].held.shape)}"
            awaited.remove(name)
            if name in mine:
                put(name, Out(value, tensors[name].dtype))
        assert not awaited, f"{sorted(awaited)[:3]} did not come"
        for handle in handles.values():
            os.fsync(handle)
    except FileNotFoundError as error:
        raise CheckpointError(f"cannot write {draft}: rank 0 made its files elsewhere; {ONE_PLACE}") from error
    except OSError as error:
        raise CheckpointError(f"cannot write {draft}: {error.strerror}") from error
    finally:
        for handle in handles.values():
            os.close(handle)
        for _ in coming:
            pass


def _parts(out: Out) -> Iterator[Tensor]:
    """The values in the dtype of the file, on the host, a stage at a time."""
    held = out.held.data if isinstance(out.held, FlatSlice) else out.held.detach().reshape(-1)
    step = _STAGE // max(held.dtype.itemsize, out.dtype.itemsize)
    for start in range(0, held.numel(), step):
        stop = min(start + step, held.numel())
        part = held[start:stop] if isinstance(held, Tensor) else held.get(start, stop)
        yield part.to(out.dtype).cpu().contiguous()


def _draft(target: Path, mark: str) -> Path:
    """Beside a folder that is new; inside one that is there, which may be a mount point or a link to another file system."""
    return target / f".tmp-{mark}" if target.is_dir() else target.with_name(f"{target.name}.tmp-{mark}")


def _stem(target: Path, mark: str) -> str:
    """What the names of shards begin with: none of a set that the folder has. Also removes what killed saves left."""
    sweep_drafts(target)
    taken = target.is_dir() and any(path.name.startswith("model-0") for path in target.iterdir())
    return f"model-{mark[:8]}" if taken else "model"


def _finish(
    draft: Path,
    target: Path,
    texts: Mapping[str, str | bytes],
    places: Mapping[str, Place],
    tensors: Mapping[str, Out],
    single: str,
) -> None:
    files = sorted({place.file for place in places.values()})
    new = dict(texts)
    if len(files) > 1:
        new[INDEX] = index_of({name: place.file for name, place in places.items()}, sum(out.nbytes for out in tensors.values()))
    for name, text in new.items():
        write_synced(draft / name, text.encode() if isinstance(text, str) else text)
    sync_folder(draft)
    if not target.exists():
        os.rename(draft, target)
        sync_folder(target.absolute().parent)
        return
    had_weights = single == SINGLE and ((target / INDEX).exists() or (target / SINGLE).exists())  # adapters lie beside a base
    if had_weights and not all(_is_same(draft / name, target / name) for name in texts) and _swap(draft, target, {*files, *new}):
        return
    last = INDEX if len(files) > 1 else single
    for name in (name for name in (*files, *new) if name != last and not _is_same(draft / name, target / name)):
        os.replace(draft / name, target / name)
        sync_folder(target)
    os.replace(draft / last, target / last)
    sync_folder(target)
    if last not in (SINGLE, INDEX):
        return
    for name in {SINGLE, INDEX} - {last}:  # of two, some readers prefer the one and some the other
        (target / name).unlink(missing_ok=True)
    sync_folder(target)
    for path in target.iterdir():
        if _SHARD.fullmatch(path.name) and path.name not in files:
            path.unlink()


def _swap(draft: Path, target: Path, new: Collection[str]) -> bool:
    """The draft takes the place of the folder that it is in, with the other files of that. False where it cannot: the folder has
    folders, is a link, a mount point or where this process stands, or the one around it is not to be written to."""
    others = [path for path in target.iterdir() if path != draft]
    is_plain = not target.is_symlink() and all(path.is_file() and not path.is_symlink() for path in others)
    beside = target.with_name(target.name + draft.name)
    try:
        if not is_plain or Path.cwd().is_relative_to(target.resolve()):
            return False
        for path in others:
            if path.name not in {SINGLE, INDEX, *new} and not _SHARD.fullmatch(path.name):
                os.link(path, draft / path.name)
        like = target.stat()
        if (like.st_uid, like.st_gid) != (draft.stat().st_uid, draft.stat().st_gid):
            os.chown(draft, like.st_uid, like.st_gid)
        shutil.copymode(target, draft)
        sync_folder(draft)
        os.rename(draft, beside)
    except OSError:
        return False
    try:
        exchange(beside, target)
    except OSError:
        os.rename(beside, draft)
        return False
    sync_folder(target.parent)
    shutil.rmtree(beside, ignore_errors=True)  # what was there
    return True


def _is_same(new: Path, old: Path) -> bool:
    """Of texts: one that is there already is not renamed over."""
    return new.suffix == ".json" and old.is_file() and old.read_bytes() == new.read_bytes()


_SHARD = re.compile(r"model(-[0-9a-f]{8})?(-\d{5}-of-\d{5})?\.safetensors")  # what a save may have written
_ITEMSIZES = {word: dtype.itemsize for dtype, word in WORDS.items()}

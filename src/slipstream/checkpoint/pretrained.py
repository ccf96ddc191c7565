"""Writes a Hugging Face folder: sharded safetensors, an index, config.json. All ranks write in place, a few megabytes at a time.

The position of every byte follows from names, shapes and dtypes alone (`shards`). Rank 0 creates the files with their headers,
then each rank writes its boxes (plan.py) at their offsets: nothing is gathered, and a rank needs at most `STAGE` extra bytes.
Computed tensors (merged adapters) come as a stream of whole tensors that every rank iterates, and are written in the same way.

A new folder appears atomically. For an existing folder the draft is a subfolder (renames stay on one file system, and the parent
need not be writable), and one rename, of the index or of the only file, switches to the new weights: new shards are first moved
in under names that the old ones do not have, and the old shards are deleted last. Other files in the folder stay.

If config.json changes, two names must change at once: the draft, with links to the folder's other files, is swapped with the
folder. If that is impossible (`_swap`), config.json is renamed just before the weights; a crash between the two leaves it beside
the old weights.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.checkpoint.directory import exchange, lock_folder, sweep_drafts, sync, unlock, write_synced
from slipstream.checkpoint.errors import ONE_PLACE, CheckpointError, Ranks
from slipstream.checkpoint.flat_slice import FlatSlice, Shape, memory, runs
from slipstream.checkpoint.plan import Share, own_shares
from slipstream.checkpoint.weights import WORDS
from slipstream.config.huggingface import INDEX, SINGLE

SHARD_NBYTES = 5_000_000_000  # per file; transformers' default


class Out(NamedTuple):
    """A tensor to write and its dtype in the file. A meta tensor only gives the shape: its values come from `write`'s stream."""

    held: FlatSlice | Tensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.held.shape) * self.dtype.itemsize


class TensorPlace(NamedTuple):
    """The location of a tensor: its file and its first byte."""

    file: str
    at: int


def dtype_of(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Parse bf16, fp16 and fp32, also by torch's names. Raises ValueError for any other dtype."""
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    dtypes |= {str(each): each for each in dtypes.values()} | {str(each).removeprefix("torch."): each for each in dtypes.values()}
    if dtype is not None and str(dtype) not in dtypes:
        raise ValueError(f"dtype {dtype!r}: weights are written in bf16, fp16 or fp32")
    return None if dtype is None else dtypes[str(dtype)]


def num_bytes(size: int | str) -> int:
    """Parse a size such as 5GB or 200MB (powers of ten, as in transformers) or a number. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)B?", str(size), re.IGNORECASE)
    number = int(float(match[1]) * 1000 ** " KMGT".index(match[2].upper() or " ")) if match else 0
    if number <= 0:
        raise ValueError(f"max_shard_size {size!r} is not a size; write 5GB or 200MB")
    return number


def describe(config: Mapping[str, Any], architecture: str | None, dtype: torch.dtype) -> dict[str, str]:
    """config.json, with the architecture and dtype that transformers reads from it."""
    named = {"dtype": str(dtype).removeprefix("torch.")} | ({} if architecture is None else {"architectures": [architecture]})
    return {"config.json": json.dumps({**config, **named}, indent=2, sort_keys=True) + "\n"}


def split(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names by file: a new file starts before the tensor that would exceed `limit` bytes."""
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
    """The JSON index, which maps each tensor to its file."""
    return json.dumps({"metadata": {"total_size": nbytes}, "weight_map": dict(files)}, indent=2, sort_keys=True) + "\n"


def shards(
    sizes: Mapping[str, tuple[str, Shape, int]], limit: int, stem: str = "model", single: str = SINGLE
) -> tuple[dict[str, bytes], dict[str, TensorPlace]]:
    """The headers of the files for tensors of (safetensors' dtype, shape, bytes), and each tensor's location. Pure.

    Inside a file wide dtypes come first, so that all tensors are aligned.
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
            places[name] = TensorPlace(file, at)
            at += nbytes
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        headers[file] = len(raw).to_bytes(8, "little") + raw
        places |= {name: TensorPlace(file, places[name].at + len(headers[file])) for name in names}
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
    """Write the folder. Collective; every rank passes the same names. Raises the same CheckpointError on every rank.

    texts: further files with their content (config.json). stream: the values of meta tensors, the same on every rank, each valid
    until the next one is requested; it is iterated to its end even if a write fails, because producing it may be collective.
    single: the name of the file if one is enough.
    """
    ranks, target = Ranks(group), Path(os.path.abspath(folder))
    step = ranks.first(f"{target} was not written")

    def plan() -> tuple[dict[str, bytes], dict[str, TensorPlace]]:
        unknown = sorted({str(out.dtype) for out in tensors.values() if out.dtype not in WORDS})
        if unknown:
            raise CheckpointError(f"safetensors files have no {', '.join(unknown)}")
        sizes = {name: (WORDS[out.dtype], tuple(out.held.shape), out.nbytes) for name, out in tensors.items()}
        return shards(sizes, shard_nbytes, stem, single)

    mark = ranks.first(secrets.token_hex(8))
    stem, draft = ranks.decide(step, lambda: (_stem(target, mark), _draft(target, mark)))
    headers, places = ranks.decide(step, plan)
    shares = own_shares(ranks, step, {name: out.held for name, out in tensors.items()})
    lock: int | None = None

    def begin() -> None:
        nonlocal lock
        draft.mkdir(parents=True)
        lock = lock_folder(draft)  # the lock ends with the process; then the draft may be swept
        _begin(draft, headers, places, tensors)

    try:
        ranks.decide(step, begin)
        ranks.gather(step, lambda: _fill(draft, places, tensors, shares, stream))
        ranks.decide(step, lambda: _finish(draft, target, texts, places, tensors, single))
    finally:
        if ranks.index == 0:
            shutil.rmtree(draft, ignore_errors=True)
            unlock(lock)


def _begin(draft: Path, headers: Mapping[str, bytes], places: Mapping[str, TensorPlace], tensors: Mapping[str, Out]) -> None:
    ends = {file: len(header) for file, header in headers.items()}
    for name, place in places.items():
        ends[place.file] = max(ends[place.file], place.at + tensors[name].nbytes)
    for file, header in headers.items():
        with open(draft / file, "wb") as opened:
            opened.write(header)
            opened.truncate(ends[file])


def _fill(
    draft: Path,
    places: Mapping[str, TensorPlace],
    tensors: Mapping[str, Out],
    shares: Sequence[Share],
    stream: Iterable[tuple[str, Tensor]],
) -> None:
    """Write this rank's shares; the values of meta tensors come from `stream`."""
    handles: dict[str, int] = {}
    awaited = {name for name, out in tensors.items() if isinstance(out.held, Tensor) and out.held.is_meta}
    streamed = {share.name: share for share in shares if share.name in awaited}
    values = iter(stream)

    def put(share: Share) -> None:
        (file, at), dtype = places[share.name], tensors[share.name].dtype
        if file not in handles:
            handles[file] = os.open(draft / file, os.O_WRONLY)
        position = 0
        for stage in share.stages(dtype):
            raw = memory(stage)
            for first, numel in runs(share.shape, share.box, position, position + stage.numel()):
                _pwrite(handles[file], raw[: numel * dtype.itemsize], at + first * dtype.itemsize)
                raw = raw[numel * dtype.itemsize :]
            position += stage.numel()

    try:
        for share in shares:
            if share.name not in awaited:
                put(share)
        for name, value in values:
            assert value.shape == tensors[name].held.shape, f"{name} was announced with shape {tuple(tensors[name].held.shape)}"
            awaited.remove(name)
            if name in streamed:
                put(streamed[name]._replace(values=value))
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
        for _ in values:
            pass


def _pwrite(handle: int, raw: memoryview, at: int) -> None:
    while len(raw):
        written = os.pwrite(handle, raw, at)
        raw, at = raw[written:], at + written


def _draft(target: Path, mark: str) -> Path:
    """The draft's folder: beside a new folder, but inside an existing one, which may be a mount point or a link."""
    return target / f".tmp-{mark}" if target.is_dir() else target.with_name(f"{target.name}.tmp-{mark}")


def _stem(target: Path, mark: str) -> str:
    """The prefix of the shards' names, different from those in the folder. Also removes the drafts of killed saves."""
    sweep_drafts(target)
    has_shards = target.is_dir() and any(path.name.startswith("model-0") for path in target.iterdir())
    return f"model-{mark[:8]}" if has_shards else "model"


def _finish(
    draft: Path,
    target: Path,
    texts: Mapping[str, str | bytes],
    places: Mapping[str, TensorPlace],
    tensors: Mapping[str, Out],
    single: str,
) -> None:
    files = sorted({place.file for place in places.values()})
    new = dict(texts)
    if len(files) > 1:
        new[INDEX] = index_of({name: place.file for name, place in places.items()}, sum(out.nbytes for out in tensors.values()))
    for name, text in new.items():
        write_synced(draft / name, text.encode() if isinstance(text, str) else text)
    sync(draft)
    if not target.exists():
        os.rename(draft, target)
        sync(target.absolute().parent)
        return
    had_weights = single == SINGLE and ((target / INDEX).exists() or (target / SINGLE).exists())  # adapters may be beside a base
    if had_weights and not all(_is_same(draft / name, target / name) for name in texts) and _swap(draft, target, {*files, *new}):
        return
    _move(draft, target, [*files, *new], INDEX if len(files) > 1 else single)


def _move(draft: Path, target: Path, names: Collection[str], last: str) -> None:
    """Move the draft's files into the folder, the one that names all others last; then remove files of earlier saves."""
    for name in (name for name in names if name != last and not _is_same(draft / name, target / name)):
        os.replace(draft / name, target / name)
        sync(target)
    os.replace(draft / last, target / last)
    sync(target)
    if last not in (SINGLE, INDEX):
        return
    for name in {SINGLE, INDEX} - {last}:  # readers differ in which of both they prefer
        (target / name).unlink(missing_ok=True)
    sync(target)
    for path in target.iterdir():
        if _SHARD.fullmatch(path.name) and path.name not in names:
            path.unlink()


def _swap(draft: Path, target: Path, new: Collection[str]) -> bool:
    """Swap the draft with the folder that contains it, after linking the folder's other files into it.

    Returns False if that is impossible: the folder has subfolders, is a link, a mount point or the current directory, or its
    parent is not writable.
    """
    others = [path for path in target.iterdir() if path != draft]
    is_plain = not target.is_symlink() and all(path.is_file() and not path.is_symlink() for path in others)
    sibling = target.with_name(target.name + draft.name)
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
        sync(draft)
        os.rename(draft, sibling)
    except OSError:
        return False
    try:
        exchange(sibling, target)
    except OSError:
        os.rename(sibling, draft)
        return False
    sync(target.parent)
    shutil.rmtree(sibling, ignore_errors=True)  # the old folder
    return True


def _is_same(new: Path, old: Path) -> bool:
    """Whether a JSON file has the same content as the existing one, and need not be renamed."""
    return new.suffix == ".json" and old.is_file() and old.read_bytes() == new.read_bytes()


_SHARD = re.compile(r"model(-[0-9a-f]{8})?(-\d{5}-of-\d{5})?\.safetensors")  # files that a save may have written
_ITEMSIZES = {word: dtype.itemsize for dtype, word in WORDS.items()}

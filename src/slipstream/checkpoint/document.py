"""metadata.json: what a checkpoint holds and where; checked completely before anything in it is believed.

The file is JSON in two parts. The first line says what it is and carries a checksum of the rest, so that a
foreign, newer, edited or damaged file is told apart before its content is parsed; no pickle is ever read.
The content names

- `files`: each data file and its size. Names follow one pattern, so no path can lead out of the folder;
- `tensors`: dtype, shape and *pieces*; a piece is a box of the tensor and the bytes that hold it,
  row-major, at an offset in one file, with a CRC-32 of every `block` bytes of it (the last block may be
  short);
- `shared` and `per_rank`: skeletons of `values.encode`. Their tensors are entries whose names begin with "$".

Invariants that `parse` enforces, whatever the file says: pieces cover each tensor exactly once; byte ranges
lie inside their files and never overlap (so what can be allocated is bounded by what is on disk); every
number is an int in range. Sizes of the real files and checksums are checked where the bytes are read
(storage.py).
"""

from __future__ import annotations

import gc
import json
import math
import re
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from slipstream.checkpoint.errors import CheckpointError
from slipstream.checkpoint.flat_slice import Box, Shape, check_cover

METADATA = "metadata.json"
FORMAT = "slipstream-checkpoint"
VERSION = 1
BLOCK = 1 << 20  # bytes per checksum: small beside a piece, large beside a system call; both stay in the cache
SLACK = 1 << 24  # bytes that a checkpoint's values may take whatever its files have
SIZE_LIMIT = 1 << 29  # bytes of metadata; some 3 million pieces
_SHARE = 4  # bytes of metadata for each byte of data, beyond SLACK: a piece is described in 150 bytes and takes 64 or more
_DIM_LIMIT = 1 << 48

_HEADER = re.compile(rb'\{"format": "([^"\n]{1,80})", "version": (\d{1,9}), "crc32": (\d{1,10}), "content":\n')
_FILE_NAME = re.compile(r"rank_\d{5,9}\.bin")

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "bfloat16", "float16", "complex128", "complex64", "bool"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
}


def file_name(rank: int) -> str:
    return f"rank_{rank:05d}.bin"


class ZipRecord(NamedTuple):
    """Bytes of a file that have one checksum together: a record of one of `torch.save`'s archives."""

    file: str
    name: str  # in the archive
    at: int
    nbytes: int
    crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of a tensor and the bytes that hold it."""

    box: Box
    file: str
    at: int  # byte offset in the file
    crc32: tuple[int, ...]  # of each BLOCK bytes; none in DeepSpeed's files and Hugging Face's
    zip_record: ZipRecord | None = None  # in DeepSpeed's: what it lies in


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of a checkpoint."""

    dtype: torch.dtype
    shape: Shape
    pieces: tuple[Piece, ...]

    def nbytes(self, piece: Piece) -> int:
        return math.prod(piece.box.sizes) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """The content of metadata.json."""

    save_id: str  # of one call of save: tells a folder from its replacement
    world_size: int
    block: int
    files: Mapping[str, int]  # name -> bytes
    tensors: Mapping[str, Entry]
    shared: Any
    per_rank: list[Any]


def render(document: Document) -> bytes:
    content = {
        "save_id": document.save_id,
        "world_size": document.world_size,
        "byteorder": sys.byteorder,
        "block": document.block,
        "files": dict(document.files),
        "tensors": {
            name: {
                "dtype": str(entry.dtype).removeprefix("torch."),
                "shape": entry.shape,
                "pieces": [
                    {
                        "offsets": piece.box.offsets,
                        "sizes": piece.box.sizes,
                        "file": piece.file,
                        "at": piece.at,
                        "crc32": piece.crc32,
                    }
                    for piece in entry.pieces
                ],
            }
            for name, entry in document.tensors.items()
        },
        "shared": document.shared,
        "per_rank": document.per_rank,
    }
    body = json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")
    head = f'{{"format": "{FORMAT}", "version": {VERSION}, "crc32": {zlib.crc32(body)}, "content":\n'
    whole = head.encode("ascii") + body + b"\n}\n"
    nbytes = sum(document.files.values())
    if len(whole) > size_limit(nbytes):
        raise CheckpointError(
            f"the metadata would take {len(whole):,} bytes; beside {nbytes:,} bytes of tensors at most {size_limit(nbytes):,} are "
            f"read: keep long lists of numbers in tensors"
        )
    return whole


def size_limit(data_nbytes: int) -> int:
    """Bytes of metadata that are read beside so many of data: what is parsed takes ten times its bytes in memory."""
    return min(SIZE_LIMIT, SLACK + _SHARE * data_nbytes)


def is_ours(head: bytes) -> bool:
    """Whether a file that begins with `head` (200 bytes of it or more) claims to be our metadata."""
    found = _HEADER.match(head)
    return found is not None and found[1] == FORMAT.encode()


def parse(raw: bytes) -> Document:
    """The document, or CheckpointError saying what is wrong with it."""
    found = _HEADER.match(raw)
    if found is None or found[1] != FORMAT.encode():
        raise CheckpointError(f"not the metadata of a Slipstream checkpoint (it begins with {raw[:24]!r})")
    if int(found[2]) != VERSION:
        raise CheckpointError(f"format version {int(found[2])}; this one reads version {VERSION}, use the one that wrote it")
    body = raw[found.end() :].removesuffix(b"\n}\n")
    if zlib.crc32(body) != int(found[3]):
        raise CheckpointError("truncated, damaged or edited (its checksum does not match)")
    try:
        with _no_collection():
            return _content(json.loads(body, object_pairs_hook=_unique, parse_constant=_no_constant))
    except CheckpointError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"damaged or hostile: {type(error).__name__}: {error}") from error


@contextmanager
def _no_collection() -> Iterator[None]:
    """Millions of new objects, no cycle among them: the collector would look at all, again and again, for half of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _content(content: dict[str, Any]) -> Document:
    if content["byteorder"] != sys.byteorder:
        raise CheckpointError(f"written on a {content['byteorder']}-endian machine; this one is {sys.byteorder}-endian")
    files = {}
    for name, size in content["files"].items():
        if not _FILE_NAME.fullmatch(name):
            raise CheckpointError(f"a data file named {name!r}; the names are {file_name(0)}, {file_name(1)}, ...")
        files[name] = _whole(size, f"the size of {name}")
    block = _whole(content["block"], "block", low=1 << 12, high=1 << 30)
    tensors = {name: _entry(name, raw, files, block) for name, raw in content["tensors"].items()}
    _check_bytes_disjoint(tensors)
    world_size = _whole(content["world_size"], "world_size", low=1)
    per_rank = content["per_rank"]
    if not isinstance(per_rank, list) or len(per_rank) != world_size:
        raise CheckpointError(f"values of {len(per_rank)} ranks for a world of {world_size}")
    if type(content["save_id"]) is not str:
        raise CheckpointError(f"save_id {content['save_id']!r}")
    return Document(
        save_id=content["save_id"],
        world_size=world_size,
        block=block,
        files=files,
        tensors=tensors,
        shared=content["shared"],
        per_rank=per_rank,
    )


def _entry(name: str, raw: dict[str, Any], files: Mapping[str, int], block: int) -> Entry:
    if raw["dtype"] not in DTYPES:
        raise CheckpointError(f"tensor {name!r}: dtype {raw['dtype']!r}")
    dtype, shape = DTYPES[raw["dtype"]], _shape(raw["shape"], name)
    pieces = []
    for part in raw["pieces"]:
        piece = Piece(
            box=Box(_shape(part["offsets"], name), _shape(part["sizes"], name)),
            file=part["file"],
            at=_whole(part["at"], f"tensor {name!r}: an offset"),
            crc32=tuple(_whole(crc, f"tensor {name!r}: a checksum", high=(1 << 32) - 1) for crc in part["crc32"]),
        )
        nbytes = math.prod(piece.box.sizes) * dtype.itemsize
        if piece.file not in files:
            raise CheckpointError(f"tensor {name!r}: bytes in {piece.file!r}, which is not a file of this checkpoint")
        if piece.at + nbytes > files[piece.file]:
            raise CheckpointError(
                f"tensor {name!r}: bytes [{piece.at}, {piece.at + nbytes}) of {piece.file}, which has {files[piece.file]}"
            )
        if len(piece.crc32) != -(-nbytes // block):
            raise CheckpointError(f"tensor {name!r}: {len(piece.crc32)} checksums for {nbytes} bytes")
        pieces.append(piece)
    check_cover(name, shape, [piece.box for piece in pieces])
    return Entry(dtype=dtype, shape=shape, pieces=tuple(pieces))


def _check_bytes_disjoint(tensors: Mapping[str, Entry]) -> None:
    spans = sorted(
        (piece.file, piece.at, piece.at + entry.nbytes(piece), name)
        for name, entry in tensors.items()
        for piece in entry.pieces
        if entry.nbytes(piece)
    )
    for (file, _, stop, one), (next_file, start, _, other) in pairwise(spans):
        if file == next_file and start < stop:
            raise CheckpointError(f"tensors {one!r} and {other!r} lie in the same bytes of {file}")


def _shape(raw: Any, name: str) -> Shape:
    if not isinstance(raw, list) or len(raw) > 64:
        raise CheckpointError(f"tensor {name!r}: {str(raw)[:80]} where a shape belongs")
    shape = tuple(_whole(size, f"tensor {name!r}: a size") for size in raw)
    if math.prod(max(size, 1) for size in shape) >= 1 << 62:
        raise CheckpointError(f"tensor {name!r}: a shape of {shape}")
    return shape


def _whole(value: Any, what: str, *, low: int = 0, high: int = _DIM_LIMIT) -> int:
    if type(value) is not int or not low <= value <= high:
        raise CheckpointError(f"{what} is {str(value)[:40]}; it must be a whole number from {low} to {high}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise CheckpointError("a name occurs twice in one object")
    return made


def _no_constant(name: str) -> Any:
    raise CheckpointError(f"the number {name}")

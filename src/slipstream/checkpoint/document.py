"""metadata.json: the index of a checkpoint, validated completely before any of it is used.

The file is JSON in two parts. The first line holds format, version and a checksum of the second part, so a foreign, newer, edited
or damaged file is detected before its content is parsed. No pickle is read. The content has

- `files`: each data file and its size. Names match one pattern, so that no path points outside the folder;
- `tensors`: dtype, shape and *pieces*; a piece is a box of the tensor and its bytes: row-major, at an offset in one file, with a
  CRC-32 of every `block` bytes (the last block may be short);
- `shared` and `per_rank`: skeletons of `values.encode`. Their tensors are entries whose names begin with "$".

Invariants that `parse` enforces on any input: pieces cover each tensor exactly once; byte ranges are inside their files and never
overlap, so the bytes on disk bound allocations; every number is an int in range. box_reader.py checks the sizes of the real
files and the checksums when it reads the bytes.
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
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from slipstream.checkpoint.errors import CheckpointError
from slipstream.checkpoint.flat_slice import Box, Shape, check_cover

METADATA = "metadata.json"
FORMAT = "slipstream-checkpoint"
VERSION = 2  # version 1 had no mesh: all ranks were on one axis
BLOCK = 1 << 20  # bytes per checksum: small compared with a piece, large enough for a system call; fits the cache
SLACK = 1 << 24  # bytes that a checkpoint's values may have regardless of the size of its files
SIZE_LIMIT = 1 << 29  # bytes of metadata; some 3 million pieces
_SHARE = 4  # bytes of metadata per byte of data, beyond SLACK: a piece has 150 bytes of metadata and at least 64 of data
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
    """Bytes of a file with one common checksum: a record of a `torch.save` archive."""

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
    crc32: tuple[int, ...]  # one per BLOCK bytes; none in files of DeepSpeed and Hugging Face
    zip_record: ZipRecord | None = None  # in DeepSpeed's files: the record that contains it


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    dtype: torch.dtype
    shape: Shape
    pieces: tuple[Piece, ...]

    def nbytes(self, piece: Piece) -> int:
        return piece.box.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """The content of metadata.json. For files of other programs, which have no metadata.json, `mesh` is empty.

    mesh: the axes of the run that saved, outermost first, and their sizes. `per_rank` has one entry per coordinate, row-major.
    """

    save_id: str = ""  # unique per call of save: distinguishes a folder from its replacement
    mesh: Mapping[str, int] = field(default_factory=dict)
    block: int = BLOCK
    files: Mapping[str, int]  # name -> bytes
    tensors: Mapping[str, Entry]
    shared: Any = None
    per_rank: list[Any] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        """The number of ranks that saved; 0 for files of other programs."""
        return math.prod(self.mesh.values()) if self.mesh else 0


class Counterpart(NamedTuple):
    """The rank of the saving run whose values a rank of another mesh continues."""

    rank: int
    copy: int  # 0 for the first rank that continues it, 1 for the next one along the batch or the sequence, ...


def counterpart(saved: Mapping[str, int], current: Mapping[str, int], rank: int) -> Counterpart:
    """The rank at the same place on the axes "batch" and "sp". On other axes, the same index if it exists, else 0."""
    place: dict[str, int] = {}
    for axis, size in reversed(list(current.items())):
        place[axis], rank = rank % size, rank // size
    result = 0
    for axis, size in saved.items():
        index = place.get(axis, 0)
        result = result * size + (index % size if axis in ("batch", "sp") or index < size else 0)
    copy = 0
    for axis in ("batch", "sp"):
        count = saved.get(axis, 1)
        copy = copy * -(-current.get(axis, 1) // count) + place.get(axis, 0) // count
    return Counterpart(result, copy)


def one_axis(size: int) -> dict[str, int]:
    """The mesh of ranks that split a batch and share everything else."""
    return {"batch": size}


def render(document: Document) -> bytes:
    content = {
        "save_id": document.save_id,
        "mesh": dict(document.mesh),
        "byteorder": sys.byteorder,
        "block": document.block,
        "files": dict(document.files),
        "tensors": {
            name: {
                "dtype": str(entry.dtype).removeprefix("torch."),
                "shape": entry.shape,
                "pieces": [
                    {**piece.box._asdict(), "file": piece.file, "at": piece.at, "crc32": piece.crc32} for piece in entry.pieces
                ],
            }
            for name, entry in document.tensors.items()
        },
        "shared": document.shared,
        "per_rank": document.per_rank,
    }
    body = json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")
    head = f'{{"format": "{FORMAT}", "version": {VERSION}, "crc32": {zlib.crc32(body)}, "content":\n'
    raw = head.encode("ascii") + body + b"\n}\n"
    nbytes = sum(document.files.values())
    if len(raw) > size_limit(nbytes):
        raise CheckpointError(
            f"the metadata has {len(raw):,} bytes; for {nbytes:,} bytes of tensors the limit is {size_limit(nbytes):,}: keep long "
            f"lists of numbers in tensors"
        )
    return raw


def size_limit(data_nbytes: int) -> int:
    """The largest metadata, in bytes, that is read for `data_nbytes` of data: parsing it uses ten times its size in memory."""
    return min(SIZE_LIMIT, SLACK + _SHARE * data_nbytes)


def is_ours(head: bytes) -> bool:
    """Whether a file that begins with `head` (at least its first 200 bytes) has the header of our metadata."""
    header = _HEADER.match(head)
    return header is not None and header[1] == FORMAT.encode()


def parse(raw: bytes) -> Document:
    """Parse and validate metadata.json. Raises CheckpointError."""
    header = _HEADER.match(raw)
    if header is None or header[1] != FORMAT.encode():
        raise CheckpointError(f"not the metadata of a Slipstream checkpoint (it begins with {raw[:24]!r})")
    if not 1 <= int(header[2]) <= VERSION:
        raise CheckpointError(f"format version {int(header[2])}; this one reads versions 1 to {VERSION}, use the one that wrote it")
    body = raw[header.end() :].removesuffix(b"\n}\n")
    if zlib.crc32(body) != int(header[3]):
        raise CheckpointError("truncated, damaged or edited (its checksum does not match)")
    try:
        with _no_collection():
            return _content(json.loads(body, object_pairs_hook=_unique, parse_constant=_no_constant), int(header[2]))
    except CheckpointError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"damaged or hostile: {type(error).__name__}: {error}") from error


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable the garbage collector, which would scan millions of new objects, all without cycles: half of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _content(content: dict[str, Any], version: int) -> Document:
    if content["byteorder"] != sys.byteorder:
        raise CheckpointError(f"written on a {content['byteorder']}-endian machine; this one is {sys.byteorder}-endian")
    files = {}
    for name, size in content["files"].items():
        if not _FILE_NAME.fullmatch(name):
            raise CheckpointError(f"a data file named {name!r}; the names are {file_name(0)}, {file_name(1)}, ...")
        files[name] = _int_in_range(size, f"the size of {name}")
    block = _int_in_range(content["block"], "block", low=1 << 12, high=1 << 30)
    tensors = {name: _entry(name, raw, files, block) for name, raw in content["tensors"].items()}
    _check_bytes_disjoint(tensors)
    mesh = one_axis(content["world_size"]) if version == 1 else content["mesh"]
    if not isinstance(mesh, dict) or not mesh:
        raise CheckpointError(f"mesh {str(mesh)[:40]}; it must name at least one axis")
    mesh = {axis: _int_in_range(size, f"the size of axis {axis}", low=1) for axis, size in mesh.items()}
    per_rank = content["per_rank"]
    if not isinstance(per_rank, list) or len(per_rank) != math.prod(mesh.values()):
        raise CheckpointError(f"values of {len(per_rank)} ranks for a mesh of {mesh}")
    if type(content["save_id"]) is not str:
        raise CheckpointError(f"save_id {content['save_id']!r}")
    return Document(
        save_id=content["save_id"],
        mesh=mesh,
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
            at=_int_in_range(part["at"], f"tensor {name!r}: an offset"),
            crc32=tuple(_int_in_range(crc, f"tensor {name!r}: a checksum", high=(1 << 32) - 1) for crc in part["crc32"]),
        )
        nbytes = piece.box.numel * dtype.itemsize
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
    for (file, _, stop, name), (next_file, start, _, next_name) in pairwise(spans):
        if file == next_file and start < stop:
            raise CheckpointError(f"tensors {name!r} and {next_name!r} lie in the same bytes of {file}")


def _shape(raw: Any, name: str) -> Shape:
    if not isinstance(raw, list) or len(raw) > 64:
        raise CheckpointError(f"tensor {name!r}: {str(raw)[:80]} where a shape belongs")
    shape = tuple(_int_in_range(size, f"tensor {name!r}: a size") for size in raw)
    if math.prod(max(size, 1) for size in shape) >= 1 << 62:
        raise CheckpointError(f"tensor {name!r}: a shape of {shape}")
    return shape


def _int_in_range(value: Any, what: str, *, low: int = 0, high: int = _DIM_LIMIT) -> int:
    if type(value) is not int or not low <= value <= high:
        raise CheckpointError(f"{what} is {str(value)[:40]}; it must be a whole number from {low} to {high}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) != len(pairs):
        raise CheckpointError("a name occurs twice in one object")
    return names


def _no_constant(name: str) -> Any:
    raise CheckpointError(f"the number {name}")

"""Reads `torch.save` files without executing anything: the structure, and the location of each tensor's bytes.

Such a file is a zip archive without compression: `data.pkl`, a pickle, and one record of raw bytes for each storage. A pickle can
call anything that it names, so the unpickler here has an allowlist, and its own stand-in for each name:

Stored   a tensor: the location of its bytes, not the bytes
Record   an object of one of DeepSpeed's classes (or an `argparse.Namespace`): its attributes, none of its code

Any other name raises CheckpointError with that name. The stand-ins are created anew for each file, because attributes that a
pickle sets on them would otherwise persist.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import pickletools
import struct
import sys
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import torch

from slipstream.checkpoint.document import DTYPES, ZipRecord
from slipstream.checkpoint.errors import CheckpointError
from slipstream.checkpoint.flat_slice import Shape

logger = logging.getLogger(__name__)

_LIMIT = 1 << 28  # bytes of a pickle; a model with a hundred thousand parameters has 30 million
_DEPTH = 1000  # nesting levels of a value
_EMPTY = 10_000  # tensors without bytes of their own in the file: empty records, or views of the same bytes
_BYTES = 64  # bytes in the file per tensor beyond _EMPTY; torch aligns records to 64 bytes
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # of a zip record: signature, lengths of name and extra field
_STORAGES = {
    f"{name}Storage": dtype
    for dtypes in (
        {"Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16, "Bool": torch.bool},
        {"Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8},
        {"Untyped": torch.uint8},
    )
    for name, dtype in dtypes.items()
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor in a file: `shape` elements of `dtype` from byte `at`, contiguous (otherwise `at` is -1)."""

    path: Path
    at: int
    dtype: torch.dtype
    shape: Shape
    record: ZipRecord | None  # the record that contains it, for its checksum; None in a file without checksums

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Record:
    """An object in a pickle: its constructor arguments and its attributes."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def get(self, name: str, default: Any = None) -> Any:
        return self.__dict__.get(name, default)


def read(path: Path) -> Any:
    """The content of a `torch.save` file, with a `Stored` for every tensor. Raises CheckpointError for any other file."""
    try:
        if not path.is_file():  # opening a pipe would wait
            raise CheckpointError("it is not a regular file" if path.exists() else "it is missing")
        with open(path, "rb") as file:
            return _read(path, file)
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{path} is truncated, damaged, or of a torch older than 1.6: {error}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # a malformed pickle can raise anything
        raise CheckpointError(f"{path} is damaged or hostile: {type(error).__name__}: {error}") from error


def _read(path: Path, file: IO[bytes]) -> Any:
    with zipfile.ZipFile(file) as opened:
        records = {record.filename.partition("/")[2]: record for record in opened.infolist()}
    if "data.pkl" not in records:
        raise CheckpointError("it is no file of torch.save")
    if any(record.compress_type != zipfile.ZIP_STORED for record in records.values()):
        raise CheckpointError("it has compressed records, which torch does not write")
    if (empty := sum(record.file_size == 0 for record in records.values())) > _EMPTY:
        raise CheckpointError(f"damaged or hostile: {empty:,} of its records are empty; at most {_EMPTY:,} are read")
    if records["data.pkl"].file_size > _LIMIT:
        raise CheckpointError(f"its pickle has {records['data.pkl'].file_size} bytes; at most {_LIMIT} are read")
    archive = _Archive(path, file, records)
    if not archive.has_checksums:
        logger.warning("%s was saved without checksums (torch.serialization.set_crc32_options): damage cannot be detected", path)
    if "byteorder" in records and archive.read("byteorder") != sys.byteorder.encode():
        raise CheckpointError(f"written on a machine of another byte order; this one is {sys.byteorder}-endian")
    raw = archive.read("data.pkl")
    _check_size(raw, most_tensors=_EMPTY + (archive.nbytes - len(raw)) // _BYTES)
    return _Unpickler(raw, archive).load()


class _Archive:
    """The records of an open file: the location of their bytes, and the bytes of small ones."""

    def __init__(self, path: Path, file: IO[bytes], records: dict[str, zipfile.ZipInfo]) -> None:
        self.path, self._file, self._records = path, file, records
        self.nbytes = os.fstat(file.fileno()).st_size
        self.has_checksums = any(record.CRC for record in records.values())  # torch writes 0 for all if checksums are disabled

    def place(self, name: str) -> ZipRecord:
        """Locate a record. Raises CheckpointError if it is not inside the file."""
        record = self._records[name]
        self._file.seek(record.header_offset)
        signature, name_nbytes, extra_nbytes = _LOCAL_HEADER.unpack(self._file.read(_LOCAL_HEADER.size))
        at = record.header_offset + _LOCAL_HEADER.size + name_nbytes + extra_nbytes
        if signature != b"PK\3\4" or at + record.file_size > self.nbytes:
            raise CheckpointError(f"its zip record {record.filename!r} lies outside the file")
        return ZipRecord(str(self.path), record.filename, at, record.file_size, record.CRC)

    def read(self, name: str) -> bytes:
        place = self.place(name)
        self._file.seek(place.at)
        raw = self._file.read(place.nbytes)
        if self.has_checksums and zlib.crc32(raw) != place.crc32:
            raise CheckpointError(f"it is damaged: the checksum of its zip record {place.name!r} does not match")
        return raw


# Opcodes that modify a container, which stays on the stack
_GROWS = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"}


def _check_size(raw: bytes, most_tensors: int) -> None:
    """Refuse a small pickle that would create a huge value, without creating it.

    A value can be referenced many times: a list of two equal lists of two ..., nested thirty times, takes a few hundred bytes, and
    printing, hashing, comparing or walking it takes 2**30 steps. So this walks the opcodes and gives each value a size, counting
    everything below it once per reference; a value inside another one must not grow any more. Deep nesting would overflow the
    stack when it is hashed. A huge memo index would make Python allocate a memo of that size. Tensors that are views of the same
    bytes need no bytes of their own in the file but an object each here: at most `most_tensors` are allowed.
    """
    stack: list[_Value | None] = []  # None: a mark
    memo: dict[int, _Value] = {}
    num_tensors = 0
    for count, (opcode, argument, _) in enumerate(pickletools.genops(raw)):
        name = opcode.name
        num_tensors += name == "BINPERSID"  # torch refers to a tensor's storage by it, each time
        if num_tensors > most_tensors:
            raise CheckpointError(f"damaged or hostile: it has more than {most_tensors:,} tensors, and too few bytes for them")
        if _moves(name, argument, count, stack, memo):
            continue
        popped = _popped(stack, opcode)
        size = 1 + sum(value.size for value in popped) + (len(argument) if isinstance(argument, str | bytes) else 0)
        depth = 1 + max((value.depth for value in (popped[:-1] if name in _GROWS else popped)), default=0)
        if size > _LIMIT or depth > _DEPTH:
            raise CheckpointError(
                f"damaged or hostile: its pickle of {len(raw)} bytes makes a value of more than {_LIMIT}, or {_DEPTH} levels"
            )
        if name == "DUP":
            raise CheckpointError("damaged or hostile: its pickle duplicates what is on its stack, which none of torch's does")
        if name in _GROWS:
            grown = popped.pop()
            if grown.used:
                raise CheckpointError("damaged or hostile: its pickle changes a value that is inside another already")
            grown.size = size
            grown.depth = max(grown.depth, depth)
            stack.append(grown)
        else:
            stack += [_Value(size, depth) for _ in opcode.stack_after]
        for value in popped:
            value.used = True


def _moves(name: str, argument: Any, count: int, stack: list[_Value | None], memo: dict[int, _Value]) -> bool:
    """Follow an opcode of the memo or a mark, which makes no value. Returns whether the opcode is one of these."""
    if "PUT" in name or name == "MEMOIZE":
        number = len(memo) if name == "MEMOIZE" else int(argument or 0)
        if number > count:
            raise CheckpointError(f"damaged or hostile: its pickle stores value {count} under the number {number}")
        memo[number] = stack[-1] or _Value(0)
    elif "GET" in name:
        stack.append(memo[int(argument or 0)])
    elif name == "MARK":
        stack.append(None)
    else:
        return False
    return True


def _popped(stack: list[_Value | None], opcode: Any) -> list[_Value]:
    """The values that an opcode takes from the stack."""
    popped: list[_Value] = []
    before = list(opcode.stack_before)
    if pickletools.markobject in before:
        while (value := stack.pop()) is not None:
            popped.append(value)
        before = before[: before.index(pickletools.markobject)]
    return popped + [stack.pop() or _Value(0) for _ in before]


@dataclass(slots=True)
class _Value:
    """A value on the stack, as `_check_size` tracks it."""

    size: int
    depth: int = 0
    used: bool = False  # whether it is inside another value


class _Unpickler(pickle.Unpickler):
    """An unpickler with an allowlist of the names that checkpoints need; none of them executes code of the file."""

    def __init__(self, raw: bytes, archive: _Archive) -> None:
        super().__init__(BytesIO(raw))
        self._archive = archive
        self._classes: dict[str, type[Record]] = {}
        self._base = type("Record", (Record,), {})
        self._known: dict[tuple[str, str], Any] = {
            ("collections", "OrderedDict"): OrderedDict,
            ("builtins", "set"): set,
            ("__builtin__", "set"): set,
            ("builtins", "complex"): complex,
            ("torch", "Size"): tuple,
            ("torch", "device"): lambda *args: ":".join(map(str, args)),
            # a lambda, not the method: an attribute that a pickle sets on a method would be set on the class, for every file
            ("torch._utils", "_rebuild_tensor_v2"): lambda *args: self._tensor(*args),
            ("torch._utils", "_rebuild_parameter"): lambda data, *_: _as(Stored, data),
            ("torch._tensor", "_rebuild_from_type_v2"): lambda rebuild, _, args, attributes: rebuild(*args),
            ("torch", "Tensor"): "Tensor",
            ("torch.nn.parameter", "Parameter"): "Parameter",
            ("_codecs", "encode"): lambda text, coding="latin1": _as(str, text).encode("latin1"),  # how protocol 2 pickles bytes
        }
        for module in ("numpy._core.multiarray", "numpy.core.multiarray"):
            self._known[module, "_reconstruct"] = lambda *_: Array()
            self._known[module, "scalar"] = lambda dtype, raw=b"": _array(dtype, (), raw)[()]
        self._known["numpy", "ndarray"] = "ndarray"
        self._known["numpy", "dtype"] = lambda name, *_: _Dtype(_as(str, name))

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._known:
            return self._known[module, name]
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if module.partition(".")[0] == "deepspeed" or (module, name) == ("argparse", "Namespace"):
            return self._classes.setdefault(f"{module}.{name}", type(name, (self._base,), {}))
        raise CheckpointError(f"it asks for {module}.{name}, which no checkpoint needs; it was not executed")

    def persistent_load(self, pid: Any) -> tuple[torch.dtype, int, ZipRecord]:
        """A storage: (dtype, bytes, record). The record must lie inside the file, the storage inside the record."""
        kind, dtype, key, _, numel = pid
        record = self._archive.place(f"data/{_as(str, key)}")
        nbytes = _as(int, numel) * _as(torch.dtype, dtype).itemsize
        if kind != "storage" or not 0 <= nbytes <= record.nbytes:
            raise CheckpointError(f"storage {key} of {numel} elements has {record.nbytes} bytes")
        return dtype, nbytes, record

    def _tensor(self, storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> Stored:
        dtype, nbytes, record = storage
        shape, strides = tuple(map(_size, size)), tuple(map(_size, stride))
        numel, expected, contiguous = math.prod(shape), 1, True
        for length, step in zip(reversed(shape), reversed(strides), strict=True):
            contiguous &= length < 2 or step == expected
            expected *= length
        last = sum((length - 1) * step for length, step in zip(shape, strides, strict=True)) if numel else -1
        if (_size(offset) + last + 1) * dtype.itemsize > nbytes:
            raise CheckpointError(f"a tensor of shape {shape} reaches beyond its storage of {nbytes} bytes")
        contiguous = contiguous or numel == 0
        return Stored(
            path=self._archive.path,
            at=record.at + offset * dtype.itemsize if contiguous else -1,
            dtype=dtype,
            shape=shape,
            record=record if self._archive.has_checksums else None,
        )


class _Dtype:
    """A numpy dtype: its name and byte order."""

    def __init__(self, name: str) -> None:
        self.name, self.order = name, "="

    def __setstate__(self, state: Any) -> None:
        self.order = _as(str, state[1]).replace("|", "=")


class Array:
    """A numpy array of numbers; numpy's own reconstruction could create objects."""

    value: Any = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, raw = state
        if fortran:
            raise CheckpointError("a numpy array in Fortran's order")
        self.value = _array(dtype, shape, raw)


def _array(dtype: Any, shape: Any, raw: Any) -> Any:
    import numpy

    kind = numpy.dtype(_as(_Dtype, dtype).name).newbyteorder(dtype.order)
    if kind.kind not in "biufc":
        raise CheckpointError(f"a numpy array of {dtype.name}")
    return numpy.frombuffer(_as(bytes, raw), kind).reshape(tuple(map(_size, shape))).astype(kind.newbyteorder("="))


def _as(kind: Callable[..., Any], value: Any) -> Any:
    if type(value) is not kind:
        raise CheckpointError(f"damaged or hostile: {type(value).__name__} where {getattr(kind, '__name__', kind)} belongs")
    return value


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 48:
        raise CheckpointError(f"damaged or hostile: {str(value)[:40]} where a size belongs")
    return value

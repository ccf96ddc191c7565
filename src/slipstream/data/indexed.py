"""Memory-mapped datasets of rows of integers, in the files of Megatron and DeepSpeed: PATH.bin has the rows' elements one after
another, PATH.idx where each row begins.

    .idx:  magic "MMIDIDX\\0\\0", <Q version 1, <B code of the dtype, <Q rows, <Q documents,
           int32 sizes [rows] in elements, int64 offsets [rows] in bytes, int64 documents [documents], rows before which one begins

[Note: Codes of dtypes] Codes 1 to 5 are the same everywhere. 6, 7 and 8 are uint16, uint32 and uint64 in DeepSpeed and
Megatron-DeepSpeed, and float64, float32 and uint16 in Megatron-LM. The offsets give the width of an element, which separates them,
except for code 7, where both have 4 bytes: it is read as DeepSpeed's.
"""

from __future__ import annotations

import math
import os
import shutil
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, type[np.generic]] = {
    **dict(enumerate((np.uint8, np.int8, np.int16, np.int32, np.int64), 1)),
    **dict(enumerate((np.uint16, np.uint32, np.uint64), 6)),
}
_OF_MEGATRON = {6: np.float64, 8: np.uint16}  # [Note: Codes of dtypes]
_OF_TORCH = {torch.uint8: 1, torch.int8: 2, torch.int16: 3, torch.int32: 4, torch.int64: 5}


def code(dtype: Any) -> int:
    """The code of a numpy or torch dtype. Raises ValueError for a dtype without a code."""
    if isinstance(dtype, torch.dtype):
        number_of_code = _OF_TORCH.get(dtype)
    else:
        number_of_code = next((number for number, known in DTYPES.items() if np.dtype(known) == np.dtype(dtype)), None)
    if number_of_code is None:
        name = dtype if isinstance(dtype, torch.dtype) else np.dtype(dtype)
        raise ValueError(f"{name} has no code in an .idx file: use one of {', '.join(kind.__name__ for kind in DTYPES.values())}")
    return number_of_code


def find_fit_int_dtype(min_value: int, max_value: int) -> type[np.generic]:
    """The narrowest integer dtype that holds both values; unsigned if `min_value` is not negative."""
    kinds: Sequence[Any] = (
        (np.uint8, np.uint16, np.uint32, np.uint64) if min_value >= 0 else (np.int8, np.int16, np.int32, np.int64)
    )
    return next((kind for kind in kinds[:-1] if np.iinfo(kind).min <= min_value and max_value <= np.iinfo(kind).max), kinds[-1])


def data_file_path(prefix_path: str) -> str:
    return f"{prefix_path}.bin"


def index_file_path(prefix_path: str) -> str:
    return f"{prefix_path}.idx"


class MMapIndexedDataset(Dataset[NDArray[Any]]):
    """The rows of PATH.bin and PATH.idx, views of the mapped file. `skip_warmup` has no effect: the files are read when used.

    Raises ValueError, naming the file, if one is missing, of another format, or cut off.
    """

    supports_prefetch = False  # of fairseq's datasets: nothing is to be read ahead of a mapped file

    def __init__(self, path: str | os.PathLike[str], skip_warmup: bool = True) -> None:
        self._path = os.fspath(path)
        for file in (index_file_path(self._path), data_file_path(self._path)):
            if not os.path.isfile(file):
                raise ValueError(f"indexed dataset: there is no file {file}")
        index = _mapped(index_file_path(self._path))
        self._dtype, self.sizes, self.pointers, self._documents = _parse(index_file_path(self._path), index)
        data = _mapped(data_file_path(self._path))
        held = int(self.pointers[-1]) + int(self.sizes[-1]) * self._dtype.itemsize if len(self) else 0
        if held > data.nbytes:
            raise ValueError(f"indexed dataset: {data_file_path(self._path)} has {data.nbytes} of the {held} bytes of its index")
        self._data = data[: data.nbytes // self._dtype.itemsize * self._dtype.itemsize].view(self._dtype)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._dtype

    @property
    def doc_idx(self) -> NDArray[np.int64]:
        """The rows before which documents begin."""
        return self._documents

    def get_doc_idx(self) -> NDArray[np.int64]:
        return self._documents

    def set_doc_idx(self, doc_idx_: NDArray[np.int64]) -> None:
        self._documents = doc_idx_

    def __len__(self) -> int:
        return len(self.sizes)

    def size(self, index: int) -> int:
        """Elements of a row."""
        return int(self.sizes[index])

    def __getitem__(self, idx: Any) -> Any:
        """A row, or a list of the rows of a slice without a step."""
        if not isinstance(idx, slice):
            return self.get(idx)
        start, stop, step = idx.indices(len(self))
        if step != 1:
            raise ValueError("slices of an indexed dataset must be contiguous")
        return [self.get(i) for i in range(start, stop)]

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """A row's elements from `offset` on, `length` of them."""
        if not -len(self) <= idx < len(self):
            raise IndexError(f"row {idx} of {len(self)} in {self._path}")
        first = int(self.pointers[idx]) // self._dtype.itemsize + offset
        return self._data[first : first + (self.size(idx) - offset if length is None else length)]

    def flat(self) -> NDArray[Any]:
        """All rows one after another."""
        return self._data[: int(self.sizes.sum(dtype=np.int64))]

    def __getstate__(self) -> str:
        return self._path

    def __setstate__(self, state: str) -> None:
        MMapIndexedDataset.__init__(self, state)

    @staticmethod
    def exists(path: str) -> bool:
        return all(map(os.path.exists, (index_file_path(path), data_file_path(path))))


def _mapped(file: str) -> NDArray[np.uint8]:
    return np.memmap(file, np.uint8, "r") if os.path.getsize(file) else np.empty(0, np.uint8)  # an empty file cannot be mapped


def _parse(file: str, index: NDArray[np.uint8]) -> tuple[np.dtype[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """The dtype, sizes, byte offsets and documents of an index file."""
    if index.nbytes < _HEADER.size or index[: len(MAGIC)].tobytes() != MAGIC:
        raise ValueError(f"indexed dataset: {file} does not begin with {MAGIC!r}; it is no index of a memory-mapped dataset")
    _, version, kind, rows, documents = _HEADER.unpack(index[: _HEADER.size].tobytes())
    needed = _HEADER.size + 12 * rows + 8 * documents
    if version != 1 or kind not in DTYPES or index.nbytes < needed:
        raise ValueError(
            f"indexed dataset: {file} has version {version} (1), dtype code {kind} (1 to 8) and {index.nbytes} bytes (for {rows} "
            f"rows and {documents} documents at least {needed})"
        )
    starts = np.cumsum([_HEADER.size, 4 * rows, 8 * rows, 8 * documents])
    sizes, pointers, begins = (
        index[start:stop].view(dtype)
        for start, stop, dtype in zip(starts, starts[1:], (np.int32, np.int64, np.int64), strict=False)
    )
    dtype = np.dtype(DTYPES[kind])
    filled = np.flatnonzero(sizes[:-1])
    if kind in _OF_MEGATRON and filled.size and pointers[filled[0] + 1] - pointers[filled[0]] != sizes[filled[0]] * dtype.itemsize:
        dtype = np.dtype(_OF_MEGATRON[kind])
    return dtype, sizes, pointers, begins


class MMapIndexedDatasetBuilder:
    """Writes rows to the data file `out_file`, and finally their index. dtype: an integer dtype of numpy or torch."""

    def __init__(self, out_file: str, dtype: Any = np.int64) -> None:
        self._dtype = np.dtype(DTYPES[code(dtype)])
        self._file = open(out_file, "wb")  # noqa: SIM115 (`finalize` closes it)
        self._sizes: list[int] = []
        self._documents = [0]

    def add_item(self, tensor: Any) -> None:
        """Write a row, a tensor or an array."""
        self.add_item_numpy(tensor.numpy() if isinstance(tensor, torch.Tensor) else np.asarray(tensor))

    def add_item_numpy(self, np_array: NDArray[Any]) -> None:
        self.add_items([np_array])

    def add_items(self, arr_list: Iterable[NDArray[Any]]) -> None:
        """Write rows; a 2D array's in one write. Raises ValueError for numbers that the dtype cannot hold."""
        rows = [arr_list] if isinstance(arr_list, np.ndarray) and arr_list.ndim == 2 else [row[None] for row in arr_list]
        held = np.iinfo(self._dtype)
        for equal in rows:
            if equal.size and not np.can_cast(equal.dtype, self._dtype) and (equal.min() < held.min or equal.max() > held.max):
                raise ValueError(
                    f"{self._file.name}: a row has numbers from {equal.min()} to {equal.max()}, and {self._dtype} those from "
                    f"{held.min} to {held.max}: use a wider dtype"
                )
            self._file.write(np.ascontiguousarray(equal, self._dtype).data)
            self._sizes += [math.prod(equal.shape[1:])] * len(equal)

    def end_document(self) -> None:
        self._documents.append(len(self._sizes))

    def merge_file_(self, another_file: str) -> None:
        """Append the rows and documents of another dataset of the same dtype. Raises ValueError if the dtypes differ."""
        other = MMapIndexedDataset(another_file)
        if other.dtype != self._dtype:
            raise ValueError(f"merge_file_({another_file!r}): its dtype is {other.dtype}, and this dataset's is {self._dtype}")
        self._documents += (other.doc_idx[1:] + len(self._sizes)).tolist()
        self._sizes += other.sizes.tolist()
        with open(data_file_path(another_file), "rb") as data:
            shutil.copyfileobj(data, self._file)

    def finalize(self, index_file: str) -> None:
        """Close the data file and write the index."""
        self._file.close()
        sizes = np.array(self._sizes, np.int64)
        if sizes.size and sizes.max() > np.iinfo(np.int32).max:
            raise ValueError(f"{index_file}: a row of {sizes.max()} elements is too long for an index of 32-bit sizes")
        offsets = (np.cumsum(sizes) - sizes) * self._dtype.itemsize
        parts = (sizes.astype(np.int32), offsets, np.array(self._documents, np.int64))
        header = _HEADER.pack(MAGIC, 1, code(self._dtype), sizes.size, len(self._documents))
        Path(index_file).write_bytes(b"".join((header, *(part.tobytes() for part in parts))))


def create_mmap_dataset_builder(fname: str, dtype: Any) -> MMapIndexedDatasetBuilder:
    return MMapIndexedDatasetBuilder(data_file_path(fname), dtype)


def close_mmap_dataset_builder(builder: MMapIndexedDatasetBuilder, fname: str) -> None:
    builder.end_document()
    builder.finalize(index_file_path(fname))


def write_rows(fname: str, dtype: Any, *documents: Iterable[NDArray[Any]]) -> None:
    """Write FNAME.bin and FNAME.idx: the rows of each document."""
    builder = create_mmap_dataset_builder(fname, dtype)
    with builder._file:
        for rows in documents:
            builder.add_items(rows)
            builder.end_document()
    builder.finalize(index_file_path(fname))


def make_builder(out_file: str, impl: str, vocab_size: int | None = None) -> MMapIndexedDatasetBuilder:
    """A builder of token rows: uint16 if the vocabulary fits, else int32. Raises ValueError for an `impl` other than "mmap"."""
    _check(impl)
    return MMapIndexedDatasetBuilder(out_file, np.uint16 if vocab_size is not None and vocab_size < 65500 else np.int32)


def make_dataset(path: str, impl: str, skip_warmup: bool = True) -> MMapIndexedDataset:
    """The dataset at `path`. Raises ValueError for an `impl` other than "mmap" and "infer", and as MMapIndexedDataset."""
    _check(impl, "infer")
    return MMapIndexedDataset(path, skip_warmup)


def dataset_exists(path: str, impl: str = "mmap") -> bool:
    _check(impl, "infer")
    return MMapIndexedDataset.exists(path)


def _check(impl: str, *others: str) -> None:
    if impl not in ("mmap", *others):
        raise ValueError(f"indexed dataset: the format {impl!r} of fairseq (TNTIDX) is not built; use 'mmap', which is also faster")

"""Maps the tensors of safetensors files to a model's parameters and buffers, and reads flat ranges of them on demand.

Only headers are read before `WeightFiles.read`, which reads only the bytes of its range. `rename` maps a stored name to the
model's; tied parameters are found under any of their names. If the files have one tensor for each matrix of each expert (from
before transformers 5, and written by it), a stack of experts is assembled from these.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from slipstream.checkpoint.box_reader import BoxReader
from slipstream.checkpoint.document import SIZE_LIMIT, Document, Entry, Piece
from slipstream.checkpoint.flat_slice import whole_box
from slipstream.checkpoint.stacks import Located, find
from slipstream.config.huggingface import INDEX, SINGLE, weight_files
from slipstream.ops.rows import RowForm, quantize_rows
from slipstream.zero.leaves import whole_shape

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
WORDS = {dtype: word for word, dtype in DTYPES.items()}  # torch's dtype -> safetensors' name


class WeightFiles:
    """The stored tensors that a model uses, by each of the model's names for them.

    forms: for parameters that the model stores as quantized rows (ops/rows.py). If the files hold floating-point values, `read`
    quantizes them.
    """

    def __init__(self, stored: Mapping[str, Entry], left_out: str, forms: Mapping[str, RowForm]) -> None:
        self._stored, self.left_out = stored, left_out
        self._forms = {name: form for name, form in forms.items() if name in stored and stored[name].dtype is not torch.uint8}
        pieces = [(name, entry.dtype, piece) for name, entry in stored.items() for piece in entry.pieces]
        files = {file: Path(file).stat().st_size for file in {piece.file for _, _, piece in pieces}}
        self._reader = BoxReader(Path(), Document(files=files, tensors=stored))
        heads = sorted((name, str(dtype), piece.box, Path(piece.file).name) for name, dtype, piece in pieces)
        self.fingerprint = hashlib.sha256(repr(heads).encode()).hexdigest()

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def reads_part(self, name: str, numel: int) -> bool:
        return False

    def dtype(self, name: str) -> torch.dtype:
        return torch.uint8 if name in self._forms else self._stored[name].dtype

    def fetch(self, names: Sequence[str]) -> None:
        """A no-op: `read` reads ranges from the files."""

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) in row-major order, 1D, in new memory."""
        form = self._forms.get(name)
        if form is None:
            return self._reader.read(name, start, stop)
        first, last = start // form.row_nbytes, -(-stop // form.row_nbytes)
        w = self._reader.read(name, first * form.columns, last * form.columns).view(-1, form.columns)
        return quantize_rows(w, form).view(-1)[start - first * form.row_nbytes : stop - first * form.row_nbytes]

    def close(self) -> None:
        """Close the files; `read` opens them again."""
        self._reader.close()


def open_weights(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    model: nn.Module,
    *,
    rename: Callable[[str], str] | None = None,
    strict: bool = True,
    forms: Mapping[str, RowForm] | None = None,
) -> WeightFiles:
    """Read the headers and match them to `model`. Raises ValueError listing every mismatch.

    forms: by name, for quantized parameters, which the files may hold as floating-point values
    """
    stored, tensors = _stored(path, rename), _names(model)
    entries: dict[str, Entry] = {}
    missing: list[str] = []
    misfits: list[str] = []
    model_names = {name for names, _ in tensors for name in names}
    free = {name: entry for name, entry in stored.items() if name not in model_names}
    surplus = dict(free)
    for names, tensor in tensors:
        same = next((stored[name] for name in names if name in stored), None)
        found = find(names, whole_shape(tensor), free, misfits) if same is None else Located(same, [])
        if found is None:
            missing.append(names[0])
            continue
        for name in found.names:
            surplus.pop(name, None)
        entries |= dict.fromkeys(names, found.entry)
        form = (forms or {}).get(names[0])
        if form is not None and found.entry.dtype is not torch.uint8:  # `read` quantizes it
            tensor = torch.empty(len(tensor), form.columns, device="meta")
        misfits += _misfit(names[0], tensor, found.entry)
    differences = [f"they lack {_some(missing)}"] if missing else []
    differences += [f"they have {_some([*surplus])}, which the model does not"] if surplus else []
    if misfits or (strict and differences):
        remedy = _remedy(missing, [*surplus]) if strict and differences else ""
        reasons = "; ".join(misfits[:5] + differences)
        raise ValueError(f"the weights in {path} do not fit this {type(model).__name__}: {reasons}{remedy}")
    return WeightFiles(entries, f"{'; '.join(differences)} ({path})" if differences else "", forms or {})


def _stored(path: Any, rename: Callable[[str], str] | None) -> dict[str, Entry]:
    """The tensors of the files, by their name in the model. Raises ValueError if two have the same name."""
    stored: dict[str, Entry] = {}
    origins: dict[str, str] = {}
    for file in files_of(path):
        for own, entry in sorted(_header(file).items()):
            name, origin = own if rename is None else rename(own), f"{own!r} of {file}"
            if name in stored:
                raise ValueError(
                    f"{origin} and {origins[name]} are both to be {name!r}; name only one of the files, or mend rename="
                )
            stored[name], origins[name] = entry, origin
    return stored


def check_same(fingerprints: Iterable[str]) -> None:
    """Raise ValueError if the ranks see different files."""
    if len(set(fingerprints)) > 1:
        raise ValueError("the ranks see different weights under the same path; copy the same files to every host")


def files_of(path: Any) -> list[Path]:
    if not isinstance(path, str | os.PathLike):
        files = [Path(name) for name in path]
        if not files:
            raise ValueError("no file was named")
        return files
    folder = Path(path)
    if not folder.is_dir():
        return [folder]
    if not (files := weight_files(folder)):
        raise ValueError(f"there is neither {INDEX} nor {SINGLE} in {folder}; name the .safetensors files themselves")
    return files


def _header(file: Path) -> dict[str, Entry]:
    try:
        return read_header(file)
    except FileNotFoundError:
        raise ValueError(f"there is no {file}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} is no whole safetensors file (pickled weights are never read): {error}") from None


def read_header(file: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file. Any other file raises ValueError, KeyError, TypeError or AttributeError."""
    size = file.stat().st_size
    with open(file, "rb") as opened:
        first = 8 + int.from_bytes(opened.read(8), "little")
        if not 8 < first <= min(size, SIZE_LIMIT):
            raise ValueError(f"{file.name} is no safetensors file, or cut off")
        header = json.loads(opened.read(first - 8))
    entries: dict[str, Entry] = {}
    for name, fields in header.items():
        if name == "__metadata__":
            continue
        shape, (start, stop) = tuple(map(int, fields["shape"])), map(int, fields["data_offsets"])
        dtype = DTYPES.get(fields["dtype"], torch.bits8)
        if dtype is torch.bits8:  # F4, F6: numbers of less than a byte
            shape = (stop - start,)
        fits = stop - start == math.prod(shape) * dtype.itemsize
        if not fits or min(shape, default=0) < 0 or not 0 <= start <= stop <= size - first:
            raise ValueError(f"{name!r} of shape {shape} claims bytes [{start}, {stop}) of {file.name}, which has {size}")
        piece = Piece(box=whole_box(shape), file=str(file), at=first + start, crc32=())
        entries[name] = Entry(dtype=dtype, shape=shape, pieces=(piece,))
    return entries


def needs_more_than_cast(dtype: torch.dtype) -> bool:
    """Whether numbers of a stored dtype are codes, which only their scales turn into weights."""
    return dtype.itemsize == 1 and (dtype.is_floating_point or dtype is torch.bits8)


def _names(model: nn.Module) -> list[tuple[list[str], Tensor]]:
    """Parameters and persistent buffers, each with all its names."""
    names_of: dict[int, tuple[list[str], Tensor]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        saved = [(name, buffer) for name, buffer in module._buffers.items() if name not in module._non_persistent_buffers_set]
        for leaf, tensor in [*module._parameters.items(), *saved]:
            if tensor is not None:
                names_of.setdefault(id(tensor), ([], tensor))[0].append(f"{prefix}.{leaf}" if prefix else leaf)
    return list(names_of.values())


def _misfit(name: str, tensor: Tensor, stored: Entry) -> list[str]:
    if needs_more_than_cast(stored.dtype) and stored.dtype is not tensor.dtype:
        return [f"{name!r} is {stored.dtype} in the files, which needs more than a cast; save it as bfloat16 or float32"]
    if stored.shape != (shape := whole_shape(tensor)):
        return [f"{name!r} has shape {stored.shape} in the files and {shape} in the model"]
    if stored.dtype is tensor.dtype:
        return []
    if not (stored.dtype.is_floating_point and tensor.dtype.is_floating_point):
        return [f"{name!r} is {stored.dtype} in the files and {tensor.dtype} in the model, and no cast converts one to the other"]
    return []


def _remedy(missing: Sequence[str], surplus: Sequence[str]) -> str:
    """How to fix mismatched names: a rename= for a prefix, if one explains them."""
    for absent in missing[:20]:
        for present in surplus:
            if absent.endswith(f".{present}"):
                added = absent.removesuffix(present)
                if sum(added + name in missing for name in surplus) * 2 >= len(missing):
                    return f'. Give rename=lambda name: "{added}" + name'
            elif present.endswith(f".{absent}"):
                dropped = present.removesuffix(absent)
                if sum(dropped + name in surplus for name in missing) * 2 >= len(missing):
                    return f'. Give rename=lambda name: name.removeprefix("{dropped}")'
    return (
        ". Give rename= (from a name there to the model's), or strict=False: what is missing is then initialized, what is surplus "
        "left out"
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")

"""Maps the tensors of safetensors files to a model's parameters and buffers, and reads flat ranges of them on demand.

Files are memory-mapped; only headers are read before `WeightFiles.read`, which touches only the bytes of its range. `rename` maps
a stored name to the model's; tied parameters are found under any of their names.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from slipstream.checkpoint.flat_slice import Shape, boxes
from slipstream.config.huggingface import read_index
from slipstream.ops.rows import RowForm, quantize_rows

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
}
WORDS = {dtype: word for word, dtype in DTYPES.items()}  # torch's dtype -> safetensors' name
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class Stored(NamedTuple):
    """One tensor of a file."""

    file: Path
    name: str  # in the file
    shape: Shape
    dtype: str  # safetensors' name


class WeightFiles:
    """The stored tensors that a model uses, by each of the model's names for them.

    forms: of the parameters that the model stores as quantized rows (ops/rows.py). If the files hold floating-point values, `read`
    quantizes them.
    """

    def __init__(self, taken: Mapping[str, Stored], left_out: str, forms: Mapping[str, RowForm]) -> None:
        self._taken, self.left_out = taken, left_out
        self._forms = {name: form for name, form in forms.items() if name in taken and taken[name].dtype != "U8"}
        self._open: dict[Path, Any] = {}
        self._closing = ExitStack()
        heads = sorted((name, stored.name, stored.shape, stored.dtype, stored.file.name) for name, stored in taken.items())
        self.fingerprint = hashlib.sha256(repr(heads).encode()).hexdigest()

    def __contains__(self, name: str) -> bool:
        return name in self._taken

    def dtype(self, name: str) -> torch.dtype:
        if name in self._forms:
            return torch.uint8
        return DTYPES[self._taken[name].dtype]

    def fetch(self, names: Sequence[str]) -> None:
        """A no-op: `read` reads ranges from the files."""

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) in row-major order, 1D. It may view the mapped file: copy it before `close`."""
        form = self._forms.get(name)
        if form is None:
            return self._stored(name, start, stop)
        first, last = start // form.row_nbytes, -(-stop // form.row_nbytes)
        w = self._stored(name, first * form.columns, last * form.columns).view(-1, form.columns)
        return quantize_rows(w, form).view(-1)[start - first * form.row_nbytes : stop - first * form.row_nbytes]

    def _stored(self, name: str, start: int, stop: int) -> Tensor:
        stored = self._taken[name]
        if stored.file not in self._open:
            self._open[stored.file] = self._closing.enter_context(_open(stored.file))
        lazy = self._open[stored.file].get_slice(stored.name)
        parts = [
            lazy[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))].reshape(-1)
            for box in boxes(stored.shape, start, stop)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def close(self) -> None:
        """Unmap the files; `read` maps them again."""
        self._open.clear()
        self._closing.close()


def open_weights(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    model: nn.Module,
    *,
    rename: Callable[[str], str] | None = None,
    strict: bool = True,
    forms: Mapping[str, RowForm] | None = None,
) -> WeightFiles:
    """Read the headers and match them to `model`. Raises ValueError listing every mismatch.

    forms: by name, of the quantized parameters, which the files may hold as floating-point values.
    """
    stored: dict[str, Stored] = {}
    for file in files_of(path):
        for each in _header(file):
            name = each.name if rename is None else rename(each.name)
            if name in stored:
                both = f"{each.name!r} of {file} and {stored[name].name!r} of {stored[name].file}"
                raise ValueError(f"{both} are both to be {name!r}; name only one of the files, or mend rename=")
            stored[name] = each
    wanted = _names(model)
    taken: dict[str, Stored] = {}
    missing: list[str] = []
    wrong: list[str] = []
    for names, tensor in wanted:
        held = next((stored[name] for name in names if name in stored), None)
        if held is None:
            missing.append(names[0])
            continue
        taken |= dict.fromkeys(names, held)
        form = (forms or {}).get(names[0])
        if form is not None and held.dtype != "U8":
            wrong += _misfit(names[0], torch.empty(len(tensor), form.columns, device="meta"), held)
        else:
            wrong += _misfit(names[0], tensor, held)
    known = {name for names, _ in wanted for name in names}
    surplus = [name for name in stored if name not in known]
    said = [f"they lack {_some(missing)}"] if missing else []
    said += [f"they have {_some(surplus)}, which the model does not"] if surplus else []
    if wrong or (strict and said):
        remedy = _remedy(missing, surplus) if strict and said else ""
        raise ValueError(f"the weights in {path} do not fit this {type(model).__name__}: {'; '.join(wrong[:5] + said)}{remedy}")
    return WeightFiles(taken, f"{'; '.join(said)} ({path})" if said else "", forms or {})


def check_same(fingerprints: Iterable[str]) -> None:
    """Raise ValueError if the ranks see different files."""
    if len(set(fingerprints)) > 1:
        raise ValueError("the ranks see different weights under the same path; copy the same files to every host")


def files_of(path: Any) -> list[Path]:
    if not isinstance(path, str | os.PathLike):
        files = [Path(each) for each in path]
        if not files:
            raise ValueError("no file was named")
        return files
    folder = Path(path)
    if not folder.is_dir():
        return [folder]
    if (folder / INDEX).is_file():
        return [folder / name for name in read_index(folder / INDEX)]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    raise ValueError(f"there is neither {INDEX} nor {SINGLE} in {folder}; name the .safetensors files themselves")


def _open(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError:
        raise ValueError(f"there is no {file}") from None
    except SafetensorError as error:
        raise ValueError(f"{file} is no whole safetensors file (pickled weights are never read): {error}") from None


def _header(file: Path) -> list[Stored]:
    with _open(file) as opened:
        heads = [(name, opened.get_slice(name)) for name in opened.keys()]  # noqa: SIM118 (it is no dict)
        return [Stored(file, name, tuple(head.get_shape()), head.get_dtype()) for name, head in heads]


def _names(model: nn.Module) -> list[tuple[list[str], Tensor]]:
    """Parameters and persistent buffers, each with all its names."""
    found: dict[int, tuple[list[str], Tensor]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        saved = [(name, held) for name, held in module._buffers.items() if name not in module._non_persistent_buffers_set]
        for leaf, tensor in [*module._parameters.items(), *saved]:
            if tensor is not None:
                found.setdefault(id(tensor), ([], tensor))[0].append(f"{prefix}.{leaf}" if prefix else leaf)
    return list(found.values())


def _misfit(name: str, tensor: Tensor, held: Stored) -> list[str]:
    if held.shape != tuple(tensor.shape):
        return [f"{name!r} has shape {held.shape} in the files and {tuple(tensor.shape)} in the model"]
    dtype = DTYPES.get(held.dtype)
    if dtype is None:
        return [f"{name!r} is {held.dtype} in the files, which needs more than a cast; save it as BF16 or F32"]
    if dtype is not tensor.dtype and not (dtype.is_floating_point and tensor.dtype.is_floating_point):
        return [f"{name!r} is {held.dtype} in the files and {tensor.dtype} in the model, and no cast converts one to the other"]
    return []


def _remedy(missing: Sequence[str], surplus: Sequence[str]) -> str:
    """How to fix mismatched names: the rename= for a prefix if one explains them."""
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

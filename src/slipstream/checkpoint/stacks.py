"""transformers 5's stacks of experts, assembled from other layouts: one tensor for each matrix of each expert.

Files from before transformers 5 have this layout, files that it writes, and checkpoints of models with a list of expert modules.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from slipstream.checkpoint.document import Entry, Piece
from slipstream.checkpoint.errors import CheckpointError
from slipstream.checkpoint.flat_slice import Box, Shape

# The matrices of an expert that a stack concatenates by rows, by their names in files
_MATRICES = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}


class Located(NamedTuple):
    """A model's tensor, and the names of what files have of it."""

    entry: Entry
    names: list[str]


def find(names: Iterable[str], shape: Shape, stored: Mapping[str, Entry], misfits: list[str]) -> Located | None:
    """A tensor of these names that files have under an older one, or a stack of `shape` of which they have the parts; None if they
    have neither. Parts that do not fit go to `misfits`."""
    file_names = [each for name in names for each in _names_in_files(name)]
    for name in file_names:
        if name in stored:
            return Located(stored[name], [name])
    for name in file_names:
        layer, _, leaf = name.rpartition(".")
        matrices = next((each for each in _MATRICES.get(leaf, ()) if f"{layer}.0.{each[0]}.weight" in stored), ())
        if matrices and len(shape) == 3 and shape[1] % len(matrices) == 0:
            return _stack(name, shape, matrices, stored, misfits)
    return None


def _names_in_files(name: str) -> Iterator[str]:
    """The names that a model's tensor may have in files, where the expert layers of Mixtral and PhiMoE have an older name."""
    yield name
    older = name.replace(".mlp.", ".block_sparse_moe.")
    yield older
    yield older.replace(".router.", ".gate.")


def _stack(name: str, shape: Shape, matrices: Sequence[str], stored: Mapping[str, Entry], misfits: list[str]) -> Located | None:
    layer, rows = name.rpartition(".")[0], shape[1] // len(matrices)
    pieces, names = list[Piece](), list[str]()
    for expert, (i, matrix) in itertools.product(range(shape[0]), enumerate(matrices)):
        full = f"{layer}.{expert}.{matrix}.weight"
        part = stored.get(full)
        wanted = stored[names[0]].dtype if names else None
        if part is None:
            misfits.append(f"{name!r} has {shape[0]} experts, and the files lack {full!r}")
        elif part.shape != (rows, shape[2]) or part.dtype is not (wanted or part.dtype):
            misfits.append(
                f"{full!r} is {part.dtype} of shape {part.shape} in the files, and not {wanted or part.dtype} of shape "
                f"{(rows, shape[2])}"
            )
        else:
            names.append(full)
            pieces += [_moved(piece, expert, i * rows) for piece in part.pieces]
    return Located(replace(stored[names[0]], shape=shape, pieces=tuple(pieces)), names) if names else None


def restack(
    tensors: Mapping[str, Entry], wanted: Mapping[str, Shape], needed: Container[str]
) -> tuple[dict[str, Entry], dict[str, list[str]]]:
    """Replace tensors that the checkpoint has in parts or under an older name by those that `wanted` names: returns the tensors,
    and the former names of each one that is new. Parts that do not fit stay as they are; raises CheckpointError if they belong to a
    stack in `needed`."""
    result, parts, misfits = dict(tensors), dict[str, list[str]](), list[str]()
    free = {name: entry for name, entry in tensors.items() if name not in wanted}  # the others already have the model's names
    for name, shape in wanted.items():
        if name in tensors:
            continue
        unfit = list[str]()
        if (found := find([name], shape, free, unfit)) is not None and not unfit:
            result[name], parts[name] = found
        misfits += unfit if name in needed else []
    if misfits:
        raise CheckpointError("; ".join(misfits[:5]))
    for each in parts.values():
        for name in each:
            result.pop(name, None)
    return result, parts


def _moved(piece: Piece, expert: int, first: int) -> Piece:
    """A piece of an expert's matrix as a piece of the stack, where the matrix begins at row `first` of the expert."""
    row, column = piece.box.offsets
    return replace(piece, box=Box((expert, first + row, column), (1, *piece.box.sizes)))

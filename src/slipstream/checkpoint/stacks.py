"""transformers 5's stacks of experts, assembled from other layouts: one tensor for each matrix of each expert.

Files from before transformers 5 have this layout, files that it writes, and checkpoints of models with a list of expert modules.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from slipstream.checkpoint.document import Entry, Piece
from slipstream.checkpoint.errors import CheckpointError
from slipstream.checkpoint.flat_slice import Box, Shape

# The matrices of an expert that a stack concatenates by rows, by their names in files
_MATRICES = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}


class _Stored(Protocol):
    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> Any: ...


class StackPart(NamedTuple):
    """One expert's matrix in a stack."""

    box: Box
    name: str  # in the files


def names_in_files(name: str) -> Iterator[str]:
    """The names that a model's tensor may have in files, where the expert layers of Mixtral and PhiMoE have an older name."""
    yield name
    older = name.replace(".mlp.", ".block_sparse_moe.")
    yield older
    yield older.replace(".router.", ".gate.")


def parts_of_stack(names: Iterable[str], shape: Shape, stored: Mapping[str, _Stored], misfits: list[str]) -> list[StackPart]:
    """The parts of a stack of `shape` under one of these names; [] if there are none. Parts that do not fit go to `misfits`."""
    for name in names:
        layer, _, leaf = name.rpartition(".")
        matrices = next((each for each in _MATRICES.get(leaf, ()) if f"{layer}.0.{each[0]}.weight" in stored), ())
        if not matrices or len(shape) != 3 or shape[1] % len(matrices):
            continue
        rows = shape[1] // len(matrices)
        parts: list[StackPart] = []
        for expert, (i, matrix) in itertools.product(range(shape[0]), enumerate(matrices)):
            full = f"{layer}.{expert}.{matrix}.weight"
            part = stored.get(full)
            wanted = stored[parts[0].name].dtype if parts else None
            if part is None:
                misfits.append(f"{name!r} has {shape[0]} experts, and the files lack {full!r}")
            elif part.shape != (rows, shape[2]) or part.dtype != (wanted or part.dtype):
                misfits.append(
                    f"{full!r} is {part.dtype} of shape {part.shape} in the files, and not {wanted or part.dtype} of shape "
                    f"{(rows, shape[2])}"
                )
            else:
                parts.append(StackPart(Box((expert, i * rows, 0), (1, rows, shape[2])), full))
        return parts
    return []


class Restacked(NamedTuple):
    """The tensors of a checkpoint under a model's names."""

    tensors: dict[str, Entry]
    parts: dict[str, list[str]]  # model name -> names in the checkpoint, if it has the tensor in parts or under another name


def restack(tensors: Mapping[str, Entry], wanted: Mapping[str, Shape], needed: Container[str]) -> Restacked:
    """Replace tensors that the checkpoint has in parts or under an older name by those that `wanted` names. Parts that do not fit
    stay as they are; raises CheckpointError if they belong to a stack in `needed`."""
    result, parts, misfits = dict(tensors), dict[str, list[str]](), list[str]()
    free = {name: entry for name, entry in tensors.items() if name not in wanted}  # the others already have the model's names
    for name, shape in wanted.items():
        if name in tensors:
            continue
        file_names, unfit = list(names_in_files(name)), list[str]()
        older = next((each for each in file_names if each in free), None)
        if older is not None:
            result[name], parts[name] = tensors[older], [older]
        elif (stacked := parts_of_stack(file_names, shape, free, unfit)) and not unfit:
            pieces = tuple(_moved(piece, box) for box, part in stacked for piece in tensors[part].pieces)
            result[name], parts[name] = replace(tensors[stacked[0].name], shape=shape, pieces=pieces), [part for _, part in stacked]
        misfits += unfit if name in needed else []
    if misfits:
        raise CheckpointError("; ".join(misfits[:5]))
    for each in parts.values():
        for name in each:
            result.pop(name, None)
    return Restacked(result, parts)


def _moved(piece: Piece, to: Box) -> Piece:
    """A piece of an expert's matrix as a piece of the stack, where the matrix has the place `to`."""
    expert, first, _ = to.offsets
    row, column = piece.box.offsets
    return replace(piece, box=Box((expert, first + row, column), (1, *piece.box.sizes)))

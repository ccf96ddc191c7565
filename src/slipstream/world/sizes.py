"""Sizes of the mesh's axes, from configs and `slipstream run --mesh`, and the layout of ranks on hosts as a table. Without torch,
because the launcher reads them, too.

`--mesh` reaches the ranks in the environment variable SLIPSTREAM_MESH, which only `launched_sizes` reads.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.world.mesh import Place

VARIABLE = "SLIPSTREAM_MESH"
# Axis -> the keys of a config that state its size
MESH_KEYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "pp": ("slipstream.mesh.pp", "pipeline.stages"),
        "sp": ("slipstream.mesh.sp", "sequence_parallel_size"),
        "tp": ("slipstream.mesh.tp", "tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size"),
    }
)


def parse_mesh(text: str) -> dict[str, int]:
    """`pp=2,tp=4` -> {"pp": 2, "tp": 4}. Raises ValueError."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = (word.strip() for word in part.partition("="))
        if axis not in MESH_KEYS or axis in sizes or not size.isdecimal() or not int(size):
            raise ValueError(f"{text!r} are not sizes of the axes {', '.join(MESH_KEYS)}, each once; write pp=2,tp=4")
        sizes[axis] = int(size)
    return sizes


def shown_mesh(sizes: Mapping[str, int]) -> str:
    """The inverse of `parse_mesh`."""
    return ",".join(f"{axis}={size}" for axis, size in sizes.items())


def _stated(raw: Mapping[str, Any]) -> Iterator[tuple[str, str, int]]:
    """(axis, key, size) of the keys that state a size. Values of other types are skipped; the ranks refuse them.

    A size of `tensor_parallel` below 2 is not stated, as in DeepSpeed: its tp_size is 1 beside any autotp_size.
    """
    for axis, paths in MESH_KEYS.items():
        for path in paths:
            value: Any = raw
            for name in path.split("."):
                value = value.get(name) if isinstance(value, Mapping) else None
            if isinstance(value, int) and not (value < 2 and path.startswith("tensor_parallel.")):
                yield axis, path, max(value, 1)


def sizes_in(raw: Mapping[str, Any]) -> dict[str, int]:
    """The sizes above 1 that a config's keys state; the largest one for each axis."""
    sizes: dict[str, int] = {}
    for axis, _, size in _stated(raw):
        if size > 1:
            sizes[axis] = max(size, sizes.get(axis, 1))
    return sizes


def launched_sizes() -> dict[str, int]:
    """The sizes of `slipstream run --mesh`; empty without it."""
    text = os.environ.get(VARIABLE)
    return parse_mesh(text) if text else {}


def check_stated(raw: Mapping[str, Any], given: Mapping[str, int]) -> None:
    """Raise ValueError if a config states another size than `--mesh`, including 1."""
    for axis, path, size in _stated(raw):
        if given.get(axis, size) != size:
            raise ValueError(f"slipstream run --mesh {axis}={given[axis]}, and the config has {path} {size}; drop one of the two")


SHOWN = "SLIPSTREAM_SHOWN_MESH"  # the mesh whose table the launcher has printed, so that the ranks do not print it again
_MOST_ROWS = 32
_AXES = {"pp": "stage", "batch": "data", "sp": "sp", "tp": "tp"}  # axis -> its column


def sizes_of(places: Mapping[int, Place]) -> dict[str, int]:
    """Column -> the number of places on its axis, for axes with several."""
    lengths = (1 + max(column) for column in zip(*places.values(), strict=True))
    return {name: size for name, size in zip(_AXES.values(), lengths, strict=True) if size > 1}


def layout_title(places: Mapping[int, Place]) -> str:
    """For example `mesh stage 2 x data 2 x tp 2`."""
    return "mesh " + (" x ".join(f"{name} {size}" for name, size in sizes_of(places).items()) or "of one rank")


def layout_table(places: Mapping[int, Place], host_of: Mapping[int, str]) -> str:
    """The title, and one row for ranks of one host that differ only on the innermost axis."""
    shown = [list(_AXES.values()).index(name) for name in sizes_of(places)]
    cells: dict[tuple[str, ...], list[int]] = {}
    for rank, place in places.items():
        cells.setdefault((host_of[rank], *(str(place[i]) for i in shown[:-1])), []).append(rank)
    rows = [["host", "ranks", *sizes_of(places)]]
    for (host, *outer), ranks in list(cells.items())[:_MOST_ROWS]:
        rows.append([host, _spans(ranks), *outer, *(_spans([places[rank][i] for rank in ranks]) for i in shown[-1:])])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    if len(cells) > _MOST_ROWS:
        lines.append(f"and {len(cells) - _MOST_ROWS} more in the same order")
    return "\n  ".join([layout_title(places), *lines])


def slices_apart(places: Mapping[int, Place], host_of: Mapping[int, str]) -> list[int]:
    """The ranks of the first tp axis that spans hosts; empty if there is none."""
    axes: dict[tuple[int, ...], list[int]] = {}
    for rank, place in places.items():
        axes.setdefault(place[:3], []).append(rank)
    return next((ranks for ranks in axes.values() if len({host_of[rank] for rank in ranks}) > 1), [])


def _spans(numbers: Sequence[int]) -> str:
    """For example `0-3, 8`."""
    runs = [[number for _, number in group] for _, group in itertools.groupby(enumerate(numbers), lambda item: item[1] - item[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)

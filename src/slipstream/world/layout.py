"""The layout of a mesh's ranks as a table: each host's ranks, and their places on the axes. Pure functions."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from slipstream.world.mesh import Place

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

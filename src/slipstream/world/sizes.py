"""Sizes of the mesh's axes, from configs and `slipstream run --mesh`. Without torch, because the launcher reads them, too.

`--mesh` reaches the ranks in the environment variable SLIPSTREAM_MESH, which only `launched_sizes` reads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

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

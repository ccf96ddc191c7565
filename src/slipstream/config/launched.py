"""Sizes of the mesh's axes that are known before ranks start: those that a config states, and those of `slipstream run --mesh`.

`--mesh` reaches the ranks in the environment variable SLIPSTREAM_MESH, which is read here only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from slipstream.config.refusals import MESH_KEYS
from slipstream.config.trial import laid_over

VARIABLE = "SLIPSTREAM_MESH"


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
    """`parse_mesh` turned around."""
    return ",".join(f"{axis}={size}" for axis, size in sizes.items())


def sizes_in(raw: Mapping[str, Any]) -> dict[str, int]:
    """The sizes above 1 that a config's keys state; values of other types are for the ranks to refuse."""
    sizes: dict[str, int] = {}
    for axis, paths in MESH_KEYS.items():
        for path in paths:
            value: Any = raw
            for name in path.split("."):
                value = value.get(name) if isinstance(value, Mapping) else None
            if isinstance(value, int) and value > 1:
                sizes[axis] = max(value, sizes.get(axis, 1))
    return sizes


def with_launched_mesh(raw: dict[str, Any]) -> dict[str, Any]:
    """A config with the sizes of `slipstream run --mesh`. Raises ValueError if it states others."""
    text = os.environ.get(VARIABLE)
    return raw if not text else with_mesh(raw, parse_mesh(text))


def with_mesh(raw: dict[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """A config with these sizes. Raises ValueError if it states others."""
    stated = sizes_in(raw)
    for axis, size in sizes.items():
        if stated.get(axis, size) != size:
            raise ValueError(
                f"slipstream run --mesh {axis}={size}, and the config has {axis} {stated[axis]} "
                f"({' or '.join(MESH_KEYS[axis])}); drop one of the two"
            )
    return laid_over(raw, {"slipstream": {"mesh": dict(sizes)}})

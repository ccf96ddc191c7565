"""The mesh of a run before its ranks start: the sizes of its axes, and the host of each rank.

Every launcher numbers the ranks of a host consecutively and fills hosts in their order. A mesh numbers ranks with tp innermost,
then sp, data and pp. So the slices of a layer stay on a host if the number of ranks per host is a multiple of tp.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.world.sizes import check_stated, layout_table, sizes_in, slices_apart

# Script flags that name a config: DeepSpeed's own, and those of transformers' Trainer and of common examples
_CONFIG_FLAGS = ("--deepspeed_config", "--deepscale_config", "--deepspeed", "--ds_config", "--config")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownMesh:
    """Sizes of axes, and the text that says who set them."""

    sizes: Mapping[str, int]
    source: str

    @property
    def model_size(self) -> int:
        return math.prod(self.sizes.values())


def read_mesh(given: Mapping[str, int] | None, arguments: Sequence[str]) -> KnownMesh | None:
    """The mesh set by `--mesh` or by a config among the script's arguments; None: neither sets a size, but the script may.

    Raises ValueError if the two differ. A file that is no config is left to the script.
    """
    sizes, source = dict(given or {}), "--mesh"
    for path in _configs_among(arguments):
        raw = _config(path)
        check_stated(raw, given or {})
        sizes |= (stated := sizes_in(raw))
        source = " and ".join(["--mesh"] * bool(given) + [path] * bool(stated))
    sizes = {axis: size for axis, size in sizes.items() if size > 1}
    return KnownMesh(sizes=sizes, source=source) if sizes else None


def _config(path: str) -> dict[str, object]:
    from slipstream.config.text import read_json  # imports torch

    try:
        raw = read_json(Path(path).read_text(encoding="utf-8-sig"), path).value
    except (OSError, ValueError):
        return {}
    return raw if isinstance(raw, dict) else {}


def _configs_among(arguments: Sequence[str]) -> Iterator[str]:
    for word, following in itertools.pairwise([*arguments, ""]):
        flag, equals, value = word.partition("=")
        path = value if equals else following
        if flag in _CONFIG_FLAGS and path and Path(path).is_file():
            yield path


def arrange(mesh: KnownMesh, hosts: Sequence[tuple[str, int]], *, may_change: bool) -> list[str]:
    """The table of ranks, and a warning if slices of a layer must span several hosts.

    hosts       name and number of ranks, in rank order
    may_change  hosts come and go: only conditions on each host are checked, and there is no table

    Raises ValueError if the sizes do not fit the ranks, or tp the ranks of a host.
    """
    from slipstream.world.mesh import Place, nearest_sizes, place_ranks  # imports torch

    num_ranks = sum(count for _, count in hosts)
    sizes = {axis: mesh.sizes.get(axis, 1) for axis in ("pp", "sp", "tp")}
    if num_ranks % mesh.model_size and not may_change:
        listed = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
        nearest = nearest_sizes(num_ranks, **sizes)
        raise ValueError(
            f"{mesh.source}: one replica of the model needs {listed} = {mesh.model_size} ranks, and "
            f"{', '.join(f'{name}: {count}' for name, count in hosts)} are {num_ranks}; start a multiple of {mesh.model_size}, "
            "or use " + " x ".join(f"{axis} {size}" for axis, size in nearest.items())
        )
    _check_slices(mesh, hosts, sizes["tp"])
    if may_change:
        return []
    host_of = dict(enumerate(name for name, count in hosts for _ in range(count)))
    places = place_ranks(range(num_ranks), Place(sizes["pp"], num_ranks // mesh.model_size, sizes["sp"], sizes["tp"]))
    notes = [layout_table(places, host_of)]
    if ranks := slices_apart(places, host_of):
        over = ", ".join(dict.fromkeys(host_of[rank] for rank in ranks))
        notes.append(
            f"{mesh.source}: tp {sizes['tp']} is more than the ranks of a host: the slices of the ranks "
            f"{', '.join(map(str, ranks))} are on the hosts {over}, so the sums of each layer travel between hosts"
        )
    return notes


def _check_slices(mesh: KnownMesh, hosts: Sequence[tuple[str, int]], tp: int) -> None:
    """Raise ValueError if slices span several hosts although one host has room for all slices of a layer."""
    counts = [count for _, count in hosts]
    if len(hosts) == 1 or max(counts) < tp or not any(count % tp for count in counts):
        return
    name, count = next((name, count) for name, count in hosts if count % tp)
    fits = max(size for size in range(1, tp + 1) if all(each % size == 0 for each in counts))
    fewer = f"--nproc {min(counts) // tp * tp}, or " if min(counts) >= tp else ""
    raise ValueError(
        f"{mesh.source}: tp {tp}, and {name} has {count} ranks: slices of one layer would be on two hosts, and its sums travel "
        f"between them; use {fewer}tp {fits}"
    )

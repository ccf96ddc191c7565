"""`python -m slipstream.config` prints the tables of keys in docs/DEEPSPEED_KEYS.md."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from slipstream.config.keys import FEATURES, HONORED, NO_EFFECT


def tables() -> str:
    honored: dict[str, list[str]] = {}
    for name in HONORED:
        block, _, key = name.rpartition(".")
        honored.setdefault(block, []).append(key)
    idle: dict[str, list[str]] = {}
    for name, reason in NO_EFFECT.items():
        idle.setdefault(reason, []).append(name)
    refused = (
        (_names((*feature.switches, *(f"{block}.*" for block in feature.blocks))), f"{feature.what}: {feature.remedy}")
        for feature in FEATURES
    )
    blocks = ((f"`{block}`" if block else "", _names(names)) for block, names in honored.items())
    return "\n\n".join(
        [
            _table("Honored", ("block", "keys"), blocks),
            _table("Without effect (logged once)", ("keys", "why"), ((_names(keys), why) for why, keys in idle.items())),
            _table("Refused if they enable a feature that is not built", ("keys", "feature and alternative"), refused),
        ]
    )


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(title: str, head: tuple[str, str], rows: Iterable[tuple[str, str]]) -> str:
    lines = [f"### {title}", "", f"| {head[0]} | {head[1]} |", "|---|---|", *(f"| {left} | {right} |" for left, right in rows)]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(tables() + "\n")

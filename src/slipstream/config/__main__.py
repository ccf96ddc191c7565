"""`python -m slipstream.config` prints the tables of keys in docs/DEEPSPEED_KEYS.md."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from slipstream.config.keys import Fate, Feature, table


def tables() -> str:
    """Group honored keys by block, keys without effect by reason and the others by feature."""
    blocks: dict[str, list[str]] = {}
    reasons: dict[str, list[str]] = {}
    features: dict[Feature, dict[str, None]] = {}  # switches, then blocks
    for name, key in table().items():
        if key.feature is not None:
            names = features.setdefault(key.feature, {})
            names |= dict.fromkeys(([] if key.off is None else [name]) + ([f"{key.block}.*"] if key.block else []))
        elif key.fate is Fate.HONORED:
            block, _, last = name.rpartition(".")
            blocks.setdefault(f"`{block}`" if block else "", []).append(last)
        else:
            reasons.setdefault(key.reason, []).append(name)
    refused = {
        f"{feature.what}: {feature.remedy}": sorted(names, key=lambda name: name.endswith(".*"))
        for feature, names in features.items()
    }
    return "\n\n".join(
        [
            markdown("Honored", ("block", "keys"), ((block, _names(names)) for block, names in blocks.items())),
            markdown("Without effect (logged once)", ("keys", "why"), ((_names(names), why) for why, names in reasons.items())),
            markdown(
                "Refused if they enable a feature that is not built",
                ("keys", "feature and alternative"),
                ((_names(names), why) for why, names in refused.items()),
            ),
        ]
    )


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def markdown(title: str, head: tuple[str, str], rows: Iterable[tuple[str, str]]) -> str:
    lines = [f"### {title}", "", f"| {head[0]} | {head[1]} |", "|---|---|", *(f"| {left} | {right} |" for left, right in rows)]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(tables() + "\n")

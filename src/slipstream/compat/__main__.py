"""`python -m slipstream.compat` prints the tables of docs/COMING_FROM_DEEPSPEED.md and of names in docs/DEEPSPEED_KEYS.md."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

from slipstream.compat.constants import TABLES
from slipstream.compat.names import ALIASES, DIFFERS, MISSING, MISSING_METHODS, REFUSED_THERE, SERVED


def tables() -> str:
    served = ((f"`{module}`", _names(" ".join(homes.values()).split())) for module, homes in SERVED.items())
    constants = ((f"`{module}`", f"{len(table)}, such as {_names(list(table)[:3])}") for module, table in TABLES.items())
    also = ((f"`{alias}`", f"`{module}`") for alias, module in ALIASES.items())
    missing = (
        (f"`{module}`: {_names(n for n in names if n != '*') or 'all other names, and the modules below'}", why)
        for module, reasons in MISSING.items()
        for why, names in _by_reason(reasons)
    )
    methods = ((_names(f"engine.{name}" for name in names), why) for why, names in _by_reason(MISSING_METHODS))
    return "\n\n".join(
        [
            _table("Served", ("module", "names"), served),
            _table("Constants (a constant exists even where its feature is missing)", ("module", "how many"), constants),
            _table("The same under another path", ("module", "is"), also),
            _table("Missing: using one says why", ("name", "why, and what to do"), [*missing, *methods]),
        ]
    )


def differences() -> str:
    return "\n\n".join(
        [
            _table("What behaves differently", ("name", "how"), ((f"`{name}`", how) for name, how in DIFFERS.items())),
            _table("What DeepSpeed refuses", ("call or config", "here"), REFUSED_THERE.items()),
        ]
    )


def _by_reason(reasons: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    names_of: dict[str, list[str]] = {}
    for name, why in reasons.items():
        names_of.setdefault(why, []).append(name)
    return list(names_of.items())


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _table(title: str, head: tuple[str, str], rows: Iterable[tuple[str, str]]) -> str:
    lines = [f"### {title}", "", f"| {head[0]} | {head[1]} |", "|---|---|", *(f"| {left} | {right} |" for left, right in rows)]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(f"{differences()}\n\n{tables()}\n")

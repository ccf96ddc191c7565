"""`python -m slipstream.compat` prints the tables of docs/COMING_FROM_DEEPSPEED.md and of names in docs/DEEPSPEED_KEYS.md."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

from slipstream.compat.constants import TABLES
from slipstream.compat.names import ALIASES, DIFFERS, MISSING, MISSING_METHODS, REFUSED_THERE, SERVED
from slipstream.config.__main__ import markdown


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
            markdown("Served", ("module", "names"), served),
            markdown("Constants (a constant exists even where its feature is missing)", ("module", "how many"), constants),
            markdown("The same under another path", ("module", "is"), also),
            markdown("Missing: using one says why", ("name", "why, and what to do"), [*missing, *methods]),
        ]
    )


def differences() -> str:
    return "\n\n".join(
        [
            markdown("What behaves differently", ("name", "how"), ((f"`{name}`", how) for name, how in DIFFERS.items())),
            markdown("What DeepSpeed refuses", ("call or config", "here"), REFUSED_THERE.items()),
        ]
    )


def _by_reason(reasons: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    names_of: dict[str, list[str]] = {}
    for name, why in reasons.items():
        names_of.setdefault(why, []).append(name)
    return list(names_of.items())


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


if __name__ == "__main__":
    sys.stdout.write(f"{differences()}\n\n{tables()}\n")

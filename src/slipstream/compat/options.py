"""Options of a call by another library's names: those that are honored, that ask for a missing feature, or that have no effect."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from slipstream.inference.generate import suggestion

logger = logging.getLogger(__name__)

# option of a missing feature -> the values that ask for nothing, and what to do
Refused = Mapping[str, tuple[tuple[Any, ...], str]]
_REQUESTS = ("ep_size", "tp_size", "enabled", "stage")  # the key of a block that holds the requested value


def read_options(
    call: str,
    names: Iterable[str],
    sources: Iterable[Mapping[str, Any]],
    *,
    refused: Refused | None = None,
    idle: Mapping[str, str] | None = None,
    aliases: Mapping[str, str] | None = None,
    unknown: type[ValueError] = ValueError,
) -> dict[str, Any]:
    """The options of all sources, by `names`; these go before the others. One of `idle`, option -> why, is logged.

    Raises `unknown` for an option that there is not, ValueError for one of `refused` and for two values of one.
    """
    refused, idle, aliases, names = refused or {}, idle or {}, aliases or {}, [*names]
    options: dict[str, Any] = {}
    for word, value in (item for source in sources for item in source.items()):
        name = aliases.get(word, word)
        if name in names:
            if options.setdefault(name, value) != value:
                raise ValueError(f"{name} is given twice, as {options[name]!r:.200} and as {value!r:.200}; give it once")
        elif name in refused:
            off, why = refused[name]
            block = value if isinstance(value, Mapping) else {}
            requested = next((block[key] for key in _REQUESTS if key in block), value)
            if getattr(requested, "value", requested) not in off:
                raise ValueError(f"{word} is {value!r:.200}: {why}")
        elif name in idle:
            logger.warning("%s: %s has no effect here: %s", call, word, idle[name])
        else:
            raise unknown(f"{call} has no option {word!r}; {suggestion(word, [*names, *aliases, *refused])}")
    return options

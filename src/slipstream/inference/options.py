"""Options of a call, by their names here and in other libraries: honored, refused (a missing feature), or without effect."""

from __future__ import annotations

import difflib
import logging
import os
import sys
from collections.abc import Iterable, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any

from slipstream.config.huggingface import read_object

logger = logging.getLogger(__name__)

# option of a missing feature -> (values that do not request it, what to do instead)
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
    unknown: type[Exception] = ValueError,
) -> dict[str, Any]:
    """Merge the options of all sources that are not None; those in `names` come first. `idle`: option -> the reason that it has no
    effect; those that are set are logged once per reason.

    Raises `unknown` for an unknown option, and ValueError for one of `refused` or for an option with two values.
    """
    refused, idle, aliases, names = refused or {}, idle or {}, aliases or {}, [*names]
    options: dict[str, Any] = {}
    without_effect: dict[str, dict[str, None]] = {}
    for word, value in (item for source in sources for item in source.items()):
        name = aliases.get(word, word)
        if name in names:
            if value is not None and options.setdefault(name, value) != value:
                raise ValueError(f"{name} is given twice, as {options[name]!r:.200} and as {value!r:.200}; give it once")
        elif name in refused:
            off, why = refused[name]
            block = value if isinstance(value, Mapping) else {}
            requested = next((block[key] for key in _REQUESTS if key in block), value)
            if getattr(requested, "value", requested) not in off:
                raise ValueError(f"{word}={value!r:.200} is not served: {why}")
        elif name not in idle:
            raise unknown(f"{call} has no option {word!r}; {suggestion(word, [*names, *aliases, *refused])}")
        elif value:
            without_effect.setdefault(idle[name], {})[word] = None
    for why, words in without_effect.items():
        logger.warning("%s: %s %s no effect here: %s", call, ", ".join(words), "has" if len(words) == 1 else "have", why)
    return options


def read_config(config: Mapping[str, Any] | str | os.PathLike[str]) -> Mapping[str, Any]:
    """Return the options of a dictionary or of a JSON file. Raises ValueError."""
    return config if isinstance(config, Mapping) else read_object(Path(config))


def check_int(name: str, value: Any, least: int, most: int = sys.maxsize) -> int:
    """Check an integer (numpy's included) and return it as an int. Raises TypeError or ValueError."""
    bounds = f"of {least} or more" if most == sys.maxsize else f"from {least} to {most}"
    message = f"{name} is {value!r:.200}; it must be a whole number {bounds}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(message)
    if not least <= int(value) <= most:
        raise ValueError(message)
    return int(value)


def suggestion(word: str, names: Iterable[str]) -> str:
    """The end of an error message: the known name closest to `word`, or all names."""
    names = sorted(names)
    match = difflib.get_close_matches(word, names, n=1)
    return f"did you mean {match[0]}?" if match else f"it has {', '.join(names)}"

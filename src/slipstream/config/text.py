"""Parse config text (JSON, or JSON with comments) and format values for messages.

DeepSpeed reads HJSON. Its common extensions are accepted if plain JSON fails: comments (`//`, `#`, `/* */`) and trailing
commas. All functions need linear time and a bounded stack for any input.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

MOST_LEVELS = 50  # of nested objects; the deepest schema key has 6

# An unterminated string or comment extends to the end of the text, so that no part is scanned twice.
_STRING = r'"(?:[^"\\]|\\.?)*+(?:"|\Z)'
_COMMENT = re.compile(rf"{_STRING}|//[^\n]*|#[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL)
_COMMA = re.compile(rf"{_STRING}|,(?=\s*[}}\]])", re.DOTALL)

_short = reprlib.Repr()
_short.maxlevel, _short.maxdict, _short.maxlist, _short.maxstring, _short.maxlong, _short.maxother = 3, 4, 6, 80, 40, 80


class Read(NamedTuple):
    value: Any
    tolerated: bool  # the text is not plain JSON


def read_json(text: str, where: str) -> Read:
    """Parse a JSON text. `where` names it in errors.

    Raises ValueError if the text is not JSON even without comments and trailing commas, if an object has a duplicate key, or if
    values are nested more than `MOST_LEVELS` deep.
    """
    try:
        return Read(_loads(text, where), tolerated=False)
    except json.JSONDecodeError as error:
        plain = _COMMA.sub(_blank, _COMMENT.sub(_blank, text))
        if plain == text:
            raise ValueError(f"{where} is not JSON: {error}") from None
    try:
        return Read(_loads(plain, where), tolerated=True)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON, nor JSON with comments: {error}") from None


def check_depth(value: Any, where: str) -> None:
    """Raise ValueError if `value` is nested deeper than any config, or contains itself."""
    level = [value]
    for _ in range(MOST_LEVELS):
        inside = (item for outer in level for item in (outer.values() if isinstance(outer, Mapping) else outer))
        level = list({id(item): item for item in inside if isinstance(item, (Mapping, list, tuple))}.values())
        if not level:
            return
    raise ValueError(
        f"{where} is nested more than {MOST_LEVELS} levels deep; config keys need at most 6, so remove the inner levels"
    )


def shown(value: Any) -> str:
    """Return `repr(value)`, shortened to one line."""
    return _short.repr(value)


def _blank(match: re.Match[str]) -> str:
    """Keep strings, and replace comments and commas by spaces, so that line and column in errors stay correct."""
    text = match[0]
    return text if text.startswith('"') else re.sub(r"[^\n]", " ", text)


def _loads(text: str, where: str) -> Any:
    try:
        value = json.loads(text, object_pairs_hook=lambda pairs: _once(pairs, where), parse_int=_integer)
    except RecursionError:
        raise ValueError(f"{where} is nested more than {MOST_LEVELS} levels deep; remove the inner levels") from None
    if isinstance(value, (dict, list)):
        check_depth(value, where)
    return value


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) < 400 else float(digits)  # infinity, which the key's type then rejects


def _once(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    twice = sorted(name for name, times in Counter(name for name, _ in pairs).items() if times > 1 and not name.startswith("_"))
    if twice:
        more = f" and {len(twice) - 5} more" if len(twice) > 5 else ""
        raise ValueError(f"{where} has {', '.join(map(shown, twice[:5]))}{more} twice in one object; keep one of each")
    return dict(pairs)

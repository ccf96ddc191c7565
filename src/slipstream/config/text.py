"""A config as text: JSON, or JSON with comments; and values of a config, short enough for a message.

DeepSpeed reads HJSON. Of that, people use comments (`//`, `#`, `/* */`) and a comma after the last item: both are accepted
where plain JSON fails. Everything here takes time linear in the text and a bounded stack, whatever the text is.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

MOST_LEVELS = 50  # of objects in objects; the deepest key of the schema has 6

# A string or a comment without its end goes on to the end of the text, so that no part of the text is scanned twice.
_STRING = r'"(?:[^"\\]|\\.?)*+(?:"|\Z)'
_COMMENT = re.compile(rf"{_STRING}|//[^\n]*|#[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL)
_COMMA = re.compile(rf"{_STRING}|,(?=\s*[}}\]])", re.DOTALL)

_short = reprlib.Repr()
_short.maxlevel, _short.maxdict, _short.maxlist, _short.maxstring, _short.maxlong, _short.maxother = 3, 4, 6, 80, 40, 80


class Read(NamedTuple):
    value: Any
    tolerated: bool  # the text is not plain JSON


def read_json(text: str, where: str) -> Read:
    """The value of a JSON text. `where` names it in errors.

    Raises ValueError for what is not JSON even without comments and commas after last items, for a key that stands twice in one
    object, and for values nested more than `MOST_LEVELS` deep.
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
    """Raise ValueError where `value` is nested deeper than any config, or contains itself."""
    level = [value]
    for _ in range(MOST_LEVELS):
        inside = (item for outer in level for item in (outer.values() if isinstance(outer, Mapping) else outer))
        level = list({id(item): item for item in inside if isinstance(item, (Mapping, list, tuple))}.values())
        if not level:
            return
    raise ValueError(
        f"{where} is nested more than {MOST_LEVELS} deep; the keys of a config need 6 levels, so remove the inner ones"
    )


def shown(value: Any) -> str:
    """`repr` of a value, cut to a line."""
    return _short.repr(value)


def _blank(match: re.Match[str]) -> str:
    """A string as it is; spaces for anything else, so that an error's line and column stay true."""
    found = match[0]
    return found if found.startswith('"') else re.sub(r"[^\n]", " ", found)


def _loads(text: str, where: str) -> Any:
    try:
        value = json.loads(text, object_pairs_hook=lambda pairs: _once(pairs, where), parse_int=_integer)
    except RecursionError:
        raise ValueError(f"{where} is nested more than {MOST_LEVELS} deep; remove the inner levels") from None
    if isinstance(value, (dict, list)):
        check_depth(value, where)
    return value


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) < 400 else float(digits)  # infinity, which the key's type refuses by name


def _once(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    twice = sorted(name for name, times in Counter(name for name, _ in pairs).items() if times > 1 and not name.startswith("_"))
    if twice:
        more = f" and {len(twice) - 5} more" if len(twice) > 5 else ""
        raise ValueError(f"{where} has {', '.join(map(shown, twice[:5]))}{more} twice in one object; keep one of them")
    return dict(pairs)

"""The fate of every JSON key: honored, without effect, or refused. The schema's fields state it.

- HONORED: the value changes what Slipstream does; tests/unit/test_config_keys.py names the test that shows it.
- NO_EFFECT: the key is valid but has nothing to control here. One warning names all such keys that the user set.
- REFUSED: the key belongs to a feature that is not built yet. A value that enables the feature raises an error, because
  silently training without it would be worse; a value that leaves it off is accepted.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from slipstream.config.plan import sentences, summary
from slipstream.config.text import shown

if TYPE_CHECKING:
    from slipstream.config.parse import KeyValue

logger = logging.getLogger(__name__)


class Fate(enum.Enum):
    HONORED = "honored"
    NO_EFFECT = "no effect"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Feature:
    """A DeepSpeed feature that is not built yet, and what to do without it."""

    what: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key of the schema. A field is annotated with its fate; `schema.walk` adds what follows from its position."""

    fate: Fate = Fate.REFUSED
    meaning: str = ""  # HONORED: one sentence, with the unit
    reason: str = ""  # NO_EFFECT
    feature: Feature | None = None  # REFUSED
    off: tuple[Any, ...] | None = None  # REFUSED: values that do not enable the feature; None: it only configures the feature
    name: str = ""  # dotted, with * for the items of a list or mapping
    block: str = ""  # REFUSED: the block that the feature belongs to; "" if the field names the feature
    annotation: Any = None
    default: Any = None


@cache
def table() -> Mapping[str, Key]:
    """Return every key of the schema by name."""
    from slipstream.config.schema import walk  # pydantic is slow to import

    return MappingProxyType({key.name: key for key in walk()})


def of_fate(fate: Fate) -> dict[str, Key]:
    return {name: key for name, key in table().items() if key.fate is fate}


def refuse(leaves: Iterable[KeyValue]) -> None:
    """Raise one ValueError that names every enabled feature that is not built yet."""
    refusals = []
    for leaf in leaves:
        key = table()[leaf.key]
        if key.feature is not None and key.off is not None and leaf.value not in key.off:
            asked = f"{leaf.path} = {shown(leaf.value)} asks for {key.feature.what}"
            refusals.append(f"{asked}, which is not built yet; {key.feature.remedy}")
    if refusals:
        head = "" if len(refusals) == 1 else "the config asks for features that are not built yet:\n- "
        raise ValueError(head + "\n- ".join(refusals))


def without_effect(leaves: Iterable[KeyValue]) -> dict[str, str]:
    """Return the keys that the user set without effect, with the reasons. The config must have passed `refuse`."""
    idle = {}
    for leaf in leaves:
        key = table()[leaf.key]
        if leaf.given and leaf.value != key.default and key.fate is Fate.NO_EFFECT:
            idle[leaf.path] = key.reason
    return idle


def say(notes: Iterable[str]) -> None:
    """Log the notes of a plan. `initialize` calls it once, on rank 0."""
    for note in notes:
        logger.warning("config: %s", note)


def say_idle(idle: Mapping[str, str]) -> None:
    """Log the names of the keys without effect in one line, and the reasons for debugging."""
    if idle:
        logger.warning("config: %s", summary(idle))
    for sentence in sentences(idle):
        logger.debug("config: %s", sentence)

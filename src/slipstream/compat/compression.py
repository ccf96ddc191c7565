"""`deepspeed.compression.helper`: attributes by their paths."""

from __future__ import annotations

import operator
from typing import Any


def recursive_getattr(model: Any, module_name: str) -> Any:
    """The attribute at a path such as "encoder.layer.0"."""
    return operator.attrgetter(module_name)(model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Set the attribute at a path."""
    parent, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, name, module)

"""Pydantic types of the values of JSON keys, tolerant of the forms that users and launchers write.

Numbers may be strings (YAML parses 1e-5 as one), sizes may be floats (0.9 * hidden * hidden), "never" may be infinity, and dtypes
have several spellings. Every key of a type accepts the same forms.
"""

from __future__ import annotations

import math
import sys
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

MIB = 1 << 20

_DTYPES = {
    "fp32": ("fp32", "float32", "float", "torch.float32"),
    "fp16": ("fp16", "float16", "half", "torch.float16"),
    "bf16": ("bf16", "bfloat16", "bfloat", "torch.bfloat16"),
}


def numeric(value: Any) -> Any:
    """Convert numbers written as strings. Booleans are not numbers."""
    if isinstance(value, bool):
        raise ValueError("must be a number")
    if isinstance(value, str):
        try:
            return float(value) if set(value) & set(".eEnN") else int(value)
        except ValueError:
            raise ValueError("must be a number") from None
    return value


def _integral(value: Any) -> Any:
    value = numeric(value)
    if isinstance(value, float) and not value.is_integer():
        raise ValueError("must be a whole number")
    return value


def _stage(value: Any) -> Any:
    value = _integral(value)
    return int(value) if isinstance(value, float) else value


def _truncated(value: Any) -> Any:
    """Truncate a computed size (0.9 * hidden * hidden); infinity means no limit."""
    value = numeric(value)
    if isinstance(value, float):
        return sys.maxsize if math.isinf(value) and value > 0 else int(value) if math.isfinite(value) else value
    return value


def _interval(value: Any) -> Any:
    """Steps between two reports; infinity and 0 mean never."""
    value = numeric(value)
    return None if value == 0 or value == math.inf else _integral(value)


def _dtype(value: Any) -> Any:
    text = str(value).lower()
    for name, spellings in _DTYPES.items():
        if text in spellings:
            return name
    raise ValueError(f"must be one of {', '.join(_DTYPES)}")


def _dtype_or_none(value: Any) -> Any:
    return None if str(value).lower() == "none" else _dtype(value)


def lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Int = Annotated[int, BeforeValidator(_integral), Field(ge=-sys.maxsize, le=sys.maxsize)]
Seed = Annotated[int, BeforeValidator(_integral), Field(ge=0, le=1 << 63)]
Stage = Annotated[Literal[0, 1, 2, 3], BeforeValidator(_stage)]
Count = Annotated[int, BeforeValidator(_integral), Field(ge=1, le=sys.maxsize)]
Size = Annotated[int, BeforeValidator(_truncated), Field(ge=0, le=sys.maxsize)]
Real = Annotated[float, BeforeValidator(numeric), Field(allow_inf_nan=False)]
Positive = Annotated[float, BeforeValidator(numeric), Field(gt=0, allow_inf_nan=False)]
Scale = Annotated[float, BeforeValidator(numeric), Field(le=2.0**64, allow_inf_nan=False)]  # loss scales: at most 2**64
Fraction = Annotated[float, BeforeValidator(numeric), Field(ge=0, le=1)]
Interval = Annotated[Annotated[int, Field(ge=1)] | None, BeforeValidator(_interval)]
Dtype = Annotated[Literal["fp32", "fp16", "bf16"], BeforeValidator(_dtype)]
DtypeOrNone = Annotated[Literal["fp32", "fp16", "bf16"] | None, BeforeValidator(_dtype_or_none)]
Device = Annotated[Literal["none", "cpu", "nvme"], BeforeValidator(lower)]
Names = Annotated[list[str], BeforeValidator(_one_or_many)]


class Block(BaseModel):
    """A JSON object. Keys that are not fields are rejected."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), arbitrary_types_allowed=True)

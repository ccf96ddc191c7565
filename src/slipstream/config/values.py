"""Fields of the schema: value types, which accept the forms that users and launchers write, and fates (see keys.py).

Numbers may be strings (YAML parses 1e-5 as one), sizes may be floats (0.9 * hidden * hidden), "never" may be infinity, and dtypes
have several spellings. All keys of a type accept the same forms.
"""

from __future__ import annotations

import math
import sys
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from slipstream.config.keys import Fate, Feature, Key

T = TypeVar("T")
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


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("must be a finite number")
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


def _wire_dtype(value: Any) -> Any:
    text = str(value).lower()
    try:
        return text if text in ("int8", "int4") else _dtype_or_none(value)
    except ValueError as error:
        raise ValueError(f"{error}, int8, int4") from None


Int = Annotated[int, BeforeValidator(_integral), Field(ge=-sys.maxsize, le=sys.maxsize)]
Seed = Annotated[int, BeforeValidator(_integral), Field(ge=0, le=1 << 63)]
Stage = Annotated[Literal[0, 1, 2, 3], BeforeValidator(_stage)]
Bits = Annotated[Literal[4, 8], BeforeValidator(_stage)]
Even = Annotated[int, BeforeValidator(_integral), Field(ge=2, le=sys.maxsize, multiple_of=2)]
Count = Annotated[int, BeforeValidator(_integral), Field(ge=1, le=sys.maxsize)]
Size = Annotated[int, BeforeValidator(_truncated), Field(ge=0, le=sys.maxsize)]
Real = Annotated[float, BeforeValidator(numeric), Field(allow_inf_nan=False)]
Number = Annotated[int | float, BeforeValidator(numeric), AfterValidator(_finite)]  # an integer stays an integer
Positive = Annotated[float, BeforeValidator(numeric), Field(gt=0, allow_inf_nan=False)]
Scale = Annotated[float, BeforeValidator(numeric), Field(le=2.0**64, allow_inf_nan=False)]  # loss scales: at most 2**64
Fraction = Annotated[float, BeforeValidator(numeric), Field(ge=0, le=1)]
Interval = Annotated[Annotated[int, Field(ge=1)] | None, BeforeValidator(_interval)]
Dtype = Annotated[Literal["fp32", "fp16", "bf16"], BeforeValidator(_dtype)]
WireDtype = Annotated[Literal["fp32", "fp16", "bf16", "int8", "int4"] | None, BeforeValidator(_wire_dtype)]
DtypeOrNone = Annotated[Literal["fp32", "fp16", "bf16"] | None, BeforeValidator(_dtype_or_none)]
Word = Annotated[
    T, BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value)
]  # for a literal type, in any case
Device = Word[Literal["none", "cpu", "nvme"]]
Names = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]


class Block(BaseModel):
    """A JSON object. Keys that are not fields are rejected."""

    feature: ClassVar[Feature | None] = None  # the feature of keys without a fate, here and in inner blocks

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), arbitrary_types_allowed=True)

    def __hash__(self) -> int:
        return hash(type(self))  # pydantic deep-copies defaults without a hash: half of the parsing time


def honored(default: Any, meaning: str) -> Any:
    """A key that changes what Slipstream does. meaning: for docs/CONFIG.md."""
    return _field(default, Key(fate=Fate.HONORED, meaning=meaning))


def no_effect(default: Any, reason: str) -> Any:
    """A key that has nothing to control here."""
    return _field(default, Key(fate=Fate.NO_EFFECT, reason=reason))


def switch(default: Any = False, feature: Feature | None = None, *, off: tuple[Any, ...] = (False, None)) -> Any:
    """A key that enables a feature that is not built yet (default: the block's). off: values that do not enable it."""
    return _field(default, Key(feature=feature, off=off))


def _field(default: Any, key: Key) -> Any:
    extra: Any = {"key": key}
    return Field(default, json_schema_extra=extra)

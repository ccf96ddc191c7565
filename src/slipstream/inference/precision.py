"""In which precision a model is opened, by name and, of a quantized file, by rule.

[Note: The rule] Blocks of few bits are a form to ship a model in. Computed as they lie, beside activations of 8 bits, they cost a
small model answers that it knows, so a file of such blocks that fits easily is opened wider: in bf16 where that is fast, else in
int8. "stored" keeps the file's 4-bit blocks; so does a model that does not fit easily.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from slipstream.inference.runner import free_memory
from slipstream.ops import cpu

FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QUANTIZED = ("int8", "int4")
DTYPES = ("auto", "stored", *FLOATS, *QUANTIZED)
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_LONG = {"float": "float32", "half": "float16", **{short: long for long, short in _SHORT.items()}}

_EASILY = {"cpu": 0.25, "cuda": 0.5}  # of free memory; on a CPU the matrices are there twice while they are packed
_SMALL = 512 << 20  # bytes; so few are read fast enough in bf16 on any CPU, and rounding costs a small model most


class Opening(NamedTuple):
    """How a file is opened."""

    kind: str  # of DTYPES, but not "auto"
    why: str = ""  # for people; "": there was no choice


def named(given: torch.dtype | str | None) -> str:
    """A dtype, as one of DTYPES, from torch's name for it or the short one. Raises ValueError."""
    word = "auto" if given is None else str(given).removeprefix("torch.").lower()
    word = _LONG.get(word, word)
    if word not in DTYPES:
        raise ValueError(f"dtype is {given!r}; it has to be {', '.join(map(short, DTYPES[2:]))}, stored or auto")
    return word


def short(kind: str) -> str:
    """bf16 for bfloat16."""
    return _SHORT.get(kind, kind)


def chosen(num_weights: int, has_4bit: bool, device: torch.device) -> Opening:
    """For a file of quantized blocks of so many weights in all. See [Note: The rule]."""
    free = free_memory(device)
    wide, room = 2 * num_weights, free * _EASILY[device.type]
    fast = device.type == "cuda" or cpu.isa() in ("avx512bf16", "")  # "": torch multiplies
    said = f"{_gb(wide)} in bf16, {_gb(free)} free"
    if wide <= room and (fast or wide <= _SMALL):
        kept = "; dtype stored keeps the file's 4-bit blocks" if has_4bit else ""
        return Opening("bfloat16", f"{said}{kept}")
    if wide / 2 <= room or not has_4bit:
        slow = "; this CPU has no bf16 instructions" if wide <= room else ""
        return Opening("int8", f"{said}{slow}")
    return Opening("stored", said)


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2g} GB"

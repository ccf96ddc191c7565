"""The precision in which a model is opened: by name or, for a quantized file, by rule.

[Note: The rule] Blocks of few bits are a format for distribution. Computing with them directly, with activations in 8 bits, lowers
the quality of small models. So if such a file fits easily, it is opened in bf16 if that is fast, else in int8. The file's 4-bit
blocks are kept for "stored", and if the model does not fit easily.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from slipstream.inference.config import TransformerConfig
from slipstream.inference.runner import free_memory
from slipstream.ops import cpu

FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QUANTIZED = ("int8", "int4")
DTYPES = ("auto", "stored", *FLOATS, *QUANTIZED)
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_LONG = {"float": "float32", "half": "float16", **{short: long for long, short in _SHORT.items()}}

_EASILY = {"cpu": 0.25, "cuda": 0.5}  # of free memory; on a CPU, packing needs the matrices twice
_SMALL = 512 << 20  # bytes; small models are fast enough in bf16 on any CPU, and lose most by rounding


class Opening(NamedTuple):
    """The precision of a model and the reason for it, and the part of the model to read."""

    kind: str  # of DTYPES, but not "auto"
    why: str = ""  # for the log; "" if it was requested
    group: int = 32  # weights per scale of int4
    cut: Callable[[TransformerConfig], TransformerConfig] | None = None  # to this process's part; None: all
    by_layer: bool = False  # a layer is only read when it is packed
    devices: int = 1  # number of devices that hold the model together


def parse_dtype(dtype: torch.dtype | str | None) -> str:
    """The entry of DTYPES for a torch.dtype, its name or a short name. Raises ValueError."""
    word = "auto" if dtype is None else str(dtype).removeprefix("torch.").lower()
    word = _LONG.get(word, word)
    if word not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; it must be {', '.join(map(short, DTYPES[2:]))}, stored or auto")
    return word


def short(kind: str) -> str:
    return _SHORT.get(kind, kind)


def choose(num_weights: int, keeps: bool, device: torch.device) -> tuple[str, str]:
    """The kind in which to open a file of quantized blocks ([Note: The rule]), and why. `keeps`: most blocks can be kept."""
    free = free_memory(device)
    wide, limit = 2 * num_weights, free * _EASILY[device.type]
    fast = device.type == "cuda" or cpu.isa() in ("avx512bf16", "avx512vnni", "")  # "": torch computes
    sizes = f"{_gb(wide)} in bf16, {_gb(free)} free"
    if wide <= limit and (fast or wide <= _SMALL):
        hint = "; dtype stored keeps the file's blocks" if keeps else ""
        return "bfloat16", f"{sizes}{hint}"
    if wide / 2 <= limit or not keeps:
        slow = "; this CPU multiplies bf16 slowly" if wide <= limit else ""
        return "int8", f"{sizes}{slow}"
    return "stored", sizes


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2g} GB"

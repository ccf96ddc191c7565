"""Kernels for the hot loops, each with a torch twin: rank sums, one-pass Adam, streaming copies, quantisation, words.

`cpu.py` checks arguments and chooses, `reference.py` holds the twins, `build.py` compiles and finds the C
library (`csrc/`), `words.py` does atomics and futexes. Importing compiles and loads nothing; the first call
does. With SLIPSTREAM_NATIVE=0, or without a compiler, the twins serve; `report()` says which and why.
"""

from slipstream.ops import words
from slipstream.ops.cpu import (
    OpReport,
    adamw,
    copy_stream,
    dequantise_int4,
    dequantise_int8,
    quantise_int4,
    quantise_int8,
    report,
    sum_ranks,
)
from slipstream.ops.reference import Partial

__all__ = [
    "OpReport",
    "Partial",
    "adamw",
    "copy_stream",
    "dequantise_int4",
    "dequantise_int8",
    "quantise_int4",
    "quantise_int8",
    "report",
    "sum_ranks",
    "words",
]

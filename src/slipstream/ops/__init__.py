"""Kernels for the hot loops: sums over ranks, fused optimizers, streaming copies, quantization, atomics. Each has a torch twin.

`cpu.py` and `optim.py` check arguments and dispatch, `reference.py` and `optim_reference.py` hold the torch twins, `build.py`
compiles and loads the C library (`csrc/`), `words.py` does atomics and futexes. Importing compiles and loads nothing; the first
call does. With SLIPSTREAM_NATIVE=0, or without a compiler, the twins run. `report()` lists the implementations and the reason.
"""

from slipstream.ops import words
from slipstream.ops.cpu import copy_stream, dequantize_int4, dequantize_int8, quantize_int4, quantize_int8, report, sum_ranks
from slipstream.ops.optim import adagrad, adamw, lamb_apply, lamb_update, lion, sgd
from slipstream.ops.optim_reference import Blocks, Stochastic
from slipstream.ops.reference import Partial

__all__ = [
    "Blocks",
    "Partial",
    "Stochastic",
    "adagrad",
    "adamw",
    "copy_stream",
    "dequantize_int4",
    "dequantize_int8",
    "lamb_apply",
    "lamb_update",
    "lion",
    "quantize_int4",
    "quantize_int8",
    "report",
    "sgd",
    "sum_ranks",
    "words",
]

"""Products with one matrix, x W^T + bias, by the native engine's kernels (csrc/decoder_products.h), and their torch twin.

A row of a native product has the same bits whatever the other rows are and however many threads compute it. int8 and int4 round x
to 8 bits, with a scale per 32 features of a row; sums are exact within these and in fp32 over them.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.ops import build, gpu
from slipstream.ops.matrices import Codes, Matrix, MatrixRecord, dequantize, round_activations
from slipstream.ops.team import MAX_THREADS, Team, openmp

_ALONE = 1 << 20  # multiplications; for fewer, waking another thread costs more than it saves
_SLICE = {"cpu": 1 << 19, "cuda": 1 << 24}  # weights dequantized at once: as many as caches hold, or as occupy a GPU
_FEW = 128  # rows of one tile of Triton's kernel, which reads codes once; for more, cuBLAS multiplies dequantized weights

_pointer, _long, _int = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class _Team:
    """A team for products, one at a time, whose tasks run on torch's OpenMP threads if possible (`team.openmp`)."""

    def __init__(self, threads: int, process: int) -> None:
        """`threads`: torch's number. With fewer, OpenMP would end its other threads at each product, and restart them."""
        self.run = build.function("slipstream_linear", _int, *[_pointer] * 5, _long, _long)
        self.team = Team(min(threads, len(os.sched_getaffinity(process)), MAX_THREADS))
        self.lock = threading.Lock()
        at = openmp("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
        if at and self.team.threads == threads:
            build.function("slipstream_team_join", None, *[_pointer] * 4)(self.team.handle, *at)


@functools.cache
def _team(threads: int, process: int) -> _Team:
    """The team of process `process`, because a fork may have copied the lock while it was held."""
    return _Team(threads, process)


def linear(x: Tensor, record: MatrixRecord, bias: Tensor | None) -> Tensor:
    """x, fp32 [rows, features] on a CPU, to fp32 [rows, columns] by the native kernels, on as many threads as torch has.

    `record`: with addresses of panels. `bias`: fp32, padded as columns are (`matrices.bias_table`).
    """
    x, (rows, features), columns = x.contiguous(), x.shape, record.num_columns
    y = x.new_empty(rows, columns)
    small = columns * rows * features < _ALONE
    team = _team(1 if small else torch.get_num_threads(), os.getpid())
    bias_at = None if bias is None else bias.data_ptr()
    with team.lock:
        failure = team.run(team.team.handle, ctypes.addressof(record), bias_at, x.data_ptr(), y.data_ptr(), rows, features)
    if failure:
        raise MemoryError(f"no memory for a product of {rows} rows with a matrix {[columns, features]}")
    return y


def linear_by_rows(x: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
    """x [rows, features] to [rows, columns] in x's dtype, for a row-major matrix: by Triton's kernel for few rows on a GPU, else by
    torch, which dequantizes a slice of the matrix at a time. On a CPU, x is rounded as the native kernels round it."""
    if x.is_cuda and 0 < len(x) <= _FEW and gpu.module("linear") is not None:
        return _by_triton(x, matrix, bias)
    wide = x.float() if x.is_cpu else x
    parts = tuple(matrix) if isinstance(matrix, Codes) else (matrix,)
    if x.is_cpu and len(parts) > 1:
        wide = round_activations(wide)
    step = max(1, _SLICE.get(x.device.type, 1 << 24) // max(x.shape[-1], 1))
    slices = zip(*(part.split(step) for part in parts), strict=True)
    floats = (dequantize(type(matrix)(*some) if isinstance(matrix, Codes) else some[0]) for some in slices)
    y = torch.cat([F.linear(wide, part.to(wide.dtype)) for part in floats], -1)
    return (y if bias is None else y + bias).to(x.dtype)


def _by_triton(x: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
    kernels: Any = gpu.module("linear")
    weight, *more = matrix if isinstance(matrix, Codes) else (matrix,)
    scale, low = (*(part.float() for part in more), None, None)[:2]
    slices = kernels.num_slices(len(weight), x.shape[1])
    out = x.new_empty(slices, len(x), len(weight), dtype=torch.float32)
    kernels.linear(x.contiguous(), weight, scale, low, bias, out, slices)
    return out.sum(0).to(x.dtype)

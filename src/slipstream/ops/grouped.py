"""Products of groups of rows with one matrix each, forward and backward, by native kernels (csrc/grouped.c): fp32 and bf16 on
processors with AVX2 or AVX-512. Their twin is one torch product per group (moe/grouped.py).

Matrices are read in place, so a matrix that each update changes needs no packing. All groups are one call, whose threads take parts
of any group. A row's bits depend neither on other rows nor on the number of threads.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from slipstream.ops import build, cpu, pages
from slipstream.ops.team import openmp

_LEAST = 1 << 20  # multiplications; for fewer, another thread costs more than it saves
_COLUMNS = 2048  # per work item; fewer, down to 64, if threads would get less than 4 items each
_ROWS = 288  # maximum per work item, in csrc/grouped.c with AVX-512


class _Matrix(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("start", "group", "row", "column")))


class _GroupedProduct(ctypes.Structure):
    _fields_ = (
        *((name, _Matrix) for name in ("a", "b", "c")),
        *((name, ctypes.c_void_p) for name in ("bias", "starts")),
        *((name, ctypes.c_int64) for name in ("groups", "m", "n", "k", "columns")),
        ("dtype", ctypes.c_int32),
        ("failed", ctypes.c_int32),
        ("next", ctypes.c_int64),
    )


@functools.cache
def _native() -> int:
    """The address of the kernel; 0 without a library."""
    kernel = build.function("slipstream_grouped", None, ctypes.c_void_p)
    return 0 if kernel is None else ctypes.cast(kernel, ctypes.c_void_p).value or 0


@functools.cache
def _parallel(process: int) -> Callable[[int, int, int, int], None] | None:
    """OpenMP's call of a function with an argument on several threads (`team.openmp`), in process `process`."""
    at = openmp("GOMP_parallel")
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    return None if at is None else call(at[0])


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_wide() -> bool:
    return cpu.isa() not in ("", "portable")


def fits(x: Tensor, other: Tensor) -> bool:
    """Whether the kernels support these tensors: fp32 or bf16, on a CPU. Fake tensors count as the tensors they stand for."""
    on_cpu = x.is_cpu and other.is_cpu and x.dtype == other.dtype
    return on_cpu and x.dtype in (torch.float32, torch.bfloat16) and _is_wide()


# Each is one operation for compilers, fake tensors and FLOP counters.


@torch.library.custom_op("slipstream::grouped_rows", mutates_args=())
def grouped_rows(x: Tensor, matrices: Tensor, counts: Sequence[int], bias: Tensor | None = None) -> Tensor:
    """Rows of group g times matrices[g], plus bias[g].

    x [rows, in], sorted by group; matrices [groups, in, out], with any strides; counts: rows of each group; bias [groups, out]. The
    caller has checked that they fit each other. Returns [rows, out]. Raises MemoryError.
    """
    x, matrices = _dense(x), _dense(matrices)
    out = x.new_empty(len(x), matrices.shape[2])
    shape = -1, matrices.shape[2], matrices.shape[1]
    arrays = _of_rows(x), _of_groups(matrices), _of_rows(out)
    _run(arrays, shape, counts, x.numel() * matrices.shape[2], x.dtype, None if bias is None else bias.contiguous())
    return out


@torch.library.custom_op("slipstream::grouped_outer", mutates_args=())
def grouped_outer(a: Tensor, b: Tensor, counts: Sequence[int]) -> Tensor:
    """a[rows of g].T times b[rows of g] for each group g, zeros for a group without rows: the gradient of `grouped_rows`' matrices.

    a [rows, m], b [rows, n], sorted by group. Returns [groups, m, n]. Raises MemoryError.
    """
    a, b = a.contiguous(), b.contiguous()
    out = pages.huge(a.new_empty(len(counts), a.shape[1], b.shape[1]))
    columns = _Matrix(a.data_ptr(), a.stride(0), 0, 1, a.stride(0))
    _run((columns, _of_rows(b), _of_groups(out)), (a.shape[1], b.shape[1], -1), counts, a.numel() * b.shape[1], a.dtype)
    return out


@grouped_rows.register_fake
def _(x: Tensor, matrices: Tensor, counts: Sequence[int], bias: Tensor | None = None) -> Tensor:
    return x.new_empty(x.shape[0], matrices.shape[2])


@grouped_outer.register_fake
def _(a: Tensor, b: Tensor, counts: Sequence[int]) -> Tensor:
    return a.new_empty(len(counts), a.shape[1], b.shape[1])


def _dense(x: Tensor) -> Tensor:
    """x, copied unless its rows or columns are contiguous."""
    return x if 1 in x.stride()[-2:] else x.contiguous()


def _of_rows(x: Tensor) -> _Matrix:
    return _Matrix(x.data_ptr(), x.stride(0), 0, *x.stride())


def _of_groups(x: Tensor) -> _Matrix:
    return _Matrix(x.data_ptr(), 0, *x.stride())


def _run(
    arrays: tuple[_Matrix, _Matrix, _Matrix],
    shape: tuple[int, int, int],
    counts: Sequence[int],
    multiplications: int,
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> None:
    """shape: m, n and k of each group's product, with -1 for the group's rows"""
    m, n, k = shape
    threads = max(1, min(torch.get_num_threads(), multiplications // _LEAST))
    columns, blocks = _COLUMNS, sum(-(-(count if m < 0 else m) // _ROWS) for count in counts)
    while threads > 1 and columns > 64 and blocks * -(-n // columns) < 4 * threads:
        columns //= 2
    starts = (ctypes.c_int64 * (len(counts) + 1))(0, *accumulate(counts))
    bias_at = None if bias is None else bias.data_ptr()
    sizes = len(counts), m, n, k, columns
    product = _GroupedProduct(*arrays, bias_at, ctypes.addressof(starts), *sizes, cpu.DTYPES[dtype])
    kernel, argument, parallel = _native(), ctypes.addressof(product), _parallel(os.getpid())
    if parallel is not None and threads == torch.get_num_threads() > 1:  # for fewer threads, OpenMP would end the others each time
        parallel(kernel, argument, threads, 0)
    else:
        run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(kernel)
        cpu.in_threads(lambda *_: run(argument), threads, threads, least=1, multiple=1)
    if product.failed:
        raise MemoryError(f"no memory for a grouped product: each of {threads} threads needs about 4 MB")

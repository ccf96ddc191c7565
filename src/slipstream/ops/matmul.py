"""fp32 products of torch on CPUs by oneDNN, where the matrix library that torch calls does not use the processor's widest vectors.

MKL computes with AVX2 on processors that are not Intel's. On an EPYC with AVX-512 (family 26) that is 118 GFLOP/s, of 287 that
a core can do; oneDNN, which is a part of torch too, reaches 230 to 270.

[Note: One process, one product] torch's own `mm` and `addmm` are overridden, for the whole process: a product of a forward, of a
backward, of a waiting gradient and of a plain loop beside have the same bits. Replaced layers would differ from all others.
"""

from __future__ import annotations

import functools
import logging
import platform
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_LEAST = 1 << 21  # multiplications: smaller products gain less than the call costs
_MOST_PAD = 64  # rows
_LARGE = 1 << 29  # multiplications: padding them costs as much as a new kernel
_ROWS = 8  # of either matrix; for fewer, MKL reads the other at the rate of memory
_Keys = Any  # torch's set of dispatch keys, which is passed on
_own: dict[str, Any] = {}  # torch's kernels
_installed: list[torch.library.Library] = []


@functools.cache
def gains() -> bool:
    """Whether oneDNN's fp32 products are faster than those of torch's matrix library on this processor, and torch can call them."""
    has_calls = hasattr(torch.library, "get_kernel") and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    wide = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return has_calls and wide and torch.backends.mkl.is_available() and _vendor() != "GenuineIntel"


def _vendor() -> str:
    """The processor's vendor as Linux names it; Intel's where it is not known, so that MKL's choice is kept."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if platform.machine() == "x86_64" and file.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "GenuineIntel")


def use(onednn: bool) -> bool:
    """Let torch compute large fp32 products on CPUs by oneDNN, or by its own choice again; True if oneDNN computes them now.

    For the whole process. Without effect where oneDNN does not gain (`gains`).
    """
    if not onednn:
        for library in _installed:
            library._destroy()
        _installed.clear()
    elif not _installed and gains():
        logger.info("torch's fp32 products on this CPU are computed by oneDNN; slipstream.products: torch leaves them as they are")
        library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch names the kernel that is replaced
            for name, kernel in _KERNELS:
                _own[name] = torch.library.get_kernel(f"aten::{name}", "CPU")  # before it is overridden
                library.impl(name, kernel, "CPU", with_keyset=True, allow_override=True)
        _installed.append(library)
    return bool(_installed)


def _fits(a: Tensor, b: Tensor) -> bool:
    """Whether oneDNN computes the product, and faster."""
    if a.dim() != 2 or b.dim() != 2:  # torch's error
        return False
    (m, k), n = a.shape, b.shape[1]
    return (
        m * n * k >= _LEAST
        and min(m, n) >= _ROWS
        and a.dtype is torch.float32
        and b.dtype is torch.float32
        and k == b.shape[0]
        and _is_dense(a)
        and _is_dense(b)
    )


def _is_dense(a: Tensor) -> bool:
    """Whether rows, or columns, are without gaps inside, and none overlaps another."""
    (rows, columns), (down, right) = a.shape, a.stride()
    return (right == 1 and down >= columns) or (down == 1 and right >= rows)


def _times(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """[Note: New shapes] oneDNN compiles a kernel for each shape, in 0.75 ms, and keeps 1,024. Rows of experts, and of texts of any
    length, are others in each step, so they are padded with zeros to one of few numbers, by an eighth at most: eight numbers from a
    power of 2 to the next, and multiples of 64 from 512. They are the rows of `a`, or the terms of the sums if `a` is the transpose
    of a matrix of rows, as in the gradient of a weight; features stay as they are. A product of padded rows is a view of the rows
    that count: `torch.save` writes the others, too, unless it is given a clone."""
    if len(a) * b.numel() >= _LARGE:
        return _linear(a, b, bias)
    if a.stride(1) != 1:
        return _linear(_padded(a.t()).t(), _padded(b), bias)
    return _linear(_padded(a), b, bias)[: len(a)]


def _padded(x: Tensor) -> Tensor:
    """With rows of zeros behind, up to a multiple of what grows with their number."""
    pad = -len(x) % min(_MOST_PAD, 1 << max(0, len(x).bit_length() - 4))
    if pad == 0:
        return x
    out = x.new_zeros(len(x) + pad, x.shape[1])
    out[: len(x)] = x
    return out


def _linear(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(a, b.t(), bias, "none", [], "")
    return product


def _mm(keys: _Keys, a: Tensor, b: Tensor) -> Any:
    if _fits(a, b):
        return _times(a, b)
    return _own["mm"].call_boxed(keys, a, b)


def _mm_into(keys: _Keys, a: Tensor, b: Tensor, *, out: Tensor) -> Any:
    if _fits(a, b) and _takes(out, a, b):
        return out.copy_(_times(a, b))
    return _own["mm.out"].call_boxed(keys, a, b, out=out)


def _takes(out: Tensor, a: Tensor, b: Tensor) -> bool:
    """Whether an output is filled as it is; torch gives others a new size, or refuses them."""
    return out.dtype is torch.float32 and out.shape == (len(a), b.shape[-1])


def _adds_row(bias: Tensor, b: Tensor, beta: Any, alpha: Any) -> bool:
    return bool(beta == 1 and alpha == 1 and bias.dim() == 1 and bias.dtype is torch.float32 and len(bias) == b.shape[-1])


def _addmm(keys: _Keys, bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    if _fits(a, b) and _adds_row(bias, b, beta, alpha):
        return _times(a, b, bias.contiguous())
    return _own["addmm"].call_boxed(keys, bias, a, b, beta=beta, alpha=alpha)


def _addmm_into(keys: _Keys, bias: Tensor, a: Tensor, b: Tensor, *, out: Tensor, beta: Any = 1, alpha: Any = 1) -> Any:
    if _fits(a, b) and _takes(out, a, b) and _adds_row(bias, b, beta, alpha):
        return out.copy_(_times(a, b, bias.contiguous()))
    return _own["addmm.out"].call_boxed(keys, bias, a, b, beta=beta, alpha=alpha, out=out)


_KERNELS = (("mm", _mm), ("mm.out", _mm_into), ("addmm", _addmm), ("addmm.out", _addmm_into))

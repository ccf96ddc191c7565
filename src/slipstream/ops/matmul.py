"""Products of torch on CPUs, computed in another way if that is faster: fp32 by oneDNN, bf16 and fp16 by fp32.

On processors that are not Intel's, MKL computes fp32 with AVX2. On an EPYC with AVX-512 (family 26) that is 118 GFLOP/s, of 287
that a core can do; oneDNN, which is part of torch, too, reaches 230 to 270.

16-bit products are fast if the processor supports them: AMX, AVX512-BF16 on AMD, AVX512-FP16. Elsewhere torch multiplies them at
0.01 to 0.6 of the rate of fp32, in which the same products are exact (docs/FUSED_LAYERS.md has a table).

[Note: One process, one product] torch's own `mm` and `addmm` are overridden, for the whole process. So products in a forward, in a
backward, of a deferred gradient and in a plain loop beside have the same bits. Replaced layers would differ from all others.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.world import host

logger = logging.getLogger(__name__)

_LEAST = 1 << 21  # multiplications: smaller products gain less than the call costs
_MOST_PAD = 64  # rows
_LARGE = 1 << 29  # multiplications: padding them costs as much as a new kernel
_PIECE = 2048  # rows and columns of 16-bit matrices widened at once: a whole vocabulary's would double its memory
_DEPTH = 8192  # terms of the sums widened at once
_Keys = Any  # torch's set of dispatch keys, passed through
_own: dict[str, Any] = {}  # torch's own kernels
_installed: list[torch.library.Library] = []


class Way(NamedTuple):
    """How products of one dtype are computed."""

    name: str
    rows: int  # minimum of either matrix: for fewer, torch reads the other at memory speed
    times: Callable[[Tensor, Tensor, Tensor | None], Tensor]


@functools.cache
def ways() -> Mapping[torch.dtype, Way]:
    """The dtypes whose products another way computes faster than torch on this processor."""
    has = frozenset(host.processor().get("flags", "").split())  # on x86; else empty
    faster = dict[torch.dtype, Way]()
    wide = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    if wide and torch.backends.mkl.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise") and not host.is_intel():
        faster[torch.float32] = Way("oneDNN", 8, _by_onednn)
    if has and not has & {"amx_bf16", "avx512_bf16"}:
        faster[torch.bfloat16] = Way("fp32", 8, _by_fp32)
    elif has and "amx_bf16" not in has and host.is_intel():  # [Note: Pairs of bf16]
        faster[torch.bfloat16] = Way("fp32", 64, _by_fp32)
    if has and not has & {"amx_fp16", "avx512_fp16"}:
        faster[torch.float16] = Way("fp32", 8, _by_fp32)
    return faster


def use(faster: bool, dtypes: Iterable[torch.dtype | None] = (torch.float32, torch.bfloat16, torch.float16)) -> bool:
    """Make torch compute large products on CPUs in the fastest of the `ways`, or by its own choice again. Returns whether it uses
    other ways now.

    Applies to the whole process. No effect if torch's own choice is the fastest for all of the dtypes. A small product takes 2.8
    microseconds by torch alone, and 14 with other ways.
    """
    if not faster:
        for library in _installed:
            library._destroy()
        _installed.clear()
    elif not _installed and not ways().keys().isdisjoint(dtypes):
        library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns of the replaced kernel
            for name, kernel in _KERNELS:
                _own[name] = torch.library.get_kernel(f"aten::{name}", "CPU")  # before it is overridden
                library.impl(name, kernel, "CPU", with_keyset=True, allow_override=True)
        _installed.append(library)
        logger.info("products on this CPU: %s; slipstream.products: torch leaves them as they are", listed())
    return bool(_installed)


def listed() -> str:
    """The products that are currently not torch's own, such as "bfloat16 by fp32"; "" if there are none."""
    return ", ".join(f"{str(dtype).removeprefix('torch.')} by {way.name}" for dtype, way in ways().items() if _installed)


def _times(a: Tensor, b: Tensor, addend: Tensor | None = None) -> Tensor | None:
    """The product, plus an addend, in another way than torch's; None if torch's is as fast, or has an error to raise."""
    way = ways().get(a.dtype)
    if way is None or a.dim() != 2 or b.dim() != 2:
        return None
    (m, k), n = a.shape, b.shape[1]
    if m * n * k < _LEAST or min(m, n) < way.rows or b.dtype is not a.dtype or k != b.shape[0]:
        return None
    return way.times(a, b, addend) if _is_dense(a) and _is_dense(b) else None


def _is_dense(a: Tensor) -> bool:
    """Whether rows, or columns, are contiguous inside and do not overlap."""
    (rows, columns), (down, right) = a.shape, a.stride()
    return (right == 1 and down >= columns) or (down == 1 and right >= rows)


def _by_onednn(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """[Note: New shapes] oneDNN compiles a kernel for each shape, in 0.75 ms, and keeps 1,024. The number of rows of experts, and
    of texts of any length, changes in each step, so rows are padded with zeros to one of few numbers, by an eighth at most: eight
    numbers from one power of 2 to the next, and multiples of 64 from 512. These are the rows of `a`, or the terms of the sums if
    `a` is the transpose of a matrix of rows, as in a weight's gradient; features are not padded. A product of padded rows is a view
    of the real rows: `torch.save` writes the others, too, unless it is given a clone."""
    if len(a) * b.numel() >= _LARGE:
        return _linear(a, b, bias)
    if a.stride(1) != 1:
        return _linear(_padded(a.t()).t(), _padded(b), bias)
    return _linear(_padded(a), b, bias)[: len(a)]


def _padded(x: Tensor) -> Tensor:
    """x with zero rows appended, up to a multiple that grows with their number."""
    pad = -len(x) % min(_MOST_PAD, 1 << max(0, len(x).bit_length() - 4))
    if pad == 0:
        return x
    out = x.new_zeros(len(x) + pad, x.shape[1])
    out[: len(x)] = x
    return out


def _linear(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(a, b.t(), bias, "none", [], "")
    return product


def _by_fp32(a: Tensor, b: Tensor, addend: Tensor | None) -> Tensor:
    """The numbers are exact in fp32, and so are their products; the sums are rounded once, as in torch's product."""
    (m, k), n = a.shape, b.shape[1]
    out, added = a.new_empty(m, n), None if addend is None else addend.expand(m, n)
    with torch.autocast("cpu", enabled=False):  # it ignores `out=`, and would round the widened operands again
        for rows in _slices(m, _PIECE):
            for columns in _slices(n, _PIECE):
                pieces = (a[rows, terms].float() @ b[terms, columns].float() for terms in _slices(k, _DEPTH))
                total = functools.reduce(Tensor.add_, pieces)
                out[rows, columns] = total if added is None else total.add_(added[rows, columns])
    return out


def _slices(length: int, step: int) -> list[slice]:
    return [slice(i, i + step) for i in range(0, length, step)]


def _mm(keys: _Keys, a: Tensor, b: Tensor) -> Any:
    product = _times(a, b)
    return _own["mm"].call_boxed(keys, a, b) if product is None else product


def _mm_into(keys: _Keys, a: Tensor, b: Tensor, *, out: Tensor) -> Any:
    product = _times(a, b) if _takes(out, a, b) else None
    return _own["mm.out"].call_boxed(keys, a, b, out=out) if product is None else out.copy_(product)


def _takes(out: Tensor, a: Tensor, b: Tensor) -> bool:
    """Whether an output can be filled in place; torch resizes other outputs, or refuses them."""
    return out.dtype is a.dtype and a.dim() == b.dim() == 2 and out.shape == (len(a), b.shape[1])


def _plus(addend: Tensor, a: Tensor, b: Tensor, beta: Any, alpha: Any) -> Tensor | None:
    """The product plus a row; in 16 bits also plus a matrix."""
    if beta != 1 or alpha != 1 or addend.dtype is not a.dtype or a.dim() != 2 or b.dim() != 2:
        return None
    is_row = addend.dim() == 1 and len(addend) == b.shape[1]
    is_matrix = a.dtype is not torch.float32 and addend.shape == (len(a), b.shape[1])
    return _times(a, b, addend.contiguous() if is_row else addend) if is_row or is_matrix else None


def _addmm(keys: _Keys, addend: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    product = _plus(addend, a, b, beta, alpha)
    return _own["addmm"].call_boxed(keys, addend, a, b, beta=beta, alpha=alpha) if product is None else product


def _addmm_into(keys: _Keys, addend: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1, out: Tensor) -> Any:
    product = _plus(addend, a, b, beta, alpha) if _takes(out, a, b) else None
    if product is None:
        return _own["addmm.out"].call_boxed(keys, addend, a, b, beta=beta, alpha=alpha, out=out)
    return out.copy_(product)


def _addmm_in_place(keys: _Keys, addend: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    product = _plus(addend, a, b, beta, alpha) if _takes(addend, a, b) else None
    return _own["addmm_"].call_boxed(keys, addend, a, b, beta=beta, alpha=alpha) if product is None else addend.copy_(product)


_KERNELS = (("mm", _mm), ("mm.out", _mm_into), ("addmm", _addmm), ("addmm.out", _addmm_into), ("addmm_", _addmm_in_place))

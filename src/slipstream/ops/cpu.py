"""The kernels' Python side: argument checks, the choice between native code and torch twin, threads.

Every function works on 1-D contiguous tensors. CPU tensors go to the C library (GIL released) where there is one; other
devices, and a master or moments that are not fp32, go to the twin in `reference.py`, which gives the same bits.

[Note: Call cost] These run once per unit and step, on units that may be small, so a call costs about 2 us: function
pointers are bound once, dtypes are compared by identity, and the error text is worked out only after a check failed.
"""

import ctypes
import functools
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.ops import build, reference
from slipstream.ops.reference import BLOCK, Partial

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as in csrc/slipstream_ops.h

# Write past the caches what is at least this large: below, the next reader still finds it in cache.
STREAM_BYTES = 4 << 20
# Elements per thread below which a second thread costs more than it brings.
THREAD_NUMEL = 4 * BLOCK


class OpReport(NamedTuple):
    name: str
    implementation: str  # "native avx512", "native avx2", "native portable" or "torch"
    reason: str


class _Kernels(NamedTuple):
    sum_ranks: Callable[..., float]
    adamw: Callable[..., None]
    copy_stream: Callable[..., None]


@functools.cache
def _kernels() -> _Kernels | None:
    library = build.load().kernels
    if library is None:
        return None
    pointer, integer, long, double = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_double
    kernels = _Kernels(library.slipstream_sum_ranks, library.slipstream_adamw, library.slipstream_copy_stream)
    library.slipstream_sum_ranks.restype = double
    library.slipstream_sum_ranks.argtypes = (
        [pointer, pointer, long, long] + [integer] * 2 + [ctypes.c_float] + [integer] * 2 + [pointer]
    )
    library.slipstream_adamw.restype = None
    library.slipstream_adamw.argtypes = [pointer] * 5 + [long] + [integer] * 5 + [long] + [double] * 6
    library.slipstream_copy_stream.restype = None
    library.slipstream_copy_stream.argtypes = [pointer, pointer, long]
    return kernels


def report() -> list[OpReport]:
    """Which implementation each op runs on CPU tensors, and why. Compiles the kernels if nothing did before."""
    library = build.load()
    implementation = f"native {isa()}" if library.kernels else "torch"
    words = "native" if library.kernels else "torch"
    rows = [OpReport(name, implementation, library.reason) for name in ("sum_ranks", "adamw", "copy_stream")]
    return [*rows, OpReport("words", words, library.reason)]


def isa() -> str:
    """The instruction set of the native kernels: "avx512", "avx2" or "portable"; "" where there are none."""
    library = build.load().kernels
    if library is None:
        return ""
    library.slipstream_isa.restype = ctypes.c_char_p
    return str(library.slipstream_isa().decode())


def use_isa(name: str) -> bool:
    """Run the native kernels on another instruction set from now on; False if this machine lacks it. For tests."""
    library = build.load().kernels
    return library is not None and bool(library.slipstream_use_isa(name.encode()))


def sum_ranks(out: Tensor, sources: Sequence[Tensor], *, alpha: float, accumulate: bool) -> Partial:
    """out = alpha * (sources added in order in fp32), plus out itself if `accumulate`, rounded once to out's dtype.

    out: 1-D, fp32, bf16 or fp16; it may be exactly one of the sources. sources: 1-D, of out's numel, all of one such
    dtype. Returns the fp64 sum of squares of the rounded elements, which no number of threads changes, and whether all
    of them are finite.
    """
    numel, on_cpu = out.numel(), out.is_cpu
    target = DTYPES.get(out.dtype)
    dtype = sources[0].dtype if sources else None
    source = DTYPES.get(dtype)
    if target is None or source is None or out.dim() != 1 or not out.is_contiguous():
        raise _refusal("sum_ranks", out=out, **_numbered(sources))
    start, size = out.data_ptr(), out.element_size()
    width = 4 if source == 0 else 2
    low, high, same = start - numel * width, start + numel * size, start if width == size else None
    pointers = []
    for tensor in sources:
        if (
            tensor.dtype is not dtype
            or tensor.numel() != numel
            or tensor.dim() != 1
            or not tensor.is_contiguous()
            or tensor.is_cpu is not on_cpu
        ):
            raise _refusal("sum_ranks", out=out, **_numbered(sources))
        pointer = tensor.data_ptr()
        if low < pointer < high and pointer != same:
            raise ValueError(
                f"sum_ranks: sources[{len(pointers)}] overlaps out without being the same {numel} elements of "
                f"{out.dtype}; give out memory of its own, or exactly that source's"
            )
        pointers.append(pointer)
    kernels = _kernels()
    if kernels is None or not on_cpu:
        return reference.sum_ranks(out, sources, alpha=alpha, accumulate=accumulate)
    stream = not accumulate and start not in pointers and numel * size >= STREAM_BYTES
    num_sources = len(pointers)
    addresses = ctypes.c_void_p * num_sources
    if numel < 2 * THREAD_NUMEL or (threads := torch.get_num_threads()) == 1:
        sumsq = kernels.sum_ranks(
            start, addresses(*pointers), num_sources, numel, source, target, alpha, accumulate, stream, None
        )
        return Partial(sumsq, math.isfinite(sumsq))

    blocks = (ctypes.c_double * -(-numel // BLOCK))()

    def run(begin: int, end: int) -> None:
        kernels.sum_ranks(
            start + begin * size,
            addresses(*(pointer + begin * width for pointer in pointers)),
            num_sources,
            end - begin,
            source,
            target,
            alpha,
            accumulate,
            stream,
            ctypes.addressof(blocks) + begin // BLOCK * 8,
        )

    _in_threads(run, numel, threads)
    sumsq = 0.0
    for block in blocks:  # in order, as the kernel adds them; `sum` would compensate for rounding
        sumsq += block
    return Partial(sumsq, math.isfinite(sumsq))


def adamw(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    out: Tensor | None,
    *,
    scale: float,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    decoupled: bool,
    bias_correction: bool,
) -> None:
    """One Adam step in one pass, by the formulas of torch.optim.AdamW (`decoupled`) or torch.optim.Adam, in fp32.

    master, exp_avg, exp_avg_sq: 1-D, updated in place; fp32, or bf16 or fp16 where the config asks for it. grad: 1-D,
    fp32, bf16 or fp16, multiplied by `scale` (unscaling and clipping) as it is read. out: the weights in their own
    dtype, or None where they are the master itself. step counts from 1.
    """
    numel, on_cpu = master.numel(), master.is_cpu
    gradient, target = DTYPES.get(grad.dtype), 0 if out is None else DTYPES.get(out.dtype)
    tensors = (master, grad, exp_avg, exp_avg_sq) if out is None else (master, grad, exp_avg, exp_avg_sq, out)
    for tensor in tensors:
        if (
            tensor.numel() != numel
            or tensor.dim() != 1
            or not tensor.is_contiguous()
            or tensor.is_cpu is not on_cpu
            or tensor.dtype not in DTYPES
        ):
            named = {"master": master, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
            raise _refusal("adamw", **named, **({} if out is None else {"out": out}))
    if step < 1 or not (0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0):
        raise ValueError(f"adamw: step ({step}) counts from 1, and betas ({beta1}, {beta2}) are in [0, 1)")
    kernels = _kernels()
    single = torch.float32
    native = on_cpu and master.dtype is single and exp_avg.dtype is single and exp_avg_sq.dtype is single
    if kernels is None or not native:
        reference.adamw(
            master,
            grad,
            exp_avg,
            exp_avg_sq,
            out,
            scale=scale,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            weight_decay=weight_decay,
            step=step,
            decoupled=decoupled,
            bias_correction=bias_correction,
        )
        return
    pointers = [tensor.data_ptr() for tensor in tensors]
    widths = [tensor.element_size() for tensor in tensors]
    stream = out is not None and numel * out.element_size() >= STREAM_BYTES

    def run(begin: int, end: int) -> None:
        addresses = [pointer + begin * width for pointer, width in zip(pointers, widths, strict=True)]
        if out is None:
            addresses.append(0)
        kernels.adamw(
            *addresses,
            end - begin,
            gradient,
            target,
            decoupled,
            bias_correction,
            stream,
            step,
            scale,
            lr,
            beta1,
            beta2,
            eps,
            weight_decay,
        )

    if numel < 2 * THREAD_NUMEL or (threads := torch.get_num_threads()) == 1:
        run(0, numel)
    else:
        _in_threads(run, numel, threads)


def copy_stream(dst: Tensor, src: Tensor) -> None:
    """dst = src, written past the caches: for what no one on this core reads soon. 1-D, of one dtype, not overlapping."""
    numel = dst.numel()
    if (
        dst.dtype is not src.dtype
        or src.numel() != numel
        or dst.dim() != 1
        or src.dim() != 1
        or not dst.is_contiguous()
        or not src.is_contiguous()
    ):
        raise _refusal("copy_stream", any_dtype=True, dst=dst, src=src)
    kernels = _kernels()
    if kernels is None or not dst.is_cpu or not src.is_cpu:
        reference.copy_stream(dst, src)
        return
    to, source, width = dst.data_ptr(), src.data_ptr(), dst.element_size()
    if abs(to - source) < numel * width:
        raise ValueError(f"copy_stream: dst and src overlap ({numel} elements, {abs(to - source)} bytes apart)")
    if numel * width < STREAM_BYTES or (threads := torch.get_num_threads()) == 1:
        kernels.copy_stream(to, source, numel * width)
    else:
        _in_threads(
            lambda begin, end: kernels.copy_stream(to + begin * width, source + begin * width, (end - begin) * width),
            numel,
            threads,
        )


def _in_threads(run: Callable[[int, int], None], numel: int, threads: int) -> None:
    """Call run(begin, end) for shares of whole blocks, one of them on this thread."""
    shares = max(1, min(threads, numel // THREAD_NUMEL))
    share = -(-numel // (shares * BLOCK)) * BLOCK
    pool = _pool(os.getpid())
    others = [pool.submit(run, begin, min(begin + share, numel)) for begin in range(share, numel, share)]
    run(0, min(share, numel))
    for other in others:
        other.result()


@functools.cache
def _pool(process: int) -> ThreadPoolExecutor:
    """Threads of this process: after a fork, the parent's are not there."""
    return ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix=f"slipstream-ops-{process}")


def _numbered(sources: Sequence[Tensor]) -> dict[str, Tensor]:
    return {f"sources[{i}]": tensor for i, tensor in enumerate(sources)}


def _refusal(op: str, any_dtype: bool = False, **tensors: Tensor) -> ValueError:
    """The error for the first tensor that does not fit, named, with what it is and what it must be."""
    (first_name, first), *_ = tensors.items()
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES and not any_dtype:
            problem = f"is {tensor.dtype}; it must be torch.float32, torch.bfloat16 or torch.float16"
        elif tensor.dim() != 1:
            problem = f"has shape {tuple(tensor.shape)}; it must have one dimension: pass it flattened"
        elif not tensor.is_contiguous():
            problem = f"is not contiguous (stride {tensor.stride(0)}); pass a contiguous tensor"
        elif tensor.numel() != first.numel():
            problem = f"has {tensor.numel()} elements where {first_name} has {first.numel()}; the numels must be equal"
        elif tensor.device != first.device:
            problem = f"is on {tensor.device} where {first_name} is on {first.device}; they must share a device"
        else:
            continue
        return ValueError(f"{op}: {name} {problem}")
    if len(tensors) == 1:
        return ValueError(f"{op}: no sources; pass at least one tensor")
    dtypes = ", ".join(f"{name} {tensor.dtype}" for name, tensor in tensors.items())
    return ValueError(f"{op}: the dtypes differ ({dtypes}); all sources need one dtype")

"""Python wrappers of the kernels: argument checks, dispatch to native code or to the torch twin, threads. (Optimizers: `optim.py`.)

All except quantization work on 1-D contiguous tensors. CPU tensors go to the C library, if it loads; the GIL is released. Other
devices use the twin in `reference.py`, whose results are bit-identical.

[Note: Call cost] These run once per unit and step, on units that may be small, so the fixed cost of a call matters
(`python -m benchmarks kernels` prints it): function pointers are bound once, dtypes are compared by identity, and an error's text
is built only after a check has failed.
"""

import ctypes
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.ops import build, reference
from slipstream.ops.reference import BLOCK, Partial, added

# As in csrc/slipstream_ops.h. None is never a key; the type allows it so that `DTYPES.get(None)` type-checks.
DTYPES: dict[torch.dtype | None, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
WIDTHS = (4, 2, 2)  # bytes per element

# Results of at least this size bypass the caches: they would be evicted before the next read anyway, and sums become 10 % faster
# (Adam 0 to 8 %; Zen 3, cold destination). Smaller results stay in cache for their reader.
STREAM_BYTES = 4 << 20
# With fewer elements per thread, a second thread costs more than it saves.
THREAD_NUMEL = 4 * BLOCK
MAX_GROUP = 128  # as in csrc/quantize.h


class OpReport(NamedTuple):
    name: str
    implementation: str  # "native avx512bf16", "native avx512vnni", "native avx512", "native avx2", "native portable" or "torch"
    reason: str


_pointer, _int, _long, _float = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_PASSES = (None, _int, _pointer, _long, _long)  # of a family: which, the record's address, begin and end
_KERNELS: dict[str, tuple[Any, ...]] = {  # name -> types of result and arguments
    "sum_ranks": (ctypes.c_double, _pointer, _pointer, _long, _long, _int, _float, _pointer),
    "step": (None, _int, ctypes.c_char_p, _long, _long, _pointer),
    "copy_stream": (None, _pointer, _pointer, _long),
    "wire_encode": (None, _pointer, _int, _long, _int, _pointer, _pointer, _float),
    **dict.fromkeys(("onebit", "quantize", "fused", "sparse"), _PASSES),
}


class Quantize(ctypes.Structure):
    """`struct quantize` of csrc/quantize.h."""

    _fields_ = (
        *((name, _pointer) for name in ("w", "codes", "scale", "low", "ends", "pairs")),
        *((name, _long) for name in ("group", "piece", "bits", "columns", "block", "code_nbytes", "row_nbytes")),
        *((name, _float) for name in ("lowest", "highest")),
        ("dtype", ctypes.c_int32),
    )


TO_INT8, FROM_INT8, TO_INT4, FROM_INT4, FROM_ROWS, TO_ENDS, TO_GRID = range(7)


@functools.cache
def _kernels() -> Any:
    """The native kernels by name, as attributes; None without a library."""
    kernels = {name: build.function(f"slipstream_{name}", *types) for name, types in _KERNELS.items()}
    return None if None in kernels.values() else SimpleNamespace(**kernels)


def report() -> list[OpReport]:
    """The implementation of each op on CPU tensors, and the reason for it. Compiles the kernels if necessary."""
    reason, isa_function = build.load().reason, build.function("slipstream_kernels_isa", ctypes.c_char_p)
    native = "torch" if isa_function is None else f"native {isa_function().decode()}"
    names = ("sum_ranks", "adamw", "lion", "sgd", "adagrad", "lamb", *list(_KERNELS)[2:])
    others = {"decoder": f"native {isa()}", "words": "native"} if isa_function else dict.fromkeys(("decoder", "words"), "torch")
    return [OpReport(name, kernels, reason) for name, kernels in (dict.fromkeys(names, native) | others).items()]


def isa() -> str:
    """The native code's instruction set: "avx512bf16", "avx512vnni", "avx512", "avx2" or "portable"; "" without native code."""
    isa_function = build.function("slipstream_isa", ctypes.c_char_p)
    return "" if isa_function is None else str(isa_function().decode())


def use_isa(name: str) -> bool:
    """Switch to this instruction set; returns False if the machine lacks it. For tests."""
    library = build.load().kernels
    return library is not None and bool(library.slipstream_use_isa(name.encode()))


def sum_ranks(out: Tensor, sources: Sequence[Tensor], *, alpha: float, accumulate: bool) -> Partial:
    """out = alpha * (sources added in order, in fp32), plus out if `accumulate`, rounded once to out's dtype.

    out: 1-D, fp32, bf16 or fp16; it may be exactly one of the sources. sources: 1-D, of out's numel, all of one such dtype.
    Returns the fp64 sum of squares of the rounded elements, the same for any number of threads, and whether all are finite.
    """
    numel, dtype = out.numel(), sources[0].dtype if sources else None
    target, source = DTYPES.get(out.dtype), DTYPES.get(dtype)
    kinds = {(tensor.dtype, tensor.is_cpu) for tensor in sources}
    if target is None or source is None or kinds != {(dtype, out.is_cpu)} or not are_flat(out, *sources):
        raise refusal("sum_ranks", {"out": out, **{f"sources[{i}]": tensor for i, tensor in enumerate(sources)}})
    start, width, out_width = out.data_ptr(), WIDTHS[source], WIDTHS[target]
    pointers = [tensor.data_ptr() for tensor in sources]
    for i, pointer in enumerate(pointers):
        overlaps = start - numel * width < pointer < start + numel * out_width
        if overlaps and (pointer != start or width != out_width):
            raise ValueError(
                f"sum_ranks: sources[{i}] ({numel} x {dtype}) overlaps out ({out.dtype}), "
                f"which starts {start - pointer} bytes after it; out must be exactly one of the sources or not overlap any"
            )
    kernels = _kernels()
    if kernels is None or not out.is_cpu:
        return reference.sum_ranks(out, sources, alpha=alpha, accumulate=accumulate)
    stream = not accumulate and numel * out_width >= STREAM_BYTES and start not in pointers
    return summed(out, pointers, lambda begin: begin * width, source, accumulate, alpha, stream)


def summed(
    out: Tensor,
    pointers: Sequence[int],
    nbytes: Callable[[int], int],
    source: int,
    accumulate: bool,
    alpha: float,
    stream: bool = False,
) -> Partial:
    """`sum_ranks` by the native kernel, in threads. nbytes: bytes of a number of elements of a source. source: the number of its
    dtype, or the bits of its codes."""
    kernel, numel, start, array = _kernels().sum_ranks, out.numel(), out.data_ptr(), ctypes.c_void_p * len(pointers)
    mode = source | DTYPES[out.dtype] << 4 | accumulate << 6 | stream << 7
    if numel < 2 * THREAD_NUMEL or (threads := torch.get_num_threads()) == 1:
        sumsq = kernel(start, array(*pointers), len(pointers), numel, mode, alpha, None)
        return Partial(sumsq, math.isfinite(sumsq))
    width, blocks = out.element_size(), (ctypes.c_double * -(-numel // BLOCK))()

    def run(begin: int, end: int) -> None:
        shifted = array(*(pointer + nbytes(begin) for pointer in pointers))
        partials = ctypes.addressof(blocks) + begin // BLOCK * ctypes.sizeof(ctypes.c_double)
        kernel(start + begin * width, shifted, len(pointers), end - begin, mode, alpha, partials)

    in_threads(run, numel, threads)
    sumsq = added(blocks)  # in order, as the kernel adds them
    return Partial(sumsq, math.isfinite(sumsq))


def are_flat(first: Tensor, *others: Tensor) -> bool:
    """Whether the tensors are 1-D, contiguous and of equal length."""
    return all(each.dim() == 1 and each.is_contiguous() and each.numel() == first.numel() for each in (first, *others))


def copy_stream(dst: Tensor, src: Tensor) -> None:
    """dst = src with non-temporal stores, for data that this core will not read soon. 1-D, one dtype, not overlapping."""
    numel = dst.numel()
    if dst.dtype is not src.dtype or not are_flat(dst, src):
        raise refusal("copy_stream", {"dst": dst, "src": src}, floating=False)
    kernels = _kernels()
    if kernels is None or not dst.is_cpu or not src.is_cpu:
        with torch.no_grad():
            dst.copy_(src)
        return
    target, source, width = dst.data_ptr(), src.data_ptr(), dst.element_size()
    if abs(target - source) < numel * width:
        raise ValueError(f"copy_stream: dst and src overlap: {numel} elements, {abs(target - source)} bytes apart")
    if numel * width < STREAM_BYTES or (threads := torch.get_num_threads()) == 1:
        kernels.copy_stream(target, source, numel * width)
        return

    def run(begin: int, end: int) -> None:
        kernels.copy_stream(target + begin * width, source + begin * width, (end - begin) * width)

    in_threads(run, numel, threads)


def quantize_int8(w: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, columns], fp32, bf16 or fp16 -> codes int8 of its shape and scale fp32 [rows]: w = codes * scale[:, None].

    Symmetric; the error is at most half a scale. A row with a nonfinite value gets a nonfinite scale.
    """
    _check_matrix("quantize_int8", w)
    kernels = _kernels()
    if kernels is None or not w.is_cpu:
        return reference.quantize_int8(w)
    w = w.contiguous()
    rows, columns = w.shape
    codes, scale = torch.empty_like(w, dtype=torch.int8), w.new_empty(rows, dtype=torch.float32)
    arrays = {"w": w, "codes": codes, "scale": scale}
    quantize(TO_INT8, arrays, rows, BLOCK // max(columns, 1) + 1, group=columns)
    return codes, scale


def dequantize_int8(codes: Tensor, scale: Tensor) -> Tensor:
    """The inverse of `quantize_int8`, in fp32."""
    kernels = _kernels()
    if kernels is None or not codes.is_cpu:
        return reference.dequantize_int8(codes, scale)
    codes, scale = codes.contiguous(), scale.float().contiguous()
    rows, columns = codes.shape
    w = scale.new_empty(rows, columns)
    quantize(FROM_INT8, {"w": w, "codes": codes, "scale": scale}, rows, THREAD_NUMEL // max(columns, 1) + 1, group=columns)
    return w


def quantize_int4(w: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """[rows, columns], fp32, bf16 or fp16 -> codes uint8 [rows, columns / 2], two per byte, the first in the low half, and
    scale and low fp32 [rows, columns / group], both representable in fp16: w = codes * scale + low.

    Tries a few ranges for each group and keeps the one with the least squared error. A group with a nonfinite value gets a
    nonfinite `low`.
    """
    _check_matrix("quantize_int4", w)
    rows, columns = w.shape
    if group % 2 or not 2 <= group <= MAX_GROUP or columns % group:
        raise ValueError(f"int4 needs an even group of at most {MAX_GROUP} that divides the input: group {group}, input {columns}")
    kernels = _kernels()
    if kernels is None or not w.is_cpu:
        return reference.quantize_int4(w, group)
    w = w.contiguous()
    codes = w.new_empty(rows, columns // 2, dtype=torch.uint8)
    scale, low = w.new_empty(2, rows, columns // group, dtype=torch.float32)
    quantize(TO_INT4, {"w": w, "codes": codes, "scale": scale, "low": low}, scale.numel(), BLOCK // group, group=group)
    return codes, scale, low


def dequantize_int4(codes: Tensor, scale: Tensor, low: Tensor) -> Tensor:
    """The inverse of `quantize_int4`, in fp32. Groups may have any even size; scale and low may be fp16."""
    kernels = _kernels()
    if kernels is None or not codes.is_cpu:
        return reference.dequantize_int4(codes, scale, low)
    codes, scale, low = codes.contiguous(), scale.float().contiguous(), low.float().contiguous()
    w = scale.new_empty(len(codes), 2 * codes.shape[1])
    group = w.shape[1] // max(scale.shape[1], 1)
    arrays = {"w": w, "codes": codes, "scale": scale, "low": low}
    quantize(FROM_INT4, arrays, scale.numel(), THREAD_NUMEL // max(group, 1) + 1, group=group)
    return w


def _check_matrix(op: str, w: Tensor) -> None:
    if w.dtype not in DTYPES or w.dim() != 2:
        kinds = "torch.float32, torch.bfloat16 or torch.float16"
        raise ValueError(f"{op}: w is {w.dtype} of shape {tuple(w.shape)}; it must be a matrix of {kinds}")


def quantize(which: int, arrays: Mapping[str, Tensor], size: int, least: int, **numbers: float) -> None:
    """Run a pass over `size` groups, rows or items, `least` or more at a time. arrays: by field of `Quantize`."""
    pointers = {name: array.data_ptr() for name, array in arrays.items()}
    run(_kernels().quantize, which, Quantize(**pointers, dtype=DTYPES[arrays["w"].dtype], **numbers), size, least=least)


def run(passes: Any, which: int, record: ctypes.Structure, size: int, *, least: int, multiple: int = 1, first: int = 0) -> None:
    """Run a pass of a family over [first, first + size) of a record, in threads."""
    at, threads = ctypes.addressof(record), torch.get_num_threads()
    in_threads(lambda begin, end: passes(which, at, first + begin, first + end), size, threads, least=least, multiple=multiple)


def in_threads(
    run: Callable[[int, int], None], size: int, threads: int, *, least: int = THREAD_NUMEL, multiple: int = BLOCK
) -> None:
    """Call run(begin, end) for each share of `size`, in threads and on this thread. Shares are multiples, and at least `least`."""
    shares = max(1, min(threads, size // least))
    share = -(-size // (shares * multiple)) * multiple
    pool = _pool(os.getpid())
    others = [pool.submit(run, begin, min(begin + share, size)) for begin in range(share, size, max(share, 1))]
    try:
        run(0, min(share, size))
    finally:
        wait(others)  # wait even on Ctrl-C: the caller's arrays must outlive the threads' work
    for other in others:
        other.result()


@functools.cache
def _pool(process: int) -> ThreadPoolExecutor:
    """The thread pool of process `process`, because a fork does not copy its parent's threads."""
    return ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix=f"slipstream-ops-{process}")


def refusal(op: str, tensors: dict[str, Tensor], floating: bool = True) -> ValueError:
    """The error that names the first invalid tensor, its value and the requirement."""
    first_name, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if floating and tensor.dtype not in DTYPES and not name.endswith(".codes"):
            problem = f"is {tensor.dtype}; it must be torch.float32, torch.bfloat16 or torch.float16"
        elif tensor.dim() != 1:
            problem = f"has shape {tuple(tensor.shape)}; it must have one dimension: pass it flattened"
        elif not tensor.is_contiguous():
            problem = f"is not contiguous (stride {tensor.stride(0)}); pass a contiguous tensor"
        elif tensor.numel() != first.numel():
            problem = f"has numel {tensor.numel()} where {first_name} has {first.numel()}; they must be equal"
        elif tensor.device != first.device:
            problem = f"is on {tensor.device} where {first_name} is on {first.device}; move one of them"
        else:
            continue
        return ValueError(f"{op}: {name} {problem}")
    if len(tensors) == 1:
        return ValueError(f"{op}: there are no sources; pass at least one tensor")
    dtypes = ", ".join(f"{name} is {tensor.dtype}" for name, tensor in tensors.items())
    return ValueError(f"{op}: the dtypes differ ({dtypes}); all but out must have the same dtype")

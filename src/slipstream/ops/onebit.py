"""The passes of optimizers that exchange signs (1-bit Adam, arXiv 2102.02888): native kernels, and their torch twin.

record    512 elements on the wire: a bf16 scale, the root mean square, then 64 bytes of signs; 1.03 bits per element. An element
          is +-scale
y         the compressed values, including the errors of all steps before; the error is y - scale * sign(y), so none is stored
inverse   the frozen preconditioner, 1 / (sqrt(v) + eps); 0 for an element that is never stepped: its y stays 0
p         the last exchange's result, the mean over ranks, as records

All arrays are 1-D, contiguous, of a multiple of 512 elements. Results are bit-identical on all instruction sets and in torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.ops import cpu, reference

BLOCK = 512
NBYTES = 2 + BLOCK // 8  # of a record
_WORKER, _SERVER, _UPDATE = range(3)


class _Arrays(ctypes.Structure):
    """`struct onebit` of csrc/slipstream_ops.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("grad", "inverse", "y", "scales", "records", "sources", "partly", "out")),
        ("num_sources", ctypes.c_int64),
        ("beta", ctypes.c_float),
        ("factor", ctypes.c_float),
        ("dtype", ctypes.c_int),
    )


def nbytes(numel: int) -> int:
    """Bytes of the records of `numel` elements, a multiple of 512."""
    if numel % BLOCK:
        raise ValueError(f"signs are exchanged in blocks of {BLOCK} elements, which {numel} elements do not fill")
    return numel // BLOCK * NBYTES


@torch.no_grad()
def worker(
    grad: Tensor, inverse: Tensor, partly: Tensor, y: Tensor, scales: Tensor, records: Tensor, *, beta: float, factor: float
) -> None:
    """y = beta * p + factor * grad * inverse + error; `records`, holding p, becomes the records of y, and `scales` their scales.

    grad: fp32, bf16 or fp16. inverse, y: fp32 of grad's numel. partly: of the inverse. scales: fp32, one per block; zeros at first,
    like y. records: uint8.
    """
    _check("worker", y.numel(), {"grad": grad, "inverse": inverse}, (partly, scales), records)
    arrays = {"grad": grad, "inverse": inverse, "partly": partly, "y": y, "scales": scales, "records": records}
    if not _run(_WORKER, y, arrays, dtype=cpu.DTYPES[grad.dtype], beta=beta, factor=factor):
        p = decode(records)
        old = (y - _signed(y, scales)).view(-1)
        x = p * beta + grad.float() * factor * inverse + old
        _finish(x, inverse, y, scales, records)


@torch.no_grad()
def server(
    sources: Sequence[Tensor], inverse: Tensor, partly: Tensor, y: Tensor, scales: Tensor, records: Tensor, *, alpha: float
) -> None:
    """y = alpha * the sum of the sources' values + error; `records` and `scales` become y's. Arguments as in `worker`."""
    _check("server", y.numel(), {"inverse": inverse}, (partly, scales), records)
    pointers = (ctypes.c_void_p * len(sources))(*(source.data_ptr() for source in sources))
    arrays = {"inverse": inverse, "partly": partly, "y": y, "scales": scales, "records": records}
    if not _run(_SERVER, y, arrays, sources=pointers, num_sources=len(sources), factor=alpha):
        total = decode(sources[0])
        for source in sources[1:]:
            total = total + decode(source)
        _finish(total * alpha + (y - _signed(y, scales)).view(-1), inverse, y, scales, records)


@torch.no_grad()
def update(
    master: Tensor, records: Tensor, inverse: Tensor, partly: Tensor, out: Tensor | None, *, keep: float, rate: float
) -> None:
    """master = master * keep - rate * p, also rounded into `out`. partly: uint8, 1 for a block with elements of inverse 0."""
    _check("update", master.numel(), {"inverse": inverse}, (partly,), records)
    arrays = {"inverse": inverse, "y": master, "records": records, "partly": partly} | ({} if out is None else {"out": out})
    dtype = cpu.DTYPES[torch.float32 if out is None else out.dtype]
    if not _run(_UPDATE, master, arrays, dtype=dtype, beta=keep, factor=rate):
        steps = _signs(records) * (_scales(records) * rate)[:, None]
        steps = torch.where(inverse.view(-1, BLOCK) > 0, steps, 0.0).view(-1)
        master.copy_(master * keep - steps)
        if out is not None:
            out.copy_(master)


def decode(records: Tensor) -> Tensor:
    """The values of records, fp32."""
    return (_signs(records) * _scales(records)[:, None]).view(-1)


def error(y: Tensor, scales: Tensor, inverse: Tensor) -> Tensor:
    """The error of y's signs."""
    return torch.where(inverse > 0, y - _signed(y, scales), 0.0)


def partly(inverse: Tensor) -> Tensor:
    """For each block, 1 if some of its elements are never stepped."""
    return (inverse.view(-1, BLOCK) <= 0).any(1).to(torch.uint8)


def _run(step: int, y: Tensor, tensors: dict[str, Tensor], **others: object) -> bool:
    """Run the native kernel in threads; False if there is none."""
    kernels = cpu._kernels()
    if kernels is None or not y.is_cpu:
        return False
    sources = others.pop("sources", None)
    arrays = _Arrays(**{name: tensor.data_ptr() for name, tensor in tensors.items()}, **others)
    if sources is not None:
        arrays.sources = ctypes.cast(sources, ctypes.c_void_p)  # type: ignore[arg-type]
    cpu.run(kernels.onebit, step, arrays, y.numel(), least=cpu.THREAD_NUMEL, multiple=reference.BLOCK)
    return True


def _check(op: str, numel: int, tensors: dict[str, Tensor], per_block: Sequence[Tensor], records: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.numel() != numel or tensor.dim() != 1 or not tensor.is_contiguous() or tensor.dtype not in cpu.DTYPES:
            raise ValueError(f"{op}: {name} is {tensor.dtype} of shape {tuple(tensor.shape)}; pass {numel} contiguous elements")
    sizes = [each.numel() for each in per_block]
    if records.numel() != nbytes(numel) or any(size != numel // BLOCK for size in sizes):
        raise ValueError(f"{op}: {numel} elements have {numel // BLOCK} blocks, not {sizes}")


# -- the twin --


def _scales(records: Tensor) -> Tensor:
    return records.view(-1, NBYTES)[:, :2].contiguous().view(torch.bfloat16).float().view(-1)


def _signs(records: Tensor) -> Tensor:
    """The signs as +-1, fp32 [blocks, 512]."""
    packed = records.view(-1, NBYTES)[:, 2:]
    bits = (packed[..., None] >> torch.arange(8, dtype=torch.uint8, device=records.device)) & 1
    return bits.flatten(1).float() * 2 - 1


def _signed(y: Tensor, scales: Tensor) -> Tensor:
    """scale * sign(y), which subtracted from y gives the error; [blocks, 512] with y's shape in `y - _signed(...)`."""
    blocks = y.view(-1, BLOCK)
    return torch.where(blocks >= 0, scales[:, None], -scales[:, None]).view(-1)


def _finish(x: Tensor, inverse: Tensor, y: Tensor, scales: Tensor, records: Tensor) -> None:
    active = (inverse > 0).view(-1, BLOCK // 16, 16)
    y.copy_(torch.where(active.view(-1), x, 0.0))
    squares, count = _lanes_sum(y.square().view(-1, BLOCK // 16, 16)), _lanes_sum(active.float())
    root = torch.where(count > 0, squares / count, 0.0)
    rounded = (torch.from_numpy(root.cpu().numpy() ** 0.5) if root.is_cpu else root.sqrt()).to(torch.bfloat16)
    scales.copy_(rounded)
    bits = (y.view(-1, BLOCK // 8, 8) >= 0).to(torch.uint8) << torch.arange(8, dtype=torch.uint8, device=y.device)
    view = records.view(-1, NBYTES)
    view[:, :2] = rounded.view(-1, 1).view(torch.uint8)
    view[:, 2:] = bits.sum(2, dtype=torch.uint8)


def _lanes_sum(values: Tensor) -> Tensor:
    """[blocks, n, 16] -> [blocks], summed in the kernels' order: each lane first, then lanes i and i + 8, and so on."""
    lanes = values[:, 0]
    for i in range(1, values.shape[1]):
        lanes = lanes + values[:, i]
    for half in (8, 4, 2, 1):
        lanes = lanes[:, :half] + lanes[:, half : 2 * half]
    return lanes.reshape(-1)

"""Gradients and weights as 8-bit or 4-bit codes on the wire: native kernels, and their torch twin.

block    256 elements: a bf16 scale, then their codes; 8.06 or 4.06 bits per element. An element is code * scale
scale    the block's largest magnitude / 127 (4 bits: / 7), rounded up to bf16 so that no code is clipped; NaN if an element is not
         finite, so that a sum with such a block is NaN and the step is skipped
error    error feedback: the error of earlier steps' codes, in 8-bit blocks of its own (LoCo, arXiv 2407.04480, with its
         moving average; beta 0 is plain error feedback)

The last block has as many bytes as its elements need. Results are bit-identical on all instruction sets and in torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.ops import cpu, reference
from slipstream.ops.reference import Partial

WIRE_BLOCK = 256
_NAN = 0x7FC0  # in bf16


class Feedback(NamedTuple):
    """Error feedback of one array."""

    error: Tensor  # uint8 [nbytes(numel, 8)], updated in place; zeros at first
    beta: float = 0.0  # weight of the old error in the new one


def nbytes(numel: int, bits: int) -> int:
    """Bytes of `numel` elements in codes of `bits` bits."""
    return -(-numel // WIRE_BLOCK) * 2 + (numel * bits + 7) // 8


@torch.no_grad()
def encode(values: Tensor, out: Tensor, bits: int, feedback: Feedback | None = None) -> None:
    """Write the codes of `values` (1-D, fp32, bf16 or fp16) to `out` (uint8 [nbytes(numel, bits)])."""
    numel, dtype = values.numel(), cpu.DTYPES.get(values.dtype)
    _check("encode", bits, numel, {"out": out} | ({"feedback.error": feedback.error} if feedback else {}))
    if dtype is None or values.dim() != 1 or not values.is_contiguous():
        raise cpu.refusal("encode", {"values": values})
    kernels = cpu._kernels()
    if kernels is None or not values.is_cpu:
        _encode(values, out, bits, feedback)
        return
    source, target, width = values.data_ptr(), out.data_ptr(), cpu.WIDTHS[dtype]
    error = feedback.error.data_ptr() if feedback else 0

    def run(begin: int, end: int) -> None:
        kept = error + nbytes(begin, 8) if feedback else None
        beta = feedback.beta if feedback else 0.0
        kernels.wire_encode(source + begin * width, dtype, end - begin, bits, target + nbytes(begin, bits), kept, beta)

    cpu.in_threads(run, numel, torch.get_num_threads())


@torch.no_grad()
def sum_coded(out: Tensor, sources: Sequence[Tensor], bits: int, *, alpha: float = 1.0, accumulate: bool = False) -> Partial:
    """`ops.sum_ranks` for sources that `encode` made. With one source and alpha 1: decode it.

    out: 1-D, fp32, bf16 or fp16, not part of a source.
    """
    _check("sum_coded", bits, out.numel(), {f"sources[{i}]": source for i, source in enumerate(sources)})
    if out.dtype not in cpu.DTYPES or out.dim() != 1 or not out.is_contiguous():
        raise cpu.refusal("sum_coded", {"out": out})
    if cpu._kernels() is None or not out.is_cpu:
        return _sum_coded(out, sources, bits, alpha, accumulate)
    pointers = [source.data_ptr() for source in sources]
    return cpu.summed(out, pointers, lambda begin: nbytes(begin, bits), bits, accumulate, alpha)


def rescale(error: Tensor, factor: float) -> None:
    """Multiply errors, which include a loss scale, by the ratio of the new scale to the old one: exact for a power of 2."""
    whole = error[: error.numel() // nbytes(WIRE_BLOCK, 8) * nbytes(WIRE_BLOCK, 8)].view(-1, nbytes(WIRE_BLOCK, 8))
    for records in (whole[:, :2], error[whole.numel() :][:2].view(-1, 2)):
        scales = records.contiguous().view(torch.bfloat16) * factor
        records.copy_(scales.view(torch.uint8))


def _check(op: str, bits: int, numel: int, coded: dict[str, Tensor]) -> None:
    if bits not in (4, 8):
        raise ValueError(f"{op}: codes have 4 or 8 bits, not {bits}")
    for name, tensor in coded.items():
        expected = nbytes(numel, 8 if name == "feedback.error" else bits)
        if tensor.dtype is not torch.uint8 or tensor.numel() != expected or not tensor.is_contiguous():
            raise ValueError(
                f"{op}: {name} is {tensor.dtype} of shape {tuple(tensor.shape)}; {numel} elements need {expected} contiguous bytes"
            )


# -- the twin --


def _blocks(numel: int, bits: int) -> tuple[int, int]:
    """The number of blocks, and the number of bytes that the last one lacks."""
    count = -(-numel // WIRE_BLOCK)
    return count, count * nbytes(WIRE_BLOCK, bits) - nbytes(numel, bits)


def _units(coded: Tensor, numel: int, bits: int) -> tuple[Tensor, Tensor]:
    """Codes as fp32 [blocks, 256], and scales [blocks, 1]."""
    count, lacking = _blocks(numel, bits)
    records = F.pad(coded, (0, lacking)).view(count, nbytes(WIRE_BLOCK, bits))
    scales = records[:, :2].contiguous().view(torch.bfloat16).float()
    codes = records[:, 2:].contiguous()
    if bits == 8:
        return codes.view(torch.int8).float(), scales
    return torch.stack([codes & 15, codes >> 4], 2).flatten(1).float() - 8, scales


def _record(x: Tensor, bits: int) -> Tensor:
    """fp32 [blocks, 256] -> uint8 [blocks, bytes of a block]."""
    top = 127 if bits == 8 else 7
    whole = torch.isfinite(x).all(1, keepdim=True)
    largest = torch.where(whole, x.abs().amax(1, keepdim=True), 0.0)
    scales = (((largest / top).view(torch.int32) + 0xFFFF) >> 16 << 16).view(torch.float32)
    codes = torch.where(whole, (x * (1 / scales.clamp_min(2**-126))).clamp_(-top, top).round_(), 0.0)
    upper = torch.where(whole, scales.view(torch.int32) >> 16, _NAN)
    if bits == 8:
        packed = codes.to(torch.int8).view(torch.uint8)
    else:
        pairs = (codes + 8).to(torch.uint8).view(len(x), -1, 2)
        packed = pairs[..., 0] | pairs[..., 1] << 4
    return torch.cat([(upper & 255).to(torch.uint8), (upper >> 8).to(torch.uint8), packed], 1)


def _encode(values: Tensor, out: Tensor, bits: int, feedback: Feedback | None) -> None:
    numel = values.numel()
    if not numel:
        return
    count, lacking = _blocks(numel, bits)
    x, old = F.pad(values.float(), (0, count * WIRE_BLOCK - numel)).view(count, WIRE_BLOCK), None
    if feedback is not None:
        codes, scales = _units(feedback.error, numel, 8)
        old = codes * scales
        x = x + old
    records = _record(x, bits)
    out.copy_(records.flatten()[: records.numel() - lacking])
    if feedback is not None and old is not None:
        codes, scales = _units(records.flatten(), records.shape[0] * WIRE_BLOCK, bits)
        lost = x - codes * scales
        kept = _record(old * feedback.beta + lost * (lost.new_tensor(1.0) - feedback.beta), 8)
        upper = kept[:, :2].to(torch.int32)
        broken = upper[:, :1] | upper[:, 1:] << 8
        kept = torch.where(broken == _NAN, 0, kept).flatten()
        feedback.error.copy_(kept[: feedback.error.numel()])


def _sum_coded(out: Tensor, sources: Sequence[Tensor], bits: int, alpha: float, accumulate: bool) -> Partial:
    numel = out.numel()
    if not numel:
        return Partial(0.0, True)
    codes, scales = _units(sources[0], numel, bits)
    total = codes * scales
    for source in sources[1:]:
        codes, scales = _units(source, numel, bits)
        total = total + codes * scales
    return reference.sum_ranks(out, [total.flatten()[:numel]], alpha=alpha, accumulate=accumulate)

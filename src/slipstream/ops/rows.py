"""8-bit and 4-bit matrices, quantized row by row into bytes: the storage of frozen weights, also when sharded and transferred.

row    its codes, then a bf16 scale per block of `block` columns. Each row is quantized and read independently
codes  8 bits: integers from -127 to 127, times scale / 127. 4 bits: indices into NF4, two per byte, the first in the low half
NF4    16 values at quantiles of a normal distribution, scaled to [-1, 1], with an exact 0 (QLoRA, arXiv 2305.14314, eq. 4;
       the constants as its authors' library derives them)
scale  the block's largest magnitude, rounded up so that no code is clipped. One bf16 per 64 columns costs a quarter of a bit per
       weight, half of the paper's fp32 before its second quantization
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from statistics import NormalDist

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.ops import cpu


def _normal_float() -> tuple[float, ...]:
    offset = 1 - (1 / 32 + 1 / 30) / 2  # the mean of the outermost cells' centers, for 16 and for 15 cells
    inverse = NormalDist().inv_cdf
    above = [inverse(offset + (0.5 - offset) * i / 8) for i in range(8)]
    below = [-inverse(offset + (0.5 - offset) * i / 7) for i in range(7)]
    return tuple(sorted(value / above[0] for value in [*below, 0.0, *above]))


NF4 = _normal_float()


@dataclass(frozen=True, slots=True, kw_only=True)
class RowForm:
    """The byte layout of the rows of a matrix with `columns` columns."""

    bits: int  # 8 or 4
    columns: int
    block: int = 64  # columns that share a scale

    def __post_init__(self) -> None:
        if self.bits not in (4, 8) or self.block < 2 or self.block % 2:
            raise ValueError(f"bits ({self.bits}) must be 8 or 4, and block ({self.block}) an even number of columns")

    @property
    def num_blocks(self) -> int:
        return -(-self.columns // self.block)

    @property
    def code_nbytes(self) -> int:
        """Bytes of a row's codes; even, so that the scales are aligned."""
        return -(-self.columns * self.bits // 16) * 2

    @property
    def row_nbytes(self) -> int:
        return self.code_nbytes + 2 * self.num_blocks


@torch.no_grad()
def quantize_rows(w: Tensor, form: RowForm) -> Tensor:
    """[rows, columns], floating-point and finite -> uint8 [rows, row_nbytes]."""
    if w.numel() == 0:
        return torch.zeros(len(w), form.row_nbytes, dtype=torch.uint8, device=w.device)
    padded = F.pad(w.float(), (0, form.num_blocks * form.block - form.columns)).view(len(w), form.num_blocks, form.block)
    scales = _up_to_bf16(padded.abs().amax(2))
    units = padded / scales.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    if form.bits == 8:
        codes = (units * 127).round_().to(torch.int8).view(torch.uint8).flatten(1)[:, : form.columns]
        codes = F.pad(codes, (0, form.code_nbytes - form.columns))
    else:
        table = torch.tensor(NF4, dtype=torch.float32, device=w.device)
        indices = torch.bucketize(units, (table[1:] + table[:-1]) / 2, out_int32=True).to(torch.uint8)
        indices = F.pad(indices.flatten(1)[:, : form.columns], (0, 2 * form.code_nbytes - form.columns))
        codes = indices[:, ::2] | (indices[:, 1::2] << 4)
    return torch.cat([codes, scales.to(torch.bfloat16).view(torch.uint8).view(len(w), -1)], 1)


def dequantize_rows(packed: Tensor, form: RowForm, dtype: torch.dtype) -> Tensor:
    """uint8 [rows, row_nbytes] -> [rows, columns]: code times scale in fp32, rounded once to `dtype`."""
    return _dequantize(packed, form.bits, form.columns, form.block, dtype)


@torch.library.custom_op("slipstream::dequantize_rows", mutates_args=())  # one operation for compilers and fake tensors
def _dequantize(packed: Tensor, bits: int, columns: int, block: int, dtype: torch.dtype) -> Tensor:
    form = RowForm(bits=bits, columns=columns, block=block)
    if cpu._kernels() is None or dtype not in cpu.DTYPES or block % 16 or not packed.is_cpu:
        return in_torch(packed, form, dtype)
    packed, out = packed.contiguous(), packed.new_empty(len(packed), columns, dtype=dtype)
    arrays, least = {"w": out, "codes": packed, "pairs": _pairs(packed.device)}, cpu.THREAD_NUMEL // max(columns, 1) + 1
    layout = {"bits": bits, "columns": columns, "block": block, "code_nbytes": form.code_nbytes, "row_nbytes": form.row_nbytes}
    cpu.quantize(cpu.FROM_ROWS, arrays, len(packed), least, **layout)
    return out


@_dequantize.register_fake
def _(packed: Tensor, bits: int, columns: int, block: int, dtype: torch.dtype) -> Tensor:
    return packed.new_empty(len(packed), columns, dtype=dtype)


@torch.no_grad()
def in_torch(packed: Tensor, form: RowForm, dtype: torch.dtype) -> Tensor:
    """The torch twin of `dequantize_rows`, for any device, dtype and block."""
    if not len(packed) or not form.columns:
        return torch.zeros(len(packed), form.columns, dtype=dtype, device=packed.device)
    rows = len(packed)
    scales = packed[:, form.code_nbytes :].contiguous().view(torch.bfloat16).float()
    codes = packed[:, : form.code_nbytes]
    if form.bits == 8:
        units = codes.contiguous().view(torch.int8)[:, : form.columns].float()
        scales = scales / 127
    else:
        units = F.embedding(codes.int(), _pairs(packed.device)).flatten(1)[:, : form.columns]
    if form.columns % form.block == 0:
        return (units.reshape(rows, -1, form.block) * scales[..., None]).view(rows, -1).to(dtype)
    return (units * scales.repeat_interleave(form.block, 1)[:, : form.columns]).to(dtype)


@functools.cache
def _pairs(device: torch.device) -> Tensor:
    """fp32 [256, 2]: the two values that each byte of NF4 codes encodes."""
    byte = torch.arange(256, device=device)
    return torch.tensor(NF4, dtype=torch.float32, device=device)[torch.stack([byte & 15, byte >> 4], 1)]


def _up_to_bf16(x: Tensor) -> Tensor:
    """Round x >= 0 up to bf16; the result is in fp32."""
    return (((x.contiguous().view(torch.int32) + 0xFFFF) >> 16) << 16).view(torch.float32)

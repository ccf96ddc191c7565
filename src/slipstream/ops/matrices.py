"""Matrices of products, row-major [out, in] as in `nn.Linear`, and as panels: the layout that the native kernels read.

A `Matrix` is a tensor, or `Int8`, `Int4` or `KQuant`. `tables_of` tells which of its words go into which panels (csrc/decoder.h
describes the layout), `fill` writes them, `rows_of` reads them back.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.ops import build, cpu

# As in csrc/decoder.h.
PANEL = 16  # columns packed together, and positions of a cache block
CODES = 32  # features per scale of activations that are rounded to 8 bits
TYPES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_INT8, _INT4, _INT8_GROUPS, _K4 = 3, 4, 5, 6  # after the last, 5 and 6 bits
K_BLOCK = 256  # features of a block of `KQuant`

_pointer, _long, _int = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class Int8(NamedTuple):
    """Weight-only, symmetric per output channel, or in groups along the input: w = q * scale."""

    q: Tensor  # int8 [out, in]
    scale: Tensor  # fp32 [out], or [out, in / group]


class Int4(NamedTuple):
    """Weight-only, affine in groups along the input: w = q * scale + low, q in 0..15."""

    q: Tensor  # uint8 [out, in / 2]: input 2j in the low nibble of byte j, 2j + 1 in the high one
    scale: Tensor  # fp32 [out, in / group]
    low: Tensor  # fp32 [out, in / group]


class KQuant(NamedTuple):
    """Weight-only, in llama.cpp's blocks of 256 inputs, whose groups have integers as scales. 6 bits, in groups of 16:
    w = d * scale * (code - 32). 4 or 5 bits, in groups of 32: w = d * scale * code - d_min * minimum."""

    q: Tensor  # uint8 [out, in * bits / 8], packed by `pack_codes`
    scale: Tensor  # int8 [out, in / 16]; for 4 or 5 bits, each group's scale and minimum
    d: Tensor  # fp16 [out, in / 256]; for 4 or 5 bits [out, in / 128], each block's d and d_min

    @property
    def features(self) -> int:
        return self.scale.shape[1] * 16

    @property
    def bits(self) -> int:
        return self.q.shape[1] * 8 // self.features

    def affine(self) -> tuple[Tensor, Tensor]:
        """(scale, low) of each group, fp32 [out, groups]: w = code * scale + low, exactly."""
        if self.bits == 6:
            scale = (self.scale.unflatten(1, (-1, K_BLOCK // 16)) * self.d.float()[..., None]).flatten(1)
            return scale, scale * -32
        pairs = self.scale.unflatten(1, (-1, K_BLOCK // CODES, 2)) * self.d.float().unflatten(1, (-1, 1, 2))
        return pairs[..., 0].flatten(1), -pairs[..., 1].flatten(1)


Codes = Int8 | Int4 | KQuant
Matrix = Tensor | Codes  # a Tensor is fp32, bf16 or fp16


# -- values ----------------------------------------------------------------------------------------------------------------


def to_int8(w: Tensor) -> Int8:
    """[out, in] -> symmetric int8 with one scale per output channel; the error is at most half a scale."""
    return Int8(*cpu.quantize_int8(w))


def to_int4(w: Tensor, group: int = 32) -> Int4:
    """[out, in] -> affine int4; each group uses the range with the least squared error among a few candidates."""
    return Int4(*cpu.quantize_int4(w, group))


def to_kind(w: Tensor, kind: str, group: int = 32) -> Int8 | Int4:
    """Quantize to int8, or to int4 if the group size divides the inputs."""
    return to_int4(w, group) if kind == "int4" and w.shape[1] % group == 0 else to_int8(w)


def blank_of(m: Matrix, *, kind: str, group: int, dtype: torch.dtype) -> Matrix:
    """The form, on meta, in which a matrix is loaded: `to_kind(m, kind, group)`, or a tensor of `dtype`. Codes stay codes."""
    if not isinstance(m, Tensor):
        return type(m)(*(part.to("meta") for part in m))
    (rows, features), new = m.shape, functools.partial(torch.empty, device="meta")
    if kind == "int4" and features % group == 0:
        scale = new(rows, features // group)
        return Int4(new(rows, features // 2, dtype=torch.uint8), scale, scale)
    return Int8(new(rows, features, dtype=torch.int8), new(rows)) if kind in ("int8", "int4") else new(rows, features, dtype=dtype)


def unpack(q: Tensor) -> Tensor:
    """Packed nibbles of `Int4`, uint8 [out, in / 2] -> uint8 [out, in] in 0..15."""
    return torch.stack((q & 15, q >> 4), 2).flatten(1)


_WORDS = {4: (2, 1), 5: (8, 5), 6: (4, 3)}  # `KQuant` bits -> (words of codes, words that store them)
# Codes stored in the upper bits of other words: (word, its first bit, number of bits, stored word, first bit there).
_ABOVE = {
    4: [(1, 0, 4, 0, 4)],
    5: [(5, 0, 3, 0, 5), (5, 3, 2, 1, 5), (6, 0, 3, 2, 5), (6, 3, 2, 3, 5), (7, 0, 1, 1, 7), (7, 1, 1, 3, 7), (7, 2, 3, 4, 5)],
    6: [(3, 0, 2, 0, 6), (3, 2, 2, 1, 6), (3, 4, 2, 2, 6)],
}


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes of 4, 5 or 6 bits, uint8 [rows, in], into uint8 [rows, in * bits / 8], in the kernels' words: four codes each in
    the low bits of their bytes, and other words' codes above them (csrc/decoder.h, [Note: K-quants])."""
    num, stored = _WORDS[bits]
    words = codes.contiguous().view(torch.int32).unflatten(1, (-1, num))  # four bytes at once
    out = words[:, :, :stored].clone()
    for word, low, width, at, begin in _ABOVE[bits]:
        out[:, :, at] |= (words[:, :, word] >> low & _in_each(width)) << begin
    return out.flatten(1).view(torch.uint8)


def unpack_codes(q: Tensor, bits: int) -> Tensor:
    num, stored = _WORDS[bits]
    packed = q.contiguous().view(torch.int32).unflatten(1, (-1, stored))
    words = torch.zeros(*packed.shape[:2], num, dtype=torch.int32, device=q.device)
    words[:, :, :stored] = packed & _in_each(bits)
    for word, low, width, at, begin in _ABOVE[bits]:
        words[:, :, word] |= (packed[:, :, at] >> begin & _in_each(width)) << low
    return words.flatten(1).view(torch.uint8)


def _in_each(width: int) -> int:
    """A mask for the lowest bits of four bytes."""
    return 0x01010101 * ((1 << width) - 1)


def dequantize(m: Matrix) -> Tensor:
    """A quantized matrix in fp32; a tensor is returned unchanged."""
    match m:
        case Int8():
            if m.scale.dim() == 2:
                return (m.q.unflatten(1, (m.scale.shape[1], -1)) * m.scale[..., None]).flatten(1)
            return cpu.dequantize_int8(*m)
        case Int4():
            return cpu.dequantize_int4(*m)
        case KQuant():
            scale, low = m.affine()
            codes = unpack_codes(m.q, m.bits).unflatten(1, (scale.shape[1], -1))
            return (codes * scale[..., None] + low[..., None]).flatten(1)
        case _:
            return m


def round_activations(x: Tensor, group: int = CODES) -> Tensor:
    """Round x [..., features] like the native int8 and int4 products: symmetric, 8 bits, a scale per `group` features of a row."""
    features = x.shape[-1]
    wide = torch.nn.functional.pad(x.float(), (0, -features % group)).unflatten(-1, (-1, group))
    most = wide.abs().amax(-1, keepdim=True)
    codes = (wide * (127 / most.clamp_min(1e-30))).round_()
    return (codes * (most / 127)).flatten(-2)[..., :features].to(x.dtype)


# -- panels ----------------------------------------------------------------------------------------------------------------


class MatrixRecord(ctypes.Structure):
    """`struct matrix`. Its addresses do not keep memory alive."""

    _fields_ = (
        *((name, _pointer) for name in ("data", "scale", "low", "bias")),
        *((name, _long) for name in ("num_columns", "num_features")),
        *((name, _int) for name in ("type", "group")),
    )


class Table(NamedTuple):
    """Rows to pack into panels [panel][word][PANEL]: each row's bytes are cut into words."""

    rows: Tensor  # [columns, ...]
    word: int  # bytes
    padding: int = 0  # words per row beyond those of its own bytes
    nibbles: bool = False

    @property
    def row_nbytes(self) -> int:
        return self.rows.numel() * self.rows.itemsize // len(self.rows)

    @property
    def num_words(self) -> int:
        return -(-self.row_nbytes // self.word) + self.padding

    @property
    def panel_nbytes(self) -> int:
        return self.num_words * PANEL * self.word

    def num_panels(self, num_parts: int) -> int:
        """Columns are padded to two panels; two matrices packed together share these."""
        multiple = 2 if num_parts == 1 else 1
        return -(-len(self.rows) // (multiple * PANEL)) * multiple


def tables_of(matrix: Matrix) -> dict[str, Table]:
    """The tables of a matrix, by field of `MatrixRecord`."""
    match matrix:
        case Int4():
            halves = {name: Table(part.half(), 2) for name, part in (("scale", matrix.scale), ("low", matrix.low))}
            return {"data": Table(matrix.q, 4, nibbles=True), **halves}
        case Int8():
            features = matrix.q.shape[1]
            padding = (features + -features % CODES) // 4 - -(-features // 4)
            scale = Table(matrix.scale.half(), 2) if matrix.scale.dim() == 2 else Table(matrix.scale.float(), 4)
            return {"data": Table(matrix.q, 4, padding), "scale": scale}
        case KQuant():
            return {"data": Table(matrix.q, 4), "scale": Table(matrix.scale, 1), "low": Table(matrix.d, 2)}
        case _:
            word = 2 if matrix.dtype == torch.float16 else 4  # two features of bf16
            return {"data": Table(matrix.detach(), word)}


def bias_table(bias: Tensor) -> Table:
    return Table(bias.detach().float(), 4)


def is_centred(matrix: Matrix) -> bool:
    """Whether its offsets follow from its scales, as in llama.cpp's blocks. False for zeros, which may be overwritten."""
    return isinstance(matrix, Int4) and bool(matrix.scale.any()) and torch.equal(matrix.low, matrix.scale * -8)


def record_of(matrix: Matrix, num_parts: int = 1) -> MatrixRecord:
    """A record without addresses. `num_parts`: number of matrices like this one that are packed together."""
    match matrix:
        case Int4():
            columns, features = len(matrix.q), 2 * matrix.q.shape[1]
            kind, group = _INT4, features // matrix.scale.shape[1]
        case Int8():
            columns, features = len(matrix.q), matrix.q.shape[1]
            kind, group = (_INT8, 0) if matrix.scale.dim() == 1 else (_INT8_GROUPS, features // matrix.scale.shape[1])
            features += -features % CODES
        case KQuant():
            columns, features, kind, group = len(matrix.q), matrix.features, _K4 + matrix.bits - 4, 0
        case _:
            (columns, features), kind, group = matrix.shape, TYPES[matrix.dtype], 0
    return MatrixRecord(num_columns=columns * num_parts, num_features=features, type=kind, group=group)


@functools.cache
def _pack() -> Any:
    return build.function("slipstream_pack", None, _pointer, _long, _long, _pointer, _long, _long, _long, _int, _int)


def fill(address: int, table: Table, part: int = 0, num_parts: int = 1) -> None:
    """Write a table's panels, alternating with those of the other parts."""
    rows, size = table.rows.contiguous(), table.panel_nbytes
    _pack()(
        rows.data_ptr(),
        len(rows),
        table.row_nbytes,
        address + part * size,
        table.num_panels(num_parts),
        table.num_words,
        num_parts * size,
        table.word,
        table.nibbles,
    )


def rows_of(panels: Tensor, table: Table) -> Tensor:
    """The inverse of `fill`, in torch: uint8 panels of a table to rows like `table.rows`, which only gives the shape."""
    words = panels.view(-1, table.num_words, PANEL, table.word).transpose(1, 2)
    if table.nibbles:  # the first four of 8 features are in the low halves
        eight = torch.cat((words & 15, words >> 4), -1)
        words = eight[..., ::2] | eight[..., 1::2] << 4
    rows = words.flatten(2).flatten(0, 1)[: len(table.rows), : table.row_nbytes].contiguous()
    return rows.view(table.rows.dtype).view(table.rows.shape)

"""Matrices of products, row-major [out, in] as in `nn.Linear`, and as panels: the layout that the native kernels read.

A `Matrix` is a tensor, or `Int8` or `Int4`. `tables_of` says which words of it go into which panels (csrc/decoder.h has the
layout), `fill` writes them, `rows_of` reads them back.
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
_INT8, _INT4, _INT8_GROUPS = 3, 4, 5

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


Matrix = Tensor | Int8 | Int4  # a Tensor is fp32, bf16 or fp16


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
    """The form, on meta, that a matrix is loaded in: `to_kind(m, kind, group)`, or a tensor of `dtype`. Codes stay codes."""
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


def dequantize(m: Matrix) -> Tensor:
    """A quantized matrix in fp32; a tensor is returned unchanged."""
    match m:
        case Int8():
            if m.scale.dim() == 2:
                return (m.q.unflatten(1, (m.scale.shape[1], -1)) * m.scale[..., None]).flatten(1)
            return cpu.dequantize_int8(*m)
        case Int4():
            return cpu.dequantize_int4(*m)
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
        case _:
            word = 2 if matrix.dtype == torch.float16 else 4  # two features of bf16
            return {"data": Table(matrix.detach(), word)}


def bias_table(bias: Tensor) -> Table:
    return Table(bias.detach().float(), 4)


def is_centred(matrix: Matrix) -> bool:
    """Whether its offsets follow from its scales, as in llama.cpp's blocks. False for zeros, which may be overwritten."""
    return isinstance(matrix, Int4) and bool(matrix.scale.any()) and torch.equal(matrix.low, matrix.scale * -8)


def record_of(matrix: Matrix, num_parts: int = 1) -> MatrixRecord:
    """A record without addresses; `num_parts`: matrices like this one that are packed together."""
    match matrix:
        case Int4():
            columns, features = len(matrix.q), 2 * matrix.q.shape[1]
            kind, group = _INT4, features // matrix.scale.shape[1]
        case Int8():
            columns, features = len(matrix.q), matrix.q.shape[1]
            kind, group = (_INT8, 0) if matrix.scale.dim() == 1 else (_INT8_GROUPS, features // matrix.scale.shape[1])
            features += -features % CODES
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
    """The inverse of `fill`, by torch: uint8 panels of a table to rows like `table.rows`, which is used for its shape only."""
    words = panels.view(-1, table.num_words, PANEL, table.word).transpose(1, 2)
    if table.nibbles:  # of 8 features, the first four are in the low halves
        eight = torch.cat((words & 15, words >> 4), -1)
        words = eight[..., ::2] | eight[..., 1::2] << 4
    rows = words.flatten(2).flatten(0, 1)[: len(table.rows), : table.row_nbytes].contiguous()
    return rows.view(table.rows.dtype).view(table.rows.shape)

"""Quantized weights as the numbers that they stand for, of the rows that begin in this rank's range of the bytes.

A range of bytes may begin and end inside a row. A row is made by the rank that has its first byte; the bytes of it that others have
(their `head`) are told to all: less than a row of each tensor and rank. Numbers are made as they are read, a piece at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from slipstream.ops.rows import RowForm, dequantize_rows


class Rested(Protocol):
    """Bytes that are not in memory."""

    def numel(self) -> int: ...
    def get(self, start: int, stop: int) -> Tensor: ...


class Head(NamedTuple):
    """The bytes of a range that belong to a row which began before it."""

    start: int
    codes: Tensor


def head_of(data: Tensor | Rested, start: int, form: RowForm) -> Head:
    """Of the bytes [start, start + numel) of a packed matrix."""
    return Head(start, _get(data, 0, min(-start % form.row_nbytes, data.numel())).cpu().clone())


class Numbers:
    """Of one rank's bytes and everybody's heads: fp32 elements from `start` on, read-only."""

    dtype = torch.float32

    def __init__(self, data: Tensor | Rested, start: int, heads: Sequence[Head], form: RowForm) -> None:
        self.data, self.form = data, form
        stop = start + data.numel()
        self._skip = min(-start % form.row_nbytes, data.numel())
        self._tail = _bytes_from(stop, -stop % form.row_nbytes if self._skip < data.numel() else 0, heads)
        self.start = (start + self._skip) // form.row_nbytes * form.columns if self.numel() else 0

    def numel(self) -> int:
        return (self.data.numel() - self._skip + len(self._tail)) // self.form.row_nbytes * self.form.columns

    def get(self, start: int, stop: int) -> Tensor:
        form, there = self.form, self.data.numel()
        first, last = start // form.columns, -(-stop // form.columns)
        a, b = (self._skip + row * form.row_nbytes for row in (first, last))
        own = _get(self.data, min(a, there), min(b, there))
        packed = torch.cat([own, self._tail[max(a - there, 0) : max(b - there, 0)].to(own.device)])
        rows = dequantize_rows(packed.view(-1, form.row_nbytes), form, torch.float32)
        return rows.view(-1)[start - first * form.columns : stop - first * form.columns]

    def put(self, start: int, values: Tensor) -> None:
        raise AssertionError("numbers of a quantized weight are read only")


def _get(data: Tensor | Rested, start: int, stop: int) -> Tensor:
    return data[start:stop] if isinstance(data, Tensor) else data.get(start, stop)


def _bytes_from(start: int, nbytes: int, heads: Sequence[Head]) -> Tensor:
    """Bytes [start, start + nbytes), out of heads that follow each other."""
    at, end, found = start, start + nbytes, [torch.empty(0, dtype=torch.uint8)]
    known = {head.start: head.codes for head in heads if len(head.codes)}
    while at < end:
        found.append(known[at][: end - at])
        at += len(found[-1])
    return torch.cat(found)

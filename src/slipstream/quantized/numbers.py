"""Dequantize sharded weights: each rank dequantizes the rows that begin in its range of the bytes.

A range of bytes may begin and end inside a row. The rank with a row's first byte dequantizes it; the other ranks' bytes of the row
(their `Head`) are exchanged between all ranks: less than a row per tensor and rank. `Numbers` dequantizes when it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.checkpoint.flat_slice import Ranged
from slipstream.ops.rows import RowForm, dequantize_rows


class Head(NamedTuple):
    """The first bytes of a range, if they belong to a row that begins before the range."""

    start: int
    codes: Tensor


def head_of(data: Tensor | Ranged, start: int, form: RowForm) -> Head:
    """The head of `data`, the bytes [start, start + numel) of a packed matrix."""
    return Head(start, _get(data, 0, min(-start % form.row_nbytes, data.numel())).cpu().clone())


class Numbers:
    """The dequantized rows of one rank's bytes, with all ranks' heads: fp32 elements from `start` on, read-only."""

    dtype = torch.float32

    def __init__(self, data: Tensor | Ranged, start: int, heads: Sequence[Head], form: RowForm) -> None:
        self.data, self.form = data, form
        stop = start + data.numel()
        self._skip = min(-start % form.row_nbytes, data.numel())
        self._tail = _bytes_from(stop, -stop % form.row_nbytes if self._skip < data.numel() else 0, heads)
        self.start = (start + self._skip) // form.row_nbytes * form.columns if self.numel() else 0

    def numel(self) -> int:
        return (self.data.numel() - self._skip + len(self._tail)) // self.form.row_nbytes * self.form.columns

    def get(self, start: int, stop: int) -> Tensor:
        form, own_nbytes = self.form, self.data.numel()
        first, last = start // form.columns, -(-stop // form.columns)
        a, b = (self._skip + row * form.row_nbytes for row in (first, last))
        own = _get(self.data, min(a, own_nbytes), min(b, own_nbytes))
        packed = torch.cat([own, self._tail[max(a - own_nbytes, 0) : max(b - own_nbytes, 0)].to(own.device)])
        rows = dequantize_rows(packed.view(-1, form.row_nbytes), form, torch.float32)
        return rows.view(-1)[start - first * form.columns : stop - first * form.columns]

    def put(self, start: int, values: Tensor) -> None:
        raise AssertionError("dequantized weights are read-only")


def _get(data: Tensor | Ranged, start: int, stop: int) -> Tensor:
    return data[start:stop] if isinstance(data, Tensor) else data.get(start, stop)


def _bytes_from(start: int, nbytes: int, heads: Sequence[Head]) -> Tensor:
    """Bytes [start, start + nbytes), from consecutive heads."""
    at, end, parts = start, start + nbytes, [torch.empty(0, dtype=torch.uint8)]
    codes = {head.start: head.codes for head in heads if len(head.codes)}
    while at < end:
        parts.append(codes[at][: end - at])
        at += len(parts[-1])
    return torch.cat(parts)

"""Patterns of blocks for sparse attention, with the names, defaults and layouts of DeepSpeed before it removed them.

A layout is int64 [heads, blocks, blocks], 1 where a block of queries attends to a block of keys. 'unidirectional' restricts only
blocks: inside a block on the diagonal, and where `Fixed` and `Variable` go beyond it, queries see later keys unless a mask forbids
it. Random blocks come from Python's `random`: seed it to get the same layout again.

Sources: Sparse Transformers (arXiv 1904.10509) for Fixed, BigBird (arXiv 2007.14062), Longformer (arXiv 2004.05150).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from slipstream.ops.block_sparse import PANEL, BlockLayout

_SEED = 17
_LEAST = 1024  # tokens of a pattern's first layout; for longer sequences it is doubled

Direction = Literal["unidirectional", "bidirectional"]


@dataclass(eq=False, repr=False)
class SparsityConfig:
    """The base class: heads, block size, and whether each head has its own layout. Raises ValueError for bad sizes."""

    num_heads: int
    block: int = 16
    different_layout_per_head: bool = False

    def __post_init__(self) -> None:
        self._at_least(1, "num_heads", "block")
        if self.block % PANEL:
            raise ValueError(f"block ({self.block}) must be a multiple of {PANEL} tokens, which the kernels compute at once")
        self.num_layout_heads = self.num_heads if self.different_layout_per_head else 1

    def _at_least(self, least: int, *names: str) -> None:
        for name in names:
            if (value := getattr(self, name)) < least:
                raise ValueError(f"{name} ({value}) must be at least {least}")

    def setup_layout(self, seq_len: int) -> Tensor:
        """Zeros in the layout's shape. Raises ValueError if the block size does not divide seq_len."""
        if seq_len % self.block or seq_len < self.block:
            longer = -(-max(seq_len, 1) // self.block) * self.block
            raise ValueError(
                f"{seq_len} tokens are not a multiple of the block ({self.block}): pad the sequence to {longer} tokens"
            )
        blocks = seq_len // self.block
        return torch.zeros(self.num_heads, blocks, blocks, dtype=torch.int64)

    def check_and_propagate_first_head_layout(self, layout: Tensor) -> Tensor:
        """Copy the first head's layout to the others, unless each has its own."""
        if not self.different_layout_per_head:
            layout[1:] = layout[:1]
        return layout

    def make_layout(self, seq_len: int) -> Tensor:
        """The layout for a sequence of seq_len tokens. Raises ValueError if the block size does not divide it."""
        layout = self.setup_layout(seq_len)
        for head in range(self.num_layout_heads):
            self.fill(head, layout[head])
        return self.check_and_propagate_first_head_layout(layout)

    def fill(self, head: int, rows: Tensor) -> None:
        """Set the blocks of `head` in `rows` [blocks, blocks], which is zero."""
        raise NotImplementedError(f"{type(self).__name__} defines no layout: use one of its subclasses, or define fill(head, rows)")


class DenseSparsityConfig(SparsityConfig):
    """All blocks."""

    def fill(self, head: int, rows: Tensor) -> None:
        rows.fill_(1)


@dataclass(eq=False, repr=False)
class FixedSparsityConfig(SparsityConfig):
    """Windows of `num_local_blocks`, and columns of `num_global_blocks` at the end of each window that all rows attend to.

    With `num_different_global_patterns`, heads take turns in which blocks of a window are global.
    """

    num_local_blocks: int = 4
    num_global_blocks: int = 1
    attention: Direction = "bidirectional"
    horizontal_global_attention: bool = False
    num_different_global_patterns: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(1, "num_local_blocks", "num_global_blocks", "num_different_global_patterns")
        size, wide, patterns = self.num_local_blocks, self.num_global_blocks, self.num_different_global_patterns
        if size % wide:
            raise ValueError(f"num_global_blocks ({wide}) must divide num_local_blocks ({size})")
        _check_direction(self.attention, self.horizontal_global_attention)
        if patterns > 1 and not self.different_layout_per_head:
            raise ValueError(f"num_different_global_patterns ({patterns}) needs different_layout_per_head")
        if patterns > size // wide:
            raise ValueError(
                f"num_different_global_patterns ({patterns}) exceeds num_local_blocks / num_global_blocks ({size // wide})"
            )

    def fill(self, head: int, rows: Tensor) -> None:
        size, wide, blocks = self.num_local_blocks, self.num_global_blocks, len(rows)
        one_way = self.attention == "unidirectional"
        _windows(rows, [size], one_way)
        first = size - (1 + head % self.num_different_global_patterns) * wide
        whole = blocks - blocks % size
        starts = list(range(first, whole, size))
        if whole < blocks:  # a last window that is shorter
            starts.append(max(min(whole + first, blocks - wide), 0))
        for start in starts:
            rows[start if one_way else 0 :, start : start + wide] = 1
            if self.horizontal_global_attention:
                rows[start : start + wide] = 1


@dataclass(eq=False, repr=False)
class VariableSparsityConfig(SparsityConfig):
    """Random blocks in each row, windows of the listed lengths (the last length repeats), and global blocks by index."""

    num_random_blocks: int = 0
    local_window_blocks: Sequence[int] | None = None
    global_block_indices: Sequence[int] | None = None
    global_block_end_indices: Sequence[int] | None = None
    attention: Direction = "bidirectional"
    horizontal_global_attention: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(0, "num_random_blocks")
        self.local_window_blocks = windows = [4] if self.local_window_blocks is None else list(self.local_window_blocks)
        if not windows or min(windows) < 1:
            raise ValueError(f"local_window_blocks ({windows}) must list lengths of at least 1")
        self.global_block_indices, self.global_block_end_indices = _global_blocks(
            self.global_block_indices, self.global_block_end_indices
        )
        _check_direction(self.attention, self.horizontal_global_attention)

    def fill(self, head: int, rows: Tensor) -> None:
        one_way = self.attention == "unidirectional"
        _random(rows, self.num_random_blocks, one_way=False)
        _windows(rows, self.local_window_blocks or (), one_way)
        for start, end in _spans(self.global_block_indices or (), self.global_block_end_indices, len(rows)):
            if self.horizontal_global_attention:
                rows[start:end] = 1
            rows[start if one_way else 0 :, start:end] = 1


@dataclass(eq=False, repr=False)
class BigBirdSparsityConfig(SparsityConfig):
    """Random blocks in each row, a sliding window, and the first blocks as full rows and columns."""

    num_random_blocks: int = 1
    num_sliding_window_blocks: int = 3
    num_global_blocks: int = 1
    attention: Direction = "bidirectional"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(0, "num_random_blocks", "num_global_blocks")
        self._at_least(1, "num_sliding_window_blocks")
        _check_direction(self.attention)

    def fill(self, head: int, rows: Tensor) -> None:
        one_way, least = self.attention == "unidirectional", max(self.num_random_blocks, self.num_sliding_window_blocks)
        if len(rows) < max(least, self.num_global_blocks):
            raise ValueError(
                f"a sequence of {len(rows)} blocks is shorter than num_random_blocks ({self.num_random_blocks}), "
                f"num_sliding_window_blocks ({self.num_sliding_window_blocks}) or num_global_blocks ({self.num_global_blocks})"
            )
        _random(rows, self.num_random_blocks, one_way)
        _slide(rows, self.num_sliding_window_blocks)
        rows[: self.num_global_blocks] = 1
        rows[:, : self.num_global_blocks] = 1
        if one_way:
            rows.tril_()


@dataclass(eq=False, repr=False)
class BSLongformerSparsityConfig(SparsityConfig):
    """A sliding window, and global blocks by index as full rows and columns."""

    num_sliding_window_blocks: int = 3
    global_block_indices: Sequence[int] | None = None
    global_block_end_indices: Sequence[int] | None = None
    attention: Direction = "bidirectional"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(1, "num_sliding_window_blocks")
        _check_direction(self.attention)
        self.global_block_indices, self.global_block_end_indices = _global_blocks(
            self.global_block_indices, self.global_block_end_indices
        )

    def fill(self, head: int, rows: Tensor) -> None:
        _slide(rows, self.num_sliding_window_blocks)
        for start, end in _spans(self.global_block_indices or (), self.global_block_end_indices, len(rows)):
            rows[start:end] = 1
            rows[:, start:end] = 1
        if self.attention == "unidirectional":
            rows.tril_()


@dataclass(eq=False, repr=False)
class LocalSlidingWindowSparsityConfig(SparsityConfig):
    """A sliding window alone."""

    different_layout_per_head: bool = field(default=False, init=False)
    num_sliding_window_blocks: int = 3
    attention: Direction = "unidirectional"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(1, "num_sliding_window_blocks")
        _check_direction(self.attention)

    def fill(self, head: int, rows: Tensor) -> None:
        _slide(rows, self.num_sliding_window_blocks)
        if self.attention == "unidirectional":
            rows.tril_()


MODES: dict[str, type[SparsityConfig]] = {
    "dense": DenseSparsityConfig,
    "fixed": FixedSparsityConfig,
    "variable": VariableSparsityConfig,
    "bigbird": BigBirdSparsityConfig,
    "bslongformer": BSLongformerSparsityConfig,
    "local": LocalSlidingWindowSparsityConfig,
}


def sparsity_of(pattern: Mapping[str, Any], num_heads: int) -> SparsityConfig:
    """The pattern of a JSON block {"mode": ..., parameters}. Raises ValueError for an unknown mode or parameter."""
    values = dict(pattern)
    mode = values.pop("mode", "fixed")
    if mode not in MODES:
        raise ValueError(f"sparse attention's mode ({mode!r}) must be one of {', '.join(map(repr, MODES))}")
    try:
        return MODES[mode](num_heads, **values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"sparse attention's mode {mode!r}: {error}") from None


class Layouts:
    """The layouts of one pattern, by length: the upper left parts of the layout for the longest sequence so far.

    Random blocks are drawn with a fixed seed, so every rank, and a later run, has the same ones.
    """

    def __init__(self, config: SparsityConfig) -> None:
        self.config = config
        self._longest = torch.empty(0, 0, 0)
        self._layouts: dict[tuple[int, bool], BlockLayout] = {}

    def of(self, length: int, causal: bool) -> BlockLayout:
        """The layout for at least `length` tokens, in whole blocks."""
        blocks = -(-length // self.config.block)
        if blocks > self._longest.shape[1]:
            longest = -(-_LEAST // self.config.block)
            while longest < blocks:
                longest *= 2
            state = random.getstate()
            random.seed(_SEED)
            try:
                self._longest = self.config.make_layout(longest * self.config.block) != 0
            finally:
                random.setstate(state)
            self._layouts.clear()
        if (blocks, causal) not in self._layouts:
            self._layouts[blocks, causal] = BlockLayout(self._longest[:, :blocks, :blocks], self.config.block, causal=causal)
        return self._layouts[blocks, causal]


_LAYOUTS: dict[tuple[Any, ...], Layouts] = {}


def layouts_of(pattern: Mapping[str, Any], num_heads: int) -> Layouts:
    """The layouts of a pattern, the same object for all models. Raises like `sparsity_of`."""
    identity = (num_heads, repr(sorted(pattern.items())))
    if identity not in _LAYOUTS:
        _LAYOUTS[identity] = Layouts(sparsity_of(pattern, num_heads))
    return _LAYOUTS[identity]


def draw(layout: Tensor, form: Literal["text", "svg"] = "text") -> str:
    """A picture of a layout [heads, blocks, blocks]: rows are queries, columns keys, heads side by side. Equal heads appear once.

    Raises ValueError for another form.
    """
    heads = layout[:1] if bool((layout == layout[:1]).all()) else layout
    if form == "text":
        rows = zip(*([[("█" if at else "·") for at in row] for row in head.tolist()] for head in heads), strict=True)
        return "\n".join("  ".join("".join(part) for part in row) for row in rows)
    if form != "svg":
        raise ValueError(f"form ({form!r}) must be 'text' or 'svg'")
    blocks = layout.shape[1]
    apart, unit = blocks + 2, max(2, 192 // blocks)
    cells = (
        f'<rect x="{(head * apart + column) * unit}" y="{row * unit}" width="{unit}" height="{unit}"/>'
        for head, row, column in heads.nonzero().tolist()
    )
    frames = (
        f'<rect x="{head * apart * unit}" y="0" width="{blocks * unit}" height="{blocks * unit}"/>' for head in range(len(heads))
    )
    size = f'width="{(len(heads) * apart - 2) * unit}" height="{blocks * unit}"'
    frame = f'<g fill="#eef1f5" stroke="#99a">{"".join(frames)}</g>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{frame}<g fill="#2b6cb0">{"".join(cells)}</g></svg>\n'


def _windows(rows: Tensor, lengths: Sequence[int], one_way: bool) -> None:
    start, at = 0, 0
    while start < len(rows):
        end = min(start + lengths[min(at, len(lengths) - 1)], len(rows))
        window = torch.ones(end - start, end - start, dtype=rows.dtype)
        rows[start:end, start:end] = window.tril() if one_way else window
        start, at = end, at + 1


def _slide(rows: Tensor, wide: int) -> None:
    at = torch.arange(len(rows))
    rows[(at[:, None] - at[None, :]).abs() <= wide // 2] = 1
    if len(rows) < wide:
        raise ValueError(f"a sequence of {len(rows)} blocks is shorter than num_sliding_window_blocks ({wide})")


def _random(rows: Tensor, count: int, one_way: bool) -> None:
    if count > len(rows):
        raise ValueError(f"num_random_blocks ({count}) is more than a row's blocks ({len(rows)})")
    for row in range(len(rows)) if count else ():
        choices = range(row + 1 if one_way else len(rows))
        rows[row, random.sample(choices, min(count, len(choices)))] = 1


def _global_blocks(indices: Sequence[int] | None, ends: Sequence[int] | None) -> tuple[list[int], list[int] | None]:
    starts = [0] if indices is None else list(indices)
    if ends is None:
        return starts, None
    if len(ends) != len(starts):
        raise ValueError(f"global_block_end_indices has {len(ends)} entries, and global_block_indices {len(starts)}: one for each")
    for start, end in zip(starts, ends, strict=True):
        if start >= end:
            raise ValueError(f"global blocks from {start} to {end} are none: an end index must be above its start")
    return starts, list(ends)


def _spans(starts: Sequence[int], ends: Sequence[int] | None, blocks: int) -> list[tuple[int, int]]:
    """The spans that lie in a sequence of `blocks` blocks."""
    stops = [start + 1 for start in starts] if ends is None else ends
    return [(start, min(stop, blocks)) for start, stop in zip(starts, stops, strict=True) if start < blocks]


def _check_direction(attention: str, horizontal: bool = False) -> None:
    if attention not in ("unidirectional", "bidirectional"):
        raise ValueError(f"attention ({attention!r}) must be 'unidirectional' or 'bidirectional'")
    if horizontal and attention == "unidirectional":
        raise ValueError("horizontal_global_attention needs attention='bidirectional': whole rows look ahead")

"""Flat ranges and boxes: pure properties, without processes or files."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.checkpoint.flat_slice import Box, FlatSlice, boxes, check_cover, flat_range, runs
from slipstream.checkpoint.plan import Extent, choose_writers, shares_of

shapes = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(shapes)
    numel = math.prod(shape)
    start = draw(st.integers(0, numel))
    return shape, start, draw(st.integers(start, numel))


@given(ranges())
def test_boxes_are_the_range_in_memory_order(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    index = torch.arange(math.prod(shape)).view(shape)
    parts = boxes(shape, start, stop)
    picked = [index[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].flatten().tolist() for box in parts]
    assert list(itertools.chain.from_iterable(picked)) == list(range(start, stop))
    assert len(parts) <= max(1, 2 * len(shape) - 1)
    for box, elements in zip(parts, picked, strict=True):
        assert flat_range(shape, box) == (elements[0], elements[-1] + 1)


@given(shapes, st.lists(st.floats(0, 1), max_size=5), st.randoms(use_true_random=False))
def test_any_partition_covers_and_any_change_to_it_does_not(shape, cuts, random) -> None:
    numel = math.prod(shape)
    bounds = [0, *sorted(int(cut * numel) for cut in cuts), numel]
    parts = [box for start, stop in itertools.pairwise(bounds) for box in boxes(shape, start, stop)]
    check_cover("w", shape, parts)
    random.shuffle(parts)
    check_cover("w", shape, parts)
    with pytest.raises(ValueError, match="overlap"):
        check_cover("w", shape, [*parts, parts[0]])
    with pytest.raises(ValueError, match=r"only \d+ of|nothing of it"):
        check_cover("w", shape, parts[1:])


def test_tensor_parallel_boxes_cover_too() -> None:
    grid = [Box((row, column), (2, 3)) for row in (0, 2) for column in (0, 3, 6)]
    check_cover("w", (4, 9), grid)
    with pytest.raises(ValueError, match="overlap"):
        check_cover("w", (4, 9), [*grid[:-1], Box((1, 6), (3, 3))])
    with pytest.raises(ValueError, match="only 30 of 36"):
        check_cover("w", (4, 9), grid[:-1])
    with pytest.raises(ValueError, match="outside"):
        check_cover("w", (4, 8), grid)
    assert flat_range((4, 9), grid[1]) is None


def test_zero_elements_are_one_empty_box() -> None:
    assert boxes((0, 3), 0, 0) == [Box((0, 0), (0, 3))]
    check_cover("w", (0, 3), boxes((0, 3), 0, 0))
    assert boxes((4, 3), 5, 5) == []
    assert boxes((), 0, 1) == [Box((), ())]
    with pytest.raises(ValueError, match="nothing of it is there"):
        check_cover("w", (0, 3), [])


@given(ranges())
def test_pieces_are_views_of_data(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    part = FlatSlice(torch.arange(start, stop), shape, start)
    values = torch.arange(math.prod(shape)).view(shape)
    for share in shares_of({"w": part}):
        assert isinstance(share.values, torch.Tensor)
        assert torch.equal(share.values, values[tuple(slice(o, o + n) for o, n in zip(*share.box, strict=True))])
        share.values.fill_(-1)
    assert bool((part.data == -1).all()) and part.stop == stop


@given(st.data(), st.lists(st.integers(1, 4), min_size=0, max_size=4))
def test_runs_are_the_box_in_order(data: st.DataObject, shape: list[int]) -> None:
    offsets = [data.draw(st.integers(0, size - 1)) for size in shape]
    sizes = [data.draw(st.integers(1, size - offset)) for size, offset in zip(shape, offsets, strict=True)]
    box = Box(tuple(offsets), tuple(sizes))
    start, stop = sorted(data.draw(st.integers(0, box.numel)) for _ in range(2))
    values = torch.arange(math.prod(shape)).view(shape)
    results = [element for first, numel in runs(tuple(shape), box, start, stop) for element in range(first, first + numel)]
    assert results == box.of(values).flatten()[start:stop].tolist()


def test_equal_boxes_are_written_by_the_rank_with_the_least() -> None:
    whole, halves = Box((0,), (8,)), boxes((8,), 0, 4) + boxes((8,), 4, 8)
    extents = [
        {
            "a": Extent(torch.float32, (8,), [whole]),
            "b": Extent(torch.float32, (8,), [half]),
            "c": Extent(torch.int8, (8,), [whole]),
        }
        for half in halves
    ]
    for all_extents in (extents, [*extents, {"a": extents[0]["a"]}]):
        assert choose_writers(all_extents) == {("a", whole): 0, ("c", whole): 1}
    with pytest.raises(ValueError, match=r"'b' of shape .* only 4 of 8 elements"):
        choose_writers(extents[:1])
    with pytest.raises(ValueError, match=r"'a' is torch.int8 of shape .* on rank 1 and torch.float32"):
        choose_writers([extents[0], {"a": extents[0]["c"]}])


@pytest.mark.parametrize(
    ("data", "shape", "start", "match"),
    [
        (torch.zeros(2, 2), (4,), 0, "1-D and contiguous"),
        (torch.zeros(8)[::2], (8,), 0, "1-D and contiguous"),
        (torch.zeros(4), (2, 2), 1, r"\[1, 5\) is outside"),
        (torch.zeros(1), (2, 2), -1, r"\[-1, 0\) is outside"),
    ],
)
def test_refusals(data: torch.Tensor, shape: tuple[int, ...], start: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        FlatSlice(data, shape, start)


def test_range_outside_its_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"range \[3, 9\) is outside"):
        boxes((2, 4), 3, 9)

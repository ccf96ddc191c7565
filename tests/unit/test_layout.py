"""Placement, grouping and layout on random inputs: what the units above them take for granted."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from slipstream.zero.layout import ALIGN, Layout, flat_layout, overlap, whole_layout
from slipstream.zero.placement import Placement, stage_placement
from slipstream.zero.wrap import repeated_blocks, wrap

Shapes = list[tuple[str, tuple[int, ...]]]

shape = st.lists(st.sampled_from([0, 1, 2, 3, 7, 63, 64, 65, 100, 1000]), max_size=3).map(tuple)
shapes = st.lists(shape, max_size=12).map(lambda drawn: [(f"p{i}", s) for i, s in enumerate(drawn)])
worlds = st.integers(1, 9)


def check_slots(layout: Layout, given_shapes: Shapes) -> None:
    assert [(slot.name, slot.shape) for slot in layout.slots] == given_shapes
    assert [slot.numel for slot in layout.slots] == [math.prod(s) for _, s in given_shapes]
    assert all(slot.offset % ALIGN == 0 for slot in layout.slots)
    spans = sorted(slot.span for slot in layout.slots if slot.numel)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    assert all(start >= 0 and stop <= layout.numel for start, stop in spans)


def check_cuts(layout: Layout, world: int) -> None:
    assert layout.num_shards == world
    assert layout.cuts[0] == 0
    assert all(cut % ALIGN == 0 for cut in layout.cuts)
    assert list(layout.cuts) == sorted(layout.cuts)
    for count in (count for count in range(1, world + 1) if world % count == 0):
        coarse = layout.shards(count)
        assert len(coarse) == count + 1
        assert set(coarse) <= set(layout.cuts)  # each a union of finest shards
        assert [layout.span(count, i) for i in range(count)] == list(itertools.pairwise(coarse))
        assert (coarse[0], coarse[-1]) == (0, layout.numel)
        for slot in layout.slots:  # the shards share every parameter out between them
            parts = [overlap(slot.span, layout.span(count, i)) for i in range(count)]
            assert sum(stop - start for start, stop in parts) == slot.numel


@given(shapes, worlds)
def test_flat_layout(case: Shapes, world: int) -> None:
    layout = flat_layout(case, world)
    check_slots(layout, case)
    check_cuts(layout, world)
    assert len({stop - start for start, stop in itertools.pairwise(layout.cuts)}) == 1  # all-gather takes equal parts
    padding = layout.numel - sum(slot.numel for slot in layout.slots)
    assert padding < ALIGN * (len(case) + world)
    assert layout == flat_layout(case, world)


@given(shapes, worlds)
def test_whole_layout(case: Shapes, world: int) -> None:
    layout = whole_layout(case, world)
    check_slots(layout, case)
    check_cuts(layout, world)
    for slot in layout.slots:
        parts = [overlap(slot.span, layout.span(world, i)) for i in range(world)]
        assert slot.numel in [stop - start for start, stop in parts], f"{slot} is cut at {layout.cuts}"
    loads = [stop - start for start, stop in itertools.pairwise(layout.cuts)]
    largest = max((-(-slot.numel // ALIGN) * ALIGN for slot in layout.slots), default=0)
    assert max(loads) - min(loads) <= largest  # balanced: the last to get something had the least
    assert layout == whole_layout(case, world)


@given(st.data())
def test_overlap(data: st.DataObject) -> None:
    spans = [tuple(sorted(data.draw(st.tuples(st.integers(0, 30), st.integers(0, 30))))) for _ in range(2)]
    start, stop = overlap(spans[0], spans[1])
    assert set(range(start, stop)) == set(range(*spans[0])) & set(range(*spans[1]))


# ---- placement


@pytest.mark.parametrize("stage", range(4))
def test_stages_nest(stage: int) -> None:
    placement = stage_placement(stage)
    assert (placement.optim, placement.grads, placement.weights) == tuple(stage > i for i in range(3))


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("grads", [False, True])
def test_optimizer_states_extend_the_sharding_of_the_others(weights: bool, grads: bool) -> None:
    Placement(weights, grads, optim=True)
    if not weights and not grads:
        Placement()
        return
    with pytest.raises(ValueError, match="only if the optimizer states are"):
        Placement(weights, grads, optim=False)


@pytest.mark.parametrize("stage", [-1, 4])
def test_no_other_stage(stage: int) -> None:
    with pytest.raises(ValueError, match=f"stage is {stage}"):
        stage_placement(stage)


# ---- wrap


class Leaf(nn.Module):
    """A module with parameters of random dtype and trainability, some of them ties to earlier ones."""

    def __init__(self, data: st.DataObject, pool: list[nn.Parameter]) -> None:
        super().__init__()
        for i in range(data.draw(st.integers(0, 3))):
            if pool and data.draw(st.integers(0, 4)) == 0:
                param = data.draw(st.sampled_from(pool))
            else:
                dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
                param = nn.Parameter(torch.zeros(data.draw(st.integers(0, 3)), dtype=dtype), data.draw(st.booleans()))
            pool.append(param)
            self.register_parameter(f"p{i}", param)


class Other(Leaf):
    """Another class of the same kind: lists of unlike modules are no blocks."""


class Tree(Leaf):
    def __init__(self, data: st.DataObject, pool: list[nn.Parameter], depth: int) -> None:
        super().__init__(data, pool)
        for i in range(data.draw(st.integers(0, 3))):
            self.add_module(f"m{i}", tree(data, pool, depth - 1))


def tree(data: st.DataObject, pool: list[nn.Parameter], depth: int) -> nn.Module:
    kind = data.draw(st.sampled_from(["leaf", "other", "tree", "list", "sequence", "dictionary"] if depth else ["leaf", "other"]))
    if kind in ("leaf", "other"):
        return (Leaf if kind == "leaf" else Other)(data, pool)
    if kind == "tree":
        return Tree(data, pool, depth)
    children: list[Any] = [tree(data, pool, depth - 1) for _ in range(data.draw(st.integers(0, 4)))]
    if kind == "dictionary":
        return nn.ModuleDict({f"k{i}": child for i, child in enumerate(children)})
    return nn.ModuleList(children) if kind == "list" else nn.Sequential(*children)


@given(st.data())
def test_wrap_puts_every_parameter_in_one_group(data: st.DataObject) -> None:
    model = Tree(data, [], depth=3)
    groups = wrap(model)
    params = dict(model.named_parameters())  # ties once, under their first name
    assert sorted(name for group in groups for name in group.param_names) == sorted(params)
    blocks = repeated_blocks(model)
    assert not [(a, b) for a, b in itertools.permutations(blocks, 2) if b.startswith(a + ".")], "a block in a block"
    for group in groups:
        assert group.param_names, "an empty group"
        assert {(params[name].dtype, params[name].requires_grad) for name in group.param_names} == {(group.dtype, group.trainable)}
        for name in group.param_names:
            inside = [block for block in blocks if name.startswith(block + ".")]
            assert group.module_name == (inside[0] if inside else "")
    keys = [(group.module_name, group.dtype, group.trainable) for group in groups]
    assert len(set(keys)) == len(keys)
    order = ["", *blocks]
    assert [order.index(name) for name, *_ in keys] == sorted(order.index(name) for name, *_ in keys)
    assert wrap(model) == groups

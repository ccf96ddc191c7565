"""The block pool: sharing, finding, eviction order, copy-on-write, and that its integrity check sees what is wrong."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.inference.blocks import BlockPool
from tests.inference.blocks import check_blocks


def computed(pool: BlockPool, tokens: list[int]) -> list[int]:
    """The table of a sequence that has been computed whole."""
    table = pool.fork(pool.match(tokens))
    pool.reserve(table, len(table) * pool.block_size, len(tokens))
    pool.publish(table, tokens, 0, len(tokens))
    return table


def test_found_as_far_as_equal_and_never_whole() -> None:
    pool = BlockPool(8, 2)
    table = computed(pool, [1, 2, 3, 4, 5])
    assert len(table) == 3
    assert pool.match([1, 2, 3, 4, 9]) == table[:2]
    assert pool.match([1, 2, 3, 4]) == table[:1], "the last token is always computed"
    assert pool.match([1, 2, 9, 4, 5]) == table[:1]
    assert pool.match([3, 4, 5]) == [], "equal tokens after another beginning"
    assert pool.match([1, 2]) == pool.match([1]) == pool.match([]) == []
    pool.free(table)
    assert table == [] and pool.num_free == 8
    assert len(pool.match([1, 2, 3, 4, 5])) == 2, "freed, and still found"


def test_equal_hashes_are_not_equal_tokens() -> None:
    zero = 2**61 - 1
    assert hash((zero, 5)) == hash((0, 5))
    pool = BlockPool(4, 2)
    table = computed(pool, [0, 5, 7])
    assert pool.match([zero, 5, 7]) == []
    assert pool.match([0, 5, 7]) == table[:1]


def test_not_found_before_it_is_computed() -> None:
    pool, tokens = BlockPool(4, 2), [1, 2, 3, 4, 5]
    table: list[int] = []
    pool.reserve(table, 0, 5)
    assert pool.match(tokens) == []
    pool.publish(table, tokens, 0, 3)
    assert pool.match(tokens) == table[:1]
    pool.publish(table, tokens, 3, 5)
    assert pool.match(tokens) == table[:2]


def test_equal_content_is_kept_once() -> None:
    pool, tokens = BlockPool(4, 2), [1, 2, 3, 4]
    first: list[int] = []
    second: list[int] = []
    for table in (first, second):
        pool.reserve(table, 0, 4)
    assert pool.num_free == 0
    for table in (first, second):
        pool.publish(table, tokens, 0, 4)
    assert first == second and pool.num_free == 2
    check_blocks(pool, [first, second])


def test_the_oldest_goes_first_and_ends_before_beginnings() -> None:
    pool = BlockPool(5, 1)
    old, young = computed(pool, [1, 2, 3]), computed(pool, [7, 8])
    pool.free(old)
    pool.free(young)
    for left, number in (([1, 2], 1), ([1], 2), ([], 3)):
        pool.reserve(table := [], 0, 1)
        check_blocks(pool, [table])
        assert len(pool.match([1, 2, 3, 0])) == len(left) and len(pool.match([7, 8, 0])) == 2
        pool.publish(table, [100 + number], 0, 1)  # keeps it from being blank, so that the next one evicts again
        pool.free(table)
    pool.free(pool.fork(pool.match([7, 8, 0])))
    pool.reserve(table := [], 0, 3)
    assert len(pool.match([7, 8, 0])) == 2, "what was used last goes last"


def test_copy_on_write() -> None:
    pool = BlockPool(6, 4)
    table = computed(pool, [1, 2, 3, 4, 5, 6])
    sibling = pool.fork(table)
    assert pool.num_lacking(sibling, 6, 7) == 1
    (copy,) = pool.reserve(sibling, 6, 7)
    assert copy == (table[1], sibling[1]) and sibling[0] == table[0] and sibling[1] != table[1]
    assert pool.num_lacking(table, 6, 7) == 0 and pool.reserve(table, 6, 7) == [], "now nobody else has it"
    check_blocks(pool, [table, sibling])


def test_without_prefix_caching_nothing_is_kept() -> None:
    pool = BlockPool(4, 2, prefix_caching=False)
    table = computed(pool, [1, 2, 3, 4, 5])
    assert pool.match([1, 2, 3, 4, 5]) == []
    pool.free(table)
    assert pool.num_free == 4 and pool.match([1, 2, 3, 4, 5]) == []
    check_blocks(pool, [])


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"num_blocks \(0\)"):
        BlockPool(0, 16)
    with pytest.raises(AssertionError, match="all 2 blocks are in use"):
        BlockPool(2, 1).reserve([], 0, 3)


@given(st.integers(1, 12), st.integers(1, 4), st.integers(0, 2**32))
def test_random_operations(num_blocks: int, block_size: int, seed: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(num_blocks, block_size)
    live: list[tuple[list[int], list[int]]] = []  # table, computed tokens
    for _ in range(40):
        step = rng.choice(["begin", "grow", "grow", "grow", "fork", "free"])
        if step == "begin":
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 12))]
            prefix = pool.match(tokens)
            live.append((pool.fork(prefix), tokens[: len(prefix) * block_size]))
        elif step == "free" and live:
            pool.free(live.pop(rng.randrange(len(live)))[0])
        elif step == "fork" and live:
            table, tokens = rng.choice(live)
            live.append((pool.fork(table), list(tokens)))
        elif step == "grow" and live:
            table, tokens = rng.choice(live)
            start, stop = len(tokens), len(tokens) + rng.randrange(1, 4)
            lacking, free = pool.num_lacking(table, start, stop), pool.num_free
            if lacking <= free:
                pool.reserve(table, start, stop)
                assert pool.num_free == free - lacking
                tokens += [rng.randrange(2) for _ in range(start, stop)]
                pool.publish(table, tokens, start, stop)
                assert pool.match([*tokens, 0])[: len(tokens) // block_size] == table[: len(tokens) // block_size]
        check_blocks(pool, (table for table, _ in live))
    for table, _ in live:
        pool.free(table)
    check_blocks(pool, [])
    assert pool.num_free == num_blocks


def lose_blank(pool: BlockPool) -> None:
    pool._blank.pop()


def free_used(pool: BlockPool) -> None:
    pool._blank.append(0)


def leak(pool: BlockPool) -> None:
    pool._refs[0] += 1


def forget_key(pool: BlockPool) -> None:
    pool._published.popitem()


def reverse_age(pool: BlockPool) -> None:
    pool._idle.move_to_end(next(iter(pool._idle)))


def blank_published(pool: BlockPool) -> None:
    pool._blank.append(pool._idle.popitem()[0])


@pytest.mark.parametrize(
    "harm, message",
    [
        (lose_blank, "has no state, or two"),
        (free_used, "has no state, or two"),
        (leak, "block 0 counts 2 references, tables hold 1"),
        (forget_key, "is not the inverse"),
        (reverse_age, "is evicted before block"),
        (blank_published, "a blank block is published"),
    ],
)
def test_check_sees(harm: Callable[[BlockPool], None], message: str) -> None:
    pool = BlockPool(8, 1)
    table = computed(pool, [1])
    pool.free(computed(pool, [7, 8]))
    check_blocks(pool, [table])
    harm(pool)
    with pytest.raises(AssertionError, match=message):
        check_blocks(pool, [table])


def test_check_sees_tables_that_are_wrong() -> None:
    pool = BlockPool(4, 1)
    table = computed(pool, [1, 2])
    with pytest.raises(AssertionError, match="counts 1 references, tables hold 0"):
        check_blocks(pool, [])
    with pytest.raises(AssertionError, match="counts 1 references, tables hold 2"):
        check_blocks(pool, [table, table])
    with pytest.raises(AssertionError, match="holds a block twice"):
        check_blocks(pool, [table + table])


def test_prefixes_of_one_salt_are_not_found_under_another() -> None:
    pool = BlockPool(8, 2)
    tokens = [1, 2, 3, 4, 5]
    tables = {salt: list[int]() for salt in ("", "a", "b")}
    for salt, table in tables.items():
        assert pool.match(tokens, salt) == []
        pool.reserve(table, 0, 4)
        pool.publish(table, tokens, 0, 4, salt)
    for salt, table in tables.items():
        assert pool.match(tokens, salt) == table
    assert len({block for table in tables.values() for block in table}) == 6, "nobody's blocks are another's"
    check_blocks(pool, tables.values())

"""What always holds of a `BlockPool`, and of those of an engine."""

from collections import Counter
from collections.abc import Iterable, Sequence

from slipstream.inference.blocks import BlockPool
from slipstream.inference.draft_model import DraftModel
from slipstream.inference.engine import Engine


def check_blocks(pool: BlockPool, tables: Iterable[Sequence[int]]) -> None:
    """Raise AssertionError unless the pool's records match `tables`, which must be all tables in use. O(num_blocks)."""
    references: Counter[int] = Counter()
    for table in tables:
        assert len(set(table)) == len(table), f"a table holds a block twice: {list(table)}"
        references.update(table)
    for block, count in enumerate(pool._refs):
        assert count == references[block], f"block {block} counts {count} references, tables hold {references[block]}"
    assert references.total() == sum(pool._refs), f"tables hold blocks beyond the pool's {pool.num_blocks}: {references}"

    used = [block for block, count in enumerate(pool._refs) if count]
    states = f"used {used}, blank {pool._blank}, idle {[*pool._idle]}, published {pool._published}"
    assert sorted([*used, *pool._blank, *pool._idle]) == [*range(pool.num_blocks)], f"a block has no state, or two: {states}"
    assert {block: key for key, block in pool._published.items()} == pool._keys, f"{pool._keys} is not the inverse: {states}"
    assert pool._keys.keys().isdisjoint(pool._blank), f"a blank block is published: {states}"
    assert pool._keys.keys() >= pool._idle.keys(), f"nothing finds an idle block: {states}"
    age = {block: position for position, block in enumerate(pool._idle)}
    for block, (previous, tokens) in pool._keys.items():
        assert len(tokens) == pool.block_size, f"block {block} is published with {len(tokens)} of {pool.block_size} tokens"
        if not isinstance(previous, str):
            assert previous in pool._keys, f"block {block} is published after block {previous}, which is not"
            outlives = previous in used or age.get(block, pool.num_blocks) < age[previous]
            assert outlives, f"block {previous} is evicted before block {block}, which follows it"


def check_engine(engine: Engine) -> None:
    """Raise AssertionError unless every block is accounted for. No step may be running."""
    with engine._lock:
        check_blocks(engine._scheduler.pool, (request.blocks for request in engine._scheduler.running))
        if engine._drafter is not None:
            check_drafts(engine._drafter)


def check_drafts(drafts: DraftModel) -> None:
    check_blocks(drafts._pool, (twin.request.blocks for twin in drafts._twins.values()))

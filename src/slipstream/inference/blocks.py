"""The cache's blocks: who holds which, what is in them, and which goes first when space is needed. No torch.

A block is room for the keys and values of `block_size` consecutive positions, in every layer. A request's *table* lists
its blocks: entry b is for positions b * block_size onward. Tables may share blocks; a block's references are the tables
it is in. Every block is in one of three states:

  blank  no table, no known content
  used   in at least one table
  idle   in no table, but its content is kept and can be found until the space is needed: oldest first

[Note: Finding a prefix]
Once all positions of a block are computed, it is *published*: found from then on under (block before it, its tokens).
The block before stands for everything before, because that one is published too, so equal keys mean equal prefixes;
a dict compares whole keys, so a collision of hashes can serve nothing wrong. Before the first block stands a salt: prefixes of
one salt are not found under another, so that clients can be kept from learning what others have asked. There is never a second
block under a key: who computes the same content again gives its copy back and takes the published block. Therefore a table holds
the predecessors of each of its published blocks, and since `free` lets go of the last block first, an idle block is always older
than its predecessor: the oldest idle block has no successor, and evicting it leaves no key without its block.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

Key = tuple[int | str, tuple[int, ...]]  # the block before, of a first block the salt; and the tokens


class BlockPool:
    """Hands out blocks and takes them back. Every operation is O(1) for each block that it names."""

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks ({num_blocks}) and block_size ({block_size}) have to be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.num_evictions = 0  # published blocks that were forgotten for their space
        self.num_copies = 0  # blocks copied on write
        self._refs = [0] * num_blocks
        self._blank = list(reversed(range(num_blocks)))  # the last one goes first
        self._idle: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._published: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}  # its inverse

    @property
    def num_free(self) -> int:
        """Blocks that can be had: blank ones, and idle ones at the price of their content."""
        return len(self._blank) + len(self._idle)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def num_needed(self, num_tokens: int) -> int:
        """Blocks that hold so many positions."""
        return -(-num_tokens // self.block_size)

    def match(self, tokens: Sequence[int], salt: str = "") -> list[int]:
        """The published blocks that `tokens` begin with, without at least the last token, which is always computed:
        its logits are wanted. Changes nothing; `fork` takes them into a table."""
        size, found = self.block_size, list[int]()
        before: int | str = salt
        for begin in range(0, len(tokens) - size, size):
            block = self._published.get((before, tuple(tokens[begin : begin + size])))
            if block is None:
                break
            found.append(block)
            before = block
        return found

    def fork(self, table: Sequence[int]) -> list[int]:
        """A second table of the same blocks."""
        for block in table:
            self._hold(block)
        return list(table)

    def num_lacking(self, table: Sequence[int], start: int, stop: int) -> int:
        """How many blocks `reserve` would take."""
        first, end = start // self.block_size, self.num_needed(stop)
        return max(0, end - len(table)) + sum(self._refs[block] > 1 for block in table[first:end])

    def reserve(self, table: list[int], start: int, stop: int) -> list[tuple[int, int]]:
        """Make positions [start, stop) of the table writable: no block of them is missing or in another table.
        What is before `start` stays. Needs num_lacking <= num_free. Returns the copies, (from, to), that have to be made
        before anything is written."""
        copies = []
        for index in range(start // self.block_size, self.num_needed(stop)):
            if index == len(table):
                table.append(self._take())
            elif self._refs[shared := table[index]] > 1:
                table[index] = self._take()
                self._drop(shared)
                self.num_copies += 1
                copies.append((shared, table[index]))
        return copies

    def publish(self, table: list[int], tokens: Sequence[int], start: int, stop: int, salt: str = "") -> None:
        """Positions [start, stop) have just been computed, and all before them: publish the blocks that they complete.
        May put another block of equal content into the table (see the note)."""
        if not self.prefix_caching:
            return
        size = self.block_size
        for index in range(start // size, stop // size):
            key = (table[index - 1] if index else salt, tuple(tokens[index * size : (index + 1) * size]))
            mine = table[index]
            table[index] = self._published.setdefault(key, mine)
            if table[index] == mine:
                self._keys[mine] = key
            else:
                self._hold(table[index])
                self._drop(mine)

    def free(self, table: list[int]) -> None:
        """Let go of all of a table's blocks; it is empty afterwards."""
        while table:
            self._drop(table.pop())

    def forget(self) -> None:
        """No content is known any more: what was computed was by other weights. While no block is used."""
        assert self.num_free == self.num_blocks, f"{self.num_blocks - self.num_free} blocks are used: their content is wanted"
        self._blank += self._idle
        for known in (self._idle, self._published, self._keys):
            known.clear()

    def _take(self) -> int:
        assert self.num_free, f"all {self.num_blocks} blocks are used: whoever reserves asks num_free first"
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            del self._published[self._keys.pop(block)]
            self.num_evictions += 1
        self._refs[block] = 1
        return block

    def _hold(self, block: int) -> None:
        if self._refs[block] == 0:
            del self._idle[block]
        self._refs[block] += 1

    def _drop(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            if block in self._keys:
                self._idle[block] = None
            else:
                self._blank.append(block)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the pool's books are right, given all tables that there are. O(num_blocks)."""
        references: Counter[int] = Counter()
        for table in tables:
            _check(len(set(table)) == len(table), f"a table holds a block twice: {list(table)}")
            references.update(table)
        for block, counted in enumerate(self._refs):
            _check(counted == references[block], f"block {block} counts {counted} references, tables hold {references[block]}")
        _check(references.total() == sum(self._refs), f"tables hold blocks beyond the pool's {self.num_blocks}: {references}")

        used = {block for block, counted in enumerate(self._refs) if counted}
        states = Counter([*used, *self._blank, *self._idle])
        groups = {"used": used, "blank": set(self._blank), "idle": set(self._idle)}
        for block in range(self.num_blocks):
            where = [name for name, group in groups.items() if block in group]
            _check(states[block] == 1, f"block {block} is {' and '.join(where) or 'lost: neither used, blank nor idle'}")
            _check(where != ["blank"] or block not in self._keys, f"block {block} is blank, and yet published")
            _check(where != ["idle"] or block in self._keys, f"block {block} is idle, and nothing finds it")
        _check(states.total() == self.num_blocks, f"the pool of {self.num_blocks} blocks lists {states.total()}: {states}")

        inverse = {block: key for key, block in self._published.items()}
        _check(inverse == self._keys, f"keys by block {self._keys} are not the inverse of blocks by key {self._published}")
        age = {block: position for position, block in enumerate(self._idle)}
        for block, (before, tokens) in self._keys.items():
            _check(len(tokens) == self.block_size, f"block {block} is published with {len(tokens)} of {self.block_size} tokens")
            if not isinstance(before, str):
                _check(before in self._keys, f"block {block} is published after block {before}, which is not")
                _check(block in age or before in used, f"block {block} is used, block {before} before it is not")
                _check(before in used or age[block] < age[before], f"block {before} is evicted before block {block} after it")


def _check(right: bool, otherwise: str) -> None:
    if not right:
        raise AssertionError(otherwise)
